"""How checkpoints lie on disk, and how they appear there whole or not at all.

::

    <folder>/
      latest_checkpointed_iteration.txt     the iteration to go on from
      iter_0000100/                         a complete checkpoint
        manifest.json                       ours: format, settings, progress, size of each file
        metadata.json common.pt .metadata __<rank>_0.distcp      megatron-core's torch_dist
      .iter_0000200.partial/                being written, or left behind by a crash
      .iter_0000100.replaced/               the former iter_0000100 while a new one takes its place

A checkpoint is written under its hidden name, made durable, renamed, and only then named by the
tracker; whatever happens in between, the tracker names a complete checkpoint. The names of the
folders and of the tracker are Megatron-LM's.

Nothing here knows of other ranks or of tensors; one process works on a folder at a time.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.adaptive.checkpoint.step_folders import StepFolders, sync, write_durably
from megatron.adaptive.errors import CheckpointError

__all__ = ["FORMAT_VERSION", "CheckpointFolder", "Manifest"]

FORMAT_VERSION = 1
_FORMAT = "megatron-adaptive-checkpoint"
_MANIFEST = "manifest.json"
_CORE_METADATA = "metadata.json"
_TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds, in JSON beside megatron-core's files.

    Attributes:
        progress: the counters of the run.
        config: the run's settings, as of ``TrainerConfig.to_dict``.
        shape: sizes of the mesh's axes and the number of chunks.
        padded_vocab_size: rows of the embedding.
        has_optimizer: whether optimizer state is in it.
        has_rng: whether random states are in it.
        files: size of each other file in bytes.
        save_id: of this saving, by which parts of it elsewhere are known; empty where there are
            none.
    """

    progress: Mapping[str, int]
    config: Mapping[str, Any]
    shape: Mapping[str, int]
    padded_vocab_size: int
    has_optimizer: bool
    has_rng: bool
    files: Mapping[str, int] = dataclasses.field(default_factory=dict)
    save_id: str = ""


_NEEDED = tuple(one.name for one in dataclasses.fields(Manifest) if one.name != "save_id")


class CheckpointFolder(StepFolders):
    """A folder of checkpoints.

    Args:
        path: the folder; it need not exist.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, prefix="iter_", digits=7, manifest=_MANIFEST)

    def commit(
        self, iteration: int, manifest: Manifest, check: Callable[[], None] | None = None
    ) -> Path:
        """Turn the partial checkpoint of ``iteration`` into a complete one, the latest.

        Args:
            iteration: the iteration given to :meth:`begin`.
            manifest: what it holds; ``files`` is filled in.
            check: called when all is written, before anything takes its place; raises what it will.

        Returns:
            The folder of the complete checkpoint.

        Raises:
            OSError: writing failed; the partial checkpoint is still there.
        """
        partial = self.partial_path(iteration)
        files = {entry.name: entry.stat().st_size for entry in sorted(partial.iterdir())}
        body = {"format": _FORMAT, "version": FORMAT_VERSION, **vars(manifest), "files": files}
        # Indented JSON is made by Python, line by line, while training waits for its turn.
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in body.items()]
        write_durably(partial / _MANIFEST, "{\n" + ",\n".join(lines) + "\n}\n")
        return self.publish(iteration, check, lambda: self._write_tracker(iteration))

    def latest(self) -> int | None:
        """Return the iteration to go on from, ``None`` where the folder holds no checkpoint.

        Without a tracker it is the last complete checkpoint: a run may have died between the first
        checkpoint and the tracker.

        Raises:
            CheckpointError: the tracker holds something else than an iteration, or the folder is
                a file.
        """
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"--load {self.path} is a file: name the folder of checkpoints")
        tracker = self.path / _TRACKER
        if not tracker.exists():
            return max(self.steps(), default=None)
        text = tracker.read_text(encoding="utf-8", errors="replace").strip()
        if not text.isdecimal():
            raise CheckpointError(
                f"{tracker} says {text[:40]!r}, which is not an iteration: write the number of one "
                "of the checkpoints beside it, or choose one with --ckpt-step"
            )
        return int(text)

    def open(self, iteration: int) -> tuple[Path, Manifest]:
        """Return the folder and manifest of a checkpoint after checking that all of it is there.

        Raises:
            CheckpointError: it is missing, incomplete, of a newer format or not of this program.
        """
        path = self.complete_path(iteration)
        if not path.exists() and self.replaced_path(iteration).exists():
            path = self.replaced_path(iteration)
        if not path.is_dir():
            raise CheckpointError(
                f"{path} does not exist, and the checkpoint of iteration {iteration} should be "
                f"there: {self._others(iteration)}"
            )
        body = self._read_manifest(path, iteration)
        names = [field.name for field in dataclasses.fields(Manifest) if field.name in body]
        missing = [name for name in _NEEDED if name not in body]
        if missing:
            raise CheckpointError(
                f"{path / _MANIFEST} has no {missing[0]!r}: it is damaged; "
                f"{self._others(iteration)}"
            )
        manifest = Manifest(**{name: body[name] for name in names})
        self._check_files(path, manifest, iteration)
        return path, manifest

    def _read_manifest(self, path: Path, iteration: int) -> dict[str, Any]:
        others = self._others(iteration)
        try:
            body = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(self._why_no_manifest(path, others)) from None
        except (ValueError, OSError) as error:
            raise CheckpointError(
                f"{path / _MANIFEST} cannot be read ({error}): {others}"
            ) from None
        if not isinstance(body, dict) or body.get("format") != _FORMAT:
            raise CheckpointError(
                f"{path / _MANIFEST} is not of a checkpoint of this program: {others}"
            )
        version = body.get("version")
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format version {version} and this program reads up to "
                f"{FORMAT_VERSION}: load it with the version that wrote it, or a later one"
            )
        return body

    @staticmethod
    def _why_no_manifest(path: Path, others: str) -> str:
        if any(path.glob("mp_rank_*")):
            return (
                f"{path} is in Megatron-LM's old torch format and only torch_dist is read: "
                "convert it with Megatron-LM, or start without --load"
            )
        if (path / _CORE_METADATA).exists():
            return f"{path} was not written by this program (it has no {_MANIFEST}): {others}"
        return f"{path} is incomplete (it has no {_MANIFEST}): {others}"

    def _check_files(self, path: Path, manifest: Manifest, iteration: int) -> None:
        if _CORE_METADATA not in manifest.files:
            raise CheckpointError(
                f"{path} is incomplete (its list of files has no {_CORE_METADATA}): "
                f"{self._others(iteration)}"
            )
        for name, size in manifest.files.items():
            file = path / name
            if not file.exists():
                raise CheckpointError(
                    f"{path} is incomplete ({name} is missing): {self._others(iteration)}"
                )
            found = file.stat().st_size
            if found != size:
                raise CheckpointError(
                    f"{path} is damaged ({name} has {found} bytes and was written with {size}): "
                    f"{self._others(iteration)}"
                )

    def _others(self, iteration: int) -> str:
        """What to do when the checkpoint of ``iteration`` cannot be used."""
        others = sorted({*self.steps()} - {iteration})
        if not others:
            return "restore it from a copy, or start without --load"
        return f"restore it from a copy, or go on from another with --ckpt-step {others[-1]}"

    def _write_tracker(self, iteration: int) -> None:
        temporary = self.path / f".{_TRACKER}.partial"
        write_durably(temporary, f"{iteration}")
        temporary.replace(self.path / _TRACKER)
        sync(self.path)
