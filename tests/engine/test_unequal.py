"""The executor where stages have unequal widths: every microbatch meets its own ranks."""

from __future__ import annotations

import itertools
from functools import partial

import pytest

from megatron.adaptive.engine.executor import Executor
from megatron.adaptive.engine.orders import Orders
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.state import RankState
from megatron.adaptive.schedule.unequal import Widths, default_cap, make_policy
from megatron.adaptive.transport.interface import CompletionQueue

from .loopback import WATCHDOG_S, Counting, Loopback, each_in_its_thread

SHAPES = [
    *(Widths(sizes) for sizes in itertools.product((1, 2, 3), repeat=2)),
    *map(Widths, [(2, 1, 1), (1, 1, 2), (1, 2, 1), (2, 3, 1), (1, 3, 2)]),
]


class Dealt(Counting):
    """The one chunk of a rank: checks that its inputs are of the microbatch that it has."""

    def __init__(self, widths: Widths, rank: int) -> None:
        self.widths = widths
        self.stage, self.replica = widths.place_of(rank)
        super().__init__(Placement(num_ranks=widths.num_stages, num_chunks=1), self.stage)

    def whole(self, microbatch: int) -> int:
        return microbatch * self.widths.sizes[self.stage] + self.replica

    @property
    def seen(self) -> list[int]:
        """The microbatches of its forwards."""
        numbers = [call.removeprefix("F0-") for call in self.calls if call.startswith("F")]
        return [self.whole(int(number)) for number in numbers]


def run_step(widths: Widths, schedule: str, rounds: int, **options: bool) -> list[Dealt]:
    """Run a step of all ranks, each in its thread."""
    network = {rank: CompletionQueue() for rank in range(widths.num_ranks)}
    placement = Placement(num_ranks=widths.num_stages, num_chunks=1)
    stages = [Dealt(widths, rank) for rank in range(widths.num_ranks)]

    def run(rank: int) -> None:
        stage = stages[rank].stage
        own = widths.own_microbatches(stage, rounds * widths.round_size)
        executor = Executor(
            placement=placement, pp_rank=stage,
            route=partial(widths.route, rank), transport=Loopback(rank, network),
            timeout_s=WATCHDOG_S,
        )  # fmt: skip
        cap = None if options else default_cap(widths, stage, own)
        state = RankState(placement=placement, rank=stage, num_microbatches=own, cap=cap, **options)
        executor.run(stages[rank], make_policy(schedule, widths, stage, own), state)

    each_in_its_thread(run, widths.num_ranks)
    return stages


@pytest.mark.parametrize("schedule", ["1f1b", "adaptive", "gpipe"])
def test_every_microbatch_goes_its_way(schedule: str) -> None:
    for widths in SHAPES:
        stages = run_step(widths, schedule, 3)
        for number in range(widths.num_stages):
            mine = [stages[rank].seen for rank in widths.ranks_of(number)]
            assert sorted(itertools.chain.from_iterable(mine)) == list(range(3 * widths.round_size))
            assert all(seen == sorted(seen) for seen in mine)


def test_evaluation() -> None:
    for widths in SHAPES:
        stages = run_step(widths, "forward-only", 2, forward_only=True)
        seen = sorted(m for one in stages if one.stage == 0 for m in one.seen)
        assert seen == list(range(2 * widths.round_size))


def test_channels_hold_what_the_hungriest_rank_keeps() -> None:
    def inputs_in_flight(count: int, schedule: str = "adaptive", cap: float | None = None) -> int:
        placement, widths = Placement(num_ranks=2, num_chunks=1), Widths((1, 2))
        orders = Orders(schedule=schedule, placement=placement, pp_rank=0, cap=cap, widths=widths)
        return orders.inputs_in_flight(count)

    assert inputs_in_flight(4) == 4
    assert inputs_in_flight(100) == 5
    assert inputs_in_flight(100, cap=2) == 2
    assert inputs_in_flight(100, "gpipe") == 100
