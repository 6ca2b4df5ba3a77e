"""The stages of one rank as the executor sees them, during one step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.adaptive.engine.meter import ActivationMeter
from megatron.adaptive.engine.weight_gradient import WeightGradientStore
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.modules.program import RandomKey, StageProgram

__all__ = ["Held", "ProgramStages"]


class Held:
    """Parameters that :class:`ActivationMeter` does not count as activations."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def parameters(self) -> Iterator[torch.Tensor]:
        """Return all tensors that the rank holds anyway."""
        return iter(self._tensors.values())


@dataclass(slots=True)
class _Pending:
    """What a forward leaves for its backward."""

    leaves: list[torch.Tensor]
    edges: list[GradientEdge]
    loss: torch.Tensor | None


class ProgramStages:
    """One step of a rank's stages; see :class:`~megatron.adaptive.engine.executor.Stages`.

    Gradients are those of the mean loss over the microbatches, times ``scale``.

    Args:
        programs: of the rank's chunks, in order.
        microbatches: entries of the batch that they use, by microbatch.
        random: seeds what they draw.
        held: parameters and buffers of the rank.
        device: where it runs.
        meter: measures activations once.
        stores: one per chunk to split backwards, ``None`` for whole ones.
        scale: what the loss is multiplied with.
        forward_only: evaluation.

    Attributes:
        losses: of the microbatches, detached and not scaled; empty without the last stage.
    """

    def __init__(
        self,
        *,
        programs: Sequence[StageProgram],
        microbatches: Sequence[Mapping[str, torch.Tensor]],
        random: RandomKey,
        held: Held,
        device: torch.device,
        meter: ActivationMeter,
        stores: Sequence[WeightGradientStore] | None = None,
        scale: float = 1.0,
        forward_only: bool = False,
    ) -> None:
        self.losses: list[torch.Tensor] = []
        self._programs = programs
        self._microbatches = microbatches
        self._random = random
        self._held: Any = held
        self._device = device
        self._meter = meter
        self._stores = None if forward_only else stores
        self._factor = scale / len(microbatches)
        self._forward_only = forward_only
        self._pending: dict[tuple[int, int], _Pending] = {}
        for store in self._stores or ():
            store.clear()
            store.active = True

    def forward(self, chunk: int, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """See :class:`~megatron.adaptive.engine.executor.Stages`."""
        program = self._programs[chunk]
        given = [] if received is None else program.forward_layout.unpack(received)
        if self._forward_only:
            with torch.no_grad():
                sent, loss = self._run(chunk, microbatch, given)
        else:
            given = program.require_gradients(given)
            with self._meter.measure(chunk, self._held):
                sent, loss = self._run(chunk, microbatch, given)
            scaled = None if loss is None else loss * self._factor
            edges = [get_gradient_edge(one) for one in program.differentiated(sent)]
            self._pending[chunk, microbatch] = _Pending(given, edges, scaled)
        if loss is not None:
            self.losses.append(loss.detach())
            return loss
        return program.next_forward.pack(sent, self._device)

    def _run(
        self, chunk: int, microbatch: int, given: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        return self._programs[chunk].forward(
            self._microbatches[microbatch],
            given,
            random=lambda call: self._random.apply(microbatch, call),
            store=None if self._stores is None else self._stores[chunk],
        )

    def release(self, chunk: int, microbatch: int) -> None:
        """See :class:`~megatron.adaptive.engine.executor.Stages`; nothing is held on to."""

    def activation_bytes(self, chunk: int) -> int:
        """See :class:`~megatron.adaptive.engine.executor.Stages`."""
        return self._meter.bytes_of(chunk)

    def retained_bytes(self, chunk: int) -> int:
        """See :class:`~megatron.adaptive.engine.executor.Stages`."""
        return 0 if self._stores is None else self._stores[chunk].microbatch_bytes

    def backward(
        self, chunk: int, microbatch: int, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """See :class:`~megatron.adaptive.engine.executor.Stages`."""
        pending = self._pending.pop((chunk, microbatch))
        if self._stores is None:
            return self._backward(chunk, pending, gradient)
        with self._stores[chunk].collect(microbatch):
            return self._backward(chunk, pending, gradient)

    def _backward(
        self, chunk: int, pending: _Pending, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        program = self._programs[chunk]
        if pending.loss is not None:
            if pending.loss.requires_grad:
                torch.autograd.backward(pending.loss)
        elif pending.edges:
            assert gradient is not None
            # Values that the stage hands on are leaves: their gradients add up with its own use.
            torch.autograd.backward(pending.edges, program.next_backward.unpack(gradient))
        if not program.plan.received:
            return None
        return program.backward_layout.pack(program.gradients_of(pending.leaves), self._device)

    def weights(self, chunk: int, microbatch: int, piece: int, pieces: int) -> None:
        """See :class:`~megatron.adaptive.engine.executor.Stages`."""
        if self._stores is None:
            raise ScheduleError(
                f"weight gradients of chunk {chunk}, microbatch {microbatch} were asked for in a "
                "step whose backwards are whole; give split_backward=True"
            )
        self._stores[chunk].run(microbatch, piece, pieces)

    def finish(self) -> None:
        """End the step, normally or after an error."""
        self._pending.clear()
        for store in self._stores or ():
            store.active = False
            store.clear()
