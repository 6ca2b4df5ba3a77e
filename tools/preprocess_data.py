#!/usr/bin/env python3
"""Runs ``megatron.adaptive data preprocess`` from a clone, even if it is not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.adaptive.cli.preprocess_data import main

if __name__ == "__main__":
    raise SystemExit(main())
