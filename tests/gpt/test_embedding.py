"""Tests which ranks exchange gradients of embeddings, for all placements of stages."""

from __future__ import annotations

import pytest

from megatron.adaptive import accelerator

accelerator.install()

from megatron.adaptive.config.arguments import parse  # noqa: E402
from megatron.adaptive.gpt.model_placement import embedding_ranks  # noqa: E402
from megatron.adaptive.schedule.stage_placement import PlacementKind  # noqa: E402

from .conftest import SMALL  # noqa: E402

UNTIED = "--untie-embeddings-and-output-weights"


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
