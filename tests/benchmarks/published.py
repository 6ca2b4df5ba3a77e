"""Small data sets in the form of the published ones, for tests without those."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WIDE_S, GPT_S = 0.002, 0.005


def write_amp(folder: Path, measured: list[str]) -> Path:
    """GPT-2 of two layers on two nodes of two T4.

    Args:
        folder: made if it is missing.
        measured: lines of ``measured_homogeneous.csv``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = ["model,gpu,tp,layer_index,layer_kind,forward_s"]
    for tp, wide, transformer in ((1, WIDE_S, GPT_S), (2, WIDE_S, 0.0045)):
        rows.append(f"transgan,V100,{tp},0,transformer_wide,{wide}")
        kinds = (("embedding", 1e-4), ("transformer", transformer), ("transformer", transformer))
        kinds += (("head", 1e-3),)
        rows += [f"gpt2,T4,{tp},{i},{kind},{s}" for i, (kind, s) in enumerate(kinds)]
    _write(folder / "layer_times.csv", rows)
    head = "amp_rank,microbatch_size,tp,dp,pp,num_microbatches,partition,amp_predicted_s,measured_s"
    _write(folder / "measured_homogeneous.csv", [f"{head},status", *measured])
    node = {
        "gpu": "T4",
        "instance": "node",
        "gpus_per_node": 2,
        "inter_node_bits_per_s": 1e10,
        "intra_node_bits_per_s": 5e10,
        "memory_gb_per_gpu": 16,
    }
    _dump(folder / "cluster.json", {"clusters": {"homogeneous": {"nodes": [node, node]}}})
    gpt2 = {
        "sequence_length": 8,
        "global_batch_size": 8,
        "parameters_per_layer": {
            "transformer": 1000,
            "embedding": 500,
            "head": "tied to embedding",
        },
        "boundary_activation_elements_per_sample": {
            "embedding": 1000,
            "transformer": 1000,
            "head": "many",
        },
    }
    _dump(folder / "model.json", {"models": {"gpt2": gpt2}})
    return folder


def write_sailor(folder: Path, plans: list[dict[str, Any]]) -> Path:
    """A model of four layers, two of them empty, on a node of 3090 and one of 2080.

    Args:
        folder: made if it is missing.
        plans: of ``measured_mit.json``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    memory = ["tp,layer_index,layer_kind,parameters,output_bytes,activation_kept_bytes"]
    memory += ["1,0,embedding,1000,4e6,1e9", "1,1,x,0,4e6,0", "1,2,x,0,4e6,0"]
    memory += ["1,3,head,1000,4e6,2e9", "2,0,embedding,600,4e6,6e8", "2,1,x,0,4e6,0"]
    memory += ["2,2,x,0,4e6,0", "2,3,head,500,4e6,1e9"]
    _write(folder / "layer_memory.csv", memory)
    head = "gpu,tp,microbatch_size,layer_index,layer_kind,forward_s,backward_s,optimizer_step_s"
    rows = [head]
    for gpu, factor in (("RTX-3090", 1), ("RTX-2080", 2)):
        for tp in (1, 2):
            took = f"{0.1 * factor / tp},{0.2 * factor / tp}"
            rows += [f"{gpu},{tp},1,{i},x,{took if i in (0, 3) else '0,0'},0.01" for i in range(4)]
    _write(folder / "profiles.csv", rows)
    types = [
        {"gpu": gpu, "nodes": 1, "gpus_per_node": 2, "memory_bytes_per_gpu": 2.4e10}
        for gpu in ("RTX-3090", "RTX-2080")
    ]
    _dump(folder / "clusters.json", {"clusters": {"mit": {"node_types": types}}})
    links = [
        _link(gpu, gpu, scope) for gpu in ("RTX-3090", "RTX-2080") for scope in ("intra", "inter")
    ]
    links.append(_link("RTX-3090", "RTX-2080", "inter"))
    links.append({**_link("RTX-3090", "RTX-2080", "inter", 1e-3), "pairs": 2, "doubt": "slow"})
    _dump(folder / "network.json", {"links": links})
    _dump(folder / "model.json", {"models": {"OPT-350": {"sequence_length": 8}}})
    _dump(folder / "measured_mit.json", {"plans": plans})
    return folder


def sailor_plan(name: str, **changes: Any) -> dict[str, Any]:
    """Two stages, one on each node."""
    stages = [
        {"replicas": [{"gpu": "RTX-3090", "tp": 1, "count": 1}]},
        {"replicas": [{"gpu": "RTX-2080", "tp": 1, "count": 1}]},
    ]
    plan = {"id": name, "pp": 2, "dp": 1, "tp": 1, "microbatch_size": 1, "global_batch_size": 4}
    plan |= {"partition": "2-2", "stages": stages, "measured_s": 3.0, "doubts": []}
    return {**plan, "peak_memory_bytes": 5e9, **changes}


def _link(one: str, other: str, scope: str, gb_per_s: float = 1.0) -> dict[str, Any]:
    poly = [0.0, 0.0, gb_per_s]
    return {
        "scope": f"{scope}_node",
        "from_gpu": one,
        "to_gpu": other,
        "pairs": 1,
        "log2_poly": poly,
    }


def _write(path: Path, lines: list[str]) -> None:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
