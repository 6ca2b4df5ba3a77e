"""Makes command line flags of dataclass fields.

Owns the metadata of a flag, the types with bounds that fields have, the reading of types from
annotations and the conversion of text to values. Deliberately knows no particular flag and no rule
between two flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from typing import Annotated, Any

from megatron.adaptive.errors import ConfigError

_METADATA_KEY = "flag"
_LONGEST = 80
_WORDS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}
_BOUNDS: tuple[tuple[str, Callable[[Any, Any], bool], str], ...] = (
    ("minimum", operator.lt, "small, give at least"),
    ("above", operator.le, "small, give more than"),
    ("below", operator.ge, "large, give less than"),
    ("maximum", operator.gt, "large, give at most"),
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of a value, beside its type in ``Annotated``.

    Attributes:
        minimum: smallest allowed value.
        above: the value must be larger than this.
        below: the value must be smaller than this.
        maximum: largest allowed value.
        unit: the word shown in place of the value (``ITERATIONS``, ``LAYERS``, ``DIR``).
    """

    minimum: float | None = None
    above: float | None = None
    below: float | None = None
    maximum: float | None = None
    unit: str = ""

    def check(self, value: Any) -> None:
        """Hold a value against the bounds.

        Raises:
            ValueError: it is beyond one, or not finite.
        """
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{value} is not a finite number")
        for name, is_beyond, text in _BOUNDS:
            bound = getattr(self, name)
            if bound is not None and is_beyond(value, bound):
                raise ValueError(f"{value} is too {text} {bound:g}")


_MOST = 10**12
Count = Annotated[int, Limits(minimum=1, maximum=_MOST)]
Natural = Annotated[int, Limits(minimum=0, maximum=_MOST)]
Width = Annotated[int, Limits(minimum=1, maximum=10**7)]
Iterations = Annotated[int, Limits(minimum=1, maximum=10**9, unit="ITERATIONS")]
Samples = Annotated[int, Limits(minimum=1, maximum=_MOST, unit="SAMPLES")]
Layers = Annotated[int, Limits(minimum=1, maximum=10_000, unit="LAYERS")]
Ranks = Annotated[int, Limits(minimum=1, unit="RANKS")]
Positive = Annotated[float, Limits(above=0)]
NonNegative = Annotated[float, Limits(minimum=0)]
Share = Annotated[float, Limits(minimum=0, below=1)]
Folder = Annotated[str, Limits(unit="DIR")]
File = Annotated[str, Limits(unit="FILE")]


def flag(help_text: str, default: Any = None, **options: Any) -> Any:
    """Declares a field that is a command line flag.

    Args:
        help_text: one sentence for ``--help`` and the README.
        default: the value when the flag is absent.
        **options: attributes of :class:`FieldSpec`.
    """
    return field(default=default, metadata={_METADATA_KEY: {"help": help_text, **options}})


def required(help_text: str, **options: Any) -> Any:
    """Declares a field without default: the command line or, with ``derived``, the parser sets it.

    Args:
        help_text: one sentence for ``--help`` and the README.
        **options: attributes of :class:`FieldSpec`.
    """
    return field(metadata={_METADATA_KEY: {"help": help_text, **options}})


def switch(help_text: str, *, names: tuple[str, ...] = (), off: str | tuple[str, ...] = ()) -> Any:
    """Declares a truth value that its flag's presence turns around.

    Args:
        help_text: one sentence for ``--help`` and the README.
        names: spellings of a flag that turns it on, where not made from the field's name.
        off: spellings of a flag that turns it off; it is on by default then.
    """
    off = (off,) if isinstance(off, str) else off
    return flag(help_text, bool(off), names=off or names)


def assign(config: object, name: str, value: object) -> None:
    """Sets a field of a frozen dataclass; only for ``__post_init__``, before anybody sees it."""
    object.__setattr__(config, name, value)


@dataclass(frozen=True, kw_only=True)
class FieldSpec:
    """One field of a group: its type taken apart, its default and its flag.

    Attributes:
        dest: the field's name, which is Megatron-LM's name for it.
        base: ``int``, ``float``, ``str`` or ``bool``.
        limits: bounds of a value.
        many: the value is a tuple of ``base``.
        length: the tuple's length, ``None`` where it is free.
        optional: ``None`` is allowed.
        default: the default, ``MISSING`` where there is none.
        help: one sentence for ``--help`` and the README; empty where no flag sets the field.
        names: every spelling of the flag, the first one being shown.
        choices: allowed values, if they are a fixed set.
        also_takes: Function that returns whether a value beside the choices is taken; raises
            ``ValueError`` with the reason if it knows one.
        refused_choices: values that Megatron-LM takes and we do not, each with the reason.
        unit: the word shown in place of the value, empty for none.
        derived: how the value is found when the flag is absent, for fields that depend on others.
        takes_value: a truth value that is written out (``--profile-execution True``).
        reader: own conversion from one word; raises ``ValueError`` with the rule.
        detail: text for ``--help`` in place of ``help``.
    """

    dest: str
    base: type
    limits: Limits
    many: bool
    length: int | None
    optional: bool
    default: Any
    help: str = ""
    names: tuple[str, ...] = ()
    choices: tuple[str | int, ...] = ()
    also_takes: Callable[[Any], bool] | None = None
    refused_choices: Mapping[str, str] = field(default_factory=dict)
    unit: str = ""
    derived: str = ""
    takes_value: bool = False
    reader: Callable[[str], Any] | None = None
    detail: str = ""

    @property
    def has_flag(self) -> bool:
        """True if a flag sets the field."""
        return bool(self.help)

    @property
    def name(self) -> str:
        """The flag as shown to the user."""
        return self.names[0]

    @property
    def is_switch(self) -> bool:
        """True if the flag takes no value: its presence turns the default around."""
        return self.has_flag and self.base is bool and not self.takes_value

    @property
    def is_required(self) -> bool:
        """True if the command line must name the flag."""
        return self.has_flag and self.default is MISSING and not self.derived

    @property
    def default_text(self) -> str:
        """The default as shown in ``--help`` and the README."""
        if self.derived:
            return self.derived
        words = ((MISSING, "required"), (None, "none"), ("", "none"), (True, "on"), (False, "off"))
        for value, text in words:
            if self.default is value:
                return text
        if isinstance(self.default, tuple):
            return " ".join(str(item) for item in self.default)
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def help_text(self) -> str:
        """The sentence of the documentation, with the choices."""
        if not self.choices:
            return self.help
        return f"{self.help} One of: {', '.join(map(str, self.choices))}."

    @property
    def takes_any_number(self) -> bool:
        """True if one or more words follow the flag."""
        return self.many and self.length is None and not self.reader

    @property
    def metavar(self) -> str:
        """The words that stand for the value."""
        fallback = {int: "N", float: "X", str: "TEXT", bool: "True|False"}[self.base]
        return (self.unit or fallback) + (" ..." if self.takes_any_number else "")

    def options(self) -> dict[str, Any]:
        """Keyword arguments of ``add_argument``; an absent flag is absent from the result."""
        text = (self.detail or self.help_text).replace("%", "%%")
        options: dict[str, Any] = {"dest": self.dest, "default": argparse.SUPPRESS}
        if self.is_switch:
            action = "store_false" if self.default is True else "store_true"
            return options | {"action": action, "help": text}

        def convert(word: str) -> Any:
            try:
                return self.convert(word)
            except ValueError as error:
                raise argparse.ArgumentTypeError(str(error)) from None

        options |= {
            "type": convert,
            "metavar": self.metavar.removesuffix(" ..."),
            "help": f"{text} (default: {self.default_text.replace('%', '%%')})",
        }
        if self.takes_any_number:
            options["nargs"] = "+"
        elif self.length is not None:
            options |= {"nargs": self.length, "metavar": tuple(self.metavar.split())}
        return options

    def text_of(self, value: Any) -> str:
        """Writes the flag as on a command line that gives it this value."""
        if self.is_switch:
            return self.name
        if isinstance(value, float):
            return f"{self.name} {value:g}"
        if isinstance(value, tuple):
            # A tuple with a conversion of its own is one word.
            in_one_word = "," if "," in self.unit else "-"
            separator = in_one_word if self.reader else " "
            value = separator.join(map(str, value))
        return f"{self.name} {value}"

    def convert(self, word: str) -> Any:
        """Turn one word of the command line into a value of this field.

        Raises:
            ValueError: the word breaks a rule; the text names the word and the rule.
        """
        if self.reader is not None:
            return self.reader(word)
        value = _convert_base(self.base, word)
        self.check(value)
        return value

    def check(self, value: Any) -> None:
        """Holds a value against choices and bounds.

        Raises:
            ValueError: it breaks one; the text names it and the rule.
        """
        choices = self.choices
        if choices and value not in choices:
            reason = self.refused_choices.get(str(value))
            if not reason and self.also_takes is not None and self.also_takes(value):
                return
            wrong = f"refused: {reason}" if reason else f"not one of {', '.join(map(str, choices))}"
            raise ValueError(f"{_shown(value)} is {wrong}")
        self.limits.check(value)


@functools.cache
def fields_of(group: type) -> tuple[FieldSpec, ...]:
    """Every field of a group in the order of its definition."""
    hints = typing.get_type_hints(group, include_extras=True)
    return tuple(
        spec_of(item.name, hints[item.name], item.default, **item.metadata.get(_METADATA_KEY, {}))
        for item in dataclasses.fields(group)
    )


def check_values(values: Mapping[str, Any], specs: Mapping[str, FieldSpec]) -> None:
    """Holds settings that no flag has read against the choices and bounds of flags.

    Args:
        values: by name; ``None`` says nothing.
        specs: flags of at least these names.

    Raises:
        ConfigError: the first that is wrong.
    """
    for name, value in values.items():
        try:
            if value is not None:
                specs[name].check(value)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from None


def spec_of(name: str, hint: Any, default: Any = None, **options: Any) -> FieldSpec:
    """Describes a field.

    Args:
        name: of the field.
        hint: its type.
        default: its default, ``MISSING`` for none.
        options: the other attributes of :class:`FieldSpec`.
    """
    optional = typing.get_origin(hint) in (types.UnionType, typing.Union)
    if optional:
        (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
    many = typing.get_origin(hint) is tuple
    parts = typing.get_args(hint) if many else (hint,)
    base, limits = parts[0], Limits()
    if typing.get_origin(base) is Annotated:
        base, limits = typing.get_args(base)
    assert base in (int, float, str, bool), f"a flag cannot have the type {hint}"
    if "help" in options and not options.get("names"):
        options["names"] = ("--" + name.replace("_", "-"),)
    return FieldSpec(
        dest=name,
        base=base,
        limits=limits,
        many=many,
        length=len(parts) if many and Ellipsis not in parts else None,
        optional=optional,
        default=default,
        **{"unit": limits.unit, **options},
    )


def _shown(value: object) -> str:
    """Returns a value as messages show it, with a long one cut short."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...{text[-1]}"


def _convert_base(base: type, word: str) -> Any:
    if base is bool:
        if word.lower() not in _WORDS:
            raise ValueError(f"{_shown(word)} is not True or False")
        return _WORDS[word.lower()]
    if base is str:
        if not word.strip():
            raise ValueError("the value is empty; give one or leave the flag away")
        return word
    try:
        number = base(word)
    except ValueError:
        kind = "whole number" if base is int else "number"
        raise ValueError(f"{_shown(word)} is not a {kind}") from None
    if base is int and abs(number) >= 1 << 63:
        raise ValueError(f"{word[:24]!r} has more than 64 bits")
    return number
