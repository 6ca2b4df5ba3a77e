"""``Pipeline`` on four processes, against the whole model in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.trace.messages import match_messages
from megatron.adaptive.trace.read import read_run

from .launched import run_programs

pytestmark = pytest.mark.multiprocess

WIDTH, WORDS = 8, 16


PROGRAMS = ("four_stages", "two_replicas", "dropout", "half", "trace", "refusals")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank told, by rank; one job for all tests."""
    return run_programs(tmp_path_factory.mktemp("pipeline"), PROGRAMS)


def test_training_is_that_of_the_whole_model(results: list[dict[str, Any]]) -> None:
    for one in results:
        found = one["four_stages"]
        assert found["losses"] == pytest.approx(found["expected"], rel=1e-5)
        assert found["parameters"] < 1e-5


def test_gradients_are_clipped_by_the_norm_of_the_whole_model(
    results: list[dict[str, Any]],
) -> None:
    for one in results:
        found, expected = one["four_stages"]["norms"]
        assert found == pytest.approx(expected, rel=1e-5)
        assert min(expected) > 0.05  # the limit was in force


def test_a_rank_keeps_the_parameters_of_its_stages_alone(results: list[dict[str, Any]]) -> None:
    kept = [one["four_stages"]["kept"] for one in results]
    names = [set(one["four_stages"]["names"]) for one in results]
    block = WIDTH * WIDTH + WIDTH
    shared = WORDS * WIDTH + block  # the embedding and the mixer, on the first and the last rank
    whole = 8 * block + shared + 2 * WIDTH
    assert sum(kept) == whole + shared
    assert "words.weight" in names[0] & names[3]
    assert not names[1] & names[2]


def test_evaluation_and_running_means(results: list[dict[str, Any]]) -> None:
    buffers: dict[str, float] = {}
    for one in results:
        found, expected = one["four_stages"]["evaluated"]
        assert found == pytest.approx(expected, rel=1e-5)
        buffers.update(one["four_stages"]["buffers"])
    assert len(buffers) == 3
    assert max(buffers.values()) < 1e-5


def test_replicas_train_on_their_own_samples(results: list[dict[str, Any]]) -> None:
    for one in results:
        found = one["two_replicas"]
        assert found["losses"] == pytest.approx(found["expected"], rel=1e-5)
        assert found["parameters"] < 1e-5


def test_dropout_does_not_depend_on_the_cut(results: list[dict[str, Any]]) -> None:
    for one in results:
        first, *others = one["dropout"]["losses"]
        for other in others:
            assert other == pytest.approx(first, rel=1e-6)
        assert first[0] != pytest.approx(one["dropout"]["without"], rel=1e-6)


def test_fp16_skips_steps_until_the_scale_fits(results: list[dict[str, Any]]) -> None:
    for one in results:
        found = one["half"]
        overflows = [overflow for _, overflow in found["told"]]
        count = sum(overflows)
        assert 0 < count < len(overflows)
        assert overflows == sorted(overflows, reverse=True)
        assert found["unchanged"]
        assert found["scales"][count - 1 :] == [2.0 ** (24 - count)] * (len(overflows) - count + 1)
        losses = [loss for loss, _ in found["told"]]
        assert losses[0] == pytest.approx(found["full"][0], rel=1e-2)
        assert losses[-1] < losses[0]
        assert found == results[0]["half"]


def test_bf16_trains(results: list[dict[str, Any]]) -> None:
    losses = results[0]["half"]["bf16"]
    assert losses == sorted(losses, reverse=True)


def test_steps_are_traced(results: list[dict[str, Any]]) -> None:
    run = read_run(Path(results[0]["folder"]) / "traces")
    assert run.iterations == run.complete_iterations() == (1, 2)
    for rank in run.ranks.values():
        table = rank.table([2])
        for kind in ("reduce", "optimizer", "step"):
            assert table.where(kind).sum() == 1, kind
        assert table.where("F").sum() == table.where("B").sum() == 4
    found = match_messages({rank: trace.table() for rank, trace in run.ranks.items()})
    assert len(found) == 2 * 3 * 4 * 2  # steps, borders, microbatches, both ways


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("stages", ["8 cut points make 9 segments", "12 stages", "at least 11"]),
        ("shared", ["words.weight", "head.weight", "cuts.0", "shared_weights"]),
        ("size", ["pipeline_size 3", "4 processes"]),
        ("partition", ["1-1-1", "9 segments", "4 stages"]),
        ("weights", ["1 weights", "9 segments"]),
        ("schedule", ["'best'", "1f1b"]),
        ("chunks", ["chunks 2", "1f1b"]),
        ("precision", ["'fp8'", "bf16"]),
        ("split", ["split_backward=True", "1f1b"]),
        ("batch", ["3 samples", "microbatches of 2"]),
        ("keys", ["the batch lacks 'label'"]),
        ("dictionary", ["a Tensor", "dictionary"]),
        ("shape", ["batch['ids']", "[7]", "[5]"]),
        ("optimizer", ["not of this process's stages", "pipeline.parameters()"]),
        ("loss", ["False"]),
    ],
)
def test_what_is_wrong_is_named_on_every_rank(
    results: list[dict[str, Any]], name: str, words: list[str]
) -> None:
    for one in results:
        said = one["refusals"][name]
        assert "\n" not in said
        for word in words:
            assert word in said, said
