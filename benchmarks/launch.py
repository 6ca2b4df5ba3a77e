"""Compares the startup times of jobs under ``job launch`` and under torchrun.

    python benchmarks/launch.py [--quick] [--json FILE]

``job launch`` and torchrun alternately start the same job with two ranks. The startup ends with the
first iteration. ``python -m tests.soak.slurm_jobs`` measures startup through Slurm. Exits with
status 1 if the goal is missed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness.gpt_ranks import GPT  # noqa: E402
from harness.processes import environment, kill_tree  # noqa: E402
from harness.report import Result, measure, measured, parser_of, ratios  # noqa: E402

LIMIT_S = 240.0
MOST_START = 1.1
"""Maximum startup time, as a multiple of torchrun's startup time."""
COMMANDS = {
    "launch": "-m megatron.adaptive job launch --standalone --nproc-per-node 2",
    "torchrun": "-m torch.distributed.run --standalone --nproc-per-node 2",
}
ITERATION = re.compile(r"^ \[[\d :-]{19}\] iteration ", re.MULTILINE)


def start_s(name: str, log: Path) -> float:
    """Returns the seconds from the start of a command to the first iteration of its job.

    Args:
        name: Name of the command in ``COMMANDS``.
        log: Path of a new file for the job's output.

    Raises:
        TimeoutError: There was no iteration before the timeout.
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
                raise TimeoutError(
                    f"{name}: no iteration before the timeout; the output is: "
                    f"{log.read_text()[-500:]}"
                )
            time.sleep(0.02)
        return time.perf_counter() - begin_s
    finally:
        kill_tree(job)


def of_start(options: argparse.Namespace) -> Result:
    """Compares the startup times of a job that is started alternately by the two commands."""
    elapsed_s: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(3 if options.quick else 7):
            for name, samples in elapsed_s.items():
                samples.append(start_s(name, Path(folder, f"{name}{turn}.log")))
    rows = [measured(f"start: {name}", samples, unit="s") for name, samples in elapsed_s.items()]
    quotients = ratios(elapsed_s["launch"], elapsed_s["torchrun"])
    rows.append(measured("start: launch over torchrun", quotients, goal=MOST_START))
    return Result(rows=rows, facts={"start_s": elapsed_s})


def main(arguments: list[str] | None = None) -> int:
    """Measures the commands and prints the results. Returns 1 if a goal is missed, otherwise 0."""
    options = parser_of(__doc__, (), "fewer turns").parse_args(arguments)
    options.part = None
    return measure({"start": partial(of_start, options)}, options)


if __name__ == "__main__":
    sys.exit(main())
