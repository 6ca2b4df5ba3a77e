"""Describes a message, whatever carries it: label, shape, element type, sequence.

Owns the table of element types, whose codes are those of ``csrc/common/message.h``, and the words
that travel ahead of a payload over gloo. The native transports write the same facts into a struct
of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.adaptive.errors import TransportError
from megatron.adaptive.schedule.action import Action, ActionKind

HEADER_WORDS = 16
KINDS = (ActionKind.F, ActionKind.B)
"""Kinds of actions that take a message; the position is its code."""
KIND_CODE = {kind: code for code, kind in enumerate(KINDS)}
"""The way back."""

MAX_DIMENSIONS = 7
_MAGIC = 0x4D41_5031  # "MAP1"
_END = -1
_VARIANT_SHIFT = 8

# In the order of ElementType in message.h.
_PLAIN = (
    *("float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8"),
    *("bool", "complex64", "complex128"),
)
_FLOAT8 = len(_PLAIN)
# Types that travel as another one of the same size, 8-bit floats as bytes, and are viewed again by
# the receiver: their variant is never 0. No number may ever change its meaning; names that this
# torch does not have are left out.
_VARIANTS = {
    "float8_e4m3fn": (_FLOAT8, 1),
    "float8_e5m2": (_FLOAT8, 2),
    "float8_e4m3fnuz": (_FLOAT8, 3),
    "float8_e5m2fnuz": (_FLOAT8, 4),
    "float8_e8m0fnu": (_FLOAT8, 5),
    "float4_e2m1fn_x2": (_FLOAT8, 6),
    "uint16": (_PLAIN.index("int16"), 1),
    "uint32": (_PLAIN.index("int32"), 1),
    "uint64": (_PLAIN.index("int64"), 1),
    "complex32": (_PLAIN.index("int32"), 2),
}

CODE_OF: dict[torch.dtype, tuple[int, int]] = {
    getattr(torch, name): code
    for name, code in (
        *((name, (number, 0)) for number, name in enumerate(_PLAIN)),
        *_VARIANTS.items(),
    )
    if hasattr(torch, name)
}
"""Code and variant of every element type that can be sent."""

DTYPE_OF = {code: dtype for dtype, code in CODE_OF.items()}
"""The way back."""


def code_of(dtype: torch.dtype, dimensions: int = 0) -> tuple[int, int]:
    """Return code and variant of an element type.

    Raises:
        TransportError: no message can carry it, or that many dimensions.
    """
    code = CODE_OF.get(dtype)
    if code is None or dimensions > MAX_DIMENSIONS:
        raise TransportError(
            f"a payload of {dimensions} dimensions and {dtype} cannot be sent: at most "
            f"{MAX_DIMENSIONS} dimensions of {', '.join(map(str, CODE_OF))} can; reshape it, or "
            "view it as another type of the same size"
        )
    return code


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory holds its elements in order, itself where it is one."""
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


@dataclass(frozen=True, slots=True)
class Label:
    """The label of a message: the input of ``action`` in step ``step`` on the receiving rank."""

    step: int
    action: Action


@dataclass(frozen=True, slots=True)
class Header:
    """The words that travel ahead of a payload.

    Attributes:
        label: what the payload is; ``None`` says that the sender closes the channel.
        shape: shape of the payload.
        dtype: element type of the payload.
        sequence: number of the message on its channel, from 0.
    """

    label: Label | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    sequence: int

    def words(self) -> list[int]:
        """Return the header's 16 words.

        Raises:
            TransportError: the payload is of a type or has more dimensions than a header can say.
        """
        code, variant = code_of(self.dtype, len(self.shape))
        step, kind, chunk, microbatch = 0, _END, 0, 0
        if self.label is not None:
            step, action = self.label.step, self.label.action
            kind, chunk, microbatch = KIND_CODE[action.kind], action.chunk, action.microbatch
        words = [_MAGIC, self.sequence, step, kind, chunk, microbatch]
        words += [code | variant << _VARIANT_SHIFT, len(self.shape), *self.shape]
        return words + [0] * (HEADER_WORDS - len(words))

    @staticmethod
    def decode(words: Sequence[int], *, peer: int) -> Header:
        """Read a header that came from ``peer``; nothing in it is trusted.

        Raises:
            TransportError: a field is outside its range.
        """
        magic, sequence, step, kind, chunk, microbatch, code, dimensions = words[:8]
        variant, plain = divmod(code, 1 << _VARIANT_SHIFT)
        dtype = DTYPE_OF.get((plain, variant))
        sound = (
            magic == _MAGIC
            and kind in (_END, 0, 1)
            and dtype is not None
            and 0 <= dimensions <= MAX_DIMENSIONS
            and all(size >= 0 for size in words[8 : 8 + dimensions])
        )
        if not sound or dtype is None:
            raise TransportError(
                f"header {list(words)} from rank {peer} is not one of this format; "
                "do both ranks run the same version?"
            )
        label = None if kind == _END else Label(step, Action(KINDS[kind], chunk, microbatch))
        return Header(label, tuple(words[8 : 8 + dimensions]), dtype, sequence)
