"""Tests the style of the documentation, and that the files, names and headings in it exist."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.adaptive.config.families.registry import supported_types
from megatron.adaptive.config.schedule_specs import built_in_schedules, selectable_names
from megatron.adaptive.config.transport_specs import by_preference
from megatron.adaptive.trace.diagnose.cause import built_in_causes
from megatron.adaptive.trace.views.view import built_in_views
from megatron.adaptive.training.logger import built_in_loggers

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
FOLDERS = {path.name for path in (ROOT / "megatron/adaptive").iterdir() if path.is_dir()}
TOP = (
    *("benchmarks", "csrc", "docs", "examples", "gpu_check", "harness"),
    *("scripts", "studies", "tests", "tools"),
)
PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
USE_PAGE_LINES = 145
"""Maximum number of lines on a page that explains how to use the package, without rows of tables.

Rows do not count, so that a page has room for each schedule, view or model family that is added.
"""
LONGEST_SENTENCE = 40
"""Maximum number of words in a sentence of the documentation."""
NOTEBOOK = "tutorial.md"
"""Page that is a notebook with its output. It may be longer than other pages."""
GENERATED = "flags.md"
"""Page that a program generates from help texts. Their style is checked where they are defined."""


def paths_in(page: Path) -> set[str]:
    """Returns the paths in the text of ``page`` that name files or folders of this project."""
    named = PATH.findall(page.read_text())
    return {path for path in named if path.split("/")[0] in (*FOLDERS, *TOP, "megatron")}


def section(page: str, title: str) -> str:
    """Returns the text of ``page`` below the heading ``title``, up to the next heading."""
    text = f"\n{(DOCS / page).read_text()}".partition(f"\n{title}\n")[2]
    return re.split(r"^##", text, maxsplit=1, flags=re.MULTILINE)[0]


def names_in_table(page: str, title: str) -> set[str]:
    """Returns the names in the first column of the table below the heading ``title``."""
    rows = rows_in(section(page, title))
    return {name for row in rows for name in re.findall(r"`(\w[\w -]*)`", row.split("|")[1])}


def rows_in(text: str) -> list[str]:
    """Returns the rows of all tables in ``text``, without their headers."""
    tables = re.findall(r"^\|[ |-]+\|\n((?:\|.*\n?)+)", text, re.MULTILINE)
    return [row for table in tables for row in table.splitlines()]


def groups_of_pages() -> dict[str, list[str]]:
    """Returns the pages of each group in the site's navigation, without ``index.md``."""
    navigation: list[Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert navigation[0] == "index.md"
    return {name: pages for entry in navigation[1:] for name, pages in entry.items()}


def anchors_of(page: Path) -> set[str]:
    """Returns the anchors that mkdocs and GitHub generate for the headings in ``page``."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = [re.sub(r"[^\w\s-]", "", title).strip().lower() for title in titles]
    return {re.sub(r"[-\s]+", "-", title) for title in slugs}


def sentences_of(text: str) -> list[str]:
    """Returns the sentences in paragraphs, lists and tables of ``text``. Code is one word."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "code", text)
    sentences: list[str] = []
    for block in re.split(r"\n\s*\n|\n(?=[|#]|[-*] |\d+\. )", text):
        is_code = block.lstrip("\n").startswith("    ")
        if is_code or block.lstrip().startswith("#"):
            continue
        for cell in block.strip().strip("|").split("|"):
            joined = " ".join(cell.split())
            sentences += re.split(r"(?<=[.!?])\s+|(?<=[:;])\s+(?=[A-Z(\d]|code)", joined)
    return [sentence for sentence in sentences if len(sentence.split()) > 2]


def test_each_page_is_in_one_group_and_use_pages_are_short() -> None:
    groups = groups_of_pages()
    assert list(groups) == ["Use", "Reference", "Measured"]
    grouped = sorted(["index.md", *(page for pages in groups.values() for page in pages)])
    assert grouped == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
    assert {page.split("/")[0] for page in groups["Measured"]} == {"results"}
    lines = {
        page: sum(not line.startswith("|") for line in (DOCS / page).read_text().splitlines())
        for page in groups["Use"]
    }
    assert {page: count for page, count in lines.items() if count > USE_PAGE_LINES}.keys() <= {
        NOTEBOOK
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_pages_and_headings(page: Path) -> None:
    broken = []
    for link in LINK.findall(page.read_text()):
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if "://" in link or (page.parent != ROOT and target.startswith("mailto:")):
            continue
        if not path.exists() or (anchor and anchor not in anchors_of(path)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize(
    "page",
    [page for page in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))] if page.name != GENERATED],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_sentences_are_short(page: Path) -> None:
    sentences = sentences_of(page.read_text())
    lengths = [len(sentence.split()) for sentence in sentences]
    assert statistics.median(lengths) < 20
    assert [s for s in sentences if len(s.split()) > LONGEST_SENTENCE] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_files_that_pages_name_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # The changelog mentions files of earlier releases, which may not exist any more.
    # CONTRIBUTING.md says that the file megatron/__init__.py must not exist.
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
    ("page", "title", "names"),
    [
        ("schedules.md", "## Which to choose", selectable_names),
        ("plugin.md", "## Schedules", selectable_names),
        ("transport.md", "# Transports", by_preference),
        ("huggingface.md", "## Import", supported_types),
        ("traces.md", "## Look at it", built_in_views),
        ("traces.md", "## Diagnosis", lambda: [cause.name for cause in built_in_causes()]),
    ],
    ids=["schedules", "schedules of the plug-in", "transports", "families", "views", "causes"],
)
def test_tables_have_all_names(page: str, title: str, names: Callable[[], Iterable[str]]) -> None:
    assert names_in_table(page, title) == set(names())


def test_the_page_of_launching_names_all_loggers() -> None:
    text = section("launch.md", "## Loggers")
    for name, logger in built_in_loggers().items():
        flag = f"--{logger.flag.replace('_', '-')}" if logger.flag else name
        assert re.search(rf"`{flag}[ `]", text), flag


def readme_row(kind: str) -> str:
    """Returns the row about ``kind`` in the README's table of features."""
    lines = (ROOT / "README.md").read_text().splitlines()
    (row,) = (line for line in lines if line.startswith(f"| {kind} |"))
    return row


def test_the_readme_names_all_families() -> None:
    rows = rows_in(section("huggingface.md", "## Import"))
    families = {re.findall(r"[A-Za-z]+", row)[0] for row in rows}
    assert {"Llama", "Qwen"} < families
    assert {name for name in families if name not in readme_row("Hugging Face")} == set()


def test_the_readme_names_all_schedules_and_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"`([\w-]+)`", readme_row("schedules")))
    assert named >= set(selectable_names()) - {"file"}
    assert named <= built_in_schedules().keys()
    assert len(text.splitlines()) <= 140
