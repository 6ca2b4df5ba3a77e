"""Cuts sequences into slices, which are processed separately with ``--sequence-slices``.

Most of a layer's work grows with the number of tokens. The work of attention grows with the number
of pairs of tokens, because a token attends to all tokens before it. Let ``a`` be attention's
fraction of the cost of a whole sequence. Then, in a sequence of length 1, the part from ``x`` to
``y`` costs

    (1 - a) (y - x) + a (y^2 - x^2)

Therefore, slices of equal length cost more towards the end of the sequence, while slices of equal
cost become shorter::

    equal-length    |    |    |    |    |     4 slices
    equal-cost      |       |    |   |  |

A microbatch may be a row of several documents. A slice may end within a document, so a document may
extend over several slices, and a slice may contain several documents. The right side of the drawing
lists the slices of documents a, b and c::

    documents       |    a    | b |       c       |d| e |
    slices of T     |      |      |      |      |      |      a: 0, 1   b: 1, 2   c: 2, 3, 4

This module only computes the positions of the cuts. ``gpt/sequence_slices.py`` cuts tensors, and
keeps the keys and values that later slices of a sequence need.

Source: TeraPipe, arXiv 2102.07988, and Seq1F1B, arXiv 2406.03488, which cut sequences into slices
of equal cost in FLOPs.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from megatron.adaptive.errors import ConfigError

SliceCut = Literal["equal-cost", "equal-length"]
"""Method of cutting a sequence: into slices of equal cost, or into slices of equal length."""
SLICE_CUTS: tuple[SliceCut, ...] = get_args(SliceCut)

LEAST_TOKENS = 16
"""Minimum number of tokens in a slice."""
CHOSEN_SLICES = 0
"""Special number of slices that represents ``--sequence-slices auto``."""
CHOSEN_TOKENS = 0
"""Special number of tokens that represents ``--slice-tokens auto``."""
_MOST_CHOSEN = 32
_FIRST = 8


def cut_points(num_slices: int, attention_share: float) -> tuple[float, ...]:
    """Returns the positions at which a sequence of length 1 is cut into slices of equal cost.

    Args:
        num_slices: Number of slices. It must be at least 1.
        attention_share: Attention's fraction of the cost of the whole sequence. If it is 0, all
            slices have the same length.

    Returns:
        Positions from 0 to 1. Both ends of the sequence are included.
    """
    linear = 1 - attention_share
    parts = [number / num_slices for number in range(num_slices + 1)]
    if attention_share == 0:
        return tuple(parts)
    # Positive solution of linear x + share x^2 = part, in a form that is also accurate for small
    # shares.
    return tuple(
        2 * part / (linear + math.sqrt(linear * linear + 4 * attention_share * part))
        if part
        else 0.0
        for part in parts
    )


class DocumentPart(NamedTuple):
    """Part of a document that lies in a slice.

    All fields are positions in the row that contains the document.

    Attributes:
        begin: Position of the first token of the document.
        start: Position of the first token of the part.
        end: Position directly after the last token of the part.
        close: Position directly after the last token of the document.
    """

    begin: int
    start: int
    end: int
    close: int

    @property
    def is_whole(self) -> bool:
        """Whether the part is the whole document."""
        return self.start == self.begin and self.end == self.close


@dataclass(frozen=True)
class Cut:
    """Positions at which a microbatch is cut into slices.

    Attributes:
        ends: Position directly after the last token of each slice, in ascending order.
        documents: Position directly after the last token of each document in the row, in ascending
            order. Empty if the row is a single document.
    """

    ends: tuple[int, ...]
    documents: tuple[int, ...] = ()

    def bounds(self, index: int) -> tuple[int, int]:
        """Returns the start and end positions of the slice with index ``index``."""
        return (self.ends[index - 1] if index else 0), self.ends[index]

    def pieces(self, index: int) -> list[DocumentPart]:
        """Returns the parts of documents in the slice with index ``index``, in order."""
        start, end = self.bounds(index)
        closes = self.documents or self.ends[-1:]
        number = bisect.bisect_right(closes, start)
        begin = closes[number - 1] if number else 0
        pieces = []
        for close in itertools.islice(closes, number, None):
            pieces.append(DocumentPart(begin, max(begin, start), min(close, end), close))
            if close >= end:
                break
            begin = close
        return pieces

    def work(self, index: int) -> tuple[int, int]:
        """Returns the number of tokens and the number of attention pairs in slice ``index``.

        An attention pair is a token and a token to which it attends. The first x tokens of a
        document count as x^2 pairs.
        """
        parts = self.pieces(index)
        pairs = sum((p.end - p.begin) ** 2 - (p.start - p.begin) ** 2 for p in parts)
        return sum(part.end - part.start for part in parts), pairs

    def kept_tokens(self, index: int) -> int:
        """Returns how many tokens of the slice are in documents that extend over several slices."""
        parts = self.pieces(index)
        return sum(part.end - part.start for part in parts if not part.is_whole)


@dataclass(frozen=True, kw_only=True)
class SliceRule:
    """Determines where microbatches of different lengths are cut.

    Attributes:
        slices: Number of slices per microbatch. It is ignored if ``tokens`` is set.
        tokens: Number of tokens per slice, or ``None`` if each microbatch has ``slices`` slices.
        multiple: Required divisor of each slice's length.
        pair_cost: Cost of attention per pair of tokens, divided by the cost of all other work per
            token. A document of x tokens has x^2 pairs. If the value is 0, all slices have equal
            length.
        is_packed: Whether a microbatch is a single row of several documents.
        varies: Whether microbatches of a step may have different numbers of slices.
    """

    slices: int
    tokens: int | None = None
    multiple: int = 1
    pair_cost: float = 0.0
    is_packed: bool = False
    varies: bool = False

    def cut(self, width: int, documents: Sequence[int] = ()) -> Cut:
        """Returns the positions at which a microbatch is cut.

        The padding at the end of a packed row is divided into pieces of at most ``tokens`` tokens,
        which are treated as documents.

        Args:
            width: Number of tokens in a row of the microbatch, including padding.
            documents: Number of tokens in each document of the row, without padding. These numbers
                are only used if documents are packed.
        """
        closes = _closes(width, documents, self.tokens) if self.is_packed else ()
        if self.tokens is not None:
            return Cut(tuple(range(self.tokens, width + 1, self.tokens)), closes)
        borders = (0, *(closes or (width,)))
        lengths = [end - start for start, end in itertools.pairwise(borders)]
        points = _points_of_documents(lengths, self.slices, self.pair_cost)
        return Cut(_rounded(points, width, self.multiple), closes)

    def most_tokens(self, width: int, longest: int) -> int:
        """Returns an upper bound on the number of tokens in any slice.

        Args:
            width: Largest number of tokens in a row of any microbatch.
            longest: Largest number of tokens in any document.
        """
        if self.tokens is not None:
            return self.tokens
        # A slice costs the row's cost divided by ``slices``. A token costs at least 1, so a slice
        # has at most this number of tokens, apart from rounding.
        share = width * (1 + self.pair_cost * longest) / self.slices
        least = LEAST_TOKENS + 2 * self.multiple
        return min(width, max(least, math.ceil(share) + self.multiple))


def _closes(width: int, documents: Sequence[int], tokens: int | None) -> tuple[int, ...]:
    """Returns the end positions of documents, and of pieces of padding, in a packed row."""
    closes = list(itertools.accumulate(documents))
    while tokens is not None and closes[-1] // tokens < (width - 1) // tokens:
        closes.append((closes[-1] // tokens + 1) * tokens)
    return tuple(closes) if closes[-1] == width else (*closes, width)


def _points_of_documents(lengths: Sequence[int], num_slices: int, pair_cost: float) -> list[float]:
    """Returns the positions at which a row of documents is cut into slices of equal cost.

    The first ``x`` tokens of a document cost ``x + pair_cost x^2``.

    Args:
        lengths: Number of tokens in each document.
        num_slices: Number of slices. It must be at least 1.
        pair_cost: Cost of attention per pair of tokens, divided by the cost of all other work per
            token.
    """
    costs = [length + pair_cost * length * length for length in lengths]
    ends = list(itertools.accumulate(costs))
    begins = [0, *itertools.accumulate(lengths)]
    points = []
    for number in range(1, num_slices):
        target = ends[-1] * number / num_slices
        index = min(bisect.bisect_left(ends, target), len(costs) - 1)
        left = target - (ends[index] - costs[index])
        points.append(begins[index] + 2 * left / (1 + math.sqrt(1 + 4 * pair_cost * left)))
    return points


def _rounded(points: Sequence[float], length: int, multiple: int) -> tuple[int, ...]:
    """Rounds positions to multiples of ``multiple``, and enforces the minimum slice length.

    Each slice gets at least :data:`LEAST_TOKENS` tokens.
    """
    blocks = length // multiple
    # Minimum length of a slice in blocks of ``multiple`` tokens.
    least = -(-LEAST_TOKENS // multiple)
    slices = len(points) + 1
    ends = []
    before = 0
    for number, point in enumerate(points, 1):
        # These limits leave enough blocks for this slice and for all later slices.
        first, last = before + least, blocks - (slices - number) * least
        before = min(max(math.floor(point / multiple + 1e-9), first), last)
        ends.append(before * multiple)
    return (*ends, length)


def numbers_to_choose(length: int, multiple: int) -> tuple[int, ...]:
    """Returns the numbers of slices that ``--sequence-slices auto`` may choose, in ascending order.

    Args:
        length: Number of tokens in a sequence.
        multiple: Required divisor of each slice's length.
    """
    most = min(_MOST_CHOSEN, length // least_row(1, multiple))
    return tuple(2**exponent for exponent in range(max(1, most).bit_length()))


def first_number(length: int, multiple: int) -> int:
    """Returns the number of slices that ``--sequence-slices auto`` uses in the first steps.

    Half of this number is measured next. The arguments have the same meaning as in
    :func:`numbers_to_choose`.
    """
    return min(_FIRST, numbers_to_choose(length, multiple)[-1])


def tokens_to_choose(longest: int, multiple: int) -> tuple[int, ...]:
    """Returns the slice lengths that ``--slice-tokens auto`` may choose, longest first.

    The longest slices can hold the longest document. Each further length is half of the previous
    length.

    Args:
        longest: Largest number of tokens in a document.
        multiple: Required divisor of each slice's length.
    """
    least = least_row(1, multiple)
    parts = range(_MOST_CHOSEN.bit_length())
    lengths = {max(least, _up(-(-longest // 2**part), multiple)) for part in parts}
    return tuple(sorted(lengths, reverse=True))


def first_tokens(longest: int, multiple: int) -> int:
    """Returns the slice length that ``--slice-tokens auto`` uses in the first steps.

    The next longer length is measured afterwards. The arguments have the same meaning as in
    :func:`tokens_to_choose`.
    """
    lengths = tokens_to_choose(longest, multiple)
    return lengths[min(_FIRST.bit_length(), len(lengths)) - 1]


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def least_row(slices: int, multiple: int) -> int:
    """Returns the smallest number of tokens that can be cut into ``slices`` slices.

    Args:
        slices: Number of slices.
        multiple: Required divisor of each slice's length.
    """
    return slices * -(-LEAST_TOKENS // multiple) * multiple


def slice_ends(
    length: int, slices: int, multiple: int = 1, attention_share: float = 0.0
) -> tuple[int, ...]:
    """Returns the end position of each slice of a sequence.

    The slices have about the same cost. Their lengths are rounded to multiples of ``multiple``, and
    each slice has at least :data:`LEAST_TOKENS` tokens.

    Args:
        length: Number of tokens in the sequence.
        slices: Number of slices. It must be at least 1.
        multiple: Required divisor of each slice's length, such as the number of tensor-parallel
            ranks that share each slice.
        attention_share: Attention's fraction of the cost of the whole sequence. If it is 0, lengths
            differ by at most ``multiple``.

    Returns:
        Position directly after the last token of each slice, in ascending order. The last position
        is ``length``.

    Raises:
        ConfigError: A slice would be too short, or the length is not a multiple of ``multiple``.
    """
    blocks, rest = divmod(length, multiple)
    if rest and slices > 1:
        raise ConfigError(
            f"--sequence-slices {slices} requires a sequence length that is a multiple of "
            f"{multiple} (tensor parallel ranks), got {length}; change --seq-length"
        )
    shortest = blocks // slices * multiple
    # Minimum length of a slice in blocks of ``multiple`` tokens.
    least = -(-LEAST_TOKENS // multiple)
    if slices > 1 and shortest < LEAST_TOKENS:
        most = max(1, blocks // least)
        raise ConfigError(
            f"--sequence-slices {slices} cuts sequences of {length} tokens into slices of "
            f"{shortest}, but a slice needs at least {LEAST_TOKENS}; use {most} or fewer"
        )
    points = cut_points(slices, attention_share)[1:-1]
    return _rounded([point * blocks * multiple for point in points], length, multiple)
