"""submit, run, cancel, requeue and account on a real Slurm of three nodes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from . import slurm_lab
from .slurm_lab import Kind, Lab

pytestmark = [pytest.mark.slow, pytest.mark.slurm_lab, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
WATCHDOG_S = 180.0
CONF = """
JOB_NAME=gpt
MODEL=tiny
DEVICE=cpu
TRAIN_ITERS=3
GLOBAL_BATCH_SIZE=4
PIPELINE_MP_SIZE=2
NNODES=2
NPROC_PER_NODE=1
TRAINER_FLAGS='--vocab-size 255'
export OMP_NUM_THREADS=1
"""
LONG = ["--set", "TRAIN_ITERS=100000", "--set", "CHECKPOINT_DIR=saved"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One fast node with two GPUs by name, two slow ones with one."""
    if reason := slurm_lab.why_not(accounting=True):
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm") / "lab"
    with Lab(folder, [Kind("a10", 1, 2), Kind("v100", 2, 1)], accounting=True) as cluster:
        yield cluster


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    path = tmp_path / "a run" / "conf.sh"
    path.parent.mkdir()
    path.write_text(CONF)
    return path


def adaptive(lab: Lab, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a subcommand on the login host."""
    path = f"PYTHONPATH={ROOT}"
    return lab.run(["env", path, sys.executable, "-m", "megatron.adaptive", *words])


def submit(lab: Lab, conf: Path, *words: str) -> int:
    done = adaptive(lab, "submit", str(conf), *words)
    assert done.returncode == 0, done.stderr
    match = re.match(r"job (\d+): logs in (.*)\n", done.stdout)
    assert match is not None, done.stdout
    assert match[2] == str(conf.parent / "logs" / match[1])
    return int(match[1])


def wait_for(what: Callable[[], object], why: Callable[[], str]) -> None:
    end_s = time.monotonic() + WATCHDOG_S
    while not what():
        assert time.monotonic() < end_s, why()
        time.sleep(0.3)


def said(conf: Path, job: int) -> str:
    """Return all that a job wrote."""
    logs = conf.parent / "logs"
    files = [logs / f"{job}.batch", *sorted((logs / str(job)).glob("*.[oe][ur][tr]"))]
    return "".join(f"--- {path.name}\n{path.read_text()}" for path in files if path.exists())


def finish(lab: Lab, conf: Path, job: int) -> str:
    """Wait until a job has left the queue; return all that it wrote."""
    wait_for(lambda: not lab.output("squeue", "-h", "-j", str(job)), lambda: said(conf, job))
    return said(conf, job)


def wait_until_it_trains(conf: Path, job: int, start: int = 1) -> None:
    """Wait until the node that writes has done an iteration since its start of that number."""

    def trains() -> bool:
        parts = [part.split(" starts\n")[1:] for part in said(conf, job).split("--- ")]
        return any(len(part) >= start and "iteration " in part[start - 1] for part in parts)

    wait_for(trains, lambda: said(conf, job))


def last_iteration(text: str) -> int:
    return int(re.findall(r"iteration +(\d+)/", text)[-1])


def test_a_job_on_two_equal_nodes(lab: Lab, conf: Path) -> None:
    job = submit(lab, conf, "--set", "SLURM_PARTITION=v100")
    text = finish(lab, conf, job)
    assert len(re.findall(r"iteration +\d+/ +3 ", text)) == 3, text
    folder = conf.parent / "logs" / str(job)
    assert sorted(path.name for path in folder.iterdir()) == [
        *("n2.err", "n2.gpu", "n2.out", "n3.err", "n3.gpu", "n3.out", "run.json")
    ]
    assert json.loads((folder / "run.json").read_text())["master"].startswith("10.66.0.12:")
    states = lab.output("sacct", "-n", "-X", "-j", str(job), "-o", "state")
    wait_for(
        lambda: "COMPLETED" in lab.output("sacct", "-n", "-X", "-j", str(job), "-o", "state"),
        lambda: states,
    )


def test_a_job_of_two_kinds_of_nodes_is_one_world(lab: Lab, conf: Path) -> None:
    conf.write_text(
        CONF.replace("DEVICE=cpu", "DEVICE=gpu")
        .replace(
            "NNODES=2\nNPROC_PER_NODE=1", "HOMOGENEOUS_CLUSTER=false\nNODES='v100:2x1 a10:1x2'"
        )
        .replace("PIPELINE_MP_SIZE=2", "PIPELINE_MP_SIZE=4")
        + "SLURM_PARTITION='a10=a10 v100=v100'\nSLURM_GRES='a10=gpu:a10 v100=gpu:v100'\n"
    )
    job = submit(lab, conf)
    text = finish(lab, conf, job)
    assert len(re.findall(r"iteration +\d+/ +3 ", text)) == 3, text
    # In the order of NODES: the last rank, which writes, is on the fast node.
    folder = conf.parent / "logs" / str(job)
    assert json.loads((folder / "run.json").read_text())["processes"] == [1, 1, 2]
    assert "iteration " in (folder / "n1.out").read_text()
    assert [path.name for path in conf.parent.glob("logs/[0-9]*") if path.is_dir()] == [str(job)]


def test_a_cancelled_job_leaves_no_process(lab: Lab, conf: Path) -> None:
    job = submit(lab, conf, *LONG)
    wait_until_it_trains(conf, job)
    lab.output("scancel", str(job))
    text = finish(lab, conf, job)
    assert "training ends: signal SIGTERM" in text
    for name, _ in lab.nodes:
        wait_for(lambda name=name: not lab.processes(name), lambda: str(lab.processes("n1")))


def test_a_job_whose_time_is_over_goes_on_in_the_queue(lab: Lab, conf: Path) -> None:
    job = submit(lab, conf, *LONG)
    wait_until_it_trains(conf, job)
    lab.output("scancel", "--signal=USR1", str(job))  # as Slurm does 90 s before the end
    wait_for(lambda: "start 2" in said(conf, job), lambda: said(conf, job))
    wait_until_it_trains(conf, job, start=2)
    text = said(conf, job)
    first, second = (part for part in text.split(" starts\n") if "iteration " in part)
    assert last_iteration(second) > last_iteration(first) > 0
    assert "training ends: signal SIGUSR1" in text
    assert "goes on in the same job" in text
    lab.output("scancel", str(job))
    finish(lab, conf, job)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("SLURM_PARTITION=v10", "SLURM_PARTITION=v10: Slurm has no such one; the nearest is v100"),
        ("SLURM_PARTITION=a10", "NNODES=2: partition a10 has 1 nodes; ask for fewer"),
        ("DEVICE=gpu SLURM_GRES=gpu:h100", "SLURM_GRES=gpu:h100: the cluster has none of it"),
        ("DEVICE=gpu NPROC_PER_NODE=4", "NPROC_PER_NODE=4: a node of the cluster has at most 2"),
        ("SLURM_TIME=soon", "Slurm refuses the job"),
    ],
)
def test_what_slurm_does_not_have_is_named(words: str, expected: str, lab: Lab, conf: Path) -> None:
    changes = [word for change in words.split() for word in ("--set", change)]
    done = adaptive(lab, "submit", str(conf), *changes)
    assert done.returncode == 2, done.stdout
    assert done.stderr.startswith(f"error: {expected}"), done.stderr
    assert len(done.stderr.splitlines()) == 1
