"""Names parameters and optimizer state by layer, and moves them between ranks.

The name of a parameter contains the index of its layer in the model, or the index of its stage if
the parameter belongs to no layer. The name also contains the tensor-parallel rank and, for experts,
the expert-parallel rank. Therefore, the name stays the same when a layer moves to another stage.

A "share" is the range of a tensor's elements that a rank holds. With the distributed optimizer, a
rank holds only a part of the optimizer state, otherwise the whole state. The range depends on the
layout of the gradient buffers, which changes on every rank that gains or loses a layer::

    weight    all elements, on every replica
    state     main weight (of 16-bit parameters), moments: elements start..end

The state is sent from memory to memory, with one message per pair of ranks.
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

from megatron.adaptive.accelerator import locked_memory
from megatron.adaptive.errors import TransportError

_LAYERS = "decoder.layers."
_NORM = "decoder.final_layernorm."
_TAG = 71
_MESSAGE_BYTES = 1 << 28


@dataclass(slots=True)
class Share:
    """This rank's elements of a parameter or buffer, or of its optimizer state.

    Attributes:
        start: Index of the first element.
        end: Index of the last element, plus one.
        tensors: One-dimensional tensors of ``end - start`` elements: the weight alone, or the parts
            of the optimizer state, in the same order on all ranks.
    """

    start: int
    end: int
    tensors: list[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Ranges of tensors that a rank holds before a move, and ranges that it needs after the move.

    Attributes:
        replica: Index of the rank among data- and context-parallel ranks.
        had: Range (start, end) of elements that the rank holds before the move, keyed by share
            name.
        wants: Range (start, end) of elements that the rank needs after the move, keyed by share
            name.
        steps: Number of updates that the rank's optimizer has made.
    """

    replica: int
    had: Mapping[str, tuple[int, int]]
    wants: Mapping[str, tuple[int, int]]
    steps: float


@dataclass(frozen=True, slots=True)
class Passage:
    """Copy of a range of a tensor's elements from one rank to another.

    Source and target may be the same rank.

    Attributes:
        source: Global rank that holds the elements.
        target: Global rank that needs the elements.
        name: Name of the share, which is a range of a tensor's elements on one rank.
        start: Index of the first element.
        end: Index of the last element, plus one.
    """

    source: int
    target: int
    name: str
    start: int
    end: int


def shares_of(
    optimizer: Any, chunks: Sequence[torch.nn.Module], stages: Sequence[int]
) -> dict[str, Share]:
    """Returns this rank's share (range of elements) of each tensor, keyed by name of the share.

    The tensors in the shares are views of the model's and the optimizer's tensors.

    Each parameter has a share for its weight. It has a second share for its optimizer state if this
    rank holds any part of that state.

    Args:
        optimizer: megatron-core's optimizer over the parameters of ``chunks``.
        chunks: Model chunks of this rank, with or without megatron-core's wrappers.
        stages: Index of the pipeline stage in each chunk.
    """
    shares = {}
    held_by = _leaf_of_each(optimizer.chained_optimizers)
    for name, weight in _named(chunks, stages):
        shares[name] = Share(0, weight.numel(), [weight.detach().view(-1)])
        if not isinstance(weight, torch.nn.Parameter):
            continue  # A buffer, such as the bias of a router, has no optimizer state.
        main = getattr(weight, "main_param", None)  # Main weight: 32-bit copy of a 16-bit weight.
        leaf = held_by.get(weight) or held_by.get(main)
        if leaf is None:
            continue  # The weight is frozen, or only other replicas update it.
        held, start, end = _held(leaf, weight)
        state = leaf.optimizer.state.get(held, {})
        parts = [
            state[key]
            for key in sorted(state)
            if key != "step" and isinstance(state[key], torch.Tensor)
        ]
        if _storage(held) != _storage(weight):
            parts.append(held)
        if parts:
            flat = [part.detach().view(-1) for part in parts]
            shares[f"{name}, state"] = Share(start, end, flat)
    return shares


def _leaf_of_each(leaves: Sequence[Any]) -> dict[torch.Tensor | None, Any]:
    """Returns, for each parameter, the chained optimizer that updates it on this rank.

    megatron-core combines several optimizers into one. ``leaves`` contains these optimizers, which
    are called chained optimizers. Experts that are distributed over ranks have one optimizer, and
    all other parameters another. With muon, megatron-core uses one optimizer for matrices, and
    another for all other parameters.
    """
    held_by: dict[torch.Tensor | None, Any] = {}
    for leaf in leaves:
        if isinstance(leaf, DistributedOptimizer):
            held_by |= dict.fromkeys(leaf.model_param_group_index_map, leaf)
            continue
        updated = {p for group in leaf.optimizer.param_groups for p in group["params"]}
        held_by |= dict.fromkeys(updated, leaf)
    return held_by


def _is_spread(weight: torch.Tensor) -> bool:
    """Returns whether ``weight`` belongs to experts that are distributed over ranks."""
    return not getattr(weight, "allreduce", True)


def _named(
    chunks: Sequence[torch.nn.Module], stages: Sequence[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) of parameters and persistent buffers, with the same names on all ranks.

    ``stages`` contains the index of the pipeline stage in each of the ``chunks``.
    """
    dense = f"of {parallel_state.get_tensor_model_parallel_rank()}"
    spread = (
        f"of {parallel_state.get_expert_tensor_parallel_rank()}, experts of "
        f"{parallel_state.get_expert_model_parallel_rank()}"
    )
    for chunk, stage in zip(chunks, stages, strict=True):
        model = unwrap_model(chunk)
        for module in model.modules():
            if hasattr(module, "_maintain_float32_expert_bias"):
                # Building a 16-bit model casts this bias to 16 bits, but training keeps it in 32
                # bits. Cast it back, because sender and receiver must use the same type.
                module._maintain_float32_expert_bias()
        for name, tensor in (*model.named_parameters(), *_kept_buffers(model)):
            part = spread if _is_spread(tensor) else dense
            if name.startswith(_LAYERS):
                layer, rest = name.removeprefix(_LAYERS).split(".", 1)
                number = model.decoder.layers[int(layer)].layer_number
                yield f"layer {number} {rest} {part}", tensor
            elif name.startswith(_NORM):
                # If the model has multi-token prediction, this normalization belongs to the stage
                # of the last layer. That stage may change, so the name omits its index.
                yield f"{name} {part}", tensor
            else:
                yield f"stage {stage} {name} {part}", tensor


def _kept_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _held(leaf: Any, weight: torch.nn.Parameter) -> tuple[torch.Tensor, int, int]:
    """Returns the tensor that optimizer ``leaf`` updates for ``weight``, and its range of elements.

    The range is given by the index of the first element, and the index after the last element.
    """
    if not isinstance(leaf, DistributedOptimizer):
        main = getattr(weight, "main_param", None)
        return (weight if main is None else main), 0, weight.numel()
    group, index = leaf.model_param_group_index_map[weight]
    elements = leaf._get_model_param_range_map(weight)["param"]
    return leaf.optimizer.param_groups[group]["params"][index], elements.start, elements.end


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def steps_of(optimizer: Any) -> float:
    """Returns the number of updates that ``optimizer`` has made, or 0 if the number is unknown."""
    counted = []
    for leaf in optimizer.chained_optimizers:
        inner = leaf.optimizer
        counted += [float(state["step"]) for state in inner.state.values() if "step" in state]
        counted += [float(group["step"]) for group in inner.param_groups if group.get("step")]
    return max(counted, default=0.0)


def passages(tables: Mapping[int, Table]) -> list[Passage]:
    """Returns the copies between ranks (passages) that a move of stages requires.

    Every rank computes the same list from the same tables. If the target rank already holds the
    elements, it is also the source. Otherwise, a rank of the same replica is preferred as source.
    Shares whose range does not change on a rank are omitted.

    Args:
        tables: Tables of all ranks, keyed by global rank.
    """
    holders: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(tables):
        for name in tables[rank].had:
            holders[name].append(rank)
    needed: list[Passage] = []
    for target in sorted(tables):
        table = tables[target]

        def distance(
            rank: int, target: int = target, table: Table = table
        ) -> tuple[bool, bool, int]:
            return rank != target, tables[rank].replica != table.replica, rank

        for name in sorted(table.wants):
            sources = sorted(holders[name], key=distance)
            start, end = table.wants[name]
            if table.had.get(name) != (start, end):
                had = [(rank, *tables[rank].had[name]) for rank in sources]
                needed += _cover(target, name, start, end, had)
    return needed


def _cover(
    target: int, name: str, start: int, end: int, had: Sequence[tuple[int, int, int]]
) -> Iterator[Passage]:
    """Yields copies that together provide the elements from ``start`` to ``end`` of a share.

    Args:
        target: Global rank that needs the elements.
        name: Name of the share.
        start: Index of the first element.
        end: Index of the last element, plus one.
        had: (Rank, start, end) of the elements that each rank holds, with preferred ranks first.
    """
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
    assert not missing, f"some elements of {name} are on no rank"


def exchange(
    needed: Sequence[Passage],
    rank: int,
    old: Mapping[str, Share],
    new: Mapping[str, Share],
    group: dist.ProcessGroup,
) -> None:
    """Copies the elements listed in ``needed`` from their sources to their targets.

    This function must be called on all sources and targets. It blocks until all messages from and
    to this rank have been transferred.

    Args:
        needed: Passages of all ranks, from :func:`passages`.
        rank: Global rank of this process.
        old: Shares that this rank had before the move.
        new: Shares to fill. Their tensors must already be allocated.
        group: Process group of all ranks, with backend gloo.

    Raises:
        TransportError: If a message is not transferred within the group's timeout.
    """
    outgoing: dict[int, list[torch.Tensor]] = defaultdict(list)
    incoming: dict[int, list[torch.Tensor]] = defaultdict(list)
    for passage in needed:
        if passage.source == rank == passage.target:
            for source, target in zip(_parts(old, passage), _parts(new, passage), strict=True):
                target.copy_(source)
        elif passage.source == rank:
            outgoing[passage.target] += _parts(old, passage)
        elif passage.target == rank:
            incoming[passage.source] += _parts(new, passage)
    # Join all tensors for a peer into one message of bytes, because their types may differ.
    sizes = {peer: [tensor.nbytes for tensor in tensors] for peer, tensors in incoming.items()}
    arrived = {peer: torch.empty(sum(nbytes), dtype=torch.uint8) for peer, nbytes in sizes.items()}
    leaving = _messages(outgoing)
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
            f"rank {rank} could not send or receive layers (peers: {peers}): {reason}; the job's "
            "state is lost, so resume the job from its last checkpoint"
        ) from error
    for peer, tensors in incoming.items():
        for tensor, part in zip(tensors, arrived[peer].split(sizes[peer]), strict=True):
            # Bytes must be aligned to be viewed as another type. A part of the message may be
            # unaligned, but a clone of this part is aligned.
            tensor.copy_(part.clone().view(tensor.dtype))


def _messages(outgoing: Mapping[int, Sequence[torch.Tensor]]) -> dict[int, torch.Tensor]:
    """Copies the tensors for each peer into one message of bytes in host memory.

    The tensors are copied one by one, so this function needs no additional memory on a GPU.
    """
    messages = {}
    devices = set()
    for peer, tensors in outgoing.items():
        sizes = [tensor.nbytes for tensor in tensors]
        gpus = {tensor.device for tensor in tensors if tensor.is_cuda}
        devices |= gpus
        if gpus:
            message = locked_memory(sum(sizes), next(iter(gpus)))
        else:
            message = torch.empty(sum(sizes), dtype=torch.uint8)
        for part, tensor in zip(message.split(sizes), tensors, strict=True):
            part.copy_(tensor.view(torch.uint8), non_blocking=True)
        messages[peer] = message
    for device in devices:
        torch.cuda.synchronize(device)
    return messages


def _parts(shares: Mapping[str, Share], passage: Passage) -> list[torch.Tensor]:
    """Returns views of the elements of ``passage``, one for each tensor of the share."""
    share = shares[passage.name]
    chosen = slice(passage.start - share.start, passage.end - share.start)
    return [tensor[chosen] for tensor in share.tensors]
