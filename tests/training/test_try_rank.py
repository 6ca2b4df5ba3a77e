"""Tests that trying a rank leaves no memory in use when layers are measured afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.multiprocess.launch import run_forked

pytestmark = pytest.mark.multiprocess

SCRIPT = Path(__file__).with_name("tried_rank.py")


def test_the_rank_is_freed_before_layers_are_measured(tmp_path: Path) -> None:
    """Checks that no parameters remain in reference cycles, which would occupy the GPU's memory."""
    ended = run_forked([str(SCRIPT)], folder=tmp_path, limit_s=100.0)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == {"parameters": 0}
