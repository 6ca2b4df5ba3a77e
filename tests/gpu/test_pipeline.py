"""Compares a ``Pipeline`` in mixed precision with a loop that trains the whole model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.multiprocess.launch import torchrun

from .device import gpu_or_rehearsal
from .jobs import HALF

pytestmark = [*gpu_or_rehearsal, pytest.mark.multiprocess, pytest.mark.timeout(200)]

SCRIPT = Path(__file__).with_name("pipeline_rank.py")
LIMIT_S = 60.0


@pytest.mark.parametrize("ranks", [2, 1])
def test_a_pipeline_trains_as_a_loop_with_autocast(ranks: int, tmp_path: Path) -> None:
    """Checks stages of a model on the CPU that run on one GPU, in one or two processes."""
    result = tmp_path / "losses.json"
    log = tmp_path / "output.txt"
    torchrun(SCRIPT, [str(result)], world_size=ranks, log=log, limit_s=LIMIT_S)
    content = json.loads(result.read_text())
    assert content["losses"] == pytest.approx(content["expected"], rel=HALF)
    assert content["losses"][-1] < content["losses"][0]
