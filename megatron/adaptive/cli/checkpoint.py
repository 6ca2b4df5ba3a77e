"""Implements ``checkpoint``, which lists, describes and verifies checkpoints.

``checkpoint`` does not import torch. This module also implements ``hf import`` and ``hf export``,
which convert Hugging Face folders to checkpoints and back. These two commands import torch.
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.adaptive.checkpoint.folder import INDEX, STEP_PREFIXES, StepFolders, find
from megatron.adaptive.cli.common import show
from megatron.adaptive.config.arguments import flag_words, parse
from megatron.adaptive.config.command_parser import PROGRAM, CommandParser, number
from megatron.adaptive.config.hugging_face import FLAGS_FILE, LOAD_FLAG, load_config
from megatron.adaptive.config.input_files import parse_json, read_whole
from megatron.adaptive.errors import CheckpointError, DamagedCheckpointError

_EXIT_DAMAGED = 1
_MIB = 1 << 20
_RUN = "--micro-batch-size 1 --train-iters 1 --lr 1e-4 --mock-data".split()
_GB = 10**9
_FAMILY_HELP = "class for your own model family, as package.module:Class; see docs/huggingface.md"
_FOLDER = "checkpoints"
# Keys of the manifest whose values are too long to print.
_LONG = ("config", "files", "blocks", "options", "states")


def main(argv: Sequence[str]) -> int:
    """Runs the subcommand ``checkpoint`` in the mode ``verify``, ``list`` or ``show``.

    Returns:
        Exit status: 1 if a checkpoint is damaged, otherwise 0.
    """
    options = _parser().parse_args(argv)
    folders, steps = find(options.folder or _newest_folder(), options.step)
    if options.what == "show":
        about = _about(folders, steps[-1])
        show(json.dumps(about, indent=1) if options.json else "\n".join(_lines(about)))
        return 0
    is_read = options.what == "verify"
    rows = [_row(folders, step, is_read=is_read) for step in steps]
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        show("\n".join(_table(rows, is_read=is_read)))
    return _EXIT_DAMAGED if any(row["problems"] for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=f"{PROGRAM} checkpoint",
        description="List checkpoints, describe a checkpoint, or check checkpoints for damage.",
    )
    text = (
        "verify: read all files; list (default): read only the manifests; show: describe the "
        "newest step, or the step passed as --step"
    )
    modes = ("verify", "list", "show")
    parser.add_argument("what", nargs="?", choices=modes, default="list", help=text)
    text = "folder of checkpoints, or a single checkpoint; default: the newest run's checkpoints"
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR", help=text)
    parser.add_argument("--step", type=number(int, 0, 1 << 62), metavar="N", help="show this step")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _newest_folder() -> Path:
    """Returns the ``checkpoints`` folder of the newest run that has saved a checkpoint."""
    from megatron.adaptive.trace.locate import newest_run, searched

    newest = newest_run([f"{_FOLDER}/{prefix}*" for prefix in STEP_PREFIXES])
    if newest is None:
        raise CheckpointError(
            f"found no run with a folder named {_FOLDER} in {searched()}; pass the folder to which "
            "the run saves (--save of the trainer, or the argument of Pipeline.save)"
        )
    return newest / _FOLDER


def _row(folders: StepFolders, step: int, *, is_read: bool) -> dict[str, Any]:
    path = folders.complete_path(step)
    body: dict[str, Any] = {}
    problems = folders.verify(step) if is_read else []
    try:
        body = folders.read_manifest(path)
    except CheckpointError as error:
        problems = problems or [str(error)]
    files = body.get("files", {})
    return {
        "step": step,
        "path": str(path),
        "files": len(files),
        "bytes": sum(files.values()),
        "saved_s": path.stat().st_mtime,
        "has_checksums": "blocks" in body,
        "has_pickles_alone": bool(body) and INDEX not in files,
        "problems": problems,
    }


def _table(rows: Sequence[dict[str, Any]], *, is_read: bool) -> list[str]:
    lines = [f"{'step':>10}  {'MiB':>10}  files  saved             "]
    for row in rows:
        saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["saved_s"]))
        state = "verified" if is_read else "complete"
        if not row["has_checksums"]:
            state = "no checksums (written by an older version); only file sizes were checked"
        if row["problems"]:
            state = "DAMAGED"
        size = f"{row['bytes'] / _MIB:.1f}"
        lines.append(f"{row['step']:10}  {size:>10}  {row['files']:5}  {saved}  {state}")
        lines += [f"{'':12}{problem}" for problem in row["problems"]]
    return lines


def _about(folders: StepFolders, step: int) -> dict[str, Any]:
    path = folders.complete_path(step)
    body = folders.read_manifest(path)
    about = {name: value for name, value in body.items() if name not in _LONG}
    tensors: dict[str, Any] = {}
    if INDEX in body["files"]:
        try:
            tensors = {
                name: {"type": entry["type"], "shape": entry["whole"], "parts": len(entry["parts"])}
                for name, entry in parse_json(read_whole(path / INDEX))["tensors"].items()
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            why = (
                f"cannot read {path / INDEX} ({error}); to check all files, run checkpoint verify "
                f"{path}"
            )
            raise DamagedCheckpointError(why) from None
    return {"path": str(path), **about, "files": body["files"], "tensors": tensors}


def _lines(about: dict[str, Any]) -> list[str]:
    lines = []
    for name, entry in about.items():
        if not isinstance(entry, dict):
            lines.append(f"{name}: {entry}")
            continue
        lines.append(f"{name}:")
        for key, value in entry.items():
            if name == "tensors":
                value = f"{value['type']} {value['shape']} in {value['parts']}"
            lines.append(f"  {key}: {value}")
    return lines


def import_hf(argv: Sequence[str]) -> None:
    """Converts a Hugging Face folder to a checkpoint of iteration 0.

    Also writes a file next to the checkpoint with the trainer flags that describe the model.
    """
    parser = CommandParser(
        prog=f"{PROGRAM} hf import",
        description="Convert a Hugging Face folder to a checkpoint, in bounded memory.",
    )
    parser.add_argument("folder", metavar="DIR", help="folder with config.json and *.safetensors")
    parser.add_argument(
        "--output", required=True, metavar="CKPT", help="new folder, for the trainer's --load"
    )
    parser.add_argument("--hf-family", metavar="NAME", help=_FAMILY_HELP)
    options = parser.parse_args(argv)
    folder = Path(options.folder).absolute()
    output = Path(options.output)
    model = load_config(folder, options.hf_family)
    kind = model.document.get("dtype", model.document.get("torch_dtype"))
    half = {"bfloat16": ["--bf16"], "float16": ["--fp16"]}.get(str(kind), [])
    family = [] if options.hf_family is None else ["--hf-family", options.hf_family]
    config = parse([*_RUN, *half, *family, LOAD_FLAG, str(folder)], world_size=1)
    _load_libraries()
    from megatron.adaptive.checkpoint.hugging_face_weights import import_folder

    path = import_folder(folder, output, config)
    (output / FLAGS_FILE).write_text(
        shlex.join(flag_words(model.settings)) + "\n", encoding="utf-8"
    )
    show(
        f"wrote {path}; to train from it, pass --load {output} --finetune and the flags in "
        f"{output / FLAGS_FILE}"
    )


def export_hf(argv: Sequence[str]) -> None:
    """Converts a checkpoint to a Hugging Face folder that the transformers library can load."""
    parser = CommandParser(
        prog=f"{PROGRAM} hf export",
        description=(
            "Convert a checkpoint to a Hugging Face folder, for the transformers library or vLLM."
        ),
    )
    parser.add_argument("checkpoints", metavar="CKPT", help="folder that the run used as --save")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to create")
    text = "iteration to convert; default: the latest"
    parser.add_argument("--step", type=number(int, 0, 1 << 62), metavar="N", help=text)
    text = (
        "folder with config.json and tokenizer; default: the folder from which hf import or "
        "--load-hf read the model"
    )
    parser.add_argument("--config", metavar="DIR", help=text)
    parser.add_argument("--hf-family", metavar="NAME", help=_FAMILY_HELP)
    text = "maximum size of a file in GB (50)"
    parser.add_argument("--shard-gb", type=number(float, 1e-6, 1e6), default=50.0, help=text)
    add = parser.add_mutually_exclusive_group().add_argument
    text = "write only the adapters, in PEFT's format"
    add("--lora", action="store_const", dest="kind", const="adapters", default="model", help=text)
    text = "write the model with its adapters merged into its weights"
    add("--merge-lora", action="store_const", dest="kind", const="merged", help=text)
    options = parser.parse_args(argv)
    _load_libraries()
    from megatron.adaptive.checkpoint.export import export_folder

    export_folder(
        Path(options.checkpoints),
        options.step,
        None if options.config is None else Path(options.config),
        Path(options.output),
        kind=options.kind,
        shard_bytes=round(options.shard_gb * _GB),
        hf_family=options.hf_family,
    )
    show(f"wrote {options.output}")


def _load_libraries() -> None:
    """Prepares torch and megatron-core for use on this machine, even if the machine has no GPUs."""
    from megatron.adaptive import accelerator

    accelerator.install()
    accelerator.quiet_libraries()
