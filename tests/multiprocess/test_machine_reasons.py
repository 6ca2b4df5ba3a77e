"""Tests that the diagnosis reports why a rank gets too little processor time."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.adaptive.trace.diagnose import diagnose
from megatron.adaptive.trace.diagnose.finding import Reason
from megatron.adaptive.trace.machine_counters import PROCESSOR_WAIT, THROTTLED
from megatron.adaptive.trace.read import read_run

from .launch import torchrun

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(200)]

SCRIPT = Path(__file__).parents[1] / "support" / "hindered_rank.py"
FLAGS = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 "
    "--max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 "
    "--eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 63 --mock-data "
    "--pipeline-model-parallel-size 2 --distributed-timeout-minutes 1 --train-iters 10 "
)
PERIOD_US = 100_000
GROUPS = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


def reasons(folder: Path) -> list[Reason]:
    """Trains on two ranks in ``folder``, and returns the reasons that are diagnosed for rank 1."""
    traces = folder / "traces"
    arguments = [*FLAGS.split(), "--trace-dir", str(traces)]
    torchrun(SCRIPT, arguments, world_size=2, log=folder / "log.txt", limit_s=120.0)
    findings = diagnose(read_run(traces)).findings
    return [finding.reason for finding in findings if finding.reason and 1 in finding.ranks]


@pytest.mark.long
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_a_rank_beside_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = max(os.sched_getaffinity(0))
    monkeypatch.setenv("HINDERED", "1")
    monkeypatch.setenv("PINNED", str(processor))
    busy = f"import os; os.sched_setaffinity(0, {{{processor}}})\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", busy]) as other:
        try:
            hindrances = reasons(tmp_path)
        finally:
            other.kill()
    assert [reason.counter for reason in hindrances] == [PROCESSOR_WAIT]
    assert "may use fewer processors than other ranks" in hindrances[0].text


@pytest.fixture
def group() -> Iterator[Path]:
    """Yields a control group whose processes can use a sixth of a processor."""
    name = f"megatron-adaptive-test-{os.getpid()}"
    for root in GROUPS:
        folder = root / name
        with contextlib.suppress(OSError):
            folder.mkdir()
        try:
            if (folder / "cpu.cfs_quota_us").exists():
                (folder / "cpu.cfs_quota_us").write_text(str(PERIOD_US // 6))
            elif (folder / "cpu.max").exists():
                (folder / "cpu.max").write_text(f"{PERIOD_US // 6} {PERIOD_US}")
            else:
                continue
            yield folder
            return
        except OSError:
            continue
        finally:
            with contextlib.suppress(OSError):
                folder.rmdir()
    pytest.skip("needs permission to set a quota of a control group")


@pytest.mark.long
def test_a_rank_with_a_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: Path) -> None:
    monkeypatch.setenv("HINDERED", "1")
    monkeypatch.setenv("GROUP", str(group))
    hindrances = reasons(tmp_path)
    assert [reason.counter for reason in hindrances] == [THROTTLED]
    assert "cpu.max" in hindrances[0].remedy
