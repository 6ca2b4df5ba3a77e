"""Makes fixtures with the documents that training runs read available here."""

from __future__ import annotations

from tests.fixtures import write_tokens

__all__ = ["write_tokens"]
