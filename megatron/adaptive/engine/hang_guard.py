"""Reports the activity of a rank to the hang detector (``trace/hang_watch.py``).

A thread writes the rank's activity to a file every second. When the process gets a signal,
``faulthandler`` writes the rank's stack traces, even while C code holds the GIL. The first rank of
a machine also starts the detector's process. Machines exchange the reports of their detectors
through the job's key-value store. The reporting threads of a machine's ranks take turns in
exchanging these reports, so that the exchange continues if one rank hangs. None of this delays a
step.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import linecache
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.adaptive.config.input_files import parse_json, read_whole, say
from megatron.adaptive.engine.process_context import Job, process_groups
from megatron.adaptive.trace import hang_watch
from megatron.adaptive.trace.status_files import NowFile
from megatron.adaptive.transport.liveness import describe

SIGNAL = signal.SIGRTMIN + 9
PERIOD_S = 1.0
_FIRST_ITERATIONS = 2
"""Number of iterations at the start in which a rank may compile kernels or connect to others."""
_GPU_MODULE = re.compile(r"torch\.(cuda|distributed\.distributed_c10d)(\.|$)")
_GPU_READ = re.compile(r"\.(item|tolist|cpu|synchronize)\(")
_STILL_S = 2.5
"""Time in seconds without progress after which a machine reads the reports of other machines."""


class HangGuard:
    """Reports this rank's activity to the hang detector of its machine, until :meth:`close`.

    The object must be created on all ranks of the job at the same point. It does nothing if
    ``after_s`` is 0, or if it cannot create a private folder.

    Args:
        job: Job of this process, with the rank of the process and the host and process of every
            rank.
        after_s: Time in seconds without progress after which the job is considered hanging
            (``--hang-after-s``). 0 turns the detector off; ``None`` derives the time from the
            duration of steps.
        on_hang: ``report`` to only report a hang, or ``end`` to also stop the job.
        page_folder: Folder for hang reports, or ``None`` for the system's temporary folder.

    Attributes:
        snapshot: Function that returns the rank's current activity, as a dictionary. The reporting
            thread calls it. The attribute can be set to another function at any time.
    """

    def __init__(
        self,
        job: Job,
        *,
        after_s: float | None,
        on_hang: str,
        page_folder: str | os.PathLike[str] | None,
    ) -> None:
        places = job.places
        rank = job.rank
        self.snapshot: Callable[[], Mapping[str, Any]] = dict
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._accelerator = job.accelerator
        machines = [str(entry["machine"]) for entry in places]
        self._machines = list(dict.fromkeys(machines))
        self._machine = self._machines.index(machines[rank])
        local = [peer for peer, machine in enumerate(machines) if machine == machines[rank]]
        self._turn = local.index(rank), len(local)
        # Index of the last iteration that the rank reported, and number of iterations reported so
        # far.
        self._iteration = 0
        self._num_iterations = 0
        self._store = dist.distributed_c10d._get_default_store()
        shared = Path("/dev/shm")
        base = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
        # All ranks of a machine derive the same folder name without communication. The name
        # contains a hash of the machine's name, because containers may share the host's /dev/shm,
        # but number their processes separately.
        digest = hashlib.sha256(machines[rank].encode()).hexdigest()[:12]
        prefix = f"megatron-adaptive-{os.geteuid()}-{digest}-"
        self._folder = base / f"{prefix}{places[local[0]]['pid']}"
        if after_s == 0 or len(places) < 2:
            return
        if rank == local[0]:
            # Remove folders that jobs left behind when they were killed.
            for former in base.glob(f"{prefix}*"):
                if not Path("/proc", former.name.removeprefix(prefix)).exists():
                    shutil.rmtree(former, ignore_errors=True)
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if self._folder.is_symlink() or self._folder.stat().st_uid != os.geteuid():
                return  # Do not use a folder that belongs to another user.
            self._stacks = (self._folder / f"stack_{rank}.txt").open("ab")
            if rank == local[0]:
                self._process = self._start(places, local, after_s, on_hang, page_folder)
        except OSError as error:
            say(f"warning: cannot start the hang detector: {error}")
            return
        faulthandler.register(SIGNAL, self._stacks, all_threads=True)
        self._file = NowFile(self._folder, rank)
        self._thread = threading.Thread(target=self._run, name="hang-guard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the reports of this rank. Safe to call more than once."""
        self._stop.set()
        thread = self._thread
        self._thread = None
        if thread is None:
            return
        thread.join(PERIOD_S)
        faulthandler.unregister(SIGNAL)
        self._stacks.close()
        self._file.end(self._read)
        if self._process is not None:  # Only the first rank of the machine started the process.
            self._process.kill()
            self._process.wait()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(
        self,
        places: Sequence[Mapping[str, Any]],
        local: Sequence[int],
        after_s: float | None,
        on_hang: str,
        page_folder: str | os.PathLike[str] | None,
    ) -> subprocess.Popen[bytes]:
        near = Path(sys.executable).with_name("py-spy")
        job = {
            "parent": os.getpid(),
            "pids": {rank: places[rank]["pid"] for rank in local},
            "names": {rank: describe(places, rank) for rank in range(len(places))},
            "after_s": after_s,
            "on_hang": on_hang,
            "page_folder": os.path.abspath(page_folder or tempfile.gettempdir()),
            "machine": self._machine,
            "machines": len(self._machines),
            "machine_of": {
                rank: self._machines.index(str(entry["machine"]))
                for rank, entry in enumerate(places)
            },
            "signal": int(SIGNAL),
            "py_spy": str(near) if near.exists() else shutil.which("py-spy"),
        }
        (self._folder / hang_watch.JOB_FILE).write_text(json.dumps(job))
        return subprocess.Popen(
            [sys.executable, "-I", "-S", hang_watch.__file__, str(self._folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", "")},
            # Start the detector in a separate session, so that a signal to the process group of the
            # rank does not end the detector. The detector must remove the folder after the rank has
            # exited.
            start_new_session=True,
        )

    def _run(self) -> None:
        self._accelerator.make_current()  # The snapshot queries the GPU for finished actions.
        store = None
        periods = 0
        while True:
            with contextlib.suppress(OSError):
                self._file.write(self._read())
            if self._stop.wait(PERIOD_S):
                return
            periods += 1
            if len(self._machines) < 2:
                continue
            turn, num_turns = self._turn
            if periods % num_turns == turn:
                with contextlib.suppress(RuntimeError, OSError):
                    store = store or self._connect()
                    self._carry(store)

    def _read(self) -> dict[str, Any]:
        try:
            fields = dict(self.snapshot())
        except Exception:  # This function may fail, for example while the run is being closed.
            fields = {}
        iteration = int(fields.get("iteration", 0))
        if iteration != self._iteration:
            self._iteration = iteration
            self._num_iterations += 1
        has_started = self._num_iterations > _FIRST_ITERATIONS
        spins = self._accelerator.is_cuda and has_started and _waits_for_gpu()
        return {**fields, "pid": os.getpid(), "collectives": _collectives(), "spins": spins}

    def _connect(self) -> Any:
        # Open a second connection to the store, because a waiting call on the job's connection
        # would block the calls of this thread.
        store = self._store.clone() if hasattr(self._store, "clone") else self._store
        return dist.PrefixStore("hang", store)

    def _carry(self, store: Any) -> None:
        """Writes the report of this machine to ``store``, for the detectors of other machines.

        If this machine makes no progress, also reads the reports of all other machines.
        """
        report = read_whole(self._folder / "machine.json")
        store.set(str(self._machine), report)
        if parse_json(report, strict=False)["still_s"] < _STILL_S:
            return
        for machine in range(len(self._machines)):
            if machine != self._machine and store.check([str(machine)]):
                path = self._folder / f"machine_{machine}.json"
                part = path.with_suffix(f".{os.getpid()}")
                part.write_bytes(store.get(str(machine)))
                part.replace(path)


def _collectives() -> dict[str, tuple[int, list[int]]]:
    """Returns the number of collectives that this rank has started in each process group.

    The keys are the names of the groups. Each value contains the number of collectives and the
    global ranks of the group.
    """
    collectives = {}
    for group in process_groups():
        # Skip a group that is being destroyed, or whose backend does not count collectives.
        with contextlib.suppress(Exception):
            members = dist.get_process_group_ranks(group)
            if len(members) > 1:
                number = group._get_sequence_number_for_group()
                collectives[group.group_name] = (number, members)
    return collectives


def _waits_for_gpu() -> bool:
    """Returns whether the main thread waits for its GPU or for a collective of GPUs.

    CUDA keeps a processor busy while it waits, so the processor time of a waiting rank does not
    show whether the rank makes progress. The main thread is considered waiting if it is inside
    torch's functions for CUDA and collectives, or in a line that reads a value from the GPU.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return False
    if _GPU_MODULE.match(frame.f_globals.get("__name__", "")):
        return True
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0)
    return _GPU_READ.search(line) is not None
