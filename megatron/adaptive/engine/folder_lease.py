"""Grants one job at a time the right to write to a folder, by numbered claims.

The holder of the right regularly increments a counter (a heartbeat).

::

    <folder>/.lease/claim-3.json      the holder: host, process, job, time of the claim
    <folder>/.lease/beat-3            a counter that rises every two seconds; "ended" after release
    <folder>/.lease/private-3.json    address and secret of a manager, readable by its user only

A claim is created as a hard link to a complete file. On any file system, only one process can
create a link with this name. A job that wants to take over watches the counter for some time,
measured by its own clock, so the clocks of machines may differ. If the counter does not increase,
the job removes the counter's file, which ends the right of the previous holder. If the previous
holder was only suspended, it later notices that the file is missing. The holder checks this by
opening the file, because NFS caches listings and attributes, but contacts the server on each open.

A checkpoint is first written under a name that contains the claim's number, and published by
renaming. A new holder first removes all files and folders whose names contain lower numbers. A
previous holder therefore cannot publish anything, even if it was suspended between its check and
its rename.
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
"""Interval in seconds between two increments of the holder's counter."""
STALE_S = 10.0
"""Time in seconds after which another job may take over a folder whose counter has not changed."""
_LOOK_S = 0.2
_ENDED = "ended"
_FOLDER = ".lease"
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EINVAL)
_GONE = (errno.ENOENT, errno.ESTALE)
# Key of the checksum over all other keys of a claim. Claims written by earlier versions lack this
# key.
_SUM = "sum"
_YEAR_3000_S = 32_503_680_000
_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("host", "ticks", "boot", "job", "run", "address", "secret"), (str,)),
    **dict.fromkeys(("pid", "restarts"), (int,)),
    "since_unix_s": (int, float),
}
_LONGEST_BYTES = 1 << 20
_KEPT = 8  # Maximum number of earlier claims whose files a new claim removes.


class LeaseTakenError(SetupError):
    """Raised if another job may write to the folder. ``owner`` describes that job."""

    def __init__(self, message: str, owner: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.owner = owner


class Lease:
    """Gives a process, or several processes of a job, the right to write to a folder.

    Args:
        folder: Folder to write to. It is created if it does not exist.

    Attributes:
        number: Number of this job's claim, or 0 before the job has made a claim.
        former: Description of the previous holder (such as its host and process), or empty if no
            other job has held the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = folder / _FOLDER
        self.number = 0
        self.former: Mapping[str, Any] = {}
        # Content of the claim, or empty if another process made the claim.
        self._claimed: dict[str, Any] = {}
        self._private: Mapping[str, Any] = {}
        self._count = 0
        self._is_failing = False
        self._over = threading.Event()

    def claim(
        self, *, job: str | None = None, restarts: int | None = None, run: str | None = None
    ) -> int:
        """Claims the right to write to the folder, and returns the number of the claim.

        The claim succeeds immediately if the previous holder released the folder, was killed on
        this machine, or was the same job before a restart. Otherwise, this method watches the
        holder's counter for up to ten seconds, and fails if the counter increases.

        Args:
            job: ID of the job, or ``None`` if a manager (the program that starts elastic jobs)
                claims the folder.
            restarts: Number of restarts of the job so far, or ``None`` for a manager.
            run: Name by which ranks recognize their manager, or ``None`` if a job claims it.

        Returns:
            Number of the claim.

        Raises:
            LeaseTakenError: Another job may write to the folder.
            OSError: The folder is not writable.
        """
        facts = {"job": job, "restarts": restarts, "run": run}
        self._claimed = {**_here(), "since_unix_s": time.time()}
        self._claimed |= {name: fact for name, fact in facts.items() if fact is not None}
        self._make_folder()
        number = self._last()
        while not (number and self._is_alive(number)):
            if self._take(number + 1):
                self.former = self._facts(number) if number else {}
                return self.number
            number = max(number + 1, self._last())
        raise self.taken(number)

    def join(self, number: int) -> None:
        """Lets this process write to a folder that another process of this job has claimed.

        Args:
            number: Number of that process's claim.
        """
        self.number = number

    def join_manager(self, number: int | None, job: str) -> bool:
        """Lets this process write to the folder if its manager has claimed the folder.

        Returns whether the manager has claimed the folder for this job.

        Args:
            number: Number of the manager's claim, or ``None`` if there is no manager.
            job: ID of the job of this process.
        """
        run = None if number is None else self._facts(number).get("run")
        if number is None or run is None or run != job.rpartition("-")[0]:
            return False
        self.join(number)
        return True

    def advance(self) -> bool:
        """Replaces this job's claim with a new claim that has the next number.

        Processes that joined the old claim may no longer write to the folder.

        Returns:
            True if this process could still write to the folder, and therefore got the next number.

        Raises:
            OSError: The folder is not writable. The claim's number does not change.
        """
        if not self._take(self.number + 1):
            return False
        if self._private:
            self.publish(self._private)
        return True

    def publish(self, facts: Mapping[str, Any]) -> None:
        """Stores the entries of ``facts`` in a file that only processes of the same user can read.

        Raises:
            OSError: The folder is not writable.
        """
        self._private = facts
        write_private(self._path("private"), json.dumps(facts))

    def beat(self) -> bool:
        """Increments the counter, and returns whether this job may still write to the folder.

        Raises:
            OSError: The counter cannot be written.
        """
        self._count += 1
        try:
            self._write_beat(str(self._count), 0)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            if self._files.exists():
                return False
            # The whole lease folder was deleted, so no other job has taken over. Repeat the claim.
            self._make_folder()
            return self._take(self.number)
        return True

    def is_held(self, say: Callable[[str], None]) -> bool:
        """Increments the counter, and returns whether this job may still write to the folder.

        If the folder is not writable, the method cannot determine whether another job has taken
        over, and returns True.

        Args:
            say: Function that prints a line of text. It is called if another job has taken over the
                folder, and once when the folder is not writable.
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
        """Starts a thread that increments the counter every two seconds until :meth:`end`.

        ``say`` prints a line of text.

        The thread also ends if this job may no longer write to the folder (see :meth:`is_held`).
        """

        def count() -> None:
            while not self._over.wait(BEAT_S) and self.is_held(say):
                pass

        threading.Thread(target=count, name="lease", daemon=True).start()

    def require(self) -> None:
        """Checks that no other job has taken over the folder.

        Raises:
            LeaseTakenError: Another job took over the folder.
            OSError: The check failed, so it is unknown whether another job took over.
        """
        try:
            os.close(os.open(self._path("beat"), os.O_RDONLY))
        except OSError as error:
            if error.errno not in _GONE:
                raise
            if self._files.exists():
                raise self.taken(over=True) from None

    def end(self) -> None:
        """Releases the folder if this process claimed it, so that other jobs need not wait."""
        self._over.set()
        if self._claimed and self.number:
            with contextlib.suppress(OSError):  # Writing fails if another job has taken over.
                self._write_beat(_ENDED, 0)

    def taken(self, number: int | None = None, *, over: bool = False) -> LeaseTakenError:
        """Creates the error to raise if another job holds the right to write to the folder.

        Args:
            number: Number of the claim of the other job, or ``None`` for the newest claim.
            over: Whether the other job has taken over the folder from this job.
        """
        owner = self._facts(self._last() if number is None else number)
        is_managed = "run" in owner
        holder = _text(owner)
        text = (
            f"is {'managed' if is_managed else 'written'} by {holder}; two jobs in one folder "
            "would damage"
        )
        text += " each other's checkpoints"
        if over:
            text = (
                f"was taken over by {holder} while this job was stopped, so this job writes nothing"
            )
            text += " to it"
        see = (
            "to see that job, run python -m megatron.adaptive train elastic --status "
            f"{self._folder}; "
            if is_managed
            else ""
        )
        return LeaseTakenError(
            f"{self._folder} {text}; {see}stop that job, or choose another folder", owner
        )

    def _make_folder(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            self._files.mkdir()
            # Users who can write to the folder must also be able to take it over from another job.
            with contextlib.suppress(OSError):
                self._files.chmod(self._folder.stat().st_mode & 0o777)

    def _take(self, number: int) -> bool:
        """Claims the folder with the number ``number``, and returns whether this succeeded.

        Returns False if another process has already made a claim with this number.
        """
        claim = self._path("claim", number)
        draft = claim.with_name(f".claim-{secrets.token_hex(8)}")
        try:
            claim_text = json.dumps({**self._claimed, _SUM: _sum(self._claimed)})
            draft.write_text(claim_text)
            try:
                os.link(draft, claim)
            except FileExistsError:
                # A link count above 1 means that NFS created the link, although its reply was lost.
                if draft.stat().st_nlink == 1:
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
        if self._last() > number:
            # While this process was suspended, other processes made a claim with this number and
            # later ones, and then removed this claim because it was outdated.
            claim.unlink(missing_ok=True)
            return False
        former = self.number
        self.number = number
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
        # Overwrite the file in place instead of truncating it first. On a full disk, a truncated
        # file would stay empty, and other jobs would conclude that this job has finished.
        file = os.open(self._path("beat"), os.O_WRONLY | flags, 0o644)
        try:
            os.write(file, text.encode())
            os.ftruncate(file, len(text))
        finally:
            os.close(file)

    def _is_alive(self, number: int) -> bool:
        owner = self._facts(number)
        first = _read(self._path("beat", number))
        claimed = self._claimed
        is_same = bool(owner.get("job")) and owner.get("job") == claimed.get("job")
        is_restart = is_same and owner.get("restarts", 0) < claimed["restarts"]
        if first == _ENDED or _is_gone(owner) or is_restart:
            return False
        # Count reads of the counter instead of measuring time. While the storage hangs, the holder
        # cannot increment its counter, but the reads are also delayed.
        for _ in range(round(STALE_S / _LOOK_S)):
            if self._path("claim", number + 1).exists():
                return False
            time.sleep(_LOOK_S)
            now = _read(self._path("beat", number))
            # A missing counter is not a sign of a living holder, because another job that takes
            # over may have removed the file. In that case, continue to watch.
            if now not in ("", first):
                return now != _ENDED
        return False

    def _facts(self, number: int) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        for name in ("claim", "private"):
            with contextlib.suppress(ValueError):
                facts.update(_checked(parse_json(_read(self._path(name, number)) or "{}")))
        return facts

    def _last(self) -> int:
        names = (path.stem.removeprefix("claim-") for path in self._files.glob("claim-*.json"))
        return max((natural(name) or 0 for name in names), default=0)

    def _path(self, name: str, number: int | None = None) -> Path:
        ending = "" if name == "beat" else ".json"
        return self._files / f"{name}-{self.number if number is None else number}{ending}"


def _sum(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _checked(read: Any) -> dict[str, Any]:
    """Returns ``read``, the parsed content of a claim, or an empty dictionary if it is damaged.

    A damaged claim might contain the ID of a process that has exited. A job that relied on such a
    claim would take over the folder from a running job.
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
    """Returns values that identify this process, its container and the machine's last boot."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    boot = f"{_read(Path('/proc/sys/kernel/random/boot_id')).strip()} {namespace}"
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "ticks": _state(pid)[1], "boot": boot}


def _state(pid: int) -> tuple[str, str]:
    """Returns the state of process ``pid`` and its start time in clock ticks since boot.

    Returns empty strings if the process does not exist.
    """
    columns = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return (columns[0], columns[19]) if len(columns) > 19 else ("", "")


def _is_gone(owner: Mapping[str, Any]) -> bool:
    """Returns whether the owner's right to write to the folder has ended.

    The right has ended if the owner was a process on this machine that has exited. The result is
    also true if the owner has the process ID of this process. The owner is then an exited process
    with the same ID, or this process itself, which may replace its own claim.
    """
    here = _here()
    pid = owner.get("pid")
    if owner.get("boot") != here["boot"] or not isinstance(pid, int) or pid < 1:
        return False
    if pid == here["pid"]:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # The process is running and belongs to another user.
    state, ticks = _state(pid)
    return state == "Z" or ticks not in ("", owner.get("ticks"))


def _text(owner: Mapping[str, Any]) -> str:
    name = owner.get("run") or owner.get("job") or ""
    since = owner.get("since_unix_s")
    when = "" if since is None else time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(since))
    job = f" (job {name})" if name else ""
    return f"process {owner.get('pid', '?')} on {owner.get('host', 'another machine')}{job}{when}"
