"""Signals at random moments lose no work, leave nothing behind, and each has its one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.soak.interrupts import KINDS, Chain, run_chains

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
HITS = int(os.environ.get("INTERRUPTS", "3"))
"""Signals of each kind of job in the long test; before a release some dozens."""


def faults_of(chain: Chain, seed: int, hits: int) -> list[str]:
    """Returns what is not as it should be, with the signal before it."""
    found = run_chains(chain, seed, hits, print)
    return [f"{one.what}: {fault}" for one in found for fault in one.faults]


@pytest.mark.timeout(280)
@pytest.mark.parametrize("kind", ["launch", pytest.param("machines", marks=pytest.mark.long)])
def test_interrupted_jobs_go_on_from_the_newest_checkpoint(kind: str, tmp_path: Path) -> None:
    assert faults_of(Chain(kind=kind, folder=tmp_path / kind, is_async=True), 1, 3) == []


@pytest.mark.long
@pytest.mark.timeout(120 * HITS)
@pytest.mark.parametrize("kind", KINDS)
def test_many_interrupts(kind: str, tmp_path: Path) -> None:
    assert faults_of(Chain(kind=kind, folder=tmp_path / kind), 7, HITS) == []
