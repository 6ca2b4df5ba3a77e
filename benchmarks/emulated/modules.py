"""An emulated stage as a module, for runtimes that drive autograd.

::

    input ──> _Input ───┐
                        _Join ──> output ──> _Loss, on the last stage
    weight ─> _Weight ──┘

The backward of ``_Join`` takes in the gradient, that of ``_Input`` sleeps B, that of ``_Weight``
sleeps W. So a runtime that asks autograd for the gradients of the inputs alone runs B alone, and
later, from ``_Join``, W alone. In a whole backward W comes first: what is sent then leaves at the
end of it all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from harness.sleeping_ranks import DTYPE, WIDTH

from .competitors import Competitor
from .scenarios import Draws
from .work import RankWork, WorkError, number_of


class EmulatedChunk(torch.nn.Module):
    """One stage; ``work`` must be set before each step.

    Args:
        stage: its place in pipeline order.
        num_stages: stages of the pipeline.

    Attributes:
        work: what the stages of this rank do in the coming step.
        weight: after a step, its gradient is the number of microbatches in every element.
    """

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        self.stage = stage
        self.is_first = stage == 0
        self.is_last = stage == num_stages - 1
        self.weight = torch.nn.Parameter(torch.zeros(WIDTH, dtype=DTYPE))
        self.work: RankWork | None = None

    def forward(self, received: torch.Tensor) -> torch.Tensor:
        """Runs the stage's forward.

        Args:
            received: output of the stage before; on the first stage ``RankWork.fresh``.

        Returns:
            The output, of the same shape.
        """
        if not received.requires_grad:
            # Data of the first stage. A real one has inner gradients to compute here all the same.
            received = received.detach().requires_grad_()
        microbatch = number_of(received)
        output = _Input.apply(received, self, microbatch)
        # Made after _Input: autograd runs the node that was made last first. It must not see the
        # input itself, or W would lie on the way to the input's gradient.
        side = _Weight.apply(self.weight, received.shape, self, microbatch)
        return _Join.apply(output, side, self, microbatch)

    def prepare(self, work: RankWork) -> None:
        """Prepares a step."""
        self.work = work
        self.weight.grad = None

    def check_gradient(self, num_microbatches: int) -> None:
        """Checks that a step's gradient of the weight contains a part from every microbatch.

        Raises:
            WorkError: it has not.
        """
        self.check_sum(self.weight.grad, num_microbatches)

    def check_sum(self, gradient: torch.Tensor | None, num_microbatches: int) -> None:
        """Checks the gradient of one weight (see :meth:`check_gradient`)."""
        if gradient is None or not bool((gradient == num_microbatches).all()):
            raise WorkError(f"stage {self.stage}: gradient {gradient} after {num_microbatches}")

    def loss(self, output: torch.Tensor) -> torch.Tensor:
        """Returns a scalar whose backward pass starts that of the last stage."""
        return _Loss.apply(output)


class PeerRunner:
    """Runs a schedule of another library. Collective to make.

    Args:
        competitor: which.
        rank: position of this rank in the pipeline.
        num_ranks: ranks of the pipeline.
        make: makes a stage from its place and the number of stages.
    """

    delays_in_transport = False

    def __init__(
        self,
        competitor: Competitor,
        rank: int,
        num_ranks: int,
        make: Callable[[int, int], EmulatedChunk] = EmulatedChunk,
    ) -> None:
        self.placement = competitor.placement(num_ranks)
        self.position = rank
        self.num_microbatches = 0
        self.chunks = [
            make(self.placement.stage_of(rank, chunk), self.placement.num_stages)
            for chunk in range(competitor.num_chunks)
        ]

    def prepare(self, work: RankWork, draws: Draws) -> None:
        """Prepares a step; not timed."""
        self.num_microbatches = draws.num_microbatches
        for chunk in self.chunks:
            chunk.prepare(work)

    def inputs(self, shape: Sequence[int]) -> list[torch.Tensor]:
        """Returns what the first stage takes in the step."""
        like = torch.empty(*shape, dtype=DTYPE)
        return [RankWork.fresh(number, like) for number in range(self.num_microbatches)]

    def finish(self) -> None:
        """Checks the gradients of the weights; not timed."""
        for chunk in self.chunks:
            chunk.check_gradient(self.num_microbatches)


class _Input(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, received: torch.Tensor, chunk: EmulatedChunk, microbatch: int
    ) -> torch.Tensor:
        ctx.chunk, ctx.microbatch = chunk, microbatch
        assert chunk.work is not None
        return chunk.work.forward(chunk.stage, received, microbatch)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        chunk = ctx.chunk
        return chunk.work.input_gradient(chunk.stage, ctx.microbatch, gradient), None, None


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, shape: torch.Size, chunk: EmulatedChunk, microbatch: int
    ) -> torch.Tensor:
        ctx.chunk, ctx.microbatch = chunk, microbatch
        return weight.new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        chunk = ctx.chunk
        chunk.work.weights(chunk.stage, ctx.microbatch)
        return torch.ones_like(chunk.weight), None, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, side: torch.Tensor, chunk: EmulatedChunk, microbatch: int
    ) -> torch.Tensor:
        ctx.chunk, ctx.microbatch = chunk, microbatch
        return output + side

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        # Also runs, and changes nothing, when a split backward comes back for W.
        chunk = ctx.chunk
        chunk.work.take_gradient(chunk.stage, ctx.microbatch, gradient)
        return gradient, gradient, None, None


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(output)
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> torch.Tensor:
        (output,) = ctx.saved_tensors
        return RankWork.fresh(number_of(output), output)
