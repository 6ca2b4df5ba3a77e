"""Grants a job one manager: a numbered claim in the job's folder, kept up by a counter beside it.

::

    <folder>/claim-3.json     who manages: host, process, address and secret for agents
    <folder>/beat-3           counted up every two seconds, "ended" at an orderly end

A claim is made by linking a finished file, which only one process can do on any file system.
Whoever wants to take over watches the counter by its own clock: clocks that differ do no harm.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from megatron.adaptive.errors import SetupError
from megatron.adaptive.handshake import write_private

BEAT_S = 2.0
STALE_S = 10.0
_LOOK_S = 0.2
_ENDED = "ended"
_CLAIM = re.compile(r"claim-(\d+)\.json")


class LeaseTakenError(SetupError):
    """Says that another manager runs the job; :attr:`owner` describes it."""

    def __init__(self, message: str, owner: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.owner = owner


class Lease:
    """Holds the right to manage the job of a folder.

    Args:
        folder: of the job; made if it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._number = 0
        self._count = 0
        self.is_taken_over = False  # the job had a manager before
        self._is_failing = False

    def claim(self) -> None:
        """Becomes the manager.

        Blocks until it is known that nobody else is, ten seconds at most.

        Raises:
            LeaseTakenError: another manager runs the job.
            SetupError: the folder cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._number = self._free_number()
            body = {"host": socket.gethostname(), "pid": os.getpid(), "boot": _boot()}
            draft = self.folder / f".claim-{os.getpid()}-{socket.gethostname()}"
            write_private(draft, json.dumps(body))
            try:
                os.link(draft, self._claim(self._number))
            except FileExistsError:
                raise self.taken() from None
            finally:
                draft.unlink()
            self.beat()
        except OSError as error:
            raise SetupError(
                f"cannot write {error.filename or self.folder}: {error.strerror}; the state of the"
                " job is kept in the folder of its checkpoints: free space there or name another"
                " with --checkpoint"
            ) from error

    def publish(self, facts: Mapping[str, Any]) -> None:
        """Publishes more about the manager.

        Raises:
            OSError: the folder cannot be written.
        """
        path = self._claim(self._number)
        draft = path.with_name(f".{path.name}")
        write_private(draft, json.dumps({**self._facts(self._number), **facts}))
        draft.replace(path)

    def beat(self) -> bool:
        """Counts up; returns whether the right is still held."""
        if self._claim(self._number + 1).exists():
            return False
        self._count += 1
        # In place: on a full disk a file that was cut to nothing would stay so, and be taken for
        # that of a manager which is gone.
        file = os.open(self._beat(self._number), os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.write(file, str(self._count).encode())
        finally:
            os.close(file)
        return True

    def is_held(self, say: Callable[[str], None]) -> bool:
        """Counts up; returns whether the right is still held, as far as can be known.

        Args:
            say: prints a line about why it is not, or once that the folder cannot be written.
        """
        try:
            if self.beat():
                self._is_failing = False
                return True
        except OSError as error:
            if not self._is_failing:
                say(f"warning: cannot write {self.folder}: {error.strerror}")
            self._is_failing = True
            return True
        say("warning: another manager took the job over while this one stood still")
        return False

    def end(self) -> None:
        """Gives the right back; others need not wait then."""
        if not self._claim(self._number + 1).exists():
            self._beat(self._number).write_text(_ENDED)

    def _free_number(self) -> int:
        number = self._last()
        if number == 0 or not self._is_alive(number):
            self.is_taken_over = number > 0
            for old in range(max(1, number - 2), number):
                self._claim(old).unlink(missing_ok=True)
                self._beat(old).unlink(missing_ok=True)
            return number + 1
        raise self.taken()

    def _is_alive(self, number: int) -> bool:
        first = _read(self._beat(number))
        if first == _ENDED:
            return False
        owner = self._facts(number)
        if owner.get("boot") == _boot() and not psutil.pid_exists(owner["pid"]):
            return False
        end_s = time.monotonic() + STALE_S
        while time.monotonic() < end_s:
            time.sleep(_LOOK_S)
            now = _read(self._beat(number))
            if now == _ENDED:
                return False
            if now != first or self._last() != number:
                return True
        return False

    def taken(self) -> LeaseTakenError:
        """Makes the error of a job that another one manages."""
        owner = self._facts(self._last())
        return LeaseTakenError(
            f"the job of {self.folder} is managed by process {owner.get('pid', '?')} on"
            f" {owner.get('host', 'another machine')}: a job has one manager; see"
            f" python -m megatron.adaptive run --status {self.folder.parent}, or name another"
            " folder with --checkpoint",
            owner,
        )

    def _facts(self, number: int) -> dict[str, Any]:
        try:
            facts = json.loads(_read(self._claim(number)) or "{}")
        except ValueError:
            return {}
        return facts if isinstance(facts, dict) else {}

    def _last(self) -> int:
        found = (_CLAIM.fullmatch(path.name) for path in self.folder.glob("claim-*.json"))
        return max((int(match[1]) for match in found if match), default=0)

    def _claim(self, number: int) -> Path:
        return self.folder / f"claim-{number}.json"

    def _beat(self, number: int) -> Path:
        return self.folder / f"beat-{number}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _boot() -> str:
    """Identifies this machine since its start, each container by itself."""
    try:
        own = os.readlink("/proc/self/ns/pid")
    except OSError:
        own = ""
    return f"{_read(Path('/proc/sys/kernel/random/boot_id')).strip()} {own}"
