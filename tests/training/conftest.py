"""Makes the fixtures that write documents for training runs available to these tests."""

from __future__ import annotations

from tests.fixtures import write_tokens

__all__ = ["write_tokens"]
