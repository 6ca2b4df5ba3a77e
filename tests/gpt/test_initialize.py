"""Tests that a process can join and leave several jobs one after another."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.adaptive import accelerator

accelerator.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402

from megatron.adaptive.config.arguments import parse  # noqa: E402
from megatron.adaptive.config.environment import Environment  # noqa: E402
from megatron.adaptive.gpt.initialize import TrainingJob, end_job, start_job  # noqa: E402

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data "
    "--vocab-size 100"
)
CHUNKED = "--pipeline-model-parallel-size 2 --pipeline-placement"


def join(flags: str = "") -> TrainingJob:
    config = parse(f"{FLAGS} {flags}".split(), world_size=1)
    return start_job(config, Environment(), accelerator.detect(0, backend="gloo"))


def test_a_process_of_its_own_needs_no_launcher() -> None:
    job = join()
    try:
        assert (job.rank, job.is_first, job.is_writer) == (0, True, True)
        assert dist.get_world_size() == dist.get_world_size(job.control_group) == 1
        assert job.control_group is not job.stop_group
        assert parallel_state.get_pipeline_model_parallel_world_size() == 1
        assert [process["pid"] for process in job.places] == [os.getpid()]
    finally:
        end_job()
    assert not dist.is_initialized()
    assert not parallel_state.is_initialized()


@pytest.mark.parametrize(
    ("flags", "world_size", "writer"),
    [
        ("", 1, 0),
        ("", 4, 3),
        ("--pipeline-model-parallel-size 2", 8, 7),
        (f"{CHUNKED} loop --model-chunks 2 --partition 2-0-0-0", 4, 3),
        # If a V has two chunks, the last stage is on the first pipeline rank. If it has three
        # chunks, the last stage is on the last pipeline rank.
        (f"{CHUNKED} v --model-chunks 2 --partition 2-0-0-0", 2, 0),
        (f"{CHUNKED} v --model-chunks 2 --partition 2-0-0-0", 4, 1),
        (f"{CHUNKED} v --model-chunks 2 --partition 2-0-0-0 --tensor-model-parallel-size 2", 8, 3),
        (f"{CHUNKED} v --model-chunks 3 --partition 2-0-0-0-0-0", 4, 3),
    ],
)
def test_one_rank_with_the_loss_writes_the_log(flags: str, world_size: int, writer: int) -> None:
    config = parse(f"{FLAGS} {flags}".split(), world_size=world_size)
    group: Any = None
    jobs = [
        TrainingJob(
            config=config,
            environment=Environment(rank=rank, world_size=world_size),
            accelerator=accelerator.detect(0, backend="gloo"),
            control_group=group,
            stop_group=group,
            places=[],
        )
        for rank in range(world_size)
    ]
    assert [job.rank for job in jobs if job.is_writer] == [writer]


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


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", False),  # The default dropout rate is 0.1.
        ("--attention-dropout 0", True),
        ("--attention-dropout 0 --variable-seq-lengths", False),
        ("--attention-dropout 0 --reset-attention-mask", False),
        ("--attention-dropout 0 --window-size 4,0", False),
    ],
)
def test_a_job_uses_cudnn_for_attention_only_if_it_is_suitable(flags: str, expected: bool) -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        join(flags)
        assert torch.backends.cuda.cudnn_sdp_enabled() is expected
    finally:
        end_job()
        torch.backends.cuda.enable_cudnn_sdp(before)
