"""A manager that is stopped for a while, and nodes that are lost meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .jobs import ElasticJob

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(280)]
Start = Callable[[int], ElasticJob]
STOPPED_S = 30.0  # longer than the silence after which a node counts as lost


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a job of two nodes for some iterations."""
    started: list[ElasticJob] = []

    def begin(iterations: int) -> ElasticJob:
        words = ["--train-iters", str(iterations), "--save-interval", "5"]
        started.append(ElasticJob(tmp_path, "ab", words))
        return started[0]

    yield begin
    for job in started:
        job.manager.send_signal(signal.SIGCONT)
        job.close()


@pytest.mark.long
def test_training_goes_on_while_the_manager_is_stopped(start: Start) -> None:
    job = start(9999)
    job.trained(1)
    job.manager.send_signal(signal.SIGSTOP)
    time.sleep(STOPPED_S)
    trained = max(job.steps(1))
    job.manager.send_signal(signal.SIGCONT)
    job.until(lambda: max(job.steps(1)) > trained, "steps after the stop")
    job.stop()
    assert "lost" not in job.said()
    assert len(job.state()["epochs"]) == 1


def test_a_job_that_completes_while_its_manager_is_stopped_ends_well(start: Start) -> None:
    job = start(12)
    job.trained(1, 2)
    agents = [job.agent(name) for name in "ab"]
    job.manager.send_signal(signal.SIGSTOP)
    job.until(lambda: any("ended" in line for line in job.lines()), "the end of training")
    # As if they had waited for the manager for too long.
    for agent in agents:
        os.kill(agent, signal.SIGKILL)
    job.manager.send_signal(signal.SIGCONT)
    assert job.end() == 0, job.said()
    assert job.state()["checkpoint_iteration"] == 12
    assert job.left_behind() == []


def test_listed_machines_that_are_lost_are_started_again(start: Start) -> None:
    job = start(9999)
    job.trained(1, 6)
    job.lose("a", "b")
    job.trained(2)
    job.stop()
    assert len(job.state()["epochs"]) == 2
    assert job.state()["epochs"][1]["nodes"] == ["a", "b"]
