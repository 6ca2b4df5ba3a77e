"""Tries a rank, and prints how many of its parameters are in memory when layers are measured."""

from __future__ import annotations

import gc
import json
from typing import Any

import torch

from megatron.adaptive.training import try_rank

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --vocab-size 255"
)
PLAN = (
    "--pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 4 "
    "--pipeline-schedule 1f1b"
)


def count_parameters(*_: Any) -> dict[str, Any]:
    """Returns the number of parameters in memory, including unreachable ones in cycles."""
    parameters = [value for value in gc.get_objects() if isinstance(value, torch.nn.Parameter)]
    return {"parameters": len(parameters)}


def main() -> None:
    """Tries rank 0 of a pipeline with two ranks."""
    try_rank._measure_layers = count_parameters
    request = try_rank.TrialRequest(
        model_arguments=tuple(MODEL.split()),
        plan_arguments=tuple(PLAN.split()),
        world_size=2,
        rank=0,
        stage_work=(1.0, 1.0),
        needed_bytes=0.0,
        kinds=("transformer",),
        last="transformer",
    )
    print(json.dumps(try_rank.try_rank(request)[1]))


if __name__ == "__main__":
    main()
