"""Tests that ranks save a checkpoint and exit if the program that started them is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ..multiprocess.launch import ROOT, forking, free_port, has_ended, kill_tree, wait_until

CONF = """
MODEL=tiny
DEVICE=cpu
NPROC_PER_NODE=2
TRAIN_ITERS=100000
GLOBAL_BATCH_SIZE=2
PIPELINE_MP_SIZE=2
TRAINER_FLAGS='--vocab-size 255 --save {checkpoints} --save-interval 100000'
"""
LIMIT_S = 120.0


@pytest.mark.long
@pytest.mark.multiprocess
def test_ranks_save_and_end_when_the_program_of_their_node_is_killed(tmp_path: Path) -> None:
    conf, checkpoints = tmp_path / "conf.sh", tmp_path / "checkpoints"
    conf.write_text(CONF.format(checkpoints=checkpoints))
    with (tmp_path / "printed").open("wb") as printed:
        node = subprocess.Popen(
            ["bash", str(ROOT / "run_master.sh"), str(conf), "--master-port", str(free_port())],
            env={**forking(), "PYTHON": sys.executable},
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def written() -> str:
        files = [tmp_path / "printed", *tmp_path.glob("logs/*/*.out")]
        return "\n".join(path.read_text() for path in files)

    family: list[psutil.Process] = []
    try:
        wait_until(lambda: "iteration        2/" in written(), written, LIMIT_S)
        family = psutil.Process(node.pid).children(recursive=True)
        os.kill(node.pid, signal.SIGKILL)
        node.wait()
        wait_until(lambda: all(map(has_ended, family)), written, LIMIT_S)
        assert (checkpoints / "latest_checkpointed_iteration.txt").exists()
    finally:
        kill_tree(node)
        for process in family:
            if not has_ended(process):
                process.kill()
