"""Deals the microbatches of a step to data-parallel replicas so that all take equally long.

The step keeps its microbatches. Only the replica that works on each of them is chosen::

    cost of each             9  5  8  4  4  2     replica 0 is 1.5 times as slow
    in turns    replica 0    9     8     4        21 x 1.5 = 31.5
                replica 1       5     4     2     11
    dealt       replica 0          8  4           12 x 1.5 = 18
                replica 1    9  5        4  2     20

The cost of a microbatch for a rank is the sum of a fixed part, a part per token, and a part per
pair of tokens that attend to each other. The parts are fitted to the last steps. The pace of a rank
is its compute time, without waits, divided by the cost of the microbatches that it worked on. A
replica is as fast as its slowest rank.

Every rank computes all of this from the same numbers, with Python floats in a fixed order of
operations. So ranks on different machines reach the same decision without a message.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.adaptive.schedule.workload import order_by_cost

Size = tuple[float, float]
"""Number of tokens of a microbatch, and sum of the squared lengths of its documents."""

EQUAL: Size = (1.0, 1.0)
"""Size of every microbatch if all are equal."""

Measured = tuple[float, float, float]
"""Three sums over the microbatches of a rank in a step.

The seconds of their actions, these seconds times tokens, and these seconds times squares (see
:data:`Size`).
"""

_LEAST_SIZES = 4
"""Least number of different sizes for a fit of three parts."""
_REMEMBERED = 0.9
"""Factor on the weight of a step in the fit, per later step."""
_REFIT_STEPS = 8
"""Costs are fitted after each of this many first steps, later after each multiple of it."""
_STEPS = 16
"""Number of last steps over which a pace is measured."""
_FEW = 3
"""Number of last steps that suffice to detect a sudden change of pace."""
_CHANGED = 0.10
"""Relative change of a pace, over few steps, that counts as a change."""
_DRIFTED = 0.03
"""Relative change of a pace, over many steps, that counts as a change."""
_SINGULAR = 1e-7
"""Relative limit for a pivot of nearly dependent equations, and for a better fit."""


@dataclass(frozen=True)
class Dealt:
    """Names the microbatches of one replica in a step.

    Attributes:
        numbers: Index of each microbatch in the step, as if they were dealt in turns.
        total: Number of microbatches of all replicas together.
    """

    numbers: tuple[int, ...]
    total: int


def deal(
    costs: Sequence[Sequence[float]], *, group: int = 1, least: int = 1
) -> tuple[tuple[int, ...], ...]:
    """Deals the costliest microbatches first, each to the replica that then finishes first.

    Source: R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969, here with costs that
    differ between replicas.

    Args:
        costs: Cost of each microbatch on each replica, ``[replica][microbatch]``.
        group: Number that the microbatches of each replica must be a multiple of; it divides the
            number of microbatches of the step.
        least: Least number of microbatches of each replica.

    Returns:
        The microbatches of each replica, ascending.
    """
    replicas = range(len(costs))
    count = len(costs[0])
    totals = [sum(of_replica[n] for of_replica in costs) for n in range(count)]
    order = sorted(range(count), key=lambda n: (-totals[n], n))
    groups = [order[start : start + group] for start in range(0, count, group)]
    dealt: list[list[int]] = [[] for _ in replicas]
    busy = [0.0 for _ in replicas]
    wanting = -(-least // group) * len(replicas)  # groups reserved for replicas below ``least``
    for left, of_group in zip(range(len(groups), 0, -1), groups, strict=True):
        takers = [r for r in replicas if len(dealt[r]) < least] if left <= wanting else replicas
        ends = [(busy[r] + sum(costs[r][n] for n in of_group), r) for r in takers]
        end, replica = min(ends)
        wanting -= len(dealt[replica]) < least
        busy[replica] = end
        dealt[replica] += of_group
    return tuple(tuple(sorted(microbatches)) for microbatches in dealt)


def _nearly_in_turns(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Deals in turns as far as these counts allow, because data workers read ahead in turns."""
    turns = [range(replica, sum(counts), len(counts)) for replica in range(len(counts))]
    spare = iter([n for turn, count in zip(turns, counts, strict=True) for n in turn[count:]])
    return tuple(
        tuple(sorted([*turn[:count], *itertools.islice(spare, max(0, count - len(turn)))]))
        for turn, count in zip(turns, counts, strict=True)
    )


class CostFit:
    """Fits the cost of microbatches on one stage by least squares over the last steps."""

    def __init__(self) -> None:
        self.parts: tuple[float, ...] = (0.0, 1.0, 0.0)
        self._squares = [[0.0] * 3 for _ in range(3)]
        self._products = [0.0] * 3

    def cost(self, sums: Sequence[float]) -> float:
        """Returns the cost of work, from its numbers of microbatches, tokens and squares."""
        return sum(part * number for part, number in zip(self.parts, sums, strict=True))

    def age(self) -> None:
        """Lowers the weight of the steps that were added before."""
        self._products = [_REMEMBERED * value for value in self._products]
        self._squares = [[_REMEMBERED * value for value in row] for row in self._squares]

    def add(self, sizes: Sequence[Size], measured: Measured) -> None:
        """Adds the work and times of a rank in a step.

        The pace of the rank has no influence: only the proportions of its times count.
        """
        if measured[0] <= 0:
            return
        rows = [(1.0, *size) for size in sizes]
        scale = sum(map(self.cost, rows)) / measured[0]
        for part in range(3):
            self._products[part] += scale * measured[part]
            for other in range(3):
                self._squares[part][other] += sum(row[part] * row[other] for row in rows)

    def fit(self) -> None:
        """Replaces the parts by the non-negative ones that explain the times best."""
        best = 0.0
        sizes = [self._squares[n][n] ** 0.5 or 1.0 for n in range(3)]
        totals = self._squares[0]
        parts = self.parts
        for number in (1, 2, 3):
            for chosen in itertools.combinations(range(3), number):
                scaled = [
                    [self._squares[a][b] / (sizes[a] * sizes[b]) for b in chosen]
                    + [self._products[a] / sizes[a]]
                    for a in chosen
                ]
                solution = _solve(scaled)
                if solution is None or min(solution) < 0:
                    continue
                explained = sum(
                    part * self._products[n] / sizes[n]
                    for part, n in zip(solution, chosen, strict=True)
                )
                if explained > best * (1 + _SINGULAR):
                    best = explained
                    by_part = dict(zip(chosen, solution, strict=True))
                    parts = tuple(by_part.get(n, 0.0) / sizes[n] for n in range(3))
        # Keep the unit of the costs, so that paces measured before remain comparable.
        unit = self.cost(totals) / (sum(p * t for p, t in zip(parts, totals, strict=True)) or 1.0)
        self.parts = tuple(unit * part for part in parts)


def _solve(rows: list[list[float]]) -> list[float] | None:
    """Solves symmetric equations by elimination; returns ``None`` if they are nearly dependent."""
    size = len(rows)
    for pivot in range(size):
        if rows[pivot][pivot] < _SINGULAR:
            return None
        for below in range(pivot + 1, size):
            factor = rows[below][pivot] / rows[pivot][pivot]
            rows[below] = [b - factor * a for a, b in zip(rows[pivot], rows[below], strict=True)]
    solution = [0.0] * size
    for row in reversed(range(size)):
        rest = sum(rows[row][n] * solution[n] for n in range(row + 1, size))
        solution[row] = (rows[row][size] - rest) / rows[row][row]
    return solution


class Dealer:
    """Deals the microbatches of each step from the times of earlier steps; each rank has one.

    Args:
        mode: ``lengths`` or ``speed`` to balance only lengths of microbatches or only speeds of
            replicas, ``both`` for both.
        replicas: Number of data-parallel replicas.
        ranks: Number of pipeline ranks of each replica.
        group: Number that the microbatches of each replica must be a multiple of.
        least: Least number of microbatches of each replica.
        pair: Multiplications per pair of tokens that attend to each other, divided by those per
            token. A replica's microbatches are ordered by this ratio and not by measured times, so
            that two runs have the same order.
    """

    def __init__(
        self,
        mode: str,
        *,
        replicas: int,
        ranks: int,
        group: int = 1,
        least: int = 1,
        pair: float = 0.0,
    ) -> None:
        self._ranks = ranks
        self._pair = pair
        self._by_length = mode != "speed"
        self._by_speed = mode != "lengths"
        self._limits = {"group": group, "least": least}
        self._fits = [CostFit() for _ in range(ranks)]
        self._places = [(replica, rank) for replica in range(replicas) for rank in range(ranks)]
        # For each of the last steps, by replica and rank: seconds of its actions, and the numbers
        # of microbatches, tokens and squares of its work.
        self._past: deque[dict[tuple[int, int], tuple[float, tuple[float, ...]]]] = deque(
            maxlen=_STEPS
        )
        self._paces: dict[tuple[int, int], float] = {}
        self._sizes: list[list[Size]] = []
        self._different: set[Size] = set()
        self._steps = 0

    def deal(self, sizes: Sequence[Size]) -> tuple[tuple[int, ...], ...]:
        """Returns the microbatches of each replica in the order of its work.

        Args:
            sizes: Sizes of all microbatches of the step.
        """
        dealt = deal([self._costs(r, sizes) for r in range(self._replicas)], **self._limits)
        if len(set(sizes)) == 1:
            dealt = _nearly_in_turns([len(numbers) for numbers in dealt])
        self._sizes = [[sizes[n] for n in numbers] for numbers in dealt]
        if len(self._different) < _LEAST_SIZES:
            self._different.update(sizes)
        work = [tokens + self._pair * squares for tokens, squares in sizes]
        return tuple(
            tuple(
                numbers[index]
                for index in order_by_cost([work[number] for number in numbers], self._ranks)
            )
            for numbers in dealt
        )

    def add(self, measured: Sequence[Sequence[Measured]]) -> str | None:
        """Adds the times of the step that was dealt last.

        Args:
            measured: Times of each rank, ``[replica][pipeline rank]``.

        Returns:
            One line about a change in the assumed costs or paces, ``None`` without a change.
        """
        self._steps += 1
        for fit in self._fits:
            fit.age()
        past = {}
        for replica, rank in self._places:
            times = measured[replica][rank]
            sizes = self._sizes[replica]
            self._fits[rank].add(sizes, times)
            past[replica, rank] = (times[0], tuple(map(float, _sums(sizes))))
        self._past.append(past)
        text = None
        if self._by_length and (self._steps <= _REFIT_STEPS or self._steps % _REFIT_STEPS == 0):
            if len(self._different) >= _LEAST_SIZES:
                for fit in self._fits:
                    fit.fit()
            elif self._steps == _REFIT_STEPS:
                text = (
                    f"replicas are dealt microbatches by tokens: {len(self._different)} different "
                    f"lengths in {self._steps} steps are too few to fit costs"
                )
        return self._follow() or text

    @property
    def _replicas(self) -> int:
        return self._places[-1][0] + 1

    @property
    def slowness(self) -> tuple[float, ...]:
        """Returns the time of each replica for the same work, relative to that of the fastest."""
        sums = [sum(sizes) for sizes in zip(*(s for _, s in self._past[-1].values()), strict=True)]
        each = [self._slowest(replica, sums)[0] for replica in range(self._replicas)]
        return tuple(seconds / min(each) for seconds in each)

    def _costs(self, replica: int, sizes: Sequence[Size]) -> list[float]:
        sums = _sums(sizes)
        seconds, rank = self._slowest(replica if self._by_speed else None, sums)
        if not self._by_length:
            return [seconds / len(sizes)] * len(sizes)
        fit = self._fits[rank]
        scale = seconds / (fit.cost(sums) or 1.0)
        return [scale * fit.cost((1.0, *size)) for size in sizes]

    def _slowest(self, replica: int | None, sums: Sequence[float]) -> tuple[float, int]:
        """Returns the time of the slowest rank of a replica for some work, and that rank.

        Args:
            replica: Index of the replica, ``None`` for a replica of mean pace.
            sums: Numbers of microbatches, tokens and squares of the work.
        """
        times = []
        for rank, fit in enumerate(self._fits):
            paces = [self._paces.get(key, 1.0) for key in self._places if key[1] == rank]
            pace = statistics.fmean(paces) if replica is None else paces[replica]
            times.append((pace * fit.cost(sums), rank))
        return max(times)

    def _follow(self) -> str | None:
        """Adopts the paces of the last steps if they differ from those in use.

        Returns:
            One line about the change if it is large, else ``None``.
        """
        few = self._measured_paces(_FEW)
        if len(self._past) < _FEW:
            return None
        many = self._measured_paces(_STEPS)
        before = self.slowness if self._paces else (1.0,) * self._replicas
        if not self._paces or _differ(few, self._paces, _CHANGED):
            self._paces = few
            while len(self._past) > _FEW:
                self._past.popleft()
        elif len(self._past) > 2 * _FEW and _differ(many, self._paces, _DRIFTED):
            self._paces = many
            return None
        now = self.slowness
        if not self._by_speed or max(abs(a - b) for a, b in zip(now, before, strict=True)) < (
            _CHANGED
        ):
            return None
        shown = ", ".join(f"{slowness:.2f}" for slowness in now)
        return f"replicas take {shown} times as long for the same work: dealt accordingly"

    def _measured_paces(self, steps: int) -> dict[tuple[int, int], float]:
        last = list(self._past)[-steps:]
        return {
            key: statistics.median(
                step[key][0] / (self._fits[key[1]].cost(step[key][1]) or 1.0) for step in last
            )
            for key in self._places
        }


def _sums(sizes: Sequence[Size]) -> list[float]:
    """Returns the numbers of microbatches, tokens and squares of these microbatches."""
    return [
        float(len(sizes)),
        sum(tokens for tokens, _ in sizes),
        sum(squares for _, squares in sizes),
    ]


def _differ(
    paces: dict[tuple[int, int], float], before: dict[tuple[int, int], float], limit: float
) -> bool:
    """Returns whether the pace of a rank changed by more than ``limit`` against its siblings.

    The siblings of a rank are the same pipeline rank in all replicas.
    """
    drift = {key: pace / (before[key] or 1.0) for key, pace in paces.items()}
    ranks = {rank for _, rank in drift}
    usual = {n: statistics.median(d for (_, rank), d in drift.items() if rank == n) for n in ranks}
    return any(abs(d / (usual[rank] or 1.0) - 1) > limit for (_, rank), d in drift.items())
