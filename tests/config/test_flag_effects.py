"""Tests the warning about flags that have no effect, and the table of their conditions."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megatron.adaptive.config.arguments import flag_table
from megatron.adaptive.config.flag_checks import warning_about_effects
from megatron.adaptive.config.flag_effects import effect_notes, effect_rules
from megatron.adaptive.config.flag_rules import GivenFlags, _parts, _Rule, _rules_of
from megatron.adaptive.config.flags import FieldSpec
from megatron.adaptive.config.model import MODELS
from megatron.adaptive.config.trainer import flag_specs
from megatron.adaptive.training.logger import built_in_loggers

from .conftest import cases_of, small

SPECS = flag_specs()
# Settings that only the oldest supported release of megatron-core has.
REMOVED = {"moe_use_legacy_grouped_gemm"} - {*SPECS}
RULES = [rule for rule in _rules_of(effect_rules("adaptive")) if rule.left not in REMOVED]

# After the arrow are the flags that have no effect, with the flags that they need.
IDLE = """\
--trace-interval 5 => --trace-interval 5 (needs --trace-dir)
--trace-detail layers --diagnose-interval 0
    => --trace-detail layers (needs --trace-dir) | --diagnose-interval 0 (needs --trace-dir)
--wandb-entity me --wandb-exp-name first
    => --wandb-entity me (needs --wandb-project) | --wandb-exp-name first (needs --wandb-project)
--initial-loss-scale 1024 => --initial-loss-scale 1024 (needs --fp16)
--fp16 --loss-scale 8 --hysteresis 3 => --hysteresis 3 (needs no --loss-scale)
--lr-warmup-init 1e-5 => --lr-warmup-init 1e-05 (needs --lr-warmup-iters or --lr-warmup-samples
    or --lr-warmup-fraction)
--lr-decay-style constant --min-lr 1e-5
    => --min-lr 1e-05 (needs --lr-decay-style other than constant)
PP2 --weight-pieces 2 --pipeline-schedule 1f1b @2
    => --weight-pieces 2 (needs --pipeline-schedule adaptive, auto, bfc, dfc, hinted
    and --split-backward True)
--weight-pieces 2 => --weight-pieces 2 (needs --split-backward True)
PP2 --repartition-interval 9 @2 => --repartition-interval 9 (needs --repartition auto)
--transport tcp => --transport tcp (needs --pipeline-model-parallel-size above 1)
PP2 --transport gloo --transport-crc @2
    => --transport-crc (needs --transport other than gloo, nccl)
--hang-after-s 0 --on-hang end => --on-hang end (needs --hang-after-s other than 0)
--no-mmap-bin-files => --no-mmap-bin-files (needs no --mock-data)
--eval-iters 0 --eval-interval 5 => --eval-interval 5 (needs --eval-iters above 0)
--save-interval 2 => --save-interval 2 (needs --save)
--profile-ranks 0 1 => --profile-ranks 0 1 (needs --profile or --profile-execution True
    or --trace-detail kernels)
--num-experts 4 --moe-router-load-balancing-type seq_aux_loss
    => --moe-router-load-balancing-type seq_aux_loss (needs --moe-aux-loss-coeff)
"""
# Each of these flags has an effect, or has its default value.
ACTIVE = """\
--trace-interval 5 --trace-dir unused
--trace-interval 1 --weight-decay 0.01
--wandb-exp-name first --wandb-project all
--fp16 --initial-loss-scale 1024
--lr-warmup-init 1e-5 --lr-warmup-fraction 0.1
--min-lr 1e-5 --lr-decay-style cosine
PP2 --weight-pieces 2 @2
PP2 --repartition auto --repartition-interval 9 @2
PP2 --pipeline-schedule auto --repartition-gain 0.1 @2
PP2 --transport tcp --transport-crc @2
--on-hang end
FILES --data-path unused --no-mmap-bin-files
--save unused --save-interval 2
--num-experts 4 --moe-router-load-balancing-type none
--num-experts 4 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1
--bf16 --swiglu --disable-bias-linear --use-rotary-position-embeddings --rotary-base 500000
"""


@pytest.mark.parametrize(("flags", "world_size", "idle"), cases_of(IDLE))
def test_flags_without_effect_are_named_in_one_line(
    flags: str, world_size: int, idle: list[str]
) -> None:
    line = warning_about_effects(small(flags, world_size=world_size))
    listed = ", ".join(idle)
    if len(idle) == 1:
        assert line == f"warning: {listed} has no effect; remove the flag, or set what it needs"
    else:
        start = "warning: these flags have no effect: "
        assert line == f"{start}{listed}; remove them, or set what they need"


@pytest.mark.parametrize(("flags", "world_size", "_"), cases_of(ACTIVE))
def test_flags_with_an_effect_are_not_named(flags: str, world_size: int, _: list[str]) -> None:
    assert warning_about_effects(small(flags, world_size=world_size)) is None


@pytest.mark.parametrize("name", MODELS)
def test_known_models_have_no_flags_without_effect(name: str) -> None:
    assert warning_about_effects(small(MODELS[name])) is None


def test_the_table_has_only_existing_flags() -> None:
    terms = {term for rule in RULES for term in (rule.left, *rule.right.split("/"))}
    assert {_parts(term)[0] for term in terms} <= set(SPECS)
    assert {rule.verb for rule in RULES} == {"acts with"}
    for name, _, listed in map(_parts, terms):
        choices = {str(choice) for choice in SPECS[name].choices}
        if choices and listed:
            assert set(listed.split(",")) <= choices


def other_value(spec: FieldSpec) -> Any:
    """Returns a value of the setting that is neither ``None`` nor the default."""
    if spec.base is bool:
        return spec.default is not True
    if spec.choices:
        value: Any = next(choice for choice in spec.choices if choice != spec.default)
    else:
        value = {int: 7, float: 0.7, str: "other"}[spec.base]
        value += 1 if value == spec.default else type(value)()
    return (value,) if spec.many else value


def value_for(term: str, *, is_true: bool) -> tuple[str, Any]:
    """Returns the setting in ``term``, and a value that makes ``term`` true if ``is_true``.

    Otherwise, the value makes ``term`` false.
    """
    name, sign, listed = _parts(term)
    spec = SPECS[name]
    default = None if spec.default is dataclasses.MISSING else spec.default
    if not sign:
        return name, other_value(spec) if is_true else default
    if sign == ">":
        return name, float(listed) + is_true
    if listed == "None":
        return name, None if is_true else other_value(spec)
    word = listed.split(",")[0]
    value = spec.accept((word,) if spec.many else word)
    if is_true == (sign == "="):
        return name, value
    if spec.base is bool:
        return name, not value
    others = [choice for choice in spec.choices if str(choice) not in listed.split(",")]
    other = others[0] if others else other_value(spec)
    return name, (other,) if spec.many and others else other


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.left} acts with {rule.right}"[:90])
def test_each_rule_is_checked(rule: _Rule) -> None:
    """Checks that a flag is reported exactly if none of the conditions in its rule is met."""
    table = f"{rule.left} acts with {rule.right}\n"
    options = rule.right.split("/")
    values = dict(value_for(option, is_true=False) for option in options)
    values |= dict([value_for(rule.left, is_true=True)])
    flag = SPECS[_parts(rule.left)[0]].name
    (text,) = GivenFlags(values, SPECS).without_effect(table)
    assert text.startswith(flag)
    assert all(SPECS[_parts(option)[0]].name in text for option in options)
    for option in options:
        met = values | dict([value_for(option, is_true=True)])
        assert GivenFlags(met, SPECS).without_effect(table) == []
    default = values | dict([value_for(rule.left, is_true=False)])
    assert GivenFlags(default, SPECS).without_effect(table) == []


def test_help_texts_name_the_conditions_of_the_table() -> None:
    rows = [row for rows in flag_table().values() for row in rows]
    texts = {flag.split()[0].rstrip(","): text for flag, _, text in rows}
    assert (
        texts["--trace-interval"]
        == "Trace every n-th iteration. Takes effect only with --trace-dir."
    )
    assert texts["--hysteresis"].endswith(
        " Takes effect only with --fp16 and without --loss-scale."
    )
    for name, note in effect_notes(SPECS).items():
        assert texts[SPECS[name].name].endswith(note)


def test_each_logger_of_the_package_makes_the_flags_of_curves_act() -> None:
    (rule,) = (rule for rule in RULES if rule.left == "tensorboard_log_interval")
    flags = {logger.flag for logger in built_in_loggers().values()}
    assert {*rule.right.split("/")} == {*flags, "logger"}
