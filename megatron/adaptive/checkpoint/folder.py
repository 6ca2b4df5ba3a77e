"""Manages checkpoint folders, which have one subfolder per step.

A subfolder gets its final name only when it is complete::

    <folder>/                                 folder of the trainer: CheckpointFolder
      latest_checkpointed_iteration.txt       iteration to resume from
      iter_0000100/                           a complete checkpoint
        manifest.json                         format, settings, progress, size and checksums of each
                                              file, and a checksum of itself
        index.json common.values              file and offset of each tensor, and other state
        metadata.json common.pt .metadata __<rank>_0.distcp      megatron-core's torch_dist
      .iter_0000200.3.partial/                incomplete checkpoint of the third job that held the
                                              lease
      .lease/                                 names the job that may write, see engine.folder_lease
      .iter_0000100.replaced/                 the previous iter_0000100 while a new one replaces it

    <folder>/                                 folder of a Pipeline: PipelineFolder
      step_00000012/
        pipeline.json                         step, seed, loss scale, optimizer options of each
                                              parameter, ID of the save, files as above
        index.json state.values               file and offset of each tensor, and state of the
                                              user's objects, such as a scheduler
        .metadata __0_0.distcp                tensors by name, for torch.distributed.checkpoint

A checkpoint is written under a hidden name, flushed to disk with ``fsync``, and then renamed. After
that, its iteration is written to the tracker (``latest_checkpointed_iteration.txt``), if the folder
has a tracker. The tracker therefore always refers to a complete checkpoint. A job that takes over
the lease (``engine.folder_lease``) removes everything that earlier jobs left under hidden names. If
an earlier job was only suspended and continues later, it can no longer rename its checkpoint.

The names of the trainer's folders and of the tracker are the same as in Megatron-LM. ``.metadata``
and ``common.pt`` are pickles for Megatron-LM and torch. This program does not read them if there is
an index. Checkpoints of earlier versions have no index, and are opened only if the caller trusts
them.

This module does not communicate with other ranks and does not read tensors. Only one process at a
time may use it for the same folder.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from megatron.adaptive.checkpoint.checksums import (
    find_damage,
    is_sealed,
    seal_of,
    sealed,
    sum_of_file,
)
from megatron.adaptive.config.input_files import parse_json, printable, read_whole
from megatron.adaptive.config.schema_files import check_form
from megatron.adaptive.engine.folder_lease import Lease
from megatron.adaptive.errors import CheckpointError, ConfigError, DamagedCheckpointError

_LOG = logging.getLogger(__name__)
FORMAT_VERSION = 2
PIPELINE_FORMAT = 2
INDEX = "index.json"
PIPELINE_STATE = "state.values"  # File with the state of the user's objects.
_UNSEALED = 1  # Manifests up to this format version have no checksums.
# Only manifests that contain checksums have these entries.
_SUMMED = frozenset({"blocks", "checksum"})
# Files with this suffix contain tensors. Their checksums are verified when the tensors are read.
_SHARD = ".distcp"
_FORMAT = "megatron-adaptive-checkpoint"
_CORE_METADATA = "metadata.json"
_TRACKER = "latest_checkpointed_iteration.txt"
_TRACKER_BYTES = 1 << 16
_TRACKER_DIGITS = 18


class StepFolders:
    """Folder with one subfolder per step. Each subfolder has a manifest that lists its files.

    Args:
        path: Path of the folder. The folder need not exist.

    Attributes:
        lease: Lease that reserves the folder for this job, or ``None`` to write without a lease.
        manifest_name: Name of the manifest file. Only complete subfolders have this file.
    """

    manifest_name: ClassVar[str]
    _prefix: ClassVar[str] = "iter_"  # Prefix of the names of all subfolders.
    _digits: ClassVar[int] = 7  # Minimum number of digits in the names of subfolders.
    # First entries of each manifest: the name of the format (if it has a name) and the version that
    # this program writes. Newer versions cannot be read.
    _form: ClassVar[Mapping[str, Any]] = {}
    _needed = frozenset({"files"})  # Entries that each manifest must have.
    _schema: ClassVar[str] = "manifest"  # Name of the JSON schema for manifests.
    _trust = "--trust-checkpoint"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._complete = re.compile(rf"{self._prefix}(\d{{{self._digits},}})")
        self.lease: Lease | None = None

    def complete_path(self, step: int) -> Path:
        """Returns the final path of the subfolder of ``step``, even if it does not exist yet."""
        return self.path / self._name(step)

    def partial_path(self, step: int) -> Path:
        """Returns the hidden path of the subfolder of ``step`` while it is being written."""
        return self.path / f".{self._name(step)}{self._mark}.partial"

    def replaced_path(self, step: int) -> Path:
        """Returns the hidden path of the old subfolder of ``step`` while a new one replaces it."""
        return self.path / f".{self._name(step)}.replaced"

    def steps(self) -> dict[int, Path]:
        """Returns the path of each complete subfolder, keyed by step in ascending order."""
        manifests = self.path.glob(f"{self._prefix}*/{self.manifest_name}")
        matches = ((self._complete.fullmatch(file.parent.name), file.parent) for file in manifests)
        return dict(sorted((int(match[1]), folder) for match, folder in matches if match))

    def latest(self) -> int | None:
        """Returns the step to resume from, or ``None`` if no subfolder is complete."""
        return max(self.steps(), default=None)

    def named(self) -> list[int]:
        """Returns the steps that have a complete or incomplete subfolder, in ascending order."""
        names = (folder.name for folder in self.path.glob(f"{self._prefix}*"))
        return sorted(int(match[1]) for name in names if (match := self._complete.fullmatch(name)))

    def candidates(self) -> Iterator[int]:
        """Yields the steps to try to resume from, best first, if the user did not choose a step.

        The latest complete step comes first, then the earlier steps, newest first. If there is no
        tracker, a later step without a manifest comes even before the latest complete step, so that
        the user notices the damage.

        Raises:
            CheckpointError: If the path is not a folder of checkpoints.
        """
        first = self.latest()
        named = self.named()
        if not self._is_tracked():
            first = max(named, default=first)
        if first is None:
            return
        yield first
        yield from (step for step in reversed(named) if step < first)

    def _is_tracked(self) -> bool:
        """Returns whether the folder has a tracker, a file that contains the latest step."""
        return False

    def begin(self, step: int) -> Path:
        """Creates the partial folder of ``step`` and returns its path.

        Calls :meth:`clear` first.

        Raises:
            LeaseTakenError: If another job has taken over the folder.
            OSError: If the folder cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self.clear()
        partial = self.partial_path(step)
        partial.mkdir()
        return partial

    def clear(self) -> None:
        """Removes or restores the hidden folders that crashed runs left behind.

        If an earlier job is still running, it can no longer rename its partial folder after this
        call.

        Raises:
            LeaseTakenError: If another job has taken over the folder.
            OSError: If the folder cannot be written.
        """
        self._require_lease()
        for former in self.path.glob(f".{self._prefix}*.replaced"):
            complete = self.path / former.name[1 : -len(".replaced")]
            if complete.exists():
                shutil.rmtree(former)
            else:
                former.rename(complete)
        for stale in self.path.glob(f".{self._prefix}*.partial"):
            marked = re.search(r"\.(\d+)\.partial$", stale.name)
            if self.lease is None or marked is None or int(marked[1]) <= self.lease.number:
                self._discard(stale)

    def commit(
        self, step: int, manifest: Mapping[str, Any], check: Callable[[], None] | None = None
    ) -> Path:
        """Completes the partial checkpoint of ``step``, and makes it the latest checkpoint.

        The caller must already have flushed all files, except for the manifest, to disk with
        :func:`sync`.

        Args:
            step: Step that was passed to :meth:`begin`.
            manifest: Entries of the manifest. ``files`` maps file names to sizes in bytes, and
                defaults to the sizes in the partial folder. Checksums that are missing in
                ``blocks`` are computed and added.
            check: Function that is called after the last write and before the rename. If it raises
                an error, the checkpoint is not completed.

        Returns:
            Path of the complete checkpoint.

        Raises:
            CheckpointError: If the size of a file differs from its size in ``manifest``.
            LeaseTakenError: If another job has taken over the folder.
            OSError: If writing failed. The partial checkpoint is kept.
        """
        partial = self.partial_path(step)
        complete = self.complete_path(step)
        sizes = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
        files = dict(manifest.get("files", sizes))
        blocks = dict(manifest.get("blocks", {}))
        for name, size in sizes.items():
            if files.get(name, size) != size:
                path = partial / name
                raise CheckpointError(f"{path} has {size} bytes instead of {files[name]}")
            if name not in blocks:
                blocks[name] = sum_of_file(partial / name)[1]
        # Insert line breaks here, because json.dumps with an indent runs in Python instead of C,
        # and would delay training.
        body = {**self._form, **manifest, **self._form}
        body |= {"step": step, "files": files, "blocks": blocks, **self._order(step)}
        lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in body.items())
        write_files(partial, {self.manifest_name: sealed([*lines]).encode()})
        sync(partial)
        if check is not None:
            check()
        self._require_lease()
        former = self.replaced_path(step)
        if complete.exists():
            complete.rename(former)
        try:
            partial.rename(complete)
            sync(self.path)
            self._track(step)
        # This error means that another job took over the folder and removed the partial checkpoint.
        except FileNotFoundError:
            with contextlib.suppress(OSError):
                former.rename(complete)
            self._require_lease()
            raise
        if former.exists():
            shutil.rmtree(former)
        return complete

    def keep(self, number: int, also: Collection[int] = ()) -> None:
        """Removes all complete subfolders except the newest ``number``. Ignores file system errors.

        Args:
            number: Number of newest subfolders to keep.
            also: Steps whose subfolders are kept even if they are older.
        """
        for step in list(self.steps())[:-number]:
            if step not in also:
                self.remove(step)

    def remove(self, step: int) -> None:
        """Removes the complete subfolder of ``step``. Ignores file system errors."""
        # Rename the subfolder first, so that no process loads it while its files are being removed.
        doomed = self.partial_path(step)
        with contextlib.suppress(OSError):
            self.complete_path(step).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def abandon(self, step: int) -> None:
        """Removes the partial subfolder of ``step``. Ignores file system errors."""
        shutil.rmtree(self.partial_path(step), ignore_errors=True)

    def read_manifest(self, path: Path, remedy: str = "restore it from a copy") -> dict[str, Any]:
        """Checks that the manifest in the subfolder ``path`` is undamaged, and returns its entries.

        Raises:
            CheckpointError: If the manifest was written by another program or in a newer format.
            DamagedCheckpointError: If the manifest has changed since it was written. The error
                message ends with ``remedy``.
        """
        file = path / self.manifest_name
        try:
            raw = read_whole(file)
            body = parse_json(raw, strict=False)
        except FileNotFoundError:
            raise self._lacks_manifest(path, remedy) from None
        except (ValueError, OSError) as error:
            text = f"cannot read {file} ({error}); {remedy}"
            raise DamagedCheckpointError(text) from None
        entries = body if isinstance(body, dict) else {}
        versions = {name: value for name, value in self._form.items() if isinstance(value, int)}
        is_ours = isinstance(body, dict) and all(
            type(entries.get(name)) is type(value) and (name in versions or entries[name] == value)
            for name, value in self._form.items()
        )
        has_seal = is_ours and any(_UNSEALED < entries[name] <= versions[name] for name in versions)
        if not is_sealed(raw) and (has_seal or _SUMMED & entries.keys()):
            raise DamagedCheckpointError(
                f"{file} is damaged (its checksum does not match); {remedy}"
            )
        if not is_ours:
            raise CheckpointError(f"{file} was not written by this program; {remedy}")
        for name, newest in versions.items():
            if body[name] > newest:
                raise CheckpointError(
                    f"{path} has format version {body[name]}, but this program reads versions up "
                    f"to {newest}; load it with the version that wrote it, or with a later "
                    "version"
                )
        missing = sorted(self._needed - body.keys())
        if missing:
            text = f"{file} is damaged ({missing[0]!r} is missing); {remedy}"
            raise DamagedCheckpointError(text)
        body.pop("checksum", None)
        if wrong := self._broken_rule(body):
            raise DamagedCheckpointError(f"{file} is damaged ({wrong}); {remedy}")
        manifest: dict[str, Any] = body
        return manifest

    def _broken_rule(self, body: Mapping[str, Any]) -> str:
        """Returns the reason why the entries ``body`` are invalid, or ``""`` if they are valid."""
        try:
            check_form(body, self._schema, "it")
        except ConfigError as error:
            return str(error)
        names = {*body["files"], *body.get("blocks", {})}
        if outside := [
            name
            for name in names
            if name in ("", ".", "..") or name != Path(name).name or "\0" in name
        ]:
            return f"{outside[0]!r} in its list of files is not a plain file name"
        iteration = body.get("progress", {}).get("iteration", 0)
        if "step" in body and iteration and iteration != body["step"]:
            return f"step is {body['step']}, but progress.iteration is {iteration}"
        return ""

    def verify(self, step: int) -> list[str]:
        """Reads all files of the checkpoint of ``step``, and verifies their sizes and checksums.

        This method requires neither a process group nor torch, and takes only slightly longer than
        reading the files.

        Returns:
            A line of text for each damaged file. The line contains the name of the file and, if the
            file has several blocks, the first damaged block. The list is empty if no file is
            damaged. Files of earlier versions have no checksums, so only their sizes are verified.
        """
        path = self.complete_path(step).absolute()
        try:
            body = self.read_manifest(path)
        except CheckpointError as error:
            return [str(error)]
        problems: list[str] = []
        if body.get("step", step) != step:
            file = path / self.manifest_name
            problems.append(f"{file} belongs to step {body['step']}, not to step {step}")
        find_damage(path, body["files"], body.get("blocks", {}), problems.append)
        return problems

    def _read(self, path: Path, step: int, remedy: str, *, trust: bool) -> dict[str, Any]:
        """Checks the files of ``step`` in ``path``, and returns the entries of its manifest.

        This method verifies the sizes of all files, and the checksums of all files except shards
        (files with tensors). The checksums of shards are verified later, when the shards are read.

        Raises:
            CheckpointError: If the checkpoint was written by another program or in a newer format,
                or contains pickles while ``trust`` is False.
            DamagedCheckpointError: If the manifest is damaged, if a file is missing or has the
                wrong size, or if a checksum does not match. The error message ends with ``remedy``.
        """
        body = self.read_manifest(path, remedy)
        step_there = body.get("step", step)
        if step_there != step:
            file = path / self.manifest_name
            raise DamagedCheckpointError(
                f"{file} belongs to step {step_there}, not to step {step}; {remedy}"
            )
        files = body["files"]
        problems = list[str]()
        blocks = body.get("blocks", {})
        small = {name: sums for name, sums in blocks.items() if not is_shard(name)}
        find_damage(path, files, small, problems.append)
        if problems:
            raise DamagedCheckpointError(f"{problems[0]}: {remedy}")
        if INDEX not in files and not trust:
            raise CheckpointError(
                f"{path} was written by an earlier version and contains pickles, which are "
                f"read only from trusted sources; pass {self._trust} if you trust its source"
            )
        return body

    def _lacks_manifest(self, path: Path, remedy: str) -> CheckpointError:
        """Returns the error about the missing manifest in ``path``, with the advice ``remedy``."""
        return DamagedCheckpointError(
            f"{path} is incomplete ({self.manifest_name} is missing); {remedy}"
        )

    @property
    def _mark(self) -> str:
        """Returns the suffix of hidden names: a dot and the number of this job's lease."""
        return "" if self.lease is None else f".{self.lease.number}"

    def _require_lease(self) -> None:
        if self.lease is not None:
            self.lease.require()

    def _discard(self, path: Path) -> None:
        """Removes the file or folder ``path``, to which another process may still be writing.

        A folder is first renamed, so that the other process can no longer rename it to its final
        name. Errors while removing the folder's files are ignored.
        """
        if path.is_file():
            path.unlink(missing_ok=True)
            return
        doomed = self.path / f".{self._prefix}{secrets.token_hex(4)}.partial"
        with contextlib.suppress(FileNotFoundError):
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def _order(self, step: int) -> Mapping[str, Any]:
        """Returns the entries of ``step``'s manifest that identify the previous checkpoint."""
        return {}

    def _track(self, step: int) -> None:
        """Records ``step`` as the latest step. The base class records nothing."""

    def _name(self, step: int) -> str:
        return f"{self._prefix}{step:0{self._digits}d}"


Manifest = Mapping[str, Any]
"""Manifest of a trainer checkpoint; saved as JSON next to megatron-core's files:

    progress: Number of iterations and samples completed by the run, keyed by name.
    config: Settings of the run, from ``TrainerConfig.to_dict``.
    shape: Parallel sizes of the run, and number of chunks per rank, keyed by name.
    padded_vocab_size: Number of rows in the embedding.
    has_optimizer: Whether the checkpoint includes optimizer state.
    has_rng: Whether the checkpoint includes random states.
    files: Size in bytes of each file except the manifest, keyed by file name.
    blocks: Checksums of each file except the manifest, keyed by file name; missing in earlier
        versions. ``checkpoint.checksums`` describes their format.
    follows: Checksum of the previous checkpoint's manifest; empty for the first checkpoint.
    save_id: Identifier of this save, used to recognize its files on the nodes' local disks; empty
        if there are no such files.
"""


class CheckpointFolder(StepFolders):
    """Checkpoint folder of the trainer.

    Args:
        path: Path of the folder. The folder need not exist.
    """

    manifest_name = "manifest.json"
    _schema = "checkpoint_manifest"
    _form = MappingProxyType({"format": _FORMAT, "version": FORMAT_VERSION})
    _needed = frozenset(
        {"progress", "config", "shape", "padded_vocab_size", "has_optimizer", "has_rng", "files"}
    )

    def latest(self) -> int | None:
        """Returns the iteration to resume from, or ``None`` if there is no checkpoint.

        The result is the complete checkpoint that was written last. The tracker may name an earlier
        checkpoint, because a run may stop between renaming a checkpoint and updating the tracker.
        Checkpoints of later iterations are ignored if they were written before a run returned to an
        earlier iteration with ``--ckpt-step``.

        Raises:
            CheckpointError: If the tracker does not contain an iteration, or the path is a file.
        """
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"--load {self.path} is a file; pass the folder with checkpoints")
        tracked = self._tracked()
        return super().latest() if tracked is None else self._last_after(tracked)

    def _tracked(self) -> int | None:
        """Returns the iteration in the tracker, or ``None`` if the folder has no tracker."""
        tracker = self.path / _TRACKER
        if not os.path.lexists(tracker):
            return None
        try:
            text = read_whole(tracker, _TRACKER_BYTES).decode(errors="replace").strip()
        except OSError as error:
            raise DamagedCheckpointError(
                f"cannot read {tracker} ({error.strerror}), which contains the iteration of the "
                "newest checkpoint; replace this file, or choose a checkpoint with --ckpt-step"
            ) from None
        if not (text.isascii() and text.isdecimal() and len(text) <= _TRACKER_DIGITS):
            raise DamagedCheckpointError(
                f"{tracker} contains {text[:40]!r}, which is not an iteration; write the iteration "
                "of an existing checkpoint to this file, or choose a checkpoint with --ckpt-step"
            )
        return int(text)

    def _last_after(self, tracked: int) -> int:
        """Returns the last complete step in the chain of checkpoints that starts at ``tracked``.

        Each manifest contains the checksum of the previous checkpoint's manifest, so the
        checkpoints form a chain. Manifests of earlier versions do not contain this checksum. A
        checkpoint without it counts as later than ``tracked`` if its manifest file is newer than
        the tracker.
        """
        steps = self.steps()
        if tracked not in steps:
            return max(tracked, max(steps, default=tracked)) if steps else tracked
        last = tracked
        for step, path in steps.items():
            if step > last and self._follows(path, seal_of(steps[last] / self.manifest_name)):
                last = step
        return last

    def _follows(self, path: Path, seal: str) -> bool:
        """Returns whether the checkpoint ``path`` was saved directly after an earlier checkpoint.

        Args:
            path: Path of the checkpoint.
            seal: Checksum of the earlier checkpoint's manifest.
        """
        try:
            follows = self.read_manifest(path).get("follows")
            if follows is not None:
                return bool(follows == seal)
            times = [(path / self.manifest_name).stat().st_mtime_ns]
            times.append((self.path / _TRACKER).stat().st_mtime_ns)
        except (CheckpointError, OSError):
            return False
        return times[0] > times[1]

    def _order(self, step: int) -> Mapping[str, Any]:
        try:
            latest = self.latest()
        except CheckpointError:  # The tracker is damaged, and will be replaced.
            latest = super().latest()
        if latest is None:
            return {"follows": ""}
        return {"follows": seal_of(self.complete_path(latest) / self.manifest_name)}

    def candidates(self) -> Iterator[int]:
        try:
            tracked = self._tracked()
            latest = self.latest()
            if tracked is not None and latest is not None and latest != tracked:
                _LOG.warning(
                    "WARNING: %s contains iteration %d, but the checkpoint of iteration %d was "
                    "written later; resuming from the later checkpoint; use --ckpt-step %d to "
                    "go back",
                    printable(str(self.path / _TRACKER)),
                    tracked,
                    latest,
                    tracked,
                )
            yield from super().candidates()
        except DamagedCheckpointError as error:
            if not (steps := self.named()):
                raise
            _LOG.warning("WARNING: %s", printable(str(error)))
            yield from reversed(steps)

    def _is_tracked(self) -> bool:
        return os.path.lexists(self.path / _TRACKER)

    def open(self, iteration: int, *, trust: bool = False) -> tuple[Path, Manifest]:
        """Checks that a checkpoint is complete, and returns its path and manifest.

        This method verifies the checksums of all files except shards (files with tensors). The
        checksums of shards are verified later, when the shards are read.

        Args:
            iteration: Iteration of the checkpoint.
            trust: Whether to accept checkpoints with pickles, which earlier versions and
                Megatron-LM wrote. For a checkpoint of Megatron-LM, the returned manifest only lists
                the files that exist.

        Raises:
            CheckpointError: If the checkpoint was written by another program or in a newer format,
                or contains pickles while ``trust`` is False.
            DamagedCheckpointError: If the checkpoint is missing, incomplete or damaged.
        """
        path = self.complete_path(iteration)
        others = self._others(iteration)
        if not path.exists() and self.replaced_path(iteration).exists():
            path = self.replaced_path(iteration)
        if not path.is_dir():
            raise DamagedCheckpointError(
                f"the checkpoint of iteration {iteration} is missing ({path} does not exist); "
                f"{others}"
            )
        if trust and self._is_megatrons(path):
            files = {file.name: file.stat().st_size for file in sorted(path.iterdir())}
            return path, {"files": files, "blocks": {}, "config": {}}
        body = self._read(path, iteration, others, trust=trust)
        if _CORE_METADATA not in body["files"]:
            raise DamagedCheckpointError(
                f"{path} is incomplete (its list of files lacks {_CORE_METADATA}); {others}"
            )
        return path, {"blocks": {}, "save_id": "", **body}

    def _lacks_manifest(self, path: Path, remedy: str) -> CheckpointError:
        if any(path.glob("mp_rank_*")):
            return CheckpointError(
                f"{path} is in Megatron-LM's old torch format, but only torch_dist is supported; "
                "convert it with Megatron-LM, or start without --load"
            )
        if self._is_megatrons(path):
            return CheckpointError(
                f"{path} was written by Megatron-LM (it has no {self.manifest_name}) and "
                f"contains pickles without checksums; pass {self._trust} if you trust its source"
            )
        return super()._lacks_manifest(path, remedy)

    def _is_megatrons(self, path: Path) -> bool:
        """Returns whether Megatron-LM wrote the checkpoint ``path`` in the torch_dist format."""
        has = {name: (path / name).exists() for name in (self.manifest_name, INDEX, _CORE_METADATA)}
        return has == {self.manifest_name: False, INDEX: False, _CORE_METADATA: True}

    def _others(self, iteration: int) -> str:
        """Returns advice for a user whose checkpoint of ``iteration`` cannot be loaded."""
        others = sorted({*self.steps()} - {iteration})
        if not others:
            return "restore it from a copy, or start without --load"
        return (
            "restore it from a copy, or resume from another checkpoint with --ckpt-step "
            f"{others[-1]}"
        )

    def _track(self, step: int) -> None:
        temporary = self.path / f".{self._prefix}latest{self._mark}.partial"
        write_files(self.path, {temporary.name: f"{step}".encode()})
        temporary.replace(self.path / _TRACKER)
        sync(self.path)


class PipelineFolder(StepFolders):
    """Checkpoint folder of a ``Pipeline``.

    Args:
        path: Path of the folder. The folder need not exist.
    """

    manifest_name = "pipeline.json"
    _prefix = "step_"
    _digits = 8
    _schema = "pipeline_manifest"
    _form = MappingProxyType({"format": PIPELINE_FORMAT})
    _trust = "trust_checkpoint=True"

    def open(self, step: int | None, *, trust: bool = False) -> tuple[Path, dict[str, Any]]:
        """Checks the files of a checkpoint, and returns its path and manifest.

        Args:
            step: Step of the checkpoint, or ``None`` for the newest checkpoint.
            trust: Whether to also accept checkpoints of earlier versions, which contain pickles.

        Raises:
            CheckpointError: If the checkpoint does not exist, has a newer format, or contains
                pickles while ``trust`` is False.
            DamagedCheckpointError: If the checkpoint is incomplete or damaged.
        """
        steps = self.steps()
        if step is None and not steps:
            raise CheckpointError(
                f"{self.path} contains no complete checkpoint of a Pipeline; pass the folder "
                "that was passed to Pipeline.save"
            )
        step = max(steps) if step is None else step
        path = self.complete_path(step)
        if step not in steps and not path.is_dir():
            raise CheckpointError(
                f"{self.path} has no checkpoint of step {step}; choose one of the steps "
                f"{', '.join(map(str, sorted(steps)))}"
            )
        return path, self._read(path, step, "load another checkpoint", trust=trust)


def is_shard(name: str) -> bool:
    """Returns whether the file ``name`` is a shard, which contains tensors."""
    return name.endswith(_SHARD)


STEP_PREFIXES = (CheckpointFolder._prefix, PipelineFolder._prefix)
"""Prefixes of the names of checkpoint folders, for the trainer and for a ``Pipeline``."""


def find(path: Path, step: int | None = None) -> tuple[StepFolders, list[int]]:
    """Finds the checkpoints at ``path``, and returns their folder and steps in ascending order.

    Args:
        path: Path of a folder of checkpoints or of a single checkpoint, written by the trainer or
            by a ``Pipeline``.
        step: Step to use, or ``None`` for all steps in the folder.

    Raises:
        CheckpointError: If there is no such checkpoint.
    """
    path = path.absolute()
    for folders in (CheckpointFolder(path.parent), PipelineFolder(path.parent)):
        if path.is_dir() and (match := folders._complete.fullmatch(path.name)) is not None:
            return folders, [int(match[1])]
    for folders in (CheckpointFolder(path), PipelineFolder(path)):
        if steps := folders.named():
            if step is not None and step not in steps:
                existing = ", ".join(map(str, steps))
                raise CheckpointError(
                    f"{path} has no checkpoint of step {step}; choose one of the steps {existing}"
                )
            return folders, steps if step is None else [step]
    reason = "contains no checkpoint" if path.is_dir() else "is not a folder"
    raise CheckpointError(
        f"{path} {reason}; pass the folder that was passed to --save or Pipeline.save"
    )


def make_pipeline_manifest(
    head: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns the manifest of a ``Pipeline`` checkpoint, without its format and its list of files.

    Args:
        head: Entries that are the same on all ranks: ``step``, ``seed``, ``loss_scale`` and
            ``extra``, plus ``save_id`` if parts of the checkpoint may be on nodes' local disks.
        parts: One mapping per rank, for ranks that together have all parameters. ``kind`` is the
            name of the optimizer, or ``None`` if there is no optimizer. ``groups`` lists the
            options and the parameter names of each parameter group. ``plain`` contains the
            optimizer's non-tensor values, keyed by name.
    """
    names = ("step", "seed", "loss_scale", "extra")
    groups = [group for part in parts for group in part["groups"]]
    return {
        **{name: head[name] for name in names},
        "save_id": head.get("save_id", ""),
        "optimizer": next((part["kind"] for part in parts if part["kind"]), None),
        "options": {name: options for options, members in groups for name in members},
        "states": {name: value for part in parts for name, value in part["plain"].items()},
    }


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes ``files``, which maps names to contents, to ``folder`` and flushes them to disk.

    Raises:
        OSError: If a file cannot be written.
    """
    for name, content in files.items():
        (folder / name).write_bytes(content)
        sync(folder / name)


def sync(path: Path) -> None:
    """Flushes the file or folder ``path`` to disk with ``fsync``."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
