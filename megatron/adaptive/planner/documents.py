"""Describes documents of varying lengths, and the rows into which the trainer packs them.

With ``--slice-tokens``, the trainer packs the documents of a step into rows and cuts the rows into
slices of equal length. The rows of a step depend only on the lengths of its documents. The planner
therefore draws documents for a few steps from the known lengths, and packs them like the trainer
(``schedule/document_rows.py``). All plans are predicted for the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.environment import Installed
from megatron.adaptive.config.sequence_slices import LEAST_TOKENS, Cut
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.model_description import Model
from megatron.adaptive.planner.model_file import ANY_RUN
from megatron.adaptive.schedule.document_rows import costliest_replica, most_slices

Lengths: TypeAlias = npt.NDArray[np.integer[Any]]
"""Number of tokens of each document, ``[documents]``."""

_LEAST_STEPS = 4
"""Number of steps for which documents are drawn initially."""
_MOST_STEPS = 64
"""Maximum number of steps to draw. Each plan of a search is simulated with all drawn steps, so more
steps would make the search slow.
"""
_DRAWN = 512
"""Maximum number of documents to draw, unless a single step has more. The mean length of this many
documents varies little."""
_STABLE = 0.02
"""Maximum relative error of the mean length of drawn documents."""
_STABLE_SQUARES = 0.05
"""Maximum relative error of the mean squared length of drawn documents."""
_CHUNK = 1 << 16
"""Number of lengths that are squared in one operation, which limits the memory for the squares."""


class RowSettings(NamedTuple):
    """Settings of a plan that determine how documents are packed into rows.

    Attributes:
        tokens: Number of tokens of each slice.
        dp: Number of data-parallel replicas.
        pp: Number of pipeline ranks.
        chunks: Number of stages per pipeline rank.
        schedule: Name of the pipeline schedule.
        expert_ranks: Number of replicas over which the experts are distributed.
        tp: Number of tensor-parallel ranks among which each slice is divided, or 1 without sequence
            parallelism.
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
    """Document lengths in some steps of a training run, and the microbatches packed from them.

    Attributes:
        config: Settings of a run that trains the model with ``--slice-tokens``. For each plan, the
            parallel sizes, the schedule and the length of slices are replaced by the plan's values.
        steps: For each drawn step, the number of tokens of each document.
        batch: Number of documents per step.
        longest: Maximum number of tokens per document.
        packed_slices: Number of slices per row in runs that pack rows up to the sequence length, as
            with ``--pack-to`` and ``--sequence-slices``. ``None`` if slices have a fixed length.
            This field is used to compare plans with such runs.
    """

    config: TrainerConfig
    steps: tuple[tuple[int, ...], ...]
    batch: int
    longest: int
    packed_slices: int | None = None

    @cached_property
    def mean_tokens(self) -> float:
        """Mean number of tokens per step."""
        return sum(map(sum, self.steps)) / len(self.steps)

    @cached_property
    def mean_squares(self) -> float:
        """Sum of squared document lengths of a step, averaged over the steps."""
        return sum(n * n for step in self.steps for n in step) / len(self.steps)

    @cached_property
    def _packed(self) -> dict[RowSettings, tuple[list[Cut], ...]]:
        return {}

    def cuts(self, rows: RowSettings) -> tuple[list[Cut], ...]:
        """Returns the microbatches of the replica with the most work, for each drawn step.

        The microbatches are listed in the order in which they run. ``rows`` contains the settings
        of the plan.

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
        """Returns the mean number of slices of ``tokens`` tokens per step, over all replicas."""
        cuts = self.cuts(RowSettings(tokens))
        return sum(len(cut.ends) for step in cuts for cut in step) / len(cuts)

    def mean_pairs(self, tokens: int) -> float:
        """Returns the mean number of token pairs per slice that attend to each other.

        ``tokens`` is the number of tokens per slice. The first x tokens of a document count as x^2
        pairs.
        """
        cuts = self.cuts(RowSettings(tokens))
        works = [cut.work(n) for step in cuts for cut in step for n in range(len(cut.ends))]
        return sum(pairs for _, pairs in works) / len(works)

    def needed_slices(self, tokens: int) -> int:
        """Returns the number of slices of ``tokens`` tokens that the longest document needs."""
        return -(-self.longest // tokens)

    def most_slices(self, tokens: int) -> int:
        """Returns the maximum number of slices of ``tokens`` tokens that a packed row can have.

        Usually, the longest document determines this number. But if all rows of a step must have
        the same number of slices, for example with experts, rows may be longer.
        """
        needed = self.needed_slices(tokens)
        return most_slices(needed) if self._has_equal_rows else needed

    @cached_property
    def _has_equal_rows(self) -> bool:
        is_packed = self.packed_slices is not None
        return not is_packed and not self._config_of(RowSettings(LEAST_TOKENS)).varies_slices


def draw_steps(lengths: Lengths, batch: int) -> tuple[tuple[int, ...], ...]:
    """Draws documents for a few steps, so that they represent all known documents.

    The sorted lengths are divided into equal parts, and one document is drawn from each part. As a
    result, short and long documents are drawn in the same proportion as they occur. The number of
    steps is doubled until the mean and the mean square of the drawn lengths are close to those of
    all lengths.

    Args:
        lengths: Number of tokens of each known document, ``[documents]``.
        batch: Number of documents per step.

    Returns:
        For each step, the number of tokens of each document.
    """
    ordered = np.sort(lengths)
    mean, square = _means(ordered)
    most = min(_MOST_STEPS, max(1, _DRAWN // batch))
    count = min(_LEAST_STEPS, most)
    while True:
        rng = np.random.default_rng(0)
        number = count * batch
        parts = (np.arange(number) + rng.random(number)) * (len(ordered) / number)
        drawn = ordered[np.minimum(parts.astype(np.int64), len(ordered) - 1)]
        drawn_mean, drawn_square = _means(drawn)
        is_stable = (
            abs(drawn_mean - mean) <= _STABLE * mean
            and abs(drawn_square - square) <= _STABLE_SQUARES * square
        )
        if is_stable or count == most:
            steps = rng.permutation(drawn).reshape(count, batch)
            return tuple(tuple(step) for step in steps.tolist())
        count = min(2 * count, most)


def _means(lengths: Lengths) -> tuple[float, float]:
    """Returns the mean and the mean square of ``lengths``."""
    chunks = range(0, len(lengths), _CHUNK)
    parts = (lengths[start : start + _CHUNK].astype(np.float64) for start in chunks)
    sums = np.sum([(part.sum(), part @ part) for part in parts], axis=0)
    return float(sums[0]) / len(lengths), float(sums[1]) / len(lengths)


def make_documents(
    model: Model, lengths: Sequence[int] | Lengths, batch: int, *, longest: int | None = None
) -> RunDocuments:
    """Draws the documents of some steps of a run that trains ``model`` with ``--slice-tokens``.

    Args:
        model: Model to train.
        lengths: Number of tokens of each document, at least 1.
        batch: Number of documents per step.
        longest: Maximum number of tokens per document. Longer documents are truncated. Defaults to
            the length of the longest document.

    Raises:
        ConfigError: The trainer's ``--slice-tokens`` does not support the model.
    """
    if not model.arguments:
        raise ConfigError(
            f"--slice-tokens: the trainer cannot pack documents for model {model.name}, which is"
            " not described by the trainer's settings; pass another model's name, arguments or"
            " config.json"
        )
    implementation = "transformer_engine" if model.attention == "fused" else "local"
    names = {argument.split("=")[0] for argument in model.arguments}
    flags = [] if "--transformer-impl" in names else ["--transformer-impl", implementation]
    flags += ["--variable-seq-lengths", "--slice-tokens", str(LEAST_TOKENS)]
    flags += ["--pipeline-model-parallel-size", "2", "--global-batch-size", str(batch)]
    # Without --partition, the number of layers would have to be even, because there are two stages.
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
    cut = np.minimum(lengths, most)
    return RunDocuments(
        config=config,
        steps=draw_steps(cut, batch),
        batch=batch,
        longest=min(most, int(cut.max()) if longest is None else longest),
    )
