"""Reads, merges and writes profile files, and converts measurements of model pieces to profiles.

The file format is defined by the schema ``profile`` in ``config.schema_files`` and described in
``docs/reference/planner.md``.

To plan for a model that the planner does not support, a user can measure the times of the model's
pieces. A piece is the part between two cut points, at which the model can be divided among stages.
The measurements are a CSV file with a header, or a JSON list of objects with the same keys. Each
row describes a piece on a GPU with a microbatch size::

    cut_point,gpu,micro_batch,forward_s,backward_s,parameters,output_bytes,kept_bytes
    0,v100,4,0.0021,0.0043,31000000,2097152,8388608
    1,v100,4,0.0034,0.0069,12600000,2097152,14680064

``cut_point`` is the index of the piece in pipeline order, starting at 0. Sizes in bytes are for the
whole microbatch. ``backward_weight_s``, ``tp`` and ``kept_bytes`` are optional.
"""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.adaptive.config.input_files import read_json, read_text
from megatron.adaptive.config.schema_files import check_form, read_file
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cluster import LinkSpeed, known_gpu
from megatron.adaptive.planner.model_description import Model, Precision
from megatron.adaptive.planner.model_file import arguments_model
from megatron.adaptive.planner.profile import LayerTimes, Profile

FORMAT = 1
_SAME = 0.02
"""Maximum relative difference between parameter, element or FLOP counts that are treated as
equal."""


def load(path: Path) -> dict[str, Any]:
    """Reads and validates a profile file, or the profile that a plan file contains.

    Raises:
        ConfigError: The file cannot be read, or an entry is invalid.
    """
    content: dict[str, Any] = profile_of_plan(read_file(path, "profile"), str(path))
    check_form(content, "profile", str(path))
    return content


def profile_of_plan(content: Any, where: str) -> Any:
    """Returns the profile that ``plan --try`` has written into a plan file.

    Args:
        content: Contents of the file. If the file is not a plan file, its contents are returned
            unchanged.
        where: Path of the file, for error messages.

    Raises:
        ConfigError: The plan file does not contain measurements from ``--try``.
    """
    if not isinstance(content, dict) or "degrees" not in content:
        return content
    tried = content.get("tried")
    if not isinstance(tried, dict) or not isinstance(tried.get("profile"), dict):
        raise ConfigError(
            f"{where} is a plan that contains no measurements; measure a rank with "
            f'"plan --try {where}", or pass a profile'
        )
    return tried["profile"]


def load_all(paths: Sequence[Path]) -> dict[str, Any]:
    """Reads and merges the profile files ``paths``, which must all be for the same model."""
    return merge([(str(path), load(path)) for path in paths])


def write(content: Mapping[str, Any], path: Path) -> None:
    """Writes ``content`` to the profile file ``path``.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; choose another file") from error


def document(
    model: Mapping[str, Any],
    layers: Sequence[Mapping[str, Any]],
    *,
    made: str | None = None,
    nodes: Mapping[str, Mapping[str, Any]] | None = None,
    links: Sequence[Mapping[str, Any]] | None = None,
    all_reduce: Sequence[Mapping[str, Any]] | None = None,
    optimizer_s_per_parameter: Mapping[str, float] | None = None,
    step_s: Mapping[str, float] | None = None,
    action_sigma: float | None = None,
    launch_s: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Creates the contents of a profile file from measurements.

    Each argument is stored under a key of the same name. If an argument is ``None``, its key is
    omitted.

    Args:
        model: Name of the model, and its arguments or layers.
        layers: Rows with the times of layers, in seconds.
        made: Date and time of the measurement, from :func:`timestamp`.
        nodes: Properties of the measured nodes, keyed by node type.
        links: Rows with the latency and the bandwidths of links between GPUs.
        all_reduce: Rows with the latency and the bandwidths of all-reduces within a node.
        optimizer_s_per_parameter: Duration of the optimizer step in seconds per parameter, keyed by
            GPU.
        step_s: Time in seconds that each step spends outside of pipeline, reduction and optimizer,
            keyed by GPU.
        action_sigma: Standard deviation of the logarithm of an action's duration, or 0 if durations
            do not vary.
        launch_s: Time in seconds that each action spends outside of layers, keyed by GPU.

    Raises:
        ConfigError: An entry is invalid.
    """
    content: dict[str, Any] = {"format": FORMAT, "model": dict(model), "layers": list(layers)}
    measured = {
        "made": made,
        "nodes": nodes,
        "links": links,
        "all_reduce": all_reduce,
        "optimizer_s_per_parameter": optimizer_s_per_parameter,
        "step_s": step_s,
        "action_sigma": action_sigma,
        "launch_s": launch_s,
    }
    content |= {name: value for name, value in measured.items() if value is not None}
    check_form(content, "profile", "profile")
    return content


def timestamp() -> str:
    """Returns the current time as text in the format of the key ``made`` in profile files."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def cut_kind(number: int) -> str:
    """Returns the name of the layer kind for the piece with index ``number``."""
    return f"cut-{number}"


def merge(parts: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Merges profiles of the same model, for example profiles of nodes of different types.

    If several profiles contain the same measurement, the value of the last profile is used.
    However, an estimated value never replaces a measured value.

    Args:
        parts: Names and validated contents of the profile files.

    Raises:
        ConfigError: The profiles describe different models.
    """
    first_name, first = parts[0]
    if len(parts) == 1:
        return dict(first)
    keys: Mapping[str, Callable[[Any], Any]] = {
        "layers": lambda row: (row["kind"], row["gpu"], row["tp"], row["micro_batch"]),
        "links": lambda row: (*sorted(row["nodes"]), row["within"], row.get("pairs", 1)),
        "all_reduce": lambda row: (row["node"], row["ranks"]),
    }
    merged: dict[str, Any] = {"format": FORMAT, "model": first["model"]}
    for name, part in parts:
        if part["model"] != first["model"]:
            raise ConfigError(
                f"{name} describes model {part['model']['name']}, but {first_name} describes"
                f" {first['model']['name']}; merge profiles of one model, measured with equal"
                " arguments"
            )
        for key in ("optimizer_s_per_parameter", "launch_s", "step_s"):
            merged.setdefault(key, {}).update(part.get(key, {}))
        for node, facts in part.get("nodes", {}).items():
            merged.setdefault("nodes", {}).setdefault(node, {}).update(facts)
        for key, key_of in keys.items():
            rows = {key_of(row): row for row in merged.get(key, [])}
            for row in part.get(key, []):
                former = rows.get(key_of(row))
                if former is None or _is_measured(row) or not _is_measured(former):
                    rows[key_of(row)] = row
            merged[key] = list(rows.values())
    # All nodes wait for the node with the most variation, so its value is used for the whole job.
    merged["action_sigma"] = max(part.get("action_sigma", 0.0) for _, part in parts)
    return merged


def _is_measured(row: Mapping[str, Any]) -> bool:
    """Returns whether the times in ``row`` of a profile were measured, not estimated."""
    return bool(row.get("source", "measured") == "measured")


def make_profile(content: Mapping[str, Any]) -> Profile:
    """Creates a profile from ``content``, the contents of a profile file.

    Args:
        content: Contents of the file, validated by :func:`load`.

    Raises:
        ConfigError: Two rows describe the same layer, GPU, tensor-parallel size and microbatch
            size.
    """
    layers: dict[tuple[str, str, int, int], LayerTimes] = {}
    for index, row in enumerate(content["layers"]):
        key = kind, gpu, tp, size = row["kind"], _gpu(row["gpu"]), row["tp"], row["micro_batch"]
        if key in layers:
            raise ConfigError(
                f"profile: layers[{index}]: kind {kind} on {gpu} with tp {tp} and microbatch {size}"
                " occurs twice; keep one"
            )
        layers[key] = LayerTimes(
            forward_s=row["forward_s"],
            backward_input_s=row["backward_input_s"],
            backward_weight_s=row.get("backward_weight_s", 0.0),
            tp_included=row.get("tp_included", row["tp"] > 1),
            kept_bytes=row.get("kept_bytes"),
            source=row.get("source", "measured"),
        )
    links: dict[tuple[bool, str, str], dict[int, Mapping[str, Any]]] = {}
    for row in content.get("links", []):
        links.setdefault((row["within"], *row["nodes"]), {})[row.get("pairs", 1)] = row
    return Profile(
        layers=layers,
        model=content["model"]["name"],
        links={
            (node_type, other): _link(rows, shared=True)
            for (within, node_type, other), rows in links.items()
            if not within
        },
        intra_links={
            node_type: _link(rows, shared=False)
            for (within, node_type, _), rows in links.items()
            if within
        },
        all_reduce={
            (row["node"], row["ranks"]): _link({1: row}, shared=False)
            for row in content.get("all_reduce", [])
        },
        optimizer_s_per_parameter=_by_gpu(content.get("optimizer_s_per_parameter", {})),
        launch_s=_by_gpu(content.get("launch_s", {})),
        step_s=_by_gpu(content.get("step_s", {})),
        action_sigma=content.get("action_sigma", 0.0),
        context_bytes=of_nodes(content, "context_bytes"),
        allocator_share=of_nodes(content, "allocator_share"),
    )


def _gpu(name: str) -> str:
    """Returns how the table of GPUs spells ``name``, or ``name`` if the GPU is unknown."""
    listed = known_gpu(name)
    return name if listed is None else listed.name


def _by_gpu(values: Mapping[str, float]) -> dict[str, float]:
    """Returns a copy of ``values`` with its keys replaced by names from the table of GPUs."""
    return {_gpu(name): value for name, value in values.items()}


def _link(by_pairs: Mapping[int, Mapping[str, Any]], *, shared: bool) -> LinkSpeed:
    """Creates a link from bandwidths measured with different numbers of communicating GPU pairs.

    The rows contain the bandwidth of each pair, so the total bandwidth is ``pairs`` times as high.

    Args:
        by_pairs: Rows of a profile file, keyed by the number of pairs that sent at the same time.
        shared: Whether the pairs share the link's bandwidth.
    """
    links: list[tuple[int, LinkSpeed]] = []
    for pairs, row in sorted(by_pairs.items()):
        times = pairs if links else 1
        sizes = tuple((float(size), float(speed) * times) for size, speed in sorted(row["sizes"]))
        link = LinkSpeed(
            bytes_per_s=sizes[-1][1], latency_s=row["latency_s"], shared=shared, sizes=sizes
        )
        links.append((pairs, link))
    return replace(links[0][1], by_pairs=tuple(links[1:]))


def of_nodes(content: Mapping[str, Any], fact: str) -> dict[str, float]:
    """Returns a property of the nodes in a profile, keyed by GPU name.

    Args:
        content: Contents of a profile file.
        fact: Key of the property, such as ``memory_bytes``.
    """
    return {
        _gpu(node["gpu"]): float(node[fact])
        for node in content.get("nodes", {}).values()
        if "gpu" in node and fact in node
    }


def renamed(
    content: Mapping[str, Any], gpus: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """Replaces the node types in a profile with the names that a cluster uses for them.

    If a node type of the profile is not in the cluster, but exactly one type in the cluster has the
    same GPU, the name of the cluster's type is used. The planner ignores links and all-reduces that
    were measured on types missing in the cluster.

    Args:
        content: Contents of the profile file, validated by :func:`load`.
        gpus: Name of the GPU of each node type in the cluster.

    Returns:
        Updated contents, and the names of the node types that have links or all-reduces in the
        profile, but are missing in the cluster.
    """
    names: dict[str, str] = {}
    for name, facts in content.get("nodes", {}).items():
        same_gpu = [
            cluster_type
            for cluster_type, gpu in gpus.items()
            if gpu == _gpu(facts.get("gpu", name))
        ]
        names[name] = same_gpu[0] if name not in gpus and len(same_gpu) == 1 else name
    changed = dict(content)
    changed["links"] = [
        {**row, "nodes": [names.get(node_type, node_type) for node_type in row["nodes"]]}
        for row in content.get("links", [])
    ]
    changed["all_reduce"] = [
        {**row, "node": names.get(row["node"], row["node"])}
        for row in content.get("all_reduce", [])
    ]
    used = {node_type for row in changed["links"] for node_type in row["nodes"]}
    used |= {row["node"] for row in changed["all_reduce"]}
    return changed, sorted(used - set(gpus))


def profile_of_cut_points(path: Path, name: str, precision: str = "fp32") -> dict[str, Any]:
    """Reads a file with measurements of model pieces, and returns the contents of a profile file.

    Args:
        path: Path of the file. It is read as JSON if its name ends with ``.json``, otherwise as
            CSV.
        name: Name of the model.
        precision: Data type of the messages that are sent between pieces.

    Returns:
        Contents of a profile file, in which each piece is a layer of the model.

    Raises:
        ConfigError: The file cannot be read, or a row is invalid. The message contains the row
            number.
    """
    usual = {"tp": 1, "backward_weight_s": 0.0}
    rows = [
        {**usual, **check_form(row, "cut_point", f"{path}: row {number}")}
        for number, row in enumerate(_rows(path), start=1)
    ]
    if not rows:
        raise ConfigError(f"{path} has no measurements; add a row for each piece of the model")
    pieces: dict[int, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: -row["micro_batch"]):
        pieces.setdefault(row["cut_point"], row)
    if lost := sorted(set(range(len(pieces))) - set(pieces)):
        raise ConfigError(
            f"{path}: cut point {lost[0]} has no row; number cut points from 0 without gaps"
        )
    element_bytes = Precision.named(precision).element_bytes
    model_layers = [
        {
            "kind": cut_kind(number),
            "parameters": row["parameters"],
            "output_elements": row.get("output_bytes", 0.0) / row["micro_batch"] / element_bytes,
            "activation_bytes": row.get("kept_bytes", 0.0) / row["micro_batch"],
        }
        for number, row in sorted(pieces.items())
    ]
    copied = ("gpu", "tp", "micro_batch", "forward_s", "backward_weight_s", "kept_bytes")
    layers = [
        {
            "kind": cut_kind(row["cut_point"]),
            "backward_input_s": row["backward_s"],
            **{name: row[name] for name in copied if name in row},
        }
        for row in rows
    ]
    return document({"name": name, "precision": precision, "layers": model_layers}, layers)


def _rows(path: Path) -> list[Any]:
    """Reads the rows of the JSON or CSV file ``path``, and converts numbers in a CSV file."""
    hint = "pass a file with measurements for each cut point"
    if path.suffix.lower() == ".json":
        return list(read_json(path, hint))
    return [
        {name: text if name == "gpu" else _number(text) for name, text in row.items() if text}
        for row in csv.DictReader(io.StringIO(read_text(path, hint)))
    ]


def _number(text: Any) -> Any:
    """Converts ``text`` to an int or float if possible, otherwise returns it unchanged."""
    for kind in (int, float):
        with suppress(ValueError, TypeError):
            return kind(text)
    return text


def check_model(content: Mapping[str, Any], model: Model, where: str) -> None:
    """Checks that a profile was measured with ``model``, or with a model of equal sizes.

    Args:
        content: Contents of the profile file.
        model: Model to plan for.
        where: Name of the profile file, for error messages.

    Raises:
        ConfigError: The profile has no times for a kind of layer, or differs from ``model`` in a
            size or in the precision.
    """
    measured = content["model"]
    subject = f"{where} describes model {measured['name']}"
    advice = "profile the model that you plan for, or remove --profile"
    # The suffix after "/" is the number of ranks over which experts are distributed. The profile
    # may contain a different number, so the suffix is ignored.
    kinds = {row["kind"].partition("/")[0] for row in content["layers"]}
    missing = [kind for kind in model.kinds if kind.partition("/")[0] not in kinds]
    if missing:
        raise ConfigError(
            f"{subject} and has no times for layers of kind {missing[0]!r}, which {model.name}"
            f" contains; {advice}"
        )
    arguments = measured.get("arguments", ())
    if arguments:
        measured_model = arguments_model(
            arguments, measured["name"], model.precision.name, attention=model.attention
        )
        for name in dict.fromkeys(model.layers):
            kind = model.kinds[name]
            for field in ("parameters", "output_elements", "forward_flops"):
                measured_value = getattr(measured_model.kinds[name], field)
                value = getattr(kind, field)
                if not math.isclose(measured_value, value, rel_tol=_SAME):
                    raise ConfigError(
                        f"{subject}, whose {name} has {measured_value:,.0f}"
                        f" {field.replace('_', ' ')}, but the {name} of {model.name} has"
                        f" {value:,.0f}; {advice}"
                    )
        precision = precision_of(measured)
        if precision != model.precision.name:
            raise ConfigError(
                f"{where} was measured in {precision}, but {model.name} is planned in"
                f" {model.precision.name}; use --precision {precision}, or {advice}"
            )


def precision_of(model: Mapping[str, Any]) -> str:
    """Returns the name of the precision of ``model``, which is the entry ``model`` of a profile.

    The name is taken from the key ``precision`` if it exists, otherwise from the model's arguments.
    """
    arguments = model.get("arguments", ())
    named = next((name for name in ("fp16", "bf16") if f"--{name}" in arguments), "fp32")
    return str(model.get("precision", named))
