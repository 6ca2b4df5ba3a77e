"""Tests that JSON lines are converted to token files in order, and that errors leave no files."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path

import pytest

from megatron.adaptive.data import preprocess as module
from megatron.adaptive.data.corpus import Corpus
from megatron.adaptive.data.indexed import check_indexed
from megatron.adaptive.data.preprocess import PreprocessSpec, expand_inputs, preprocess
from megatron.adaptive.data.tokenizer import GPT2BPETokenizer
from megatron.adaptive.errors import ConfigError, DataError


def _spec(corpus: Corpus, folder: Path, *inputs: Path, **changes: object) -> PreprocessSpec:
    settings: dict[str, object] = {
        "inputs": inputs,
        "output_prefix": str(folder / "out"),
        "vocab_file": str(corpus.vocab_file),
        "merge_file": str(corpus.merge_file),
        "append_eod": True,
        **changes,
    }
    return PreprocessSpec(**settings)  # type: ignore[arg-type]


def _write(path: Path, *documents: object) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def _documents(prefix: str) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return [document.tolist() for document in IndexedDataset(prefix)]


def test_documents_come_back_from_megatron_core(
    corpus: Corpus, tokenizer: GPT2BPETokenizer, tmp_path: Path
) -> None:
    texts = ["def f():\n    pass\n", "naïve ✓", "x"]
    source = _write(tmp_path / "a.jsonl", *({"text": text, "id": 1} for text in texts))
    seen: list[tuple[int, int]] = []
    summary = preprocess(
        _spec(corpus, tmp_path, source), progress=lambda *counts: seen.append(counts)
    )
    assert summary.prefixes == (str(tmp_path / "out_text_document"),)
    written = _documents(summary.prefixes[0])
    assert [tokenizer.detokenize(ids[:-1]) for ids in written] == texts
    assert [ids[-1] for ids in written] == [tokenizer.eod] * 3
    assert summary.num_tokens == sum(map(len, written))
    assert seen[-1] == (3, source.stat().st_size)
    assert check_indexed(summary.prefixes[0]).num_sequences == 3


def test_each_key_has_its_own_files(
    corpus: Corpus, tokenizer: GPT2BPETokenizer, tmp_path: Path
) -> None:
    source = _write(tmp_path / "a.jsonl", {"q": "ask", "a": "say"}, {"q": "", "a": "so"})
    summary = preprocess(_spec(corpus, tmp_path, source, json_keys=("q", "a")))
    assert [Path(prefix).name for prefix in summary.prefixes] == [
        "out_q_document",
        "out_a_document",
    ]
    assert len(_documents(summary.prefixes[0])) == 1
    assert len(_documents(summary.prefixes[1])) == 2
    assert (summary.num_documents, summary.num_empty) == (2, 1)


def test_blank_lines_and_a_missing_last_newline_are_fine(corpus: Corpus, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'\n{"text": "a"}\r\n   \n\n{"text": "b"}')
    assert preprocess(_spec(corpus, tmp_path, source)).num_documents == 2


def test_the_output_does_not_depend_on_workers_or_batches(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BATCH_BYTES", 10_000)
    results = []
    for workers in (1, 2):
        prefix = str(tmp_path / f"w{workers}")
        spec = _spec(corpus, tmp_path, corpus.jsonl, output_prefix=prefix, workers=workers)
        preprocess(spec)
        results.append(
            [Path(f"{prefix}_text_document{suffix}").read_bytes() for suffix in (".bin", ".idx")]
        )
    assert results[0] == results[1]
    assert results[0][0] == Path(f"{corpus.data_prefix}.bin").read_bytes()


def test_several_inputs_keep_their_order(
    corpus: Corpus, tokenizer: GPT2BPETokenizer, tmp_path: Path
) -> None:
    second = _write(tmp_path / "2.jsonl", {"text": "two"})
    first = _write(tmp_path / "1.jsonl", {"text": "one"})
    summary = preprocess(_spec(corpus, tmp_path, second, first, append_eod=False))
    written = [tokenizer.detokenize(ids) for ids in _documents(summary.prefixes[0])]
    assert written == ["two", "one"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "is not JSON"),
        ("[1]", "is a JSON list"),
        ('{"txt": "a", "id": 2}', "has no key 'text' (it has txt, id)"),
        ('{"text": 5}', "the value of 'text' is a int, but must be a string"),
        ('{"text": "\xff"}', "is not JSON"),
    ],
)
def test_a_bad_line_is_named_and_leaves_nothing(
    corpus: Corpus, tmp_path: Path, line: str, message: str
) -> None:
    source = tmp_path / "bad.jsonl"
    source.write_bytes(b'{"text": "fine"}\n\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(DataError) as caught:
        preprocess(_spec(corpus, tmp_path, source))
    assert str(caught.value).startswith(f"{source}:3: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["bad.jsonl"]


@pytest.mark.parametrize("workers", [1, 2])
def test_line_numbers_count_across_batches(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(module, "_BATCH_BYTES", 20)
    source = _write(tmp_path / "a.jsonl", *[{"text": "a"}] * 5, {"other": 1})
    with pytest.raises(DataError, match=r"a\.jsonl:6: has no key 'text' \(it has other\)"):
        preprocess(_spec(corpus, tmp_path, source, workers=workers))
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_numbers_outside_the_null_vocabulary_are_named(tmp_path: Path) -> None:
    source = _write(tmp_path / "a.jsonl", {"text": "1 2"}, {"text": "3 400"})
    spec = PreprocessSpec(
        inputs=(source,),
        output_prefix=str(tmp_path / "out"),
        tokenizer_type="NullTokenizer",
        vocab_size=100,
    )
    with pytest.raises(DataError, match=r"a\.jsonl: id 400 is outside 0\.\.100"):
        preprocess(spec)


def test_a_failure_keeps_the_output_of_an_earlier_run(corpus: Corpus, tmp_path: Path) -> None:
    good = _write(tmp_path / "good.jsonl", {"text": "abc"})
    prefix = preprocess(_spec(corpus, tmp_path, good)).prefixes[0]
    before = [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")]
    bad = _write(tmp_path / "bad.jsonl", {"text": "other text"}, {})
    with pytest.raises(DataError):
        preprocess(_spec(corpus, tmp_path, bad))
    assert before == [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")]
    preprocess(_spec(corpus, tmp_path, _write(bad, {"text": "other text"})))
    assert check_indexed(prefix).num_tokens != len(before[0]) // 2


@pytest.mark.parametrize("content", ["", "\n \n", '{"text": ""}\n'])
def test_input_without_text_is_refused(corpus: Corpus, tmp_path: Path, content: str) -> None:
    source = tmp_path / "empty.jsonl"
    source.write_text(content)
    with pytest.raises(DataError, match=r"empty\.jsonl: no text under key 'text'"):
        preprocess(_spec(corpus, tmp_path, source))
    assert os.listdir(tmp_path) == ["empty.jsonl"]


def test_an_unwritable_output_is_named(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    source = _write(tmp_path / "a.jsonl", {"text": "abc"})
    spec = _spec(corpus, tmp_path, source, output_prefix=str(tmp_path / "file" / "out"))
    with pytest.raises(DataError, match="cannot write to .*file/out"):
        preprocess(spec)


def test_a_full_disk_is_an_error_and_leaves_nothing(corpus: Corpus, tmp_path: Path) -> None:
    source = _write(tmp_path / "a.jsonl", *[{"text": "some words " * 500}] * 40)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        # Limit the file size, so that write() fails as it does on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        with pytest.raises(DataError, match="cannot write to"):
            preprocess(_spec(corpus, tmp_path, source))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(tmp_path) == ["a.jsonl"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 0}, "--workers"),
        ({"json_keys": ("a", "a")}, "twice"),
        ({"json_keys": ()}, "at least one key"),
        ({"inputs": ()}, "input"),
    ],
)
def test_wrong_options_are_named(
    corpus: Corpus, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    source = _write(tmp_path / "a.jsonl", {"text": "abc"})
    with pytest.raises(ConfigError, match=message):
        preprocess(_spec(corpus, tmp_path, source, **changes))


def test_inputs_are_expanded_sorted_and_taken_once(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "[x].jsonl"):
        (tmp_path / name).write_text("{}")
    expanded = expand_inputs([str(tmp_path / "b.jsonl"), str(tmp_path / "[ab].jsonl")])
    assert [path.name for path in expanded] == ["b.jsonl", "a.jsonl"]
    assert expand_inputs([str(tmp_path / "[x].jsonl")]) == (tmp_path / "[x].jsonl",)
    for pattern, message in (("*.txt", "no such file"), ("", "is not a regular file")):
        with pytest.raises(DataError, match=message):
            expand_inputs([str(tmp_path / pattern)])
