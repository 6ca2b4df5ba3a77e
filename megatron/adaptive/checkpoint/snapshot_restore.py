"""Converts in-memory snapshots to a checkpoint. A node's forkserver runs this program.

::

    write     on each node that has snapshots of the step: writes their tensors into one file
    assemble  afterwards, on one node: writes the index of all files and completes the checkpoint

The program has one argument, which is a JSON object. Its exit status is 0, or 2 after it has
printed an error. The checkpoint has the usual format, but it has one file per node instead of one
file per rank. It gets its final name only when it is complete.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.adaptive.checkpoint.folder import (
    PIPELINE_STATE,
    CheckpointFolder,
    PipelineFolder,
    make_pipeline_manifest,
    write_files,
)
from megatron.adaptive.checkpoint.snapshot_keeper import SnapshotFile
from megatron.adaptive.config.input_files import parse_json, read_whole, say
from megatron.adaptive.engine.folder_lease import Lease
from megatron.adaptive.errors import AdaptiveError, CheckpointError

_HEAD = "head.json"


def main(arguments: Sequence[str]) -> int:
    """Runs the command in ``arguments``, ``write`` or ``assemble``, and returns the exit status."""
    order = parse_json(arguments[0])
    try:
        (assemble if order["what"] == "assemble" else write)(order)
    except (AdaptiveError, OSError, ValueError) as error:
        say(f"error: cannot use the in-memory copies of iteration {order['step']}: {error}")
        return 2
    return 0


def write(order: Mapping[str, Any]) -> None:
    """Writes the snapshots on this node into one file of the checkpoint.

    Args:
        order: Settings of the command. ``checkpoints`` is the folder of checkpoints.
            ``is_pipeline`` states whether the job trains a ``Pipeline``. ``step`` is the step of
            the snapshots. ``lease`` is the number of the job's lease, which gives it the right to
            write to the folder, or 0 if there is no lease. ``index`` is the index of this node.
            ``has_common`` states whether this node also writes the files that exist once per
            checkpoint instead of once per node. ``parts`` lists the snapshot files, each with its
            path (``file``) and the indices of the sets of tensors to write from it (``needs``).

    Raises:
        CheckpointError: If a snapshot is missing or damaged.
        OSError: If the folder cannot be written.
    """
    import torch

    from megatron.adaptive.checkpoint import plain_values
    from megatron.adaptive.checkpoint.writer import common_files, overlay, write_file

    folder = _folder(order).partial_path(order["step"])
    name = _shard(order["index"])
    entries: list[dict[str, Any]] = []
    tensors: list[Any] = []
    lines: list[Any] = []
    files = [(part, _open(part)) for part in order["parts"]]
    for part, file in files:
        slot = file.steps().get(order["step"])
        if slot is None:
            raise CheckpointError(f"the copy of the state of rank {part['rank']} is lost")
        if not file.is_whole(slot):
            raise CheckpointError(f"the copy of the state of rank {part['rank']} is damaged")
        lines.append(parse_json(_extra(file, slot)[0], strict=False))
        needed = [entry for entry in file.head["entries"] if entry["need"] in part["needs"]]
        for entry in needed:
            offset = file.tensors_offset(slot) + entry["at"]
            kind = getattr(torch, entry["type"])
            tensors.append(overlay(file.memory, offset, kind, entry["size"]))
        entries += needed
    regions, total = write_file(folder / name, tensors, {})
    index = [
        {**entry, "path": name, "place": region}
        for entry, region in zip(entries, regions, strict=True)
    ]
    if order["has_common"]:
        file = next(file for _, file in files if file.head["has_common"])
        line, rest = _extra(file, file.steps()[order["step"]])
        head = {"manifest": file.head.get("manifest"), **parse_json(line, strict=False)}
        (folder / _HEAD).write_text(json.dumps(head))
        if not order["is_pipeline"]:
            write_files(folder, common_files(plain_values.loads(rest)))
        elif rest:
            write_files(folder, {PIPELINE_STATE: rest})
    part = {"entries": index, "lines": lines, "sum": total}
    (folder / f"part-{order['index']}.json").write_text(json.dumps(part))


def assemble(order: Mapping[str, Any]) -> None:
    """Completes a checkpoint after each node has written its part.

    Args:
        order: Settings of the command. ``checkpoints``, ``is_pipeline``, ``step`` and ``lease``
            have the same meaning as for :func:`write`, and ``count`` is the number of nodes.

    Raises:
        CheckpointError: If a part of a tensor is missing.
        OSError: If the folder cannot be written.
    """
    from megatron.adaptive.checkpoint.writer import indices_of

    folder = _folder(order)
    partial = folder.partial_path(order["step"])
    entries: list[dict[str, Any]] = []
    lines: list[dict[str, Any]] = []
    blocks: dict[str, str] = {}
    for number in range(order["count"]):
        path = partial / f"part-{number}.json"
        part = parse_json(read_whole(path), strict=False)
        entries += part["entries"]
        lines += part["lines"]
        blocks[_shard(number)] = part["sum"][1]
        path.unlink()
    _require_whole(entries)
    head = parse_json(read_whole(partial / _HEAD), strict=False)
    (partial / _HEAD).unlink()
    write_files(partial, indices_of(entries))
    if order["is_pipeline"]:
        manifest = make_pipeline_manifest(head, lines)
    else:
        manifest = {**head["manifest"], "progress": head["progress"]}
    folder.commit(order["step"], {**manifest, "blocks": blocks})


def _shard(number: int) -> str:
    return f"__{number}_0.distcp"


def _folder(order: Mapping[str, Any]) -> CheckpointFolder | PipelineFolder:
    kind = PipelineFolder if order["is_pipeline"] else CheckpointFolder
    folder = kind(order["checkpoints"])
    if order["lease"]:
        folder.lease = Lease(folder.path)
        folder.lease.join(order["lease"])
    return folder


def _open(part: Mapping[str, Any]) -> SnapshotFile:
    """Opens the snapshot file of ``part`` through a file descriptor of the keeper process."""
    try:
        return SnapshotFile(os.open(part["file"], os.O_RDWR))
    except OSError as error:
        text = f"the copy of rank {part['rank']} is lost ({error.strerror})"
        raise CheckpointError(text) from error


def _extra(file: SnapshotFile, slot: int) -> tuple[bytes, bytes]:
    """Returns the non-tensor state in ``slot``: its first line, which is JSON, and the rest."""
    line, _, rest = bytes(file.extra(slot)).partition(b"\n")
    return line, rest


def _require_whole(entries: Sequence[Mapping[str, Any]]) -> None:
    """Raises CheckpointError if a part of any tensor is missing in the index ``entries``."""
    have: dict[str, int] = {}
    for entry in entries:
        have[entry["name"]] = have.get(entry["name"], 0) + math.prod(entry["size"])
    for entry in entries:
        whole = math.prod(entry["whole"])
        if have[entry["name"]] != whole:
            raise CheckpointError(
                f"{entry['name']} has only {have[entry['name']]} of its {whole} elements"
            )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
