"""Defines small ``transformers`` models with random weights, and batches for each model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from packaging.version import Version

WIDTH, HEADS, WORDS, LENGTH = 32, 4, 64, 12
IMAGE, START = 60, 58  # Both IDs are special tokens, because ordinary tokens have IDs below 56.
Batch = dict[str, torch.Tensor]
Config = dict[str, Any]

RELEASE = "5.23"
"""Release of ``transformers`` whose models are in the table of ``docs/reference/cutpoint.md``."""

CHANGED = ("gemma2", "whisper", "smolvlm")
"""Families whose forward pass is recorded differently, or not at all, before :data:`RELEASE`."""


def skip_older(name: str) -> None:
    """Skips the test if the model family ``name`` requires a later release of ``transformers``."""
    import transformers

    if name in CHANGED and Version(transformers.__version__) < Version(RELEASE):
        pytest.skip(f"{name} needs transformers {RELEASE}, got {transformers.__version__}")


@dataclass(frozen=True, kw_only=True)
class Family:
    """Describes a model of ``transformers``.

    Attributes:
        name: Name in the table of ``docs/reference/cutpoint.md``.
        model_class: Class of the model in ``transformers``.
        model_type: Name of the configuration in ``transformers``.
        config: Function that takes the total number of blocks and returns the configuration.
        make_batch: Function that returns a batch of four samples.
        slicing: Value of the pipeline's option ``slicing`` that the family requires.
        decisive_entries: Names of the batch entries whose values determine which operations the
            model runs.
        arguments: Additional arguments of ``forward``, which are the same for all batches.
    """

    name: str
    model_class: str
    model_type: str
    config: Callable[[int], Config]
    make_batch: Callable[[], Batch]
    slicing: str = "auto"
    decisive_entries: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def build(self, blocks: int) -> torch.nn.Module:
        """Returns a model with ``blocks`` blocks. Each call returns the same weights."""
        import transformers

        transformers.logging.set_verbosity_error()
        config = transformers.AutoConfig.for_model(self.model_type, **self.config(blocks))
        torch.manual_seed(1)
        model: torch.nn.Module = getattr(transformers, self.model_class)(config)
        return model


def random_ids(length: int, seed: int, most: int = 56) -> torch.Tensor:
    """Returns random token IDs from 3 to ``most - 1``, with the shape ``[4, length]``.

    ``seed`` is the seed of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, most, (4, length), generator=generator)


def random_values(*shape: int) -> torch.Tensor:
    """Returns random values for pixels or audio frames, with the shape ``[4, *shape]``."""
    return torch.randn(4, *shape, generator=torch.Generator().manual_seed(2))


def text() -> Batch:
    """Returns a batch of four sentences.

    The third sentence is padded on the right, and the fourth is padded on the left.
    """
    ids = random_ids(LENGTH, 3)
    mask = torch.ones_like(ids)
    mask[2, 9:] = 0
    mask[3, :5] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def gaps() -> Batch:
    """Returns a batch of sentences in which every second word has no label."""
    batch = text()
    batch["labels"][:, ::2] = -100
    return batch


def translations() -> Batch:
    """Returns a batch of four sentences, whose labels are four other sentences."""
    return {**text(), "labels": random_ids(8, 4)}


def speech() -> Batch:
    """Returns a batch with the audio features and the transcripts of four samples."""
    return {"input_features": random_values(16, 40), "labels": random_ids(8, 4)}


def images() -> Batch:
    """Returns a batch of four images and the classes of the images."""
    return {"pixel_values": random_values(3, 8, 8), "labels": torch.tensor([0, 1, 1, 0])}


def captions() -> Batch:
    """Returns a batch of four images, and four sentences that end with the end token."""
    ids = random_ids(LENGTH, 3)
    ids[:, -1] = 2
    return {"input_ids": ids, "pixel_values": random_values(3, 8, 8)}


def images_in_text(
    num_tokens: int, *shape: int, types: str | None = None, grid: tuple[int, ...] | None = None
) -> Callable[[], Batch]:
    """Returns a function that creates a batch of sentences with one image each.

    Args:
        num_tokens: Number of tokens that represent an image.
        shape: Shape of an image's pixels.
        types: Name of the batch entry with the type of each token, text or image.
        grid: Number of frames, rows and columns of patches, if the model requires a grid. Models
            with a grid compute the positions of tokens from the grid, so all sentences then have
            equal length.
    """

    def make() -> Batch:
        batch = text()
        ids = batch["input_ids"]
        for row, start in zip(ids, (1, 4, 2, 6) if grid is None else (1, 1, 1, 1), strict=True):
            row[start : start + 1 + num_tokens] = torch.tensor([START] + [IMAGE] * num_tokens)
        is_ignored = (ids >= 56) | (batch["attention_mask"] == 0)
        batch["labels"] = ids.masked_fill(is_ignored, -100)
        batch["pixel_values"] = random_values(*shape)
        if types is not None:
            batch[types] = (ids == IMAGE).long()
        if grid is not None:
            batch["attention_mask"].fill_(1)
            batch["image_grid_thw"] = torch.tensor([grid] * 4)
        return batch

    return make


TOKENS: Config = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES: Config = {
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
    **TOKENS,
}
EXPERTS: Config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS: Config = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS: Config = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
}
NO_DROPOUT: Config = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
PIXELS: Config = {"image_size": 8, "patch_size": 4, "num_channels": 3}


def decoder(blocks: int, **options: Any) -> Config:
    """Returns the configuration of a decoder with ``blocks`` layers and grouped-query attention."""
    return {**SIZES, "num_hidden_layers": blocks, "num_key_value_heads": 2, **options}


def vision(blocks: int, **options: Any) -> Config:
    """Returns the configuration of an image encoder with ``blocks`` layers."""
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": 48}
    return {**sizes, **PIXELS, "num_hidden_layers": blocks, **options}


def causal(name: str, model_class: str, model_type: str | None = None, **options: Any) -> Family:
    """Returns the :class:`Family` of a text decoder. ``options`` are settings of the model."""
    return Family(
        name=name,
        model_class=f"{model_class}ForCausalLM",
        model_type=model_type or name,
        config=lambda blocks: decoder(blocks, **options),
        make_batch=text,
    )


def rope(**options: Any) -> Config:
    """Returns the configuration of rotary position embeddings, with ``options`` added."""
    return {"rope_type": "default", "rope_theta": 1e4, **options}


def two_lists(
    name: str,
    model_class: str,
    config: Callable[[int, int], Config],
    make_batch: Callable[[], Batch],
    model_type: str | None = None,
    **options: Any,
) -> Family:
    """Returns a family with two lists of blocks, such as an encoder and a decoder.

    Args:
        name: Name in the table.
        model_class: Class of the model.
        config: Function that returns the configuration for the lengths of the two lists.
        make_batch: Function that returns a batch.
        model_type: Name of the configuration if it is not ``name``.
        options: Other attributes of :class:`Family`.
    """
    return Family(
        name=name,
        model_class=model_class,
        model_type=model_type or name,
        config=lambda blocks: config(blocks // 2, blocks - blocks // 2),
        make_batch=make_batch,
        **options,
    )


def gpt2(blocks: int) -> Config:
    """Returns the configuration of GPT-2 with ``blocks`` layers."""
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_embd": WIDTH, "n_head": HEADS, "n_layer": blocks, "n_positions": 64}
    return {**sizes, "vocab_size": WORDS, **dropout, **TOKENS}


def t5(encoder: int, decoder: int) -> Config:
    """Returns the configuration of T5.

    The encoder has ``encoder`` blocks, and the decoder has ``decoder`` blocks.
    """
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_heads": HEADS, "vocab_size": WORDS}
    lengths = {"num_layers": encoder, "num_decoder_layers": decoder}
    return {**sizes, **lengths, "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0}


def whisper(encoder: int, decoder: int) -> Config:
    """Returns the configuration of Whisper.

    The encoder has ``encoder`` blocks, and the decoder has ``decoder`` blocks.
    """
    config: Config = {
        "d_model": WIDTH,
        "vocab_size": WORDS,
        "num_mel_bins": 16,
        "max_source_positions": 20,
        "max_target_positions": 20,
        "dropout": 0.0,
        "decoder_start_token_id": 1,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
        **TOKENS,
    }
    for side, blocks in (("encoder", encoder), ("decoder", decoder)):
        config[f"{side}_layers"] = blocks
        config[f"{side}_attention_heads"] = HEADS
        config[f"{side}_ffn_dim"] = 48
    return config


def clip(images: int, layers: int) -> Config:
    """Returns the configuration of CLIP.

    The image encoder has ``images`` blocks, and the text encoder has ``layers`` blocks.
    """
    text_config = {**SIZES, "num_hidden_layers": layers}
    return {"text_config": text_config, "vision_config": vision(images), "projection_dim": 16}


def llava(images: int, layers: int) -> Config:
    """Returns the configuration of LLaVA.

    The image encoder has ``images`` blocks, and the text decoder has ``layers`` blocks.
    """
    return {
        "text_config": decoder(layers, model_type="llama"),
        "vision_config": vision(images, model_type="clip_vision_model"),
        "image_token_id": IMAGE,
        "image_token_index": IMAGE,
        "vision_feature_select_strategy": "default",
        "vision_feature_layer": -1,
    }


def qwen_vl(kind: str, sections: list[int], **tower: Any) -> Callable[[int, int], Config]:
    """Returns a function that creates the configuration of a Qwen model with images.

    ``kind`` is the type of the text decoder, ``sections`` divides its rotary positions, and
    ``tower`` contains settings of the image encoder.

    The function takes the numbers of blocks of the image encoder and the text decoder.
    """

    def config(images: int, layers: int) -> Config:
        positions = rope(mrope_section=sections)
        text_config = decoder(layers, model_type=kind, head_dim=8, rope_parameters=positions)
        vision_config = {
            "depth": images,
            "hidden_size": WIDTH,
            "out_hidden_size": WIDTH,
            "intermediate_size": 48,
            "num_heads": HEADS,
            "in_channels": 3,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            **tower,
        }
        tokens = {"image_token_id": IMAGE, "video_token_id": 61, "vision_start_token_id": START}
        return {"text_config": text_config, "vision_config": vision_config, **tokens}

    return config


def gemma3(images: int, layers: int) -> Config:
    """Returns the configuration of Gemma 3 with images.

    The image encoder has ``images`` blocks, and the text decoder has ``layers`` blocks.
    """
    tower = {"model_type": "siglip_vision_model", "vision_use_head": False, "image_size": 16}
    return {
        "text_config": decoder(layers, head_dim=8, sliding_window=6, query_pre_attn_scalar=8),
        "vision_config": vision(images, **tower),
        "mm_tokens_per_image": 4,
        "image_token_id": IMAGE,
        "image_token_index": IMAGE,
        "boi_token_index": START,
        "eoi_token_index": 59,
    }


def internvl(images: int, layers: int) -> Config:
    """Returns the configuration of InternVL.

    The image encoder has ``images`` blocks, and the text decoder has ``layers`` blocks.
    """
    tower = {"image_size": [8, 8], "patch_size": [4, 4], "hidden_dropout_prob": 0.0}
    return {
        "text_config": decoder(layers, model_type="qwen2"),
        "vision_config": vision(images, **tower),
        "image_token_id": IMAGE,
        "image_seq_length": 1,
        "downsample_ratio": 0.5,
    }


def idefics3(images: int, layers: int) -> Config:
    """Returns the configuration of Idefics 3 and SmolVLM.

    The image encoder has ``images`` blocks, and the text decoder has ``layers`` blocks.
    """
    return {
        "text_config": decoder(layers, model_type="llama"),
        "vision_config": vision(images),
        "image_token_id": IMAGE,
        "scale_factor": 2,
    }


def mamba2(blocks: int) -> Config:
    """Returns the configuration of Mamba 2 with ``blocks`` layers."""
    sizes = {"hidden_size": WIDTH, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2}
    return {**sizes, "num_hidden_layers": blocks, "vocab_size": WORDS, "chunk_size": 8, **TOKENS}


NEXT: Config = {
    "head_dim": 8,
    "shared_expert_intermediate_size": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
LATENT: Config = {
    "num_key_value_heads": HEADS,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
TIED: Config = {"tie_word_embeddings": True}
SLIDING: Config = {"sliding_window": 6}
GEMMA: Config = {"head_dim": 8, "query_pre_attn_scalar": 8, **SLIDING}
PATCHES = (1, 4, 4)
QWEN_ENTRIES = ("image_grid_thw", "mm_token_type_ids", "attention_mask")
QWEN_IMAGES = images_in_text(4, 16, 96, types="mm_token_type_ids", grid=PATCHES)

FAMILIES = (
    causal("llama", "Llama"),
    causal("qwen2", "Qwen2", **TIED),
    causal("qwen3", "Qwen3", head_dim=8, **TIED),
    causal("qwen3_moe", "Qwen3Moe", head_dim=8, output_router_logits=True, **EXPERTS),
    causal("qwen3_next", "Qwen3Next", **NEXT, **EXPERTS),
    causal("mistral", "Mistral", head_dim=8, **SLIDING),
    causal("mixtral", "Mixtral", output_router_logits=True, **LOCAL_EXPERTS),
    causal("gemma2", "Gemma2", **GEMMA),
    causal("gemma3_text", "Gemma3", **GEMMA),
    causal("phi3", "Phi3"),
    causal("phi4", "Phi3", "phi3", partial_rotary_factor=0.5, **TIED),
    causal("gpt_oss", "GptOss", head_dim=8, rope_parameters=rope(), **SLIDING, **LOCAL_EXPERTS),
    causal("glm4_moe", "Glm4Moe", head_dim=8, n_group=1, topk_group=1, **ROUTED_EXPERTS),
    causal("olmo2", "Olmo2"),
    causal("olmo3", "Olmo3", **SLIDING),
    causal("olmoe", "Olmoe", output_router_logits=True, num_experts=4, num_experts_per_tok=2),
    causal("smollm3", "SmolLM3"),
    causal("granite", "Granite"),
    causal("deepseek_v3", "DeepseekV3", n_group=2, topk_group=1, **LATENT, **ROUTED_EXPERTS),
    causal("minimax", "MiniMax", head_dim=8, block_size=4, **LOCAL_EXPERTS),
    causal("minimax_m2", "MiniMaxM2", head_dim=8, **LOCAL_EXPERTS),
    causal("nemotron", "Nemotron"),
    causal("gpt_neox", "GPTNeoX"),
    Family(
        name="gpt2", model_class="GPT2LMHeadModel", model_type="gpt2", config=gpt2, make_batch=text
    ),
    Family(
        name="bert",
        model_class="BertForMaskedLM",
        model_type="bert",
        config=lambda blocks: {**SIZES, **NO_DROPOUT, "num_hidden_layers": blocks},
        make_batch=gaps,
    ),
    two_lists("t5", "T5ForConditionalGeneration", t5, translations),
    two_lists("whisper", "WhisperForConditionalGeneration", whisper, speech),
    Family(
        name="vit",
        model_class="ViTForImageClassification",
        model_type="vit",
        config=lambda blocks: vision(blocks, **NO_DROPOUT),
        make_batch=images,
    ),
    two_lists("clip", "CLIPModel", clip, captions, arguments={"return_loss": True}),
    two_lists("llava", "LlavaForConditionalGeneration", llava, images_in_text(4, 3, 8, 8)),
    two_lists(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        qwen_vl("qwen2_5_vl_text", [1, 1, 2], window_size=16, fullatt_block_indexes=[1]),
        QWEN_IMAGES,
        decisive_entries=QWEN_ENTRIES,
    ),
    two_lists(
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        qwen_vl(
            "qwen3_vl_text", [2, 1, 1], num_position_embeddings=16, deepstack_visual_indexes=[0, 1]
        ),
        QWEN_IMAGES,
        decisive_entries=QWEN_ENTRIES,
    ),
    two_lists(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        gemma3,
        images_in_text(4, 3, 16, 16, types="token_type_ids"),
    ),
    two_lists("internvl", "InternVLForConditionalGeneration", internvl, images_in_text(1, 3, 8, 8)),
    two_lists(
        "idefics3",
        "Idefics3ForConditionalGeneration",
        idefics3,
        images_in_text(1, 1, 3, 8, 8),
        slicing="record",
    ),
    two_lists(
        "smolvlm",
        "SmolVLMForConditionalGeneration",
        idefics3,
        images_in_text(1, 1, 3, 8, 8),
        slicing="record",
    ),
    Family(
        name="mamba2",
        model_class="Mamba2ForCausalLM",
        model_type="mamba2",
        config=mamba2,
        make_batch=text,
    ),
)
"""All families that the tests cover, in the order of the documentation's table."""
