"""Tests that a manager detects lost nodes, and that corrupt checkpoints are detected."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import control_plane, damages


def test_nodes_join_a_manager_at_once_and_are_lost(tmp_path: Path) -> None:
    result = control_plane.measure(24, 0.05, 2.0, tmp_path, seed=1, silent=False)
    joined, late, cores, memory, status = result.rows
    assert joined.value is not None
    assert late.value is not None
    assert late.value < 2
    assert memory.met
    assert cores.value is not None
    assert status.value is not None
    assert result.facts["control plane"]["morphs"] >= 1


@pytest.mark.long
def test_damages_are_found_and_mended(tmp_path: Path) -> None:
    shapes = ("trainer-1", "pipeline-1")
    result = damages.measure(tmp_path, 60, 4, 6, seed=1, shapes=shapes)
    assert {row.what: row.met for row in result.rows if row.met is False} == {}
