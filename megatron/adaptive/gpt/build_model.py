"""Builds a rank's chunks of megatron-core's GPT model and their optimizer, and counts FLOPs.

A chunk is the model of one pipeline stage. A rank may have several chunks.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core import parallel_state
from megatron.core.activations import quick_gelu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import (
    get_gpt_heterogeneous_layer_spec,
)
from megatron.core.optimizer import (
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import layers as parallel_layers
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.heterogeneous.heterogeneous_config import (
    HeterogeneousTransformerConfig,
)
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    get_transformer_layer_offset,
)
from megatron.core.transformer.utils import openai_gelu

from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.config.layer_partition import unlike_layers
from megatron.adaptive.config.megatron_core_flags import UNKNOWN_DEFAULTS, parse_pattern
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.data import tokenizer as tokenizers
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.gpt import grouped_experts
from megatron.adaptive.gpt.attention import LocalAttention
from megatron.adaptive.gpt.core_releases import forget_balancing_losses, require_muon
from megatron.adaptive.gpt.forward import HalfPrecisionChunk
from megatron.adaptive.gpt.local_layers import (
    LAYER_SETTINGS,
    GroupRouter,
    VariedLayer,
    bound_output,
    completed,
    norm_of,
    scale_output,
)
from megatron.adaptive.gpt.lora import freeze
from megatron.adaptive.gpt.model_placement import (
    layout_of,
    start_equal,
    start_unequal,
    sum_gradients,
    widths_of,
)
from megatron.adaptive.gpt.optimizer_kernels import fuse_adam
from megatron.adaptive.planner.model_file import trainer_shape
from megatron.adaptive.planner.transformer_layers import build_model
from megatron.adaptive.schedule.stage_placement import Placement


class KeyedInit:
    """Initializes weights with random numbers that depend only on seed and position in the model.

    The initial weights are therefore the same no matter how the model is distributed over ranks.
    This class is used if megatron-core initializes whole matrices on the CPU and gives each rank
    its part. The random numbers of a weight in a layer depend on the layer's number and on the
    weight's index in the layer. Weights that belong to no layer have one common sequence of
    indices.

    Args:
        seed: Seed of the run.
        first_outside: Number of weights on earlier stages that belong to no layer.

    Attributes:
        count: Number of weights initialized so far in the current layer.
    """

    def __init__(self, seed: int, first_outside: int) -> None:
        self._seed = seed
        self._outside = first_outside
        self._layer: int | None = None
        self.count = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> KeyedInit:
        return self  # Copies of a configuration must share the count of initialized weights.

    def enter_layer(self, layer: int) -> None:
        """Begins a layer, to which all weights initialized from now on belong."""
        self._layer = layer
        self.count = 0

    def leave_layer(self) -> None:
        """Ends the current layer. Weights initialized from now on belong to no layer."""
        self._layer = None

    @contextlib.contextmanager
    def experts(self, config: TransformerConfig, groups: Any) -> Iterator[None]:
        """Returns a context in which the experts of this rank are initialized.

        The context skips the seeds of the experts on other ranks, so that no two experts have the
        same seeds.
        """
        each = 2  # An expert has two matrices, linear_fc1 and linear_fc2.
        before = self.count
        here = config.num_moe_experts // groups.ep.size()
        self.count += each * here * groups.ep.rank()
        yield
        self.count = before + each * config.num_moe_experts

    def normal(self, std: float) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns a function that fills a tensor with random numbers from ``N(0, std)``."""

        def fill(tensor: torch.Tensor) -> torch.Tensor:
            generator = torch.Generator(tensor.device).manual_seed(self._next_seed())
            return torch.nn.init.normal_(tensor, 0.0, std, generator=generator)

        return fill

    def _next_seed(self) -> int:
        if self._layer is None:
            key = f"outside {self._outside}"
            self._outside += 1
        else:
            key = f"layer {self._layer} {self.count}"
            self.count += 1
        digest = hashlib.sha256(f"{self._seed} {key}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1


class KeyedTransformerLayer(TransformerLayer):
    """Transformer layer that reports its layer number to :class:`KeyedInit` while it is built."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        layer_number: int = 1,
        vp_stage: int | None = None,
        **kwargs: Any,
    ) -> None:
        init: KeyedInit = config.keyed_init
        # Since megatron-core 0.17, multi-token prediction layers are numbered separately, from 1.
        is_prediction = kwargs.get("is_mtp_layer", False)
        before = (
            config.num_layers if is_prediction else get_transformer_layer_offset(config, vp_stage)
        )
        init.enter_layer(before + layer_number)
        super().__init__(config, submodules, layer_number=layer_number, vp_stage=vp_stage, **kwargs)
        init.leave_layer()


class KeyedVariedLayer(VariedLayer, KeyedTransformerLayer):
    """Transformer layer that combines :class:`VariedLayer` and :class:`KeyedTransformerLayer`."""


class UnlikeLayersConfig(HeterogeneousTransformerConfig):
    """Configures a model whose layers have different sizes.

    Each layer's configuration also contains ``keyed_init`` and the settings that this program adds
    to megatron-core's configuration.
    """

    def get_config_for_layer(self, layer_number: int) -> TransformerConfig:
        """Returns the configuration of the layer ``layer_number``, counted from 1."""
        layer = super().get_config_for_layer(layer_number)
        layer.keyed_init = getattr(self, "keyed_init", None)
        for name in LAYER_SETTINGS:
            setattr(layer, name, getattr(self, name))
        return layer


class KeyedExperts(SequentialMLP):
    """Initializes this rank's experts with the same weights that they would have on a single rank.

    The class also prevents the linear layers of the experts from communicating, because the token
    dispatcher already communicates. Without this change, megatron-core's layers would communicate
    if one rank has all experts, and could not add a bias.
    """

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, *args: Any, **kwargs: Any
    ) -> None:
        keyed = config.use_cpu_initialization
        groups = kwargs["pg_collection"]
        with config.keyed_init.experts(config, groups) if keyed else contextlib.nullcontext():
            super().__init__(num_local_experts, config, *args, **kwargs)
        for expert in self.local_experts:
            for layer in (expert.linear_fc1, expert.linear_fc2):
                layer.explicit_expert_comm = True


def transformer_config(config: TrainerConfig, accelerator: Accelerator) -> TransformerConfig:
    """Converts the settings ``config`` to megatron-core's configuration of the model."""
    model = config.model
    parallel = config.parallel
    precision = config.precision
    # A CPU has no fused kernels, and torch.compile would take more time there than it saves.
    has_engine = model.transformer_impl == "transformer_engine"
    fused = has_engine and accelerator.is_cuda
    dtype = getattr(torch, precision.dtype_name)
    kind = MLATransformerConfig if config.core.multi_latent_attention else TransformerConfig
    if config.core.heterogeneous_layers_config_encoded_json:
        kind = UnlikeLayersConfig
    settings = {
        **_by_name(kind, model, precision, config.recompute, parallel),
        **core_settings(config, kind),
        "num_query_groups": model.query_groups,
        "layernorm_epsilon": model.norm_epsilon,
        "layernorm_zero_centered_gamma": model.apply_layernorm_1p,
        "use_cpu_initialization": model.use_cpu_initialization or not accelerator.is_cuda,
        # Without Transformer Engine, use "auto": megatron-core sets environment variables from this
        # value, and rejects a different value later in the same process.
        "attention_backend": AttnBackend[model.attention_backend if has_engine else "auto"],
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline_model_parallel_size,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        # Disable fusions on a CPU, where megatron-core would spend half a minute in torch.compile.
        # Disable fused gradient accumulation if apex's kernels are not installed: without them,
        # some layers, such as the output layer of a model with Transformer Engine, reject it.
        "bias_dropout_fusion": model.bias_dropout_fusion and accelerator.is_cuda,
        "gradient_accumulation_fusion": model.gradient_accumulation_fusion
        and fused
        and parallel_layers._grad_accum_fusion_available,
        "apply_rope_fusion": model.apply_rope_fusion
        and fused
        and rope_utils.fused_apply_rotary_pos_emb is not None,
        # Disable this fusion, because local layers and Transformer Engine have their own attention
        # kernels.
        "masked_softmax_fusion": False,
        "persist_layer_norm": fused and not model.no_persist_layer_norm,
        "cross_entropy_loss_fusion": model.cross_entropy_loss_fusion and accelerator.is_cuda,
    }
    del settings["transformer_impl"]  # The layer specifications replace this setting.
    settings.update(_activation(config, accelerator), **_communication(config, accelerator))
    if config.data.variable_seq_lengths:
        settings.update(variable_seq_lengths=True, calculate_per_token_loss=True)
        # megatron-core requires this token dispatcher for sequences of different lengths, even if
        # the model has no experts.
        settings.setdefault("moe_token_dispatcher_type", "alltoall")
    if config.recompute.recompute_modules is not None:
        settings["recompute_modules"] = list(config.recompute.recompute_modules)
    if parallel.pipeline_model_parallel_size > 1:
        settings["pipeline_model_parallel_layout"] = layout_of(config)
    core = checked(kind, settings)
    vars(core).update({name: getattr(model, name) for name in LAYER_SETTINGS})
    return core


def core_settings(config: TrainerConfig, kind: type) -> dict[str, Any]:
    """Returns the settings in ``config`` for a megatron-core class, without default values.

    Args:
        config: Settings of the run, including settings for megatron-core.
        kind: Configuration class of megatron-core, which is a dataclass.
    """
    chosen = vars(config.core)
    settings = {}
    for field in dataclasses.fields(kind):
        value = chosen.get(field.name, field.default)
        if value == field.default or field.name not in chosen:
            continue
        if value is None and field.name in UNKNOWN_DEFAULTS:
            continue
        if field.type is torch.dtype:
            value = _DTYPES[value] if value else field.default
        elif isinstance(value, str) and "int" in str(field.type):
            value = parse_pattern(value)
        elif isinstance(value, tuple) and "Tuple" not in str(field.type):
            is_single = "Union" in str(field.type) and len(value) == 1
            value = value[0] if is_single else list(value)
        settings[field.name] = value
    return settings


def checked(kind: Any, settings: dict[str, Any]) -> Any:
    """Creates a configuration object of megatron-core from ``settings``.

    Args:
        kind: Configuration class of megatron-core.
        settings: Values of the fields of the class, keyed by name.

    Raises:
        ConfigError: If megatron-core rejects the settings.
    """
    with _in_one_line(kind.__name__):
        return kind(**settings)


@contextlib.contextmanager
def _in_one_line(name: str) -> Iterator[None]:
    """Turns errors of megatron-core about its settings into a one-line :class:`ConfigError`.

    Args:
        name: Name of the megatron-core class or function that is called in this context.
    """
    try:
        yield
    except (AssertionError, ImportError, NotImplementedError, ValueError) as error:
        reason = " ".join(str(error).split()) or "no reason given"
        raise ConfigError(
            f"megatron-core's {name} rejected the settings ({reason}); change or remove the flags "
            "that cause this"
        ) from error


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}


def _by_name(target: type, *sections: Any) -> dict[str, Any]:
    """Returns the settings in ``sections`` that have the same name as a field of ``target``."""
    names = {field.name for field in dataclasses.fields(target)}
    settings = (pair for section in sections for pair in vars(section).items())
    return {name: value for name, value in settings if name in names}


_ACTIVATIONS: Mapping[str, tuple[bool, Callable[[torch.Tensor], torch.Tensor]]] = {
    "swiglu": (True, F.silu),
    "quick_geglu": (True, quick_gelu),
    "geglu": (True, functools.partial(F.gelu, approximate="tanh")),
    "squared_relu": (False, lambda tensor: torch.square(F.relu(tensor))),
    "openai_gelu": (False, openai_gelu),
}
"""Maps an activation setting to a pair: whether the block is gated, and the activation function."""


def _activation(config: TrainerConfig, accelerator: Accelerator) -> dict[str, Any]:
    model = config.model
    name = next((name for name in _ACTIVATIONS if getattr(model, name)), None)
    if name is None:
        return {"bias_activation_fusion": model.bias_gelu_fusion and accelerator.is_cuda}
    is_gated, function = _ACTIVATIONS[name]
    is_fused = name == "swiglu" and model.bias_swiglu_fusion and accelerator.is_cuda
    return {
        "gated_linear_unit": is_gated,
        "activation_func": function,
        "bias_activation_fusion": is_fused,
    }


def _communication(config: TrainerConfig, accelerator: Accelerator) -> dict[str, Any]:
    """Returns the communication settings, which only megatron-core's own schedule uses.

    With several chunks per rank, megatron-core's schedule must not batch messages, because gloo
    mixes up two messages between the same ranks in a batch. Freeing an output as soon as its send
    has started is safe with NCCL, because the stream keeps the memory in use. It is not safe with
    gloo, which still reads the memory while a new tensor could overwrite it.
    """
    parallel = config.parallel
    is_megatron = config.schedule.pipeline_schedule == "megatron"
    frees = not is_megatron or accelerator.backend == "nccl"
    settings = {"deallocate_pipeline_outputs": frees}
    if parallel.num_chunks == 1:
        return {"overlap_p2p_comm": False, **settings}
    return {"batch_p2p_comm": not parallel.overlap_p2p_comm, **settings}


def build_chunks(
    config: TrainerConfig,
    core: TransformerConfig,
    accelerator: Accelerator,
    placement: Placement,
    padded_vocab_size: int,
) -> list[torch.nn.Module]:
    """Builds the chunks of the model on this rank, each in a data-parallel wrapper.

    ``config`` contains the settings of the run, ``core`` is megatron-core's configuration,
    ``placement`` assigns the stages to ranks, and ``padded_vocab_size`` is the number of rows of
    the embedding.

    Returns:
        The wrapped chunks of this rank, sorted by chunk index.
    """
    # Remove the losses of an earlier model, which may have had fewer layers.
    forget_balancing_losses()
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    chunks = []
    for chunk in range(placement.num_chunks):
        stage = placement.stage_of(pp_rank, chunk)
        with _in_one_line(GPTModel.__name__):
            model = _build_chunk(
                config,
                core,
                padded_vocab_size,
                vp_stage=chunk if placement.num_chunks > 1 else None,
                first=stage == 0,
                last=stage == placement.num_stages - 1,
            )
        chunks.append(freeze(model, config).to(accelerator.device))
    start_equal(chunks)
    if (widths := widths_of(config)) is not None:
        start_unequal(chunks, widths)
    if core.fp16 or core.bf16:
        chunks = [HalfPrecisionChunk(core, model) for model in chunks]
    return wrap(config, core, chunks)


def wrap(
    config: TrainerConfig, core: TransformerConfig, chunks: Sequence[torch.nn.Module]
) -> list[torch.nn.Module]:
    """Wraps each of the model's ``chunks`` for megatron-core's data parallelism."""
    parallel = config.parallel
    precision = config.precision
    settings = checked(
        DistributedDataParallelConfig,
        {
            **core_settings(config, DistributedDataParallelConfig),
            "overlap_grad_reduce": parallel.overlap_grad_reduce,
            "overlap_param_gather": parallel.overlap_param_gather,
            # Align buckets only if there are several chunks. A single chunk gathers each bucket
            # while the previous one is in use.
            "align_param_gather": parallel.align_param_gather and len(chunks) > 1,
            "use_distributed_optimizer": parallel.use_distributed_optimizer,
            "grad_reduce_in_fp32": precision.accumulate_allreduce_grads_in_fp32,
            "check_for_nan_in_grad": precision.check_for_nan_in_loss_and_grad,
            "bucket_size": parallel.ddp_bucket_size,
            "average_in_collective": parallel.ddp_average_in_collective,
        },
    )
    with _in_one_line(DistributedDataParallel.__name__):
        wrapped = [
            DistributedDataParallel(core, settings, model, disable_bucketing=chunk > 0)
            for chunk, model in enumerate(chunks)
        ]
    if config.parallel.unequal_sizes is not None or config.balance != "off":
        sum_gradients(wrapped)
    return wrapped


def _build_chunk(
    config: TrainerConfig,
    core: TransformerConfig,
    padded_vocab_size: int,
    *,
    vp_stage: int | None,
    first: bool,
    last: bool,
) -> torch.nn.Module:
    model = config.model
    predictions = _predictions(config, core, vp_stage)
    if core.use_cpu_initialization:
        learned = model.position_embedding_type == "learned_absolute"
        # Count the weights on earlier stages that belong to no layer: the word embedding, the
        # position embedding and the projections of multi-token prediction.
        before = 0 if first or predictions else 1 + learned + (core.mtp_num_layers or 0)
        init = KeyedInit(config.run.seed, first_outside=before)
        core.keyed_init = init
        core.init_method = init.normal(model.init_method_std)
        core.embedding_init_method = init.normal(
            config.core.embedding_init_method_std or model.init_method_std
        )
        core.output_layer_init_method = init.normal(
            model.init_method_std / math.sqrt(2.0 * model.num_layers)
        )
    built = GPTModel(
        config=core,
        transformer_layer_spec=_block_spec(config, core, vp_stage),
        vocab_size=padded_vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=first,
        post_process=last,
        fp16_lm_cross_entropy=config.precision.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        rope_scaling=model.use_rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
        seq_len_interpolation_factor=model.rotary_seq_len_interpolation_factor,
        mtp_block_spec=predictions,
        vp_stage=vp_stage,
    )
    if predictions and last and not first and not model.untie_embeddings_and_output_weights:
        # The multi-token prediction layers on this stage have a copy of the embedding. The output
        # layer uses the same copy as its matrix, so it needs no weight of its own.
        built.output_layer.weight = None
    if model.scale_embeddings and (first or predictions):
        scale_output(built.embedding.word_embeddings, model.hidden_size**0.5, core.params_dtype)
    if model.logit_softcap is not None and last:
        bound_output(built.output_layer, model.logit_softcap)
    part: torch.nn.Module = built
    return part


def _predictions(config: TrainerConfig, core: TransformerConfig, vp_stage: int | None) -> Any:
    """Returns the specification of the chunk's multi-token prediction layers.

    ``vp_stage`` is the index of the chunk, or ``None`` if there is only one chunk. The result is
    ``None`` if the chunk has no such layers.
    """
    if core.mtp_num_layers is None:
        return None
    last = TransformerBlockSubmodules(layer_specs=_layer_specs(config, core)[-1:])
    has_engine = config.model.transformer_impl == "transformer_engine"
    block = get_gpt_mtp_block_spec(core, last, has_engine, vp_stage=vp_stage)
    if block is not None and not has_engine:
        block.layer_specs = [completed(spec) for spec in block.layer_specs]
    return block


def _block_spec(
    config: TrainerConfig, core: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Returns the specifications of the transformer layers in the chunk with index ``vp_stage``."""
    first = get_transformer_layer_offset(core, vp_stage)
    count = get_num_layers_to_build(core, vp_stage)
    specs = _layer_specs(config, core)[first : first + count]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm_of(core))


def _layer_specs(config: TrainerConfig, core: TransformerConfig) -> list[ModuleSpec]:
    """Returns megatron-core's specifications of all transformer layers of the model."""
    model = config.model
    has_engine = model.transformer_impl == "transformer_engine"
    if isinstance(core, HeterogeneousTransformerConfig):
        whole = copy.copy(core)  # This copy describes the model as a single stage.
        whole.pipeline_model_parallel_size = 1
        whole.pipeline_model_parallel_layout = None
        specs = get_gpt_heterogeneous_layer_spec(whole, has_engine).layer_specs
    else:
        specs = get_gpt_decoder_layer_specs(core, has_engine, model.normalization, core.qk_l2_norm)
    if model.transformer_impl == "local":
        if core.moe_grouped_gemm:
            grouped_experts.check()
        specs = [completed(spec) for spec in specs]
    keyed = core.use_cpu_initialization
    kinds: dict[type, type] = dict(_KEYED if keyed else _EXPERTS)
    if model.parallel_residual or model.norm_block_outputs or model.window_rotary_base is not None:
        kinds[TransformerLayer] = KeyedVariedLayer if keyed else VariedLayer
    if model.moe_router_group_best is not None:
        kinds[TopKRouter] = GroupRouter
    if has_engine and model.attention_softcap is not None:
        # Transformer Engine does not support a soft cap.
        kinds[TEDotProductAttention] = LocalAttention
    return [completed(spec, kinds) for spec in specs]


_EXPERTS = {SequentialMLP: KeyedExperts}
_KEYED = {TransformerLayer: KeyedTransformerLayer, **grouped_experts.REPLACEMENTS, **_EXPERTS}


def build_optimizer(config: TrainerConfig, chunks: Sequence[torch.nn.Module]) -> Any:
    """Builds megatron-core's optimizer for the parameters of ``chunks``.

    Raises:
        SetupError: If the installed packages do not support ``--optimizer muon``.
    """
    settings = config.optimizer
    if settings.optimizer == "muon":
        require_muon()
    precision = config.precision
    core = checked(
        OptimizerConfig,
        {
            **_by_name(OptimizerConfig, settings, precision, config.parallel, config.logging),
            **core_settings(config, OptimizerConfig),
            "params_dtype": getattr(torch, precision.dtype_name),
        },
    )
    # The overrides exempt biases and normalization weights from weight decay, and set a separate
    # learning rate for the embedding.
    with _in_one_line(get_megatron_optimizer.__name__):
        overrides = get_standard_config_overrides(core)
        optimizer = get_megatron_optimizer(core, list(chunks), overrides)
    for leaf in getattr(optimizer, "chained_optimizers", [optimizer]):
        fuse_adam(leaf.optimizer)
    return optimizer


def build_scheduler(config: TrainerConfig, optimizer: Any, train_samples: int) -> Any:
    """Builds megatron-core's scheduler for the learning rate and weight decay of ``optimizer``.

    ``train_samples`` is the number of samples of the run.

    The scheduler measures the warm-up and all other periods in samples.
    """
    settings = config.optimizer
    batch = config.batch.global_batch_size

    def samples(iterations: int | None, count: int | None, default: int) -> int:
        if count is not None:
            return count
        return default if iterations is None else iterations * batch

    decay = samples(settings.lr_decay_iters, settings.lr_decay_samples, train_samples)
    if settings.lr_warmup_fraction is not None:
        warmup = int(settings.lr_warmup_fraction * decay)
    else:
        warmup = settings.lr_warmup_samples or settings.lr_warmup_iters * batch
    start_decay = settings.start_weight_decay
    end_decay = settings.end_weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=settings.lr_warmup_init,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=settings.lr_decay_style,
        start_wd=settings.weight_decay if start_decay is None else start_decay,
        end_wd=settings.weight_decay if end_decay is None else end_decay,
        wd_incr_steps=train_samples,
        wd_incr_style=settings.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=settings.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=settings.override_opt_param_scheduler,
        wsd_decay_steps=samples(settings.lr_wsd_decay_iters, settings.lr_wsd_decay_samples, 0),
        lr_wsd_decay_style=settings.lr_wsd_decay_style,
    )


_PASSES = 3  # The forward pass, the input gradients and the weight gradients cost the same.


def flops_per_token(cfg: TrainerConfig, *, padded_vocab_size: int | None = None) -> float:
    """Returns the model FLOPs per token for the forward and backward pass of the whole model.

    The result is 3 times the planner's FLOPs for a forward pass (``planner.model_description``),
    because the input gradients and the weight gradients each cost as much as the forward pass. With
    adapters (LoRA), the factor is 2, because frozen weights have no gradients.

    Only matmuls are counted: of the experts, only those that process the token, and of the
    attention scores, only those that are not masked. Recomputation, the optimizer, embedding
    lookups and the adapters themselves are not counted.

    Source: Narayanan et al. 2021 (arXiv:2104.04473), section 5.1 and appendix. "Model FLOPs" are
    defined in Korthikanti et al. 2022 (arXiv:2205.05198), section 6.3. Both papers count all
    attention scores. This function counts only the causal half, like Megatron-LM's
    ``num_floating_point_operations``.

    Args:
        cfg: Settings of the run.
        padded_vocab_size: Number of rows of the embedding, or ``None`` to load the tokenizer and
            derive the number from it.

    Raises:
        DataError: If the tokenizer's files cannot be read.
    """
    if padded_vocab_size is None:
        _, padded_vocab_size = load_tokenizer(cfg)
    flops = _forward_flops(cfg, padded_vocab_size)
    whole = sum(flops.layers) + flops.predictions + flops.logits
    return (_PASSES - cfg.lora.is_on) * whole / cfg.model.seq_length


def stage_work(cfg: TrainerConfig, padded_vocab_size: int) -> tuple[float, ...]:
    """Returns the compute cost of each stage, relative to the cost of a layer without experts.

    ``cfg`` contains the settings of the run. The logits of a token have ``padded_vocab_size``
    elements.

    The cost includes the stage's transformer layers, its multi-token prediction layers and, on the
    last stage, the logits. The memory traffic of the embedding and the loss is not included.
    """
    flops = _forward_flops(cfg, padded_vocab_size)
    each = iter(flops.layers)
    work = [sum(itertools.islice(each, count), 0.0) for count in cfg.layers_per_stage]
    work[-1] += flops.logits
    if cfg.mtp_stage is not None:
        work[cfg.mtp_stage] += flops.predictions
    return tuple(operations / flops.plain for operations in work)


class _ForwardFlops(NamedTuple):
    """Contains the numbers of floating-point operations in the forward pass of one sample.

    Attributes:
        layers: Number of operations in each layer.
        plain: Number of operations in one layer without experts and with full attention.
        predictions: Number of operations in all multi-token prediction layers.
        logits: Number of operations for all logits.
    """

    layers: list[float]
    plain: float
    predictions: float
    logits: float


def _forward_flops(cfg: TrainerConfig, padded_vocab_size: int) -> _ForwardFlops:
    """Counts the floating-point operations in the forward pass of one sample.

    ``cfg`` contains the settings of the run. The logits of a token have ``padded_vocab_size``
    elements.
    """
    shape = dataclasses.replace(
        trainer_shape(cfg),
        vocabulary=padded_vocab_size,
        fused_attention=True,
        capacity=0.0,
        padded=False,
    )
    whole = build_model(shape)
    plain = build_model(
        dataclasses.replace(shape, experts=0, expert_layers=(), window=0, window_layers=())
    ).layer(1)
    layers = [whole.layer(1 + number).forward_flops for number in range(shape.layers)]
    unlike = unlike_layers(cfg)
    each = 2 * shape.sequence  # Each weight needs a multiplication and an addition per token.
    if unlike is not None:
        inner = (3 if shape.gated else 2) * shape.hidden * each
        layers = [layer.linear * shape.hidden**2 * each + inner * layer.width for layer in unlike]
        for number, layer in enumerate(unlike):
            if layer.groups:
                grouped = dataclasses.replace(shape, query_groups=layer.groups)
                layers[number] += build_model(grouped).layer(1).forward_flops - inner * shape.ffn
    logits = (1.0 + shape.predictions) * shape.hidden * padded_vocab_size * each
    predictions = whole.kinds["head"].forward_flops - logits
    return _ForwardFlops(layers, plain.forward_flops, predictions, logits)


def load_tokenizer(config: TrainerConfig) -> tuple[tokenizers.Tokenizer, int]:
    """Returns the tokenizer of ``config``, and the number of embedding rows including padding.

    Raises:
        DataError: If the tokenizer's files cannot be read.
    """
    tokenizer = tokenizers.build_tokenizer(config.data)
    size = tokenizer.vocab_size
    rows = config.data.vocab_size or 0
    is_real = not isinstance(tokenizer, tokenizers.NullTokenizer)
    if config.checkpoint.load_hf and is_real and size > rows:
        raise ConfigError(
            f"the tokenizer has {size} token IDs, but the embedding of the --load-hf model has "
            f"only {rows} rows (--vocab-size); use the tokenizer of this model"
        )
    multiple = config.model.make_vocab_size_divisible_by
    ranks = config.parallel.tensor_model_parallel_size
    return tokenizer, tokenizers.padded_vocab_size(max(size, rows), multiple, ranks)
