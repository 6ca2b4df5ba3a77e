"""Runs a training job that continues with a different layout when machines join or leave.

::

    start all nodes of a job from one machine:
        python -m megatron.adaptive train elastic --machines machines.txt pretrain_gpt.py ...
    take part in a job as one node (run this command on each node):
        python -m megatron.adaptive train elastic --checkpoint DIR pretrain_gpt.py ...
    the same for a script that trains a Pipeline:
        python -m megatron.adaptive train elastic --checkpoint DIR train.py ...
    the same for the command train finetune:
        python -m megatron.adaptive train elastic --checkpoint DIR finetune --model MODEL ...
    print the state of a job:
        python -m megatron.adaptive train elastic --status DIR
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.adaptive.cli.common import show
from megatron.adaptive.config.command_parser import (
    PROGRAM,
    CommandParser,
    count,
    last_value,
    number,
)
from megatron.adaptive.errors import ConfigError

if TYPE_CHECKING:
    from megatron.adaptive.cluster.incarnation import JobSpec, Policy, ProbePolicy
    from megatron.adaptive.cluster.layout_rule import Chooser
    from megatron.adaptive.config.schedule import ScheduleConfig

_SAVE = "--save"
_TRAINER = "pretrain_gpt.py"
_FINETUNE = "finetune"
_SECONDS = number(float, 1e-3, 1e9, "number of seconds")


def main(argv: Sequence[str]) -> int:
    """Manages a job, takes part in a job as one node, or prints the state of a job.

    Returns:
        Exit status of the job or of this node.
    """
    options = _parser().parse_args(list(argv))
    if options.agent:
        from megatron.adaptive.cluster.agent import Agent

        agent = Agent.from_input()
        asyncio.run(agent.run())
        return 1 if agent.status is None else agent.status
    if options.status is not None:
        return _print_state(options)
    return _run(options)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=f"{PROGRAM} train elastic",
        description=(
            "Train a model, and continue with a different layout when machines join or leave."
        ),
    )
    add = parser.add_argument
    text = "file with a host and slots=N on each line; read again when it changes"
    add("--machines", type=Path, metavar="FILE", help=text)
    text = "checkpoint folder of the job, in storage that all nodes share (--save)"
    add("--checkpoint", type=Path, metavar="DIR", help=text)
    text = "print the state of the job with this checkpoint folder"
    add("--status", nargs="?", const="", metavar="DIR", help=text)
    add("--json", action="store_true", help="print the state as JSON")
    text = "number of nodes to wait for at the start, without --machines (1)"
    add("--nodes", type=count, default=1, metavar="N", help=text)
    text = "number of processes on this node (default: one per GPU)"
    add("--slots", type=count, metavar="N", help=text)
    add("--name", metavar="NAME", help="name of this node in the job (default: its host name)")
    add("--address", metavar="HOST", help="address at which other nodes can reach this node")
    for name, dest, default, text in (
        ("--join-within", "join_s", 60.0, "maximum time for machines to answer at the start"),
        ("--wait", "wait_s", 600.0, "time to wait if no layout fits the available machines"),
        ("--stop-within", "stop_s", 600.0, "maximum time for ranks to finish a step and save"),
        (
            "--plan-within",
            "plan_s",
            10.0,
            "planner's time limit, after which a simple rule is used",
        ),
    ):
        text = f"{text} ({default:g})"
        add(name, dest=dest, type=_SECONDS, default=default, metavar="SECONDS", help=text)
    text = "let the planner choose layouts, using this cluster file or profile; may be repeated"
    add("--plan-with", type=Path, action="append", default=[], metavar="FILE", help=text)
    text = "with --plan-with, also consider stages with different numbers of replicas"
    add("--unequal", action="store_true", help=text)
    _add_reactions(parser)
    add(
        "--runs",
        choices=("trainer", "pipeline"),
        help=(
            "type of the script, if the type cannot be detected: trainer if the script takes the "
            "trainer's arguments, pipeline if it trains a Pipeline in Pipeline.loop"
        ),
    )
    text = "maximum number of restarts without a new checkpoint in between (3)"
    add("--max-restarts", type=count, default=3, metavar="N", help=text)
    text = "steps between in-memory copies of the state, or 0 for no copies (0)"
    steps = number(int, 0, 1_000_000)
    add("--replicate-every", dest="copy_every", type=steps, default=0, metavar="N", help=text)
    text = "maximum memory for copies on each node (default: all that is needed)"
    add("--replicate-memory", dest="copy_bytes", type=_gib, metavar="GIB", help=text)
    add("--agent", action="store_true", help=argparse.SUPPRESS)
    text = f"{_TRAINER}, {_FINETUNE}, or a script that trains a Pipeline, followed by its arguments"
    add("script", nargs="?", type=Path, help=text)
    add("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add_reactions(parser: argparse.ArgumentParser) -> None:
    """Adds to ``parser`` the flags that set the reactions to slow nodes and to failed probes."""
    add = parser.add_argument
    add(
        "--on-straggler",
        choices=("ignore", "replan", "exclude"),
        help=(
            "reaction to a node that stays slow: give it fewer layers, or exclude it; requires "
            "--trace-dir of the trainer or trace_dir of a Pipeline (default: replan if traces are "
            "written)"
        ),
    )
    add(
        "--on-failed-probe",
        choices=("report", "exclude"),
        default="report",
        help=(
            "reaction to a node that fails a probe of the job: report it, or exclude it until "
            "it passes; requires --probe-interval of the trainer (report)"
        ),
    )


def _gib(text: str) -> int:
    return int(number(float, 1e-6, 1e6, "number of GiB")(text) * 1024**3)


def _print_state(options: argparse.Namespace) -> int:
    from megatron.adaptive.cluster.job_state_file import read_state, render_state

    folder = options.status or options.checkpoint or last_value(options.arguments, _SAVE)
    if not folder:
        raise ConfigError("--status requires a folder; pass the job's checkpoint folder")
    state = read_state(Path(folder))
    if options.json:
        print(json.dumps(state))
    else:
        try:
            text = render_state(state)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"--status {folder}: the state of the job is damaged ({error!r}); a running job "
                "will write it again"
            ) from None
        show(text)
    return 0


def _run(options: argparse.Namespace) -> int:
    from megatron.adaptive.cluster.incarnation import JobSpec, is_trainer
    from megatron.adaptive.cluster.layout_rule import parse_requested
    from megatron.adaptive.cluster.manager import Manager, Participant

    script = options.script
    if script is None:
        raise ConfigError(f"train elastic requires a script; pass one, such as {_TRAINER}")
    if str(script) == _FINETUNE and not script.is_file():
        script = options.script = Path(__file__).with_name("finetune.py")
    if not script.is_file():
        raise ConfigError(
            f"train elastic: {script}: no such file; pass a script, such as {_TRAINER}"
        )
    is_pipeline = not is_trainer(script) if options.runs is None else options.runs == "pipeline"
    folder: Path | str | None
    if is_pipeline:
        arguments, folder = _pipeline_arguments(options)
        # This setting has no effect if the script does not write traces, because slow nodes are
        # detected from traces.
        on_straggler: Policy = options.on_straggler or "replan"
    else:
        folder = options.checkpoint or last_value(options.arguments, _SAVE)
        if not folder:
            raise ConfigError(
                "train elastic: a job that changes its layout requires checkpoints; add "
                "--checkpoint DIR or --save"
            )
        arguments = (*options.arguments, _SAVE, str(folder))
        # Parse the trainer's arguments here, so that errors are reported before any process is
        # started.
        requested = parse_requested(arguments)
        on_straggler = _on_straggler(options.on_straggler, requested.schedule)
        _check_probes(options.on_failed_probe, requested.run.probe_interval)
    values = vars(options)
    spec = JobSpec(
        **{
            spec_field.name: values[spec_field.name]
            for spec_field in fields(JobSpec)
            if spec_field.name in values
        }
        | {"script": script.resolve(), "arguments": arguments, "on_straggler": on_straggler},
        checkpoints=Path(folder).resolve(),
        is_pipeline=is_pipeline,
    )
    with contextlib.ExitStack() as stack:
        chooser = _chooser(options, spec, stack)
        if spec.machines is not None:
            return asyncio.run(Manager(spec, chooser).run())
        part = Participant(
            spec,
            chooser,
            name=options.name or socket.gethostname(),
            slots=options.slots,
            is_local=options.address == "127.0.0.1",
        )
        return asyncio.run(part.run())


def _pipeline_arguments(options: argparse.Namespace) -> tuple[tuple[str, ...], Path]:
    """Returns the arguments and the checkpoint folder for a script that trains a ``Pipeline``."""
    reason = f"{options.script.name} counts as a script that trains a Pipeline, because it does"
    reason += " not parse the trainer's arguments"
    if options.checkpoint is None:
        raise ConfigError(
            f"train elastic: {reason}; pass the folder of its checkpoints as --checkpoint DIR, "
            "or add --runs trainer"
        )
    if options.on_failed_probe == "exclude":
        raise ConfigError(
            f"--on-failed-probe exclude: {reason}, and only the trainer probes nodes; remove the "
            "flag, or add --runs trainer"
        )
    if options.unequal:
        raise ConfigError(
            f"--unequal: {reason}, and all stages of a Pipeline have the same number of replicas; "
            "remove the flag, or add --runs trainer"
        )
    if options.plan_with:
        raise ConfigError(
            f"--plan-with: {reason}, and the job plans the layouts of a Pipeline from "
            "measurements; remove the flag, or add --runs trainer"
        )
    return tuple(options.arguments), options.checkpoint


def _on_straggler(wished: Policy | None, schedule: ScheduleConfig) -> Policy:
    """Returns the reaction to slow nodes, and checks that slow nodes can be detected.

    Args:
        wished: Reaction that the user has selected, or ``None`` for the default.
        schedule: Schedule settings of the trainer, including those of the diagnosis.
    """
    is_diagnosed = schedule.trace_dir is not None and schedule.diagnose_interval > 0
    if wished in ("replan", "exclude") and not is_diagnosed:
        problem = "--diagnose-interval 0" if schedule.trace_dir is not None else "no --trace-dir"
        raise ConfigError(
            f"--on-straggler {wished} cannot detect slow nodes with {problem}, because slow nodes "
            "are detected from traces; add --trace-dir DIR and a positive --diagnose-interval to "
            "the trainer's flags"
        )
    return wished or ("replan" if is_diagnosed else "ignore")


def _check_probes(wished: ProbePolicy, interval: int) -> None:
    """Raises an error if nodes that fail a probe should be excluded, but no probe is configured."""
    if wished == "exclude" and not interval:
        raise ConfigError(
            "--on-failed-probe exclude requires probes; add a positive --probe-interval to the "
            "trainer's flags"
        )


def _chooser(options: argparse.Namespace, spec: JobSpec, stack: contextlib.ExitStack) -> Chooser:
    """Creates and returns the object that chooses the layouts of a job.

    If the object runs a planner, the exit stack ``stack`` closes the object.
    """
    from megatron.adaptive.cluster.incarnation import model_file
    from megatron.adaptive.cluster.job_state_file import say
    from megatron.adaptive.cluster.layout_rule import Chooser

    if not spec.is_pipeline and not options.plan_with:
        if options.unequal:
            raise ConfigError(
                "--unequal requires the planner; add --plan-with FILE, or remove --unequal"
            )
        return Chooser()
    from megatron.adaptive.cluster.layout_planner import PlannerChooser

    # This variable must be set before numpy is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    model = model_file(spec.checkpoints) if spec.is_pipeline else None
    arguments = options.plan_with, spec.arguments, options.plan_s
    chooser = PlannerChooser(*arguments, unequal=options.unequal, model=model)
    stack.enter_context(contextlib.closing(chooser))
    if model is None and (late := chooser.check(spec.machines)):
        say(f"warning: the planner found no plan ({late}); a simple rule may choose layouts")
    return chooser
