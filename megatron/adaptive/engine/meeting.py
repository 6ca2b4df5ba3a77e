"""Brings the ranks of a launcher together in a store, within a limited time.

torch itself waits without a limit for a program that listens at the port and says nothing, tries a
name that does not resolve for minutes, and lets ranks with another port wait for each other.
"""

from __future__ import annotations

import contextlib
import datetime
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from megatron.adaptive.config.environment import Environment, require_files
from megatron.adaptive.errors import TransportError
from megatron.adaptive.handshake import bind

T = TypeVar("T")
_AGAIN_S = 0.2
_LOOK_S = 0.02
_CONNECT_S = 5.0
_ANSWER_S = 10.0
"""A store that runs answers within milliseconds."""
_NAMED = 8
_ARRIVED, _COMPLETE = "arrived", "complete"


class MeetingError(Exception):
    """Says in a few words why ranks do not meet; :func:`no_rendezvous` makes the line of it."""


def meet(environment: Environment, timeout: datetime.timedelta) -> Any:
    """Returns the store in which the ranks of a launcher meet; of its own without one. Collective.

    Where rank 0 serves it, it listens at ``MASTER_ADDR`` alone, if that is an address of its own
    machine: torch itself would listen at all of them, and asks nobody who they are. Blocks until
    all ranks are there, ``environment.meeting_s`` at most.

    Args:
        environment: Variables of this rank.
        timeout: Limit of later waits for other ranks.

    Raises:
        SetupError: This process may not open as many files as a rank needs.
        DistError, ValueError, MeetingError: they do not meet; see :func:`no_rendezvous`.
    """
    if environment.world_size == 1 and not environment.is_launched:
        return dist.HashStore()
    require_files(environment.world_size)
    end_s = time.monotonic() + min(environment.meeting_s, timeout.total_seconds())
    if environment.rank == 0 and not environment.has_agent_store:
        store = _serve(environment, end_s)
    else:
        store = _join(environment, end_s)
    store.set_timeout(timeout)
    # A launcher may serve one store for all starts of its ranks.
    store = dist.PrefixStore(f"start-{environment.restart_count}", store)
    _wait_for_all(dist.PrefixStore("meeting", store), environment, end_s)
    return store


def no_rendezvous(environment: Environment, error: Exception) -> Exception:
    """Returns one line on a failure before the ranks were connected, or ``error``."""
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    if isinstance(error, ValueError) and "rendezvous" not in reason:
        return error
    return TransportError(
        f"rank {environment.rank} cannot meet the other ranks at {environment.master_addr}:"
        f"{environment.master_port} ({reason}): start the program with torchrun, with --standalone "
        "on one machine, or give another port"
    )


def within(limit_s: float, action: Callable[[], T], late: str) -> T:
    """Runs a call that may never return in a thread, and gives it up after a time.

    Args:
        limit_s: Time in seconds.
        action: The call; what it raises is raised here.
        late: Words of the error when the time is over.

    Raises:
        MeetingError: The time is over; the thread goes on and ends with the process.
    """
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((action(), None))
        except BaseException as error:  # raised where it is waited for
            answers.put((None, error))

    threading.Thread(target=run, name="meeting", daemon=True).start()
    try:
        answer, failure = answers.get(timeout=max(0.0, limit_s))
    except queue.Empty:
        raise MeetingError(late) from None
    if failure is not None:
        raise failure
    result: T = answer
    return result


def reach(host: str, port: int, end_s: float, *, only_look_up: bool = False) -> None:
    """Waits until somebody listens at an address.

    Args:
        host: Name or address.
        port: Port.
        end_s: End of the wait on the monotonic clock.
        only_look_up: Whether it is enough that the name resolves.

    Raises:
        MeetingError: Nobody listens there, or the name does not resolve, for all of the time.
    """
    begin_s, why = time.monotonic(), ""

    def attempt() -> None:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        if not only_look_up:
            socket.create_connection((host, port), _CONNECT_S).close()

    while True:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise MeetingError(f"after {time.monotonic() - begin_s:.0f} s: {why or 'no answer'}")
        try:
            within(left_s, attempt, why or f"{host} was not looked up within {left_s:.0f} s")
            return
        except socket.gaierror as error:
            why = f"the name does not resolve: {error.strerror}"
        except OSError as error:
            why = f"nobody listens there: {error.strerror or error}"
        time.sleep(min(_AGAIN_S, max(0.0, left_s)))


def connect(host: str, port: int, end_s: float) -> Any:
    """Returns a connection to the store that another process serves.

    Raises:
        MeetingError: There is none, or what listens there is no store.
    """
    reach(host, port, end_s)
    return within(
        _ANSWER_S,
        lambda: dist.TCPStore(
            host,
            port,
            is_master=False,
            timeout=datetime.timedelta(seconds=_ANSWER_S),
            wait_for_workers=False,
        ),
        f"what listens there gave no answer within {_ANSWER_S:.0f} s: it is no store of torch",
    )


def _serve(environment: Environment, end_s: float) -> Any:
    address, port = environment.master_addr, environment.master_port
    left_s = max(1.0, end_s - time.monotonic())
    if port is not None:
        with contextlib.suppress(OSError):  # the usual way says what is wrong with the port
            reach(address, port, end_s, only_look_up=True)
            listener = bind(address, port)
            return dist.TCPStore(
                address,
                port,
                environment.world_size,
                is_master=True,
                timeout=datetime.timedelta(seconds=left_s),
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=listener.detach(),
            )
    wait = datetime.timedelta(seconds=left_s)
    return within(
        left_s, lambda: next(dist.rendezvous("env://", timeout=wait))[0], "the ranks did not come"
    )


def _join(environment: Environment, end_s: float) -> Any:
    if environment.master_port is None:
        raise ValueError("rendezvous: environment variable MASTER_PORT is not set")
    return connect(environment.master_addr, environment.master_port, end_s)


def _wait_for_all(store: Any, environment: Environment, end_s: float) -> None:
    """Waits until every rank has come to the store; names those that have not."""
    begin_s, size = time.monotonic(), environment.world_size
    try:
        store.set(f"{environment.rank}", "")
        if store.add(_ARRIVED, 1) >= size:
            store.set(_COMPLETE, "")
        pause_s = _LOOK_S
        while not store.check([_COMPLETE]):
            if time.monotonic() > end_s:
                break
            time.sleep(pause_s)
            pause_s = min(1.0, 1.2 * pause_s)
        else:
            return
        missing = [rank for rank in range(size) if not store.check([f"{rank}"])]
    except RuntimeError as error:
        raise MeetingError(str(error).splitlines()[0]) from None
    if missing:
        names = ", ".join(map(str, missing[:_NAMED])) + (", ..." if len(missing) > _NAMED else "")
        raise MeetingError(
            f"{size - len(missing)} of {size} ranks came within {time.monotonic() - begin_s:.0f} s,"
            f" not rank {names}: the others may have another MASTER_ADDR or MASTER_PORT, or come"
            " later than MEGATRON_ADAPTIVE_MEETING_S allows"
        )
