"""Prints the state of a job; ``get_result.sh`` calls it.

Reads the logs of a job of Slurm or of pods: its state, its nodes, whether it moves. Files may be
large, missing, or cut off anywhere, and a job that was queued again appends to them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pwd
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron.adaptive.cli.common import show
from megatron.adaptive.cli.submit import slurm
from megatron.adaptive.cluster.inventory import ENDED
from megatron.adaptive.config.command_parser import CommandParser, last_value
from megatron.adaptive.config.environment import MASK, WORK_FOLDER, is_secret, masked_text
from megatron.adaptive.config.input_files import open_file, parse_json, read_whole
from megatron.adaptive.errors import SetupError
from megatron.adaptive.trace.status_files import PROGRESS_NAME, ProgressTail, progress_file

_PERIOD_S = 5.0
_GIB = 1 << 30


def main(argv: Sequence[str]) -> int:
    """Prints the state of a job.

    Returns:
        1 if it is stalled, a node was lost or a node reported an error.
    """
    parser = CommandParser(prog="get_result.sh", description="Report the state of a job.")
    add = parser.add_argument
    add("job", help="its id, which is the name of its folder of logs")
    add("--log-dir", type=Path, default=WORK_FOLDER / "logs", help="LOG_DIR of conf.sh (logs)")
    add("--follow", action="store_true", help="print again every 5 s until it has ended")
    add("--json", action="store_true", help="as JSON; with --follow a line each time")
    options = parser.parse_args(argv)
    while True:
        status = read_status(options.job, options.log_dir)
        if not (status.state or status.nodes or status.iteration):
            raise SetupError(
                f"{status.folder} holds no logs of a job, and Slurm does not know it: name a job"
                " and, with --log-dir, the folder of its logs"
            )
        if options.json:
            print(json.dumps(asdict(status), indent=None if options.follow else 2), flush=True)
        else:
            show(_text(status))
        if not options.follow or status.is_over:
            return int(status.is_stalled or status.has_errors)
        time.sleep(_PERIOD_S)


def _text(status: JobStatus) -> str:
    reason = f" ({status.reason})" if status.reason else ""
    lines = [f"job {status.job}: {status.state or 'not known to Slurm'}{reason}"]
    nodes = [line for node in status.nodes for line in _node_lines(node)]
    return "\n".join([*lines, *summary(status), *nodes])


def summary(status: JobStatus) -> list[str]:
    """Returns how far a job is and what is wrong with it, a line each."""
    lines = [f"LOST: node {name}: {why}" for name, why in status.lost.items()]
    if not status.nodes:
        lines.append(f"no logs in {status.folder} yet; another LOG_DIR is given with --log-dir")
    elif status.iteration is None:
        lines.append("no iteration yet")
    else:
        pace = "" if status.iteration_ms is None else f", {status.iteration_ms:.1f} ms each"
        speed = "" if status.tokens_per_s is None else f", {status.tokens_per_s:.0f} tokens/s"
        lines.append(
            f"iteration {status.iteration} of {status.iterations}{pace}{speed}; the latest"
            f" {status.since_s:.0f} s ago"
        )
    if status.is_stalled:
        lines.append("STALLED: no iteration for more than 5 times the usual; see each node's use")
    for name, wanted, found in status.differences:
        lines.append(f"DIFFERENT: {name} is {found}, {wanted} was requested")
    return lines


def _node_lines(node: NodeStatus) -> list[str]:
    if node.is_former:
        return [f"--- {node.name}: took part in an earlier start of the job only"]
    lines = [f"--- {node.name}: {_use(node)}"]
    for title, found in (
        ("error", node.errors),
        ("warning", node.warnings),
        ("out", node.out),
        ("err", node.err),
    ):
        lines += [f"{title:8} {line.rstrip()}" for line in found]
    return lines


def _use(node: NodeStatus) -> str:
    if node.use is None:
        return "no sample of its use"
    gpus = [
        f"GPU {gpu['index']} {gpu['used_percent']}% "
        f"{gpu['memory_used_bytes'] / _GIB:.1f} GiB, {len(gpu.get('pids', ()))} processes"
        for gpu in node.use["gpus"]
    ]
    processes = node.use["processes"]
    memory = sum(one["memory_bytes"] for one in processes) / _GIB
    used = sum(one["cpu_percent"] for one in processes)
    age_s = time.time() - node.use["unix_s"]
    own = f"{len(processes)} processes, {used:.0f}% CPU, {memory:.1f} GiB"
    return "; ".join([*gpus, own, f"sampled {age_s:.0f} s ago"])


TAIL_BYTES = 1 << 16

_SHOWN = 3
_MEDIAN_OF = 50
_STALLED = 5
_LEAST_STALL_S = 30.0
_SILENT_S = 15.0
"""A node writes a sample every 5 s: after three that did not come it is taken for lost."""
_RUNNING = ("RUNNING", "COMPLETING", "")
_GOOD_ENDS = ("COMPLETED", "CANCELLED", "PENDING", "REQUEUED", "SUSPENDED", "PREEMPTED", "TIMEOUT")
_GOES_ON = (
    *("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED", "STOPPED"),
    *("REQUEUE_HOLD", "REQUEUE_FED", "RESIZING", "SIGNALING", "STAGE_OUT", "SPECIAL_EXIT"),
)
_LOST_STATES = ("down", "fail", "reboot", "power")
_RECORD: Mapping[str, Any] = {
    "started_unix_s": int | float,
    "conf": dict,
    "processes": list,
    "world_size": int,
    "flags": list,
}
_START = re.compile(r"=== .* node \d+ starts$|job \d+, start \d+: ")
_SIZES = {
    "WORLD_SIZE": "world_size",
    "DP_SIZE": "data_parallel_size",
    "TENSOR_MP_SIZE": "tensor_model_parallel_size",
    "PIPELINE_MP_SIZE": "pipeline_model_parallel_size",
}
_ERROR = re.compile(r"^error: |^\w*(Error|Exception)\b|: error: |out of memory|Traceback")
_WARNING = re.compile(r"warning", re.IGNORECASE)


def _differences(
    requested: Mapping[str, str], effective: Mapping[str, str]
) -> tuple[tuple[str, str, str], ...]:
    """Returns name, requested and effective value of what is not as it was asked for."""
    grows = "--rampup-batch-size" in requested.get("TRAINER_FLAGS", "")
    return tuple(
        (name, requested[name], value)
        for name, value in effective.items()
        if requested.get(name)
        and requested[name] != value
        and not (grows and name == "GLOBAL_BATCH_SIZE")
    )


def _kind(line: str) -> str:
    """Returns whether a line reports an ``error``, a ``warning`` or neither."""
    return "error" if _ERROR.search(line) else "warning" if _WARNING.search(line) else ""


def node_names(folder: Path) -> list[str]:
    """Returns the nodes that have files in a job's folder."""
    return sorted({path.stem for path in folder.glob("*.out")})


def read_record(folder: Path) -> dict[str, Any]:
    """Returns what ``run.json`` of a job says, empty where it is missing or cut off.

    Secrets, which files of earlier programs hold, are hidden.
    """
    try:
        read = parse_json(read_whole(folder / "run.json"))
        found = {n: v for n, v in read.items() if isinstance(v, _RECORD.get(n, object))}
        numbers = [*found.get("processes", ()), found.get("world_size", 0)]
        if not all(isinstance(one, int) for one in numbers):
            return {}
        conf = {
            name: MASK if is_secret(name) else masked_text(str(text))
            for name, text in found.get("conf", {}).items()
        }
    except (OSError, ValueError, AttributeError):
        return {}
    return {**found, "conf": conf, "flags": [str(word) for word in found.get("flags", ())]}


def tail(path: Path) -> list[str]:
    """Returns the last lines of a file, of its latest start only."""
    try:
        with open_file(path) as file:
            length = file.seek(0, 2)
            file.seek(max(0, length - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = text.splitlines()
    if length > TAIL_BYTES:
        lines = lines[1:]
    starts = [index for index, line in enumerate(lines) if _START.match(line)]
    return lines[starts[-1] + 1 :] if starts else lines


def lines_of(path: Path) -> Iterator[str]:
    """Yields all lines of a file, none if it is missing."""
    try:
        with io.TextIOWrapper(open_file(path), encoding="utf-8", errors="replace") as file:
            for line in file:
                yield line.rstrip("\n")
    except OSError:
        return


def samples_of(path: Path, latest: bool = False) -> Iterator[dict[str, Any]]:
    """Yields the samples of a node's use, or the latest alone; skips lines that are cut off."""
    lines: Iterator[str] = iter(reversed(tail(path))) if latest else lines_of(path)
    for line in lines:
        try:
            sample = parse_json(line, strict=False)
        except ValueError:
            continue
        if _is_sample(sample):
            yield {"gpus": [], "processes": [], **sample}
            if latest:
                return


def _is_sample(sample: Any) -> bool:
    """Checks that what is added up in a sample are numbers."""
    with contextlib.suppress(KeyError, TypeError):
        for gpu in sample.get("gpus", []) if isinstance(sample, dict) else [{}]:
            gpu["index"] + gpu["memory_used_bytes"] + len(gpu.get("pids", []))
            gpu["used_percent"]
        for one in sample.get("processes", []):
            one["memory_bytes"] + one["cpu_percent"]
        return isinstance(sample.get("unix_s"), int | float)
    return False


def count_messages(*paths: Path) -> dict[str, Counter[str]]:
    """Returns the errors and warnings in some files by kind, with how often each occurs."""
    found: dict[str, Counter[str]] = {"error": Counter(), "warning": Counter()}
    for path in paths:
        for line in lines_of(path):
            if kind := _kind(line):
                found[kind][line.strip()] += 1
    return found


@dataclass(frozen=True, kw_only=True)
class SlurmState:
    """Holds Slurm's account of a job; everything is empty where it has none.

    Attributes:
        state: its word, such as ``RUNNING``.
        user: whose job it is.
        reason: why it waits.
        nodes: Slurm's state of each node that the job holds or, once it is over, held.
    """

    state: str = ""
    user: str = ""
    reason: str = ""
    nodes: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class NodeStatus:
    """Summarizes a node's files.

    Attributes:
        name: of its files.
        out: last lines of its output.
        err: last lines of its errors.
        errors: lines of both that report an error, each once.
        warnings: lines that report a warning, each once.
        use: the latest sample of ``sampler.py``, ``None`` without one.
        is_former: it took part in an earlier start of the job only.
    """

    name: str
    out: tuple[str, ...]
    err: tuple[str, ...]
    errors: tuple[str, ...]
    warnings: tuple[str, ...]
    use: dict[str, Any] | None
    is_former: bool = False


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """Summarizes a job.

    Attributes:
        job: its id.
        state: Slurm's word for it; empty where Slurm does not know it.
        reason: why it waits, empty where it does not.
        folder: of its logs.
        nodes: by name of their files; ``batch`` is the batch script of Slurm.
        lost: nodes that vanished, with why that is known.
        iteration: the latest, ``None`` before the first.
        iterations: of the whole training.
        iteration_ms: median of the latest iterations.
        tokens_per_s: of all ranks.
        since_s: time since the latest iteration's line.
        is_over: nothing more comes of it.
        is_stalled: it runs and no iteration came for five times the median.
        requested: variables of the configuration.
        effective: those of them that the run says itself, by the same names.
        differences: name, requested and effective value, where they differ.
    """

    job: str
    state: str
    reason: str
    folder: str
    nodes: tuple[NodeStatus, ...]
    lost: dict[str, str]
    iteration: int | None
    iterations: int | None
    iteration_ms: float | None
    tokens_per_s: float | None
    since_s: float | None
    is_over: bool
    is_stalled: bool
    requested: dict[str, str]
    effective: dict[str, str]
    differences: tuple[tuple[str, str, str], ...]

    @property
    def has_errors(self) -> bool:
        """Returns whether a node was lost or reports an error in the job's latest start."""
        return bool(self.lost) or any(node.errors for node in self.nodes if not node.is_former)


def read_status(job: str, logs: Path, progress: ProgressTail | None = None) -> JobStatus:
    """Summarizes a job from the ends of its files.

    Args:
        job: its id, which is the name of its folder.
        logs: the folder that has a folder for each job.
        progress: how far it is, where that was read already.

    Raises:
        SetupError: neither Slurm nor the logs know the job, or it is another user's.
    """
    folder = logs / job
    known = slurm_state(job)
    _check_known(job, folder, known)
    record = read_record(folder)
    if progress is None:
        progress = progress_of(folder, record)
        progress.refresh()
    # A start that trains not yet has only lines of the one before; clocks of nodes may differ.
    since_ns = max(
        progress.start.get("unix_ns", 0), (record.get("started_unix_s", 0.0) - _SILENT_S / 3) * 1e9
    )
    lines = [line for line in progress.records if line["unix_ns"] >= since_ns]
    ended = progress.ended_ns >= since_ns and bool(progress.ended)
    names = node_names(folder)
    ends = {name: (tail(folder / f"{name}.out"), tail(folder / f"{name}.err")) for name in names}
    nodes = tuple(_node(folder, name, *ends[name]) for name in names)
    nodes = tuple(replace(node, is_former=_is_former(node, record)) for node in nodes)
    lost = {} if ended else _lost(known, nodes)
    if (logs / f"{job}.batch").is_file():  # Slurm says there which node failed
        nodes += (_node(folder, "batch", tail(logs / f"{job}.batch"), []),)
    latest = lines[-1] if lines else {}
    ms = _median(lines, "step_ms")
    since_s = max(0.0, time.time() - latest["unix_ns"] / 1e9) if lines else None
    limit_s = max(_LEAST_STALL_S, _STALLED * (ms or 0.0) / 1e3)
    requested = {**record.get("conf", {})}
    requested["WORLD_SIZE"] = str(record.get("world_size", requested.get("WORLD_SIZE", "")))
    effective = _effective_sizes(progress.start, latest)
    return JobStatus(
        job=job,
        state=known.state,
        reason=known.reason,
        folder=str(folder),
        nodes=nodes,
        lost=lost,
        iteration=latest.get("iteration"),
        iterations=progress.total_iterations if lines else None,
        iteration_ms=ms,
        tokens_per_s=_median(lines, "tokens_per_s"),
        since_s=since_s,
        # By Slurm; of pods, by the training or all nodes.
        is_over=known.state not in _GOES_ON
        if known.state
        else ended or bool(lost) or all(node.use and node.use.get(ENDED) for node in nodes),
        is_stalled=since_s is not None
        and since_s > limit_s
        and known.state in _RUNNING
        and not ended,
        requested={name: value for name, value in requested.items() if value},
        effective=effective,
        differences=_differences(requested, effective),
    )


def slurm_rows(words: Sequence[str]) -> list[list[str]]:
    """Returns the columns of what a program of Slurm prints; none where it is missing or fails."""
    with contextlib.suppress(SetupError):
        return [line.split("|") for line in slurm(words).splitlines() if "|" in line]
    return []


def slurm_state(job: str) -> SlurmState:
    """Asks Slurm for a job, ``squeue`` first, for ``sacct`` lags; hetjobs by their first part."""
    for command in (
        ["squeue", "-h", "-j", job, "-o", "%T|%u|%r|%N"],
        ["sacct", "-n", "-X", "-P", "-j", job, "-o", "state,user,reason,nodelist"],
    ):
        # None where it no longer knows the id, or there is no accounting.
        rows = [row for row in slurm_rows(command) if len(row) > 3] if job.isdigit() else []
        if rows:
            held = ",".join(row[3] for row in rows if row[3] and not row[3].startswith("None"))
            sinfo = ["sinfo", "-h", "-a", "-N", "-n", held, "-o", "%N|%T"]
            return SlurmState(
                state=(rows[0][0].split() or [""])[0],
                user=rows[0][1],
                reason="" if rows[0][2] == "None" else rows[0][2],
                nodes={row[0]: row[1].strip() for row in (slurm_rows(sinfo) if held else ())},
            )
    return SlurmState(nodes={})


def _check_known(job: str, folder: Path, known: SlurmState) -> None:
    if folder.is_dir():
        if os.access(folder, os.R_OK | os.X_OK):
            return
        raise SetupError(
            f"job {job}: this user may not read {folder}; ask its owner for the permission"
        )
    if not known.state:
        raise SetupError(
            f"job {job}: Slurm does not know it and there is no {folder}; give the folder of logs "
            "with --log-dir, or see squeue for the ids that there are"
        )
    own = pwd.getpwuid(os.getuid()).pw_name
    if known.user and known.user != own:
        raise SetupError(
            f"job {job}: it is {known.user}'s ({known.state}), not {own}'s, and there is no "
            f"{folder}; give the LOG_DIR of {known.user} with --log-dir"
        )


def _is_former(node: NodeStatus, record: Mapping[str, Any]) -> bool:
    """Returns whether a node's latest sample is older than the latest start of the job."""
    started_s = record.get("started_unix_s")
    if node.use is None or not isinstance(started_s, (int, float)):
        return False
    return bool(node.use["unix_s"] < started_s - _SILENT_S / 3)


def _lost(known: SlurmState, nodes: tuple[NodeStatus, ...]) -> dict[str, str]:
    """Returns the nodes that vanished: Slurm says so, or their samples stopped without a last one.

    While a job runs, a node that is silent is lost, before Slurm knows. When it is over, processes
    may have been killed before they wrote a last sample: then Slurm's word counts where it has one.
    """
    found: dict[str, str] = {}
    if known.state in _GOOD_ENDS:
        return found
    for name, state in known.nodes.items():
        word = state.lower()
        if word.endswith("*") or any(word.startswith(one) for one in _LOST_STATES):
            found[name] = f"Slurm says it is {state.rstrip('*')}" + (
                " and does not answer" if word.endswith("*") else ""
            )
    now_s = time.time()
    for node in nodes:
        if node.is_former or node.use is None or node.use.get(ENDED):
            continue
        if known.state not in _RUNNING and node.name in known.nodes:
            continue
        silent_s = now_s - node.use["unix_s"]
        if silent_s > _SILENT_S:
            found.setdefault(node.name, f"no sign of it for {silent_s:.0f} s")
    return found


def _node(folder: Path, name: str, out: list[str], err: list[str]) -> NodeStatus:
    kinds = {line.strip(): _kind(line.strip()) for line in (*err, *out)}
    errors, warnings = (
        tuple(line for line, own in kinds.items() if own == kind) for kind in ("error", "warning")
    )
    return NodeStatus(
        name=name,
        out=tuple(out[-_SHOWN:]),
        err=tuple(err[-_SHOWN:]),
        errors=errors[-_SHOWN:],
        warnings=warnings[-_SHOWN:],
        use=next(samples_of(folder / f"{name}.gpu", latest=True), None),
    )


def progress_of(
    folder: Path, record: Mapping[str, Any], kept: int | None = _MEDIAN_OF
) -> ProgressTail:
    """Returns the reader of how far a job is.

    Args:
        folder: of its logs.
        record: its ``run.json``; flags of the user's may name another folder.
        kept: lines to keep, ``None`` for all.
    """
    path, named = progress_file(folder), last_value(record.get("flags", []), "--progress-dir")
    if not path.is_file() and named:
        path = Path(named) / PROGRESS_NAME
    return ProgressTail(path, kept)


def _median(lines: Sequence[Mapping[str, Any]], key: str) -> float | None:
    found = [line[key] for line in lines[-_MEDIAN_OF:] if line.get(key) is not None]
    return statistics.median(found) if found else None


def _effective_sizes(start: Mapping[str, Any], latest: Mapping[str, Any]) -> dict[str, str]:
    """Returns the sizes of a run as it writes them, by the variables of ``conf.sh``."""
    found = {name: start.get(key) for name, key in _SIZES.items()}
    if latest:
        found["TRAIN_ITERS"] = start.get("total_iterations")
        found["GLOBAL_BATCH_SIZE"] = latest.get("global_batch_size")
    return {name: str(value) for name, value in found.items() if value is not None}
