"""Reads YAML, TOML and JSON files that people write, and checks them against schemas.

The suffix of a file determines its format. Duplicate keys are an error in all three formats.
Quantities are written with a unit (``40 GB``, ``25 Gbit/s``, ``5 us``), because a plain number does
not show whether it means bits or bytes.

The schemas in ``data/forms.yaml`` use these keywords of JSON Schema (2020-12): ``type``, ``enum``,
``const``, ``properties``, ``required``, ``additionalProperties``, ``items``, ``prefixItems``,
``minItems``, ``maxItems``, ``minimum``, ``maximum``, ``exclusiveMinimum``, ``pattern`` and
``oneOf`` (exactly one of several keys of an object). An error message is a single line that
describes the problem. For an unknown key, the message suggests the most similar key.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
import reprlib
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from megatron.adaptive.config.input_files import MAX_LEVELS, read_json, read_text
from megatron.adaptive.errors import ConfigError

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
    """Converts text with a quantity such as ``25 GB/s`` to a number in the base unit ``unit``.

    Args:
        text: Number, followed by a unit.
        unit: Base unit of the result: ``bytes_per_s``, ``bytes``, ``s`` or ``flops``.
        name: Name of the value in error messages, for example the file and key, or a command-line
            option.
        zero: Whether 0 is allowed.

    Raises:
        ConfigError: The text is not a number with a suitable unit, or the number is too small.
    """
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    rule = f"a number with a unit, such as {_EXAMPLES[unit]}"
    if match is None or match[2] not in _UNITS[unit]:
        raise ConfigError(f"{name} must be {rule}, got {text!r}")
    try:
        value = float(match[1]) * _UNITS[unit][match[2]]
    except ValueError:
        raise ConfigError(f"{name} must be {rule}, got {text!r}") from None
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        least = "at least 0" if zero else "above 0"
        raise ConfigError(f"{name} must be {least}, got {text!r}")
    return value


def read_file(path: Path, form: str) -> Any:
    """Reads a YAML, TOML or JSON file, and returns its contents as Python objects.

    Args:
        path: Path of the file. The suffix ``.toml`` means TOML, ``.json`` means JSON, and all other
            suffixes mean YAML.
        form: Type of the file in error messages: ``cluster``, ``model`` or ``profile``.

    Raises:
        ConfigError: The file cannot be read, or is not valid YAML, TOML or JSON.
    """
    hint = f"pass a {form} file"
    if path.suffix.lower() == ".json":
        return read_json(path, hint)
    text = read_text(path, hint)
    try:
        if path.suffix.lower() == ".toml":
            return tomllib.loads(text)
        return yaml.load(text, Loader=_OnceLoader)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"{path}: {line}not valid YAML: {error.problem}") from error
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply; {hint}") from None
    except (ValueError, yaml.YAMLError) as error:
        file_format = "TOML" if path.suffix.lower() == ".toml" else "YAML"
        raise ConfigError(
            f"{path} is not valid {file_format}: {str(error).splitlines()[0]}"
        ) from error


class _OnceLoader(yaml.SafeLoader):
    """YAML loader that rejects duplicate keys and deep nesting, which PyYAML would accept."""

    def fetch_flow_collection_start(self, token: Any) -> None:
        if self.flow_level >= MAX_LEVELS:
            raise RecursionError
        super().fetch_flow_collection_start(token)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                line = key.start_mark.line + 1
                raise ConfigError(f"line {line}: {key.value!r} is given twice; keep one")
            seen.add(str(key.value))
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping


_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "object": ((dict,), "keys with values"),
    "array": ((list,), "a list"),
    "string": ((str,), "text"),
    "boolean": ((bool,), "true or false"),
    "integer": ((int,), "an integer"),
    "number": ((int, float), "a number"),
}


FORMS = ("cluster", "model", "profile")
"""Names of the schemas for the input files of the planner."""


@functools.cache
def forms() -> Mapping[str, Any]:
    """Returns the schemas in ``data/forms.yaml``, keyed by name."""
    file = resources.files("megatron.adaptive.config") / "data" / "forms.yaml"
    schemas: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return schemas


def check_form(value: Any, name: str, where: str) -> Any:
    """Checks the contents of a file against the schema called ``name``.

    Args:
        value: Contents of the file as parsed from YAML, TOML or JSON.
        name: Name of the schema in ``data/forms.yaml``.
        where: Path of the file, shown in error messages.

    Returns:
        Copy of the contents in which quantities such as ``40 GB`` are numbers in base units.

    Raises:
        ConfigError: The contents do not match the schema. The message describes the first mismatch.
    """
    return _check(value, forms()[name], where, "")


def _check(value: Any, schema: Mapping[str, Any], where: str, path: str) -> Any:
    if rule := _broken_rule(value, schema):
        about = f" ({schema['description']})" if "description" in schema else ""
        # Aliases allow a small YAML file to repeat a list a million times, so the value is
        # shortened.
        shown = reprlib.repr(value)
        raise ConfigError(f"{where}: {path or 'the file'} must be {rule}{about}, got {shown}")
    if isinstance(value, list):
        return _check_list(value, schema, where, path)
    if isinstance(value, dict):
        return _check_object(value, schema, where, path)
    if "x-unit" in schema:
        key = f"{where}: {path}"
        return quantity(value, schema["x-unit"], key, zero=schema.get("x-zero", False))
    return value


def _broken_rule(value: Any, schema: Mapping[str, Any]) -> str:
    """Returns the requirement in ``schema`` that ``value`` violates, or an empty string.

    The entries of lists and objects are not checked.
    """
    if "type" in schema:
        types, rule = _TYPES[schema["type"]]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            return rule
    if "const" in schema and value != schema["const"]:
        return repr(schema["const"])
    if "enum" in schema and value not in schema["enum"]:
        return f"one of {', '.join(map(str, schema['enum']))}"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        return str(schema["x-rule"])
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    if "minimum" in schema and value < schema["minimum"]:
        return f"at least {schema['minimum']}"
    if "maximum" in schema and value > schema["maximum"]:
        return f"at most {schema['maximum']:,}"
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        return f"above {schema['exclusiveMinimum']}"
    return ""


def _check_list(value: list[Any], schema: Mapping[str, Any], where: str, path: str) -> list[Any]:
    least = schema.get("minItems", 0)
    most = schema.get("maxItems", math.inf)
    if not least <= len(value) <= most:
        count = "at least one entry" if most > least else f"{least} entries"
        raise ConfigError(f"{where}: {path} must have {count}, got {len(value)}")
    schemas = schema.get("prefixItems") or [schema.get("items", {})] * len(value)
    return [
        _check(entry, schemas[index], where, f"{path}[{index}]")
        for index, entry in enumerate(value)
    ]


def _check_object(
    value: dict[str, Any], schema: Mapping[str, Any], where: str, path: str
) -> dict[str, Any]:
    properties = schema.get("properties", {})
    others = schema.get("additionalProperties", {})
    prefix = f"{path}." if path else ""
    checked = {}
    for key, entry in value.items():
        of_key = properties.get(key, others)
        if of_key is False:
            nearest = difflib.get_close_matches(str(key), properties, n=1)
            keys = f"keys of {path or 'the file'} are {', '.join(properties)}"
            hint = f"the nearest is {nearest[0]}" if nearest else keys
            raise ConfigError(f"{where}: {prefix}{key} is not a key; {hint}")
        checked[key] = _check(entry, of_key, where, f"{prefix}{key}")
    for key in schema.get("required", ()):
        if key not in value:
            description = properties[key]["description"]
            raise ConfigError(f"{where}: {prefix}{key} is missing ({description})")
    choice = [option["required"][0] for option in schema.get("oneOf", ())]
    present = [key for key in choice if key in value]
    if choice and not present:
        raise ConfigError(f"{where}: {path or 'the file'} must have one of {', '.join(choice)}")
    if len(present) > 1:
        raise ConfigError(
            f"{where}: {path or 'the file'} has {' and '.join(present)}, which exclude each "
            "other; remove one of them"
        )
    return checked
