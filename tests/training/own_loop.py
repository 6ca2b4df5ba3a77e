"""Trains with the model, data and optimizer of megatron-core in a separate training loop.

    own_loop.py TASK.json LOSSES.json

The program runs in one process, and continues from the first checkpoint of a trainer's run. It uses
the release of megatron-core that it imports. From this package, it uses only the substitutes for
CUDA. ``TASK.json`` is an object::

    {"checkpoint": str, "data": str, "cache": str, "model": {...}, "gpt": {...}, "steps": int,
     "vocabulary": int, "sequence": int, "batch": int, "bf16": bool, "optimizer": {...}}

``model`` contains settings of megatron-core's model configuration, ``gpt`` contains arguments of
its model class, and ``optimizer`` contains settings of its optimizer. The program writes a list to
``LOSSES.json``, with ``[loss, gradient norm]`` for each step after the first.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron.adaptive import accelerator

accelerator.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel  # noqa: E402
from megatron.core.datasets import blended_megatron_dataset_builder  # noqa: E402
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import (  # noqa: E402
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

Task = dict[str, Any]
OFF = dict.fromkeys(
    (
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "masked_softmax_fusion",
        "gradient_accumulation_fusion",
        "persist_layer_norm",
    ),
    False,
)
"""Settings that turn off fused kernels, because these do not exist for CPUs."""


def build_model(task: Task) -> Any:
    """Returns the model of megatron-core for ``task``, wrapped for data parallelism."""
    settings = dict(task["model"])
    if settings.get("gated_linear_unit"):
        settings["activation_func"] = torch.nn.functional.silu
    dtype = torch.bfloat16 if task["bf16"] else torch.float32
    precision = {"params_dtype": dtype, "bf16": task["bf16"]}
    config = TransformerConfig(**OFF, **settings, **precision, use_cpu_initialization=True)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    predictions = None
    if config.mtp_num_layers:
        predictions = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    model: Any = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=task["vocabulary"],
        max_sequence_length=task["sequence"],
        mtp_block_spec=predictions,
        **task["gpt"],
    )
    model.model_type = ModelType.encoder_or_decoder
    wrapped = Float16Module(config, model) if task["bf16"] else model
    reduction = DistributedDataParallelConfig(grad_reduce_in_fp32=task["bf16"])
    return DistributedDataParallel(config, reduction, wrapped)


def build_optimizer(task: Task, model: Any) -> Any:
    """Returns megatron-core's optimizer for ``model``, with the settings in ``task``."""
    dtype = torch.bfloat16 if task["bf16"] else torch.float32
    precision = {"params_dtype": dtype, "bf16": task["bf16"]}
    settings = OptimizerConfig(lr=1e-3, min_lr=0.0, clip_grad=1.0, **precision, **task["optimizer"])
    return get_megatron_optimizer(settings, [model], get_standard_config_overrides(settings))


def load(task: Task, model: Any, optimizer: Any) -> None:
    """Loads the states of ``model`` and ``optimizer`` from the checkpoint of ``task``.

    This function calls only functions of megatron-core to load the checkpoint.
    """
    inner = model.module.module if task["bf16"] else model.module
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    layout = {
        "dp_cp_group": replicas,
        "non_homogeneous_layers": True,
        "chained_optim_avoid_prefix": True,
    }
    state = {"model": inner.sharded_state_dict(metadata=layout)}
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=True, metadata=layout)
    state = dist_checkpointing.load(state, task["checkpoint"])
    inner.load_state_dict(state["model"])
    optimizer.load_state_dict(with_steps(by_part(state["optimizer"])))


def by_part(state: Any) -> Any:
    """Adds the parameter groups to both parts of muon's ``state``, and returns the state."""
    if "scalars" in state:
        for part, kept in ((0, state), (1, state.pop("scalars"))):
            groups = zip(kept["param_groups"], state[part]["param_groups"], strict=True)
            state[part]["param_groups"] = [saved | numbers for saved, numbers in groups]
        return {part: state[part] for part in (0, 1)}
    return state


def with_steps(state: Any) -> Any:
    """Adds the number of completed steps to each part of an optimizer's ``state``, and returns it.

    The trainer stores this number in the parameter groups, as optimizers for GPUs do. For Adam of
    torch, megatron-core expects it in a separate entry.
    """
    parts = [state] if {"optimizer", "param_groups"} & {*state} else [*state.values()]
    for part in parts:
        # If mixed precision is used, this dict is inside of another dict that also contains the
        # 32-bit weights.
        inner = part.get("optimizer", part)
        inner["state"]["common_step"] = torch.tensor(float(inner["param_groups"][0]["step"]))
    return state


def samples(task: Task) -> Any:
    """Returns the training samples for ``task``, built by megatron-core."""
    size = task["vocabulary"]
    name = {"class": "numbers"}
    tokenizer = SimpleNamespace(eod=size - 1, pad=-1, vocab_size=size, unique_identifiers=name)
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=task["sequence"],
        blend=([task["data"]], None),
        split="1,0,0",
        path_to_cache=task["cache"],
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    count = (1 + task["steps"]) * task["batch"]
    kind = blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder
    return kind(GPTDataset, [count, None, None], lambda: True, config).build()[0]


def mean_loss(mask: torch.Tensor, output: torch.Tensor) -> Any:
    """Returns the loss of a microbatch, and a dict with the values that the schedule collects.

    ``mask`` is 1 for tokens that count, and 0 otherwise. ``output`` contains the losses of tokens.
    """
    loss = torch.sum(output.float().view(-1) * mask.view(-1)) / mask.sum()
    # The schedule divides the loss in place, so report a copy.
    return loss, {"lm loss": loss.detach().clone()}


def forward_step(batches: Any, model: Any) -> Any:
    """Runs the next microbatch of ``batches``, which is a single sample, through ``model``.

    Returns the output and a function that computes the loss from it.
    """
    sample = {name: tensor[None] for name, tensor in next(batches).items()}
    length = sample["tokens"].shape[1]
    later = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    further = {"loss_mask": sample["loss_mask"]} if model.config.mtp_num_layers else {}
    output = model(
        sample["tokens"], sample["position_ids"], later, labels=sample["labels"], **further
    )
    return output, partial(mean_loss, sample["loss_mask"])


def train(task: Task, model: Any, optimizer: Any) -> list[tuple[float, float]]:
    """Runs all steps of ``task`` except the first, with ``model`` and ``optimizer``.

    Returns the loss and the gradient norm of each of these steps.
    """
    model.train()
    model.config.grad_scale_func = optimizer.scale_loss
    model.config.finalize_model_grads_func = finalize_model_grads
    data = samples(task)
    numbers = iter(range(task["batch"], (1 + task["steps"]) * task["batch"]))
    steps = []
    for _ in range(task["steps"]):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reported = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=(data[next(numbers)] for _ in range(task["batch"])),
            model=model,
            num_microbatches=task["batch"],
            seq_length=task["sequence"],
            micro_batch_size=1,
            forward_only=False,
        )
        updated, norm, _ = optimizer.step()
        assert updated
        losses = torch.stack([microbatch["lm loss"] for microbatch in reported])
        steps.append((float(losses.mean()), float(norm)))
    return steps


def main() -> None:
    """Continues training from the checkpoint, and writes the losses and gradient norms."""
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    model = build_model(task)
    optimizer = build_optimizer(task, model)
    load(task, model, optimizer)
    Path(sys.argv[2]).write_text(json.dumps(train(task, model, optimizer)))


if __name__ == "__main__":
    main()
