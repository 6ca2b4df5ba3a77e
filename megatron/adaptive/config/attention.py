"""Chooses how the trainer's own layers compute attention: with scores in memory, or by a kernel.

Scores of all pairs of tokens take ``heads x length x length`` numbers for each layer and
microbatch. A kernel keeps its inputs, its output and one number for each token and head. The choice
depends on plain values only, so that the planner, which imports no torch, can predict the memory.

Supported by torch's kernels from torch 2.6 on ("8.0 on" is a compute capability):

=============  ====================  ===============  =========  =====  =======  ==============
kernel         types                 GPUs             widths     masks  dropout  grouped queries
=============  ====================  ===============  =========  =====  =======  ==============
flash          bf16, fp16            from 8.0 on      equal,     none   yes      yes
                                                      up to 256
efficient      fp32, fp16; bf16      all; bf16 from   multiples  any    yes      no
                                     8.0 on           of 8
packed         as flash, from torch 2.11 on           both       none   no       newer torch
CPU            fp32, bf16, fp16                       equal      any    no       no
=============  ====================  ===============  =========  =====  =======  ==============

Only the packed kernel supports windows and several documents in a row. Its widths must obey the
rules of both flash and efficient, because nothing pads them. No kernel supports attention sinks or
bounded scores.

Source: ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``, ``sdp_utils_cpp.cpp`` and
``torch/nn/attention/varlen.py`` of PyTorch.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

_HALF = ("bfloat16", "float16")
_WIDEST_FLASH = 256
_WIDEST_GROUPED = 128
"""Largest width at which every GPU has a flash backward; above it torch takes another kernel."""
_WIDTH_MULTIPLE = 8
_FLASH_CAPABILITY = 8


class Kernel(enum.Enum):
    """Names the ways in which attention is computed.

    Attributes:
        SCORES: No kernel; the scores of all pairs of tokens are stored until the backward.
        CAUSAL: Kernel that hides later tokens without a mask.
        MASKED: Kernel that takes a mask.
        PACKED: Kernel for rows of several documents, with or without a window.
    """

    SCORES = "scores"
    CAUSAL = "causal"
    MASKED = "masked"
    PACKED = "packed"


class Mask(enum.Enum):
    """Names the kinds of token sets that a token attends to.

    Attributes:
        CAUSAL: The token itself and all tokens before it.
        WINDOW: The token itself and a fixed number of tokens before it.
        GIVEN: Tokens that an explicit mask selects, for several documents in a row or for a part
            of a sequence.
    """

    CAUSAL = "causal"
    WINDOW = "window"
    GIVEN = "given"


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """Describes everything that the choice of a kernel depends on.

    Attributes:
        backend: Value of ``--attention-backend``.
        device: Type of the device, ``cuda`` or ``cpu``.
        dtype: Name of the queries' type, such as ``bfloat16``.
        mask: Tokens that each token attends to.
        is_packed: Whether a row consists of several documents, without a mask for them.
        query_width: Width of a head's queries and keys.
        value_width: Width of a head's values.
        has_dropout: Whether this forward drops probabilities.
        has_sinks: Whether the softmax of each row has an additional learned term (a sink).
        has_bound: Whether scores are bounded.
        capability: Major number of the GPU's compute capability.
        has_packed_kernel: Whether this torch has the packed kernel, with windows.
    """

    backend: str = "auto"
    device: str = "cuda"
    dtype: str = "bfloat16"
    mask: Mask = Mask.CAUSAL
    is_packed: bool = False
    query_width: int = 64
    value_width: int = 64
    has_dropout: bool = False
    has_sinks: bool = False
    has_bound: bool = False
    capability: int = _FLASH_CAPABILITY
    has_packed_kernel: bool = True


def kernel_for(case: AttentionCase) -> Kernel:
    """Chooses the way in which attention is computed.

    If rows are packed and the result is not ``PACKED``, the caller computes one document after
    another and chooses again for each.
    """
    if case.has_sinks or case.has_bound or case.backend in ("unfused", "local"):
        return Kernel.SCORES
    if case.dtype not in ("float32", *_HALF):
        return Kernel.SCORES
    if case.device == "cpu":
        # A CPU uses a kernel only on request: scores in memory give megatron-core's exact numbers.
        takes = case.backend == "fused" and case.query_width == case.value_width
        if case.has_dropout or not takes:
            return Kernel.SCORES
        return Kernel.CAUSAL if case.mask is Mask.CAUSAL else Kernel.MASKED
    if case.device != "cuda":
        return Kernel.SCORES
    is_flash = _takes_flash(case)
    is_efficient = _takes_efficient(case)
    has_rows = case.mask is Mask.WINDOW or (case.is_packed and case.mask is Mask.CAUSAL)
    takes_rows = case.has_packed_kernel and is_flash and _is_aligned(case)
    if has_rows and takes_rows and not case.has_dropout:
        return Kernel.PACKED
    if case.mask is Mask.CAUSAL:
        return Kernel.CAUSAL if is_flash or is_efficient else Kernel.SCORES
    return Kernel.MASKED if is_efficient else Kernel.SCORES


def shares_keys(case: AttentionCase) -> bool:
    """Returns whether several query heads can share a key head without copies of it."""
    is_causal = case.device == "cuda" and kernel_for(case) is Kernel.CAUSAL
    return is_causal and _takes_flash(case) and case.query_width <= _WIDEST_GROUPED


def _takes_flash(case: AttentionCase) -> bool:
    is_equal = case.query_width == case.value_width <= _WIDEST_FLASH
    return case.dtype in _HALF and case.capability >= _FLASH_CAPABILITY and is_equal


def _takes_efficient(case: AttentionCase) -> bool:
    is_old = case.capability < _FLASH_CAPABILITY
    return _is_aligned(case) and not (is_old and case.dtype == "bfloat16")


def _is_aligned(case: AttentionCase) -> bool:
    return case.query_width % _WIDTH_MULTIPLE == case.value_width % _WIDTH_MULTIPLE == 0
