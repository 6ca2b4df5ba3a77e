"""Checks that comparing runs finds what became slower, and nothing if the runs are equal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.compare_runs import Comparison, compare_runs
from megatron.adaptive.trace.read import read_run
from tests.support.detailed_trace import add_collectives, add_layers
from tests.support.synthetic_trace import Fault, SyntheticRun, write_synthetic

NOISE: dict[str, Any] = {
    "action_sigma": 0.05,
    "iteration_sigma": 0.01,
    "stray_probability": 0.002,
    "iterations": 14,
}


def compared(folder: Path, shape: dict[str, Any], after: dict[str, Any]) -> Comparison:
    write_synthetic(folder / "a", SyntheticRun(**NOISE, **shape, seed=1))
    write_synthetic(folder / "b", SyntheticRun(**{**NOISE, **shape, **after}, seed=2))
    return compare_runs(read_run(folder / "a"), read_run(folder / "b"))


SHAPES = [
    {"num_ranks": 4},
    {"num_ranks": 2, "num_chunks": 2, "weight_pieces": 1},
    {"num_ranks": 2, "replicas": 2},
]


@pytest.mark.parametrize("shape", SHAPES, ids=["loop", "chunks", "replicas"])
def test_a_slower_rank_is_one_change(tmp_path: Path, shape: dict[str, Any]) -> None:
    fault = Fault(kind="slow-rank", rank=1, factor=1.05)
    (change,) = compared(tmp_path, shape, {"faults": (fault,)}).changes
    assert (change.kind, change.ranks, change.action) == ("rank", (1,), "")
    assert change.relative == pytest.approx(0.05, abs=0.015)
    assert change.confidence > 0.9


@pytest.mark.parametrize("shape", SHAPES, ids=["loop", "chunks", "replicas"])
def test_slower_forwards_and_slower_work_of_all_ranks_are_told_apart(
    tmp_path: Path, shape: dict[str, Any]
) -> None:
    (change,) = compared(tmp_path / "one", shape, {"forward_s": 0.0105}).changes
    assert (change.kind, change.action) == ("action", "F")
    all_kinds = dict.fromkeys(("forward_s", "backward_s", "weight_s"), 0.0105)
    said = compared(tmp_path / "all", shape, all_kinds)
    (change,) = said.changes
    assert change.kind == "everything"
    assert said.relative == pytest.approx(0.05, abs=0.02)
    assert said.is_slower_by(0.02)
    assert not said.is_slower_by(0.08)


def test_a_faster_rank_and_a_slower_link_are_both_named(tmp_path: Path) -> None:
    shape = {"num_ranks": 4, "faults": (Fault(kind="slow-rank", rank=2, factor=1.2),)}
    link = Fault(kind="slow-link", rank=0, to=1, seconds=0.004)
    said = compared(tmp_path, shape, {"faults": (link,)})
    changes = {change.kind: change for change in said.changes}
    assert changes.keys() == {"rank", "link"}
    assert changes["rank"].ranks == (2,)
    assert changes["rank"].relative == pytest.approx(1 / 1.2 - 1, abs=0.03)
    assert changes["link"].ranks == (0, 1)
    assert changes["link"].after_ms - changes["link"].before_ms == pytest.approx(4.0, rel=0.1)


def test_slower_reading_of_data_is_named(tmp_path: Path) -> None:
    fault = Fault(kind="slow-data", rank=0, seconds=0.003)
    (change,) = compared(tmp_path, SHAPES[0], {"faults": (fault,)}).changes
    assert (change.kind, change.ranks) == ("data", (0,))


def detailed(folder: Path, layers_ms: list[float], late_ms: float, transfer_ms: float) -> None:
    """Writes a run with four layers per rank, and with collectives in two groups of two ranks.

    ``layers_ms`` contains the times of the layers on rank 1. Rank 2 starts collectives ``late_ms``
    milliseconds late, and transfers between ranks 0 and 1 take ``transfer_ms`` milliseconds.
    """
    seed = 1 if folder.name == "a" else 2
    write_synthetic(folder, SyntheticRun(**NOISE, num_ranks=4, seed=seed))
    for rank in range(4):
        add_layers(folder, rank, layers_ms if rank == 1 else [10.0] * 4, seed=seed)

    def times_ms(_: int, rank: int) -> tuple[float, float]:
        late = late_ms if rank == 2 else 0.0
        return late, transfer_ms if rank < 2 else 0.2

    add_collectives(folder, "tensor", [(0, 1), (2, 3)], times_ms, seed=seed)


def test_a_slower_layer_group_and_member_are_named(tmp_path: Path) -> None:
    detailed(tmp_path / "a", [10.0] * 4, 0.0, 0.2)
    detailed(tmp_path / "b", [10.0, 10.0, 11.0, 10.0], 0.3, 0.4)
    detailed(tmp_path / "c", [11.0] * 4, 0.0, 0.2)
    a, b, c = (read_run(tmp_path / name) for name in "abc")
    changes = {change.place: change for change in compare_runs(a, b).changes}
    layer, group = "layer 6 (rank 1)", "transfers in tensor all-reduce on ranks 0-1"
    assert changes.keys() == {layer, group, "waits for rank 2 in tensor all-reduce"}
    assert changes[layer].relative == pytest.approx(0.1, abs=0.02)
    assert changes[group].relative == pytest.approx(1.0, abs=0.05)
    # If all layers of a rank became slower, the change is reported for the rank, not for its
    # layers.
    assert not [change for change in compare_runs(a, c).changes if change.kind == "layer"]


@pytest.mark.parametrize("seed", range(4))
def test_equal_runs_have_no_change(tmp_path: Path, seed: int) -> None:
    said = compared(tmp_path, {**SHAPES[seed % 3]}, {"latency_s": 0.0001})
    assert said.changes == ()
    assert not said.is_slower_by(0.0)
    assert "no certain change" in said.format()


def diff(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatron.adaptive", "trace", "diff", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_gate_fails_above_its_limit_only(tmp_path: Path) -> None:
    slower = dict.fromkeys(("forward_s", "backward_s", "weight_s"), 0.011)
    compared(tmp_path, SHAPES[0], slower)
    done = diff(tmp_path / "a", tmp_path / "b", "--fail-above", "3%")
    assert done.returncode == 1
    assert "computing on all ranks" in done.stdout
    assert "--fail-above allows only 3.0%" in done.stderr
    assert diff(tmp_path / "a", tmp_path / "b", "--fail-above", "0.2").returncode == 0
    assert diff(tmp_path / "b", tmp_path / "a", "--fail-above", "3%").returncode == 0
    done = diff(tmp_path / "a", tmp_path / "b", "--json")
    (change,) = json.loads(done.stdout)["changes"]
    assert change["place"] == "computing on all ranks"


def test_a_limit_that_is_no_share_is_refused(tmp_path: Path) -> None:
    for text in ("-1%", "three", "nan"):
        done = diff(tmp_path, tmp_path, f"--fail-above={text}")
        assert done.returncode == 2
        assert "is not a fraction such as 3% or 0.03" in done.stderr


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"num_ranks": 2}, "compare runs of the same shape"),
        ({"num_ranks": 4, "layers": 8}, "compare runs of the same shape"),
        ({"num_ranks": 4, "iterations": 2}, "at least 3 iterations"),
    ],
    ids=["ranks", "layers", "iterations"],
)
def test_runs_that_cannot_be_compared_are_refused(
    tmp_path: Path, other: dict[str, Any], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        compared(tmp_path, {"num_ranks": 4}, other)
