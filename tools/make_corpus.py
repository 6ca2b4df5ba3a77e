#!/usr/bin/env python3
"""Runs ``megatron.adaptive data corpus`` from a clone, even if the package is not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.adaptive.cli.preprocess_data import make_corpus_main as main

if __name__ == "__main__":
    raise SystemExit(main())
