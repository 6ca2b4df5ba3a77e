"""A large search: GPT-3 175B on 1,024 GPUs of four types.

Durations are arithmetic: operations over half of what the vendors state for 16-bit matrices.
"""

from __future__ import annotations

import time
from typing import Any

from megatron.adaptive.planner.cluster import Cluster, LinkSpeed, NodeGroup, NodeType
from megatron.adaptive.planner.model import LayerKind, Model
from megatron.adaptive.planner.profile import LayerTimes, Profile
from megatron.adaptive.planner.search import SearchOptions, search

__all__ = ["gpt3", "mixed_cluster", "profile_of", "rows"]

_GPUS = {
    # Dense 16-bit FLOP/s, bytes of memory, bytes per second to a neighbour: the vendors' figures.
    "H100": (989e12, 80e9, 450e9),
    "A100": (312e12, 80e9, 300e9),
    "V100": (125e12, 32e9, 150e9),
    "A10": (125e12, 24e9, 32e9),
}
_EFFICIENCY = 0.5


def gpt3(layers: int = 96, hidden: int = 12288, heads: int = 96) -> Model:
    """GPT-3 with sequences of 2,048 and a vocabulary of 51,200."""
    length, vocabulary = 2048, 51200
    tokens = float(length * hidden)
    table = float(vocabulary * hidden)
    transformer = LayerKind(
        name="transformer",
        parameters=12.0 * hidden * hidden,
        replicated_parameters=13.0 * hidden,
        output_elements=tokens,
        forward_flops=24.0 * tokens * hidden + 4.0 * length * tokens,
        attention_flops=4.0 * length * tokens,
        activation_bytes=24 * tokens + 5.0 * heads * length * length,
        replicated_activation_bytes=10 * tokens,
        attention_bytes=5.0 * heads * length * length,
        input_bytes=2 * tokens,
        tp_bytes=4 * tokens,
    )
    embedding = LayerKind(
        name="embedding",
        parameters=table,
        output_elements=tokens,
        activation_bytes=tokens,
        tp_bytes=2 * tokens,
        counted=False,
    )
    head = LayerKind(
        name="head",
        parameters=table,
        forward_flops=2.0 * tokens * vocabulary,
        activation_bytes=4 * tokens + 4.0 * length * vocabulary,
        counted=False,
    )
    return Model(
        name="GPT-3 175B",
        kinds={kind.name: kind for kind in (embedding, transformer, head)},
        layers=("embedding", *["transformer"] * layers, "head"),
        tokens_per_sample=length,
        tied_parameters=table,
        tied_layers=(0, layers + 1),
        max_tp=heads,
    )


def mixed_cluster(nodes: int = 32) -> Cluster:
    """So many nodes of eight GPUs of each type, with 100 Gb/s each."""
    groups = tuple(
        NodeGroup(
            type=NodeType(
                name=name,
                gpu=name,
                gpus=8,
                memory_bytes=memory,
                intra=LinkSpeed(bytes_per_s=link, shared=False, latency_s=5e-6),
            ),
            count=nodes,
        )
        for name, (_, memory, link) in _GPUS.items()
    )
    return Cluster(groups=groups, network=LinkSpeed(bytes_per_s=12.5e9, latency_s=2e-5))


def profile_of(model: Model, micro_batches: tuple[int, ...] = (1, 2, 4)) -> Profile:
    """Durations by arithmetic."""
    layers = {}
    for name, (flops, _, _) in _GPUS.items():
        for kind in model.kinds.values():
            for tp in (1, 2, 4, 8):
                for size in micro_batches:
                    once = kind.forward_flops * size / tp / flops / _EFFICIENCY
                    layers[kind.name, name, tp, size] = LayerTimes(
                        forward_s=once,
                        backward_input_s=once,
                        backward_weight_s=once,
                        source="estimated",
                    )
    return Profile(layers=layers, model=model.name)


def rows(quick: bool = False) -> list[dict[str, Any]]:
    """CPU seconds and gap of the search; the short form has a quarter of the nodes."""
    model = gpt3()
    nodes = 8 if quick else 32
    options = SearchOptions(micro_batch=(1, 2, 4))
    began = time.process_time()
    found = search(
        model, mixed_cluster(nodes), profile_of(model), global_batch=1536, options=options
    )
    taken = time.process_time() - began
    what = f"GPT-3 175B on {4 * 8 * nodes} GPUs of 4 types"
    best = found.found[0]
    return [
        {
            "what": f"{what}: CPU seconds of the search",
            "value": taken,
            "goal": "<= 60",
            "met": taken <= 60,
            "note": f"{best.seconds:.2f} s a step, gap {found.gap:.1%}",
        }
    ]
