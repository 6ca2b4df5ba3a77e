"""Flags of Megatron-LM: each is taken or refused by name, none of them both."""

from __future__ import annotations

import pytest

from megatron.adaptive.config.flags import fields_of
from megatron.adaptive.config.refused import FAMILIES, reason_for, refused_flags
from megatron.adaptive.config.trainer import groups

from .megatron_lm_flags import ALL

TAKEN = {name for kind in groups().values() for spec in fields_of(kind) for name in spec.names}


@pytest.mark.parametrize("flag", ALL)
def test_each_flag_of_megatron_lm_is_taken_or_refused(flag: str) -> None:
    assert (flag in TAKEN) != (reason_for(flag) is not None)


def test_no_taken_flag_is_refused() -> None:
    assert [flag for flag in sorted(TAKEN) if reason_for(flag) is not None] == []


def test_each_flag_is_refused_once() -> None:
    flags = refused_flags()
    assert len(set(flags)) == len(flags)


def test_reasons_are_one_line_and_say_what_to_do() -> None:
    for family in FAMILIES:
        assert family.reason == " ".join(family.reason.split())
        assert ";" in family.reason or "use" in family.reason or "given with" in family.reason


def test_an_unknown_flag_has_no_reason() -> None:
    assert reason_for("--no-such-flag") is None
