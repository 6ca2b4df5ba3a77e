"""Keeps a rank's part of the watch for jobs that stand still; ``trace/hang_watch.py`` is the other
one.

Owns a thread that writes each second what the rank does, a signal on which ``faulthandler`` writes
its stacks (which works also where C code holds the interpreter's lock), and on the first rank of a
machine the process that watches. Between machines the words of those processes go through the job's
store, carried by the threads in turn, so that a rank that hangs is not needed. Nothing of it is in
the way of a step.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import os
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
_STILL_S = 2.5  # from here on a machine asks for the words of others


class HangGuard:
    """Lets the watch of this machine know what this rank does, until :meth:`close`.

    Every rank of the job makes one at the same point. It does nothing where ``after_s`` is 0, or
    where no private folder can be made.

    Args:
        job: this process within the job.
        after_s: as ``--hang-after-s`` has it.
        on_hang: ``report`` or ``end``.
        page_folder: where pages go, the folder of temporary files where ``None``.

    Attributes:
        snapshot: returns what the rank does, called from the thread; may be replaced at any time.
    """

    def __init__(
        self,
        job: Job,
        *,
        after_s: float | None,
        on_hang: str,
        page_folder: str | os.PathLike[str] | None,
    ) -> None:
        places, rank = job.places, job.rank
        self.snapshot: Callable[[], Mapping[str, Any]] = dict
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        machines = [str(place["machine"]) for place in places]
        self._machines = list(dict.fromkeys(machines))
        self._machine = self._machines.index(machines[rank])
        local = [peer for peer, one in enumerate(machines) if one == machines[rank]]
        self._turn = local.index(rank), len(local)
        self._store = dist.distributed_c10d._get_default_store()
        shared = Path("/dev/shm")
        base = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
        # All ranks of a machine find it without a word to each other. Containers may share the
        # memory of their host, but not the numbers of their processes.
        among = hashlib.sha256(machines[rank].encode()).hexdigest()[:12]
        mine = f"megatron-adaptive-{os.geteuid()}-{among}-"
        self._folder = base / f"{mine}{places[local[0]]['pid']}"
        if after_s == 0 or len(places) < 2:
            return
        if rank == local[0]:
            for former in base.glob(f"{mine}*"):  # of jobs that were killed
                if not Path("/proc", former.name.removeprefix(mine)).exists():
                    shutil.rmtree(former, ignore_errors=True)
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if self._folder.is_symlink() or self._folder.stat().st_uid != os.geteuid():
                return  # somebody else's
            self._stacks = (self._folder / f"stack_{rank}.txt").open("ab")
            if rank == local[0]:
                self._process = self._start(places, local, after_s, on_hang, page_folder)
        except OSError as error:
            say(f"warning: nobody watches for hangs: {error}")
            return
        faulthandler.register(SIGNAL, self._stacks, all_threads=True)
        self._file = NowFile(self._folder, rank)
        self._thread = threading.Thread(target=self._run, name="hang-guard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the watch of this rank; idempotent."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join(PERIOD_S)
        faulthandler.unregister(SIGNAL)
        self._stacks.close()
        self._file.end(self._read)
        if self._process is not None:  # the first rank ends it for all of its machine
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
                rank: self._machines.index(str(at["machine"])) for rank, at in enumerate(places)
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
            # This process removes the folder when the rank is gone, so it must survive a signal to
            # the rank's process group.
            start_new_session=True,
        )

    def _run(self) -> None:
        store, periods = None, 0
        while True:
            with contextlib.suppress(OSError):
                self._file.write(self._read())
            if self._stop.wait(PERIOD_S):
                return
            periods += 1
            if len(self._machines) < 2:
                continue
            turn, of = self._turn
            if periods % of == turn:
                with contextlib.suppress(RuntimeError, OSError):
                    store = store or self._connect()
                    self._carry(store)

    def _read(self) -> dict[str, Any]:
        try:
            fields = dict(self.snapshot())
        except Exception:  # the run is taken down, say
            fields = {}
        return {**fields, "pid": os.getpid(), "collectives": _collectives()}

    def _connect(self) -> Any:
        # A connection of its own: calls that wait on the job's would hold it up.
        store = self._store.clone() if hasattr(self._store, "clone") else self._store
        return dist.PrefixStore("hang", store)

    def _carry(self, store: Any) -> None:
        """Puts the word of this machine into the store, and takes those of others from it."""
        own = read_whole(self._folder / "machine.json")
        store.set(str(self._machine), own)
        if parse_json(own, strict=False)["still_s"] < _STILL_S:
            return
        for machine in range(len(self._machines)):
            if machine != self._machine and store.check([str(machine)]):
                path = self._folder / f"machine_{machine}.json"
                part = path.with_suffix(f".{os.getpid()}")
                part.write_bytes(store.get(str(machine)))
                part.replace(path)


def _collectives() -> dict[str, tuple[int, list[int]]]:
    """Returns of each group how many collectives this rank has begun, and its members."""
    found = {}
    for group in process_groups():
        with contextlib.suppress(Exception):  # no backend counts them, or the group is going away
            members = dist.get_process_group_ranks(group)
            if len(members) > 1:
                found[group.group_name] = (group._get_sequence_number_for_group(), members)
    return found
