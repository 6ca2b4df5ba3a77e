"""Generates the trace rows that the ranks of a pipeline would write in a simulated step.

Times are in nanoseconds from the start of the step. Peers are pipeline ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from megatron.adaptive.schedule.action import place_of
from megatron.adaptive.schedule.policy import Policy, reasons_of
from megatron.adaptive.schedule.rank_kernel import B, F
from megatron.adaptive.schedule.simulate import SimResult
from megatron.adaptive.trace.span_columns import KIND, REASON, Ints
from megatron.adaptive.trace.trace_format import COLUMNS

SEND_NS = 5_000
"""Time to pass a message to the transport, in nanoseconds."""

MESSAGE_BYTES = 4 << 20
ACTIVATION_BYTES = 64 << 20
"""Size of the activations that a forward pass stores, in bytes."""

PS_PER_NS = 1000
Place = tuple[int, int, int]
"""Identifies an action by its kind (F or B), its stage and its microbatch."""
_USUAL = {"chunk": -1, "microbatch": -1, "peer": -1, "of": -1}


def step_rows(result: SimResult, policies: Sequence[Policy], *, data_ns: Ints) -> list[Ints]:
    """Returns an ``[spans, 12] int64`` array of trace rows for each rank.

    Args:
        result: Simulated step.
        policies: Policies that chose the order of the actions, by rank.
        data_ns: Time to load each microbatch on the first stage in nanoseconds, ``[microbatches]``.
    """
    step = _Step(result)
    return [
        np.array(step.rows(rank, policies[rank], data_ns.tolist()), dtype=np.int64)
        for rank in range(result.placement.num_ranks)
    ]


def _row(kind: str, start_ns: int, end_ns: int, **columns: int) -> tuple[int, ...]:
    values = {**_USUAL, "start_ns": start_ns, "duration_ns": end_ns, **columns}
    return (KIND[kind], *(values.get(name, 0) for name in COLUMNS[1:]))


class _Step:
    """Computes the times of all actions and messages in a step, and generates trace rows."""

    def __init__(self, result: SimResult) -> None:
        self._result = result
        self._placement = placement = result.placement
        self._rank_of = [placement.locate(stage)[0] for stage in range(placement.num_stages)]
        self._times: dict[Place, tuple[int, int]] = {}
        self._actions = [self._of_rank(rank) for rank in range(placement.num_ranks)]
        # Each message waits until its link is free, occupies the link for some time, and arrives
        # after an additional delay.
        self._messages: dict[Place, tuple[int, int]] = {}
        work, free_ns = result.workload, dict[tuple[int, int], int]()
        delays_ns, busy_ns = work.delays_ps // PS_PER_NS, work.occupancy_ps // PS_PER_NS
        for (kind, stage, microbatch), (_, end) in sorted(
            self._times.items(), key=lambda item: item[1][1]
        ):
            to = self._onward(kind, stage)
            if to is None:
                continue
            link = self._rank_of[stage], self._rank_of[to]
            free_ns[link] = max(end, free_ns.get(link, 0)) + int(busy_ns[link])
            arrived = free_ns[link] + int(delays_ns[kind, stage, microbatch])
            self._messages[kind, to, microbatch] = link[0], arrived
        self._messages = dict(sorted(self._messages.items(), key=lambda item: item[1][1]))

    def _onward(self, kind: int, stage: int) -> int | None:
        """Returns the stage on another rank that receives the result of ``stage``, or ``None``."""
        to = stage + (1 if kind == F else -1)
        is_message = 0 <= to < len(self._rank_of) and self._rank_of[to] != self._rank_of[stage]
        return to if is_message else None

    def _of_rank(self, rank: int) -> list[tuple[int, int, int, int, int, int]]:
        """Returns (kind, chunk, microbatch, piece, start, end) for each action of ``rank``."""
        result = self._result
        actions = []
        for action, start_ps, end_ps in zip(
            result.orders[rank],
            result.starts_ps[rank].tolist(),
            result.ends_ps[rank].tolist(),
            strict=True,
        ):
            kind, times = KIND[action.kind.value], (start_ps // PS_PER_NS, end_ps // PS_PER_NS)
            actions.append((kind, action.chunk, action.microbatch, action.piece, *times))
            if kind in (F, B):
                stage = self._placement.stage_of(rank, action.chunk)
                self._times[kind, stage, action.microbatch] = times
        return actions

    def rows(self, rank: int, policy: Policy, data_ns: Sequence[int]) -> list[tuple[int, ...]]:
        """Returns the trace rows of ``rank``: data loading, waits, receives, sends and actions.

        ``policy`` chose the actions. ``data_ns`` contains the time to load each microbatch, in ns.
        """
        placement, reasons = self._placement, REASON
        data, waits, actions = [], [], []
        receives = [
            _row(
                "receive",
                arrived,
                self._times[kind, stage, microbatch][0],
                chunk=placement.locate(stage)[1],
                microbatch=microbatch,
                bytes=MESSAGE_BYTES,
                peer=source,
                of=kind,
                reason=reasons["seen"],
            )
            for (kind, stage, microbatch), (source, arrived) in self._messages.items()
            if self._rank_of[stage] == rank
        ]
        sends = []
        for (kind, stage, microbatch), (source, arrived) in self._messages.items():
            if source == rank:
                done = self._times[kind, stage - (1 if kind == F else -1), microbatch][1]
                handed = min(done + SEND_NS, max(done, arrived))
                sends.append(
                    _row(
                        "send",
                        done,
                        handed,
                        chunk=placement.locate(stage)[1],
                        microbatch=microbatch,
                        bytes=MESSAGE_BYTES,
                        peer=self._rank_of[stage],
                        of=kind,
                    )
                )
        inbox = [row[COLUMNS.index("start_ns")] for row in receives]
        taken = sorted(row[COLUMNS.index("duration_ns")] for row in receives)
        wait_reasons = reasons_of(policy, self._result.codes[rank].tolist(), placement.num_chunks)
        free = held = 0
        for (kind, chunk, microbatch, piece, start, end), word in zip(
            self._actions[rank], wait_reasons, strict=True
        ):
            stage = placement.stage_of(rank, chunk)
            action = {"chunk": chunk, "microbatch": microbatch, "piece": piece}
            source, arrived = self._messages.get((kind, stage, microbatch), (-1, -1))
            if start > free:
                # If an action starts when its input arrives, the rank has waited for this input.
                cause = "input" if source >= 0 and arrived >= start - 2 else "order"
                if kind == F and cause != "input":
                    cause = "memory"
                more = {"peer": source, "of": kind, "reason": reasons[cause]}
                waits.append(_row("wait", free, start, **action, **more))
            position = place_of(microbatch, self._result.workload.num_slices)
            if kind == F and stage == 0 and position.part == 0:
                read = min(start + data_ns[position.microbatch], end)
                data.append(_row("data", start, read, microbatch=position.microbatch))
            went = kind in (F, B) and self._onward(kind, stage) is not None
            held += kind == F
            actions.append(
                _row(
                    "FBW"[kind],
                    start,
                    end,
                    **action,
                    bytes=MESSAGE_BYTES * ((source >= 0) + went),
                    in_flight_bytes=ACTIVATION_BYTES * held,
                    queue_depth=max(0, bisect_right(inbox, start) - bisect_right(taken, start)),
                    reason=reasons[word],
                )
            )
            held -= kind == B
            free = end
        return data + waits + receives + sends + actions
