"""A layer that takes longer than the others is named instead of its rank or its stage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.adaptive.trace.diagnose import Finding, diagnose
from megatron.adaptive.trace.machine_counters import ELAPSED, PROCESSOR_WAIT
from megatron.adaptive.trace.read import read_run
from tests.support.synthetic_trace import Fault, SyntheticRun, write_synthetic

from .conftest import NOISE

LAYERS = 4
FORWARD_NS, PASSES = 1_000_000, 8


def diagnosed(folder: Path, *faults: Fault, waited: float = 0.0, **slow: float) -> list[Finding]:
    """Diagnoses a made-up run with times of layers; ``slow`` has a factor for some (``l5``).

    Args:
        folder: Folder for the traces.
        faults: Faults of the run.
        waited: Fraction of the steps for which ranks waited for a processor.
        slow: Factors of the times of layers.
    """
    write_synthetic(
        folder, SyntheticRun(faults=faults, layers=LAYERS, **{**NOISE, "iterations": 16})
    )
    for rank, path in enumerate(sorted(folder.glob("*.jsonl"))):
        lines = path.read_text().split("\n")
        for number, line in enumerate(lines):
            if line.startswith('{"begin_iteration"'):
                rows = []
                for index in range(LAYERS * rank, LAYERS * (rank + 1)):
                    time_ns = round(FORWARD_NS * PASSES * slow.get(f"l{index}", 1.0))
                    time_ns += 1000 * (number % 7)
                    rows.append([index, time_ns, 2 * time_ns, PASSES])
                machine = {ELAPSED: 1000, PROCESSOR_WAIT: round(1000 * waited)}
                marker = {**json.loads(line), "layers": rows, "machine": machine}
                lines[number] = json.dumps(marker)
        path.write_text("\n".join(lines))
    return list(diagnose(read_run(folder)).findings)


def test_a_slow_layer_is_named_and_not_its_rank(tmp_path: Path) -> None:
    (finding,) = diagnosed(tmp_path, Fault(kind="slow-rank", rank=1, factor=1.3), l5=6.0)
    assert (finding.cause, finding.ranks) == ("slow layer", (1,))
    assert "layer 5 on rank 1" in finding.headline
    assert finding.factor == pytest.approx(6.0, rel=0.05)
    assert finding.cost_fraction > 0.05


def test_a_slow_rank_whose_layers_are_all_slow_is_a_slow_rank(tmp_path: Path) -> None:
    slow = {f"l{index}": 1.5 for index in range(4, 8)}
    findings = diagnosed(tmp_path, Fault(kind="slow-rank", rank=1, factor=1.5), **slow)
    assert [finding.cause for finding in findings] == ["slow rank"]


def test_layers_of_two_kinds_are_not_slow_layers(tmp_path: Path) -> None:
    assert diagnosed(tmp_path, **{f"l{index}": 2.0 for index in range(0, 16, 2)}) == []


def test_a_layer_that_is_slower_by_chance_is_no_finding(tmp_path: Path) -> None:
    named = {finding.cause for finding in diagnosed(tmp_path, waited=0.8, l5=3.0)}
    assert "slow layer" not in named
