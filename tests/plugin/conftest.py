"""Imports fixtures for token files and for releases of megatron-core, so that tests find them."""

from __future__ import annotations

from tests.fixtures import write_tokens

from .releases import python_path

__all__ = ["python_path", "write_tokens"]
