"""Runs a forward and a backward of a rank in turns: one computes while the other communicates.

An action has a lane, which is a thread. One lane at a time computes. It begins an exchange of
tokens, lets the other lane go on, and waits for the rest of the exchange when its turn is back::

    lane 0   F [attention]~~~~~~~~~ [expert]~~~~~~~~~~ [attention]      [..] computes
    lane 1                [expert B]~~~~~~~~ [attention B]~~~~~~        ~~~~ communicates

Where the other lane is empty, what starts in it is a decision as every other: an action of another
kind, a weight gradient, which fills the exchange and ends, or nothing.

Turns change at exchanges and at ends of actions alone, never by time. So all members of a decision
group issue all collectives, those of one action and those of the other, in one order, and both
actions may share their communicators. That cannot deadlock: whatever a lane waits for is an
exchange that every member began at the same place of that order, with nothing before it that waits
for anything later.

A device needs nothing else: the process group runs an exchange on a stream of its own, the other
lane's kernels are launched meanwhile, and the wait puts no more than the kernels after it off.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive.schedule.action import Action, ActionKind

_JOIN_S = 30.0


class _Abandoned(Exception):  # noqa: N818 - ends a lane, whose step failed elsewhere
    """Unwinds an action whose step has failed in the other lane."""


class Lanes:
    """The two lanes of a step; the calling thread is the first of them.

    Args:
        decide: returns what starts now; given whether an action under way goes on otherwise.
        perform: runs an action, which was noted as started, to its end.
        await_arrival: blocks until there may be something to start.

    Attributes:
        away_ns: of actions that handed their turn over, how long others had it.
    """

    def __init__(
        self,
        decide: Callable[[bool], Action | None],
        perform: Callable[[Action], None],
        await_arrival: Callable[[], None],
    ) -> None:
        self._decide = decide
        self._perform = perform
        self._await_arrival = await_arrival
        self.away_ns: dict[Action, int] = {}
        self._turn = 0
        self._lanes: list[Action | None] = [None, None]
        self._communicates = [False, False]
        self._turns = (threading.Semaphore(0), threading.Semaphore(0))
        self._next: Action | None = None  # what the second lane is to start
        self._error: BaseException | None = None

    def run(self, is_done: Callable[[], bool]) -> None:
        """Runs actions until the step is done; exchanges within them hand the turn over.

        Raises:
            Exception: what an action of either lane raised.
        """
        second = threading.Thread(target=self._second, args=(_stream(),), name="lane", daemon=True)
        second.start()
        try:
            with self._watching_exchanges():
                while not is_done():
                    waits = self._communicates[1]
                    action = self._decide(waits)
                    if action is not None:
                        self._run_here(action)
                    elif not waits:
                        self._await_arrival()
                    if waits and (action is None or action.kind is ActionKind.W):
                        self._hand_turn_to(1)
        except BaseException:
            self._error = self._error or _Abandoned()
            raise
        finally:
            self._turns[1].release(2)  # once for an action that is abandoned, once for the end
            second.join(_JOIN_S)

    def hand_over(self) -> None:
        """Lets others compute while the action whose turn it is communicates; back at its turn."""
        own, since_ns = self._turn, time.monotonic_ns()
        self._communicates[own] = True
        if own or self._communicates[1]:
            self._hand_turn_to(1 - own)
        elif (action := self._decide(True)) is not None:
            if action.kind is ActionKind.W:
                self._perform(action)
            else:
                self._next = action
                self._hand_turn_to(1)
        self._communicates[own] = False
        of = self._lanes[own]
        assert of is not None
        self.away_ns[of] = self.away_ns.get(of, 0) + time.monotonic_ns() - since_ns

    def _run_here(self, action: Action) -> None:
        self._lanes[self._turn] = action
        self._perform(action)

    def _hand_turn_to(self, lane: int) -> None:
        self._turn = lane
        self._turns[lane].release()
        self._turns[1 - lane].acquire()
        if self._error is not None:
            raise self._error

    def _second(self, stream: Any) -> None:
        """Body of the second lane's thread: starts what the first one is given beside its own."""
        if stream is not None:
            torch.cuda.set_stream(stream)
        while True:
            self._turns[1].acquire()
            action, self._next = self._next, None
            if action is None:
                return
            try:
                self._run_here(action)
                # A weight gradient fills one exchange, then the turn goes back.
                while self._communicates[0] and action.kind is not ActionKind.W:
                    action = self._decide(True)
                    if action is None:
                        break
                    self._run_here(action)
            except BaseException as error:
                self._error = self._error or error
            self._turn = 0
            self._turns[0].release()

    @contextlib.contextmanager
    def _watching_exchanges(self) -> Iterator[None]:
        """Has every exchange of rows hand the turn over, forward and backward, while it lasts.

        Rows are what takes long; that of a number per row follows at once.
        """
        plain = dist.all_to_all_single

        def exchange(
            output: torch.Tensor,
            input: torch.Tensor,
            output_split_sizes: Any = None,
            input_split_sizes: Any = None,
            group: Any = None,
            async_op: bool = False,
        ) -> Any:
            given = (output, input, output_split_sizes, input_split_sizes, group)
            if async_op or input.dim() < 2:
                return plain(*given, async_op)
            work = plain(*given, async_op=True)
            self.hand_over()
            if work is not None:  # of a group without this rank
                work.wait()
            return None

        dist.all_to_all_single = exchange
        try:
            yield
        finally:
            dist.all_to_all_single = plain


def _stream() -> Any:
    """Returns the calling thread's stream of kernels, ``None`` without a device."""
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None
