"""Reads ``feature_sets.txt``, the table of feature sets for :mod:`tests.soak.feature_sets`.

The first lines of the table describe its format.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

TABLE = Path(__file__).with_name("feature_sets.txt")
_SEPARATOR = re.compile(r"\s+\|(?=\s|$)")
"""Pattern of the column separator. The bars of a layout have no spaces around them."""
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

        The default is the schedule of megatron-core.

        With ``--keyed-dropout``, megatron-core's schedule would draw different random numbers, so
        the reference is another schedule of this project's engine.
        """
        if "--keyed-dropout" in self.engine_flags:
            return ("--pipeline-schedule", "interleaved", *self.engine_flags)
        return ("--pipeline-schedule", "megatron")

    @property
    def is_v(self) -> bool:
        """Returns whether the stages form a V, so that each rank sums different terms of a norm."""
        return "--first-weights" in self.flags


def _feature_set(line: str, short: dict[str, str]) -> FeatureSet:
    name, both, *of_engine = _SEPARATOR.split(line)
    ranks, flags = 2, list[str]()
    expanded = iter([flag for word in both.split() for flag in _expanded(word, short)])
    for word in expanded:
        if word == _RANKS:
            ranks = int(next(expanded))
        else:
            flags.append(word)
    for flag, size in pairwise(flags):
        if flag == "--pipeline-model-parallel-size":
            ranks = max(ranks, int(size))
    return FeatureSet(
        name=name.strip(),
        ranks=ranks,
        flags=tuple(flags),
        engine_flags=tuple(" ".join(of_engine).split()),
    )


def _expanded(word: str, short: dict[str, str]) -> list[str]:
    if not word.startswith("{"):
        return [word]
    return short[word].split()


def _read(text: str) -> dict[str, FeatureSet]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    short = dict(line.split(" = ", 1) for line in lines if line.startswith("{"))
    sets = [_feature_set(line, short) for line in lines if not line.startswith("{")]
    return {feature_set.name: feature_set for feature_set in sets}


SETS = _read(TABLE.read_text(encoding="utf-8"))
