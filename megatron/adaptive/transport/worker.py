"""Runs jobs one at a time in a thread, so that a transport need not wait for a device."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

Job = Callable[[], None]


class Worker:
    """Runs jobs one at a time in a thread, and releases the memory of each finished job.

    Args:
        name: Name of the thread.
        failed: Function that the thread calls with the error of a failed job before it runs the
            next job.
        within: Function that returns a context manager, for example to select a device and a
            stream. The thread enters the context manager once, before the first job.
    """

    def __init__(
        self,
        name: str,
        failed: Callable[[Exception], None],
        within: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._failed = failed
        self._within = within
        self._added = 0
        self._done = 0
        self._moved = threading.Condition()
        self._is_given_up = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """Returns the number of jobs that have not finished yet."""
        return self._added - self._done

    def do(self, job: Job) -> None:
        """Adds ``job`` to the queue. Must always be called from the same thread."""
        self._added += 1
        self._jobs.put(job)

    def flush(self, end_s: float) -> bool:
        """Waits until all jobs have finished, ``end_s`` has passed, or :meth:`give_up` is called.

        Args:
            end_s: Time at which to stop waiting, as a value of ``time.monotonic``.

        Returns:
            True if all jobs have finished.
        """
        with self._moved:
            self._moved.wait_for(
                lambda: self._is_given_up or self._done == self._added,
                max(0.0, end_s - time.monotonic()),
            )
            return self._done == self._added

    def give_up(self) -> None:
        """Ends all calls of :meth:`flush`, because the jobs may never finish. Thread-safe."""
        with self._moved:
            self._is_given_up = True
            self._moved.notify_all()

    def close(self, limit_s: float | None = None) -> bool:
        """Stops the thread after it has run the jobs that are in its queue.

        Args:
            limit_s: Maximum time in seconds to wait for the thread, or ``None`` for no limit.

        Returns:
            True if the thread has stopped, or False if the time limit was reached first.
        """
        self._jobs.put(None)
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with self._within():
                self._do_jobs(self._do)
        except Exception as error:
            # The context manager could not be entered, so jobs would have no device or stream. Skip
            # all jobs, so that no caller waits for them.
            self._failed(error)
            self._do_jobs(lambda job: None)

    def _do_jobs(self, do: Callable[[Job], None]) -> None:
        while (job := self._jobs.get()) is not None:
            do(job)
            # Release the memory of the job before the thread waits for the next job.
            del job
            with self._moved:
                self._done += 1
                self._moved.notify_all()

    def _do(self, job: Job) -> None:
        try:
            job()
        except Exception as error:
            self._failed(error)
