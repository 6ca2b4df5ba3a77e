"""Trains a small GPT in jobs of many shapes. Tests start this program as ranks.

Usage: ``worker.py CASES RESULTS``. All cases read the same tokens from ``tokens`` in the folder of
``RESULTS``. ``CASES`` is the path of a JSON list of objects::

    {"name": str, "flags": [str, ...], "steps": int, "evaluate_after": int, "after": str | null}

A case continues from the checkpoint of the case ``after``, which must precede it in the list, up to
iteration ``steps``. If ``"save": true`` is set, the case saves a checkpoint in a folder with its
name. A case may also contain ``"moves": {iteration: [layers, ...]}``, the numbers of layers per
stage after the iteration. The key ``"variant"`` selects a different order of summation or an error
to add. See ``variants.py``.

After every case, rank 0 writes ``RESULTS``, a JSON object that maps the name of each case to the
results of all ranks::

    {"losses": [[float, ...] per rank], "grad_norms": [[float, ...] per rank],
     "layer_norms": [[{layer: float}, ...] per rank], "further": [[float, ...] per rank],
     "params_norm": [[float] per rank], "evaluated": [[float] per rank],
     "orders": [[str, ...] per rank], "shares": [[[int, ...] per replica, ...] per rank],
     "seconds": float}

The norm of the parameters and the validation loss are measured after iteration ``evaluate_after``.
``further`` contains the losses of multi-token prediction.

Losses are empty on ranks without the last stage. Orders are empty under megatron-core's own
schedule. Processes start only once, and consecutive cases share process groups if possible. A rank
that detects an error raises an exception, which stops the job.
"""

from __future__ import annotations

import dataclasses
import datetime
import faulthandler
import gc
import json
import os
import pickle
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

from megatron.adaptive.checkpoint.trainer_checkpoints import Checkpoints, Progress  # noqa: E402
from megatron.adaptive.config.arguments import parse  # noqa: E402
from megatron.adaptive.config.environment import Environment  # noqa: E402
from megatron.adaptive.config.trainer import TrainerConfig  # noqa: E402
from megatron.adaptive.engine.executor_setup import gather_places  # noqa: E402
from megatron.adaptive.engine.process_context import destroy_groups, process_groups  # noqa: E402
from megatron.adaptive.gpt.initialize import TrainingJob, seed_everything, set_up_mesh  # noqa: E402
from megatron.adaptive.gpt.setup import Run, build_run, make_loader  # noqa: E402
from megatron.adaptive.gpt.train_step import Step, params_norm  # noqa: E402
from megatron.adaptive.rebalance.microbatch_dealing import ReplicaDealing  # noqa: E402
from megatron.adaptive.rebalance.move_stages import move_stages, take_down  # noqa: E402
from megatron.adaptive.trace.trace_format import DRAWN_ACTIONS, KINDS, SpanRow  # noqa: E402
from tests.multiprocess.gradients import layer_norms, other_sums, plant  # noqa: E402
from tests.multiprocess.variants import PLANTED  # noqa: E402

VOCAB_SIZE = 256
TIMEOUT = datetime.timedelta(seconds=60)


def connect(environment: Environment) -> dist.Store:
    """Returns a client of the store that all ranks of the job in ``environment`` use."""
    assert environment.master_port is not None
    return dist.TCPStore(
        environment.master_addr,
        environment.master_port,
        environment.world_size,
        # The agent of torchrun already serves this port.
        is_master=False,
        timeout=TIMEOUT,
    )


def write_data(prefix: Path) -> None:
    """Writes documents in which tokens depend on previous tokens, so that losses can decrease.

    ``prefix`` is the path of the files without suffix.
    """
    rng = np.random.default_rng(7)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(64):
        steps = rng.integers(1, 4, size=int(rng.integers(20, 80)))
        tokens = np.append(np.cumsum(steps) % (VOCAB_SIZE - 1), VOCAB_SIZE - 1)
        builder.add_document(tokens.astype(np.uint16), [len(tokens)])
    builder.finalize(f"{prefix}.idx")


class Meshes:
    """Joins jobs, and keeps the process groups if the next case can use the same ones."""

    def __init__(self, store: dist.Store, environment: Environment) -> None:
        self._store = store
        self._environment = environment
        self._count = 0
        self._kept: tuple[object, list[Any], TrainingJob] | None = None

    def join(self, config: TrainerConfig) -> TrainingJob:
        """Joins a job with the settings ``config``, and returns the job.

        This method does the same as ``initialize.start_job``, but with a separate store prefix.
        """
        # Reference cycles keep the models and process groups of the previous case alive, so they
        # must be collected.
        gc.collect()
        mesh = mesh_of(config)
        if self._kept is not None and self._kept[0] != mesh:
            self._drop()
        if self._kept is None:
            self._kept = (mesh, *self._set_up(config))
        seed_everything(config.run.seed)
        initialize_rerun_state_machine(mode=RerunMode.DISABLED)
        return dataclasses.replace(self._kept[2], config=config)

    def _set_up(self, config: TrainerConfig) -> tuple[list[Any], TrainingJob]:
        environment = self._environment
        rank, size = environment.rank, environment.world_size
        self._count += 1
        store = dist.PrefixStore(f"mesh-{self._count}", self._store)
        device = accelerator.agree_on_sharing(
            accelerator.detect(environment.local_rank), store, rank=rank, world_size=size
        )
        dist.init_process_group(
            device.backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT
        )
        set_up_mesh(config)
        group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        job = TrainingJob(
            config=config,
            environment=environment,
            accelerator=device,
            control_group=group,
            stop_group=group,
            places=gather_places(),
        )
        return process_groups(), job

    def leave(self, job: TrainingJob, run: Run) -> None:
        """Finishes the case of ``run`` in ``job``, and destroys the groups that it created."""
        take_down(run)
        dist.barrier(group=job.control_group)
        destroy_rerun_state_machine()
        assert self._kept is not None
        _, kept, _ = self._kept
        there = process_groups()
        if all(group in there for group in kept):
            destroy_groups(group for group in there if group not in kept)
        else:  # If layers have moved in this case, the process groups have changed.
            self._drop()

    def _drop(self) -> None:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        self._kept = None
        # Previous models keep process groups alive, and each group has a thread that wakes up
        # often.
        gc.collect()


def mesh_of(config: TrainerConfig) -> tuple[object, ...]:
    """Returns the settings in ``config`` that determine the process groups."""
    parallel = config.parallel
    return (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size or 1,
        parallel.context_parallel_size,
        config.mtp_stage not in (None, config.num_stages - 1),
        config.model.untie_embeddings_and_output_weights,
        parallel.stage_data_parallel_sizes or (),
        parallel.expert_model_parallel_size,
        parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size,
        config.placement_kind,
    )


class Orders:
    """Stand-in for the trace recorder that lists the executed actions of a rank in order."""

    is_recording = True

    def __init__(self) -> None:
        self.words: list[str] = []

    def extend(self, rows: Iterable[SpanRow]) -> None:
        for kind, chunk, microbatch, *_ in rows:
            if KINDS[kind] in DRAWN_ACTIONS:
                self.words.append(f"{KINDS[kind]}{chunk}-{microbatch}")


def train(job: TrainingJob, run: Run, case: dict[str, Any]) -> tuple[dict[str, Any], Run]:
    """Takes the steps of ``case``, and returns the results of this rank and the final run."""
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
    dealing = None if config.balance == "off" else ReplicaDealing(run, print)
    loader = make_loader(run, run.samples.train, consumed)
    losses, further, norms, sizes, evaluated, trained = [], [], [], [], [], []  # type: ignore[var-annotated]
    shares: list[Any] = []
    layers: list[dict[str, float]] = []

    def keep_layer_norms() -> None:
        layers.append(layer_norms(run))

    if case.get("variant") in PLANTED:
        plant(run, case["variant"])
    for iteration in range(done + 1, case["steps"] + 1):
        orders.words.clear()
        if dealing is None:
            microbatches = None if loader is None else loader.step(count)
            result = step.train(microbatches, count, iteration, keep_layer_norms)
        else:
            microbatches, dealt = dealing.take(loader, count, iteration)
            shares.append(dealing.shares)
            result = step.train(
                microbatches, len(dealt.numbers), iteration, keep_layer_norms, dealt
            )
            assert step.times is not None
            dealing.after_step(step.times)
        if not result.updated:
            raise RuntimeError(
                f"{case['name']}: iteration {iteration} did not update the parameters"
            )
        run.scheduler.step(increment=config.batch.global_batch_size)
        main, *others = result.losses.values() or [None]
        losses += [] if main is None else [main]
        further += others
        norms.append(result.grad_norm)
        trained = list(orders.words)
        if iteration == case["evaluate_after"]:
            sizes.append(params_norm(run))
            valid = make_loader(run, run.samples.valid, 0)
            evaluated += step.evaluate(valid, config.run.eval_iters, count).values()
        if (partition := case.get("moves", {}).get(str(iteration))) is not None:
            box = [run]
            del run, step, checkpoints
            run = move_stages(box, lambda: None, partition=partition)
            step = Step(run)
            checkpoints = Checkpoints(run)
    if dealing is not None:
        dealing.finish()
    if config.checkpoint.save is not None:
        taken = (case["steps"] - done) * config.batch.global_batch_size
        checkpoints.save(
            dataclasses.replace(
                progress, iteration=case["steps"], consumed_train_samples=consumed + taken
            )
        )
    return {
        "losses": losses,
        "further": further,
        "grad_norms": norms,
        "layer_norms": layers,
        "params_norm": sizes,
        "evaluated": evaluated,
        "orders": trained,
        "shares": shares,
    }, run


def run_case(meshes: Meshes, case: dict[str, Any], config: TrainerConfig) -> dict[str, Any]:
    """Runs ``case``, and returns its results as lists with an item for each rank."""
    started = time.monotonic()
    job = meshes.join(config)
    run = build_run(job)
    with other_sums(case.get("variant", "")):
        seen, run = train(job, run, case)
    everyone = job.gather(seen)
    meshes.leave(job, run)
    results: dict[str, Any] = {key: [report[key] for report in everyone] for key in seen}
    results["seconds"] = time.monotonic() - started
    return results


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    target = Path(sys.argv[2])
    torch.set_num_threads(1)
    environment = Environment.read()
    # A rank that hangs prints its stack and exits, even if no other process terminates it.
    faulthandler.dump_traceback_later(float(os.environ["WATCHDOG_S"]), exit=True)
    store = connect(environment)
    data = target.with_name("tokens")
    if environment.rank == 0:
        write_data(data)
        store.set("data", "written")
    store.wait(["data"])
    source = ["--data-path", str(data), "--data-cache-path", str(target.with_name("cache"))]
    source += ["--split", "80,20,0", "--distributed-timeout-minutes", "1"]
    depths: dict[str, int] = {}
    for case in cases:
        depths[case["name"]] = depths[case["after"]] + 1 if case["after"] is not None else 0
        case["flags"] += source
        if case["after"] is not None:
            case["flags"] += ["--load", str(target.with_name(case["after"]))]
        if case.get("save") or any(other["after"] == case["name"] for other in cases):
            case["flags"] += ["--save", str(target.with_name(case["name"]))]
            case["flags"] += ["--save-interval", "1"]
    if environment.rank == 0:
        size = environment.world_size
        parsed = [parse(case["flags"], world_size=size, last_wins=True) for case in cases]
        store.set("configs", pickle.dumps(parsed))
    # Allow more time, because parsing takes a second per dozen cases, and longer on a busy machine.
    store.wait(["configs"], 5 * TIMEOUT)
    configs = pickle.loads(store.get("configs"))
    pairs = [*zip(cases, configs, strict=True)]
    pairs.sort(key=lambda pair: (depths[pair[0]["name"]], mesh_of(pair[1])))
    results = {}
    meshes = Meshes(store, environment)
    for case, config in pairs:
        if environment.rank == 0:
            print(f"case {case['name']}", flush=True)
        results[case["name"]] = run_case(meshes, case, config)
        if environment.rank == 0:
            target.write_text(json.dumps(results))
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
