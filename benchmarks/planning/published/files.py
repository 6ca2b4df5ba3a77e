"""Reads the files of published data sets."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.adaptive.errors import ConfigError


def read_csv(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a CSV file by column.

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
    """Returns what a JSON file holds.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
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
                " sets in docs/planner.md"
            )
        document = document[key]
    return document
