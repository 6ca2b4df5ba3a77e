"""Writes the ranks' parts of a checkpoint in megatron-core's ``torch_dist``, again and again.

It is written in the process that trains: megatron-core's own writer starts a process by ``spawn``
and others by ``fork`` at each save, which costs seconds and copies the sockets and mappings of the
channels into the children.

The first time torch's planner says who writes what, and its plan and metadata are kept. While no
rank's state changes its shape, a checkpoint then is one write of each rank and a few numbers
between them. That matters behind training, where each line of Python holds up the thread that
trains.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron.adaptive.checkpoint.collective_errors import RankGroup

__all__ = ["Shards", "TorchDistWriter", "by_name", "common_bytes"]

_METADATA = ".metadata"
Shards = dict[str, list[Any]]
_Place = tuple[str, tuple[int, ...] | None]  # of objects only the name


class TorchDistWriter:
    """Writes checkpoints of one run.

    Attributes:
        backend: name of the format.
        version: of it.
        can_handle_sharded_objects: objects that differ between ranks are written among the tensors.
    """

    backend = "torch_dist"
    version = 1
    can_handle_sharded_objects = True

    def __init__(self) -> None:
        self._kinds: dict[_Place, Any] | None = None
        self._name = ""
        self._indices: list[MetadataIndex] = []
        self._written: list[WriteResult] = []
        self._metadata: Metadata | None = None
        self._content = b""

    def write(self, shards: Shards, folder: Path, ranks: RankGroup) -> None:
        """Write shards; collective.

        Args:
            shards: this rank's, of its own alone, by name.
            folder: of the checkpoint; it exists on all ranks.
            ranks: all of them.

        Raises:
            CheckpointError: it could not be written on some rank.
        """
        kinds = _kinds(shards)
        if ranks.any(kinds != self._kinds):
            self._kinds = None
            ranks.together(lambda: self._plan(shards, folder, ranks.group))
            if {_place(one) for one in self._indices} == kinds.keys():
                self._kinds = kinds
            return
        data = _data(shards)
        own = [data[_place(one)] for one in self._indices]
        written = ranks.together(lambda: _write_file(folder / self._name, self._indices, own))
        if not ranks.any(written != self._written):
            return
        changed = {
            new.index: new.storage_data
            for new, old in zip(written, self._written, strict=True)
            if new != old
        }
        self._written = written
        for one in ranks.gather(changed):
            if self._metadata is not None:
                self._metadata.storage_data.update(one)
        self._content = pickle.dumps(self._metadata)

    def write_metadata(self, folder: Path) -> None:
        """Write the index of all ranks' files; on rank 0, after :meth:`write`."""
        (folder / _METADATA).write_bytes(self._content)
        save_config(CheckpointingConfig(self.backend, self.version), str(folder))

    def _plan(self, shards: Shards, folder: Path, group: dist.ProcessGroup) -> None:
        """Write as torch's planner says, and keep what it said."""
        writer = _PlanKeeper(folder)
        torch_checkpoint.save(
            dict(mcore_to_pyt_state_dict(dict(shards), False)),
            storage_writer=writer,
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=group,
        )
        self._name, self._indices, self._written = writer.name, writer.indices, writer.written
        self._metadata = writer.metadata
        self._content = pickle.dumps(self._metadata)


class _PlanKeeper(FileSystemWriter):  # type: ignore[misc]
    """Writes a plan of torch's, and keeps what the next checkpoint of the same form needs.

    Attributes:
        name: of this rank's file.
        indices: of its parts, in their order.
        written: where they lie.
        metadata: on rank 0, the content of ``.metadata``, once all have written.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=False)
        self.name = ""
        self.indices: list[MetadataIndex] = []
        self.written: list[WriteResult] = []
        self.metadata: Metadata | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part, objects last: their lengths may change from save to save."""
        items = sorted(plan.items, key=lambda item: item.type == WriteItemType.BYTE_IO)
        self.name = f"{plan.storage_data.prefix}0.distcp"
        self.indices = [item.index for item in items]
        data: list[Any] = [planner.resolve_data(item) for item in items]
        self.written = _write_file(Path(self.path) / self.name, self.indices, data)
        done: Future[list[WriteResult]] = Future()
        done.set_result(self.written)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Keep where everything lies."""
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {one.index: one.storage_data for own in results for one in own}
        # torch's own would name the folder of the moment, and change at each checkpoint.
        metadata.storage_meta = None
        self.metadata = metadata


def _write_file(
    path: Path, indices: Sequence[MetadataIndex], data: Sequence[torch.Tensor | io.BytesIO]
) -> list[WriteResult]:
    """Write a rank's file; the system still has to make it durable.

    Args:
        path: of the file.
        indices: of its parts.
        data: of each; tensors wherever they are, or what is pickled already.

    Returns:
        Where each lies.

    Raises:
        OSError: it could not be written.
    """
    found, end = [], 0
    try:
        with path.open("wb") as file:
            for index, one in zip(indices, data, strict=True):
                buffer = one if isinstance(one, io.BytesIO) else _pickled(_compact(one))
                length = file.write(buffer.getbuffer())
                where = _StorageInfo(path.name, end, length)
                found.append(WriteResult(index=index, size_in_bytes=length, storage_data=where))
                end += length
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    return found


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the host's memory, without what else is in memory that it lies in."""
    tensor = tensor.detach().cpu()
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone()


def _pickled(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer


@functools.cache
def _pickled_nothing() -> io.BytesIO:
    """Return the file of the empty object that most layers have beside their tensors."""
    return _pickled([None])


def _place(index: MetadataIndex) -> _Place:
    return index.fqn, None if index.offset is None else tuple(index.offset)


def _kinds(shards: Shards) -> dict[_Place, Any]:
    """Return what the plan and the metadata depend on, by place."""
    kinds: dict[_Place, Any] = {}
    for name, own in shards.items():
        for one in own:
            if isinstance(one, ShardedObject):
                kinds[name, None] = len(own)
            else:
                kinds[name, tuple(one.global_offset)] = (
                    one.dtype,
                    one.local_shape,
                    one.global_shape,
                    one.axis_fragmentations,
                    getattr(one, "flattened_range", None),
                )
    return kinds


def _data(shards: Shards) -> dict[_Place, torch.Tensor | io.BytesIO]:
    """Return what is written, by place; objects pickled as megatron-core does."""
    data: dict[_Place, torch.Tensor | io.BytesIO] = {}
    for name, own in shards.items():
        if isinstance(own[0], ShardedObject):
            values = [one.data for one in own]
            data[name, None] = _pickled_nothing() if values == [None] else _pickled(values)
        else:
            data |= {(name, tuple(one.global_offset)): one.data for one in own}
    return data


def common_bytes(common: dict[str, Any]) -> memoryview:
    """Return the file of what all ranks have in common; torch itself hides why writing fails."""
    return _pickled(common).getbuffer()


def by_name(sharded_state_dict: dict[str, Any], *, own: bool = False) -> Shards:
    """Return megatron-core's shards by their names in a checkpoint.

    Args:
        sharded_state_dict: with the shards at its leaves.
        own: only what this rank writes, of all that it has.
    """
    flat, _, _ = _replace_state_dict_keys_with_sharded_keys(
        sharded_state_dict, keep_only_main_replica=own
    )
    return dict(flat)
