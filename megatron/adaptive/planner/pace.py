"""How fast a process works beside others on the cores of its node."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Pace"]


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Speed of a process, as a part of what it has while all cores work.

    ::

        processes at work        1     ...     cores           twice as many
        speed of each          alone  (line)     1      crowded * cores / processes

    Attributes:
        alone: of a process that works alone on its node; above 1 where cores share caches, memory
            or execution units.
        crowded: of all cores together, while more processes work than there are cores; below 1
            where taking turns costs.
    """

    alone: float = 1.0
    crowded: float = 1.0

    def speed(self, processes: int, cores: int) -> float:
        """Speed of each of some processes at work on a node.

        Args:
            processes: at least 1.
            cores: of the node; 0 for as many as are needed.
        """
        if not cores or processes == cores:
            return 1.0
        if processes > cores:
            return self.crowded * cores / processes
        return 1.0 + (self.alone - 1.0) * (cores - processes) / (cores - 1)
