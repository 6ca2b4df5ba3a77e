"""Tests layer times that the planner estimates from the data sheets of GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron.adaptive.config.model import MODELS
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cluster import Cluster, LinkSpeed, NodePool, NodeType, make_cluster
from megatron.adaptive.planner.layer_costs import (
    MATRIX_SHARE,
    layer_table,
    make_estimator,
    stage_memory,
)
from megatron.adaptive.planner.link_costs import boundary_s
from megatron.adaptive.planner.model_description import RECOMPUTE
from megatron.adaptive.planner.model_file import arguments_model, preset
from megatron.adaptive.planner.plan import Replica, StagePlace, StageSettings
from megatron.adaptive.planner.profile import PlanInputs
from megatron.adaptive.planner.propose import complete_profile


def test_a_part_without_bfloat16_is_refused_for_it() -> None:
    estimate = make_estimator(preset("gpt2-medium", "bf16"))
    with pytest.raises(ConfigError, match="v100-16 does not support bf16"):
        estimate("transformer", "V100", 1, 1)


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_a_repeated_layer_has_room_and_sequence_parallelism_divides_all(recompute: str) -> None:
    model = preset("gpt3-175b", "fp16", attention="unfused")
    node = NodeType(
        name="n", gpu="a100-80", gpus=8, memory_bytes=8e10, intra=LinkSpeed(bytes_per_s=3e11)
    )
    cluster = Cluster(groups=(NodePool(type=node, count=1),))
    inputs = PlanInputs(model, cluster, complete_profile(None, model, cluster))
    layer = model.kinds["transformer"]
    tables = [
        layer_table(inputs, cluster.nodes[0], tp=8, micro_batch=2, settings=settings)
        for settings in (
            StageSettings(recompute=recompute, sequence_parallel=on) for on in (False, True)
        )
    ]
    for table, on in zip(tables, (False, True), strict=True):
        # The backward pass recomputes the activations that were not stored. Therefore, all
        # activations of one layer need memory at the same time.
        both = table.kept_bytes[1] + table.workspace_bytes[1]
        assert both >= 2 * (layer.kept_bytes(8, sequence_parallel=on) + layer.workspace_bytes / 8)
        # The head must not be recomputed.
        assert table.kept_bytes[-1] >= 2 * model.kinds["head"].activation_bytes / 8
    assert tables[1].kept_bytes[1] < tables[0].kept_bytes[1]
    assert tables[1].backward_s[1] == pytest.approx(tables[0].backward_s[1])


def test_estimates_are_near_what_others_measured() -> None:
    """Checks that estimated times of a layer of OPT-350M are close to published measurements.

    The measurements are from Sailor (SOSP 2025), for 2,048 tokens in fp32.
    """
    model = arguments_model(
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 "
        "--max-position-embeddings 2048 --vocab-size 50304".split(),
        "opt-350m",
        attention="unfused",
    )
    estimate = make_estimator(model)
    measured = {
        ("transformer", "RTX-2080-Ti"): (0.0081, 0.0216),
        ("transformer", "RTX-3090"): (0.0044, 0.0120),
        ("transformer", "Titan-RTX"): (0.0077, 0.0203),
        ("head", "RTX-3090"): (0.0099, 0.0134),
    }
    for (kind, gpu), (forward_s, backward_s) in measured.items():
        times = estimate(kind, gpu, 1, 1)
        assert times.source == "estimated"
        assert times.forward_s == pytest.approx(forward_s, rel=0.35)
        assert times.backward_s == pytest.approx(backward_s, rel=0.5)


def test_messages_between_stages_take_the_link_of_the_island_that_holds_both() -> None:
    document = {
        "format": 1,
        "nodes": [
            {"type": "other", "gpu": "A100-40", "count": 1, "gpus_per_node": 8},
            {
                "gpu": "H100-80",
                "count": 12,
                "gpus_per_node": 8,
                "link": {"bandwidth": "32 GB/s", "latency": "8 us"},
                "islands": [
                    {"gpus": 4, "bandwidth": "400 GB/s", "latency": "3 us"},
                    {"nodes": 2, "bandwidth": "400 Gbit/s", "latency": "5 us"},
                    {
                        "nodes": 6,
                        "bandwidth": "400 Gbit/s",
                        "latency": "9 us",
                        "oversubscription": 4,
                    },
                ],
            },
        ],
        "network": {"bandwidth": "10 Gbit/s", "latency": "40 us"},
    }
    document["nodes"][0]["link"] = {"bandwidth": "300 GB/s"}
    cluster = make_cluster(document, "cluster", {})
    model = preset("gpt2")
    inputs = PlanInputs(model, cluster, complete_profile(None, model, cluster))

    def sent(sender: list[tuple[int, int]], receiver: list[tuple[int, int]]) -> Any:
        ends = [
            StagePlace(replicas=tuple(Replica(node=n, gpu=g, tp=1) for n, g in each), micro_batch=1)
            for each in (sender, receiver)
        ]
        return pytest.approx(boundary_s(*ends, inputs, 1e6))

    # The two GPUs of these six cases are in the same part of a node, in one node, below the same
    # leaf switch, in one pod with a quarter of the bandwidth, in two pods, and of two types.
    assert sent([(1, 0)], [(1, 3)]) == (3e-6, 1e6 / 400e9)
    assert sent([(1, 3)], [(1, 4)]) == (8e-6, 1e6 / 32e9)
    assert sent([(1, 0)], [(2, 5)]) == (5e-6, 1e6 / 50e9)
    assert sent([(2, 0)], [(3, 0)]) == (9e-6, 1e6 / 12.5e9)
    assert sent([(6, 0)], [(7, 0)]) == (40e-6, 1e6 / 1.25e9)
    assert sent([(0, 0)], [(1, 0)]) == (40e-6, 1e6 / 1.25e9)
    # The slowest replica determines the time. Replicas on the same node share its network link.
    assert sent([(1, 0), (2, 0)], [(2, 1), (3, 0)]) == (9e-6, 1e6 / 12.5e9)
    assert sent([(1, 0), (1, 1)], [(2, 0), (2, 1)]) == (5e-6, 2e6 / 50e9)


def test_weights_in_fp8_are_kept_twice_more_and_products_take_half_as_long() -> None:
    model = preset("gpt3-6.7b", "bf16", attention="fused")
    small = replace(model, precision=model.precision.with_fp8())
    whole, half = (
        make_estimator(described)("transformer", "h100", 1, 4) for described in (model, small)
    )
    saved = whole.backward_weight_s - half.backward_weight_s
    kind = model.kinds["transformer"]
    linear_s = 4 * (kind.forward_flops - kind.attention_flops) / (989.5e12 * MATRIX_SHARE)
    assert saved == pytest.approx(linear_s / 2)
    heads = [
        make_estimator(described)("head", "h100", 1, 4).forward_s for described in (model, small)
    ]
    assert heads[0] == heads[1]
    sizes = {"kept_bytes": 0.0, "held": 1.0, "workspace_bytes": 0.0, "dp": 1, "limit_bytes": 1.0}
    held = [
        stage_memory(described, parameters=1e9, **sizes).parameter_bytes
        for described in (model, small)
    ]
    assert held == [2e9, 4e9]


def test_weight_gradients_of_logits_are_part_of_b() -> None:
    model = preset("gpt3-6.7b", "bf16", attention="fused")
    assert model.kinds["head"].output_flops == model.kinds["head"].forward_flops
    deferred = replace(
        model, kinds={**model.kinds, "head": replace(model.kinds["head"], output_flops=0.0)}
    )
    now, before = (
        make_estimator(described)("head", "h100", 1, 4) for described in (model, deferred)
    )
    assert now.backward_weight_s < 0.01 * before.backward_weight_s
    assert now.backward_s == pytest.approx(before.backward_s, rel=0.01)
    assert now.forward_s == before.forward_s


def test_own_kernels_gather_the_parts_of_a_sequence_that_a_ring_would_pass_on() -> None:
    arguments = f"{MODELS['llama3-8b'].replace('8192', '65536')} --num-layers 4".split()
    node = NodeType(
        name="n", gpu="h100-80", gpus=8, memory_bytes=80e9, intra=LinkSpeed(bytes_per_s=1e10)
    )
    cluster = Cluster(groups=(NodePool(type=node, count=1),), network=LinkSpeed(bytes_per_s=5e10))
    tables = {}
    for attention in ("fused", "kernel"):
        model = arguments_model(arguments, "long", "bf16", attention=attention)
        inputs = PlanInputs(model, cluster, complete_profile(None, model, cluster))
        shared = StageSettings(context_ranks=4)
        tables[attention] = layer_table(inputs, node, tp=1, micro_batch=1, settings=shared)
    ring, gathered = (tables[name] for name in ("fused", "kernel"))
    # Three quarters of the keys belong to other ranks. Without a ring, a rank waits for all of them
    # and stores them.
    part = model.kinds["transformer"].context_bytes / 4
    kept = gathered.kept_bytes[1] - ring.kept_bytes[1]
    assert kept == pytest.approx(3 * part)
    assert gathered.forward_s[1] > ring.forward_s[1]
