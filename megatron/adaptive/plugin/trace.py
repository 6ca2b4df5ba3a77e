"""The trace of steps that Megatron-LM takes: what can be seen from inside its call of a step.

Actions, waits and messages come from the executor, as in our own trainer. Around them there are
three places to look from without changing anything of Megatron-LM's: the iterator it hands in
(``data``), the function that finishes gradients (``reduce``), and torch's own hooks around the step
of every optimizer (``optimizer``). Of validation and checkpoints nothing is seen.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.config.environment import Environment
from megatron.adaptive.engine.build import gather_places
from megatron.adaptive.engine.executor import Executor
from megatron.adaptive.engine.tracing import Tracing
from megatron.adaptive.errors import TraceError
from megatron.adaptive.plugin.settings import megatron_arguments
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.trace.clock_sync import start_clock_sync
from megatron.adaptive.trace.event import TraceHeader
from megatron.adaptive.trace.files import set_aside
from megatron.adaptive.trace.recorder import Recorder

__all__ = ["StepTrace", "open_trace"]


def open_trace(
    folder: str, schedule: str, placement: Placement, num_microbatches: int, device: Accelerator
) -> StepTrace:
    """Open this rank's trace, in a folder without those of an earlier start. Collective.

    Args:
        folder: for the files of all ranks.
        schedule: its name.
        placement: where stages live.
        num_microbatches: of the first step.
        device: whose clock times what runs on it.

    Raises:
        TraceError: the file cannot be written.
    """
    rank = dist.get_rank()
    places = gather_places()
    machine = places[rank]["machine"]
    if rank == next(at for at, place in enumerate(places) if place["machine"] == machine):
        set_aside(folder)
    # Sent by rank 0 after it has moved the folder; the barrier is for the other machines.
    run: list[Any] = [f"{time.time_ns()}-{os.getpid()}"]
    dist.broadcast_object_list(run, src=0)
    dist.barrier()
    header = TraceHeader.create(
        run=run[0],
        rank=rank,
        world_size=dist.get_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        num_ranks=placement.num_ranks,
        num_chunks=placement.num_chunks,
        num_microbatches=num_microbatches,
        schedule=schedule,
        placement=placement.kind,
    )
    recorder = Recorder(folder, header)
    sync = start_clock_sync(
        rank=rank,
        clock_id=header.clock,
        address=Environment.read().master_addr,
        gather=_gather,
        deliver=recorder.add_clock_samples,
    )
    return StepTrace(Tracing(recorder, device.clock(), sync))


class StepTrace:
    """The trace of this rank, step by step.

    A trace that cannot be written ends, and says so once; training goes on.

    Args:
        tracing: where it goes.
    """

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._iteration = 0
        self._optimizers = 0  # within each other
        self._update: AbstractContextManager[None] | None = None
        self._hooks = [
            register_optimizer_step_pre_hook(self._update_begins),
            register_optimizer_step_post_hook(self._update_ends),
        ]

    @property
    def recorder(self) -> Recorder | None:
        """Where the executor puts its spans."""
        return self._tracing.recorder

    def watch(self, executor: Executor) -> None:
        """Let who looks at the running job see what this rank does."""
        self._tracing.watch(executor.snapshot)

    def span(self, kind: str) -> AbstractContextManager[None]:
        """Trace what the block does on the device, as a span of ``kind``."""
        return self._tracing.span(kind)

    def begin(self, num_microbatches: int) -> None:
        """Begin a training step, under the number that the log will have for it."""
        current = getattr(megatron_arguments(), "curr_iteration", None)
        self._iteration = max(self._iteration, current or 0) + 1
        self._try(
            functools.partial(
                self._tracing.begin_iteration, self._iteration, num_microbatches, is_traced=True
            )
        )

    def end(self) -> None:
        """Write what the step before did, and what came after it."""
        self._try(self._tracing.end_iteration)

    def close(self) -> None:
        """End the trace.

        Raises:
            TraceError: something could not be written.
        """
        for hook in self._hooks:
            hook.remove()
        self._tracing.close()

    def timed(self, iterators: Any) -> Any:
        """The data iterators of a training step, their reads traced; ``None`` stays what it is."""
        if isinstance(iterators, list):
            return [self.timed(one) for one in iterators]
        return None if iterators is None else _Timed(iterators, self._tracing.data_read)

    def _update_begins(self, *_: Any) -> None:
        self._optimizers += 1
        if self._optimizers == 1:
            self._update = self._tracing.span("optimizer")
            self._update.__enter__()

    def _update_ends(self, *_: Any) -> None:
        self._optimizers = max(0, self._optimizers - 1)
        update = self._update
        if not self._optimizers and update is not None:
            self._update = None
            update.__exit__(None, None, None)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except TraceError as error:
            print(f"megatron.adaptive: {error}", file=sys.stderr, flush=True)


class _Timed:
    """An iterator whose reads are timed; in everything else the one that it stands for.

    Args:
        iterator: gives a microbatch at a time.
        was_read: told of each its number, start and end.
    """

    def __init__(self, iterator: Iterator[Any], was_read: Callable[[int, int, int], None]) -> None:
        self._iterator = iterator
        self._was_read = was_read
        self._count = 0

    def __iter__(self) -> _Timed:
        return self

    def __next__(self) -> Any:
        start_ns = time.monotonic_ns()
        item = next(self._iterator)
        self._was_read(self._count, start_ns, time.monotonic_ns())
        self._count += 1
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
