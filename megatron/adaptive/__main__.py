"""Runs the subcommands of ``python -m megatron.adaptive``, such as ``train single``."""

from __future__ import annotations

import signal

_ON_INTERRUPT = signal.getsignal(signal.SIGINT)
if __name__ == "__main__" and _ON_INTERRUPT is signal.default_int_handler:
    # An interrupt during the imports below must not print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import difflib
import importlib
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from megatron.adaptive import __version__
from megatron.adaptive.cli.common import (
    from_now_end_at_once,
    interrupts_end_at_once,
    open_streams,
    run_cli,
)
from megatron.adaptive.config.command_parser import PROGRAM
from megatron.adaptive.config.core_copies import core_version
from megatron.adaptive.errors import ConfigError, SetupError

_HELP = ("-h", "--help")


@dataclass(frozen=True)
class Subcommand:
    """A subcommand, or one of the modes of a subcommand.

    Attributes:
        name: Words after ``python -m megatron.adaptive`` that select the subcommand, such as
            ``train single``.
        function: Function that runs the subcommand, as ``module.function`` with a module of the
            package ``cli``.
        summary: Short description, printed in the list of subcommands.
        former: Name of the subcommand in earlier versions, or an empty string if it was not
            renamed.
    """

    name: str
    function: str
    summary: str
    former: str = ""


SECTIONS: dict[str, tuple[Subcommand, ...]] = {
    "train a model": (
        Subcommand(
            "train single",
            "run_single.main",
            "train a small GPT on this machine, with generated data",
            former="run-single",
        ),
        Subcommand(
            "train recipe",
            "pretrain_gpt.train",
            "train a model from examples/recipes, or from your own YAML file of flags",
            former="train",
        ),
        Subcommand(
            "train finetune",
            "finetune.main",
            "fine-tune a Hugging Face model on conversations or text, also with images",
        ),
        Subcommand(
            "train elastic",
            "run.main",
            "run a job that adapts its layout when machines join or leave",
            former="run",
        ),
        Subcommand(
            "train rank",
            "pretrain_gpt.rank",
            "run one process of a job (started by torchrun or job launch)",
            former="pretrain-gpt",
        ),
        Subcommand(
            "train megatron-lm",
            "pretrain.main",
            "run Megatron-LM's own trainer with its flags (megatron-core 0.17 or newer)",
            former="pretrain",
        ),
        Subcommand(
            "train flags",
            "pretrain_gpt.flags",
            "print every flag of the trainer as Markdown",
            former="flags",
        ),
        Subcommand(
            "evaluate",
            "pretrain_gpt.evaluate",
            "measure a model's perplexity on a text, and print a sample of its output",
        ),
    ),
    "start and watch jobs on one node or several": (
        Subcommand(
            "job launch",
            "launch.main",
            "run torchrun, with checks at the start and a short error summary at the end",
            former="launch",
        ),
        Subcommand(
            "job submit",
            "submit.main",
            "submit a job to Slurm with the settings of conf.sh",
            former="submit",
        ),
        Subcommand(
            "job node",
            "node.main",
            "run one node of a job (called by run_master.sh, run_worker.sh and Slurm)",
            former="node",
        ),
        Subcommand("job top", "top.main", "show what each rank does now", former="top"),
        Subcommand(
            "job status",
            "status.main",
            "show state, progress and errors of a job (called by get_result.sh)",
            former="status",
        ),
        Subcommand("job report", "report.main", "write one HTML page about a job", former="report"),
    ),
    "find out where the time of a run goes": (
        Subcommand(
            "trace", "trace.main", "show statistics of each stage, and every view of the traces"
        ),
        Subcommand(
            "trace diagnose",
            "trace.diagnose_run",
            "find what slows a run down, and suggest a remedy",
        ),
        Subcommand(
            "trace whatif",
            "trace.what_if_run",
            "estimate how much faster a run would be without a slowdown",
        ),
        Subcommand(
            "trace diff", "trace.compare", "show what became slower from one run to another"
        ),
        Subcommand("trace export", "trace_export.main", "export a run's spans to OpenTelemetry"),
        Subcommand("trace import", "trace.import_run", "import the traces of another program"),
        Subcommand(
            "trace process",
            "trace.process",
            "compute statistics, and events for Perfetto (flags of process_trace.py)",
            former="process-trace",
        ),
        Subcommand(
            "trace draw",
            "trace.visualize",
            "draw a chart of one step (flags of visualize_trace.py)",
            former="visualize-trace",
        ),
    ),
    "choose sizes and schedule": (
        Subcommand(
            "plan", "plan.main", "find the fastest configurations for a model and a cluster"
        ),
        Subcommand(
            "plan validate",
            "validate.main",
            "compare the planner's predictions with measured runs",
            former="validate",
        ),
        Subcommand("profile", "profile.main", "measure layers and links for the planner"),
        Subcommand("simulate", "simulate.main", "compare schedules on simulated work"),
    ),
    "prepare data, manage checkpoints and convert models": (
        Subcommand(
            "data preprocess",
            "preprocess_data.main",
            "convert JSON lines to Megatron's .bin and .idx files",
            former="preprocess-data",
        ),
        Subcommand(
            "data corpus",
            "preprocess_data.make_corpus_main",
            "make training data from Python's standard library",
            former="make-corpus",
        ),
        Subcommand(
            "checkpoint", "checkpoint.main", "list checkpoints, show one, or check them for damage"
        ),
        Subcommand(
            "hf import",
            "checkpoint.import_hf",
            "convert a Hugging Face folder to a checkpoint",
            former="import-hf",
        ),
        Subcommand(
            "hf export",
            "checkpoint.export_hf",
            "convert a checkpoint to a Hugging Face folder",
            former="export-hf",
        ),
    ),
    "check machines": (
        Subcommand(
            "doctor",
            "doctor.main",
            "check whether this node, and its link to another node, are ready for a run",
        ),
        Subcommand(
            "transport",
            "transport.main",
            "show which transports can connect pipeline ranks, and how fast they are",
        ),
    ),
}
"""Maps the title of each section of ``--help`` to the subcommands in this section."""

SUBCOMMANDS: Mapping[str, Subcommand] = {
    subcommand.name: subcommand for section in SECTIONS.values() for subcommand in section
}
"""Descriptions of all subcommands and their modes, keyed by name."""

FORMER: Mapping[str, Subcommand] = {
    subcommand.former: subcommand for subcommand in SUBCOMMANDS.values() if subcommand.former
}
"""Descriptions of renamed subcommands, keyed by their names in earlier versions."""


_ADVICE = {
    "train": """\
which mode to choose:
  a first try on this machine                           train single
  Llama 3, Qwen3, Mistral, DeepSeek-V2-Lite             train recipe
  fine-tuning of a Hugging Face model                   train finetune
  machines that join, leave or fail during training     train elastic
  any GPT, started by your own torchrun or script       train rank, or pretrain_gpt.py
  all features and flags of Megatron-LM                 train megatron-lm
  a fixed number of nodes, with one settings file       conf.sh, with job submit (Slurm), or with
                                                        run_master.sh and run_worker.sh (pods)
  your own model that is not a GPT                      Pipeline in a script, see docs/cutpoint.md

train recipe, elastic and rank run the same trainer; train flags lists its flags."""
}
"""Text that follows the list of modes in a subcommand's help, keyed by the subcommand."""


def _modes(group: str) -> list[Subcommand]:
    """Returns the modes of the subcommand ``group``, or an empty list if ``group`` has no modes."""
    return [mode for mode in SUBCOMMANDS.values() if mode.name.startswith(f"{group} ")]


def _listed(subcommands: Iterable[Subcommand]) -> list[str]:
    return [f"  {subcommand.name:18} {subcommand.summary}" for subcommand in subcommands]


def _help_text() -> str:
    lines = [f"usage: {PROGRAM} SUBCOMMAND [OPTIONS]"]
    for title, section in SECTIONS.items():
        lines += ["", f"{title}:", *_listed(section)]
    lines += [
        "",
        "Use SUBCOMMAND --help for help on a subcommand, and --version to print the versions.",
    ]
    return "\n".join(lines)


def _group_text(group: str) -> str:
    """Returns the help text that lists the modes of the subcommand ``group``."""
    usage = f"usage: {PROGRAM} {group} {'[MODE]' if group in SUBCOMMANDS else 'MODE'} [OPTIONS]"
    text = "\n".join([usage, "", *_listed(_modes(group))])
    return f"{text}\n\n{_ADVICE[group]}" if group in _ADVICE else text


def _versions() -> str:
    """Returns one line with the versions of this package, megatron-core, torch and Python."""
    versions = [f"megatron-adaptive {__version__}"]
    versions.append(f"megatron-core {core_version() or 'not installed'}")
    try:
        versions.append(f"torch {metadata.version('torch')}")
    except metadata.PackageNotFoundError:
        versions.append("torch not installed")
    return ", ".join([*versions, f"Python {platform.python_version()}"])


def main() -> int:
    """Runs the subcommand that the command line selects, and returns the exit status."""
    open_streams()
    return run_cli(_run)


def program() -> int:
    """Runs :func:`main` as the whole program, and returns the exit status.

    Python takes some time to exit, especially if torch has been imported. If a signal arrives
    during this time, the program prints one line with the signal's name and exits.
    """
    status = main()
    from_now_end_at_once()
    return status


def _run(argv: Sequence[str]) -> int | None:
    if not argv or argv[0] in _HELP:
        print(_help_text())
        return 0
    if argv[0] == "--version":
        print(_versions())
        return 0
    name = argv[0]
    arguments = argv[1:]
    modes = _modes(name)
    if modes and arguments and (mode := f"{name} {arguments[0]}") in SUBCOMMANDS:
        return _start(SUBCOMMANDS[mode], arguments[1:])
    if name in SUBCOMMANDS:
        if modes and arguments:
            _check_misspelt_mode(name, arguments[0])
            if arguments[0] in _HELP:
                print(_group_text(name), end="\n\n")
        return _start(SUBCOMMANDS[name], arguments)
    if not modes:
        raise _unknown_subcommand(name, arguments)
    if not arguments or arguments[0] in _HELP:
        print(_group_text(name))
        return 0
    raise _unknown_mode(name, arguments)


def _unknown_subcommand(name: str, arguments: Sequence[str]) -> ConfigError:
    if name in FORMER:
        return _renamed(FORMER[name], arguments)
    groups = dict.fromkeys(subcommand.partition(" ")[0] for subcommand in SUBCOMMANDS)
    targets = {group: group for group in groups}
    for subcommand in SUBCOMMANDS.values():
        targets[subcommand.name] = subcommand.name
        targets.setdefault(subcommand.name.rpartition(" ")[2], subcommand.name)
        targets.setdefault(subcommand.former or subcommand.name, subcommand.name)
    nearest = difflib.get_close_matches(name, targets, n=1)
    hint = (
        f"did you mean {targets[nearest[0]]}" if nearest else f"choose one of {', '.join(groups)}"
    )
    return ConfigError(f"unknown subcommand {name!r}; {hint}")


def _unknown_mode(group: str, arguments: Sequence[str]) -> ConfigError:
    word = arguments[0]
    former = FORMER.get(group)
    if former is not None and (os.path.splitext(word)[1] or os.path.isfile(word)):
        return _renamed(former, arguments)
    modes = _modes(group)
    nearest = _nearest_mode(modes, word)
    names = ", ".join(mode.name.rpartition(" ")[2] for mode in modes)
    hint = f"did you mean {nearest}" if nearest else f"choose one of {names}"
    return ConfigError(f"{group}: unknown mode {word!r}; {hint}")


def _nearest_mode(modes: Iterable[Subcommand], word: str) -> str:
    """Returns the full name of the mode most similar to ``word``, or ``""`` if none is similar.

    Both the current and the former names of ``modes`` are considered.
    """
    targets = {}
    for mode in modes:
        targets[mode.former] = mode.name
        targets[mode.name.rpartition(" ")[2]] = mode.name
    nearest = difflib.get_close_matches(word, [name for name in targets if name], n=1)
    return targets[nearest[0]] if nearest else ""


def _check_misspelt_mode(name: str, word: str) -> None:
    """Raises an error if ``word`` is probably a misspelt mode of the subcommand ``name``.

    Args:
        name: Name of a subcommand that may be used without a mode.
        word: First word after the subcommand. It is either a misspelt mode or the folder of a run.

    Raises:
        ConfigError: No file or folder has the name ``word``, and one of the modes has a similar
            name.
    """
    if word.startswith("-") or "/" in word or os.path.exists(word):
        return
    if nearest := _nearest_mode(_modes(name), word):
        raise ConfigError(f"{name}: no mode or folder is named {word!r}; did you mean {nearest}")


def _renamed(subcommand: Subcommand, arguments: Sequence[str]) -> ConfigError:
    command = shlex.join([*subcommand.name.split(), *arguments])
    return ConfigError(f"subcommand {subcommand.former} is now: {command}")


def _start(subcommand: Subcommand, arguments: Sequence[str]) -> int | None:
    """Runs the function of ``subcommand`` with ``arguments``, and returns the exit status."""
    module, _, function = subcommand.function.partition(".")
    try:
        with interrupts_end_at_once():
            program = importlib.import_module(f"megatron.adaptive.cli.{module}")
    except ModuleNotFoundError as error:
        if str(error.name).startswith("megatron.adaptive"):
            raise
        raise SetupError(
            f'"{subcommand.name}" requires the package {error.name}; run "pip install {error.name}"'
        ) from None
    status: int | None = getattr(program, function)(arguments)
    return status


if __name__ == "__main__":
    if _ON_INTERRUPT is signal.default_int_handler:
        signal.signal(signal.SIGINT, _ON_INTERRUPT)
    sys.exit(program())
