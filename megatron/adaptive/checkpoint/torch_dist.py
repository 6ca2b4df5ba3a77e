"""Writes the state of all ranks in the form of ``torch.distributed.checkpoint``.

::

    __<rank>_0.distcp    what a rank writes: its tensors, then its objects, each as torch.save does
    .metadata            name, place in the whole tensor, file and offset of each of them

Every checkpoint is written here: the trainer's, which megatron-core reads as ``torch_dist``, those
of a ``Pipeline``, and those made of snapshots in memory. It is written in the process that trains:
megatron-core's own writer starts a process by ``spawn`` and others by ``fork`` at each save, which
costs seconds and copies the sockets and mappings of the channels into the children.

Ranks agree on who writes what when some rank's state changes its layout. Until then a checkpoint is
one write of each rank and a few numbers between them. That matters behind training, where each line
of Python holds up the thread that trains.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.adaptive.checkpoint.folder import sync

if TYPE_CHECKING:
    from megatron.adaptive.checkpoint.collective_errors import RankGroup

METADATA = ".metadata"

Part = tuple[str, tuple[int, ...]]
"""Name in a checkpoint, and place in the whole tensor."""

Entry = dict[str, Any]
"""Describes a part in a checkpoint's index, see :func:`entry_of`; an object by its ``name`` alone.

Once it is written it has also ``path``, ``at`` and ``length``: the file, and its bytes there.
"""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A tensor of the state.

    Attributes:
        tensor: that holds it until the next update.
        size: of its part of the whole tensor.
        whole: size of that.
    """

    tensor: torch.Tensor
    size: list[int]
    whole: list[int]


@dataclass(frozen=True, kw_only=True)
class TakenState:
    """Holds the state of a rank at a step, as a checkpoint has it.

    Attributes:
        pieces: its tensors; of what several ranks hold the first one's are written.
        objects: the same of other values, by name, from :func:`pickled`.
        once: files that a checkpoint has once, by name; those of rank 0 are written.
        manifest: returns what the program's own manifest holds besides files, given the ID of the
            save, empty where all of it goes to one folder, and all ranks. Collective; what rank 0
            gets counts.
    """

    pieces: Mapping[Part, Piece]
    objects: Mapping[str, bytes] = field(default_factory=dict)
    once: Mapping[str, bytes]
    manifest: Callable[[str, RankGroup], Mapping[str, Any]]


def entry_of(part: Part, piece: Piece) -> Entry:
    """Return what the index of a checkpoint says of a part, as JSON can hold it."""
    name, offset = part
    return {
        "name": name,
        "offset": list(offset),
        "size": piece.size,
        "whole": piece.whole,
        "type": str(piece.tensor.dtype).removeprefix("torch."),
    }


class ShardWriter:
    """Writes one checkpoint after the other."""

    def __init__(self) -> None:
        self._layout: list[Entry] | None = None
        self._own: set[int] = set()
        self._tables: list[list[Entry]] = []
        self._written: list[tuple[int, int]] = []
        self._index = b""

    def write(self, state: TakenState, folder: Path, ranks: RankGroup) -> dict[str, bytes]:
        """Write what ranks hold, durably; collective.

        Args:
            state: of this rank.
            folder: of the checkpoint; it exists on all ranks.
            ranks: all of them.

        Returns:
            On rank 0 the files that the checkpoint has once, which are still to be written.

        Raises:
            CheckpointError: it could not be written on some rank.
        """
        pieces, objects = state.pieces, state.objects
        layout = [entry_of(*one) for one in pieces.items()] + [{"name": name} for name in objects]
        if ranks.any(layout != self._layout):
            self._share_out(ranks.gather(layout), ranks.rank)
            self._layout = layout
        tensors = [one.tensor.view(one.size) for one in pieces.values()]
        every: list[Any] = [*tensors, *objects.values()]
        own = [one for number, one in enumerate(every) if number in self._own]
        path = folder / f"__{ranks.rank}_0.distcp"
        written = ranks.together(lambda: write_file(path, own))
        if ranks.any(written != self._written):
            self._place(written, ranks)
        return {**state.once, METADATA: self._index} if ranks.is_first else {}

    def _place(self, written: list[tuple[int, int]], ranks: RankGroup) -> None:
        """Bring the index up to date where parts came to lie elsewhere. Collective."""
        is_new = len(written) != len(self._written)
        changed = {
            number: one
            for number, one in enumerate(written)
            if is_new or one != self._written[number]
        }
        self._written = written
        for rank, places in enumerate(ranks.gather(changed)):
            for number, (at, length) in places.items():
                file = {"path": f"__{rank}_0.distcp", "at": at, "length": length}
                self._tables[rank][number].update(file)
        if ranks.is_first:
            self._index = index_of(entry for table in self._tables for entry in table)

    def _share_out(self, layouts: Sequence[Sequence[Entry]], rank: int) -> None:
        """Let the first rank that holds a part write it."""
        taken: set[Part] = set()
        self._tables, self._own, self._written = [[] for _ in layouts], set(), []
        for holder, layout in enumerate(layouts):
            for number, entry in enumerate(layout):
                part = entry["name"], tuple(entry.get("offset", ()))
                if part not in taken:
                    taken.add(part)
                    self._tables[holder].append(dict(entry))
                    if holder == rank:
                        self._own.add(number)


def index_of(entries: Iterable[Entry]) -> bytes:
    """Return the file ``METADATA`` of a checkpoint with these parts."""
    found: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for entry in entries:
        name, place = entry["name"], None
        if "size" not in entry:
            found[name] = BytesStorageMetadata()
        else:
            place = torch.Size(entry["offset"])
            kind = TensorProperties(dtype=getattr(torch, entry["type"]))
            whole = TensorStorageMetadata(kind, torch.Size(entry["whole"]), [])
            chunk = ChunkStorageMetadata(place, torch.Size(entry["size"]))
            found.setdefault(name, whole).chunks.append(chunk)
        file = filesystem._StorageInfo(entry["path"], entry["at"], entry["length"])
        places[MetadataIndex(name, place)] = file
    index = Metadata(found, storage_data=places)
    index.version = filesystem.CURRENT_DCP_VERSION
    return pickle.dumps(index)


def write_file(path: Path, data: Iterable[Any]) -> list[tuple[int, int]]:
    """Write a rank's file of tensors and pickled objects, durably.

    Returns:
        Offset and length of each in it, in bytes.

    Raises:
        OSError: it could not be written.
    """
    found, end = [], 0
    try:
        with path.open("wb") as file:
            for one in data:
                is_object = isinstance(one, bytes)
                length = file.write(one if is_object else _buffered(_compact(one)).getbuffer())
                found.append((end, length))
                end += length
        sync(path)  # by who wrote it: what another node has not written yet only that one can
        sync(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    return found


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the host's memory, without what else is in memory that it lies in."""
    tensor = tensor.detach().cpu()
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone()


def overlay(memory: Any, at: int, dtype: torch.dtype, size: Sequence[int]) -> torch.Tensor:
    """Return a tensor that lies in a buffer, from an offset in bytes on."""
    if not (count := math.prod(size)):
        return torch.empty(size, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=at).view(size)


def pickled(value: Any) -> bytes:
    """Return the file that ``torch.save`` makes, which itself would hide why writing it fails."""
    return _buffered(value).getvalue()


def _buffered(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer
