"""Tests that views are found by name, and that users can define views."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.adaptive.trace.views import formats
from megatron.adaptive.trace.views.view import built_in_views
from tests.support.synthetic_trace import SyntheticRun, write_synthetic

ROOT = Path(__file__).resolve().parents[3]
NAME = "trace_pipeline_2_model_chunks_1"
Trace = Callable[..., "subprocess.CompletedProcess[str]"]

OWN = """
from pathlib import Path

from megatron.adaptive.trace.views import ViewInput, trace_view


@trace_view(ending=".csv", summary="microbatches of the iteration")
def table(shown: ViewInput, path: Path) -> list[str]:
    rows = [f"{rank},{len(spans)}" for rank, spans in enumerate(shown.step.rows)]
    path.write_text("\\n".join(["rank,actions", *rows, ""]))
    return [f"{len(rows)} ranks", "a note"]


@trace_view(ending="", summary="time of the step")
def printed(shown: ViewInput) -> str:
    return f"step of {shown.step.step_ns} ns"


@trace_view(ending=".html", summary="page of the user")
def page(shown: ViewInput, path: Path) -> None:
    path.write_text("<p>mine</p>")


@trace_view(ending=".gone", summary="reads a file that does not exist")
def reader(shown: ViewInput, path: Path) -> str:
    return Path("no/such/file").read_text()


@trace_view(ending=".txt", summary="damaged")
def damaged(shown: ViewInput, path: Path) -> None:
    {}["key"]
"""


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    """Returns a function that runs ``trace traces`` with a user's module of views installed."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "my_views.py").write_text(OWN)
    info = folder / "my_views-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-views\nVersion: 1.0\n")
    points = "[megatron_adaptive.views]\nactions = my_views:table\n"
    (info / "entry_points.txt").write_text(points)
    write_synthetic(tmp_path / "traces", SyntheticRun(num_ranks=2, num_microbatches=4))

    def run(*flags: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "megatron.adaptive", "trace", "traces", *flags],
            env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


def test_a_view_of_the_user_is_written(trace: Trace, tmp_path: Path) -> None:
    done = trace("--format", "my_views:table,my_views:printed,my_views:page")
    assert done.returncode == 0, done.stderr
    path = tmp_path / f"{NAME}.csv"
    assert path.read_text().splitlines() == ["rank,actions", "0,8", "1,8"]
    lines = done.stdout.splitlines()
    assert lines[-4:-2] == [f"2 ranks: {path}", "  a note"]
    assert re.fullmatch(r"step of \d+ ns", lines[-2])
    assert lines[-1] == f"page of the user: {tmp_path / NAME}.html"


def test_a_view_of_an_installed_package_is_chosen_by_name(trace: Trace, tmp_path: Path) -> None:
    done = trace("--format", "actions", "--output", "new/mine.csv")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "new/mine.csv").exists()


@pytest.mark.parametrize(
    ("formats", "message"),
    [
        (
            "my_views:damaged",
            r"view my_views:damaged \(.*:\d+\): .*my_views.py:\d+ raised KeyError",
        ),
        (
            "my_views:reader",
            r"view my_views:reader \(.*:\d+\): .*my_views.py:\d+ raised FileNotFoundError",
        ),
        ("html,my_views:page", "html and my_views:page both write a file that ends in '.html'"),
        ("my_views:none", "has no 'none'"),
    ],
)
def test_a_view_that_cannot_be_written(trace: Trace, formats: str, message: str) -> None:
    done = trace("--format", formats)
    assert done.returncode == 2
    assert re.search(message, done.stderr)
    assert done.stderr.count("\n") == 1


def test_help_and_docs_list_the_table(trace: Trace) -> None:
    help_text = " ".join(trace("--help").stdout.split())
    page = (ROOT / "docs" / "traces.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| `([\w.]+)/?` \|", page, flags=re.M))
    views = built_in_views()
    assert rows
    assert rows.items() <= {view.name: view.ending for view in views.values()}.items()
    assert all(f"{view.name} ({view.summary})" in help_text for view in views.values())


def test_a_file_in_the_folder_is_a_view_of_this_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = OWN.replace("@trace_view(", '@trace_view(name="actions", ', 1)
    (tmp_path / "actions_csv.py").write_text(text)
    before = set(built_in_views())
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    assert set(built_in_views()) - before == {"actions"}
    monkeypatch.delitem(sys.modules, f"{formats.__name__}.actions_csv")


def test_help_imports_nothing_that_draws() -> None:
    code = (
        "import sys; from megatron.adaptive.trace.views.view import built_in_views;"
        "built_in_views(); print({'openpyxl', 'matplotlib', 'plotly', 'torch'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == "set()"
