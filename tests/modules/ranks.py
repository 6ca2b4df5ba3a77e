"""Runs a model with cut points on the real executor, with all ranks as threads of one process."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megatron.adaptive import accelerator
from megatron.adaptive.engine.executor import ActivationMeter, Executor
from megatron.adaptive.engine.weight_gradient import WeightGradientStore
from megatron.adaptive.modules.batch import BatchShape
from megatron.adaptive.modules.cutting import balanced, slice_tape
from megatron.adaptive.modules.program import ProgramStages, StageProgram
from megatron.adaptive.modules.random_key import RandomKey
from megatron.adaptive.modules.recording import Forward, Forwards
from megatron.adaptive.modules.segments import tensors_of
from megatron.adaptive.transport.interface import CompletionQueue

from ..engine.loopback import WATCHDOG_S, Loopback, each_in_its_thread

accelerator.install()

from megatron.adaptive.engine.policy_factory import Orders  # noqa: E402
from megatron.adaptive.modules.assembly import PipelineSettings  # noqa: E402
from megatron.adaptive.modules.sizes import choose_orders  # noqa: E402

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "cutpoint"
CPU = torch.device("cpu")


def load_example(name: str) -> ModuleType:
    """Imports ``examples/cutpoint/NAME.py`` as a module and returns the module."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(f"cutpoint_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Case:
    """Records a model, and then runs a batch through the whole model or through a pipeline.

    Args:
        model: Model with cut points.
        batch: Batch with the samples of all microbatches.
        micro_batch_size: Number of samples in a microbatch.
        options: The options ``loss``, ``arguments`` and ``decisive_entries`` of ``Pipeline``.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        batch: Mapping[str, torch.Tensor],
        micro_batch_size: int,
        *,
        slicing: str = "auto",
        **options: Any,
    ) -> None:
        self.model = model
        self.batch = batch
        self.shape = BatchShape(batch, micro_batch_size)
        self.count = self.shape.num_microbatches(batch)
        self.forward = Forward(
            model=model,
            loss=options.get("loss"),
            arguments=options.get("arguments"),
            decisive_entries=options.get("decisive_entries", ()),
        )
        self.forwards = Forwards.of(self.forward, self.microbatch(0), slicing)

    def microbatch(self, number: int) -> dict[str, torch.Tensor]:
        return self.shape.microbatch(self.batch, number, CPU)

    def expected(self) -> tuple[list[float], dict[str, torch.Tensor]]:
        """Returns the losses and gradients of the whole model, computed without a pipeline."""
        model = copy.deepcopy(self.model)
        forward = dataclasses.replace(self.forward, model=model)
        losses = []
        for number in range(self.count):
            batch = {name: tensor.clone() for name, tensor in self.microbatch(number).items()}
            loss = forward(batch)
            (loss / self.count).backward()
            losses.append(float(loss.detach()))
        return losses, gradients_of(dict(model.named_parameters()))

    def run(
        self,
        schedule: str,
        size: int,
        chunks: int | None = None,
        *,
        split_backward: bool | None = None,
        forward_only: bool = False,
    ) -> tuple[list[float], dict[str, torch.Tensor]]:
        """Runs the batch as a pipeline on ``size`` ranks with ``chunks`` stages each.

        Returns the losses of the microbatches, and the gradients summed over ranks. If
        ``forward_only``, runs no backward passes.
        """
        request = PipelineSettings(
            self.model, self.batch, schedule=schedule, chunks=chunks, split_backward=split_backward
        )
        placement = choose_orders(request, size, 0).placement
        tape = self.forwards.evaluation if forward_only else self.forwards.training
        plans = slice_tape(tape, balanced((1,) * tape.num_segments, placement.num_stages))
        network = {rank: CompletionQueue() for rank in range(size)}
        held = [tensors_of(copy.deepcopy(self.model)) for _ in range(size)]
        losses: list[float] = []

        def work(rank: int) -> None:
            orders = choose_orders(request, size, rank)
            wire = Loopback(rank, network)
            losses.extend(self._run_rank(orders, tape, plans, held[rank], wire, forward_only))

        each_in_its_thread(work, size)
        total: dict[str, torch.Tensor] = {}
        for tensors in held:
            for name, gradient in gradients_of(tensors).items():
                total[name] = total[name] + gradient if name in total else gradient
        return losses, total

    def _run_rank(
        self, orders: Orders, tape: Any, plans: Any, held: Any, wire: Loopback, forward_only: bool
    ) -> list[float]:
        placement = orders.placement
        own_stages = [placement.stage_of(orders.pp_rank, c) for c in range(placement.num_chunks)]
        programs = [StageProgram(tape, plans[s], held, CPU) for s in own_stages]
        split = orders.weight_pieces > 0 and not forward_only
        stages = ProgramStages(
            programs=[programs] * self.count,
            microbatches=[self.microbatch(number) for number in range(self.count)],
            random=RandomKey(7, CPU),
            held=held,
            device=CPU,
            meters=[ActivationMeter()] * self.count,
            stores=[WeightGradientStore() for _ in programs] if split else None,
            forward_only=forward_only,
        )
        executor = Executor(
            placement=placement,
            pp_rank=orders.pp_rank,
            transport=wire if placement.num_ranks > 1 else None,
            timeout_s=WATCHDOG_S,
        )
        try:
            executor.run(
                stages,
                orders.policy(self.count, forward_only=forward_only),
                orders.state(self.count, forward_only=forward_only),
            )
        finally:
            stages.finish()
        return [float(loss) for loss in stages.losses]


def gradients_of(tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the gradients that are not zero, keyed by the name of the tensor."""
    return {
        name: tensor.grad.clone()
        for name, tensor in tensors.items()
        if tensor.grad is not None and bool(tensor.grad.abs().max() > 0)
    }


def assert_same(
    gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5
) -> None:
    """Checks that each gradient differs from the expected gradient by at most ``tolerance``.

    Differences are relative to the norm of the expected gradient.
    """
    assert sorted(gradients) == sorted(expected)
    for name, reference in expected.items():
        error = float((gradients[name] - reference).norm() / reference.norm())
        assert error <= tolerance, f"{name}: {error:.2e}"
