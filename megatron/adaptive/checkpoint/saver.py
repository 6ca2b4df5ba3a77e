"""Writes the ranks' parts of a checkpoint, again and again, at the price of their bytes.

The first time torch's planner says who writes what, and the rest of its work (the plan of each
rank, the whole one, the metadata, the form of the files) is kept. While no rank's state changes its
shape, a checkpoint then is one copy of the tensors into memory that stays, one write of each rank
and a few numbers between them. That matters behind training, where each line of Python holds up the
thread that trains.
"""

from __future__ import annotations

import copy as copy_module
import functools
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    mcore_to_pyt_state_dict,
)
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.metadata import Metadata

from megatron.adaptive.checkpoint.exchange import Exchange
from megatron.adaptive.checkpoint.host_copy import HostCopy
from megatron.adaptive.checkpoint.shards import (
    Place,
    ShardFile,
    ShardWriter,
    metadata_bytes,
    write_metadata,
)

__all__ = ["InProcessSaver", "Shards"]

Shards = dict[str, list[Any]]


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """What a rank writes.

    Attributes:
        shards: megatron-core's, by name, with the data to be written.
        tensors: the same by name and place.
        objects: by name, what is pickled.
    """

    shards: Shards
    tensors: dict[Place, torch.Tensor]
    objects: dict[str, list[Any]]

    @classmethod
    def of(cls, shards: Shards) -> _Parts:
        """Sort shards."""
        tensors: dict[Place, torch.Tensor] = {}
        objects: dict[str, list[Any]] = {}
        for name, own in shards.items():
            for shard in own:
                if isinstance(shard, ShardedObject):
                    objects.setdefault(name, []).append(shard.data)
                else:
                    tensors[name, tuple(shard.global_offset)] = shard.data
        return cls(shards=shards, tensors=tensors, objects=objects)


class InProcessSaver:
    """Writes megatron-core's ``torch_dist`` without other processes.

    Attributes:
        backend: name of the format.
        version: of it.
        can_handle_sharded_objects: objects that differ between ranks are written among the tensors.
    """

    backend = "torch_dist"
    version = 1
    can_handle_sharded_objects = True

    def __init__(self) -> None:
        self._form: tuple[ShardFile, dict[Place, Any]] | None = None
        self._metadata: Metadata | None = None
        self._content = b""
        self._lengths: list[int] = []
        self._host: _HostShards | None = None

    def taken(self, shards: Shards, *, copy: bool) -> Shards:
        """Return shards that stay as they are while what was given is taken apart again.

        Args:
            shards: of this rank alone.
            copy: whether what they hold is copied into the host's memory, for it may change. The
                memory stays for the next time: what was copied before is overwritten.
        """
        if not copy:
            return {name: [copy_module.copy(one) for one in own] for name, own in shards.items()}
        if self._host is None or not self._host.fits(shards):
            self._host = None  # so that its memory is free
            self._host = _HostShards(shards)
        return self._host.take(shards)

    def write(self, shards: Shards, folder: Path, ranks: Exchange) -> None:
        """Write shards; collective.

        Args:
            shards: this rank's, of its own alone.
            folder: of the checkpoint; it exists on all ranks.
            ranks: all of them.

        Raises:
            CheckpointError: it could not be written on some rank.
        """
        parts = _Parts.of(shards)
        if ranks.any(not self._knows(parts)):
            self._form = self._metadata = None
            ranks.together(lambda: self._plan(parts, folder, ranks.group))
            return
        assert self._form is not None
        file, _ = self._form
        objects = [_pickled(parts.objects[name]) for name in file.objects]
        tensors = [parts.tensors[place] for place in file.places]
        ranks.together(lambda: file.write(folder, tensors, objects))
        self._tell_lengths(file, objects, ranks)

    def write_metadata(self, folder: Path) -> None:
        """Write what all ranks' files hold; on rank 0, after :meth:`write`."""
        write_metadata(folder, self._content)

    def _knows(self, parts: _Parts) -> bool:
        """Whether this rank wrote the same kinds of tensors before."""
        if self._form is None:
            return False
        file, kinds = self._form
        return _kinds(parts) == kinds and parts.objects.keys() == set(file.objects)

    def _plan(self, parts: _Parts, folder: Path, group: dist.ProcessGroup) -> None:
        """Write as torch's planner says, and keep what it said."""
        kinds = _kinds(parts)
        writer = ShardWriter(folder)
        torch_checkpoint.save(
            dict(mcore_to_pyt_state_dict(dict(parts.shards), False)),
            storage_writer=writer,
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=group,
        )
        assert writer.file is not None
        if sorted(writer.file.places) == sorted(kinds):
            self._form = writer.file, kinds
        self._lengths = writer.lengths
        self._metadata = writer.metadata
        if self._metadata is not None:
            self._content = metadata_bytes(self._metadata, {})

    def _tell_lengths(
        self, file: ShardFile, objects: Sequence[memoryview], ranks: Exchange
    ) -> None:
        """Let rank 0 know where objects lie, where that is elsewhere than the last time."""
        lengths = [one.nbytes for one in objects]
        if not ranks.any(lengths != self._lengths):
            return
        self._lengths = lengths
        own = {one.index: one.storage_data for one in file.results_of_objects(objects)}
        gathered: list[Any] = [None] * dist.get_world_size(ranks.group)
        dist.all_gather_object(gathered, own, group=ranks.group)
        if self._metadata is not None:
            for one in gathered:
                self._content = metadata_bytes(self._metadata, one)


class _HostShards:
    """Shards whose tensors are in memory of the host.

    Args:
        shards: of what is to be copied.
    """

    def __init__(self, shards: Shards) -> None:
        self._layout = _layout(shards)
        self._shards = {
            name: [copy_module.copy(one) for one in own] for name, own in shards.items()
        }
        for one in self._each(self._shards):
            one.data = None  # what is copied may be there for a moment only
        self._copy = HostCopy(self._tensors(shards))

    def fits(self, shards: Shards) -> bool:
        """Whether shards are like those that it was made for."""
        return _layout(shards) == self._layout

    def take(self, shards: Shards) -> Shards:
        """Copy what shards hold now; returns the same object each time."""
        copies = iter(self._copy.take(self._tensors(shards)))
        for one, own in zip(self._each(shards), self._each(self._shards), strict=True):
            if not isinstance(one, ShardedObject):
                own.data = next(copies)
            elif one.data is not None:
                own.data = copy_module.deepcopy(one.data)
        return self._shards

    @classmethod
    def _tensors(cls, shards: Shards) -> list[torch.Tensor]:
        return [one.data for one in cls._each(shards) if not isinstance(one, ShardedObject)]

    @staticmethod
    def _each(shards: Shards) -> Iterator[Any]:
        return (one for own in shards.values() for one in own)


def _layout(shards: Shards) -> list[tuple[Any, ...]]:
    """What copies of shards depend on."""
    return [
        (name, one.global_offset, None, None)
        if isinstance(one, ShardedObject)
        else (name, one.global_offset, one.data.dtype, one.data.shape)
        for name, own in shards.items()
        for one in own
    ]


def _kinds(parts: _Parts) -> dict[Place, tuple[Any, ...]]:
    """What the form of a file and the metadata depend on."""
    return {
        (name, tuple(one.global_offset)): (
            one.dtype,
            one.local_shape,
            one.global_shape,
            one.axis_fragmentations,
            getattr(one, "flattened_range", None),
        )
        for name, own in parts.shards.items()
        for one in own
        if not isinstance(one, ShardedObject)
    }


def _pickled(data: list[Any]) -> memoryview:
    """Pickle objects as megatron-core does."""
    return _nothing() if data == [None] else _pickle(data)


@functools.cache
def _nothing() -> memoryview:
    """Most layers have an object beside their tensors, and nothing in it."""
    return _pickle([None])


def _pickle(data: list[Any]) -> memoryview:
    buffer = io.BytesIO()
    torch.save(data, buffer)
    return buffer.getbuffer()
