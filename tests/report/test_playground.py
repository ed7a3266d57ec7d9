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

import numpy as np
import pytest
import torch
from run_notebooks import CHROMIUM

import tsae
from support.results import MARKUP, make
from tsae.base.artefact import write_record
from tsae.causal.config import InterventionConfig
from tsae.causal.edits import FeatureEdit
from tsae.checkpoints.hooks import rewritten
from tsae.checkpoints.series import CheckpointSeries
from tsae.commands.report import checkpoints_of
from tsae.errors import TsaeError
from tsae.report.playground import Playground, Question
from tsae.report.serving import ServedRun, server
from tsae.testbed import eval_problems, series_path

pytestmark = pytest.mark.slow(ci=True)
SITE, PROMPT = "blocks.1.hook_resid_post", "9*7+9-5*8?"
FOLDERS = {"base": "base", "up-run": "medium-150", "down-run": "hard-150"}


@pytest.fixture(scope="module")
def series() -> CheckpointSeries:
    """The shipped base and two runs, named as in the diff that is made by hand."""
    made = {id: str(series_path() / folder) for id, folder in FOLDERS.items()}
    runs = [None, "up-run", "down-run"]
    return CheckpointSeries(
        tuple(tsae.Checkpoint(id=id, path=path, run=run) for (id, path), run in zip(made.items(), runs, strict=True))
    )


@pytest.fixture(scope="module")
def diff(series: CheckpointSeries) -> tsae.FeatureDiff:
    """Six features of an SAE with random weights, the last of which is silent."""
    sae = tsae.TemporalSAE(series.base.load_model().config.hidden_size, tsae.SAEConfig(d_sae=6, k=2), site=SITE)
    sae.initialize(torch.zeros(sae.d_model), torch.Generator().manual_seed(0))
    sae.b_enc.data[5] = -1e6
    problems = [p for p in eval_problems(2) if p.level != "easy"]
    drawn = tsae.sample(series.base, problems, tsae.SamplingConfig(n_samples=1, max_new_tokens=20), progress=False)
    table = tsae.encode(sae, tsae.LiveSource(series, drawn, SITE), progress=False)
    made = make()
    found = replace(made, source=table, info={**made.info, "token_strings": {}})
    found.info["made_by"] = sae
    return found


@pytest.fixture(scope="module")
def play(series: CheckpointSeries, diff: tsae.FeatureDiff) -> Playground:
    return Playground(series, diff.info["made_by"], diff)


def asks(**changes: Any) -> Question:
    return Question(**{"prompt": PROMPT, "run": "up-run", "tokens": 40, **changes})


def new_tokens(answer: dict[str, Any]) -> str:
    return "".join(answer["tokens"][answer["n_prompt"] :])


def test_answers_codes_and_edits_are_those_of_the_other_commands(
    play: Playground, series: CheckpointSeries, diff: tsae.FeatureDiff
) -> None:
    found = play.answer(asks(feature=3, edit="ablate"))
    tokenizer = series.base.load_tokenizer()
    prompt = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    sae = diff.info["made_by"]
    edit = FeatureEdit(sae, (3,), "ablate", (0.0,))
    around = edit.hook(
        lambda model: partial(rewritten, model), InterventionConfig().tokens, tuple(tokenizer.all_special_ids)
    )
    for answer, who in zip(found["answers"], ("base", "up-run", "up-run"), strict=True):
        model = series[who].load_model()
        with around(model, prompt, torch.ones_like(prompt)) if answer["edited"] else torch.no_grad():
            greedy = model.generate(prompt, do_sample=False, max_new_tokens=40)[0, prompt.shape[1] :].tolist()
        assert new_tokens(answer) == "".join(tokenizer.convert_ids_to_tokens(greedy))
        record = {
            "problem_id": "p", "policy": "base", "prompt": PROMPT, "response": "", "prompt_ids": prompt[0].tolist(),
            "response_ids": greedy, "outcome": "unknown",
        }  # fmt: skip
        alone = CheckpointSeries((replace(series[who], run=None, base=None, id="base"),))
        codes = tsae.encode(
            sae, tsae.LiveSource(alone, tsae.Rollouts.from_records([record]), SITE), progress=False
        ).codes
        shown = np.zeros(codes.shape)
        for row, pairs in zip(shown, answer["codes"], strict=True):
            row[[f for f, _ in pairs]] = [value for _, value in pairs]
        special = np.isin([*prompt[0].tolist(), *greedy], tokenizer.all_special_ids)
        np.testing.assert_allclose(shown[~special], codes[:].toarray()[~special], atol=2e-3)
        assert not shown[special].any()


def test_seeds_strengths_and_problems_count(play: Playground) -> None:
    texts = [new_tokens(play.answer(asks(temperature=2, seed=seed))["answers"][1]) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    steered = [play.answer(asks(feature=1, edit="steer", amount=a))["answers"] for a in (1e-6, 100)]
    assert [new_tokens(of[2]) == new_tokens(of[1]) for of in steered] == [True, False]
    assert len(play.answer(asks(tokens=3))["answers"][0]["tokens"]) <= len(PROMPT) + 4
    assert len(play.answer(asks(tokens=1024, temperature=10))["answers"][0]["tokens"]) <= 128  # the context
    known = play.features.rollouts.problems()[0]
    assert play.answer(asks(prompt=known.prompt))["reference"] == known.answer
    assert play.answer(asks(prompt="1+1?"))["reference"] == ""


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
    with pytest.raises(TsaeError) as error:
        play.answer(asks(**changes))
    assert said in str(error.value)


def test_the_checkpoints_are_where_the_run_found_them(
    series: CheckpointSeries, diff: tsae.FeatureDiff, tmp_path: Path
) -> None:
    readers = diff.info["readers"]
    with pytest.raises(TsaeError, match=r"holds no run\.json.*--series"):
        checkpoints_of(tmp_path, readers)
    for base, found in ((series.base.path, ["base", "up-run"]), ("nobody/nothing", None)):
        paths = {**{c.id: c.path for c in series}, "base": base, "down-run": str(tmp_path / "gone")}
        write_record(tmp_path / "run.json", {"series": list(paths.items())})
        if found:
            assert [checkpoint.id for checkpoint in checkpoints_of(tmp_path, readers)] == found
        else:
            with pytest.raises(TsaeError, match="does not hold the base"):
                checkpoints_of(tmp_path, readers)


@pytest.fixture(scope="module")
def address(play: Playground, diff: tsae.FeatureDiff) -> Iterator[Any]:
    with server(ServedRun(lambda: (diff, None, None), list, play=lambda _: play), 0) as found:
        threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True).start()
        yield found
        found.shutdown()


def post(found: Any, body: bytes, path: str = "/playground", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", found.server_port, timeout=120)
    own = {"Origin": f"http://127.0.0.1:{found.server_port}", "Content-Type": "application/json", **headers}
    connection.request("POST", path, body, {k.replace("_", "-"): v for k, v in own.items() if v})
    with closing(connection):
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_its_own_page_alone_may_ask(
    address: Any, play: Playground, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = json.dumps({"prompt": PROMPT, "run": "up-run", "tokens": 2}).encode()
    assert post(address, good)[0] == 200
    for refused in (
        {"Origin": ""},
        {"Origin": "http://evil.example"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Host": "evil.example"},
    ):
        assert post(address, good, **refused)[0] == 403
    assert post(address, good, "/")[0] == 404
    assert post(address, good, Content_Type="text/plain")[0] == 415
    assert post(address, b"", Content_Length=str(1 << 21))[0] == 413
    for bad in (b"{", b"[]", b'{"prompt": 1}', b'{"__class__": 1}', b"\xff"):
        assert post(address, bad)[0] in (400, 422)
    assert post(address, good.replace(b"up-run", b"x")) == (
        422, "No checkpoint 'x' is at hand; there are up-run, down-run. Choose one of these.",
    )  # fmt: skip
    play._busy.acquire()
    assert post(address, good) == (422, "Another question is being answered. Ask again when that is done.")
    play._busy.release()
    monkeypatch.setattr(play, "_open", lambda _: 1 / 0)
    assert post(address, good)[0] == 500
    assert "tsae: a question has no answer. ZeroDivisionError" in capsys.readouterr().err


def test_without_checkpoints_the_page_is_served_and_a_line_says_why(
    diff: tsae.FeatureDiff, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(_: tsae.FeatureDiff) -> Playground:
        raise TsaeError("holds no tokenizer", where="base")

    served = ServedRun(lambda: (diff, None, None), list, play=none)
    assert b"/playground" not in served.page()
    assert capsys.readouterr().err == "tsae: there is no playground. base: holds no tokenizer.\n"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: install Debian's package chromium")
def test_the_page_asks_colours_links_and_stays_harmless(
    address: Any, play: Playground, monkeypatch: pytest.MonkeyPatch
) -> None:
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import expect, sync_playwright

    said: list[str] = []
    url = f"http://127.0.0.1:{address.server_port}/"
    play._open("base")
    hostile = play._opened["base"]._replace(strings=[MARKUP, *play._opened["base"].strings[1:16], MARKUP, "<bos>"])
    monkeypatch.setitem(play._opened, "base", hostile)
    with sync_playwright() as playwright:
        page = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]).new_page(
            viewport={"width": 360, "height": 800}, color_scheme="dark"
        )
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(url)
        page.get_by_role("link", name="Playground").click()
        page.get_by_label("Prompt", exact=True).fill(PROMPT)
        page.get_by_label("Feature", exact=True).fill("3")
        page.get_by_label("Change the feature").select_option("steer")
        page.get_by_label("Strength of steering").fill("-2")
        page.keyboard.press("Enter")
        answers = page.locator("#answers section")
        expect(answers).to_have_count(3)
        expect(answers.last.locator("h2")).to_have_text("up-run with feature 3 steered by −2")
        expect(answers.first.locator(".tokens")).to_contain_text(MARKUP)
        assert answers.nth(1).locator("mark").count() > 0
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert page.evaluate("window.__attacked") is None
        assert page.locator("main img, main iframe").count() == 0
        assert [v["id"] for v in Axe().run(page).response["violations"]] == []
        # A feature of the list colours all answers, and the address has it.
        button = answers.nth(1).get_by_role("button", pressed=False).first
        number = button.inner_text()
        button.press("Enter")
        expect(answers.nth(1).get_by_role("button", pressed=True)).to_be_focused()
        assert f"feature={number}&" in f"{page.url}&"
        tokens = page.locator("#answers section .tokens")
        before = tokens.all_inner_texts()
        page.goto(page.url)
        expect(answers).to_have_count(3)
        assert tokens.all_inner_texts() == before
        page.get_by_label("Prompt", exact=True).fill("What?")
        page.get_by_role("button", name="Answer", exact=True).click()
        expect(page.get_by_role("alert")).to_contain_text("cannot be tokenised")
        assert [line for line in said if "favicon" not in line and "422" not in line] == []
