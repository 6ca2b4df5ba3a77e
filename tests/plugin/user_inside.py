"""Runs programs that have their own loop, with and without ``install()``, as a rank of
``torchrun``.

Usage: ``user_inside.py CASES RESULTS``. ``CASES`` is a JSON list of objects::

    {"program": name in user_callers.PROGRAMS or user_workers.WORKERS,
     "shape": {...} of user_callers.Program,
     "runs": {name: {"settings": {...} of install, "models": {model: {...} of install},
                     "shape": changes of the shape}, or null}}

Rank 0 writes the results of each rank, for each case and run, to ``RESULTS``.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import megatron.adaptive

megatron.adaptive.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import user_callers as callers  # noqa: E402
import user_workers as workers  # noqa: E402
from megatron.core import parallel_state  # noqa: E402

from megatron.adaptive.engine.process_context import destroy_groups, process_groups  # noqa: E402


def run(case: dict[str, Any], settings: dict[str, Any] | None) -> Any:
    """Runs the program of ``case`` once, and returns its results on this rank.

    If ``settings`` is not ``None``, the plugin is installed with these settings.
    """
    megatron.adaptive.uninstall()
    gc.collect()
    dist.barrier()
    parallel_state.destroy_model_parallel()
    destroy_groups(group for group in process_groups() if group is not dist.group.WORLD)
    settings_of_models: dict[str, Any] = {}
    if settings is not None:
        settings_of_models = settings.get("models", {})
        if "settings" in settings:
            megatron.adaptive.install(**settings["settings"])

    def prepare(models: dict[str, callers.Model]) -> None:
        for name, values in settings_of_models.items():
            megatron.adaptive.install(**values, model=models[name].chunks)

    shape = case.get("shape", {}) | (settings or {}).get("shape", {})
    programs = callers.PROGRAMS | workers.WORKERS
    return programs[case["program"]](callers.Program(**shape), prepare)


def main() -> None:
    # If a rank hangs, it prints its stack traces and exits, because there may be no other process
    # that stops it.
    faulthandler.dump_traceback_later(float(os.environ["WATCHDOG_S"]), exit=True)
    torch.set_num_threads(1)
    gc.freeze()
    dist.init_process_group("gloo")
    results = []
    for case in json.loads(Path(sys.argv[1]).read_text()):
        seen: dict[str, Any] = {}
        for name, settings in case["runs"].items():
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, run(case, settings))
            seen[name] = everyone
        results.append(seen)
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
