"""Tests those parts of the GPU check that need torch but no GPU."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

from gpu_check.steps import SYNCHRONIZED, memory, synchronizing_lines

REMARK = (
    "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing "
    "operations (Triggered internally at /pytorch/torch/csrc/cuda/Module.cpp:1003.)"
)


def test_a_remark_about_the_debug_mode_is_no_synchronization() -> None:
    """Checks that torch's note about its debug mode does not count as a synchronization."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn(REMARK, stacklevel=1)
    assert synchronizing_lines(caught) == set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn(REMARK, stacklevel=1)
        warnings.warn(f"{SYNCHRONIZED} (Triggered internally at c10/x.cpp:1)", stacklevel=1)
    (line,) = synchronizing_lines(caught)
    assert "/tests/test_gpu_steps.py/" in line


@pytest.mark.skipif(
    not hasattr(torch._C, "_cuda_set_sync_debug_mode"), reason="this torch is without CUDA"
)
def test_what_torch_says_when_the_mode_is_turned_on_is_no_synchronization() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch._C._cuda_set_sync_debug_mode(1)
        torch._C._cuda_set_sync_debug_mode(0)
    assert synchronizing_lines(caught) == set()


def test_memory_of_ranks_is_compared_with_the_plans(tmp_path: Path) -> None:
    held = {"facts": {"peak_bytes": {"1f1b": [3 << 20, 1 << 20]}}}
    (tmp_path / "pp2.json").write_text(json.dumps(held))
    rows, facts = memory(tmp_path, tiny=True, limit_s=120.0)
    assert [(row.what, row.value is None) for row in rows] == [
        ("PP 1: memory over the plan's", True),
        ("PP 2: memory of stage 0 over the plan's", False),
        ("PP 2: memory of stage 1 over the plan's", False),
    ]
    first, last = facts["pp2"]["planned_bytes"]
    assert first > 0
    assert last > 0
    assert rows[1].value == pytest.approx((3 << 20) / first)
