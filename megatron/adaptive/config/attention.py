"""Chooses how the trainer's own layers compute attention: with stored scores or a fused kernel.

Storing the attention scores of all pairs of tokens takes ``heads x length x length`` numbers per
layer and microbatch. A fused kernel keeps only its inputs, its output and one number per token and
head. The choice depends only on plain values, so the planner can make the same choice without
importing torch when it predicts memory use.

The table shows what the kernels of torch 2.6 and newer support. "8.0" is a CUDA compute capability:

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

Only the packed kernel supports sliding windows and rows of several documents. Unlike the others, it
does not pad head widths, so the widths must meet the conditions of both flash and efficient. No
kernel supports attention sinks or bounded scores (soft-capping).

On GPUs with compute capability 9 or 10, recent torch releases use cuDNN instead of the flash and
efficient kernels, where possible. cuDNN is faster if all calls have the same shape, but has three
faults. :func:`allows_cudnn` returns whether a run avoids them:

- Some of its kernels round the dropout rate to a multiple of 1/16. torch 2.11 does not check this
  (`pull request 174245 <https://github.com/pytorch/pytorch/pull/174245>`_).
- With a mask, gradients may be NaN (`issue 196678
  <https://github.com/pytorch/pytorch/issues/196678>`_).
- Each thread spends several hundred milliseconds on the first call with a new shape.

Source: ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``, ``sdp_utils_cpp.cpp`` and
``torch/nn/attention/varlen.py`` of PyTorch.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

_HALF = ("bfloat16", "float16")
_WIDEST_FLASH = 256
_WIDEST_GROUPED = 128
"""Largest head width for which the flash kernel has a backward pass on every GPU.

For wider heads, torch may use a different kernel, which does not support grouped queries.
"""
_WIDTH_MULTIPLE = 8
_FLASH_CAPABILITY = 8


class Kernel(enum.Enum):
    """Lists the methods of computing attention.

    Attributes:
        SCORES: No fused kernel. The scores of all pairs of tokens are kept until the backward pass.
        CAUSAL: Fused kernel that masks later tokens itself, without a mask tensor.
        MASKED: Fused kernel with a mask tensor.
        PACKED: Fused kernel for rows of several documents, with or without a sliding window.
    """

    SCORES = "scores"
    CAUSAL = "causal"
    MASKED = "masked"
    PACKED = "packed"


class Mask(enum.Enum):
    """Lists the sets of tokens that a token may attend to.

    Attributes:
        CAUSAL: The token itself and all earlier tokens.
        WINDOW: The token itself and a fixed number of tokens directly before it.
        GIVEN: Tokens that an explicit mask tensor selects. Such a mask is used if a row consists of
            several documents, or if a rank holds only a part of the sequence.
    """

    CAUSAL = "causal"
    WINDOW = "window"
    GIVEN = "given"


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """Properties of an attention call that determine which kernel is used.

    Attributes:
        backend: Value of ``--attention-backend``.
        device: Type of the device, ``cuda`` or ``cpu``.
        dtype: Name of the data type of the queries, such as ``bfloat16``.
        mask: Set of tokens that a token may attend to.
        is_packed: Whether a row consists of several documents, and no mask tensor separates them.
        query_width: Number of channels per head in queries and keys.
        value_width: Number of channels per head in values.
        has_dropout: Whether this forward pass applies dropout to the attention probabilities.
        has_sinks: Whether the softmax of each row has an additional learned term (a sink).
        has_bound: Whether a hyperbolic tangent bounds the scores (soft-capping).
        capability: Major version of the GPU's compute capability.
        has_packed_kernel: Whether the installed torch has the packed kernel, and supports sliding
            windows with it.
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
    """Chooses how to compute attention for a call with the properties ``case``.

    If ``case.is_packed`` is true but the result is not ``PACKED``, the caller must compute
    attention separately for each document, with the kernel that this function returns for a
    single document.
    """
    if case.has_sinks or case.has_bound or case.backend in ("unfused", "local"):
        return Kernel.SCORES
    if case.dtype not in ("float32", *_HALF):
        return Kernel.SCORES
    if case.device == "cpu":
        # Results on a CPU are exactly the same as in megatron-core only if the scores are stored.
        # Therefore, a fused kernel is used on a CPU only if the user requests it.
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


def allows_cudnn(*, dropout: float, has_mask: bool, is_varied: bool, is_threaded: bool) -> bool:
    """Returns whether torch may compute the attention of a run with cuDNN.

    Args:
        dropout: Dropout rate of the attention probabilities.
        has_mask: Whether attention may need a mask tensor, for example because a rank holds only
            a part of each sequence.
        is_varied: Whether the lengths of sequences or documents vary.
        is_threaded: Whether attention also runs in new threads in each step. In each new thread,
            the first call of cuDNN would take several hundred milliseconds.
    """
    return dropout == 0 and not (has_mask or is_varied or is_threaded)


def shares_keys(case: AttentionCase) -> bool:
    """Returns whether the kernel chosen for ``case`` supports grouped queries.

    If it does, keys and values need not be repeated for every query head.
    """
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
