"""Runs one rank of a plan in a separate process, which ``plan --try`` starts.

python -m megatron.adaptive.cli.try_rank REQUEST.json RESULT.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatron.adaptive.cli.common import run_cli
from megatron.adaptive.training.try_rank import TrialRequest, try_rank


def main(argv: Sequence[str]) -> int:
    """Runs the rank that the file ``argv[0]`` describes, and writes measurements to ``argv[1]``."""
    source, target = map(Path, argv)
    content = json.loads(source.read_text(encoding="utf-8"))
    lists = {name: tuple(value) for name, value in content.items() if isinstance(value, list)}
    tried, layers = try_rank(TrialRequest(**{**content, **lists}))
    target.write_text(json.dumps({"rank": asdict(tried), "layers": layers}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
