"""Exchanges what ranks must know of each other through a store of ``torch.distributed``."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron.adaptive.errors import DeadlineError

__all__ = ["StoreGather"]


class StoreGather:
    """Returns to every rank what each of them passed; works before there is any process group.

    Values are what JSON can hold: nothing that comes from another process is executed.

    Args:
        store: shared by the ranks, empty below ``prefix``.
        rank: this rank.
        world_size: number of ranks.
        prefix: tells this exchange from others in the same store.
        timeout_s: limit of a wait for the other ranks.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, prefix: str, timeout_s: float = 300.0
    ) -> None:
        self._store = dist.PrefixStore(prefix, store)
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._count = 0

    def __call__(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank. Collective.

        Raises:
            DeadlineError: a rank did not come in time.
        """
        count, self._count = self._count, self._count + 1
        self._store.set(f"{count}/{self._rank}", json.dumps(value))
        keys = [f"{count}/{rank}" for rank in range(self._world_size)]
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout_s))
        except dist.DistStoreError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise DeadlineError(
                f"ranks {missing} did not come to exchange {count} of the transports within "
                f"{self._timeout_s:g} s; are they alive and do they reach the store?"
            ) from error
        return [json.loads(self._store.get(key)) for key in keys]
