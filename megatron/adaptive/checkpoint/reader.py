"""Reads the tensors and other state of a checkpoint, for whatever part of it a rank holds.

::

    index.json     {"tensors": {name: {"type", "whole", "parts": [[offset, size, file, at], ...]}},
                    "objects": {name: [file, at, length], or null for one that says nothing}}

A tensor's part lies in a file as its bytes alone, from ``at`` on, and is read into the tensor that
wants it; an object as :mod:`megatron.adaptive.checkpoint.plain_values` has it. Each block of a file
is checked first, and nothing that is read can run code.

Checkpoints of former versions and of Megatron-LM have ``.metadata`` in place of an index, and a
file of ``torch.save`` in place of each of both. Whoever opened one said that it is trusted; even so
it is read by unpicklers that build tensors, plain values and the parts of an index alone. Objects
of other classes, such as the enumerations among Megatron-LM's arguments, become empty ones.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from megatron.adaptive.checkpoint import plain_values
from megatron.adaptive.checkpoint.checksums import CheckedFile
from megatron.adaptive.checkpoint.folder import INDEX, is_shard
from megatron.adaptive.checkpoint.writer import METADATA
from megatron.adaptive.config.input_files import parse_json
from megatron.adaptive.errors import DamagedCheckpointError

_Result = TypeVar("_Result")
# All that ``.metadata`` may name, by its module.
_KNOWN = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("MetadataIndex", "TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta"),
    ),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata",),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
}
_PLANS = "torch.distributed.checkpoint.planner"


@dataclass(frozen=True, kw_only=True)
class SavedPart:
    """Says where a part of a tensor is.

    Attributes:
        offset, size: of the part in the whole tensor.
        file: its name.
        at: where it begins there, in bytes.
        pickled: bytes of it as ``torch.save`` wrote it, ``None`` where it is its bytes alone.
    """

    offset: Sequence[int]
    size: Sequence[int]
    file: str
    at: int
    pickled: int | None = None


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """Describes a tensor of a checkpoint.

    Attributes:
        dtype: of its elements.
        size: of the whole tensor.
        parts: that it was saved in.
    """

    dtype: torch.dtype
    size: torch.Size
    parts: Sequence[SavedPart]


@dataclass(frozen=True, kw_only=True)
class WantedPart:
    """Names a part of a tensor to read.

    Attributes:
        name: of the tensor.
        offset: in the whole tensor.
        target: that is filled; its shape is the part's.
        may_exceed: it may be larger than what was saved, and is filled as far as that goes.
    """

    name: str
    offset: Sequence[int]
    target: torch.Tensor
    may_exceed: bool = False


class CheckpointReader:
    """Reads one checkpoint; use it in ``with``.

    Args:
        path: of the checkpoint.
        files: sizes of its files in bytes, as the manifest says.
        blocks: checksums of its files, as the manifest says.
        near: paths of files that are at hand too, by name.

    Attributes:
        path: as given.
        tensors: by name.
        objects: names of the others, as megatron-core has them.

    Raises:
        DamagedCheckpointError: the index is not what was written.
    """

    def __init__(
        self,
        path: Path,
        files: Mapping[str, int],
        blocks: Mapping[str, str],
        near: Mapping[str, Path] | None = None,
    ) -> None:
        self.path = path
        self._files, self._blocks, self._near = files, blocks, near or {}
        self._open: dict[str, CheckedFile] = {}
        self.tensors: dict[str, SavedTensor] = {}
        self.objects: dict[str, tuple[str, int, int] | None] = {}
        self._is_former = INDEX not in files
        try:
            if self._is_former:
                self._guarded(METADATA, self._read_former_index)
            else:
                self._guarded(INDEX, self._read_index)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close its files. Idempotent."""
        while self._open:
            self._open.popitem()[1].close()

    def read(self, wanted: Iterable[WantedPart]) -> None:
        """Fill tensors with what was saved, each block of it checked before.

        Raises:
            DamagedCheckpointError: it is not, or not all of, what was written.
        """
        found: list[tuple[SavedPart, torch.dtype, list[int], torch.Tensor]] = []
        for one in wanted:
            saved, target, count = self.tensors[one.name], one.target.detach(), 0
            for part in saved.parts:
                low = [max(pair) for pair in zip(part.offset, one.offset, strict=True)]
                ends = zip(part.offset, part.size, one.offset, target.shape, strict=True)
                size = [min(a + b, c + d) - e for (a, b, c, d), e in zip(ends, low, strict=True)]
                if any(length <= 0 for length in size):
                    continue
                count += math.prod(size)
                region = target
                for axis, (at, length) in enumerate(zip(low, size, strict=True)):
                    region = region.narrow(axis, at - one.offset[axis], length)
                start = [a - b for a, b in zip(low, part.offset, strict=True)]
                found.append((part, saved.dtype, start, region))
            if count < target.numel() and not one.may_exceed:
                raise DamagedCheckpointError(
                    f"{self.path} has {count} of the {target.numel()} elements of {one.name} that"
                    " are to be read"
                )
        found.sort(key=lambda one: (one[0].file, one[0].at))
        with torch.no_grad():
            for part, dtype, start, region in found:
                self._fill(part, dtype, start, region)

    def read_object(self, name: str) -> list[Any]:
        """Return what was saved under the name of an object, of each that bears it.

        Raises:
            DamagedCheckpointError: it is not what was written.
        """
        place = self.objects[name]
        if place is None:
            return [None]
        file, at, length = place
        data = self._bytes(file, at, length)
        read = _unpickled if self._is_former else plain_values.loads
        return list(self._guarded(file, lambda: read(data)))

    def read_values(self, name: str, former: str) -> Any:
        """Return what a file of values holds.

        Args:
            name: of the file.
            former: its name in checkpoints of former versions, where it is of ``torch.save``.

        Raises:
            DamagedCheckpointError: it is not what was written.
        """
        name = former if self._is_former else name
        data = self._bytes(name, 0, self._size(name))
        read = _unpickled if self._is_former else plain_values.loads
        return self._guarded(name, lambda: read(data))

    def check_rest(self, share: int, shares: int) -> None:
        """Check a share of the blocks that hold no tensor, so that all of them are checked by all.

        Args:
            share: which one.
            shares: number of them.

        Raises:
            DamagedCheckpointError: one is not what was written.
        """
        held: set[tuple[str, int]] = set()
        for saved in self.tensors.values():
            for part in saved.parts:
                length = math.prod(part.size) * saved.dtype.itemsize
                blocks = CheckedFile.blocks_of(part.at, length)
                held.update((part.file, number) for number in blocks)
        rest = [
            (name, number)
            for name in sorted(self._blocks)
            if is_shard(name)
            for number in range(self._file(name).blocks)
            if (name, number) not in held
        ]
        for name, number in rest[share::shares]:
            self._file(name).block(number)

    def _fill(
        self, part: SavedPart, dtype: torch.dtype, start: Sequence[int], region: torch.Tensor
    ) -> None:
        """Copy the region of a part from ``start`` on."""
        if part.pickled is not None:
            data = self._bytes(part.file, part.at, part.pickled)
            saved = self._guarded(part.file, lambda: _unpickled(data))
            for axis, (at, length) in enumerate(zip(start, region.shape, strict=True)):
                saved = saved.narrow(axis, at, length)
            region.copy_(saved)
            return
        strides = [math.prod(part.size[axis + 1 :]) for axis in range(len(part.size))]
        first = sum(at * stride for at, stride in zip(start, strides, strict=True))
        steps = zip(region.shape, strides, strict=True)
        count = 1 + sum((length - 1) * stride for length, stride in steps)
        is_direct = (
            count == region.numel()
            and region.is_contiguous()
            and region.is_cpu
            and region.dtype == dtype
        )
        buffer = region if is_direct else torch.empty(count, dtype=dtype)
        place: Any = buffer.reshape(-1).view(torch.uint8).numpy()
        self._file(part.file).read(part.at + first * dtype.itemsize, memoryview(place))
        if not is_direct:
            region.copy_(buffer.as_strided(region.shape, strides))

    def _file(self, name: str) -> CheckedFile:
        if name not in self._open:
            paths = [one for one in (self._near.get(name), self.path / name) if one is not None]
            expected = self._size(name), self._blocks.get(name, "")
            self._open[name] = CheckedFile(paths, expected)
        return self._open[name]

    def _size(self, name: str) -> int:
        if name not in self._files:
            raise DamagedCheckpointError(f"{self.path} has no {name}, which its index names")
        return self._files[name]

    def _bytes(self, name: str, at: int, length: int) -> bytearray:
        data = bytearray(length)
        self._file(name).read(at, memoryview(data))
        return data

    def _guarded(self, name: str, action: Callable[[], _Result]) -> _Result:
        """Do something with a file's contents, which may be anything."""
        try:
            return action()
        except (DamagedCheckpointError, OSError, MemoryError):
            raise
        except Exception as error:
            # torch's own text advises to load it with an unpickler that runs code.
            why = str(error) if isinstance(error, _Refused) else type(error).__name__
            raise DamagedCheckpointError(f"{self.path / name} cannot be read ({why})") from None

    def _read_index(self) -> None:
        found = parse_json(self._bytes(INDEX, 0, self._size(INDEX)))
        for name, one in found["tensors"].items():
            parts = [
                SavedPart(offset=offset, size=size, file=file, at=at)
                for offset, size, file, at in one["parts"]
            ]
            dtype, size = getattr(torch, one["type"]), torch.Size(one["whole"])
            self.tensors[name] = SavedTensor(dtype=dtype, size=size, parts=parts)
        for name, place in found["objects"].items():
            self.objects[name] = None if place is None else (place[0], place[1], place[2])

    def _read_former_index(self) -> None:
        data = self._bytes(METADATA, 0, self._size(METADATA))
        index = _IndexUnpickler(io.BytesIO(data)).load()
        parts: dict[str, list[SavedPart]] = {}
        for key, place in index.storage_data.items():
            file, at, length = place.relative_path, place.offset, place.length
            saved = index.state_dict_metadata[key.fqn]
            if not hasattr(saved, "chunks"):
                self.objects[key.fqn] = file, at, length
                continue
            offset = [0] * len(saved.size) if key.offset is None else key.offset
            chunks = (one for one in saved.chunks if list(one.offsets) == list(offset))
            size = list(next(chunks).sizes)
            part = SavedPart(offset=list(offset), size=size, file=file, at=at, pickled=length)
            parts.setdefault(key.fqn, []).append(part)
        for name, found in parts.items():
            saved = index.state_dict_metadata[name]
            dtype = saved.properties.dtype
            self.tensors[name] = SavedTensor(dtype=dtype, size=saved.size, parts=found)


class _Refused(pickle.UnpicklingError):
    """A pickle names what no checkpoint needs."""


class _IndexUnpickler(pickle.Unpickler):
    """Reads ``.metadata``, which holds nothing but places of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if module == _PLANS:  # megatron-core keeps how the ranks shared out the writing
            return UnreadObject
        if not is_dtype and name not in _KNOWN.get(module, ()):
            raise _Refused(f"it names {module}.{name}, which is no part of an index")
        return super().find_class(module, name)


def _unpickled(data: bytearray) -> Any:
    """Return what ``torch.save`` wrote, as far as torch's restricted unpickler has it."""
    array = np.array(0, np.uint32)
    rebuild: Any = array.__reduce__()[0]
    kind = type(array.dtype)
    former = (rebuild, "numpy.core.multiarray._reconstruct")
    known: list[Any] = [rebuild, former, np.ndarray, np.dtype, kind, io.BytesIO]
    file = io.BytesIO(data)
    with torch.serialization.safe_globals(known):
        others = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    file.seek(0)
    with torch.serialization.safe_globals([*known, *((UnreadObject, name) for name in others)]):
        return torch.load(file, map_location="cpu", weights_only=True)


class UnreadObject:
    """Stands for an object of a class that is not loaded; has its attributes, as far as they are
    plain values.
    """

    def __init__(self, *_: object) -> None:
        pass
