"""Completes the layers that megatron-core builds without Transformer Engine.

megatron-core's norms there support neither sequence parallelism nor weights stored around zero. Its
layers have no norms behind their blocks and only one rotary base. Attention is in ``attention.py``.
"""

from __future__ import annotations

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
    # It takes its own import of the extension for the package, and asks for classes of it.
    multi_latent_attention.HAVE_TE = False
    # The router asks for this name, which it imports only with the package.
    moe_utils.te_general_gemm = None


def bound_output(layer: torch.nn.Module, cap: float) -> None:
    """Bounds what an output layer gives by ``cap``, with a hyperbolic tangent."""
    layer.register_forward_hook(functools.partial(bound_first, cap))


def scale_output(layer: torch.nn.Module, factor: float, dtype: torch.dtype) -> None:
    """Multiplies what a layer gives by a factor, as its type ``dtype`` has it."""
    factor = float(torch.tensor(factor, dtype=dtype))
    layer.register_forward_hook(lambda _, given, output: output * factor)


class NormAroundZero(torch.nn.Module):
    """Normalizes in 32 bits, with weights that are stored less one.

    Args:
        width: of the last axis.
        eps: added to the variance.
        has_mean: subtract the mean and add a bias, as LayerNorm does; else RMSNorm.
    """

    def __init__(self, width: int, eps: float, *, has_mean: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(width))
        self.bias = torch.nn.Parameter(torch.zeros(width)) if has_mean else None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Returns ``given [..., width]`` normalized, in its own type."""
        weight, shape = 1.0 + self.weight.float(), self.weight.shape
        if self.bias is None:
            found = F.rms_norm(given.float(), shape, weight, self.eps)
        else:
            found = F.layer_norm(given.float(), shape, weight, self.bias.float(), self.eps)
        return found.type_as(given)


class LocalLatentAttention(MLASelfAttention):  # type: ignore[misc]
    """megatron-core's latent attention, with the gradient of all heads for the keys they share.

    Each tensor-parallel rank computes a part of what keys and values are made of, and gathers the
    rest. Its heads' gradient for the rotated part of keys, one for all heads, is not that of the
    other ranks' heads: megatron-core adds them up only where each computes the whole.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.tp_group.size() > 1:
            self.linear_kv_down_proj.register_forward_hook(self._gathered)

    def _gathered(self, _module: Any, _given: Any, output: Any) -> Any:
        whole = gather_from_tensor_model_parallel_region(output[0], group=self.tp_group)
        if self.config.sequence_parallel:  # it gathers sequences of that part, and adds up
            return scatter_to_sequence_parallel_region(whole, group=self.tp_group), output[1]
        widths = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
        latent, rotated = whole.split(widths, dim=-1)
        rotated = copy_to_tensor_model_parallel_region(rotated, group=self.tp_group)
        return torch.cat([latent, rotated], dim=-1), output[1]


def norm_of(config: TransformerConfig) -> Any:
    """Returns the class of norms that no layer specification names, such as the last norm.

    If apex is installed, megatron-core would take apex's norm for every model, but that refuses
    RMSNorm.
    """
    is_apex = LayerNormImpl.__name__ == "FusedLayerNorm"
    return (
        LocalNorm if is_apex and config.normalization != "LayerNorm" else completed(LayerNormImpl)
    )


class LocalNorm:
    """A norm of torch whose weights' gradients megatron-core adds up over parts of a sequence."""

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any
    ) -> Any:
        """Returns the norm that megatron-core would, if it took parts of sequences."""
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
    *("parallel_residual", "norm_block_outputs", "attention_softcap", "window_rotary_base"),
    *("rotary_percent", "moe_router_group_best", "local_attention"),
)
"""Settings of ours that layers read of megatron-core's configuration, which lacks them."""


class GroupRouter(TopKRouter):  # type: ignore[misc]
    """Chooses groups of experts by the sum of so many of their best scores as the settings say."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if not hasattr(self, "router_replay"):
            raise ConfigError(
                "--moe-router-group-best needs megatron-core 0.16 or newer: drop it, or install one"
            )
        self.router_replay = _GroupChoice(config.moe_router_group_best)


class _GroupChoice:
    """Chooses experts where megatron-core asks its record of choices for them."""

    def __init__(self, best: int) -> None:
        self._best = best

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int, group_topk: int, default: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the best ``topk`` of ``scores [tokens, experts]`` in the groups, and which."""
        of_groups = scores.unflatten(-1, (num_groups, -1)).topk(self._best)[0].sum(-1)
        is_out = torch.ones_like(of_groups, dtype=torch.bool)
        is_out = is_out.scatter(1, of_groups.topk(group_topk)[1], False)
        is_out = is_out.repeat_interleave(scores.shape[1] // num_groups, dim=1)
        found: Any = scores.masked_fill(is_out, -torch.inf).topk(topk)
        return found  # type: ignore[no-any-return]


class VariedLayer(TransformerLayer):  # type: ignore[misc]
    """A layer with what its settings ask for beside megatron-core's.

    ``parallel_residual`` feeds the feed-forward block with the layer's own input, beside attention;
    what both add to the input is summed up as in other layers. ``norm_block_outputs`` normalizes
    what both give before it is added. ``window_rotary_base`` is the base of rotation where the
    layer has a window.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._own_input: torch.Tensor | None = None
        self.window_rotation: torch.nn.Module | None = None
        if config.norm_block_outputs:
            norm = norm_of(config)
            for name, block in (("attention", self.self_attention), ("mlp", self.mlp)):
                last = norm(config, config.hidden_size, eps=config.layernorm_epsilon)
                self.add_module(f"post_{name}_layernorm", last)
                block.register_forward_hook(functools.partial(_normalize, last))
        near = config.window_size, config.window_attn_skip_freq, self.layer_number
        if config.window_rotary_base is not None and is_layer_window_attention(*near):
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
        self._own_input = hidden_states if self.config.parallel_residual else None
        if self.window_rotation is not None:
            is_packed = kwargs.get("packed_seq_params") is not None
            length = len(rotary_pos_emb) * (1 if is_packed else self.config.context_parallel_size)
            rotary_pos_emb = self.window_rotation(length, packed_seq=is_packed)
        return super()._forward_attention(
            hidden_states, *args, rotary_pos_emb=rotary_pos_emb, **kwargs
        )

    def _forward_pre_mlp_layernorm(self, hidden_states: torch.Tensor) -> Any:
        own, self._own_input = self._own_input, None
        return super()._forward_pre_mlp_layernorm(hidden_states if own is None else own)


def _normalize(norm: torch.nn.Module, block: Any, given: Any, output: Any) -> tuple[Any, None]:
    """Normalizes what a block gives, which is a tensor and a bias that is not yet added."""
    found, bias = output
    return norm(found if bias is None else found + bias), None


_INSTEAD: Mapping[type, type] = {
    DotProductAttention: LocalAttention,
    MLASelfAttention: LocalLatentAttention,
    WrappedTorchNorm: LocalNorm,
}


def completed(part: Any, instead: Mapping[type, type] = _INSTEAD) -> Any:
    """Returns a description of layers with other classes in place of megatron-core's.

    Args:
        part: a class, or a specification of megatron-core's that holds such.
        instead: the classes, by default those of this module.
    """
    if isinstance(part, ModuleSpec) or type(part).__name__.endswith("Submodules"):
        fields = dataclasses.fields(part)
        return dataclasses.replace(
            part, **{one.name: completed(getattr(part, one.name), instead) for one in fields}
        )
    return instead.get(part, part) if isinstance(part, type) else part
