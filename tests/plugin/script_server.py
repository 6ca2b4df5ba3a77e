"""Forks ranks like the fork server of a node, but also imports Megatron-LM's trainer first.

Usage: ``script_server.py DESCRIPTOR``, with a Megatron-LM on ``PYTHONPATH``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import inspect
import sys
from typing import Any

from user_script import allow_old_python

from megatron.adaptive.cluster import rank_forkserver

_import_of_nodes = rank_forkserver._import


def _import() -> None:
    """Imports modules that ranks need. Ranks report import errors, so they are ignored here."""
    _import_of_nodes()
    allow_old_python()
    device = importlib.import_module("megatron.adaptive.accelerator")
    # Megatron-LM reads the source code of its classes to create help texts, which takes a third of
    # the time to start. Therefore, cache the source code.
    vars(inspect)["getsource"] = functools.cache(inspect.getsource)
    with contextlib.suppress(Exception), device.quiet_imports():
        importlib.import_module("megatron.training.training")
        arguments: Any = importlib.import_module("megatron.training.arguments")
        arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


if __name__ == "__main__":
    rank_forkserver._import = _import
    rank_forkserver.main(int(sys.argv[1]))
