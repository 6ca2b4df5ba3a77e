"""Runs one of two ranks of a ``Pipeline``. One rank runs fewer steps than the other.

Usage: ``unequal_steps.py TRANSPORT RANK``, where ``RANK`` is the rank with fewer steps.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from models import SHARED, knotty, make_batch

from megatron.adaptive import Pipeline
from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.errors import PeerLostError


def main(transport: Any, short_rank: int) -> None:
    """Trains one step on rank ``short_rank`` and two on the other, and prints the other's error."""
    # Do not compare batches, because the comparison would fail before the step.
    options: dict[str, Any] = {
        "compare_batches": False,
        "transport": TransportConfig(transport=transport),
    }
    # The time limit of the test is much shorter than the 600 s that a step may take.
    with Pipeline(
        knotty(), make_batch(4), micro_batch_size=2, shared_weights=SHARED, **options
    ) as pipeline:
        pipeline.step(make_batch(4))
        if int(os.environ["RANK"]) == short_rank:
            return
        try:
            pipeline.step(make_batch(4))
        except PeerLostError as error:
            print(f"named: {error}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
