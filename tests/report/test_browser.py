"""The report in a real Chromium with the network blocked: it opens, filters, links, unfolds; hostile text stays text.

Skipped where there is no Chromium: Debian's package `chromium`, or any on PATH.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tsae
from support.builders import feature_table
from support.results import MARKUP, crossed, describe, every_table, make, make_attribution
from tsae.diff.baselines import WAYS
from tsae.report.page import write_report
from tsae.report.story.statements import surviving
from tsae.rollouts.table import Rollouts

pytestmark = pytest.mark.slow(ci=True)

WORDS = [
    "<bos>",
    "The",
    " sum",
    " is",
    " 4",
    ".",
    "\n",
    "שלום",
    "\u202ereversed",
    "\ud800",
    MARKUP,
    "x" * 100_000,
    "</script>",
]


class Tab:
    """A page that remembers what went wrong and what it asked for."""

    def __init__(self, browser: Any, path: Path, link: str = "", **context: Any) -> None:
        size = {"width": 1400, "height": 1000}
        self.page = browser.new_context(**{"viewport": size, "offline": True, **context}).new_page()
        self.said: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.url = path.as_uri()
        self.page.goto(self.url + link)
        self.page.wait_for_selector("#explorer[data-ready=yes]")

    def check(self) -> None:
        """No message, no request but the page itself, no dialog, and no element that data made."""
        assert self.said == []
        assert {url.split("#")[0] for url in self.requests if not url.startswith(("data:", "blob:"))} == {self.url}
        assert self.page.evaluate("window.__attacked") is None

    def close(self) -> None:
        self.check()
        self.page.context.close()

    def rests(self, place: Any) -> None:
        """A place is in sight, and stays where it is: a figure that is drawn above it moves it, and a click misses."""
        place.scroll_into_view_if_needed()
        place.evaluate("""async (place) => {
            for (let rested = 0, last = null; rested < 5; ) {
                await new Promise((done) => setTimeout(done, 100));
                const now = place.getBoundingClientRect().top;
                [rested, last] = [now === last ? rested + 1 : 0, now];
            }
        }""")

    def shows(self, *features: str) -> None:
        """The explorer lists these, now or soon: on a busy machine what was typed arrives late."""
        from playwright.sync_api import expect

        expect(self.page.locator("#features tbody th")).to_have_text(list(features))


def hostile() -> tsae.FeatureDiff:
    """A hand-made diff whose tokens, names and classes attack the page; features 0 and 2 moved most."""
    n, run = len(WORDS), {"up-run": f"up-run{MARKUP}"}
    records = [
        {
            "problem_id": f"p{problem}{MARKUP}", "policy": policy, "prompt_ids": [0],
            "response_ids": [*range(1, n), *[1, 2, 3, 4] * 60], "outcome": outcome, "prompt": MARKUP, "response": "",
        }
        for policy in ("base", run["up-run"])
        for problem in range(4)
        for outcome in ("success", "failure")
    ]  # fmt: skip
    n_tokens = n + 240
    codes = np.zeros((len(records) * n_tokens, 6))
    for row in range(len(records)):
        codes[row * n_tokens + 2 : row * n_tokens + n, :] = np.linspace(1, 5 - row % 8 / 2, n - 2)[:, None]
    rows = np.arange(len(records)).reshape(2, -1)
    readers = [("base", rows[0]), (run["up-run"], rows[1])]
    source = feature_table(Rollouts.from_records(records), codes, readers, d_high=2, special=(0,))
    made = make()
    diff = replace(
        made,
        source=source,
        features=describe([MARKUP, "operand", "\u202eback", "answer", "x" * 100_000, "prompt"]).assign(
            top_tokens=[[MARKUP, "x" * 100_000, "\ud800"]] * 6,
            promotes=[[MARKUP]] * 6, promotes_by=[[0.5]] * 6,
            suppresses=[["</script>"]] * 6, suppresses_by=[[-0.5]] * 6,
            label=[MARKUP + "y" * 60, *[""] * 5], label_score=[0.9, 0.4, *[np.nan] * 4],
        ),
        shifts=made.shifts.replace({"checkpoint": run}),
        contrasts=made.contrasts.replace({"checkpoint": run}),
        behaviours=made.behaviours.replace({"policy": run}),
    )  # fmt: skip
    diff.info["token_strings"] = {str(i): word for i, word in enumerate(WORDS)}
    diff.info["readers"][1] |= {"id": run["up-run"]}
    diff.info["explanations"] = {"labeller": MARKUP, "control": 0.5}
    return diff


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    title = f"{MARKUP}<script>window.__attacked = 1</script>"
    to = tmp_path_factory.mktemp("hostile") / "report.html"
    return write_report(
        hostile(), to, title=title, attribution=make_attribution((MARKUP, "\u202ereversed", *WORDS[-2:]))
    )


@pytest.fixture(scope="module")
def tested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with every section, from tables made by hand."""
    made = every_table(make(), ["up-run", "down-run"])
    plain = crossed(checkpoint=made.checkpoints, way=WAYS).assign(
        kind="shift", auroc=0.7, low=0.6, high=0.8, n_problems=30, note=""
    )
    diff = replace(
        made, baselines=plain, source=hostile().source,
        features=made.features.assign(
            family=["computing", "answering", "none"] * 2, family_share=0.5, stability=[0.9, 0.5, 0.8, 0.9, 0.7, 0.6]
        ),
        info={**made.info, "token_strings": {str(i): f" w{i}" for i in range(len(WORDS))}},
    )  # fmt: skip
    to = tmp_path_factory.mktemp("tested") / "report.html"
    return write_report(diff, to, attribution=make_attribution())


def test_the_explorer_filters_sorts_and_links(browser: Any, tested: Path) -> None:
    tab = Tab(browser, tested)
    page = tab.page
    filters = page.locator(".filters")
    tab.rests(filters)
    # Of the first contrast: |shift| .9, .7, .5, .2; features 3 and 5 did not move.
    tab.shows("0", "2", "1", "4")
    assert page.locator("#found").inner_text() == "4 features of 6 active ones."
    filters.get_by_label("Direction").select_option("-1")
    tab.shows("2")
    filters.get_by_role("button", name="Reset").click()
    filters.get_by_label("Number, or what it responds to").fill("ANSWER")
    tab.shows("2")
    filters.get_by_label("q at most").fill("1")
    tab.shows("2", "3")
    filters.get_by_role("button", name="Reset").click()
    filters.get_by_label("Family").select_option("answering")
    tab.shows("1", "4")
    filters.get_by_role("button", name="Reset").click()
    filters.get_by_label("Stability at least").fill("0.65")
    tab.shows("0", "2", "4")
    filters.get_by_role("button", name="Reset").click()
    filters.get_by_label("Without confound flags").check()
    tab.shows()
    filters.get_by_role("button", name="Reset").click()
    page.locator("#features").get_by_role("button", name="Feature").click()
    tab.shows("0", "1", "2", "4")
    # The second click turns the order round. The keyboard does it too.
    page.locator("#features").get_by_role("button", name="Δ").focus()
    page.keyboard.press("Enter")
    tab.shows("0", "2", "1", "4")
    page.keyboard.press("Enter")
    tab.shows("4", "1", "2", "0")
    # Another contrast has other effects.
    options = page.locator("select[name=contrast] optgroup[label='Success − failure, read by base'] option")
    filters.get_by_label("Effect in").select_option(options.first.get_attribute("value"))
    tab.shows("0", "2")  # Still by |Δ|, upwards: .3 and .4.
    filters.get_by_label("q at most").fill("1")
    page.get_by_role("link", name="1", exact=True).first.click()
    page.wait_for_selector("article#feature-1")
    assert page.evaluate("location.hash") == "#feature-1"
    assert "Other seeds' SAEs do not have it" in page.locator("#card").inner_text()
    tab.close()


def test_a_link_opens_its_feature(browser: Any, tested: Path) -> None:
    tab = Tab(browser, tested, "#feature-4")
    tab.page.wait_for_selector("article#feature-4 mark")
    box = tab.page.locator("article#feature-4").bounding_box()
    assert box is not None
    assert -5 <= box["y"] < 1000
    card = tab.page.locator("article#feature-4").inner_text()
    assert "+0.40 [+0.20, +0.60]" in card
    assert "The same problem, solved and failed" in card
    assert tab.page.locator(".pair").first.locator(".outcome").all_inner_texts() == ["✓ success", "✗ failure"]
    assert tab.page.locator("tr.open th").inner_text() == "4"
    tab.page.evaluate("location.hash = '#feature-99999'")  # No such feature: nothing happens.
    tab.page.evaluate("location.hash = '#feature-0'")
    tab.page.wait_for_selector("article#feature-0")
    # Every number in the tables and the findings leads to a card.
    tab.page.locator(".finding span.feature a").first.click()
    tab.page.wait_for_selector("article#feature-0")
    assert tab.page.locator(".finding a[href='#feature-2']").count() > 0
    assert tab.page.locator("span.feature:not(:has(a))").count() == 0
    tab.close()


def test_every_figure_is_drawn_and_told(browser: Any, tested: Path) -> None:
    tab = Tab(browser, tested)
    figures = tab.page.locator(".plot")
    names = {figures.nth(i).get_attribute("data-figure") for i in range(figures.count())}
    assert names >= {
        "overview", "behaviours-figure", "spread-figure", "bands-figure", "decomposition-figure", "opposed-figure",
        "family-figure", "outcomes-figure", "prediction-figure", "steps-figure", "causal-figure",
    }  # fmt: skip
    for i in range(figures.count()):
        figures.nth(i).scroll_into_view_if_needed()
        figures.nth(i).locator(".main-svg").first.wait_for()
        assert len(figures.nth(i).get_attribute("aria-label") or "") > 30
    # A click on what stands for a feature leads to its card.
    for name in ("spread", "bands", "decomposition", "opposed", "outcomes", "steps"):
        plot = tab.page.locator(f"[data-figure={name}-figure]")
        tab.rests(plot)
        places = plot.evaluate(
            """(plot) => plot.data.filter((trace) => [trace.customdata].flat(2).some(Number.isInteger)).length"""
        )
        assert places > 0, name
        plot.evaluate("(plot) => plot.emit('plotly_click', { points: [{ customdata: 2 }] })")
        tab.page.wait_for_function("location.hash === '#feature-2'")
        tab.page.evaluate("location.hash = ''")
    point = tab.page.locator("[data-figure=opposed-figure] .point").first
    tab.rests(point)
    point.click(force=True)
    tab.page.wait_for_function("/^#feature-/.test(location.hash)")
    tab.close()


def test_words_explain_themselves(browser: Any, tested: Path) -> None:
    tab = Tab(browser, tested)
    page, tip = tab.page, tab.page.locator("#tip")
    meaning = page.locator("#term-delta dd").inner_text()
    assert "standard deviations" in meaning
    page.locator("figcaption a.term[href='#term-delta']").first.focus()
    assert tip.inner_text() == meaning
    page.keyboard.press("Escape")
    assert tip.is_hidden()
    head = page.locator("#features").get_by_role("button", name="AUROC")
    tab.rests(head)
    head.hover()
    assert tip.inner_text() == page.locator("#term-auroc dd").inner_text()
    # Every word that is marked has a place in the glossary.
    links = page.locator("a.term").evaluate_all("(links) => [...new Set(links.map((link) => link.hash))]")
    assert len(links) > 5
    assert all(page.locator(link).count() == 1 for link in links)
    # The table of contents stays, and names the section on the screen; a row opens its card.
    page.locator("nav a[href='#opposed']").click()
    page.wait_for_selector("nav a[href='#opposed'][aria-current]")
    tab.rests(page.locator("#opposed h2"))
    assert 0 < page.locator("#opposed h2").bounding_box()["y"] < 120  # although figures above it were drawn meanwhile
    assert page.locator("nav").bounding_box()["y"] == 0
    page.locator("#opposed tbody tr td").last.click()
    page.wait_for_function("/^#feature-/.test(location.hash)")
    tab.close()


def test_one_problem_stands_side_by_side(browser: Any, attacked: Path) -> None:
    tab = Tab(browser, attacked)
    page = tab.page
    page.wait_for_selector("#shown", state="visible")
    answers = page.locator("#answers .example")
    assert answers.count() == 4
    assert page.locator("#answers .outcome").all_inner_texts() == ["✓ success", "✗ failure"] * 2
    assert MARKUP in page.locator("#answers").inner_text()
    # Features 0 and 1 were raised, 2 was lowered; of several active ones the strongest gives the colour.
    page.get_by_label("Tokens coloured by").select_option(label="2 \u202eback (lowered)".replace("\u202e", "‹U+202E›"))
    assert page.locator("#answers mark.against").count() == page.locator("#answers mark").count() > 0
    page.locator("#answers mark").first.click()
    page.wait_for_selector("article#feature-2")
    tab.close()


def test_hostile_text_is_shown_as_text(browser: Any, attacked: Path) -> None:
    tab = Tab(browser, attacked, "#feature-0")
    page = tab.page
    page.wait_for_selector("article#feature-0 mark")
    text = page.locator("article#feature-0").inner_text()
    assert f"{MARKUP}{'y' * 60} (label by {MARKUP}; score 0.90 on" in text
    assert "‹U+202E›reversed" in text
    assert "‹U+D800›" in text
    assert "שלום" in text
    assert page.locator("main img, main iframe, header script, main script").count() == 0
    assert page.locator("h1").inner_text().startswith("<script>alert(1)</script>")
    # 100 kB without a space: cut until it is unfolded, and never wider than the page.
    assert "100,000 characters" in text
    page.get_by_role("button", name="unfold").first.click()
    assert "x" * 100_000 in page.locator("article#feature-0 .tokens").first.inner_text()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.get_by_role("button", name="fold", exact=True).get_attribute("aria-expanded") == "true"
    page.get_by_label("Number, or what it responds to").fill("<img")
    tab.shows("0", "2", "1", "4")  # All have the markup among their tokens.
    tab.close()


@pytest.mark.parametrize("width", [pytest.param(1400, marks=pytest.mark.slow), 400])
def test_nothing_is_wider_than_the_screen(browser: Any, tested: Path, width: int) -> None:
    tab = Tab(browser, tested, viewport={"width": width, "height": 900})
    tab.page.wait_for_selector("article .example mark")
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    tab.close()


def test_light_and_dark(browser: Any, tested: Path) -> None:
    tab = Tab(browser, tested, color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.querySelector('.plot text.ytitle, .plot .ytick text')).fill"
    tab.page.wait_for_selector(".plot .ytick text")
    dark = tab.page.evaluate(background), tab.page.evaluate(ink)
    tab.page.get_by_role("button", name="Light").click()
    light = tab.page.evaluate(background), tab.page.evaluate(ink)
    assert (dark[0], light[0]) == ("rgb(20, 23, 27)", "rgb(255, 255, 255)")
    assert (dark[1], light[1]) == ("rgb(230, 233, 237)", "rgb(29, 34, 40)")
    tab.page.emulate_media(color_scheme="light")
    assert tab.page.get_by_role("button", name="Dark").count() == 1
    tab.close()


def test_paper_is_light_and_whole(browser: Any, tested: Path) -> None:
    tab = Tab(browser, tested, color_scheme="dark")
    before = tab.page.locator(".plot .main-svg").count()
    printed = tab.page.pdf()
    assert printed.startswith(b"%PDF")
    assert tab.page.locator(".plot:not(:has(.main-svg))").count() == 0
    assert tab.page.locator(".plot .main-svg").count() > before
    tab.close()


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_axe_finds_no_serious_violation(browser: Any, tested: Path, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    tab = Tab(browser, tested, color_scheme=scheme)
    tab.page.wait_for_selector("article .example mark")
    for details in tab.page.locator("details").all():
        details.evaluate("place => { place.open = true; }")
    found = Axe().run(tab.page).response["violations"]
    serious = {
        v["id"]: [n["html"][:200] for n in v["nodes"]][:3] for v in found if v["impact"] in ("serious", "critical")
    }
    assert serious == {}
    tab.close()


@pytest.mark.slow
def test_the_demo_opens_with_the_network_blocked(browser: Any, tmp_path: Path) -> None:
    """A small real run of the whole pipeline, then everything that the page promises."""
    from support.cli import TINY
    from tsae.demo import demo

    path = demo(replace(TINY, to=tmp_path / "demo"), progress=False)
    assert path.stat().st_size < 15e6
    tab = Tab(browser, path)
    page = tab.page
    assert page.locator(".verdict h2 bdi").all_inner_texts() == ["easy-150", "medium-150", "hard-150"]
    assert "How far to believe it" in page.locator(".finding h2 bdi").all_inner_texts()
    for link in page.locator(".finding h2 a, .lights details p:last-child a").all():
        assert page.locator(str(link.get_attribute("href"))).count() == 1
    diff = tsae.FeatureDiff.load(tmp_path / "demo" / "diff")
    moved = diff.table(discoveries=True, kind="shift", checkpoint="hard-150", part="total", band="all", outcome="all")
    options = page.locator("select[name=contrast] optgroup[label='Shift of hard-150'] option")
    page.locator(".filters").get_by_label("Effect in").select_option(options.first.get_attribute("value"))
    # Those that survive all controls first, then by how well they tell both sides apart.
    moved = moved.assign(rest=~moved.index.isin(surviving(moved).index), apart=-(moved.auroc.round(3) - 0.5).abs())
    strongest = moved.assign(size=-moved.delta.abs()).sort_values(["rest", "apart", "size"]).feature
    tab.shows(*(str(feature) for feature in strongest.head(20)))
    page.wait_for_selector("#shown", state="visible")
    assert page.locator("table.worked tbody tr").count() == 5
    feature = int(strongest.iloc[0])
    tab.close()
    tab = Tab(browser, path, f"#feature-{feature}")
    tab.page.wait_for_selector(f"article#feature-{feature} mark")
    card = tab.page.locator("#card").inner_text()
    assert "Promotes" in card
    assert tab.page.locator(".pair").count() >= 1
    tab.close()


# What data could do if some of it ever reached the page unescaped, and what the browser says that it blocked.
INJECTIONS = {
    "<script>window.__attacked = 1</script>": "script-src-elem",
    "<img src=data:, onerror='window.__attacked = 1'>": "script-src-attr",
    "<script src='https://example.org/a.js'></script>": "script-src-elem",
    "<link rel=stylesheet href='https://example.org/a.css'>": "style-src-elem",
    "<iframe srcdoc='<script>parent.__attacked = 1</script>'></iframe>": None,  # reported inside of it
    "<iframe src='https://example.org/'></iframe>": "frame-src",
    "<img src='https://example.org/a.png'>": "img-src",
    "<base href='https://example.org/'>": "base-uri",
    "<form action='https://example.org/'></form><script></script>": "form-action",
    "<a id=bait href='javascript:window.__attacked = 1'>x</a>": "script-src-elem",
}
_ACT = """async () => {
  document.querySelector("body form:not([class])")?.submit();
  document.querySelector("#bait")?.click();
  await new Promise((done) => setTimeout(done, 100));
  try { (0, eval)("window.__attacked = 1"); } catch {}
  try { new Function("window.__attacked = 1")(); } catch {}
  await fetch("https://example.org/").catch(() => null);
}"""


def test_the_policy_stops_what_gets_into_the_page(browser: Any, tested: Path, tmp_path: Path) -> None:
    """Escaping taken away: the second line of defence alone."""
    page = tmp_path / "report.html"
    content = tested.read_text(encoding="utf-8")
    assert content.count("<body>") == 1
    page.write_text(content.replace("<body>", f"<body>{''.join(INJECTIONS)}"), encoding="utf-8")
    tab = browser.new_context().new_page()
    asked: list[str] = []
    failed: dict[str, str] = {}
    tab.on("request", lambda request: asked.append(request.url))
    tab.on("requestfailed", lambda request: failed.update({request.url: request.failure}))
    tab.add_init_script(
        "window.blocked = [];"
        "addEventListener('securitypolicyviolation', (event) => window.blocked.push(event.effectiveDirective));"
    )
    tab.goto(page.as_uri())
    tab.wait_for_selector("#explorer[data-ready=yes]")
    tab.evaluate(_ACT)
    assert tab.evaluate("window.__attacked") is None
    blocked = tab.evaluate("window.blocked")
    assert {*filter(None, INJECTIONS.values()), "script-src", "connect-src"} <= set(blocked)
    assert blocked.count("script-src-elem") >= 3
    # The browser tells of requests that it does not make.
    assert {failed.get(url) for url in asked if url.startswith("http")} == {"csp"}
    tab.context.close()
