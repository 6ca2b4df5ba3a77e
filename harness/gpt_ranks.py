"""Runs ranks that train a small GPT in the same way as the trainer, and collects measurements."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from harness.processes import run_ranks

GPT = (
    "--num-layers 4 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256"
    " --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 8"
    " --lr 1e-4 --train-iters 100000 --mock-data --vocab-size 1023 --tokenizer-type NullTokenizer"
    " --eval-iters 0"
).split()
"""Trainer flags of the small GPT, without its width and its pipeline settings."""
MICROBATCHES = 8
"""Number of microbatches per step with the flags in :data:`GPT`."""

_ORDERS = ((True, False, False, True), (False, True, True, False))
"""Whether each run of a round uses the feature. A constant drift affects both kinds equally."""


class MeasuringRank(Protocol):
    """Interface of a rank that :func:`rank_main` can run."""

    is_first: bool

    def measure(self, rounds: int) -> dict[str, Any]:
        """Measures ``rounds`` rounds, and returns the same measurements on all ranks."""

    def facts(self, result: dict[str, Any]) -> dict[str, Any]:
        """Returns additional entries for ``result``.

        The first rank calls this after :meth:`close`, and adds the entries to the result.
        """

    def close(self) -> None:
        """Shuts down the job. All ranks must call this together."""


def measure(
    script: str, ranks: int, rounds: int, *arguments: str, limit_s: float
) -> dict[str, Any]:
    """Starts ranks that run ``script``, and returns the measurements of the first rank.

    Args:
        script: Path of a script that calls :func:`rank_main`.
        ranks: Number of ranks.
        rounds: Number of rounds to measure.
        arguments: Additional arguments of the script.
        limit_s: Seconds after which all processes are killed.

    Raises:
        RuntimeError: A rank failed, or the ranks took longer than ``limit_s``.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [str(Path(script).resolve()), str(rounds), str(output), *arguments]
        run_ranks(command, ranks, limit_s)
        result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return result


def rank_main(make: Callable[..., MeasuringRank]) -> None:
    """Creates one rank with ``make``, and runs it with the arguments that :func:`measure` passed.

    The first rank writes the result to a JSON file.

    Args:
        make: Function that creates the rank. It takes a folder for the rank's files, and the
            additional arguments.
    """
    rounds, output, *arguments = sys.argv[1:]
    rank = make(Path(output).parent / "written", *arguments)
    result = rank.measure(int(rounds))
    rank.close()
    if rank.is_first:
        Path(output).write_text(json.dumps({**result, **rank.facts(result)}), encoding="utf-8")


class GptRank:
    """Rank of a GPT that is built as in the trainer, and that can load checkpoints.

    Args:
        arguments: Command line of the trainer.

    Attributes:
        config: Settings of the trainer.
        chunks: Model chunks of this rank.
        rank: Rank of this process in the job.
        is_first: Whether this rank is the first of the job.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        from megatron.adaptive import accelerator as device
        from megatron.adaptive.config.arguments import parse
        from megatron.adaptive.config.environment import Environment

        environment = Environment.read()
        self.config = parse(arguments, world_size=environment.world_size, last_wins=True)
        self._accelerator = device.detect(environment.local_rank)
        device.install()
        device.quiet_libraries()

        import torch

        from megatron.adaptive.gpt.initialize import start_job
        from megatron.adaptive.gpt.setup import build_run

        torch.set_num_threads(1)
        self._job = start_job(self.config, environment, self._accelerator)
        self._run = build_run(self._job)
        self.chunks = self._run.chunks
        self.rank: int = self._job.rank
        self.is_first = bool(self._job.is_first)

    def load(self, **checkpoint: Any) -> Any:
        """Loads a checkpoint, and returns the training progress that the checkpoint contains.

        Args:
            checkpoint: Checkpoint settings that replace the settings from the command line.
        """
        from megatron.adaptive.checkpoint.trainer_checkpoints import Checkpoints

        settings = replace(self.config.checkpoint, **checkpoint)
        return Checkpoints(self._run, config=replace(self.config, checkpoint=settings)).load()

    def close(self) -> None:
        """Shuts down the job. All ranks must call this together."""
        import torch.distributed as dist

        from megatron.adaptive.gpt.initialize import end_job

        self._run.tracing.close()
        if self._run.wiring is not None:
            self._run.wiring.close()
        dist.barrier(group=self._job.control_group)
        end_job()


class TrainingRank(GptRank):
    """Rank that reads data and runs training steps.

    Args:
        arguments: Command line of the trainer.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__(arguments)
        from megatron.adaptive.gpt.setup import make_loader
        from megatron.adaptive.gpt.train_step import Step

        tracing = self._run.tracing
        on_read = None if tracing.recorder is None else tracing.data_read
        self._step = Step(self._run)
        self._loader: Any = make_loader(self._run, self._run.samples.train, 0, on_read=on_read)
        self._microbatches = self.config.num_microbatches
        self._iteration = 0

    def measure(self, rounds: int) -> dict[str, Any]:
        """Measures ``rounds`` rounds, and returns the same measurements on all ranks."""
        raise NotImplementedError

    def facts(self, result: dict[str, Any]) -> dict[str, Any]:
        """Returns entries that the first rank adds to ``result`` after the job has ended."""
        return {}

    def close(self) -> None:
        """Shuts down the job. All ranks must call this together."""
        self._loader = None if self._loader is None else self._loader.close()
        super().close()

    def read(self) -> Any:
        """Returns the microbatches of a step, or ``None`` if this rank does not need them."""
        return None if self._loader is None else self._loader.step(self._microbatches)

    def train(self, before_update: Callable[[], None] = lambda: None) -> None:
        """Runs one training step on this rank.

        Args:
            before_update: Function that is called right before the parameters are updated.
        """
        self._step.train(self.read(), self._microbatches, self._iteration, before_update)

    def timed(
        self,
        work: Callable[[], object],
        processor_s: Callable[[], float] = time.process_time,
        steps: int = 1,
    ) -> tuple[float, float]:
        """Runs ``work`` on all ranks at the same time, and measures the run.

        Returns the elapsed seconds and the CPU seconds, both divided by ``steps``. ``processor_s``
        is a function that returns the CPU seconds used so far.
        """
        import torch.distributed as dist

        group = self._job.control_group
        dist.barrier(group=group)
        start_s, begin_cpu_s = time.perf_counter(), processor_s()
        work()
        spent_cpu_s = processor_s() - begin_cpu_s
        dist.barrier(group=group)
        return (time.perf_counter() - start_s) / steps, spent_cpu_s / steps

    def turns(
        self, rounds: int, turn: Callable[[bool], tuple[float, float]], name: str
    ) -> dict[str, Any]:
        """Alternates between runs with and without a feature, and measures the runs.

        Before the measurement, there is one warm-up run of each kind.

        Args:
            rounds: Number of rounds. Each round has two runs with the feature and two runs without
                it.
            turn: Function that makes one run, with the feature if its argument is true. The
                function returns the elapsed seconds and this rank's CPU seconds.
            name: Name of the feature, used as ``NAME`` in the result.

        Returns:
            Dictionary of lists with one entry per round. ``NAME_s`` and ``plain_s`` are the mean
            seconds of a run. ``NAME_cpu_s`` and ``plain_cpu_s`` are CPU seconds, summed over all
            ranks.
        """
        import torch
        import torch.distributed as dist

        for is_on in (False, True):
            turn(is_on)
        seconds = torch.zeros(rounds, 2, 2, dtype=torch.float64)
        for number in range(rounds):
            for is_on in _ORDERS[number % 2]:
                seconds[number, int(is_on)] += torch.tensor(turn(is_on), dtype=torch.float64) / 2
        processor_s = seconds[:, :, 1].clone()
        dist.all_reduce(processor_s, group=self._job.control_group)
        return {
            f"{name}_s": seconds[:, 1, 0].tolist(),
            "plain_s": seconds[:, 0, 0].tolist(),
            f"{name}_cpu_s": processor_s[:, 1].tolist(),
            "plain_cpu_s": processor_s[:, 0].tolist(),
        }

    def progress(self, iteration: int) -> Any:
        """Returns the progress that a checkpoint saved after ``iteration`` would contain."""
        from megatron.adaptive.checkpoint.trainer_checkpoints import Progress

        return Progress(
            iteration=iteration,
            consumed_train_samples=iteration * self._microbatches,
            consumed_valid_samples=0,
            skipped_iterations=0,
        )
