"""Reads models: names of presets, lists of arguments, model files, and profiles that hold one.

The form of a file is ``data/model.schema.json``; ``docs/planner.md`` describes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner import schema
from megatron.adaptive.planner.files import read_file
from megatron.adaptive.planner.model import LayerKind, Model, Precision
from megatron.adaptive.planner.presets import (
    arguments_model,
    preset,
    preset_names,
    read_arguments,
)
from megatron.adaptive.planner.transformer import Shape, build_model

__all__ = ["listed_model", "make_model", "read_model"]

_FILES = (".yaml", ".yml", ".toml", ".json")


def read_model(
    text: str, precision: str | None = None, *, default: str = "bf16", fused: bool | None = None
) -> Model:
    """Read a model from what the user named.

    Args:
        text: the name of a preset; a list of the trainer's arguments; the path of a model or
            profile file (``.yaml``, ``.toml``, ``.json``) or of a file of arguments.
        precision: wins over what the model says.
        default: for models that do not say it.
        fused: whether attention keeps no scores, where the model does not say it.

    Raises:
        ConfigError: it is none of them, or breaks a rule.
    """
    if text.lstrip().startswith("--"):
        return arguments_model(read_arguments(text, Path(), "--model"), "model", precision)
    path = Path(text)
    if path.suffix.lower() in _FILES:
        told = read_file(path, "model")
        if isinstance(told, dict) and isinstance(told.get("model"), dict):
            return _of_profile(told, str(path), precision)
        return make_model(told, str(path), path.parent, precision, default=default, fused=fused)
    if text in preset_names() or not path.is_file():
        return preset(text, precision or default, fused=fused)
    arguments = read_arguments(text, Path(), "--model")
    return arguments_model(arguments, path.stem, precision, fused=fused)


def make_model(
    told: Any,
    where: str,
    folder: Path,
    precision: str | None = None,
    *,
    default: str = "bf16",
    fused: bool | None = None,
) -> Model:
    """Make a model of what a model file says.

    Args:
        told: plain lists, dicts, texts and numbers.
        where: the file, for messages.
        folder: what relative paths in it start from.
        precision: wins over the file.
        default: where neither says it.
        fused: see :func:`read_model`.

    Raises:
        ConfigError: it breaks a rule.
    """
    schema.check(told, "model", where)
    name = told.get("name", Path(where).stem)
    precision = precision or told.get("precision")
    if "preset" in told:
        return preset(told["preset"], precision or default, fused=fused)
    if "arguments" in told:
        arguments = read_arguments(told["arguments"], folder, f"{where}: arguments")
        return arguments_model(arguments, name, precision, fused=fused)
    if "shape" in told:
        sizes = Precision.named(precision or default)
        return build_model(_shape(told["shape"], name, sizes, fused=fused))
    return listed_model(told, name, Precision.named(precision or default))


def _shape(
    told: Mapping[str, Any], name: str, precision: Precision, *, fused: bool | None
) -> Shape:
    given = dict(told)
    hidden, heads = given["hidden"], given["heads"]
    if "head_width" not in given and hidden % heads:
        raise ConfigError(
            f"model {name}: hidden {hidden} is no multiple of {heads} heads: change one, or give"
            " head_width"
        )
    given.setdefault("head_width", hidden // heads)
    given.setdefault("query_groups", heads)
    given.setdefault("ffn", 4 * hidden)
    given.setdefault("positions", given["sequence"])
    if fused is not None:
        given.setdefault("fused_attention", fused)
    return Shape(name=name, precision=precision, **given)


def listed_model(told: Mapping[str, Any], name: str, precision: Precision) -> Model:
    """Make a model of a list of layers, which was checked against its schema.

    Args:
        told: has ``layers``; may have ``tokens_per_sample``, ``tied_parameters`` and
            ``tied_layers``.
        name: of the model.
        precision: bytes of numbers.

    Raises:
        ConfigError: two layers of one kind differ.
    """
    kinds: dict[str, LayerKind] = {}
    layers: list[str] = []
    for index, one in enumerate(told["layers"]):
        sizes = {key: value for key, value in one.items() if key not in ("kind", "count")}
        kind = LayerKind(name=one["kind"], **sizes)
        if kinds.setdefault(kind.name, kind) != kind and sizes:
            raise ConfigError(
                f"model {name}: layers[{index}] is of kind {kind.name!r} with other sizes than"
                " before: give it a kind of its own"
            )
        layers += [kind.name] * one.get("count", 1)
    return Model(
        name=name,
        kinds=kinds,
        layers=tuple(layers),
        tokens_per_sample=told.get("tokens_per_sample", 1),
        tied_parameters=float(told.get("tied_parameters", 0.0)),
        tied_layers=tuple(told.get("tied_layers", ())),
        precision=precision,
    )


def _of_profile(told: Mapping[str, Any], where: str, precision: str | None) -> Model:
    """Return the model that a profile was measured with."""
    schema.check(told, "profile", where)
    model = told["model"]
    if model.get("layers"):
        return listed_model(
            model, model["name"], Precision.named(precision or model.get("precision", "fp32"))
        )
    arguments: Sequence[str] = model.get("arguments", ())
    if not arguments:
        raise ConfigError(
            f"{where}: the profile does not say what model it is of: give --model by name"
        )
    return arguments_model(arguments, model["name"], precision)
