"""Parameters and their optimizer state by their names in the whole model, and their way elsewhere.

A parameter is named by the number of its layer in the model, or by the stage whose it is where it
belongs to no layer, and by the part of it that a rank has: its tensor-parallel rank, of experts
their expert-parallel one too. None of these changes when a layer goes to another stage. Of its
optimizer state a rank holds a share: all of it, or with the distributed optimizer a run of elements
that follows from the layout of the gradient buffers, which changes on every rank that gains or
loses a layer::

    weight    all elements, on every replica
    state     main weight (of 16-bit parameters), moments: elements start..end

Everything goes from memory to memory, one message for each pair of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import unwrap_model

from megatron.adaptive.errors import TransportError

_LAYERS = "decoder.layers."
_NORM = "decoder.final_layernorm."
_TAG = 71
_MESSAGE_BYTES = 1 << 28


@dataclass(slots=True)
class Share:
    """This rank's elements of a parameter or buffer, or of its optimizer state.

    Attributes:
        start: first element.
        end: one past the last.
        tensors: flat tensors of ``end - start`` elements, in an order that all ranks know.
    """

    start: int
    end: int
    tensors: list[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Lists the state that a rank had and wants, for the others.

    Attributes:
        replica: its position among data- and context-parallel ranks.
        had: shares that it held, by name.
        wants: shares that it shall hold, by name.
        steps: updates that the optimizer has done.
    """

    replica: int
    had: Mapping[str, tuple[int, int]]
    wants: Mapping[str, tuple[int, int]]
    steps: float


@dataclass(frozen=True, slots=True)
class Passage:
    """Elements of one share that go from one rank to another, or stay on it.

    Attributes:
        source: global rank that has them.
        target: global rank that wants them.
        name: of the share.
        start: first element.
        end: one past the last.
    """

    source: int
    target: int
    name: str
    start: int
    end: int


def shares_of(
    optimizer: Any, chunks: Sequence[torch.nn.Module], stages: Sequence[int]
) -> dict[str, Share]:
    """Returns this rank's shares by name; tensors are those in use, not copies.

    A parameter has one share for its weight and, where this rank has some of it, one for its state.

    Args:
        optimizer: megatron-core's optimizer over the parameters of ``chunks``.
        chunks: this rank's model chunks, wrapped or not.
        stages: the stage of each.
    """
    found = {}
    for name, weight in _named(chunks, stages):
        found[name] = Share(0, weight.numel(), [weight.detach().view(-1)])
        if not isinstance(weight, torch.nn.Parameter):
            continue  # a buffer, such as a router's bias
        leaf = optimizer.chained_optimizers[_is_spread(weight)]
        held, start, end = _held(leaf, weight)
        if held is None:
            continue
        state = leaf.optimizer.state.get(held, {})
        parts = [
            state[part]
            for part in sorted(state)
            if part != "step" and isinstance(state[part], torch.Tensor)
        ]
        if _storage(held) != _storage(weight):
            parts.append(held)
        if parts:
            found[f"{name}, state"] = Share(start, end, [one.detach().view(-1) for one in parts])
    return found


def _is_spread(weight: torch.Tensor) -> bool:
    """Returns whether a parameter is of experts that other ranks have others of."""
    return not getattr(weight, "allreduce", True)


def _named(
    chunks: Sequence[torch.nn.Module], stages: Sequence[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields parameters and the buffers that checkpoints hold, with their names."""
    dense = f"of {parallel_state.get_tensor_model_parallel_rank()}"
    spread = (
        f"of {parallel_state.get_expert_tensor_parallel_rank()}, experts of "
        f"{parallel_state.get_expert_model_parallel_rank()}"
    )
    for chunk, stage in zip(chunks, stages, strict=True):
        model = unwrap_model(chunk)
        for module in model.modules():
            if hasattr(module, "_maintain_float32_expert_bias"):
                module._maintain_float32_expert_bias()  # 16-bit models are cast when built
        for name, tensor in (*model.named_parameters(), *_kept_buffers(model)):
            part = spread if _is_spread(tensor) else dense
            if name.startswith(_LAYERS):
                place, rest = name.removeprefix(_LAYERS).split(".", 1)
                number = model.decoder.layers[int(place)].layer_number
                yield f"layer {number} {rest} {part}", tensor
            elif name.startswith(_NORM):  # goes with the last layer under multi-token prediction
                yield f"{name} {part}", tensor
            else:
                yield f"stage {stage} {name} {part}", tensor


def _kept_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _held(leaf: Any, weight: torch.nn.Parameter) -> tuple[torch.Tensor | None, int, int]:
    """Returns the tensor that the optimizer updates for a parameter, and its range of elements.

    ``None`` where no part of it is this rank's.
    """
    if not weight.requires_grad:
        return None, 0, 0
    if not isinstance(leaf, DistributedOptimizer):
        main = getattr(weight, "main_param", None)
        return (weight if main is None else main), 0, weight.numel()
    place = leaf.model_param_group_index_map.get(weight)
    if place is None:
        return None, 0, 0
    group, index = place
    elements = leaf._get_model_param_range_map(weight)["param"]
    return leaf.optimizer.param_groups[group]["params"][index], elements.start, elements.end


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def steps_of(optimizer: Any) -> float:
    """Returns the updates that an optimizer has done, 0 where it does not count them."""
    counted = []
    for leaf in optimizer.chained_optimizers:
        inner = leaf.optimizer
        counted += [float(state["step"]) for state in inner.state.values() if "step" in state]
        counted += [float(group["step"]) for group in inner.param_groups if group.get("step")]
    return max(counted, default=0.0)


def passages(tables: Mapping[int, Table]) -> list[Passage]:
    """Lists the passages; the same on every rank that has the same tables.

    Elements come from this rank itself where they can, else from the same replica, else from one
    that has them. A share that stays as it is needs no passage.

    Args:
        tables: by global rank.
    """
    holders: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(tables):
        for name in tables[rank].had:
            holders[name].append(rank)
    found: list[Passage] = []
    for target in sorted(tables):
        wishes = tables[target]

        def nearness(
            rank: int, target: int = target, wishes: Table = wishes
        ) -> tuple[bool, bool, int]:
            return rank != target, tables[rank].replica != wishes.replica, rank

        for name in sorted(wishes.wants):
            sources = sorted(holders[name], key=nearness)
            start, end = wishes.wants[name]
            if wishes.had.get(name) != (start, end):
                had = [(rank, *tables[rank].had[name]) for rank in sources]
                found += _cover(target, name, start, end, had)
    return found


def _cover(
    target: int, name: str, start: int, end: int, had: Sequence[tuple[int, int, int]]
) -> Iterator[Passage]:
    """Puts elements together from the shares of several ranks, the first ones preferred."""
    missing = [(start, end)] if start < end else []
    for rank, low, high in had:
        rest = []
        for first, last in missing:
            begin, stop = max(first, low), min(last, high)
            if begin >= stop:
                rest.append((first, last))
                continue
            yield Passage(rank, target, name, begin, stop)
            rest += [(first, begin)] if first < begin else []
            rest += [(stop, last)] if stop < last else []
        missing = rest
    assert not missing, f"nobody holds all of {name}"


def exchange(
    ways: Sequence[Passage],
    rank: int,
    old: Mapping[str, Share],
    new: Mapping[str, Share],
    group: dist.ProcessGroup,
) -> None:
    """Sends and receives the state of every passage; sources and targets call it.

    Blocks until everything that comes here has come and everything that leaves has left.

    Args:
        ways: what :func:`passages` returned.
        rank: this global rank.
        old: what it had.
        new: what it shall have, with room for it.
        group: gloo group of all ranks.

    Raises:
        TransportError: a message did not come or go within the group's time limit.
    """
    outgoing: dict[int, list[torch.Tensor]] = defaultdict(list)
    incoming: dict[int, list[torch.Tensor]] = defaultdict(list)
    for way in ways:
        if way.source == rank == way.target:
            for here, there in zip(_parts(old, way), _parts(new, way), strict=True):
                there.copy_(here)
        elif way.source == rank:
            outgoing[way.target] += _parts(old, way)
        elif way.target == rank:
            incoming[way.source] += _parts(new, way)
    # A message is the bytes of its tensors, one after the other.
    sizes = {peer: [one.nbytes for one in tensors] for peer, tensors in incoming.items()}
    arrived = {peer: torch.empty(sum(each), dtype=torch.uint8) for peer, each in sizes.items()}
    leaving = {
        peer: torch.cat([one.view(torch.uint8) for one in tensors]).cpu()
        for peer, tensors in outgoing.items()
    }
    operations = [
        dist.P2POp(call, part, peer, group, _TAG)
        for call, messages in ((dist.irecv, arrived), (dist.isend, leaving))
        for peer in sorted(messages)
        for part in messages[peer].split(_MESSAGE_BYTES)
    ]
    try:
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
    except RuntimeError as error:
        peers = ", ".join(map(str, sorted({*arrived, *leaving})))
        reason = str(error).splitlines()[0]
        raise TransportError(
            f"rank {rank} could not pass layers from or to rank {peers}: {reason}; the job's state "
            "is lost: resume it from its last checkpoint"
        ) from error
    for peer, tensors in incoming.items():
        for tensor, part in zip(tensors, arrived[peer].split(sizes[peer]), strict=True):
            tensor.copy_(part.clone().view(tensor.dtype))  # where its type may begin


def _parts(shares: Mapping[str, Share], way: Passage) -> list[torch.Tensor]:
    """Returns the tensors of a passage on one of its ends."""
    share = shares[way.name]
    return [one[way.start - share.start : way.end - share.start] for one in share.tensors]
