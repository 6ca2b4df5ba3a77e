"""Runs the training loop, which calls hooks before and after each step.

A hook handles one task of a training run besides its steps, such as checkpoints. The loop calls all
hooks in a fixed order. All hooks have access to the run.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.core import parallel_state

from megatron.adaptive.checkpoint.node_local import LocalDisk
from megatron.adaptive.checkpoint.saver import CheckpointSaver
from megatron.adaptive.checkpoint.snapshots import make_snapshots
from megatron.adaptive.checkpoint.trainer_checkpoints import Checkpoints, Progress, RunState
from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.config.schedule_specs import PlacementKind
from megatron.adaptive.config.trainer import flag_specs
from megatron.adaptive.data.loader import BatchSizes
from megatron.adaptive.data.tokenizer import build_tokenizer
from megatron.adaptive.engine.diagnosis import RunningDiagnosis
from megatron.adaptive.engine.process_context import Job
from megatron.adaptive.engine.progress import COMPLETE, saved_line, skipped_line
from megatron.adaptive.engine.stages import ForwardBackward
from megatron.adaptive.engine.stop import StopRequest
from megatron.adaptive.errors import DeviceMemoryError
from megatron.adaptive.gpt.setup import Run, make_loader, make_recording
from megatron.adaptive.gpt.train_step import Step, gather_parameters, params_norm
from megatron.adaptive.planner.choose_partition import Decision
from megatron.adaptive.rebalance.auto_schedule import Tuner
from megatron.adaptive.rebalance.judgement import Move
from megatron.adaptive.rebalance.microbatch_dealing import ReplicaDealing
from megatron.adaptive.rebalance.move_stages import move_stages
from megatron.adaptive.rebalance.repartition import Repartitioner, make_tuner
from megatron.adaptive.schedule.action import each_count
from megatron.adaptive.schedule.choose_slices import NextTrial, SliceTrial
from megatron.adaptive.trace.trace_format import SLICES
from megatron.adaptive.training.hook import Hook
from megatron.adaptive.training.interval_probe import IntervalProbe
from megatron.adaptive.training.logging import IterationReport, TrainedStep, TrainingLog
from megatron.adaptive.training.slice_lengths import SliceLengths


class Trainer:
    """Trains a model until the last iteration or until it is asked to stop.

    Args:
        live: Run to train, with its checkpoints, snapshots and data loader.
        profiler: Hook that profiles the iterations that the flags select.
        stop: Object that receives requests to stop early, such as signals.
    """

    def __init__(self, live: TrainingRun, profiler: Hook, stop: StopRequest) -> None:
        self._live = live
        self._stop = stop
        run = live.run
        config = live.config
        if run.replay is not None and not config.run.skip_train:
            run.replay.record.require_steps(live.progress.iteration + 1, run.samples.iterations)
        self._sizes = BatchSizes(config.batch, config.parallel.data_parallel_size)
        self._steps_here = 0
        self._skipped_here = 0
        self._validation = Validation(live, stop)
        recorder = OrderRecorder(live)
        self._hooks: list[Hook] = [
            recorder,
            Rebalancing(live),
            SliceLengths(live),
            profiler,
            Reporting(live),
            Probing(live),
            Diagnosing(live),
            GarbageCollection(live),
            self._validation,
            Saving(live, recorder),
        ]

    def train(self) -> None:
        """Trains until the last iteration or a request to stop, and validates at the end.

        Raises:
            DeviceMemoryError: If the device runs out of memory.
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
        if self._live.dealing is not None:
            self._live.dealing.finish()
        for hook in self._hooks:
            hook.at_end()
        self._live.log.ends(early or COMPLETE)
        self._report_skipped()
        if early is None:
            self._validation.after_training()

    def _train_step(self) -> TrainedStep:
        live = self._live
        run = self._live.run
        begin_s = time.perf_counter()
        done = live.progress
        iteration = done.iteration + 1
        batch = self._sizes.global_batch_size_at(done.consumed_train_samples)
        num_microbatches = live.own_microbatches(
            self._sizes.num_microbatches_at(done.consumed_train_samples)
        )
        live.report_position(f"iteration {iteration}")
        is_traced = live.config.schedule.traces(self._steps_here)
        microbatches = dealt = None
        if live.dealing is not None:
            microbatches, dealt = live.dealing.take(live.loader, num_microbatches, iteration)
            num_microbatches = len(dealt.numbers)
        elif live.loader is not None:
            microbatches = live.loader.step(num_microbatches)
            # Update the count, because packing may have reduced the number of microbatches.
            num_microbatches = len(microbatches)
        lengths = getattr(microbatches, "contents", ())
        slices: tuple[int, ...] = ()
        if live.config.slice_tokens is not None and run.slices is not None:
            run.slices.plan(lengths)
            # The header of the trace contains the number of slices only if it never changes.
            if live.config.constant_slices == 1:
                slices = each_count(num_microbatches, run.slices.count)
        run.tracing.begin_iteration(
            iteration, num_microbatches, is_traced=is_traced, lengths=lengths, slices=slices
        )
        result = live.step.train(
            microbatches, num_microbatches, iteration, live.snapshots.before_update, dealt
        )
        if live.dealing is not None and live.step.times is not None:
            live.dealing.after_step(live.step.times)
        if result.updated:
            run.scheduler.step(increment=batch)
        live.advance(
            iteration=iteration,
            consumed_train_samples=done.consumed_train_samples + batch,
            skipped_iterations=done.skipped_iterations + (not result.updated),
        )
        self._steps_here += 1
        self._skipped_here += not result.updated
        return TrainedStep(
            **vars(result),
            iteration=iteration,
            begin_s=begin_s,
            global_batch_size=batch,
            num_microbatches=num_microbatches,
            load=getattr(microbatches, "load", None),
        )

    def _report_skipped(self) -> None:
        """Warns if this process has skipped many steps because gradients were infinite or NaN."""
        precision = self._live.config.precision
        if not precision.fp16:
            return
        name = "initial_loss_scale" if precision.loss_scale is None else "loss_scale"
        scale = flag_specs()[name].text_of(getattr(precision, name))
        line = skipped_line(self._skipped_here, self._steps_here, f"lower {scale}, or use --bf16")
        if line is not None:
            self._live.log.message(line)

    def _early_end(self) -> str | None:
        """Returns the reason to end training early, or ``None``. All ranks get the same result."""
        if self._stop.agreed(self._live.run.job.stop_group):
            return self._stop.reason
        interval = self._live.config.run.exit_interval
        if interval and self._live.progress.iteration % interval == 0:
            return f"--exit-interval {interval}"
        return None


class RunHook(Hook):
    """Hook that has access to the run."""

    def __init__(self, live: TrainingRun) -> None:
        self._live = live


class TrainingRun:
    """Holds the current run, with its checkpoints, snapshots and data loader.

    If stages move to other ranks, a new run replaces the current run. The current run is destroyed
    first, so the caller must not keep a reference to it.

    Args:
        run: Run with a built model.
        log: Log for steps, messages and validations.
        progress: Number of iterations and samples in a loaded checkpoint, or ``None`` if no
            checkpoint was loaded.
        report_position: Function that is called with a description of what the rank is doing, for
            error messages about lost peers.
        connect: Function that makes the process watcher notify the channels of a run about lost
            ranks. Its argument is the run, or ``None`` while there are no channels.
        local: Local disk of this node, to which checkpoints are written first, or ``None`` if there
            is no such disk.

    Attributes:
        run: Run that is being trained.
        log: Log for steps, messages and validations.
        config: Settings of the run.
        progress: Number of completed iterations and consumed samples.
        is_loaded: Whether training began from a checkpoint.
        weights_iteration: Iteration of the checkpoint from which the weights were loaded, even if
            the run itself starts at iteration 0; 0 without a checkpoint.
        step: Object that runs training and validation steps.
        dealing: Object that distributes microbatches over replicas, or ``None`` if they are
            distributed round-robin.
        checkpoints: Object that saves and loads checkpoints.
        snapshots: Object that takes in-memory snapshots.
        loader: Loader of this rank's microbatches, or ``None`` on a rank that does not need data.
    """

    def __init__(
        self,
        run: Run,
        log: TrainingLog,
        progress: Progress | None,
        *,
        report_position: Callable[[str], None],
        connect: Callable[[Run | None], None],
        local: LocalDisk | None,
    ) -> None:
        self.log = log
        self._local = local
        self.report_position = report_position
        self.connect = connect
        self.is_loaded = progress is not None
        self.weights_iteration = 0
        self.progress = progress or Progress()
        self.loader: Any = None
        self._saver: CheckpointSaver | None = None
        self.adopt(run)

    def adopt(self, run: Run) -> None:
        """Makes ``run`` the current run, and creates the objects that belong to it."""
        self.run = run
        self.config = run.job.config
        # Keep the saver when stages move, because the result of its last background save may still
        # be pending.
        self.checkpoints = Checkpoints(run, self._local, saver=self._saver)
        self._saver = self.checkpoints.saver
        self.step = Step(run)
        self.dealing: ReplicaDealing | None = None
        if self.config.balance != "off" and not self.config.run.skip_train:
            self.dealing = ReplicaDealing(run, self.log.message)
        self.snapshots = make_snapshots(
            run.job,
            lambda: RunState(run, lambda: self.progress),
            lambda text: self.log.report(copies=text),
            self.log.message,
        )

    def release(self) -> None:
        """Drops all references to the current run, so that the run's memory can be freed."""
        self.close_loader()
        self.snapshots.close()
        self.connect(None)
        if self.dealing is not None:
            self.dealing.finish()
        del self.run, self.step, self.checkpoints, self.snapshots, self.dealing

    def rebuild(
        self,
        iteration: int,
        release: Callable[[], None],
        *,
        kind: PlacementKind | None = None,
        partition: Sequence[int] | None = None,
        slices: int | None = None,
        tokens: int | None = None,
    ) -> Run:
        """Replaces the current run with a run that has the same state but other stages or slices.

        All ranks must call this. The data loader is connected to the trace of the new run. The rank
        that computes the loss in the new run writes the log from then on.

        Args:
            iteration: Index of the last iteration.
            release: Callback that drops all references to the run, using :meth:`release`.
            kind: New placement of stages on ranks, or ``None`` for the current placement.
            partition: New number of layers per stage, or ``None`` for the current partition.
            slices: New number of slices per sequence, or ``None`` for the current number.
            tokens: New number of tokens per slice, or ``None`` for the current number.

        Raises:
            DeviceMemoryError: If a rank has too little memory. If the current run was not released
                before the error, it still exists and is unchanged.
        """
        self.checkpoints.saver.wait()
        self.report_position(f"the move of layers after iteration {iteration}")
        moved = move_stages(
            [self.run], release, kind=kind, partition=partition, slices=slices, tokens=tokens
        )
        self.adopt(moved)
        self.connect(moved)
        self.close_loader()
        self.open_loader()
        job = moved.job
        self.log.hand_over(self.progress.iteration, is_writer=job.is_writer, gather=job.gather)
        return moved

    @property
    def is_finished(self) -> bool:
        """Returns whether all training steps are completed or training is skipped."""
        return self.config.run.skip_train or self.progress.iteration >= self.run.samples.iterations

    def advance(self, **changes: int) -> None:
        """Sets counters of ``progress``. ``changes`` maps their names to the new values."""
        self.progress = dataclasses.replace(self.progress, **changes)

    def own_microbatches(self, num_microbatches: int) -> int:
        """Returns the number of microbatches that this rank processes per step.

        Args:
            num_microbatches: Number of microbatches per step on each replica of the model.
        """
        parallel = self.config.parallel
        if parallel.unequal_sizes is None:
            return num_microbatches
        pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        return parallel.microbatches_of(pp_rank, num_microbatches)

    def open_loader(self) -> None:
        """Creates a loader that starts at the first unused training sample."""
        run = self.run
        self.loader = make_loader(
            run,
            run.samples.train,
            self.progress.consumed_train_samples,
            on_read=None if run.tracing.recorder is None else run.tracing.data_read,
        )

    def close_loader(self) -> None:
        """Stops the processes of the loader. Safe to call more than once."""
        if self.loader is not None:
            self.loader.close()
        self.loader = None


class OrderRecorder(RunHook):
    """Records the order of actions of every step, for ``--record-schedule``."""

    def __init__(self, live: TrainingRun) -> None:
        super().__init__(live)
        self._recording = make_recording(live.run, live.progress.iteration)

    def after_step(self, step: TrainedStep) -> None:
        wiring = self._live.run.wiring
        if self._recording is not None and wiring is not None:
            dealing = self._live.dealing
            shares = None if dealing is None else dealing.shares
            self._recording.append(step.iteration, wiring.executor.last_codes, shares)

    def write(self) -> None:
        """Writes the recorded orders to the user's file. All ranks must call this."""
        if self._recording is not None:
            self._recording.write(self._live.run.job.control_group)

    def at_end(self) -> None:
        self.write()


def shares_gpus(job: Job) -> bool:
    """Returns whether any two ranks of ``job`` share a GPU. All ranks must call this."""
    return any(job.gather(job.accelerator.is_shared))


class Rebalancing(RunHook):
    """Measures steps, and changes the schedule or the stages if this makes steps faster.

    With ``--pipeline-schedule auto``, this hook chooses the schedule once, after the first steps,
    and also the number of layers of each stage, unless ``--partition`` sets it. After layers have
    moved, the hook measures again from time to time, because a rank may have been slow only
    temporarily. With ``--repartition auto``, the hook chooses the number of layers again after each
    interval. If microbatches are divided into slices, the hook passes the measured times to the
    schedule ``hinted``, which chooses the order of actions at run time. All ranks make the same
    decisions. A decision takes effect before the next step.
    """

    def __init__(self, live: TrainingRun) -> None:
        super().__init__(live)
        self._log = live.log
        self._settings = settings = live.config.schedule
        self._repartitioner: Repartitioner | None = None
        # If --slice-tokens is set, the hook SliceLengths chooses the schedule and the slice length.
        is_tuned = settings.pipeline_schedule == "auto" and settings.slice_tokens is None
        moves = settings.repartition != "off" or (is_tuned and live.run.placement.num_ranks > 1)
        if moves and shares_gpus(live.run.job):
            live.log.message(f"  layers do not move, because measured times reflect {SLICES}")
        elif moves:
            self._repartitioner = Repartitioner(live.run, live.log.message)
        self._numbers = live.config.slices_to_choose
        # Compare orders of actions only if there are slices. Without slices, the default order is
        # best for most pipelines.
        self._only_pace = (
            settings.pipeline_schedule == "hinted"
            and settings.replay_schedule is None
            and live.config.constant_slices > 1
        )
        self._tuner = self._make_tuner() if is_tuned or self._only_pace else None
        self._due: Decision | Move | NextTrial | None = None
        self._promise: Move | None = None

    def _make_tuner(self, trial: SliceTrial | None = None) -> Tuner:
        return make_tuner(
            self._live.run,
            self._repartitioner,
            lambda text: self._log.message(f"  {text}"),
            numbers=self._numbers,
            trial=trial,
            only_pace=self._only_pace,
        )

    def after_step(self, step: TrainedStep) -> None:
        times = self._live.step.times
        if self._repartitioner is not None:
            assert times is not None
            # Do not move layers until the tuner has decided, because it measures the current run.
            self._due = self._repartitioner.after_step(
                times, step.num_microbatches, may_decide=self._tuner is None
            )
        if self._tuner is not None and times is not None:
            decision = self._tuner.after_step(times, step.num_microbatches)
            if decision is not None:
                self._tuner = None
                self._log.message(f"  {decision.text}")
                if isinstance(decision, NextTrial):
                    self._due = decision
                    return
                if decision.move is not None:
                    self._due = decision
                    if self._repartitioner is not None:
                        self._promise = self._repartitioner.promise_of(decision)
        self._close_if_done()

    def _close_if_done(self) -> None:
        """Stops measuring the layers if they will not move again."""
        layers = self._repartitioner
        if self._tuner is None and self._due is None and layers and not layers.is_needed:
            layers.close()
            self._repartitioner = None

    def before_step(self, iteration: int) -> None:
        due, self._due = self._due, None
        if due is None:
            return
        live = self._live
        begin_s = time.perf_counter()
        order = due.move if isinstance(due, Decision) else None
        former = live.run.placement.kind
        kind = former if order is None else order.placement.kind
        partition = None if isinstance(due, NextTrial) else due.partition
        slices = _other_slices(due, live.config.num_slices)
        try:
            moved = live.rebuild(
                iteration, self._release, kind=kind, partition=partition, slices=slices
            )
        except DeviceMemoryError as error:
            if not hasattr(live, "run"):
                raise
            self._stay(due, error)
            return
        seconds = time.perf_counter() - begin_s
        if slices is not None:
            self._log.report(recut=iteration, slices=slices, seconds=seconds)
            text = "are no longer cut into slices" if slices == 1 else f"now run in {slices} slices"
            self._log.message(f"  sequences {text}: rebuilt in {seconds:.2f} s")
        else:
            self._log.report(repartitioned=iteration, seconds=seconds)
        if order is not None:
            _engine_of(moved).use(order)
            promise, self._promise = self._promise, None
            if self._repartitioner is not None and promise is not None:
                self._repartitioner.expect(promise, moved)
            elif self._repartitioner is not None:
                self._repartitioner.adopt(moved)
            if kind != former or partition is not None:
                cut = "" if partition is None else f" of {format_partition(partition)} layers"
                self._log.message(
                    f"  the stages{cut} are now placed in a {kind}: moved in {seconds:.2f} s"
                )
        elif isinstance(due, Move):
            assert self._repartitioner is not None
            self._repartitioner.moved(due, moved, seconds)
        elif isinstance(due, NextTrial):
            if self._repartitioner is not None:
                self._repartitioner.adopt(moved)
            self._tuner = self._make_tuner(due.trial)

    def _release(self) -> None:
        if self._repartitioner is not None:
            self._repartitioner.close()
        self._live.release()

    def _stay(self, due: Decision | Move | NextTrial, error: DeviceMemoryError) -> None:
        """Cancels the change ``due``, which raised ``error`` because it needs too much memory."""
        if isinstance(due, NextTrial):
            self._log.message(f"  the number of slices cannot be changed: {error}")
            self._numbers = ()
            self._tuner = self._make_tuner()
            return
        self._promise = None
        change = due.move if isinstance(due, Decision) else format_partition(due.partition)
        self._log.message(f"  the stages cannot be changed to {change}: {error}")
        if isinstance(due, Decision) and due.stay is not None:
            _engine_of(self._live.run).use(due.stay)


def _other_slices(due: Decision | Move | NextTrial, present: int) -> int | None:
    """Returns the number of slices after applying ``due``, or ``None`` if it is unchanged.

    Args:
        due: Change to apply.
        present: Current number of slices per sequence.
    """
    if isinstance(due, NextTrial):
        return due.num_slices
    if isinstance(due, Move) or due.move is None or due.move.num_slices == present:
        return None
    return due.move.num_slices


def _engine_of(run: Run) -> ForwardBackward:
    assert isinstance(run.forward_backward, ForwardBackward)
    return run.forward_backward


class Reporting(RunHook):
    """Logs each step, and logs megatron-core's timers every ``--log-interval`` iterations.

    Before logging a step, this hook waits until all nodes have stored the snapshot of the previous
    step.
    """

    def after_step(self, step: TrainedStep) -> None:
        live = self._live
        run = self._live.run
        settings = self._live.config.logging
        live.snapshots.settle(step.iteration)
        live.log.iteration(
            IterationReport(
                **vars(step),
                consumed_samples=live.progress.consumed_train_samples,
                elapsed_s=time.perf_counter() - step.begin_s,
                learning_rate=max(float(group["lr"]) for group in run.optimizer.param_groups),
                loss_scale=float(run.optimizer.get_loss_scale()),
                params_norm=params_norm(run) if settings.log_params_norm else None,
                memory_bytes=run.job.accelerator.memory_in_use_bytes(),
                peak_memory_bytes=run.job.accelerator.peak_memory_bytes(),
            )
        )
        if step.iteration % settings.log_interval == 0:
            self._report_timers(step.iteration)

    def _report_timers(self, iteration: int) -> None:
        """Logs megatron-core's timers, if there are any. All ranks must call this."""
        timers = self._live.run.core.timers
        settings = self._live.config.logging
        if timers is None:
            return
        names = list(timers._timers)
        if settings.log_timers_to_tensorboard:
            writer = self._live.log.tensorboard
            timers.write(names, writer, iteration, normalizer=settings.log_interval, reset=False)
        text = timers.get_all_timers_string(names, normalizer=settings.log_interval)
        if text:
            self._live.log.message(text)


class Probing(RunHook):
    """Looks for slow ranks, links and groups between steps, if ``--probe-interval`` is set."""

    def __init__(self, live: TrainingRun) -> None:
        super().__init__(live)
        log = live.log
        self._probe = IntervalProbe(live.config.run.probe_interval, log.message, log.report)
        self._is_first = True

    def before_step(self, iteration: int) -> None:
        if self._is_first and self._probe.is_due_at_start(self._live.run):
            self._live.report_position("the probe before the first step")
            self._probe.run(self._live.run)
        self._is_first = False

    def after_step(self, step: TrainedStep) -> None:
        if self._probe.is_due(step.iteration):
            self._live.report_position(f"the probe after iteration {step.iteration}")
            self._probe.run(self._live.run)


class Diagnosing(Hook):
    """Searches the traces for causes of lost time. Only the rank that writes the log does this."""

    def __init__(self, live: TrainingRun) -> None:
        run = live.run
        done = live.progress.iteration
        schedule = run.job.config.schedule
        self._running = RunningDiagnosis(
            schedule.trace_dir if run.tracing.recorder is not None and run.job.is_writer else None,
            schedule.diagnose_interval,
            done,
            live.log.message,
            live.log.report,
            run.samples.iterations,
        )

    def after_step(self, step: TrainedStep) -> None:
        self._running.after_iteration(step.iteration)

    def close(self) -> None:
        self._running.close()


class GarbageCollection(Hook):
    """Runs Python's garbage collector on all ranks at the same time, if ``--manual-gc`` is set.

    The garbage collector runs every ``--manual-gc-interval`` iterations.
    """

    def __init__(self, live: TrainingRun) -> None:
        settings = live.config.run
        self._interval = settings.manual_gc_interval if settings.manual_gc else 0
        if settings.manual_gc:
            gc.disable()

    def after_step(self, step: TrainedStep) -> None:
        if self._interval and step.iteration % self._interval == 0:
            gc.collect()


class Validation(RunHook):
    """Computes the losses of validation and test samples, and reports them in the log."""

    def __init__(self, live: TrainingRun, stop: StopRequest) -> None:
        super().__init__(live)
        self._stop = stop

    def after_step(self, step: TrainedStep) -> None:
        settings = self._live.config.run
        if settings.eval_iters and step.iteration % settings.eval_interval == 0:
            self._validate(f"iteration {step.iteration}")

    def after_training(self) -> None:
        """Reports validation and test losses after the last iteration, as Megatron-LM does."""
        settings = self._live.config.run
        data = self._live.config.data
        if settings.eval_iters:
            # Show the iteration of the weights if training is skipped, because --finetune resets
            # the progress to 0.
            live = self._live
            iteration = live.weights_iteration if settings.skip_train else live.progress.iteration
            prefix = f"iteration {iteration}"
            self._validate(f"{prefix} on validation set")
            samples = self._live.run.samples
            if samples.valid_samples and (data.test_data_path or not data.has_path_per_split):
                self._report(f"{prefix} on test set", self._evaluate(samples.test, 0))
        if settings.sample_prompt is not None:
            self._continue(settings.sample_prompt, settings.sample_tokens)

    def _continue(self, prompt: str, count: int) -> None:
        """Prints ``prompt`` and up to ``count`` tokens that the model generates after it."""
        live = self._live
        tokenizer = build_tokenizer(live.config.data)
        tokens = tokenizer.tokenize(prompt) or [tokenizer.eod]
        microbatches = live.own_microbatches(live.config.num_microbatches)
        continuation = live.step.generate(tokens, count, microbatches)
        live.log.message(f"sample: {prompt}{tokenizer.detokenize(continuation)}")

    def _validate(self, prefix: str) -> None:
        live = self._live
        config = self._live.config
        done = live.progress.consumed_valid_samples
        losses = self._evaluate(live.run.samples.valid, done)
        more = config.run.eval_iters * config.batch.global_batch_size
        live.advance(consumed_valid_samples=done + more)
        self._report(prefix, losses)

    def _report(self, prefix: str, losses: dict[str, float]) -> None:
        self._live.log.validation(self._live.progress.iteration, prefix, losses)

    def _evaluate(self, dataset: Any, consumed_samples: int) -> dict[str, float]:
        """Returns the mean losses over ``--eval-iters`` batches of ``dataset``.

        The first ``consumed_samples`` samples are skipped. The result is empty except on ranks of
        the last stage.
        """
        run = self._live.run
        config = self._live.config
        loader = make_loader(run, dataset, consumed_samples)
        try:
            with run.tracing.host_span("evaluate"):
                return self._live.step.evaluate(
                    loader,
                    config.run.eval_iters,
                    self._live.own_microbatches(config.num_microbatches),
                    # The all-reduce in this call also prevents the first stage from running ahead
                    # of the other stages.
                    until=lambda: self._stop.agreed(run.job.stop_group),
                )
        finally:
            if loader is not None:
                loader.close()


class Saving(RunHook):
    """Takes in-memory snapshots, and saves checkpoints.

    Checkpoints are saved every ``--save-interval`` iterations and at the end.
    """

    def __init__(self, live: TrainingRun, recorder: OrderRecorder) -> None:
        super().__init__(live)
        self._recorder = recorder
        self._saved_at = live.progress.iteration if live.is_loaded else -1
        # Time in seconds for which training waited for the last checkpoint.
        self._waited_s = 0.0

    def after_step(self, step: TrainedStep) -> None:
        self._live.snapshots.take(step.iteration)
        settings = self._live.config.checkpoint
        if settings.save is None or not settings.save_interval:
            return
        self._report_completed()
        if step.iteration % settings.save_interval == 0:
            self._save(behind=settings.saves_behind and not self._live.is_finished)

    def at_end(self) -> None:
        live = self._live
        live.snapshots.close()
        if live.config.checkpoint.save is not None and self._saved_at != live.progress.iteration:
            self._save(behind=False)
        live.checkpoints.saver.drain()
        self._report_completed()

    def _save(self, *, behind: bool) -> None:
        begin_s = time.perf_counter()
        live = self._live
        self._recorder.write()
        with live.run.tracing.host_span("checkpoint"):
            gather_parameters(live.run)
            path = live.checkpoints.save(live.progress, behind=behind)
        self._saved_at = live.progress.iteration
        waited_s = time.perf_counter() - begin_s
        # The background thread may have completed the previous checkpoint in the meantime. Report
        # that checkpoint before overwriting its waiting time.
        self._report_completed()
        self._waited_s = waited_s
        if path is not None:
            self._report_saved(self._saved_at, path)

    def _report_completed(self) -> None:
        """Logs the checkpoints that the background thread has completed since the last call."""
        while (done := self._live.checkpoints.saver.completed()) is not None:
            self._report_saved(*done)

    def _report_saved(self, iteration: int, path: Path) -> None:
        self._live.log.report(saved=iteration, seconds=self._waited_s)
        behind = self._live.config.checkpoint.saves_behind
        self._live.log.message(saved_line(iteration, path, self._waited_s, is_behind=behind))
