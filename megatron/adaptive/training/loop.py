"""The training loop: one step after the other, and the hooks around each of them."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron.adaptive.checkpoint.local_disk import LocalDisk
from megatron.adaptive.checkpoint.training import Progress
from megatron.adaptive.data.batch_sizes import BatchSizes
from megatron.adaptive.engine.progress import COMPLETE
from megatron.adaptive.engine.stop import StopRequest
from megatron.adaptive.gpt.setup import Run
from megatron.adaptive.training.hooks import (
    Diagnosing,
    GarbageCollection,
    Hook,
    OrderRecorder,
    Rebalancing,
    Reporting,
    Saving,
    SettlingSnapshots,
    TakingSnapshots,
    TrainedStep,
    TrainingRun,
    Validation,
)
from megatron.adaptive.training.logging import TrainingLog


class Trainer:
    """Trains a built run to its end.

    The caller keeps no reference to the run: where ``auto`` moves the stages, it is taken down and
    another one takes its place, :attr:`run`.

    Args:
        run: the built run.
        log: receives steps, messages and validations.
        profiler: profiles some of the iterations.
        stop: asks for an early end.
        progress: where a loaded checkpoint left off, ``None`` at a fresh start.
        report_position: receives the current position, for peer-loss messages.
        connect: receives the run whose channels learn of a lost rank, ``None`` while there are no
            channels.
        local: where checkpoints are written first.
    """

    def __init__(
        self,
        run: Run,
        log: TrainingLog,
        profiler: Hook,
        stop: StopRequest,
        progress: Progress | None,
        report_position: Callable[[str], None],
        connect: Callable[[Run | None], None],
        local: LocalDisk | None = None,
    ) -> None:
        self._live = live = TrainingRun(
            run, log, progress, report_position=report_position, connect=connect, local=local
        )
        self._stop = stop
        config = live.config
        if run.replay is not None and not config.run.skip_train:
            run.replay.require_steps(live.progress.iteration + 1, run.samples.iterations)
        self._sizes = BatchSizes(config.batch, config.parallel.data_parallel_size)
        self._steps_here = 0
        self._validation = Validation(live, log, stop)
        recorder = OrderRecorder(live)
        self._hooks: list[Hook] = [
            recorder,
            Rebalancing(live, log),
            profiler,
            SettlingSnapshots(live),
            Reporting(live, log),
            Diagnosing(live, log),
            GarbageCollection(live),
            self._validation,
            TakingSnapshots(live),
            Saving(live, log, recorder, is_loaded=progress is not None),
        ]

    @property
    def run(self) -> Run:
        """The run that is trained; another object after a move of the stages."""
        return self._live.run

    def train(self) -> str:
        """Trains until the iterations, the samples or the patience end.

        Returns:
            Why it ended, one phrase.

        Raises:
            DeviceMemoryError: the device ran out of memory.
        """
        self._live.open_loader()
        early = None
        try:
            while early is None and not self._live.is_finished:
                for hook in self._hooks:
                    hook.before_step(self._live.progress.iteration)
                step = self._train_step()
                for hook in self._hooks:
                    hook.after_step(step)
                early = self._early_end()
        finally:
            self._live.close_loader()
            for hook in self._hooks:
                hook.close()
        self._stop.finish()
        for hook in self._hooks:
            hook.at_end()
        return COMPLETE if early is None else early

    def evaluate_at_end(self) -> None:
        """Validates and tests once more, as Megatron-LM does after the last iteration."""
        self._validation.after_training()

    def _train_step(self) -> TrainedStep:
        live, run, begin_s = self._live, self._live.run, time.perf_counter()
        done = live.progress
        iteration = done.iteration + 1
        batch = self._sizes.global_batch_size_at(done.consumed_train_samples)
        num_microbatches = live.own_microbatches(
            self._sizes.num_microbatches_at(done.consumed_train_samples)
        )
        live.report_position(f"iteration {iteration}")
        is_traced = live.config.schedule.traces(self._steps_here)
        run.tracing.begin_iteration(iteration, num_microbatches, is_traced=is_traced)
        microbatches = None if live.loader is None else live.loader.step(num_microbatches)
        result = live.step.train(
            microbatches, num_microbatches, iteration, live.snapshots.before_update
        )
        if result.updated:
            run.scheduler.step(increment=batch)
        live.advance(
            iteration=iteration,
            consumed_train_samples=done.consumed_train_samples + batch,
            skipped_iterations=done.skipped_iterations + (not result.updated),
        )
        self._steps_here += 1
        return TrainedStep(
            iteration=iteration,
            begin_s=begin_s,
            global_batch_size=batch,
            num_microbatches=num_microbatches,
            result=result,
        )

    def _early_end(self) -> str | None:
        """Returns why training ends before its time, ``None`` if it goes on; all ranks agree."""
        if self._stop.agreed(self._live.run.job.stop_group):
            return self._stop.reason
        interval = self._live.config.run.exit_interval
        if interval and self._live.progress.iteration % interval == 0:
            return f"--exit-interval {interval}"
        return None
