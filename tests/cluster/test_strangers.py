"""Strangers at the listeners of an elastic job and of pods; the benchmark says a million words."""

from __future__ import annotations

import pytest

from benchmarks.faults_strangers import measure

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def test_strangers_have_no_effect_on_jobs() -> None:
    """One line ended a master, took a node's place, or learned the settings."""
    found = measure(1000, seed=5)
    assert min(found["said"].values()) >= 1000
    assert found["ports"] == {"elastic": 3, "pods": 1}
    assert (found["ends"], found["effects"], found["differences"]) == ([], [], 0)
    assert found["steps"] > 5
