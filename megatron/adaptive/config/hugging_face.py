"""Converts a Hugging Face ``config.json`` to flags of the trainer.

Tables describe families of models by their ``model_type`` and map keys of the file to flags, for
the planner and the trainer. The planner also accepts models that the trainer cannot build (those
with ``differs``); for the trainer :func:`load_config` refuses them.
"""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from megatron.adaptive.config.input_files import read_json
from megatron.adaptive.config.safetensors_header import read_header
from megatron.adaptive.errors import ConfigError, DamagedCheckpointError

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LOAD_FLAG = "--load-hf"
FLAGS_FILE = "model_flags.txt"
"""Name of the file with the model's flags in a checkpoint folder, which ``evaluate`` reads."""

_LONGEST = 4096
"""Default of ``--seq-length`` in tokens, unless the model supports only shorter sequences."""
_GATED = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
_BIASED = "--position-embedding-type rope"
_GEMMA = f"{_GATED.replace('--swiglu', '--geglu')} --apply-layernorm-1p --scale-embeddings"
_LATENT = f"{_GATED} --multi-latent-attention --qk-layernorm --moe-router-dtype fp32"


@dataclass(frozen=True)
class _Family:
    """Describes the models of one ``model_type``.

    Attributes:
        arguments: Trainer flags that are the same for all models of the family.
        tied: Whether embedding and output layer share weights if the file does not say.
        differs: Feature that the trainer's layers lack; empty if the trainer supports the family.
        window_period: Every n-th layer attends to all tokens, the others have a sliding window; 0
            if all layers have it.
        default: Values of absent keys, where they differ from the usual defaults.
        optional: Keys that only this family has, by the flag to which they are converted.
        nearest: Most similar supported family, for the error message if ``differs`` is not empty.
    """

    arguments: str
    tied: bool = False
    differs: str = ""
    window_period: int = 0
    default: Mapping[str, Any] = field(default_factory=dict)
    optional: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    nearest: str = "llama"


_EPSILON: Mapping[str, Any] = {"rms_norm_eps": 1e-6}
_GROUPS_32 = {**_EPSILON, "num_key_value_heads": 32}
_V2 = {**_EPSILON, "q_lora_rank": 1536, "norm_topk_prob": False}
_V3 = {
    **_V2,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "rope_interleave": True,
}
_GPT_2 = {"activation_function": "gelu_new", "attn_pdrop": 0.1, "resid_pdrop": 0.1}
_GEMMA_1 = {**_EPSILON, "head_dim": 256, "num_key_value_heads": 16, "hidden_act": "gelu"}
_GEMMA_2: Mapping[str, Any] = {
    **_EPSILON,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
}
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_BASES = {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
_OF_GEMMA_2 = {
    "--softmax-scale": ("query_pre_attn_scalar",),
    "--logit-softcap": ("final_logit_softcapping",),
}
_MISTRAL = {**_EPSILON, "num_key_value_heads": 8}
_FAMILIES: Mapping[str, _Family] = {
    "deepseek_v2": _Family(_LATENT, default=_V2),
    "deepseek_v3": _Family(_LATENT, default=_V3),
    "kimi_k2": _Family(_LATENT, default=_V3),  # same layers and module names as DeepSeek-V3
    "gemma": _Family(_GEMMA, tied=True, default=_GEMMA_1),
    "gemma2": _Family(
        f"{_GEMMA} --norm-block-outputs",
        tied=True,
        window_period=2,
        default={**_GEMMA_2, **_CAPS},
        optional={**_OF_GEMMA_2, "--attention-softcap": ("attn_logit_softcapping",)},
    ),
    "gemma3_text": _Family(
        f"{_GEMMA} --norm-block-outputs --qk-layernorm",
        tied=True,
        window_period=6,
        default={**_GEMMA_2, **_BASES},
        optional={**_OF_GEMMA_2, "--window-rotary-base": ("rope_local_base_freq",)},
    ),
    "gpt2": _Family("", tied=True, default=_GPT_2),
    "gpt_neox": _Family(_BIASED, default={"rotary_pct": 0.25, "use_parallel_residual": True}),
    "llama": _Family(_GATED, default=_EPSILON),
    "mistral": _Family(_GATED, default={**_MISTRAL, "sliding_window": 4096}),
    "mixtral": _Family(_GATED, default={"num_key_value_heads": 8, "rope_theta": 1e6}),
    "phi": _Family(_BIASED, differs="one norm for both blocks of a layer", nearest="phi3"),
    "phi3": _Family(_GATED),
    "qwen2": _Family(f"{_GATED} --add-qkv-bias", default=_GROUPS_32),
    "qwen2_moe": _Family(
        f"{_GATED} --add-qkv-bias", differs="a gate of the shared expert", nearest="qwen3_moe"
    ),
    "qwen3": _Family(f"{_GATED} --qk-layernorm", default={**_GROUPS_32, "head_dim": 128}),
    "qwen3_moe": _Family(
        f"{_GATED} --qk-layernorm",
        default={**_EPSILON, "num_key_value_heads": 4, "norm_topk_prob": False},
    ),
}
_STATES = "layers that keep a state instead of attention"
_FUSED = "another order of queries, keys and values in one matrix"
_UNROTATED = "layers without rotation"
_MULTIPLIED = "scale factors of embeddings, residuals and logits"
# Features by which unsupported models differ from supported families, if no key shows them.
_DIFFERENCES: Mapping[str, str] = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "jamba", "rwkv", "bamba"), _STATES),
    **dict.fromkeys(("internlm2", "baichuan", "qwen", "chatglm"), _FUSED),
    **dict.fromkeys(("granite", "granitemoe", "minicpm", "minicpm3"), _MULTIPLIED),
    **dict.fromkeys(("gptj", "codegen", "falcon"), "one norm for both blocks of a layer"),
    **dict.fromkeys(("bloom", "mpt"), "positions encoded as a bias of the scores"),
    **dict.fromkeys(("olmo2", "olmo3", "olmoe"), "norms over all heads of queries and keys"),
    **dict.fromkeys(("cohere", "cohere2"), "parallel blocks, and scaled logits"),
    **dict.fromkeys(("glm", "glm4", "ernie4_5"), "rotation of neighbouring channels"),
    **dict.fromkeys(("nemotron", "arcee"), "squared ReLU"),
    **dict.fromkeys(("stablelm", "starcoder2"), "LayerNorm with a bias"),
    "deepseek_v32": "attention to tokens that an indexer chooses",
    "glm4_moe": "rotation of half of each head, and experts with a bias",
    "gpt_bigcode": "one head of keys and values with learned positions",
    "gpt_oss": "sinks of attention, and experts with biases",
    "llama4_text": f"{_UNROTATED}, and attention in chunks",
    "olmo": "a norm without weights",
    "opt": "learned positions that begin at 2, and ReLU",
    "qwen3_next": f"{_STATES}, and gates of attention",
    "smollm3": _UNROTATED,
}
_TEXT_PARTS = ("text_config", "llm_config", "language_config")
_OTHER_INPUT = ("vision_config", "audio_config", "vision_encoder", "audio_encoder")
_Table = Mapping[str, tuple[str, ...]]
"""For each flag, the keys of the file that give its value; the first key present is used."""
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
_READ = frozenset(
    key
    for table in (_NEEDED, _OPTIONAL, _OF_HEADS, _OF_LATENT, _OF_EXPERTS, _OF_ROUTER)
    for keys in table.values()
    for key in keys
)
_FRACTIONS = frozenset(
    """
    --norm-epsilon --rotary-percent --attention-dropout --hidden-dropout --softmax-scale
    --moe-router-topk-scaling-factor --logit-softcap --attention-softcap
    """.split()
)
_TEXTS = ("--moe-router-score-function",)
# Flags for whole numbers that a file may contain with a decimal point, such as 10000.0.
_BASE_FLAGS = ("--rotary-base", "--window-rotary-base")
_WHOLE = frozenset(
    key
    for table in (_NEEDED, _OPTIONAL, _OF_HEADS, _OF_LATENT, _OF_EXPERTS, _OF_ROUTER)
    for flag, keys in table.items()
    if flag not in (*_FRACTIONS, *_TEXTS, *_BASE_FLAGS)
    for key in keys
).union(
    """
    num_key_value_heads q_lora_rank first_k_dense_replace decoder_sparse_step n_shared_experts
    sliding_window sliding_window_pattern _sliding_window_pattern sliding_window_size
    max_window_layers
    """.split()
)
MODEL_FLAGS = frozenset(
    flag
    for table in (_NEEDED, _OPTIONAL, _OF_HEADS, _OF_LATENT, _OF_EXPERTS, _OF_ROUTER)
    for flag in table
    if flag not in ("--attention-dropout", "--hidden-dropout")
).union(
    (word for family in _FAMILIES.values() for word in family.arguments.split() if word[0] == "-"),
    (flag for family in _FAMILIES.values() for flag in family.optional),
    """
    --q-lora-rank --group-query-attention --num-query-groups --add-qkv-bias --openai-gelu
    --untie-embeddings-and-output-weights --parallel-residual --moe-layer-freq
    --moe-router-pre-softmax --moe-router-enable-expert-bias --moe-router-group-best --window-size
    --window-attn-skip-freq --rope-type --rotary-scaling-factor --original-max-position-embeddings
    --beta-fast --beta-slow --mscale --mscale-all-dim --use-rope-scaling --rope-scaling-factor
    --rotary-seq-len-interpolation-factor
    """.split(),
)
"""Flags that describe a model, all of which ``--load-hf`` determines."""
_OF_YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale")
_OF_ROTATION = (*_OF_YARN, "mscale_all_dim", "low_freq_factor", "high_freq_factor")
_DEFAULTS = {"--attention-dropout": 0.0, "--hidden-dropout": 0.0}
_ACTIVATION = ("hidden_act", "activation_function", "hidden_activation")
_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
# Keys of which only one value is supported, and the unsupported feature that other values request.
_ONLY: Mapping[str, tuple[Any, str]] = {
    "attention_bias": (False, "a bias of the output projection"),
    "mlp_bias": (False, "a bias of the feed-forward block"),
    "scale_attn_weights": (True, "scores that are not scaled"),
    "scale_attn_by_inverse_layer_idx": (False, "scores that are scaled by layer"),
    "rope_interleave": (True, "rotation of another order"),
    "moe_layer_freq": (1, "experts in every n-th layer"),
    "use_bidirectional_attention": (False, "attention to later tokens"),
    "router_jitter_noise": (0.0, "noise in the router"),
}
# Keys without effect on layers (generation, training, origin, notes), or read elsewhere here.
_WITHOUT_EFFECT = frozenset(
    """
    architectures auto_map torch_dtype dtype transformers_version use_cache initializer_range
    pretraining_tp _name_or_path name_or_path gradient_checkpointing output_router_logits
    router_aux_loss_coef aux_loss_alpha seq_aux ep_size classifier_dropout summary_type
    summary_first_dropout summary_proj_to_labels summary_use_proj summary_activation
    task_specific_params _attn_implementation attn_implementation is_decoder n_ctx qk_head_dim
    id2label label2id max_window_layers original_max_position_embeddings cache_implementation
    model_type reorder_and_upcast_attn classifier_dropout_prob bos_token_id eos_token_id
    pad_token_id sep_token_id unk_token_id decoder_start_token_id rope_scaling rope_parameters
    num_key_value_heads tie_word_embeddings layer_types sliding_window sliding_window_pattern
    use_sliding_window n_shared_experts first_k_dense_replace decoder_sparse_step mlp_only_layers
    topk_method norm_topk_prob embd_pdrop num_nextn_predict_layers head_dim q_lora_rank
    use_parallel_residual rope_theta partial_rotary_factor scoring_func unsloth_version
    text_config output_hidden_states output_attentions return_dict use_bfloat16 torchscript
    _sliding_window_pattern
    is_llama_config unsloth_fixed tokenizer_class max_length min_length do_sample early_stopping
    num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens chunk_size_feed_forward tf_legacy_loss problem_type finetuning_task prefix
    use_flash_attn use_flash_attention use_flash_attention_2 _flash_attn_2_enabled
    _attn_implementation_autoset _attn_implementation_internal _commit_hash num_labels
    max_sequence_length max_seq_length max_seq_len seq_length model_max_length bos_token eos_token
    pad_token unk_token transformers.js_config onnx_config optimum_version export_model_type neuron
    _pre_quantization_dtype pre_quantization_dtype quantized_by original_torch_dtype base_model
    base_model_name_or_path trust_remote_code use_gradient_checkpointing model_name model_revision
    nemo_version mergekit mergekit_version keys_to_ignore_at_inference license
    """.split()
)


def is_config(document: Any) -> bool:
    """Returns whether the content of a JSON file is that of a Hugging Face ``config.json``."""
    return isinstance(document, dict) and "model_type" in document and "format" not in document


def config_arguments(
    document: Mapping[str, Any], where: str, sequence: int | None = None
) -> tuple[list[str], str]:
    """Converts a ``config.json`` to flags of the trainer.

    Args:
        document: Content of the file.
        where: Path of the file; error messages name it.
        sequence: Number of tokens per sample; ``None`` for the longest sequence that the model
            supports, but at most 4,096.

    Returns:
        The flags, and the feature of the model that the trainer lacks, empty for none.

    Raises:
        ConfigError: The architecture is unknown or not supported, or a key is missing.
    """
    with _expected_kinds(where):
        return _arguments(document, where, sequence)


def _arguments(
    document: Mapping[str, Any], where: str, sequence: int | None
) -> tuple[list[str], str]:
    # If a model also takes images or sound, use only the part of the file about its text model.
    text = _text_part(document)
    config: Mapping[str, Any] = document if text is None else text
    family = _family({"model_type": document["model_type"], **config}, where)
    config = _flat(family, config)
    _check_numbers(config, where)
    flags = family.arguments.split()
    if "--moe-router-dtype" in flags and not _value(config, "n_routed_experts"):
        flags = [item for item in flags if item not in ("--moe-router-dtype", "fp32")]
    experts = any(_value(config, key) for key in _OF_EXPERTS["--num-experts"])
    latent = "--multi-latent-attention" in flags
    needed: list[_Table] = [_NEEDED, *[_OF_EXPERTS] * experts, *[_OF_LATENT] * latent]
    optional: list[_Table] = [_OPTIONAL, family.optional, *[_OF_ROUTER] * experts]
    optional.append({"--q-lora-rank": ("q_lora_rank",)} if latent else _OF_HEADS)
    for table in (*needed, *optional):
        for flag, keys in table.items():
            value = next((v for key in keys if (v := _value(config, key)) is not None), None)
            if value is None and table in needed:
                raise ConfigError(
                    f"{where}: {' or '.join(keys)} is missing, but every model needs it"
                )
            if value is not None and flag not in _TEXTS:
                value = _checked(value, flag, next(key for key in keys if key in config), where)
            if value is None:
                value = _DEFAULTS.get(flag)
            of_groups = flag.endswith(("groups", "group-topk"))
            # Leave the flag out if 0 means that there are no expert groups or prediction layers.
            if value is None or ((of_groups or flag.endswith("mtp-num-layers")) and not value):
                continue
            if of_groups and (config.get("topk_method") == "greedy" or config.get("n_group") == 1):
                continue
            if flag.endswith("topk-scaling-factor") and value == 1:
                continue
            if flag == "--softmax-scale":
                value = value**-0.5
            flags += [flag, str(value)]
    heads = _number(config, "num_attention_heads", where)
    groups = config.get("num_key_value_heads")
    if groups is not None and groups != heads and not latent:
        flags += ["--group-query-attention", "--num-query-groups", str(groups)]
    if config.get("attention_bias") and "--disable-bias-linear" in flags:
        flags.append("--add-qkv-bias")
    if not config.get("tie_word_embeddings", document.get("tie_word_embeddings", family.tied)):
        flags.append("--untie-embeddings-and-output-weights")
    layers = _number(config, "num_hidden_layers", where)
    flags += _experts(config, layers, where) if experts else []
    flags += (windows := _windows(config, family, layers, where))
    if not windows and "--window-rotary-base" in flags:
        _remove(flags, "--window-rotary-base")
    flags += _rotation(config, latent=latent) if "rope" in flags else []
    if next((config[key] for key in _ACTIVATION if config.get(key)), None) in _TANH:
        flags += [] if {"--swiglu", "--geglu"} & {*flags} else ["--openai-gelu"]
    flags += ["--parallel-residual"] if config.get("use_parallel_residual") else []
    flags += ["--make-vocab-size-divisible-by", "1"]
    longest = int(flags[flags.index("--max-position-embeddings") + 1])
    flags += ["--seq-length", str(sequence or min(longest, _LONGEST))]
    return flags, family.differs


def _remove(flags: list[str], name: str) -> None:
    """Removes a flag and its value from a list of flags."""
    index = flags.index(name)
    del flags[index : index + 2]


def load_config(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Reads the ``config.json`` of a model, and checks that the trainer can build the model.

    Args:
        folder: Folder of a Hugging Face model.

    Returns:
        The content of the file, and the trainer's flags for the model.

    Raises:
        ConfigError: The trainer cannot build the model; the message names the key, its value and
            the nearest value that is supported.
    """
    path = folder / CONFIG
    document = read_json(path, "name the folder of a Hugging Face model")
    if not isinstance(document, dict) or not isinstance(document.get("model_type"), str):
        raise ConfigError(f"{path} has no model_type: it does not describe a Hugging Face model")
    _refuse_other_input(document, str(path))
    _family(document, str(path))
    flags, differs = config_arguments(document, str(path))
    with _expected_kinds(str(path)):
        return document, _trained(folder, document, flags, differs)


def _text_part(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the settings of the text part if the model takes more than text, else ``None``."""
    parts = (document.get(key) for key in _TEXT_PARTS)
    return next((part for part in parts if isinstance(part, dict)), None)


def _refuse_other_input(document: Mapping[str, Any], where: str) -> None:
    """Refuses a model that takes more than text.

    Raises:
        ConfigError: The model also takes images or sound; the message says whether its text part
            can be used alone.
    """
    text = _text_part(document)
    kind = document["model_type"]
    if kind in _FAMILIES or (text is None and not any(document.get(key) for key in _OTHER_INPUT)):
        return
    part = str(kind if text is None else text.get("model_type"))
    if text is None:
        rule = "its file does not separate the keys of its text part"
    elif part in _FAMILIES and not _FAMILIES[part].differs:
        key = next(key for key in _TEXT_PARTS if document.get(key) is text)
        rule = (
            f"its text part, {part}, can be read: save only that, with {key} as its {CONFIG} and"
            f" the names of {part} for its weights"
        )
    else:
        families = ", ".join(_read_families())
        rule = f"its text part, {part}, is of no supported family: {families}"
    raise ConfigError(f"{where}: model_type {kind!r} takes more than text; {rule}")


def _check_numbers(config: Mapping[str, Any], where: str) -> None:
    """Checks that numbers in the file have the right type, so that none would be rounded.

    Raises:
        ConfigError: A value must be a whole number but is not, or a value of the rotary embedding
            is not a number, or its factor is missing.
    """
    for key in sorted(_WHOLE & config.keys()):
        if config[key] is not None and type(config[key]) is not int:
            raise ConfigError(f"{where}: {key} is {config[key]!r}: it must be a whole number")
    scaling = _scaling(config)
    for key in _OF_ROTATION:
        value = scaling.get(key)
        is_whole = key != "original_max_position_embeddings" or type(value) is int
        if value is not None and not (_is_number(value) and is_whole):
            kind = "number" if is_whole else "whole number"
            raise ConfigError(f"{where}: {key} of the rotation is {value!r}: it must be a {kind}")
    if _kind_of_rotation(config) != "default" and "factor" not in scaling:
        raise ConfigError(f"{where}: factor of the rotation is missing, but every model needs it")


def _checked(value: Any, flag: str, key: str, where: str) -> int | float:
    """Converts a number in the file to the type of its flag.

    Raises:
        ConfigError: The value is not a number, would have to be rounded, or is out of range.
    """
    if not _is_number(value):
        kind = "number" if flag in _FRACTIONS else "whole number"
        raise ConfigError(f"{where}: {key} is {value!r}: it must be a {kind}")
    number: int | float = value
    if flag in _BASE_FLAGS:
        if number != int(number):
            raise ConfigError(f"{where}: {key} is {value!r}: it must be a whole number")
        return int(number)
    if flag == "--softmax-scale" and number <= 0:
        raise ConfigError(f"{where}: {key} is {value!r}: it must be above 0")
    return number


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) < math.inf


@contextlib.contextmanager
def _expected_kinds(where: str) -> Iterator[None]:
    """Converts Python errors, which values of a wrong type cause, to an error for the user."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: a value has another type than transformers writes ({error}): restore it"
        ) from None


def _trained(
    folder: Path, document: Mapping[str, Any], flags: list[str], differs: str
) -> list[str]:
    """Returns a supported model's flags, without prediction layers that the folder lacks.

    Raises:
        ConfigError: The trainer's layers lack a feature of the model.
    """
    path = folder / CONFIG
    family = _FAMILIES[document["model_type"]]
    if differs:
        raise ConfigError(
            f"{path}: model_type {document['model_type']} asks for {differs}, which megatron-core's"
            f" layers lack; the nearest supported family is {family.nearest}"
        )
    flat = _flat(family, document)
    for key, value in document.items():
        _refuse(key, value, flat, flags, str(path))
    # transformers does not save layers for multi-token prediction.
    flag = "--mtp-num-layers"
    if flag in flags and not _has_weights(folder, flat["num_hidden_layers"]):
        _remove(flags, flag)
    return flags


def _has_weights(folder: Path, layer: int) -> bool:
    """Returns whether a folder has weights of a layer; reads the index or the file's header."""
    prefix = f"model.layers.{layer}."
    names: Iterable[str] = ()
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX, "copy it again", DamagedCheckpointError)
        table = index.get("weight_map") if isinstance(index, dict) else None
        names = table if isinstance(table, dict) else ()
    elif (folder / SINGLE).is_file():
        names = read_header(folder / SINGLE)
    return any(name.startswith(prefix) for name in names)


class _Verdict(NamedTuple):
    """Holds whether the trainer supports the value of a key in the file.

    Attributes:
        is_supported: Whether the trainer's layers support the value.
        feature: Feature of a model that this value requests, for the error message.
        nearest: Nearest value that is supported, for the error message.
    """

    is_supported: bool
    feature: str
    nearest: str


def _refuse(
    key: str, value: Any, config: Mapping[str, Any], flags: Sequence[str], where: str
) -> None:
    """Raises an error if a key's value requests a feature that the trainer's layers lack."""
    if key == "quantization_config" and not value:
        value = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    verdict = _verdict_on_layers(key, value, config, flags) or _verdict_on_experts(
        key, value, config, flags
    )
    family = _FAMILIES[config["model_type"]]
    is_unknown = key not in _READ | _WITHOUT_EFFECT and (key,) not in [*family.optional.values()]
    if verdict is None and is_unknown:
        verdict = _Verdict(not value, "something unknown", "null, if it changes nothing")
    if verdict is not None and not verdict.is_supported:
        raise ConfigError(
            f"{where}: {key} {value!r} asks for {verdict.feature}, which this trainer's layers"
            f" lack; the nearest is {verdict.nearest}"
        )


def _verdict_on_layers(
    key: str, value: Any, config: Mapping[str, Any], flags: Sequence[str]
) -> _Verdict | None:
    """Checks a key about attention, activation, dropout or weights; ``None`` for other keys."""
    if key in _ACTIVATION:
        supported: tuple[str, ...] = ("silu", "swish") if "--swiglu" in flags else ("gelu", *_TANH)
        # Gemma's files contain "gelu" under the old key hidden_act and mean the tanh approximation.
        supported = _TANH if "--geglu" in flags and key != "hidden_act" else supported
        is_supported = value in supported or (value is None and "--geglu" in flags)
        return _Verdict(is_supported, "another activation", " or ".join(supported))
    if key in ("rope_parameters", "rope_scaling"):
        return _verdict_on_rotation(value, config, latent="--multi-latent-attention" in flags)
    if key == "attention_bias" and "--disable-bias-linear" not in flags:
        return _Verdict(bool(value), "no bias of queries, keys and values", "true")
    if key in _ONLY:
        only, feature = _ONLY[key]
        return _Verdict(value in (None, only), feature, str(only).lower())
    if key == "embd_pdrop":
        dropout = config.get("resid_pdrop")
        return _Verdict(
            value == dropout, "another dropout of embeddings", f"resid_pdrop, {dropout}"
        )
    if key == "quantization_config":
        is_fp8 = value.get("quant_method") == "fp8" and value.get("weight_block_size") == [128, 128]
        nearest = "fp8 in blocks of 128 x 128, or none: dequantize the model and save it in 16 bits"
        return _Verdict(is_fp8 and value.get("fmt", "e4m3") == "e4m3", "quantized weights", nearest)
    if key == "sliding_window_size":
        window = config.get("sliding_window")
        return _Verdict(value == window, "two sizes of windows", f"sliding_window, {window}")
    return None


def _verdict_on_experts(
    key: str, value: Any, config: Mapping[str, Any], flags: Sequence[str]
) -> _Verdict | None:
    """Checks a key about the router of experts; returns ``None`` for other keys."""
    is_pre_softmax = "--moe-router-pre-softmax" in flags
    if key == "norm_topk_prob" and "--num-experts" in flags:
        is_raw = config["model_type"] == "deepseek_v2" or is_pre_softmax
        return _Verdict(bool(value) != is_raw, "weights scaled otherwise", str(not is_raw).lower())
    if key == "num_experts_per_tok" and not is_pre_softmax:
        return _Verdict(value != 1, "one expert whose weight is always 1", "2")
    if key == "topk_method":
        is_sigmoid = config.get("scoring_func") == "sigmoid"
        supported = ("noaux_tc",) if is_sigmoid else ("greedy", "group_limited_greedy")
        return _Verdict(value in supported, "another choice", supported[0])
    return None


def _verdict_on_rotation(value: Any, config: Mapping[str, Any], *, latent: bool) -> _Verdict:
    """Checks the settings of the rotary embedding."""
    kind = _kind_of_rotation(config)
    scaling = _scaling(config)
    is_scaled = kind == "yarn" if latent else bool(_rotation(config, latent=False))
    is_supported = not value or kind == "default" or is_scaled
    feature = f"{kind} rotation"
    if kind == "yarn" and (scaling.get("attention_factor") or scaling.get("truncate") is False):
        is_supported = False
        feature = "yarn rotation with attention_factor or without truncate"
    in_windows = (value or {}).get("sliding_attention") or {}
    is_supported = is_supported and in_windows.get("rope_type", "default") == "default"
    nearest = "default, linear with a whole factor, or llama3 with factors 1 and 4 of 8192"
    return _Verdict(is_supported, feature, "default or yarn" if latent else nearest)


def _flat(family: _Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the family's defaults, and copies keys of the rotary embedding to the top level."""
    rotation = _scaling(config)
    if "full_attention" in rotation:
        # Layers with a sliding window have separate settings. Copy only the base, since other
        # differences are not supported.
        in_windows = rotation.get("sliding_attention") or {}
        key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        rotation = rotation["full_attention"] or {}
        config = {**config, key: rotation}
        if base := in_windows.get("rope_theta"):
            config["rope_local_base_freq"] = base
    # If a key is at the top level and among the rotation's settings, transformers uses the latter.
    inner_keys = ("rope_theta", "partial_rotary_factor")
    inner = {key: rotation[key] for key in inner_keys if rotation.get(key) is not None}
    return {**family.default, **config, **inner}


def _scaling(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the settings of the rotary embedding, from the old key if it is there."""
    scaling: Mapping[str, Any] = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return scaling


def _kind_of_rotation(config: Mapping[str, Any]) -> str:
    scaling = _scaling(config)
    return str(scaling.get("rope_type", scaling.get("type", "default")))


def _rotation(config: Mapping[str, Any], *, latent: bool) -> list[str]:
    """Returns the flags that scale rotary frequencies; empty if none or not supported."""
    scaling = _scaling(config)
    kind = _kind_of_rotation(config)
    factor = scaling.get("factor")
    if latent and kind == "yarn":
        longest = config["max_position_embeddings"]
        flags = ["--rope-type", "yarn", "--rotary-scaling-factor", str(factor)]
        for flag, key, default in (
            ("--original-max-position-embeddings", "original_max_position_embeddings", longest),
            ("--beta-fast", "beta_fast", 32),
            ("--beta-slow", "beta_slow", 1),
            ("--mscale", "mscale", 1.0),
            ("--mscale-all-dim", "mscale_all_dim", 0.0),
        ):
            flags += [flag, str(scaling.get(key) or default)]
        return flags
    if latent:
        return ["--rope-type", "rope"]
    expected = {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if kind == "llama3" and all(scaling.get(key) == value for key, value in expected.items()):
        return ["--use-rope-scaling", "--rope-scaling-factor", str(factor)]
    if kind == "linear" and factor and float(factor).is_integer():
        return ["--rotary-seq-len-interpolation-factor", str(int(factor))]
    return []


def _family(config: Mapping[str, Any], where: str) -> _Family:
    name = config["model_type"]
    if name in _FAMILIES:
        return _FAMILIES[name]
    nearest = (difflib.get_close_matches(str(name), _FAMILIES, n=1) or ["llama"])[0]
    raise ConfigError(
        f"{where}: model_type {name!r} is not known; the nearest is {nearest}, which"
        f" {_lacks(config, name, nearest)}; {', '.join(_read_families())} are read; to plan another"
        " one give its sizes as `layers` of a model file, see plan --schema model"
    )


def _lacks(config: Mapping[str, Any], name: str, nearest: str) -> str:
    """Returns a text on how an unsupported model differs from the nearest supported family."""
    strange = {key for key, value in config.items() if value}
    strange -= {*_READ, *_WITHOUT_EFFECT, *_ACTIVATION, *_ONLY}
    strange.difference_update(*_FAMILIES[nearest].optional.values())
    parts = [_DIFFERENCES[name]] if name in _DIFFERENCES else []
    parts += [", ".join(sorted(strange))] if strange else []
    if parts:
        return f"lacks {'; '.join(parts)}"
    return (
        f"has all its keys: write {nearest} if its layers and the names of its weights are the same"
    )


def _read_families() -> list[str]:
    return [name for name, family in _FAMILIES.items() if not family.differs]


def _value(config: Mapping[str, Any], key: str) -> Any:
    """Returns the value of a key if it is a number or a text, otherwise ``None``."""
    value = config.get(key)
    return value if isinstance(value, int | float | str) else None


def _number(config: Mapping[str, Any], key: str, where: str) -> int:
    """Returns the number of heads or layers, under the given key or under GPT-2's key."""
    keys = (key, "n_head" if "heads" in key else "n_layer")
    number = next((config[key] for key in keys if key in config), None)
    if type(number) is not int or not 0 < number <= 10_000:
        raise ConfigError(f"{where}: {key} is {number!r}: it must be a whole number from 1 on")
    return number


def _experts(config: Mapping[str, Any], layers: int, where: str) -> list[str]:
    """Returns the flags for layers with experts, for the shared expert and for the router."""
    first = config.get("first_k_dense_replace", 0)
    every = config.get("moe_layer_freq", 1)
    step = config.get("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or ()
    try:
        have_experts = [
            i >= first and i % every == 0 and (i + 1) % step == 0 and i not in dense
            for i in range(layers)
        ]
        flags = [] if all(have_experts) else ["--moe-layer-freq", _pattern(have_experts)]
        if shared := config.get("n_shared_experts"):
            width = shared * config["moe_intermediate_size"]
            flags += ["--moe-shared-expert-intermediate-size", str(width)]
    except (TypeError, KeyError, ZeroDivisionError):
        raise ConfigError(
            f"{where}: the layers with experts cannot be determined: first_k_dense_replace,"
            " moe_layer_freq, decoder_sparse_step and n_shared_experts must be whole numbers"
        ) from None
    if config.get("norm_topk_prob") is False and config.get("scoring_func") != "sigmoid":
        flags.append("--moe-router-pre-softmax")
    best = {"noaux_tc": 2, "group_limited_greedy": 1}.get(str(config.get("topk_method")), 0)
    if best == 2:
        flags.append("--moe-router-enable-expert-bias")
    groups = config.get("n_group") or 1
    chosen = config.get("topk_group") or 1
    if best and groups > 1 and best != config["num_experts_per_tok"] // chosen:
        flags += ["--moe-router-group-best", str(best)]
    return flags


def _windows(config: Mapping[str, Any], family: _Family, layers: int, where: str) -> list[str]:
    """Returns the flags for the size of the attention window and for the layers that have it."""
    window = config.get("sliding_window")
    kinds = config.get("layer_types")
    if kinds is not None:
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise ConfigError(
                    f"{where}: layer_types has {kind!r}, which the planner does not know: give the"
                    " sizes of these layers as `layers` of a model file, see plan --schema model"
                )
        have_window = [kind == "sliding_attention" for kind in kinds]
    else:
        period = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
        period = period or family.window_period
        begin = config.get("max_window_layers", 0) if "use_sliding_window" in config else 0
        have_window = [i >= begin and (not period or (i + 1) % period != 0) for i in range(layers)]
    if not window or not any(have_window) or config.get("use_sliding_window") is False:
        return []
    # Subtract 1, because megatron-core does not count the token itself as a part of its window.
    flags = ["--window-size", f"{window - 1},0"]
    if all(have_window):
        return flags
    every = have_window.index(False) + 1
    is_regular = every > 1 and have_window == [(i + 1) % every != 0 for i in range(layers)]
    return [*flags, "--window-attn-skip-freq", str(every) if is_regular else _pattern(have_window)]


def _pattern(values: Sequence[bool]) -> str:
    """Formats one truth value per layer in the trainer's notation, such as ``[0]*3+[1]*58``."""
    runs = [(int(value), len(list(group))) for value, group in groupby(values)]
    return "+".join(f"[{value}]*{count}" for value, count in runs)
