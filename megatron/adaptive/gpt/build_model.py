"""Builds a rank's chunks of megatron-core's GPT and their optimizer; counts their operations."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

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
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_cpu
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.heterogeneous.heterogeneous_config import (
    HeterogeneousTransformerConfig,
)
from megatron.core.transformer.moe import grouped_gemm_util
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
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
from megatron.adaptive.config.megatron_core_flags import parse_pattern
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.data import tokenizer as tokenizers
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.gpt.attention import LocalAttention
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
from megatron.adaptive.planner.model_file import trainer_shape
from megatron.adaptive.planner.transformer_layers import build_model
from megatron.adaptive.schedule.stage_placement import Placement


class KeyedInit:
    """Draws initial weights from the seed and the weight's place in the model, and nothing else.

    A model then starts from the same weights however it is cut over ranks. Used where
    megatron-core builds whole matrices on the CPU and hands each rank its part; weights are known
    apart by their layer (or "outside" of all layers) and by their order in it.

    Args:
        seed: the run's seed.
        first_outside: number of weights outside of layers that come before those of this chunk.

    Attributes:
        count: weights of the layer drawn so far.
    """

    def __init__(self, seed: int, first_outside: int) -> None:
        self._seed = seed
        self._outside = first_outside
        self._layer: int | None = None
        self.count = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> KeyedInit:
        return self  # copies of a configuration must go on counting together

    def enter_layer(self, layer: int) -> None:
        """Weights drawn from here on belong to transformer layer ``layer``."""
        self._layer = layer
        self.count = 0

    def leave_layer(self) -> None:
        """Weights drawn from here on belong to no layer."""
        self._layer = None

    @contextlib.contextmanager
    def experts(self, config: TransformerConfig, groups: Any) -> Iterator[None]:
        """Counts the weights of a rank's experts, drawn within, as part of all experts'."""
        each = 2  # one into the expert, one out of it
        before = self.count
        here = config.num_moe_experts // groups.ep.size()
        self.count += each * here * groups.ep.rank()
        yield
        self.count = before + each * config.num_moe_experts

    def normal(self, std: float) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that fills a tensor with draws of ``N(0, std)``."""

        def fill(tensor: torch.Tensor) -> torch.Tensor:
            generator = torch.Generator(tensor.device).manual_seed(self._next_seed())
            return torch.nn.init.normal_(tensor, 0.0, std, generator=generator)

        return fill

    def _next_seed(self) -> int:
        if self._layer is None:
            place = f"outside {self._outside}"
            self._outside += 1
        else:
            place = f"layer {self._layer} {self.count}"
            self.count += 1
        digest = hashlib.sha256(f"{self._seed} {place}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1


class KeyedTransformerLayer(TransformerLayer):  # type: ignore[misc]
    """Names itself to :class:`KeyedInit` while it is built."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        layer_number: int = 1,
        vp_stage: int | None = None,
        **kwargs: Any,
    ) -> None:
        init: KeyedInit = config.keyed_init
        init.enter_layer(layer_number + get_transformer_layer_offset(config, vp_stage))
        super().__init__(config, submodules, layer_number=layer_number, vp_stage=vp_stage, **kwargs)
        init.leave_layer()


class KeyedVariedLayer(VariedLayer, KeyedTransformerLayer):
    """Does both."""


class UnlikeLayersConfig(HeterogeneousTransformerConfig):  # type: ignore[misc]
    """Gives each layer's own configuration what draws its first weights."""

    def get_config_for_layer(self, layer_number: int) -> TransformerConfig:
        """Returns the configuration of a layer, the first being 1."""
        layer = super().get_config_for_layer(layer_number)
        layer.keyed_init = getattr(self, "keyed_init", None)
        for name in LAYER_SETTINGS:
            setattr(layer, name, getattr(self, name))
        return layer


class KeyedExperts(SequentialMLP):  # type: ignore[misc]
    """Draws the weights of this rank's experts as a rank with all of them would.

    Linear layers of experts never communicate: the dispatcher does. megatron-core's own do where
    one rank has all experts, and then cannot add a bias.
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


class KeyedGroupedExperts(GroupedMLP):  # type: ignore[misc]
    """Draws the weights that the same experts one by one would have.

    megatron-core draws those of all local experts as one matrix, whose parts depend on the numbers
    of expert- and tensor-parallel ranks.
    """

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, *args: Any, **kwargs: Any
    ) -> None:
        init: KeyedInit = config.keyed_init
        before = init.count
        super().__init__(num_local_experts, config, *args, **kwargs)
        init.count = before
        stride = 2 if config.gated_linear_unit else 1
        hidden, width = config.hidden_size, config.moe_ffn_hidden_size
        first = self.weight1.data.view(num_local_experts, hidden, -1)
        second = self.weight2.data.view(num_local_experts, -1, hidden)
        with init.experts(config, kwargs["pg_collection"]):
            for matrices in zip(first, second, strict=True):
                for matrix, shape, dim, step, draw in (
                    (matrices[0], (stride * width, hidden), 0, stride, config.init_method),
                    (matrices[1], (hidden, width), 1, 1, config.output_layer_init_method),
                ):
                    part = torch.empty_like(matrix.t())
                    _initialize_affine_weight_cpu(
                        part,
                        *shape,
                        part.shape[dim],
                        dim,
                        draw,
                        step,
                        params_dtype=config.params_dtype,
                        rank=self.tp_group.rank(),
                        world_size=self.tp_group.size(),
                    )
                    matrix.copy_(part.t())


def transformer_config(config: TrainerConfig, accelerator: Accelerator) -> TransformerConfig:
    """Translate the run's settings into megatron-core's configuration."""
    model, parallel, precision = config.model, config.parallel, config.precision
    # On a CPU there are no fused kernels, and torch.compile takes longer than it saves.
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
        # From this value megatron-core sets environment variables of Transformer Engine. It refuses
        # a second value in the same process.
        "attention_backend": AttnBackend[model.attention_backend if has_engine else "auto"],
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline_model_parallel_size,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        # megatron-core's jit fusions use torch.compile, which costs half a minute on a CPU. Fused
        # gradient accumulation needs kernels of apex. Without them layers of megatron-core refuse
        # the setting, such as the output layer of a model with Transformer Engine.
        "bias_dropout_fusion": model.bias_dropout_fusion and accelerator.is_cuda,
        "gradient_accumulation_fusion": model.gradient_accumulation_fusion
        and fused
        and parallel_layers._grad_accum_fusion_available,
        "apply_rope_fusion": model.apply_rope_fusion
        and fused
        and rope_utils.fused_apply_rotary_pos_emb is not None,
        # Local layers and Transformer Engine have their own attention kernels.
        "masked_softmax_fusion": False,
        "persist_layer_norm": fused and not model.no_persist_layer_norm,
        "cross_entropy_loss_fusion": model.cross_entropy_loss_fusion and accelerator.is_cuda,
    }
    del settings["transformer_impl"]  # of other models than ours; here the layers' specs say it
    settings.update(_activation(config, accelerator), **_communication(config))
    if config.data.variable_seq_lengths:
        settings.update(variable_seq_lengths=True, calculate_per_token_loss=True)
        # The one for rows of different lengths; megatron-core asks for it without experts too.
        settings.setdefault("moe_token_dispatcher_type", "alltoall")
    if config.recompute.recompute_modules is not None:
        settings["recompute_modules"] = list(config.recompute.recompute_modules)
    if parallel.pipeline_model_parallel_size > 1:
        settings["pipeline_model_parallel_layout"] = layout_of(config)
    core = checked(kind, settings)
    vars(core).update({name: getattr(model, name) for name in LAYER_SETTINGS})
    return core


def core_settings(config: TrainerConfig, kind: type) -> dict[str, Any]:
    """Returns the settings of megatron-core that differ from the defaults of its class ``kind``."""
    given = vars(config.core)
    settings = {}
    for field in dataclasses.fields(kind):
        value = given.get(field.name, field.default)
        if value == field.default or field.name not in given:
            continue
        if field.type is torch.dtype:
            value = _DTYPES[value] if value else field.default
        elif isinstance(value, str) and "int" in str(field.type):
            value = parse_pattern(value)
        elif isinstance(value, tuple) and "Tuple" not in str(field.type):
            one = "Union" in str(field.type) and len(value) == 1
            value = value[0] if one else list(value)
        settings[field.name] = value
    return settings


def checked(kind: Any, settings: dict[str, Any]) -> Any:
    """Returns megatron-core's configuration with ``settings``.

    Raises:
        ConfigError: they break one of its own rules.
    """
    try:
        return kind(**settings)
    except (AssertionError, ValueError, NotImplementedError) as error:
        why = " ".join(str(error).split()) or "a rule without a text"
        raise ConfigError(
            f"megatron-core's {kind.__name__} refuses the settings ({why}): change or drop the "
            "flags that it names"
        ) from error


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}


def _by_name(target: type, *sections: Any) -> dict[str, Any]:
    """Return what sections of the settings have for the fields of ``target``, by their names."""
    names = {field.name for field in dataclasses.fields(target)}
    given = (pair for section in sections for pair in vars(section).items())
    return {name: value for name, value in given if name in names}


_ACTIVATIONS: Mapping[str, tuple[bool, Callable[[torch.Tensor], torch.Tensor]]] = {
    "swiglu": (True, F.silu),
    "quick_geglu": (True, quick_gelu),
    "geglu": (True, functools.partial(F.gelu, approximate="tanh")),
    "squared_relu": (False, lambda tensor: torch.square(F.relu(tensor))),
    "openai_gelu": (False, openai_gelu),
}
"""Whether the feed-forward block has a gate, and its function, by the name of the setting."""


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


def _communication(config: TrainerConfig) -> dict[str, Any]:
    """Return how megatron-core's own schedule exchanges tensors; ours does not read these.

    With several chunks it must not batch: on gloo two messages of one pair in a batch are mixed
    up. And it must keep outputs until they are sent, which freeing them early does not.
    """
    parallel = config.parallel
    own = config.schedule.pipeline_schedule == "megatron"
    if parallel.num_chunks == 1:
        return {"overlap_p2p_comm": False, "deallocate_pipeline_outputs": not own}
    return {"batch_p2p_comm": not parallel.overlap_p2p_comm, "deallocate_pipeline_outputs": not own}


def build_chunks(
    config: TrainerConfig,
    core: TransformerConfig,
    accelerator: Accelerator,
    placement: Placement,
    padded_vocab_size: int,
) -> list[torch.nn.Module]:
    """Build this rank's chunks with megatron-core's data-parallel wrapper around each.

    Returns:
        The chunks in order.
    """
    # Of the process, with a row for each layer of the first model that has experts.
    get_moe_layer_wise_logging_tracker().clear()
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    chunks = []
    for chunk in range(placement.num_chunks):
        stage = placement.stage_of(pp_rank, chunk)
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
    """Put megatron-core's data-parallel wrapper around each of this rank's chunks."""
    parallel, precision = config.parallel, config.precision
    settings = checked(
        DistributedDataParallelConfig,
        {
            **core_settings(config, DistributedDataParallelConfig),
            "overlap_grad_reduce": parallel.overlap_grad_reduce,
            "overlap_param_gather": parallel.overlap_param_gather,
            "use_distributed_optimizer": parallel.use_distributed_optimizer,
            "grad_reduce_in_fp32": precision.accumulate_allreduce_grads_in_fp32,
            "check_for_nan_in_grad": precision.check_for_nan_in_loss_and_grad,
            "bucket_size": parallel.ddp_bucket_size,
            "average_in_collective": parallel.ddp_average_in_collective,
        },
    )
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
        # The embedding, the projections of multi-token prediction, the output matrix.
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
        built.output_layer.weight = None  # logits come from the embedding's copy for predictions
    if model.scale_embeddings and (first or predictions):
        scale_output(built.embedding.word_embeddings, model.hidden_size**0.5, core.params_dtype)
    if model.logit_softcap is not None and last:
        bound_output(built.output_layer, model.logit_softcap)
    return built


def _predictions(config: TrainerConfig, core: TransformerConfig, vp_stage: int | None) -> Any:
    """Return what the layers of multi-token prediction are built of, ``None`` on other stages."""
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
    """Return what the layers of a chunk are built of."""
    first = get_transformer_layer_offset(core, vp_stage)
    count = get_num_layers_to_build(core, vp_stage)
    specs = _layer_specs(config, core)[first : first + count]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm_of(core))


def _layer_specs(config: TrainerConfig, core: TransformerConfig) -> list[ModuleSpec]:
    """Return what each transformer layer of the model is built of."""
    model = config.model
    has_engine = model.transformer_impl == "transformer_engine"
    if isinstance(core, HeterogeneousTransformerConfig):
        whole = copy.copy(core)  # as one stage
        whole.pipeline_model_parallel_size = 1
        whole.pipeline_model_parallel_layout = None
        specs = get_gpt_heterogeneous_layer_spec(whole, has_engine).layer_specs
    else:
        specs = get_gpt_decoder_layer_specs(core, has_engine, model.normalization, core.qk_l2_norm)
    if model.transformer_impl == "local":
        if core.moe_grouped_gemm and not grouped_gemm_util.grouped_gemm_is_available():
            raise ConfigError(
                "--moe-grouped-gemm with --transformer-impl local needs the package grouped_gemm,"
                " which is not installed: install it, or drop the flag"
            )
        specs = [completed(spec) for spec in specs]
    keyed = core.use_cpu_initialization
    kinds: dict[type, type] = dict(_KEYED if keyed else _EXPERTS)
    if model.parallel_residual or model.norm_block_outputs or model.window_rotary_base is not None:
        kinds[TransformerLayer] = KeyedVariedLayer if keyed else VariedLayer
    if model.moe_router_group_best is not None:
        kinds[TopKRouter] = GroupRouter
    if has_engine and model.attention_softcap is not None:
        kinds[TEDotProductAttention] = LocalAttention  # Transformer Engine cannot bound scores
    return [completed(spec, kinds) for spec in specs]


_EXPERTS = {SequentialMLP: KeyedExperts}
_KEYED = {TransformerLayer: KeyedTransformerLayer, GroupedMLP: KeyedGroupedExperts, **_EXPERTS}


def build_optimizer(config: TrainerConfig, chunks: Sequence[torch.nn.Module]) -> Any:
    """Return megatron-core's optimizer over the parameters of ``chunks``."""
    settings, precision = config.optimizer, config.precision
    core = checked(
        OptimizerConfig,
        {
            **_by_name(OptimizerConfig, settings, precision, config.parallel, config.logging),
            **core_settings(config, OptimizerConfig),
            "params_dtype": getattr(torch, precision.dtype_name),
        },
    )
    # No weight decay on biases and norms, and a learning rate of its own for the embedding.
    optimizer = get_megatron_optimizer(core, list(chunks), get_standard_config_overrides(core))
    for leaf in getattr(optimizer, "chained_optimizers", [optimizer]):
        fuse_adam(leaf.optimizer)
    return optimizer


def fuse_adam(inner: Any) -> None:
    """Lets torch's own Adam update a GPU's parameters in one kernel.

    megatron-core uses torch's Adam if neither Transformer Engine nor apex is installed, but does
    not ask for the fused kernel.

    Args:
        inner: Torch optimizer inside one of megatron-core's, before its first step.
    """
    if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
        return
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    if all(one.is_cuda and one.is_floating_point() for one in parameters):
        for group in (inner.defaults, *inner.param_groups):
            group.update(fused=True, foreach=False)


def build_scheduler(config: TrainerConfig, optimizer: Any, train_samples: int) -> Any:
    """Return megatron-core's schedule of learning rate and weight decay, counted in samples."""
    settings = config.optimizer
    batch = config.batch.global_batch_size

    def samples(iterations: int | None, given: int | None, default: int) -> int:
        if given is not None:
            return given
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


_PASSES = 3  # forward, backward by inputs, backward by weights: each as much as the forward


def flops_per_token(cfg: TrainerConfig, *, padded_vocab_size: int | None = None) -> float:
    """Return the model FLOPs of one token's forward and backward through the whole model.

    Those of the planner's formulas (``planner.model_description``), times 3 for forward, backward
    by inputs and by weights. Matrix products only, with as many experts as a token goes to; of the
    attention scores only those that are not masked. What is computed again for lack of memory is
    not counted, nor are the optimizer, the lookup of embeddings and adapters; beside these, weights
    have no gradients.

    Source: Narayanan et al. 2021 (arXiv:2104.04473), section 5.1 and appendix; "model FLOPs" as
    in Korthikanti et al. 2022 (arXiv:2205.05198), section 6.3. Both count all of the attention
    scores; Megatron-LM's ``num_floating_point_operations`` counts the causal half, and so do we.

    Args:
        cfg: the run's settings.
        padded_vocab_size: rows of the embedding; by default the tokenizer is loaded to ask it.

    Raises:
        DataError: the tokenizer's files cannot be read.
    """
    if padded_vocab_size is None:
        _, padded_vocab_size = load_tokenizer(cfg)
    layers, _, predictions, logits = _forward_flops(cfg, padded_vocab_size)
    whole = sum(layers) + predictions + logits
    return (_PASSES - cfg.lora.is_on) * whole / cfg.model.seq_length


def stage_work(cfg: TrainerConfig, padded_vocab_size: int) -> tuple[float, ...]:
    """Return how much each stage should have to do, in plain layers.

    By operations alone: a stage's layers, and the logits on the last. What the embedding and the
    loss move through memory comes on top.
    """
    layers, plain, predictions, logits = _forward_flops(cfg, padded_vocab_size)
    each = iter(layers)
    work = [sum(itertools.islice(each, count), 0.0) for count in cfg.layers_per_stage]
    work[-1] += logits
    if cfg.mtp_stage is not None:
        work[cfg.mtp_stage] += predictions
    return tuple(one / plain for one in work)


def _forward_flops(
    cfg: TrainerConfig, padded_vocab_size: int
) -> tuple[list[float], float, float, float]:
    """Returns the operations of a sample's forward.

    Returns:
        Those of each layer, of a layer without experts, of all layers of multi-token prediction,
        and of all logits.
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
    unlike, each = unlike_layers(cfg), 2 * shape.sequence  # of a weight that all tokens meet
    if unlike is not None:
        inner = (3 if shape.gated else 2) * shape.hidden * each
        layers = [one.linear * shape.hidden**2 * each + inner * one.width for one in unlike]
        for number, one in enumerate(unlike):
            if one.groups:
                own = build_model(dataclasses.replace(shape, query_groups=one.groups)).layer(1)
                layers[number] += own.forward_flops - inner * shape.ffn
    logits = (1.0 + shape.predictions) * shape.hidden * padded_vocab_size * each
    return layers, plain.forward_flops, whole.kinds["head"].forward_flops - logits, logits


def load_tokenizer(config: TrainerConfig) -> tuple[tokenizers.Tokenizer, int]:
    """Return the run's tokenizer and the rows of its embedding.

    Raises:
        DataError: the tokenizer's files cannot be read.
    """
    tokenizer = tokenizers.build_tokenizer(config.data)
    size, given = tokenizer.vocab_size, config.data.vocab_size or 0
    is_real = not isinstance(tokenizer, tokenizers.NullTokenizer)
    if config.checkpoint.load_hf and is_real and size > given:
        raise ConfigError(
            f"the tokenizer has {size} ids, and the model of --load-hf {given} (--vocab-size): take"
            " its own tokenizer"
        )
    multiple, ranks = config.model.make_vocab_size_divisible_by, config.parallel
    return tokenizer, tokenizers.padded_vocab_size(
        max(size, given), multiple, ranks.tensor_model_parallel_size
    )
