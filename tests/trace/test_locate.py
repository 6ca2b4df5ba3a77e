"""Tests which trace is read for a given path, and which trace is read if no path is given."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.legacy_text import legacy_name, write_legacy
from megatron.adaptive.trace.locate import load_run
from megatron.adaptive.trace.read import read_run


@pytest.fixture
def checkout(
    write_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Creates the runs ``first`` (2 ranks) and ``second`` (3 ranks), and returns their folder.

    The pointer to the latest run, ``runs/latest``, is not created.
    """
    monkeypatch.chdir(tmp_path)
    for name, ranks in (("first", 2), ("second", 3)):
        run_dir = tmp_path / "runs" / name
        write_run(ranks, folder=run_dir / "traces", run=name)
        write_legacy(read_run(run_dir / "traces"), run_dir / f"{legacy_name(ranks, 1)}.txt")
    return tmp_path


def test_latest_as_link_and_as_file(checkout: Path) -> None:
    latest = checkout / "runs" / "latest"
    latest.symlink_to("second", target_is_directory=True)
    assert load_run(None).run == "second"
    latest.unlink()
    latest.write_text("first\n")
    assert load_run(None, 2, 1).run == "first"
    latest.write_text(str(checkout / "runs" / "second"))
    assert load_run(None).run == "second"


def test_a_dead_pointer_is_named(checkout: Path) -> None:
    (checkout / "runs" / "latest").symlink_to("gone")
    with pytest.raises(TraceError, match="gone, which does not exist"):
        load_run(None)


def test_given_folder_traces_folder_and_text_file(checkout: Path) -> None:
    first = checkout / "runs" / "first"
    assert load_run(first).run == "first"
    assert load_run(first / "traces").run == "first"
    text = load_run(first / "trace_pipeline_2_model_chunks_1.txt")
    assert (text.run, text.num_ranks) == ("first", 2)


def test_the_text_form_serves_where_there_are_no_json_lines(checkout: Path) -> None:
    first = checkout / "runs" / "first"
    shutil.rmtree(first / "traces")
    assert load_run(first).origin.name == "trace_pipeline_2_model_chunks_1.txt"
    shutil.copy(first / "trace_pipeline_2_model_chunks_1.txt", checkout)
    shutil.rmtree(checkout / "runs")
    assert load_run(None, 2, 1).run == "first"
    with pytest.raises(TraceError, match=r"contains no trace: .* nor trace_pipeline_<p>"):
        load_run(None, 4, 1)


def test_another_shape_is_refused(checkout: Path) -> None:
    (checkout / "runs" / "latest").symlink_to("second")
    with pytest.raises(
        TraceError, match=r"has 3 pipeline ranks x 1 chunks, not the requested 2 x 1; use .*3 .*1"
    ):
        load_run(None, 2, 1)


def test_nothing_to_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        TraceError, match=f"no run with a trace in {tmp_path}/runs, {tmp_path}/logs or"
    ):
        load_run(None)
    with pytest.raises(TraceError, match="does not exist"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="contains no trace"):
        load_run(tmp_path)
