"""Runs jobs in order in a thread, for parts of a transport that wait for a device."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

Job = Callable[[], None]


class Worker:
    """Runs jobs in order in a thread and drops each one when it is done.

    Args:
        name: Name of the thread.
        failed: Callback for a job's error. The thread runs it and continues with the next job.
        within: Factory of the context for all jobs (device and stream). The thread enters it once.
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
        """Returns the number of jobs that are not done."""
        return self._added - self._done

    def do(self, job: Job) -> None:
        """Adds a job; only one thread may call it."""
        self._added += 1
        self._jobs.put(job)

    def flush(self, end_s: float) -> bool:
        """Waits until all jobs are done.

        Args:
            end_s: End of the wait, in seconds of ``time.monotonic``.

        Returns:
            Whether all jobs are done; False if the time passed or :meth:`give_up` was called.
        """
        with self._moved:
            self._moved.wait_for(
                lambda: self._is_given_up or self._done == self._added,
                max(0.0, end_s - time.monotonic()),
            )
            return self._done == self._added

    def give_up(self) -> None:
        """Ends every wait for the jobs, which may never be done; any thread may call it."""
        with self._moved:
            self._is_given_up = True
            self._moved.notify_all()

    def close(self, limit_s: float | None = None) -> bool:
        """Stops the thread after the jobs that it already has.

        Args:
            limit_s: Longest wait for the thread in seconds, ``None`` for no limit.

        Returns:
            Whether the thread has ended.
        """
        self._jobs.put(None)
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with self._within():
                self._do_jobs(self._do)
        except Exception as error:
            # There is no device or stream, so the jobs are dropped.
            self._failed(error)
            self._do_jobs(lambda job: None)

    def _do_jobs(self, do: Callable[[Job], None]) -> None:
        while (job := self._jobs.get()) is not None:
            do(job)
            # The job's memory must be free before the next wait.
            del job
            with self._moved:
                self._done += 1
                self._moved.notify_all()

    def _do(self, job: Job) -> None:
        try:
            job()
        except Exception as error:
            self._failed(error)
