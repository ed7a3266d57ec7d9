"""Figures in a real Chromium, from a telephone's width to a large screen: all text has room."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from run_notebooks import CHROMIUM

import tsae
from support.results import make, make_attribution
from tsae.report.page import write_report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: install Debian's package chromium"),
]
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


def changed(diff: tsae.FeatureDiff, names: list[str]) -> tsae.FeatureDiff:
    """The hand-made diff with other runs, which repeat its two, and with every table that has a figure."""
    made = diff.checkpoints

    def named(table: pd.DataFrame, column: str) -> pd.DataFrame:
        others = [table[table[column] == made[i % 2]].assign(**{column: name}) for i, name in enumerate(names)]
        return pd.concat([table[~table[column].isin(made)], *others], ignore_index=True)

    def every(**keys: list[Any]) -> pd.DataFrame:
        return pd.DataFrame(list(product(*keys.values())), columns=list(keys))

    bands = ["all", "easy", "hard"]
    readers = {reader["id"]: reader for reader in diff.info["readers"]}
    runs = [readers[made[i % 2]] | {"id": name, "run": name, "trained_on": "medium"} for i, name in enumerate(names)]
    interval = {"low": -0.3, "high": 0.5, "p": 0.01, "q": 0.01, "n_problems": 30}
    delta = {"delta": 0.5, "delta_low": -1.0, "delta_high": 1.0}
    families = every(checkpoint=names, band=bands, family=["basic-computation", "deliberation", "answering"])
    predicted = every(checkpoint=names, part=["policy", "total"], predicted_on=bands)
    dynamics = every(run=names, step=[0, 50, 150], feature=list(range(6)))
    lived = every(run=names, step=[0, 50, 150], band=bands)
    noise = every(checkpoint=names, draw=[0, 1, 2], feature=list(range(6)))
    conditions = ["features", "random", "same_norm", "wrong_sign", "mean_difference"]
    changes = every(condition=conditions, behaviour=["accuracy", "direct_answer", "skipped_steps"]).assign(
        mean=0.5, change=-0.3, change_low=-0.4, change_high=-0.2, n_paired=30
    )
    test = {
        "checkpoint": names[0], "features": [0, 2], "mode": "ablate", "amount": 1.0, "tokens": "predicting",
        "n_problems": 30, "summaries": {}, "changes": changes.to_dict("records"),
    }  # fmt: skip
    return replace(
        diff,
        shifts=named(diff.shifts, "checkpoint"),
        contrasts=named(diff.contrasts, "checkpoint"),
        behaviours=named(diff.behaviours, "policy"),
        families=families.assign(n_features=3, difference=0.1, note="", **delta, **interval),
        predicted=predicted.assign(
            run=names[0], step=10, gradient="natural", realised_on="all", matched=False, n_features=6, rho=0.4,
            ceiling=0.9, rho_halves=0.3, note="", **interval,
        ),
        dynamics=dynamics.assign(
            mean=1.0, shift=dynamics.step / 100, delta=0.3, kind="growing", onset=5.0, onset_low=5.0, onset_high=10.0,
            part="total", **interval,
        ),
        behaviour_dynamics=lived.assign(behaviour="accuracy", mean=0.5, **interval),
        noise=noise.assign(delta=np.linspace(0.001, 1.5, len(noise))),
        info={**diff.info, "readers": [readers[diff.base], *runs], "causally_tested": [test, test]},
    )  # fmt: skip


@pytest.fixture(scope="module", params=[SHORT, LONG, SHORT[:1]], ids=["short", "long", "one"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("fit") / "report.html"
    return write_report(changed(make(), request.param), to, attribution=make_attribution())


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
def test_all_text_has_room(browser: Any, report: Path, width: int) -> None:
    page = browser.new_context(viewport={"width": width, "height": 1000}, offline=True).new_page()
    page.goto(report.as_uri())
    page.wait_for_selector("#explorer[data-ready=yes]")
    assert misplaced(page) == []
    page.context.close()


def test_figures_follow_the_window(browser: Any, report: Path) -> None:
    page = browser.new_context(viewport={"width": 1280, "height": 1000}, offline=True).new_page()
    page.goto(report.as_uri())
    page.wait_for_selector("#explorer[data-ready=yes]")
    assert misplaced(page) == []
    page.set_viewport_size({"width": 500, "height": 1000})
    page.wait_for_function(DONE)
    assert misplaced(page) == []
    page.context.close()
