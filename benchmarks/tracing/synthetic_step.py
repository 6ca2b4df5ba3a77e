"""The rows that the ranks of a pipeline would have recorded of a simulated step.

Times are nanoseconds from the start of the step; peers are positions in the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron.adaptive.schedule.machine import B, F
from megatron.adaptive.schedule.policy import Policy, reasons_of
from megatron.adaptive.schedule.simulate import SimResult
from megatron.adaptive.trace.event import COLUMNS
from megatron.adaptive.trace.table import KIND, REASON, Ints

__all__ = ["step_rows"]

SEND_NS = 5_000
"""Time to hand a message to the transport."""

MESSAGE_BYTES = 4 << 20
ACTIVATION_BYTES = 64 << 20
"""Kept by a forward."""

PS_PER_NS = 1000
_NEVER = -1


def step_rows(
    result: SimResult,
    policies: Sequence[Policy],
    *,
    data_ns: Ints,
) -> list[Ints]:
    """Make the rows of each rank.

    Args:
        result: the simulated step.
        policies: what chose its order, by rank.
        data_ns: ``[microbatches]``, how much of the first stage's forwards is reading.

    Returns:
        Per rank ``[spans, 12] int64``, rows as ``event.Row`` has them.
    """
    step = _Step(result)
    return [
        np.concatenate(
            [
                _data(step, rank, data_ns),
                _waits(step, rank),
                _receives(step, rank),
                _sends(step, rank),
                _actions(step, rank, policies[rank]),
            ]
        )
        for rank in range(result.placement.num_ranks)
    ]


class _Step:
    """Holds the times of events, by rank and by ``[F or B][stage][microbatch]``."""

    def __init__(self, result: SimResult) -> None:
        self.result = result
        placement = result.placement
        self.num_chunks = placement.num_chunks
        stages = range(placement.num_stages)
        self.rank_of = np.array([placement.locate(stage)[0] for stage in stages])
        self.chunk_of = np.array([placement.locate(stage)[1] for stage in stages])
        self.stage_of = np.array(
            [
                [placement.stage_of(rank, chunk) for chunk in range(placement.num_chunks)]
                for rank in range(placement.num_ranks)
            ]
        )
        shape = (2, placement.num_stages, result.num_microbatches)
        self.starts, self.ends = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.actions = [self._actions(rank) for rank in range(placement.num_ranks)]
        self.arrivals = np.full(shape, _NEVER, dtype=np.int64)
        self.sources = np.full(shape, -1, dtype=np.int64)
        self._send()

    def _actions(self, rank: int) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints]:
        """Kind, chunk, microbatch, piece, start and end of a rank's actions; fills the tables."""
        codes = self.result.codes[rank]
        kind, chunk = np.divmod(codes, self.num_chunks)
        order = np.argsort(codes, kind="stable")
        counts = np.bincount(codes)
        index = np.empty(len(codes), dtype=np.int64)
        index[order] = np.arange(len(codes)) - np.repeat(np.cumsum(counts) - counts, counts)
        pieces = np.where(kind == KIND["W"], max(1, self.result.weight_pieces), 1)
        microbatch, piece = np.divmod(index, pieces)
        start = self.result.starts_ps[rank] // PS_PER_NS
        end = self.result.ends_ps[rank] // PS_PER_NS
        messages = kind <= B
        place = (kind[messages], self.stage_of[rank][chunk[messages]], microbatch[messages])
        self.starts[place], self.ends[place] = start[messages], end[messages]
        return kind, chunk, microbatch, piece, start, end

    def _send(self) -> None:
        """Let every message wait for its link, take its time on it, and travel."""
        work, stages = self.result.workload, len(self.rank_of)
        by_link: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for kind, step in ((F, 1), (B, -1)):
            for stage in range(stages):
                if 0 <= stage + step < stages:
                    link = (int(self.rank_of[stage]), int(self.rank_of[stage + step]))
                    if link[0] != link[1]:
                        by_link.setdefault(link, []).append((kind, stage, stage + step))
        for (source, target), parts in by_link.items():
            ends = np.concatenate([self.ends[kind, stage] for kind, stage, _ in parts])
            delays = np.concatenate([work.delays_ps[kind, stage] for kind, stage, _ in parts])
            busy = int(work.occupancy_ps[source, target]) // PS_PER_NS
            order = np.argsort(ends, kind="stable")
            turn = np.arange(len(ends))
            left = np.empty_like(ends)
            left[order] = np.maximum.accumulate(ends[order] - turn * busy) + (turn + 1) * busy
            arrived = np.split(left + delays // PS_PER_NS, len(parts))
            for (kind, _, to), times in zip(parts, arrived, strict=True):
                self.arrivals[kind, to] = times
                self.sources[kind, to] = source


def _rows(count: int, kind: str, **columns: Ints | int) -> Ints:
    """Rows of one kind; columns that are not given say nothing."""
    rows = np.zeros((count, len(COLUMNS)), dtype=np.int64)
    rows[:, COLUMNS.index("kind")] = KIND[kind]
    for name in ("chunk", "microbatch", "peer", "of"):
        rows[:, COLUMNS.index(name)] = -1
    for name, values in columns.items():
        rows[:, COLUMNS.index("duration_ns" if name == "end_ns" else name)] = values
    return rows


def _actions(step: _Step, rank: int, policy: Policy) -> Ints:
    kind, chunk, microbatch, piece, start, end = step.actions[rank]
    stage = step.stage_of[rank][chunk]
    is_message = kind <= B
    flow = np.where(is_message, kind, 0)
    came = is_message & (step.sources[flow, stage, microbatch] >= 0)
    onward = stage + np.where(kind == F, 1, -1)
    exists = is_message & (onward >= 0) & (onward < len(step.rank_of))
    went = exists & (step.rank_of[np.where(exists, onward, 0)] != rank)
    mine = step.rank_of == rank
    inbox = np.sort(step.arrivals[:, mine][step.sources[:, mine] >= 0])
    taken = np.sort(step.starts[:, mine][step.sources[:, mine] >= 0])
    held = np.cumsum(np.where(kind == F, 1, np.where(kind == B, -1, 0))) + (kind == B)
    words = reasons_of(policy, step.result.codes[rank].tolist(), step.num_chunks)
    rows = _rows(
        len(kind),
        "F",
        chunk=chunk,
        microbatch=microbatch,
        piece=piece,
        start_ns=start,
        end_ns=end,
        bytes=MESSAGE_BYTES * (came.astype(np.int64) + went),
        in_flight_bytes=ACTIVATION_BYTES * held,
        queue_depth=np.maximum(
            0, np.searchsorted(inbox, start, "right") - np.searchsorted(taken, start, "right")
        ),
        reason=np.array([REASON[word] for word in words], dtype=np.int64),
    )
    rows[:, COLUMNS.index("kind")] = kind  # the simulator numbers F, B and W alike
    return rows


def _waits(step: _Step, rank: int) -> Ints:
    """The gaps before actions, put down to their inputs where these came in time for nothing."""
    kind, chunk, microbatch, piece, start, _ = step.actions[rank]
    free = np.concatenate([[0], step.actions[rank][5][:-1]])
    gap = np.flatnonzero(start > free)
    kind, microbatch = kind[gap], microbatch[gap]
    stage = step.stage_of[rank][chunk[gap]]
    flow = np.where(kind <= B, kind, 0)
    source = np.where(kind <= B, step.sources[flow, stage, microbatch], -1)
    late = (source >= 0) & (step.arrivals[flow, stage, microbatch] >= start[gap] - 2)
    cause = np.where(late, REASON["input"], np.where(kind == F, REASON["memory"], REASON["order"]))
    return _rows(
        len(gap),
        "wait",
        chunk=chunk[gap],
        microbatch=microbatch,
        piece=piece[gap],
        start_ns=free[gap],
        end_ns=start[gap],
        peer=source,
        of=kind,
        reason=cause,
    )


def _messages(step: _Step, stages: Ints) -> tuple[Ints, Ints, Ints]:
    """Kind, stage and microbatch of the messages to some stages, in order of arrival."""
    flow, stage, microbatch = np.nonzero(step.sources >= 0)
    chosen = np.isin(stage, stages)
    flow, stage, microbatch = flow[chosen], stage[chosen], microbatch[chosen]
    order = np.argsort(step.arrivals[flow, stage, microbatch], kind="stable")
    return flow[order], stage[order], microbatch[order]


def _receives(step: _Step, rank: int) -> Ints:
    place = _messages(step, np.flatnonzero(step.rank_of == rank))
    flow, stage, microbatch = place
    return _rows(
        len(flow),
        "receive",
        chunk=step.chunk_of[stage],
        microbatch=microbatch,
        start_ns=step.arrivals[place],
        end_ns=step.starts[place],
        bytes=MESSAGE_BYTES,
        peer=step.sources[place],
        of=flow,
        reason=REASON["seen"],
    )


def _sends(step: _Step, rank: int) -> Ints:
    flow, stage, microbatch = _messages(step, np.arange(len(step.rank_of)))
    mine = step.sources[flow, stage, microbatch] == rank
    flow, stage, microbatch = flow[mine], stage[mine], microbatch[mine]
    done = step.ends[flow, stage - np.where(flow == F, 1, -1), microbatch]
    arrived = step.arrivals[flow, stage, microbatch]
    return _rows(
        len(flow),
        "send",
        chunk=step.chunk_of[stage],
        microbatch=microbatch,
        start_ns=done,
        end_ns=np.minimum(done + SEND_NS, np.maximum(done, arrived)),
        bytes=MESSAGE_BYTES,
        peer=step.rank_of[stage],
        of=flow,
    )


def _data(step: _Step, rank: int, data_ns: Ints) -> Ints:
    """Returns the reads of the first stage within its forwards."""
    if step.rank_of[0] != rank:
        return _rows(0, "data")
    start = step.starts[F, 0]
    return _rows(
        len(data_ns),
        "data",
        microbatch=np.arange(len(data_ns)),
        start_ns=start,
        end_ns=np.minimum(start + data_ns, step.ends[F, 0]),
    )
