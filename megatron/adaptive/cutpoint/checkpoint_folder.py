"""Checkpoints of a pipeline on disk: whole or not there.

::

    <folder>/
      step_00000012/              a complete checkpoint
        pipeline.json             step, seed, loss scale, options of the optimizer by parameter,
                                  size of each other file
        .metadata __0_0.distcp    tensors by name, in torch.distributed.checkpoint's form
      .step_00000013.partial/     being written, or left behind by a crash
      .step_00000012.replaced/    the former one while another takes its place

What is written gets its name when all of it is durable. One process works on a folder at a time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.adaptive.errors import CheckpointError

__all__ = ["FORMAT", "begin", "commit", "find", "read_manifest"]

FORMAT = 1
_MANIFEST = "pipeline.json"
_COMPLETE = re.compile(r"step_(\d{8,})")


def _name(step: int) -> str:
    return f"step_{step:08d}"


def begin(folder: Path, step: int) -> Path:
    """Clear away what crashed runs left and make an empty partial checkpoint.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for former in folder.glob(".step_*.replaced"):
        complete = folder / former.name[1 : -len(".replaced")]
        if complete.exists():
            shutil.rmtree(former)
        else:
            former.rename(complete)
    for stale in folder.glob(".step_*.partial"):
        shutil.rmtree(stale)
    partial = folder / f".{_name(step)}.partial"
    partial.mkdir()
    return partial


def commit(folder: Path, step: int, manifest: Mapping[str, Any], keep: int | None) -> Path:
    """Turn the partial checkpoint of a step into a complete one.

    Args:
        folder: as given to :func:`begin`.
        step: likewise.
        manifest: what goes beside the tensors.
        keep: how many of the newest stay; all where ``None``.

    Raises:
        OSError: writing failed; the partial checkpoint is still there.
    """
    partial, complete = folder / f".{_name(step)}.partial", folder / _name(step)
    files = {one.name: one.stat().st_size for one in partial.iterdir()}
    with (partial / _MANIFEST).open("w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, **manifest, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for one in partial.iterdir():
        _sync(one)
    _sync(partial)
    former = folder / f".{_name(step)}.replaced"
    if complete.exists():
        complete.rename(former)
    partial.rename(complete)
    _sync(folder)
    if former.exists():
        shutil.rmtree(former)
    for old in sorted(_steps(folder))[: -keep if keep else 0]:
        # Under a name that nobody loads from, before the first file goes.
        doomed = folder / f".{_name(old)}.partial"
        (folder / _name(old)).rename(doomed)
        shutil.rmtree(doomed)
    return complete


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _steps(folder: Path) -> dict[int, Path]:
    """Complete checkpoints by step."""
    found = ((_COMPLETE.fullmatch(one.name), one) for one in folder.glob("step_*"))
    return {int(match[1]): one for match, one in found if match and (one / _MANIFEST).is_file()}


def find(folder: Path, step: int | None) -> Path:
    """Return a complete checkpoint, the newest where ``step`` is ``None``.

    Raises:
        CheckpointError: it is not there.
    """
    steps = _steps(folder)
    if not steps:
        raise CheckpointError(
            f"{folder}: no complete checkpoint of a Pipeline is there; give the folder that "
            "Pipeline.save was given"
        )
    if step is not None and step not in steps:
        raise CheckpointError(
            f"{folder}: no checkpoint of step {step}: there are steps "
            f"{', '.join(map(str, sorted(steps)))}"
        )
    return steps[max(steps) if step is None else step]


def read_manifest(path: Path) -> dict[str, Any]:
    """Read what lies beside the tensors.

    Raises:
        CheckpointError: it cannot be read, is of another format, or a file beside it has
            another size than when it was written.
    """
    try:
        told = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / _MANIFEST}: cannot be read: {error}") from error
    given = told.get("format") if isinstance(told, dict) else None
    if given != FORMAT:
        raise CheckpointError(
            f"{path}: its format is {given}, this version reads {FORMAT}: load it with the "
            "version that wrote it"
        )
    for name, size in told["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            has = f"has {file.stat().st_size}" if file.is_file() else "is gone"
            raise CheckpointError(
                f"{file}: it was written with {size} bytes and {has}: load another checkpoint"
            )
    return dict(told)
