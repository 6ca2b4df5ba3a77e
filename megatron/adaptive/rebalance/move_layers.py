"""Cuts the model of a running job anew: layers go to other stages between two steps.

Processes, channels, process groups and data stay. On a rank whose stages change::

    layers that stay    the same modules and tensors, in a new order
    layers that go      their tensors are kept until they are sent
    layers that come    built empty; weights and optimizer state arrive from memory to memory

and gradient buffers and optimizer are made anew around them. Other ranks only learn of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as core_optimizer
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.engine.deferred_layers import attach_stores
from megatron.adaptive.engine.forward_backward import ForwardBackward
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.gpt.initialize import TrainingJob
from megatron.adaptive.gpt.model import build_layer, build_optimizer, wrap
from megatron.adaptive.gpt.placement import PlacedLayout, finalize_gradients
from megatron.adaptive.gpt.setup import Run, connect_chunks, open_run_trace
from megatron.adaptive.gpt.step import gather_parameters
from megatron.adaptive.rebalance.layer_state import (
    MAIN,
    Share,
    Table,
    exchange,
    passages,
    shares_of,
    steps_of,
)

__all__ = ["move_layers", "with_partition"]


def move_layers(run: Run, partition: Sequence[int]) -> Run:
    """Goes on with other layers per stage. Collective over all ranks, between two steps.

    ``run`` must not be used any more. Losses, gradients and checkpoints are those of a run that had
    this partition from the start.

    Args:
        run: the built run.
        partition: layers of each stage from here on.

    Returns:
        The run, whose job has ``partition`` in its settings. A trace goes on in new files.

    Raises:
        ConfigError: the partition is not one of this model and pipeline.
        TransportError: layers did not arrive; the state is lost.
    """
    old = run.job.config
    _check(old, partition)
    job = with_partition(run.job, partition)
    config = job.config
    gather_parameters(run)
    run.job.accelerator.synchronize()
    own = _own_stages(run)
    before, after = _ranges(old.layers_per_stage), _ranges(config.layers_per_stage)
    run.core.pipeline_model_parallel_layout = PlacedLayout(run.placement, config.layers_per_stage)
    if any(before[stage] != after[stage] for stage in own):
        run = _rebuilt(run, job, own, [after[stage] for stage in own])
    else:
        _stand_by(run)
        run = dataclasses.replace(run, job=job)
    return _with_new_trace(run) if config.schedule.trace_dir is not None else run


def with_partition(job: TrainingJob, partition: Sequence[int]) -> TrainingJob:
    """Returns the job with other layers per stage in its settings."""
    schedule = dataclasses.replace(job.config.schedule, partition=tuple(partition))
    return dataclasses.replace(job, config=dataclasses.replace(job.config, schedule=schedule))


def _check(config: TrainerConfig, partition: Sequence[int]) -> None:
    stages, layers = config.num_stages, config.model.num_layers
    if len(partition) != stages or sum(partition) != layers or min(partition) < 0:
        raise ConfigError(
            f"partition {format_partition(partition)}: this run has {layers} layers on {stages} "
            "stages; give as many numbers that sum up to it"
        )


def _own_stages(run: Run) -> list[int]:
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    return [run.placement.stage_of(pp_rank, chunk) for chunk in range(run.placement.num_chunks)]


def _ranges(layers_per_stage: Sequence[int]) -> list[range]:
    """Returns the numbers of each stage's layers, from 1, by stage."""
    found, done = [], 0
    for layers in layers_per_stage:
        found.append(range(done + 1, done + layers + 1))
        done += layers
    return found


def _stand_by(run: Run) -> None:
    """Takes part in what other ranks do together with all."""
    # megatron-core compares the groups of parameters over all ranks, once for dense parameters
    # and once for experts.
    (leaf,) = run.optimizer.chained_optimizers
    overrides = core_optimizer.get_standard_config_overrides(leaf.config)
    for _ in range(2):
        core_optimizer._get_param_groups(run.chunks, leaf.config, overrides)
    run.job.gather(None)


def _rebuilt(run: Run, job: TrainingJob, stages: Sequence[int], layers: Sequence[range]) -> Run:
    config = job.config
    old = shares_of(run.optimizer, run.chunks, stages)
    former = run.optimizer
    bare = [_unwrap(chunk) for chunk in run.chunks]
    _let_buffers_go(former)
    blocks = [unwrap_model(chunk).decoder for chunk in bare]
    here = {layer.layer_number: layer for block in blocks for layer in block.layers}
    for block, numbers in zip(blocks, layers, strict=True):
        _set_layers(run, config, block, numbers, here)
    chunks = wrap(config, run.core, bare)
    optimizer = build_optimizer(config, chunks)
    new = shares_of(optimizer, chunks, stages)
    table = _table(old, new, steps_of(former))
    tables = {rank: found for rank, found in enumerate(job.gather(table)) if found is not None}
    steps = max(found.steps for found in tables.values())
    _make_room(old, new, {k: v for found in tables.values() for k, v in found.parts.items()})
    direct = job.accelerator.backend == "nccl"
    exchange(passages(tables), job.rank, old, new, None if direct else job.control_group)
    _settle(former, optimizer, new, steps)
    run.scheduler.optimizer = optimizer
    connect_chunks(config, run.core, chunks, optimizer)
    assert isinstance(run.forward_backward, ForwardBackward)
    run.forward_backward.renew(attach_stores(chunks) if config.splits_backward else None)
    return dataclasses.replace(run, job=job, chunks=chunks, optimizer=optimizer)


def _unwrap(chunk: Any) -> torch.nn.Module:
    """Takes the data-parallel wrapper off a chunk and free its buffers."""
    chunk.grad_accs.clear()  # with them its hooks
    if chunk.use_forward_hook:
        chunk.disable_forward_pre_hook(param_sync=False)
    for group in (chunk.buffers, chunk.bucket_groups, chunk.params_with_grad):
        group.clear()
    chunk.param_to_bucket_group.clear()
    module: torch.nn.Module = chunk.module
    for parameter in module.parameters():
        parameter.grad = None
        if hasattr(parameter, "main_grad"):
            del parameter.main_grad
    return module


def _let_buffers_go(optimizer: Any) -> None:
    """Frees what a distributed optimizer holds of the gradient buffers."""
    (leaf,) = optimizer.chained_optimizers
    for name in ("buffers", "per_model_buffers", "per_model_bucket_groups"):
        getattr(leaf, name, []).clear()


def _set_layers(
    run: Run, config: TrainerConfig, block: Any, numbers: range, here: Mapping[int, Any]
) -> None:
    """Gives a block the layers of these numbers: those that are here, and new ones."""
    layers = []
    for index, number in enumerate(numbers):
        layer = here.get(number)
        if layer is None:
            layer = build_layer(config, run.core, run.job.accelerator, block, index)
        assert layer.layer_number == number
        for module in layer.modules():
            if hasattr(module, "vp_stage"):  # it may come from another chunk
                module.vp_stage = block.vp_stage
        layers.append(layer)
    block.layers = torch.nn.ModuleList(layers)
    block.num_layers_per_pipeline_rank = len(layers)


def _table(old: Mapping[str, Share], new: Mapping[str, Share], steps: float) -> Table:
    parts = {
        part: tensor.dtype
        for share in old.values()
        for part, tensor in share.state.items()
        if part != MAIN
    }
    return Table(
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        replica=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        had={name: (share.start, share.end) for name, share in old.items()},
        wants={name: (share.start, share.end) for name, share in new.items()},
        parts=parts,
        steps=steps,
    )


def _make_room(
    old: Mapping[str, Share], new: Mapping[str, Share], parts: Mapping[str, torch.dtype]
) -> None:
    """Takes over state that stays as it is, and make tensors for the rest."""
    for name, share in new.items():
        if share.held is None:
            continue
        former = old.get(name)
        if former is not None and (former.start, former.end) == (share.start, share.end):
            if MAIN in share.state:
                share.held.data = former.state[MAIN].view(share.held.shape)
            share.state |= former.state
            continue
        for part, dtype in parts.items():
            size = share.end - share.start
            share.state[part] = torch.empty(size, dtype=dtype, device=share.weight.device)


def _settle(former: Any, optimizer: Any, new: Mapping[str, Share], steps: float) -> None:
    """Gives the optimizer its state, and the former one's settings and loss scale."""
    (was,) = former.chained_optimizers
    (leaf,) = optimizer.chained_optimizers
    counts_alone = isinstance(leaf.optimizer, torch.optim.Adam | torch.optim.AdamW)
    for share in new.values():
        parts = {part: tensor for part, tensor in share.state.items() if part != MAIN}
        if share.held is None or not parts:
            continue
        state = leaf.optimizer.state[share.held]
        for part, tensor in parts.items():
            state[part] = tensor.view(share.held.shape)
        if counts_alone:
            state["step"] = torch.tensor(float(steps))
    for group, before in zip(leaf.optimizer.param_groups, was.optimizer.param_groups, strict=True):
        group.update({key: value for key, value in before.items() if key != "params"})
        if steps and not counts_alone and "step" in group:
            group["step"] = int(steps)
    if hasattr(was, "grad_scaler"):
        leaf.grad_scaler = was.grad_scaler


def _with_new_trace(run: Run) -> Run:
    """Goes on tracing in new files, whose header has the new partition. Collective."""
    assert run.wiring is not None
    run.tracing.close()
    dist.barrier(group=run.job.control_group)  # then the files are put aside
    tracing = open_run_trace(run.job, run.placement, run.padded_vocab_size)
    run.core.finalize_model_grads_func = tracing.around("reduce", finalize_gradients)
    run.wiring.executor.trace_to(tracing.recorder)
    tracing.watch(run.wiring.executor.snapshot)
    return dataclasses.replace(run, tracing=tracing)
