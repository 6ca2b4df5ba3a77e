"""Compares which headers this package accepts with those that ``safetensors`` accepts."""

from __future__ import annotations

import copy
import json
import os
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError, safe_open

from megatron.adaptive.config.safetensors_header import BITS, read_header
from megatron.adaptive.errors import CheckpointError, DamagedCheckpointError

Header = dict[str, Any]


def _write(path: Path, header: Header | bytes, data: bytes) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def _is_taken_by_the_package(path: Path) -> bool:
    try:
        with safe_open(path, "pt") as file:
            file.keys()
    except (SafetensorError, OSError):
        return False
    return True


def _is_taken(path: Path) -> bool:
    """Returns whether a file is accepted. An error must be one line that names the file."""
    try:
        read_header(path)
    except DamagedCheckpointError as error:
        message = str(error)
    else:
        return True
    assert "\n" not in message
    assert str(path) in message
    return False


def _agree(path: Path) -> bool:
    """Checks that both readers agree about ``path``, and returns whether they accept the file."""
    is_taken = _is_taken(path)
    assert is_taken == _is_taken_by_the_package(path), path.read_bytes()[:2000]
    return is_taken


def _tensor(begin: int, end: int, shape: Sequence[Any] = (2,), dtype: str = "F32") -> Header:
    return {"dtype": dtype, "shape": [*shape], "data_offsets": [begin, end]}


WHOLE = {"a": _tensor(0, 8), "b": _tensor(8, 16)}
REFUSED: dict[str, tuple[Header | bytes, int]] = {
    "overlap": ({"a": _tensor(0, 8), "b": _tensor(4, 12)}, 12),
    "twice the same bytes": ({"a": _tensor(0, 8), "b": _tensor(0, 8)}, 8),
    "hole": ({"a": _tensor(0, 8), "b": _tensor(12, 20)}, 20),
    "hole at the beginning": ({"a": _tensor(4, 12)}, 12),
    "bytes behind": (WHOLE, 17),
    "bytes behind no tensor": ({}, 1),
    "cut": (WHOLE, 15),
    "backwards": ({"a": _tensor(8, 0)}, 8),
    "other size than the shape": ({"a": _tensor(0, 8, [3])}, 8),
    "beyond 64 bits": ({"a": _tensor(0, 8, [1 << 63, 4])}, 8),
    "negative": ({"a": _tensor(0, 8, [-2])}, 8),
    "fraction": ({"a": _tensor(0, 8, [2.0])}, 8),
    "truth value": ({"a": _tensor(0, 4, [True])}, 4),
    "three offsets": ({"a": {**_tensor(0, 8), "data_offsets": [0, 8, 8]}}, 8),
    "unknown type": ({"a": _tensor(0, 8, dtype="F128")}, 8),
    "no type": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, 8),
    "list for an object": (b"[]", 0),
    "number for a tensor": ({"a": 1}, 0),
    "metadata that are no text": ({"__metadata__": {"x": 1}, **WHOLE}, 16),
    "part of a byte": ({"a": _tensor(0, 2, [3], "F4")}, 2),
    "no JSON": (b'{"a": ', 0),
    "text behind": (b"{}x", 0),
    "not a number": (b'{"a": {"x": NaN}}', 0),
    "field twice": (b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 8),
    "half a character": (b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 8),
    "minus zero": (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[-0,8]}}', 8),
    "no UTF-8": (b'{"\xff":1}', 0),
    "nested without end": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 0),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_package_refuses_is_refused(case: str, tmp_path: Path) -> None:
    header, size = REFUSED[case]
    _write(tmp_path / "x.safetensors", header, bytes(size))
    assert not _agree(tmp_path / "x.safetensors")


TAKEN: dict[str, tuple[Header | bytes, int]] = {
    "whole": (WHOLE, 16),
    "in another order": ({"b": _tensor(8, 16), "a": _tensor(0, 8)}, 16),
    "without tensors": ({}, 0),
    "metadata": ({"__metadata__": {"format": "pt"}, **WHOLE}, 16),
    "metadata null": ({"__metadata__": None, **WHOLE}, 16),
    "more fields": ({"a": {**_tensor(0, 8), "more": [1, {}]}}, 8),
    "empty tensors": ({"a": _tensor(0, 0, [0]), "b": _tensor(0, 8), "c": _tensor(8, 8, [0])}, 8),
    "blanks behind": (json.dumps(WHOLE).encode() + b"  \n\t ", 16),
    "no axes": ({"a": _tensor(0, 4, [])}, 4),
    **{f"type {code}": ({"a": _tensor(0, bits, [8], code)}, bits) for code, bits in BITS.items()},
}


@pytest.mark.parametrize("case", TAKEN)
def test_what_the_package_takes_is_taken(case: str, tmp_path: Path) -> None:
    header, size = TAKEN[case]
    _write(tmp_path / "x.safetensors", header, bytes(size))
    assert _agree(tmp_path / "x.safetensors")


def test_entries_say_where_tensors_are(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    _write(path, WHOLE, b"12345678abcdefgh")
    entry = read_header(path)["b"]
    assert path.read_bytes()[entry.begin : entry.end] == b"abcdefgh"
    assert (entry.dtype, entry.shape) == ("F32", (2,))


def _random_header(draw: random.Random) -> tuple[Header, int]:
    """Returns a random valid header with a few tensors, and the size of their data in bytes."""
    header: Header = {}
    end = 0
    for number in range(draw.randrange(5)):
        dtype = draw.choice(sorted(BITS))
        shape = [draw.choice((0, 1, 2, 3, 8)) for _ in range(draw.randrange(3))] + [8]
        count = BITS[dtype] // (1 if BITS[dtype] < 8 else 8)
        for extent in shape:
            count *= extent
        size = count // 8 if BITS[dtype] < 8 else count
        header[f"t{number}"] = _tensor(end, end + size, shape, dtype)
        end += size
    names = [*header]
    draw.shuffle(names)
    return {name: header[name] for name in names}, end


def _change(header: Header, draw: random.Random) -> None:
    """Changes a number, a type or a key of ``header`` at random, in place."""
    if not header:
        header["x"] = draw.choice((1, [], {}, _tensor(0, 4, [1])))
        return
    tensor = header[draw.choice([*header])]
    kind = draw.randrange(6)
    if kind < 3:
        tensor["data_offsets"][draw.randrange(2)] += draw.choice((-8, -1, 1, 4, 1 << 64))
    elif kind == 3:
        tensor["shape"][draw.randrange(len(tensor["shape"]))] = draw.choice((0, 1, 2, -1, 1.5, "2"))
    elif kind == 4:
        tensor["dtype"] = draw.choice((*BITS, "", None, 4))
    else:
        del tensor[draw.choice([*tensor])]


def test_random_damage_has_the_verdict_of_the_package(tmp_path: Path) -> None:
    draw, path = random.Random(11), tmp_path / "x.safetensors"
    verdicts = {True: 0, False: 0}
    for _ in range(1500):
        header, size = _random_header(draw)
        kind = draw.randrange(5)
        if kind == 0:
            size = max(0, size + draw.choice((-4, -1, 1, 8)))
        elif kind <= 2:
            _change(header := copy.deepcopy(header), draw)
        _write(path, header, bytes(size))
        if kind == 3:
            raw = bytearray(path.read_bytes())
            for _ in range(draw.randrange(1, 4)):
                raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
            path.write_bytes(raw)
        verdicts[_agree(path)] += 1
    assert min(verdicts.values()) > 300


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [os.mkfifo, _device, os.mkdir])
def test_only_regular_files_are_read(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"cannot read .*x\.safetensors: "):
        read_header(tmp_path / "x.safetensors")
