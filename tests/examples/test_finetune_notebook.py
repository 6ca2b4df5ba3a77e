"""Runs all cells of the notebook that fine-tunes a small model."""

from __future__ import annotations

import re

import pytest

from ..multiprocess.launch import ROOT, forking

pytest.importorskip("transformers", reason="bash prerequisite.sh --examples")
import nbformat
from nbclient import NotebookClient

NOTEBOOK = ROOT / "examples" / "finetune" / "finetune.ipynb"


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.long
def test_the_notebook_teaches_four_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**forking(), "JUPYTER_PLATFORM_DIRS": "1"}.items():
        monkeypatch.setenv(name, value)
    book = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells)
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    NotebookClient(book, timeout=200, resources=resources).execute()
    printed = "".join(
        output.get("text", "") for cell in book.cells for output in cell.get("outputs", [])
    )
    losses = [float(loss) for loss in re.findall(r"evaluation loss ([\d.]+)", printed)]
    assert len(losses) == 10
    assert losses[-1] < 0.2 < losses[0]
    answers = {"Peru": "Lima", "Cuba": "Havana", "Chad": "N'Djamena", "Oman": "Muscat"}
    for country, capital in answers.items():
        assert f"{country} {capital}\n" in printed
    assert float(re.findall(r"step 3: loss ([\d.]+)", printed)[-1]) < 0.2
