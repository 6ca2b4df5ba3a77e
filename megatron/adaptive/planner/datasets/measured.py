"""A measured run beside all that is needed to predict it."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cluster import Cluster
from megatron.adaptive.planner.model import Model
from megatron.adaptive.planner.plan import Plan
from megatron.adaptive.planner.profile import Profile
from megatron.adaptive.planner.runtime import Runtime

__all__ = ["Measured", "read_csv", "read_json"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A run that somebody measured.

    Attributes:
        name: of the run within its set.
        plan: what ran where.
        model: its layers.
        cluster: the nodes and links.
        profile: durations, measured apart from the run.
        runtime: how the training program behaves.
        seconds: of one step; None where only memory counts.
        peak_bytes: on the fullest GPU; None where unknown.
        doubt: why a figure is left out; empty for none.
    """

    name: str
    plan: Plan
    model: Model
    cluster: Cluster
    profile: Profile
    runtime: Runtime
    seconds: float | None
    peak_bytes: float | None = None
    doubt: str = ""


def read_csv(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file by column.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}): give the folder of the data set"
        ) from error


def read_json(path: Path) -> Any:
    """Contents of a JSON file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}): give the folder of the data set"
        ) from error
