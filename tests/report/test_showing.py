"""Results in notebooks: every one shows itself, text of rollouts stays text, figures draw without a network."""

from __future__ import annotations

import base64
import copy
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from run_notebooks import CHROMIUM, WIDTH, lighten

import tsae
from support.builders import make_rollouts
from support.refusals import refuses
from support.results import INVISIBLE, MARKUP, make, source
from tsae.features.contexts import top_contexts
from tsae.report import notebook as cards
from tsae.report.document import environment
from tsae.report.figures import plots as notebook
from tsae.report.story import facts
from tsae.report.text import html_text, number


class Elements(HTMLParser):
    """Names of elements, attributes that name other files, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.loaded: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.loaded += [f"{name}={value}" for name, value in attrs if name in ("src", "href") or name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += data


SORTING = str(environment().get_template("cards.html").module.sorting())
LINES = {"svg", "title", "line", "polyline", "circle"}


def harmless(html: str) -> Elements:
    """The elements of what is shown: no script but the one that sorts, which holds no data, nothing fetched, no
    handler, and text that UTF-8 can write."""
    found = Elements(html.replace(SORTING, ""))
    plain = {"div", "span", "b", "table", "caption", "thead", "tbody", "tr", "th", "td", "mark", "button"}
    assert set(found.names) <= plain | LINES
    assert found.loaded == []
    html.encode("utf-8")
    return found


@pytest.fixture(scope="module")
def diff() -> tsae.FeatureDiff:
    return make()


@pytest.fixture(scope="module")
def trained(store: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("showing")
    training = tsae.TrainingConfig(site=store.sites[0], tokens=4000, batch_tokens=256)
    return tsae.train(store, tsae.SAEConfig(d_sae=32, k=4), to=folder / "sae", training=training, progress=False)


@pytest.fixture(scope="module")
def features(trained: Any, store: Any) -> tsae.FeatureTable:
    return tsae.encode(trained, store, progress=False)


@pytest.mark.slow(ci=True)
def test_every_result_shows_itself(
    series: Any, rollouts: Any, store: Any, trained: Any, features: Any, diff: tsae.FeatureDiff
) -> None:
    rollouts = rollouts.with_advantages()
    again = rollouts.with_column("response_ids", [[5]] * len(rollouts))
    banded = rollouts.with_bands(None, cutoffs=tsae.BandQuantiles(0.3, 0.3), measured_on=again)
    with_labels = replace(features, rollouts=banded)
    other = copy.deepcopy(trained)
    other.b_enc.data += 1
    results = {
        "CheckpointSeries": (series, "easy-10"),
        "Rollouts": (banded, "pass rate"),
        "ActivationStore": (store, "blocks.1.hook_resid_post"),
        "LiveSource": (tsae.LiveSource(series, rollouts, store.sites[0]), "easy-10"),
        "TemporalSAE": (trained, "of which high-level"),
        "Evaluation": (tsae.evaluate(trained, store), "smoothness"),
        "Separation": (tsae.separation({"SAE": trained}, store, tokens_per_trajectory=1), "accuracy"),
        "Stability": (tsae.stability(trained, [other]), "mean matched cosine"),
        "FeatureTable": (features, f"active a token {number(features.codes.nnz / features.codes.shape[0])}"),
        "FeatureDiff": (diff, "not causally tested"),
        "Feature 1": (diff.feature(1), "not causally tested"),
        "Difficulty": (tsae.difficulty(banded), "problems by band"),
        "Reinforcement": (tsae.reinforcement(with_labels, tsae.DiffConfig(n_permutations=100)), "groups"),
    }
    for name, (result, told) in results.items():
        found = harmless(result._repr_html_())
        assert found.text.startswith(name)
        assert told in found.text, name


def test_a_card_says_what_the_table_says(rollouts: Any) -> None:
    """Numbers of a card, against pandas."""
    cells = Elements(rollouts._repr_html_()).text
    frame = rollouts.frame
    base = frame[frame.policy == "base"]
    assert f"{len(base)}" in cells
    assert f"{(base.outcome == 'success').mean():.2f}" in cells


def test_a_diff_shows_shifts_by_band_and_along_the_steps(diff: tsae.FeatureDiff) -> None:
    import pandas as pd

    moved = diff.top(100)
    run, feature = moved.run[0], int(moved.feature[0])
    steps = {"run": run, "feature": feature, "step": [0, 20, 10], "delta": [0.0, -1.5, 0.25], "kind": "growing"}
    html = replace(diff, dynamics=pd.DataFrame(steps))._repr_html_()
    harmless(html)
    assert 'aria-label="step 0 +0.00, step 10 +0.25, step 20 −1.50"' in html
    row = diff.table(kind="shift", checkpoint=run, part=diff.main_part(run), feature=feature, outcome="all")
    of = row.set_index("band").delta
    said = ", ".join(f"{band} {number(of[band], sign=True)}" for band in ("easy", "hard"))
    assert f'aria-label="{said}"' in html
    keys = re.findall(r'data-key="([^"]*)"', html)
    assert repr(float(moved.delta[0])) in keys
    assert "<script" not in replace(diff, shifts=diff.shifts.iloc[:0])._repr_html_()  # nothing to sort


def test_a_feature_shows_where_it_fires_once_its_features_are_there(diff: tsae.FeatureDiff) -> None:
    table, strings = source(["plain", MARKUP, "</script>"])
    assert "<mark" not in diff.feature(1)._repr_html_()
    with_source = replace(diff, source=table, info={**diff.info, "token_strings": strings})
    html = with_source.feature(1)._repr_html_()
    assert harmless(html).names.count("mark") == 6
    assert html_text(MARKUP) in html


@pytest.mark.slow(ci=True)
def test_a_click_on_a_head_sorts_the_table(diff: tsae.FeatureDiff, offline: Any, tmp_path: Path) -> None:
    page_file = tmp_path / "card.html"
    page_file.write_text(f"<!DOCTYPE html><meta charset='utf-8'>{diff._repr_html_()}", encoding="utf-8")
    expected = diff.top(100)
    offline.goto(page_file.as_uri())
    place = 1 + [button.inner_text() for button in offline.query_selector_all("thead button")].index("delta")
    cells = f"div > table tbody tr td[data-key]:nth-child({place})"
    for down in (True, False):
        offline.click("thead button:text-is('delta')")
        keys = offline.eval_on_selector_all(cells, "cells => cells.map((cell) => Number(cell.dataset.key))")
        assert keys == sorted(expected.delta.tolist(), reverse=down)
    assert offline.get_attribute("th:has(button:text-is('delta'))", "aria-sort") == "ascending"


def test_tables_show_a_part_and_say_so() -> None:
    import pandas as pd

    table = pd.DataFrame({"n_rows": range(30), "share": np.linspace(0, 1, 30)})
    found = Elements(cards.card("Some", {}, ("what", table)))
    assert found.names.count("tr") == 13
    assert "what – the first 12 of 30 rows" in found.text
    assert "n rows" in found.text


@pytest.mark.parametrize(
    "hostile", [MARKUP, INVISIBLE, "x" * 100_000, "⟨\u202eevil⟩"], ids=["markup", "marks", "long", "rtl"]
)
def test_rollout_text_stays_text(
    hostile: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    monkeypatch.setattr("tsae.report.notebook.show", lambda html, text: shown.extend([html, text]))
    # Arrow holds no lone surrogates; they can still come from a tokenizer.
    text = hostile.encode("utf-8", "ignore").decode()
    rollouts = make_rollouts(("base",))
    rollouts = rollouts.with_column("response", [text] * len(rollouts)).with_column("answer", [text] * len(rollouts))
    problem = rollouts.frame.problem_id[0]
    rollouts.show(problem, n=2)
    found = harmless(shown[0])
    assert html_text(text) in shown[0]
    assert all(c.isprintable() or c in "\n\t" for c in shown[1])
    assert found.text.count("✓") + found.text.count("✗") == 2
    html = cards.tokens_html([hostile, "b"], [1.0, 0.0], strongest=1.0)
    assert harmless(html).names == ["div", "mark"]


def test_a_problem_is_shown_with_as_many_failures_as_successes(capsys: pytest.CaptureFixture[str]) -> None:
    rollouts = make_rollouts(("base", "easy-10"))
    outcomes = ["success"] * (len(rollouts) - 2) + ["failure"] * 2
    rollouts = rollouts.with_column("problem_id", ["p"] * len(rollouts)).with_column("outcome", outcomes)
    rollouts.show("p", n=4)
    said = capsys.readouterr().out
    assert said.count("✓ success") == said.count("✗ failure") == 2
    assert said.index("✓") < said.index("✗")
    refuses("nothing was sampled for 'q' by base; problems are p", rollouts.show, "q", policy="base")


def test_tokens_carry_their_activations(features: Any, series: Any, capsys: pytest.CaptureFixture[str]) -> None:
    row = int(np.flatnonzero(features.reader == 0)[0])
    span = slice(features.row_offsets[row], features.row_offsets[row + 1])
    special = np.isin(features.token_ids[span], list(features.info["special_ids"]))
    codes = features.codes[span].toarray()
    feature = int(codes[~special].sum(0).argmax())
    features.show(int(features.trajectory[row]), feature, checkpoint=series.base)
    said = capsys.readouterr().out
    strongest = codes[~special, feature].max()
    assert f"|{strongest:.2g}]" in said
    # Special tokens never count, however strongly the feature fires on them.
    assert said.count("|") == (codes[~special, feature] > 0).sum()
    refuses("did not read trajectory 9999", features.show, 9999)


def test_what_is_not_there_is_said(features: Any, series: Any) -> None:
    rollouts = make_rollouts(tokenizer="another")
    row = int(np.flatnonzero(features.trajectory[features.rows(reader="base")] == 0)[0])
    codes = features.codes[slice(*features.row_offsets[row : row + 2])].toarray()
    features.show(0, int(codes.sum(0).argmin()))  # no colour, and no error
    features.show(0, np.int64(1))
    for wrong in (features.n_features, -3, [0, 99]):
        refuses("no feature", features.show, 0, wrong)
    refuses("n=0 is too small", rollouts.show, "p000", n=0)
    refuses("no reader 'zz'", top_contexts, features, 0, reader="zz")
    refuses("n=0 contexts are none", top_contexts, features, 0, 0)
    refuses("is not the one that the trajectories were tokenised with", rollouts.show, "p000", checkpoint=series.base)


def test_examples_need_the_features(diff: tsae.FeatureDiff) -> None:
    refuses("examples need the features", diff.feature(1).show)


def test_examples_are_those_of_the_strongest_activation(capsys: pytest.CaptureFixture[str]) -> None:
    table, strings = source(["a", "b", "c"])
    diff = make()
    diff = replace(diff, source=table, info={**diff.info, "token_strings": strings})
    feature = int(np.bincount(table.codes.indices).argmax())
    diff.feature(feature).show(1)
    said = capsys.readouterr().out
    assert f"|{diff.feature(feature).contexts(1)[0].activations.max():.2g}]" in said


# --- figures

ABSENT = {"families", "predictions", "steps", "causal"}
"""What the diff made by hand has not."""


def names(diff: tsae.FeatureDiff) -> list[str]:
    return re.findall(r"\w+", repr(diff.plot).partition(":")[2])


def test_figures_have_titles_and_hover(diff: tsae.FeatureDiff) -> None:
    assert {"bands", "volcano", "decomposition", "feature", "outcomes", "opposed"} <= set(names(diff))
    drawn = 0
    assert set(names(diff)) > ABSENT
    for name in names(diff):
        arguments: tuple[Any, ...] = {"feature": (1,), "opposed": tuple(diff.checkpoints[:2])}.get(name, ())
        if name in ABSENT:
            refuses("nothing to draw", getattr(diff.plot, name), *arguments)
            continue
        figure = getattr(diff.plot, name)(*arguments)
        drawn += 1
        assert figure.layout.title.text.startswith("<b>")
        assert any(trace.hovertemplate or trace.hoverinfo for trace in figure.data)
    assert drawn == 9


def test_a_volcano_shows_every_tested_feature(diff: tsae.FeatureDiff) -> None:
    figure = diff.plot.volcano()
    runs = diff.final_checkpoints
    points = [(x, y) for trace in figure.data for x, y in zip(trace.x, trace.y, strict=True)]
    wanted = [(d, q) for run in runs for d, q in facts.main_shift(diff, run)[["delta", "q"]].itertuples(index=False)]
    assert sorted(points) == sorted(wanted)
    raised = [x for trace in figure.data if trace.name == "raised" for x in trace.x]
    assert raised
    assert min(raised) > 0


def test_a_feature_is_drawn_where_it_was_measured(diff: tsae.FeatureDiff) -> None:
    figure = diff.plot.feature(1)
    run = diff.final_checkpoints[0]
    row = facts.main_shift(diff, run).loc[1]
    everything = next(trace for trace in figure.data if trace.name == "all problems")
    assert everything.x[0] == pytest.approx(row.delta)
    assert everything.error_x.array[0] == pytest.approx(row.delta_high - row.delta)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A notebook with two figures and a bar, run by a kernel that knows no extension."""
    from nbclient import NotebookClient

    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from support.results import make\n"
        "from tqdm.auto import tqdm\n"
        "diff = make()\n"
        "for _ in tqdm(range(3), desc='work'): pass\n"
        "diff"
    )
    cells = [nbformat.v4.new_code_cell(c) for c in (code, "diff.plot.volcano()", "diff.plot.bands().show()")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
    return notebook


@pytest.mark.slow(ci=True)
def test_a_notebook_holds_plotly_once_and_fetches_nothing(executed: Any) -> None:
    first, volcano, bands = (cell.outputs for cell in executed.cells)
    widgets = [o for o in first if "application/vnd.jupyter.widget-view+json" in o.get("data", {})]
    assert len(widgets) == 1  # The bar is a widget, and no red box of control characters.
    assert not [o for o in first if o.output_type == "stream"]
    html = [output.data["text/html"] for (output,) in (volcano, bands)]
    assert all(notebook.MIMETYPE in output.data for (output,) in (volcano, bands))
    assert "DecompressionStream" in html[0]
    assert "DecompressionStream" not in html[1]
    assert len(html[0]) < 3e6
    assert len(html[1]) < 3e5
    assert not re.search(r"<script[^>]*src|https?://", html[1])


def needs_chromium() -> None:
    if CHROMIUM is None:
        pytest.skip("no Chromium: install Debian's package chromium")


@pytest.fixture
def offline() -> Iterator[Any]:
    """A page of Chromium without a network; what goes wrong in it fails the test."""
    needs_chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_context(offline=True).new_page()
        wrong: list[str] = []
        page.on("request", lambda request: wrong.append(request.url) if request.url.startswith("http") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        yield page
        assert wrong == []
        browser.close()


@pytest.mark.slow(ci=True)
def test_figures_draw_without_a_network(executed: Any, offline: Any, tmp_path: Path) -> None:
    """As a front end without Plotly's extension shows it: the text/html of the outputs, in their order."""
    shown = [
        output.data["text/html"]
        for cell in executed.cells
        for output in cell.outputs
        if "text/html" in output.get("data", {})
    ]
    page = tmp_path / "notebook.html"
    page.write_text(f"<!DOCTYPE html><meta charset=utf-8>{''.join(shown)}", encoding="utf-8")
    offline.goto(page.as_uri())
    offline.wait_for_function("document.querySelectorAll('.main-svg').length >= 4", timeout=120_000)
    titles = offline.eval_on_selector_all(".gtitle", "found => found.map(title => title.textContent)")
    assert [title.partition("\u200b")[0] for title in titles] == [
        "Shift of every tested feature",
        "Shift of the most moved features, by band and outcome",
    ]


@pytest.mark.slow(ci=True)
def test_stored_notebooks_are_light(executed: Any) -> None:
    """Figures become images; bars go."""
    needs_chromium()
    notebook = copy.deepcopy(executed)
    lighten(notebook)
    first, volcano, _ = (cell.outputs for cell in notebook.cells)
    assert [set(output.data) for output in first] == [{"text/html"}]
    assert volcano[0].data["text/plain"] == "Shift of every tested feature"
    head = base64.b64decode(volcano[0].data["image/png"])[16:24]
    assert int.from_bytes(head[:4], "big") >= WIDTH
    assert len(nbformat.writes(notebook)) < 1e6
