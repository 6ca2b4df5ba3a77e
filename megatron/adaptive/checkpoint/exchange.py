"""What ranks that write or read a checkpoint of megatron-core's form do together."""

from __future__ import annotations

import io
from typing import Any, ClassVar

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.torch import (
    _replace_state_dict_keys_with_sharded_keys,
)

from megatron.adaptive.checkpoint import collective_errors as exchange

__all__ = ["Exchange", "by_name", "common_bytes"]


class Exchange(exchange.Exchange):
    """Lets ranks fail alike, also with what megatron-core says of files that it cannot read."""

    expected: ClassVar[tuple[type[BaseException], ...]] = (
        *exchange.Exchange.expected,
        CheckpointingException,
    )


def common_bytes(common: dict[str, Any]) -> memoryview:
    """Return the file of what all ranks have in common; torch itself hides why writing fails."""
    buffer = io.BytesIO()
    torch.save(common, buffer)
    return buffer.getbuffer()


def by_name(sharded_state_dict: dict[str, Any], *, own: bool = False) -> dict[str, list[Any]]:
    """Return megatron-core's shards by their names in a checkpoint.

    Args:
        sharded_state_dict: with the shards at its leaves.
        own: only what this rank writes, of all that it has.
    """
    flat, _, _ = _replace_state_dict_keys_with_sharded_keys(
        sharded_state_dict, keep_only_main_replica=own
    )
    return dict(flat)
