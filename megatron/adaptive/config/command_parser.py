"""Parses command lines: the one ``ArgumentParser`` of programs, whose complaints are one line."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megatron.adaptive.errors import ConfigError


class CommandParser(argparse.ArgumentParser):
    """Raises :class:`ConfigError` for a wrong command line; options have their whole names.

    Args:
        complain: makes the whole message; by default the command's name and what is wrong.
        otherwise: ends such a message where no option is near.
        options: of ``argparse``.
    """

    def __init__(
        self,
        *,
        complain: Callable[[str], str] | None = None,
        otherwise: str = "see --help",
        **options: Any,
    ) -> None:
        super().__init__(**options, allow_abbrev=False)
        self._complain, self._otherwise = complain, otherwise

    def error(self, message: str) -> NoReturn:
        """Complains; names the nearest for an unknown option.

        Raises:
            ConfigError: always.
        """
        if self._complain is not None:
            raise ConfigError(self._complain(message))
        unknown = message.partition("unrecognized arguments: ")[2].partition("=")[0].split()
        nearest = difflib.get_close_matches("".join(unknown[:1]), self._option_string_actions, n=1)
        hint = f"the nearest is {nearest[0]}" if nearest else self._otherwise
        raise ConfigError(f"{self.prog.split()[-1]}: {message}; {hint}")


def number(
    kind: type[int] | type[float], least: float, most: float, what: str = ""
) -> Callable[[str], Any]:
    """Returns the ``type`` of an option that takes a number within limits.

    Args:
        kind: of number.
        least: smallest value.
        most: largest value.
        what: what it is, for the message; by default a number of this kind.
    """
    form = ",d" if kind is int else "g"
    what = what or ("whole number" if kind is int else "number")
    what += f" from {kind(least):{form}} to {kind(most):{form}}"

    def read(word: str) -> float:
        with contextlib.suppress(ValueError):
            if len(word) <= _LONGEST and least <= (value := kind(word)) <= most:
                return value
        shown = word if len(word) <= _LONGEST else f"{word[:_LONGEST]}..."
        raise argparse.ArgumentTypeError(f"{shown!r} is not a {what}")

    return read


_LONGEST = 40
count = number(int, 1, 1_000_000)
"""The ``type`` of an option that takes a whole number from 1 on."""


LOOKS_LIKE_FLAG = re.compile(r"--?[A-Za-z]")


def flags_in(argv: Sequence[str]) -> dict[str, list[str]]:
    """Returns flags with the words that follow them; the last of equal ones."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in argv:
        if LOOKS_LIKE_FLAG.match(word):
            name, equals, value = word.partition("=")
            found[name] = [value] if equals else []
        elif name:
            found[name].append(word)
    return found


def flags_where(argv: Sequence[str], is_wanted: Callable[[str], bool]) -> list[str]:
    """Keeps the flags whose names are wanted, with their values."""
    kept, keeping = [], is_wanted("")
    for word in argv:
        if LOOKS_LIKE_FLAG.match(word):
            keeping = is_wanted(word.split("=", 1)[0])
        if keeping:
            kept.append(word)
    return kept


def last_value(words: Sequence[str], flag: str) -> str | None:
    """Returns the value that a flag has in an unparsed command line, the last one of several."""
    return next(iter(flags_in(words).get(flag, ())), None)
