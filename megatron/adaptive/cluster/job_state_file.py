"""Stores the state of a job in JSON files, so that other programs can read it.

::

    <checkpoints>/elastic/state.json                          written by the manager, atomically
    <checkpoints>/elastic/epoch-3-<manager>/progress.jsonl    written by the ranks in the third
                                                              layout (incarnation) of a manager
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from megatron.adaptive.config.input_files import parse_json, printable, read_whole
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.profiling.failed_nodes import FailedNode
from megatron.adaptive.trace.files import Outage
from megatron.adaptive.trace.status_files import PROGRESS_NAME, ProgressTail

_STATE = "state.json"
_FORMAT = 1
_FOLDER = "elastic"
_LISTS = ("machines", "epochs", "earlier")
_NUMBERS = ("unix_ns", "iteration", "total_iterations", "lost_steps")
_EPOCH = "epoch"
_MOST_EARLIER = 1000
MEASURES = "processes that measure the model"
"""Suffix of a layout's description if its ranks only measure the model and do not train."""
_PHASES = ("notice", "checkpoint", "end", "plan", "start", "load", "first_step")


def say(text: str) -> None:
    """Prints the line ``text`` for the user, on stderr if it is an error or a warning."""
    stream = sys.stderr if text.startswith(("error", "warning")) else sys.stdout
    print(f"[elastic] {printable(text)}", file=stream, flush=True)


_NAMED = 8


def some_names(names: Iterable[str]) -> str:
    """Joins ``names`` with commas. If there are many names, replaces the last ones by a count."""
    listed = list(names)
    more = len(listed) - _NAMED
    return ", ".join(listed) if more < _NAMED else f"{', '.join(listed[:_NAMED])} and {more} more"


def job_folder(checkpoints: Path) -> Path:
    """Returns the folder for the state of a job, inside the folder ``checkpoints``."""
    return checkpoints / _FOLDER


def incarnation_folder(job: Path, number: int, manager: str) -> Path:
    """Returns the folder to which the ranks of an incarnation write their progress.

    Args:
        job: Folder of the job's state.
        number: Number of the incarnation, counted from 1 by each manager.
        manager: Name of the manager that started the incarnation.
    """
    return job / f"{_EPOCH}-{number}-{manager}"


@dataclass(kw_only=True)
class Incarnation:
    """One incarnation of the job: the period during which ranks run in one layout.

    Attributes:
        number: Number of the incarnation, counted from 1 by each manager.
        layout: Description of the layout as text.
        processes: Number of processes.
        nodes: Names of the nodes, ordered by rank.
        reason: Reason why the previous incarnation ended; ``start`` for a job's first incarnation.
        resumed: Iteration of the checkpoint that the incarnation resumed from.
        lost_steps: Number of completed steps that have to be repeated.
        source: Origin of the training state: ``start``, ``checkpoint``, ``checkpoint on the
            nodes' own disks`` or ``copies in memory``, followed by the reason if a newer state
            could not be used.
        marks_ns: Times of the events ``notice``, ``ended``, ``planned`` and ``begun`` on the
            manager's clock, in nanoseconds since the Unix epoch, keyed by event.
        phases_s: Duration in seconds of each phase of the change to this layout, keyed by phase
            name.
        before: Last progress of the previous incarnation, or ``None`` for the first incarnation.
        predicted_s: Step time that the planner predicted, in seconds, or ``None`` without a plan.
        step_s: Measured step time in seconds, or ``None`` before any step was measured.
    """

    number: int
    layout: str
    processes: int
    nodes: tuple[str, ...]
    reason: str
    resumed: int = 0
    lost_steps: int = 0
    source: str = ""
    marks_ns: dict[str, int] = field(default_factory=dict)
    phases_s: dict[str, float] = field(default_factory=dict)
    before: IncarnationProgress | None = None
    predicted_s: float | None = None
    step_s: float | None = None

    def begun_at(self, iteration: int | None) -> None:
        """Updates this object if the ranks resumed from an iteration other than ``resumed``.

        Ranks resume from a later iteration if the nodes' local disks contain a newer checkpoint,
        and from an earlier iteration if the newest checkpoint is damaged.

        Args:
            iteration: Iteration that the ranks resumed from, or ``None`` if it is not known yet.
        """
        if iteration is None or iteration == self.resumed:
            return
        self.lost_steps = max(0, self.lost_steps - (iteration - self.resumed))
        if iteration > self.resumed:
            self.source = "checkpoint on the nodes' own disks"
        else:
            self.source = "checkpoint" if iteration else "start"
            self.source += f": the checkpoint of iteration {self.resumed} could not be loaded"
        self.resumed = iteration

    def to_dict(self) -> dict[str, Any]:
        """Returns the entry for this incarnation in the job's state file."""
        return {
            "epoch": self.number,
            "shape": self.layout,
            "processes": self.processes,
            "nodes": list(self.nodes),
            "reason": self.reason,
            "resumed_iteration": self.resumed,
            "lost_steps": self.lost_steps,
            "source": self.source,
            "chosen_by": "rule" if self.predicted_s is None else "planner",
            "predicted_step_s": self.predicted_s,
            "step_s": self.step_s,
            "phases_s": self.phases_s,
        }


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """Rank that a diagnosis of the running job reported as slow.

    Attributes:
        slow_rank: Global rank of the slow rank.
        times: Number of consecutive diagnoses that reported this rank.
        factor: Ratio of this rank's computing time to that of the other ranks.
        pace_ns: Computing time per microbatch and layer in nanoseconds, indexed by rank. It may be
            empty.
    """

    slow_rank: int
    times: int
    factor: float
    pace_ns: Sequence[float] = ()


_STEPS = 1000
_SLOW = tuple(entry.name for entry in fields(SlowRank))


@dataclass(frozen=True, kw_only=True)
class IncarnationProgress:
    """Summary of the progress file written by the ranks of one incarnation.

    Attributes whose names end with ``_ns`` are points in time in nanoseconds since the Unix epoch.
    Each of them is ``None`` until its event happens.

    Attributes:
        total: Number of iterations in the whole training run; 0 if it is not known yet.
        start: Number of iterations completed before this incarnation; ``None`` if it is not known
            yet.
        iteration: Last completed iteration, or ``None`` before the first iteration.
        ended: Reason that the ranks gave when training ended normally, or ``None``.
        begun_ns: Time when the model was built and the checkpoint was loaded.
        loaded_s: Time in seconds that it took to load the checkpoint.
        first_ns: Time when the first step of the incarnation was completed.
        saved_ns: Time when the last checkpoint was completed.
        saving_s: Time in seconds that the last checkpoint blocked training.
        copies: Description of the in-memory copies of the state; empty if it is not known yet.
        step_s: Median step time in seconds over the last 1,000 steps, excluding the first step.
        slow: Ranks that diagnoses reported as slow, in order of the reports.
        failed: Nodes that failed the last probe.
    """

    total: int = 0
    start: int | None = None
    iteration: int | None = None
    ended: str | None = None
    begun_ns: int | None = None
    loaded_s: float = 0.0
    first_ns: int | None = None
    saved_ns: int | None = None
    saving_s: float = 0.0
    copies: str = ""
    step_s: float | None = None
    slow: tuple[SlowRank, ...] = ()
    failed: tuple[FailedNode, ...] = ()


class ProgressReader:
    """Reads the progress files that the ranks of successive incarnations write."""

    def __init__(self) -> None:
        self._begin(Path())

    def _begin(self, folder: Path) -> None:
        self._folder = folder
        self._tail = ProgressTail(folder / PROGRESS_NAME, kept=_STEPS)
        self._now = IncarnationProgress()
        self._steps_ms: deque[float] = deque(maxlen=_STEPS)

    def read(self, folder: Path) -> IncarnationProgress:
        """Reads new lines of the progress file, and returns a summary of all lines read so far.

        Args:
            folder: Folder to which the ranks of one incarnation write their progress.
        """
        if folder != self._folder:
            self._begin(folder)
        for line in self._tail.refresh():
            self._now = replace(self._now, **self._found(line))
        if not self._steps_ms:
            return self._now
        return replace(self._now, step_s=statistics.median(self._steps_ms) / 1e3)

    def _found(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Returns new values for attributes of :class:`IncarnationProgress`, taken from ``line``.

        The values are keyed by attribute name.
        """
        moment_ns = line["unix_ns"]
        now = self._now
        if "total_iterations" in line:
            # The ranks have moved layers among themselves, but were not restarted.
            if line.get("moved"):
                return {}
            start = line.get("start_iteration")
            return {"total": line["total_iterations"], "begun_ns": moment_ns, "start": start}
        if "iteration" in line:
            if now.first_ns is not None:
                self._steps_ms.append(line.get("step_ms") or 0.0)
            return {
                "iteration": line["iteration"],
                "first_ns": moment_ns if now.first_ns is None else now.first_ns,
            }
        if "slow_rank" in line:
            return {"slow": (*now.slow, SlowRank(**{name: line[name] for name in _SLOW}))}
        if isinstance(entries := line.get("failed_nodes"), list):
            nodes = map(FailedNode.from_dict, entries)
            return {"failed": tuple(node for node in nodes if node is not None)}
        if "saved" in line:
            return {"saved_ns": moment_ns, "saving_s": line["seconds"]}
        return {name: line[name] for name in ("loaded_s", "copies", "ended") if name in line}


def phases(incarnation: Incarnation, now: IncarnationProgress) -> dict[str, float]:
    """Returns the duration in seconds of each phase of a layout change, keyed by phase name.

    Phases whose durations are not known yet are omitted.

    Args:
        incarnation: Incarnation that runs the new layout.
        now: Latest progress of this incarnation's ranks.
    """
    marks = incarnation.marks_ns
    before = incarnation.before
    durations_s = dict[str, float]()
    notice = marks.get("notice")
    ended = marks.get("ended")
    if notice is not None and ended is not None:
        saved = None if before is None else before.saved_ns
        if saved is not None and before is not None and saved > notice:
            durations_s["notice"] = (saved - notice) / 1e9 - before.saving_s
            durations_s["checkpoint"] = before.saving_s
            durations_s["end"] = (ended - saved) / 1e9
        else:
            durations_s["end"] = (ended - notice) / 1e9
    if ended is not None:
        durations_s["plan"] = (marks["planned"] - ended) / 1e9
    if now.begun_ns is not None:
        durations_s["start"] = (now.begun_ns - marks["begun"]) / 1e9 - now.loaded_s
        durations_s["load"] = now.loaded_s
        if now.first_ns is not None:
            durations_s["first_step"] = (now.first_ns - now.begun_ns) / 1e9
            first = notice or ended or marks["begun"]
            durations_s["whole"] = (now.first_ns - first) / 1e9
    # Clocks of different machines may differ, so the duration of a short phase may be negative.
    return {name: round(max(0.0, value), 3) for name, value in durations_s.items()}


class StateFile:
    """Writes the state file of a job, including the history of earlier managers.

    In the file, ``lost_steps`` is the number of steps lost under all managers, and ``earlier``
    lists the incarnations that earlier managers started.

    Args:
        folder: Folder of the job's state.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._outage = Outage(folder / _STATE, "states of the job")
        self._before: dict[str, Any] = {}
        self._earlier: list[Any] = []

    def take_over(self, checkpoints: Path) -> int:
        """Reads the state written by an earlier manager, so that later writes include its history.

        Returns:
            Number of machines in the job when the state was written, or 0 if no earlier
            manager wrote a state.
        """
        try:
            self._before = read_state(checkpoints)
        except ConfigError:
            return 0
        self._earlier = [*self._before.get("earlier", []), *self._before.get("epochs", [])]
        machines = self._before.get("machines", [])
        return sum(machine.get("status") == "present" for machine in machines)

    def _with_earlier(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns ``state`` with the incarnations and lost steps of earlier managers added."""
        if not self._earlier:
            return {**state, "earlier": []}
        # This manager's first incarnation resumed from a checkpoint. Steps that the previous
        # manager completed after this checkpoint are repeated, so count them as lost steps.
        repeated = 0
        if state["epochs"]:
            done = self._before.get("iteration", 0)
            repeated = max(0, done - state["epochs"][0]["resumed_iteration"])
        lost = self._before.get("lost_steps", 0) + repeated + state["lost_steps"]
        return {**state, "lost_steps": lost, "earlier": self._earlier[-_MOST_EARLIER:]}

    def write(self, state: Mapping[str, Any]) -> None:
        """Replaces the state file. If writing fails, warns once and keeps the previous file.

        Args:
            state: State of the job since this manager started.
        """
        manager = {"host": socket.gethostname(), "pid": os.getpid()}
        header = {"format": _FORMAT, "manager": manager, "unix_ns": time.time_ns()}
        draft = self._folder / f".{_STATE}.{os.getpid()}"
        try:
            # Write one line per entry. json.dumps(indent=...) cannot be used, because it runs in
            # pure Python and would block the manager for too long while nodes wait for its replies.
            body = {**header, **self._with_earlier(state)}.items()
            lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in body]
            draft.write_text("{\n" + ",\n".join(lines) + "\n}\n")
            draft.replace(self._folder / _STATE)
            self._outage.ends()
        except OSError as error:
            self._outage.begins(error)


def read_state(checkpoints: Path) -> dict[str, Any]:
    """Reads the state of the job that saves checkpoints to the folder ``checkpoints``.

    Raises:
        ConfigError: The state file is missing or damaged, or has an unsupported format version.
    """
    path = job_folder(checkpoints) / _STATE
    try:
        state = parse_json(read_whole(path), strict=False)
    except OSError as error:
        raise ConfigError(
            f"--status {checkpoints}: {path}: {error.strerror}; pass the checkpoint folder of a "
            'job that "python -m megatron.adaptive train elastic" started'
        ) from None
    except ValueError as error:
        raise ConfigError(f"--status {checkpoints}: {path} is damaged ({error})") from None
    if not isinstance(state, dict):
        raise ConfigError(f"--status {checkpoints}: {path} is damaged (it is not a JSON object)")
    for names, kind in ((_LISTS, list), (_NUMBERS, int)):
        for name in names:
            if not isinstance(state.get(name, kind()), kind):
                raise ConfigError(
                    f"--status {checkpoints}: {path} is damaged (the value of {name} has the wrong "
                    "type)"
                )
    if not all(isinstance(entry, dict) for name in _LISTS for entry in state.get(name, ())):
        raise ConfigError(
            f"--status {checkpoints}: {path} is damaged (a list contains values that are not "
            "objects)"
        )
    written = state.get("format", _FORMAT)  # Older versions did not write the format.
    if written != _FORMAT:
        raise ConfigError(
            f"--status {checkpoints}: {path} has format {written!r}, but this program reads "
            f"{_FORMAT}; use the version of the program that wrote it"
        )
    return state


def render_state(state: Mapping[str, Any]) -> str:
    """Returns ``state``, the content of a state file, as text for the terminal."""
    done = state["iteration"]
    total = state["total_iterations"]
    earlier = state.get("earlier", [])
    trained = sum(not entry["shape"].endswith(MEASURES) for entry in [*earlier, *state["epochs"]])
    age_s = max(0.0, (time.time_ns() - state["unix_ns"]) / 1e9)
    lines = [
        f"{state['status']}, {age_s:.0f} s ago; iteration {done} of {total or '?'}, last checkpoint"
        f" {state['checkpoint_iteration']}, {state['lost_steps']} steps lost in"
        f" {max(0, trained - 1)} layout changes",
        f"manager: process {state['manager']['pid']} on {state['manager']['host']}",
        "machines:",
    ]
    for node in state["machines"]:
        why = f" ({node['why']})" if node["why"] else ""
        if node.get("slowness", 1.0) > 1:
            why += f", {node['slowness']:.2f} times as slow as expected"
        lines.append(f"  {node['name']:20} {node['status']:12} slots {node['slots'] or '?'}{why}")
    if state.get("copies"):
        lines.append(f"in-memory copies of the state: {state['copies']}")
    if earlier:
        lines.append(f"epochs under earlier managers: {len(earlier)}")
    lines.append("epochs:")
    for entry in state["epochs"]:
        lines.append(
            f"  {entry['epoch']:3} {entry['shape']} on {some_names(entry['nodes'])}; from iteration"
            f" {entry['resumed_iteration']}; {entry['reason']}; lost {entry['lost_steps']}"
            + (f", from {entry['source']}" if entry.get("source", "") not in ("", "start") else "")
        )
        if entry.get("predicted_step_s") is not None:
            seen = f", measured {entry['step_s']:.4g} s" if entry["step_s"] else ""
            lines.append(f"      predicted step time {entry['predicted_step_s']:.4g} s{seen}")
        parts = [f"{n} {entry['phases_s'][n]:.2f} s" for n in _PHASES if n in entry["phases_s"]]
        if parts:
            whole = entry["phases_s"].get("whole")
            lines.append("      " + ", ".join(parts) + (f": {whole:.2f} s" if whole else ""))
    return "\n".join(lines)
