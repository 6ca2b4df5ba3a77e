"""Checks that each schedule gives the whole model's losses and gradients for each example model."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from megatron.adaptive.schedule.catalog import policy_names

from .ranks import Case, assert_same, load_example

# Each entry contains the name of a schedule and its number of chunks in these tests.
SCHEDULES: list[tuple[str, int | None]] = [
    ("1f1b", None),
    ("adaptive", None),
    ("adaptive", 2),
    ("bfc", None),
    ("breadth-first", 2),
    ("dfc", 2),
    ("gpipe", None),
    ("hinted", 2),
    ("interleaved", 2),
    ("interleaved-zb", 2),
    ("v-half", None),
    ("varuna", None),
    ("zb-h1", None),
    ("zb-v", None),
    ("combined-1f1b", 2),
    ("dualpipe-v", None),
    # The example programs define these schedules.
    ("examples.own_schedule.eager_1f1b:eager_1f1b", None),
    ("examples.own_schedule.oldest_first:oldest_first", 2),
]
TRIED = {name for name, _ in SCHEDULES}
# Also test schedules that are added to the table of policies later.
SCHEDULES += [(name, None) for name in policy_names() if name not in TRIED]
NO_DROPOUT: dict[str, Any] = {
    "mlp": {},
    "vit": {"dropout": 0.0},
    "gpt2": {"n_layer": 7, "n_embd": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "bert": {
        "num_hidden_layers": 7,
        "hidden_size": 32,
        "intermediate_size": 64,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
}


@functools.cache
def case_of(name: str) -> tuple[Case, Any]:
    if name in ("gpt2", "bert"):
        pytest.importorskip("transformers", reason="bash prerequisite.sh --examples")
    example = load_example(name)
    model = example.build(**NO_DROPOUT[name])
    case = Case(
        model,
        example.make_batch(8),
        1,
        loss=getattr(example, "loss", None),
        arguments=getattr(example, "ARGUMENTS", {}),
    )
    return case, case.expected()


# Every schedule runs with every model. The pipeline sizes 2 and 4 alternate.
CASES = [
    (name, (2, 4)[(index + turn) % 2], *scheduled)
    for turn, scheduled in enumerate(SCHEDULES)
    for index, name in enumerate(NO_DROPOUT)
]


@pytest.mark.parametrize(("name", "size", "schedule", "chunks"), CASES)
def test_stages_give_losses_and_gradients_of_the_whole(
    name: str, size: int, schedule: str, chunks: int | None
) -> None:
    case, (losses, gradients) = case_of(name)
    if case.forwards.training.num_segments < size * (chunks or 2):
        chunks = None
    staged_losses, staged = case.run(schedule, size, chunks)
    assert staged_losses == pytest.approx(losses, rel=1e-5)
    assert_same(staged, gradients)


@pytest.mark.parametrize("name", ["mlp", "vit", "gpt2", "bert"])
def test_evaluation_gives_the_losses_of_the_whole(name: str) -> None:
    case, _ = case_of(name)
    case.model.eval()
    with torch.no_grad():
        expected = [float(case.forward(case.microbatch(n))) for n in range(case.count)]
    case.model.train()
    assert case.run("1f1b", 2, forward_only=True)[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "way"), [("mlp", "record"), ("vit", "record"), ("gpt2", "record"), ("bert", "trace")]
)
def test_models_that_look_at_their_mask_are_traced(name: str, way: str) -> None:
    case, _ = case_of(name)
    assert case.forwards.way == way
