"""Checks that result files are never left incomplete, even if writing fails."""

from pathlib import Path

import pytest

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.files import replaced, set_aside


def test_success_replaces_and_makes_folders(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "out.txt"
    for text in ("first", "second"):
        with replaced(target) as temporary:
            assert temporary.suffix == ".txt"
            temporary.write_text(text)
        assert target.read_text() == text
    assert list(target.parent.iterdir()) == [target]
    plain = tmp_path / "plain"
    plain.touch()
    assert target.stat().st_mode == plain.stat().st_mode


def test_failure_keeps_the_old_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "out.txt"
    target.write_text("old")

    def fail_halfway() -> None:
        with replaced(target) as temporary:
            temporary.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail_halfway()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(TraceError, match=r"cannot write .*file/out\.txt"),
        replaced(tmp_path / "file" / "out.txt"),
    ):
        pass


def test_traces_of_earlier_starts_are_kept_apart(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    assert set_aside(traces) is None
    for number in (1, 2):
        traces.mkdir()
        assert set_aside(traces) is None  # An empty folder must not be renamed.
        (traces / "trace_rank_00000.jsonl").write_text(str(number))
        assert set_aside(traces) == tmp_path / f"traces-{number}"
    assert not traces.exists()
    assert (tmp_path / "traces-2" / "trace_rank_00000.jsonl").read_text() == "2"
