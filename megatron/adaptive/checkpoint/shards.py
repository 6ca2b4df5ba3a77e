"""The file of one rank in megatron-core's ``torch_dist``: its form is made once, then filled.

::

    | head  data  tail | head  data  tail | ...          | object | object |
      `--- what torch.save makes of a tensor ---'          pickled, of any length

What ``torch.save`` writes of a tensor depends on its type and shape alone, but for the data and
their checksum. It is made once for each such kind; a checkpoint then is one call of the system that
gathers the pieces from where they lie, without a copy and without Python in between.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

__all__ = ["Place", "ShardFile", "ShardWriter", "metadata_bytes", "write_metadata"]

_METADATA = ".metadata"
_PIECES = 1000  # in one call of the system; Linux takes 1024
_BATCH_BYTES = 64 << 20  # as many are held at once where tensors are not in the host's memory
_CHECKSUM = struct.Struct("<I")
Place = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Form:
    """What ``torch.save`` makes of tensors of one kind.

    Attributes:
        head: before the data.
        tail: after them.
        checksums: where theirs stands in the tail.
    """

    head: bytes
    tail: bytes
    checksums: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Form:
        """Save a tensor like this one and see where its data went."""
        buffer = io.BytesIO()
        # Of ones: the checksum of zeros could be found among other bytes that are zero.
        torch.save(torch.ones(tensor.shape, dtype=tensor.dtype), buffer)
        content = buffer.getvalue()
        with zipfile.ZipFile(buffer) as archive:
            (entry,) = (one for one in archive.infolist() if one.filename.endswith("/data/0"))
        name_bytes, extra_bytes = struct.unpack_from("<HH", content, entry.header_offset + 26)
        start = entry.header_offset + 30 + name_bytes + extra_bytes
        head, tail = content[:start], content[start + entry.file_size :]
        checksum = _CHECKSUM.pack(entry.CRC)
        found: list[int] = []
        while entry.file_size and (at := tail.find(checksum, found[-1] + 1 if found else 0)) >= 0:
            found.append(at)
        if entry.compress_type != zipfile.ZIP_STORED or len(found) != (2 if entry.file_size else 0):
            raise RuntimeError(
                f"torch {torch.__version__} saves tensors in another form than known here:"
                " use one of the versions in requirements.txt"
            )
        return cls(head, tail, tuple(found))


@dataclass(frozen=True)
class _Record:
    index: MetadataIndex
    form: _Form
    offset: int
    length: int


class ShardFile:
    """The form of one rank's file.

    Args:
        name: of the file.
        tensors: with their places in the whole state, in the order of the file; what they hold
            does not matter.
        objects: places of what is pickled.
    """

    def __init__(
        self,
        name: str,
        tensors: Sequence[tuple[MetadataIndex, torch.Tensor]],
        objects: Sequence[MetadataIndex],
    ) -> None:
        self.name = name
        self._objects = list(objects)
        self._records: list[_Record] = []
        forms: dict[tuple[torch.dtype, torch.Size], _Form] = {}
        end = 0
        for index, tensor in tensors:
            kind = (tensor.dtype, tensor.shape)
            if kind not in forms:
                forms[kind] = _Form.of(tensor)
            form = forms[kind]
            length = len(form.head) + tensor.nbytes + len(form.tail)
            self._records.append(_Record(index, form, end, length))
            end += length
        self._end = end

    @property
    def places(self) -> list[Place]:
        """Names and offsets of the tensors, in the order of the file."""
        return [(one.index.fqn, tuple(one.index.offset or ())) for one in self._records]

    @property
    def objects(self) -> list[str]:
        """Names of the objects, in the order of the file."""
        return [one.fqn for one in self._objects]

    def write(
        self, folder: Path, tensors: Sequence[torch.Tensor], objects: Sequence[memoryview]
    ) -> list[WriteResult]:
        """Fill the form and write it as a new file; the system still has to make it durable.

        Args:
            folder: that the file goes to.
            tensors: one for each place, of its type and shape, wherever they are.
            objects: one for each place.

        Returns:
            Where each lies.

        Raises:
            OSError: it could not be written.
        """
        path = folder / self.name
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            for batch in _batches(itertools.chain(self._filled(tensors), objects)):
                _write_all(descriptor, batch)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
        finally:
            os.close(descriptor)
        return [*self._results(), *self.results_of_objects(objects)]

    def _filled(self, tensors: Sequence[torch.Tensor]) -> Iterator[memoryview]:
        for record, tensor in zip(self._records, tensors, strict=True):
            data, tail = _bytes_of(tensor), bytearray(record.form.tail)
            if record.form.checksums:
                checksum = zlib.crc32(data)
                for at in record.form.checksums:
                    _CHECKSUM.pack_into(tail, at, checksum)
            yield memoryview(record.form.head)
            yield data
            yield memoryview(tail)

    def _results(self) -> Iterator[WriteResult]:
        for record in self._records:
            where = _StorageInfo(self.name, record.offset, record.length)
            yield WriteResult(index=record.index, size_in_bytes=record.length, storage_data=where)

    def results_of_objects(self, objects: Sequence[memoryview]) -> Iterator[WriteResult]:
        """Where objects lie."""
        offset = self._end
        for index, content in zip(self._objects, objects, strict=True):
            where = _StorageInfo(self.name, offset, content.nbytes)
            yield WriteResult(index=index, size_in_bytes=content.nbytes, storage_data=where)
            offset += content.nbytes


class ShardWriter(FileSystemWriter):  # type: ignore[misc]
    """Writes a plan of torch's, and keeps what the next checkpoint of the same form needs.

    Attributes:
        file: the form of this rank's file, once it was written.
        lengths: of its objects, in bytes.
        metadata: on rank 0, what ``.metadata`` tells, once all have written.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=False)
        self.file: ShardFile | None = None
        self.lengths: list[int] = []
        self.metadata: Metadata | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part."""
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        objects = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        data: list[Any] = [planner.resolve_data(item) for item in tensors]
        pickled: list[Any] = [planner.resolve_data(item) for item in objects]
        file = ShardFile(
            f"{plan.storage_data.prefix}0.distcp",
            [(item.index, one) for item, one in zip(tensors, data, strict=True)],
            [item.index for item in objects],
        )
        contents = [one.getbuffer() for one in pickled]
        done: Future[list[WriteResult]] = Future()
        done.set_result(file.write(Path(self.path), data, contents))
        self.file = file
        self.lengths = [one.nbytes for one in contents]
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Keep where everything lies."""
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {one.index: one.storage_data for own in results for one in own}
        # torch's own would tell the folder's name of the moment, and change at each checkpoint.
        metadata.storage_meta = None
        self.metadata = metadata


def write_metadata(folder: Path, content: bytes) -> None:
    """Write what all files hold."""
    (folder / _METADATA).write_bytes(content)


def metadata_bytes(metadata: Metadata, changed: Mapping[MetadataIndex, Any]) -> bytes:
    """Return the file of the metadata after bringing it to now.

    Args:
        metadata: changed in place.
        changed: where objects lie that lay elsewhere.
    """
    metadata.storage_data.update(changed)
    return pickle.dumps(metadata)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes, its own memory where that is the host's and without gaps."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    content: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(content)


def _batches(pieces: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    batch: list[memoryview] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += piece.nbytes
        if len(batch) == _PIECES or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    yield batch


def _write_all(descriptor: int, pieces: Sequence[memoryview]) -> None:
    left = [piece for piece in pieces if piece.nbytes]
    while left:
        written = os.writev(descriptor, left)
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if left:
            left[0] = left[0][written:]
