"""Profiles of plain modules, measured from one cut point to the next.

Who trains a model of his own through a pipeline knows where it can be cut, and can time the pieces
between two cut points. Such measurements come as CSV with a header, or as a JSON list of objects
with the same keys, a row for each piece, GPU and microbatch size::

    cut_point,gpu,micro_batch,forward_s,backward_s,parameters,output_bytes,kept_bytes
    0,v100,4,0.0021,0.0043,31000000,2097152,8388608
    1,v100,4,0.0034,0.0069,12600000,2097152,14680064

``cut_point`` numbers the pieces in pipeline order from 0; bytes are those of the whole microbatch.
``backward_weight_s``, ``tp`` and ``kept_bytes`` may be left out.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.profile_file import FORMAT

__all__ = ["profile_of_cut_points"]

_NEEDED = ("cut_point", "gpu", "micro_batch", "forward_s", "backward_s", "parameters")
_KNOWN = (*_NEEDED, "output_bytes", "kept_bytes", "backward_weight_s", "tp")
_ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


def profile_of_cut_points(path: Path, name: str, precision: str = "fp32") -> dict[str, Any]:
    """Read measurements per cut point.

    Args:
        path: CSV, or JSON by the ending of its name.
        name: of the model.
        precision: type of what goes from piece to piece.

    Returns:
        What a profile file holds, the model's layers included.

    Raises:
        ConfigError: the file cannot be read, or a row breaks a rule; names the row.
    """
    rows = [_numbers(row, f"{path}: row {at}") for at, row in enumerate(_rows(path), start=1)]
    if not rows:
        raise ConfigError(f"{path}: no measurements: give a row for each piece of the model")
    count = 1 + max(int(row["cut_point"]) for row in rows)
    found = {int(row["cut_point"]) for row in rows}
    if found != set(range(count)):
        lost = min(set(range(count)) - found)
        raise ConfigError(f"{path}: cut point {lost} has no row: number them from 0 without gaps")
    layers, pieces = [], []
    for row in rows:
        entry = {
            "kind": f"cut-{int(row['cut_point'])}",
            "gpu": row["gpu"],
            "tp": int(row.get("tp", 1)),
            "micro_batch": int(row["micro_batch"]),
            "forward_s": row["forward_s"],
            "backward_input_s": row["backward_s"],
            "backward_weight_s": row.get("backward_weight_s", 0.0),
        }
        if "kept_bytes" in row:
            entry["kept_bytes"] = row["kept_bytes"]
        layers.append(entry)
    for number in range(count):
        its = [row for row in rows if int(row["cut_point"]) == number]
        pieces.append(_piece(number, its, _ELEMENT_BYTES[precision]))
    return {
        "format": FORMAT,
        "model": {"name": name, "precision": precision, "layers": pieces},
        "layers": layers,
    }


def _piece(number: int, rows: Sequence[Mapping[str, Any]], element_bytes: int) -> dict[str, Any]:
    """Sizes of one piece, of one sample."""
    row = max(rows, key=lambda one: one["micro_batch"])
    samples = row["micro_batch"]
    return {
        "kind": f"cut-{number}",
        "parameters": row["parameters"],
        "output_elements": row.get("output_bytes", 0.0) / samples / element_bytes,
        "activation_bytes": row.get("kept_bytes", 0.0) / samples,
    }


def _rows(path: Path) -> list[Mapping[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ConfigError(f"{path}: {why}; name a file of measurements per cut point") from error
    if path.suffix.lower() != ".json":
        return list(csv.DictReader(io.StringIO(text)))
    try:
        told = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: no JSON: {error}") from error
    if not isinstance(told, list) or not all(isinstance(row, dict) for row in told):
        raise ConfigError(f"{path}: it must be a list of objects, one for each measurement")
    return told


def _numbers(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    for key in row:
        if key not in _KNOWN:
            raise ConfigError(f"{where}: {key!r} is not known: columns are {', '.join(_KNOWN)}")
    told: dict[str, Any] = {}
    for key in _KNOWN:
        text = row.get(key)
        if text is None or text == "":
            if key in _NEEDED:
                raise ConfigError(f"{where}: {key} is missing: needed are {', '.join(_NEEDED)}")
            continue
        if key == "gpu":
            told[key] = str(text)
            continue
        whole = key in ("cut_point", "micro_batch", "tp")
        least = 1 if key in ("micro_batch", "tp") else 0
        try:
            value = float(text)
        except (TypeError, ValueError):
            value = -1.0
        if not least <= value < float("inf") or (whole and value != int(value)):
            rule = f"a whole number from {least} on" if whole else "a number, not negative"
            raise ConfigError(f"{where}: {key} is {text!r}: it must be {rule}")
        told[key] = value
    return told
