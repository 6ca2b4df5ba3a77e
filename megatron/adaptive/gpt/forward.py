"""Runs the forward pass of a GPT model, and seeds dropout for each step, microbatch and layer.

The step, the microbatch and the position in the model are encoded as one number. The seed is an
invertible hash of this number::

    bits   63 ... 40   39 ... 24    23 ... 12   11 ... 0
           step        microbatch   layer       lane

Layer 0 is the embedding. Transformer layers are numbered from 1 over the whole model. The
embeddings of multi-token prediction are numbered downward from the largest possible number. The
lane identifies the random generator: lane 0 is for tensors that are replicated on all
tensor-parallel ranks, and lane 1 + i is for tensors that are split, on tensor-parallel rank i. A
GPT model without experts uses no other generators.

A hash is needed because a CPU generator uses only the lower half of its seed. The hash must be
invertible because of recomputation: megatron-core restores the state that the generators had before
the layer's forward pass, but the latest call of ``apply`` may have been for a different microbatch.
The microbatch is therefore decoded from the restored seed.
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
from megatron.core.utils import get_model_config

from megatron.adaptive.accelerator import Accelerator, current_device, default_generator
from megatron.adaptive.engine.model_groups import ModelGroups
from megatron.adaptive.gpt.attention import Documents
from megatron.adaptive.gpt.core_releases import number_in_model, part_of_context_rank
from megatron.adaptive.gpt.sequence_slices import SequenceSlices
from megatron.adaptive.schedule.action import SliceCounts, item_count, place_of

Microbatch = Mapping[str, torch.Tensor]
LOSS_NAME = "lm loss"
TOKEN_NAME = "next token"


def feed(
    microbatches: Sequence[Microbatch] | None, count: int, slices: SequenceSlices | None = None
) -> Iterator[Microbatch | None]:
    """Yields the first ``count`` microbatches of ``microbatches``, or all of their slices.

    ``slices`` cuts microbatches into slices; if it is ``None``, whole microbatches are yielded. On
    a rank without data, ``microbatches`` is ``None``, and the function yields ``None`` for each
    microbatch or slice.
    """
    if microbatches is None:
        return itertools.repeat(None, count if slices is None else item_count(count, slices.count))
    whole = map(microbatches.__getitem__, range(count))
    if slices is None:
        return whole
    return itertools.chain.from_iterable(map(slices.parts, itertools.count(), whole))


class GptForward:
    """Forward step function of a GPT model, with the interface of megatron-core's schedules.

    Args:
        accelerator: Device to which batches are moved.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def __call__(self, batches: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        """Runs the next microbatch of ``batches`` through the model chunk ``model``.

        Args:
            batches: Iterator over microbatches with ``tokens``, ``labels`` and ``position_ids``
                ``[b, s] int64``, ``loss_mask [b, s] float32``, and, for packed documents,
                ``lengths [n]``. A slice of a microbatch also has ``whole_tokens``, the number of
                unmasked tokens in the whole microbatch.
            model: Chunk to run.

        Returns:
            The output of the chunk, and a function that computes the loss of the microbatch from
            the output of the last stage, which contains the losses ``[b, s]`` of all tokens.
        """
        to_device = self._accelerator.to_device
        batch = dict(next(batches) or {})
        packed: dict[str, Any] = {}
        if (lengths := batch.pop("lengths", None)) is not None:
            packed["packed_seq_params"] = Documents.of(lengths, to_device)
        if not batch:
            return model(None, None, None, labels=None, **packed), None
        batch = part_of_context_rank({key: to_device(value) for key, value in batch.items()})
        settings = get_model_config(model)
        whole_tokens = batch.pop("whole_tokens", None)
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
        return output, partial(
            masked_loss, batch["loss_mask"], per_token=per_token, whole_tokens=whole_tokens
        )


class NextToken:
    """Forward step function that predicts the token that follows a text.

    Args:
        accelerator: Device to which batches are moved.
        position: Index of the text's last token.
    """

    def __init__(self, accelerator: Accelerator, position: int) -> None:
        self._accelerator = accelerator
        self._position = position

    def __call__(self, batches: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        """Runs the next microbatch of ``batches`` through the model chunk ``model``.

        Returns the output of the chunk, and a function that finds the most likely token from the
        output of the last stage.
        """
        batch = next(batches)
        to_device = self._accelerator.to_device
        output = model(to_device(batch["tokens"]), to_device(batch["position_ids"]), None)
        return output, partial(self._likeliest, get_model_config(model).calculate_per_token_loss)

    def _likeliest(self, per_token: bool, logits: torch.Tensor) -> tuple[Any, ...]:
        """Returns a loss of 0 and the most likely next token, as the result of a loss function.

        Args:
            per_token: Whether losses are averaged per token. The result must then also contain a
                token count.
            logits: Logits ``[b, s, vocabulary / tp]``.
        """
        row = logits[0, self._position].float().contiguous()
        group = parallel_state.get_tensor_model_parallel_group()
        parts = [torch.empty_like(row) for _ in range(group.size())]
        torch.distributed.all_gather(parts, row, group=group)
        none = logits.new_zeros(())
        result = {TOKEN_NAME: torch.cat(parts).argmax()}
        return (none, torch.ones((), dtype=torch.int32), result) if per_token else (none, result)


def masked_loss(
    loss_mask: torch.Tensor,
    losses: torch.Tensor,
    *,
    per_token: bool = False,
    whole_tokens: torch.Tensor | None = None,
) -> tuple[Any, ...]:
    """Averages the ``losses`` of a microbatch over the tokens that are not masked.

    For a slice of a microbatch, the result is the slice's contribution to this mean, so that the
    results for all slices add up to the loss of the microbatch.

    Args:
        loss_mask: Mask ``[b, s] float32``, 1 for tokens whose losses are included, otherwise 0.
        losses: Losses ``[b, s] float32``.
        per_token: Whether to return the sum of the losses instead, from which the caller computes
            the mean over all tokens of the step.
        whole_tokens: Number of unmasked tokens in the whole microbatch, if the mask and the losses
            belong to a slice; otherwise ``None``.

    Returns:
        The scalar loss to differentiate, and a dictionary with a detached copy for the log. With
        ``per_token``, the sum of the losses, the number of tokens (int32), and a dictionary with
        detached copies of both for the log.
    """
    mask = loss_mask.reshape(-1).float()
    tokens = mask.sum()
    total = torch.sum(losses.reshape(-1).float() * mask)
    if per_token:
        reported = torch.stack([total.detach(), tokens])
        _add_up_parts(reported)
        return total, tokens.int(), {LOSS_NAME: reported}
    tokens = (tokens if whole_tokens is None else whole_tokens).clone()
    _add_up_parts(tokens)
    loss = total / tokens.clamp(min=1.0)
    reported = loss.detach().clone()
    _add_up_parts(reported)
    return loss, {LOSS_NAME: reported}


def _add_up_parts(value: torch.Tensor) -> None:
    """Sums ``value`` in place over the context-parallel ranks. All of them must call this."""
    if parallel_state.get_context_parallel_world_size() > 1:
        torch.distributed.all_reduce(value, group=parallel_state.get_context_parallel_group())


_WORD = (1 << 64) - 1
_STEP_BITS = 24
_MICROBATCH_BITS = 16
_LAYER_BITS = 12
_LANE_BITS = 12
# Odd number, so that its multiples modulo 2**24 are all different.
_FAR_STEP = 10_368_889
_HOOK = "dropout_key_hook"
_TIME_SHIFT = _LAYER_BITS + _LANE_BITS


class DropoutKeys:
    """Seeds the random generators by step, microbatch and layer.

    The random numbers do not depend on the order in which microbatches are computed or on the
    partition of the model. They do not depend on the number of replicas either, because
    microbatches are numbered over all replicas, in the order of their samples. A resumed run needs
    no generator state. Ranks of one tensor-parallel group have the same seed for replicated
    tensors, and different seeds for split tensors. Context-parallel ranks have different seeds for
    both.

    megatron-core's parallel state and generators must exist before this object is created. The
    class is not thread-safe, but a layer may be recomputed in autograd's thread while the calling
    thread waits.

    Args:
        seed: Seed of the run.
        enabled: Whether the model has dropout. If false, all methods do nothing.
        model_groups: Process groups of the model, or ``None`` to use the groups of
            ``parallel_state``.
    """

    def __init__(
        self, seed: int, *, enabled: bool, model_groups: ModelGroups | None = None
    ) -> None:
        self._enabled = enabled
        if not enabled:
            return
        groups = model_groups or ModelGroups()
        self._replica, self._replicas = groups.replica
        digest = hashlib.sha256(f"{seed} {groups.cp_rank}".encode()).digest()
        self._secret = int.from_bytes(digest[:8], "little")
        self._split_lane = 1 + groups.tp_rank
        assert self._split_lane < 1 << _LANE_BITS
        self._tracker = get_cuda_rng_tracker()
        self._generator: torch.Generator = default_generator(current_device())
        self._spare = torch.Generator(device=self._generator.device)

    def attach(self, chunks: Iterable[torch.nn.Module]) -> None:
        """Adds a hook to each layer of ``chunks``, which seeds the generators before the layer.

        Multi-token prediction layers also get this hook, which runs before their embedding lookup.
        The hook reads the step and the microbatch from the generators, which either :meth:`apply`
        has seeded or, during recomputation, megatron-core has restored. In evaluation mode, the
        hook does nothing.
        """
        if not self._enabled:
            return
        # Remove existing hooks, because layers may stay on this rank after repartitioning.
        self.detach(chunks)
        for layer in _layers_of(chunks):
            assert layer.layer_number < 1 << _LAYER_BITS
            setattr(layer, _HOOK, layer.register_forward_pre_hook(self._enter))

    @staticmethod
    def detach(chunks: Iterable[torch.nn.Module]) -> None:
        """Removes the hooks that :meth:`attach` added to the layers of ``chunks``."""
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
        slices: SequenceSlices | None = None,
    ) -> Callable[..., Any]:
        """Wraps a forward step function so that it seeds the generators for each microbatch.

        If microbatches are cut into slices, each slice has its own random numbers, so dropout does
        not drop the same elements as in whole microbatches.

        Args:
            forward_step_func: Forward step function of megatron-core's schedules. For each chunk,
                the schedule must call the wrapped function with the microbatches in ascending
                order.
            chunks: Model chunks of this rank, one for each of its pipeline stages.
            step: Index of the iteration, which becomes part of the seed.
            numbers: Index of each microbatch, counted over all replicas, or ``None`` if the
                microbatches are distributed round-robin over the replicas.
            slices: Object that cuts the step's microbatches into slices, which must also run in
                ascending order, or ``None`` for whole microbatches.
        """
        if not self._enabled:
            return forward_step_func
        forwards = dict.fromkeys(map(id, chunks), 0)
        counts: SliceCounts = 1 if slices is None else slices.count
        stride = 1 if slices is None else slices.stride

        def forward_step(data_iterator: Any, model: Any, *more: Any, **options: Any) -> Any:
            index, part, _ = place_of(forwards[id(model)], counts)
            forwards[id(model)] += 1
            number = self._number_of(index) if numbers is None else numbers[index]
            self.apply(step=step, microbatch=index, number=number * stride + part)
            return forward_step_func(data_iterator, model, *more, **options)

        return functools.wraps(forward_step_func)(forward_step)

    def apply(self, *, step: int, microbatch: int, number: int | None = None) -> None:
        """Seeds the generators for the operations of a forward pass that precede the first layer.

        Args:
            step: Index of the iteration, from 0. Random numbers repeat after 2**24 iterations.
            microbatch: Index of the microbatch on this replica, from 0.
            number: Index of the microbatch or slice, counted over all replicas, or ``None`` if the
                microbatches are distributed round-robin over the replicas.
        """
        if not self._enabled:
            return
        if number is None:
            number = self._number_of(microbatch)
        # If the number has more bits than are reserved for the microbatch, use the keys of a
        # distant step, so that two nearby steps never have the same keys.
        step += (number >> _MICROBATCH_BITS) * _FAR_STEP
        time = step % (1 << _STEP_BITS) << _MICROBATCH_BITS | number % (1 << _MICROBATCH_BITS)
        self._seed(time << _TIME_SHIFT, lane=0)

    def _number_of(self, microbatch: int) -> int:
        """Converts ``microbatch``, an index on this replica, to an index over all replicas."""
        number: int = microbatch * self._replicas + self._replica
        return number

    def _enter(self, layer: Any, _given: Any) -> None:
        if not layer.training:
            return
        key = _settle(self._generator.initial_seed()) ^ self._secret
        # Keep the bits that identify the current generator (the lane). With sequence parallelism,
        # megatron-core runs layers with the generator for split tensors, and during recomputation,
        # only these bits show which generator is current.
        if isinstance(layer, MultiTokenPredictionLayer):
            number = (1 << _LAYER_BITS) - layer.layer_number
        else:
            number = number_in_model(layer)
        self._seed(
            key >> _TIME_SHIFT << _TIME_SHIFT | number << _LANE_BITS, lane=key % (1 << _LANE_BITS)
        )

    def _seed(self, key: int, *, lane: int) -> None:
        """Seeds the current generator and the generator for split tensors.

        This method must be fast, because it is called for every layer in every forward pass.

        Args:
            key: Number that encodes step, microbatch and layer, with 0 in the bits that identify
                the generator.
            lane: Number that identifies the current generator.
        """
        self._generator.manual_seed(_stir((key | lane) ^ self._secret))
        split = self._spare.manual_seed(_stir((key | self._split_lane) ^ self._secret))
        states = self._tracker.get_states()
        # Create a new state tensor each time, because recomputation keeps the previous tensor and
        # restores it later.
        states[_MODEL_PARALLEL_RNG_TRACKER_NAME] = split.get_state()
        self._tracker.set_states(states)


def _layers_of(chunks: Iterable[torch.nn.Module]) -> Iterator[Any]:
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TransformerLayer | MultiTokenPredictionLayer):
                yield module


# Constants of an invertible 64-bit hash function, in which each input bit affects about half of the
# output bits.
# Source: D. Stafford, "Better Bit Mixing", variant 13; known as the finalizer of SplitMix64.
_FACTOR_1 = 0xBF58476D1CE4E5B9
_FACTOR_2 = 0x94D049BB133111EB
_INVERSE_1, _INVERSE_2 = (pow(factor, -1, 1 << 64) for factor in (_FACTOR_1, _FACTOR_2))


def _stir(key: int) -> int:
    key = (key ^ key >> 30) * _FACTOR_1 & _WORD
    key = (key ^ key >> 27) * _FACTOR_2 & _WORD
    return key ^ key >> 31


def _settle(seed: int) -> int:
    """Inverts the hash function :func:`_stir`: returns the key whose hash is ``seed``."""
    seed = (seed ^ seed >> 31 ^ seed >> 62) * _INVERSE_2 & _WORD
    seed = (seed ^ seed >> 27 ^ seed >> 54) * _INVERSE_1 & _WORD
    return seed ^ seed >> 30 ^ seed >> 60


class HalfPrecisionChunk(Float16Module):
    """Wraps a chunk that computes in 16 bits, for any placement of stages.

    megatron-core's wrapper assumes that the first stage is the first chunk of the first rank, and
    that the last stage is the last chunk of the last rank. This class instead asks the chunk
    whether it is the first or the last stage.
    """

    def forward(self, *inputs: Any, fp32_output: bool = True, **kwargs: Any) -> Any:
        """Runs the chunk in 16 bits.

        The inputs of the first stage are converted to 16 bits. The output of the last stage is
        converted to 32 bits unless ``fp32_output`` is false.
        """
        if self.module.pre_process:
            inputs = fp32_to_float16(inputs, self.float16_convertor)
        output = self.module(*inputs, **kwargs)
        return float16_to_fp32(output) if self.module.post_process and fp32_output else output
