"""Makes command line flags of dataclass fields.

Owns the metadata of a flag, the reading of types from annotations and the conversion of text to
values. Deliberately knows no particular flag and no rule between two flags.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any

from megatron.adaptive.errors import ConfigError

__all__ = ["FieldSpec", "Flag", "assign", "fields_of", "flag"]

_METADATA_KEY = "flag"
_TRUE_WORDS = frozenset({"true", "1", "yes", "on"})
_FALSE_WORDS = frozenset({"false", "0", "no", "off"})


@dataclass(frozen=True, kw_only=True)
class Flag:
    """Describes one field to the command line.

    Attributes:
        help: one sentence for ``--help`` and the README.
        names: every spelling, the first one being shown; made from the field's name when empty.
        choices: allowed values, if they are a fixed set.
        refused_choices: values that Megatron-LM takes and we do not, each with the reason.
        unit: the word shown in place of the value (``iterations``, ``layers``, ``DIR``).
        minimum: smallest allowed value.
        above: the value must be larger than this.
        below: the value must be smaller than this.
        maximum: largest allowed value.
        derived: how the value is found when the flag is absent, for fields that depend on others.
        takes_value: a truth value that is written out (``--profile-execution True``).
        convert: own conversion from one word; raises ``ValueError`` with the rule.
    """

    help: str
    names: tuple[str, ...] = ()
    choices: tuple[str | int, ...] = ()
    refused_choices: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unit: str = ""
    minimum: float | None = None
    above: float | None = None
    below: float | None = None
    maximum: float | None = None
    derived: str = ""
    takes_value: bool = False
    convert: Callable[[str], Any] | None = None


def flag(help_text: str, *, default: Any = MISSING, **options: Any) -> Any:
    """Declares a field that is a command line flag.

    Args:
        help_text: one sentence for ``--help`` and the README.
        default: the value when the flag is absent; a field without one is required unless
            ``derived`` is given.
        **options: the other attributes of :class:`Flag`.
    """
    metadata = {_METADATA_KEY: Flag(help=help_text, **options)}
    if default is MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def assign(config: object, name: str, value: object) -> None:
    """Sets a field of a frozen dataclass; only for ``__post_init__``, before anybody sees it."""
    object.__setattr__(config, name, value)


@dataclass(frozen=True, kw_only=True)
class FieldSpec:
    """One field of a group: its type taken apart, its default and its flag.

    Attributes:
        dest: the field's name, which is Megatron-LM's name for it.
        base: ``int``, ``float``, ``str`` or ``bool``.
        many: the value is a tuple of ``base``.
        length: the tuple's length, ``None`` where it is free.
        optional: ``None`` is allowed.
        default: the default, ``MISSING`` where there is none.
        flag: the command line's view, ``None`` for fields that no flag sets.
    """

    dest: str
    base: type
    many: bool
    length: int | None
    optional: bool
    default: Any
    flag: Flag | None

    @property
    def names(self) -> tuple[str, ...]:
        """Every spelling of the flag, the shown one first; empty where there is no flag."""
        if self.flag is None:
            return ()
        return self.flag.names or ("--" + self.dest.replace("_", "-"),)

    @property
    def name(self) -> str:
        """The flag as shown to the user."""
        return self.names[0]

    @property
    def is_switch(self) -> bool:
        """True if the flag takes no value: its presence turns the default around."""
        return self.flag is not None and self.base is bool and not self.flag.takes_value

    @property
    def is_required(self) -> bool:
        """True if the command line must name the flag."""
        return self.flag is not None and self.default is MISSING and not self.flag.derived

    @property
    def default_text(self) -> str:
        """The default as shown in ``--help`` and the README."""
        if self.flag is not None and self.flag.derived:
            return self.flag.derived
        if self.default is MISSING:
            return "required"
        if self.default is None:
            return "none"
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        if isinstance(self.default, tuple):
            return " ".join(str(item) for item in self.default)
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    def text_of(self, value: Any) -> str:
        """Writes the flag as on a command line that gives it this value."""
        if self.is_switch:
            return self.name
        if isinstance(value, float):
            return f"{self.name} {value:g}"
        if isinstance(value, tuple):
            # A tuple with a conversion of its own is one word.
            separator = "-" if self.flag is not None and self.flag.convert else " "
            value = separator.join(map(str, value))
        return f"{self.name} {value}"

    def convert(self, word: str) -> Any:
        """Turn one word of the command line into a value of this field.

        Raises:
            ValueError: the word breaks a rule; the text names the word and the rule.
        """
        if self.flag is None:
            raise ValueError(f"{self.dest} cannot be set by a flag")
        if self.flag.convert is not None:
            return self.flag.convert(word)
        value = _convert_base(self.base, word)
        _require_choice(self.flag, value)
        _require_range(self.flag, value)
        return value

    def from_json(self, value: object) -> Any:
        """Check a value that comes from a saved configuration.

        Raises:
            ConfigError: the value is not of the field's type.
        """
        if value is None and self.optional:
            return None
        if not self.many:
            return self._scalar_from_json(value)
        if not isinstance(value, list | tuple) or self.length not in (None, len(value)):
            length = "" if self.length is None else f" of {self.length} values"
            raise ConfigError(f"saved setting {self.dest} is {value!r}: it must be a list{length}")
        return tuple(self._scalar_from_json(item) for item in value)

    def _scalar_from_json(self, value: object) -> Any:
        if self.base is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if type(value) is not self.base:
            raise ConfigError(
                f"saved setting {self.dest} is {value!r}: it must be of type {self.base.__name__}"
            )
        return value


def fields_of(group: type) -> tuple[FieldSpec, ...]:
    """Every field of a group in the order of its definition."""
    hints = typing.get_type_hints(group)
    specs = []
    for item in dataclasses.fields(group):
        base, many, length, optional = _take_apart(hints[item.name])
        specs.append(
            FieldSpec(
                dest=item.name,
                base=base,
                many=many,
                length=length,
                optional=optional,
                default=item.default,
                flag=item.metadata.get(_METADATA_KEY),
            )
        )
    return tuple(specs)


def _take_apart(hint: Any) -> tuple[type, bool, int | None, bool]:
    """Split an annotation into base type, whether it is a tuple, its length, whether None fits."""
    optional = isinstance(hint, types.UnionType)
    if optional:
        (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
    many = typing.get_origin(hint) is tuple
    parts = typing.get_args(hint) if many else (hint,)
    length = len(parts) if many and Ellipsis not in parts else None
    assert parts[0] in (int, float, str, bool), f"a flag cannot have the type {hint}"
    return parts[0], many, length, optional


def _convert_base(base: type, word: str) -> Any:
    if base is bool:
        if word.lower() in _TRUE_WORDS:
            return True
        if word.lower() in _FALSE_WORDS:
            return False
        raise ValueError(f"{word!r} is not True or False")
    if base is int:
        try:
            return int(word)
        except ValueError:
            raise ValueError(f"{word!r} is not a whole number") from None
    if base is float:
        try:
            number = float(word)
        except ValueError:
            raise ValueError(f"{word!r} is not a number") from None
        if not math.isfinite(number):
            raise ValueError(f"{word!r} is not a finite number")
        return number
    if not word.strip():
        raise ValueError("the value is empty; give one or leave the flag away")
    return word


def _require_choice(spec: Flag, value: object) -> None:
    if not spec.choices or value in spec.choices:
        return
    reason = spec.refused_choices.get(str(value))
    if reason:
        raise ValueError(f"{value!r} is refused: {reason}")
    raise ValueError(f"{value!r} is not one of {', '.join(map(str, spec.choices))}")


def _require_range(spec: Flag, value: Any) -> None:
    if spec.minimum is not None and value < spec.minimum:
        raise ValueError(f"{value} is too small, give at least {spec.minimum:g}")
    if spec.above is not None and value <= spec.above:
        raise ValueError(f"{value} is too small, give more than {spec.above:g}")
    if spec.below is not None and value >= spec.below:
        raise ValueError(f"{value} is too large, give less than {spec.below:g}")
    if spec.maximum is not None and value > spec.maximum:
        raise ValueError(f"{value} is too large, give at most {spec.maximum:g}")
