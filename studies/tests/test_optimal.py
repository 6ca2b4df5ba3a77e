"""Tests optimal step times against exhaustive search, the run-time rules and the results file."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import Link, StageTimes, draw
from studies import optimal
from studies.schedule_study import lower_bound_s

FILE = Path(optimal.__file__).with_suffix(".json")
MEAN, WORST = 1.01, 1.05
CONTENT = json.loads(FILE.read_text(encoding="utf-8"))
RECORDS = {record["id"]: record for record in CONTENT["cases"]}
CANDIDATES = {case.id: case for case in optimal.candidates()}


def tiny(seed: int, *, microbatches: int = 2, cap: int | None = None) -> Any:
    """Returns a random case with two ranks, durations from 1 to 4, and an undivided W."""
    rng = random.Random(seed)
    times = [tuple(rng.randint(1, 4) for _ in range(4)) for _ in range(3)]
    return optimal.Case(
        id=f"tiny-{seed}",
        ranks=2,
        microbatches=microbatches,
        forward=times[0],
        backward=times[1],
        weight=times[2],
        latency=seed % 3,
        cap=cap,
        weight_pieces=1,
    )


State = dict[Any, int]
"""End times of the ranks, and of cells with successors that have not run yet."""


def least_by_trying_all(case: Any) -> int:
    """Returns the minimum makespan, found by an exhaustive search that drops dominated states."""
    before = {cell: case.before(cell) for cell in case.cells()}
    layer: dict[frozenset[Any], list[State]] = {frozenset(): [dict.fromkeys(range(2), 0)]}
    for _ in before:
        following: dict[frozenset[Any], list[State]] = {}
        for done, states in layer.items():
            for cell in set(before) - done:
                if not _allowed(case, cell, done):
                    continue
                after = done | {cell}
                wanted = {other for c in set(before) - after for other, _ in before[c]} | {0, 1}
                for ends in states:
                    rank = case.rank_of(cell[1])
                    inputs = [ends[other] + gap for other, gap in before[cell]]
                    end = max(ends[rank], *inputs, 0) + case.duration(cell)
                    found = {**ends, cell: end, rank: end}
                    found = {key: found[key] for key in found if key in wanted}
                    _keep(following.setdefault(after, []), found)
        layer = following
    (states,) = layer.values()
    return min(max(ends.values()) for ends in states)


def _allowed(case: Any, cell: Any, done: frozenset[Any]) -> bool:
    if cell[0] == "F" and case.cap is not None:
        rank = case.rank_of(cell[1])
        held = sum(case.held_change(other) for other in done if case.rank_of(other[1]) == rank)
        if held >= 2 * case.cap:
            return False
    return all(other in done for other, _ in case.before(cell))


def _keep(known: list[State], found: State) -> None:
    if any(all(state[key] <= end for key, end in found.items()) for state in known):
        return
    known[:] = [state for state in known if any(state[key] < found[key] for key in found)]
    known.append(found)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("cap", [None, 1])
def test_search_equals_trying_all(seed: int, cap: int | None) -> None:
    case = tiny(seed, cap=cap)
    record = optimal.solve(case)
    assert record is not None
    assert record["optimum"] == least_by_trying_all(case)
    assert record["optimum"] >= record["lower_bound"]


def test_bound_by_hand() -> None:
    # Rank 1 can start after one F and the latency, and then works without a gap: 3 + 1 + 4 * 2 * 9.
    case = replace(
        tiny(0, microbatches=4), forward=(3,) * 4, backward=(3,) * 4, weight=(3,) * 4, latency=1
    )
    assert optimal.lower_bound(case) == 76


@pytest.mark.parametrize(
    ("cell", "shift", "message"),
    [
        (("F", 0, 0, 0), -1, "before 0"),
        (("B", 3, 0, 0), -1, "arrives"),
        (("W", 3, 0, 0), 10_000, "starts before"),
    ],
)
def test_check_refuses_a_moved_cell(cell: Any, shift: int, message: str) -> None:
    case = tiny(0)
    starts = optimal.best_known(case)
    optimal.check(case, starts)
    with pytest.raises(ValueError, match=message):
        optimal.check(case, {**starts, cell: starts[cell] + shift})


def test_check_refuses_overlap_and_too_much_memory() -> None:
    case = tiny(0, microbatches=1)
    starts = optimal.best_known(case)
    # Both cells depend only on B of stage 2, and both run on the same rank.
    with pytest.raises(ValueError, match="overlap on rank 1"):
        optimal.check(case, {**starts, ("W", 2, 0, 0): starts["B", 1, 0, 0]})
    case = tiny(0, microbatches=4)
    starts = optimal.best_known(case)
    with pytest.raises(ValueError, match="holds more than 1 units"):
        optimal.check(replace(case, cap=1), starts)


def test_file_holds_the_candidates() -> None:
    assert CONTENT["version"] == optimal.VERSION
    assert len(RECORDS) == len(CONTENT["cases"])
    assert sorted([*RECORDS, *CONTENT["unproven"]]) == sorted(CANDIDATES)
    assert len(RECORDS) >= 40
    for name, record in RECORDS.items():
        inputs = json.loads(json.dumps(asdict(CANDIDATES[name])))
        assert {key: record[key] for key in inputs} == inputs
        assert (record["chunks"], record["placement"]) == (2, "v")


@pytest.mark.parametrize("name", RECORDS)
def test_recorded_optimum_lies_between_its_bounds(name: str) -> None:
    case, record = CANDIDATES[name], RECORDS[name]
    starts = optimal.best_known(case)
    optimal.check(case, starts)
    assert record["proven"] is True
    assert record["lower_bound"] == optimal.lower_bound(case)
    assert record["lower_bound"] <= record["optimum"] <= optimal.makespan(case, starts)


def test_the_study_s_bound_is_no_lower_than_the_file_s_and_below_every_optimum() -> None:
    for name, record in RECORDS.items():
        case = CANDIDATES[name]
        times = StageTimes(
            **{f"{kind}_s": getattr(case, kind) for kind in ("forward", "backward", "weight")}
        )
        placement = Placement(num_ranks=case.ranks, num_chunks=2, kind="v")
        link = Link(latency_s=case.latency)
        bound_s = lower_bound_s(placement, draw(placement, case.microbatches, times, link=link))
        assert record["lower_bound"] <= bound_s <= record["optimum"], name


@pytest.mark.parametrize("name", ["p2-m4-less-weight-l3-cap2", "p3-m4-less-weight-l3"])
def test_recorded_optimum_is_found_again(name: str) -> None:
    assert RECORDS[name]["optimum"] > RECORDS[name]["lower_bound"]
    assert optimal.solve(CANDIDATES[name])["optimum"] == RECORDS[name]["optimum"]


def test_with_memory_for_2p_the_rule_is_near_the_optimum() -> None:
    distances = [
        # Omit the cases with a cap of p, because they require the rule ``hinted``.
        optimal.makespan(case, optimal.by_rule(case, "adaptive", 2 * case.ranks))
        / record["optimum"]
        for name, record in RECORDS.items()
        if (case := CANDIDATES[name]).cap in (None, 2 * case.ranks)
    ]
    assert len(distances) >= 60
    assert min(distances) >= 1
    assert statistics.fmean(distances) <= MEAN
    assert max(distances) <= WORST
