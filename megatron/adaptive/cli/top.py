"""``top``: what a run does at this moment, in the terminal, drawn with rich.

Shows each rank's present action, the progress of the iteration, step time, tokens per second, loss,
bubble, waits and memory, of a run in progress or of one that has ended::

    run 17-4 · adaptive · 2 stages x 1 chunk                              running, 0.2 s old
    iteration 45 of 60 ━━━━━━━━━━━━━╸━━━━ 75%, 4 s left
    step 41.2 ms   12,410 tokens/s   loss 6.516 ▆▅▄▃▂▁   bubble 28.6%

     rank stage now        done  step            bubble  waits            compute    held  slow
        0     0 F 3         3+1  ███████▌░░░░░░   38.0%  input 31%        18.2 ms  64 MiB
        1     1 waits input 2+1  █████████▎░░░░   28.1%  input 20%        20.0 ms  32 MiB  1.30x
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import statistics
import sys
import termios
import time
import tty
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron.adaptive.config.command_parser import CommandParser, number
from megatron.adaptive.config.outside import printable
from megatron.adaptive.trace.event import DRAWN_ACTIONS
from megatron.adaptive.trace.live import LiveRank, LiveRun, Snapshot, find_live

PERIOD_S = 0.5
PIPE_COLUMNS = 160
"""Width used where the output is no terminal."""

OVER = ("ended", "killed")


def main(argv: Sequence[str]) -> int:
    """Show a run until it is over (not on a terminal), or until ``q``."""
    options = _parser().parse_args(argv)
    width = options.width
    if width is None and not sys.stdout.isatty():
        width = int(os.environ.get("COLUMNS") or PIPE_COLUMNS)
    console = Console(width=width, highlight=False, soft_wrap=False)
    run = LiveRun(find_live(options.run))
    with contextlib.suppress(KeyboardInterrupt):
        if options.once:
            console.print(draw(run.refresh(), console.width, None))
        elif console.is_terminal:
            _watch(run, console, options.interval)
        else:
            _follow(run, console, options.interval)
    return 0


def _watch(run: LiveRun, console: Console, interval_s: float) -> None:
    """Refresh in place; leaves the last frame behind."""
    snapshot = run.refresh()
    with (
        _keys() as pressed,
        Live(console=console, screen=True, auto_refresh=False) as live,
        contextlib.suppress(KeyboardInterrupt),
    ):
        while True:
            live.update(draw(snapshot, console.width, console.height), refresh=True)
            if "q" in pressed(interval_s).lower():
                break
            snapshot = run.refresh()
    console.print(draw(snapshot, console.width, console.height))


def _follow(run: LiveRun, console: Console, interval_s: float) -> None:
    """A frame per refresh, one below the other, until the run is over."""
    while True:
        snapshot = run.refresh()
        console.print(draw(snapshot, console.width, None))
        sys.stdout.flush()
        if snapshot.state in OVER:
            return
        console.print()
        time.sleep(interval_s)


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
        prog="top", description="Show what a run does now, or did last. q ends it."
    )
    seconds = number(float, 0.05, 3600, "time in seconds")
    columns = number(int, 40, 1000, "number of columns")
    run = "folder of the run, or of its traces (default: runs/latest)"
    period = f"time between two frames ({PERIOD_S})"
    add = parser.add_argument
    add("run", nargs="?", type=Path, metavar="DIR", help=run)
    add("--once", action="store_true", help="print one frame and end")
    add("--interval", type=seconds, default=PERIOD_S, metavar="SECONDS", help=period)
    add("--width", type=columns, metavar="COLUMNS", help="width of a frame (the terminal's)")
    return parser


WIDE, MIDDLE = 120, 96
"""From so many columns on there is room for everything, and for the bar of the step."""

_STATES = {
    "running": "bold green",
    "ended": "bold blue",
    "waiting": "bold yellow",
    "silent": "bold yellow",
    "killed": "bold red",
}
_DOING = {"F": "blue", "B": "green", "W": "dark_orange", "wait": "dim"}
_WAITS = {"input": "red", "memory": "magenta", "order": "yellow", "group": "cyan"}
_BARS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"


def draw(snapshot: Snapshot, width: int, height: int | None = None) -> RenderableType:
    """Draw a run.

    Args:
        snapshot: the run.
        width: columns of the terminal.
        height: its rows, ``None`` for as many as it takes. Where they are too few for a line per
            rank there is one per stage.
    """
    parts: list[RenderableType] = [_title(snapshot, width)]
    if snapshot.iteration or snapshot.total_iterations:
        parts += [_progress(snapshot, width), _figures(snapshot, width)]
    shown = len(snapshot.ranks)
    found = [Text(f" {printable(text)}", style="bold red") for text in _findings(snapshot)]
    room = shown if height is None else height - len(parts) - len(found) - 5
    if shown:
        header = snapshot.header
        num_stages = 1 if header is None else header.num_ranks
        parts.append(Text())
        if shown <= max(room, 1) or shown <= num_stages:
            parts.append(_rank_table(snapshot.ranks[: max(room, 1)], width))
            if shown > max(room, 1):
                parts.append(Text(f" and {shown - max(room, 1)} more ranks", style="dim"))
        else:
            parts.append(_stage_table(snapshot, width, max(room, 1)))
    parts += found
    parts += [Text(f" {printable(note)}", style="yellow") for note in _notes(snapshot)]
    return Group(*parts)


def _title(snapshot: Snapshot, width: int) -> RenderableType:
    header = snapshot.header
    name = printable(str(snapshot.folder))
    if header is not None:
        replicas = header.world_size // header.num_ranks
        what = [
            header.schedule,
            _count(header.num_ranks, "stage") + f" x {_count(header.num_chunks, 'chunk')}",
        ]
        what += [_count(replicas, "replica")] if replicas > 1 else []
        shape = " · ".join(what)
        name = f"{_short(name, max(12, width - len(shape) - 28))} · {shape}"
    state = Text(snapshot.state, style=_STATES.get(snapshot.state, "bold"))
    if snapshot.state in ("running", "waiting", "silent") and snapshot.age_s is not None:
        state.append(f", {_ago(snapshot.age_s)} old", style="default")
    line = Table.grid(expand=True, padding=(0, 1))
    line.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    line.add_column(no_wrap=True, justify="right")
    line.add_row(Text(f" {name}", style="bold"), state)
    if not snapshot.detail:
        return line
    return Group(
        line, Text(f" {printable(snapshot.detail)}", style="dim", no_wrap=True, overflow="ellipsis")
    )


def _progress(snapshot: Snapshot, width: int) -> RenderableType:
    done, total = snapshot.iteration, snapshot.total_iterations
    if not total:
        return Text(f" iteration {done}")
    line = Table.grid(padding=(0, 1))
    rest = f"{done / total:.0%}"
    left_s = snapshot.left_s()
    if snapshot.state == "running" and left_s is not None:
        rest += f", {_ago(left_s)} left"
    head = f" iteration {done} of {total}"
    bar = ProgressBar(total=total, completed=done, width=max(8, min(48, width - len(head) - 26)))
    line.add_row(head, bar, rest)
    return line


def _figures(snapshot: Snapshot, width: int) -> Text:
    words = []
    if snapshot.step_ms is not None:
        words.append(f"step {_ms(snapshot.step_ms)}")
    if (speed := snapshot.last("tokens_per_s")) is not None:
        words.append(f"{speed:,.0f} tokens/s")
    if (loss := snapshot.last("loss")) is not None:
        losses = [line.get("loss") for line in snapshot.progress]
        known = [float(value) for value in losses if isinstance(value, int | float)]
        words.append(f"loss {loss:.4g} {_sparkline(known, 24 if width >= MIDDLE else 12)}")
    elif snapshot.progress:
        words.append("loss not finite")
    if snapshot.bubble is not None:
        words.append(f"bubble {snapshot.bubble:.1%}")
    if width >= WIDE and (rate := snapshot.last("learning_rate")) is not None:
        words.append(f"learning rate {rate:.3g}")
    if width >= WIDE and (peak := snapshot.last("peak_memory_bytes")):
        words.append(f"memory {_bytes(peak)}")
    return Text(" " + "   ".join(words), no_wrap=True, overflow="ellipsis")


def _rank_table(ranks: Sequence[LiveRank], width: int) -> Table:
    step = "step" if width >= MIDDLE else ""
    table = _table(width, f"rank stage now done {step} bubble waits compute held slow")
    # Its cells give way where there is too little room.
    table.columns[2].min_width, table.columns[2].no_wrap = 14, False
    chunks = max((r.header.num_chunks for r in ranks if r.header is not None), default=1)
    for rank in ranks:
        stage = "" if rank.header is None else str(rank.header.pp_rank)
        held = rank.held_bytes if rank.now is None else rank.now.held_bytes or rank.held_bytes
        table.add_row(
            *(str(rank.rank), stage, _now(rank, chunks), _done(rank, width)),
            *([_bar(rank, 32 if width >= WIDE else 14)] if step else []),
            _percent(None if rank.busy is None else 1 - rank.busy),
            _waits(rank.waits, 4 if width >= WIDE else 1),
            *(_ms(rank.compute_ms), _bytes(held), _mark(rank)),
        )
    return table


def _table(width: int, columns: str) -> Table:
    """A table without rows; words and bars stand to the left, numbers to the right."""
    padding = (0, 1, 0, 1) if width >= WIDE else (0, 0, 0, 1)
    table = Table(box=None, padding=padding, header_style="dim")
    for name in columns.split():
        is_text = name in ("now", "step", "waits", "slow")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    return table


def _stage_table(snapshot: Snapshot, width: int, room: int) -> Table:
    """A line per stage: what its ranks do, and the figures of the middle one and the worst."""
    waits = "waits" if width >= MIDDLE else ""
    table = _table(width, f"stage ranks now bubble {waits} compute slowest slow")
    table.columns[2].overflow, table.columns[2].max_width = "ellipsis", width - 46
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
        usual = {c: statistics.median(r.waits.get(c, 0.0) for r in members) for c in causes}
        table.add_row(
            *(str(stage), str(len(members)), text),
            _percent(1 - statistics.median(busy) if busy else None),
            *([_waits(usual, 2)] if waits else []),
            _ms(statistics.median(times.values()) if times else None),
            "" if worst is None else f"rank {worst} {_ms(times[worst])}",
            _mark(slowest),
        )
    return table


def _word(rank: LiveRank) -> str:
    """Describes a rank's present action in a word or two."""
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
    word, now = _word(rank), rank.now
    text = Text(word, style=_style(word), no_wrap=True, overflow="ellipsis")
    if now is None or word in ("ended", "gone", "not started", "unreadable"):
        return text
    if word in DRAWN_ACTIONS and now.microbatch >= 0:
        text.append(f" {now.microbatch}")
    if word in DRAWN_ACTIONS and chunks > 1:
        text.append(f" chunk {now.chunk}", style="dim")
    if now.since_s >= 1:
        text.append(f" {_ago(now.since_s)}", style="yellow" if now.since_s < 10 else "red")
    return text


def _done(rank: LiveRank, width: int) -> str:
    """Forwards and backwards of the iteration, of all."""
    now = rank.now
    if now is None or rank.header is None or not now.num_microbatches or rank.is_ended:
        return ""
    each = now.num_microbatches * rank.header.num_chunks
    counts = f"{now.done[0]}+{now.done[1]}"
    return f"{counts} of {each}" if width >= MIDDLE else counts


def _bar(rank: LiveRank, length: int) -> Text:
    """The step: work, waits by cause, and the rest."""
    if rank.busy is None:
        return Text()
    text = Text()
    filled = max(0.0, min(1.0, rank.busy)) * length
    whole, part = int(filled), int(filled % 1 * 8)
    text.append("█" * whole + (_EIGHTHS[part] if part else ""), style="green")
    for cause, share in rank.waits.items():
        cells = min(round(share * length), length - len(text))
        text.append("▒" * cells, style=_WAITS.get(cause, "red"))
    text.append("░" * (length - len(text)), style="dim")
    return text


def _waits(waits: Mapping[str, float], most: int) -> Text:
    text = Text()
    ordered = sorted(waits.items(), key=lambda item: -item[1])
    for cause, share in [item for item in ordered if item[1] >= 0.005][:most]:
        text.append(f"{cause} {share:.0%} ", style=_WAITS.get(cause, "red"))
    return text


def _mark(rank: LiveRank) -> Text:
    return Text() if rank.slow is None else Text(f"{rank.slow:.2f}x", style="bold red")


def _findings(snapshot: Snapshot) -> list[str]:
    """Returns a line for each of the dearest findings: its gain, what it is, what to do."""
    return [
        f"gain {one['gain']:.1%}: {one['headline']}; {one['do']}"
        for one in sorted(snapshot.findings, key=lambda one: -one["gain"])[:3]
    ]


def _notes(snapshot: Snapshot) -> list[str]:
    notes = [rank.problem for rank in snapshot.ranks if rank.problem]
    missing = sum(rank.header is None and not rank.problem for rank in snapshot.ranks)
    if missing:
        notes.append(f"{missing} of {len(snapshot.ranks)} ranks have no trace")
    return notes[:3]


def _sparkline(values: Sequence[float], length: int) -> str:
    """The last values, the range of all of them in eight steps."""
    if len(values) < 2:
        return ""
    if len(values) > length:  # the whole run, thinned
        step = (len(values) - 1) / (length - 1)
        values = [values[round(place * step)] for place in range(length)]
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


def _percent(part: float | None) -> str:
    return "" if part is None else f"{part:.1%}"


def _ms(value: float | None) -> str:
    if value is None:
        return ""
    if value >= 10_000:
        return f"{value / 1e3:.1f} s"
    return f"{value:.0f} ms" if value >= 1000 else f"{value:.1f} ms"


def _bytes(size: float | None) -> str:
    if not size:
        return ""
    units = ["B", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size:.0f} {units[0]}" if size >= 10 else f"{size:.1f} {units[0]}"


def _ago(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172800 else f"{seconds / 86400:.0f} days"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _short(name: str, length: int) -> str:
    return name if len(name) <= length else "…" + name[1 - length :]
