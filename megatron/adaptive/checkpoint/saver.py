"""Saves checkpoints of a program that trains, at once or while training goes on.

::

    at once   state ──────────────────> folder                     training waits
    behind    state ─> copy in memory ─> folder, in a thread       training waits for the copy
    (local)   state ─> copy in memory ─> nodes' own disks ─> folder, see ``local_disk``

A program says what its state is by a function that gives a :class:`TakenState`; everything else
(whole or not there, keep the last, one at a time, what follows from a failure) is the same for all.
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
    """Writes checkpoints, one at a time. Collective over all ranks, but for :meth:`completed`.

    Args:
        job: this process within the job.
        local: the nodes' own disks, where checkpoints for their folder go first, ``None`` for none.

    Attributes:
        local: as given; :meth:`close` ends it.
    """

    def __init__(self, job: Job, local: LocalDisk | None = None) -> None:
        self._job = job
        self._ranks = RankGroup(job.rank, job.control_group)
        self._background: RankGroup | None = None
        self._pending: BackgroundWrite | None = None
        self._done: Done = SimpleQueue()
        self._returned = -1  # step whose folder the caller has
        self._writer, self._host = ShardWriter(), _HostCopy()
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
        """Write a checkpoint; the ones before it stay.

        Blocks until it is complete and durable; behind training until the one before is, and the
        state is copied into the host's memory. If the one before could not be written, this is
        reported, and the new one is written at once in its place: a disk that was full for a while
        costs no steps.

        Args:
            folder: of checkpoints.
            step: that it is of.
            take: takes the state of now apart. Collective.
            remedy: what to do where the folder cannot be written.
            keep: complete checkpoints that stay, all where ``None``.
            behind: let training go on while it is written.

        Returns:
            Its folder, ``None`` while it is written.

        Raises:
            CheckpointError: it could not be written on some rank; nothing of it is left.
            ConfigError: ``keep`` is no number.
        """
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ConfigError(f"keep {keep!r}: give a whole number from 1 on, or None for all")
        why = (
            f"the checkpoint of iteration {step} was not written to {folder.path}: {{}};"
            f" those before it are as they were. {remedy}"
        )
        if self._is_former_lacking(step) or not behind:
            path = self._write(folder, step, take(), self._ranks, why, keep)
            if path is None and not behind:
                assert self.local is not None
                path = self.local.drain()
            if path is not None:
                self._returned = step
            return path
        if self._background is None:
            # Its own: training's may be in use at the same moment.
            group = dist.new_group(backend="gloo", timeout=self._job.timeout)
            self._background = RankGroup(self._job.rank, group)
        state, ranks = self._host.take(take()), self._background
        self._pending = BackgroundWrite(
            lambda: self._write(folder, step, state, ranks, why, keep), step, self._done
        )
        self._pending.start()
        return None

    @contextmanager
    def reading(
        self, path: Path, step: int, save_id: str, files: Mapping[str, int], sums: Mapping[str, str]
    ) -> Iterator[CheckpointReader]:
        """Gives a reader of a checkpoint; at the end what nobody has read of it is checked too.

        Args:
            path: of the checkpoint.
            step, save_id, files: see :meth:`LocalDisk.near`.
            sums: checksums of the files' blocks.

        Raises:
            DamagedCheckpointError: it is not what was written.
        """
        ranks = self._ranks
        near = {} if self.local is None else self.local.near(step, save_id, files)
        with ranks.together(lambda: CheckpointReader(path, files, sums, near)) as reader:
            yield reader
            ranks.together(lambda: reader.check_rest(ranks.rank, ranks.size))

    def completed(self) -> tuple[int, Path] | None:
        """Return step and folder of a checkpoint that was completed behind training; each once."""
        for done in (self._done, *([] if self.local is None else [self.local.done])):
            while not done.empty():
                if (found := done.get())[0] != self._returned:
                    return found
        return None

    def finish(self) -> None:
        """Wait for the checkpoint that is being written behind training, if there is one.

        Raises:
            CheckpointError: it could not be written; nothing of it is left.
        """
        pending = self._pending
        if pending is None:
            return
        pending.join()
        if pending.failure is not None:
            self._pending = None
            raise pending.failure

    def drain(self) -> None:
        """Wait until the last checkpoint is where it is to be, in shared storage.

        Raises:
            CheckpointError: it could not be written, or not be copied there.
        """
        self.finish()
        if self.local is not None:
            self.local.drain()

    def close(self) -> None:
        """Drain, and destroy the process groups that were made. Idempotent."""
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
        """Return whether the checkpoint before that of ``step`` failed; the same on all ranks."""
        try:
            self.finish()
        except CheckpointError as error:
            self._warn(
                f"{error}; training waits until that of iteration {step} is there in its place"
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
        why: str,
        keep: int | None,
    ) -> Path | None:
        """Write what was taken; ``None`` while it is on the nodes' own disks alone."""
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

        with writing(folder, step, self._job, ranks, why):
            partial = folder.partial_path(step)
            ranks.together(lambda: require_seen(partial, self._job))
            once, written = self._writer.write(state, partial, ranks)
            manifest = state.manifest("", ranks)
            ranks.first(complete)
        return folder.complete_path(step)


def load_first_whole(
    steps: Sequence[int], load: Callable[[int], _Result], ranks: RankGroup
) -> _Result:
    """Load the first checkpoint that is not damaged. Collective.

    Args:
        steps: to be tried, the best first; at least one.
        load: loads one; it fails on all ranks alike.
        ranks: all of them.

    Raises:
        CheckpointError: none could be loaded; the text is that of the first.
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
            text = printable(f"{first}; going on from that of {step}, the newest whole one")
            _LOG.warning("WARNING: %s", text)
        return result
    assert first is not None
    raise first


def require_seen(path: Path, job: Job) -> None:
    """Check that this rank sees a folder that another one has made.

    Raises:
        CheckpointError: it does not.
    """
    if not path.is_dir():
        host = job.places[job.rank]["host"]
        raise CheckpointError(f"{path}: {host} does not see it: give a folder that all nodes share")


class _HostCopy:
    """Copies tensors into the host's memory, which stays for the next time."""

    def __init__(self) -> None:
        self._layout: list[tuple[torch.dtype, torch.Size]] | None = None
        self._copies: list[torch.Tensor] = []

    def take(self, state: TakenState) -> TakenState:
        """Copy what tensors hold now. Blocks until done.

        Returns:
            The same copies each time, while types and shapes stay: what was copied before is
            overwritten.
        """
        tensors = [one.tensor for one in state.pieces.values()]
        layout = [(one.dtype, one.shape) for one in tensors]
        gpu = next((one.device for one in tensors if one.is_cuda), None)
        if layout != self._layout:
            self._copies = []  # so that their memory is free
            self._layout, self._copies = layout, _room_for(tensors, gpu)
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
    """Return tensors like those given, in one piece of memory."""
    starts, end = [], 0
    for one in tensors:
        starts.append(end)
        end += -(-one.nbytes // _ALIGN) * _ALIGN
    # Without locked pages the driver copies through a buffer of its own.
    memory = torch.empty(end, dtype=torch.uint8) if gpu is None else locked_memory(end, gpu)
    return [
        memory[start : start + one.nbytes].view(one.dtype).view(one.shape)
        for start, one in zip(starts, tensors, strict=True)
    ]
