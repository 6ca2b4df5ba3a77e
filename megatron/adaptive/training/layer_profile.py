"""Measures the layers of a model, each kind by itself, as the pipeline's executor would run them.

A model of few layers is cut into three stages, so that every kind is alone in one::

    stage 0     embedding
    stage 1     transformer layers: once 1 of them, once 3; the difference is 2 layers
    stage 2     last normalization, logits and loss

One process takes the part of each stage in turn; no pipeline is needed. Ranks of a tensor-parallel
group work together, and all ranks of the job measure at the same time, as they would train.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state

from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.engine.deferred_layers import attach_stores
from megatron.adaptive.engine.stages import (
    ActivationMeter,
    MegatronStages,
    default_process_groups,
)
from megatron.adaptive.gpt.forward import ChunkFeed, DropoutKeys, GptForward
from megatron.adaptive.gpt.model import build_chunks, build_optimizer, transformer_config
from megatron.adaptive.gpt.setup import payload_shape
from megatron.adaptive.schedule.placement import Placement

__all__ = ["FEW", "MANY", "STAGES", "KindSample", "StageSample", "layer_samples", "measure_stage"]

STAGES = 3
FEW, MANY = 1, 3
"""Transformer layers of the middle stage; their difference tells a layer from a stage."""
_WARM_UP = 2
_LEAST_LOGS = 4
_QUARTILES_OF_SIGMA = 1.349  # between the quartiles of a normal distribution
_LEAST_SHARE = 0.5  # of the mean that a layer takes at least, where the difference says less


@dataclass(frozen=True, kw_only=True)
class StageSample:
    """What one stage took on this rank, medians over microbatches.

    Attributes:
        forward_s: of a microbatch.
        backward_input_s: the same; the whole backward where it is not split.
        backward_weight_s: the same; 0 where it is not split.
        kept_bytes: kept from forward to backward.
        parameters: numbers that this rank holds.
        optimizer_s: one step of the optimizer, 0 where it was not asked for.
        sigma: spread of the logarithm of durations around their median, from quartiles.
    """

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    kept_bytes: float
    parameters: float
    optimizer_s: float = 0.0
    sigma: float = 0.0


@dataclass(frozen=True, kw_only=True)
class KindSample:
    """The same of one layer of a kind.

    Attributes:
        kind: ``embedding``, ``transformer`` or ``head``.
        sample: of one layer.
    """

    kind: str
    sample: StageSample


def layer_samples(
    first: StageSample, few: StageSample, many: StageSample, last: StageSample
) -> tuple[list[KindSample], float]:
    """Turn what stages took into what layers take.

    Args:
        first: of the stage with the embedding.
        few: of the stage with ``FEW`` layers.
        many: of that with ``MANY``.
        last: of the stage with the loss.

    Returns:
        One sample for each kind, and the seconds that a forward costs beyond its layers.
    """

    def each(name: str) -> float:
        low, high = getattr(few, name), getattr(many, name)
        # Noise may make the difference small; a layer is never far from the mean.
        return float(max((high - low) / (MANY - FEW), _LEAST_SHARE * high / MANY))

    names = ("forward_s", "backward_input_s", "backward_weight_s", "kept_bytes", "parameters")
    layer = StageSample(**{name: each(name) for name in names})
    launch_s = max(0.0, few.forward_s - FEW * layer.forward_s)
    samples = [("embedding", first), ("transformer", layer), ("head", last)]
    return [KindSample(kind=kind, sample=sample) for kind, sample in samples], launch_s


def measure_stage(
    config: TrainerConfig,
    accelerator: Accelerator,
    stage: int,
    *,
    rows: int,
    repeats: int,
    optimizer: bool = False,
) -> StageSample:
    """Build one of the three stages and run microbatches through it.

    Collective over the tensor-parallel group. The mesh has pipeline size 1; ``config`` has 3.

    Args:
        config: settings of a run with three stages.
        accelerator: this rank's device.
        stage: which one.
        rows: of the embedding.
        repeats: microbatches that count.
        optimizer: whether to measure a step of the optimizer too.
    """
    placement = Placement(num_ranks=STAGES, num_chunks=1)
    groups = default_process_groups()
    parallel_state.set_pipeline_model_parallel_rank(stage)
    parallel_state.set_pipeline_model_parallel_world_size(STAGES)
    try:
        core = transformer_config(config, accelerator)
        chunks = build_chunks(config, core, accelerator, placement, rows)
        sample = _run(config, core, accelerator, placement, stage, chunks, groups, repeats)
    finally:
        parallel_state.set_pipeline_model_parallel_rank(None)
        parallel_state.set_pipeline_model_parallel_world_size(None)
    parameters = sum(parameter.numel() for parameter in chunks[0].parameters())
    optimizer_s = 0.0
    if optimizer:
        optimizer_s = _optimizer_s(config, accelerator, chunks, repeats)
    del chunks
    gc.collect()
    if accelerator.is_cuda:
        torch.cuda.empty_cache()
    return StageSample(**sample, parameters=float(parameters), optimizer_s=optimizer_s)


def _run(
    config: TrainerConfig,
    core: Any,
    accelerator: Accelerator,
    placement: Placement,
    stage: int,
    chunks: Sequence[Any],
    groups: Any,
    repeats: int,
) -> dict[str, float]:
    count = repeats + _WARM_UP
    dropout = DropoutKeys(
        config.run.seed,
        enabled=config.model.hidden_dropout > 0 or config.model.attention_dropout > 0,
    )
    dropout.attach(chunks)
    needs_data = stage in (0, STAGES - 1)
    batches = [_batch(config)] * count if needs_data else None
    meter = ActivationMeter()
    split = config.splits_backward
    for chunk in chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    stages = MegatronStages(
        forward_step_func=GptForward(accelerator, dropout),
        data_iterators=[ChunkFeed(batches, count=count, step=1)],
        chunks=chunks,
        placement=placement,
        pp_rank=stage,
        num_microbatches=count,
        groups=groups,
        meter=meter,
        forward_only=False,
        collect_non_loss_data=False,
        first_val_step=None,
        split=split,
        stores=attach_stores(chunks) if split else None,
    )
    try:
        times = [
            _microbatch(stages, index, stage, config, core, accelerator, split)
            for index in range(count)
        ]
    finally:
        stages.finish()
    names = ("forward_s", "backward_input_s", "backward_weight_s")
    columns = zip(*times[_WARM_UP:], strict=True)
    medians = {name: statistics.median(values) for name, values in zip(names, columns, strict=True)}
    lanes = zip(*times[_WARM_UP:], strict=True)
    return {**medians, "kept_bytes": float(meter.bytes_of(0)), "sigma": spread(list(lanes))}


def spread(lanes: Sequence[Sequence[float]]) -> float:
    """Return the sigma of the logarithm of durations around the median of their lane.

    From quartiles, so that one that the system interrupted does not count as the rule.

    Args:
        lanes: durations of the same work, for each kind of work.
    """
    logs: list[float] = []
    for values in lanes:
        middle = statistics.median(values)
        logs += [math.log(value / middle) for value in values if middle > 0 and value > 0]
    if len(logs) < _LEAST_LOGS:
        return 0.0
    low, _, high = statistics.quantiles(logs, n=4)
    return (high - low) / _QUARTILES_OF_SIGMA


def _microbatch(
    stages: MegatronStages,
    index: int,
    stage: int,
    config: TrainerConfig,
    core: Any,
    accelerator: Accelerator,
    split: bool,
) -> tuple[float, float, float]:
    """Run forward, backward and weight gradients of one microbatch; returns their seconds."""
    shape, dtype, device = payload_shape(config), core.pipeline_dtype, accelerator.device
    received = torch.randn(shape, dtype=dtype, device=device) if stage else None
    gradient = None
    if stage < STAGES - 1:
        gradient = torch.randn(shape, dtype=dtype, device=device)
    marks = [_now(accelerator)]
    stages.forward(0, index, received)
    marks.append(_now(accelerator))
    stages.release(0, index)
    stages.backward(0, index, gradient)
    marks.append(_now(accelerator))
    if split:
        stages.weights(0, index, 0, 1)
    marks.append(_now(accelerator))
    forward_s, input_s, weight_s = (b - a for a, b in itertools.pairwise(marks))
    return forward_s, input_s, weight_s if split else 0.0


def _now(accelerator: Accelerator) -> float:
    accelerator.synchronize()
    return time.perf_counter()


def _batch(config: TrainerConfig) -> dict[str, torch.Tensor]:
    shape = (config.batch.micro_batch_size, config.model.seq_length)
    assert config.data.vocab_size is not None
    generator = torch.Generator().manual_seed(config.run.seed)
    tokens = torch.randint(config.data.vocab_size, shape, generator=generator)
    return {
        "tokens": tokens,
        "labels": tokens,
        "position_ids": torch.arange(shape[1]).expand(shape).contiguous(),
        "loss_mask": torch.ones(shape),
    }


def _optimizer_s(
    config: TrainerConfig, accelerator: Accelerator, chunks: Sequence[Any], repeats: int
) -> float:
    optimizer = build_optimizer(config, chunks)
    times = []
    for _ in range(_WARM_UP + repeats):
        begin_s = _now(accelerator)
        optimizer.step()
        times.append(_now(accelerator) - begin_s)
    return statistics.median(times[_WARM_UP:])
