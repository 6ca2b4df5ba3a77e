"""Makes the fixtures for token files and for megatron-core releases available to the tests."""

from __future__ import annotations

from tests.fixtures import write_tokens

from .releases import python_path

__all__ = ["python_path", "write_tokens"]
