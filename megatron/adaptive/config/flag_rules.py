"""Checks settings against tables of rules: requirements, exclusions, limits and effects.

A rule is a line with terms, a verb, more terms, and an optional reason for the error message::

    loss_scale fp16_lm_cross_entropy needs fp16
    sft excludes mock_data | conversations come from files
    min_lr within lr
    num_query_groups divides num_attention_heads | every group serves the same number of heads
    trace_interval acts with trace_dir

A rule with the verb ``acts with`` states that the setting on the left has no effect without the
setting on the right. Such a rule leads only to a warning. All other rules are requirements. The
verb ``within`` sets an upper limit: the left value must not be above the right value.

Each term on the left is checked against each term on the right. The term ``name`` is true if the
setting ``name`` does not have its default value. The term ``name=a,b`` is true if the setting has
one of these values, ``name!=a,b`` is true if it has none of them, and ``name>1`` is true if its
value is larger. On the left, ``+`` joins terms that must all be true, and ``*`` multiplies settings
whose product must divide the setting on the right. On the right, ``/`` joins alternatives: at least
one of these terms must be true. Rules about unknown settings are skipped, so that programs with
different settings can share a table.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatron.adaptive.config.flags import FieldSpec
from megatron.adaptive.config.schedule_specs import ScheduleSpec, selectable_names
from megatron.adaptive.errors import ConfigError

_CHUNKS = "num_virtual_stages_per_pipeline_rank"


_OF_TRACES = "trace_otlp needs trace_dir\n"


@functools.cache
def order_rules(schedule: str) -> str:
    """Returns the table of rules about schedules, which apply to the trainer and to ``Pipeline``.

    Args:
        schedule: Value of ``--pipeline-schedule``, which may name a user's schedule.
    """

    def names(matches: Callable[[ScheduleSpec], object]) -> str:
        return ",".join(sorted(selectable_names(matches, also=[schedule])))

    splits = names(lambda spec: spec.splits_backward != "never")
    return f"""{_OF_TRACES}\
stage_data_parallel_sizes needs pipeline_schedule={names(lambda spec: spec.allows_unequal_stages)}
    | other schedules require stages of equal sizes
{_CHUNKS}>1 needs pipeline_model_parallel_size>1
    | megatron-core supports chunks only with several pipeline ranks
pipeline_schedule={names(lambda spec: spec.chunks == "several")} needs {_CHUNKS}>1
    | 1f1b and adaptive support a single chunk
pipeline_schedule={names(lambda spec: spec.chunks == "one")} needs {_CHUNKS}=1
    | interleaved and adaptive support several chunks
pipeline_schedule={names(lambda spec: spec.chunks == "two")} needs {_CHUNKS}=2
pipeline_schedule={names(lambda spec: spec.is_v_only)} excludes pipeline_placement=loop
    | this schedule places its stages in a V over the ranks
pipeline_placement=v needs pipeline_schedule={names(lambda spec: "v" in spec.placements)} {
        _CHUNKS
    }>1
activation_cap needs pipeline_schedule={names(lambda spec: spec.is_rule)}
    | other schedules keep the activations of a fixed number of microbatches
split_backward=False excludes pipeline_schedule={
        names(lambda spec: spec.splits_backward == "always")
    }
    | this schedule always computes weight gradients in separate actions
split_backward=True needs pipeline_schedule={splits}
    | other schedules do not split the backward pass
pipeline_schedule=file needs schedule_file
schedule_file needs pipeline_schedule=file
auto_candidates needs pipeline_schedule=auto
keyed_dropout excludes pipeline_schedule=megatron | megatron-core runs the forward passes
pipeline_schedule={names(lambda spec: spec.recomputes)} needs recompute_granularity=full
    | this schedule keeps the inputs of many microbatches and repeats their forward passes
sequence_slices=0 needs pipeline_schedule=auto | auto measures steps to choose a number of slices
sequence_slices needs pipeline_schedule={
        names(
            lambda spec: (
                spec.orders_slices or (spec.kind in ("rule", "auto", "file") and not spec.is_own)
            )
        )
    }
    | other schedules do not divide microbatches into slices
slice_tokens=0 needs pipeline_schedule=auto | auto measures steps to choose the length of slices
pipeline_schedule=auto+slice_tokens needs variable_seq_lengths
    | sequences of equal length use --sequence-slices instead
pipeline_schedule=seq-1f1b+slice_tokens excludes repartition | ranks hold unequal numbers of slices
pipeline_schedule=auto+slice_tokens excludes repartition | auto measures layers that must not move
slice_tokens needs pipeline_schedule={
        names(
            lambda spec: spec.orders_slices or (spec.kind in ("rule", "auto") and not spec.is_own)
        )
    }
    | other schedules do not support slices, or require a fixed number of slices
overlap_moe_expert_parallel_comm needs pipeline_schedule={names(lambda spec: spec.overlaps_experts)}
    | other schedules never overlap two actions
overlap_moe_expert_parallel_comm needs moe_token_dispatcher_type=alltoall
    | layers with other dispatchers cannot pause while tokens are exchanged
"""


_REMEDIES = {
    "needs": "set the second flag, or change or remove the first",
    "excludes": "change or remove one of them",
    "within": "change one of them",
    "divides": "change one of them",
}
_ACTS = "acts with"
_VERB = re.compile(f" ({'|'.join([*_REMEDIES, _ACTS])}) ")
_TERM = re.compile(r"(\w+)(?:(=|!=|>)(\S+))?")


class GivenFlags:
    """Checks settings against rules, and formats settings as flags for messages.

    Settings are also attributes of this object. The value of such an attribute is the flag as text.
    For example, ``flags.lr`` is ``--lr 0.1``.

    Args:
        values: Values of the settings, keyed by setting name.
        specs: Specifications of the flags, keyed by setting name.
    """

    def __init__(self, values: Mapping[str, Any], specs: Mapping[str, FieldSpec]) -> None:
        self._values = values
        self._specs = specs

    def __getattr__(self, name: str) -> str:
        return self._specs[name].text_of(self._values[name])

    def require(self, table: str) -> None:
        """Checks the settings against all rules in ``table``.

        Raises:
            ConfigError: The settings violate a rule. The message describes the first violated rule.
        """
        for rule in _rules_of(table):
            if violation := self._violation(rule):
                reason = rule.reason and f" ({rule.reason})"
                raise ConfigError(f"{violation}{reason}; {_REMEDIES[rule.verb]}")

    def without_effect(self, table: str) -> list[str]:
        """Returns the flags that have no effect, each with the flags that it requires, as text.

        Args:
            table: Rules with the verb ``acts with``.
        """
        missing: dict[str, list[str]] = {}
        for rule in _rules_of(table):
            options = rule.right.split("/")
            if self._applies(rule.left) and not any(self._applies(term, True) for term in options):
                needs = missing.setdefault(self._text(rule.left), [])
                needs.append(self._needed(options))
        return [f"{text} (needs {' and '.join(needs)})" for text, needs in missing.items()]

    def conditions(self, table: str) -> dict[str, list[str]]:
        """Returns the flags without which a setting has no effect, keyed by the setting's name.

        Conditions for only some values of a setting are not included. The word ``no`` precedes a
        flag that must be absent.

        Args:
            table: Rules with the verb ``acts with``.
        """
        needs: dict[str, list[str]] = {}
        for rule in _rules_of(table):
            options = [term for term in rule.right.split("/") if _parts(term)[0] in self._specs]
            if rule.left in self._specs and options:
                needs.setdefault(rule.left, []).append(self._needed(options))
        return needs

    def _violation(self, rule: _Rule) -> str:
        """Returns a message that explains how the settings violate ``rule``, or an empty string."""
        joined = rule.left.split("+")
        options = rule.right.split("/")
        if rule.verb in ("within", "divides"):
            *conditions, product = joined
            return self._beyond(rule, product) if all(map(self._applies, conditions)) else ""
        is_met = any(self._applies(option, rule.verb == "needs") for option in options)
        if is_met == (rule.verb == "needs") or not all(map(self._applies, joined)):
            return ""
        flags = " with ".join(map(self._text, joined))
        if rule.verb == "needs":
            return f"{flags} requires {self._needed(options)}{self._unsuitable(options[0])}"
        return f"{flags} and {self._text(rule.right)} exclude each other"

    def _beyond(self, rule: _Rule, product: str) -> str:
        """Returns a message with the numbers that violate ``rule``, or an empty string if none do.

        The verb of the rule must be ``within`` or ``divides``. ``product`` contains the settings on
        the left side of the rule, joined by ``*``.
        """
        factors = product.split("*")
        limit = self._values.get(rule.right)
        numbers: list[Any] = [int(n) if n.isdigit() else self._values.get(n) for n in factors]
        if limit is None or None in numbers:
            return ""
        text = " x ".join(n if n.isdigit() else self._text(n) for n in factors)
        if rule.verb == "within":
            return f"{text} is above {self._text(rule.right)}" if numbers[0] > limit else ""
        unit = math.prod(numbers)
        text += f" = {unit}" * (len(factors) > 1)
        return f"{self._text(rule.right)} is not a multiple of {text}" if limit % unit else ""

    def _applies(self, term: str, unknown: bool = False) -> bool:
        """Returns whether ``term`` is true, or ``unknown`` if it names an unknown setting."""
        name, sign, listed = _parts(term)
        if name not in self._values:
            return unknown
        value = self._values[name]
        if sign == ">":
            return value is not None and value > float(listed)
        if not sign:
            return value not in (None, self._specs[name].default)
        items = value if isinstance(value, tuple) else (value,)
        texts = {f"{item:g}" if isinstance(item, float) else str(item) for item in items}
        return texts.isdisjoint(listed.split(",")) == (sign == "!=")

    def _text(self, term: str) -> str:
        return str(getattr(self, _parts(term)[0]))

    def _unsuitable(self, term: str) -> str:
        """Returns text such as ``, got 4``, with the value of the setting in ``term``.

        The text is empty if the setting has no value or is a switch.
        """
        name = _parts(term)[0]
        is_absent = self._values[name] is None or self._specs[name].is_switch
        return "" if is_absent else f", got {self._text(term)}"

    def _needed(self, terms: list[str]) -> str:
        """Returns ``terms`` as flags with the required values, joined by "or"."""
        texts = []
        for name, sign, listed in map(_parts, terms):
            spec = self._specs[name]
            if listed in ("None", "False") and listed == str(spec.default):
                texts.append(f"no {spec.name}")
                continue
            relation = {">": "above ", "!=": "other than "}.get(sign, "")
            has_value = sign and not spec.is_switch
            values = f" {relation}{listed.replace(',', ', ')}" if has_value else ""
            texts.append(f"{spec.name}{values}")
        return " or ".join(texts)


class _Rule(NamedTuple):
    """A rule with a single term on each side.

    Attributes:
        left: Term before the verb, such as ``fp16+loss_scale``.
        verb: Relation between the terms: ``needs``, ``excludes``, ``within``, ``divides`` or ``acts
            with``.
        right: Term after the verb, such as ``micro_batch_size>1``.
        reason: Reason for the rule, shown in error messages. It may be empty.
    """

    left: str
    verb: str
    right: str
    reason: str


@functools.cache
def _rules_of(table: str) -> list[_Rule]:
    """Parses a table of rules. A line with several terms on a side becomes several rules."""
    rules = []
    for line in table.replace("\n    ", " ").splitlines():
        rule, _, reason = line.partition(" | ")
        left, verb, right = _VERB.split(rule)
        pairs = itertools.product(left.split(), right.split())
        rules += [_Rule(first, verb, second, reason) for first, second in pairs]
    return rules


@functools.cache
def _parts(term: str) -> tuple[str, str, str]:
    """Splits a term into the name of its setting, the sign ``=``, ``!=`` or ``>``, and values."""
    match = _TERM.fullmatch(term)
    assert match is not None, f"{term} is not a term of a rule"
    return match[1], match[2] or "", match[3] or ""
