"""The playground of `tsae serve`: its answers and codes are those of sampling, encoding and interventions."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import tsae
from support.refusals import refuses
from support.results import MARKUP, make
from tsae.base.artefact import write_record
from tsae.causal.edits import FeatureEdit
from tsae.checkpoints.hooks import rewritten
from tsae.errors import TsaeError
from tsae.report.playground import Playground, Question
from tsae.report.serving import ServedRun, server
from tsae.stages import checkpoints_of
from tsae.testbed import eval_problems, series_path

pytestmark = pytest.mark.slow(ci=True)
SITE, PROMPT = "blocks.1.hook_resid_post", "9*7+9-5*8?"
QUIET: Any = {"progress": False}


@pytest.fixture(scope="module")
def play() -> Playground:
    """The shipped base and two runs, a diff made by hand, and an SAE of random weights, whose feature 5 is silent."""
    folders = {"base": "base", "up-run": "medium-150", "down-run": "hard-150"}
    paths = {id: str(series_path() / folder) for id, folder in folders.items()}
    runs = {"base": None, "up-run": "up-run", "down-run": "down-run"}
    series = tsae.CheckpointSeries(tuple(tsae.Checkpoint(id, path, runs[id]) for id, path in paths.items()))
    sae = tsae.TemporalSAE(series.base.load_model().config.hidden_size, tsae.SAEConfig(d_sae=6, k=2), site=SITE)
    sae.initialize(torch.zeros(sae.d_model), torch.Generator().manual_seed(0))
    sae.b_enc.data[5] = -1e6
    drawn = tsae.sample(series.base, eval_problems(2)[2:], tsae.SamplingConfig(max_new_tokens=20), **QUIET)
    return Playground(
        series, sae, replace(make(), source=tsae.encode(sae, tsae.LiveSource(series, drawn, SITE), **QUIET))
    )


def asks(**changes: Any) -> Question:
    return Question(**{"prompt": PROMPT, "run": "up-run", "tokens": 40, **changes})


def new_tokens(answer: dict[str, Any]) -> str:
    return "".join(answer["tokens"][answer["n_prompt"] :])


def test_answers_codes_and_edits_are_those_of_the_other_commands(play: Playground) -> None:
    found, sae, tokenizer = play.answer(asks(feature=3, edit="ablate")), play.sae, play.series.base.load_tokenizer()
    prompt, special = tokenizer(PROMPT, return_tensors="pt")["input_ids"], tuple(tokenizer.all_special_ids)
    around = FeatureEdit(sae, (3,), "ablate", (0.0,)).hook(lambda of: partial(rewritten, of), "predicting", special)
    for answer, who in zip(found["answers"], ("base", "up-run", "up-run"), strict=True):
        model = play.series[who].load_model()
        with around(model, prompt, torch.ones_like(prompt)) if answer["edited"] else torch.no_grad():
            whole = model.generate(prompt, do_sample=False, max_new_tokens=40)[0].tolist()
        assert answer["tokens"] == tokenizer.convert_ids_to_tokens(whole)
        record = {"problem_id": "p", "policy": "base", "prompt_ids": whole[:1], "response_ids": whole[1:]}
        alone = tsae.CheckpointSeries((replace(play.series[who], run=None, base=None),))
        read = tsae.Rollouts.from_records([{**record, "prompt": "", "response": "", "outcome": "unknown"}])
        codes = tsae.encode(sae, tsae.LiveSource(alone, read, SITE), **QUIET).codes[:].toarray()
        codes[np.isin(whole, special)] = 0
        shown = np.zeros(codes.shape)
        for row, pairs in zip(shown, answer["codes"], strict=True):
            row[[feature for feature, _ in pairs]] = [value for _, value in pairs]
        np.testing.assert_allclose(shown, codes, atol=2e-3)


def test_seeds_strengths_and_problems_count(play: Playground) -> None:
    texts = [new_tokens(play.answer(asks(temperature=2, seed=seed))["answers"][1]) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    steered = [play.answer(asks(feature=1, edit="steer", amount=a))["answers"] for a in (1e-6, 100)]
    assert [new_tokens(of[2]) == new_tokens(of[1]) for of in steered] == [True, False]
    assert len(play.answer(asks(tokens=1024, temperature=10))["answers"][0]["tokens"]) <= 128  # the context
    known = play.features.rollouts.problems()[0]
    assert [play.answer(asks(prompt=text))["reference"] for text in (known.prompt, "1+1?")] == [known.answer, ""]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"run": "other"}, "there are up-run, down-run"),
        ({"edit": "ablate"}, "needs a feature"),
        ({"feature": 6}, "6"),
        ({"feature": 5, "edit": "steer"}, "active on no response token"),
        ({"feature": 1, "edit": "steer", "amount": 0}, "changes nothing"),
        ({"prompt": "What?"}, "cannot be tokenised"),
        ({"prompt": "1+" * 70}, "reads 128 in all"),
        ({"prompt": ""}, "prompt"),
        ({"tokens": 10**6}, "tokens"),
        ({"amount": None}, "amount"),
    ],
)
def test_what_cannot_be_answered_is_said(play: Playground, changes: dict[str, Any], said: str) -> None:
    refuses(said, lambda: play.answer(asks(**changes)))


def test_the_checkpoints_are_where_the_run_found_them(play: Playground, tmp_path: Path) -> None:
    readers = play.diff.info["readers"]
    refuses(r"holds no run\.json.*--series", checkpoints_of, tmp_path, readers)
    paths = {checkpoint.id: checkpoint.path for checkpoint in play.series} | {"down-run": str(tmp_path / "gone")}
    write_record(tmp_path / "run.json", {"series": list(paths.items())})
    assert [checkpoint.id for checkpoint in checkpoints_of(tmp_path, readers)] == ["base", "up-run"]
    write_record(tmp_path / "run.json", {"series": [*(paths | {"base": "nobody/nothing"}).items()]})
    refuses("does not hold the base", checkpoints_of, tmp_path, readers)  # and nothing is downloaded


@pytest.fixture(scope="module")
def port(play: Playground) -> Iterator[int]:
    with server(ServedRun(lambda: (play.diff, None, None), list, play=lambda _: play), 0) as found:
        threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True).start()
        yield found.server_port
        found.shutdown()


def post(port: int, body: bytes, path: str = "/playground", **headers: str) -> tuple[int, str]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        own = {"Origin": f"http://127.0.0.1:{port}", "Content-Type": "application/json"} | headers
        connection.request("POST", path, body, {name.replace("_", "-"): value for name, value in own.items() if value})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_its_own_page_alone_may_ask(port: int, play: Playground, monkeypatch: Any, capsys: Any) -> None:
    good = json.dumps({"prompt": PROMPT, "run": "up-run", "tokens": 2}).encode()
    assert post(port, good)[0] == 200
    evil = "http://evil.example"
    for wrong in ({"Origin": ""}, {"Origin": evil}, {"Sec_Fetch_Site": "cross-site"}, {"Host": "evil.example"}):
        assert post(port, good, **wrong)[0] == 403
    assert post(port, good, "/")[0] == 404
    assert post(port, good, **{"Content-Type": "text/plain"})[0] == 415
    assert post(port, b"", Content_Length=str(1 << 21))[0] == 413
    for bad in (b"{", b"[]", b'{"prompt": 1}', b'{"__class__": 1}', b"\xff"):
        assert post(port, bad)[0] in (400, 422)
    what = "No checkpoint 'x' is at hand; there are up-run, down-run. Choose one of these."
    assert post(port, good.replace(b"up-run", b"x")) == (422, what)
    with play._busy:
        assert post(port, good) == (422, "Another question is being answered. Ask again when that is done.")
    monkeypatch.setattr(play, "_open", lambda _: 1 / 0)
    assert post(port, good)[0] == 500
    assert "tsae: a question has no answer. ZeroDivisionError" in capsys.readouterr().err


def test_without_checkpoints_the_page_is_served_and_a_line_says_why(play: Playground, capsys: Any) -> None:
    none = Mock(side_effect=TsaeError("holds no tokenizer", where="base"))
    assert b'<a href="/playground"' not in ServedRun(lambda: (play.diff, None, None), list, play=none).page()
    assert capsys.readouterr().err == "tsae: there is no playground. base: holds no tokenizer.\n"


def test_the_page_asks_colours_links_and_stays_harmless(
    port: int, play: Playground, browser: Any, monkeypatch: Any
) -> None:
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import expect

    opened, said = play._open("base"), list[str]()
    hostile = [MARKUP, *opened.strings[1:16], MARKUP, "<bos>"]
    monkeypatch.setitem(play._opened, "base", opened._replace(strings=hostile))
    page = browser.new_page(viewport={"width": 360, "height": 800}, color_scheme="dark")
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(f"http://127.0.0.1:{port}/#feature-3")
    page.locator("#card").get_by_role("link", name="playground").click()
    page.get_by_label("Prompt", exact=True).fill(PROMPT)
    expect(page.get_by_label("Feature", exact=True)).to_have_value("3")
    page.get_by_label("Change the feature").select_option("steer")
    page.get_by_label("Strength of steering").fill("-2")
    page.keyboard.press("Enter")
    answers, tokens = page.locator("#answers section"), page.locator("#answers .tokens")
    expect(answers.locator("h2")).to_have_text(["base", "up-run", "up-run with feature 3 steered by −2"])
    expect(tokens.first).to_contain_text(MARKUP)
    assert tokens.nth(1).locator("mark").count() > 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("window.__attacked") is None
    assert page.locator("main img, main iframe").count() == 0
    assert [violation["id"] for violation in Axe().run(page).response["violations"]] == []
    # A feature of the list colours all answers, and the address has it.
    button = answers.nth(1).get_by_role("button", pressed=False).first
    number = button.inner_text()
    button.press("Enter")
    expect(answers.nth(1).get_by_role("button", pressed=True)).to_be_focused()
    assert f"feature={number}&" in f"{page.url}&"
    before = tokens.all_inner_texts()
    page.goto(page.url)
    expect(answers).to_have_count(3)
    assert tokens.all_inner_texts() == before
    page.get_by_label("Prompt", exact=True).fill("What?")
    page.get_by_role("button", name="Answer", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("cannot be tokenised")
    assert [line for line in said if "favicon" not in line and "422" not in line] == []
