"""Tests a job in the Slurm lab whose manager connects to another machine with ssh."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..cluster.jobs import ROOT, JobFolder, command
from ..multiprocess.launch import start, wait_until
from . import slurm_lab, sshd
from .slurm_lab import Kind, Lab

pytestmark = [pytest.mark.slow, pytest.mark.slurm_lab, pytest.mark.timeout(400)]

WATCHDOG_S = 150.0
MORE = ["--save-interval", "1000", "--train-iters", "100000"]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    if reason := slurm_lab.why_not() or sshd.why_not():
        pytest.skip(reason)
    with (
        tempfile.TemporaryDirectory(prefix="ssh-lab-") as folder,
        Lab(Path(folder, "lab"), [Kind("pc", 2, 1)]) as cluster,
    ):
        yield cluster


@pytest.fixture
def reached(lab: Lab, tmp_path: Path) -> Iterator[Path]:
    """Yields a folder with an ``ssh`` program that connects to the node n2."""
    client_settings = f"StrictHostKeyChecking yes\nUserKnownHostsFile {tmp_path}/known_hosts\n"
    programs, server = sshd.prepare(tmp_path, "", client_settings)
    (tmp_path / "known_hosts").write_text(f"n2 {(tmp_path / 'host_key.pub').read_text()}")
    # sshd requires this folder, and has no option for another path.
    Path("/run/sshd").mkdir(exist_ok=True)
    done = lab.run(server, on="n2")
    assert done.returncode == 0, done.stderr
    yield programs
    lab.run(["sh", "-c", f"kill $(cat {tmp_path}/sshd.pid)"], on="n2")


def wait_for(condition: Callable[[], object], why: Callable[[], str]) -> None:
    wait_until(condition, why, WATCHDOG_S, 0.2)


def test_a_machine_is_reached_by_ssh_leaves_and_comes_back(
    lab: Lab, reached: Path, tmp_path: Path
) -> None:
    machines, saved, log = tmp_path / "machines.txt", tmp_path / "saved", tmp_path / "log.txt"
    job = JobFolder(saved)
    machines.write_text("n1 slots=1\nn2 slots=1\nn9 slots=1\n")
    arguments = [
        *("env", f"PATH={reached}:{os.environ['PATH']}", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1"),
        "HF_TOKEN=it's a secret",
        *command(machines, saved, MORE, "--join-within", "60"),
    ]

    def nodes() -> list[str]:
        """Returns the names of the nodes that train, or an empty list before the first step."""
        state = job.state()
        last = (state.get("epochs") or [{"nodes": [], "resumed_iteration": 0}])[-1]
        is_training = state.get("iteration", 0) > last["resumed_iteration"] + 1
        assert manager.poll() is None, log.read_text()
        return sorted(last["nodes"]) if is_training else []

    manager = start([*lab.enter("n1", str(tmp_path)), *arguments], log, os.environ)
    try:
        wait_for(lambda: nodes() == ["n1", "n2"], log.read_text)
        assert "machine n9 is left out: ssh: Could not resolve hostname n9" in log.read_text()
        here = [process for process in lab.processes("n2") if "python" in process.name()]
        # Skip the hang detector, because it does not inherit the environment variables.
        far = [
            process.environ() for process in here if "hang_watch.py" not in str(process.cmdline())
        ]
        assert far
        assert {process.get("OMP_NUM_THREADS") for process in far} == {"1"}
        assert {process.get("HF_TOKEN") for process in far} == {"it's a secret"}
        machines.write_text("n1 slots=1\n")
        wait_for(lambda: nodes() == ["n1"], log.read_text)
        machines.write_text("n1 slots=1\nn2 slots=1\n")
        wait_for(lambda: nodes() == ["n1", "n2"], log.read_text)
        pid = job.state()["manager"]["pid"]
        assert lab.run(["kill", "-TERM", str(pid)], on="n1").returncode == 0
        assert manager.wait(WATCHDOG_S) == 128 + signal.SIGTERM, log.read_text()
    finally:
        manager.kill()
    text = log.read_text()
    assert "Traceback" not in text, text
    status = [
        *arguments[:4],
        sys.executable,
        "-m",
        "megatron.adaptive",
        "train",
        "elastic",
        "--status",
        str(saved),
    ]
    assert "lost 0" in lab.run(status).stdout
    for name, _ in lab.nodes:
        left = [str(process) for process in lab.processes(name) if process.name() != "sshd"]
        assert not left, left
