"""Runs the GPU check from the command line. See ``scripts/gpu_check.sh``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu_check.check import Check
from gpu_check.machine import card_and_driver, default_output, nvidia_smi
from gpu_check.parts import ALWAYS, chosen_parts, parts, set_up_part


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses ``arguments``, checks this machine's GPU, and returns the exit status."""
    names = [part.name for part in parts(rehearse=False)]
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check.sh",
        description="Run all checks that need a GPU, within a time limit.",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        help="time limit for all parts together, in minutes (default: %(default)g)",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=names,
        metavar="NAME",
        help=f"run only these parts, after set-up and {' and '.join(ALWAYS)}: {', '.join(names)}",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help=(
            "output folder for gpu_check.md, gpu_check.json and gpu_check.log; by default, a "
            "folder in results/ that is named after the date, the GPU and the driver"
        ),
    )
    parser.add_argument(
        "--pack",
        type=Path,
        metavar="FOLDER",
        help="folder created by scripts/gpu_pack.sh, to use instead of a network",
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="run without a GPU, with small models"
    )
    options = parser.parse_args(arguments)
    if not 0.5 <= options.minutes <= 24 * 60:
        parser.error(f"--minutes must be from 0.5 to 1440, got {options.minutes:g}")
    if options.pack is not None and not (options.pack / "wheels").is_dir():
        parser.error(
            f"--pack {options.pack} has no folder wheels; create it with scripts/gpu_pack.sh"
        )
    facts = card_and_driver(nvidia_smi())
    output = options.output or default_output(facts, rehearse=options.rehearse)
    pack = None if options.pack is None else options.pack.resolve()
    check = Check(output, options.minutes, rehearse=options.rehearse, pack=pack)
    status = check.run(set_up_part(pack), chosen_parts(options.parts, rehearse=options.rehearse))
    print(output / "gpu_check.md")
    return status


if __name__ == "__main__":
    sys.exit(main())
