"""Runs the forward of GPT training: batch in, loss out, with random numbers keyed by their place.

A seed of dropout is a key of when and where in the model it is drawn, written as one number and
stirred by a function that can be turned back::

    bits   63 ... 40   39 ... 24    23 ... 12   11 ... 0
           step        microbatch   layer       lane

Layer 0 is the embedding, transformer layers count from 1 through the whole model, embeddings of
multi-token prediction from the largest number down. Lane 0 is the generator for tensors that
tensor-parallel ranks hold alike, lane 1 + i the one for split tensors on the i-th of these ranks; a
dense GPT draws from no other. Stirring spreads every bit over all, for a CPU generator starts from
the lower half of its seed. That it can be turned back is for recomputation: megatron-core restores
generators to what they were before a layer's forward, at a time when another microbatch is the
current one, and a generator's seed then says which is meant.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import (
    _MODEL_PARALLEL_RNG_TRACKER_NAME,
    get_cuda_rng_tracker,
)
from megatron.core.transformer.module import Float16Module, float16_to_fp32, fp32_to_float16
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_batch_on_this_cp_rank, get_model_config

from megatron.adaptive.accelerator import Accelerator, current_device, default_generator
from megatron.adaptive.gpt.attention import Documents

Microbatch = Mapping[str, torch.Tensor]
LOSS_NAME = "lm loss"
TOKEN_NAME = "next token"


def feed(microbatches: Sequence[Microbatch] | None, count: int) -> Iterator[Microbatch | None]:
    """Hands a chunk the microbatches of a step, ``None`` on a rank that needs no data."""
    if microbatches is None:
        return itertools.repeat(None, count)
    return map(microbatches.__getitem__, range(count))


class GptForward:
    """megatron-core's ``forward_step_func`` for GPT.

    Args:
        accelerator: where the batch goes.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def __call__(self, given: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        """Run one microbatch through a chunk.

        Args:
            given: yields the microbatch; ``tokens``, ``labels``, ``position_ids`` ``[b, s] int64``,
                ``loss_mask [b, s] float32``, and ``lengths [n]`` of packed documents.
            model: the chunk.

        Returns:
            The chunk's output (losses ``[b, s]`` on the last stage) and the loss function.
        """
        to_device = self._accelerator.to_device
        batch = dict(next(given) or {})
        packed: dict[str, Any] = {}
        if (lengths := batch.pop("lengths", None)) is not None:
            packed["packed_seq_params"] = Documents.of(lengths, to_device)
        if not batch:
            return model(None, None, None, labels=None, **packed), None
        batch = get_batch_on_this_cp_rank({key: to_device(value) for key, value in batch.items()})
        settings = get_model_config(model)
        if settings.mtp_num_layers:
            packed["loss_mask"] = batch["loss_mask"]
        output = model(
            batch["tokens"],
            batch["position_ids"],
            batch.get("attention_mask"),
            labels=batch["labels"],
            **packed,
        )
        per_token = settings.calculate_per_token_loss
        return output, partial(masked_loss, batch["loss_mask"], per_token=per_token)


class NextToken:
    """megatron-core's ``forward_step_func`` for the token that follows a text.

    Args:
        accelerator: where the batch goes.
        position: of the last token of the text.
    """

    def __init__(self, accelerator: Accelerator, position: int) -> None:
        self._accelerator = accelerator
        self._position = position

    def __call__(self, given: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        """Run one microbatch of ``tokens`` and ``position_ids`` through a chunk."""
        batch = next(given)
        to_device = self._accelerator.to_device
        output = model(to_device(batch["tokens"]), to_device(batch["position_ids"]), None)
        return output, partial(self._likeliest, get_model_config(model).calculate_per_token_loss)

    def _likeliest(self, per_token: bool, logits: torch.Tensor) -> tuple[Any, ...]:
        """Returns no loss, and the likeliest token by ``logits`` ``[b, s, vocabulary / tp]``."""
        row = logits[0, self._position].float().contiguous()
        group = parallel_state.get_tensor_model_parallel_group()
        parts = [torch.empty_like(row) for _ in range(group.size())]
        torch.distributed.all_gather(parts, row, group=group)
        none = logits.new_zeros(())
        found = {TOKEN_NAME: torch.cat(parts).argmax()}
        return (none, torch.ones((), dtype=torch.int32), found) if per_token else (none, found)


def masked_loss(
    loss_mask: torch.Tensor, losses: torch.Tensor, *, per_token: bool = False
) -> tuple[Any, ...]:
    """Average the losses of a microbatch over its unmasked tokens.

    Args:
        loss_mask: ``[b, s] float32``.
        losses: ``[b, s] float32``.
        per_token: sum them instead, for a mean over all tokens of the step.

    Returns:
        The loss to differentiate, scalar, and the same detached under its name for the log. With
        ``per_token`` the sum, the tokens (int32), and both, detached, for the log.
    """
    mask = loss_mask.reshape(-1).float()
    tokens = mask.sum()
    total = torch.sum(losses.reshape(-1).float() * mask)
    if per_token:
        reported = torch.stack([total.detach(), tokens])
        _add_up_parts(reported)
        return total, tokens.int(), {LOSS_NAME: reported}
    tokens = tokens.clone()
    _add_up_parts(tokens)
    loss = total / tokens.clamp(min=1.0)
    reported = loss.detach().clone()
    _add_up_parts(reported)
    return loss, {LOSS_NAME: reported}


def _add_up_parts(value: torch.Tensor) -> None:
    """Adds up, in place, what the parts of a sequence have. Collective over these."""
    if parallel_state.get_context_parallel_world_size() > 1:
        torch.distributed.all_reduce(value, group=parallel_state.get_context_parallel_group())


_WORD = (1 << 64) - 1
_STEP_BITS, _MICROBATCH_BITS, _LAYER_BITS, _LANE_BITS = 24, 16, 12, 12
_HOOK = "dropout_key_hook"
_TIME_SHIFT = _LAYER_BITS + _LANE_BITS


class DropoutKeys:
    """Seeds the random generators from step, microbatch and layer alone.

    So neither the order of work nor the cut of the model into stages changes a single random
    number, and a resumed run needs no generator state. Nor does the number of replicas, over all of
    which microbatches are counted in the order in which samples are dealt out. Ranks of one
    tensor-parallel group share the generator for replicated tensors and differ in the one for split
    tensors; context-parallel ranks differ in both.

    Made after megatron-core's parallel state and generators. Not thread-safe; a backward that
    recomputes a layer may run in autograd's thread while the caller waits for it.

    Args:
        seed: the run's seed.
        enabled: whether the model has dropout at all; if not, nothing here does anything.
    """

    def __init__(self, seed: int, *, enabled: bool) -> None:
        self._enabled = enabled
        if not enabled:
            return
        self._replicas = parallel_state.get_data_parallel_world_size()
        self._replica = parallel_state.get_data_parallel_rank()
        cp_rank = parallel_state.get_context_parallel_rank()
        digest = hashlib.sha256(f"{seed} {cp_rank}".encode()).digest()
        self._secret = int.from_bytes(digest[:8], "little")
        self._own_lane = 1 + parallel_state.get_tensor_model_parallel_rank()
        assert self._own_lane < 1 << _LANE_BITS
        self._tracker = get_cuda_rng_tracker()
        self._generator: torch.Generator = default_generator(current_device())
        self._spare = torch.Generator(device=self._generator.device)

    def attach(self, chunks: Iterable[torch.nn.Module]) -> None:
        """Have every transformer layer of ``chunks`` seed the generators before its forward.

        Layers of multi-token prediction do so before they look tokens up. A layer takes step and
        microbatch from the last :meth:`apply`, or from the generators as a recomputation restores
        them. In evaluation it does nothing.
        """
        if not self._enabled:
            return
        self.detach(chunks)  # a layer that was here before a change of partition has one already
        for layer in _layers_of(chunks):
            assert layer.layer_number < 1 << _LAYER_BITS
            setattr(layer, _HOOK, layer.register_forward_pre_hook(self._enter))

    @staticmethod
    def detach(chunks: Iterable[torch.nn.Module]) -> None:
        """Have the layers of ``chunks`` draw from the generators as they are."""
        for layer in _layers_of(chunks):
            if (handle := layer.__dict__.pop(_HOOK, None)) is not None:
                handle.remove()

    def keyed(
        self,
        forward_step_func: Callable[..., Any],
        chunks: Iterable[torch.nn.Module],
        *,
        step: int,
        numbers: Sequence[int] | None = None,
    ) -> Callable[..., Any]:
        """Returns megatron-core's ``forward_step_func`` of a step, seeding before each forward.

        Args:
            forward_step_func: called with each chunk's microbatches in ascending order.
            chunks: of this rank.
            step: iteration, part of the key.
            numbers: of each microbatch over all replicas, where they are not dealt in turns.
        """
        if not self._enabled:
            return forward_step_func
        forwards = dict.fromkeys(map(id, chunks), 0)

        def forward_step(data_iterator: Any, model: Any, *more: Any, **options: Any) -> Any:
            index = forwards[id(model)]
            forwards[id(model)] += 1
            self.apply(
                step=step, microbatch=index, number=None if numbers is None else numbers[index]
            )
            return forward_step_func(data_iterator, model, *more, **options)

        return functools.wraps(forward_step_func)(forward_step)

    def apply(self, *, step: int, microbatch: int, number: int | None = None) -> None:
        """Set the generators for the forward of ``microbatch``, up to the first layer.

        Args:
            step: iteration, from 0; numbers repeat after 2**24.
            microbatch: its index in the step on this replica, from 0; numbers repeat after 2**16
                of all replicas.
            number: its index over all replicas, where they are not dealt in turns.
        """
        if not self._enabled:
            return
        if number is None:
            number = microbatch * self._replicas + self._replica
        time = step % (1 << _STEP_BITS) << _MICROBATCH_BITS | number % (1 << _MICROBATCH_BITS)
        self._seed(time << _TIME_SHIFT, lane=0)

    def _enter(self, layer: Any, _given: Any) -> None:
        if not layer.training:
            return
        key = _settle(self._generator.initial_seed()) ^ self._secret
        # Between ranks that split the sequence, megatron-core runs layers on a generator for split
        # tensors; in a recomputation only the lane still says that.
        number = layer.layer_number
        if isinstance(layer, MultiTokenPredictionLayer):
            number = (1 << _LAYER_BITS) - number
        self._seed(
            key >> _TIME_SHIFT << _TIME_SHIFT | number << _LANE_BITS, lane=key % (1 << _LANE_BITS)
        )

    def _seed(self, place: int, *, lane: int) -> None:
        """Seed both generators for ``place``, a key without its lane; ``lane`` is the current one.

        It runs once per layer and forward: whatever takes time here counts.
        """
        self._generator.manual_seed(_stir((place | lane) ^ self._secret))
        own = self._spare.manual_seed(_stir((place | self._own_lane) ^ self._secret))
        states = self._tracker.get_states()
        # A new tensor each time: checkpoints of activations hold on to the old ones.
        states[_MODEL_PARALLEL_RNG_TRACKER_NAME] = own.get_state()
        self._tracker.set_states(states)


def _layers_of(chunks: Iterable[torch.nn.Module]) -> Iterator[Any]:
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TransformerLayer | MultiTokenPredictionLayer):
                yield module


# A bijection of 64-bit numbers in which every bit of the input flips about half of the output.
# Source: D. Stafford, "Better Bit Mixing", variant 13; known as the finalizer of SplitMix64.
_FACTOR_1, _FACTOR_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_INVERSE_1, _INVERSE_2 = (pow(factor, -1, 1 << 64) for factor in (_FACTOR_1, _FACTOR_2))


def _stir(key: int) -> int:
    key = (key ^ key >> 30) * _FACTOR_1 & _WORD
    key = (key ^ key >> 27) * _FACTOR_2 & _WORD
    return key ^ key >> 31


def _settle(seed: int) -> int:
    """Return the key that :func:`_stir` made ``seed`` of."""
    seed = (seed ^ seed >> 31 ^ seed >> 62) * _INVERSE_2 & _WORD
    seed = (seed ^ seed >> 27 ^ seed >> 54) * _INVERSE_1 & _WORD
    return seed ^ seed >> 30 ^ seed >> 60


class HalfPrecisionChunk(Float16Module):  # type: ignore[misc]
    """megatron-core's 16-bit wrapper for a chunk that may lie anywhere.

    The original takes the first chunk of the first rank for the first stage and the last chunk of
    the last rank for the last stage; here the chunk itself says which it is.
    """

    def forward(self, *inputs: Any, fp32_output: bool = True, **kwargs: Any) -> Any:
        """Run the chunk in 16 bits; what enters and leaves the pipeline is converted."""
        if self.module.pre_process:
            inputs = fp32_to_float16(inputs, self.float16_convertor)
        output = self.module(*inputs, **kwargs)
        return float16_to_fp32(output) if self.module.post_process and fp32_output else output
