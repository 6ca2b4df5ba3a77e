"""Starts a tiny job of several nodes on this machine and looks at it from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
TRAINER = ROOT / "pretrain_gpt.py"
FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 "
    "--lr-decay-style constant --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 63 "
    "--mock-data --pipeline-model-parallel-size 2 --log-interval 1 --attention-dropout 0.1 "
    "--hidden-dropout 0.1 --distributed-timeout-minutes 1"
).split()


def environment() -> dict[str, str]:
    """What every process here runs with."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def command(
    machines: Path,
    checkpoints: Path,
    extra: Sequence[str],
    *own: str,
    script: Path = TRAINER,
    flags: Sequence[str] = FLAGS,
) -> list[str]:
    """The command line of a manager."""
    words = [sys.executable, "-m", "megatron.adaptive", "run", "--machines", str(machines)]
    words += ["--checkpoint", str(checkpoints), *own, str(script)]
    return [*words, *flags, *extra]


class ElasticJob:
    """A running manager with its agents.

    Args:
        folder: for all that it writes.
        names: of the nodes, one process each.
        extra: arguments of the trainer.
        own: options of the manager.
        script: that the ranks run.
        flags: of it, before the others.
        variables: further environment of all processes.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        extra: Sequence[str],
        own: Sequence[str] = (),
        *,
        script: Path = TRAINER,
        flags: Sequence[str] = FLAGS,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.machines, self.checkpoints = folder / "machines.txt", folder / "checkpoints"
        self.log = folder / "log.txt"
        self.extra = extra
        self._write(names)
        with self.log.open("w") as output:
            self.manager = subprocess.Popen(
                command(self.machines, self.checkpoints, extra, *own, script=script, flags=flags),
                env={**environment(), **(variables or {})},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._family: dict[int, psutil.Process] = {}

    def _write(self, names: Sequence[str]) -> None:
        draft = self.machines.with_suffix(".new")
        draft.write_text("".join(f"localhost name={name} slots=1\n" for name in names))
        draft.replace(self.machines)

    def change(self, names: Sequence[str]) -> None:
        """Write other nodes into the machines file and tell the manager."""
        self._write(names)
        self.manager.send_signal(signal.SIGHUP)

    def state(self) -> dict[str, Any]:
        """What the manager tells."""
        path = self.checkpoints / "elastic" / "state.json"
        return json.loads(path.read_text()) if path.exists() else {}  # type: ignore[no-any-return]

    def agent(self, name: str) -> int:
        """Process of a node's agent."""
        (found,) = [node for node in self.state()["machines"] if node["name"] == name]
        return int(found["pid"])

    def rank_on(self, name: str) -> psutil.Process:
        """The rank of a node that has one."""
        (nursery,) = psutil.Process(self.agent(name)).children()
        (rank,) = nursery.children()
        return rank

    def lines(self) -> list[dict[str, Any]]:
        """What the ranks of all epochs wrote, in order."""
        files = self.checkpoints.glob("elastic/epoch-*/progress.jsonl")
        found = []
        for path in sorted(files, key=lambda path: int(path.parent.name.split("-")[1])):
            incarnation = int(path.parent.name.split("-")[1])
            for line in path.read_text().splitlines():
                found.append({"epoch": incarnation, **json.loads(line)})
        return found

    def steps(self, incarnation: int) -> list[int]:
        """Iterations that an epoch did."""
        return [
            line["iteration"]
            for line in self.lines()
            if line["epoch"] == incarnation and "iteration" in line
        ]

    def until(self, condition: Callable[[], object], what: str, limit_s: float = 150.0) -> None:
        """Wait for something to become true."""
        end_s = time.monotonic() + limit_s
        while not condition():
            self._remember()
            assert self.manager.poll() is None, f"the job ended before {what}:\n{self.said()}"
            assert time.monotonic() < end_s, f"no {what} in {limit_s:g} s:\n{self.said()}"
            time.sleep(0.05)

    def end(self, limit_s: float = 150.0) -> int:
        """Wait for the end of the job; returns its status."""
        self._remember()
        return self.manager.wait(limit_s)

    def said(self) -> str:
        """The log."""
        return self.log.read_text()

    def left_behind(self) -> list[str]:
        """Processes of the job that are still there after its end."""
        psutil.wait_procs(list(self._family.values()), timeout=5)
        return [str(one) for one in self._family.values() if one.is_running()]

    def close(self) -> None:
        """End whatever is left."""
        self._remember()
        for one in [*self._family.values()]:
            if one.is_running():
                one.kill()
        if self.manager.poll() is None:
            self.manager.kill()
        self.manager.wait(10)

    def _remember(self) -> None:
        try:
            for one in psutil.Process(self.manager.pid).children(recursive=True):
                self._family[one.pid] = one
        except psutil.NoSuchProcess:
            return
