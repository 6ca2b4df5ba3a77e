"""Makes fixtures available here: token files, and the releases of megatron-core."""

from __future__ import annotations

from tests.fixtures import write_tokens

from .releases import python_path

__all__ = ["python_path", "write_tokens"]
