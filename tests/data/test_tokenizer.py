"""Tests tokenizers: round trips, GPT-2's file format, padding, and errors."""

from __future__ import annotations

import base64
import itertools
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from megatron.adaptive.config.data import TokenizerConfig
from megatron.adaptive.data.chat import Conversation
from megatron.adaptive.data.corpus import Corpus
from megatron.adaptive.data.tokenizer import (
    END_OF_DOCUMENT,
    GPT2BPETokenizer,
    NullTokenizer,
    Tokenizer,
    build_tokenizer,
    padded_vocab_size,
)
from megatron.adaptive.errors import ConfigError, DataError


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Writes the two files of a tiny vocabulary, and returns their paths.

    The vocabulary contains all bytes, two merges, and the token for the end of a document.
    """
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abc", END_OF_DOCUMENT]
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocab.write_text(json.dumps({symbol: i for i, symbol in enumerate(symbols)}))
    merges.write_text("#version: 0.2\na b\nab c\n")
    return vocab, merges


@pytest.mark.parametrize(
    "text",
    ["def f(x):\n\treturn x  # π ≈ 3.14", "", " \r\n\x00\x7f", "naïve ✓ 🙂 中文", "a" * 5000],
)
def test_text_survives_the_round_trip(tokenizer: GPT2BPETokenizer, text: str) -> None:
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text
    assert all(0 <= index < tokenizer.vocab_size for index in ids)
    assert tokenizer.tokenize_batch([text, "x"]) == [ids, tokenizer.tokenize("x")]


def test_merges_are_applied_best_first(files: tuple[Path, Path]) -> None:
    tokenizer = GPT2BPETokenizer(*files)
    tokens = [tokenizer.detokenize([index]) for index in tokenizer.tokenize("abcab b")]
    assert tokens == ["abc", "ab", " ", "b"]


def test_a_merge_line_may_begin_like_a_comment(files: tuple[Path, Path]) -> None:
    vocab, merges = files
    ids = json.loads(vocab.read_text())
    ids["##"] = len(ids)
    vocab.write_text(json.dumps(ids))
    made = {"".join(line.split(" ")) for line in merges.read_text().split("\n")}
    ids = {name: number for name, number in ids.items() if name not in made}
    ids = {name: number for number, name in enumerate(ids)}
    vocab.write_text(json.dumps(ids))
    merges.write_text("# #\n")
    assert GPT2BPETokenizer(vocab, merges).tokenize("##") == [ids["##"]]


@pytest.mark.parametrize("damage", ["name", "rule", "swapped", "lost", "id"])
def test_a_vocabulary_and_merges_that_contradict_each_other_are_refused(
    tmp_path: Path, damage: str
) -> None:
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    rules = [f"{left} {right}" for left in "abcd" for right in "efghij"]
    made = [rule.replace(" ", "") for rule in rules]
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *made, END_OF_DOCUMENT]
    ids = {symbol: number for number, symbol in enumerate(symbols)}
    vocab.write_text(json.dumps(ids))
    merges.write_text("\n".join(rules))
    GPT2BPETokenizer(vocab, merges)
    if damage == "name":
        ids = {("zq" if name == made[-1] else name): number for name, number in ids.items()}
    elif damage == "rule":
        rules[-1] = rules[-2]
    elif damage == "swapped":
        rules[1], rules[-1] = rules[-1], rules[1]
    elif damage == "lost":
        del rules[-1]
    else:
        ids[made[-1]] += 1000
    vocab.write_text(json.dumps(ids))
    merges.write_text("\n".join(rules))
    with pytest.raises(DataError, match=r"(vocab.json|merges.txt)"):
        GPT2BPETokenizer(vocab, merges)


def test_end_of_document_in_the_text_is_text(tokenizer: GPT2BPETokenizer) -> None:
    ids = tokenizer.tokenize(f"a{END_OF_DOCUMENT}b")
    assert tokenizer.eod not in ids
    assert tokenizer.detokenize(ids) == f"a{END_OF_DOCUMENT}b"


def test_lone_surrogates_are_replaced_and_pairs_joined(tokenizer: GPT2BPETokenizer) -> None:
    text = json.loads(r'"x\ud800y"') + "\ud83d\ude42"
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == "x\ufffdy🙂"
    assert tokenizer.tokenize_batch([text]) == [tokenizer.tokenize(text)]


def test_identity_follows_the_content_not_the_place(corpus: Corpus, tmp_path: Path) -> None:
    here = GPT2BPETokenizer(corpus.vocab_file, corpus.merge_file)
    shutil.copy(corpus.vocab_file, tmp_path / "v.json")
    merges = corpus.merge_file.read_text(encoding="utf-8").rstrip("\n").split("\n")
    (tmp_path / "m.txt").write_text("\n".join(merges), encoding="utf-8")
    (tmp_path / "fewer.txt").write_text("\n".join(merges[:-1]), encoding="utf-8")
    ids = json.loads(corpus.vocab_file.read_text(encoding="utf-8"))
    del ids[merges[-1].replace(" ", "")]
    ids = {name: number for number, name in enumerate(ids)}
    (tmp_path / "w.json").write_text(json.dumps(ids), encoding="utf-8")
    moved = GPT2BPETokenizer(tmp_path / "v.json", corpus.merge_file)
    other = GPT2BPETokenizer(tmp_path / "w.json", tmp_path / "fewer.txt")
    assert moved.unique_identifiers == here.unique_identifiers
    assert other.unique_identifiers != here.unique_identifiers
    assert NullTokenizer(5).unique_identifiers != NullTokenizer(6).unique_identifiers


@pytest.mark.parametrize(
    ("size", "multiple", "ranks", "padded"),
    [(50257, 128, 1, 50304), (50257, 128, 2, 50432), (8192, 128, 8, 8192), (1, 1, 1, 1)],
)
def test_padding_gives_every_rank_an_aligned_share(
    size: int, multiple: int, ranks: int, padded: int
) -> None:
    assert padded_vocab_size(size, multiple, ranks) == padded


def test_null_tokenizer_puts_the_end_on_top() -> None:
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=100))
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.tokenize("3 0\n99 100") == [3, 0, 99, 100]
    assert tokenizer.detokenize([3, 0]) == "3 0"


@pytest.mark.parametrize(("text", "message"), [("3 x", "'x'"), ("101", "0..100"), ("-1", "0..100")])
def test_null_tokenizer_refuses_what_is_no_id(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        NullTokenizer(100).tokenize(text)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("GPT2BPETokenizer", {}, "--vocab-file"),
        ("GPT2BPETokenizer", {"vocab_file": "vocab.json"}, "requires --merge-file"),
        ("NullTokenizer", {}, "--vocab-size"),
        ("HuggingFaceTokenizer", {}, "--tokenizer-model"),
        ("SentencePieceTokenizer", {}, "--tokenizer-model"),
    ],
)
def test_missing_flags_are_named(kind: str, settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_tokenizer(TokenizerConfig(tokenizer_type=kind, **settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{broken", "do not belong together"),
        ("[1, 2]", "do not belong together"),
        ('{"a": -1}', "do not belong together"),
        ("{}", "do not belong together"),
        (b"\xff\xfe", "is not valid UTF-8"),
    ],
)
def test_broken_vocabularies_are_named(
    files: tuple[Path, Path], content: str | bytes, message: str
) -> None:
    vocab, merges = files
    vocab.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError, match=message) as caught:
        GPT2BPETokenizer(vocab, merges)
    assert str(caught.value).startswith(str(vocab))
    vocab.unlink()
    with pytest.raises(DataError, match="vocab.json: No such file.*; check --vocab-file"):
        GPT2BPETokenizer(vocab, merges)


def test_vocabularies_that_would_lose_text_are_refused(files: tuple[Path, Path]) -> None:
    vocab, merges = files
    whole = json.loads(vocab.read_text())
    for less, message in ((END_OF_DOCUMENT, "lacks '<|endoftext|>'"), ("z", "lacks 'z'")):
        vocab.write_text(
            json.dumps({token: index for token, index in whole.items() if token != less})
        )
        with pytest.raises(DataError, match=re.escape(message)):
            GPT2BPETokenizer(vocab, merges)
    vocab.write_text(json.dumps({**whole, "z": whole["a"]}))
    with pytest.raises(DataError, match="have the same id"):
        GPT2BPETokenizer(vocab, merges)


@pytest.mark.parametrize("content", ["a b\nab c d\n", "a  b\n", "a b\nb a\n"])
def test_broken_merges_are_refused(files: tuple[Path, Path], content: str) -> None:
    vocab, merges = files
    merges.write_text(content)
    with pytest.raises(DataError, match=r"merges\.txt do not belong together \(.+\); --vocab-file"):
        GPT2BPETokenizer(vocab, merges)


# The following tests check tokenizers of other libraries.

MIXED = ["naïve ✓ 🙂 中文\n\n\tx = 1", "", " <|im_end|> </s>", "don't 1234 A.B  c\r\n", "a\ud800b"]
CHAT = (
    "{%- for one in messages %}<|im_start|>{{ one.role }}\n"
    "{%- if one.role == 'assistant' and loop.last %}\n<think></think>{% endif %}\n"
    "{{ one.content | trim }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a tokenizer folder in the format of ``transformers``, with a chat template."""
    made = tmp_path_factory.mktemp("hugging_face")
    encoder = FastTokenizer(models.BPE.from_file(str(corpus.vocab_file), str(corpus.merge_file)))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    encoder.enable_truncation(10)  # Some folders contain this setting, which must be ignored.
    encoder.save(str(made / "tokenizer.json"))
    end = {"__type": "AddedToken", "content": "<|im_end|>", "special": True}
    settings = {"eos_token": end, "chat_template": CHAT, "model_max_length": int(1e30)}
    (made / "tokenizer_config.json").write_text(json.dumps(settings))
    return made


def _build(kind: str, model: Path, **settings: Any) -> Tokenizer:
    return build_tokenizer(
        TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(model), **settings)
    )


def test_a_folder_gives_the_tokens_of_transformers(folder: Path, corpus: Corpus) -> None:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = _build("HuggingFaceTokenizer", folder)
    assert tokenizer.vocab_size == len(reference) == 402
    assert tokenizer.eod == reference.eos_token_id
    texts = [*MIXED[:-1], *corpus.jsonl.read_text().splitlines()]
    expected = [reference(text, add_special_tokens=False).input_ids for text in texts]
    assert (
        tokenizer.tokenize_batch(texts) == expected == [tokenizer.tokenize(text) for text in texts]
    )
    assert tokenizer.detokenize(expected[0]) == texts[0]


def test_a_conversation_is_what_the_template_writes(folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    said = [("system", "short"), ("user", "a ✓"), ("assistant", " b 🙂 "), ("user", "b 🙂")]
    said += [("assistant", "d")]
    tokenizer = _build("HuggingFaceTokenizer", folder)
    messages = [{"role": role, "content": content} for role, content in said]
    ids, taught = tokenizer.conversation(Conversation(messages=messages))
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    assert ids == reference.apply_chat_template(messages, return_dict=False)
    parts = [
        tokenizer.detokenize([index for index, _ in run])
        for is_taught, run in itertools.groupby(zip(ids, taught, strict=True), lambda pair: pair[1])
        if is_taught
    ]
    # The template writes reasoning only into the last answer, so the first answer must not contain
    # it.
    assert parts == ["b 🙂<|im_end|>\n", "<think></think>d<|im_end|>\n"]


def test_a_template_may_refuse_and_runs_in_a_sandbox(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for template, reason in (
        ("{{ raise_exception('roles must take turns') }}", "roles must take turns"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{% for one in messages %}{% endfor %}", "omits the text of message"),
        ("{% for %}", "rejects the conversation"),
    ):
        (tmp_path / "chat_template.jinja").write_text(template)
        with pytest.raises(DataError, match=reason):
            _build("HuggingFaceTokenizer", tmp_path).conversation(
                Conversation(messages=[{"role": "assistant", "content": "yes"}])
            )


def test_a_folder_without_an_end_or_with_too_many_ids_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="--vocab-size 401 is less than the 402 ids"):
        _build("HuggingFaceTokenizer", folder, vocab_size=401)
    with pytest.raises(DataError, match=r"tokenizer\.json: No such file.*--tokenizer-model"):
        _build("HuggingFaceTokenizer", tmp_path)
    shutil.copy(folder / "tokenizer.json", tmp_path)
    with pytest.raises(DataError, match="no file sets the eos_token"):
        _build("HuggingFaceTokenizer", tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": [7, 8]}')
    assert _build("HuggingFaceTokenizer", tmp_path).eod == 7
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(DataError, match="is not a tokenizer of the tokenizers library"):
        _build("HuggingFaceTokenizer", tmp_path)


def test_sentencepiece_gives_its_own_tokens(corpus: Corpus, tmp_path: Path) -> None:
    package = pytest.importorskip("sentencepiece")
    package.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus.jsonl.read_text().splitlines()[:40]),
        model_prefix=str(tmp_path / "made"),
        vocab_size=330,
        byte_fallback=True,
        minloglevel=2,
    )
    reference = package.SentencePieceProcessor(model_file=str(tmp_path / "made.model"))
    for kind, begin in (("SentencePieceTokenizer", []), ("Llama2Tokenizer", [reference.bos_id()])):
        tokenizer = _build(kind, tmp_path / "made.model")
        expected = [[*begin, *reference.encode(text)] for text in MIXED[:-1]]
        assert tokenizer.tokenize_batch(MIXED)[:-1] == expected
        assert [tokenizer.tokenize(text) for text in MIXED[:-1]] == expected
        assert (tokenizer.vocab_size, tokenizer.eod) == (330, reference.eos_id())
    with pytest.raises(DataError, match="not a SentencePiece model"):
        _build("SentencePieceTokenizer", corpus.vocab_file)


@pytest.mark.parametrize("pattern", ["v1", "v2"])
def test_tiktoken_is_as_megatron_core_builds_it(pattern: str, tmp_path: Path) -> None:
    pytest.importorskip("tiktoken")
    from megatron.core.tokenizers.text.libraries.tiktoken_tokenizer import TikTokenTokenizer

    tokens = [*(bytes([index]) for index in range(256)), b"do", b"don", b" c", b"12", b"\n\n"]
    ranks = [
        {"rank": index, "token_bytes": base64.b64encode(token).decode(), "token_str": ""}
        for index, token in enumerate(tokens)
    ]
    file = tmp_path / "made.json"
    file.write_text(json.dumps(ranks))
    settings = {"vocab_size": 280, "tiktoken_num_special_tokens": 19, "tiktoken_pattern": pattern}
    tokenizer = _build("TikTokenizer", file, **settings)
    reference = TikTokenTokenizer(str(file), None, 19, pattern=pattern, vocab_size=280)
    assert [tokenizer.tokenize(text) for text in MIXED] == [
        reference.text_to_ids(text) for text in MIXED
    ]
    assert (tokenizer.vocab_size, tokenizer.eod) == (280, reference.eod)
    with pytest.raises(DataError, match="--vocab-size 300 minus --tiktoken-num-special-tokens 19"):
        _build("TikTokenizer", file, **settings | {"vocab_size": 300})


def test_special_tokens_of_tiktoken_are_passed_on_and_checked(tmp_path: Path) -> None:
    pytest.importorskip("tiktoken")
    from megatron.core.tokenizers.text.libraries.tiktoken_tokenizer import SPECIAL_TOKENS

    ranks = [
        {"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": ""}
        for i in range(256)
    ]
    file = tmp_path / "made.json"
    file.write_text(json.dumps(ranks))
    sizes = {"vocab_size": 275, "tiktoken_num_special_tokens": 19}
    plain = _build("TikTokenizer", file, **sizes)
    tokens = ("<|user|>", *SPECIAL_TOKENS[::-1])
    chosen = _build("TikTokenizer", file, **sizes, tiktoken_special_tokens=tokens)
    assert chosen.tokenize("<|user|></s>") == [0, chosen.eod] == [0, tokens.index("</s>")]
    assert chosen.unique_identifiers != plain.unique_identifiers
    for wrong, message in (
        (tokens[:-1], "must contain <unk> .*; add <unk>"),
        ((*tokens, "<|user|>"), "contains a token twice"),
        ((*tokens, *"abcdefghijkl"), "contains 20 tokens, but --tiktoken-num-special-tokens is 19"),
    ):
        with pytest.raises(ConfigError, match=f"--tiktoken-special-tokens .*{message}"):
            _build("TikTokenizer", file, **sizes, tiktoken_special_tokens=wrong)
    with pytest.raises(ConfigError, match="requires --tokenizer-type TikTokenizer, got Llama2"):
        _build("Llama2Tokenizer", file, tiktoken_special_tokens=tokens)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for package, kind in (("tiktoken", "TikTokenizer"), ("sentencepiece", "Llama2Tokenizer")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ConfigError, match=f"needs the package {package}"):
            _build(kind, tmp_path / "model")
