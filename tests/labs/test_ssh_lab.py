"""A job whose manager reaches another machine by ssh: a real sshd on a node of the Slurm lab."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ..multiprocess.launch import wait_until
from . import slurm_lab
from .slurm_lab import Kind, Lab

pytestmark = [pytest.mark.slow, pytest.mark.slurm_lab, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]
WATCHDOG_S = 150.0
SSHD = "/usr/sbin/sshd"
SERVER = """
HostKey {0}/host_key
AuthorizedKeysFile {0}/key.pub
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile {0}/sshd.pid
"""
CLIENT = """
Host *
  IdentityFile {0}/key
  UserKnownHostsFile {0}/known_hosts
  StrictHostKeyChecking yes
"""
FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 "
    "--eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 63 --mock-data "
    "--pipeline-model-parallel-size 2 --log-interval 1 --save-interval 1000 "
    "--train-iters 100000 --distributed-timeout-minutes 1"
).split()


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    if reason := slurm_lab.why_not():
        pytest.skip(reason)
    if not Path(SSHD).exists() or shutil.which("ssh") is None:
        pytest.skip("no sshd: bash prerequisite.sh --slurm")
    with (
        tempfile.TemporaryDirectory(prefix="ssh-lab-") as folder,
        Lab(Path(folder, "lab"), [Kind("pc", 2, 1)]) as cluster,
    ):
        yield cluster


@pytest.fixture
def reached(lab: Lab, tmp_path: Path) -> Iterator[Path]:
    """A folder of programs whose ssh reaches n2; an sshd runs there until the end."""
    for name in ("key", "host_key"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)]
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    (tmp_path / "known_hosts").write_text(f"n2 {(tmp_path / 'host_key.pub').read_text()}")
    (tmp_path / "sshd_config").write_text(SERVER.format(tmp_path))
    (tmp_path / "ssh_config").write_text(CLIENT.format(tmp_path))
    programs = tmp_path / "bin"
    programs.mkdir()
    real = shutil.which("ssh")
    (programs / "ssh").write_text(f'#!/bin/sh\nexec {real} -F {tmp_path}/ssh_config "$@"\n')
    (programs / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd has no option for it
    done = lab.run([SSHD, "-f", str(tmp_path / "sshd_config")], on="n2")
    assert done.returncode == 0, done.stderr
    yield programs
    lab.run(["sh", "-c", f"kill $(cat {tmp_path}/sshd.pid)"], on="n2")


def wait_for(what: Callable[[], object], why: Callable[[], str]) -> None:
    wait_until(what, why, WATCHDOG_S, 0.2)


def test_a_machine_is_reached_by_ssh_leaves_and_comes_back(
    lab: Lab, reached: Path, tmp_path: Path
) -> None:
    machines, saved, log = tmp_path / "machines.txt", tmp_path / "saved", tmp_path / "log.txt"
    machines.write_text("n1 slots=1\nn2 slots=1\nn9 slots=1\n")
    run = ["run", "--machines", str(machines), "--checkpoint", str(saved), "--join-within", "60"]
    words = [
        *("env", f"PATH={reached}:{os.environ['PATH']}", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1"),
        "HF_TOKEN=it's a secret",
        *(sys.executable, "-m", "megatron.adaptive", *run, str(ROOT / "pretrain_gpt.py"), *FLAGS),
    ]

    def nodes() -> list[str]:
        """Of the shape in which steps are done; none before the first."""
        path = saved / "elastic" / "state.json"
        told: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        last = (told.get("epochs") or [{"nodes": [], "resumed_iteration": 0}])[-1]
        is_training = told.get("iteration", 0) > last["resumed_iteration"] + 1
        assert manager.poll() is None, log.read_text()
        return sorted(last["nodes"]) if is_training else []

    with log.open("w") as output:
        manager = subprocess.Popen(
            [*lab.enter("n1", str(tmp_path)), *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_for(lambda: nodes() == ["n1", "n2"], log.read_text)
            assert "machine n9 is left out: ssh: Could not resolve hostname n9" in log.read_text()
            here = [one for one in lab.processes("n2") if "python" in one.name()]
            # What watches for hangs has nothing of the environment.
            far = [one.environ() for one in here if "hang.py" not in str(one.cmdline())]
            assert far
            assert {one.get("OMP_NUM_THREADS") for one in far} == {"1"}
            assert {one.get("HF_TOKEN") for one in far} == {"it's a secret"}
            machines.write_text("n1 slots=1\n")
            wait_for(lambda: nodes() == ["n1"], log.read_text)
            machines.write_text("n1 slots=1\nn2 slots=1\n")
            wait_for(lambda: nodes() == ["n1", "n2"], log.read_text)
            path = saved / "elastic" / "state.json"
            pid = json.loads(path.read_text())["manager"]["pid"]
            assert lab.run(["kill", "-TERM", str(pid)], on="n1").returncode == 0
            assert manager.wait(WATCHDOG_S) == 128 + signal.SIGTERM, log.read_text()
        finally:
            manager.kill()
    text = log.read_text()
    assert "Traceback" not in text, text
    assert (
        "lost 0"
        in lab.run(
            [*words[:5], sys.executable, "-m", "megatron.adaptive", "run", "--status", str(saved)]
        ).stdout
    )
    for name, _ in lab.nodes:
        own = [str(one) for one in lab.processes(name) if one.name() != "sshd"]
        assert not own, own
