"""What changing the shape of a job costs, and whether its losses notice, against their goals.

    python benchmarks/elastic.py [--quick] [--part PART ...] [--json FILE]

Parts: ``morphs``, a small GPT on four processes of this machine through six planned morphs and a
node that is killed; ``start``, what process start, import and load take under torchrun, which a
morph is measured by; ``checkpoint``, how long training waits for a checkpoint every ten steps that
is written behind it; ``repartition``, what a slow rank regains by giving layers away, and what
moving one takes. Exits with status 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.elasticity.repartition import repartition  # noqa: E402
from tests.elastic.jobs import FLAGS, ElasticJob, environment  # noqa: E402

PARTS = ("morphs", "start", "checkpoint", "repartition")
SAVE_INTERVAL = 15
LIMIT_S = 400.0
GOAL_RATIO, GOAL_S, GOAL_LOSS, GOAL_WAIT = 1.5, 10.0, 1e-5, 0.03
TRAINER = str(ROOT / "pretrain_gpt.py")
ENDLESS = ["--train-iters", "9999"]
PHASES = ("notice", "checkpoint", "end", "plan", "start", "load", "first_step", "whole")
# Steps long enough for a checkpoint to be written between two of them, as in real training.
LARGER = "--num-layers 8 --hidden-size 128 --seq-length 128 --max-position-embeddings 128".split()


def main() -> int:
    """Measure as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two morphs, fewer steps")
    parser.add_argument("--part", action="append", choices=PARTS, help="all by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args()
    parts = options.part or PARTS
    figures: dict[str, Any] = {}
    goals: list[tuple[str, bool]] = []
    with tempfile.TemporaryDirectory(prefix="elastic-") as folder:
        if "morphs" in parts:
            figures |= morphs(Path(folder) / "morphs", quick=options.quick)
            goals += [
                ("losses within 1e-5", figures["loss_difference"] <= GOAL_LOSS),
                ("no step lost after a notice", figures["lost_after_notice"] == 0),
                (f"a morph within {GOAL_S:g} s", figures["morph_s"] <= GOAL_S),
            ]
        if "start" in parts:
            figures["start_s"] = start(Path(folder) / "start")
            print(f"process start, import and load under torchrun: {figures['start_s']:.2f} s")
        if "morph_s" in figures and "start_s" in figures:
            figures["ratio"] = figures["morph_s"] / figures["start_s"]
            print(f"a morph takes {figures['ratio']:.2f} of it")
            goals.append((f"at most {GOAL_RATIO:g} of it", figures["ratio"] <= GOAL_RATIO))
        if "checkpoint" in parts:
            figures |= checkpoint(Path(folder) / "checkpoint", quick=options.quick)
            told = f"waiting at most {GOAL_WAIT:.0%} for checkpoints"
            goals.append((told, figures["waiting"] <= GOAL_WAIT))
        if "repartition" in parts:
            found, reached = repartition(Path(folder), quick=options.quick)
            figures |= found
            goals += reached
    for text, met in goals:
        print(f"{'met   ' if met else 'MISSED'}  {text}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if all(met for _, met in goals) else 1


def morphs(folder: Path, *, quick: bool) -> dict[str, Any]:
    """Take a job through its shapes."""
    folder.mkdir()
    job = ElasticJob(folder, "abcd", [*ENDLESS, "--save-interval", str(SAVE_INTERVAL)])
    try:
        job.until(lambda: len(job.steps(1)) > SAVE_INTERVAL, "the first checkpoint", LIMIT_S)
        for names in ("abc", "ab", "abc", "ab", "a", "ab")[: 2 if quick else 6]:
            shape_on(job, names)
        epoch = len(job.state()["epochs"])
        job.until(lambda: len(job.steps(epoch)) > SAVE_INTERVAL, "another checkpoint", LIMIT_S)
        os.kill(job.agent("b"), signal.SIGKILL)
        done = max(job.steps(epoch))
        job.until(lambda: max(job.steps(epoch + 1), default=0) > done + 5, "the rest", LIMIT_S)
        job.manager.send_signal(signal.SIGTERM)
        job.end(LIMIT_S)
    finally:
        job.close()
    epochs = job.state()["epochs"]
    planned = [one for one in epochs[1:-1] if "whole" in one["phases_s"]]
    for one in epochs[1:]:
        parts = [f"{n} {one['phases_s'][n]:.2f}" for n in PHASES if n in one["phases_s"]]
        print(f"{one['shape']:28} {one['reason'][:36]:36} {', '.join(parts)} s")
    lines = [line for line in job.lines() if "iteration" in line]
    last = max(line["iteration"] for line in lines)
    expected = undisturbed(job, folder / "undisturbed", last)
    worst = max(
        abs(line["loss"] / expected[line["iteration"]] - 1)
        for line in lines
        if line["iteration"] > SAVE_INTERVAL
    )
    missing = set(range(1, last + 1)) - {line["iteration"] for line in lines}
    print(f"{last} steps, {len(missing)} missing; losses differ by {worst:.1e} at most")
    return {
        "morph_s": statistics.median(one["phases_s"]["whole"] for one in planned),
        "morphs": [{"shape": one["shape"], **one["phases_s"]} for one in epochs[1:]],
        "lost_after_notice": sum(one["lost_steps"] for one in epochs[1:-1]) + len(missing),
        "lost_without_notice": epochs[-1]["lost_steps"],
        "loss_difference": worst,
        "steps": last,
    }


def shape_on(job: ElasticJob, names: str) -> None:
    """Change the machines and wait for some steps on them."""
    epoch = len(job.state()["epochs"]) + 1
    job.change(names)
    job.until(lambda: len(job.steps(epoch)) >= 5, f"steps on {names}", LIMIT_S)
    job.until(lambda: "whole" in job.state()["epochs"][epoch - 1]["phases_s"], "times of the morph")


def undisturbed(job: ElasticJob, folder: Path, last: int) -> dict[int, float]:
    """Losses of one process that goes on alone from the job's first checkpoint."""
    words = ["--pipeline-model-parallel-size", "1", "--exit-interval", str(last)]
    words += ["--load", str(job.checkpoints), "--ckpt-step", str(SAVE_INTERVAL)]
    lines = train(1, [*ENDLESS, *words], folder)
    return {line["iteration"]: line["loss"] for line in lines if "iteration" in line}


def start(folder: Path) -> float:
    """Seconds from the start of four processes to a loaded model."""
    saved = folder / "saved"
    shape = ["--save", str(saved), "--save-interval", "2", "--exit-interval", "2"]
    train(4, [*ENDLESS, *shape], folder / "first")
    begin_ns = time.time_ns()
    again = ["--load", str(saved), "--exit-interval", "1"]
    lines = train(4, [*ENDLESS, *again], folder / "second")
    return float(next(line["unix_ns"] for line in lines if "loaded_s" in line) - begin_ns) / 1e9


def checkpoint(folder: Path, *, quick: bool) -> dict[str, float]:
    """How long training waits for checkpoints behind it, and how much longer its steps take."""
    steps = 41 if quick else 101
    found: dict[str, list[float]] = {"plain": [], "behind": []}
    waited: list[float] = []
    for turn in range(1 if quick else 3):
        for kind in found:
            words = [*LARGER, *ENDLESS, "--exit-interval", str(steps)]
            if kind == "behind":
                words += ["--save", str(folder / f"saved-{turn}"), "--save-interval", "10"]
                words += ["--async-save", "--keep-checkpoints", "2"]
            lines = train(2, words, folder / f"{kind}-{turn}")
            found[kind] += [line["step_ms"] for line in lines if "iteration" in line][5:]
            # The last one is written when training is over.
            waited += [line["seconds"] for line in lines if "saved" in line][:-1]
    step_ms = statistics.median(found["plain"])
    waiting = statistics.median(waited) * 1e3 / (10 * step_ms)
    slower = statistics.fmean(found["behind"]) / statistics.fmean(found["plain"]) - 1
    print(
        f"steps of {step_ms:.0f} ms: training waits {statistics.median(waited) * 1e3:.1f} ms for a"
        f" checkpoint, {waiting:.2%} of ten steps; steps beside the writing are {slower:.1%} longer"
        f" on {os.cpu_count()} cores for 2 processes"
    )
    return {"step_ms": step_ms, "waiting": waiting, "slower_steps": slower}


def train(processes: int, words: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """Train under torchrun, or alone; returns the lines of its progress."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "megatron.adaptive", "launch", "--standalone"]
        command += ["--nproc-per-node", str(processes)]
    command += [TRAINER, *FLAGS, *words, "--progress-dir", str(folder)]
    subprocess.run(
        command, env=environment(), check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL
    )
    return [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    sys.exit(main())
