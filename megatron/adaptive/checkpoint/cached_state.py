"""What a checkpoint need not find out again while the state stays where it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron.adaptive.checkpoint import state as state
from megatron.adaptive.checkpoint.saver import Shards

__all__ = ["Standing"]


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A state that was taken apart and is still in the same memory.

    Attributes:
        shards: what this rank writes, without copies.
        common: what all ranks have in common, as it was.
        random: shards with the random states, which are elsewhere each time.
        addresses: of the weights and of the optimizer's state.
    """

    shards: Shards
    common: dict[str, Any]
    random: list[ShardedObject]
    addresses: list[int]

    @classmethod
    def of(
        cls, shards: Shards, common: dict[str, Any], chunks: Any, optimizer: Any
    ) -> Standing | None:
        """Return it, ``None`` where parts of the state were made for the moment."""
        every = [one for own in shards.values() for one in own]
        tensors = [one.data for one in every if not isinstance(one, ShardedObject)]
        objects = [one for one in every if isinstance(one, ShardedObject)]
        random = [one for one in objects if one.key == state.RNG]
        others = [one.data for one in objects if one.key != state.RNG]
        if not all(state.is_nothing(one) for one in others):
            return None
        if not state.lives_in_place(tensors, chunks, optimizer):
            return None
        addresses = state.addresses(chunks, optimizer)
        return cls(shards=shards, common=common, random=random, addresses=addresses)
