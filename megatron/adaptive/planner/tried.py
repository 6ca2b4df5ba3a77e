"""Stores measurements from ``plan --try`` in a plan file, and predicts the plan's time from them.

``plan --try`` runs ranks of a plan on this machine. The entry ``tried`` of the plan file contains
the measurements of these ranks, and a profile. The profile starts with times of layers that were
measured in isolation. These values are then adjusted so that the planner's predictions for the
ranks that ``plan --try`` ran match the measurements::

    forward, backward, weight gradients   multiplied by measured / predicted time of the ranks
    optimizer, rest of a step             as measured
    memory besides tensors                increased by measured - predicted memory

Messages and collectives are not measured, because a rank is run without its communication partners.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Any

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner import profile_file
from megatron.adaptive.planner.cluster import Cluster, LinkSpeed, NodePool, NodeType
from megatron.adaptive.planner.cost import StageSums, predict
from megatron.adaptive.planner.layer_costs import OURS
from megatron.adaptive.planner.link_costs import tied_bytes
from megatron.adaptive.planner.model_description import Model
from megatron.adaptive.planner.plan import Plan, place_ranks
from megatron.adaptive.planner.profile import LayerTimes, PlanInputs, Profile
from megatron.adaptive.schedule import catalog

_FREE = LinkSpeed(bytes_per_s=math.inf, shared=False)
_INPUT_S, _WEIGHT_S = "backward_input_s", "backward_weight_s"


@dataclass(frozen=True, kw_only=True)
class TriedRank:
    """Measurements of a rank that ``plan --try`` has run.

    Attributes:
        rank: Global rank.
        pp_rank: Position of the rank in the pipeline.
        device: Name of the device in profile files.
        memory_bytes: Peak memory of the rank in bytes. On a CPU, this is the resident memory of the
            process. On a GPU, it is the memory of tensors and the CUDA context.
        busy_s: Median time per step that the rank spends in actions, in seconds.
        optimizer_s: Median duration of the optimizer step, in seconds.
        beside_s: Median time per step that is spent outside of actions and optimizer, in seconds.
        forward_s: Median duration of a forward pass in seconds, for each chunk of the rank.
        backward_s: Median duration of a backward pass in seconds, for each chunk of the rank. It
            includes weight gradients if they are not separate actions.
        weight_s: Median time in seconds for computing the weight gradients of a microbatch, for
            each chunk, or 0 if weight gradients are not separate actions.
        sigma: Relative standard deviation of the durations of equal actions in a step.
    """

    rank: int
    pp_rank: int
    device: str
    memory_bytes: int
    busy_s: float
    optimizer_s: float
    beside_s: float
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    weight_s: Sequence[float]
    sigma: float


def tried_ranks(content: Mapping[str, Any], where: str) -> dict[int, TriedRank]:
    """Returns the measurements from ``plan --try`` in a plan file, keyed by global rank.

    The dict is empty if ``plan --try`` did not run any rank. ``where`` is the path of the file, for
    error messages.

    Raises:
        ConfigError: The entry ``tried`` is invalid.
    """
    names = {entry.name for entry in fields(TriedRank)}
    rows = content.get("tried", {}).get("ranks", [])
    for row in rows:
        if set(row) != names:
            raise ConfigError(
                f"{where}: each entry of tried.ranks must have exactly the keys"
                f" {', '.join(sorted(names))}; remove the entry 'tried', and run"
                ' "plan --try" again'
            )
    return {row["rank"]: TriedRank(**row) for row in rows}


def cluster_of(content: Mapping[str, Any], device: str, memory_bytes: float = 0.0) -> Cluster:
    """Returns a cluster for a plan: a single node whose links take no time.

    The node is named after its device, so links in a profile of this machine apply to it.

    Args:
        content: Contents of the plan file, which contain the parallel sizes.
        device: Name of the device in profile files.
        memory_bytes: Memory of each device in bytes.
    """
    ranks = math.prod(content["degrees"].get(name, 1) for name in _AXES)
    node = NodeType(
        name=device, gpu=device, gpus=ranks, memory_bytes=memory_bytes, intra=_FREE, network=_FREE
    )
    return Cluster(groups=(NodePool(type=node, count=1),), network=_FREE)


_AXES = ("tensor", "pipeline", "data", "context")


def plan_of(content: Mapping[str, Any], model: Model, cluster: Cluster, where: str) -> Plan:
    """Returns the plan in the plan file ``content``, whose stages must have equal parallel sizes.

    Args:
        content: Contents of the plan file, which contain the parallel sizes.
        model: Model of the plan.
        cluster: Cluster from :func:`cluster_of`.
        where: Path of the plan file, for error messages.

    Raises:
        ConfigError: A required key is missing, or the partition does not match the model.
    """
    for key in ("micro_batch_size", "global_batch_size", "schedule"):
        if key not in content:
            raise ConfigError(
                f'{where}: {key} is missing; write a complete plan with "plan --output"'
            )
    degrees = {name: content["degrees"].get(name, 1) for name in (*_AXES, "chunks", "expert")}
    tp, pp, dp = degrees["tensor"], degrees["pipeline"], degrees["data"]
    context, size = degrees["context"], content["micro_batch_size"]
    stages = pp * degrees["chunks"]
    counted = content.get("partition")
    if counted is None and model.num_counted % stages:
        raise ConfigError(
            f"{where}: partition is missing, and {model.num_counted} layers do not divide evenly"
            f" among {stages} stages; add the partition"
        )
    partition = model.stage_layers(counted or [model.num_counted // stages] * stages)
    return Plan(
        tp=tp,
        dp=dp,
        pp=pp,
        chunks=degrees["chunks"],
        micro_batch=size,
        global_batch=content["global_batch_size"],
        schedule=content["schedule"],
        partition=tuple(map(len, partition)),
        places=place_ranks(cluster, [0], tp=tp, dp=dp * context, pp=pp, micro_batch=size),
        recompute=content.get("recompute", "none"),
        distributed_optimizer=content.get("distributed_optimizer", False),
        overlap_reduce=content.get("overlap_grad_reduce", False),
        sequence_parallel=content.get("sequence_parallel", False),
        expert_ranks=degrees["expert"],
        context_ranks=context,
        slices=content.get("sequence_slices", 1),
        cap=content.get("activation_cap"),
    )


def needed_bytes(plan: Plan, model: Model, cluster: Cluster) -> list[float]:
    """Returns the predicted memory of each pipeline rank, in bytes."""
    no_time = LayerTimes(forward_s=0.0, backward_input_s=0.0)
    profile = Profile(estimator=lambda *key: no_time, context_bytes={cluster.types[0].gpu: 0.0})
    stages = StageSums.of(plan, PlanInputs(model, cluster, profile), OURS)
    return [memory.total_bytes for memory in stages.memory]


def fit_profile(
    plan: Plan,
    model: Model,
    cluster: Cluster,
    document: Mapping[str, Any],
    tried: Sequence[TriedRank],
    links: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns a profile whose predictions for the ranks in ``tried`` match the measurements.

    Args:
        plan: Plan whose ranks were tried.
        model: Model of the plan.
        cluster: Cluster whose links take no time, from :func:`cluster_of`.
        document: Contents of a profile file with measurements of one layer of each kind in
            isolation.
        tried: Measurements of the ranks that ``plan --try`` ran, all on the same device.
        links: Entries ``links`` and ``all_reduce`` for the profile, or empty if communication takes
            no time. They are copied unchanged, because ``plan --try`` runs ranks without
            communication.

    Returns:
        Contents of a profile file.
    """
    fit = _Fit(plan, PlanInputs(model, cluster, Profile()), dict(document), tuple(tried))
    rows = fit.layers()
    gpu = cluster.types[0].gpu
    changed: dict[str, Any] = {
        **document,
        "model": {"name": model.name, "arguments": list(model.arguments)},
        "layers": rows,
        "launch_s": {},
        "optimizer_s_per_parameter": {gpu: fit.optimizer_s()},
        "step_s": {gpu: fmean(rank.beside_s for rank in tried)},
        "action_sigma": fmean(rank.sigma for rank in tried),
    }
    missing = fit.missing_bytes(changed)
    changed["nodes"] = {
        name: {**facts, "context_bytes": max(0.0, facts["context_bytes"] + missing)}
        for name, facts in document["nodes"].items()
    }
    return {**changed, **links}


def most_bytes(plan: Plan, model: Model) -> float:
    """Returns the size in bytes of the largest message or all-reduce between two stages."""
    elements = max(model.layer(index).output_elements for index in range(len(model.layers) - 1))
    message = elements * model.precision.element_bytes * plan.micro_batch
    return max(message, tied_bytes(model, plan.tp))


def predicted_step_s(
    plan: Plan, model: Model, cluster: Cluster, document: Mapping[str, Any]
) -> float:
    """Returns the predicted step time of ``plan`` in seconds.

    Messages and all-reduces take no time unless the profile contains measured links.
    """
    profile = profile_file.make_profile(document)
    return predict(plan, PlanInputs(model, cluster, profile)).seconds


@dataclass(frozen=True)
class _Fit:
    """Adjusts a profile so that predictions for the ranks in ``tried`` match the measurements.

    Attributes:
        plan: Plan whose ranks were tried.
        inputs: Model and cluster.
        document: Contents of a profile file with layers that were measured in isolation.
        tried: Measurements of the ranks that ``plan --try`` ran.
    """

    plan: Plan
    inputs: PlanInputs
    document: dict[str, Any]
    tried: tuple[TriedRank, ...]

    def layers(self) -> list[dict[str, Any]]:
        """Returns rows of layer times, scaled by the ratio of measured to predicted time."""
        forward, _, _ = self._predicted_s(self.document)
        measured = [sum(sum(getattr(r, n)) for r in self.tried) for n in _MEASURED]
        rate = _ratio(measured[0], forward)
        rows = [{**row, "forward_s": row["forward_s"] * rate} for row in self.document["layers"]]
        # A backward pass with recomputation also contains a forward pass, whose time is already
        # scaled.
        no_backward = [{**row, _INPUT_S: 0.0, _WEIGHT_S: 0.0} for row in rows]
        _, again, _ = self._predicted_s({**self.document, "layers": no_backward})
        _, backward, weight = self._predicted_s({**self.document, "layers": rows})
        if measured[2] and weight:
            rates = _ratio(measured[1] - again, backward - again), _ratio(measured[2], weight)
        else:
            rates = (_ratio(measured[1] - again, backward + weight - again),) * 2
        return [
            {
                **row,
                _INPUT_S: row[_INPUT_S] * rates[0],
                _WEIGHT_S: row.get(_WEIGHT_S, 0.0) * rates[1],
            }
            for row in rows
        ]

    def optimizer_s(self) -> float:
        """Returns the optimizer time in seconds per updated parameter, from the measurements."""
        gpu = self.inputs.cluster.types[0].gpu
        stages = self._stages({**self.document, "optimizer_s_per_parameter": {gpu: 1.0}})
        updated = sum(stages.optimizer_s[rank.pp_rank] for rank in self.tried)
        return _ratio(sum(rank.optimizer_s for rank in self.tried), updated, otherwise=0.0)

    def missing_bytes(self, document: Mapping[str, Any]) -> float:
        """Returns the maximum number of bytes by which measured memory exceeds predicted memory.

        The maximum is over the ranks in ``tried``.
        """
        memory = self._stages(document).memory
        return max(rank.memory_bytes - memory[rank.pp_rank].total_bytes for rank in self.tried)

    def _stages(self, document: Mapping[str, Any]) -> StageSums:
        profile = profile_file.make_profile({**document, "launch_s": {}})
        return StageSums.of(self.plan, replace(self.inputs, profile=profile), OURS)

    def _predicted_s(self, document: Mapping[str, Any]) -> tuple[float, float, float]:
        """Returns the predicted times of F, B and W per microbatch, summed over ``tried``."""
        plan = self.plan
        placement = catalog.placement_for(plan.schedule, plan.pp, plan.chunks)
        held = [
            placement.stage_of(rank.pp_rank, chunk)
            for rank in self.tried
            for chunk in range(placement.num_chunks)
        ]
        durations = self._stages(document).durations_s[:, held] * plan.slices
        forward, backward, weight = durations.sum(axis=1)
        return float(forward), float(backward), float(weight)


_MEASURED = ("forward_s", "backward_s", "weight_s")


def _ratio(measured: float, predicted: float, *, otherwise: float = 1.0) -> float:
    return measured / predicted if measured > 0 and predicted > 0 else otherwise
