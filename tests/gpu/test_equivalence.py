"""Compares the losses of two ranks that share a GPU with those of a single process."""

from __future__ import annotations

import pytest

from .device import gpu_or_rehearsal
from .jobs import ALONE, GpuJob, GpuJobs, compared

pytestmark = [*gpu_or_rehearsal, pytest.mark.multiprocess, pytest.mark.timeout(200)]

JOBS = {
    "alone": GpuJob(flags=ALONE),
    "V, split, adaptive": GpuJob(
        flags="--model-chunks 2 --pipeline-placement v --split-backward True"
        " --pipeline-schedule adaptive",
        ranks=2,
        like="alone",
    ),
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> GpuJobs:
    return GpuJobs(JOBS, tmp_path_factory.mktemp, 40.0)


@pytest.mark.parametrize("name", compared(JOBS))
def test_ranks_that_share_a_gpu_train_as_one_process(jobs: GpuJobs, name: str) -> None:
    jobs.check(name)
