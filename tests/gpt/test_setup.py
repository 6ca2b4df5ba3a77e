"""Tests which parts a run creates, depending on its settings and its device."""

from __future__ import annotations

import pytest

from megatron.adaptive.config.arguments import parse
from megatron.adaptive.gpt.setup import data_workers

from ..multiprocess.launch import SMALL_GPT

FLAGS = f"{SMALL_GPT} --num-layers 2 --train-iters 1 --mock-data"


@pytest.mark.parametrize(
    ("flags", "on_cpu", "on_gpu"),
    [("", 0, 2), ("--num-workers 3", 3, 3), ("--num-workers 0", 0, 0)],
)
def test_processes_read_data_where_they_are_asked_for_and_on_a_gpu(
    flags: str, on_cpu: int, on_gpu: int
) -> None:
    """Checks that data workers are used by default on a GPU, but on a CPU only if requested."""
    config = parse([*FLAGS.split(), *flags.split()], world_size=1)
    assert data_workers(config, is_cuda=False) == on_cpu
    assert data_workers(config, is_cuda=True) == on_gpu
