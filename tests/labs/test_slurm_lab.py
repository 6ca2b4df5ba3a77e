"""Tests jobs on a real Slurm: submitting, cancelling, requeueing, preemption and failures."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.jobs import JobFolder
from tests.trace.views.test_page import Page

from ..multiprocess.launch import forkserver, wait_until
from . import slurm_lab
from .slurm_lab import Kind, Lab

pytestmark = [pytest.mark.slow, pytest.mark.slurm_lab, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
WATCHDOG_S = 120.0
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
LITTLE = 4_000_000 << 10
"""Limit of the address space of a job's processes, in bytes.

Slurm applies the limit of the process that submits the job.
"""
NAMED_S = 30.0
ITERATION = re.compile(r"iteration +(\d+)/")
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
SETTINGS = [
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    "PartitionName=low Nodes=n3,n4 PriorityTier=1 GraceTime=15",
    "PartitionName=high Nodes=n3,n4 PriorityTier=9 PreemptMode=OFF",
]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Starts a cluster of two nodes with two GPUs each, and two nodes with one GPU each."""
    if reason := slurm_lab.why_not(accounting=True):
        pytest.skip(reason)
    kinds = [Kind("a10", 2, 2), Kind("v100", 2, 1)]
    with tempfile.TemporaryDirectory(prefix="slurm-lab-") as folder:
        os.chmod(folder, 0o755)
        root = Path(folder, "lab")
        with Lab(root, kinds, accounting=True, settings=SETTINGS) as cluster:
            yield cluster


@pytest.fixture(autouse=True)
def queue(lab: Lab) -> Iterator[None]:
    """Cancels all jobs that are still in the queue after a test."""
    yield
    if jobs := lab.output("squeue", "-h", "-o", "%A").split():
        lab.output("scancel", *set(jobs))
        wait_for(lambda: not lab.output("squeue", "-h"), lambda: lab.output("squeue"))


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    path = tmp_path / "a run" / "conf.sh"
    path.parent.mkdir()
    path.write_text(CONF)
    return path


def adaptive(lab: Lab, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a subcommand of ``megatron.adaptive`` with ``arguments`` on the login host."""
    variables = (f"{name}={value}" for name, value in forkserver().nodes()[1].items())
    return lab.run(["env", *variables, sys.executable, "-m", "megatron.adaptive", *arguments])


def submit(lab: Lab, conf: Path, *options: str) -> int:
    done = adaptive(lab, "job", "submit", str(conf), *options)
    assert done.returncode == 0, done.stderr
    match = re.match(r"submitted job (\d+); its logs will be in (.*)\n", done.stdout)
    assert match is not None, done.stdout
    assert match[2] == str(conf.parent / "logs" / match[1])
    return int(match[1])


def wait_for(
    condition: Callable[[], object], why: Callable[[], str], *, every_s: float = 0.3
) -> None:
    wait_until(condition, why, WATCHDOG_S, every_s)


def said(conf: Path, job: int) -> str:
    """Returns the text of the batch log and all node logs of ``job``."""
    logs = conf.parent / "logs"
    files = [logs / f"{job}.batch", *sorted((logs / str(job)).glob("*.[oe][ur][tr]"))]
    return "".join(f"--- {path.name}\n{path.read_text()}" for path in files if path.exists())


def finish(lab: Lab, conf: Path, job: int) -> str:
    """Waits until ``job`` has left the queue, and returns the text of all its logs."""
    wait_for(lambda: not lab.output("squeue", "-h", "-j", str(job)), lambda: said(conf, job))
    return said(conf, job)


def wait_until_it_trains(conf: Path, job: int, start: int = 1) -> None:
    """Waits until an iteration has completed after the job has started ``start`` times."""

    def trains() -> bool:
        parts = [part.split(" starts\n")[1:] for part in said(conf, job).split("--- ")]
        return any(len(part) >= start and ITERATION.search(part[start - 1]) for part in parts)

    wait_for(trains, lambda: said(conf, job))


def iterations(text: str) -> list[list[int]]:
    """Returns the indices of the logged iterations in ``text``, with a list for each job start."""
    starts = [ITERATION.findall(part) for part in text.split(" starts\n")]
    return [[int(number) for number in numbers] for numbers in starts if numbers]


def status_of(lab: Lab, conf: Path, job: int) -> dict[str, Any]:
    logs = str(conf.parent / "logs")
    done = adaptive(lab, "job", "status", str(job), "--log-dir", logs, "--json")
    assert done.returncode in (0, 1), done.stderr
    status: dict[str, Any] = json.loads(done.stdout)
    return status


def wait_until_named(lab: Lab, conf: Path, job: int, node: str) -> None:
    """Waits until the job's status reports that ``node`` was lost."""
    begin_s = time.monotonic()

    def is_named() -> bool:
        status = status_of(lab, conf, job)
        errors = [line for listed in status["nodes"] for line in listed["errors"]]
        return node in status["lost"] or any(f"node {node}" in line for line in errors)

    # Query the status rarely, because each query takes processor time away from the job.
    wait_for(is_named, lambda: said(conf, job), every_s=2.0)
    assert time.monotonic() - begin_s < NAMED_S


def wait_until_no_process(lab: Lab) -> None:
    def left() -> list[str]:
        return [f"{name}: {process}" for name, _ in lab.nodes for process in lab.processes(name)]

    wait_for(lambda: not left(), lambda: "\n".join(left()))


def page_of(lab: Lab, conf: Path, job: int) -> dict[str, Any]:
    """Returns the data that the report page of ``job`` contains."""
    done = adaptive(lab, "job", "report", str(job), "--log-dir", str(conf.parent / "logs"))
    assert done.returncode == 0, done.stderr
    text = Path(done.stdout.strip()).read_text()
    pattern = r'<script type="application/json" id="report-data">(.*?)</script>'
    match = re.search(pattern, text, re.DOTALL)
    assert match is not None
    report: dict[str, Any] = json.loads(match[1])
    return report


def test_a_job_on_two_equal_nodes_and_its_report(lab: Lab, conf: Path) -> None:
    job = submit(lab, conf, "--set", "SLURM_PARTITION=v100", "--set", "TRACE=true")
    text = finish(lab, conf, job)
    assert len(re.findall(r"iteration +\d+/ +3 ", text)) == 3, text
    folder = conf.parent / "logs" / str(job)
    assert sorted(path.name for path in folder.iterdir()) == [
        *("n3.err", "n3.gpu", "n3.out", "n4.err", "n4.gpu", "n4.out"),
        *("progress.jsonl", "run.json", "traces"),
    ]
    assert json.loads((folder / "run.json").read_text())["master"].startswith("10.66.0.13:")
    states = lab.output("sacct", "-n", "-X", "-j", str(job), "-o", "state")
    wait_for(
        lambda: "COMPLETED" in lab.output("sacct", "-n", "-X", "-j", str(job), "-o", "state"),
        lambda: states,
    )
    report = page_of(lab, conf, job)
    facts = dict(report["facts"])
    assert (facts["state"], facts["nodelist"], facts["exitcode"]) == ("COMPLETED", "n[3-4]", "0:0")
    drawn = conf.parent / "pipeline.html"
    drawn.write_text(report["traces"]["page"])
    assert Page(drawn).head["nodes"] == {"n3": [0], "n4": [1]}
    assert len(report["traces"]["rank_ms"]) == len(report["use"]) == 2
    assert len(report["curves"]["loss"]) == 3
    assert not any(setting["differs"] for setting in report["settings"])


def test_a_job_of_two_kinds_of_nodes_is_one_world_and_goes_on_when_its_time_is_over(
    lab: Lab, conf: Path
) -> None:
    conf.write_text(
        CONF.replace("DEVICE=cpu", "DEVICE=gpu")
        .replace(
            "NNODES=2\nNPROC_PER_NODE=1", "HOMOGENEOUS_CLUSTER=false\nNODES='v100:2x1 a10:1x2'"
        )
        .replace("PIPELINE_MP_SIZE=2", "PIPELINE_MP_SIZE=4")
        + "SLURM_PARTITION='a10=a10 v100=v100'\nSLURM_GRES='a10=gpu:a10 v100=gpu:v100'\n"
    )
    job = submit(lab, conf, *LONG)
    wait_until_it_trains(conf, job)
    # The ranks follow the order of NODES. So the last rank, which logs iterations, runs on a fast
    # node.
    folder = conf.parent / "logs" / str(job)
    assert json.loads((folder / "run.json").read_text())["processes"] == [1, 1, 2]
    (fast,) = (path for path in folder.glob("n[12].out"))
    assert "iteration " in fast.read_text()
    # Slurm sends this signal 90 s before a job's time limit.
    lab.output("scancel", "--signal=USR1", str(job))
    wait_for(lambda: "start 2" in said(conf, job), lambda: said(conf, job))
    wait_until_it_trains(conf, job, start=2)
    text = said(conf, job)
    first, second = iterations(text)
    assert second[0] == first[-1] + 1
    assert "training ends: signal SIGUSR1" in text
    assert "the time limit was near: the run continues in the same job" in text
    assert [path.name for path in conf.parent.glob("logs/[0-9]*") if path.is_dir()] == [str(job)]
    lab.output("scancel", str(job))
    finish(lab, conf, job)


def run_example(lab: Lab, folder: Path, example: str, *options: str) -> str:
    """Submits ``example`` as its header says, waits for its end, and returns its output."""
    variables = [
        f"{name}={value}" for name, value in {**EXAMPLE, **forkserver().nodes()[1]}.items()
    ]
    script = str(ROOT / "examples" / "slurm" / f"{example}.sbatch")
    assignments = [f"LOG_DIR={folder / 'my logs'}"]
    assignments += [option for option in options if not option.startswith("--")]
    flags = [option for option in options if option.startswith("--")]
    command = [
        "env",
        *variables,
        *assignments,
        *(["prlimit", f"--as={LITTLE}"] if assignments[1:] else []),
    ]
    command += ["sbatch", "--parsable", f"--chdir={folder}", *flags, script]
    job = lab.output(*command).partition(";")[0]
    logs = folder / "my logs" / job
    wait_for(lambda: not lab.output("squeue", "-h", "-j", job), lambda: str(list(logs.iterdir())))
    return "".join(path.read_text() for path in sorted(logs.iterdir()) if path.is_file())


@pytest.mark.parametrize(
    ("example", "options", "sizes"),
    [
        ("data_parallel", ["--partition=a10"], (4, 4, 1, 1)),
        ("hybrid", ["--partition=a10"], (4, 1, 2, 2)),
        ("homogeneous", ["--partition=v100", "--gpus-per-node=1"], (2, 1, 1, 2)),
        ("heterogeneous", [], (4, 1, 1, 4)),
    ],
)
def test_the_examples_train(
    example: str, options: list[str], sizes: tuple[int, ...], lab: Lab, tmp_path: Path
) -> None:
    text = run_example(lab, tmp_path, example, *options)
    world, data, tensor, pipeline = sizes
    expected = (
        f"using world size: {world}, data-parallel-size: {data}, tensor-model-parallel size: "
        f"{tensor}, pipeline-model-parallel size: {pipeline}"
    )
    assert text.count(expected) == 1, text
    line = r"iteration +\d+/ +2 \|.* elapsed time per iteration \(ms\): .* lm loss: "
    assert len(re.findall(line, text)) == 2, text


def test_a_batch_that_is_too_large_for_the_memory(lab: Lab, tmp_path: Path) -> None:
    sizes = ["MICRO_BATCH_SIZE=8192", "GLOBAL_BATCH_SIZE=32768"]
    options = ["--partition=v100", "--gpus-per-node=1"]
    text = run_example(lab, tmp_path, "homogeneous", *sizes, *options)
    assert not re.search(r"iteration +\d+/", text), text
    lines = re.findall(r"^error: rank \d .* ran out of memory .*$", text, re.MULTILINE)
    assert any("you tried to allocate 536870912 bytes" in line for line in lines), text
    assert all("; lower --micro-batch-size or " in line for line in lines), text
    assert "Traceback" not in text, text


def test_a_job_that_another_one_displaces_goes_on_after_it_until_it_is_cancelled(
    lab: Lab, conf: Path
) -> None:
    job = submit(lab, conf, *LONG, "--set", "SLURM_PARTITION=low")
    wait_until_it_trains(conf, job)
    status = status_of(lab, conf, job)
    assert (status["state"], status["is_stalled"], status["differences"]) == ("RUNNING", False, [])
    assert status["iteration"] >= 1
    options = ["--parsable", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null"]
    lab.output("sbatch", *options, "--wrap", "true")
    wait_for(lambda: "start 2" in said(conf, job), lambda: said(conf, job))
    wait_until_it_trains(conf, job, start=2)
    text = said(conf, job)
    first, second = iterations(text)
    assert second[0] == first[-1] + 1
    stopped = text.count("training ends: signal SIGTERM")
    assert stopped
    lab.output("scancel", str(job))
    text = finish(lab, conf, job)
    assert text.count("training ends: signal SIGTERM") > stopped
    logs = str(conf.parent / "logs")
    wait_for(
        lambda: "CANCELLED" in adaptive(lab, "job", "status", str(job), "--log-dir", logs).stdout,
        lambda: adaptive(lab, "job", "status", str(job), "--log-dir", logs).stdout,
        every_s=2.0,
    )
    wait_until_no_process(lab)


def test_a_node_that_crashes_is_named_and_the_job_goes_on_elsewhere(lab: Lab, conf: Path) -> None:
    job = submit(lab, conf, *LONG, "--set", "SAVE_INTERVAL=5", "--set", "SLURM_FLAGS=-x n1")
    wait_until_it_trains(conf, job)
    latest = conf.parent / "saved/latest_checkpointed_iteration.txt"
    wait_for(latest.is_file, lambda: said(conf, job))
    held = lab.output("squeue", "-h", "-j", str(job), "-o", "%N")
    node = lab.output("scontrol", "show", "hostnames", held).split()[-1]
    lab.poweroff(node)
    try:
        wait_until_named(lab, conf, job, node)
        wait_for(lambda: "start 2" in said(conf, job), lambda: said(conf, job))
        wait_for(lambda: len(iterations(said(conf, job))) > 1, lambda: said(conf, job))
        first, second = iterations(said(conf, job))
        assert 1 < second[0] <= first[-1] + 1
        assert second[0] % 5 == 1
        lab.output("scancel", str(job))
        finish(lab, conf, job)
    finally:
        lab.put_back(node)
    wait_until_no_process(lab)


def test_a_node_that_is_cut_off_is_named_and_the_job_ends(lab: Lab, conf: Path) -> None:
    job = submit(lab, conf, *LONG, "--set", "SLURM_PARTITION=v100", "--set", "REQUEUE=false")
    wait_until_it_trains(conf, job)
    lab.unplug("n4")
    try:
        wait_until_named(lab, conf, job, "n4")
        finish(lab, conf, job)
        status = status_of(lab, conf, job)
        assert status["state"] in ("NODE_FAIL", "FAILED")
        assert status["is_over"]
        assert "n4" in status["lost"]
    finally:
        lab.plug("n4")
    wait_until_no_process(lab)


def test_an_array_of_agents_shrinks_and_grows_again(lab: Lab, tmp_path: Path) -> None:
    saved, outputs = tmp_path / "saved", tmp_path / "out"
    outputs.mkdir()
    variables = {
        **EXAMPLE,
        **forkserver().nodes()[1],
        "CHECKPOINT_DIR": saved,
        "SLOTS": 1,
        "TRAIN_ITERS": 100_000,
    }
    command = ["env", *(f"{name}={value}" for name, value in variables.items())]
    command += ["sbatch", "--parsable", "--array=0-1", "--partition=v100", "--gpus-per-node=1"]
    command += [f"--output={outputs}/%a.txt", str(ROOT / "examples" / "slurm" / "elastic.sbatch")]
    job = lab.output(*command).partition(";")[0]
    folder = JobFolder(saved)

    def wrote() -> str:
        queue = lab.output("squeue", "-o", "%i %T %r %V %S %N")
        texts = (f"--- {path.name}\n{path.read_text()}" for path in outputs.iterdir())
        return f"{queue}\n" + "".join(texts)

    def wait_for_nodes(count: int) -> dict[str, Any]:
        """Waits until training steps have completed on ``count`` nodes."""

        def trains() -> bool:
            state = folder.state()
            last = state["epochs"][-1] if state.get("epochs") else {"nodes": []}
            return (
                len(last["nodes"]) == count and state["iteration"] > last["resumed_iteration"] + 1
            )

        wait_for(trains, wrote)
        return dict(folder.state()["epochs"][-1])

    wait_for_nodes(2)
    # Slurm sends this signal before a time limit. The node leaves without losing steps, and returns
    # later.
    lab.output("scancel", "--batch", "--signal=USR1", f"{job}_1")
    assert wait_for_nodes(1)["lost_steps"] == 0
    wait_for_nodes(2)
    # The node on which the manager runs fails without notice. Slurm restarts the agent as soon as
    # the node is up again.
    lab.poweroff("n3")
    try:
        wait_for_nodes(1)
    finally:
        lab.put_back("n3")
    wait_for_nodes(2)
    status = adaptive(lab, "train", "elastic", "--status", str(saved), "--json")
    assert len(json.loads(status.stdout)["epochs"][-1]["nodes"]) == 2
    lab.output("scancel", job)
    wait_for(lambda: not lab.output("squeue", "-h", "-j", job), wrote)
    wait_until_no_process(lab)
    assert "Traceback" not in wrote(), wrote()


def test_jobs_that_the_monitor_cannot_show(lab: Lab, conf: Path) -> None:
    logs = ["--log-dir", str(conf.parent / "logs")]
    done = adaptive(lab, "job", "status", "4711", *logs)
    assert done.returncode == 2
    assert done.stderr.startswith("error: job 4711: Slurm does not know this job, and ")
    command = ["sbatch", "--parsable", "--chdir=/", "--output=/dev/null", "--wrap", "sleep 60"]
    job = lab.output(*NOBODY, *command).partition(";")[0]
    done = adaptive(lab, "job", "status", job, *logs)
    assert done.returncode == 2
    assert re.match(rf"error: job {job} \(\w+\) belongs to nobody, not \w+, and ", done.stderr)
    assert len(done.stderr.splitlines()) == 1
    lab.output("scancel", job)
    # The folder for the next job ID already exists, for example because an earlier cluster used
    # this ID.
    folder = conf.parent / "logs" / str(int(job) + 1)
    folder.mkdir(parents=True)
    assert submit(lab, conf) == int(job) + 1
    text = finish(lab, conf, int(job) + 1)
    assert f"error: LOG_DIR={folder.parent}: {folder} has another job's logs" in text
    assert list(folder.iterdir()) == []


def test_nodes_that_cannot_reach_each_other(lab: Lab, conf: Path) -> None:
    where = ["--set", "SLURM_PARTITION=v100"]
    name = submit(lab, conf, *where, "--set", "MASTER_ADDR=nowhere")
    assert "error: MASTER_ADDR=nowhere cannot be resolved on n" in finish(lab, conf, name)
    hosts = conf.parent / "hosts"
    hosts.write_text((lab.folder / "hosts").read_text().replace("10.66.0.13 n3", "127.0.1.1 n3"))
    assert lab.run(["mount", "--bind", str(hosts), "/etc/hosts"], on="n4").returncode == 0
    try:
        loop = submit(lab, conf, *where)
        text = finish(lab, conf, loop)
        assert "error: MASTER_ADDR=n3 is 127.0.1.1 on n4, which other nodes cannot reach" in text
    finally:
        lab.run(["umount", "/etc/hosts"], on="n4")
    # Drop all packets that are sent from the rendezvous port of the first node.
    rule = "rule {} ipproto tcp sport 25999 blackhole"
    assert lab.run(["ip", *rule.format("add").split()], on="n3").returncode == 0
    try:
        wall = submit(
            lab, conf, *where, "--set", "MASTER_PORT=25999", "--set", "MEETING_TIMEOUT_S=8"
        )
        finish(lab, conf, wall)
        (far,) = (node for node in status_of(lab, conf, wall)["nodes"] if node["name"] == "n4")
        expected = r"error: the processes of the job cannot connect at 10.66.0.13:25999 .* firewall"
        assert re.search(expected, "\n".join(far["errors"])), far
    finally:
        lab.run(["ip", *rule.format("del").split()], on="n3")
    wait_until_no_process(lab)


@pytest.mark.parametrize(
    "settings",
    [
        "SLURM_PARTITION=v10",
        "DEVICE=gpu SLURM_GRES=gpu:h100",
        "DEVICE=gpu NPROC_PER_NODE=4",
        "SLURM_TIME=soon",
    ],
)
def test_what_slurm_does_not_have_is_named(settings: str, lab: Lab, conf: Path) -> None:
    changes = [word for change in settings.split() for word in ("--set", change)]
    done = adaptive(lab, "job", "submit", str(conf), *changes)
    assert done.returncode == 2, done.stdout
    assert done.stderr.startswith("error: Slurm rejected the job (sbatch: "), done.stderr
    assert all(word.partition("=")[0] in done.stderr for word in changes[1::2] if word[0] != "D")
    assert len(done.stderr.splitlines()) == 1


def test_the_cluster_is_discovered(lab: Lab) -> None:
    done = adaptive(lab, "plan", "--discover")
    assert done.returncode == 0, done.stderr
    kinds = [
        (kind["gpu"], kind["gpus_per_node"], kind["hosts"])
        for kind in json.loads(done.stdout)["nodes"]
    ]
    assert kinds == [("a10", 2, ["n1", "n2"]), ("v100-16", 1, ["n3", "n4"])]
    assert "assumed: v100 is v100-16" in done.stderr
