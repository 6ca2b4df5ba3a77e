"""Trains GPT like ``pretrain_gpt.py``, but slows down one of the ranks.

Environment variables:

``HINDERED``    global rank to slow down
``PINNED``      processor to which this rank is bound; other programs may use it too
``GROUP``       folder of a control group that this rank joins
``READ_S``      seconds that this rank takes to read a sample
``READ_FILE``   file from which this rank reads an uncached part with each sample
``MAPPED_FILE`` file that this rank maps and reads in each forward pass; the control group
                ``GROUP`` has enough memory for only a part of the file
``SLOW_LAYER``  ``3:0.02``: index of a layer, and seconds to add to its forward and backward pass
"""

from __future__ import annotations

import itertools
import mmap
import os
import sys
import time
from pathlib import Path
from typing import Any

from megatron.adaptive import accelerator

accelerator.install()
accelerator.quiet_libraries()

import torch  # noqa: E402
from megatron.core.datasets.gpt_dataset import MockGPTDataset  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402

from megatron.adaptive.cli.pretrain_gpt import run  # noqa: E402
from megatron.adaptive.engine.stages import MegatronStages  # noqa: E402

PART_BYTES = 1 << 20
ROOM_OF_FILE = 0.4
FREE_FORWARDS = 18
MEMORY_FILES = {"memory.usage_in_bytes": "memory.limit_in_bytes", "memory.current": "memory.high"}


def read_slowly(seconds: float) -> None:
    """Makes reading each sample take ``seconds`` longer."""
    read = MockGPTDataset.__getitem__

    def slow(dataset: Any, index: Any) -> Any:
        time.sleep(seconds)
        return read(dataset, index)

    MockGPTDataset.__getitem__ = slow


def read_from_disk(path: str) -> None:
    """Makes each sample also read an uncached part of the file ``path``."""
    read = MockGPTDataset.__getitem__
    file = os.open(path, os.O_RDONLY)
    offsets = itertools.cycle(range(0, os.fstat(file).st_size, PART_BYTES))

    def slow(dataset: Any, index: Any) -> Any:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.pread(file, PART_BYTES, next(offsets))
        return read(dataset, index)

    MockGPTDataset.__getitem__ = slow


def read_mapped(path: str, group: Path) -> None:
    """Makes each forward pass read the file ``path``, which is mapped into memory.

    The control group ``group`` limits memory, so that only a part of the file fits.
    """
    forward = MegatronStages.forward
    with open(path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    (usage, limit) = next(
        (group / usage, group / limit)
        for usage, limit in MEMORY_FILES.items()
        if (group / usage).exists()
    )
    calls = itertools.count()

    def slow(stages: Any, *arguments: Any) -> Any:
        result = forward(stages, *arguments)
        for offset in range(0, len(content), mmap.PAGESIZE):
            content[offset]
        # Set the limit only after the first steps, because the optimizer allocates memory in these
        # steps.
        if next(calls) == FREE_FORWARDS:
            room = int(len(content) * (1 - ROOM_OF_FILE))
            limit.write_text(str(int(usage.read_text()) - room))
        return result

    MegatronStages.forward = slow  # type: ignore[method-assign]


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


def slow_down_layer(index: int, seconds: float) -> None:
    """Makes layer ``index`` take ``seconds`` longer in its forward and its backward pass."""
    forward = TransformerLayer.forward

    def slow(layer: Any, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if layer.layer_number == index + 1:
            hidden_states = _Pause.apply(hidden_states, seconds)
        return forward(layer, hidden_states, *arguments, **options)

    TransformerLayer.forward = slow


def hinder() -> None:
    """Slows down this process as the environment variables require."""
    variables = os.environ
    if "PINNED" in variables:
        os.sched_setaffinity(0, {int(variables["PINNED"])})
    if "GROUP" in variables:
        Path(variables["GROUP"], "cgroup.procs").write_text(str(os.getpid()))
    if "READ_S" in variables:
        read_slowly(float(variables["READ_S"]))
    if "READ_FILE" in variables:
        read_from_disk(variables["READ_FILE"])
    if "MAPPED_FILE" in variables:
        read_mapped(variables["MAPPED_FILE"], Path(variables["GROUP"]))
    if "SLOW_LAYER" in variables:
        index, _, seconds = variables["SLOW_LAYER"].partition(":")
        slow_down_layer(int(index), float(seconds))


if __name__ == "__main__":
    if os.environ["RANK"] == os.environ.get("HINDERED"):
        hinder()
    sys.exit(run())
