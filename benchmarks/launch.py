"""Measures the start of a job beside torchrun, and the time of an answer of the monitor.

    python benchmarks/launch.py [--quick] [--part PART ...] [--json FILE]

Parts: ``start``, the time from the command to the first iteration of two ranks, by ``job launch``
and by torchrun in turns; ``status``, an answer of the monitor about generated logs of 64 nodes,
over the start of its program. ``python -m tests.soak.slurm_jobs`` measures starts by Slurm. Exits
with status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness.gpt_ranks import GPT  # noqa: E402
from harness.processes import environment, kill_tree  # noqa: E402
from harness.report import Result, measure, measured, parser_of, ratios  # noqa: E402

LIMIT_S = 240.0
NODES = 64
MOST_START = 1.1
"""Largest time of a start over torchrun's."""
MOST_STATUS = 2.0
"""Largest time of an answer over the start of the program that gives it."""
COMMANDS = {
    "launch": "-m megatron.adaptive job launch --standalone --nproc-per-node 2",
    "torchrun": "-m torch.distributed.run --standalone --nproc-per-node 2",
}
ITERATION = re.compile(r"^ \[[\d :-]{19}\] iteration ", re.MULTILINE)


def start_s(name: str, log: Path) -> float:
    """Returns the seconds from a command to the first iteration of its job.

    Args:
        name: Name of the command in ``COMMANDS``.
        log: Path of a new file for the output of the job.

    Raises:
        TimeoutError: There was no iteration within the time limit.
    """
    command = [sys.executable, *COMMANDS[name].split(), str(ROOT / "pretrain_gpt.py"), *GPT]
    command += "--hidden-size 64 --pipeline-model-parallel-size 2 --log-interval 1".split()
    begin_s = time.perf_counter()
    with log.open("w") as output:
        job = subprocess.Popen(
            command, env=environment(), stdout=output, stderr=output, start_new_session=True
        )
    try:
        while not ITERATION.search(log.read_text()):
            if time.perf_counter() - begin_s > LIMIT_S or job.poll() is not None:
                raise TimeoutError(f"{name}: no iteration; its output: {log.read_text()[-500:]}")
            time.sleep(0.02)
        return time.perf_counter() - begin_s
    finally:
        kill_tree(job)


def of_start(options: argparse.Namespace) -> Result:
    """Part ``start``: starts the same job by both commands, in turns."""
    elapsed_s: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(3 if options.quick else 7):
            for name, samples in elapsed_s.items():
                samples.append(start_s(name, Path(folder, f"{name}{turn}.log")))
    rows = [measured(f"start: {name}", samples, unit="s") for name, samples in elapsed_s.items()]
    quotients = ratios(elapsed_s["launch"], elapsed_s["torchrun"])
    rows.append(measured("start: launch over torchrun", quotients, goal=MOST_START))
    return Result(rows=rows, facts={"start_s": elapsed_s})


def of_status(options: argparse.Namespace) -> Result:
    """Part ``status``: asks the monitor about generated logs."""
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
        measured("status: the same over the start of the program", quotients, goal=MOST_STATUS),
    ]
    return Result(rows=rows, facts={"status": {"seconds": answer_s, "bytes": nbytes}})


def _status_s(*arguments: str) -> tuple[float, str]:
    """Returns the seconds of a call of the monitor, and its output.

    Its exit status is ignored, because after a while the job of the logs counts as stalled.
    """
    command = [sys.executable, "-m", "megatron.adaptive", "job", "status", *arguments]
    begin_s = time.perf_counter()
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S
    )
    return time.perf_counter() - begin_s, done.stdout


def write_logs(folder: Path, nbytes: int) -> int:
    """Writes logs as a job of many nodes does; returns their size in bytes.

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


PARTS: dict[str, Callable[[argparse.Namespace], Result]] = {"start": of_start, "status": of_status}


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints; returns 1 if a goal is missed."""
    parser = parser_of(__doc__, tuple(PARTS), "fewer turns")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the logs (1)")
    options = parser.parse_args(arguments)
    return measure({name: partial(part, options) for name, part in PARTS.items()}, options)


if __name__ == "__main__":
    sys.exit(main())
