"""Tests the HTML page in a real browser: opening, zooming, tooltips and the slider."""

from collections.abc import Iterator
from typing import Any

import pytest

from megatron.adaptive.trace.metrics import RunFigures, run_figures
from megatron.adaptive.trace.read import RunTrace, read_run
from megatron.adaptive.trace.views.page import write_page
from tests.support.synthetic_trace import SyntheticRun, write_synthetic

from ...browser import complaints, opened_browser

READY_S = 60
MIDDLE_OF_SPAN = """
const kinds = CATEGORIES.map((c) => c.kind);
const block = state.block, row = 1;
for (let i = block.offset[row]; i < block.offset[row + 1]; i++) {
  const wanted = arguments[1] < 0 || block.microbatch[i] === arguments[1];
  if (kinds[block.category[i]] === arguments[0] && wanted && block.length[i] * block.unit_ms > 3) {
    const layout = chart._fullLayout, box = chart.getBoundingClientRect();
    const time = (block.start[i] + block.length[i] / 2) * block.unit_ms;
    return [box.left + layout.xaxis._offset + layout.xaxis.d2p(time),
            box.top + layout.yaxis._offset + layout.yaxis.d2p(row)];
  }
}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunTrace:
    folder = tmp_path_factory.mktemp("browser")
    write_synthetic(folder, SyntheticRun(num_ranks=3, replicas=2, num_chunks=2, iterations=6))
    return read_run(folder)


@pytest.fixture(scope="module")
def figures(run: RunTrace) -> RunFigures:
    return run_figures(run)


@pytest.fixture(scope="module")
def browser(run: RunTrace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yields the driver of a headless Chromium in which the page is open."""
    folder = tmp_path_factory.mktemp("profile")
    write_page(run, folder / "page.html", run.iterations)
    with opened_browser(folder / "profile") as driver:
        driver.set_script_timeout(READY_S)
        driver.get((folder / "page.html").as_uri())
        yield driver


@pytest.fixture
def page(browser: Any) -> Any:
    """Returns the browser's driver after reloading the page, so that it is in its initial state."""
    browser.refresh()
    wait_for(browser, "return document.body.dataset.ready === 'yes'")
    return browser


def wait_for(browser: Any, script: str, *arguments: Any, within_s: float = READY_S) -> None:
    """Waits until ``script``, the body of a JavaScript function, returns a true value."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, within_s, 0.05).until(lambda d: d.execute_script(script, *arguments))


def came_true(browser: Any, script: str, *arguments: Any) -> bool:
    """Returns whether ``script`` returns a true value within three seconds."""
    from selenium.common.exceptions import TimeoutException

    try:
        wait_for(browser, script, *arguments, within_s=3.0)
    except TimeoutException:
        return False
    return True


def plot_point(page: Any, x: float, y: float) -> tuple[float, float]:
    """Returns the window coordinates in pixels of a point in the timeline.

    ``x`` and ``y`` are fractions of the timeline's width and height.
    """
    left, top, width, height = page.execute_script(
        "const l = chart._fullLayout, b = chart.getBoundingClientRect();"
        "return [b.left + l.xaxis._offset, b.top + l.yaxis._offset, l.xaxis._length, "
        "l.yaxis._length]"
    )
    return left + x * width, top + y * height


def pointer(page: Any) -> Any:
    from selenium.webdriver.common.actions.action_builder import ActionBuilder

    return ActionBuilder(page, duration=50)


def move(page: Any, *places: tuple[float, float], drag: bool = False) -> None:
    """Moves the pointer to each of ``places``, with a mouse button pressed if ``drag`` is set."""
    actions = pointer(page)
    for number, (x, y) in enumerate(places):
        actions.pointer_action.move_to_location(int(x), int(y))
        if drag and number == 0:
            actions.pointer_action.pointer_down()
    if drag:
        actions.pointer_action.pointer_up()
    actions.perform()


def double_click(page: Any, point: tuple[float, float]) -> None:
    actions = pointer(page)
    actions.pointer_action.move_to_location(*map(int, point))
    for _ in range(2):
        actions.pointer_action.pointer_down()
        actions.pointer_action.pointer_up()
    actions.perform()


def x_range(page: Any) -> list[float]:
    limits: list[float] = page.execute_script("return chart._fullLayout.xaxis.range.map(Number)")
    return limits


def test_it_opens_without_an_error_and_asks_nobody(page: Any, figures: RunFigures) -> None:
    assert complaints(page) == []
    loaded = page.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert [name for name in loaded if not name.startswith(("data:", "blob:"))] == []
    step_ms = figures.step_ns[-1, 0] / 1e6
    assert f"step {step_ms:.2f} ms" in page.execute_script("return numbers.innerText")
    names = page.execute_script(
        "return [...document.querySelectorAll('#chart .legendtext')].map(e => e.textContent)"
    )
    assert {"forward 0", "backward 1", "wait for input", "message", "idle"} <= set(names)
    assert page.execute_script(
        "const all = document.documentElement;"
        "const button = document.querySelector('[data-title=\"Whole step\"]');"
        "return all.scrollWidth <= all.clientWidth"
        " && button.getBoundingClientRect().right <= all.clientWidth"
    )


def test_dragging_zooms_and_a_double_click_goes_back(page: Any) -> None:
    whole = x_range(page)
    move(page, plot_point(page, 0.3, 0.5), plot_point(page, 0.6, 0.5), drag=True)
    wait_for(page, "return chart._fullLayout.xaxis.range[0] > arguments[0]", whole[0])
    low, high = x_range(page)
    width = whole[1] - whole[0]
    assert low == pytest.approx(whole[0] + 0.3 * width, abs=0.01 * width)
    assert high == pytest.approx(whole[0] + 0.6 * width, abs=0.01 * width)
    wait_for(page, "return state.from === arguments[0]", low)
    back = "return chart._fullLayout.xaxis.range.every((x, i) => Math.abs(x - arguments[i]) < 1e-6)"
    # Try several times, because a busy machine may recognize two slow clicks instead of a double
    # click.
    for _ in range(20):
        double_click(page, plot_point(page, 0.5, 0.5))
        if came_true(page, back, *whole):
            break
    wait_for(page, back, *whole)
    move(page, plot_point(page, 0.1, 0.5), plot_point(page, 0.2, 0.5), drag=True)
    wait_for(page, "return state.from > arguments[0]", whole[0])
    page.find_element("css selector", '[data-title="Whole step"]').click()
    wait_for(page, back, *whole)


def test_the_label_says_what_lies_under_the_pointer(page: Any, run: RunTrace) -> None:
    span = next(
        s for s in run.ranks[2].table([6]).of_kind("B").spans() if (s.microbatch, s.chunk) == (3, 1)
    )
    move(page, page.execute_script(MIDDLE_OF_SPAN, "B", 3))
    wait_for(page, "return !tip.hidden")
    label = page.execute_script("return tip.innerText")
    assert "backward of microbatch 3, chunk 1" in label
    assert f"{span.duration_ns / 1e6:.3f} ms" in label
    assert "waited" in label
    assert span.reason in label
    assert "MiB" in label
    move(page, page.execute_script(MIDDLE_OF_SPAN, "wait", -1))
    wait_for(page, "return tip.innerText.startsWith('wait for input')")
    assert "ended by" in page.execute_script("return tip.innerText")
    move(page, (5, 5))
    wait_for(page, "return tip.hidden")


def test_the_slider_goes_to_another_iteration(page: Any, figures: RunFigures) -> None:
    from selenium.webdriver.common.keys import Keys

    assert page.execute_script("return chart.dataset.iteration") == "6"
    slider = page.find_element("id", "slider")
    for key, expected in ((Keys.ARROW_LEFT, 5), (Keys.HOME, 1), (Keys.ARROW_RIGHT, 2)):
        slider.send_keys(key)
        wait_for(page, "return chart.dataset.iteration === arguments[0]", str(expected))
        step_ms = figures.step_ns[expected - 1, 0] / 1e6
        assert f"step {step_ms:.2f} ms" in page.execute_script("return numbers.innerText")
        assert page.execute_script("return iteration.innerText") == f"iteration {expected}"
    page.find_element("id", "next").click()
    wait_for(page, "return chart.dataset.iteration === '3'")


def test_arrows_memory_and_the_simulated_step_are_switched(page: Any) -> None:
    points = (
        "return chart.data.filter(t => t.name === arguments[0] && t.visible !== false)"
        ".reduce((sum, t) => sum + t.x.length, 0)"
    )
    assert page.execute_script(points, "message") > 100
    page.find_element("id", "arrows").click()
    wait_for(page, points.replace("return ", "return 0 === "), "message")
    assert page.execute_script(points, "no rank slower (lower bars)") == 0
    page.find_element("id", "simulated").click()
    wait_for(page, points.replace("return ", "return 100 < "), "no rank slower (lower bars)")
    assert page.execute_script("return chart._fullLayout.yaxis2.visible")
    page.find_element("id", "memory").click()
    wait_for(page, "return !chart._fullLayout.yaxis2.visible")


def test_replicas_and_views_of_too_many_spans(page: Any) -> None:
    from selenium.webdriver.support.ui import Select

    groups = Select(page.find_element("id", "group"))
    names = [option.text for option in groups.options]
    assert names == ["replica 0", "replica 1"]
    groups.select_by_index(1)
    wait_for(page, "return state.group === 1")
    area = "return chart.data.filter(t => (t.name || '').startsWith('forward'))[0].x.length"
    page.execute_script("LIMITS.bars = 10; LIMITS.arrows = 5; draw()")
    said = page.execute_script("return message.innerText")
    assert "shown as parts of time" in said
    assert "zoom in for arrows" in said
    assert page.execute_script(area) > 100
    assert complaints(page) == []
