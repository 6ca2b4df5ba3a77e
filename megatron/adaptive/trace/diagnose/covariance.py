"""Represents covariances between ranks, and inverses of them, without storing a full matrix.

Each rank has an individual deviation. In addition, the ranks of a group, such as a replica, may
share a deviation::

    covariance = diagonal of the variances + sum over kinds of group of (u u' within a group)

Memory and time grow only linearly with the number of ranks. The inverse is computed in two steps.
The first step considers only the kind of group with the most groups, such as all replicas. These
groups have no ranks in common, so they are inverted one by one (Sherman-Morrison formula). The
second step adds all groups of other kinds in one low-rank update (Woodbury identity). For 10,000
ranks in 100 replicas with 100 stages each, the matrix of the update is 101 x 101.

Source: W. W. Hager, "Updating the inverse of a matrix", SIAM Review 31 (2), 1989.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megatron.adaptive.trace.diagnose.samples import Floats
from megatron.adaptive.trace.span_columns import Ints


@dataclass(frozen=True, eq=False)
class Shared:
    """Describes random deviations that the ranks of a group share. Each rank is in one group.

    Attributes:
        group: ``[ranks]``, index of each rank's group. The indices are consecutive and start at 0.
        size: ``[ranks]``, standard deviation of the shared deviation on each rank.
    """

    group: Ints
    size: Floats


@dataclass(frozen=True, eq=False)
class Covariance:
    """Describes the covariance of the ranks' deviations.

    Attributes:
        variances: ``[ranks]``, variance of each rank's individual deviation, which must be
            positive.
        shared: Deviations shared by groups of ranks, with one entry per kind of group.
    """

    variances: Floats
    shared: tuple[Shared, ...] = ()

    def plus(self, other: Covariance, factor: float = 1.0) -> Covariance:
        """Returns the sum of this covariance and ``factor`` times ``other``."""
        scaled = [replace(each, size=each.size * factor**0.5) for each in other.shared]
        return Covariance(self.variances + factor * other.variances, (*self.shared, *scaled))

    def with_own(self, added: Floats) -> Covariance:
        """Returns a copy of this covariance with the ranks' variances increased by ``added``."""
        return replace(self, variances=self.variances + added)

    def inverse(self) -> InverseCovariance:
        """Returns the inverse of this covariance, which supports multiplication by arrays."""
        return InverseCovariance(self)


class InverseCovariance:
    """Represents the inverse of a covariance without storing a matrix.

    Args:
        covariance: Covariance to invert.

    Attributes:
        diagonal: ``[ranks]``, diagonal of the inverse.
    """

    def __init__(self, covariance: Covariance) -> None:
        self._variances = covariance.variances
        kinds = sorted(covariance.shared, key=lambda kind: -int(kind.group.max(initial=-1)))
        ranks = len(covariance.variances)
        first = kinds[0] if kinds else Shared(np.arange(ranks), np.zeros(ranks))
        self._group, self._size = first.group, first.size
        self._order = np.argsort(first.group, kind="stable")
        self._begins = np.flatnonzero(np.diff(first.group[self._order], prepend=-1))
        weight = self._sums((first.size**2 / self._variances)[:, None])
        self._shrink = (1 / (1 + weight))[:, 0]
        update = np.zeros((ranks, sum(int(kind.group.max()) + 1 for kind in kinds[1:])))
        begin = 0
        for kind in kinds[1:]:
            update[np.arange(ranks), begin + kind.group] = kind.size
            begin += int(kind.group.max()) + 1
        solved = self._within_groups(update)
        lower = np.linalg.cholesky(np.eye(begin) + update.T @ solved)
        self._update: Floats = np.linalg.solve(lower, solved.T).T
        shrunk = (first.size / self._variances) ** 2 * self._shrink[first.group]
        self.diagonal: Floats = 1 / self._variances - shrunk - (self._update**2).sum(axis=1)

    def __matmul__(self, values: Floats) -> Floats:
        """Returns the product of the inverse and ``values``.

        Both ``values`` and the product have the shape ``[ranks]`` or ``[ranks, n]``.
        """
        columns = values if values.ndim > 1 else values[:, None]
        product = self._within_groups(columns) - self._update @ (self._update.T @ columns)
        return np.asarray(product if values.ndim > 1 else product[:, 0])

    def column(self, index: int) -> Floats:
        """Returns column ``index`` of the inverse, with shape ``[ranks]``.

        The inverse is symmetric, so this is also row ``index``.
        """
        unit = np.zeros(len(self._variances))
        unit[index] = 1.0
        return self @ unit

    def _within_groups(self, values: Floats) -> Floats:
        """Multiplies ``values`` by the inverse covariance, using only the first kind of group."""
        scaled = values / self._variances[:, None]
        sums = self._sums(scaled * self._size[:, None]) * self._shrink[:, None]
        result: Floats = scaled - (self._size / self._variances)[:, None] * sums[self._group]
        return result

    def _sums(self, values: Floats) -> Floats:
        """Returns the sums of ``values`` over the ranks of each group.

        ``values`` has the shape ``[ranks, n]``, and the sums have the shape ``[groups, n]``.
        """
        sums: Floats = np.add.reduceat(values[self._order], self._begins, axis=0)
        return sums
