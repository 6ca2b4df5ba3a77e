"""Compares several pipeline runtimes on the same chunks of a small GPT.

The compared runtimes (competitors) take turns within one job, so that other load on the machine
slows all of them equally. At the end, every competitor runs the same microbatches with the same
weights, and their losses and gradients are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from harness.gpt_ranks import TrainingRank
from harness.report import Row

WARMUPS = 2
TWO_CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"
Function = Callable[[Any], list[Any]]
"""Function that runs a step's microbatches, completes gradients, and returns the losses."""


@dataclass(frozen=True)
class Job:
    """Settings of a job whose ranks run several competitors alternately.

    Attributes:
        flags: Trainer flags that determine the model chunks, without the flags for the size of the
            model.
        competitors: Names of the competitors. The losses and gradients of the first competitor are
            the reference for all others.
        ranks: Number of ranks.
    """

    flags: str
    competitors: tuple[str, ...]
    ranks: int = 2


class CompetingRank(TrainingRank):
    """Runs one rank of a job that compares competitors.

    The name ``megatron`` selects megatron-core's schedule. Any other name is the name of one of
    this project's schedules, which runs as in the trainer. Subclasses may support more names.

    Args:
        job: Settings of the job.
        arguments: Command line of the trainer.
    """

    def __init__(self, job: Job, arguments: Iterable[str]) -> None:
        pipeline = ["--pipeline-model-parallel-size", str(job.ranks)]
        super().__init__([*arguments, *pipeline, *job.flags.split()])

        from megatron.adaptive.engine.deferred_layers import attach_stores
        from megatron.adaptive.gpt.forward import GptForward

        splits = self.config.splits_backward
        self._stores = attach_stores(self.chunks) if splits else None
        self._forward = GptForward(self._accelerator)
        self._wirings: list[Any] = []
        self._functions = {name: self.function_of(name) for name in job.competitors}

    def measure(self, rounds: int) -> dict[str, Any]:
        """Runs the competitors alternately for ``rounds`` rounds, and compares their results.

        Returns:
            Dictionary with two entries. ``times`` lists the seconds of each round for each
            competitor, with ``None`` for rounds in which the competitor did not run.
            ``differences`` is the result of :meth:`compare`.
        """
        times: dict[str, list[float | None]] = {name: [] for name in self._functions}
        for index in range(-WARMUPS, rounds):
            elapsed_s = {name: self.step_s(name) for name in self.order_of(index)}
            for name in times if index >= 0 else ():
                times[name].append(elapsed_s.get(name))
        return {"times": times, "differences": self.compare()}

    def order_of(self, index: int) -> list[str]:
        """Returns the names of the competitors in the order in which they run in round ``index``.

        Args:
            index: Index of the round; negative for a warm-up round.
        """
        return rotated(list(self._functions), index)

    def compare(self) -> dict[str, dict[str, float]]:
        """Compares losses and gradients of all competitors. All ranks must call this together.

        Returns:
            Dictionary with the entries ``loss`` and ``gradient`` for each competitor. ``loss`` is
            the largest relative difference between a microbatch's loss and that of the first
            competitor. ``gradient`` is the norm of the difference from the first competitor's
            gradients, divided by the norm of those gradients.
        """
        import torch
        import torch.distributed as dist

        group = self._job.control_group
        microbatches = self.read()
        differences: dict[str, dict[str, float]] = {}
        expected: list[Any] = []
        for name, function in self._functions.items():
            self.prepare(name)
            losses = torch.zeros(self._microbatches, dtype=torch.float64)
            for index, values in enumerate(function(microbatches)):
                (losses[index],) = (value.double().cpu() for value in values.values())
            # Only one rank has losses, so the sum over all ranks gives every rank the losses.
            dist.all_reduce(losses, group=group)
            gradients = [
                parameter.main_grad.clone()  # type: ignore[attr-defined]
                for chunk in self.chunks
                for parameter in chunk.parameters()
            ]
            expected = expected or [losses, *gradients]
            squares = torch.zeros(2, dtype=torch.float64)
            for gradient, reference in zip(gradients, expected[1:], strict=True):
                reference = reference.double()
                difference = (gradient.double() - reference).square().sum()
                squares += torch.stack([difference, reference.square().sum()]).cpu()
            dist.all_reduce(squares, group=group)
            differences[name] = {
                "loss": float(((losses - expected[0]) / expected[0]).abs().max()),
                "gradient": float((squares[0] / squares[1]).sqrt()),
            }
        return differences

    def close(self) -> None:
        """Closes all channels and shuts down the job. All ranks must call this together."""
        for wiring in self._wirings:
            wiring.close()
        super().close()

    def read(self) -> list[Any] | None:
        """Returns all microbatches of a step, read in advance so that reading is not timed."""
        microbatches = super().read()
        return None if microbatches is None else list(microbatches)

    def function_of(self, name: str) -> Function:
        """Returns a function that runs one step of the competitor ``name``."""
        if name == "megatron":
            return self.fed(self._run.forward_backward)
        return self.fed(self.engine_of(name))

    def fed(self, forward_backward: Callable[..., list[Any]]) -> Function:
        """Returns a function that takes microbatches and runs ``forward_backward`` on them.

        Args:
            forward_backward: Function with the signature of megatron-core's schedule functions.
        """
        from megatron.adaptive.gpt.forward import feed

        chunks, count, config = self.chunks, self._microbatches, self.config
        single = len(chunks) == 1

        def run(microbatches: Any) -> list[Any]:
            feeds = [feed(microbatches, count) for _ in chunks]
            return forward_backward(
                forward_step_func=self._forward,
                data_iterator=feeds[0] if single else feeds,
                model=chunks[0] if single else chunks,
                num_microbatches=count,
                seq_length=config.model.seq_length,
                micro_batch_size=config.batch.micro_batch_size,
            )

        return run

    def engine_of(self, schedule: str, **transport: Any) -> Callable[..., list[Any]]:
        """Returns this project's engine for ``schedule``, with channels that only this engine uses.

        Args:
            schedule: Name of the schedule.
            transport: Fields of ``TransportConfig``, keyed by name.
        """
        from megatron.core import parallel_state

        from megatron.adaptive.config.parallel import TransportConfig
        from megatron.adaptive.engine.executor_setup import build_executor
        from megatron.adaptive.engine.policy_factory import Orders
        from megatron.adaptive.engine.stages import ForwardBackward
        from megatron.adaptive.gpt.setup import payload_shape

        run = self._run
        wiring = build_executor(
            placement=run.placement,
            accelerator=self._accelerator,
            places=self._job.places,
            payload_shape=payload_shape(self.config),
            payload_dtype=run.core.pipeline_dtype,
            timeout_s=120.0,
            transport=TransportConfig(**transport),
        )
        self._wirings.append(wiring)
        return ForwardBackward(
            executor=wiring.executor,
            orders=Orders(
                schedule=schedule,
                placement=run.placement,
                pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
                splits=bool(self._stores),
                pieces=self.config.schedule.weight_pieces,
            ),
            stores=self._stores,
        )

    def prepare(self, name: str) -> None:
        """Sets all gradients to zero before a step of the competitor ``name``."""
        self._run.core.deallocate_pipeline_outputs = name != "megatron"
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()  # type: ignore[operator]
        self._run.optimizer.zero_grad()

    def step_s(self, name: str) -> float:
        """Runs one step of ``name``, and returns its duration in seconds.

        The step includes the optimizer's update.
        """
        microbatches = self.read()
        self.prepare(name)

        def step() -> None:
            self._functions[name](microbatches)
            self._run.optimizer.step()
            self._accelerator.synchronize()

        return self.timed(step)[0]


def rotated(names: list[str], index: int) -> list[str]:
    """Returns ``names`` rotated by ``index``, so that each round starts with a different name.

    Without this, the same competitor would always run directly after a slow competitor.
    """
    first = index % len(names) if names else 0
    return names[first:] + names[:first]


def difference_row(
    where: str, quantity: str, values: Iterable[float], limit: float, note: str
) -> Row:
    """Returns a row with the largest of the relative differences ``values``.

    Args:
        where: Name of the job or jobs, for the text of the row.
        quantity: ``loss`` or ``gradient``.
        values: Differences of all competitors.
        limit: Largest allowed difference.
        note: Text for the row's note.
    """
    # The function max would ignore NaN, although NaN exceeds every limit.
    worst = max(values, key=lambda value: (math.isnan(value), value))
    text = f"{where}: largest relative difference of the {quantity} on equal weights"
    return Row(what=text, value=worst, goal=limit, note=note)
