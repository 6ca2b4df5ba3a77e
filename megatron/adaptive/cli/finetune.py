"""Implements ``train finetune``, which fine-tunes a ``transformers`` model on JSON lines."""

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
"""Time in seconds that the other processes of a node wait before they report an error."""

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
    add("--image-folder", **folder, help="folder of the images; default: the folder of FILE")
    whole = number(int, 0, 1_000_000)
    text = "rank of the LoRA adapters, or 0 to train the whole model (0)"
    add("--lora-rank", type=whole, default=0, metavar="N", help=text)
    add("--epochs", **amount, default=1, help="number of passes over all samples (1)")
    add("--batch-size", **amount, default=8, help="samples per step, summed over all replicas (8)")
    rate = number(float, 0.0, 1.0)
    add("--lr", type=rate, default=2e-4, help="initial learning rate of AdamW (2e-4)")
    add("--max-length", **amount, default=2048, help="maximum tokens per sample (2048)")
    add("--length-multiple", **amount, default=64, help="pad lengths to multiples of N (64)")
    share = number(float, 0.0, 0.9)
    text = "fraction of the samples to use for evaluation (0.05)"
    add("--eval-share", type=share, default=0.05, help=text)
    add("--pipeline-size", **amount, help="processes per pipeline; default: all")
    text = "pipeline schedule; see docs/schedules.md (adaptive)"
    add("--schedule", default="adaptive", metavar="NAME", help=text)
    types = ("float32", "bfloat16", "float16")
    text = "dtype of the parameters; default: as saved, but float32 to train a whole float16 model"
    add("--dtype", choices=types, help=text)
    text = "use autocast; parameters keep their dtype"
    add("--mixed-precision", choices=("bf16", "fp16"), help=text)
    add("--recompute", choices=("all", "selective"), help="recompute activations to save memory")
    ways = ("auto", "record", "export")
    text = "how to record the model; see docs/reference/cutpoint.md (auto)"
    add("--slicing", choices=ways, default="auto", help=text)
    moves = ("off", "auto")
    text = "auto: move layers between processes if this makes steps faster (off)"
    add("--repartition", choices=moves, default="off", help=text)
    orders = ("given", "work", "time")
    text = "order of samples in a step; work and time run cheap samples first and last (given)"
    add("--order", choices=orders, default="given", help=text)
    add("--trace-dir", **folder, help="folder for traces, for `trace` and `job top`")
    details = ("actions", "layers", "collectives", "kernels")
    text = "events in a trace; see docs/reference/traces.md (actions)"
    add("--trace-detail", choices=details, default="actions", help=text)
    add("--trace-interval", **amount, default=1, help="trace every N-th step (1)")
    add("--seed", type=number(int, 0, 2**31 - 1), default=1, metavar="N", help="seed (1)")
    text = "folder of checkpoints; if it has checkpoints, training continues from the newest"
    add("--checkpoints", **folder, help=text)
    add("--save-interval", **amount, help="steps between checkpoints; default: only at the end")
    add("--wandb", metavar="PROJECT", help="Weights & Biases project for the losses")
    text = "allow running Python code from the model's folder"
    add("--trust-remote-code", action="store_true", help=text)
    text = "number of processes to start on this machine (1)"
    add("--nproc-per-node", **amount, default=1, help=text)
    return parser


def main(argv: Sequence[str]) -> int:
    """Fine-tunes a model as one process of a job, or starts all processes of the job."""
    options = vars(_parser().parse_args(list(argv)))
    processes = options.pop("nproc_per_node")
    environment = Environment.read()
    if environment.job is not None:
        # The launcher of an elastic job chooses the folder of checkpoints.
        options["checkpoints"] = Path(JobOrder.from_text(environment.job).checkpoints)
    if options["save_interval"] is not None and options["checkpoints"] is None:
        raise ConfigError(
            "train finetune: --save-interval requires a checkpoint folder; add --checkpoints DIR"
        )
    if options["trace_dir"] is None:
        for name, default in (("trace_detail", "actions"), ("trace_interval", 1)):
            if options[name] != default:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(
                    f"train finetune: {flag} {options[name]} requires a folder for traces; add "
                    "--trace-dir DIR"
                )
    if processes > 1 and not environment.is_launched:
        program = ["-m", "megatron.adaptive", "train", "finetune", *argv]
        return launch.main(["--standalone", "--nproc-per-node", str(processes), *program])
    return _train(options, environment.local_rank)


def _train(options: dict[str, Any], local_rank: int) -> int:
    """Fine-tunes a model as one process of a job, and returns the exit status.

    All processes of a node detect the same errors in settings, files and gradients. Only the first
    process of the node reports them immediately, and the launcher then stops the other processes. A
    process that is still running after a few seconds also reports its error, because the first
    process may not have detected the error.
    """
    # Import this module only here, because it imports torch and transformers, which takes seconds.
    from megatron.adaptive.modules.finetune import DivergedError, FineTuning, fine_tune

    settings = FineTuning(**options)
    is_read = False
    try:
        processor, samples = settings.read()
        is_read = True
        fine_tune(settings, processor, samples)
    except AdaptiveError as error:
        if local_rank and (not is_read or isinstance(error, DivergedError)):
            # Wait, because the launcher stops all processes when one exits, and the first process
            # may not have reported the error yet.
            time.sleep(_REPORT_S)
        raise
    return 0


if __name__ == "__main__":
    # The processes of an elastic job run this file as a script.
    sys.exit(run_cli(main))
