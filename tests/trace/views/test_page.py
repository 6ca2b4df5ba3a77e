"""Checks that the HTML page contains the data of the trace, and that the page is small enough."""

import base64
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.metrics import run_figures
from megatron.adaptive.trace.read import RunTrace, read_run
from megatron.adaptive.trace.trace_format import trace_file_name
from megatron.adaptive.trace.views import page
from megatron.adaptive.trace.views.page import write_page
from tests.support.synthetic_trace import Fault, SyntheticRun, write_synthetic

Make = Callable[..., RunTrace]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Returns a function that generates a synthetic run and returns its trace."""

    def write(**shape: Any) -> RunTrace:
        write_synthetic(tmp_path / "traces", SyntheticRun(**shape))
        return read_run(tmp_path / "traces")

    return write


class Page:
    """Reads the data of the HTML page ``path``."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_text()
        self.head = self._script("page")

    def block(self, group: int, number: int) -> dict[str, Any]:
        """Returns block ``number`` of the group with index ``group``. Its columns are arrays."""
        return decode(self._script(f"block-{group}-{number}"))

    def _script(self, name: str) -> dict[str, Any]:
        match = re.search(f'<script type="application/json" id="{name}">(.*?)</script>', self.text)
        assert match is not None
        content: dict[str, Any] = json.loads(match[1])
        return content


def decode(block: dict[str, Any]) -> dict[str, Any]:
    data, offset = gzip.decompress(base64.b64decode(block["data"])), 0
    for name, kind, length in block["columns"]:
        assert offset % np.dtype(kind).itemsize == 0, (
            "columns must begin at multiples of their element size"
        )
        block[name] = np.frombuffer(data, kind, length, offset)
        offset += block[name].nbytes
    assert offset == len(data)
    return block


def test_bars_and_messages_are_those_of_the_trace(make: Make, tmp_path: Path) -> None:
    run = make(num_ranks=3, num_chunks=2, iterations=3)
    assert write_page(run, tmp_path / "a.html", [2, 3]) == []
    page = Page(tmp_path / "a.html")
    assert page.head["iterations"] == [2, 3]
    block = page.block(0, 1)
    start_ns = min(int(t.table([3]).of_kind("F").start_ns.min()) for t in run.ranks.values())
    kinds = [(c["kind"], c["chunk"]) for c in page.head["categories"]]
    for rank, trace in run.ranks.items():
        row = slice(block["offset"][rank], block["offset"][rank + 1])
        bars = [
            (*kinds[category], start, length)
            for category, start, length in zip(
                *(block[name][row].tolist() for name in ("category", "start", "length")),
                strict=True,
            )
        ]
        for kind in ("F", "B", "wait", "data", "reduce", "optimizer"):
            spans = trace.table([3]).of_kind(kind)
            expected = zip((spans.start_ns - start_ns).tolist(), spans.duration_ns, strict=True)
            assert sorted(bar[2:] for bar in bars if bar[0] == kind) == sorted(expected)
        forwards = trace.table([3]).of_kind("F")
        is_forward = np.isin(block["category"][row], [kinds.index(("F", 0)), kinds.index(("F", 1))])
        for name in ("microbatch", "chunk", "bytes", "in_flight_bytes", "queue_depth", "reason"):
            assert sorted(block[name][row][is_forward]) == sorted(getattr(forwards, name)), name
    sends = sum(len(t.table([3]).of_kind("send")) for t in run.ranks.values())
    assert len(block["sent"]) == sends
    assert (block["arrived"] >= block["sent"]).all()
    figures = run_figures(run, [3])
    assert block["step_ms"] == figures.step_ns[0, 0] / 1e6
    assert block["bubble"] == pytest.approx(figures.bubble_fraction.mean(), abs=1e-6)


@pytest.mark.parametrize(
    "shape",
    [
        {"schedule": "1f1b"},
        {"num_chunks": 2, "weight_pieces": 3},
        {"schedule": "zb-h1"},
        {"schedule": "interleaved", "num_chunks": 3, "num_ranks": 2},
    ],
)
def test_a_steady_step_simulated_anew_is_the_step(
    make: Make, tmp_path: Path, shape: dict[str, Any]
) -> None:
    write_page(make(iterations=1, action_sigma=0.0, **shape), tmp_path / "a.html", [1])
    block = Page(tmp_path / "a.html").block(0, 0)
    # Only some forward passes of the trace read data. The simulated step divides the reading time
    # among all forward passes, so the step times differ slightly.
    assert block["simulated_ms"] == pytest.approx(block["step_ms"], rel=0.02)
    assert len(block["s_start"]) == block["s_offset"][-1] > 0


def test_an_uneven_step_takes_longer_than_one_of_mean_times(make: Make, tmp_path: Path) -> None:
    run = make(iterations=1, action_sigma=0.4, schedule="1f1b")
    write_page(run, tmp_path / "a.html", [1])
    block = Page(tmp_path / "a.html").block(0, 0)
    assert 0 < block["simulated_ms"] < 0.95 * block["step_ms"]


def test_of_too_many_spans_there_are_fewer_iterations_and_the_longest(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(num_ranks=4, num_microbatches=32, iterations=4)
    assert write_page(run, tmp_path / "all.html", run.iterations) == []
    whole = Page(tmp_path / "all.html").block(0, 3)
    monkeypatch.setattr(page, "MAX_SPANS", 200)
    notes = write_page(run, tmp_path / "few.html", run.iterations)
    written = Page(tmp_path / "few.html")
    assert written.head["iterations"] == [4]
    few = written.block(0, 0)
    left_out = len(whole["start"]) - 200
    assert notes == [
        "the page shows only 1 of 4 iterations: the slowest, and evenly spaced ones",
        f"the {left_out} shortest spans of large steps are not drawn",
    ]
    assert sorted(few["length"]) == sorted(whole["length"])[left_out:]
    for rank in range(4):
        row = slice(few["offset"][rank], few["offset"][rank + 1])
        assert (np.diff(few["start"][row]) >= 0).all()


def test_several_replicas(make: Make, tmp_path: Path) -> None:
    run = make(num_ranks=2, replicas=3, iterations=1)
    write_page(run, tmp_path / "a.html", [1])
    page = Page(tmp_path / "a.html")
    names = [group["name"] for group in page.head["groups"]]
    assert names == ["replica 0", "replica 1", "replica 2"]
    assert page.head["groups"][1]["rows"] == ["stage 0, rank 1", "stage 1, rank 4"]
    write_page(run, tmp_path / "b.html", [1], dp_rank=2)
    assert [group["name"] for group in Page(tmp_path / "b.html").head["groups"]] == ["replica 2"]


def test_of_many_iterations_and_replicas_the_slowest_are_shown(make: Make) -> None:
    slow = Fault(kind="slow-rank", rank=5, factor=1.5, first=41, last=42)
    run = make(num_ranks=2, replicas=6, iterations=90, num_microbatches=2, faults=(slow,))
    figures = run_figures(run)
    iterations, groups, notes = page.choose(run, figures, run.iterations, None, None)
    assert page.MAX_ITERATIONS - page.SLOWEST <= len(iterations) <= page.MAX_ITERATIONS
    assert {1, 41, 42, 90} <= set(iterations)
    assert max(np.diff(iterations)) < 15
    assert [group.name for group in groups] == ["replica 0", "replica 5"]
    assert len(notes) == 2


def test_missing_ranks_are_rows_that_say_so(make: Make, tmp_path: Path) -> None:
    run = make(num_ranks=3, iterations=1)
    (run.origin / trace_file_name(1)).unlink()
    notes = write_page(read_run(run.origin), tmp_path / "a.html", [1])
    assert notes == ["the ideal step is missing for 1 incomplete or large steps"]
    page = Page(tmp_path / "a.html")
    assert page.head["groups"][0]["rows"][1] == "stage 1: no trace"
    assert any("no trace of ranks 1" in note for note in page.head["notes"])
    assert page.block(0, 0)["offset"][1] == page.block(0, 0)["offset"][2]


def test_the_name_of_a_run_is_text(write_run: Callable[..., Path], tmp_path: Path) -> None:
    run = read_run(write_run(run="</script><b>&"))
    write_page(run, tmp_path / "a.html", run.iterations)
    page = Page(tmp_path / "a.html")
    assert page.head["title"] == "Pipeline trace of </script><b>&"
    assert "<title>Trace of &lt;/script&gt;&lt;b&gt;&amp;</title>" in page.text
    # The page must not load anything from other servers or files.
    assert "default-src 'none'" in page.text
    assert not re.findall(r"<(?:script|img|link)[^>]*(?:src|href)=\"(?!data:)", page.text)
    assert len(page.text) < 8_000_000


def test_what_is_not_there_is_refused(make: Make, tmp_path: Path) -> None:
    run = make(iterations=2)
    with pytest.raises(TraceError, match="iteration 5 is not in .* which has iterations 1-2"):
        write_page(run, tmp_path / "a.html", [5])
    with pytest.raises(TraceError, match="data-parallel rank 4"):
        write_page(run, tmp_path / "a.html", [1], dp_rank=4)
    assert not list(tmp_path.glob("*.html"))
