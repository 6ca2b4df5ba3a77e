"""Both copies of a tied embedding on one rank: equal at the start and after every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron.adaptive import accelerator

accelerator.install()

from megatron.core import parallel_state  # noqa: E402

from megatron.adaptive.config.arguments import parse  # noqa: E402
from megatron.adaptive.config.environment import Environment  # noqa: E402
from megatron.adaptive.gpt.initialize import end_job, start_job  # noqa: E402
from megatron.adaptive.gpt.model import build_chunks, transformer_config  # noqa: E402
from megatron.adaptive.gpt.placement import (  # noqa: E402
    embedding_ranks,
    finalize_gradients,
    local_copies,
    placement_of,
)
from megatron.adaptive.schedule.placement import Placement, PlacementKind  # noqa: E402

FLAGS = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --lr 1e-3 "
    "--max-position-embeddings 8 --micro-batch-size 1 --global-batch-size 2 --train-iters 1 "
    "--mock-data --vocab-size 100"
)
SHAPE = "--pipeline-model-parallel-size 2 --model-chunks 2 --pipeline-placement"
UNTIED = "--untie-embeddings-and-output-weights"
Build = Callable[..., list[Any]]


@pytest.fixture
def build() -> Iterator[Build]:
    """A function that builds the chunks of one rank of a pipeline of two, alone."""

    def run(flags: str, pp_rank: int = 0) -> list[Any]:
        config = parse(f"{FLAGS} {flags}".split(), world_size=2)
        parallel_state.set_pipeline_model_parallel_rank(pp_rank)
        parallel_state.set_pipeline_model_parallel_world_size(2)
        core = transformer_config(config, device)
        return build_chunks(config, core, device, placement_of(config), 128)

    device = accelerator.detect(0, backend="gloo")
    start_job(parse(FLAGS.split(), world_size=1), Environment(), device)
    try:
        yield run
    finally:
        parallel_state.set_pipeline_model_parallel_rank(None)
        parallel_state.set_pipeline_model_parallel_world_size(None)
        end_job()


@pytest.mark.parametrize(
    ("kind", "ranks", "chunks", "expected"),
    [
        ("loop", 1, 1, [7]),
        ("loop", 2, 1, [7, 8]),
        ("loop", 4, 2, [7, 10]),
        ("v", 2, 2, [7]),
        ("v", 4, 3, [7, 10]),
    ],
)
def test_the_group_holds_the_ranks_of_the_first_and_last_stage(
    kind: PlacementKind, ranks: int, chunks: int, expected: list[int]
) -> None:
    placement = Placement(num_ranks=ranks, num_chunks=chunks, kind=kind)
    assert embedding_ranks(placement)(list(range(7, 7 + ranks))) == expected


@pytest.mark.parametrize("half", ["", "--bf16"])
def test_copies_start_equal_and_only_one_counts(build: Build, half: str) -> None:
    chunks = build(f"{SHAPE} v {half}")
    copies = local_copies(chunks)
    assert copies is not None
    embedding, output = copies
    assert embedding is not output
    assert torch.equal(embedding, output)
    assert float(embedding.detach().abs().sum()) > 0
    # Otherwise norms would count it twice, and the distributed optimizer could cut it differently.
    assert (getattr(embedding, "shared", False), output.shared) == (False, True)
    assert embedding.shared_embedding
    assert output.shared_embedding


@pytest.mark.parametrize(
    ("flags", "pp_rank"),
    [(f"{SHAPE} v", 1), (f"{SHAPE} v {UNTIED}", 0), (f"{SHAPE} loop", 0), (f"{SHAPE} loop", 1)],
)
def test_elsewhere_there_is_one_copy_at_most(build: Build, flags: str, pp_rank: int) -> None:
    assert local_copies(build(flags, pp_rank)) is None


@pytest.mark.parametrize("half", ["", "--fp16"])
def test_both_get_the_sum_of_their_gradients(build: Build, half: str) -> None:
    chunks = build(f"{SHAPE} v {half}")
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    for number, parameter in enumerate(parameters, 1):
        parameter.main_grad.fill_(number)
    copies = local_copies(chunks)
    assert copies is not None
    expected = {id(parameter): number for number, parameter in enumerate(parameters, 1)}
    both = sum(expected[id(copy)] for copy in copies)
    expected |= {id(copy): both for copy in copies}
    finalize_gradients(chunks)
    for parameter in parameters:
        assert torch.all(parameter.main_grad == expected[id(parameter)])
