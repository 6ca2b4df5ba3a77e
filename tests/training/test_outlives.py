"""Tests that training continues after a rank was paused, and while the disk for traces is full.

All jobs train the same model on the same data, so they must have equal losses.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megatron.adaptive.checkpoint.folder import CheckpointFolder
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.status_files import ProgressTail, progress_file
from tests.support.nodes import fill

from ..multiprocess.launch import ROOT, SMALL_GPT, forking, forkserver, kill_tree, limited_disk

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(180)]

TRAINER = ROOT / "pretrain_gpt.py"
WATCHDOG_S = 80.0
LIMIT_S = 4.0
LOSSES: dict[int, str] = {}
"""Loss of each iteration, as printed by the first job that ran this iteration."""


class Job:
    """Job of two ranks that train until they are stopped.

    Args:
        folder: Working directory of the job.
        flags: Flags of the trainer.
        output: Path of the file to which the job's output is written.
    """

    def __init__(self, folder: Path, flags: str, output: Path) -> None:
        self._output, self._error = output, folder / "error.txt"
        command = [sys.executable, "-m", "megatron.adaptive", "job", "launch", "--standalone"]
        command += ["--nproc-per-node", "2", str(TRAINER), *SMALL_GPT.split()]
        command += "--num-layers 2 --pipeline-model-parallel-size 2 --mock-data".split()
        command += "--train-iters 100000 --lr-decay-style constant --log-interval 1".split()
        with output.open("w") as out, self._error.open("w") as err:
            self.process = subprocess.Popen(
                [*command, *flags.split()],
                env={**forking(), "CUDA_VISIBLE_DEVICES": ""},
                cwd=folder,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def said(self) -> str:
        return self._error.read_text(errors="replace")

    def losses(self) -> dict[int, str]:
        text = self._output.read_text(errors="replace")
        matches = re.findall(r"iteration +(\d+)/.*lm loss: (\S+) ", text)
        return {int(iteration): loss for iteration, loss in matches}

    def iteration(self) -> int:
        return max(self.losses(), default=0)

    def rank(self, number: int) -> psutil.Process:
        """Returns the process of rank ``number``, which is a child of a fork server."""
        forks = forkserver().nodes()[0]
        (asked,) = (
            process
            for process in forks.children(recursive=True)
            if str(TRAINER) in process.cmdline() and process.environ().get("RANK") == str(number)
        )
        return next(
            process for process in forks.children() if process.name() == f"python-{asked.pid}"
        )

    def until(self, condition: Callable[[], bool], event: str) -> None:
        end_s = time.monotonic() + WATCHDOG_S
        while not condition():
            assert self.process.poll() is None, (
                f"the process exited before {event}: {self.said()[-4000:]}"
            )
            assert time.monotonic() < end_s, (
                f"no {event} within the time limit: {self.said()[-4000:]}"
            )
            time.sleep(0.1)

    def goes_on(self, steps: int = 5) -> None:
        goal = self.iteration() + steps
        self.until(lambda: self.iteration() >= goal, f"iteration {goal}")

    def check_losses(self) -> None:
        losses = self.losses()
        assert len(losses) > 5
        assert {i: LOSSES.setdefault(i, loss) for i, loss in losses.items()} == losses


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def run(flags: str, output: Path | None = None) -> Job:
        jobs.append(Job(tmp_path, flags, output or tmp_path / "output.txt"))
        return jobs[-1]

    yield run
    for job in jobs:
        kill_tree(job.process)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["shm", "tcp", "gloo"])
def test_a_stopped_rank_goes_on_within_the_limit_and_ends_the_job_beyond_it(
    start: Callable[..., Job], kind: str
) -> None:
    job = start(f"--transport {kind} --transport-silence-s {LIMIT_S}")
    job.goes_on()
    stopped = job.rank(1)
    stopped.send_signal(signal.SIGSTOP)
    time.sleep(LIMIT_S / 2)
    stopped.send_signal(signal.SIGCONT)
    job.goes_on()
    job.check_losses()
    stopped.send_signal(signal.SIGSTOP)
    begin_s = time.monotonic()
    status = job.process.wait(WATCHDOG_S)
    # If the paused rank did not exit because of the error, the launcher would wait for it for 30 s.
    assert LIMIT_S - 1 < time.monotonic() - begin_s < LIMIT_S + 20
    assert status in (1, 2)
    stopped.wait(10.0)
    (line,) = [line for line in job.said().splitlines() if "rank 1 (stage 1" in line]
    assert line.startswith("error: ")
    assert re.search(r"for \d+(\.\d)? s \(limit 4 s, --transport-silence-s\)", line), line
    # Usually, a channel raises the error. If rank 0 waits in a collective, its watcher raises it.
    seen = (
        r"was [BF] chunk 0 microbatch \d of step \d+; seen by rank 0|; this is rank 0 \(stage 0\)"
    )
    assert re.search(seen, line), line


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with limited_disk(tmp_path / "small", "16m") as made:
        yield made


@pytest.mark.long
def test_a_disk_that_is_full_of_traces_and_logs_costs_those_alone(
    start: Callable[..., Job], small_disk: Path, tmp_path: Path
) -> None:
    output = small_disk / "output.txt"
    traces, curves = small_disk / "traces", small_disk / "curves"
    job = start(
        f"--trace-dir {traces} --tensorboard-dir {curves} --save {tmp_path / 'save'} "
        "--save-interval 10 --keep-checkpoints 2 --trace-interval 4",
        output,
    )
    saved = CheckpointFolder(tmp_path / "save")

    def saves_on() -> None:
        before = saved.latest() or 0
        job.until(lambda: (saved.latest() or 0) >= before + 30, "checkpoints")

    saves_on()
    fill(small_disk / "filler")
    failures = [f"cannot write {traces}/trace_rank_0000{rank}.jsonl: No space" for rank in (0, 1)]
    failures += [f"cannot write {traces}/progress.jsonl: No space", f"cannot write {curves}/events"]
    failures += ["cannot write stdout: No space"]
    job.until(lambda: all(failure in job.said() for failure in failures), "words of the full disk")
    saves_on()
    (small_disk / "filler").unlink()
    job.until(lambda: job.said().count("can be written again; ") == 4, "words of room")
    job.goes_on(20)
    job.process.send_signal(signal.SIGTERM)
    job.process.wait(WATCHDOG_S)
    said = job.said()
    assert [said.count(failure) for failure in failures] == [1] * len(failures), said
    assert "error" not in said, said
    assert "Traceback" not in said, said
    assert re.search(r"\[\d+ bytes of stdout were lost here\]", output.read_text())
    run = read_run(traces)
    gaps = [note for note in run.notes() if "its trace file could not be written" in note]
    assert len(gaps) == 2, run.notes()
    assert all(len(trace.iterations) > 10 for trace in run.ranks.values())
    tail = ProgressTail(progress_file(traces), None)
    tail.refresh()
    assert tail.ended.startswith("signal SIGTERM")
    saved.open(saved.latest() or 0)
    job.check_losses()
