"""Runs the planner of a job in a process of its own, so that a long search stops nothing.

It is started once, reads the files, and loads the compiled search while machines are still coming.
A question is a line of JSON on its input, the answer a line on its output; both have a number, for
an answer that comes after its time limit is passed over::

    {"paths": [...], "arguments": [...], "unequal": false, "model": null}     the first line
    {"number": 2, "offers": [{"name": "a", "slots": 1, ...}], "within_s": 10}
    {"number": 2, "shape": {...}, "unknown": ["x"]}    {"number": 2, "none": "why nothing fits"}
    {"number": 1, "wrong": "a message for the user"}            to ``check``
    {"number": 2, "failed": "a bug of the planner"}
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.adaptive.cluster.layouts import (
    WORTH_A_MORPH,
    Chooser,
    Offer,
    ParallelLayout,
)
from megatron.adaptive.cluster.membership import Machine, read_machines
from megatron.adaptive.errors import ConfigError, SetupError
from megatron.adaptive.planner.measured_module import MeasuredModule

__all__ = ["MeasuringChooser", "PlannerChooser", "PlanProcess", "main"]

_FIRST_S = 180.0
"""Time limit of the first plan on a machine, which compiles the search."""

_ROOT = Path(__file__).resolve().parents[3]
_MODULE = "megatron.adaptive.cluster.plan_process"
_CHECK_S = 180.0
_SEARCH = 0.5
"""Part of the time limit that the search itself may take; the rest is for what comes with it."""


class PlanProcess:
    """Talks to the running process. To be closed.

    Args:
        paths: see ``planning.Planning``.
        arguments: of the trainer.
        unequal: see ``planning.Planning``.
        model: of a script with a ``Pipeline``, see ``script_planning``; in place of the others.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        arguments: Sequence[str],
        *,
        unequal: bool = False,
        model: Path | None = None,
    ) -> None:
        others = os.environ.get("PYTHONPATH")
        path = f"{_ROOT}:{others}" if others else str(_ROOT)
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C at the terminal is not for it
        )
        self._number = 0
        self._rest = b""
        self._lock = threading.Lock()
        self._send(
            {
                "paths": [str(one) for one in paths],
                "arguments": list(arguments),
                "unequal": unequal,
                "model": None if model is None else str(model),
            }
        )

    def check(self, machines: Path | None) -> str:
        """Checks the files, and that a plan is possible for all machines that may come. Blocks.

        Args:
            machines: file of machines, ``None`` where nodes come by themselves.

        Returns:
            Why this could not be said in time, empty if it could.

        Raises:
            ConfigError: a file breaks a rule, or no plan is possible.
        """
        name = None if machines is None else str(machines)
        try:
            answer = self._ask({"check": True, "machines": name}, _CHECK_S)
        except SetupError as error:
            return str(error)
        if "wrong" in answer:
            raise ConfigError(answer["wrong"])
        return ""

    def ask(self, offers: Sequence[Offer], within_s: float) -> tuple[ParallelLayout | None, str]:
        """Asks for a layout on the nodes that are there. Blocks up to the limit.

        Returns:
            The layout and what is to be said of it, or ``None`` and why none fits.

        Raises:
            SetupError: no answer within the limit, or the process has ended.
        """
        question = {"offers": [asdict(one) for one in offers], "within_s": within_s}
        answer = self._ask(question, within_s)
        if "shape" not in answer:
            return None, str(answer.get("none", answer.get("wrong")))
        strange = ", ".join(answer["unknown"])
        return _layout_of(answer["shape"]), strange and f"{strange}: in no file of --plan-with"

    def close(self) -> None:
        """Ends the process. Idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        # Where it has ended, no answer comes.
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _ask(self, question: dict[str, Any], within_s: float) -> dict[str, Any]:
        until_s = time.monotonic() + within_s
        with self._lock:
            self._number += 1
            self._send({"number": self._number, **question})
            while True:
                line = self._line(until_s, within_s)
                answer: dict[str, Any] = json.loads(line)
                if answer["number"] != self._number:
                    continue
                if "failed" in answer:
                    raise SetupError(f"the planner failed: {answer['failed']}")
                return answer

    def _line(self, until_s: float, within_s: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            left_s = max(0.0, until_s - time.monotonic())
            if not select.select([descriptor], [], [], left_s)[0]:
                raise SetupError(f"the planner did not answer within {within_s:g} s")
            data = os.read(descriptor, 1 << 16)
            if not data:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(1.0)
                raise SetupError(f"the planner ended with status {self._process.returncode}")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line


class PlannerChooser(Chooser):
    """Chooses layouts by the planner, and by the rule where that has no answer in time.

    Args:
        process: the planner.
        within_s: time limit of a plan.
        say: prints a line for the user.
    """

    def __init__(self, process: PlanProcess, within_s: float, say: Callable[[str], None]) -> None:
        self._process = process
        self._within_s = within_s
        self._say = say
        self._known: dict[tuple[Offer, ...], tuple[ParallelLayout | None, str]] = {}

    async def choose(
        self, arguments: Sequence[str], offers: Sequence[Offer]
    ) -> ParallelLayout | None:
        """Implements ``layouts.Chooser``."""
        nodes = tuple(offers)
        if nodes not in self._known:
            try:
                found = await asyncio.to_thread(self._process.ask, nodes, self._within_s)
            except SetupError as error:
                self._say(f"warning: no plan: {error}; the layout is chosen without it")
                self.why = ""
                return await super().choose(arguments, offers)
            self._known[nodes] = found
            if found[0] is not None and found[1]:
                self._say(f"warning: left out: {found[1]}")
        layout, text = self._known[nodes]
        self.why = "" if layout is not None else text
        return layout


class MeasuringChooser(Chooser):
    """Chooses layouts of a script: all processes to measure its model, then those of its plan.

    Args:
        model: file of what was measured.
        process: that plans.
        within_s: time limit of a plan.
        say: prints a line for the user.
    """

    def __init__(
        self, model: Path, process: PlanProcess, within_s: float, say: Callable[[str], None]
    ) -> None:
        self._model = model
        self._process = process
        self._within_s = within_s
        self._say = say
        self._known: dict[tuple[object, ...], tuple[ParallelLayout | None, str]] = {}

    async def choose(
        self, arguments: Sequence[str], offers: Sequence[Offer]
    ) -> ParallelLayout | None:
        """Implements ``layouts.Chooser``."""
        module = MeasuredModule.read(self._model)
        if module is None:
            return _to_measure(offers)
        key = (module.signature, module.micro_batch_size, *offers)
        if key not in self._known:
            limit_s = self._within_s if self._known else max(_FIRST_S, self._within_s)
            try:
                found = await asyncio.to_thread(self._process.ask, tuple(offers), limit_s)
            except SetupError as error:
                self._say(f"warning: no plan: {error}; the busiest stage alone decides")
                try:
                    from megatron.adaptive.cluster.script_planning import ScriptPlanning

                    found = ScriptPlanning(self._model).plan(offers, timed=False), ""
                except ConfigError as none:
                    found = None, str(none)
            self._known[key] = found
        layout, text = self._known[key]
        self.why = "" if layout is not None else text
        return layout

    def is_better(self, layout: ParallelLayout, running: ParallelLayout) -> bool:
        """Implements ``layouts.Chooser``: more processes, or as many and faster."""
        if running.is_to_be_measured or layout.is_to_be_measured:
            return False
        if layout.world_size != running.world_size:
            return layout.world_size > running.world_size
        if layout.step_s is None or running.step_s is None:
            return False
        return layout.step_s < (1 - WORTH_A_MORPH) * running.step_s


def _to_measure(offers: Sequence[Offer]) -> ParallelLayout | None:
    count = sum(one.slots for one in offers)
    if not count:
        return None
    return ParallelLayout(tensor=1, pipeline=count, data=1, partition=(), micro_batch=0, flags=())


def _layout_of(message: dict[str, Any]) -> ParallelLayout:
    return ParallelLayout(
        **{
            **message,
            "partition": tuple(message["partition"]),
            "flags": tuple(message["flags"]),
            "widths": tuple(message["widths"]),
            "places": tuple((name, count) for name, count in message["places"]),
        }
    )


def main() -> int:
    """Answers until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from megatron.adaptive.cluster.planning import Planning

    lines = sys.stdin.buffer
    first = json.loads(lines.readline() or b"null")
    if first is None:
        return 0
    planning: Any = None
    wrong = ""
    try:
        if first["model"] is not None:
            from megatron.adaptive.cluster.script_planning import ScriptPlanning

            planning = ScriptPlanning(Path(first["model"]))
        else:
            files = [Path(one) for one in first["paths"]]
            planning = Planning(files, first["arguments"], unequal=first["unequal"])
    except (ConfigError, SetupError) as error:
        wrong = str(error)
    for line in lines:
        question = json.loads(line)
        answer: dict[str, Any] = {"wrong": wrong}
        if planning is not None:
            try:
                answer = _answer(planning, question)
            except Exception as error:  # a bug: printed with its traceback, and the job goes on
                traceback.print_exc()
                answer = {"failed": repr(error)}
        print(json.dumps({"number": question["number"], **answer}), flush=True)
    return 0


def _answer(planning: Any, question: dict[str, Any]) -> dict[str, Any]:
    try:
        if question.get("check"):
            machines: tuple[Machine, ...] | None = None
            if question["machines"] is not None:
                machines = read_machines(Path(question["machines"]))
                planning.require_machines(machines, f"--machines {question['machines']}")
            if offers := planning.expected(machines):
                planning.plan(offers)
            return {}
        offers = [Offer(**{**one, "hosts": tuple(one["hosts"])}) for one in question["offers"]]
        layout = planning.plan(offers, question["within_s"] * _SEARCH)
        return {"shape": asdict(layout), "unknown": planning.unknown(offers)}
    except (ConfigError, SetupError) as error:
        return {"wrong" if question.get("check") else "none": str(error)}


if __name__ == "__main__":
    sys.exit(main())
