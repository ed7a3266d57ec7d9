"""Logs that trainers' own code wrote, each beside what was really sampled. Skipped where that folder is missing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tsae import Rollouts
from tsae.checkpoints.loading import Checkpoint
from tsae.rollouts.config import ImportConfig, name_columns
from tsae.rollouts.importing import import_log

LOGS = Path(__file__).resolve().parents[4] / "shared" / "data" / "trainer-logs"
END = 2
"""The end of a turn; logs of text alone do not say whether it was sampled."""
SKIP = ("empty", "unscored")
UNTHINKING = {"template_arguments": '{"enable_thinking": false}'}
# The log, options of the import, and what the log cannot tell.
CASES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "trl_1.14.0_conv": ("trl_1.14.0_conv/run", {}, {"reward"}),
    "trl_1.16.0_conv": ("trl_1.16.0_conv/run", {}, {"reward"}),
    "trl_1.16.0_standard": ("trl_1.16.0_standard/run", {}, {"reward"}),
    "trl_q3": ("trl_q3/run", UNTHINKING, {"reward"}),
    "verl_v0.7.1": ("verl_v0.7.1/run/rollout_data", {}, set()),
    "verl090_dapo": ("verl090_dapo/run/rollout_data", {}, set()),
    "verl_v1": ("verl_v1/run/rollout_data", {}, set()),
    "verl_val": ("verl_val/run/validation_data", {}, set()),
    "oi_HEAD": ("oi_HEAD/run/rollouts", {}, set()),
    "nemo_grpo": ("nemo_grpo/run/logs/exp_001", {}, set()),
    "prime_v0.7.0": ("prime_v0.7.0/run", {}, set()),
    "prime_v0.8.0": ("prime_v0.8.0/run", {}, set()),
    "prime_tok_v0.6.0": ("prime_tok_v0.6.0/run", {}, set()),
    "prime_tok_HEAD": ("prime_tok_HEAD/run", {}, {"reward", "outcome"}),
    # The run's system prompt and its policy are not in the data set.
    "openr1": ("openr1/run", {}, {"prompt_ids", "policy"}),
    "openr1nan": ("openr1nan/run", {}, {"prompt_ids", "policy"}),
}
LATEST = ("trl_1.16.0_conv", "verl090_dapo", "oi_HEAD", "nemo_grpo", "prime_v0.8.0", "prime_tok_HEAD", "openr1nan")
"""One of every trainer is in the fast tests."""


def sampled(log: Path) -> list[dict[str, Any]]:
    """What was sampled, in the order of the log."""
    truth = log.with_name(f"{log.name}.truth.jsonl")
    if truth.is_file():
        return [json.loads(line) for line in truth.read_text(encoding="utf-8").splitlines()]
    seen = json.loads(log.with_name(f"{log.name}.seen.json").read_text(encoding="utf-8"))
    tokens = [pair for batch in seen["gen"] for pair in zip(*batch[:2], strict=True)]
    return [dict(_generated(one, *pair)) for one, pair in zip(seen["seen"], tokens, strict=True)]


def _generated(one: dict[str, Any], prompt: list[int], response: list[int]) -> Iterator[tuple[str, Any]]:
    text = one["completion"] if isinstance(one["completion"], str) else one["completion"][0]["content"]
    policy = "base" if one["step"] == 1 else f"run-{one['step'] - 1:05d}"
    yield from {"step": one["step"], "prompt_ids": prompt, "response_ids": response, "text": text}.items()
    yield from {"policy": policy, "question": "", "right": None if one["reward"] is None else one["reward"] > 0}.items()


def core(ids: list[int]) -> list[int]:
    return [id for id in ids if id != END]


def pairs(rows: list[dict[str, Any]], told: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Every row with its sample; where some were left out, that of its step and response, of its prompt if it can."""
    if len(rows) == len(told):
        yield from zip(rows, told, strict=True)
        return
    left = list(told)
    for row in rows:
        alike = [
            x
            for x in left
            if (x["step"], x.get("score") is None) == (row["step"], row["reward"] is None)
            and (core(x["response_ids"]) == core(row["response_ids"]) or x["text"].strip() == row["response"].strip())
        ]
        alike.sort(key=lambda x: (x["prompt_ids"] != row["prompt_ids"], x["question"] != row["prompt"]))
        left.remove(alike[0])
        yield row, alike[0]


@pytest.mark.parametrize(
    "name", [name if name in LATEST else pytest.param(name, marks=pytest.mark.slow(ci=True)) for name in CASES]
)
def test_every_trajectory_comes_in_as_it_was_sampled(name: str, tmp_path: Path) -> None:
    folder, options, untold = CASES[name]
    log = LOGS / folder
    if not log.is_dir():
        pytest.skip("shared/data/trainer-logs is not here")
    # A log without rewards leaves none out for lack of them.
    skip = SKIP[:1] if "outcome" in untold else SKIP
    checkpoints = LOGS / ("run_q3/base" if name == "trl_q3" else "run")
    config = ImportConfig(skip=skip, run="run" if name.startswith("trl") else None, **options)
    summary = import_log(log, tmp_path / "r.parquet", checkpoints, config, progress=False)
    found, wrong = Rollouts.read(tmp_path / "r.parquet").table.to_pylist(), Counter[str]()
    told = sampled(log)
    assert len(found) + sum(summary.skipped.values()) == len(told)
    for row, x in pairs(found, told):
        if "<|im_" not in x["question"]:  # without special tokens such questions cannot be told
            wrong["prompt_ids"] += row["prompt_ids"] != x["prompt_ids"]
        # What was tokenised from text may have been sampled as other tokens, but then has the same text and a mark.
        same = core(row["response_ids"]) == core(x["response_ids"])
        wrong["response_ids"] += not same and not (row["round_trip"] is False and row["response"] == x["text"])
        wrong["step"] += row["step"] != x["step"]
        policy = "run-00000" if name == "trl_q3" and x["policy"] == "base" else x.get("policy")
        wrong["policy"] += policy is not None and row["policy"] != policy
        wrong["reward"] += x.get("score") is not None and row["reward"] != pytest.approx(x["score"], abs=1e-6)
        right = {True: "success", False: "failure", None: "unknown"}[x["right"]]
        wrong["outcome"] += row["outcome"] != right
        if row["advantage"] is not None and "adv" in x:
            wrong["advantage"] += row["advantage"] != pytest.approx(x["adv"], abs=1e-5)
        if row["finish_reason"] != "unknown":
            wrong["finish_reason"] += (row["finish_reason"] == "length") != x["truncated"]
    assert {what: n for what, n in wrong.items() if n and what not in untold} == {}
    if "prompt_ids" in untold:
        assert any(f"{len(found)} prompts are questions alone" in note for note in summary.notes)


BY_HAND = ("prompt=question", "response=model_output", "correct=is_correct", "answer=ground_truth", "policy=checkpoint")
USERS: dict[str, tuple[dict[str, Any], int]] = {
    "hand_flat": ({"columns": name_columns(BY_HAND)}, 32),
    "verifiers_0.2.1_results": ({}, 32),
    "min_templated_prompt": ({}, 1),
    "min_trl_step_text": ({}, 1),
}


@pytest.mark.parametrize("name", USERS)
def test_logs_as_users_have_them_come_in(name: str, tmp_path: Path) -> None:
    log = LOGS.parent / "logs-of-users" / name / "run"
    if not log.is_dir():
        pytest.skip("shared/data/logs-of-users is not here")
    options, n = USERS[name]
    import_log(log, tmp_path / "r.parquet", LOGS / "run", ImportConfig(run="run", **options), progress=False)
    found = Rollouts.read(tmp_path / "r.parquet").table.to_pylist()
    assert len(found) == n
    told = sampled(log) if n > 1 else []
    for row, x in zip(found, told, strict=n > 1):
        assert row["prompt_ids"] == x["prompt_ids"]
        assert core(row["response_ids"]) == core(x["response_ids"]) or row["response"] == x["text"]
        assert (row["reward"], row["outcome"]) == (x["score"], "success" if x["right"] else "failure")
    if not told:
        expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        tokenizer = Checkpoint("base", str(LOGS / "run" / "base")).load_tokenizer()
        assert found[0]["prompt_ids"] == tokenizer(expected, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", ["verl_mt", "verl_nan"])
def test_tools_turns_are_counted_and_left_out(name: str, tmp_path: Path) -> None:
    log = LOGS / name / "run" / "rollout_data"
    if not log.is_dir():
        pytest.skip("shared/data/trainer-logs is not here")
    config = ImportConfig(skip=("multi-turn",))
    with pytest.raises(Exception, match="holds no trajectories but those left out: 3 multi-turn"):
        import_log(log, tmp_path / "r.parquet", LOGS / "run", config, progress=False)
