"""A process with a wrong clock that samples a clock server; started from ``test_clock_sync.py``.

Usage: ``clock_worker.py PORT TOKEN OFFSET_NS DRIFT_PPM SECONDS``. Its clock is
``time.monotonic_ns()``, which all processes of a machine share, put wrong on purpose. Prints JSON::

    {"samples": [[t0, t1, t2, t3], ...], "start_ns": ..., "bursts": ...}

``start_ns`` is the true time at which the wrong clock was off by the offset alone.
"""

from __future__ import annotations

import json
import sys
import time

from megatron.adaptive.trace.clock_sync import ClockSampler
from megatron.adaptive.trace.event import ClockSamples


def main() -> None:
    port, token, offset_ns, drift_ppm, seconds = sys.argv[1:]
    start_ns = time.monotonic_ns()

    def now() -> int:
        true_ns = time.monotonic_ns()
        return true_ns + int(offset_ns) + round((true_ns - start_ns) * float(drift_ppm) * 1e-6)

    bursts: list[ClockSamples] = []
    sampler = ClockSampler(
        "localhost",
        int(port),
        bytes.fromhex(token),
        deliver=bursts.append,
        now=now,
        periods_s=(0.1, 0.5),
    )
    # Keeps the interpreter's lock busy, as a rank's own thread does.
    end = time.monotonic() + float(seconds)
    while time.monotonic() < end:
        sum(range(2000))
    sampler.close()
    samples = [sample for burst in bursts for sample in burst.samples]
    print(json.dumps({"samples": samples, "start_ns": start_ns, "bursts": len(bursts)}))


if __name__ == "__main__":
    main()
