"""Implements ``plan --try``, which runs a rank of a plan and adds measurements to the plan."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from megatron.adaptive.cli.common import EXIT_EXPECTED_ERROR, show
from megatron.adaptive.cli.plan_inputs import measured_kinds
from megatron.adaptive.cluster.inventory import count_gpus
from megatron.adaptive.config.input_files import aligned, say
from megatron.adaptive.config.parent_process import ending_with_this_process
from megatron.adaptive.config.plan_file import load_plan, plan_flags, world_size_of
from megatron.adaptive.errors import ConfigError, SetupError
from megatron.adaptive.planner.model_description import Model
from megatron.adaptive.planner.model_file import preset_names, read_model
from megatron.adaptive.planner.plan import Plan, write_plan
from megatron.adaptive.planner.tried import (
    TriedRank,
    cluster_of,
    fit_profile,
    most_bytes,
    needed_bytes,
    plan_of,
    predicted_step_s,
    tried_ranks,
)

_RANK = "megatron.adaptive.cli.try_rank"
_LINKS = "megatron.adaptive.cli.try_links"
_LINKS_S = 300.0
_ERROR = "error: "


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """Describes the rank to run, and its plan.

    Attributes:
        path: Path of the plan file.
        content: Content of the plan file.
        flags: Flags of the trainer that correspond to the plan.
        model: Model of the plan.
        rank: Global rank of the process to run.
        world_size: Number of ranks in the plan.
    """

    path: Path
    content: dict[str, Any]
    flags: list[str]
    model: Model
    rank: int
    world_size: int

    @property
    def pp_rank(self) -> int:
        """Returns the pipeline rank that corresponds to the global rank ``rank``.

        The pipeline is the outermost axis of the mesh.
        """
        pipeline: int = self.content["degrees"].get("pipeline", 1)
        return self.rank // (self.world_size // pipeline)


def try_plan(options: argparse.Namespace) -> int:
    """Runs a rank of the plan, prints the rank's memory and times, and adds both to the plan file.

    Raises:
        ConfigError: An option or the plan file is not suitable for a trial, or the rank needs more
            memory than the device has.
        SetupError: The process of the rank exited without a result.
    """
    trial = _read(options)
    former = tried_ranks(trial.content, str(trial.path))
    # The rank's memory and order of actions do not depend on the name of the device, so use a
    # placeholder until the rank reports the name.
    cluster = cluster_of(trial.content, "here")
    plan = plan_of(trial.content, trial.model, cluster, str(trial.path))
    needed = needed_bytes(plan, trial.model, cluster)[trial.pp_rank]
    tried, layers = _run(trial, _request(trial, plan, needed))
    links = _measure_links(trial, plan)
    ranks = {r: values for r, values in former.items() if values.device == tried.device}
    for rank in sorted(former.keys() - ranks.keys() - {tried.rank}):
        show(
            f"warning: {trial.path}: rank {rank} was tried on {former[rank].device}, not on "
            f"{tried.device}; the values from that trial are omitted",
            file=sys.stderr,
        )
    ranks[tried.rank] = tried
    cluster = cluster_of(trial.content, tried.device)
    fitted = fit_profile(plan, trial.model, cluster, layers, list(ranks.values()), links)
    step_s = predicted_step_s(plan, trial.model, cluster, fitted)
    trial.content["tried"] = {
        "step_s": step_s,
        "ranks": [asdict(ranks[rank]) for rank in sorted(ranks)],
        "profile": fitted,
    }
    target = options.output or trial.path
    write_plan(trial.content, target)
    if options.json:
        print(json.dumps(trial.content["tried"], indent=2))
        return 0
    show(_table(trial, tried, step_s, has_links=bool(links)))
    show(
        f"\nwrote the plan with these values to {target}; to use them, run plan --profile {target}"
    )
    return 0


def _read(options: argparse.Namespace) -> _Trial:
    """Reads the plan, and checks that the rank in ``options`` can run alone on this machine."""
    path: Path = options.try_
    content = load_plan(path)
    flags = plan_flags(content, str(path))
    if "stages" in content:
        raise ConfigError(
            f"{path}: --try requires stages with equal data-parallel sizes; make the plan without "
            "--unequal"
        )
    if "slice_tokens" in content:
        raise ConfigError(
            f"{path}: --try does not support slice_tokens ({content['slice_tokens']}), because the"
            " number of slices of packed documents differs between steps; try a plan that was"
            " made with --sequence-slices, or train some steps with this plan"
        )
    world_size = world_size_of(content)
    if world_size is None:
        raise ConfigError(f"{path}: degrees.data is missing; set it to the number of replicas")
    asked = options.world_size
    if asked is not None and asked != world_size:
        raise ConfigError(
            f"--world-size must be {world_size}, the number of ranks in {path}, got {asked}; remove"
            f" --world-size, or make a plan for {asked} ranks"
        )
    placed = sum(
        group["nodes"] * group["processes_per_node"] for group in content.get("placement", ())
    )
    if placed not in (0, world_size):
        raise ConfigError(
            f"{path}: placement has {placed} processes, but degrees require {world_size};"
            " make them equal"
        )
    if options.rank >= world_size:
        raise ConfigError(
            f"--rank must be from 0 to {world_size - 1}, got {options.rank}; {path} has"
            f" {world_size} ranks"
        )
    name = options.model or str(content.get("model"))
    if options.model is None and name not in preset_names():
        raise ConfigError(f"{path}: the layer sizes of its model {name} are unknown; pass --model")
    model = read_model(name, content.get("precision"), default="fp32", attention=options.attention)
    if not model.arguments:
        raise ConfigError(
            f"--model {name}: the trainer cannot build this model, so its ranks cannot be tried"
        )
    return _Trial(
        path=path,
        content=content,
        flags=flags,
        model=model,
        rank=options.rank,
        world_size=world_size,
    )


def _request(trial: _Trial, plan: Plan, needed: float) -> dict[str, Any]:
    """Returns the request for the rank's process as a dict with the fields of ``TrialRequest``.

    ``needed`` is the memory that the rank needs, in bytes.
    """
    model = trial.model
    stages = []
    begin = 0
    for size in plan.partition:
        flops = sum(model.layer(i).forward_flops for i in range(begin, begin + size))
        stages.append(max(flops, 1.0) / 1e12)
        begin += size
    return {
        "model_arguments": list(model.arguments),
        "plan_arguments": trial.flags,
        "world_size": trial.world_size,
        "rank": trial.rank,
        "stage_work": stages,
        "needed_bytes": needed,
        "kinds": measured_kinds(model, (plan.expert_ranks,)),
        "last": model.layers[-2],
    }


def _run(trial: _Trial, request: Mapping[str, Any]) -> tuple[TriedRank, dict[str, Any]]:
    """Runs the rank in a separate process. Returns measurements of the rank and of its layers."""
    say(f"running rank {trial.rank} of {trial.world_size} for some steps, without other ranks")
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "request.json", Path(folder) / "result.json"
        source.write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, "-m", _RANK, str(source), str(target)]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode == 0 and target.exists():
            result = json.loads(target.read_text(encoding="utf-8"))
            return TriedRank(**result["rank"]), result["layers"]
    lines = process.stderr.strip().splitlines() or ["no message"]
    if process.returncode == EXIT_EXPECTED_ERROR and lines[-1].startswith(_ERROR):
        raise ConfigError(f"{trial.path}: {lines[-1].removeprefix(_ERROR)}")
    if process.returncode < 0:
        raise SetupError(
            f"{trial.path}: the process of rank {trial.rank} was killed by signal "
            f"{-process.returncode}, perhaps because memory ran out; try a rank that needs less "
            "memory, or use a larger device"
        )
    sys.stderr.write(process.stderr)
    raise SetupError(f"{trial.path}: rank {trial.rank} failed: {lines[-1]}; see the output above")


def _measure_links(trial: _Trial, plan: Plan) -> dict[str, Any]:
    """Measures messages and all-reduces between two ranks on this machine.

    Returns:
        Entries of a profile file. The result is empty if the plan has a single rank or the machine
        has a single GPU. It is also empty if the measurement fails, after a warning.
    """
    if trial.world_size == 1 or count_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")) == 1:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "links.json"
        command = [sys.executable, "-m", "megatron.adaptive", "job", "launch", "--standalone"]
        command += ["--nproc-per-node", "2", "-m", _LINKS, str(target)]
        errors = Path(folder) / "errors.txt"
        try:
            status = _run_launcher([*command, str(most_bytes(plan, trial.model))], errors)
        except subprocess.TimeoutExpired:
            reason = f"the ranks took more than {_LINKS_S:g} s"
        else:
            if status == 0 and target.exists():
                measured: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
                return measured
            text = errors.read_text(encoding="utf-8", errors="replace")
            reason = (text.strip().splitlines() or ["no message"])[0]
    show(f"warning: links between two ranks were not measured: {reason}", file=sys.stderr)
    return {}


def _run_launcher(command: Sequence[str], errors: Path) -> int:
    """Runs a launcher and its ranks, and returns the exit status.

    If the launcher does not exit in time, it is killed together with its ranks.

    Args:
        command: Command of the launcher.
        errors: File for the standard error of the launcher and the ranks. A pipe cannot be used,
            because this function would wait until all ranks have closed the pipe.

    Raises:
        TimeoutExpired: The launcher did not exit in time.
    """
    with errors.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=file,
            preexec_fn=ending_with_this_process(signal.SIGTERM),
        )
    try:
        return process.wait(_LINKS_S)
    finally:
        family: list[psutil.Process] = []
        if process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                launcher = psutil.Process(process.pid)
                family = [launcher, *launcher.children(recursive=True)]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()


def _table(trial: _Trial, tried: TriedRank, step_s: float, *, has_links: bool) -> str:
    """Returns a text table of the rank's planned and measured values."""
    prediction = trial.content.get("prediction", {})
    memories = prediction.get("memory_bytes", [])
    planned_memory = f"{memories[trial.pp_rank] / 1e9:.2f} GB" if memories else "-"
    planned_step = f"{prediction['step_s'] * 1e3:,.1f} ms" if "step_s" in prediction else "-"
    rows = [
        [f"rank {tried.rank} on {tried.device}", "planned", "tried"],
        ["memory", planned_memory, f"{tried.memory_bytes / 1e9:.2f} GB"],
        ["step of the job", planned_step, f"{step_s * 1e3:,.1f} ms"],
    ]
    for name, seconds in (
        ("forward of a microbatch", tried.forward_s),
        ("backward", tried.backward_s),
        ("weight gradients", tried.weight_s),
    ):
        if sum(seconds):
            rows.append([name, "", f"{sum(seconds) * 1e3:,.2f} ms"])
    rows += [
        ["busy in a step", "", f"{tried.busy_s * 1e3:,.1f} ms"],
        ["optimizer", "", f"{tried.optimizer_s * 1e3:,.1f} ms"],
        ["rest of a step", "", f"{tried.beside_s * 1e3:,.1f} ms"],
    ]
    note = "The other ranks were not run, so messages and collectives take no time on this rank."
    note += "\nThe step time of the job is simulated for the whole pipeline with these times, "
    note += (
        "and with messages between two ranks on this machine." if has_links else "without messages."
    )
    return "\n".join([*aligned(rows, 1), "", note])
