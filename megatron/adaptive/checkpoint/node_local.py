"""Writes checkpoints to the nodes' own disks and copies them to shared storage behind training.

::

    training ─ copy in memory ─> <local>/iter_0000100/ of each node ─ Upload ─> <save>/iter_0000100/
               training waits    behind training                      behind that, one at a time

    node a   <local>/iter_0000100/  common.pt .metadata __0_0.distcp __1_0.distcp ──┐
    node b   <local>/iter_0000100/  common.pt .metadata __2_0.distcp __3_0.distcp ──┤
                                                                                    v
    <save>/.iter_0000100.partial/ ──> <save>/iter_0000100/     once all of it is there

    <local> is DIR/<name of --save>-<hash>/<node>, for several jobs and nodes may share a disk
    <local>/iter_0000100/local.json     the manifest of the whole checkpoint, with all of its files

What counts is the checkpoint in shared storage, complete by the program's own rule: it alone is
ever loaded. A node's own disk is where its files are read from then, and where an upload goes on
from that ranks which ended did not finish. Every rank copies a share of its node's files, for a
second at a time; then all ranks exchange whether one has more, and what went wrong.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from megatron.adaptive.checkpoint.checksums import CheckedFile
from megatron.adaptive.checkpoint.collective_errors import RankGroup
from megatron.adaptive.checkpoint.folder import StepFolders, write_files
from megatron.adaptive.checkpoint.writer import ShardWriter, TakenState
from megatron.adaptive.config.input_files import printable
from megatron.adaptive.engine.folder_lease import Lease, LeaseTakenError
from megatron.adaptive.engine.process_context import Job
from megatron.adaptive.errors import CheckpointError

_LOG = logging.getLogger(__name__)
_MANIFEST = "local.json"
_KEPT = 2  # where the user names no number: the last one, and the one before while that is written
_LOOK_S = 10.0
_END_S = 5.0  # for an upload that is given up
_ROUND_S = 1.0


Done = SimpleQueue[tuple[int, Path]]
Stored = Mapping[str, Any]
"""Contents of a checkpoint's manifest in shared storage, with all of its files."""


class _NodeFolder(StepFolders):
    """Holds a node's part of checkpoints on its own disk."""

    manifest_name = _MANIFEST


class LocalDisk:
    """Holds this node's part of the checkpoints. Every method is collective.

    Args:
        job: this process within the job; its timeout also limits waits for uploads.
        shared: where they are to be; nobody else writes there meanwhile.
        base: the folder on each of the nodes' own disks.
        keep: complete checkpoints that stay, in shared storage too; there all where ``None``, and
            here as few as it takes.

    Attributes:
        shared: as given.
        done: step and folder of each checkpoint that came to shared storage.
        resumed: the step that the run went on from; this disk's later ones are of steps that were
            done again since, and go with the first checkpoint.
    """

    def __init__(self, job: Job, shared: StepFolders, base: Path, keep: int | None) -> None:
        self._job, self.shared, self._keep = job, shared, keep
        self._base = base = base.absolute()
        save = shared.path.resolve()
        node = job.environment.node or socket.gethostname()
        places = job.gather((_place(base, node, job), str(save)))
        name = f"{save.name}-{hashlib.sha256(places[0][1].encode()).hexdigest()[:8]}"
        self._folder = _NodeFolder(base / name / node)
        nodes = [place for place, _ in places]
        self._is_leader = nodes.index(nodes[job.rank]) == job.rank
        self._is_first = job.rank == 0
        self._timeout_s = job.timeout.total_seconds()
        self._ranks = RankGroup(job.rank, dist.new_group(backend="gloo", timeout=job.timeout))
        self._control = RankGroup(job.rank, job.control_group)
        self._writer = ShardWriter()
        self._newest: tuple[Stored, list[list[str]]] | None = None
        self._upload: Upload | None = None
        self.done: Done = SimpleQueue()
        self.resumed: int | None = None

    def save(self, step: int, state: TakenState, save_id: str, ranks: RankGroup) -> bool:
        """Write a checkpoint to the nodes' own disks, and let it be copied behind that.

        Args:
            step: that it is of.
            state: what it holds.
            save_id: a new one; that of rank 0 counts.
            ranks: all of them, on a group that is used by nothing else meanwhile.

        Returns:
            Whether it is there. Where that could not be, nothing is being copied any more: it can
            go to shared storage itself.

        Raises:
            CheckpointError: an upload before does not end.
        """
        try:
            newest, shares = self._newest = self._write(step, state, save_id, ranks)
        except CheckpointError as error:
            self._warn(
                "%s: %s; the checkpoint of iteration %d goes to %s at once",
                self._base,
                error,
                step,
                self.shared.path,
            )
            self._newest = None
            try:
                self._wait(ranks, time.monotonic() + self._timeout_s)
            except CheckpointError:
                if self._is_uploading(ranks):
                    raise
            return False
        if not self._is_uploading(ranks):
            self._start(newest, shares)
        else:
            self._warn(
                "the checkpoint of iteration %d stays on the nodes' own disks: one before it is"
                " still being copied to %s; the next one is copied",
                step,
                self.shared.path,
            )
        return True

    def drain(self) -> Path | None:
        """Wait until the newest checkpoint is in shared storage.

        Returns:
            Its folder there, ``None`` where none was written to the nodes' own disks.

        Raises:
            CheckpointError: it is not there; the nodes' own disks have it.
        """
        until_s = time.monotonic() + self._timeout_s
        self._wait(self._control, until_s)
        if self._newest is None:
            return None
        newest, shares = self._newest
        upload = self._upload
        if upload is None or upload.path is None or upload.step != newest["step"]:
            upload = self._start(newest, shares)
            self._wait(self._control, until_s)
            if upload.failure is not None:
                raise upload.failure
        return upload.path

    def finish_former(self, latest: Callable[[], int | None]) -> None:
        """Finish the upload of a checkpoint that ranks before these had written, if all is there.

        Args:
            latest: called on rank 0; the newest step in shared storage, 0 where there is none,
                ``None`` where the run is not to go on from there.
        """
        newest = self._control.on_first(latest)
        if newest is None:
            return
        held = self._control.gather(self._held(newest))
        found = {key for own in held for key in own}
        for step, save_id in sorted(found, reverse=True):
            parts = [own.get((step, save_id), ({}, None)) for own in held]
            stored = next(one for _, one in parts if one is not None)
            shares = share_out([files for files, _ in parts], stored["files"])
            if shares is None:
                self._warn(
                    "the checkpoint of iteration %d is on the disks of some nodes, and part of it"
                    " was on others that are not here: it is left out",
                    step,
                )
                continue
            self._say(f"  going on with the copy of iteration {step} to {self.shared.path}")
            upload = self._start(stored, shares)
            try:
                self._wait(self._control, time.monotonic() + self._timeout_s)
            except CheckpointError as error:
                if self._is_uploading(self._control):
                    raise
                self._warn("%s; going on from that of iteration %d", error, newest)
                return
            if upload.failure is None:
                self.done.get()  # which is no news of this run
                return

    def near(self, step: int, save_id: str, files: Mapping[str, int]) -> dict[str, Path]:
        """Return the files of a checkpoint that are on this node's own disk, by name.

        Args:
            step: that it is of.
            save_id: of its save, empty where nothing of it is elsewhere.
            files: size of each of its files in bytes.
        """
        own, folder = dict[str, int](), self._folder.complete_path(step)
        with contextlib.suppress(OSError):  # shared storage has all of it
            known = self._stored().get(step)
            if save_id and known is not None and known["save_id"] == save_id:
                own = _sizes(folder)
        here = [name for name, size in files.items() if own.get(name) == size]
        held = self._control.gather(sum(files[name] for name in here))
        if any(held):
            least, most = (one / sum(files.values()) for one in (min(held), max(held)))
            self._say(
                f"  ranks have {least:.0%} to {most:.0%} of iteration {step} on their own disks"
            )
        return {name: folder / name for name in here}

    def close(self) -> None:
        """Destroy the process group of uploads, after :meth:`drain`."""
        if self._ranks.group is not None and dist.is_initialized():
            dist.destroy_process_group(self._ranks.group)

    def _write(
        self, step: int, state: TakenState, save_id: str, ranks: RankGroup
    ) -> tuple[Stored, list[list[str]]]:
        """Write a checkpoint to the nodes' own disks; returns who copies what of it."""
        partial = self._folder.partial_path(step)
        try:
            ranks.together(lambda: self._begin(step))
            once, written = self._writer.write(state, partial, ranks)
            given = state.manifest(save_id, ranks)
            once, written, given = ranks.on_first(lambda: (once, written, given))
            ranks.together(lambda: write_files(partial, once) if self._is_leader else None)
            held = ranks.gather(ranks.together(lambda: _sizes(partial)))
            stored = {**given, **written, "step": step}
            ranks.together(lambda: self._publish(stored))
        except CheckpointError:
            if self._is_leader:
                self._folder.abandon(step)
            raise
        shares = share_out(held, stored["files"])
        if shares is None:
            raise CheckpointError(f"{partial}: files have other sizes than what was written")
        return stored, shares

    def _begin(self, step: int) -> None:
        if not self._is_leader:
            return
        self._require_lease()
        for one in self._folder.steps():
            if one > step or (self.resumed is not None and one > self.resumed):
                self._folder.remove(one)
        self.resumed = None
        self._folder.begin(step)

    def _publish(self, stored: Stored) -> None:
        if not self._is_leader:
            return
        upload = self._upload
        self._folder.commit(stored["step"], stored, self._require_lease)
        busy = {upload.step} if upload is not None and upload.is_alive() else set()
        self._folder.keep(self._keep or _KEPT, busy)

    def _require_lease(self) -> None:
        """Keep ranks that stood still from writing over what others did since."""
        lease = self._job.leases.get(self.shared.path.resolve())
        with contextlib.suppress(OSError):  # while shared storage fails this disk is all there is
            if lease is not None:
                lease.require()

    def _start(self, stored: Stored, shares: list[list[str]]) -> Upload:
        self._upload = Upload(self, stored, shares[self._job.rank])
        return self._upload

    def _is_uploading(self, ranks: RankGroup) -> bool:
        return ranks.any(self._upload is not None and self._upload.is_alive())

    def _wait(self, ranks: RankGroup, until_s: float) -> None:
        """Wait for the upload under way, which reports its failures itself."""
        upload = self._upload
        if upload is None:
            return
        while upload.is_alive() and (left_s := until_s - time.monotonic()) > 0:
            upload.join(min(left_s, _LOOK_S))
            if upload.is_alive():
                self._say(
                    f"  waiting for the copy of iteration {upload.step} to {self.shared.path}"
                )
        if ranks.any(upload.is_alive()):
            upload.is_given_up = True
            upload.join(_END_S)
            raise CheckpointError(
                f"the copy of iteration {upload.step} to {self.shared.path} did not end within"
                f" {self._timeout_s:g} s: it is on the nodes' own disks, and the same command on"
                " the same nodes goes on with it; a longer time limit of the job gives it more time"
            )

    def _held(self, latest: int) -> dict[tuple[int, str], tuple[dict[str, int], Stored | None]]:
        """Return this disk's files of newer ones; one rank of each node adds the manifests."""
        return {
            (step, one["save_id"]): (
                _sizes(self._folder.complete_path(step)),
                one if self._is_leader else None,
            )
            for step, one in self._stored().items()
            if step > latest
        }

    def _stored(self) -> dict[int, Stored]:
        """Return those on this node's disk, as far as they can be read."""
        found: dict[int, Stored] = {}
        for step, path in self._folder.steps().items():
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError, CheckpointError):
                body = self._folder.read_manifest(path)
                # Versions before had most of it one level deeper.
                stored = {**body.pop("told", {}), **body, "step": step}
                if stored["files"] and stored["save_id"]:
                    found[step] = stored
        return found

    def _say(self, text: str) -> None:
        if self._is_first:
            print(printable(text, lines=True), flush=True)

    def _warn(self, text: str, *values: Any) -> None:
        if self._is_first:
            _LOG.warning("WARNING: %s", printable(text % values if values else text))


class BackgroundWrite(threading.Thread):
    """Writes one checkpoint behind training.

    Args:
        write: does it; returns its folder, ``None`` where it is not yet where it is to be.
        step: that it is of.
        done: receives step and folder.

    Attributes:
        step: as given.
        path: of the complete checkpoint, once it is there.
        failure: why it is not.
    """

    def __init__(self, write: Callable[[], Path | None], step: int, done: Done) -> None:
        super().__init__(name=f"checkpoint {step}", daemon=True)
        self._write, self.step, self._done = write, step, done
        self.path: Path | None = None
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self.path = self._write()
            if self.path is not None:
                self._done.put((self.step, self.path))
        except BaseException as error:
            self.failure = error


def hold(
    folder: StepFolders, job: Job, ranks: RankGroup, remedy: str = "", *, has_local: bool = False
) -> None:
    """Let this job alone write a folder, from now to the job's end. Collective.

    Args:
        folder: of checkpoints.
        job: this process within the job.
        ranks: all of them.
        remedy: what to do where it cannot be written; empty where the caller says it.
        has_local: checkpoints go to the nodes' own disks first: it may be there later.

    Raises:
        CheckpointError: another job has it, or it cannot be written.
    """
    path, environment = folder.path.resolve(), job.environment
    if path not in job.leases:
        lease = Lease(folder.path)

        def claim() -> int:
            try:
                if not lease.join_manager(environment.lease, environment.run_id):
                    name = "" if environment.run_id == "none" else environment.run_id
                    lease.claim(job=name, restarts=environment.restart_count)
                    lease.keep_up(lambda line: _LOG.warning("%s", printable(line)))
                folder.lease = lease
                folder.clear()
            except OSError as error:
                if has_local:
                    return 0
                if not remedy:
                    raise
                where = f"{error.filename or folder.path}: {error.strerror}"
                raise CheckpointError(f"cannot write {where}. {remedy}") from error
            return lease.number

        number = ranks.on_first(claim)
        if not number:
            return
        if not ranks.is_first:
            lease.join(number)
        job.leases[path] = lease
    folder.lease = job.leases[path]


@contextlib.contextmanager
def writing(folder: StepFolders, step: int, job: Job, ranks: RankGroup, why: str) -> Iterator[None]:
    """Make the partial folder of a step, and remove it where what follows fails. Collective.

    Args:
        folder: of checkpoints.
        step: that is written.
        job: this process within the job.
        ranks: all of them.
        why: text of the error, with braces in the place of its cause.

    Raises:
        CheckpointError: in place of one that was raised within, on all ranks.
    """
    try:
        hold(folder, job, ranks)
        ranks.first(lambda: folder.begin(step))
        yield
    except BaseException as error:

        def clear(text: str = str(error)) -> str:
            """Clear up; returns why it failed, which may be that another job cleared up before."""
            if folder.lease is not None:  # else what is there is not ours
                folder.abandon(step)
                try:
                    folder.lease.require()
                except LeaseTakenError as lost:
                    return str(lost)
                except OSError:
                    return text
            return text

        if isinstance(error, CheckpointError):  # on all ranks: they wait for the clearing up
            text = ranks.on_first(clear)
            raise CheckpointError(why.replace("{}", text)) from error
        if ranks.is_first:
            clear()
        raise


def prepare(
    shared: StepFolders,
    job: Job,
    remedy: str,
    base: str | Path | None,
    latest: Callable[[], int | None],
    keep: int | None,
) -> LocalDisk | None:
    """Lets this job alone write a folder, and finishes what is on its way there. Collective.

    Args:
        shared: the folder of checkpoints.
        job: this process within the job.
        remedy: what to do where it cannot be written.
        base: the folder on each node's own disk, ``None`` where checkpoints go to ``shared``.
        latest: see :meth:`LocalDisk.finish_former`.
        keep: see :class:`LocalDisk`.

    Returns:
        This node's part of the checkpoints, if they go to the nodes' own disks first.

    Raises:
        CheckpointError: another job has the folder, or it cannot be written.
    """
    ranks = RankGroup(job.rank, job.control_group)
    hold(shared, job, ranks, remedy, has_local=base is not None)
    if base is None:
        return None
    local = LocalDisk(job, shared, Path(base), keep)
    local.finish_former(latest)
    return local


class Upload(BackgroundWrite):
    """Copies one checkpoint. Collective over all ranks, each of which makes one at the same time.

    Args:
        disk: this node's, which has what this rank copies.
        stored: the checkpoint.
        names: of the files that this rank copies.

    Attributes:
        is_given_up: set it, and it fails soon, unless storage holds a rank up for good.
    """

    def __init__(self, disk: LocalDisk, stored: Stored, names: Sequence[str]) -> None:
        super().__init__(self._copy, stored["step"], disk.done)
        self._disk, self._stored, self._names = disk, stored, names
        self._shared, self._ranks = disk.shared, disk._ranks
        self.is_given_up = False
        self.start()

    def run(self) -> None:
        super().run()
        if self.failure is not None and self._ranks.is_first and not self.is_given_up:
            text = str(self.failure)
            if not isinstance(self.failure, CheckpointError):
                text = f"the copy of a checkpoint broke off: {(text.splitlines() or ['?'])[0]}"
            _LOG.warning("WARNING: %s", printable(text))

    def _copy(self) -> Path:
        why = (
            f"the checkpoint of iteration {self.step} was not copied to {self._shared.path}: {{}};"
            " it is on the nodes' own disks, and those before it are as they were"
        )
        with writing(self._shared, self.step, self._disk._job, self._ranks, why):
            pieces = self._pieces()

            def go_on() -> bool:
                if self.is_given_up:
                    raise CheckpointError("it took too long")
                return _some(pieces)

            while self._ranks.any(self._ranks.together(go_on)):
                pass
            self._ranks.first(self._complete)
        return self._shared.complete_path(self.step)

    def _pieces(self) -> Iterator[None]:
        """Copy files and make them durable; yields after each piece."""
        partial, stored = self._shared.partial_path(self.step), self._stored
        for name in self._names:
            source = self._disk._folder.complete_path(self.step) / name
            expected = stored["files"][name], stored.get("blocks", {}).get(name, "")
            old, target = CheckedFile([source], expected), partial / name
            try:
                with target.open("wb") as new:
                    for number in range(old.blocks):
                        new.write(old.block(number))
                        yield
                    new.flush()
                    os.fsync(new.fileno())
            except OSError as error:
                raise OSError(error.errno, error.strerror, error.filename or str(target)) from None
            finally:
                old.close()

    def _complete(self) -> None:
        partial = self._shared.partial_path(self.step)
        if lacking := set(self._stored["files"]) - {one.name for one in partial.iterdir()}:
            raise CheckpointError(f"{partial / min(lacking)} is missing")
        self._shared.commit(self.step, self._stored)  # which compares sizes
        if self._disk._keep is not None:
            self._shared.keep(self._disk._keep)


def share_out(
    held: Sequence[Mapping[str, int]], files: Mapping[str, int]
) -> list[list[str]] | None:
    """Divide the files to copy among the ranks.

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


def _place(base: Path, node: str, job: Job) -> tuple[Any, ...]:
    """Return what ranks that share a folder have in common, also where machines have one name."""
    own: tuple[int, ...] = ()
    with contextlib.suppress(OSError):
        base.mkdir(parents=True, exist_ok=True)
        status = base.stat()
        own = status.st_dev, status.st_ino
    return job.places[job.rank]["machine"], node, own


def _sizes(folder: Path) -> dict[str, int]:
    """Return sizes of a checkpoint's files here, without the manifest; none of one that is gone."""
    with contextlib.suppress(FileNotFoundError):
        return {one.name: one.stat().st_size for one in folder.iterdir() if one.name != _MANIFEST}
    return {}


def _some(pieces: Iterator[None]) -> bool:
    """Copy for a moment; returns whether there may be more."""
    until_s = time.monotonic() + _ROUND_S
    return any(time.monotonic() >= until_s for _ in pieces)
