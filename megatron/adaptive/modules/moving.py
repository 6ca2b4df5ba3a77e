"""Moves segments between the processes of a pipeline, with parameters, buffers and optimizer state.

Between two steps all ranks change to another partition::

    all ranks agree that they can ──> send what others need ──> keep only what the new stages use
                                      (pairs of ranks, one         (recordings are cut again,
                                       tensor after the other)      the optimizer stays)

Messages go over gloo, from host memory to host memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules.assembly import Assembly, PartitionLayout, names_of_shared
from megatron.adaptive.modules.batch import Signature
from megatron.adaptive.modules.cutting import keep_only
from megatron.adaptive.modules.mesh import Mesh
from megatron.adaptive.modules.recordings import CutForwards, KeptPart

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, kw_only=True)
class _Holdings:
    """Contains the names of the tensors that a rank has and needs, and why it cannot move.

    Attributes:
        position: Replica and position in the pipeline.
        held: Names of the parameters and buffers that the rank keeps now.
        needed: Names of those that it keeps after the move.
        groups: Options of the optimizer's parameter groups, ``None`` without an optimizer.
        refusal: Reason why the rank cannot move; empty if it can.
    """

    position: tuple[int, int]
    held: frozenset[str]
    needed: frozenset[str]
    groups: list[str] | None
    refusal: str


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Contains the stages of a rank under the new partition.

    Attributes:
        layout: Parameters and buffers of each rank.
        part: New cuts, for later recordings.
        cuts: Recordings of this rank, cut again.
    """

    layout: PartitionLayout
    part: KeptPart
    cuts: Mapping[Signature, Sequence[CutForwards]]


@dataclass(kw_only=True)
class _Parcel:
    """Contains what moves with a parameter or buffer.

    Attributes:
        value: Values, in host memory.
        group: Index of the optimizer's parameter group, ``None`` if it is in none.
        tensors: Tensors of the optimizer's state, in host memory, by key.
        on_host: Keys of those that the optimizer keeps in host memory.
        plain: Other values of the optimizer's state, by key.
    """

    value: torch.Tensor
    group: int | None = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    on_host: set[str] = field(default_factory=set)
    plain: dict[str, Any] = field(default_factory=dict)


class SegmentMover:
    """Moves segments between ranks. Its methods are collective over all ranks.

    Args:
        model: The user's whole model.
        order: Order in which a replica runs its microbatches.
        assembly: This rank's part of the model.
        mesh: Replica and pipeline position of this process, and its process groups.
    """

    def __init__(self, model: torch.nn.Module, order: str, assembly: Assembly, mesh: Mesh) -> None:
        self._model = model
        self._order = order
        self._assembly = assembly
        self._mesh = mesh
        self._update = assembly.update
        self._names = [name for name, _ in model.named_parameters()]
        self._grouped = set(self._layout(assembly.partition).shared.values())

    def move(self, partition: Sequence[int]) -> str | None:
        """Changes to another partition, the same on all ranks.

        Returns:
            Reason why all segments stay, the same on all ranks; ``None`` if they moved.
        """
        plan: _Plan | None = None
        refusal = ""
        try:
            plan = self._plan(tuple(partition))
            refusal = self._refusal(plan)
        except ConfigError as error:
            refusal = str(error)
        everyone = self._mesh.gather(
            _Holdings(
                position=(self._mesh.dp_rank, self._mesh.pp_rank),
                held=frozenset(self._assembly.held),
                needed=frozenset() if plan is None else frozenset(plan.layout.kept),
                groups=self._options(),
                refusal=refusal,
            )
        )
        for rank, of_rank in enumerate(everyone):
            if of_rank.refusal:
                return f"rank {rank}: {of_rank.refusal}"
        options = [of_rank.groups for of_rank in everyone if of_rank.groups is not None]
        if any(of_rank != options[0] for of_rank in options):
            return "the optimizers of two ranks have different parameter groups or options"
        has = set().union(*(each.held for each in everyone if each.position[0] == 0))
        lacking = sorted(set().union(*(each.needed for each in everyone)) - has)
        if lacking:
            return f"no rank has the values of {lacking[0]}"
        assert plan is not None
        self._adopt(plan, self._exchange(everyone))
        return None

    def shared_weights(self, partition: Sequence[int]) -> tuple[tuple[str, ...], ...]:
        """Returns all names of each parameter that several processes use under a partition."""
        return names_of_shared(self._assembly.forwards, self._layout(partition).shared)

    def _layout(self, partition: Sequence[int]) -> PartitionLayout:
        mesh = self._mesh
        return PartitionLayout.of(
            self._assembly.forwards,
            partition,
            self._names,
            mesh.pp_rank,
            self._assembly.recordings.part.placement,
            self._order,
        )

    def _plan(self, partition: tuple[int, ...]) -> _Plan:
        """Returns this rank's stages under a partition.

        Raises:
            ConfigError: If the model or a later recording cannot be cut so.
        """
        layout = self._layout(partition)
        recordings = self._assembly.recordings
        cuts = recordings.cut(partition)
        part = recordings.part
        stages = [
            part.placement.stage_of(part.pp_rank, chunk)
            for chunk in range(part.placement.num_chunks)
        ]
        for cut in (cut for of_signature in cuts.values() for cut in of_signature):
            for tape in cut.forwards.tapes.values():
                layout.kept.update(tape.read_buffers)
            for stage in stages:
                for plan in cut.plans(stage):
                    layout.kept.update(plan.buffers)
        part = dataclasses.replace(
            part, partition=partition, parameter_ranks=layout.uses, buffer_use=layout.buffer_use
        )
        for signature, of_signature in cuts.items():
            for cut in of_signature:
                part.check(cut, signature, layout.kept)
        return _Plan(layout=layout, part=part, cuts=cuts)

    def _refusal(self, plan: _Plan) -> str:
        """Returns why this rank cannot move, empty if it can."""
        held = self._assembly.held
        optimizer = self._update.optimizer
        gains = [name for name in plan.layout.uses if name in plan.layout.kept - held.keys()]
        parameters = dict(self._model.named_parameters())
        trained = [name for name in gains if parameters[name].requires_grad]
        if optimizer is None:
            if trained or any(p.requires_grad for p in self._update.parameters.values()):
                return "it has no optimizer, set by Pipeline.set_optimizer, for what it trains"
            return ""
        for name, parameter in self._update.parameters.items():
            if name in plan.layout.kept:
                continue
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                return f"parameter {name} has hooks, which would stay behind"
            for key, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, (torch.Tensor, *_PLAIN)):
                    return f"the optimizer keeps {key!r} of {name} as a {type(value).__name__}"
        return ""

    def _options(self) -> list[str] | None:
        """Returns the options of each parameter group as text, ``None`` without an optimizer."""
        optimizer = self._update.optimizer
        if optimizer is None:
            return None
        return [
            repr(sorted((key, value) for key, value in group.items() if key != "params"))
            for group in optimizer.param_groups
        ]

    def _exchange(self, everyone: Sequence[_Holdings]) -> dict[str, _Parcel]:
        """Sends what other ranks of the pipeline need; returns what this rank has received."""
        mesh = self._mesh
        of_position = {
            of_rank.position[1]: of_rank
            for of_rank in everyone
            if of_rank.position[0] == mesh.dp_rank
        }
        use = self._assembly.recordings.part.buffer_use
        received: dict[str, _Parcel] = {}
        for name in sorted(set().union(*(of_rank.held for of_rank in of_position.values()))):
            has = [
                position
                for position, of_rank in sorted(of_position.items())
                if name in of_rank.held
            ]
            # A buffer that changes is up to date only on the rank that uses it.
            is_changed = name in use.changed and bool(use.ranks.get(name))
            source = min(use.ranks[name]) if is_changed else has[0]
            for position, of_rank in sorted(of_position.items()):
                if position == source or name not in of_rank.needed:
                    continue
                if name in of_rank.held and not is_changed:
                    continue
                if mesh.pp_rank == source:
                    self._send(name, mesh.pp_ranks[position])
                elif mesh.pp_rank == position:
                    received[name] = self._receive(mesh.pp_ranks[source])
        return received

    def _send(self, name: str, rank: int) -> None:
        """Sends a parameter or buffer with its optimizer state to a rank."""
        tensor = self._assembly.held[name]
        parcel = _Parcel(value=tensor.detach())
        optimizer = self._update.optimizer
        if optimizer is not None and isinstance(tensor, torch.nn.Parameter):
            for index, group in enumerate(optimizer.param_groups):
                if any(parameter is tensor for parameter in group["params"]):
                    parcel.group = index
            for key, value in optimizer.state.get(tensor, {}).items():
                if not isinstance(value, torch.Tensor):
                    parcel.plain[key] = value
                    continue
                parcel.tensors[key] = value.detach()
                if value.device.type == "cpu":
                    parcel.on_host.add(key)
        tensors = [parcel.value, *parcel.tensors.values()]
        shapes = [(tuple(each.shape), each.dtype) for each in tensors]
        header = (shapes, parcel.group, list(parcel.tensors), parcel.on_host, parcel.plain)
        dist.send_object_list([header], dst=rank, group=self._mesh.control_group)
        for each in tensors:
            if each.numel():
                content = each.cpu().contiguous().reshape(-1).view(torch.uint8)
                dist.send(content, dst=rank, group=self._mesh.control_group)

    def _receive(self, rank: int) -> _Parcel:
        """Receives what :meth:`_send` sends."""
        box: list[Any] = [None]
        dist.recv_object_list(box, src=rank, group=self._mesh.control_group)
        shapes, group, keys, on_host, plain = box[0]
        tensors = []
        for shape, dtype in shapes:
            content = torch.empty(shape, dtype=dtype)
            if content.numel():
                dist.recv(
                    content.reshape(-1).view(torch.uint8), src=rank, group=self._mesh.control_group
                )
            tensors.append(content)
        return _Parcel(
            value=tensors[0],
            group=group,
            tensors=dict(zip(keys, tensors[1:], strict=True)),
            on_host=on_host,
            plain=plain,
        )

    def _adopt(self, plan: _Plan, received: Mapping[str, _Parcel]) -> None:
        """Keeps only what the new stages use, and cuts the recordings again. Collective."""
        mesh = self._mesh
        layout = plan.layout
        device = mesh.accelerator.device
        held = self._assembly.held
        former = dict(self._update.parameters)
        kept = keep_only(self._model, layout.kept, device)
        with torch.no_grad():
            for name, parcel in received.items():
                kept[name].copy_(parcel.value)
        # Programs, checkpoints and later recordings refer to this dictionary.
        held.clear()
        held.update(kept)
        parameters = {
            name: cast(torch.nn.Parameter, held[name])
            for name in self._names
            if name in held and name in layout.uses
        }
        new_sets = dict.fromkeys(
            positions for positions in layout.shared.values() if positions not in self._grouped
        )
        self._grouped.update(new_sets)
        groups = mesh.groups_of(new_sets)
        # settle() took the groups that existed before, and close() destroys only those in the list.
        mesh.groups.extend(groups.values())
        self._update.use(parameters, layout.shared, groups)
        if self._update.optimizer is not None:
            _replace_parameters(self._update.optimizer, former, parameters, received)
        self._assembly.recordings.use(plan.part, plan.cuts)


def _replace_parameters(
    optimizer: torch.optim.Optimizer,
    former: Mapping[str, torch.nn.Parameter],
    parameters: Mapping[str, torch.nn.Parameter],
    received: Mapping[str, _Parcel],
) -> None:
    """Removes parameters that have left from an optimizer, and adds those that have come.

    Args:
        optimizer: Optimizer of this rank, which stays the same object.
        former: Parameters before the move, by name.
        parameters: Parameters after the move, by name.
        received: Parameters with their state that have come, by name.
    """
    present = {id(parameter) for parameter in parameters.values()}
    gone = [parameter for parameter in former.values() if id(parameter) not in present]
    for parameter in gone:
        optimizer.state.pop(parameter, None)
    for group in optimizer.param_groups:
        group["params"] = [each for each in group["params"] if id(each) in present]
    for name, parcel in received.items():
        if name not in parameters or parcel.group is None:
            continue
        parameter = parameters[name]
        optimizer.param_groups[parcel.group]["params"].append(parameter)
        state: dict[str, Any] = dict(parcel.plain)
        for key, value in parcel.tensors.items():
            state[key] = value if key in parcel.on_host else value.to(parameter.device)
        if state:
            optimizer.state[parameter] = state
