"""Takes a run's state apart for megatron-core's distributed checkpointing, and puts it back.

Owns what is particular about megatron-core's optimizers here: they are written for the fused Adam
of Transformer Engine or apex and need help with torch's, which is used where those are missing.
Knows nothing of folders.
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

# How megatron-core shall name and cut things. One key per layer loads into every partition, and
# optimizer state in the shape of the parameters into every mesh.
METADATA = {
    "non_homogeneous_layers": True,
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}

_LOG = logging.getLogger(__name__)
_GPU_STATE_BYTES = 64  # a CPU's generator has more

# The key of the random states.
RNG = "rng_state"
# The key of the state of experts' own optimizer beside what that of the others has.
_EXPERTS = "experts"

# Settings of the scheduler in a checkpoint and the flags that they come from.
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
    """Return the rows of the embedding; every stage knows it, also one without the embedding."""
    return int(unwrap_model(chunks[0]).vocab_size)


def mesh_shape(config: TrainerConfig) -> dict[str, int]:
    """Return sizes of the mesh's axes and chunks of each pipeline rank."""
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
    """Return the weights with their places in the whole model, by chunk."""
    return {
        f"model{index}": unwrap_model(chunk).sharded_state_dict(metadata=dict(metadata))
        for index, chunk in enumerate(chunks)
    }


def without_local_copies(whole: dict[str, Any]) -> dict[str, Any]:
    """Return a state to save in which this rank holds no tensor twice.

    Where first and last stage share a rank, both copies of a tied embedding and of its optimizer
    state bear the same name. When megatron-core shares the writing out, it chooses a rank for each
    name, and that rank would write it twice.
    """
    kept: dict[tuple[str, tuple[int, ...]], ShardedTensor] = {}
    copies: set[int] = set()
    for value in nested_values(whole):
        if isinstance(value, ShardedTensor):
            place = (value.key, tuple(value.global_offset))
            first = kept.setdefault(place, value)
            if first is not value:
                main, other = sorted((first, value), key=lambda tensor: tensor.replica_id)
                kept[place] = main
                copies.add(id(other))
    if not copies:
        return whole
    _, rest = extract_matching_values(whole, lambda value: id(value) in copies)
    return dict(rest)


def with_own_storage(loaded: dict[str, Any]) -> dict[str, Any]:
    """Return a loaded state in which every tensor has memory of its own, changed in place.

    Where the reading was shared out, tensors of one name on one rank (see
    :func:`without_local_copies`) are one tensor, which an optimizer would then update twice.
    """
    seen: set[int] = set()

    def own(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.data_ptr() in seen:
            return value.clone()
        seen.add(value.data_ptr())
        return value

    return dict(dict_list_map_inplace(own, loaded))


def load_model(
    chunks: Sequence[torch.nn.Module], state: Mapping[str, Any], *, strict: bool = True
) -> None:
    """Set the weights from what was loaded for :func:`sharded_model`; all unless not strict."""
    for index, chunk in enumerate(chunks):
        # An empty stage has no weights, and leaves no trace in what was loaded.
        unwrap_model(chunk).load_state_dict(state.get(f"model{index}", {}), strict=strict)


def sharded_optimizer(
    optimizer: Any, model_state: Mapping[str, Any], metadata: Mapping[str, Any], *, loading: bool
) -> dict[str, Any]:
    """Return the optimizer's state with its places in the whole model.

    Experts that are spread over ranks have an optimizer of their own. Names of tensors do not say
    so; its groups, which do, are never read.

    Args:
        optimizer: megatron-core's optimizer.
        model_state: what :func:`sharded_model` returned.
        metadata: as given to :func:`sharded_model`.
        loading: the result says what to load, its values do not matter.
    """
    states: list[dict[str, Any]] = []
    for leaf in _leaves(optimizer):
        distributed = isinstance(leaf, DistributedOptimizer)
        fill_state(leaf)
        with _step_for_empty_rank(leaf):
            # Other optimizers would fill in state themselves when loading, in a way that fails for
            # SGD and forgets the step of torch's Adam.
            state: dict[str, Any] = leaf.sharded_state_dict(
                model_state, is_loading=loading and distributed, metadata=dict(metadata)
            )
        _move_step_to_groups(state)
        states.append(state)
    return states[0] | dict(zip((_EXPERTS,), states[1:], strict=False))


@dataclass(frozen=True, kw_only=True)
class StateParts:
    """Holds a state that was taken apart.

    Attributes:
        pieces: its tensors.
        objects: its other values by name, as megatron-core has them, several under one name.
        common: what all ranks have in common.
    """

    pieces: dict[Part, Piece]
    objects: dict[str, list[Any]]
    common: dict[str, Any]

    @classmethod
    def of(
        cls, sharded_state_dict: dict[str, Any], common: dict[str, Any], *, is_whole: bool
    ) -> StateParts:
        """Take megatron-core's shards apart.

        Args:
            sharded_state_dict: with the shards at its leaves.
            common: what all ranks have in common.
            is_whole: also what another rank would write.
        """
        parts = cls(pieces={}, objects={}, common=common)
        by_name, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, keep_only_main_replica=not is_whole
        )
        for name, shards in by_name.items():
            if isinstance(shards[0], ShardedObject):
                parts.objects[name] = [one.data for one in shards]
                continue
            for one in shards:
                size = [1] * one.prepend_axis_num + list(one.local_shape)
                piece = Piece(tensor=one.data, size=size, whole=list(one.global_shape))
                parts.pieces.setdefault((name, tuple(one.global_offset)), piece)
        return parts

    def is_lasting(self, chunks: Any, optimizer: Any) -> bool:
        """Return whether the same parts hold the state of every later step as well.

        They do where tensors are memory of the weights and of the optimizer's state themselves, and
        no object but random states holds anything.
        """
        empty = (data for name, data in self.objects.items() if not name.startswith(f"{RNG}/"))
        if not all(_is_nothing(one) for data in empty for one in data):
            return False
        places = {one.untyped_storage().data_ptr() for one in _own_tensors(chunks, optimizer)}
        tensors = (one.tensor for one in self.pieces.values() if one.tensor.numel())
        return all(one.untyped_storage().data_ptr() in places for one in tensors)


def _is_nothing(data: Any) -> bool:
    """Return whether a layer's object beside its tensors is empty, as it is without 8-bit types."""
    if isinstance(data, io.BytesIO):
        return not data.getbuffer().nbytes
    return data is None or (isinstance(data, torch.Tensor) and not data.numel())


def addresses(chunks: Any, optimizer: Any) -> list[int]:
    """Return the addresses of the weights and of the optimizer's state."""
    return [one.data_ptr() for one in _own_tensors(chunks, optimizer)]


def _own_tensors(chunks: Any, optimizer: Any) -> Iterator[torch.Tensor]:
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
    """Return whether ranks that are replicas of each other share the optimizer's state."""
    return isinstance(_leaves(optimizer)[0], DistributedOptimizer)


def refresh_optimizer(common: dict[str, Any], optimizer: Any) -> None:
    """Bring what :func:`sharded_optimizer` returned besides tensors to now, in place.

    Args:
        common: the part of it that all ranks have in common, of the same optimizer.
        optimizer: megatron-core's optimizer, not a distributed one.
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
    """Return whether the optimizer updates anything on this rank, unlike one with no layers."""
    return any(
        group["params"] for leaf in _leaves(optimizer) for group in leaf.optimizer.param_groups
    )


def load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """Set the optimizer's state from what was loaded for :func:`sharded_optimizer`.

    Hyperparameters (betas, weight decay multipliers, ends of the learning rate) stay those of this
    run's settings: only the step comes from the checkpoint.
    """
    first, *rest = _leaves(optimizer)
    experts = state.pop(_EXPERTS, {})
    _move_step_to_groups(state)  # Megatron-LM has it elsewhere
    step = state.get("optimizer", state)["param_groups"][0]["step"]
    for leaf in rest:
        # A run whose experts are not spread has saved no groups of theirs: this run's.
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
    for index, (own, other) in enumerate(zip(inner.param_groups, saved, strict=True)):
        own["lr_mult"] = other["lr_mult"] = float(index)
        for name in ("wd_mult", "is_expert_parallel", "is_decoupled_lr"):
            other[name] = own[name]
    # Written apart below, for megatron-core also wants to copy the step of torch's Adam from it.
    shards = state.pop("param_state", None) if isinstance(leaf, DistributedOptimizer) else None
    with _step_for_empty_rank(leaf):
        leaf.load_state_dict(state)
    if shards is not None:
        _load_shards(leaf, shards)
    for group, values in zip(inner.param_groups, kept, strict=True):
        group.update(values)
    fill_state(leaf)


def require_same_groups(optimizer: Any, saved: Mapping[str, Any], what: str) -> None:
    """Check that a checkpoint has the optimizer's groups of parameters, equal on all ranks.

    Args:
        optimizer: megatron-core's optimizer.
        saved: the common part of the checkpoint's optimizer state.
        what: names the checkpoint in the error.

    Raises:
        CheckpointError: it has others.
    """
    groups = saved.get("optimizer", saved).get("param_groups")
    if groups is None:  # as Megatron-LM writes it with expert parallelism
        raise CheckpointError(
            f"{what} holds the state of several optimizers, which is not read here: load the "
            "weights alone with --no-load-optim"
        )
    before, now = len(groups), len(_leaves(optimizer)[0].optimizer.param_groups)
    if before != now:
        raise CheckpointError(
            f"{what} holds optimizer state in {before} groups of parameters and this "
            f"run has {now}: give the same --decoupled-lr and weight decay, or load the "
            "weights alone with --no-load-optim"
        )


def _leaves(optimizer: Any) -> list[Any]:
    """Return the optimizers inside megatron-core's chain: one, and one of experts spread out."""
    return list(optimizer.chained_optimizers)


def _without(group: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in names}


def _is_torch_adam(leaf: Any) -> bool:
    return isinstance(leaf.optimizer, torch.optim.Adam | torch.optim.AdamW)


def fill_state(leaf: Any) -> None:
    """Give every parameter the state that the optimizer would make in its first step.

    A checkpoint then holds the same entries before and after that step, which float16 can put off
    for a dozen iterations.
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
                # A fused Adam counts its steps on the device. A checkpoint of one that is not fused
                # may hold the count on the host.
                state["step"] = step.to(parameter.device) if group.get("fused") else step


def _move_step_to_groups(state: dict[str, Any]) -> None:
    """Store the number of steps in the groups, where every implementation of Adam finds it."""
    inner = state.get("optimizer", state)
    groups = inner["param_groups"]
    common = inner.get("state", {}).pop("common_step", None)
    step = max([int(group.get("step") or 0) for group in groups] if common is None else [common])
    for group in groups:
        group["step"] = int(step)


@contextlib.contextmanager
def _step_for_empty_rank(leaf: Any) -> Iterator[None]:
    """Show the distributed optimizer a step where the rank's share has no parameter.

    With torch's Adam megatron-core reads the step from the state of the parameters, and fails on a
    rank that has none (an empty stage, or more data parallel ranks than elements).
    """
    key, inner = "step of a rank without parameters", leaf.optimizer
    is_empty = not any(group["params"] for group in inner.param_groups)
    if isinstance(leaf, DistributedOptimizer) and _is_torch_adam(leaf) and is_empty:
        step = float(inner.param_groups[0].get("step", 0))
        inner.state[key] = {"step": torch.tensor(step)}
    try:
        yield
    finally:
        inner.state.pop(key, None)


def _load_shards(leaf: Any, shards: Mapping[Any, Any]) -> None:
    """Load the distributed optimizer's share of main weights and moments.

    megatron-core copies every entry of a parameter's state, with torch's Adam also the step, which
    the checkpoint holds elsewhere; and it sets one step tensor for all parameters, so that each of
    them would count it up.
    """
    inner = leaf.optimizer
    torch_adam = _is_torch_adam(leaf)
    steps = {key: state.pop("step") for key, state in inner.state.items() if torch_adam}
    leaf.load_parameter_state_from_fully_reshardable(shards)
    for key, step in steps.items():
        inner.state[key]["step"] = step.clone()


def load_scheduler(scheduler: Any, optimizer: Any, saved: dict[str, Any]) -> None:
    """Set the schedule of learning rate and weight decay to where the checkpoint left it.

    Raises:
        CheckpointError: the run's settings give another schedule and no flag says which counts.
    """
    own = scheduler.state_dict()
    if _constant_decay(own) and _constant_decay(saved):
        saved = {**saved, "wd_incr_steps": own["wd_incr_steps"]}  # has no effect then
    different = [name for name in _SCHEDULE_FLAGS if saved[name] != own[name]]
    free = scheduler.override_opt_param_scheduler or scheduler.use_checkpoint_opt_param_scheduler
    if different and not free:
        listed = "; ".join(
            f"{_SCHEDULE_FLAGS[name]}: {saved[name]} in the checkpoint, {own[name]} here"
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
            group["max_lr"], group["min_lr"] = scheduler.max_lr, scheduler.min_lr
    scheduler.step(0)  # it was set while the scheduler still had the other weight decay


def _constant_decay(state: Mapping[str, Any]) -> bool:
    return state["wd_incr_style"] == "constant" and state["start_wd"] == state["end_wd"]


def sharded_rng(config: TrainerConfig) -> ShardedObject:
    """Return the random states of this rank, which only the same mesh can use."""
    shape, place = _mesh_place(config)
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": default_generator(current_device()).get_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject(RNG, state, shape, place, replica_id=0)


def load_rng(state: Mapping[str, Any]) -> None:
    """Set the random states of this rank.

    If the device's states come from another kind of device, they are not loaded, with a warning: a
    CPU's generator cannot continue from a GPU's state, nor the reverse.
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    generator = default_generator(current_device())
    now = generator.get_state()
    if state["device"].numel() != now.numel():  # one of a GPU has 16 bytes, one of a CPU 5056
        kinds = [
            "GPU" if one.numel() <= _GPU_STATE_BYTES else "CPU" for one in (state["device"], now)
        ]
        _LOG.warning(
            "WARNING: the checkpoint holds random states of a %s, and this rank computes on a %s: "
            "dropout goes on from --seed; with --no-load-rng this line goes away",
            *kinds,
        )
        return
    generator.set_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def _mesh_place(config: TrainerConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return sizes of the mesh's axes and this rank's position on each."""
    if config.parallel.unequal_sizes is not None:
        # No such axes: ranks one after the other.
        return (dist.get_world_size(), 1, 1), (dist.get_rank(), 0, 0)
    shape = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
    )
    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
    return shape, place
