"""Reads published data sets, and defines the runs whose measurements they contain."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cost import predict
from megatron.adaptive.planner.layer_costs import OURS, Runtime
from megatron.adaptive.planner.plan import Plan, Prediction
from megatron.adaptive.planner.profile import PlanInputs


@dataclass(frozen=True, kw_only=True)
class MeasuredRun(PlanInputs):
    """Measured run with the inputs for its prediction. The profile was measured separately.

    Attributes:
        plan: Plan of the run.
        seconds: Measured step time in seconds, or ``None`` if only the memory is known.
        peak_bytes: Maximum memory of a GPU in bytes, or ``None`` if it is unknown.
        runtime: Properties of the training program that affect predictions.
    """

    plan: Plan
    seconds: float | None
    peak_bytes: float | None = None
    runtime: Runtime = OURS

    def predicted(self) -> Prediction:
        """Returns the prediction of this run's step time and memory."""
        return predict(self.plan, self, self.runtime)


def read_csv(path: Path) -> list[dict[str, str]]:
    """Returns the rows of the CSV file ``path`` as dictionaries. Raises the errors of ``_read``."""
    return _read(path, lambda file: list(csv.DictReader(file)))


def read_json(path: Path) -> Any:
    """Returns the content of the JSON file ``path``. Raises the errors of :func:`_read`."""
    return _read(path, json.load)


def _read(path: Path, parse: Callable[[TextIO], Any]) -> Any:
    """Opens the file ``path``, and returns the value that ``parse`` reads from it.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return parse(file)
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}); pass the folder of the data set"
        ) from error


def part(document: Any, keys: Sequence[str], folder: Path) -> Any:
    """Returns the value in the JSON document ``document`` to which the sequence ``keys`` leads.

    Raises:
        ConfigError: A key is missing. The message names the folder ``folder``.
    """
    for at, key in enumerate(keys):
        if not isinstance(document, dict) or key not in document:
            raise ConfigError(
                f"{folder}: the JSON files do not contain the key {'.'.join(keys[: at + 1])};"
                " docs/reference/planner.md describes the formats of data sets"
            )
        document = document[key]
    return document
