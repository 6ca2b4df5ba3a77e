"""Tests that ``plan validate`` compares predicted and measured step times, and tests its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.adaptive.cli.common import run_cli
from megatron.adaptive.cli.plan import main as plan_main
from megatron.adaptive.cli.profile import main as profile_main
from megatron.adaptive.cli.validate import main
from tests.support.synthetic_trace import SyntheticRun, write_synthetic

TOKENS = 128
MODEL = f"""\
--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length {TOKENS}
--max-position-embeddings {TOKENS} --vocab-size 1000
"""
CLUSTER = """\
format: 1
nodes:
  - {type: pod, gpu: A100-40, count: 1, gpus_per_node: 4, link: {bandwidth: 10 GB/s, latency: 5 us}}
network: {bandwidth: 25 Gbit/s, latency: 20 us}
"""
BATCH = 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Writes two runs of a model with eight layers, and files that describe model and cluster."""
    (tmp_path / "model.txt").write_text(MODEL)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    _run(tmp_path / "runs" / "quick", microbatches=8)
    _run(tmp_path / "runs" / "slow", microbatches=16)
    return tmp_path


def _run(folder: Path, microbatches: int) -> None:
    """Writes a run to the folder ``traces`` in ``folder``, as the trainer does."""
    traces = folder / "traces"
    traces.mkdir(parents=True)
    made_up = SyntheticRun(
        num_ranks=2, schedule="1f1b", iterations=8, layers=4, num_microbatches=microbatches
    )
    write_synthetic(traces, made_up)
    tokens = 10 * BATCH * made_up.num_microbatches * TOKENS
    line = {"iteration": 1, "step_ms": 100.0, "tokens_per_s": tokens}
    (traces / "progress.jsonl").write_text(json.dumps(line) + "\n")


def _options(folder: Path) -> list[str]:
    files = ["--model", str(folder / "model.txt"), "--cluster", str(folder / "cluster.yaml")]
    return ["--data", str(folder / "runs"), *files, "--precision", "fp16"]


def test_runs_are_predicted_from_another(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learnt = ["--calibrate", str(folder / "runs" / "quick" / "traces"), "--json"]
    assert main([*_options(folder), *learnt]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert (report["set"], report["runs"]) == ("own runs", 2)
    rows = {row["run"]: row for row in report["rows"]}
    assert set(rows) == {"quick", "slow"}
    for row in rows.values():
        assert row["predicted_s"] == pytest.approx(row["measured_s"], rel=0.2)
    assert rows["slow"]["measured_s"] > 1.2 * rows["quick"]["measured_s"]
    assert report["rank_correlation"] == pytest.approx(1)


def test_the_next_plan_knows_what_a_run_took(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--model", str(folder / "model.txt"), "--cluster", str(folder / "cluster.yaml")]
    runs, profile = folder / "runs", str(folder / "profile.json")
    for name in ("quick", "slow"):  # The second call must add its run to the file.
        learnt = ["--from-run", str(runs / name / "traces"), "--precision", "fp16"]
        assert profile_main([*learnt, *files, "--output", profile]) == 0
    capsys.readouterr()
    checked = ["--check", str(runs), *files, "--precision", "fp16", "--profile", profile, "--json"]
    assert plan_main(checked) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert (report["runs"], report["place_of_best"], report["regret"]) == (2, 1, 0)
    assert report["median_error"] <= report["mean_error"] <= report["worst_error"] < 0.2
    other = str(folder / "model.txt").replace("model.txt", "other.txt")
    Path(other).write_text(MODEL.replace("--hidden-size 64", "--hidden-size 128"))
    files[1] = other
    options = ["--from-run", str(runs / "quick" / "traces"), *files, "--output", profile]
    assert run_cli(profile_main, options) == 2
    assert "but the embedding of other has" in capsys.readouterr().err


def test_one_run_is_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = _options(folder)
    options[1] = str(folder / "runs" / "slow" / "traces")
    assert main([*options, "--rows"]) == 0
    said = capsys.readouterr().out
    assert "own runs" in said
    assert " 5-5 " in said


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"--cluster": None}, "pass --cluster"),
        ({"--model": "gpt2"}, "pass the model that was trained"),
        ({"cluster": CLUSTER.replace("gpus_per_node: 4", "gpus_per_node: 1")}, "had more ranks"),
        ({"rank": 1}, "the trace of rank 1 is missing"),
    ],
)
def test_errors_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], change: dict[str, str | int | None], text: str
) -> None:
    options = _options(folder)
    for name, value in change.items():
        if name == "cluster":
            (folder / "cluster.yaml").write_text(str(value))
        elif name == "rank":
            (trace,) = (folder / "runs" / "slow" / "traces").glob(f"trace_rank_*{value}.jsonl")
            trace.unlink()
        elif value is None:
            index = options.index(name)
            del options[index : index + 2]
        else:
            options[options.index(name) + 1] = str(value)
    assert run_cli(main, options) == 2
    message = capsys.readouterr().err
    assert text in message
    assert message.count("\n") == 1
