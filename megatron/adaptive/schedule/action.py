"""Defines actions: an action is one kind of work on one (chunk, microbatch) of a rank.

Owns the vocabulary only. It does not know placements, orders, durations or readiness.
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

    # Enum hashes by name in Python code; the string's own hash is equal and several times cheaper.
    __hash__ = str.__hash__

    def __str__(self) -> str:
        return str.__str__(self)


KINDS = tuple(ActionKind)
NUMBER = {kind: number for number, kind in enumerate(KINDS)}
"""The kinds as the numbers of ``machine``."""


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One kind of work on one microbatch of one local chunk.

    Attributes:
        kind: forward, backward or backward by weights.
        chunk: index of the chunk on its rank, from 0.
        microbatch: index of the microbatch in the batch, from 0.
        piece: which part of a weight gradient, from 0; 0 for everything else.
        paired: a forward or backward of a fixed order that the next action starts beside, the one
            computing while the other communicates. No part of the action's identity.
    """

    kind: ActionKind
    chunk: int
    microbatch: int
    piece: int = 0
    paired: bool = False

    # Hot path: the generated pair compares and hashes tuples of all fields through Python code.
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
    """All actions of one kind, made once so that picking one on the hot path allocates nothing.

    Args:
        kind: the kind of every action in the table.
        num_chunks: chunks per rank.
        num_microbatches: microbatches per step.
        pieces: parts of each weight gradient, 1 for other kinds.

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
