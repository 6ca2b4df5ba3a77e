"""The diagnosis of a run while it trains: every some iterations, in a process of its own.

The training process starts it and looks, between two iterations, whether it has ended with an
answer: it reads no trace, waits for nothing, and goes on without answers where the other process
fails. That one runs at the lowest priority, for a second or a few.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[3]
_DIAGNOSE = ("-m", "megatron.adaptive", "trace", "diagnose", "--json")
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
        is_wanted = 0 < interval < total_iterations - start_iteration
        self._folder = folder if is_wanted else None
        self._interval = interval
        self._next = start_iteration + 2
        self._report = report
        self._note = note
        self._reported: set[str] = set()
        self._slow: dict[int, int] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def after_iteration(self, iteration: int) -> None:
        """Ask where it is time to, and report what was answered. Takes a millisecond at most."""
        if self._process is not None:
            if self._process.poll() is not None:
                self._take(self._process)
        elif self._folder is not None and iteration - self._next + 1 >= self._interval:
            self._ask(self._folder, iteration)

    def close(self) -> None:
        """Report what is still found of the last question; idempotent. Blocks for 10 s at most."""
        self._folder = None
        if self._process is None:
            return
        try:
            self._process.wait(_LAST_S)
        except subprocess.TimeoutExpired:  # whoever ends a job does not wait for advice
            self._process.kill()
            self._process.wait()
        self._take(self._process)

    def _ask(self, folder: str, last: int) -> None:
        paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            self._answer = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe holds no long answer
            self._process = subprocess.Popen(
                [sys.executable, *_DIAGNOSE, folder, "--iterations", f"{self._next}-{last}"],
                stdin=subprocess.DEVNULL,
                stdout=self._answer,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 19)
        except OSError:
            return  # asked again after the next iteration
        self._next = last + 1

    def _take(self, ended: subprocess.Popen[bytes]) -> None:
        """Reports the answer of a process that has ended; one that failed gave none."""
        self._process = None
        with self._answer as file:
            file.seek(0)
            text = file.read()
        if ended.returncode:
            return
        answer = json.loads(text)
        for finding in answer["findings"]:
            name = _name(finding)
            if name not in self._reported:
                self._reported.add(name)
                self._report(f"warning: {finding['text']}")
        if self._note is not None:
            self._note_findings(self._note, answer["findings"])
            self._note_slow(self._note, answer)

    def _note_findings(
        self, note: Callable[..., None], findings: Sequence[Mapping[str, Any]]
    ) -> None:
        """Notes what mending each thing would gain; a run of Weights & Biases gets it as well."""
        found = [
            {
                "headline": one["headline"],
                "name": _name(one),
                "gain": round(one["cost_fraction"], 4),
                "do": one["advice"][0] if one["advice"] else "",
            }
            for one in findings
        ]
        note(findings=found)
        run = getattr(sys.modules.get("wandb"), "run", None)  # the user's, where there is one
        if run is not None and found:
            # With the values of the user's own next call: a step's number is theirs to choose.
            run.log({f"gain/{one['name']}": one["gain"] for one in found}, commit=False)

    def _note_slow(self, note: Callable[..., None], answer: Mapping[str, Any]) -> None:
        """Notes the ranks that an answer names as slow to its end."""
        before, self._slow = self._slow, {}
        for finding in answer["findings"]:
            if finding["cause"] != "slow rank" or finding["period"]["kind"] == "passed":
                continue
            rank = finding["ranks"][0]
            self._slow[rank] = before.get(rank, 0) + 1
            note(
                slow_rank=rank,
                times=self._slow[rank],
                factor=finding["factor"],
                cost_fraction=finding["cost_fraction"],
                pace_ns=answer["pace_ns"],
            )


def _name(finding: Mapping[str, Any]) -> str:
    """Names what a finding is about: the same when it is found again."""
    return " ".join(map(str, (finding["cause"], *finding["ranks"])))
