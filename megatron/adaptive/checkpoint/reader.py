"""Reads tensors, regions of tensors, and other state from a checkpoint.

::

    index.json     {"tensors": {name: {"type", "whole", "parts": [[offset, size, file, at], ...]}},
                    "objects": {name: [file, at, length], or null for an empty one}}

Each part of a tensor starts at the offset ``at`` in its file, and is read directly into the target
tensor. Objects are serialized by :mod:`megatron.adaptive.checkpoint.plain_values`. The checksum of
each block is verified before the block is used. Reading never runs code from the checkpoint.

Checkpoints of earlier versions and of Megatron-LM have the pickle ``.metadata`` instead of an
index, and their tensors and objects were written by ``torch.save``. Such checkpoints are opened
only if the caller trusts them. Even then, they are read with restricted unpicklers, which create
only tensors, plain values and the classes that ``.metadata`` needs. Objects of other classes, such
as enumerations in Megatron-LM's arguments, are replaced by placeholders.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from megatron.adaptive.checkpoint import plain_values
from megatron.adaptive.checkpoint.checksums import CheckedFile
from megatron.adaptive.checkpoint.folder import INDEX, is_shard
from megatron.adaptive.checkpoint.writer import METADATA
from megatron.adaptive.config.input_files import parse_json
from megatron.adaptive.errors import DamagedCheckpointError

_Result = TypeVar("_Result")
# Classes and functions that are allowed in the pickle ``.metadata``, keyed by module.
_KNOWN = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
        "StorageMeta",
    ),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata",),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
}
_PLANS = "torch.distributed.checkpoint.planner"
# megatron-core 0.19 and later save common values in an object with this name. Earlier versions
# saved these values in a file.
_COMMON_OBJECT = "common_state/shard_0_1"


@dataclass(frozen=True, kw_only=True)
class SavedPart:
    """Position of a part of a tensor in a file.

    Attributes:
        offset: Index of the part's first element along each axis of the whole tensor.
        size: Shape of the part.
        file: Name of the file.
        begin: Offset of the part in the file, in bytes.
        pickled: Size of the part in bytes if ``torch.save`` wrote it, or ``None`` if it is stored
            as raw bytes.
    """

    offset: Sequence[int]
    size: Sequence[int]
    file: str
    begin: int
    pickled: int | None = None


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """Description of a tensor in a checkpoint.

    Attributes:
        dtype: Dtype of the elements.
        size: Shape of the whole tensor.
        parts: Saved parts that make up the whole tensor.
    """

    dtype: torch.dtype
    size: torch.Size
    parts: Sequence[SavedPart]


@dataclass(frozen=True, kw_only=True)
class WantedPart:
    """Region of a tensor to read, and the memory to read it into.

    Attributes:
        name: Name of the tensor.
        offset: Index of the region's first element along each axis of the whole tensor.
        target: Destination tensor, with the shape of the region.
        may_exceed: Whether the region may extend beyond the saved tensor. Elements of the region
            outside of the saved tensor are not changed.
    """

    name: str
    offset: Sequence[int]
    target: torch.Tensor
    may_exceed: bool = False


class CheckpointReader:
    """Reads one checkpoint. Use it as a context manager to close the files at the end.

    Args:
        path: Path of the checkpoint.
        files: Size in bytes of each file, from the manifest.
        blocks: Checksums of each file's blocks, from the manifest.
        near: Paths of copies of the files on the local disk, keyed by file name. These copies are
            tried first.

    Attributes:
        path: Path of the checkpoint.
        tensors: Dtype, shape and saved parts of each tensor, keyed by name.
        objects: File, offset and length of each non-tensor object, keyed by name. The value of an
            empty object is ``None``.

    Raises:
        DamagedCheckpointError: If the index is damaged.
    """

    def __init__(
        self,
        path: Path,
        files: Mapping[str, int],
        blocks: Mapping[str, str],
        near: Mapping[str, Path] | None = None,
    ) -> None:
        self.path = path
        self._files = files
        self._blocks = blocks
        self._near = near or {}
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
        """Closes the files. Safe to call more than once."""
        while self._open:
            self._open.popitem()[1].close()

    def read(self, requests: Iterable[WantedPart]) -> None:
        """Reads the regions that ``requests`` describe into their target tensors.

        Raises:
            DamagedCheckpointError: If a checksum does not match, or part of a region is missing.
        """
        regions: list[_Region] = []
        for request in requests:
            saved = self.tensors[request.name]
            target = request.target.detach()
            count = 0
            for part in saved.parts:
                region = _overlap(part, saved.dtype, request.offset, target)
                if region is None:
                    continue
                count += region.target.numel()
                regions.append(region)
            if count < target.numel() and not request.may_exceed:
                raise DamagedCheckpointError(
                    f"{self.path} contains only {count} of the {target.numel()} required elements "
                    f"of {request.name}"
                )
        regions.sort(key=lambda region: (region.part.file, region.part.begin))
        with torch.no_grad():
            for region in regions:
                self._fill(region.part, region.dtype, region.start, region.target)

    def read_object(self, name: str) -> list[Any]:
        """Returns the list of values that were saved under the name ``name``.

        Raises:
            DamagedCheckpointError: If the object's bytes are damaged.
        """
        entry = self.objects[name]
        if entry is None:
            return [None]
        file, begin, length = entry
        data = self._bytes(file, begin, length)
        read = _unpickled if self._is_former else plain_values.loads
        return list(self._guarded(file, lambda: read(data)))

    def read_values(self, name: str, former: str) -> Any:
        """Returns the content of the file ``name``, or of ``former`` in older checkpoints.

        Args:
            name: Name of the file with plain values.
            former: Name of the ``torch.save`` file that earlier versions and megatron-core write
                instead. Checkpoints of megatron-core 0.19 and later may not contain this file.

        Raises:
            DamagedCheckpointError: If the file is damaged.
        """
        if self._is_former and former not in self._files and _COMMON_OBJECT in self.objects:
            (values,) = self.read_object(_COMMON_OBJECT)
            return values
        name = former if self._is_former else name
        data = self._bytes(name, 0, self._size(name))
        read = _unpickled if self._is_former else plain_values.loads
        return self._guarded(name, lambda: read(data))

    def check_rest(self, share: int, shares: int) -> None:
        """Verifies the checksums of blocks without tensor data; each rank verifies a share of them.

        Blocks with tensor data are verified when the tensors are read. After this call, the ranks
        together have verified all blocks of the files with tensors.

        Args:
            share: Index of this rank's share of the blocks, from 0.
            shares: Number of shares, which equals the number of ranks.

        Raises:
            DamagedCheckpointError: If a block is damaged.
        """
        held: set[tuple[str, int]] = set()
        for saved in self.tensors.values():
            for part in saved.parts:
                length = math.prod(part.size) * saved.dtype.itemsize
                blocks = CheckedFile.blocks_of(part.begin, length)
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
        """Fills ``region`` with values of the saved ``part``, beginning at the index ``start``.

        ``dtype`` is the type of the saved values.
        """
        if part.pickled is not None:
            data = self._bytes(part.file, part.begin, part.pickled)
            saved = self._guarded(part.file, lambda: _unpickled(data))
            for axis, (offset, length) in enumerate(zip(start, region.shape, strict=True)):
                saved = saved.narrow(axis, offset, length)
            region.copy_(saved)
            return
        strides = [math.prod(part.size[axis + 1 :]) for axis in range(len(part.size))]
        first = sum(offset * stride for offset, stride in zip(start, strides, strict=True))
        steps = zip(region.shape, strides, strict=True)
        count = 1 + sum((length - 1) * stride for length, stride in steps)
        is_direct = (
            count == region.numel()
            and region.is_contiguous()
            and region.is_cpu
            and region.dtype == dtype
        )
        buffer = region if is_direct else torch.empty(count, dtype=dtype)
        memory: Any = buffer.reshape(-1).view(torch.uint8).numpy()
        self._file(part.file).read(part.begin + first * dtype.itemsize, memoryview(memory))
        if not is_direct:
            region.copy_(buffer.as_strided(region.shape, strides))

    def _file(self, name: str) -> CheckedFile:
        if name not in self._open:
            paths = [self.path / name]
            if name in self._near:
                paths.insert(0, self._near[name])
            expected = self._size(name), self._blocks.get(name, "")
            self._open[name] = CheckedFile(paths, expected)
        return self._open[name]

    def _size(self, name: str) -> int:
        if name not in self._files:
            raise DamagedCheckpointError(
                f"{self.path} does not contain {name}, which is listed in its index"
            )
        return self._files[name]

    def _bytes(self, name: str, offset: int, length: int) -> bytearray:
        data = bytearray(length)
        self._file(name).read(offset, memoryview(data))
        return data

    def _guarded(self, name: str, action: Callable[[], _Result]) -> _Result:
        """Runs ``action``, which parses the file ``name``, and returns its result.

        Any unexpected error is raised as a DamagedCheckpointError.
        """
        try:
            return action()
        except (DamagedCheckpointError, OSError, MemoryError):
            raise
        except Exception as error:
            # Omit the text of torch's errors, because it recommends loading the file with an
            # unpickler that can run code.
            reason = str(error) if isinstance(error, _Refused) else type(error).__name__
            text = f"cannot read {self.path / name} ({reason})"
            raise DamagedCheckpointError(text) from None

    def _read_index(self) -> None:
        index = parse_json(self._bytes(INDEX, 0, self._size(INDEX)))
        for name, entry in index["tensors"].items():
            parts = [
                SavedPart(offset=offset, size=size, file=file, begin=begin)
                for offset, size, file, begin in entry["parts"]
            ]
            dtype = getattr(torch, entry["type"])
            size = torch.Size(entry["whole"])
            self.tensors[name] = SavedTensor(dtype=dtype, size=size, parts=parts)
        for name, entry in index["objects"].items():
            self.objects[name] = None if entry is None else (entry[0], entry[1], entry[2])

    def _read_former_index(self) -> None:
        data = self._bytes(METADATA, 0, self._size(METADATA))
        index = _IndexUnpickler(io.BytesIO(data)).load()
        parts: dict[str, list[SavedPart]] = {}
        for key, info in index.storage_data.items():
            file = info.relative_path
            start = info.offset
            length = info.length
            saved = index.state_dict_metadata[key.fqn]
            if not hasattr(saved, "chunks"):
                self.objects[key.fqn] = file, start, length
                continue
            offset = [0] * len(saved.size) if key.offset is None else key.offset
            chunks = (chunk for chunk in saved.chunks if list(chunk.offsets) == list(offset))
            size = list(next(chunks).sizes)
            part = SavedPart(offset=list(offset), size=size, file=file, begin=start, pickled=length)
            parts.setdefault(key.fqn, []).append(part)
        for name, saved_parts in parts.items():
            saved = index.state_dict_metadata[name]
            dtype = saved.properties.dtype
            self.tensors[name] = SavedTensor(dtype=dtype, size=saved.size, parts=saved_parts)


class _Region(NamedTuple):
    """Overlap of a saved part with a requested region of a tensor.

    Attributes:
        part: Saved part of the tensor.
        dtype: Dtype of the saved elements.
        start: Index of the overlap's first element in the saved part.
        target: View of the overlap in the caller's tensor, to which the elements are written.
    """

    part: SavedPart
    dtype: torch.dtype
    start: Sequence[int]
    target: torch.Tensor


def _overlap(
    part: SavedPart, dtype: torch.dtype, offset: Sequence[int], target: torch.Tensor
) -> _Region | None:
    """Returns the overlap of a saved part with a region, or ``None`` if they do not overlap.

    Args:
        part: Saved part of the tensor.
        dtype: Dtype of the saved elements.
        offset: Index of the region's first element along each axis of the whole tensor.
        target: Tensor with the shape of the region.
    """
    low = [max(pair) for pair in zip(part.offset, offset, strict=True)]
    ends = zip(part.offset, part.size, offset, target.shape, strict=True)
    size = [min(a + b, c + d) - e for (a, b, c, d), e in zip(ends, low, strict=True)]
    if any(length <= 0 for length in size):
        return None
    for axis, (index, length) in enumerate(zip(low, size, strict=True)):
        target = target.narrow(axis, index - offset[axis], length)
    start = [a - b for a, b in zip(low, part.offset, strict=True)]
    return _Region(part, dtype, start, target)


class _Refused(pickle.UnpicklingError):
    """Raised if a pickle refers to a class or function that no checkpoint needs."""


class _IndexUnpickler(pickle.Unpickler):
    """Reads the pickle ``.metadata``, and rejects classes and functions that no index needs."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        # Objects from this module only record which rank wrote which data, so do not create them.
        if module == _PLANS:
            return UnreadObject
        if not is_dtype and name not in _KNOWN.get(module, ()):
            raise _Refused(f"it refers to {module}.{name}, which is not allowed in an index")
        return super().find_class(module, name)


def _unpickled(data: bytearray) -> Any:
    """Returns the value in ``data``, the output of ``torch.save``, using a restricted unpickler.

    Objects of classes that are not allowed become :class:`UnreadObject`.
    """
    array = np.array(0, np.uint32)
    rebuild: Any = array.__reduce__()[0]
    kind = type(array.dtype)
    former = (rebuild, "numpy.core.multiarray._reconstruct")
    allowed: list[Any] = [rebuild, former, np.ndarray, np.dtype, kind, io.BytesIO]
    file = io.BytesIO(data)
    with torch.serialization.safe_globals(allowed):
        others = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    file.seek(0)
    with torch.serialization.safe_globals([*allowed, *((UnreadObject, name) for name in others)]):
        return torch.load(file, map_location="cpu", weights_only=True)


class UnreadObject:
    """Placeholder for an object whose class is not allowed. It keeps the object's attributes."""

    def __init__(self, *_: object) -> None:
        pass
