"""One node of the RDMA lab: perftest, our RDMA channel and gloo over TCP take turns in one boot.

Started by ``lab.py`` on both nodes; node 0 writes the samples into ``LAB_SHARE``. Node 1 sends and
node 0 receives, as ``ib_write_bw`` does it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.channels import patterns  # noqa: E402
from benchmarks.channels.copies import Copies  # noqa: E402
from benchmarks.channels.worker import Member, torch_family  # noqa: E402
from tests.labs.rdma_lab import perftest  # noqa: E402

SIZES = perftest.BANDWIDTH_SIZES
LATENCY_BYTES = 1 << 10
_TOTAL_BYTES = 32 << 20
_CHANNEL_BYTES = 16 << 20
_ROUNDS = 500
_PORT = 23000
_LIMIT_S = 60.0


def options_for(nbytes: int, rank: int) -> dict[str, Any]:
    """A channel whose slots hold a message whole."""
    address = os.environ["LAB_ADDRS"].split(",")[rank]
    slots = max(4, min(32, _CHANNEL_BYTES // nbytes))
    return {"address": address, "slot_bytes": max(4096, nbytes), "slots": slots}


def from_python(member: Member, copies: Copies, rank: int) -> tuple[float, float]:
    """Median and mean seconds of half a round trip of a tensor.

    Each round is timed by the processor's counter, as perftest does it: the clock is a system call
    here, which takes a third of a message's time.
    """
    link: Any = member.connector("rdma", options_for(SIZES[0], rank), f"rdma {SIZES[0]}")
    payload = member.pool("ping", LATENCY_BYTES, 1)[0]
    link.half_round_trip_s(payload, 20)
    rounds, cycles = [], copies.cycles
    began_s, began = time.perf_counter(), cycles()
    for _ in range(_ROUNDS):
        start = cycles()
        link.round_trip(payload)
        rounds.append(cycles() - start)
    s_per_cycle = (time.perf_counter() - began_s) / (cycles() - began)
    half_s = s_per_cycle / 2
    return half_s * statistics.median(rounds), half_s * statistics.fmean(rounds)


def from_cpp(program: Path, port: int, rank: int) -> tuple[float, float]:
    """The same of the channel alone, by ``csrc/tests/rdma_measure.cc``; on node 1."""
    options = options_for(SIZES[0], rank)
    addresses = os.environ["LAB_ADDRS"].split(",")
    done = subprocess.run(
        [
            *(str(program), str(LATENCY_BYTES), str(_ROUNDS)),
            *(str(options["slots"]), str(options["slot_bytes"])),
        ],
        # Its rank 0 tells the result.
        env={
            **os.environ,
            "RANK": str(1 - rank),
            "LAB_ADDRS": ",".join(reversed(addresses)),
            "LAB_FIRST_PORT": str(port),
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=_LIMIT_S,
    )
    found = dict(re.findall(r"(median|mean) ([0-9.]+)", done.stdout))
    typical_us, mean_us = (float(found.get(name, "nan")) for name in ("median", "mean"))
    return 1e-6 * typical_us, 1e-6 * mean_us


def main() -> None:
    """Take turns; every sample is in seconds per message."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, required=True)
    arguments = parser.parse_args()
    rank = int(os.environ["RANK"])
    share = Path(os.environ["LAB_SHARE"])
    copies, program = Copies(share / "copies.so"), share / "rdma_measure"
    # The pattern's first rank sends.
    member = Member(1 - rank, torch_family(rank, "env://"), None, pool_bytes=0)
    samples: dict[str, list[float]] = defaultdict(list)

    def keep(name: str, seconds: float | None, repetition: int) -> None:
        if repetition >= 0 and seconds is not None:
            samples[name].append(seconds)

    started = time.monotonic()
    for repetition in range(-1, arguments.repetitions):
        for nbytes in SIZES:
            rate = perftest.bandwidth(nbytes, total_bytes=_TOTAL_BYTES)
            keep(f"perftest {nbytes}", nbytes / rate, repetition)
            count = max(8, _TOTAL_BYTES // nbytes)
            for name in ("rdma", "gloo"):
                seconds = patterns.stream(
                    member,
                    connector=name,
                    name=f"{name} {nbytes}",
                    nbytes=nbytes,
                    messages=count,
                    options=options_for(nbytes, rank) if name == "rdma" else {},
                )
                keep(f"{name} {nbytes}", seconds, repetition)
        typical_us, mean_us = perftest.latencies(LATENCY_BYTES, count=_ROUNDS)
        pairs = {"perftest": (1e-6 * typical_us, 1e-6 * mean_us)}
        if program.exists():
            pairs["channel"] = from_cpp(program, _PORT + 10 * (repetition + 1), rank)
        pairs["rdma"] = from_python(member, copies, rank)
        for name, (typical, mean) in pairs.items():
            keep(f"{name} latency", typical, repetition)
            keep(f"{name} mean latency", mean, repetition)
        seconds = patterns.half_round_trip(
            member,
            connector="gloo",
            name=f"gloo {SIZES[0]}",
            nbytes=LATENCY_BYTES,
            rounds=_ROUNDS,
            options={},
        )
        keep("gloo mean latency", seconds, repetition)
    seconds_in_all = time.monotonic() - started
    if rank == 1:
        result = Path(os.environ["LAB_SHARE"], "samples.json")
        new = result.with_suffix(".new")
        new.write_text(json.dumps({"samples": samples, "seconds": seconds_in_all}))
        new.rename(result)
    member.close()


if __name__ == "__main__":
    main()
