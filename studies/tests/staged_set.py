"""Writes a small data set of staged runs in the format that the documentation describes."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LAYERS = ("embedding", "transformer", "transformer", "head")


def write_staged_set(folder: Path, plans: Sequence[dict[str, Any]]) -> None:
    """Writes files that describe a cluster, a model and the model's runs to ``folder``.

    The cluster has two nodes with one GPU each, and the model has four layers. ``plans`` contains
    the runs.
    """
    types = [{"gpu": "V100", "nodes": 2, "gpus_per_node": 1, "memory_bytes_per_gpu": 16e9}]
    links = [
        {
            "scope": scope,
            "from_gpu": "V100",
            "to_gpu": "V100",
            "pairs": 1,
            "log2_poly": [0.0, 0.0, 10.0],
        }
        for scope in ("intra_node", "inter_node")
    ]
    documents = {
        "measured_two.json": {"plans": [*plans]},
        "model.json": {
            "training": {"precision": "fp32", "gradient_bucket_elements": 5e7},
            "models": {"small": {"sequence_length": 128}},
        },
        "clusters.json": {"clusters": {"two": {"node_types": types}}},
        "network.json": {"links": links},
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document))
    _write(
        folder / "layer_memory.csv",
        [
            {
                "model": "small",
                "tp": 1,
                "layer_index": index,
                "layer_kind": kind,
                "parameters": 1000,
                "output_bytes": 4096,
                "activation_kept_bytes": 8192,
            }
            for index, kind in enumerate(LAYERS)
        ],
    )
    _write(
        folder / "profiles.csv",
        [
            {
                "model": "small",
                "gpu": "V100",
                "tp": 1,
                "microbatch_size": 1,
                "layer_index": index,
                "forward_s": 0.01,
                "backward_s": 0.02,
                "optimizer_step_s": 0.001,
            }
            for index in range(len(LAYERS))
        ],
    )


def staged_plan(measured_s: float, **more: Any) -> dict[str, Any]:
    """Returns a run with two stages and a measured step time of ``measured_s`` seconds."""
    return {
        "model": "small",
        "tp": 1,
        "dp": 1,
        "pp": 2,
        "microbatch_size": 1,
        "global_batch_size": 4,
        "partition": "2-2",
        "measured_s": measured_s,
        "stages": [{"replicas": [{"gpu": "V100", "tp": 1, "count": 1}]}] * 2,
        **more,
    }


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
