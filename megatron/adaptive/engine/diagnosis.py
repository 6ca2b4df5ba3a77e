"""Diagnoses performance problems of a run during training, in a separate process.

The training process starts a diagnosing process every few iterations, and checks between iterations
whether that process has exited. The training process does not read traces itself, and waits for a
diagnosis only at the end of the run. If the diagnosing process fails, training continues without a
diagnosis. The diagnosing process runs for a few seconds, at the lowest priority.
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
"""Maximum time in seconds to wait for a running diagnosis at the end of the run."""


class RunningDiagnosis:
    """Finds the causes that slow down the run, and reports each cause once.

    Nothing is diagnosed if ``folder`` is ``None``, if ``interval`` is 0, or if the run has too few
    iterations for a diagnosis.

    Args:
        folder: Trace folder, or ``None`` if tracing is off or if this rank does not report.
        interval: Number of iterations between diagnoses. Each diagnosis covers the iterations since
            the previous diagnosis.
        start_iteration: Number of iterations completed before this process started. The first
            iteration after the start is not diagnosed.
        report: Function that prints the text of a finding.
        note: Function that records results, which are passed as keyword arguments. One call passes
            ``findings``, with the keys ``headline``, ``name``, ``gain`` (the fraction of a step
            that could be saved) and ``do`` (the advice) for each finding. There is also one call
            for each rank that is still slow in the last iteration. Its arguments are ``slow_rank``
            (the rank), ``times`` (the number of consecutive diagnoses in which this rank was slow),
            ``factor`` and ``cost_fraction`` (see ``Finding``), and ``pace_ns`` of all ranks (see
            ``Diagnosis``).
        total_iterations: Number of iterations of the run, or infinity if unknown.
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
        """Reports a diagnosis if it has finished, and starts the next diagnosis if it is due.

        This method must be called after each iteration, and takes at most a millisecond.
        """
        if self._process is not None:
            if self._process.poll() is not None:
                self._take(self._process)
        elif self._folder is not None and iteration - self._next + 1 >= self._interval:
            self._ask(self._folder, iteration)

    def begin_after(self, iteration: int) -> None:
        """Makes the next diagnosis begin with the second iteration after ``iteration``.

        Call this method after ``iteration`` when a new trace is started in the folder, for example
        because layers were moved. As at the start of the run, the first iteration of the new trace
        is not diagnosed.
        """
        self._next = iteration + 2
        self._slow = {}

    def close(self) -> None:
        """Waits up to 10 s for a running diagnosis and reports it. Safe to call more than once."""
        self._folder = None
        if self._process is None:
            return
        try:
            self._process.wait(_LAST_S)
        except subprocess.TimeoutExpired:  # A diagnosis must not delay the end of the job.
            self._process.kill()
            self._process.wait()
        self._take(self._process)

    def _ask(self, folder: str, last: int) -> None:
        paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            self._answer = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe could fill up
            self._process = subprocess.Popen(
                [sys.executable, *_DIAGNOSE, folder, "--iterations", f"{self._next}-{last}"],
                stdin=subprocess.DEVNULL,
                stdout=self._answer,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 19)
        except OSError:
            return  # ``after_iteration`` tries again after the next iteration.
        self._next = last + 1

    def _take(self, ended: subprocess.Popen[bytes]) -> None:
        """Reports the findings of the diagnosing process ``ended``, unless that process failed."""
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
        """Passes ``findings`` to ``note``, and logs their gains to Weights & Biases.

        Gains are only logged if the program has a Weights & Biases run.
        """
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
        # Use the user's Weights & Biases run, if there is one.
        run = getattr(sys.modules.get("wandb"), "run", None)
        if run is not None and notes:
            # The argument commit=False makes the values part of the user's next call of log(),
            # which determines the step number.
            run.log({f"gain/{entry['name']}": entry["gain"] for entry in notes}, commit=False)

    def _note_slow(self, note: Callable[..., None], answer: Mapping[str, Any]) -> None:
        """Calls ``note`` for each rank that is slow at the end of the diagnosed iterations.

        ``answer`` is the result of the diagnosis.
        """
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
    """Returns a name for ``finding`` that is the same whenever this problem is found again."""
    return " ".join(map(str, (finding["cause"], *finding["ranks"])))
