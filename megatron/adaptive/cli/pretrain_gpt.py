"""Implements ``pretrain_gpt.py``, which trains GPT with Megatron-LM's command line.

``train recipe`` trains from a recipe file, and can start the processes itself. ``evaluate`` runs an
existing model on a text, without training. ``train flags`` prints all flags of the parser.
"""

from __future__ import annotations

import itertools
import os
import reprlib
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from megatron.adaptive.cli import launch
from megatron.adaptive.cli.common import EXIT_EXPECTED_ERROR, expected, open_streams, show
from megatron.adaptive.config.arguments import flag_table, make_parser, parse, read_recipe
from megatron.adaptive.config.command_parser import PROGRAM, CommandParser, count, last_value
from megatron.adaptive.config.data import TokenizerConfig
from megatron.adaptive.config.environment import Environment
from megatron.adaptive.config.hugging_face import FLAGS_FILE
from megatron.adaptive.config.input_files import natural, read_text, say
from megatron.adaptive.config.schema_files import read_file
from megatron.adaptive.config.unsupported_flags import IDLE, NEWER, REFUSED
from megatron.adaptive.errors import AdaptiveError, ConfigError, ScheduleError, TransportError

_USAGE = """\
usage: python -m megatron.adaptive train recipe RECIPE.yaml [KEY=VALUE ...] [--dry-run] [-- OPTIONS]

Trains with the settings of a recipe, whose keys are the trainer's flags (docs/flags.md), and prints
them. KEY=VALUE overrides the file, or chooses one of its variants. With load_hf=DIR the folder's
model is used, whatever sizes the recipe has. OPTIONS are those of job launch; on several nodes:
-- --node-rank N --master-addr HOST. --dry-run only checks and prints, and needs no data."""


_NEWER_HEAD = (
    "Settings that releases after the installed one add to megatron-core. They are flags if such\n"
    "a release is installed, and refused otherwise."
)
_FLAGS_HEAD = """\
# Flags of `pretrain_gpt.py`

Made by `python -m megatron.adaptive train flags > docs/flags.md`; change the fields in
`megatron/adaptive/config/`, not this file.

A switch takes no value; its default is off. Several spellings of one flag are separated
by commas. Flags of Megatron-LM that this trainer refuses are at the end.
"""


_WAIT_S = 3.0
"""Time in seconds for which a node's first rank delays its error, because rank 0 may print it.

The other ranks of the node wait twice as long, so that usually only one rank prints the error.
"""


def main(argv: Sequence[str]) -> int:
    """Trains with the flags in ``argv``, as one of torchrun's processes or as a single process."""
    environment = Environment.read()
    config = parse(argv, world_size=environment.world_size, last_wins=True)
    if environment.node is not None:
        config = config.in_elastic_job()
    # Import torch and megatron-core only after checking the settings, so that errors are reported
    # without delay.
    from megatron.adaptive.training.pretrain import pretrain

    pretrain(config, environment)
    return 0


def rank(argv: Sequence[str]) -> int:
    """Runs one process of a training run. This is the command ``train rank``.

    ``--help`` prints all flags.
    """
    if {"-h", "--help"} & set(argv):
        parser = make_parser()
        parser.prog = f"{PROGRAM} train rank"
        parser.print_help()
        return 0
    return run(argv)


def train(argv: Sequence[str]) -> int:
    """Trains from a recipe file, and starts the processes if torchrun has not started them."""
    return run(argv, _train)


def _train(argv: Sequence[str]) -> int:
    arguments = list(argv)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    settings = arguments[:end]
    options = arguments[end + 1 :]
    if not settings or {"-h", "--help"} & set(settings):
        print(_USAGE)
        return 0
    is_dry = "--dry-run" in settings
    settings = [setting for setting in settings if setting != "--dry-run"]
    if not settings or "=" in settings[0] or settings[0].startswith("-"):
        raise ConfigError(
            "the recipe is missing; pass a YAML file as the first argument, see train recipe --help"
        )
    path = Path(settings[0])
    recipe = read_recipe(load_recipe(path), settings[1:], str(path))
    environment = Environment.read()
    is_rank = environment.world_size > 1
    processes = recipe.nodes * recipe.processes_per_node
    world_size = environment.world_size if is_rank else processes
    config = parse(recipe.flags, world_size=world_size, needs_data=not is_dry)
    if environment.rank == 0:
        show(yaml.safe_dump(config.to_dict(), sort_keys=False))
    if is_dry:
        return 0
    if is_rank or processes == 1:
        return main(recipe.flags)
    if recipe.nodes == 1:
        options = ["--standalone", *options]
    elif not options:
        raise ConfigError(
            f"{path} requires {recipe.nodes} nodes; run the command on each node, and append "
            "-- --node-rank N --master-addr HOST"
        )
    shape = ["--nnodes", str(recipe.nodes), "--nproc-per-node", str(recipe.processes_per_node)]
    program = ["-m", "megatron.adaptive", "train", "rank", *recipe.flags]
    return launch.main([*shape, *options, *program])


def load_recipe(path: Path) -> Any:
    """Reads the recipe file ``path``, and merges it with the recipe that its key ``base`` names."""
    content = read_file(path, "recipe")
    if not isinstance(content, dict) or "base" not in content:
        return content
    name = content.pop("base")
    if not isinstance(name, str):
        raise ConfigError(f"{path}: base must be the name of a file, got {name!r}")
    base = read_file(path.parent / name, "recipe")
    if not isinstance(base, dict):
        raise ConfigError(
            f"{path.parent / name}, the base of {path}, must contain keys with values, got"
            f" {reprlib.repr(base)}"
        )
    if "base" in base:
        raise ConfigError(f"{path.parent / name}, the base of {path}, must not have a base itself")
    return _merge_recipes(base, content)


def _merge_recipes(base: Any, override: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(override, dict)):
        return override
    return {
        **base,
        **{key: _merge_recipes(base.get(key), value) for key, value in override.items()},
    }


def evaluate(argv: Sequence[str]) -> int:
    """Prints a model's perplexity on a text, or the text that it generates after a prompt."""
    return run(argv, _evaluate)


def _evaluate(argv: Sequence[str]) -> int:
    parser = CommandParser(
        prog=f"{PROGRAM} evaluate",
        usage="%(prog)s (--load CKPT | --load-hf DIR) [--data FILE] [--prompt TEXT] [FLAGS]",
        description=(
            "Print the perplexity of a model on a text, and a sample of its output. FLAGS are "
            "flags of the trainer; the model's flags are read from CKPT/model_flags.txt or "
            "config.json."
        ),
    )
    add = parser.add_argument
    add("--data", metavar="FILE", help='JSON lines {"text": ...}, or a prefix as for --data-path')
    add("--prompt", metavar="TEXT", help="text for the model to continue")
    text = "number of tokens to generate after the prompt (32)"
    add("--tokens", type=count, default=32, metavar="N", help=text)
    text = "number of processes to start (1)"
    add("--nproc-per-node", type=count, default=1, metavar="N", help=text)
    options, flags = parser.parse_known_args(list(argv))
    if options.data is None and options.prompt is None:
        raise ConfigError("evaluate: the text is missing; pass --data FILE or --prompt TEXT")
    if not {"--load", "--load-hf"} & {flag.partition("=")[0] for flag in flags}:
        raise ConfigError("evaluate: the model is missing; pass --load CKPT or --load-hf DIR")
    run_flags = [*_NO_TRAINING, *_model_flags(flags), *flags]
    if last_value(flags, "--load") is not None:
        run_flags = [*_WEIGHTS_ALONE, *run_flags]
    if options.prompt is not None:
        run_flags += ["--sample-prompt", options.prompt, "--sample-tokens", str(options.tokens)]
    with tempfile.TemporaryDirectory() as folder:
        if options.data is None:
            run_flags += ["--mock-data", "--eval-iters", "0"]
        else:
            run_flags += _all_of(options.data, run_flags, options.nproc_per_node, Path(folder))
        if options.nproc_per_node == 1:
            return main(run_flags)
        start = ["--standalone", "--nproc-per-node", str(options.nproc_per_node)]
        return launch.main([*start, "-m", "megatron.adaptive", "train", "rank", *run_flags])


_WEIGHTS_ALONE = ("--finetune", "--exit-on-missing-checkpoint")
_NO_TRAINING = "--skip-train --train-iters 1 --lr 1e-5 --micro-batch-size 1".split()


def _model_flags(flags: Sequence[str]) -> list[str]:
    """Returns the flags in the file ``model_flags.txt`` of the folder passed to ``--load``.

    This file is written by ``hf import`` and by training runs. If it is missing, the result is
    empty.
    """
    path = Path(last_value(flags, "--load") or "", FLAGS_FILE)
    if not path.is_file():
        return []
    try:
        return shlex.split(read_text(path, "run hf import again"))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; run hf import again") from None


def _all_of(data: str, flags: Sequence[str], processes: int, folder: Path) -> list[str]:
    """Returns the flags that make the trainer evaluate a whole text exactly once.

    The last tokens of the text are left out if they do not fill a batch.

    Args:
        data: Path of a file with JSON lines, or prefix of existing token files. JSON lines are
            first tokenized into ``folder``.
        flags: Other flags of the run.
        processes: Number of processes of the job.
        folder: Folder to which token files are written.
    """
    validation = ["--valid-data-path", data, "--eval-iters", "1"]
    config = parse([*flags, *validation], world_size=processes, last_wins=True)
    from megatron.adaptive.cli.preprocess_data import progress_display, tidy_on_sigterm
    from megatron.adaptive.data.indexed import check_indexed
    from megatron.adaptive.data.preprocess import PreprocessSpec, preprocess

    name = data
    if Path(data).is_file():
        spec = PreprocessSpec(
            **{name.name: getattr(config.data, name.name) for name in fields(TokenizerConfig)},
            inputs=(Path(data),),
            output_prefix=str(folder / "data"),
            append_eod=True,
        )
        with tidy_on_sigterm(), progress_display(Path(data).stat().st_size) as progress:
            preprocess(spec, progress=progress)
        data = spec.prefix_of("text")
    tokens = check_indexed(data).num_tokens
    length = config.model.seq_length
    batches = (tokens - 1) // length // config.batch.global_batch_size
    if not batches:
        raise ConfigError(
            f"evaluate: {tokens} tokens are fewer than a batch of "
            f"{config.batch.global_batch_size} x {length}; use a longer text, or a smaller "
            "--global-batch-size or --seq-length"
        )
    used = batches * config.batch.global_batch_size * length
    show(f"text {name}: evaluating {used:,} of {tokens - 1:,} tokens")
    return ["--valid-data-path", data, "--eval-iters", str(batches)]


def run(
    argv: Sequence[str] | None = None, program: Callable[[Sequence[str]], int] | None = None
) -> int:
    """Runs a program as one process of a job, and reports expected errors in one line.

    Wrong settings cause the same error on all ranks. Rank 0 therefore prints its error first. The
    other ranks print their errors only if the launcher has not stopped them after some seconds.
    Until the program has installed its own signal handlers, Ctrl-C kills the process without a
    traceback.

    Args:
        argv: Arguments for the program, or ``None`` to use the arguments of the process.
        program: Function to run; :func:`main` by default.
    """
    open_streams()
    former = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return (program or main)(sys.argv[1:] if argv is None else argv)
    except Exception as error:
        expected_error = expected(error)
        if expected_error is None:
            raise
        _wait_for_rank_0(expected_error)
        say(f"error: {expected_error}", lines=isinstance(expected_error, ScheduleError))
        return EXIT_EXPECTED_ERROR
    finally:
        signal.signal(signal.SIGINT, former)


def _wait_for_rank_0(error: AdaptiveError) -> None:
    """Waits before ``error`` is printed, unless this is rank 0 or ``error`` is about a lost peer.

    If rank 0 has the same error, rank 0 prints the error and exits, and the launcher stops this
    rank during the wait. If this rank is still running after the wait, only this rank has the
    error, for example because a file is missing on its node.
    """
    # Treat an invalid rank number as 0, so that this rank prints the error immediately.
    names = ("RANK", "LOCAL_RANK")
    rank, local_rank = (natural(os.environ.get(name, "0").strip()) or 0 for name in names)
    if rank and not isinstance(error, TransportError):
        time.sleep(2 * _WAIT_S if local_rank else _WAIT_S)


def flags(argv: Sequence[str]) -> int:
    """Prints a list of all flags to stdout, in Markdown."""
    if "-h" in argv or "--help" in argv:
        print("usage: python -m megatron.adaptive train flags > docs/flags.md")
        return 0
    if argv:
        raise ConfigError(f"train flags must be used without arguments; remove {argv[0]}")
    print(flags_markdown(), end="")
    return 0


def flags_markdown() -> str:
    """Returns Markdown tables of all flags by group, and of flags that are refused or ignored."""
    parts = [_FLAGS_HEAD]
    for title, rows in flag_table().items():
        parts.append(f"\n## {title}\n\n| Flag | Default | Meaning |\n| --- | --- | --- |\n")
        for flag, default, text in rows:
            parts.append(f"| `{_cell(flag)}` | {_cell(default)} | {_cell(text)} |\n")
    for title, column, table in (
        ("Refused", "Why, and what to do", REFUSED),
        ("Accepted without effect", "Why", IDLE),
    ):
        parts.append(f"\n## {title}\n\n| Flags | {column} |\n| --- | --- |\n")
        for reason, family in itertools.groupby(table, table.__getitem__):
            names = [f"`--{name}`" for name in sorted(family, key=lambda name: name.endswith("*"))]
            parts.append(f"| {', '.join(names)} | {_cell(reason)} |\n")
    names = [f"`{name}`" for name in NEWER]
    parts.append(f"\n## With a later megatron-core\n\n{_NEWER_HEAD}\n\n{', '.join(names)}\n")
    return "".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
