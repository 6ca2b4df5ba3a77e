"""Tests that this project does not change how torch, transformers, peft and accelerate behave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .programs import STATEMENTS

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).with_name("programs.py")
PREPARATIONS = ("plain", "early", "late")
# This is the number of random programs in the long test. Before a release, use a few hundred.
PROGRAMS_OF_A_RUN = int(os.environ.get("BEHAVIOURS", "30"))
FIRST_SEED = int(os.environ.get("BEHAVIOURS_SEED", "1000"))


def observed(folder: Path, seeds: range, limit_s: float) -> dict[str, list[Any]]:
    """Runs the programs with the numbers ``seeds``. Returns their observations per preparation."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("TORCHDYNAMO_DISABLE", None)
    processes = {}
    for name in PREPARATIONS:
        with (folder / f"{name}.txt").open("w") as log:
            processes[name] = subprocess.Popen(
                [sys.executable, str(PROGRAMS), name, f"{name}.json", *map(str, seeds)],
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=log,
            )
    try:
        for name, process in processes.items():
            status = process.wait(limit_s)
            assert status == 0, (name, (folder / f"{name}.txt").read_text()[-2000:])
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in PREPARATIONS}


def check_equal(results: dict[str, list[Any]], seeds: range) -> None:
    plain = results.pop("plain")
    # The first entry describes the process. Each of the other entries belongs to a program.
    assert len(plain) == len(seeds) + 1
    for name, others in results.items():
        unlike = [
            (name, seed, expected_steps[:1], expected, actual)
            for seed, expected_steps, actual_steps in zip(seeds, plain[1:], others[1:], strict=True)
            for expected, actual in zip(expected_steps, actual_steps, strict=False)
            if expected != actual
        ]
        assert unlike == []
        assert others == plain


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_kind_of_behaviour_is_the_same_with_us(tmp_path: Path) -> None:
    """Checks that each kind of statement has the same results with and without this project."""
    seeds = range(len(STATEMENTS) + 2)
    check_equal(observed(tmp_path, seeds, limit_s=560.0), seeds)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(300 + 10 * PROGRAMS_OF_A_RUN)
def test_random_behaviours_are_the_same_with_us(tmp_path: Path) -> None:
    seeds = range(FIRST_SEED, FIRST_SEED + PROGRAMS_OF_A_RUN)
    check_equal(observed(tmp_path, seeds, limit_s=250.0 + 10 * PROGRAMS_OF_A_RUN), seeds)
