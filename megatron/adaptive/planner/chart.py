"""Draws a Pareto front of price and speed: a page for the browser and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.adaptive.errors import ConfigError, SetupError

__all__ = ["Point", "write_page", "write_picture"]

_COLOUR = "#1f77b4"
_SPEED, _PRICE = "tokens per second", "price of a million tokens"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One plan of the front.

    Attributes:
        tokens_per_s: of the job.
        price_per_million: tokens.
        label: nodes and degrees.
    """

    tokens_per_s: float
    price_per_million: float
    label: str


def write_page(points: Sequence[Point], title: str, path: Path) -> None:
    """Write a self-contained page with one point for each plan, told when pointed at.

    Raises:
        SetupError: plotly is missing.
        ConfigError: the file cannot be written.
    """
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise SetupError(f"{path}: the page needs plotly: pip install plotly") from error
    figure: Any = go.Figure(
        go.Scatter(
            x=[one.price_per_million for one in points],
            y=[one.tokens_per_s for one in points],
            text=[one.label for one in points],
            mode="lines+markers",
            line={"shape": "hv", "color": _COLOUR},
            hovertemplate="%{text}<br>%{y:,.0f} tokens/s<br>%{x:.4g} for a million<extra></extra>",
        )
    )
    figure.update_layout(
        title=title, xaxis_title=_PRICE, yaxis_title=_SPEED, template="plotly_white"
    )
    _write(path, lambda: figure.write_html(str(path), include_plotlyjs=True))


def write_picture(points: Sequence[Point], title: str, path: Path) -> None:
    """Write the same as PNG.

    Raises:
        SetupError: matplotlib is missing.
        ConfigError: the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SetupError(f"{path}: the picture needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(8, 5), dpi=120)
    axes = figure.add_subplot()
    prices = [one.price_per_million for one in points]
    speeds = [one.tokens_per_s for one in points]
    axes.step(prices, speeds, where="post", color=_COLOUR, linewidth=1)
    axes.plot(prices, speeds, "o", color=_COLOUR, markersize=4)
    axes.set_title(title)
    axes.set_xlabel(_PRICE)
    axes.set_ylabel(_SPEED)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    FigureCanvasAgg(figure)
    _write(path, lambda: figure.savefig(str(path), format="png"))


def _write(path: Path, write: Any) -> None:
    try:
        write()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name another folder") from error
