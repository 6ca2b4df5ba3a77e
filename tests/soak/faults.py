"""Exposes jobs to corruption, attacks, lost nodes and full disks, and counts the effects.

    python -m tests.soak.faults [--quick] [--part PART ...] [--json FILE]

The part ``damages`` randomly corrupts checkpoints of the trainer and of a ``Pipeline``, which are
verified and loaded. The part ``leases`` starts jobs on the same folder and kills the owners of
its lease. In the part ``strangers``, clients without the secret connect to all listeners of
real jobs. In the part ``secrets``, another user searches for planted secrets. The part
``commands`` tries invalid command lines and files. The part ``control`` tests the manager of a job
with a thousand nodes. All nodes join at the same time, and are lost one at a time. The part
``soak`` kills, suspends and disconnects nodes, fills their disks, and flips bits in checkpoints.
Its nodes are namespaces, so it needs root. The part ``hangs`` checks stalled jobs and their
messages. The part ``interrupts`` interrupts and kills processes of all kinds of jobs at random
times. A part that fails is counted as a missed goal, and the other parts still run. Exits with
status 1 if a goal is missed.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from harness.report import Result, Row, measure, one_line, parser_of  # noqa: E402
from tests.soak import (  # noqa: E402
    commands,
    control_plane,
    damages,
    hangs,
    interrupts,
    leases,
    planted_secrets,
    strangers,
)
from tests.soak.lost_nodes import end_in_order, soaked  # noqa: E402

PARTS = (
    *("damages", "leases", "strangers", "secrets", "commands", "control", "soak"),
    *("hangs", "interrupts"),
)
FIRST_EVENTS = ("bit-flip", "trace-full", "stop-rank", "kill-rank")


def main(arguments: list[str] | None = None) -> int:
    """Runs the parts that the command line selects, and returns the exit status."""
    parser = parser_of(__doc__, PARTS)
    parser.add_argument("--seed", type=int, default=1, help="seed of all random choices (1)")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help='folder of all files; "hangs" resumes from it'
    )
    parser.add_argument(
        "--beside", type=int, default=1, help="number of concurrent hanging jobs (1)"
    )
    text = f"number of hangs (100; {len(hangs.KINDS)} with --quick)"
    parser.add_argument("--hangs", type=int, help=text)
    parser.add_argument(
        "--quiet-min", type=float, help="minutes of jobs without hangs (1000; 1 with --quick)"
    )
    options = parser.parse_args(arguments)
    quick, seed = options.quick, options.seed
    signal.signal(signal.SIGTERM, end_in_order)
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        base = Path(name) if options.keep is None else options.keep

        def folder(part: str) -> Path:
            made = base / part
            made.mkdir(parents=True, exist_ok=part == "hangs")
            return made

        counts = (1500, 150, 30) if quick else (10_000, 1000, 60)
        jobs, real = ((16, 8), 1) if quick else ((200, 100), 3)
        talk = (20_000, 30.0) if quick else (1_000_000, 900.0)
        minutes, every_s = (1.0, 5.0) if quick else (10.0, 60.0)
        still = (len(hangs.KINDS), 1.0) if quick else (100, 1000.0)
        hanging = still[0] if options.hangs is None else options.hangs
        quiet_min = still[1] if options.quiet_min is None else options.quiet_min
        events, limit_min = (6, 1.5) if quick else (100, 55.0)
        parts = {
            "damages": lambda: damages.measure(folder("damages"), *counts, seed),
            "leases": lambda: leases.measure(folder("leases"), *jobs, seed, real),
            "strangers": lambda: strangers.rows(*talk, seed),
            "secrets": lambda: look_for_secrets(seed),
            "commands": give_wrong_commands,
            "control": lambda: control_plane.measure(
                1000, minutes, every_s, folder("control"), seed
            ),
            "soak": lambda: soaked(base, events, limit_min, seed, FIRST_EVENTS),
            "hangs": lambda: hangs.measure(
                folder("hangs"), hanging, quiet_min, seed, options.beside
            ),
            "interrupts": lambda: interrupts.measure(
                folder("interrupts"), 2 if quick else 40, seed
            ),
        }
        return measure(parts, options, seed=seed)


def look_for_secrets(seed: int) -> Result:
    """Gives random secrets to jobs, and searches for the secrets as a different user.

    ``seed`` selects the secrets.
    """
    result = planted_secrets.measure(seed)
    if result["seen"] < 2 or result["arrived"] < result["jobs"]:
        raise RuntimeError(f"the jobs or the scanner did not work: {result}")
    note = f"{result['commands']} command lines, {result['files']} files, {result['jobs']} jobs"
    note = one_line("; ".join([note, *result["skipped"], *result["found"]]))
    title = "secrets found in command lines, files, logs and web pages"
    rows = [Row(what=title, value=len(result["found"]), goal=0, note=note)]
    return Result(rows=rows, facts={"secrets": result})


def give_wrong_commands() -> Result:
    """Runs invalid command lines and commands with damaged files. Counts the wrong responses."""
    result = commands.measure()
    note = f"the slowest took {result['longest_s']:.1f} s"
    wrong = [f"{line}: {why}" for line, why in result["wrong"].items()]
    note = one_line("; ".join([note, *wrong]))
    title = f"{result['cases']} wrong command lines and files: exits without one line and status 2"
    rows = [Row(what=title, value=len(result["wrong"]), goal=0, note=note)]
    return Result(rows=rows, facts={"commands": result})


if __name__ == "__main__":
    sys.exit(main())
