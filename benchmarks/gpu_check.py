"""Runs everything that needs a GPU in one call, within a time; see ``scripts/gpu_check.sh``.

    bash scripts/gpu_check.sh [--minutes 10] [--parts NAME ...] [--output FOLDER] [--rehearse]

Set-up, GPU tests and GPU rows of the benchmarks run as parts, in the order of their worth, each a
process of its own with a limit. A part that hangs is cut there, one that fails is recorded, and the
others run. After each the page and the JSON are written anew: what stops all of it leaves them::

    time   |<------------------------- minutes ------------------------->|
    parts  | set-up | device | ipc | equivalence |  ... planned for the rest  |
                               limit = twice the planned, if the rest keeps its own

The planned limits of all parts that one GPU can run are 560 s together. ``--rehearse`` runs the
same parts without a GPU: small models on the CPU, and CUDA IPC over the stand-in driver of the C++
tests. Needs nothing but Python itself. Exits with 0, 1 if a part failed or missed a goal, 2 without
a GPU or without a torch that sees it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, Row, markdown, one_line

GPU = "there is no GPU"
STEPS = ROOT / "benchmarks" / "gpu_steps.py"
_SET_SUBREAPER = 36
_PAGE_S = 5.0
_GRACE_S = 3.0
_LAST_LINES = 25
_TEST = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|RERUN)\b", re.MULTILINE)
_IN_PARTS_OF_THEIR_OWN = tuple(
    f"test_{name}.py" for name in ("cuda_ipc", "equivalence", "resume", "training", "transport")
)
_SHARED = (
    "One GPU: ranks of `pp2`, `v`, `equivalence` and `training` took turns on it. Their times are "
    "sums of time slices: they show what a pipeline costs, not what it gains."
)
_ALWAYS = ("device",)  # it finds the GPUs that others need
_MOST = 2.0  # times its planned seconds, after which a part is cut
_FAILURE = re.compile(r"^(?:FAILED|ERROR) (tests/\S+.*?)(?: - (.*))?$", re.MULTILINE)
_SKIP = re.compile(r"^SKIPPED \[(\d+)\] \S+: (.*)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One thing that is run.

    Attributes:
        name: of it, and of its files.
        command: its words; ``{python}``, ``{json}`` and ``{limit}`` stand for the Python that was
            set up, the file that its result goes to, if it writes one, and its seconds.
        planned_s: Seconds that are kept for it while parts before it run.
        needs: facts that have to be there, with the reason to leave it out without them.
        tests: whether the command is pytest's.
    """

    name: str
    command: tuple[str, ...]
    planned_s: float
    needs: tuple[tuple[str, str], ...] = ()
    tests: bool = False


@dataclass
class Outcome:
    """Holds what became of a part.

    Attributes:
        name: of the part.
        state: ``ok``, ``failed``, ``missed`` (a goal), ``cut`` or ``left out``.
        reason: why it is not ``ok``, one line.
        took_s, limit_s: seconds.
        rows: of its table.
        facts: everything else that it measured.
        tail: the last lines that it wrote, unless it is ``ok``.
    """

    name: str
    state: str = "ok"
    reason: str = ""
    took_s: float = 0.0
    limit_s: float = 0.0
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    tail: str = ""


def parts(*, rehearse: bool) -> list[Part]:
    """Returns the parts after the set-up, the most worth first."""

    def steps(name: str, planned_s: float, *needs: tuple[str, str]) -> Part:
        words = ("{python}", str(STEPS), "--part", name, "--json", "{json}", "--limit", "{limit}")
        return Part(
            name=name,
            command=(*words, *["--tiny"] * rehearse),
            planned_s=planned_s,
            needs=(("torch", "torch is missing"), *needs),
        )

    def tests(name: str, planned_s: float, *files: str) -> Part:
        # None of the options in pyproject.toml: their plugins may be missing.
        words = "{python} -m pytest -v -rfEs -o addopts=--import-mode=importlib".split()
        needs = [("torch", "torch is missing"), ("pytest", "pytest is missing")]
        return Part(
            name=name,
            command=(*words, *(word if word[0] == "-" else f"tests/{word}" for word in files)),
            planned_s=planned_s,
            needs=(*needs, *[("gpus", GPU)] * (not rehearse)),
            tests=True,
        )

    standin = ("transport/test_between_gpus.py",) if rehearse else ()
    memory_test = "gpu/test_memory.py::test_too_large_a_batch_says_what_to_lower"
    others = sorted(path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    gpu = () if rehearse else (("gpus", GPU),)
    two_gpus = ("two GPUs", "NCCL refuses two ranks on one GPU, and there is only one")
    engine = ("transformer_engine", "Transformer Engine is not installed")
    return [
        steps("device", 20),
        tests("ipc", 50, "gpu/test_cuda_ipc.py", *standin),
        tests("equivalence", 45, "gpu/test_equivalence.py"),
        steps("pp1", 60, *gpu),
        steps("pp2", 75, *gpu),
        steps("memory", 15, *gpu),
        tests("resume", 60, "gpu/test_resume.py"),
        steps("v", 45, *gpu),
        tests("transports", 25, "gpu/test_transport.py"),
        tests("training", 65, "gpu/test_training.py"),
        tests(
            "others",
            50,
            *(f"gpu/{name}" for name in others if name not in _IN_PARTS_OF_THEIR_OWN),
            f"--deselect=tests/{memory_test}",
        ),
        steps("nccl", 45, *gpu, two_gpus),
        steps("te", 45, *gpu, engine),
        tests("oom", 20, memory_test),
    ]


def set_up_part(pack: Path | None = None) -> Part:
    """Returns the part that makes the others possible.

    Args:
        pack: Folder that ``scripts/gpu_pack.sh`` made, for a machine without a network.
    """
    words = ("bash", "scripts/gpu_check.sh", "--set-up")
    return Part(name="set-up", command=words if pack is None else (*words, str(pack)), planned_s=30)


class Check:
    """Runs parts within a time and keeps the page up to date.

    Args:
        output: folder of page and JSON; made if it is not there.
        minutes: for all of it.
        rehearse: without a GPU.
        pack: Folder that ``scripts/gpu_pack.sh`` made, if any.
    """

    def __init__(
        self, output: Path, minutes: float, *, rehearse: bool, pack: Path | None = None
    ) -> None:
        self._output = output
        self._end_s = time.monotonic() + 60 * minutes - _PAGE_S
        # Whoever gives more time than planned has a slower machine.
        self._most = _MOST * max(1.0, minutes / 10)
        self._rehearse = rehearse
        self._begin = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self._python = sys.executable
        self.facts: dict[str, Any] = {"minutes": minutes, "rehearsal": rehearse}
        self.facts |= {"date": self._begin, "commit": commit(pack)}
        self.outcomes: list[Outcome] = []
        output.mkdir(parents=True, exist_ok=True)

    def run(self, set_up: Part | None, later: Sequence[Part]) -> int:
        """Runs all parts; returns the exit status."""
        # Whatever a part leaves behind becomes a child of this process, and is found.
        ctypes.CDLL(None).prctl(_SET_SUBREAPER, 1)
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
        """Returns what the Python that was set up can import."""
        names = "torch", "pytest", "transformer_engine"
        code = f"import importlib.util as u; print(*[n for n in {names} if u.find_spec(n)])"
        done = subprocess.run([self._python, "-c", code], capture_output=True, text=True, cwd=ROOT)
        return set(done.stdout.split())

    def _note_device(self, outcome: Outcome, available: set[str]) -> None:
        """Takes over what the part ``device`` found."""
        gpus = outcome.facts.get("gpus", 0)
        available |= {"gpus"} if gpus else set()
        available |= {"two GPUs"} if gpus > 1 else set()
        self.facts.update(outcome.facts)

    def _outcome(
        self, part: Part, folder: Path, later: Sequence[Part], available: set[str]
    ) -> Outcome:
        missed = [reason for need, reason in part.needs if need not in available]
        if missed:
            return Outcome(part.name, "left out", missed[0])
        if self._end_s - time.monotonic() < part.planned_s / 2:
            return Outcome(part.name, "left out", "no time was left")
        wanted = [one for one in later if all(need in available for need, _ in one.needs)]
        return self._run(part, folder, wanted)

    def _run(self, part: Part, folder: Path, later: Sequence[Part]) -> Outcome:
        left_s = self._end_s - time.monotonic()
        spare_s = left_s
        for one in later:
            if spare_s - one.planned_s >= part.planned_s:
                spare_s -= one.planned_s
        limit_s = max(1.0, min(self._most * part.planned_s, spare_s))
        result, log = folder / f"{part.name}.json", folder / f"{part.name}.log"
        given = {"{python}": self._python, "{json}": str(result), "{limit}": f"{limit_s:.0f}"}
        print(f"{part.name}: at most {limit_s:.0f} s", flush=True)
        begin_s = time.monotonic()
        with log.open("w") as stream:
            status = run_limited(
                [given.get(word, word) for word in part.command],
                stream,
                limit_s,
                {"GPU_CHECK_REHEARSAL": "1"} if self._rehearse else {},
            )
        outcome = Outcome(part.name, took_s=time.monotonic() - begin_s, limit_s=limit_s)
        text = log.read_text(encoding="utf-8", errors="replace")
        if result.exists():
            found = json.loads(result.read_text(encoding="utf-8"))
            names = Row.__dataclass_fields__
            outcome.rows = [
                Row(**{name: one[name] for name in names if name in one}) for one in found["rows"]
            ]
            outcome.facts = found["facts"]
        if part.tests:
            _read_tests(text, outcome)
        _judge(outcome, status, text)
        if part.name == "set-up":
            self._take_python(text, outcome)
        return outcome

    def _take_python(self, text: str, outcome: Outcome) -> None:
        """Takes over the Python that the set-up names in its last line, and what it lacks."""
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
        said = f" ({outcome.reason})" if outcome.reason else ""
        print(f"{outcome.name}: {outcome.state}, {outcome.took_s:.0f} s{said}", flush=True)
        self.write()

    def _status(self, available: set[str]) -> int:
        problem = None
        if "torch" not in available:
            missing = ", ".join(self.facts.get("not installed", ()))
            problem = f"{self._python} has no torch{missing and f'; not installed: {missing}'}"
        elif "gpus" not in available and not self._rehearse:
            problem = f"torch of {self._python} finds no GPU; what runs without: --rehearse"
        if problem is not None:
            print(f"error: {problem}", file=sys.stderr)
            return 2
        bad = [one.name for one in self.outcomes if one.state in ("failed", "missed", "cut")]
        print(f"not ok: {', '.join(bad)}" if bad else "all that ran is ok")
        return int(bool(bad))

    def write(self) -> None:
        """Writes page and JSON."""
        result = {
            "begin": self._begin,
            **self.facts,
            "parts": [
                {**asdict(one), "rows": [row.as_dict() for row in one.rows]}
                for one in self.outcomes
            ],
        }
        text = json.dumps(result, indent=1, default=str) + "\n"
        (self._output / "gpu_check.json").write_text(text, encoding="utf-8")
        (self._output / "gpu_check.md").write_text(self._page(), encoding="utf-8")

    def _page(self) -> str:
        lines = [f"# GPU check, {self._begin}", ""]
        lines += ["A rehearsal without a GPU: its times mean nothing.", ""] * self._rehearse
        if self.facts.get("gpus") == 1:
            lines += [_SHARED, ""]
        lines += ["| part | | seconds | limit | |", "|---|---|---|---|---|"]
        for one in self.outcomes:
            times = f"{one.took_s:.0f} | {one.limit_s:.0f}" if one.limit_s else " | "
            lines.append(f"| {one.name} | {one.state} | {times} | {one_line(one.reason)} |")
        lines += ["", "## Machine and versions", "", "| | |", "|---|---|"]
        lines += [f"| {name} | {one_line(value)} |" for name, value in self.facts.items()]
        for one in self.outcomes:
            if one.rows:
                lines += ["", f"## {one.name}", "", markdown(one.rows).rstrip()]
        for one in self.outcomes:
            if one.tail:
                lines += ["", f"## {one.name}: {one.state}", "", "```", one.tail, "```"]
        return "\n".join(lines) + "\n"


def _judge(outcome: Outcome, status: int | None, text: str) -> None:
    """Says what became of a part that has run; ``status`` is ``None`` where it was cut."""
    missed = [row.what for row in outcome.rows if row.met is False]
    if status is None:
        outcome.state, outcome.reason = "cut", f"it took more than {outcome.limit_s:.0f} s"
    elif status:
        outcome.state = "failed"
        said = outcome.reason or next(iter(text.strip().splitlines()[-1:]), "")
        outcome.reason = one_line(f"status {status}: {said}")
    elif missed:
        outcome.state, outcome.reason = "missed", "; ".join(missed)
    elif not outcome.reason:
        return
    else:
        outcome.state = "left out"
    if outcome.state != "left out":
        outcome.tail = "\n".join(text.strip().splitlines()[-_LAST_LINES:])


def _read_tests(text: str, outcome: Outcome) -> None:
    """Takes the tests from what pytest printed, also up to where it was cut."""
    found: dict[str, int] = {}
    for _, state in _TEST.findall(text):
        found[state.lower()] = found.get(state.lower(), 0) + 1
    outcome.facts = {
        "tests": found,
        "failures": [[name, reason] for name, reason in _FAILURE.findall(text)],
        "skips": [[int(count), reason] for count, reason in _SKIP.findall(text)],
    }
    outcome.rows = [
        Row(what=f"{outcome.name}, {state}", value=count) for state, count in found.items()
    ]
    if failures := outcome.facts["failures"]:
        outcome.reason = "; ".join(f"{name}: {reason}" for name, reason in failures)
    elif set(found) == {"skipped"}:
        outcome.reason = "; ".join(dict.fromkeys(reason for _, reason in outcome.facts["skips"]))


def run_limited(
    command: Sequence[str], stream: Any, limit_s: float, more: Mapping[str, str]
) -> int | None:
    """Runs a program; nothing that it started outlives it.

    Args:
        command: its words.
        stream: takes what it writes.
        limit_s: it is stopped that soon before it is killed, so that all ends within the limit.
        more: Further variables of its environment.

    Returns:
        Its status, ``None`` where it was stopped.
    """
    path = os.pathsep.join(
        filter(None, [str(ROOT), str(ROOT / "build/gpu-check-site"), os.environ.get("PYTHONPATH")])
    )
    variables = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    variables.update(more)
    end_s = time.monotonic() + limit_s
    try:
        program = subprocess.Popen(
            command,
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        stream.write(f"{command[0]}: {error.strerror}\n")
        return 127
    status: int | None = None
    try:
        status = program.wait(max(0.1, min(limit_s - _GRACE_S, limit_s * 0.9)))
    except subprocess.TimeoutExpired:
        program.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(max(0.1, end_s - time.monotonic()))
    finally:
        _kill_children()
        program.poll()
    return status


def _kill_children() -> None:
    """Kills all processes below this one, also those whose parents have ended."""
    end_s = time.monotonic() + _GRACE_S
    while time.monotonic() < end_s:
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
            except OSError:
                continue  # it has ended
            parents[int(stat.parent.name)] = int(fields.split()[1])
        below: set[int] = set()
        level = {os.getpid()}
        while level:
            level = {pid for pid, parent in parents.items() if parent in level}
            below |= level
        if not below:
            return
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for pid in below:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue
        time.sleep(0.02)


def nvidia_smi() -> str:
    """Returns what the driver says about the GPUs, or why it says nothing."""
    if shutil.which("nvidia-smi") is None:
        return "there is no nvidia-smi"
    query = "name,driver_version,memory.total,memory.used,compute_mode,clocks.max.sm"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi failed: {error}"
    return (done.stdout or done.stderr).strip()


def card_and_driver(csv: str) -> dict[str, str]:
    """Returns the name of the first GPU and the driver's version from what :func:`nvidia_smi` gave.

    Args:
        csv: A line of heads and one line for each GPU; nothing is returned for another text.
    """
    lines = [[cell.strip() for cell in line.split(",")] for line in csv.splitlines()]
    if len(lines) < 2 or lines[0][:2] != ["name", "driver_version"] or len(lines[1]) < 2:
        return {}
    return {"card": lines[1][0], "driver": lines[1][1]}


def commit(pack: Path | None) -> str:
    """Returns the commit of these sources, with what was changed since, or why there is none.

    Args:
        pack: Folder that ``scripts/gpu_pack.sh`` made, which says it where there is no history.
    """
    if pack is not None and not (ROOT / ".git").exists() and (pack / "commit").exists():
        return (pack / "commit").read_text(encoding="utf-8").strip()
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"
    return done.stdout.strip() or f"unknown: {one_line(done.stderr)}"


def default_output(facts: dict[str, str], *, rehearse: bool) -> Path:
    """Returns the folder of page and JSON if the user names none.

    Runs on a GPU go to ``results/``, which is kept under version control, with date and card.

    Args:
        facts: Result of :func:`card_and_driver`.
        rehearse: Whether this is a rehearsal.
    """
    if rehearse or "card" not in facts:
        return ROOT / "runs" / time.strftime("gpu-check-%Y%m%d-%H%M%S")
    card = re.sub(r"[^a-z0-9.]+", "-", f"{facts['card']} {facts['driver']}".lower()).strip("-")
    return ROOT / "results" / f"gpu-check-{time.strftime('%Y-%m-%d-%H%M%S')}-{card}"


def chosen_parts(names: Sequence[str] | None, *, rehearse: bool) -> list[Part]:
    """Returns the parts of these names in their own order, and those that others need."""
    found = parts(rehearse=rehearse)
    if names is None:
        return found
    return [part for part in found if part.name in (*_ALWAYS, *names)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks this machine's GPU."""
    names = [part.name for part in parts(rehearse=False)]
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check.sh", description="Run everything that needs a GPU, within a time."
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="for all of it (%(default)g)")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=names,
        metavar="NAME",
        help=f"run these alone, after the set-up and {' and '.join(_ALWAYS)}: {', '.join(names)}",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="of gpu_check.md and .json; a folder in results/ with date, card and driver",
    )
    parser.add_argument(
        "--pack", type=Path, metavar="FOLDER", help="made by scripts/gpu_pack.sh: use no network"
    )
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, with small models")
    given = parser.parse_args(arguments)
    if not 0.5 <= given.minutes <= 24 * 60:
        parser.error(f"--minutes {given.minutes:g}: give at least 0.5")
    if given.pack is not None and not (given.pack / "wheels").is_dir():
        parser.error(
            f"--pack {given.pack}: it has no folder wheels; make it by scripts/gpu_pack.sh"
        )
    facts = card_and_driver(nvidia_smi())
    output = given.output or default_output(facts, rehearse=given.rehearse)
    pack = None if given.pack is None else given.pack.resolve()
    check = Check(output, given.minutes, rehearse=given.rehearse, pack=pack)
    status = check.run(set_up_part(pack), chosen_parts(given.parts, rehearse=given.rehearse))
    print(output / "gpu_check.md")
    return status


if __name__ == "__main__":
    sys.exit(main())
