"""Both copies of a tied embedding on one rank: equal at the start and after every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.adaptive import accelerator

accelerator.install()

from megatron.adaptive.config.arguments import parse  # noqa: E402
from megatron.adaptive.gpt.placement import embedding_ranks, finalize_gradients, local_copies  # noqa: E402
from megatron.adaptive.schedule.placement import PlacementKind  # noqa: E402

from .conftest import SMALL  # noqa: E402

SHAPE = "--pipeline-model-parallel-size 2 --model-chunks 2 --pipeline-placement"
UNTIED = "--untie-embeddings-and-output-weights"
Build = Callable[..., list[Any]]


@pytest.mark.parametrize(
    ("layers", "kind", "expected"),
    [
        ("E*1tL", "loop", [7]),
        ("Et|tL", "loop", [7, 8]),
        ("Et|t|t|t|t|t|t|tL", "loop", [7, 10]),
        ("Et|t|t|tL", "v", [7]),
        ("Et|t|t|t|t|t|t|t|t|t|t|tL", "v", [7, 10]),
        ("Et|t|tm|L", "loop", [7, 9, 10]),
        (f"Et|t|tm|L {UNTIED}", "loop", [7, 9]),
        (f"Et|t|t|mL {UNTIED}", "loop", [7, 10]),
    ],
)
def test_the_group_holds_the_ranks_that_know_tokens(
    layers: str, kind: PlacementKind, expected: list[int]
) -> None:
    written = layers.split()[0]
    stages = written.count("|") + 1
    chunks = {8: 2, 12: 3}.get(stages, 2 if kind == "v" else 1)
    ranks = stages // chunks
    flags = (
        f"{SMALL} --num-layers {written.count('t')} --position-embedding-type rope "
        f"--pipeline-placement {kind} --pipeline-model-parallel-size {ranks} "
        f"--pipeline-model-parallel-layout {layers} {'--mtp-num-layers 1' * ('m' in written)}"
    )
    config = parse(flags.split(), world_size=ranks, last_wins=True)
    assert embedding_ranks(config)(list(range(7, 7 + ranks))) == expected


@pytest.mark.parametrize("half", ["", "--bf16"])
def test_copies_start_equal_and_only_one_counts(build: Build, half: str) -> None:
    chunks = build(f"{SHAPE} v {half}", ranks=2)
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
    assert local_copies(build(flags, pp_rank, 2)) is None


@pytest.mark.parametrize("half", ["", "--fp16"])
def test_both_get_the_sum_of_their_gradients(build: Build, half: str) -> None:
    chunks = build(f"{SHAPE} v {half}", ranks=2)
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
