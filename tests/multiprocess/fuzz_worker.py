"""One rank of the random pipelines: real executors, real channels, work that only takes time.

    torchrun --nproc-per-node 4 fuzz_worker.py CASES SEED OUTPUT

Every case is one step of a pipeline of its own shape, rule, cap and times, drawn alike on all
ranks. Messages say where they have been, so that a wrong one is seen.
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import os
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.adaptive.engine.executor import Executor
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.registry import make_policies
from megatron.adaptive.schedule.state import RankState
from megatron.adaptive.transport.gloo import GlooTransport

NAMES = ("adaptive", "adaptive", "adaptive", "hinted", "dfc", "bfc")
TIMEOUT_S = 20.0


class Naps:
    """Stages that sleep a random while; a message counts the stages it has passed."""

    def __init__(self, placement: Placement, rank: int, seed: int, mean_s: float) -> None:
        self._placement = placement
        self._rank = rank
        self._rng = random.Random(f"{seed} {rank}")
        # Some stages are much slower than others.
        self._mean_s = [mean_s * self._rng.choice([0.2, 1.0, 3.0]) for _ in range(16)]

    def forward(self, chunk: int, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        stage = self._nap(chunk)
        message = torch.tensor([float(microbatch), 0.0]) if received is None else received.clone()
        assert message.tolist() == [microbatch, stage], (message, stage)
        message[1] += 1
        return message

    def release(self, chunk: int, microbatch: int) -> None:
        pass

    def activation_bytes(self, chunk: int) -> int:
        return 1

    def retained_bytes(self, chunk: int) -> int:
        return 1

    def backward(
        self, chunk: int, microbatch: int, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        stage = self._nap(chunk)
        last = self._placement.num_stages - 1
        message = torch.tensor([-1.0 - microbatch, 0.0]) if gradient is None else gradient.clone()
        assert message.tolist() == [-1.0 - microbatch, last - stage], (message, stage)
        message[1] += 1
        return message if stage else None

    def weights(self, chunk: int, microbatch: int, piece: int, pieces: int) -> None:
        self._nap(chunk, 1 / pieces)

    def _nap(self, chunk: int, part: float = 1.0) -> int:
        time.sleep(part * self._mean_s[chunk] * self._rng.lognormvariate(0, 0.7))
        return self._placement.stage_of(self._rank, chunk)


def main(cases: int, seed: int, output: Path) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rng = random.Random(seed)
    channels: dict[Placement, tuple[Executor, GlooTransport]] = {}
    peaks = []
    for case in range(cases):
        chunks = rng.choice([1, 2, 2, 3])
        kind = rng.choice(["loop", "v"] if chunks > 1 else ["loop"])
        placement = Placement(num_ranks=ranks, num_chunks=chunks, kind=kind)  # type: ignore[arg-type]
        if placement not in channels:
            channels[placement] = connect(placement, rank)
        microbatches = rng.randint(1, 8)
        cap = rng.choice([1.0, rng.uniform(1.0, 3.0), 8.0])
        pieces = rng.choice([0, 1, 3])
        name = rng.choice(NAMES)
        mean_s = rng.choice([0.0, 0.0002, 0.001])
        policies = make_policies(name, placement, microbatches, cap=cap, weight_pieces=pieces)
        state = RankState(
            placement=placement,
            rank=rank,
            num_microbatches=microbatches,
            cap=cap,
            weight_pieces=pieces,
        )
        executor = channels[placement][0]
        executor.run(Naps(placement, rank, seed + case, mean_s), policies[rank], state)
        executor.finish_step()
        peaks.append((cap, state.peak_in_flight))
    for _, transport in channels.values():
        transport.close()
    if rank == 0:
        output.write_text(json.dumps(peaks))
    dist.barrier()
    dist.destroy_process_group()


def connect(placement: Placement, rank: int) -> tuple[Executor, GlooTransport]:
    """Make the executor of a placement; collective, at the same case on all ranks."""
    transport = GlooTransport(
        dist.new_group(list(range(placement.num_ranks)), backend="gloo"),
        peers=placement.neighbours_of(rank),
        device=torch.device("cpu"),
        payload_shape=(2,),
        dtype=torch.float32,
        timeout_s=TIMEOUT_S,
    )
    executor = Executor(
        placement=placement,
        pp_rank=rank,
        transport=transport,
        timeout_s=TIMEOUT_S,
    )
    return executor, transport


if __name__ == "__main__":
    faulthandler.dump_traceback_later(float(os.environ.get("WATCHDOG_S", "100")), exit=True)
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
