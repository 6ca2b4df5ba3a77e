"""Tests the table, the chart, the profiles and the errors of ``simulate``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.adaptive.cli.common import run_cli
from megatron.adaptive.cli.simulate import main

SMALL = "--stages 4 --microbatches 8"


def simulate(arguments: str) -> int:
    return run_cli(main, arguments.split())


def test_the_table_shows_every_schedule_against_the_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert simulate(f"{SMALL} --schedules 1f1b,interleaved,zb-v,adaptive") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1 draw each")
    rows = {line.split()[0]: line for line in lines[3:]}
    assert list(rows) == ["1f1b", "interleaved", "zb-v", "adaptive"]
    # The step takes (microbatches + ranks - 1) * 3 = 33 s with 1f1b, and 8 * 3 + 3 / 2 = 25.5 s
    # with zb-v.
    assert "33" in rows["1f1b"]
    assert "1.000x" in rows["1f1b"]
    assert "25.5" in rows["zb-v"]
    assert "1.294x" in rows["zb-v"]


def test_a_slow_rank_sets_the_pace(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(f"{SMALL} --schedules 1f1b --slow-rank 3:2") == 0
    # The step consists of eight microbatches of 6 s on the last rank, plus the first forward and
    # the last backward pass on the other ranks.
    assert "57" in capsys.readouterr().out.splitlines()[3]
    assert simulate(f"{SMALL} --slow-rank 4:2") == 2
    assert "with a rank from 0 to 3" in capsys.readouterr().err


def test_jitter_is_the_same_for_all_and_for_a_second_call(tmp_path: Path) -> None:
    arguments = f"{SMALL} --jitter 0.3 --draws 3 --schedules zb-v,adaptive --json"
    assert simulate(f"{arguments} {tmp_path / 'one.json'}") == 0
    assert simulate(f"{arguments} {tmp_path / 'two.json'}") == 0
    first = json.loads((tmp_path / "one.json").read_text())
    assert first == json.loads((tmp_path / "two.json").read_text())
    assert [len(row["makespans_s"]) for row in first] == [3, 3]
    assert first[1]["placement"] == "v"
    assert first[1]["weight_pieces"] == 4


def test_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chart = tmp_path / "steps.png"
    assert simulate(f"{SMALL} --schedules 1f1b,zb-v --chart {chart}") == 0
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert f"chart: {chart}" in capsys.readouterr().out


def test_a_profile_file_gives_the_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    profile = {
        "version": 1,
        "forward_s": [0.1] * 8,
        "backward_s": [0.1] * 8,
        "weight_s": [0.1] * 8,
        "rank_factors": [1, 1, 2, 1],
        "links": [{"from": 0, "to": 1, "latency_s": 0.05}],
    }
    path.write_text(json.dumps(profile))
    assert simulate(f"{SMALL} --schedules 1f1b --profile {path}") == 0
    # The slow rank computes for 8 * 3 * 0.2 * 2 = 9.6 s.
    step_s = float(capsys.readouterr().out.splitlines()[-1].split("chunk)")[1].split()[0])
    assert step_s > 9.6


def test_a_schedule_that_the_sizes_do_not_allow_is_left_out_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "outcomes.json"
    assert simulate(f"--stages 8 --microbatches 4 --json {path}") == 0
    text = capsys.readouterr().out
    assert text.count("left out ") == 1
    assert "left out interleaved: " in text
    names = [row["schedule"] for row in json.loads(path.read_text())]
    assert names == ["1f1b", "zb-v", "adaptive"]


def test_sizes_that_allow_no_schedule_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--stages 8 --microbatches 4 --schedules interleaved") == 2
    error = capsys.readouterr().err
    assert "--schedules interleaved: " in error
    assert "at least 8 microbatches (the number of ranks)" in error


def test_an_unknown_schedule_is_never_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(f"{SMALL} --schedules 1f1b,fifo") == 2
    assert "'fifo'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--profile p.json --forward 1", "--forward cannot be combined with --profile; set forwa"),
        ("--profile p.json --jitter 0", "--jitter cannot be combined with --profile; set action_"),
        ("--profile p.json --exchanges 4", "--exchanges cannot be combined with --profile; set"),
        ("--profile p.json --slow-rank 0:2", "--slow-rank cannot be combined with --profile; set"),
        ("--exchanges 4", "--exchanges 4 requires --exchange, the time of all-to-alls; add"),
        ("--schedules forward-only", "schedule 'forward-only' has no backward passes"),
    ],
)
def test_options_without_effect_are_refused(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(f"{SMALL} {flags}") == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_help_shows_no_empty_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        simulate("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "(default: 20)" in text
    assert "default: None" not in text
    assert "default: []" not in text
    assert "(default: [1])" not in text
    assert "several numbers to compare (default: 1)" in text
    assert "forward-only" not in text


def test_slices_show_efficiency_and_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        f"{SMALL} --sequence-slices 4 --attention-share 0.6 --schedules seq-1f1b,adaptive,zb-v"
    )
    assert simulate(f"{arguments} --cap 2 --json {tmp_path / 'out.json'}") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "4 slices per microbatch, equal-cost; attention takes 60% of a forward pass"
    assert "efficiency" in lines[3]
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [row["sequence_slices"] for row in rows] == [4, 4]
    assert f"{rows[1]['efficiency']:.3f}" in lines[5]
    # Each rank computes for 8 * 3 s. Filling and draining the pipeline takes another 3 / 4 s for
    # each of the three other ranks.
    assert rows[0]["makespans_s"][0] == pytest.approx(8 * 3 + 3 * 3 / 4, rel=0.06)
    assert rows[1]["peak_microbatches"] <= 2.001
    assert "left out zb-v: schedule zb-v does not support slices, got 4 slices" in lines[-1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--sequence-slices 0", "--sequence-slices"),
        ("--attention-share 1.5", "'1.5' is not a number from 0 to 1"),
        ("--slice-cut equal", "equal-cost"),
        ("--sequence-slices 8 --cap 0.5 --schedules adaptive", "cap must be at least 1 "),
        (
            "--sequence-slices 8 --schedules 1f1b",
            "does not support slices, got 8 slices per microbatch; use one of",
        ),
        ("--sequence-slices 4,,8", "'' is not a whole number from 1"),
        ("--sequence-slices 4,0", "'0' is not a whole number from 1"),
        ("--slice-overhead -1", "'-1' is not a number from 0"),
        ("--sequence-slices 9000", "x --sequence-slices 9000 result in 576,000 actions"),
    ],
)
def test_bad_slices_are_refused_in_one_line(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(f"{SMALL} {flags}") == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.long
def test_numbers_of_slices_are_compared_with_what_each_slice_adds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def steps(overhead: float) -> dict[tuple[str, int], float]:
        arguments = f"{SMALL} --schedules zb-v,adaptive,hinted --sequence-slices 1,2,8 --cap 4"
        arguments += f" --attention-share 0.6 --slice-overhead {overhead}"
        assert simulate(f"{arguments} --json {tmp_path / 'out.json'}") == 0
        rows = json.loads((tmp_path / "out.json").read_text())
        return {(row["schedule"], row["sequence_slices"]): row["makespans_s"][0] for row in rows}

    free, dear = steps(0.0), steps(0.2)
    assert (
        "left out zb-v with 2 slices: schedule zb-v does not support slices, got 2 slices"
        in capsys.readouterr().out
    )
    assert set(free) == {("zb-v", 1), *((n, k) for n in ("adaptive", "hinted") for k in (1, 2, 8))}
    assert free["adaptive", 1] > free["adaptive", 2] > free["adaptive", 8]
    # Eight slices are slower than two slices because of the overhead per slice. A microbatch
    # without slices has no overhead.
    assert dear["adaptive", 2] < dear["adaptive", 8]
    assert dear["adaptive", 1] == free["adaptive", 1]
    # The order of "hinted" accounts for backward passes that attention makes longer.
    assert free["hinted", 8] < 1.01 * free["adaptive", 8]


def test_attention_moves_time_from_weight_gradients_to_backwards(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert simulate(f"{SMALL} --schedules 1f1b --attention-share 0.5") == 0
    # Attention does not change the time of a microbatch, which is 3 s. So the step takes (8 + 3) *
    # 3 s.
    assert " 33 " in capsys.readouterr().out.splitlines()[3]
