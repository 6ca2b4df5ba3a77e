"""Interleaved 1F1B: groups of microbatches go through all chunks of a rank in turn.

Two ranks, two chunks, four microbatches::

    rank 0 | F0-0 F0-1 F1-0 F1-1 F0-2 B1-0 F0-3 B1-1 F1-2 B0-0 F1-3 B0-1 B1-2 B1-3 B0-2 B0-3
    rank 1 | F0-0 F0-1 F1-0 B1-0 F1-1 B1-1 F0-2 B0-0 F0-3 B0-1 F1-2 B1-2 F1-3 B1-3 B0-2 B0-3

Forwards run group by group: all microbatches of a group in chunk 0, then in chunk 1 and so on;
backwards likewise from the deepest chunk. Rank r warms up with
``2 * (num_ranks - 1 - r) + (num_chunks - 1) * group_size`` forwards, then alternates. This is the
order of megatron-core, so both can be compared action by action. Without latency the idle time of
a rank is ``(num_ranks - 1) * (t_F + t_B)`` with t_F and t_B the times of one stage, that is 1F1B's
divided by num_chunks.

Source: Megatron-LM, arXiv 2104.04473, section 2.2; group sizes other than the number of ranks as
in megatron-core.
"""

from __future__ import annotations

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.action import Action, ActionKind, action_table
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.schedule import Order, Schedule, check_num_microbatches

__all__ = ["make"]


def make(placement: Placement, num_microbatches: int, *, group_size: int | None = None) -> Schedule:
    """Make the interleaved 1F1B schedule of a loop placement.

    Args:
        placement: loop, at least two chunks per rank.
        num_microbatches: a multiple of ``group_size``, or with a remainder of at least the number
            of ranks, which then forms the last, smaller group.
        group_size: microbatches that pass through a chunk before the next chunk's turn, from the
            number of ranks (the default) to ``num_microbatches``.

    Raises:
        ScheduleError: one of these conditions is broken.
    """
    check_num_microbatches(num_microbatches)
    size = placement.num_ranks if group_size is None else group_size
    _check(placement, num_microbatches, size)
    return Schedule(
        name="interleaved",
        placement=placement,
        num_microbatches=num_microbatches,
        orders=tuple(
            _order(placement, num_microbatches, size, rank) for rank in range(placement.num_ranks)
        ),
    )


def _check(placement: Placement, num_microbatches: int, group_size: int) -> None:
    ranks = placement.num_ranks
    if placement.num_chunks == 1 or placement.kind != "loop":
        raise ScheduleError(
            f"schedule interleaved got a {placement.kind} placement with {placement.num_chunks}"
            " chunk(s) per rank: it needs a loop of at least 2, choose 1f1b for one chunk"
        )
    if not ranks <= group_size <= num_microbatches:
        raise ScheduleError(
            f"schedule interleaved got groups of {group_size} microbatches: a group must hold at"
            f" least {ranks} (the ranks) and at most {num_microbatches} (the microbatches),"
            " raise the global batch size"
        )
    remainder = num_microbatches % group_size
    if 0 < remainder < ranks:
        raise ScheduleError(
            f"schedule interleaved got {num_microbatches} microbatches in groups of {group_size}:"
            f" the remainder {remainder} is below {ranks} (the ranks), use a multiple of"
            f" {group_size} or schedule adaptive"
        )


def _order(placement: Placement, num_microbatches: int, group_size: int, rank: int) -> Order:
    chunks = placement.num_chunks
    forwards = _grouped(ActionKind.F, range(chunks), num_microbatches, group_size)
    backwards = _grouped(ActionKind.B, range(chunks - 1, -1, -1), num_microbatches, group_size)
    warmup = 2 * (placement.num_ranks - 1 - rank) + (chunks - 1) * group_size
    warmup = min(warmup, len(forwards))
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, backward]
    order += backwards[len(forwards) - warmup :]
    return tuple(order)


def _grouped(
    kind: ActionKind, chunks: range, num_microbatches: int, group_size: int
) -> list[Action]:
    table = action_table(kind, len(chunks), num_microbatches)
    return [
        action
        for first in range(0, num_microbatches, group_size)
        for chunk in chunks
        for action in table[chunk][first : first + group_size]
    ]
