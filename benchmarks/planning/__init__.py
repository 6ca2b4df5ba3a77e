"""Parts of ``benchmarks/planner.py``, one module each, and the rows that they give."""

from __future__ import annotations

from typing import Any

__all__ = ["goal_row", "table"]


def goal_row(what: str, value: float, sign: str, limit: float, note: str = "") -> dict[str, Any]:
    """Returns a figure beside its goal, ``<=`` or ``>=`` a limit."""
    met = value <= limit * (1 + 1e-9) if sign == "<=" else value >= limit
    return {"what": what, "value": value, "goal": f"{sign} {limit:g}", "met": met, "note": note}


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as Markdown."""
    lines = ["| figure | value | goal | met | |", "|---|---|---|---|---|"]
    for row in rows:
        met = "yes" if row["met"] else "no"
        cells = (row["what"], f"{row['value']:.5g}", row["goal"], met, row["note"])
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
