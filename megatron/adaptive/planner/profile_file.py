"""Reads, merges and writes profile files, and makes them of measurements per cut point.

The form is ``data/profile.schema.json``; ``docs/planner.md`` describes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cluster import LinkSpeed, known_gpu
from megatron.adaptive.planner.files import check_schema, read_file
from megatron.adaptive.planner.model import Model
from megatron.adaptive.planner.model_file import arguments_model
from megatron.adaptive.planner.profile import LayerTimes, Profile

__all__ = [
    "FORMAT",
    "check_model",
    "load",
    "make_profile",
    "measured_memory",
    "merge",
    "renamed",
    "write",
]

FORMAT = 1
_NOT_OF_THE_MODEL = ("name", "counted", "group", "kept_bytes")
_SAME = 0.02  # relative difference up to which two counts of parameters are the same


def load(path: Path) -> dict[str, Any]:
    """Read and check a profile file.

    Raises:
        ConfigError: it cannot be read, has another format, or breaks a rule.
    """
    told = read_file(path, "profile")
    if isinstance(told, dict) and told.get("format") != FORMAT:
        given = told.get("format", "none")
        raise ConfigError(
            f"{path}: its format is {given}, this version reads {FORMAT}: measure the profile"
            " again with python -m megatron.adaptive profile"
        )
    check_schema(told, "profile", str(path))
    checked: dict[str, Any] = told
    return checked


def write(told: Mapping[str, Any], path: Path) -> None:
    """Write a profile file.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name another file") from error


def merge(parts: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Put profiles of one model together, as from nodes of different types.

    Where two hold the same measurement, the later one counts.

    Args:
        parts: names of the files and what they hold, checked.

    Raises:
        ConfigError: they are of different models.
    """
    first_name, first = parts[0]
    keys: Mapping[str, Callable[[Any], Any]] = {
        "layers": lambda row: (row["kind"], row["gpu"], row["tp"], row["micro_batch"]),
        "links": lambda row: (*sorted(row["nodes"]), row["within"], row.get("pairs", 1)),
        "all_reduce": lambda row: (row["node"], row["ranks"]),
    }
    merged: dict[str, Any] = {"format": FORMAT, "model": first["model"]}
    for name, part in parts:
        if part["model"] != first["model"]:
            raise ConfigError(
                f"{name} is of model {part['model']['name']}, {first_name} of"
                f" {first['model']['name']}: merge profiles of one model, measured with equal"
                " arguments"
            )
        for key in ("nodes", "optimizer_s_per_parameter", "launch_s"):
            merged.setdefault(key, {}).update(part.get(key, {}))
        for key, of in keys.items():
            rows = {of(row): row for row in merged.get(key, [])}
            rows.update({of(row): row for row in part.get(key, [])})
            merged[key] = list(rows.values())
    # The noisiest node is the one that others wait for.
    merged["action_sigma"] = max(part.get("action_sigma", 0.0) for _, part in parts)
    return merged


def make_profile(
    told: Mapping[str, Any], estimator: Callable[[str, str, int, int], LayerTimes] | None = None
) -> Profile:
    """Make a profile of what a checked file holds.

    Args:
        told: see :func:`load`.
        estimator: answers for what was not measured.

    Raises:
        ConfigError: the same layer was measured twice, or a link has no bandwidth.
    """
    layers: dict[tuple[str, str, int, int], LayerTimes] = {}
    for index, row in enumerate(told["layers"]):
        key = (row["kind"], _gpu(row["gpu"]), row["tp"], row["micro_batch"])
        if key in layers:
            raise ConfigError(
                f"profile: layers[{index}]: kind {key[0]} on {key[1]} with tp {key[2]} and"
                f" microbatch {key[3]} is there already; keep one"
            )
        layers[key] = LayerTimes(
            forward_s=row["forward_s"],
            backward_input_s=row["backward_input_s"],
            backward_weight_s=row.get("backward_weight_s", 0.0),
            tp_included=row.get("tp_included", row["tp"] > 1),
            kept_bytes=row.get("kept_bytes"),
            source=row.get("source", "measured"),
        )
    links = told.get("links", [])
    within = _curves((row["nodes"][0], row, False) for row in links if row["within"])
    between = _curves(
        ((row["nodes"][0], row["nodes"][1]), row, True) for row in links if not row["within"]
    )
    return Profile(
        layers=layers,
        model=told["model"]["name"],
        links=between,
        intra_links=within,
        all_reduce={
            (row["node"], row["ranks"]): _curve(row, shared=False)
            for row in told.get("all_reduce", [])
        },
        optimizer_s_per_parameter=_by_gpu(told.get("optimizer_s_per_parameter", {})),
        launch_s=_by_gpu(told.get("launch_s", {})),
        action_sigma=told.get("action_sigma", 0.0),
        estimator=estimator,
    )


def _gpu(name: str) -> str:
    found = known_gpu(name)
    return name if found is None else found.name


def _by_gpu(told: Mapping[str, float]) -> dict[str, float]:
    return {_gpu(name): value for name, value in told.items()}


def _curves(rows: Iterable[tuple[Any, Mapping[str, Any], bool]]) -> dict[Any, LinkSpeed]:
    """Put the measurements of one link with different numbers of pairs together."""
    found: dict[Any, dict[int, Mapping[str, Any]]] = {}
    shared = False
    for key, row, shared in rows:  # noqa: B007
        found.setdefault(key, {})[row.get("pairs", 1)] = row
    links = {}
    for key, by_pairs in found.items():
        single = by_pairs[min(by_pairs)]
        more = tuple(
            (pairs, _curve(row, shared=shared, times=pairs))
            for pairs, row in sorted(by_pairs.items())
            if row is not single
        )
        links[key] = _curve(single, shared=shared, by_pairs=more)
    return links


def _curve(
    row: Mapping[str, Any],
    *,
    shared: bool,
    times: int = 1,
    by_pairs: tuple[tuple[int, LinkSpeed], ...] = (),
) -> LinkSpeed:
    """``times``: pairs whose bandwidths add up, for the file holds that of one."""
    sizes = tuple((float(size), float(speed) * times) for size, speed in sorted(row["sizes"]))
    return LinkSpeed(
        bytes_per_s=sizes[-1][1],
        latency_s=row["latency_s"],
        shared=shared,
        sizes=sizes,
        by_pairs=by_pairs,
    )


def measured_memory(told: Mapping[str, Any]) -> dict[str, float]:
    """Bytes of each GPU by its name, as the nodes of a profile showed them."""
    return {
        _gpu(one["gpu"]): float(one["memory_bytes"])
        for one in told.get("nodes", {}).values()
        if "gpu" in one and "memory_bytes" in one
    }


def renamed(told: Mapping[str, Any], gpus: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Give the node types of a profile the names that a cluster has for them.

    A type that the cluster does not name is taken for the one with the same GPU, if there is one
    such. Links and all-reduces of types that stay unknown are not used.

    Args:
        told: a checked profile file.
        gpus: GPU of each node type of the cluster.

    Returns:
        The profile, and the names of types with measured links that the cluster does not have.
    """
    names: dict[str, str] = {}
    for name, facts in told.get("nodes", {}).items():
        alike = [own for own, gpu in gpus.items() if gpu == _gpu(facts.get("gpu", name))]
        names[name] = alike[0] if name not in gpus and len(alike) == 1 else name
    changed = dict(told)
    changed["links"] = [
        {**row, "nodes": [names.get(one, one) for one in row["nodes"]]}
        for row in told.get("links", [])
    ]
    changed["all_reduce"] = [
        {**row, "node": names.get(row["node"], row["node"])} for row in told.get("all_reduce", [])
    ]
    used = {one for row in changed["links"] for one in row["nodes"]}
    used |= {row["node"] for row in changed["all_reduce"]}
    return changed, sorted(used - set(gpus))


def check_model(told: Mapping[str, Any], model: Model, where: str) -> None:
    """Refuse a profile of other layers than a model's; the number of layers may differ.

    Raises:
        ConfigError: they differ.
    """
    measured = told["model"]
    advice = "measure the model that is planned, or leave --profile out"
    kinds = {row["kind"] for row in told["layers"]}
    missing = [kind for kind in model.kinds if kind not in kinds]
    if missing:
        raise ConfigError(
            f"{where} is of model {measured['name']}, which has no layers of kind {missing[0]!r}"
            f" as {model.name} does: {advice}"
        )
    arguments = measured.get("arguments", ())
    if arguments and model.arguments:
        other = arguments_model(arguments, measured["name"], model.precision.name)
        for name, kind in model.kinds.items():
            for field in ("parameters", "output_elements", "forward_flops"):
                if not _close(getattr(other.kinds[name], field), getattr(kind, field)):
                    raise ConfigError(
                        f"{where} is of model {measured['name']}, whose {name} has"
                        f" {getattr(other.kinds[name], field):.4g} {field.replace('_', ' ')};"
                        f" that of {model.name} has {getattr(kind, field):.4g}: {advice}"
                    )
        told_precision = _precision(arguments)
        if told_precision != model.precision.name:
            raise ConfigError(
                f"{where} was measured in {told_precision}, {model.name} is planned in"
                f" {model.precision.name}: give --precision {told_precision}, or {advice}"
            )
    for row in told["layers"]:
        counted = row.get("parameters")
        if counted is None or row["kind"] not in ("transformer", "encoder"):
            continue
        if row["kind"] not in model.kinds:
            continue
        held = model.kinds[row["kind"]].held_parameters(row["tp"])
        if abs(held - counted) > _SAME * max(held, counted):
            raise ConfigError(
                f"{where} is of model {measured['name']}, whose {row['kind']} layer holds"
                f" {counted:.4g} parameters with tp {row['tp']}; that of {model.name} holds"
                f" {held:.4g}: {advice}"
            )


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= _SAME * max(abs(one), abs(other))


def _precision(arguments: Sequence[str]) -> str:
    return next((name for name in ("fp16", "bf16") if f"--{name}" in arguments), "fp32")
