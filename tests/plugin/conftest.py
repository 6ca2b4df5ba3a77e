"""Imports the fixtures for token files and for the releases of megatron-core."""

from __future__ import annotations

from tests.fixtures import write_tokens

from .releases import python_path

__all__ = ["python_path", "write_tokens"]
