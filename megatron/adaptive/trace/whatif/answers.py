"""Reports how much time a run loses, which ranks cause the loss, and which changes would save time.

All results come from simulations of the recorded steps, in which some durations are replaced.

The ``ideal`` duration of a computation is the mean duration of its kind (forward, backward and so
on) over replicas, stages and steps. The ideal duration of a message or collective is the median for
its kind. In the ideal step, all durations are ideal, so no rank is slower than the others.

The slowdown caused by a group, such as a rank, compares two simulated step times. In the first
simulation, only the operations of the group have their recorded durations, and all others have
ideal durations. The slowdown is the ratio of this step time to the time of the ideal step.

A repair is a change that would make the run faster. Its gain is the fraction of the step time that
is saved if only the durations affected by the repair are replaced. In the simulation, an operation
starts when all operations that it depends on have finished. Delays of the host (CPU) between
operations are not simulated.

Source: arXiv 2505.05713, sections 3 and 4. The paper uses correlation to find out which
microbatches have long sequences. In this module, the length of a microbatch is the time of its
actions divided by their usual time (median over stages and kinds of work). The effect of lengths is
simulated in the same way as that of any other group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.diagnose.samples import thinned
from megatron.adaptive.trace.diagnose.stage_costs import best_partition, split_costs
from megatron.adaptive.trace.imports.published import run_of_columns
from megatron.adaptive.trace.metrics import medians
from megatron.adaptive.trace.read import RunTrace, describe_numbers
from megatron.adaptive.trace.span_columns import Ints, Mask, row_keys
from megatron.adaptive.trace.whatif.advice import advice_for
from megatron.adaptive.trace.whatif.content import content_answers
from megatron.adaptive.trace.whatif.operations import (
    BACKWARD_COMM,
    FORWARD_COMM,
    NAMES,
    WEIGHT,
    Floats,
    Graph,
    Operations,
    Pipelines,
    build_graph,
    pipelines_of,
    read_operations,
    usual_s,
)
from megatron.adaptive.trace.whatif.replay import (
    OtherSchedule,
    RuleReplay,
    recorded_times,
    steps_at_most,
)
from megatron.adaptive.trace.whatif.result import SHOWN, SLOW, Repair, WhatIf
from megatron.adaptive.trace.whatif.slice_tokens import token_repairs

SPANS_AT_ONCE = 1_000_000
"""Maximum number of spans to read at the same time. A single step may have more."""
SETS_AT_ONCE = 8
"""Number of alternative sets of durations that are simulated at the same time."""
SLOWEST_WORKERS = 0.03
"""Fraction of all ranks that are considered the slowest ranks (at least one rank)."""
CAUSE_SHARE = 0.3
"""Minimum fraction of the slowdown that a cause must explain to be reported."""
WORTH = 0.002
"""Minimum fraction of the step time that a change must save to be listed."""
SLICES = 8
"""Number of slices per microbatch in simulations of runs whose microbatches are not split."""
SLICES_TEXT = f"sequences cut into {SLICES} slices, if they cost no extra time"
SLICES_FLAG = f"--sequence-slices {SLICES}"
_EVEN = "stages of equal work"
"""Name of a change that is only listed if there are no better estimates for other partitions.

The better estimates are simulations with the times of single segments.
"""
MOST_GROUPS = 64
"""Maximum number of stages, and of replicas, to simulate. If there are more, the slowest are used.
"""
MOST_SPANS = 8_000_000
"""Maximum number of spans to analyze. Longer runs are sampled at evenly spaced iterations."""
REPLAYED = 4
"""Maximum number of steps to simulate for each alternative schedule."""
RECORDED_SPAN_S = 1e-6
"""CPU time in seconds that recording a span takes, according to measurements."""

CAUSES = ("worker", "last stage", "sequence lengths")


@dataclass(eq=False)
class _Part:
    """Contains the operations of steps that are simulated together, and their dependencies.

    Attributes:
        ops: Operations of the steps.
        graph: Dependencies between these operations.
        ideal_s: ``[operations]``, ideal duration of each operation in seconds.
        length: ``[operations]``, time of each operation's microbatch relative to the usual time.
    """

    ops: Operations
    graph: Graph
    ideal_s: Floats = field(default_factory=lambda: np.zeros(0))
    length: Floats = field(default_factory=lambda: np.zeros(0))

    def column(self, group: str) -> Ints:
        """Returns the index of the group to which each operation belongs.

        ``group`` is the type of the group: ``stage``, ``replica``, ``rank``, ``kind`` or ``link``.
        For ``link``, the index is -1 for operations other than messages.
        """
        ops = self.ops
        where = ops.where
        if group == "replica":
            return where.replica[ops.worker]
        if group == "link":
            return np.where(ops.source < 0, -1, ops.source * len(where.ranks) + ops.worker)
        return {"stage": ops.stage, "rank": ops.worker, "kind": ops.kind}[group]

    def number_of_step(self, rows: slice | Mask = slice(None)) -> Ints:
        """Returns the index of the step to which each operation in ``rows`` belongs."""
        _, step = np.unique(self.ops.iteration[rows], return_inverse=True)
        return step


def what_if(run: RunTrace, iterations: Iterable[int] | None = None) -> WhatIf:
    """Returns the what-if analysis of a run.

    Args:
        run: Trace of the run.
        iterations: Numbers of the iterations (steps) to analyze. ``None`` selects all iterations
            for which the first replica's trace is complete.

    Raises:
        TraceError: No step can be simulated, or the recorded order of operations is impossible.
    """
    where = pipelines_of(run)
    chosen = sorted(set(run.iterations if iterations is None else iterations))
    notes = run.notes()
    if iterations is None:
        whole = run.complete_iterations(min(t.header.dp_rank for t in run.ranks.values()))
        if whole and len(whole) < len(chosen):
            cut = describe_numbers(set(chosen) - set(whole))
            notes.append(f"iterations {cut} are omitted, because operations are missing")
        chosen = list(whole) or chosen
    if not chosen:
        raise TraceError(
            f"{run.origin} does not contain iterations, because the run ended before its first "
            "iteration"
        )
    sample = thinned(np.array(chosen), run.num_spans(chosen, where.ranks.tolist()), MOST_SPANS)
    if len(sample) < len(chosen):
        notes.append(
            f"only {len(sample):,} of {len(chosen):,} iterations, evenly spaced, are analyzed, "
            f"because all of them together have more than {MOST_SPANS:,} spans; use --iterations "
            "to choose others"
        )
        chosen = sample.tolist()
    parts = []
    for some in _in_turn(run, where, chosen):
        operations = read_operations(run, where, some)
        parts.append(_Part(operations, build_graph(operations)))
    orphans = sum(part.ops.orphans for part in parts)
    if orphans:
        notes.append(
            f"{orphans} operations start without their input, because the trace does not contain "
            "the operations that produced it"
        )
    return _Answers(run, where, parts).all(notes)


def what_if_table(table: Any) -> Any:
    """Returns the what-if analysis of a table of operations. Use :func:`what_if` for a trace.

    Args:
        table: Pandas ``DataFrame``, or dict from names to columns, with the columns of
            ``imports.published.COLUMNS``.

    Returns:
        Table with one row per result. Its columns are ``what`` (``slowdown``, ``launch``,
        ``share``, ``stage``, ``repair``, ...), ``name``, ``value`` (a slowdown, a fraction of it,
        or the gain of a repair) and ``flag``. The table is a ``DataFrame`` if the input is one, and
        otherwise a dict of lists.

    Raises:
        TraceError: A column is missing, or the values in the table are inconsistent.
    """
    answers = what_if(run_of_columns(table, Path("the table")))
    rows = [
        ("slowdown", "all", answers.slowdown, ""),
        ("launch", "all", answers.launch_slowdown, ""),
        ("cause", answers.cause, answers.slowdown, ""),
        ("share", "Mw", answers.worker_share, ""),
        ("share", "Ms", answers.last_stage_share, ""),
        ("share", "lengths", answers.length_share, ""),
    ]
    rows += [
        (group, name, slowdown, "")
        for group, by_name in answers.slowdowns.items()
        for name, slowdown in by_name.items()
    ]
    rows += [("repair", repair.description, repair.gain, repair.flag) for repair in answers.repairs]
    columns = zip(*rows, strict=True)
    result = dict(zip(("what", "name", "value", "flag"), map(list, columns), strict=True))
    return result if isinstance(table, Mapping) else type(table)(result)


def _in_turn(run: RunTrace, where: Pipelines, chosen: Sequence[int]) -> Iterable[list[int]]:
    """Splits ``chosen`` into lists with at most :data:`SPANS_AT_ONCE` spans in total per list."""
    ranks = where.ranks.tolist()
    group: list[int] = []
    spans = 0
    for iteration in chosen:
        size = run.num_spans([iteration], ranks)
        if group and spans + size > SPANS_AT_ONCE:
            yield group
            group = []
            spans = 0
        group.append(iteration)
        spans += size
    yield group


Durations = Callable[[_Part], Floats]
"""Function that replaces some durations, and returns the duration of each operation in seconds."""


def _by_length(part: _Part, durations_s: Floats, power: int) -> Floats:
    """Multiplies the durations of computations by the lengths of their microbatches.

    The length of a microbatch is its time relative to the usual time. The length is raised to
    ``power``, so a power of -1 removes the effect of unequal lengths. The results are then scaled
    to preserve the total computing time of each step.
    """
    times = durations_s * part.length**power
    rows = slice(0, part.ops.num_computes)
    step = part.number_of_step(rows)
    before, after = (np.bincount(step, values[rows]) for values in (durations_s, times))
    times[rows] *= (before / np.maximum(after, 1e-12))[step]
    return times


def _only(group: str, value: int) -> Durations:
    """Returns a function that uses recorded durations for one group and ideal ones otherwise.

    The function takes a part of the run, and returns the duration of each operation. ``group`` is
    the type of the group, such as ``rank``, and ``value`` is its index.
    """
    return lambda part: np.where(part.column(group) == value, part.ops.duration_s, part.ideal_s)


def _without(group: str, values: Sequence[int]) -> Durations:
    """Returns a function that uses ideal durations for some groups and recorded ones otherwise.

    The function takes a part of the run, and returns the duration of each operation. ``group`` is
    the type of the groups, such as ``rank``, and ``values`` contains their indices.
    """
    return lambda part: np.where(
        np.isin(part.column(group), values), part.ideal_s, part.ops.duration_s
    )


def _ordered_repairs(steps_s: Mapping[tuple[str, str], float], whole: float) -> list[Repair]:
    """Returns the possible changes in ``steps_s``, sorted by the time saved, largest first.

    ``steps_s`` maps the description and flag of each change to a step time in seconds. ``whole`` is
    the step time in seconds without a change.
    """
    repairs = [
        Repair(description, flag, step_s, 1 - step_s / whole)
        for (description, flag), step_s in steps_s.items()
    ]
    return sorted(repairs, key=lambda repair: repair.step_s)


class _Answers:
    """Simulates the steps of a run with all sets of durations that the analysis needs."""

    def __init__(self, run: RunTrace, where: Pipelines, parts: list[_Part]) -> None:
        self._run, self._where, self._parts = run, where, parts
        self._header = next(iter(run.ranks.values())).header
        self._advice = advice_for(self._header)
        self._replay = RuleReplay(self._header, parts[-1].ops)
        self._measure_cells()
        usual = usual_s([p.ops.kind for p in parts], [p.ops.duration_s for p in parts])
        for part in parts:
            part.ideal_s = usual[part.ops.kind]
            part.length = self._lengths(part.ops)

    def all(self, notes: list[str]) -> WhatIf:
        """Runs all simulations, and returns the whole analysis.

        Args:
            notes: Caveats about the result, one line each.
        """
        where = self._where
        steps = self._simulate(self._groups())
        simulated = steps["", "simulated"]
        ideal = steps["", "ideal"]
        base = float(ideal.mean())
        slow: dict[str, dict[str, float]] = {}
        by_step: dict[str, dict[str, Floats]] = {"stage": {}, "replica": {}, "kind": {}}
        for (group, name), step_s in steps.items():
            if group:
                slow.setdefault(group, {})[name] = float(step_s.mean()) / base
            if group in by_step:
                by_step[group][name] = step_s / ideal
        workers = self._by_score(slow)
        slowest = workers[: max(1, int(SLOWEST_WORKERS * len(workers)))]
        repairs = self._repairs(slowest)
        shares = self._shares(workers, slowest)
        after = self._simulate(
            {**shares, **{("repair", key): d for key, (_, d) in repairs.items()}}
        )
        slow["rank"] = {
            name: float(step_s.mean()) / base
            for (group, name), step_s in after.items()
            if group == "rank"
        }
        whole = float(simulated.mean())
        lost = whole - base
        share = {
            name: (whole - float(after["share", name].mean())) / (lost or 1.0)
            for name in ("worker", "last stage", "length")
        }
        repaired_s = {
            (description, flag): self._repaired_s(whole, durations, after["repair", description])
            for description, (flag, durations) in repairs.items()
        }
        repaired_s |= self._replays(simulated) | self._recording(whole)
        repaired_s |= token_repairs(self._run, self._parts[-1].ops, whole, notes)
        if self._header.order and where.num_stages > 1:
            repaired_s = self._with_content(repaired_s, whole, notes)
        ordered = _ordered_repairs(repaired_s, whole)
        order = ("stage", "replica", "rank", "kind", "link", "length")
        return WhatIf(
            where=where,
            iterations=np.concatenate([np.unique(part.ops.iteration) for part in self._parts]),
            recorded_s=self._recorded(),
            simulated_s=simulated,
            ideal_s=ideal,
            slowdowns={group: slow[group] for group in order if group in slow},
            by_step=by_step,
            worker_share=share["worker"],
            last_stage_share=share["last stage"],
            length_share=share["length"],
            slowest=tuple(slowest),
            cause=self._cause(whole, base, list(share.values()), slowest[0], ordered),
            repairs=tuple(repair for repair in ordered if repair.gain >= WORTH),
            notes=tuple(notes),
        )

    def _groups(self) -> dict[tuple[str, str], Durations]:
        """Returns the sets of durations for simulating the slowdown of each group.

        The keys of the dict are (type, name) of the groups. Each set contains recorded durations
        for the operations of the group, and ideal durations for all other operations. The first two
        entries are the sets with all recorded durations (``simulated``) and all ideal durations.
        """
        where = self._where
        sets: dict[tuple[str, str], Durations] = {
            ("", "simulated"): lambda part: part.ops.duration_s,
            ("", "ideal"): lambda part: part.ideal_s,
        }
        kinds = sorted({int(k) for part in self._parts for k in np.unique(part.ops.kind)})
        for group, values in (
            ("stage", self._worst("stage", where.num_stages)),
            ("replica", self._worst("replica", int(where.replica.max()) + 1)),
            ("kind", kinds),
        ):
            for value in values:
                name = NAMES[value] if group == "kind" else str(value)
                sets[group, name] = _only(group, value)
        for link in self._worst_links():
            source, target = where.ranks[list(divmod(link, len(where.ranks)))]
            sets["link", f"{source} to {target}"] = _only("link", link)
        sets["length", "unequal lengths"] = lambda part: _by_length(part, part.ideal_s, 1)
        return sets

    def _shares(self, workers: list[int], slowest: list[int]) -> dict[tuple[str, str], Durations]:
        """Returns the sets of durations for simulating the causes and the slow ranks.

        The set of a cause contains the durations without the cause. The set of a rank contains
        recorded durations for this rank, and ideal durations for all others. ``slowest`` contains
        the indices of the slowest ranks, which together count as one cause. ``workers`` contains
        the indices of all ranks, slowest first.
        """
        shares: dict[tuple[str, str], Durations] = {
            ("share", "worker"): _without("rank", slowest),
            ("share", "last stage"): _without("stage", [self._where.num_stages - 1]),
            ("share", "length"): lambda part: _by_length(part, part.ops.duration_s, -1),
        }
        for worker in workers[:SHOWN]:
            shares["rank", self._where.name(worker)] = _only("rank", worker)
        return shares

    def _repaired_s(self, whole: float, durations: Durations, steps: Floats) -> float:
        """Returns the mean step time in seconds after a change of the durations.

        A run-time scheduling rule would also change the order of actions, so the rule is simulated
        as well. ``durations`` returns the durations after the change, and ``steps`` contains the
        step times simulated with them in the recorded order. ``whole`` is the mean step time
        without the change.
        """
        saved = self._replay.saved_s(durations(self._parts[-1]))
        return float(steps.mean()) if saved is None else whole - saved

    def _simulate(self, sets: Mapping[tuple[str, str], Durations]) -> dict[tuple[str, str], Floats]:
        """Simulates each set of durations, and returns its step times in seconds, ``[steps]``."""
        names = list(sets)
        step_s: dict[tuple[str, str], Floats] = {}
        for low in range(0, len(names), SETS_AT_ONCE):
            batch = names[low : low + SETS_AT_ONCE]
            steps = [
                part.graph.simulate([sets[name](part) for name in batch]) for part in self._parts
            ]
            columns = np.concatenate(steps).T
            step_s.update(zip(batch, columns, strict=True))
        return step_s

    def _measure_cells(self) -> None:
        """Measures the mean times of F, B and W passes in seconds, ``[ranks, chunks, 3]``."""
        shape = (len(self._where.ranks), self._where.stages.shape[1], WEIGHT + 1)
        total = np.zeros(shape)
        number = np.zeros(shape)
        for part in self._parts:
            cell = self._cell(part.ops)
            np.add.at(total, cell, part.ops.duration_s[: part.ops.num_computes])
            np.add.at(number, cell, 1)
        self._cells: Floats = total / np.maximum(number, 1)
        # If all ranks of a replica take longer, the replica's microbatches are long. Divide by the
        # replica's factor, so that only the speeds of its ranks remain.
        cell_sum_s = self._cells.sum(axis=(1, 2))
        ratio = cell_sum_s / self._stage_sum_s()[self._where.pp_rank]
        replica_factor = np.ones(int(self._where.replica.max()) + 1)
        if len(self._where.stages) > 1:
            for replica in range(len(replica_factor)):
                ratios = np.sort(ratio[self._where.replica == replica])
                replica_factor[replica] = ratios[(len(ratios) - 1) // 2]
        self._own_cells: Floats = self._cells / replica_factor[self._where.replica][:, None, None]

    def _stage_sum_s(self) -> Floats:
        """Returns the total time in seconds of an F, a B and a W pass on each pipeline rank.

        The times are summed over the chunks of a rank, and the median over the replicas is used.
        """
        pp_rank = self._where.pp_rank
        number = np.bincount(pp_rank, minlength=len(self._where.stages))
        return medians(pp_rank, self._cells.sum(axis=(1, 2)), number)

    def _cell(self, ops: Operations) -> tuple[Ints, Ints, Ints]:
        """Returns three index arrays: the rank, chunk and kind (F, B, W) of each computation."""
        rows = slice(0, ops.num_computes)
        return ops.worker[rows], ops.chunk[rows], ops.kind[rows]

    def _lengths(self, ops: Operations) -> Floats:
        """Returns the relative length of each operation's microbatch, or 1 if it has no microbatch.

        A length of 2 means that the microbatch takes twice as long as usual.
        """
        rows = slice(0, ops.num_computes)
        usual = self._own_cells[self._cell(ops)]
        times = ops.duration_s[rows] / np.where(usual > 0, usual, 1.0)
        replica = self._where.replica[ops.worker[rows]]
        columns = (ops.iteration[rows], replica, ops.whole_microbatches(rows))
        _, group = np.unique(row_keys(columns), return_inverse=True)
        number = np.bincount(group)
        length = np.ones(len(ops))
        length[rows] = np.maximum(medians(group, times, number)[group], 1e-3)
        return length

    def _worst_links(self) -> list[int]:
        """Returns the links with the largest total delay, as indices used by ``_Part.column``."""
        late: dict[int, float] = {}
        for part in self._parts:
            links, index = np.unique(part.column("link"), return_inverse=True)
            excess = np.bincount(index, part.ops.duration_s - part.ideal_s)
            for link, value in zip(links.tolist(), excess.tolist(), strict=True):
                late[link] = late.get(link, 0.0) + value
        worst = sorted(late, key=lambda link: -late[link])
        return [link for link in worst if link >= 0 and late[link] > 0][:SHOWN]

    def _worst(self, group: str, count: int) -> list[int]:
        """Returns the indices of all stages or replicas, or of the slowest if there are many.

        Args:
            group: ``stage`` or ``replica``.
            count: Number of stages or replicas.
        """
        if count <= MOST_GROUPS:
            return list(range(count))
        late_s = np.zeros(count)
        for part in self._parts:
            excess_s = np.maximum(part.ops.duration_s - part.ideal_s, 0)
            late_s += np.bincount(part.column(group), excess_s, minlength=count)
        return sorted(np.argsort(-late_s, kind="stable")[:MOST_GROUPS].tolist())

    def _by_score(self, slow: Mapping[str, Mapping[str, float]]) -> list[int]:
        """Returns the indices of all ranks, sorted from the slowest to the fastest.

        A rank's score is the slowdown of its replica or of its stage, whichever is smaller. Stages
        and replicas that were not simulated separately count as the fastest.
        """
        where = self._where
        scores = [
            min(
                slow["replica"].get(str(where.replica[worker]), 0.0),
                max(
                    slow["stage"].get(str(stage), 0.0)
                    for stage in where.stages[where.pp_rank[worker]]
                ),
            )
            for worker in range(len(where.ranks))
        ]
        return sorted(range(len(scores)), key=lambda worker: (-scores[worker], worker))

    def _repairs(self, slowest: Sequence[int]) -> dict[str, tuple[str, Durations]]:
        """Maps the description of each possible change to its flag or advice, and its durations.

        ``slowest`` contains the indices of the slowest ranks.
        """
        where = self._where
        repairs: dict[str, tuple[str, Durations]] = {}
        work_s = self._own_cells.sum(axis=(1, 2))
        usual = self._stage_sum_s()
        work = np.array(self._header.work)
        if len(work) == where.num_stages:
            work_s = work_s / work[where.stages].sum(axis=1)[where.pp_rank]
        is_alone = not where.replica.any()
        for worker in slowest[:3]:
            peers = np.arange(len(work_s)) != worker
            if not is_alone:
                peers &= where.pp_rank == where.pp_rank[worker]
            factor = work_s[worker] / np.median(work_s[peers]) if peers.any() else 1.0
            if factor > 1.02:
                factors = np.ones(len(work_s))
                factors[worker] = 1 / factor
                name = where.name(worker)
                repairs[f"{name} as fast as others, not {factor:.2f} times as slow"] = (
                    self._advice.slow_rank
                    + ("" if is_alone else self._advice.slow_replica)
                    + "otherwise exclude its machine",
                    self._scaled(factors),
                )
        if len(usual) > 1 and usual.max() > 1.02 * usual.mean():
            flag, factors = self._partition(usual)
            repairs[_EVEN] = flag, self._scaled(factors[where.pp_rank])
        repairs["links without jitter"] = (
            self._advice.links,
            _without("kind", [FORWARD_COMM, BACKWARD_COMM]),
        )
        repairs["microbatches of equal length"] = (
            self._advice.one_length if is_alone else self._advice.lengths,
            lambda part: _by_length(part, part.ops.duration_s, -1),
        )
        return repairs

    def _scaled(self, factors: Floats) -> Durations:
        """Returns a function that multiplies each rank's computing times by its factor."""
        return lambda part: (
            part.ops.duration_s * np.where(part.ops.kind <= WEIGHT, factors[part.ops.worker], 1.0)
        )

    def _partition(self, usual: Floats) -> tuple[str, Floats]:
        """Returns the flag that equalizes the stages, and a factor for the time of each rank.

        ``usual`` contains the usual computing time of each pipeline rank in seconds.
        """
        header = self._header
        layers = np.array(header.layers, dtype=np.float64)
        if self._where.stages.shape[1] > 1 or len(layers) != len(usual) or not layers.all():
            worst = int(np.argmax(usual))
            less = 1 - usual.mean() / usual.max()
            flag = self._advice.partition.rstrip('= "')
            return (
                f"{flag} with {less:.0%} less work on pipeline rank {worst}",
                usual.mean() / usual,
            )
        costs = split_costs(usual, header.layers, header.work, range(len(usual)))
        better = best_partition(costs, int(layers.sum()))
        flag = self._advice.of_partition(format_partition(better))
        return flag, costs.stage_ns(better) / usual

    def _with_content(
        self, repaired_s: dict[tuple[str, str], float], whole: float, notes: list[str]
    ) -> dict[tuple[str, str], float]:
        """Returns ``repaired_s``, extended by step times with other settings of a ``Pipeline``.

        Args:
            repaired_s: Mean step time in seconds, keyed by the description and flag of each change.
            whole: Mean simulated step time in seconds without a change.
            notes: Caveats about the result. A caveat about the added times may be appended.
        """
        content = content_answers(self._run, [part.ops for part in self._parts])
        left_out = _EVEN if content.covers_partitions else ""
        kept_s = {names: s for names, s in repaired_s.items() if names[0] != left_out}
        notes += [content.note] * bool(content.note)
        return kept_s | {names: whole - saved for names, saved in content.saved_s.items()}

    def _replays(self, simulated: Floats) -> dict[tuple[str, str], float]:
        """Simulates another schedule, another distribution of microbatches to replicas, or both.

        Returns:
            Dict from (description, flag) of each change to the mean step time in seconds.
        """
        header = self._header
        if self._where.num_stages == 1:
            return {}
        times = recorded_times([part.ops for part in self._parts], header.work)
        if times is None:
            return self._sliced(simulated)
        steps = np.concatenate([np.unique(part.ops.iteration) for part in self._parts]).tolist()
        by_length = [step for _, step in sorted(zip(simulated.tolist(), steps, strict=True))]
        # Choose steps of different durations: sort the steps by duration, divide them into equal
        # parts, and use the middle step of each part.
        count = steps_at_most(self._parts[-1].ops, REPLAYED)
        quantiles = (np.arange(count) + 0.5) * len(by_length) / count
        chosen = {by_length[int(index)] for index in quantiles} & set(times.steps)
        if not chosen:
            return {}

        def mean_s(schedule: OtherSchedule) -> float:
            return float(np.mean([times.step_s(step, schedule) for step in chosen]))

        fixed = "seq-1f1b" if times.is_cut else "1f1b"
        # Schedules with a fixed order require that all microbatches have the same number of slices.
        follows_rule = header.schedule == "adaptive" or times.is_unequal
        present = "adaptive" if follows_rule else fixed
        replayed_s = mean_s(OtherSchedule(present, 1))
        whole = float(simulated.mean())
        order = self._advice.adaptive
        deal = "--balance-replicas both"
        schedules = {("adaptive order", order): OtherSchedule("adaptive", 2)}
        if not (times.is_cut or header.order):
            rule = "adaptive" if present == "adaptive" else "seq-1f1b"
            flag = SLICES_FLAG if rule == present else f"--pipeline-schedule {rule}, {SLICES_FLAG}"
            schedules[SLICES_TEXT, flag] = OtherSchedule(rule, 1, slices=SLICES)
            both = f"both: adaptive order and {SLICES_TEXT}"
            schedules[both, f"{order}, {SLICES_FLAG}"] = OtherSchedule("adaptive", 2, slices=SLICES)
        if self._where.replica.any() and not header.order:
            both = "both: adaptive order and dealt microbatches"
            dealt = OtherSchedule(present, 1, is_dealt=True)
            schedules["microbatches dealt over replicas", deal] = dealt
            schedules[both, f"{order}, {deal}"] = OtherSchedule("adaptive", 2, is_dealt=True)
        return {
            names: whole - replayed_s + mean_s(schedule) for names, schedule in schedules.items()
        }

    def _sliced(self, simulated: Floats) -> dict[tuple[str, str], float]:
        """Simulates steps under ``adaptive`` in which each microbatch is split into slices.

        Returns:
            Dict from (description, flag) of each change to the mean step time in seconds.
        """
        ops = self._parts[-1].ops
        iterations = np.unique(ops.iteration).tolist()
        is_cut = any(ops.where.slices(iteration, 0) != 1 for iteration in iterations)
        if is_cut or self._header.order:
            return {}
        saved_s = self._replay.saved_s(ops.duration_s, slices=SLICES)
        if saved_s is None:
            return {}
        return {(SLICES_TEXT, SLICES_FLAG): float(simulated.mean()) - saved_s}

    def _recording(self, whole_s: float) -> dict[tuple[str, str], float]:
        """Estimates the step time in seconds that a run would have without tracing.

        ``whole_s`` is the mean simulated step time with tracing. The result is empty for an
        imported trace, because this project's recorder did not write it.
        """
        if self._header.schedule == "imported":
            return {}
        spans = max(max(trace.num_spans.values()) for trace in self._run.ranks.values())
        return {("tracing off", self._advice.no_trace): whole_s - spans * RECORDED_SPAN_S}

    def _recorded(self) -> Floats:
        """Returns the recorded duration of each step in seconds, ``[steps]``.

        A step lasts from the start of its first operation to the end of its last one.
        """
        steps = []
        for part in self._parts:
            is_row = part.ops.source < 0
            step = part.number_of_step(is_row)
            first = np.full(int(step.max()) + 1, np.iinfo(np.int64).max)
            last = np.zeros_like(first)
            np.minimum.at(first, step, part.ops.start_ns[is_row])
            np.maximum.at(last, step, part.ops.end_ns[is_row])
            steps.append((last - first) / 1e9)
        return np.concatenate(steps)

    def _cause(
        self,
        whole: float,
        base: float,
        shares: Sequence[float],
        slowest: int,
        repairs: Sequence[Repair],
    ) -> str:
        """Returns the cause that explains most of the slowdown.

        Returns ``none`` if little time is lost, or ``mixed`` if no single cause explains enough.

        Args:
            whole: Mean simulated step time in seconds.
            base: Mean ideal step time in seconds.
            shares: Fraction of the slowdown that each cause in :data:`CAUSES` explains.
            slowest: Index of the slowest rank.
            repairs: All possible changes, with the fraction of the step time that each saves.
        """
        largest = int(np.argmax(shares))
        if whole >= SLOW * base:
            return CAUSES[largest] if shares[largest] >= CAUSE_SHARE else "mixed"
        # Without replicas, a slow rank raises the mean with which it is compared, so its slowdown
        # looks small. In this case, use the time that would be saved if the rank were faster.
        name = self._where.name(slowest)
        gains = [
            repair.gain for repair in repairs if repair.description.startswith(f"{name} as fast")
        ]
        if max(gains, default=0.0) < 1 - 1 / SLOW:
            return "none"
        return CAUSES[int(self._where.pp_rank[slowest] == len(self._where.stages) - 1)]
