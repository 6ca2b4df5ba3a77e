"""Ranks that train a small GPT in many shapes; started by ``torchrun`` from the tests.

Usage: ``worker.py CASES RESULTS``. All cases read the same tokens, ``DATA`` beside ``RESULTS``.
``CASES`` is a JSON list of objects::

    {"name": str, "flags": [str, ...], "steps": int, "evaluate_after": int, "after": str | null}

A case goes on from the checkpoint of the case named in ``after``, an earlier one, to iteration
``steps``. With ``"save": true`` it leaves a checkpoint itself, in a folder of its name. A case may
also have ``"moves": {iteration: [layers, ...]}``: the layers of each stage from after that
iteration on.

``RESULTS`` is written by rank 0 after every case: a JSON object of what each rank saw, by name::

    {"losses": [[float, ...] per rank], "grad_norms": [[float, ...] per rank],
     "params_norm": [[float] per rank], "evaluated": [[float] per rank],
     "orders": [[str, ...] per rank], "seconds": float}

The norm of the parameters and the validation loss are those after iteration ``evaluate_after``.

Losses are empty on ranks that do not hold the last stage, orders where megatron-core's own schedule
ran. Process groups are made anew for each case, but processes start only once: that is what takes
the time. A rank that finds something wrong raises, which ends the job.
"""

from __future__ import annotations

import dataclasses
import datetime
import faulthandler
import gc
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.adaptive import accelerator

accelerator.install()
accelerator.quiet_libraries()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder  # noqa: E402
from megatron.core.rerun_state_machine import (  # noqa: E402
    RerunMode,
    destroy_rerun_state_machine,
    initialize_rerun_state_machine,
)

from megatron.adaptive.checkpoint.training import Checkpoints, Progress  # noqa: E402
from megatron.adaptive.config.arguments import parse  # noqa: E402
from megatron.adaptive.config.environment import Environment  # noqa: E402
from megatron.adaptive.engine.build import gather_places  # noqa: E402
from megatron.adaptive.gpt.initialize import TrainingJob, seed_everything, set_up_mesh  # noqa: E402
from megatron.adaptive.gpt.setup import Run, build_run, make_loader  # noqa: E402
from megatron.adaptive.gpt.step import Step, params_norm  # noqa: E402
from megatron.adaptive.rebalance.move_layers import move_layers  # noqa: E402
from megatron.adaptive.trace.event import DRAWN_ACTIONS, KINDS, Row  # noqa: E402

VOCAB_SIZE = 256
TIMEOUT = datetime.timedelta(seconds=60)


def connect(environment: Environment) -> dist.Store:
    """Return the store that all ranks meet in, one for the whole job."""
    assert environment.master_port is not None
    return dist.TCPStore(
        environment.master_addr,
        environment.master_port,
        environment.world_size,
        # torchrun's agent already serves this port.
        is_master=False,
        timeout=TIMEOUT,
    )


def write_data(prefix: Path) -> None:
    """Write documents in which each token depends on the one before, so that a loss can fall."""
    rng = np.random.default_rng(7)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(64):
        steps = rng.integers(1, 4, size=int(rng.integers(20, 80)))
        tokens = np.append(np.cumsum(steps) % (VOCAB_SIZE - 1), VOCAB_SIZE - 1)
        builder.add_document(tokens.astype(np.uint16), [len(tokens)])
    builder.finalize(f"{prefix}.idx")


def start(
    store: dist.Store, number: int, flags: list[str], environment: Environment
) -> TrainingJob:
    """Do what ``initialize.start_job`` does, with process groups in a corner of ``store``."""
    config = parse(flags, world_size=environment.world_size, last_wins=True)
    device = accelerator.detect(environment.local_rank, backend="gloo")
    dist.init_process_group(
        device.backend,
        store=dist.PrefixStore(f"case-{number}", store),
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=TIMEOUT,
    )
    set_up_mesh(config)
    seed_everything(config.run.seed)
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    return TrainingJob(
        config=config,
        environment=environment,
        accelerator=device,
        control_group=group,
        stop_group=group,
        places=gather_places(),
    )


def end(job: TrainingJob, run: Run) -> None:
    """Take the case down, the process groups included."""
    if run.wiring is not None:
        run.wiring.close()
    dist.barrier(group=job.control_group)
    destroy_rerun_state_machine()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


class Orders:
    """Writes down the order in which a rank runs its actions; stands in for the trace."""

    is_recording = True

    def __init__(self) -> None:
        self.words: list[str] = []

    def extend(self, rows: Iterable[Row]) -> None:
        for kind, chunk, microbatch, *_ in rows:
            if KINDS[kind] in DRAWN_ACTIONS:
                self.words.append(f"{KINDS[kind]}{chunk}-{microbatch}")


def train(job: TrainingJob, run: Run, case: dict[str, Any]) -> dict[str, Any]:
    """Take the steps of a case; returns what this rank saw."""
    config = job.config
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    count = config.parallel.microbatches_of(pp_rank, config.num_microbatches)
    checkpoints = Checkpoints(run)
    progress = checkpoints.load() or Progress()
    done, consumed = progress.iteration, progress.consumed_train_samples
    orders = Orders()
    if run.wiring is not None:
        run.wiring.executor._recorder = orders  # type: ignore[assignment]
    step = Step(run)
    loader = make_loader(run, run.samples.train, consumed)
    losses, norms, sizes, evaluated, trained = [], [], [], [], []
    for iteration in range(done + 1, case["steps"] + 1):
        orders.words.clear()
        result = step.train(None if loader is None else loader.step(count), count, iteration)
        if not result.updated:
            raise RuntimeError(f"{case['name']}: iteration {iteration} did not update parameters")
        run.scheduler.step(increment=config.batch.global_batch_size)
        losses += result.losses.values()
        norms.append(result.grad_norm)
        trained = list(orders.words)
        if iteration == case["evaluate_after"]:
            sizes.append(params_norm(run))
            valid = make_loader(run, run.samples.valid, 0)
            evaluated += step.evaluate(valid, config.run.eval_iters, count).values()
        if (layers := case.get("moves", {}).get(str(iteration))) is not None:
            run = move_layers(run, layers)
            step = Step(run)
            checkpoints = Checkpoints(run)
    if config.checkpoint.save is not None:
        taken = (case["steps"] - done) * config.batch.global_batch_size
        checkpoints.save(
            dataclasses.replace(
                progress, iteration=case["steps"], consumed_train_samples=consumed + taken
            )
        )
    return {
        "losses": losses,
        "grad_norms": norms,
        "params_norm": sizes,
        "evaluated": evaluated,
        "orders": trained,
    }


def run_case(
    store: dist.Store, number: int, case: dict[str, Any], environment: Environment
) -> dict[str, Any]:
    """Run one case; returns its results by what was seen, then by rank."""
    started = time.monotonic()
    job = start(store, number, case["flags"], environment)
    run = build_run(job)
    seen = train(job, run, case)
    everyone: list[Any] = [None] * environment.world_size
    dist.all_gather_object(everyone, seen, group=job.control_group)
    end(job, run)
    # Cycles keep process groups, each with threads that wake up a hundred times a second.
    del job, run
    gc.collect()
    results: dict[str, Any] = {key: [one[key] for one in everyone] for key in seen}
    results["seconds"] = time.monotonic() - started
    return results


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    target = Path(sys.argv[2])
    torch.set_num_threads(1)
    environment = Environment.read()
    # A rank that hangs says where and ends, even if nobody is left to end it.
    faulthandler.dump_traceback_later(float(os.environ["WATCHDOG_S"]), exit=True)
    store = connect(environment)
    data = target.with_name("tokens")
    if environment.rank == 0:
        write_data(data)
        store.set("data", "written")
    store.wait(["data"])
    source = ["--data-path", str(data), "--data-cache-path", str(target.with_name("cache"))]
    source += ["--split", "80,20,0", "--distributed-timeout-minutes", "1"]
    results = {}
    followed = {case["after"] for case in cases}
    for number, case in enumerate(cases):
        if environment.rank == 0:
            print(f"case {case['name']}", flush=True)
        case["flags"] += source
        if case["after"] is not None:
            case["flags"] += ["--load", str(target.with_name(case["after"]))]
        if case["name"] in followed or case.get("save"):
            case["flags"] += ["--save", str(target.with_name(case["name"]))]
            case["flags"] += ["--save-interval", "1"]
        results[case["name"]] = run_case(store, number, case, environment)
        if environment.rank == 0:
            target.write_text(json.dumps(results))
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
