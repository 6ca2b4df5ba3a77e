"""Writes the checkpoints of a pipeline, at once or while training goes on."""

from __future__ import annotations

import contextlib
import io
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from megatron.adaptive.checkpoint.async_writer import Behind
from megatron.adaptive.checkpoint.collective_errors import Exchange
from megatron.adaptive.checkpoint.host_copy import HostCopy
from megatron.adaptive.checkpoint.local_disk import LocalDisk, LocalSettings
from megatron.adaptive.checkpoint.upload import Parcel
from megatron.adaptive.errors import AdaptiveError, CheckpointError, ConfigError
from megatron.adaptive.modules.checkpoint_folder import PipelineFolder, make_manifest
from megatron.adaptive.modules.mesh import Mesh

__all__ = ["STATE", "Saver", "Wish", "all_see", "first_line", "on_first", "state_bytes"]

STATE = "state.pt"
"""The file of what the user's objects hold."""

Apart = Callable[[], tuple[dict[str, torch.Tensor], dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A checkpoint that is to be written.

    Attributes:
        folder: of checkpoints.
        head: what all ranks say of it, see ``make_manifest``.
        keep: complete ones that stay, all where ``None``.
        state: the user's objects, by name.
        check: called on rank 0 before anything takes its place; raises what it will.

    Raises:
        ConfigError: ``keep`` is no number.
    """

    folder: str | Path
    head: Mapping[str, Any]
    keep: int | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and (type(self.keep) is not int or self.keep < 1):
            raise ConfigError(f"keep {self.keep!r}: give a whole number from 1 on, or None for all")

    @property
    def step(self) -> int:
        """That it is of."""
        return int(self.head["step"])


@dataclass(frozen=True, kw_only=True)
class _Taken:
    """What it is to hold.

    Attributes:
        state: the file of the user's objects, on rank 0.
        tensors: of this rank, by name.
        told: what it tells of them.
    """

    state: bytes
    tensors: Mapping[str, torch.Tensor]
    told: Mapping[str, Any]


class _Shared:
    """The folder of checkpoints in shared storage.

    Args:
        path: of it.
        keep: complete ones that stay, ``None`` for all.
    """

    def __init__(self, path: str | Path, keep: int | None) -> None:
        self.folder = PipelineFolder(path)
        self._keep = keep

    def commit(self, parcel: Parcel, check: Callable[[], None]) -> None:
        """See :class:`~megatron.adaptive.checkpoint.upload.Shared`."""
        self.folder.commit(parcel.step, parcel.told, self._keep, check)


class Saver:
    """Writes checkpoints, one at a time. Collective over all ranks, but for :meth:`completed`.

    Args:
        mesh: the job.
        apart: gives a rank's tensors of now by name, and what it tells of them.

    Attributes:
        local: the nodes' own disks, where they go first, ``None`` for none.
    """

    def __init__(self, mesh: Mesh, apart: Apart) -> None:
        self._mesh = mesh
        self._apart = apart
        self._behind = Behind()
        self._host: HostCopy | None = None
        self._background: Mesh | None = None
        self.local: LocalDisk | None = None
        self._behind_local: Path | None = None

    def use_local_disks(
        self, base: str | Path, folder: str | Path, keep: int | None, progress_dir: str | None
    ) -> LocalDisk:
        """Write what comes to the nodes' own disks first; finish what was on its way there.

        Args:
            base: the folder on each of them.
            folder: of checkpoints, in shared storage; the same for all that come.
            keep: complete ones that stay in either, all in shared storage where ``None``.
            progress_dir: where the run tells how far it is.
        """
        settings = LocalSettings(
            base=Path(base),
            option=f"local_folder {base}",
            patience="timeout_s of Pipeline",
            keep=keep,
            timeout_s=self._mesh.timeout.total_seconds(),
            progress_dir=progress_dir,
        )
        local = self.local = LocalDisk(self._mesh, _Shared(folder, keep), settings)
        self._behind_local = Path(folder).resolve()
        local.finish_former(lambda: PipelineFolder(folder).latest() or 0)
        return local

    def reading(
        self, path: Path, manifest: Mapping[str, Any]
    ) -> contextlib.AbstractContextManager[Path]:
        """Give a folder to read a checkpoint from: this node's, as far as it has it."""
        if self.local is None:
            return contextlib.nullcontext(path)
        save_id = str(manifest.get("save_id", ""))
        return self.local.reading(path, int(manifest["step"]), save_id, manifest["files"])

    def save(self, wish: Wish) -> Path:
        """Write a checkpoint; returns its folder when it is complete.

        Raises:
            CheckpointError: it could not be written.
        """
        self._is_former_lacking(wish.step)
        path = self._put(wish, self._take(wish, copy=False), self._mesh)
        if path is None:
            assert self.local is not None
            path = self.local.drain(tell=False)
            assert path is not None
        return path

    def save_behind(self, wish: Wish) -> Path | None:
        """Copy the state into the host's memory and write it while training goes on.

        Waits for the checkpoint before, if that is not complete yet. If that could not be written,
        this one is written at once.

        Returns:
            Its folder where it was written there at once.

        Raises:
            CheckpointError: neither the checkpoint before it nor this one could be written.
        """
        if self._is_former_lacking(wish.step):
            return self._put(wish, self._take(wish, copy=False), self._mesh)
        if self._background is None:
            # Its own: training's may be in use at the same moment.
            group = dist.new_group(backend="gloo", timeout=self._mesh.timeout)
            self._background = replace(self._mesh, control_group=group)
        taken, ranks = self._take(wish, copy=True), self._background
        self._behind.begin(lambda: self._put(wish, taken, ranks), wish.step)
        return None

    def completed(self) -> tuple[int, Path] | None:
        """Step and folder of a checkpoint that was completed behind training; each once."""
        found = self._behind.completed()
        if found is None and self.local is not None:
            found = self.local.completed()
        return found

    def finish(self) -> None:
        """Wait for the checkpoint that is being written behind training, if there is one.

        Raises:
            CheckpointError: it could not be written.
        """
        self._behind.finish()

    def drain(self) -> None:
        """Wait until the last checkpoint is where it is to be.

        Raises:
            CheckpointError: it could not be written, or not be copied there.
        """
        self.finish()
        if self.local is not None:
            self.local.drain()

    def close(self) -> None:
        """Drain, and end what was made. Idempotent."""
        try:
            self.drain()
        except CheckpointError as error:
            if self._mesh.rank == 0:
                print(f"warning: {error}", flush=True)
        ranks, self._background = self._background, None
        if ranks is not None and dist.is_initialized():
            dist.destroy_process_group(ranks.control_group)
        local, self.local = self.local, None
        if local is not None:
            local.close()

    def _is_former_lacking(self, step: int) -> bool:
        """Whether the checkpoint before that of a step failed; the same on all ranks."""
        why = self._behind.lacking(step)
        if why and self._mesh.rank == 0:
            print(f"warning: {why}", flush=True)
        return bool(why)

    def _put(self, wish: Wish, taken: _Taken, ranks: Mesh) -> Path | None:
        """Write what was taken; ``None`` while it is on the nodes' own disks alone."""
        if self.local is None or Path(wish.folder).resolve() != self._behind_local:
            return _write(wish, taken, ranks)
        save_id = ranks.from_first(secrets.token_hex(8))
        manifest = make_manifest({**wish.head, "save_id": save_id}, ranks.gather(taken.told))
        parcel = Parcel(step=wish.step, save_id=save_id, told=manifest, files={})

        def write_state(folder: Path) -> None:
            if wish.state:
                (folder / STATE).write_bytes(taken.state)

        return self.local.put(
            parcel,
            lambda folder: _write_tensors(folder, taken, ranks),
            write_state,
            Exchange(ranks.rank, ranks.control_group),
            lambda: _write(wish, taken, ranks),
        )

    def _take(self, wish: Wish, *, copy: bool) -> _Taken:
        """Take the state of now apart; copied, it may change before it is written."""
        content: list[bytes] = []
        if wish.state:
            on_first(
                self._mesh,
                lambda: content.append(state_bytes(wish.state, check=True)),
                f"{wish.folder}",
            )
        tensors, told = self._apart()
        if self._mesh.dp_rank:
            tensors = {}
        if copy:
            sources = list(tensors.values())
            if self._host is None or not self._host.fits(sources):
                self._host = None  # so that its memory is free
                self._host = HostCopy(sources)
            tensors = dict(zip(tensors, self._host.take(sources), strict=True))
        return _Taken(state=b"".join(content), tensors=tensors, told=told)


def _write(wish: Wish, taken: _Taken, ranks: Mesh) -> Path:
    """Write what was taken. Collective over the control group, which nothing else uses then."""
    place, step, where = PipelineFolder(wish.folder), wish.step, f"{wish.folder}"
    partial = on_first(ranks, lambda: place.begin(step), where)
    all_see(ranks, partial)
    if wish.state:
        on_first(ranks, lambda: (partial / STATE).write_bytes(taken.state), where)
    _write_tensors(partial, taken, ranks)
    manifest = make_manifest(wish.head, ranks.gather(taken.told))
    path: Path = on_first(ranks, lambda: place.commit(step, manifest, wish.keep, wish.check), where)
    return path


def _write_tensors(partial: Path, taken: _Taken, ranks: Mesh) -> None:
    """Write this rank's tensors, and rank 0 what is said of all of them. Collective."""
    try:
        dcp.save(
            dict(taken.tensors),
            storage_writer=FileSystemWriter(partial),
            planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
            process_group=ranks.control_group,
        )
    except (CheckpointException, Exception) as error:  # the former is no Exception
        raise CheckpointError(f"{partial.parent}: saving failed: {first_line(error)}") from error


def on_first(ranks: Mesh, work: Callable[[], Any], where: str) -> Any:
    """Do something on rank 0 and tell all what came of it, errors included."""
    answer: Any = None
    if ranks.rank == 0:
        try:
            answer = work()
        except AdaptiveError as error:
            answer = error
        except OSError as error:
            answer = CheckpointError(f"{where}: {error.strerror or error}; name another folder")
    answer = ranks.from_first(answer)
    if isinstance(answer, AdaptiveError):
        raise answer
    return answer


def all_see(ranks: Mesh, path: Path) -> None:
    blind = [rank for rank, sees in enumerate(ranks.gather(path.is_dir())) if not sees]
    if blind:
        host = ranks.places[blind[0]]["host"]
        raise CheckpointError(
            f"{path}: rank {blind[0]} on {host} does not see it: give a folder that all nodes share"
        )


def state_bytes(state: Mapping[str, Any], *, check: bool) -> bytes:
    """Return a file of what the user's objects hold.

    Args:
        state: the objects by name.
        check: whether it can be read again, as plain values and tensors alone can.

    Raises:
        ConfigError: it cannot.
    """
    buffer = io.BytesIO()
    torch.save({name: one.state_dict() for name, one in state.items()}, buffer)
    if check:
        buffer.seek(0)
        try:
            torch.load(buffer, weights_only=True)
        except Exception as error:
            raise ConfigError(
                f"state: what {', '.join(state)} hold cannot be read again ({first_line(error)}):"
                " give objects whose state_dict() has plain values and tensors alone"
            ) from error
    return buffer.getvalue()


def first_line(error: BaseException) -> str:
    where = ""
    if isinstance(error, CheckpointException) and error.failures:  # what each rank met
        rank, (error, _) = next(iter(error.failures.items()))
        where = f"rank {rank}: "
    text = str(error).strip().splitlines()
    said = text[0].split(". ")[0] if text else ""
    return f"{where}{type(error).__name__}: {said}"[:300]
