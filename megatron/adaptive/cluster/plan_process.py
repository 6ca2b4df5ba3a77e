"""Runs the planner of a job in a process of its own, so that a long search stops nothing.

It is started once, and loads what it needs while machines are still coming. An answer that comes
after its time limit is passed over.
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import signal
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.adaptive.cluster.job import say
from megatron.adaptive.cluster.layouts import WORTH_A_MORPH, Chooser, Offer, ParallelLayout
from megatron.adaptive.cluster.planning import Planning, ScriptPlanning
from megatron.adaptive.errors import AdaptiveError, ConfigError, SetupError
from megatron.adaptive.planner.measured_module import MeasuredModule

_FIRST_S = 180.0
"""Time limit of the first plan on a machine, which compiles the search."""
_SEARCH = 0.5
"""Part of the time limit that the search itself may take; the rest is for what comes with it."""


class PlannerChooser(Chooser):
    """Chooses layouts by the planner, and by a simpler rule where that has no answer in time.

    Layouts of a script are of all processes first, to measure its model, then those of its plan.
    To be closed.

    Args:
        paths: see ``planning.Planning``.
        arguments: of the trainer.
        within_s: time limit of a plan.
        unequal: see ``planning.Planning``.
        model: file of what was measured of a script's model, ``None`` for the trainer.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        arguments: Sequence[str],
        within_s: float,
        *,
        unequal: bool = False,
        model: Path | None = None,
    ) -> None:
        self._within_s = within_s
        self._model = model
        self._known: dict[tuple[object, ...], tuple[ParallelLayout | None, str]] = {}
        self._given = tuple(paths), tuple(arguments), unequal, model
        self._pool = multiprocessing.get_context("spawn").Pool(1, _begin)

    def check(self, machines: Path | None) -> str:
        """Checks the files, and that a plan is possible for all machines that may come. Blocks.

        Args:
            machines: file of machines, ``None`` where nodes come by themselves.

        Returns:
            Why this could not be said in time, empty if it could.

        Raises:
            ConfigError: a file breaks a rule, or no plan is possible.
        """
        try:
            self._ask(_FIRST_S, "check", machines)
        except SetupError as error:
            return str(error)
        return ""

    def close(self) -> None:
        """Ends the process. Idempotent."""
        self._pool.terminate()

    def _plan(self, offers: Sequence[Offer], within_s: float) -> tuple[ParallelLayout | None, str]:
        """Asks for a layout on the nodes that are there. Blocks up to the limit.

        Returns:
            The layout and what is to be said of it, or ``None`` and why none fits.
        """
        try:
            layout: ParallelLayout = self._ask(within_s, "plan", offers, within_s * _SEARCH)
            if self._model is not None:
                return layout, ""
            unknown: str = self._ask(within_s, "unknown", offers)
        except ConfigError as error:
            return None, str(error)
        return layout, unknown and f"{unknown}: in no file of --plan-with"

    def _ask(self, within_s: float, name: str, *given: Any) -> Any:
        asked = self._pool.apply_async(_answer, (self._given, name, given))
        try:
            return asked.get(within_s)
        except multiprocessing.TimeoutError:
            raise SetupError(f"the planner did not answer within {within_s:g} s") from None
        except AdaptiveError as error:
            raise ConfigError(str(error)) from None
        except Exception as error:  # a bug: printed with its traceback, and the job goes on
            traceback.print_exc()
            raise SetupError(f"the planner failed: {error!r}") from None

    async def choose(
        self, arguments: Sequence[str], offers: Sequence[Offer]
    ) -> ParallelLayout | None:
        key, limit_s = tuple[object, ...](offers), self._within_s
        if self._model is not None:
            module = MeasuredModule.read(self._model)
            if module is None:
                count = sum(one.slots for one in offers)
                whole = ParallelLayout(
                    tensor=1, pipeline=count, data=1, partition=(), micro_batch=0, flags=()
                )
                return whole if count else None
            key = (module.signature, module.micro_batch_size, *offers)
            limit_s = limit_s if self._known else max(_FIRST_S, limit_s)
        if key not in self._known:
            try:
                found = await asyncio.to_thread(self._plan, offers, limit_s)
            except SetupError as error:
                if self._model is None:
                    say(f"warning: no plan: {error}; the layout is chosen without it")
                    self.why = ""
                    return await super().choose(arguments, offers)
                say(f"warning: no plan: {error}; the busiest stage alone decides")
                try:
                    found = ScriptPlanning(self._model).plan(offers, timed=False), ""
                except ConfigError as refused:
                    found = None, str(refused)
            self._known[key] = found
            if found[0] is not None and found[1]:
                say(f"warning: left out: {found[1]}")
        layout, text = self._known[key]
        self.why = "" if layout is not None else text
        return layout

    def is_better(self, layout: ParallelLayout, running: ParallelLayout) -> bool:
        if self._model is None:
            return super().is_better(layout, running)
        if running.is_to_be_measured or layout.is_to_be_measured:
            return False
        if layout.world_size != running.world_size:
            return layout.world_size > running.world_size
        if layout.step_s is None or running.step_s is None:
            return False
        return layout.step_s < (1 - WORTH_A_MORPH) * running.step_s


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at the terminal is not for the planner


@functools.cache
def _planning(
    paths: Sequence[Path], arguments: Sequence[str], unequal: bool, model: Path | None
) -> Planning | ScriptPlanning:
    if model is not None:
        return ScriptPlanning(model)
    return Planning(paths, arguments, unequal=unequal)


def _answer(of: tuple[Any, ...], name: str, given: Sequence[Any]) -> Any:
    """Answers a question, in the process of the planner."""
    return getattr(_planning(*of), name)(*given)
