"""Tests that cut points are added to models that have no cut points."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules import CutPoint
from megatron.adaptive.modules.cut_points import cut_points_of, describe

from .ranks import Case, assert_same

WIDE = 8


def layer(width: int = WIDE) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


def layers(count: int, width: int = WIDE) -> nn.ModuleList:
    return nn.ModuleList(layer(width) for _ in range(count))


class Block(nn.Module):
    """Block that contains a nested list, which must be ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = layers(2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for part in self.parts:
            x = part(x)
        return {"x": x}


class Model(nn.Module):
    """Model that calls its modules, including those in its module lists, one after another."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.names = list(modules)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            module = getattr(self, name)
            for part in module if isinstance(module, nn.ModuleList) else [module]:
                x = part(x)
                x = x["x"] if isinstance(x, dict) else x
        return x.square().mean()


class Stage(nn.Module):
    """Stage of a model that works at several resolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks, self.wider = layers(3, width), nn.Linear(width, 2 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.wider(x)


def case_of(model: nn.Module) -> Case:
    CutPoint.between_blocks(model)
    torch.manual_seed(1)
    return Case(model, {"x": torch.randn(4, WIDE)}, 2)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Model(encoder=layers(2), middle=layer(), decoder=layers(3)), "2 in encoder, 3 in decoder"),
        (Model(blocks=nn.ModuleList([Block(), Block()])), "2 in blocks"),
        (Model(body=nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))), "3 in body"),
        (
            Model(stages=nn.ModuleList([Stage(8), Stage(16)])),
            "3 in stages.0.blocks, 2 in stages, 3 in stages.1.blocks",
        ),
    ],
)
def test_cut_points_are_between_the_blocks(model: nn.Module, text: str) -> None:
    names = list(model.state_dict())
    case = case_of(model)
    assert list(model.state_dict()) == names
    tape = case.forwards.training
    assert describe(tape.cuts) == text
    losses, gradients = case.expected()
    stage_losses, stage_gradients = case.run("1f1b", min(3, tape.num_segments))
    assert stage_losses == pytest.approx(losses, rel=1e-6)
    assert_same(stage_gradients, gradients, 1e-6)


class Odd(nn.Module):
    """Model that does not call each of its five blocks exactly once.

    One block is called twice, one block is called only in training, and the last block is not
    called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = layers(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, fourth, _ = self.blocks
        x = fourth(second(second(first(x))))
        return (third(x) if self.training else x).square().mean()


def test_blocks_that_are_not_called_once_are_not_cut() -> None:
    case = case_of(Odd())
    for tape in (case.forwards.training, case.forwards.evaluation):
        assert tape.cuts == ["blocks.0.cut_point", "blocks.3.cut_point"]
        assert {call.segment for call in tape.calls} == {0, 1, 2}
    losses, gradients = case.expected()
    stage_losses, stage_gradients = case.run("1f1b", 3)
    assert stage_losses == pytest.approx(losses, rel=1e-6)
    assert_same(stage_gradients, gradients, 1e-6)


def same_member() -> nn.Module:
    member = layer()
    return Model(blocks=nn.ModuleList([member, member]))


def cut_by_hand() -> nn.Module:
    model = Model(blocks=layers(2))
    CutPoint.after(model.blocks[0])  # type: ignore[index, union-attr]
    return model


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        (nn.Linear(8, 8), ["Linear has no list of repeated blocks", "CutPoint.after(module)"]),
        (Model(blocks=nn.ModuleList([nn.Linear(8, 8), nn.Tanh()])), ["no list of repeated"]),
        (same_member(), ["no list of repeated"]),
        (cut_by_hand(), ["Model already has the cut point blocks.0.cut_point"]),
    ],
)
def test_models_without_blocks_or_with_cut_points_are_refused(
    model: nn.Module, parts: list[str]
) -> None:
    before = list(cut_points_of(model))
    with pytest.raises(ConfigError) as refusal:
        CutPoint.between_blocks(model)
    assert "\n" not in str(refusal.value)
    for part in parts:
        assert part in str(refusal.value)
    assert list(cut_points_of(model)) == before


def test_a_model_is_saved_as_if_it_had_no_cut_points(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers", reason="prerequisite.sh --examples")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        vocab_size=32,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.arange(8).view(1, 8)
    expected = model(ids).logits
    model.save_pretrained(tmp_path / "before")
    cut_points = CutPoint.between_blocks(model)
    assert [cut_points_of(model)[f"model.layers.{n}.cut_point"] for n in range(3)] == cut_points
    model.save_pretrained(tmp_path / "after")
    files = ("model.safetensors", "config.json")
    before, after = (
        [(tmp_path / side / file).read_bytes() for file in files] for side in ("before", "after")
    )
    assert before == after
    for other in (model, copy.deepcopy(model), type(model).from_pretrained(tmp_path / "after")):
        torch.testing.assert_close(other.eval()(ids).logits, expected, rtol=0, atol=0)
