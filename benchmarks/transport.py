"""Compares transports between two processes with memcpy, gloo, MPI and UCX.

    python benchmarks/transport.py [--quick] [--part PART ...] [--json FILE] [--chart FILE]

Parts: ``messages`` measures the bandwidth of tensors that are not in any cache, and half the round
trip of a small tensor. ``1f1b`` measures the time that messages add to a computing pipeline.
``ranks`` trains a small GPT on more ranks than CPUs. Every result is the median of at least five
repetitions. Goals are relative to limits of the machine that are measured in the same run: a
memcpy, and the time to wake a sleeping thread. MPI and UCX are included if they are installed
(``bash prerequisite.sh --benchmarks``). ``python -m tests.labs.rdma_speed`` measures RDMA. Exits
with status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import gpt_steps  # noqa: E402
from benchmarks.channels.copies import Copies, NoCompilerError, build  # noqa: E402
from harness.processes import environment, fork_ranks  # noqa: E402
from harness.report import Result, Row, measure, measured, missing, parser_of, ratios  # noqa: E402
from megatron.adaptive import extension  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
COMPARED = (MIB, 4 * MIB, 16 * MIB)
LEAST_OF_MEMCPY = 0.9
MOST_OF_WAKE = 1.0
"""Maximum time of a small message, as a multiple of the time to wake a sleeping thread."""
MOST_COPIES = 4.0
"""Maximum time that messages add to a microbatch, relative to the time to copy a message."""
MOST_OVER_GLOO = 1.02
"""Maximum step time relative to the step time with gloo, with more ranks than CPUs."""
MICROBATCHES = 32
STREAMS = ("memcpy plain", "memcpy streaming", "shm", "tcp", "gloo")
LIMIT_S = 900.0
# Without the value `any`, Open MPI uses UCX only on machines with an RDMA device.
_UCX = "--mca opal_common_ucx_tls any --mca opal_common_ucx_devices any"
LIBRARIES = {"mpi": "--mca pml ob1 --mca btl self,vader", "ucx": f"--mca pml ucx {_UCX}"}
"""Options that make Open MPI use either its own shared-memory transport or that of UCX."""

Samples = Mapping[str, Sequence[float]]


def measure_mpi(plan: dict[str, Any]) -> tuple[dict[str, Samples], str]:
    """Runs MPI and UCX, and returns their samples and the reason why samples are missing.

    ``plan`` contains the settings of the processes. The samples are keyed by library. The reason is
    empty if no samples are missing.
    """
    mpiexec = shutil.which("mpiexec")
    if mpiexec is None or importlib.util.find_spec("mpi4py") is None:
        return {}, "Open MPI with mpi4py is not installed; run bash prerequisite.sh --benchmarks"
    start = [mpiexec, *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    start += "--oversubscribe --bind-to none -n 2".split()
    samples: dict[str, Samples] = {}
    reason = ""
    for name, options in LIBRARIES.items():
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder, "samples.json")
            module = [sys.executable, "-m", "benchmarks.channels.pair", name, json.dumps(plan)]
            done = subprocess.run(
                [*start, *options.split(), *module, str(output)],
                cwd=ROOT,
                env=environment(),
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
            if done.returncode or not output.exists():
                reason = f"{name}: {done.stderr.strip()[-200:]}"
                continue
            samples[name] = json.loads(output.read_text(encoding="utf-8"))
    return samples, reason


def messages(options: argparse.Namespace, library: Path, cpus: Sequence[int]) -> Result:
    """Compares the speed of streams and round trips, for the part ``messages``.

    Args:
        options: Parsed command line.
        library: Path of the compiled copy functions.
        cpus: CPUs of the two processes.
    """
    plan = {
        "sizes": SIZES,
        "repetitions": options.repetitions,
        "cpus": list(cpus),
        "copies": str(library),
    }
    samples: Samples = fork_ranks("benchmarks.channels.pair", 2, LIMIT_S, plan)
    peers, reason = measure_mpi(plan)
    print(bandwidths({"": samples, **peers}))
    if options.chart is not None:
        draw(samples, options.chart)
    rows = [*_of_memcpy(samples), *_over_peers(samples, peers, reason), *_pings(samples, peers)]
    copies = Copies(library)
    wake_s = copies.wake_s(*cpus)
    half_s = statistics.median(samples["shm ping"])
    note = f"{1e6 * half_s:.3g} us over {1e6 * wake_s:.3g} us"
    title = "shm, 1 KiB: half a round trip over a wake of a sleeping thread"
    rows.append(Row(what=title, value=half_s / wake_s, goal=MOST_OF_WAKE, note=note))
    title = "cache line from one processor to the other"
    rows.append(Row(what=title, value=1e9 * copies.cache_line_s(*cpus), unit="ns"))
    return Result(rows=rows, facts={"samples": {"torch": samples, **peers}})


def _memcpy(samples: Samples, nbytes: int) -> Sequence[float]:
    """Returns the seconds per copy of the fastest method to copy ``nbytes`` bytes."""
    kinds = [samples[f"memcpy {kind} {nbytes}"] for kind in ("plain", "streaming")]
    return min(kinds, key=statistics.median)


def _of_memcpy(samples: Samples) -> list[Row]:
    return [
        measured(
            f"shm, {size_text(nbytes)}: speed of the faster memcpy",
            ratios(_memcpy(samples, nbytes), samples[f"shm {nbytes}"]),
            goal=LEAST_OF_MEMCPY,
            least=True,
            note=f"{1e3 * statistics.median(samples[f'shm {nbytes}']):.3g} ms",
        )
        for nbytes in (MIB, 4 * MIB, 16 * MIB, 64 * MIB)
    ]


def _over_peers(own_samples: Samples, peers: Mapping[str, Samples], reason: str) -> list[Row]:
    """Returns rows that compare this project's transport ``shm`` with other libraries.

    ``own_samples`` and ``peers`` contain the samples of this project and of the libraries.
    ``reason`` states why libraries are missing.
    """
    rows = []
    for nbytes in COMPARED:
        shm, size = own_samples[f"shm {nbytes}"], size_text(nbytes)
        over = ratios(own_samples[f"gloo {nbytes}"], shm)
        rows.append(measured(f"shm over gloo, {size}", over, goal=1.0, least=True))
        title = f"shm over the best of MPI and UCX, {size}"
        if not peers:
            rows.append(missing(title, reason, goal=1.0, least=True))
            continue
        # Each library ran in its own processes, so compare its speed with that of a memcpy in the
        # same processes.
        speed = {
            name: statistics.median(samples[f"{name} {nbytes}"])
            / statistics.median(_memcpy(samples, nbytes))
            for name, samples in peers.items()
        }
        best = min(speed, key=lambda name: speed[name])
        of_memcpy = statistics.median(shm) / statistics.median(_memcpy(own_samples, nbytes))
        value = speed[best] / of_memcpy
        rows.append(Row(what=title, value=value, goal=1.0, least=True, note=best))
    return rows


def _pings(own_samples: Samples, peers: Mapping[str, Samples]) -> list[Row]:
    series = {name: own_samples[f"{name} ping"] for name in ("shm", "tcp", "gloo")}
    series |= {name: samples[f"{name} ping"] for name, samples in peers.items()}
    return [
        measured(f"{name}, 1 KiB: half a round trip", [1e6 * s for s in seconds], unit="us")
        for name, seconds in series.items()
    ]


def one_f_one_b(options: argparse.Namespace, library: Path, cpus: Sequence[int]) -> Result:
    """Measures how much time messages add to a microbatch, for the part ``1f1b``.

    Args:
        options: Parsed command line.
        library: Path of the compiled copy functions.
        cpus: CPUs of the two ranks.
    """
    plan = {
        "nbytes": MIB,
        "microbatches": MICROBATCHES,
        "repetitions": 5 * options.repetitions,
        "cpus": list(cpus),
    }
    steps_s: Samples = fork_ranks("benchmarks.channels.pipeline_step", 2, LIMIT_S, plan)
    ideal_s = statistics.median(steps_s["alone"]) * (MICROBATCHES + 1) / MICROBATCHES
    rows = []
    added_s = {}
    for name in ("shm", "tcp", "gloo"):
        added_s[name] = (statistics.median(steps_s[name]) - ideal_s) / MICROBATCHES
        title = f"{name}: added to a microbatch of 1F1B, 1 MiB each way"
        note = f"{1e3 * ideal_s / (MICROBATCHES + 1):.3g} ms of compute per microbatch"
        rows.append(Row(what=title, value=1e3 * added_s[name], unit="ms", note=note))
    copy_s = Copies(library).copy_s(MIB)
    title = "shm: the same in copies of 1 MiB"
    note = f"a copy takes {1e3 * copy_s:.3g} ms"
    rows.append(Row(what=title, value=added_s["shm"] / copy_s, goal=MOST_COPIES, note=note))
    return Result(rows=rows, facts={"1f1b": steps_s})


def more_ranks(options: argparse.Namespace) -> Result:
    """Measures steps with more ranks than CPUs, for the part ``ranks``."""
    job = gpt_steps.OVER_TRANSPORTS
    count, processors = gpt_steps.ALL_JOBS[job].ranks, len(os.sched_getaffinity(0))
    times = gpt_steps.measure(job, 10 if options.quick else 30, limit_s=600.0)["times"]
    title = f"{count} ranks of a small GPT: step time, shm over gloo"
    note = f"{processors} processors; gloo {1e3 * statistics.median(times['gloo']):.4g} ms"
    quotients = ratios(times["shm"], times["gloo"])
    shm = measured(title, quotients, goal=MOST_OVER_GLOO, note=note)
    tcp = measured("the same, tcp over gloo", ratios(times["tcp"], times["gloo"]))
    return Result(rows=[shm, tcp])


def size_text(nbytes: int) -> str:
    """Returns the size ``nbytes`` as text with a unit, such as ``64 KiB``."""
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def bandwidths(series: Mapping[str, Samples]) -> str:
    """Returns bandwidths in GB/s as a Markdown table with a row per link and a column per size.

    ``series`` contains samples, keyed by library. The key of the samples of this project and of
    gloo is an empty string.
    """
    lines = [
        f"| stream, GB/s | {' | '.join(map(size_text, SIZES))} |",
        f"|---|{'---|' * len(SIZES)}",
    ]
    for name in [*STREAMS, *(peer for peer in series if peer)]:
        samples = series[name if name in series else ""]
        cells = [f"{n / statistics.median(samples[f'{name} {n}']) / 1e9:.3g}" for n in SIZES]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(samples: Samples, path: Path) -> None:
    """Draws the bandwidth for each message size as a chart, and saves the chart to ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 5), layout="constrained")
    for name in STREAMS:
        speeds = [n / statistics.median(samples[f"{name} {n}"]) / 1e9 for n in SIZES]
        style = "--" if name.startswith("memcpy") else "-"
        axes.plot(SIZES, speeds, marker="o", markersize=4, linestyle=style, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(SIZES, [size_text(size) for size in SIZES])
    axes.set_yscale("log")
    axes.set_xlabel("size of a message")
    axes.set_ylabel("GB/s")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> int:
    """Measures the parts and prints the results.

    Returns 1 if a goal is missed, 2 if nothing can be measured, and otherwise 0.
    """
    parser = parser_of(__doc__, ("messages", "1f1b", "ranks"), "fewer repetitions")
    parser.add_argument("--chart", type=Path, help="PNG file for a chart of bandwidths")
    parser.add_argument(
        "--repetitions", type=int, help="number of repetitions of each measurement, at least 5"
    )
    options = parser.parse_args()
    options.repetitions = max(5, options.repetitions or (5 if options.quick else 9))
    if extension.load() is None:
        print(f"error: no C++ extension: {extension.why_missing()}", file=sys.stderr)
        return 2
    allowed = sorted(os.sched_getaffinity(0))
    cpus = (allowed[0], allowed[min(1, len(allowed) - 1)])
    with tempfile.TemporaryDirectory() as folder:
        try:
            library = build(Path(folder))
        except NoCompilerError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        parts = {
            "messages": partial(messages, options, library, cpus),
            "1f1b": partial(one_f_one_b, options, library, cpus),
            "ranks": partial(more_ranks, options),
        }
        return measure(parts, options)


if __name__ == "__main__":
    sys.exit(main())
