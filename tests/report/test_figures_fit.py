"""Figures in a real Chromium, from a telephone's width to a large screen: all text has room."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.results import every_table, make, make_attribution
from tsae.report.page import write_report

pytestmark = pytest.mark.slow
WIDTHS = (360, 420, 768, 1280, 1920)
SHORT = ["easy-150", "medium-150", "hard-150"]
LONG = [f"qwen2.5-math-7b-grpo-{band}-lr1e-6-kl0.001-seed{i}/checkpoint-150" for i, band in enumerate("abcd")]

# The corners of every text that can be seen, as it is turned, and the box that it must not leave.
MEASURE = """place => {
  const corners = (box, matrix) => [[0, 0], [1, 0], [1, 1], [0, 1]].map(([right, down]) => {
    const point = new DOMPoint(box.x + right * box.width, box.y + down * box.height).matrixTransform(matrix);
    return [point.x, point.y];
  });
  const whole = place.querySelector(".main-svg").getBoundingClientRect();
  return [...place.querySelectorAll(".main-svg text")].flatMap((text) => {
    const box = text.getBBox();
    if (!text.textContent.trim() || !box.width || getComputedStyle(text).opacity === "0") return [];
    const cut = text.closest("[clip-path]");
    const shape = cut && document.getElementById(cut.getAttribute("clip-path").match(/#([^'")]+)/)[1]);
    const frame = shape ? corners(shape.querySelector("rect").getBBox(), cut.getScreenCTM())
      : [[whole.left, whole.top], [whole.right, whole.bottom]];
    return [{text: text.textContent, corners: corners(box, text.getScreenCTM()), frame}];
  });
}"""

DONE = """() => [...document.querySelectorAll(".plot:has(.main-svg)")]
  .every((place) => Number(place.dataset.fitted) === place.clientWidth)"""


@pytest.fixture(scope="module", params=[SHORT, LONG, SHORT[:1]], ids=["short", "long", "one"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("fit") / "report.html"
    return write_report(every_table(make(), request.param), to, attribution=make_attribution())


def apart(one: np.ndarray, other: np.ndarray) -> float:
    """How far two turned boxes (corners in order) are apart in pixels; negative where they overlap."""
    gaps = []
    for start, end in (pair for box in (one, other) for pair in zip(box, np.roll(box, 1, axis=0), strict=True)):
        normal = np.array([end[1] - start[1], start[0] - end[0]]) / max(float(np.linalg.norm(end - start)), 1e-9)
        mine, its = one @ normal, other @ normal
        gaps.append(max(its.min() - mine.max(), mine.min() - its.max()))
    return float(max(gaps))


def misplaced(page: Any) -> list[str]:
    """Texts of all figures that overlap one another or leave the figure, or the panel that cuts them."""
    found = []
    for figure in page.locator(".plot").all():
        name = figure.get_attribute("data-figure")
        figure.scroll_into_view_if_needed()
        figure.locator(".main-svg").first.wait_for()
        page.wait_for_function(DONE)
        if figure.evaluate("place => place.clientWidth - place.parentElement.clientWidth") > 1:
            found.append(f"{name}: wider than the page")
        texts = figure.evaluate(MEASURE)
        boxes = [np.array(text["corners"]) for text in texts]
        for text, box in zip(texts, boxes, strict=True):
            frame = np.array(text["frame"])
            if (box.min(0) < frame.min(0) - 1).any() or (box.max(0) > frame.max(0) + 1).any():
                found.append(f"{name}: “{text['text']}” is cut off")
        for (text, one), (other, two) in combinations(zip(texts, boxes, strict=True), 2):
            # Boxes of text are a little higher than its letters.
            if apart(one, two) < -2.5:
                found.append(f"{name}: “{text['text']}” over “{other['text']}”")
    return found


@pytest.mark.parametrize("width", WIDTHS)
def test_all_text_has_room_also_after_the_window_has_changed(browser: Any, report: Path, width: int) -> None:
    page = browser.new_context(viewport={"width": width, "height": 1000}, offline=True).new_page()
    page.goto(report.as_uri())
    page.wait_for_selector("#explorer[data-ready=yes]")
    assert misplaced(page) == []
    if width == 1280:
        page.set_viewport_size({"width": 500, "height": 1000})
        page.wait_for_function(DONE)
        assert misplaced(page) == []
    page.context.close()
