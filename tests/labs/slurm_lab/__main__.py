"""Runs the Slurm lab from the command line."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from . import Kind, Lab, LabError, __doc__

_KIND = re.compile(r"(\w+):([1-9]\d*)x(\d+)")


def main() -> int:
    """Starts a lab, runs a command on its login host, and returns the command's exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.labs.slurm_lab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--kind",
        action="append",
        default=[],
        metavar="NAME:NODESxGPUS",
        help="kind of nodes with their numbers of nodes and GPUs, repeatable (default: a10:2x2)",
    )
    parser.add_argument(
        "--no-accounting", action="store_true", help=("run without accounting (sacct)")
    )
    parser.add_argument("--conf", action="append", default=[], help="additional line of slurm.conf")
    parser.add_argument("command", nargs="*", help="command to run, after -- (default: bash)")
    options = parser.parse_args()
    kinds = []
    for text in options.kind or ["a10:2x2"]:
        match = _KIND.fullmatch(text)
        if match is None:
            parser.error(f"--kind must be NAME:NODESxGPUS, for example a10:2x2, got {text}")
        kinds.append(Kind(match[1], int(match[2]), int(match[3])))
    # Raise an exception on SIGTERM, so that the nodes are stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with tempfile.TemporaryDirectory(prefix="slurm-lab-") as folder:
            os.chmod(folder, 0o755)
            accounting = not options.no_accounting
            root = Path(folder, "lab")
            with Lab(root, kinds, accounting=accounting, settings=options.conf) as lab:
                command = [*lab.enter("ctl", os.getcwd()), *(options.command or ["bash"])]
                return subprocess.run(command, env=lab.variables, check=False).returncode
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
