"""``import-hf`` and ``export-hf``: checkpoints from folders of Hugging Face models, and back."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron.adaptive import accelerator
from megatron.adaptive.cli.common import show
from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.command_parser import CommandParser, number
from megatron.adaptive.config.hugging_face import LOAD_FLAG, load_config

_RUN = "--micro-batch-size 1 --train-iters 1 --lr 1e-4 --mock-data".split()
_GB = 10**9


def import_hf(argv: Sequence[str]) -> None:
    """Writes a checkpoint of iteration 0, and the flags of the model beside it."""
    parser = CommandParser(
        prog="import-hf",
        description="Make a checkpoint of a Hugging Face folder, in any size of memory.",
    )
    parser.add_argument("folder", metavar="DIR", help="config.json and *.safetensors")
    parser.add_argument("--output", required=True, metavar="CKPT", help="folder for --load")
    options = parser.parse_args(argv)
    folder, output = Path(options.folder).absolute(), Path(options.output)
    document, words = load_config(folder)
    kind = document.get("dtype", document.get("torch_dtype"))
    half = {"bfloat16": ["--bf16"], "float16": ["--fp16"]}.get(str(kind), [])
    config = parse([*_RUN, *half, LOAD_FLAG, str(folder)], world_size=1)
    accelerator.install()
    accelerator.quiet_libraries()
    from megatron.adaptive.checkpoint.hugging_face import import_folder

    path = import_folder(folder, output, config)
    (output / "model_flags.txt").write_text(shlex.join(words) + "\n", encoding="utf-8")
    show(f"{path}: train with --load {output} --finetune and the flags in model_flags.txt there")


def export_hf(argv: Sequence[str]) -> None:
    """Writes a folder as ``transformers`` does."""
    parser = CommandParser(
        prog="export-hf",
        description="Write a checkpoint as a Hugging Face folder, for transformers or vLLM.",
    )
    parser.add_argument("checkpoints", metavar="CKPT", help="folder of --save")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder that is made")
    parser.add_argument("--step", type=number(int, 0, 1 << 62), metavar="N", help="iteration")
    text = "folder with config.json and tokenizer; by default that of import-hf or --load-hf"
    parser.add_argument("--config", metavar="DIR", help=text)
    text = "size of the largest file in GB (50)"
    parser.add_argument("--shard-gb", type=number(float, 1e-6, 1e6), default=50.0, help=text)
    options = parser.parse_args(argv)
    accelerator.install()
    accelerator.quiet_libraries()
    from megatron.adaptive.checkpoint.hugging_face import export_folder

    like = None if options.config is None else Path(options.config)
    size = round(options.shard_gb * _GB)
    export_folder(Path(options.checkpoints), options.step, like, Path(options.output), size)
    show(f"{options.output}: written")
