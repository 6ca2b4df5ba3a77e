"""Draws the initial weights of an unmodified Megatron-LM separately for each layer.

Megatron-LM seeds the random generators by pipeline rank, and each rank draws the weights of its
layers one after the other. The initial weights of a layer therefore change if the layer moves to
another rank. With ``first_weights by-layer``, the generators are seeded separately for each part of
a GPT, and restored after the part has been built::

    outside of layers       seed, "outside"         output layer
      └─ embedding          seed, "embedding"
      └─ layer n            seed, "layer n"         n counts the layers of all ranks
      └─ prediction n       seed, "mtp n"           multi-token prediction and the layer in it

As in megatron-core, ranks of a tensor-parallel or expert-parallel group draw different numbers for
weights that are split among them, and equal numbers for all other weights.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    get_transformer_layer_offset,
)

from megatron.adaptive.accelerator import current_device, default_generator
from megatron.adaptive.plugin.placement_patch import exchange, standing_for
from megatron.adaptive.plugin.settings import megatron_arguments

DEFAULT_SEED = 1234
"""Seed that Megatron-LM uses by default."""
_MARK = "first_weights_by_layer"


class FirstWeights:
    """Seeds the random generators for each part of a model while the part is being built.

    Args:
        is_on: Function that returns whether initial weights are drawn separately for each layer.
    """

    def __init__(self, is_on: Callable[[], bool]) -> None:
        self._is_on = is_on
        self._is_in_layer = False
        self._replaced: list[tuple[type, Any, Any]] = []

    def put(self) -> None:
        """Replaces the constructors of megatron-core's GPT and of the parts of a GPT."""
        for kind, replacement in (
            (GPTModel, self._build_model),
            (LanguageModelEmbedding, self._build_embedding),
            (TransformerLayer, self._build_layer),
            (MultiTokenPredictionLayer, self._build_prediction),
        ):
            original = kind.__init__
            wrapper = standing_for(original, replacement)
            self._replaced.append((kind, original, wrapper))
            exchange(kind, "__init__", original, wrapper)

    def take_back(self) -> None:
        """Restores megatron-core's own constructors."""
        for kind, original, wrapper in self._replaced:
            exchange(kind, "__init__", wrapper, original)
        self._replaced.clear()

    def _build_model(self, build: Callable[..., None], model: Any, *args: Any, **more: Any) -> None:
        with self._seeded("outside"):
            build(model, *args, **more)
        setattr(model, _MARK, self._is_on())

    def _build_embedding(
        self, build: Callable[..., None], module: Any, *args: Any, **more: Any
    ) -> None:
        with self._seeded("embedding"):
            build(module, *args, **more)

    def _build_layer(
        self,
        build: Callable[..., None],
        layer: Any,
        config: Any,
        submodules: Any,
        layer_number: int = 1,
        *args: Any,
        **more: Any,
    ) -> None:
        number = layer_number
        if self._is_on() and not self._is_in_layer and more.get("add_layer_offset", True):
            number += get_transformer_layer_offset(config, more.get("vp_stage"))
        with self._seeded(f"layer {number}", is_layer=True):
            build(layer, config, submodules, layer_number, *args, **more)

    def _build_prediction(
        self,
        build: Callable[..., None],
        layer: Any,
        config: Any,
        submodules: Any,
        layer_number: int = 1,
        *args: Any,
        **more: Any,
    ) -> None:
        with self._seeded(f"mtp {layer_number}", is_layer=True):
            build(layer, config, submodules, layer_number, *args, **more)

    @contextlib.contextmanager
    def _seeded(self, part: str, *, is_layer: bool = False) -> Iterator[None]:
        """Seeds all random generators for the ``part`` of a model, and restores them at the end.

        If ``is_layer`` is ``True``, the weights of all parts inside this part are drawn from the
        same generators.
        """
        # A layer inside another layer uses the generators of the outer layer.
        if self._is_in_layer or not self._is_on():
            yield
            return
        tracker = get_cuda_rng_tracker()
        device = default_generator(current_device())
        states = tracker.get_states()
        seeds = set(getattr(tracker, "seeds_", ()))
        host_state = torch.get_rng_state()
        device_state = device.get_state()
        self._is_in_layer = is_layer
        try:
            torch.manual_seed(_number(part))
            tracker.reset()
            for name in states:
                tracker.add(name, _number(f"{part} {name} {_place(name)}"))
            yield
        finally:
            self._is_in_layer = False
            tracker.reset()
            tracker.set_states(states)
            tracker.seeds_ = seeds
            device.set_state(device_state)
            torch.set_rng_state(host_state)


def is_by_layer(model: Any) -> bool:
    """Returns whether the initial weights of ``model`` were drawn separately for each layer."""
    return bool(getattr(model, _MARK, False))


def _number(key: str) -> int:
    seed = getattr(megatron_arguments(), "seed", None)
    digest = hashlib.sha256(f"{DEFAULT_SEED if seed is None else seed} {key}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _place(name: str) -> str:
    """Returns this rank's indices in the groups that affect the seed of the generator ``name``."""
    if "data-parallel" in name:
        return ""
    if "expert" in name:
        expert = parallel_state.get_expert_model_parallel_rank()
        return f"{expert} {parallel_state.get_expert_tensor_parallel_rank()}"
    return str(parallel_state.get_tensor_model_parallel_rank())
