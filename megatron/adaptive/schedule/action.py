"""Defines actions: forward (F), backward (B) or weight-gradient (W) work on one microbatch.

Each action belongs to one model chunk of a rank. Other modules decide where, when and in which
order actions run.
"""

from __future__ import annotations

import bisect
import itertools
import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import NamedTuple, TypeAlias


class ActionKind(str, Enum):
    """Kinds of action: F (forward pass), B (backward pass) and W (weight gradients).

    In a schedule without W actions, B also computes the weight gradients.
    """

    F = "F"
    B = "B"
    W = "W"

    # Actions are hashed often, and hashing the string is several times faster than
    # ``Enum.__hash__``, which runs Python code.
    __hash__ = str.__hash__

    def __str__(self) -> str:
        return str.__str__(self)


KINDS = tuple(ActionKind)
NUMBER = {kind: number for number, kind in enumerate(KINDS)}
"""Integer code of each kind in ``rank_kernel``: 0 for F, 1 for B, 2 for W."""


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """A forward (F), backward (B) or weight-gradient (W) action on one microbatch.

    Attributes:
        kind: Kind of action: F, B or W.
        chunk: Index of the chunk among the rank's chunks, from 0.
        microbatch: Index of the microbatch in the batch, from 0. If sequences are cut into slices,
            this is the index of the slice, counted across all microbatches (see ``rank_kernel``).
        piece: Index of this W among the W actions of the same weight gradient, from 0. Always 0 for
            F and B.
        paired: Whether a static schedule starts this action together with the next one, so that one
            computes while the other communicates. Equality and hash ignore this field.
    """

    kind: ActionKind
    chunk: int
    microbatch: int
    piece: int = 0
    paired: bool = False

    # ``__eq__`` and ``__hash__`` are called often. The methods that a dataclass generates are
    # slower, because they build a tuple of all fields in each call.
    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Action):
            return NotImplemented
        return (
            self.microbatch == other.microbatch
            and self.chunk == other.chunk
            and self.kind == other.kind
            and self.piece == other.piece
        )

    def __hash__(self) -> int:
        return hash((self.microbatch, self.chunk, self.kind, self.piece))

    def __str__(self) -> str:
        return self.label()

    def label(self, num_slices: SliceCounts = 1) -> str:
        """Returns the label of the action in logs and drawings, such as ``F0-3``.

        ``F0-3`` is the forward pass of microbatch 3 in chunk 0.

        Args:
            num_slices: Number of slices of each microbatch. If there are several, the label
                contains the microbatch and the slice, for example ``F0-3.5``.
        """
        name = f"{self.kind}{self.chunk}-{item_label(self.microbatch, num_slices)}"
        return f"{name}.{self.piece}" if self.piece else name + "+" * self.paired


SliceCounts: TypeAlias = int | tuple[int, ...]
"""Number of slices per microbatch: an integer if it is the same for all, otherwise a tuple.

A whole microbatch counts as one slice.
"""


class SlicePlace(NamedTuple):
    """Position of an item (a slice or a whole microbatch) within its microbatch.

    Attributes:
        microbatch: Index of the microbatch.
        part: Index of the slice in the microbatch, from 0.
        slices: Number of slices of the microbatch.
    """

    microbatch: int
    part: int
    slices: int


@lru_cache(maxsize=64)
def _ends_of(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the cumulative sums of ``counts``, the number of slices of each microbatch."""
    return tuple(itertools.accumulate(counts))


def place_of(item: int, num_slices: SliceCounts) -> SlicePlace:
    """Returns the microbatch of ``item``, and the position of ``item`` in this microbatch.

    An item is a slice or a whole microbatch. ``num_slices`` is the number of slices of each
    microbatch.
    """
    if isinstance(num_slices, int):
        return SlicePlace(*divmod(item, num_slices), num_slices)
    ends = _ends_of(num_slices)
    microbatch = bisect.bisect_right(ends, item)
    count = num_slices[microbatch]
    return SlicePlace(microbatch, item - ends[microbatch] + count, count)


def item_count(num_microbatches: int, num_slices: SliceCounts) -> int:
    """Returns the number of slices in a step of ``num_microbatches`` microbatches.

    ``num_slices`` is the number of slices of each microbatch.
    """
    if isinstance(num_slices, int):
        return num_microbatches * num_slices
    return sum(num_slices)


def each_count(num_microbatches: int, num_slices: SliceCounts) -> tuple[int, ...]:
    """Returns the number of slices of each microbatch, as a tuple of length ``num_microbatches``.

    If ``num_slices`` is an integer, every microbatch has that many slices.
    """
    if isinstance(num_slices, int):
        return (num_slices,) * num_microbatches
    return num_slices


def mean_slices(num_slices: SliceCounts) -> float:
    """Returns the mean number of slices per microbatch in ``num_slices``."""
    if isinstance(num_slices, int):
        return num_slices
    return sum(num_slices) / len(num_slices)


def most_slices_of(num_slices: SliceCounts) -> int:
    """Returns the largest number of slices per microbatch in ``num_slices``."""
    return num_slices if isinstance(num_slices, int) else max(num_slices)


ActionTable = tuple[tuple[Action, ...], ...]
"""Actions of one kind for each chunk, in the order in which the chunk runs them."""


@lru_cache(maxsize=64)
def action_table(
    kind: ActionKind,
    num_chunks: int,
    num_microbatches: int,
    pieces: int = 1,
    num_slices: SliceCounts = 1,
) -> ActionTable:
    """Returns all actions of one kind in a step.

    All actions are created in advance, so that choosing an action during a step allocates no
    memory.

    Args:
        kind: Kind of all actions in the table.
        num_chunks: Number of chunks per rank.
        num_microbatches: Number of microbatches per step.
        pieces: Number of W actions per weight gradient, or 1 for F and B.
        num_slices: Number of slices of each microbatch, or 1 for whole microbatches.

    Returns:
        Immutable table with each chunk's actions, in the order in which the chunk runs them. Calls
        with equal arguments return the same object.
    """
    turned = kind is not ActionKind.F
    return tuple(
        tuple(
            Action(kind, chunk, mirrored(index, num_slices) if turned else index, piece)
            for index in range(item_count(num_microbatches, num_slices))
            for piece in range(pieces)
        )
        for chunk in range(num_chunks)
    )


def mirrored(item: int, num_slices: SliceCounts) -> int:
    """Returns the slice at the mirrored position in the microbatch that contains slice ``item``.

    For example, with 3 slices per microbatch, index 0 is mapped to 2, and index 2 to 0. A chunk
    runs the B and W actions of each microbatch from the last slice to the first (see
    ``rank_kernel``), so its j-th B, counted from 0, works on slice ``mirrored(j, num_slices)``. The
    function is its own inverse.
    """
    _, part, count = place_of(item, num_slices)
    return item - part + count - 1 - part


def item_label(item: int, num_slices: SliceCounts) -> str:
    """Returns the label of ``item``, such as ``3`` for microbatch 3 or ``3.5`` for its slice 5."""
    if num_slices == 1:
        return str(item)
    microbatch, part, _ = place_of(item, num_slices)
    return place_label(microbatch, part)


def place_label(microbatch: int, part: int | None) -> str:
    """Returns the label of a slice, such as ``3.5``, or of a whole microbatch, such as ``3``.

    Args:
        microbatch: Index of the microbatch.
        part: Index of the slice in the microbatch, or ``None`` for a whole microbatch.
    """
    return str(microbatch) if part is None else f"{microbatch}.{part}"


def with_slices(text: str, step: int, num_slices: SliceCounts) -> str:
    """Replaces the slice indices in a transport's message with labels such as ``3.5``.

    Transports number all slices of a step consecutively. For example, ``microbatch 29 of step 7``
    in their messages becomes ``microbatch 3.5 of step 7``, which means slice 5 of microbatch 3.
    References to other steps are left unchanged, because those steps may have different numbers of
    slices.

    Args:
        text: Text that may contain the index of a slice or microbatch.
        step: Number of the current step.
        num_slices: Number of slices of each microbatch in the current step.
    """
    count = None if isinstance(num_slices, int) else item_count(len(num_slices), num_slices)

    def named(match: re.Match[str]) -> str:
        item = int(match[1])
        if int(match[2]) != step or (count is not None and item >= count):
            return match[0]
        return f"microbatch {item_label(item, num_slices)} of step {step}"

    return re.sub(r"microbatch (\d+) of step (-?\d+)", named, text)
