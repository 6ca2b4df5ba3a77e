"""Moves segments, with their parameters, buffers and optimizer state, between processes.

All ranks change the partition (number of segments in each stage) between two steps::

    all ranks agree to move ──> send what others need ──> keep only what the new stages use
                                (pairs of ranks, one         (recordings are cut again,
                                 tensor after the other)      the optimizer stays)

Messages are sent with gloo, so tensors on a GPU are copied through host memory.
"""

from __future__ import annotations

import dataclasses
import itertools
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
from megatron.adaptive.modules.update import PARAMETER_LISTS, PARAMETER_NAMES

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, kw_only=True)
class _Holdings:
    """Lists the tensors that a rank has and needs. Ranks exchange these lists before a move.

    Attributes:
        position: Index of the rank's replica, and position of the rank in the replica's pipeline.
        held: Names of the parameters and buffers that the rank has.
        needed: Names of the parameters and buffers that the rank needs after the move.
        groups: Options of each parameter group of the optimizer, converted to strings; ``None`` if
            there is no optimizer.
        refusal: Reason why the rank cannot move its segments; empty if it can.
    """

    position: tuple[int, int]
    held: frozenset[str]
    needed: frozenset[str]
    groups: list[dict[str, str]] | None
    refusal: str


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Contains the stages of a rank in the new partition.

    Attributes:
        layout: Parameters and buffers that each rank needs.
        part: Description of the rank's new part of the model, used by later recordings.
        cuts: Existing recordings, cut into the new stages, keyed by microbatch signature.
    """

    layout: PartitionLayout
    part: KeptPart
    cuts: Mapping[Signature, Sequence[CutForwards]]


@dataclass(kw_only=True)
class _Parcel:
    """Contains a parameter or buffer to send, with its optimizer state.

    Attributes:
        value: Tensor of the parameter or buffer.
        attributes: Python attributes of the tensor that have plain values, keyed by name.
        group: Index of the tensor's parameter group in the optimizer; ``None`` if the tensor is in
            no group.
        label: Name of the tensor in the group's ``param_names``; ``None`` if the group has no
            names.
        tensors: Tensors in the optimizer's state of the parameter, keyed by name, such as
            ``exp_avg``.
        on_host: Names of those ``tensors`` that the optimizer keeps in host memory.
        plain: Other values in the optimizer's state of the parameter, keyed by name.
    """

    value: torch.Tensor
    attributes: dict[str, Any] = field(default_factory=dict)
    group: int | None = None
    label: str | None = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    on_host: set[str] = field(default_factory=set)
    plain: dict[str, Any] = field(default_factory=dict)


class SegmentMover:
    """Moves segments between ranks. All ranks must call each method together.

    Args:
        model: Whole model of the user.
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
        """Moves segments to match ``partition``. All ranks must pass the same partition.

        Returns:
            ``None`` if the segments were moved, otherwise the reason why they cannot be moved. The
                result is the same on all ranks.
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
        difference = _difference([of_rank.groups for of_rank in everyone])
        if difference:
            return difference
        has = set().union(*(each.held for each in everyone if each.position[0] == 0))
        lacking = sorted(set().union(*(each.needed for each in everyone)) - has)
        if lacking:
            return f"no rank holds the values of parameter or buffer {lacking[0]}"
        assert plan is not None
        self._adopt(plan, self._exchange(everyone))
        return None

    def shared_weights(self, partition: Sequence[int]) -> tuple[tuple[str, ...], ...]:
        """Returns the names of each parameter that several processes would use with ``partition``.

        Each tuple contains all names of one parameter.
        """
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
        """Returns this rank's stages for ``partition``.

        Raises:
            ConfigError: If a recording cannot be cut into these stages.
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
        """Returns the reason why this rank cannot switch to ``plan``, or an empty string."""
        held = self._assembly.held
        optimizer = self._update.optimizer
        gains = [name for name in plan.layout.uses if name in plan.layout.kept - held.keys()]
        parameters = dict(self._model.named_parameters())
        trained = [name for name in gains if parameters[name].requires_grad]
        if optimizer is None:
            if any(p.requires_grad for p in self._update.parameters.values()):
                return "it has no optimizer for its trained parameters; call Pipeline.set_optimizer"
            if trained:
                return (
                    f"it would get the trained parameter {trained[0]}, but has no optimizer, "
                    "because all its current parameters are frozen; set a partition in which each "
                    "process has a trained segment"
                )
            return ""
        for name, parameter in self._update.parameters.items():
            if name in plan.layout.kept:
                continue
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                return f"parameter {name} has hooks, which cannot be sent to another rank"
            for key, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, (torch.Tensor, *_PLAIN)):
                    return (
                        f"{key!r} in the optimizer's state of {name} is a {type(value).__name__}, "
                        "which cannot be sent to another rank"
                    )
        return ""

    def _options(self) -> list[dict[str, str]] | None:
        """Returns each parameter group's options as text, or ``None`` if there is no optimizer."""
        optimizer = self._update.optimizer
        if optimizer is None:
            return None
        return [
            {key: _text(value) for key, value in group.items() if key not in PARAMETER_LISTS}
            for group in optimizer.param_groups
        ]

    def _exchange(self, everyone: Sequence[_Holdings]) -> dict[str, _Parcel]:
        """Exchanges tensors within the pipeline, and returns the received tensors, keyed by name.

        ``everyone`` lists the tensors that each rank has and needs.
        """
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
            # If the forward pass changes the buffer, send the copy of a rank that uses it, because
            # all other copies are outdated.
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
        """Sends the parameter or buffer ``name``, with its optimizer state, to ``rank``."""
        tensor = self._assembly.held[name]
        parcel = _Parcel(value=tensor.detach(), attributes=_plain_attributes(tensor))
        optimizer = self._update.optimizer
        if optimizer is not None and isinstance(tensor, torch.nn.Parameter):
            for index, group in enumerate(optimizer.param_groups):
                for slot, parameter in enumerate(group["params"]):
                    if parameter is tensor:
                        parcel.group = index
                        parcel.label = (
                            group[PARAMETER_NAMES][slot] if PARAMETER_NAMES in group else None
                        )
            for key, value in optimizer.state.get(tensor, {}).items():
                if not isinstance(value, torch.Tensor):
                    parcel.plain[key] = value
                    continue
                parcel.tensors[key] = value.detach()
                if value.device.type == "cpu":
                    parcel.on_host.add(key)
        tensors = [parcel.value, *parcel.tensors.values()]
        shapes = [(tuple(each.shape), each.dtype) for each in tensors]
        # Send the tensors separately, to avoid pickling them.
        header = dataclasses.replace(
            parcel, value=torch.empty(0), tensors=dict.fromkeys(parcel.tensors, torch.empty(0))
        )
        dist.send_object_list([(shapes, header)], dst=rank, group=self._mesh.control_group)
        for each in tensors:
            if each.numel():
                content = each.cpu().contiguous().reshape(-1).view(torch.uint8)
                dist.send(content, dst=rank, group=self._mesh.control_group)

    def _receive(self, rank: int) -> _Parcel:
        """Receives the parameter or buffer that ``rank`` sends with :meth:`_send`."""
        box: list[Any] = [None]
        dist.recv_object_list(box, src=rank, group=self._mesh.control_group)
        shapes, parcel = box[0]
        tensors = []
        for shape, dtype in shapes:
            content = torch.empty(shape, dtype=dtype)
            if content.numel():
                dist.recv(
                    content.reshape(-1).view(torch.uint8), src=rank, group=self._mesh.control_group
                )
            tensors.append(content)
        parcel.value = tensors[0]
        parcel.tensors = dict(zip(parcel.tensors, tensors[1:], strict=True))
        return cast(_Parcel, parcel)

    def _adopt(self, plan: _Plan, received: Mapping[str, _Parcel]) -> None:
        """Switches to the stages of ``plan``, and keeps only the tensors that these stages need.

        ``received`` contains the tensors received from other ranks, keyed by name. All ranks must
        call this.
        """
        mesh = self._mesh
        layout = plan.layout
        device = mesh.accelerator.device
        held = self._assembly.held
        former = dict(self._update.parameters)
        kept = keep_only(self._model, layout.kept, device)
        with torch.no_grad():
            for name, parcel in received.items():
                kept[name].copy_(parcel.value)
                vars(kept[name]).update(parcel.attributes)
        # Modify the dictionary in place, because programs, checkpoints and later recordings use the
        # same object.
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
        # Add the new groups to this list, because close() destroys only the groups that the list
        # contains. The groups that existed at the start are already in the list.
        mesh.groups.extend(groups.values())
        self._update.use(parameters, layout.shared, groups)
        if self._update.optimizer is not None:
            _replace_parameters(self._update.optimizer, former, parameters, received)
        self._assembly.recordings.use(plan.part, plan.cuts)


def _text(value: object) -> str:
    """Returns the optimizer option ``value`` as text.

    The text of a tensor contains its values, but not its device.
    """
    if isinstance(value, torch.Tensor):
        return repr(value.tolist())
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value)


def _difference(groups: Sequence[Sequence[Mapping[str, str]] | None]) -> str:
    """Describes an option that differs between the optimizers of two ranks.

    Returns an empty string if the options of all optimizers match.

    Args:
        groups: Options of each parameter group as text, one list per rank; ``None`` for a rank
            without an optimizer.
    """
    optimizers = [(rank, options) for rank, options in enumerate(groups) if options is not None]
    for rank, options in optimizers[1:]:
        first, expected = optimizers[0]
        if len(options) != len(expected):
            return (
                f"the optimizer of rank {first} has {len(expected)} parameter groups, but the "
                f"optimizer of rank {rank} has {len(options)}; create the same groups on all "
                "ranks"
            )
        for index, (left, right) in enumerate(zip(expected, options, strict=True)):
            for key in sorted(left.keys() | right.keys()):
                texts = [options.get(key, "missing") for options in (left, right)]
                if texts[0] != texts[1]:
                    return (
                        f"option {key} of the optimizer's parameter group {index} is {texts[0]} "
                        f"on rank {first}, but {texts[1]} on rank {rank}; use the same value on "
                        "all ranks"
                    )
    return ""


def _plain_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Returns the Python attributes of ``tensor`` that have plain values, keyed by name."""
    return {key: value for key, value in vars(tensor).items() if isinstance(value, _PLAIN)}


def _replace_parameters(
    optimizer: torch.optim.Optimizer,
    former: Mapping[str, torch.nn.Parameter],
    parameters: Mapping[str, torch.nn.Parameter],
    received: Mapping[str, _Parcel],
) -> None:
    """Removes sent parameters from the optimizer of this rank, and adds received parameters.

    Args:
        optimizer: Optimizer of this rank, which is modified in place.
        former: Parameters before the move, keyed by name.
        parameters: Parameters after the move, keyed by name.
        received: Received parameters with their optimizer state, keyed by name.
    """
    present = {id(parameter) for parameter in parameters.values()}
    gone = [parameter for parameter in former.values() if id(parameter) not in present]
    for parameter in gone:
        optimizer.state.pop(parameter, None)
    for group in optimizer.param_groups:
        stays = [id(each) in present for each in group["params"]]
        for key in PARAMETER_LISTS & group.keys():
            group[key] = list(itertools.compress(group[key], stays))
    for name, parcel in received.items():
        if name not in parameters or parcel.group is None:
            continue
        parameter = parameters[name]
        group = optimizer.param_groups[parcel.group]
        group["params"].append(parameter)
        if PARAMETER_NAMES in group:
            group[PARAMETER_NAMES].append(name if parcel.label is None else parcel.label)
        state: dict[str, Any] = dict(parcel.plain)
        for key, value in parcel.tensors.items():
            state[key] = value if key in parcel.on_host else value.to(parameter.device)
        if state:
            optimizer.state[parameter] = state
