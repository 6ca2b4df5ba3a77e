"""Manages folders of checkpoints, with one subfolder per step that appears complete or not at all.

::

    <folder>/                                 of the trainer: CheckpointFolder
      latest_checkpointed_iteration.txt       iteration to resume from
      iter_0000100/                           a complete checkpoint
        manifest.json                         format, settings, progress, size and checksums of each
                                              file, and a checksum of itself
        index.json common.values              place of each tensor's bytes, and other state
        metadata.json common.pt .metadata __<rank>_0.distcp      megatron-core's torch_dist
      .iter_0000200.3.partial/                being written by the third holder of the lease, or
                                              left behind by it
      .lease/                                 names the job that may write, see engine.folder_lease
      .iter_0000100.replaced/                 the previous iter_0000100 while a new one replaces it

    <folder>/                                 of a Pipeline: PipelineFolder
      step_00000012/
        pipeline.json                         step, seed, loss scale, options of the optimizer by
                                              parameter, ID of the save, files as above
        index.json state.values               place of each tensor's bytes, and state of the user's
                                              objects, such as a scheduler
        .metadata __0_0.distcp                tensors by name, for torch.distributed.checkpoint

A checkpoint is written under its hidden name, made durable, renamed, and only then named by the
tracker, if there is one. At any moment the tracker therefore names a complete checkpoint. A job
that takes over the right to write removes everything that earlier holders left under hidden names,
so that those can no longer publish it: see ``engine.folder_lease``.

The names of the trainer's folders and of its tracker are Megatron-LM's. ``.metadata`` and
``common.pt`` are pickles, for Megatron-LM and torch; this program does not read them if there is an
index. Checkpoints of former versions have no index, and are opened only if the caller trusts them.

This module knows nothing of other ranks or of tensors. One process works on a folder at a time.
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
PIPELINE_STATE = "state.values"  # state of the user's objects
_UNSEALED = 1  # the last format whose manifests had no checksums
_SUMMED = frozenset({"blocks", "checksum"})  # members of manifests since then
_SHARD = ".distcp"  # ends the names of files whose blocks are checked when they are read
_FORMAT = "megatron-adaptive-checkpoint"
_CORE_METADATA = "metadata.json"
_TRACKER = "latest_checkpointed_iteration.txt"
_TRACKER_BYTES = 1 << 16
_TRACKER_DIGITS = 18


class StepFolders:
    """A folder with one subfolder per step; each has a manifest that lists its files.

    Args:
        path: Path of the folder, which need not exist.

    Attributes:
        lease: Right to write here, ``None`` if no other job can write.
        manifest_name: Name of the manifest file, which only complete subfolders have.
    """

    manifest_name: ClassVar[str]
    _prefix: ClassVar[str] = "iter_"  # begins the subfolders' names
    _digits: ClassVar[int] = 7  # least number of digits in them
    # Entries that each manifest begins with: the newest version that can be read, and the format's
    # name if it has one.
    _form: ClassVar[Mapping[str, Any]] = {}
    _needed = frozenset({"files"})  # names of entries that each manifest must have
    _schema: ClassVar[str] = "manifest"  # name of the manifests' schema
    _trust = "--trust-checkpoint"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._complete = re.compile(rf"{self._prefix}(\d{{{self._digits},}})")
        self.lease: Lease | None = None

    def complete_path(self, step: int) -> Path:
        """Returns the path that a complete step has."""
        return self.path / self._name(step)

    def partial_path(self, step: int) -> Path:
        """Returns the path that a step is written to before it is complete."""
        return self.path / f".{self._name(step)}{self._mark}.partial"

    def replaced_path(self, step: int) -> Path:
        """Returns the path of a step's previous version while a new one takes its place."""
        return self.path / f".{self._name(step)}.replaced"

    def steps(self) -> dict[int, Path]:
        """Returns the complete subfolders by step, ascending."""
        manifests = self.path.glob(f"{self._prefix}*/{self.manifest_name}")
        matches = ((self._complete.fullmatch(file.parent.name), file.parent) for file in manifests)
        return dict(sorted((int(match[1]), folder) for match, folder in matches if match))

    def latest(self) -> int | None:
        """Returns the step to resume from, ``None`` if there is no complete one."""
        return max(self.steps(), default=None)

    def named(self) -> list[int]:
        """Returns the steps that have a subfolder, complete or not, ascending."""
        names = (folder.name for folder in self.path.glob(f"{self._prefix}*"))
        return sorted(int(match[1]) for name in names if (match := self._complete.fullmatch(name)))

    def candidates(self) -> Iterator[int]:
        """Yields the steps to resume from if the user named none, the best first.

        That is the latest step, or its substitute if a subfolder lost its manifest, and then
        earlier steps.

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
        """Returns whether a tracker file names the latest step."""
        return False

    def begin(self, step: int) -> Path:
        """Removes the remains of crashed runs and makes an empty partial folder.

        Raises:
            LeaseTakenError: If another job took the folder over.
            OSError: If the folder cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self.clear()
        partial = self.partial_path(step)
        partial.mkdir()
        return partial

    def clear(self) -> None:
        """Removes the remains of crashed runs, so that earlier jobs cannot publish them.

        Raises:
            LeaseTakenError: If another job took the folder over.
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
        """Turns the partial checkpoint of a step into a complete one, which becomes the latest.

        All files except the manifest must be durable already: their writers called :func:`sync`.

        Args:
            step: Step that :meth:`begin` was called with.
            manifest: Contents of the manifest. ``files``, sizes by name, defaults to those in the
                partial folder; ``blocks``, checksums by name, is completed.
            check: Function that is called after the last write and before the rename. Its error
                stops the commit.

        Returns:
            Path of the complete checkpoint.

        Raises:
            CheckpointError: If a file has another size than was written.
            LeaseTakenError: If another job took the folder over.
            OSError: If writing failed; the partial checkpoint still exists.
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
        # json.dumps with an indent runs in Python instead of C, and would hold up training.
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
        except FileNotFoundError:  # a job that took the folder over since then removed it
            with contextlib.suppress(OSError):
                former.rename(complete)
            self._require_lease()
            raise
        if former.exists():
            shutil.rmtree(former)
        return complete

    def keep(self, number: int, also: Collection[int] = ()) -> None:
        """Removes all but the last complete subfolders, as far as the file system permits.

        Args:
            number: Number of subfolders to keep.
            also: Further steps to keep.
        """
        for step in list(self.steps())[:-number]:
            if step not in also:
                self.remove(step)

    def remove(self, step: int) -> None:
        """Removes a complete subfolder, as far as the file system permits."""
        # Rename it first, so that nobody loads it while its files disappear.
        doomed = self.partial_path(step)
        with contextlib.suppress(OSError):
            self.complete_path(step).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def abandon(self, step: int) -> None:
        """Removes a partial folder, as far as the file system permits."""
        shutil.rmtree(self.partial_path(step), ignore_errors=True)

    def read_manifest(self, path: Path, remedy: str = "restore it from a copy") -> dict[str, Any]:
        """Returns a subfolder's manifest after checking that it is undamaged.

        Raises:
            CheckpointError: If another program or a newer format wrote it; ends with ``remedy``.
            DamagedCheckpointError: If it changed since it was written; ends with ``remedy``.
        """
        file = path / self.manifest_name
        try:
            raw = read_whole(file)
            body = parse_json(raw, strict=False)
        except FileNotFoundError:
            raise self._lacks_manifest(path, remedy) from None
        except (ValueError, OSError) as error:
            text = f"{file} cannot be read ({error}): {remedy}"
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
                f"{file} is damaged (its checksum does not match): {remedy}"
            )
        if not is_ours:
            raise CheckpointError(f"{file} was not written by this program: {remedy}")
        for name, newest in versions.items():
            if body[name] > newest:
                raise CheckpointError(
                    f"{path} has format version {body[name]} and this program reads up to {newest}:"
                    " load it with the version that wrote it, or a later one"
                )
        missing = sorted(self._needed - body.keys())
        if missing:
            text = f"{file} has no {missing[0]!r}: it is damaged; {remedy}"
            raise DamagedCheckpointError(text)
        body.pop("checksum", None)
        if wrong := self._broken_rule(body):
            raise DamagedCheckpointError(f"{file}: {wrong}: it is damaged; {remedy}")
        return body

    def _broken_rule(self, body: Mapping[str, Any]) -> str:
        """Returns the rule that a manifest breaks although its checksum is right, or ``""``."""
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
            return f"{outside[0]!r} is no name of a file in its folder"
        iteration = body.get("progress", {}).get("iteration", 0)
        if "step" in body and iteration and iteration != body["step"]:
            return f"its progress is that of iteration {iteration}, and its step {body['step']}"
        return ""

    def verify(self, step: int) -> list[str]:
        """Reads all of one checkpoint and returns a line for each file that is damaged.

        Needs no process group and no torch, and costs little more than reading the files.

        Returns:
            One line per damaged file, with its name and the first damaged block if it has several;
            empty if all is undamaged. Files of a former version have no checksums, so only their
            sizes are checked.
        """
        path = self.complete_path(step).absolute()
        try:
            body = self.read_manifest(path)
        except CheckpointError as error:
            return [str(error)]
        problems: list[str] = []
        if body.get("step", step) != step:
            problems.append(f"{path / self.manifest_name} belongs to step {body['step']}")
        find_damage(path, body["files"], body.get("blocks", {}), problems.append)
        return problems

    def _read(self, path: Path, step: int, remedy: str, *, trust: bool) -> dict[str, Any]:
        """Returns a subfolder's manifest after checking all files that are not checked when read.

        Raises:
            CheckpointError: If another program or format wrote it, or it contains pickles and is
                not trusted; ends with ``remedy``.
            DamagedCheckpointError: If the manifest is damaged, a file is missing or has another
                size, or a file other than a shard has other contents than were written.
        """
        body = self.read_manifest(path, remedy)
        step_there = body.get("step", step)
        if step_there != step:
            file = path / self.manifest_name
            raise DamagedCheckpointError(f"{file} belongs to step {step_there}: {remedy}")
        files = body["files"]
        problems = list[str]()
        blocks = body.get("blocks", {})
        small = {name: sums for name, sums in blocks.items() if not is_shard(name)}
        find_damage(path, files, small, problems.append)
        if problems:
            raise DamagedCheckpointError(f"{problems[0]}: {remedy}")
        if INDEX not in files and not trust:
            raise CheckpointError(
                f"{path} was written by a former version and holds pickles, which can run code as"
                f" they are loaded: give {self._trust} if you know who wrote it"
            )
        return body

    def _lacks_manifest(self, path: Path, remedy: str) -> CheckpointError:
        """Returns the error for a subfolder without manifest."""
        return DamagedCheckpointError(
            f"{path} is incomplete (it has no {self.manifest_name}): {remedy}"
        )

    @property
    def _mark(self) -> str:
        """Part of hidden names that marks them as those of this holder of the lease."""
        return "" if self.lease is None else f".{self.lease.number}"

    def _require_lease(self) -> None:
        if self.lease is not None:
            self.lease.require()

    def _discard(self, path: Path) -> None:
        """Removes a path that another process may still write to.

        A folder is renamed at once, so that the process cannot publish it; its files are removed if
        the file system permits.
        """
        if path.is_file():
            path.unlink(missing_ok=True)
            return
        doomed = self.path / f".{self._prefix}{secrets.token_hex(4)}.partial"
        with contextlib.suppress(FileNotFoundError):
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def _order(self, step: int) -> Mapping[str, Any]:
        """Returns the manifest entries that record which checkpoint a step follows."""
        return {}

    def _track(self, step: int) -> None:
        """Records that a step is the latest; called before its previous subfolder is removed."""

    def _name(self, step: int) -> str:
        return f"{self._prefix}{step:0{self._digits}d}"


Manifest = Mapping[str, Any]
"""Describes a checkpoint of the trainer; saved as JSON next to megatron-core's files:

    progress: Counters of the run.
    config: Settings of the run, from ``TrainerConfig.to_dict``.
    shape: Sizes of the mesh's axes and the number of chunks.
    padded_vocab_size: Number of rows of the embedding.
    has_optimizer: Whether it includes optimizer state.
    has_rng: Whether it includes random states.
    files: Size of each other file in bytes.
    blocks: Checksums of each other file, see ``checkpoint.checksums``; a checkpoint of a former
        version has none.
    follows: Checksum of the previous checkpoint's manifest, empty for the first.
    save_id: Identifier of this save, by which its parts on other disks are recognized; empty if
        there are none.
"""


class CheckpointFolder(StepFolders):
    """A folder of the trainer's checkpoints.

    Args:
        path: Path of the folder, which need not exist.
    """

    manifest_name = "manifest.json"
    _schema = "checkpoint_manifest"
    _form = MappingProxyType({"format": _FORMAT, "version": FORMAT_VERSION})
    _needed = frozenset(
        {"progress", "config", "shape", "padded_vocab_size", "has_optimizer", "has_rng", "files"}
    )

    def latest(self) -> int | None:
        """Returns the iteration to resume from, ``None`` if the folder has no checkpoint.

        It is the last complete checkpoint that was written. A run may die after it renames a
        checkpoint and before it updates the tracker, so complete checkpoints that follow the
        tracker's count too. Later iterations that do not follow it are ignored: they were written
        before a run went back with ``--ckpt-step``.

        Raises:
            CheckpointError: If the tracker does not contain an iteration, or the folder is a file.
        """
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"--load {self.path} is a file: name the folder of checkpoints")
        tracked = self._tracked()
        return super().latest() if tracked is None else self._last_after(tracked)

    def _tracked(self) -> int | None:
        """Returns the iteration that the tracker names, ``None`` if there is no tracker."""
        tracker = self.path / _TRACKER
        if not os.path.lexists(tracker):
            return None
        try:
            text = read_whole(tracker, _TRACKER_BYTES).decode(errors="replace").strip()
        except OSError as error:
            raise DamagedCheckpointError(
                f"{tracker} cannot be read ({error.strerror}): write the number of one of the "
                "checkpoints next to it into it, or choose one with --ckpt-step"
            ) from None
        if not (text.isascii() and text.isdecimal() and len(text) <= _TRACKER_DIGITS):
            raise DamagedCheckpointError(
                f"{tracker} says {text[:40]!r}, which is not an iteration: write the number of one "
                "of the checkpoints next to it, or choose one with --ckpt-step"
            )
        return int(text)

    def _last_after(self, tracked: int) -> int:
        """Follows the chain of complete checkpoints from an iteration; returns its last one.

        Each manifest holds the checksum of the manifest before it. Manifests of former versions
        do not; a checkpoint then follows if its manifest is newer than the tracker.
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
        """Returns whether a checkpoint was written after the one whose manifest has this seal."""
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
        except CheckpointError:  # the tracker is damaged, and will be replaced
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
                    "WARNING: %s names iteration %d, and the checkpoint of iteration %d was written"
                    " after it: resuming from the later one; --ckpt-step %d goes back",
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
        """Returns the path and manifest of a checkpoint after checking that it is complete.

        Shards are checked when they are read, all other files here.

        Args:
            iteration: Iteration of the checkpoint.
            trust: Whether a checkpoint of a former version or of Megatron-LM is accepted too; these
                contain pickles. The manifest of one of Megatron-LM lists only the files that exist.

        Raises:
            CheckpointError: If it has a newer format, is another program's, or is not trusted.
            DamagedCheckpointError: If it is missing, incomplete or damaged.
        """
        path = self.complete_path(iteration)
        others = self._others(iteration)
        if not path.exists() and self.replaced_path(iteration).exists():
            path = self.replaced_path(iteration)
        if not path.is_dir():
            raise DamagedCheckpointError(
                f"{path} does not exist, and the checkpoint of iteration {iteration} should be "
                f"there: {others}"
            )
        if trust and self._is_megatrons(path):
            files = {file.name: file.stat().st_size for file in sorted(path.iterdir())}
            return path, {"files": files, "blocks": {}, "config": {}}
        body = self._read(path, iteration, others, trust=trust)
        if _CORE_METADATA not in body["files"]:
            raise DamagedCheckpointError(
                f"{path} is incomplete (its list of files has no {_CORE_METADATA}): {others}"
            )
        return path, {"blocks": {}, "save_id": "", **body}

    def _lacks_manifest(self, path: Path, remedy: str) -> CheckpointError:
        if any(path.glob("mp_rank_*")):
            return CheckpointError(
                f"{path} is in Megatron-LM's old torch format and only torch_dist is read: "
                f"convert it with Megatron-LM, or start without --load: {remedy}"
            )
        if self._is_megatrons(path):
            return CheckpointError(
                f"{path} was written by Megatron-LM (it has no {self.manifest_name}) and holds"
                f" pickles, which can run code as they are loaded: give {self._trust} if you know"
                " who wrote it"
            )
        return super()._lacks_manifest(path, remedy)

    def _is_megatrons(self, path: Path) -> bool:
        """Returns whether a folder is a checkpoint of Megatron-LM in the torch_dist format."""
        has = {name: (path / name).exists() for name in (self.manifest_name, INDEX, _CORE_METADATA)}
        return has == {self.manifest_name: False, INDEX: False, _CORE_METADATA: True}

    def _others(self, iteration: int) -> str:
        """Returns the remedy for a checkpoint of ``iteration`` that cannot be used."""
        others = sorted({*self.steps()} - {iteration})
        if not others:
            return "restore it from a copy, or start without --load"
        return f"restore it from a copy, or resume from another with --ckpt-step {others[-1]}"

    def _track(self, step: int) -> None:
        temporary = self.path / f".{self._prefix}latest{self._mark}.partial"
        write_files(self.path, {temporary.name: f"{step}".encode()})
        temporary.replace(self.path / _TRACKER)
        sync(self.path)


class PipelineFolder(StepFolders):
    """A folder of a ``Pipeline``'s checkpoints.

    Args:
        path: Path of the folder, which need not exist.
    """

    manifest_name = "pipeline.json"
    _prefix = "step_"
    _digits = 8
    _schema = "pipeline_manifest"
    _form = MappingProxyType({"format": PIPELINE_FORMAT})
    _trust = "trust_checkpoint=True"

    def open(self, step: int | None, *, trust: bool = False) -> tuple[Path, dict[str, Any]]:
        """Returns path and manifest of a checkpoint, the newest if ``step`` is ``None``.

        Args:
            step: Step of the checkpoint.
            trust: Whether a checkpoint of a former version is accepted too; these contain pickles.

        Raises:
            CheckpointError: If it does not exist, has a newer format, or is not trusted.
            DamagedCheckpointError: If it is incomplete or damaged.
        """
        steps = self.steps()
        if step is None and not steps:
            raise CheckpointError(
                f"{self.path}: no complete checkpoint of a Pipeline is there; give the folder that "
                "Pipeline.save was given"
            )
        step = max(steps) if step is None else step
        path = self.complete_path(step)
        if step not in steps and not path.is_dir():
            raise CheckpointError(
                f"{self.path}: no checkpoint of step {step}: there are steps "
                f"{', '.join(map(str, sorted(steps)))}"
            )
        return path, self._read(path, step, "load another checkpoint", trust=trust)


def is_shard(name: str) -> bool:
    """Returns whether a file contains tensors; such files are checked when they are read."""
    return name.endswith(_SHARD)


def find(path: Path, step: int | None = None) -> tuple[StepFolders, list[int]]:
    """Returns the folder of checkpoints for a path, and the steps that the path means, ascending.

    Args:
        path: Path of a folder of checkpoints or of one checkpoint, of the trainer or a
            ``Pipeline``.
        step: Step to return, all if ``None``.

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
                raise CheckpointError(f"{path}: no checkpoint of step {step}: there are {existing}")
            return folders, steps if step is None else [step]
    reason = "holds no checkpoint" if path.is_dir() else "is no folder"
    raise CheckpointError(
        f"{path} {reason}: name the folder that --save or Pipeline.save was given"
    )


def make_pipeline_manifest(
    head: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns the entries of a pipeline's manifest, without its format and files.

    Args:
        head: ``step``, ``seed``, ``loss_scale`` and ``extra``, the same on all ranks; ``save_id``
            if parts of the checkpoint may be on other disks.
        parts: One mapping per rank of a set of ranks that together have all parameters. ``kind``
            names the optimizer, ``None`` without one; ``groups`` lists options and names of
            parameters; ``plain`` has the optimizer's values that are not tensors, by name.
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
    """Writes files by their names; they survive a power failure.

    Raises:
        OSError: If a file cannot be written.
    """
    for name, content in files.items():
        (folder / name).write_bytes(content)
        sync(folder / name)


def sync(path: Path) -> None:
    """Makes a file's content, or a folder's entries, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
