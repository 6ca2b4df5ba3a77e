"""Trains GPT as ``pretrain_gpt.py`` does, with a first rank that is slow: it also sleeps."""

import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from megatron.adaptive import accelerator

accelerator.install()
accelerator.quiet_libraries()

from megatron.adaptive.cli.pretrain_gpt import run  # noqa: E402
from megatron.adaptive.engine.stages import MegatronStages  # noqa: E402

SLEEP_S = 0.03


def slowed(work: Callable[..., Any]) -> Callable[..., Any]:
    """The same work, later done."""

    @functools.wraps(work)
    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(SLEEP_S)
        return work(*arguments, **options)

    return slow


if __name__ == "__main__":
    if os.environ["RANK"] == "0":
        for name in ("forward", "backward"):
            setattr(MegatronStages, name, slowed(getattr(MegatronStages, name)))
    sys.exit(run())
