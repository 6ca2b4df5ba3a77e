"""Rows of RDMA between two small virtual machines with soft-RoCE; see ``tests/labs/rdma_lab``."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from megatron.adaptive import extension

from .report import Point, Result, Row, measured, missing, ratios, size_text

BANDWIDTH, LATENCY = 0.90, 1.2
INSTALL = "bash prerequisite.sh --lab"
LIMIT_S = 900.0
ROOT = Path(__file__).resolve().parents[2]
PATTERN = "RDMA lab, stream"


def measure(repetitions: int) -> Result:
    """Boot two nodes and compare; where that cannot be, a row says why."""
    reason = why_not()
    if reason is not None:
        return Result(rows=[missing("rdma over perftest", reason, goal=BANDWIDTH, least=True)])
    from tests.labs import rdma_lab

    with tempfile.TemporaryDirectory(prefix="rdma-benchmark-") as folder:
        script = Path(__file__).with_name("lab_rank.py")
        try:
            result = rdma_lab.run(
                [sys.executable, str(script), "--repetitions", str(repetitions)],
                timeout_s=LIMIT_S,
                env={"OMP_NUM_THREADS": "1", "PYTHONPATH": _path()},
                memory_mib=1536,
                share=Path(folder),
            )
        except rdma_lab.LabError as error:
            return Result(rows=[missing("rdma over perftest", str(error), goal=BANDWIDTH)])
        output = Path(folder, "samples.json")
        if result.status or not output.exists():
            print(result.text, file=sys.stderr)
            what = f"the nodes ended with status {result.status}, see above"
            return Result(
                rows=[Row(what="rdma over perftest", value=None, goal=BANDWIDTH, note=what)]
            )
        found = json.loads(output.read_text(encoding="utf-8"))
    return rows(found["samples"])


def why_not() -> str | None:
    """Why the lab or our RDMA cannot run here."""
    module = extension.load()
    if module is None or not getattr(module, "has_rdma", lambda: True)():
        return "the extension was built without RDMA: bash prerequisite.sh --rdma"
    try:
        from tests.labs import rdma_lab
    except ImportError as error:
        return f"no lab: {error}"
    reason = rdma_lab.why_not()
    return None if reason is None else f"{reason} ({INSTALL})"


def rows(samples: dict[str, list[float]]) -> Result:
    """Compare the series of one boot."""
    sizes = sorted(
        int(name.split()[1])
        for name in samples
        if name.startswith("perftest ") and name[9:].isdigit()
    )
    table: list[Row] = [
        measured(
            f"rdma over ib_write_bw, {size_text(nbytes)}",
            ratios(samples[f"perftest {nbytes}"], samples[f"rdma {nbytes}"]),
            goal=BANDWIDTH,
            least=True,
        )
        for nbytes in sizes
    ]
    table.append(
        measured(
            "rdma, 1 KiB: half a round trip over ib_write_lat",
            ratios(samples["rdma latency"], samples["perftest latency"]),
            goal=LATENCY,
            note=f"ib_write_lat {1e6 * min(samples['perftest latency']):.4g} us at best",
        )
    )
    table += [
        measured(
            f"rdma over gloo/TCP, {size_text(sizes[0])}",
            ratios(samples[f"gloo {sizes[0]}"], samples[f"rdma {sizes[0]}"]),
        ),
        measured(
            "rdma over gloo/TCP, 1 KiB: half a round trip",
            ratios(samples["gloo latency"], samples["rdma latency"]),
        ),
    ]
    names = {"perftest": "ib_write_bw", "rdma": "rdma", "gloo": "gloo over TCP"}
    points = [
        Point(name=shown, pattern=PATTERN, nbytes=nbytes, seconds=samples[f"{name} {nbytes}"])
        for name, shown in names.items()
        for nbytes in sizes
    ]
    return Result(rows=table, points=points, facts={"rdma lab, samples": samples})


def _path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
