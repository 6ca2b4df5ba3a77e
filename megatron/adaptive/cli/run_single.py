"""Implements ``train single``, which prepares data, trains and draws a chart on one machine.

In a checkout, ``run_single.sh`` calls this program.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron.adaptive.cli.common import show, trainer_options
from megatron.adaptive.cli.preprocess_data import make_corpus_main as make_corpus
from megatron.adaptive.config.command_parser import PROGRAM, CommandParser, count, last_value
from megatron.adaptive.config.environment import IS_CHECKOUT, SCRIPTS, WORK_FOLDER
from megatron.adaptive.config.parent_process import ending_with_this_process
from megatron.adaptive.config.schedule import format_partition, nearly_even_split
from megatron.adaptive.config.schedule_specs import schedule_spec, selectable_names
from megatron.adaptive.errors import AdaptiveError, ConfigError, SetupError

_SCRIPT = SCRIPTS / "examples" / "gpt" / "pretrain_gpt_distributed_small.sh"
_LAYERS = 8
_REPARTITION_INTERVAL = 20
_SIZES = {
    "pipeline_parallel": (2, "number of pipeline ranks"),
    "model_chunks": (1, "number of model chunks per pipeline rank"),
    "tensor_parallel": (1, "number of tensor-parallel ranks per stage"),
    "data_parallel": (1, "number of copies of the pipeline"),
}
"""Options for the sizes of the run, with default values and help texts.

The example script reads these sizes from environment variables with the same names in capital
letters.
"""

_FOLDERS = {"runs_dir": WORK_FOLDER / "runs", "data_dir": WORK_FOLDER / "data" / "stdlib"}
"""Options for folders, with default values."""

_FIXED_STAGES = {
    "--partition",
    "--pipeline-model-parallel-size",
    "--pipeline-schedule",
    "--plan",
    "--stage-data-parallel-sizes",
}
"""Options of the trainer that prevent moving layers between stages during the run."""


_SET_CHUNKS = {
    "--model-chunks",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--pipeline-schedule",
    "--plan",
}
"""Options of the trainer that override the number of model chunks or the schedule."""


def main(argv: Sequence[str]) -> int:
    """Prepares data, trains a model and reports the results, with the options in ``argv``.

    Returns:
        Exit status of the training run, or of the preparation if it fails.
    """
    arguments = list(argv)
    separator = arguments.index("--") if "--" in arguments else len(arguments)
    trainer_flags = arguments[separator + 1 :]
    options = _parser().parse_args(arguments[:separator])
    _check_chunks(options, trainer_flags)
    data_dir = options.data_dir.resolve()
    runs = options.runs_dir.resolve()
    if options.resume and not (runs / "latest").exists():
        raise ConfigError(f"--resume: {runs} does not contain a run yet; remove --resume")
    status = make_corpus(["--output-dir", str(data_dir)])
    if status:
        return status  # ``make_corpus`` has already printed the reason.
    previous = _latest(runs)
    run_dir = _run_dir(runs, options, trainer_flags)
    defaults = _default_flags(options, trainer_flags)
    if options.resume:
        defaults += ["--load", str(_checkpoints(run_dir, trainer_flags))]
    status = _train(options, data_dir, run_dir, [*defaults, *trainer_flags])
    if status == 0 or status > 128:
        _report(options, trainer_flags, run_dir, stopped=status != 0)
    elif not options.resume:
        _forget_if_empty(run_dir, previous)
    return status


class _Renamed(argparse.Action):
    """Rejects the old name of an option with an error that contains the new name."""

    def __call__(self, *_: Any) -> NoReturn:
        """Raises the error. argparse calls this method when the old option is used."""
        raise ConfigError("--schedule was renamed; use --pipeline-schedule")


def _parser() -> CommandParser:
    parser = CommandParser(
        prog=f"{PROGRAM} train single",
        description="Train a small GPT through a pipeline of processes on this machine.",
        epilog="Options of the trainer follow after --, for example -- --train-iters 50.",
        otherwise="options of the trainer follow after --",
        elsewhere=trainer_options,
    )
    add = parser.add_argument
    for name, (default, text) in _SIZES.items():
        flags = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        text = f"{text} ({default})"
        add(*flags, dest=name, type=count, default=default, metavar="N", help=text)
    names = selectable_names()
    text = f"order of actions in the pipeline (adaptive): {', '.join(names)}"
    both = ("--pipeline-schedule", "--pipeline_schedule")
    add(*both, dest="schedule", default="adaptive", choices=names, metavar="NAME", help=text)
    add("--schedule", action=_Renamed, help=argparse.SUPPRESS)
    text = "continue the latest run instead of starting a new run"
    add("--resume", action="store_true", help=text)
    add("--runs-dir", type=Path, default=_FOLDERS["runs_dir"], help="folder of all runs (runs)")
    text = "folder of the corpus, which is created if it is missing (data/stdlib)"
    add("--data-dir", type=Path, default=_FOLDERS["data_dir"], help=text)
    return parser


def _check_chunks(options: argparse.Namespace, trainer_flags: Sequence[str]) -> None:
    """Checks that the schedule supports the number of chunks.

    The check is skipped if the trainer's flags set the schedule or the number of chunks. The
    trainer also performs this check, but its error message mentions flags that this program does
    not have.

    Raises:
        ConfigError: The schedule requires a different number of chunks.
    """
    names = {flag.split("=", 1)[0] for flag in trainer_flags}
    spec = schedule_spec(options.schedule)
    chunks = options.model_chunks
    if names & _SET_CHUNKS or spec.least_chunks <= chunks <= (spec.most_chunks or chunks):
        return
    needed = {"one": "1", "two": "2", "several": "2 or more"}[spec.chunks]
    raise ConfigError(
        f"--pipeline-schedule {options.schedule} requires --model_chunks {needed}, got {chunks}; "
        "change one of them"
    )


def _default_flags(options: argparse.Namespace, trainer_flags: Sequence[str]) -> list[str]:
    """Returns default flags for the trainer, depending on the sizes of the run.

    If all stages have the same number of layers, the first and the last stage take longer than the
    others, because they also compute the embedding and the loss. Unless the user's flags fix the
    stages, the default flags therefore let the trainer measure the stages and then move layers.
    """
    flags = []
    names = {flag.split("=", 1)[0] for flag in trainer_flags}
    stages = options.pipeline_parallel * options.model_chunks
    if _LAYERS % stages and "--num-layers" not in names:
        flags += ["--partition", format_partition(nearly_even_split(_LAYERS, stages))]
    may_move = options.pipeline_parallel > 1 and options.schedule != "megatron"
    # The schedule ``auto`` measures slices of documents in the first steps. During these steps,
    # layers must not move.
    may_move = may_move and not (options.schedule == "auto" and "--slice-tokens" in names)
    if may_move and not names & _FIXED_STAGES:
        flags += ["--repartition", "auto", "--repartition-interval", str(_REPARTITION_INTERVAL)]
    return flags


def _run_dir(runs: Path, options: argparse.Namespace, trainer_flags: Sequence[str]) -> Path:
    """Returns the folder of the run. With ``--resume``, this is the folder of the latest run.

    Without ``--resume``, creates a new folder in ``runs``, and makes the link ``latest`` point to
    this folder. The name of the folder contains the schedule and the sizes of the run.
    """
    latest = runs / "latest"
    if options.resume:
        return latest.resolve()
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    # The schedule may also be a user's own, such as package.module:name.
    schedule = last_value(trainer_flags, "--pipeline-schedule") or options.schedule
    schedule = schedule.replace(":", "-").replace("/", "-")
    name = (
        f"{stamp}-{schedule}-p{options.pipeline_parallel}-c{options.model_chunks}"
        f"-t{options.tensor_parallel}-d{options.data_parallel}"
    )
    try:
        run = _new_folder(runs, name)
        _point(latest, run.name)
    except OSError as error:
        raise SetupError(
            f"cannot create the run's folder {runs / name}: {error.strerror}; choose another with "
            "--runs-dir"
        ) from error
    return run


def _new_folder(runs: Path, name: str) -> Path:
    """Creates the folder ``name`` in ``runs``, with a number appended if the name is taken."""
    runs.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        run = runs / (name if number == 1 else f"{name}-{number}")
        try:
            run.mkdir()
        except FileExistsError:
            continue
        break
    return run


def _point(latest: Path, target: str) -> None:
    link = latest.with_name(f".latest-{os.getpid()}")
    link.symlink_to(target)
    link.replace(latest)


def _latest(runs: Path) -> str | None:
    """Returns the target of the link ``latest`` in ``runs``, or ``None`` if the link is missing."""
    try:
        return os.readlink(runs / "latest")
    except OSError:
        return None


def _forget_if_empty(run: Path, previous: str | None) -> None:
    """Removes the folder ``run`` if it contains no files, and restores the link ``latest``.

    ``previous`` is the previous target of the link, or ``None`` if there was no link.
    """
    if any(path.is_file() for path in run.rglob("*")):
        return
    latest = run.parent / "latest"
    shutil.rmtree(run, ignore_errors=True)
    if _latest(run.parent) == run.name:
        latest.unlink()
        if previous is not None:
            _point(latest, previous)


def _train(options: argparse.Namespace, data_dir: Path, run_dir: Path, flags: list[str]) -> int:
    """Runs the example script, forwards signals to it, and returns its exit status."""
    environment = {
        **os.environ,
        **{name.upper(): str(getattr(options, name)) for name in (*_SIZES, "schedule")},
        "PYTHON": sys.executable,
        "DATA_DIR": str(data_dir),
        "RUN_DIR": str(run_dir),
    }
    # Start the job in a separate session. Otherwise, it would receive Ctrl-C twice: from the
    # terminal, and from this process, which forwards the signal.
    job = subprocess.Popen(
        ["bash", str(_SCRIPT), *flags],
        env=environment,
        start_new_session=True,
        cwd=WORK_FOLDER,
        # If this process is killed, the job saves a checkpoint and exits.
        preexec_fn=ending_with_this_process(signal.SIGTERM),
    )

    def pass_on(number: int, frame: object) -> None:
        job.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    status = job.wait()
    return 128 - status if status < 0 else status


def _checkpoints(run_dir: Path, trainer_flags: Sequence[str]) -> Path:
    """Returns the folder of the run's checkpoints, which the trainer's flag ``--save`` may set."""
    return WORK_FOLDER / (last_value(trainer_flags, "--save") or run_dir / "checkpoints")


def _report(
    options: argparse.Namespace, trainer_flags: Sequence[str], run_dir: Path, *, stopped: bool
) -> None:
    """Writes a text trace and a chart, prints the paths of all results, and suggests commands."""
    show(f"\nrun            {run_dir}")
    for title, folder in (("checkpoint", "checkpoints"), ("tensorboard", "tensorboard")):
        if (run_dir / folder).is_dir():
            show(f"{title:14} {run_dir / folder}")
    chart = _draw(options, run_dir)
    python = shlex.quote(sys.executable)
    flags = f"--pipeline_parallel {options.pipeline_parallel} --model_chunks {options.model_chunks}"
    show("\nnext commands:")
    environment = Path(sys.prefix) / "bin" / "activate"
    if environment.exists():
        show(f"  source {shlex.quote(str(environment))}")
    if chart:
        for mode, script in (("process", "process_trace.py"), ("draw", "visualize_trace.py")):
            command = f"python {script}" if IS_CHECKOUT else f"{PROGRAM} trace {mode}"
            show(f"  {command} {flags}")
    show(
        f"  {'tensorboard' if environment.exists() else python + ' -m tensorboard.main'} "
        f"--logdir {shlex.quote(str(run_dir / 'tensorboard'))}"
    )
    if any(_checkpoints(run_dir, trainer_flags).glob("iter_*/manifest.json")):
        show(f"  {_resume_command(options, trainer_flags, stopped=stopped)}")


def _resume_command(
    options: argparse.Namespace, trainer_flags: Sequence[str], *, stopped: bool
) -> str:
    """Returns the command that continues the run with the same options.

    Args:
        options: Options of this program.
        trainer_flags: Options of the trainer.
        stopped: Whether the run was stopped before its last iteration. Otherwise, the command
            contains ``N`` in place of a number of iterations, which the user must choose.
    """
    arguments = ["bash", "run_single.sh"] if IS_CHECKOUT else shlex.split(f"{PROGRAM} train single")
    for name, (default, _) in _SIZES.items():
        size = getattr(options, name)
        if size != default or name in ("pipeline_parallel", "model_chunks"):
            arguments += [f"--{name}", str(size)]
    if options.schedule != "adaptive":
        arguments += ["--pipeline-schedule", options.schedule]
    for name, usual in _FOLDERS.items():
        folder = getattr(options, name).resolve()
        if folder != usual.resolve():
            arguments += [f"--{name.replace('_', '-')}", str(folder)]
    arguments.append("--resume")
    # The learning rate schedule in the checkpoint ends with this run, so a longer run must override
    # it.
    longer_run = [] if stopped else ["--train-iters", "N", "--override-opt-param-scheduler"]
    if more := [*trainer_flags, *longer_run]:
        arguments += ["--", *more]
    return shlex.join(arguments)


def _draw(options: argparse.Namespace, run_dir: Path) -> bool:
    """Writes a text trace and a chart from the run's traces. Returns whether both were written."""
    from megatron.adaptive.trace.legacy_text import legacy_name, write_legacy
    from megatron.adaptive.trace.read import read_run
    from megatron.adaptive.trace.step_view import pipeline_step
    from megatron.adaptive.trace.views.picture import write_picture

    traces = run_dir / "traces"
    if not traces.is_dir():
        return False
    try:
        trace = read_run(traces)
        name = legacy_name(options.pipeline_parallel, options.model_chunks)
        text = run_dir / f"{name}.txt"
        write_legacy(trace, text)
        show(f"traces         {traces}\ntext trace     {text}")
        chart = run_dir / f"{name}.png"
        write_picture(pipeline_step(trace), chart)
        show(f"chart          {chart}")
    except AdaptiveError as error:
        show(f"traces         {traces} (no chart: {error})")
        return False
    return True
