"""Runs the subcommands of ``python -m megatron.adaptive``, such as ``plan`` and ``train``."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

from megatron.adaptive.cli.common import (
    EXIT_EXPECTED_ERROR,
    interrupts_end_at_once,
    open_streams,
    run_cli,
)
from megatron.adaptive.config.input_files import say

_SUBCOMMANDS = {
    "checkpoint": ("checkpoint", "list checkpoints, and check them for damage"),
    "doctor": ("doctor", "check whether this node, and its link to another, is ready for a run"),
    "evaluate": ("pretrain_gpt.evaluate", "perplexity of a model over a text, and a sample of it"),
    "export-hf": ("checkpoint.export_hf", "write a checkpoint as a Hugging Face folder"),
    "flags": ("pretrain_gpt.flags", "print every flag of the trainer as Markdown"),
    "import-hf": ("checkpoint.import_hf", "make a checkpoint of a Hugging Face folder"),
    "launch": ("launch", "torchrun with checks before the start and short messages at the end"),
    "make-corpus": (
        "preprocess_data.make_corpus_main",
        "make training data from Python's own sources",
    ),
    "node": ("node", "one node of a run; run_master.sh, run_worker.sh and Slurm call it"),
    "plan": ("plan", "find the best ways to train a model on a cluster"),
    "preprocess-data": ("preprocess_data", "turn JSON lines into Megatron's .bin and .idx"),
    "pretrain": ("pretrain", "Megatron-LM's own trainer (megatron-core 0.17 or later)"),
    "pretrain-gpt": ("pretrain_gpt.run", "one process of a GPT training run"),
    "profile": ("profile", "measure layers and links for the planner"),
    "process-trace": ("trace.process", "aggregate a run's traces"),
    "report": ("report", "write one page about a job after its run"),
    "run": ("run", "a job that changes its shape when machines join or leave"),
    "run-single": ("run_single", "train a small GPT on this machine"),
    "simulate": ("simulate", "compare schedules on simulated work"),
    "status": ("status", "report the state of a job; get_result.sh calls it"),
    "submit": ("submit", "submit a run to Slurm with the settings of conf.sh"),
    "top": ("top", "show what a run is doing now"),
    "trace": ("trace", "figures and views of a run's traces; trace diagnose finds what is slow"),
    "train": ("pretrain_gpt.train", "train with the settings of a recipe (examples/recipes)"),
    "transport": ("transport", "check what can connect two nodes, and how fast"),
    "validate": ("validate", "compare the planner's predictions with measured runs"),
    "visualize-trace": ("trace.visualize", "draw a run's pipeline"),
}


def _print_help(_arguments: Sequence[str]) -> None:
    print("usage: python -m megatron.adaptive SUBCOMMAND [OPTIONS]\n")
    for name, (_, summary) in _SUBCOMMANDS.items():
        print(f"  {name:16} {summary}")


def main() -> int:
    """Runs the subcommand that the first command line argument names; returns the exit status."""
    open_streams()
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        return run_cli(_print_help, [])
    if name not in _SUBCOMMANDS:
        subcommands = ", ".join(_SUBCOMMANDS)
        nearest = difflib.get_close_matches(name, list(_SUBCOMMANDS), n=1)
        hint = f"did you mean {nearest[0]}" if nearest else f"choose one of {subcommands}"
        say(f"error: unknown subcommand {name!r}: {hint}")
        return EXIT_EXPECTED_ERROR
    module, _, function = _SUBCOMMANDS[name][0].partition(".")
    try:
        with interrupts_end_at_once():
            program = importlib.import_module(f"megatron.adaptive.cli.{module}")
    except ModuleNotFoundError as error:
        if str(error.name).startswith("megatron.adaptive"):
            raise
        say(f"error: {name} needs {error.name}: pip install {error.name}")
        return EXIT_EXPECTED_ERROR
    return run_cli(getattr(program, function or "main"), sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
