"""The machines file: a host per line, read again whenever it changes.

::

    # comment
    node-a slots=8
    node-b                         as many processes as it has GPUs, one without
    localhost name=c slots=1       several nodes on this machine have names
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from megatron.adaptive.errors import ConfigError

__all__ = ["Machine", "read_machines"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]*")
_KEYS = ("slots", "name")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One line of the file.

    Attributes:
        name: unique within the file.
        host: where it is, as ssh takes it.
        slots: processes that it may run, ``None`` for one on each GPU.
    """

    name: str
    host: str
    slots: int | None = None

    @property
    def has_loopback(self) -> bool:
        """Whether the host's name is one that means this machine on every machine."""
        return self.host.lower() == "localhost" or self.host.startswith("127.")

    @property
    def is_local(self) -> bool:
        """Whether it is the machine that this process runs on, by its name or an address."""
        own = socket.gethostname().lower()
        if self.has_loopback or self.host.lower() in (own, own.partition(".")[0]):
            return True
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return False
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        # Only addresses of this machine can be bound.
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((self.host, 0))
            return True
        return False


def read_machines(path: Path) -> tuple[Machine, ...]:
    """Read a machines file.

    Raises:
        ConfigError: it is missing, empty, or a line breaks a rule; names the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(
            f"--machines {path}: {reason}; name a file with a host per line"
        ) from None
    found: dict[str, tuple[int, Machine]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"--machines {path}, line {number}"
        machine = _machine(words, where)
        if machine.name in found:
            raise ConfigError(
                f"{where}: {machine.name} is in line {found[machine.name][0]} already: remove one,"
                " or give nodes on one host a name=NAME each"
            )
        found[machine.name] = number, machine
    if not found:
        raise ConfigError(f"--machines {path}: it names no machine; write a host per line")
    return tuple(machine for _, machine in found.values())


def _machine(words: list[str], where: str) -> Machine:
    host, told = words[0], dict[str, str]()
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or key not in _KEYS:
            raise ConfigError(f"{where}: {word!r}: after the host come slots=N and name=NAME only")
        told[key] = value
    for what in (host, told.get("name", host)):
        if _NAME.fullmatch(what) is None:
            raise ConfigError(f"{where}: {what!r} is not a name of a host or node")
    slots = told.get("slots")
    if slots is not None and (not slots.isdecimal() or int(slots) < 1):
        raise ConfigError(f"{where}: slots={slots}: write a whole number from 1 on")
    return Machine(
        name=told.get("name", host), host=host, slots=None if slots is None else int(slots)
    )
