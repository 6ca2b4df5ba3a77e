"""Predicts the time of each stage for a microbatch from numbers that describe its content.

Such a number is, for example, the size of an entry of the batch (see ``modules/content.py``). The
predicted time of a microbatch on a stage is the sum of these numbers, each multiplied by a
non-negative factor::

    stage 0 (images)   seconds = 3e-9 x patches
    stage 3 (text)     seconds = 2e-6 x tokens + 1e-10 x pairs of tokens

The factors of each stage are fitted by least squares. Ranks exchange sums instead of single times,
so the size of an exchange does not depend on the number of microbatches. All ranks compute the same
factors, because they apply the same operations, in the same order, to the same sums (Python
floats).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence

from megatron.adaptive.schedule.action import Action
from megatron.adaptive.schedule.stage_placement import Placement

_REMEMBERED = 0.9
"""Factor by which each new step reduces the weight of earlier steps."""
_SWEEPS = 60
"""Number of passes over all factors in a fit. Each pass adjusts the factors one by one."""

Numbers = tuple[float, ...]
"""Non-negative numbers that describe the content of a microbatch."""


def squares_of(rows: Sequence[Numbers]) -> list[float]:
    """Returns the product of each pair of numbers in a row, summed over all rows.

    Args:
        rows: Numbers that describe each microbatch. There must be at least one microbatch.

    Returns:
        Upper triangle of a symmetric matrix, row by row.
    """
    count = len(rows[0])
    return [
        sum(row[first] * row[second] for row in rows)
        for first in range(count)
        for second in range(first, count)
    ]


def products_of(rows: Sequence[Numbers], costs: Sequence[float]) -> list[float]:
    """Multiplies each row of ``rows`` by its cost, and returns the sum of each column.

    ``costs`` contains the cost of each row.
    """
    return [
        sum(row[index] * cost for row, cost in zip(rows, costs, strict=True))
        for index in range(len(rows[0]))
    ]


class StageFit:
    """Fits the cost of microbatches on one stage to their content.

    Args:
        count: Number of values that describe the content of a microbatch.

    Attributes:
        factors: Factor of each of these values, which is the predicted cost per unit.
    """

    def __init__(self, count: int) -> None:
        self.factors = [0.0] * count
        self._squares = [0.0] * (count * (count + 1) // 2)
        self._products = [0.0] * count

    def cost(self, numbers: Numbers) -> float:
        """Returns the predicted cost of a microbatch whose content ``numbers`` describe."""
        return sum(factor * number for factor, number in zip(self.factors, numbers, strict=True))

    def add(self, squares: Sequence[float], products: Sequence[float]) -> None:
        """Adds the sums over the microbatches of a step to the sums of earlier steps.

        ``squares`` is a result of :func:`squares_of`, and ``products`` a result of
        :func:`products_of`.
        """
        self._squares = [
            _REMEMBERED * old + new for old, new in zip(self._squares, squares, strict=True)
        ]
        self._products = [
            _REMEMBERED * old + new for old, new in zip(self._products, products, strict=True)
        ]

    def fit(self, start: Collection[int] = ()) -> None:
        """Fits non-negative factors to the added costs by least squares.

        Initially, the cost is divided equally among the values with the indices ``start``.
        Coordinate descent then sets the factors one by one to their best values. As a result,
        values that always grow together, such as the sizes of ``input_ids`` and ``labels``, share
        the cost. After a single microbatch, the values in ``start`` share its cost.

        Args:
            start: Indices of the values among which the cost is initially divided. If it is empty,
                or these values were 0 in every microbatch, the cost is divided among all values.
        """
        count = len(self.factors)
        matrix = [[0.0] * count for _ in range(count)]
        sums = iter(self._squares)
        for first in range(count):
            for second in range(first, count):
                matrix[first][second] = matrix[second][first] = next(sums)
        # Scale each number to a root mean square of 1, because the numbers differ by many orders of
        # magnitude.
        scales = [math.sqrt(matrix[index][index]) for index in range(count)]
        used = [index for index in range(count) if scales[index] > 0]
        rows = [[matrix[a][b] / (scales[a] * scales[b]) for b in used] for a in used]
        target = [self._products[index] / scales[index] for index in used]
        shares = [float(index in start) for index in used]
        if not any(shares):
            shares = [1.0] * len(used)
        solution = [
            share * max(0.0, each) / sum(shares) for share, each in zip(shares, target, strict=True)
        ]
        for _ in range(_SWEEPS):
            for index, row in enumerate(rows):
                predicted = sum(a * b for a, b in zip(row, solution, strict=True))
                solution[index] = max(0.0, solution[index] + target[index] - predicted)
        self.factors = [0.0] * count
        for index, value in zip(used, solution, strict=True):
            self.factors[index] = value / scales[index]

    def is_used(self, index: int) -> bool:
        """Returns whether the number at ``index`` was positive in at least one added microbatch.

        Args:
            index: Index of the number in the tuple that describes the content of a microbatch.
        """
        count = len(self.factors)
        return self._squares[index * count - index * (index - 1) // 2] > 0

    @property
    def mean_cost(self) -> float:
        """Returns the mean cost of the microbatches that were added.

        Requires that the last of the numbers that describe a microbatch is always 1.
        """
        return self._products[-1] / self._squares[-1] if self._squares[-1] else 0.0

    @property
    def mean_numbers(self) -> Numbers:
        """Returns the mean of each number over the microbatches that were added.

        Requires that the last of the numbers that describe a microbatch is always 1.
        """
        count = len(self.factors)
        # ``_squares`` contains sums of products. The last number is always 1, so the last sum in
        # each row of the upper triangle is the sum of a single number.
        ends = itertools.accumulate(range(count, 0, -1))
        return tuple(self._squares[end - 1] / (self._squares[-1] or 1.0) for end in ends)


class ContentCosts:
    """Predicts the costs of microbatches on all stages of a pipeline.

    Args:
        placement: Assignment of stages to ranks.
        partition: Number of segments (parts of the model) in each stage.
        segments: Objects that predict the costs of the segments, one per segment, from the numbers
            that describe a microbatch. These costs are counts of operations instead of measured
            times.

    Attributes:
        stages: Fit of each stage to measured times.
        count: Number of values that describe the content of a microbatch.
        num_sums: Length of the list that :meth:`measured` returns.
    """

    def __init__(
        self, placement: Placement, partition: Sequence[int], segments: Sequence[StageFit]
    ) -> None:
        self._placement = placement
        fits = iter(segments)
        self._segments = [list(itertools.islice(fits, size)) for size in partition]
        self.count = count = len(segments[0].factors)
        self._num_squares = count * (count + 1) // 2
        self.num_sums = self._num_squares + placement.num_chunks * count
        self.stages = [StageFit(count) for _ in range(placement.num_stages)]

    def cost(self, numbers: Numbers) -> float:
        """Returns a microbatch's predicted cost, summed over all stages.

        ``numbers`` describes the content of the microbatch.
        """
        return sum(stage.cost(numbers) for stage in self.stages)

    def segment_costs(self) -> tuple[float, ...]:
        """Returns the mean cost of each segment over the microbatches of all steps so far.

        The mean cost of a stage is divided among its segments in proportion to their counted
        operations.
        """
        costs: list[float] = []
        for stage, members in zip(self.stages, self._segments, strict=True):
            work = [fit.cost(stage.mean_numbers) for fit in members]
            total = sum(work)
            shares = [each / total for each in work] if total else [1 / len(work)] * len(work)
            costs += [stage.mean_cost * share for share in shares]
        return tuple(costs)

    def measured(
        self, rows: Sequence[Numbers], actions: Sequence[tuple[Action, int]]
    ) -> list[float]:
        """Returns the sums that describe a step on one rank, for use in :meth:`add`.

        Args:
            rows: Numbers that describe each microbatch of the rank, in execution order.
            actions: Actions of the rank, each with its duration in nanoseconds.
        """
        seconds = [[0.0] * len(rows) for _ in range(self._placement.num_chunks)]
        for action, nanoseconds in actions:
            seconds[action.chunk][action.microbatch] += nanoseconds / 1e9
        sums = squares_of(rows)
        for of_chunk in seconds:
            sums += products_of(rows, of_chunk)
        return sums

    def add(self, sums_at: Mapping[tuple[int, int], Sequence[float]]) -> None:
        """Adds the sums of all ranks for a step.

        Args:
            sums_at: Result of :meth:`measured` on each rank, keyed by (replica index, pipeline
                rank).
        """
        replicas = sorted({replica for replica, _ in sums_at})
        for stage, fit in enumerate(self.stages):
            rank, chunk = self._placement.locate(stage)
            start = self._num_squares + chunk * self.count
            parts = [sums_at[replica, rank] for replica in replicas]
            squares = zip(*(part[: self._num_squares] for part in parts), strict=True)
            products = zip(*(part[start : start + self.count] for part in parts), strict=True)
            fit.add(list(map(sum, squares)), list(map(sum, products)))

    def fit(self) -> None:
        """Fits the factors of all stages to the sums.

        If a number was 0 in all steps so far, its factor cannot be fitted. Instead, this factor is
        computed from the counted operations of the stage's segments, converted to seconds. If the
        factor were 0, microbatches of a new kind would seem to cost nothing.
        """
        for stage in self.stages:
            stage.fit()
        work = sum(
            fit.cost(stage.mean_numbers)
            for stage, members in zip(self.stages, self._segments, strict=True)
            for fit in members
        )
        if not work:
            return
        seconds_per_work = sum(stage.mean_cost for stage in self.stages) / work
        for stage, members in zip(self.stages, self._segments, strict=True):
            for index in range(self.count):
                if not stage.is_used(index):
                    counted = sum(fit.factors[index] for fit in members)
                    stage.factors[index] = counted * seconds_per_work
