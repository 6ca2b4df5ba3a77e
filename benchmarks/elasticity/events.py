"""What happens to the nodes of a job: each kind of event, and its end where it lasts."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from .nodes import Node, Nodes, go_on, stop

Undo = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of event.

    Attributes:
        weight: how often it comes.
        short_s: range of how long it lasts where that is less than the time limit of silence.
        long_s: the same where it is more; the one or the other.
    """

    weight: int
    short_s: tuple[float, float] = (0.0, 0.0)
    long_s: tuple[float, float] = (0.0, 0.0)


KINDS = {
    "kill-rank": Kind(weight=14),
    "kill-agent": Kind(weight=14),
    "kill-node": Kind(weight=8),
    "power-off": Kind(weight=5),
    "stop-rank": Kind(weight=8, short_s=(1, 8), long_s=(22, 32)),
    "stop-agent": Kind(weight=8, short_s=(1, 8), long_s=(22, 32)),
    "stop-node": Kind(weight=6, short_s=(1, 8), long_s=(22, 32)),
    "cut": Kind(weight=8, short_s=(1, 8), long_s=(22, 32)),
    "unplug": Kind(weight=5, short_s=(1, 8), long_s=(22, 32)),
    "disk-full": Kind(weight=9, short_s=(2, 8), long_s=(10, 30)),
    "notice": Kind(weight=15),
}


class Events:
    """Does events to nodes.

    Args:
        nodes: to do them to.
        draw: random numbers.
        note: told when something that lasts is over.
    """

    def __init__(self, nodes: Nodes, draw: random.Random, note: Callable[[str], None]) -> None:
        self._nodes = nodes
        self._draw = draw
        self._note = note
        self._undo: list[tuple[float, str, Undo]] = []

    @property
    def are_over(self) -> bool:
        """Whether nothing lasts any more."""
        return not self._undo

    def do(self, name: str, node: Node) -> str | None:
        """Do one.

        Args:
            name: of its kind.
            node: to do it to.

        Returns:
            What was done, ``None`` where there is nothing to do it to.
        """
        kind = KINDS[name]
        lasts_s = self._draw.uniform(*self._draw.choice((kind.short_s, kind.long_s)))
        what = getattr(self, "_" + name.replace("-", "_"))(node, lasts_s)
        if what is None:
            return None
        return f"{name} {what}" + (f" for {lasts_s:.1f} s" if lasts_s else "")

    def end_due(self, *, all_of_them: bool = False) -> bool:
        """End what has lasted long enough; whether there was any."""
        now_s = time.monotonic()
        due = [one for one in self._undo if all_of_them or one[0] <= now_s]
        for entry in due:
            self._undo.remove(entry)
            self._note(entry[1])
            entry[2]()
        return bool(due)

    def _kill_rank(self, node: Node, _: float) -> str | None:
        return self._kill_one(node, node.ranks())

    def _kill_agent(self, node: Node, _: float) -> str | None:
        return self._kill_one(node, node.helpers())

    def _kill_one(self, node: Node, processes: list[psutil.Process]) -> str | None:
        if not processes:
            return None
        one = self._draw.choice(processes)
        name = role(one)
        with contextlib.suppress(psutil.Error):
            one.kill()
        return f"{node.name}, {name}"

    def _kill_node(self, node: Node, _: float) -> str:
        node.off()
        return node.name

    def _power_off(self, node: Node, _: float) -> str:
        node.cut(silently=True)
        node.off()
        return node.name

    def _stop_rank(self, node: Node, lasts_s: float) -> str | None:
        return self._stop_some(node, node.ranks(), lasts_s)

    def _stop_agent(self, node: Node, lasts_s: float) -> str | None:
        return self._stop_some(node, node.helpers(), lasts_s)

    def _stop_some(self, node: Node, processes: list[psutil.Process], lasts_s: float) -> str | None:
        if not processes:
            return None
        one = self._draw.choice(processes)
        name = role(one)
        stop([one])
        self._later(lasts_s, f"{node.name}, {name} goes on", lambda: go_on([one]))
        return f"{node.name}, {name}"

    def _stop_node(self, node: Node, lasts_s: float) -> str:
        processes = node.processes()
        stop(processes)
        self._later(lasts_s, f"{node.name} goes on", lambda: go_on(processes))
        return node.name

    def _cut(self, node: Node, lasts_s: float) -> str:
        node.cut(silently=True)
        self._later(lasts_s, f"{node.name} is connected", node.mend)
        return node.name

    def _unplug(self, node: Node, lasts_s: float) -> str:
        node.cut(silently=False)
        self._later(lasts_s, f"{node.name} is connected", node.mend)
        return node.name

    def _disk_full(self, _: Node, lasts_s: float) -> str:
        self._nodes.fill()
        self._later(lasts_s, "the disk has room", self._nodes.free)
        return "the shared folder"

    def _notice(self, node: Node, _: float) -> str | None:
        runner = node.helpers()[:1]
        if not runner:
            return None
        number = self._draw.choice((signal.SIGTERM, signal.SIGUSR1))
        with contextlib.suppress(psutil.Error):
            runner[0].send_signal(number)
        return f"{node.name}, {number.name}"

    def _later(self, after_s: float, name: str, undo: Undo) -> None:
        self._undo.append((time.monotonic() + after_s, name, undo))


def role(process: psutil.Process) -> str:
    """What a process of the job is, in a word, and its state."""
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        parent = process.parent()
        name = "nursery" if any("nursery" in word for word in words) else "run"
        if name == "nursery" and parent is not None and parent.cmdline() == words:
            name = "rank"
        if "--agent" in words:
            name = "agent"
        return f"{name} {process.pid} {process.status()}"
    return f"process {process.pid}"
