"""Creates command-line flags from dataclass fields.

This module defines the metadata of flags, and types with bounds. It also converts text to values.
Individual flags, and checks that involve two flags, are in other modules.
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
_TRUTH_VALUES = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}
_BOUNDS: tuple[tuple[str, Callable[[Any, Any], bool], str], ...] = (
    ("minimum", operator.lt, "small; give at least"),
    ("above", operator.le, "small; give more than"),
    ("below", operator.ge, "large; give less than"),
    ("maximum", operator.gt, "large; give at most"),
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of a value, for use as ``Annotated[int, Limits(...)]``.

    Attributes:
        minimum: Smallest allowed value, or ``None`` for no bound.
        above: Exclusive lower bound, or ``None`` for no bound.
        below: Exclusive upper bound, or ``None`` for no bound.
        maximum: Largest allowed value, or ``None`` for no bound.
        unit: Placeholder for the value in help texts, such as ``ITERATIONS``, ``LAYERS`` or
            ``DIR``.
    """

    minimum: float | None = None
    above: float | None = None
    below: float | None = None
    maximum: float | None = None
    unit: str = ""

    def check(self, value: Any) -> None:
        """Checks that ``value`` is finite and within the bounds.

        Raises:
            ValueError: The value is not finite, or out of bounds.
        """
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{value} is not a finite number")
        for name, is_beyond, text in _BOUNDS:
            bound = getattr(self, name)
            if bound is not None and is_beyond(value, bound):
                raise ValueError(f"{value} is too {text} {bound:.12g}")


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


def flag(
    help_text: str,
    default: Any = None,
    *,
    names: tuple[str, ...] = (),
    choices: tuple[str | int, ...] = (),
    also_takes: Callable[[Any], bool] | None = None,
    refused_choices: Mapping[str, str] | None = None,
    unit: str | None = None,
    derived: str = "",
    takes_value: bool = False,
    reader: Callable[[str], Any] | None = None,
    named_values: Mapping[str, int] | None = None,
    detail: str = "",
) -> Any:
    """Declares a dataclass field whose value a command-line flag sets.

    Args:
        help_text: Description of the flag in a single sentence, for ``--help`` and
            ``docs/flags.md``.
        default: Value of the field if the flag is absent, or ``MISSING`` for a required flag.
        names: Spellings of the flag. Messages use the first spelling. Defaults to the field's name.
        choices: Allowed values. If empty, all values are allowed.
        also_takes: Function that takes a value outside of ``choices`` and returns whether it is
            accepted. The function may raise ``ValueError`` to reject the value for a specific
            reason.
        refused_choices: Reasons for rejecting values that Megatron-LM accepts, keyed by value.
        unit: Placeholder for the value in help texts, or ``None`` to derive it from the field's
            type.
        derived: Description of the default if it depends on other settings.
        takes_value: Whether a boolean flag is followed by a value, like ``--profile-execution
            True``.
        reader: Function that converts the argument to a value. If the argument is invalid, the
            function raises ``ValueError`` with the reason.
        named_values: Words that the flag accepts instead of numbers, mapped to the numbers for
            which they stand. These numbers may be out of bounds.
        detail: Longer description that replaces ``help_text`` in ``--help``.
    """
    options = {
        "help": help_text,
        "names": names,
        "choices": choices,
        "also_takes": also_takes,
        "refused_choices": refused_choices or {},
        "derived": derived,
        "takes_value": takes_value,
        "reader": reader,
        "named_values": named_values or {},
        "detail": detail,
    }
    if unit is not None:
        options["unit"] = unit
    return field(default=default, metadata={_METADATA_KEY: options})


def required(
    help_text: str, *, names: tuple[str, ...] = (), unit: str | None = None, derived: str = ""
) -> Any:
    """Declares a dataclass field without a default.

    The flag is required unless the parser computes a value, which ``derived`` describes.

    Args:
        help_text: Description of the flag in a single sentence, for ``--help`` and
            ``docs/flags.md``.
        names: Spellings of the flag. Messages use the first spelling. Defaults to the field's name.
        unit: Placeholder for the value in help texts, or ``None`` to derive it from the field's
            type.
        derived: Description of the value that the parser computes if the flag is absent.
    """
    return flag(help_text, MISSING, names=names, unit=unit, derived=derived)


def switch(help_text: str, *, names: tuple[str, ...] = (), off: str | tuple[str, ...] = ()) -> Any:
    """Declares a boolean dataclass field whose flag takes no value and inverts the default.

    Args:
        help_text: Description of the flag in a single sentence, for ``--help`` and
            ``docs/flags.md``.
        names: Spellings of the flag that turns the setting on. Defaults to the field's name.
        off: Spellings of the flag that turns the setting off. If there are any, the setting is on
            by default.
    """
    off = (off,) if isinstance(off, str) else off
    return flag(help_text, bool(off), names=off or names)


def assign(config: object, name: str, value: object) -> None:
    """Sets a field of a frozen dataclass, for use in ``__post_init__``."""
    object.__setattr__(config, name, value)


@dataclass(frozen=True, kw_only=True)
class FieldSpec:
    """Specification of a field of a settings dataclass: its type, default and flag.

    Attributes:
        dest: Name of the field. Megatron-LM uses the same name.
        base: Type of a single value: ``int``, ``float``, ``str`` or ``bool``.
        limits: Bounds of a single value.
        many: Whether the field is a tuple of values.
        length: Number of values in the tuple, or ``None`` for any number.
        optional: Whether the field may be ``None``.
        default: Default value, or ``MISSING`` if the field has no default.
        help: Description of the flag in a single sentence, for ``--help`` and ``docs/flags.md``. It
            is empty if no flag sets the field.
        names: All spellings of the flag. Messages use the first spelling.
        choices: Allowed values. If empty, all values are allowed.
        also_takes: Function that takes a value outside of ``choices`` and returns whether it is
            accepted. The function may raise ``ValueError`` to reject the value for a specific
            reason.
        refused_choices: Reasons for rejecting values that Megatron-LM accepts, keyed by value.
        unit: Placeholder for the value in help texts. If empty, it is derived from the type.
        derived: Description of the default if it depends on other settings.
        takes_value: Whether a boolean flag is followed by a value, like ``--profile-execution
            True``.
        reader: Function that converts the argument to a value. If the argument is invalid, the
            function raises ``ValueError`` with the reason.
        named_values: Words that the flag accepts instead of numbers, mapped to the numbers for
            which they stand. These numbers may be out of bounds.
        detail: Longer description that replaces ``help`` in ``--help``.
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
    named_values: Mapping[str, int] = field(default_factory=dict)
    detail: str = ""

    @property
    def has_flag(self) -> bool:
        """Whether a command-line flag sets the field."""
        return bool(self.help)

    @property
    def name(self) -> str:
        """First spelling of the flag. Messages use this spelling."""
        return self.names[0]

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value. Such a flag inverts the default."""
        return self.has_flag and self.base is bool and not self.takes_value

    @property
    def is_required(self) -> bool:
        """Whether the command line must contain the flag."""
        return self.has_flag and self.default is MISSING and not self.derived

    @property
    def default_text(self) -> str:
        """Text of the default in ``--help`` and ``docs/flags.md``; ``none`` without a default."""
        if self.derived:
            return self.derived
        texts = ((MISSING, "required"), (None, "none"), ("", "none"), (True, "on"), (False, "off"))
        for value, text in texts:
            if self.default is value:
                return text
        if isinstance(self.default, tuple):
            return " ".join(str(item) for item in self.default) or "none"
        return f"{self.default:.12g}" if isinstance(self.default, float) else str(self.default)

    @property
    def help_text(self) -> str:
        """Description of the flag, followed by a list of the choices."""
        if not self.choices:
            return self.help
        return f"{self.help} One of: {', '.join(map(str, self.choices))}."

    @property
    def takes_any_number(self) -> bool:
        """Whether the flag takes one or more arguments."""
        return self.many and self.length is None and not self.reader

    @property
    def metavar(self) -> str:
        """Placeholder for the value in help texts, such as ``N`` or ``LAYERS``."""
        fallback = {int: "N", float: "X", str: "TEXT", bool: "True|False"}[self.base]
        return (self.unit or fallback) + (" ..." if self.takes_any_number else "")

    def options(self) -> dict[str, Any]:
        """Returns keyword arguments for the method ``add_argument`` of argparse.

        With these arguments, argparse sets no value for an absent flag, not even the default.
        """
        text = (self.detail or self.help_text).replace("%", "%%")
        options: dict[str, Any] = {"dest": self.dest, "default": argparse.SUPPRESS}
        if self.is_switch:
            action = "store_false" if self.default is True else "store_true"
            return options | {"action": action, "help": text}

        def convert(argument: str) -> Any:
            try:
                return self.convert(argument)
            except ValueError as error:
                raise argparse.ArgumentTypeError(str(error)) from None

        notes = {"none": "", "required": " (required)"}
        default = f" (default: {self.default_text.replace('%', '%%')})"
        options |= {
            "type": convert,
            "metavar": self.metavar.removesuffix(" ..."),
            "help": text + notes.get(self.default_text, default),
        }
        if self.takes_any_number:
            options["nargs"] = "+"
        elif self.length is not None:
            options |= {"nargs": self.length, "metavar": tuple(self.metavar.split())}
        return options

    def text_of(self, value: Any) -> str:
        """Returns the flag and ``value`` as text, as typed on a command line."""
        if self.is_switch:
            return self.name
        if isinstance(value, float):
            return f"{self.name} {value:.12g}"
        if isinstance(value, tuple):
            # If the field has a reader, the whole tuple is a single argument such as 4-4-4 or a,b.
            joint = "," if "," in self.unit else "-"
            separator = joint if self.reader else " "
            value = separator.join(map(str, value))
        return f"{self.name} {self._word(value)}"

    def convert(self, argument: str) -> Any:
        """Converts the command-line argument ``argument`` to a value of this field.

        Raises:
            ValueError: The argument is invalid. The message contains the argument and the reason.
        """
        if self.reader is not None:
            return self.reader(argument)
        if argument in self.named_values:
            return self.named_values[argument]
        value = _convert_base(self.base, argument)
        self.check(value)
        return value

    def accept(self, value: Any) -> Any:
        """Converts ``value``, which does not come from the command line, to the type of this field.

        For a float field, an integer is converted to a float. Numbers are never rounded.

        Raises:
            ValueError: The value has the wrong type or is invalid. The message contains the reason.
        """
        if self.many and isinstance(value, tuple | list):
            return tuple(value)
        if self.reader is not None:
            return self.reader(str(value))
        if self.base is float and type(value) is int:
            try:
                value = float(value)
            except OverflowError:
                value = math.inf
        if type(value) is not self.base:
            return self.convert(str(value))
        if type(value) is int and value in self.named_values.values():
            return value
        if isinstance(value, int):
            _check_size(value, str(value))
        if isinstance(value, str):
            _check_text(value)
        self.check(value)
        return value

    def words_of(self, value: Any) -> list[str]:
        """Returns the flag and ``value`` as command-line arguments. Numbers are not rounded."""
        if self.is_switch:
            return [] if bool(value) == (self.default is True) else [self.name]
        if isinstance(value, tuple):
            joint = "," if "," in self.unit else "-"
            return [self.name, *([joint.join(map(str, value))] if self.reader else map(str, value))]
        return [self.name, str(self._word(value))]

    def _word(self, value: Any) -> Any:
        """Returns the word that stands for the number ``value``, or ``value`` if there is none."""
        return next((word for word, number in self.named_values.items() if number == value), value)

    def check(self, value: Any) -> None:
        """Checks that ``value`` is one of the choices and within the bounds.

        Raises:
            ValueError: The value is invalid. The message contains the value and the reason.
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
    """Returns the specifications of a settings dataclass's fields, in order of definition."""
    hints = typing.get_type_hints(group, include_extras=True)
    return tuple(
        spec_of(item.name, hints[item.name], item.default, item.metadata.get(_METADATA_KEY, {}))
        for item in dataclasses.fields(group)
    )


def check_values(values: Mapping[str, Any], specs: Mapping[str, FieldSpec]) -> None:
    """Checks settings that do not come from the command line against the limits of their flags.

    Args:
        values: Values of the settings, keyed by name. Values that are ``None`` are not checked.
        specs: Specifications of the settings, keyed by name.

    Raises:
        ConfigError: A value is invalid. The message names the first setting with an invalid value.
    """
    for name, value in values.items():
        try:
            if value is not None:
                specs[name].check(value)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from None


def spec_of(name: str, hint: Any, default: Any, options: Mapping[str, Any]) -> FieldSpec:
    """Creates the specification of a field from its type annotation, default and metadata.

    Args:
        name: Name of the field.
        hint: Type annotation of the field, such as ``tuple[int, ...] | None``.
        default: Default value of the field, or ``MISSING`` if the field has no default.
        options: Other attributes of the :class:`FieldSpec` from the field's metadata, keyed by
            name.
    """
    optional = typing.get_origin(hint) in (types.UnionType, typing.Union)
    if optional:
        (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
    many = typing.get_origin(hint) is tuple
    parts = typing.get_args(hint) if many else (hint,)
    base = parts[0]
    limits = Limits()
    if typing.get_origin(base) is Annotated:
        base, limits = typing.get_args(base)
    assert base in (int, float, str, bool), f"a flag cannot have the type {hint}"
    if "help" in options and not options.get("names"):
        options = {**options, "names": ("--" + name.replace("_", "-"),)}
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
    """Returns ``value`` as text for a message. Long texts are truncated."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...{text[-1]}"


def _convert_base(base: type, text: str) -> Any:
    if base is bool:
        if text.lower() not in _TRUTH_VALUES:
            raise ValueError(f"{_shown(text)} is not True or False")
        return _TRUTH_VALUES[text.lower()]
    if base is str:
        _check_text(text)
        return text
    try:
        number = base(text)
    except ValueError:
        kind = "an integer" if base is int else "a number"
        raise ValueError(f"{_shown(text)} is not {kind}") from None
    if base is int:
        _check_size(number, text)
    return number


def _check_text(text: str) -> None:
    if not text.strip():
        raise ValueError("the value is empty; give a value or remove the flag")


def _check_size(number: int, text: str) -> None:
    if abs(number) >= 1 << 63:
        raise ValueError(f"{text[:24]!r} has more than 64 bits")
