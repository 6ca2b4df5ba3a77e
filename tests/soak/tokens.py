"""Compares the tokens of each kind of tokenizer with those of its library, in many scripts.

    python -m tests.soak.tokens [--quick] [--megabytes N] [--json FILE]

The text is the source code of the standard library. Each file is followed by random words of one
script. Rows count the documents whose tokens differ. Exits with status 1 if there are any.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from harness.report import Result, Row, measure, parser_of
from harness.texts import mixed_text
from megatron.adaptive.config.data import TokenizerConfig
from megatron.adaptive.data.corpus import CorpusSpec, make_corpus
from megatron.adaptive.data.tokenizer import build_tokenizer

Kinds = dict[str, tuple[dict[str, Any], Callable[[str], Sequence[int]]]]
"""Maps each kind of tokenizer to its settings and the encoding function of its library."""


def compare(megabytes: float) -> Result:
    """Compares each tokenizer of this project with its library on ``megabytes`` MB of text.

    Returns a row for each tokenizer, with the number of documents whose tokens differ.
    """
    texts = mixed_text(megabytes)
    nbytes = sum(len(text.encode()) for text in texts)
    note = f"{nbytes / 1e6:.1f} MB in {len(texts)} documents"
    with tempfile.TemporaryDirectory() as work:
        kinds = _make_tokenizers(Path(work), texts)
        return Result(rows=_different_documents(kinds, texts, note))


def _make_tokenizers(folder: Path, texts: Sequence[str]) -> Kinds:
    """Trains the tokenizers, and writes them to ``folder``.

    The tokenizer of SentencePiece is trained on ``texts``.

    Returns the settings of each tokenizer and the encoding function of its library.
    """
    from megatron.core.tokenizers.text.libraries.tiktoken_tokenizer import TikTokenTokenizer
    from transformers import PreTrainedTokenizerFast

    corpus = make_corpus(CorpusSpec(output_dir=folder / "corpus", max_bytes=4_000_000))
    gpt2_files = {"vocab_file": str(corpus.vocab_file), "merge_file": str(corpus.merge_file)}

    def byte_pairs() -> Tokenizer:
        tokenizer = Tokenizer(models.BPE.from_file(*gpt2_files.values()))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return tokenizer

    gpt2, chat = byte_pairs(), byte_pairs()
    chat.decoder = decoders.ByteLevel()
    chat.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    hf = folder / "hf"
    hf.mkdir()
    chat.save(str(hf / "tokenizer.json"))
    (hf / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.splitlines()[:50]),
        model_prefix=str(folder / "pieces"),
        vocab_size=4000,
        # Allow a smaller vocabulary, because a short text has fewer pieces.
        hard_vocab_limit=False,
        byte_fallback=True,
        minloglevel=2,
    )
    pieces_file, ranks_file = str(folder / "pieces.model"), str(folder / "ranks.json")
    size = _write_ranks(Path(ranks_file), chat.get_vocab()) + 19
    pieces = sentencepiece.SentencePieceProcessor(model_file=pieces_file)
    fast = PreTrainedTokenizerFast.from_pretrained(hf)
    tiktoken = TikTokenTokenizer(ranks_file, None, 19, pattern="v2", vocab_size=size)
    tiktoken_settings = {
        "tokenizer_model": ranks_file,
        "tiktoken_pattern": "v2",
        "vocab_size": size,
        "tiktoken_num_special_tokens": 19,
    }
    return {
        "GPT2BPETokenizer": (gpt2_files, lambda text: gpt2.encode(text).ids),
        "HuggingFaceTokenizer": (
            {"tokenizer_model": str(hf)},
            lambda text: fast(text, add_special_tokens=False).input_ids,
        ),
        "SentencePieceTokenizer": ({"tokenizer_model": pieces_file}, pieces.encode),
        "Llama2Tokenizer": (
            {"tokenizer_model": pieces_file},
            lambda text: [pieces.bos_id(), *pieces.encode(text)],
        ),
        "TikTokenizer": (tiktoken_settings, tiktoken.text_to_ids),
    }


def _write_ranks(path: Path, vocabulary: Mapping[str, int]) -> int:
    """Writes ``vocabulary`` to ``path`` in tiktoken's format, and returns the number of tokens."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letter_of: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
    byte_of = {letter: byte for byte, letter in letter_of.items()}
    merged = [
        bytes(byte_of[letter] for letter in token)
        for token in sorted(vocabulary, key=vocabulary.__getitem__)
        if not token.startswith("<|") and len(token) > 1
    ]
    ranks = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": ""}
        for rank, token in enumerate([*(bytes([byte]) for byte in range(256)), *merged])
    ]
    path.write_text(json.dumps(ranks))
    return len(ranks)


def _different_documents(kinds: Kinds, texts: Sequence[str], note: str) -> list[Row]:
    """Counts the texts in ``texts`` whose tokens differ, and returns a row for each tokenizer.

    ``kinds`` contains the tokenizers, and ``note`` is added to each row.
    """
    rows = []
    for kind, (settings, encode) in kinds.items():
        config = TokenizerConfig(tokenizer_type=kind, **settings)
        documents = build_tokenizer(config).tokenize_batch(texts)
        different = sum(
            document != encode(text) for document, text in zip(documents, texts, strict=True)
        )
        title = f"{kind}: documents with other tokens"
        rows.append(Row(what=title, value=different, goal=0, note=note))
    return rows


def main() -> int:
    """Compares the tokens and prints the results. Returns 1 if the tokens of a document differ."""
    parser = parser_of(__doc__, (), "less text")
    parser.add_argument("--megabytes", type=float, help="size of the text in MB")
    options = parser.parse_args()
    options.part = None
    megabytes = options.megabytes or (2.0 if options.quick else 10.0)
    return measure({"tokens": lambda: compare(megabytes)}, options)


if __name__ == "__main__":
    sys.exit(main())
