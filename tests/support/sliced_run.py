"""Writes traces of synthetic runs with ``--slice-tokens``.

The documents of a step are packed into rows, and each row is cut into slices of equal length. Steps
are simulated under the schedule ``adaptive``. The time of a slice is a linear function of its
number of tokens and its number of token pairs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.adaptive.config.sequence_slices import Cut, SliceRule
from megatron.adaptive.schedule.pack_documents import first_fit
from megatron.adaptive.schedule.policy import Policy
from megatron.adaptive.schedule.simulate import SimResult
from megatron.adaptive.schedule.workload import Link, work_of_items
from megatron.adaptive.trace.trace_format import (
    IterationStart,
    TraceHeader,
    block_text,
    header_line,
    trace_file_name,
)
from megatron.adaptive.trace.whatif.replay import candidate_for
from tests.support.synthetic_step import step_rows

TOKEN_S = 1e-4
PAIR_S = 1e-7
LATENCY_S = 1e-4
START_NS = 1_000_000_000
NS_PER_S = 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlicedRun:
    """Settings of a synthetic run.

    Attributes:
        documents: Number of tokens in each document. Every step has the same documents.
        tokens: Number of tokens in a slice.
        num_ranks: Number of pipeline ranks.
        num_chunks: Number of chunks per rank.
        iterations: Number of steps.
        schedule: Name of the schedule in the header.
        fixed_s: Fixed time in seconds that is added to the time of each action for its tokens and
            token pairs.
    """

    documents: tuple[int, ...]
    tokens: int
    num_ranks: int = 3
    num_chunks: int = 1
    iterations: int = 3
    schedule: str = "adaptive"
    fixed_s: float = 0.0

    @property
    def rows(self) -> list[list[int]]:
        """Returns a list for each row, with the lengths of the documents in the row."""
        packed = first_fit(self.documents, self.tokens)
        return [[self.documents[number] for number in row] for row in packed]

    @property
    def cuts(self) -> list[Cut]:
        """Returns an object for each row that describes how the row is cut into slices."""
        return [self._cut(row) for row in self.rows]

    def _cut(self, row: Sequence[int]) -> Cut:
        rule = SliceRule(slices=1, tokens=self.tokens, is_packed=True, varies=True)
        return rule.cut(self._width(row), row)

    @property
    def counts(self) -> tuple[int, ...]:
        """Returns the number of slices of each row."""
        return tuple(len(cut.ends) for cut in self.cuts)

    def _width(self, row: Sequence[int]) -> int:
        return -(-sum(row) // self.tokens) * self.tokens

    def step_s(self, rows: Sequence[Sequence[int]]) -> float:
        """Returns the simulated step time in seconds for ``rows`` of document lengths."""
        return self._simulated([self._cut(row) for row in rows])[0].makespan_s

    def write(self, folder: Path) -> float:
        """Writes a trace file for each rank to ``folder``, and returns the step time in seconds."""
        result, policies = self._simulated(self.cuts)
        data_ns = np.ones(len(self.counts), dtype=np.int64)
        rows = step_rows(result, policies, data_ns=data_ns)
        lengths = tuple((self._width(row), *row) for row in self.rows)
        folder.mkdir(parents=True, exist_ok=True)
        step_ns = round(result.makespan_s * NS_PER_S)
        for rank, of_rank in enumerate(rows):
            text = header_line(self._header(rank, result.placement.kind))
            for number in range(self.iterations):
                start_ns = START_NS + number * 2 * step_ns
                marker = IterationStart(
                    number + 1, len(self.counts), start_ns, lengths=lengths, slices=self.counts
                )
                moved = of_rank.copy()
                moved[:, 4:6] += start_ns
                text += block_text(marker, moved.tolist())
            (folder / trace_file_name(rank)).write_text(text, encoding="ascii")
        return result.makespan_s

    def _simulated(self, cuts: Sequence[Cut]) -> tuple[SimResult, Sequence[Policy]]:
        """Simulates a step whose rows are divided into slices according to ``cuts``.

        Returns the result of the simulation, and the policy of each rank.
        """
        counts = tuple(len(cut.ends) for cut in cuts)
        work = [cut.work(n) for cut in cuts for n in range(len(cut.ends))]
        slice_s = [self.fixed_s + t * TOKEN_S + p * PAIR_S for t, p in work]
        pieces = self.num_chunks - 1
        seconds = np.zeros((3, self.num_ranks * self.num_chunks, len(work)))
        seconds[0] = slice_s
        seconds[1] = np.multiply(slice_s, 2 - pieces)
        seconds[2] = np.multiply(slice_s, pieces)
        candidate = candidate_for("adaptive", self.num_ranks, self.num_chunks, counts, pieces)
        placement = candidate.placement
        workload = work_of_items(placement, seconds, Link(latency_s=LATENCY_S), {}, counts)
        policies = candidate.policies(len(counts), counts)
        return candidate.simulate(workload, compiled=False, policies=policies), policies

    def _header(self, rank: int, kind: str) -> TraceHeader:
        return TraceHeader(
            run="sliced",
            rank=rank,
            world_size=self.num_ranks,
            pp_rank=rank,
            num_ranks=self.num_ranks,
            num_chunks=self.num_chunks,
            num_microbatches=len(self.counts),
            placement=kind,
            schedule=self.schedule,
            clock="one clock",
        )
