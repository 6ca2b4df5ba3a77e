"""Tests that ``by-layer`` initial weights do not depend on the position of the layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron.adaptive import accelerator

accelerator.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron.adaptive.plugin.first_weights import FirstWeights, is_by_layer  # noqa: E402


@pytest.fixture
def by_layer(one_process: None) -> Iterator[list[bool]]:
    """Installs :class:`FirstWeights`, and yields a list whose only entry turns it on or off."""
    switch = [True]
    weights = FirstWeights(lambda: switch[0])
    original = GPTModel.__init__
    weights.put()
    yield switch
    weights.take_back()
    assert GPTModel.__init__ is original


@pytest.fixture
def one_process() -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def build(layers: int, *, cpu: bool, mtp: bool = False, experts: bool = False) -> Any:
    more: dict[str, Any] = {"mtp_num_layers": 1} if mtp else {}
    more |= {"num_moe_experts": 2, "add_bias_linear": False} if experts else {}
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=2,
        use_cpu_initialization=cpu,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        # The default of megatron-core depends on the number of layers, which differs between the
        # models, so set this method explicitly.
        output_layer_init_method=lambda weight: torch.nn.init.normal_(weight, 0.0, 0.02),
        **more,
    )
    spec = get_gpt_layer_local_spec(num_experts=2 if experts else None)
    block = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if mtp else None
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=16,
        max_sequence_length=8,
        share_embeddings_and_output_weights=False,
        mtp_block_spec=block,
    )


def weights_of(model: Any) -> dict[str, list[float]]:
    return {name: weight.flatten().tolist() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("cpu", [True, False])
@pytest.mark.parametrize("kind", [{}, {"mtp": True}, {"experts": True}])
def test_a_layer_has_its_weights_in_every_model(
    by_layer: list[bool], cpu: bool, kind: dict[str, bool]
) -> None:
    torch.manual_seed(1)
    long = build(3, cpu=cpu, **kind)
    torch.manual_seed(2)  # Simulate another pipeline rank, whose random state differs.
    torch.rand(5)
    short = build(2, cpu=cpu, **kind)
    assert is_by_layer(short)
    long_weights, short_weights = weights_of(long), weights_of(short)
    assert {name: long_weights[name] for name in short_weights} == short_weights
    matrices = [tuple(row) for name, row in long_weights.items() if "weight" in name]
    drawn = [row for row in matrices if len(set(row)) > 1]
    assert len(set(drawn)) == len(drawn) > 8  # The weight matrices must all be different.


@pytest.mark.parametrize("cpu", [True, False])
def test_generators_are_left_as_they_were(by_layer: list[bool], cpu: bool) -> None:
    tracker = tensor_parallel.get_cuda_rng_tracker()
    torch.manual_seed(1)
    state, kept = torch.get_rng_state(), {n: s.clone() for n, s in tracker.get_states().items()}
    build(2, cpu=cpu)
    assert torch.equal(state, torch.get_rng_state())
    assert {name: torch.equal(kept[name], s) for name, s in tracker.get_states().items()} == (
        dict.fromkeys(kept, True)
    )


def test_without_it_nothing_is_seeded(by_layer: list[bool]) -> None:
    by_layer[0] = False
    torch.manual_seed(1)
    model = build(2, cpu=True)
    assert not is_by_layer(model)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    again = build(2, cpu=True)
    assert weights_of(again) == weights_of(model)
    assert torch.equal(drawn, torch.rand(1))
    by_layer[0] = True
    assert weights_of(build(2, cpu=True)) != weights_of(model)
