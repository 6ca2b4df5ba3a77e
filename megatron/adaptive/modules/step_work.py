"""Prepares steps: orders a batch's microbatches, and determines their programs and loss weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron.adaptive.config.schedule_specs import schedule_spec
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules.assembly import Assembly, PipelineSettings
from megatron.adaptive.modules.batch import (
    Batch,
    BatchShape,
    Microbatch,
    MicrobatchList,
    check_num_items,
    is_list,
    microbatch_list,
    samples_in,
    stretched,
)
from megatron.adaptive.modules.batch_comparison import BatchComparison, Declared, Digest
from megatron.adaptive.modules.content import ContentBalance, DealtList, is_by_cost
from megatron.adaptive.modules.mesh import Mesh
from megatron.adaptive.modules.program import RankPrograms
from megatron.adaptive.schedule.stage_placement import Placement

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Contains the microbatches of a step, in execution order.

    Attributes:
        microbatches: Tensors of each microbatch, keyed by name.
        programs: Programs of this rank's stages for each microbatch.
        weights: Weight of each microbatch's loss; ``None`` for the mean over microbatches.
        is_listed: Whether the user passed a list of microbatches.
        numbers: Index of each microbatch among the microbatches of all replicas.
        order: Index of each microbatch in the batch that the user passed.
    """

    microbatches: list[Microbatch]
    programs: list[RankPrograms]
    weights: list[float] | None
    is_listed: bool
    numbers: Sequence[int]
    order: Sequence[int]

    def reordered(self, order: Sequence[int]) -> StepWork:
        """Returns a copy of this object with the microbatches in a different order.

        Args:
            order: Indices of the microbatches, in the new order.
        """
        return StepWork(
            microbatches=[self.microbatches[index] for index in order],
            programs=[self.programs[index] for index in order],
            weights=None if self.weights is None else [self.weights[index] for index in order],
            is_listed=self.is_listed,
            numbers=[self.numbers[index] for index in order],
            order=[self.order[index] for index in order],
        )

    def as_passed(self, values: Sequence[T]) -> list[T]:
        """Returns ``values`` in the order of the batch that the user passed.

        Args:
            values: Value of each microbatch, in execution order; may be empty.
        """
        pairs = sorted(zip(self.order, values, strict=False), key=lambda pair: pair[0])
        return [value for _, value in pairs]

    @property
    def passed_weights(self) -> list[float] | None:
        """Returns the weights of the losses, in the order of the batch that the user passed."""
        return None if self.weights is None else self.as_passed(self.weights)

    @property
    def frozen_stages(self) -> int:
        """Returns the number of leading stages through which no gradient flows in this step.

        All ranks of the pipeline get the same number.
        """
        return min(chunks.frozen_stages or 0 for chunks in self.programs)

    @property
    def sizes(self) -> list[float] | None:
        """Returns the activation size of each microbatch in bytes, or ``None`` if all are equal."""
        sizes = [float(size) for size in self._all_sizes]
        return None if len(set(sizes)) == 1 else sizes

    @property
    def listed_sizes(self) -> tuple[int, ...]:
        """Returns the activation size of each microbatch in bytes if the batch is a list.

        The tuple is empty if the batch is a dictionary.
        """
        return self._all_sizes if self.is_listed else ()

    @property
    def _all_sizes(self) -> tuple[int, ...]:
        return tuple(max(1, chunks.activation_bytes) for chunks in self.programs)


class BatchForm:
    """Checks batches against the sample batch, and divides them into microbatches.

    Args:
        sample: Sample batch: a dictionary of tensors or a list of microbatches.
        micro_batch_size: Number of samples per microbatch of a dictionary.

    Attributes:
        examples: Microbatches of the sample batch with which the model is recorded.

    Raises:
        ConfigError: If the sample batch is invalid.
    """

    def __init__(self, sample: Batch, micro_batch_size: int) -> None:
        self._shape: BatchShape | None = None
        if is_list(sample):
            self.examples = microbatch_list(sample, "sample_batch")
        else:
            assert not isinstance(sample, Sequence)
            sample = stretched(sample, micro_batch_size)
            self._shape = BatchShape(sample, micro_batch_size)
            self.examples = self._shape.examples(sample)
        self._lists = MicrobatchList(self.examples)

    def divide(self, batch: Batch) -> list[Microbatch]:
        """Checks a batch and returns its microbatches.

        Raises:
            ConfigError: If ``Pipeline.step`` does not accept the batch.
        """
        if is_list(batch):
            return self._lists.microbatches(batch)
        if self._shape is None:
            raise ConfigError(
                f"batch is a {type(batch).__name__}, but the sample_batch is a list of "
                "microbatches; pass a list of microbatches"
            )
        return self._shape.microbatches(batch)


class StepMaker:
    """Divides batches among replicas, and prepares the microbatches of each step.

    Args:
        request: Settings of the pipeline.
        form: Object that checks batches and divides them into microbatches.
        assembly: This rank's part of the model.
        mesh: Replica and pipeline position of this process, and its process groups.
        placement: Assignment of stages to ranks.

    Attributes:
        comparison: Object that compares the ranks' batches.
        balance: Object that orders microbatches and distributes them over replicas.
    """

    def __init__(
        self,
        request: PipelineSettings,
        form: BatchForm,
        assembly: Assembly,
        mesh: Mesh,
        placement: Placement,
    ) -> None:
        spec = schedule_spec(request.schedule)
        is_grouped = spec.groups_microbatches and placement.num_chunks > 1
        group = mesh.pipeline_size if is_grouped else 1
        self._micro_batch_size = request.micro_batch_size or 1
        self._form = form
        self._recordings = assembly.recordings
        self._mesh = mesh
        self._update = assembly.update
        self.comparison = BatchComparison(
            mesh=mesh,
            is_on=request.compare_batches,
            is_by_cost=is_by_cost(request.order, request.dealing),
            unused=assembly.unused_entries,
        )
        self.balance = ContentBalance(
            order=request.order,
            dealing=request.dealing,
            comparison=self.comparison,
            placement=placement,
            partition=assembly.partition,
            sample_work=assembly.sample_work,
            group=group,
            least=max(group, spec.microbatches_per_rank * mesh.pipeline_size),
        )
        self.balance.advises = request.repartition == "off"

    def share(self, batch: Any) -> Any:
        """Returns this replica's part of a whole batch. See ``Pipeline.share``.

        Raises:
            ConfigError: If the batch cannot be divided among the replicas.
        """
        replicas = self._mesh.dp_size
        replica = self._mesh.dp_rank
        if is_list(batch):
            if len(batch) < replicas:
                raise ConfigError(
                    f"a batch of {len(batch)} microbatches cannot be distributed over {replicas} "
                    "replicas; pass at least one microbatch per replica"
                )
            dealt = self.balance.share(batch)
            return list(batch[replica::replicas]) if dealt is None else dealt
        count = samples_in(batch, "batch")
        if count % replicas:
            raise ConfigError(
                f"a batch of {count} samples cannot be divided equally among {replicas} "
                f"replicas; use a multiple of {replicas * self._micro_batch_size} samples"
            )
        part = count // replicas
        return {name: entry.narrow(0, replica * part, part) for name, entry in batch.items()}

    def work(self, batch: Batch, num_items: Sequence[float] | None, step: int) -> StepWork:
        """Checks a batch, and returns its microbatches in execution order.

        All ranks must call this together.

        Args:
            batch: Batch of this replica, as the user passed it.
            num_items: Number of items in each microbatch; ``None`` averages the loss over
                microbatches.
            step: Index of the training step; -1 in an evaluation.

        Raises:
            ConfigError: If the batch is invalid, or ranks disagree on the step.
        """
        comparison = self.comparison
        comparison.begin_call(is_training=step >= 0)
        try:
            work, items = self._prepared(batch, num_items, step)
            parts: Any = batch if work.is_listed else [batch]
            entries = comparison.entries_of(parts) if comparison.is_due else {}
        except Exception as error:
            # Report the error to the other ranks, which would otherwise wait for this rank until
            # the timeout.
            comparison.refuse(step, error, self.balance.take_sums())
        count = len(work.microbatches)
        if comparison.is_due:
            declared = Declared(
                step=step,
                replica=self._mesh.dp_rank,
                is_listed=work.is_listed,
                has_items=items is not None,
                dealt=batch.digest if isinstance(batch, DealtList) else Digest(),
                count=count,
                content=Digest.of(entries),
                order=Digest.of({}, *work.order).kinds,
            )
            self.balance.add_sums(comparison.agree(declared, entries, self.balance.take_sums()))
        weights, num_before = self._weights(items, count, is_listed=work.is_listed)
        numbers = work.numbers if work.is_listed else range(num_before, num_before + count)
        as_passed = dataclasses.replace(work, weights=weights, numbers=numbers, order=range(count))
        return as_passed.reordered(work.order)

    def _prepared(
        self, batch: Batch, num_items: Sequence[float] | None, step: int
    ) -> tuple[StepWork, list[float] | None]:
        """Checks a batch on this rank, and chooses the order of its microbatches.

        Args:
            batch: Batch of this replica, as the user passed it.
            num_items: Value that the user passed as the number of items in each microbatch; may be
                ``None``.
            step: Index of the training step; -1 in an evaluation.

        Returns:
            A :class:`StepWork` with the microbatches in the order in which the user passed them,
                and the checked numbers of items. ``StepWork.order`` contains the order in which to
                run the microbatches.

        Raises:
            ConfigError: If the batch is invalid.
        """
        balance = self.balance
        if step >= 0:
            self._update.check_trained()
        microbatches = self._form.divide(batch)
        items = check_num_items(num_items, len(microbatches))
        is_listed = is_list(batch)
        numbers = balance.numbers_of(batch, len(microbatches), is_listed=is_listed)
        if step >= 0:
            balance.check_total(batch)
        programs = [self._recordings.of(part, step) for part in microbatches]
        order: Sequence[int] = range(len(microbatches))
        if step >= 0:
            order = balance.order_of(microbatches, [each.work for each in programs])
        work = StepWork(
            microbatches=microbatches,
            programs=programs,
            weights=None,
            is_listed=is_listed,
            numbers=numbers,
            order=order,
        )
        return work, items

    def _weights(
        self, items: Sequence[float] | None, count: int, *, is_listed: bool
    ) -> tuple[list[float] | None, int]:
        """Computes the weight of each microbatch's loss. All ranks of ``dp_group`` must call this.

        Args:
            items: Number of items in each microbatch; ``None`` averages the loss over microbatches.
            count: Number of microbatches of this replica.
            is_listed: Whether the batch is a list of microbatches.

        Returns:
            The weights (``None`` for the mean over microbatches), and the total number of
                microbatches of all preceding replicas.

        Raises:
            ConfigError: If no microbatch has items, if replicas pass different kinds of batches, or
                if only some replicas pass ``num_items``.
        """
        replicas = self._mesh.dp_size
        numbers = items or [1.0] * count
        rows = self._mesh.over_replicas([is_listed, items is not None, count, sum(numbers)])
        for replica, (other_is_listed, other_has_items, *_) in enumerate(rows):
            if other_is_listed != rows[0][0]:
                raise ConfigError(
                    f"replicas 0 and {replica} have different kinds of batches; pass a list of "
                    "microbatches on all replicas, or a dictionary on all"
                )
            if other_has_items != rows[0][1]:
                raise ConfigError(
                    f"replicas 0 and {replica} disagree on num_items; pass it on all replicas, or "
                    "on none"
                )
        num_before = sum(int(other) for _, _, other, _ in rows[: self._mesh.dp_rank])
        # If all replicas have the same number of microbatches, the mean over replicas equals the
        # mean over microbatches.
        have_equal = all(other == count for _, _, other, _ in rows)
        if items is None and (replicas == 1 or (have_equal and not is_listed)):
            return None, num_before
        total = sum(of_replica for *_, of_replica in rows)
        if not total:
            raise ConfigError(
                "num_items must not be 0 for all microbatches, because there is then no loss "
                "to average"
            )
        return [replicas * number / total for number in numbers], num_before
