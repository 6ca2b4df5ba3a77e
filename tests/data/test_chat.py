"""Compares the tokens and loss masks of conversations with those of ``transformers``."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from megatron.adaptive.data.chat import Conversation
from megatron.adaptive.data.corpus import Corpus
from megatron.adaptive.data.tokenizer import HuggingFaceTokenizer
from megatron.adaptive.errors import DataError

from .chat_templates import TEMPLATES, unmarked
from .conversation_shapes import SHAPES, Given

_SPECIAL = """
<s> </s> <|im_start|> <|im_end|> <|im_sep|> <|eot_id|> <|start_header_id|> <|end_header_id|>
<start_of_turn> <end_of_turn> <|end|> <|user|> <|assistant|> <|system|> [INST] [/INST] <think>
</think> <tool_call> </tool_call> <|User|> <|Assistant|> <|return|> <|start|> <|message|>
<|channel|>
<|end_of_turn|> [|endofturn|] <|end_of_text|> <|END_OF_TURN_TOKEN|>
"""
Masked = tuple[list[int], list[bool]]


@pytest.fixture(scope="module")
def folder(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a tokenizer that has many models' special tokens, but no template."""
    made = tmp_path_factory.mktemp("chat")
    encoder = FastTokenizer(models.BPE.from_file(str(corpus.vocab_file), str(corpus.merge_file)))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL.split()])
    encoder.save(str(made / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": None}
    (made / "tokenizer_config.json").write_text(json.dumps(settings))
    return made


def _ours(folder: Path, template: str, name: str = "chat_template.jinja") -> HuggingFaceTokenizer:
    (folder / name).write_text(template, encoding="utf-8")
    return HuggingFaceTokenizer(folder)


def _ids(tokenizer: HuggingFaceTokenizer, conversation: Given) -> Masked | None:
    """Returns the tokens and the mask of ``conversation``, or ``None`` if it is rejected."""
    try:
        return tokenizer.conversation(Conversation(**conversation))
    except DataError as error:
        message = str(error)
    assert "rejects the conversation" in message
    return None


RELEASE = "5.24"
"""First release of ``transformers`` with which all conversations of these tests can be compared.

Earlier releases differ in details. For example, if an answer ends with a character of several
tokens, they mark only the first of these tokens.
"""


class Reference:
    """Computes the results of ``transformers`` for a given chat template."""

    def __init__(self, folder: Path, template: str) -> None:
        import transformers
        from transformers import PreTrainedTokenizerFast

        if Version(transformers.__version__) < Version(RELEASE):
            pytest.skip(f"needs transformers {RELEASE}, got {transformers.__version__}")
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.tokenizer.chat_template = template

    def text(
        self, conversation: Given, *, count: int | None = None, asks: bool = False
    ) -> str | None:
        """Returns the text of the first ``count`` messages, or ``None`` if they are rejected.

        If ``asks`` is true, the generation prompt is added to the text.
        """
        whole = joined(copy.deepcopy(conversation))
        if not (messages := whole.pop("messages")[:count]):
            return None  # transformers would raise an error for an empty list.
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=asks, **whole
            )
        except Exception:  # Templates may raise any exception.
            return None
        return str(text)

    def marked(self, conversation: Given) -> Masked | None:
        """Returns tokens of ``conversation``, and whether the template's tags mark each of them."""
        whole = joined(copy.deepcopy(conversation))
        try:
            encoded = self.tokenizer.apply_chat_template(
                whole.pop("messages"), return_dict=True, return_assistant_tokens_mask=True, **whole
            )
        except Exception:  # Templates may raise any exception.
            return None
        return encoded["input_ids"], [bool(mark) for mark in encoded["assistant_masks"]]

    def by_position(self, conversation: Given) -> list[bool] | None:
        """Returns whether each token lies between a generation prompt and the end of the answer.

        Returns ``None`` if this cannot be determined, because the template writes an answer
        differently when messages follow, or because an answer does not begin with the prompt.
        """
        text = self.text(conversation)
        assert text is not None
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        taught = [False] * len(encoding.input_ids)
        for number, message in enumerate(conversation["messages"]):
            if message["role"] != "assistant":
                continue
            prompt = self.text(conversation, count=number, asks=True)
            ended = self.text(conversation, count=number + 1)
            if prompt is None or ended is None:
                return None
            if not ended.startswith(prompt) or not text.startswith(ended):
                return None
            for index, (begin, end) in enumerate(encoding.offset_mapping):
                taught[index] |= end > len(prompt) and begin < len(ended)
        return taught


def joined(value: Any) -> Any:
    """Returns ``value`` with surrogate pairs combined and single surrogates replaced.

    ``transformers`` cannot tokenize text with surrogates.
    """
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {key: joined(item) for key, item in value.items()}
    return [joined(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("family", TEMPLATES)
def test_marks_of_a_template_are_the_mask(family: str, folder: Path) -> None:
    tokenizer, reference = _ours(folder, TEMPLATES[family]), Reference(folder, TEMPLATES[family])
    for shape, conversation in SHAPES.items():
        assert _ids(tokenizer, conversation) == reference.marked(conversation), shape


@pytest.mark.parametrize("family", TEMPLATES)
def test_answers_are_found_by_position(family: str, folder: Path) -> None:
    """Checks that tokens of answers are found by position, or otherwise by the template's tags."""
    template = unmarked(TEMPLATES[family])
    tokenizer, reference = _ours(folder, template), Reference(folder, template)
    twin = Reference(folder, TEMPLATES[family])
    for shape, conversation in SHAPES.items():
        answer, expected = _ids(tokenizer, conversation), twin.marked(conversation)
        assert (answer is None) == (expected is None), shape
        if answer is None or expected is None:
            continue
        assert answer[0] == expected[0], shape
        taught = reference.by_position(conversation)
        assert answer[1] == (expected[1] if taught is None else taught), shape


def test_most_conversations_are_taken(folder: Path) -> None:
    """Checks that few conversations are rejected, and that both ways to find answers are tested."""
    counts: Counter[str] = Counter()
    for template in map(unmarked, TEMPLATES.values()):
        reference = Reference(folder, template)
        for conversation in SHAPES.values():
            if reference.text(conversation) is None:
                counts["refused"] += 1
            else:
                counts["by position" if reference.by_position(conversation) else "by the twin"] += 1
    assert counts["refused"] < 0.1 * counts.total()
    assert counts["by position"] > 0.6 * counts.total()
    assert counts["by the twin"] > 100


def _taught(tokenizer: HuggingFaceTokenizer, conversation: Given) -> str:
    ids, taught = tokenizer.conversation(Conversation(**conversation))
    return tokenizer.detokenize(index for index, mark in zip(ids, taught, strict=True) if mark)


_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_OPEN = (
    f"{{% for m in messages %}}{_TURN}{{% endfor %}}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{{ '\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("says", "taught"),
    [
        ("yo", "yo<|im_end|>\n"),
        ("", "<|im_end|>\n"),
        ("<think>\na\n</think>\n\nyo", "a\n</think>\n\nyo<|im_end|>\n"),
        ("<think>a</think>yo", "<think>a</think>yo<|im_end|>\n"),
        ("<tool_call>{}</tool_call>", "<tool_call>{}</tool_call><|im_end|>\n"),
        ("<thin ice>", "<thin ice><|im_end|>\n"),
    ],
)
def test_an_answer_need_not_go_on_from_the_prompt(folder: Path, says: str, taught: str) -> None:
    """Checks that the start of an answer is not learned if the prompt already contains it."""
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": says}]
    tokenizer = _ours(folder, _OPEN)
    assert _taught(tokenizer, {"messages": talk}) == taught
    twice = [*talk, {"role": "user", "content": says}, *talk[1:]]
    assert _taught(tokenizer, {"messages": twice}) == taught * 2


def test_tools_choose_their_template(folder: Path) -> None:
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("{{ tools | length }}: {{ messages[0].content }}")
    try:
        tokenizer = _ours(folder, "{{ tools is defined }} {{ tools is none }}{{ documents }}")
    finally:
        (more / "tool_use.jinja").unlink()
        more.rmdir()
    talk = [{"role": "user", "content": "hi"}]
    for beside, text in (({}, "True TrueNone"), ({"tools": [{}, {}]}, "2: hi")):
        ids, _ = tokenizer.conversation(Conversation(messages=talk, **beside))
        assert tokenizer.detokenize(ids) == text


def test_a_template_that_leaves_an_answer_out_is_named(folder: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(DataError, match="omits the text of message 2, which is from the assistant"):
        _taught(_ours(folder, template), SHAPES["one turn"])
