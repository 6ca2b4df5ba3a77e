"""Runs programs one after another, each as a fork of a process that has imported the package.

On a small machine, importing torch takes longer than the programs. The argument is a JSON list of
objects ``{"title": "", "variables": {NAME: VALUE}, "words": []}``: a line that is printed first,
environment variables, and a command. The command is a script, ``-m`` and a module, or ``-c`` and
code, followed by arguments. The process exits with the status of the first program that fails.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
from typing import Any

from megatron.adaptive import accelerator

accelerator.install()
accelerator.quiet_libraries()

from tests.multiprocess.forked_rank import share_gloo_device, shorten_mock_data  # noqa: E402


def import_all() -> None:
    """Imports the modules of all programs, and the modules that their first steps import."""
    from megatron.adaptive.cluster import rank_forkserver

    rank_forkserver._import()
    shorten_mock_data()
    share_gloo_device()
    gc.freeze()


def main() -> int:
    """Runs all programs, and returns the status of the first program that fails, or 0."""
    import_all()
    for program in json.loads(sys.argv[1]):
        print(program["title"], flush=True)
        pid = os.fork()
        if pid == 0:
            os._exit(run(program))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status:
            return abs(status)
    return 0


def run(program: dict[str, Any]) -> int:
    """Runs ``program`` in this process, and returns its exit status."""
    os.environ.update(program["variables"])
    arguments = program["words"]
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
