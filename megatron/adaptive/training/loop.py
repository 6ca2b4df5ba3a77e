"""The training loop: iterations, validation, checkpoints, and when to end."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core import parallel_state

from megatron.adaptive.checkpoint.local_disk import LocalDisk
from megatron.adaptive.checkpoint.training import Checkpoints, Progress
from megatron.adaptive.data.batch_sizes import BatchSizes
from megatron.adaptive.engine.diagnosis import RunningDiagnosis
from megatron.adaptive.engine.progress import COMPLETE, saved_line
from megatron.adaptive.engine.stop import StopRequest
from megatron.adaptive.errors import CheckpointError
from megatron.adaptive.gpt.setup import Run, make_loader, make_recording
from megatron.adaptive.gpt.step import Step, gather_parameters, params_norm
from megatron.adaptive.rebalance import change_placement as relocate
from megatron.adaptive.rebalance.auto import Decision, make_tuner, use
from megatron.adaptive.rebalance.move_layers import restage
from megatron.adaptive.rebalance.repartition import Move, make_repartitioner
from megatron.adaptive.training.logging import IterationReport, TrainingLog
from megatron.adaptive.training.profiler import Profiler
from megatron.adaptive.training.snapshots import make_copies


@dataclass(slots=True)
class _Counters:
    """What a checkpoint keeps of the loop."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0

    def progress(self) -> Progress:
        return Progress(
            iteration=self.iteration,
            consumed_train_samples=self.consumed_train_samples,
            consumed_valid_samples=self.consumed_valid_samples,
            skipped_iterations=self.skipped_iterations,
        )


class Trainer:
    """Trains a built run to its end.

    The caller keeps no reference to the run: where ``auto`` moves the stages, it is taken down and
    another one takes its place, :attr:`run`.

    Args:
        run: the built run.
        log: where progress goes.
        profiler: steps with the iterations.
        stop: asks for an early end.
        progress: where a loaded checkpoint left off, ``None`` at a fresh start.
        tell_position: told where the run is, for the messages of a rank that is lost.
        connect: told the run whose channels shall hear of a rank that is lost, ``None`` while there
            are no channels.
        local: where checkpoints go first.
    """

    COMPLETE = COMPLETE

    def __init__(
        self,
        run: Run,
        log: TrainingLog,
        profiler: Profiler,
        stop: StopRequest,
        progress: Progress | None,
        tell_position: Callable[[str], None],
        connect: Callable[[Run | None], None],
        local: LocalDisk | None = None,
    ) -> None:
        config = run.job.config
        self._local = local
        self._tell_position = tell_position
        self._connect = connect
        self._log = log
        self._adopt(run)
        self._profiler = profiler
        self._stop = stop
        self._counters = _Counters()
        if progress is not None:
            self._counters = _Counters(
                progress.iteration,
                progress.consumed_train_samples,
                progress.consumed_valid_samples,
                progress.skipped_iterations,
            )
        if run.replay is not None and not config.run.skip_train:
            run.replay.require_steps(self._counters.iteration + 1, run.samples.iterations)
        self._sizes = BatchSizes(config.batch, config.parallel.data_parallel_size)
        self._tuner = make_tuner(run)
        self._decision: Decision | None = None  # to move, at the end of this iteration
        self._repartitioner = make_repartitioner(run, log.message)
        self._layers_move: Move | None = None  # also then
        self._loader: Any = None
        self._recording = make_recording(run, self._counters.iteration)
        self._diagnosis = _make_diagnosis(run, log, self._counters.iteration)
        self._saved_at = self._counters.iteration if progress is not None else -1
        self._iterations_here = 0
        self._told_saved = -1
        self._waited_s = 0.0  # for the last checkpoint

    @property
    def run(self) -> Run:
        """What is trained; another object after a move."""
        return self._run

    def _adopt(self, run: Run) -> None:
        self._run = run
        self._config = run.job.config
        self._checkpoints = Checkpoints(
            run.job, run.chunks, run.optimizer, run.scheduler, self._local
        )
        self._step = Step(run)
        self._copies = make_copies(run, self._log, lambda: self._counters.progress())

    def train(self) -> str:
        """Train until the iterations, the samples or the patience end.

        Returns:
            Why it ended, one phrase.

        Raises:
            DeviceMemoryError: the device ran out of memory.
        """
        config, counters = self._config, self._counters
        self._open_loader()
        if config.run.manual_gc:
            gc.disable()
        reason = self.COMPLETE
        try:
            while not self._is_finished():
                self._iteration()
                if config.run.eval_iters and counters.iteration % config.run.eval_interval == 0:
                    self._validate(f"iteration {counters.iteration}")
                self._copies.take(counters.iteration)
                self._save_if_due()
                early = self._early_end()
                if early is not None:
                    reason = early
                    break
                if self._decision is not None and not self._is_finished():
                    self._move(self._decision)
                if self._layers_move is not None and not self._is_finished():
                    self._repartition(self._layers_move)
            self._copies.close()
        finally:
            self._close_loader()
            if self._diagnosis is not None:
                self._diagnosis.close()
        if self._recording is not None:
            self._recording.write(self._run.job.control_group)
        self._stop.finish()
        if config.checkpoint.save is not None and self._saved_at != counters.iteration:
            self._save()
        self._checkpoints.close()
        self._tell_completed()
        return reason

    def evaluate_at_end(self) -> None:
        """Validate and test once more, as Megatron-LM does after the last iteration."""
        if not self._config.run.eval_iters:
            return
        prefix = f"iteration {self._counters.iteration}"
        self._validate(f"{prefix} on validation set")
        if self._run.samples.valid_samples:
            losses = self._evaluate(self._run.samples.test, 0)
            self._report_validation(f"{prefix} on test set", losses)

    def _is_finished(self) -> bool:
        if self._config.run.skip_train:
            return True
        return self._counters.iteration >= self._run.samples.iterations

    def _open_loader(self) -> None:
        run = self._run
        self._loader = make_loader(
            run,
            run.samples.train,
            self._counters.consumed_train_samples,
            on_read=None if run.tracing.recorder is None else run.tracing.data_read,
        )

    def _close_loader(self) -> None:
        if self._loader is not None:
            self._loader.close()
        self._loader = None

    def _move(self, decision: Decision) -> None:
        """Go on under another placement, from the same state. Collective over all ranks.

        Raises:
            CheckpointError: the state was written but could not be read back.
        """
        assert decision.move is not None
        self._decision = self._tuner = None
        start = time.perf_counter()
        job, iteration = self._run.job, self._counters.iteration
        kind = decision.move.placement.kind
        self._checkpoints.finish()
        self._tell_position(f"the move of the stages after iteration {iteration}")
        try:
            folder = relocate.pack(self._run, self._counters.progress())
        except CheckpointError as error:
            if decision.stay is not None:
                use(self._run, decision.stay)
            self._log.message(f"  the stages stay as they are, without {decision.move}: {error}")
            return
        failed = True
        try:
            self._close_loader()
            self._copies.close()
            self._connect(None)
            relocate.take_down(self._run)
            # So that their memory is free.
            del self._run, self._step, self._checkpoints, self._copies
            self._adopt(relocate.unpack(job, kind, folder))
            failed = False
        finally:
            relocate.discard(job, folder, failed=failed)
        self._connect(self._run)
        use(self._run, decision.move)
        if self._repartitioner is not None:
            self._repartitioner.adopt(self._run)
        self._open_loader()
        self._log.hand_over(iteration, is_writer=self._run.job.is_writer, tell=self._run.job.gather)
        self._log.message(
            f"  the stages now lie in a {kind}: moved in {time.perf_counter() - start:.2f} s"
        )

    def _repartition(self, move: Move) -> None:
        """Go on with other layers per stage, from the same state. Collective over all ranks."""
        self._layers_move = None
        start, iteration = time.perf_counter(), self._counters.iteration
        self._checkpoints.finish()
        self._tell_position(f"the move of layers after iteration {iteration}")
        self._copies.close()
        del self._copies
        self._adopt(restage(self._run, move.partition))
        job = self._run.job
        if self._config.schedule.trace_dir is not None:
            self._close_loader()  # it tells the former trace what it reads
            self._open_loader()
            self._log.hand_over(iteration, is_writer=job.is_writer, tell=job.gather)
        assert self._repartitioner is not None
        seconds = time.perf_counter() - start
        self._log.tell(repartitioned=iteration, seconds=seconds)
        self._repartitioner.moved(move, self._run, seconds)

    def _iteration(self) -> None:
        run, counters = self._run, self._counters
        start = time.perf_counter()
        batch = self._sizes.global_batch_size_at(counters.consumed_train_samples)
        num_microbatches = self._own(
            self._sizes.num_microbatches_at(counters.consumed_train_samples)
        )
        iteration = counters.iteration + 1
        self._tell_position(f"iteration {iteration}")
        self._profiler.step(counters.iteration)
        traced = self._config.schedule.traces(self._iterations_here)
        run.tracing.begin_iteration(iteration, num_microbatches, is_traced=traced)
        microbatches = None if self._loader is None else self._loader.step(num_microbatches)
        result = self._step.train(
            microbatches, num_microbatches, iteration, self._copies.before_update
        )
        if result.updated:
            run.scheduler.step(increment=batch)
        else:
            counters.skipped_iterations += 1
        if self._recording is not None and run.wiring is not None:
            self._recording.append(iteration, run.wiring.executor.last_codes)
        if self._tuner is not None and self._step.times is not None:
            decision = self._tuner.after_step(self._step.times, num_microbatches)
            if decision is not None:
                self._log.message(f"  {decision.text}")
                self._decision = decision if decision.move is not None else None
        if self._repartitioner is not None and self._decision is None:
            assert self._step.times is not None
            self._layers_move = self._repartitioner.after_step(self._step.times, num_microbatches)
        counters.iteration = iteration
        counters.consumed_train_samples += batch
        self._iterations_here += 1
        self._copies.settle(iteration)
        self._log.iteration(
            IterationReport(
                iteration=iteration,
                consumed_samples=counters.consumed_train_samples,
                elapsed_s=time.perf_counter() - start,
                learning_rate=_learning_rate(run.optimizer),
                global_batch_size=batch,
                losses=result.losses,
                loss_scale=float(run.optimizer.get_loss_scale()),
                grad_norm=result.grad_norm,
                skipped=not result.updated,
                is_nan=not all(math.isfinite(loss) for loss in result.losses.values()),
                params_norm=params_norm(run) if self._config.logging.log_params_norm else None,
                num_zeros=result.num_zeros,
                bubble_fraction=result.bubble_fraction,
                memory_bytes=run.job.accelerator.memory_in_use_bytes(),
                peak_memory_bytes=run.job.accelerator.peak_memory_bytes(),
            )
        )
        if self._diagnosis is not None:
            self._diagnosis.after_iteration(iteration)
        if iteration % self._config.logging.log_interval == 0:
            self._log_timers(iteration)
        interval = self._config.run.manual_gc_interval
        if self._config.run.manual_gc and interval and iteration % interval == 0:
            gc.collect()

    def _own(self, num_microbatches: int) -> int:
        """Microbatches of this rank, given those of a copy of the model."""
        parallel = self._config.parallel
        if parallel.unequal_sizes is None:
            return num_microbatches
        pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        return parallel.microbatches_of(pp_rank, num_microbatches)

    def _log_timers(self, iteration: int) -> None:
        """Report megatron-core's timers, where ``--timing-log-level`` asks for them. Collective."""
        timers, logging = self._run.core.timers, self._config.logging
        if timers is None:
            return
        names = list(timers._timers)
        if logging.log_timers_to_tensorboard:
            writer = self._log.tensorboard
            timers.write(names, writer, iteration, normalizer=logging.log_interval, reset=False)
        text = timers.get_all_timers_string(names, normalizer=logging.log_interval)
        if text:
            self._log.message(text)

    def _validate(self, prefix: str) -> None:
        counters = self._counters
        losses = self._evaluate(self._run.samples.valid, counters.consumed_valid_samples)
        counters.consumed_valid_samples += (
            self._config.run.eval_iters * self._config.batch.global_batch_size
        )
        self._report_validation(prefix, losses)

    def _evaluate(self, dataset: Any, consumed_samples: int) -> dict[str, float]:
        """Run the forward over ``--eval-iters`` batches; returns the mean losses."""
        run, config = self._run, self._config
        loader = make_loader(run, dataset, consumed_samples)
        try:
            with run.tracing.host_span("evaluate"):
                return self._step.evaluate(
                    loader,
                    config.run.eval_iters,
                    self._own(config.num_microbatches),
                    # Besides asking, this keeps the first stage from running ahead of the others.
                    until=lambda: self._stop.agreed(run.job.stop_group),
                )
        finally:
            if loader is not None:
                loader.close()

    def _report_validation(self, prefix: str, losses: dict[str, float]) -> None:
        self._log.validation(self._counters.iteration, prefix, losses)

    def _save_if_due(self) -> None:
        checkpoint = self._config.checkpoint
        if checkpoint.save is None or not checkpoint.save_interval:
            return
        self._tell_completed()
        if self._counters.iteration % checkpoint.save_interval == 0:
            self._save(behind=checkpoint.saves_behind and not self._is_finished())

    def _save(self, *, behind: bool = False) -> None:
        start = time.perf_counter()
        if self._recording is not None:
            self._recording.write(self._run.job.control_group)
        with self._run.tracing.host_span("checkpoint"):
            gather_parameters(self._run)
            save = self._checkpoints.save_behind if behind else self._checkpoints.save
            path: Path | None = save(self._counters.progress())
        self._saved_at = self._counters.iteration
        self._waited_s = time.perf_counter() - start
        if path is not None:
            self._tell_saved(self._saved_at, path)

    def _tell_completed(self) -> None:
        """Tell of checkpoints that were completed behind training."""
        while (done := self._checkpoints.completed()) is not None:
            if done[0] != self._told_saved:
                self._tell_saved(*done)

    def _tell_saved(self, iteration: int, path: Path) -> None:
        self._log.tell(saved=iteration, seconds=self._waited_s)
        self._told_saved = iteration
        behind = self._config.checkpoint.saves_behind
        self._log.message(saved_line(iteration, path, self._waited_s, is_behind=behind))

    def _early_end(self) -> str | None:
        """Return why training ends before its time, ``None`` if it goes on; all ranks agree."""
        if self._stop.agreed(self._run.job.stop_group):
            return self._stop.reason
        interval = self._config.run.exit_interval
        if interval and self._counters.iteration % interval == 0:
            return f"--exit-interval {interval}"
        return None


def _make_diagnosis(run: Run, log: TrainingLog, done: int) -> RunningDiagnosis | None:
    """What diagnoses the run from its traces, on the rank that writes the log."""
    schedule = run.job.config.schedule
    interval = schedule.diagnose_interval
    if schedule.trace_dir is None or run.tracing.recorder is None or not run.job.is_writer:
        return None
    if not interval or run.samples.iterations - done <= interval:
        return None
    return RunningDiagnosis(schedule.trace_dir, interval, done, log.message, log.tell)


def _learning_rate(optimizer: Any) -> float:
    return max(float(group["lr"]) for group in optimizer.param_groups)
