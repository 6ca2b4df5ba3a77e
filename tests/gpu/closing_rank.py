"""Ranks that set up a job, train and take everything down, several times.

Usage: ``closing_rank.py RESULT FLAG ...``. Rank 0 writes what all ranks together held after each
time, as a JSON list of objects with ``allocated_bytes``, ``device_bytes`` and ``shared_bytes``:
tensors on the GPU, all that is taken of it, and mapped shared memory of the host. The first two are
0 without a GPU.
"""

from __future__ import annotations

import gc
import json
import re
import sys
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
from megatron.adaptive.gpt.step import Step  # noqa: E402
from tests.multiprocess.worker import Meshes, connect  # noqa: E402

TIMES, STEPS = 4, 2


def train_once(meshes: Meshes, config: TrainerConfig) -> None:
    """Sets up the model, its channels and its data, takes some steps, and takes all of it down."""
    job = meshes.join(config)
    run = build_run(job)
    step = Step(run)
    loader = make_loader(run, run.samples.train, 0)
    for iteration in range(1, STEPS + 1):
        microbatches = None if loader is None else loader.step(config.num_microbatches)
        step.train(microbatches, config.num_microbatches, iteration)
    if loader is not None:
        loader.close()
    meshes.leave(job, run)


def held(is_cuda: bool) -> dict[str, int]:
    """Returns the bytes that this process holds; those of the whole GPU, which ranks may share."""
    gc.collect()
    rollup = Path("/proc/self/smaps").read_text(encoding="utf-8")
    found = {"allocated_bytes": 0, "device_bytes": 0, "shared_bytes": 0}
    maps = re.findall(
        r"^\S+ \S+ \S+ \S+ \S+ +(/dev/shm/\S+|/memfd:\S+).*\nSize: +(\d+)", rollup, re.M
    )
    found["shared_bytes"] = sum(1024 * int(size) for _, size in maps)
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        found["allocated_bytes"] = torch.cuda.memory_allocated()
        found["device_bytes"] = total - free
    return found


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
        train_once(meshes, config)
        everyone: list[dict[str, int]] = [{} for _ in range(environment.world_size)]
        dist.barrier()  # a rank that is behind still holds its part
        dist.all_gather_object(everyone, held(is_cuda))
        seen.append({name: sum(rank[name] for rank in everyone) for name in everyone[0]})
    if environment.rank == 0:
        Path(target).write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":
    main()
