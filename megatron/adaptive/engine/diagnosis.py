"""The diagnosis of a run while it trains: every some iterations, in a process of its own.

The training process writes a question into a pipe and looks, between two iterations, whether an
answer has come: it reads no trace, waits for nothing, and goes on without answers where the other
process fails. That one runs at the lowest priority and ends with this one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[3]
_WATCH = "megatron.adaptive.trace.diagnose.watch"
_LAST_S = 10.0


class RunningDiagnosis:
    """Reports each thing that slows the run, once.

    It does nothing without a folder or an interval, or where the run ends before the first one.

    Args:
        folder: where the ranks write their traces, ``None`` also on ranks that report nothing.
        interval: iterations between two diagnoses, each of the iterations since the one before.
        start_iteration: iterations done before this process began; its first one is left out.
        report: takes the text of a finding.
        note: takes each answer's ``findings``, each with ``headline``, ``gain``, the part of a step
            that mending it would save, and ``do``, how. And what is known of a rank that is slow to
            the end of what was looked at, each time it is: ``slow_rank``, its number; ``times``,
            diagnoses in a row that found it; ``factor`` and ``cost_fraction``, see ``Finding``;
            ``pace_ns`` of all ranks, see ``Diagnosis``.
        total_iterations: of the run, as far as that is known.
    """

    def __init__(
        self,
        folder: str | None,
        interval: int,
        start_iteration: int,
        report: Callable[[str], None],
        note: Callable[..., None] | None = None,
        total_iterations: float = math.inf,
    ) -> None:
        self._interval = interval
        self._next = start_iteration + 2
        self._report = report
        self._note = note
        self._reported: set[tuple[object, ...]] = set()
        self._slow: dict[int, int] = {}
        self._answers = b""
        self._waiting = False
        self._process: subprocess.Popen[bytes] | None = None
        if folder is None or not 0 < interval < total_iterations - start_iteration:
            return
        paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", _WATCH, folder, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._questions, self._found = process.stdin, process.stdout
        for pipe in (self._questions, self._found):
            os.set_blocking(pipe.fileno(), False)

    def after_iteration(self, iteration: int) -> None:
        """Ask where it is time to, and report what was answered. Takes microseconds."""
        if self._process is None:
            return
        if self._waiting:
            self._read()
        elif iteration - self._next + 1 >= self._interval:
            self._ask(iteration)

    def close(self) -> None:
        """Report what is still found of the last question; idempotent. Blocks for 10 s at most."""
        process, self._process = self._process, None
        if process is None:
            return
        rest = b""
        try:
            if self._waiting:
                os.set_blocking(self._found.fileno(), True)
                rest = process.communicate(timeout=_LAST_S)[0]
        except (OSError, subprocess.TimeoutExpired):
            pass  # whoever ends a job does not wait for advice
        finally:
            process.kill()
            process.wait()
            for pipe in (self._questions, self._found):
                with contextlib.suppress(OSError):
                    pipe.close()
        self._take(rest)

    def _ask(self, last: int) -> None:
        try:
            os.write(self._questions.fileno(), f"{self._next} {last}\n".encode())
            self._waiting = True
            self._next = last + 1
        except OSError:
            self.close()

    def _read(self) -> None:
        try:
            data = os.read(self._found.fileno(), 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._waiting = False
            self.close()
            return
        self._take(data)

    def _take(self, data: bytes) -> None:
        *lines, self._answers = (self._answers + data).split(b"\n")
        for line in lines:
            self._waiting = False
            answer = json.loads(line)
            for finding in answer.get("findings", ()):
                key = tuple(finding["key"])
                if key not in self._reported:
                    self._reported.add(key)
                    self._report(f"warning: {finding['text']}")
            self._note_findings(answer)
            self._note_slow(answer)

    def _note_findings(self, answer: Mapping[str, Any]) -> None:
        """Notes what mending each thing would gain; a run of Weights & Biases gets it as well."""
        if self._note is None or "findings" not in answer:
            return
        found = [
            {
                "headline": one["headline"],
                "name": " ".join(map(str, one["key"])),
                "gain": round(one["cost_fraction"], 4),
                "do": one["do"],
            }
            for one in answer["findings"]
        ]
        self._note(findings=found)
        run = getattr(sys.modules.get("wandb"), "run", None)  # the user's, where there is one
        if run is not None and found:
            # With the values of the user's own next call: a step's number is theirs to choose.
            run.log({f"gain/{one['name']}": one["gain"] for one in found}, commit=False)

    def _note_slow(self, answer: Mapping[str, Any]) -> None:
        """Note the ranks that an answer names as slow; a diagnosis that failed says nothing."""
        if self._note is None or "findings" not in answer:
            return
        before, self._slow = self._slow, {}
        for finding in answer["findings"]:
            cause, rank, *_ = finding["key"]
            if cause != "slow rank" or not finding["goes_on"]:
                continue
            self._slow[rank] = before.get(rank, 0) + 1
            self._note(
                slow_rank=rank,
                times=self._slow[rank],
                factor=finding["factor"],
                cost_fraction=finding["cost_fraction"],
                pace_ns=answer["pace_ns"],
            )
