"""Measures messages and all-reduces between two ranks on this machine, for ``plan --try``.

job launch --standalone --nproc-per-node 2 -m megatron.adaptive.cli.try_links RESULT.json BYTES
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from megatron.adaptive.cli.common import run_cli
from megatron.adaptive.config.environment import Environment

_MEETING_S = 120.0


def main(argv: Sequence[str]) -> int:
    """Takes part in the measurement as one rank. Rank 0 writes entries of a profile file.

    ``argv[0]`` is the path of this file, and ``argv[1]`` is the size of the largest message in
    bytes.
    """
    from megatron.adaptive.profiling.check_job import CheckJob
    from megatron.adaptive.profiling.free_memory import gpu_name
    from megatron.adaptive.profiling.links import measure_links, measure_reductions

    target, most_bytes = Path(argv[0]), float(argv[1])
    check = CheckJob(Environment.read(), timedelta(seconds=_MEETING_S))
    job = check.job
    names = job.gather(gpu_name(job.accelerator))
    measured = {
        "links": measure_links(job, names, most_bytes=most_bytes),
        "all_reduce": measure_reductions(job, names, [len(names)], most_bytes=most_bytes),
    }
    if job.is_first:
        target.write_text(json.dumps(measured), encoding="utf-8")
    check.close()
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
