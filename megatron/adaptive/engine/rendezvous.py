"""Connects all ranks of a job to a shared key-value store, with a timeout.

torch itself would wait forever if another program listens on the port and does not reply, and would
retry for minutes if a host name cannot be resolved. Ranks that use different ports would wait for
each other forever.
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
"""Minimum timeout in seconds for a reply from the store.

On an idle machine, a store replies within milliseconds. If many ranks start on few processors, a
reply may take longer.
"""
_NAMED = 8
"""Maximum number of missing ranks that are listed in an error message."""
_ARRIVED = "arrived"
_COMPLETE = "complete"


class MeetingError(Exception):
    """Raised if ranks cannot connect. The message is a short reason.

    :func:`no_rendezvous` converts this error into an error message for users.
    """


class NotAStoreError(MeetingError):
    """Raised if the program that listens at the address is not a key-value store."""


def meet(environment: Environment, timeout: datetime.timedelta) -> Any:
    """Connects this rank to the key-value store that all ranks share, and returns the store.

    All ranks must call this function. A process without a launcher gets a separate store. If rank 0
    serves the store and ``MASTER_ADDR`` is an address of its machine, the store listens only at
    that address. torch itself would listen at all addresses and accept any client. The call blocks
    until all ranks are connected, for at most ``environment.meeting_s``.

    Args:
        environment: Settings of this rank, from environment variables.
        timeout: Maximum time for each later operation of the store that waits for other ranks.

    Raises:
        SetupError: The limit on open files is too low for this number of ranks.
        DistError, ValueError, MeetingError: The ranks cannot connect. :func:`no_rendezvous`
            converts these errors into an error message for users.
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
    # Each start of the ranks needs a different prefix, because a launcher may keep the store when
    # it restarts its ranks.
    store = dist.PrefixStore(f"start-{environment.restart_count}", store)
    _wait_for_all(dist.PrefixStore("meeting", store), environment, end_s)
    return store


def no_rendezvous(environment: Environment, error: Exception) -> Exception:
    """Returns an error that explains in one line why the ranks could not connect.

    The message contains the address from ``environment``. Returns ``error`` unchanged if it has a
    different cause.
    """
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    if isinstance(error, ValueError) and "rendezvous" not in reason:
        return error
    return TransportError(
        f"rank {environment.rank} cannot connect to the other ranks at "
        f"{environment.master_addr}:{environment.master_port} ({reason}); start the program with "
        "torchrun (with --standalone on one machine), or use another port"
    )


def within(
    limit_s: float, action: Callable[[], T], late: str, *, raises: type[MeetingError] = MeetingError
) -> T:
    """Calls ``action`` and returns its result, or raises an error after ``limit_s`` seconds.

    ``action`` runs in a separate thread, because it may never return.

    Args:
        limit_s: Timeout in seconds.
        action: Function to call. Its exceptions are raised in the calling thread.
        late: Error message to use if the timeout passes.
        raises: Class of the error to raise if the timeout passes.

    Raises:
        MeetingError: The timeout has passed. The thread that runs ``action`` continues until the
            process exits.
    """
    answers: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()

    def run() -> None:
        try:
            answers.put((action(), None))
        except BaseException as error:  # The waiting thread raises this error again.
            answers.put((None, error))

    threading.Thread(target=run, name="meeting", daemon=True).start()
    try:
        answer, failure = answers.get(timeout=max(0.0, limit_s))
    except queue.Empty:
        raise raises(late) from None
    if failure is not None:
        raise failure
    result: T = answer
    return result


def reach(host: str, port: int, end_s: float, *, only_look_up: bool = False) -> None:
    """Waits until a program listens at ``host`` and ``port``.

    Args:
        host: Name or address of the host.
        port: Port number.
        end_s: Deadline, as a value of ``time.monotonic``.
        only_look_up: Whether to wait only until the name of the host can be resolved.

    Raises:
        MeetingError: No program listened at the address by ``end_s``, or the name could not be
            resolved.
    """
    begin_s = time.monotonic()
    reason = ""

    def attempt() -> None:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        if not only_look_up:
            socket.create_connection((host, port), _CONNECT_S).close()

    while True:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise MeetingError(
                f"after {time.monotonic() - begin_s:.0f} s: {reason or 'no response'}"
            )
        try:
            within(left_s, attempt, reason or f"{host} was not resolved within {left_s:.0f} s")
            return
        except socket.gaierror as error:
            reason = f"the name cannot be resolved: {error.strerror}"
        except OSError as error:
            reason = f"nothing listens there: {error.strerror or error}"
        time.sleep(min(_AGAIN_S, max(0.0, left_s)))


def connect(host: str, port: int, end_s: float) -> Any:
    """Connects to the key-value store that another process serves at ``host`` and ``port``.

    Waits for a reply for half of the time that remains until ``end_s``, and at least for
    ``_ANSWER_S``.

    Raises:
        NotAStoreError: A program listens at the address, but does not reply like a store.
        MeetingError: No program listened at the address before ``end_s``, which is a value of
            ``time.monotonic``.
    """
    reach(host, port, end_s)
    limit_s = max(_ANSWER_S, (end_s - time.monotonic()) / 2)
    return within(
        limit_s,
        lambda: dist.TCPStore(
            host,
            port,
            is_master=False,
            timeout=datetime.timedelta(seconds=limit_s),
            wait_for_workers=False,
        ),
        f"a program listens at this address, but did not reply like a torch store within "
        f"{limit_s:.0f} s",
        raises=NotAStoreError,
    )


def _serve(environment: Environment, end_s: float) -> Any:
    address = environment.master_addr
    port = environment.master_port
    left_s = max(1.0, end_s - time.monotonic())
    if port is not None:
        # Ignore a wrong port here. It is reported later, when the ranks try to connect.
        with contextlib.suppress(OSError):
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
        left_s,
        lambda: next(dist.rendezvous("env://", timeout=wait))[0],
        "the ranks did not connect",
    )


def _join(environment: Environment, end_s: float) -> Any:
    if environment.master_port is None:
        raise ValueError("rendezvous: environment variable MASTER_PORT is not set")
    return connect(environment.master_addr, environment.master_port, end_s)


def _wait_for_all(store: Any, environment: Environment, end_s: float) -> None:
    """Waits until every rank of the job is connected to ``store``, at most until ``end_s``.

    Raises:
        MeetingError: The timeout has passed. The message lists the missing ranks.
    """
    begin_s = time.monotonic()
    size = environment.world_size
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
            f"{size - len(missing)} of {size} ranks connected within "
            f"{time.monotonic() - begin_s:.0f} s, but not rank {names}; use the same "
            "MASTER_ADDR and MASTER_PORT on all ranks, or raise MEGATRON_ADAPTIVE_MEETING_S if "
            "some ranks start late"
        )
