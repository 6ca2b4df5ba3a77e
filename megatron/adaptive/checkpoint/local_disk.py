"""Checkpoints on the nodes' own disks, on their way to shared storage.

::

    training ─ copy in memory ─> <local>/iter_0000100/ of each node ─ Upload ─> <save>/iter_0000100/
               training waits    behind training                      behind that, one at a time

    <local> is DIR/<name of --save>-<hash>/<node>, for several jobs and nodes may share a disk
    <local>/iter_0000100/local.json     what is said of the whole checkpoint, with all of its files

What counts is the checkpoint in shared storage: it alone is ever loaded. A node's own disk is where
its files are read from then, and where a copy goes on from that ranks which ended did not finish.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.adaptive.checkpoint.collective_errors import Exchange
from megatron.adaptive.checkpoint.step_folders import StepFolders, write_durably
from megatron.adaptive.checkpoint.upload import Parcel, Shared, Upload, share_out
from megatron.adaptive.engine.job import Job
from megatron.adaptive.engine.progress import require_current
from megatron.adaptive.errors import CheckpointError

__all__ = ["LocalDisk", "LocalSettings"]

_LOG = logging.getLogger(__name__)
_MANIFEST = "local.json"
_KEPT = 2  # where the user names no number: the last one, and the one before while that is written
_LOOK_S = 10.0
_END_S = 5.0  # for a copy that is given up


@dataclass(frozen=True, kw_only=True)
class LocalSettings:
    """What is wanted of the nodes' own disks.

    Attributes:
        base: the folder on each of them.
        option: what the user calls it.
        patience: what the user gives more time with.
        keep: complete checkpoints that stay, ``None`` for as few as it takes.
        timeout_s: limit of waits for copies and other ranks.
        progress_dir: where the run tells how far it is.
    """

    base: Path
    option: str
    patience: str
    keep: int | None
    timeout_s: float
    progress_dir: str | None


class LocalDisk:
    """This node's part of the checkpoints. Every method but :meth:`completed` is collective.

    Args:
        job: this process within the job.
        shared: where they are to be.
        settings: of the nodes' own disks.

    Attributes:
        resumed: the step that the run went on from; what this disk has of later ones is of steps
            that were done again since, and goes with the first checkpoint.
    """

    def __init__(self, job: Job, shared: Shared, settings: LocalSettings) -> None:
        self._job = job
        self._settings = settings
        self._shared = shared
        base = settings.base.absolute()
        save = shared.folder.path.resolve()
        node = job.environment.node or socket.gethostname()
        told = job.gather((_place(base, node, job), str(save)))
        name = f"{save.name}-{hashlib.sha256(told[0][1].encode()).hexdigest()[:8]}"
        self._folder = StepFolders(base / name / node, prefix="iter_", digits=7, manifest=_MANIFEST)
        places = [place for place, _ in told]
        self._is_leader = places.index(places[job.rank]) == job.rank
        self._is_first = job.rank == 0
        self._timeout_s = settings.timeout_s
        timeout = datetime.timedelta(seconds=self._timeout_s)
        self._ranks = Exchange(job.rank, dist.new_group(backend="gloo", timeout=timeout))
        self._control = Exchange(job.rank, job.control_group)
        self._newest: tuple[Parcel, list[list[str]]] | None = None
        self._upload: Upload | None = None
        self._untold: list[Upload] = []
        self.resumed: int | None = None

    def put(
        self,
        parcel: Parcel,
        write: Callable[[Path], None],
        write_once: Callable[[Path], None],
        ranks: Exchange,
        otherwise: Callable[[], Path],
    ) -> Path | None:
        """Write a checkpoint to the nodes' own disks, or to shared storage where that cannot be.

        Args:
            parcel: what is known of it; files are still unknown. That of rank 0 counts.
            write: writes this rank's part into a folder. Collective.
            write_once: writes what the checkpoint has once; on rank 0, after that.
            ranks: all of them, on a group that is used by nothing else meanwhile.
            otherwise: writes it to shared storage and says where it is. Collective.

        Returns:
            Where it is in shared storage, ``None`` while it is on the nodes' own disks alone.

        Raises:
            CheckpointError: it could not be written to either.
        """
        try:
            self._save(parcel, write, write_once, ranks)
            return None
        except CheckpointError as error:
            self._warn(
                "%s: %s; the checkpoint of iteration %d goes to %s at once",
                self._settings.option,
                error,
                parcel.step,
                self._shared.folder.path,
            )
            self._give_way(ranks)
            return otherwise()

    def _save(
        self,
        parcel: Parcel,
        write: Callable[[Path], None],
        write_once: Callable[[Path], None],
        ranks: Exchange,
    ) -> None:
        """Write a checkpoint to the nodes' own disks, and let it be copied behind that."""
        step = parcel.step
        partial = self._folder.partial_path(step)
        try:
            ranks.together(lambda: self._begin(step))
            write(partial)
            common, parcel = ranks.on_first(lambda: (_common(partial, write_once), parcel))
            ranks.together(lambda: self._write_common(partial, common))
            held = ranks.gather(ranks.together(lambda: _sizes(partial)))
            files = {name: size for own in held for name, size in own.items()}
            parcel = dataclasses.replace(parcel, files=files)
            ranks.together(lambda: self._publish(parcel))
        except CheckpointError:
            if self._is_leader:
                self._folder.abandon(step)
            raise
        shares = share_out(held, files)
        assert shares is not None
        self._newest = parcel, shares
        if not ranks.any(self._upload is not None and self._upload.is_alive()):
            self._start(parcel, shares)
        else:
            self._warn(
                "the checkpoint of iteration %d stays on the nodes' own disks: %s is still being"
                " copied to %s; the next one is copied",
                step,
                self._upload,
                self._shared.folder.path,
            )

    def _give_way(self, ranks: Exchange) -> None:
        """Wait until nothing is copied, for a checkpoint that goes to shared storage itself.

        Raises:
            CheckpointError: the copy does not end.
        """
        self._newest = None
        try:
            self._wait(ranks, time.monotonic() + self._timeout_s)
        except CheckpointError:
            if ranks.any(self._upload is not None and self._upload.is_alive()):
                raise

    def drain(self, *, tell: bool = True) -> Path | None:
        """Wait until the newest checkpoint is in shared storage.

        Args:
            tell: whether :meth:`completed` shall tell of it.

        Returns:
            Its folder there, ``None`` where none was written to the nodes' own disks.

        Raises:
            CheckpointError: it is not there; the nodes' own disks have it.
        """
        until_s = time.monotonic() + self._timeout_s
        self._wait(self._control, until_s)
        if self._newest is None:
            return None
        parcel, shares = self._newest
        upload = self._upload
        if upload is None or upload.path is None or upload.iteration != parcel.step:
            upload = self._start(parcel, shares, is_awaited=True)
            self._wait(self._control, until_s)
            if upload.failure is not None:
                raise upload.failure
        if not tell and upload in self._untold:
            self._untold.remove(upload)
        return upload.path

    def completed(self) -> tuple[int, Path] | None:
        """Step and folder of a checkpoint that came to shared storage; each once."""
        for upload in self._untold:
            if upload.path is not None:
                self._untold.remove(upload)
                return upload.iteration, upload.path
        return None

    def finish_former(self, latest: Callable[[], int | None]) -> None:
        """Finish the copy of a checkpoint that ranks before these had written, if all is there.

        Args:
            latest: called on rank 0; the newest step in shared storage, 0 where there is none,
                ``None`` where the run is not to go on from there.
        """
        newest = self._control.on_first(latest, name_rank=False)
        if newest is None:
            return
        held = self._control.gather(self._held(newest))
        found = {key for own in held for key in own}
        for step, save_id in sorted(found, reverse=True):
            parts = [own.get((step, save_id), ({}, None)) for own in held]
            parcel = next(told for _, told in parts if told is not None)
            shares = share_out([files for files, _ in parts], parcel.files)
            if shares is None:
                self._warn(
                    "the checkpoint of iteration %d is on the disks of some nodes, and part of it"
                    " was on others that are not here: it is left out",
                    step,
                )
                continue
            self._tell(
                f"  going on with the copy of iteration {step} to {self._shared.folder.path}"
            )
            upload = self._start(parcel, shares)
            self._untold.remove(upload)
            try:
                self._wait(self._control, time.monotonic() + self._timeout_s)
            except CheckpointError as error:
                if self._control.any(upload.is_alive()):
                    raise
                self._warn("%s; going on from that of iteration %d", error, newest)
                return
            if upload.failure is None:
                return

    @contextlib.contextmanager
    def reading(
        self, path: Path, step: int, save_id: str, files: Mapping[str, int]
    ) -> Iterator[Path]:
        """Give a folder to read a checkpoint from: with what this node has of it, from there.

        Args:
            path: of the checkpoint in shared storage.
            step: that it is of.
            save_id: of its saving, empty where nothing of it is elsewhere.
            files: size of each of its files in bytes.
        """
        view = self._folder.path / f".reading-{self._job.rank}"
        here: set[str] = set()
        try:
            known = self._parcels().get(step)
            if save_id and known is not None and known.save_id == save_id:
                own = _sizes(self._folder.complete_path(step))
                here = {name for name, size in files.items() if own.get(name) == size}
            shutil.rmtree(view, ignore_errors=True)
            if here:
                view.mkdir()
                for name in files:
                    source = self._folder.complete_path(step) if name in here else path
                    (view / name).symlink_to(source.absolute() / name)
        except OSError:
            here = set()  # a disk that cannot be written: shared storage has all of it
        told = self._control.gather(sum(files[name] for name in here))
        whole = sum(files.values())
        if any(told):
            least, most = min(told) / whole, max(told) / whole
            self._tell(
                f"  ranks have {least:.0%} to {most:.0%} of iteration {step} on their own disks"
            )
        try:
            yield view if here else path
        finally:
            shutil.rmtree(view, ignore_errors=True)

    def close(self) -> None:
        """End what was made, after :meth:`drain`."""
        if self._ranks.group is not None and dist.is_initialized():
            dist.destroy_process_group(self._ranks.group)

    def _begin(self, iteration: int) -> None:
        if not self._is_leader:
            return
        require_current(self._settings.progress_dir)
        for step in self._folder.steps():
            if step > iteration or (self.resumed is not None and step > self.resumed):
                self._folder.remove(step)
        self.resumed = None
        self._folder.begin(iteration)

    def _write_common(self, partial: Path, common: Mapping[str, bytes]) -> None:
        if self._is_leader:
            for name, content in common.items():
                (partial / name).write_bytes(content)

    def _publish(self, parcel: Parcel) -> None:
        if not self._is_leader:
            return
        progress_dir, upload = self._settings.progress_dir, self._upload
        text = json.dumps(dataclasses.asdict(parcel))
        write_durably(self._folder.partial_path(parcel.step) / _MANIFEST, text)
        self._folder.publish(parcel.step, lambda: require_current(progress_dir))
        busy = {upload.iteration} if upload is not None and upload.is_alive() else set()
        self._folder.keep(self._settings.keep or _KEPT, busy)

    def _start(
        self, parcel: Parcel, shares: list[list[str]], *, is_awaited: bool = False
    ) -> Upload:
        upload = self._upload = Upload(
            self._folder.complete_path(parcel.step),
            self._shared,
            shares[self._job.rank],
            parcel,
            self._ranks,
            progress_dir=self._settings.progress_dir,
            is_awaited=is_awaited,
        )
        self._untold = [one for one in self._untold if one.failure is None] + [upload]
        return upload

    def _wait(self, ranks: Exchange, until_s: float) -> None:
        """Wait for the copy under way; a failure of it is told by itself.

        Raises:
            CheckpointError: the deadline passed on some rank.
        """
        upload = self._upload
        if upload is None:
            return
        while upload.is_alive() and (left_s := until_s - time.monotonic()) > 0:
            upload.join(min(left_s, _LOOK_S))
            if upload.is_alive():
                self._tell(f"  waiting for the copy of {upload} to {self._shared.folder.path}")
        if ranks.any(upload.is_alive()):
            upload.is_awaited = True
            upload.give_up()
            upload.join(_END_S)
            raise CheckpointError(
                f"the copy of {upload} to {self._shared.folder.path} did not end within"
                f" {self._timeout_s:g} s: it is on the nodes' own disks, and the same command on"
                f" the same nodes goes on with it; {self._settings.patience} gives it more time"
            )

    def _held(self, latest: int) -> dict[tuple[int, str], tuple[dict[str, int], Parcel | None]]:
        """What this node's disk has of newer ones; one rank of each node tells what they are."""
        return {
            (step, one.save_id): (
                _sizes(self._folder.complete_path(step)),
                one if self._is_leader else None,
            )
            for step, one in self._parcels().items()
            if step > latest
        }

    def _parcels(self) -> dict[int, Parcel]:
        """Those on this node's disk, as far as they can be read."""
        found = {}
        with contextlib.suppress(OSError, ValueError, TypeError):
            for step, path in self._folder.steps().items():
                found[step] = Parcel(**json.loads((path / _MANIFEST).read_text()))
        return found

    def _tell(self, text: str) -> None:
        if self._is_first:
            print(text, flush=True)

    def _warn(self, text: str, *values: Any) -> None:
        if self._is_first:
            _LOG.warning("WARNING: " + text, *values)


def _place(base: Path, node: str, job: Job) -> tuple[Any, ...]:
    """What ranks have in common that share a folder, also where machines have one name."""
    own: tuple[int, ...] = ()
    with contextlib.suppress(OSError):
        base.mkdir(parents=True, exist_ok=True)
        status = base.stat()
        own = status.st_dev, status.st_ino
    return job.places[job.rank]["machine"], node, own


def _common(partial: Path, write: Any) -> dict[str, bytes]:
    """Let files be written on rank 0; returns what all nodes shall have of them."""
    before = set(os.listdir(partial))
    write(partial)
    return {
        name: (partial / name).read_bytes() for name in os.listdir(partial) if name not in before
    }


def _sizes(folder: Path) -> dict[str, int]:
    """Files of a checkpoint that are here, without the manifest; none of one that is gone."""
    with contextlib.suppress(FileNotFoundError):
        return {one.name: one.stat().st_size for one in folder.iterdir() if one.name != _MANIFEST}
    return {}
