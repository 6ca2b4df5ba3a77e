"""Creates small ``transformers`` models, tokenizers and data for tests of fine-tuning."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from megatron.adaptive.modules.samples import SampleReader, load_processor, num_learned

logging.set_verbosity_error()
logging.disable_progress_bar()
SPECIAL = ["<pad>", "</s>", "<user>", "<assistant>", "<image>"]
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}</s>{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)
IMAGE_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>"
    "{% elif message['role'] == 'assistant' %}"
    "{% generation %}{{ part['text'] }}</s>{% endgeneration %}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
COLORS = {"red": (250, 0, 0), "green": (0, 250, 0), "blue": (0, 0, 250)}
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per character."""
    letters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: index for index, token in enumerate(SPECIAL + letters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="?",
        additional_special_tokens=SPECIAL[2:],
        chat_template=TEMPLATE,
    )


def make_processor() -> Any:
    """Returns a processor for images of 8 by 8 pixels. Each image becomes four tokens."""
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(
            size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}
        ),
        tokenizer=make_tokenizer(),
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=IMAGE_TEMPLATE,
    )


def write_text_model(folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Writes a small model that accepts only text, and its tokenizer, to ``folder``.

    The weights are saved in ``dtype``.
    """
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_hidden_layers=4, num_key_value_heads=2, **SIZES
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)


def write_image_model(folder: Path) -> None:
    """Writes a model for text and images to ``folder``.

    Images have 8 by 8 pixels, which the model splits into patches of 4 by 4.
    """
    processor = make_processor()
    processor.save_pretrained(folder)
    torch.manual_seed(1)
    text = {**SIZES, "num_hidden_layers": 2, "vocab_size": 100, "model_type": "llama"}
    vision = {**SIZES, "num_hidden_layers": 2, "image_size": 8, "patch_size": 4}
    config = LlavaConfig(
        text_config=text,
        vision_config={**vision, "model_type": "clip_vision_model"},
        image_token_id=SPECIAL.index("<image>"),
        vision_feature_layer=-1,
    )
    LlavaForConditionalGeneration(config).save_pretrained(folder)


def write_text_data(path: Path) -> None:
    """Writes conversations and texts of different lengths to the file ``path``."""
    lines = []
    for number in range(40):
        question = {"role": "user", "content": f"{number} times two?"}
        answer = {"role": "assistant", "content": f"It is {2 * number}." + " Yes." * (number % 3)}
        messages = {"messages": [question, answer]}
        text = {"text": "one, two, " * (number % 5 + 1)}
        lines.append(json.dumps(messages if number % 4 else text))
    path.write_text("\n".join(lines), encoding="utf-8")


def write_image_data(folder: Path, count: int = 20) -> Path:
    """Writes ``count`` conversations about colors of images to a file in ``folder``.

    The file contains lines of all supported formats. Returns the path of the file.
    """
    (folder / "images").mkdir(parents=True)
    for name, color in COLORS.items():
        Image.new("RGB", (20, 12), color).save(folder / "images" / f"{name}.png")
    lines = []
    names = list(COLORS)
    for number in range(count):
        name = names[number % 3]
        paths = [f"images/{name}.png", f"images/{names[number % 2]}.png"][: number % 3]
        form = number % 4
        parts: list[Any]
        sample: dict[str, Any] = {}
        if form == 0:
            parts = [{"type": "image", "path": path} for path in paths]
        elif form == 1:
            parts = [{"type": "image_url", "image_url": {"url": path}} for path in paths]
        else:
            parts = [{"type": "image"} for _ in paths]
            sample["images"] = paths
        question = {"role": "user", "content": [*parts, {"type": "text", "text": "color?"}]}
        answer = {"role": "assistant", "content": name + "!" * (number % 2)}
        sample["messages"] = [question, answer]
        if form == 3:
            sample = {"text": f"{'<image>' * len(paths)}{name}", "images": paths}
        lines.append(json.dumps(sample))
    random.Random(1).shuffle(lines)
    path = folder / "train.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def loss_of_transformers(
    model: Path, data: Path, indices: Sequence[int], *, adapters: Path | None = None
) -> float:
    """Returns the mean loss that ``transformers`` computes over all learned tokens of some samples.

    Args:
        model: Folder of the model.
        data: File of samples.
        indices: Indices of the samples. Samples without tokens to learn are ignored.
        adapters: Folder of adapters, or ``None`` for the model without adapters.
    """
    processor = load_processor(model)
    has_images = hasattr(processor, "image_processor")
    kind = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    network: Any = kind.from_pretrained(model)
    if adapters is not None:
        from peft import PeftModel

        network = PeftModel.from_pretrained(network, str(adapters))
    network.eval()
    samples = SampleReader(processor=processor, length_multiple=1).read(data)
    total = items = 0.0
    with torch.no_grad():
        for index in indices:
            count = num_learned([samples[index]])[0]
            total += count * float(network(**samples[index]).loss)
            items += count
    assert math.isfinite(total)
    return total / items
