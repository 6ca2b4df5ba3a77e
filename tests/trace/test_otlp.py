"""Tests that spans are sent to a collector while a job runs, even if the collector fails."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.cli import trace_export
from megatron.adaptive.errors import ConfigError, TraceError
from megatron.adaptive.trace import otlp
from megatron.adaptive.trace.otlp import SpanSender
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.recorder import Recorder
from megatron.adaptive.trace.trace_format import KINDS, SpanRow, TraceHeader

from ..multiprocess.launch import free_port
from ..support.otlp_collector import serving

ITERATIONS = 5
LIMIT_S = 60.0


@functools.cache
def header_of() -> TraceHeader:
    return TraceHeader(
        run="live",
        rank=0,
        world_size=2,
        pp_rank=0,
        num_ranks=2,
        num_chunks=1,
        num_microbatches=2,
        schedule="1f1b",
    )


def rows_at(start_ns: int) -> list[SpanRow]:
    """Returns the spans of a step that starts at ``start_ns``, on one rank.

    There are spans for actions, a message, the optimizer, and the step itself.
    """
    names = ("F", "send", "F", "B", "B", "optimizer")
    rows = [
        SpanRow(
            KINDS.index(name),
            chunk=-1 if name == "optimizer" else 0,
            microbatch=-1 if name == "optimizer" else number % 2,
            start_ns=start_ns + 1000 * number,
            end_ns=start_ns + 1000 * number + 900,
            bytes=8 * (name == "send"),
            peer=1 if name == "send" else -1,
            of=KINDS.index("F") if name == "send" else -1,
        )
        for number, name in enumerate(names)
    ]
    return [*rows, SpanRow(KINDS.index("step"), start_ns=start_ns, end_ns=start_ns + 6000)]


SPANS = len(rows_at(0))


def record(folder: Path, sender: SpanSender, iterations: int = ITERATIONS) -> Recorder:
    """Records ``iterations`` iterations, and sends their spans with ``sender``.

    After the second iteration has ended, a checkpoint span is added to it.
    """
    recorder = Recorder(folder, header_of(), sender)
    for iteration in range(1, iterations + 1):
        start_ns = 10**9 * iteration
        recorder.begin_iteration(iteration, 2, start_ns=start_ns)
        recorder.extend(rows_at(start_ns))
        recorder.end_iteration()
        if iteration == 2:
            late = SpanRow(KINDS.index("checkpoint"), start_ns=start_ns, end_ns=start_ns + 5)
            recorder.add_late(iteration, 2, [late])
    return recorder


def wait_until(is_done: Callable[[], Any]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not is_done():
        assert time.monotonic() < end_s, "the condition did not become true in time"
        time.sleep(0.01)


def identity(span: dict[str, Any]) -> tuple[Any, ...]:
    names = ("traceId", "spanId", "parentSpanId", "name", "startTimeUnixNano", "endTimeUnixNano")
    return tuple(span.get(name) for name in names)


def test_sent_spans_are_those_of_a_later_export(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving() as collector:
        sender = SpanSender(collector.url, header_of())
        record(tmp_path / "traces", sender).close()
    assert (sender.sent, sender.dropped) == (ITERATIONS * SPANS + 1, 0)
    assert collector.ranks == {"0"}
    assert trace_export.main([str(tmp_path / "traces"), "--otlp", str(tmp_path / "spans")]) == 0
    exported = [
        span
        for line in (tmp_path / "spans").read_text().splitlines()
        for span in json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"]
    ]
    assert sorted(map(identity, collector.spans), key=str) == sorted(
        map(identity, exported), key=str
    )
    names = {span["name"] for span in exported}
    assert names >= {"megatron.train_step", "megatron.p2p.send_forward", "megatron.optimizer_step"}
    assert "and dropped" not in capfd.readouterr().err


def test_a_collector_that_is_down_costs_its_spans_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(otlp, "FIRST_PAUSE_S", 0.05)
    port = free_port()
    sender = SpanSender(f"http://127.0.0.1:{port}", header_of())
    recorder = record(tmp_path, sender)
    wait_until(lambda: sender.dropped == ITERATIONS * SPANS + 1)
    with serving(port) as collector:
        number = ITERATIONS
        while not collector.requests:
            number += 1
            recorder.begin_iteration(number, 2, start_ns=10**9 * number)
            recorder.extend(rows_at(10**9 * number))
            recorder.end_iteration()
            expected = number * SPANS + 1
            wait_until(lambda n=expected: sender.sent + sender.dropped == n)  # type: ignore[misc]
            time.sleep(0.05)
            assert number < 1000
        recorder.close()
    assert sender.sent == len(collector.spans) > 0
    assert sender.sent + sender.dropped == number * SPANS + 1
    # The trace file must contain all iterations, because only the connection to the collector
    # failed.
    assert len(read_run(tmp_path).ranks[0].iterations) == number
    said = capfd.readouterr().err
    assert said.count("Connection refused; training continues") == 1
    assert said.count("responds again; ") == 1
    assert said.count(f"dropped {sender.dropped:,} spans;") == 1


def test_a_collector_that_hangs_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(otlp, "CLOSE_S", 0.2)
    iterations = 3 * otlp.QUEUE_ITERATIONS
    with serving() as collector:
        collector.held.clear()
        sender = SpanSender(collector.url, header_of(), limit_s=LIMIT_S)
        recorder = record(tmp_path, sender, iterations)
        wait_until(lambda: len(read_run(tmp_path).ranks[0].iterations) == iterations)
        # The pending request contains one iteration, and the queue holds a limited number of
        # further iterations. The spans of all other iterations are dropped.
        least = (iterations - otlp.QUEUE_ITERATIONS - 1) * SPANS
        wait_until(lambda: sender.dropped >= least)
        recorder.close()
        assert sender.sent == 0
    lost = iterations * SPANS + 1
    assert f"to {collector.url}/v1/traces, and dropped {lost:,} spans;" in capfd.readouterr().err


def test_refused_spans_are_counted(tmp_path: Path) -> None:
    with serving() as collector:
        refusal = {"partialSuccess": {"rejectedSpans": "2", "errorMessage": "too old"}}
        collector.answer = (200, json.dumps(refusal).encode())
        sender = SpanSender(collector.url, header_of())
        record(tmp_path / "a", sender, 1).close()
        assert (sender.sent, sender.dropped) == (SPANS - 2, 2)
        collector.answer = (503, b"")
        sender = SpanSender(collector.url, header_of())
        record(tmp_path / "b", sender, 1).close()
        assert (sender.sent, sender.dropped) == (0, SPANS)


@pytest.mark.parametrize(
    "url", ["", "localhost:4318", "grpc://localhost:4317", "http://", "http://[::1", "http://a:x"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="must be a URL such as http://127.0.0.1:4318"):
        SpanSender(url, header_of())


def places(spans: list[dict[str, Any]]) -> list[tuple[str, str | None, str | None]]:
    """Returns a sorted list with the name, microbatch and slice of each span."""
    rows = []
    for span in spans:
        values = {a["key"]: a["value"].get("intValue") for a in span["attributes"]}
        rows.append((span["name"], values.get("microbatch_id"), values.get("slice")))
    return sorted(rows, key=str)


def test_spans_have_microbatch_and_slice_where_microbatches_are_cut(tmp_path: Path) -> None:
    """Checks that microbatch and slice are separate attributes of sent and exported spans."""
    kinds = {"F": range(4), "data": range(2)}
    spans = [
        SpanRow(KINDS.index(name), chunk=0, microbatch=number, start_ns=number, end_ns=number + 1)
        for name, numbers in kinds.items()
        for number in numbers
    ]
    with serving() as collector:
        recorder = Recorder(
            tmp_path / "traces", header_of(), SpanSender(collector.url, header_of())
        )
        recorder.begin_iteration(1, 2, start_ns=0, slices=(3, 1))
        recorder.extend(spans[:-1])
        recorder.end_iteration()
        recorder.add_late(1, 2, [SpanRow(KINDS.index("B"), chunk=0, microbatch=2, end_ns=9)])
        recorder.close()
    forward, backward = "megatron.microbatch.forward", "megatron.microbatch.backward"
    expected = [(forward, "0", str(part)) for part in range(3)]
    expected += [(forward, "1", "0"), (backward, "0", "2")]
    assert places(collector.spans) == sorted([*expected, ("megatron.data", "0", None)], key=str)
    assert trace_export.main([str(tmp_path / "traces"), "--otlp", str(tmp_path / "spans")]) == 0
    (line,) = (tmp_path / "spans").read_text().splitlines()
    exported = json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert places(exported) == places(collector.spans)


def test_user_and_password_of_a_url_are_sent_and_not_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving() as collector:
        url = collector.url.replace("//", "//me:sec%20ret@") + "?key=sec%20ret"
        sender = SpanSender(url, header_of())
        record(tmp_path / "a", sender, 1).close()
        assert (sender.sent, collector.logins) == (SPANS, {"me:sec ret"})
        collector.answer = (503, b"")
        record(tmp_path / "b", SpanSender(url, header_of()), 1).close()
        assert trace_export_fails(tmp_path / "a", url)
    said = capfd.readouterr()
    assert "Service Unavailable" in said.err
    assert "//...@127.0.0.1" in said.err
    assert "sec" not in said.out + said.err
    with pytest.raises(ConfigError) as raised:
        SpanSender("grpc://me:secret@host?key=secret", header_of())
    assert "secret" not in str(raised.value)


def trace_export_fails(folder: Path, url: str) -> bool:
    """Returns whether exporting ``folder`` fails with an error that does not show the password."""
    with pytest.raises(TraceError) as raised:
        trace_export.main([str(folder), "--otlp", url])
    return "sec" not in str(raised.value)


def test_a_redirection_accepts_no_spans(tmp_path: Path) -> None:
    """Checks that redirects are not followed, because the GET request would not contain spans."""
    with serving() as collector:
        collector.answer = (302, b"")
        sender = SpanSender(collector.url, header_of())
        record(tmp_path, sender, 1).close()
        assert (sender.sent, sender.dropped, collector.gets) == (0, SPANS, 0)


@pytest.mark.parametrize("url", ["http://h/\u00e4", f"http://{'a' * 70}", "http://h/a b"])
def test_an_address_that_cannot_be_used_costs_only_spans(
    url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sender = SpanSender(url, header_of())
    record(tmp_path, sender, 1).close()
    assert (sender.sent, sender.dropped) == (0, SPANS)
    assert "Traceback" not in capfd.readouterr().err
