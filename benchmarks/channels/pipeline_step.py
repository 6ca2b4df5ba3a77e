"""What messages add to a 1F1B step of two ranks that compute.

The executor of this package runs the step; its chunks multiply matrices for a few milliseconds,
read what they received and write what they send, all of it real work. In the step *alone* each rank
works for itself: its inputs are there at once, from its own memory. The step of the pipeline would
take as long, and one microbatch more for filling and draining, if messages took no time::

    rank 0   F0 F1 B0 F2 B1 F3 B2 ...      alone: m (F + B)
    rank 1      F0 B0 F1 B1 F2 B2 ...      ideal: (m + 1) (F + B), of the slower rank
"""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from harness.sleeping_ranks import IdleStages
from megatron.adaptive.engine.executor import Executor
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.catalog import make_policies
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.transport.interface import CompletionQueue, HeldArrival, Label

from .links import LIMIT_S, TransportLink

PLACEMENT = Placement(num_ranks=2, num_chunks=1)
TRANSPORTS = ("shm", "tcp", "gloo")
PRODUCTS = 6
_LEAD_S = 0.005
_MATRIX = 256


class WorkingStages(IdleStages):
    """A chunk that computes.

    Args:
        rank: 0, the first stage, or 1, the last.
        nbytes: size of activation and gradient.
        products: products of two matrices in each forward and each backward.
    """

    def __init__(self, rank: int, nbytes: int, products: int) -> None:
        self._rank = rank
        self._products = products
        self._left = torch.rand(_MATRIX, _MATRIX)
        self._right = torch.rand(_MATRIX, _MATRIX)
        self._product = torch.empty(_MATRIX, _MATRIX)
        self._first = torch.rand(nbytes // 4)

    def forward(self, chunk: int, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Reads the activation, computes, and writes one."""
        return self._work(received)

    def backward(
        self, chunk: int, microbatch: int, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The same for the gradient."""
        result = self._work(gradient)
        return result if self._rank else None

    def _work(self, received: torch.Tensor | None) -> torch.Tensor:
        for _ in range(self._products):
            torch.mm(self._left, self._right, out=self._product)
        return (self._first if received is None else received) + 1.0


class InstantTransport:
    """Every input is there as soon as it can be needed, from memory of this process.

    Args:
        rank: 0 or 1.
        nbytes: size of the inputs.
    """

    name = "none"

    def __init__(self, rank: int, nbytes: int) -> None:
        self.completions = CompletionQueue()
        self._rank = rank
        # In turns: an activation is not in the cache any more when its backward comes.
        self._inputs = [torch.rand(nbytes // 4) for _ in range(4)]

    def begin(self, step: int, microbatches: int) -> None:
        """Sends the inputs that the last stage waits for."""
        for microbatch in range(microbatches if self._rank else 0):
            self._put(Label(step, Action(ActionKind.F, 0, microbatch)))

    def send(self, peer: int, label: Label, tensor: torch.Tensor) -> None:
        """An activation of the first stage brings its gradient; others go nowhere."""
        if self._rank == 0:
            self._put(Label(label.step, Action(ActionKind.B, 0, label.action.microbatch)))

    def _put(self, label: Label) -> None:
        tensor = self._inputs[label.action.microbatch % len(self._inputs)]
        self.completions.put(HeldArrival(label, 1 - self._rank, tensor.nbytes, lambda: tensor))


class Pipeline:
    """The executors of one rank, by the transport that they use."""

    def __init__(self, rank: int, nbytes: int, products: int) -> None:
        self._rank = rank
        self._stages = WorkingStages(rank, nbytes, products)
        self._alone = InstantTransport(rank, nbytes)
        self._executors: dict[str, tuple[Any, Executor]] = {}

    def step_s(self, name: str, transport: Any, microbatches: int) -> float:
        """Seconds of a step of this rank, from a moment that both ranks have agreed on."""
        transport = transport or self._alone
        known, executor = self._executors.get(name, (None, None))
        if executor is None or known is not transport:
            executor = Executor(
                placement=PLACEMENT, pp_rank=self._rank, transport=transport, timeout_s=LIMIT_S
            )
            self._executors[name] = transport, executor
        state = RankState(placement=PLACEMENT, rank=self._rank, num_microbatches=microbatches)
        policy = make_policies("1f1b", PLACEMENT, microbatches)[self._rank]
        if transport is self._alone:
            self._alone.begin(executor._step + 1, microbatches)
        gc.collect()
        gc.disable()
        start = torch.tensor([time.monotonic() + _LEAD_S], dtype=torch.float64)
        dist.all_reduce(start, op=dist.ReduceOp.MAX)
        while time.monotonic() < start.item():
            pass
        executor.run(self._stages, policy, state)
        end = time.monotonic()
        gc.enable()
        executor.finish_step()
        return end - float(start)


def run_rank(rank: int, plan: dict[str, Any]) -> dict[str, list[float]]:
    """Is one rank; returns the seconds of each step of the slower rank, by transport.

    Args:
        rank: Number of the rank.
        plan: ``nbytes`` of a message, ``microbatches``, ``repetitions``, and ``cpus`` of the ranks.
    """
    os.sched_setaffinity(0, {plan["cpus"][rank]})
    torch.set_num_threads(1)
    nbytes = plan["nbytes"]
    pipeline = Pipeline(rank, nbytes, PRODUCTS)
    links = {
        name: TransportLink(name, rank, slot_bytes=nbytes, slots=8, fixed=True)
        for name in TRANSPORTS
    }
    samples: dict[str, list[float]] = {name: [] for name in ("alone", *TRANSPORTS)}
    for repetition in range(-1, plan["repetitions"]):
        for name, seconds in samples.items():
            transport = links[name].transport if name in links else None
            taken = torch.tensor(
                [pipeline.step_s(name, transport, plan["microbatches"])], dtype=torch.float64
            )
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            if repetition >= 0:
                seconds.append(taken.item())
    for link in links.values():
        link.close()
    return samples
