"""Changes where the model of a running job lies between two steps: its partition or its placement.

Either way weights and optimizer state go from memory to memory, and counters, logs and the data
loader are the training loop's.

Another partition (:func:`move_layers`) leaves processes, channels, process groups and data as they
are. On a rank whose stages change::

    layers that stay    the same modules and tensors, in a new order
    layers that go      their tensors are kept until they are sent
    layers that come    built empty; weights and optimizer state arrive

and gradient buffers and optimizer are made anew around them. Other ranks only learn of it.

Under another placement (:func:`move_stages`) everything is built anew in the same processes::

    state to the host's memory ──> release, take down ──> build anew, state to its new ranks
                                   channels, traces       groups, model, optimizer
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as core_optimizer
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from megatron.adaptive.checkpoint.state import load_rng, load_scheduler, sharded_rng
from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.engine.deferred_layers import attach_stores
from megatron.adaptive.engine.forward_backward import ForwardBackward
from megatron.adaptive.errors import ConfigError, DeviceMemoryError
from megatron.adaptive.gpt.initialize import TrainingJob, remake_mesh
from megatron.adaptive.gpt.model import build_layer, build_norm, build_optimizer, wrap
from megatron.adaptive.gpt.placement import finalize_gradients, layout_of
from megatron.adaptive.gpt.setup import (
    Run,
    build_run,
    connect_chunks,
    measure_experts,
    open_run_trace,
)
from megatron.adaptive.gpt.step import gather_parameters
from megatron.adaptive.profiling.memory import available_host_bytes
from megatron.adaptive.rebalance.layer_state import (
    MAIN,
    Share,
    Table,
    exchange,
    leaf_of,
    passages,
    shares_of,
    steps_of,
)
from megatron.adaptive.schedule.placement import PlacementKind


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
    stages, number = old.num_stages, old.model.num_layers
    if len(partition) != stages or sum(partition) != number or min(partition) < 0:
        raise ConfigError(
            f"partition {format_partition(partition)}: this run has {number} layers on {stages} "
            "stages; give as many numbers that sum up to it"
        )
    job = with_schedule(run.job, partition=tuple(partition))
    config = job.config
    gather_parameters(run)
    run.job.accelerator.synchronize()
    own = _own_stages(run)
    before, after = _ranges(old.layers_per_stage), _ranges(config.layers_per_stage)
    run.core.pipeline_model_parallel_layout = layout_of(config)
    if any(before[stage] != after[stage] for stage in own):
        run = _rebuilt(run, job, [after[stage] for stage in own])
    else:
        _stand_by(run)
        run = dataclasses.replace(run, job=job)
    if run.tracing.experts is not None:
        run.tracing.experts.close()
    if config.schedule.trace_dir is not None:
        run = _with_new_trace(run)
    measure_experts(job, run.tracing, run.chunks)
    return run


def with_schedule(job: TrainingJob, **changes: Any) -> TrainingJob:
    """Returns the job with changes in its settings of the schedule."""
    schedule = dataclasses.replace(job.config.schedule, **changes)
    return dataclasses.replace(job, config=dataclasses.replace(job.config, schedule=schedule))


def move_stages(
    box: list[Run],
    kind: PlacementKind,
    release: Callable[[], None],
    partition: Sequence[int] | None = None,
) -> Run:
    """Goes on under another placement, from the same state. Collective over all ranks.

    Args:
        box: holds the run, between two steps, and is empty once the run is taken down.
        kind: how stages lie from here on.
        release: drops every other reference to the run, so that its memory is free before another
            one is built; not called where the state has no room to wait.
        partition: layers of each stage from here on, ``None`` for those that they have.

    Returns:
        The run that takes its place.

    Raises:
        DeviceMemoryError: the state has no room in the host's memory, and nothing has changed.
        TransportError: after ``release``, state did not arrive and is lost.
    """
    state = _set_aside(box[0])
    changes = {} if partition is None else {"partition": tuple(partition)}
    job = with_schedule(box[0].job, pipeline_placement=kind, **changes)
    random = sharded_rng(job.config).data
    scheduler = box[0].scheduler.state_dict()
    release()
    take_down(box.pop())
    gc.collect()
    if job.accelerator.is_cuda:
        torch.cuda.empty_cache()
    remake_mesh(job)
    run = build_run(job)
    _give(run, state, job.control_group)
    load_scheduler(run.scheduler, run.optimizer, scheduler)
    load_rng(random)
    return run


def take_down(run: Run) -> None:
    """Closes the run's channels and traces; it cannot take another step. Collective.

    What experts keep of their last microbatch goes: its graph would keep the model, for the hooks
    of gradients lead back to it in a way that the garbage collector does not see.
    """
    run.tracing.close()
    if run.wiring is not None:
        run.wiring.close()
    run.job.accelerator.synchronize()
    for chunk in run.chunks:
        for module in chunk.modules():
            dispatcher = getattr(module, "token_dispatcher", None)
            for owner in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
                for name, value in list(getattr(owner, "__dict__", {}).items()):
                    if isinstance(value, torch.Tensor):
                        setattr(owner, name, None)


def _set_aside(run: Run) -> _State:
    """Copies the state of a rank into the host's memory, so that its device is free for others."""
    job = run.job
    gather_parameters(run)
    job.accelerator.synchronize()
    state = _State.of(run)
    needed = sum(
        tensor.nbytes
        for share in state.shares.values()
        for tensor in (share.weight, *share.state.values())
    )
    room = available_host_bytes() // job.environment.local_world_size
    short = [rank for rank, has in enumerate(job.gather(needed <= room)) if not has]
    if short:
        raise DeviceMemoryError(
            f"weights and optimizer state of rank {short[0]} would wait in the host's memory, "
            "which has no room for them: start with --pipeline-placement instead"
        )
    shares = {
        name: Share(
            weight=share.weight.detach().to("cpu", copy=True),
            start=share.start,
            end=share.end,
            state={part: one.to("cpu", copy=True) for part, one in share.state.items()},
        )
        for name, share in state.shares.items()
    }
    return dataclasses.replace(state, shares=shares)


def _own_stages(run: Run) -> list[int]:
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    return [run.placement.stage_of(pp_rank, chunk) for chunk in range(run.placement.num_chunks)]


def _ranges(layers_per_stage: Sequence[int]) -> list[range]:
    """Returns the numbers of each stage's layers, from 1, by stage."""
    ends = itertools.accumulate(layers_per_stage, initial=1)
    return list(itertools.starmap(range, itertools.pairwise(ends)))


def _stand_by(run: Run) -> None:
    """Takes part in what other ranks do together with all."""
    # megatron-core compares the groups of parameters over all ranks, once for dense parameters
    # and once for experts.
    leaf = run.optimizer.chained_optimizers[0]
    overrides = core_optimizer.get_standard_config_overrides(leaf.config)
    for _ in range(2):
        core_optimizer._get_param_groups(run.chunks, leaf.config, overrides)
    run.job.gather(None)


def _rebuilt(run: Run, job: TrainingJob, layers: Sequence[range]) -> Run:
    config = job.config
    state = _State.of(run)
    bare = [_unwrap(chunk) for chunk in run.chunks]
    for leaf in run.optimizer.chained_optimizers:
        for name in ("buffers", "per_model_buffers", "per_model_bucket_groups"):
            getattr(leaf, name, []).clear()  # what a distributed optimizer holds of them
    blocks = [unwrap_model(chunk).decoder for chunk in bare]
    here = {layer.layer_number: layer for block in blocks for layer in block.layers}
    if config.model.mtp_num_layers is not None:
        _set_norm(run, blocks, [config.model.num_layers in numbers for numbers in layers])
    for block, numbers in zip(blocks, layers, strict=True):
        _set_layers(run, config, block, numbers, here)
    chunks = wrap(config, run.core, bare)
    optimizer = build_optimizer(config, chunks)
    run.scheduler.optimizer = optimizer
    run = dataclasses.replace(run, job=job, chunks=chunks, optimizer=optimizer)
    _give(run, state, None if job.accelerator.backend == "nccl" else job.control_group)
    connect_chunks(config, run.core, chunks, optimizer)
    assert isinstance(run.forward_backward, ForwardBackward)
    run.forward_backward.renew(attach_stores(chunks) if config.splits_backward else None)
    return run


@dataclass(frozen=True, kw_only=True)
class _State:
    """Holds the state of a rank's stages while its optimizer is replaced.

    Attributes:
        shares: parameters and this rank's shares of their state, by name.
        steps: updates that the optimizer has done.
        groups: settings of its groups of parameters, by chained optimizer.
        scalers: their loss scales, ``None`` where they have none.
    """

    shares: dict[str, Share]
    steps: float
    groups: list[list[dict[str, Any]]]
    scalers: list[Any]

    @classmethod
    def of(cls, run: Run) -> _State:
        leaves = run.optimizer.chained_optimizers
        return cls(
            shares=shares_of(run.optimizer, run.chunks, _own_stages(run)),
            steps=steps_of(run.optimizer),
            groups=[
                [
                    {key: value for key, value in group.items() if key != "params"}
                    for group in leaf.optimizer.param_groups
                ]
                for leaf in leaves
            ],
            scalers=[getattr(leaf, "grad_scaler", None) for leaf in leaves],
        )


def _give(run: Run, state: _State, group: dist.ProcessGroup | None) -> None:
    """Gives model and optimizer of a run the state that is on the job's ranks. Collective."""
    job, old = run.job, state.shares
    new = shares_of(run.optimizer, run.chunks, _own_stages(run))
    table = Table(
        replica=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        had={name: (share.start, share.end) for name, share in old.items()},
        wants={name: (share.start, share.end) for name, share in new.items()},
        parts={
            part: tensor.dtype
            for share in old.values()
            for part, tensor in share.state.items()
            if part != MAIN
        },
        steps=state.steps,
    )
    tables = {rank: found for rank, found in enumerate(job.gather(table)) if found is not None}
    steps = max(found.steps for found in tables.values())
    _make_room(old, new, {k: v for found in tables.values() for k, v in found.parts.items()})
    exchange(passages(tables), job.rank, old, new, group)
    _settle(state, run.optimizer, new, steps)


def _unwrap(chunk: Any) -> torch.nn.Module:
    """Takes the data-parallel wrapper off a chunk and free its buffers."""
    chunk.grad_accs.clear()  # with them its hooks
    if chunk.use_forward_hook:
        chunk.disable_forward_pre_hook(param_sync=False)
    for name in ("buffers", "bucket_groups"):
        getattr(chunk, name).clear()
        getattr(chunk, f"expert_parallel_{name}").clear()
    chunk.params_with_grad.clear()
    chunk.param_to_bucket_group.clear()
    module: torch.nn.Module = chunk.module
    for parameter in module.parameters():
        parameter.grad = None
        if hasattr(parameter, "main_grad"):
            del parameter.main_grad
    return module


def _set_norm(run: Run, blocks: Sequence[Any], wanted: Sequence[bool]) -> None:
    """Lets the block with the last layer have the norm after it, as multi-token prediction asks."""
    norms = [block.final_layernorm for block in blocks if block.final_layernorm is not None]
    for block, has in zip(blocks, wanted, strict=True):
        if has and not norms:
            norms = [build_norm(run.core, run.job.accelerator, block)]
        block.final_layernorm = norms[0] if has else None


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


def _make_room(
    old: Mapping[str, Share], new: Mapping[str, Share], parts: Mapping[str, torch.dtype]
) -> None:
    """Takes over what stays on this rank, and makes tensors for the rest."""
    for name, share in new.items():
        former, device = old.get(name), share.weight.device
        if former is not None and former.weight is not share.weight:
            share.weight.data.copy_(former.weight)
        if share.held is None:
            continue
        if former is not None and (former.start, former.end) == (share.start, share.end):
            share.state |= {part: one.to(device) for part, one in former.state.items()}
            if MAIN in share.state:
                share.held.data = share.state[MAIN].view(share.held.shape)
            continue
        for part, dtype in parts.items():
            size = share.end - share.start
            share.state[part] = torch.empty(size, dtype=dtype, device=device)


def _settle(state: _State, optimizer: Any, new: Mapping[str, Share], steps: float) -> None:
    """Gives the optimizer its state, and the former one's settings and loss scale."""
    leaves = optimizer.chained_optimizers
    counts_alone = isinstance(leaves[0].optimizer, torch.optim.Adam | torch.optim.AdamW)
    for share in new.values():
        parts = {part: tensor for part, tensor in share.state.items() if part != MAIN}
        if share.held is None or not parts:
            continue
        own = leaf_of(optimizer, share.weight).optimizer.state[share.held]
        for part, tensor in parts.items():
            own[part] = tensor.view(share.held.shape)
        if counts_alone:
            own["step"] = torch.tensor(float(steps))
    for leaf, groups, scaler in zip(leaves, state.groups, state.scalers, strict=True):
        for group, before in zip(leaf.optimizer.param_groups, groups, strict=True):
            group.update(before)
            if steps and not counts_alone and "step" in group:
                group["step"] = int(steps)
        if hasattr(leaf, "grad_scaler"):
            leaf.grad_scaler = scaler


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
