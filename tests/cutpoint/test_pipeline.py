"""``Pipeline`` on four processes, against the whole model in one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.planner.model_file import read_model
from megatron.adaptive.planner.profile_file import load, make_profile
from megatron.adaptive.trace.messages import match_messages
from megatron.adaptive.trace.read import read_run

pytestmark = pytest.mark.multiprocess

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RANKS, LIMIT_S = 4, 240.0
WIDTH, WORDS = 8, 16


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank told, by rank; one job for all tests."""
    folder = tmp_path_factory.mktemp("pipeline")
    command = [sys.executable, "-m", "megatron.adaptive", "launch", "--standalone"]
    command += ["--nproc-per-node", str(RANKS), str(HERE / "worker.py"), str(folder)]
    done = subprocess.run(
        command,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "WATCHDOG_S": str(LIMIT_S),
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_S + 30,
    )
    told = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    errors = [one["error"] for one in told if "error" in one]
    assert not errors, errors[0]
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for one in told:
        one["folder"] = str(folder)
    return told


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


def test_without_sizes_the_planners_best_is_taken(results: list[dict[str, Any]]) -> None:
    shapes = []
    for one in results:
        found = one["automatic"]
        assert found["losses"] == pytest.approx(found["expected"], rel=1e-5)
        assert found["parameters"] < 1e-5
        size, replicas, micro_batch = found["shape"]
        assert size * replicas == RANKS
        assert 16 % (replicas * micro_batch) == 0
        assert [size, replicas, micro_batch, found["partition"]] == found["chosen"]
        assert found["seconds"] == sorted(found["seconds"])
        assert found["chosen"] not in found["others"]
        assert "predicted for a step of 16 samples; next best" in found["text"]
        assert found["links"] == [True] * len(found["links"]) != []
        assert found["reduced"] == [2, 4]
        shapes.append({**found, "replica": 0, "names": 0, "kept": 0, "parameters": 0})
    assert all(
        one["chosen"] == shapes[0]["chosen"] and one["text"] == shapes[0]["text"] for one in shapes
    )


def test_the_profile_of_the_job_plans_as_the_job_did(results: list[dict[str, Any]]) -> None:
    path = Path(results[0]["folder"]) / "profile.json"
    told = load(path)
    assert {row["kind"] for row in told["layers"]} == {f"cut-{n}" for n in range(9)}
    assert {row["micro_batch"] for row in told["layers"]} == {1, 2, 4}
    assert read_model(str(path)).num_layers == 9
    assert make_profile(told).all_reduce
    assert make_profile(told).intra_links


def test_memory_keeps_the_model_from_one_process(results: list[dict[str, Any]]) -> None:
    for one in results:
        small = one["automatic"]["small"]
        assert small["shape"][0] > 1
        assert small["shape"][1] == 1
        assert max(small["needed"]) <= small["limit"]
        assert small == results[0]["automatic"]["small"]


def test_what_is_given_is_kept(results: list[dict[str, Any]]) -> None:
    for one in results:
        assert one["automatic"]["kept"] == [2, [4, 5], 8]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("memory", ["fits into memory", "2e-06 GB", "more processes"]),
        ("batch", ["batch_size 0", "from 1 on"]),
        ("odd", ["6 samples", "4 processes", "pipeline_size 1", "multiple of 4"]),
        ("size", ["pipeline_size 3", "4 processes"]),
        ("schedule", ["'best'", "1f1b"]),
        ("unshared", ["words.weight", "shared_weights"]),
        ("sample", ["no entries"]),
    ],
)
def test_what_cannot_be_planned_is_named_on_every_rank(
    results: list[dict[str, Any]], name: str, words: list[str]
) -> None:
    for one in results:
        said = one["no_plan"][name]
        assert "\n" not in said
        for word in words:
            assert word in said, said


def test_training_goes_on_in_any_other_shape(results: list[dict[str, Any]]) -> None:
    for one in results:
        found = one["saved"]
        assert found["name"] == "step_00000003"
        for extra, evaluated, losses, steps in found["found"]:
            assert extra == {"epoch": 3}
            assert evaluated == pytest.approx(found["evaluated"], rel=1e-5)
            assert losses == pytest.approx(found["expected"], rel=1e-5)
            assert steps == 5
        assert found["found"] == results[0]["saved"]["found"]
        # Steps 3, 4 and 5 were saved; two stay, and nothing half-written does.
        assert found["kept"] == ["step_00000004", "step_00000005"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("optimizer", ["set_optimizer before load", "optimizer=False"]),
        ("step", ["no checkpoint of step 8", "3, 5"]),
        ("nothing", ["none", "no complete checkpoint"]),
        ("extra", ["extra", "JSON"]),
        ("keep", ["keep 0"]),
        ("file", [".metadata", "name another folder"]),
        ("kind", ["AdamW", "SGD"]),
        ("short", ["step_00000005", "bytes and has 0"]),
        ("broken", ["step_00000005", "loading failed", "rank 0"]),
        ("model", ["the checkpoint lacks it", "blocks.8"]),
    ],
)
def test_what_cannot_be_loaded_is_named_on_every_rank(
    results: list[dict[str, Any]], name: str, words: list[str]
) -> None:
    for one in results:
        said = one["saved"]["refused"][name]
        assert "\n" not in said
        for word in words:
            assert word in said, said


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
