"""Runs the plug-in's engine on emulated stages in a V, as in an unmodified Megatron-LM.

Steps are called like steps of megatron-core. Backward passes are split with the same stores that
contain the weight gradients of real layers. The plug-in chooses the transport. As in every V of the
plug-in, position 0 of the pipeline is on the last rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from harness.emulated_work import RankWork, number_of
from harness.sleeping_ranks import DTYPE, WIDTH
from megatron.adaptive.engine.deferred_layers import DeferringRowParallelLinear
from megatron.adaptive.engine.weight_gradient import LayerCall, defer
from megatron.adaptive.plugin.engines import Engines
from megatron.adaptive.plugin.placement_patch import Placed
from megatron.adaptive.plugin.settings import Settings

from .competitors import Competitor
from .modules import EmulatedChunk
from .peers_megatron import StepChunk, StepRunner, config_of

_PARTS = 2
"""Number of layers in a chunk. A rule may split the chunk's weight gradient between layers."""
_SHARE = torch.ones(WIDTH, dtype=DTYPE)
"""Gradient that one microbatch adds to each weight."""


@dataclass(frozen=True, slots=True, eq=False)
class _Call(LayerCall):
    """Call of a layer. The first layer of a chunk runs F and B. All layers run a part of W."""

    chunk: EmulatedChunk
    weight: torch.nn.Parameter
    is_first: bool

    def output(self, inputs: torch.Tensor) -> torch.Tensor:
        """Runs F on ``inputs`` if this is the first layer, and returns the output."""
        if not self.is_first:
            return inputs.clone()
        return self._work.forward(self.chunk.stage, inputs, number_of(inputs))

    def input_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Runs B on ``gradient`` if this is the first layer. Returns the gradient of the input."""
        if not self.is_first:
            return gradient
        stage, number = self.chunk.stage, number_of(gradient)
        self._work.take_gradient(stage, number, gradient)
        return self._work.input_gradient(stage, number, gradient)

    def weight_gradients(
        self, inputs: torch.Tensor, gradient: torch.Tensor
    ) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Runs this layer's part of W, and yields the weight and its gradient."""
        self._work.weights(self.chunk.stage, number_of(gradient), 1 / _PARTS)
        yield self.weight, _SHARE

    def flops(self, gradient: torch.Tensor) -> float:
        """Returns 1 for every layer, because all parts of W take the same time."""
        return 1.0

    @property
    def _work(self) -> RankWork:
        assert self.chunk.work is not None
        return self.chunk.work


class _Layer(DeferringRowParallelLinear):
    """Layer that defers its weight gradient like a linear layer of a real model."""

    def __init__(self, chunk: EmulatedChunk, number: int) -> None:
        torch.nn.Module.__init__(self)
        self.weight = torch.nn.Parameter(torch.zeros(WIDTH, dtype=DTYPE))
        self._call = _Call(chunk, self.weight, number == 0)

    def forward(self, received: torch.Tensor) -> torch.Tensor:
        """Runs the call of this layer on ``received``, and returns the output."""
        assert self.weight_gradient_store is not None
        return defer(self._call, received, self.weight_gradient_store)


class _Chunk(StepChunk):
    def __init__(self, stage: int, num_stages: int, config: TransformerConfig) -> None:
        super().__init__(stage, num_stages, config)
        del self.weight
        self.pre_process, self.post_process = self.is_first, self.is_last
        self.share_embeddings_and_output_weights = False
        self.layers = torch.nn.ModuleList(_Layer(self, number) for number in range(_PARTS))

    def forward(self, received: torch.Tensor) -> torch.Tensor:
        """Runs all layers one after the other on ``received``, and returns the output."""
        if not received.requires_grad:
            received = received.detach().requires_grad_()
        for layer in self.layers:
            received = layer(received)
        return received

    def prepare(self, work: RankWork) -> None:
        """Sets the work of the next step to ``work``, and clears the gradients."""
        self.work = work
        for weight in self._weights():
            # megatron-core's data-parallel wrapper gives parameters this attribute.
            weight.main_grad = torch.zeros_like(weight)

    def check_gradient(self, num_microbatches: int) -> None:
        """Checks that all ``num_microbatches`` microbatches have contributed to each gradient."""
        for weight in self._weights():
            self.check_sum(weight.main_grad, num_microbatches)

    def _weights(self) -> list[Any]:
        return [layer.weight for layer in self.layers]


class PluggedRunner(StepRunner):
    """Runs a rule through the plug-in, with stages in a V. See ``PeerRunner`` for the arguments."""

    def __init__(self, competitor: Competitor, rank: int, num_ranks: int) -> None:
        placed = Placed(lambda: competitor.kind)
        placed.put()
        try:
            parallel_state.initialize_model_parallel(1, num_ranks, competitor.num_chunks)
            # Free the output of each stage after sending it, as Megatron-LM does.
            dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
            config = config_of(competitor, num_ranks, deallocate_pipeline_outputs=True, **dropout)
        finally:
            placed.take_back()
        self.position = num_ranks - 1 - rank
        super().__init__(competitor, self.position, num_ranks, partial(_Chunk, config=config))
        self._settings = Settings(
            schedule=competitor.schedule,
            placement=competitor.kind,
            split_backward=True,
            weight_pieces=competitor.weight_pieces,
        )
        self._engines = Engines(placed)

    def run(self) -> None:
        """Runs the prepared step. Only this call is timed."""
        engine = self._engines.engine_of(self.call["model"], self._settings, None)
        engine.run(self.call)

    def close(self) -> None:
        """Closes the channels. All ranks must call this method."""
        self._engines.close()
        parallel_state.destroy_model_parallel()
