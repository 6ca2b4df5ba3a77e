"""Tests that ``tests.soak.starts`` compares the first losses of all starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import starts

pytestmark = [pytest.mark.multiprocess, pytest.mark.long]


def test_every_start_trains_the_same_step(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    starts.write_model(tmp_path, layers=2)
    _, expected = starts.start(starts.ALONE, tmp_path, 1)
    for ranks in (1, 2):
        seconds, loss = starts.start("pipeline", tmp_path, ranks)
        assert seconds > 0
        assert loss == pytest.approx(expected, rel=1e-5)
