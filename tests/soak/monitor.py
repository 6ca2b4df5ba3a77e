"""Measures how fast the monitor answers for a job of 64 nodes with large logs.

    python -m tests.soak.monitor [--quick] [--gigabytes N] [--json FILE]

The logs are generated. The response time is compared with the time that the program needs to start.
Exits with status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from harness.processes import environment
from harness.report import Result, measure, measured, parser_of, ratios

LIMIT_S = 240.0
NODES = 64
MOST_STATUS = 2.0
"""Maximum duration of ``job status``, divided by the time that the program needs to start."""


def of_status(options: argparse.Namespace) -> Result:
    """Measures how fast the monitor reads ``options.gigabytes`` GB of generated logs."""
    program_s, answer_s = [], []
    with tempfile.TemporaryDirectory() as folder:
        nbytes = write_logs(Path(folder, "pods-1"), int(options.gigabytes * 1e9))
        for _ in range(5):
            program_s.append(_status_s("--help")[0])
            seconds, output = _status_s("pods-1", "--json", "--log-dir", folder)
            answer_s.append(seconds)
            status = json.loads(output)
            if len(status["nodes"]) != NODES or status["iteration"] != 20_000:
                raise RuntimeError(f"the monitor's answer is incomplete: {output[:300]}")
    note = f"{NODES} nodes, {nbytes / 1e9:.2f} GB"
    quotients = ratios(answer_s, program_s)
    rows = [
        measured("status: time of an answer", answer_s, unit="s", note=note),
        measured(
            "status: the same, divided by the start time of the program",
            quotients,
            goal=MOST_STATUS,
        ),
    ]
    return Result(rows=rows, facts={"status": {"seconds": answer_s, "bytes": nbytes}})


def _status_s(*arguments: str) -> tuple[float, str]:
    """Runs the monitor with ``arguments``, and returns its duration in seconds and its output.

    The exit status is ignored. If the logs are old, the monitor reports a stalled job and fails.
    """
    command = [sys.executable, "-m", "megatron.adaptive", "job", "status", *arguments]
    begin_s = time.perf_counter()
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S
    )
    return time.perf_counter() - begin_s, done.stdout


def write_logs(folder: Path, nbytes: int) -> int:
    """Writes logs like those of a job with many nodes, and returns their total size in bytes.

    Args:
        folder: Folder of the logs, which is created.
        nbytes: Approximate size of all logs.
    """
    folder.mkdir()
    now_s = time.time()
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now_s - 2))
    start = f"=== {stamp} node 0 starts\n"
    stamped = {"unix_ns": int((now_s - 2) * 1e9)}
    lines: list[dict[str, object]] = [{"total_iterations": 50_000, "start_iteration": 0}]
    numbers = range(1, 20_001)
    lines += [{"iteration": number, "step_ms": 812.5, "tokens_per_s": 2e3} for number in numbers]
    progress = "".join(json.dumps(line | stamped) + "\n" for line in lines)
    (folder / "progress.jsonl").write_text(progress)
    sample = {
        "unix_s": now_s,
        "gpus": [
            {
                "index": index,
                "used_percent": 90,
                "memory_used_bytes": 1 << 30,
                "memory_total_bytes": 1 << 34,
                "pids": [1],
            }
            for index in range(8)
        ],
        "processes": [{"pid": 1, "cpu_percent": 99.0, "memory_bytes": 1 << 30}] * 8,
    }
    each = nbytes // NODES
    noise = "NCCL INFO: a line of a library that the monitor has to skip, UserWarning or not\n"
    for rank in range(NODES):
        name = f"node{rank:02d}"
        (folder / f"{name}.out").write_text(start + noise * (each // 2 // len(noise)))
        (folder / f"{name}.err").write_text(start + noise * (each * 3 // 8 // len(noise)))
        row = json.dumps(sample) + "\n"
        (folder / f"{name}.gpu").write_text(row * max(1, each // 8 // len(row)))
    record = {"conf": {"NNODES": str(NODES)}, "world_size": 512, "processes": [8] * NODES}
    (folder / "run.json").write_text(json.dumps(record))
    return sum(path.stat().st_size for path in folder.iterdir())


def main(arguments: list[str] | None = None) -> int:
    """Measures the monitor and prints the results. Returns 1 if a goal is missed."""
    parser = parser_of(__doc__, (), "smaller logs")
    parser.add_argument("--gigabytes", type=float, help="size of the logs in GB")
    options = parser.parse_args(arguments)
    options.part = None
    options.gigabytes = options.gigabytes or (0.1 if options.quick else 1.0)
    return measure({"status": partial(of_status, options)}, options)


if __name__ == "__main__":
    sys.exit(main())
