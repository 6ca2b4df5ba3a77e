"""Writes the state of all ranks in the format of ``torch.distributed.checkpoint``.

::

    __<rank>_0.distcp    file of a rank: its tensors, then its objects, as torch.save writes them
                         [ head of torch.save | bytes of the tensor | end of torch.save ] ...
                         [ pickled object | the object as plain values ] ...
    .metadata            name, offset in the whole tensor, file and position of each part or object
    index.json           the same data as JSON, but with positions of raw bytes and plain values

This module writes the checkpoints of the trainer (which megatron-core reads as ``torch_dist``),
those of a ``Pipeline``, and those made from in-memory snapshots. Torch and Megatron-LM find the
tensors of a checkpoint through ``.metadata``; this program uses ``index.json``
(``checkpoint.reader``). The training process itself writes the files. For each save,
megatron-core's writer would start processes by ``spawn`` and ``fork``. This takes seconds, and the
child processes inherit the sockets and memory mappings of the pipeline's channels.

Parts are reassigned to ranks only if the layout of a rank's state has changed. Otherwise, each rank
writes its file immediately, and ranks exchange only a few numbers. This matters for background
writes, because all Python code in the background thread delays the training thread.
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
"""Names of the files with the values that all trainer ranks share: as plain values, and pickled."""
_LARGE_BYTES = 1 << 16
"""Minimum size in bytes of a piece from ``torch.save`` that is written immediately.

Smaller pieces are collected and written together.
"""
_CORE = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}

Part = tuple[str, tuple[int, ...]]
"""Key of a part of a tensor: the tensor's name, and the part's offset in the whole tensor."""

Entry = dict[str, Any]
"""Entry of a checkpoint's index for a part of a tensor, or for an object.

The entry of a part has the keys that :func:`entry_of` sets. The entry of an object has only the key
``name``. :class:`ShardWriter` adds ``path``, the name of the file, and ``place``, a :class:`Place`.
"""


class Place(NamedTuple):
    """Position of a part of a tensor, or of an object, in a file.

    Attributes:
        begin: Offset of the output of ``torch.save``, in bytes.
        length: Length of the output of ``torch.save``, in bytes.
        content: Offset of the tensor's raw bytes, or of the object's plain values, in bytes.
        content_length: Length of the raw bytes or of the plain values, in bytes. If an object has
            no plain values, both ``content`` and ``content_length`` are 0.
    """

    begin: int
    length: int
    content: int
    content_length: int


Heads = dict[tuple[torch.dtype, torch.Size], int]
"""Number of bytes before a tensor's raw bytes in the output of ``torch.save``.

The keys are the dtype and the shape of the tensor.
"""


@dataclass(frozen=True, kw_only=True)
class SavedObject:
    """Value of the state that is not a tensor.

    Attributes:
        pickled: Value as a pickle, for torch and Megatron-LM, as returned by :func:`pickled`.
        plain: Value as plain values, for this program, as returned by :func:`plain_values.dumps`.
    """

    pickled: bytes
    plain: bytes

    @classmethod
    def of(cls, value: Any) -> SavedObject:
        """Serializes ``value`` both as a pickle and as plain values.

        The plain values of ``[None]``, which is the extra state of most layers, are empty bytes.

        Raises:
            TypeError: If the value cannot be expressed as plain values.
        """
        plain = b"" if value == [None] else plain_values.dumps(value)
        return cls(pickled=pickled(value) if plain else _nothing(), plain=plain)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Part of a tensor in the state of a rank.

    Attributes:
        tensor: Tensor that contains the data. The next update of the optimizer overwrites the data.
        size: Shape of this part, with the same number of axes as the whole tensor.
        whole: Shape of the whole tensor.
    """

    tensor: torch.Tensor
    size: list[int]
    whole: list[int]


@dataclass(frozen=True, kw_only=True)
class TakenState:
    """State of a rank at a step, in the form that a checkpoint stores.

    Attributes:
        pieces: Parts of tensors. If several ranks have the same part, the first of these ranks
            writes it.
        objects: Other values, keyed by name. If several ranks have the same name, the first of
            these ranks writes the value.
        once: Contents of the files that exist once per checkpoint instead of once per rank, keyed
            by file name. Only the contents on rank 0 are written.
        manifest: Function that returns the entries of the manifest, except ``files`` and
            ``blocks``. Its arguments are the identifier of the save, which is empty if local disks
            are not used, and the group of all ranks. All ranks must call the function together; the
            result of rank 0 is used.
    """

    pieces: Mapping[Part, Piece]
    objects: Mapping[str, SavedObject] = field(default_factory=dict)
    once: Mapping[str, bytes]
    manifest: Callable[[str, RankGroup], Mapping[str, Any]]


def entry_of(part: Part, piece: Piece) -> Entry:
    """Returns the index entry for ``part``, whose data is ``piece``, as a dict of JSON values."""
    name, offset = part
    return {
        "name": name,
        "offset": list(offset),
        "size": piece.size,
        "whole": piece.whole,
        "type": str(piece.tensor.dtype).removeprefix("torch."),
    }


class ShardWriter:
    """Writes a run's checkpoints. Reassigns parts to ranks only if the parts have changed."""

    def __init__(self) -> None:
        self._layout: list[Entry] | None = None
        self._own: set[int] = set()
        self._tables: list[list[Entry]] = []
        self._written: list[Place] = []
        self._heads: Heads = {}
        self._indices: dict[str, bytes] = {}

    @torch.no_grad()
    def write(
        self, state: TakenState, folder: Path, ranks: RankGroup
    ) -> tuple[dict[str, bytes], dict[str, Any]]:
        """Writes the files of all ranks and flushes them to disk. All ranks must call it together.

        Args:
            state: Tensors and other values of this rank to write.
            folder: Folder of the checkpoint.
            ranks: Group of all ranks, used for communication.

        Returns:
            Two mappings. The first maps the names of the files that exist once per checkpoint to
            their contents. It is empty on all ranks except rank 0, and the caller must write these
            files. The second contains the manifest's entries ``files`` and ``blocks``, which are
            the sizes and the checksums of all files, keyed by file name.

        Raises:
            CheckpointError: If a rank could not write a file.
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
        """Updates the index with the positions in ``written`` that have changed.

        ``written`` contains the position of each part or object in this rank's file. All ranks must
        call this.
        """
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
        """Assigns each part in ``layouts`` to the first rank that has this part.

        ``rank`` is the index of this rank.
        """
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
    """Returns the contents of both index files, torch's and this program's, keyed by file name."""
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
    # torch before 2.7 does not define a version number for checkpoints.
    index.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    return pickle.dumps(index)


def write_file(
    path: Path, data: Iterable[torch.Tensor | SavedObject], heads: Heads
) -> tuple[list[Place], FileSum]:
    """Writes a rank's file of tensors and objects, and flushes it to disk.

    Args:
        path: Path of the file.
        data: Tensors and objects to write.
        heads: Number of bytes that ``torch.save`` writes before a tensor's raw bytes, keyed by
            dtype and shape. Missing entries are added.

    Returns:
        Position of each tensor and object in the file, and the size and checksums of the file.

    Raises:
        OSError: If the file could not be written.
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
                stream = _Stream(file, sums)
                stream.save(tensor)
                if form not in heads:
                    heads[form] = stream.head_bytes(tensor)
                length = sums.size - begin
                places.append(Place(begin, length, begin + heads[form], tensor.nbytes))
        # Flush the file on the rank that wrote it, because other nodes cannot do that.
        sync(path)
        sync(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    return places, sums.result()


class _Stream:
    """Writes the output of ``torch.save`` for one tensor to a file, without a copy of the tensor.

    ``torch.save`` passes the tensor's memory to :meth:`write`, which hashes and writes it in
    pieces. Both operations release the GIL. Copying a large tensor to a buffer would hold the GIL,
    so that the training thread would have to wait for a checkpoint in the background.

    Args:
        file: Unbuffered file.
        sums: Checksums of the file.
    """

    def __init__(self, file: Any, sums: Checksums) -> None:
        self._file = file
        self._sums = sums
        self._begin = sums.size
        self._small = bytearray()
        self._large: dict[int, int] = {}
        self._error: OSError | None = None

    def save(self, tensor: torch.Tensor) -> None:
        """Writes ``tensor``.

        Raises:
            OSError: If the tensor could not be written.
        """
        file: Any = self  # torch.save needs only some of the methods of the declared type.
        torch.save(tensor, file)
        if self._error is not None:
            raise self._error

    def head_bytes(self, tensor: torch.Tensor) -> int:
        """Returns the number of bytes that ``torch.save`` writes before the data of ``tensor``."""
        if (position := self._large.get(tensor.nbytes)) is not None:
            return position
        saved = _buffered(tensor)
        saved.seek(0)
        reader: Any = torch._C.PyTorchFileReader(saved)
        return int(reader.get_record_offset("data/0"))

    def write(self, data: Any) -> int:
        """Writes ``data``. Collects small pieces of data, to write them together later.

        ``torch.save`` calls this method. Errors are stored and raised later by :meth:`save`,
        because ``torch.save`` would hide their cause.
        """
        with memoryview(data) as view:
            if view.nbytes < _LARGE_BYTES:
                self._small += view
            else:
                self.flush()
                # All other output of torch.save is short, so this piece is the tensor's data.
                self._large[view.nbytes] = self._sums.size - self._begin
                self._write(view)
            return view.nbytes

    def flush(self) -> None:
        """Writes the small pieces collected so far. ``torch.save`` calls this method at the end."""
        if small := bytes(self._small):
            self._small.clear()
            self._write(small)

    def _write(self, data: Any) -> None:
        if self._error is None:
            try:
                write_summed(self._file, self._sums, data)
            except OSError as error:
                # Remove the traceback, whose frames would keep views of memory that torch frees.
                self._error = error.with_traceback(None)


def common_files(common: Any) -> dict[str, bytes]:
    """Returns the contents of the files that store ``common``, keyed by file name.

    ``common`` contains the values that all ranks share. They are stored twice: as a pickle for
    megatron-core, and as plain values for this program.

    Raises:
        TypeError: If a value cannot be expressed as plain values.
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
    """Returns ``tensor`` in host memory. Copies it if its storage also contains other data."""
    tensor = tensor.detach().cpu().contiguous()
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone()


def overlay(memory: Any, offset: int, dtype: torch.dtype, size: Sequence[int]) -> torch.Tensor:
    """Returns a tensor of ``dtype`` and ``size`` in ``memory``, beginning at byte ``offset``."""
    if not (count := math.prod(size)):
        return torch.empty(size, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(size)


def pickled(value: Any) -> bytes:
    """Returns the bytes that ``torch.save`` writes for ``value``.

    Callers write these bytes to a file themselves, because ``torch.save`` would hide the cause of a
    write error.
    """
    return _buffered(value).getvalue()


def _buffered(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer
