"""Provides a fixture that diagnoses synthetic runs, with or without faults."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.trace.diagnose import Diagnosis, diagnose
from megatron.adaptive.trace.read import read_run
from tests.support.synthetic_trace import Fault, SyntheticRun, write_synthetic

Say = Callable[..., Diagnosis]

NOISE: dict[str, Any] = {
    "action_sigma": 0.08,
    "rank_sigma": 0.01,
    "iteration_sigma": 0.01,
    "stray_probability": 0.001,
}


@pytest.fixture
def say(tmp_path: Path) -> Say:
    """Returns a function that generates a noisy run with ``faults``, and returns its diagnosis."""

    def make(*faults: Fault, iterations: int = 16, **options: Any) -> Diagnosis:
        run = SyntheticRun(faults=faults, **{**NOISE, "iterations": iterations, **options})
        write_synthetic(tmp_path, run)
        return diagnose(read_run(tmp_path))

    return make
