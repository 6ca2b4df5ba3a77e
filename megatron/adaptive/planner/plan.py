"""Holds a plan and its prediction, and writes both: as plan file, ``conf.sh`` and tables.

Reading plan files is ``config.plan_file``'s.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron.adaptive.config.input_files import aligned
from megatron.adaptive.config.model import MODELS
from megatron.adaptive.config.plan_file import PLAN_FORMAT, plan_variables, run_flags
from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.config.schedule_specs import schedule_spec, selectable_names
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cluster import Cluster, known_gpu
from megatron.adaptive.planner.profile import PlanInputs
from megatron.adaptive.schedule import catalog

FP8_FLAGS = ("--fp8-format", "hybrid")
"""Megatron-LM's, among the arguments of a model that is planned in fp8."""


@dataclass(frozen=True, kw_only=True)
class Replica:
    """The GPUs that one data-parallel replica of a stage runs on: one node's, side by side.

    Attributes:
        node: number of the node in the cluster.
        gpu: the first of its GPUs, counted within the node.
        tp: how many, the tensor-parallel width.
    """

    node: int
    gpu: int
    tp: int


@dataclass(frozen=True, kw_only=True)
class StagePlace:
    """GPUs of one pipeline rank.

    Attributes:
        replicas: in the order of data-parallel ranks.
        micro_batch: samples of one microbatch on each replica. Where numbers of replicas differ,
            it is the same everywhere if microbatches are dealt out to replicas (see ``cost``),
            else ``micro_batch * len(replicas)`` is.
    """

    replicas: tuple[Replica, ...]
    micro_batch: int


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """Settings that all stages of a plan share.

    Attributes:
        recompute: one of ``model.RECOMPUTE``.
        distributed_optimizer: whether replicas divide the optimizer state.
        overlap_reduce: whether gradients are reduced while backwards still run.
        sequence_parallel: whether activations outside of attention and MLP are divided by the
            tensor-parallel width.
        expert_ranks: neighbouring replicas that experts are spread over.
        context_ranks: neighbouring ranks that share each sequence.
    """

    recompute: str = "none"
    distributed_optimizer: bool = False
    overlap_reduce: bool = False
    sequence_parallel: bool = False
    expert_ranks: int = 1
    context_ranks: int = 1

    def state_parameters(self, parameters: Any, expert_parameters: Any, dp: int) -> Any:
        """Returns the parameters whose optimizer state one of ``dp`` replicas holds and updates.

        Of experts that are spread over ranks, so many times fewer replicas have each.
        """
        if not self.distributed_optimizer:
            return parameters
        return (parameters + (self.expert_ranks - 1) * expert_parameters) / dp


@dataclass(frozen=True, kw_only=True)
class Plan(StageSettings):
    """A way to run a model on a cluster.

    Attributes:
        tp: tensor-parallel width; the widest where stages differ.
        dp: data-parallel replicas; of the first stage where stages differ.
        pp: pipeline ranks.
        chunks: model chunks of each pipeline rank.
        micro_batch: samples of one microbatch of one replica; of the first stage.
        global_batch: samples of one step.
        schedule: name as for ``--pipeline-schedule``.
        partition: layers of each of ``pp * chunks`` stages in pipeline order, embedding and head
            included.
        places: where each pipeline rank lies, ``[pp]``; of ranks that share a sequence each counts
            as a replica, so that a stage has ``dp * context_ranks``.
    """

    tp: int
    dp: int
    pp: int
    micro_batch: int
    global_batch: int
    partition: tuple[int, ...]
    places: tuple[StagePlace, ...]
    chunks: int = 1
    schedule: str = "1f1b"

    @property
    def num_microbatches(self) -> int:
        """Microbatches of each replica in a step."""
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def nodes(self) -> tuple[int, ...]:
        """Nodes in the order in which the ranks meet them."""
        seen = [replica.node for place in self.places for replica in place.replicas]
        return tuple(dict.fromkeys(seen))

    @property
    def uniform(self) -> bool:
        """Whether all stages have the same widths, as the trainer needs it."""
        return all(
            len(place.replicas) == self.dp * self.context_ranks
            and all(one.tp == self.tp for one in place.replicas)
            for place in self.places
        )


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes on the fullest GPU of a pipeline rank.

    Attributes:
        parameter_bytes: weights.
        gradient_bytes: their gradients.
        optimizer_bytes: optimizer state and master weights.
        activation_bytes: activations in flight at the worst moment of the schedule.
        workspace_bytes: buffers and the margin for what nobody counts.
        limit_bytes: usable memory of that GPU.
    """

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: float
    workspace_bytes: float
    limit_bytes: float

    @property
    def total_bytes(self) -> float:
        """Sum of all parts."""
        *parts, _limit = vars(self).values()
        total: float = sum(parts)  # or an array of them, as the search has it
        return total

    @property
    def missing_bytes(self) -> float:
        """Bytes that the GPU lacks; 0 where it fits."""
        return max(0.0, self.total_bytes - self.limit_bytes)


@dataclass(frozen=True, kw_only=True)
class StagePrediction:
    """One pipeline rank.

    Attributes:
        forward_s: of one microbatch, over its chunks.
        backward_s: of one microbatch, weight gradients and recompute included.
        send_s: one forward transfer to the next stage.
        bubble: idle part of the pipeline's time.
        memory: on its fullest GPU.
    """

    forward_s: float
    backward_s: float
    send_s: float
    bubble: float
    memory: StageMemory


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted time, memory and price of a plan.

    Attributes:
        seconds: of one step.
        parts: seconds by name that add up to ``seconds``: ``compute``, ``bubble``, ``transfer``,
            ``tp``, ``reduction``, ``embedding``, ``optimizer``; where the profile knows of them
            also ``jitter``, and ``beside``, what a step does beside these.
        stages: one for each pipeline rank.
        tokens_per_s: of the whole job.
        price_per_hour: of the nodes that are paid.
        estimated: whether a number of the profile was estimated, not measured.
    """

    seconds: float
    parts: Mapping[str, float]
    stages: tuple[StagePrediction, ...]
    tokens_per_s: float
    price_per_hour: float
    estimated: bool = False

    @property
    def fits(self) -> bool:
        """Whether every stage has the memory that it needs."""
        return all(stage.memory.missing_bytes == 0 for stage in self.stages)

    @property
    def price_per_step(self) -> float:
        """Price of one step."""
        return self.price_per_hour * self.seconds / 3600

    @property
    def peak_bytes(self) -> float:
        """Bytes on the fullest GPU of all."""
        return max(stage.memory.total_bytes for stage in self.stages)


def place_ranks(
    cluster: Cluster, order: Sequence[int], *, tp: int, dp: int, pp: int, micro_batch: int
) -> tuple[StagePlace, ...]:
    """Lays equal stages on nodes as the ranks of a run are numbered.

    Rank = (pipeline rank * dp + replica) * tp + its place in the layer; nodes one after the other.

    Args:
        cluster: the nodes.
        order: numbers of its nodes in the order of the ranks.
        tp: tensor-parallel width.
        dp: replicas.
        pp: pipeline ranks.
        micro_batch: samples of a microbatch.

    Raises:
        ConfigError: too few GPUs, or a tensor-parallel group would cross two nodes.
    """
    gpus = sum(cluster.nodes[node].gpus for node in order)
    if gpus < tp * dp * pp:
        raise ConfigError(
            f"tp {tp} x dp {dp} x pp {pp} needs {tp * dp * pp} GPUs, these nodes have {gpus}"
        )
    return tuple(
        place_stage(cluster, order, tp, dp, micro_batch, position=rank) for rank in range(pp)
    )


def place_stage(
    cluster: Cluster, order: Sequence[int], tp: int, dp: int, micro_batch: int, *, position: int = 0
) -> StagePlace:
    """Lays one stage on nodes, behind ``position`` equal ones; the rest is as in ``place_ranks``.

    Raises:
        ConfigError: a tensor-parallel group would cross two nodes.
    """
    slots = [(node, gpu) for node in order for gpu in range(cluster.nodes[node].gpus)]
    replicas = []
    for first in range(position * tp * dp, (position + 1) * tp * dp, tp):
        node, gpu = slots[first]
        if (last := slots[first + tp - 1][0]) != node:
            raise ConfigError(
                f"tp {tp}: a tensor-parallel group would cross nodes {node} and {last}: choose a"
                " tp that divides the GPUs of every node"
            )
        replicas.append(Replica(node=node, gpu=gpu, tp=tp))
    return StagePlace(replicas=tuple(replicas), micro_batch=micro_batch)


def plan_document(plan: Plan, inputs: PlanInputs, prediction: Prediction) -> dict[str, Any]:
    """Returns a plan as its file holds it.

    Plans whose stages have unequal widths also say those of each stage; the trainer runs those
    without tensor parallelism.
    """
    document: dict[str, Any] = {
        "format": PLAN_FORMAT,
        "model": inputs.model.name,
        "precision": inputs.model.precision.name,
        "degrees": {"tensor": plan.tp, "pipeline": plan.pp, "data": plan.dp, "chunks": plan.chunks},
        "placement": placement_groups(plan, inputs.cluster),
        "micro_batch_size": plan.micro_batch,
        "global_batch_size": plan.global_batch,
        "schedule": plan.schedule,
        "recompute": plan.recompute,
        "distributed_optimizer": plan.distributed_optimizer,
        "overlap_grad_reduce": plan.overlap_reduce,
        "sequence_parallel": plan.sequence_parallel and plan.tp > 1,
    }
    if plan.expert_ranks > 1:
        document["degrees"]["expert"] = plan.expert_ranks
    if plan.context_ranks > 1:
        document["degrees"]["context"] = plan.context_ranks
    if plan.pp * plan.chunks > 1:
        document["partition"] = list(inputs.model.counted(plan.partition))
    if not plan.uniform:
        document["stages"] = [
            {
                "tensor": [replica.tp for replica in place.replicas],
                "nodes": [replica.node for replica in place.replicas],
                "micro_batch_size": place.micro_batch,
            }
            for place in plan.places
        ]
    speed = prediction.tokens_per_s
    document["prediction"] = {
        "step_s": prediction.seconds,
        "parts_s": dict(prediction.parts),
        "tokens_per_s": speed,
        "tokens_per_s_per_gpu": speed / sum(_gpus_used(plan).values()),
        "mfu": flops_share(plan, inputs, prediction),
        "price_per_step": prediction.price_per_step,
        "estimated": prediction.estimated,
        "memory_bytes": [stage.memory.total_bytes for stage in prediction.stages],
        "memory_limit_bytes": [stage.memory.limit_bytes for stage in prediction.stages],
    }
    return document


def flops_share(plan: Plan, inputs: PlanInputs, prediction: Prediction) -> float | None:
    """Returns the model's operations over the peak of the GPUs in use, known as MFU.

    Operations that recompute repeats do not count, nor do those of GPUs that the table of GPUs
    does not know in this precision: then it is None.
    """
    peak = 0.0
    for node, count in _gpus_used(plan).items():
        gpu = known_gpu(inputs.cluster.nodes[node].gpu)
        if gpu is None or inputs.model.precision.name not in gpu.flops:
            return None
        peak += count * gpu.flops[inputs.model.precision.name]
    work = sum(inputs.model.layer(i).forward_flops for i in range(inputs.model.num_layers))
    return 3 * work * plan.global_batch / prediction.seconds / peak if work else None


def _gpus_used(plan: Plan) -> Counter[int]:
    """Returns the GPUs that a plan uses by node, in the order of the ranks."""
    used = Counter[int]()
    for place in plan.places:
        for replica in place.replicas:
            used[replica.node] += replica.tp
    return used


def placement_groups(plan: Plan, cluster: Cluster) -> list[dict[str, Any]]:
    """Returns the plan's nodes in the order of the ranks, equal neighbours together."""
    kinds = [(cluster.nodes[node].name, count) for node, count in _gpus_used(plan).items()]
    return [
        {"type": name, "nodes": len(list(nodes)), "processes_per_node": processes}
        for (name, processes), nodes in groupby(kinds)
    ]


def write_plan(document: Mapping[str, Any], path: Path, *, as_conf: bool = False) -> None:
    """Writes a plan file, or variables of ``conf.sh``.

    Raises:
        ConfigError: the file cannot be written, or ``conf.sh`` cannot say such stages.
    """
    text = conf_text(document) if as_conf else json.dumps(document, indent=2) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name another file") from error


def conf_text(document: Mapping[str, Any]) -> str:
    """Returns a plan as variables of ``conf.sh``.

    Raises:
        ConfigError: its stages have unequal widths that the trainer cannot run.
    """
    values = plan_variables(dict(document), "the plan")
    lines = [
        "# shellcheck shell=bash disable=SC2034",
        f"# {document['model']}: {document['prediction']['step_s']:.4g} s for a step, as planned."
        " Source it in conf.sh, or copy it there.",
    ]
    if document["model"] in MODELS:
        lines.append(f"MODEL={document['model']}")
    for name, value in values.items():
        lines.append(f"{name}='{value}'" if " " in value else f"{name}={value}")
    return "\n".join(lines) + "\n"


EXPORTS = ("megatron", "torchtitan", "conf", "sbatch", "plan")
"""Forms of a plan beside the tables: Megatron-LM's flags, torchtitan's TOML, variables of
``conf.sh``, a command for Slurm, and the plan file."""


def export_text(document: Mapping[str, Any], form: str, arguments: Sequence[str], file: str) -> str:
    """Returns a plan for another program.

    Args:
        document: what its file holds.
        form: one of :data:`EXPORTS`.
        arguments: of the model, where it is given by the trainer's arguments.
        file: name of the plan file, for the command.

    Raises:
        ConfigError: that program cannot run such a plan; says why.
    """
    if form == "plan":
        return json.dumps(document, indent=2) + "\n"
    if form == "conf":
        return conf_text(document)
    if form == "sbatch":
        return _sbatch_line(document, arguments, file)
    schedules = (
        ("1f1b", "interleaved")
        if form == "megatron"
        else selectable_names(lambda spec: spec.torch_name)
    )
    program = "Megatron-LM" if form == "megatron" else "torchtitan"
    if "stages" in document:
        raise ConfigError(f"--export {form}: {program} has no stages of unequal widths: plan anew")
    if document["degrees"]["pipeline"] > 1 and document["schedule"] not in schedules:
        raise ConfigError(
            f"--export {form}: {program} has no schedule {document['schedule']}: plan with"
            f" --schedules {','.join(schedules)}"
        )
    if form == "megatron":
        return _megatron_flags(document, arguments)
    return _titan_toml(document, fp8=FP8_FLAGS[0] in arguments)


def _megatron_flags(document: Mapping[str, Any], arguments: Sequence[str]) -> str:
    values = plan_variables(dict(document), "the plan")
    for name in ("SCHEDULE", "PARTITION", "MODEL_CHUNKS"):
        values.pop(name, None)
    flags = [*(word for word in arguments if word not in ("--fp16", "--bf16")), *run_flags(values)]
    if "partition" in document:
        stages = ["t" * layers for layers in document["partition"]]
        further = re.search(r"--mtp-num-layers[= ](\d+)", " ".join(arguments))
        end = "m" * int(further[1] if further else 0) + "L"
        stages[0], stages[-1] = f"E{stages[0]}", stages[-1] + end
        layout = re.sub("t{2,}", lambda run: f"t*{len(run[0])}", "|".join(stages))
        flags += ["--pipeline-model-parallel-layout", layout]
    return shlex.join(flags) + "\n"


def _titan_toml(document: Mapping[str, Any], *, fp8: bool) -> str:
    degrees, sharded = document["degrees"], document["distributed_optimizer"]
    dp, pp, precision = degrees["data"], degrees["pipeline"], document["precision"]
    if precision == "fp16":
        raise ConfigError("--export torchtitan: it does not train in fp16: plan with --precision")
    batch = document["global_batch_size"]
    values: dict[str, dict[str, Any]] = {
        "training": {
            "local_batch_size": batch // dp if pp > 1 else document["micro_batch_size"],
            "global_batch_size": batch,
            "mixed_precision_param": "bfloat16" if precision == "bf16" else "float32",
        },
        "parallelism": {
            "data_parallel_replicate_degree": 1 if sharded else dp,
            "data_parallel_shard_degree": dp if sharded else 1,
            "fsdp_reshard_after_forward": "never",
            "tensor_parallel_degree": degrees["tensor"],
            "pipeline_parallel_degree": pp,
            "expert_parallel_degree": degrees.get("expert", 1),
            "context_parallel_degree": degrees.get("context", 1),
        },
        "activation_checkpoint": {"mode": document["recompute"]},
        **({"model": {"converters": ["quantize.linear.float8"]}} if fp8 else {}),
    }
    if pp > 1:
        ends = [0, *itertools.accumulate(document["partition"])]
        parts = [[f"layers.{i}" for i in range(*pair)] for pair in itertools.pairwise(ends)]
        parts[0].insert(0, "tok_embeddings")
        parts[-1] += ["norm", "output"]
        values["parallelism"] |= {
            "pipeline_parallel_schedule": schedule_spec(document["schedule"]).torch_name,
            "pipeline_parallel_microbatch_size": document["micro_batch_size"],
            "module_fqns_per_model_part": parts,
        }
    lines = [f"# {document['model']}, for torchtitan's --job.config_file beside your own settings"]
    for table, keys in values.items():
        lines += ["", f"[{table}]", *(f"{key} = {json.dumps(one)}" for key, one in keys.items())]
    return "\n".join(lines) + "\n"


def _sbatch_line(document: Mapping[str, Any], arguments: Sequence[str], file: str) -> str:
    if len(document["placement"]) > 1:
        raise ConfigError(
            "--export sbatch: the plan is on nodes of several types: write it with --conf and start"
            " it with python -m megatron.adaptive submit"
        )
    place = document["placement"][0]
    nodes, processes = place["nodes"], place["processes_per_node"]
    ranks = (
        f"torchrun --nnodes {nodes} --nproc-per-node {processes} --node-rank $SLURM_NODEID"
        " --master-addr $(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"
        f" --master-port 29500 pretrain_gpt.py --plan {shlex.quote(file)}"
    )
    command = f"srun bash -c {shlex.quote(' '.join([ranks, shlex.join(arguments)]).strip())}"
    words = [f"--nodes={nodes}", "--ntasks-per-node=1", f"--gpus-per-node={processes}"]
    return shlex.join(["sbatch", *words, f"--wrap={command}"]) + "\n"


_COMPARED = {"step_s": "step, s", "tokens_per_s": "tokens/s", "price_per_step": "price/step"}


def compare_text(files: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Returns how plans differ: settings, time, memory, price, and the parts of a step that do.

    Args:
        files: names and contents of plan files; what the planner predicted of them is in them.

    Raises:
        ConfigError: a plan breaks the schema or has no prediction.
    """
    for name, document in files:
        plan_variables(document, name)
        found = document.get("prediction")
        if not isinstance(found, dict) or not {"parts_s", "memory_bytes", *_COMPARED} <= set(found):
            raise ConfigError(
                f"{name}: it does not say what is predicted of it: write it with plan --output"
            )
    seen = [document["prediction"] for _, document in files]
    lines = [["", *(name for name, _ in files)]]
    settings = [_settings(document) for _, document in files]
    for key in dict.fromkeys(itertools.chain(*settings)):
        values = [one.get(key, "-") for one in settings]
        lines += [[key, *values]] * (len(set(values)) > 1)
    figures = [
        {
            **{what: float(one[key]) for key, what in _COMPARED.items()},
            "fullest GPU, GB": max(one["memory_bytes"]) / _GB,
        }
        for one in seen
    ]
    for what, base in figures[0].items():
        numbers = [one[what] for one in figures]
        change = [f" ({value / base - 1:+.1%})" if base else "" for value in numbers[1:]]
        shown = [f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" for value in numbers]
        cells = [one + more for one, more in zip(shown, ["", *change], strict=True)]
        lines += [[what, *cells]] * any(numbers)
    text = aligned(lines, left=1)
    first = seen[0]["parts_s"]
    for (name, _), one in zip(files[1:], seen[1:], strict=True):
        parts = one["parts_s"]
        gains = {key: parts.get(key, 0.0) - first.get(key, 0.0) for key in {**first, **parts}}
        largest = sorted(gains.items(), key=lambda pair: -abs(pair[1]))[:3]
        why = ", ".join(
            f"{key} {'+' if gain > 0 else '-'}{seconds_text(abs(gain))}"
            for key, gain in largest
            if abs(gain) > _SEEN * seen[0]["step_s"]
        )
        slower = one["step_s"] > seen[0]["step_s"]
        word = "slower" if slower else "faster"
        text.append(f"{name} is {word} than {files[0][0]}: {why or 'by nothing that shows'}")
    return "\n".join(text)


def _settings(document: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a plan decides, as words by key."""
    found = {**document.get("degrees", {})}
    for key, value in document.items():
        if key == "placement":
            value = ", ".join(
                f"{one['nodes']} {one.get('type', 'nodes')} x {one['processes_per_node']}"
                for one in value
            )
        if key not in ("degrees", "prediction", "format", "stages"):
            found[key] = format_partition(value) if key == "partition" else value
    return {key: str(value) for key, value in found.items()}


_GB = 1e9
_BAR = 30
_SEEN = 0.001
"""Parts of a step below this share of it are not named as reasons."""


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """A plan and what is predicted of it."""

    plan: Plan
    prediction: Prediction


def table(rows: Sequence[PlanRow], inputs: PlanInputs, tokens: float = 0.0) -> str:
    """Returns plans as a table, best first.

    Args:
        rows: the plans.
        inputs: what is trained where, and how long it takes.
        tokens: of the whole run, for its price and time; 0 leaves them out.
    """
    priced = any(row.prediction.price_per_hour for row in rows)
    spread = inputs.model.has_experts
    shared = any(row.plan.context_ranks > 1 for row in rows)
    head = ["", "tp", "dp", "pp", *["ep"] * spread, *["cp"] * shared, "batch", "schedule"]
    head += "recompute optimizer step tokens/s".split()
    head += ["per GPU", "MFU", "bubble", "memory"]
    head += (
        ["price/step"] * priced + ["run"] * bool(tokens) + ["price/run"] * (priced and tokens > 0)
    )
    lines = [head]
    for number, row in enumerate(rows, start=1):
        plan, seen = row.plan, row.prediction
        steps = tokens / (plan.global_batch * inputs.model.tokens_per_sample)
        full = max(seen.stages, key=lambda s: s.memory.total_bytes / s.memory.limit_bytes).memory
        chunks = f"x{plan.chunks}" if plan.chunks > 1 else ""
        replicas = "-".join(str(len(place.replicas)) for place in plan.places)
        replicas = str(plan.dp) if plan.uniform else replicas
        cells = [
            *(str(number), str(plan.tp), replicas, f"{plan.pp}{chunks}"),
            *[str(plan.expert_ranks)] * spread,
            *[str(plan.context_ranks)] * shared,
            f"{plan.num_microbatches}x{plan.micro_batch}",
            *(plan.schedule, plan.recompute),
            "sharded" if plan.distributed_optimizer else "whole",
            seconds_text(seen.seconds),
            f"{seen.tokens_per_s:,.0f}",
            f"{seen.tokens_per_s / sum(_gpus_used(plan).values()):,.0f}",
            "-" if (share := flops_share(plan, inputs, seen)) is None else f"{share:.1%}",
            f"{statistics.fmean(stage.bubble for stage in seen.stages):.1%}",
            f"{full.total_bytes / _GB:.1f}/{full.limit_bytes / _GB:.1f} GB",
        ]
        cells += [f"{seen.price_per_step:.4g}"] * priced
        cells += [seconds_text(steps * seen.seconds)] * bool(tokens)
        cells += [f"{steps * seen.price_per_step:,.0f}"] * (priced and tokens > 0)
        lines.append(cells)
    text, indent = aligned(lines), " " * len(str(len(rows)))
    for number, row in enumerate(rows, start=1):
        layers = format_partition(inputs.model.counted(row.plan.partition))
        places = placement_text(row.plan, inputs.cluster)
        text.insert(2 * number, f"{indent}  layers {layers} on {places}")
    return "\n".join(text)


def placement_text(plan: Plan, cluster: Cluster) -> str:
    """Returns the plan's nodes in the order of the ranks, as in ``2 a100 x 8, 1 v100 x 4``."""
    return ", ".join(
        f"{one['nodes']} {one['type']} x {one['processes_per_node']}"
        for one in placement_groups(plan, cluster)
    )


def seconds_text(seconds: float) -> str:
    """Returns a duration with the unit that suits it."""
    for least, unit, word in ((86400, 86400, "d"), (3600, 3600, "h"), (100, 60, "min")):
        if seconds >= least:
            return f"{seconds / unit:.4g} {word}"
    if not seconds:
        return "0"
    return f"{seconds:.4g} s" if seconds >= 0.1 else f"{seconds * 1e3:.4g} ms"


_PARTS = {
    "compute": "compute of stage {stage}",
    "tp": "communication between the tensor-, context- and expert-parallel ranks of stage {stage}",
    "transfer": "transfers between stages",
    "reduction": "gradient reduction of stage {stage}",
    "embedding": "gradients of the tied embeddings",
    "optimizer": "the optimizer step of stage {stage}",
    "bubble": "idle time of the pipeline",
    "jitter": "actions that take longer by chance",
    "beside": "what a step does beside pipeline, reduction and optimizer",
}


def explain(row: PlanRow, inputs: PlanInputs) -> str:
    """Returns a text: parts of a step's time, memory of each stage, and the plan's limit."""
    plan, seen = row.plan, row.prediction
    lines = [f"a step of {seconds_text(seen.seconds)}:"]
    for name, seconds in seen.parts.items():
        share = seconds / seen.seconds if seen.seconds else 0.0
        bar = "█" * round(_BAR * share)
        lines.append(f"  {name:11} {seconds_text(seconds):>9}  {share:6.1%}  {bar}".rstrip())
    lines.append("")
    lines.append(_stage_table(plan, seen, inputs))
    name = max(seen.parts, key=lambda key: seen.parts[key])
    slowest = max(
        range(plan.pp), key=lambda i: seen.stages[i].forward_s + seen.stages[i].backward_s
    )
    words = _PARTS[name].format(stage=slowest)
    share = seen.parts[name] / seen.seconds if seen.seconds else 0.0
    return "\n".join([*lines, "", f"held back by {name}: {words}: {share:.0%} of the step"])


def _stage_table(plan: Plan, seen: Prediction, inputs: PlanInputs) -> str:
    head = ["stage", "on", "layers", "forward", "backward", "send", "bubble"]
    head += ["weights", "gradients", "optimizer", "activations", "other", "total", "of GB"]
    lines = [head]
    counted = inputs.model.counted(plan.partition)
    placement = catalog.placement_for(plan.schedule, plan.pp, plan.chunks)
    for rank, (place, stage) in enumerate(zip(plan.places, seen.stages, strict=True)):
        names = dict.fromkeys(inputs.cluster.nodes[replica.node].name for replica in place.replicas)
        layers = [counted[placement.stage_of(rank, chunk)] for chunk in range(plan.chunks)]
        memory = stage.memory
        *parts, limit_bytes = vars(memory).values()
        held = (*parts, memory.total_bytes, limit_bytes)
        times = (stage.forward_s, stage.backward_s, stage.send_s)
        lines.append(
            [
                *(str(rank), "+".join(names), "+".join(map(str, layers))),
                *map(seconds_text, times),
                f"{stage.bubble:.1%}",
                *(f"{value / _GB:.2f}" for value in held),
            ]
        )
    return "\n".join(aligned(lines))
