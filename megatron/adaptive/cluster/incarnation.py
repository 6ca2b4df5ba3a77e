"""Describes which program a job's ranks run, on which nodes they run, and how they exited.

An incarnation is the period from the start of the ranks in one layout until the last rank exits. A
job runs either this project's trainer or the user's script with a ``Pipeline``:

==================  ================================  ==========================================
                    the trainer                       a script with a ``Pipeline``
==================  ================================  ==========================================
gets the layout by  flags after the user's own flags  one environment variable (``JobOrder``)
checkpoints in      ``CheckpointFolder``              ``PipelineFolder``
layout chosen from  the trainer's arguments           measurements during the first start
==================  ================================  ==========================================
"""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from megatron.adaptive.checkpoint import snapshot_restore
from megatron.adaptive.checkpoint.folder import CheckpointFolder, PipelineFolder
from megatron.adaptive.cluster.job_state_file import Incarnation, IncarnationProgress, job_folder
from megatron.adaptive.cluster.layout_rule import ParallelLayout
from megatron.adaptive.cluster.membership import Node
from megatron.adaptive.config.command_parser import flags_where, last_value
from megatron.adaptive.config.environment import EXIT_MEASURED, JOB_VARIABLE, JobOrder
from megatron.adaptive.config.input_files import parse_json, read_whole
from megatron.adaptive.errors import DamagedCheckpointError, SetupError
from megatron.adaptive.planner.measured_module import MeasuredModule

_TRAINER = "pretrain_gpt"
_MODEL = "model.json"
_TRACES = "--trace-dir"
_MOST_MEASURED = 3
_PATH_FLAGS = ("--save", "--load", "--progress-dir", _TRACES)
# A run that starts from another run's checkpoint uses these flags. When a job resumes from its own
# checkpoint, these flags are removed.
_FIRST_ONLY = ("--finetune", "--no-load-optim", "--no-load-rng", "--ckpt-step")


class Program(ABC):
    """Program that the ranks of a job run.

    Args:
        folder: Folder of the program's checkpoints.
    """

    def __init__(self, folder: CheckpointFolder | PipelineFolder) -> None:
        self.folder = folder

    def check(self) -> None:
        """Checks that the folder contains an intact checkpoint, if it contains any checkpoints.

        Checkpoints that contain pickles are accepted here. The ranks refuse them later if the user
        has not allowed pickles.

        Raises:
            CheckpointError: The folder contains checkpoints, but none is intact.
        """
        damaged: DamagedCheckpointError | None = None
        for step in self.folder.candidates():
            try:
                self.folder.open(step, trust=True)
            except DamagedCheckpointError as error:
                damaged = damaged or error
            else:
                return
        if damaged is not None:
            raise damaged

    @abstractmethod
    def command(
        self, layout: ParallelLayout, incarnation: int, resumed: int, progress: Path
    ) -> tuple[list[str], dict[str, str]]:
        """Returns the arguments and environment variables for the ranks of an incarnation.

        Args:
            layout: Layout of the ranks.
            incarnation: Number of the incarnation (a start of all ranks in one layout), counted
                from 1.
            resumed: Iteration of the checkpoint that the ranks resume from; 0 if there is no
                checkpoint.
            progress: Folder to which the ranks write their progress.
        """

    def goes_on(self, before: IncarnationProgress, statuses: Iterable[int]) -> str:
        """Returns the reason to restart ranks that have exited without failures.

        An empty string means that the job is finished.

        Args:
            before: Progress that the ranks have written.
            statuses: Exit statuses of the ranks.

        Raises:
            SetupError: The ranks exited without training, or built a different model at each start.
        """
        return ""


class TrainerProgram(Program):
    """Runs this project's trainer, and passes the layout and the folders to it as flags.

    Args:
        arguments: The user's arguments for the trainer.
        checkpoints: Folder of checkpoints.
    """

    folder: CheckpointFolder

    def __init__(self, arguments: Sequence[str], checkpoints: Path) -> None:
        super().__init__(CheckpointFolder(checkpoints))
        self._arguments = arguments

    def command(
        self, layout: ParallelLayout, incarnation: int, resumed: int, progress: Path
    ) -> tuple[list[str], dict[str, str]]:
        arguments = flags_where(
            self._arguments, lambda name: not resumed or name not in _FIRST_ONLY
        )
        if traces := last_value(arguments, _TRACES):
            arguments += [_TRACES, f"{traces}/epoch-{incarnation}"]
        checkpoints = str(self.folder.path)
        arguments += [*layout.flags, "--save", checkpoints, "--progress-dir", str(progress)]
        if resumed:
            arguments += ["--load", checkpoints]
        return arguments, {}


class ScriptProgram(Program):
    """Runs a user's script that trains a ``Pipeline`` in ``Pipeline.loop``.

    Args:
        path: Path of the script.
        arguments: The user's arguments for the script.
        checkpoints: Folder of checkpoints.
    """

    folder: PipelineFolder

    def __init__(self, path: Path, arguments: Sequence[str], checkpoints: Path) -> None:
        super().__init__(PipelineFolder(checkpoints))
        self._name = path.name
        self._arguments = arguments
        self._model = model_file(checkpoints)
        self._measured = 0

    def command(
        self, layout: ParallelLayout, incarnation: int, resumed: int, progress: Path
    ) -> tuple[list[str], dict[str, str]]:
        measured = None if layout.is_to_be_measured else MeasuredModule.read(self._model)
        if measured is not None and measured.is_random and measured.micro_batch_size is None:
            # Random numbers, such as dropout masks, depend on the microbatch size. Record the
            # microbatch size of the first layout in the model's file, so that later layouts keep
            # it.
            replace(measured, micro_batch_size=layout.micro_batch).write(self._model)
        order = JobOrder(
            checkpoints=str(self.folder.path),
            progress=str(progress),
            model=str(self._model),
            epoch=incarnation,
            signature="" if measured is None else measured.signature,
            pipeline_size=layout.pipeline,
            replicas=layout.data,
            micro_batch_size=layout.micro_batch,
            partition=layout.partition,
        )
        return list(self._arguments), {JOB_VARIABLE: order.to_text()}

    def goes_on(self, before: IncarnationProgress, statuses: Iterable[int]) -> str:
        if EXIT_MEASURED in statuses:
            self._measured += 1
            if self._measured > _MOST_MEASURED:
                raise SetupError(
                    f"{self._name} built a Pipeline with a different model, sample or settings at "
                    f"each of {_MOST_MEASURED} starts; build the same Pipeline at every start"
                )
            return "the model was measured"
        self._measured = 0
        if before.begun_ns is None:
            raise SetupError(
                f"{self._name} exited without training; build a megatron.adaptive.Pipeline in the "
                "script, and train in `for step in pipeline.loop(...)` (see docs/elastic.md)"
            )
        return ""


def model_file(checkpoints: Path) -> Path:
    """Returns the path of the file with the measured costs of a script's model.

    ``checkpoints`` is the folder of the job's checkpoints.
    """
    return job_folder(checkpoints) / _MODEL


def is_trainer(script: Path) -> bool:
    """Returns whether ``script`` is the trainer itself, or mentions the trainer in its code."""
    if script.stem == _TRAINER:
        return True
    try:
        return _TRAINER.encode() in read_whole(script)
    except OSError:
        return True  # The script cannot be read. Let a rank report this error.


Policy = Literal["ignore", "replan", "exclude"]
"""Reaction to a node that stays slow: ignore it, give it fewer layers, or exclude it."""

ProbePolicy = Literal["report", "exclude"]
"""Reaction to a node that fails its probe: report it, or exclude it until it passes."""

NodeProgram = Literal["script", "restore", "check"]
"""Program that a manager may ask a node to run.

``script`` is the job's script, ``restore`` restores snapshots, and ``check`` measures a node that
failed its probe."""
CHECK_S = 120.0
"""Time in seconds that a manager waits for a node to measure a device."""
_CHECK_LIMIT_S = 110
"""Timeout in seconds after which the node itself ends the measurement of a device."""
_CHECK = Path(__file__).resolve().parents[1] / "profiling" / "node_check.py"

NODE_VARIABLE = "MEGATRON_ADAPTIVE_NODE"
"""Environment variable that contains the name of a rank's node."""
_VARIABLES = frozenset(
    (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        NODE_VARIABLE,
        JOB_VARIABLE,
        "MEGATRON_ADAPTIVE_LEASE",
    )
)
"""Environment variables that a manager may set for the ranks of a node."""

EXIT_LEFT = 75
"""Exit status of a node that has left a job still in progress. The node may join the job again."""


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """Description of the job to run.

    Attributes:
        script: Path of the script that each rank runs.
        arguments: The user's arguments for the script.
        checkpoints: Folder of checkpoints, in storage that all nodes share.
        machines: Path of the machines file, or ``None`` if nodes join by themselves.
        nodes: Number of nodes to wait for before the first start, if nodes join by themselves.
        join_s: Timeout in seconds for nodes to join before the first start.
        wait_s: Time in seconds to wait for more nodes if no layout fits the available nodes.
        stop_s: Timeout in seconds for ranks to finish the current step and save a checkpoint.
        max_restarts: Maximum number of consecutive failures without a new checkpoint in between.
        address: Address at which other machines can reach the manager, or ``None`` to detect it.
        copy_every: Number of steps between in-memory copies of the training state; 0 for no copies.
        copy_bytes: Maximum size of the copies on a node in bytes, or ``None`` to use the available
            memory.
        on_straggler: Reaction to a node that stays slow.
        on_failed_probe: Reaction to a node that fails a probe of the running job.
        is_pipeline: Whether the script trains a ``Pipeline`` and parses its own arguments.
    """

    script: Path
    arguments: tuple[str, ...]
    checkpoints: Path
    machines: Path | None = None
    nodes: int = 1
    join_s: float = 60.0
    wait_s: float = 600.0
    stop_s: float = 600.0
    max_restarts: int = 3
    address: str | None = None
    copy_every: int = 0
    copy_bytes: int | None = None
    on_straggler: Policy = "ignore"
    on_failed_probe: ProbePolicy = "report"
    is_pipeline: bool = False

    @property
    def copy_settings(self) -> dict[str, Any] | None:
        """Returns the interval and memory limit of in-memory copies, or ``None`` for no copies."""
        if not self.copy_every:
            return None
        return {"every": self.copy_every, "limit_bytes": self.copy_bytes}

    @property
    def program(self) -> Program:
        """Returns the program that the ranks run: the trainer, or a script with a ``Pipeline``."""
        if self.is_pipeline:
            return ScriptProgram(self.script, self.arguments, self.checkpoints)
        return TrainerProgram(self.arguments, self.checkpoints)

    @property
    def work(self) -> NodeWork:
        """Returns the script and the arguments that each node runs."""
        return NodeWork(
            script=str(self.script), arguments=self.arguments, checkpoints=str(self.checkpoints)
        )


@dataclass(frozen=True, kw_only=True)
class NodeWork:
    """Defines what a node runs. The node rejects all other requests of the manager.

    Attributes:
        script: Path of the script that each rank runs.
        arguments: The user's arguments for the script.
        checkpoints: Folder of checkpoints. A request may only contain paths inside this folder and
            paths that occur in ``arguments``.
    """

    script: str
    arguments: tuple[str, ...]
    checkpoints: str

    def order(self, rank: Mapping[str, Any], program: NodeProgram) -> dict[str, Any]:
        """Converts the manager's request for a process into a command for the node's forkserver.

        The script and the working directory always come from this node, not from the manager.

        Args:
            rank: Request to start a process, as created by :func:`rank_orders`.
            program: Program to run.

        Raises:
            SetupError: The request contains a program, a variable or a path that is not allowed.
        """
        key = rank["key"]
        variables = rank["variables"]
        arguments = rank["arguments"]
        if others := sorted(set(variables) - _VARIABLES):
            raise SetupError(
                f"the manager set the environment variable {others[0]}, which is not allowed"
            )
        scripts = {
            "script": self.script,
            "restore": str(Path(snapshot_restore.__file__).resolve()),
            "check": str(_CHECK),
        }
        if program not in scripts:
            raise SetupError(
                f"the manager requested the unknown program {program!r}; run the same version on "
                "all nodes"
            )
        if program == "restore":
            paths = [parse_json(arguments[0])["checkpoints"]]
        else:
            paths = list(self._paths(arguments))
        if text := variables.get(JOB_VARIABLE):
            named = JobOrder.from_text(text)
            paths += [named.checkpoints, named.progress, named.model]
        allowed = Path(self.checkpoints).resolve()
        for path in paths:
            if not Path(path).resolve().is_relative_to(allowed):
                raise SetupError(
                    f"the manager requested the path {path}, which is neither in {allowed} nor "
                    "among this node's own arguments; start all nodes with the same arguments"
                )
        return {
            "key": key,
            "variables": dict(variables),
            "script": scripts[program],
            "arguments": list(arguments),
            "folder": os.getcwd(),
            "limit_s": _CHECK_LIMIT_S if program == "check" else 0,
        }

    def _paths(self, arguments: Sequence[str]) -> Iterator[str]:
        """Yields the paths in ``arguments`` that do not occur in the user's own arguments."""
        for before, argument in zip(("", *arguments), arguments, strict=False):
            name, equals, value = argument.partition("=")
            if not (equals and name.startswith("--")):
                name = before
                value = argument
            base, _, number = value.rpartition("/epoch-")
            if argument in self.arguments or (base in self.arguments and number.isdigit()):
                continue
            if name in _PATH_FLAGS or "/" in value:
                yield value


@dataclass(kw_only=True, eq=False)
class RunningRanks:
    """State of the ranks during one incarnation (one start of all ranks in a layout).

    Attributes:
        incarnation: Record of the incarnation that the ranks run.
        layout: Layout of the ranks.
        folder: Folder to which the ranks write their progress.
        where: Name of each rank's node. The keys have the form ``incarnation/rank``, and are
            ordered by rank.
        statuses: Exit statuses of the ranks that have exited, with the same keys as ``where``.
        stopping: Reason why the ranks were asked to save and exit, or empty.
        fault: Description of the first failure, or empty. If it turns out later that a signal from
            outside the job killed a rank, this description is replaced.
        has_kill: Whether ``fault`` says that a signal from outside the job killed a rank.
        gone: Description of the first node whose loss or departure made a rank exit, or empty.
        deadline_s: Time in seconds, on the manager's clock, at which the remaining ranks are
            killed; ``None`` if there is no deadline.
        killed: Whether the manager has killed the remaining ranks.
    """

    incarnation: Incarnation
    layout: ParallelLayout
    folder: Path
    where: dict[str, str]
    statuses: dict[str, int] = field(default_factory=dict)
    stopping: str = ""
    fault: str = ""
    has_kill: bool = False
    gone: str = ""
    deadline_s: float | None = None
    killed: bool = False

    @property
    def alive(self) -> set[str]:
        """Returns the keys of all ranks that have not exited."""
        return set(self.where) - set(self.statuses)

    def record_fault(
        self, fault: str, deadline_s: float, *, gone: str = "", kill: bool = False
    ) -> None:
        """Records the failure ``fault``, and the time by which all other ranks must exit.

        Args:
            fault: Description of the failure.
            deadline_s: Time in seconds, on the manager's clock, by which the other ranks must exit.
            kill: Whether a signal from outside the job killed a rank. Such a signal replaces an
                earlier failure as the cause, because peers of the killed rank may fail before the
                kill itself is reported.
            gone: Description of the node loss or departure that caused the failure, or empty. It is
                recorded even after other failures, because ranks that cannot reach the node may
                exit before the node is known to be lost.
        """
        self.gone = self.gone or gone
        if not self.fault or (kill and not self.killed and not self.has_kill):
            self.fault = fault
            self.has_kill = kill
        if not self.killed:
            self.deadline_s = earliest(self.deadline_s, deadline_s)


def earliest(*moments: float | None) -> float | None:
    """Returns the earliest of the deadlines ``moments``, or ``None`` if all of them are ``None``.

    The deadlines are in seconds.
    """
    return min((moment for moment in moments if moment is not None), default=None)


def ended_well(status: int) -> bool:
    """Returns whether ``status`` is the exit status of a successful rank."""
    return status in (0, EXIT_MEASURED)


def how_ended(status: int) -> str:
    """Returns a phrase that describes how a process with the exit status ``status`` ended."""
    if status < 0:
        return f"was killed by signal {signal.Signals(-status).name}"
    return f"exited with status {status}"


def assign(nodes: Sequence[Node], layout: ParallelLayout) -> list[Node]:
    """Assigns ranks to nodes, and returns the node of each rank.

    Ranks fill one node after the other. All ranks of a tensor-parallel group are on the same node.

    Args:
        nodes: Nodes to use. They get ranks in this order, unless the layout specifies its own order
            of nodes.
        layout: Layout to run.

    Returns:
        Node of each rank, ordered by rank. If there are too few nodes, the list is shorter and
        omits the last ranks.
    """
    places: list[Node] = []
    by_name = {node.name: node for node in nodes}
    for name, slots in layout.places or [(node.name, node.slots) for node in nodes]:
        if name in by_name:
            slots = slots // layout.tensor * layout.tensor
            places += [by_name[name]] * min(layout.world_size - len(places), slots)
    return places


def rank_orders(
    arguments: Sequence[str], places: Sequence[Node], incarnation: int, variables: Mapping[str, str]
) -> dict[str, list[dict[str, Any]]]:
    """Returns the requests to start ranks, keyed by the name of the node that receives them.

    Each request contains the environment variables that torchrun would set. It does not contain the
    script, because each node's :class:`NodeWork` defines it.

    Args:
        arguments: Arguments of the script.
        places: Node of each rank, ordered by rank.
        incarnation: Number of the incarnation to start.
        variables: Environment variables to set for all ranks.
    """
    counts = Counter(node.name for node in places)
    groups = {name: number for number, name in enumerate(counts)}
    orders: dict[str, list[dict[str, Any]]] = {name: [] for name in counts}
    for rank, node in enumerate(places):
        rank_variables = {
            "RANK": rank,
            "WORLD_SIZE": len(places),
            "LOCAL_RANK": len(orders[node.name]),
            "LOCAL_WORLD_SIZE": counts[node.name],
            "GROUP_RANK": groups[node.name],
            NODE_VARIABLE: node.name,
        }
        orders[node.name].append(
            {
                "key": f"{incarnation}/{rank}",
                "variables": {
                    **{name: str(value) for name, value in rank_variables.items()},
                    **variables,
                },
                "arguments": list(arguments),
            }
        )
    return orders
