"""Implements an emulated stage as a module, for runtimes that use autograd.

::

    input ──> _Input ───┐
                        _Join ──> output ──> _Loss, on the last stage
    weight ─> _Weight ──┘

The backward pass of ``_Join`` checks the gradient, the backward pass of ``_Input`` sleeps for B,
and the backward pass of ``_Weight`` sleeps for W. If a runtime first asks autograd for only the
gradients of inputs, it runs B. Later it runs W, starting at ``_Join``. An unsplit backward pass
runs W first, so that the gradient is sent at the end of the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from harness.emulated_work import RankWork, WorkError, number_of
from harness.sleeping_ranks import DTYPE, WIDTH

from .competitors import Competitor
from .scenarios import Draws


class EmulatedChunk(torch.nn.Module):
    """Emulated stage. The attribute ``work`` must be set before each step.

    Args:
        stage: Index of the stage, in pipeline order.
        num_stages: Number of stages in the pipeline.

    Attributes:
        work: Work of this rank in the next step.
        weight: Parameter whose gradient counts microbatches. After a step, each element of the
            gradient equals the number of microbatches.
    """

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        self.stage = stage
        self.is_first = stage == 0
        self.is_last = stage == num_stages - 1
        self.weight = torch.nn.Parameter(torch.zeros(WIDTH, dtype=DTYPE))
        self.work: RankWork | None = None

    def forward(self, received: torch.Tensor) -> torch.Tensor:
        """Runs the forward pass of the stage, and returns an output of the same shape.

        Args:
            received: Output of the previous stage, or ``RankWork.fresh`` on the first stage.
        """
        if not received.requires_grad:
            # A real first stage computes gradients of its inner layers, but not of its input.
            # Request the input's gradient here, so that this stage also runs B.
            received = received.detach().requires_grad_()
        microbatch = number_of(received)
        output = _apply(_Input, received, self, microbatch)
        # Autograd runs the most recently created node first. This node must not depend on the
        # input. Otherwise, computing the gradient of the input would require W.
        side = _apply(_Weight, self.weight, received.shape, self, microbatch)
        return _apply(_Join, output, side, self, microbatch)

    def prepare(self, work: RankWork) -> None:
        """Sets the work of the next step to ``work``, and clears the gradient."""
        self.work = work
        self.weight.grad = None

    def check_gradient(self, num_microbatches: int) -> None:
        """Checks that all microbatches have contributed to the gradient of the weight.

        Raises:
            WorkError: The gradient is not the sum for ``num_microbatches`` microbatches.
        """
        self.check_sum(self.weight.grad, num_microbatches)

    def check_sum(self, gradient: torch.Tensor | None, num_microbatches: int) -> None:
        """Checks that ``num_microbatches`` microbatches have contributed to ``gradient``.

        ``gradient`` is the gradient of a weight, as in :meth:`check_gradient`.
        """
        if gradient is None or not bool((gradient == num_microbatches).all()):
            raise WorkError(
                f"stage {self.stage}: the gradient is {gradient} after {num_microbatches} "
                "microbatches"
            )

    def loss(self, output: torch.Tensor) -> torch.Tensor:
        """Returns a scalar for ``output``, from which the last stage's backward pass starts."""
        return _apply(_Loss, output)


class PeerRunner:
    """Runs a schedule of another library. All ranks must create their runners at the same time.

    Args:
        competitor: Competitor to run.
        rank: Pipeline rank of this process.
        num_ranks: Number of ranks in the pipeline.
        make: Function that takes the index of a stage and the number of stages, and returns an
            emulated stage.
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
        """Prepares a step with the durations ``draws``. This call is not timed."""
        self.num_microbatches = draws.num_microbatches
        for chunk in self.chunks:
            chunk.prepare(work)

    def inputs(self, shape: Sequence[int]) -> list[torch.Tensor]:
        """Returns the inputs of the first stage for all microbatches, each of shape ``shape``."""
        like = torch.empty(*shape, dtype=DTYPE)
        return [RankWork.fresh(number, like) for number in range(self.num_microbatches)]

    def finish(self) -> None:
        """Checks the gradients of the weights. This call is not timed."""
        for chunk in self.chunks:
            chunk.check_gradient(self.num_microbatches)


def _apply(function: Any, *arguments: Any) -> torch.Tensor:
    """Calls the autograd function ``function``. torch does not declare the types of this call."""
    output: torch.Tensor = function.apply(*arguments)
    return output


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
        # A split backward pass calls this method twice: for B, and for W, where it has no effect.
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
