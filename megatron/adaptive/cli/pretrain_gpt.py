"""``pretrain_gpt.py``: train GPT with Megatron-LM's command line through an adaptive pipeline."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megatron.adaptive.cli.common import EXIT_EXPECTED_ERROR
from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.environment import Environment
from megatron.adaptive.errors import AdaptiveError


def main(argv: Sequence[str]) -> int:
    """Train as ``argv`` says; one process of a job that torchrun started, or a job of its own.

    Returns:
        Exit status 0.

    Raises:
        AdaptiveError: an expected error; the caller prints it.
    """
    environment = Environment.read()
    config = parse(argv, world_size=environment.world_size, last_wins=True)
    # Imports torch and megatron-core, so after the settings are known to be sound.
    from megatron.adaptive.training.pretrain import pretrain

    pretrain(config, environment)
    return 0


def run(argv: Sequence[str] | None = None) -> int:
    """Run :func:`main` as a process of a job: an expected error is printed by one rank only.

    Bad settings are found by every rank alike before any of them connects; only rank 0 says so.
    """
    try:
        return main(sys.argv[1:] if argv is None else argv)
    except AdaptiveError as error:
        if os.environ.get("RANK", "0") == "0" or getattr(error, "own_rank", False):
            print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_EXPECTED_ERROR
