"""Copies a checkpoint from the nodes' own disks to shared storage, behind training.

::

    node a   <local>/iter_0000100/  common.pt .metadata __0_0.distcp __1_0.distcp ──┐
    node b   <local>/iter_0000100/  common.pt .metadata __2_0.distcp __3_0.distcp ──┤
                                                                                    v
    <save>/.iter_0000100.partial/ ──> <save>/iter_0000100/     once all of it is there

Every rank copies a share of its node's files, for a second at a time; then all ranks tell each
other how far they are, and what went wrong. In shared storage a checkpoint is complete by the
program's own rule, like any other.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from megatron.adaptive.checkpoint.collective_errors import Exchange
from megatron.adaptive.checkpoint.step_folders import StepFolders
from megatron.adaptive.engine.progress import is_over, require_current
from megatron.adaptive.errors import CheckpointError

__all__ = ["Parcel", "Shared", "Upload", "share_out"]

_LOG = logging.getLogger(__name__)
_ROUND_S = 1.0
_PIECE_BYTES = 8 << 20
_GENTLE = 7  # the last level of those that are served while others read and write too


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """A checkpoint on its way to shared storage.

    Attributes:
        step: that it is of.
        save_id: of this saving, by which parts of it elsewhere are known.
        told: what the program's own manifest says, as JSON can.
        files: size of each file in bytes, without manifests.
    """

    step: int
    save_id: str
    told: Mapping[str, Any]
    files: Mapping[str, int]


class Shared(Protocol):
    """The checkpoints in shared storage; nobody else writes there meanwhile."""

    @property
    def folder(self) -> StepFolders:
        """Where they are."""

    def commit(self, parcel: Parcel, check: Callable[[], None]) -> None:
        """Turn the partial checkpoint of a parcel into a complete one; older ones may go.

        Args:
            parcel: all of its files are there.
            check: called when all is written, before anything takes its place; raises what it will.
        """


def share_out(
    held: Sequence[Mapping[str, int]], files: Mapping[str, int]
) -> list[list[str]] | None:
    """Say which rank copies which file.

    Args:
        held: by rank, sizes in bytes of the files on its node's disk.
        files: the same of all files of the checkpoint.

    Returns:
        Names by rank, about equally many for those of a node; ``None`` where a file is nowhere.
    """
    shares: list[list[str]] = [[] for _ in held]
    for number, (name, size) in enumerate(sorted(files.items())):
        having = [rank for rank, own in enumerate(held) if own.get(name) == size]
        if not having:
            return None
        shares[having[number % len(having)]].append(name)
    return shares


class Upload(threading.Thread):
    """Copies one checkpoint. Collective over all ranks, each of which makes one at the same time.

    Args:
        source: this node's folder of the checkpoint; what this rank copies is there.
        target: shared storage.
        names: of the files that this rank copies.
        parcel: the whole checkpoint, with all of its files.
        ranks: all of them, on a group that is used by nothing else meanwhile.
        progress_dir: where the run tells how far it is.
        is_awaited: somebody waits for it from the start, and tells of a failure.

    Attributes:
        iteration: of the checkpoint.
        done_bytes: what all ranks have copied.
        whole_bytes: what they have to.
        path: of the complete checkpoint in shared storage, once it is there.
        failure: why it is not.
        is_awaited: somebody waits for it, and tells of a failure; may change meanwhile.
    """

    def __init__(
        self,
        source: Path,
        target: Shared,
        names: Sequence[str],
        parcel: Parcel,
        ranks: Exchange,
        *,
        progress_dir: str | None,
        is_awaited: bool = False,
    ) -> None:
        self.iteration = parcel.step
        super().__init__(name=f"copy of checkpoint {self.iteration}", daemon=True)
        self._source, self._target, self._names = source, target, names
        self._parcel = parcel
        self._ranks = ranks
        self._progress_dir = progress_dir
        self.done_bytes = 0
        self.whole_bytes = sum(parcel.files.values())
        self.path: Path | None = None
        self.failure: BaseException | None = None
        self.is_awaited = is_awaited
        self._is_given_up = False
        self.start()

    def run(self) -> None:
        try:
            self.path = self._copy()
        except BaseException as error:
            self.failure = error
            if self._ranks.is_first and not self.is_awaited:
                _LOG.warning("WARNING: %s; training goes on", _one_line(error))

    def give_up(self) -> None:
        """Let it end with a failure soon, unless storage holds a rank up for good."""
        self._is_given_up = True

    def __str__(self) -> str:
        share = self.done_bytes / max(1, self.whole_bytes)
        return f"iteration {self.iteration}, {share:.0%} of {self.whole_bytes / 2**20:.4g} MiB"

    def _copy(self) -> Path:
        _be_gentle()
        folder, iteration = self._target.folder, self.iteration

        def begin() -> None:
            require_current(self._progress_dir)
            folder.begin(iteration)

        try:
            self._ranks.first(begin)
            self._copy_files()
            self._ranks.first(self._complete)
            return folder.complete_path(iteration)
        except BaseException as error:
            # Of a job that went on without us, what is there now is not ours.
            if self._ranks.is_first and not is_over(self._progress_dir):
                folder.abandon(iteration)
            if isinstance(error, CheckpointError):  # on all ranks: they wait for the clearing up
                self._ranks.sum(0)
                raise CheckpointError(
                    f"the checkpoint of iteration {iteration} was not copied to {folder.path}:"
                    f" {error}; it is on the nodes' own disks, and those before it are as they were"
                ) from error
            raise

    def _copy_files(self) -> None:
        partial = self._target.folder.partial_path(self.iteration)
        pieces = _copying([(self._source / name, partial / name) for name in self._names])
        left = self.whole_bytes
        while left:
            copied = self._ranks.sum(self._ranks.together(lambda: self._some(pieces)))
            if not copied:
                raise CheckpointError("files on the nodes' own disks are shorter than they were")
            self.done_bytes += copied
            left = self.whole_bytes - self.done_bytes
        self._ranks.together(lambda: _rest(pieces))

    def _some(self, pieces: Iterator[int]) -> int:
        if self._is_given_up:
            raise CheckpointError("it took too long")
        return _some(pieces)

    def _complete(self) -> None:
        files = self._parcel.files
        partial = self._target.folder.partial_path(self.iteration)

        def check() -> None:
            require_current(self._progress_dir)
            for name, size in files.items():
                found = (partial / name).stat().st_size
                if found != size:
                    raise CheckpointError(f"{partial / name} has {found} bytes instead of {size}")

        self._target.commit(self._parcel, check)


def _one_line(error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return f"the copy of a checkpoint broke off: {(str(error).splitlines() or ['?'])[0]}"


def _copying(files: Sequence[tuple[Path, Path]]) -> Iterator[int]:
    """Copy files and make them durable; gives the number of bytes after each piece."""
    buffer = memoryview(bytearray(_PIECE_BYTES))
    for source, target in files:
        try:
            with source.open("rb", buffering=0) as old, target.open("wb", buffering=0) as new:
                while count := old.readinto(buffer):
                    left = buffer[:count]
                    while left:
                        left = left[new.write(left) :]
                    yield count
                os.fsync(new.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, error.filename or str(target)) from None


def _some(pieces: Iterator[int]) -> int:
    """Copy for a moment; returns the number of bytes."""
    until_s, copied = time.monotonic() + _ROUND_S, 0
    for count in pieces:
        copied += count
        if time.monotonic() >= until_s:
            break
    return copied


def _rest(pieces: Iterator[int]) -> None:
    """Let the last file become durable."""
    if next(pieces, None) is not None:
        raise CheckpointError("a file grew while it was copied")


def _be_gentle() -> None:
    """Let this thread's reading and writing come after that of others, where the system can."""
    with contextlib.suppress(AttributeError, OSError, psutil.Error):
        psutil.Process(threading.get_native_id()).ionice(psutil.IOPRIO_CLASS_BE, _GENTLE)
