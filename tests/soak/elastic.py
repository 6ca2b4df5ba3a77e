"""Measures changes of a job's shape, and compares the losses with those of an unchanged job.

    python -m tests.soak.elastic [--quick] [--part PART ...] [--json FILE]
    python -m tests.soak.elastic --part soak [--events N] [--seed S] [--minutes M] [--keep DIR]

The part ``morphs`` makes six planned changes of shape and kills a node, for a small GPT on four
processes of this machine. The part ``start`` measures process start, import and load under
torchrun, as a baseline for a change. The part ``copies`` keeps copies of each node's state in
memory, kills a node at a random time, and counts the lost steps. The part ``soak`` randomly kills,
suspends and disconnects nodes and fills their disks. The job must then continue or exit with a
reason. The nodes are namespaces, so this part needs root. The part ``repartition`` slows down a
rank, and measures which fraction of the delay is recovered by moving layers, and how long a move
takes. The part ``pieces`` compares measured with predicted steps of models with cut points. Exits
with status 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from harness.processes import train  # noqa: E402
from harness.report import Result, Row, measure, parser_of  # noqa: E402
from tests.cluster.jobs import FLAGS, ElasticJob  # noqa: E402
from tests.soak.lost_nodes import soaked  # noqa: E402
from tests.soak.pieces import pieces  # noqa: E402
from tests.soak.repartition import repartition  # noqa: E402

PARTS = ("morphs", "start", "copies", "repartition", "pieces", "soak")
SAVE_INTERVAL = 15
LIMIT_S = 400.0
GOAL_RATIO, GOAL_S, GOAL_LOSS, GOAL_LOST = 1.5, 10.0, 1e-5, 1
TRAINER = str(ROOT / "pretrain_gpt.py")
ENDLESS = ["--train-iters", "9999"]
PHASES = ("notice", "checkpoint", "end", "plan", "start", "load", "first_step", "whole")
EVENTS, QUICK_EVENTS = 100, 4


def main() -> int:
    """Measures the parts that the command line selects, and returns the exit status."""
    parser = parser_of(__doc__, PARTS, "two morphs, fewer steps and events")
    parser.add_argument(
        "--events",
        type=int,
        help=f"number of events in the soak test ({EVENTS}; {QUICK_EVENTS} with --quick)",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the random events (1)")
    parser.add_argument(
        "--minutes", type=float, help="minutes after which no event begins (55; 1.5 with --quick)"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="new folder for the logs")
    options = parser.parse_args()
    quick: bool = options.quick
    with tempfile.TemporaryDirectory(prefix="elastic-") as name:
        folder = Path(name)
        parts = {
            "morphs": lambda: morphs(folder / "morphs", quick=quick),
            "start": lambda: start(folder / "start"),
            "copies": lambda: copies(folder, quick=quick),
            "repartition": lambda: repartition(folder, quick=quick),
            "pieces": lambda: pieces(folder, quick=quick),
            "soak": lambda: soak(folder if options.keep is None else options.keep, options),
        }
        return measure(parts, options, compare)


def compare(total: Result) -> None:
    """Adds a row to ``total`` that compares a change of shape with a start of the job.

    The row contains the ratio of both durations. If a duration was not measured, no row is added.
    """
    if {"morph_s", "start_s"} <= set(total.facts):
        ratio = total.facts["morph_s"] / total.facts["start_s"]
        total.rows.append(
            Row(what="time of a morph, divided by that of a start", value=ratio, goal=GOAL_RATIO)
        )
        print(total.rows[-1].line)


def morphs(folder: Path, *, quick: bool) -> Result:
    """Adds and removes machines of a job, and measures each change of the job's shape.

    The job writes its files to ``folder``. If ``quick``, its shape changes only twice.
    """
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
    planned = [epoch for epoch in epochs[1:-1] if "whole" in epoch["phases_s"]]
    for epoch in epochs[1:]:
        parts = [f"{n} {epoch['phases_s'][n]:.2f}" for n in PHASES if n in epoch["phases_s"]]
        print(f"{epoch['shape']:28} {epoch['reason'][:36]:36} {', '.join(parts)} s")
    lines = [line for line in job.lines() if "iteration" in line]
    last = max(line["iteration"] for line in lines)
    expected = job.undisturbed(folder / "undisturbed", SAVE_INTERVAL, last)
    worst = max(
        abs(line["loss"] / expected[line["iteration"]] - 1)
        for line in lines
        if line["iteration"] > SAVE_INTERVAL
    )
    missing = set(range(1, last + 1)) - {line["iteration"] for line in lines}
    lost = sum(epoch["lost_steps"] for epoch in epochs[1:-1]) + len(missing)
    facts = {
        "morph_s": statistics.median(epoch["phases_s"]["whole"] for epoch in planned),
        "morphs": [{"shape": epoch["shape"], **epoch["phases_s"]} for epoch in epochs[1:]],
        "lost_without_notice": epochs[-1]["lost_steps"],
        "steps": last,
    }
    note = f"{last} steps, {len(missing)} missing"
    title = "maximum difference between a loss and that of an undisturbed run"
    rows = [
        Row(what=title, value=worst, goal=GOAL_LOSS, note=note),
        Row(what="steps lost after a notice", value=lost, goal=0),
        Row(what="steps lost without a notice", value=epochs[-1]["lost_steps"]),
        Row(what="time of a morph", value=facts["morph_s"], unit="s", goal=GOAL_S),
    ]
    return Result(rows=rows, facts=facts)


def shape_on(job: ElasticJob, names: str) -> None:
    """Changes the machines of ``job`` to ``names``, and waits until the job trains on them."""
    epoch = len(job.state()["epochs"]) + 1
    job.change(names)
    job.trained(epoch, 5)
    job.until(lambda: "whole" in job.epoch(epoch)["phases_s"], "times of the morph")


def start(folder: Path) -> Result:
    """Measures how long torchrun takes to start four processes that load a checkpoint.

    The checkpoint and the logs are in ``folder``.
    """
    saved, command = folder / "saved", [TRAINER, *FLAGS, *ENDLESS]
    shape = ["--save", str(saved), "--save-interval", "2", "--exit-interval", "2"]
    train([*command, *shape], folder / "first", 4, LIMIT_S)
    begin_ns = time.time_ns()
    again = ["--load", str(saved), "--exit-interval", "1"]
    lines = train([*command, *again], folder / "second", 4, LIMIT_S)
    loaded_ns = next(line["unix_ns"] for line in lines if "loaded_s" in line)
    took_s = (loaded_ns - begin_ns) / 1e9
    title = "process start, import and load under torchrun"
    return Result(rows=[Row(what=title, value=took_s, unit="s")], facts={"start_s": took_s})


def copies(folder: Path, *, quick: bool) -> Result:
    """Kills nodes whose state was copied, and counts the training steps that the job loses.

    The job writes its files to ``folder``. If ``quick``, only one node is killed.
    """
    return _lose_nodes(folder, times=1 if quick else 4)


def _lose_nodes(folder: Path, *, times: int) -> Result:
    """Kills ``times`` nodes at random moments, and replaces each of them with a new node.

    The job writes its files to ``folder``.
    """
    (here := folder / "copies").mkdir()
    moments = random.Random(1)
    flags = "--train-iters 99999 --save-interval 99999".split()
    job = ElasticJob(here, ["a", "b", "c0"], flags, ["--replicate-every", "1"])
    lost = []
    try:
        for number in range(times):
            epoch, name = 2 * number + 1, f"c{number}"
            job.trained(epoch, 6)
            job.until(lambda name=name: _is_present(job, name), f"node {name}", LIMIT_S)
            time.sleep(moments.random() * 0.2)
            job.lose(name)
            job.trained(epoch + 1, 2)
            lost.append(max(job.steps(epoch)) - job.steps(epoch + 1)[0] + 1)
            job.change(["a", "b", f"c{number + 1}"])
    finally:
        job.close()
    restored = job.said().count("was restored from copies in memory")
    rows = [
        Row(what="nodes killed", value=len(lost)),
        Row(what="restored from copies", value=restored),
        Row(what="maximum number of steps lost with a node", value=max(lost), goal=GOAL_LOST),
    ]
    return Result(rows=rows, facts={"lost": lost})


def _is_present(job: ElasticJob, name: str) -> bool:
    """Returns whether the job's state lists the node ``name`` as present."""
    machines = job.state().get("machines", [])
    return any(machine["name"] == name and machine["status"] == "present" for machine in machines)


def soak(folder: Path, options: argparse.Namespace) -> Result:
    """Makes nodes of a job fail at random, and prints each event.

    ``options`` contains the number of events, the minutes and the seed. Logs are in ``folder``.
    """
    events = options.events or (QUICK_EVENTS if options.quick else EVENTS)
    minutes = options.minutes or (1.5 if options.quick else 55.0)
    return soaked(folder, events, minutes, options.seed)


if __name__ == "__main__":
    sys.exit(main())
