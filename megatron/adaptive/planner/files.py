"""Reads the planner's input files: YAML, TOML or JSON, by the ending of the name.

A key given twice is an error in all three forms. Quantities carry their unit in the text
(``40 GB``, ``25 Gbit/s``, ``5 us``): bits and bytes differ by a factor of 8 that no number shows.

Files are checked against the JSON schemas that the package ships. These use a part of JSON Schema
(2020-12), so that editors and other programs can use them as they are: ``type``, ``enum``,
``const``, ``properties``, ``required``, ``additionalProperties``, ``items``, ``minItems``,
``maxItems``, ``minimum``, ``exclusiveMinimum``, ``pattern``, ``oneOf`` over the keys of an object,
and ``$ref`` into ``$defs``. An error names the rule that is broken in one line, with the nearest
key where one is misspelt.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from megatron.adaptive.errors import ConfigError, SetupError

__all__ = ["SCHEMAS", "check_schema", "load_schema", "quantity", "read_file"]


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
    """Reads a number with its unit.

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
    """Reads a YAML, TOML or JSON file into plain lists, dicts, texts and numbers.

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
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ConfigError(f"{path}: {key!r} is given twice in one object; keep one")
            found[key] = value
        return found

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
        found: dict[Any, Any] = loader.construct_mapping(node, deep=True)
        return found

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}: " if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{path}: {place}no YAML: {problem}") from error


SCHEMAS = ("cluster", "model", "profile")

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}
_WORDS = {
    "object": "keys with values",
    "array": "a list",
    "string": "text",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
}


@functools.cache
def load_schema(name: str) -> Mapping[str, Any]:
    """Returns one of :data:`SCHEMAS`, shipped as ``planner/data/NAME.schema.json``."""
    file = resources.files("megatron.adaptive.planner") / "data" / f"{name}.schema.json"
    schema: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return schema


def check_schema(value: Any, name: str, where: str) -> None:
    """Holds what was read from a file against a schema.

    Args:
        value: plain lists, dicts, texts and numbers.
        name: one of :data:`SCHEMAS`.
        where: the file, for the message.

    Raises:
        ConfigError: the first rule that is broken.
    """
    schema = load_schema(name)
    _check(value, schema, schema, where, "")


def _check(
    value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], where: str, path: str
) -> None:
    if "$ref" in schema:
        target = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
        _check(value, target, root, where, path)
        return
    place = path or "the file"
    kinds = schema.get("type")
    if kinds is not None:
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not any(_is(value, kind) for kind in kinds):
            raise _wrong(where, place, value, " or ".join(_WORDS[kind] for kind in kinds), schema)
    if "const" in schema and value != schema["const"]:
        raise _wrong(where, place, value, repr(schema["const"]), schema)
    if "enum" in schema and value not in schema["enum"]:
        raise _wrong(where, place, value, f"one of {_list(schema['enum'], value)}", schema)
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        raise _wrong(where, place, value, schema.get("x-rule", "of another form"), schema)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        _check_number(value, schema, where, place)
    if isinstance(value, list):
        _check_list(value, schema, root, where, path)
    if isinstance(value, dict):
        _check_object(value, schema, root, where, path)


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind])


def _check_number(value: float, schema: Mapping[str, Any], where: str, place: str) -> None:
    if not math.isfinite(value):
        raise _wrong(where, place, value, "a finite number", schema)
    if "minimum" in schema and value < schema["minimum"]:
        raise _wrong(where, place, value, f"at least {schema['minimum']}", schema)
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        raise _wrong(where, place, value, f"above {schema['exclusiveMinimum']}", schema)


def _check_list(
    value: list[Any], schema: Mapping[str, Any], root: Mapping[str, Any], where: str, path: str
) -> None:
    least, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)
    if not least <= len(value) <= most:
        count = f"{least} entries" if least == most else f"at least {least} entries"
        if least == 1 and most > 1:
            count = "at least one entry"
        raise ConfigError(f"{where}: {path or 'the file'} has {len(value)} entries: give {count}")
    if "items" in schema:
        for index, one in enumerate(value):
            _check(one, schema["items"], root, where, f"{path}[{index}]")


def _check_object(
    value: dict[str, Any], schema: Mapping[str, Any], root: Mapping[str, Any], where: str, path: str
) -> None:
    known = schema.get("properties", {})
    others = schema.get("additionalProperties", True)
    prefix = f"{path}." if path else ""
    for key, one in value.items():
        if key in known:
            _check(one, known[key], root, where, f"{prefix}{key}")
        elif others is False:
            raise ConfigError(
                f"{where}: {prefix}{key} is not a key: {_hint(str(key), list(known), path)}"
            )
        elif isinstance(others, dict):
            _check(one, others, root, where, f"{prefix}{key}")
    for key in schema.get("required", ()):
        if key not in value:
            raise ConfigError(
                f"{where}: {prefix}{key} is missing: {_about(known.get(key, {}), root)}"
            )
    if "oneOf" in schema:
        _check_one_of(value, [one["required"][0] for one in schema["oneOf"]], where, path)


def _check_one_of(value: dict[str, Any], keys: list[str], where: str, path: str) -> None:
    given = [key for key in keys if key in value]
    place = path or "the file"
    if not given:
        raise ConfigError(f"{where}: {place} has none of {', '.join(keys)}: give one of them")
    if len(given) > 1:
        raise ConfigError(
            f"{where}: {place} has {' and '.join(given)}, which exclude each other: keep one"
        )


def _hint(key: str, known: list[str], path: str) -> str:
    nearest = difflib.get_close_matches(key, known, n=1)
    if nearest:
        return f"the nearest is {nearest[0]}"
    return f"keys of {path or 'the file'} are {', '.join(known)}"


def _about(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """Returns what a key is for, as the schema describes it."""
    if "description" not in schema and "$ref" in schema:
        schema = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    return str(schema.get("description", "add it"))


def _list(values: list[Any], given: Any) -> str:
    words = ", ".join(str(value) for value in values)
    nearest = difflib.get_close_matches(str(given), [str(value) for value in values], n=1)
    return f"{words} (the nearest is {nearest[0]})" if nearest else words


def _wrong(where: str, place: str, value: Any, rule: str, schema: Mapping[str, Any]) -> ConfigError:
    about = f" ({schema['description']})" if "description" in schema else ""
    shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
    return ConfigError(f"{where}: {place} is {shown}: it must be {rule}{about}")
