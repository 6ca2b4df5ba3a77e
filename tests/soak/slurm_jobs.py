"""Measures how long a job takes to start under Slurm, and how soon the monitor reports a lost node.

    python -m tests.soak.slurm_jobs [--quick] [--part PART ...] [--json FILE]

The part ``start`` measures the time from sbatch to the first iteration with two Slurm nodes, minus
the time of the same job started by torchrun. The part ``crash`` measures the time from a node's
failure until the monitor reports it, and the processes that the job leaves behind. Both parts
need root and the packages of ``bash prerequisite.sh --slurm``. Exits with status 1 if a limit
is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from harness.report import Result, Row, measure, measured, missing, parser_of
from megatron.adaptive.cli.submit import batch_script, settings_text
from megatron.adaptive.cluster.conf import LaunchConf, load_conf
from megatron.adaptive.cluster.node_processes import trainer_flags
from tests.labs import slurm_lab
from tests.labs.slurm_lab import Kind, Lab
from tests.multiprocess.launch import ROOT, free_port, kill_tree, start

LIMIT_S = 240.0
LEFT_S = 20.0
"""Time in seconds after the end of a job. Processes that are still running then are orphans."""
WAYS = ("crash", "poweroff", "unplug")
CONF = """
MODEL=tiny
DEVICE=cpu
TRAIN_ITERS=100000
GLOBAL_BATCH_SIZE=4
PIPELINE_MP_SIZE=2
NNODES=2
NPROC_PER_NODE=1
REQUEUE=false
TRAINER_FLAGS='--vocab-size 255'
export OMP_NUM_THREADS=1
"""
ITERATION = re.compile(r"^ \[[\d :-]{19}\] iteration ", re.MULTILINE)


@contextlib.contextmanager
def started_lab() -> Iterator[Lab]:
    """Starts a Slurm cluster with two nodes and a spare node, which replaces a crashed node."""
    with tempfile.TemporaryDirectory(prefix="slurm-lab-") as folder:
        os.chmod(folder, 0o755)
        with Lab(Path(folder, "lab"), [Kind("node", 3, 0)], accounting=True) as lab:
            yield lab


def until(holds: Callable[[], object], name: str, limit_s: float = LIMIT_S) -> float:
    """Waits until ``holds()`` is true, and returns the waiting time in seconds.

    Raises a TimeoutError after ``limit_s`` seconds. ``name`` describes the condition in the
    message.
    """
    begin_s = time.perf_counter()
    while not holds():
        if time.perf_counter() - begin_s > limit_s:
            raise TimeoutError(f"no {name} within {limit_s:g} s")
        time.sleep(0.05)
    return time.perf_counter() - begin_s


def has_iterated(folder: Path) -> bool:
    """Returns whether any job log in ``folder`` contains an iteration line."""
    return any(ITERATION.search(path.read_text()) for path in folder.glob("*.out"))


def conf_in(folder: Path) -> LaunchConf:
    """Writes the configuration of all jobs of this soak test to ``folder``, and loads it."""
    folder.mkdir(parents=True)
    (folder / "conf.sh").write_text(CONF)
    return load_conf(folder / "conf.sh")


def submitted(lab: Lab, conf: LaunchConf) -> int:
    """Submits a job with configuration ``conf`` to the Slurm cluster ``lab``. Returns the job ID.

    The batch script is the one that ``job submit`` would write.
    """
    settings = conf.folder / "settings.json"
    settings.write_text(settings_text(conf))
    script = conf.folder / "job.sbatch"
    script.write_text(batch_script(conf, settings))
    conf.path("LOG_DIR").mkdir(exist_ok=True)
    return int(lab.output("sbatch", "--parsable", str(script)).partition(";")[0])


def first_iteration(lab: Lab, job: int, logs: Path) -> None:
    """Waits for the first iteration of job ``job``, whose logs are in the folder ``logs``.

    Raises:
        TimeoutError: No iteration completed in time. The output of Slurm and of the job is printed
            to stderr.
    """
    try:
        until(lambda: has_iterated(logs), "iteration")
    except TimeoutError:
        said = [lab.output("squeue", "-o", "%i %T %r %N"), lab.output("sinfo", "-N")]
        for path in sorted(logs.glob("*.???")):
            said += [f"--- {path.name}", path.read_text(errors="replace")[-3000:]]
        print(f"job {job}:", *said, sep="\n", file=sys.stderr)
        raise


def finished(lab: Lab, job: int) -> None:
    """Waits until job ``job`` has left the queue."""
    until(lambda: not lab.output("squeue", "-h", "-j", str(job)), "end of a job")


def slurm_start(lab: Lab, folder: Path) -> float:
    """Returns the time in seconds from the call of sbatch to the first iteration.

    The job runs on the Slurm cluster ``lab``. Its files are in ``folder``.
    """
    conf = conf_in(folder)
    begin_s = time.perf_counter()
    job = submitted(lab, conf)
    logs = conf.path("LOG_DIR") / str(job)
    first_iteration(lab, job, logs)
    took_s = time.perf_counter() - begin_s
    lab.output("scancel", str(job))
    finished(lab, job)
    return took_s


def torchrun_start(lab: Lab, folder: Path) -> float:
    """Returns the seconds from the start of torchrun on both nodes to the first iteration.

    The job runs on the Slurm cluster ``lab``. Its files are in ``folder``.
    """
    conf = conf_in(folder)
    launcher = ["env", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=eth0"]
    launcher += ["CUDA_VISIBLE_DEVICES=", sys.executable, "-m", "torch.distributed.run"]
    launcher += ["--nnodes=2", "--nproc-per-node=1", "--master-addr=10.66.0.11"]
    launcher += [f"--master-port={free_port()}"]
    begin_s = time.perf_counter()
    started = []
    try:
        for rank, name in enumerate(("n1", "n2")):
            node = [f"--node-rank={rank}", str(ROOT / "pretrain_gpt.py")]
            command = [*lab.enter(name, str(ROOT)), *launcher, *node, *trainer_flags(conf, folder)]
            started.append(start(command, folder / f"{name}.out", lab.variables))
        until(lambda: has_iterated(folder), "iteration")
        return time.perf_counter() - begin_s
    finally:
        for process in started:
            kill_tree(process)


def of_start(options: argparse.Namespace) -> Result:
    """Compares the start of a job by Slurm with a start by torchrun, and returns table rows.

    Jobs are started alternately in both ways.
    """
    with started_lab() as lab, tempfile.TemporaryDirectory() as folder:
        alone, slurm = [], []
        for turn in range(options.repetitions):
            alone.append(torchrun_start(lab, Path(folder, f"alone{turn}")))
            slurm.append(slurm_start(lab, Path(folder, f"slurm{turn}")))
    more = [seconds - other for seconds, other in zip(slurm, alone, strict=True)]
    rows = [
        measured("start: torchrun alone to the first iteration", alone, unit="s"),
        measured("start: sbatch to the first iteration", slurm, unit="s"),
        Row(
            what="start: additional time with sbatch",
            value=statistics.median(slurm) - statistics.median(alone),
            unit="s",
            goal=3,
            samples=more,
            note="difference of the medians",
        ),
    ]
    return Result(rows=rows, facts={"start": {"alone_s": alone, "slurm_s": slurm}})


def of_crash(_: argparse.Namespace) -> Result:
    """Makes jobs lose a node in several ways, and returns table rows about how this is reported."""
    named: dict[str, float] = {}
    ended: dict[str, float] = {}
    left: list[str] = []
    with started_lab() as lab, tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            named[way], ended[way], orphans = lost_node(lab, Path(folder, way), way)
            left += orphans
    rows = [
        Row(
            what="crash: longest time until the monitor reports the lost node",
            value=max(named.values()),
            unit="s",
            goal=30,
            note=", ".join(f"{way} {value:.1f} s" for way, value in named.items()),
        ),
        Row(
            what="crash: longest time from the loss of a node to the end of the job",
            value=max(ended.values()),
            unit="s",
            note="Slurm's SlurmdTimeout is 15 s here",
        ),
        Row(what="crash: processes left", value=len(left), goal=0, note="; ".join(left)[:200]),
    ]
    return Result(rows=rows, facts={"crash": {"named_s": named, "ended_s": ended}})


def lost_node(lab: Lab, folder: Path, way: str) -> tuple[float, float, list[str]]:
    """Makes a job on the Slurm cluster ``lab`` lose a node, by calling the method ``lab.<way>``.

    Returns the seconds until the monitor reports the node, the seconds until the job ends, and
    descriptions of processes that are left. The files of the job are in ``folder``.
    """
    conf = conf_in(folder)
    job = submitted(lab, conf)
    logs = conf.path("LOG_DIR")
    first_iteration(lab, job, logs / str(job))
    held = lab.output("squeue", "-h", "-j", str(job), "-o", "%N")
    node = lab.output("scontrol", "show", "hostnames", held).split()[-1]
    arguments = [
        "env",
        f"PYTHONPATH={ROOT}",
        sys.executable,
        "-m",
        "megatron.adaptive",
        "job",
        "status",
    ]
    arguments += [str(job), "--json", "--log-dir", str(logs)]

    def is_named() -> bool:
        shown = json.loads(lab.run(arguments).stdout)
        errors = [line for entry in shown["nodes"] for line in entry["errors"]]
        return node in shown["lost"] or any(f"node {node}" in line for line in errors)

    begin_s = time.perf_counter()
    getattr(lab, way)(node)
    until(is_named, f"name of {node}")
    named_s = time.perf_counter() - begin_s
    finished(lab, job)
    ended_s = time.perf_counter() - begin_s
    if way == "unplug":
        lab.plug(node)
    else:
        lab.put_back(node)

    def left() -> list[str]:
        return [
            f"{way}: {name} {process.name()}"
            for name, _ in lab.nodes
            for process in lab.processes(name)
        ]

    try:
        until(lambda: not left(), "end of its processes", LEFT_S)
    except TimeoutError:
        return named_s, ended_s, left()
    until(
        lambda: len(lab.output("sinfo", "-hN", "-p", "all", "-t", "idle").split("\n")) > 2, "node"
    )
    return named_s, ended_s, []


PARTS: dict[str, Callable[[argparse.Namespace], Result]] = {"start": of_start, "crash": of_crash}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses ``arguments``, or the arguments of this process if ``arguments`` is ``None``."""
    parser = parser_of(__doc__, PARTS, "fewer turns, within ten minutes")
    parser.add_argument("--repetitions", type=int, help='repetitions of the part "start" (>= 3)')
    options = parser.parse_args(arguments)
    options.repetitions = max(3, options.repetitions or (3 if options.quick else 7))
    return options


def result_of(part: str, options: argparse.Namespace) -> Result:
    """Measures the part ``part``. If this machine cannot run it, returns a row with the reason."""
    reason = slurm_lab.why_not(accounting=True)
    if reason is not None:
        return Result(rows=[missing(part, reason)])
    return PARTS[part](options)


def main(arguments: list[str] | None = None) -> int:
    """Measures the selected parts and prints the results. Returns 1 if a goal is missed."""
    options = parse(arguments)
    return measure({part: partial(result_of, part, options) for part in PARTS}, options)


if __name__ == "__main__":
    sys.exit(main())
