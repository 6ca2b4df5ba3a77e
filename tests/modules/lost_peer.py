"""Runs one of two ranks of a ``Pipeline``. The second rank is killed during a reduction."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from models import SHARED, knotty, make_batch

from megatron.adaptive import Pipeline
from megatron.adaptive.errors import PeerLostError


def main() -> int:
    """Trains two steps. Returns 0 if an error reports that the peer was lost, or 1 otherwise."""
    pipeline = Pipeline(knotty(), make_batch(4), micro_batch_size=2, shared_weights=SHARED)
    pipeline.step(make_batch(4))
    if int(os.environ["RANK"]) == 1:
        update: Any = pipeline._update
        update.totals = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    try:
        pipeline.step(make_batch(4))
    except PeerLostError as error:
        print(f"named: {error}", flush=True)
        os._exit(0)
    return 1


if __name__ == "__main__":
    sys.exit(main())
