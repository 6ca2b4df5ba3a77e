"""Runs the user's program with and without the plugin's two lines, as a rank of ``torchrun``.

Usage: ``user_pretrain.py CASES RESULTS``. ``CASES`` is a JSON list of objects::

    {"shape": {...}, "steps": trained before evaluation,
     "runs": {name: settings of install, or null for megatron-core's own loop},
     "refused": {name: {"arguments": {...}, "again": bool, "fewer chunks": bool}},
     "from": folder of the checkpoint that all runs begin with; "plain" writes it,
     "fails_on": rank that fails in the last run, or null}

Settings may contain ``then``: the settings of a second run that continues from a checkpoint.

Rank 0 writes ``RESULTS``, with the results of each rank for each case and run, and the error line
of each rejected run. With ``again``, this is the error of a second step with new process groups.
With ``fewer chunks``, it is the error of a second step that passes only the first chunk. A run with
traces saves a checkpoint after its evaluation. When the interpreter exits, the plugin of the last
run is still installed.
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
import user_training as user  # noqa: E402
from megatron.core import parallel_state  # noqa: E402

from megatron.adaptive.engine.process_context import destroy_groups, process_groups  # noqa: E402
from megatron.adaptive.errors import ConfigError  # noqa: E402


def start(shape: user.Shape, settings: dict[str, Any] | None) -> user.Job:
    """Starts a new job, and installs the plugin with ``settings`` unless they are ``None``."""
    megatron.adaptive.uninstall()
    gc.collect()
    # Destroy the old process groups, because their threads wake up a hundred times per second.
    dist.barrier()
    destroy_groups(group for group in process_groups() if group is not dist.group.WORLD)
    if settings is not None:
        megatron.adaptive.install(**settings)
        # A second call with the same settings must have no effect.
        megatron.adaptive.install(**settings)
    return regroup(shape)


def regroup(shape: user.Shape) -> user.Job:
    """Creates new process groups, and a new model with the sizes in ``shape``."""
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    return user.setup(shape)


def run(case: dict[str, Any], settings: dict[str, Any] | None, name: str) -> Any:
    """Trains and evaluates the model of ``case`` with ``settings``, and returns the results."""
    settings = None if settings is None else dict(settings)
    then = [] if settings is None or "then" not in settings else [settings.pop("then")]
    overlaps = settings is not None and settings.pop("overlaps", False)
    shape = user.Shape(**case["shape"])
    job = start(shape, settings)
    # Enable this setting only for the plugin. megatron-core's schedule would need another
    # forward_step for it.
    job.config.overlap_moe_expert_parallel_comm = overlaps
    if "from" in case:
        (user.save if name == "plain" else user.load)(job, case["from"], with_optimizer=False)
    trained = user.train(job, case.get("steps", 3))
    if case.get("fails_on") == dist.get_rank():
        raise RuntimeError("the user's own error")
    evaluated = user.evaluate(job, 2)
    if settings is not None and (folder := settings.get("trace_dir")):
        user.save(job, f"{folder}-checkpoint", with_optimizer=False)
    for other in then:
        folder = f"{case['from']}-{name}"
        user.save(job, folder, with_optimizer=True)
        job = start(shape, other)
        user.load(job, folder, with_optimizer=True)
    return {
        "trained": trained,
        "evaluated": evaluated,
        "trained on": user.train(job, 1),
        "weights": user.weights_norm(job),
    }


def refused(shape: user.Shape, case: dict[str, Any]) -> str:
    """Runs a step that the plugin must reject, and returns the error message."""
    job = start(
        shape, {"schedule": case["schedules"][dist.get_rank()]} if "schedules" in case else {}
    )
    if case.get("again"):
        user.train(job, 1)
        job = regroup(shape)
    iterators, chunks = user.iterators(job, 1), job.chunks
    if case.get("fewer chunks"):
        user.train(job, 1)
        iterators, chunks = iterators[:1], chunks[:1]
    try:
        user.get_forward_backward_func()(
            forward_step_func=user.forward_step,
            data_iterator=iterators,
            model=chunks,
            num_microbatches=2,
            seq_length=user.SEQ_LENGTH,
            micro_batch_size=1,
            **case.get("arguments", {}),
        )
    except ConfigError as error:
        return str(error)
    return ""


def main() -> None:
    # If a rank hangs, it prints its stack traces and exits, because there may be no other process
    # that stops it.
    faulthandler.dump_traceback_later(float(os.environ["WATCHDOG_S"]), exit=True)
    torch.set_num_threads(1)
    gc.freeze()
    dist.init_process_group("gloo")
    results = []
    for case in json.loads(Path(sys.argv[1]).read_text()):
        shape = user.Shape(**case["shape"])
        lines = {name: refused(shape, changes) for name, changes in case.get("refused", {}).items()}
        seen: dict[str, Any] = {}
        for name, settings in case["runs"].items():
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, run(case, settings, name))
            seen[name] = everyone
        results.append({"runs": seen, "refused": lines})
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
