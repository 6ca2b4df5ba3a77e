"""Grants one job the right to write a folder: a numbered claim, kept up by a counter beside it.

::

    <folder>/.lease/claim-3.json      who holds it: host, process, job, since when
    <folder>/.lease/beat-3            counted up every two seconds; "ended" at an orderly end
    <folder>/.lease/private-3.json    address and secret of a manager, for its user alone

A claim is made by linking a finished file, which only one process can do on any file system.
Whoever wants to take over watches the counter by its own clock: clocks that differ do no harm.
Then it removes the counter, and with it the right: the former holder may stand still for as long
as it likes, and finds the file gone. To open a file asks the server where others are cached, as
listings and attributes are on NFS.

What is published is renamed from a name that bears the claim's number, and who takes over removes
all lower ones first: also a holder that stood still after it had looked publishes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.adaptive.config.input_files import natural, parse_json, read_whole
from megatron.adaptive.errors import SetupError
from megatron.adaptive.handshake import write_private

BEAT_S = 2.0
STALE_S = 10.0
_LOOK_S = 0.2
_ENDED = "ended"
_FOLDER = ".lease"
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EINVAL)
_GONE = (errno.ENOENT, errno.ESTALE)
_SUM = "sum"  # key of a claim's checksum over its other keys; claims of former versions lack it
_YEAR_3000_S = 32_503_680_000
_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("host", "ticks", "boot", "job", "run", "address", "secret"), (str,)),
    **dict.fromkeys(("pid", "restarts"), (int,)),
    "since_unix_s": (int, float),
}
_LONGEST_BYTES = 1 << 20
_KEPT = 8  # claims below one's own whose files are removed by name; each claim removes them


class LeaseTakenError(SetupError):
    """Says that another job has the folder; :attr:`owner` describes it."""

    def __init__(self, message: str, owner: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.owner = owner


class Lease:
    """Holds the right to write a folder, or shares it with the process of the job that does.

    Args:
        folder: that is written; made if it is missing.

    Attributes:
        number: of the claim, 0 without one.
        former: describes the holder before, empty where there was none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = folder / _FOLDER
        self.number = 0
        self.former: Mapping[str, Any] = {}
        self._own: dict[str, Any] = {}  # empty where another process holds it
        self._private: Mapping[str, Any] = {}
        self._count = 0
        self._is_failing = False
        self._over = threading.Event()

    def claim(self, **facts: Any) -> int:
        """Takes the right, at once from a job that ended, was killed here or was restarted.

        Blocks until it is known that nobody else has it, ten seconds at most.

        Args:
            facts: about the job: ``job``, its ID where it has one, with ``restarts`` so far; or
                ``run``, by which a manager's ranks know it.

        Returns:
            The number of the claim.

        Raises:
            LeaseTakenError: another job holds it.
            OSError: the folder cannot be written.
        """
        self._own = {**_here(), "since_unix_s": time.time(), **facts}
        self._make_folder()
        number = self._last()
        while not (number and self._is_alive(number)):
            if self._take(number + 1):
                self.former = self._facts(number) if number else {}
                return self.number
            number += 1
        raise self.taken(number)

    def join(self, number: int) -> None:
        """Shares the right that another process of this job has claimed."""
        self.number = number

    def join_manager(self, number: int | None, job: str) -> bool:
        """Shares the right of the manager that started this process, if it holds this folder.

        Args:
            number: of the claim, ``None`` where no manager has given one.
            job: ID of the job that this process was given.
        """
        run = None if number is None else self._facts(number).get("run")
        if number is None or run is None or run != job.rpartition("-")[0]:
            return False
        self.join(number)
        return True

    def advance(self) -> bool:
        """Takes the next number: processes that joined before have the right no more.

        Returns:
            Whether the right was held.

        Raises:
            OSError: the folder cannot be written; the number is as it was.
        """
        if not self._take(self.number + 1):
            return False
        if self._private:
            self.publish(self._private)
        return True

    def publish(self, facts: Mapping[str, Any]) -> None:
        """Publishes more about the holder, for processes of the same user.

        Raises:
            OSError: the folder cannot be written.
        """
        self._private = facts
        write_private(self._path("private"), json.dumps(facts))

    def beat(self) -> bool:
        """Counts up; returns whether the right is still held.

        Raises:
            OSError: the counter cannot be written.
        """
        self._count += 1
        try:
            self._write_beat(str(self._count), 0)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            if self._files.exists():
                return False
            # Who removes the whole folder of checkpoints gives it to nobody else.
            self._make_folder()
            return self._take(self.number)
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
                say(f"warning: cannot write {self._files}: {error.strerror}")
            self._is_failing = True
            return True
        say(f"warning: {self.taken(over=True)}")
        return False

    def keep_up(self, say: Callable[[str], None]) -> None:
        """Counts up in a thread of its own until :meth:`end`; see :meth:`is_held`."""

        def count() -> None:
            while not self._over.wait(BEAT_S) and self.is_held(say):
                pass

        threading.Thread(target=count, name="lease", daemon=True).start()

    def require(self) -> None:
        """Checks that the right is still held.

        Raises:
            LeaseTakenError: another job took it over.
            OSError: that cannot be known.
        """
        try:
            os.close(os.open(self._path("beat"), os.O_RDONLY))
        except OSError as error:
            if error.errno not in _GONE:
                raise
            if self._files.exists():
                raise self.taken(over=True) from None

    def end(self) -> None:
        """Gives the right back, if this process holds it; others need not wait then."""
        self._over.set()
        if self._own and self.number:
            with contextlib.suppress(OSError):  # taken over
                self._write_beat(_ENDED, 0)

    def taken(self, number: int | None = None, *, over: bool = False) -> LeaseTakenError:
        """Makes the error of a folder that another job has.

        Args:
            number: of its claim; by default the newest.
            over: whether it was this job's before.
        """
        owner = self._facts(self._last() if number is None else number)
        is_managed, who = "run" in owner, _text(owner)
        text = f"is {'managed' if is_managed else 'written'} by {who}: two jobs would spoil each"
        text += " other's checkpoints"
        if over:
            text = f"was taken over by {who} while this job stood still, which writes nothing there"
        see = f"see python -m megatron.adaptive run --status {self._folder}, " if is_managed else ""
        return LeaseTakenError(
            f"{self._folder} {text}; {see}end that job, or name another folder", owner
        )

    def _make_folder(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            self._files.mkdir()
            with contextlib.suppress(OSError):  # whoever may write the folder may take it over
                self._files.chmod(self._folder.stat().st_mode & 0o777)

    def _take(self, number: int) -> bool:
        """Makes the claim of a number; returns false where another process has it."""
        claim = self._path("claim", number)
        draft = claim.with_name(f".claim-{secrets.token_hex(8)}")
        try:
            claim_text = json.dumps({**self._own, _SUM: _sum(self._own)})
            draft.write_text(claim_text)
            try:
                os.link(draft, claim)
            except FileExistsError:
                if draft.stat().st_nlink == 1:  # else NFS did it and lost its answer
                    return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                try:
                    with claim.open("x") as file:
                        file.write(claim_text)
                except FileExistsError:
                    return False
        finally:
            draft.unlink(missing_ok=True)
        former, self.number = self.number, number
        try:
            self._write_beat(str(self._count), os.O_CREAT)
        except OSError:
            self.number = former
            claim.unlink(missing_ok=True)
            raise
        for old in range(max(1, number - _KEPT), number):
            self._path("beat", old).unlink(missing_ok=True)
            self._path("private", old).unlink(missing_ok=True)
            if old < number - 1:
                self._path("claim", old).unlink(missing_ok=True)
        return True

    def _write_beat(self, text: str, flags: int) -> None:
        # In place: on a full disk a file that was cut to nothing would stay so, and be taken for
        # that of a job which is gone.
        file = os.open(self._path("beat"), os.O_WRONLY | flags, 0o644)
        try:
            os.write(file, text.encode())
            os.ftruncate(file, len(text))
        finally:
            os.close(file)

    def _is_alive(self, number: int) -> bool:
        owner, first = self._facts(number), _read(self._path("beat", number))
        own = self._own
        is_same = bool(owner.get("job")) and owner.get("job") == own.get("job")
        is_restart = is_same and owner.get("restarts", 0) < own["restarts"]
        if first == _ENDED or _is_gone(owner) or is_restart:
            return False
        # Looks, not seconds: where storage stands still nobody can count up.
        for _ in range(round(STALE_S / _LOOK_S)):
            if self._path("claim", number + 1).exists():
                return False
            time.sleep(_LOOK_S)
            now = _read(self._path("beat", number))
            if now != first:
                return now != _ENDED
        return False

    def _facts(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in ("claim", "private"):
            with contextlib.suppress(ValueError):
                found.update(_checked(parse_json(_read(self._path(name, number)) or "{}")))
        return found

    def _last(self) -> int:
        names = (path.stem.removeprefix("claim-") for path in self._files.glob("claim-*.json"))
        return max((natural(name) or 0 for name in names), default=0)

    def _path(self, name: str, number: int | None = None) -> Path:
        ending = "" if name == "beat" else ".json"
        return self._files / f"{name}-{self.number if number is None else number}{ending}"


def _sum(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _checked(read: Any) -> dict[str, Any]:
    """Returns the content of a claim, empty if it is damaged.

    A damaged claim may name a process that is gone. If it were believed, another job would take the
    folder from a job that still runs.
    """
    if not isinstance(read, dict) or read.pop(_SUM, None) not in (None, _sum(read)):
        return {}
    since = read.get("since_unix_s")
    if isinstance(since, int | float) and not 0 <= since < _YEAR_3000_S:
        return {}
    is_known = all(type(read[name]) in kinds for name, kinds in _TYPES.items() if name in read)
    return read if is_known else {}


def _read(path: Path) -> str:
    try:
        return read_whole(path, _LONGEST_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _here() -> dict[str, Any]:
    """Identifies this process, and its machine since it was started, each container by itself."""
    try:
        own = os.readlink("/proc/self/ns/pid")
    except OSError:
        own = ""
    boot = f"{_read(Path('/proc/sys/kernel/random/boot_id')).strip()} {own}"
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "ticks": _state(pid)[1], "boot": boot}


def _state(pid: int) -> tuple[str, str]:
    """Returns a process's state and its start in ticks since the machine's, empty if unknown."""
    words = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return (words[0], words[19]) if len(words) > 19 else ("", "")


def _is_gone(owner: Mapping[str, Any]) -> bool:
    """Returns whether a holder was of this machine and is no more, or is this very process."""
    here, pid = _here(), owner.get("pid")
    if owner.get("boot") != here["boot"] or not isinstance(pid, int) or pid < 1:
        return False
    if pid == here["pid"]:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # of another user
    state, ticks = _state(pid)
    return state == "Z" or ticks not in ("", owner.get("ticks"))


def _text(owner: Mapping[str, Any]) -> str:
    name = owner.get("run") or owner.get("job") or ""
    since = owner.get("since_unix_s")
    when = "" if since is None else time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(since))
    job = f" (job {name})" if name else ""
    return f"process {owner.get('pid', '?')} on {owner.get('host', 'another machine')}{job}{when}"
