"""Tries interleaved schedules beside what the search proves for 1F1B."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.adaptive.planner.chunks import Chunked, first_cuts, improve_chunks
from megatron.adaptive.planner.classes import StageClass
from megatron.adaptive.planner.cluster import Cluster
from megatron.adaptive.planner.memory import in_flight
from megatron.adaptive.planner.model import Model
from megatron.adaptive.planner.shapes import Choice, Tables
from megatron.adaptive.planner.timing import steps_of

__all__ = ["Candidate", "candidates", "interleave"]

_MOST_CHUNKS = 8


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An interleaved pipeline without its partition.

    Attributes:
        classes: the classes of its shape.
        choice: what all stages share.
        ranks: class of each pipeline rank, by number.
        chunks: of each rank.
        guess_s: seconds if work were divided evenly.
    """

    classes: tuple[StageClass, ...]
    choice: Choice
    ranks: tuple[int, ...]
    chunks: int
    guess_s: float


def candidates(
    classes: tuple[StageClass, ...],
    choice: Choice,
    tables: Tables,
    model: Model,
    cluster: Cluster,
) -> Iterator[Candidate]:
    """Interleaved pipelines on all nodes, equal nodes side by side, in every order of types."""
    if model.splits:
        return
    speeds = []
    for one in classes:
        work = []
        for node in tables.types(one):
            table = tables.layers(node, one, choice)
            work.append(float((table.forward_s + table.backward_s + table.weight_s).sum()))
        speeds.append(1 / max(*work, 1e-30))
    for ranks in _orders(classes, cluster):
        pp = len(ranks)
        if pp < 2 or choice.microbatches % pp:
            continue
        share = 1 / sum(speeds[c] for c in ranks)
        for chunks in range(2, min(_MOST_CHUNKS, model.num_layers // pp) + 1):
            guess = (choice.microbatches + (pp - 1) / chunks) * share
            yield Candidate(
                classes=classes, choice=choice, ranks=ranks, chunks=chunks, guess_s=guess
            )


def _orders(classes: Sequence[StageClass], cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Classes of the ranks of pipelines on all nodes."""
    runs = []
    for index, group in enumerate(cluster.groups):
        own = [
            c
            for c, one in enumerate(classes)
            if one.nodes[index] and sum(one.nodes) == one.nodes[index]
        ]
        if not own or group.count % classes[own[0]].nodes[index]:
            return
        one = classes[own[0]]
        runs.append([own[0]] * (group.count // one.nodes[index] * one.block))
    if len(runs) > 4:
        yield tuple(itertools.chain(*runs))
        return
    for order in itertools.permutations(runs):
        yield tuple(itertools.chain(*order))


def interleave(one: Candidate, tables: Tables, most: int) -> tuple[float, tuple[int, ...], int]:
    """Find a partition for an interleaved pipeline.

    Args:
        one: the pipeline.
        tables: for the arrays.
        most: pipelines to time at most.

    Returns:
        Seconds of a step, infinite where nothing fits; where the stages begin; pipelines timed.
    """
    arrays: dict[str, Any] = tables.arrays(one.classes, one.choice)
    pp, m = len(one.ranks), one.choice.microbatches
    kinds, left = [], 0
    for rank in range(pp):
        left = (left or one.classes[one.ranks[rank]].block) - 1
        kinds.append(1 if left else 0)
    if pp == one.classes[one.ranks[0]].block:
        kinds[-1] = 1
    names = ("forward", "backward", "launch", "after", "base", "kept", "latency", "occupancy")
    pipeline = Chunked(
        **{name: arrays[name] for name in names},
        rows=steps_of("interleaved", pp, one.chunks, m).rows,
        classes=np.array(one.ranks, dtype=np.int64),
        kinds=np.array(kinds, dtype=np.int64),
        held=np.array(in_flight("interleaved", pp, one.chunks, m), dtype=np.float64),
        microbatches=m,
    )
    cuts = first_cuts(pipeline, one.chunks)
    seconds, timed = improve_chunks(pipeline, cuts, most)
    inside = 1 if all(kinds[:-1]) else 0
    return (
        seconds + float(arrays["tied"][inside, one.ranks[0], one.ranks[-1]]),
        tuple(cuts.tolist()),
        timed,
    )
