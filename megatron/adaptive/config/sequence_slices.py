"""Cuts sequences into slices, the pieces in which ``--sequence-slices`` runs a microbatch.

Only the positions of the cuts are computed here. ``gpt/sequence_slices.py`` cuts tensors, and keeps
the keys and values that later slices of a sequence need.
"""

from __future__ import annotations

from megatron.adaptive.errors import ConfigError

LEAST_TOKENS = 16
"""Smallest number of tokens in a slice."""


def slice_ends(length: int, slices: int, multiple: int = 1) -> tuple[int, ...]:
    """Returns the ends of the slices of a sequence, whose lengths differ by ``multiple`` at most.

    Args:
        length: Number of tokens in the sequence.
        slices: Number of slices, at least 1.
        multiple: Number that divides the length of each slice, such as the number of
            tensor-parallel ranks among which each slice is divided.

    Returns:
        Position after the last token of each slice, ascending; the last one is ``length``.

    Raises:
        ConfigError: A slice would be too short, or the length is not a multiple of ``multiple``.
    """
    blocks, rest = divmod(length, multiple)
    if rest and slices > 1:
        raise ConfigError(
            f"--sequence-slices {slices} cuts sequences of {length} tokens at multiples of "
            f"{multiple} (tensor parallel ranks), which do not divide it: change --seq-length"
        )
    least = blocks // slices * multiple
    if slices > 1 and least < LEAST_TOKENS:
        most = max(1, length // (-(-LEAST_TOKENS // multiple) * multiple))
        raise ConfigError(
            f"--sequence-slices {slices} cuts sequences of {length} tokens into slices of {least}, "
            f"and a slice has at least {LEAST_TOKENS}: give {most} or fewer"
        )
    ends = [blocks * (index + 1) // slices * multiple for index in range(slices - 1)]
    return (*ends, length)
