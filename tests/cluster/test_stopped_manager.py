"""Tests that jobs continue if their manager is suspended (SIGSTOP) for a while."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from ..multiprocess.launch import TIMED_LAYERS
from .jobs import ElasticJob

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(280)]
Start = Callable[[int], ElasticJob]
STOPPED_S = 30.0  # This is longer than the timeout after which a node counts as lost.
JOBS = int(os.environ.get("STOPPED_MANAGERS", "3"))
"""Number of jobs that run concurrently in the long test."""
LATEST_S = 30.0
"""Maximum time from the start of a job until its manager is suspended, in seconds."""
SEED = int(os.environ.get("STOPPED_MANAGERS_SEED", "1"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Yields a function that starts a job with two nodes and a number of iterations."""
    started: list[ElasticJob] = []

    def begin(iterations: int) -> ElasticJob:
        flags = ["--train-iters", str(iterations), "--save-interval", "5"]
        started.append(ElasticJob(tmp_path, "ab", flags))
        return started[0]

    yield begin
    for job in started:
        job.manager.send_signal(signal.SIGCONT)
        job.close()


def _has_more(job: ElasticJob, steps: int) -> bool:
    return len(job.steps(1)) > steps


@pytest.mark.long
def test_training_goes_on_while_managers_are_stopped(tmp_path: Path) -> None:
    draw = random.Random(SEED)
    jobs, moments = [], list[tuple[float, int, int]]()
    begun_s = time.monotonic()
    try:
        for number in range(JOBS):
            folder = tmp_path / str(number)
            folder.mkdir()
            flags = ["--train-iters", "2000", "--save-interval", "5"]
            # The layers sleep most of the time, so that several jobs can run concurrently.
            variables = {"LAYER_MS": "100"}
            jobs.append(ElasticJob(folder, "ab", flags, script=TIMED_LAYERS, variables=variables))
            stop_s = time.monotonic() - begun_s + draw.uniform(0.0, LATEST_S)
            moments += [(stop_s, number, signal.SIGSTOP)]
            moments += [(stop_s + STOPPED_S, number, signal.SIGCONT)]
        for moment_s, number, number_of_signal in sorted(moments):
            time.sleep(max(0.0, begun_s + moment_s - time.monotonic()))
            jobs[number].manager.send_signal(number_of_signal)
        for job in jobs:
            count = len(job.steps(1))
            job.until(partial(_has_more, job, count), "steps after the stop")
            job.manager.send_signal(signal.SIGTERM)
            assert job.end() == 128 + signal.SIGTERM, job.said()
            assert "lost" not in job.said()
            assert len(job.state()["epochs"]) == 1
            print(f"job {jobs.index(job)} went on after step {count}")
    finally:
        for job in jobs:
            job.manager.send_signal(signal.SIGCONT)
            job.close()


@pytest.mark.long
def test_a_job_that_completes_while_its_manager_is_stopped_ends_well(start: Start) -> None:
    job = start(12)
    job.trained(1, 2)
    agents = [job.agent(name) for name in "ab"]
    job.manager.send_signal(signal.SIGSTOP)
    job.until(lambda: any("ended" in line for line in job.lines()), "the end of training")
    # Agents that wait too long for the manager exit, so kill the agents to simulate this.
    for agent in agents:
        os.kill(agent, signal.SIGKILL)
    job.manager.send_signal(signal.SIGCONT)
    assert job.end() == 0, job.said()
    assert job.state()["checkpoint_iteration"] == 12
    assert job.left_behind() == []


@pytest.mark.long
def test_listed_machines_that_are_lost_are_started_again(start: Start) -> None:
    job = start(9999)
    job.trained(1, 6)
    job.lose("a", "b")
    job.trained(2)
    job.stop()
    assert len(job.state()["epochs"]) == 2
    assert job.state()["epochs"][1]["nodes"] == ["a", "b"]
