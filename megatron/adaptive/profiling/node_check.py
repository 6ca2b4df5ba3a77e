"""Measures an unused node of an elastic job. The node's forkserver runs this program.

The program measures the device that ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` select. Its argument is
a JSON object with ``limits``, the minimum value of each quantity. The program exits with status 0
if the device reaches all limits, otherwise with :data:`STATUS_FAILS`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence

import torch

from megatron.adaptive.accelerator import detect
from megatron.adaptive.config.environment import Environment
from megatron.adaptive.config.input_files import parse_json
from megatron.adaptive.profiling.device_probe import measure_device

STATUS_FAILS = 3
"""Exit status of the program if the device is too slow."""
_TRIES = 5
_SECONDS = 0.05
_PAUSE_S = 0.2


def passes(limits: Mapping[str, float]) -> bool:
    """Returns whether this process's device reaches each limit in at least one of five attempts.

    Args:
        limits: Minimum value of each quantity, in bytes/s, FLOP/s or Hz.
    """
    environment = Environment.read()
    if environment.omp_num_threads is None:
        torch.set_num_threads(1)
    accelerator = detect(environment.local_rank)
    missing = set(limits)
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_PAUSE_S)
        for figure in measure_device(accelerator, (environment.rank,), _SECONDS):
            if figure.value >= limits.get(figure.measure, 0.0):
                missing.discard(figure.measure)
        if not missing:
            return True
    return False


def main(arguments: Sequence[str]) -> int:
    """Compares the device with the limits in ``arguments[0]``, and returns the exit status."""
    limits = parse_json(arguments[0])["limits"]
    return 0 if passes(limits) else STATUS_FAILS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
