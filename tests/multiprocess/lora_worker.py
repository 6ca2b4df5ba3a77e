"""Trains LoRA adapters in jobs of many shapes, and compares losses and gradients with PEFT's.

Usage: ``lora_worker.py FOLDER``, as ranks of a job. The file ``cases.json`` in this folder lists
models and flags. The folder of a model contains ``adapters`` in PEFT's format, and
``trained.safetensors``. This file contains the ``tokens`` of each microbatch, the loss of each
step, and the gradients of the first step by PEFT's names. Rank 0 prints the errors of the losses
and of the gradients, relative to the largest expected value.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

# This import provides modules that are missing on a machine without a GPU.
from worker import Meshes, connect  # isort: skip

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.utils import unwrap_model
from safetensors.torch import load_file

from megatron.adaptive.checkpoint import megatron_state
from megatron.adaptive.checkpoint.export import adapter_tensors
from megatron.adaptive.checkpoint.hugging_face_weights import (
    CoreTensor,
    core_tensors,
    hugging_face_shapes,
)
from megatron.adaptive.checkpoint.trainer_checkpoints import Checkpoints
from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.environment import Environment
from megatron.adaptive.config.hugging_face import load_config
from megatron.adaptive.gpt.lora import MARK
from megatron.adaptive.gpt.setup import Run, build_run
from megatron.adaptive.gpt.train_step import Step

BASE = "--micro-batch-size 1 --train-iters 9 --lr 1e-2 --lr-decay-style constant --mock-data"
BASE += " --attention-dropout 0 --hidden-dropout 0 --weight-decay 0.1 --clip-grad 0"
BASE += " --lora-dropout 0 --seq-length 12"


# A key consists of the name, the global shape and the offset of a gradient shard.
Shards = dict[tuple[str, tuple[int, ...], tuple[int, ...]], torch.Tensor]


def gap(actual: torch.Tensor, expected: torch.Tensor) -> float:
    scale = max(float(expected.abs().max()), 1e-30)
    return float((actual.double() - expected.double()).abs().max()) / scale


def shards_of_gradients(run: Run) -> Shards:
    """Returns this rank's gradient shards. The keys are name, global shape and offset."""
    trained = [
        weight for chunk in run.chunks for weight in chunk.parameters() if weight.requires_grad
    ]
    kept = [(weight, weight.data) for weight in trained]
    for parameter in trained:
        parameter.data = parameter.main_grad.clone()
    weights = megatron_state.sharded_model(run.chunks, megatron_state.METADATA)
    apply_factories(weights)
    kind = MARK if run.job.config.lora.is_on else ""
    shards = {
        (part.key, tuple(part.global_shape), tuple(part.global_offset)): part.data.detach().clone()[
            (None,) * part.prepend_axis_num
        ]
        for part in nested_values(weights)
        if isinstance(part, ShardedTensor) and kind in part.key
    }
    for parameter, data in kept:
        parameter.data = data
    return shards


def is_where_a_backward_ends(_module: Any, _given: Any, output: torch.Tensor) -> None:
    """Checks that ``output``, computed before the first adapter, requires no gradient."""
    assert not output.requires_grad


def joined(parts: list[Shards], core_parts: Mapping[str, CoreTensor]) -> dict[str, torch.Tensor]:
    """Assembles whole gradients from ``parts``, which contains the shards of each rank.

    Returns the gradients by Hugging Face name. ``core_parts`` maps the tensors of megatron-core to
    Hugging Face tensors.
    """
    whole: dict[str, torch.Tensor] = {}
    for part in parts:
        for (name, shape, offset), data in part.items():
            target = whole.setdefault(name, torch.full(shape, torch.nan))
            region = tuple(
                slice(start, start + n) for start, n in zip(offset, data.shape, strict=True)
            )
            target[region] = data
    tensors = {
        name: torch.full(shape, torch.nan)
        for name, shape in hugging_face_shapes(core_parts).items()
    }
    for name, our in core_parts.items():
        for row in our.rows:
            source = whole[name][row.expert] if our.experts else whole[name]
            target = tensors[row.name].t() if row.transposed else tensors[row.name]
            target[row.first : row.first + row.count] = source[row.row : row.row + row.count]
    return tensors


def microbatches(tokens: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Returns this replica's part of ``tokens [n, 1, length]``, as a list of microbatches."""
    replicas = parallel_state.get_data_parallel_world_size()
    length = tokens.shape[-1] - 1
    return [
        {
            "tokens": rows[:, :-1].contiguous(),
            "labels": rows[:, 1:].contiguous(),
            "position_ids": torch.arange(length)[None],
            "loss_mask": torch.ones(1, length),
        }
        for rows in tokens[parallel_state.get_data_parallel_rank() :: replicas]
    ]


def run_case(meshes: Meshes, case: dict[str, Any], folder: Path) -> None:
    model = folder / case["model"]
    expected = load_file(model / "trained.safetensors")
    tokens, losses = expected.pop("tokens"), expected.pop("losses")
    arguments = [*BASE.split(), "--load-hf", str(model), "--load-lora", str(model / "adapters")]
    # The trainer adds a token ID for the end of documents, so this size is smaller by one.
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    arguments += ["--vocab-size", str(vocabulary - 1), "--global-batch-size", str(len(tokens))]
    config = parse([*arguments, *case["flags"]], world_size=dist_size(), last_wins=True)
    job = meshes.join(config)
    run = build_run(job)
    Checkpoints(run).load()
    for model_part in map(unwrap_model, run.chunks):
        for name, parameter in model_part.named_parameters():
            assert parameter.requires_grad == (MARK in name), name
        if model_part.pre_process and config.recompute.recompute_granularity is None:
            model_part.embedding.register_forward_hook(is_where_a_backward_ends)
    batch = microbatches(tokens)
    step, seen, gradients = Step(run), [], []
    is_sharded = config.parallel.use_distributed_optimizer
    for iteration in range(1, len(losses) + 1):
        keep = lambda: gradients.append(shards_of_gradients(run))  # noqa: E731
        result = step.train(batch, len(batch), iteration, keep if not gradients else lambda: None)
        seen += [loss for name, loss in result.losses.items() if "mtp" not in name]
    parts = job.gather((seen, gradients[0]))
    family = load_config(model).family
    if dist.get_rank() == 0:
        pipeline_losses = next(torch.tensor(values) for values, _ in parts if values)
        line = f"{case['model']} {' '.join(case['flags'])}"
        print(f"LOSSES {gap(pipeline_losses, losses):.3e} {line}", flush=True)
        # If gradients are sharded, a replica has complete gradients only for its own shard.
        if not is_sharded:
            adapters = adapter_tensors(config, core_tensors(config, family))
            whole_gradients = joined([shards for _, shards in parts], adapters)
            assert whole_gradients.keys() == expected.keys()
            worst = max(
                (gap(whole_gradients[key], tensor), key) for key, tensor in expected.items()
            )
            print(f"GRADIENTS {worst[0]:.3e} {worst[1]} {line}", flush=True)
    meshes.leave(job, run)


def dist_size() -> int:
    return Environment.read().world_size


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    environment = Environment.read()
    meshes = Meshes(connect(environment), environment)
    for case in json.loads((folder / "cases.json").read_text()):
        run_case(meshes, case, folder)


if __name__ == "__main__":
    main()
