"""Alternates between an F and a B of a rank, so that one computes while the other communicates.

There are two lanes. Each lane is a thread that runs one action. Only one lane computes at a time;
this lane has the turn. When its action exchanges tokens with other ranks, the lane starts the
exchange and passes the turn to the other lane. When the lane gets the turn back, it waits for the
rest of the exchange::

    lane 0   F [attention]~~~~~~~~~ [expert]~~~~~~~~~~ [attention]      [..] computes
    lane 1                [expert B]~~~~~~~~ [attention B]~~~~~~        ~~~~ communicates

If the other lane has no action, the policy chooses what starts there: an action of another kind, a
weight gradient, or nothing. A weight gradient finishes before the turn is passed back.

The turn is passed only at exchanges and at the end of actions, regardless of time. All members of a
decision group therefore start the collectives of both actions in the same order, and both actions
may use the same communicators. This cannot deadlock, because every member starts an exchange at the
same position of this order, and nothing before an exchange waits for anything after it.

GPUs use the same code. The process group runs an exchange on a separate stream, and the kernels of
the other lane are launched in the meantime. Waiting for the exchange only delays kernels that are
launched later.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive.schedule.action import Action, ActionKind

_JOIN_S = 30.0


class _Abandoned(Exception):  # noqa: N818 - ends a lane if the other one failed
    """Stops the action in one lane (thread) after the action in the other lane has failed."""


class Lanes:
    """Runs the actions of a step in two threads, called lanes.

    The calling thread is the first lane. Only the lane that has the turn computes.

    Args:
        decide: Function that returns the next action, or ``None`` if no action starts. Its argument
            states whether an action that is communicating can continue instead.
        perform: Function that runs a chosen action until it finishes.
        await_arrival: Function that blocks until another input has arrived.
        mark: Function that returns a time mark of the device.

    Attributes:
        away: Pairs of device time marks for each action: when its lane passed the turn to the other
            lane, and when it got the turn back.
    """

    def __init__(
        self,
        decide: Callable[[bool], Action | None],
        perform: Callable[[Action], None],
        await_arrival: Callable[[], None],
        mark: Callable[[], Any],
    ) -> None:
        self._decide = decide
        self._perform = perform
        self._await_arrival = await_arrival
        self._mark = mark
        self.away: dict[Action, list[tuple[Any, Any]]] = {}
        self._turn = 0
        self._lanes: list[Action | None] = [None, None]
        self._communicates = [False, False]
        self._turns = (threading.Semaphore(0), threading.Semaphore(0))
        self._next: Action | None = None  # The second lane starts this action next.
        self._error: BaseException | None = None

    def run(self, is_done: Callable[[], bool]) -> None:
        """Runs actions in both lanes until ``is_done`` returns True.

        When an action starts to exchange tokens, the other lane continues.

        Raises:
            Exception: Any exception that an action of either lane raised.
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
            # Release the semaphore twice: first to stop an unfinished action, then to stop the
            # thread.
            self._turns[1].release(2)
            second.join(_JOIN_S)

    def hand_over(self) -> None:
        """Lets another action compute while the current action communicates.

        Blocks until the current action may continue to compute.
        """
        lane = self._turn
        since = self._mark()
        self._communicates[lane] = True
        if lane or self._communicates[1]:
            self._hand_turn_to(1 - lane)
        elif (action := self._decide(True)) is not None:
            if action.kind is ActionKind.W:
                self._perform(action)
            else:
                self._next = action
                self._hand_turn_to(1)
        self._communicates[lane] = False
        communicating = self._lanes[lane]
        assert communicating is not None
        self.away.setdefault(communicating, []).append((since, self._mark()))

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
        """Runs actions in the thread of the second lane, on the CUDA stream ``stream``."""
        if stream is not None:
            torch.cuda.set_stream(stream)
        while True:
            self._turns[1].acquire()
            action = self._next
            self._next = None
            if action is None:
                return
            try:
                self._run_here(action)
                # Run at most one weight gradient during an exchange, then return to the first lane.
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
        """Replaces torch's all-to-all, so that the other lane computes during an exchange.

        The replacement is active while the context is open. Exchanges of one number per token do
        not switch lanes, because they do not take long.
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
            arguments = (output, input, output_split_sizes, input_split_sizes, group)
            if async_op or input.dim() < 2:
                return plain(*arguments, async_op)
            work = plain(*arguments, async_op=True)
            self.hand_over()
            if work is not None:  # ``work`` is None if this rank is not in the group.
                work.wait()
            return None

        dist.all_to_all_single = exchange
        try:
            yield
        finally:
            dist.all_to_all_single = plain


def _stream() -> Any:
    """Returns the calling thread's current CUDA stream, or ``None`` if CUDA is not in use."""
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None
