"""Tests that ``doctor --probe`` reports a slow rank, a slow link and an unwritable folder."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron.adaptive.cli import doctor
from megatron.adaptive.errors import ConfigError

from ..multiprocess.launch import Ranks, environment, kill_tree, tail

RANKS = int(os.environ.get("PROBE_RANKS", "6"))
LIMIT_S = 200
FAST = ("--seconds", "0.05")


@contextmanager
def often_stopped(process: psutil.Process) -> Iterator[None]:
    """Suspends ``process`` repeatedly, so that it runs for only a twentieth of the time."""
    ends = threading.Event()

    def run() -> None:
        while not ends.is_set():
            process.suspend()
            ends.wait(0.04)
            process.resume()
            ends.wait(0.002)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def probe(tmp_path: Path, *flags: str, slow_rank: int = -1, **variables: str) -> tuple[int, Any]:
    """Runs a probe with ``RANKS`` ranks. Returns the highest exit status and rank 0's report."""
    log = tmp_path / "log.txt"
    command = ["-m", "megatron.adaptive", "doctor", "--probe", "--json", *FAST, *flags]
    ranks = Ranks(command, world_size=RANKS, log=log, limit_s=LIMIT_S, variables=variables)
    try:
        if slow_rank < 0:
            ended = ranks.wait(LIMIT_S)
        else:
            with often_stopped(psutil.Process(ranks.server._pids[ranks.keys[slow_rank]])):
                ended = ranks.wait(LIMIT_S)
    finally:
        ranks.kill()
    text = log.read_text()
    assert ended, tail(log)
    assert "{" in text, text
    return max(ended), json.JSONDecoder().raw_decode(text[text.index("{") :])[0]


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_slow_link_and_a_slow_rank_are_named(tmp_path: Path) -> None:
    numbers = random.Random(f"{RANKS}")
    low = numbers.randrange(RANKS // 2 - 1)
    slow_rank = numbers.randrange(RANKS // 2 + 1, RANKS)
    status, report = probe(
        tmp_path,
        "--transport",
        "tests.support.slow_link:SlowLink",
        slow_rank=slow_rank,
        SLOW_LINK=f"{low}-{low + 1}",
        SLOW_LINK_S="0.02",
    )
    assert status == 1
    outliers = {(o["measure"], tuple(o["ranks"])): o for o in report["outliers"]}
    assert ("matrix product", (slow_rank,)) in outliers, report["outliers"]
    assert ("large message", (low, low + 1)) in outliers, report["outliers"]
    link = outliers["large message", (low, low + 1)]
    assert link["value"] > 20
    assert (
        f"ranks {low} and {low + 1} on node {report['hosts'][low]}: large message" in link["text"]
    )
    assert link["remedy"]
    named = {rank for _, ranks in outliers for rank in ranks}
    assert named <= {low, low + 1, slow_rank}, report["outliers"]
    assert len(report["figures"]) >= 4 * RANKS - 2


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sizes = ("--expert-model-parallel-size", "2")
    status, report = probe(tmp_path, *sizes, "--save", str(tmp_path / "file"))
    assert status == 1
    texts = [o["text"] for o in report["outliers"] if o["measure"].startswith("write")]
    path = tmp_path / "file"
    assert texts == [
        f"rank 0 on node {report['hosts'][0]}: write to the checkpoint folder failed: {path}: "
        "File exists"
    ]
    measures = {figure["measure"] for figure in report["figures"]}
    assert {"all-reduce", "all-to-all", "matrix product"} <= measures
    assert "large message" not in measures


@pytest.mark.multiprocess
def test_sizes_that_do_not_fit_are_an_error(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    command = ["-m", "megatron.adaptive", "doctor", "--probe", "--tensor-model-parallel-size", "4"]
    ranks = Ranks(command, world_size=2, log=log, limit_s=LIMIT_S)
    try:
        ended = ranks.wait(LIMIT_S)
    finally:
        ranks.kill()
    assert 2 in ended
    expected = "error: the number of ranks must be a multiple of tensor 4 x context 1"
    assert expected in log.read_text()


def test_wrong_sizes_are_reported_before_processes_start() -> None:
    with pytest.raises(ConfigError, match="multiple of tensor 2 .*, got 3 ranks"):
        doctor.main("--probe --processes 3 --tensor-model-parallel-size 2".split())
    with pytest.raises(ConfigError, match="compares ranks, so it requires at least two"):
        doctor.main("--probe --processes 1".split())


@pytest.mark.long
@pytest.mark.multiprocess
def test_outliers_are_the_last_that_is_printed(tmp_path: Path) -> None:
    """Checks that the lines about outliers are the last lines that the launcher prints."""
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-m", "megatron.adaptive", "doctor", "--probe", "--processes", "2"]
    job = subprocess.Popen(
        [*command, *FAST, "--save", str(tmp_path / "file")],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = job.communicate(timeout=LIMIT_S)
    finally:
        kill_tree(job)
    assert job.returncode == 1
    assert re.match(r"\d+ outliers?: \d+ measurements of 2 ranks", errors.splitlines()[-1]), errors
    assert "exited with status" not in errors
