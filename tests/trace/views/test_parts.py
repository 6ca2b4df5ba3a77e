"""The parts of a step add up to it, on every rank."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.adaptive.trace.event import Span, TraceHeader
from megatron.adaptive.trace.figures import run_figures
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.summary import PARTS, format_parts, parts_ms

MS = 1_000_000


@pytest.fixture
def folder(tmp_path: Path, write_spans: Callable[..., Path]) -> Path:
    """Two ranks; the second one works from 4 ms to 11 ms of a step of 12 ms."""
    shared = {"run": "r", "world_size": 2, "num_ranks": 2, "num_chunks": 1, "num_microbatches": 1}
    rows = (
        (
            Span("F", 0, 0, 0, 3 * MS, 1),
            Span("wait", 0, 0, 3 * MS, 9 * MS, 1, of="B", reason="input"),
            Span("B", 0, 0, 10 * MS, 12 * MS, 1),
        ),
        (
            Span("wait", 0, 0, -1 * MS, 4 * MS, 1, of="F", reason="input"),
            Span("F", 0, 0, 4 * MS, 6 * MS, 1),
            Span("wait", 0, 0, 6 * MS, 7 * MS, 1, of="B", reason="order"),
            Span("wait", 0, 0, 7 * MS, 8 * MS, 1, of="B", reason="memory"),
            Span("B", 0, 0, 8 * MS, 11 * MS, 1),
        ),
    )
    for rank, row in enumerate(rows):
        header = TraceHeader(**shared, rank=rank, pp_rank=rank, schedule="adaptive")
        moved = [
            Span(s.action, 0, 0, s.start_ns + 10**9, s.end_ns + 10**9, 1, of=s.of, reason=s.reason)
            for s in row
        ]
        write_spans(tmp_path / "traces", header, moved, num_microbatches=1)
    return tmp_path / "traces"


def test_parts_add_up(folder: Path) -> None:
    parts = parts_ms(run_figures(read_run(folder)))
    found = [dict(zip(PARTS, row, strict=True)) for row in parts[0].tolist()]
    nothing = dict.fromkeys(PARTS, 0.0)
    assert found[0] == {**nothing, "busy": 5, "input": 6, "rest": 1}
    # The wait for the first input is the time before the first action, not a wait besides.
    assert found[1] == {**nothing, "busy": 5, "order": 1, "memory": 1, "before": 4, "after": 1}
    assert np.allclose(parts.sum(axis=-1), 12)


def test_the_table_leaves_out_what_is_nil(folder: Path) -> None:
    parts = parts_ms(run_figures(read_run(folder)))
    assert format_parts(["stage 0", "stage 1"], parts[0]).splitlines() == [
        "of the step, ms        busy  wait input  wait memory  wait order      before      after"
        "       rest",
        "stage 0          5.00 (42%)  6.00 (50%)    0.00 (0%)   0.00 (0%)   0.00 (0%)  0.00 (0%)"
        "  1.00 (8%)",
        "stage 1          5.00 (42%)   0.00 (0%)    1.00 (8%)   1.00 (8%)  4.00 (33%)  1.00 (8%)"
        "  0.00 (0%)",
    ]
