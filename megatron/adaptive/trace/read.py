"""Reads the trace files of a run back.

A folder holds one file per rank. Each file is a sequence of segments, one per start of the
process, because a resumed run goes on in the same files; an iteration that was done again after a
restart replaces its first form. Files may end in the middle of a line if the run was killed: that
line is dropped and counted. Every other irregularity is refused by name.

Clocks: spans carry the monotonic clock of their host. Ranks of one host (and one boot of it) share
that clock and are left alone. Where a folder holds several, each is moved onto unix time by the
pair of readings in its header, so it is as good as the hosts' clocks agree.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.event import (
    DRAWN_ACTIONS,
    IterationStart,
    Span,
    TraceHeader,
    parse_line,
)

__all__ = ["RankTrace", "RunTrace", "describe_numbers", "read_run", "trace_files"]

SAME_BOOT_NS = 2_000_000_000
"""Two headers of one host belong to one boot if unix minus monotonic differs by less than this;
less than any reboot takes, more than a running clock is usually corrected by."""

_FILE_NAME = re.compile(r"trace_rank_(\d{5,})\.jsonl")


@dataclass(frozen=True)
class RankTrace:
    """What one rank wrote.

    Attributes:
        header: the last header of the file.
        spans: spans by iteration, in the order written, all kinds.
        num_microbatches: microbatches by iteration.
        truncated_lines: lines lost at the end of the file, 0 or 1.
    """

    header: TraceHeader
    spans: Mapping[int, tuple[Span, ...]]
    num_microbatches: Mapping[int, int]
    truncated_lines: int = 0


@dataclass(frozen=True)
class RunTrace:
    """The traces of all ranks of a run, on one clock.

    Attributes:
        origin: folder or file it was read from.
        run: id of the run.
        world_size: number of processes.
        num_ranks: pipeline ranks.
        num_chunks: chunks per rank.
        ranks: the rank traces by global rank.
    """

    origin: Path
    run: str
    world_size: int
    num_ranks: int
    num_chunks: int
    ranks: Mapping[int, RankTrace]

    @cached_property
    def missing_ranks(self) -> tuple[int, ...]:
        """Global ranks of the world without a file."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.ranks)

    @cached_property
    def truncated_lines(self) -> int:
        """Lines lost at file ends, over all ranks."""
        return sum(trace.truncated_lines for trace in self.ranks.values())

    @cached_property
    def iterations(self) -> tuple[int, ...]:
        """Every iteration that some rank recorded, ascending."""
        return tuple(sorted({i for trace in self.ranks.values() for i in trace.spans}))

    def replica(self, dp_rank: int = 0, tp_rank: int = 0) -> tuple[RankTrace | None, ...]:
        """The traces of one pipeline, indexed by pipeline rank; ``None`` where there is no file.

        Raises:
            TraceError: no rank has these positions.
        """
        found: dict[int, RankTrace] = {}
        for trace in self.ranks.values():
            if (trace.header.dp_rank, trace.header.tp_rank) == (dp_rank, tp_rank):
                found.setdefault(trace.header.pp_rank, trace)
        if not found:
            have = sorted({trace.header.dp_rank for trace in self.ranks.values()})
            raise TraceError(
                f"no trace of data-parallel rank {dp_rank} (tensor-parallel rank {tp_rank}) in "
                f"{self.origin}; it has data-parallel ranks {describe_numbers(have)}"
            )
        return tuple(found.get(pp_rank) for pp_rank in range(self.num_ranks))

    def complete_iterations(self, dp_rank: int = 0) -> tuple[int, ...]:
        """Iterations in which each present rank of a pipeline did every F and every B."""
        present = [trace for trace in self.replica(dp_rank) if trace is not None]
        return tuple(i for i in self.iterations if all(_is_complete(t, i) for t in present))


def trace_files(folder: Path) -> dict[int, Path]:
    """The trace files directly in a folder, by rank; empty if the folder has none."""
    if not folder.is_dir():
        return {}
    matches = ((_FILE_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return {int(match[1]): path for match, path in sorted(matches, key=_by_name) if match}


def read_run(folder: str | os.PathLike[str]) -> RunTrace:
    """Read every trace file of a folder.

    Raises:
        TraceError: the folder is missing or holds no trace, a file is damaged or of a newer
            version, or the files belong to several runs or shapes.
    """
    folder = Path(folder)
    files = trace_files(folder)
    if not files:
        state = "holds no trace_rank_*.jsonl file" if folder.is_dir() else "does not exist"
        raise TraceError(f"{folder} {state}; give the folder into which the run wrote its traces")
    contents = [content for rank, path in files.items() if (content := _read_file(rank, path))]
    if not contents:
        raise TraceError(f"the trace files in {folder} are empty; the run wrote nothing")
    _check_one_run(folder, contents)
    offsets = _clock_offsets([s.header for content in contents for s in content.segments])
    traces = {content.rank: _assemble(content, offsets) for content in contents}
    first = contents[0].header
    return RunTrace(
        origin=folder,
        run=first.run,
        world_size=first.world_size,
        num_ranks=first.num_ranks,
        num_chunks=first.num_chunks,
        ranks=traces,
    )


def describe_numbers(numbers: Iterable[int]) -> str:
    """Numbers as ranges, ``1-20, 30``; long lists end in dots; ``none`` for nothing."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    limit = 8
    words = [str(a) if a == b else f"{a}-{b}" for a, b in ranges[:limit]]
    if len(ranges) > limit:
        words.append(f"... up to {ranges[-1][1]}")
    return ", ".join(words) or "none"


@dataclass
class _Segment:
    """What one start of a process wrote: its header and its iterations in order."""

    header: TraceHeader
    iterations: list[tuple[int, int, list[Span]]] = field(default_factory=list)

    def add(self, span: Span) -> None:
        """Put a span into its iteration, which is nearly always the last one."""
        for iteration, _, spans in reversed(self.iterations):
            if iteration == span.iteration:
                spans.append(span)
                return
        self.iterations.append((span.iteration, self.header.num_microbatches, [span]))


@dataclass
class _Content:
    rank: int
    path: Path
    segments: list[_Segment]
    truncated_lines: int

    @property
    def header(self) -> TraceHeader:
        return self.segments[-1].header


def _read_file(rank: int, path: Path) -> _Content | None:
    """The segments of a file; ``None`` if it holds nothing yet."""
    content = _Content(rank, path, [], 0)
    for number, line in enumerate(_lines(path), start=1):
        if not line.endswith(b"\n"):
            content.truncated_lines = 1
            break
        origin = f"{path}:{number}"
        record = parse_line(line, origin)
        if isinstance(record, TraceHeader):
            _check_header(content, record, origin)
            content.segments.append(_Segment(record))
        elif not content.segments:
            raise TraceError(f"{origin} stands before the header; this is no trace file")
        elif isinstance(record, IterationStart):
            segment = content.segments[-1]
            segment.iterations.append((record.iteration, record.num_microbatches, []))
        elif isinstance(record, Span):
            _check_chunk(record, content.header, origin)
            content.segments[-1].add(record)
    return content if content.segments else None


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from error


def _check_header(content: _Content, header: TraceHeader, origin: str) -> None:
    if header.rank != content.rank:
        raise TraceError(
            f"{origin} is the header of rank {header.rank}, the file is named after rank "
            f"{content.rank}; restore its name"
        )
    if content.segments and (content.header.run, content.header.shape) != (
        header.run,
        header.shape,
    ):
        raise TraceError(
            f"{origin} starts run {header.run!r} {header.shape} in a file of run "
            f"{content.header.run!r} {content.header.shape} (world size, pipeline ranks, chunks); "
            "keep one folder per run and shape"
        )


def _check_chunk(span: Span, header: TraceHeader, origin: str) -> None:
    if span.action in DRAWN_ACTIONS and not 0 <= span.chunk < header.num_chunks:
        raise TraceError(
            f"{origin}: span of chunk {span.chunk}, the header says {header.num_chunks} chunks"
        )


def _check_one_run(folder: Path, contents: list[_Content]) -> None:
    for kind, names in (
        ("runs", [repr(content.header.run) for content in contents]),
        ("shapes", ["x".join(map(str, content.header.shape)) for content in contents]),
    ):
        groups: dict[str, list[int]] = {}
        for name, content in zip(names, contents, strict=True):
            groups.setdefault(name, []).append(content.rank)
        if len(groups) > 1:
            listed = "; ".join(
                f"{name} (ranks {describe_numbers(ranks)})" for name, ranks in groups.items()
            )
            raise TraceError(
                f"{folder} mixes {kind}: {listed}; keep the files of one and move the rest"
            )


def _clock_offsets(headers: list[TraceHeader]) -> dict[tuple[str, int], int]:
    """Nanoseconds to add to the monotonic times under a header, by (host, its unix - monotonic).

    All zero where every header shares one clock.
    """
    clocks: list[tuple[str, int]] = []
    offsets: dict[tuple[str, int], int] = {}
    for header in headers:
        lead = header.unix_ns - header.monotonic_ns
        known = (c for c in clocks if c[0] == header.host and abs(c[1] - lead) < SAME_BOOT_NS)
        clock = next(known, None)
        if clock is None:
            clock = (header.host, lead)
            clocks.append(clock)
        offsets[header.host, lead] = clock[1]
    return offsets if len(clocks) > 1 else dict.fromkeys(offsets, 0)


def _assemble(content: _Content, offsets: Mapping[tuple[str, int], int]) -> RankTrace:
    spans: dict[int, tuple[Span, ...]] = {}
    counts: dict[int, int] = {}
    for segment in content.segments:
        offset = offsets[segment.header.host, segment.header.unix_ns - segment.header.monotonic_ns]
        for iteration, num_microbatches, found in segment.iterations:
            spans[iteration] = tuple(_shift(span, offset) for span in found)
            counts[iteration] = num_microbatches
    return RankTrace(content.header, spans, counts, content.truncated_lines)


def _shift(span: Span, offset_ns: int) -> Span:
    if offset_ns == 0:
        return span
    return replace(span, start_ns=span.start_ns + offset_ns, end_ns=span.end_ns + offset_ns)


def _is_complete(trace: RankTrace, iteration: int) -> bool:
    if iteration not in trace.spans:
        return False
    needed = trace.header.num_chunks * trace.num_microbatches[iteration]
    for action in ("F", "B"):
        done = {
            (span.chunk, span.microbatch)
            for span in trace.spans[iteration]
            if span.action == action
        }
        if len(done) < needed:
            return False
    return True


def _by_name(pair: tuple[re.Match[str] | None, Path]) -> str:
    return pair[1].name
