"""Tests which attention kernel is selected, with a table of cases."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from megatron.adaptive.config.attention import (
    AttentionCase,
    Kernel,
    Mask,
    allows_cudnn,
    kernel_for,
    shares_keys,
)

# Each line describes a case and the kernel that is selected. The last word says whether query heads
# share keys, or whether the keys must be repeated.
TABLE = """\
                                                        => causal  shared
dtype=float16                                           => causal  shared
dtype=float32                                           => causal  repeated
dtype=float64                                           => scores  repeated
has_dropout=True                                        => causal  shared
capability=7                                            => scores  repeated
capability=7 dtype=float16                              => causal  repeated
capability=7 dtype=float32                              => causal  repeated
query_width=128 value_width=128                         => causal  shared
query_width=192 value_width=192                         => causal  repeated
query_width=192 value_width=128                         => causal  repeated
query_width=192 value_width=100                         => scores  repeated
query_width=20 value_width=20                           => causal  shared
query_width=20 value_width=20 dtype=float32             => scores  repeated
query_width=288 value_width=288                         => causal  repeated
mask=window                                             => packed  repeated
mask=window has_packed_kernel=False                     => masked  repeated
mask=window has_dropout=True                            => masked  repeated
mask=window dtype=float32                               => masked  repeated
mask=window capability=7 dtype=float16                  => masked  repeated
mask=window query_width=20 value_width=20 dtype=float32 => scores  repeated
mask=given                                              => masked  repeated
mask=given has_dropout=True                             => masked  repeated
mask=given query_width=20 value_width=20                => scores  repeated
is_packed=True                                          => packed  repeated
is_packed=True mask=window                              => packed  repeated
is_packed=True has_packed_kernel=False                  => causal  shared
is_packed=True has_dropout=True                         => causal  shared
is_packed=True dtype=float32                            => causal  repeated
is_packed=True query_width=192 value_width=128          => causal  repeated
is_packed=True query_width=20 value_width=20            => causal  shared
mask=window query_width=20 value_width=20               => scores  repeated
has_sinks=True                                          => scores  repeated
has_bound=True                                          => scores  repeated
has_bound=True backend=fused                            => scores  repeated
is_packed=True has_bound=True                           => scores  repeated
backend=fused                                           => causal  shared
backend=unfused                                         => scores  repeated
backend=local                                           => scores  repeated
device=xpu                                              => scores  repeated
device=cpu                                              => scores  repeated
device=cpu dtype=float32                                => scores  repeated
device=cpu backend=fused                                => causal  repeated
device=cpu backend=fused dtype=float32                  => causal  repeated
device=cpu backend=fused mask=window                    => masked  repeated
device=cpu backend=fused mask=given                     => masked  repeated
device=cpu backend=fused is_packed=True                 => causal  repeated
device=cpu backend=fused has_dropout=True               => scores  repeated
device=cpu backend=fused query_width=24 value_width=16  => scores  repeated
"""


def case_of(text: str) -> AttentionCase:
    values: dict[str, Any] = dict(word.split("=") for word in text.split())
    for name, value in values.items():
        if value.isdigit():
            values[name] = int(value)
        elif value in ("True", "False"):
            values[name] = value == "True"
    if "mask" in values:
        values["mask"] = Mask(values["mask"])
    return AttentionCase(**values)


@pytest.mark.parametrize("line", TABLE.splitlines(), ids=lambda line: " ".join(line.split()))
def test_kernel_of_a_case(line: str) -> None:
    text, _, expected = line.partition("=>")
    case = case_of(text)
    kernel, keys = expected.split()
    assert kernel_for(case) is Kernel(kernel)
    assert shares_keys(case) == (keys == "shared")


def test_what_one_asks_for_never_needs_more_than_the_default() -> None:
    """Checks that ``fused`` selects the default kernel, if there is one for the case."""
    for device, dtype, mask, is_packed, has_dropout in itertools.product(
        ("cuda", "cpu"), ("float32", "bfloat16"), Mask, (False, True), (False, True)
    ):
        case = AttentionCase(
            device=device, dtype=dtype, mask=mask, is_packed=is_packed, has_dropout=has_dropout
        )
        if kernel_for(case) is not Kernel.SCORES:
            assert kernel_for(replace(case, backend="fused")) is kernel_for(case)
        assert kernel_for(replace(case, backend="unfused")) is Kernel.SCORES


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"dropout": 0.1}, False),
        ({"has_mask": True}, False),
        ({"is_varied": True}, False),
        ({"is_threaded": True}, False),
    ],
)
def test_cudnn_is_used_only_where_its_faults_do_not_occur(
    changes: dict[str, Any], expected: bool
) -> None:
    usual = {"dropout": 0.0, "has_mask": False, "is_varied": False, "is_threaded": False}
    assert allows_cudnn(**{**usual, **changes}) is expected
