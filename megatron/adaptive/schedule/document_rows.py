"""Packs the documents of a step into rows, and assigns the rows to data-parallel replicas.

The trainer uses this module to form its microbatches from the documents of a step. Simulations and
the planner use it to determine these microbatches without reading any tokens. The settings of the
run decide how documents are packed and assigned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.adaptive.config.sequence_slices import Cut, SliceRule
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.schedule.microbatch_assignment import Dealer, Size
from megatron.adaptive.schedule.pack_documents import first_fit

_LONGER = 4  # Rows cut into slices are at most 1/4 longer than the longest sample.
_TRIES = 4  # Number of row lengths to try in addition to the shortest.
_TOKEN_PER_PAIR = 12
"""Cost of a token, divided by the attention cost of a pair of tokens and by the hidden size."""


@dataclass(frozen=True, kw_only=True)
class Batching:
    """Settings that determine which samples share a microbatch.

    Attributes:
        micro_batch_size: Number of samples per microbatch if samples are not packed.
        replicas: Number of data-parallel replicas.
        varies: Whether samples may have different lengths.
        pack_to: Largest number of tokens per packed microbatch, or ``None`` if samples are not
            packed or ``slice_tokens`` is set.
        slice_tokens: Number of tokens per slice of a packed microbatch, or ``None`` to use
            ``pack_to``.
        varies_slices: Whether microbatches of a step may have different numbers of slices.
        multiple: The padded length of each row is a multiple of this number.
        shortest: Smallest number of tokens in a row. Shorter rows are padded.
        group: The number of microbatches per replica and step is a multiple of this number.
        least: Smallest number of microbatches per replica and step.
    """

    micro_batch_size: int
    replicas: int
    varies: bool = False
    pack_to: int | None = None
    slice_tokens: int | None = None
    varies_slices: bool = False
    multiple: int = 1
    shortest: int = 1
    group: int = 1
    least: int = 1

    def for_step(self, lengths: Sequence[int]) -> Batching:
        """Returns the settings for a step whose samples have the given lengths.

        Args:
            lengths: Number of tokens of each of the step's samples.
        """
        tokens = self.slice_tokens
        if tokens is None:
            return self
        if self.varies_slices:
            return replace(self, pack_to=tokens, multiple=tokens)
        least = -(-max(lengths) // tokens)
        more = most_slices(least) - least
        counts = sorted({least + more * part // _TRIES for part in range(_TRIES + 1)})
        choices = [replace(self, pack_to=n * tokens, multiple=n * tokens) for n in counts]
        return min(choices, key=lambda choice: len(choice.plan(lengths)) * choice.multiple)

    def plan(self, lengths: Sequence[int]) -> list[list[int]]:
        """Groups the samples of a step into microbatches, and returns the sample indices of each.

        Args:
            lengths: Number of tokens of each of the step's samples.
        """
        if self.pack_to is not None:
            unit = self.replicas * self.group
            least = self.replicas * self.least
            return first_fit(lengths, self.pack_to, unit, least)
        size = self.micro_batch_size
        return [list(range(n, n + size)) for n in range(0, len(lengths), size)]

    def size_of(self, lengths: Sequence[int]) -> Size:
        """Returns a microbatch's number of tokens, and the sum of its samples' squared lengths.

        Args:
            lengths: Number of tokens of each sample in the microbatch.
        """
        if self.pack_to is None:
            lengths = [self.row_tokens(max(lengths))] * len(lengths)
        return float(sum(lengths)), float(sum(length * length for length in lengths))

    def positions(self, lengths: Sequence[int]) -> int:
        """Returns the number of tokens in a microbatch, including padding.

        Args:
            lengths: Number of tokens of each sample in the microbatch.
        """
        if self.pack_to is None:
            return len(lengths) * self.row_tokens(max(lengths))
        return self.row_tokens(sum(lengths))

    def row_tokens(self, tokens: int) -> int:
        """Returns the padded length of a row of ``tokens`` tokens."""
        return -(-max(tokens, self.shortest) // self.multiple) * self.multiple


def most_slices(needed: int) -> int:
    """Returns the maximum number of slices per row.

    ``needed`` is the number of slices that the longest sample needs.
    """
    return needed + needed // _LONGER


def batching_of(config: TrainerConfig) -> Batching:
    """Returns the settings in ``config`` that decide how samples are combined into microbatches."""
    parallel = config.parallel
    context = parallel.context_parallel_size
    parts = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    return Batching(
        micro_batch_size=config.batch.micro_batch_size,
        replicas=parallel.data_parallel_size,
        varies=config.data.variable_seq_lengths,
        pack_to=config.data.pack_to,
        slice_tokens=config.slice_tokens if config.packs_documents else None,
        varies_slices=config.varies_slices,
        multiple=parts * (2 * context if context > 1 else 1),
        shortest=config.least_row,
        group=config.microbatch_group,
        least=config.least_microbatches,
    )


def make_dealer(config: TrainerConfig) -> Dealer:
    """Returns an object that assigns microbatches to replicas as ``config`` specifies."""
    parallel = config.parallel
    # Simulated steps with several chunks per rank are shorter if long rows run in the middle of the
    # step.
    has_one_chunk = config.varies_slices and parallel.num_chunks == 1
    return Dealer(
        config.balance,
        replicas=parallel.data_parallel_size,
        ranks=parallel.pipeline_model_parallel_size,
        group=config.microbatch_group,
        least=config.least_microbatches,
        pair=1 / (_TOKEN_PER_PAIR * config.model.hidden_size),
        slice_tokens=config.slice_tokens if has_one_chunk else None,
    )


def costliest_replica(config: TrainerConfig, lengths: Sequence[int]) -> list[Cut]:
    """Returns the microbatches of the replica with the most work, in execution order.

    Args:
        config: Settings of the run.
        lengths: Numbers of tokens of the step's documents, on all replicas.

    Raises:
        ConfigError: The step has too few documents for the replicas.
    """
    batching: Batching = batching_of(config).for_step(lengths)
    rule = config.slice_rule or SliceRule(slices=1, is_packed=config.packs_documents)
    rows = [[lengths[sample] for sample in row] for row in batching.plan(lengths)]
    replicas = batching.replicas
    shares: Sequence[Sequence[int]] = [range(n, len(rows), replicas) for n in range(replicas)]
    if config.balance != "off":
        shares = make_dealer(config).deal([batching.size_of(row) for row in rows])

    def tokens_and_pairs(share: Sequence[int]) -> float:
        return sum(config.cost_of(*batching.size_of(rows[number])) for number in share)

    share = max(shares, key=tokens_and_pairs)
    return [rule.cut(batching.positions(rows[number]), rows[number]) for number in share]
