"""Adds up the times of a rank's layers in traced steps, for ``--trace-detail layers``.

Times are summed over the microbatches of a step, so a trace contains only a few numbers per layer
and step. For timelines, a trace also contains the start and end of each layer's first forward and
backward pass in a step. :mod:`~megatron.adaptive.engine.layer_meter` measures transformer layers of
megatron-core, and ``modules.segment_meter`` measures the segments of a ``Pipeline``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MOST_LAYERS = 64
"""Maximum number of measured layers per rank.

This limits the recorded times of a step to about 3 KB.
"""

MOST_DRAWN = 32
"""Maximum number of layers per rank whose first passes are stored with their start and end."""

FORWARD, BACKWARD = 0, 1


class LayerSums:
    """Adds up the times of this rank's layers in a step.

    All methods must be called from the same thread.

    Args:
        numbers: Index of each layer of this rank in the whole model.
        clock: Clock that records time marks on the device.

    Attributes:
        is_traced: Whether the current step is measured.
    """

    def __init__(self, numbers: Sequence[int], clock: Any) -> None:
        self.is_traced = False
        self._clock = clock
        self._numbers = list(numbers)
        # Each entry contains the position of a layer, the kind of pass, and the time marks at the
        # start and the end of the pass.
        self._marks: list[tuple[int, int, Any, Any]] = []
        self._first_passes: dict[tuple[int, int], tuple[int, int]] = {}

    def begin(self, *, is_traced: bool) -> None:
        """Begins a step, and measures the layers if ``is_traced`` is true.

        Args:
            is_traced: Whether to measure the step.
        """
        self.is_traced = is_traced
        self._marks = []

    def mark(self) -> Any:
        """Returns a time mark at the current point of the device's work, for use in :meth:`add`."""
        return self._clock.mark()

    def add(self, position: int, kind: int, start: Any, end: Any) -> None:
        """Records a forward or backward pass of a layer.

        Args:
            position: Position of the layer in ``numbers``.
            kind: Kind of pass, which is ``FORWARD`` or ``BACKWARD``.
            start: Time mark at the start of the pass.
            end: Time mark at the end of the pass.
        """
        self._marks.append((position, kind, start, end))

    def rows(self) -> list[tuple[int, int, int, int]]:
        """Ends a step, waits for the device, and returns the total times of each layer in the step.

        Returns:
            One row per layer: index of the layer in the model, total time of all forward passes in
            ns, total time of all backward passes in ns, and number of forward passes.
        """
        if self._marks:
            self._clock.wait(self._marks[-1][3])
        sums: dict[int, list[int]] = {}
        self._first_passes = {}
        for position, kind, start, end in self._marks:
            row = sums.setdefault(position, [0, 0, 0])
            start_ns = self._clock.resolve_ns(start)
            end_ns = self._clock.resolve_ns(end)
            self._first_passes.setdefault((position, kind), (start_ns, end_ns))
            row[kind] += end_ns - start_ns
            row[2] += kind == FORWARD
        self._marks = []
        self.is_traced = False
        return [
            (self._numbers[position], forward_ns, backward_ns, count)
            for position, (forward_ns, backward_ns, count) in sorted(sums.items())
        ]

    def passes(self) -> list[tuple[int, int, int, int]]:
        """Returns the first passes of each layer in the step that the last :meth:`rows` call ended.

        If the rank has more than ``MOST_DRAWN`` layers, only evenly spaced layers are returned.

        Returns:
            One row per pass: index of the layer in the model, kind of pass, start in ns, and end in
            ns.
        """
        every = max(1, -(-len(self._numbers) // MOST_DRAWN))
        return [
            (self._numbers[position], kind, start_ns, end_ns)
            for (position, kind), (start_ns, end_ns) in sorted(self._first_passes.items())
            if position % every == 0
        ]
