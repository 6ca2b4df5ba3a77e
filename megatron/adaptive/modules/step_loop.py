"""Iterates over the steps of a training run, which may stop and later continue.

::

    for step in pipeline.loop(1000, save_interval=100):      # 300, 301, ... after a checkpoint
        loss, overflow = pipeline.step(pipeline.share(batch_of(step)))
    ── if a stop is requested: save a checkpoint, and exit with status 0

A run may continue in a different layout. While the pipeline is open, the loop handles signals and
writes the progress file. Stops, checkpoints and reports work as in the trainer for GPT models (see
``engine.stop``, ``checkpoint.folder`` and ``engine.progress``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron.adaptive.checkpoint.folder import PipelineFolder
from megatron.adaptive.checkpoint.snapshots import SnapshotState, make_snapshots
from megatron.adaptive.config.environment import JobOrder
from megatron.adaptive.config.input_files import printable
from megatron.adaptive.engine.diagnosis import RunningDiagnosis
from megatron.adaptive.engine.process_context import naming_lost_peers
from megatron.adaptive.engine.progress import COMPLETE, ProgressFile, saved_line
from megatron.adaptive.engine.stop import StopRequest
from megatron.adaptive.errors import CheckpointError, ConfigError
from megatron.adaptive.modules.batch import require_whole
from megatron.adaptive.modules.mesh import Mesh
from megatron.adaptive.modules.sizes import JobEnded

if TYPE_CHECKING:
    from megatron.adaptive.modules.pipeline import Pipeline

NO_LOOP = (
    "Pipeline.step was called outside of Pipeline.loop in an elastic job; train within `for "
    "step in pipeline.loop(...)`, which saves and loads checkpoints; see docs/elastic.md"
)

_LEFT = "the script left the loop"
_BATCH = "loop_batch_size"


def _check_state(state: Mapping[str, Any]) -> None:
    """Checks that the user's objects in ``state`` have ``state_dict`` and ``load_state_dict``."""
    for name, user_object in state.items():
        if not (hasattr(user_object, "state_dict") and hasattr(user_object, "load_state_dict")):
            raise ConfigError(
                f"state[{name!r}] is a {type(user_object).__name__}; it must be an object with"
                " state_dict() and load_state_dict()"
            )


class Loop:
    """Iterates over the remaining steps from the newest checkpoint to ``total_steps``.

    All processes of the job must call the constructor and run each iteration.

    Args:
        pipeline: Pipeline that trains the model in each step.
        total_steps: Number of steps of the whole training run, counted from step 0.
        folder: Folder of checkpoints; ``None`` disables checkpoints. An elastic job uses its
            launcher's checkpoint folder instead.
        save_interval: Number of steps between checkpoints; ``None`` saves only at the end.
        keep: Number of newest complete checkpoints to keep; ``None`` for all.
        state: Objects whose states are also saved and loaded, keyed by name. See
            :meth:`Pipeline.save`.
        async_save: Whether a background thread writes checkpoints, so that training waits only for
            a copy in memory.
        local_folder: Folder on each node's local disk to which checkpoints are written first. A
            background thread copies them to ``folder``.
        diagnose_interval: Number of steps between searches for slow ranks in the trace; 0 disables
            the search. Ignored without a trace.
        trust_checkpoint: Whether to also load checkpoints of old versions, which contain pickles.
            They are read without running code. See ``docs/security.md``.

    Raises:
        CheckpointError: If the newest checkpoint cannot be loaded or has a different batch size, or
            another job saves to the folder.
        ConfigError: If a setting is invalid.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        total_steps: int,
        *,
        folder: str | Path | None = None,
        save_interval: int | None = None,
        keep: int | None = None,
        state: Mapping[str, Any] | None = None,
        async_save: bool = False,
        local_folder: str | Path | None = None,
        diagnose_interval: int = 100,
        trust_checkpoint: bool = False,
    ) -> None:
        state = state or {}
        require_whole(0, total_steps=total_steps, diagnose_interval=diagnose_interval)
        require_whole(1, save_interval=1 if save_interval is None else save_interval)
        require_whole(1, keep=1 if keep is None else keep)
        _check_state(state)
        mesh: Mesh = pipeline._mesh
        order: JobOrder | None = pipeline._order_of_job
        self._pipeline = pipeline
        self._mesh = mesh
        self._batch_size = pipeline._batch_size
        self._total = total_steps
        self._state = state
        self._extra = {_BATCH: self._batch_size}
        self._save_interval = save_interval
        self._keep = keep
        self._local_folder = local_folder
        self._folder = folder if order is None else order.checkpoints
        self._is_first = mesh.rank == 0
        self._current: int | None = None
        self._is_over = False
        self._steps = self._run()
        loaded_s = self._resume(trust_checkpoint)
        self._saved_at = pipeline.steps if pipeline.steps else -1
        self._waited_s = 0.0
        self._saves_behind = self._folder is not None and (async_save or local_folder is not None)
        self._group = dist.new_group(backend="gloo", timeout=mesh.timeout)
        self._progress = self._open_progress(order)
        self._stop = StopRequest()
        self._progress.begins(pipeline.steps, total_steps)
        if loaded_s is not None:
            self._progress.report({"loaded_s": loaded_s})
            self._say(f"continuing after step {pipeline.steps} of {total_steps}")
        self._snapshots = make_snapshots(mesh, self._snapshot_state, self._report_copies, self._say)
        self._diagnosis = RunningDiagnosis(
            pipeline._trace.folder if self._is_first else None,
            diagnose_interval,
            pipeline.steps,
            self._say,
            lambda **values: self._progress.report(values),
            total_steps,
        )

    def __iter__(self) -> Loop:
        return self

    def __next__(self) -> int:
        """Ends the current step, and returns the index of the next step.

        Raises:
            StopIteration: If all steps are completed.
            JobEnded: If a stop was requested. The state is saved first.
            CheckpointError: If a checkpoint could not be saved.
            ConfigError: If the caller did not train the step, or trained it twice.
            PeerLostError: If another rank has exited unexpectedly.
        """
        if self._is_over:
            raise StopIteration
        with naming_lost_peers():
            return next(self._steps)

    def _run(self) -> Iterator[int]:
        """Yields the index of each step, and ends the step after the caller has run it."""
        pipeline = self._pipeline
        while pipeline.steps < self._total:
            self._current = pipeline.steps
            self._begun_s = time.perf_counter()
            yield self._current
            self._end_step()
            if pipeline.steps < self._total and self._stop.agreed(self._group):
                assert self._stop.reason is not None
                self._finish(self._stop.reason)
                pipeline.close()
                raise JobEnded(0)
        self._finish(COMPLETE)

    def require(self, samples: int | None) -> None:
        """Checks that the batches of all replicas add up to the batch size.

        Args:
            samples: Number of samples in this replica's batch; ``None`` if the batch is a list of
                microbatches, whose samples are not counted.

        Raises:
            ConfigError: If the batches do not add up to the batch size, or the method is called
                outside of a step or twice in a step.
        """
        batch_size = self._batch_size
        replicas = self._pipeline.replicas
        if self._current is None or self._is_over:
            raise ConfigError(
                "Pipeline.step was called outside of the steps of Pipeline.loop; call it once in"
                " each iteration of the loop"
            )
        if self._pipeline.steps != self._current:
            raise ConfigError(
                f"Pipeline.step was called twice in step {self._current} of Pipeline.loop, so steps"
                " would be lost or repeated after a checkpoint; call it once in each iteration"
            )
        if samples is not None and samples * replicas != batch_size:
            raise ConfigError(
                f"step {self._current} of Pipeline.loop got {samples} samples on each of "
                f"{replicas} replicas, but the batch size is {batch_size}; pass "
                "pipeline.share(batch) of a whole batch to Pipeline.step, or pass batch_size to "
                "Pipeline"
            )

    def before_update(self) -> None:
        """Waits until snapshots have copied the current state, which the update will change."""
        self._snapshots.before_update()

    def trace_begins_anew(self) -> None:
        """Starts a new progress file after the trace files of the previous partition were moved.

        Later searches for slow ranks ignore all earlier steps.
        """
        self._diagnosis.begin_after(self._pipeline.steps)
        # Open a new file, because the previous file was moved together with the trace files.
        self._progress.close()
        self._progress = self._open_progress(None)
        self._progress.begins(self._pipeline.steps, self._total, moved=True)

    def close(self) -> None:
        """Restores the signal handlers, and closes the progress file and the process group.

        All processes must call this. Calling it more than once is safe.
        """
        self._snapshots.close()
        self._diagnosis.close()
        if self._saves_behind:
            self._pipeline._checkpointer.saver.close()
        if not self._is_over:
            self._is_over = True
            self._stop.finish()
            self._progress.report({"ended": _LEFT})
        self._stop.close()
        self._progress.close()
        group = self._group
        self._group = None
        if group is not None and dist.is_initialized():
            # Wait until no other rank uses the group before destroying it.
            dist.barrier(group=group)
            dist.destroy_process_group(group)

    def _open_progress(self, order: JobOrder | None) -> ProgressFile:
        """Opens the progress file on the first rank.

        The file is in the folder that the launcher's ``order`` specifies. Without a launcher, it is
        in the trace folder.
        """
        folder = self._pipeline._trace.folder if order is None else order.progress
        return ProgressFile(folder if self._is_first else None)

    def _report_copies(self, text: str) -> None:
        self._progress.report({"copies": text})

    def _snapshot_state(self) -> SnapshotState:
        """Returns the object that provides this rank's state for snapshots."""
        # Import this only when needed, because the import is slow.
        from megatron.adaptive.modules.checkpointer import PipelineState

        pipeline = self._pipeline
        head = partial(pipeline._head, self._extra)
        return PipelineState(pipeline._checkpointer, head, self._state)

    def _resume(self, trust: bool) -> float | None:
        """Loads the newest checkpoint, and returns the loading time in seconds.

        Returns ``None`` if there is no checkpoint. If ``trust`` is true, the checkpoint may contain
        pickles.
        """
        begin_s = time.perf_counter()
        local_folder = self._local_folder
        if self._folder is None:
            if local_folder is not None:
                raise ConfigError(
                    f"local_folder {local_folder} was passed without folder; also pass a folder on "
                    "storage that all nodes share, to which checkpoints are copied"
                )
            return None
        local = self._pipeline._checkpointer.prepare(self._folder, local_folder, self._keep)
        is_there = (
            self._is_first and next(PipelineFolder(self._folder).candidates(), None) is not None
        )
        if local is not None:
            local.resumed = 0
        if not self._mesh.from_first(is_there):
            return None
        extra = self._pipeline.load(self._folder, state=self._state, trust_checkpoint=trust)
        if local is not None:
            local.resumed = self._pipeline.steps
        before = extra.get(_BATCH, self._batch_size)
        if before != self._batch_size:
            raise CheckpointError(
                f"{self._folder}: the checkpoint was saved with {before} samples per step, but "
                f"the script has {self._batch_size}, so samples would be skipped or repeated; "
                f"use batch_size={before}, or another folder"
            )
        return time.perf_counter() - begin_s

    def _end_step(self) -> None:
        """Reports the current step, and saves a checkpoint if one is due."""
        pipeline = self._pipeline
        assert self._current is not None
        if pipeline.steps != self._current + 1:
            raise ConfigError(
                f"step {self._current} of Pipeline.loop was not trained; call Pipeline.step once in"
                " each iteration"
            )
        done = pipeline.steps
        self._snapshots.settle(done)
        values = {
            "loss": pipeline.loss,
            "step_ms": (time.perf_counter() - self._begun_s) * 1e3,
            "consumed_samples": done * self._batch_size,
            "grad_norm": pipeline.grad_norm,
        }
        self._progress.iteration(done, values, is_logged=False)
        self._diagnosis.after_iteration(done)
        self._snapshots.take(done)
        if self._saves_behind:
            self._report_completed()
        interval = self._save_interval
        if self._folder is not None and interval is not None and done % interval == 0:
            self._save(is_behind=self._saves_behind and done < self._total)

    def _finish(self, reason: str) -> None:
        """Saves a checkpoint of the last step if needed, and ends the loop.

        All processes must call this. ``reason``, which is printed, says why the loop ends.
        """
        self._is_over = True
        self._stop.finish()
        self._snapshots.close()
        self._diagnosis.close()
        if self._saves_behind:
            try:
                self._pipeline._checkpointer.saver.drain()
                self._report_completed()
            except CheckpointError as error:
                self._say(f"warning: {error}")
                self._saved_at = -1
        if self._folder is not None and self._saved_at != self._pipeline.steps:
            self._save()
        self._say(f"training ends: {reason}")
        self._pipeline._update.report_skipped()
        self._progress.report({"ended": reason})

    def _save(self, *, is_behind: bool = False) -> None:
        begin_s = time.perf_counter()
        assert self._folder is not None
        with self._pipeline._tracing.host_span("checkpoint"):
            path = self._pipeline._checkpointer.save(
                self._folder,
                self._pipeline._head(self._extra),
                keep=self._keep,
                state=self._state,
                is_behind=is_behind,
            )
        self._saved_at = self._pipeline.steps
        waited_s = time.perf_counter() - begin_s
        # The previous checkpoint may have been completed during this save. Report it before
        # _waited_s, the time that training waited for it, is replaced.
        self._report_completed()
        self._waited_s = waited_s
        if path is not None:
            self._report_saved(self._saved_at, path, is_behind=False)

    def _report_completed(self) -> None:
        """Reports the checkpoints that the background thread has completed since the last call."""
        while (completed := self._pipeline._checkpointer.saver.completed()) is not None:
            self._report_saved(*completed, is_behind=True)

    def _report_saved(self, step: int, path: Path, *, is_behind: bool) -> None:
        self._progress.report({"saved": step, "seconds": self._waited_s})
        self._say(saved_line(step, path, self._waited_s, is_behind=is_behind))

    def _say(self, text: str) -> None:
        if self._is_first:
            print(printable(text, lines=True), flush=True)
