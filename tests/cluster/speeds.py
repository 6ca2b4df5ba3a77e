"""Trains GPT as ``pretrain_gpt.py`` does, on machines of made-up speeds.

Every forward and backward also sleeps for each of its layers, as long as ``LAYER_S`` says for the
node: a JSON object of seconds by the name of the node.
"""

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.adaptive import accelerator

accelerator.install()
accelerator.quiet_libraries()

from megatron.adaptive.cli.pretrain_gpt import run  # noqa: E402
from megatron.adaptive.engine.stages import MegatronStages  # noqa: E402


def slowed(work: Callable[..., Any], layer_s: float) -> Callable[..., Any]:
    """The same work, later done."""

    @functools.wraps(work)
    def slow(stages: Any, chunk: int, *others: Any) -> Any:
        modules = stages._chunks[chunk].modules()
        time.sleep(layer_s * sum(isinstance(one, TransformerLayer) for one in modules))
        return work(stages, chunk, *others)

    return slow


if __name__ == "__main__":
    takes = json.loads(os.environ["LAYER_S"])[os.environ["MEGATRON_ADAPTIVE_NODE"]]
    for name in ("forward", "backward"):
        setattr(MegatronStages, name, slowed(getattr(MegatronStages, name), takes))
    sys.exit(run())
