"""DualPipeV: forwards and backwards in pairs, two chunks per rank in a V.

Two ranks, four microbatches; ``F0-3+`` runs together with the backward after it, the one computing
while the other's experts communicate::

  rank 0 | F0-0 F0-1 F0-2 F1-0 B1-0 W1-0 F1-1 F0-3+ B1-1 W1-1 F1-2+ B0-0 W0-0 B1-2 W1-2 F1-3+ \
B0-1 W0-1 B1-3 W1-3 B0-2 W0-2 B0-3 W0-3
  rank 1 | F0-0 F1-0 F0-1 F1-1 F0-2 B1-0 W1-0 F1-2+ B0-0 W0-0 F0-3+ B1-1 W1-1 F1-3+ B0-1 W0-1 \
B1-2 W1-2 B0-2 W0-2 B1-3 B0-3 W1-3 W0-3

Rank r of p fills with ``2 * (p - r - 1)`` forwards of chunk 0, alternates forwards of both chunks
r + 1 times, and takes ``p - r - 1`` rounds of B, W and F of chunk 1. The steady phase alternates
two pairs: a forward of chunk 0 with a backward of chunk 1, and the reverse. Then backwards are
alone, and the later half of them leave their W for the end, so that gradients go back fast.

A backward of the steady phase is whole in the source; here its W follows right after its pair, for
weight gradients communicate nothing.

Source: DualPipeV, a form of DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2.1) with each rank
in one place, as its authors published it at https://github.com/deepseek-ai/DualPipe.
"""

from __future__ import annotations

from collections import deque

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.schedule import Order


def dualpipe_v(placement: Placement, num_microbatches: int) -> tuple[Order, ...]:
    """Returns the orders of DualPipeV with two chunks per rank in a V.

    Raises:
        ScheduleError: fewer microbatches than stages.
    """
    ranks = placement.num_ranks
    if num_microbatches < 2 * ranks:
        raise ScheduleError(
            f"schedule dualpipe-v got {num_microbatches} microbatches: it needs at least"
            f" {2 * ranks}, two per rank; raise the global batch size or use zb-v"
        )
    return tuple(_order(rank, ranks, num_microbatches) for rank in range(ranks))


def _order(rank: int, num_ranks: int, num_microbatches: int) -> Order:
    after = num_ranks - 1 - rank
    # Lanes: + begins a pair, a small b leaves its W for later, W is the oldest that was left.
    steady = ["F0+", "B1", "F1+", "B0"] * (num_microbatches - 2 * num_ranks + rank + 1)
    if after == 0:
        steady[0] = "F0"  # of the microbatch whose backward would be its partner on this rank
    alone = ["B1", "B0"] * (rank + 1)
    lanes = [
        *["F0"] * (2 * after),
        *["F0", "F1"] * (rank + 1),
        *["b1", "W", "F1"] * after,
        *steady,
        *["B1", "F1+", "B0"] * after,
        *alone[: rank + 1],
        *map(str.lower, alone[rank + 1 :]),
        *["W", "b0"] * after,
        *["W"] * (rank + 1),
    ]
    counts = dict.fromkeys(("F0", "F1", "B0", "B1"), 0)
    left: deque[Action] = deque()
    order: list[Action] = []
    for lane in lanes:
        if lane == "W":
            order.append(left.popleft())
            continue
        kind, chunk = ActionKind(lane[0].upper()), int(lane[1])
        microbatch = counts[f"{kind}{chunk}"]
        counts[f"{kind}{chunk}"] += 1
        order.append(Action(kind, chunk, microbatch, paired=lane.endswith("+")))
        if kind is ActionKind.B:
            weights = Action(ActionKind.W, chunk, microbatch)
            (left if lane[0] == "b" else order).append(weights)
    return tuple(order)
