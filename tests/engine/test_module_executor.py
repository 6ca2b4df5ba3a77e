"""Plain modules under the real executor: every order gives the gradients of the whole module."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

from megatron.adaptive.engine.module_stages import ModuleStages
from megatron.adaptive.schedule.placement import Placement, PlacementKind
from megatron.adaptive.schedule.registry import make_policies

from .loopback import WATCHDOG_S, Ranks

WIDTH, SAMPLES, MICROBATCHES = 6, 5, 6


def make_model(num_stages: int) -> list[torch.nn.Module]:
    torch.manual_seed(4)
    return [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())
        for _ in range(num_stages)
    ]


def batch(microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(microbatch)
    return (
        torch.randn(SAMPLES, WIDTH, generator=generator),
        torch.randn(SAMPLES, WIDTH, generator=generator),
    )


def gradients(modules: list[torch.nn.Module]) -> list[torch.Tensor]:
    return [
        parameter.grad
        for module in modules
        for parameter in module.parameters()
        if parameter.grad is not None
    ]


def reference(stages: list[torch.nn.Module]) -> tuple[list[torch.Tensor], list[float]]:
    """Gradients and losses of the whole model, microbatch after microbatch."""
    model = torch.nn.Sequential(*copy.deepcopy(stages))
    losses = []
    for microbatch in range(MICROBATCHES):
        given, target = batch(microbatch)
        loss = torch.nn.functional.mse_loss(model(given), target)
        (loss / MICROBATCHES).backward()
        losses.append(float(loss))
    return gradients(list(model)), losses


@pytest.mark.parametrize(
    ("name", "kind", "chunks", "pieces"),
    [
        ("adaptive", "v", 2, 3),
        ("adaptive", "loop", 2, 0),
        ("hinted", "v", 2, 1),
        ("zb-v", "v", 2, 1),
        ("zb-h1", "loop", 1, 1),
        ("1f1b", "loop", 1, 0),
        ("dfc", "loop", 2, 2),
    ],
)
def test_any_order_gives_the_gradients_of_the_whole(
    name: str, kind: PlacementKind, chunks: int, pieces: int
) -> None:
    placement = Placement(num_ranks=2, num_chunks=chunks, kind=kind)
    modules = make_model(placement.num_stages)
    expected, losses = reference(modules)
    ranks = Ranks(placement)
    policies = make_policies(name, placement, MICROBATCHES, cap=2.0, weight_pieces=pieces)
    stages = [
        ModuleStages(
            chunks=[modules[placement.stage_of(rank, chunk)] for chunk in range(chunks)],
            placement=placement,
            pp_rank=rank,
            num_microbatches=MICROBATCHES,
            batch=batch,
            loss=torch.nn.functional.mse_loss,
            split=pieces > 0,
        )
        for rank in range(2)
    ]
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            state = ranks.state(rank, MICROBATCHES, cap=2.0, weight_pieces=pieces)
            ranks.executors[rank].run(stages[rank], policies[rank], state)
            assert state.done
        except BaseException as error:
            errors.append(error)
        finally:
            stages[rank].finish()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WATCHDOG_S)
    assert not errors
    assert [len(gradients([module])) for module in modules] == [2] * placement.num_stages
    for mine, whole in zip(gradients(modules), expected, strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-6, atol=1e-7)
    rank, _ = placement.locate(placement.num_stages - 1)
    assert [float(loss) for loss in stages[rank].losses] == pytest.approx(losses, rel=1e-6)
