"""Reads ``feature_sets.txt``, the table of feature sets for :mod:`tests.soak.feature_sets`.

The first lines of the table describe its format.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

TABLE = Path(__file__).with_name("feature_sets.txt")
_SEPARATOR = re.compile(r"\s+\|(?=\s|$)")
"""Pattern of the bar between columns. The bars in a pipeline layout have no spaces around them."""
_RANKS = "--ranks"


@dataclass(frozen=True, kw_only=True)
class FeatureSet:
    """Row of the table of feature sets.

    Attributes:
        name: Name in the table.
        ranks: Number of ranks.
        flags: Flags of ``pretrain_gpt.py`` for both runs.
        engine_flags: Additional flags of the run that uses this project's engine.
    """

    name: str
    ranks: int
    flags: tuple[str, ...]
    engine_flags: tuple[str, ...]

    @property
    def own_flags(self) -> tuple[str, ...]:
        """Returns the flags that select the schedule of the reference run.

        The reference usually runs megatron-core's schedule. With ``--keyed-dropout``, that schedule
        would draw different random numbers, so the reference is an interleaved schedule of this
        project's engine.
        """
        if "--keyed-dropout" in self.engine_flags:
            return ("--pipeline-schedule", "interleaved", *self.engine_flags)
        return ("--pipeline-schedule", "megatron")

    @property
    def is_v(self) -> bool:
        """Returns whether the first rank has both the first and the last stage (a V placement).

        A rank then holds different layers than in the reference run, so the terms of a norm are
        summed in a different order.
        """
        return "--first-weights" in self.flags


def read_rows(text: str) -> list[list[list[str]]]:
    """Returns the columns of each row of a table of flags, each column as a list of words.

    Empty lines and lines that begin with ``#`` are skipped. The word ``{name}`` is replaced by the
    words of the line ``{name} = ...``.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    short = dict(line.split(" = ", 1) for line in lines if line.startswith("{"))
    return [
        [
            [flag for item in column.split() for flag in short.get(item, item).split()]
            for column in _SEPARATOR.split(line)
        ]
        for line in lines
        if not line.startswith("{")
    ]


def split_ranks(items: Sequence[str]) -> tuple[int, tuple[str, ...]]:
    """Returns the number of ranks that ``items`` require, and the flags without ``--ranks``."""
    ranks, flags = 2, list[str]()
    remaining = iter(items)
    for word in remaining:
        if word == _RANKS:
            ranks = int(next(remaining))
        else:
            flags.append(word)
    for flag, size in pairwise(flags):
        if flag == "--pipeline-model-parallel-size":
            ranks = max(ranks, int(size))
    return ranks, tuple(flags)


def _feature_set(name: str, both: list[str], of_engine: Sequence[str] = ()) -> FeatureSet:
    ranks, flags = split_ranks(both)
    return FeatureSet(name=name, ranks=ranks, flags=flags, engine_flags=tuple(of_engine))


def _read(text: str) -> dict[str, FeatureSet]:
    sets = [_feature_set(name, *columns) for (name,), *columns in read_rows(text)]
    return {feature_set.name: feature_set for feature_set in sets}


SETS = _read(TABLE.read_text(encoding="utf-8"))
