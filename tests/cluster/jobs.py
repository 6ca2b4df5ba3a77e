"""Starts a tiny job with several nodes on this machine, and reads its files and processes."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from harness.families import descendants_of
from tests.multiprocess.launch import ROOT, environment, forkserver, run_forked, start, wait_until

TRAINER = ROOT / "pretrain_gpt.py"
FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 "
    "--lr-decay-style constant --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 63 "
    "--mock-data --pipeline-model-parallel-size 2 --log-interval 1 --attention-dropout 0.1 "
    "--hidden-dropout 0.1 --distributed-timeout-minutes 1"
).split()


__all__ = ["FLAGS", "ROOT", "TRAINER", "ElasticJob", "JobFolder", "command", "environment"]


def command(
    machines: Path,
    checkpoints: Path,
    extra: Sequence[str],
    *options: str,
    script: Path = TRAINER,
    flags: Sequence[str] = FLAGS,
) -> list[str]:
    """Returns the command line that starts a job's manager.

    ``script`` is the script that the ranks run, with the arguments ``flags`` and ``extra``.
    ``options`` are options of the manager.
    """
    manager = [
        sys.executable,
        "-m",
        "megatron.adaptive",
        "train",
        "elastic",
        "--machines",
        str(machines),
    ]
    manager += ["--checkpoint", str(checkpoints), *options, str(script)]
    return [*manager, *flags, *extra]


class JobFolder:
    """Reads the files of a job that runs in other processes.

    Args:
        checkpoints: Checkpoint folder of the job.
    """

    def __init__(self, checkpoints: Path) -> None:
        self.checkpoints = checkpoints

    def state(self) -> dict[str, Any]:
        """Returns the content of the manager's state file, or ``{}`` if it is missing."""
        path = self.checkpoints / "elastic" / "state.json"
        return json.loads(path.read_text()) if path.exists() else {}  # type: ignore[no-any-return]

    def lines(self) -> list[dict[str, Any]]:
        """Returns the progress lines of all incarnations (starts of the job), in order."""
        files = self.checkpoints.glob("elastic/epoch-*/progress.jsonl")
        lines = []
        for path in sorted(files, key=lambda path: int(path.parent.name.split("-")[1])):
            incarnation = int(path.parent.name.split("-")[1])
            for line in path.read_text().splitlines():
                lines.append({"epoch": incarnation, **json.loads(line)})
        return lines

    def steps(self, incarnation: int) -> list[int]:
        """Returns the iterations that completed after start number ``incarnation`` of the job."""
        return [
            line["iteration"]
            for line in self.lines()
            if line["epoch"] == incarnation and "iteration" in line
        ]

    def until(self, condition: Callable[[], object], goal: str, limit_s: float = 150.0) -> None:
        """Waits until ``condition()`` is true, and fails after ``limit_s`` seconds.

        ``goal`` describes the condition in the error message.
        """
        end_s = time.monotonic() + limit_s
        while not condition():
            self.watch(goal)
            assert time.monotonic() < end_s, f"no {goal} in {limit_s:g} s:\n{self.said()}"
            time.sleep(0.05)

    def watch(self, goal: str) -> None:
        """Observes the job while a test waits for ``goal``. The default does nothing."""

    def said(self) -> str:
        """Returns the text of all log files in the parent of the checkpoint folder."""
        return "\n".join(path.read_text() for path in self.checkpoints.parent.glob("*.txt"))


class ElasticJob(JobFolder):
    """Runs an elastic job, which consists of a manager and an agent for each node.

    Args:
        folder: Folder for all files of the job.
        names: Names of the nodes.
        extra: Additional arguments of the trainer.
        options: Options of the manager.
        script: Script that the ranks run.
        flags: First arguments of the script.
        variables: Additional environment variables of all processes.
        slots: Number of processes on each node.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        extra: Sequence[str],
        options: Sequence[str] = (),
        *,
        script: Path = TRAINER,
        flags: Sequence[str] = FLAGS,
        variables: Mapping[str, str] | None = None,
        slots: int = 1,
    ) -> None:
        super().__init__(folder / "checkpoints")
        self._slots = slots
        self.machines = folder / "machines.txt"
        self.log = folder / "log.txt"
        self.extra = extra
        self._write(names)
        # The test session's fork server forks a fork server for each node, which forks the ranks.
        self._parent, forked = forkserver().nodes()
        manager = command(
            self.machines, self.checkpoints, extra, *options, script=script, flags=flags
        )
        self.manager = start(manager, self.log, {**environment(), **forked, **(variables or {})})
        self._family: dict[int, psutil.Process] = {}

    def _write(self, names: Sequence[str]) -> None:
        draft = self.machines.with_suffix(".new")
        lines = (f"localhost name={name} slots={self._slots}\n" for name in names)
        draft.write_text("".join(lines))
        draft.replace(self.machines)

    def change(self, names: Sequence[str]) -> None:
        """Writes the nodes ``names`` to the machines file, and makes the manager read the file."""
        self._write(names)
        self.manager.send_signal(signal.SIGHUP)

    def agent(self, name: str) -> int:
        """Returns the process ID of the agent on the node ``name``."""
        (entry,) = [node for node in self.state()["machines"] if node["name"] == name]
        return int(entry["pid"])

    def rank_on(self, name: str) -> psutil.Process:
        """Returns the process of the only rank on the node ``name``."""
        (rank,) = self._ranks_of(self.agent(name))
        return rank

    def _ranks_of(self, agent: int) -> list[psutil.Process]:
        """Returns the processes of the node whose agent has the PID ``agent``, except the agent."""
        (asked,) = psutil.Process(agent).children()
        (forked,) = (
            child for child in self._parent.children() if child.name() == f"node-{asked.pid}"
        )
        return forked.children()

    def trained(self, incarnation: int, steps: int = 4) -> int:
        """Waits for ``steps`` steps after start number ``incarnation``. Returns the last step."""
        goal = f"{steps} steps of epoch {incarnation}"
        self.until(lambda: len(self.steps(incarnation)) >= steps, goal)
        return max(self.steps(incarnation))

    def epoch(self, number: int) -> dict[str, Any]:
        """Waits for start number ``number`` of the job, and returns its entry in the state file."""
        self.until(lambda: len(self.state().get("epochs", [])) >= number, f"epoch {number}")
        return dict(self.state()["epochs"][number - 1])

    def lose(self, *names: str) -> None:
        """Kills all processes on the nodes ``names`` at the same time, without notice."""
        family = []
        for name in names:
            agent = psutil.Process(self.agent(name))
            family += [agent, *agent.children(recursive=True), *self._ranks_of(agent.pid)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # A child exits with its parent.
                process.kill()
        wait_until(lambda: not any(map(_lives, family)), lambda: family, 10.0, 0.01)

    def stop(self, limit_s: float = 150.0) -> None:
        """Stops the job, which saves a checkpoint, and checks that all of its processes exit."""
        self.manager.send_signal(signal.SIGTERM)
        assert self.end(limit_s) == 128 + signal.SIGTERM, self.said()
        assert self.left_behind() == []

    def undisturbed(self, folder: Path, first: int, last: int, *more: str) -> dict[int, float]:
        """Resumes the job in a single process, and returns its losses keyed by iteration.

        Args:
            folder: Folder for the progress file of this process.
            first: Iteration of the checkpoint. The process must start from a checkpoint of the job,
                because initial weights depend on the layout.
            last: Last iteration.
            more: Additional flags of the trainer.
        """
        arguments = [str(TRAINER), *FLAGS, "--train-iters", "9999", *more]
        arguments += ["--pipeline-model-parallel-size", "1", "--progress-dir", str(folder)]
        arguments += ["--load", str(self.checkpoints), "--ckpt-step", str(first)]
        arguments += ["--exit-interval", str(last)]
        done = run_forked(arguments, folder=folder.parent, limit_s=300)
        assert done.returncode == 0, done.stderr
        lines = map(json.loads, (folder / "progress.jsonl").read_text().splitlines())
        return {line["iteration"]: line["loss"] for line in lines if "iteration" in line}

    def check_losses(self, folder: Path, first: int, *more: str) -> int:
        """Checks the losses of all steps after the step ``first``, and returns the last step.

        The losses must equal those of a single process that resumes from ``first``. ``folder`` is
        for the files of this process.
        """
        done = {line["iteration"] for line in self.lines() if "iteration" in line}
        expected = self.undisturbed(folder, first, max(done), *more)
        assert set(expected) == {step for step in done if step > first}
        for line in self.lines():
            if line.get("iteration", 0) > first:
                # After hundreds of steps, the loss is small, but its rounding error depends on the
                # larger summands. So an absolute error is also allowed.
                loss = expected[line["iteration"]]
                most = max(1e-5 * abs(loss), 1e-6)
                assert abs(line["loss"] - loss) <= most, (loss, line, self.said())
        return max(done)

    def end(self, limit_s: float = 150.0) -> int:
        """Waits until the job exits and returns its exit status."""
        self._remember()
        return self.manager.wait(limit_s)

    def watch(self, goal: str) -> None:
        self._remember()
        assert self.manager.poll() is None, f"the job ended before {goal}:\n{self.said()}"

    def said(self) -> str:
        """Returns the content of the job's log."""
        return self.log.read_text()

    def left_behind(self) -> list[str]:
        """Returns descriptions of the job's processes that still run after the job has exited."""
        psutil.wait_procs(list(self._family.values()), timeout=5)
        return [str(process) for process in self._family.values() if process.is_running()]

    def close(self) -> None:
        """Kills all processes of the job that still run."""
        self._remember()
        for process in [*self._family.values()]:
            if process.is_running():
                process.kill()
        if self.manager.poll() is None:
            self.manager.kill()
        self.manager.wait(10)

    def _remember(self) -> None:
        for parent in (self._parent.pid, self.manager.pid):
            for pid in descendants_of(parent):
                # PIDs are reused, so check that the known process with this PID still runs.
                if pid not in self._family or not self._family[pid].is_running():
                    with contextlib.suppress(psutil.NoSuchProcess):
                        self._family[pid] = psutil.Process(pid)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
