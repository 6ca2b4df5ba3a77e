"""``pretrain_gpt.py``: train GPT with Megatron-LM's command line through an adaptive pipeline."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from megatron.adaptive.cli.common import EXIT_EXPECTED_ERROR
from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.environment import Environment
from megatron.adaptive.errors import AdaptiveError, TransportError


def main(argv: Sequence[str]) -> int:
    """Trains as ``argv`` says; one process of a job that torchrun started, or a job of its own."""
    environment = Environment.read()
    config = parse(argv, world_size=environment.world_size, last_wins=True)
    if environment.node is not None:
        config = config.in_elastic_job()
    # Imports torch and megatron-core, so after the settings are known to be sound.
    from megatron.adaptive.training.pretrain import pretrain

    pretrain(config, environment)
    return 0


def run(argv: Sequence[str] | None = None) -> int:
    """Runs :func:`main` as a process of a job: an expected error is printed by one rank only.

    Bad settings are found by every rank alike before any of them connects; only rank 0 says so.
    Until the run itself handles signals, Ctrl-C ends the process without a traceback.
    """
    former = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return main(sys.argv[1:] if argv is None else argv)
    except AdaptiveError as error:
        if _speaks(error):
            print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_EXPECTED_ERROR
    finally:
        signal.signal(signal.SIGINT, former)


def _speaks(error: AdaptiveError) -> bool:
    """Returns whether this rank prints ``error``: rank 0 does, others what it does not find."""
    rank = os.environ.get("RANK", "0").strip()
    if not rank.isdigit() or int(rank) == 0 or isinstance(error, TransportError):
        return True
    try:
        Environment.read()
    except AdaptiveError:
        try:
            Environment.read({**os.environ, "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"})
        except AdaptiveError:
            return False
        return True
    return False
