"""What changing the shape of a job costs, and whether its losses notice, against their goals.

    python benchmarks/elastic.py [--quick] [--part PART ...] [--json FILE]
    python benchmarks/elastic.py --part soak [--events N] [--seed S] [--minutes M] [--keep DIR]

Parts: ``morphs``, a small GPT on four processes of this machine through six planned morphs and a
node that is killed; ``start``, what process start, import and load take under torchrun, which a
morph is measured by; ``checkpoint``, what a checkpoint every ten steps that is written behind
training costs; ``soak``, nodes (namespaces; needs root) that are killed, stopped, cut off and
filled up at random, after each of which the job must go on or end with the reason;
``repartition``, what a slow rank regains by giving layers away, and what moving one takes;
``pieces``, steps of models with cut points as predicted from a profile and as measured. Exits with
status 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.elasticity import saving  # noqa: E402
from benchmarks.elasticity.nodes import why_not  # noqa: E402
from benchmarks.elasticity.pieces import pieces  # noqa: E402
from benchmarks.elasticity.repartition import repartition  # noqa: E402
from benchmarks.elasticity.soak import Result, Soak  # noqa: E402
from benchmarks.gpt_rank import train  # noqa: E402
from tests.cluster.jobs import FLAGS, ElasticJob  # noqa: E402

PARTS = ("morphs", "start", "checkpoint", "repartition", "pieces", "soak")
SAVE_INTERVAL = 15
LIMIT_S = 400.0
GOAL_RATIO, GOAL_S, GOAL_LOSS, GOAL_SAVING = 1.5, 10.0, 1e-5, 0.03
TRAINER = str(ROOT / "pretrain_gpt.py")
ENDLESS = ["--train-iters", "9999"]
PHASES = ("notice", "checkpoint", "end", "plan", "start", "load", "first_step", "whole")
SOAK_FLAGS = ["--lr", "1e-4", "--distributed-timeout-minutes", "1"]
EVENTS, QUICK_EVENTS = 100, 4


def main() -> int:
    """Measure as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two morphs, fewer steps and events")
    parser.add_argument("--part", action="append", choices=PARTS, help="all by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--events", type=int, help=f"of the soak ({EVENTS}; quick {QUICK_EVENTS})")
    parser.add_argument("--seed", type=int, default=1, help="of its events (1)")
    parser.add_argument("--minutes", type=float, help="after which no event comes (55; quick 1.5)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="new folder for the soak's logs")
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
            figures |= checkpoint(quick=options.quick)
            told = f"a checkpoint every ten steps costs at most {GOAL_SAVING:.0%}"
            goals.append((told, figures["saving"] <= GOAL_SAVING))
        if "repartition" in parts:
            regained, reached = repartition(Path(folder), quick=options.quick)
            figures |= regained
            goals += reached
        if "pieces" in parts:
            figures |= pieces(Path(folder), quick=options.quick)
        if "soak" in parts and (reason := why_not()) is not None:
            print(f"soak: skipped: {reason}")
        elif "soak" in parts:
            found = soak(Path(folder) if options.keep is None else options.keep, options)
            figures["soak"] = {**vars(found)}
            told = f"{sum(found.counts.values())} events: it goes on or ends with the reason"
            goals.append((told, not found.failures))
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
        job.trained(1, SAVE_INTERVAL + 1)
        for names in ("abc", "ab", "abc", "ab", "a", "ab")[: 2 if quick else 6]:
            shape_on(job, names)
        epoch = len(job.state()["epochs"])
        job.trained(epoch, SAVE_INTERVAL + 1)
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
    expected = job.undisturbed(folder / "undisturbed", SAVE_INTERVAL, last)
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
    """Change the machines and wait for some steps on them, and for the times of the morph."""
    epoch = len(job.state()["epochs"]) + 1
    job.change(names)
    job.trained(epoch, 5)
    job.until(lambda: "whole" in job.epoch(epoch)["phases_s"], "times of the morph")


def start(folder: Path) -> float:
    """Seconds from the start of four processes to a loaded model."""
    saved, words = folder / "saved", [TRAINER, *FLAGS, *ENDLESS]
    shape = ["--save", str(saved), "--save-interval", "2", "--exit-interval", "2"]
    train([*words, *shape], folder / "first", 4, LIMIT_S)
    begin_ns = time.time_ns()
    again = ["--load", str(saved), "--exit-interval", "1"]
    lines = train([*words, *again], folder / "second", 4, LIMIT_S)
    return float(next(line["unix_ns"] for line in lines if "loaded_s" in line) - begin_ns) / 1e9


def checkpoint(*, quick: bool) -> dict[str, float]:
    """What checkpoints behind training cost, in time on the clock and of processors."""
    result = saving.measure(6 if quick else 24)
    cost, processors = (statistics.median(saving.costs(result, unit)) for unit in ("s", "cpu_s"))
    waited = statistics.median(result["waited_s"])
    print(
        f"steps of {result['step_s'] * 1e3:.0f} ms, a checkpoint of"
        f" {result['size_bytes'] / 1e6:.1f} MB every {saving.WINDOW}: steps are {cost:.1%} longer,"
        f" of which training waits {waited / saving.WINDOW / result['step_s']:.1%}; they take"
        f" {processors:.1%} more processor time"
    )
    return {
        "step_s": result["step_s"],
        "saving": cost,
        "saving_cpu": processors,
        "waited_s": waited,
    }


def soak(folder: Path, options: argparse.Namespace) -> Result:
    """Let nodes fail at random; prints what happens as it does."""
    events = options.events or (QUICK_EVENTS if options.quick else EVENTS)
    minutes = options.minutes or (1.5 if options.quick else 55.0)
    signal.signal(signal.SIGTERM, _end)
    folder = folder / "soak"
    folder.mkdir(parents=True)
    with Soak(folder, options.seed, [*FLAGS, *SOAK_FLAGS], say) as job:
        found = job.run(events, minutes * 60)
    told = ", ".join(f"{value} {name}" for name, value in found.figures.items())
    print(found.table())
    went_on = sum(map(len, found.recoveries_s.values()))
    print(f"seed {found.seed}: went on {went_on} times, ended {len(found.ended)} times")
    for line in found.ended:
        print(f"ended with the reason: {line}")
    print(told)
    for text in found.tracebacks:
        print(f"a traceback ended with: {text}")
    for text in found.failures:
        print(f"FAILED (seed {found.seed}): {text}")
    return found


def _end(number: int, frame: object) -> None:
    """Let what is open be closed: namespaces and mounts outlive this program."""
    raise SystemExit(128 + number)


def say(text: str) -> None:
    """Print at once: a soak takes long."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
