"""The same step once more in the simulator: what it would have been had nothing been uneven.

Every rank follows the order in which it really ran its actions; every action takes the mean time of
its kind on its stage, every message the median of those measured. Where the measured step is
longer than this one, single actions or messages were late.
"""

from __future__ import annotations

import numpy as np

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.placement import Placement, PlacementKind
from megatron.adaptive.schedule.policy import Follow
from megatron.adaptive.schedule.simulate import SimResult, StageTimes, simulate
from megatron.adaptive.trace.event import DRAWN_ACTIONS
from megatron.adaptive.trace.messages import Messages
from megatron.adaptive.trace.table import KIND, TraceTable

__all__ = ["MAX_ACTIONS", "replay"]

MAX_ACTIONS = 40_000
"""Steps of more actions are not simulated: a page waits some seconds for so many."""

NS_PER_S = 1_000_000_000
_PLACEMENTS: dict[str, PlacementKind] = {"loop": "loop", "v": "v", "V": "v"}


def replay(
    tables: list[TraceTable], messages: Messages, placement: str, num_chunks: int, microbatches: int
) -> SimResult | None:
    """Simulate a measured step with its own order and mean times.

    Args:
        tables: spans of the iteration by pipeline rank.
        messages: those between these ranks.
        placement: how stages lie on ranks and chunks.
        num_chunks: chunks per rank.
        microbatches: of the step.

    Returns:
        The simulated step; ``None`` where the trace does not hold all of it, where its placement is
        unknown here, or where it is larger than :data:`MAX_ACTIONS`.
    """
    kind = _PLACEMENTS.get(placement)
    actions = [_in_order(table) for table in tables]
    if kind is None or not 0 < sum(map(len, actions)) <= MAX_ACTIONS:
        return None
    place = Placement(num_ranks=len(tables), num_chunks=num_chunks, kind=kind)
    pieces = max(
        (int(a.piece[a.kind == KIND["W"]].max(initial=-1)) + 1 for a in actions), default=0
    )
    policies = [Follow(_order(table), "measured order") for table in actions]
    seen = messages.arrived_ns[messages.seen] - messages.sent_ns[messages.seen]
    latency_s = max(0.0, float(np.median(seen)) / NS_PER_S) if len(seen) else 0.0
    try:
        return simulate(
            place,
            microbatches,
            policies,
            _times(actions, place, pieces),
            latency_s=latency_s,
            forward_only=not any((table.kind == KIND["B"]).any() for table in actions),
            weight_pieces=pieces,
        )
    except ScheduleError:
        return None  # a rank's trace lacks an action, so its order cannot be followed


def _in_order(table: TraceTable) -> TraceTable:
    drawn = table.of_kind(*DRAWN_ACTIONS)
    return drawn.take(np.argsort(drawn.start_ns, kind="stable"))


def _order(table: TraceTable) -> list[Action]:
    columns = (table.kind, table.chunk, table.microbatch, table.piece)
    return [
        Action(ActionKind(DRAWN_ACTIONS[kind]), chunk, microbatch, piece)
        for kind, chunk, microbatch, piece in zip(*(c.tolist() for c in columns), strict=True)
    ]


def _times(actions: list[TraceTable], place: Placement, pieces: int) -> StageTimes:
    """Mean seconds of whole F, B and W per stage; the simulator divides a W by its pieces."""
    means: dict[str, list[float]] = {kind: [] for kind in DRAWN_ACTIONS}
    for stage in range(place.num_stages):
        rank, chunk = place.locate(stage)
        mine = actions[rank].take(actions[rank].chunk == chunk)
        for kind, found in means.items():
            lengths = mine.duration_ns[mine.kind == KIND[kind]]
            parts = pieces if kind == "W" else 1
            found.append(float(lengths.mean()) / NS_PER_S * parts if len(lengths) else 0.0)
    weight_s = tuple(means["W"]) if pieces else ()
    return StageTimes(forward_s=tuple(means["F"]), backward_s=tuple(means["B"]), weight_s=weight_s)
