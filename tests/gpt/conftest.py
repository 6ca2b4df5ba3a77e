"""Provides fixtures that build a trainer or parts of a model in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from tests.fixtures import corpus, make, tokenizer, worker, write_tokens

__all__ = ["corpus", "make", "tokenizer", "worker", "write_tokens"]

SMALL = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 --global-batch-size 2 --train-iters 1 "
    "--lr 1e-3 --mock-data --vocab-size 100"
)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Initializes megatron-core's parallel state for a job with one process."""
    from megatron.core import parallel_state, tensor_parallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture
def build() -> Iterator[Callable[..., list[Any]]]:
    """Yields a function that builds a rank's chunks, although there is only one process."""
    from megatron.core import parallel_state

    from megatron.adaptive import accelerator
    from megatron.adaptive.config.arguments import parse
    from megatron.adaptive.config.environment import Environment
    from megatron.adaptive.gpt.build_model import build_chunks, transformer_config
    from megatron.adaptive.gpt.initialize import end_job, start_job
    from megatron.adaptive.gpt.model_placement import placement_of

    device = accelerator.detect(0, backend="gloo")

    def run(flags: str = "", pp_rank: int = 0, ranks: int = 1) -> list[Any]:
        config = parse(f"{SMALL} {flags}".split(), world_size=ranks, last_wins=True)
        core = transformer_config(config, device)
        parallel_state.set_pipeline_model_parallel_rank(pp_rank)
        parallel_state.set_pipeline_model_parallel_world_size(ranks)
        try:
            return build_chunks(config, core, device, placement_of(config), 128)
        finally:
            parallel_state.set_pipeline_model_parallel_rank(None)
            parallel_state.set_pipeline_model_parallel_world_size(None)

    start_job(parse(SMALL.split(), world_size=1), Environment(), device)
    yield run
    end_job()
