"""Reads the planner's input files: YAML, TOML or JSON, told apart by the ending of the name.

A key given twice is an error in all three forms. Quantities carry their unit in the text
(``40 GB``, ``25 Gbit/s``, ``5 us``): bits and bytes differ by a factor of 8 that no number shows.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.adaptive.errors import ConfigError, SetupError

__all__ = ["quantity", "read_file"]

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_PREFIXES = {**_DECIMAL, **_BINARY}
_BITS = ("bit/s", "bits/s", "b/s", "bps")


def _units() -> Mapping[str, Mapping[str, float]]:
    rates = {f"{prefix}B/s": factor for prefix, factor in _PREFIXES.items()}
    rates |= {f"{prefix}{bits}": f / 8 for prefix, f in _DECIMAL.items() for bits in _BITS}
    return {
        "bytes_per_s": rates,
        "bytes": {f"{prefix}B": factor for prefix, factor in _PREFIXES.items()},
        "s": {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0},
        "flops": {f"{prefix}FLOP/s": factor for prefix, factor in _DECIMAL.items()},
    }


_UNITS = _units()
_EXAMPLES = {
    "bytes_per_s": "25 GB/s (bytes) or 200 Gbit/s (bits)",
    "bytes": "40 GB or 39.5 GiB",
    "s": "5 us or 0.1 ms",
    "flops": "312 TFLOP/s",
}
_QUANTITY = re.compile(r"\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*(\S*)\s*")


def quantity(text: Any, unit: str, name: str, *, zero: bool = False) -> float:
    """Read a number with its unit.

    Args:
        text: such as ``25 GB/s``.
        unit: what is wanted: ``bytes_per_s``, ``bytes``, ``s`` or ``flops``.
        name: file and key, or option, for the message.
        zero: whether 0 is allowed.

    Raises:
        ConfigError: no number, another unit, or not above 0.
    """
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    rule = f"write a number with its unit, such as {_EXAMPLES[unit]}"
    if match is None or match[2] not in _UNITS[unit]:
        raise ConfigError(f"{name} is {text!r}: {rule}")
    try:
        value = float(match[1]) * _UNITS[unit][match[2]]
    except ValueError:
        raise ConfigError(f"{name} is {text!r}: {rule}") from None
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        least = "at least 0" if zero else "above 0"
        raise ConfigError(f"{name} is {text!r}: it must be {least}")
    return value


def read_file(path: Path, what: str) -> Any:
    """Read a YAML, TOML or JSON file into plain lists, dicts, texts and numbers.

    Args:
        path: the file; ``.toml`` is TOML, ``.json`` is JSON, anything else YAML.
        what: what it holds, for messages: ``cluster``, ``model`` or ``profile``.

    Raises:
        ConfigError: the file cannot be read or breaks its form.
        SetupError: a package that reads the form is missing.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ConfigError(f"{path}: {why}; name a {what} file") from error
    suffix = path.suffix.lower()
    if suffix == ".json":
        return _read_json(text, path)
    if suffix == ".toml":
        return _read_toml(text, path)
    return _read_yaml(text, path)


def _read_json(text: str, path: Path) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        told: dict[str, Any] = {}
        for key, value in pairs:
            if key in told:
                raise ConfigError(f"{path}: {key!r} is given twice in one object; keep one")
            told[key] = value
        return told

    try:
        return json.loads(text, object_pairs_hook=once)
    except ValueError as error:
        raise ConfigError(f"{path}: no JSON: {error}") from error


def _read_toml(text: str, path: Path) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ImportError as error:
            raise SetupError(f"{path}: reading TOML needs tomli: pip install tomli") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: no TOML: {error}") from error


def _read_yaml(text: str, path: Path) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise SetupError(f"{path}: reading YAML needs PyYAML: pip install pyyaml") from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """YAML itself lets the later of two equal keys win."""

    def mapping(loader: Loader, node: Any) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                line = key.start_mark.line + 1
                raise ConfigError(f"{path}: line {line}: {key.value!r} is given twice; keep one")
            seen.add(str(key.value))
        told: dict[Any, Any] = loader.construct_mapping(node, deep=True)
        return told

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}: " if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{path}: {place}no YAML: {problem}") from error
