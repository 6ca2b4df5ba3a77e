"""Measures, in a separate process, how much time and memory it takes to read a large run."""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time

from harness.processes import run_module
from megatron.adaptive.trace.metrics import run_figures
from megatron.adaptive.trace.read import read_run
from tests.support.synthetic_trace import SyntheticRun, write_synthetic

PIPELINE, RANKS, MICROBATCHES = 16, 1024, 64
LIMIT_S = 600.0


def measure(spans: int) -> dict[str, float]:
    """Writes a synthetic run and reads it in a separate process.

    Args:
        spans: Approximate number of spans.

    Returns:
        Dict with ``spans`` (number of spans), ``write_s``, ``read_s`` and ``diagnose_s`` (times in
        seconds), and ``peak_bytes`` (memory of the reading process and its children).

    Raises:
        RuntimeError: The reading process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        each = MICROBATCHES * 7 * RANKS
        run = SyntheticRun(
            num_ranks=PIPELINE,
            replicas=RANKS // PIPELINE,
            num_microbatches=MICROBATCHES,
            iterations=max(1, round(spans / each)),
            schedule="1f1b",
            hosts=RANKS // 8,
            clock_offset_s=5,
            clock_drift_ppm=50,
        )
        start = time.perf_counter()
        truth = write_synthetic(folder, run)
        write_s = time.perf_counter() - start
        read = run_module("tests.soak.tracing.aggregate", folder, limit_s=LIMIT_S)
        return {"spans": truth.spans, "write_s": write_s, **read}


def main() -> int:
    """Reads the run in a folder, and prints how much time and memory this takes."""
    from megatron.adaptive.trace.diagnose import diagnose

    start = time.perf_counter()
    run = read_run(sys.argv[1])
    run_figures(run)
    read_s = time.perf_counter() - start
    # For children that have exited, the system reports only the peak memory of the largest child.
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    workers = len(os.sched_getaffinity(0))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + workers * children
    start = time.perf_counter()
    diagnose(run)
    diagnose_s = time.perf_counter() - start
    most = max(peak, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    print(json.dumps({"read_s": read_s, "diagnose_s": diagnose_s, "peak_bytes": most * 1024}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
