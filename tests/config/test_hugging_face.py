"""Tests how ``config.json`` is read: exact numbers, ignored keys, and unsupported models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.config.arguments import flag_words, parse
from megatron.adaptive.config.families.registry import _DIFFERENCES, built_in_families
from megatron.adaptive.config.families.weight_names import OUTER
from megatron.adaptive.config.flag_checks import warning_about_effects
from megatron.adaptive.config.hugging_face import load_config
from megatron.adaptive.config.trainer import flag_specs
from megatron.adaptive.errors import ConfigError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "vocab_size": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "head_dim": 16,
}
LATENT = {
    **LLAMA,
    "model_type": "deepseek_v3",
    "kv_lora_rank": 16,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 2,
    "topk_group": 1,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
GEMMA = {
    **LLAMA,
    "model_type": "gemma3_text",
    "query_pre_attn_scalar": 16,
    "sliding_window": 64,
    "rope_local_base_freq": 5000.0,
    "final_logit_softcapping": 30.0,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN = {**LLAMA, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 32}
QWEN |= {"max_window_layers": 2}
NEOX = {**LLAMA, "model_type": "gpt_neox", "rotary_pct": 0.25, "layer_norm_eps": 1e-5}
del NEOX["rms_norm_eps"]


def _words(folder: Path, document: dict[str, Any]) -> list[str]:
    (folder / "config.json").write_text(json.dumps(document))
    return flag_words(load_config(folder).settings)


def _numbers(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Returns the path of each number in ``document``, as a tuple of keys."""
    paths: list[tuple[str, ...]] = []
    for key, value in document.items():
        if isinstance(value, dict):
            paths += [(key, *path) for path in _numbers(value)]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            paths.append((key,))
    return paths


def _with(document: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    if len(path) > 1:
        value = _with(document[path[0]], path[1:], value)
    return {**document, path[0]: value}


@pytest.mark.parametrize("document", [LLAMA, LATENT, GEMMA, MIXTRAL, QWEN, NEOX])
def test_no_number_is_cut_or_rounded(document: dict[str, Any], tmp_path: Path) -> None:
    """Checks that a fraction is either kept exactly, or rejected with the name of its key."""
    whole = _words(tmp_path, document)
    for path in _numbers(document):
        value = 12345.678901234567
        try:
            flags = _words(tmp_path, _with(document, path, value))
        except ConfigError as error:
            flags = [f"refused {path[-1]}"] * (path[-1] in str(error))
        changed = {*flags} - {*whole}
        assert changed & {repr(value), repr(value**-0.5), f"refused {path[-1]}"}, path


def test_a_fraction_of_the_base_of_rotation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rope_theta must be an integer.*got 10000\.5"):
        _words(tmp_path, {**LLAMA, "rope_theta": 10000.5})
    flags = _words(tmp_path, {**LLAMA, "rope_theta": 1e7})
    assert flags[flags.index("--rotary-base") + 1] == "10000000"


@pytest.mark.parametrize(
    ("document", "keys", "message"),
    [
        (LLAMA, {"hidden_size": 64.0}, "hidden_size must be an integer.*got 64.0"),
        (LLAMA, {"num_hidden_layers": True}, "num_hidden_layers must be an integer.*got True"),
        (LLAMA, {"rms_norm_eps": True}, "rms_norm_eps must be a number.*got True"),
        (LLAMA, {"num_key_value_heads": 2.5}, "num_key_value_heads must be an integer.*got 2.5"),
        (LATENT, {"first_k_dense_replace": 1.5}, "first_k_dense_replace must be an integer"),
        (GEMMA, {"sliding_window": 63.5}, "sliding_window must be an integer.*got 63.5"),
        (MIXTRAL, {"sliding_window": -5}, "sliding_window must be a non-negative integer.*got -5"),
        (GEMMA, {"query_pre_attn_scalar": -4}, "query_pre_attn_scalar must be above 0.*got -4"),
        (
            LLAMA,
            {"rope_scaling": {"type": "linear", "factor": "4"}},
            "factor of the rotary embedding must be a number.*got '4'",
        ),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, "factor of the rotary embedding is missing"),
        (
            LATENT,
            {"rope_scaling": {**LATENT["rope_scaling"], "original_max_position_embeddings": 8.5}},
            "original_max_position_embeddings of the rotary embedding must be an integer.*got 8.5",
        ),
        (
            LATENT,
            {"rope_scaling": {**LATENT["rope_scaling"], "attention_factor": 1.2}},
            "requests yarn rotation with attention_factor",
        ),
    ],
)
def test_numbers_of_another_kind_are_named(
    document: dict[str, Any], keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        _words(tmp_path, {**document, **keys})


def test_what_stands_beside_the_kind_of_a_rotation_wins(tmp_path: Path) -> None:
    """Checks that ``rope_parameters`` overrides ``rope_theta``, but not ``rope_scaling``."""
    inner = {"rope_type": "default", "rope_theta": 7000.0}
    flags = _words(tmp_path, {**LLAMA, "rope_theta": 5000.0, "rope_parameters": inner})
    assert flags[flags.index("--rotary-base") + 1] == "7000"
    old = {"type": "linear", "factor": 2.0}
    flags = _words(tmp_path, {**LLAMA, "rope_scaling": old, "rope_parameters": inner})
    assert flags[flags.index("--rotary-base") + 1] == "10000"
    assert "--rotary-seq-len-interpolation-factor" in flags


BOOKKEEPING = {
    "is_llama_config": True,
    "unsloth_fixed": True,
    "unsloth_version": "2025.1",
    "tokenizer_class": "LlamaTokenizer",
    "max_length": 4096,
    "temperature": 0.7,
    "top_p": 0.9,
    "do_sample": True,
    "transformers.js_config": {"dtype": "fp32"},
    "_pre_quantization_dtype": "bfloat16",
    "optimum_version": "1.17",
    "pad_token": "<pad>",
    "use_flash_attn": True,
    "license": "apache-2.0",
}


def test_bookkeeping_says_nothing_about_the_numbers(tmp_path: Path) -> None:
    assert _words(tmp_path, {**LLAMA, **BOOKKEEPING}) == _words(tmp_path, LLAMA)


@pytest.mark.parametrize(
    "keys",
    [
        {"attn_logit_softcapping": 50.0},
        {"logit_scale": 0.06},
        {"embedding_multiplier": 12.0},
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"compression_config": {"quant_method": "compressed-tensors"}},
        {"alibi": True},
        {"no_rope_layers": [1, 0]},
    ],
)
def test_what_changes_numbers_stays_refused(keys: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(keys))} .* requests"):
        _words(tmp_path, {**LLAMA, **keys})


@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [
        ("olmo2", {}, "nearest is llama, which lacks norms over all heads of queries and keys"),
        (
            "granite",
            {"logits_scaling": 8.0},
            "lacks scale factors of embeddings, .*; logits_scaling",
        ),
        ("gpt_oss", {}, "lacks attention sinks, and experts with biases"),
        ("tomorrow", {"gate_scale": 2.0}, "nearest is llama, which lacks gate_scale"),
        ("tomorrow", {}, "nearest is llama, which has the same keys; use llama if the layer"),
    ],
)
def test_the_nearest_family_is_named_with_what_it_lacks(
    kind: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"model_type '{kind}' is unknown; .*{message}"):
        _words(tmp_path, {**LLAMA, "model_type": kind, **keys})


@pytest.mark.parametrize(
    ("key", "part", "message"),
    [
        ("text_config", LLAMA, "can load its text part, llama; save only that part, with text_co"),
        ("text_config", GEMMA, "can load its text part, gemma3_text"),
        ("llm_config", QWEN, "can load its text part, qwen2; save only that part, with llm_conf"),
        (
            "text_config",
            {**LLAMA, "model_type": "t5"},
            "its text part, t5, does not belong to a supported family .deepseek_v2",
        ),
    ],
)
def test_the_text_part_of_several_kinds_of_input_is_named(
    key: str, part: dict[str, Any], message: str, tmp_path: Path
) -> None:
    document = {"model_type": "several", key: part, "vision_config": {"hidden_size": 8}}
    with pytest.raises(ConfigError, match=f"'several' accepts input other than text; .*{message}"):
        _words(tmp_path, document)


def test_kimi_k2_is_read_as_deepseek_v3(tmp_path: Path) -> None:
    assert _words(tmp_path, {**LATENT, "model_type": "kimi_k2"}) == _words(tmp_path, LATENT)


@pytest.mark.parametrize(
    ("document", "keys"),
    [
        (LATENT, {"shared_expert_intermediate_size": 8}),
        (QWEN, {"attention_bias": False}),
        (MIXTRAL, {"norm_topk_prob": True}),
    ],
)
def test_each_flag_of_a_model_is_written_once(
    document: dict[str, Any], keys: dict[str, Any], tmp_path: Path
) -> None:
    """Checks that no flag is written twice, because the trainer rejects repeated flags."""
    flags = [word for word in _words(tmp_path, {**document, **keys}) if word.startswith("--")]
    assert len(flags) == len({*flags})


def test_words_of_settings_are_read_as_the_settings_themselves(tmp_path: Path) -> None:
    """Checks that a model's flags as text give the same configuration as its ``config.json``."""
    run = "--micro-batch-size 1 --train-iters 1 --lr 1e-4 --mock-data".split()
    for document in (LLAMA, LATENT, GEMMA, MIXTRAL, QWEN, NEOX):
        flags = _words(tmp_path, document)
        settings = load_config(tmp_path).settings
        from_words = parse([*run, *flags], world_size=1)
        assert from_words == parse(run, world_size=1, settings=settings)
        assert from_words.model == parse([*run, "--load-hf", str(tmp_path)], world_size=1).model


def test_settings_of_a_folder_have_an_effect(tmp_path: Path) -> None:
    """Checks that no warning names flags that the user did not set."""
    run = "--micro-batch-size 1 --train-iters 1 --lr 1e-4 --mock-data".split()
    for document in (LLAMA, LATENT, GEMMA, MIXTRAL, QWEN, NEOX):
        _words(tmp_path, document)
        config = parse([*run, "--finetune", "--load-hf", str(tmp_path)], world_size=1)
        assert warning_about_effects(config) is None


def test_each_family_is_described_by_a_file_of_its_folder() -> None:
    families = built_in_families()
    assert {type(family).__module__.rpartition(".")[0] for family in families.values()} == {
        "megatron.adaptive.config.families"
    }
    settings = flag_specs().keys()
    for name, family in families.items():
        assert name in family.model_types
        assert {*family.settings, *family.keys, *family.needed} <= settings
        assert family.nearest in families
        # Each module outside of the layers must have exactly one name. If a family is supported,
        # none of these modules may be missing.
        assert all(len(names) == 1 for names in family.outer_modules.values())
        assert family.missing_feature or {*OUTER.values()} <= family.outer_modules.keys()


def test_of_several_contradictions_the_first_of_the_folder_is_named(tmp_path: Path) -> None:
    _words(tmp_path, LLAMA)
    run = "--micro-batch-size 1 --train-iters 1 --lr 1e-4 --mock-data".split()
    wrong = "--kv-channels 5 --hidden-size 6 --encoder-num-layers 3 --ffn-hidden-size 7".split()
    with pytest.raises(
        ConfigError, match="--encoder-num-layers 3 contradicts the value 4 .*--load-hf"
    ):
        parse([*run, *wrong, "--load-hf", str(tmp_path)], world_size=1)


def test_a_supported_family_is_not_among_those_that_lack_something() -> None:
    assert _DIFFERENCES.keys().isdisjoint(built_in_families())
