"""Answers what a run loses, to whom, and what it would gain if that were mended.

Every answer is a simulation of the recorded steps with some durations replaced. ``ideal`` is the
mean of the kind of work over replicas, stages and steps, for communication the median transfer:
then nobody is slower than others. A group's slowdown is that of the ideal step with only the
group's durations as recorded; a repair's gain is what the recorded step loses with only the
repaired ones replaced. Steps are simulated from their dependencies, without the gaps that hosts
left.

Source: arXiv 2505.05713, sections 3 and 4. Deviates in the microbatches' lengths, found there by
correlation: here the median over stages and kinds of what a microbatch takes, beside the usual, is
its length, and is put in or taken out like any other group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.diagnose.stage_costs import best_partition, split_costs
from megatron.adaptive.trace.imports.published import run_of_columns
from megatron.adaptive.trace.metrics import medians
from megatron.adaptive.trace.read import RunTrace, describe_numbers
from megatron.adaptive.trace.span_columns import Ints, Mask, row_keys
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
from megatron.adaptive.trace.whatif.replay import recorded_times, rule_saves_s

SPANS_AT_ONCE = 1_000_000
"""Steps are read and their dependencies found so many spans at a time."""
SETS_AT_ONCE = 8
SLOWEST_WORKERS = 0.03
"""Share of the ranks that count as the slowest workers; one at least."""
SHOWN = 5
"""Ranks and links that are simulated one by one, the worst first."""
SLOW = 1.05
"""Slowdown below which nothing is named as its cause."""
CAUSE_SHARE = 0.3
WORTH = 0.002
"""Share of a step that a repair must gain to be named."""
REPLAYED = 4
"""Steps that are replayed under other schedules."""
RECORDED_SPAN_S = 1e-6
"""Processor time of recording and writing a span, measured with the recorder."""

CAUSES = ("worker", "last stage", "sequence lengths")


@dataclass(frozen=True)
class Repair:
    """Something that could be done.

    Attributes:
        what: it, for people.
        flag: what does it.
        step_s: mean step with it.
        gain: share of the simulated step that it saves.
    """

    what: str
    flag: str
    step_s: float
    gain: float


@dataclass(frozen=True, eq=False)
class WhatIf:
    """Holds the answers for a run.

    Attributes:
        where: its ranks.
        iterations: numbers of the steps.
        recorded_s: ``[steps]``, from the first start to the last end.
        simulated_s: ``[steps]``, with recorded durations: without gaps of the host.
        ideal_s: ``[steps]``, with nobody slower than others.
        slowdowns: by what they are divided by (``stage``, ``replica``, ``rank``, ``kind``,
            ``link``, ``length``) and name, the step with only these as recorded over the ideal one.
        by_step: ``stage``, ``replica`` and ``kind`` by step: ``[steps]`` each.
        worker_share: share of the slowdown that goes away with the slowest workers repaired (Mw).
        last_stage_share: the same with the last stage repaired (Ms).
        length_share: the same with all microbatches of one length.
        slowest: the workers of ``worker_share``.
        cause: one of :data:`CAUSES`, ``none`` where little is lost, ``mixed`` where none is enough.
        repairs: the largest gain first.
        notes: caveats, a line each.
    """

    where: Pipelines
    iterations: Ints
    recorded_s: Floats
    simulated_s: Floats
    ideal_s: Floats
    slowdowns: Mapping[str, Mapping[str, float]]
    by_step: Mapping[str, Mapping[str, Floats]]
    worker_share: float
    last_stage_share: float
    length_share: float
    slowest: tuple[int, ...]
    cause: str
    repairs: tuple[Repair, ...]
    notes: tuple[str, ...] = ()

    @property
    def slowdown(self) -> float:
        """Returns S: the mean simulated step over the mean ideal one."""
        return float(self.simulated_s.mean() / self.ideal_s.mean())

    @property
    def launch_slowdown(self) -> float:
        """Returns the mean recorded step over the mean simulated one: how far the latter is off."""
        return float(self.recorded_s.mean() / self.simulated_s.mean())

    def to_json(self) -> dict[str, Any]:
        """Returns all of it as what ``json.dumps`` takes."""
        steps = self.iterations.tolist()
        return {
            "slowdown": self.slowdown,
            "launch_slowdown": self.launch_slowdown,
            "cause": self.cause,
            "Mw": self.worker_share,
            "Ms": self.last_stage_share,
            "length_share": self.length_share,
            "slowest_ranks": self.where.ranks[list(self.slowest)].tolist(),
            **{f"by_{what}": dict(found) for what, found in self.slowdowns.items()},
            **{
                f"by_{what}_per_step": {
                    str(step): {name: float(values[at]) for name, values in found.items()}
                    for at, step in enumerate(steps)
                }
                for what, found in self.by_step.items()
            },
            **{
                f"{what}_s": dict(zip(map(str, steps), values.tolist(), strict=True))
                for what, values in (
                    ("recorded", self.recorded_s),
                    ("simulated", self.simulated_s),
                    ("ideal", self.ideal_s),
                )
            },
            "repairs": [asdict(repair) for repair in self.repairs],
            "notes": list(self.notes),
        }

    def format(self) -> str:
        """Returns some lines for people."""
        lines = [
            f"steps {describe_numbers(self.iterations.tolist())} of {len(self.where.ranks)} ranks "
            f"take {self.recorded_s.mean():.4g} s, simulated {self.simulated_s.mean():.4g} s "
            f"({self.launch_slowdown - 1:+.1%} for what the simulation leaves out), "
            f"{self.ideal_s.mean():.4g} s if nobody were slower than others",
            f"slowdown {self.slowdown:.3f}: "
            + {
                "none": "nothing to mend here",
                "mixed": "no single cause",
                "worker": f"slow {', '.join(map(self.where.name, self.slowest[:3]))}",
                "last stage": f"the last stage, {self.where.num_stages - 1}, has more to do",
                "sequence lengths": "microbatches of unequal lengths",
            }[self.cause],
            f"  of it goes away with the slowest workers repaired {self.worker_share:.0%}, with "
            f"the last stage {self.last_stage_share:.0%}, with equal lengths "
            f"{self.length_share:.0%}",
        ]
        for what, found in self.slowdowns.items():
            worst = sorted(found.items(), key=lambda pair: -pair[1])[: SHOWN + 1]
            named = ", ".join(f"{name} {value:.3f}" for name, value in worst)
            lines.append(f"  slowdown by {what}: {named}")
        lines.append("what repairs would gain:" if self.repairs else "no repair would gain much")
        lines += [
            f"  {repair.gain:6.1%}  {repair.what} ({repair.step_s:.4g} s): {repair.flag}"
            for repair in self.repairs
        ]
        return "\n".join(lines)


@dataclass(eq=False)
class _Part:
    """Operations of some steps with their dependencies."""

    ops: Operations
    graph: Graph
    ideal_s: Floats = field(default_factory=lambda: np.zeros(0))
    length: Floats = field(default_factory=lambda: np.zeros(0))

    def column(self, what: str) -> Ints:
        """``[operations]``: the stage, replica, rank, kind or link of each, -1 for no link."""
        ops, where = self.ops, self.ops.where
        if what == "replica":
            return where.replica[ops.worker]
        if what == "link":
            return np.where(ops.source < 0, -1, ops.source * len(where.ranks) + ops.worker)
        return {"stage": ops.stage, "rank": ops.worker, "kind": ops.kind}[what]

    def number_of_step(self, rows: slice | Mask = slice(None)) -> Ints:
        """``[rows]``: the place of each operation's step among those of this part."""
        _, step = np.unique(self.ops.iteration[rows], return_inverse=True)
        return step


def what_if(run: RunTrace, iterations: Iterable[int] | None = None) -> WhatIf:
    """Computes the answers for a run.

    Args:
        run: the run.
        iterations: only these; by default those in which the first replica did everything.

    Raises:
        TraceError: there is nothing to simulate, or the trace contradicts itself.
    """
    where = pipelines_of(run)
    chosen = sorted(set(run.iterations if iterations is None else iterations))
    notes = run.notes()
    if iterations is None:
        whole = run.complete_iterations(min(t.header.dp_rank for t in run.ranks.values()))
        if whole and len(whole) < len(chosen):
            cut = describe_numbers(set(chosen) - set(whole))
            notes.append(f"iterations {cut} lack operations and are left out")
        chosen = list(whole) or chosen
    if not chosen:
        raise TraceError(f"{run.origin} holds no iteration; the run ended before its first one")
    parts = []
    for some in _in_turn(run, where, chosen):
        operations = read_operations(run, where, some)
        parts.append(_Part(operations, build_graph(operations)))
    orphans = sum(part.ops.orphans for part in parts)
    if orphans:
        notes.append(
            f"{orphans} operations whose input nobody is recorded to have made start without it"
        )
    return _Answers(run, where, parts).all(notes)


def what_if_table(table: Any) -> Any:
    """Computes the slowdowns and repairs of a table of operations.

    Args:
        table: a pandas ``DataFrame``, or a dict of columns; see ``imports.published.COLUMNS``.

    Returns:
        A row per answer with ``what`` (``slowdown``, ``launch``, ``share``, ``stage``, ``repair``,
        ...), ``name``, ``value`` (a slowdown, a share, or for a repair its gain) and ``flag``: a
        ``DataFrame`` where one was given, else a dict of lists.

    Raises:
        TraceError: a column is missing, or the table contradicts itself.
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
        (w, name, v, "") for w, found in answers.slowdowns.items() for name, v in found.items()
    ]
    rows += [("repair", repair.what, repair.gain, repair.flag) for repair in answers.repairs]
    columns = zip(*rows, strict=True)
    found = dict(zip(("what", "name", "value", "flag"), map(list, columns), strict=True))
    return found if isinstance(table, Mapping) else type(table)(found)


def _in_turn(run: RunTrace, where: Pipelines, chosen: Sequence[int]) -> Iterable[list[int]]:
    """Yields iterations, as many at a time as have few enough spans."""
    ranks = where.ranks.tolist()
    some: list[int] = []
    spans = 0
    for iteration in chosen:
        size = run.num_spans([iteration], ranks)
        if some and spans + size > SPANS_AT_ONCE:
            yield some
            some, spans = [], 0
        some.append(iteration)
        spans += size
    yield some


Durations = Callable[[_Part], Floats]


def _by_length(part: _Part, durations_s: Floats, power: int) -> Floats:
    """Puts lengths in (power 1) or takes them out (-1); computes of a step keep their sum."""
    times = durations_s * part.length**power
    rows = slice(0, part.ops.num_computes)
    step = part.number_of_step(rows)
    before, after = (np.bincount(step, values[rows]) for values in (durations_s, times))
    times[rows] *= (before / np.maximum(after, 1e-12))[step]
    return times


def _only(what: str, value: int) -> Durations:
    """Takes the ideal, the operations of a stage, replica, rank, kind or link as recorded."""
    return lambda part: np.where(part.column(what) == value, part.ops.duration_s, part.ideal_s)


def _without(what: str, values: Sequence[int]) -> Durations:
    """Takes recorded times, the operations of some stages, ranks or kinds ideal."""
    return lambda part: np.where(
        np.isin(part.column(what), values), part.ideal_s, part.ops.duration_s
    )


class _Answers:
    """Simulates the sets of durations that the answers need."""

    def __init__(self, run: RunTrace, where: Pipelines, parts: list[_Part]) -> None:
        self._run, self._where, self._parts = run, where, parts
        self._header = next(iter(run.ranks.values())).header
        self._measure_cells()
        usual = usual_s([p.ops.kind for p in parts], [p.ops.duration_s for p in parts])
        for part in parts:
            part.ideal_s = usual[part.ops.kind]
            part.length = self._lengths(part.ops)

    def all(self, notes: list[str]) -> WhatIf:
        """Returns everything."""
        where, sets = self._where, dict[tuple[str, str], Durations]()
        sets["", "simulated"] = lambda part: part.ops.duration_s
        sets["", "ideal"] = lambda part: part.ideal_s
        kinds = sorted({int(k) for part in self._parts for k in np.unique(part.ops.kind)})
        for what, values in (
            ("stage", range(where.num_stages)),
            ("replica", range(int(where.replica.max()) + 1)),
            ("kind", kinds),
        ):
            for value in values:
                sets[what, NAMES[value] if what == "kind" else str(value)] = _only(what, value)
        for link in self._worst_links():
            source, target = where.ranks[list(divmod(link, len(where.ranks)))]
            sets["link", f"{source} to {target}"] = _only("link", link)
        sets["length", "unequal lengths"] = lambda part: _by_length(part, part.ideal_s, 1)
        steps = self._simulate(sets)
        simulated, ideal = steps["", "simulated"], steps["", "ideal"]
        base = float(ideal.mean())
        slow: dict[str, dict[str, float]] = {}
        by_step: dict[str, dict[str, Floats]] = {"stage": {}, "replica": {}, "kind": {}}
        for (what, name), found in steps.items():
            if what:
                slow.setdefault(what, {})[name] = float(found.mean()) / base
            if what in by_step:
                by_step[what][name] = found / ideal
        workers = self._by_score(slow)
        slowest = workers[: max(1, int(SLOWEST_WORKERS * len(workers)))]
        repairs = self._repairs(slowest)
        shares: dict[tuple[str, str], Durations] = {
            ("share", "worker"): _without("rank", slowest),
            ("share", "last stage"): _without("stage", [where.num_stages - 1]),
            ("share", "length"): lambda part: _by_length(part, part.ops.duration_s, -1),
        }
        for worker in workers[:SHOWN]:
            shares["rank", where.name(worker)] = _only("rank", worker)
        after = self._simulate(
            {**shares, **{("repair", key): d for key, (_, d) in repairs.items()}}
        )
        slow["rank"] = {
            n: float(v.mean()) / base for (what, n), v in after.items() if what == "rank"
        }
        lost = float(simulated.mean()) - base
        share = {
            name: (float(simulated.mean()) - float(after["share", name].mean())) / (lost or 1.0)
            for name in ("worker", "last stage", "length")
        }
        whole = float(simulated.mean())
        steps_s = {
            (what, flag): self._mended_s(whole, takes, after["repair", what])
            for what, (flag, takes) in repairs.items()
        }
        steps_s |= self._replays(simulated) | self._recording(whole)
        ordered = sorted(
            (Repair(*what, step_s, 1 - step_s / whole) for what, step_s in steps_s.items()),
            key=lambda repair: repair.step_s,
        )
        order = ("stage", "replica", "rank", "kind", "link", "length")
        return WhatIf(
            where=where,
            iterations=np.concatenate([np.unique(part.ops.iteration) for part in self._parts]),
            recorded_s=self._recorded(),
            simulated_s=simulated,
            ideal_s=ideal,
            slowdowns={what: slow[what] for what in order if what in slow},
            by_step=by_step,
            worker_share=share["worker"],
            last_stage_share=share["last stage"],
            length_share=share["length"],
            slowest=tuple(slowest),
            cause=self._cause(whole, base, list(share.values()), slowest[0], ordered),
            repairs=tuple(repair for repair in ordered if repair.gain >= WORTH),
            notes=tuple(notes),
        )

    def _mended_s(self, whole: float, takes: Durations, steps: Floats) -> float:
        """Returns the mean step with a repair; under a run-time rule the order changes with it."""
        part = self._parts[-1]
        iterations = np.unique(part.ops.iteration).tolist()
        saved = rule_saves_s(self._header, part.ops, takes(part), iterations)
        return float(steps.mean()) if saved is None else whole - saved

    def _simulate(self, sets: Mapping[tuple[str, str], Durations]) -> dict[tuple[str, str], Floats]:
        names = list(sets)
        found: dict[tuple[str, str], Floats] = {}
        for low in range(0, len(names), SETS_AT_ONCE):
            some = names[low : low + SETS_AT_ONCE]
            steps = [part.graph.simulate([sets[n](part) for n in some]) for part in self._parts]
            columns = np.concatenate(steps).T
            found.update(zip(some, columns, strict=True))
        return found

    def _measure_cells(self) -> None:
        """Finds ``[workers, chunks, 3]``, mean seconds of forward, backward and weight on each."""
        shape = (len(self._where.ranks), self._where.stages.shape[1], WEIGHT + 1)
        total, number = np.zeros(shape), np.zeros(shape)
        for part in self._parts:
            at = self._cell(part.ops)
            np.add.at(total, at, part.ops.duration_s[: part.ops.num_computes])
            np.add.at(number, at, 1)
        self._cells: Floats = total / np.maximum(number, 1)
        # What all ranks of a replica take longer lies in its microbatches, not in its ranks.
        takes = self._cells.sum(axis=(1, 2))
        ratio = takes / self._stage_takes()[self._where.pp_rank]
        of_replica = np.ones(int(self._where.replica.max()) + 1)
        if len(self._where.stages) > 1:
            for replica in range(len(of_replica)):
                mine = np.sort(ratio[self._where.replica == replica])
                of_replica[replica] = mine[(len(mine) - 1) // 2]
        self._own_cells: Floats = self._cells / of_replica[self._where.replica][:, None, None]

    def _stage_takes(self) -> Floats:
        """Returns by pipeline rank: seconds of one of each action, median of replicas."""
        takes, pp_rank = self._cells.sum(axis=(1, 2)), self._where.pp_rank
        number = np.bincount(pp_rank, minlength=len(self._where.stages))
        return medians(pp_rank, takes, number)

    def _cell(self, ops: Operations) -> tuple[Ints, Ints, Ints]:
        rows = slice(0, ops.num_computes)
        return ops.worker[rows], ops.chunk[rows], ops.kind[rows]

    def _lengths(self, ops: Operations) -> Floats:
        """Returns how many times as long as usual each compute's microbatch is, 1 for others."""
        rows = slice(0, ops.num_computes)
        usual = self._own_cells[self._cell(ops)]
        times = ops.duration_s[rows] / np.where(usual > 0, usual, 1.0)
        columns = (ops.iteration[rows], self._where.replica[ops.worker[rows]], ops.microbatch[rows])
        _, group = np.unique(row_keys(columns), return_inverse=True)
        number = np.bincount(group)
        length = np.ones(len(ops))
        length[rows] = np.maximum(medians(group, times, number)[group], 1e-3)
        return length

    def _worst_links(self) -> list[int]:
        """Returns the links, as of ``_Part.column``, whose messages were late most."""
        late: dict[int, float] = {}
        for part in self._parts:
            links, place = np.unique(part.column("link"), return_inverse=True)
            excess = np.bincount(place, part.ops.duration_s - part.ideal_s)
            for link, value in zip(links.tolist(), excess.tolist(), strict=True):
                late[link] = late.get(link, 0.0) + value
        worst = sorted(late, key=lambda link: -late[link])
        return [link for link in worst if link >= 0 and late[link] > 0][:SHOWN]

    def _by_score(self, slow: Mapping[str, Mapping[str, float]]) -> list[int]:
        """Sorts workers, the slowest first, by the smaller slowdown of their replica and stage."""
        where = self._where
        scores = [
            min(
                slow["replica"][str(where.replica[worker])],
                max(slow["stage"][str(stage)] for stage in where.stages[where.pp_rank[worker]]),
            )
            for worker in range(len(where.ranks))
        ]
        return sorted(range(len(scores)), key=lambda worker: (-scores[worker], worker))

    def _repairs(self, slowest: Sequence[int]) -> dict[str, tuple[str, Durations]]:
        """Returns repairs by name: the flag that does it, and the durations then."""
        where, found = self._where, dict[str, tuple[str, Durations]]()
        takes = self._own_cells.sum(axis=(1, 2))
        usual = self._stage_takes()
        work = np.array(self._header.work)
        if len(work) == where.num_stages:
            takes = takes / work[where.stages].sum(axis=1)[where.pp_rank]
        is_alone = not where.replica.any()
        for worker in slowest[:3]:
            peers = np.arange(len(takes)) != worker
            if not is_alone:
                peers &= where.pp_rank == where.pp_rank[worker]
            factor = takes[worker] / np.median(takes[peers]) if peers.any() else 1.0
            if factor > 1.02:
                factors = np.ones(len(takes))
                factors[worker] = 1 / factor
                found[f"{where.name(worker)} as fast as others, not {factor:.2f} times as long"] = (
                    "--repartition auto moves layers off it; "
                    + ("" if is_alone else "--balance-replicas speed gives its replica less; ")
                    + "else leave its machine out",
                    self._scaled(factors),
                )
        if len(usual) > 1 and usual.max() > 1.02 * usual.mean():
            text, factors = self._partition(usual)
            found["stages of equal work"] = text, self._scaled(factors[where.pp_rank])
        found["links without jitter"] = (
            "look at the links named above; --transport rdma or tcp where it is gloo",
            _without("kind", [FORWARD_COMM, BACKWARD_COMM]),
        )
        found["microbatches of one length"] = (
            "--pack-to TOKENS, or sort documents by length"
            if is_alone
            else "--balance-replicas lengths deals them alike; --pack-to TOKENS makes them equal",
            lambda part: _by_length(part, part.ops.duration_s, -1),
        )
        return found

    def _scaled(self, factors: Floats) -> Durations:
        """Takes recorded times, the computes of each worker multiplied."""
        return lambda part: (
            part.ops.duration_s * np.where(part.ops.kind <= WEIGHT, factors[part.ops.worker], 1.0)
        )

    def _partition(self, usual: Floats) -> tuple[str, Floats]:
        """Returns the flag that makes stages equal, and the factor of each pipeline rank's work."""
        header = self._header
        layers = np.array(header.layers, dtype=np.float64)
        if self._where.stages.shape[1] > 1 or len(layers) != len(usual) or not layers.all():
            worst = int(np.argmax(usual))
            return (
                f"--partition with {1 - usual.mean() / usual.max():.0%} less work on pipeline rank "
                f"{worst}",
                usual.mean() / usual,
            )
        costs = split_costs(usual, header.layers, header.work, range(len(usual)))
        better = best_partition(costs, int(layers.sum()))
        return f"--partition {format_partition(better)}", costs.stage_ns(better) / usual

    def _replays(self, simulated: Floats) -> dict[tuple[str, str], float]:
        """Replays some steps: another schedule, microbatches dealt over replicas, and both."""
        header = self._header
        times = recorded_times([part.ops for part in self._parts], header.work)
        if times is None or self._where.num_stages == 1:
            return {}
        steps = np.concatenate([np.unique(part.ops.iteration) for part in self._parts]).tolist()
        by_length = [step for _, step in sorted(zip(simulated.tolist(), steps, strict=True))]
        # One from each part of the steps, by their length.
        places = (np.arange(REPLAYED) + 0.5) * len(by_length) / REPLAYED
        some = {by_length[int(place)] for place in places} & set(times.steps)
        if not some:
            return {}

        def mean_s(schedule: str, chunks: int, dealt: bool) -> float:
            return float(
                np.mean([times.step_s(s, schedule, chunks=chunks, dealt=dealt) for s in some])
            )

        own = "adaptive" if header.schedule == "adaptive" else "1f1b"
        now, whole = mean_s(own, 1, False), float(simulated.mean())
        order = "--pipeline-schedule adaptive with two chunks per rank"
        deal = "--balance-replicas both"
        hows = {("adaptive order", order): ("adaptive", 2, False)}
        if self._where.replica.any():
            both = "both: adaptive order and dealt microbatches"
            hows["microbatches dealt over replicas", deal] = (own, 1, True)
            hows[both, f"{order}, {deal}"] = ("adaptive", 2, True)
        return {what: whole - now + mean_s(*how) for what, how in hows.items()}

    def _recording(self, whole_s: float) -> dict[tuple[str, str], float]:
        """Estimates tracing off, where this project's recorder traced."""
        if self._header.schedule == "imported":
            return {}
        spans = max(max(trace.num_spans.values()) for trace in self._run.ranks.values())
        return {("tracing off", "no --trace-dir"): whole_s - spans * RECORDED_SPAN_S}

    def _recorded(self) -> Floats:
        steps = []
        for part in self._parts:
            is_row = part.ops.source < 0
            at = part.number_of_step(is_row)
            first = np.full(int(at.max()) + 1, np.iinfo(np.int64).max)
            last = np.zeros_like(first)
            np.minimum.at(first, at, part.ops.start_ns[is_row])
            np.maximum.at(last, at, part.ops.end_ns[is_row])
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
        """Names what most of the slowdown goes away with."""
        place = int(np.argmax(shares))
        if whole >= SLOW * base:
            return CAUSES[place] if shares[place] >= CAUSE_SHARE else "mixed"
        # A rank alone in its stage raises the mean that it is compared with.
        name = self._where.name(slowest)
        gains = [repair.gain for repair in repairs if repair.what.startswith(f"{name} as fast")]
        if max(gains, default=0.0) < 1 - 1 / SLOW:
            return "none"
        return CAUSES[int(self._where.pp_rank[slowest] == len(self._where.stages) - 1)]
