"""Assigns microbatches to data-parallel replicas so that all replicas take the same time.

The assignment does not change the microbatches themselves::

    cost of each             9  5  8  4  4  2     replica 0 is 1.5 times as slow
    round-robin replica 0    9     8     4        21 x 1.5 = 31.5
                replica 1       5     4     2     11
    balanced    replica 0          8  4           12 x 1.5 = 18
                replica 1    9  5        4  2     20

The cost of a microbatch on a rank has a fixed part, a part per token, and a part per pair of tokens
that attend to each other. These parts are fitted to the measured times of recent steps. The pace of
a rank is its computing time (excluding waits) divided by the cost of its microbatches. A replica is
as fast as its slowest rank.

Every rank applies the same operations, in the same order, to the same numbers (Python floats).
Ranks on different machines therefore reach the same decision without communication.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.adaptive.schedule.workload import order_by_cost

Size = tuple[float, float]
"""Size of a microbatch: its number of tokens, and the sum of its documents' squared lengths.
"""

EQUAL: Size = (1.0, 1.0)
"""Size to use for every microbatch if all microbatches have the same length."""

Measured = tuple[float, float, float]
"""Three sums over the microbatches that a rank processed in a step.

The first is the sum of the times in seconds. In the second sum, each time is multiplied by the
microbatch's number of tokens, and in the third, by its sum of squared lengths (see :data:`Size`).
"""

_LEAST_SIZES = 4
"""Minimum number of distinct microbatch sizes for fitting the three parts of the cost."""
_REMEMBERED = 0.9
"""Factor by which each new step reduces the weight of earlier steps in the fit."""
_REFIT_STEPS = 8
"""Number of steps at the start of training for which the costs are fitted after every step.

After these steps, the costs are fitted once every ``_REFIT_STEPS`` steps.
"""
_STEPS = 16
"""Number of recent steps from which each rank's time per unit of cost (its pace) is computed."""
_FEW = 3
"""Number of recent steps over which a sudden change of a rank's speed is detected."""
_CHANGED = 0.10
"""Minimum relative change of a rank's speed over ``_FEW`` steps to change the assignment."""
_DRIFTED = 0.03
"""Minimum relative change of a rank's speed over ``_STEPS`` steps to change the assignment."""
_SINGULAR = 1e-7
"""Relative tolerance of the least-squares fit.

A linear equation with a smaller pivot is treated as dependent on the others. A fit replaces an
earlier fit only if it is better by more than this tolerance.
"""


@dataclass(frozen=True)
class Dealt:
    """Microbatches that one replica processes in a step.

    Attributes:
        numbers: Indices of the replica's microbatches among those of all replicas.
        total: Number of microbatches of all replicas in the step.
    """

    numbers: tuple[int, ...]
    total: int


def deal(
    costs: Sequence[Sequence[float]], *, group: int = 1, least: int = 1
) -> tuple[tuple[int, ...], ...]:
    """Assigns each microbatch, costliest first, to the replica that then finishes earliest.

    Source: R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969, extended to costs that
    differ between replicas.

    Args:
        costs: Cost of each microbatch on each replica, ``[replica][microbatch]``.
        group: Each replica's number of microbatches must be a multiple of this number. The number
            of microbatches in the step is also a multiple of ``group``.
        least: Minimum number of microbatches per replica.

    Returns:
        Indices of the microbatches of each replica, in ascending order.
    """
    replicas = range(len(costs))
    count = len(costs[0])
    totals = [sum(of_replica[n] for of_replica in costs) for n in range(count)]
    order = sorted(range(count), key=lambda n: (-totals[n], n))
    groups = [order[start : start + group] for start in range(0, count, group)]
    dealt: list[list[int]] = [[] for _ in replicas]
    busy = [0.0 for _ in replicas]
    # ``wanting`` is the number of groups that must still be assigned to replicas with fewer than
    # ``least`` microbatches.
    wanting = -(-least // group) * len(replicas)
    for left, of_group in zip(range(len(groups), 0, -1), groups, strict=True):
        takers = [r for r in replicas if len(dealt[r]) < least] if left <= wanting else replicas
        ends = [(busy[r] + sum(costs[r][n] for n in of_group), r) for r in takers]
        end, replica = min(ends)
        wanting -= len(dealt[replica]) < least
        busy[replica] = end
        dealt[replica] += of_group
    return tuple(tuple(sorted(microbatches)) for microbatches in dealt)


def _nearly_in_turns(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Assigns ``counts[n]`` microbatches to each replica n, in round-robin order where possible.

    Data workers prefetch microbatches in round-robin order, so this assignment can use most of the
    prefetched microbatches.
    """
    turns = [range(replica, sum(counts), len(counts)) for replica in range(len(counts))]
    spare = iter([n for turn, count in zip(turns, counts, strict=True) for n in turn[count:]])
    return tuple(
        tuple(sorted([*turn[:count], *itertools.islice(spare, max(0, count - len(turn)))]))
        for turn, count in zip(turns, counts, strict=True)
    )


class CostFit:
    """Fits the cost of microbatches on one stage to measured times by least squares."""

    def __init__(self) -> None:
        self.parts: tuple[float, ...] = (0.0, 1.0, 0.0)
        self._squares = [[0.0] * 3 for _ in range(3)]
        self._products = [0.0] * 3

    def cost(self, sums: Sequence[float]) -> float:
        """Returns the cost of a set of microbatches.

        Args:
            sums: Number of microbatches, number of tokens, and sum of squared document lengths.
        """
        return sum(part * number for part, number in zip(self.parts, sums, strict=True))

    def age(self) -> None:
        """Reduces the weight that all steps added so far have in the fit."""
        self._products = [_REMEMBERED * value for value in self._products]
        self._squares = [[_REMEMBERED * value for value in row] for row in self._squares]

    def add(self, sizes: Sequence[Size], measured: Measured) -> None:
        """Adds the sizes and the measured times of a rank's microbatches in a step.

        Times are scaled before they are added, so that slow and fast ranks have the same influence
        on the fit.
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
        """Replaces the parts of the cost with the non-negative values that best fit the times."""
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
        # Scale the new parts so that they give the same total cost as the old ones. Otherwise,
        # later measurements of seconds per unit of cost could not be compared with earlier ones.
        unit = self.cost(totals) / (sum(p * t for p, t in zip(parts, totals, strict=True)) or 1.0)
        self.parts = tuple(unit * part for part in parts)


def _solve(rows: list[list[float]]) -> list[float] | None:
    """Solves the symmetric system of linear equations in ``rows`` by elimination.

    Returns ``None`` if the equations are nearly dependent.
    """
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
    """Assigns the microbatches of each step to replicas, based on the times of earlier steps.

    Each rank has an instance, and all instances compute the same assignment.

    Args:
        mode: ``lengths`` to balance differences in microbatch lengths, ``speed`` to balance
            differences in the speed of replicas, ``both`` to balance both.
        replicas: Number of data-parallel replicas.
        ranks: Number of pipeline ranks of each replica.
        group: Each replica's number of microbatches must be a multiple of this number.
        least: Minimum number of microbatches per replica.
        pair: Number of multiplications per pair of tokens that attend to each other, divided by the
            number of multiplications per token. This ratio determines the order of a replica's
            microbatches. Measured times are not used for the order, so that two runs have the same
            order.
        slice_tokens: Number of tokens of a slice if microbatches are cut into different numbers of
            slices, otherwise ``None``. If set, a replica runs its microbatches in descending order
            of cost whenever the longest microbatch of the step has more slices than the pipeline
            has ranks. In all other cases, the order of :func:`order_by_cost` is used.
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
        slice_tokens: int | None = None,
    ) -> None:
        self._ranks = ranks
        self._pair = pair
        self._slice_tokens = slice_tokens
        self._by_length = mode != "speed"
        self._by_speed = mode != "lengths"
        self._limits = {"group": group, "least": least}
        self._fits = [CostFit() for _ in range(ranks)]
        self._places = [(replica, rank) for replica in range(replicas) for rank in range(ranks)]
        # ``_past`` contains measurements of recent steps, keyed by (replica, rank): the time of the
        # rank's actions in seconds, and the sums of microbatches, tokens and squared lengths.
        self._past: deque[dict[tuple[int, int], tuple[float, tuple[float, ...]]]] = deque(
            maxlen=_STEPS
        )
        self._paces: dict[tuple[int, int], float] = {}
        self._sizes: list[list[Size]] = []
        self._different: set[Size] = set()
        self._steps = 0

    def deal(self, sizes: Sequence[Size]) -> tuple[tuple[int, ...], ...]:
        """Assigns the microbatches of a step to replicas.

        Returns the microbatch indices of each replica, in execution order.

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
        tokens = self._slice_tokens
        # All slices of a microbatch run forward before its first backward pass. At the start of a
        # step, a microbatch with more slices than there are ranks keeps all ranks busy. Later in
        # the step, it would leave some ranks idle.
        longest_first = tokens is not None and max(sizes)[0] > tokens * self._ranks
        return tuple(self._in_order(numbers, work, longest_first) for numbers in dealt)

    def _in_order(
        self, numbers: Sequence[int], work: Sequence[float], longest_first: bool
    ) -> tuple[int, ...]:
        """Returns the microbatch indices ``numbers`` of a replica, sorted into execution order.

        ``work`` is the cost of each microbatch of the step. The costliest microbatch runs first if
        ``longest_first`` is true.
        """
        if longest_first:
            return tuple(sorted(numbers, key=lambda number: -work[number]))
        order = order_by_cost([work[number] for number in numbers], self._ranks)
        return tuple(numbers[index] for index in order)

    def add(self, measured: Sequence[Sequence[Measured]]) -> str | None:
        """Adds the measured times of the step for which :meth:`deal` was last called.

        Args:
            measured: Sums of times on each rank (see :data:`Measured`), ``[replica][pipeline
                rank]``.

        Returns:
            Line for the log if the next steps use new costs or new speeds of ranks, otherwise
            ``None``.
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
                    "microbatches are distributed over replicas by token count, because the first "
                    f"{self._steps} steps had only {len(self._different)} different lengths, too "
                    "few to fit costs"
                )
        return self._follow() or text

    @property
    def _replicas(self) -> int:
        return self._places[-1][0] + 1

    @property
    def slowness(self) -> tuple[float, ...]:
        """Returns each replica's time for the same work, relative to the fastest replica."""
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
        """Returns the time that a replica's slowest rank needs for some work, and the rank's index.

        Args:
            replica: Index of the replica, or ``None`` for a replica of average speed.
            sums: Number of microbatches in the work, their number of tokens, and the sum of their
                squared document lengths.
        """
        times = []
        for rank, fit in enumerate(self._fits):
            paces = [self._paces.get(key, 1.0) for key in self._places if key[1] == rank]
            pace = statistics.fmean(paces) if replica is None else paces[replica]
            times.append((pace * fit.cost(sums), rank))
        return max(times)

    def _follow(self) -> str | None:
        """Replaces the speeds of the ranks with those in recent steps, if they differ enough.

        Returns:
            Line for the log if the change is large, otherwise ``None``.
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
        return (
            f"times of the replicas for equal work, relative to the fastest: {shown}; microbatches "
            "are distributed accordingly"
        )

    def _measured_paces(self, steps: int) -> dict[tuple[int, int], float]:
        last = list(self._past)[-steps:]
        return {
            key: statistics.median(
                step[key][0] / (self._fits[key[1]].cost(step[key][1]) or 1.0) for step in last
            )
            for key in self._places
        }


def _sums(sizes: Sequence[Size]) -> list[float]:
    """Returns the number of microbatches in ``sizes``, and sums of tokens and squared lengths."""
    return [
        float(len(sizes)),
        sum(tokens for tokens, _ in sizes),
        sum(squares for _, squares in sizes),
    ]


def _differ(
    paces: dict[tuple[int, int], float], before: dict[tuple[int, int], float], limit: float
) -> bool:
    """Returns whether any rank's speed changed by more than ``limit``, relative to its siblings.

    The siblings of a rank are the ranks with the same pipeline rank in all replicas. ``paces`` and
    ``before`` contain the new and the previous time per unit of cost of each rank.
    """
    drift = {key: pace / (before[key] or 1.0) for key, pace in paces.items()}
    ranks = {rank for _, rank in drift}
    usual = {n: statistics.median(d for (_, rank), d in drift.items() if rank == n) for n in ranks}
    return any(abs(d / (usual[rank] or 1.0) - 1) > limit for (_, rank), d in drift.items())
