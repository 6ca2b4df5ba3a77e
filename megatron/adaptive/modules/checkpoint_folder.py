"""Checkpoints of a pipeline on disk: whole or not there.

::

    <folder>/
      step_00000012/              a complete checkpoint
        pipeline.json             step, seed, loss scale, options of the optimizer by parameter,
                                  which saving it was, size of each other file
        state.pt                  of the user's objects, such as a learning-rate scheduler
        .metadata __0_0.distcp    tensors by name, in torch.distributed.checkpoint's form
      .step_00000013.partial/     being written, or left behind by a crash
      .step_00000012.replaced/    the former one while another takes its place

What is written gets its name when all of it is durable. One process works on a folder at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.adaptive.checkpoint.step_folders import StepFolders, write_durably
from megatron.adaptive.errors import CheckpointError

__all__ = ["FORMAT", "PipelineFolder", "make_manifest", "read_manifest"]

FORMAT = 1
_MANIFEST = "pipeline.json"


class PipelineFolder(StepFolders):
    """A folder of checkpoints.

    Args:
        path: the folder; it need not exist.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, prefix="step_", digits=8, manifest=_MANIFEST)

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint, ``None`` where there is none."""
        return max(self.steps(), default=None)

    def commit(
        self,
        step: int,
        manifest: Mapping[str, Any],
        keep: int | None,
        check: Callable[[], None] | None = None,
    ) -> Path:
        """Turn the partial checkpoint of a step into a complete one.

        Args:
            step: as given to :meth:`begin`.
            manifest: what goes beside the tensors.
            keep: how many of the newest stay; all where ``None``.
            check: called before anything takes its place; raises what it will.

        Raises:
            OSError: writing failed; the partial checkpoint is still there.
        """
        partial = self.partial_path(step)
        files = {one.name: one.stat().st_size for one in partial.iterdir()}
        told = {"format": FORMAT, **manifest, "files": files}
        write_durably(partial / _MANIFEST, json.dumps(told, indent=1))
        complete = self.publish(step, check)
        if keep is not None:
            self.keep(keep)
        return complete

    def find(self, step: int | None) -> Path:
        """Return a complete checkpoint, the newest where ``step`` is ``None``.

        Raises:
            CheckpointError: it is not there.
        """
        steps = self.steps()
        if not steps:
            raise CheckpointError(
                f"{self.path}: no complete checkpoint of a Pipeline is there; give the folder that "
                "Pipeline.save was given"
            )
        if step is not None and step not in steps:
            raise CheckpointError(
                f"{self.path}: no checkpoint of step {step}: there are steps "
                f"{', '.join(map(str, sorted(steps)))}"
            )
        return steps[max(steps) if step is None else step]


def make_manifest(head: Mapping[str, Any], told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what lies beside the tensors.

    Args:
        head: ``step``, ``seed``, ``loss_scale`` and ``extra``, the same on all ranks; ``save_id``
            where parts of it may be elsewhere.
        told: by ranks that together have all parameters: ``kind`` of the optimizer, ``None``
            without one; ``groups``, options and names of parameters; ``plain``, the optimizer's
            values by name that are no tensors.
    """
    names = ("step", "seed", "loss_scale", "extra")
    return {
        **{name: head[name] for name in names},
        "save_id": head.get("save_id", ""),
        "optimizer": next((one["kind"] for one in told if one["kind"]), None),
        "options": {name: o for one in told for o, group in one["groups"] for name in group},
        "states": {name: o for one in told for name, o in one["plain"].items()},
    }


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
