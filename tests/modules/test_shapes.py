"""Shapes that the planner chooses, and checkpoints that go from one shape to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.planner.model_file import read_model
from megatron.adaptive.planner.profile_file import load, make_profile

from .launched import RANKS, run_programs

pytestmark = pytest.mark.multiprocess


PROGRAMS = ("automatic", "no_plan", "saved", "disks")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank told, by rank; one job for all tests."""
    return run_programs(tmp_path_factory.mktemp("shapes"), PROGRAMS)


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
        assert found["split"] == pytest.approx(found["expected"][:1], rel=1e-5)
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
        ("short", ["step_00000005", "has 0 bytes and was written with"]),
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


def test_checkpoints_go_over_the_nodes_own_disks(results: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(results):
        found = one["disks"]
        assert found["steps"] == ["iter_0000004", "iter_0000005"]
        assert found["parts"] == [f"__{rank}_0.distcp"]
        assert found["shared"] == ["step_00000004", "step_00000005"]
        losses = found["begun"] | found["near"] | found["apart"]
        assert [int(step) for step in losses] == list(range(7))
        assert list(losses.values()) == pytest.approx(found["whole"], rel=1e-6)
