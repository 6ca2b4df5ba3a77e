"""Parses the command lines of all programs, with one-line error messages."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from megatron.adaptive.errors import ConfigError

PROGRAM = "python -m megatron.adaptive"
"""Command that runs this package. The name of a subcommand follows."""


class CommandParser(argparse.ArgumentParser):
    """Argument parser that raises :class:`ConfigError` on errors, and accepts no abbreviations.

    Args:
        complain: Function that converts a message from argparse to an error message. By default,
            the error message consists of the command's name, argparse's message and the option with
            the most similar name.
        otherwise: Hint at the end of the error message about an unknown option, used if no option
            has a similar name.
        elsewhere: Function that returns options of another program, which users may pass to this
            program by mistake. The error message about such an option ends with ``otherwise``.
        prog: Name of the program in help texts and messages, or ``None`` for the name of the
            running script.
        usage: Usage line, or ``None`` to derive it from the arguments.
        description: Text above the list of arguments in the help text.
        epilog: Text below the list of arguments in the help text.
        formatter_class: Class that formats the help text.
        argument_default: Value of absent arguments, or ``argparse.SUPPRESS`` to set no value.
    """

    def __init__(
        self,
        *,
        complain: Callable[[str], str] | None = None,
        otherwise: str = "see --help",
        elsewhere: Callable[[], Collection[str]] = tuple,
        prog: str | None = None,
        usage: str | None = None,
        description: str | None = None,
        epilog: str | None = None,
        formatter_class: type[argparse.HelpFormatter] = argparse.HelpFormatter,
        argument_default: Any = None,
    ) -> None:
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            epilog=epilog,
            formatter_class=formatter_class,
            argument_default=argument_default,
            allow_abbrev=False,
        )
        self._complain = complain
        self._otherwise = otherwise
        self._elsewhere = elsewhere

    def error(self, message: str) -> NoReturn:
        """Raises an error with argparse's message and a hint, instead of exiting the process.

        Raises:
            ConfigError: Always raised.
        """
        if self._complain is not None:
            raise ConfigError(self._complain(message))
        unknown = message.partition("unrecognized arguments: ")[2].partition("=")[0].split()
        hint = self._hint(unknown[0]) if unknown else "see --help"
        raise ConfigError(f"{_short_name(self.prog)}: {message}; {hint}")

    def _hint(self, unknown: str) -> str:
        """Returns a hint about what to use instead of the unknown option ``unknown``."""
        # Compare names without dashes. Otherwise, every short name would be similar to --help.
        options = {option.strip("-"): option for option in self._option_string_actions}
        nearest = difflib.get_close_matches(unknown.strip("-"), options, n=1)
        if not nearest or unknown in self._elsewhere():
            return self._otherwise
        return f"the nearest is {options[nearest[0]]}"


def _short_name(prog: str) -> str:
    """Returns the name for error messages: the subcommand in ``prog``, or the script."""
    _, _, subcommand = prog.partition(f"{PROGRAM} ")
    return subcommand or prog.split()[-1]


def number(
    kind: type[int] | type[float], least: float, most: float, noun: str = ""
) -> Callable[[str], Any]:
    """Returns a function that parses a number within limits, for argparse's ``type=``.

    Args:
        kind: Type of the number, ``int`` or ``float``.
        least: Smallest allowed value.
        most: Largest allowed value.
        noun: Name of the quantity in error messages. Defaults to "number", or "whole number" for
            ``int``.
    """
    form = ",d" if kind is int else ",.12g"
    noun = noun or ("whole number" if kind is int else "number")
    noun += f" from {kind(least):{form}} to {kind(most):{form}}"

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if len(text) <= _LONGEST and least <= (value := kind(text)) <= most:
                return value
        shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
        raise argparse.ArgumentTypeError(f"{shown!r} is not a {noun}")

    return read


_LONGEST = 40
count = number(int, 1, 1_000_000)
"""Function that parses an integer from 1 to 1,000,000, for argparse's ``type=``."""


LOOKS_LIKE_FLAG = re.compile(r"--?[A-Za-z]")


def flags_in(argv: Sequence[str]) -> dict[str, list[str]]:
    """Returns a dict that maps each flag in ``argv`` to its list of values.

    If a flag is repeated, the values of its last occurrence are used.
    """
    values_of: dict[str, list[str]] = {}
    name = ""
    for argument in argv:
        if LOOKS_LIKE_FLAG.match(argument):
            name, equals, value = argument.partition("=")
            values_of[name] = [value] if equals else []
        elif name:
            values_of[name].append(argument)
    return values_of


def flags_where(argv: Sequence[str], is_wanted: Callable[[str], bool]) -> list[str]:
    """Returns the flags in ``argv`` whose names ``is_wanted`` accepts, with their values."""
    kept = []
    keeping = is_wanted("")
    for argument in argv:
        if LOOKS_LIKE_FLAG.match(argument):
            keeping = is_wanted(argument.split("=", 1)[0])
        if keeping:
            kept.append(argument)
    return kept


def last_value(argv: Sequence[str], flag: str) -> str | None:
    """Returns the value of ``flag`` in an unparsed command line, or ``None`` if it is absent."""
    return next(iter(flags_in(argv).get(flag, ())), None)
