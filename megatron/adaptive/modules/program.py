"""Runs the calls of a stage, as the executor asks for them: forwards, backwards, weight gradients.

A border between stages has a fixed row of tensors, the same for every microbatch. One alone travels
as it is; several are laid into one block of bytes, each at a place that follows from shapes and
types, so that nothing but the block is sent. The receiver takes views of it::

    byte 0            64                        block
         | tensor 0   .. | tensor 1             .. |

Where backwards are split, the weight gradients of three kinds of calls are put off: ``linear``,
``addmm`` with a weight of ``[in, out]`` and ``embedding``, each with a parameter as weight.
Everything else has its weight gradient in B.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.fx.node import map_aggregate

from megatron.adaptive.accelerator import default_generator
from megatron.adaptive.engine.executor import ActivationMeter
from megatron.adaptive.engine.weight_gradient import (
    EmbeddingCall,
    LayerCall,
    LinearCall,
    SplitStages,
    WeightGradientStore,
    defer,
    is_deferring,
)
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules.cutting import StagePlan
from megatron.adaptive.modules.recording import Call, Ref, Tape, Value


class RandomKey:
    """Seeds the generator of the device from where and when a number is drawn.

    So neither the order of work nor the cut into stages changes a random number, nor do replicas
    that share a batch one after the other.

    Args:
        seed: the run's seed.
        dp_rank: the replica; each has numbers of its own.
        device: whose generator is used.

    Attributes:
        seed: as given; another one counts from the next number on.
        step: of the training.
        count: microbatches of a replica in this step.
    """

    def __init__(self, seed: int, dp_rank: int, device: torch.device) -> None:
        self.seed = seed
        self._dp_rank = dp_rank
        self.generator = default_generator(device)
        self.step = 0
        self.count = 0

    def apply(self, microbatch: int, call: int) -> None:
        """Set the generator for one call of one microbatch."""
        number = self._dp_rank * self.count + microbatch
        place = struct.pack("<qqqq", self.seed, self.step, number, call)
        digest = hashlib.blake2b(place, digest_size=8).digest()
        self.generator.manual_seed(int.from_bytes(digest, "little"))


class _Step:
    """One call, prepared: what it reads is put into its arguments, what it makes is taken out."""

    __slots__ = ("_call", "_flat", "_given", "drops", "layer", "number")

    def __init__(self, call: Call, number: int, drops: Sequence[int], tape: Tape) -> None:
        self._call = call
        self._flat = not call.kwargs and all(
            type(one) is Ref or not isinstance(one, (tuple, list, dict, slice)) for one in call.args
        )
        self._given: Any = (call.args, call.kwargs)
        self.number = number
        self.drops = tuple(drops)
        self.layer = _deferred(call, tape)

    def move(self, source: torch.device, target: torch.device) -> None:
        """Take devices among the arguments for ``target`` where they say ``source``."""

        def leaf(one: Any) -> Any:
            if isinstance(one, torch.device):
                return target if one.type == source.type else one
            return str(target) if isinstance(one, str) and one == str(source) else one

        self._given = map_aggregate(self._given, leaf)

    def run(
        self, env: dict[int, torch.Tensor], store: WeightGradientStore | None, ambient: Any
    ) -> None:
        """Run the call on the values of ``env``, and put there what it makes."""
        call = self._call
        if self.layer is not None and store is not None:
            output = self.layer.run(env, store, call.autocast)
            if output is not None:
                env[call.outputs[0][0]] = output
                return
        args, kwargs = self._given
        if self._flat:
            args = [env[one.value] if type(one) is Ref else one for one in args]
        else:
            args, kwargs = map_aggregate(
                self._given, lambda one: env[one.value] if type(one) is Ref else one
            )
        if call.with_grad and call.autocast == ambient:
            result = call.function(*args, **kwargs)
        else:
            with self._context(env, ambient):
                result = call.function(*args, **kwargs)
        for value, path in call.outputs:
            one = result
            for key in path:
                one = one[key]
            env[value] = one
        for old, new in call.changes:
            env[new] = env[old]

    def _context(self, env: Mapping[int, torch.Tensor], ambient: Any) -> contextlib.ExitStack:
        call, stack = self._call, contextlib.ExitStack()
        if not call.with_grad:
            stack.enter_context(torch.no_grad())
        if call.autocast != ambient:
            device = next((one.device.type for one in env.values()), "cpu")
            stack.enter_context(
                torch.autocast(device, dtype=call.autocast, enabled=call.autocast is not None)
            )
        return stack


class StageProgram:
    """A stage that can be run.

    Args:
        tape: the forward.
        plan: this stage's part of it.
        held: parameters and buffers by name; those of the stage must be there.
        device: where it runs.

    Attributes:
        plan: as given.
        forward_layout, backward_layout: of the messages to the stage before: what it sends with a
            forward, what it gets back with a backward.
        next_forward, next_backward: likewise of those to the stage after.
        gradients_in, gradients_out: whether each value that it receives or sends has a gradient.
    """

    def __init__(
        self, tape: Tape, plan: StagePlan, held: Mapping[str, torch.Tensor], device: torch.device
    ) -> None:
        self.plan = plan
        self._tape = tape
        self._held = held
        self._device = device
        values = tape.values
        received, sent = ([values[n] for n in row] for row in (plan.received, plan.sent))
        self.gradients_in = [value.requires_grad for value in received]
        self.gradients_out = [value.requires_grad for value in sent]
        self.forward_layout = MessageLayout.of(received)
        self.backward_layout = MessageLayout.of(compress(received, self.gradients_in))
        self.next_forward = MessageLayout.of(sent)
        self.next_backward = MessageLayout.of(compress(sent, self.gradients_out))
        self._sources: list[tuple[int, str, str]] = []
        self._constants: dict[int, torch.Tensor] = {}
        self._steps = self._prepare()

    def _prepare(self) -> list[_Step]:
        tape, plan = self._tape, self.plan
        keep = {*plan.sent, *([] if plan.result is None else [plan.result])}
        last: dict[int, int] = {}
        for place, number in enumerate(plan.calls):
            call = tape.calls[number]
            for one in (*call.reads, *(old for old, _ in call.changes)):
                last[one] = place
            for one in (*(made for made, _ in call.outputs), *(new for _, new in call.changes)):
                last.setdefault(one, place)
        for one in {**last, **dict.fromkeys(keep)}:
            value = tape.values[one]
            if value.source == "constant":
                assert value.tensor is not None
                self._constants[one] = value.tensor.detach().to(self._device)
            elif value.source:
                self._sources.append((one, value.source, value.name))
        drops: dict[int, list[int]] = {}
        for one, place in last.items():
            if one not in keep:
                drops.setdefault(place, []).append(one)
        steps = [
            _Step(tape.calls[number], number, drops.get(place, ()), tape)
            for place, number in enumerate(plan.calls)
        ]
        if tape.device.type != self._device.type:
            for step in steps:
                step.move(tape.device, self._device)
        return steps

    def forward(
        self,
        inputs: Mapping[str, torch.Tensor],
        received: Sequence[torch.Tensor],
        *,
        random: Callable[[int], None],
        store: WeightGradientStore | None = None,
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Run the stage.

        Args:
            inputs: the microbatch.
            received: values of the stage before, leaves of this stage's graph.
            random: called with a call's number before it draws random numbers.
            store: takes weight gradients that are put off.

        Returns:
            What the stage sends, in the order of the plan, and the loss on the last stage.
        """
        env: dict[int, torch.Tensor] = dict(self._constants)
        env.update(zip(self.plan.received, received, strict=True))
        for number, source, name in self._sources:
            env[number] = inputs[name] if source == "input" else self._held[name]
        for number in self.plan.copied:
            env[number] = env[number].clone()
        calls, ambient = self._tape.calls, self._tape.autocast
        with _NOTHING if ambient is None else torch.autocast(self._device.type, dtype=ambient):
            for step in self._steps:
                if calls[step.number].is_random:
                    random(step.number)
                step.run(env, store, ambient)
                for one in step.drops:
                    del env[one]
        sent = [env[number] for number in self.plan.sent]
        return sent, None if self.plan.result is None else env[self.plan.result]


_NOTHING = contextlib.nullcontext()


@dataclass(slots=True)
class _Pending:
    """Holds what a forward leaves for its backward."""

    leaves: list[torch.Tensor]
    edges: list[GradientEdge]
    loss: torch.Tensor | None


@dataclass(kw_only=True, eq=False)
class ProgramStages(SplitStages):
    """One step of a rank's stages; see :class:`~megatron.adaptive.engine.executor.Stages`.

    Gradients are those of the mean loss over the microbatches, times ``scale``.

    Attributes:
        programs: of the rank's chunks, in order.
        microbatches: entries of the batch that they use, by microbatch.
        random: seeds what they draw.
        held: parameters and buffers of the rank, by name.
        device: where it runs.
        meter: measures activations once.
        stores: one per chunk to split backwards, ``None`` for whole ones.
        scale: what the loss is multiplied with.
        forward_only: evaluation.
        losses: of the microbatches, detached and not scaled; empty without the last stage.
    """

    programs: Sequence[StageProgram]
    microbatches: Sequence[Mapping[str, torch.Tensor]]
    random: RandomKey
    held: Mapping[str, torch.Tensor]
    device: torch.device
    meter: ActivationMeter
    stores: Sequence[WeightGradientStore] | None = None
    scale: float = 1.0
    forward_only: bool = False

    def __post_init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self._factor = self.scale / len(self.microbatches)
        self._pending: dict[tuple[int, int], _Pending] = {}
        super().__init__(None if self.forward_only else self.stores)

    def forward(self, chunk: int, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        program = self.programs[chunk]
        given = [] if received is None else program.forward_layout.unpack(received)
        if self.forward_only:
            with torch.no_grad():
                sent, loss = self._run(chunk, microbatch, given)
        else:
            pairs = zip(given, program.gradients_in, strict=True)
            given = [one.detach().requires_grad_(wanted) for one, wanted in pairs]
            with self.meter.measure(chunk, self.held.values()):
                sent, loss = self._run(chunk, microbatch, given)
            scaled = None if loss is None else loss * self._factor
            edges = [get_gradient_edge(one) for one in compress(sent, program.gradients_out)]
            self._pending[chunk, microbatch] = _Pending(given, edges, scaled)
        if loss is not None:
            self.losses.append(loss.detach())
            return loss
        return program.next_forward.pack(sent, self.device)

    def _run(
        self, chunk: int, microbatch: int, given: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        return self.programs[chunk].forward(
            self.microbatches[microbatch],
            given,
            random=lambda call: self.random.apply(microbatch, call),
            store=None if self._stores is None else self._stores[chunk],
        )

    def release(self, chunk: int, microbatch: int) -> None:
        """Implements :class:`~megatron.adaptive.engine.executor.Stages`; nothing is held on to."""

    def activation_bytes(self, chunk: int, microbatch: int) -> int:
        return self.meter.bytes_of(chunk)

    def backward(
        self, chunk: int, microbatch: int, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        program, pending = self.programs[chunk], self._pending.pop((chunk, microbatch))
        with _NOTHING if self._stores is None else self._stores[chunk].collect(microbatch):
            if pending.loss is not None:
                if pending.loss.requires_grad:
                    torch.autograd.backward(pending.loss)
            elif pending.edges:
                assert gradient is not None
                # Values that the stage hands on are leaves: their gradients add up with its own.
                torch.autograd.backward(pending.edges, program.next_backward.unpack(gradient))
        if not program.plan.received:
            return None
        gradients = [leaf.grad for leaf in compress(pending.leaves, program.gradients_in)]
        return program.backward_layout.pack(gradients, self.device)

    def finish(self) -> None:
        """End the step, normally or after an error."""
        self._pending.clear()
        super().finish()


_ALIGNED = 64
_Place = tuple[int, int, tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """The tensors of one kind of message.

    Attributes:
        places: of each tensor the first byte, the number of bytes, shape and type.
        nbytes: of the message.
    """

    places: tuple[_Place, ...]
    nbytes: int

    @classmethod
    def of(cls, values: Iterable[Value]) -> MessageLayout:
        """Return the layout of a row of tensors, at least one byte long."""
        places: list[_Place] = []
        offset = 0
        for value in values:
            size = torch.Size(value.shape).numel() * value.dtype.itemsize
            places.append((offset, size, value.shape, value.dtype))
            offset += -(-size // _ALIGNED) * _ALIGNED
        if len(places) == 1:
            offset = places[0][1]
        return cls(tuple(places), max(1, offset))

    def pack(self, tensors: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
        """Return the message of these tensors; ``None`` counts as zeros.

        Raises:
            ConfigError: a tensor has another shape than the sample's.
        """
        for tensor, (_, _, shape, dtype) in zip(tensors, self.places, strict=True):
            if tensor is not None and (tensor.shape != shape or tensor.dtype != dtype):
                raise ConfigError(
                    f"a tensor of {list(tensor.shape)} {tensor.dtype} is to go to the next stage, "
                    f"but with the sample it was {list(shape)} {dtype}: shapes between stages must "
                    "be the same for every microbatch; move the cut point"
                )
        if len(self.places) == 1:
            _, _, shape, dtype = self.places[0]
            alone = tensors[0]
            if alone is None:
                return torch.zeros(shape, dtype=dtype, device=device)
            return alone.detach()
        block = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        for tensor, place in zip(tensors, self.places, strict=True):
            view = _view(block, place)
            if tensor is None:
                view.zero_()
            else:
                view.copy_(tensor.detach())
        return block

    def unpack(self, message: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of a message, views of it."""
        if len(self.places) == 1:
            return [message]
        return [_view(message, place) for place in self.places]


def _view(block: torch.Tensor, place: _Place) -> torch.Tensor:
    offset, size, shape, dtype = place
    return block[offset : offset + size].view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class _Deferred:
    """A recorded call whose weight gradient can be put off.

    Attributes:
        given, weight, bias: the values.
        kind: ``linear``, ``addmm`` or ``embedding``.
        padding: row of an embedding without gradient, -1 for none.
        by_frequency: ``scale_grad_by_freq`` of an embedding.
        is_odd: has an option that is not supported.
    """

    given: Any
    weight: Any
    bias: Any = None
    kind: str = "linear"
    padding: int = -1
    by_frequency: bool = False
    is_odd: bool = False

    def run(
        self, env: dict[int, torch.Tensor], store: WeightGradientStore, dtype: torch.dtype | None
    ) -> torch.Tensor | None:
        """Return the layer's output, ``None`` if it must be computed as recorded."""
        weight: Any = env[self.weight.value]
        if not is_deferring(store, weight):
            return None
        call: LayerCall
        if self.kind == "embedding":
            call = EmbeddingCall(weight, self.padding, self.by_frequency)
        else:
            bias: Any = None if self.bias is None else env[self.bias.value]
            call = LinearCall(weight, bias, self.kind == "addmm", dtype)
        return defer(call, env[self.given.value], store)


def _addmm(bias: Any, given: Any, weight: Any) -> _Deferred:
    return _Deferred(given, weight, bias, "addmm", is_odd=bias is None)


def _embedding(
    given: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> _Deferred:
    padding = -1 if padding_idx is None else padding_idx
    is_odd = max_norm is not None or sparse or padding < -1
    return _Deferred(given, weight, None, "embedding", padding, scale_grad_by_freq, is_odd)


def _aten_embedding(
    weight: Any, given: Any, padding: int = -1, by_frequency: bool = False, sparse: bool = False
) -> _Deferred:
    return _Deferred(given, weight, None, "embedding", padding, by_frequency, sparse)


_DEFERRING: Mapping[Any, Callable[..., _Deferred]] = {
    F.linear: _Deferred,
    torch.ops.aten.linear.default: _Deferred,
    torch.addmm: _addmm,
    torch.ops.aten.addmm.default: _addmm,
    F.embedding: _embedding,
    torch.ops.aten.embedding.default: _aten_embedding,
}


def _deferred(call: Call, tape: Tape) -> _Deferred | None:
    """Return how a call's weight gradient is put off, ``None`` if it cannot be."""
    known = _DEFERRING.get(call.function)
    if known is None or not call.with_grad or call.changes or len(call.outputs) != 1:
        return None
    try:
        found = known(*call.args, **call.kwargs)
    except TypeError:  # options that are not known here
        return None
    weights = [one for one in (found.weight, found.bias) if one is not None]
    if found.is_odd or not all(isinstance(one, Ref) for one in (found.given, *weights)):
        return None
    given, *parameters = (tape.values[one.value] for one in (found.given, *weights))
    if any(one.source != "parameter" or one.dtype != parameters[0].dtype for one in parameters):
        return None
    if found.kind != "embedding" and given.dtype != parameters[0].dtype and call.autocast is None:
        return None
    if found.kind == "addmm" and len(given.shape) != 2:
        return None
    return found
