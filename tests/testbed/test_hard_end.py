"""The hard end of the cure, tried again: its arms against plain loops, and its table against the records."""

import json
from pathlib import Path
from typing import Any

import hard_end
import numpy as np
import pytest
import torch
from organism.arms import SAMPLES, Arm, Batch, as_trl, token_advantages
from organism.hard_end import AlongPath, FirstSlip, problem_sets
from organism.mixed import prompt_ids

from tsae.rollouts.problems import Problem
from tsae.testbed import series
from tsae.testbed.tokenizer import TOKEN_IDS

ROOT = Path(__file__).parents[2]
CHAIN = Problem("chain:3+5*2", "3+5*2?", "6")
SHORT = Problem("chain:3+5", "3+5?", "8")


def batch_of(texts: list[str], problems: list[Problem]) -> Batch:
    ids = [[TOKEN_IDS[c] for c in text] + [TOKEN_IDS["<eos>"]] for text in texts]
    right = np.array([text.endswith("#" + p.answer) for text, p in zip(texts, problems, strict=True)])
    entropy = [np.linspace(0, 1, len(some)) for some in ids]
    return Batch(problems, ids, right.astype(float), right, entropy)


@pytest.fixture(scope="module")
def model() -> Any:
    return series().base.load_model(dtype="float32").requires_grad_(True)


def test_a_success_counts_if_its_gradient_goes_along_the_path(model: Any) -> None:
    solved = ["3+5=8;#8"] * 12 + ["3+5=7;#7"] * 4
    mostly_failed = ["3+5=8;8*2=6;#6", "3+5=1;1*2=6;#6", "#6"] + ["3+5=8;8*2=4;#4"] * 13
    batch = batch_of(solved + mostly_failed, [SHORT] * SAMPLES + [CHAIN] * SAMPLES)
    advantages = np.concatenate([np.where(batch.right[:16], 0.5, -1.5), np.where(batch.right[16:], 2.0, -6 / 13)])
    held, rule = as_trl(batch, advantages), AlongPath(model)
    found = rule([{}] * 32, held, SAMPLES)

    def gradient(rows: range | list[int]) -> torch.Tensor:
        gain = torch.zeros(())
        for i in rows:
            prompt = prompt_ids(batch.problems[i])
            log = torch.log_softmax(model(torch.tensor([prompt + batch.responses[i]])).logits[0], dim=-1)
            places = range(len(prompt) - 1, len(prompt) + len(batch.responses[i]) - 1)
            gain = gain + advantages[i] * sum(log[p, t] for p, t in zip(places, batch.responses[i], strict=True))
        return torch.cat([part.flatten() for part in torch.autograd.grad(gain, list(model.parameters()))])

    path = gradient(range(16))
    kept = [float(gradient([i]) @ path) > 0 for i in (16, 17, 18)]
    assert [bool(found[i].any()) for i in (16, 17, 18)] == kept
    assert rule.tells == {"doubted": 3, "dropped": kept.count(False)}
    torch.testing.assert_close(found[:16, 0], torch.from_numpy(advantages[:16]).float())
    assert float(found[16:, 0].sum()) == pytest.approx(0, abs=1e-5)  # a group stays balanced


def test_credit_at_choice_points_only() -> None:
    batch = batch_of(["#8"] * 4 + ["#7"] * 12, [SHORT] * SAMPLES)

    def credit(rows: Any, held: dict[str, torch.Tensor], size: int) -> torch.Tensor:
        return held["advantages"][:, None] * torch.tensor([1.0, 2.0, 3.0])

    every, top = (token_advantages(Arm((), tokens=name), batch, credit) for name in ("all", "top"))
    assert [values.tolist()[:2] for values in top] == [[0, 0]] * 16
    assert [values[2] for values in top] == [values[2] for values in every]


def test_choices_are_made_on_other_problems() -> None:
    test, development = problem_sets(False), problem_sets(True)
    for level in ("medium", "long", "hard"):
        assert not {p.prompt for p in test[level]} & {p.prompt for p in development[level]}
        assert len(development[level]) > 0.9 * len(test[level])
    assert not set(hard_end.SEEDS) & set(hard_end.DEVELOPMENT)


def test_the_page_has_the_numbers_of_the_records() -> None:
    page = (ROOT / "docs" / "remedies.md").read_text(encoding="utf-8")
    for line in hard_end.tabulate(hard_end.records_of(hard_end.STORED)).splitlines():
        assert line in page


def test_every_record_names_its_settings() -> None:
    for record in hard_end.records_of(hard_end.STORED):
        assert record["steps"] == 80
        settings = json.loads(json.dumps(hard_end.asdict(hard_end.ARMS[record["arm"]])))
        assert settings == record["settings"]
        assert record["levels"]["hard"]["responses"] >= 900


@pytest.mark.slow
def test_a_quick_run_goes_through_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--out", str(tmp_path), "--quick", "--seeds", "0", "--arms", "oracle", "relearned", "path", "choices"]
    assert hard_end.main(options) == 0
    results = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
    assert len(results) == 4
    monkeypatch.setattr(hard_end, "train", None)
    assert hard_end.main([*options, "--gather", str(tmp_path / "all" / "runs.jsonl")]) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")} == results
    assert len(hard_end.records_of(tmp_path / "all" / "runs.jsonl")) == 4


class _Scored(FirstSlip):
    """With given scores."""

    def __init__(self, scores: torch.Tensor) -> None:
        self.given, self.lowest, self.tells = scores, [], {}

    def scores(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.given


def test_a_slip_ends_credit_and_takes_all_blame() -> None:
    """Two problems of four responses of three tokens; on the first, which is mostly solved, the limit is learned."""
    advantages = torch.tensor([0.5, 0.5, 0.5, -1.5, 2.0, -0.7, -0.7, -0.6])
    mask = torch.ones(8, 3, dtype=torch.long)
    mask[3, 2] = 0
    scores = torch.tensor(
        [[0, -1, 0], [0, -2, 0], [-1, 0, 0], [0, -5, -9], [0, -4, 0], [-3, -6, 0], [0, 0, -1], [0, 0, -9.0]]
    )
    found = _Scored(scores)([{}] * 8, {"advantages": advantages, "completion_mask": mask}, 4)
    # Successes' lowest scores are -1, -2, -1: the limit is their 5th percentile, -1.9.
    weights = [[1, 1, 1], [1, 0, 0], [1, 1, 1], [0, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 1]]
    torch.testing.assert_close(found, advantages[:, None] * torch.tensor(weights))
