"""The claims study: arms, measures and judgements, on planted data and against brute force."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import check_claims
import claims_features
import claims_study
import numpy as np
import pytest
import torch
from organism import arms, examining
from organism.arms import Arm, Batch, answer, expert_similarity, run_arm, token_advantages, token_statistics
from organism.claims import JUDGES, Records, half_time, judge
from organism.mixed import prompt_ids

from tsae.checkpoints.loading import Checkpoint
from tsae.claims.literature import STUDIED
from tsae.errors import TsaeError
from tsae.rollouts.problems import Problem
from tsae.sae.config import SAEConfig
from tsae.sae.crosscoder import Crosscoder
from tsae.testbed import series
from tsae.testbed.chains import generate_problems
from tsae.testbed.tokenizer import TOKEN_IDS

CHAIN = Problem("chain:3+5*2", "3+5*2?", "6")


def batch_of(texts: list[str], problem: Problem = CHAIN) -> Batch:
    ids = [[TOKEN_IDS[c] for c in text] + [TOKEN_IDS["<eos>"]] for text in texts]
    right = np.array([text.endswith("#" + problem.answer) for text in texts])
    return Batch([problem] * len(texts), ids, right.astype(float), right)


@pytest.fixture(scope="module")
def base() -> Any:
    return series().base.load_model(dtype="float32")


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("3+5=8;8*2=6;#6<eos>", 1),
        ("3+5=8;8*2=7;#7<eos>", 1 / 3),
        ("#6<eos>", 0),
        ("3+5=8;#6<eos>", 1 / 3),
        ("8*2=6;3+5=8;#6<eos>", 1 / 3),
        ("", 0),
    ],
)
def test_expert_similarity_counts_steps_at_their_place(text: str, share: float) -> None:
    assert expert_similarity(CHAIN.prompt, text) == pytest.approx(share)


def test_behaviour_of_hand_worked_responses() -> None:
    found = examining.behaviour(batch_of(["3+5=8;8*2=6;#6", "3+5=9;9*2=8;#8", "#6", "#6"]))
    assert found["accuracy"] == 0.75
    assert found["direct"] == 0.5
    assert found["skipped"] == 0.5
    assert found["flawless"] == 0.25
    assert found["coherent"] == 0.75  # of four written results one does not follow: 3+5=9
    assert found["top_answer"] == 0.75
    assert (found["accuracy_direct"], found["accuracy_scratchpad"]) == (1, 0.5)


def test_lone_successes_are_told_from_others() -> None:
    batch = batch_of(["#6", "#1", "#2", "#3", "3+5=8;8*2=6;#6", "#6", "#1", "#2"])
    batch.entropy = [np.ones(len(ids)) for ids in batch.responses]
    found = examining.of_step(batch, samples=4)
    assert (found["lone"], found["lone_direct"], found["lone_flawed"]) == (1, 1, 1)
    assert (found["others"], found["others_direct"], found["others_flawed"]) == (2, 1, 1)
    assert found["entropy/answer"] == 1


def test_errors_after_errors_are_compared_at_the_same_step() -> None:
    texts = ["3+5=8;8*2=6;#6"] * 3 + ["3+5=9;9*2=9;#9", "3+5=9;9*2=8;#8", "8*2=6;#6"]  # the last omits a step
    found = examining.natural_slips(batch_of(texts))
    assert found == {"natural_after_error": 0.5, "natural_without": 0.0}


def test_advantages_of_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms, "SAMPLES", 4)
    batch = batch_of(["#6", "#1", "#2", "#3", "#6", "#6", "#1", "#2"])
    batch.entropy = [np.array([0.0, 1.0, 0.0])] * 8
    plain = [values[0] for values in token_advantages(Arm(()), batch, None)]
    assert plain == pytest.approx([1.4997, *[-0.4999] * 3, 0.8659, 0.8659, -0.8659, -0.8659], abs=1e-3)
    mean = [values[0] for values in token_advantages(Arm((), advantages="mean"), batch, None)]
    assert mean == pytest.approx([0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5])
    spared = [values[0] for values in token_advantages(Arm((), advantages="no lone"), batch, None)]
    assert spared[:4] == [0] * 4
    assert spared[4:] == plain[4:]
    top = token_advantages(Arm((), tokens="top"), batch, None)
    rest = token_advantages(Arm((), tokens="rest"), batch, None)
    assert [(values != 0).tolist() for values in top] == [[False, True, False]] * 8
    assert [(values != 0).tolist() for values in rest] == [[True, False, True]] * 8


def test_a_step_follows_the_gradient_of_a_plain_loop(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of the first step, written as a loop over tokens; ratios are 1."""
    arm = Arm(((4, 6),), beta=0.05, steps=1)
    batch = answer(base, generate_problems((4, 6), 2, 0), torch.Generator().manual_seed(0))
    advantages = token_advantages(arm, batch, None)
    old, _ = token_statistics(base, batch)
    model = series().base.load_model(dtype="float32").double().requires_grad_(True)  # rounding differs by processor
    with torch.no_grad():
        next(model.parameters()).add_(0.01)  # away from the base, so that the penalty has a gradient
    expected = torch.zeros(())
    for problem, response, advantage in zip(batch.problems, batch.responses, advantages, strict=True):
        prompt = prompt_ids(problem)
        log = torch.log_softmax(model(torch.tensor([prompt + response])).logits[0].double(), dim=-1)
        theirs = torch.log_softmax(base(torch.tensor([prompt + response])).logits[0].double(), dim=-1)
        for place, token in enumerate(response):
            now, then = log[len(prompt) + place - 1, token], theirs[len(prompt) + place - 1, token]
            ratio = (now - now.detach()).exp()
            d = then.detach() - now
            expected = expected - ratio * advantage[place] + 0.05 * (d.exp() - d - 1)
    expected = expected / sum(map(len, batch.responses))
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    now, _ = token_statistics(model, batch)
    steps: list[torch.Tensor] = []
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda parameters, _: steps.extend(parameters))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
    arms._optimise(model, list(model.parameters()), optimiser, batch, advantages, now, old, arm.beta)
    for parameter, gradient in zip(steps, wanted, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient, rtol=2e-3, atol=2e-6)


def test_a_run_repeats_itself(base: Any) -> None:
    arm = replace(claims_study.ARMS["easy"], steps=2)
    found = []
    for _ in range(2):
        model, rewards = series().base.load_model(dtype="float32"), list[float]()
        run_arm(arm, 0, model, base, lambda number, _, batch, to=rewards: to.append(float(batch.rewards.sum())))
        found.append((rewards, next(model.parameters()).detach().clone()))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_planted_slips_do_not_change_the_base(base: Any) -> None:
    found = examining.planted_slips(base, generate_problems((4, 6), 8, 0), 0)
    assert 0 < found["planted_without"] < 0.4
    assert abs(found["planted_after_error"] - found["planted_without"]) < 0.1


@pytest.mark.parametrize(
    ("path", "sign", "step"),
    [
        ([0, 0, 1, 1], 1, 15),
        ([1, 0.5, 0, 0], -1, 10),
        ([0, 0.2, 0.4, 0.8], 1, 20),
        ([0.5, 0.5, 0.48, 0.5], -1, None),  # too short a way
        ([0.5, 0.6, 0.9, 0.9], -1, None),  # the other way
        ([20, 19.5, 19.5, 19.5], -1, None),
    ],
)
def test_half_time_interpolates(path: list[float], sign: int, step: float | None) -> None:
    measured = {str(10 * i): {"medium": {"accuracy": value}} for i, value in enumerate(path)}
    found = half_time({"measured": measured}, "medium", "accuracy", sign)
    assert found is None if step is None else found == pytest.approx(step)


def planted(gains: dict[str, float]) -> Records:
    """Five seeds of the arms easy, medium and hard whose accuracy changes by so much on every level."""
    rng = np.random.default_rng(0)
    records = []
    for arm, gain in gains.items():
        for seed in range(5):
            cell = {level: {"accuracy": 0.5 + gain + rng.normal(0, 0.01)} for level in examining.LEVELS}
            start = {level: {"accuracy": 0.5} for level in examining.LEVELS}
            records.append({"arm": arm, "seed": seed, "measured": {"0": start, "60": cell}})
    return Records.of(records)


def test_planted_gains_are_judged() -> None:
    assert JUDGES["a"](planted({"easy": 0.1, "medium": 0.3, "hard": -0.2})).verdict == "reproduced"
    assert JUDGES["a"](planted({"easy": 0.1, "medium": 0.3, "hard": 0.4})).verdict == "partly"
    assert JUDGES["a"](planted({"easy": 0.3, "medium": 0.1, "hard": 0.4})).verdict == "not reproduced"
    assert JUDGES["b"](planted({"hard": -0.1})).verdict == "reproduced"
    assert JUDGES["b"](planted({"hard": 0.0})).verdict == "not reproduced"


def test_the_shipped_records_give_the_verdicts_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_claims.main([]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["ratio"] >= 0.9
    assert line["reproduced"] + line["partly"] + line["not"] + line["untestable"] == len(STUDIED)
    assert line["differing"] == [k for k, j in judge(_shipped()).items() if j.verdict == "cannot be tested"]


def _shipped() -> Records:
    return Records.of(check_claims.read_records(check_claims.RECORDS))


def test_another_verdict_on_the_page_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = check_claims.DOC.read_text(encoding="utf-8")
    verdicts = check_claims.verdicts_of(check_claims.DOC)
    key = next(k for k, verdict in verdicts.items() if verdict == "reproduced")
    row = next(line for line in page.splitlines() if line.startswith(f"| **{key}**"))
    forged = tmp_path / "claims.md"
    forged.write_text(page.replace(row, row.replace("| reproduced |", "| not reproduced |")), encoding="utf-8")
    monkeypatch.setattr(check_claims, "DOC", forged)
    check_claims.main([])
    assert key in json.loads(capsys.readouterr().out.splitlines()[-1])["differing"]


def test_missing_records_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_claims.main(["--records", str(tmp_path / "none.gz")]) == 1
    assert "claims_study" in capsys.readouterr().err
    with pytest.raises(TsaeError, match="is missing"):
        check_claims.read_records(tmp_path / "none.gz")


def test_every_claim_has_a_prediction() -> None:
    predictions = json.loads(check_claims.PREDICTIONS.read_text(encoding="utf-8"))
    assert list(predictions) == list(STUDIED)


def test_the_page_shows_the_records_of_every_dictionary() -> None:
    records = _shipped()
    assert tuple(records.by_arm["features"][0]["dictionaries"]) == claims_features.DICTIONARIES
    page = check_claims.DOC.read_text(encoding="utf-8")
    begins, ends = check_claims.DICTIONARIES_BEGIN, check_claims.DICTIONARIES_END
    assert page.partition(begins)[2].partition(ends)[0].strip() == check_claims.dictionary_table(records).strip()


@pytest.mark.parametrize("key", ["e", "f", "g"])
def test_every_dictionary_gives_the_verdict_of_the_t_sae(key: str) -> None:
    """Of correlation alone; as the page says, by a crosscoder's shared codes too."""
    record = _shipped().by_arm["features"][0]
    cells = {name: cell["shifts"] for name, cell in record["dictionaries"].items()}
    cells["shared codes"] = record["dictionaries"][claims_features.CROSSCODER]["shared"]
    judged = {
        name: JUDGES[key](Records.of([{**record, "dictionaries": {"T-SAE": {"shifts": shifts}}}])).verdict
        for name, shifts in cells.items()
    }
    assert len(judged) == 8
    assert len(set(judged.values())) == 1, judged


@pytest.mark.parametrize("key", ["e", "f", "g"])
def test_the_page_shows_what_ablations_do(key: str) -> None:
    record = _shipped().by_arm["features"][0]
    row = next(
        line for line in check_claims.DOC.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {key}: ")
    )
    for place, name in ((2, "T-SAE"), (3, "difference")):
        of = Records.of([{**record, "dictionaries": {"T-SAE": record["dictionaries"][name]}}])
        assert row.split(" | ")[place - 1] == check_claims.shown(JUDGES[key](of).parts[-1])


def test_readers_have_their_own_amounts_of_a_shared_feature() -> None:
    """Along the longer row: the reader's part of the reconstruction and its error."""
    config = SAEConfig(d_sae=2, k=1, groups=(1.0,), temporal_weight=0.0)
    crosscoder = Crosscoder(4, config, site=claims_features.SITE)
    with torch.no_grad():
        crosscoder.W_dec.copy_(torch.tensor([[0.5, 0.0, 1.0, 0.0], [0.0, 2.0, 0.0, 2.0]]))
        crosscoder.b_dec.fill_(1.0)
    x = 1 + torch.tensor([[0.8, 0.0, 2.0, 0.3], [0.0, 3.0, 0.0, 1.0]])
    base, other = claims_features.amounts(crosscoder, torch.tensor([[2.0, 0.0], [0.0, 1.0]]), x)
    torch.testing.assert_close(base, torch.tensor([[0.8, 0.0], [0.0, 1.5]]))
    torch.testing.assert_close(other, torch.tensor([[2.0, 0.0], [0.0, 0.5]]))


def test_effects_of_hand_worked_readings() -> None:
    """Two problems; the base answers each twice, the run twice, and the run reads the base's responses."""
    readings = claims_features.Readings(
        values=np.array([[0.0], [2], [2], [4], [1], [3], [3], [5], [6], [2], [5], [5]]),
        by_reader={("base", "base"): np.arange(4), ("run", "base"): np.arange(4, 8), ("run", "run"): np.arange(8, 12)},
        problem=np.tile([0, 0, 1, 1], 3),
        band=np.array(["easy"] * 12, dtype=object),
        outcome=np.array(["success", "failure"] * 6, dtype=object),
    )
    run = Checkpoint("run", "somewhere", run="run", step=1, trained_on="easy")
    found = claims_features.effects(readings, np.array(["deliberation"], dtype=object), [run])
    unit = np.std([0, 2, 2, 4], ddof=1)
    expected = {"shift": [2.5 / unit], "outcome": [2 / unit], "same_texts": [1 / unit]}
    assert found == {"easy": {"deliberation": {key: pytest.approx(values) for key, values in expected.items()}}}
