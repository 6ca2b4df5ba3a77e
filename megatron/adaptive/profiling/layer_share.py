"""Measures which share of a stage's forward its transformer layers take.

The first stage also looks tokens up, the last one computes the loss: what a layer takes there
cannot be told from the times of actions alone. Both are measured around the modules themselves, on
the clock of the device, in the first forwards after each :meth:`LayerShare.begin`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["LayerShare"]

_FORWARDS = 16


class LayerShare:
    """The share of layers in the forward of some chunks.

    Args:
        models: the model and its block of layers, by local chunk.
        clock: of the device.
    """

    def __init__(
        self, models: Mapping[int, tuple[torch.nn.Module, torch.nn.Module]], clock: Any
    ) -> None:
        self._clock = clock
        self._marks: dict[int, list[list[Any]]] = {chunk: [] for chunk in models}
        self._handles = []
        for chunk, (model, block) in models.items():
            for module in (model, block):
                self._handles += [
                    module.register_forward_pre_hook(self._entering(chunk, module is model)),
                    module.register_forward_hook(self._leaving(chunk)),
                ]

    def begin(self) -> None:
        """Measure anew."""
        for marks in self._marks.values():
            marks.clear()

    def share(self, chunk: int) -> float:
        """Median share of the layers in a forward, 1 for a chunk that is not measured.

        The device must have passed the forwards, as it has between two steps.
        """
        resolve = self._clock.resolve_ns
        shares = []
        for marks in self._marks.get(chunk, ()):
            if len(marks) == 4:
                begin, enter, leave, end = map(resolve, marks)
                shares.append((leave - enter) / max(1, end - begin))
        return statistics.median(shares) if shares else 1.0

    def close(self) -> None:
        """Leave the modules as they were."""
        for handle in self._handles:
            handle.remove()

    def _entering(self, chunk: int, is_model: bool) -> Any:
        def note(module: torch.nn.Module, _given: Any) -> None:
            marks = self._marks[chunk]
            if is_model and module.training and len(marks) <= _FORWARDS:
                marks.append([])
            if marks and len(marks) <= _FORWARDS:
                marks[-1].append(self._clock.mark())

        return note

    def _leaving(self, chunk: int) -> Any:
        def note(module: torch.nn.Module, _given: Any, _output: Any) -> None:
            marks = self._marks[chunk]
            if marks and len(marks) <= _FORWARDS:
                marks[-1].append(self._clock.mark())

        return note
