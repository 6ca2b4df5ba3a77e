"""Runs a job, and randomly kills, suspends or disconnects its nodes, or fills their disks.

After each event, the job must continue or exit with a reason within a deadline. At the end, all
processes, steps and checkpoints are checked.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.processes import run_ranks, train
from harness.report import Result, Row, measured, missing
from megatron.adaptive.checkpoint.folder import CheckpointFolder
from tests.cluster.jobs import FLAGS, environment
from tests.soak.job_record import Record, faults, steps_of_logs
from tests.soak.node_events import WEIGHTS, Events, role
from tests.support.nodes import Node, Nodes, why_not

_FLAGS = ("--lr", "1e-4", "--distributed-timeout-minutes", "1", "--transport-silence-s", "10")
TRAINER = str(Path(__file__).with_name("slow_trainer.py"))
SLOTS = (2, 1, 1)
SHARED_BYTES = 96 << 20
BATCH, FIRST = 4, 10
STEP_S = 0.4
TOLERANCE = 1e-5
DEADLINE_S, GONE_S = 450.0, 90.0
"""Time limits in seconds for the job to continue, and for the processes of a node to exit.

The limits are three times the usual times, because other programs may run.
"""
_TOGETHER = 0.25
"""Probability that the next event begins before the job has recovered from the current one."""
_LOOK_S = 0.2
_MOST_ENDS = 3
"""Maximum number of times that the job may exit with a reason before it recovers from an event."""
_OURS = re.compile(
    r'File ".*/(cluster/(?!rank_forkserver)\w+|cli/run)\.py"|never retrieved|Exception in callback'
)
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n(?:.*  .*\n)*(.*)")
_REASON = re.compile(r"^(error: |\[elastic\] )", re.MULTILINE)
_KILLED, _TERMINATED = 128 + signal.SIGKILL, 128 + signal.SIGTERM


class SoakError(Exception):
    """Raised if the job does not continue or exit in time, or leaves processes behind."""


@dataclass(kw_only=True)
class SoakResult:
    """Results of a soak test.

    Attributes:
        seed: Seed of the random events.
        events: Descriptions of the events, one line each.
        counts: Number of events by kind.
        ended: Reasons that the job stated when it exited.
        failures: Descriptions of all failures.
        recoveries_s: Seconds until the job continued, by kind of event. If an event lasts for some
            time, the seconds are counted from its end. If several events overlap, only the last
            event is counted.
        figures: Values measured during the whole soak test, by name.
        tracebacks: Last lines of the tracebacks in the logs. Most of them are from ranks whose
            peers were killed.
    """

    seed: int
    events: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    ended: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    recoveries_s: dict[str, list[float]] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    tracebacks: list[str] = field(default_factory=list)

    def rows(self) -> list[Row]:
        """Returns a row with recovery times for each kind of event, and a row with failures."""
        rows = []
        for name in [*sorted(self.counts), "join"]:
            times_s = self.recoveries_s.get(name, [])
            note = f"{self.counts[name]} events" if name != "join" else "nodes that joined again"
            note += f"; the slowest {max(times_s):.1f} s" if times_s else ""
            title = f"soak, {name}: time until the job continued"
            rows.append(measured(title, times_s, unit="s", note=note))
        title = f"{self.counts.total()} events: job neither continued nor gave a reason"
        return [*rows, Row(what=title, value=len(self.failures), goal=0)]


class Soak:
    """Runs a job, and makes its nodes fail.

    Use this class as a context manager, and call :meth:`run` once.

    Args:
        folder: Folder for logs and for the folder that all nodes share.
        seed: Seed of the events.
        flags: Flags of the trainer.
        say: Function that prints a line about each event.
        kinds: Kinds of the first events, in this order. The following events are random.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        flags: Sequence[str],
        say: Callable[[str], None],
        kinds: Sequence[str] = (),
    ) -> None:
        self.result = SoakResult(seed=seed)
        self._folder = folder
        self._flags = [*flags, "--train-iters", "999999"]
        self._alone = [*self._flags, "--pipeline-model-parallel-size", "1"]
        self._say = say
        self._kinds = list(kinds)
        self._draw = random.Random(seed)
        # This set contains the names of nodes whose exit was reported.
        self._told: set[str] = set()
        self._start_s = time.monotonic()
        # This is the Unix time of the last event, or of its end if the event lasts for some time.
        self._moment_ns = 0
        self._last = "join"  # This is the kind of the last event.
        self._nodes = Nodes(folder, SLOTS, SHARED_BYTES)
        self._checkpoints = self._nodes.shared / "checkpoints"
        self._events = Events(self._nodes, self._draw, self._note, self._checkpoints)
        self._record = Record(self._checkpoints / "elastic")

    def __enter__(self) -> Soak:
        return self

    def __exit__(self, *error: object) -> None:
        self._nodes.close()

    def run(self, events: int, limit_s: float) -> SoakResult:
        """Causes up to ``events`` events within ``limit_s`` seconds, and returns the results."""
        self._first_checkpoint()
        for node in self._nodes.all:
            self._boot(node)
        self._guard(self._settle)
        end_s = time.monotonic() + limit_s
        while sum(self.result.counts.values()) < events and time.monotonic() < end_s:
            self._guard(self._once)
        self._guard(self._settle)
        for node in self._out():
            self._boot(node)
        self._guard(self._settle)
        self._guard(self._end_all)
        self._judge()
        return self.result

    def _once(self) -> None:
        """Causes one event, and checks that the job recovers."""
        out = self._out()
        running = [node for node in self._nodes.all if node not in out]
        if out and (len(running) < 2 or self._draw.random() < 0.5):
            self._join(self._draw.choice(out))
        else:
            (name,) = self._draw.choices(list(WEIGHTS), list(WEIGHTS.values()))
            name = self._kinds[0] if self._kinds else name
            description = self._events.do(name, self._draw.choice(running))
            if description is None:
                self._pass(1.0)
                return
            del self._kinds[:1]
            self.result.counts[name] += 1
            self._last = name
            self._note(description)
            self._moment_ns = time.time_ns()
        if self._draw.random() < _TOGETHER:
            self._pass(self._draw.uniform(0.0, 8.0))
        else:
            self._settle()
            self._pass(self._draw.uniform(0.0, 2.0))

    def _join(self, node: Node) -> None:
        self._note(f"join {node.name}")
        self._last = "join"
        self._boot(node)

    def _boot(self, node: Node) -> None:
        command = [sys.executable, "-m", "megatron.adaptive", "train", "elastic"]
        command += ["--checkpoint", str(self._checkpoints), "--name", node.name]
        command += ["--slots", str(node.slots), "--nodes", str(len(SLOTS)), "--wait", "300"]
        command += ["--join-within", "60", TRAINER, *self._flags, "--save-interval", "10"]
        command += ["--async-save", "--keep-checkpoints", "12", "--diagnose-interval", "0"]
        command += ["--trace-dir", str(self._nodes.traces)]
        self._told.discard(node.name)
        node.boot(command, {**environment(), "SOAK_STEP_S": str(STEP_S)})
        self._moment_ns = time.time_ns()

    def _pass(self, seconds: float) -> None:
        """Waits for ``seconds``, and undoes each lasting event when its duration has passed."""
        until_s = time.monotonic() + seconds
        while True:
            now_s = time.monotonic()
            if self._events.end_due():
                self._moment_ns = time.time_ns()
            self._record.refresh()
            self._look_at_ended()
            if now_s >= until_s:
                return
            time.sleep(min(_LOOK_S, until_s - now_s))

    def _settle(self) -> None:
        """Waits until all lasting events are over and the job trains on all running nodes.

        Raises:
            SoakError: The job neither continued nor exited within the deadline.
        """
        begin_s = over_s = time.monotonic()
        ends = 0
        while True:
            self._pass(_LOOK_S)
            if not self._events.are_over:
                over_s = time.monotonic()
                continue
            if not any(node.is_running for node in self._nodes.all):
                ends += 1
                if ends > _MOST_ENDS:
                    raise SoakError(f"the job ended {ends} times in succession; {self._tails()}")
                self._all_ended()
                over_s = time.monotonic()
                continue
            lacking = self._lacking()
            if not lacking:
                took_s = time.monotonic() - over_s
                self.result.recoveries_s.setdefault(self._last, []).append(took_s)
                return
            if time.monotonic() - over_s > DEADLINE_S:
                took_s = time.monotonic() - begin_s
                raise SoakError(f"{took_s:.0f} s after the event: {lacking}; {self._tails()}")

    def _lacking(self) -> str:
        """Returns why the job has not recovered yet, or an empty string if it has recovered."""
        if len(self._record.steps_since(self._moment_ns)) < 2:
            return "no two new steps"
        state = self._state()
        if state.get("unix_ns", 0) < self._moment_ns:
            return "the state of the job has not been written"
        present = {
            machine["name"] for machine in state["machines"] if machine["status"] == "present"
        }
        absent = [
            machine.name
            for machine in self._nodes.all
            if machine.is_running and machine.name not in present
        ]
        if absent:
            return f"{absent[0]} is running, but has no part in the job"
        for node in self._nodes.all:
            left = node.processes() if node.status is not None else []
            if left:
                return f"{node.name} has exited, but left {[role(process) for process in left]}"
        return ""

    def _look_at_ended(self) -> None:
        """Reports each node that has exited, with the reason that the node printed."""
        for node in self._nodes.all:
            if not node.is_on or node.status is None or node.name in self._told:
                continue
            self._told.add(node.name)
            if node.status == _KILLED:
                continue
            reasons = [line for line in node.said.splitlines() if _REASON.match(line)]
            reason = reasons[-1] if reasons else ""
            self._note(f"    {node.name} exited with status {node.status}: {reason}")
            # A node that printed nothing was terminated before its program began.
            is_early = node.status == _TERMINATED and not node.said
            if not reason and not is_early:
                self._fail(f"{node.name} exited with status {node.status} and no reason")
            if node.status == 1:
                self._fail(f"{node.name} exited with status 1: {_tail(node.said)}")

    def _all_ended(self) -> None:
        """Stores the reason of the last node that exited, and restarts all nodes.

        Must be called only after all nodes have exited.
        """
        last = next((line for line in reversed(self.result.events) if "exited with" in line), "")
        self.result.ended.append(last.strip())
        self._gone()
        for node in self._nodes.all:
            self._boot(node)
        self._note("    the job has ended, and all nodes start again")

    def _gone(self) -> None:
        """Checks that no process is left on the nodes that exited.

        Raises:
            SoakError: A process is still running after the time limit.
        """
        end_s = time.monotonic() + GONE_S
        while time.monotonic() < end_s:
            left = {
                node.name: [role(process) for process in node.processes()]
                for node in self._nodes.all
                if node.processes()
            }
            if not left:
                return
            time.sleep(_LOOK_S)
        raise SoakError(f"left behind: {left}")

    def _end_all(self) -> None:
        """Sends SIGTERM to all nodes, and waits until the job has saved a checkpoint and exited."""
        self._note("end: SIGTERM to all nodes")
        for node in self._nodes.all:
            for runner in node.helpers()[:1]:
                runner.send_signal(signal.SIGTERM)
        end_s = time.monotonic() + DEADLINE_S
        while any(node.status is None for node in self._nodes.all):
            self._pass(_LOOK_S)
            if time.monotonic() > end_s:
                raise SoakError(f"the job did not end within {DEADLINE_S:g} s; {self._tails()}")
        self._gone()

    def _judge(self) -> None:
        """Checks the logs, progress files and checkpoints of the job, and stores any failures."""
        self._record.refresh()
        for node in self._nodes.all:
            node.off()
        texts = [node.log.read_text(errors="replace") for node in self._nodes.all]
        for node, text in zip(self._nodes.all, texts, strict=True):
            if match := _OURS.search(text):
                start = match.start()
                excerpt = text[max(0, start - 900) : start + 900]
                self._fail(f"{node.name} had an error in its own code: {excerpt}")
        last = self._record.last
        printed = steps_of_logs(texts)
        expected = self._undisturbed(max([last, *(step.iteration for step in printed)]))
        epochs = self._record.epochs
        lines, worst = faults(
            epochs,
            printed,
            expected,
            first=FIRST + 1,
            batch=BATCH,
            tolerance=TOLERANCE,
            damaged=[damage[:2] for damage in self._events.damaged],
        )
        for text in lines[:20]:
            self._fail(text)
        self.result.tracebacks += [line for text in texts for line in _TRACEBACK.findall(text)]
        self.result.figures |= {
            "steps": last,
            "epochs": len(epochs),
            "loss_difference": worst,
            "checkpoints": self._reload(),
            "tracebacks": sum(text.count("Traceback") for text in texts),
            "minutes": round((time.monotonic() - self._start_s) / 60, 1),
        }

    def _reload(self) -> int:
        """Loads every complete checkpoint that is not corrupt.

        Returns the number of these checkpoints.
        """
        folder = CheckpointFolder(self._checkpoints)
        inodes = {inode for _, _, inode in self._events.damaged}
        steps = folder.steps()
        iterations = [step for step, path in steps.items() if path.stat().st_ino not in inodes]
        for iteration in iterations:
            folder.open(iteration)
        arguments = ["--reload", ",".join(map(str, iterations)), *self._alone]
        try:
            run_ranks([TRAINER, *arguments, "--load", str(self._checkpoints)], 1, 300.0)
        except RuntimeError as error:
            self._fail(f"some checkpoints of {iterations} do not load: {error}")
        if folder.latest() != max(steps):
            self._fail(
                f"the latest checkpoint is {folder.latest()}, but the checkpoints are {list(steps)}"
            )
        return len(iterations)

    def _first_checkpoint(self) -> None:
        """Trains some steps in a single process, and saves a checkpoint from which the job starts.

        Without this checkpoint, the initial weights would depend on the shape of the job.
        """
        arguments = ["--save", str(self._checkpoints), "--save-interval", "10"]
        arguments += ["--exit-interval", str(FIRST)]
        run_ranks([TRAINER, *self._alone, *arguments], 1, 1800.0)
        shutil.copytree(self._checkpoints, self._folder / "first")

    def _undisturbed(self, last: int) -> dict[int, float]:
        """Trains in a single undisturbed process until iteration ``last``, and returns the losses.

        The process continues from the first checkpoint. The losses are keyed by iteration.
        """
        arguments = ["--load", str(self._folder / "first"), "--exit-interval", str(last)]
        arguments = [TRAINER, *self._alone, *arguments]
        lines = train(arguments, self._folder / "undisturbed", 1, 1800.0)
        return {line["iteration"]: line["loss"] for line in lines if "iteration" in line}

    def _guard(self, action: Callable[[], None]) -> None:
        """Runs ``action``, and restarts all nodes if ``action`` raises :class:`SoakError`."""
        try:
            action()
        except SoakError as error:
            self._fail(str(error))
            self._events.end_due(all_of_them=True)
            for node in self._nodes.all:
                self._boot(node)
            self._settle()  # If this call raises an error, the soak test stops.

    def _out(self) -> list[Node]:
        return [node for node in self._nodes.all if not node.is_running]

    def _state(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            state: dict[str, Any] = json.loads(
                (self._checkpoints / "elastic" / "state.json").read_text()
            )
            return state
        return {}

    def _note(self, text: str) -> None:
        line = f"{time.monotonic() - self._start_s:7.1f} s  {text}"
        self.result.events.append(line)
        self._say(line)
        with contextlib.suppress(OSError), (self._folder / "events.txt").open("a") as file:
            file.write(line + "\n")

    def _fail(self, text: str) -> None:
        self.result.failures.append(text)
        self._note(f"FAILED: {text}")

    def _tails(self) -> str:
        return "".join(
            f"\n--- {node.name} (status {node.status}, {list(map(role, node.processes()))})"
            f"\n{_tail(node.said)}"
            for node in self._nodes.all
            if node.is_on
        )


def soaked(
    folder: Path, events: int, minutes: float, seed: int, kinds: Sequence[str] = ()
) -> Result:
    """Runs a soak test and prints its events.

    If this machine cannot run the test, for example without root privileges, returns a row with the
    reason.

    Args:
        folder: Folder for the logs.
        events: Number of events.
        minutes: Time after which no event begins.
        seed: Seed of the events.
        kinds: Kinds of the first events.
    """
    if (reason := why_not()) is not None:
        return Result(rows=[missing("soak", reason)])
    signal.signal(signal.SIGTERM, end_in_order)
    folder = folder / "soak"
    folder.mkdir(parents=True)
    with Soak(folder, seed, [*FLAGS, *_FLAGS], _say, kinds) as job:
        result = job.run(events, minutes * 60)
    continued = sum(map(len, result.recoveries_s.values()))
    print(f"seed {result.seed}: continued {continued} times, ended {len(result.ended)} times")
    for line in result.ended:
        print(f"ended with the reason: {line}")
    print(", ".join(f"{value} {name}" for name, value in result.figures.items()))
    for text in result.tracebacks:
        print(f"a traceback ended with: {text}")
    for text in result.failures:
        print(f"FAILED (seed {result.seed}): {text}")
    return Result(rows=result.rows(), facts={"soak": vars(result)})


def end_in_order(number: int, frame: object) -> None:
    """Raises ``SystemExit`` for the signal ``number``.

    Context managers then remove namespaces and mounts.
    """
    raise SystemExit(128 + number)


def _say(text: str) -> None:
    """Prints ``text`` without buffering, so that the progress of a long test is visible."""
    print(text, flush=True)


def _tail(text: str, lines: int = 25) -> str:
    return "\n".join(line[:300] for line in text.splitlines()[-lines:])
