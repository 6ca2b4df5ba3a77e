"""One node of the RDMA lab: perftest, our RDMA channel and gloo over TCP take turns in one boot.

Started by ``lab.py`` on both nodes; node 0 writes the samples into ``LAB_SHARE``. Node 1 sends and
node 0 receives, as ``ib_write_bw`` does it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.channels import patterns  # noqa: E402
from benchmarks.channels.worker import Member, TorchFamily  # noqa: E402
from tests.labs.rdma_lab import perftest  # noqa: E402

SIZES = perftest.BANDWIDTH_SIZES
LATENCY_BYTES = 1 << 10
_TOTAL_BYTES = 32 << 20
_CHANNEL_BYTES = 16 << 20
_ROUNDS = 300


def options_for(nbytes: int, rank: int) -> dict[str, Any]:
    """A channel whose slots hold a message whole."""
    address = os.environ["LAB_ADDRS"].split(",")[rank]
    slots = max(4, min(32, _CHANNEL_BYTES // nbytes))
    return {"address": address, "slot_bytes": max(4096, nbytes), "slots": slots}


def main() -> None:
    """Take turns; every sample is in seconds per message."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, required=True)
    arguments = parser.parse_args()
    rank = int(os.environ["RANK"])
    # The pattern's first rank sends.
    family = TorchFamily(1 - rank, "env://", own_rank=rank)
    member = Member(1 - rank, family, None, pool_bytes=0)
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
        keep("perftest latency", 1e-6 * perftest.latency(LATENCY_BYTES), repetition)
        for name in ("rdma", "gloo"):
            seconds = patterns.half_round_trip(
                member,
                connector=name,
                name=f"{name} {SIZES[0]}",
                nbytes=LATENCY_BYTES,
                rounds=_ROUNDS,
                options=options_for(SIZES[0], rank) if name == "rdma" else {},
            )
            keep(f"{name} latency", seconds, repetition)
    seconds_in_all = time.monotonic() - started
    if rank == 1:
        result = Path(os.environ["LAB_SHARE"], "samples.json")
        new = result.with_suffix(".new")
        new.write_text(json.dumps({"samples": samples, "seconds": seconds_in_all}))
        new.rename(result)
    member.close()


if __name__ == "__main__":
    main()
