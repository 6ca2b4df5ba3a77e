"""Diagnoses a run while it trains, in another process every few iterations.

The training process starts this process, and between two iterations it checks whether an answer is
there. It reads no trace, never waits, and continues without an answer if the other process fails.
The other process runs at the lowest priority for a few seconds.
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
"""Time limit in seconds for the last diagnosis when the run ends."""


class RunningDiagnosis:
    """Reports each cause that slows the run, once.

    Does nothing without a folder or an interval, or if the run ends before the first diagnosis.

    Args:
        folder: Folder of the traces, ``None`` for no trace and on ranks that do not report.
        interval: Number of iterations between two diagnoses. Each diagnosis covers the iterations
            since the one before.
        start_iteration: Number of iterations done before this process began. Its first iteration is
            not diagnosed.
        report: Function that takes the text of a finding.
        note: Function that takes the facts of an answer by keyword. ``findings`` has for each
            finding its ``headline``, its ``gain`` (the fraction of a step that a repair would save)
            and ``do`` (the advice). For each rank that is slow up to the last iteration it is also
            called with ``slow_rank`` (the rank), ``times`` (the number of diagnoses in a row that
            found it), ``factor`` and ``cost_fraction`` (see ``Finding``) and ``pace_ns`` of all
            ranks (see ``Diagnosis``).
        total_iterations: Number of iterations of the run, infinite if unknown.
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
        is_on = 0 < interval < total_iterations - start_iteration
        self._folder = folder if is_on else None
        self._interval = interval
        self._next = start_iteration + 2
        self._report = report
        self._note = note
        self._reported: set[str] = set()
        self._slow: dict[int, int] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def after_iteration(self, iteration: int) -> None:
        """Starts a diagnosis if one is due, and reports an answer. Takes a millisecond at most."""
        if self._process is not None:
            if self._process.poll() is not None:
                self._take(self._process)
        elif self._folder is not None and iteration - self._next + 1 >= self._interval:
            self._ask(self._folder, iteration)

    def close(self) -> None:
        """Reports the last diagnosis; idempotent. Blocks for 10 s at most."""
        self._folder = None
        if self._process is None:
            return
        try:
            self._process.wait(_LAST_S)
        except subprocess.TimeoutExpired:  # the end of a job does not wait for advice
            self._process.kill()
            self._process.wait()
        self._take(self._process)

    def _ask(self, folder: str, last: int) -> None:
        paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            self._answer = tempfile.TemporaryFile()  # noqa: SIM115 - too long for a pipe
            self._process = subprocess.Popen(
                [sys.executable, *_DIAGNOSE, folder, "--iterations", f"{self._next}-{last}"],
                stdin=subprocess.DEVNULL,
                stdout=self._answer,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 19)
        except OSError:
            return  # tried again after the next iteration
        self._next = last + 1

    def _take(self, ended: subprocess.Popen[bytes]) -> None:
        """Reports the answer of a process that has ended, unless it failed."""
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
        """Notes the gain of each repair, and logs it to Weights & Biases if the user has a run."""
        notes = [
            {
                "headline": finding["headline"],
                "name": _name(finding),
                "gain": round(finding["cost_fraction"], 4),
                "do": finding["advice"][0] if finding["advice"] else "",
            }
            for finding in findings
        ]
        note(findings=notes)
        run = getattr(sys.modules.get("wandb"), "run", None)  # the user's run, if any
        if run is not None and notes:
            # commit=False adds the values to the user's next call, which chooses the step number.
            run.log({f"gain/{entry['name']}": entry["gain"] for entry in notes}, commit=False)

    def _note_slow(self, note: Callable[..., None], answer: Mapping[str, Any]) -> None:
        """Notes the ranks that are slow up to the last diagnosed iteration."""
        before = self._slow
        self._slow = {}
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
    """Returns a name for a finding, which stays the same if it is found again."""
    return " ".join(map(str, (finding["cause"], *finding["ranks"])))
