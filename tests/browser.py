"""Runs a headless Chromium for tests of HTML pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-dev-shm-usage "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--window-size=1400,900"
)


@contextmanager
def opened_browser(profile: Path) -> Iterator[Any]:
    """Yields the driver of a headless browser, or skips the test if no browser is installed.

    Args:
        profile: Folder for the browser's profile.
    """
    webdriver = pytest.importorskip("selenium.webdriver", reason="pip install selenium")
    programs = shutil.which("chromium"), shutil.which("chromedriver")
    if None in programs:
        pytest.skip("chromium or chromedriver is missing: run bash prerequisite.sh --views")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for flag in (*FLAGS.split(), f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(programs[1]))
    try:
        yield driver
    finally:
        driver.quit()


def complaints(browser: Any) -> list[Any]:
    """Returns the errors that ``browser`` has logged to its console since the previous call."""
    return [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
