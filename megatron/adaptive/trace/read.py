"""Reads the trace files of a run.

A folder contains one file per rank. When a folder is read, the positions of the spans in the files
are determined (``block_index``), and the clocks of all ranks are aligned (``clock``). The spans
themselves are read only on request, as one table per rank, for all or some iterations. If an
iteration was recorded twice, the second recording is used. Reading a damaged file raises an error,
unless only the last line is truncated.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from megatron.adaptive.errors import TraceError
from megatron.adaptive.schedule.action import SliceCounts, item_count
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.trace.block_index import Block, FileIndex, index_file, read_blocks
from megatron.adaptive.trace.clock import Alignment, ClockFit, align, refine, shift
from megatron.adaptive.trace.span_columns import TraceTable, match_messages
from megatron.adaptive.trace.trace_format import (
    KINDS,
    SLICES,
    GroupCollectives,
    IterationStart,
    Lengths,
    Span,
    TraceHeader,
    shared_gpu_note,
    slices_of,
)

REFINED_ITERATIONS = 5
"""Number of evenly spaced iterations whose messages are used to correct the clocks."""

MOST_MATCHED = 4_000_000
"""Maximum number of spans to read for correcting the clocks, unless one iteration has more."""

_FILE_NAME = re.compile(r"trace_rank_(\d{5,7})\.jsonl")
_STARTS_BACK_NS = 1_000_000


@dataclass(frozen=True, eq=False)
class RankTrace:
    """Provides access to the trace of one rank. Spans are read from the file on request.

    Attributes:
        index: Header of the rank's trace file, and positions of the spans in the file.
        fit: Fit that converts times on the rank's clock to the run's common clock.
    """

    index: FileIndex
    fit: ClockFit

    @classmethod
    def of_tables(
        cls, path: Path, tables: Mapping[int, TraceTable], truncated_lines: int = 0, **header: Any
    ) -> RankTrace:
        """Creates a trace from spans that were read from a file in another format.

        The host is empty and the process ID is 0, because other formats do not contain them.

        Args:
            path: Path of the file that was read.
            tables: Spans, keyed by iteration.
            truncated_lines: Number of truncated lines in the file.
            header: Fields of :class:`~megatron.adaptive.trace.trace_format.TraceHeader`.
        """
        blocks = []
        for iteration, table in tables.items():
            count = int(table.microbatch.max(initial=0)) + 1
            counts = tuple(np.bincount(table.kind, minlength=len(KINDS)).tolist())
            blocks.append(Block(IterationStart(iteration, count, counts=counts), table=table))
        header |= {"num_microbatches": max((b.marker.num_microbatches for b in blocks), default=0)}
        full_header = TraceHeader(**header, host="", pid=0, monotonic_ns=0, unix_ns=0)
        index = FileIndex(path, full_header, blocks, truncated_lines=truncated_lines)
        return cls(index, shift(0))

    @property
    def header(self) -> TraceHeader:
        """Header of the trace file, with the rank, pipeline size, schedule and clock."""
        assert self.index.header is not None
        return self.index.header

    @property
    def iterations(self) -> tuple[int, ...]:
        """Recorded iterations in ascending order."""
        return tuple(sorted(self._blocks))

    @cached_property
    def num_microbatches(self) -> Mapping[int, int]:
        """Number of microbatches, keyed by iteration."""
        return {i: blocks[0].marker.num_microbatches for i, blocks in self._blocks.items()}

    def slices(self, iteration: int) -> SliceCounts:
        """Returns the number of slices of each microbatch in ``iteration``."""
        blocks = self._blocks.get(iteration)
        if not blocks:
            return self.header.num_slices
        return slices_of(self.header, blocks[0].marker)

    def frozen_chunks(self, iteration: int) -> int:
        """Returns the number of this rank's chunks that ran no backward passes in ``iteration``."""
        blocks = self._blocks.get(iteration)
        return frozen_chunks_of(self.header, blocks[0].marker) if blocks else 0

    def lengths(self, iteration: int) -> Lengths:
        """Returns the sizes of the microbatches in ``iteration``.

        The result is empty if all microbatches have the same size.
        """
        blocks = self._blocks.get(iteration)
        return blocks[0].marker.lengths if blocks else ()

    def sizes(self, iteration: int) -> tuple[int, ...]:
        """Returns the size in bytes of the activations of each microbatch in ``iteration``.

        The result is empty if the sizes are unknown.
        """
        blocks = self._blocks.get(iteration)
        return blocks[0].marker.sizes if blocks else ()

    @cached_property
    def experts(self) -> Mapping[int, IterationStart]:
        """Start records of the iterations for which the load of the experts was recorded."""
        markers = ((i, blocks[0].marker) for i, blocks in self._blocks.items())
        return {i: marker for i, marker in markers if marker.tokens}

    def machine(self, iteration: int) -> Mapping[str, int]:
        """Returns the machine counters of ``iteration``, keyed by name.

        The result is empty if nothing was counted.
        """
        blocks = self._blocks.get(iteration)
        return blocks[0].marker.machine if blocks else {}

    def layers(self, iteration: int) -> tuple[tuple[int, ...], ...]:
        """Returns the times of the layers in ``iteration``, as in ``IterationStart.layers``.

        The result is empty if layers were not timed.
        """
        blocks = self._blocks.get(iteration)
        return blocks[0].marker.layers if blocks else ()

    def layer_passes(self, iteration: int) -> tuple[tuple[int, int, int, int], ...]:
        """Returns the times of each layer's first forward and backward passes in ``iteration``.

        The rows are those of ``IterationStart.layer_passes``, with times on the run's common clock.
        """
        blocks = self._blocks.get(iteration)
        return _rows_on_clock(blocks[0].marker.layer_passes, self.fit) if blocks else ()

    def collectives(self, iteration: int) -> tuple[GroupCollectives, ...]:
        """Returns the collectives in ``iteration``, with times on the run's common clock."""
        blocks = self._blocks.get(iteration)
        if not blocks:
            return ()
        return tuple(_on_clock(group, self.fit) for group in blocks[0].marker.collectives)

    def on_clock(self, times_ns: Sequence[int]) -> list[int]:
        """Converts ``times_ns`` from the rank's clock to the run's common clock."""
        moved: list[int] = self.fit.apply(np.array(times_ns, dtype=np.int64)).tolist()
        return moved

    @cached_property
    def num_spans(self) -> Mapping[int, int]:
        """Approximate number of spans in each iteration, at least 1. Does not read the spans."""
        counts: dict[int, int] = {}
        for block in self.index.blocks:
            iteration = block.marker.iteration
            counts[iteration] = counts.get(iteration, 0) + block.num_spans
        return counts

    def spans(self, iteration: int) -> tuple[Span, ...]:
        """Returns the spans of ``iteration`` as objects.

        The result is empty if the iteration was not recorded.
        """
        return self.table([iteration]).spans()

    def table(self, iterations: Iterable[int] | None = None) -> TraceTable:
        """Returns the spans of ``iterations`` as a table.

        Args:
            iterations: Iterations to read; ``None`` for all. Iterations that were not recorded are
                ignored.

        Raises:
            TraceError: A line is damaged, or the file no longer exists.
        """
        chosen = self._blocks if iterations is None else set(iterations)
        blocks = sorted(
            (block for i, blocks in self._blocks.items() if i in chosen for block in blocks),
            key=lambda block: block.offset,
        )
        return _moved(read_blocks(self.index, blocks), self.fit)

    def is_complete(self, iteration: int) -> bool:
        """Returns whether all forward and backward passes of ``iteration`` were recorded."""
        blocks = self._blocks.get(iteration)
        if not blocks or not all(block.is_whole for block in blocks):
            return False
        items = item_count(self.num_microbatches[iteration], self.slices(iteration))
        trained = self.header.num_chunks - self.frozen_chunks(iteration)
        chunks = {"F": self.header.num_chunks, "B": trained}
        return all(
            sum(b.marker.count(kind) for b in blocks) >= count * items
            for kind, count in chunks.items()
        )

    def clock_jumps(self) -> tuple[int, ...]:
        """Returns the iterations before which the rank's clock was set back.

        Such an iteration has an earlier start time than the iteration before it in the file.
        """
        markers = [block.marker for block in self.index.blocks]
        return tuple(
            marker.iteration
            for before, marker in pairwise(m for m in markers if m.start_ns and not m.is_late)
            if marker.start_ns < before.start_ns - _STARTS_BACK_NS
        )

    @cached_property
    def _blocks(self) -> dict[int, list[Block]]:
        """Blocks of spans, keyed by iteration; only the last ones if an iteration was repeated."""
        blocks: dict[int, list[Block]] = {}
        for block in self.index.blocks:
            iteration = block.marker.iteration
            if not block.marker.is_late:
                blocks[iteration] = []
            blocks.setdefault(iteration, []).append(block)
        return blocks


@dataclass(frozen=True, eq=False)
class RunTrace:
    """Contains the traces of all ranks of a run, with times on a common clock.

    Attributes:
        origin: Path of the folder or file that was read.
        run: ID of the run.
        world_size: Number of processes in the run.
        num_ranks: Number of ranks in each pipeline.
        num_chunks: Number of model chunks per rank.
        ranks: Trace of each global rank.
        alignment: Clocks of the run and their offsets to the common time.
        caveats: Notes for the user about an imported trace, such as missing information.
    """

    origin: Path
    run: str
    world_size: int
    num_ranks: int
    num_chunks: int
    ranks: Mapping[int, RankTrace]
    alignment: Alignment = field(default_factory=lambda: Alignment(()))
    caveats: tuple[str, ...] = ()

    @cached_property
    def missing_ranks(self) -> tuple[int, ...]:
        """Global ranks that have no trace file."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.ranks)

    @cached_property
    def truncated_lines(self) -> int:
        """Total number of truncated lines at the ends of the ranks' files."""
        return sum(trace.index.truncated_lines for trace in self.ranks.values())

    @cached_property
    def iterations(self) -> tuple[int, ...]:
        """Iterations that at least one rank recorded, in ascending order."""
        return tuple(sorted({i for trace in self.ranks.values() for i in trace.iterations}))

    @cached_property
    def _numbers(self) -> frozenset[int]:
        return frozenset(self.iterations)

    def replica(self, dp_rank: int = 0, tp_rank: int = 0) -> tuple[RankTrace | None, ...]:
        """Returns the traces of the ranks in a pipeline, with ``None`` for ranks without a file.

        Args:
            dp_rank: Data-parallel rank of the pipeline.
            tp_rank: Tensor-parallel rank of the pipeline.

        Raises:
            TraceError: None of the pipeline's ranks has a trace.
        """
        by_pp_rank: dict[int, RankTrace] = {}
        for trace in self.ranks.values():
            if (trace.header.dp_rank, trace.header.tp_rank) == (dp_rank, tp_rank):
                by_pp_rank.setdefault(trace.header.pp_rank, trace)
        if not by_pp_rank:
            dp_ranks = sorted({trace.header.dp_rank for trace in self.ranks.values()})
            raise TraceError(
                f"data-parallel rank {dp_rank} (tensor-parallel rank {tp_rank}) is not in "
                f"{self.origin}, which has data-parallel ranks {describe_numbers(dp_ranks)}"
            )
        return tuple(by_pp_rank.get(pp_rank) for pp_rank in range(self.num_ranks))

    def complete_iterations(self, dp_rank: int | None = 0) -> tuple[int, ...]:
        """Returns the iterations in which all forward and backward passes were recorded.

        Ranks without a trace file are ignored.

        Args:
            dp_rank: Data-parallel replica whose ranks are checked; ``None`` to check all replicas.
        """
        ranks = self.ranks.values() if dp_rank is None else self.replica(dp_rank)
        present = [trace for trace in ranks if trace is not None]
        return tuple(i for i in self.iterations if all(t.is_complete(i) for t in present))

    def num_spans(self, iterations: Iterable[int], ranks: Iterable[int] | None = None) -> int:
        """Returns the approximate number of spans that ``ranks`` recorded in ``iterations``.

        Args:
            iterations: Iterations to include.
            ranks: Global ranks to include; ``None`` for all.
        """
        counts = [self.ranks[rank].num_spans for rank in (self.ranks if ranks is None else ranks)]
        return sum(count.get(iteration, 0) for iteration in iterations for count in counts)

    def require_iteration(self, iteration: int) -> None:
        """Raises an error if no rank recorded ``iteration``.

        Raises:
            TraceError: The iteration was not recorded. The message lists the recorded iterations.
        """
        if iteration not in self._numbers:
            raise TraceError(
                f"iteration {iteration} is not in {self.origin}, which has iterations "
                f"{describe_numbers(self.iterations)}"
            )

    @cached_property
    def is_sliced(self) -> bool:
        """Whether any recorded microbatch is split into slices along its sequence."""
        return any(
            trace.header.num_slices > 1
            or any(max(block.marker.slices, default=1) > 1 for block in trace.index.blocks)
            for trace in self.ranks.values()
        )

    @property
    def gpu_ranks(self) -> int:
        """Maximum number of ranks that share a GPU, or 1 if no GPU is shared."""
        return max((trace.header.gpu_ranks for trace in self.ranks.values()), default=1)

    @property
    def shares_gpus(self) -> bool:
        """Whether any rank shares its GPU, so that its times include the work of other ranks."""
        return self.gpu_ranks > 1

    @property
    def bubble_note(self) -> str:
        """Note about shared GPUs to print after idle or busy times; empty if no GPU is shared."""
        return f" ({SLICES})" if self.shares_gpus else ""

    def notes(self) -> list[str]:
        """Returns one line per caveat about the trace, such as missing ranks or truncated lines."""
        lines = [*self.caveats]
        if self.shares_gpus:
            lines.append(shared_gpu_note(self.gpu_ranks))
        if self.missing_ranks:
            lines.append(
                f"no trace of ranks {describe_numbers(self.missing_ranks)} in {self.origin}"
            )
        if self.truncated_lines:
            lines.append(
                f"{self.truncated_lines} truncated lines at the ends of trace files were dropped; "
                "the run may have been killed"
            )
        for rank, trace in self.ranks.items():
            lines += [
                f"{gap.count} iterations of rank {rank} (from {gap.first} to {gap.last}) are "
                "missing, because its trace file could not be written at that time"
                for gap in trace.index.gaps
            ]
            if jumps := trace.clock_jumps():
                lines.append(
                    f"the clock of rank {rank} was set back before iterations "
                    f"{describe_numbers(jumps)}; ignore times that span this moment"
                )
        return lines + self.alignment.warnings()


def trace_files(folder: Path) -> dict[int, Path]:
    """Maps each rank to the path of its trace file in ``folder``.

    The dict is empty if there are no trace files.
    """
    if not folder.is_dir():
        return {}
    matches = ((_FILE_NAME.fullmatch(path.name), path) for path in sorted(folder.iterdir()))
    return {int(match[1]): path for match, path in matches if match}


def read_run(folder: str | os.PathLike[str]) -> RunTrace:
    """Reads the trace files of a run. The spans in them are read later, on request.

    Args:
        folder: Path of the folder with the trace files of one run.

    Raises:
        TraceError: The folder is missing or contains no trace; a file is damaged or has another
            format version; or the files belong to several runs or to pipelines of different sizes.
    """
    folder = Path(folder)
    files = trace_files(folder)
    if not files:
        state = "contains no trace_rank_*.jsonl file" if folder.is_dir() else "does not exist"
        raise TraceError(f"{folder} {state}; pass the folder into which the run wrote its traces")
    indexes = {rank: index_file(path) for rank, path in files.items()}
    headers = {rank: index.header for rank, index in sorted(indexes.items()) if index.header}
    if not headers:
        raise TraceError(f"the trace files in {folder} are empty; record the run again")
    for rank, header in headers.items():
        if header.rank != rank:
            raise TraceError(
                f"{files[rank]} has the header of rank {header.rank}, but its name states rank "
                f"{rank}; restore the original name"
            )
    _check_one_run(folder, headers)
    traces, alignment = _on_one_clock(indexes, headers)
    first = next(iter(headers.values()))
    return RunTrace(
        origin=folder,
        run=first.run,
        world_size=first.world_size,
        num_ranks=first.num_ranks,
        num_chunks=first.num_chunks,
        ranks=traces,
        alignment=alignment,
    )


def frozen_chunks_of(header: TraceHeader, marker: IterationStart) -> int:
    """Returns how many chunks of a rank run no backward passes in an iteration.

    These are the rank's first chunks.

    Args:
        header: Header of the rank's trace file.
        marker: Marker of the iteration.
    """
    frozen_stages = header.frozen_stages
    if marker.frozen_stages >= 0:
        frozen_stages = marker.frozen_stages
    if not frozen_stages:
        return 0
    placement = Placement(
        num_ranks=header.num_ranks,
        num_chunks=header.num_chunks,
        kind="v" if header.placement == "v" else "loop",
    )
    stages = (placement.stage_of(header.pp_rank, n) for n in range(header.num_chunks))
    return sum(stage < frozen_stages for stage in stages)


def describe_numbers(numbers: Iterable[int]) -> str:
    """Returns ``numbers`` as text with ranges, such as ``1-20, 30``.

    Long lists are shortened. The text is ``none`` if there are no numbers.
    """
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    limit = 8
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:limit]]
    if len(ranges) > limit:
        shown.append(f"... up to {ranges[-1][1]}")
    return ", ".join(shown) or "none"


def _check_one_run(folder: Path, headers: Mapping[int, TraceHeader]) -> None:
    for kind, names in (
        ("runs", {rank: repr(header.run) for rank, header in headers.items()}),
        ("shapes", {rank: "x".join(map(str, header.shape)) for rank, header in headers.items()}),
    ):
        different = dict.fromkeys(names.values())
        if len(different) > 1:
            listed = "; ".join(
                f"{name} (ranks {describe_numbers(r for r, n in names.items() if n == name)})"
                for name in different
            )
            raise TraceError(
                f"{folder} mixes {kind}: {listed}; keep the files of only one of them and move "
                "the others away"
            )


def _on_one_clock(
    files: Mapping[int, FileIndex], headers: Mapping[int, TraceHeader]
) -> tuple[dict[int, RankTrace], Alignment]:
    samples = {rank: files[rank].samples for rank in headers}
    alignment = align(headers, samples)

    def traces() -> dict[int, RankTrace]:
        return {
            rank: RankTrace(files[rank], alignment.fit_of(header.clock))
            for rank, header in headers.items()
        }

    aligned = traces()
    if len(alignment.clocks) > 1:
        names = {rank: header.clock for rank, header in headers.items()}
        alignment = refine(alignment, names, match_messages(_some_messages(aligned)))
        aligned = traces()
    return aligned, alignment


def _some_messages(traces: Mapping[int, RankTrace]) -> dict[int, TraceTable]:
    """Reads each rank's messages in a few evenly spaced iterations that all ranks recorded."""
    common = sorted(set.intersection(*(set(trace.iterations) for trace in traces.values())))
    indices = np.unique(np.linspace(0, len(common) - 1, REFINED_ITERATIONS).astype(int))
    chosen = [common[index] for index in indices.tolist()] if common else []
    spans = sum(trace.num_spans.get(i, 0) for trace in traces.values() for i in chosen)
    chosen = chosen[: max(1, len(chosen) * MOST_MATCHED // max(1, spans))]
    return {rank: trace.table(chosen).of_kind("send", "receive") for rank, trace in traces.items()}


def _moved(table: TraceTable, fit: ClockFit) -> TraceTable:
    """Returns ``table`` with times converted by ``fit`` to the run's common clock.

    If the rank's clock was set back during a span, the span gets the duration 0 instead of a
    negative one.
    """
    start_ns = fit.apply(table.start_ns)
    return replace(table, start_ns=start_ns, end_ns=np.maximum(start_ns, fit.apply(table.end_ns)))


def _on_clock(group: GroupCollectives, fit: ClockFit) -> GroupCollectives:
    """Returns ``group`` with times converted by ``fit`` to the run's common clock."""
    return replace(group, kept=_rows_on_clock(group.kept, fit))


def _rows_on_clock(
    rows: Sequence[tuple[int, int, int, int]], fit: ClockFit
) -> tuple[tuple[int, int, int, int], ...]:
    """Converts the times in ``rows`` from the rank's clock to the run's common clock.

    The last two numbers of each row are the times: a start and an end in ns, which ``fit``
    converts.
    """
    times = np.array([row[2:] for row in rows], dtype=np.int64).reshape(-1, 2)
    moved = fit.apply(times.reshape(-1)).reshape(-1, 2).tolist()
    return tuple(
        (first, second, start_ns, max(start_ns, end_ns))
        for (first, second, _, _), (start_ns, end_ns) in zip(rows, moved, strict=True)
    )
