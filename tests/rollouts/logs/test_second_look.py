"""What a log says twice, compared after an import: planted errors are found, and clean logs raise no alarm."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import tsae
from support.builders import BOS, EOS, save_model
from support.logs import one_row_below, refused, write
from tsae.checkpoints.loading import Checkpoint, ModelLoader
from tsae.checkpoints.series import CheckpointSeries
from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.importing import import_log
from tsae.rollouts.logs import check_answers, consistency_checks, import_parts
from tsae.rollouts.logs.check_advantages import FORMULAS, GDPO, Recomputed, recompute
from tsae.rollouts.logs.check_answers import Sampled, recheck
from tsae.rollouts.logs.consistency_checks import Check
from tsae.rollouts.logs.entry import Entry, Findings, place_hash
from tsae.rollouts.logs.tokens import Tokens
from tsae.rollouts.rewards import group_advantages

pytestmark = pytest.mark.slow(ci=True)

TEMPLATE = (
    "{% for m in messages %}<bos>{{ '#' if m['role'] == 'user' else '*' }}{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>;{% if enable_thinking is defined and not enable_thinking %}=={% endif %}"
    "{% endif %}"
)
CHARACTERS = "0123456789+-*?=;#"


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> CheckpointSeries:
    """The base and a checkpoint of a run, with a chat template that may be told not to think."""
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("base", 0), ("checkpoint-2", 7)):
        save_model(folder / name, seed=seed)
        (folder / name / "chat_template.jinja").write_text(TEMPLATE)
    later = Checkpoint(id="log-00002", path=str(folder / "checkpoint-2"), run="log", step=2)
    return CheckpointSeries((Checkpoint(id="base", path=str(folder / "base"), step=0), later), name="log")


def ids_of(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


def look(log: Path, checkpoint: Any, **config: Any) -> dict[str, Check]:
    """The checks of an import, by name; what strict does agrees with them."""
    to = log.parent / "found" / "r.parquet"
    summary = import_log(log, to, checkpoint, ImportConfig(**config), progress=False)
    found = {check.name: check for check in summary.second_look}
    assert list(found) == ["prompts", "responses", "advantages", "answers", "log-probabilities"]
    for check in found.values():
        assert f"second look at {check}" in str(summary).splitlines()
    stored = tsae.Rollouts.read(to).info["log"]["second_look"]
    assert {name: (part["compared"], part["differ"], part["disagrees"]) for name, part in stored.items()} == {
        name: (check.compared, check.differ, check.disagrees) for name, check in found.items()
    }
    to.unlink()
    wrong = [check for check in found.values() if check.disagrees]
    if wrong:
        with pytest.raises(TsaeError, match="does not agree with itself"):
            import_log(log, to, checkpoint, ImportConfig(**config, strict=True), progress=False)
    else:
        import_log(log, to, checkpoint, ImportConfig(**config, strict=True), progress=False)
    assert to.exists() == (not wrong)
    assert not list(to.parent.glob(".r.parquet*"))
    return found


def sums(n_steps: int = 3, n_problems: int = 8, group: int = 8, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of a plain log: sums of two numbers, right and wrong answers, GRPO's advantages."""
    rng = np.random.default_rng(seed)
    rows = []
    for step in range(1, n_steps + 1):
        for problem in range(n_problems):
            a, b = (int(value) for value in rng.integers(10, 90, 2))
            right = rng.random(group) < rng.uniform(0.2, 0.9)
            given = [a + b if ok else a + b + int(rng.integers(1, 9)) for ok in right]
            advantages = group_advantages(right.astype(float), np.zeros(group))
            for i, (value, ok, advantage) in enumerate(zip(given, right, advantages, strict=True)):
                row = {"prompt": f"{a}+{b}?", "response": f"{i};{a}+{b}={value}", "answer": str(a + b), "step": step}
                row |= {"reward": float(ok), "advantage": float(advantage), "problem_id": f"{step}/{problem}"}
                rows.append(row)
    return rows


def shifted(rows: list[dict[str, Any]], names: tuple[str, ...], by: int) -> list[dict[str, Any]]:
    """The columns moved down by some rows within each step."""
    moved: list[dict[str, Any]] = []
    for step in dict.fromkeys(row["step"] for row in rows):
        mine = [row for row in rows if row["step"] == step]
        moved += [{**row, **{n: mine[(i - by) % len(mine)][n] for n in names}} for i, row in enumerate(mine)]
    return moved


# --- answers


def test_a_clean_log_agrees(series: CheckpointSeries, tmp_path: Path) -> None:
    found = look(write(tmp_path / "log" / "log.jsonl", *sums()), series)
    assert str(found["answers"]) == "answers: 192 responses of a sample compared, 0 disagree; checked with math-verify"
    assert found["advantages"].compared == 24
    assert str(found["prompts"]) == "prompts: not compared (the log has no token ids)"
    assert str(found["responses"]) == "responses: not compared (the log has no token ids)"
    assert str(found["log-probabilities"]) == "log-probabilities: not compared (the log has none)"


@pytest.mark.parametrize("by", [1, 8, 32])
@pytest.mark.parametrize("names", [("response",), ("prompt", "problem_id", "answer", "reward", "advantage")])
def test_completions_beside_other_prompts_are_found_out(
    series: CheckpointSeries, tmp_path: Path, names: tuple[str, ...], by: int
) -> None:
    """By a row, by a group and by half a step, whichever column moved (TRL issue 3492)."""
    found = look(write(tmp_path / "log" / "log.jsonl", *shifted(sums(), names, by)), series)["answers"]
    assert found.disagrees
    assert "hardly better than by chance" in found.note
    assert "misaligned" in found.note
    assert found.example is not None
    assert found.example.startswith(f"{tmp_path}/log/log.jsonl:")


def test_a_log_that_was_moved_gets_the_same_second_look(series: CheckpointSeries, tmp_path: Path) -> None:
    """The sample is drawn by hashes of places, in which the folder must not count."""
    rows = sums(n_steps=9)  # 576, of which 256 are drawn
    places = ("one", "two", "three")
    looks = [look(write(tmp_path / place / "log.jsonl", *shifted(rows, ("response",), 1)), series) for place in places]
    found = [
        (str(check["answers"]).replace(f"/{place}/", "/"), check["answers"].compared)
        for place, check in zip(places, looks, strict=True)
    ]
    assert found[0][1] == 256
    assert found[1:] == found[:1] * 2


def test_prompts_alone_that_moved_are_found_out_by_their_answers(series: CheckpointSeries, tmp_path: Path) -> None:
    """Answers that stayed with the completions agree with these; a prompt then has several."""
    moved = shifted([{k: v for k, v in row.items() if k != "problem_id"} for row in sums()], ("prompt",), 4)
    found = look(write(tmp_path / "log" / "log.jsonl", *moved), series)["answers"]
    assert found.disagrees
    assert found.unit == "prompts"
    assert found.compared == 24
    # Two neighbours may have one answer.
    assert found.differ >= 22
    assert f"{found.differ} of 24 prompts have several reference answers in one step" in found.note


def test_a_verifier_that_differs_is_no_alarm(series: CheckpointSeries, tmp_path: Path) -> None:
    """A run that wants its answers in a format gives 0 for half of the right ones."""
    rows = sums()
    for i, row in enumerate(rows):
        row["reward"] = row["reward"] * (i % 2)
        del row["advantage"]
    found = look(write(tmp_path / "log" / "log.jsonl", *rows), series)["answers"]
    assert found.differ > 30
    assert not found.disagrees
    assert "far better than by chance (1.00 within problems, 1.00 between problems" in found.note


def test_answers_are_read_inside_whole_solutions_and_not_in_tests_of_programs(
    series: CheckpointSeries, tmp_path: Path
) -> None:
    """As data sets write them, behind #### or in a box; long ones without either are not compared."""
    solution = "Add the tens, then the ones, and carry what is above nine. " * 3
    for forms, compared in (
        ((solution + "#### {}", solution + "\\boxed{{{}}}"), 192),
        ((json.dumps({"inputs": ["1"], "outputs": ["2"]}).replace("{", "{{").replace("}", "}}"), "because " * 40), 0),
    ):
        rows = [{**row, "answer": forms[row["step"] == 1].format(row["answer"])} for row in sums()]
        found = look(write(tmp_path / "log" / "log.jsonl", *rows), series)["answers"]
        assert (found.compared, found.differ) == (compared, 0)
    assert str(found) == "answers: not compared (math-verify can read no answer)"


def test_without_math_verify_the_last_number_counts(
    series: CheckpointSeries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(text: str) -> list[Any]:
        raise TsaeError("the verifier math needs math-verify", where="verifier")

    monkeypatch.setattr(check_answers, "expressions", missing)
    found = look(write(tmp_path / "log" / "log.jsonl", *sums()), series)["answers"]
    assert found.differ == 0
    assert "the last number (math-verify is not installed)" in found.note
    assert look(write(tmp_path / "log" / "log.jsonl", *shifted(sums(), ("response",), 1)), series)["answers"].disagrees


class _Words:
    """A judge without math-verify: what a text says is its last word."""

    name = "words"

    def gold(self, answer: str) -> str:
        return answer

    def given(self, text: str) -> str:
        return text.split()[-1]

    def equal(self, gold: str, given: str) -> bool:
        return gold == given


def drawn(rng: np.random.Generator, *, noise: float, group: int, n: int = 256) -> list[Sampled]:
    """A sample of a log whose verifier flips a share of the outcomes."""
    rows = []
    for problem in range(n // group):
        rate, answer = rng.beta(0.7, 0.7), str(rng.integers(100))
        for _ in range(group):
            right = rng.random() < rate
            said = answer if right else str(rng.integers(100))
            rows.append(Sampled(f"{rng.random()} {said}", answer, bool(right ^ (rng.random() < noise)), problem, "f:1"))
    return rows


def test_how_often_clean_and_mixed_logs_are_called_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 60 logs each: clean ones, even where a verifier flips a tenth, next to never; shifted ones nearly always."""
    monkeypatch.setattr(check_answers, "_Judge", _Words)
    rng = np.random.default_rng(0)
    called = dict.fromkeys(["clean", "noisy", "by a row", "by a group", "shuffled"], 0)
    for _ in range(60):
        rows, noisy = drawn(rng, noise=0, group=8), drawn(rng, noise=0.1, group=8)
        order = {"clean": np.arange(256), "by a row": np.roll(np.arange(256), 1)}
        order |= {"by a group": np.roll(np.arange(256), 8), "shuffled": rng.permutation(256)}
        for name, places in order.items():
            mixed = [row._replace(response=rows[i].response) for row, i in zip(rows, places, strict=True)]
            called[name] += recheck(mixed).contradicts
        called["noisy"] += recheck(noisy).contradicts
    assert called["clean"] == called["noisy"] == 0
    assert min(called[name] for name in ("by a row", "by a group", "shuffled")) >= 59


def test_a_few_copies_of_one_response_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal responses to equal answers are one piece of evidence, however often they stand there."""
    monkeypatch.setattr(check_answers, "_Judge", _Words)
    rows = [Sampled(text, "7", right, problem, "f:1") for problem in range(20)
            for text, right in (("7", True), ("so 7", False), ("1", True), ("2", False))]  # fmt: skip
    found = recheck(rows)
    assert found.differ == 40
    assert not found.contradicts
    assert not found.telling


# --- advantages


def expected(kind: str, rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Advantages written out by hand, group by group."""
    found = np.zeros(len(rewards))
    for group in np.unique(groups):
        mine = groups == group
        r = rewards[mine]
        n = len(r)
        if kind == FORMULAS[0]:
            found[mine] = (r - r.mean()) / (r.std(ddof=1) + 1e-4)
        elif kind == FORMULAS[1]:
            found[mine] = (r - r.mean()) / (r.std() + 1e-8)
        elif kind == FORMULAS[2]:
            found[mine] = r - r.mean()
        elif kind == FORMULAS[3]:
            found[mine] = [r[i] - np.delete(r, i).mean() for i in range(n)]
        elif kind == FORMULAS[4]:
            rest = [np.delete(r, i) for i in range(n)]
            found[mine] = [(r[i] - o.mean()) / (o.std() + 1e-6 if o.std() > 0 else 1) for i, o in enumerate(rest)]
        else:
            found[mine] = (r - r.mean()) / (rewards.std(ddof=1) + 1e-4)
    return found


@pytest.fixture
def rewards() -> tuple[np.ndarray, np.ndarray]:
    """Six groups of six with rewards of several kinds, one of them without variance."""
    rng = np.random.default_rng(1)
    values = rng.choice([0.0, 0.5, 1.0, 1.2], 36)
    values[12:18] = 0.1
    return values, np.repeat(np.arange(6), 6)


@pytest.mark.parametrize("kind", FORMULAS)
def test_every_formula_is_known(kind: str, rewards: tuple[np.ndarray, np.ndarray]) -> None:
    values, groups = rewards
    advantages = expected(kind, values, groups)
    for logged in (advantages, torch.tensor(advantages).bfloat16().double().numpy()):
        found = recompute(values, logged, groups, np.zeros(36))
        assert (found.follow, found.contradict, found.unclear, found.constant) == (6, 0, 0, 1)
        assert next(iter(found.formulas)) == kind


def gdpo(parts: np.ndarray, n: int, weights: Sequence[float]) -> np.ndarray:
    """The advantages of TRL's normalize_then_sum, for one step's groups of n, by loops."""
    sums = np.zeros(len(parts))
    for start in range(0, len(parts), n):
        for i, weight in enumerate(weights):
            reward = parts[start : start + n, i]
            if np.isfinite(reward).any():
                scaled = (reward - np.nanmean(reward)) / (np.nanstd(reward, ddof=1) + 1e-4)
                sums[start : start + n] += np.nan_to_num(weight * scaled)
    return (sums - sums.mean()) / (sums.std(ddof=1) + 1e-4)


def test_rewards_that_are_normalised_one_by_one_are_no_contradiction(series: CheckpointSeries, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    parts = np.stack([rng.choice([0, 1.0], 48), rng.choice([0, 0.25, 0.5], 48), rng.choice([0, 1.0], 48)], axis=1)
    parts[::5, 2] = np.nan
    groups, steps = np.repeat(np.arange(8), 6), np.repeat([0, 1], 24)
    for weights in ((1, 1, 1), (1.0, 0.5, 2.0)):
        logged, reward = np.concatenate([gdpo(x, 6, weights) for x in np.split(parts, 2)]), np.nansum(parts, axis=1)
        assert recompute(reward, logged, groups, steps).contradict >= 4
        found = recompute(reward, logged, groups, steps, parts)
        assert (found.follow, found.contradict) == (8, 0)
        assert next(iter(found.formulas)) == GDPO
        assert recompute(reward, np.roll(logged, 1), groups, steps, parts).contradict >= 4
        # Without a group the mean of its step is another.
        some = groups != 2
        found = recompute(reward[some], logged[some], groups[some], steps[some], parts[some])
        assert (found.follow, found.contradict) == (7, 0)
    # TRL's file of a step, which was refused: its advantages do not follow from the sum.
    columns = {"step": 1, "prompt": [f"{g}+1?" for g in groups[:24]], "completion": [f"#{i % 10}" for i in range(24)]}
    columns |= dict(zip(("accuracy_reward", "format_reward", "length_reward"), parts[:24].T, strict=True))
    log = tmp_path / "completions_00001.parquet"
    pd.DataFrame(columns | {"advantage": gdpo(parts[:24], 6, (1, 1, 1))}).to_parquet(log)
    summary = import_log(log, tmp_path / "r.parquet", series, ImportConfig(noisy_rewards=True), progress=False)
    assert f"4 groups compared, 0 disagree; {GDPO} gives those of 4" in str(summary)


def test_advantages_of_other_rows_contradict(rewards: tuple[np.ndarray, np.ndarray]) -> None:
    values, groups = rewards
    advantages = expected(FORMULAS[0], values, groups)
    for wrong in (np.roll(advantages, 1), np.roll(advantages, 6), -advantages):
        found = recompute(values, wrong, groups, np.zeros(36))
        assert found.contradict >= 4
        assert found.first == 0
    assert recompute(values, 3 * advantages, groups, np.arange(36) // 6).unclear == 5


def test_what_cannot_be_compared_is_no_disagreement(rewards: tuple[np.ndarray, np.ndarray]) -> None:
    """Groups that lack a member, that have one alone, whose rewards or advantages are not known."""
    values, groups = rewards
    advantages = expected(FORMULAS[0], values, groups)
    present = np.arange(36) % 6 != 0
    found = recompute(values[present], advantages[present], groups[present], groups[present])
    assert found.contradict == 0
    assert found.unclear == 5
    found = recompute(values, advantages, np.arange(36), np.zeros(36))
    assert (found.follow, found.contradict, found.unclear) == (0, 0, 36)
    assert recompute(np.full(36, np.nan), advantages, groups, groups) == Recomputed(0, 0, unclear=6)
    unknown = np.where(present, values, np.nan)
    assert recompute(unknown, advantages, groups, groups).contradict == 0


def test_a_problem_that_a_step_asks_twice_is_two_groups(rewards: tuple[np.ndarray, np.ndarray]) -> None:
    values, groups = rewards
    advantages = expected(FORMULAS[1], values, groups)
    found = recompute(values, advantages, groups // 2, np.zeros(36))
    assert (found.follow, found.contradict, found.unclear) == (3, 0, 0)
    assert recompute(values, np.roll(advantages, 1), groups // 2, np.zeros(36)).contradict == 3


def test_several_groups_under_one_label_cannot_be_compared() -> None:
    """Of twice or three times the usual size, where no formula and no line fits; of other sizes they contradict."""
    groups = np.repeat(np.arange(6), [2, 2, 2, 4, 6, 5])
    values = np.arange(21.0)
    advantages = np.where(np.arange(21) % 2, 1.0, -1.0)  # of pairs: by the deviation of n, or by the other alone
    advantages[6:] = np.resize([1.0, 7.0, -3.0, 2.0, -9.0], 15)  # of nothing
    found = recompute(values, advantages, groups, np.zeros(21))
    assert (found.follow, found.contradict, found.unclear, found.first) == (3, 1, 2, 16)
    assert found.formulas == {FORMULAS[1]: 3, FORMULAS[3]: 3, FORMULAS[4]: 3}
    alone = recompute(values[6:10], advantages[6:10], groups[6:10], np.zeros(4))
    assert (alone.follow, alone.contradict, alone.unclear) == (0, 1, 0)


def test_advantages_of_a_log_that_moved(series: CheckpointSeries, tmp_path: Path) -> None:
    rows = shifted(sums(), ("advantage",), 1)
    found = look(write(tmp_path / "log" / "log.jsonl", *rows), series)["advantages"]
    assert found.disagrees
    assert found.differ > 15
    assert found.example == f"{tmp_path}/log/log.jsonl:1"
    assert "no formula gives" in found.note
    assert "--rewards" in found.note


def test_means_over_tokens_are_not_compared(series: CheckpointSeries, tmp_path: Path) -> None:
    """Token exports may have an advantage of its own for every token."""
    same = {"schema_version": 1, "step": 1, "rank": 0, "loss_mask": [False] * 5 + [True] * 2}
    rows = [
        {"export_sequence_idx": i, "token_ids": [BOS, *ids_of(f"1+1?{i}"), EOS], "rewards": [float(i)] * 7}
        | {"advantages": [0.0] * 5 + [float(i), i + 1.0], **same}
        for i in range(4)
    ]
    found = look(write(tmp_path / "token_exports" / "step_1" / "rank_0.jsonl", *rows), series)["advantages"]
    assert str(found) == "advantages: not compared (they differ from token to token)"


# --- prompts, responses


def with_ids(prompt: Any, ids: list[int], response: str = "2", **more: Any) -> dict[str, Any]:
    sampled = [*ids_of(response), EOS]
    return {"prompt": prompt, "prompt_ids": ids, "response": response, "response_ids": sampled, "reward": 1.0, **more}


ASKED = [BOS, 16, *ids_of("1+1?"), EOS, BOS, 15]


def test_prompts_are_encoded_anew(series: CheckpointSeries, tmp_path: Path) -> None:
    """As messages, as a question, as the template writes it, and as it is; and those that are of none of these."""
    messages = [{"role": "user", "content": "1+1?"}]
    rows = [with_ids(prompt, ASKED) for prompt in (messages, "1+1?", "<bos>#1+1?<eos><bos>;", "#1+1?;")]
    rows.append(with_ids("1+1?", [BOS, *ids_of("1+1?")]))
    found = look(write(tmp_path / "log" / "log.jsonl", *rows), series)
    assert str(found["prompts"]) == "prompts: 5 prompts compared, 0 disagree"
    assert str(found["responses"]) == "responses: 5 responses compared, 0 disagree"
    wrong = [*rows, with_ids(messages, ASKED[:-1]), with_ids("2+2?", ASKED)]
    check = look(write(tmp_path / "log" / "log.jsonl", *wrong), series)["prompts"]
    assert (check.compared, check.differ, check.disagrees) == (7, 2, True)
    assert check.example == f"{tmp_path}/log/log.jsonl:6"
    for option in ("--template-arguments", "--system-prompt", "checkpoint"):
        assert option in check.note


def test_prompts_of_a_run_that_did_not_think(series: CheckpointSeries, tmp_path: Path) -> None:
    """Their tokens show what the template was given; with it as an option nothing is left to say."""
    log = write(tmp_path / "log" / "log.jsonl", with_ids([{"role": "user", "content": "1+1?"}], [*ASKED, 14, 14]))
    found = look(log, series)["prompts"]
    assert (found.differ, found.disagrees) == (0, False)
    assert """(--template-arguments '{"enable_thinking": false}')""" in found.note
    assert look(log, series, template_arguments='{"enable_thinking": false}')["prompts"].note == ""
    assert look(log, series, template_arguments='{"enable_thinking": true}')["prompts"].disagrees


def test_responses_that_decode_to_another_text(series: CheckpointSeries, tmp_path: Path) -> None:
    rows = [with_ids("1+1?", ASKED), with_ids("1+1?", ASKED, response_ids=[3, EOS])]
    found = look(write(tmp_path / "log" / "log.jsonl", *rows), series)["responses"]
    assert (found.compared, found.differ, found.disagrees) == (2, 1, True)
    assert found.example == f"{tmp_path}/log/log.jsonl:2"


# --- log-probabilities


def logged_by(series: CheckpointSeries, policy: str, *, temperature: float = 1.0, wrong: bool = False) -> list[Any]:
    """Rows of open-instruct's log with the log-probabilities that a checkpoint gives."""
    rng = np.random.default_rng(3)
    model = ModelLoader().load(series[policy])
    rows = []
    for i in range(6):
        prompt, response = [BOS, *ids_of("1+1?")], [*rng.integers(0, 17, 9).tolist(), EOS]
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *response]])).logits[0]
        log_probabilities = (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        sampled = log_probabilities.gather(-1, torch.tensor(response)[:, None])[:, 0]
        noise = rng.normal(0, 0.02, len(response))
        row = {"step": series[policy].step, "sample_idx": i, "prompt_idx": 0, "reward": float(i % 2)}
        row |= {"prompt_tokens": prompt, "response_tokens": response, "ground_truth": [], "finish_reason": "stop"}
        logprobs = (np.roll(sampled.numpy(), int(wrong)) + noise).tolist()
        rows.append(row | {"request_info": {}, "logprobs": logprobs})
    return rows


def log_of(tmp_path: Path, rows: list[Any]) -> Path:
    return write(tmp_path / "log_rollouts_000000.jsonl", *rows)


def test_the_checkpoint_gives_the_logged_log_probabilities(series: CheckpointSeries, tmp_path: Path) -> None:
    """Of the first and the last checkpoint that sampled, four trajectories each."""
    rows = [
        {**row, "sample_idx": i} for i, row in enumerate(logged_by(series, "base") + logged_by(series, "log-00002"))
    ]
    found = look(log_of(tmp_path, rows), series)["log-probabilities"]
    assert (found.compared, found.differ, found.disagrees) == (8, 0, False)
    assert "with the weights of base and log-00002: mean difference 0.0" in found.note


def test_of_log_probabilities_little_is_kept(series: CheckpointSeries) -> None:
    """128 tokens of a response, 4 trajectories of a checkpoint, prompts of at most 4,096 tokens; no placeholders."""
    found = Findings()
    kept = consistency_checks.LogProbs(list(series), found)
    values = np.linspace(-2, -1, 130)
    for n_prompt, n in ((4097, 2), (4096, 128), (1, 127), (1, 130), (1, 1)):
        kept.put("base", np.zeros(n_prompt, dtype=int), np.arange(n), values[:n], f"log:{n}")
    kept.put("base", np.zeros(1, dtype=int), np.arange(2), np.array([-0.5, -0.5]), "log:6")
    kept.put("base", np.zeros(1, dtype=int), np.arange(3), values[:2], "log:3")
    kept.put("another", np.zeros(1, dtype=int), np.arange(3), values[:3], "log:4")
    assert found.counts["consistency"]["log-probabilities"] == 8
    assert list(found.counts["placeholders"]) == ["-0.5"]
    drawn = [told for _, told in json.loads(json.dumps(vars(found)))["samples"]["log-probabilities base"]]
    assert [(len(prompt), response, logprobs) for prompt, response, logprobs, _ in drawn] == [
        (prompt, [*range(n)], values[:n].tolist()) for prompt, n in ((4096, 128), (1, 127), (1, 128), (1, 1))
    ]
    kept.put("base", np.zeros(1, dtype=int), np.arange(5), values[:5], "log:5")
    places = sorted((f"log:{n}" for n in (128, 127, 130, 1, 5)), key=place_hash)
    assert {told[-1] for _, told in found.samples["log-probabilities base"]} == set(places[:4])


def test_the_temperature_of_the_sampling_is_found(series: CheckpointSeries, tmp_path: Path) -> None:
    found = look(log_of(tmp_path, logged_by(series, "base", temperature=0.6)), series)["log-probabilities"]
    assert (found.compared, found.differ) == (4, 0)
    assert found.note.endswith("at temperature 0.6")


def test_other_weights_and_other_rows_are_found_out(series: CheckpointSeries, tmp_path: Path) -> None:
    for rows in ([{**row, "step": 0} for row in logged_by(series, "log-00002")], logged_by(series, "base", wrong=True)):
        found = look(log_of(tmp_path, rows), series)["log-probabilities"]
        assert found.disagrees
        assert found.differ >= 3
        assert "other weights sampled them" in found.note


def test_where_log_probabilities_are_not_compared(
    series: CheckpointSeries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer alone, one checkpoint, weights that are too large, placeholders: each says so, and stops nothing."""
    log = log_of(tmp_path, logged_by(series, "base"))

    def told(checkpoint: Any) -> str:
        return str(look(log, checkpoint)["log-probabilities"])

    alone = tmp_path / "tokenizer"
    alone.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (alone / name).write_bytes((Path(series.base.path) / name).read_bytes())
    assert "not compared (it is not known whether this single checkpoint" in told(alone)
    assert "not compared (it is not known whether this single checkpoint" in told(series.base)
    monkeypatch.setattr(consistency_checks, "_MOST_BYTES", 1000)
    assert "too many to load here" in told(series)
    monkeypatch.undo()
    log = log_of(tmp_path, [{**row, "logprobs": [-0.5] * 10} for row in logged_by(series, "base")])
    assert "as placeholders have" in told(series)
    rows = logged_by(series, "base")
    for misfit in ([-0.5] * 3, [None, *[-0.5] * 9], "none"):
        log = log_of(tmp_path, [{**row, "logprobs": misfit} for row in rows])
        assert "not compared (the log has none)" in told(series)
        notes = import_log(log, tmp_path / "out.parquet", series, progress=False).notes
        assert "6 responses have log-probabilities that are not a number for every token, and are left out" in notes


def test_a_text_in_other_letters_than_the_tokenizers_is_another(series: CheckpointSeries, tmp_path: Path) -> None:
    tokens = Tokens(series.base, ImportConfig())
    for prompt in ("мир", [{"role": "user", "content": "мир"}]):
        same, _ = tokens.encodes(Entry("", prompt=prompt), np.array(ids_of("1+1?")))
        assert not same


# --- parts of a log


def test_parts_of_a_log_are_put_together(
    series: CheckpointSeries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was found in parts of 32 rows is what was found in the whole: prompts that differ, answers, advantages."""
    rows = [{**row, **with_ids("1+1?" if i % 5 else "2+2?", ASKED, row["response"])} for i, row in enumerate(sums())]
    lines = [json.dumps(row).ljust(400) for row in rows]
    log = write(tmp_path / "log" / "log.jsonl", *lines)
    to, config = tmp_path / "r.parquet", ImportConfig(noisy_rewards=True)
    whole = import_log(log, to, series, config, progress=False)
    assert whole.second_look[0].differ == 39
    monkeypatch.setattr(import_parts, "PART_BYTES", 32 * 401 - 1)
    assert str(import_log(log, to, series, config, progress=False)) == str(whole)


# --- the readers' own


def test_rewards_that_are_asked_for_are_not_those_that_were_trained_on(
    series: CheckpointSeries, tmp_path: Path
) -> None:
    """Advantages are compared with the trainer's own total."""
    rows = [{**row, "style": 0.1 * (i % 3)} for i, row in enumerate(sums())]
    found = look(write(tmp_path / "log" / "log.jsonl", *rows), series, rewards=("style",), outcome="style")
    assert (found["advantages"].compared, found["advantages"].differ) == (24, 0)


def test_the_testbeds_logs_agree(tmp_path: Path) -> None:
    """GRPOTrainer's own, and the same with the completions of every file moved by a row."""
    source = tsae.testbed.series_path() / "logs" / "hard" / "completions"
    checkpoint = tsae.testbed.series_path()
    summary = import_log(source, tmp_path / "r.parquet", checkpoint, ImportConfig(strict=True), progress=False)
    checks = {check.name: check for check in summary.second_look}
    assert checks["advantages"].compared == 112
    assert next(iter(checks["advantages"].note.split("; "))).startswith(FORMULAS[0])
    assert checks["responses"].compared == 1792
    assert checks["answers"].compared == 256
    moved = tmp_path / "moved" / "completions"
    moved.mkdir(parents=True)
    for file in source.glob("*.parquet"):
        one_row_below(file, moved)
    refused(
        r"answers: .* hardly better than by chance",
        import_log,
        moved,
        tmp_path / "m.parquet",
        checkpoint,
        ImportConfig(strict=True, noisy_rewards=True),
        progress=False,
    )
    assert not (tmp_path / "m.parquet").exists()
