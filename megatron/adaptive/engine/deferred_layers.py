"""Splits backward passes of megatron-core layers into input gradients (B) and weight gradients (W).

A model is built without changes. Then :func:`attach_stores` changes the class of each layer.
Parameters, names and checkpoints do not change. A changed layer saves the tensors that its weight
gradient needs in a store, from which W later computes the gradient. Without an active store, a
layer runs megatron-core's code. This happens, for example, in an evaluation, under schedules
without W, and in the first forward pass of a recomputed layer. A layer that cannot defer its weight
gradient computes it in B.

Layers of Transformer Engine can delay their weight gradients themselves: B puts the tensors of a
call into a ``wgrad_store``, and ``backward_dw()`` takes them out. A call uses the ``wgrad_store``
that the layer has during the call's forward pass. If weight gradients are deferred, each call
therefore gets a new store. Otherwise, the call uses the store that the layer was built with.

The output layer computes its weight gradient in B, because W would otherwise keep the gradients of
the logits. These gradients need far more memory than the tensors of any other layer, for example 1
GiB per microbatch for 4,096 tokens, a vocabulary of 128,000 tokens and 16-bit numbers. An exception
is an output layer that uses the weight of an embedding in the same chunk. Its weight gradient is
deferred together with the gradient of the embedding, so that the two are added to each other first,
as in autograd.

If a layer adds its bias itself, the gradient of the bias is also deferred. B computes the gradients
of all other parameters: biases that are added by the next operation (fused), norms (including those
in a ``LayerNormLinear``) and position embeddings.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
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
from megatron.core.transformer.moe import experts
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

from megatron.adaptive.engine.weight_gradient import (
    EmbeddingCall,
    LayerCall,
    WeightGradientStore,
    defer,
    is_deferring,
)
from megatron.adaptive.errors import ConfigError

try:
    import fused_weight_gradient_mlp_cuda as _fused
except ImportError:
    _fused = None


@dataclasses.dataclass(frozen=True, slots=True)
class ParallelLinearCall(LayerCall):
    """A call of a megatron-core linear layer, computed with the same operations as in the layer.

    Attributes:
        weight: This rank's shard of the weight, ``[out, in]``.
        bias: Bias ``[out]`` if the call adds a bias, otherwise ``None``.
        fuses: Whether a fused kernel computes the weight gradient and adds it directly to
            ``main_grad``.
        all_reduce_group: Group of tensor-parallel ranks that all-reduce input gradients, or
            ``None``.
        sequence_group: Group of ranks that each have a part of the sequence (sequence parallelism),
            or ``None``.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    fuses: bool
    all_reduce_group: dist.ProcessGroup | None
    sequence_group: dist.ProcessGroup | None

    def output(self, inputs: torch.Tensor) -> torch.Tensor:
        """Computes the output of the layer from its ``inputs``."""
        output = torch.matmul(self._whole(inputs), self.weight.t())
        return output if self.bias is None else output + self.bias

    def input_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of the input, given the gradient of the layer's output."""
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
        self, inputs: torch.Tensor, gradient: torch.Tensor
    ) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yields (parameter, gradient) pairs, except for gradients that a fused kernel accumulates.

        ``inputs`` are the layer's inputs, and ``gradient`` is the gradient of the layer's output.
        """
        gradient, inputs = prepare_input_tensors_for_wgrad_compute(gradient, self._whole(inputs))
        if self.fuses:
            self._add_fused(inputs, gradient)
        else:
            yield self.weight, gradient.t().matmul(inputs)
        if self.bias is not None and self.bias.requires_grad:
            yield self.bias, gradient.sum(dim=0)

    def _whole(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the whole input, gathered from the parts ``inputs`` on all ranks of the group.

        The next call may overwrite the returned tensor.
        """
        if self.sequence_group is None:
            return inputs
        shape = [inputs.shape[0] * self.sequence_group.size(), *inputs.shape[1:]]
        whole: torch.Tensor = get_global_memory_buffer().get_tensor(shape, inputs.dtype, "mpu")
        dist.all_gather_into_tensor(whole, inputs.contiguous(), group=self.sequence_group)
        return whole

    def _add_fused(self, inputs: torch.Tensor, gradient: torch.Tensor) -> None:
        weight: Any = self.weight
        main_grad: torch.Tensor = weight.main_grad
        if main_grad.dtype == torch.float32:
            _fused.wgrad_gemm_accum_fp32(inputs, gradient, main_grad)
        else:
            _fused.wgrad_gemm_accum_fp16(inputs, gradient, main_grad)


@dataclasses.dataclass(frozen=True, slots=True)
class GroupedCall(LayerCall):
    """Multiplies the rows of each expert by that expert's weight, in one grouped matmul.

    Attributes:
        weight: Weights of all experts on this rank, in one parameter.
        shape: Shape ``[experts, in, out]`` of ``weight`` in the matmul.
        counts: Number of rows of each expert, ``[experts]``, in host memory.
    """

    weight: torch.nn.Parameter
    shape: tuple[int, int, int]
    counts: torch.Tensor

    def output(self, inputs: torch.Tensor) -> torch.Tensor:
        """Computes the output of the layer from its ``inputs``."""
        return self._product(inputs, turned=False)

    def input_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of the input, given the gradient of the layer's output."""
        return self._product(gradient, turned=True)

    def weight_gradients(
        self, inputs: torch.Tensor, gradient: torch.Tensor
    ) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yields the weight and its gradient, as a single pair.

        ``inputs`` are the layer's inputs, and ``gradient`` is the gradient of the layer's output.
        """
        kernel = getattr(experts.gg.grouped_gemm, "backend", None)
        if kernel is not None and inputs.is_cuda and inputs.numel():
            total = kernel.gmm(inputs, gradient, self.counts, trans_a=True, trans_b=False)
        else:
            sizes = self.counts.tolist()
            parts = zip(inputs.split(sizes), gradient.split(sizes), strict=True)
            total = torch.stack([rows.t().mm(part) for rows, part in parts])
        yield self.weight, total.view_as(self.weight)

    def flops(self, gradient: torch.Tensor) -> float:
        """Returns the approximate number of FLOPs of :meth:`weight_gradients`."""
        return 2.0 * gradient.numel() * self.shape[1]

    def _product(self, rows: torch.Tensor, *, turned: bool) -> torch.Tensor:
        if not rows.numel():
            return rows.new_empty(0, self.shape[1 if turned else 2])
        weights = self.weight.view(self.shape)
        product: torch.Tensor = experts.gg.ops.gmm(rows, weights, self.counts, trans_b=turned)
        return product


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DelayedCall(LayerCall):
    """Call of a Transformer Engine layer. The layer itself keeps the tensors that W needs.

    Attributes:
        layer: Transformer Engine layer that is called.
        weight: First weight of the layer, ``[out, in]``. A grouped layer has several weights.
        delayed: Transformer Engine store (``wgrad_store``) that was created for this call.
    """

    layer: Any
    weight: torch.nn.Parameter
    delayed: Any

    def begin(self, gradient: torch.Tensor, store: WeightGradientStore) -> None:
        """Adds the call's weight gradient to ``store``, directly before the call's B.

        Only tensors on the meta device are added, because the layer keeps the real tensors itself.
        If megatron-core's data-parallel wrapper overlaps reductions, its hook requires every weight
        to have a gradient after B, so the weight gets a gradient of zeros.
        """
        inputs = gradient.new_empty(
            (*gradient.shape[:-1], self.weight.shape[-1]), device=torch.device("meta")
        )
        store.add(self, inputs, torch.empty_like(gradient, device="meta"))
        biases = [] if getattr(self.layer, "te_return_bias", False) else _biases(self.layer)
        fuses = getattr(self.layer, "fuse_wgrad_accumulation", False)
        weights = [] if fuses else _weights(self.layer)
        if hasattr(self.layer, "num_gemms"):
            _discard_gradients(weights, store)
            weights = []
        parameter: Any  # torch's type hints lack the attributes that megatron-core adds.
        for parameter in (*weights, *biases):
            if parameter.grad is None and hasattr(parameter, "main_grad"):
                if parameter.dim() > 1:
                    parameter.grad_added_to_main_grad = True
                    parameter.grad = parameter.new_zeros(()).expand_as(parameter)
                else:
                    parameter.grad = torch.zeros_like(parameter)

    @torch.no_grad()  # Autograd must not record this computation.
    def weight_gradients(
        self, inputs: torch.Tensor, gradient: torch.Tensor
    ) -> list[tuple[torch.nn.Parameter, Any]]:
        """Computes the weight gradients of the call and returns (parameter, gradient) pairs.

        This method calls the layer's ``backward_dw()``, and does not use ``inputs``. The result
        does not contain gradients that the layer itself adds to ``main_grad``.
        """
        layer = self.layer
        weights = _weights(layer)
        biases = _biases(layer)
        before = {parameter: parameter.grad for parameter in (*weights, *biases)}
        computed = self.delayed.pop()
        self.delayed.pop = lambda: computed
        # B has already computed the bias gradients if fp8 is used, but backward_dw() still expects
        # a tensor for each bias.
        absent = _is_absent(computed[0][1])
        for parameter in before:
            parameter.grad = None
        for bias in biases if absent else ():
            bias.grad = torch.empty_like(bias)
        original_store = layer.wgrad_store
        layer.wgrad_store = self.delayed
        try:
            # Call the method of Transformer Engine, because megatron-core's backward_dw() does
            # nothing unless its configuration delays weight gradients.
            _engine_class(type(layer)).backward_dw(layer)
        finally:
            layer.wgrad_store = original_store
            gradients = {parameter: parameter.grad for parameter in before}
            for parameter, former in before.items():
                parameter.grad = former
        present = (*weights, *(() if absent else biases))
        return [(each, gradients[each]) for each in present if gradients[each] is not None]


def _discard_gradients(weights: Sequence[torch.nn.Parameter], store: WeightGradientStore) -> None:
    """Discards the gradients that B accumulates for the ``weights`` of a grouped layer.

    Since Transformer Engine 2.8, B returns the memory into which W later writes the gradients.
    Before W, this memory has arbitrary contents. In earlier releases, B returns no gradients. In
    both cases, the hook of megatron-core's data-parallel wrapper needs a tensor, so all weights of
    the same shape share one tensor. Autograd adds to this tensor in place, so it must not be an
    expanded tensor. At the end of B, ``store`` restores the gradients of earlier microbatches.
    """
    former = [weight.grad for weight in weights]
    shared: dict[tuple[torch.Size, torch.dtype, torch.device], torch.Tensor] = {}
    weight: Any  # torch's type hints lack the attributes that megatron-core adds.
    for weight in weights:
        key = (weight.shape, weight.dtype, weight.device)
        if key not in shared:
            shared[key] = torch.empty(key[0], dtype=key[1], device=key[2])
        weight.grad = shared[key]
        if hasattr(weight, "main_grad"):
            weight.grad_added_to_main_grad = True

    def put_back() -> None:
        for weight, gradient in zip(weights, former, strict=True):
            weight.grad = gradient

    store.call_after_backward(put_back)


def _is_absent(gradients: Any) -> bool:
    """Returns whether ``gradients``, the result of a delayed call, contains no bias gradients.

    A grouped layer has a list with a tensor for each bias. The tensors are empty if B has already
    computed the gradients, or if the layer does not add its biases itself.
    """
    parts = gradients if isinstance(gradients, (list, tuple)) else [gradients]
    return all(part is None or not part.numel() for part in parts)


def _weights(layer: torch.nn.Module) -> list[torch.nn.Parameter]:
    return _trained(layer, "weight")


def _biases(layer: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [bias for bias in _trained(layer, "bias") if bias.numel()]


def _trained(layer: torch.nn.Module, prefix: str) -> list[torch.nn.Parameter]:
    named = layer.named_parameters(recurse=False)
    return [each for name, each in named if name.startswith(prefix) and each.requires_grad]


class Deferring:
    """Base class of layers that defer their weight gradients while a store is attached."""

    weight_gradient_store: WeightGradientStore | None = None


class _DeferringLinear(Deferring):
    is_expert: bool
    weight: torch.nn.Parameter | None
    is_output_layer = False

    def _forward_impl(
        self, input: torch.Tensor, weight: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        store = self.weight_gradient_store
        by_itself = kwargs.get("grad_output_buffer") is not None
        by_itself |= self.is_output_layer and weight is self.weight
        if store is None or by_itself or not is_deferring(store, weight):
            layer: Any = super()
            output: torch.Tensor = layer._forward_impl(input, weight, *args, **kwargs)
            return output
        group = kwargs["tp_group"]
        store.is_uneven |= self.is_expert
        fuses = kwargs["gradient_accumulation_fusion"] and hasattr(weight, "main_grad")
        call = ParallelLinearCall(
            weight=weight,
            bias=kwargs["bias"],
            fuses=fuses and _fused is not None,
            all_reduce_group=group if kwargs["allreduce_dgrad"] else None,
            sequence_group=group if kwargs["sequence_parallel"] else None,
        )
        return defer(call, input, store)


class DeferringColumnParallelLinear(_DeferringLinear, ColumnParallelLinear):
    """Replaces ``ColumnParallelLinear``; defers its weight gradient while a store is active."""


class DeferringRowParallelLinear(_DeferringLinear, RowParallelLinear):
    """Replaces ``RowParallelLinear``; defers its weight gradient while a store is active."""


class DeferringVocabParallelEmbedding(Deferring, VocabParallelEmbedding):
    """Replaces ``VocabParallelEmbedding``; defers its weight gradient while a store is active."""

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings of the token IDs in ``input_``, and defers the weight gradient.

        ``input_`` has the shape ``[b, s]``. The result has the shape ``[b, s, h]``, or ``[s, b,
        h]`` with this rank's part of the sequence if the embeddings are reduce-scattered.
        """
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
        reduce: Any = reduce_from_tensor_model_parallel_region
        if self.reduce_scatter_embeddings:
            # Change [b, s, h] to [s, b, h], because the reduce-scatter splits the first dimension.
            output = output.transpose(0, 1).contiguous()
            reduce = reduce_scatter_to_sequence_parallel_region
        reduced: torch.Tensor = reduce(output, group=self.tp_group)
        return reduced


class _DelayingLayer(Deferring):
    """Makes a Transformer Engine layer delay its weight gradient while a store is active."""

    wgrad_store: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer, and delays the layer's weight gradient if a store is active."""
        store = self.weight_gradient_store
        engine_layer: Any = super()
        this_layer: Any = self
        weights = _weights(this_layer)
        if store is None or not weights or not is_deferring(store, weights[0]):
            return engine_layer.forward(*args, **kwargs)
        store.is_uneven |= getattr(self, "num_gemms", 1) > 1
        original_store = self.wgrad_store
        call = DelayedCall(self, weights[0], type(original_store)(True))
        self.wgrad_store = call.delayed
        try:
            answer = engine_layer.forward(*args, **kwargs)
        finally:
            self.wgrad_store = original_store
        output = answer[0] if isinstance(answer, tuple) else answer
        output.register_hook(lambda gradient: call.begin(gradient, store))
        return answer


class _DeferringGroupedExperts(Deferring):
    """Replaces megatron-core's ``GroupedMLP``; defers its weight gradients while a store is active.

    megatron-core 0.17 and later have no ``GroupedMLP``; their grouped experts are layers of
    Transformer Engine.
    """

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """Returns the output ``[tokens, h]`` of the experts for tokens sorted by expert.

        ``permuted_local_hidden_states`` contains the tokens, ``tokens_per_expert`` the number of
        tokens of each expert, and ``permuted_probs`` a factor for the output of each token.
        """
        store: Any = self.weight_gradient_store
        layer: Any = self
        rows = permuted_local_hidden_states
        shares = permuted_probs
        if store is None or layer.activation_recompute or not is_deferring(store, layer.weight1):
            experts_of_core: Any = super()
            plain: tuple[torch.Tensor, None] = experts_of_core.forward(
                rows, tokens_per_expert, shares
            )
            return plain
        store.is_uneven = True
        if layer.config.moe_apply_probs_on_input:
            rows = (shares.unsqueeze(-1) * rows).to(rows.dtype)
            shares = torch.ones_like(shares)
        count = layer.num_local_experts
        hidden = layer.config.hidden_size
        wide = layer.weight1.numel() // (count * hidden)
        narrow = layer.weight2.numel() // (count * hidden)
        first = GroupedCall(layer.weight1, (count, hidden, wide), tokens_per_expert)
        second = GroupedCall(layer.weight2, (count, narrow, hidden), tokens_per_expert)
        between = layer.activation_func_with_probs(defer(first, rows, store), shares.unsqueeze(-1))
        return defer(second, between, store), None


_DEFERRING: dict[type, type] = {
    ColumnParallelLinear: DeferringColumnParallelLinear,
    RowParallelLinear: DeferringRowParallelLinear,
    VocabParallelEmbedding: DeferringVocabParallelEmbedding,
}
if (grouped := getattr(experts, "GroupedMLP", None)) is not None:
    _DEFERRING[grouped] = type("DeferringGroupedMLP", (_DeferringGroupedExperts, grouped), {})


@functools.cache
def _delaying(layer: type) -> type:
    return type(f"Delaying{layer.__name__}", (_DelayingLayer, layer), {})


def _engine_class(layer: type) -> Any:
    """Returns the Transformer Engine class that ``layer`` is derived from, or ``None``."""
    bases = (base for base in layer.__mro__ if base.__module__.startswith("transformer_engine"))
    return next(bases, None)


def defer_layers(chunk: torch.nn.Module) -> list[str]:
    """Makes the layers of ``chunk`` able to defer weight gradients.

    Only the classes of the layer objects change. Layers can defer while a store is attached to them
    (see :func:`attach_store`).

    Returns:
        Text for each layer that has a weight matrix but cannot defer its gradient. The text names
        the layer and the reason, for example ``"layers.0.linear is a Linear, which computes its
        weight gradient in its backward pass"``.
    """
    whole: list[str] = []
    captured: tuple[str, ...] = ()
    for name, layer in chunk.named_modules():
        if hasattr(layer, "cudagraph_manager") or hasattr(layer, "cuda_graphs"):
            captured = (*captured, f"{name}.")
        # Also convert supported layers without a weight matrix of their own, such as an output
        # layer that shares the weight of the embedding.
        if isinstance(layer, Deferring) or not (type(layer) in _DEFERRING or _has_matrix(layer)):
            continue
        reason = _why_whole(layer)
        if name.startswith(captured):
            reason = "whose backward pass is replayed by a CUDA graph"
        if reason is not None:
            whole.append(f"{name} is a {type(layer).__name__}, {reason}")
        elif type(layer) in _DEFERRING:
            layer.__class__ = _DEFERRING[type(layer)]
            if isinstance(layer, _DeferringLinear):
                layer.is_output_layer = name.rpartition(".")[2] == "output_layer"
        else:
            kind: type = type(layer)
            layer.__class__ = _delaying(kind)
    return whole


def _has_matrix(layer: torch.nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in layer.parameters(recurse=False))


def _why_whole(layer: Any) -> str | None:
    """Returns the reason why ``layer`` cannot defer its weight gradient, or ``None`` if it can."""
    config = getattr(layer, "config", None)
    if getattr(config, "cpu_offloading", False):
        return "with CPU offloading, which moves the tensors for the weight gradient to the CPU"
    if getattr(layer, "gtp_remat_size", 1) > 1:
        return "whose weight is gathered from several ranks for each use"
    engine = _engine_class(type(layer))
    if engine is None:
        return None if type(layer) in _DEFERRING else _IN_ITS_BACKWARD
    store = getattr(layer, "wgrad_store", None)
    if not hasattr(engine, "backward_dw") or not hasattr(store, "delay_wgrad_compute"):
        return "from a Transformer Engine release without backward_dw (before 2.3)"
    if getattr(config, "tp_comm_overlap", False):
        return "with tp_comm_overlap, which computes the weight gradient while it communicates"
    return None


_IN_ITS_BACKWARD = "which computes its weight gradient in its backward pass"


def delays_by_itself(chunks: Sequence[torch.nn.Module]) -> bool:
    """Returns whether ``chunks`` contain layers that can delay their weight gradients themselves.

    Only layers of Transformer Engine can do this.
    """
    return any(_engine_class(type(layer)) for chunk in chunks for layer in chunk.modules())


def why_not_split(chunks: Sequence[torch.nn.Module]) -> str | None:
    """Prepares the layers of ``chunks`` to defer weight gradients, or returns why they cannot.

    See :func:`defer_layers`.

    Returns:
        ``None`` if at least one layer can defer, or if no layer has a weight matrix. Otherwise, the
        reason why the first layer cannot defer.
    """
    whole = [reason for chunk in chunks for reason in defer_layers(chunk)]
    layers = (layer for chunk in chunks for layer in chunk.modules())
    return whole[0] if whole and not any(isinstance(each, Deferring) for each in layers) else None


def attach_store(model: torch.nn.Module, store: WeightGradientStore | None) -> int:
    """Attaches ``store`` to all deferring layers in ``model``; ``None`` detaches the old store.

    Returns:
        Number of deferring layers in ``model``.
    """
    layers = [module for module in model.modules() if isinstance(module, Deferring)]
    for layer in layers:
        layer.weight_gradient_store = store
    return len(layers)


def attach_stores(chunks: Sequence[torch.nn.Module]) -> list[WeightGradientStore]:
    """Attaches a new store to the layers of each of ``chunks``, and returns the stores.

    The layers then defer their weight gradients while a store is active.

    Raises:
        ConfigError: The layers have weight gradients, but no layer can defer its gradient.
    """
    reason = why_not_split(chunks)
    if reason is not None:
        raise ConfigError(
            f"backward passes cannot be split: {reason}; choose a schedule that does not split "
            "backward passes, or remove split_backward (--split-backward)"
        )
    stores = [WeightGradientStore() for _ in chunks]
    for chunk, store in zip(chunks, stores, strict=True):
        attach_store(chunk, store)
    return stores
