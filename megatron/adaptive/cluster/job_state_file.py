"""Keeps the state of a job, its folder, progress and reconfigurations, as JSON for others to read.

::

    <checkpoints>/elastic/state.json            written by the manager, whole at any moment
    <checkpoints>/elastic/epoch-3/progress.jsonl     by the ranks of the job's third layout
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
"""End of the words for the layout of ranks that only measure."""
_PHASES = ("notice", "checkpoint", "end", "plan", "start", "load", "first_step")


def say(text: str) -> None:
    """Prints a line for the user of the job."""
    stream = sys.stderr if text.startswith(("error", "warning")) else sys.stdout
    print(f"[elastic] {printable(text)}", file=stream, flush=True)


_NAMED = 8


def some_names(names: Iterable[str]) -> str:
    """Joins names for a line; of very many the first ones and how many more there are."""
    found = list(names)
    more = len(found) - _NAMED
    return ", ".join(found) if more < _NAMED else f"{', '.join(found[:_NAMED])} and {more} more"


def job_folder(checkpoints: Path) -> Path:
    """Returns the folder of a job's state, beside its checkpoints."""
    return checkpoints / _FOLDER


def incarnation_folder(job: Path, number: int, manager: str) -> Path:
    """Returns the folder where the ranks of an incarnation write their progress.

    Args:
        job: folder of the job.
        number: of the incarnation.
        manager: name of the one that started it; another one counts from 1 again.
    """
    return job / f"{_EPOCH}-{number}-{manager}"


@dataclass(kw_only=True)
class Incarnation:
    """Records one incarnation of the job: one layout, from its start to the next reconfiguration.

    Attributes:
        number: from 1 on.
        layout: in words.
        processes: how many.
        nodes: names, in the order of the ranks.
        reason: why the one before ended, or ``start``.
        resumed: the iteration that it went on from.
        lost_steps: that were done before and are done again.
        source: what it went on from: ``start``, ``checkpoint``, ``checkpoint on the nodes' own
            disks`` or ``copies in memory``, and why not from the last where that could not be.
        marks_ns: moments by the clock of the manager: ``notice``, ``ended``, ``planned``,
            ``begun``.
        phases_s: seconds of each part of the reconfiguration to this layout.
        before: what the ranks of the one before wrote at last.
        predicted_s: seconds of a step as the planner predicted them, ``None`` where it did not
            choose.
        step_s: seconds of a step as measured, ``None`` before there are some.
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
        """Records where its ranks resumed, where that is not the newest checkpoint.

        They may find a newer one on their own disks, or the newest one damaged.
        """
        if iteration is None or iteration == self.resumed:
            return
        self.lost_steps = max(0, self.lost_steps - (iteration - self.resumed))
        if iteration > self.resumed:
            self.source = "checkpoint on the nodes' own disks"
        else:
            self.source = "checkpoint" if iteration else "start"
            self.source += f": that of iteration {self.resumed} did not load"
        self.resumed = iteration

    def to_dict(self) -> dict[str, Any]:
        """Returns its entry in the state of the job."""
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
    """Describes a rank that the diagnosis of the running job names.

    Attributes:
        slow_rank: its number.
        times: diagnoses in a row that named it.
        factor: how many times as long as others its work takes.
        pace_ns: what each rank takes for a microbatch by its layers, empty where that is unknown.
    """

    slow_rank: int
    times: int
    factor: float
    pace_ns: Sequence[float] = ()


_STEPS = 1000
_SLOW = tuple(one.name for one in fields(SlowRank))


@dataclass(frozen=True, kw_only=True)
class IncarnationProgress:
    """Summarizes what the ranks of one incarnation wrote about themselves.

    Attributes:
        total: iterations of the whole training, 0 before it is known.
        start: iterations done before these ranks, ``None`` before it is known.
        iteration: the last one done.
        ended: why training ended in good order, ``None`` if it did not.
        begun_ns: when the model was built and loaded.
        loaded_s: seconds of loading the checkpoint.
        first_ns: when the first step was done.
        saved_ns: when the last checkpoint was complete.
        saving_s: how long training waited for it.
        copies: of the state in memory, in words; the empty text before they are known.
        step_s: median of the last thousand steps reported, without the first.
        slow: ranks that the diagnosis named, in order.
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


class ProgressReader:
    """Reads what the ranks of one incarnation after the other write of themselves."""

    def __init__(self) -> None:
        self._begin(Path())

    def _begin(self, folder: Path) -> None:
        self._folder = folder
        self._tail = ProgressTail(folder / PROGRESS_NAME, kept=_STEPS)
        self._now = IncarnationProgress()
        self._steps_ms: deque[float] = deque(maxlen=_STEPS)

    def read(self, folder: Path) -> IncarnationProgress:
        """Returns what is known by now.

        Args:
            folder: where the ranks of one incarnation write.
        """
        if folder != self._folder:
            self._begin(folder)
        for line in self._tail.refresh():
            self._now = replace(self._now, **self._found(line))
        if not self._steps_ms:
            return self._now
        return replace(self._now, step_s=statistics.median(self._steps_ms) / 1e3)

    def _found(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what a line says, as attributes of the progress."""
        at, now = line["unix_ns"], self._now
        if "total_iterations" in line:
            if line.get("moved"):  # layers moved between ranks that go on
                return {}
            start = line.get("start_iteration")
            return {"total": line["total_iterations"], "begun_ns": at, "start": start}
        if "iteration" in line:
            if now.first_ns is not None:
                self._steps_ms.append(line.get("step_ms") or 0.0)
            return {
                "iteration": line["iteration"],
                "first_ns": at if now.first_ns is None else now.first_ns,
            }
        if "slow_rank" in line:
            return {"slow": (*now.slow, SlowRank(**{name: line[name] for name in _SLOW}))}
        if "saved" in line:
            return {"saved_ns": at, "saving_s": line["seconds"]}
        return {name: line[name] for name in ("loaded_s", "copies", "ended") if name in line}


def phases(incarnation: Incarnation, now: IncarnationProgress) -> dict[str, float]:
    """Returns the seconds of each part of a reconfiguration, as far as they are known.

    Args:
        incarnation: the new layout.
        now: what its own ranks wrote.
    """
    marks, before, found = incarnation.marks_ns, incarnation.before, dict[str, float]()
    notice, ended = marks.get("notice"), marks.get("ended")
    if notice is not None and ended is not None:
        saved = None if before is None else before.saved_ns
        if saved is not None and before is not None and saved > notice:
            found["notice"] = (saved - notice) / 1e9 - before.saving_s
            found["checkpoint"] = before.saving_s
            found["end"] = (ended - saved) / 1e9
        else:
            found["end"] = (ended - notice) / 1e9
    if ended is not None:
        found["plan"] = (marks["planned"] - ended) / 1e9
    if now.begun_ns is not None:
        found["start"] = (now.begun_ns - marks["begun"]) / 1e9 - now.loaded_s
        found["load"] = now.loaded_s
        if now.first_ns is not None:
            found["first_step"] = (now.first_ns - now.begun_ns) / 1e9
            first = notice or ended or marks["begun"]
            found["whole"] = (now.first_ns - first) / 1e9
    # Clocks of machines differ by more than a part may take.
    return {name: round(max(0.0, value), 3) for name, value in found.items()}


class StateFile:
    """Writes the state of a job that this process manages, after others maybe.

    Of all managers together it has ``lost_steps``, and ``earlier``, incarnations of those before.

    Args:
        folder: of the job.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._outage = Outage(folder / _STATE, "states of the job")
        self._before: dict[str, Any] = {}
        self._earlier: list[Any] = []

    def take_over(self, checkpoints: Path) -> int:
        """Takes over the state that the manager before wrote of the job of a folder.

        Returns:
            How many machines took part then, 0 where there was none.
        """
        try:
            self._before = read_state(checkpoints)
        except ConfigError:
            return 0
        self._earlier = [*self._before.get("earlier", []), *self._before.get("epochs", [])]
        machines = self._before.get("machines", [])
        return sum(machine.get("status") == "present" for machine in machines)

    def _of_all(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Combines the state with that under earlier managers."""
        if not self._earlier:
            return {**state, "earlier": []}
        # As the first layout of this one began, some steps of the one before were done again.
        again = 0
        if state["epochs"]:
            done = self._before.get("iteration", 0)
            again = max(0, done - state["epochs"][0]["resumed_iteration"])
        lost = self._before.get("lost_steps", 0) + again + state["lost_steps"]
        return {**state, "lost_steps": lost, "earlier": self._earlier[-_MOST_EARLIER:]}

    def write(self, state: Mapping[str, Any]) -> None:
        """Replaces the file; says so once where it cannot be written and stays as it was.

        Args:
            state: what is known of the job.
        """
        manager = {"host": socket.gethostname(), "pid": os.getpid()}
        own = {"format": _FORMAT, "manager": manager, "unix_ns": time.time_ns()}
        draft = self._folder / f".{_STATE}.{os.getpid()}"
        try:
            # Indented, Python itself would write it line by line, while nodes wait for an answer.
            body = {**own, **self._of_all(state)}.items()
            lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in body]
            draft.write_text("{\n" + ",\n".join(lines) + "\n}\n")
            draft.replace(self._folder / _STATE)
            self._outage.ends()
        except OSError as error:
            self._outage.begins(error)


def read_state(checkpoints: Path) -> dict[str, Any]:
    """Reads the state of the job that saves into a folder.

    Raises:
        ConfigError: there is no job, or the file is damaged or of a newer version.
    """
    path = job_folder(checkpoints) / _STATE
    try:
        state = parse_json(read_whole(path), strict=False)
    except OSError as error:
        raise ConfigError(
            f"--status {checkpoints}: {path}: {error.strerror}; name the folder of checkpoints of a"
            " job that python -m megatron.adaptive run started"
        ) from None
    except ValueError as error:
        raise ConfigError(f"--status {checkpoints}: {path} is damaged ({error})") from None
    if not isinstance(state, dict):
        raise ConfigError(f"--status {checkpoints}: {path} is not the state of a job")
    for names, kind in ((_LISTS, list), (_NUMBERS, int)):
        for name in names:
            if not isinstance(state.get(name, kind()), kind):
                raise ConfigError(f"--status {checkpoints}: {path} is damaged ({name})")
    if not all(isinstance(one, dict) for name in _LISTS for one in state.get(name, ())):
        raise ConfigError(f"--status {checkpoints}: {path} is damaged (no objects in a list)")
    written = state.get("format", _FORMAT)  # files of earlier programs have none
    if written != _FORMAT:
        raise ConfigError(
            f"--status {checkpoints}: {path} has format {written!r}, but this program reads"
            f" {_FORMAT}; use the program that wrote it"
        )
    return state


def render_state(state: Mapping[str, Any]) -> str:
    """Returns a job's state as text."""
    done, total = state["iteration"], state["total_iterations"]
    earlier = state.get("earlier", [])
    trained = sum(not one["shape"].endswith(MEASURES) for one in [*earlier, *state["epochs"]])
    age_s = max(0.0, (time.time_ns() - state["unix_ns"]) / 1e9)
    lines = [
        f"{state['status']}, {age_s:.0f} s ago; iteration {done} of {total or '?'}, last checkpoint"
        f" {state['checkpoint_iteration']}, {state['lost_steps']} steps lost in"
        f" {max(0, trained - 1)} morphs",
        f"manager: process {state['manager']['pid']} on {state['manager']['host']}",
        "machines:",
    ]
    for node in state["machines"]:
        why = f" ({node['why']})" if node["why"] else ""
        why += f" {node['slowness']:.2f} times as slow" if node.get("slowness", 1.0) > 1 else ""
        lines.append(f"  {node['name']:20} {node['status']:12} slots {node['slots'] or '?'}{why}")
    if state.get("copies"):
        lines.append(f"copies of the state in memory: {state['copies']}")
    if earlier:
        lines.append(f"epochs under managers before: {len(earlier)}")
    lines.append("epochs:")
    for one in state["epochs"]:
        lines.append(
            f"  {one['epoch']:3} {one['shape']} on {some_names(one['nodes'])}; from iteration"
            f" {one['resumed_iteration']}; {one['reason']}; lost {one['lost_steps']}"
            + (f", from {one['source']}" if one.get("source", "") not in ("", "start") else "")
        )
        if one.get("predicted_step_s") is not None:
            seen = f", {one['step_s']:.4g} s measured" if one["step_s"] else ""
            lines.append(f"      a step of {one['predicted_step_s']:.4g} s predicted{seen}")
        parts = [f"{n} {one['phases_s'][n]:.2f} s" for n in _PHASES if n in one["phases_s"]]
        if parts:
            whole = one["phases_s"].get("whole")
            lines.append("      " + ", ".join(parts) + (f": {whole:.2f} s" if whole else ""))
    return "\n".join(lines)
