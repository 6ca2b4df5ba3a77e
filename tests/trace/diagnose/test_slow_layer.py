"""Checks that a single slow layer is reported, instead of the rank or stage that contains it."""

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


def diagnosed(
    folder: Path,
    *faults: Fault,
    waited: float = 0.0,
    layers: int = LAYERS,
    tokens: tuple[int, ...] = (),
    backward: float = 1.0,
    kinds: tuple[int, ...] = (),
    **slow: float,
) -> list[Finding]:
    """Returns the findings for a synthetic run whose traces contain the times of layers.

    Args:
        folder: Folder for the traces.
        faults: Faults to simulate in the run.
        waited: Fraction of the step time during which ranks waited for a processor.
        layers: Number of layers on each rank.
        tokens: Indices of the layers that have experts.
        backward: Factor for the backward times of slow layers whose forward times are normal. With
            1, the forward times of slow layers are also longer.
        kinds: Kind of each layer, as stored in the headers of the traces.
        slow: Factor for the times of each slow layer. For example, ``l5=2.0`` makes layer 5 twice
            as slow.
    """
    write_synthetic(
        folder, SyntheticRun(faults=faults, layers=layers, **{**NOISE, "iterations": 16})
    )
    for rank, path in enumerate(sorted(folder.glob("*.jsonl"))):
        lines = path.read_text().split("\n")
        lines[0] = json.dumps({**json.loads(lines[0]), "layer_kinds": kinds})
        for number, line in enumerate(lines):
            if line.startswith('{"begin_iteration"'):
                rows = []
                for index in range(layers * rank, layers * (rank + 1)):
                    factor = slow.get(f"l{index}", 1.0)
                    is_recomputed = factor > 1 and backward > 1
                    time_ns = round(FORWARD_NS * PASSES * (1.0 if is_recomputed else factor))
                    time_ns += 1000 * (number % 7)
                    backward_ns = round(2 * time_ns * (backward if is_recomputed else 1.0))
                    rows.append([index, time_ns, backward_ns, PASSES])
                machine = {ELAPSED: 1000, PROCESSOR_WAIT: round(1000 * waited)}
                marker = {**json.loads(line), "layers": rows, "machine": machine}
                marker["tokens"] = [[row[0], 0, 64] for row in rows if row[0] in tokens]
                lines[number] = json.dumps(marker)
        path.write_text("\n".join(lines))
    return list(diagnose(read_run(folder)).findings)


def test_a_slow_layer_is_named_and_not_its_rank(tmp_path: Path) -> None:
    (finding,) = diagnosed(tmp_path, Fault(kind="slow-rank", rank=1, factor=1.3), l5=6.0)
    assert (finding.cause, finding.ranks) == ("slow layer", (1,))
    assert "layer 5 on rank 1" in finding.headline
    assert finding.factor == pytest.approx(6.0, rel=0.05)
    assert finding.cost_fraction > 0.05


def test_a_layer_is_compared_with_layers_of_its_kind(tmp_path: Path) -> None:
    kinds = tuple(1 if index in (5, 10) else 0 for index in range(4 * LAYERS))
    # Layers 5 and 10 are of a kind that does more work. Only layer 6 is slower than other layers of
    # its kind.
    findings = diagnosed(tmp_path, kinds=kinds, l5=6.0, l10=6.0, l6=3.0)
    assert [finding.counts["layer"] for finding in findings if finding.cause == "slow layer"] == [6]


def test_a_slow_rank_whose_layers_are_all_slow_is_a_slow_rank(tmp_path: Path) -> None:
    slow = {f"l{index}": 1.5 for index in range(4, 8)}
    findings = diagnosed(tmp_path, Fault(kind="slow-rank", rank=1, factor=1.5), **slow)
    assert [finding.cause for finding in findings] == ["slow rank"]


def test_layers_of_two_kinds_are_not_slow_layers(tmp_path: Path) -> None:
    assert diagnosed(tmp_path, **{f"l{index}": 2.0 for index in range(0, 16, 2)}) == []


def test_a_layer_that_is_slower_by_chance_is_no_finding(tmp_path: Path) -> None:
    named = {finding.cause for finding in diagnosed(tmp_path, waited=0.8, l5=3.0)}
    assert "slow layer" not in named


def test_a_slow_rank_with_one_layer_is_a_slow_rank(tmp_path: Path) -> None:
    fault = Fault(kind="slow-rank", rank=2, factor=1.5)
    findings = diagnosed(tmp_path, fault, layers=1, l2=1.5)
    assert [(finding.cause, finding.ranks) for finding in findings] == [("slow rank", (2,))]


@pytest.mark.parametrize(
    "slow",
    [{f"l{index}": 2.0 for index in range(3, 16, 4)}, {"l2": 2.0, "l9": 2.1}, {"l15": 1.4}],
    ids=["every-fourth", "two", "last"],
)
def test_layers_that_may_be_of_another_kind_are_no_slow_layers(
    tmp_path: Path, slow: dict[str, float]
) -> None:
    assert diagnosed(tmp_path, **slow) == []


def test_recomputed_layers_are_no_slow_layers(tmp_path: Path) -> None:
    assert diagnosed(tmp_path, backward=1.5, l4=2.0) == []


def test_layers_with_experts_are_no_slow_layers(tmp_path: Path) -> None:
    assert diagnosed(tmp_path, tokens=(5,), l5=2.0) == []


def test_two_layers_that_differ_from_each_other_are_both_named(tmp_path: Path) -> None:
    named = {finding.counts["layer"] for finding in diagnosed(tmp_path, l2=2.0, l15=4.0)}
    assert named == {2, 15}
