"""Provides the hook that chooses the slice length, for ``--slice-tokens auto``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from megatron.adaptive.engine.stages import ForwardBackward
from megatron.adaptive.errors import DeviceMemoryError
from megatron.adaptive.rebalance.auto_slice_tokens import LengthTrial, LengthTuner
from megatron.adaptive.schedule.choose_slice_tokens import TokensChoice
from megatron.adaptive.training.hook import Hook

if TYPE_CHECKING:
    from megatron.adaptive.training.logging import TrainedStep
    from megatron.adaptive.training.loop import TrainingRun


class SliceLengths(Hook):
    """Measures the first steps with two slice lengths, and then uses the better length.

    This hook does nothing unless ``--pipeline-schedule`` is ``auto`` and ``--slice-tokens`` is set.
    If ``--slice-tokens`` is a number, only this slice length is measured, and the hook chooses only
    the placement of stages and the maximum number of microbatches whose activations are kept. All
    ranks make the same decisions. A decision takes effect before the next step.
    """

    def __init__(self, live: TrainingRun) -> None:
        self._live = live
        self._due: TokensChoice | None = None
        self._tuner: LengthTuner | None = None
        self._trials: list[LengthTrial] = []
        config = live.config
        is_auto = config.schedule.pipeline_schedule == "auto" and config.slice_tokens is not None
        # Slices only help if ranks wait for each other, which requires more than one rank.
        if is_auto and live.run.placement.num_ranks > 1 and not config.run.skip_train:
            self._tuner = self._make_tuner(None)

    def _make_tuner(self, before: list[LengthTrial] | None) -> LengthTuner:
        return LengthTuner(self._live.run, before, self._say)

    def _say(self, text: str) -> None:
        self._live.log.message(f"  {text}")

    def after_step(self, step: TrainedStep) -> None:
        times = self._live.step.times
        if self._tuner is None or times is None or step.load is None:
            return
        choice = self._tuner.after_step(times, step.load.lengths)
        if choice is not None:
            self._say(choice.text)
            self._trials, self._tuner = self._tuner.trials, None
            self._due = choice

    def before_step(self, iteration: int) -> None:
        due, self._due = self._due, None
        if due is None:
            return
        live, order = self._live, due.candidate
        kind = live.run.placement.kind if order is None else order.placement.kind
        is_same = kind == live.run.placement.kind
        trials, self._trials = self._trials, []
        is_as_long = due.tokens == live.config.slice_tokens
        if not (is_as_long and is_same):
            begin_s = time.perf_counter()
            try:
                live.rebuild(
                    iteration,
                    live.release,
                    kind=None if is_same else kind,
                    tokens=None if is_as_long else due.tokens,
                )
            except DeviceMemoryError as error:
                if not hasattr(live, "run"):
                    raise
                self._say(f"the slice length cannot be changed: {error}")
                return
            seconds = time.perf_counter() - begin_s
            live.log.report(recut=iteration, slice_tokens=due.tokens, seconds=seconds)
            where = "" if is_same else f", and stages are placed in a {kind}"
            self._say(f"slices now have {due.tokens} tokens{where}: rebuilt in {seconds:.2f} s")
        if order is None:
            self._tuner = self._make_tuner(trials)
            return
        engine = live.run.forward_backward
        assert isinstance(engine, ForwardBackward)
        engine.use(order)
