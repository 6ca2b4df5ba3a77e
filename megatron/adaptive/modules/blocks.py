"""Finds lists of repeated blocks in a model. The model may be cut into stages after each block.

::

    model
    ├── vision.layers       list of 24 blocks    ┐ a cut point after each block
    ├── projector           plain layers         │ no cut points: other lists have blocks
    └── language.layers     list of 32 blocks    ┘ a cut point after each block
            └── experts     list within a block    no cut points: not an outermost list

The search uses only the structure of the model, not the names of its classes. Whether the forward
pass calls each block exactly once is checked later, when the forward pass is recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn


def repeated_blocks(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Returns the lists of repeated blocks in ``model``, keyed by the name of the list.

    A list of repeated blocks is a ``ModuleList`` or ``Sequential`` with at least two members of the
    same class that have parameters. A list within a block is included only if the blocks differ
    in size and the inner list contains most parameters of its block, as in some vision models with
    several resolutions. Lists of layers without submodules are included only if there are no other
    lists.

    Args:
        model: Model to search; it is not changed.
    """
    lists: dict[str, list[nn.Module]] = {}
    _search("", model, lists, set())
    blocks = {name: members for name, members in lists.items() if _have_submodules(members)}
    return blocks or lists


def _search(
    name: str, module: nn.Module, lists: dict[str, list[nn.Module]], seen: set[int]
) -> None:
    """Adds the lists of repeated blocks in ``module`` to ``lists``, keyed by the list's name.

    ``name`` is the name of ``module``, and ``seen`` contains the ``id()`` of each module that has
    been searched.
    """
    if id(module) in seen:
        return
    seen.add(id(module))
    members = _members(module)
    if members:
        lists[name] = members
    for child_name, child in module.named_children():
        if members and not _is_divided(child, members):
            continue
        _search(f"{name}.{child_name}" if name else child_name, child, lists, seen)


def _members(module: nn.Module) -> list[nn.Module]:
    """Returns the blocks if ``module`` is a list of repeated blocks, otherwise an empty list."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return []
    members = list(module)
    classes = Counter(type(member) for member in members if _num_parameters(member))
    is_repeated = max(classes.values(), default=0) > 1
    is_called = all(type(member).forward is not nn.Module.forward for member in members)
    is_unique = len({id(member) for member in members}) == len(members)
    return members if is_repeated and is_called and is_unique else []


def _is_divided(member: nn.Module, members: Iterable[nn.Module]) -> bool:
    """Returns whether to search the block ``member`` for lists of smaller blocks.

    A block is searched if the blocks in its list (``members``) differ in size, and an inner list
    contains most parameters of the block.
    """
    if len({_num_parameters(other) for other in members}) == 1:
        return False
    lists = [module for module in member.modules() if _have_submodules(_members(module))]
    return any(2 * _num_parameters(module) > _num_parameters(member) for module in lists)


def _have_submodules(members: Iterable[nn.Module]) -> bool:
    return any(any(True for _ in member.children()) for member in members)


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
