"""Selects the calls to recompute in the backward pass, instead of keeping their results in memory.

For a recomputed range of calls, only the inputs are kept until the backward pass::

    forward     inputs ──> call ─> call ─> call ──> outputs       results in between are freed
    backward    inputs ──> call ─> call ─> call ──> gradients     the same calls run again

Both runs draw the same random numbers, because the random generators are seeded before each call
that draws random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules.tape import Call, Tape

Recompute = Literal["all", "selective"] | Sequence[int] | None
"""Calls to recompute: ``all``, ``selective`` (only attention), indices of segments, or ``None``."""

_ATTENTION = frozenset(
    (
        F.scaled_dot_product_attention,
        F.multi_head_attention_forward,
        torch.ops.aten.scaled_dot_product_attention.default,
    )
)
_SOFTMAX = frozenset(
    (
        F.softmax,
        torch.softmax,
        torch.Tensor.softmax,
        torch.ops.aten.softmax.int,
        torch.ops.aten._softmax.default,
    )
)
_PRODUCTS = frozenset(
    (
        torch.matmul,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.bmm,
        torch.Tensor.bmm,
        torch.baddbmm,
        torch.einsum,
        torch.ops.aten.matmul.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
    )
)
# Functions whose names contain this text may change buffers, such as running means. The functions
# do not increase the buffer's version counter, so the recorder does not detect the change.
_CHANGES_SILENTLY = "norm"
# Maximum number of calls between the softmax of an attention and each of its two matmuls.
_NEAR = 12


def check_recompute(recompute: Any) -> None:
    """Checks that the setting ``recompute`` has a valid type and value.

    Raises:
        ConfigError: If the setting is not ``all``, ``selective``, ``None`` or a sequence of segment
            indices.
    """
    if recompute is None or recompute in ("all", "selective"):
        return
    if isinstance(recompute, str) or not all(
        type(index) is int and index >= 0 for index in recompute
    ):
        raise ConfigError(
            "recompute must be None, 'all', 'selective' or non-negative indices of segments, "
            f"got {recompute!r}"
        )


def recomputed_ranges(tape: Tape, recompute: Recompute) -> list[range]:
    """Returns the disjoint ranges of calls on ``tape`` that ``recompute`` selects, in order.

    Raises:
        ConfigError: If a segment does not exist or cannot be recomputed, or no attention is found.
    """
    if recompute is None:
        return []
    if recompute == "selective":
        ranges = _attention_ranges(tape)
        if not ranges:
            raise ConfigError(
                "recompute='selective' recomputes attention, but the model calls neither"
                " scaled_dot_product_attention nor a softmax between two matmuls;"
                " use 'all', or the indices of segments"
            )
        return [calls for calls in ranges if _outside_change(tape, calls) is None]
    count = tape.num_segments
    chosen = range(count) if recompute == "all" else sorted(set(map(int, recompute)))
    ranges = []
    for segment in chosen:
        if segment >= count:
            raise ConfigError(
                f"recompute contains segment {segment}, but the cut points make {count} "
                f"segments; use indices from 0 to {count - 1}"
            )
        numbers = [n for n, call in enumerate(tape.calls) if call.segment == segment]
        if not numbers:
            continue
        calls = range(numbers[0], numbers[-1] + 1)
        shape = _outside_change(tape, calls)
        if shape is not None:
            raise ConfigError(
                f"segment {segment} changes an input tensor of shape {list(shape)} in place, so "
                "it cannot be recomputed; use an out-of-place operation, or set recompute to the "
                "indices of other segments"
            )
        ranges.append(calls)
    return ranges


def _attention_ranges(tape: Tape) -> list[range]:
    """Returns the range of calls of each attention operation on ``tape``.

    Unless attention is a single call, the range starts with the matmul of Q and K and ends with the
    matmul with V.
    """
    ranges: list[range] = []
    for number, call in enumerate(tape.calls):
        calls = None
        if call.function in _ATTENTION:
            calls = range(number, number + 1)
        elif call.function in _SOFTMAX:
            first = _product_near(tape, range(number - 1, number - 1 - _NEAR, -1), call)
            last = _product_near(tape, range(number + 1, number + 1 + _NEAR), call)
            if first is not None and last is not None:
                calls = range(first, last + 1)
        if calls is not None and (not ranges or calls.start >= ranges[-1].stop):
            ranges.append(calls)
    return ranges


def _product_near(tape: Tape, numbers: range, softmax: Call) -> int | None:
    """Returns the first index in ``numbers`` whose call is a matmul, or ``None`` if there is none.

    ``numbers`` contains indices of calls on ``tape``. The search ends where the segment of the call
    ``softmax`` ends.
    """
    for number in numbers:
        if not 0 <= number < len(tape.calls) or tape.calls[number].segment != softmax.segment:
            return None
        if tape.calls[number].function in _PRODUCTS:
            return number
    return None


def _outside_change(tape: Tape, calls: range) -> tuple[int, ...] | None:
    """Returns the shape of a tensor that ``calls`` change in place but did not create.

    Returns ``None`` if there is no such tensor. Buffers are ignored, because the recomputation uses
    copies of changed buffers.
    """
    outside = {
        tape.values[read].storage
        for number in calls
        for read in tape.calls[number].reads
        if tape.values[read].made_by not in calls and tape.values[read].source != "buffer"
    }
    for number in calls:
        for old, _ in tape.calls[number].changes:
            value = tape.values[old]
            if value.source != "buffer" and value.storage in outside - {0}:
                return value.shape
    return None


def changed_buffers(tape: Tape) -> set[int]:
    """Returns the tape indices of the buffers that the forward pass may change."""
    changed = {tape.values[old].storage for call in tape.calls for old, _ in call.changes}
    silently = {
        read
        for call in tape.calls
        if _CHANGES_SILENTLY in str(call.function)
        for read in call.reads
    }
    return {
        number
        for number, value in enumerate(tape.values)
        if value.source == "buffer" and (value.storage in changed or number in silently)
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class RecomputedCalls:
    """Runs a range of calls, and recomputes them in the backward pass.

    Attributes:
        fixed: Tape indices of the parameters, inputs, constants and buffers that the calls read.
        copied: Tape indices of the buffers in ``fixed`` that the forward pass changes.
        inputs: Tape indices of the tensors that the calls read from earlier calls and stages.
        results: Tape indices of the results that later calls need.
        drops: Tape indices of the tensors that the calls read and that no later call needs.
    """

    fixed: tuple[int, ...]
    copied: tuple[int, ...]
    inputs: tuple[int, ...]
    results: tuple[int, ...]
    drops: tuple[int, ...]

    def run(
        self, env: dict[int, torch.Tensor], run_calls: Callable[[dict[int, torch.Tensor]], None]
    ) -> None:
        """Runs the calls on the tensors in ``env``, and stores the results in ``env``.

        Args:
            env: Tensors, keyed by their index on the tape.
            run_calls: Function that runs the calls on a dictionary of tensors, keyed by index, and
                adds the results to it.
        """
        fixed = {number: env[number] for number in self.fixed}
        copies = {number: env[number].clone() for number in self.copied}
        is_again = False

        def compute(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            nonlocal is_again
            local = {**fixed, **dict(zip(self.inputs, tensors, strict=True))}
            if is_again:
                # The second run must read the same buffer values as the first one, and must not
                # change the buffers again.
                local.update((number, copy.clone()) for number, copy in copies.items())
            is_again = True
            run_calls(local)
            return tuple(local[number] for number in self.results)

        tensors = [env[number] for number in self.inputs]
        for number in self.drops:
            del env[number]
        # The states of the random generators do not need to be saved, because the generators are
        # seeded before each call that draws random numbers.
        made = checkpoint(compute, *tensors, use_reentrant=False, preserve_rng_state=False)
        env.update(zip(self.results, made, strict=True))
