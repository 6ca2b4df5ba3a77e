"""Tests ``SampleFile``, for example which tokens are learned and which lines are rejected."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.adaptive.errors import ConfigError

pytest.importorskip("transformers", reason="bash prerequisite.sh --examples")
from PIL import Image

from megatron.adaptive.modules.samples import SampleFile, SampleReader, num_learned

from ..support.tuned_models import TEMPLATE, make_processor, make_tokenizer

QUESTION = {"role": "user", "content": "one?"}
ANSWER = {"role": "assistant", "content": "two"}


def read(folder: Path, *lines: Any, processor: Any = None, **options: Any) -> SampleFile:
    """Writes ``lines`` (strings or objects) to a file, and returns the samples in this file.

    The file is in ``folder``, ``processor`` encodes the samples, and ``options`` are settings of
    the reader.
    """
    path = folder / "train.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts), encoding="utf-8")
    return SampleReader(processor=processor or make_processor(), **options).read(path)


def conversation(*parts: Any, **others: Any) -> dict[str, Any]:
    """Returns a line of a data file, which contains a question and an answer.

    The question begins with ``parts``. ``others`` are further entries of the line.
    """
    question = {"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}
    return {"messages": [question, ANSWER], **others}


@pytest.mark.parametrize("mark", ["{% generation %}", "{%- generation -%}", "{%generation%}"])
def test_only_answers_are_learned(tmp_path: Path, mark: str) -> None:
    """Checks that only answers are learned, for each spelling of the template's generation tag."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("{% generation %}", mark)
    line = {"messages": [QUESTION, ANSWER]}
    sample = read(tmp_path, line, processor=tokenizer, length_multiple=8)[0]
    labels = sample["labels"][0]
    assert tokenizer.decode(labels[labels >= 0]).replace(" ", "") == "two</s>"
    assert sample["input_ids"].shape[1] % 8 == 0
    with pytest.raises(ConfigError, match=r"no samples with tokens to learn \(skipped 1 samples"):
        read(tmp_path, line, processor=tokenizer, max_length=4)


def test_a_tokenizer_without_masks_is_read(tmp_path: Path) -> None:
    """Checks that a tokenizer whose only model input is ``input_ids`` is supported."""
    tokenizer = make_tokenizer()
    lines = ({"text": "one two"}, {"messages": [QUESTION, ANSWER]})
    expected = list(read(tmp_path, *lines, processor=tokenizer))
    tokenizer.model_input_names = ["input_ids"]
    samples = list(read(tmp_path, *lines, processor=tokenizer))
    for sample, same in zip(samples, expected, strict=True):
        assert sample.keys() == {"input_ids", "labels"}
        assert all(torch.equal(sample[name], same[name]) for name in sample)


@pytest.mark.parametrize("has_id", [True, False])
def test_tokens_that_stand_for_images_are_not_learned(tmp_path: Path, has_id: bool) -> None:
    """Checks that image tokens in texts, templates and marked answers are not learned."""
    Image.new("RGB", (9, 9), (250, 0, 0)).save(tmp_path / "a.png")
    processor = make_processor()
    token = processor.image_token_id
    if not has_id:
        del processor.image_token_id
    template = processor.chat_template
    plain = re.sub("{% (end)?generation %}", "", template)
    marked = template.replace("<image>", "{% generation %}<image>{% endgeneration %}")
    image = {"type": "image", "path": "a.png"}
    lines = [
        (template, {"text": "<image>ab", "images": ["a.png"]}, "ab"),
        (plain, conversation(image), "<user>what?<assistant>two</s>"),
        (marked, conversation(image), "two</s>"),
    ]
    for chosen, line, learned in lines:
        processor.chat_template = chosen
        sample = read(tmp_path, line, processor=processor)[0]
        assert (sample["input_ids"] == token).sum() == 4
        labels = sample["labels"][0]
        assert processor.tokenizer.decode(labels[labels >= 0]).replace(" ", "") == learned
        positions = (labels[1:] >= 0).sum()
        assert num_learned([sample]) == [float(positions)]


def test_a_configuration_names_further_tokens(tmp_path: Path) -> None:
    """Checks that special tokens are not learned if only the model's configuration names them."""
    config = SimpleNamespace(image_token_index=7, audio_token_id=make_tokenizer().encode("b")[0])
    sample = read(tmp_path, {"text": "abba"}, processor=make_tokenizer(), config=config)[0]
    assert num_learned([sample]) == [1.0]


def test_samples_without_memory_are_encoded_again(tmp_path: Path) -> None:
    Image.new("RGB", (9, 9), (250, 0, 0)).save(tmp_path / "a.png")
    lines = [conversation({"type": "image", "path": "a.png"}), {"text": "a\u2028b"}]
    kept = read(tmp_path, *lines)
    again = read(tmp_path, lines[0], json.dumps(lines[1], ensure_ascii=False), kept_bytes=0)
    assert len(kept) == len(again) == 2
    for sample, other in zip(kept, again, strict=True):
        assert sample.keys() == other.keys()
        assert all(torch.equal(sample[name], other[name]) for name in sample)
    assert [sorted(kind) for kind in kept.kinds] == [
        ["input_ids", "labels", "pixel_values"],
        ["input_ids", "labels"],
    ]


def test_all_forms_of_images_are_the_same_sample(tmp_path: Path) -> None:
    """Checks that all ways to refer to an image give the same sample."""
    (tmp_path / "images").mkdir()
    Image.new("RGBA", (9, 9), (250, 0, 0, 9)).save(tmp_path / "images" / "a.png")
    path = str(tmp_path / "images" / "a.png")
    samples = read(
        tmp_path,
        conversation({"type": "image", "path": "a.png"}),
        conversation({"type": "image", "url": path}),
        conversation({"type": "image_url", "image_url": {"url": "a.png"}}),
        conversation({"type": "image"}, images=["a.png"]),
        image_folder=tmp_path / "images",
    )
    for sample in samples:
        assert all(torch.equal(sample[name], samples[0][name]) for name in samples[0])
    assert num_learned(list(samples)) == [4.0] * 4
    tokenizer = make_tokenizer()
    in_parts, plain = read(
        tmp_path,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "one?"}]}, ANSWER]},
        {"messages": [QUESTION, ANSWER]},
        processor=tokenizer,
    )
    assert torch.equal(in_parts["input_ids"], plain["input_ids"])


IMAGE = {"type": "image", "path": "a.png"}
WRONG_LINES: dict[str, tuple[Any, str]] = {
    "not JSON": ('{"text": ', "the line cannot be encoded (JSONDecodeError: Expecting value"),
    "no object": ("[1]", 'JSON object with the key "text", or "messages"'),
    "no text": ({"prompt": "a"}, 'JSON object with the key "text", or "messages"'),
    "number as text": ({"text": 5}, "text must be a string, got a int"),
    "messages": ({"messages": "a"}, "messages must be a list of objects like"),
    "no role": ({"messages": [{"content": "a"}]}, "messages must be a list of objects like"),
    "content": ({"messages": [{"role": "user", "content": 5}]}, "must be a string or a list"),
    "part": (conversation({"type": "video", "path": "a"}), "a part of a message is"),
    "missing": (conversation({"type": "image", "path": "b.png"}), "b.png does not exist"),
    "folder": (conversation({"type": "image", "path": "."}), "is not a file"),
    "pipe": (conversation({"type": "image", "path": "pipe"}), "pipe is not a file"),
    "outside": (
        conversation({"type": "image", "path": "../a.png"}),
        "is outside of the image folder",
    ),
    "link": (conversation({"type": "image", "path": "link.png"}), "is outside of the image folder"),
    "text file": (conversation({"type": "image", "path": "text.png"}), "Pillow does not support"),
    "cut off": (conversation({"type": "image", "path": "cut.png"}), "cut.png is damaged ("),
    "address": (conversation({"type": "image", "url": "https://a/b.png"}), "not downloaded"),
    "no list": ({"text": "<image>", "images": "a.png"}, "images must be a list"),
    "no path": (conversation({"type": "image"}), "images lists 0 images, but the messages"),
    "too many": (conversation(IMAGE, images=["a.png"]), "1 of the 1 listed images are not used"),
    "marker": ({"text": "<image> a"}, "has 0 images, but its text has 1 image placeholders"),
    "no marker": ({"text": "a", "images": ["a.png"]}, "the line has 1 images, but its text has 0"),
    "long": (conversation(IMAGE, IMAGE, IMAGE), "would remove 11 tokens, including tokens of"),
}


@pytest.mark.parametrize("name", WRONG_LINES)
def test_a_wrong_line_is_named(tmp_path: Path, name: str) -> None:
    for folder in (tmp_path, tmp_path / "data"):
        folder.mkdir(exist_ok=True)
        Image.effect_noise((64, 64), 50).save(folder / "a.png")
    folder = tmp_path / "data"
    os.mkfifo(folder / "pipe")
    (folder / "link.png").symlink_to(tmp_path / "a.png")
    (folder / "text.png").write_text("no image")
    (folder / "cut.png").write_bytes((folder / "a.png").read_bytes()[:900])
    line, message = WRONG_LINES[name]
    with pytest.raises(ConfigError) as caught:
        read(folder, conversation(IMAGE), line, max_length=12)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{folder / 'train.jsonl'}:2: ")
    assert "\n" not in str(caught.value)


def test_models_and_templates_without_images_refuse_them(tmp_path: Path) -> None:
    Image.new("RGB", (9, 9)).save(tmp_path / "a.png")
    for line in (conversation(IMAGE), {"text": "a", "images": ["a.png"]}):
        with pytest.raises(ConfigError, match=r"jsonl:1: the line has images, but the model's"):
            read(tmp_path, line, processor=make_tokenizer())
    processor = make_processor()
    processor.chat_template = str(processor.chat_template).replace("<image>", "")
    with pytest.raises(ConfigError, match=r"jsonl:1: the line has 1 images, but its text has 0"):
        read(tmp_path, conversation(IMAGE), processor=processor)
    processor.chat_template = None
    with pytest.raises(ConfigError, match=r"jsonl:1: the model's folder has no chat template"):
        read(tmp_path, conversation(IMAGE), processor=processor)


def test_a_line_that_is_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a, b"}\n\n{"text": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"jsonl:3: byte 10 is not valid UTF-8"):
        SampleReader(processor=make_tokenizer()).read(path)


def test_the_digest_differs_if_a_line_or_an_image_does(tmp_path: Path) -> None:
    """Checks that the digest depends on lines and images, but not on the encoding settings."""
    (tmp_path / "images").mkdir()
    image = tmp_path / "images" / "a.png"
    (tmp_path / "b.png").symlink_to(image)
    Image.effect_noise((64, 64), 50).save(image)
    lines = [conversation({"type": "image", "path": "b.png"}), {"text": "a, b"}]
    first = read(tmp_path, *lines).digest
    assert read(tmp_path, *lines, max_length=300).digest == first
    assert read(tmp_path, *lines[::-1]).digest != first
    assert read(tmp_path, lines[0], {"text": "a, c"}).digest != first
    Image.effect_noise((64, 64), 50).save(image)
    assert read(tmp_path, *lines).digest != first
