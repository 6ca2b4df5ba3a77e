"""Checks that the processes of a Pipeline exit when their launcher exits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocess.launch import wait_until
from tests.soak.interrupts import Chain

LIMIT_S = 120.0


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.slow
def test_ranks_end_after_their_launcher_was_killed(tmp_path: Path) -> None:
    chain = Chain(kind="pipeline", folder=tmp_path, is_fresh=True)
    job = chain.begin(0)
    try:
        wait_until(lambda: len(chain.losses(0)) >= 2, job.log.read_text, LIMIT_S)
        assert len(job.processes()) > 2
        job.root.kill()
        job.root.wait(LIMIT_S)
        assert job.left() == []
        assert f"its launcher (pid {job.root.pid}) has exited" in job.log.read_text()
    finally:
        job.close()
