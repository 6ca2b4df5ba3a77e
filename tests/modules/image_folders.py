"""Creates folders with small vision-language models that have a processor and random weights.

The folders have the layout of published models: image settings are in ``preprocessor_config.json``,
and video settings are in ``video_preprocessor_config.json`` or together with the image settings.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

from .families import FAMILIES

SPECIAL = ("<pad>", "</s>", "<bos>", "<start>", "<end>")
TEMPLATE = (
    "{% for message in messages %}<start>{{ message['role'] }}:"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% elif message['role'] == 'assistant' %}"
    "{% generation %}{{ part['text'] }}<end>{% endgeneration %}"
    "{% else %}{{ part['text'] }}<end>{% endif %}{% endfor %}{% endfor %}"
)
VIDEO_FILE = "video_preprocessor_config.json"


@dataclass(frozen=True, kw_only=True)
class ImageFolder:
    """Describes the model folder of a vision-language model.

    Attributes:
        processor: Class of the processor.
        images: Class of the image processor, without the suffix ``Pil``.
        settings: Settings of the image processor.
        image_text: Text that represents an image in the chat template.
        tokens: Tokens for images and videos in the tokenizer.
        named: Maps attributes of the tokenizer to the tokens among ``tokens`` that they contain.
        ids: Maps settings of the model that contain a token's ID to the token.
        processor_settings: Settings that are written to ``processor_config.json``.
        video: Settings of the video processor, or ``None`` if there is no video processor.
        slicing: Value of the pipeline's option ``slicing`` that the family requires.
        needs: Packages that transformers imports for the processor.
    """

    processor: str
    images: str
    settings: Mapping[str, Any]
    image_text: str
    tokens: tuple[str, ...]
    named: Mapping[str, str] = field(default_factory=dict)
    ids: Mapping[str, str]
    processor_settings: Mapping[str, Any] = field(default_factory=dict)
    video: Mapping[str, Any] | None = None
    slicing: str = "auto"
    needs: tuple[str, ...] = ()

    @property
    def ids_token(self) -> str:
        """Returns the token that represents one part of an image."""
        return self.ids["image_token_id"]


def _qwen(number: str, video: Mapping[str, Any]) -> ImageFolder:
    return ImageFolder(
        processor=f"Qwen{number}Processor",
        images="Qwen2VLImageProcessor",
        settings={
            "patch_size": 4,
            "merge_size": 2,
            "size": {"shortest_edge": 64, "longest_edge": 400},
        },
        image_text="<|vision_start|><|image_pad|><|vision_end|>",
        tokens=("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        ids={
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
        },
        video=video,
    )


_IDEFICS: dict[str, Any] = {
    "settings": {
        "size": {"longest_edge": 16},
        "max_image_size": {"longest_edge": 8},
        "do_image_splitting": True,
    },
    "image_text": "<image>",
    "tokens": (
        "<image>",
        "<fake_token_around_image>",
        "<global-img>",
        "<end_of_utterance>",
        *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
    ),
    "ids": {"image_token_id": "<image>"},
    "processor_settings": {"image_seq_len": 1},
    "slicing": "record",
}

IMAGE_FOLDERS: dict[str, ImageFolder] = {
    "qwen2_5_vl": _qwen("2_5_VL", {}),
    "qwen3_vl": _qwen("3VL", {"patch_size": 4, "temporal_patch_size": 2, "fps": 3}),
    "gemma3": ImageFolder(
        processor="Gemma3Processor",
        images="Gemma3ImageProcessor",
        settings={"size": {"height": 16, "width": 16}},
        image_text="<start_of_image>",
        tokens=("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        named={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        ids={
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
            "image_token_id": "<image_soft_token>",
            "image_token_index": "<image_soft_token>",
        },
        processor_settings={"image_seq_length": 4},
    ),
    "internvl": ImageFolder(
        processor="InternVLProcessor",
        images="GotOcr2ImageProcessor",
        settings={"size": {"height": 8, "width": 8}, "min_patches": 1, "max_patches": 2},
        image_text="<IMG_CONTEXT>",
        tokens=("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        ids={"image_token_id": "<IMG_CONTEXT>"},
        processor_settings={"image_seq_length": 1},
        video={"size": {"height": 8, "width": 8}},
    ),
    "idefics3": ImageFolder(
        processor="Idefics3Processor", images="Idefics3ImageProcessor", **_IDEFICS
    ),
    "smolvlm": ImageFolder(
        processor="SmolVLMProcessor",
        images="SmolVLMImageProcessor",
        video={"fps": 1, "num_frames": 8},
        needs=("num2words",),
        **_IDEFICS,
    ),
}
"""Maps the name of each model family in ``families.py`` to the description of its folder."""


def make_tokenizer(described: ImageFolder) -> transformers.PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per letter and the special tokens in ``described``."""
    letters = [chr(code) for code in range(32, 127)]
    special = [*SPECIAL, *described.tokens]
    vocabulary = {token: index for index, token in enumerate([*special, *letters, "\n"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    names = {
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "bos_token": "<bos>",
        "unk_token": "?",
        "chat_template": TEMPLATE.replace("IMAGE", described.image_text),
    }
    if described.named:
        names["extra_special_tokens"] = {**described.named}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    made.add_tokens([*SPECIAL[3:], *described.tokens], special_tokens=True)
    assert len(made) == len(vocabulary)
    return made


def write_folder(name: str, folder: Path) -> Path:
    """Writes the files of the model ``name`` to ``folder``, and returns ``folder``."""
    described = IMAGE_FOLDERS[name]
    tokenizer = make_tokenizer(described)
    tokenizer.save_pretrained(folder)
    images = getattr(transformers, f"{described.images}Pil")(**described.settings)
    images.save_pretrained(folder)
    path = folder / "preprocessor_config.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "processor_class": described.processor}))
    if described.video:
        (folder / VIDEO_FILE).write_text(json.dumps({**described.video}))
    if described.processor_settings:
        settings = {**described.processor_settings, "processor_class": described.processor}
        (folder / "processor_config.json").write_text(json.dumps(settings))
    family = next(family for family in FAMILIES if family.name == name)
    config = family.config(4)
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in described.ids.items()}
    config.update(ids)
    config["text_config"].update(vocab_size=len(tokenizer), max_position_embeddings=512)
    torch.manual_seed(1)
    made = transformers.AutoConfig.for_model(family.model_type, **config)
    getattr(transformers, family.model_class)(made).save_pretrained(folder)
    return folder


def write_data(folder: Path, name: str, count: int = 12) -> Path:
    """Writes ``count`` conversations with images to a file in ``folder``, and returns its path.

    A conversation has up to two images of different sizes. One line contains text instead of a
    conversation. ``name`` is the model family, which determines the text that represents an image.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"wide": (20, 10), "tall": (9, 17), "small": (8, 8)}
    for number, (image, size) in enumerate(sizes.items()):
        generator = random.Random(number)
        pixels = bytes(generator.randrange(256) for _ in range(3 * size[0] * size[1]))
        Image.frombytes("RGB", size, pixels).save(folder / f"{image}.png")
    lines: list[Any] = []
    names = [f"{image}.png" for image in sizes]
    for number in range(count):
        chosen = [names[number % 3], names[(number + 1) % 3]][: number % 3]
        parts = [{"type": "image", "path": image} for image in chosen]
        question = {"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}
        answer = {"role": "assistant", "content": f"{'a' * (number % 4 + 1)} b"}
        lines.append({"messages": [question, answer]})
    marker = IMAGE_FOLDERS[name].image_text
    lines[4] = {"text": f"{marker}a small one", "images": ["small.png"]}
    path = folder / "train.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path
