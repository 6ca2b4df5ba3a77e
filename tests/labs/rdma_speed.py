"""Rows of RDMA between two small virtual machines with soft-RoCE; see ``tests/labs/rdma_lab``."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.channels import jobs
from benchmarks.channels.chart import Point, bandwidths, size_text
from benchmarks.channels.copies import NoCompilerError, build
from benchmarks.report import ROOT, Result, Row, measured, missing, ratios
from megatron.adaptive import extension
from tests.multiprocess.launch import environment

BANDWIDTH, LATENCY = 0.90, 1.2
MEASURE = "rdma_measure"
INSTALL = "bash prerequisite.sh --lab"
LIMIT_S = 900.0
PATTERN = "RDMA lab, stream"


def measure(repetitions: int) -> Result:
    """Boot two nodes and compare; where that cannot be, a row says why."""
    reason = why_not()
    if reason is not None:
        return Result(rows=[missing("rdma over perftest", reason, goal=BANDWIDTH, least=True)])
    from tests.labs import rdma_lab

    with tempfile.TemporaryDirectory(prefix="rdma-benchmark-") as folder:
        script = Path(__file__).with_name("rdma_speed_rank.py")
        try:
            build(Path(folder))
            built = build_channel()
            if built is not None:
                shutil.copy(built, Path(folder, MEASURE))
            result = rdma_lab.run(
                [sys.executable, str(script), "--repetitions", str(repetitions)],
                timeout_s=LIMIT_S,
                env={"OMP_NUM_THREADS": "1", "PYTHONPATH": environment()["PYTHONPATH"]},
                memory_mib=1536,
                share=Path(folder),
            )
        except (rdma_lab.LabError, NoCompilerError) as error:
            return Result(rows=[missing("rdma over perftest", str(error), goal=BANDWIDTH)])
        if result.status:
            print(result.text, file=sys.stderr)
            raise RuntimeError(f"the nodes ended with status {result.status}, see above")
        found = json.loads(Path(folder, "samples.json").read_text(encoding="utf-8"))
    return rows(found["samples"])


def latencies(samples: dict[str, list[float]]) -> list[Row]:
    """Half round trips over those of perftest, medians by medians and means by means."""
    what = "rdma, 1 KiB: half a round trip over ib_write_lat"
    table = []
    for name, shown in (("channel", "the C++ channel"), ("rdma", "from Python")):
        if f"{name} latency" not in samples:
            note = "needs a C++ compiler and libibverbs-dev"
            table.append(missing(f"{what}, {shown}", note, goal=LATENCY))
            continue
        for kind, goal in (("", LATENCY), ("mean ", None)):
            own, other = samples[f"{name} {kind}latency"], samples[f"perftest {kind}latency"]
            typical_us = 1e6 * statistics.median(own), 1e6 * statistics.median(other)
            table.append(
                measured(
                    f"{what}, {shown}, {kind.strip() or 'median'}",
                    ratios(own, other),
                    goal=goal,
                    note="{:.4g} us over {:.4g} us".format(*typical_us),
                )
            )
    return table


def build_channel() -> Path | None:
    """Build the program that measures the C++ channel; ``None`` where that cannot be."""
    from tests.cpp_tests import VERBS, CppTests

    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None or not Path("/usr/include/infiniband/verbs.h").exists():
        return None
    folder = ROOT / "build" / "cpp-tests-fast"
    made = CppTests(compiler, flags=(*VERBS, "-O2"), folder=folder)
    return made.build(MEASURE)


def kills(count: int) -> Result:
    """Kill ranks that are connected by RDMA, in a node; see :mod:`.kills`."""
    what = f"{count} kills at random moments, rdma"
    reason = why_not()
    if reason is not None:
        return Result(rows=[missing(what, reason, goal=0)])
    from tests.labs import rdma_lab

    # Of its own, for what is in the host's comes and goes.
    script = """
        mkdir /run/private
        TMPDIR=/run/private exec "$PYTHON" -m tests.soak.killed_ranks --kind rdma \\
            --count "$COUNT" > "$LAB_SHARE/result.json"
    """
    with tempfile.TemporaryDirectory(prefix="rdma-benchmark-") as folder:
        result = rdma_lab.run(
            ["sh", "-ec", f"cd {ROOT}\n{script}"],
            nodes=1,
            timeout_s=120.0 + 30.0 * count,
            env={
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": environment()["PYTHONPATH"],
                "PYTHON": sys.executable,
                "COUNT": str(count),
            },
            memory_mib=3000,
            share=Path(folder),
        )
        if result.status:
            raise RuntimeError(f"the node ended with status {result.status}: {result.text[-2000:]}")
        found = json.loads(Path(folder, "result.json").read_text(encoding="utf-8"))
    return Result(rows=jobs.kill_rows(found, what), facts={"kills, rdma": found})


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
    table += latencies(samples)
    table += [
        measured(
            f"rdma over gloo/TCP, {size_text(sizes[0])}",
            ratios(samples[f"gloo {sizes[0]}"], samples[f"rdma {sizes[0]}"]),
        ),
        measured(
            "rdma over gloo/TCP, 1 KiB: half a round trip",
            ratios(samples["gloo mean latency"], samples["rdma mean latency"]),
        ),
    ]
    names = {"perftest": "ib_write_bw", "rdma": "rdma", "gloo": "gloo over TCP"}
    points = [
        Point(name=shown, pattern=PATTERN, nbytes=nbytes, seconds=samples[f"{name} {nbytes}"])
        for name, shown in names.items()
        for nbytes in sizes
    ]
    print(bandwidths(points))
    return Result(rows=table, points=points, facts={"rdma lab, samples": samples})
