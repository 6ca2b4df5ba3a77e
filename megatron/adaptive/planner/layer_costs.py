"""Computes the time and memory of layers on a node type.

A layer's time is taken from the profile if it was measured. Otherwise, it is estimated from the
GPU's data sheet (:func:`make_estimator`). The estimate assumes that matrix multiplications run at
70% of the arithmetic peak, and that all other operations move their operands through memory at 80%
of the bandwidth. A pass takes at least as long as launching its kernels. For example, the estimate
for a layer with 1e12 FLOPs per forward pass, and 0.5 GB of activations and output, on an A100
(312e12 FLOP/s and 1555 GB/s) is::

    matmuls            1e12 / (0.7 x 312e12)         4.6 ms
    other operations   2 x 0.5e9 / (0.8 x 1555e9)    0.8 ms   each byte is written and read once
    forward                                          5.4 ms

Estimates ignore differences between kernel libraries and drivers. ``LayerTable.estimated`` is true
if a table contains an estimate.

The memory of weights, gradients and optimizer state is computed from the number of parameters. The
memory of activations is the memory per microbatch, multiplied by the maximum number of microbatches
in flight (:func:`in_flight`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from megatron.adaptive.config.sequence_slices import cut_points, slice_ends
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cluster import Gpu, NodeType, find_gpu
from megatron.adaptive.planner.documents import RunDocuments
from megatron.adaptive.planner.link_costs import (
    all_reduce_s,
    context_ring,
    exchange_of,
    link_within,
)
from megatron.adaptive.planner.model_description import LayerKind, Model
from megatron.adaptive.planner.plan import StageMemory, StageSettings
from megatron.adaptive.planner.profile import LayerTimes, PlanInputs
from megatron.adaptive.schedule import catalog
from megatron.adaptive.schedule.action import ActionKind
from megatron.adaptive.schedule.memory_caps import default_cap
from megatron.adaptive.schedule.validate import peak_units

CHANNELS_BYTES = 4 * 0.1e9
"""Memory of NCCL's channels on a rank, in bytes. A rank has two communicators (one per direction)
for each of its two neighbours in the pipeline. Each communicator takes about 100 MB. Ranks at the
ends of a pipeline need half of this memory."""


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Properties of the training program that a plan does not contain.

    By default, the planner predicts the performance of this project's trainer. Comparisons with
    other programs use a different runtime.

    Attributes:
        context_bytes: Memory in bytes that is not used for tensors: the device context, library
            buffers and code, and NCCL's channels.
        parameter_copies_bytes: Memory of temporary copies during gradient reduction and optimizer
            step, in bytes per parameter.
        sliced_messages: Whether each tensor-parallel rank sends only its part of a stage's output,
            so that receivers have to gather the parts.
        pipeline: Function that replaces the planner's computation of a pipeline's times. The
            function takes a plan and its ``cost.StageSums``, and returns
            ``order_timing.ScheduleTimes``, or ``None`` to use the planner's computation.
    """

    context_bytes: float = 0.5e9 + CHANNELS_BYTES
    parameter_copies_bytes: float = 0.0
    sliced_messages: bool = False
    pipeline: Callable[[Any, Any], Any] | None = None

    def slices_messages(self, settings: StageSettings) -> bool:
        """Returns whether each tensor-parallel rank sends only its part of a stage's output.

        Otherwise, each rank sends the whole output. ``settings`` contains the settings of the plan.
        """
        return self.sliced_messages or settings.sequence_parallel


OURS = Runtime()
"""Properties of this project's trainer, which are the default for predictions."""
PLAIN = StageSettings()
_GRADIENT_BYTES = 4
"""Size in bytes of an element of the gradients that are accumulated for keys and values."""
_HOST_MESSAGES = 8
"""Number of message buffers in host memory that are allocated but usually empty. They belong to the
queues between a rank and its neighbours (``transport.select.size_of_channel``)."""
_HOST_BLOCK_BYTES = 2**25
"""Minimum size in bytes of blocks that the C library allocates separately, and returns to the
system when they are freed.
"""
_HOST_FREE_BYTES = 2 * _HOST_BLOCK_BYTES
"""Maximum number of free bytes that the C library keeps at the end of its heap."""


@lru_cache(maxsize=4096)
def in_flight(
    schedule: str,
    pp: int,
    chunks: int,
    num_microbatches: int,
    slices: int = 1,
    cap: float | None = None,
    attention_share: float = 0.0,
) -> tuple[float, ...]:
    """Returns, for each rank, the maximum number of microbatches whose activations it holds.

    These microbatches are in flight: their forward pass has begun, but their backward pass has not
    ended. On a rank with several chunks, a microbatch in one chunk counts as ``1 / chunks``. For
    example, 1F1B on 4 ranks with at least 4 microbatches returns (4, 3, 2, 1). If sequences are cut
    into slices, slices are counted instead of microbatches.

    Args:
        schedule: Name of the schedule.
        pp: Number of pipeline ranks.
        chunks: Number of stages per rank.
        num_microbatches: Number of microbatches per step.
        slices: Number of slices per microbatch. With more than one slice, ``1f1b`` stands for the
            ``seq-1f1b`` order, and all other schedules are run-time rules.
        cap: Maximum number of microbatches that a rank holds under a run-time rule, or ``None`` for
            the rule's default.
        attention_share: Fraction of the cost of a sequence that is due to attention. If the
            fraction is above 0, slices of equal cost have different lengths, and the result is
            counted in slices of average length.
    """
    if slices > 1:
        most = num_microbatches * slices
        if schedule == "1f1b":
            held = tuple(float(min(pp - rank - 1 + slices, most)) for rank in range(pp))
        else:
            placement = catalog.placement_for(schedule, pp, chunks)
            limit = default_cap(placement, num_microbatches, slices) if cap is None else cap
            held = (min(limit, float(num_microbatches)) * slices,) * pp
        return tuple(min(most, _in_mean_slices(n, slices, attention_share)) for n in held)
    if schedule == "1f1b":
        return tuple(float(min(pp - rank, num_microbatches)) for rank in range(pp))
    placement = catalog.placement_for(schedule, pp, chunks)
    if catalog.is_rule(schedule):
        limit = default_cap(placement, num_microbatches) if cap is None else cap
        return (min(limit, float(num_microbatches)),) * pp
    return peak_units(catalog.make_schedule(schedule, placement, num_microbatches))


def _in_mean_slices(count: float, slices: int, attention_share: float) -> float:
    """Returns the maximum total length of ``count`` slices in flight, divided by the mean length.

    The backward passes of a microbatch's slices run in reverse order, so its first slices stay in
    memory the longest. The first slices are also the longest slices. Only two microbatches are
    partly in memory: the oldest, whose backward passes have begun, and the newest. All slices of
    the microbatches between these two are in memory.

    Args:
        count: Number of slices in flight.
        slices: Number of slices per microbatch.
        attention_share: Fraction of the cost of a sequence that is due to attention.
    """
    if not attention_share:
        return float(count)
    points = cut_points(slices, attention_share)
    numbers = range(slices + 1)
    largest = 0.0
    for oldest in range(1, slices + 1):
        whole, newest = divmod(max(count - oldest, 0.0), slices)
        first, last = np.interp([min(oldest, count), newest], numbers, points)
        largest = max(largest, first + whole + last)
    return float(largest * slices)


@lru_cache(maxsize=4096)
def waiting(
    schedule: str,
    pp: int,
    chunks: int,
    num_microbatches: int,
    slices: int = 1,
    cap: float | None = None,
    attention_share: float = 0.0,
) -> tuple[float, ...]:
    """Returns the maximum number of microbatches that wait for weight gradients (W) on each rank.

    A waiting microbatch has computed its input gradients (B) but not yet its weight gradients (W).

    On a rank with several chunks, a microbatch in one chunk counts as ``1 / chunks``. A run-time
    scheduling rule may postpone the weight gradients of all microbatches in flight. The arguments
    have the same meaning as in :func:`in_flight`.
    """
    if catalog.is_rule(schedule):
        return in_flight(schedule, pp, chunks, num_microbatches, slices, cap, attention_share)
    if not catalog.splits_backward(schedule):
        return (0.0,) * pp
    placement = catalog.placement_for(schedule, pp, chunks)
    most = []
    for order in catalog.make_schedule(schedule, placement, num_microbatches).orders:
        steps = [{ActionKind.B: 1, ActionKind.W: -1}.get(action.kind, 0) for action in order]
        most.append(max(accumulate(steps)) / placement.num_chunks)
    return tuple(most)


def stage_memory(
    model: Model,
    *,
    parameters: Any,
    expert_parameters: Any = 0.0,
    frozen_parameters: Any = 0.0,
    kept_bytes: Any = 0.0,
    held: float = 0.0,
    workspace_bytes: Any = 0.0,
    dp: int = 1,
    settings: StageSettings = PLAIN,
    limit_bytes: float = 0.0,
    runtime: Runtime = OURS,
    context_bytes: float | None = None,
) -> StageMemory:
    """Adds up the memory that a stage needs on its GPU.

    If arguments are arrays, each element describes one stage, and the result contains arrays.

    Args:
        model: Model that defines the bytes per parameter, gradient and optimizer state.
        parameters: Number of parameters on the GPU, including experts.
        expert_parameters: Number of parameters on the GPU that belong to experts.
        frozen_parameters: Number of parameters on the GPU that are not trained.
        kept_bytes: Size in bytes of the activations that all layers of the rank keep for one
            microbatch.
        held: Maximum number of microbatches in flight, from :func:`in_flight`.
        workspace_bytes: Size in bytes of the largest workspace that a layer needs while it runs.
        dp: Number of data-parallel replicas.
        settings: Settings of the plan, such as whether the replicas divide the optimizer state.
        limit_bytes: Usable memory of the GPU in bytes.
        runtime: Properties of the training program.
        context_bytes: Measured memory in bytes that the process uses besides its tensors, or
            ``None`` for the value in ``runtime``.
    """
    context = runtime.context_bytes if context_bytes is None else context_bytes
    besides = context + parameters * runtime.parameter_copies_bytes
    sizes = model.precision
    trained = parameters - frozen_parameters
    return StageMemory(
        # Each fp8 weight has two additional one-byte copies, one of them transposed.
        parameter_bytes=parameters * (sizes.parameter_bytes + 2 * sizes.fp8),
        gradient_bytes=trained * sizes.gradient_bytes,
        optimizer_bytes=settings.state_parameters(trained, expert_parameters, dp)
        * sizes.optimizer_bytes,
        activation_bytes=kept_bytes * held,
        workspace_bytes=workspace_bytes + besides,
        limit_bytes=limit_bytes,
    )


@dataclass(frozen=True, eq=False)
class LayerTable:
    """Costs of all layers of a model on one GPU, as arrays of shape ``[layers]`` (float64).

    Times and sizes are for one microbatch, or for one slice of average size if sequences are cut
    into slices. The workspace is for the longest slice. If documents are packed, times are for a
    slice with the average number of token pairs that attend to each other.

    Attributes:
        estimated: Whether any time was estimated instead of measured.
        forward_s: Duration of a forward pass in seconds, including tensor-parallel communication.
        backward_s: Time for computing the input gradients in seconds, including recomputation.
        weight_s: Time for computing the weight gradients in seconds, or 0 if the profile measured
            the backward pass as a whole.
        launch_s: Part of ``forward_s`` that is spent launching kernels, in seconds. Kernels can be
            launched before the input arrives. ``backward_s`` contains the same launch time.
        tp_s: Part of ``forward_s`` and ``backward_s`` that is spent on communication, in seconds.
            It includes the exchange of tokens between experts. It also includes the messages
            between tensor-parallel ranks, unless these are part of the measured times.
        pair_s: Part of ``forward_s`` per pair of tokens that attend to each other, in seconds, or 0
            for plans without packed documents.
        pair_back_s: Part of ``backward_s`` per pair of tokens that attend to each other, in
            seconds.
        parameters: Number of parameters on the GPU, including experts.
        expert_parameters: Number of parameters on the GPU that belong to experts.
        frozen_parameters: Number of parameters on the GPU that are not trained.
        kept_bytes: Size in bytes of the activations kept from the forward to the backward pass.
        workspace_bytes: Size in bytes of the additional memory that the layer uses while it runs.
        waiting_bytes: Size in bytes of the additional data kept between the computation of input
            gradients and weight gradients.
        gathered_bytes: Size in bytes of the accumulated gradients of keys and values of a whole
            microbatch, or 0 if sequences are not cut into slices.
    """

    estimated: bool
    forward_s: Any
    backward_s: Any
    weight_s: Any
    launch_s: Any
    tp_s: Any
    pair_s: Any
    pair_back_s: Any
    parameters: Any
    expert_parameters: Any
    frozen_parameters: Any
    kept_bytes: Any
    workspace_bytes: Any
    waiting_bytes: Any
    gathered_bytes: Any


def layer_table(
    inputs: PlanInputs,
    node: NodeType,
    *,
    tp: int,
    micro_batch: int,
    settings: StageSettings = PLAIN,
    others: Sequence[NodeType] = (),
) -> LayerTable:
    """Returns the times and memory sizes of all layers on the node type ``node``.

    The table is computed once per combination of arguments, and cached in ``inputs.layer_tables``.

    Args:
        inputs: Model, cluster and profile of layer times.
        node: Type of the node on which the layers run.
        tp: Number of tensor-parallel ranks.
        micro_batch: Number of samples per microbatch.
        settings: Settings of the plan. If sequences are cut into slices, the table describes one
            slice.
        others: Types of all nodes that share experts or sequences with this node. The slowest link
            between this node and these nodes is used. If empty, only ``node`` is used.

    Raises:
        ConfigError: The profile does not contain the time of a layer.
    """
    expert_ranks, context_ranks = settings.expert_ranks, settings.context_ranks
    key: Any = (node.name, tp, micro_batch, settings.recompute, settings.sequence_parallel)
    if expert_ranks * context_ranks > 1:
        key = (*key, expert_ranks, context_ranks, *(other.name for other in others or (node,)))
    if settings.is_cut:
        key = (*key, "slices", settings.slices, settings.slice_tokens)
    if key in inputs.layer_tables:
        cached: LayerTable = inputs.layer_tables[key]
        return cached
    rows = {}
    is_estimated = False
    setup = _LayerSetup(
        inputs=inputs,
        node=node,
        tp=tp,
        # If ranks share sequences, or sequences are cut into slices, scale the number of samples:
        # one half of every sequence counts as one half of the samples.
        samples=micro_batch * settings.share_of(inputs.model.sequence) / context_ranks,
        longest_slice=_longest_slice(inputs.model, settings, tp),
        settings=settings,
        exchange=exchange_of(inputs, node, others or (node,), tp, expert_ranks),
        ring=context_ring(inputs, node, others or (node,), tp, context_ranks),
    )
    for name in dict.fromkeys(inputs.model.layers):
        kind, times = setup.measured(name)
        is_estimated |= times.source == "estimated"
        rows[name] = (*_layer_seconds(setup, kind, times), *_layer_bytes(setup, kind, times))
    columns = np.array([rows[name] for name in inputs.model.layers], dtype=np.float64).T
    table = inputs.layer_tables[key] = LayerTable(is_estimated, *columns)
    return table


def known_documents(inputs: PlanInputs) -> RunDocuments:
    """Returns the documents in ``inputs``, which plans with ``slice_tokens`` require."""
    assert inputs.documents is not None, "plans with slice_tokens need the lengths of documents"
    return inputs.documents


def _longest_slice(model: Model, settings: StageSettings, tp: int) -> float:
    """Returns the length of the longest slice of a sequence divided by the average length."""
    slices, share = settings.slices, model.attention_share
    if slices == 1:
        return 1.0
    try:
        ends = slice_ends(model.sequence, slices, tp if settings.sequence_parallel else 1, share)
    # Sequences of this length cannot be cut exactly, and the trainer rejects them. Estimate the
    # result from the approximate cut points.
    except ConfigError:
        return cut_points(slices, share)[1] * slices
    longest = max(end - start for start, end in pairwise((0, *ends)))
    return longest * slices / model.sequence


@dataclass(frozen=True, kw_only=True)
class _LayerSetup:
    """Inputs, settings and communication times that all layers of a table share.

    Attributes:
        inputs: Model, cluster and profile of layer times.
        node: Type of the node on which the layers run.
        tp: Number of tensor-parallel ranks.
        samples: Number of samples per microbatch on each rank. The number is fractional if ranks
            share sequences or if sequences are cut into slices.
        longest_slice: Length of the longest slice divided by the average length.
        settings: Settings of the plan.
        exchange: Function that takes a number of bytes and returns the time in seconds to exchange
            tokens between experts, from :func:`exchange_of`.
        ring: Function that takes a number of bytes and returns the time in seconds to send keys and
            values to the next rank that shares the sequence, from :func:`context_ring`.
    """

    inputs: PlanInputs
    node: NodeType
    tp: int
    samples: float
    longest_slice: float
    settings: StageSettings
    exchange: Callable[[float], float]
    ring: Callable[[float], float]

    def measured(self, name: str) -> tuple[LayerKind, LayerTimes]:
        """Returns the layer kind called ``name``, and its measured or estimated times.

        The kind depends on the number of ranks over which the experts are distributed.
        """
        base = self.inputs.model.kinds[name]
        kind = self.inputs.model.kinds.get(f"{name}/{self.settings.expert_ranks}", base)
        # If experts are distributed over ranks, the busiest rank has more work than the average
        # rank. Scale the times to the work of the busiest rank.
        load = kind.forward_flops / (base.forward_flops or 1)
        times = self.inputs.profile.times(
            kind.name, self.node.gpu, self.tp, self.samples, load or 1.0
        )
        return kind, times.slowed(self.node.slowness)

    @property
    def slices(self) -> int:
        """Number of slices per microbatch. If documents are packed, this is the maximum per row."""
        tokens = self.settings.slice_tokens
        if tokens is None:
            return self.settings.slices
        return known_documents(self.inputs).most_slices(tokens)

    def pairs_share(self, kind: LayerKind) -> float:
        """Returns the number of token pairs that attend to each other, relative to whole sequences.

        The result is less than 1 if documents are shorter than whole sequences. For layers with an
        attention window, the result is 1, because each token attends to a fixed number of tokens.
        """
        tokens = self.settings.slice_tokens
        if tokens is None or kind.is_local:
            return 1.0
        pairs = known_documents(self.inputs).mean_pairs(tokens)
        return pairs / (tokens * self.inputs.model.sequence)

    def passes_keys(self, kind: LayerKind) -> bool:
        """Returns whether the ranks that share a sequence send keys and values around a ring.

        Attention in Transformer Engine uses a ring. For all other implementations, each rank
        gathers the keys and values of the whole sequence first.
        """
        return not kind.attention_bytes and not self.inputs.model.has_own_kernels


class _LayerSeconds(NamedTuple):
    """Times of a layer in seconds. The fields are explained in ``LayerTable``."""

    forward_s: float
    backward_s: float
    weight_s: float
    launch_s: float
    tp_s: float
    pair_s: float
    pair_back_s: float


class _LayerBytes(NamedTuple):
    """Parameters and memory sizes of a layer. The fields are explained in ``LayerTable``."""

    parameters: float
    expert_parameters: float
    frozen_parameters: float
    kept_bytes: float
    workspace_bytes: float
    waiting_bytes: float
    gathered_bytes: float


def _layer_seconds(setup: _LayerSetup, kind: LayerKind, times: LayerTimes) -> _LayerSeconds:
    """Returns the times of a layer in seconds, including communication and recomputation."""
    tp = setup.tp
    samples = setup.samples
    recompute = setup.settings.recompute
    context_ranks = setup.settings.context_ranks
    # Every forward pass sends tokens to their experts and back, which takes two exchanges.
    once = 2 * setup.exchange(kind.routed_bytes * samples / tp)
    if tp > 1 and not times.tp_included and kind.tp_bytes:
        link = link_within(setup.inputs, setup.node, tp)
        once += all_reduce_s(link, kind.tp_bytes * samples, tp)
    whole_attention = times.forward_s * kind.attention_flops / (kind.forward_flops or 1)
    attention = whole_attention * setup.pairs_share(kind)
    saved = whole_attention - attention
    # Attention is assumed to take twice as long in a backward pass as in a forward pass, but at
    # most as long as the measured backward pass.
    back = min(2.0, times.backward_input_s / whole_attention) if whole_attention else 0.0
    saved_back = back * saved
    # Each rank that shares a sequence sends the keys and values of its part to all other ranks. On
    # a ring, a rank computes the attention of one part while it receives the next part. The
    # backward pass on a ring sends and computes twice as much. Without a ring, all parts arrive
    # before the attention begins, and the backward pass sends gradients of the same size back.
    is_ring = setup.passes_keys(kind)
    part_s = setup.ring(kind.context_bytes * samples / tp)
    turns = context_ranks - 1
    passed = turns * (max(part_s - attention / context_ranks, 0.0) if is_ring else part_s)
    passed_back = passed * (2 if is_ring else 1)
    forward = times.forward_s - saved + once + passed
    backward = times.backward_input_s - saved_back + once + passed_back
    communication = 2 * once + passed + passed_back
    if recompute == "full" and kind.counted:
        backward += forward
        communication += once + passed
    elif recompute == "selective":
        backward += attention + passed
        communication += passed
    pairs = 0.0
    if (tokens := setup.settings.slice_tokens) is not None and not kind.is_local:
        pairs = whole_attention / (tokens * setup.inputs.model.sequence)
    repeats = recompute == "selective" or (recompute == "full" and kind.counted)
    return _LayerSeconds(
        forward_s=forward,
        backward_s=backward,
        weight_s=times.backward_weight_s,
        launch_s=min(times.launch_s, times.forward_s - saved, times.backward_input_s - saved_back),
        tp_s=communication,
        pair_s=pairs,
        pair_back_s=pairs * (back + repeats),
    )


def _layer_bytes(setup: _LayerSetup, kind: LayerKind, times: LayerTimes) -> _LayerBytes:
    """Returns the number of parameters of a layer, and its memory sizes per microbatch in bytes."""
    tp, samples = setup.tp, setup.samples
    model = setup.inputs.model
    recompute, sequence_parallel = setup.settings.recompute, setup.settings.sequence_parallel
    shared = tp if sequence_parallel else 1
    whole = times.kept_bytes
    if whole is None or not model.has_experts:
        # The measured size of a model with experts already includes sequence parallelism.
        whole = kind.kept_bytes(tp) * samples if whole is None else whole
        whole -= kind.replicated_activation_bytes * samples * (1 - 1 / shared)
    if not setup.passes_keys(kind):
        # Gathered keys and values are kept together with the attention scores. Selective
        # recomputation drops all of these.
        whole += kind.context_bytes / tp * samples * (setup.settings.context_ranks - 1)
    kept = kind.kept_bytes(tp, recompute, sequence_parallel=sequence_parallel) * samples
    if recompute == "none" or not kind.counted:
        kept = whole
    slices = setup.slices
    gathered = 0.0
    if slices > 1:
        # Without a fused kernel, a slice keeps only its attention scores with earlier tokens.
        scores = kind.attention_bytes if recompute == "none" else 0.0
        kept -= scores / tp * samples * (slices - 1) / (2 * slices)
        # Keys and values are kept until the backward pass of the first slice. Their gradients are
        # accumulated in 32 bits.
        kept += kind.keys_bytes / tp * samples
        gathered = kind.keys_bytes / tp * samples * slices
        gathered *= _GRADIENT_BYTES / model.precision.element_bytes
    # A backward pass with recomputation holds all activations of the recomputed layer. The longest
    # slice, which is the first one, needs the most memory. Its attention scores are an exception:
    # they are not larger than average, because the first slice attends to the fewest tokens.
    longest = setup.longest_slice
    working = kind.workspace_bytes / tp * samples * longest + max(whole - kept, 0.0)
    working += max(whole - kept - kind.attention_bytes / tp * samples, 0.0) * (longest - 1)
    share = setup.inputs.profile.allocator_share.get(setup.node.gpu)
    messages = 0 if share is None else _HOST_MESSAGES
    # Sequence parallelism gathers whole sequences into a buffer before every matrix multiplication.
    whole_outputs = messages / shared + (shared > 1 and kind.forward_flops > 0)
    output = kind.output_elements * model.precision.element_bytes * samples * longest
    working += whole_outputs * output
    if share:
        # The allocator returns large blocks to the system when they are freed. Small blocks lie
        # between blocks that are in use, so their memory stays with the process.
        block = kind.attention_bytes / tp * samples
        is_large = block >= _HOST_BLOCK_BYTES
        kept = whole if recompute == "selective" and not is_large else kept
        kept += share * (kept - block * (is_large and recompute == "none"))
        working *= 1.0 if is_large else 1 + share
        working += min(working, _HOST_FREE_BYTES)
    waits = recompute == "full" and kind.counted
    waiting = kind.weight_bytes / tp + kind.replicated_activation_bytes / shared
    return _LayerBytes(
        parameters=kind.held_parameters(tp),
        expert_parameters=kind.expert_parameters / tp,
        frozen_parameters=kind.frozen_parameters / tp,
        kept_bytes=max(kept, 0.0),
        workspace_bytes=working,
        waiting_bytes=waiting * samples if waits else 0.0,
        gathered_bytes=gathered,
    )


def range_sums(values: Any) -> Any:
    """Returns the sum of every range of ``values``, ``[n + 1, n + 1]`` for ``n`` values.

    Entry ``[begin, end]`` is the sum of ``values[begin:end]``.
    """
    total = np.concatenate([[0.0], np.cumsum(values)])
    return total[None, :] - total[:, None]


def range_largest(values: Any) -> Any:
    """Returns the maximum of every range of ``values``, ``[n + 1, n + 1]`` for ``n`` values.

    Entry ``[begin, end]`` is the maximum of ``values[begin:end]``, or 0 if the range is empty.
    """
    count = len(values)
    largest = np.zeros((count + 1, count + 1))
    for begin in range(count if np.any(values) else 0):
        largest[begin, begin + 1 :] = np.maximum.accumulate(values[begin:])
    return largest


MATRIX_SHARE = 0.7
"""Average fraction of the arithmetic peak that the large matrix multiplications of a layer achieve.

Source: Narayanan et al. 2021 (arXiv:2104.04473), table 1, and Korthikanti et al. 2022
(arXiv:2205.05198), table 5. They report 44-57% of the peak for whole training steps on A100. Matrix
multiplications take about three quarters of these steps.
"""
MEMORY_SHARE = 0.8
"""Fraction of the memory bandwidth that element-wise kernels achieve. Source: BabelStream, which
reports 0.8 to 0.93 of the data sheet's bandwidth for V100, A100 and H100."""
LAUNCH_S = 5e-6
"""Time to launch a kernel, in seconds. Source: NVIDIA's CUDA programming guides, which report a few
microseconds."""
_KERNELS = 20
"""Number of kernels in the forward pass of a transformer layer without fused kernels: 4 matrix
multiplications, 2 more in the attention, 2 norms, biases, activation, softmax, dropout and
additions."""
_FEW_KERNELS = 4
"""Number of kernels in the forward pass of a layer without attention, and in the computation of any
layer's weight gradients.
"""
_OPTIMIZER_MOVES = 7
"""Number of four-byte values that Adam reads or writes per parameter. Adam reads the gradient, the
master weight and two moments. It writes the master weight and the two moments."""


def make_estimator(model: Model) -> Callable[[str, str, int, float], LayerTimes]:
    """Returns a function that estimates the times of layers that the profile does not contain.

    Returns:
        Function that takes the layer kind, the GPU, the number of tensor-parallel ranks and the
        samples per microbatch, and returns the estimated times. The times exclude communication
        between tensor-parallel ranks. The function raises ``ConfigError`` if the GPU or kind is
        unknown, or if the GPU does not support the model's precision.
    """

    @cache
    def estimate(kind: str, gpu: str, tp: int, micro_batch: float) -> LayerTimes:
        if kind not in model.kinds:
            raise ConfigError(f"model {model.name} has no layers of kind {kind!r}")
        return _estimate(model, model.kinds[kind], find_gpu(gpu, "cluster"), tp, micro_batch)

    return estimate


def _estimate(model: Model, kind: LayerKind, gpu: Gpu, tp: int, micro_batch: float) -> LayerTimes:
    """Estimates the times of a layer of the given ``kind`` from its FLOPs and memory traffic."""
    sizes = model.precision
    pace = gpu.peak(sizes.name) * MATRIX_SHARE
    moving = gpu.memory_bytes_per_s * MEMORY_SHARE
    linear_s = micro_batch * (kind.forward_flops - kind.attention_flops) / tp / pace
    if sizes.fp8 and kind.counted:
        linear_s *= gpu.peak(sizes.name) / gpu.peak("fp8")
    attention_s = micro_batch * kind.attention_flops / tp / pace
    # Kept activations and the output are written once and read at least once, so each byte counts
    # twice.
    kept = micro_batch * kind.kept_bytes(tp)
    output = micro_batch * kind.output_elements * sizes.element_bytes
    elements_s = 2 * (kept + output) / moving
    weights = kind.held_parameters(tp)
    # Matrix multiplications read all weights, even for few samples. An embedding lookup reads only
    # a few rows of the table.
    read_s = weights * sizes.parameter_bytes / moving if kind.forward_flops else 0.0
    gradient_s = (
        weights * (sizes.parameter_bytes * sizes.trained + 2 * sizes.gradient_bytes) / moving
    )
    launches_s = LAUNCH_S * (_KERNELS if kind.attention_flops else _FEW_KERNELS)
    input_s = max(linear_s, read_s) + 2 * attention_s + 1.5 * elements_s
    weight_s = linear_s * sizes.trained + gradient_s
    undeferred_s = weight_s * kind.output_flops / (kind.forward_flops or 1)
    input_s += undeferred_s
    return LayerTimes(
        forward_s=max(launches_s, max(linear_s, read_s) + attention_s + elements_s),
        backward_input_s=max(launches_s, input_s) if kind.forward_flops else launches_s,
        backward_weight_s=max(LAUNCH_S * _FEW_KERNELS, weight_s - undeferred_s),
        source="estimated",
    )


def estimate_optimizer_s(model: Model, gpu: Gpu) -> float:
    """Estimates the optimizer's time per updated parameter, in seconds.

    Args:
        model: Model that defines the bytes per parameter and the fraction of trained parameters.
        gpu: GPU on which the optimizer runs.
    """
    moved = (4 * _OPTIMIZER_MOVES + model.precision.parameter_bytes) * model.precision.trained
    return moved / (gpu.memory_bytes_per_s * MEMORY_SHARE)
