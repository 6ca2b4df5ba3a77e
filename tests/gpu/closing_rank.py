"""Runs one rank that repeatedly sets up a job, trains, and closes everything.

Usage: ``closing_rank.py RESULT FLAG ...``. In each repetition, the memory use of all ranks is
measured before and after closing. Rank 0 writes these pairs of measurements to ``RESULT`` as a JSON
list.

A measurement has the keys ``allocated_bytes`` (tensors on the GPU), ``device_bytes`` (GPU memory
that all programs use) and ``shared_bytes`` (mapped shared memory of the host). Without a GPU, the
first two are 0.
"""

from __future__ import annotations

import gc
import json
import re
import sys
import time
from pathlib import Path

from megatron.adaptive import accelerator

accelerator.install()
accelerator.quiet_libraries()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from megatron.adaptive.config.arguments import parse  # noqa: E402
from megatron.adaptive.config.environment import Environment  # noqa: E402
from megatron.adaptive.config.trainer import TrainerConfig  # noqa: E402
from megatron.adaptive.gpt.setup import build_run, make_loader  # noqa: E402
from megatron.adaptive.gpt.train_step import Step  # noqa: E402
from tests.multiprocess.worker import Meshes, connect  # noqa: E402

TIMES, STEPS = 4, 2


def train_once(meshes: Meshes, config: TrainerConfig) -> dict[str, int]:
    """Builds model, channels and data for ``config``, trains a few steps, and closes everything.

    Returns:
        Number of bytes that this process used before closing, for each kind of memory.
    """
    job = meshes.join(config)
    run = build_run(job)
    step = Step(run)
    loader = make_loader(run, run.samples.train, 0)
    for iteration in range(1, STEPS + 1):
        microbatches = None if loader is None else loader.step(config.num_microbatches)
        step.train(microbatches, config.num_microbatches, iteration)
    before = held(job.accelerator.is_cuda)
    if loader is not None:
        loader.close()
    meshes.leave(job, run)
    return before


def give_back(is_cuda: bool) -> None:
    """Frees GPU memory that torch caches, if ``is_cuda`` is true."""
    gc.collect()
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def held(is_cuda: bool) -> dict[str, int]:
    """Returns the number of bytes of each kind of memory, as listed in the module's docstring."""
    give_back(is_cuda)
    maps_text = Path("/proc/self/smaps").read_text(encoding="utf-8")
    sizes = {"allocated_bytes": 0, "device_bytes": 0, "shared_bytes": 0}
    maps = re.findall(
        r"^\S+ \S+ \S+ \S+ \S+ +(/dev/shm/\S+|/memfd:\S+).*\nSize: +(\d+)", maps_text, re.M
    )
    sizes["shared_bytes"] = sum(1024 * int(size) for _, size in maps)
    if is_cuda:
        free, total = torch.cuda.mem_get_info()
        sizes["allocated_bytes"] = torch.cuda.memory_allocated()
        sizes["device_bytes"] = total - free
    return sizes


def meet(store: dist.Store, key: str, times: int, ranks: int) -> None:
    """Waits until each of ``ranks`` ranks has called this function ``times`` times with ``key``."""
    store.add(key, 1)
    end_s = time.monotonic() + 60
    while store.add(key, 0) < times * ranks:
        if time.monotonic() > end_s:
            raise RuntimeError(
                f"{key}: timed out after 60 s with {store.add(key, 0)} of {times * ranks} calls"
            )
        time.sleep(0.01)


def main() -> None:
    target, *flags = sys.argv[1:]
    torch.set_num_threads(1)
    environment = Environment.read()
    config = parse(flags, world_size=environment.world_size, last_wins=True)
    store = connect(environment)
    meshes = Meshes(store, environment)
    is_cuda = torch.cuda.is_available()
    seen = []
    for _ in range(TIMES):
        before = train_once(meshes, config)
        give_back(is_cuda)
        # Measure only after all ranks have closed their jobs, because they share the GPU.
        meet(store, "left", len(seen) + 1, environment.world_size)
        seen.append((before, held(is_cuda)))
        meet(store, "measured", len(seen), environment.world_size)
    store.set(f"seen {environment.rank}", json.dumps(seen))
    if environment.rank == 0:
        ranks = [json.loads(store.get(f"seen {n}")) for n in range(environment.world_size)]
        total = [
            [
                {name: sum(report[name] for report in same) for name in same[0]}
                for same in zip(*pairs, strict=True)
            ]
            for pairs in zip(*ranks, strict=True)
        ]
        Path(target).write_text(json.dumps(total), encoding="utf-8")
    meet(store, "read", 1, environment.world_size)


if __name__ == "__main__":
    main()
