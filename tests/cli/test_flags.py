"""Tests that the documented list of flags is generated from the parser."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.adaptive.cli.pretrain_gpt import flags, flags_markdown
from megatron.adaptive.errors import ConfigError

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "flags.md"


def test_the_document_is_up_to_date() -> None:
    remedy = "run python -m megatron.adaptive train flags > docs/flags.md"
    assert DOCUMENT.read_text(encoding="utf-8") == flags_markdown(), remedy


def test_every_table_row_has_the_cells_of_its_head() -> None:
    columns = 0
    for line in flags_markdown().replace("\\|", "").splitlines():
        if line.startswith("| Flag"):
            columns = line.count("|")
        if line.startswith("|"):
            assert line.count("|") == columns, line


def test_an_argument_is_refused() -> None:
    with pytest.raises(ConfigError, match="remove --group"):
        flags(["--group"])


def test_it_prints_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert flags([]) == 0
    assert capsys.readouterr().out == flags_markdown()
