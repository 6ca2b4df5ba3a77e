"""What pages say of files and names is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.adaptive.config.schedule_specs import BUILT_IN, selectable_names

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FOLDERS = {path.name for path in (ROOT / "megatron/adaptive").iterdir() if path.is_dir()}
TOP = ("benchmarks", "csrc", "docs", "examples", "scripts", "tests", "tools", "studies")
PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)`")


def paths_in(page: Path) -> set[str]:
    """Returns paths of this project that a page names."""
    named = PATH.findall(page.read_text())
    return {path for path in named if path.split("/")[0] in (*FOLDERS, *TOP, "megatron")}


def names_in_table(page: str, title: str) -> set[str]:
    """Returns names in the first column of the table below a title."""
    text = (ROOT / "docs" / page).read_text().partition(f"\n{title}\n")[2]
    text = re.split(r"^##", text, maxsplit=1, flags=re.MULTILINE)[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`(\w[\w-]*)`", row)}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_files_that_pages_name_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # about files of earlier releases
    # CONTRIBUTING.md says that this one does not exist.
    missing = {
        path
        for path in paths_in(page) - {"megatron/__init__.py"}
        if not any((ROOT / folder / path).exists() for folder in ("", "megatron/adaptive"))
    }
    assert missing == set()


def test_functions_on_the_way_of_a_microbatch_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    steps = re.findall(r"^\d\. `([\w/]+\.py)`, `(\w+)\.(\w+)`", text, re.MULTILINE)
    assert len(steps) > 5
    for path, owner, method in steps:
        source = (ROOT / "megatron/adaptive" / path).read_text()
        (body,) = re.findall(
            rf"^class {owner}\b.*?(?=^class |\Z)", source, re.MULTILINE | re.DOTALL
        )
        assert f"    def {method}(" in body, (path, owner, method)


@pytest.mark.parametrize(
    ("page", "title"), [("schedules.md", "## Which to choose"), ("plugin.md", "## Schedules")]
)
def test_tables_have_all_schedules(page: str, title: str) -> None:
    assert names_in_table(page, title) == set(selectable_names())


def test_the_readme_names_all_schedules_and_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    (row,) = (line for line in text.splitlines() if line.startswith("| schedules |"))
    named = set(re.findall(r"`([\w-]+)`", row))
    assert named >= set(selectable_names()) - {"file"}
    assert named <= BUILT_IN.keys()
    assert len(text.splitlines()) <= 140
