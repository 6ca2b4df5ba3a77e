"""Measures the time of each ``Pipeline`` segment if ``trace_detail`` includes ``layers``.

A stage runs its segments one after another, and autograd runs their backward passes in reverse
order. Therefore, a timestamp at each border between two segments is enough to divide the time of a
pass among the segments::

    forward    | segment 4 | segment 5 | segment 6 |
    backward   | segment 6 | segment 5 | segment 4 |
                           ^ autograd is about to compute the first gradient in segment 5

The measured times do not include weight gradients that are computed in a separate action (``W``).
The time of recomputation counts as a part of the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from megatron.adaptive.engine.layer_times import BACKWARD, FORWARD, MOST_LAYERS, LayerSums
from megatron.adaptive.schedule.stage_placement import Placement


def segments_of(partition: Sequence[int], placement: Placement, pp_rank: int) -> list[int]:
    """Returns the indices of a rank's segments in the model, in ascending order.

    Args:
        partition: Number of segments in each stage.
        placement: Assignment of stages to ranks.
        pp_rank: Position of the rank in its pipeline.
    """
    stages = {placement.stage_of(pp_rank, chunk) for chunk in range(placement.num_chunks)}
    stage_of_segment = [stage for stage, size in enumerate(partition) for _ in range(size)]
    return [segment for segment, stage in enumerate(stage_of_segment) if stage in stages]


class SegmentMeter(LayerSums):
    """Measures the segments of this rank. All methods must be called from one thread.

    Args:
        segments: Indices of this rank's segments in the model. Only the first ``MOST_LAYERS``
            segments are measured.
        clock: Clock that takes timestamps on the device.
    """

    def __init__(self, segments: Sequence[int], clock: Any) -> None:
        super().__init__(segments[:MOST_LAYERS], clock)
        self._positions = {segment: index for index, segment in enumerate(self._numbers)}
        # Index of the running segment and timestamp of its start, for each kind of pass; ``None``
        # if no segment is running.
        self._forward: tuple[int, Any] | None = None
        self._backward: tuple[int, Any] | None = None

    def begin(self, *, is_traced: bool) -> None:
        super().begin(is_traced=is_traced)
        self._forward = self._backward = None

    def enters(self, segment: int | None) -> None:
        """Records that the forward pass enters a segment, or ends if ``segment`` is ``None``."""
        self._forward = self._passes(FORWARD, self._forward, segment)

    def watch(self, segment: int, tensors: Iterable[torch.Tensor]) -> None:
        """Registers hooks that record when the backward pass enters a segment.

        Args:
            segment: Index of the segment in the model.
            tensors: Results of the segment that later segments use.
        """

        def enters(_: torch.Tensor) -> None:
            # The backward pass of the segment starts when the first of several gradients is
            # computed.
            if self.is_traced and (self._backward is None or segment < self._backward[0]):
                self._backward = self._passes(BACKWARD, self._backward, segment)

        for tensor in tensors:
            if tensor.grad_fn is not None:
                tensor.register_hook(enters)

    def ends_backward(self) -> None:
        """Records the end of a stage's backward pass."""
        self._backward = self._passes(BACKWARD, self._backward, None)

    def _passes(
        self, kind: int, current: tuple[int, Any] | None, segment: int | None
    ) -> tuple[int, Any] | None:
        """Ends the measurement ``current``, and begins to measure ``segment``.

        ``kind`` is the kind of pass (forward or backward). Returns the new measurement, or ``None``
        if ``segment`` is ``None`` because the stage's pass has ended.
        """
        if current is None and segment is None:
            return None
        mark = self.mark()
        if current is not None and current[0] in self._positions:
            self.add(self._positions[current[0]], kind, current[1], mark)
        return None if segment is None else (segment, mark)
