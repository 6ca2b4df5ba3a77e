"""Trains two pipeline stages with two tensor-parallel ranks each. Rank 1 is always late.

The executor and the channels are real, but each rank's device is simulated by a thread. The thread
runs kernels in the order of their launch, but much later. Each kernel contains an all-reduce.
"""

from __future__ import annotations

import datetime
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive import extension
from megatron.adaptive.engine.agreement import Agreement, connect
from megatron.adaptive.engine.executor import Executor
from megatron.adaptive.schedule.catalog import make_policies
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.transport.interface import Transport
from megatron.adaptive.transport.nccl import HostStreams, Moment
from megatron.adaptive.transport.worker import Worker

from .contract_rank import LIMIT_S, Rank, describe

_TP = 2
_SHAPE = (3,)


class Device(HostStreams):
    """Simulates a device with a single compute stream, whose kernels run in a thread."""

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._stream = Worker("computing stream", failed)

    def launch(self, kernel: Callable[[], Any]) -> None:
        self._stream.do(kernel)

    def mark(self) -> Moment:
        if threading.current_thread() is not threading.main_thread():
            return super().mark()
        moment = _End()
        self.launch(moment.reached.set)
        return moment

    def finish(self) -> None:
        assert self._stream.flush(time.monotonic() + LIMIT_S), "the device is stalled"


class _End:
    def __init__(self) -> None:
        self.reached = threading.Event()

    def synchronize(self) -> None:
        assert self.reached.wait(LIMIT_S), "the device is stalled"


class Stages:
    """Simulates model chunks. Each action sums its input over the tensor-parallel ranks.

    Attributes:
        results: Result of the last action on each microbatch, by the index of the microbatch.
    """

    def __init__(self, device: Device, group: Any, is_first: bool, nap: Callable[[], None]) -> None:
        self.results: dict[int, torch.Tensor] = {}
        self._device = device
        self._group = group
        self._is_first = is_first
        self._nap = nap

    def forward(self, chunk: int, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        return self._launch(received, microbatch)

    def backward(
        self, chunk: int, microbatch: int, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        result = self._launch(gradient, microbatch)
        if self._is_first:
            self.results[microbatch] = result
        return result

    def _launch(self, received: torch.Tensor | None, microbatch: int) -> torch.Tensor:
        self._nap()
        result = torch.full(_SHAPE, -1.0)

        def kernel() -> None:
            result.copy_(torch.full(_SHAPE, float(microbatch)) if received is None else received)
            self._group.allreduce([result]).wait()

        self._device.launch(kernel)
        return result

    def release(self, chunk: int, microbatch: int) -> None:
        pass

    def after_backward(self, chunk: int, microbatch: int) -> None:
        pass

    def activation_bytes(self, chunk: int, microbatch: int) -> int:
        return 0

    def retained_bytes(self, chunk: int, microbatch: int) -> int:
        return 0

    def weights(self, chunk: int, microbatch: int, piece: int, pieces: int) -> None:
        raise AssertionError("backward passes are not split")


def train(rank: Rank, schedule: str, steps: int, microbatches: int, seed: int) -> list[list[float]]:
    """Runs ``steps`` steps of ``microbatches`` microbatches, in which rank 1 is late.

    Before each action, rank 1 sleeps for up to 10 ms, and the other ranks for up to 1 ms. ``seed``
    determines these delays.

    Actions follow the schedule ``schedule``.

    Returns:
        Results of all microbatches in each step. The lists are empty on the second stage.
    """
    errors: list[Exception] = []
    device = Device(errors.append)
    rank.streams = device
    stage, tp_rank = divmod(rank.rank, _TP)
    transport, _ = rank.open("nccl", [(1 - stage) * _TP + tp_rank])
    store = dist.PrefixStore(f"tensor-parallel-{stage}", rank.store)
    group = dist.ProcessGroupGloo(store, tp_rank, _TP, datetime.timedelta(seconds=LIMIT_S))
    rng = random.Random(seed + rank.rank)
    placement = Placement(num_ranks=2, num_chunks=1)
    agreement = _agreement(schedule, rank, transport)
    executor = Executor(
        placement=placement,
        pp_rank=stage,
        transport=transport,
        timeout_s=LIMIT_S,
        agreement=agreement,
        route=lambda position, microbatch: (position * _TP + tp_rank, microbatch),
    )
    results = []
    for _ in range(steps):
        stages = Stages(
            device,
            group,
            stage == 0,
            lambda: time.sleep(rng.random() * (10 if rank.rank == 1 else 1) / 1e3),
        )
        policy = make_policies(schedule, placement, microbatches)[stage]
        state = RankState(placement=placement, rank=stage, num_microbatches=microbatches)
        executor.run(stages, policy, state)
        device.finish()
        assert not errors, errors
        results.append([float(stages.results[key].sum()) for key in sorted(stages.results)])
    agreement.close()
    return results


def _agreement(schedule: str, rank: Rank, transport: Transport) -> Agreement:
    """Returns the object with which the ranks of this stage agree on the order of actions.

    1F1B has a fixed order, so its object does nothing.
    """
    groups = [dist.new_group([stage * _TP, stage * _TP + 1], backend="gloo") for stage in range(2)]
    if schedule == "1f1b":
        return Agreement()
    stage = rank.rank // _TP
    members = [stage * _TP, stage * _TP + 1]
    module = extension.load()
    return connect(
        groups[stage], members, rank.rank, transport.completions, LIMIT_S, describe, module
    )
