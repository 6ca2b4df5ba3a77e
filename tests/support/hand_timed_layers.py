"""Trains GPT like ``pretrain_gpt.py``, with code inside the layers that measures their times.

When the job ends, the file named by the environment variable ``HAND_TIMED`` contains a JSON object.
It maps the number of each layer, counted from 1, to the sum of its forward times and the sum of its
backward times, in nanoseconds.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from megatron.adaptive import accelerator

accelerator.install()
accelerator.quiet_libraries()

import torch  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402

from megatron.adaptive.cli.pretrain_gpt import run  # noqa: E402

_sums: dict[int, list[int]] = defaultdict(lambda: [0, 0])
_begun_ns: dict[int, int] = {}


class _Input(torch.autograd.Function):
    """Identity on a layer's input. Its backward pass, the last of the layer, stops the timer."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, number: int) -> torch.Tensor:
        ctx.number = number
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _sums[ctx.number][1] += time.perf_counter_ns() - _begun_ns.pop(ctx.number)
        return gradients[0], None


class _Output(torch.autograd.Function):
    """Identity on a layer's output. Its backward pass, the first of the layer, starts the timer."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, number: int) -> torch.Tensor:
        ctx.number = number
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _begun_ns[ctx.number] = time.perf_counter_ns()
        return gradients[0], None


def time_by_hand() -> None:
    """Makes each layer add the times of its passes to the sums."""
    work = TransformerLayer.forward

    @functools.wraps(work)
    def timed(layer: Any, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        begin_ns = time.perf_counter_ns()
        number = layer.layer_number
        hidden, *others = work(layer, _Input.apply(hidden_states, number), *arguments, **options)
        hidden = _Output.apply(hidden, number)
        _sums[number][0] += time.perf_counter_ns() - begin_ns
        return (hidden, *others)

    TransformerLayer.forward = timed


if __name__ == "__main__":
    time_by_hand()
    status = run()
    Path(os.environ["HAND_TIMED"]).write_text(json.dumps(_sums))
    sys.exit(status)
