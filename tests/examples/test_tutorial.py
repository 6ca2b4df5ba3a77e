"""Runs the tutorial notebook, and compares it with its page in the documentation.

``CONTRIBUTING.md`` describes how the page is made.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from ..multiprocess.launch import NODES, ROOT, forking

NOTEBOOK = ROOT / "examples" / "slow_cluster.ipynb"
PAGE = ROOT / "docs" / "tutorial.md"
CORPUS = "data corpus --vocab-size 4096"
VARIABLES = {"TUTORIAL_STEPS": "20", "JUPYTER_PLATFORM_DIRS": "1"}


def test_the_page_is_the_notebook() -> None:
    page = PAGE.read_text()
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        assert cell.source.replace("../docs/", "").strip() in page


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_notebook_finds_and_repairs_the_slow_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**forking(), **VARIABLES, "TUTORIAL_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    # Create a copy of the project whose trainer forks its ranks. Use a smaller corpus to make the
    # test faster.
    (tmp_path / "clone" / "examples").mkdir(parents=True)
    for path in (ROOT / "megatron", ROOT / "pretrain_gpt.py", NODES / "sitecustomize.py"):
        (tmp_path / "clone" / path.name).symlink_to(path)
    book = nbformat.read(NOTEBOOK, as_version=4)
    (corpus,) = (cell for cell in book.cells if CORPUS in cell.source)
    corpus.source = corpus.source.replace(CORPUS, f"{CORPUS} --max-bytes 1000000")
    resources = {"metadata": {"path": str(tmp_path / "clone" / "examples")}}
    NotebookClient(book, timeout=240, resources=resources).execute()
    printed = "".join(
        output.get("text", "") for cell in book.cells for output in cell.get("outputs", [])
    )
    assert "slow rank 1 (stage 1" in printed
    losses = re.findall(r"loss after 20 steps (\S+)", printed)
    assert len(losses) == 3
    assert [float(loss) for loss in losses] == pytest.approx([float(losses[0])] * 3, rel=1e-5)
    moved = re.search(r"repartition: 4-4 -> (\d)-(\d)", printed)
    assert moved is not None
    assert int(moved[1]) > int(moved[2])
