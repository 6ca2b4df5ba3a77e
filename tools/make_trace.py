#!/usr/bin/env python3
"""Runs ``tests.support.make_trace`` from a clone, even if the package is not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.adaptive.cli.common import run_cli
from tests.support.make_trace import main

if __name__ == "__main__":
    raise SystemExit(run_cli(main, sys.argv[1:]))
