"""Joining the job and leaving it, more than once in a process."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from megatron.adaptive import accelerator

accelerator.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402

from megatron.adaptive.config.arguments import parse  # noqa: E402
from megatron.adaptive.config.environment import Environment  # noqa: E402
from megatron.adaptive.training.initialize import Job, end_job, start_job  # noqa: E402

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data "
    "--vocab-size 100"
)


def join(flags: str = "") -> Job:
    config = parse(f"{FLAGS} {flags}".split(), world_size=1)
    return start_job(config, Environment(), accelerator.detect(0, backend="gloo"))


def test_a_process_of_its_own_needs_no_launcher() -> None:
    job = join()
    try:
        assert (job.rank, job.is_first, job.is_last) == (0, True, True)
        assert dist.get_world_size() == dist.get_world_size(job.control_group) == 1
        assert job.control_group is not job.stop_group
        assert parallel_state.get_pipeline_model_parallel_world_size() == 1
        assert [place["pid"] for place in job.places] == [os.getpid()]
    finally:
        end_job()
    assert not dist.is_initialized()
    assert not parallel_state.is_initialized()


def draws() -> list[float]:
    with tensor_parallel.get_cuda_rng_tracker().fork():
        return [float(torch.rand(())), float(torch.rand(()))]


@pytest.mark.parametrize("seed", [1, 77])
def test_the_seed_sets_every_generator(seed: int) -> None:
    seen = []
    for number in (seed, seed, seed + 1):
        join(f"--seed {number}")
        seen.append([*draws(), float(torch.rand(()))])
        end_job()
    assert seen[0] == seen[1]
    assert not set(seen[0]) & set(seen[2])
