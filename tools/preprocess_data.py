#!/usr/bin/env python3
"""Runs ``megatron.adaptive.cli.preprocess_data`` from a clone, installed or not."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.adaptive.cli.preprocess_data import main

if __name__ == "__main__":
    raise SystemExit(main())
