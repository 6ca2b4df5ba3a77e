"""A process beside a running job that diagnoses its traces when it is asked.

``python -m megatron.adaptive.trace.diagnose.watch DIR PARENT`` reads lines ``FIRST LAST`` from its
input, each a range of iterations, and answers the newest with a line of JSON: ``{"findings":
[...], "pace_ns": [...]}``, every finding with its ``key``, its ``text`` and how bad it is, or
``{"error": "..."}``. It ends with its input, or with the process ``PARENT``, which started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
from typing import Any

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.diagnose.causes import diagnose
from megatron.adaptive.trace.read import read_run

LOOK_S = 1.0
"""Interval of the check that the parent still lives."""


def answer(folder: str, first: int, last: int) -> dict[str, Any]:
    """Diagnose a range of iterations, as far as they are written.

    Args:
        folder: of the traces.
        first: first iteration.
        last: last one.

    Returns:
        What goes out as a line.
    """
    try:
        run = read_run(folder)
        there = [i for i in run.complete_iterations(None) if first <= i <= last]
        if not there:
            return {"findings": []}
        said = diagnose(run, there)
    except TraceError as error:
        return {"error": str(error)}
    findings = [
        {
            "key": [f.cause, *f.ranks],
            "text": f.format(),
            "headline": f.headline,
            "do": f.advice[0] if f.advice else "",
            "factor": f.factor,
            "cost_fraction": f.cost_fraction,
            "goes_on": f.period.kind in ("lasting", "begun"),
        }
        for f in said.findings
    ]
    return {"findings": findings, "pace_ns": said.pace_ns}


def main() -> int:
    """Answer until the input ends."""
    folder, parent = sys.argv[1], int(sys.argv[2])
    with contextlib.suppress(OSError):
        os.nice(19)
    buffer = b""
    while os.getppid() == parent:
        if not select.select([0], [], [], LOOK_S)[0]:
            continue
        data = os.read(0, 4096)
        if not data:
            return 0
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines[-1:]:  # the newest question will do
            first, last = map(int, line.split())
            print(json.dumps(answer(folder, first, last)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
