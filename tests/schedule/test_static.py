"""Tests the order, memory and step time of static schedules, and errors about them."""

from __future__ import annotations

import re
import subprocess
import sys
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import fixed_in_loop, fixed_in_v
from megatron.adaptive.schedule.action import ActionKind
from megatron.adaptive.schedule.catalog import make_schedule, placement_for, schedule_names
from megatron.adaptive.schedule.policy import Follow
from megatron.adaptive.schedule.schedule import Schedule
from megatron.adaptive.schedule.simulate import SimResult, simulate
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.validate import peak_units, render_schedule, validate
from megatron.adaptive.schedule.workload import StageTimes

from ..multiprocess.launch import forking_every

# Five microbatches are divided into a group of three and a group of two.
GROUPS_OF_3 = """\
rank 0 | F0-0 F0-1 F0-2 F1-0 F1-1 F1-2 B1-0 F0-3 B1-1 F0-4 B1-2 F1-3 B0-0 F1-4 B0-1 B0-2 B1-3 \
B1-4 B0-3 B0-4
rank 1 | F0-0 F0-1 F0-2 F1-0 B1-0 F1-1 B1-1 F1-2 B1-2 F0-3 B0-0 F0-4 B0-1 F1-3 B0-2 F1-4 B1-3 \
B1-4 B0-3 B0-4
"""


def made(
    name: str, ranks: int, microbatches: int, chunks: int = 2, num_slices: int = 1
) -> Schedule:
    placement = placement_for(name, ranks, chunks)
    return make_schedule(name, placement, microbatches, num_slices=num_slices)


def followed(schedule: Schedule, times: StageTimes) -> SimResult:
    return simulate(
        schedule.placement,
        schedule.num_microbatches,
        [Follow(order) for order in schedule.orders],
        times,
        forward_only=schedule.forward_only,
        weight_pieces=schedule.weight_pieces,
    )


@pytest.mark.parametrize(
    ("module", "schedules"),
    [
        (
            fixed_in_loop,
            [
                made("1f1b", 4, 6),
                made("seq-1f1b", 2, 2, num_slices=3),
                made("interleaved", 2, 4),
                made("zb-h1", 4, 6),
                made("interleaved-zb", 2, 3),
                made("combined-1f1b", 2, 4),
                made("gpipe", 3, 4, chunks=1),
                made("breadth-first", 2, 3),
                made("forward-only", 2, 3),
                made("varuna", 3, 6),
            ],
        ),
        (fixed_in_v, [made("zb-v", 2, 3), made("dualpipe-v", 2, 4), made("v-half", 3, 3)]),
    ],
)
def test_orders_are_the_tables_of_their_docstrings(
    module: ModuleType, schedules: list[Schedule]
) -> None:
    tables = re.findall(r"(?:^ +rank \d \| .+\n)+", module.__doc__ or "", re.MULTILINE)
    assert len(tables) == len(schedules)
    for table, schedule in zip(tables, schedules, strict=True):
        assert render_schedule(schedule).split() == table.split(), schedule.name


def test_a_smaller_last_group() -> None:
    placement = Placement(num_ranks=2, num_chunks=2)
    schedule = make_schedule("interleaved", placement, 5, group_size=3)
    assert render_schedule(schedule).split() == GROUPS_OF_3.split()


PEAKS = {
    "1f1b": lambda p, r, v, m: min(p - r, m),
    "breadth-first": lambda p, r, v, m: m,
    "combined-1f1b": lambda p, r, v, m: min((v - 1) * p + 2 * (p - 1 - r) + 2, m * v) / v,
    "dualpipe-v": lambda p, r, v, m: p + 0.5,
    "forward-only": lambda p, r, v, m: 0,
    "gpipe": lambda p, r, v, m: m,
    "interleaved": lambda p, r, v, m: min((v - 1) * p + 2 * (p - 1 - r) + 1, m * v) / v,
    "interleaved-zb": lambda p, r, v, m: (min((v - 1) * (m // max(1, m // p)) + p, m * v)) / v,
    "seq-1f1b": lambda p, r, v, m: min(p - r, m),
    "v-half": lambda p, r, v, m: (p + 2) // 2,
    "varuna": lambda p, r, v, m: min(m, max(1, 4 * (p - 1 - r))),
    "zb-h1": lambda p, r, v, m: min(p, m),
    "zb-v": lambda p, r, v, m: p,
}
"""Maximum number of microbatches that a rank stores.

The functions take the number of ranks p, the rank r, the number of chunks v and the number of
microbatches m. Schedules that are not listed may store all microbatches.
"""
FULL = {"v-half": 1, "varuna": 4, "zb-v": 2}
"""Minimum number of microbatches per rank with which a rank reaches its maximum in ``PEAKS``.

Ranks reach it with any number of microbatches if their schedule is not listed.
"""


@pytest.mark.parametrize("name", schedule_names())
@settings(max_examples=60)
@given(
    ranks=st.integers(1, 7),
    chunks=st.integers(2, 4),
    microbatches=st.integers(1, 25),
    kind=st.sampled_from(["loop", "v"]),
)
def test_valid_and_within_its_memory(
    name: str, ranks: int, chunks: int, microbatches: int, kind: str
) -> None:
    placement = placement_for(name, ranks, chunks)
    if name in ("gpipe", "forward-only"):
        placement = Placement(num_ranks=ranks, num_chunks=chunks, kind=kind)  # type: ignore[arg-type]
    if name == "dualpipe-v":
        microbatches += 2 * ranks
    if name in ("combined-1f1b", "interleaved", "interleaved-zb"):
        microbatches = -(-microbatches // ranks) * ranks
    schedule = make_schedule(name, placement, microbatches)
    peak = PEAKS.get(name, PEAKS["gpipe"])
    limits = [peak(ranks, rank, placement.num_chunks, microbatches) for rank in range(ranks)]
    validate(schedule)
    peaks = peak_units(schedule)
    assert all(peak <= limit + 1e-3 for peak, limit in zip(peaks, limits, strict=True))
    if name in PEAKS and microbatches >= FULL.get(name, 0) * ranks:
        expected = max(limits) if name == "v-half" else limits
        assert (max(peaks) if name == "v-half" else peaks) == pytest.approx(expected, abs=1e-3)


STEPS = {
    "1f1b": lambda p, v, m, f, b, w: (m + p - 1) * (f + b + w),
    "breadth-first": lambda p, v, m, f, b, w: (m * v + p - 1) * (f + b + w),
    "gpipe": lambda p, v, m, f, b, w: (m * v + p - 1) * (f + b + w),
    "interleaved": lambda p, v, m, f, b, w: (m * v + p - 1) * (f + b + w),
    "zb-h1": lambda p, v, m, f, b, w: m * (f + b + w) + (p - 1) * (f + b - min(f, b, w)),
}
"""Duration of a step in seconds.

The functions take the number of ranks p, the number of chunks v and the number of microbatches m,
which is at least p. F, B and W of a stage take f, b and w seconds.
"""


@pytest.mark.parametrize("name", STEPS)
@settings(max_examples=60)
@given(
    ranks=st.integers(1, 6),
    chunks=st.integers(2, 4),
    more=st.integers(0, 9),
    forward=st.integers(1, 9),
    backward=st.integers(1, 9),
    weight=st.integers(0, 9),
)
def test_a_step_takes_the_closed_form(
    name: str, ranks: int, chunks: int, more: int, forward: int, backward: int, weight: int
) -> None:
    microbatches = ranks * (1 + more % 3) if name == "interleaved" else ranks + more
    schedule = made(name, ranks, microbatches, chunks)
    placement = schedule.placement
    times = StageTimes.equal(
        placement.num_stages, forward_s=forward, backward_s=backward, weight_s=weight
    )
    result = followed(schedule, times)
    sizes = (ranks, placement.num_chunks, microbatches, forward, backward, weight)
    expected = STEPS[name](*sizes)
    assert result.makespan_s == pytest.approx(expected, rel=1e-12)
    work = microbatches * placement.num_chunks * (forward + backward + weight)
    assert result.bubble_fraction == pytest.approx([1 - work / expected] * ranks)


EQUAL_STEPS = {
    "zb-h1": lambda p, m: 3 * m + p - 1 + max(0, p - m),
    "zb-v": lambda p, m: 6 * m + p - 1 + max(0, 3 * p - 2 * m - 1),
    "v-half": lambda p, m: 6 * m + max(p - 1, 6 * -(-p // 2) - 7),
}
"""Step times if F, B and W take 1 s each. They are also valid for fewer microbatches than ranks."""


@pytest.mark.parametrize("name", EQUAL_STEPS)
@settings(max_examples=60)
@given(ranks=st.integers(1, 12), microbatches=st.integers(1, 24))
def test_a_step_of_equal_times(name: str, ranks: int, microbatches: int) -> None:
    if name == "v-half":
        microbatches += ranks
        assert EQUAL_STEPS[name](ranks, 0) <= 3 * ranks, "the paper's limit"
    schedule = made(name, ranks, microbatches)
    times = StageTimes.equal(schedule.placement.num_stages, forward_s=1, backward_s=1, weight_s=1)
    result = followed(schedule, times)
    assert result.makespan_s == EQUAL_STEPS[name](ranks, microbatches)


@given(ranks=st.integers(2, 6), rounds=st.integers(2, 4), half=st.integers(1, 9), data=st.data())
def test_zb_v_with_shorter_weight_gradients_is_idle_in_the_ramp_only(
    ranks: int, rounds: int, half: int, data: st.DataObject
) -> None:
    """Checks the step time of ZB-V if W takes at least half as long as F, and not longer than F."""
    whole, weight = 2 * half, data.draw(st.integers(half, 2 * half))
    microbatches = rounds * ranks
    times = StageTimes.equal(2 * ranks, forward_s=whole, backward_s=whole, weight_s=weight)
    result = followed(made("zb-v", ranks, microbatches), times)
    assert result.makespan_s == 2 * microbatches * (2 * whole + weight) + (ranks - 1) * whole


def test_an_evaluation_is_busy_but_for_filling_the_loop() -> None:
    result = followed(made("forward-only", 4, 8), StageTimes.equal(8, forward_s=1, backward_s=0))
    assert result.makespan_s == 8 * 2 + 3
    assert result.peak_units == (0.0,) * 4


@given(ranks=st.integers(1, 7), microbatches=st.integers(1, 15))
def test_zb_h1_is_1f1b_with_weight_gradients(ranks: int, microbatches: int) -> None:
    split, plain = made("zb-h1", ranks, microbatches), made("1f1b", ranks, microbatches)
    without = [[a for a in order if a.kind is not ActionKind.W] for order in split.orders]
    assert without == [list(order) for order in plain.orders]


@settings(max_examples=40)
@given(ranks=st.integers(2, 9), more=st.integers(0, 9))
def test_v_half_repeats_its_steady_part(ranks: int, more: int) -> None:
    """Checks that repeating part of the order gives the same result as placing each action."""
    schedule = made("v-half", ranks, ranks + 5 + more)
    rows = fixed_in_v.squeezed(schedule.placement, schedule.num_microbatches)
    assert schedule.orders == tuple(tuple(row.values()) for row in rows)


@given(ranks=st.integers(1, 7), microbatches=st.integers(1, 30))
def test_varuna_is_never_slower_than_gpipe(ranks: int, microbatches: int) -> None:
    times = StageTimes(
        forward_s=(1.0,) * ranks,
        backward_s=(2.0,) * ranks,
        recompute_s=(1.0,) * (ranks - 1) + (0.0,),
    )
    varuna, gpipe = (
        followed(made(name, ranks, microbatches, chunks=1), times) for name in ("varuna", "gpipe")
    )
    assert varuna.makespan_s <= gpipe.makespan_s


LOOP = Placement(num_ranks=4, num_chunks=2)
V = Placement(num_ranks=2, num_chunks=2, kind="v")
ONE = Placement(num_ranks=2, num_chunks=1)


@pytest.mark.parametrize(
    ("name", "placement", "microbatches", "group_size", "message"),
    [
        (
            "1f1b",
            LOOP,
            4,
            None,
            "requires a loop placement with 1 chunk.*got a loop .* with 2; use adaptive",
        ),
        ("zb-h1", LOOP, 4, None, "a loop placement with 1 chunk"),
        ("varuna", LOOP, 4, None, "varuna requires .*, got a loop placement with 2"),
        ("breadth-first", ONE, 4, None, "a loop placement with at least 2 .* with 1;"),
        ("breadth-first", V, 4, None, "got a v placement"),
        ("interleaved", ONE, 4, None, "at least 2 .* use adaptive"),
        ("interleaved", V, 4, None, "got a v placement"),
        ("interleaved", LOOP, 3, None, "at most 3"),
        ("interleaved", LOOP, 6, None, "remainder 2 is less than 4"),
        ("interleaved", LOOP, 8, 3, "at least 4 .*groups of 3 microbatches"),
        ("interleaved", LOOP, 8, 9, "at most 8"),
        (
            "v-half",
            LOOP,
            4,
            None,
            "v-half requires a v placement with 2 .* got a loop placement with 2",
        ),
        (
            "zb-v",
            Placement(num_ranks=2, num_chunks=3, kind="v"),
            4,
            None,
            "a v placement with 2 chunk",
        ),
        *(
            (name, placement_for(name, 2, 2), 0, None, "at least 1, got 0")
            for name in schedule_names()
        ),
    ],
)
def test_refusals(
    name: str, placement: Placement, microbatches: int, group_size: int | None, message: str
) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        make_schedule(name, placement, microbatches, group_size=group_size)
    assert "\n" not in str(caught.value)


# This script runs in a separate process, because neither the package nor the tests may need torch.
COMPARE_WITH_MEGATRON_CORE = """
from types import SimpleNamespace
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.catalog import make_schedule

compared = 0
for ranks, chunks in ((2, 2), (2, 3), (3, 2), (4, 2), (4, 4)):
    for microbatches in range(ranks, 3 * ranks + 1):
        for size in range(ranks, microbatches + 1):
            if 0 < microbatches % size < ranks:
                continue
            placement = Placement(num_ranks=ranks, num_chunks=chunks)
            ours = make_schedule("interleaved", placement, microbatches, group_size=size)
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


def test_interleaved_is_megatron_cores_order() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPARE_WITH_MEGATRON_CORE],
        env=forking_every(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if "No module named 'torch'" in done.stderr or "No module named 'megatron.core" in done.stderr:
        pytest.skip("megatron-core is not installed")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "compared 234\n"
