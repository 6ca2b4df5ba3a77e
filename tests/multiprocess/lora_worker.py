"""Ranks that train adapters in many shapes and compare losses and gradients with those of PEFT.

Usage: ``lora_worker.py FOLDER``. ``cases.json`` there lists models and flags. In a model's folder
lie ``adapters`` as PEFT saved them, and ``trained.safetensors``: the ``tokens`` of each microbatch,
the loss of each step, and the first step's gradients by PEFT's names. Rank 0 prints how far off
both are, relative to the largest number among those expected.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from worker import Meshes, connect  # isort: skip  # it installs what a machine without GPU lacks

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    apply_factories,
)
from megatron.core.utils import unwrap_model
from safetensors.torch import load_file

from megatron.adaptive.checkpoint import state
from megatron.adaptive.checkpoint.export import adapter_tensors
from megatron.adaptive.checkpoint.hugging_face import our_tensors
from megatron.adaptive.checkpoint.training import Checkpoints
from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.environment import Environment
from megatron.adaptive.gpt.lora import MARK
from megatron.adaptive.gpt.setup import Run, build_run
from megatron.adaptive.gpt.step import Step

BASE = "--micro-batch-size 1 --train-iters 9 --lr 1e-2 --lr-decay-style constant --mock-data"
BASE += " --attention-dropout 0 --hidden-dropout 0 --weight-decay 0.1 --clip-grad 0"
BASE += " --lora-dropout 0 --seq-length 12"


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    scale = max(float(expected.abs().max()), 1e-30)
    return float((found.double() - expected.double()).abs().max()) / scale


def shards_of_gradients(run: Run) -> dict[tuple[str, tuple[int, ...]], torch.Tensor]:
    """Returns the gradients of this rank's adapters by name and place in the whole."""
    models = [unwrap_model(chunk) for chunk in run.chunks]
    kept = []
    for model in models:
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad == (MARK in name), name
            kept.append((parameter, parameter.data))
            if parameter.requires_grad:
                parameter.data = parameter.main_grad.clone()
    weights = state.sharded_model(run.chunks, state.METADATA)
    apply_factories(weights)
    found = {
        (one.key, tuple(one.global_offset)): one.data.detach().clone()
        for one in nested_values(weights)
        if isinstance(one, ShardedTensor) and MARK in one.key
    }
    for parameter, data in kept:
        parameter.data = data
    return found


def is_where_a_backward_ends(_module: Any, _given: Any, output: torch.Tensor) -> None:
    """Checks that nothing asks for gradients before the first adapter."""
    assert not output.requires_grad


def joined(run: Run, parts: list[Any], model_type: str) -> dict[str, torch.Tensor]:
    """Puts gradients of all ranks together under PEFT's names."""
    config = run.job.config
    found: dict[str, torch.Tensor] = {}
    whole: dict[str, torch.Tensor] = {}
    ours = adapter_tensors(config, our_tensors(config, model_type))
    for part in parts:
        for (name, offset), data in part.items():
            target = whole.setdefault(name, torch.full(ours[name].shape, torch.nan))
            place = tuple(slice(at, at + n) for at, n in zip(offset, data.shape, strict=True))
            target[place] = data
    for name, our in ours.items():
        for one in our.rows:
            rows = whole[name][one.at : one.at + one.count]
            height = max(r.first + r.count for r in our.rows if r.name == one.name)
            target = found.setdefault(one.name, torch.full((height, our.columns), torch.nan))
            target[one.first : one.first + one.count] = rows
    return found


def run_case(meshes: Meshes, case: dict[str, Any], folder: Path) -> None:
    model = folder / case["model"]
    expected = load_file(model / "trained.safetensors")
    tokens, losses = expected.pop("tokens"), expected.pop("losses")
    words = [*BASE.split(), "--load-hf", str(model), "--load-lora", str(model / "adapters")]
    # One more id comes on top, for the end of documents.
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    words += ["--vocab-size", str(vocabulary - 1), "--global-batch-size", str(len(tokens))]
    config = parse([*words, *case["flags"]], world_size=dist_size(), last_wins=True)
    job = meshes.join(config)
    run = build_run(job)
    Checkpoints(run).load()
    for model_part in map(unwrap_model, run.chunks):
        if model_part.pre_process and config.recompute.recompute_granularity is None:
            model_part.embedding.register_forward_hook(is_where_a_backward_ends)
    replicas, replica = (
        parallel_state.get_data_parallel_world_size(),
        parallel_state.get_data_parallel_rank(),
    )
    length = tokens.shape[-1] - 1
    batch = [
        {
            "tokens": rows[:, :-1].contiguous(),
            "labels": rows[:, 1:].contiguous(),
            "position_ids": torch.arange(length)[None],
            "loss_mask": torch.ones(1, length),
        }
        for rows in tokens[replica::replicas]
    ]
    step, seen, gradients = Step(run), [], []
    is_sharded = config.parallel.use_distributed_optimizer
    for iteration in range(1, len(losses) + 1):
        keep = lambda: gradients.append(shards_of_gradients(run))  # noqa: E731
        result = step.train(batch, len(batch), iteration, keep if not gradients else lambda: None)
        seen += result.losses.values()
    parts = job.gather((seen, gradients[0]))
    model_type = json.loads((model / "config.json").read_text())["model_type"]
    if dist.get_rank() == 0:
        ours = next(torch.tensor(one) for one, _ in parts if one)
        line = f"{case['model']} {' '.join(case['flags'])}"
        print(f"LOSSES {gap(ours, losses):.3e} {line}", flush=True)
        if not is_sharded:  # where each replica has the sum of its share alone
            found = joined(run, [one for _, one in parts], model_type)
            assert found.keys() == expected.keys()
            worst = max((gap(found[key], one), key) for key, one in expected.items())
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
