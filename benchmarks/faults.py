"""What damages, strangers, lost nodes and full disks do to a job, against the goals.

    python benchmarks/faults.py [--quick] [--part PART ...] [--json FILE]

Parts: ``damages``, random damages to checkpoints of the trainer and of a ``Pipeline``, looked for
and loaded; ``control``, the manager of a job of a thousand nodes that join at once and are lost bit
by bit; ``soak``, nodes (namespaces; needs root) that are killed, stopped, cut off and filled up,
with full disks of traces and flipped bits in checkpoints among it. A part that fails is a goal
missed, and the others are measured all the same. Exits with status 1 where a goal is missed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.elasticity.soak import soaked  # noqa: E402
from benchmarks.report import describe_machine, finish, parser_of, run  # noqa: E402
from benchmarks.trust import control_plane, damages  # noqa: E402

PARTS = ("damages", "control", "soak")
FIRST_EVENTS = ("bit-flip", "trace-full", "stop-rank", "kill-rank")


def main(words: list[str] | None = None) -> int:
    """Measure as the command line says; returns the exit status."""
    parser = parser_of(__doc__, PARTS)
    parser.add_argument("--seed", type=int, default=1, help="of all that is random (1)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="new folder for what is written")
    options = parser.parse_args(words)
    quick, seed = options.quick, options.seed
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        base = Path(name) if options.keep is None else options.keep

        def folder(part: str) -> Path:
            made = base / part
            made.mkdir(parents=True)
            return made

        counts = (1500, 150, 30) if quick else (10_000, 1000, 60)
        minutes, every_s = (1.0, 5.0) if quick else (10.0, 60.0)
        events, limit_min = (12, 3.0) if quick else (100, 55.0)
        parts = {
            "damages": lambda: damages.measure(folder("damages"), *counts, seed),
            "control": lambda: control_plane.measure(
                1000, minutes, every_s, folder("control"), seed
            ),
            "soak": lambda: soaked(base, events, limit_min, seed, FIRST_EVENTS),
        }
        total = run({part: parts[part] for part in PARTS if part in options.part})
    return finish(total, options.json, machine=machine, seed=seed)


if __name__ == "__main__":
    sys.exit(main())
