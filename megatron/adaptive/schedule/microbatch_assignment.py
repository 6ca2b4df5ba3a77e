"""Deals the microbatches of a step to data-parallel replicas, so that all of them take as long.

The microbatches stay those of the step; only the replica that works on each is chosen::

    cost of each             9  5  8  4  4  2     replica 0 takes 1.5 times as long
    in turns    replica 0    9     8     4        21 x 1.5 = 31.5
                replica 1       5     4     2     11
    dealt       replica 0          8  4           12 x 1.5 = 18
                replica 1    9  5        4  2     20

The cost for a rank is a fixed part, one for each token and one for each token that a token attends
to, fitted to the last steps; a rank's pace is its compute time, without waits, over the cost of
what it was given. A replica is as fast as its slowest rank.

Every rank computes all of this from the same numbers, in plain Python's floats and one order of
operations, so that ranks on unlike machines decide alike without a message.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.adaptive.schedule.workload import order_by_cost

Size = tuple[float, float]
"""Tokens of a microbatch, and the sum of the squares of its documents' tokens."""

EQUAL: Size = (1.0, 1.0)
"""Size of every microbatch where all are alike."""

Measured = tuple[float, float, float]
"""Seconds of a rank's actions in a step, and the same times tokens and times squares, summed over
the microbatches that the actions were for."""

_LEAST_SIZES = 4  # to fit three parts
_REMEMBERED = 0.9  # of a step's weight in the fit, after each further step
_REFIT_STEPS = 8  # after as many steps the fit is made anew at every such number of them only
_STEPS, _FEW = 16, 3  # that a pace is measured over; of which so many must agree on a change
_CHANGED, _DRIFTED = 0.10, 0.03  # relative changes of a pace that count, over few and many steps
_SINGULAR = 1e-7


@dataclass(frozen=True)
class Dealt:
    """Names the microbatches of one replica in a step.

    Attributes:
        numbers: of each, counted over the whole step as if they were dealt in turns.
        total: microbatches of all replicas together.
    """

    numbers: tuple[int, ...]
    total: int


def deal(
    costs: Sequence[Sequence[float]], *, group: int = 1, least: int = 1
) -> tuple[tuple[int, ...], ...]:
    """Deals microbatches: the costliest first, each to the replica that is then done first.

    Source: R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969, here with costs that
    differ between replicas.

    Args:
        costs: by replica, what each microbatch costs it.
        group: number that the microbatches of each replica are a multiple of, a divisor of all.
        least: microbatches that each replica gets at least.

    Returns:
        The microbatches of each replica, ascending.
    """
    replicas, count = range(len(costs)), len(costs[0])
    mean = [sum(of[n] for of in costs) for n in range(count)]
    order = sorted(range(count), key=lambda n: (-mean[n], n))
    groups = [order[start : start + group] for start in range(0, count, group)]
    found: list[list[int]] = [[] for _ in replicas]
    busy = [0.0 for _ in replicas]
    wanting = -(-least // group) * len(replicas)  # groups that are still to go to who has too few
    for left, of_group in zip(range(len(groups), 0, -1), groups, strict=True):
        some = [r for r in replicas if len(found[r]) < least] if left <= wanting else replicas
        ends = [(busy[r] + sum(costs[r][n] for n in of_group), r) for r in some]
        end, replica = min(ends)
        wanting -= len(found[replica]) < least
        busy[replica] = end
        found[replica] += of_group
    return tuple(tuple(sorted(one)) for one in found)


def _nearly_in_turns(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Deals in turns as far as numbers allow, as data workers read ahead."""
    turns = [range(replica, sum(counts), len(counts)) for replica in range(len(counts))]
    spare = iter([n for own, count in zip(turns, counts, strict=True) for n in own[count:]])
    return tuple(
        tuple(sorted([*own[:count], *itertools.islice(spare, max(0, count - len(own)))]))
        for own, count in zip(turns, counts, strict=True)
    )


class CostFit:
    """Fits what microbatches cost one stage, by least squares over the last steps."""

    def __init__(self) -> None:
        self.parts: tuple[float, ...] = (0.0, 1.0, 0.0)
        self._squares = [[0.0] * 3 for _ in range(3)]
        self._products = [0.0] * 3

    def cost(self, sums: Sequence[float]) -> float:
        """Returns the cost of so many microbatches, tokens and squares."""
        return sum(part * one for part, one in zip(self.parts, sums, strict=True))

    def age(self) -> None:
        """Lets what was added count less."""
        self._products = [_REMEMBERED * one for one in self._products]
        self._squares = [[_REMEMBERED * one for one in row] for row in self._squares]

    def add(self, sizes: Sequence[Size], measured: Measured) -> None:
        """Adds what a rank did in a step. Its pace has no influence: only proportions count."""
        if measured[0] <= 0:
            return
        rows = [(1.0, *size) for size in sizes]
        scale = sum(map(self.cost, rows)) / measured[0]
        for one in range(3):
            self._products[one] += scale * measured[one]
            for other in range(3):
                self._squares[one][other] += sum(row[one] * row[other] for row in rows)

    def fit(self) -> None:
        """Takes the parts, none negative, that explain the times best."""
        best, sizes = 0.0, [self._squares[n][n] ** 0.5 or 1.0 for n in range(3)]
        totals, parts = self._squares[0], self.parts
        for number in (1, 2, 3):
            for chosen in itertools.combinations(range(3), number):
                scaled = [
                    [self._squares[a][b] / (sizes[a] * sizes[b]) for b in chosen]
                    + [self._products[a] / sizes[a]]
                    for a in chosen
                ]
                found = _solve(scaled)
                if found is None or min(found) < 0:
                    continue
                explained = sum(
                    part * self._products[n] / sizes[n]
                    for part, n in zip(found, chosen, strict=True)
                )
                if explained > best * (1 + _SINGULAR):
                    best, by_part = explained, dict(zip(chosen, found, strict=True))
                    parts = tuple(by_part.get(n, 0.0) / sizes[n] for n in range(3))
        # The unit stays, so that paces do.
        unit = self.cost(totals) / (sum(p * t for p, t in zip(parts, totals, strict=True)) or 1.0)
        self.parts = tuple(unit * part for part in parts)


def _solve(rows: list[list[float]]) -> list[float] | None:
    """Solves symmetric equations by elimination; ``None`` where they are nearly dependent."""
    size = len(rows)
    for pivot in range(size):
        if rows[pivot][pivot] < _SINGULAR:
            return None
        for below in range(pivot + 1, size):
            factor = rows[below][pivot] / rows[pivot][pivot]
            rows[below] = [b - factor * a for a, b in zip(rows[pivot], rows[below], strict=True)]
    found = [0.0] * size
    for row in reversed(range(size)):
        rest = sum(rows[row][n] * found[n] for n in range(row + 1, size))
        found[row] = (rows[row][size] - rest) / rows[row][row]
    return found


class Dealer:
    """Deals each step by what the steps before it took; every rank has one.

    Args:
        mode: ``lengths``, ``speed`` or ``both``: what counts.
        replicas: data-parallel replicas.
        ranks: pipeline ranks of each.
        group: number that the microbatches of each replica are a multiple of.
        least: microbatches that each replica gets at least.
        pair: multiplications for a token that a token attends to, over those for a token; by
            these, which two runs share, a replica's microbatches are ordered.
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
        self._ranks, self._pair = ranks, pair
        self._by_length, self._by_speed = mode != "speed", mode != "lengths"
        self._limits = {"group": group, "least": least}
        self._fits = [CostFit() for _ in range(ranks)]
        self._places = [(replica, rank) for replica in range(replicas) for rank in range(ranks)]
        # Of each rank, by step: seconds; microbatches, tokens and squares that they were for.
        self._past: deque[dict[tuple[int, int], tuple[float, tuple[float, ...]]]] = deque(
            maxlen=_STEPS
        )
        self._paces: dict[tuple[int, int], float] = {}
        self._sizes: list[list[Size]] = []
        self._different: set[Size] = set()
        self._steps = 0

    def deal(self, sizes: Sequence[Size]) -> tuple[tuple[int, ...], ...]:
        """Returns the microbatches of each replica in their order, given the sizes of all."""
        dealt = deal([self._costs(r, sizes) for r in range(self._replicas)], **self._limits)
        if len(set(sizes)) == 1:
            dealt = _nearly_in_turns([len(own) for own in dealt])
        self._sizes = [[sizes[n] for n in numbers] for numbers in dealt]
        if len(self._different) < _LEAST_SIZES:
            self._different.update(sizes)
        work = [tokens + self._pair * squares for tokens, squares in sizes]
        return tuple(
            tuple(own[n] for n in order_by_cost([work[one] for one in own], self._ranks))
            for own in dealt
        )

    def add(self, measured: Sequence[Sequence[Measured]]) -> str | None:
        """Adds the times of the step that was dealt last.

        Args:
            measured: by replica and pipeline rank.

        Returns:
            A change in what is assumed, in one line, ``None`` without one.
        """
        self._steps += 1
        for fit in self._fits:
            fit.age()
        past = {}
        for replica, rank in self._places:
            times, sizes = measured[replica][rank], self._sizes[replica]
            self._fits[rank].add(sizes, times)
            sums = (len(sizes), sum(one for one, _ in sizes), sum(two for _, two in sizes))
            past[replica, rank] = (times[0], tuple(map(float, sums)))
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
        """Times that each replica takes as long as the fastest for the same microbatches."""
        sums = [sum(sizes) for sizes in zip(*(s for _, s in self._past[-1].values()), strict=True)]
        each = [self._slowest(replica, sums)[0] for replica in range(self._replicas)]
        return tuple(one / min(each) for one in each)

    def _costs(self, replica: int, sizes: Sequence[Size]) -> list[float]:
        sums = [float(len(sizes)), sum(one for one, _ in sizes), sum(two for _, two in sizes)]
        seconds, rank = self._slowest(replica if self._by_speed else None, sums)
        if not self._by_length:
            return [seconds / len(sizes)] * len(sizes)
        fit = self._fits[rank]
        scale = seconds / (fit.cost(sums) or 1.0)
        return [scale * fit.cost((1.0, *size)) for size in sizes]

    def _slowest(self, replica: int | None, sums: Sequence[float]) -> tuple[float, int]:
        """Returns what so much work takes a replica's slowest rank, and which that is.

        Args:
            replica: which, ``None`` for one of mean pace.
            sums: microbatches, tokens and squares.
        """
        found = []
        for rank, fit in enumerate(self._fits):
            of = [self._paces.get(place, 1.0) for place in self._places if place[1] == rank]
            pace = statistics.fmean(of) if replica is None else of[replica]
            found.append((pace * fit.cost(sums), rank))
        return max(found)

    def _follow(self) -> str | None:
        """Takes over the paces of the last steps once they are others than those in use."""
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
        shown = ", ".join(f"{one:.2f}" for one in now)
        return f"replicas take {shown} times as long for the same work: dealt accordingly"

    def _measured_paces(self, steps: int) -> dict[tuple[int, int], float]:
        last = list(self._past)[-steps:]
        return {
            place: statistics.median(
                one[place][0] / (self._fits[place[1]].cost(one[place][1]) or 1.0) for one in last
            )
            for place in self._places
        }


def _differ(
    some: dict[tuple[int, int], float], others: dict[tuple[int, int], float], limit: float
) -> bool:
    """Returns whether a pace differs by more than ``limit`` relative to that of its siblings."""
    drift = {place: pace / (others[place] or 1.0) for place, pace in some.items()}
    ranks = {rank for _, rank in drift}
    usual = {n: statistics.median(d for (_, rank), d in drift.items() if rank == n) for n in ranks}
    return any(abs(d / (usual[rank] or 1.0) - 1) > limit for (_, rank), d in drift.items())
