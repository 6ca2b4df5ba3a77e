"""Implements ``job top``, which shows in the terminal what each rank of a run is doing.

Shows each rank's current action, the training progress, step time, tokens per second, loss, bubble
(fraction of idle time), waits and memory. If the run has finished, shows its last state::

    run 17-4 · adaptive · 2 stages x 1 chunk                              running, 0.2 s old
    iteration 45 of 60 ━━━━━━━━━━━━━╸━━━━ 75%, 4.0 s left
    step 41.2 ms   12,410 tokens/s   loss 6.516 ▆▅▄▃▂▁   bubble 28.6%

     rank stage now        done  step            bubble  waits          compute     held slow
        0     0 F 3         3+1  █████████▒▒▒▒░   38.0%  input 31%      18.2 ms 64.0 MiB
        1     1 waits input 2+1  ██████████▒▒▒░   28.1%  input 20%      20.0 ms 32.0 MiB 1.30x
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron.adaptive.config.command_parser import PROGRAM, CommandParser, number
from megatron.adaptive.config.input_files import printable
from megatron.adaptive.errors import TraceError
from megatron.adaptive.schedule.action import place_label
from megatron.adaptive.trace.monitor import LiveRank, LiveRun, Snapshot, find_live
from megatron.adaptive.trace.trace_format import DRAWN_ACTIONS, SLICES

PERIOD_S = 0.5
PIPE_ROWS = 1000
"""Maximum number of lines in the table of ranks if the output is not a terminal."""

PIPE_COLUMNS = 160
"""Width of a frame in columns if the output is not a terminal."""


def main(argv: Sequence[str]) -> int:
    """Shows a run until Ctrl-C if the output is a terminal. Otherwise, prints one frame."""
    options = _parser().parse_args(argv)
    width = options.width
    if width is None and not sys.stdout.isatty():
        width = int(os.environ.get("COLUMNS") or PIPE_COLUMNS)
    console = Console(width=width, highlight=False, soft_wrap=False)
    run = LiveRun(find_live(options.run))
    with contextlib.suppress(KeyboardInterrupt):
        if console.is_terminal and not options.once:
            _watch(run, console, options.interval)
        else:
            snapshot = run.refresh()
            if not snapshot.is_begun:
                raise TraceError(
                    f"{snapshot.folder}: no run has written to this folder yet; pass the folder "
                    "of a run or its traces"
                )
            console.print(draw(snapshot, console.width, None))
    return 0


def _watch(run: LiveRun, console: Console, interval_s: float) -> None:
    """Updates the display every ``interval_s`` seconds until Ctrl-C.

    The last frame stays on the terminal.
    """
    snapshot = run.refresh()
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            live.update(draw(snapshot, console.width, console.height), refresh=True)
            time.sleep(interval_s)
            snapshot = run.refresh()
    console.print(draw(snapshot, console.width, console.height))


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=f"{PROGRAM} job top",
        description="Show the current or last state of a run. Press Ctrl-C to quit.",
    )
    seconds = number(float, 0.05, 3600, "time in seconds")
    columns = number(int, 40, 1000, "number of columns")
    run = "folder of the run, or of its traces (default: the newest run here)"
    period = f"time between two frames in seconds ({PERIOD_S})"
    add = parser.add_argument
    add("run", nargs="?", type=Path, metavar="DIR", help=run)
    add("--once", action="store_true", help="print one frame and exit")
    add("--interval", type=seconds, default=PERIOD_S, metavar="SECONDS", help=period)
    text = "width of a frame (default: width of the terminal)"
    add("--width", type=columns, metavar="COLUMNS", help=text)
    return parser


WIDE = 96
"""Minimum width of the terminal, in characters, for showing the column ``step`` in tables."""

BAR = 14
"""Length, in characters, of the bar that shows how a rank spends a step."""

CURVE = 16
"""Maximum number of points in the loss curve. Each point takes one character."""

_STATES = {
    "running": "bold green",
    "ended": "bold blue",
    "waiting": "bold yellow",
    "silent": "bold yellow",
    "killed": "bold red",
}
_DOING = {"F": "blue", "B": "green", "W": "dark_orange", "wait": "dim"}
_WAITS = {"input": "red", "memory": "magenta", "order": "yellow", "group": "cyan"}
_LONGEST_S = 1e9
_BARS = "▁▂▃▄▅▆▇█"


def draw(snapshot: Snapshot, width: int, height: int | None = None) -> RenderableType:
    """Draws the current or last state of a run.

    Args:
        snapshot: Snapshot of the run.
        width: Width of the terminal in columns.
        height: Height of the terminal in lines, or ``None`` for :data:`PIPE_ROWS` lines. If the
            terminal is too small for one line per rank, the table has one line per stage.
    """
    parts: list[RenderableType] = [_title(snapshot)]
    if snapshot.iteration or snapshot.total_iterations:
        parts += [_progress(snapshot), _figures(snapshot)]
    shown = len(snapshot.ranks)
    findings = [Text(f" {printable(text)}", style="bold red") for text in _findings(snapshot)]
    room = PIPE_ROWS if height is None else max(1, height - len(parts) - len(findings) - 5)
    if shown:
        parts.append(Text())
        is_large = shown > room
        parts.append(
            _stage_table(snapshot, width, room) if is_large else _rank_table(snapshot.ranks, width)
        )
    parts += findings
    parts += [Text(f" {printable(note)}", style="yellow") for note in _notes(snapshot)]
    return Group(*parts)


def _title(snapshot: Snapshot) -> RenderableType:
    header = snapshot.header
    folder = snapshot.folder.absolute()
    parts = [folder.parent.name if folder.name == "traces" else folder.name]
    if header is not None:
        parts.append(header.schedule)
        stages = _count(header.num_ranks, "stage")
        chunks = _count(header.num_chunks, "chunk")
        parts.append(f"{stages} x {chunks}")
        replicas = header.world_size // header.num_ranks
        parts += [_count(replicas, "replica")] if replicas > 1 else []
    state = Text(snapshot.state, style=_STATES.get(snapshot.state, "bold"))
    if snapshot.state in ("running", "waiting", "silent") and snapshot.age_s is not None:
        state.append(f", {_ago(snapshot.age_s)} old", style="default")
    line = Table.grid(expand=True, padding=(0, 1))
    line.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    line.add_column(no_wrap=True, justify="right")
    line.add_row(Text(f" {printable(' · '.join(parts))}", style="bold"), state)
    if not snapshot.detail:
        return line
    return Group(line, Text(f" {printable(snapshot.detail)}", style="dim", no_wrap=True))


def _progress(snapshot: Snapshot) -> RenderableType:
    done = snapshot.iteration
    total = snapshot.total_iterations
    if not total:
        return Text(f" iteration {done}")
    progress_text = f"{done / total:.0%}"
    left_s = snapshot.left_s()
    if snapshot.state == "running" and left_s is not None:
        progress_text += f", {_ago(left_s)} left"
    line = Table.grid(padding=(0, 1))
    line.add_row(
        f" iteration {done} of {total}",
        ProgressBar(total=total, completed=done, width=30),
        progress_text,
    )
    return line


def _figures(snapshot: Snapshot) -> Text:
    figures = []
    if snapshot.step_ms is not None:
        figures.append(f"step {_ms(snapshot.step_ms)}")
    if (speed := snapshot.last("tokens_per_s")) is not None:
        figures.append(f"{speed:,.0f} tokens/s")
    if (loss := snapshot.last("loss")) is not None:
        losses = [line.get("loss") for line in snapshot.progress]
        finite_losses = [float(value) for value in losses if isinstance(value, int | float)]
        figures.append(f"loss {loss:.4g} {_sparkline(finite_losses)}")
    elif snapshot.progress:
        figures.append("loss not finite")
    if snapshot.bubble is not None:
        slices = f" ({SLICES})" if snapshot.shares_gpus else ""
        figures.append(f"bubble {snapshot.bubble:.1%}{slices}")
    return Text(" " + "   ".join(figures), no_wrap=True, overflow="ellipsis")


def _rank_table(ranks: Sequence[LiveRank], width: int) -> Table:
    step = "step" if width >= WIDE else ""
    table = _table(f"rank stage now done {step} bubble waits compute held slow")
    # Let the column ``now`` shrink if the terminal is narrow.
    table.columns[2].min_width = 14
    table.columns[2].no_wrap = False
    chunks = max((r.header.num_chunks for r in ranks if r.header is not None), default=1)
    for rank in ranks:
        now = rank.now
        held_bytes = rank.held_bytes if now is None else now.held_bytes or rank.held_bytes
        table.add_row(
            str(rank.rank),
            "" if rank.header is None else str(rank.header.pp_rank),
            _now(rank, chunks),
            "" if now is None or rank.is_ended else f"{now.done[0]}+{now.done[1]}",
            *([_bar(rank)] if step else []),
            _percent(None if rank.busy is None else 1 - rank.busy),
            _waits(rank.waits),
            _ms(rank.compute_ms),
            _bytes(held_bytes),
            _mark(rank),
        )
    return table


def _table(columns: str) -> Table:
    """Creates an empty table whose headings are the words in ``columns``.

    Text is left-aligned, and numbers are right-aligned.
    """
    table = Table(box=None, padding=(0, 0, 0, 1), header_style="dim")
    for name in columns.split():
        is_text = name in ("now", "step", "waits", "slow")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    return table


def _stage_table(snapshot: Snapshot, width: int, room: int) -> Table:
    """Creates a table with a line per stage.

    A line shows what the stage's ranks are doing, and the median and worst values of these ranks.

    Args:
        snapshot: Snapshot of the run.
        width: Width of the terminal in columns.
        room: Maximum number of stages to show.
    """
    waits = "waits" if width >= WIDE else ""
    table = _table(f"stage ranks now bubble {waits} compute slowest slow")
    table.columns[2].overflow = "ellipsis"
    table.columns[2].max_width = width - 46
    stages: dict[int, list[LiveRank]] = {}
    for rank in snapshot.ranks:
        if rank.header is not None:
            stages.setdefault(rank.header.pp_rank, []).append(rank)
    for stage, members in sorted(stages.items())[:room]:
        doing = Counter(_word(rank) for rank in members)
        text = Text(" · ").join(
            [Text(f"{count} {word}", style=_style(word)) for word, count in doing.most_common()]
        )
        busy = [rank.busy for rank in members if rank.busy is not None]
        times = {rank.rank: rank.compute_ms for rank in members if rank.compute_ms is not None}
        worst = max(times, key=lambda rank: times[rank], default=None)
        slowest = max(members, key=lambda r: r.slow or 0.0)
        causes = {cause for rank in members for cause in rank.waits}
        median_waits = {c: statistics.median(r.waits.get(c, 0.0) for r in members) for c in causes}
        table.add_row(
            str(stage),
            str(len(members)),
            text,
            _percent(1 - statistics.median(busy) if busy else None),
            *([_waits(median_waits)] if waits else []),
            _ms(statistics.median(times.values()) if times else None),
            "" if worst is None else f"rank {worst} {_ms(times[worst])}",
            _mark(slowest),
        )
    return table


def _word(rank: LiveRank) -> str:
    """Returns one or two words that describe what ``rank`` is currently doing."""
    now = rank.now
    if rank.header is None:
        return "unreadable" if rank.problem else "not started"
    if rank.is_ended:
        return "ended"
    if rank.is_gone:
        return "gone"
    if now is None:
        return f"after {rank.iteration}" if rank.iteration else "started"
    if now.doing == "wait":
        return f"waits {now.cause}".rstrip()
    return now.doing or "between steps"


def _style(word: str) -> str:
    if word in ("gone", "unreadable"):
        return "red"
    return _DOING.get("wait" if word.startswith("waits") else word, "default")


def _now(rank: LiveRank, chunks: int) -> Text:
    word = _word(rank)
    now = rank.now
    text = Text(word, style=_style(word), no_wrap=True, overflow="ellipsis")
    if now is None or word in ("ended", "gone", "not started", "unreadable"):
        return text
    if word in DRAWN_ACTIONS and now.microbatch >= 0:
        text.append(f" {place_label(now.microbatch, now.slice if now.slice >= 0 else None)}")
    if word in DRAWN_ACTIONS and chunks > 1:
        text.append(f" chunk {now.chunk}", style="dim")
    if now.since_s >= 1:
        text.append(f" {_ago(now.since_s)}", style="yellow" if now.since_s < 10 else "red")
    return text


def _bar(rank: LiveRank) -> Text:
    """Draws a bar with the parts of a rank's step: computation, waits by cause, and other time."""
    text = Text()
    if rank.busy is None:
        return text
    text.append("█" * round(max(0.0, min(1.0, rank.busy)) * BAR), style="green")
    for cause, share in rank.waits.items():
        cells = min(round(share * BAR), BAR - len(text))
        text.append("▒" * cells, style=_WAITS.get(cause, "red"))
    text.append("░" * (BAR - len(text)), style="dim")
    return text


def _waits(waits: Mapping[str, float]) -> Text:
    """Returns the cause of the longest waits, and the fraction of the step spent in these waits.

    ``waits`` contains the fraction of the step for each cause.
    """
    cause = max(waits, key=lambda cause: waits[cause], default="")
    if waits.get(cause, 0.0) < 0.005:
        return Text()
    return Text(f"{cause} {waits[cause]:.0%}", style=_WAITS.get(cause, "red"))


def _mark(rank: LiveRank) -> Text:
    return Text() if rank.slow is None else Text(f"{rank.slow:.2f}x", style="bold red")


def _findings(snapshot: Snapshot) -> list[str]:
    """Returns one line for each of the (at most) three findings with the largest gains."""
    return [
        f"gain {finding['gain']:.1%}: {finding['headline']}; {finding['do']}"
        for finding in sorted(snapshot.findings, key=lambda finding: -finding["gain"])[:3]
    ]


def _notes(snapshot: Snapshot) -> list[str]:
    notes = [rank.problem for rank in snapshot.ranks if rank.problem]
    missing = sum(rank.header is None and not rank.problem for rank in snapshot.ranks)
    if missing:
        notes.append(f"{missing} of {len(snapshot.ranks)} ranks have no trace")
    return notes[:3]


def _sparkline(values: Sequence[float]) -> str:
    """Draws ``values`` as a line of block characters with eight different heights."""
    if len(values) < 2:
        return ""
    if len(values) > CURVE:  # Keep evenly spaced values.
        step = (len(values) - 1) / (CURVE - 1)
        values = [values[round(index * step)] for index in range(CURVE)]
    low = min(values)
    high = max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


def _percent(part: float | None) -> str:
    return "" if part is None else f"{part:.1%}"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f} ms"


def _bytes(size: int) -> str:
    if size < 1 << 20:
        return f"{size / 2**10:.1f} KiB" if size else ""
    return f"{size / 2**20:,.1f} MiB"


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if not seconds < _LONGEST_S:
        return "years"
    return str(timedelta(seconds=round(seconds)))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
