"""Tests which files the default corpus contains, and when an existing corpus is reused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron.adaptive.data.corpus import CorpusSpec, make_corpus, source_files
from megatron.adaptive.errors import ConfigError, DataError


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    for name in ("a.py", "b.py", "pkg/c.py", "pkg/test/d.py", "tests/e.py", "site-packages/f.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# {name}\nvalue = 1\n")
    (folder / "notes.txt").write_text("no source")
    (folder / "latin.py").write_bytes(b"# \xe9\n")
    (folder / "empty.py").write_text("\n")
    return folder


def _spec(tmp_path: Path, sources: Path, **changes: object) -> CorpusSpec:
    settings: dict[str, object] = {
        "output_dir": tmp_path / "made",
        "vocab_size": 300,
        "source_dir": sources,
        **changes,
    }
    return CorpusSpec(**settings)  # type: ignore[arg-type]


def test_tests_packages_and_undecodable_files_are_left_out(tmp_path: Path, sources: Path) -> None:
    corpus = make_corpus(_spec(tmp_path, sources))
    lines = [json.loads(line) for line in corpus.jsonl.read_text().splitlines()]
    assert sorted(line["path"] for line in lines) == ["a.py", "b.py", "pkg/c.py"]
    assert all(line["text"] == f"# {line['path']}\nvalue = 1\n" for line in lines)


def test_the_order_is_the_same_in_another_place(tmp_path: Path, sources: Path) -> None:
    moved = tmp_path / "elsewhere"
    order = [path.relative_to(sources) for path in source_files(sources)]
    os.rename(sources, moved)
    assert [path.relative_to(moved) for path in source_files(moved)] == order


@pytest.mark.parametrize("damage", ["corpus.json", "corpus_text_document.idx", "vocab.json"])
def test_a_damaged_corpus_is_made_again(tmp_path: Path, sources: Path, damage: str) -> None:
    spec = _spec(tmp_path, sources)
    make_corpus(spec)
    path = spec.output_dir / damage
    whole = path.read_bytes()
    path.write_bytes(whole[:10])
    (spec.output_dir / "index_cache").mkdir()
    assert not make_corpus(spec).reused
    assert path.read_bytes() == whole
    assert make_corpus(spec).reused


def test_other_settings_replace_it(tmp_path: Path, sources: Path) -> None:
    make_corpus(_spec(tmp_path, sources))
    corpus = make_corpus(_spec(tmp_path, sources, vocab_size=280))
    assert not corpus.reused
    assert len(json.loads(corpus.vocab_file.read_text())) <= 280


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, sources: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "thesis.tex").write_text("dear")
    with pytest.raises(DataError, match=r"contains other files \(such as 'thesis.tex'\)"):
        make_corpus(_spec(tmp_path, sources))
    assert os.listdir(tmp_path / "made") == ["thesis.tex"]


def test_max_bytes_cuts_between_files(tmp_path: Path, sources: Path) -> None:
    corpus = make_corpus(_spec(tmp_path, sources, max_bytes=40))
    assert len(corpus.jsonl.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"vocab_size": 256}, ConfigError, "must be at least 257"),
        ({"max_bytes": 0}, ConfigError, "--max-bytes"),
        ({"max_bytes": 1}, DataError, "no Python source file"),
        ({"source_dir": Path("/nonexistent")}, DataError, "no Python source file"),
    ],
)
def test_failure_leaves_nothing(
    tmp_path: Path, sources: Path, changes: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_corpus(_spec(tmp_path, sources, **changes))
    assert os.listdir(tmp_path) == ["sources"]


def test_a_file_in_the_way_is_named(tmp_path: Path, sources: Path) -> None:
    (tmp_path / "made").write_text("file")
    with pytest.raises(DataError, match="is not a folder"):
        make_corpus(_spec(tmp_path, sources))
    with pytest.raises(DataError, match="cannot write to"):
        make_corpus(_spec(tmp_path, sources, output_dir=tmp_path / "made" / "deeper"))
