"""Tests that causes are found by name, and that users can define causes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.adaptive.trace.diagnose import causes
from megatron.adaptive.trace.diagnose.cause import built_in_causes
from tests.support.synthetic_trace import SyntheticRun, write_synthetic

ROOT = Path(__file__).resolve().parents[3]
Diagnose = Callable[..., "subprocess.CompletedProcess[str]"]

OWN = '''
import numpy as np

from megatron.adaptive.trace.diagnose import Cause, Remedy


class ShortRun(Cause):
    """Reports rank 1 of a run of few iterations."""

    name = "short run"

    def find(self, evidence, earlier):
        m = evidence.measured
        if len(m.iterations) > 8:
            return []
        return [m.finding([1], m.iterations, against="plan", confidence=0.9, factor=2.0)]

    def advise(self, finding, evidence):
        return Remedy(("train longer",))

    def without(self, finding, steps):
        steps.duration_s[steps.affected] /= 2
        return steps.duration_s


class Damaged(Cause):
    name = "damaged"

    def find(self, evidence, earlier):
        return {}["key"]
'''


@pytest.fixture
def diagnose(tmp_path: Path) -> Diagnose:
    """Returns a function that runs ``trace diagnose`` with a user's module of causes installed."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "my_causes.py").write_text(OWN)
    info = folder / "my_causes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-causes\nVersion: 1.0\n")
    points = "[megatron_adaptive.causes]\nshortness = my_causes:ShortRun\n"
    (info / "entry_points.txt").write_text(points)
    write_synthetic(tmp_path / "traces", SyntheticRun(num_ranks=2, iterations=6))

    def run(*flags: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "megatron.adaptive", "trace", "diagnose", "traces", *flags],
            env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


def test_a_cause_of_the_user_is_found_and_costed(diagnose: Diagnose) -> None:
    assert diagnose().stdout.startswith("no findings")
    done = diagnose("--cause", "my_causes:ShortRun")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].startswith("short run: rank 1 (stage 1, ")
    assert lines[1].endswith(") takes 2.00 times as long in all iterations")
    assert lines[-1] == "  do: train longer"
    (finding,) = json.loads(diagnose("--cause", "shortness", "--json").stdout)["findings"]
    assert finding["cause"] == "short run"
    assert 0.05 < finding["cost_fraction"] < 0.6


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_causes:Damaged", "cause damaged: "),
        ("my_causes:np", "diagnose.Cause that sets the attribute name, got module"),
        ("my_causes:none", "has no 'none'"),
        ("nothing", "or an entry point of the group megatron_adaptive.causes, got 'nothing'"),
    ],
)
def test_a_cause_that_cannot_be_searched(diagnose: Diagnose, name: str, message: str) -> None:
    done = diagnose("--cause", name)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_file_in_the_folder_is_a_cause_of_this_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "short_run.py").write_text(OWN.split("class Damaged")[0])
    before = [cause.name for cause in built_in_causes()]
    assert "slow rank" in before
    monkeypatch.setattr(causes, "__path__", [*causes.__path__, str(tmp_path)])
    assert [cause.name for cause in built_in_causes()] == [*before, "short run"]
    monkeypatch.delitem(sys.modules, f"{causes.__name__}.short_run")
