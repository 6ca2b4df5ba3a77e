"""Shares the fixtures of tests that build a trainer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.fixtures import corpus, make, tokenizer, worker, write_tokens

__all__ = ["corpus", "make", "tokenizer", "worker", "write_tokens"]


@pytest.fixture
def one_rank() -> Iterator[None]:
    """megatron-core's parallel state of a single process."""
    from megatron.core import parallel_state, tensor_parallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
