"""submit, run, cancel, requeue and account on a real Slurm of four nodes."""

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
EXAMPLE = {
    "MEGATRON_ADAPTIVE_ROOT": ROOT,
    "PYTHON": sys.executable,
    "TRAIN_ITERS": 2,
    "GLOBAL_BATCH_SIZE": 8,
}
LONG = ["--set", "TRAIN_ITERS=100000", "--set", "CHECKPOINT_DIR=saved"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Two fast nodes with two GPUs by name, two slow ones with one."""
    if reason := slurm_lab.why_not(accounting=True):
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm") / "lab"
    with Lab(folder, [Kind("a10", 2, 2), Kind("v100", 2, 1)], accounting=True) as cluster:
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
        *("n3.err", "n3.gpu", "n3.out", "n4.err", "n4.gpu", "n4.out", "run.json")
    ]
    assert json.loads((folder / "run.json").read_text())["master"].startswith("10.66.0.13:")
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
    (fast,) = (path for path in folder.glob("n[12].out"))
    assert "iteration " in fast.read_text()
    assert [path.name for path in conf.parent.glob("logs/[0-9]*") if path.is_dir()] == [str(job)]


@pytest.mark.parametrize(
    ("example", "options", "ranks"),
    [
        ("data_parallel", ["--partition=a10"], 4),
        ("hybrid", ["--partition=a10"], 4),
        ("homogeneous", ["--partition=v100", "--gpus-per-node=1"], 2),
        ("heterogeneous", [], 4),
    ],
)
def test_the_examples_train(
    example: str, options: list[str], ranks: int, lab: Lab, tmp_path: Path
) -> None:
    variables = [f"{name}={value}" for name, value in EXAMPLE.items()]
    script = str(ROOT / "examples" / "slurm" / f"{example}.sbatch")
    words = ["sbatch", "--parsable", f"--chdir={tmp_path}", *options, script]
    job = lab.output("env", f"LOG_DIR={tmp_path / 'my logs'}", *variables, *words).partition(";")[0]
    folder = tmp_path / "my logs" / job
    wait_for(lambda: not lab.output("squeue", "-h", "-j", job), lambda: str(list(folder.iterdir())))
    text = "".join(path.read_text() for path in sorted(folder.iterdir()) if path.is_file())
    assert f"using world size: {ranks}," in text, text
    assert len(re.findall(r"iteration +\d+/ +2 ", text)) == 2, text


def test_a_cancelled_job_leaves_no_process(lab: Lab, conf: Path) -> None:
    job = submit(lab, conf, *LONG)
    wait_until_it_trains(conf, job)
    logs = str(conf.parent / "logs")
    status = json.loads(adaptive(lab, "status", str(job), "--log-dir", logs, "--json").stdout)
    assert (status["state"], status["is_stalled"], status["differences"]) == ("RUNNING", False, [])
    assert status["iteration"] >= 1
    lab.output("scancel", str(job))
    text = finish(lab, conf, job)
    assert "training ends: signal SIGTERM" in text
    wait_for(
        lambda: "CANCELLED" in adaptive(lab, "status", str(job), "--log-dir", logs).stdout,
        lambda: adaptive(lab, "status", str(job), "--log-dir", logs).stdout,
    )
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


def test_the_node_that_crashes_is_named_and_the_job_ends(lab: Lab, conf: Path) -> None:
    job = submit(lab, conf, *LONG, "--set", "SLURM_PARTITION=v100", "--set", "REQUEUE=false")
    wait_until_it_trains(conf, job)
    lab.crash("n4")
    try:
        text = finish(lab, conf, job)
        assert "on host n4" in text or "n4" in text.rpartition("srun: ")[2], text
        logs = str(conf.parent / "logs")
        status = json.loads(adaptive(lab, "status", str(job), "--log-dir", logs, "--json").stdout)
        assert status["state"] in ("NODE_FAIL", "FAILED", "CANCELLED")
        assert any("n4" in line for node in status["nodes"] for line in node["errors"])
        wait_for(lambda: not lab.processes("n3"), lambda: str(lab.processes("n3")))
    finally:
        lab.boot("n4")


def test_a_job_that_nobody_knows(lab: Lab, conf: Path) -> None:
    done = adaptive(lab, "status", "4711", "--log-dir", str(conf.parent / "logs"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: job 4711: Slurm does not know it and there is no ")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("SLURM_PARTITION=v10", "SLURM_PARTITION=v10: Slurm has no such one; the nearest is v100"),
        ("SLURM_PARTITION=a10 NNODES=4", "NNODES=4: partition a10 has 2 nodes; ask for fewer"),
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
