"""Saves checkpoints, either immediately or in the background while training continues.

::

    immediate   state ──────────────────> folder                  training waits
    background  state ─> copy in memory ─> folder, in a thread    training waits for the copy
      (local)   state ─> copy in memory ─> local disks ─> folder, see ``checkpoint.node_local``

The trainer and ``Pipeline`` each provide a function that returns their state as a
:class:`TakenState`. For both, this module makes sure that a checkpoint is either complete or
absent. It also removes old checkpoints, and runs only one save at a time.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron.adaptive.accelerator import locked_memory
from megatron.adaptive.checkpoint.collective_errors import RankGroup
from megatron.adaptive.checkpoint.folder import StepFolders, write_files
from megatron.adaptive.checkpoint.node_local import BackgroundWrite, Done, LocalDisk, writing
from megatron.adaptive.checkpoint.reader import CheckpointReader
from megatron.adaptive.checkpoint.writer import ShardWriter, TakenState
from megatron.adaptive.config.input_files import printable
from megatron.adaptive.engine.process_context import Job
from megatron.adaptive.errors import CheckpointError, ConfigError, DamagedCheckpointError

_LOG = logging.getLogger(__name__)
_ALIGN = 64
_Result = TypeVar("_Result")


class CheckpointSaver:
    """Writes checkpoints, one at a time.

    All ranks must call each method together, except :meth:`completed`.

    Args:
        job: Rank, process groups and environment of this process.
        local: Local disk of this node, to which checkpoints are written first, or ``None`` to write
            them directly to their folder.

    Attributes:
        local: Local disk of this node, or ``None`` if no local disk is used or :meth:`close` was
            called.
    """

    def __init__(self, job: Job, local: LocalDisk | None = None) -> None:
        self._job = job
        self._ranks = RankGroup(job.rank, job.control_group)
        self._background: RankGroup | None = None
        self._pending: BackgroundWrite | None = None
        self._done: Done = SimpleQueue()
        self._returned = -1  # Step of the last checkpoint whose path save() has returned, or -1.
        self._writer = ShardWriter()
        self._host = _HostCopy()
        self.local = local

    def save(
        self,
        folder: StepFolders,
        step: int,
        take: Callable[[], TakenState],
        *,
        remedy: str,
        keep: int | None = None,
        behind: bool = False,
    ) -> Path | None:
        """Writes a checkpoint, and returns its path if it is complete.

        Without ``behind``, this method blocks until the checkpoint is complete and flushed to disk.
        With ``behind``, it blocks only until the previous checkpoint is complete and the state is
        copied to host memory. If the previous checkpoint could not be written, the method logs a
        warning, and blocks until the new checkpoint is complete. A disk that is temporarily full
        therefore does not stop the run.

        Args:
            folder: Folder of checkpoints.
            step: Step of the checkpoint.
            take: Function that returns the state of this rank to save. All ranks call it together.
            remedy: Advice to append to the error message if the folder cannot be written.
            keep: Number of newest complete checkpoints to keep, or ``None`` to keep all.
            behind: Whether to write in a background thread while training continues.

        Returns:
            Path of the checkpoint, or ``None`` if it is still being written.

        Raises:
            CheckpointError: If a rank could not write the checkpoint. The incomplete checkpoint is
                removed.
            ConfigError: If ``keep`` is not a positive integer.
        """
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ConfigError(f"keep must be a positive integer, or None to keep all, got {keep!r}")
        message = (
            f"the checkpoint of iteration {step} was not written to {folder.path}: {{}}; earlier "
            f"checkpoints are unchanged. {remedy}"
        )
        if self._is_former_lacking(step) or not behind:
            path = self._write(folder, step, take(), self._ranks, message, keep)
            if path is None and not behind:
                assert self.local is not None
                path = self.local.drain()
            if path is not None:
                self._returned = step
            return path
        if self._background is None:
            # The background thread needs a separate process group, because training may use the
            # existing group at the same time.
            group = dist.new_group(backend="gloo", timeout=self._job.timeout)
            self._background = RankGroup(self._job.rank, group)
        state = self._host.take(take())
        ranks = self._background
        self._pending = BackgroundWrite(
            lambda: self._write(folder, step, state, ranks, message, keep), step, self._done
        )
        self._pending.start()
        return None

    @contextmanager
    def reading(
        self, path: Path, step: int, save_id: str, files: Mapping[str, int], sums: Mapping[str, str]
    ) -> Iterator[CheckpointReader]:
        """Yields a reader of a checkpoint. Then verifies the file blocks that contain no tensors.

        Args:
            path: Path of the checkpoint.
            step: Step of the checkpoint.
            save_id: Identifier of the save, used to recognize its files on local disks. Empty if
                local disks have no files of this save.
            files: Size in bytes of each file of the checkpoint, keyed by name.
            sums: Checksums of each file's blocks, keyed by name.

        Raises:
            DamagedCheckpointError: If the checkpoint is damaged.
        """
        ranks = self._ranks
        near = {} if self.local is None else self.local.near(step, save_id, files)
        with ranks.together(lambda: CheckpointReader(path, files, sums, near)) as reader:
            yield reader
            ranks.together(lambda: reader.check_rest(ranks.rank, ranks.size))

    def completed(self) -> tuple[int, Path] | None:
        """Returns (step, path) of a checkpoint that was completed in the background, or ``None``.

        Each completed checkpoint is returned once. The result is ``None`` if there are no more.
        """
        queues = [self._done] if self.local is None else [self._done, self.local.done]
        for queue in queues:
            while not queue.empty():
                step, path = queue.get()
                if step != self._returned:
                    return step, path
        return None

    def wait(self) -> None:
        """Waits until no checkpoint is being written in the background.

        If a checkpoint could not be written, the next call of :meth:`save` or :meth:`finish`
        reports the error.
        """
        if self._pending is not None:
            self._pending.join()

    def finish(self) -> None:
        """Waits until no checkpoint is being written in the background, and reports a failure.

        Raises:
            CheckpointError: If the checkpoint could not be written.
        """
        self.wait()
        pending = self._pending
        if pending is not None and pending.failure is not None:
            self._pending = None
            raise pending.failure

    def drain(self) -> None:
        """Waits until the last checkpoint is in shared storage.

        Raises:
            CheckpointError: If the checkpoint could not be written or copied to shared storage.
        """
        self.finish()
        if self.local is not None:
            self.local.drain()

    def close(self) -> None:
        """Waits for all writes and destroys the process groups. Safe to call more than once."""
        try:
            self.drain()
        except CheckpointError as error:
            self._warn(f"{error}")
        ranks, self._background = self._background, None
        if ranks is not None and dist.is_initialized():
            dist.destroy_process_group(ranks.group)
        local, self.local = self.local, None
        if local is not None:
            local.close()

    def _is_former_lacking(self, step: int) -> bool:
        """Waits for the previous checkpoint. Returns whether any rank failed to write it.

        Args:
            step: Step of the next checkpoint, which is named in the warning about a failure.
        """
        try:
            self.finish()
        except CheckpointError as error:
            self._warn(
                f"{error}; training waits until the checkpoint of iteration {step} is written "
                "instead"
            )
            return True
        return False

    def _warn(self, text: str) -> None:
        if self._ranks.is_first:
            _LOG.warning("WARNING: %s", printable(text))

    def _write(
        self,
        folder: StepFolders,
        step: int,
        state: TakenState,
        ranks: RankGroup,
        message: str,
        keep: int | None,
    ) -> Path | None:
        """Writes ``state`` to ``folder`` as the checkpoint of ``step``. All ranks must call this.

        Only the newest ``keep`` checkpoints are kept, or all if ``keep`` is ``None``. ``message``
        is the error message, with ``{}`` in place of the cause. Returns the path of the checkpoint,
        or ``None`` if it is only on local disks.
        """
        local = self.local
        if (
            local is not None
            and local.shared.path.resolve() == folder.path.resolve()
            and local.save(step, state, secrets.token_hex(8), ranks)
        ):
            return None

        def complete() -> None:
            write_files(partial, once)
            folder.commit(step, {**manifest, **written})
            if keep is not None:
                folder.keep(keep)

        with writing(folder, step, self._job, ranks, message):
            partial = folder.partial_path(step)
            ranks.together(lambda: require_seen(partial, self._job))
            once, written = self._writer.write(state, partial, ranks)
            manifest = state.manifest("", ranks)
            ranks.first(complete)
        return folder.complete_path(step)


def load_first_whole(
    steps: Sequence[int], load: Callable[[int], _Result], ranks: RankGroup
) -> _Result:
    """Loads the first undamaged checkpoint in ``steps``, and returns the result of ``load``.

    All ranks must call this together.

    Args:
        steps: Steps of the checkpoints to try, in this order. There must be at least one.
        load: Function that loads the checkpoint of a step. If loading fails, the function must
            raise the same error on all ranks.
        ranks: Group of all ranks, used for communication.

    Raises:
        CheckpointError: If no checkpoint could be loaded. The message describes the failure of the
            first checkpoint in ``steps``.
    """
    first: DamagedCheckpointError | None = None
    for step in steps:
        try:
            result = load(step)
        except DamagedCheckpointError as error:
            first = first or error
            continue
        except CheckpointError as error:
            if first is None:
                raise
            raise first from error
        if first is not None and ranks.is_first:
            text = printable(f"{first}; resuming from step {step}, the newest undamaged checkpoint")
            _LOG.warning("WARNING: %s", text)
        return result
    assert first is not None
    raise first


def require_seen(path: Path, job: Job) -> None:
    """Checks that this rank can see the folder ``path``, which another rank has created.

    Raises:
        CheckpointError: If the folder does not exist on this node, because nodes do not share it.
    """
    if not path.is_dir():
        host = job.places[job.rank]["host"]
        raise CheckpointError(
            f"{path} does not exist on {host}; choose a folder that all nodes share"
        )


class _HostCopy:
    """Copies the tensors of a state to host memory, and reuses this memory for later copies."""

    def __init__(self) -> None:
        self._layout: list[tuple[torch.dtype, torch.Size]] | None = None
        self._copies: list[torch.Tensor] = []

    def take(self, state: TakenState) -> TakenState:
        """Copies the tensors of ``state``, and returns a state with the copies.

        Blocks until the copies are complete. If all tensors have the same types and shapes as in
        the previous call, the copies of that call are overwritten.
        """
        tensors = [piece.tensor for piece in state.pieces.values()]
        layout = [(tensor.dtype, tensor.shape) for tensor in tensors]
        gpu = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if layout != self._layout:
            self._copies = []  # Free the old copies before allocating new memory.
            self._layout = layout
            self._copies = _room_for(tensors, gpu)
        if self._copies:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, tensors, non_blocking=True)
        if gpu is not None:
            torch.cuda.current_stream().synchronize()
        pieces = {
            part: dataclasses.replace(piece, tensor=copy)
            for (part, piece), copy in zip(state.pieces.items(), self._copies, strict=True)
        }
        return dataclasses.replace(state, pieces=pieces)


def _room_for(tensors: Sequence[torch.Tensor], gpu: torch.device | None) -> list[torch.Tensor]:
    """Allocates one block of host memory for copies of ``tensors``, and returns the empty copies.

    The memory is pinned for the device ``gpu``, unless ``gpu`` is ``None``.
    """
    starts = []
    end = 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.nbytes // _ALIGN) * _ALIGN
    # Pin the memory. Otherwise, the GPU driver would copy all data through a second buffer.
    memory = torch.empty(end, dtype=torch.uint8) if gpu is None else locked_memory(end, gpu)
    return [
        memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=True)
    ]
