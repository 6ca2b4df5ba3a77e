"""Checks losses and gradients of ``transformers`` models with added cut points.

The default run tests each family on two ranks with one placement. ``FAMILIES=all`` tests each
family on one, two and four ranks with all placements, which takes minutes.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatron.adaptive.modules.cut_points import CutPoint, describe
from megatron.adaptive.modules.recording import Forwards

from ..multiprocess.launch import TRANSFORMERS, run_ranks, tail
from .families import FAMILIES, Family, skip_older
from .ranks import Case

pytest.importorskip("transformers", reason="bash prerequisite.sh --examples")

ALL = os.environ.get("FAMILIES") == "all"
REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "cutpoint.md"


@dataclass(frozen=True, kw_only=True)
class Placing:
    """Describes how stages are placed, and whether backward passes are split."""

    schedule: str
    chunks: int | None
    split: bool | None


PLACINGS = {
    "loop": Placing(schedule="interleaved", chunks=2, split=None),
    "loop-split": Placing(schedule="interleaved-zb", chunks=2, split=None),
    "v": Placing(schedule="adaptive", chunks=2, split=False),
    "v-split": Placing(schedule="zb-v", chunks=None, split=None),
}
# Four ranks with two chunks each have eight stages, so the full matrix requires seven blocks with a
# cut point each.
BLOCKS, SIZES = (7, (1, 2, 4)) if ALL else (4, (2,))


def case_of(family: Family) -> Case:
    """Returns a test case with a batch and a model of ``family`` that is cut between its blocks."""
    model = family.build(BLOCKS)
    names = list(model.state_dict())
    CutPoint.between_blocks(model)
    assert list(model.state_dict()) == names
    batch = family.make_batch()
    if ALL:
        # Interleaved schedules require at least as many microbatches as ranks.
        batch = {name: torch.cat([entry, entry.flip(0)]) for name, entry in batch.items()}
    return Case(
        model,
        batch,
        2,
        slicing=family.slicing,
        arguments=dict(family.arguments),
        decisive_entries=family.decisive_entries,
    )


def require_same(
    stage_gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    """Checks that ``stage_gradients`` equal the gradients of the whole model.

    Some gradients are zero except for rounding, for example the gradients of key biases before a
    softmax. These must be similarly small, relative to the largest gradient.
    """
    largest = max(float(gradient.norm()) for gradient in expected.values())
    for name in {*stage_gradients, *expected}:
        norm = float(expected[name].norm()) if name in expected else 0.0
        gradient = stage_gradients.get(name, torch.zeros(()))
        error = float((gradient - expected.get(name, torch.zeros(()))).norm())
        assert error <= max(1e-4 * norm, 1e-7 * largest), f"{name}: {error:.2e} of {norm:.2e}"


def row_of(family: Family, case: Case) -> str:
    """Returns the row of ``family`` in the documentation's table of supported families.

    ``case`` contains the recording of the model.
    """
    lists = describe(case.forwards.training.cuts)
    places = ", ".join(f"`{part.split(' in ')[1]}`" for part in lists.split(", "))
    way = case.forwards.way if family.slicing == "auto" else f'`slicing="{family.slicing}"`'
    if family.decisive_entries:
        way += ", `decisive_entries`"
    return f"| {family.name} | `{family.model_class}` | {places} | {way} |"


@pytest.mark.parametrize("number", range(len(FAMILIES)), ids=[family.name for family in FAMILIES])
def test_a_family_trains_as_the_whole_model_does(number: int) -> None:
    family = FAMILIES[number]
    skip_older(family.name)
    case = case_of(family)
    assert row_of(family, case) in REFERENCE.read_text()
    losses, gradients = case.expected()
    chosen = list(PLACINGS.values())
    for placing in chosen if ALL else [chosen[number % len(chosen)]]:
        for size in SIZES:
            stage_losses, stage_gradients = case.run(
                placing.schedule, size, placing.chunks, split_backward=placing.split
            )
            assert stage_losses == pytest.approx(losses, rel=1e-5)
            require_same(stage_gradients, gradients)


ON_META = [
    "qwen3_moe",
    "t5",
    *(
        pytest.param(name, marks=pytest.mark.long)
        for name in ("gemma3", "qwen2_5_vl", "qwen3_vl", "smolvlm")
    ),
]


@pytest.mark.parametrize("name", [family.name for family in FAMILIES] if ALL else ON_META)
def test_a_family_is_recorded_without_weights(name: str) -> None:
    skip_older(name)
    family = next(family for family in FAMILIES if family.name == name)
    case = case_of(family)
    losses, gradients = case.expected()
    with torch.device("meta"):
        on_meta = family.build(BLOCKS)
    CutPoint.between_blocks(on_meta)
    forward = dataclasses.replace(case.forward, model=on_meta)
    case.forwards = Forwards.of(forward, case.microbatch(0), family.slicing)
    stage_losses, stage_gradients = case.run("interleaved", 2, 2)
    assert stage_losses == pytest.approx(losses, rel=1e-5)
    require_same(stage_gradients, gradients)


@pytest.mark.long
@pytest.mark.multiprocess
def test_families_train_on_two_processes(tmp_path: Path) -> None:
    """Checks that families with tied embeddings, two lists of blocks or images can be trained."""
    chosen = ["qwen2", "t5", "llava"]
    if ALL:
        chosen = [family.name for family in FAMILIES]
    log = tmp_path / "output.txt"
    worker = str(Path(__file__).with_name("family_worker.py"))
    status = run_ranks(
        [worker, str(tmp_path), *chosen],
        world_size=2,
        log=log,
        limit_s=600.0 if ALL else 120.0,
        modules=TRANSFORMERS,
    )
    assert status == 0, tail(log)
    done = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert done == [chosen, chosen]
    assert (
        "cut points: 2 in model.vision_tower.encoder.layers, 2 in model.language" in log.read_text()
    )
