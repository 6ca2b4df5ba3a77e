"""``top``: what a run does at this moment, in the terminal.

Shows each rank's present action, the progress of the iteration, step time, tokens per second, loss,
bubble, waits and memory, of a run in progress or of one that has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.adaptive.config.command_parser import CommandParser, number
from megatron.adaptive.errors import SetupError
from megatron.adaptive.trace.live import LiveRun, Snapshot, find_live

PERIOD_S = 0.5
PIPE_COLUMNS = 160
"""Width used where the output is no terminal."""

OVER = ("ended", "killed")


def main(argv: Sequence[str]) -> int:
    """Show a run until it is over (not on a terminal), or until ``q``."""
    options = _parser().parse_args(argv)
    console = _console(options.width)
    run = LiveRun(find_live(options.run))
    with contextlib.suppress(KeyboardInterrupt):
        if options.once:
            console.print(_draw(run.refresh(), console.width, None))
        elif console.is_terminal:
            _watch(run, console, options.interval)
        else:
            _follow(run, console, options.interval)
    return 0


def _watch(run: LiveRun, console: Any, interval_s: float) -> None:
    """Refresh in place; leaves the last frame behind."""
    from rich.live import Live

    snapshot = run.refresh()
    with (
        _keys() as pressed,
        Live(console=console, screen=True, auto_refresh=False) as live,
        contextlib.suppress(KeyboardInterrupt),
    ):
        while True:
            live.update(_draw(snapshot, console.width, console.height), refresh=True)
            if "q" in pressed(interval_s).lower():
                break
            snapshot = run.refresh()
    console.print(_draw(snapshot, console.width, console.height))


def _follow(run: LiveRun, console: Any, interval_s: float) -> None:
    """A frame per refresh, one below the other, until the run is over."""
    while True:
        snapshot = run.refresh()
        console.print(_draw(snapshot, console.width, None))
        sys.stdout.flush()
        if snapshot.state in OVER:
            return
        console.print()
        time.sleep(interval_s)


def _draw(snapshot: Snapshot, width: int, height: int | None) -> Any:
    from megatron.adaptive.trace.live_view import draw

    return draw(snapshot, width, height)


def _console(width: int | None) -> Any:
    try:
        from rich.console import Console
    except ImportError as error:
        raise SetupError(f"top draws with rich ({error}): pip install rich") from None
    if width is None and not sys.stdout.isatty():
        width = int(os.environ.get("COLUMNS") or PIPE_COLUMNS)
    return Console(width=width, highlight=False, soft_wrap=False)


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """Give a function that waits some seconds and returns the keys pressed meanwhile."""
    if not sys.stdin.isatty():
        yield lambda seconds: select.select([], [], [], seconds) and ""
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([keyboard], [], [], seconds)
        return os.read(keyboard, 64).decode(errors="ignore") if ready else ""

    try:
        tty.setcbreak(keyboard)
        yield pressed
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="top",
        allow_abbrev=False,
        description="Show what a run does now, or did last. q ends it.",
    )
    parser.add_argument(
        "run",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="folder of the run, or of its traces (default: runs/latest)",
    )
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    parser.add_argument(
        "--interval",
        type=number(float, 0.05, 3600, "time in seconds"),
        default=PERIOD_S,
        metavar="SECONDS",
        help=f"time between two frames ({PERIOD_S})",
    )
    parser.add_argument(
        "--width",
        type=number(int, 40, 1000, "number of columns"),
        metavar="COLUMNS",
        help="width of a frame (the terminal's)",
    )
    return parser
