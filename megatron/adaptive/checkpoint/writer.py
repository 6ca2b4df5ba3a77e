"""Writes the state of all ranks in the form of ``torch.distributed.checkpoint``.

::

    __<rank>_0.distcp    what a rank writes: its tensors, then its objects, each as torch.save does
                         [ head of torch.save | bytes of the tensor | end of torch.save ] ...
                         [ pickled object | the same as plain values ] ...
    .metadata            name, place in the whole tensor, file and offset of each of them
    index.json           the same, with the offset of the bytes alone, and without pickles

Every checkpoint is written here: the trainer's, which megatron-core reads as ``torch_dist``, those
of a ``Pipeline``, and those made of snapshots in memory. Torch and Megatron-LM read it by its
``.metadata``, we by the index (``checkpoint.reader``). It is written in the process that trains:
megatron-core's own writer starts a process by ``spawn`` and others by ``fork`` at each save, which
costs seconds and copies the sockets and mappings of the channels into the children.

Ranks agree on who writes what when some rank's state changes its layout. Until then a checkpoint is
one write of each rank and a few numbers between them. That matters behind training, where each line
of Python holds up the thread that trains.
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

from megatron.adaptive.checkpoint import plain_values
from megatron.adaptive.checkpoint.checksums import Checksums, FileSum, sum_of, write_summed
from megatron.adaptive.checkpoint.folder import INDEX, sync

if TYPE_CHECKING:
    from megatron.adaptive.checkpoint.collective_errors import RankGroup

METADATA = ".metadata"
COMMON, PICKLED_COMMON = "common.values", "common.pt"
"""Files of what all ranks of the trainer have in common, without and with pickles."""
_CORE = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}

Part = tuple[str, tuple[int, ...]]
"""Name in a checkpoint, and place in the whole tensor."""

Entry = dict[str, Any]
"""Describes a part in a checkpoint's index, see :func:`entry_of`; an object by its ``name`` alone.

Once it is written it has also ``path`` and ``place``: the file, and where it is there.
"""

Place = tuple[int, int, int, int]
"""Offset and length in a file, in bytes, of what ``torch.save`` makes; and of a tensor's bytes in
that, or of an object's plain values after it, both zero of one that says nothing."""

Heads = dict[tuple[torch.dtype, torch.Size], int]
"""Bytes that ``torch.save`` writes before those of a tensor, by its type and size."""


@dataclass(frozen=True, kw_only=True)
class SavedObject:
    """Holds a value of the state that is no tensor.

    Attributes:
        pickled: for torch and Megatron-LM, from :func:`pickled`.
        plain: the same for us, from :func:`values.dumps`.
    """

    pickled: bytes
    plain: bytes

    @classmethod
    def of(cls, value: Any) -> SavedObject:
        """Write a value in both forms; ``[None]``, which most layers have, as nothing.

        Raises:
            TypeError: it has no plain form.
        """
        plain = b"" if value == [None] else plain_values.dumps(value)
        return cls(pickled=pickled(value) if plain else _nothing(), plain=plain)


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
        objects: the same of other values, by name.
        once: files that a checkpoint has once, by name; those of rank 0 are written.
        manifest: returns what the program's own manifest holds besides files, given the ID of the
            save, empty where all of it goes to one folder, and all ranks. Collective; what rank 0
            gets counts.
    """

    pieces: Mapping[Part, Piece]
    objects: Mapping[str, SavedObject] = field(default_factory=dict)
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
        self._written: list[Place] = []
        self._heads: Heads = {}
        self._indices: dict[str, bytes] = {}

    def write(
        self, state: TakenState, folder: Path, ranks: RankGroup
    ) -> tuple[dict[str, bytes], dict[str, Any]]:
        """Write what ranks hold, durably; collective.

        Args:
            state: of this rank.
            folder: of the checkpoint; it exists on all ranks.
            ranks: all of them.

        Returns:
            On rank 0 the files that the checkpoint has once, which are still to be written; and
            of all ``files`` the sizes, and ``blocks``, their checksums, as manifests have them.

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
        written, total = ranks.together(lambda: write_file(path, own, self._heads))
        if ranks.any(written != self._written):
            self._place(written, ranks)
        once = {**state.once, **self._indices} if ranks.is_first else {}
        sums = {name: sum_of(content) for name, content in once.items()}
        for rank, one in enumerate(ranks.gather(total)):
            sums[f"__{rank}_0.distcp"] = one
        files = {name: size for name, (size, _) in sums.items()}
        return once, {"files": files, "blocks": {name: one for name, (_, one) in sums.items()}}

    def _place(self, written: list[Place], ranks: RankGroup) -> None:
        """Bring the index up to date where parts came to lie elsewhere. Collective."""
        is_new = len(written) != len(self._written)
        changed = {
            number: one
            for number, one in enumerate(written)
            if is_new or one != self._written[number]
        }
        self._written = written
        for rank, places in enumerate(ranks.gather(changed)):
            for number, place in places.items():
                file = {"path": f"__{rank}_0.distcp", "place": place}
                self._tables[rank][number].update(file)
        if ranks.is_first:
            self._indices = indices_of([entry for table in self._tables for entry in table])

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


def indices_of(entries: Sequence[Entry]) -> dict[str, bytes]:
    """Return the files that say where these parts of a checkpoint are: torch's, and ours."""
    return {METADATA: _torch_index(entries), INDEX: _plain_index(entries)}


def _plain_index(entries: Sequence[Entry]) -> bytes:
    tensors: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for entry in entries:
        name, (_, _, at, length) = entry["name"], entry["place"]
        if "size" not in entry:
            objects[name] = [entry["path"], at, length] if length else None
            continue
        saved = {"type": entry["type"], "whole": entry["whole"], "parts": []}
        part = [entry["offset"], entry["size"], entry["path"], at]
        tensors.setdefault(name, saved)["parts"].append(part)
    return json.dumps({"tensors": tensors, "objects": objects}, separators=(",", ":")).encode()


def _torch_index(entries: Sequence[Entry]) -> bytes:
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
        at, length, _, _ = entry["place"]
        places[MetadataIndex(name, place)] = filesystem._StorageInfo(entry["path"], at, length)
    index = Metadata(found, storage_data=places)
    index.version = filesystem.CURRENT_DCP_VERSION
    return pickle.dumps(index)


def write_file(
    path: Path, data: Iterable[torch.Tensor | SavedObject], heads: Heads
) -> tuple[list[Place], FileSum]:
    """Write a rank's file of tensors and objects, durably.

    Args:
        path: of the file.
        data: that it holds.
        heads: as far as they are known; others are added.

    Returns:
        Where each of them is in it, and its size and checksums.

    Raises:
        OSError: it could not be written.
    """
    found, sums = list[Place](), Checksums()
    try:
        with path.open("wb", buffering=0) as file:
            for one in data:
                at = sums.size
                if isinstance(one, SavedObject):
                    length = write_summed(file, sums, one.pickled)
                    plain = write_summed(file, sums, one.plain)
                    found.append((at, length, at + length if plain else 0, plain))
                    continue
                tensor = _compact(one)
                form, saved = (tensor.dtype, tensor.shape), _buffered(tensor)
                if form not in heads:
                    saved.seek(0)
                    reader: Any = torch._C.PyTorchFileReader(saved)
                    heads[form] = int(reader.get_record_offset("data/0"))
                with saved.getbuffer() as content:
                    length = write_summed(file, sums, content)
                found.append((at, length, at + heads[form], tensor.nbytes))
        sync(path)  # by who wrote it: what another node has not written yet only that one can
        sync(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    return found, sums.result()


def common_files(common: Any) -> dict[str, bytes]:
    """Returns the files with which megatron-core and we find what all ranks have in common.

    Raises:
        TypeError: it has no plain form.
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
    """Return a tensor in the host's memory, without what else is in memory that it lies in."""
    tensor = tensor.detach().cpu().contiguous()
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
