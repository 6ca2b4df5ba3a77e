"""Checks a value against the part of JSON Schema that the schemas beside this file use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "boolean": (bool,),
}
_KNOWN = frozenset(
    "$schema title description type properties additionalProperties required items minItems "
    "maxItems minimum maximum pattern enum const".split()
)


def mistakes(value: Any, schema: Mapping[str, Any], place: str = "$") -> Iterator[str]:
    """Yield what is wrong, each with its place.

    Raises:
        ValueError: the schema uses a word that is not checked here.
    """
    if unknown := set(schema) - _KNOWN:
        raise ValueError(f"{place}: the words {sorted(unknown)} of the schema are not checked")
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        yield f"{place}: {value!r} is no {' or '.join(kinds)}"
        return
    if "const" in schema and value != schema["const"]:
        yield f"{place}: {value!r} is not {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place}: {value!r} is not one of {schema['enum']}"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{place}: {value!r} does not match {schema['pattern']}"
    if isinstance(value, int):
        if not schema.get("minimum", value) <= value <= schema.get("maximum", value):
            yield f"{place}: {value} is out of range"
    elif isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            yield f"{place}: {len(value)} entries are too few or too many"
        for number, item in enumerate(value):
            yield from mistakes(item, schema.get("items", {}), f"{place}[{number}]")
    elif isinstance(value, dict):
        yield from _of_object(value, schema, place)


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _of_object(value: dict[str, Any], schema: Mapping[str, Any], place: str) -> Iterator[str]:
    known, more = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name in schema.get("required", []):
        if name not in value:
            yield f"{place}: {name} is missing"
    for name, item in value.items():
        if name in known:
            yield from mistakes(item, known[name], f"{place}.{name}")
        elif more is False:
            yield f"{place}: there is no field {name}"
        elif isinstance(more, dict):
            yield from mistakes(item, more, f"{place}.{name}")
