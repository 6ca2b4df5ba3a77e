"""Parses command lines: the one ``ArgumentParser`` of programs, whose complaints are one line."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megatron.adaptive.errors import ConfigError

__all__ = ["CommandParser", "count", "last_value"]


class CommandParser(argparse.ArgumentParser):
    """Raises :class:`ConfigError` for a wrong command line.

    Args:
        complain: makes the whole message; by default the command's name and what is wrong.
        options: of ``argparse``.
    """

    def __init__(self, *, complain: Callable[[str], str] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._complain = complain

    def error(self, message: str) -> NoReturn:
        """Complain.

        Raises:
            ConfigError: always.
        """
        if self._complain is not None:
            raise ConfigError(self._complain(message))
        raise ConfigError(f"{self.prog.split()[-1]}: {message}; see --help")

    def read(self, words: Sequence[str], *, otherwise: str = "") -> argparse.Namespace:
        """Parse; name the nearest for an unknown option.

        Args:
            words: the command line.
            otherwise: hint where nothing is near; by default the options that there are.

        Raises:
            ConfigError: the command line is wrong.
        """
        options, unknown = self.parse_known_args(list(words))
        if unknown:
            name = unknown[0].partition("=")[0]
            known = [word for word in self._option_string_actions if word.startswith("--")]
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"the nearest is {nearest[0]}" if nearest else otherwise
            hint = hint or f"there are {', '.join(known)}"
            self.error(f"{name} is not an option: {hint}")
        return options


def count(word: str) -> int:
    """Reads a whole number from 1 on; the ``type`` of an option."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number from 1 on")
    return int(word)


def last_value(words: Sequence[str], flag: str) -> str | None:
    """Returns the value that a flag has in an unparsed command line, the last one of several."""
    found = None
    for at, word in enumerate(words):
        if word == flag and at + 1 < len(words):
            found = words[at + 1]
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found
