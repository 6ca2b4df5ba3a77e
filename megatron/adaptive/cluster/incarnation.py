"""Describes what the ranks of a job run, where each runs, and how an incarnation of them ended.

=============  ================================  ==========================================
               the trainer                       a script with a ``Pipeline``
=============  ================================  ==========================================
gets           flags after the user's own        one environment variable, ``config.environment``
checkpoints    ``CheckpointFolder``              ``PipelineFolder``
layout for     its arguments                     what its ranks measured, at the first start
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
# How a run begins that has a checkpoint of another one; not how it goes on from its own.
_PATH_FLAGS = ("--save", "--load", "--progress-dir", _TRACES)
_FIRST_ONLY = ("--finetune", "--no-load-optim", "--no-load-rng", "--ckpt-step")


class Program(ABC):
    """Describes what the ranks of a job run.

    Args:
        folder: of its checkpoints.
    """

    def __init__(self, folder: CheckpointFolder | PipelineFolder) -> None:
        self.folder = folder

    def check(self) -> None:
        """Refuses a folder of checkpoints that ranks could not go on from.

        One that holds pickles is refused by the ranks, where they are not to trust it.

        Raises:
            CheckpointError: none in it is whole.
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
        """Returns arguments and further variables of the ranks of one start.

        Args:
            layout: of them.
            incarnation: its number.
            resumed: the iteration that they go on from, 0 for none.
            progress: folder where they write their progress.
        """

    def goes_on(self, before: IncarnationProgress, statuses: Iterable[int]) -> str:
        """Explains why a job goes on whose ranks ended in good order, empty where it need not.

        Args:
            before: what they wrote.
            statuses: that they ended with.

        Raises:
            SetupError: they did not do what a job needs.
        """
        return ""


class TrainerProgram(Program):
    """Runs the trainer of this project, which has flags for all that a job needs.

    Args:
        arguments: as the user gave them.
        checkpoints: their folder.
    """

    folder: CheckpointFolder

    def __init__(self, arguments: Sequence[str], checkpoints: Path) -> None:
        super().__init__(CheckpointFolder(checkpoints))
        self._arguments = arguments

    def command(
        self, layout: ParallelLayout, incarnation: int, resumed: int, progress: Path
    ) -> tuple[list[str], dict[str, str]]:
        words = flags_where(self._arguments, lambda name: not resumed or name not in _FIRST_ONLY)
        if traces := last_value(words, _TRACES):
            words += [_TRACES, f"{traces}/epoch-{incarnation}"]
        checkpoints = str(self.folder.path)
        words += [*layout.flags, "--save", checkpoints, "--progress-dir", str(progress)]
        if resumed:
            words += ["--load", checkpoints]
        return words, {}


class ScriptProgram(Program):
    """Runs a script that trains a ``Pipeline`` in ``Pipeline.loop``.

    Args:
        path: of the script.
        arguments: as the user gave them; its own.
        checkpoints: their folder.
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
        known = None if layout.is_to_be_measured else MeasuredModule.read(self._model)
        if known is not None and known.is_random and known.micro_batch_size is None:
            # Dropout draws for a microbatch.
            replace(known, micro_batch_size=layout.micro_batch).write(self._model)
        order = JobOrder(
            checkpoints=str(self.folder.path),
            progress=str(progress),
            model=str(self._model),
            epoch=incarnation,
            signature="" if known is None else known.signature,
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
    """Returns the file of what a job measured of the model of its script."""
    return job_folder(checkpoints) / _MODEL


def is_trainer(script: Path) -> bool:
    """Returns whether a script is the trainer, or calls it, by its name or its text."""
    if script.stem == _TRAINER:
        return True
    try:
        return _TRAINER.encode() in read_whole(script)
    except OSError:
        return True  # who runs it will say what is wrong


Policy = Literal["ignore", "replan", "exclude"]
"""Answers to a node that stays slow."""

NODE_VARIABLE = "MEGATRON_ADAPTIVE_NODE"
"""Gives a rank the name of its node in the job."""
_VARIABLES = frozenset(
    (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR"),
        *("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
        *(NODE_VARIABLE, JOB_VARIABLE, "MEGATRON_ADAPTIVE_LEASE"),
    )
)
EXIT_LEFT = 75
"""A node that left a job which goes on without it: it may come back."""


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """Describes what is to be run.

    Attributes:
        script: of every rank.
        arguments: of the script, as the user gave them.
        checkpoints: folder of checkpoints, on storage that all nodes share.
        machines: file of machines, ``None`` where nodes come by themselves.
        nodes: to wait for before the first start, where they come by themselves.
        join_s: how long to wait for them.
        wait_s: how long to wait for nodes when no layout fits those that are there.
        stop_s: how long ranks have to come to the end of a step and to save.
        max_restarts: failures in a row without a checkpoint between them.
        address: at which other machines reach the manager, ``None`` to find out.
        copy_every: steps from one copy of the state in memory to the next, 0 for none.
        copy_bytes: that copies may take on a node, ``None`` for what is there.
        on_straggler: what is done about a node that stays slow.
        is_pipeline: whether the script trains a ``Pipeline``, and has arguments of its own.
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
        """Returns how snapshots are kept, ``None`` for not at all."""
        if not self.copy_every:
            return None
        return {"every": self.copy_every, "limit_bytes": self.copy_bytes}

    @property
    def program(self) -> Program:
        """Returns what the ranks run."""
        if self.is_pipeline:
            return ScriptProgram(self.script, self.arguments, self.checkpoints)
        return TrainerProgram(self.arguments, self.checkpoints)

    @property
    def work(self) -> NodeWork:
        """Returns what every node runs."""
        return NodeWork(
            script=str(self.script), arguments=self.arguments, checkpoints=str(self.checkpoints)
        )


@dataclass(frozen=True, kw_only=True)
class NodeWork:
    """Says what a node runs, and thereby what a manager can order it to.

    Attributes:
        script: of every rank.
        arguments: of the script, as the user gave them.
        checkpoints: folder of the job, outside of which an order names no path.
    """

    script: str
    arguments: tuple[str, ...]
    checkpoints: str

    def order(self, rank: Mapping[str, Any], *, is_restore: bool) -> dict[str, Any]:
        """Returns the order to the forkserver for a process that the manager wants.

        Program and working folder are this node's own.

        Args:
            rank: an entry of :func:`rank_orders`.
            is_restore: for the program that restores snapshots.

        Raises:
            SetupError: the manager named what it may not name.
        """
        key, variables, arguments = rank["key"], rank["variables"], rank["arguments"]
        if others := sorted(set(variables) - _VARIABLES):
            raise SetupError(f"the manager set {others[0]}, which is none of its variables")
        if is_restore:
            paths = [parse_json(arguments[0])["checkpoints"]]
        else:
            paths = list(self._paths(arguments))
        if text := variables.get(JOB_VARIABLE):
            named = JobOrder.from_text(text)
            paths += [named.checkpoints, named.progress, named.model]
        own = Path(self.checkpoints).resolve()
        for path in paths:
            if not Path(path).resolve().is_relative_to(own):
                raise SetupError(
                    f"the manager named {path}, which is neither in {own} nor among this node's own"
                    " arguments: start every node of a job with the same command"
                )
        return {
            "key": key,
            "variables": dict(variables),
            "script": str(Path(snapshot_restore.__file__).resolve()) if is_restore else self.script,
            "arguments": list(arguments),
            "folder": os.getcwd(),
        }

    def _paths(self, arguments: Sequence[str]) -> Iterator[str]:
        """Yields paths among arguments that are not the user's own."""
        for before, word in zip(("", *arguments), arguments, strict=False):
            name, equals, value = word.partition("=")
            if not (equals and name.startswith("--")):
                name, value = before, word
            base, _, number = value.rpartition("/epoch-")
            if word in self.arguments or (base in self.arguments and number.isdigit()):
                continue
            if name in _PATH_FLAGS or "/" in value:
                yield value


@dataclass(kw_only=True, eq=False)
class RunningRanks:
    """Tracks the ranks of one incarnation.

    Attributes:
        incarnation: what they run.
        layout: their layout.
        folder: where they write their progress.
        where: the node of each rank, by key, in the order of the ranks.
        statuses: of the ranks that ended, by key.
        stopping: why they were asked to save and end.
        fault: what went wrong first, or the kill that came to light soon after.
        has_kill: whether that is a signal from outside.
        gone: the first node that was lost, or went with notice and took a rank along, in words.
        deadline_s: when the rest is killed.
        killed: whether it was.
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

    def at_fault(
        self, fault: str, deadline_s: float, *, gone: str = "", kill: bool = False
    ) -> None:
        """Records what went wrong first; the other ranks get a moment to report it.

        Args:
            fault: what went wrong.
            deadline_s: Time by which they must have reported, on the clock of other deadlines.
            kill: whether a signal from outside ended a rank. It is the cause also where a rank that
                lost this peer was seen to end before it.
            gone: what became of a node, where that is why. Ranks that cannot reach it may end, and
                be seen to, before it counts as lost.
        """
        self.gone = self.gone or gone
        if not self.fault or (kill and not self.killed and not self.has_kill):
            self.fault, self.has_kill = fault, kill
        if not self.killed:
            self.deadline_s = earliest(self.deadline_s, deadline_s)


def earliest(*moments: float | None) -> float | None:
    """Returns the first of some moments, ``None`` for never."""
    return min((one for one in moments if one is not None), default=None)


def is_well(status: int) -> bool:
    """Returns whether a rank that ended with a status did so in good order."""
    return status in (0, EXIT_MEASURED)


def how_ended(status: int) -> str:
    """Describes how a process ended."""
    if status < 0:
        return f"was killed by signal {signal.Signals(-status).name}"
    return f"ended with status {status}"


def assign(nodes: Sequence[Node], layout: ParallelLayout) -> list[Node]:
    """Lays the ranks of a layout on nodes in turn; tensor-parallel groups stay whole.

    Args:
        nodes: with slots enough, in the order of the ranks where the layout has no other.
        layout: what is to be run.

    Returns:
        The node of each rank; of fewer ranks where nodes are missing.
    """
    places: list[Node] = []
    by_name = {node.name: node for node in nodes}
    for name, most in layout.places or [(node.name, node.slots) for node in nodes]:
        if name in by_name:
            most = most // layout.tensor * layout.tensor
            places += [by_name[name]] * min(layout.world_size - len(places), most)
    return places


def rank_orders(
    arguments: Sequence[str], places: Sequence[Node], incarnation: int, variables: Mapping[str, str]
) -> dict[str, list[dict[str, Any]]]:
    """Returns the orders to the agent of each node; ranks have the environment of torchrun.

    What they run is for the nodes to know, see :class:`NodeWork`.

    Args:
        arguments: of the script.
        places: nodes of the ranks.
        incarnation: number of the one that they begin.
        variables: that all ranks get.
    """
    counts = Counter(node.name for node in places)
    groups = {name: number for number, name in enumerate(counts)}
    orders: dict[str, list[dict[str, Any]]] = {name: [] for name in counts}
    for rank, node in enumerate(places):
        own = {
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
                "variables": {**{name: str(value) for name, value in own.items()}, **variables},
                "arguments": list(arguments),
            }
        )
    return orders
