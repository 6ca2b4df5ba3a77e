"""Measures two microbatch sizes for the planner, on two processes at the same time.

::

    rank 0   record 1   measure 1   record 4 (both modes) ────────> gather
    rank 1   record 4   measure 4 ────────────────────────────────> gather
    others   record 4, if each rank has processors of its own ────> gather

In this example, the sizes are 1 and 4 samples. If rank 0 measured both sizes, all other ranks would
wait for it. Ranks also record the forward pass with the largest size in advance, because the
planner usually chooses this size. Rank 0 records training and evaluation mode, and the other ranks
record only training mode.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.adaptive.engine.process_context import Job
from megatron.adaptive.modules.fake_recording import is_on_meta
from megatron.adaptive.modules.recordings import segment_work
from megatron.adaptive.modules.segments import SegmentSample
from megatron.adaptive.modules.tape import Tape

_MOST_WORK = 2e11
"""Maximum number of multiplications in a microbatch that is measured before the speed of the device
is known. A slow processor core runs them in a few seconds.
"""
_MEMORY_FACTOR = 3.0
"""Estimated memory for measuring a microbatch, divided by the total size of all values that the
forward pass computes.
"""

Measured = tuple[Tape, list[SegmentSample]]
"""Recorded forward pass, and the costs of its segments."""


@dataclass(kw_only=True)
class EarlySamples:
    """Contains the measurements that two processes made at the same time.

    Attributes:
        is_measured: Whether this rank measured the smallest microbatch.
        smallest: Measurement of the smallest microbatch; ``None`` if it does not fit in memory.
        error: Error raised while measuring the smallest microbatch; ``None`` if there was none.
        largest: Costs of the segments for the largest microbatch; ``None`` if they were not
            measured.
    """

    is_measured: bool = False
    smallest: Measured | None = None
    error: Exception | None = None
    largest: list[SegmentSample] | None = None


def node_processors() -> dict[str, Any]:
    """Returns this rank's thread count and processors.

    :func:`measured_early` needs these two entries for each rank in its argument ``nodes``.
    """
    return {"threads": torch.get_num_threads(), "processors": sorted(os.sched_getaffinity(0))}


def recorded_bytes(tape: Tape) -> int:
    """Returns the total size, in bytes, of the values that a recorded forward pass computes."""
    return sum(
        math.prod(value.shape) * value.dtype.itemsize for value in tape.values if not value.source
    )


def is_cheap(tape: Tape, room_bytes: float) -> bool:
    """Returns whether a microbatch can be measured early, before all smaller microbatches.

    Its estimated time and memory must be small. They are estimated from the recorded calls.

    Args:
        tape: Forward pass of a model on the ``meta`` device, in training mode.
        room_bytes: Available memory, in bytes.
    """
    # Segments that make the same calls have the same amount of work, but only one of them is
    # measured. Therefore, set() keeps each amount only once.
    needed = sum(set(segment_work(tape)))
    return needed <= _MOST_WORK and _MEMORY_FACTOR * recorded_bytes(tape) <= room_bytes


def measured_early(
    model: torch.nn.Module,
    job: Job,
    nodes: Sequence[Mapping[str, Any]],
    *,
    smallest: Callable[[], Measured | None],
    largest: Callable[[], list[SegmentSample] | None],
    record: Callable[[], None],
) -> EarlySamples:
    """Measures microbatches on the first rank of each device type and on a helper rank.

    All ranks must call this. The helper is a second rank with the same type of device. It measures
    the largest microbatch while the first rank measures the smallest.

    This function measures only models on the ``meta`` device, because recording any other model
    needs memory for all values of the forward pass.

    Args:
        model: Model to measure.
        job: Job that all ranks have joined.
        nodes: Type of device, memory and processors of each rank.
        smallest: Function that measures the smallest microbatch.
        largest: Function that measures the largest microbatch if it is cheap. Its errors are
            ignored, because the first rank measures the microbatch again and reports them.
        record: Function that records the largest microbatch.

    Returns:
        Measurements of both ranks, on the first rank of each device type. Other ranks get an object
            without measurements.
    """
    helpers = helpers_of(nodes) if is_on_meta(model) else {}
    if not helpers:
        return EarlySamples()
    early = EarlySamples()
    rows: list[SegmentSample] | None = None
    if job.rank in helpers.values():
        with contextlib.suppress(Exception):
            rows = largest()
    elif job.rank in helpers:
        early.is_measured = True
        try:
            early.smallest = smallest()
        except Exception as error:
            # Store the error for the caller instead of raising it, because other ranks wait in
            # gather().
            early.error = error
    may_record = job.rank in helpers or _have_processors(nodes, job.rank)
    if job.rank not in helpers.values() and early.error is None and may_record:
        # Ignore errors here. They are reported when the sample batch is recorded again.
        with contextlib.suppress(Exception):
            record()
    gathered = job.gather(rows)
    if job.rank in helpers:
        early.largest = gathered[helpers[job.rank]]
    return early


def helpers_of(nodes: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Returns a dict that maps the first rank of each device type to its helper.

    The two ranks measure at the same time. A rank with a GPU has no helper, because measurements on
    a GPU are fast. A rank that would have to share processors with its helper has none either.

    Args:
        nodes: Type of device, memory and processors of each rank.
    """
    helpers = {}
    for gpu in dict.fromkeys(node["facts"]["gpu"] for node in nodes):
        ranks = [rank for rank, node in enumerate(nodes) if node["facts"]["gpu"] == gpu]
        pair = [nodes[rank] for rank in ranks[:2]]
        if len(pair) == 2 and pair[0]["shares_memory"] and _can_compute_together(pair):
            helpers[ranks[0]] = ranks[1]
    return helpers


def _have_processors(nodes: Sequence[Mapping[str, Any]], rank: int) -> bool:
    """Returns whether the machine of ``rank`` has enough processors for all ranks on it.

    Args:
        nodes: Type of device, memory and processors of each rank.
        rank: Any rank of the job.
    """
    machine = nodes[rank]["machine"]
    return _can_compute_together([node for node in nodes if node["machine"] == machine])


def _can_compute_together(nodes: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether each machine has a processor for every thread of the ranks in ``nodes``.

    Args:
        nodes: Type of device, memory and processors of the ranks.
    """
    by_machine: dict[str, list[Mapping[str, Any]]] = {}
    for node in nodes:
        by_machine.setdefault(node["machine"], []).append(node)
    return all(
        sum(node["threads"] for node in local)
        <= len({processor for node in local for processor in node["processors"]})
        for local in by_machine.values()
    )
