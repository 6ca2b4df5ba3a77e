"""The lab as a command."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from . import Kind, Lab, LabError, __doc__

_KIND = re.compile(r"(\w+):([1-9]\d*)x(\d+)")
_CONTROL = """\
The nodes are n1, n2, ... in the order of --kind. From the command or from another terminal,

    echo 'crash n2' >"$SLURM_LAB_CONTROL"

ends all processes of a node (crash), cuts its cable first (poweroff), cuts the cable alone
(unplug), puts it in again (plug), or starts the node anew (boot).
"""


def main() -> int:
    """Start a lab, run a command on its login host, and end the lab with it."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.labs.slurm_lab",
        description=__doc__,
        epilog=_CONTROL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--kind",
        action="append",
        default=[],
        metavar="NAME:NODESxGPUS",
        help="equal nodes, repeatable (default: a10:2x2)",
    )
    parser.add_argument("--no-accounting", action="store_true", help="no sacct")
    parser.add_argument("--conf", action="append", default=[], help="a line of slurm.conf")
    parser.add_argument("command", nargs="*", help="after -- (default: bash)")
    options = parser.parse_args()
    kinds = []
    for text in options.kind or ["a10:2x2"]:
        match = _KIND.fullmatch(text)
        if match is None:
            parser.error(f"--kind {text}: write NAME:NODESxGPUS, as in a10:2x2")
        kinds.append(Kind(match[1], int(match[2]), int(match[3])))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the nodes on its way
    try:
        with tempfile.TemporaryDirectory(prefix="slurm-lab-") as folder:
            os.chmod(folder, 0o755)
            accounting = not options.no_accounting
            place = Path(folder, "lab")
            with Lab(place, kinds, accounting=accounting, settings=options.conf) as lab:
                return _run(lab, options.command or ["bash"])
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(lab: Lab, command: list[str]) -> int:
    control = lab.folder / "control"
    os.mkfifo(control)
    threading.Thread(target=_obey, args=(lab, control), daemon=True).start()
    environment = {**lab.variables, "SLURM_LAB_CONTROL": str(control)}
    enter = lab.enter("ctl", os.getcwd())
    return subprocess.run([*enter, *command], env=environment, check=False).returncode


def _obey(lab: Lab, control: Path) -> None:
    orders: dict[str, Callable[[str], None]] = {
        name: getattr(lab, name) for name in ("crash", "poweroff", "unplug", "plug", "boot")
    }
    while True:
        for line in control.read_text().splitlines():
            order, _, node = line.strip().partition(" ")
            if order in orders and node in dict(lab.nodes):
                orders[order](node)
            else:
                print(f"error: {line!r} is no order for a node", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
