"""Reads the files of published data sets, and holds the runs in them."""

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
    """A measured run, with all that is needed to predict it; its profile was measured apart.

    Attributes:
        plan: what ran where.
        seconds: of one step; None where only memory counts.
        peak_bytes: on the fullest GPU; None where unknown.
        runtime: behaviour of the training program.
    """

    plan: Plan
    seconds: float | None
    peak_bytes: float | None = None
    runtime: Runtime = OURS

    def predicted(self) -> Prediction:
        """Predicts it."""
        return predict(self.plan, self, self.runtime)


def read_csv(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a CSV file by column; raises as :func:`_read`."""
    return _read(path, lambda file: list(csv.DictReader(file)))


def read_json(path: Path) -> Any:
    """Returns what a JSON file holds; raises as :func:`_read`."""
    return _read(path, json.load)


def _read(path: Path, parse: Callable[[TextIO], Any]) -> Any:
    """Returns what a file holds.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return parse(file)
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}): give the folder of the data set"
        ) from error


def part(document: Any, keys: Sequence[str], folder: Path) -> Any:
    """Returns what lies under keys of a JSON document.

    Raises:
        ConfigError: a key is missing.
    """
    for at, key in enumerate(keys):
        if not isinstance(document, dict) or key not in document:
            raise ConfigError(
                f"{folder}: no {'.'.join(keys[: at + 1])} in its JSON files: see the forms of data"
                " sets in docs/reference/planner.md"
            )
        document = document[key]
    return document
