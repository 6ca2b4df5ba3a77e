"""Defines plans and predictions, and exports plans as plan files or for other programs.

``config.plan_file`` reads plan files.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron.adaptive.config.model import MODELS
from megatron.adaptive.config.plan_file import PLAN_FORMAT, plan_variables, run_flags
from megatron.adaptive.config.schedule_specs import schedule_spec, selectable_names
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cluster import Cluster, known_gpu
from megatron.adaptive.planner.documents import RowSettings
from megatron.adaptive.planner.profile import PlanInputs

FP8_FLAGS = ("--fp8-format", "hybrid")
"""Megatron-LM's command-line flags for training in fp8. The arguments of a model contain these
flags if the model is planned in fp8."""


@dataclass(frozen=True, kw_only=True)
class Replica:
    """GPUs of one data-parallel replica of a stage, all on the same node.

    The GPUs have consecutive indices.

    Attributes:
        node: Index of the node in the cluster.
        gpu: Index of the replica's first GPU within the node.
        tp: Number of GPUs of the replica, which is the tensor-parallel size.
    """

    node: int
    gpu: int
    tp: int


@dataclass(frozen=True, kw_only=True)
class StagePlace:
    """GPUs and microbatch size of one pipeline rank.

    Attributes:
        replicas: Data-parallel replicas of the pipeline rank, ordered by data-parallel rank.
        micro_batch: Number of samples per microbatch on each replica. Usually, ``micro_batch *
            len(replicas)`` is the same for all stages. Plans from ``cost.as_run`` are an exception,
            because they distribute microbatches of equal size over different numbers of replicas.
    """

    replicas: tuple[Replica, ...]
    micro_batch: int


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """Settings that all stages of a plan share.

    Attributes:
        recompute: Kind of activation recomputation, one of ``model_description.RECOMPUTE``.
        distributed_optimizer: Whether the optimizer state is divided among the replicas.
        overlap_reduce: Whether gradient reduction overlaps with backward passes.
        sequence_parallel: Whether sequence parallelism is enabled. If so, the activations outside
            of attention and MLP are also divided among the tensor-parallel ranks.
        expert_ranks: Expert-parallel size, which is the number of consecutive replicas over which
            the experts are distributed.
        context_ranks: Context-parallel size, which is the number of consecutive ranks among which
            each sequence is divided.
        slices: Number of slices per sequence, or 1 for whole sequences. With
            several slices, an action processes one slice of a microbatch on a stage.
        slice_tokens: Number of tokens per slice if documents of different lengths are packed into
            rows that are cut into slices. ``None`` if all sequences have the same length.
    """

    recompute: str = "none"
    distributed_optimizer: bool = False
    overlap_reduce: bool = False
    sequence_parallel: bool = False
    expert_ranks: int = 1
    context_ranks: int = 1
    slices: int = 1
    slice_tokens: int | None = None

    @property
    def is_cut(self) -> bool:
        """Whether microbatches are cut into slices, so that an action processes one slice."""
        return self.slices > 1 or self.slice_tokens is not None

    def share_of(self, sequence: int) -> float:
        """Returns the mean length of a slice, as a fraction of a whole sequence.

        Args:
            sequence: Number of tokens of a whole sequence.
        """
        return 1 / self.slices if self.slice_tokens is None else self.slice_tokens / sequence

    def state_parameters(self, parameters: Any, expert_parameters: Any, dp: int) -> Any:
        """Returns the number of parameters whose optimizer state each replica keeps and updates.

        A distributed optimizer divides the state of a parameter among the replicas that hold the
        parameter. Normally, these are all ``dp`` replicas. If experts are distributed over
        ``expert_ranks`` replicas, only ``dp / expert_ranks`` replicas hold each expert.
        """
        if not self.distributed_optimizer:
            return parameters
        return (parameters + (self.expert_ranks - 1) * expert_parameters) / dp


@dataclass(frozen=True, kw_only=True)
class Plan(StageSettings):
    """Parallel sizes, partition, nodes and settings with which a model runs on a cluster.

    Attributes:
        tp: Tensor-parallel size. If stages have different sizes, this is the largest.
        dp: Number of data-parallel replicas. If stages have different numbers of replicas, this is
            the number of the first stage.
        pp: Number of pipeline ranks.
        chunks: Number of stages (model chunks) per pipeline rank.
        micro_batch: Number of samples per microbatch on one replica of the first stage.
        global_batch: Number of samples per step.
        schedule: Name of the pipeline schedule, as in ``--pipeline-schedule``.
        partition: Number of layers in each stage in pipeline order, including embedding and head,
            ``[pp * chunks]``.
        places: GPUs of each pipeline rank, ``[pp]``. Each context-parallel rank counts as a
            replica, so a stage has ``dp * context_ranks`` replicas.
        cap: Maximum amount of activations that a rank may hold under a run-time scheduling rule, or
            ``None`` for the rule's default. The unit is the size of one microbatch's activations in
            all chunks of the rank.
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
    cap: float | None = None

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches (or documents, if they are packed) per replica and step."""
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def rows(self) -> RowSettings:
        """Settings that determine how documents are packed, for a plan with ``slice_tokens``."""
        assert self.slice_tokens is not None
        return RowSettings(
            tokens=self.slice_tokens,
            dp=self.dp,
            pp=self.pp,
            chunks=self.chunks,
            schedule=self.schedule,
            expert_ranks=self.expert_ranks,
            tp=self.tp if self.sequence_parallel else 1,
        )

    @property
    def nodes(self) -> tuple[int, ...]:
        """Indices of the nodes that the plan uses, in rank order."""
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
    """Memory that a pipeline rank needs on the GPU that has the least free memory.

    Attributes:
        parameter_bytes: Size of the weights in bytes.
        gradient_bytes: Size of the gradients in bytes.
        optimizer_bytes: Size of optimizer state and master weights in bytes.
        activation_bytes: Peak size of the activations under the schedule, in bytes.
        workspace_bytes: Size in bytes of everything else, such as temporary buffers and the CUDA
            context.
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
        """Total number of bytes of GPU memory that the rank needs."""
        *parts, _limit = vars(self).values()
        total: float = sum(parts)  # All values are arrays during the search.
        return total

    @property
    def missing_bytes(self) -> float:
        """Number of bytes of GPU memory that the rank is short of, or 0 if it has enough."""
        return max(0.0, self.total_bytes - self.limit_bytes)


@dataclass(frozen=True, kw_only=True)
class StagePrediction:
    """Predicted times and memory of one pipeline rank.

    Attributes:
        forward_s: Duration of a microbatch's forward pass through all chunks of the rank, in
            seconds.
        backward_s: Duration of a microbatch's backward pass through all chunks of the rank in
            seconds, including weight gradients and recomputation.
        send_s: Time to send a message to the next stage, in seconds.
        bubble: Fraction of the pipeline's time during which the rank is idle, from 0 to 1.
        memory: Memory that the rank needs on the GPU that has the least free memory.
    """

    forward_s: float
    backward_s: float
    send_s: float
    bubble: float
    memory: StageMemory


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted time, memory and price of a training step with a plan.

    Attributes:
        seconds: Step time in seconds.
        parts: Parts of the step time in seconds, keyed by name. The parts ``compute``, ``bubble``,
            ``transfer``, ``tp``, ``reduction``, ``embedding`` and ``optimizer`` are always present.
            If the profile contains them, ``jitter`` and ``beside`` (all remaining work) are added.
            All parts add up to ``seconds``.
        stages: Predicted times and memory of each pipeline rank.
        tokens_per_s: Number of tokens that the whole job processes per second.
        price_per_hour: Price per hour of all nodes that the plan uses.
        estimated: Whether any of the times was estimated instead of measured.
        limiting_node: Index of the node whose network link limits the step time, because it is busy
            during the whole step, or ``None`` if there is no such node.
    """

    seconds: float
    parts: Mapping[str, float]
    stages: tuple[StagePrediction, ...]
    tokens_per_s: float
    price_per_hour: float
    estimated: bool = False
    limiting_node: int | None = None

    @property
    def fits(self) -> bool:
        """Whether every stage fits into the memory of its GPUs."""
        return all(stage.memory.missing_bytes == 0 for stage in self.stages)

    @property
    def price_per_step(self) -> float:
        """Price of a step, computed from its duration and the price per hour."""
        return self.price_per_hour * self.seconds / 3600

    @property
    def peak_bytes(self) -> float:
        """Memory use, in bytes, of the GPU that needs the most memory."""
        return max(stage.memory.total_bytes for stage in self.stages)


def place_ranks(
    cluster: Cluster, order: Sequence[int], *, tp: int, dp: int, pp: int, micro_batch: int
) -> tuple[StagePlace, ...]:
    """Assigns GPUs to every pipeline rank of a plan whose stages have equal parallel sizes.

    A GPU has rank (pipeline rank * dp + replica) * tp + tensor-parallel rank. Ranks are assigned to
    the GPUs of the nodes in ascending order, and each node is filled before the next.

    Args:
        cluster: Cluster that contains the nodes.
        order: Indices of the nodes to use, in rank order.
        tp: Tensor-parallel size, in GPUs per replica.
        dp: Number of data-parallel replicas.
        pp: Number of pipeline ranks.
        micro_batch: Number of samples per microbatch.

    Raises:
        ConfigError: There are too few GPUs, or a tensor-parallel group would span two nodes.
    """
    gpus = sum(cluster.nodes[node].gpus for node in order)
    if gpus < tp * dp * pp:
        raise ConfigError(
            f"tp {tp} x dp {dp} x pp {pp} needs {tp * dp * pp} GPUs, but the nodes of the plan have"
            f" {gpus}"
        )
    return tuple(
        place_stage(cluster, order, tp, dp, micro_batch, position=rank) for rank in range(pp)
    )


def place_stage(
    cluster: Cluster, order: Sequence[int], tp: int, dp: int, micro_batch: int, *, position: int = 0
) -> StagePlace:
    """Assigns GPUs to the stage with index ``position``. All stages have the same parallel sizes.

    The arguments have the same meaning as in :func:`place_ranks`.

    Raises:
        ConfigError: A tensor-parallel group would span two nodes.
    """
    slots = [(node, gpu) for node in order for gpu in range(cluster.nodes[node].gpus)]
    replicas = []
    for first in range(position * tp * dp, (position + 1) * tp * dp, tp):
        node, gpu = slots[first]
        if (last := slots[first + tp - 1][0]) != node:
            raise ConfigError(
                f"tp {tp}: a tensor-parallel group would span nodes {node} and {last}; use a tp "
                "that divides the number of GPUs of every node"
            )
        replicas.append(Replica(node=node, gpu=gpu, tp=tp))
    return StagePlace(replicas=tuple(replicas), micro_batch=micro_batch)


def plan_document(plan: Plan, inputs: PlanInputs, prediction: Prediction) -> dict[str, Any]:
    """Returns the contents of a plan file for ``plan``, with its prediction, as a dictionary.

    If stages have unequal parallel sizes, the file lists the sizes of each stage. The trainer
    supports such plans only without tensor parallelism.
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
    if plan.slices > 1:
        document["sequence_slices"] = plan.slices
    if plan.slice_tokens is not None:
        document["slice_tokens"] = plan.slice_tokens
    if plan.cap is not None:
        document["activation_cap"] = plan.cap
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
        "tokens_per_s_per_gpu": speed / sum(gpus_used(plan).values()),
        "mfu": flops_share(plan, inputs, prediction),
        "price_per_step": prediction.price_per_step,
        "estimated": prediction.estimated,
        "memory_bytes": [stage.memory.total_bytes for stage in prediction.stages],
        "memory_limit_bytes": [stage.memory.limit_bytes for stage in prediction.stages],
    }
    return document


def flops_share(plan: Plan, inputs: PlanInputs, prediction: Prediction) -> float | None:
    """Returns the model FLOPs utilization (MFU): the FLOP/s of the model divided by the GPUs' peak.

    The FLOPs of recomputation are not counted. The result is ``None`` if the table of GPUs does not
    contain the peak of a GPU in this precision, or if the FLOPs of the model are unknown.
    """
    peak = 0.0
    for node, count in gpus_used(plan).items():
        gpu = known_gpu(inputs.cluster.nodes[node].gpu)
        if gpu is None or inputs.model.precision.name not in gpu.flops:
            return None
        peak += count * gpu.flops[inputs.model.precision.name]
    work = inputs.step_flops(plan.global_batch)
    return 3 * work / prediction.seconds / peak if work else None


def gpus_used(plan: Plan) -> Counter[int]:
    """Returns the number of GPUs that a plan uses on each node, keyed by the node's index.

    The nodes are in rank order.
    """
    used = Counter[int]()
    for stage_place in plan.places:
        for replica in stage_place.replicas:
            used[replica.node] += replica.tp
    return used


def placement_groups(plan: Plan, cluster: Cluster) -> list[dict[str, Any]]:
    """Returns the plan's nodes in rank order, with consecutive equal nodes merged into a group."""
    kinds = [(cluster.nodes[node].name, count) for node, count in gpus_used(plan).items()]
    return [
        {"type": name, "nodes": len(list(nodes)), "processes_per_node": processes}
        for (name, processes), nodes in groupby(kinds)
    ]


def write_plan(document: Mapping[str, Any], path: Path, *, as_conf: bool = False) -> None:
    """Writes a plan as a plan file, or as shell variables for ``conf.sh``.

    Args:
        document: Contents of the plan file, from :func:`plan_document`.
        path: Path of the file to write.
        as_conf: Whether to write shell variables for ``conf.sh`` instead of a plan file.

    Raises:
        ConfigError: The file cannot be written, or ``conf.sh`` does not support the plan's stages.
    """
    text = conf_text(document) if as_conf else json.dumps(document, indent=2) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; choose another file") from error


def conf_text(document: Mapping[str, Any]) -> str:
    """Returns shell variables for ``conf.sh`` that describe the plan in ``document``.

    Raises:
        ConfigError: The stages have unequal parallel sizes that the trainer does not support.
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
"""Export formats for plans: Megatron-LM's flags, torchtitan's TOML, shell variables for
``conf.sh``, a command for Slurm, and the plan file."""


def export_text(document: Mapping[str, Any], form: str, arguments: Sequence[str], file: str) -> str:
    """Converts the plan in ``document`` to the format of another program, and returns the text.

    Args:
        document: Contents of the plan file, from :func:`plan_document`.
        form: Name of the format, one of :data:`EXPORTS`.
        arguments: Trainer arguments that describe the model. They may be empty.
        file: Name of the plan file that the Slurm command passes to the trainer.

    Raises:
        ConfigError: The program does not support the plan.
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
            f"--export {form}: {program} does not support stages with different parallel sizes;"
            " plan without --unequal"
        )
    if "slice_tokens" in document:
        raise ConfigError(
            f"--export {form}: {program} does not cut packed documents into slices; plan without"
            " --slice-tokens"
        )
    if document["degrees"]["pipeline"] > 1 and document["schedule"] not in schedules:
        raise ConfigError(
            f"--export {form}: {program} does not support schedule {document['schedule']};"
            f" plan with --schedules {','.join(schedules)}"
        )
    if form == "megatron":
        return _megatron_flags(document, arguments)
    return _titan_toml(document, fp8=FP8_FLAGS[0] in arguments)


def _megatron_flags(document: Mapping[str, Any], arguments: Sequence[str]) -> str:
    """Returns the plan in ``document`` as command-line flags of Megatron-LM."""
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
    """Returns the plan in ``document`` as a TOML configuration file for torchtitan."""
    degrees, sharded = document["degrees"], document["distributed_optimizer"]
    dp, pp = degrees["data"], degrees["pipeline"]
    precision = document["precision"]
    if precision == "fp16":
        raise ConfigError(
            "--export torchtitan: torchtitan does not train in fp16; plan with --precision bf16"
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
    """Returns an ``sbatch`` command that runs the plan in ``document`` on a Slurm cluster."""
    if len(document["placement"]) > 1:
        raise ConfigError(
            "--export sbatch does not support plans with several node types; save the plan with"
            ' --conf, and run "python -m megatron.adaptive job submit"'
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


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """A plan with its prediction, which is one row in a table of plans.

    Attributes:
        plan: Sizes, settings, layers and nodes of the plan.
        prediction: Predicted time, memory and price of the plan.
    """

    plan: Plan
    prediction: Prediction
