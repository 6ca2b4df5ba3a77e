"""Runs all parts of the GPU check within a time budget, and writes their results to two files.

Each part is a process with a time limit, and is stopped if it exceeds this limit. If a part fails,
the failure is recorded, and the other parts still run. The report ``gpu_check.md`` and the file
``gpu_check.json`` are rewritten after each part, so they exist even if the check is stopped. The
file ``gpu_check.log`` contains the output of all parts::

    time   |<------------------------- minutes ------------------------->|
    parts  | set-up | device | ipc | equivalence |  ... planned for later parts |
                               limit = twice the planned time, unless later parts need that time

The exit status is 0 on success, and 1 if a part failed or missed a goal. It is 2 if there is no GPU
or PyTorch cannot use it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu_check.limited_run import adopt_orphans, run_limited
from gpu_check.machine import card_and_driver, commit, nvidia_smi
from gpu_check.parts import Part
from harness.report import ROOT, Row, markdown, one_line

_PAGE_S = 5.0
"""Time that is reserved for writing the report, in seconds."""
_LAST_LINES = 25
_MOST_OUTPUT = 100_000
"""Largest number of characters of a part's output in the log file, counted from its end."""
_SHARED_GPU = (
    "The ranks of `pp2`, `v`, `equivalence` and `training` shared one GPU. Their times are sums "
    "of time slices, so they show the cost of a pipeline, not its speedup."
)
_MOST = 2.0
"""Largest time limit of a part, as a multiple of its planned time."""
_TEST = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|RERUN)\b", re.MULTILINE)
_FAILURE = re.compile(r"^(?:FAILED|ERROR) (tests/\S+.*?)(?: - (.*))?$", re.MULTILINE)
_SKIP = re.compile(r"^SKIPPED \[(\d+)\] \S+: (.*)$", re.MULTILINE)


@dataclass
class Outcome:
    """Result of a part of the check.

    Attributes:
        name: Name of the part.
        state: ``ok``, ``failed``, ``missed`` (a goal was missed), ``cut`` (the part was stopped at
            its time limit) or ``left out`` (the part was skipped).
        reason: Reason for the state in one line, or an empty string if the state is ``ok``.
        took_s: Duration of the part in seconds.
        limit_s: Time limit of the part, in seconds.
        rows: Rows of the table that shows the part's results.
        facts: Further results, by name.
        tail: Last lines of the part's output, or an empty string if the state is ``ok``.
    """

    name: str
    state: str = "ok"
    reason: str = ""
    took_s: float = 0.0
    limit_s: float = 0.0
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    tail: str = ""


class Check:
    """Runs parts within a time budget, and updates the report after each part.

    Args:
        output: Folder for the report, the JSON file and the log. It is created if necessary.
        minutes: Time budget for all parts together, in minutes.
        rehearse: Whether to run without a GPU.
        pack: Folder created by ``scripts/gpu_pack.sh``, or ``None`` if there is no pack.

    Attributes:
        facts: Information about the machine and the source code, by name.
        outcomes: Results of the parts that have run.
    """

    def __init__(
        self, output: Path, minutes: float, *, rehearse: bool, pack: Path | None = None
    ) -> None:
        self._output = output
        self._end_s = time.monotonic() + 60 * minutes - _PAGE_S
        # A larger time budget is used on slower machines, so the time limits of the parts grow with
        # it.
        self._most = _MOST * max(1.0, minutes / 10)
        self._rehearse = rehearse
        self._begin = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self._python = sys.executable
        self.facts: dict[str, Any] = {"minutes": minutes, "rehearsal": rehearse}
        self.facts |= {"date": self._begin, "commit": commit(pack)}
        self.outcomes: list[Outcome] = []
        output.mkdir(parents=True, exist_ok=True)
        (output / "gpu_check.log").write_text("", encoding="utf-8")

    def run(self, set_up: Part | None, later: Sequence[Part]) -> int:
        """Runs all parts, and returns the exit status.

        Args:
            set_up: Part that installs the requirements of the other parts, or ``None`` to skip this
                part.
            later: Parts to run after the set-up, in this order. Parts at the end may be skipped if
                time is short.
        """
        # This process becomes the parent of processes that a part leaves behind, so that it can
        # kill them.
        adopt_orphans()
        self.facts["nvidia-smi"] = nvidia_smi()
        self.facts |= card_and_driver(self.facts["nvidia-smi"])
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
            if set_up is not None:
                self._add(self._run(set_up, Path(folder), later))
            available = self._available()
            for number, part in enumerate(later):
                self._add(self._outcome(part, Path(folder), later[number + 1 :], available))
                if part.name == "device":
                    self._note_device(self.outcomes[-1], available)
        return self._status(available)

    def _available(self) -> set[str]:
        """Returns those of torch, pytest and transformer_engine that are installed."""
        names = "torch", "pytest", "transformer_engine"
        code = f"import importlib.util as u; print(*[n for n in {names} if u.find_spec(n)])"
        done = subprocess.run([self._python, "-c", code], capture_output=True, text=True, cwd=ROOT)
        return set(done.stdout.split())

    def _note_device(self, outcome: Outcome, available: set[str]) -> None:
        """Stores the results of the part ``device``. Adds to ``available`` which GPUs exist."""
        gpus = outcome.facts.get("gpus", 0)
        available |= {"gpus"} if gpus else set()
        available |= {"two GPUs"} if gpus > 1 else set()
        self.facts.update(outcome.facts)

    def _outcome(
        self, part: Part, folder: Path, later: Sequence[Part], available: set[str]
    ) -> Outcome:
        reasons = [reason for need, reason in part.needs if need not in available]
        if reasons:
            return Outcome(part.name, "left out", reasons[0])
        if self._end_s - time.monotonic() < part.planned_s / 2:
            return Outcome(part.name, "left out", "no time was left")
        possible = [other for other in later if all(need in available for need, _ in other.needs)]
        return self._run(part, folder, possible)

    def _run(self, part: Part, folder: Path, later: Sequence[Part]) -> Outcome:
        limit_s = self._limit_s(part, later)
        result, log = folder / f"{part.name}.json", folder / f"{part.name}.log"
        values = {"{python}": self._python, "{json}": str(result), "{limit}": f"{limit_s:.0f}"}
        print(f"{part.name}: time limit {limit_s:.0f} s", flush=True)
        begin_s = time.monotonic()
        with log.open("w") as output:
            status = run_limited(
                [values.get(word, word) for word in part.command],
                output,
                limit_s,
                {"GPU_CHECK_REHEARSAL": "1"} if self._rehearse else {},
            )
        outcome = Outcome(part.name, took_s=time.monotonic() - begin_s, limit_s=limit_s)
        text = log.read_text(encoding="utf-8", errors="replace")
        if result.exists():
            content = json.loads(result.read_text(encoding="utf-8"))
            names = Row.__dataclass_fields__
            outcome.rows = [
                Row(**{name: row[name] for name in names if name in row}) for row in content["rows"]
            ]
            outcome.facts = content["facts"]
        if part.tests:
            read_tests(text, outcome)
        _judge(outcome, status, text)
        if part.name == "set-up":
            self._take_python(text, outcome)
        with (self._output / "gpu_check.log").open("a", encoding="utf-8") as whole:
            whole.write(f"==== {part.name}: {outcome.state}\n{text[-_MOST_OUTPUT:]}\n")
        return outcome

    def _limit_s(self, part: Part, later: Sequence[Part]) -> float:
        """Returns the time limit of ``part`` in seconds. It leaves time for the ``later`` parts."""
        spare_s = self._end_s - time.monotonic()
        for other in later:
            if spare_s - other.planned_s >= part.planned_s:
                spare_s -= other.planned_s
        return max(1.0, min(self._most * part.planned_s, spare_s))

    def _take_python(self, text: str, outcome: Outcome) -> None:
        """Reads the path of Python and the missing packages from the set-up's output ``text``."""
        lines = text.splitlines()
        last = lines[-1].strip() if lines else ""
        if outcome.state == "ok" and Path(last).exists():
            self._python = last
        self.facts["python executable"] = self._python
        self.facts["not installed"] = [
            line.partition(": ")[2] for line in lines if line.startswith("not installed: ")
        ]
        if self.facts["not installed"]:
            outcome.tail = "\n".join(lines[-_LAST_LINES:])

    def _add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        reason = f" ({outcome.reason})" if outcome.reason else ""
        print(f"{outcome.name}: {outcome.state}, {outcome.took_s:.0f} s{reason}", flush=True)
        self.write()

    def _status(self, available: set[str]) -> int:
        problem = None
        if "torch" not in available:
            missing = ", ".join(self.facts.get("not installed", ()))
            problem = f"{self._python} has no torch{missing and f'; not installed: {missing}'}"
        elif "gpus" not in available and not self._rehearse:
            problem = f"torch in {self._python} finds no GPU; use --rehearse to run without a GPU"
        if problem is not None:
            print(f"error: {problem}", file=sys.stderr)
            return 2
        bad = [
            outcome.name
            for outcome in self.outcomes
            if outcome.state in ("failed", "missed", "cut")
        ]
        print(f"parts with problems: {', '.join(bad)}" if bad else "all parts that ran succeeded")
        return int(bool(bad))

    def write(self) -> None:
        """Writes the report and the JSON file."""
        result = {
            "begin": self._begin,
            **self.facts,
            "parts": [
                {**asdict(outcome), "rows": [row.as_dict() for row in outcome.rows]}
                for outcome in self.outcomes
            ],
        }
        text = json.dumps(result, indent=1, default=str) + "\n"
        (self._output / "gpu_check.json").write_text(text, encoding="utf-8")
        (self._output / "gpu_check.md").write_text(self._page(), encoding="utf-8")

    def _page(self) -> str:
        lines = [f"# GPU check, {self._begin}", ""]
        if self._rehearse:
            lines += ["This is a rehearsal without a GPU, so its times are meaningless.", ""]
        if self.facts.get("gpus") == 1:
            lines += [_SHARED_GPU, ""]
        lines += ["| part | | seconds | limit | |", "|---|---|---|---|---|"]
        for outcome in self.outcomes:
            times = f"{outcome.took_s:.0f} | {outcome.limit_s:.0f}" if outcome.limit_s else " | "
            reason = one_line(outcome.reason)
            lines.append(f"| {outcome.name} | {outcome.state} | {times} | {reason} |")
        lines += ["", "## Machine and versions", "", "| | |", "|---|---|"]
        lines += [f"| {name} | {one_line(value)} |" for name, value in self.facts.items()]
        for outcome in self.outcomes:
            if outcome.rows:
                lines += ["", f"## {outcome.name}", "", markdown(outcome.rows).rstrip()]
        for outcome in self.outcomes:
            if outcome.tail:
                title = f"## {outcome.name}: {outcome.state}"
                lines += ["", title, "", "```", outcome.tail, "```"]
        return "\n".join(lines) + "\n"


def _judge(outcome: Outcome, status: int | None, text: str) -> None:
    """Sets the state, the reason and the tail of ``outcome`` after the part has run.

    Args:
        outcome: Result of the part, which may already contain rows and a reason.
        status: Exit status of the part, or ``None`` if it was stopped.
        text: Output of the part.
    """
    missed = [row.what for row in outcome.rows if row.met is False]
    if status is None:
        outcome.state, outcome.reason = "cut", f"exceeded the time limit of {outcome.limit_s:.0f} s"
    elif status:
        outcome.state = "failed"
        reason = outcome.reason or next(iter(text.strip().splitlines()[-1:]), "")
        outcome.reason = one_line(f"status {status}: {reason}")
    elif missed:
        outcome.state, outcome.reason = "missed", "; ".join(missed)
    elif not outcome.reason:
        return
    else:
        outcome.state = "left out"
    if outcome.state != "left out":
        outcome.tail = "\n".join(text.strip().splitlines()[-_LAST_LINES:])


def read_tests(text: str, outcome: Outcome) -> None:
    """Adds pytest's results to ``outcome``, even if pytest was stopped.

    Args:
        text: Output of pytest.
        outcome: Result of the part. The function sets its facts, rows and reason.
    """
    counts: dict[str, int] = {}
    for _, state in _TEST.findall(text):
        counts[state.lower()] = counts.get(state.lower(), 0) + 1
    outcome.facts = {
        "tests": counts,
        "failures": [[name, reason] for name, reason in _FAILURE.findall(text)],
        "skips": [[int(count), reason] for count, reason in _SKIP.findall(text)],
    }
    outcome.rows = [
        Row(what=f"{outcome.name}, {state}", value=count) for state, count in counts.items()
    ]
    if failures := outcome.facts["failures"]:
        outcome.reason = "; ".join(f"{name}: {reason}" for name, reason in failures)
    elif set(counts) == {"skipped"}:
        outcome.reason = "; ".join(dict.fromkeys(reason for _, reason in outcome.facts["skips"]))
