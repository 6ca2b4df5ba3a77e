"""Holds input files against the JSON schemas that the package ships.

The schemas use a part of JSON Schema (2020-12), so that editors and other programs can use them as
they are: ``type``, ``enum``, ``const``, ``properties``, ``required``, ``additionalProperties``,
``items``, ``minItems``, ``maxItems``, ``minimum``, ``exclusiveMinimum``, ``pattern``, ``oneOf``
over the keys of an object, and ``$ref`` into ``$defs``. This module reads that part and says in one
line what is wrong, with the nearest key where one is misspelt.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from megatron.adaptive.errors import ConfigError

__all__ = ["SCHEMAS", "check", "load_schema"]

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
    """Return one of :data:`SCHEMAS`, shipped as ``planner/data/NAME.schema.json``."""
    file = resources.files("megatron.adaptive.planner") / "data" / f"{name}.schema.json"
    schema: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return schema


def check(value: Any, name: str, where: str) -> None:
    """Hold what was read from a file against a schema.

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
    """Return what a key is for, as the schema tells it."""
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
