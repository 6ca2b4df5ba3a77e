"""Combines all settings of a run in one object, and converts this object for checkpoints."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.adaptive.config.collector import shown_url
from megatron.adaptive.config.data import BatchConfig, DataConfig
from megatron.adaptive.config.flags import FieldSpec, fields_of
from megatron.adaptive.config.megatron_core_flags import CoreConfig, parse_pattern
from megatron.adaptive.config.model import ModelConfig, RecomputeConfig
from megatron.adaptive.config.optimizer import LoraConfig, OptimizerConfig, PrecisionConfig
from megatron.adaptive.config.parallel import ParallelConfig, TransportConfig
from megatron.adaptive.config.run import CheckpointConfig, LoggingConfig, RunConfig
from megatron.adaptive.config.schedule import (
    ScheduleConfig,
    default_placement,
    nearly_even_split,
    parse_layout,
)
from megatron.adaptive.config.schedule_specs import PlacementKind, schedule_spec, why_whole_backward
from megatron.adaptive.config.sequence_slices import (
    SliceRule,
    first_number,
    first_tokens,
    least_row,
    numbers_to_choose,
    slice_ends,
    tokens_to_choose,
)
from megatron.adaptive.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """All settings of a training run, created and validated by ``arguments.parse``."""

    model: ModelConfig
    parallel: ParallelConfig
    batch: BatchConfig
    precision: PrecisionConfig
    optimizer: OptimizerConfig
    recompute: RecomputeConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    schedule: ScheduleConfig
    transport: TransportConfig
    run: RunConfig
    core: CoreConfig = dataclasses.field(default_factory=CoreConfig)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)

    @property
    def world_size(self) -> int:
        """Number of processes of the job."""
        return self.parallel.world_size

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages: pipeline ranks times chunks per rank."""
        return self.parallel.num_stages

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """Number of transformer layers in each stage, in pipeline order."""
        if self.schedule.partition is not None:
            return self.schedule.partition
        return nearly_even_split(self.model.num_layers, self.num_stages)

    @property
    def expert_layers(self) -> tuple[bool, ...]:
        """Whether each transformer layer has experts, as one boolean per layer."""
        pattern = parse_pattern(self.core.moe_layer_freq)
        layers = range(self.model.num_layers)
        if self.core.num_moe_experts is None:
            return (False,) * len(layers)
        return tuple(
            bool(i % pattern == 0 if isinstance(pattern, int) else pattern[i]) for i in layers
        )

    @property
    def mtp_stage(self) -> int | None:
        """Index of the stage with multi-token prediction layers, or ``None`` if there are none."""
        if self.model.mtp_num_layers is None:
            return None
        layout = self.schedule.pipeline_model_parallel_layout
        stages = () if layout is None else parse_layout(layout)
        with_layers = (stage for stage, layers in enumerate(stages) if "m" in layers)
        return next(with_layers, self.num_stages - 1)

    @property
    def placement_kind(self) -> PlacementKind:
        """Assignment of stages to pipeline ranks: ``loop`` (round-robin) or ``v``."""
        placement = self.schedule.pipeline_placement
        if placement is None:
            return default_placement(self.schedule.pipeline_schedule, self.parallel.num_chunks)
        return "v" if placement == "v" else "loop"

    @property
    def progress_dir(self) -> str | None:
        """Folder for the file ``progress.jsonl``, or ``None`` if this file is not written."""
        return self.logging.progress_dir or self.schedule.trace_dir

    @property
    def splits_backward(self) -> bool:
        """Whether separate actions compute the weight gradients, instead of the backward pass.

        Such actions fill the time in which a rank waits for messages. By default, there are no such
        actions on a single pipeline rank, which never waits, or if they would take more memory or
        time than they save (see ``why_whole_backward``).
        """
        is_split = self.schedule.split_backward
        schedule = self.schedule.pipeline_schedule
        splits = schedule_spec(schedule).splits_backward
        if is_split is not None or splits == "always":
            return is_split is not False
        return (
            splits == "by default"
            and self.parallel.pipeline_model_parallel_size > 1
            and self.model.transformer_impl == "local"
            and why_whole_backward(
                recompute=self.recompute.recompute_granularity,
                overlaps=self.parallel.overlap_grad_reduce,
                replicas=self.parallel.data_parallel_size,
            )
            is None
        )

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches per step and replica with the final batch size."""
        samples = self.batch.micro_batch_size * self.parallel.data_parallel_size
        return self.batch.global_batch_size // samples

    @property
    def slice_ends(self) -> tuple[int, ...]:
        """Position directly after the last token of each slice of a sequence.

        Raises:
            ConfigError: ``--sequence-slices`` is incompatible with the length of the sequences.
        """
        is_by_cost = self._cuts_by_cost and self.slice_tokens is None
        share = self.attention_share if is_by_cost else 0.0
        return slice_ends(self.model.seq_length, self.num_slices, self.token_ranks, share)

    @property
    def num_slices(self) -> int:
        """Number of slices per sequence of ``--seq-length`` tokens, or 1 without slices."""
        tokens = self.slice_tokens
        if self.schedule.chosen_slices is not None:
            return self.schedule.chosen_slices
        if self.schedule.chooses_slices:
            return first_number(self.model.seq_length, self.token_ranks)
        if tokens is None:
            return self.schedule.sequence_slices
        length = self.model.seq_length
        return max(1, min(-(-length // tokens), length // least_row(1, self.token_ranks)))

    @property
    def slices_to_choose(self) -> tuple[int, ...]:
        """Numbers of slices to choose from, or empty unless ``--sequence-slices`` is ``auto``."""
        if not self.schedule.chooses_slices:
            return ()
        return numbers_to_choose(self.model.seq_length, self.token_ranks)

    @property
    def slice_tokens(self) -> int | None:
        """Number of tokens per slice, or ``None`` without ``--slice-tokens``."""
        if not self.schedule.chooses_tokens:
            return self.schedule.slice_tokens
        chosen = self.schedule.chosen_tokens
        return chosen or first_tokens(self.model.seq_length, self.token_ranks)

    @property
    def tokens_to_choose(self) -> tuple[int, ...]:
        """Slice lengths to choose from, or empty unless ``--slice-tokens`` is ``auto``."""
        if not self.schedule.chooses_tokens:
            return ()
        return tokens_to_choose(self.model.seq_length, self.token_ranks)

    @property
    def constant_slices(self) -> int:
        """Number of slices of each microbatch, or 1 if the number may differ between steps."""
        is_constant = self.slice_tokens is None or not self.data.variable_seq_lengths
        return self.num_slices if is_constant else 1

    @property
    def varies_slices(self) -> bool:
        """Whether the microbatches of a step may have different numbers of slices.

        All microbatches must have the same number of slices if the order of actions is fixed before
        the step. The number must also be the same if replicas exchange tokens between experts,
        because these replicas must run the same actions.
        """
        spec = schedule_spec(self.schedule.pipeline_schedule)
        follows = spec.kind not in ("rule", "auto") or spec.is_own or spec.name == "hinted"
        has_lengths = self.data.variable_seq_lengths and self.slice_tokens is not None
        return has_lengths and not follows and self.core.num_moe_experts is None

    @property
    def cuts_sequences(self) -> bool:
        """Whether the settings allow a microbatch to be cut into several slices."""
        packs = self.slice_tokens is not None and self.data.variable_seq_lengths
        return self.num_slices > 1 or packs

    @property
    def slice_rule(self) -> SliceRule | None:
        """Rule for cutting microbatches of different lengths, or ``None`` for equal lengths."""
        if not (self.cuts_sequences and self.data.variable_seq_lengths):
            return None
        tokens = self.slice_tokens
        return SliceRule(
            slices=self.num_slices,
            tokens=tokens,
            multiple=self.token_ranks,
            pair_cost=self._pair_cost if self._cuts_by_cost else 0.0,
            is_packed=self.packs_documents,
            varies=self.varies_slices,
        )

    @property
    def least_row(self) -> int:
        """Minimum length in tokens of a document row that ``--sequence-slices`` can cut."""
        if self.slice_tokens is not None or self.num_slices == 1:
            return 1
        return least_row(self.num_slices, self.token_ranks)

    @property
    def packs_documents(self) -> bool:
        """Whether several documents share a row. Tokens attend only within their document."""
        data = self.data
        tokens = self.slice_tokens
        return data.pack_to is not None or (tokens is not None and data.variable_seq_lengths)

    @property
    def _cuts_by_cost(self) -> bool:
        return self.schedule.slice_cut == "equal-cost"

    @property
    def token_ranks(self) -> int:
        """Number of tensor-parallel ranks among which the tokens of a sequence are divided.

        The number is 1 without sequence parallelism.
        """
        parallel = self.parallel
        return parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1

    @property
    def attention_share(self) -> float:
        """Attention's fraction of the FLOPs of a layer's forward pass.

        Only FLOPs that grow with the square of the sequence length are counted. With
        ``--window-size``, the FLOPs of attention grow linearly, so the result is 0.
        """
        linear, per_token = self._layer_costs
        # Work of attention per token (scores and values), without the masked half.
        pairs = per_token * self.model.seq_length
        return pairs / (linear + pairs)

    def cost_of(self, tokens: float, squares: float) -> float:
        """Returns the predicted cost of documents, in units of a token's cost without attention.

        Args:
            tokens: Total number of tokens in the documents.
            squares: Sum of the squared document lengths, in tokens.
        """
        return tokens + self._pair_cost * squares

    @property
    def _pair_cost(self) -> float:
        linear, per_token = self._layer_costs
        return per_token / linear

    @property
    def _layer_costs(self) -> tuple[int, int]:
        """Multiply-adds of a layer per token (without attention) and of attention per token pair.

        The second number is the mean over all pairs. Half of them are masked and cost nothing.
        """
        model = self.model
        assert model.kv_channels is not None
        assert model.ffn_hidden_size is not None
        queries = model.num_attention_heads * model.kv_channels
        keys_and_values = 2 * model.query_groups * model.kv_channels
        matrices = 3 if model.is_gated else 2
        weights = model.hidden_size * (2 * queries + keys_and_values)
        weights += matrices * model.hidden_size * model.ffn_hidden_size
        return weights, 0 if self.core.window_size is not None else queries

    @property
    def balance(self) -> str:
        """Method of distributing microbatches over replicas: a value of ``--balance-replicas``."""
        rule = self.schedule.balance_replicas
        if rule is None:
            has_lengths = self.data.variable_seq_lengths and not self.fixes_replicas
            rule = "lengths" if has_lengths else "off"
        is_alone = self.parallel.data_parallel_size == 1
        return "off" if is_alone and not self.data.variable_seq_lengths else rule

    @property
    def fixes_replicas(self) -> bool:
        """Whether all data-parallel replicas must have the same number of microbatches."""
        return (
            self.parallel.unequal_sizes is not None
            or self.parallel.expert_model_parallel_size > 1
            or "global_aux_loss" in self.core.moe_router_load_balancing_type
            or self.parallel.ddp_average_in_collective
            or self.schedule.pipeline_schedule in ("file", "megatron")
        )

    def in_elastic_job(self) -> TrainerConfig:
        """Returns a copy with the defaults for jobs that ``train elastic`` starts."""
        if self.schedule.balance_replicas is not None or self.fixes_replicas:
            return self
        # The speed of replicas cannot be measured if steps have different numbers of slices.
        if self.slice_tokens is not None:
            return self
        schedule = dataclasses.replace(self.schedule, balance_replicas="both")
        return dataclasses.replace(self, schedule=schedule)

    @property
    def least_microbatches(self) -> int:
        """Minimum number of microbatches per step and replica that the schedule needs."""
        per_rank = schedule_spec(self.schedule.pipeline_schedule).microbatches_per_rank
        if per_rank:
            return per_rank * self.parallel.pipeline_model_parallel_size
        return self.microbatch_group

    @property
    def microbatch_group(self) -> int:
        """Required divisor of the number of microbatches per step and replica."""
        parallel = self.parallel
        spec = schedule_spec(self.schedule.pipeline_schedule)
        if spec.groups_microbatches and parallel.num_chunks > 1:
            group_size = parallel.microbatch_group_size_per_vp_stage
            return group_size or parallel.pipeline_model_parallel_size
        return 1

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Returns the settings of each group as values that JSON can represent.

        megatron-core settings with default values are omitted, so that a checkpoint can be loaded
        with a different version of megatron-core. Settings of adapters are omitted if no adapters
        are trained. A chosen number of slices is omitted, because the next run with
        ``--sequence-slices auto`` chooses it again. User, password and query are removed from URLs,
        because checkpoints and loggers must not reveal secrets.
        """
        saved = dataclasses.asdict(self)
        del saved["schedule"]["chosen_slices"], saved["schedule"]["chosen_tokens"]
        if not self.lora.is_on:
            del saved["lora"]
        defaults = vars(CoreConfig())
        core = {name: value for name, value in saved["core"].items() if value != defaults[name]}
        return {
            group: {name: _plain(value) for name, value in values.items()}
            for group, values in (saved | {"core": core}).items()
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> TrainerConfig:
        """Restores settings from the result of :meth:`to_dict`.

        The method does not check that the settings are compatible. Missing groups and settings get
        their defaults.

        Raises:
            ConfigError: A group or a setting is unknown, or a setting without a default is missing.
        """
        kinds = groups()
        try:
            for group, values in saved.items():
                fields = _FORMER.union(getattr(kinds.get(group), "__dataclass_fields__", ()))
                unknown = [f"{group} setting {name!r}" for name in values if name not in fields]
                if group not in kinds:
                    unknown = [f"group of settings {group!r}"]
                if unknown:
                    raise ConfigError(
                        f"saved settings contain the unknown {unknown[0]}, because another "
                        "version wrote them; use that version"
                    )
            return cls(
                **{
                    name: kind(**_settings(saved.get(name, {}), kind))
                    for name, kind in kinds.items()
                }
            )
        except (AttributeError, TypeError) as error:
            raise ConfigError(
                f"saved settings are incomplete ({error}); use the version that wrote them"
            ) from None


def groups() -> dict[str, type]:
    """Returns the dataclass of each settings group, keyed by name, in the order of the docs."""
    return typing.get_type_hints(TrainerConfig)


def flag_specs() -> dict[str, FieldSpec]:
    """Returns the specifications of all settings with a flag, keyed by setting name."""
    return {
        spec.dest: spec for kind in groups().values() for spec in fields_of(kind) if spec.has_flag
    }


def _plain(value: object) -> object:
    if isinstance(value, str) and "://" in value:
        return shown_url(value)
    return list(value) if isinstance(value, tuple) else value


def _settings(saved: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in saved.items()
        if name in kind.__dataclass_fields__ or name not in _FORMER
    }


# Checkpoints of earlier versions contain these settings, which no longer exist. They are ignored.
_FORMER = frozenset(
    """
    data_impl deprecated_use_mcore_models async_tensor_model_parallel_allreduce exit_signal_handler
    manual_gc_eval ckpt_fully_parallel_save_deprecated use_dist_ckpt_deprecated
    apply_residual_connection_post_layernorm masked_softmax_fusion moe_token_dropping
    muon_split_qkv soap_shampoo_beta soap_precondition_frequency soap_use_kl_shampoo
    adaptive_muon_moment2_method adaptive_muon_beta2 adaptive_muon_eps num_buckets
    use_layer_wise_distributed_optimizer expert_gtp_weight_remat_size
    fsdp_all_gather_in_start_param_sync cuda_graph_use_single_mempool
    """.split()
)
