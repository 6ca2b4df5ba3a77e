"""Computes provably optimal step times of small pipelines with a split backward pass.

    python -m studies.optimal --out studies/optimal.json [--only PATTERN] [--limit SECONDS]

The results are a reference for run-time rules. A case is a pipeline of p ranks with two chunks each
in the V placement, m microbatches, and integer durations of F (forward), B (backward for input
gradients) and W (backward for weight gradients) per stage. The optimum is the minimum makespan of
all schedules in which

- F(s, j) follows F(s-1, j), B(last, j) follows the last stage's F, B(s, j) follows B(s+1, j), and
  W(s, j) follows B(s, j); a message to another rank takes ``latency``, a message within a rank
  takes no time;
- a rank runs one action at a time without interruption, but W consists of ``weight_pieces`` equal
  pieces, between which other actions may run;
- each stage runs the actions of a kind in ascending order of microbatches;
- a rank with a cap never holds more than ``cap`` units; a microbatch on one chunk holds 1/2 unit
  from the start of its F to the end of its last piece of W. A cap of m units or more has no effect
  and is recorded as null.

The lower bound in the file is simple. Let head(a) be the longest chain that precedes action a, and
tail(a) the longest chain that follows it, along dependencies and ascending microbatches. Consider
the actions of one rank with head >= h and tail >= q. None of them starts before h, and the step
ends at least q after the last of them. So for every rank, h and q:

    makespan >= h + (sum of the durations of those actions) + q

If h = q = 0, the sum is the total work of a rank; for a single action, the bound is a chain. The
upper bound is the best schedule that a rule of this project produces in simulation. If the two
bounds differ, CP-SAT searches for the optimum. Cases without a proven optimum are omitted. A
separate implementation of the rules above checks every optimal schedule.

To add cases, add a row to ``GRID`` and run the program again; existing results are kept. Cases
without a proof are listed under ``unproven``, and each run tries them again.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from ortools.sat.python import cp_model

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron.adaptive.schedule.catalog import make_policies  # noqa: E402
from megatron.adaptive.schedule.simulate import simulate  # noqa: E402
from megatron.adaptive.schedule.stage_placement import Placement  # noqa: E402
from megatron.adaptive.schedule.workload import Link, StageProfile, StageTimes  # noqa: E402

VERSION = 1
CHUNKS = 2
PIECES = 4
RULES = ("adaptive", "hinted", "bfc", "dfc")
UNIFORM = {
    "even": (12, 12, 12),
    "less-weight": (12, 16, 8),
    "less-forward": (8, 12, 12),
    "recompute": (12, 24, 12),
}
"""Durations of F, B and W, which are equal on all stages. In ``recompute``, B repeats F."""
_ALL = "even less-weight less-forward recompute ends fast random"
GRID = (
    # The columns are: number of ranks, numbers of microbatches, profiles, whether messages have
    # latency, and the cap in units per rank.
    (2, (4, 8), "less-weight fast random", True, 2),
    (3, (4, 5, 7), _ALL, True, 2),
    (4, (4, 5, 6, 8), _ALL, True, 2),
    (2, (8,), "even", False, 2),
    (3, (5,), "less-weight", False, 2),
    (3, (8,), "even", False, 2),
    (4, (5, 6, 7), "less-weight", False, 2),
    (4, (4, 5, 6), "random", False, 2),
    (4, (8,), "even", False, 2),
    # The cap of the following cases is the memory that 1F1B needs.
    (2, (4, 8), "even less-weight recompute random", True, 1),
    (3, (4,), "even less-weight recompute random", True, 1),
    (3, (5,), "less-weight less-forward", True, 1),
    (4, (5,), "even less-weight less-forward", True, 1),
)

Cell = tuple[str, int, int, int]
"""Action or part of an action: kind, stage, microbatch and piece. The piece is 0 for F and B."""
Starts = dict[Cell, int]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Pipeline and batch whose schedule is optimized. Times are integers in an arbitrary unit.

    Attributes:
        id: Unique name of the case in the file.
        ranks: Number of pipeline ranks. The pipeline has two stages per rank.
        microbatches: Number of microbatches in the step.
        forward: Duration of F for each stage.
        backward: Duration of B, the backward pass for input gradients, for each stage.
        weight: Duration of W, the backward pass for weight gradients, for each stage. It must be
            divisible by ``weight_pieces``.
        latency: Time from the end of an action to the arrival of its result on another rank.
        cap: Maximum number of units (microbatches on a whole rank) that a rank may store, or
            ``None`` if memory is unlimited.
        weight_pieces: Number of equal pieces into which W is divided.
    """

    id: str
    ranks: int
    microbatches: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    weight: tuple[int, ...]
    latency: int
    cap: int | None
    weight_pieces: int = PIECES

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "weight"):
            if len(getattr(self, name)) != self.stages:
                raise ValueError(f"{self.id}: {name} must have {self.stages} durations")
        if any(w % self.weight_pieces for w in self.weight):
            raise ValueError(
                f"{self.id}: the durations {self.weight} of W must be divisible by weight_pieces"
            )

    @property
    def stages(self) -> int:
        """Number of stages in the pipeline."""
        return self.ranks * CHUNKS

    def rank_of(self, stage: int) -> int:
        """Returns the rank of ``stage`` in a V: stages go forth over the ranks, and then back."""
        return min(stage, self.stages - 1 - stage)

    def hop(self, stage: int) -> int:
        """Returns the latency of messages between ``stage`` and the next stage."""
        return 0 if self.rank_of(stage) == self.rank_of(stage + 1) else self.latency

    def duration(self, cell: Cell) -> int:
        """Returns the duration of ``cell``, which is an action or a part of an action."""
        kind, stage, _, _ = cell
        if kind == "W":
            return self.weight[stage] // self.weight_pieces
        return (self.forward if kind == "F" else self.backward)[stage]

    def held_change(self, cell: Cell) -> int:
        """Returns by how much ``cell`` changes the number of chunks whose activations are stored.

        F adds a chunk, and the last piece of W removes a chunk.
        """
        if cell[0] == "W":
            return -1 if cell[3] == self.weight_pieces - 1 else 0
        return 1 if cell[0] == "F" else 0

    def cells(self) -> Iterator[Cell]:
        """Yields all cells in an order in which each cell follows the cells that it depends on."""
        for j in range(self.microbatches):
            for s in range(self.stages):
                yield ("F", s, j, 0)
            for s in reversed(range(self.stages)):
                yield ("B", s, j, 0)
                for k in range(self.weight_pieces):
                    yield ("W", s, j, k)

    def before(self, cell: Cell) -> list[tuple[Cell, int]]:
        """Returns the cells that must end before ``cell``, each with the latency of its message."""
        kind, s, j, k = cell
        last = self.weight_pieces - 1
        earlier: list[tuple[Cell, int]] = []
        if k > 0:
            return [(("W", s, j, k - 1), 0)]
        if j > 0:
            earlier.append(((kind, s, j - 1, last if kind == "W" else 0), 0))
        if kind == "F" and s > 0:
            earlier.append((("F", s - 1, j, 0), self.hop(s - 1)))
        elif kind == "B" and s == self.stages - 1:
            earlier.append((("F", s, j, 0), 0))
        elif kind == "B":
            earlier.append((("B", s + 1, j, 0), self.hop(s)))
        elif kind == "W":
            earlier.append((("B", s, j, 0), 0))
        return earlier


def heads_and_tails(case: Case) -> tuple[Starts, Starts]:
    """Returns the durations of the longest chains before and after each cell."""
    heads: Starts = {}
    cells = list(case.cells())
    tails = dict.fromkeys(cells, 0)
    for cell in cells:
        heads[cell] = max(
            (heads[other] + case.duration(other) + gap for other, gap in case.before(cell)),
            default=0,
        )
    for cell in reversed(cells):
        for other, gap in case.before(cell):
            tails[other] = max(tails[other], gap + case.duration(cell) + tails[cell])
    return heads, tails


def lower_bound(case: Case) -> int:
    """Returns a lower bound on the makespan. The docstring of the module defines the bound."""
    heads, tails = heads_and_tails(case)
    best = 0
    for rank in range(case.ranks):
        own = [cell for cell in case.cells() if case.rank_of(cell[1]) == rank]
        # Sort the cells by descending tail (the longest chain after a cell), so that no cell in
        # the sum ``work`` has a shorter tail than the current cell.
        own.sort(key=lambda cell: -tails[cell])
        for head in {heads[cell] for cell in own}:
            work = 0
            for cell in own:
                if heads[cell] >= head:
                    work += case.duration(cell)
                    best = max(best, head + work + tails[cell])
    return best


def makespan(case: Case, starts: Starts) -> int:
    """Returns the time at which the last cell ends. ``starts`` contains the start of each cell."""
    return max(start + case.duration(cell) for cell, start in starts.items())


def check(case: Case, starts: Starts) -> None:
    """Checks that the schedule ``starts`` follows the rules in the docstring of the module.

    The only code that this check shares with the solver is :meth:`Case.before`.

    Raises:
        ValueError: A cell is missing, starts too early or overlaps with another cell, or a rank
            exceeds the cap.
    """
    if set(starts) != set(case.cells()) or min(starts.values()) < 0:
        raise ValueError(f"{case.id}: cells are missing or start before 0")
    for cell, start in starts.items():
        for other, gap in case.before(cell):
            if start < starts[other] + case.duration(other) + gap:
                raise ValueError(f"{case.id}: {cell} starts before the result of {other} arrives")
    for rank in range(case.ranks):
        own = sorted((start, c) for c, start in starts.items() if case.rank_of(c[1]) == rank)
        for (start, cell), (following, other) in pairwise(own):
            if start + case.duration(cell) > following:
                raise ValueError(f"{case.id}: {cell} and {other} overlap on rank {rank}")
        held = 0
        # If memory is freed and allocated at the same time, count the freed memory first.
        for _, change in sorted(
            (start + (case.duration(cell) if cell[0] == "W" else 0), case.held_change(cell))
            for start, cell in own
        ):
            held += change
            if case.cap is not None and held > CHUNKS * case.cap:
                raise ValueError(f"{case.id}: rank {rank} holds more than {case.cap} units")


def by_rule(case: Case, rule: str, cap: float | None = None) -> Starts:
    """Returns the schedule that the run-time rule ``rule`` produces in a simulation.

    Args:
        case: Case to simulate.
        rule: Name of the rule.
        cap: Maximum number of units that a rank may store. The default is the cap of the case.
    """
    placement = Placement(num_ranks=case.ranks, num_chunks=CHUNKS, kind="v")
    options = {
        "cap": float(cap or case.cap or case.microbatches),
        "weight_pieces": case.weight_pieces,
    }
    result = simulate(
        placement,
        case.microbatches,
        make_policies(rule, placement, case.microbatches, **options),  # type: ignore[arg-type]
        StageProfile(
            times=StageTimes(
                forward_s=case.forward, backward_s=case.backward, weight_s=case.weight
            ),
            link=Link(latency_s=case.latency),
        ),
        **options,  # type: ignore[arg-type]
    )
    return {
        (
            span.action.kind.value,
            placement.stage_of(rank, span.action.chunk),
            span.action.microbatch,
            span.action.piece,
        ): round(span.start_s)
        for rank, spans in enumerate(result.spans)
        for span in spans
    }


def best_known(case: Case) -> Starts:
    """Returns the shortest of the schedules that the rules in ``RULES`` produce."""
    return min((by_rule(case, rule) for rule in RULES), key=lambda one: makespan(case, one))


def _model(
    case: Case, bound: int, known: Starts, unit: int
) -> tuple[cp_model.CpModel, dict[Cell, cp_model.IntVar]]:
    """Returns a model for the solver, and the variables for the starts of cells, keyed by cell.

    Times in the model are multiples of ``unit``. ``bound`` is a lower bound on the makespan, and
    ``known`` is a schedule from which the search starts.
    """
    model = cp_model.CpModel()
    best = makespan(case, known)
    heads, tails = heads_and_tails(case)
    end = model.new_int_var(-(-bound // unit), best // unit, "end")
    starts: dict[Cell, cp_model.IntVar] = {}
    intervals: list[list[cp_model.IntervalVar]] = [[] for _ in range(case.ranks)]
    for cell in case.cells():
        length, tail = case.duration(cell) // unit, tails[cell] // unit
        starts[cell] = model.new_int_var(heads[cell] // unit, best // unit - tail - length, "")
        interval = model.new_fixed_size_interval_var(starts[cell], length, "")
        intervals[case.rank_of(cell[1])].append(interval)
        for other, gap in case.before(cell):
            model.add(starts[cell] >= starts[other] + (case.duration(other) + gap) // unit)
        model.add(end >= starts[cell] + length + tail)
        model.add_hint(starts[cell], known[cell] // unit)
    for rank in range(case.ranks):
        model.add_no_overlap(intervals[rank])
        if case.cap is None:
            continue
        held = []
        for s, j in product((rank, case.stages - 1 - rank), range(case.microbatches)):
            first, last = ("F", s, j, 0), ("W", s, j, case.weight_pieces - 1)
            size = model.new_int_var(1, best // unit, "")
            until = starts[last] + case.duration(last) // unit
            held.append(model.new_interval_var(starts[first], size, until, ""))
        model.add_cumulative(held, [1] * len(held), CHUNKS * case.cap)
    model.minimize(end)
    return model, starts


def _search(case: Case, bound: int, known: Starts, limit_s: float, workers: int) -> Starts | None:
    """Returns a schedule that is proven optimal within ``limit_s`` seconds, or ``None``."""
    unit = math.gcd(case.latency, *(case.duration(cell) for cell in case.cells()))
    model, variables = _model(case, bound, known, unit)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = 1
    status = solver.solve(model)
    if status == cp_model.OPTIMAL:
        return {cell: unit * solver.value(start) for cell, start in variables.items()}
    if status in (cp_model.FEASIBLE, cp_model.UNKNOWN):
        return None
    raise RuntimeError(
        f"{case.id}: solver status {solver.status_name(status)}, although a schedule exists"
    )


def solve(case: Case, *, limit_s: float = 60.0, workers: int = 1) -> dict[str, Any] | None:
    """Returns the record of a case, or ``None`` if no optimum is proven within ``limit_s``."""
    began = time.monotonic()
    bound = lower_bound(case)
    best: Starts | None = best_known(case)
    assert best is not None
    if makespan(case, best) > bound:
        best = _search(case, bound, best, limit_s, workers)
        if best is None:
            return None
    check(case, best)
    return {
        "id": case.id,
        "ranks": case.ranks,
        "chunks": CHUNKS,
        "placement": "v",
        **{key: value for key, value in asdict(case).items() if key not in ("id", "ranks")},
        "optimum": makespan(case, best),
        "lower_bound": bound,
        "proven": True,
        "seconds": round(time.monotonic() - began, 1),
    }


def make_case(profile: str, ranks: int, microbatches: int, *, latency: bool, cap: int) -> Case:
    """Returns a case with the durations of the profile ``profile``.

    The latency of messages is a quarter of the usual duration of F if ``latency`` is true,
    otherwise 0. Profiles are the keys of ``UNIFORM``, and ``ends``, ``fast`` and ``random``. With
    ``ends``, the first stage takes 3/4 and the last stage 5/4 of the time of any other stage. With
    ``fast``, the middle rank is 1.43 times as fast as the others. With ``random``, durations differ
    by at most a quarter from the mean.
    """
    stages = range(CHUNKS * ranks)
    if profile in UNIFORM:
        times = [(duration,) * len(stages) for duration in UNIFORM[profile]]
    elif profile == "ends":
        times = [(12,) + (16,) * (len(stages) - 2) + (20,)] * 3
    elif profile == "fast":
        fast = (ranks // 2, stages[-1] - ranks // 2)
        times = [tuple(28 if s in fast else 40 for s in stages)] * 3
    else:
        rng = random.Random(100 * ranks + microbatches)
        times = [tuple(rng.randint(12, 20) for _ in stages) for _ in range(2)]
        times.append(tuple(rng.choice((12, 16, 20)) for _ in stages))
    usual = {"ends": 16, "fast": 40, "random": 16}.get(profile) or times[0][0]
    wait = usual // 4 if latency else 0
    binding = cap if cap < microbatches else None
    suffix = "" if binding is None else f"-cap{cap}"
    return Case(
        id=f"p{ranks}-m{microbatches}-{profile}-l{wait}{suffix}",
        ranks=ranks,
        microbatches=microbatches,
        forward=times[0],
        backward=times[1],
        weight=times[2],
        latency=wait,
        cap=binding,
    )


def candidates() -> list[Case]:
    """Returns all cases that the file may contain, sorted by ranks and microbatches."""
    cases = []
    for ranks, counts, profiles, latency, cap_per_rank in GRID:
        for profile in profiles.split():
            for m in counts:
                cap = cap_per_rank * ranks
                cases.append(make_case(profile, ranks, m, latency=latency, cap=cap))
    return sorted(cases, key=lambda case: (case.ranks, case.microbatches))


def load(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the records of earlier runs, keyed by case ID, or ``{}`` if there is no file."""
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["version"] != VERSION:
        raise ValueError(f"{path} has version {content['version']}, not {VERSION}; remove the file")
    return {record["id"]: record for record in content["cases"]}


def save(path: Path, ids: list[str], records: dict[str, dict[str, Any]]) -> None:
    """Writes the records of the cases ``ids`` to ``path``, and lists the cases without a record."""
    head = {
        "version": VERSION,
        "made_by": "python -m studies.optimal; its docstring states the model and the bound",
        "solver": f"OR-tools {version('ortools')}, CP-SAT",
        "unproven": [name for name in ids if name not in records],
    }
    lines = [json.dumps(records[name]) for name in ids if name in records]
    text = json.dumps(head, indent=2)[:-2] + ',\n  "cases": [\n    '
    partial = path.with_suffix(".partial")
    partial.write_text(text + ",\n    ".join(lines) + "\n  ]\n}\n", encoding="utf-8")
    partial.replace(path)


def main() -> int:
    """Solves the cases that the file does not contain, and saves the file after each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="file to create or to extend")
    parser.add_argument("--only", default="*", help="shell pattern for the IDs of cases to solve")
    parser.add_argument("--limit", type=float, default=60.0, help="time limit per case in seconds")
    parser.add_argument("--workers", type=int, default=1, help="number of search threads")
    options = parser.parse_args()
    records = load(options.out)
    cases = candidates()
    for case in cases:
        inputs = json.loads(json.dumps(asdict(case)))
        known = records.get(case.id)
        if known is not None and inputs.items() <= known.items():
            continue
        records.pop(case.id, None)
        if fnmatch.fnmatchcase(case.id, options.only):
            record = solve(case, limit_s=options.limit, workers=options.workers)
            if record is not None:
                records[case.id] = record
            print(f"{case.id}: {record['optimum'] if record else 'not proven'}", flush=True)
        save(options.out, [case.id for case in cases], records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
