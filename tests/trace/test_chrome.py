"""The events for chrome://tracing: pairs in order, real chunks, one time line."""

import json
from collections.abc import Callable
from pathlib import Path

from megatron.adaptive.trace.chrome import chrome_events, write_chrome
from megatron.adaptive.trace.read import read_run


def test_begins_and_ends_pair_up_and_match_the_trace(write_run: Callable[..., Path]) -> None:
    run = read_run(write_run(2, 2, 4))
    events = chrome_events(run, [2])
    for pp_rank in range(2):
        own = [e for e in events if e["pid"] == pp_rank and e["ph"] in "BE"]
        spans = [span for span in run.ranks[pp_rank].spans[2] if span.action in "FB"]
        assert [event["ph"] for event in own] == ["B", "E"] * len(spans)
        for begin, end, span in zip(own[::2], own[1::2], spans, strict=True):
            word = {"F": "forward", "B": "backward"}[span.action]
            assert begin["name"] == end["name"] == f"{word} {span.chunk}-{span.microbatch}"
            assert end["ts"] - begin["ts"] == span.duration_ns / 1000
            assert begin["args"]["bytes"] == 100
    names = [e["args"]["name"] for e in events if e["ph"] == "M"]
    assert names == ["rank 0 (stages 0, 2)", "rank 1 (stages 1, 3)"]


def test_iterations_keep_their_pause(write_run: Callable[..., Path], tmp_path: Path) -> None:
    run = read_run(write_run(1, 1, 1))
    write_chrome(run, tmp_path / "events.json", [1, 3])
    events = json.loads((tmp_path / "events.json").read_text())
    begins = [e["ts"] for e in events if e["ph"] == "B" and e["cat"] == "forward"]
    assert begins == [0, 2 * 10**7]


def test_nothing_asked_nothing_written(write_run: Callable[..., Path]) -> None:
    assert chrome_events(read_run(write_run()), []) == []
