"""The steps of a training that may end early and go on later, in another shape.

::

    for step in pipeline.loop(1000, save_interval=100):      # 300, 301, ... after a checkpoint
        loss, overflow = pipeline.step(pipeline.share(batch_of(step)))
    ── asked to stop: checkpoint, and the program ends with status 0; what follows runs at the end

It owns the signals and the progress file while the pipeline is open. When to stop, how
checkpoints appear and what is reported of them is as with the trainer: ``engine.stop``,
``checkpoint.folder``, ``engine.progress``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

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

NO_LOOP = (
    "this process belongs to a job that changes its shape, and Pipeline.step was called outside of"
    " Pipeline.loop: train within `for step in pipeline.loop(...)`, which saves and goes on; see"
    " docs/elastic.md"
)

_LEFT = "the script left the loop"
_BATCH = "loop_batch_size"


class Loop:
    """Iterates over the steps that are left, as ``range(total_steps)`` from a checkpoint on.

    Collective over all processes of the job, as each of its steps is.

    Args:
        pipeline: whose steps are counted.
        total_steps: of the whole training, those before a checkpoint included.
        folder: of checkpoints; that of the job in one that changes its shape; none where
            ``None``.
        save_interval: steps from one checkpoint to the next; only when the steps end where
            ``None``.
        keep: complete checkpoints that stay, the newest; all where ``None``.
        state: as of :meth:`Pipeline.save`; loaded from the checkpoint.
        async_save: write while training goes on, which waits only for a copy in memory.
        local_folder: on each node's own disk, written so, and copied to ``folder`` behind it.
        diagnose_interval: steps between two diagnoses where traces are written, 0 for none.
        trust_checkpoint: as of :meth:`Pipeline.load`.

    Raises:
        CheckpointError: the newest checkpoint cannot be loaded, or is of another batch size;
            another job saves into the folder.
        ConfigError: a setting is not a valid whole number.
    """

    def __init__(
        self,
        pipeline: Any,
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
        for name, one in state.items():
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                raise ConfigError(
                    f"state[{name!r}] is a {type(one).__name__}: give an object with state_dict()"
                    " and load_state_dict()"
                )
        mesh: Mesh = pipeline._mesh
        order: JobOrder | None = pipeline._order_of_job
        self._pipeline, self._mesh, self._batch_size = pipeline, mesh, pipeline._batch_size
        self._total, self._state, self._extra = total_steps, state, {_BATCH: self._batch_size}
        self._save_interval, self._keep, self._local_folder = save_interval, keep, local_folder
        self._folder = folder if order is None else order.checkpoints
        self._progress_folder = None if order is None else order.progress
        self._is_first = mesh.rank == 0
        self._given: int | None = None
        self._is_over = False
        self._steps = self._run()
        loaded_s = self._resume(trust_checkpoint)
        self._saved_at = pipeline.steps if pipeline.steps else -1
        self._waited_s = 0.0  # for the last checkpoint
        self._saves_behind = self._folder is not None and (async_save or local_folder is not None)
        self._group = dist.new_group(backend="gloo", timeout=mesh.timeout)
        self._progress = ProgressFile(self._progress_folder if self._is_first else None)
        self._stop = StopRequest()
        self._progress.begins(pipeline.steps, total_steps)
        if loaded_s is not None:
            self._progress.report({"loaded_s": loaded_s})
            self._say(f"goes on after step {pipeline.steps} of {total_steps}")
        self._snapshots = make_snapshots(
            mesh, self._taken_apart, lambda text: self._progress.report({"copies": text}), self._say
        )
        self._diagnosis = RunningDiagnosis(
            pipeline._trace_dir if self._is_first else None,
            diagnose_interval,
            pipeline.steps,
            self._say,
            lambda **values: self._progress.report(values),
            total_steps,
        )

    def __iter__(self) -> Loop:
        return self

    def __next__(self) -> int:
        """End the step that was given last, and give the next one.

        Raises:
            StopIteration: all steps are done.
            JobEnded: the job was asked to stop; all is saved.
            CheckpointError: a checkpoint could not be written.
            ConfigError: the step was not trained, or was trained twice.
            PeerLostError: another rank is gone.
        """
        if self._is_over:
            raise StopIteration
        with naming_lost_peers():
            return next(self._steps)

    def _run(self) -> Iterator[int]:
        pipeline = self._pipeline
        while pipeline.steps < self._total:
            self._given = pipeline.steps
            self._begun_s = time.perf_counter()
            yield self._given
            self._end_step()
            if pipeline.steps < self._total and self._stop.agreed(self._group):
                assert self._stop.reason is not None
                self._finish(self._stop.reason)
                pipeline.close()
                raise JobEnded(0)
        self._finish(COMPLETE)

    def require(self, samples: int) -> None:
        """Refuse a batch that would not be the whole batch of the step over all replicas.

        Args:
            samples: of this replica's batch.

        Raises:
            ConfigError: it is another one, or no step was given.
        """
        whole, replicas = self._batch_size, self._pipeline.replicas
        if self._given is None or self._is_over:
            raise ConfigError(
                "Pipeline.step was called outside of the steps of Pipeline.loop: call it once in"
                " each turn of the loop; eval() trains nothing"
            )
        if self._pipeline.steps != self._given:
            raise ConfigError(
                f"Pipeline.step was called twice in step {self._given} of Pipeline.loop: call it"
                " once in each turn, or what was trained would be lost or done again after a"
                " checkpoint"
            )
        if samples * replicas != whole:
            raise ConfigError(
                f"step {self._given} of Pipeline.loop was given {samples} samples on each of"
                f" {replicas} replicas, and its batch has {whole}: give Pipeline.step"
                " pipeline.share(batch) of a whole batch, or say batch_size to Pipeline"
            )

    def before_update(self) -> None:
        """Wait until the state may change."""
        self._snapshots.before_update()

    def close(self) -> None:
        """Give the signals back and end the progress file. Collective; idempotent."""
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
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.barrier(group=group)  # nobody waits in it any more
            dist.destroy_process_group(group)

    def _taken_apart(self) -> SnapshotState:
        # It imports much that most runs do without.
        from megatron.adaptive.modules.checkpointer import PipelineState

        pipeline = self._pipeline
        head = partial(pipeline._head, self._extra)
        return PipelineState(pipeline._checkpointer, head, self._state)

    def _resume(self, trust: bool) -> float | None:
        """Load the newest checkpoint; returns the seconds of it, ``None`` where there is none."""
        begin_s, local_folder = time.perf_counter(), self._local_folder
        if self._folder is None:
            if local_folder is not None:
                raise ConfigError(
                    f"local_folder {local_folder} is where checkpoints are on their way to"
                    " folder, and there is none: give Pipeline.loop folder, on storage that all"
                    " nodes share"
                )
            return None
        local = self._pipeline._checkpointer.prepare(self._folder, local_folder, self._keep)
        found = next(PipelineFolder(self._folder).candidates(), None) if self._is_first else None
        is_there = found is not None
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
                f"{self._folder}: its steps are of {before} samples, those of the script of"
                f" {self._batch_size}: samples would be lost or repeated; give"
                f" batch_size={before}, or another folder"
            )
        return time.perf_counter() - begin_s

    def _end_step(self) -> None:
        pipeline = self._pipeline
        assert self._given is not None
        if pipeline.steps != self._given + 1:
            raise ConfigError(
                f"step {self._given} of Pipeline.loop was not trained: call Pipeline.step once in"
                " each turn"
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
        """End the steps: save if that is left to do, and report why. Collective."""
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
        self._progress.report({"ended": reason})

    def _save(self, *, is_behind: bool = False) -> None:
        begin_s = time.perf_counter()
        assert self._folder is not None
        path = self._pipeline._checkpointer.save(
            self._folder,
            self._pipeline._head(self._extra),
            keep=self._keep,
            state=self._state,
            is_behind=is_behind,
        )
        self._saved_at, self._waited_s = self._pipeline.steps, time.perf_counter() - begin_s
        if path is not None:
            self._report_saved(self._saved_at, path, is_behind=False)

    def _report_completed(self) -> None:
        """Report a checkpoint that was completed behind training since."""
        if (found := self._pipeline._checkpointer.saver.completed()) is not None:
            self._report_saved(*found, is_behind=True)

    def _report_saved(self, step: int, path: Path, *, is_behind: bool) -> None:
        self._progress.report({"saved": step, "seconds": self._waited_s})
        self._say(saved_line(step, path, self._waited_s, is_behind=is_behind))

    def _say(self, text: str) -> None:
        if self._is_first:
            print(printable(text, lines=True), flush=True)
