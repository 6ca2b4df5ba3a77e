"""Folders of checkpoints, one for each step, that appear whole or not at all.

::

    <folder>/                                 of the trainer: CheckpointFolder
      latest_checkpointed_iteration.txt       the iteration to go on from
      iter_0000100/                           a complete checkpoint
        manifest.json                         ours: format, settings, progress, size and checksums
                                              of each file, and a checksum of itself
        index.json common.values              ours: where each tensor's bytes are, and other state
        metadata.json common.pt .metadata __<rank>_0.distcp      megatron-core's torch_dist
      .iter_0000200.3.partial/                being written by the third holder of the lease, or
                                              left behind by it
      .lease/                                 who may write here, see ``engine.folder_lease``
      .iter_0000100.replaced/                 the former iter_0000100 while a new one replaces it

    <folder>/                                 of a Pipeline: PipelineFolder
      step_00000012/
        pipeline.json                         step, seed, loss scale, options of the optimizer by
                                              parameter, ID of the save, files as above
        index.json state.values               where each tensor's bytes are, and what the user's
                                              objects hold, such as a scheduler
        .metadata __0_0.distcp                tensors by name, as torch.distributed.checkpoint has

A checkpoint is written under its hidden name, made durable, renamed, and only then named by the
tracker, where there is one; whatever happens in between, the tracker names a complete checkpoint.
Who takes over the right to write here removes what the holders before left under hidden names, and
with it their means to publish it: see ``engine.folder_lease``.
The names of the trainer's folders and of its tracker are Megatron-LM's.
``.metadata`` and
``common.pt`` are pickles, for Megatron-LM and torch; nothing of ours reads them where there is an
index. Checkpoints of former versions have none, and are opened only where the caller trusts them.

Nothing here knows of other ranks or of tensors; one process works on a folder at a time.
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
PIPELINE_STATE = "state.values"  # of the user's objects
_UNSEALED = 1  # the last format whose manifests had no checksums
_SUMMED = frozenset({"blocks", "checksum"})  # members of manifests since then
_SHARD = ".distcp"  # ends the names of files that are checked as they are read
_FORMAT = "megatron-adaptive-checkpoint"
_CORE_METADATA = "metadata.json"
_TRACKER = "latest_checkpointed_iteration.txt"
_TRACKER_BYTES = 1 << 16
_TRACKER_DIGITS = 18


class StepFolders:
    """A path with one folder for each step; each has one manifest, with a table of its files.

    Args:
        path: need not exist.

    Attributes:
        lease: right to write here, ``None`` where nobody else can.
        manifest_name: name of the file that a complete folder has.
    """

    manifest_name: ClassVar[str]
    _prefix: ClassVar[str] = "iter_"  # of the folders' names
    _digits: ClassVar[int] = 7  # of the numbers in them, at least
    # What manifests begin with: the newest version that is read, and the format's name if any.
    _form: ClassVar[Mapping[str, Any]] = {}
    _needed = frozenset({"files"})  # of what manifests hold
    _schema: ClassVar[str] = "manifest"  # name of the form of manifests
    _trust = "--trust-checkpoint"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._complete = re.compile(rf"{self._prefix}(\d{{{self._digits},}})")
        self.lease: Lease | None = None

    def complete_path(self, step: int) -> Path:
        """Return the folder of a step that is complete."""
        return self.path / self._name(step)

    def partial_path(self, step: int) -> Path:
        """Return the folder that a step is written in before it is complete."""
        return self.path / f".{self._name(step)}{self._mark}.partial"

    def replaced_path(self, step: int) -> Path:
        """Return the former folder of a step while another takes its place."""
        return self.path / f".{self._name(step)}.replaced"

    def steps(self) -> dict[int, Path]:
        """Return the complete folders by step, ascending."""
        found = (
            (self._complete.fullmatch(one.parent.name), one.parent)
            for one in self.path.glob(f"{self._prefix}*/{self.manifest_name}")
        )
        return dict(sorted((int(match[1]), one) for match, one in found if match))

    def latest(self) -> int | None:
        """Return the step to go on from, ``None`` where there is no complete one."""
        return max(self.steps(), default=None)

    def named(self) -> list[int]:
        """Return the steps that have a folder, complete or not, ascending."""
        names = (one.name for one in self.path.glob(f"{self._prefix}*"))
        return sorted(int(match[1]) for name in names if (match := self._complete.fullmatch(name)))

    def candidates(self) -> Iterator[int]:
        """Yield the steps to go on from where the user named none, best first.

        That is the latest, or what comes in its place where a folder has lost its manifest; then
        those before it.

        Raises:
            CheckpointError: the path is no folder of checkpoints.
        """
        first, named = self.latest(), self.named()
        if not self._is_tracked():
            first = max(named, default=first)
        if first is None:
            return
        yield first
        yield from (step for step in reversed(named) if step < first)

    def _is_tracked(self) -> bool:
        """Return whether a file says which step is the latest."""
        return False

    def begin(self, step: int) -> Path:
        """Clear away what crashed runs left and make an empty partial folder.

        Raises:
            LeaseTakenError: another job took the path over.
            OSError: the path cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self.clear()
        partial = self.partial_path(step)
        partial.mkdir()
        return partial

    def clear(self) -> None:
        """Clear away what crashed runs left, and the means of those before to publish theirs.

        Raises:
            LeaseTakenError: another job took the path over.
            OSError: the path cannot be written.
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
        """Turn the partial checkpoint of a step into a complete one, the latest.

        Its files are durable but for the manifest: who wrote one has called :func:`sync`.

        Args:
            step: as given to :meth:`begin`.
            manifest: its contents in JSON; ``files``, size by name, is that of the partial folder
                unless it is given; ``blocks``, checksums by name, is added where it lacks one.
            check: called when all is written, before anything takes its place; raises what it will.

        Returns:
            The folder of the complete checkpoint.

        Raises:
            CheckpointError: a file has another size than what was written of it.
            LeaseTakenError: another job took the path over.
            OSError: writing failed; the partial checkpoint is still there.
        """
        partial, complete = self.partial_path(step), self.complete_path(step)
        sizes = {one.name: one.stat().st_size for one in sorted(partial.iterdir())}
        files, blocks = dict(manifest.get("files", sizes)), dict(manifest.get("blocks", {}))
        for name, size in sizes.items():
            if files.get(name, size) != size:
                path = partial / name
                raise CheckpointError(f"{path} has {size} bytes instead of {files[name]}")
            if name not in blocks:
                blocks[name] = sum_of_file(partial / name)[1]
        # Indented JSON is made by Python, line by line, while training waits for its turn.
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
        except FileNotFoundError:  # removed by who took the path over since
            with contextlib.suppress(OSError):
                former.rename(complete)
            self._require_lease()
            raise
        if former.exists():
            shutil.rmtree(former)
        return complete

    def keep(self, number: int, but: Collection[int] = ()) -> None:
        """Remove all but the last complete folders, as far as the file system lets us.

        Args:
            number: of those that stay.
            but: steps that stay too.
        """
        for step in list(self.steps())[:-number]:
            if step not in but:
                self.remove(step)

    def remove(self, step: int) -> None:
        """Remove a complete folder, as far as the file system lets us."""
        # Under a name that nobody loads from, before the first file goes.
        doomed = self.partial_path(step)
        with contextlib.suppress(OSError):
            self.complete_path(step).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def abandon(self, step: int) -> None:
        """Remove a partial folder, as far as the file system lets us."""
        shutil.rmtree(self.partial_path(step), ignore_errors=True)

    def read_manifest(self, path: Path, remedy: str = "restore it from a copy") -> dict[str, Any]:
        """Return a folder's manifest after checking that it is what was written.

        Raises:
            CheckpointError: it is of another program or a newer format; ends with ``remedy``.
            DamagedCheckpointError: it is not what was written.
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
        given = body if isinstance(body, dict) else {}
        versions = {name: one for name, one in self._form.items() if isinstance(one, int)}
        is_ours = isinstance(body, dict) and all(
            type(given.get(name)) is type(one) and (name in versions or given[name] == one)
            for name, one in self._form.items()
        )
        has_seal = is_ours and any(_UNSEALED < given[name] <= versions[name] for name in versions)
        if not is_sealed(raw) and (has_seal or _SUMMED & given.keys()):
            raise DamagedCheckpointError(f"{file} is damaged (its checksum is another): {remedy}")
        if not is_ours:
            raise CheckpointError(f"{file} is not of a checkpoint of this program: {remedy}")
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
        """Returns the rule that a manifest breaks although its checksum is right, or empty."""
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
        """Read all of one checkpoint and return what is not as it was written.

        Needs no process group and no torch, and takes no more than reading the files does.

        Returns:
            A line for each damaged file, with its name and, in a large one, the first damaged
            block; empty where all is whole. Of a checkpoint of a former version only sizes are
            known.
        """
        path = self.complete_path(step).absolute()
        try:
            body = self.read_manifest(path)
        except CheckpointError as error:
            return [str(error)]
        problems: list[str] = []
        if body.get("step", step) != step:
            problems.append(f"{path / self.manifest_name} is that of step {body['step']}")
        find_damage(path, body["files"], body.get("blocks", {}), problems.append)
        return problems

    def _read(self, path: Path, step: int, remedy: str, *, trust: bool) -> dict[str, Any]:
        """Read a folder's manifest after checking all that is not checked as it is read.

        Raises:
            CheckpointError: it is of another program or format, or holds pickles and is not
                trusted; ends with ``remedy``.
            DamagedCheckpointError: it is not what was written, or a file is not there, or has
                another size or, unless it holds tensors, other contents than when it was written.
        """
        body = self.read_manifest(path, remedy)
        found = body.get("step", step)
        if found != step:
            file = path / self.manifest_name
            raise DamagedCheckpointError(f"{file} is that of step {found}: {remedy}")
        files, problems = body["files"], list[str]()
        small = {name: sum for name, sum in body.get("blocks", {}).items() if not is_shard(name)}
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
        """Return the error of a folder without manifest."""
        return DamagedCheckpointError(
            f"{path} is incomplete (it has no {self.manifest_name}): {remedy}"
        )

    @property
    def _mark(self) -> str:
        """Marks what this holder of the lease has not published yet."""
        return "" if self.lease is None else f".{self.lease.number}"

    def _require_lease(self) -> None:
        if self.lease is not None:
            self.lease.require()

    def _discard(self, path: Path) -> None:
        """Remove what another process may still write to: the name at once, the rest if it can."""
        if path.is_file():
            path.unlink(missing_ok=True)
            return
        doomed = self.path / f".{self._prefix}{secrets.token_hex(4)}.partial"
        with contextlib.suppress(FileNotFoundError):
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def _order(self, step: int) -> Mapping[str, Any]:
        """Returns the manifest entries that place a step after the checkpoint before it."""
        return {}

    def _track(self, step: int) -> None:
        """Note that a step is the latest, before the former folder of that step goes."""

    def _name(self, step: int) -> str:
        return f"{self._prefix}{step:0{self._digits}d}"


Manifest = Mapping[str, Any]
"""Describes a checkpoint of the trainer, in JSON beside megatron-core's files:

    progress: the counters of the run.
    config: the run's settings, as of ``TrainerConfig.to_dict``.
    shape: sizes of the mesh's axes and the number of chunks.
    padded_vocab_size: rows of the embedding.
    has_optimizer: whether optimizer state is in it.
    has_rng: whether random states are in it.
    files: size of each other file in bytes.
    blocks: checksums of each other file, see ``checkpoint.checksums``; none for those of a former
        version.
    follows: checksum of the manifest of the checkpoint before it, empty if it was the first.
    save_id: of this save, by which its parts on other disks are recognized; empty where there are
        none.
"""


class CheckpointFolder(StepFolders):
    """A folder of the trainer's checkpoints.

    Args:
        path: the folder; it need not exist.
    """

    manifest_name, _schema = "manifest.json", "checkpoint_manifest"
    _form = MappingProxyType({"format": _FORMAT, "version": FORMAT_VERSION})
    _needed = frozenset(
        "progress config shape padded_vocab_size has_optimizer has_rng files".split()
    )

    def latest(self) -> int | None:
        """Return the iteration to go on from, ``None`` where the folder holds no checkpoint.

        It is the last complete checkpoint that was written. A run may die after it renames a
        checkpoint and before it updates the tracker, so complete checkpoints that follow the
        tracker's count too. Later iterations that do not follow it are ignored: they were written
        before a run went back with ``--ckpt-step``.

        Raises:
            CheckpointError: the tracker holds something else than an iteration, or the folder is
                a file.
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
                "checkpoints beside it into it, or choose one with --ckpt-step"
            ) from None
        if not (text.isascii() and text.isdecimal() and len(text) <= _TRACKER_DIGITS):
            raise DamagedCheckpointError(
                f"{tracker} says {text[:40]!r}, which is not an iteration: write the number of one "
                "of the checkpoints beside it, or choose one with --ckpt-step"
            )
        return int(text)

    def _last_after(self, tracked: int) -> int:
        """Follows the chain of complete checkpoints from an iteration and returns its last one.

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
        except CheckpointError:  # a damaged tracker is replaced
            latest = super().latest()
        if latest is None:
            return {"follows": ""}
        return {"follows": seal_of(self.complete_path(latest) / self.manifest_name)}

    def candidates(self) -> Iterator[int]:
        try:
            tracked, latest = self._tracked(), self.latest()
            if tracked is not None and latest is not None and latest != tracked:
                _LOG.warning(
                    "WARNING: %s names iteration %d, and the checkpoint of iteration %d was written"
                    " after it: going on from that; --ckpt-step %d goes back",
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
        """Return the folder and manifest of a checkpoint after checking that all of it is there.

        Tensors are checked as they are read, all other files here.

        Args:
            iteration: that it is of.
            trust: also one of a former version or of Megatron-LM, which has pickles; the manifest
                of the latter lists files alone, as nothing says what else it should be.

        Raises:
            CheckpointError: it is of a newer format, not of this program or not trusted.
            DamagedCheckpointError: it is missing, incomplete or damaged.
        """
        path, others = self.complete_path(iteration), self._others(iteration)
        if not path.exists() and self.replaced_path(iteration).exists():
            path = self.replaced_path(iteration)
        if not path.is_dir():
            raise DamagedCheckpointError(
                f"{path} does not exist, and the checkpoint of iteration {iteration} should be "
                f"there: {others}"
            )
        if trust and self._is_megatrons(path):
            files = {one.name: one.stat().st_size for one in sorted(path.iterdir())}
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
        """Return whether a folder holds a checkpoint of Megatron-LM, in its form of today."""
        has = {name: (path / name).exists() for name in (self.manifest_name, INDEX, _CORE_METADATA)}
        return has == {self.manifest_name: False, INDEX: False, _CORE_METADATA: True}

    def _others(self, iteration: int) -> str:
        """Return the remedy where the checkpoint of ``iteration`` cannot be used."""
        others = sorted({*self.steps()} - {iteration})
        if not others:
            return "restore it from a copy, or start without --load"
        return f"restore it from a copy, or go on from another with --ckpt-step {others[-1]}"

    def _track(self, step: int) -> None:
        temporary = self.path / f".{self._prefix}latest{self._mark}.partial"
        write_files(self.path, {temporary.name: f"{step}".encode()})
        temporary.replace(self.path / _TRACKER)
        sync(self.path)


class PipelineFolder(StepFolders):
    """A folder of a pipeline's checkpoints.

    Args:
        path: the folder; it need not exist.
    """

    manifest_name, _prefix, _digits = "pipeline.json", "step_", 8
    _schema = "pipeline_manifest"
    _form = MappingProxyType({"format": PIPELINE_FORMAT})
    _trust = "trust_checkpoint=True"

    def open(self, step: int | None, *, trust: bool = False) -> tuple[Path, dict[str, Any]]:
        """Return folder and manifest of a checkpoint, the newest where ``step`` is ``None``.

        Args:
            step: that it is of.
            trust: also one of a former version, which has pickles.

        Raises:
            CheckpointError: it is not there, of a newer format, or not trusted.
            DamagedCheckpointError: it is incomplete or damaged.
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
    """Return whether a file holds tensors, and is checked as they are read."""
    return name.endswith(_SHARD)


def find(path: Path, step: int | None = None) -> tuple[StepFolders, list[int]]:
    """Return the folders of checkpoints at a path, and the steps of those that it names, ascending.

    Args:
        path: of the folders, or of one checkpoint, of the trainer or of a ``Pipeline``.
        step: the one that is named, all where ``None``.

    Raises:
        CheckpointError: there is none.
    """
    path = path.absolute()
    for folders in (CheckpointFolder(path.parent), PipelineFolder(path.parent)):
        if path.is_dir() and (match := folders._complete.fullmatch(path.name)) is not None:
            return folders, [int(match[1])]
    for folders in (CheckpointFolder(path), PipelineFolder(path)):
        if steps := folders.named():
            if step is not None and step not in steps:
                there = ", ".join(map(str, steps))
                raise CheckpointError(f"{path}: no checkpoint of step {step}: there are {there}")
            return folders, steps if step is None else [step]
    why = "holds no checkpoint" if path.is_dir() else "is no folder"
    raise CheckpointError(f"{path} {why}: name the folder that --save or Pipeline.save was given")


def make_pipeline_manifest(
    head: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return what a pipeline's manifest holds besides its format and files.

    Args:
        head: ``step``, ``seed``, ``loss_scale`` and ``extra``, the same on all ranks; ``save_id``
            where parts of it may be on other disks.
        parts: of ranks that together have all parameters: ``kind`` of the optimizer, ``None``
            without one; ``groups``, options and names of parameters; ``plain``, the optimizer's
            values by name that are no tensors.
    """
    names = ("step", "seed", "loss_scale", "extra")
    return {
        **{name: head[name] for name in names},
        "save_id": head.get("save_id", ""),
        "optimizer": next((one["kind"] for one in parts if one["kind"]), None),
        "options": {name: o for one in parts for o, group in one["groups"] for name in group},
        "states": {name: o for one in parts for name, o in one["plain"].items()},
    }


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files by their names that survive a power failure.

    Raises:
        OSError: one cannot be written.
    """
    for name, content in files.items():
        (folder / name).write_bytes(content)
        sync(folder / name)


def sync(path: Path) -> None:
    """Make a file's content, or a folder's entries, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
