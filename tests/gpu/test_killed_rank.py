"""Tests that the other rank exits if a rank of the trainer is killed, on a GPU if possible."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest

from tests.multiprocess.launch import ROOT, Ranks, has_ended, tail, wait_until

from .device import needs_extension
from .jobs import losses_in, trainer_flags

pytestmark = [needs_extension, pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(250)]

LIMIT_S = 100.0


def test_a_killed_rank_ends_the_other_which_names_it(tmp_path: Path) -> None:
    """Checks that the other rank exits, even if the killed rank had a process that reads data."""
    log = tmp_path / "output.txt"
    command = [
        str(ROOT / "pretrain_gpt.py"),
        *trainer_flags("--train-iters 100000 --num-workers 1"),
    ]
    ranks = Ranks(command, world_size=2, log=log, limit_s=LIMIT_S)
    try:
        wait_until(lambda: len(losses_in(log)) >= 3, lambda: tail(log), LIMIT_S)
        first, second = ranks.processes()
        readers = first.children(recursive=True)
        assert "pt_data_worker" in [reader.name() for reader in readers]
        first.send_signal(signal.SIGKILL)
        # The other rank waits for the killed rank, and must exit with status 2.
        ended = ranks.server.wait(ranks.keys[1:], LIMIT_S)
        assert ended == {ranks.keys[1]: 2}, tail(log)
        for process in (second, *readers):
            wait_until(partial(has_ended, process), partial(str, process), LIMIT_S)
    finally:
        ranks.kill()
    said = [line for line in log.read_text().splitlines() if "error: " in line]
    assert len(said) == 1, said
    assert "rank 0" in said[0]
