"""megatron-core's layers with a backward in two halves.

Subclasses take the place of megatron-core's own by layer spec (:func:`deferring_spec`) or by
instance (:func:`defer_outer_layers`); parameters, names and checkpoints stay what they are. A layer
without an active store is the plain layer: evaluation, unsplit schedules and the first forward of
a recomputed layer run megatron-core's code.

Biases that a layer adds itself are deferred with its weight. Those it hands on to be fused with
what follows, norms and position embeddings are not: their gradients come with B.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

from megatron.adaptive.engine.weight_gradient import (
    EmbeddingCall,
    WeightGradientStore,
    defer,
    is_deferring,
)
from megatron.adaptive.errors import ConfigError

try:
    import fused_weight_gradient_mlp_cuda as _fused  # type: ignore[import-not-found]
except ImportError:
    _fused = None


@dataclasses.dataclass(frozen=True, slots=True)
class ParallelLinearCall:
    """A call of megatron-core's linear layers; the operations are those of megatron-core.

    Attributes:
        weight: ``[out, in]``, this rank's part.
        bias: ``[out]``, added within the call.
        fuses: add into ``main_grad`` with the fused kernel.
        all_reduce_group: sums input gradients over tensor-parallel ranks.
        sequence_group: tensor-parallel ranks of which each gives its part of the sequence.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    fuses: bool
    all_reduce_group: dist.ProcessGroup | None
    sequence_group: dist.ProcessGroup | None

    def output(self, given: torch.Tensor) -> torch.Tensor:
        """Implements :class:`~megatron.adaptive.engine.weight_gradient.LayerCall`."""
        output = torch.matmul(self._whole(given), self.weight.t())
        return output if self.bias is None else output + self.bias

    def input_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Implements :class:`~megatron.adaptive.engine.weight_gradient.LayerCall`."""
        answer = gradient.matmul(self.weight)
        if self.all_reduce_group is not None:
            dist.all_reduce(answer, group=self.all_reduce_group)
        if self.sequence_group is None:
            return answer
        part = answer.new_empty(
            answer.shape[0] // self.sequence_group.size(), *answer.shape[1:], dtype=answer.dtype
        )
        dist.reduce_scatter_tensor(part, answer, group=self.sequence_group)
        return part

    def weight_gradients(
        self, given: torch.Tensor, gradient: torch.Tensor
    ) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Implements :class:`~megatron.adaptive.engine.weight_gradient.LayerCall`."""
        gradient, given = prepare_input_tensors_for_wgrad_compute(gradient, self._whole(given))
        if self.fuses:
            self._add_fused(given, gradient)
        else:
            yield self.weight, gradient.t().matmul(given)
        if self.bias is not None and self.bias.requires_grad:
            yield self.bias, gradient.sum(dim=0)

    def flops(self, gradient: torch.Tensor) -> float:
        """Implements :class:`~megatron.adaptive.engine.weight_gradient.LayerCall`."""
        return 2.0 * gradient.numel() * self.weight.shape[1]

    def _whole(self, given: torch.Tensor) -> torch.Tensor:
        """Return the whole sequence, in a buffer that the next such call overwrites."""
        if self.sequence_group is None:
            return given
        shape = [given.shape[0] * self.sequence_group.size(), *given.shape[1:]]
        whole: torch.Tensor = get_global_memory_buffer().get_tensor(shape, given.dtype, "mpu")
        dist.all_gather_into_tensor(whole, given.contiguous(), group=self.sequence_group)
        return whole

    def _add_fused(self, given: torch.Tensor, gradient: torch.Tensor) -> None:
        main_grad: torch.Tensor = self.weight.main_grad  # type: ignore[attr-defined]
        if main_grad.dtype == torch.float32:
            _fused.wgrad_gemm_accum_fp32(given, gradient, main_grad)
        else:
            _fused.wgrad_gemm_accum_fp16(given, gradient, main_grad)


class _Deferring:
    """Holds the store of a deferring layer's chunk, if there is one."""

    weight_gradient_store: WeightGradientStore | None = None


class _DeferringLinear(_Deferring):
    def _forward_impl(
        self, input: torch.Tensor, weight: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        store = self.weight_gradient_store
        if store is None or not is_deferring(store, weight):
            output: torch.Tensor = super()._forward_impl(  # type: ignore[misc]
                input, weight, *args, **kwargs
            )
            return output
        group = kwargs["tp_group"]
        fuses = kwargs["gradient_accumulation_fusion"] and hasattr(weight, "main_grad")
        call = ParallelLinearCall(
            weight=weight,
            bias=kwargs["bias"],
            fuses=fuses and _fused is not None,
            all_reduce_group=group if kwargs["allreduce_dgrad"] else None,
            sequence_group=group if kwargs["sequence_parallel"] else None,
        )
        return defer(call, input, store)


class DeferringColumnParallelLinear(  # type: ignore[misc]
    _DeferringLinear, ColumnParallelLinear
):
    """``ColumnParallelLinear`` that puts its weight gradient off while its store is active."""


class DeferringRowParallelLinear(_DeferringLinear, RowParallelLinear):  # type: ignore[misc]
    """``RowParallelLinear`` that puts its weight gradient off while its store is active."""


class DeferringVocabParallelEmbedding(_Deferring, VocabParallelEmbedding):  # type: ignore[misc]
    """``VocabParallelEmbedding`` that puts its weight gradient off while its store is active."""

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Looks tokens up: ``[b, s] int -> [b, s, h]``, or ``[s, b, h]`` parts."""
        store = self.weight_gradient_store
        if store is None or not is_deferring(store, self.weight):
            plain: torch.Tensor = super().forward(input_)
            return plain
        foreign = None
        rows = input_
        if self.tp_group.size() > 1:
            foreign = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
            rows = (input_ - self.vocab_start_index).masked_fill_(foreign, 0)
        call = EmbeddingCall(self.weight, by_index=self.deterministic_mode)
        output = defer(call, rows, store)
        if foreign is not None:
            output[foreign, :] = 0.0
        if self.reduce_scatter_embeddings:
            # [b, s, h] -> [s, b, h]
            output = output.transpose(0, 1).contiguous()
            return reduce_scatter_to_sequence_parallel_region(output, group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(output, group=self.tp_group)


_DEFERRING: dict[type, type] = {
    ColumnParallelLinear: DeferringColumnParallelLinear,
    RowParallelLinear: DeferringRowParallelLinear,
    VocabParallelEmbedding: DeferringVocabParallelEmbedding,
}


def deferring_spec(spec: ModuleSpec) -> ModuleSpec:
    """Return a copy of a layer spec whose linear layers defer; ``spec`` stays as it is."""
    rewritten: ModuleSpec = _rewrite(spec)
    return rewritten


def _rewrite(value: Any) -> Any:
    if isinstance(value, type):
        return _DEFERRING.get(value, value)
    if isinstance(value, (list, tuple)):
        return type(value)(_rewrite(element) for element in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {name: _rewrite(given) for name, given in _fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of what an instance of a dataclass is made from."""
    for field in dataclasses.fields(value):
        if field.init:
            yield field.name, getattr(value, field.name)


def defer_outer_layers(model: GPTModel) -> None:
    """Let the word embedding and the output layer of ``model`` defer, where it holds them.

    Changes the class of the two instances; nothing else of them changes.
    """
    embedding = getattr(model, "embedding", None)
    outer = [getattr(embedding, "word_embeddings", None), getattr(model, "output_layer", None)]
    for layer in outer:
        if type(layer) in _DEFERRING:
            layer.__class__ = _DEFERRING[type(layer)]


def attach_store(model: torch.nn.Module, store: WeightGradientStore | None) -> int:
    """Give all deferring layers of a chunk their store, or take it away.

    Returns:
        The number of layers that defer.
    """
    layers = [module for module in model.modules() if isinstance(module, _Deferring)]
    for layer in layers:
        layer.weight_gradient_store = store
    return len(layers)


def attach_stores(chunks: Sequence[torch.nn.Module]) -> list[WeightGradientStore]:
    """Give each chunk a store of its own.

    Raises:
        ConfigError: a chunk has linear layers and none of them defers.
    """
    stores = []
    for number, chunk in enumerate(chunks):
        store = WeightGradientStore()
        if attach_store(chunk, store) == 0:
            plain = [module for module in chunk.modules() if type(module) in _DEFERRING]
            if plain:
                raise ConfigError(
                    f"chunk {number} was to split its backward, but none of its layers defers a "
                    "weight gradient; build it with deferring_spec and defer_outer_layers"
                )
        stores.append(store)
    return stores


def why_not_split(config: TransformerConfig, spec: ModuleSpec | None = None) -> str | None:
    """Return what forbids to split the backward of a model, ``None`` if nothing does.

    Args:
        config: megatron-core's configuration of the model.
        spec: its layer spec, before or after :func:`deferring_spec`.

    Returns:
        A clause such as ``"fp8 layers compute their weight gradients within their backward"``.
    """
    if config.fp8 or config.fp4:
        return f"{'fp8' if config.fp8 else 'fp4'} layers compute weight gradients in their backward"
    if config.num_moe_experts:
        return "experts of a mixture of experts compute weight gradients in their backward"
    if config.mtp_num_layers:
        return "multi-token prediction uses the embedding and the output layer a second time"
    if config.cuda_graph_impl != "none":
        return "a CUDA graph replays the backward as it was captured, weight gradients included"
    if config.cpu_offloading:
        return "CPU offloading takes activations away that weight gradients still need"
    if config.defer_embedding_wgrad_compute:
        return "defer_embedding_wgrad_compute puts off the output layer's weight gradient itself"
    for name, layer in _linear_layers(spec):
        if layer is not IdentityOp and layer not in (*_DEFERRING, *_DEFERRING.values()):
            return f"{layer.__name__} ({name}) computes weight gradients in its backward"
    return None


def _linear_layers(value: Any, name: str = "") -> Iterator[tuple[str, type]]:
    """Yield the classes of a spec's fields that are linear layers by their name."""
    if isinstance(value, ModuleSpec):
        if name.startswith("linear_"):
            value = value.module
        else:
            yield from _linear_layers(value.submodules, name)
            return
    if isinstance(value, type):
        if name.startswith("linear_"):
            yield name, value
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from _linear_layers(element, name)
    elif dataclasses.is_dataclass(value):
        for field, given in _fields(value):
            yield from _linear_layers(given, field)
