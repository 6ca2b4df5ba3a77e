"""Runs experts as grouped matmuls without Transformer Engine, with megatron-core up to 0.16.

Later releases support grouped matmuls only with Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import megatron.core
import torch
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_cpu
from megatron.core.transformer.moe import experts
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.adaptive.errors import ConfigError

_GroupedMLP: Any = getattr(experts, "GroupedMLP", None)


def check() -> None:
    """Checks that experts can run as grouped matmuls without Transformer Engine.

    Raises:
        ConfigError: If the installed megatron-core does not support this, or the package
            grouped_gemm is not installed.
    """
    if _GroupedMLP is None:
        raise ConfigError(
            "--moe-grouped-gemm with --transformer-impl local requires megatron-core 0.16 or "
            f"older, but {megatron.core.__version__} is installed; remove the flag, or use "
            "--transformer-impl transformer_engine"
        )
    from megatron.core.transformer.moe import grouped_gemm_util

    if not grouped_gemm_util.grouped_gemm_is_available():
        raise ConfigError(
            "--moe-grouped-gemm with --transformer-impl local requires the package grouped_gemm, "
            "which is not installed; install it or remove the flag"
        )


# mypy does not support a base class that is chosen at run time.
class KeyedGroupedExperts(_GroupedMLP or torch.nn.Module):  # type: ignore[misc]
    """Initializes experts in grouped matrices with the same weights as :class:`KeyedExperts`.

    megatron-core initializes the weights of all local experts as one matrix, so they depend on the
    expert-parallel and tensor-parallel sizes. This class instead initializes each expert
    separately.
    """

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, *args: Any, **kwargs: Any
    ) -> None:
        init = config.keyed_init
        before = init.count
        super().__init__(num_local_experts, config, *args, **kwargs)
        init.count = before
        stride = 2 if config.gated_linear_unit else 1
        hidden = config.hidden_size
        width = config.moe_ffn_hidden_size
        first = self.weight1.data.view(num_local_experts, hidden, -1)
        second = self.weight2.data.view(num_local_experts, -1, hidden)
        with init.experts(config, kwargs["pg_collection"]):
            for matrices in zip(first, second, strict=True):
                for matrix, shape, dim, step, draw in (
                    (matrices[0], (stride * width, hidden), 0, stride, config.init_method),
                    (matrices[1], (hidden, width), 1, 1, config.output_layer_init_method),
                ):
                    part = torch.empty_like(matrix.t())
                    _initialize_affine_weight_cpu(
                        part,
                        *shape,
                        part.shape[dim],
                        dim,
                        draw,
                        step,
                        params_dtype=config.params_dtype,
                        rank=self.tp_group.rank(),
                        world_size=self.tp_group.size(),
                    )
                    matrix.copy_(part.t())


REPLACEMENTS: Mapping[type, type] = {_GroupedMLP: KeyedGroupedExperts} if _GroupedMLP else {}
"""Maps megatron-core's ``GroupedMLP`` to its replacement, or is empty in releases without this
class."""
