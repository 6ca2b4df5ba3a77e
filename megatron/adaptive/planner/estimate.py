"""Durations of layers that nobody measured, from what vendors publish of a GPU: a roofline.

A layer's matrix products run at a share of the arithmetic peak, everything else moves its operands
through memory at a share of the bandwidth, and nothing takes less than the launches of its kernels.
An estimate is for want of better: it knows no kernel library and no driver, and says so by its
source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.gpus import Gpu, find_gpu
from megatron.adaptive.planner.model import LayerKind, Model
from megatron.adaptive.planner.profile import LayerTimes

__all__ = ["estimate_layer", "estimate_optimizer_s", "make_estimator"]

MATRIX_SHARE = 0.7
"""Of the arithmetic peak that large matrix products of a layer reach together.

Source: Narayanan et al. 2021 (arXiv:2104.04473), table 1, and Korthikanti et al. 2022
(arXiv:2205.05198), table 5, report 44-57% of the peak for whole training steps on A100, in which
matrix products take about three quarters of the time.
"""
MEMORY_SHARE = 0.8
"""Of the memory bandwidth that element-wise kernels reach. Source: BabelStream's figures for V100,
A100 and H100 are between 0.8 and 0.93 of the data sheets'."""
LAUNCH_S = 5e-6
"""Of one kernel. Source: NVIDIA's CUDA programming guides tell some microseconds."""
_KERNELS = 20
"""Of a transformer layer's forward without fusion: 4 products, 2 of the attention, 2 norms, and
bias, activation, softmax, dropout, addition."""
_FEW_KERNELS = 4
_OPTIMIZER_MOVES = 7
"""Numbers of four bytes that Adam moves for each parameter: it reads gradient, master weight and
two moments, and writes master weight and moments."""


def make_estimator(
    model: Model, gpus: Mapping[str, Gpu] | None = None
) -> Callable[[str, str, int, int], LayerTimes]:
    """Return what answers for layers that a profile does not hold.

    Args:
        model: whose layers they are.
        gpus: parts by the name that the cluster uses; others are looked up in the table.

    Returns:
        A function of layer kind, GPU, tensor-parallel ranks and samples of a microbatch, which
        raises ``ConfigError`` for an unknown GPU or kind.
    """
    found: dict[tuple[str, str, int, int], LayerTimes] = {}

    def estimate(kind: str, gpu: str, tp: int, micro_batch: int) -> LayerTimes:
        key = (kind, gpu, tp, micro_batch)
        if key not in found:
            if kind not in model.kinds:
                raise ConfigError(f"model {model.name} has no layers of kind {kind!r}")
            part = (gpus or {}).get(gpu) or find_gpu(gpu, "cluster")
            found[key] = estimate_layer(model, model.kinds[kind], part, tp, micro_batch)
        return found[key]

    return estimate


def estimate_layer(
    model: Model, kind: LayerKind, gpu: Gpu, tp: int, micro_batch: int
) -> LayerTimes:
    """Estimate one layer, without communication between tensor-parallel ranks.

    Args:
        model: for its precision.
        kind: the layer.
        gpu: what it runs on.
        tp: ranks that share it.
        micro_batch: samples.

    Raises:
        ConfigError: the GPU does not compute in the model's precision.
    """
    sizes = model.precision
    pace = gpu.peak(sizes.name) * MATRIX_SHARE
    moving = gpu.memory_bytes_per_s * MEMORY_SHARE
    linear_s = micro_batch * (kind.forward_flops - kind.attention_flops) / tp / pace
    attention_s = micro_batch * kind.attention_flops / tp / pace
    # What is kept was written once and read once at least, as is the output.
    kept = micro_batch * kind.kept_bytes(tp)
    output = micro_batch * kind.output_elements * sizes.element_bytes
    elements_s = 2 * (kept + output) / moving
    weights = kind.held_parameters(tp)
    # A lookup reads few rows; matrix products read all weights, however few samples there are.
    read_s = weights * sizes.parameter_bytes / moving if kind.forward_flops else 0.0
    gradient_s = weights * (sizes.parameter_bytes + 2 * sizes.gradient_bytes) / moving
    launches_s = LAUNCH_S * (_KERNELS if kind.attention_flops else _FEW_KERNELS)
    input_s = max(linear_s, read_s) + 2 * attention_s + 1.5 * elements_s
    return LayerTimes(
        forward_s=max(launches_s, max(linear_s, read_s) + attention_s + elements_s),
        backward_input_s=max(launches_s, input_s) if kind.forward_flops else launches_s,
        backward_weight_s=max(LAUNCH_S * _FEW_KERNELS, linear_s + gradient_s),
        source="estimated",
    )


def estimate_optimizer_s(model: Model, gpu: Gpu) -> float:
    """Estimate the optimizer's seconds for each parameter that a rank updates.

    Args:
        model: for its precision.
        gpu: what it runs on.
    """
    moved = 4 * _OPTIMIZER_MOVES + model.precision.parameter_bytes
    return moved / (gpu.memory_bytes_per_s * MEMORY_SHARE)
