"""Members of a tensor-parallel group that run one pipeline rank together; started by the tests.

Usage: ``members.py PROGRAM BOARD FOLDER RANK SIZE``. ``BOARD`` is ``message`` or ``memory``. What
the program returns goes to ``FOLDER/RANK.json``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive import extension
from megatron.adaptive.accelerator import CpuClock
from megatron.adaptive.errors import AdaptiveError
from megatron.adaptive.pipeline.agreement import (
    Agreement,
    Alone,
    Led,
    MessageBoard,
    SharedMemoryBoard,
)
from megatron.adaptive.pipeline.executor import Executor
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.adaptive import Adaptive
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.policy import Follow, Policy
from megatron.adaptive.schedule.registry import make_schedule
from megatron.adaptive.schedule.state import RankState
from megatron.adaptive.transport.interface import Arrival, CompletionQueue, Label

WATCHDOG_S = 60.0
MICROBATCHES = 8
# Its first rank has inputs of both kinds from rank 1; every input is scripted here.
PLACEMENT = Placement(num_ranks=2, num_chunks=3)
PP_RANK = 1


class Script(CompletionQueue):
    """Hands out arrivals in a given order, one whenever the executor cannot go on without."""

    def __init__(self, arrivals: list[Arrival], delay_s: float) -> None:
        super().__init__()
        self._arrivals = iter(arrivals)
        self._delay_s = delay_s

    def poll(self) -> Arrival | None:
        return None

    def wait(self, deadline_s: float) -> Arrival | None:
        time.sleep(self._delay_s)
        return next(self._arrivals)


class Deaf:
    """A transport that drops what is sent."""

    name = "deaf"

    def __init__(self, completions: CompletionQueue) -> None:
        self.completions = completions

    def send(self, peer: int, label: Label, tensor: torch.Tensor) -> None:
        pass

    def flush(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        pass


class Writing:
    """Stages that compute nothing and write down what is asked of them."""

    def __init__(self) -> None:
        self.actions: list[str] = []

    def forward(self, chunk: int, microbatch: int, received: Any) -> torch.Tensor:
        self.actions.append(f"F{chunk}-{microbatch}")
        return torch.zeros(1)

    def release(self, chunk: int, microbatch: int) -> None:
        pass

    def activation_bytes(self, chunk: int) -> int:
        return 1

    def backward(self, chunk: int, microbatch: int, gradient: Any) -> torch.Tensor:
        self.actions.append(f"B{chunk}-{microbatch}")
        return torch.zeros(1)


def inputs(step: int, seed: int) -> list[Arrival]:
    """All inputs of the rank in an order that is the seed's own."""
    actions = []
    for chunk in range(PLACEMENT.num_chunks):
        for kind in (ActionKind.F, ActionKind.B):
            if kind is ActionKind.B and PLACEMENT.next_of(PP_RANK, chunk) is None:
                continue
            actions += [Action(kind, chunk, number) for number in range(MICROBATCHES)]
    random.Random(seed).shuffle(actions)
    tensor = torch.zeros(1)
    return [Arrival(Label(step, action), 0, 4, lambda: tensor) for action in actions]


def run_steps(agreement: Agreement, policy: Policy, seed: int, delay_s: float) -> list[str]:
    """Run two steps with the inputs in the seed's order; returns the actions."""
    script = Script([*inputs(0, seed), *inputs(1, seed + 100)], delay_s)
    executor = Executor(
        placement=PLACEMENT,
        pp_rank=PP_RANK,
        peer_of=lambda position: position,
        transport=Deaf(script),
        agreement=agreement,
        clock=CpuClock(),
        recorder=None,
        timeout_s=20.0,
    )
    taken = []
    for _ in range(2):
        stages = Writing()
        state = RankState(placement=PLACEMENT, rank=PP_RANK, num_microbatches=MICROBATCHES)
        executor.run(stages, policy, state)
        taken += stages.actions
    return taken


def make_board(kind: str, folder: Path, rank: int, size: int) -> MessageBoard | SharedMemoryBoard:
    """Connect the members as ``pipeline.build`` does."""
    if kind == "message":
        return MessageBoard(dist.new_group(list(range(size)), backend="gloo"))
    module = extension.require("this test")
    socket = str(folder / "log")
    if rank == 0:
        log = module.DecisionLog.create(size - 1, 16, size)
        module.send_fd(socket, log.fd, size - 1, WATCHDOG_S)
    else:
        fd = module.recv_fd(socket, WATCHDOG_S)
        log = module.DecisionLog.attach(fd, rank - 1, size)
        os.close(fd)
    return SharedMemoryBoard(log, is_leader=rank == 0, describe="rank 0 (stage 1)")


def agree(board: Any, rank: int) -> dict[str, Any]:
    """The same inputs in another order on each member, later and later."""
    led = Led(board, is_leader=rank == 0)
    together = run_steps(led, Adaptive(), seed=rank, delay_s=0.002 * rank)
    led.close()
    return {"together": together, "alone": run_steps(Alone(), Adaptive(), seed=rank, delay_s=0)}


def follow(board: Any, rank: int) -> dict[str, Any]:
    """A static order needs no leader: nothing is published, nobody waits for it."""
    order = make_schedule("gpipe", PLACEMENT, MICROBATCHES).orders[PP_RANK]
    led = Led(board, is_leader=rank == 0)
    taken = run_steps(led, Follow(order, "gpipe"), seed=rank, delay_s=0)
    led.close()
    return {"taken": taken, "order": [str(action) for action in order] * 2}


def many(board: Any, rank: int) -> list[int]:
    """More values than the board has room for, read by members of different pace."""
    values = [number * number << 20 | number for number in range(60)]
    if rank == 0:
        for value in values:
            board.publish(value, 20.0)
        board.close()
        return values
    read = []
    for _ in values:
        read.append(board.next(20.0))
        time.sleep(0.001 * (rank - 1))
    board.close()
    return read


def silent(board: Any, rank: int) -> str | None:
    """The leader decides nothing: followers end with an error."""
    if rank == 0:
        dist.barrier()
        return None
    try:
        board.next(0.2)
    except AdaptiveError as error:
        text = f"{type(error).__name__}: {error}"
    dist.barrier()
    return text


PROGRAMS = {"agree": agree, "follow": follow, "many": many, "silent": silent}


def main() -> None:
    program, kind, folder, rank, size = sys.argv[1:]
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    torch.set_num_threads(1)
    place = Path(folder)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(place / "store"), int(size)),
        rank=int(rank),
        world_size=int(size),
        timeout=timedelta(seconds=40),
    )
    result = PROGRAMS[program](make_board(kind, place, int(rank), int(size)), int(rank))
    (place / f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    # A receive that timed out breaks gloo's connections: leave without taking them down.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
