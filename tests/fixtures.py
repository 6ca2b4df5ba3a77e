"""Provides fixtures for tests that build a trainer: a small corpus, token files, and trainers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.adaptive import accelerator
from megatron.adaptive.data.corpus import Corpus, CorpusSpec, make_corpus
from megatron.adaptive.data.tokenizer import GPT2BPETokenizer

# Call install() before the following imports, which load megatron-core in this process.
accelerator.install()

from megatron.core.datasets import gpt_dataset  # noqa: E402, F401

from .multiprocess.forked_rank import shorten_mock_data  # noqa: E402

# The ranks that the tests start call this function too, so all processes use the same mock data.
shorten_mock_data()

WORKER = Path(__file__).parent / "multiprocess" / "checkpoint_worker.py"
VOCAB_SIZE = 400
NUM_SOURCES = 60


def write_sources(folder: Path, count: int = NUM_SOURCES) -> None:
    """Writes ``count`` small Python files to ``folder``. Their content is the same in each call."""
    rng = random.Random(5)
    names = [f"{a}_{b}" for a in ("load", "save", "merge", "split") for b in ("key", "row", "col")]
    for number in range(count):
        path = folder / f"package_{number % 4}" / f"module_{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f'"""Module {number}: naïve ✓."""'] + [
            f"def {rng.choice(names)}({rng.choice(names)}):\n    return {rng.randrange(10**6)}\n"
            for _ in range(rng.randrange(4, 20))
        ]
        path.write_text("\n".join(lines), encoding="utf-8")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Returns a corpus of 60 documents with a vocabulary of 400 tokens."""
    root = tmp_path_factory.mktemp("corpus")
    write_sources(root / "sources")
    return make_corpus(
        CorpusSpec(
            output_dir=root / "made", vocab_size=VOCAB_SIZE, source_dir=root / "sources", workers=1
        )
    )


@pytest.fixture(scope="session")
def tokenizer(corpus: Corpus) -> GPT2BPETokenizer:
    return GPT2BPETokenizer(corpus.vocab_file, corpus.merge_file)


@pytest.fixture
def write_tokens(tmp_path: Path) -> Callable[..., str]:
    """Returns a function that writes documents as token files and returns their path prefix."""

    def write(
        documents: list[list[int]], name: str = "data", dtype: type[np.integer] = np.uint16
    ) -> str:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        prefix = str(tmp_path / name)
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
        for document in documents:
            builder.add_document(np.array(document, dtype=dtype), [len(document)])
        builder.finalize(f"{prefix}.idx")
        return prefix

    return write


@pytest.fixture(scope="module")
def worker() -> Iterator[Any]:
    """Yields the module ``checkpoint_worker``, which can build models in this process."""
    spec = spec_from_file_location("checkpoint_worker", WORKER)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["checkpoint_worker"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["checkpoint_worker"]


@pytest.fixture(scope="module")
def make(worker: Any) -> Iterator[Callable[..., Any]]:
    """Yields a function that builds a trainer in this process. Its keyword arguments are flags."""
    jobs = worker.Jobs()

    def build(**flags: object) -> Any:
        settings = {
            f"--{name.replace('_', '-')}": None if value is None else str(value)
            for name, value in flags.items()
        }
        if "--save" in settings:
            settings["--save-interval"] = "1"
        return worker.Training(jobs, settings)

    yield build
    jobs.leave()
