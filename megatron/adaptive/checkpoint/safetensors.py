"""Reads and writes folders of ``safetensors`` files, one tensor or part of a tensor at a time.

::

    model.safetensors                 [ 8 bytes: length of the header | JSON | bytes of tensors ]
    model-00001-of-00002.safetensors  the same, for a model in several files, and
    model.safetensors.index.json      {"metadata": {...}, "weight_map": {name: file}}

The ``safetensors`` package would need more memory. The package maps files into memory, so all pages
that have been read count as memory of the process. To write a file, it needs all tensors of the
file at the same time. This module reads parts of tensors directly into their targets, and writes
one tensor at a time.

A weight with 8-bit elements has a second tensor, ``NAME_scale_inv``, with a scale factor for each
block of 128 x 128 elements. When such a weight is read, its elements are multiplied by their scale
factors. The tensors with scale factors are not listed among the tensors of the folder.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.adaptive.checkpoint.folder import sync, write_files
from megatron.adaptive.config.hugging_face import INDEX, SINGLE
from megatron.adaptive.config.input_files import read_json
from megatron.adaptive.config.safetensors_header import read_header
from megatron.adaptive.errors import CheckpointError, DamagedCheckpointError

FP8 = "F8_E4M3"
_SCALES = "_scale_inv"
_SCALED = 128
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
DTYPES[FP8] = torch.float8_e4m3fn
ALL_DTYPES = {
    **DTYPES,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes that parameters and buffers of a module may have, keyed by their codes in the files."""
_CODES = {dtype: code for code, dtype in ALL_DTYPES.items()}
_PICKLED = (".bin", ".pt", ".pth")
_BLOCK_BYTES = 1 << 23
_RESTORE = "copy the file again"


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Position of a tensor in a file.

    Attributes:
        file: Path of the file.
        dtype: Dtype in the notation of safetensors, such as ``BF16``.
        shape: Shape of the tensor.
        begin: Offset of the tensor in the file, in bytes.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int


class TensorFolder:
    """Reads tensors from a model's folder. Use it as a context manager to close the files.

    Args:
        folder: Folder of the model.
        only: Name of the only file to read, or ``None`` to read all files of the model.
        dtypes: Dtypes that the folder's tensors may have, keyed by their codes in the files.

    Attributes:
        tensors: Position of each tensor, keyed by name.

    Raises:
        CheckpointError: If the folder has no ``safetensors`` files, for example because it has only
            pickles.
        DamagedCheckpointError: If a file is missing or truncated, or has an invalid header.
    """

    def __init__(
        self, folder: Path, only: str | None = None, dtypes: Mapping[str, torch.dtype] = DTYPES
    ) -> None:
        self.folder = folder
        self._dtypes = dtypes
        self.tensors: dict[str, StoredTensor] = {}
        self._open: dict[Path, int] = {}
        files: dict[Path, list[str]] = {} if only is None else {folder / only: []}
        for path, names in (files or self._files()).items():
            entries = _read_header(path, dtypes)
            if missing := sorted(set(names) - entries.keys()):
                raise DamagedCheckpointError(
                    f"{path} does not contain {missing[0]}, which is listed in {INDEX}; {_RESTORE}"
                )
            self.tensors.update(entries)
        self._scales: dict[str, StoredTensor] = {}
        for name, stored in [*self.tensors.items()]:
            if stored.dtype == FP8:
                scale = self.tensors.pop(name + _SCALES, None)
                if scale is None or scale.shape != tuple(-(-n // _SCALED) for n in stored.shape):
                    raise CheckpointError(
                        f"{stored.file}: the 8-bit tensor {name} requires a tensor {name}{_SCALES} "
                        f"with one scale for each block of {_SCALED} x {_SCALED} elements; save "
                        "the model in a 16-bit type"
                    )
                self._scales[name] = scale

    def __enter__(self) -> TensorFolder:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def read(self, name: str, row: int, column: int, target: torch.Tensor) -> None:
        """Reads a range of rows and columns of the tensor ``name`` into ``target``.

        Args:
            name: Name of the tensor, which must have one or two axes. A tensor with one axis is
                read as a matrix with a single column.
            row: Index of the first row to read.
            column: Index of the first column to read.
            target: Destination tensor, with the shape ``[rows, columns]``. It may have any
                dtype, layout and device.

        Raises:
            DamagedCheckpointError: If the file is truncated.
        """
        stored = self.tensors[name]
        width = (*stored.shape, 1)[1]
        dtype = DTYPES[stored.dtype]
        rows, columns = target.shape
        line = width * dtype.itemsize
        is_direct = target.is_cpu and target.dtype == dtype and target.is_contiguous()
        if is_direct and columns == width and rows:
            self._fill(stored, row * line, target)
            return
        step = max(1, _BLOCK_BYTES // line)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            block = torch.empty((count, width), dtype=dtype)
            self._fill(stored, (row + first) * line, block)
            if name in self._scales:
                block = block.float() * self._factors(name, row + first, count, width)
            target[first : first + count].copy_(block[:, column : column + columns])

    def dtype_of(self, name: str) -> torch.dtype:
        """Returns the dtype of the tensor ``name``."""
        return self._dtypes[self.tensors[name].dtype]

    def read_whole(self, name: str, target: torch.Tensor | None = None) -> torch.Tensor:
        """Reads the whole tensor ``name``, which may have any number of axes.

        Args:
            name: Name of the tensor. Its elements must not be 8-bit floating-point numbers.
            target: Tensor into which the values are read if it is in host memory and has the dtype,
                shape and layout of the saved tensor. Otherwise, it is not changed.

        Returns:
            ``target``, or a new tensor in host memory if ``target`` is not suitable.

        Raises:
            DamagedCheckpointError: If the file is truncated.
        """
        stored = self.tensors[name]
        dtype = self.dtype_of(name)
        if (
            target is None
            or not target.is_cpu
            or target.dtype != dtype
            or tuple(target.shape) != stored.shape
            or not target.is_contiguous()
        ):
            target = torch.empty(stored.shape, dtype=dtype)
        if target.numel():
            self._fill(stored, 0, target.detach())
        return target

    def _factors(self, name: str, row: int, count: int, width: int) -> torch.Tensor:
        """Returns the scale factors ``[count, width]`` of ``count`` rows of the tensor ``name``.

        The rows start at ``row`` and have ``width`` elements.
        """
        stored = self._scales[name]
        whole = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        self._fill(stored, 0, whole)
        rows = torch.arange(row, row + count) // _SCALED
        return whole[rows].repeat_interleave(_SCALED, dim=1)[:, :width].float()

    def _fill(self, stored: StoredTensor, offset: int, block: torch.Tensor) -> None:
        if stored.file not in self._open:
            self._open[stored.file] = os.open(stored.file, os.O_RDONLY)
        whole: Any = block.reshape(-1).view(torch.uint8).numpy()
        view = memoryview(whole)
        done = 0
        while done < len(view):
            position = stored.begin + offset + done
            count = os.preadv(self._open[stored.file], [view[done:]], position)
            if not count:
                raise DamagedCheckpointError(
                    f"{stored.file} is truncated at byte {position}; {_RESTORE}"
                )
            done += count

    def _files(self) -> dict[Path, list[str]]:
        """Returns the tensor names that the index lists for each file, keyed by the file's path."""
        index = self.folder / INDEX
        if not index.is_file():
            if (self.folder / SINGLE).is_file():
                return {self.folder / SINGLE: []}
            files = self.folder.glob("*.*")
            pickled = sorted(file.name for file in files if file.suffix in _PICKLED)
            raise CheckpointError(
                f"{self.folder} has neither {SINGLE} nor {INDEX}"
                + (
                    f", but contains {pickled[0]}, a pickle, which can run code when it is loaded; "
                    "use save_pretrained() of the transformers library to save the model as "
                    "safetensors"
                    if pickled
                    else "; pass the folder of a Hugging Face model"
                )
            )
        document = read_json(index, _RESTORE, DamagedCheckpointError)
        names_by_file: dict[Path, list[str]] = {}
        table = document.get("weight_map") if isinstance(document, dict) else None
        if not isinstance(table, dict) or not table:
            raise DamagedCheckpointError(f"{index} has no weight_map; {_RESTORE}")
        for name, file in table.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise DamagedCheckpointError(f"{index}: {file!r} is not a file name; {_RESTORE}")
            names_by_file.setdefault(self.folder / file, []).append(name)
        for path, names in names_by_file.items():
            if not path.is_file():
                raise DamagedCheckpointError(
                    f"{path} is missing, but {INDEX} lists {len(names)} tensors in it; {_RESTORE}"
                )
        return names_by_file


def _read_header(path: Path, dtypes: Mapping[str, torch.dtype]) -> dict[str, StoredTensor]:
    tensors = {}
    for name, entry in read_header(path).items():
        if entry.dtype not in dtypes:
            raise CheckpointError(
                f"{path}: {name} has the type {entry.dtype}, but only {', '.join(dtypes)} are "
                "supported; convert the tensor to one of these types"
            )
        tensors[name] = StoredTensor(
            file=path, dtype=entry.dtype, shape=entry.shape, begin=entry.begin
        )
    return tensors


def write_folder(
    folder: Path,
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    read: Callable[[str], torch.Tensor],
    *,
    shard_bytes: int,
    single: str = SINGLE,
) -> None:
    """Writes a model's files and index as the ``transformers`` library does, and flushes them.

    Args:
        folder: Folder to write to.
        tensors: Dtype and shape of each tensor, keyed by name, in the order of the model.
        read: Function that takes the name of a tensor and returns the tensor, which must be
            contiguous and in host memory. It is called once per tensor.
        shard_bytes: Maximum size of a file in bytes. A larger tensor gets a separate file.
        single: Name of the file if all tensors fit into a single file.

    Raises:
        OSError: If a file cannot be written.
    """
    shards = split_shards(tensors, shard_bytes)
    table: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = single if len(shards) == 1 else shard_name(number, len(shards))
        table.update(dict.fromkeys(names, file))
        write_shard(folder / file, {name: tensors[name] for name in names}, read)
    if len(shards) > 1:
        write_index(folder, table, tensors)
    sync(folder)


def split_shards(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], shard_bytes: int
) -> list[list[str]]:
    """Divides tensors among files, and returns the names of the tensors in each file.

    Args:
        tensors: Dtype and shape of each tensor, keyed by name, in the order of the model.
        shard_bytes: Maximum size of a file in bytes. A larger tensor gets a separate file.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * dtype.itemsize
        # If a tensor exceeds shard_bytes, insert its file before the file that is being filled.
        if size > shard_bytes:
            shards.insert(len(shards) - 1, [name])
            continue
        if filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return [shard for shard in shards if shard]


def shard_name(number: int, count: int) -> str:
    """Returns the name of file ``number`` of a model that is split into ``count`` files.

    Args:
        number: Index of the file, from 0.
        count: Number of files.
    """
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_index(
    folder: Path, files: Mapping[str, str], tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]
) -> None:
    """Writes the index of a model that consists of several files.

    Args:
        folder: Folder to write to.
        files: Name of the file that contains each tensor, keyed by the tensor's name.
        tensors: Dtype and shape of each tensor, keyed by name.

    Raises:
        OSError: If the index cannot be written.
    """
    sizes = [(math.prod(shape), dtype.itemsize) for dtype, shape in tensors.values()]
    metadata = {
        "total_parameters": sum(count for count, _ in sizes),
        "total_size": sum(count * itemsize for count, itemsize in sizes),
    }
    index = {"metadata": metadata, "weight_map": dict(files)}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    write_files(folder, {INDEX: text.encode()})


def write_shard(
    path: Path,
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    read: Callable[[str], torch.Tensor],
) -> None:
    """Writes one file of a model, one tensor at a time, and flushes it to disk.

    Args:
        path: Path of the file.
        tensors: Dtype and shape of each tensor of the file, keyed by name.
        read: Function that takes the name of a tensor and returns the tensor, which must be
            contiguous and in host memory.

    Raises:
        OSError: If the file cannot be written.
    """
    # Use the same order of tensors as the safetensors package: dtypes with larger elements first,
    # then by name.
    names = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name in names:
        dtype, shape = tensors[name]
        end = begin + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": [*shape], "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            whole: Any = read(name).reshape(-1).view(torch.uint8).numpy()
            view = memoryview(whole)
            while view:
                view = view[file.write(view) :]
    sync(path)
