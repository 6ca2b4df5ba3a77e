"""Runs one of two ranks, for tests of replicas with unequal batches or unequal models.

Usage: ``replica_worker.py PROGRAM``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from models import SHARED, WIDTH, Tower, knotty, make_batch

from megatron.adaptive import Pipeline
from megatron.adaptive.modules import CutPoint, equal_start

RANKS = 2


class Phased(nn.Module):
    """Model whose first and last segments use the same random buffer and the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.cuts = nn.ModuleList(CutPoint() for _ in range(2))
        self.register_buffer("phase", torch.randn(3, WIDTH)[:, 1:].contiguous())
        self.register_buffer("mask", torch.rand(WIDTH - 1) > 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the loss of the batch ``x``, which has the shape ``[n, 8]``."""
        for number, layer in enumerate((self.first, self.inner, self.first)):
            x = torch.tanh(layer(x))
            if number != 1:
                wave = torch.where(self.mask, self.phase.sin().sum(0), 0.5)
                x = x * torch.cat([wave, wave[:1]])
            if number < 2:
                x = self.cuts[number](x)
        return x.square().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the parameters and buffers of ``model`` that this process holds, keyed by name."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in named if not tensor.is_meta}


def require_equal(pipeline: Pipeline, expected: dict[str, torch.Tensor] | None = None) -> None:
    """Checks that tensors with the same name are equal on all ranks, and equal to ``expected``."""
    rows: list[Any] = [None] * RANKS
    dist.all_gather_object(rows, tensors_of(pipeline.model))
    if expected is not None:
        rows.append(expected)
    common = 0
    for row in rows[1:]:
        for name in rows[0].keys() & row.keys():
            torch.testing.assert_close(row[name], rows[0][name], rtol=0, atol=0, msg=name)
            common += 1
    assert common


def unequal_dictionaries() -> None:
    """Checks that replicas with 6 and 2 samples train like a single process with all 8 samples."""
    torch.manual_seed(1)
    whole, batches = Tower(), [{"x": torch.randn(8, 16)} for _ in range(3)]
    optimizer = sgd(whole.parameters())
    torch.manual_seed(1)
    rank = dist.get_rank()
    rows = (slice(6), slice(6, 8))[rank]
    with Pipeline(
        Tower(), {"x": batches[0]["x"][:4]}, micro_batch_size=2, pipeline_size=1
    ) as pipeline:
        pipeline.set_optimizer(sgd)
        for batch in batches:
            expected = whole(**batch)
            part = {"x": batch["x"][rows]}
            assert pipeline.eval(part) == pytest.approx(float(expected.detach()), rel=1e-6)
            optimizer.zero_grad()
            expected.backward()
            optimizer.step()
            assert pipeline.step(part)[0] == pytest.approx(float(expected.detach()), rel=1e-6)
            norm = sum(
                float(p.grad.square().sum()) for p in whole.parameters() if p.grad is not None
            )
            assert pipeline.grad_norm == pytest.approx(norm**0.5, rel=1e-5)
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(dict(pipeline.named_parameters())[name], parameter)
        # The random numbers of a microbatch depend on its index among the microbatches of all
        # replicas.
        numbers = list(pipeline._maker.work(part, None, pipeline.steps + 1).numbers)
        assert numbers == [[0, 1, 2], [3]][rank]
        shares = [3.0, 1.0, 1.0] if rank == 0 else [5.0]
        weights = pipeline._maker.work(part, shares, pipeline.steps + 1).weights
        assert weights == pytest.approx([2 * share / 10 for share in shares])


def unequal_models() -> None:
    """Checks that models with different seeds become equal, and stay equal during training."""
    rank = dist.get_rank()
    for size in (1, 2):
        torch.manual_seed(0)
        expected = tensors_of(Phased())
        torch.manual_seed(rank)
        batch = {"x": torch.ones(4, WIDTH)}
        with Pipeline(
            Phased(),
            batch,
            micro_batch_size=2,
            pipeline_size=size,
            partition="3" if size == 1 else "1-2",
        ) as pipeline:
            held = tensors_of(pipeline.model)
            assert {"first.weight", "phase", "mask"} <= held.keys()
            shared = expected if size == 1 else {n: t for n, t in expected.items() if n[:2] != "in"}
            require_equal(pipeline, shared)
            pipeline.set_optimizer(sgd)
            for _ in range(2):
                pipeline.step(batch)
            require_equal(pipeline)


def equal_models() -> None:
    """Checks that replicas with equal models compare checksums and do not send any tensors."""

    def refuse(*_: Any) -> None:
        raise AssertionError("equal tensors were sent")

    equal_start._broadcast = equal_start._send_to_others = refuse
    for size in (1, 2):
        with Pipeline(
            knotty(), make_batch(4), micro_batch_size=2, pipeline_size=size, shared_weights=SHARED
        ) as pipeline:
            assert not pipeline.step(make_batch(4))[1]


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    globals()[sys.argv[1]]()
    dist.destroy_process_group()
