"""Writes checkpoints to the nodes' local disks, and uploads them while training continues.

::

    training ─ copy in memory ─> <local>/iter_0000100/ of each node ─ Upload ─> <save>/iter_0000100/
               training waits    written during training          one checkpoint at a time

    node a   <local>/iter_0000100/  common.pt .metadata __0_0.distcp __1_0.distcp ──┐
    node b   <local>/iter_0000100/  common.pt .metadata __2_0.distcp __3_0.distcp ──┤
                                                                                    v
    <save>/.iter_0000100.partial/ ──> <save>/iter_0000100/     once all files are copied

    <local> is DIR/<name of --save>-<hash>/<node>, because several jobs and nodes may share a disk
    <local>/iter_0000100/local.json     manifest of the whole checkpoint, which lists all files

A checkpoint can be loaded once it is complete in shared storage. From then on, the nodes' local
disks are a faster source of the same files. With the files on the local disks, a new run can also
finish an upload that the previous run did not finish. Each rank uploads some of the files on its
node. About once per second, the ranks exchange whether an error occurred and whether any rank has
more files to upload.
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
# Keep two checkpoints by default, because the previous one is needed until the newest one is
# complete.
_KEPT = 2
_LOOK_S = 10.0
_END_S = 5.0  # An aborted upload must stop within this number of seconds.
_ROUND_S = 1.0


Done = SimpleQueue[tuple[int, Path]]
Stored = Mapping[str, Any]
"""Manifest that a checkpoint will have in shared storage. It lists the files of all nodes."""


class _NodeFolder(StepFolders):
    """Folder on a node's local disk that contains the checkpoint files of the node's ranks."""

    manifest_name = _MANIFEST


class LocalDisk:
    """Manages the checkpoint files on this node's local disk.

    All ranks must call each method together.

    Args:
        job: Rank, process groups and environment. The job's timeout is also the maximum time to
            wait for uploads.
        shared: Folder of checkpoints in shared storage. No other program may write to it.
        base: Folder on the local disk of each node.
        keep: Number of complete checkpoints to keep, both on local disks and in shared storage.
            With ``None``, all are kept in shared storage, and the last two on local disks.

    Attributes:
        shared: Folder of checkpoints in shared storage.
        done: Queue of (step, path) pairs of checkpoints that have become complete in shared
            storage.
        resumed: Step that the run resumed from. Later steps on the local disk are outdated,
            because the run repeats these steps. The first save removes them.
    """

    def __init__(self, job: Job, shared: StepFolders, base: Path, keep: int | None) -> None:
        self._job = job
        self.shared = shared
        self._keep = keep
        self._base = base = base.absolute()
        save = shared.path.resolve()
        node = job.environment.node or socket.gethostname()
        places = job.gather((_place(base, node, job), str(save)))
        name = f"{save.name}-{hashlib.sha256(places[0][1].encode()).hexdigest()[:8]}"
        self._folder = _NodeFolder(base / name / node)
        nodes = [node_id for node_id, _ in places]
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
        """Writes a checkpoint to the nodes' local disks, and starts its upload.

        Args:
            step: Step of the checkpoint.
            state: Tensors and other values of this rank to save.
            save_id: New identifier of this save. The value from rank 0 is used.
            ranks: Group of all ranks. No other communication may use it during the call.

        Returns:
            Whether the checkpoint is on the local disks. If it could not be written there, no
            upload is running, so the caller can write directly to shared storage.

        Raises:
            CheckpointError: If an earlier upload does not finish within the job's timeout.
        """
        try:
            newest, shares = self._newest = self._write(step, state, save_id, ranks)
        except CheckpointError as error:
            self._warn(
                "%s: %s; the checkpoint of iteration %d is written directly to %s",
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
                "the checkpoint of iteration %d stays only on the nodes' local disks, because "
                "an earlier checkpoint is still being copied to %s; later checkpoints are "
                "copied once that copy is complete",
                step,
                self.shared.path,
            )
        return True

    def drain(self) -> Path | None:
        """Waits until the newest checkpoint is in shared storage.

        Returns:
            Path of the newest checkpoint in shared storage, or ``None`` if this run wrote no
            checkpoint to the local disks.

        Raises:
            CheckpointError: If the upload failed. The checkpoint is then only on the local disks.
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
        """Finishes the upload of a previous run's checkpoint if its files are on the local disks.

        Args:
            latest: Function that is called on rank 0. It returns the newest step in shared storage,
                0 if there is no checkpoint, or ``None`` if the run does not resume from shared
                storage.
        """
        newest = self._control.on_first(latest)
        if newest is None:
            return
        held = self._control.gather(self._held(newest))
        saves = {key for files_of in held for key in files_of}
        for step, save_id in sorted(saves, reverse=True):
            parts = [files_of.get((step, save_id), ({}, None)) for files_of in held]
            stored = next(manifest for _, manifest in parts if manifest is not None)
            shares = share_out([files for files, _ in parts], stored["files"])
            if shares is None:
                self._warn(
                    "the checkpoint of iteration %d is not uploaded, because the local disks "
                    "of these nodes do not have all of its files",
                    step,
                )
                continue
            self._say(f"  continuing the copy of iteration {step} to {self.shared.path}")
            upload = self._start(stored, shares)
            try:
                self._wait(self._control, time.monotonic() + self._timeout_s)
            except CheckpointError as error:
                if self._is_uploading(self._control):
                    raise
                self._warn("%s; resuming from iteration %d", error, newest)
                return
            if upload.failure is None:
                # Do not report this checkpoint as completed, because this run did not write it.
                self.done.get()
                return

    def near(self, step: int, save_id: str, files: Mapping[str, int]) -> dict[str, Path]:
        """Returns the paths of a checkpoint's files on this node's local disk, keyed by file name.

        Args:
            step: Step of the checkpoint.
            save_id: Identifier of the save, or empty if local disks have no files of the save.
            files: Size in bytes of each file of the checkpoint, keyed by name.
        """
        sizes: dict[str, int] = {}
        folder = self._folder.complete_path(step)
        # Ignore errors, because all files can be read from shared storage instead.
        with contextlib.suppress(OSError):
            manifest = self._stored().get(step)
            if save_id and manifest is not None and manifest["save_id"] == save_id:
                sizes = _sizes(folder)
        here = [name for name, size in files.items() if sizes.get(name) == size]
        held = self._control.gather(sum(files[name] for name in here))
        if any(held):
            total = sum(files.values())
            least = min(held) / total
            most = max(held) / total
            self._say(
                f"  each rank has {least:.0%} to {most:.0%} of the checkpoint of iteration "
                f"{step} on its local disk"
            )
        return {name: folder / name for name in here}

    def close(self) -> None:
        """Destroys the process group for uploads. Must be called after :meth:`drain`."""
        if self._ranks.group is not None and dist.is_initialized():
            dist.destroy_process_group(self._ranks.group)

    def _write(
        self, step: int, state: TakenState, save_id: str, ranks: RankGroup
    ) -> tuple[Stored, list[list[str]]]:
        """Writes the checkpoint of ``step``, which contains ``state``, to the local disks.

        ``save_id`` is the identifier of this save.

        Returns:
            Manifest of the checkpoint, and the names of the files that each rank has to upload.
        """
        partial = self._folder.partial_path(step)
        try:
            ranks.together(lambda: self._begin(step))
            once, written = self._writer.write(state, partial, ranks)
            entries = state.manifest(save_id, ranks)
            once, written, entries = ranks.on_first(lambda: (once, written, entries))
            ranks.together(lambda: write_files(partial, once) if self._is_leader else None)
            held = ranks.gather(ranks.together(lambda: _sizes(partial)))
            stored = {**entries, **written, "step": step}
            ranks.together(lambda: self._publish(stored))
        except CheckpointError:
            if self._is_leader:
                self._folder.abandon(step)
            raise
        shares = share_out(held, stored["files"])
        if shares is None:
            raise CheckpointError(
                f"{partial}: files are missing, or their sizes differ from those that were written"
            )
        return stored, shares

    def _begin(self, step: int) -> None:
        if not self._is_leader:
            return
        self._require_lease()
        for existing in self._folder.steps():
            if existing > step or (self.resumed is not None and existing > self.resumed):
                self._folder.remove(existing)
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
        """Raises LeaseTakenError if another job has taken over the folder in shared storage.

        Without this check, a rank that was suspended could overwrite files of the other job.
        """
        lease = self._job.leases.get(self.shared.path.resolve())
        # An error in shared storage must not prevent writing to local disks.
        with contextlib.suppress(OSError):
            if lease is not None:
                lease.require()

    def _start(self, stored: Stored, shares: list[list[str]]) -> Upload:
        self._upload = Upload(self, stored, shares[self._job.rank])
        return self._upload

    def _is_uploading(self, ranks: RankGroup) -> bool:
        return ranks.any(self._upload is not None and self._upload.is_alive())

    def _wait(self, ranks: RankGroup, until_s: float) -> None:
        """Waits for the running upload to end, at most until the time ``until_s``.

        Raises:
            CheckpointError: If the upload does not stop in time.
        """
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
                f"the copy of iteration {upload.step} to {self.shared.path} did not finish "
                f"within {self._timeout_s:g} s; the checkpoint is on the nodes' local disks, and "
                "running the same command on the same nodes continues the copy; to allow more "
                "time, increase the job's time limit"
            )

    def _held(self, latest: int) -> dict[tuple[int, str], tuple[dict[str, int], Stored | None]]:
        """Returns the checkpoint files on this disk whose steps are later than ``latest``.

        Each key is the pair of the step and the identifier of the save. Each value is a pair: the
        sizes of the files, keyed by name, and the manifest. Only one rank of each node returns the
        manifest; the other ranks return ``None`` instead.
        """
        return {
            (step, manifest["save_id"]): (
                _sizes(self._folder.complete_path(step)),
                manifest if self._is_leader else None,
            )
            for step, manifest in self._stored().items()
            if step > latest
        }

    def _stored(self) -> dict[int, Stored]:
        """Returns all readable manifests on this node's disk, keyed by step."""
        manifests: dict[int, Stored] = {}
        for step, path in self._folder.steps().items():
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError, CheckpointError):
                body = self._folder.read_manifest(path)
                # Manifests of earlier versions contain most entries in a nested mapping.
                stored = {**body.pop("told", {}), **body, "step": step}
                if stored["files"] and stored["save_id"]:
                    manifests[step] = stored
        return manifests

    def _say(self, text: str) -> None:
        if self._is_first:
            print(printable(text, lines=True), flush=True)

    def _warn(self, text: str, *values: Any) -> None:
        if self._is_first:
            _LOG.warning("WARNING: %s", printable(text % values if values else text))


class BackgroundWrite(threading.Thread):
    """Thread that writes one checkpoint while training continues.

    Args:
        write: Function that writes the checkpoint and returns its path. It returns ``None`` if the
            checkpoint is not at its final path yet.
        step: Step of the checkpoint.
        done: Queue that receives (step, path) once the checkpoint is complete.

    Attributes:
        step: Step of the checkpoint.
        path: Path of the checkpoint, or ``None`` until the checkpoint is complete.
        failure: Error that ended the write, or ``None`` if there was no error.
    """

    def __init__(self, write: Callable[[], Path | None], step: int, done: Done) -> None:
        super().__init__(name=f"checkpoint {step}", daemon=True)
        self._write = write
        self.step = step
        self._done = done
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
    """Reserves ``folder`` for this job until the job ends. All ranks must call this together.

    Args:
        folder: Folder of checkpoints.
        job: Rank, process groups and environment of this process.
        ranks: Group of all ranks, used for communication.
        remedy: Advice to append to the error message if the folder cannot be written. If empty, the
            OSError is raised unchanged, so that the caller can add advice.
        has_local: Whether checkpoints are first written to local disks. In this case, a failure to
            write to shared storage is not an error, because the storage may work again later.

    Raises:
        CheckpointError: If another job has reserved the folder, or the folder cannot be written.
    """
    path = folder.path.resolve()
    environment = job.environment
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
def writing(
    folder: StepFolders, step: int, job: Job, ranks: RankGroup, message: str
) -> Iterator[None]:
    """Creates the partial folder of ``step``, and removes it if the ``with`` block fails.

    All ranks must call this together.

    Args:
        folder: Folder of checkpoints.
        step: Step to write.
        job: Rank, process groups and environment of this process.
        ranks: Group of all ranks, used for communication.
        message: Error message in which ``{}`` stands for the cause.

    Raises:
        CheckpointError: If the ``with`` block raises a CheckpointError. All ranks raise the same
            error.
    """
    try:
        hold(folder, job, ranks)
        ranks.first(lambda: folder.begin(step))
        yield
    except BaseException as error:

        def clear(text: str = str(error)) -> str:
            """Removes the partial folder, and returns the cause of the failure.

            The cause is ``text``, unless another job has taken over the folder.
            """
            if folder.lease is not None:  # Without a lease, the folder may belong to another job.
                folder.abandon(step)
                try:
                    folder.lease.require()
                except LeaseTakenError as lost:
                    return str(lost)
                except OSError:
                    return text
            return text

        # All ranks raise a CheckpointError together, so all of them reach this call of on_first().
        if isinstance(error, CheckpointError):
            text = ranks.on_first(clear)
            raise CheckpointError(message.replace("{}", text)) from error
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
    """Reserves ``shared``, and finishes the uploads of previous runs to it.

    All ranks must call this together.

    Args:
        shared: Folder of checkpoints in shared storage.
        job: Rank, process groups and environment of this process.
        remedy: Advice to append to the error message if the folder cannot be written.
        base: Folder on the local disk of each node, or ``None`` to write directly to ``shared``.
        latest: Function that returns the newest step in ``shared``, 0 if there is no checkpoint, or
            ``None`` if the run does not resume from ``shared``.
        keep: Number of checkpoints to keep. With ``None``, all are kept in ``shared``, and two on
            local disks.

    Returns:
        Object that manages this node's local files, or ``None`` if local disks are not used.

    Raises:
        CheckpointError: If another job has reserved the folder, or the folder cannot be written.
    """
    ranks = RankGroup(job.rank, job.control_group)
    hold(shared, job, ranks, remedy, has_local=base is not None)
    if base is None:
        return None
    local = LocalDisk(job, shared, Path(base), keep)
    local.finish_former(latest)
    return local


class Upload(BackgroundWrite):
    """Thread that uploads some files of one checkpoint to shared storage.

    All ranks must create an upload of the same checkpoint, because the threads communicate.

    Args:
        disk: Local disk of this node, which has the files.
        stored: Manifest of the checkpoint, with the sizes and checksums of all files.
        names: Names of the files that this rank uploads.

    Attributes:
        is_given_up: Flag that a caller sets to abort the upload within about a second. The flag has
            no effect while a rank hangs in a write to shared storage.
    """

    def __init__(self, disk: LocalDisk, stored: Stored, names: Sequence[str]) -> None:
        super().__init__(self._copy, stored["step"], disk.done)
        self._disk = disk
        self._stored = stored
        self._names = names
        self._shared = disk.shared
        self._ranks = disk._ranks
        self.is_given_up = False
        self.start()

    def run(self) -> None:
        super().run()
        if self.failure is not None and self._ranks.is_first and not self.is_given_up:
            text = str(self.failure)
            if not isinstance(self.failure, CheckpointError):
                text = f"the copy of a checkpoint failed: {(text.splitlines() or ['?'])[0]}"
            _LOG.warning("WARNING: %s", printable(text))

    def _copy(self) -> Path:
        message = (
            f"the checkpoint of iteration {self.step} was not copied to {self._shared.path}: "
            f"{{}}; it is on the nodes' local disks, and earlier checkpoints are unchanged"
        )
        with writing(self._shared, self.step, self._disk._job, self._ranks, message):
            pieces = self._pieces()

            def go_on() -> bool:
                if self.is_given_up:
                    raise CheckpointError("the copy took too long")
                return _some(pieces)

            while self._ranks.any(self._ranks.together(go_on)):
                pass
            self._ranks.first(self._complete)
        return self._shared.complete_path(self.step)

    def _pieces(self) -> Iterator[None]:
        """Copies this rank's files to shared storage and flushes them. Yields after each block."""
        partial = self._shared.partial_path(self.step)
        stored = self._stored
        for name in self._names:
            source = self._disk._folder.complete_path(self.step) / name
            expected = stored["files"][name], stored.get("blocks", {}).get(name, "")
            old = CheckedFile([source], expected)
            target = partial / name
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
        names = {file.name for file in partial.iterdir()}
        if lacking := set(self._stored["files"]) - names:
            raise CheckpointError(f"{partial / min(lacking)} is missing")
        self._shared.commit(self.step, self._stored)  # commit() also checks the sizes of the files.
        if self._disk._keep is not None:
            self._shared.keep(self._disk._keep)


def share_out(
    held: Sequence[Mapping[str, int]], files: Mapping[str, int]
) -> list[list[str]] | None:
    """Divides the files to upload among the ranks whose nodes have the files.

    Args:
        held: One mapping per rank. It maps each file on the local disk of the rank's node to its
            size in bytes.
        files: Size in bytes of each file of the checkpoint, keyed by name.

    Returns:
        Names of the files that each rank has to upload. The files are divided evenly among the
        ranks of a node. The result is ``None`` if there is a file that no node has.
    """
    shares: list[list[str]] = [[] for _ in held]
    for number, (name, size) in enumerate(sorted(files.items())):
        having = [rank for rank, sizes in enumerate(held) if sizes.get(name) == size]
        if not having:
            return None
        shares[having[number % len(having)]].append(name)
    return shares


def _place(base: Path, node: str, job: Job) -> tuple[Any, ...]:
    """Returns a key that is equal on two ranks if and only if they use the same folder ``base``.

    ``node`` is the name of the node. The key contains the folder's device and inode, because two
    machines may have the same name.
    """
    identity: tuple[int, ...] = ()
    with contextlib.suppress(OSError):
        base.mkdir(parents=True, exist_ok=True)
        status = base.stat()
        identity = status.st_dev, status.st_ino
    return job.places[job.rank]["machine"], node, identity


def _sizes(folder: Path) -> dict[str, int]:
    """Returns the size of each file in ``folder``, except for the manifest.

    The result is empty if the folder does not exist.
    """
    with contextlib.suppress(FileNotFoundError):
        files = (file for file in folder.iterdir() if file.name != _MANIFEST)
        return {file.name: file.stat().st_size for file in files}
    return {}


def _some(pieces: Iterator[None]) -> bool:
    """Copies some of the ``pieces`` for about a second. Returns False if no pieces are left."""
    until_s = time.monotonic() + _ROUND_S
    return any(time.monotonic() >= until_s for _ in pieces)
