"""Tests that signals at random times lose no work, leave nothing behind, and print one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.soak.interrupts import KINDS, Chain, run_chains

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
HITS = int(os.environ.get("INTERRUPTS", "2"))
"""Number of signals for each kind of job in the long test. Use a few dozen before a release."""


def faults_of(chain: Chain, seed: int, hits: int) -> list[str]:
    """Runs ``chain``, and returns descriptions of all faults, each with the signal that caused it.

    ``hits`` is the number of signals, and ``seed`` is the seed of all random choices.
    """
    outcomes = run_chains(chain, seed, hits, print)
    return [f"{outcome.description}: {fault}" for outcome in outcomes for fault in outcome.faults]


@pytest.mark.long
@pytest.mark.timeout(280)
def test_interrupted_jobs_go_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    chain = Chain(kind="launch", folder=tmp_path / "launch", is_async=True)
    assert faults_of(chain, 1, 3) == []


@pytest.mark.long
@pytest.mark.timeout(120 * HITS)
@pytest.mark.parametrize("kind", KINDS)
def test_many_interrupts(kind: str, tmp_path: Path) -> None:
    # Asynchronous checkpoints of the kind "launch" are already covered by the previous test.
    chain = Chain(kind=kind, folder=tmp_path / kind, is_async=kind in ("machines", "pipeline"))
    assert faults_of(chain, 7, HITS) == []
