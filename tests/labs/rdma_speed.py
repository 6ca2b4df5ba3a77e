"""Compares the RDMA transport with perftest between two small virtual machines (``rdma_lab``).

The part ``kills`` kills ranks that are connected by RDMA on one machine.

python -m tests.labs.rdma_speed [--quick] [--part PART ...] [--json FILE]
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from harness.report import Result, Row, measured, missing, parser_of, ratios
from harness.report import measure as run_parts
from megatron.adaptive import extension
from tests.cpp_tests import VERBS, CppTests
from tests.labs import rdma_lab
from tests.multiprocess.launch import ROOT, environment
from tests.soak import killed_ranks

BANDWIDTH, LATENCY = 0.90, 1.2
"""Minimum bandwidth and maximum latency of the RDMA transport, relative to perftest."""
PROGRAM = "rdma_measure"
LIMIT_S = 900.0


def why_not() -> str | None:
    """Returns why the lab or the RDMA transport cannot run here, or ``None`` if both can run."""
    module = extension.load()
    if module is None or not getattr(module, "has_rdma", lambda: True)():
        return "the extension was built without RDMA: run bash prerequisite.sh --rdma"
    reason = rdma_lab.why_not()
    return None if reason is None else f"{reason} (bash prerequisite.sh --lab)"


def measure(repetitions: int) -> Result:
    """Measures perftest and the RDMA transport ``repetitions`` times each, on two nodes of the lab.

    Raises:
        RuntimeError: The nodes have failed.
    """
    reason = why_not()
    if reason is not None:
        return Result(rows=[missing("rdma over perftest", reason, goal=BANDWIDTH, least=True)])
    with tempfile.TemporaryDirectory(prefix="rdma-speed-") as folder:
        program = build_channel()
        if program is not None:
            shutil.copy(program, Path(folder, PROGRAM))
        script = Path(__file__).with_name("rdma_speed_rank.py")
        result = rdma_lab.run(
            [sys.executable, str(script), "--repetitions", str(repetitions)],
            timeout_s=LIMIT_S,
            env={"OMP_NUM_THREADS": "1", "PYTHONPATH": environment()["PYTHONPATH"]},
            memory_mib=1536,
            share=Path(folder),
        )
        if result.status:
            raise RuntimeError(
                f"the nodes exited with status {result.status}: {result.text[-2000:]}"
            )
        samples = json.loads(Path(folder, "samples.json").read_text(encoding="utf-8"))
    return Result(rows=rows_of(samples), facts={"samples": samples})


def build_channel() -> Path | None:
    """Builds the program that measures the C++ channel. Returns ``None`` if this is impossible."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None or not Path("/usr/include/infiniband/verbs.h").exists():
        return None
    folder = ROOT / "build" / "cpp-tests-fast"
    return CppTests(compiler, flags=(*VERBS, "-O2"), folder=folder).build(PROGRAM)


def rows_of(samples: dict[str, list[float]]) -> list[Row]:
    """Returns a table row with the bandwidth for each message size, and a row with the latency.

    Args:
        samples: Measured times in seconds per message, keyed by the name of the measurement.
    """
    sizes = sorted(int(name.split()[1]) for name in samples if re.fullmatch(r"rdma \d+", name))
    rows = [
        measured(
            f"rdma over ib_write_bw, {nbytes >> 10} KiB",
            ratios(samples[f"perftest {nbytes}"], samples[f"rdma {nbytes}"]),
            goal=BANDWIDTH,
            least=True,
        )
        for nbytes in sizes
    ]
    for series, rival, shown, goal in (
        ("channel median", "perftest median", "the C++ channel, median", LATENCY),
        ("latency", "perftest mean", "from Python, mean", None),
    ):
        title = f"rdma, 1 KiB: half a round trip over ib_write_lat, {shown}"
        if series not in samples:
            rows.append(missing(title, "needs a C++ compiler and libibverbs-dev", goal=goal))
            continue
        times_us = [1e6 * statistics.median(samples[name]) for name in (series, rival)]
        note = "{:.4g} us over {:.4g} us".format(*times_us)
        rows.append(measured(title, ratios(samples[series], samples[rival]), goal=goal, note=note))
    return rows


def kills(count: int) -> Result:
    """Kills ranks that are connected by RDMA, ``count`` times. See ``tests.soak.killed_ranks``."""
    title = f"{count} kills at random moments, rdma"
    reason = why_not()
    if reason is not None:
        return Result(rows=[missing(title, reason, goal=0)])
    # The trials need a private temporary folder, because other programs also use that of the host.
    script = """
        mkdir /run/private
        TMPDIR=/run/private exec "$PYTHON" -m tests.soak.killed_ranks --raw rdma \\
            --count "$COUNT" > "$LAB_SHARE/result.json"
    """
    with tempfile.TemporaryDirectory(prefix="rdma-kills-") as folder:
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
            raise RuntimeError(
                f"the node exited with status {result.status}: {result.text[-2000:]}"
            )
        outcomes = json.loads(Path(folder, "result.json").read_text(encoding="utf-8"))
    return Result(rows=killed_ranks.rows_of(outcomes, title), facts={"kills, rdma": outcomes})


def main() -> int:
    """Runs the selected parts and prints the results. Returns 1 if a goal is missed."""
    options = parser_of(
        __doc__, ("speed", "kills"), ("three repetitions and three kills")
    ).parse_args()
    parts = {
        "speed": lambda: measure(3 if options.quick else 5),
        "kills": lambda: kills(3 if options.quick else 100),
    }
    return run_parts(parts, options)


if __name__ == "__main__":
    sys.exit(main())
