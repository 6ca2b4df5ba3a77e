"""A search on measured numbers gives the seconds that a prediction does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.adaptive.planner.cluster import Cluster, LinkSpeed, NodePool, NodeType
from megatron.adaptive.planner.cost import predict
from megatron.adaptive.planner.layers import make_estimator
from megatron.adaptive.planner.model_file import preset
from megatron.adaptive.planner.profile import Profile
from megatron.adaptive.planner.search import Searcher, SearchOptions


def test_measured_all_reduces_count_in_search_and_prediction_alike() -> None:
    node = NodeType(
        name="n", gpu="a100-40", gpus=2, memory_bytes=40e9, intra=LinkSpeed(bytes_per_s=300e9)
    )
    cluster = Cluster(
        groups=(NodePool(type=node, count=2),), network=LinkSpeed(bytes_per_s=10e9, shared=True)
    )
    model = preset("gpt2", "bf16")
    free = Profile(estimator=make_estimator(model))
    slow = replace(free, all_reduce={("n", 2): LinkSpeed(bytes_per_s=1e9, shared=False)})
    options = SearchOptions(dp=(2,), tp=(1,), micro_batch=(1,), recompute=("none",), top=3)

    def found(profile: Profile) -> list[tuple[float, float]]:
        searcher = Searcher(model, cluster, profile, global_batch=8, options=options)
        return [
            (one.seconds, predict(one.plan, model, cluster, profile).seconds)
            for one in searcher.search().found
        ]

    for profile in (free, slow):
        for searched_s, predicted_s in found(profile):
            assert searched_s == pytest.approx(predicted_s)
    assert found(slow)[0][0] > found(free)[0][0]
