"""Provides a table with the operations of a synthetic 1F1B job with replicas and an optimizer."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

Table = dict[str, Any]
FORWARD_S, BACKWARD_S, TRANSFER_S = 1.0, 2.0, 0.01
REDUCE_S, CLIP_S, OPTIMIZER_S = 0.3, 0.05, 0.1


def order_of(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """Returns the actions of ``stage`` in 1F1B order, as pairs of kind (F or B) and microbatch."""
    warm = min(stages - 1 - stage, microbatches)
    done: list[tuple[str, int]] = [("F", m) for m in range(warm)]
    for m in range(warm, microbatches):
        done += [("F", m), ("B", m - warm)]
    return done + [("B", m) for m in range(microbatches - warm, microbatches)]


def job(
    replicas: int = 2,
    stages: int = 3,
    microbatches: int = 4,
    steps: Sequence[int] = (5, 6),
    takes: Callable[[int, int, int, int], float] = lambda step, replica, stage, microbatch: 1.0,
    transfer: Callable[[str, int, int, int], float] = lambda way, replica, stage, m: TRANSFER_S,
    extra: Sequence[tuple[str, float]] = (),
) -> Table:
    """Simulates a job that runs the 1F1B schedule, and returns the table of its operations.

    Messages are sent immediately. A rank starts to wait for a message as soon as the rank is idle.

    Args:
        replicas: Number of data-parallel replicas.
        stages: Number of stages, each on one rank per replica. The rank is stage * replicas +
            replica.
        microbatches: Number of microbatches per replica.
        steps: Numbers of the steps.
        takes: Function that takes a step, replica, stage and microbatch. Returns the factor by
            which the forward and backward times are multiplied.
        transfer: Function that takes a direction, replica, receiving stage and microbatch. Returns
            the duration of the message in seconds.
        extra: Additional operations on rank 0 in each step, as pairs of kind and duration in
            seconds.
    """
    names = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id")
    names += ("mc", "mb_id", "gmc")
    rows: list[tuple[Any, ...]] = []
    for step in steps:
        ends: dict[tuple[str, int, int, int], float] = {}
        free: dict[tuple[int, int], float] = {}
        for replica in range(replicas):
            orders = [order_of(s, stages, microbatches) for s in range(stages)]
            position, now = [0] * stages, [0.0] * stages
            seq: dict[tuple[int, str], int] = {}

            def add(
                stage: int,
                kind: str,
                start: float,
                end: float,
                m: int = -1,
                replica: int = replica,
                seq: dict[tuple[int, str], int] = seq,
                step: int = step,
            ) -> None:
                number = seq[stage, kind] = seq.get((stage, kind), -1) + 1
                compute = kind.endswith("compute")
                rows.append(
                    (
                        *(replica, stage, stage * replicas + replica, step, kind, start),
                        *(end - start, number, 0, m, stage if compute else -1),
                    )
                )

            while any(position[s] < len(orders[s]) for s in range(stages)):
                for stage in range(stages):
                    while position[stage] < len(orders[stage]):
                        kind, m = orders[stage][position[stage]]
                        way, source = (
                            ("forward", stage - 1) if kind == "F" else ("backward", stage + 1)
                        )
                        begin = now[stage]
                        if 0 <= source < stages:
                            made = ends.get((kind, replica, source, m))
                            if made is None:
                                break
                            length = transfer(way, replica, stage, m)
                            # A receive starts when the receiver is idle or when the data is
                            # available, whichever is earlier.
                            posted = min(begin, made)
                            add(source, f"{way}-send", made, made + length)
                            add(stage, f"{way}-recv", posted, made + length)
                            begin = max(begin, made + length)
                        base = FORWARD_S if kind == "F" else BACKWARD_S
                        end = begin + base * takes(step, replica, stage, m)
                        add(stage, f"{way}-compute", begin, end, m)
                        ends[kind, replica, stage, m] = now[stage] = end
                        position[stage] += 1
            for stage in range(stages):
                free[replica, stage] = now[stage]
        for kind, length, group in (
            ("grads-reduce-scatter", REDUCE_S, "stage"),
            ("optimizer-clip-main-grad", CLIP_S, "all"),
            ("optimizer", OPTIMIZER_S, ""),
        ):
            begun = dict(free)
            for (replica, stage), start in begun.items():
                members = {
                    "stage": [t for (_, s), t in begun.items() if s == stage],
                    "all": list(begun.values()),
                    "": [start],
                }[group]
                free[replica, stage] = end = max(members) + length
                rank = stage * replicas + replica
                rows.append((replica, stage, rank, step, kind, start, end - start, 0, -1, -1, -1))
        for kind, length in extra:
            rows.append((0, 0, 0, step, kind, 0.0, length, 0, -1, -1, -1))
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    return dict(zip(names, columns, strict=True))


@pytest.fixture
def make_job() -> Callable[..., Table]:
    """Returns the function :func:`job`, which simulates a job and returns its table."""
    return job
