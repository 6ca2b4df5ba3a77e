"""Orders microbatches of unequal cost and distributes them over replicas.

::

    content of each microbatch ──> cost on each stage ──┬──> order within a replica's step
     (elements of its entries)        ^                 └──> replica that trains it (``share``)
                                      │
          operation counts of the sample's recordings, or measured times of the steps so far

All ranks must decide on the same order and distribution. Otherwise, a microbatch could be lost or
trained twice. Therefore, ranks compare their decisions before each step.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch

from megatron.adaptive.engine.executor import RankTimes
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules.batch import Microbatch, Signature
from megatron.adaptive.modules.batch_comparison import BatchComparison, Digest
from megatron.adaptive.modules.cutting import balanced
from megatron.adaptive.schedule.content_costs import (
    ContentCosts,
    Numbers,
    StageFit,
    products_of,
    squares_of,
)
from megatron.adaptive.schedule.microbatch_assignment import deal
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import order_by_cost

MicrobatchOrder = Literal["given", "work", "time"]
"""Order in which a replica runs its microbatches."""
Dealing = Literal["turns", "work", "time"]
"""Method of distributing the microbatches of a list over replicas."""

_REFIT_STEPS = 8
"""Number of steps between two fits of the function that predicts costs.

During the first ``_REFIT_STEPS`` steps, the function is fitted after each step.
"""
_ADVISED_AFTER = 2 * _REFIT_STEPS
"""Number of measured steps after which to report another partition if it is much faster."""
_WORTH = 0.1
"""Minimum fraction by which a partition must reduce the longest stage time to be reported."""
_LEAST_COST = 0.02
"""Constant that is added to each microbatch's cost, as a fraction of the mean cost.

Without the constant, all microbatches with a predicted cost of 0 would go to the same replica.
"""


class DealtList(list[Microbatch]):
    """List of the microbatches that one replica trains on.

    Args:
        batch: All microbatches of the step.
        numbers: Indices of this replica's microbatches in ``batch``, in ascending order.
        digest: Digest of the whole batch and its distribution, for comparison between ranks.

    Attributes:
        numbers: Indices of this replica's microbatches in the whole batch, in ascending order.
        digest: Digest of the whole batch and its distribution, for comparison between ranks.
        total: Number of microbatches in the whole batch.
    """

    def __init__(
        self, batch: Sequence[Microbatch], numbers: Sequence[int], digest: Digest | None = None
    ) -> None:
        super().__init__(batch[number] for number in numbers)
        self.numbers = tuple(numbers)
        self.digest = digest or Digest()
        self.total = len(batch)
        self._dealt = tuple(self)

    @property
    def is_unchanged(self) -> bool:
        """Returns whether the list still has its original microbatches in their original order."""
        return len(self) == len(self._dealt) and all(map(operator.is_, self, self._dealt))


class Content:
    """Computes the features of a microbatch that are used to predict its cost.

    The features are the element count of each entry, the pair count of each integer entry, and the
    constant 1. The pair count (such as the number of token pairs) is the element count times the
    length of the last dimension.

    Args:
        signatures: Signatures of the sample batch's microbatches.
    """

    def __init__(self, signatures: Iterable[Signature]) -> None:
        dtypes = {name: dtype for part in signatures for name, _, dtype in part.entries}
        self._names = sorted(dtypes)
        self._paired = [
            name
            for name in self._names
            if not (dtypes[name].is_floating_point or dtypes[name].is_complex)
        ]

    @property
    def labels(self) -> list[str]:
        """Returns the labels of the features."""
        return [*self._names, *(f"{name} pairs" for name in self._paired), "microbatch"]

    def numbers(self, microbatch: Microbatch) -> Numbers:
        """Returns the features of ``microbatch``, which are 0 for missing entries."""
        return self._of_shapes({name: tensor.shape for name, tensor in microbatch.items()})

    def numbers_of(self, signature: Signature) -> Numbers:
        """Returns the features of a microbatch with this ``signature``."""
        return self._of_shapes({name: shape for name, shape, _ in signature.entries})

    def _of_shapes(self, shapes: Mapping[str, torch.Size]) -> Numbers:
        counts = {name: float(shape.numel()) for name, shape in shapes.items()}
        pairs = (
            counts[name] * shapes[name][-1] if name in counts and shapes[name] else 0.0
            for name in self._paired
        )
        return (*(counts.get(name, 0.0) for name in self._names), *pairs, 1.0)


class ContentBalance:
    """Orders microbatches and distributes them over replicas, based on predicted costs.

    If the order or the distribution is based on costs, all ranks must call the constructor
    together.

    Args:
        order: Order in which a replica runs its microbatches.
        dealing: Method of distributing microbatches over replicas.
        comparison: Object that compares the batches of the ranks in its ``mesh``.
        placement: Assignment of stages to ranks.
        partition: Number of segments in each stage.
        sample_work: Operation count of each segment, keyed by the signature of the microbatch.
        group: Required divisor of each replica's number of microbatches.
        least: Minimum number of microbatches per replica.

    Attributes:
        is_on: Whether the order or the distribution is based on costs.
        advises: Whether to print a line, at most once, if another partition would be much faster.
    """

    def __init__(
        self,
        *,
        order: MicrobatchOrder,
        dealing: Dealing,
        comparison: BatchComparison,
        placement: Placement,
        partition: Sequence[int],
        sample_work: Mapping[Signature, Sequence[float]],
        group: int = 1,
        least: int = 1,
    ) -> None:
        self._order = order
        self._dealing = dealing
        self._comparison = comparison
        self._mesh = mesh = comparison.mesh
        self._partition = tuple(partition)
        self._sample_work = dict(sample_work)
        self._group = group
        self._least = least
        self._placement = placement
        self.is_on = is_by_cost(order, dealing)
        self._is_timed = "time" in (order, dealing)
        self._content = Content(sample_work)
        self._segments = [self._fitted(work) for work in zip(*sample_work.values(), strict=True)]
        self._rows: list[Numbers] = []
        self.advises = True
        self._begin_fits()
        self._positions: list[tuple[int, int]] = []
        if self.is_on:
            self._positions = mesh.gather((mesh.dp_rank, mesh.pp_rank))

    def _begin_fits(self) -> None:
        self._times = ContentCosts(self._placement, self._partition, self._segments)
        self._steps = self._fits = 0
        # Sums over the times of the last training step. They are sent to all ranks before the next
        # step.
        self._sums: list[float] = []

    def use(self, partition: Sequence[int]) -> None:
        """Discards the measured costs, and estimates the stage costs of a new partition.

        All ranks must call this after the same step.

        Args:
            partition: Number of segments in each stage.
        """
        self._partition = tuple(partition)
        self._begin_fits()

    def _fitted(self, work: Sequence[float], start: Collection[int] = ()) -> StageFit:
        """Fits a function that predicts operation counts from the features of a microbatch.

        Args:
            work: Operation count of each recording of the sample batch.
            start: Indices of the features that share the cost before the fit, in the order of
                :attr:`Content.labels`; empty for all features.
        """
        rows = [self._content.numbers_of(signature) for signature in self._sample_work]
        fit = StageFit(len(rows[0]))
        fit.add(squares_of(rows), products_of(rows, work))
        fit.fit(start)
        return fit

    @property
    def seconds(self) -> list[dict[str, float]]:
        """Returns the fitted time in seconds per unit of each feature, as one dict per stage.

        The keys are :attr:`Content.labels`. For example, the value for an element count is the time
        per element. The list is empty before times are fitted for the first time.
        """
        labels = self._content.labels
        if not self._fits:
            return []
        return [dict(zip(labels, fit.factors, strict=True)) for fit in self._times.stages]

    @property
    def segment_seconds(self) -> tuple[float, ...]:
        """Returns the mean time of each segment in the steps so far, in seconds.

        The tuple is empty before times are fitted for the first time.
        """
        return self._times.segment_costs() if self._fits else ()

    def _costs_of(self, rule: str, batch: Sequence[Microbatch]) -> list[float]:
        """Returns the predicted cost of each microbatch.

        Args:
            rule: ``work`` for operation counts, or ``time`` for times. Before the first fit,
                ``time`` also uses operation counts.
            batch: Microbatches whose costs are compared.
        """
        rows = [self._content.numbers(microbatch) for microbatch in batch]
        if rule == "time" and self._fits:
            return [self._times.cost(row) for row in rows]
        # Fit the whole model instead of each stage, so that the result does not depend on the
        # partition. Start with the constant term (the last column) and the features that vary,
        # because features with the same value in all microbatches cannot explain cost differences.
        columns = list(zip(*rows, strict=True))
        unequal = {index for index, column in enumerate(columns) if len(set(column)) > 1}
        totals = [math.fsum(work) for work in self._sample_work.values()]
        fit = self._fitted(totals, {*unequal, len(columns) - 1})
        return [fit.cost(row) for row in rows]

    def order_of(self, microbatches: Sequence[Microbatch], work: Sequence[float]) -> list[int]:
        """Returns the indices of a replica's microbatches in execution order.

        Args:
            microbatches: Microbatches of the replica.
            work: Operation count of each microbatch, summed over all stages.
        """
        if self._order == "given":
            return list(range(len(microbatches)))
        if self._order == "time" and self._fits:
            work = self._costs_of("time", microbatches)
        return order_by_cost(work, self._mesh.pipeline_size)

    def share(self, batch: Sequence[Microbatch]) -> DealtList | None:
        """Returns the microbatches of ``batch`` that this replica trains on.

        Returns ``None`` if ``batch`` contains objects other than microbatches, and costs are not
        needed because ``dealing`` is ``turns`` or there is only one replica.

        Raises:
            ConfigError: If ``batch`` contains objects other than microbatches, and costs are
                needed.
        """
        replicas = self._mesh.dp_size
        is_of_microbatches = all(isinstance(part, Mapping) for part in batch)
        if self._dealing == "turns" or replicas == 1:
            numbers = range(self._mesh.dp_rank, len(batch), replicas)
            return DealtList(batch, numbers) if is_of_microbatches else None
        if not is_of_microbatches:
            raise ConfigError(
                f"share() accepts only microbatches if dealing is {self._dealing!r}; to distribute "
                "other values in the same way, call shared = share(microbatches), and use "
                "[values[n] for n in shared.numbers]"
            )
        each = self._costs_of(self._dealing, batch)
        least_cost = _LEAST_COST * sum(each) / len(each) or 1.0
        each = [cost + least_cost for cost in each]
        # Accept any number of microbatches here, because an evaluation accepts any number.
        # check_total() checks the number before training.
        if self._is_trainable(len(batch)):
            dealt = deal([each] * replicas, group=self._group, least=self._least)
        else:
            dealt = deal([each] * replicas)
        entries = self._comparison.entries_of(batch, with_device=False)
        return DealtList(batch, dealt[self._mesh.dp_rank], Digest.of(entries, dealt))

    def _is_trainable(self, total: int) -> bool:
        """Returns whether the replicas can train on a batch of ``total`` microbatches."""
        return not total % self._group and total >= self._least * self._mesh.dp_size

    def check_total(self, batch: Any) -> None:
        """Checks that the schedule supports the number of microbatches in a :class:`DealtList`.

        Raises:
            ConfigError: If the whole batch has too few microbatches, or if their number is not a
                multiple of the number that the schedule requires.
        """
        replicas = self._mesh.dp_size
        if self._dealing == "turns" or replicas == 1 or not isinstance(batch, DealtList):
            return
        if not self._is_trainable(batch.total):
            raise ConfigError(
                f"a batch of {batch.total} microbatches cannot be distributed over {replicas} "
                f"replicas; pass at least {self._least * replicas}"
                + (f", and a multiple of {self._group}" if self._group > 1 else "")
            )

    def numbers_of(self, batch: Any, count: int, *, is_listed: bool) -> Sequence[int]:
        """Returns the indices of this replica's microbatches in the batch of all replicas.

        Args:
            batch: Batch of the replica, as the user passed it.
            count: Number of microbatches in ``batch``.
            is_listed: Whether the batch is a list of microbatches.

        Raises:
            ConfigError: If microbatches are distributed by cost, but ``batch`` was not returned by
                :meth:`share`, or was modified since.
        """
        mesh = self._mesh
        if not is_listed:
            return range(mesh.dp_rank * count, (mesh.dp_rank + 1) * count)
        if self._dealing == "turns" or mesh.dp_size == 1:
            return range(mesh.dp_rank, mesh.dp_rank + count * mesh.dp_size, mesh.dp_size)
        if not isinstance(batch, DealtList) or not batch.is_unchanged:
            raise ConfigError(
                f"dealing {self._dealing!r} requires a list made by share(), but the batch is "
                "another list or was changed; pass the list that share() returned, unchanged"
            )
        return batch.numbers

    def take_sums(self) -> list[float]:
        """Returns sums over the times of the last training step, and resets them.

        The caller sends the sums to all ranks. The list has the same length on all ranks.
        """
        if not self._is_timed:
            return []
        sums = self._sums or [0.0] * self._times.num_sums
        self._sums = []
        return sums

    def begin(self, rows: Sequence[Microbatch]) -> None:
        """Stores the features of a step's microbatches, in execution order."""
        if self._is_timed:
            self._rows = [self._content.numbers(part) for part in rows]

    def end(self, times: RankTimes) -> None:
        """Sums up ``times``, which this rank measured in a training step, and stores the sums."""
        self._steps += 1
        # Ignore the first step, which takes longer because of warm-up.
        if not self._is_timed or self._steps == 1:
            return
        self._sums = self._times.measured(self._rows, times.actions)

    def add_sums(self, sums: Sequence[Sequence[float]]) -> None:
        """Adds the measured times in ``sums``, and fits the costs if a new fit is due.

        Each row of ``sums`` is the result of :meth:`take_sums` on one rank.
        """
        if not any(map(any, sums)):
            return
        self._times.add(dict(zip(self._positions, sums, strict=True)))
        added = self._steps - 1
        if added <= _REFIT_STEPS or added % _REFIT_STEPS == 0:
            self._times.fit()
            self._fits += 1
        if added == _ADVISED_AFTER and self.advises:
            self._advise()

    def _advise(self) -> None:
        """Prints a line on the first rank if another partition would be much faster."""
        seconds = self.segment_seconds
        partition = balanced(seconds, len(self._partition))
        largest, least = (_largest(seconds, each) for each in (self._partition, partition))
        if self._mesh.rank == 0 and least < (1 - _WORTH) * largest:
            print(
                f"for the microbatches of the last steps, the slowest stage of partition"
                f" {partition_text(partition)} would take {100 * (1 - least / largest):.0f}% less"
                f" time than the slowest stage of {partition_text(self._partition)}; to use the"
                f" faster partition at the next start, pass"
                f" partition={partition_text(partition)}, or weights=pipeline.segment_seconds",
                flush=True,
            )


def _largest(seconds: Sequence[float], partition: Sequence[int]) -> float:
    """Returns the time of the longest stage of ``partition``, in seconds.

    ``seconds`` contains the time of each segment.
    """
    costs = iter(seconds)
    return max(sum(itertools.islice(costs, size)) for size in partition)


def partition_text(partition: Sequence[int]) -> str:
    """Returns a partition as text, such as ``3-4-5``."""
    return "-".join(map(str, partition))


def is_by_cost(order: MicrobatchOrder, dealing: Dealing) -> bool:
    """Returns whether ``order`` or ``dealing`` depends on the costs of microbatches."""
    return order != "given" or dealing != "turns"


def check_rules(order: str, dealing: str) -> None:
    """Checks that the settings ``order`` and ``dealing`` have allowed values.

    Raises:
        ConfigError: If a setting does not have an allowed value.
    """
    for name, value, values in (
        ("order", order, get_args(MicrobatchOrder)),
        ("dealing", dealing, get_args(Dealing)),
    ):
        if value not in values:
            raise ConfigError(f"{name} {value!r} is invalid; choose one of {', '.join(values)}")
