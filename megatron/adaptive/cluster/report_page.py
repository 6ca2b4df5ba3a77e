"""The report of a job as one page for the browser, which needs nothing but itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from megatron.adaptive.trace.files import replaced
from megatron.adaptive.trace.views.page import plotly_js

__all__ = ["write_report"]


def write_report(told: Mapping[str, Any], target: Path) -> None:
    """Write the page, replacing the file.

    Args:
        told: what ``report.gather`` returns.
        target: the file, ``.html``.

    Raises:
        TraceError: the file cannot be written.
        SetupError: plotly is not installed.
    """
    plotly = plotly_js()
    before, after = _asset("report.html").split("{{scripts}}")
    before = before.replace("{{title}}", escape(str(told["title"])))
    text = json.dumps(told).replace("<", "\\u003c")
    with replaced(target) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(before.replace("{{style}}", _asset("report.css")))
        file.write(f'<script type="application/json" id="told">{text}</script>\n')
        for part in (plotly, _asset("report.js")):
            file.write("<script>" + part.replace("</script", "<\\/script") + "</script>\n")
        file.write(after)


def _asset(name: str) -> str:
    return (
        resources.files(__package__).joinpath("assets").joinpath(name).read_text(encoding="utf-8")
    )
