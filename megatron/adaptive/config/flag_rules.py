"""Rules between settings as tables: what a setting needs, what it does not go with, its bounds.

A line has the settings, a verb, the others, and a reason::

    loss_scale fp16_lm_cross_entropy needs fp16
    sft excludes mock_data | conversations come from files
    min_lr within lr
    num_query_groups divides num_attention_heads | every group serves the same number of heads

Each on the left is held against each on the right. A setting is meant where it is not at its
default, ``name=a,b`` where it has one of these values, ``name>1`` where it is larger; ``+`` joins
those on the left that are meant together, ``/`` those on the right of which one is enough, ``*``
makes a product of those that divide another one. A rule about a setting that is not known does not
count, so that front ends can share a table.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from megatron.adaptive.config.flags import FieldSpec
from megatron.adaptive.config.schedule_specs import ScheduleSpec, selectable_names
from megatron.adaptive.errors import ConfigError

_CHUNKS = "num_virtual_stages_per_pipeline_rank"


@functools.cache
def order_rules(schedule: str) -> str:
    """Returns the rules of the order of work, for our trainer and for a user's Megatron-LM alike.

    Args:
        schedule: Name of the schedule that is asked for, which may be outside this package.
    """

    def those(matches: Callable[[ScheduleSpec], object]) -> str:
        return ",".join(sorted(selectable_names(matches, also=[schedule])))

    splits = those(lambda spec: spec.splits_backward != "never")
    return f"""\
stage_data_parallel_sizes needs pipeline_schedule={those(lambda spec: spec.allows_unequal_stages)}
    | the others are made for stages of equal sizes
{_CHUNKS}>1 needs pipeline_model_parallel_size>1
    | megatron-core splits a model into chunks only over several pipeline ranks
pipeline_schedule={those(lambda spec: spec.chunks == "several")} needs {_CHUNKS}>1
    | 1f1b and adaptive take one
pipeline_schedule={those(lambda spec: spec.chunks == "one")} needs {_CHUNKS}=1
    | interleaved and adaptive take several
pipeline_schedule={those(lambda spec: spec.chunks == "two")} needs {_CHUNKS}=2
pipeline_schedule={those(lambda spec: spec.is_v_only)} excludes pipeline_placement=loop
    | it runs stages there and back
pipeline_placement=v needs pipeline_schedule={those(lambda spec: "v" in spec.placements)} {
        _CHUNKS
    }>1
activation_cap needs pipeline_schedule={those(lambda spec: spec.is_rule)}
    | the others fix what is kept
split_backward=False excludes pipeline_schedule={
        those(lambda spec: spec.splits_backward == "always")
    }
    | its order has weight gradients as work of their own
split_backward=True needs pipeline_schedule={splits}
    | the others have whole backwards
pipeline_schedule=file needs schedule_file
schedule_file needs pipeline_schedule=file
auto_candidates needs pipeline_schedule=auto
keyed_dropout excludes pipeline_schedule=megatron | its forwards are megatron-core's own
pipeline_schedule={those(lambda spec: spec.recomputes)} needs recompute_granularity=full
    | it keeps the inputs of many microbatches and repeats their forwards
overlap_moe_expert_parallel_comm needs pipeline_schedule={those(lambda spec: spec.overlaps_experts)}
    | in the others no action begins beside another
overlap_moe_expert_parallel_comm needs moe_token_dispatcher_type=alltoall
    | layers with another cannot be left where they exchange tokens
"""


_REMEDIES = {
    "needs": "give that, or change or drop the first",
    "excludes": "change or drop one of them",
    "within": "change one of them",
    "divides": "change one of them",
}
_VERB = re.compile(f" ({'|'.join(_REMEDIES)}) ")
_TERM = re.compile(r"(\w+)(?:([=>])(\S+))?")


class Given:
    """Settings and their flags; attribute ``lr`` is how it is given, as ``--lr 0.1``.

    Args:
        values: of the settings, by their names.
        specs: their flags, likewise.
    """

    def __init__(self, values: Mapping[str, Any], specs: Mapping[str, FieldSpec]) -> None:
        self._values = values
        self._specs = specs

    def __getattr__(self, name: str) -> str:
        return self._specs[name].text_of(self._values[name])

    def require(self, table: str) -> None:
        """Holds the settings against a table.

        Raises:
            ConfigError: the first rule that is broken.
        """
        for one, verb, other, reason in _pairs(table):
            if what := self._broken(verb, one, other):
                raise ConfigError(f"{what}{reason and f': {reason}'}; {_REMEDIES[verb]}")

    def _broken(self, verb: str, one: str, other: str) -> str:
        """Returns how settings break a rule, empty if they do not."""
        together, options = one.split("+"), other.split("/")
        if verb in ("within", "divides"):
            factors, high = together.pop().split("*"), self._values.get(other)
            numbers: list[Any] = [int(n) if n.isdigit() else self._values.get(n) for n in factors]
            if high is None or None in numbers or not all(map(self._holds, together)):
                return ""
            text = " x ".join(n if n.isdigit() else self._text(n) for n in factors)
            if verb == "within":
                return f"{text} is above {self._text(other)}" if numbers[0] > high else ""
            least = math.prod(numbers)
            text += f" = {least}" * (len(factors) > 1)
            return f"{self._text(other)} is not a multiple of {text}" if high % least else ""
        is_met = any(self._holds(option, verb == "needs") for option in options)
        if is_met == (verb == "needs") or not all(map(self._holds, together)):
            return ""
        what = " with ".join(map(self._text, together))
        if verb == "needs":
            return f"{what}{self._present(options[0])} needs {self._wanted(options)}"
        return f"{what} and {self._text(other)} exclude each other"

    def _holds(self, term: str, unknown: bool = False) -> bool:
        name, sign, given = _parts(term)
        if name not in self._values:
            return unknown
        value, spec = self._values[name], self._specs[name]
        if sign == ">":
            return value is not None and value > float(given)
        if not sign:
            return value not in (None, spec.default)
        values = value if isinstance(value, tuple) else (value,)
        return not {str(one) for one in values}.isdisjoint(given.split(","))

    def _text(self, term: str) -> str:
        return str(getattr(self, _parts(term)[0]))

    def _present(self, term: str) -> str:
        """Returns the value that will not do, if there is any."""
        name = _parts(term)[0]
        is_absent = self._values[name] is None or self._specs[name].is_switch
        return "" if is_absent else f" with {self._text(term)}"

    def _wanted(self, terms: list[str]) -> str:
        texts = []
        for name, sign, given in map(_parts, terms):
            spec, above = self._specs[name], "above " * (sign == ">")
            has_value = sign and not spec.is_switch
            values = f" {above}{given.replace(',', ', ')}" if has_value else ""
            texts.append(f"{spec.name}{values}")
        return " or ".join(texts)


@functools.cache
def _pairs(table: str) -> list[tuple[str, str, str, str]]:
    """Reads a table: setting, verb, other setting and reason."""
    found = []
    for line in table.replace("\n    ", " ").splitlines():
        rule, _, reason = line.partition(" | ")
        left, verb, right = _VERB.split(rule)
        pairs = itertools.product(left.split(), right.split())
        found += [(one, verb, other, reason) for one, other in pairs]
    return found


@functools.cache
def _parts(term: str) -> tuple[str, str, str]:
    """Takes a term apart: setting, ``=`` or ``>``, values."""
    found = _TERM.fullmatch(term)
    assert found is not None, f"{term} is no term of a rule"
    return found[1], found[2] or "", found[3] or ""
