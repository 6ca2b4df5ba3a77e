"""Pods as network namespaces: a master and workers that find each other and train."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ..multiprocess.launch import kill_tree

ROOT = Path(__file__).resolve().parents[2]
WATCHDOG_S = 120.0
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


def why_no_namespaces() -> str | None:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and the program ip (iproute2)"
    name = f"probe{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"no network namespaces here: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


# Names of the pods alone: without a way to it, this machine's name server would be waited for.
ENTER = """
mount --bind "$1/hosts" /etc/hosts
mount --bind "$1/resolv.conf" /etc/resolv.conf
hostname "$2"
shift 2
exec bash "$@"
"""


class Pods:
    """Namespaces on one bridge, and the programs in them."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.names = [f"pod{os.getpid()}x{index}" for index in range(count)]
        self.started: list[subprocess.Popen[str]] = []
        hub = self.names[0]
        hosts = [f"10.55.0.{index + 1} pod{index}\n" for index in range(count)]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(hosts))
        (folder / "resolv.conf").write_text("options timeout:1 attempts:1\n")
        for index, name in enumerate(self.names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            if index == 0:
                ip("-n", hub, "link", "add", "net0", "type", "bridge", "forward_delay", "0")
                ip("-n", hub, "address", "add", "10.55.0.1/24", "dev", "net0")
                ip("-n", hub, "link", "set", "net0", "up")
                continue
            link = f"port{index}"
            ip("link", "add", link, "netns", hub, *f"type veth peer name net0 netns {name}".split())
            ip("-n", hub, "link", "set", link, "master", "net0", "up")
            ip("-n", name, "address", "add", f"10.55.0.{index + 1}/24", "dev", "net0")
            ip("-n", name, "link", "set", "net0", "up")

    def start(self, pod: int, script: str, *words: str) -> subprocess.Popen[str]:
        """Start a script of the project in a pod, from a folder of its own."""
        cwd = self.folder / f"pod {pod}"
        cwd.mkdir(exist_ok=True)
        process = subprocess.Popen(
            [
                *("ip", "netns", "exec", self.names[pod], "unshare", "--uts"),
                *("--pid", "--fork", "--kill-child", "--mount-proc"),
                *("bash", "-euc", ENTER, "enter", str(self.folder), f"pod{pod}"),
                *(str(ROOT / script), *words),
            ],
            env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def close(self) -> None:
        for process in self.started:
            kill_tree(process)
        for name in self.names:
            ip("netns", "del", name)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def make_pods(tmp_path: Path) -> Iterator[Callable[[int], Pods]]:
    if reason := why_no_namespaces():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:

        def make(count: int) -> Pods:
            pods = Pods(tmp_path, count)
            stack.callback(pods.close)
            return pods

        yield make


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    text, _ = process.communicate(timeout=WATCHDOG_S)
    return process.returncode, text


def test_nodes_with_different_counts_train_whoever_comes_first(
    make_pods: Callable[[int], Pods], tmp_path: Path
) -> None:
    pods = make_pods(2)
    conf = tmp_path / "a run" / "conf.sh"
    conf.parent.mkdir()
    conf.write_text(CONF + "NNODES=2\n")
    worker = pods.start(1, "run_worker.sh", "--master-addr", "10.55.0.1", "--nproc-per-node", "2")
    assert worker.stdout is not None
    assert "waiting for the master (10.55.0.1:29500" in worker.stdout.readline()
    master = pods.start(0, "run_master.sh", str(conf))
    status, said = finish(master)
    assert status == 0, said
    other_status, other = finish(worker)
    assert other_status == 0, other
    assert "node 0 of 2 starts 1 of 3 processes; interface net0" in said
    assert "node 1 of 2 starts 2 of 3 processes; interface net0" in other
    # The last rank holds the loss.
    assert len(re.findall(r"iteration +\d+/ +3 ", other)) == 3
    (job,) = (conf.parent / "logs").iterdir()
    assert sorted(path.suffix for path in job.iterdir()) == sorted(
        [".json", ".jsonl", *(".out", ".err", ".gpu") * 2]
    )
    told = json.loads((job / "run.json").read_text())
    assert told["processes"] == [1, 2]
    assert told["conf"]["PARTITION"] == "1-2-1"


def test_three_pods_find_each_other_by_the_shared_folder_and_stop_together(
    make_pods: Callable[[int], Pods], tmp_path: Path
) -> None:
    pods = make_pods(3)
    conf = tmp_path / "conf.sh"
    conf.write_text(CONF.replace("ITERS=3", "ITERS=100000") + "NNODES=3\nNPROC_PER_NODE=1\n")
    logs = tmp_path / "logs"
    workers = [pods.start(pod, "run_worker.sh", "--log-dir", str(logs)) for pod in (1, 2)]
    master = pods.start(0, "run_master.sh", str(conf))
    end_s = time.monotonic() + WATCHDOG_S
    while not any("iteration" in path.read_text() for path in logs.glob("*/*.out")):
        assert time.monotonic() < end_s
        assert master.poll() is None, finish(master)
        time.sleep(0.2)
    assert not (logs / "master.json").exists()
    inside = psutil.Process(master.pid).children(recursive=True)
    (node,) = [
        one for one in inside if one.cmdline()[2:5] == ["megatron.adaptive", "node", "master"]
    ]
    node.send_signal(signal.SIGTERM)
    outcomes = [finish(process) for process in (master, *workers)]
    for status, said in outcomes:
        assert status in (0, 128 + signal.SIGTERM), said
    assert any("training ends: signal SIGTERM" in said for _, said in outcomes)


def test_a_worker_gives_up_with_a_message(make_pods: Callable[[int], Pods]) -> None:
    pods = make_pods(2)
    worker = pods.start(1, "run_worker.sh", "--master-addr", "10.55.0.9", "--timeout", "2")
    status, said = finish(worker)
    assert status == 2
    last = said.splitlines()[-1]
    assert last.startswith("error: the master was not reached within 2 s (10.55.0.9:29500: ")
    assert "run_master.sh" in last


def test_a_name_that_does_not_resolve(make_pods: Callable[[int], Pods]) -> None:
    pods = make_pods(2)
    worker = pods.start(1, "run_worker.sh", "--master-addr", "nowhere", "--timeout", "1")
    status, said = finish(worker)
    assert status == 2
    expected = (
        "error: the master was not reached within 1 s (MASTER_ADDR=nowhere: the name does not"
    )
    assert said.splitlines()[-1].startswith(expected), said


def test_two_runs_that_wait_in_one_folder(make_pods: Callable[[int], Pods], tmp_path: Path) -> None:
    pods = make_pods(2)
    conf = tmp_path / "conf.sh"
    conf.write_text(CONF + "NNODES=2\n")
    pods.start(0, "run_master.sh", str(conf), "--timeout", "60")
    end_s = time.monotonic() + WATCHDOG_S
    while not (tmp_path / "logs" / "master.json").exists():
        assert time.monotonic() < end_s
        time.sleep(0.1)
    status, said = finish(pods.start(1, "run_master.sh", str(conf)))
    assert status == 2
    assert "another run waits there for its workers at 10.55.0.1:29500" in said.splitlines()[-1]
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["master.json"]


def test_a_master_names_who_is_missing_and_a_bad_setting(
    make_pods: Callable[[int], Pods], tmp_path: Path
) -> None:
    pods = make_pods(2)
    conf = tmp_path / "conf.sh"
    conf.write_text(CONF + "NNODES=2\n")
    status, said = finish(pods.start(0, "run_master.sh", str(conf), "--timeout", "1"))
    assert status == 2
    assert said.splitlines()[-1].startswith("error: 1 of 2 nodes were there after 1 s")
    # Two processes in all, three stages: both hear of it.
    worker = pods.start(1, "run_worker.sh", "--master-addr", "10.55.0.1")
    master = pods.start(0, "run_master.sh", str(conf))
    for process in (master, worker):
        status, said = finish(process)
        assert status == 2
        assert said.splitlines()[-1].startswith("error: WORLD_SIZE=2: it must be a multiple of")
