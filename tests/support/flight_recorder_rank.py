"""Calls collectives on one of three ranks. Rank 1 does not call the last collective.

Each rank writes a dump of torch's flight recorder to the folder ``DUMPS``.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

LIMIT_S = 60.0


def wait_for(holds: Callable[[], bool]) -> None:
    """Waits until ``holds()`` returns true."""
    end_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end_s, "timed out waiting for the other ranks"
        time.sleep(0.01)


def main() -> None:
    """Calls the collectives as one rank, and writes the dumps."""
    folder = Path(os.environ["DUMPS"])
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(4))
    if rank < 2:
        parts = [torch.ones(2), torch.ones(2)]
        dist.all_gather(parts, torch.ones(2), group=pair)
    if rank != 1:
        last = threading.Thread(target=dist.all_reduce, args=(torch.ones(3, 4),), daemon=True)
        last.start()
        wait_for(has_begun_last)
    wait_for(has_ended_others)
    for name, content in (("pickles", dump()), ("json", dump_as_json())):
        path = folder / name / f"nccl_trace_rank_{rank}"
        path.with_suffix(".new").write_bytes(content)
        path.with_suffix(".new").rename(path)
    wait_for(lambda: len(list(folder.glob("*/nccl_trace_rank_?"))) == 2 * count)
    os._exit(0)


def dump() -> bytes:
    """Returns the dump of torch's flight recorder in this process, in pickle format."""
    return bytes(_distributed_c10d._dump_fr_trace())


def dump_as_json() -> bytes:
    """Returns the dump of torch's flight recorder in this process, in JSON format."""
    text = _distributed_c10d._dump_fr_trace_json()
    return text if isinstance(text, bytes) else text.encode()


def has_begun_last() -> bool:
    """Returns whether this process has started the second all-reduce."""
    names = [entry["profiling_name"] for entry in pickle.loads(dump())["entries"]]
    return names.count("gloo:all_reduce") == 2


def has_ended_others() -> bool:
    """Returns whether gloo has completed all collectives except the second all-reduce."""
    return all(
        entry["retired"]
        for entry in pickle.loads(dump())["entries"]
        if (entry["profiling_name"], entry["collective_seq_id"]) != ("gloo:all_reduce", 2)
    )


main()
