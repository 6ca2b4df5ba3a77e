"""Defines plans and predictions, and writes them as plan files, tables or other programs' files.

``config.plan_file`` reads the plan files back.
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
"""Megatron-LM's command-line flags for training in fp8. The arguments of a model that is planned in
fp8 contain these flags."""


@dataclass(frozen=True, kw_only=True)
class Replica:
    """GPUs of one data-parallel replica of a stage. They have consecutive indices on one node.

    Attributes:
        node: Index of the node in the cluster.
        gpu: Index of the replica's first GPU within the node.
        tp: Number of GPUs of the replica (the tensor-parallel size).
    """

    node: int
    gpu: int
    tp: int


@dataclass(frozen=True, kw_only=True)
class StagePlace:
    """GPUs on which one pipeline rank runs, and its microbatch size.

    Attributes:
        replicas: Data-parallel replicas of the pipeline rank, ordered by data-parallel rank.
        micro_batch: Number of samples per microbatch on each replica. Stages with unequal parallel
            sizes have the same number only if microbatches are distributed to the replicas
            (``cost.as_run``). Otherwise, ``micro_batch * len(replicas)`` is the same on all stages.
    """

    replicas: tuple[Replica, ...]
    micro_batch: int


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """Settings that all stages of a plan share.

    Attributes:
        recompute: Kind of activation recompute, one of ``model_description.RECOMPUTE``.
        distributed_optimizer: Whether replicas divide the optimizer state among themselves.
        overlap_reduce: Whether gradients are reduced while backward passes still run.
        sequence_parallel: Whether sequence parallelism is on. Tensor-parallel ranks then also
            divide the activations outside of attention and MLP.
        expert_ranks: Number of consecutive replicas that the experts are distributed over
            (expert-parallel size).
        context_ranks: Number of consecutive ranks that divide each sequence among themselves
            (context-parallel size).
    """

    recompute: str = "none"
    distributed_optimizer: bool = False
    overlap_reduce: bool = False
    sequence_parallel: bool = False
    expert_ranks: int = 1
    context_ranks: int = 1

    def state_parameters(self, parameters: Any, expert_parameters: Any, dp: int) -> Any:
        """Returns the number of parameters whose optimizer state one of ``dp`` replicas updates.

        A distributed optimizer divides the state of a parameter among the replicas that hold the
        parameter. If experts are distributed over ``expert_ranks`` replicas, each expert is on only
        ``dp / expert_ranks`` replicas.
        """
        if not self.distributed_optimizer:
            return parameters
        return (parameters + (self.expert_ranks - 1) * expert_parameters) / dp


@dataclass(frozen=True, kw_only=True)
class Plan(StageSettings):
    """Parallel sizes, layers, nodes and settings with which a model runs on a cluster.

    Attributes:
        tp: Tensor-parallel size. If stages have different sizes, the largest.
        dp: Number of data-parallel replicas. If stages have different numbers, that of the first
            stage.
        pp: Number of pipeline ranks.
        chunks: Number of stages (model chunks) per pipeline rank.
        micro_batch: Number of samples per microbatch on one replica of the first stage.
        global_batch: Number of samples per step.
        schedule: Name of the pipeline schedule, a value of ``--pipeline-schedule``.
        partition: Number of layers of each stage in pipeline order, ``[pp * chunks]``. Embedding
            and head are included.
        places: GPUs of each pipeline rank, ``[pp]``. Each context-parallel rank counts as a
            replica, so a stage has ``dp * context_ranks`` replicas.
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
        """Number of microbatches per replica and step."""
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def nodes(self) -> tuple[int, ...]:
        """Indices of the nodes that the plan uses, ordered by rank."""
        nodes = [replica.node for stage_place in self.places for replica in stage_place.replicas]
        return tuple(dict.fromkeys(nodes))

    @property
    def uniform(self) -> bool:
        """Whether all stages have the same parallel sizes."""
        return all(
            len(stage_place.replicas) == self.dp * self.context_ranks
            and all(replica.tp == self.tp for replica in stage_place.replicas)
            for stage_place in self.places
        )


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Memory that one pipeline rank needs on its fullest GPU, in bytes.

    Attributes:
        parameter_bytes: Size of the weights in bytes.
        gradient_bytes: Size of the gradients in bytes.
        optimizer_bytes: Size of optimizer state and master weights in bytes.
        activation_bytes: Size of the activations in bytes, at their peak under the schedule.
        workspace_bytes: Size of temporary buffers, CUDA context and everything else, in bytes.
        limit_bytes: Usable memory of the GPU in bytes.
    """

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: float
    workspace_bytes: float
    limit_bytes: float

    @property
    def total_bytes(self) -> float:
        """Memory that the rank needs in total, in bytes."""
        *parts, _limit = vars(self).values()
        total: float = sum(parts)  # an array if the parts are arrays, as in the search
        return total

    @property
    def missing_bytes(self) -> float:
        """Memory in bytes that the GPU lacks; 0 if the stage fits."""
        return max(0.0, self.total_bytes - self.limit_bytes)


@dataclass(frozen=True, kw_only=True)
class StagePrediction:
    """Predicted times and memory of one pipeline rank.

    Attributes:
        forward_s: Time of one microbatch's forward pass in all chunks of the rank, in seconds.
        backward_s: Time of one microbatch's backward pass in all chunks of the rank, in seconds. It
            includes weight gradients and recompute.
        send_s: Time to send one message to the next stage, in seconds.
        bubble: Idle fraction of the pipeline's time, from 0 to 1.
        memory: Memory that the rank needs on its fullest GPU.
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
        seconds: Time of one step in seconds.
        parts: Parts of the step time in seconds, by name. They add up to ``seconds``. Names are
            ``compute``, ``bubble``, ``transfer``, ``tp``, ``reduction``, ``embedding`` and
            ``optimizer``. If the profile has measured them, also ``jitter``, and ``beside`` for all
            other work in a step.
        stages: Predicted times and memory of each pipeline rank.
        tokens_per_s: Number of tokens per second that the whole job processes.
        price_per_hour: Price per hour of all nodes in use.
        estimated: Whether a value of the profile was estimated instead of measured.
    """

    seconds: float
    parts: Mapping[str, float]
    stages: tuple[StagePrediction, ...]
    tokens_per_s: float
    price_per_hour: float
    estimated: bool = False

    @property
    def fits(self) -> bool:
        """Whether every stage fits in the memory of its GPUs."""
        return all(stage.memory.missing_bytes == 0 for stage in self.stages)

    @property
    def price_per_step(self) -> float:
        """Price of one step, from its time and the price per hour."""
        return self.price_per_hour * self.seconds / 3600

    @property
    def peak_bytes(self) -> float:
        """Memory in bytes that the job's fullest GPU needs."""
        return max(stage.memory.total_bytes for stage in self.stages)


def place_ranks(
    cluster: Cluster, order: Sequence[int], *, tp: int, dp: int, pp: int, micro_batch: int
) -> tuple[StagePlace, ...]:
    """Assigns GPUs to every pipeline rank of a plan whose stages have equal parallel sizes.

    The rank of a GPU is (pipeline rank * dp + replica) * tp + tensor-parallel rank. Ranks are
    assigned in ascending order, and fill one node after the other.

    Args:
        cluster: Cluster with the nodes.
        order: Indices of the nodes to use, ordered by rank.
        tp: Tensor-parallel size, in GPUs per replica.
        dp: Number of data-parallel replicas.
        pp: Number of pipeline ranks.
        micro_batch: Number of samples per microbatch.

    Raises:
        ConfigError: There are too few GPUs, or a tensor-parallel group would be on two nodes.
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
    """Assigns GPUs to one stage, which follows ``position`` stages with the same parallel sizes.

    The arguments have the same meaning as those of :func:`place_ranks`.

    Raises:
        ConfigError: A tensor-parallel group would be on two nodes.
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
    """Returns the contents of a plan file as a dictionary.

    If stages have unequal parallel sizes, the file lists the sizes of each stage. The trainer runs
    such plans only without tensor parallelism.
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
                "tensor": [replica.tp for replica in stage_place.replicas],
                "nodes": [replica.node for replica in stage_place.replicas],
                "micro_batch_size": stage_place.micro_batch,
            }
            for stage_place in plan.places
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
    """Returns the model FLOPs utilization (MFU): the model's FLOP/s divided by the GPUs' peak.

    Recomputed operations are not counted. Returns ``None`` if the table of GPUs lacks the peak of a
    GPU in this precision, or the model has no operations.
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
    """Returns how many GPUs a plan uses on each node, by node index, ordered by rank."""
    used = Counter[int]()
    for stage_place in plan.places:
        for replica in stage_place.replicas:
            used[replica.node] += replica.tp
    return used


def placement_groups(plan: Plan, cluster: Cluster) -> list[dict[str, Any]]:
    """Returns the plan's nodes ordered by rank, with consecutive equal nodes merged into groups."""
    kinds = [(cluster.nodes[node].name, count) for node, count in _gpus_used(plan).items()]
    return [
        {"type": name, "nodes": len(list(nodes)), "processes_per_node": processes}
        for (name, processes), nodes in groupby(kinds)
    ]


def write_plan(document: Mapping[str, Any], path: Path, *, as_conf: bool = False) -> None:
    """Writes a plan file, or the plan as shell variables for ``conf.sh``.

    Args:
        document: Contents of the plan file, made by :func:`plan_document`.
        path: Path of the file to write.
        as_conf: Whether to write shell variables for ``conf.sh`` instead of a plan file.

    Raises:
        ConfigError: The file cannot be written, or ``conf.sh`` has no variables for the stages.
    """
    text = conf_text(document) if as_conf else json.dumps(document, indent=2) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name another file") from error


def conf_text(document: Mapping[str, Any]) -> str:
    """Returns a plan as shell variables for ``conf.sh``.

    Raises:
        ConfigError: The plan's stages have unequal parallel sizes that the trainer cannot run.
    """
    values = plan_variables(dict(document), "the plan")
    lines = [
        "# shellcheck shell=bash disable=SC2034",
        f"# {document['model']}, predicted step {document['prediction']['step_s']:.4g} s."
        " Source this file in conf.sh, or copy it there.",
    ]
    if document["model"] in MODELS:
        lines.append(f"MODEL={document['model']}")
    for name, value in values.items():
        lines.append(f"{name}='{value}'" if " " in value else f"{name}={value}")
    return "\n".join(lines) + "\n"


EXPORTS = ("megatron", "torchtitan", "conf", "sbatch", "plan")
"""Formats in which a plan can be exported: Megatron-LM's flags, torchtitan's TOML, shell variables
for ``conf.sh``, a command for Slurm, and the plan file."""


def export_text(document: Mapping[str, Any], form: str, arguments: Sequence[str], file: str) -> str:
    """Returns a plan in the format of another program.

    Args:
        document: Contents of the plan file, made by :func:`plan_document`.
        form: Name of the format, one of :data:`EXPORTS`.
        arguments: The trainer's command-line arguments that describe the model. May be empty.
        file: Name of the plan file, to which the Slurm command refers.

    Raises:
        ConfigError: The other program cannot run such a plan.
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
        raise ConfigError(
            f"--export {form}: {program} has no stages of unequal widths: plan without --unequal"
        )
    if document["degrees"]["pipeline"] > 1 and document["schedule"] not in schedules:
        raise ConfigError(
            f"--export {form}: {program} has no schedule {document['schedule']}: plan with"
            f" --schedules {','.join(schedules)}"
        )
    if form == "megatron":
        return _megatron_flags(document, arguments)
    return _titan_toml(document, fp8=FP8_FLAGS[0] in arguments)


def _megatron_flags(document: Mapping[str, Any], arguments: Sequence[str]) -> str:
    """Returns a plan as command-line flags of Megatron-LM."""
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
    """Returns a plan as torchtitan's configuration file in TOML."""
    degrees, sharded = document["degrees"], document["distributed_optimizer"]
    dp, pp = degrees["data"], degrees["pipeline"]
    precision = document["precision"]
    if precision == "fp16":
        raise ConfigError(
            "--export torchtitan: torchtitan does not train in fp16: plan with --precision bf16"
        )
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
    lines = [
        f"# {document['model']}: add your settings, and pass this file to torchtitan as"
        " --job.config_file"
    ]
    for table, keys in values.items():
        lines += [
            "",
            f"[{table}]",
            *(f"{key} = {json.dumps(value)}" for key, value in keys.items()),
        ]
    return "\n".join(lines) + "\n"


def _sbatch_line(document: Mapping[str, Any], arguments: Sequence[str], file: str) -> str:
    """Returns an ``sbatch`` command that runs a plan on a Slurm cluster."""
    if len(document["placement"]) > 1:
        raise ConfigError(
            "--export sbatch: the plan is on nodes of several types: write it with --conf and start"
            " it with python -m megatron.adaptive job submit"
        )
    group = document["placement"][0]
    nodes, processes = group["nodes"], group["processes_per_node"]
    ranks = (
        f"torchrun --nnodes {nodes} --nproc-per-node {processes} --node-rank $SLURM_NODEID"
        " --master-addr $(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"
        f" --master-port 29500 pretrain_gpt.py --plan {shlex.quote(file)}"
    )
    command = f"srun bash -c {shlex.quote(' '.join([ranks, shlex.join(arguments)]).strip())}"
    flags = [f"--nodes={nodes}", "--ntasks-per-node=1", f"--gpus-per-node={processes}"]
    return shlex.join(["sbatch", *flags, f"--wrap={command}"]) + "\n"


_COMPARED = {"step_s": "step, s", "tokens_per_s": "tokens/s", "price_per_step": "price/step"}


def compare_text(files: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Returns a table that compares plans: settings, time, memory, price and parts of a step.

    Args:
        files: Names and contents of plan files, with their predictions.

    Raises:
        ConfigError: A plan does not match the schema, or has no prediction.
    """
    for name, document in files:
        plan_variables(document, name)
        prediction = document.get("prediction")
        keys = {"parts_s", "memory_bytes", *_COMPARED}
        if not isinstance(prediction, dict) or not keys <= set(prediction):
            raise ConfigError(f"{name}: the plan has no prediction: write it with plan --output")
    predictions = [document["prediction"] for _, document in files]
    lines = [["", *(name for name, _ in files)]]
    settings = [_settings(document) for _, document in files]
    for key in dict.fromkeys(itertools.chain(*settings)):
        values = [setting.get(key, "-") for setting in settings]
        if len(set(values)) > 1:
            lines.append([key, *values])
    lines += _figure_lines(predictions)
    text = aligned(lines, left=1)
    for (name, _), prediction in zip(files[1:], predictions[1:], strict=True):
        text.append(f"{name} is {_reason(prediction, predictions[0], files[0][0])}")
    return "\n".join(text)


def _figure_lines(predictions: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Returns table lines with predicted values of plans, and the change from the first plan."""
    lines = []
    figures = [
        {
            **{title: float(prediction[key]) for key, title in _COMPARED.items()},
            "fullest GPU, GB": max(prediction["memory_bytes"]) / _GB,
        }
        for prediction in predictions
    ]
    for title, base in figures[0].items():
        numbers = [figure[title] for figure in figures]
        changes = [f" ({value / base - 1:+.1%})" if base else "" for value in numbers[1:]]
        shown = [f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" for value in numbers]
        cells = [number + change for number, change in zip(shown, ["", *changes], strict=True)]
        if any(numbers):
            lines.append([title, *cells])
    return lines


def _reason(prediction: Mapping[str, Any], first: Mapping[str, Any], first_name: str) -> str:
    """Returns whether a plan is slower or faster than the first plan, and which parts differ most.

    Args:
        prediction: Prediction of the plan, in the form that a plan file contains.
        first: Prediction of the plan to compare with, in the same form.
        first_name: Name of the plan file to compare with.
    """
    parts, base = prediction["parts_s"], first["parts_s"]
    gains = {key: parts.get(key, 0.0) - base.get(key, 0.0) for key in {**base, **parts}}
    largest = sorted(gains.items(), key=lambda pair: -abs(pair[1]))[:3]
    differences = ", ".join(
        f"{key} {'+' if gain > 0 else '-'}{seconds_text(abs(gain))}"
        for key, gain in largest
        if abs(gain) > _LEAST_SHARE * first["step_s"]
    )
    word = "slower" if prediction["step_s"] > first["step_s"] else "faster"
    return f"{word} than {first_name}: {differences or 'no part differs noticeably'}"


def _settings(document: Mapping[str, Any]) -> dict[str, str]:
    """Returns the settings of a plan file as text, by their keys in the file."""
    settings = {**document.get("degrees", {})}
    for key, value in document.items():
        if key == "placement":
            value = ", ".join(
                f"{group['nodes']} {group.get('type', 'nodes')} x {group['processes_per_node']}"
                for group in value
            )
        if key not in ("degrees", "prediction", "format", "stages"):
            settings[key] = format_partition(value) if key == "partition" else value
    return {key: str(value) for key, value in settings.items()}


_GB = 1e9
_BAR = 30
_LEAST_SHARE = 0.001
"""Minimum fraction of the step time by which a part must differ to be named as a reason."""


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """A plan and its prediction, which make one row of a table.

    Attributes:
        plan: Sizes, settings, layers and nodes of the plan.
        prediction: Predicted time, memory and price of the plan.
    """

    plan: Plan
    prediction: Prediction


def table(rows: Sequence[PlanRow], inputs: PlanInputs, tokens: float = 0.0) -> str:
    """Returns a text table with one row per plan.

    Args:
        rows: Plans with their predictions, best first, at least one.
        inputs: Model, cluster and profile of layer times.
        tokens: Number of tokens of the whole training run, from which its time and price are
            computed. 0 omits both.
    """
    has_prices = any(row.prediction.price_per_hour for row in rows)
    is_shown = {
        "ep": inputs.model.has_experts,
        "cp": any(row.plan.context_ranks > 1 for row in rows),
        "price/step": has_prices,
        "run": tokens > 0,
        "price/run": has_prices and tokens > 0,
    }
    columns = [_columns(row, inputs, tokens) for row in rows]
    titles = [title for title in columns[0] if is_shown.get(title, True)]
    lines = [["", *titles]]
    for number, column in enumerate(columns, start=1):
        lines.append([str(number), *(column[title] for title in titles)])
    text = aligned(lines)
    indent = " " * len(str(len(rows)))
    for number, row in enumerate(rows, start=1):
        layers = format_partition(inputs.model.counted(row.plan.partition))
        places = placement_text(row.plan, inputs.cluster)
        text.insert(2 * number, f"{indent}  layers {layers} on {places}")
    return "\n".join(text)


def _columns(row: PlanRow, inputs: PlanInputs, tokens: float) -> dict[str, str]:
    """Returns all table cells of a plan, by the titles of their columns."""
    plan, prediction = row.plan, row.prediction
    steps = tokens / (plan.global_batch * inputs.model.tokens_per_sample)
    memories = [stage.memory for stage in prediction.stages]
    fullest = max(memories, key=lambda memory: memory.total_bytes / memory.limit_bytes)
    chunks = f"x{plan.chunks}" if plan.chunks > 1 else ""
    replicas = "-".join(str(len(stage_place.replicas)) for stage_place in plan.places)
    share = flops_share(plan, inputs, prediction)
    return {
        "tp": str(plan.tp),
        "dp": str(plan.dp) if plan.uniform else replicas,
        "pp": f"{plan.pp}{chunks}",
        "ep": str(plan.expert_ranks),
        "cp": str(plan.context_ranks),
        "batch": f"{plan.num_microbatches}x{plan.micro_batch}",
        "schedule": plan.schedule,
        "recompute": plan.recompute,
        "optimizer": "sharded" if plan.distributed_optimizer else "whole",
        "step": seconds_text(prediction.seconds),
        "tokens/s": f"{prediction.tokens_per_s:,.0f}",
        "per GPU": f"{prediction.tokens_per_s / sum(_gpus_used(plan).values()):,.0f}",
        "MFU": "-" if share is None else f"{share:.1%}",
        "bubble": f"{statistics.fmean(stage.bubble for stage in prediction.stages):.1%}",
        "memory": f"{fullest.total_bytes / _GB:.1f}/{fullest.limit_bytes / _GB:.1f} GB",
        "price/step": f"{prediction.price_per_step:.4g}",
        "run": seconds_text(steps * prediction.seconds),
        "price/run": f"{steps * prediction.price_per_step:,.0f}",
    }


def placement_text(plan: Plan, cluster: Cluster) -> str:
    """Returns the plan's nodes as text, ordered by rank, such as ``2 a100 x 8, 1 v100 x 4``."""
    return ", ".join(
        f"{group['nodes']} {group['type']} x {group['processes_per_node']}"
        for group in placement_groups(plan, cluster)
    )


def seconds_text(seconds: float) -> str:
    """Returns a duration as text with a fitting unit, from days to milliseconds."""
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
    "jitter": "waiting for actions that happen to take longer",
    "beside": "work besides pipeline, reduction and optimizer",
}


def explain(row: PlanRow, inputs: PlanInputs) -> str:
    """Returns a text with the parts of a step, each stage's memory, and the largest part."""
    plan, prediction = row.plan, row.prediction
    lines = [f"a step of {seconds_text(prediction.seconds)}:"]
    for name, seconds in prediction.parts.items():
        share = seconds / prediction.seconds if prediction.seconds else 0.0
        bar = "█" * round(_BAR * share)
        lines.append(f"  {name:11} {seconds_text(seconds):>9}  {share:6.1%}  {bar}".rstrip())
    lines.append("")
    lines.append(_stage_table(plan, prediction, inputs))
    name = max(prediction.parts, key=lambda key: prediction.parts[key])
    slowest = max(
        range(plan.pp),
        key=lambda i: prediction.stages[i].forward_s + prediction.stages[i].backward_s,
    )
    description = _PARTS[name].format(stage=slowest)
    share = prediction.parts[name] / prediction.seconds if prediction.seconds else 0.0
    return "\n".join([*lines, "", f"held back by {name}: {description}: {share:.0%} of the step"])


def _stage_table(plan: Plan, prediction: Prediction, inputs: PlanInputs) -> str:
    """Returns a table with the times and memory of each pipeline rank."""
    head = ["stage", "on", "layers", "forward", "backward", "send", "bubble"]
    head += ["weights", "gradients", "optimizer", "activations", "other", "total", "of GB"]
    lines = [head]
    counted = inputs.model.counted(plan.partition)
    placement = catalog.placement_for(plan.schedule, plan.pp, plan.chunks)
    for rank, (stage_place, stage) in enumerate(zip(plan.places, prediction.stages, strict=True)):
        names = dict.fromkeys(
            inputs.cluster.nodes[replica.node].name for replica in stage_place.replicas
        )
        layers = [counted[placement.stage_of(rank, chunk)] for chunk in range(plan.chunks)]
        memory = stage.memory
        *parts, limit_bytes = vars(memory).values()
        sizes = (*parts, memory.total_bytes, limit_bytes)
        times = (stage.forward_s, stage.backward_s, stage.send_s)
        lines.append(
            [
                str(rank),
                "+".join(names),
                "+".join(map(str, layers)),
                *map(seconds_text, times),
                f"{stage.bubble:.1%}",
                *(f"{value / _GB:.2f}" for value in sizes),
            ]
        )
    return "\n".join(aligned(lines))
