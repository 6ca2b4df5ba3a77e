"""Adds features to the layers that megatron-core builds without Transformer Engine.

Without Transformer Engine, megatron-core's normalization layers support neither sequence
parallelism nor zero-centered weights (stored minus one). Its transformer layers can neither
normalize the outputs of attention and feed-forward blocks nor use a different rotary base in some
layers. This module adds these features. Features of attention itself are added by the module
``attention``.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.extensions import transformer_engine
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import LayerNormImpl
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import is_layer_window_attention

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.gpt.attention import LocalAttention, bound_first

if not transformer_engine.HAVE_TE:
    # Correct this flag of megatron-core, which is True even if Transformer Engine is not installed.
    multi_latent_attention.HAVE_TE = False
    # Define this name, which the router reads although megatron-core imports it only if Transformer
    # Engine is installed.
    moe_utils.te_general_gemm = None


def bound_output(layer: torch.nn.Module, cap: float) -> None:
    """Adds a hook to ``layer`` that applies a soft cap to its output.

    The hook returns ``cap * tanh(output / cap)``.
    """
    layer.register_forward_hook(functools.partial(bound_first, cap))


def scale_output(layer: torch.nn.Module, factor: float, dtype: torch.dtype) -> None:
    """Adds a hook to ``layer`` that multiplies the output by ``factor``.

    The factor is first rounded to ``dtype``.
    """
    factor = float(torch.tensor(factor, dtype=dtype))
    layer.register_forward_hook(lambda _, inputs, output: output * factor)


class NormAroundZero(torch.nn.Module):
    """Normalization layer with zero-centered weights (stored minus one). Computes in 32 bits.

    Args:
        width: Size of the dimension that is normalized, which is the last one.
        eps: Number that is added to the variance to avoid a division by zero.
        has_mean: Whether to compute LayerNorm, with mean and bias, instead of RMSNorm.
    """

    def __init__(self, width: int, eps: float, *, has_mean: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(width))
        self.bias = torch.nn.Parameter(torch.zeros(width)) if has_mean else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns ``hidden [..., width]`` normalized over the last dimension, in the same dtype."""
        weight = 1.0 + self.weight.float()
        shape = self.weight.shape
        if self.bias is None:
            output = F.rms_norm(hidden.float(), shape, weight, self.eps)
        else:
            output = F.layer_norm(hidden.float(), shape, weight, self.bias.float(), self.eps)
        return output.type_as(hidden)


class LocalLatentAttention(MLASelfAttention):
    """Corrects the gradient of the rotary part of the keys in megatron-core's latent attention.

    Each tensor-parallel rank computes a part of the latent vector of keys and values, and gathers
    the other parts. All heads share the rotary part of the keys, so the gradient of this part must
    be summed over the heads of all ranks. megatron-core computes this sum only if each rank
    computes the whole vector.
    """

    config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.tp_group.size() > 1:
            self.linear_kv_down_proj.register_forward_hook(self._gathered)

    def _resolve_qk_norm_config(self, submodules: Any) -> Any:
        """Returns the classes of projections and norms. Called only by megatron-core 0.19.

        If queries are not compressed, megatron-core 0.19 uses a class of Transformer Engine that
        normalizes the input of the query projection. This method avoids that class, because other
        releases of megatron-core do not normalize uncompressed queries.
        """
        if self.config.q_lora_rank is not None or not self.config.qk_layernorm:
            return super()._resolve_qk_norm_config(submodules)
        without = dataclasses.replace(submodules, q_layernorm=None, kv_layernorm=None)
        config = self.config
        self.config = copy.copy(config)
        self.config.qk_layernorm = False
        try:
            classes = super()._resolve_qk_norm_config(without)
        finally:
            self.config = config
        return {**classes, "kv_layernorm": submodules.kv_layernorm}

    def _gathered(self, _module: Any, _inputs: Any, output: Any) -> Any:
        whole = gather_from_tensor_model_parallel_region(output[0], group=self.tp_group)
        # If sequences are split over ranks, split the result again. megatron-core gathers the parts
        # later, and sums the gradients in the backward pass of that gathering.
        if self.config.sequence_parallel:
            return scatter_to_sequence_parallel_region(whole, group=self.tp_group), output[1]
        widths = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
        latent, rotated = whole.split(widths, dim=-1)
        rotated = copy_to_tensor_model_parallel_region(rotated, group=self.tp_group)
        return torch.cat([latent, rotated], dim=-1), output[1]


def norm_of(config: TransformerConfig) -> Any:
    """Returns the class for normalization layers outside of transformer layers.

    ``config`` is megatron-core's configuration of the model.

    If apex is installed, megatron-core always uses apex's class, which does not support RMSNorm.
    Models with RMSNorm then use :class:`LocalNorm`.
    """
    is_apex = LayerNormImpl.__name__ == "FusedLayerNorm"
    return (
        LocalNorm if is_apex and config.normalization != "LayerNorm" else completed(LayerNormImpl)
    )


class LocalNorm:
    """Creates normalization layers that support sequence parallelism.

    Marks the parameters of these layers, so that megatron-core sums their gradients over the ranks
    that share a sequence.
    """

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any
    ) -> Any:
        """Returns a layer of torch or a :class:`NormAroundZero` of width ``hidden_size``."""
        split = config.sequence_parallel
        if config.layernorm_zero_centered_gamma:
            has_mean = config.normalization == "LayerNorm"
            norm: Any = NormAroundZero(hidden_size, eps, has_mean=has_mean)
        else:
            config.sequence_parallel = False
            try:
                norm = WrappedTorchNorm(config, hidden_size, eps, **kwargs)
            finally:
                config.sequence_parallel = split
        for parameter in norm.parameters():
            parameter.sequence_parallel = split
        return norm


LAYER_SETTINGS = (
    "parallel_residual",
    "norm_block_outputs",
    "attention_softcap",
    "window_rotary_base",
    "rotary_percent",
    "moe_router_group_best",
    "local_attention",
)
"""Names of the settings for local layers, which this program adds to megatron-core's settings."""


class GroupRouter(TopKRouter):
    """Router that chooses the groups of experts whose best scores have the largest sums.

    The flag ``--moe-router-group-best`` sets how many scores are summed in each group.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if not hasattr(self, "router_replay"):
            raise ConfigError(
                "--moe-router-group-best requires megatron-core 0.16 or newer; install it, or "
                "remove the flag"
            )
        self.router_replay = _GroupChoice(config.moe_router_group_best)


class _GroupChoice:
    """Chooses the experts of each token. Replaces megatron-core's class ``RouterReplay``."""

    def __init__(self, best: int) -> None:
        self._best = best

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int, group_topk: int, default: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Chooses the ``topk`` experts with the best ``scores`` in the ``group_topk`` best groups.

        The experts form ``num_groups`` groups of the same size.

        Returns:
            Scores and indices of the chosen experts, each ``[tokens, topk]``.
        """
        of_groups = scores.unflatten(-1, (num_groups, -1)).topk(self._best)[0].sum(-1)
        is_out = torch.ones_like(of_groups, dtype=torch.bool)
        is_out = is_out.scatter(1, of_groups.topk(group_topk)[1], False)
        is_out = is_out.repeat_interleave(scores.shape[1] // num_groups, dim=1)
        best: tuple[torch.Tensor, torch.Tensor] = scores.masked_fill(is_out, -torch.inf).topk(topk)
        return best


class VariedLayer(TransformerLayer):
    """Transformer layer of megatron-core with three optional features.

    With ``parallel_residual``, attention and the feed-forward block both get the layer's input, and
    their outputs are added to the residual as usual. With ``norm_block_outputs``, both outputs are
    normalized before they are added. ``window_rotary_base`` sets a separate rotary base for layers
    with a sliding window.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._layer_input: torch.Tensor | None = None
        self.window_rotation: torch.nn.Module | None = None
        if config.norm_block_outputs:
            norm = norm_of(config)
            for name, block in (("attention", self.self_attention), ("mlp", self.mlp)):
                last = norm(config, config.hidden_size, eps=config.layernorm_epsilon)
                self.add_module(f"post_{name}_layernorm", last)
                block.register_forward_hook(functools.partial(_normalize, last))
        window = config.window_size, config.window_attn_skip_freq, self.layer_number
        if config.window_rotary_base is not None and is_layer_window_attention(*window):
            self.window_rotation = RotaryEmbedding(
                config.kv_channels,
                config.rotary_percent,
                config.rotary_interleaved,
                rotary_base=config.window_rotary_base,
                use_cpu_initialization=config.use_cpu_initialization,
                cp_group=self.pg_collection.cp,
            )

    def _forward_attention(
        self, hidden_states: torch.Tensor, *args: Any, rotary_pos_emb: Any = None, **kwargs: Any
    ) -> Any:
        self._layer_input = hidden_states if self.config.parallel_residual else None
        if self.window_rotation is not None:
            is_packed = kwargs.get("packed_seq_params") is not None
            length = len(rotary_pos_emb) * (1 if is_packed else self.config.context_parallel_size)
            rotary_pos_emb = self.window_rotation(length, packed_seq=is_packed)
        return super()._forward_attention(
            hidden_states, *args, rotary_pos_emb=rotary_pos_emb, **kwargs
        )

    def _forward_pre_mlp_layernorm(self, hidden_states: torch.Tensor) -> Any:
        layer_input, self._layer_input = self._layer_input, None
        hidden = hidden_states if layer_input is None else layer_input
        return super()._forward_pre_mlp_layernorm(hidden)


def _normalize(norm: torch.nn.Module, block: Any, inputs: Any, output: Any) -> tuple[Any, None]:
    """Forward hook that normalizes the output of an attention or feed-forward block.

    ``output`` is a pair of the block's output and its bias, which may be ``None``. Returns the
    normalized sum, and ``None`` as the bias.
    """
    hidden, bias = output
    return norm(hidden if bias is None else hidden + bias), None


_REPLACEMENTS: Mapping[type, type] = {
    DotProductAttention: LocalAttention,
    MLASelfAttention: LocalLatentAttention,
    WrappedTorchNorm: LocalNorm,
}


def completed(part: Any, replacements: Mapping[type, type] = _REPLACEMENTS) -> Any:
    """Returns ``part`` with some of megatron-core's classes replaced.

    Args:
        part: Class of megatron-core, or a specification that contains such classes.
        replacements: Classes to replace, mapped to their replacements. Defaults to those of this
            module.
    """
    if isinstance(part, ModuleSpec) or type(part).__name__.endswith("Submodules"):
        names = [field.name for field in dataclasses.fields(part)]
        parts = {name: completed(getattr(part, name), replacements) for name in names}
        return dataclasses.replace(part, **parts)
    # Since 0.17, megatron-core specifies some blocks as partial functions.
    if isinstance(part, functools.partial):
        keywords = {name: completed(value, replacements) for name, value in part.keywords.items()}
        arguments = [completed(value, replacements) for value in part.args]
        return functools.partial(completed(part.func, replacements), *arguments, **keywords)
    return replacements.get(part, part) if isinstance(part, type) else part
