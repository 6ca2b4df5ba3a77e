"""What one rank's stages do in one step: sleep as drawn, and check what they are handed.

Every runtime ends up here, so that the work of all is the same. What travels is ``[16] float64``:

::

    [0] microbatch   [1] sum over the stages passed of (stage + 1)   [2] when it was sent

Forward and backward each carry such a sum, so a stage that was skipped, doubled or given another
microbatch's tensor is an error, not a fast step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from harness.sleeping_ranks import DTYPE, WIDTH, Sleeper
from megatron.adaptive.schedule.action import ActionKind
from megatron.adaptive.schedule.stage_placement import Placement

_AT_ONCE_S = 0.001


class WorkError(Exception):
    """A runtime did something other than each action once with its own input."""


def number_of(tensor: torch.Tensor) -> int:
    """Returns the microbatch of what travels."""
    return int(tensor.detach().numpy().item(0))


class Span(NamedTuple):
    """An action that ran, or a part of it, with its times on ``time.monotonic``."""

    kind: ActionKind
    stage: int
    microbatch: int
    fraction: float
    start_s: float
    end_s: float


class RankWork:
    """The stages of one rank during one step; a new step needs a new one.

    Args:
        placement: where stages live.
        rank: this rank.
        seconds: of all actions, ``[kind][stage][microbatch]``.
        sleeper: sleeps for this rank.
        delay_s: seconds that a message takes from one rank to another, where a stage waits, before
            it starts, until its input would have come; for a runtime that has already chosen this
            action and waits for nothing else, that is the same as messages that come late by
            themselves, as they do where this is ``None``.
    """

    def __init__(
        self,
        placement: Placement,
        rank: int,
        seconds: Mapping[ActionKind, Sequence[Sequence[float]]],
        sleeper: Sleeper,
        delay_s: Callable[[int, int], float] | None = None,
    ) -> None:
        self.spans: list[Span] = []
        self.peak = 0.0
        self._sleeper = sleeper
        self._num_stages = placement.num_stages
        self._stages = [placement.stage_of(rank, chunk) for chunk in range(placement.num_chunks)]
        self._unit = 1 / placement.num_chunks
        self._held = 0.0
        self._due_s = 0.0  # when the last action was to end
        self._seconds = seconds
        self._delays: dict[tuple[ActionKind, int], float] = {}
        for stage in self._stages if delay_s is not None else []:
            for kind, sender in ((ActionKind.F, stage - 1), (ActionKind.B, stage + 1)):
                if 0 <= sender < placement.num_stages:
                    self._delays[kind, stage] = delay_s(placement.locate(sender)[0], rank)

    def forward(self, stage: int, received: torch.Tensor | None, microbatch: int) -> torch.Tensor:
        """Runs a forward pass.

        Args:
            stage: a stage of this rank.
            received: output of the stage before; on the first stage its data or ``None``.
            microbatch: which it is.

        Returns:
            A tensor for the next stage, of the shape of ``received``.

        Raises:
            WorkError: the input is not what this forward needs.
        """
        start = time.monotonic()
        if received is None:
            received = self.fresh(microbatch, torch.empty(WIDTH, dtype=DTYPE))
        else:
            start = self._take(ActionKind.F, stage, microbatch, received, start)
        output = self._added(received, stage)
        self._held += self._unit
        self.peak = max(self.peak, self._held)
        self._spend(ActionKind.F, stage, microbatch, start)
        return self._stamped(output)

    def backward(
        self, stage: int, gradient: torch.Tensor | None, microbatch: int, *, whole: bool
    ) -> torch.Tensor:
        """Runs a backward pass by inputs; with ``whole`` also the one by weights.

        Args:
            stage: a stage of this rank.
            gradient: gradient of the stage's output, ``None`` on the last stage.
            microbatch: which it is.
            whole: whether this is the backward by weights too, which then comes first.

        Returns:
            A gradient for the stage before, also on the first stage.

        Raises:
            WorkError: the gradient is not what this backward needs.
        """
        if gradient is None:
            gradient = self.fresh(microbatch, torch.empty(WIDTH, dtype=DTYPE))
        self.take_gradient(stage, microbatch, gradient)
        if whole:
            self.weights(stage, microbatch)
        return self.input_gradient(stage, microbatch, gradient)

    def take_gradient(self, stage: int, microbatch: int, gradient: torch.Tensor) -> None:
        """Checks the gradient of an output; waits until the time at which it would arrive.

        Raises:
            WorkError: it is not that of this stage and microbatch.
        """
        self._take(ActionKind.B, stage, microbatch, gradient, time.monotonic())

    def input_gradient(self, stage: int, microbatch: int, gradient: torch.Tensor) -> torch.Tensor:
        """Runs the backward pass by inputs of a taken gradient; returns the input's gradient."""
        start = time.monotonic()
        output = self._added(gradient, stage)
        self._spend(ActionKind.B, stage, microbatch, start)
        return self._stamped(output)

    def weights(self, stage: int, microbatch: int, fraction: float = 1.0) -> None:
        """Runs ``fraction`` of a backward pass by weights.

        One that follows at once on another part of the same goes on where that was to end: what a
        sleep is late is no part of the work, and cutting must not count it twice. A device that is
        given the next part before the last has ended has no gap there either.
        """
        start_s = time.monotonic()
        last = self.spans[-1] if self.spans else None
        if last is not None and last[:3] == (ActionKind.W, stage, microbatch):
            start_s = self._due_s if start_s - last.end_s < _AT_ONCE_S else start_s
        self._spend(ActionKind.W, stage, microbatch, start_s, fraction)
        self._held -= self._unit * fraction

    @staticmethod
    def fresh(microbatch: int, like: torch.Tensor) -> torch.Tensor:
        """What the first stage's forward and the last stage's backward start from."""
        tensor = torch.zeros_like(like)
        tensor.view(-1)[0] = microbatch
        return tensor

    def check_complete(self) -> None:
        """Checks that each action ran once, and that its pieces add up to a whole.

        Raises:
            WorkError: one did not.
        """
        spent: dict[tuple[ActionKind, int, int], float] = {}
        for kind, stage, microbatch, fraction, _, _ in self.spans:
            key = (kind, stage, microbatch)
            spent[key] = spent.get(key, 0.0) + fraction
        expected = {
            (kind, stage, microbatch)
            for kind in ActionKind
            for stage in self._stages
            for microbatch in range(len(self._seconds[kind][stage]))
        }
        if set(spent) != expected:
            raise WorkError(f"actions missing or too many: {sorted(set(spent) ^ expected)[:8]}")
        for (kind, stage, microbatch), share in spent.items():
            if abs(share - 1) > 1e-9:
                raise WorkError(f"{kind} of stage {stage}, microbatch {microbatch} ran {share:g}x")

    def _take(
        self, kind: ActionKind, stage: int, microbatch: int, received: torch.Tensor, start_s: float
    ) -> float:
        """Checks an input, waits until it would arrive; returns the start time of the action."""
        number, total, sent_s = received.detach().numpy().reshape(-1)[:3].tolist()
        # What earlier stages added, of a backward's gradient what later ones did.
        due = stage * (stage + 1) / 2
        if kind is ActionKind.B:
            due = self._num_stages * (self._num_stages + 1) / 2 - due - (stage + 1)
        if (number, total) != (microbatch, due):
            raise WorkError(
                f"{kind} of stage {stage}, microbatch {microbatch} got microbatch {number:g} with"
                f" a sum of {total:g}, due was {due:g}"
            )
        delay_s = self._delays.get((kind, stage), 0.0)
        if not delay_s:
            return start_s
        self._sleeper.until(sent_s + delay_s)
        return time.monotonic()

    def _spend(
        self, kind: ActionKind, stage: int, microbatch: int, start_s: float, fraction: float = 1.0
    ) -> None:
        """Sleeps for the time of the action, counted from ``start_s``."""
        self._due_s = start_s + self._seconds[kind][stage][microbatch] * fraction
        self._sleeper.until(self._due_s)
        end_s = time.monotonic()
        self.spans.append(Span(kind, stage, microbatch, fraction, start_s, end_s))

    @staticmethod
    def _added(received: torch.Tensor, stage: int) -> torch.Tensor:
        output = received.detach().clone()
        output.view(-1).numpy()[1] += stage + 1
        return output

    @staticmethod
    def _stamped(output: torch.Tensor) -> torch.Tensor:
        output.view(-1).numpy()[2] = time.monotonic()
        return output
