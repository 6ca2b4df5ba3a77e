"""What is known of a job of Slurm or of pods: its state, its logs, whether it moves."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron.adaptive.errors import SetupError
from megatron.adaptive.launch.slurm import slurm

__all__ = ["JobStatus", "NodeStatus", "read_status"]

_TAIL_BYTES = 1 << 16
_SHOWN = 3
_STALLED = 5
_LEAST_STALL_S = 30.0
_RUNNING = ("RUNNING", "COMPLETING", "")
_ITERATION = re.compile(
    r"^ \[([\d :-]{19})\] iteration +(\d+)/ *(\d+) .*?per iteration \(ms\): ([\d.]+)"
)
_START = re.compile(r"=== .* node \d+ starts$|job \d+, start \d+: ")
_TOKENS = re.compile(r"tokens/s/rank: ([\d.]+)")
_EFFECTIVE = re.compile(
    r"using world size: (\d+), data-parallel-size: (\d+), tensor-model-parallel size: (\d+), "
    r"pipeline-model-parallel size: (\d+)"
)
_EFFECTIVE_NAMES = ("WORLD_SIZE", "DP_SIZE", "TENSOR_MP_SIZE", "PIPELINE_MP_SIZE")
_ERROR = re.compile(r"^error: |^\w*(Error|Exception)\b|: error: |out of memory|Traceback")
_WARNING = re.compile(r"warning", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class NodeStatus:
    """What a node's files say.

    Attributes:
        name: of its files.
        out: last lines of its output.
        err: last lines of its errors.
        errors: lines of both that tell an error, each once.
        warnings: lines that tell a warning, each once.
        use: the latest sample of ``sampler.py``, ``None`` without one.
    """

    name: str
    out: tuple[str, ...]
    err: tuple[str, ...]
    errors: tuple[str, ...]
    warnings: tuple[str, ...]
    use: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """What is known of a job.

    Attributes:
        job: its id.
        state: Slurm's word for it; empty where Slurm does not know it.
        nodes: by name of their files; ``batch`` is the batch script of Slurm.
        iteration: the latest, ``None`` before the first.
        iterations: of the whole training.
        iteration_ms: median of the latest iterations.
        tokens_per_s: of all ranks.
        since_s: time since the latest iteration's line.
        is_stalled: it runs and no iteration came for five times the median.
        requested: variables of the configuration.
        differences: name, requested and effective value, where they differ.
    """

    job: str
    state: str
    nodes: tuple[NodeStatus, ...]
    iteration: int | None
    iterations: int | None
    iteration_ms: float | None
    tokens_per_s: float | None
    since_s: float | None
    is_stalled: bool
    requested: dict[str, str]
    differences: tuple[tuple[str, str, str], ...]


def read_status(job: str, logs: Path) -> JobStatus:
    """Gather what is known of a job. Reads the ends of its files only.

    Args:
        job: its id, which is the name of its folder.
        logs: the folder that has a folder for each job.

    Raises:
        SetupError: neither Slurm nor the logs know the job.
    """
    folder = logs / job
    state = _state(job)
    if not state and not folder.is_dir():
        raise SetupError(
            f"job {job}: Slurm does not know it and there is no {folder}; give the folder of logs "
            "with --log-dir, or see squeue for the ids that there are"
        )
    names = sorted({path.stem for path in folder.glob("*.out")})
    texts = {name: (_tail(folder / f"{name}.out"), _tail(folder / f"{name}.err")) for name in names}
    nodes = tuple(_node(folder, name, *texts[name]) for name in names)
    if (logs / f"{job}.batch").is_file():  # Slurm says there which node failed
        nodes += (_node(folder, "batch", _tail(logs / f"{job}.batch"), []),)
    lines = [match for out, _ in texts.values() for match in map(_ITERATION.match, out) if match]
    record = _record(folder / "run.json")
    requested = record.get("conf", {})
    ms = statistics.median(float(line[4]) for line in lines[-50:]) if lines else None
    since_s = None
    if lines:
        last = datetime.strptime(lines[-1][1], "%Y-%m-%d %H:%M:%S").timestamp()
        since_s = max(0.0, time.time() - last)
    ended = any("training ends" in line for out, _ in texts.values() for line in out[-20:])
    limit_s = max(_LEAST_STALL_S, _STALLED * (ms or 0.0) / 1e3)
    return JobStatus(
        job=job,
        state=state,
        nodes=nodes,
        iteration=int(lines[-1][2]) if lines else None,
        iterations=int(lines[-1][3]) if lines else None,
        iteration_ms=ms,
        tokens_per_s=_tokens(texts, record.get("world_size")),
        since_s=since_s,
        is_stalled=since_s is not None and since_s > limit_s and state in _RUNNING and not ended,
        requested=requested,
        differences=_differences(folder, names, requested, record),
    )


def _state(job: str) -> str:
    """Return Slurm's state of a job; ``squeue`` first, for ``sacct`` lags."""
    if not job.isdigit():
        return ""
    for command in (
        ["squeue", "-h", "-j", job, "-o", "%T"],
        ["sacct", "-n", "-X", "-j", job, "-o", "state%30"],
    ):
        if shutil.which(command[0]) is None:
            continue
        try:
            words = slurm(command).split()
        except SetupError:
            continue  # it no longer knows the id, or there is no accounting
        if words:
            return words[0]
    return ""


def _tail(path: Path) -> list[str]:
    """Return the last lines of a file, which may be large, missing or cut off anywhere."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = text.splitlines()
    if size > _TAIL_BYTES:
        lines = lines[1:]
    # A job that was queued again writes on: only its latest start counts.
    starts = [index for index, line in enumerate(lines) if _START.match(line)]
    return lines[starts[-1] + 1 :] if starts else lines


def _head(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(1 << 14).decode(errors="replace")
    except OSError:
        return ""


def _node(folder: Path, name: str, out: list[str], err: list[str]) -> NodeStatus:
    both = [line.strip() for line in (*err, *out)]
    errors = tuple(dict.fromkeys(line for line in both if _ERROR.search(line)))
    warnings = tuple(
        dict.fromkeys(line for line in both if _WARNING.search(line) and line not in errors)
    )
    samples = _tail(folder / f"{name}.gpu")
    use = None
    for sample in reversed(samples):
        try:
            use = json.loads(sample)
            break
        except ValueError:
            continue  # a line that is being written
    return NodeStatus(
        name=name,
        out=tuple(out[-_SHOWN:]),
        err=tuple(err[-_SHOWN:]),
        errors=errors[-_SHOWN:],
        warnings=warnings[-_SHOWN:],
        use=use,
    )


def _record(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _tokens(texts: dict[str, tuple[list[str], list[str]]], world_size: int | None) -> float | None:
    found = [
        float(match[1])
        for out, _ in texts.values()
        for match in map(_TOKENS.search, out[-50:])
        if match
    ]
    return statistics.median(found) * world_size if found and world_size else None


def _differences(
    folder: Path, names: list[str], requested: dict[str, str], record: dict[str, Any]
) -> tuple[tuple[str, str, str], ...]:
    """Compare what rank 0 printed of its sizes with what was asked for."""
    for name in names:
        match = _EFFECTIVE.search(_head(folder / f"{name}.out"))
        if match is None:
            continue
        wanted = {"WORLD_SIZE": str(record.get("world_size", "")), **requested}
        pairs = zip(_EFFECTIVE_NAMES, match.groups(), strict=True)
        return tuple(
            (variable, wanted[variable], value)
            for variable, value in pairs
            if wanted.get(variable) and wanted[variable] != value
        )
    return ()
