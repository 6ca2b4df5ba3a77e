"""Causes events on the nodes of a job, and undoes the lasting ones after some time."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

from megatron.adaptive.checkpoint.folder import CheckpointFolder
from tests.soak.damages import damage
from tests.support.nodes import Node, Nodes, fill, send

Undo = Callable[[], object]


WEIGHTS = {
    "kill-rank": 14,
    "kill-agent": 14,
    "kill-node": 8,
    "power-off": 5,
    "stop-rank": 8,
    "stop-agent": 8,
    "stop-node": 6,
    "cut": 8,
    "unplug": 5,
    "disk-full": 9,
    "trace-full": 5,
    "bit-flip": 5,
    "notice": 15,
}
"""Relative probabilities of the kinds of events."""
LASTS_S = ((1.0, 8.0), (22.0, 32.0))
"""Ranges of event durations in seconds, below and above the timeout for silent nodes."""


class Events:
    """Makes nodes fail, and undoes lasting events after some seconds.

    Args:
        nodes: Nodes of the job.
        draw: Random number generator.
        note: Function that is called with a line of text when a lasting event is over.
        checkpoints: Folder of the job's checkpoints.

    Attributes:
        damaged: Checkpoints with a flipped bit, each as a tuple of its iteration, the Unix time of
            the flip in nanoseconds, and the inode of its folder. The inode changes if the
            checkpoint is written again.
    """

    def __init__(
        self, nodes: Nodes, draw: random.Random, note: Callable[[str], None], checkpoints: Path
    ) -> None:
        self._nodes = nodes
        self._draw = draw
        self._note = note
        self._checkpoints = CheckpointFolder(checkpoints)
        self._undo: list[tuple[float, str, Undo]] = []
        self.damaged: list[tuple[int, int, int]] = []

    @property
    def are_over(self) -> bool:
        """Returns whether all lasting events are over."""
        return not self._undo

    def do(self, name: str, node: Node) -> str | None:
        """Causes an event of the kind ``name`` on ``node``.

        Args:
            name: Kind of the event.
            node: Node on which the event happens.

        Returns:
            Description of the event, or ``None`` if the event is not possible at the moment.
        """
        description = node.name
        undo: Undo | None = None
        if name in ("kill-rank", "kill-agent", "stop-rank", "stop-agent"):
            processes = node.ranks() if name.endswith("rank") else node.helpers()
            if not processes:
                return None
            process = self._draw.choice(processes)
            description += f", {role(process)}"
            send([process], signal.SIGKILL if name.startswith("kill") else signal.SIGSTOP)
            undo = None if name.startswith("kill") else partial(send, [process], signal.SIGCONT)
        elif name == "kill-node":
            node.off()
        elif name == "power-off":
            node.cut(silently=True)
            node.off()
        elif name == "stop-node":
            processes = node.processes()
            send(processes, signal.SIGSTOP)
            undo = partial(send, processes, signal.SIGCONT)
        elif name in ("cut", "unplug"):
            node.cut(silently=name == "cut")
            undo = node.mend
        elif name in ("disk-full", "trace-full"):
            disk = self._nodes.shared if name == "disk-full" else self._nodes.traces
            description = f"the folder of {disk.name}"
            undo = partial((disk / "filler").unlink, missing_ok=True)
            fill(disk / "filler")
        # A bit flip also kills a rank, so that the job loads the checkpoint.
        elif name == "bit-flip":
            if not (ranks := node.ranks()) or (flipped := self._flip_bit()) is None:
                return None
            description += f", {flipped}"
            send([self._draw.choice(ranks)], signal.SIGKILL)
        else:
            number = self._draw.choice((signal.SIGTERM, signal.SIGUSR1))
            if not (runner := node.helpers()[:1]):
                return None
            send(runner, number)
            description += f", {number.name}"
        if undo is None:
            return f"{name} {description}"
        lasts_s = self._draw.uniform(*self._draw.choice(LASTS_S))
        self._undo.append((time.monotonic() + lasts_s, f"{name} {description} is over", undo))
        return f"{name} {description} for {lasts_s:.1f} s"

    def _flip_bit(self) -> str | None:
        """Flips a bit of the newest complete checkpoint, and returns a description of the change.

        Returns ``None`` if there is no older intact checkpoint from which the job could continue.
        """
        steps = sorted(self._checkpoints.steps().items())
        inodes = {inode for _, _, inode in self.damaged}
        if not any(path.stat().st_ino not in inodes for _, path in steps[:-1]):
            return None
        iteration, folder = steps[-1]
        path = self._draw.choice([file for file in sorted(folder.iterdir()) if file.stat().st_size])
        self.damaged.append((iteration, time.time_ns(), folder.stat().st_ino))
        return f"{folder.name}/{path.name}: {damage(path, 'bit', self._draw)}"

    def end_due(self, *, all_of_them: bool = False) -> bool:
        """Undoes the lasting events whose duration has passed, and returns whether any was undone.

        If ``all_of_them``, undoes all lasting events immediately.
        """
        now_s = time.monotonic()
        due = [event for event in self._undo if all_of_them or event[0] <= now_s]
        for entry in due:
            self._undo.remove(entry)
            self._note(entry[1])
            entry[2]()
        return bool(due)


def role(process: psutil.Process) -> str:
    """Describes ``process``, a process of the job, by its role, ID and state."""
    with contextlib.suppress(psutil.Error):
        command = process.cmdline()
        parent = process.parent()
        name = "forkserver" if any("rank_forkserver" in word for word in command) else "run"
        if name == "forkserver" and parent is not None and parent.cmdline() == command:
            name = "rank"
        if "--agent" in command:
            name = "agent"
        return f"{name} {process.pid} {process.status()}"
    return f"process {process.pid}"
