"""Reads ``config.json`` of Hugging Face as arguments of the trainer.

A table of families says what a model is by its ``model_type``; a table of keys says which argument
each number is. Owns what keys mean. What a model holds follows from the arguments as for any other
(``model_file``).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megatron.adaptive.errors import ConfigError

_LONGEST = 4096
"""Tokens of a sample where none are given, if the model takes as many."""
_GATED = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
_BIASED = "--position-embedding-type rope"
_LATENT = f"{_GATED} --multi-latent-attention"


@dataclass(frozen=True)
class _Family:
    """Models of one ``model_type``.

    Attributes:
        arguments: that all of them have.
        tied: whether embedding and head share weights where the file does not say it.
        differs: what the trainer's layers lack or have otherwise; empty where it trains the model.
        window_period: of so many layers with a window the last has none; 0 where all have it.
    """

    arguments: str
    tied: bool = False
    differs: str = ""
    window_period: int = 0


_GELU = "gates with GELU and further norms"
_PARALLEL = "attention and feed-forward block side by side"
_FAMILIES: Mapping[str, _Family] = {
    "deepseek_v2": _Family(_LATENT),
    "deepseek_v3": _Family(_LATENT),
    "gemma": _Family(_GATED, tied=True, differs=_GELU),
    "gemma2": _Family(_GATED, tied=True, differs=_GELU, window_period=2),
    "gemma3_text": _Family(f"{_GATED} --qk-layernorm", tied=True, differs=_GELU, window_period=6),
    "gpt2": _Family("", tied=True),
    "gpt_neox": _Family(_BIASED, differs=_PARALLEL),
    "llama": _Family(_GATED),
    "mistral": _Family(_GATED),
    "mixtral": _Family(_GATED),
    "phi": _Family(_BIASED, differs=_PARALLEL),
    "phi3": _Family(_GATED),
    "qwen2": _Family(f"{_GATED} --add-qkv-bias"),
    "qwen2_moe": _Family(f"{_GATED} --add-qkv-bias", differs="a gate of the shared expert"),
    "qwen3": _Family(f"{_GATED} --qk-layernorm"),
    "qwen3_moe": _Family(f"{_GATED} --qk-layernorm"),
}
_Table = Mapping[str, tuple[str, ...]]
"""Keys of the file by the argument that each is; the first of them that is there counts."""
_NEEDED: _Table = {
    "--num-layers": ("num_hidden_layers", "n_layer"),
    "--hidden-size": ("hidden_size", "n_embd"),
    "--num-attention-heads": ("num_attention_heads", "n_head"),
    "--vocab-size": ("vocab_size",),
    "--max-position-embeddings": ("max_position_embeddings", "n_positions"),
}
_OPTIONAL: _Table = {
    "--ffn-hidden-size": ("intermediate_size", "n_inner"),
    "--norm-epsilon": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    "--rotary-base": ("rope_theta", "rotary_emb_base"),
    "--rotary-percent": ("partial_rotary_factor", "rotary_pct"),
    "--attention-dropout": ("attention_dropout", "attn_pdrop"),
    "--hidden-dropout": ("hidden_dropout", "resid_pdrop"),
    "--mtp-num-layers": ("num_nextn_predict_layers",),
}
_OF_HEADS: _Table = {"--kv-channels": ("head_dim",)}
_OF_LATENT: _Table = {
    "--kv-lora-rank": ("kv_lora_rank",),
    "--qk-head-dim": ("qk_nope_head_dim",),
    "--qk-pos-emb-head-dim": ("qk_rope_head_dim",),
    "--v-head-dim": ("v_head_dim",),
}
_OF_EXPERTS: _Table = {
    "--num-experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "--moe-router-topk": ("num_experts_per_tok",),
    "--moe-ffn-hidden-size": ("moe_intermediate_size", "intermediate_size"),
}
_OF_ROUTER: _Table = {
    "--moe-shared-expert-intermediate-size": ("shared_expert_intermediate_size",),
    "--moe-router-score-function": ("scoring_func",),
    "--moe-router-topk-scaling-factor": ("routed_scaling_factor",),
    "--moe-router-num-groups": ("n_group",),
    "--moe-router-group-topk": ("topk_group",),
}
_DEFAULTS = {"--attention-dropout": 0.0, "--hidden-dropout": 0.0}


def is_config(document: Any) -> bool:
    """Returns whether the contents of a JSON file are such a configuration."""
    return isinstance(document, dict) and "model_type" in document and "format" not in document


def config_arguments(
    document: Mapping[str, Any], where: str, sequence: int | None = None
) -> tuple[list[str], str]:
    """Returns the trainer's arguments for a configuration, and in what its own model differs.

    Args:
        document: contents of the file.
        where: the file, for messages.
        sequence: tokens of a sample; by default as many as the model takes, 4,096 at most.

    Raises:
        ConfigError: the architecture is unknown or something of it is not counted, or a key is
            missing.
    """
    # Of a model of several kinds of input, what reads text.
    text = document.get("text_config")
    config: Mapping[str, Any] = text if isinstance(text, dict) else document
    family = _family(config.get("model_type", document["model_type"]), where)
    words = family.arguments.split()
    experts = any(_value(config, key) for key in _OF_EXPERTS["--num-experts"])
    latent = "--multi-latent-attention" in words
    needed: list[_Table] = [_NEEDED, *[_OF_EXPERTS] * experts, *[_OF_LATENT] * latent]
    optional: list[_Table] = [_OPTIONAL, *[_OF_ROUTER] * experts]
    optional.append({"--q-lora-rank": ("q_lora_rank",)} if latent else _OF_HEADS)
    for table in (*needed, *optional):
        for flag, keys in table.items():
            found = next((v for key in keys if (v := _value(config, key)) is not None), None)
            if found is None and table in needed:
                raise ConfigError(f"{where}: {' or '.join(keys)} is missing; a model has it")
            if found is None:
                found = _DEFAULTS.get(flag)
            # A model without groups has one.
            if found is None or (
                flag.endswith(("groups", "group-topk", "mtp-num-layers")) and not found
            ):
                continue
            words += [flag, str(int(found) if flag == "--rotary-base" else found)]
    heads, groups = _number(config, "num_attention_heads", where), config.get("num_key_value_heads")
    if groups is not None and groups != heads and not latent:
        words += ["--group-query-attention", "--num-query-groups", str(groups)]
    if config.get("attention_bias") and "--disable-bias-linear" in words:
        words.append("--add-qkv-bias")
    if not config.get("tie_word_embeddings", document.get("tie_word_embeddings", family.tied)):
        words.append("--untie-embeddings-and-output-weights")
    layers = _number(config, "num_hidden_layers", where)
    words += _experts(config, layers, where) if experts else []
    words += _windows(config, family, layers, where)
    longest = int(words[words.index("--max-position-embeddings") + 1])
    words += ["--seq-length", str(sequence or min(longest, _LONGEST))]
    return words, family.differs


def _family(name: Any, where: str) -> _Family:
    if name in _FAMILIES:
        return _FAMILIES[name]
    nearest = difflib.get_close_matches(str(name), _FAMILIES, n=1)
    hint = f"the nearest is {nearest[0]}" if nearest else f"known are {', '.join(_FAMILIES)}"
    raise ConfigError(
        f"{where}: how layers of model_type {name!r} are made is not known ({hint}): give their"
        " sizes as `layers` of a model file, see plan --schema model"
    )


def _value(config: Mapping[str, Any], key: str) -> Any:
    """Returns a value, also one that newer files have among those of rotary positions."""
    rotary = config.get("rope_parameters") or {}
    found = config.get(key, rotary.get(key))
    return found if isinstance(found, int | float | str) else None


def _number(config: Mapping[str, Any], key: str, where: str) -> int:
    """Returns a number of the file, which may have GPT-2's name for it."""
    keys = (key, "n_head" if "heads" in key else "n_layer")
    found = next((config[key] for key in keys if key in config), None)
    if type(found) is not int or not 0 < found <= 10_000:
        raise ConfigError(f"{where}: {key} is {found!r}: it must be a whole number from 1 on")
    return found


def _experts(config: Mapping[str, Any], layers: int, where: str) -> list[str]:
    """Returns which layers have experts, and the width of the one for all tokens."""
    first, every = config.get("first_k_dense_replace", 0), config.get("moe_layer_freq", 1)
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    try:
        has = [
            i >= first and i % every == 0 and (i + 1) % step == 0 and i not in dense
            for i in range(layers)
        ]
        words = [] if all(has) else ["--moe-layer-freq", _pattern(has)]
        if shared := config.get("n_shared_experts"):
            width = shared * config["moe_intermediate_size"]
            words += ["--moe-shared-expert-intermediate-size", str(width)]
    except (TypeError, KeyError, ZeroDivisionError):
        raise ConfigError(
            f"{where}: which layers have experts is not to be read: first_k_dense_replace,"
            " moe_layer_freq, decoder_sparse_step and n_shared_experts are whole numbers"
        ) from None
    if config.get("topk_method") == "noaux_tc":
        words.append("--moe-router-enable-expert-bias")
    return words


def _windows(config: Mapping[str, Any], family: _Family, layers: int, where: str) -> list[str]:
    """Returns the window of attention, and which layers have it."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if kinds is not None:
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise ConfigError(
                    f"{where}: layer_types has {kind!r}, whose layers the planner does not count:"
                    " give their sizes as `layers` of a model file, see plan --schema model"
                )
        has = [kind == "sliding_attention" for kind in kinds]
    else:
        period = config.get("sliding_window_pattern", family.window_period)
        begin = config.get("max_window_layers", 0) if "use_sliding_window" in config else 0
        has = [i >= begin and (not period or (i + 1) % period != 0) for i in range(layers)]
    if not window or not any(has) or config.get("use_sliding_window") is False:
        return []
    words = ["--window-size", f"{window},0"]
    return words if all(has) else [*words, "--window-attn-skip-freq", _pattern(has)]


def _pattern(has: Sequence[bool]) -> str:
    """Returns which layers have something as the trainer reads it, such as ``[0]*3+[1]*58``."""
    runs = [(int(value), len(list(group))) for value, group in groupby(has)]
    return "+".join(f"[{value}]*{count}" for value, count in runs)
