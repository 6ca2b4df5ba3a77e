"""Prints the state of a job, for ``get_result.sh``.

Reads the logs of a job on Slurm or in pods, and prints the job's state, nodes and progress. Log
files may be large, missing or truncated. If Slurm requeues a job, the new start of the job appends
to the files of the earlier start.
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
from megatron.adaptive.config.command_parser import PROGRAM, CommandParser, last_value
from megatron.adaptive.config.environment import MASK, WORK_FOLDER, is_secret, masked_text
from megatron.adaptive.config.input_files import open_file, parse_json, read_whole
from megatron.adaptive.errors import SetupError
from megatron.adaptive.trace.status_files import PROGRESS_NAME, ProgressTail, progress_file

_PERIOD_S = 5.0
_GIB = 1 << 30


def main(argv: Sequence[str]) -> int:
    """Prints the state of a job, once or until the job has finished.

    Returns:
        1 if the job is stalled, or a node was lost or reported an error; otherwise 0.
    """
    parser = CommandParser(prog=f"{PROGRAM} job status", description="Report the state of a job.")
    add = parser.add_argument
    add("job", help="ID of the job, which is the name of its log folder")
    add("--log-dir", type=Path, default=WORK_FOLDER / "logs", help="LOG_DIR of conf.sh (logs)")
    add("--follow", action="store_true", help="print again every 5 s until the job has finished")
    add("--json", action="store_true", help="print JSON; with --follow, one line each time")
    options = parser.parse_args(argv)
    while True:
        status = read_status(options.job, options.log_dir)
        if not (status.state or status.nodes or status.iteration):
            raise SetupError(
                f"found no logs in {status.folder}, and Slurm does not know job {status.job}; pass "
                "the ID of a job, and the LOG_DIR of its conf.sh as --log-dir"
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
    lines = [f"job {status.job}: {status.state or 'unknown to Slurm'}{reason}"]
    nodes = [line for node in status.nodes for line in _node_lines(node)]
    return "\n".join([*lines, *summary(status), *nodes])


def summary(status: JobStatus) -> list[str]:
    """Returns lines that describe the progress and the problems of a job."""
    lines = [f"LOST: node {name}: {why}" for name, why in status.lost.items()]
    if not status.nodes:
        lines.append(
            f"no logs in {status.folder} yet; if this is the wrong folder, pass the job's LOG_DIR "
            "as --log-dir"
        )
    elif status.iteration is None:
        lines.append("no iteration yet")
    else:
        pace = "" if status.iteration_ms is None else f", {status.iteration_ms:.1f} ms each"
        speed = "" if status.tokens_per_s is None else f", {status.tokens_per_s:.0f} tokens/s"
        lines.append(
            f"iteration {status.iteration} of {status.iterations}{pace}{speed}; completed"
            f" {status.since_s:.0f} s ago"
        )
    if status.is_stalled:
        lines.append(
            "STALLED: no iteration has completed for over 5 times the usual duration; check the "
            "resource use of each node"
        )
    for name, requested, effective in status.differences:
        lines.append(f"DIFFERENT: {name} is {effective}, but {requested} was requested")
    return lines


def _node_lines(node: NodeStatus) -> list[str]:
    if node.is_former:
        return [f"--- {node.name}: took part in an earlier start of the job, but not in the latest"]
    lines = [f"--- {node.name}: {_use(node)}"]
    for title, lines_of_kind in (
        ("error", node.errors),
        ("warning", node.warnings),
        ("out", node.out),
        ("err", node.err),
    ):
        lines += [f"{title:8} {line.rstrip()}" for line in lines_of_kind]
    return lines


def _use(node: NodeStatus) -> str:
    if node.use is None:
        return "resource use was not sampled"
    gpus = [
        f"GPU {gpu['index']} {gpu['used_percent']}% "
        f"{gpu['memory_used_bytes'] / _GIB:.1f} GiB, {len(gpu.get('pids', ()))} processes"
        for gpu in node.use["gpus"]
    ]
    processes = node.use["processes"]
    memory = sum(process["memory_bytes"] for process in processes) / _GIB
    used = sum(process["cpu_percent"] for process in processes)
    age_s = time.time() - node.use["unix_s"]
    node_text = f"{len(processes)} processes, {used:.0f}% CPU, {memory:.1f} GiB"
    return "; ".join([*gpus, node_text, f"sampled {age_s:.0f} s ago"])


TAIL_BYTES = 1 << 16

_SHOWN = 3
_MEDIAN_OF = 50
_STALLED = 5
_LEAST_STALL_S = 30.0
_SILENT_S = 15.0
"""Time in seconds without a sample after which a node is reported as lost.

It is three times the interval between two samples.
"""
_RUNNING = ("RUNNING", "COMPLETING", "")
_GOOD_ENDS = ("COMPLETED", "CANCELLED", "PENDING", "REQUEUED", "SUSPENDED", "PREEMPTED", "TIMEOUT")
_GOES_ON = (
    "PENDING",
    "RUNNING",
    "COMPLETING",
    "CONFIGURING",
    "REQUEUED",
    "SUSPENDED",
    "STOPPED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "RESIZING",
    "SIGNALING",
    "STAGE_OUT",
    "SPECIAL_EXIT",
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
    """Returns the name, requested value and effective value of each setting whose values differ."""
    has_rampup = "--rampup-batch-size" in requested.get("TRAINER_FLAGS", "")
    return tuple(
        (name, requested[name], value)
        for name, value in effective.items()
        if requested.get(name)
        and requested[name] != value
        and not (has_rampup and name == "GLOBAL_BATCH_SIZE")
    )


def _kind(line: str) -> str:
    """Returns ``error`` or ``warning`` if ``line`` reports one, and otherwise ``""``."""
    return "error" if _ERROR.search(line) else "warning" if _WARNING.search(line) else ""


def node_names(folder: Path) -> list[str]:
    """Returns the names of the nodes with files in ``folder``, a job's log folder."""
    return sorted({path.stem for path in folder.glob("*.out")})


def read_record(folder: Path) -> dict[str, Any]:
    """Returns the content of ``run.json``, or an empty dict if the file is missing or damaged.

    Secrets are masked, because older versions wrote them to the file.
    """
    try:
        read = parse_json(read_whole(folder / "run.json"))
        values = {n: v for n, v in read.items() if isinstance(v, _RECORD.get(n, object))}
        numbers = [*values.get("processes", ()), values.get("world_size", 0)]
        if not all(isinstance(entry, int) for entry in numbers):
            return {}
        conf = {
            name: MASK if is_secret(name) else masked_text(str(text))
            for name, text in values.get("conf", {}).items()
        }
    except (OSError, ValueError, AttributeError):
        return {}
    return {**values, "conf": conf, "flags": [str(flag) for flag in values.get("flags", ())]}


def tail(path: Path) -> list[str]:
    """Returns the last lines of the log file ``path``.

    Lines from before the latest start of the job are omitted.
    """
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
    """Yields all lines of the file ``path``, or nothing if the file is missing."""
    try:
        with io.TextIOWrapper(open_file(path), encoding="utf-8", errors="replace") as file:
            for line in file:
                yield line.rstrip("\n")
    except OSError:
        return


def samples_of(path: Path, latest: bool = False) -> Iterator[dict[str, Any]]:
    """Yields the samples of a node's resource usage. Skips damaged lines.

    Args:
        path: Path of the file with the node's samples.
        latest: Whether to yield only the latest sample.
    """
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
    """Returns whether ``sample`` is a valid sample of resource usage."""
    with contextlib.suppress(KeyError, TypeError):
        for gpu in sample.get("gpus", []) if isinstance(sample, dict) else [{}]:
            gpu["index"] + gpu["memory_used_bytes"] + len(gpu.get("pids", []))
            gpu["used_percent"]
        for process in sample.get("processes", []):
            process["memory_bytes"] + process["cpu_percent"]
        return isinstance(sample.get("unix_s"), int | float)
    return False


def count_messages(*paths: Path) -> dict[str, Counter[str]]:
    """Counts how often each error line and each warning line occurs in the files ``paths``."""
    counters: dict[str, Counter[str]] = {"error": Counter(), "warning": Counter()}
    for path in paths:
        for line in lines_of(path):
            if kind := _kind(line):
                counters[kind][line.strip()] += 1
    return counters


@dataclass(frozen=True, kw_only=True)
class SlurmState:
    """State of a job in Slurm. All attributes are empty if Slurm does not know the job.

    Attributes:
        state: State of the job, such as ``RUNNING``.
        user: Name of the user who owns the job.
        reason: Reason why the job is waiting.
        nodes: State of each node of the job, such as ``allocated`` or ``down``, keyed by node name.
    """

    state: str = ""
    user: str = ""
    reason: str = ""
    nodes: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class NodeStatus:
    """Summary of a node's log files.

    Attributes:
        name: Name of the node. The names of the node's files begin with this name.
        out: Last lines of the node's standard output.
        err: Last lines of the node's standard error.
        errors: Last distinct lines in both files that report an error.
        warnings: Last distinct lines in both files that report a warning.
        use: Latest sample of the node's resource usage, or ``None`` if there is no sample.
        is_former: Whether the node took part in an earlier start of the job, but not in the latest.
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
    """Summary of a job.

    Attributes:
        job: ID of the job.
        state: State of the job in Slurm, or empty if Slurm does not know the job.
        reason: Reason why the job is waiting, or empty if it is not waiting.
        folder: Path of the job's log folder.
        nodes: Summaries of the nodes' log files. The entry ``batch`` describes the output of
            Slurm's batch script.
        lost: Reason why each lost node is considered lost, keyed by node name.
        iteration: Latest iteration, or ``None`` before the first iteration.
        iterations: Number of iterations in the whole training run.
        iteration_ms: Median duration of the latest iterations, in milliseconds.
        tokens_per_s: Tokens per second, summed over all ranks.
        since_s: Seconds since the latest iteration was reported.
        is_over: Whether the job has finished and will not continue.
        is_stalled: Whether the job is running without progress: the latest iteration is older than
            five times ``iteration_ms``, and older than 30 s.
        requested: Variables of the configuration, keyed by name.
        effective: Values that the run has reported for these variables, keyed by name.
        differences: Name, requested value and effective value of each variable for which the two
            values differ.
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
        """Returns whether a node was lost or has reported an error since the job's latest start."""
        return bool(self.lost) or any(node.errors for node in self.nodes if not node.is_former)


def read_status(job: str, logs: Path, progress: ProgressTail | None = None) -> JobStatus:
    """Summarizes a job from the last lines of its log files.

    Args:
        job: ID of the job, which is also the name of its log folder.
        logs: Folder that contains one log folder per job.
        progress: Reader that has read the job's progress file up to its end, or ``None`` to create
            a reader.

    Raises:
        SetupError: Neither Slurm nor the logs contain the job, or the job belongs to another user.
    """
    folder = logs / job
    slurm_job = slurm_state(job)
    _check_known(job, folder, slurm_job)
    record = read_record(folder)
    if progress is None:
        progress = progress_of(folder, record)
        progress.refresh()
    # Skip lines from before the latest start of the job. Allow a few seconds for differences
    # between the clocks of nodes.
    since_ns = max(
        progress.start.get("unix_ns", 0), (record.get("started_unix_s", 0.0) - _SILENT_S / 3) * 1e9
    )
    lines = [line for line in progress.records if line["unix_ns"] >= since_ns]
    ended = progress.ended_ns >= since_ns and bool(progress.ended)
    nodes = _read_nodes(folder, record)
    lost = {} if ended else _lost(slurm_job, nodes)
    # Show the output of the batch script in the same way as the output of a node, because Slurm
    # writes messages about failed nodes to the batch script's output.
    if (logs / f"{job}.batch").is_file():
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
        state=slurm_job.state,
        reason=slurm_job.reason,
        folder=str(folder),
        nodes=nodes,
        lost=lost,
        iteration=latest.get("iteration"),
        iterations=progress.total_iterations if lines else None,
        iteration_ms=ms,
        tokens_per_s=_median(lines, "tokens_per_s"),
        since_s=since_s,
        is_over=_is_over(slurm_job, nodes, has_ended=ended or bool(lost)),
        is_stalled=since_s is not None
        and since_s > limit_s
        and slurm_job.state in _RUNNING
        and not ended,
        requested={name: value for name, value in requested.items() if value},
        effective=effective,
        differences=_differences(requested, effective),
    )


def _read_nodes(folder: Path, record: Mapping[str, Any]) -> tuple[NodeStatus, ...]:
    """Returns a summary of each node with files in ``folder``, a job's log folder.

    ``record`` is the content of the job's ``run.json``.
    """
    names = node_names(folder)
    ends = {name: (tail(folder / f"{name}.out"), tail(folder / f"{name}.err")) for name in names}
    nodes = [_node(folder, name, *ends[name]) for name in names]
    return tuple(replace(node, is_former=_is_former(node, record)) for node in nodes)


def _is_over(slurm_job: SlurmState, nodes: Sequence[NodeStatus], *, has_ended: bool) -> bool:
    """Returns whether a job has finished.

    A job that is unknown to Slurm has finished if ``has_ended`` is true, or if the last sample of
    each node marks the end of the job.
    """
    if slurm_job.state:
        return slurm_job.state not in _GOES_ON
    return has_ended or all(node.use and node.use.get(ENDED) for node in nodes)


def slurm_rows(command: Sequence[str]) -> list[list[str]]:
    """Runs the Slurm program ``command``, and returns the columns of each row of its output.

    Returns no rows if the program fails.
    """
    with contextlib.suppress(SetupError):
        return [line.split("|") for line in slurm(command).splitlines() if "|" in line]
    return []


def slurm_state(job: str) -> SlurmState:
    """Returns the state of ``job`` in Slurm. For a heterogeneous job, uses its first component.

    ``squeue`` is queried first, because ``sacct`` may be out of date.
    """
    for command in (
        ["squeue", "-h", "-j", job, "-o", "%T|%u|%r|%N"],
        ["sacct", "-n", "-X", "-P", "-j", job, "-o", "state,user,reason,nodelist"],
    ):
        # The list of rows is empty if Slurm has forgotten the job, or if accounting is off.
        rows = [row for row in slurm_rows(command) if len(row) > 3] if job.isdigit() else []
        if rows:
            node_list = ",".join(row[3] for row in rows if row[3] and not row[3].startswith("None"))
            sinfo = ["sinfo", "-h", "-a", "-N", "-n", node_list, "-o", "%N|%T"]
            return SlurmState(
                state=(rows[0][0].split() or [""])[0],
                user=rows[0][1],
                reason="" if rows[0][2] == "None" else rows[0][2],
                nodes={row[0]: row[1].strip() for row in (slurm_rows(sinfo) if node_list else ())},
            )
    return SlurmState(nodes={})


def _check_known(job: str, folder: Path, slurm_job: SlurmState) -> None:
    if folder.is_dir():
        if os.access(folder, os.R_OK | os.X_OK):
            return
        raise SetupError(
            f"job {job}: you cannot read {folder}; ask the owner of the folder for permission"
        )
    if not slurm_job.state:
        raise SetupError(
            f"job {job}: Slurm does not know this job, and {folder} does not exist; pass the job's "
            "LOG_DIR as --log-dir, or run squeue to see the IDs of jobs"
        )
    user = pwd.getpwuid(os.getuid()).pw_name
    if slurm_job.user and slurm_job.user != user:
        raise SetupError(
            f"job {job} ({slurm_job.state}) belongs to {slurm_job.user}, not {user}, and "
            f"{folder} does not exist; pass the LOG_DIR of {slurm_job.user}'s job as --log-dir"
        )


def _is_former(node: NodeStatus, record: Mapping[str, Any]) -> bool:
    """Returns whether the latest sample of ``node`` is older than the latest start of the job."""
    started_s = record.get("started_unix_s")
    if node.use is None or not isinstance(started_s, (int, float)):
        return False
    return bool(node.use["unix_s"] < started_s - _SILENT_S / 3)


def _lost(slurm_job: SlurmState, nodes: tuple[NodeStatus, ...]) -> dict[str, str]:
    """Returns the reason why each lost node is considered lost, keyed by node name.

    A node is lost if Slurm reports that the node is down, or if the node's samples have stopped
    while the job is running. After the job has finished, the samples of nodes known to Slurm are
    ignored, because processes may have been killed before they could write a last sample.
    """
    reasons: dict[str, str] = {}
    if slurm_job.state in _GOOD_ENDS:
        return reasons
    for name, state in slurm_job.nodes.items():
        text = state.lower()
        if text.endswith("*") or any(text.startswith(prefix) for prefix in _LOST_STATES):
            reasons[name] = f"Slurm reports that it is {state.rstrip('*')}" + (
                " and not responding" if text.endswith("*") else ""
            )
    now_s = time.time()
    for node in nodes:
        if node.is_former or node.use is None or node.use.get(ENDED):
            continue
        if slurm_job.state not in _RUNNING and node.name in slurm_job.nodes:
            continue
        silent_s = now_s - node.use["unix_s"]
        if silent_s > _SILENT_S:
            reasons.setdefault(
                node.name, f"the last sample of its resource use is {silent_s:.0f} s old"
            )
    return reasons


def _node(folder: Path, name: str, out: list[str], err: list[str]) -> NodeStatus:
    kinds = {line.strip(): _kind(line.strip()) for line in (*err, *out)}
    errors, warnings = (
        tuple(line for line, line_kind in kinds.items() if line_kind == kind)
        for kind in ("error", "warning")
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
    """Creates a reader for a job's progress file.

    Args:
        folder: Folder of the job's logs.
        record: Content of the job's ``run.json``. Its flags may set a different folder for the
            progress file.
        kept: Number of latest lines to keep in memory, or ``None`` to keep all lines.
    """
    path = progress_file(folder)
    named = last_value(record.get("flags", []), "--progress-dir")
    if not path.is_file() and named:
        path = Path(named) / PROGRESS_NAME
    return ProgressTail(path, kept)


def _median(lines: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [line[key] for line in lines[-_MEDIAN_OF:] if line.get(key) is not None]
    return statistics.median(values) if values else None


def _effective_sizes(start: Mapping[str, Any], latest: Mapping[str, Any]) -> dict[str, str]:
    """Returns sizes that a run has reported, such as its batch size.

    They are keyed by the name of the variable in ``conf.sh``.
    """
    sizes = {name: start.get(key) for name, key in _SIZES.items()}
    if latest:
        sizes["TRAIN_ITERS"] = start.get("total_iterations")
        sizes["GLOBAL_BATCH_SIZE"] = latest.get("global_batch_size")
    return {name: str(value) for name, value in sizes.items() if value is not None}
