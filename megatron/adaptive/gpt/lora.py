"""Trains LoRA adapters for the frozen linear layers of megatron-core's GPT model.

An adapter adds ``scale * B A x`` to the output of a layer with input ``x``. A layer of
megatron-core may combine several layers of the Hugging Face model, such as query, key and value.
They are called the parts of the layer. Each part has its own pair of matrices ``A`` and ``B``. Two
tensors store all pairs of a layer::

    a  [n * rank, in]   matrices A of n parts, stacked
    b  [out, rank]      rows as in the layer's weight; each row uses only its part's rows of a

    column-parallel     x --a, whole--> z --gathered--> b, rows of this rank
    row-parallel        x --a, columns of this rank--> z --summed--> b, whole

Tensor-parallel ranks exchange only ``z``, which has ``n * rank`` columns. If the backward pass is
split, W actions compute the weight gradients of the adapters, as they do for other layers. Frozen
weights have no gradients. The backward pass ends at the first adapter of the model, because no
tensor before it requires a gradient.

Source: Hu et al. 2021 (arXiv:2106.09685), section 4.1; dropout and scale are applied as in PEFT.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron.adaptive.config.adapters import adapted_parts
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.engine.deferred_layers import Deferring
from megatron.adaptive.engine.weight_gradient import LayerCall, LinearCall, defer, is_deferring

MARK = ".lora."
"""Text that marks the names of adapters in checkpoints. No other name contains it."""
_ROW_PARALLEL = ("linear_proj", "linear_fc2")
# Communication between the two matrices of an adapter. The keys are pairs of booleans: whether the
# layer is row-parallel, and whether sequence parallelism is used.
_JOINS = {
    (False, False): copy_to_tensor_model_parallel_region,
    (False, True): gather_from_sequence_parallel_region,
    (True, False): reduce_from_tensor_model_parallel_region,
    (True, True): reduce_scatter_to_sequence_parallel_region,
}


@dataclass(frozen=True, slots=True)
class _PartsCall(LayerCall):
    """Multiplies each row of ``b`` by the columns of ``z`` that belong to the same layer part.

    Attributes:
        weight: Parameter ``b [out, rank]``.
        row_parts: Mask ``[out, n]``. Element ``[i, j]`` is 1 if row i of ``weight`` belongs to part
            j, otherwise 0. The rows of a part without an adapter contain only 0.
    """

    weight: torch.nn.Parameter
    row_parts: torch.Tensor

    def _whole(self) -> torch.Tensor:
        return (self.row_parts[:, :, None] * self.weight[:, None, :]).flatten(1)

    def output(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self._whole())

    def input_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.matmul(self._whole())

    def weight_gradients(
        self, hidden: torch.Tensor, gradient: torch.Tensor
    ) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        product = gradient.flatten(0, -2).t().mm(hidden.flatten(0, -2))
        parts = product.view(*self.row_parts.shape, -1)
        yield self.weight, (parts * self.row_parts[:, :, None]).sum(dim=1)

    def flops(self, gradient: torch.Tensor) -> float:
        return 2.0 * gradient.numel() * self.weight.shape[1] * self.row_parts.shape[1]


class Adapter(Deferring, torch.nn.Module):
    """Module with the adapters of one linear layer.

    The initial weights of a part depend only on the seed of the run, ``number``, ``name`` and the
    index of the part.

    Args:
        layer: Linear layer of megatron-core.
        name: Name of the linear layer within a transformer layer.
        marks: Booleans that mark the parts of the layer (such as query, key and value) that have an
            adapter, one per part.
        config: Settings of the run.
        number: Number of the transformer layer, from 1.
    """

    def __init__(
        self, layer: Any, name: str, marks: Sequence[bool], config: TrainerConfig, number: int
    ) -> None:
        super().__init__()
        lora = config.lora
        parallel = config.parallel
        rank = lora.lora_rank or 0
        ranks = parallel.tensor_model_parallel_size
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        out, width = layer.weight.shape
        self.scale = lora.scale
        self.dropout = lora.lora_dropout
        self.is_row = is_row = name.endswith(_ROW_PARALLEL)
        self.is_split = parallel.sequence_parallel
        self.is_gated = name.endswith("fc1") and config.model.is_gated
        whole = width * ranks if is_row else width
        first = []
        for part in (part for part, has in enumerate(marks) if has):
            digest = hashlib.sha256(f"{config.run.seed} {number} {name} {part}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            # Use the bound of kaiming_uniform_(a=sqrt(5)), as PEFT and torch's Linear do.
            bound = whole**-0.5
            matrix = torch.empty(rank, whole).uniform_(-bound, bound, generator=generator)
            first.append(matrix.chunk(ranks, dim=1)[tp_rank] if is_row else matrix)
        like = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        self.a = torch.nn.Parameter(torch.cat(first).to(**like))
        self.b = torch.nn.Parameter(torch.zeros(out, rank, **like))
        weight: Any  # megatron-core does not declare the attributes set below.
        for weight, dim in ((self.a, 1), (self.b, 0)):
            is_divided = is_row == (dim == 1)
            set_tensor_model_parallel_attributes(weight, is_divided, dim, 1)
            # megatron-core sums the gradients of parameters with this attribute over the ranks
            # that share a sequence.
            weight.sequence_parallel = self.is_split and not is_divided
        indices = torch.tensor([sum(marks[:part]) if has else -1 for part, has in enumerate(marks)])
        rows = torch.zeros(out, dtype=torch.long)
        if len(marks) > 1:
            rows = _parts_of_rows(config, out, ranks, tp_rank, self.is_gated)
        row_parts = (indices[rows][:, None] == torch.arange(sum(marks))).to(**like)
        self.row_parts: torch.Tensor
        self.register_buffer("row_parts", row_parts, persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the term to add to the layer's output. ``hidden`` is the normalized input."""
        if self.dropout and self.training:
            # Ranks with different columns of the input need different random numbers.
            is_divided = self.is_row and not self.is_split
            with get_cuda_rng_tracker().fork() if is_divided else contextlib.nullcontext():
                hidden = F.dropout(hidden, self.dropout)
        middle = self._product(LinearCall(self.a, None), hidden) * self.scale
        join: Any = _JOINS[self.is_row, self.is_split]
        middle = join(middle, group=parallel_state.get_tensor_model_parallel_group())
        return self._product(_PartsCall(self.b, self.row_parts), middle)

    def _product(self, call: LayerCall, hidden: torch.Tensor) -> torch.Tensor:
        store = self.weight_gradient_store
        if store is not None and is_deferring(store, call.weight):
            return defer(call, hidden, store)
        return call.output(hidden)

    def sharded(self, prefix: str, offsets: Any, metadata: Any) -> dict[str, Any]:
        """Returns the sharded weights of the adapters for a checkpoint.

        The names of the weights begin with ``prefix``. ``offsets`` and ``metadata`` are the
        arguments ``sharded_offsets`` and ``metadata`` of megatron-core's method
        ``sharded_state_dict``.
        """
        weights: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"a": 1} if self.is_row else {"b": 0},
            offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )
        if self.is_gated:
            weights[f"{prefix}b"] = apply_swiglu_sharded_factory(weights[f"{prefix}b"], offsets)
        return weights


def _parts_of_rows(
    config: TrainerConfig, rows: int, ranks: int, tp_rank: int, is_gated: bool
) -> torch.Tensor:
    """Returns the index of the part to which each row of a layer's weight belongs.

    The result contains only the ``rows`` rows of the weight that are on this rank, which has the
    index ``tp_rank`` among ``ranks`` tensor-parallel ranks. ``is_gated`` is true for a gated layer.

    The parts of a gated layer are gate (0) and up (1). The parts of other layers are query (0), key
    (1) and value (2).
    """
    if is_gated:
        return torch.arange(2).repeat_interleave(rows // 2)
    model = config.model
    each = model.num_attention_heads // model.query_groups
    group = torch.tensor([0] * each + [1, 2]).repeat_interleave(model.kv_channels)
    return group.repeat(model.query_groups).chunk(ranks)[tp_rank]


class _Adapted:
    """Mix-in that adds adapters to a linear layer of megatron-core or Transformer Engine."""

    lora: Adapter

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Returns the sum of the outputs of the layer and its adapters, and the layer's bias."""
        layer: Any = super()
        output, bias = layer.forward(hidden, *args, **kwargs)
        return output + self.lora(self._normalized(hidden)), bias

    def _normalized(self, hidden: torch.Tensor) -> torch.Tensor:
        """Applies the normalization to ``hidden`` if the Transformer Engine layer includes one."""
        layer: Any = self
        if (weight := getattr(layer, "layer_norm_weight", None)) is None:
            return hidden
        weight = weight + 1 if layer.zero_centered_gamma else weight
        if layer.normalization == "RMSNorm":
            return F.rms_norm(hidden, weight.shape, weight, layer.eps)
        return F.layer_norm(hidden, weight.shape, weight, layer.layer_norm_bias, layer.eps)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Returns the sharded weights of the layer and its adapters for a checkpoint.

        The parameters are the same as those of megatron-core's method. The names of the weights
        begin with ``prefix``.
        """
        layer: Any = super()
        weights = layer.sharded_state_dict(prefix, sharded_offsets, metadata)
        base = {name: weight for name, weight in weights.items() if MARK not in name}
        return base | self.lora.sharded(f"{prefix}{MARK[1:]}", sharded_offsets, metadata)


@functools.cache
def _adapted(layer: type) -> type:
    return type(f"Adapted{layer.__name__}", (_Adapted, layer), {})


def freeze(model: Any, config: TrainerConfig) -> Any:
    """Freezes the weights of ``model`` and adds adapters to it, if ``config`` enables LoRA."""
    if not config.lora.is_on:
        return model
    model.requires_grad_(False)
    model.config.moe_router_bias_update_rate = 0.0
    for layer in model.decoder.layers:
        for name, marks in adapted_parts(config).items():
            linear = layer.get_submodule(name)
            linear.lora = Adapter(linear, name, marks, config, layer.layer_number)
            kind: type = type(linear)
            linear.__class__ = _adapted(kind)
    if config.recompute.recompute_granularity is not None and model.pre_process:
        # Make the embedding's output require a gradient, because otherwise a recomputed layer would
        # not compute the gradients of its adapters.
        model.embedding.register_forward_hook(
            lambda module, inputs, output: output.requires_grad_(torch.is_grad_enabled())
        )
    return model
