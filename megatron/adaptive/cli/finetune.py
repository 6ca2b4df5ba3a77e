"""``train finetune``: fine-tunes a folder of Hugging Face ``transformers`` on JSON lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.adaptive.cli import launch
from megatron.adaptive.cli.common import run_cli
from megatron.adaptive.config.command_parser import PROGRAM, CommandParser, count, number
from megatron.adaptive.config.environment import Environment, JobOrder
from megatron.adaptive.errors import AdaptiveError, ConfigError

_REPORT_S = 10.0
"""Time in seconds in which the first process of a node should report an error."""

_DESCRIPTION = """\
Fine-tunes a Hugging Face transformers model in several processes: all weights, or LoRA adapters.
Each line of the data is a JSON object with "text", or with "messages" for the chat template.
Messages may contain images. docs/finetune.md has examples. The command starts its processes itself,
unless torchrun, job launch or train elastic has started them."""


def _parser() -> CommandParser:
    parser = CommandParser(prog=f"{PROGRAM} train finetune", description=_DESCRIPTION)
    add = parser.add_argument
    folder: dict[str, Any] = {"type": Path, "metavar": "DIR"}
    amount: dict[str, Any] = {"type": count, "metavar": "N"}
    add("--model", required=True, **folder, help="folder of the model")
    add("--data", required=True, type=Path, metavar="FILE", help="file of JSON lines")
    add("--output", required=True, **folder, help="new folder for the tuned model")
    add("--image-folder", **folder, help="folder of all images; default: the data's folder")
    whole = number(int, 0, 1_000_000)
    add("--lora-rank", type=whole, default=0, metavar="N", help="0 trains the whole model (0)")
    add("--epochs", **amount, default=1, help="passes over all samples (1)")
    add("--batch-size", **amount, default=8, help="samples per step, over all replicas (8)")
    rate = number(float, 0.0, 1.0)
    add("--lr", type=rate, default=2e-4, help="learning rate of AdamW at the start (2e-4)")
    add("--max-length", **amount, default=2048, help="maximum tokens per sample (2048)")
    add("--length-multiple", **amount, default=64, help="lengths are padded to multiples of N (64)")
    share = number(float, 0.0, 0.9)
    add("--eval-share", type=share, default=0.05, help="share of samples for evaluation (0.05)")
    add("--pipeline-size", **amount, help="processes per pipeline; default: all")
    add("--schedule", default="adaptive", metavar="NAME", help="see docs/schedules.md (adaptive)")
    types = ("float32", "bfloat16", "float16")
    add("--dtype", choices=types, help="type of the parameters; default: the folder's")
    add("--mixed-precision", choices=("bf16", "fp16"), help="autocast; parameters keep their type")
    add("--recompute", choices=("all", "selective"), help="recompute activations, to save memory")
    ways = ("auto", "record", "export")
    add("--slicing", choices=ways, default="auto", help="see docs/reference/cutpoint.md (auto)")
    moves = ("off", "auto")
    text = "auto moves layers between processes if that makes steps faster (off)"
    add("--repartition", choices=moves, default="off", help=text)
    add("--seed", type=number(int, 0, 2**31 - 1), default=1, metavar="N", help="seed (1)")
    add("--checkpoints", **folder, help="folder of checkpoints; a second start continues from it")
    add("--save-interval", **amount, help="steps between checkpoints; default: only at the end")
    add("--wandb", metavar="PROJECT", help="project of Weights & Biases for the losses")
    add("--trust-remote-code", action="store_true", help="run Python code in the model's folder")
    add("--nproc-per-node", **amount, default=1, help="processes to start on this machine (1)")
    return parser


def main(argv: Sequence[str]) -> int:
    """Fine-tunes a model, as one process of a job; starts the processes if no launcher did."""
    options = vars(_parser().parse_args(list(argv)))
    processes = options.pop("nproc_per_node")
    environment = Environment.read()
    if environment.job is not None:
        # The launcher of an elastic job names the folder.
        options["checkpoints"] = Path(JobOrder.from_text(environment.job).checkpoints)
    if options["save_interval"] is not None and options["checkpoints"] is None:
        raise ConfigError("train finetune: --save-interval needs a folder; add --checkpoints DIR")
    if processes > 1 and not environment.is_launched:
        program = ["-m", "megatron.adaptive", "train", "finetune", *argv]
        return launch.main(["--standalone", "--nproc-per-node", str(processes), *program])
    return _train(options, environment.local_rank)


def _train(options: dict[str, Any], local_rank: int) -> int:
    """Fine-tunes a model as one process of a job.

    All processes of a node detect the same errors in settings and files, so the node's first
    process reports them, and the launcher then ends the others. A process that still runs after a
    while reports its error too, because the first process may not have the same error.
    """
    # Imported only when needed, because torch and transformers take seconds.
    from megatron.adaptive.modules.finetune import FineTuning, fine_tune

    settings = FineTuning(**options)
    try:
        processor, samples = settings.read()
    except AdaptiveError:
        if local_rank:
            # If this process ended now, the launcher might end the first one before its report.
            time.sleep(_REPORT_S)
        raise
    fine_tune(settings, processor, samples)
    return 0


if __name__ == "__main__":
    # Processes of an elastic job run this file as their script.
    sys.exit(run_cli(main))
