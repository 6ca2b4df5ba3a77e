"""Emulates one rank's stages: actions sleep for a random duration and check their inputs.

Every compared runtime calls :class:`RankWork`, so all runtimes do the same work.
:class:`EmulatedRank` runs this work with this project's schedules, over real channels. Messages are
tensors ``[16] float64``::

    [0] microbatch   [1] sum of (stage + 1) over all stages so far   [2] time at which it was sent

Both forward and backward messages carry such a sum. An error is therefore raised if a stage is
skipped, runs twice or receives the tensor of a different microbatch. Otherwise, such a mistake
could make a step look faster than it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from harness.sleeping_ranks import DTYPE, WIDTH, Channels, IdleStages, Sleeper, sharpen_timers
from megatron.adaptive.engine.executor import RankTimes
from megatron.adaptive.schedule.action import ActionKind
from megatron.adaptive.schedule.catalog import Candidate
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import PS_PER_S, Workload

Seconds = Mapping[ActionKind, Sequence[Sequence[float]]]
"""Durations in seconds of all actions, indexed by ``[kind][stage][microbatch or slice]``."""
_AT_ONCE_S = 0.001


class WorkError(Exception):
    """Raised if a runtime did not run each action exactly once with the right input."""


def number_of(tensor: torch.Tensor) -> int:
    """Returns the index of the microbatch to which the message ``tensor`` belongs."""
    return int(tensor.detach().numpy().item(0))


def seconds_of(work: Workload) -> Seconds:
    """Returns the durations in ``work`` in seconds, indexed by ``[kind][stage][microbatch]``."""
    return dict(zip(ActionKind, (work.durations_ps / PS_PER_S).tolist(), strict=True))


class Span(NamedTuple):
    """An action, or a part of an action, with the ``time.monotonic`` times of its start and end."""

    kind: ActionKind
    stage: int
    microbatch: int
    fraction: float
    start_s: float
    end_s: float


class RankWork:
    """Runs the stages of one rank during one step. Each step needs a new object.

    Args:
        placement: Placement of the stages.
        rank: Position of this rank in the pipeline.
        seconds: Durations of all actions in seconds, indexed by ``[kind][stage][microbatch]``.
        sleeper: Object that makes this rank sleep.
        delay_s: Function that takes the sender's and the receiver's rank, and returns how many
            seconds a message between them takes. A stage waits for the emulated arrival of its
            input. If it is ``None``, the transport itself delays messages.
        frozen_stages: Number of stages at the start of the pipeline that run only forward passes
            and keep no activations.

    Attributes:
        spans: Actions of this rank, in the order in which they ran.
        peak: Largest amount of activations that this rank held at the same time. The activations of
            one microbatch on all trained stages of this rank count as 1.
    """

    def __init__(
        self,
        placement: Placement,
        rank: int,
        seconds: Seconds,
        sleeper: Sleeper,
        delay_s: Callable[[int, int], float] | None = None,
        frozen_stages: int = 0,
    ) -> None:
        self.spans: list[Span] = []
        self.peak = 0.0
        self._sleeper = sleeper
        self._num_stages = placement.num_stages
        self._stages = [placement.stage_of(rank, chunk) for chunk in range(placement.num_chunks)]
        self._frozen_stages = frozen_stages
        trained = sum(stage >= frozen_stages for stage in self._stages)
        self._unit = 1 / max(1, trained)
        self._held = 0.0
        self._due_s = 0.0  # Time at which the last action was planned to end.
        self._seconds = seconds
        self._delays: dict[tuple[ActionKind, int], float] = {}
        if delay_s is None:
            return
        for stage in self._stages:
            for kind, sender in ((ActionKind.F, stage - 1), (ActionKind.B, stage + 1)):
                if 0 <= sender < placement.num_stages:
                    self._delays[kind, stage] = delay_s(placement.locate(sender)[0], rank)

    def forward(self, stage: int, received: torch.Tensor | None, microbatch: int) -> torch.Tensor:
        """Runs a forward pass, and returns the input of the next stage.

        Args:
            stage: Index of a stage of this rank.
            received: Output of the previous stage. On the first stage, it is the data of the
                microbatch, or ``None``.
            microbatch: Index of the microbatch.

        Raises:
            WorkError: The input belongs to a different forward pass.
        """
        start = time.monotonic()
        if received is None:
            received = self.fresh(microbatch, torch.empty(WIDTH, dtype=DTYPE))
        else:
            start = self._take(ActionKind.F, stage, microbatch, received, start)
        output = self._added(received, stage)
        self._held += self._unit * (stage >= self._frozen_stages)
        self.peak = max(self.peak, self._held)
        self._spend(ActionKind.F, stage, microbatch, start)
        return self._stamped(output)

    def backward(
        self, stage: int, gradient: torch.Tensor | None, microbatch: int, *, whole: bool
    ) -> torch.Tensor:
        """Runs the backward pass for inputs, and returns the gradient for the previous stage.

        Args:
            stage: Index of a stage of this rank.
            gradient: Gradient of the stage's output, or ``None`` on the last stage.
            microbatch: Index of the microbatch.
            whole: Whether to run the backward pass for weights before the backward pass for inputs.

        Raises:
            WorkError: The gradient belongs to a different backward pass.
        """
        if gradient is None:
            gradient = self.fresh(microbatch, torch.empty(WIDTH, dtype=DTYPE))
        self.take_gradient(stage, microbatch, gradient)
        if whole:
            self.weights(stage, microbatch)
        return self.input_gradient(stage, microbatch, gradient)

    def take_gradient(self, stage: int, microbatch: int, gradient: torch.Tensor) -> None:
        """Checks that ``gradient`` belongs to the output of ``stage`` for ``microbatch``.

        Also waits for the emulated arrival of the message.

        Raises:
            WorkError: The gradient belongs to a different stage or microbatch.
        """
        self._take(ActionKind.B, stage, microbatch, gradient, time.monotonic())

    def input_gradient(self, stage: int, microbatch: int, gradient: torch.Tensor) -> torch.Tensor:
        """Runs the backward pass for inputs after :meth:`take_gradient`, with the same arguments.

        Returns the gradient of the stage's input.
        """
        start = time.monotonic()
        output = self._added(gradient, stage)
        self._spend(ActionKind.B, stage, microbatch, start)
        return self._stamped(output)

    def weights(self, stage: int, microbatch: int, fraction: float = 1.0) -> None:
        """Runs the fraction ``fraction`` of the backward pass for weights.

        If the previous action was a part of the same pass, this part starts at the planned end of
        that part. Otherwise the small delays of all sleeps would add up, although they are not
        work. A GPU has no such delays, because the next part is already queued when the previous
        part ends.
        """
        start_s = time.monotonic()
        last = self.spans[-1] if self.spans else None
        if last is not None and last[:3] == (ActionKind.W, stage, microbatch):
            start_s = self._due_s if start_s - last.end_s < _AT_ONCE_S else start_s
        self._spend(ActionKind.W, stage, microbatch, start_s, fraction)
        self._held -= self._unit * fraction

    @staticmethod
    def fresh(microbatch: int, like: torch.Tensor) -> torch.Tensor:
        """Returns the first message for ``microbatch``, a tensor with the shape of ``like``."""
        tensor = torch.zeros_like(like)
        tensor.view(-1)[0] = microbatch
        return tensor

    def check_complete(self) -> None:
        """Checks that each action ran exactly once, as a whole or in parts that add up to it.

        Raises:
            WorkError: An action did not run, ran only in part, or ran more than once.
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
            if kind is ActionKind.F or stage >= self._frozen_stages
        }
        if set(spent) != expected:
            raise WorkError(f"missing or unexpected actions: {sorted(set(spent) ^ expected)[:8]}")
        for (kind, stage, microbatch), share in spent.items():
            if abs(share - 1) > 1e-9:
                raise WorkError(f"{kind} of stage {stage}, microbatch {microbatch} ran {share:g}x")

    def _take(
        self, kind: ActionKind, stage: int, microbatch: int, received: torch.Tensor, start_s: float
    ) -> float:
        """Checks the content of the message ``received``, and waits for its emulated arrival.

        The message is the input of the action of kind ``kind`` on ``stage`` for ``microbatch``.
        Returns the start time of the action, which is ``start_s`` or later.
        """
        number, total, sent_s = received.detach().numpy().reshape(-1)[:3].tolist()
        # Earlier stages have added to the sum in a forward message, and later stages have added to
        # the sum in a backward message.
        due = stage * (stage + 1) / 2
        if kind is ActionKind.B:
            due = self._num_stages * (self._num_stages + 1) / 2 - due - (stage + 1)
        if (number, total) != (microbatch, due):
            raise WorkError(
                f"{kind} of stage {stage}, microbatch {microbatch} got microbatch {number:g} "
                f"with a sum of {total:g}, but the sum must be {due:g}"
            )
        delay_s = self._delays.get((kind, stage), 0.0)
        if not delay_s:
            return start_s
        self._sleeper.until(sent_s + delay_s)
        return time.monotonic()

    def _spend(
        self, kind: ActionKind, stage: int, microbatch: int, start_s: float, fraction: float = 1.0
    ) -> None:
        """Sleeps until the end of an action that started at ``start_s``, and records the action.

        With a ``fraction`` below 1, only this part of the action runs.
        """
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


class EmulatedStages(IdleStages):
    """Model chunks whose actions sleep for the durations that :class:`RankWork` defines.

    Args:
        work: Emulated work of this rank in one step.
        placement: Placement of the stages.
        rank: Position of this rank in the pipeline.
        split: Whether the backward passes for weights are separate actions.
    """

    def __init__(self, work: RankWork, placement: Placement, rank: int, *, split: bool) -> None:
        self._work = work
        self._stages = [placement.stage_of(rank, chunk) for chunk in range(placement.num_chunks)]
        self._split = split

    def forward(self, chunk: int, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Sleeps for the forward pass (F) of ``chunk`` for ``microbatch``. Returns the output."""
        return self._work.forward(self._stages[chunk], received, microbatch)

    def backward(
        self, chunk: int, microbatch: int, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Sleeps for the backward pass for inputs (B) and, unless it is a separate action, for W.

        W is the backward pass for weights. Returns the gradient of the chunk's input, or ``None``
        on the first stage.
        """
        stage = self._stages[chunk]
        result = self._work.backward(stage, gradient, microbatch, whole=not self._split)
        return result if stage else None

    def weights(self, chunk: int, microbatch: int, piece: int, pieces: int) -> None:
        """Sleeps for one of ``pieces`` equal parts of the backward pass for weights (W)."""
        self._work.weights(self._stages[chunk], microbatch, 1 / pieces)


class EmulatedStep(NamedTuple):
    """Measurements of one step.

    Attributes:
        seconds: Duration of the step in seconds, which is the same on all ranks.
        peak: Largest size of the activations that any rank held at the same time, in the unit of
            the argument ``unit``.
        times: Times of the actions of this rank.
    """

    seconds: float
    peak: float
    times: RankTimes


class EmulatedRank:
    """Runs one rank through steps of several schedules. Each placement has separate channels.

    Args:
        position: Rank of this process in its pipeline. If there are several replicas, the processes
            with the same position have consecutive global ranks.
        replica: Index of the pipeline replica to which this rank belongs.
        replicas: Number of pipeline replicas.
        varies: Whether the shape may change between messages, as it does with frozen stages.
    """

    def __init__(
        self, position: int, *, replica: int = 0, replicas: int = 1, varies: bool = False
    ) -> None:
        sharpen_timers()
        self._varies = varies
        self._position = position
        self._replica = replica
        self._replicas = replicas
        self._sleeper = Sleeper()
        self._channels: dict[Placement, Channels] = {}

    def step(
        self,
        candidate: Candidate,
        seconds: Seconds,
        num_microbatches: int,
        *,
        num_slices: int | tuple[int, ...] | None = None,
        sizes: Sequence[float] | None = None,
        unit: float = 1.0,
    ) -> EmulatedStep:
        """Runs one step, which starts on all ranks at once, and returns its measurements.

        All ranks must call this together.

        Args:
            candidate: Schedule and its settings.
            seconds: Durations of all actions, in seconds.
            num_microbatches: Number of microbatches.
            num_slices: Number of slices of each microbatch, or ``None`` to use the number of
                ``candidate``.
            sizes: Activation size of each microbatch or slice, relative to the mean. ``None`` if
                all sizes are equal.
            unit: Activation size of an average microbatch, which determines the unit of ``peak`` in
                the result.
        """
        placement = candidate.placement
        if placement not in self._channels:
            self._channels[placement] = Channels(
                placement,
                self._position,
                replica=self._replica,
                replicas=self._replicas,
                varies=self._varies,
            )
        slices = candidate.num_slices if num_slices is None else num_slices
        policy = candidate.policies(num_microbatches, slices)[self._position]
        state = RankState(
            placement=placement,
            rank=self._position,
            num_microbatches=num_microbatches,
            cap=candidate.cap,
            sizes=sizes,
            weight_pieces=candidate.weight_pieces,
            num_slices=slices,
            frozen_stages=candidate.skipped_stages,
        )
        work = RankWork(
            placement,
            self._position,
            seconds,
            self._sleeper,
            frozen_stages=candidate.skipped_stages,
        )
        split = candidate.weight_pieces > 0
        stages = EmulatedStages(work, placement, self._position, split=split)
        executor = self._channels[placement].executor
        dist.barrier()
        start_s = time.monotonic()
        executor.run(stages, policy, state)
        dist.barrier()
        elapsed_s = time.monotonic() - start_s
        times = executor.finish_step()
        work.check_complete()
        peak = torch.tensor(state.peak_in_flight * unit)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        return EmulatedStep(elapsed_s, float(peak), times)

    def close(self) -> None:
        """Closes the channels. All ranks must call this together."""
        for channels in self._channels.values():
            channels.close()
