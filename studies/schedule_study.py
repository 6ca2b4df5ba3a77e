"""Simulates schedules on many pipelines, and compares step times with a lower bound.

Implements the ``study`` part of ``studies/schedules.py``. A cell is a pipeline with p ranks of two
chunks each, m microbatches, a kind of work, and a latency. All schedules of a cell use the same
random durations.

The lower bound combines three parts. An action starts at the end of the longest path to it through
stages and microbatches, or later. After the action, the step takes at least the longest path
that follows it. Between these two paths, each rank must do all of its work, one action at a
time; the bound permits arbitrary interruptions. The slowest rank determines the bound.

Source: Carlier 1982, the one-machine bound with heads and tails. If interruptions are permitted,
Jackson's rule computes this bound exactly.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from harness.report import Row
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.planner.choose_partition import (
    Loads,
    choose_together,
    propose,
    simulated_step,
)
from megatron.adaptive.schedule.catalog import Candidate, make_candidate
from megatron.adaptive.schedule.choose_by_simulation import STATIC, choose, evaluate
from megatron.adaptive.schedule.rank_kernel import B, F, W
from megatron.adaptive.schedule.stage_placement import Placement, PlacementKind
from megatron.adaptive.schedule.workload import (
    PS_PER_S,
    Link,
    StageProfile,
    StageTimes,
    Workload,
    draw,
)

RANKS, PER_RANK = (4, 8, 16, 32), (1, 2, 4, 8)
WORK: dict[str, dict[str, float]] = {
    "quiet": {},
    "jitter 0.1": {"action_sigma": 0.1},
    "jitter 0.3": {"action_sigma": 0.3},
    "jitter 0.5": {"action_sigma": 0.5},
    "lengths": {"microbatch_sigma": 0.4},
    "long backwards": {"backward_s": 1.5},
}
LATENCIES = (0.0, 0.2, 0.5, 1.0)
"""Latencies of messages, as multiples of the duration of a stage's forward pass."""
SEEDS, FRESH = (0, 1), range(100, 104)
_SETTINGS: tuple[tuple[PlacementKind, float], ...] = (
    ("v", 1),
    ("v", 1.5),
    ("loop", 1),
    ("loop", 1.5),
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Pipeline, batch and durations for which schedules are compared."""

    ranks: int
    microbatches: int
    work: str
    latency: float

    @property
    def profile(self) -> StageProfile:
        """Returns the durations of actions and the latency of messages in the pipeline."""
        given = dict(WORK[self.work])
        backward_s = given.pop("backward_s", 1.0)
        times = StageTimes.equal(2 * self.ranks, forward_s=1.0, backward_s=backward_s, weight_s=1.0)
        return StageProfile(times=times, link=Link(latency_s=self.latency), **given)

    def bound_s(self, placement: Placement, seeds: Sequence[int]) -> float:
        """Returns the lower bound in seconds, averaged over the random draws with ``seeds``."""
        return statistics.fmean(
            lower_bound_s(placement, draw(placement, self.microbatches, self.profile, seed=seed))
            for seed in seeds
        )


def cells(latency: float) -> Iterator[Cell]:
    """Yields all configurations (cells) of the study with the latency ``latency``."""
    for ranks, per_rank, work in product(RANKS, PER_RANK, WORK):
        yield Cell(ranks=ranks, microbatches=per_rank * ranks, work=work, latency=latency)


def lower_bound_s(placement: Placement, work: Workload) -> float:
    """Returns a lower bound on the step time in seconds. The module's docstring defines the bound.

    In the arrays below, B and W are in the order of execution: the last slice of a microbatch comes
    first.
    """
    times: Any = work.durations_ps.copy()
    stages, items = times.shape[1:]
    slices = work.num_slices
    turned = np.arange(items).reshape(-1, slices)[:, ::-1].ravel()
    times[B:] = times[B:, :, turned]
    ranks = np.array([placement.locate(stage)[0] for stage in range(stages)])
    # Delays of messages from each stage to the next stage (``forth``), and in the other direction.
    forth, back = work.delays_ps[0, :-1].copy(), work.delays_ps[1, 1:, turned].T.copy()
    forth[ranks[1:] == ranks[:-1]] = back[ranks[1:] == ranks[:-1]] = 0
    heads = _starts(times, forth, back, slices)
    # The longest paths to the end are computed like those from the start, but with reversed time
    # and with reversed order of microbatches.
    reverse = times[:, :, ::-1]
    tails = np.zeros_like(times)
    none = np.zeros(items, dtype=np.int64)
    after = none
    for stage in range(stages):
        tails[W, stage] = _in_turn(none, reverse[W, stage])
        after = np.maximum(after, tails[W, stage] + reverse[W, stage])
        tails[B, stage] = _in_turn(after, reverse[B, stage])
        if stage < stages - 1:
            after = tails[B, stage] + reverse[B, stage] + back[stage, ::-1]
    after = none
    for stage in reversed(range(stages)):
        if stage < stages - 1:
            after = after + forth[stage, ::-1]
        first_backward = _latest(tails[B, stage] + reverse[B, stage], slices)
        after = np.maximum(after, first_backward)
        tails[F, stage] = _in_turn(after, reverse[F, stage])
        after = tails[F, stage] + reverse[F, stage]
    tails = tails[:, :, ::-1]
    of_ranks = (
        [each[:, ranks == rank].ravel() for each in (heads, times, tails)] for rank in set(ranks)
    )
    return max(_one_machine(*of_rank) for of_rank in of_ranks) / PS_PER_S


def _latest(ends: Any, slices: int) -> Any:
    """Returns, for each slice, the latest end of all slices of the same microbatch."""
    return np.repeat(ends.reshape(-1, slices).max(axis=1), slices)


def _starts(times: Any, forth: Any, back: Any, slices: int) -> Any:
    """Returns the earliest starts in picoseconds if each rank could run its actions in parallel.

    The result has the shape ``[kind, stage, item]``.
    """
    stages = times.shape[1]
    found = np.zeros_like(times)
    ready = np.zeros(times.shape[2], dtype=np.int64)
    for stage in range(stages):
        found[F, stage] = _in_turn(ready, times[F, stage])
        ready = found[F, stage] + times[F, stage]
        if stage < stages - 1:
            ready = ready + forth[stage]
    for stage in reversed(range(stages)):
        ready = np.maximum(ready, _latest(found[F, stage] + times[F, stage], slices))
        found[B, stage] = _in_turn(ready, times[B, stage])
        ready = found[B, stage] + times[B, stage]
        found[W, stage] = _in_turn(ready, times[W, stage])
        if stage > 0:
            ready = ready + back[stage - 1]
    return found


def _in_turn(ready: Any, durations: Any) -> Any:
    """Returns the starts of actions that run one after the other, each as soon as it is ready."""
    before = durations.cumsum() - durations
    return before + np.maximum.accumulate(ready - before)


def _one_machine(heads: Any, durations: Any, tails: Any) -> int:
    """Returns the earliest end of a step for one rank, if actions may be interrupted."""
    order = np.argsort(heads, kind="stable")
    coming = deque(zip(*(each[order].tolist() for each in (heads, durations, tails)), strict=True))
    waiting: list[tuple[int, int]] = []
    now = end = 0
    while coming or waiting:
        if not waiting:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            _, duration, tail = coming.popleft()
            heappush(waiting, (-tail, duration))
        tail, duration = heappop(waiting)
        until = min(now + duration, coming[0][0] if coming else now + duration)
        if until < now + duration:
            heappush(waiting, (tail, now + duration - until))
        else:
            end = max(end, until - tail)
        now = until
    return end


def _rule(name: str, kind: PlacementKind, cell: Cell, per_rank: float, shares: bool) -> Candidate:
    return Candidate(
        name=name,
        placement=Placement(num_ranks=cell.ranks, num_chunks=2, kind=kind),
        weight_pieces=4,
        cap=min(per_rank * cell.ranks, float(cell.microbatches)),
        shares=shares,
        pace=(cell.latency, WORK[cell.work].get("backward_s", 1.0), 1.0),
    )


def _step_s(candidate: Candidate, cell: Cell, seeds: Sequence[int]) -> float:
    return evaluate(candidate, cell.microbatches, cell.profile, seeds).mean_s


def best_fixed_s(cell: Cell, cap: float, seeds: Sequence[int]) -> float:
    """Returns the step time in seconds of the fastest fixed order that fits in ``cap``."""
    found = []
    for name in STATIC:
        candidate = make_candidate(name, cell.ranks, 2, cell.microbatches)
        try:
            outcome = evaluate(candidate, cell.microbatches, cell.profile, seeds)
        except ScheduleError:
            continue
        if outcome.peak_units <= cap + 1e-3:
            found.append(outcome.mean_s)
    return min(found)


def shares() -> list[Row]:
    """Compares the mean step times of ``adaptive`` and ``hinted`` to the lower bound.

    The rule ``adaptive`` is simulated with and without its option ``shares``.
    """
    rows = []
    for (kind, per_rank), latency in product(_SETTINGS, LATENCIES):
        ratios: dict[str, list[float]] = {"no shares": [], "shares": [], "hinted": []}
        for cell in cells(latency):
            bound_s = cell.bound_s(Placement(num_ranks=cell.ranks, num_chunks=2, kind=kind), SEEDS)
            for what, of_cell in ratios.items():
                name = "hinted" if what == "hinted" else "adaptive"
                rule = _rule(name, kind, cell, per_rank, what != "no shares")
                of_cell.append(_step_s(rule, cell, SEEDS) / bound_s)
        for what, of_cell in ratios.items():
            where = f"{kind}, cap {per_rank:g}p, latency {latency:g}, {what}: mean over bound"
            rows.append(Row(what=where, value=statistics.fmean(of_cell)))
    return rows


def worst_cells() -> list[Row]:
    """Compares ``auto`` and ``hinted`` to the best fixed order, and returns the worst results."""
    rows = []
    for latency, goal in ((0.0, 1.01), (0.2, 1.01), (1.0, 1.05)):
        chosen, hinted = [], []
        for cell in cells(latency):
            cap = 1.5 * cell.ranks
            choice = choose(
                cell.profile,
                placement=Placement(num_ranks=cell.ranks, num_chunks=2, kind="v"),
                num_microbatches=cell.microbatches,
                most=cap,
                splittable=True,
            )
            fixed_s = best_fixed_s(cell, cap, FRESH)
            chosen.append((_step_s(choice.best, cell, FRESH) / fixed_s, cell))
            if cell.microbatches == cell.ranks:
                fixed_s = best_fixed_s(cell, cell.ranks, FRESH)
                rule = _rule("hinted", "v", cell, 1, True)
                hinted.append((_step_s(rule, cell, FRESH) / fixed_s, cell))
        for what, of_cell, most in (
            ("auto, V, cap 1.5p", chosen, goal),
            ("hinted, V, cap p, m = p", hinted, 1.02),
        ):
            worst, cell = max(of_cell, key=lambda one: one[0])
            where = f"p {cell.ranks}, m {cell.microbatches}, {cell.work}"
            label = f"{what}, latency {latency:g}: over the best fixed order, worst cell ({where})"
            rows.append(Row(what=label, value=worst, goal=most))
    return rows


def worst_draws() -> list[Row]:
    """Compares ``adaptive`` with a cap of 2p to the lower bound, and returns the worst result."""
    found = []
    for latency, work in product((0.0, 0.2), ("jitter 0.1", "jitter 0.3")):
        for cell in cells(latency):
            if cell.work != work or cell.microbatches < 2 * cell.ranks:
                continue
            rule = _rule("adaptive", "v", cell, 2, True)
            # Results of small pipelines vary most between random draws, so simulate more draws.
            for seed in range(FRESH.start, FRESH.start + max(4, 800 // cell.ranks)):
                bound_s = cell.bound_s(rule.placement, (seed,))
                found.append((_step_s(rule, cell, (seed,)) / bound_s, seed, cell))
    worst, seed, cell = max(found, key=lambda one: one[0])
    where = f"p {cell.ranks}, m {cell.microbatches}, {cell.work}, draw {seed}"
    label = f"adaptive, V, cap 2p, m >= 2p: over the bound, worst of {len(found)} ({where})"
    return [Row(what=label, value=worst, goal=1.05)]


def optimal_gaps() -> list[Row]:
    """Compares step times under ``auto`` with the optimal step times from ``studies.optimal``."""
    gaps = []
    known = json.loads(Path(__file__).with_name("optimal.json").read_text(encoding="utf-8"))
    for case in known["cases"]:
        times = StageTimes(
            **{f"{kind}_s": tuple(case[kind]) for kind in ("forward", "backward", "weight")}
        )
        profile = StageProfile(times=times, link=Link(latency_s=case["latency"]))
        choice = choose(
            profile,
            placement=Placement(num_ranks=case["ranks"], num_chunks=2, kind="v"),
            num_microbatches=case["microbatches"],
            most=float(case["cap"] or case["microbatches"]),
            splittable=True,
        )
        best = evaluate(choice.best, case["microbatches"], profile, (0,))
        gaps.append((best.mean_s / case["optimum"] - 1, case["id"]))
    worst, name = max(gaps)
    mean = statistics.fmean(gap for gap, _ in gaps)
    return [
        Row(what="auto over proven optima, mean", value=100 * mean, unit="%", goal=0.5),
        Row(what=f"auto over proven optima, worst ({name})", value=100 * worst, unit="%", goal=5.0),
    ]


UNEQUAL: dict[str, tuple[float, float, float]] = {
    "heavy loss": (0.0, 2.0, 1.0),
    "heavy ends": (1.0, 3.0, 1.0),
    "slow rank": (0.0, 0.0, 1.5),
    "heavy loss and slow rank": (0.0, 2.0, 1.5),
}
"""Work of the embedding and of the loss as multiples of a layer, and slowdown factor of rank 1."""
LAYERS_PER_RANK, GAIN = 4, 0.03


def joint_choice() -> list[Row]:
    """Compares two ways to choose layers and schedule: together, or the schedule first."""
    rows, all_ratios = [], []
    for ranks, chunks, (name, of) in product((4, 8), (1, 2), UNEQUAL.items()):
        loads, profile = unequal_pipeline(ranks, chunks, *of)
        most = 1.5 * ranks
        kinds: tuple[PlacementKind, ...] = ("v", "loop") if chunks == 2 else ("loop",)
        limits = dict.fromkeys(kinds, lambda partition, most=most: most)
        given: Any = {"num_microbatches": 4 * ranks, "splittable": True}
        orders = choose_together(loads, profile, limits, **given)
        order = orders.move or orders.stay
        assert order is not None
        lying = loads.placed(order.placement.kind)
        moved = propose(lying, simulated_step(lying, order, 4 * ranks), GAIN)
        together = choose_together(loads, profile, limits, gain=GAIN, **given)
        best = together.move or together.stay
        assert best is not None
        step_s = []
        for candidate, cut in (
            (order, loads.partition if moved is None else moved.partition),
            (best, together.partition or loads.partition),
        ):
            times = loads.placed(candidate.placement.kind).stage_times(cut)
            drawn = replace(profile, times=times)
            step_s.append(evaluate(candidate, 4 * ranks, drawn, FRESH).mean_s)
        all_ratios.append(step_s[0] / step_s[1])
        what = f"layers with the order over layers after it, p {ranks}, {chunks} chunks, {name}"
        rows.append(Row(what=what, value=all_ratios[-1]))
    return [*rows, Row(what="the same, mean", value=statistics.fmean(all_ratios))]


def unequal_pipeline(
    ranks: int, chunks: int, embedding: float, loss: float, slowness: float
) -> tuple[Loads, StageProfile]:
    """Returns a pipeline with layers of 1 ms, an embedding, a loss and a slow rank 1."""
    kind: PlacementKind = "v" if chunks == 2 else "loop"
    placement = Placement(num_ranks=ranks, num_chunks=chunks, kind=kind)
    stages, layer_s = placement.num_stages, 1e-3
    each = [layer_s * (slowness if rank == 1 else 1.0) for rank in range(ranks)]
    # The look-up in the embedding takes little time, and there is no input gradient.
    first = (0.1 * embedding * layer_s, 0.0, embedding * layer_s)
    loads = Loads(
        placement=placement,
        partition=(LAYERS_PER_RANK // chunks,) * stages,
        layer_s=tuple(((one, one, one),) for one in each),
        beside_s=(first, *((0.0,) * 3,) * (stages - 2), (loss * layer_s,) * 3),
        most_layers=(math.inf,) * ranks,
    )
    latency_s = 0.1 * LAYERS_PER_RANK / chunks * layer_s
    times = loads.stage_times(loads.partition)
    return loads, StageProfile(times=times, link=Link(latency_s=latency_s), action_sigma=0.1)


def measure() -> list[Row]:
    """Runs all simulations of the study, and returns the rows of the table."""
    return [*optimal_gaps(), *joint_choice(), *worst_draws(), *shares(), *worst_cells()]
