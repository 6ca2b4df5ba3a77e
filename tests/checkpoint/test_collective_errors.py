"""Tests that all ranks of a save or load raise the same error, even if a rank was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocess.launch import Ranks, tail, wait_until

LOSING = """
import os, signal
import torch.distributed as dist
from megatron.adaptive.checkpoint.collective_errors import RankGroup
from megatron.adaptive.errors import PeerLostError

dist.init_process_group("gloo")
ranks = RankGroup(dist.get_rank(), dist.group.WORLD)
assert ranks.gather(ranks.rank) == [0, 1]
if ranks.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
for collective in (
    lambda: ranks.together(lambda: 1),
    lambda: ranks.gather(1),
    lambda: ranks.on_first(lambda: 1),
):
    try:
        collective()
    except PeerLostError as error:
        print(f"error: {error}", flush=True)
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_peer_that_is_lost_during_a_save_is_named(tmp_path: Path) -> None:
    script, log = tmp_path / "script.py", tmp_path / "log.txt"
    script.write_text(LOSING)
    ranks = Ranks([str(script)], world_size=2, log=log, limit_s=100)
    try:
        wait_until(
            lambda: log.read_text().count("error: ") == 3 or len(ranks.wait(0.1)) == 2,
            lambda: tail(log),
            100,
        )
    finally:
        ranks.kill()
    errors = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 3, tail(log)
    assert all("rank 0 lost its connection with another rank (" in line for line in errors)
    assert all(line.endswith("; restart the job from the last checkpoint") for line in errors)
