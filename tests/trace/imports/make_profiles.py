"""Creates the profiles in this folder by running torch.profiler over gloo.

    torchrun --nproc-per-node 2 tests/trace/imports/make_profiles.py FOLDER

Each run has two processes. ``plain`` is a loop that names its forward and backward passes, as
Megatron-LM does. ``pipelining`` runs the interleaved 1F1B schedule of torch.distributed.pipelining,
as torchtitan does.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.profiler import ProfilerActivity, profile, record_function, schedule

MICROBATCHES, STEPS, WIDTH = 4, 3, 16


def plain(rank: int, net: torch.nn.Module) -> None:
    """Runs all forward passes and then all backward passes of a step, each in a named range."""
    kept = []
    for _ in range(MICROBATCHES):
        x = torch.randn(4, WIDTH)
        if rank:
            dist.recv(x, 0)
            x.requires_grad_()
        with record_function("forward_step"):
            y = net(x)
        if not rank:
            dist.send(y.detach(), 1)
        kept.append((x, y))
    for x, y in kept:
        gradient = torch.ones(4, WIDTH)
        if not rank:
            dist.recv(gradient, 1)
        with record_function("backward_step"):
            y.backward(gradient)
        if rank:
            dist.send(x.grad, 0)


def main(folder: Path) -> None:
    """Profiles the loops ``plain`` and ``pipelining``, and writes their profiles to ``folder``."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name in ("plain", "pipelining"):
        net = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        stages = [
            PipelineStage(part, 2 * chunk + rank, 4, torch.device("cpu"))
            for chunk, part in enumerate(net)
        ]
        pipeline = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=torch.nn.MSELoss())
        (folder / name).mkdir(parents=True, exist_ok=True)
        path = str(folder / name / f"rank{rank}.json.gz")
        with profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=1),
            on_trace_ready=lambda done, path=path: done.export_chrome_trace(path),
        ) as profiler:
            for _ in range(1 + STEPS):
                if name == "plain":
                    plain(rank, net[0])
                elif rank:
                    pipeline.step(target=torch.randn(4 * MICROBATCHES, WIDTH))
                else:
                    pipeline.step(torch.randn(4 * MICROBATCHES, WIDTH))
                for parameter in net.parameters():
                    if parameter.grad is not None:
                        dist.all_reduce(parameter.grad)
                optimizer.step()
                optimizer.zero_grad()
                profiler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]))
