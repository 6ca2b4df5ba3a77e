"""Interleaved 1F1B: tables, megatron-core's order, memory, closed form, what it refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import interleaved
from megatron.adaptive.schedule.memory import peak_units
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.policy import Follow
from megatron.adaptive.schedule.render import render_schedule
from megatron.adaptive.schedule.simulate import StageTimes, simulate
from megatron.adaptive.schedule.validate import validate

TABLE = """\
    rank 0 | F0-0 F0-1 F1-0 F1-1 F0-2 B1-0 F0-3 B1-1 F1-2 B0-0 F1-3 B0-1 B1-2 B1-3 B0-2 B0-3
    rank 1 | F0-0 F0-1 F1-0 B1-0 F1-1 B1-1 F0-2 B0-0 F0-3 B0-1 F1-2 B1-2 F1-3 B1-3 B0-2 B0-3
"""
# Five microbatches in a group of three and one of two.
GROUPS_OF_3 = """\
rank 0 | F0-0 F0-1 F0-2 F1-0 F1-1 F1-2 B1-0 F0-3 B1-1 F0-4 B1-2 F1-3 B0-0 F1-4 B0-1 B0-2 B1-3 \
B1-4 B0-3 B0-4
rank 1 | F0-0 F0-1 F0-2 F1-0 B1-0 F1-1 B1-1 F1-2 B1-2 F0-3 B0-0 F0-4 B0-1 F1-3 B0-2 F1-4 B1-3 \
B1-4 B0-3 B0-4
"""

# Run in a process of its own: the package must not need torch, and neither must these tests.
COMPARE_WITH_MEGATRON_CORE = """
from types import SimpleNamespace
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table
from megatron.adaptive.schedule import interleaved
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.placement import Placement

compared = 0
for ranks, chunks in ((2, 2), (2, 3), (3, 2), (4, 2), (4, 4)):
    for microbatches in range(ranks, 3 * ranks + 1):
        for size in range(ranks, microbatches + 1):
            if 0 < microbatches % size < ranks:
                continue
            ours = interleaved.make(
                Placement(num_ranks=ranks, num_chunks=chunks), microbatches, group_size=size
            )
            table = get_schedule_table(microbatches, chunks, size)
            forwards = [Action(ActionKind.F, c, m) for m, c in table]
            backwards = [Action(ActionKind.B, chunks - 1 - c, m) for m, c in table]
            for rank in range(ranks):
                group = SimpleNamespace(size=lambda: ranks, rank=lambda: rank)
                _, _, warmup, remaining = get_pp_rank_microbatches(
                    microbatches, chunks, size, p2p_communicator=SimpleNamespace(
                        pp_group=group, virtual_pipeline_model_parallel_size=chunks))
                theirs = forwards[:warmup]
                for k in range(remaining):
                    theirs += [forwards[warmup + k], backwards[k]]
                theirs += backwards[remaining:]
                assert list(ours.orders[rank]) == theirs, (ranks, chunks, microbatches, size, rank)
                compared += 1
print("compared", compared)
"""


def test_table() -> None:
    schedule = interleaved.make(Placement(num_ranks=2, num_chunks=2), 4)
    assert render_schedule(schedule).split() == TABLE.split()
    assert interleaved.__doc__ is not None
    assert TABLE in interleaved.__doc__


def test_a_smaller_last_group() -> None:
    schedule = interleaved.make(Placement(num_ranks=2, num_chunks=2), 5, group_size=3)
    assert render_schedule(schedule).split() == GROUPS_OF_3.split()


def test_same_order_as_megatron_core() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPARE_WITH_MEGATRON_CORE],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if "No module named 'torch'" in done.stderr or "No module named 'megatron.core" in done.stderr:
        pytest.skip("megatron-core is not installed")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "compared 234\n"


@given(
    ranks=st.integers(1, 5),
    chunks=st.integers(2, 4),
    rounds=st.integers(1, 4),
)
def test_valid_and_within_its_memory(ranks: int, chunks: int, rounds: int) -> None:
    microbatches = ranks * rounds
    schedule = interleaved.make(Placement(num_ranks=ranks, num_chunks=chunks), microbatches)
    validate(schedule)
    in_chunks = [
        min((chunks - 1) * ranks + 2 * (ranks - 1 - rank) + 1, microbatches * chunks)
        for rank in range(ranks)
    ]
    assert peak_units(schedule) == pytest.approx([count / chunks for count in in_chunks])


@given(
    ranks=st.integers(1, 5),
    chunks=st.integers(2, 4),
    rounds=st.integers(1, 3),
    forward=st.integers(1, 9),
    backward=st.integers(1, 9),
)
def test_idle_time_is_that_of_1f1b_divided_by_the_chunks(
    ranks: int, chunks: int, rounds: int, forward: int, backward: int
) -> None:
    placement = Placement(num_ranks=ranks, num_chunks=chunks)
    microbatches = ranks * rounds
    result = simulate(
        placement,
        microbatches,
        [Follow(order) for order in interleaved.make(placement, microbatches).orders],
        StageTimes.equal(placement.num_stages, forward_s=forward, backward_s=backward),
    )
    work = microbatches * chunks * (forward + backward)
    idle = (ranks - 1) * (forward + backward)
    assert result.makespan_s == work + idle
    assert result.bubble_fraction == pytest.approx([idle / (work + idle)] * ranks)


@pytest.mark.parametrize(
    ("placement", "microbatches", "group_size", "message"),
    [
        (Placement(num_ranks=2, num_chunks=1), 4, None, "at least 2, choose 1f1b"),
        (Placement(num_ranks=2, num_chunks=2, kind="v"), 4, None, "got a v placement"),
        (Placement(num_ranks=4, num_chunks=2), 3, None, "at most 3"),
        (Placement(num_ranks=4, num_chunks=2), 6, None, "remainder 2 is below 4"),
        (Placement(num_ranks=4, num_chunks=2), 8, 3, "groups of 3 microbatches.*at least 4"),
        (Placement(num_ranks=4, num_chunks=2), 8, 9, "at most 8"),
        (Placement(num_ranks=4, num_chunks=2), 7, 5, "remainder 2"),
        (Placement(num_ranks=4, num_chunks=2), 0, None, "0 microbatches"),
    ],
)
def test_refusals(
    placement: Placement, microbatches: int, group_size: int | None, message: str
) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        interleaved.make(placement, microbatches, group_size=group_size)
    assert "\n" not in str(caught.value)
