"""Collects a job's logs, measurements and traces from its folder, and writes them as one page."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.adaptive.cli.common import show
from megatron.adaptive.cli.status import (
    JobStatus,
    count_messages,
    lines_of,
    node_names,
    progress_of,
    read_record,
    read_status,
    samples_of,
    slurm_rows,
    summary,
)
from megatron.adaptive.cluster.conf import SETTINGS
from megatron.adaptive.config.command_parser import PROGRAM, CommandParser
from megatron.adaptive.config.environment import WORK_FOLDER
from megatron.adaptive.errors import SetupError, TraceError
from megatron.adaptive.trace.locate import newest_run, searched
from megatron.adaptive.trace.metrics import RunFigures, run_figures
from megatron.adaptive.trace.read import RunTrace, read_run
from megatron.adaptive.trace.trace_format import shared_gpu_note
from megatron.adaptive.trace.views.page import plotly_js, write_html, write_page


def main(argv: Sequence[str]) -> int:
    """Writes the report of a job as an HTML page, and prints the path of the page."""
    parser = CommandParser(
        prog=f"{PROGRAM} job report",
        description=(
            "Write a page about a job: configuration, curves, resource use of each node, "
            "pipeline, errors. The page needs only a browser."
        ),
    )
    add = parser.add_argument
    text = (
        "ID of the job (the name of its log folder), or path of the log folder (default: newest "
        "job)"
    )
    add("job", nargs="?", help=text)
    add("--log-dir", type=Path, help="LOG_DIR of conf.sh (logs)")
    text = "path of the page (default: report.html in the job's folder)"
    add("--output", type=Path, metavar="FILE", help=text)
    options = parser.parse_args(argv)
    logs = options.log_dir or WORK_FOLDER / "logs"
    job = options.job or _newest_job(logs)
    if "/" in job or (options.log_dir is None and Path(job).is_dir()):
        folder = Path(job).absolute()
        job = folder.name
        logs = folder.parent
    target = options.output or logs / job / "report.html"
    report = gather(job, logs)
    data = [("report-data", report)]
    package = "megatron.adaptive.cluster"
    write_html(target, str(report["title"]), package, "report", data, ["report.js"])
    show(str(target.resolve()))
    return 0


def _newest_job(logs: Path) -> str:
    """Returns the ID of the job that wrote most recently to its folder in ``logs``."""
    parents = [logs.absolute()]
    newest = newest_run(["*.out", "progress.jsonl"], parents)
    if newest is None:
        raise SetupError(
            f"found no job in {searched(parents)}; pass the job's folder, or pass the LOG_DIR of "
            "its conf.sh as --log-dir"
        )
    return newest.name


MAX_POINTS = 5000
"""Maximum number of points in a curve. Longer curves are reduced to evenly spaced points."""

MAX_MESSAGES = 200
"""Maximum number of distinct warnings and errors shown per node."""
_NODE_START = re.compile(r"=== (.*) node (\d+) starts$")
_ACCOUNT = ("state", "start", "end", "elapsed", "nodelist", "exitcode", "partition")
_GIB = 1 << 30


def gather(job: str, logs: Path) -> dict[str, Any]:
    """Reads the files in a job's folder, and returns the content of the report's page.

    Args:
        job: ID of the job, which is also the name of its log folder.
        logs: Folder that contains one log folder per job.

    Returns:
        Content of the page, as values that can be converted to JSON.

    Raises:
        SetupError: The job is unknown or has no logs.
    """
    folder = logs / job
    record = read_record(folder)
    progress = progress_of(folder, record, kept=None)
    starts = [
        line for line in progress.refresh() if "total_iterations" in line and not line.get("moved")
    ]
    status = read_status(job, logs, progress)
    names = node_names(folder)
    if not names:
        raise SetupError(
            f"job {job} has no logs in {folder}; pass the LOG_DIR of its conf.sh as --log-dir"
        )
    lines = progress.records
    processes = record.get("processes", [])
    traces, notes = traced(folder / "traces", _node_of_each_rank(folder, names, processes))
    drawn = _thinned(lines)
    if len(drawn) < len(lines):
        notes.append(f"curves show {len(drawn)} evenly spaced iterations of {len(lines)}")
    messages, message_notes = _messages(folder, logs / f"{job}.batch", names)
    return {
        "title": f"Job {job}: {record.get('conf', {}).get('JOB_NAME', '')}".rstrip(": "),
        "facts": _facts(status, starts, processes),
        "settings": _settings(status),
        "curves": _curves(drawn),
        "starts": [line["start_iteration"] + 1 for line in starts[1:]],
        "use": {name: use for name in names if (use := _use(folder / f"{name}.gpu"))},
        "traces": traces,
        "messages": messages,
        "notes": [*notes, *message_notes],
    }


def _node_of_each_rank(folder: Path, names: Sequence[str], processes: Sequence[int]) -> list[str]:
    """Returns the names of the nodes on which the ranks ran most recently, ordered by rank.

    ``folder`` contains the output of the nodes ``names``. ``processes`` contains the number of
    processes of each node, ordered by node rank.
    """
    latest: dict[int, tuple[str, str]] = {}
    for name in names:
        for line in lines_of(folder / f"{name}.out"):
            if line.startswith("===") and (match := _NODE_START.match(line)):
                number = int(match[2])
                latest[number] = max(latest.get(number, ("", "")), (match[1], name))
    names_by_node_rank = [
        latest.get(number, ("", f"node {number}"))[1] for number in range(len(processes))
    ]
    # Limit the counts, because a damaged file may contain a huge number of processes.
    counts = [min(count, 1 << 12) for count in processes]
    return [
        name for name, count in zip(names_by_node_rank, counts, strict=True) for _ in range(count)
    ]


def _thinned(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return lines[:: -(-len(lines) // MAX_POINTS) or 1]


def _facts(
    status: JobStatus, starts: Sequence[Mapping[str, Any]], processes: Sequence[int]
) -> list[tuple[str, str]]:
    account = {"state": status.state or "unknown to Slurm"} | _account(status.job)
    facts = [*account.items(), *(("now", line) for line in summary(status))]
    if processes:
        facts.append(("processes per node", " + ".join(map(str, processes))))
    if starts:
        began = time.localtime(starts[-1]["unix_ns"] / 1e9)
        latest = time.strftime("%Y-%m-%d %H:%M:%S", began)
        facts.append(("starts", f"{len(starts)}, the latest {latest}"))
    return [*facts, ("report made", time.strftime("%Y-%m-%d %H:%M:%S"))]


def _account(job: str) -> dict[str, str]:
    """Returns Slurm's accounting record of ``job``, or an empty record if accounting is off."""
    command = ["sacct", "-n", "-X", "-P", "-j", job, "-o", ",".join(_ACCOUNT)]
    rows = slurm_rows(command) if job.isdigit() else []
    rows = [row for row in rows if len(row) == len(_ACCOUNT)]
    return {
        name: ", ".join(dict.fromkeys(row[column] for row in rows if row[column]))
        for column, name in enumerate(_ACCOUNT)
        if rows
    }


def _settings(status: JobStatus) -> list[dict[str, Any]]:
    """Returns each variable's requested value, its effective value, and whether the two differ."""
    effective = status.effective
    differ = {name for name, _, _ in status.differences}
    names = [name for name in SETTINGS if name in status.requested or name in effective]
    names += [name for name in status.requested if name not in SETTINGS]
    return [
        {
            "name": name,
            "meaning": SETTINGS[name].help if name in SETTINGS else "environment variable",
            "requested": status.requested.get(name, ""),
            "effective": effective.get(name, ""),
            "differs": name in differ,
        }
        for name in names
    ]


def _curves(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {
        "iteration": [line["iteration"] for line in lines],
        "loss": [line.get("loss") for line in lines],
        "ms": [line.get("step_ms") for line in lines],
        "tokens_per_s": [line.get("tokens_per_s") for line in lines],
    }


def _use(path: Path) -> dict[str, Any]:
    """Returns the resource usage in the file ``path``, as lists of values over time."""
    samples = _thinned(list(samples_of(path)))
    gpus: dict[int, dict[str, list[Any]]] = {}
    rows = [{gpu["index"]: gpu for gpu in sample.get("gpus", [])} for sample in samples]
    for index in sorted({index for row in rows for index in row}):
        values = [row.get(index) for row in rows]
        gpus[index] = {
            "percent": [gpu and gpu["used_percent"] for gpu in values],
            "gib": [gpu and round(gpu["memory_used_bytes"] / _GIB, 3) for gpu in values],
        }
    if not samples:
        return {}
    return {
        "unix_ms": [int(sample["unix_s"] * 1e3) for sample in samples],
        "cpu_percent": [_sum(sample, "cpu_percent") for sample in samples],
        "gib": [round(_sum(sample, "memory_bytes") / _GIB, 4) for sample in samples],
        "gpus": gpus,
    }


def _sum(sample: Mapping[str, Any], key: str) -> float:
    return float(round(sum(process.get(key, 0) for process in sample.get("processes", [])), 1))


def _messages(
    folder: Path, batch: Path, names: Sequence[str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns each node's distinct messages with their counts, and notes on omitted messages.

    ``folder`` contains the output of the nodes ``names``. ``batch`` is the path of the batch
    script's output.
    """
    messages: list[dict[str, Any]] = []
    notes = []
    counts = {
        name: count_messages(folder / f"{name}.err", folder / f"{name}.out") for name in names
    }
    if batch.is_file():
        counts["batch"] = count_messages(batch)
    for name, kinds in counts.items():
        for kind, counter in kinds.items():
            for text, count in counter.most_common(MAX_MESSAGES):
                messages.append({"node": name, "kind": kind, "text": text, "count": count})
            if len(counter) > MAX_MESSAGES:
                notes.append(
                    f"{name}: shows the {MAX_MESSAGES} most frequent of {len(counter)} different "
                    f"{kind}s"
                )
    messages.sort(key=lambda message: message["kind"])
    return messages, notes


MAX_CELLS = 200_000
"""Maximum number of cells in the table of times by rank and iteration.

If the table of all iterations has more cells, only evenly spaced iterations are shown.
"""
_NS_PER_MS = 1e6


def traced(folder: Path, nodes: Sequence[str]) -> tuple[dict[str, Any] | None, list[str]]:
    """Reads the traces of a job for the report.

    Args:
        folder: Folder of the traces. It may be missing.
        nodes: Name of the node of each rank, ordered by rank. The list is shorter than the number
            of ranks if some nodes are unknown.

    Returns:
        Content of the page, and notes for its readers. The content is ``None`` if there are no
        traces.
    """
    if not folder.is_dir():
        return None, ["no traces; set TRACE=true to add the times of all ranks and a timeline"]
    try:
        run = read_run(folder)
        figures = run_figures(run, workers=1)
        labels = {rank: _label(run, rank) for rank in figures.ranks.tolist()}
        rows: dict[str, list[int]] = {}
        for row, rank in enumerate(labels):
            if rank < len(nodes):
                rows.setdefault(nodes[rank], []).append(row)
        with tempfile.TemporaryDirectory() as temporary:
            page = Path(temporary) / "page.html"
            iterations = figures.iterations.tolist()
            write_page(run, page, iterations, figures=figures, labels=labels, nodes=rows)
            text = page.read_text(encoding="utf-8")
    except TraceError as error:
        return None, [f"no timeline: {error}"]
    content = {
        "ranks": list(labels),
        "labels": list(labels.values()),
        # The report already contains the plotting library, so replace the library's code in this
        # page by a placeholder.
        "page": text.replace(plotly_js(), "{{plotly}}"),
        **_times(figures),
    }
    return content, [shared_gpu_note(run.gpu_ranks)] if run.shares_gpus else []


def _label(run: RunTrace, rank: int) -> str:
    header = run.ranks[rank].header
    position = f"stage {header.pp_rank}, replica {header.dp_rank}, tensor rank {header.tp_rank}"
    return f"rank {rank}: {position}"


def _times(figures: RunFigures) -> dict[str, Any]:
    """Returns the time in ms between each rank's first and last action in each iteration."""
    has_actions = figures.num_actions > 0
    ms = np.where(has_actions, figures.end_ns - figures.start_ns, 0) / _NS_PER_MS
    limit = max(2, MAX_CELLS // max(1, ms.shape[1]))
    count = len(figures.iterations)
    shown = np.unique(np.linspace(0, count - 1, min(limit, count)).round().astype(int))
    rows = [
        [
            round(float(value), 3) if has_time else None
            for value, has_time in zip(row, row_has_actions, strict=True)
        ]
        for row, row_has_actions in zip(ms[shown].T, has_actions[shown].T, strict=True)
    ]
    return {"iterations": figures.iterations[shown].tolist(), "rank_ms": rows}
