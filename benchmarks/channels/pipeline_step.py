"""Measures the time that messages add to a 1F1B step of two computing ranks.

The executor of this project runs the step. Its chunks multiply matrices for a few milliseconds,
read the received tensor and write the tensor to send. In the *alone* step, each rank works
independently, and its inputs are immediately available in its own memory. If messages took no time,
the pipeline's step would take as long as the alone step, plus one microbatch for filling and
draining::

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
from harness.transport_link import LIMIT_S, TransportLink
from megatron.adaptive.engine.executor import Executor
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.catalog import make_policies
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.transport.interface import CompletionQueue, HeldArrival, Label

PLACEMENT = Placement(num_ranks=2, num_chunks=1)
TRANSPORTS = ("shm", "tcp", "gloo")
PRODUCTS = 6
_LEAD_S = 0.005
_MATRIX = 256


class WorkingStages(IdleStages):
    """Chunk that simulates computation by multiplying matrices.

    Args:
        rank: Rank of this process, which is 0 for the first stage and 1 for the last stage.
        nbytes: Size of the activation and of the gradient, in bytes.
        products: Number of matrix multiplications in each forward and each backward pass.
    """

    def __init__(self, rank: int, nbytes: int, products: int) -> None:
        self._rank = rank
        self._products = products
        self._left = torch.rand(_MATRIX, _MATRIX)
        self._right = torch.rand(_MATRIX, _MATRIX)
        self._product = torch.empty(_MATRIX, _MATRIX)
        self._first = torch.rand(nbytes // 4)

    def forward(self, chunk: int, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Multiplies matrices, reads the activation ``received``, and returns a new activation."""
        return self._work(received)

    def backward(
        self, chunk: int, microbatch: int, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Multiplies matrices, reads ``gradient``, and returns a new gradient."""
        result = self._work(gradient)
        return result if self._rank else None

    def _work(self, received: torch.Tensor | None) -> torch.Tensor:
        for _ in range(self._products):
            torch.mm(self._left, self._right, out=self._product)
        return (self._first if received is None else received) + 1.0


class InstantTransport:
    """Simulates a transport within one process, where every input arrives before it is needed.

    Args:
        rank: Rank of this process, 0 or 1.
        nbytes: Size of the inputs, in bytes.
    """

    name = "none"

    def __init__(self, rank: int, nbytes: int) -> None:
        self.completions = CompletionQueue()
        self._rank = rank
        # Use four buffers, so that an activation is no longer in the cache when its backward pass
        # begins.
        self._inputs = [torch.rand(nbytes // 4) for _ in range(4)]

    def begin(self, step: int, microbatches: int) -> None:
        """Delivers all activations of the step ``step`` if this is the last stage.

        The step has ``microbatches`` microbatches.
        """
        for microbatch in range(microbatches if self._rank else 0):
            self._put(Label(step, Action(ActionKind.F, 0, microbatch)))

    def send(self, peer: int, label: Label, tensor: torch.Tensor) -> None:
        """Delivers the gradient for each activation that the first stage sends.

        ``label`` identifies the microbatch of the activation. Gradients that the last stage sends
        are discarded.
        """
        if self._rank == 0:
            self._put(Label(label.step, Action(ActionKind.B, 0, label.action.microbatch)))

    def _put(self, label: Label) -> None:
        tensor = self._inputs[label.action.microbatch % len(self._inputs)]
        self.completions.put(HeldArrival(label, 1 - self._rank, tensor.nbytes, lambda: tensor))


class Pipeline:
    """Executors of one rank, with one executor for each transport.

    Args:
        rank: Rank of this process, 0 or 1.
        nbytes: Size of a message, in bytes.
        products: Number of matrix multiplications in each forward and each backward pass.
    """

    def __init__(self, rank: int, nbytes: int, products: int) -> None:
        self._rank = rank
        self._stages = WorkingStages(rank, nbytes, products)
        self._alone = InstantTransport(rank, nbytes)
        self._executors: dict[str, Executor] = {}

    def step_s(self, name: str, transport: Any, microbatches: int) -> float:
        """Runs a step, and returns its duration in seconds on this rank.

        Args:
            name: Name of the transport.
            transport: Transport of the step, or ``None`` to run the step
                without messages.
            microbatches: Number of microbatches.
        """
        transport = transport or self._alone
        if name not in self._executors:
            self._executors[name] = Executor(
                placement=PLACEMENT, pp_rank=self._rank, transport=transport, timeout_s=LIMIT_S
            )
        executor = self._executors[name]
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
    """Runs one rank, and returns the durations of the steps on the slower rank, keyed by transport.

    Args:
        rank: Rank of this process.
        plan: Settings of the run: size of a message (``nbytes``), ``microbatches``,
            ``repetitions``, and the CPUs of the ranks (``cpus``).
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
            step_s = torch.tensor(
                [pipeline.step_s(name, transport, plan["microbatches"])], dtype=torch.float64
            )
            dist.all_reduce(step_s, op=dist.ReduceOp.MAX)
            if repetition >= 0:
                seconds.append(step_s.item())
    for link in links.values():
        link.close()
    return samples
