"""Runs the calls of a stage for the executor: forward, backward and weight-gradient passes.

A stage sends the same list of tensors for all microbatches with equal signatures (see
``batch.Signature``). A single tensor is sent directly. Several tensors are packed into one block of
bytes, at offsets computed from their shapes and dtypes. The receiver uses views of the block as
tensors::

    byte 0            64                        block
         | tensor 0   .. | tensor 1             .. |

The backward pass may be split into B (gradients of inputs) and W (gradients of weights). W computes
the weight gradients of three kinds of calls whose weight is a parameter: ``linear``, ``addmm`` with
a weight of shape ``[in, out]``, and ``embedding``. For all other calls, B computes both kinds of
gradients.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import compress, groupby
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.fx.node import map_aggregate

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
from megatron.adaptive.modules.host_memory import MUTABLE, copied
from megatron.adaptive.modules.random_key import RandomKey
from megatron.adaptive.modules.recompute import RecomputedCalls, changed_buffers
from megatron.adaptive.modules.segment_meter import SegmentMeter
from megatron.adaptive.modules.tape import Call, Ref, SegmentWork, Tape, Value

# Functions whose second argument may be a device.
_MOVES = (torch.Tensor.to, torch.Tensor.cuda)


class _Step:
    """Runs a recorded call with the tensors of a microbatch.

    Args:
        call: Recorded call.
        number: Index of the call on the tape.
        drops: Tape indices of the tensors that no later call needs.
        tape: Recorded forward pass.
        device: Device on which the call runs.
    """

    __slots__ = ("_arguments", "_call", "_device_type", "_flat", "drops", "layer", "number")

    def __init__(
        self, call: Call, number: int, drops: Sequence[int], tape: Tape, device: torch.device
    ) -> None:
        self._call = call
        self._flat = not call.kwargs and all(
            type(argument) is Ref or not isinstance(argument, (tuple, list, dict, slice, *MUTABLE))
            for argument in call.args
        )
        self._arguments: Any = (call.args, call.kwargs)
        # If both devices are CPUs, no device in the arguments has to be replaced.
        if tape.device.type != "cpu" or device.type != "cpu":
            self._move(tape.device.type, device)
        self._device_type = device.type
        self.number = number
        self.drops = tuple(drops)
        self.layer = deferred_layer(call, tape)

    def _move(self, source: str, target: torch.device) -> None:
        """Replaces devices of type ``source`` in the call's arguments with ``target``.

        The index of the recorded device is ignored. For example, all ranks may have recorded the
        model on GPU 0, while each rank runs its stages on a different GPU.
        """

        def leaf(argument: Any) -> Any:
            if isinstance(argument, torch.device):
                return target if argument.type == source else argument
            is_source = isinstance(argument, str) and re.fullmatch(rf"{source}(:\d+)?", argument)
            return str(target) if is_source else argument

        args, kwargs = map_aggregate(self._arguments, leaf)
        # torch interprets an integer as the index of a GPU.
        if type(kwargs.get("device")) is int:
            kwargs = {**kwargs, "device": target}
        if self._call.function in _MOVES and len(args) > 1 and type(args[1]) is int:
            args = (args[0], target, *args[2:])
        self._arguments = (args, kwargs)

    def run(
        self, env: dict[int, torch.Tensor], store: WeightGradientStore | None, ambient: Any
    ) -> None:
        """Runs the call on the tensors in ``env``, and stores the results in ``env``.

        Args:
            env: Tensors, keyed by their index on the tape.
            store: Queue of deferred weight-gradient work; ``None`` if the backward pass is not
                split.
            ambient: Autocast dtype of the surrounding context; ``None`` if autocast is off.
        """
        call = self._call
        if self.layer is not None and store is not None:
            output = self.layer.run(env, store, call.autocast)
            if output is not None:
                env[call.outputs[0][0]] = output
                return
        args, kwargs = self._arguments
        if self._flat:
            args = [env[arg.value] if type(arg) is Ref else arg for arg in args]
        else:

            def tensor_of(argument: Any) -> Any:
                # Copy arrays for each run, because a result may share memory with an array.
                return env[argument.value] if type(argument) is Ref else copied(argument)

            args, kwargs = map_aggregate(self._arguments, tensor_of)
        if call.with_grad and call.autocast == ambient:
            result = call.function(*args, **kwargs)
        else:
            with self._context(ambient):
                result = call.function(*args, **kwargs)
        for value, path in call.outputs:
            part = result
            for key in path:
                part = part[key]
            env[value] = part
        for old, new in call.changes:
            env[new] = env[old]

    def _context(self, ambient: Any) -> contextlib.ExitStack:
        """Returns a context manager with the call's recorded gradient mode and autocast."""
        call = self._call
        stack = contextlib.ExitStack()
        if not call.with_grad:
            stack.enter_context(torch.no_grad())
        if call.autocast != ambient:
            is_enabled = call.autocast is not None
            stack.enter_context(
                torch.autocast(self._device_type, dtype=call.autocast, enabled=is_enabled)
            )
        return stack


@dataclass(frozen=True, kw_only=True, eq=False)
class _Part:
    """Contains consecutive calls of a stage, which are recomputed together or not at all.

    Attributes:
        steps: Calls in execution order.
        segment: Index of the segment to which the calls belong.
        recomputed: Object that recomputes the calls in the backward pass; ``None`` to keep results.
    """

    steps: Sequence[_Step]
    segment: int
    recomputed: RecomputedCalls | None = None


class StageProgram:
    """Runs the forward pass of a stage.

    Args:
        tape: Recorded forward pass.
        plan: Calls of this stage, and the tensors that it receives and sends.
        held: Parameters and buffers of this rank, keyed by name, including all that the stage uses.
        device: Device on which the stage runs.
        recomputed: Ascending ranges of calls on the tape to recompute in the backward pass.

    Attributes:
        plan: Calls of this stage, and the tensors that it receives and sends.
        device: Device on which the stage runs.
        forward_layout: Layout of the activation message from the previous stage.
        backward_layout: Layout of the gradient message to the previous stage.
        next_forward: Layout of the activation message to the next stage.
        next_backward: Layout of the gradient message from the next stage.
        gradients_in: Whether each received tensor requires a gradient.
        gradients_out: Whether each sent tensor requires a gradient.
    """

    def __init__(
        self,
        tape: Tape,
        plan: StagePlan,
        held: Mapping[str, torch.Tensor],
        device: torch.device,
        recomputed: Sequence[range] = (),
    ) -> None:
        self.plan = plan
        self._tape = tape
        self._held = held
        self.device = device
        values = tape.values
        received = [values[number] for number in plan.received]
        sent = [values[number] for number in plan.sent]
        self.gradients_in = [value.requires_grad for value in received]
        self.gradients_out = [value.requires_grad for value in sent]
        self.forward_layout = MessageLayout.of(received)
        self.backward_layout = MessageLayout.of(compress(received, self.gradients_in))
        self.next_forward = MessageLayout.of(sent)
        self.next_backward = MessageLayout.of(compress(sent, self.gradients_out))
        self._sources: list[tuple[int, str, str]] = []
        self._constants: dict[int, torch.Tensor] = {}
        parts = self._divide(self._prepare(), recomputed)
        self._parts_of_segments = [
            (segment, tuple(group)) for segment, group in groupby(parts, lambda part: part.segment)
        ]

    def _prepare(self) -> list[_Step]:
        """Returns the calls of the stage, each with the tensors to free after it."""
        tape = self._tape
        plan = self.plan
        keep = {*plan.sent, *([] if plan.result is None else [plan.result])}
        last: dict[int, int] = {}
        for index, number in enumerate(plan.calls):
            call = tape.calls[number]
            for value_number in (*call.reads, *(old for old, _ in call.changes)):
                last[value_number] = index
            for value_number in (
                *(made for made, _ in call.outputs),
                *(new for _, new in call.changes),
            ):
                last.setdefault(value_number, index)
        for value_number in {**last, **dict.fromkeys(keep)}:
            value = tape.values[value_number]
            if value.source == "constant":
                assert value.tensor is not None
                self._constants[value_number] = value.tensor.detach().to(self.device)
            elif value.source:
                self._sources.append((value_number, value.source, value.name))
        drops: dict[int, list[int]] = {}
        for value_number, index in last.items():
            if value_number not in keep:
                drops.setdefault(index, []).append(value_number)
        return [
            _Step(tape.calls[number], number, drops.get(index, ()), tape, self.device)
            for index, number in enumerate(plan.calls)
        ]

    def _divide(self, steps: Sequence[_Step], recomputed: Sequence[range]) -> list[_Part]:
        """Divides the calls ``steps`` into parts that are recomputed as a whole or not at all.

        ``recomputed`` contains the ranges of calls to recompute, each of which becomes a part. All
        other calls are divided by segment.
        """
        range_of = {number: calls.start for calls in recomputed for number in calls}

        def place(step: _Step) -> tuple[int, int]:
            start = range_of.get(step.number, -1)
            return start, self._segment_of(step.number if start < 0 else start)

        parts = []
        for (start, segment), group in groupby(steps, place):
            members = tuple(group)
            part = _Part(steps=members, segment=segment)
            if start >= 0 and self._has_gradient(members):
                part = replace(part, recomputed=self._recomputed(members))
            parts.append(part)
        return parts

    def _segment_of(self, number: int) -> int:
        """Returns the segment of this stage to which call ``number`` belongs.

        If this stage repeats calls of earlier stages, they belong to its first segment.
        """
        return max(self._tape.calls[number].segment, self.plan.segments.start)

    @cached_property
    def _results(self) -> dict[int, tuple[int, ...]]:
        """Returns the tensors that each segment computes for later segments or stages.

        The result maps segments to tape indices of the tensors that require a gradient.
        """
        tape = self._tape
        made_in: dict[int, int] = {}
        used_later = dict.fromkeys(self.plan.sent)
        if self.plan.result is not None:
            used_later[self.plan.result] = None
        for number in self.plan.calls:
            call = tape.calls[number]
            segment = self._segment_of(number)
            for value in (*call.reads, *(old for old, _ in call.changes)):
                if made_in.get(value, segment) != segment:
                    used_later[value] = None
            for value in (*(made for made, _ in call.outputs), *(new for _, new in call.changes)):
                made_in[value] = segment
        results: dict[int, list[int]] = {}
        for value in used_later:
            if value in made_in and tape.values[value].requires_grad:
                results.setdefault(made_in[value], []).append(value)
        return {segment: tuple(values) for segment, values in results.items()}

    def _has_gradient(self, steps: Sequence[_Step]) -> bool:
        """Returns whether any call in ``steps`` creates a tensor that requires a gradient."""
        tape = self._tape
        return any(
            tape.values[made].requires_grad
            for step in steps
            for made, _ in tape.calls[step.number].outputs
        )

    def _recomputed(self, steps: Sequence[_Step]) -> RecomputedCalls:
        """Returns an object that runs ``steps``, and recomputes them in the backward pass."""
        tape = self._tape
        calls = [tape.calls[step.number] for step in steps]
        made = {value for call in calls for value, _ in call.outputs}
        made |= {new for call in calls for old, new in call.changes if new != old}
        reads = dict.fromkeys(
            number
            for call in calls
            for number in (*call.reads, *(old for old, _ in call.changes))
            if number not in made
        )
        dropped = {number for step in steps for number in step.drops}
        changed = changed_buffers(tape)
        return RecomputedCalls(
            fixed=tuple(number for number in reads if tape.values[number].source),
            copied=tuple(number for number in reads if number in changed),
            inputs=tuple(number for number in reads if not tape.values[number].source),
            results=tuple(sorted(made - dropped)),
            drops=tuple(number for number in reads if number in dropped),
        )

    def forward(
        self,
        inputs: Mapping[str, torch.Tensor],
        received: Sequence[torch.Tensor],
        *,
        random: Callable[[int], None],
        store: WeightGradientStore | None = None,
        meter: SegmentMeter | None = None,
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Runs the forward pass of the stage.

        Args:
            inputs: Tensors of the microbatch, keyed by the name of the batch entry.
            received: Tensors from the previous stage, as leaves of this stage's autograd graph.
            random: Function that seeds the random generator before a call that draws random
                numbers. Its argument is the index of the call.
            store: Queue of deferred weight-gradient work; ``None`` if the backward pass is not
                split.
            meter: Object that times the segments; ``None`` if this pass is not measured.

        Returns:
            Tensors to send, in the order of the plan, and the loss (``None`` for all stages except
                the last).
        """
        env: dict[int, torch.Tensor] = dict(self._constants)
        env.update(zip(self.plan.received, received, strict=True))
        for number, source, name in self._sources:
            env[number] = inputs[name] if source == "input" else self._held[name]
        for number in self.plan.copied:
            env[number] = env[number].clone()
        ambient = self._tape.autocast
        with _NOTHING if ambient is None else torch.autocast(self.device.type, dtype=ambient):
            for segment, parts in self._parts_of_segments:
                if meter is not None:
                    meter.enters(segment)
                for part in parts:
                    if part.recomputed is None or not torch.is_grad_enabled():
                        self._run(part.steps, random, store, env)
                    else:
                        part.recomputed.run(env, partial(self._run, part.steps, random, store))
                if meter is not None:
                    meter.watch(segment, (env[value] for value in self._results.get(segment, ())))
            if meter is not None:
                meter.enters(None)
        sent = [env[number] for number in self.plan.sent]
        return sent, None if self.plan.result is None else env[self.plan.result]

    def _run(
        self,
        steps: Sequence[_Step],
        random: Callable[[int], None],
        store: WeightGradientStore | None,
        env: dict[int, torch.Tensor],
    ) -> None:
        """Runs the calls ``steps`` on ``env``. :meth:`forward` describes the other arguments."""
        calls = self._tape.calls
        ambient = self._tape.autocast
        for step in steps:
            if calls[step.number].is_random:
                random(step.number)
            step.run(env, store, ambient)
            for value_number in step.drops:
                del env[value_number]


_NOTHING = contextlib.nullcontext()


@dataclass(frozen=True, kw_only=True, eq=False)
class RankPrograms:
    """Contains the programs of a rank's stages for all microbatches with the same signature.

    Attributes:
        by_mode: Programs of this rank's chunks (stages) for training, evaluation or both.
        meter: Object that measures the size of each chunk's activations.
        segment_bytes: Size in bytes of the tensors that require a gradient, in each segment of the
            model; zeros if training is not recorded.
        segment_work: Operation counts of each segment of the model for a microbatch, taken from the
            training recording if there is one, otherwise from the evaluation recording.
        frozen_stages: Number of leading pipeline stages through which no gradient flows; ``None``
            if training is not recorded.
    """

    by_mode: Mapping[Literal["training", "evaluation"], Sequence[StageProgram]]
    meter: ActivationMeter
    segment_bytes: tuple[int, ...]
    segment_work: tuple[SegmentWork, ...]
    frozen_stages: int | None

    @property
    def work(self) -> float:
        """Returns the operation count of the whole model for a microbatch."""
        return sum(work.total for work in self.segment_work)

    @property
    def activation_bytes(self) -> int:
        """Returns the total size in bytes of the tensors that require a gradient in the model."""
        return sum(self.segment_bytes)

    def programs(self, *, forward_only: bool) -> Sequence[StageProgram]:
        """Returns the programs for evaluation if ``forward_only``, otherwise those for training."""
        return self.by_mode["evaluation" if forward_only else "training"]

    def with_modes_of(self, other: RankPrograms) -> RankPrograms:
        """Returns these programs combined with ``other``, which were recorded in another mode."""
        return RankPrograms(
            by_mode={**self.by_mode, **other.by_mode},
            meter=self.meter,
            segment_bytes=max(self.segment_bytes, other.segment_bytes, key=sum),
            segment_work=max(self, other, key=lambda programs: programs.work).segment_work,
            frozen_stages=(
                other.frozen_stages if self.frozen_stages is None else self.frozen_stages
            ),
        )


@dataclass(slots=True)
class _Pending:
    """Contains the tensors that a forward pass keeps for its backward pass."""

    leaves: list[torch.Tensor]
    edges: list[GradientEdge]
    loss: torch.Tensor | None


_NOTHING_PENDING = _Pending([], [], None)


@dataclass(kw_only=True, eq=False)
class ProgramStages(SplitStages):
    """Runs the forward and backward passes of a rank's stages during one step.

    The gradients are those of a weighted sum of the microbatches' losses, multiplied by ``scale``.
    :class:`~megatron.adaptive.engine.executor.Stages` describes the methods, which the executor
    calls.

    Attributes:
        programs: Programs of this rank's chunks (stages) for each microbatch.
        microbatches: Batch entries that the programs use, keyed by name, for each microbatch.
        random: Object that seeds the random generator before each call that draws random numbers.
        held: Parameters and buffers of this rank, keyed by their names in the model.
        device: Device on which the stages run.
        meters: Objects that measure the activations of each chunk, one object per microbatch.
        stores: Queues of deferred weight-gradient work, one per chunk; ``None`` if the backward
            pass is not split.
        scale: Factor by which the loss is multiplied, such as the loss scale of fp16.
        loss_weights: Weight of each microbatch's loss; ``None`` computes the mean. Microbatches
            with weight 0 add no gradient.
        forward_only: Whether to run only forward passes, as in evaluation.
        frozen_chunks: Number of this rank's leading chunks that run no backward passes, because no
            gradient flows through them.
        meter: Object that times the segments; ``None`` if this step is not measured.
        losses: Losses of the microbatches, detached and unscaled; empty on a rank without the last
            stage.
    """

    programs: Sequence[Sequence[StageProgram]]
    microbatches: Sequence[Mapping[str, torch.Tensor]]
    random: RandomKey
    held: Mapping[str, torch.Tensor]
    device: torch.device
    meters: Sequence[ActivationMeter]
    stores: Sequence[WeightGradientStore] | None = None
    scale: float = 1.0
    loss_weights: Sequence[float] | None = None
    forward_only: bool = False
    frozen_chunks: int = 0
    meter: SegmentMeter | None = None

    def __post_init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        count = len(self.microbatches)
        self._factors = (
            [self.scale / count] * count
            if self.loss_weights is None
            else [self.scale * weight for weight in self.loss_weights]
        )
        self._pending: dict[tuple[int, int], _Pending] = {}
        super().__init__(None if self.forward_only else self.stores)

    def forward(self, chunk: int, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        program = self.programs[microbatch][chunk]
        values = [] if received is None else program.forward_layout.unpack(received)
        if self.forward_only or chunk < self.frozen_chunks:
            with torch.no_grad():
                sent, loss = self._run(chunk, microbatch, values)
        else:
            pairs = zip(values, program.gradients_in, strict=True)
            values = [
                value.detach().requires_grad_(requires_grad) for value, requires_grad in pairs
            ]
            with self.meters[microbatch].measure(chunk, self.held.values()):
                sent, loss = self._run(chunk, microbatch, values)
            scaled = None if loss is None else loss * self._factors[microbatch]
            edges = [get_gradient_edge(value) for value in compress(sent, program.gradients_out)]
            # Keep the received tensors only if the stage has a backward pass.
            if edges or scaled is not None:
                self._pending[chunk, microbatch] = _Pending(values, edges, scaled)
        if loss is not None:
            self.losses.append(loss.detach())
            return loss
        return program.next_forward.pack(sent, self.device)

    def _run(
        self, chunk: int, microbatch: int, values: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        return self.programs[microbatch][chunk].forward(
            self.microbatches[microbatch],
            values,
            random=lambda call: self.random.apply(microbatch, call),
            store=None if self._stores is None else self._stores[chunk],
            meter=self.meter,
        )

    def release(self, chunk: int, microbatch: int) -> None:
        """Does nothing, because the output of a stage is not kept after it is sent."""

    def activation_bytes(self, chunk: int, microbatch: int) -> int:
        return self.meters[microbatch].bytes_of(chunk)

    def backward(
        self, chunk: int, microbatch: int, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        program = self.programs[microbatch][chunk]
        pending = self._pending.pop((chunk, microbatch), _NOTHING_PENDING)
        with _NOTHING if self._stores is None else self._stores[chunk].collect(microbatch):
            if not self._factors[microbatch]:
                # Skip microbatches with weight 0, because a mean over zero items is NaN, and NaN
                # times zero is still NaN.
                pass
            elif pending.loss is not None:
                if pending.loss.requires_grad:
                    torch.autograd.backward(pending.loss)
            elif pending.edges:
                assert gradient is not None
                # A received tensor may also be sent on to the next stage. Because the tensor is a
                # leaf, autograd adds up the gradients of both uses.
                torch.autograd.backward(pending.edges, program.next_backward.unpack(gradient))
            if self.meter is not None:
                self.meter.ends_backward()
        layout = program.backward_layout
        gradients = [leaf.grad for leaf in compress(pending.leaves, program.gradients_in)]
        return layout.pack(gradients or [None] * len(layout.parts), self.device)

    def finish(self) -> None:
        """Frees the tensors that the step keeps for backward passes, even if the step failed."""
        self._pending.clear()
        super().finish()


_ALIGNED = 64


class MessagePart(NamedTuple):
    """Describes the position, shape and dtype of a tensor in a message.

    Attributes:
        offset: Position of the tensor's first byte in the message.
        nbytes: Size of the tensor in bytes.
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
    """

    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """Describes which tensors a message contains, and at which offsets.

    Attributes:
        parts: Description of each tensor in the message, in order.
        nbytes: Size of the message in bytes, at least 1.
    """

    parts: tuple[MessagePart, ...]
    nbytes: int

    @classmethod
    def of(cls, values: Iterable[Value]) -> MessageLayout:
        """Returns the layout of a message that contains the tensors ``values``."""
        parts: list[MessagePart] = []
        offset = 0
        for value in values:
            nbytes = torch.Size(value.shape).numel() * value.dtype.itemsize
            parts.append(MessagePart(offset, nbytes, value.shape, value.dtype))
            offset += -(-nbytes // _ALIGNED) * _ALIGNED
        if len(parts) == 1:
            offset = parts[0].nbytes
        return cls(tuple(parts), max(1, offset))

    def pack(self, tensors: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
        """Returns a message with ``tensors`` on ``device``. An item ``None`` is sent as zeros.

        Raises:
            ConfigError: If the shape or dtype of a tensor differs from the recording.
        """
        for tensor, part in zip(tensors, self.parts, strict=True):
            if tensor is not None and (tensor.shape != part.shape or tensor.dtype != part.dtype):
                raise ConfigError(_difference_of(tensor, part))
        if len(self.parts) == 1:
            single = tensors[0]
            if single is None:
                return torch.zeros(self.parts[0].shape, dtype=self.parts[0].dtype, device=device)
            return single.detach()
        block = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        for tensor, part in zip(tensors, self.parts, strict=True):
            view = _view(block, part)
            if tensor is None:
                view.zero_()
            else:
                view.copy_(tensor.detach())
        return block

    def unpack(self, message: torch.Tensor) -> list[torch.Tensor]:
        """Returns the tensors in ``message`` as views of its memory."""
        if len(self.parts) == 1:
            return [message]
        return [_view(message, part) for part in self.parts]


def _difference_of(tensor: torch.Tensor, part: MessagePart) -> str:
    """Returns the error message for a ``tensor`` that differs from its description in ``part``."""
    sent = f"a tensor of shape {list(tensor.shape)} and {tensor.dtype} is sent to the next stage"
    if tensor.shape == part.shape and tensor.is_floating_point() and part.dtype.is_floating_point:
        return (
            f"{sent}, but the recording has {part.dtype}, probably because the model was recorded "
            "on another type of device, for which autocast chooses other dtypes; move the model "
            "to the device of the stage before the Pipeline is created, or cast the tensor to "
            "float32 before the cut point"
        )
    return (
        f"{sent}, but the recording has {list(part.shape)} and {part.dtype}, so shape or dtype "
        "depends on values of the batch; add the batch entry with these values to "
        "decisive_entries, or move the cut point"
    )


def _view(block: torch.Tensor, part: MessagePart) -> torch.Tensor:
    piece = block[part.offset : part.offset + part.nbytes]
    return piece.view(part.dtype).view(part.shape)


@dataclass(frozen=True, slots=True)
class _Deferred:
    """Describes a recorded call whose weight gradient can be deferred.

    Attributes:
        activation: Reference (:class:`Ref`) to the input of the layer.
        weight: Reference (:class:`Ref`) to the weight.
        bias: Reference (:class:`Ref`) to the bias; ``None`` if the layer has no bias.
        kind: Kind of the layer: ``linear``, ``addmm`` or ``embedding``.
        padding: Row of the embedding that gets no gradient (``padding_idx``); -1 if there is no
            such row.
        by_frequency: Value of the embedding's option ``scale_grad_by_freq``.
        is_unsupported: Whether the weight gradient cannot be deferred because of an option of the
            call.
    """

    activation: Any
    weight: Any
    bias: Any = None
    kind: str = "linear"
    padding: int = -1
    by_frequency: bool = False
    is_unsupported: bool = False

    def run(
        self, env: dict[int, torch.Tensor], store: WeightGradientStore, dtype: torch.dtype | None
    ) -> torch.Tensor | None:
        """Runs the layer and returns its output, and defers its weight gradient.

        Returns ``None`` without running the layer if the weight gradient cannot be deferred.

        ``env`` contains tensors, keyed by their index on the tape, ``store`` is the queue of
        deferred weight-gradient work, and ``dtype`` is the autocast dtype.
        """
        weight: Any = env[self.weight.value]
        bias: Any = None if self.bias is None else env[self.bias.value]
        # Do not defer if the user has added hooks, because hooks run only if autograd computes the
        # gradient.
        if not is_deferring(store, weight) or _has_hooks(weight) or _has_hooks(bias):
            return None
        call: LayerCall
        if self.kind == "embedding":
            call = EmbeddingCall(weight, self.padding, self.by_frequency)
        else:
            call = LinearCall(weight, bias, self.kind == "addmm", dtype)
        return defer(call, env[self.activation.value], store)


def _has_hooks(parameter: torch.Tensor | None) -> bool:
    """Returns whether the user has added gradient hooks to ``parameter``."""
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(parameter, name, None) for name in hooks)


def _addmm(bias: Any, activation: Any, weight: Any) -> _Deferred:
    return _Deferred(activation, weight, bias, "addmm", is_unsupported=bias is None)


def _embedding(
    activation: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> _Deferred:
    padding = -1 if padding_idx is None else padding_idx
    is_unsupported = max_norm is not None or sparse or padding < -1
    return _Deferred(
        activation, weight, None, "embedding", padding, scale_grad_by_freq, is_unsupported
    )


def _aten_embedding(
    weight: Any,
    activation: Any,
    padding: int = -1,
    by_frequency: bool = False,
    sparse: bool = False,
) -> _Deferred:
    return _Deferred(activation, weight, None, "embedding", padding, by_frequency, sparse)


_DEFERRING: Mapping[Any, Callable[..., _Deferred]] = {
    F.linear: _Deferred,
    torch.ops.aten.linear.default: _Deferred,
    torch.addmm: _addmm,
    torch.ops.aten.addmm.default: _addmm,
    F.embedding: _embedding,
    torch.ops.aten.embedding.default: _aten_embedding,
}


def deferred_layer(call: Call, tape: Tape) -> _Deferred | None:
    """Returns ``call`` as a layer that defers its weight gradient, or ``None`` if it cannot."""
    make = _DEFERRING.get(call.function)
    if make is None or not call.with_grad or call.changes or len(call.outputs) != 1:
        return None
    try:
        deferred = make(*call.args, **call.kwargs)
    except TypeError:
        # The call has an argument that the functions in _DEFERRING do not support.
        return None
    weights = [ref for ref in (deferred.weight, deferred.bias) if ref is not None]
    refs = (deferred.activation, *weights)
    if deferred.is_unsupported or not all(isinstance(ref, Ref) for ref in refs):
        return None
    activation, *parameters = (tape.values[ref.value] for ref in refs)
    dtype = parameters[0].dtype
    if any(value.source != "parameter" or value.dtype != dtype for value in parameters):
        return None
    if deferred.kind != "embedding" and activation.dtype != dtype and call.autocast is None:
        return None
    if deferred.kind == "addmm" and len(activation.shape) != 2:
        return None
    return deferred
