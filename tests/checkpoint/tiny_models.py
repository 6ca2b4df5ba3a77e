"""Creates small Hugging Face models, and computes their logits and gradients."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

VOCABULARY = 96
LAYERS = 4
SHARE_OF_FURTHER = 0.1
"""Factor of the multi-token prediction loss. This is the default of megatron-core."""
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
_LATENT = {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "topk_group": 1,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
}
MIXED = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")
# The values are the configuration class of each family, and sizes that differ from those above.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": LLAMA_3}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 12}),
    "mistral": ("MistralConfig", {"sliding_window": 5, "head_dim": 8}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "head_dim": 8,
        },
    ),
    "gpt2": (
        "GPT2Config",
        {
            "n_embd": 32,
            "n_layer": LAYERS,
            "n_head": 4,
            "n_positions": 64,
            "resid_pdrop": 0,
            "embd_pdrop": 0,
            "attn_pdrop": 0,
        },
    ),
    "gpt_neox": ("GPTNeoXConfig", {"use_parallel_residual": True}),
    "phi3": ("Phi3Config", {}),
    "gemma": ("GemmaConfig", {"head_dim": 12, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 24,
            "sliding_window": 5,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 24,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
            },
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {**_LATENT, "q_lora_rank": None, "n_shared_experts": 2, "n_group": 2}
        | {"topk_method": "group_limited_greedy", "rope_parameters": YARN},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {**_LATENT, "q_lora_rank": 12, "n_shared_experts": 1, "n_group": 2}
        | {"rope_parameters": YARN},
    ),
}


def make(folder: Path, name: str, seed: int = 0, **more: Any) -> None:
    """Writes a random model of family ``name``, its logits and its gradients to ``folder``.

    ``seed`` determines the weights. ``more`` contains other settings of the model.
    """
    import torch
    import transformers
    from safetensors.torch import save_file
    from transformers.core_model_loading import revert_weight_conversion

    kind, own_sizes = FAMILIES[name]
    sizes = {} if name == "gpt2" else dict(_SIZES)
    if name == "gpt_neox":
        del sizes["num_key_value_heads"]
    torch.manual_seed(seed)
    plain = {key: _SIZES[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
    config = getattr(transformers, kind)(**{**plain, **sizes, **own_sizes, **more})
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if "norm" in key or key.endswith("bias"):
                tensor.add_(0.2 * torch.randn_like(tensor))
        for key, tensor in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                tensor.copy_(0.2 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    tokens = torch.randint(0, config.vocab_size, (4, 13))
    inputs, labels, entropy = tokens[:, :-1], tokens[:, 1:], torch.nn.functional.cross_entropy
    logits, parameters = model(inputs).logits, dict(model.named_parameters())
    loss = entropy(logits.flatten(0, 1), labels.flatten())
    tensors = {"tokens": tokens, "logits": logits}
    if config.to_dict().get("num_nextn_predict_layers") and more:
        added, predicted = _add_prediction(model, inputs, folder)
        further = entropy(predicted[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss, parameters = loss + SHARE_OF_FURTHER * further, parameters | added
        tensors["predicted"] = predicted
    loss.backward()
    gradients = {
        key: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        for key, tensor in parameters.items()
    }
    tensors |= revert_weight_conversion(model, gradients)
    copies = {key: tensor.detach().contiguous().clone() for key, tensor in tensors.items()}
    save_file(copies, folder / "expected.safetensors")


def _add_prediction(model: Any, tokens: Any, folder: Path) -> tuple[dict[str, Any], Any]:
    """Adds a multi-token prediction layer to ``model``, because transformers does not load one.

    The layer is also added to the weights file in ``folder``. ``tokens`` are the inputs of the
    model.

    Returns:
        Parameters of the layer, keyed by name, and the logits that the layer predicts.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    config, inner, depth = model.config, model.model, model.config.num_hidden_layers
    layer = theirs.DeepseekV3DecoderLayer(config, depth).eval()
    for tensor in (*layer.parameters(), *layer.buffers()):
        torch.nn.init.normal_(tensor, std=0.2)
    prefix, width = f"model.layers.{depth}.", config.hidden_size
    weights = {
        "enorm.weight": 0.5 + torch.rand(width),
        "hnorm.weight": 0.5 + torch.rand(width),
        "shared_head.norm.weight": 0.5 + torch.rand(width),
        "eh_proj.weight": 0.2 * torch.randn(width, 2 * width),
    }
    enorm, hnorm, last, both = (tensor.requires_grad_() for tensor in weights.values())

    def normalize(values: Any, weight: Any) -> Any:
        return torch.nn.functional.rms_norm(values, weight.shape, weight, config.rms_norm_eps)

    hidden = inner(tokens).last_hidden_state
    after = torch.nn.functional.pad(tokens[:, 1:], (0, 1))
    values = normalize(inner.embed_tokens(after), enorm), normalize(hidden, hnorm)
    hidden = torch.cat(values, -1) @ both.t()
    places = torch.arange(tokens.shape[1])[None]
    mask = torch.full((tokens.shape[1],) * 2, -torch.inf).triu(1)[None, None]
    rotation = inner.rotary_emb(hidden, places)
    hidden = layer(hidden, attention_mask=mask, position_embeddings=rotation)
    logits = model.lm_head(normalize(hidden, last))
    added = {f"{prefix}{key}": tensor for key, tensor in layer.state_dict().items()}
    added = dict(revert_weight_conversion(model, added))
    parameters = {f"{prefix}{key}": tensor for key, tensor in weights.items()}
    added |= parameters
    added[f"{prefix}embed_tokens.weight"] = inner.embed_tokens.weight.detach()
    added[f"{prefix}shared_head.head.weight"] = model.lm_head.weight.detach()
    path = folder / "model.safetensors"
    whole = load_file(path) | {
        key: tensor.detach().contiguous().clone() for key, tensor in added.items()
    }
    save_file(whole, path, metadata={"format": "pt"})
    parameters |= {f"{prefix}{key}": tensor for key, tensor in layer.named_parameters()}
    return parameters, logits


def random_sizes(name: str, draw: random.Random, layers: int) -> dict[str, Any]:
    """Returns random sizes for a model of family ``name`` with ``layers`` layers.

    ``draw`` generates the random numbers. All sizes can be divided by two tensor-parallel ranks.
    """
    heads = draw.choice((2, 4, 6))
    width = draw.choice((4, 8, 10, 16))
    sizes: dict[str, Any] = {
        "n_layer" if name == "gpt2" else "num_hidden_layers": layers,
        "vocab_size": draw.randrange(VOCABULARY // 2, VOCABULARY) * 2,
        "initializer_range": draw.choice((0.05, 0.2)),
    }
    if name == "gpt2":
        inner = draw.choice((None, 2 * draw.randrange(8, 40)))
        activation = draw.choice(("gelu_new", "gelu"))
        more = {"n_embd": heads * width, "n_head": heads, "n_inner": inner}
        return {**sizes, **more, "activation_function": activation}
    sizes |= {
        "hidden_size": heads * width,
        "intermediate_size": 2 * draw.randrange(8, 40),
        "num_attention_heads": heads,
        "tie_word_embeddings": draw.random() < 0.3,
    }
    base = float(draw.choice((1000, 10000, 500000)))
    if name == "gpt_neox":
        share = draw.choice((0.25, 0.5, 1.0)) if width > 4 and width != 10 else 1.0
        rotation = {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": share}
        activation = draw.choice(("gelu", "gelu_new"))
        sizes["use_parallel_residual"] = draw.random() < 0.5
        return {**sizes, "rope_parameters": rotation, "hidden_act": activation}
    sizes["rms_norm_eps"] = draw.choice((1e-6, 1e-5))
    if name in MIXED:
        sizes |= _random_experts(name, draw, layers)
    if name.startswith("deepseek"):
        rotation = {"rope_type": "default", "rope_theta": base}
        return sizes | {
            "rope_parameters": draw.choice((rotation, YARN)),
            "num_key_value_heads": heads,
            "kv_lora_rank": 2 * draw.randrange(4, 12),
            "q_lora_rank": draw.choice((None, 12)),
            "qk_nope_head_dim": width,
            "qk_rope_head_dim": draw.choice((4, 8)),
            "v_head_dim": draw.choice((6, 8, 12)),
            "n_shared_experts": draw.randrange(1, 3),
            "rms_norm_eps": 1e-6,
            "first_k_dense_replace": draw.randrange(3),
            "routed_scaling_factor": draw.choice((1.0, 1.7)),
        }
    sizes["num_key_value_heads"] = draw.choice([n for n in (2, heads) if heads % n == 0])
    rotation = {"rope_type": "default", "rope_theta": base}
    if name in ("llama", "qwen2", "qwen3", "mistral") and draw.random() < 0.5:
        rotation = draw.choice((LLAMA_3, {**rotation, "rope_type": "linear", "factor": 2.0}))
    sizes["rope_parameters"] = rotation
    if name not in ("phi3", "qwen2"):
        sizes["head_dim"] = draw.choice((4, 8, 12))
    if name in ("mistral", "phi3", "mixtral"):
        sizes["sliding_window"] = draw.choice((None, 1, 3, 7, 64))
    if name in ("qwen2", "qwen3") and draw.random() < 0.5:
        window = {"use_sliding_window": True, "sliding_window": 4}
        sizes |= {**window, "max_window_layers": draw.randrange(layers)}
    if name in ("gemma2", "gemma3_text"):
        kinds = ("sliding_attention", "full_attention")
        sizes |= {
            "layer_types": [draw.choice(kinds) for _ in range(layers)],
            "sliding_window": draw.choice((1, 3, 7)),
            "query_pre_attn_scalar": draw.choice((5, 8, 24)),
            "final_logit_softcapping": draw.choice((None, 3.0)),
        }
    if name == "gemma2":
        sizes["attn_logit_softcapping"] = draw.choice((None, 2.0))
    if name == "gemma3_text":
        near = {"rope_type": "default", "rope_theta": draw.choice((10.0, 1000.0))}
        if draw.random() < 0.5:
            rotation = {**rotation, "rope_type": "linear", "factor": 4.0}
        sizes["rope_parameters"] = {"sliding_attention": near, "full_attention": rotation}
    return sizes


def _random_experts(name: str, draw: random.Random, layers: int) -> dict[str, Any]:
    experts = draw.choice((4, 8))
    sizes: dict[str, Any] = {
        "num_experts_per_tok": draw.randrange(2, 4),
        "moe_intermediate_size": 2 * draw.randrange(4, 20),
    }
    kind = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts"}
    sizes[kind.get(name, "n_routed_experts")] = experts
    if name == "mixtral":
        # Experts of this family have the width of the feed-forward layers of other families.
        del sizes["moe_intermediate_size"]
    if name == "qwen3_moe":
        sizes["norm_topk_prob"] = draw.random() < 0.5
        sizes["mlp_only_layers"] = draw.sample(range(layers), draw.randrange(3))
    if name.startswith("deepseek"):
        groups = draw.choice([n for n in (1, 2, 4) if experts // n >= 2])
        needed = -(-sizes["num_experts_per_tok"] * groups // experts)
        sizes |= {"n_group": groups, "topk_group": draw.randrange(needed, groups + 1)}
    if name == "deepseek_v2":
        sizes["topk_method"] = draw.choice(("greedy", "group_limited_greedy"))
    if name == "deepseek_v3":
        sizes["num_nextn_predict_layers"] = draw.choice((0, 0, 1))
    return sizes
