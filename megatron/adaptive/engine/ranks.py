"""What parts that all ranks share ask of the job they are in."""

from __future__ import annotations

from typing import Any, Protocol

from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.config.environment import Environment

__all__ = ["Ranks"]


class Ranks(Protocol):
    """This process among all of the job."""

    @property
    def rank(self) -> int:
        """Global rank."""

    @property
    def environment(self) -> Environment:
        """What the launcher said."""

    @property
    def accelerator(self) -> Accelerator:
        """This process's device."""

    @property
    def control_group(self) -> Any:
        """A gloo group of all ranks."""

    @property
    def places(self) -> list[dict[str, Any]]:
        """Where every rank runs."""

    def gather(self, mine: Any) -> list[Any]:
        """Return what every rank gave, by rank. Collective over all ranks."""
