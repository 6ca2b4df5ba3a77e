"""What the lines of a job's logs mean; whole files and ends of files. Knows nothing of Slurm.

Files may be large, missing, or cut off anywhere, and a job that was queued again appends to them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

__all__ = [
    "EFFECTIVE_NAMES",
    "ENDED",
    "IterationLine",
    "count_messages",
    "differences",
    "effective_of",
    "head",
    "is_error",
    "is_warning",
    "iteration_of",
    "lines_of",
    "node_names",
    "read_record",
    "samples_of",
    "tail",
]

TAIL_BYTES = 1 << 16
ENDED = "ended"
"""Key of a node's last sample: it ended in good order and did not vanish."""

_START = re.compile(r"=== .* node \d+ starts$|job \d+, start \d+: ")
_ITERATION = re.compile(
    r"^ \[([\d :-]{19})\] iteration +(\d+)/ *(\d+) .*?per iteration \(ms\): ([\d.]+)"
)
_LOSS = re.compile(r"\| [\w ]*loss: ([-+\d.eE]+|nan|inf) ")
_TOKENS = re.compile(r"tokens/s/rank: ([\d.]+)")
_BATCH = re.compile(r"global batch size: +(\d+)")
_SIZES = re.compile(
    r"using world size: (\d+), data-parallel-size: (\d+), tensor-model-parallel size: (\d+), "
    r"pipeline-model-parallel size: (\d+)"
)
EFFECTIVE_NAMES = ("WORLD_SIZE", "DP_SIZE", "TENSOR_MP_SIZE", "PIPELINE_MP_SIZE")
_ERROR = re.compile(r"^error: |^\w*(Error|Exception)\b|: error: |out of memory|Traceback")
_WARNING = re.compile(r"warning", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class IterationLine:
    """A line about an iteration.

    Attributes:
        unix_s: when it was written.
        iteration: its number.
        iterations: of the whole training.
        ms: time of the iteration.
        loss: the main loss, ``None`` where the line has none.
        tokens_per_s: of one rank, ``None`` where the line does not say it.
        batch: samples of the iteration over all ranks.
    """

    unix_s: float
    iteration: int
    iterations: int
    ms: float
    loss: float | None
    tokens_per_s: float | None
    batch: int | None


def iteration_of(line: str) -> IterationLine | None:
    """Read a line about an iteration; ``None`` for any other."""
    match = _ITERATION.match(line)
    if match is None:
        return None
    loss, tokens, batch = _LOSS.search(line), _TOKENS.search(line), _BATCH.search(line)
    try:
        return IterationLine(
            unix_s=datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S").timestamp(),
            iteration=int(match[2]),
            iterations=int(match[3]),
            ms=float(match[4]),
            loss=float(loss[1]) if loss else None,
            tokens_per_s=float(tokens[1]) if tokens else None,
            batch=int(batch[1]) if batch else None,
        )
    except ValueError:
        return None  # cut off


def effective_of(text: str) -> dict[str, str]:
    """Return the sizes that rank 0 says at its start, by variable; empty if it does not."""
    match = _SIZES.search(text)
    return {} if match is None else dict(zip(EFFECTIVE_NAMES, match.groups(), strict=True))


def differences(
    requested: Mapping[str, str], effective: Mapping[str, str]
) -> tuple[tuple[str, str, str], ...]:
    """Return name, requested and effective value of what is not as it was asked for.

    Args:
        requested: variables of ``conf.sh``, and ``WORLD_SIZE``.
        effective: what the run says of itself.
    """
    grows = "--rampup-batch-size" in requested.get("TRAINER_FLAGS", "")
    return tuple(
        (name, requested[name], value)
        for name, value in effective.items()
        if requested.get(name)
        and requested[name] != value
        and not (grows and name == "GLOBAL_BATCH_SIZE")
    )


def is_error(line: str) -> bool:
    """Whether a line tells an error."""
    return _ERROR.search(line) is not None


def is_warning(line: str) -> bool:
    """Whether a line tells a warning."""
    return _WARNING.search(line) is not None and not is_error(line)


def node_names(folder: Path) -> list[str]:
    """Return the nodes that have files in a job's folder."""
    return sorted({path.stem for path in folder.glob("*.out")})


def read_record(folder: Path) -> dict[str, Any]:
    """Return what ``run.json`` of a job says, empty where it is missing or cut off."""
    try:
        told = json.loads((folder / "run.json").read_text())
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def tail(path: Path, size: int = TAIL_BYTES) -> list[str]:
    """Return the last lines of a file, of its latest start only."""
    try:
        with path.open("rb") as file:
            length = file.seek(0, 2)
            file.seek(max(0, length - size))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = text.splitlines()
    if length > size:
        lines = lines[1:]
    starts = [index for index, line in enumerate(lines) if _START.match(line)]
    return lines[starts[-1] + 1 :] if starts else lines


def head(path: Path) -> str:
    """Return the first 16 KiB of a file."""
    try:
        with path.open("rb") as file:
            return file.read(1 << 14).decode(errors="replace")
    except OSError:
        return ""


def lines_of(path: Path) -> Iterator[str]:
    """Yield all lines of a file, none if it is missing."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                yield line.rstrip("\n")
    except OSError:
        return


def samples_of(path: Path, latest: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the samples of a node's use, or the latest alone; skips lines that are cut off."""
    lines: Iterator[str] = iter(reversed(tail(path))) if latest else lines_of(path)
    for line in lines:
        try:
            sample = json.loads(line)
        except ValueError:
            continue
        if isinstance(sample, dict) and isinstance(sample.get("unix_s"), (int, float)):
            yield sample
            if latest:
                return


def count_messages(folder: Path, name: str) -> tuple[Counter[str], Counter[str]]:
    """Return the errors and warnings in a node's files, with how often each occurs."""
    errors: Counter[str] = Counter()
    warnings: Counter[str] = Counter()
    for ending in ("err", "out"):
        for line in lines_of(folder / f"{name}.{ending}"):
            if is_error(line):
                errors[line.strip()] += 1
            elif is_warning(line):
                warnings[line.strip()] += 1
    return errors, warnings
