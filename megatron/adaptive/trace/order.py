"""The text form of a trace, ``trace_pipeline_<p>_model_chunks_<c>.txt``, written and read.

It is the form that OpenSQZ/MegatronApp's ``process_trace.py`` reads, one record a line::

    rank 0 iteration starts at timestamp 12.500000% iteration 7
    0, 3, forward start, 12.500000%
    0, 3, forward finished, 14.100000%
    rank 0 iteration ends at timestamp 60.000000% iteration 7

Times are milliseconds and end in a percent sign. The first number of an action is the pipeline
rank (in files of that project: the global rank, of which every (world / p)-th is taken), the
second packs chunk and microbatch in the order of the interleaved schedule with p ranks and c
chunks::

    number = (microbatch // p) * (p * c)  +  k * p  +  microbatch % p
    k = chunk for forward,  c - 1 - chunk for backward and weight

Iterations follow each other without the pause that lay between them.
What this module adds is invisible to that program: ``#`` lines with the names, and the
iteration's number behind a marker. ``weight start`` / ``weight finished`` carry W. Waits, bytes
and memory do not fit this form; take the JSON lines for them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.event import Span, TraceHeader
from megatron.adaptive.trace.files import replaced
from megatron.adaptive.trace.read import RankTrace, RunTrace
from megatron.adaptive.trace.step import PipelineStep, pipeline_step

__all__ = ["legacy_name", "legacy_shape", "read_legacy", "write_legacy"]

KEPT_ITERATIONS = 20
"""Iterations that a text file holds unless one is asked for: as many as the program that the
form comes from looks at."""

NS_PER_MS = 1_000_000

_WORDS = {"F": "forward", "B": "backward", "W": "weight"}
_ACTIONS = {word: action for action, word in _WORDS.items()}
_NAME = re.compile(r"trace_pipeline_(\d+)_model_chunks_(\d+)")
_ACTION_LINE = re.compile(r"(\d+), (\d+), (forward|backward|weight) (start|finished), (\d+\.\d+)%")
_MARKER = re.compile(
    r"rank (\d+) iteration (starts|ends) at timestamp (\d+\.\d+)%(?: iteration (\d+))?"
)
_NOTE = re.compile(r"# (run|schedule|placement) (.+)")


def legacy_name(num_ranks: int, num_chunks: int) -> str:
    """The file name without its ending, ``trace_pipeline_2_model_chunks_2``."""
    return f"trace_pipeline_{num_ranks}_model_chunks_{num_chunks}"


def legacy_shape(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Pipeline ranks and chunks from a file name; ``None`` if it is not named so."""
    match = _NAME.fullmatch(Path(path).stem)
    if not match or int(match[1]) < 1 or int(match[2]) < 1:
        return None
    return int(match[1]), int(match[2])


def write_legacy(
    run: RunTrace,
    path: str | os.PathLike[str],
    iteration: int | None = None,
    *,
    dp_rank: int = 0,
) -> None:
    """Write iterations of a pipeline in the text form, replacing the file.

    Args:
        run: the run.
        path: where; :func:`legacy_name` gives the usual name.
        iteration: only this one; by default the last 20 complete ones (the last one, where none
            is complete).
        dp_rank: which data-parallel replica.

    Raises:
        TraceError: there is no such iteration, or the file cannot be written.
    """
    if iteration is not None:
        chosen: tuple[int, ...] = (iteration,)
    else:
        chosen = run.complete_iterations(dp_rank)[-KEPT_ITERATIONS:] or run.iterations[-1:]
    steps = [pipeline_step(run, number, dp_rank=dp_rank) for number in chosen]
    if not steps:
        raise TraceError(f"{run.origin} holds no iteration; the run ended before its first one")
    with replaced(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for name, value in (
            ("run", run.run),
            ("schedule", steps[0].schedule),
            ("placement", steps[0].placement),
        ):
            file.write(f"# {name} {value}\n")
        start_ns = 0
        for step in steps:
            file.writelines(line + "\n" for line in _step_lines(step, start_ns))
            start_ns += step.step_ns


def read_legacy(
    path: str | os.PathLike[str], num_ranks: int | None = None, num_chunks: int | None = None
) -> RunTrace:
    """Read a file in the text form, ours or one of OpenSQZ/MegatronApp.

    Args:
        path: the file.
        num_ranks: pipeline ranks; from the file's name by default.
        num_chunks: chunks per rank; from the file's name by default.

    Returns:
        A run with one rank trace per pipeline rank. Lines of other kinds are skipped; an action
        that never finished counts as a truncated line.

    Raises:
        TraceError: the file cannot be read, holds no action, or the shape is neither given nor in
            the name.
    """
    path = Path(path)
    named = legacy_shape(path)
    if num_ranks is None or num_chunks is None:
        if named is None:
            raise TraceError(
                f"{path} does not say its shape; name it trace_pipeline_<p>_model_chunks_<c>.txt "
                "or give --pipeline_parallel and --model_chunks"
            )
        num_ranks, num_chunks = num_ranks or named[0], num_chunks or named[1]
    reader = _Reader(num_ranks, num_chunks)
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                reader.line(line)
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from error
    return reader.result(path)


def _step_lines(step: PipelineStep, start_ns: int) -> Iterator[str]:
    for rank, row in enumerate(step.rows):
        if not row:
            continue
        suffix = f"% iteration {step.iteration}"
        yield f"rank {rank} iteration starts at timestamp {_ms(start_ns + row[0].start_ns)}{suffix}"
        for span in row:
            packed = _pack(
                span.action, span.chunk, span.microbatch, step.num_ranks, step.num_chunks
            )
            prefix = f"{rank}, {packed}, {_WORDS[span.action]}"
            yield f"{prefix} start, {_ms(start_ns + span.start_ns)}%"
            yield f"{prefix} finished, {_ms(start_ns + span.end_ns)}%"
        end_ns = max(span.end_ns for span in row)
        yield f"rank {rank} iteration ends at timestamp {_ms(start_ns + end_ns)}{suffix}"


def _ms(time_ns: int) -> str:
    return f"{time_ns // NS_PER_MS}.{time_ns % NS_PER_MS:06d}"


def _ns(milliseconds: str) -> int:
    whole, _, part = milliseconds.partition(".")
    return int(whole) * NS_PER_MS + int(part[:6].ljust(6, "0"))


def _pack(action: str, chunk: int, microbatch: int, num_ranks: int, num_chunks: int) -> int:
    turn = chunk if action == "F" else num_chunks - 1 - chunk
    group, place = divmod(microbatch, num_ranks)
    return group * num_ranks * num_chunks + turn * num_ranks + place


def _unpack(action: str, packed: int, num_ranks: int, num_chunks: int) -> tuple[int, int]:
    group, rest = divmod(packed, num_ranks * num_chunks)
    turn, place = divmod(rest, num_ranks)
    chunk = turn if action == "F" else num_chunks - 1 - turn
    return chunk, group * num_ranks + place


@dataclass
class _RankState:
    """Tracks the reader's position in one rank's lines."""

    iteration: int = 0
    marked: bool = False
    begun: dict[tuple[str, int], int] = field(default_factory=dict)
    done: set[tuple[str, int]] = field(default_factory=set)
    spans: dict[int, list[Span]] = field(default_factory=dict)


class _Reader:
    """Turns lines into rank traces. Without markers, an action seen again starts an iteration."""

    def __init__(self, num_ranks: int, num_chunks: int) -> None:
        self._num_ranks = num_ranks
        self._num_chunks = num_chunks
        self._ranks: dict[int, _RankState] = {}
        self._notes = {"run": "text", "schedule": "unknown", "placement": "loop"}

    def line(self, line: str) -> None:
        """Take one line; several records may stand on it."""
        if note := _NOTE.match(line):
            self._notes[note[1]] = note[2]
            return
        for match in _MARKER.finditer(line):
            if match[2] == "starts":
                state = self._ranks.setdefault(int(match[1]), _RankState())
                state.marked = True
                self._next_iteration(state, int(match[4]) if match[4] else state.iteration + 1)
        for match in _ACTION_LINE.finditer(line):
            self._action(match)

    def _action(self, match: re.Match[str]) -> None:
        state = self._ranks.setdefault(int(match[1]), _RankState())
        key = (_ACTIONS[match[3]], int(match[2]))
        if match[4] == "start":
            if state.iteration == 0 or (not state.marked and key in state.done):
                self._next_iteration(state, state.iteration + 1)
            state.begun[key] = _ns(match[5])
            return
        start = state.begun.pop(key, None)
        if start is None:
            return
        state.done.add(key)
        action, packed = key
        chunk, microbatch = _unpack(action, packed, self._num_ranks, self._num_chunks)
        span = Span(action, chunk, microbatch, start, _ns(match[5]), state.iteration)
        state.spans.setdefault(state.iteration, []).append(span)

    @staticmethod
    def _next_iteration(state: _RankState, iteration: int) -> None:
        state.iteration = iteration
        state.done.clear()

    def result(self, path: Path) -> RunTrace:
        """Returns the run that the lines describe."""
        if not any(state.spans for state in self._ranks.values()):
            raise TraceError(
                f"{path} holds no action; expected lines such as '0, 3, forward start, 12.500000%'"
            )
        world_size = max(max(self._ranks) + 1, self._num_ranks)
        replicas = world_size // self._num_ranks
        if world_size % self._num_ranks:
            raise TraceError(
                f"{path} names ranks 0..{world_size - 1}, not a multiple of "
                f"{self._num_ranks} pipeline ranks; give another --pipeline_parallel"
            )
        traces = {
            rank: self._rank_trace(path, rank, world_size, replicas, state)
            for rank, state in sorted(self._ranks.items())
        }
        return RunTrace(
            path, self._notes["run"], world_size, self._num_ranks, self._num_chunks, traces
        )

    def _rank_trace(
        self, path: Path, rank: int, world_size: int, replicas: int, state: _RankState
    ) -> RankTrace:
        counts = {i: 1 + max(span.microbatch for span in s) for i, s in state.spans.items()}
        header = TraceHeader(
            run=self._notes["run"],
            rank=rank,
            world_size=world_size,
            pp_rank=rank // replicas,
            dp_rank=rank % replicas,
            num_ranks=self._num_ranks,
            num_chunks=self._num_chunks,
            num_microbatches=max(counts.values(), default=0),
            placement=self._notes["placement"],
            schedule=self._notes["schedule"],
            host="",
            pid=0,
            monotonic_ns=0,
            unix_ns=0,
            clock="",
        )
        return RankTrace.of_spans(path, header, state.spans, counts, len(state.begun))
