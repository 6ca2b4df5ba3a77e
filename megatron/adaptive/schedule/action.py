"""Defines actions: an action is one kind of work on one (chunk, microbatch) of a rank.

Owns this vocabulary only. Placements, orders, durations and readiness are in other modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache


class ActionKind(str, Enum):
    """Kinds of work: forward, backward (whole, or by inputs when split), backward by weights."""

    F = "F"
    B = "B"
    W = "W"

    # Enum.__hash__ runs Python code. The hash of the string serves as well and is several times
    # cheaper.
    __hash__ = str.__hash__

    def __str__(self) -> str:
        return str.__str__(self)


KINDS = tuple(ActionKind)
NUMBER = {kind: number for number, kind in enumerate(KINDS)}
"""Number of each kind in ``rank_kernel``."""


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """Names one kind of work on one microbatch of one local chunk.

    Attributes:
        kind: Forward, backward or backward by weights.
        chunk: Index of the chunk on its rank, from 0.
        microbatch: Index of the microbatch in the batch, from 0.
        piece: Index of the part of a weight gradient, from 0; 0 for all other kinds.
        paired: True if a fixed order starts the next action together with this one, so that one
            computes while the other communicates. Equality and hash ignore it.
    """

    kind: ActionKind
    chunk: int
    microbatch: int
    piece: int = 0
    paired: bool = False

    # Hot path: the methods that dataclass generates build a tuple of all fields for each call.
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
        name = f"{self.kind}{self.chunk}-{self.microbatch}"
        return f"{name}.{self.piece}" if self.piece else name + "+" * self.paired


ActionTable = tuple[tuple[Action, ...], ...]
"""Actions of one kind, indexed ``[chunk][microbatch * pieces + piece]``."""


@lru_cache(maxsize=64)
def action_table(
    kind: ActionKind, num_chunks: int, num_microbatches: int, pieces: int = 1
) -> ActionTable:
    """Returns all actions of one kind.

    They are made once, so that picking one on the hot path allocates nothing.

    Args:
        kind: Kind of every action in the table.
        num_chunks: Number of chunks per rank.
        num_microbatches: Number of microbatches per step.
        pieces: Number of parts of each weight gradient, 1 for other kinds.

    Returns:
        Immutable table indexed ``[chunk][microbatch * pieces + piece]``; equal arguments share one
        table.
    """
    return tuple(
        tuple(
            Action(kind, chunk, microbatch, piece)
            for microbatch in range(num_microbatches)
            for piece in range(pieces)
        )
        for chunk in range(num_chunks)
    )
