"""Measures perftest and the RDMA transport alternately, on one node of the RDMA lab.

``rdma_speed.py`` starts this program on both nodes. Node 1 sends and node 0 receives, as with
``ib_write_bw``. Node 1 also writes the samples to ``LAB_SHARE``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from harness.link_times import half_round_trip_s, stream_s  # noqa: E402
from harness.transport_link import LIMIT_S, TransportLink  # noqa: E402
from tests.labs.rdma_lab import perftest  # noqa: E402

SIZES = perftest.BANDWIDTH_SIZES
LATENCY_BYTES = 1 << 10
_TOTAL_BYTES = 32 << 20
_CHANNEL_BYTES = 16 << 20
_ROUNDS, _WARMUPS = 500, 20
_PORT = 23000


def options_for(nbytes: int, rank: int) -> dict[str, Any]:
    """Returns options of a channel for node ``rank``, whose slots hold ``nbytes`` bytes each."""
    address = os.environ["LAB_ADDRS"].split(",")[rank]
    slots = max(4, min(32, _CHANNEL_BYTES // nbytes))
    return {"address": address, "slot_bytes": max(4096, nbytes), "slots": slots}


class Link(TransportLink):
    """Connects the two nodes with a channel of the RDMA transport.

    Args:
        rank: Index of this node.
        nbytes: Size of a message, in bytes.
    """

    def __init__(self, rank: int, nbytes: int) -> None:
        super().__init__("rdma", rank, **options_for(nbytes, rank))


def from_cpp(program: Path, port: int, rank: int) -> tuple[float, float]:
    """Runs ``program``, and returns the median and mean time per message of the C++ channel.

    The times are in seconds. The program on node ``rank`` uses the ports from ``port`` on.
    """
    options = options_for(SIZES[0], rank)
    addresses = os.environ["LAB_ADDRS"].split(",")
    done = subprocess.run(
        [
            *(str(program), str(LATENCY_BYTES), str(_ROUNDS)),
            *(str(options["slots"]), str(options["slot_bytes"])),
        ],
        # Swap the ranks, because rank 0 of ``rdma_measure`` prints the result, and node 1 needs
        # it.
        env={
            **os.environ,
            "RANK": str(1 - rank),
            "LAB_ADDRS": ",".join(reversed(addresses)),
            "LAB_FIRST_PORT": str(port),
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    figures = dict(re.findall(r"(median|mean) ([0-9.]+)", done.stdout))
    typical_us, mean_us = (float(figures.get(name, "nan")) for name in ("median", "mean"))
    return 1e-6 * typical_us, 1e-6 * mean_us


def main() -> None:
    """Measures perftest and the RDMA transport alternately, and stores all times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, required=True)
    arguments = parser.parse_args()
    rank = int(os.environ["RANK"])
    share = Path(os.environ["LAB_SHARE"])
    program = share / "rdma_measure"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=2)
    links = {nbytes: Link(rank, nbytes) for nbytes in SIZES}
    payloads = {nbytes: torch.ones(nbytes, dtype=torch.uint8) for nbytes in SIZES}
    ping = torch.ones(LATENCY_BYTES, dtype=torch.uint8)
    token = torch.zeros(8, dtype=torch.uint8)
    sends = rank == 1
    samples: dict[str, list[float]] = defaultdict(list)

    def keep(name: str, seconds: float | None, repetition: int) -> None:
        if repetition >= 0 and seconds is not None:
            samples[name].append(seconds)

    for repetition in range(-1, arguments.repetitions):
        for nbytes, link in links.items():
            rate = perftest.bandwidth(nbytes, total_bytes=_TOTAL_BYTES)
            keep(f"perftest {nbytes}", nbytes / rate, repetition)
            messages = max(8, _TOTAL_BYTES // nbytes)
            seconds = stream_s(link, [payloads[nbytes]], messages, token=token, sends=sends)
            keep(f"rdma {nbytes}", seconds, repetition)
        median_us, mean_us = perftest.latencies(LATENCY_BYTES, count=_ROUNDS)
        keep("perftest median", 1e-6 * median_us, repetition)
        keep("perftest mean", 1e-6 * mean_us, repetition)
        if program.exists():
            port = _PORT + 10 * (repetition + 1)
            keep("channel median", from_cpp(program, port, rank)[0], repetition)
        link = links[SIZES[0]]
        seconds = half_round_trip_s(link, ping, rounds=_ROUNDS, warmups=_WARMUPS, sends=sends)
        keep("latency", seconds, repetition)
    if sends:
        result = share / "samples.json"
        draft = result.with_suffix(".new")
        draft.write_text(json.dumps(samples))
        draft.rename(result)
    for link in links.values():
        link.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
