"""A process beside a running job that diagnoses some of its iterations.

``python -m megatron.adaptive.trace.diagnose.watch DIR FIRST LAST`` prints a line of JSON:
``{"findings": [...], "pace_ns": [...]}``, every finding with its ``key``, its ``text`` and how bad
it is, or ``{"error": "..."}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.diagnose.causes import diagnose
from megatron.adaptive.trace.read import read_run


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


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        os.nice(19)
    print(json.dumps(answer(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
