"""Reads and writes folders of ``safetensors`` files, one tensor or a part of one at a time.

::

    model.safetensors                 [ 8 bytes: length of the header | JSON | bytes of tensors ]
    model-00001-of-00002.safetensors  the same, of a model in several files, and
    model.safetensors.index.json      {"metadata": {...}, "weight_map": {name: file}}

The ``safetensors`` package maps files into memory, where pages that were read count as the
process's own, and writes a file from tensors that are all in memory; here a part of a tensor is
read into the memory that wants it, and files are written tensor by tensor.

A weight in 8 bits has a tensor beside it, ``NAME_scale_inv``, with a factor for each 128 x 128 of
its elements. It is read as what it stands for, and the factors are not among the tensors.
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

FP8, _SCALES, _SCALED = "F8_E4M3", "_scale_inv", 128
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
DTYPES[FP8] = torch.float8_e4m3fn
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_PICKLED = (".bin", ".pt", ".pth")
_BLOCK_BYTES = 1 << 23
_RESTORE = "copy it again"


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Says where a tensor is.

    Attributes:
        file: that it is in.
        dtype: its code in the format, such as ``BF16``.
        shape: of the tensor.
        at: offset of its first byte in the file.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    at: int


class TensorFolder:
    """Reads tensors of a model's folder; use it in ``with``.

    Args:
        folder: of the model.
        only: name of the one file to read, by default those of a model.

    Attributes:
        tensors: by name.

    Raises:
        CheckpointError: there are no such files, or pickles alone.
        DamagedCheckpointError: a file is missing or cut, or says what cannot be.
    """

    def __init__(self, folder: Path, only: str | None = None) -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self._open: dict[Path, int] = {}
        files: dict[Path, list[str]] = {} if only is None else {folder / only: []}
        for path, names in (files or self._files()).items():
            found = _read_header(path)
            if missing := sorted(set(names) - found.keys()):
                raise DamagedCheckpointError(
                    f"{path} has no {missing[0]}, which {INDEX} says is there: {_RESTORE}"
                )
            self.tensors.update(found)
        self._scales: dict[str, StoredTensor] = {}
        for name, one in [*self.tensors.items()]:
            if one.dtype == FP8:
                scale = self.tensors.pop(name + _SCALES, None)
                if scale is None or scale.shape != tuple(-(-n // _SCALED) for n in one.shape):
                    raise CheckpointError(
                        f"{one.file}: {name} is in 8 bits without {_SCALES[1:]} for blocks of"
                        f" {_SCALED} x {_SCALED}: save the model in 16 bits"
                    )
                self._scales[name] = scale

    def __enter__(self) -> TensorFolder:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def read(self, name: str, row: int, column: int, target: torch.Tensor) -> None:
        """Fills a tensor from a rectangle of one of the folder.

        Args:
            name: of the tensor, which has one or two axes; one counts as a single column.
            row, column: of the first element.
            target: ``[rows, columns]``, of any type and layout in the host's memory or elsewhere.

        Raises:
            DamagedCheckpointError: the file ends before.
        """
        stored = self.tensors[name]
        width, dtype = (*stored.shape, 1)[1], DTYPES[stored.dtype]
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

    def _factors(self, name: str, row: int, count: int, width: int) -> torch.Tensor:
        """Returns the factors ``[count, width]`` of rows of a tensor in 8 bits."""
        stored = self._scales[name]
        whole = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        self._fill(stored, 0, whole)
        rows = torch.arange(row, row + count) // _SCALED
        return whole[rows].repeat_interleave(_SCALED, dim=1)[:, :width].float()

    def _fill(self, stored: StoredTensor, offset: int, block: torch.Tensor) -> None:
        if stored.file not in self._open:
            self._open[stored.file] = os.open(stored.file, os.O_RDONLY)
        whole: Any = block.reshape(-1).view(torch.uint8).numpy()
        view, done = memoryview(whole), 0
        while done < len(view):
            at = stored.at + offset + done
            count = os.preadv(self._open[stored.file], [view[done:]], at)
            if not count:
                raise DamagedCheckpointError(f"{stored.file} ends at byte {at}: {_RESTORE}")
            done += count

    def _files(self) -> dict[Path, list[str]]:
        """Returns the files, and what the index says is in each."""
        index = self.folder / INDEX
        if not index.is_file():
            if (self.folder / SINGLE).is_file():
                return {self.folder / SINGLE: []}
            pickled = sorted(one.name for one in self.folder.glob("*.*") if one.suffix in _PICKLED)
            raise CheckpointError(
                f"{self.folder} has neither {SINGLE} nor {INDEX}"
                + (
                    f" but {pickled[0]}, a pickle, which can run code as it is loaded: save the"
                    " model anew with save_pretrained of transformers, which writes safetensors"
                    if pickled
                    else ": name the folder of a Hugging Face model"
                )
            )
        document = read_json(index, _RESTORE, DamagedCheckpointError)
        found: dict[Path, list[str]] = {}
        table = document.get("weight_map") if isinstance(document, dict) else None
        if not isinstance(table, dict) or not table:
            raise DamagedCheckpointError(f"{index} has no weight_map: {_RESTORE}")
        for name, file in table.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise DamagedCheckpointError(f"{index}: {file!r} is no file's name: {_RESTORE}")
            found.setdefault(self.folder / file, []).append(name)
        for path, names in found.items():
            if not path.is_file():
                raise DamagedCheckpointError(
                    f"{path} is missing, and {len(names)} tensors are in it: {_RESTORE}"
                )
        return found


def _read_header(path: Path) -> dict[str, StoredTensor]:
    tensors = {}
    for name, entry in read_header(path).items():
        if entry.dtype not in DTYPES:
            raise CheckpointError(
                f"{path}: {name} is of type {entry.dtype}, and {', '.join(DTYPES)} are read:"
                " convert it before"
            )
        tensors[name] = StoredTensor(
            file=path, dtype=entry.dtype, shape=entry.shape, at=entry.begin
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
    """Writes a model's files and their index as ``transformers`` does, durably.

    Args:
        folder: that they go to.
        tensors: types and shapes by name, in the order of the model.
        read: returns a tensor by its name, contiguous in the host's memory; called once for each.
        shard_bytes: size of the largest file, unless one tensor is larger.
        single: name of the file where it is one.

    Raises:
        OSError: one could not be written.
    """
    bytes_of = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in tensors.items()}
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in bytes_of.items():
        # One that is too large is alone, and the shard before it goes on.
        if size > shard_bytes:
            shards.insert(len(shards) - 1, [name])
            continue
        if filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    shards = [one for one in shards if one]
    count = len(shards)
    table: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = single if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        table.update(dict.fromkeys(names, file))
        _write_file(folder / file, {name: tensors[name] for name in names}, read)
    if count > 1:
        parameters = sum(math.prod(shape) for _, shape in tensors.values())
        metadata = {"total_parameters": parameters, "total_size": sum(bytes_of.values())}
        index = {"metadata": metadata, "weight_map": table}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        write_files(folder, {INDEX: text.encode()})
    sync(folder)


def _write_file(
    path: Path,
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    read: Callable[[str], torch.Tensor],
) -> None:
    # In the order of the package: wide types first, then by name.
    names = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in names:
        dtype, shape = tensors[name]
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": [*shape], "data_offsets": [at, end]}
        at = end
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
