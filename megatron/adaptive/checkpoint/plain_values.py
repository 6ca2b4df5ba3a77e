r"""Serializes state other than the model's tensors in a format that is safe to read.

::

    {"progress": {"iteration": 100}, "scale": {"!": "tensor", "type": "float32", ...}}   \\n
    bytes of the tensors, arrays and long lists of integers that the line refers to, each aligned
    to 64 bytes after the line

The first line is JSON. Values that JSON cannot express are stored as JSON objects whose entry ``!``
names the type of the value. Unlike a pickle, such data cannot run code when it is read.
"""

from __future__ import annotations

import array
import collections
import io
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from megatron.adaptive.config.input_files import parse_json

_KIND = "!"
_ALIGN = 64
# The JSON line is padded to a multiple of this number of bytes, so that the data after the line
# rarely change their position.
_LINE = 256
_LONG = 16  # Shorter lists of integers are written in the JSON line.
_PLAIN = (bool, int, float, str, type(None))
_ARRAYS = "biufc"  # These NumPy kinds (dtype.kind) contain only numbers, and no Python objects.
_INT64 = range(-(1 << 63), 1 << 63)


def dumps(value: Any) -> bytes:
    """Serializes ``value`` to bytes that :func:`loads` can read safely.

    Args:
        value: Value to serialize, which may consist of dictionaries, lists, tuples, sets, numbers,
            strings, bytes, tensors, arrays, :class:`io.BytesIO`, and torch types and devices.

    Raises:
        TypeError: If ``value`` contains an object of another type. The message names the position
            of this object.
    """
    writer = _Writer()
    line = json.dumps(writer.plain(value, "it"), separators=(",", ":")).encode()
    size = -(-(len(line) + 1) // _LINE) * _LINE
    return b"".join([line.ljust(size - 1), b"\n", *writer.buffers])


def loads(data: bytes | bytearray) -> Any:
    """Restores the value from bytes that :func:`dumps` returned.

    Tensors in the result do not share memory with ``data``.

    Raises:
        ValueError: If the bytes do not have the format that :func:`dumps` writes.
    """
    end = data.find(b"\n") + 1
    if not end:
        raise ValueError("it does not start with a line of JSON")
    try:
        return _value(parse_json(data[:end], strict=False), memoryview(data)[end:])
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError, RecursionError) as error:
        raise ValueError(f"it does not consist of plain values ({type(error).__name__})") from None


class _Writer:
    def __init__(self) -> None:
        self.buffers: list[bytes] = []
        self._end = 0

    def plain(self, value: Any, where: str) -> Any:
        """Converts ``value`` to types that JSON can express, and moves large data to ``buffers``.

        Args:
            value: Value to convert.
            where: Position of the value in the outermost value, such as ``it['scale'][0]``, for
                error messages.
        """
        if type(value) in _PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            if value.layout != torch.strided or value.is_quantized:
                raise TypeError(
                    f"{where} is a sparse, nested or quantized tensor, which is not supported"
                )
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            kind = str(value.dtype).removeprefix("torch.")
            return self._bytes("tensor", flat.tobytes(), type=kind, shape=list(value.shape))
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _ARRAYS:
            kind = "array" if isinstance(value, np.ndarray) else "number"
            raw = np.ascontiguousarray(value).tobytes()
            shape = list(value.shape)
            return self._bytes(kind, raw, type=value.dtype.str, shape=shape)
        if isinstance(value, bytes | bytearray | io.BytesIO):
            raw = value.getvalue() if isinstance(value, io.BytesIO) else bytes(value)
            return self._bytes("file" if isinstance(value, io.BytesIO) else "bytes", raw)
        if isinstance(value, Mapping):
            return self._mapping(value, where)
        if isinstance(value, list | tuple | set | frozenset):
            return self._sequence(value, where)
        if isinstance(value, complex):
            return {_KIND: "complex", "parts": [value.real, value.imag]}
        if isinstance(value, torch.dtype | torch.device):
            name = "dtype" if isinstance(value, torch.dtype) else "device"
            return {_KIND: name, "name": str(value).removeprefix("torch.")}
        raise TypeError(f"{where} has the unsupported type {type(value).__name__}")

    def _mapping(self, value: Mapping[Any, Any], where: str) -> Any:
        kinds: dict[Any, str] = {collections.OrderedDict: "ordered", collections.Counter: "counter"}
        kind = kinds.get(type(value), "dict")
        is_text = all(type(key) is str for key in value)
        entries = [(key, self.plain(entry, f"{where}[{key!r}]")) for key, entry in value.items()]
        if kind == "dict" and is_text and _KIND not in value:
            return dict(entries)
        pairs = [[self.plain(key, f"a key of {where}"), entry] for key, entry in entries]
        about = getattr(value, "_metadata", None)  # state_dict() sets this attribute.
        more = {} if about is None else {"about": self.plain(about, f"{where}._metadata")}
        return {_KIND: kind, "items": pairs, **more}

    def _sequence(self, value: Any, where: str) -> Any:
        kind = "list" if isinstance(value, list) else "tuple"
        if isinstance(value, set | frozenset):
            kind, value = "set", sorted(value, key=repr)
        if len(value) >= _LONG and all(type(item) is int and item in _INT64 for item in value):
            return self._bytes("integers", array.array("q", value).tobytes(), of=kind)
        items = [self.plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if kind == "list" else {_KIND: kind, "items": items}

    def _bytes(self, kind: str, raw: bytes, **more: Any) -> dict[str, Any]:
        offset = self._end
        padded = raw.ljust(-(-len(raw) // _ALIGN) * _ALIGN, b"\0")
        self.buffers.append(padded)
        self._end += len(padded)
        return {_KIND: kind, "at": offset, "length": len(raw), **more}


def _value(form: Any, rest: memoryview) -> Any:
    if isinstance(form, list):
        return [_value(item, rest) for item in form]
    if not isinstance(form, dict):
        return form
    if _KIND not in form:
        return {name: _value(entry, rest) for name, entry in form.items()}
    return _READ[form[_KIND]](form, rest)


def _raw(form: Mapping[str, Any], rest: memoryview) -> bytes:
    offset = form["at"]
    length = form["length"]
    if not 0 <= offset <= offset + length <= len(rest):
        raise ValueError("it is truncated")
    return bytes(rest[offset : offset + length])


def _tensor(form: Mapping[str, Any], rest: memoryview) -> torch.Tensor:
    kind = getattr(torch, form["type"])
    raw = _raw(form, rest)
    if not raw:
        return torch.empty(form["shape"], dtype=kind)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(kind).reshape(form["shape"])


def _array(form: Mapping[str, Any], rest: memoryview) -> Any:
    kind = np.dtype(form["type"])
    if kind.kind not in _ARRAYS or math.prod(form["shape"]) * kind.itemsize != form["length"]:
        raise ValueError("an array has an invalid dtype or size")
    return np.frombuffer(bytearray(_raw(form, rest)), kind).reshape(form["shape"])


def _mapping(form: Mapping[str, Any], rest: memoryview) -> Any:
    kinds = {"ordered": collections.OrderedDict, "counter": collections.Counter, "dict": dict}
    pairs = [(_value(key, rest), _value(entry, rest)) for key, entry in form["items"]]
    mapping: Any = kinds[form[_KIND]]()
    for key, entry in pairs:
        mapping[key] = entry
    if "about" in form:
        mapping._metadata = _value(form["about"], rest)
    return mapping


def _integers(form: Mapping[str, Any], rest: memoryview) -> Any:
    numbers = array.array("q", _raw(form, rest)).tolist()
    return {"list": list, "tuple": tuple, "set": set}[form["of"]](numbers)


_READ: dict[str, Callable[[Mapping[str, Any], memoryview], Any]] = {
    "tensor": _tensor,
    "array": _array,
    "number": lambda form, rest: _array(form, rest)[()],
    "bytes": _raw,
    "file": lambda form, rest: io.BytesIO(_raw(form, rest)),
    "integers": _integers,
    "tuple": lambda form, rest: tuple(_value(form["items"], rest)),
    "set": lambda form, rest: set(_value(form["items"], rest)),
    "dict": _mapping,
    "ordered": _mapping,
    "counter": _mapping,
    "complex": lambda form, rest: complex(*form["parts"]),
    "dtype": lambda form, rest: getattr(torch, form["name"]),
    "device": lambda form, rest: torch.device(form["name"]),
}
