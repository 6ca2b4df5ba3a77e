"""Which rank keeps which parameters and buffers, and what becomes of the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules.tape import Tape

__all__ = ["SharedWeight", "check_groups", "keep_only", "shared_weights", "unused_parameters"]


@dataclass(frozen=True, slots=True)
class SharedWeight:
    """A parameter that several ranks of a pipeline hold.

    Attributes:
        name: its first name.
        positions: of those ranks, ascending.
    """

    name: str
    positions: tuple[int, ...]


def check_groups(model: torch.nn.Module, groups: Sequence[Sequence[str]]) -> None:
    """Check declared groups of shared weights.

    Raises:
        ConfigError: a name is unknown, or a group is not one parameter.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    for group in groups:
        if isinstance(group, str):
            raise ConfigError(
                f"shared_weights holds {group!r}: give a list of groups, each a list of names"
            )
        for name in group:
            if name not in named:
                raise ConfigError(
                    f"shared_weights names {name!r}, which is no parameter of the model"
                )
            if named[name] is not named[group[0]]:
                raise ConfigError(
                    f"shared_weights says that {group[0]} and {name} are one parameter, but the "
                    f"model has two: assign one to the other before"
                )


def shared_weights(uses: Mapping[str, Iterable[int]], order: Sequence[str]) -> list[SharedWeight]:
    """Return the parameters that several ranks hold.

    Args:
        uses: positions that use each parameter.
        order: names of all parameters.
    """
    found = []
    for name in order:
        positions = tuple(sorted(set(uses.get(name, ()))))
        if len(positions) > 1:
            found.append(SharedWeight(name, positions))
    return found


def keep_only(
    model: torch.nn.Module, names: Iterable[str], device: torch.device
) -> dict[str, torch.Tensor]:
    """Move what the rank keeps to its device, and free the rest.

    Parameters stay the same objects. What goes is replaced by a tensor on the ``meta`` device: its
    shape stays known, its memory is free.

    Args:
        model: the whole model.
        names: first names of the parameters and buffers to keep.
        device: the rank's.

    Returns:
        What was kept, by name.
    """
    keep = set(names)
    by_id: dict[int, torch.Tensor] = {}
    held: dict[str, torch.Tensor] = {}
    for name, parameter in list(model.named_parameters()):
        if name in keep:
            parameter.data = parameter.data.to(device)
            held[name] = parameter
        else:
            by_id[id(parameter)] = torch.nn.Parameter(
                torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
            )
    for name, buffer in list(model.named_buffers()):
        if name in keep:
            by_id[id(buffer)] = held[name] = buffer.to(device)
        else:
            by_id[id(buffer)] = torch.empty_like(buffer, device="meta")
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for key, one in tensors.items():
                if one is not None and id(one) in by_id:
                    tensors[key] = by_id[id(one)]  # type: ignore[assignment]
    return held


def unused_parameters(model: torch.nn.Module, tapes: Iterable[Tape]) -> list[str]:
    """Return the parameters that no forward uses."""
    used = {value.name for tape in tapes for value in tape.values if value.source == "parameter"}
    return [name for name, _ in model.named_parameters() if name not in used]
