"""``report``: one page about a job, after its run or during it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.adaptive.cluster.node import ROOT
from megatron.adaptive.cluster.report import gather, write_report
from megatron.adaptive.config.command_parser import CommandParser


def main(argv: Sequence[str]) -> int:
    """Write the page and say where it is.

    Returns:
        Exit status 0.

    Raises:
        ConfigError: an option is wrong.
        SetupError: nobody knows the job, it has no logs, or plotly is missing.
        TraceError: the page cannot be written.
    """
    parser = CommandParser(
        prog="python -m megatron.adaptive report",
        allow_abbrev=False,
        description="Write one page about a job: configuration, curves, use of each node, "
        "pipeline, errors. It needs nothing but a browser.",
    )
    add = parser.add_argument
    add("job", help="its id, which is the name of its folder of logs; or that folder")
    add("--log-dir", type=Path, help="LOG_DIR of conf.sh (logs)")
    add("--output", type=Path, metavar="FILE", help="the page (report.html in the job's folder)")
    options = parser.parse_args(argv)
    job, logs = options.job, options.log_dir or ROOT / "logs"
    if "/" in job or (options.log_dir is None and Path(job).is_dir()):
        folder = Path(job).absolute()
        job, logs = folder.name, folder.parent
    target = options.output or logs / job / "report.html"
    write_report(gather(job, logs), target)
    print(target.resolve())
    return 0
