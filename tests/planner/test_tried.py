"""Tests that profiles fitted to measured ranks predict the same measurements."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.adaptive.planner import profile_file
from megatron.adaptive.planner.cost import StageSums, predict
from megatron.adaptive.planner.layer_costs import OURS
from megatron.adaptive.planner.model_file import read_model
from megatron.adaptive.planner.plan import Plan
from megatron.adaptive.planner.profile import PlanInputs
from megatron.adaptive.planner.tried import (
    TriedRank,
    cluster_of,
    fit_profile,
    most_bytes,
    needed_bytes,
    plan_of,
    predicted_step_s,
)

MODEL = read_model(
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16"
    " --max-position-embeddings 16 --vocab-size 100",
    "fp32",
    attention="unfused",
)
CONTENT: dict[str, Any] = {
    "degrees": {"tensor": 1, "pipeline": 2, "data": 1},
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "schedule": "1f1b",
}
CLUSTER = cluster_of(CONTENT, "cpu")


def measured_alone() -> dict[str, Any]:
    """Returns a profile in which an embedding takes 1 s, a layer 2 s, and the head 3 s per pass."""
    rows = [
        {
            "kind": kind,
            "gpu": "cpu",
            "tp": 1,
            "micro_batch": 1,
            "tp_included": False,
            "forward_s": seconds,
            "backward_input_s": seconds,
            "backward_weight_s": seconds,
        }
        for kind, seconds in (("embedding", 1.0), ("transformer", 2.0), ("head", 3.0))
    ]
    nodes = {"cpu": {"gpu": "cpu", "context_bytes": 1e6, "allocator_share": 0.0}}
    return profile_file.document({"name": "", "arguments": []}, rows, nodes=nodes)


def rank(**changes: Any) -> TriedRank:
    """Returns measurements of the first rank, which is twice as slow as in the profile."""
    values: dict[str, Any] = {
        "rank": 0,
        "pp_rank": 0,
        "device": "cpu",
        "memory_bytes": 10**9,
        "busy_s": 80.0,
        "optimizer_s": 0.5,
        "beside_s": 0.25,
        "sigma": 0.0,
        "forward_s": [10.0],
        "backward_s": [10.0],
        "weight_s": [0.0],
    }
    return TriedRank(**{**values, **changes})


def fitted(plan: Plan, *ranks: TriedRank) -> tuple[dict[str, Any], StageSums]:
    document = fit_profile(plan, MODEL, CLUSTER, measured_alone(), ranks, {})
    inputs = PlanInputs(MODEL, CLUSTER, profile_file.make_profile(document))
    return document, StageSums.of(plan, inputs, OURS)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_tried_rank_is_predicted_as_it_was_measured(recompute: str) -> None:
    plan = plan_of({**CONTENT, "recompute": recompute}, MODEL, CLUSTER, "plan")
    backward_s = 10.0 if recompute == "none" else 20.0
    _, stages = fitted(plan, rank(backward_s=[backward_s]))
    assert stages.durations_s[0, 0] == pytest.approx(10.0)
    assert stages.durations_s[1:, 0].sum() == pytest.approx(backward_s)
    assert stages.optimizer_s[0] == pytest.approx(0.5)
    assert stages.memory[0].total_bytes == pytest.approx(1e9)
    # The other rank was not measured. It is predicted to be slower by the same factor as the first.
    assert stages.durations_s[0, 1] == pytest.approx(14.0)


def test_weight_gradients_that_are_separate_actions_are_fitted_alone() -> None:
    plan = plan_of({**CONTENT, "schedule": "zb-h1"}, MODEL, CLUSTER, "plan")
    _, stages = fitted(plan, rank(backward_s=[6.0], weight_s=[9.0]))
    assert stages.durations_s[:, 0] == pytest.approx([10.0, 6.0, 9.0])


def test_the_step_is_that_of_the_pipeline_with_the_measured_times() -> None:
    plan = plan_of(CONTENT, MODEL, CLUSTER, "plan")
    document, _ = fitted(plan, rank())
    inputs = PlanInputs(MODEL, CLUSTER, profile_file.make_profile(document))
    seconds = predicted_step_s(plan, MODEL, CLUSTER, document)
    assert seconds == pytest.approx(predict(plan, inputs).seconds)
    # The last rank runs 4 microbatches without pauses. Before and after this, the first rank runs a
    # forward pass and a backward pass.
    assert seconds == pytest.approx(4 * 28.0 + 20.0 + 0.5 + 0.25, rel=0.01)


LINKS: dict[str, Any] = {
    "links": [
        {
            "nodes": ["cpu", "cpu"],
            "within": True,
            "pairs": 1,
            "latency_s": 0.5,
            "sizes": [[2048, 1e12]],
        }
    ],
    "all_reduce": [{"node": "cpu", "ranks": 2, "latency_s": 7.0, "sizes": [[2048, 1e12]]}],
}


@pytest.mark.parametrize("tensor", [1, 2])
def test_measured_links_lengthen_the_step_and_change_no_layer(tensor: int) -> None:
    """Checks that measured links add the times of messages and of the embeddings' reduction."""
    content = {**CONTENT, "degrees": {"tensor": tensor, "pipeline": 2, "data": 1}}
    cluster = cluster_of(content, "cpu")
    plan = plan_of(content, MODEL, cluster, "plan")
    alone = measured_alone()
    for row in alone["layers"]:
        row["tp"] = tensor
    without, with_links = (
        fit_profile(plan, MODEL, cluster, alone, [rank()], links) for links in ({}, LINKS)
    )
    assert with_links["layers"] == without["layers"]
    assert with_links["nodes"] == without["nodes"]
    added_s = predicted_step_s(plan, MODEL, cluster, with_links) - predicted_step_s(
        plan, MODEL, cluster, without
    )
    if tensor == 1:
        # One forward message, one backward message and the reduction of the tied embeddings cannot
        # be hidden in a step.
        assert added_s == pytest.approx(0.5 + 0.5 + 7.0, rel=0.01)
    else:  # Tensor-parallel ranks also need the links for all-reduces in each layer.
        assert added_s > 20.0


def test_the_largest_message_is_that_of_a_stage_or_of_tied_embeddings() -> None:
    plan = plan_of(CONTENT, MODEL, CLUSTER, "plan")
    assert most_bytes(plan, MODEL) == MODEL.tied_parameters * 4 > 32 * 128 * 3
    larger = plan_of({**CONTENT, "micro_batch_size": 64}, MODEL, CLUSTER, "plan")
    assert most_bytes(larger, MODEL) == 64 * 16 * 32 * 4


def test_needed_memory_counts_weights_without_any_measured_time() -> None:
    plan = plan_of(CONTENT, MODEL, CLUSTER, "plan")
    first, last = needed_bytes(plan, MODEL, CLUSTER)
    assert min(first, last) > 16 * MODEL.parameters / 2 * 0.5
