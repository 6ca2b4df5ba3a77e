"""Readers of published runs, and the comparison with predictions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.planning.measured import read_sets
from benchmarks.planning.published.amp import read_amp
from benchmarks.planning.published.sailor import read_sailor
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.calibrate import compare, rank_correlation

from .published import GPT_S, WIDE_S, sailor_plan, write_amp, write_sailor

RUNS = [
    "0,1,1,4,1,2,4,0.1,0.10,ok",
    "1,2,1,1,4,4,1-1-1-1,0.1,0.15,ok",
    "2,4,2,2,1,1,4,0.1,,failed",
    "3,1,2,2,1,4,4,0.1,0.20,ok",
]
PUBLISHED = os.environ.get("PLANNER_DATA", "")


def test_launching_is_what_a_layer_takes_that_computes_nothing(tmp_path: Path) -> None:
    runs = read_amp(write_amp(tmp_path, RUNS), "homogeneous")
    assert [run.name for run in runs] == ["0", "1", "3"]
    profile = runs[0].profile
    one = profile.times("transformer.1", "T4", 1, 1)
    assert one.launch_s == pytest.approx(WIDE_S)
    assert one.backward_s == pytest.approx(WIDE_S + 2 * (GPT_S - WIDE_S))
    four = profile.times("transformer.1", "T4", 1, 4)
    assert four.forward_s == pytest.approx(WIDE_S + 4 * (GPT_S - WIDE_S))
    # Half of the work, and 1 ms of all-reduces that a backward has once as well.
    two = profile.times("transformer.1", "T4", 2, 1)
    assert two.backward_s == pytest.approx(0.002 + 2 * 0.0015 + 0.001)


def test_amp_ranks_are_laid_node_by_node(tmp_path: Path) -> None:
    run = read_amp(write_amp(tmp_path, RUNS), "homogeneous")[1]
    assert [place.replicas[0].node for place in run.plan.places] == [0, 0, 1, 1]
    assert run.model.tied_parameters == 500
    assert run.cluster.link(0, 1).bytes_per_s == pytest.approx(0.92 * 1e10 / 8)


def test_doubtful_links_and_figures_are_left_out(tmp_path: Path) -> None:
    plans = [
        sailor_plan("a"),
        sailor_plan("b", doubts=["values are those of a digit for digit"]),
        sailor_plan("c", doubts=["leave the memory out of error figures"]),
    ]
    runs = {run.name: run for run in read_sailor(write_sailor(tmp_path, plans))}
    assert runs["a"].peak_bytes == 5e9
    assert runs["b"].seconds is None
    assert runs["b"].peak_bytes is None
    assert (runs["c"].seconds, runs["c"].peak_bytes) == (3.0, None)
    assert runs["a"].cluster.link(0, 1).bandwidth(4e6, 2) == pytest.approx(0.5e9)
    embedding = runs["a"].model.layer(0)
    assert embedding.held_parameters(1) == pytest.approx(1000)
    assert embedding.held_parameters(2) == pytest.approx(600)


def test_predicted_time_of_two_stages_by_hand(tmp_path: Path) -> None:
    found = compare("s", read_sailor(write_sailor(tmp_path, [sailor_plan("a"), sailor_plan("b")])))
    # Forward 0.1 and 0.2 s, backward 0.2 and 0.4, four microbatches, messages of 4 ms; the second
    # stage works 2.4 s and waits for the first forward, the last gradient goes back.
    seconds = found.rows[0].predicted.seconds
    optimizer = found.rows[0].predicted.parts["optimizer"]
    assert seconds - optimizer == pytest.approx(0.1 + 2.4 + 0.2 + 4 * 2 * 0.004, rel=0.01)
    # 1 and 2 GB kept; two microbatches in flight on the first stage, one on the second.
    assert found.rows[0].predicted.peak_bytes == pytest.approx(3e9 + 2e9, rel=0.01)


def test_figures_of_a_comparison(tmp_path: Path) -> None:
    runs = [sailor_plan("a", measured_s=2.0), sailor_plan("b", measured_s=4.0, global_batch_size=8)]
    found = compare("s", read_sailor(write_sailor(tmp_path, runs)))
    errors = [row.predicted.seconds / row.measured.seconds - 1 for row in found.rows]  # type: ignore[operator]
    assert found.median_error == pytest.approx(sum(map(abs, errors)) / 2)
    assert found.worst_error == pytest.approx(max(map(abs, errors)))
    assert found.correlation == pytest.approx(1)
    assert found.place_of_best == 1


def test_rank_correlation_shares_equal_ranks() -> None:
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 1, 2], [1, 2, 3]) == pytest.approx(0.8660254)
    assert rank_correlation([1, 1], [1, 2]) == 0


def test_sets_are_found_below_a_folder(tmp_path: Path) -> None:
    write_amp(tmp_path / "amp", RUNS)
    write_sailor(tmp_path / "other", [sailor_plan("a"), sailor_plan("b")])
    assert set(read_sets(tmp_path)) == {"amp homogeneous", "sailor mit"}


@pytest.mark.parametrize(
    ("folder", "text"),
    [
        ("missing", "no such folder"),
        ("empty", "no data set"),
        ("damaged", "cannot be read"),
    ],
)
def test_errors_are_one_line(tmp_path: Path, folder: str, text: str) -> None:
    (write_amp(tmp_path / "damaged", RUNS) / "model.json").write_text("{", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=text) as info:
        read_sets(tmp_path / folder)
    assert "\n" not in str(info.value)


def test_a_run_without_a_time_is_refused(tmp_path: Path) -> None:
    runs = [sailor_plan("a", doubts=["digit for digit"])]
    with pytest.raises(ConfigError, match="no run has a time"):
        compare("s", read_sailor(write_sailor(tmp_path, runs)))


@pytest.mark.skipif(not PUBLISHED, reason="PLANNER_DATA names no folder of published sets")
def test_published_runs_are_predicted() -> None:
    for name, runs in read_sets(Path(PUBLISHED)).items():
        found = compare(name, runs)
        assert found.median_error <= 0.10
        assert found.correlation >= 0.9
        assert found.place_of_best <= 3
        assert all(abs(error) <= 0.15 for error in found.memory_errors)
