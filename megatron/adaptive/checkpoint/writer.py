"""Writes the state of all ranks in the format of ``torch.distributed.checkpoint``.

::

    __<rank>_0.distcp    file of a rank: its tensors, then its objects, each as torch.save does
                         [ head of torch.save | bytes of the tensor | end of torch.save ] ...
                         [ pickled object | the same as plain values ] ...
    .metadata            name, offset in the whole tensor, file and position of each of them
    index.json           the same, with the position of the bytes alone, and without pickles

This module writes every checkpoint: those of the trainer, which megatron-core reads as
``torch_dist``, those of a ``Pipeline``, and those made from snapshots in memory. Torch and
Megatron-LM read a checkpoint by its ``.metadata``, this program by the index
(``checkpoint.reader``). The process that trains also writes. megatron-core's writer would start
processes by ``spawn`` and ``fork`` at each save, which takes seconds and copies the sockets and
mappings of the channels into the children.

Ranks agree on the parts that each writes when the layout of some rank's state changes. Until then a
checkpoint is one write per rank and a few numbers between ranks. This matters in the background,
where each line of Python delays the training thread.
"""

from __future__ import annotations

import functools
import io
import json
import math
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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

from megatron.adaptive.checkpoint import plain_values
from megatron.adaptive.checkpoint.checksums import Checksums, FileSum, sum_of, write_summed
from megatron.adaptive.checkpoint.folder import INDEX, sync

if TYPE_CHECKING:
    from megatron.adaptive.checkpoint.collective_errors import RankGroup

METADATA = ".metadata"
COMMON, PICKLED_COMMON = "common.values", "common.pt"
"""Names of the files with values that all ranks of the trainer share, without and with pickles."""
_CORE = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}

Part = tuple[str, tuple[int, ...]]
"""Name of a tensor or object in a checkpoint, and offset in the whole tensor."""

Entry = dict[str, Any]
"""Describes a part in a checkpoint's index, see :func:`entry_of`; an object has only ``name``.

After the write it also has ``path``, the name of the file, and ``place``, a :class:`Place`.
"""


class Place(NamedTuple):
    """Locates a part in a file.

    Attributes:
        begin: Offset of the output of ``torch.save`` in bytes.
        length: Length of it in bytes.
        content: Offset of a tensor's bytes, or of an object's plain values, 0 if those are empty.
        content_length: Length of these in bytes, 0 if they are empty.
    """

    begin: int
    length: int
    content: int
    content_length: int


Heads = dict[tuple[torch.dtype, torch.Size], int]
"""Number of bytes that ``torch.save`` writes before a tensor's bytes, by type and size."""


@dataclass(frozen=True, kw_only=True)
class SavedObject:
    """Holds a value of the state that is not a tensor.

    Attributes:
        pickled: Bytes for torch and Megatron-LM, from :func:`pickled`.
        plain: Bytes for this program, from :func:`plain_values.dumps`.
    """

    pickled: bytes
    plain: bytes

    @classmethod
    def of(cls, value: Any) -> SavedObject:
        """Serializes a value in both forms; ``[None]``, which most layers have, becomes empty.

        Raises:
            TypeError: If it has no plain form.
        """
        plain = b"" if value == [None] else plain_values.dumps(value)
        return cls(pickled=pickled(value) if plain else _nothing(), plain=plain)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a tensor of the state.

    Attributes:
        tensor: Tensor with the data, valid until the next update.
        size: Shape of this part.
        whole: Shape of the whole tensor.
    """

    tensor: torch.Tensor
    size: list[int]
    whole: list[int]


@dataclass(frozen=True, kw_only=True)
class TakenState:
    """Holds the state of a rank at a step, in the form that a checkpoint has.

    Attributes:
        pieces: Tensors. If several ranks have the same part, the first one's is written.
        objects: Other values by name; the same rule applies.
        once: Contents of files that a checkpoint has once, by name; those of rank 0 are written.
        manifest: Function that returns the entries of the program's manifest, except files. It is
            called with the identifier of the save, empty if all goes to one folder, and all ranks.
            Collective; rank 0's result is used.
    """

    pieces: Mapping[Part, Piece]
    objects: Mapping[str, SavedObject] = field(default_factory=dict)
    once: Mapping[str, bytes]
    manifest: Callable[[str, RankGroup], Mapping[str, Any]]


def entry_of(part: Part, piece: Piece) -> Entry:
    """Returns the description of a part for the index, in types that JSON can express."""
    name, offset = part
    return {
        "name": name,
        "offset": list(offset),
        "size": piece.size,
        "whole": piece.whole,
        "type": str(piece.tensor.dtype).removeprefix("torch."),
    }


class ShardWriter:
    """Writes one checkpoint after another, and reuses the layout if it did not change."""

    def __init__(self) -> None:
        self._layout: list[Entry] | None = None
        self._own: set[int] = set()
        self._tables: list[list[Entry]] = []
        self._written: list[Place] = []
        self._heads: Heads = {}
        self._indices: dict[str, bytes] = {}

    def write(
        self, state: TakenState, folder: Path, ranks: RankGroup
    ) -> tuple[dict[str, bytes], dict[str, Any]]:
        """Writes the parts of all ranks, durably; collective.

        Args:
            state: State of this rank.
            folder: Folder of the checkpoint, which all ranks see.
            ranks: All ranks.

        Returns:
            On rank 0 the files that the checkpoint has once, which the caller must write. On all
            ranks the entries ``files``, sizes by name, and ``blocks``, checksums by name, of the
            manifest.

        Raises:
            CheckpointError: If it could not be written on some rank.
        """
        pieces = state.pieces
        objects = state.objects
        layout = [entry_of(part, piece) for part, piece in pieces.items()]
        layout += [{"name": name} for name in objects]
        if ranks.any(layout != self._layout):
            self._share_out(ranks.gather(layout), ranks.rank)
            self._layout = layout
        tensors = [piece.tensor.view(piece.size) for piece in pieces.values()]
        every: list[Any] = [*tensors, *objects.values()]
        assigned = [value for number, value in enumerate(every) if number in self._own]
        path = folder / f"__{ranks.rank}_0.distcp"
        written, total = ranks.together(lambda: write_file(path, assigned, self._heads))
        if ranks.any(written != self._written):
            self._place(written, ranks)
        once = {**state.once, **self._indices} if ranks.is_first else {}
        sums = {name: sum_of(content) for name, content in once.items()}
        for rank, total_of_rank in enumerate(ranks.gather(total)):
            sums[f"__{rank}_0.distcp"] = total_of_rank
        files = {name: size for name, (size, _) in sums.items()}
        blocks = {name: checksums for name, (_, checksums) in sums.items()}
        return once, {"files": files, "blocks": blocks}

    def _place(self, written: list[Place], ranks: RankGroup) -> None:
        """Updates the index for parts whose place in a file changed. Collective."""
        is_new = len(written) != len(self._written)
        changed = {
            number: position
            for number, position in enumerate(written)
            if is_new or position != self._written[number]
        }
        self._written = written
        for rank, places in enumerate(ranks.gather(changed)):
            for number, position in places.items():
                file = {"path": f"__{rank}_0.distcp", "place": position}
                self._tables[rank][number].update(file)
        if ranks.is_first:
            self._indices = indices_of([entry for table in self._tables for entry in table])

    def _share_out(self, layouts: Sequence[Sequence[Entry]], rank: int) -> None:
        """Assigns each part to the first rank that has it."""
        taken: set[Part] = set()
        self._tables = [[] for _ in layouts]
        self._own = set()
        self._written = []
        for holder, layout in enumerate(layouts):
            for number, entry in enumerate(layout):
                part = entry["name"], tuple(entry.get("offset", ()))
                if part not in taken:
                    taken.add(part)
                    self._tables[holder].append(dict(entry))
                    if holder == rank:
                        self._own.add(number)


def indices_of(entries: Sequence[Entry]) -> dict[str, bytes]:
    """Returns the index files for these parts of a checkpoint: torch's and this program's."""
    return {METADATA: _torch_index(entries), INDEX: _plain_index(entries)}


def _plain_index(entries: Sequence[Entry]) -> bytes:
    tensors: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for entry in entries:
        name = entry["name"]
        _, _, content, length = entry["place"]
        if "size" not in entry:
            objects[name] = [entry["path"], content, length] if length else None
            continue
        saved = {"type": entry["type"], "whole": entry["whole"], "parts": []}
        part = [entry["offset"], entry["size"], entry["path"], content]
        tensors.setdefault(name, saved)["parts"].append(part)
    return json.dumps({"tensors": tensors, "objects": objects}, separators=(",", ":")).encode()


def _torch_index(entries: Sequence[Entry]) -> bytes:
    described: dict[str, Any] = {}
    infos: dict[MetadataIndex, Any] = {}
    for entry in entries:
        name = entry["name"]
        offset = None
        if "size" not in entry:
            described[name] = BytesStorageMetadata()
        else:
            offset = torch.Size(entry["offset"])
            kind = TensorProperties(dtype=getattr(torch, entry["type"]))
            whole = TensorStorageMetadata(kind, torch.Size(entry["whole"]), [])
            chunk = ChunkStorageMetadata(offset, torch.Size(entry["size"]))
            described.setdefault(name, whole).chunks.append(chunk)
        begin, length, _, _ = entry["place"]
        info = filesystem._StorageInfo(entry["path"], begin, length)
        infos[MetadataIndex(name, offset)] = info
    index = Metadata(described, storage_data=infos)
    index.version = filesystem.CURRENT_DCP_VERSION
    return pickle.dumps(index)


def write_file(
    path: Path, data: Iterable[torch.Tensor | SavedObject], heads: Heads
) -> tuple[list[Place], FileSum]:
    """Writes a rank's file of tensors and objects, durably.

    Args:
        path: Path of the file.
        data: Tensors and objects to write.
        heads: Known lengths of torch's heads; unknown ones are added.

    Returns:
        Place of each of them in the file, and the file's size and checksums.

    Raises:
        OSError: If it could not be written.
    """
    places: list[Place] = []
    sums = Checksums()
    try:
        with path.open("wb", buffering=0) as file:
            for value in data:
                begin = sums.size
                if isinstance(value, SavedObject):
                    length = write_summed(file, sums, value.pickled)
                    plain = write_summed(file, sums, value.plain)
                    places.append(Place(begin, length, begin + length if plain else 0, plain))
                    continue
                tensor = _compact(value)
                form = (tensor.dtype, tensor.shape)
                saved = _buffered(tensor)
                if form not in heads:
                    saved.seek(0)
                    reader: Any = torch._C.PyTorchFileReader(saved)
                    heads[form] = int(reader.get_record_offset("data/0"))
                with saved.getbuffer() as content:
                    length = write_summed(file, sums, content)
                places.append(Place(begin, length, begin + heads[form], tensor.nbytes))
        sync(path)  # only the node that wrote a file can flush it
        sync(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    return places, sums.result()


def common_files(common: Any) -> dict[str, bytes]:
    """Returns the files with values that all ranks share, for megatron-core and for this program.

    Raises:
        TypeError: If a value has no plain form.
    """
    form = json.dumps(_CORE).encode()
    return {
        COMMON: plain_values.dumps(common),
        PICKLED_COMMON: pickled(common),
        "metadata.json": form,
    }


@functools.cache
def _nothing() -> bytes:
    return pickled([None])


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor in host memory whose storage has no other elements."""
    tensor = tensor.detach().cpu().contiguous()
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone()


def overlay(memory: Any, offset: int, dtype: torch.dtype, size: Sequence[int]) -> torch.Tensor:
    """Returns a tensor over a buffer, from an offset in bytes."""
    if not (count := math.prod(size)):
        return torch.empty(size, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(size)


def pickled(value: Any) -> bytes:
    """Returns the output of ``torch.save``, which hides the cause of errors if it writes a file."""
    return _buffered(value).getvalue()


def _buffered(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer
