"""Splits a run's state for megatron-core's distributed checkpointing, and restores it.

Owns the special cases of megatron-core's optimizers: they are written for the fused Adam of
Transformer Engine or apex, and need help with torch's Adam, which is used if those are missing.
This module knows nothing of folders.
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

# Makes megatron-core save one key per layer, which loads into every partition, and optimizer state
# in the shape of the parameters, which loads into every mesh.
METADATA = {
    "non_homogeneous_layers": True,
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}

_LOG = logging.getLogger(__name__)
_GPU_STATE_BYTES = 64  # a GPU generator's state is smaller than this, a CPU's larger

RNG = "rng_state"
"""Key of the random states in a checkpoint."""
# Key that the state of the experts' optimizer has within the state of the others' optimizer.
_EXPERTS = "experts"

# Names of scheduler settings in a checkpoint, with the flags that set them.
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
    """Returns the number of embedding rows; stages without the embedding know it too."""
    return int(unwrap_model(chunks[0]).vocab_size)


def mesh_shape(config: TrainerConfig) -> dict[str, int]:
    """Returns the sizes of the mesh's axes and the number of chunks per pipeline rank."""
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
    """Returns the weights with their offsets in the whole model, by chunk."""
    return {
        f"model{index}": unwrap_model(chunk).sharded_state_dict(metadata=dict(metadata))
        for index, chunk in enumerate(chunks)
    }


def without_local_copies(whole: dict[str, Any]) -> dict[str, Any]:
    """Returns a state to save in which this rank has no tensor twice.

    If the first and last stage share a rank, both copies of a tied embedding and of its optimizer
    state have the same name. megatron-core assigns each name to one rank that writes it, and that
    rank would write it twice.
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
    """Makes tensors of a loaded state independent of each other, in place; returns the state.

    If ranks divided the reading, tensors of one name on one rank (see
    :func:`without_local_copies`) share memory, and an optimizer would update it twice.
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
    """Sets the weights from a state that was loaded for :func:`sharded_model`.

    Args:
        chunks: Chunks of this rank.
        state: Loaded state.
        strict: Whether all weights must be in it.
    """
    for index, chunk in enumerate(chunks):
        # An empty stage has no weights, and therefore no entry in the loaded state.
        unwrap_model(chunk).load_state_dict(state.get(f"model{index}", {}), strict=strict)


def sharded_optimizer(
    optimizer: Any, model_state: Mapping[str, Any], metadata: Mapping[str, Any], *, loading: bool
) -> dict[str, Any]:
    """Returns the optimizer's state with its offsets in the whole model.

    Experts that are spread over ranks have a separate optimizer. The names of its tensors are
    distinct already; the names of its groups are not, but those are never read.

    Args:
        optimizer: megatron-core's optimizer.
        model_state: Result of :func:`sharded_model`.
        metadata: Metadata that :func:`sharded_model` was called with.
        loading: Whether the result describes what to load; its values are then not used.
    """
    states: list[dict[str, Any]] = []
    for leaf in _leaves(optimizer):
        distributed = isinstance(leaf, DistributedOptimizer)
        fill_state(leaf)
        with _step_for_empty_rank(leaf):
            # When they load, other optimizers would initialize missing state themselves. That fails
            # for SGD and loses the step of torch's Adam.
            state: dict[str, Any] = leaf.sharded_state_dict(
                model_state, is_loading=loading and distributed, metadata=dict(metadata)
            )
        _move_step_to_groups(state)
        states.append(state)
    return states[0] | dict(zip((_EXPERTS,), states[1:], strict=False))


@dataclass(frozen=True, kw_only=True)
class StateParts:
    """Holds a state after its split into tensors, objects and common values.

    Attributes:
        pieces: Tensors, by name and offset.
        objects: Other values by megatron-core's name; several may share a name.
        common: Values that all ranks share.
    """

    pieces: dict[Part, Piece]
    objects: dict[str, list[Any]]
    common: dict[str, Any]

    @classmethod
    def of(
        cls, sharded_state_dict: dict[str, Any], common: dict[str, Any], *, is_whole: bool
    ) -> StateParts:
        """Splits megatron-core's sharded state.

        Args:
            sharded_state_dict: Nested dictionary with shards as leaves.
            common: Values that all ranks share.
            is_whole: Whether to keep shards that another rank would write.
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
        """Returns whether these parts remain the state in all later steps.

        They do if each tensor is the memory of a weight or of optimizer state, and no object except
        the random states has any content.
        """
        empty = (data for name, data in self.objects.items() if not name.startswith(f"{RNG}/"))
        if not all(_is_nothing(value) for data in empty for value in data):
            return False
        tensors = _state_tensors(chunks, optimizer)
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        saved = (piece.tensor for piece in self.pieces.values() if piece.tensor.numel())
        return all(tensor.untyped_storage().data_ptr() in storages for tensor in saved)


def _is_nothing(data: Any) -> bool:
    """Returns whether a layer's extra state is empty, as it is without 8-bit types."""
    if isinstance(data, io.BytesIO):
        return not data.getbuffer().nbytes
    return data is None or (isinstance(data, torch.Tensor) and not data.numel())


def addresses(chunks: Any, optimizer: Any) -> list[int]:
    """Returns the addresses of the weights and of the optimizer's state."""
    return [tensor.data_ptr() for tensor in _state_tensors(chunks, optimizer)]


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
    """Returns whether ranks that are replicas of each other share the optimizer's state."""
    return isinstance(_leaves(optimizer)[0], DistributedOptimizer)


def refresh_optimizer(common: dict[str, Any], optimizer: Any) -> None:
    """Updates the values of :func:`sharded_optimizer`'s result that are not tensors, in place.

    Args:
        common: Values of the result that all ranks share, for the same optimizer.
        optimizer: megatron-core's optimizer, but not a distributed one.
    """
    for leaf, state in zip(_leaves(optimizer), (common, common.get(_EXPERTS)), strict=False):
        if state is not None:
            _refresh(state, leaf)


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
    """Returns whether the optimizer has parameters on this rank; without layers it has none."""
    return any(
        group["params"] for leaf in _leaves(optimizer) for group in leaf.optimizer.param_groups
    )


def load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """Sets the optimizer's state from a state that was loaded for :func:`sharded_optimizer`.

    Hyperparameters (betas, weight decay multipliers, ends of the learning rate) keep the values of
    this run's settings: only the step comes from the checkpoint.
    """
    first, *rest = _leaves(optimizer)
    experts = state.pop(_EXPERTS, {})
    _move_step_to_groups(state)  # Megatron-LM saves it elsewhere
    step = state.get("optimizer", state)["param_groups"][0]["step"]
    for leaf in rest:
        # A run whose experts are not spread saves no groups for them, so use this run's groups.
        tree = experts.setdefault("optimizer", {}) if "optimizer" in leaf.state_dict() else experts
        groups = leaf.optimizer.state_dict()["param_groups"]
        tree["param_groups"] = [group | {"step": step} for group in groups]
        experts.setdefault("grad_scaler", state.get("grad_scaler"))
        _load(leaf, experts)
    _load(first, state)


def _load(leaf: Any, state: dict[str, Any]) -> None:
    inner = leaf.optimizer
    kept = [_without(group, "params", "step") for group in inner.param_groups]
    # Groups are in the same order on all ranks, but megatron-core pairs them by their multipliers,
    # which are equal in the groups with and without a decoupled learning rate.
    tree = state.get("optimizer", state)
    saved = tree["param_groups"]
    if _is_torch_adam(leaf) and not isinstance(leaf, DistributedOptimizer):
        step = torch.tensor(float(saved[0]["step"]))
        tree.setdefault("state", {})["common_step"] = step
    for index, (group_here, group_saved) in enumerate(zip(inner.param_groups, saved, strict=True)):
        group_here["lr_mult"] = group_saved["lr_mult"] = float(index)
        for name in ("wd_mult", "is_expert_parallel", "is_decoupled_lr"):
            group_saved[name] = group_here[name]
        # Load these separately: megatron-core would also copy the step of torch's Adam from them.
    shards = state.pop("param_state", None) if isinstance(leaf, DistributedOptimizer) else None
    with _step_for_empty_rank(leaf):
        leaf.load_state_dict(state)
    if shards is not None:
        _load_shards(leaf, shards)
    for group, values in zip(inner.param_groups, kept, strict=True):
        group.update(values)
    fill_state(leaf)


def require_same_groups(optimizer: Any, saved: Mapping[str, Any], name: str) -> None:
    """Checks that a checkpoint has as many parameter groups as the optimizer, on every rank.

    Args:
        optimizer: megatron-core's optimizer.
        saved: Values of the checkpoint's optimizer state that all ranks share.
        name: Name of the checkpoint for the error.

    Raises:
        CheckpointError: If it has another number of groups.
    """
    groups = saved.get("optimizer", saved).get("param_groups")
    if groups is None:  # Megatron-LM with expert parallelism
        raise CheckpointError(
            f"{name} holds the state of several optimizers, which is not read here: load the "
            "weights alone with --no-load-optim"
        )
    before = len(groups)
    now = len(_leaves(optimizer)[0].optimizer.param_groups)
    if before != now:
        raise CheckpointError(
            f"{name} holds optimizer state in {before} groups of parameters and this "
            f"run has {now}: give the same --decoupled-lr and weight decay, or load the "
            "weights alone with --no-load-optim"
        )


def _leaves(optimizer: Any) -> list[Any]:
    """Returns the optimizers in megatron-core's chain: one, and a second for spread experts."""
    return list(optimizer.chained_optimizers)


def _without(group: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in names}


def _is_torch_adam(leaf: Any) -> bool:
    return isinstance(leaf.optimizer, torch.optim.Adam | torch.optim.AdamW)


def fill_state(leaf: Any) -> None:
    """Gives every parameter the state that the optimizer would make in its first step.

    A checkpoint then has the same entries before and after that step. With float16 the first step
    may be skipped for a dozen iterations.
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
                # A fused Adam counts its steps on the device, but a checkpoint of an Adam that is
                # not fused may have the count on the host.
                state["step"] = step.to(parameter.device) if group.get("fused") else step


def _move_step_to_groups(state: dict[str, Any]) -> None:
    """Stores the number of steps in the groups, where every implementation of Adam finds it."""
    inner = state.get("optimizer", state)
    groups = inner["param_groups"]
    common = inner.get("state", {}).pop("common_step", None)
    step = max([int(group.get("step") or 0) for group in groups] if common is None else [common])
    for group in groups:
        group["step"] = int(step)


@contextlib.contextmanager
def _step_for_empty_rank(leaf: Any) -> Iterator[None]:
    """Gives the distributed optimizer a step if this rank's share has no parameter.

    With torch's Adam megatron-core reads the step from the state of the parameters. It fails on a
    rank that has none: an empty stage, or more data parallel ranks than elements.
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
    """Loads the distributed optimizer's share of main weights and moments.

    megatron-core copies every entry of a parameter's state. With torch's Adam that includes the
    step, which the checkpoint has elsewhere. It also sets one step tensor for all parameters, so
    that each of them would increment it.
    """
    inner = leaf.optimizer
    torch_adam = _is_torch_adam(leaf)
    steps = {key: state.pop("step") for key, state in inner.state.items() if torch_adam}
    leaf.load_parameter_state_from_fully_reshardable(shards)
    for key, step in steps.items():
        inner.state[key]["step"] = step.clone()


def load_scheduler(scheduler: Any, optimizer: Any, saved: dict[str, Any]) -> None:
    """Sets the schedule of learning rate and weight decay to its position in the checkpoint.

    Raises:
        CheckpointError: If the run's settings give another schedule and no flag decides between
            them.
    """
    settings_here = scheduler.state_dict()
    if _constant_decay(settings_here) and _constant_decay(saved):
        saved = {**saved, "wd_incr_steps": settings_here["wd_incr_steps"]}  # a constant ignores it
    different = [name for name in _SCHEDULE_FLAGS if saved[name] != settings_here[name]]
    free = scheduler.override_opt_param_scheduler or scheduler.use_checkpoint_opt_param_scheduler
    if different and not free:
        listed = "; ".join(
            f"{_SCHEDULE_FLAGS[name]}: {saved[name]} in the checkpoint, {settings_here[name]} here"
            for name in different
        )
        raise CheckpointError(
            f"the checkpoint has another schedule of the learning rate: {listed}. Use the same "
            "settings, --override-opt-param-scheduler for those of this run, or "
            "--use-checkpoint-opt-param-scheduler for those of the checkpoint"
        )
    scheduler.load_state_dict(saved)
    for group in optimizer.param_groups:
        if group["default_config"]:
            group["max_lr"] = scheduler.max_lr
            group["min_lr"] = scheduler.min_lr
    scheduler.step(0)  # the load has set the groups with the former weight decay


def _constant_decay(state: Mapping[str, Any]) -> bool:
    return state["wd_incr_style"] == "constant" and state["start_wd"] == state["end_wd"]


def sharded_rng(config: TrainerConfig) -> ShardedObject:
    """Returns the random states of this rank, which only the same mesh can use."""
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
    """Sets the random states of this rank.

    If the states were saved on another kind of device, logs a warning and skips the device's: a CPU
    generator cannot continue from a GPU's state, nor the reverse.
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    generator = default_generator(current_device())
    now = generator.get_state()
    if state["device"].numel() != now.numel():  # a GPU's has 16 bytes, a CPU's 5056
        states = (state["device"], now)
        kinds = ["GPU" if s.numel() <= _GPU_STATE_BYTES else "CPU" for s in states]
        _LOG.warning(
            "WARNING: the checkpoint holds random states of a %s, and this rank computes on a %s: "
            "dropout continues from --seed; --no-load-rng avoids this warning",
            *kinds,
        )
        return
    generator.set_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def _mesh_position(config: TrainerConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the sizes of the mesh's axes and this rank's position on each."""
    if config.parallel.unequal_sizes is not None:
        # Stages of unequal sizes form no grid, so ranks are numbered on one axis.
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
