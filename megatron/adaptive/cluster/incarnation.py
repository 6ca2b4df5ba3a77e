"""Describes what the ranks of a job run, where each one runs, and how an incarnation ended.

=============  ================================  ==========================================
               the trainer                       a script with a ``Pipeline``
=============  ================================  ==========================================
gets           flags after the user's own        one environment variable, ``config.environment``
checkpoints    ``CheckpointFolder``              ``PipelineFolder``
layout for     its arguments                     what its ranks measured at the first start
=============  ================================  ==========================================
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
# These flags apply if a run starts from another run's checkpoint, not if it resumes from its own.
_FIRST_ONLY = ("--finetune", "--no-load-optim", "--no-load-rng", "--ckpt-step")


class Program(ABC):
    """Describes the program that the ranks of a job run.

    Args:
        folder: Folder of its checkpoints.
    """

    def __init__(self, folder: CheckpointFolder | PipelineFolder) -> None:
        self.folder = folder

    def check(self) -> None:
        """Checks that ranks can resume from the folder of checkpoints.

        The ranks themselves refuse a checkpoint with pickles, if they must not trust it.

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
        """Returns arguments and additional environment variables for the ranks of one start.

        Args:
            layout: Layout of the ranks.
            incarnation: Number of the incarnation.
            resumed: Iteration that they resume from, 0 for none.
            progress: Folder where they write their progress.
        """

    def goes_on(self, before: IncarnationProgress, statuses: Iterable[int]) -> str:
        """Returns why a job continues after its ranks ended in good order, empty if it is finished.

        Args:
            before: Progress that the ranks wrote.
            statuses: Exit statuses of the ranks.

        Raises:
            SetupError: The ranks did not do what a job needs.
        """
        return ""


class TrainerProgram(Program):
    """Runs the trainer of this project, which has flags for everything that a job needs.

    Args:
        arguments: The user's arguments.
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
    """Runs a script that trains a ``Pipeline`` in ``Pipeline.loop``.

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
            # Dropout masks depend on the microbatch size, so the first size chosen stays.
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
                    f"{self._name} gave another model, sample or settings at each of"
                    f" {_MOST_MEASURED} starts: build the same Pipeline at every start"
                )
            return "the model was measured"
        self._measured = 0
        if before.begun_ns is None:
            raise SetupError(
                f"{self._name} ended without training: a job that changes its layout needs a script"
                " that builds a megatron.adaptive.Pipeline and trains in `for step in"
                " pipeline.loop(...)`; see docs/elastic.md"
            )
        return ""


def model_file(checkpoints: Path) -> Path:
    """Returns the path of the file with the measured costs of the script's model."""
    return job_folder(checkpoints) / _MODEL


def is_trainer(script: Path) -> bool:
    """Returns whether a script is the trainer, or calls it, judged by its name and text."""
    if script.stem == _TRAINER:
        return True
    try:
        return _TRAINER.encode() in read_whole(script)
    except OSError:
        return True  # the rank that runs it reports the error


Policy = Literal["ignore", "replan", "exclude"]
"""Reactions to a node that stays slow."""

NODE_VARIABLE = "MEGATRON_ADAPTIVE_NODE"
"""Environment variable that gives a rank the name of its node in the job."""
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
"""Exit status of a node that left while the job continues; the node may join again."""


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """Describes the job to run.

    Attributes:
        script: Script of every rank.
        arguments: The user's arguments for the script.
        checkpoints: Folder of checkpoints, on storage that all nodes share.
        machines: Path of the machines file, ``None`` if nodes join by themselves.
        nodes: Number of nodes to wait for before the first start, if they join by themselves.
        join_s: Time limit for these nodes to join, in seconds.
        wait_s: Time in seconds to wait for nodes if no layout fits those that are present.
        stop_s: Time limit in seconds for ranks to finish their step and to save.
        max_restarts: Most failures in a row without a checkpoint between them.
        address: Address at which other machines reach the manager, ``None`` to detect it.
        copy_every: Number of steps between copies of the state in memory, 0 for no copies.
        copy_bytes: Most memory for copies on a node in bytes, ``None`` for what is available.
        on_straggler: Reaction to a node that stays slow.
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
    is_pipeline: bool = False

    @property
    def copy_settings(self) -> dict[str, Any] | None:
        """Returns the settings of snapshots, ``None`` if none are kept."""
        if not self.copy_every:
            return None
        return {"every": self.copy_every, "limit_bytes": self.copy_bytes}

    @property
    def program(self) -> Program:
        """Returns the program of the ranks."""
        if self.is_pipeline:
            return ScriptProgram(self.script, self.arguments, self.checkpoints)
        return TrainerProgram(self.arguments, self.checkpoints)

    @property
    def work(self) -> NodeWork:
        """Returns the work of every node."""
        return NodeWork(
            script=str(self.script), arguments=self.arguments, checkpoints=str(self.checkpoints)
        )


@dataclass(frozen=True, kw_only=True)
class NodeWork:
    """Defines what a node runs, and so limits what a manager can order it to run.

    Attributes:
        script: Script of every rank.
        arguments: The user's arguments for the script.
        checkpoints: Folder of the job; orders may name paths only inside it.
    """

    script: str
    arguments: tuple[str, ...]
    checkpoints: str

    def order(self, rank: Mapping[str, Any], *, is_restore: bool) -> dict[str, Any]:
        """Returns the order to the forkserver for a process that the manager requests.

        The script and the working folder are always this node's own.

        Args:
            rank: Entry of :func:`rank_orders`.
            is_restore: Whether to run the program that restores snapshots.

        Raises:
            SetupError: The manager named a variable or a path that it may not name.
        """
        key = rank["key"]
        variables = rank["variables"]
        arguments = rank["arguments"]
        if others := sorted(set(variables) - _VARIABLES):
            raise SetupError(f"the manager set {others[0]}, which is none of its variables")
        if is_restore:
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
                    f"the manager named {path}, which is neither in {allowed} nor among this node's"
                    " own arguments: start every node of a job with the same command"
                )
        return {
            "key": key,
            "variables": dict(variables),
            "script": str(Path(snapshot_restore.__file__).resolve()) if is_restore else self.script,
            "arguments": list(arguments),
            "folder": os.getcwd(),
        }

    def _paths(self, arguments: Sequence[str]) -> Iterator[str]:
        """Yields the paths in arguments, except those that the user's own arguments contain."""
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
    """Tracks the ranks of one incarnation.

    Attributes:
        incarnation: Incarnation that they run.
        layout: Their layout.
        folder: Folder where they write their progress.
        where: Name of each rank's node by the rank's key, in the order of the ranks.
        statuses: Exit statuses of the ranks that ended, by key.
        stopping: Reason why they were asked to save and end, empty if they were not.
        fault: First failure, or a kill by a signal that was noticed soon after it.
        has_kill: Whether ``fault`` is a signal from outside.
        gone: Description of the first loss of a node, or of the first departure on notice that took
            a rank along.
        deadline_s: Time at which the remaining ranks are killed, ``None`` for no such time.
        killed: Whether they were killed.
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
        """Returns the ranks that have not ended."""
        return set(self.where) - set(self.statuses)

    def record_fault(
        self, fault: str, deadline_s: float, *, gone: str = "", kill: bool = False
    ) -> None:
        """Records the first failure; the other ranks get some time to report it.

        Args:
            fault: Description of the failure.
            deadline_s: Time by which the other ranks must have reported, on the clock of other
                deadlines.
            kill: Whether a signal from outside ended a rank. It counts as the cause even if another
                rank, which lost this peer, was seen to end first.
            gone: Description of the loss or departure of a node, if that is the cause. Ranks that
                cannot reach the node may end before it counts as lost.
        """
        self.gone = self.gone or gone
        if not self.fault or (kill and not self.killed and not self.has_kill):
            self.fault = fault
            self.has_kill = kill
        if not self.killed:
            self.deadline_s = earliest(self.deadline_s, deadline_s)


def earliest(*moments: float | None) -> float | None:
    """Returns the earliest of some times; ``None`` stands for never."""
    return min((moment for moment in moments if moment is not None), default=None)


def ended_well(status: int) -> bool:
    """Returns whether an exit status means that a rank ended in good order."""
    return status in (0, EXIT_MEASURED)


def how_ended(status: int) -> str:
    """Describes how a process ended, by its exit status."""
    if status < 0:
        return f"was killed by signal {signal.Signals(-status).name}"
    return f"ended with status {status}"


def assign(nodes: Sequence[Node], layout: ParallelLayout) -> list[Node]:
    """Assigns the ranks of a layout to nodes in turn; tensor-parallel groups stay on one node.

    Args:
        nodes: Nodes with enough slots, in the order of the ranks unless the layout has its own
            order.
        layout: Layout to run.

    Returns:
        Node of each rank; shorter than the world size if nodes are missing.
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
    """Returns the orders to the agent of each node, with torchrun's environment for each rank.

    The nodes themselves know which script to run, see :class:`NodeWork`.

    Args:
        arguments: Arguments of the script.
        places: Node of each rank.
        incarnation: Number of the incarnation that begins.
        variables: Environment variables of all ranks.
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
