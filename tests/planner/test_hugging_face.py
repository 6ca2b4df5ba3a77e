"""Tests models read from Hugging Face configurations: sizes, kinds of layers, and errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cluster import Cluster, LinkSpeed, NodePool, NodeType
from megatron.adaptive.planner.cost import predict
from megatron.adaptive.planner.model_description import Model
from megatron.adaptive.planner.model_file import arguments_model, read_model
from megatron.adaptive.planner.profile import PlanInputs
from megatron.adaptive.planner.propose import Request, complete_profile, propose
from megatron.adaptive.planner.search_options import SearchOptions


def _sizes(kind: str, hidden: int, ffn: int, heads: int, layers: int, **more: Any) -> Any:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "max_position_embeddings": 8192,
        "num_key_value_heads": heads,
        **more,
    }


_LATENT = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
    "num_experts_per_tok": 8,
}
MIXTRAL = _sizes(
    *("mixtral", 4096, 14336, 32, 32),
    num_key_value_heads=8,
    vocab_size=32000,
    num_local_experts=8,
    num_experts_per_tok=2,
    sliding_window=None,
)
V3 = _sizes(
    *("deepseek_v3", 7168, 18432, 128, 61),
    vocab_size=129280,
    n_routed_experts=256,
    moe_intermediate_size=2048,
    **{"n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536, **_LATENT},
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    n_group=8,
    topk_group=4,
)
GEMMA = _sizes(
    *("gemma2", 3584, 14336, 16, 42),
    num_key_value_heads=8,
    head_dim=256,
    vocab_size=256000,
    sliding_window=4096,
)
# The values are published configurations, and the number of parameters of these models in
# transformers.
PUBLISHED = {
    "Llama-3-8B": (
        _sizes("llama", 4096, 14336, 32, 32, num_key_value_heads=8, vocab_size=128256),
        8.030261248e9,
    ),
    "Mistral-7B": (
        _sizes("mistral", 4096, 14336, 32, 32, num_key_value_heads=8, vocab_size=32000),
        7.241732096e9,
    ),
    "Qwen2.5-7B": (
        _sizes("qwen2", 3584, 18944, 28, 28, num_key_value_heads=4, vocab_size=152064),
        7.615616512e9,
    ),
    "Qwen3-8B": (
        _sizes("qwen3", 4096, 12288, 32, 36, num_key_value_heads=8, vocab_size=151936),
        8.190735360e9,
    ),
    "gemma-2-9b": (GEMMA, 9.2417e9),
    "gpt-neox-20b": (_sizes("gpt_neox", 6144, 24576, 64, 44, vocab_size=50432), 20.5546e9),
    "phi-2": (_sizes("phi", 2560, 10240, 32, 32, vocab_size=51200), 2.7797e9),
    "Mixtral-8x7B": (MIXTRAL, 46.7028e9),
    "Qwen3-30B-A3B": (
        _sizes(
            *("qwen3_moe", 2048, 6144, 32, 48),
            num_key_value_heads=4,
            head_dim=128,
            vocab_size=151936,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
        ),
        30.5321e9,
    ),
    "DeepSeek-V2-Lite": (
        _sizes(
            *("deepseek_v2", 2048, 10944, 16, 27),
            vocab_size=102400,
            n_routed_experts=64,
            moe_intermediate_size=1408,
            **{"n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": None, **_LATENT},
        ),
        15.7065e9,
    ),
    "DeepSeek-V3": (V3, 671.0264e9),
}


def read(config: Any, folder: Path, **more: Any) -> Model:
    (folder / "config.json").write_text(json.dumps(config))
    return read_model(str(folder), attention="fused", **more)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_are_published(name: str, tmp_path: Path) -> None:
    config, parameters = PUBLISHED[name]
    model = read(config, tmp_path)
    assert model.parameters == pytest.approx(parameters, rel=1e-3)
    assert model.num_counted == config["num_hidden_layers"]
    # The trainer would build a different model from the configuration of Phi, so there must be no
    # arguments for the trainer.
    differs = config["model_type"] == "phi"
    assert bool(model.arguments) != differs


def test_a_layer_that_predicts_further_goes_with_the_head(tmp_path: Path) -> None:
    plain = read(V3, tmp_path)
    more = read({**V3, "num_nextn_predict_layers": 1}, tmp_path)
    # The additional layer has 11.6 B parameters: experts, a projection of two states, and norms. It
    # shares the embedding and the head with the model.
    layer = plain.kinds["experts"].held_parameters(1) + 2 * 7168**2 + 3 * 7168
    assert more.parameters - plain.parameters == pytest.approx(layer)
    assert more.layers == plain.layers
    assert more.layers.count("transformer") == 3
    assert more.kinds["head"].forward_flops > 2 * plain.kinds["head"].forward_flops
    # The experts of the additional layer are also distributed over ranks.
    assert more.kinds["head/256"].parameters < more.kinds["head"].parameters / 4


def test_windows_shorten_the_layers_that_have_them(tmp_path: Path) -> None:
    # Turn off soft-capping of attention scores. With soft-capping, all scores would be computed and
    # stored, even those outside of the window.
    gemma = {**GEMMA, "attn_logit_softcapping": None}
    model = read(gemma, tmp_path, sequence=8192)
    near, far = model.kinds["transformer-window"], model.kinds["transformer"]
    assert model.layers[1:5] == ("transformer-window", "transformer") * 2
    # A window of 4,096 tokens contains three quarters of the causal scores of 8,192 tokens.
    assert near.attention_flops == pytest.approx(0.75 * far.attention_flops)
    assert near.parameters == far.parameters
    short = read(gemma, tmp_path, sequence=1024).kinds
    assert short["transformer-window"].attention_flops == short["transformer"].attention_flops
    bounded = read(GEMMA, tmp_path, sequence=8192).kinds
    assert bounded["transformer-window"].attention_flops == 2 * far.attention_flops
    assert bounded["transformer"].attention_bytes > 0


def test_experts_compute_by_their_tokens_and_lie_on_ranks(tmp_path: Path) -> None:
    even, skewed = read(MIXTRAL, tmp_path), read(MIXTRAL, tmp_path, imbalance=1.5)
    layer = even.kinds["experts"]
    tokens, hidden, inner = 4096, 4096, 14336
    dense = 2 * tokens * (hidden * (2 * 4096 + 2 * 1024) + 8 * hidden)
    products = layer.forward_flops - layer.attention_flops - dense
    assert products == pytest.approx(2 * 2 * tokens * 3 * hidden * inner)
    assert layer.expert_parameters == 8 * 3 * hidden * inner
    spread = even.kinds["experts/8"]
    assert spread.parameters == pytest.approx(layer.parameters - 7 * 3 * hidden * inner)
    assert spread.forward_flops == layer.forward_flops
    # All ranks wait for the rank with the most tokens. If one rank has all experts, there is no
    # imbalance between ranks.
    assert skewed.kinds["experts"] == layer
    more = skewed.kinds["experts/8"].forward_flops - layer.forward_flops
    assert more == pytest.approx(0.5 * products)
    arguments = [*even.arguments, "--moe-expert-capacity-factor", "1.25"]
    capped = arguments_model(arguments, "m", attention="fused", imbalance=1.5).kinds["experts/8"]
    assert capped.forward_flops - layer.forward_flops == pytest.approx(0.25 * products)


def _inputs(model: Model, network: float = 50e9) -> PlanInputs:
    node = NodeType(
        name="n",
        gpu="h100-80",
        gpus=8,
        memory_bytes=72e9,
        intra=LinkSpeed(bytes_per_s=450e9, latency_s=3e-6, shared=False),
    )
    link = LinkSpeed(bytes_per_s=network, latency_s=1e-5)
    cluster = Cluster(groups=(NodePool(type=node, count=4),), network=link)
    return PlanInputs(model, cluster, complete_profile(None, model, cluster))


def test_the_search_spreads_experts_and_exchanges_take_their_way(tmp_path: Path) -> None:
    inputs = _inputs(read({**MIXTRAL, "num_hidden_layers": 8}, tmp_path))
    options = SearchOptions(
        tp=(2,),
        dp=(8,),
        pp=(2,),
        micro_batch=(1,),
        recompute=("none",),
        distributed_optimizer=(True,),
    )
    request = Request(global_batch=32, options=options)
    row = propose(inputs, request).rows[0]
    assert row.prediction.fits
    # Ranks of a tensor-parallel group must split the tokens for the experts.
    assert row.plan.sequence_parallel
    slow = _inputs(inputs.model, 5e9)
    seen = {ranks: predict(replace(row.plan, expert_ranks=ranks), inputs) for ranks in (1, 2, 8)}
    assert row.prediction.seconds == min(prediction.seconds for prediction in seen.values())
    held = [seen[ranks].stages[0].memory.parameter_bytes for ranks in (2, 8)]
    assert held[1] < held[0] / 2
    # Two expert-parallel ranks are on one node. Eight are on two nodes, so only eight use the
    # network.
    longer = {
        ranks: predict(replace(row.plan, expert_ranks=ranks), slow).parts["tp"]
        - prediction.parts["tp"]
        for ranks, prediction in seen.items()
    }
    assert longer[1] == longer[2] == 0 < longer[8]
    # The search must compute the same times as the prediction.
    for ranks, prediction in seen.items():
        result = propose(inputs, replace(request, options=replace(options, expert_ranks=(ranks,))))
        assert result.rows[0].plan.expert_ranks == ranks
        assert result.result.plans[0].seconds == pytest.approx(result.rows[0].prediction.seconds)
        assert result.rows[0].prediction.seconds <= prediction.seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba2"}, "model_type 'mamba2' is unknown; .* specify its sizes"),
        ({"hidden_size": None}, "config.json: hidden_size or n_embd is missing"),
        ({"layer_types": ["linear_attention"]}, "layer_types contains 'linear_attention'"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers must be an integer.*got '32'"),
        ({"num_experts_per_tok": 9}, "9 is above --num-experts 8"),
    ],
)
def test_what_is_not_known_is_named(change: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as info:
        read({**MIXTRAL, **change}, tmp_path)
    assert "\n" not in str(info.value)


def test_experts_that_no_degree_divides_are_named(tmp_path: Path) -> None:
    inputs = _inputs(read(MIXTRAL, tmp_path))
    options = SearchOptions(expert_ranks=(3, 6))
    with pytest.raises(ConfigError, match=r"size 3,6: .* allows only 1,2,4,8"):
        propose(inputs, Request(global_batch=8, options=options))
