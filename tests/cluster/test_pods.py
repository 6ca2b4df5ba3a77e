"""Tests that a master and workers in pods with separate networks connect and train."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.nodes import Node, Nodes, why_not

from ..multiprocess.launch import ROOT, forking, wait_until

WATCHDOG_S = 120.0
SECRET = "of both pods, from their entry point"
CONF = """
MODEL=tiny
DEVICE=cpu
TRAIN_ITERS=3
GLOBAL_BATCH_SIZE=6
PIPELINE_MP_SIZE=3
PARTITION=1-2-1
TRAINER_FLAGS='--vocab-size 255'
"""

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[list[Node]]:
    if reason := why_not():
        pytest.skip(reason)
    all_pods = Nodes(tmp_path, (1, 1, 1), 1 << 20)
    yield all_pods.all
    all_pods.close()


def start(pod: Node, script: str, *arguments: str | Path, secret: str | None = SECRET) -> None:
    """Runs ``script`` with ``arguments`` in a pod.

    If ``secret`` is ``None``, the pod reads the run's secret from a file.
    """
    variables = {**forking(), "PYTHON": sys.executable}
    if secret is not None:
        variables["MEGATRON_ADAPTIVE_SECRET"] = secret
    pod.boot(["bash", str(ROOT / script), *map(str, arguments)], variables)


def until(condition: Callable[[], object], *pods: Node) -> None:
    wait_until(condition, lambda: [pod.said for pod in pods], WATCHDOG_S)


def finish(pod: Node) -> tuple[int, str]:
    until(lambda: pod.status is not None, pod)
    assert pod.status is not None
    return pod.status, pod.said


@pytest.mark.long
def test_nodes_with_different_counts_train_whoever_comes_first(
    pods: list[Node], tmp_path: Path
) -> None:
    conf = tmp_path / "a run" / "conf.sh"
    conf.parent.mkdir()
    conf.write_text(CONF + "NNODES=2\n")
    master, worker, _ = pods
    start(worker, "run_worker.sh", "--master-addr", master.address, "--nproc-per-node", "2")
    until(lambda: f"waiting for the master ({master.address}:29500" in worker.said, worker)
    start(master, "run_master.sh", conf)
    status, said = finish(master)
    assert status == 0, said
    other_status, other = finish(worker)
    assert other_status == 0, other
    assert "node 0 of 2 starts 1 of 3 processes; interface net0" in said
    assert "node 1 of 2 starts 2 of 3 processes; interface net0" in other
    # The last rank reports the loss.
    assert len(re.findall(r"iteration +\d+/ +3 ", other)) == 3
    (job,) = (conf.parent / "logs").iterdir()
    assert sorted(path.suffix for path in job.iterdir()) == sorted(
        [".json", ".jsonl", *(".out", ".err", ".gpu") * 2]
    )
    summary = json.loads((job / "run.json").read_text())
    assert summary["processes"] == [1, 2]
    assert summary["conf"]["PARTITION"] == "1-2-1"


@pytest.mark.long
def test_three_pods_find_each_other_by_the_shared_folder_and_stop_together(
    pods: list[Node], tmp_path: Path
) -> None:
    conf, logs = tmp_path / "conf.sh", tmp_path / "logs"
    conf.write_text(CONF.replace("ITERS=3", "ITERS=100000") + "NNODES=3\nNPROC_PER_NODE=1\n")
    master, *workers = pods
    for worker in workers:
        start(worker, "run_worker.sh", "--log-dir", logs, secret=None)
    start(master, "run_master.sh", conf, secret=None)
    until(lambda: any("iteration" in path.read_text() for path in logs.glob("*/*.out")), *pods)
    assert not (logs / "master.json").exists()
    (node,) = [
        process
        for process in master.processes()
        if process.cmdline()[2:6] == ["megatron.adaptive", "job", "node", "master"]
    ]
    node.send_signal(signal.SIGTERM)
    outcomes = [finish(pod) for pod in pods]
    for status, said in outcomes:
        assert status in (0, 128 + signal.SIGTERM), said
    assert any("training ends: signal SIGTERM" in said for _, said in outcomes)


@pytest.mark.parametrize(
    ("address", "why"),
    [("10.57.0.99", "10.57.0.99:29500: "), ("nowhere", "MASTER_ADDR=nowhere cannot be")],
)
def test_a_worker_gives_up_with_a_message(pods: list[Node], address: str, why: str) -> None:
    start(pods[1], "run_worker.sh", "--master-addr", address, "--timeout", "2")
    status, said = finish(pods[1])
    assert status == 2
    last = said.splitlines()[-1]
    assert last.startswith(f"error: the master was not reached within 2 s ({why}"), said
    assert "run_master.sh" in last


def test_two_runs_that_wait_in_one_folder(pods: list[Node], tmp_path: Path) -> None:
    conf = tmp_path / "conf.sh"
    conf.write_text(CONF + "NNODES=2\n")
    start(pods[0], "run_master.sh", conf, "--timeout", "60")
    until((tmp_path / "logs" / "master.json").exists, pods[0])
    start(pods[1], "run_master.sh", conf)
    status, said = finish(pods[1])
    assert status == 2
    reason = f"is waiting for its workers at {pods[0].address}:29500"
    assert reason in said.splitlines()[-1]
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["master.json"]


def test_a_master_names_who_is_missing_and_a_bad_setting(pods: list[Node], tmp_path: Path) -> None:
    conf = tmp_path / "conf.sh"
    conf.write_text(CONF + "NNODES=2\n")
    master, worker, _ = pods
    start(master, "run_master.sh", conf, "--timeout", "1")
    status, said = finish(master)
    assert status == 2
    assert said.splitlines()[-1].startswith("error: only 1 of 2 nodes joined within 1 s")
    # Two processes cannot run three stages, so both pods must report the error.
    start(worker, "run_worker.sh", "--master-addr", master.address)
    start(master, "run_master.sh", conf)
    for pod in (master, worker):
        status, said = finish(pod)
        assert status == 2
        assert said.splitlines()[-1].startswith("error: WORLD_SIZE=2 must be a multiple of")
