"""Tests that ``--trace-detail layers`` records the times of layers within actions."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from megatron.adaptive.cli import trace
from megatron.adaptive.trace.kernels import kernel_figures, read_steps
from megatron.adaptive.trace.read import RankTrace, read_run

from .launch import ROOT, Ranks, tail

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

LAYERS = 3
MICROBATCHES = 4
FLAGS = (
    f"--num-layers {LAYERS} --hidden-size 128 --num-attention-heads 4 --seq-length 64"
    " --max-position-embeddings 64 --micro-batch-size 1 --lr 1e-4 --mock-data --vocab-size 127"
    f" --tokenizer-type NullTokenizer --global-batch-size {MICROBATCHES} --train-iters 2"
    " --eval-iters 0 --log-interval 1 --pipeline-schedule adaptive"
).split()
LIMIT_S = 200.0
HAND_TIMED = ROOT / "tests" / "support" / "hand_timed_layers.py"
MOST_OFF = 0.03
"""Maximum relative difference between the traced time of a layer and the time taken by hand."""


def losses(folder: Path, *flags: str) -> list[str]:
    """Trains with ``flags`` on one rank in ``folder``, and returns losses and gradient norms."""
    folder.mkdir()
    log = folder / "output.txt"
    command = [str(ROOT / "pretrain_gpt.py"), *FLAGS, "--trace-dir", "traces", *flags]
    ranks = Ranks(command, world_size=1, log=log, limit_s=LIMIT_S)
    try:
        assert ranks.wait(LIMIT_S) == [0], tail(log)
    finally:
        ranks.kill()
    return re.findall(r"lm loss: (\S+).*grad norm: (\S+)", log.read_text())


def total_ns(rank: RankTrace, column: int) -> list[int]:
    """Returns the sum of ``column`` over all iterations of ``rank``, for each of its layers."""
    steps = [rank.layers(iteration) for iteration in rank.iterations]
    return [sum(row[column] for row in rows) for rows in zip(*steps, strict=True)]


def fits(rank: RankTrace, iteration: int) -> None:
    """Checks that each layer of ``rank`` ran once per microbatch, within an action.

    Only ``iteration`` is checked.
    """
    rows = rank.layers(iteration)
    assert [row[0] for row in rows] == list(range(LAYERS))
    assert [row[3] for row in rows] == [MICROBATCHES] * LAYERS
    spans = rank.spans(iteration)
    for column, kind in ((1, "F"), (2, "B")):
        whole_ns = sum(span.duration_ns for span in spans if span.action == kind)
        of_layers = [row[column] for row in rows]
        assert min(of_layers) > 0
        assert sum(of_layers) <= whole_ns
        # The embedding, the output layer and the loss take little time in this model.
        assert sum(of_layers) > 0.2 * whole_ns


def has_kernels(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks that the trace in ``folder`` contains the operators of the second iteration.

    Together, the operators must not take longer than the actions that called them.
    """
    run = read_run(folder)
    (step,) = read_steps(run, 0)
    assert (step.iteration, step.device) == (2, "cpu")
    figures = kernel_figures(run, 2)
    spans = run.ranks[0].spans(2)
    for kind in ("F", "B"):
        whole_ms = sum(span.duration_ns for span in spans if span.action == kind) / 1e6
        of_kind = [figure for figure in figures if figure.action == kind]
        assert 0.2 * whole_ms < sum(figure.total_ms for figure in of_kind) <= whole_ms
        assert max(figure.count for figure in of_kind) >= LAYERS * MICROBATCHES
    page = [str(folder), "--format", "perfetto", "--output-dir", str(folder)]
    assert trace.main(page) == 0
    text = capsys.readouterr().out
    assert re.search(r"^ *aten::\w+ +0 +[FB] +\d+ +\d+\.\d\d ms", text, re.MULTILINE)
    (drawn,) = folder.glob("*.json.gz")
    with gzip.open(drawn, "rt") as file:
        events = json.load(file)["traceEvents"]
    assert {event["cat"] for event in events if event["name"].startswith("aten::")} == {"kernel"}
    assert trace.main([*page, "--iteration", "1"]) == 0
    assert "kernels were only recorded in iterations 2" in capsys.readouterr().out


@pytest.mark.long
def test_layers_fit_into_actions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = losses(tmp_path / "plain")
    assert len(plain) == 2
    assert losses(tmp_path / "layers", "--trace-detail", "layers") == plain
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    losses(tmp_path / "again", "--trace-detail", "layers", *recompute.split())
    for name in ("layers", "again"):
        (rank,) = read_run(tmp_path / name / "traces").ranks.values()
        for iteration in (1, 2):
            fits(rank, iteration)
    (rank,) = read_run(tmp_path / "plain" / "traces").ranks.values()
    assert rank.layers(1) == ()
    chosen = "--trace-detail kernels --profile-step-start 2 --profile-step-end 3"
    assert losses(tmp_path / "kernels", *chosen.split()) == plain
    has_kernels(tmp_path / "kernels" / "traces", capsys)

    folder = str(tmp_path / "layers" / "traces")
    page = ["--format", "html", "--output-dir", str(tmp_path)]
    assert trace.main([folder, *page]) == 0
    table = capsys.readouterr().out
    time = r"\d+\.\d\d ms"
    assert re.search(rf"^ +2 +0 +{time} +{time} +\d+\.\d% +0: {time}$", table, re.MULTILINE)
    assert trace.main([folder, *page, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["layer"] for row in report["layers"]] == [0, 1, 2]


def test_times_of_layers_are_those_measured_by_hand(tmp_path: Path) -> None:
    file = tmp_path / "sums.json"
    layers = "--hidden-size 256 --seq-length 256 --max-position-embeddings 256 --train-iters 4"
    flags = f"--trace-dir traces --trace-detail layers --split-backward False {layers}".split()
    ranks = Ranks(
        [str(HAND_TIMED), *FLAGS, *flags],
        world_size=1,
        log=tmp_path / "output.txt",
        limit_s=LIMIT_S,
        variables={"HAND_TIMED": str(file)},
    )
    try:
        assert ranks.wait(LIMIT_S) == [0], tail(tmp_path / "output.txt")
    finally:
        ranks.kill()
    (rank,) = read_run(tmp_path / "traces").ranks.values()
    sums = [by_hand for _, by_hand in sorted(json.loads(file.read_text()).items())]
    for column, kind in ((1, "forward"), (2, "backward")):
        expected = [by_hand[column - 1] for by_hand in sums]
        assert min(expected) > 0
        assert total_ns(rank, column) == pytest.approx(expected, rel=MOST_OFF), kind
