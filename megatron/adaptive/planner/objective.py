"""What a search minimises, and under which limits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megatron.adaptive.errors import ConfigError

__all__ = ["Objective"]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Least time or least cost.

    Attributes:
        least: ``time`` for seconds per step, ``cost`` for the price of a step.
        most_seconds_per_step: slower plans do not count.
        most_price_per_hour: dearer nodes do not count.
        most_price_per_step: plans whose step costs more do not count; a budget for a run, divided
            by its steps.

    Raises:
        ConfigError: a limit is not above 0.
    """

    least: Literal["time", "cost"] = "time"
    most_seconds_per_step: float = math.inf
    most_price_per_hour: float = math.inf
    most_price_per_step: float = math.inf

    def __post_init__(self) -> None:
        if self.least not in ("time", "cost"):
            raise ConfigError(f"objective is {self.least!r}: choose time or cost")
        for name in ("most_seconds_per_step", "most_price_per_hour", "most_price_per_step"):
            value = getattr(self, name)
            if math.isnan(value) or value <= 0:
                raise ConfigError(f"{name} is {value:g}: it must be above 0")

    def value(self, seconds: float, price_per_hour: float) -> float:
        """What is minimised."""
        return seconds if self.least == "time" else seconds * price_per_hour / 3600

    def most_seconds(self, price_per_hour: float, worst_value: float) -> float:
        """Seconds below which a plan keeps the limits and has a value below ``worst_value``."""
        if price_per_hour > self.most_price_per_hour:
            return 0.0
        # A limit may be met exactly.
        most = math.nextafter(self.most_seconds_per_step, math.inf)
        hourly = price_per_hour / 3600
        if hourly:
            most = min(most, math.nextafter(self.most_price_per_step / hourly, math.inf))
        if self.least == "time":
            return min(most, worst_value)
        return min(most, worst_value / hourly) if hourly else most
