"""Prepares a run's state for megatron-core's distributed checkpoints, and restores it.

megatron-core's optimizers expect the fused Adam of Transformer Engine or apex. If neither package
is installed, torch's Adam is used, and this module works around the differences. This module does
not access files.
"""

from __future__ import annotations

import contextlib
import io
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    extract_matching_values,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import (
    _replace_state_dict_keys_with_sharded_keys,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import unwrap_model

from megatron.adaptive.accelerator import current_device, default_generator
from megatron.adaptive.checkpoint.writer import Part, Piece
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import CheckpointError

# These options make megatron-core save a separate key for each layer, so that the checkpoint can be
# loaded with any partition of the layers. They also make it save optimizer state in the shape of
# the parameters, so that the state can be loaded with any parallel sizes.
METADATA = {
    "non_homogeneous_layers": True,
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}

# megatron-core identifies a parameter group in a checkpoint by these settings and lr_mult. From
# version 0.18 on, these settings include the limits of the learning rate and those of the weight
# decay.
_GROUP_KEYS = frozenset(
    "wd_mult is_expert_parallel is_decoupled_lr max_lr min_lr start_wd end_wd optimizer".split()
)

_LOG = logging.getLogger(__name__)
# Maximum size in bytes of the state of a GPU generator. States of CPU generators are larger.
_GPU_STATE_BYTES = 64

RNG = "rng_state"
"""Key of the random states in a checkpoint."""
# Keys under which the state of a second optimizer is saved. The second optimizer trains either the
# experts or the weights that muon does not train.
_EXPERTS = "experts"
_SCALARS = "scalars"

# Names for the values of the learning-rate scheduler in error messages, mostly the flags that set
# them.
_SCHEDULE_FLAGS = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "lr_warmup_steps": "warm-up in samples (--lr-warmup-iters, -samples, -fraction)",
    "lr_decay_steps": "decay in samples (--lr-decay-iters, -samples or the length of the run)",
    "lr_decay_style": "--lr-decay-style",
    "start_wd": "--start-weight-decay or --weight-decay",
    "end_wd": "--end-weight-decay or --weight-decay",
    "wd_incr_steps": "length of the run in samples",
    "wd_incr_style": "--weight-decay-incr-style",
}


def padded_vocab_size(chunks: Sequence[torch.nn.Module]) -> int:
    """Returns the number of embedding rows, even if ``chunks`` do not contain the embedding."""
    return int(unwrap_model(chunks[0]).vocab_size)


def mesh_shape(config: TrainerConfig) -> dict[str, int]:
    """Returns the parallel sizes and the number of chunks per rank, keyed by name."""
    parallel = config.parallel
    if parallel.unequal_sizes is not None:
        sizes = enumerate(parallel.unequal_sizes)
        return {f"data of stage {stage}": size for stage, size in sizes}
    spread = parallel.expert_model_parallel_size
    return {
        "tensor": parallel.tensor_model_parallel_size,
        "pipeline": parallel.pipeline_model_parallel_size,
        "context": parallel.context_parallel_size,
        "data": parallel.data_parallel_size,
        "chunks": parallel.num_chunks,
        **({"expert": spread} if spread > 1 else {}),
    }


def sharded_model(
    chunks: Sequence[torch.nn.Module], metadata: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Returns the weights of ``chunks``, with their positions in the whole model.

    The keys are ``model0``, ``model1`` and so on. ``metadata`` selects megatron-core's format.
    """
    return {
        f"model{index}": unwrap_model(chunk).sharded_state_dict(metadata=dict(metadata))
        for index, chunk in enumerate(chunks)
    }


def without_local_copies(whole: dict[str, Any]) -> dict[str, Any]:
    """Returns ``whole``, the state to save, without the second copy of any tensor.

    If the first and the last stage are on the same rank, this rank has two copies of a tied
    embedding and of its optimizer state, with the same name. megatron-core selects one rank to
    write the tensors with this name, and that rank would write both copies.
    """
    kept: dict[tuple[str, tuple[int, ...]], ShardedTensor] = {}
    copies: set[int] = set()
    for value in nested_values(whole):
        if isinstance(value, ShardedTensor):
            key = (value.key, tuple(value.global_offset))
            first = kept.setdefault(key, value)
            if first is not value:
                main, other = sorted((first, value), key=lambda tensor: tensor.replica_id)
                kept[key] = main
                copies.add(id(other))
    if not copies:
        return whole
    _, rest = extract_matching_values(whole, lambda value: id(value) in copies)
    return dict(rest)


def with_own_storage(loaded: dict[str, Any]) -> dict[str, Any]:
    """Clones tensors in ``loaded`` that share memory with other tensors, and returns ``loaded``.

    If a rank has two tensors with the same name, such as the copies of a tied embedding,
    megatron-core's parallel load returns the same memory for both tensors. Without separate memory,
    the optimizer would update both tensors twice. ``loaded`` is changed in place.
    """
    seen: set[int] = set()

    def unshared(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.data_ptr() in seen:
            return value.clone()
        seen.add(value.data_ptr())
        return value

    return dict(dict_list_map_inplace(unshared, loaded))


def load_model(
    chunks: Sequence[torch.nn.Module], state: Mapping[str, Any], *, strict: bool = True
) -> None:
    """Copies the weights from ``state`` into ``chunks``.

    Args:
        chunks: Model chunks of this rank, one for each of its pipeline stages.
        state: Loaded state, with the keys of :func:`sharded_model`.
        strict: Whether the state must contain all weights of the chunks.
    """
    for index, chunk in enumerate(chunks):
        # An empty stage has no weights, so the loaded state has no entry for it.
        unwrap_model(chunk).load_state_dict(state.get(f"model{index}", {}), strict=strict)


def sharded_optimizer(
    optimizer: Any, model_state: Mapping[str, Any], metadata: Mapping[str, Any], *, loading: bool
) -> dict[str, Any]:
    """Returns the optimizer's state, with the position of each tensor in the whole model.

    With expert parallelism, experts have a second optimizer. With muon, the weights that muon does
    not train, such as biases, have a second optimizer. The tensors of the second optimizer are
    saved under different names, and its parameter groups in a separate entry. The saved parameter
    groups of experts are never read.

    Args:
        optimizer: megatron-core's optimizer.
        model_state: Sharded weights, from :func:`sharded_model`.
        metadata: Metadata that was passed to :func:`sharded_model`.
        loading: Whether the state is used to load a checkpoint. If so, only shapes and offsets
            matter.
    """
    states: list[dict[str, Any]] = []
    for leaf in _leaves(optimizer):
        distributed = isinstance(leaf, DistributedOptimizer)
        fill_state(leaf)
        with _step_for_empty_rank(leaf):
            # Non-distributed optimizers create missing state themselves if is_loading is True. This
            # fails for SGD, and loses the step count of torch's Adam.
            state: dict[str, Any] = leaf.sharded_state_dict(
                model_state, is_loading=loading and distributed, metadata=dict(metadata)
            )
        _move_step_to_groups(state)
        states.append(state)
    if _has_muon(optimizer):
        _give_steps(*states)
    return states[0] | dict(zip((_second(optimizer),), states[1:], strict=False))


@dataclass(frozen=True, kw_only=True)
class StateParts:
    """State of a rank, split into tensors, objects and common values.

    Attributes:
        pieces: Parts of tensors, keyed by name and offset in the whole tensor.
        objects: Lists of non-tensor values, keyed by megatron-core's names.
        common: Values that all ranks share, keyed by name.
    """

    pieces: dict[Part, Piece]
    objects: dict[str, list[Any]]
    common: dict[str, Any]

    @classmethod
    def of(
        cls, sharded_state_dict: dict[str, Any], common: dict[str, Any], *, is_whole: bool
    ) -> StateParts:
        """Splits megatron-core's ``sharded_state_dict`` into tensors, objects and common values.

        Args:
            sharded_state_dict: Nested dictionary whose leaves are shards.
            common: Values that all ranks share, keyed by name.
            is_whole: Whether to keep shards that are also written by another rank.
        """
        parts = cls(pieces={}, objects={}, common=common)
        by_name, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, keep_only_main_replica=not is_whole
        )
        for name, shards in by_name.items():
            if isinstance(shards[0], ShardedObject):
                parts.objects[name] = [shard.data for shard in shards]
                continue
            for shard in shards:
                size = [1] * shard.prepend_axis_num + list(shard.local_shape)
                piece = Piece(tensor=shard.data, size=size, whole=list(shard.global_shape))
                parts.pieces.setdefault((name, tuple(shard.global_offset)), piece)
        return parts

    def is_lasting(self, chunks: Any, optimizer: Any) -> bool:
        """Returns whether these parts can be reused to save later steps.

        Parts can be reused if each tensor shares memory with a weight of ``chunks`` or with the
        state of ``optimizer``, and all objects except the random states are empty.
        """
        empty = (data for name, data in self.objects.items() if not name.startswith(f"{RNG}/"))
        if not all(_is_nothing(value) for data in empty for value in data):
            return False
        tensors = _state_tensors(chunks, optimizer)
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        saved = (piece.tensor for piece in self.pieces.values() if piece.tensor.numel())
        return all(tensor.untyped_storage().data_ptr() in storages for tensor in saved)


def _is_nothing(data: Any) -> bool:
    """Returns whether ``data``, a layer's extra state, is empty.

    Layers have extra state only if 8-bit formats are used.
    """
    if isinstance(data, io.BytesIO):
        return not data.getbuffer().nbytes
    return data is None or (isinstance(data, torch.Tensor) and not data.numel())


def addresses(chunks: Any, optimizer: Any) -> list[int]:
    """Returns the memory addresses of the weights of ``chunks`` and the state of ``optimizer``.

    If tensors have moved since the last call, the addresses differ from the previous ones.
    """
    return [tensor.data_ptr() for tensor in _state_tensors(chunks, optimizer)]


def buffer_storages(chunks: Any) -> set[int]:
    """Returns the memory addresses of the storages that hold the buffers of ``chunks``."""
    buffers = (buffer for chunk in chunks for buffer in unwrap_model(chunk).buffers())
    return {buffer.untyped_storage().data_ptr() for buffer in buffers if buffer.numel()}


def _state_tensors(chunks: Any, optimizer: Any) -> Iterator[torch.Tensor]:
    for inner in (leaf.optimizer for leaf in _leaves(optimizer)):
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
        for group in inner.param_groups:
            yield from group["params"]
    for chunk in chunks:
        model = unwrap_model(chunk)
        yield from model.parameters()
        yield from model.buffers()


def is_sharded(optimizer: Any) -> bool:
    """Returns whether the state of ``optimizer`` is sharded over data-parallel ranks."""
    return isinstance(_leaves(optimizer)[0], DistributedOptimizer)


def refresh_optimizer(common: dict[str, Any], optimizer: Any) -> None:
    """Updates the optimizer's non-tensor values in ``common`` before the next save.

    Args:
        common: Part of the optimizer's state that all ranks share. It is changed in place.
        optimizer: megatron-core's optimizer, which must not be a distributed optimizer.
    """
    second = common.get(_second(optimizer))
    for leaf, state in zip(_leaves(optimizer), (common, second), strict=False):
        if state is not None:
            _refresh(state, leaf)
    if _has_muon(optimizer):
        _give_steps(common, common[_SCALARS])


def _refresh(common: dict[str, Any], leaf: Any) -> None:
    inner = leaf.optimizer
    groups = common.get("optimizer", common)["param_groups"]
    for group, now in zip(groups, inner.param_groups, strict=True):
        group.update({name: now[name] for name in group if name in now})
    if "grad_scaler" in common:
        common["grad_scaler"] = leaf.grad_scaler.state_dict()
    if _is_torch_adam(leaf):
        step = next((float(state["step"]) for state in inner.state.values()), 0.0)
        for group in groups:
            group["step"] = int(step)


def has_parameters(optimizer: Any) -> bool:
    """Returns whether ``optimizer`` has parameters on this rank. Empty stages have none."""
    return any(
        group["params"] for leaf in _leaves(optimizer) for group in leaf.optimizer.param_groups
    )


def load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """Copies the loaded ``state``, with the keys of :func:`sharded_optimizer`, into ``optimizer``.

    Tensors and the step count come from the checkpoint. Hyperparameters, such as betas, weight
    decay multipliers and learning rate limits, keep the values of this run's settings.
    """
    first, *rest = _leaves(optimizer)
    second = state.pop(_second(optimizer), {})
    _move_step_to_groups(state)  # Megatron-LM saves the step count outside of the parameter groups.
    step = _steps_of(state)
    if rest and not _has_muon(optimizer):
        # Runs without expert parallelism do not save the parameter groups of experts, so use this
        # run's groups.
        (leaf,) = rest
        tree = second.setdefault("optimizer", {}) if "optimizer" in leaf.state_dict() else second
        groups = leaf.optimizer.state_dict()["param_groups"]
        tree["param_groups"] = [group | {"step": step} for group in groups]
        second.setdefault("grad_scaler", state.get("grad_scaler"))
    for leaf in rest:
        _load(leaf, second)
    _load(first, state)


def _steps_of(state: Mapping[str, Any]) -> int:
    steps: int = state.get("optimizer", state)["param_groups"][0]["step"]
    return steps


def _load(leaf: Any, state: dict[str, Any]) -> None:
    inner = leaf.optimizer
    kept = [_without(group, "params", "step") for group in inner.param_groups]
    # Give each group a unique lr_mult. megatron-core matches saved and current groups by their
    # multipliers, which may be equal for groups with and without a decoupled learning rate. The
    # order of the groups is a reliable key, because it is the same on all ranks.
    tree = state.get("optimizer", state)
    saved = tree["param_groups"]
    if _is_torch_adam(leaf) and not isinstance(leaf, DistributedOptimizer):
        step = torch.tensor(float(saved[0]["step"]))
        tree.setdefault("state", {})["common_step"] = step
    for index, (group_here, group_saved) in enumerate(zip(inner.param_groups, saved, strict=True)):
        group_here["lr_mult"] = group_saved["lr_mult"] = float(index)
        for name in _GROUP_KEYS.intersection(group_here, group_saved):
            group_saved[name] = group_here[name]
    # Load param_state separately, because megatron-core would expect Adam's step count in it.
    shards = state.pop("param_state", None) if isinstance(leaf, DistributedOptimizer) else None
    with _step_for_empty_rank(leaf):
        leaf.load_state_dict(state)
    if shards is not None:
        _load_shards(leaf, shards)
    for group, values in zip(inner.param_groups, kept, strict=True):
        group.update(values)
    fill_state(leaf)


def require_same_groups(optimizer: Any, saved: Mapping[str, Any], name: str) -> None:
    """Checks that a checkpoint and this rank's optimizer have the same number of parameter groups.

    Args:
        optimizer: megatron-core's optimizer.
        saved: Part of the checkpoint's optimizer state that all ranks share.
        name: Name of the checkpoint for the error message.

    Raises:
        CheckpointError: If the checkpoint has a different number of groups.
    """
    groups = saved.get("optimizer", saved).get("param_groups")
    if groups is None:  # Megatron-LM saved this checkpoint with expert parallelism.
        raise CheckpointError(
            f"{name} contains the state of several optimizers, which cannot be loaded; use "
            "--no-load-optim to load only the weights"
        )
    parts = [groups]
    leaves = _leaves(optimizer)
    if _has_muon(optimizer):
        second = saved.get(_SCALARS, {})
        parts.append(second.get("optimizer", second).get("param_groups", ()))
    else:
        leaves = leaves[:1]  # The saved parameter groups of the experts are never read.
    before = sum(map(len, parts))
    now = sum(len(leaf.optimizer.param_groups) for leaf in leaves)
    if before != now:
        raise CheckpointError(
            f"{name} has {before} parameter groups in its optimizer state, but this run has "
            f"{now}; use the same --decoupled-lr and weight decay, or use --no-load-optim to "
            "load only the weights"
        )


def _leaves(optimizer: Any) -> list[Any]:
    """Returns the list of optimizers in megatron-core's chained optimizer ``optimizer``.

    Usually, there is one optimizer. Expert parallelism adds a second optimizer for the experts.
    Muon adds a second optimizer for all weights that muon does not train.
    """
    return list(optimizer.chained_optimizers)


def _has_muon(optimizer: Any) -> bool:
    return bool(_leaves(optimizer)[0].config.optimizer == "muon")


def _second(optimizer: Any) -> str:
    """Returns the key under which the state of the run's second optimizer is saved."""
    return _SCALARS if _has_muon(optimizer) else _EXPERTS


def _without(group: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in names}


def _is_torch_adam(leaf: Any) -> bool:
    return isinstance(leaf.optimizer, torch.optim.Adam | torch.optim.AdamW)


def fill_state(leaf: Any) -> None:
    """Creates the optimizer state of each parameter in ``leaf`` before the first step.

    As a result, checkpoints have the same entries before and after the first step. Otherwise, with
    float16, entries could be missing for a dozen iterations, because the optimizer skips steps in
    which gradients overflow.
    """
    inner = leaf.optimizer
    if leaf.init_state_fn is not None:
        leaf.init_state_fn(inner, leaf.config)
    for group in inner.param_groups:
        for parameter in group["params"]:
            if leaf.init_state_fn is None and group.get("momentum"):
                state = inner.state[parameter]
                state.setdefault("momentum_buffer", torch.zeros_like(parameter.data))
            if _is_torch_adam(leaf):
                state = inner.state[parameter]
                step = state.get("step", torch.tensor(float(group.get("step", 0))))
                # Fused Adam requires the step count to be on the device. Other implementations of
                # Adam keep it in host memory.
                state["step"] = step.to(parameter.device) if group.get("fused") else step


def _move_step_to_groups(state: dict[str, Any]) -> None:
    """Moves the step count in ``state`` to the parameter groups, where Adam reads it."""
    inner = state.get("optimizer", state)
    groups = inner["param_groups"]
    common = inner.get("state", {}).pop("common_step", None)
    step = max([int(group.get("step") or 0) for group in groups] if common is None else [common])
    for group in groups:
        group["step"] = int(step)


def _give_steps(muon: Mapping[str, Any], scalars: Mapping[str, Any]) -> None:
    """Copies the step count from the other optimizer to ``muon``, which does not count steps."""
    for group in muon.get("optimizer", muon)["param_groups"]:
        group["step"] = _steps_of(scalars)


@contextlib.contextmanager
def _step_for_empty_rank(leaf: Any) -> Iterator[None]:
    """Temporarily gives the optimizer ``leaf`` a step count if this rank has no parameters.

    With torch's Adam, megatron-core reads the step count from the state of a parameter, which fails
    on a rank without parameters. A rank has no parameters if its stage is empty, or if there are
    more data-parallel ranks than elements in all parameters.
    """
    key = "step of a rank without parameters"
    inner = leaf.optimizer
    is_empty = not any(group["params"] for group in inner.param_groups)
    if isinstance(leaf, DistributedOptimizer) and _is_torch_adam(leaf) and is_empty:
        step = float(inner.param_groups[0].get("step", 0))
        inner.state[key] = {"step": torch.tensor(step)}
    try:
        yield
    finally:
        inner.state.pop(key, None)


def _load_shards(leaf: Any, shards: Mapping[Any, Any]) -> None:
    """Loads ``shards``, this rank's main weights and moments, into the sharded optimizer ``leaf``.

    megatron-core expects a saved value for each entry of a parameter's state. With torch's Adam,
    this state includes the step count, which is not saved. megatron-core would also use one step
    tensor for all parameters, and each parameter's update would increment that tensor. Therefore,
    this function removes the step counts before loading, and then gives each parameter a separate
    copy.
    """
    inner = leaf.optimizer
    torch_adam = _is_torch_adam(leaf)
    steps = {key: state.pop("step") for key, state in inner.state.items() if torch_adam}
    leaf.load_parameter_state_from_fully_reshardable(shards)
    for key, step in steps.items():
        inner.state[key]["step"] = step.clone()


def load_scheduler(scheduler: Any, optimizer: Any, saved: dict[str, Any]) -> None:
    """Sets learning rate and weight decay of ``scheduler`` according to the progress in ``saved``.

    Raises:
        CheckpointError: If the schedule differs from the schedule in the checkpoint, and no flag
            selects one of the two schedules.
    """
    settings_here = scheduler.state_dict()
    if _constant_decay(settings_here) and _constant_decay(saved):
        # The number of steps has no effect on a constant weight decay, so do not compare it.
        saved = {**saved, "wd_incr_steps": settings_here["wd_incr_steps"]}
    different = [name for name in _SCHEDULE_FLAGS if saved[name] != settings_here[name]]
    free = scheduler.override_opt_param_scheduler or scheduler.use_checkpoint_opt_param_scheduler
    if different and not free:
        listed = "; ".join(
            f"{_SCHEDULE_FLAGS[name]}: {saved[name]} in the checkpoint, {settings_here[name]} here"
            for name in different
        )
        raise CheckpointError(
            f"the checkpoint has a different learning rate schedule: {listed}. Use the same "
            "settings, or pass --override-opt-param-scheduler to use those of this run, or "
            "--use-checkpoint-opt-param-scheduler to use those of the checkpoint"
        )
    scheduler.load_state_dict(saved)
    for group in optimizer.param_groups:
        if group["default_config"]:
            group["max_lr"] = scheduler.max_lr
            group["min_lr"] = scheduler.min_lr
    # Loading does not update the weight decay of the groups, but this call does.
    scheduler.step(0)


def _constant_decay(state: Mapping[str, Any]) -> bool:
    return bool(state["wd_incr_style"] == "constant" and state["start_wd"] == state["end_wd"])


def sharded_rng(config: TrainerConfig) -> ShardedObject:
    """Returns this rank's random states, to be loaded by runs with the same parallel sizes."""
    shape, position = _mesh_position(config)
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": default_generator(current_device()).get_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject(RNG, state, shape, position, replica_id=0)


def load_rng(state: Mapping[str, Any]) -> None:
    """Restores the random states of this rank from ``state``.

    If the states were saved on a different type of device, the function logs a warning and keeps
    the current state of the device's generator, because CPU and GPU generators cannot load each
    other's states.
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    generator = default_generator(current_device())
    now = generator.get_state()
    # The state has 16 bytes on a GPU and 5056 bytes on a CPU.
    if state["device"].numel() != now.numel():
        states = (state["device"], now)
        kinds = ["GPU" if s.numel() <= _GPU_STATE_BYTES else "CPU" for s in states]
        _LOG.warning(
            "WARNING: the checkpoint contains random states of a %s, but this rank computes on "
            "a %s, so dropout is seeded from --seed again; use --no-load-rng to avoid this warning",
            *kinds,
        )
        return
    generator.set_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def _mesh_position(config: TrainerConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the pipeline, tensor and data-parallel sizes, and this rank's index in each group."""
    if config.parallel.unequal_sizes is not None:
        # Stages with different numbers of ranks do not form a grid, so the global rank is the only
        # index.
        return (dist.get_world_size(), 1, 1), (dist.get_rank(), 0, 0)
    shape = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
    )
    position = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
    return shape, position
