"""Describes the documents of a run whose lengths vary, and the rows into which a step packs them.

With ``--slice-tokens``, the trainer packs the documents of a step into rows and cuts the rows into
slices of one length. Which rows a step has depends only on the lengths of its documents. So the
planner draws the documents of some steps from the known lengths, and packs them as the trainer
would (``schedule/document_rows.py``). All plans are predicted for the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.environment import Installed
from megatron.adaptive.config.sequence_slices import LEAST_TOKENS, Cut
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.model_description import Model
from megatron.adaptive.planner.model_file import ANY_RUN
from megatron.adaptive.schedule.document_rows import costliest_replica

_STEPS = 4
"""Maximum number of steps whose documents are drawn."""
_DRAWN = 512
"""Number of documents that are drawn if this is less than the maximum number of steps. Means over
many documents vary little."""


class RowSettings(NamedTuple):
    """Settings of a plan that decide how it packs documents, and which replica has most work.

    Attributes:
        tokens: Number of tokens of each slice.
        dp: Number of data-parallel replicas.
        pp: Number of pipeline ranks.
        chunks: Number of stages per pipeline rank.
        schedule: Name of the pipeline schedule.
        expert_ranks: Number of replicas that the experts are distributed over.
        tp: Number of tensor-parallel ranks that divide each slice; 1 without sequence parallelism.
    """

    tokens: int
    dp: int = 1
    pp: int = 2
    chunks: int = 1
    schedule: str = "adaptive"
    expert_ranks: int = 1
    tp: int = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class RunDocuments:
    """Lengths of a run's documents, and the microbatches of some steps.

    Attributes:
        config: Settings of a run of the model with ``--slice-tokens``. Parallel sizes, schedule and
            length of slices are replaced by those of a plan.
        lengths: Number of tokens of each known document, cut at the model's sequence length.
        batch: Number of documents per step.
        longest: Largest number of tokens that a document may have.
        packed_slices: Number of slices of each row if rows are packed up to the sequence length,
            as with ``--pack-to`` and ``--sequence-slices``. ``None`` for slices of a given length.
            Used to compare plans with such runs.
    """

    config: TrainerConfig
    lengths: tuple[int, ...]
    batch: int
    longest: int
    packed_slices: int | None = None

    @cached_property
    def steps(self) -> tuple[tuple[int, ...], ...]:
        """Number of tokens of each document, for each drawn step."""
        rng = np.random.default_rng(0)
        count = min(_STEPS, max(1, _DRAWN // self.batch))
        rounds = -(-count * self.batch // len(self.lengths))
        order = np.concatenate([rng.permutation(len(self.lengths)) for _ in range(rounds)])
        drawn = np.array(self.lengths)[order[: count * self.batch]].reshape(count, self.batch)
        return tuple(tuple(map(int, row)) for row in drawn)

    @cached_property
    def mean_tokens(self) -> float:
        """Mean number of tokens of a step."""
        return sum(map(sum, self.steps)) / len(self.steps)

    @cached_property
    def mean_squares(self) -> float:
        """Mean over the steps of the sum of squared lengths of a step's documents."""
        return sum(n * n for step in self.steps for n in step) / len(self.steps)

    @cached_property
    def _packed(self) -> dict[RowSettings, tuple[list[Cut], ...]]:
        return {}

    def cuts(self, rows: RowSettings) -> tuple[list[Cut], ...]:
        """Returns the microbatches of the replica with most work, in running order, by step.

        Raises:
            ConfigError: A step has too few documents for the replicas.
        """
        if rows not in self._packed:
            config = self._config_of(rows)
            self._packed[rows] = tuple(costliest_replica(config, lengths) for lengths in self.steps)
        return self._packed[rows]

    def _config_of(self, rows: RowSettings) -> TrainerConfig:
        config = self.config
        parallel = replace(
            config.parallel,
            world_size=rows.dp * rows.pp * rows.tp,
            tensor_model_parallel_size=rows.tp,
            sequence_parallel=rows.tp > 1,
            pipeline_model_parallel_size=rows.pp,
            expert_model_parallel_size=rows.expert_ranks,
            num_virtual_stages_per_pipeline_rank=rows.chunks,
        )
        config = replace(config, parallel=parallel)
        schedule = replace(config.schedule, pipeline_schedule=rows.schedule)
        if self.packed_slices is None:
            schedule = replace(schedule, slice_tokens=rows.tokens)
            return replace(config, schedule=schedule)
        schedule = replace(schedule, slice_tokens=None, sequence_slices=self.packed_slices)
        data = replace(config.data, pack_to=config.model.seq_length)
        return replace(config, schedule=schedule, data=data)

    def mean_items(self, tokens: int) -> float:
        """Returns the mean number of slices of a step on all replicas together."""
        cuts = self.cuts(RowSettings(tokens))
        return sum(len(cut.ends) for step in cuts for cut in step) / len(cuts)

    def mean_pairs(self, tokens: int) -> float:
        """Returns the mean number of pairs of tokens in a slice that attend to each other.

        The first x tokens of a document have x^2 pairs.
        """
        cuts = self.cuts(RowSettings(tokens))
        works = [cut.work(n) for step in cuts for cut in step for n in range(len(cut.ends))]
        return sum(pairs for _, pairs in works) / len(works)

    def most_slices(self, tokens: int) -> int:
        """Returns the number of slices of the longest row, which the longest document needs."""
        return -(-self.longest // tokens)


def make_documents(
    model: Model, lengths: Sequence[int], batch: int, *, longest: int | None = None
) -> RunDocuments:
    """Returns the documents of a run of a model.

    Args:
        model: Model to train.
        lengths: Number of tokens of each document, at least 1.
        batch: Number of documents per step.
        longest: Largest number of tokens that a document may have before it is cut. By default,
            the largest of ``lengths``.

    Raises:
        ConfigError: The trainer's ``--slice-tokens`` does not support the model.
    """
    if not model.arguments:
        raise ConfigError(
            f"--slice-tokens: model {model.name} is not described by the trainer's settings, so its"
            " runs cannot pack documents; give a model's name, arguments or config.json"
        )
    implementation = "transformer_engine" if model.attention == "fused" else "local"
    names = {argument.split("=")[0] for argument in model.arguments}
    flags = [] if "--transformer-impl" in names else ["--transformer-impl", implementation]
    flags += ["--variable-seq-lengths", "--slice-tokens", str(LEAST_TOKENS)]
    flags += ["--pipeline-model-parallel-size", "2", "--global-batch-size", str(batch)]
    # Without a partition, only even numbers of layers are possible.
    num_layers = sum(model.layer(index).counted for index in range(model.num_layers))
    flags += ["--partition", f"0-{num_layers}"]
    try:
        config = parse(
            [*ANY_RUN, *model.arguments, *flags],
            world_size=2,
            last_wins=True,
            installed=Installed(transformer_engine=True),
        )
    except ConfigError as error:
        raise ConfigError(f"--slice-tokens cannot be used for {model.name}: {error}") from None
    most = config.model.seq_length
    return RunDocuments(
        config=config,
        lengths=tuple(min(length, most) for length in lengths),
        batch=batch,
        longest=min(most, max(lengths) if longest is None else longest),
    )
