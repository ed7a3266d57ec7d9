"""The hard run: its problems, leaving out single new responses, and the stored figures of its explanation."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from explain_hard_run import KINDS, STORED, checks, kind_of
from organism.hard import HardConfig, held_out_hard
from organism.mixed import Sample, retrain

from tsae.rollouts.table import Rollouts
from tsae.testbed import parse_prompt, series
from tsae.testbed.tokenizer import TOKEN_IDS

TINY = HardConfig(steps=2, groups=3, samples=4)
RECORD = {"policy": "run", "prompt": "", "response": "", "outcome": "unknown", "prompt_ids": [1], "response_ids": [2]}


def test_every_step_asks_fresh_hard_problems() -> None:
    asked = [problem.id for step in TINY.schedule for problem in step]
    assert len(asked) == len(set(asked)) == 6
    assert {len(step) for step in TINY.schedule} == {3}
    for problem in TINY.problems:
        assert 10 <= len(parse_prompt(problem.prompt).operators) <= 14
    held = held_out_hard(TINY, 4)
    assert list(held) == ["easy", "medium", "7-9", "10-14"]
    assert not {problem.id for some in held.values() for problem in some} & set(asked)


@pytest.mark.slow
def test_new_responses_are_left_out_one_by_one() -> None:
    base = series().base
    every = {problem.id for problem in TINY.problems}
    log = Rollouts.from_records([{**RECORD, "problem_id": min(every)}])  # not read where responses are new
    seen: list[Sample] = []

    def right(sample: Sample) -> bool:
        seen.append(sample)
        return sample.reward > 0

    whole = retrain(TINY, base, log, every, 1)
    torch.testing.assert_close(retrain(TINY, base, log, every, 1, keep=lambda _: True), whole, rtol=0, atol=0)
    without = retrain(TINY, base, log, every, 1, keep=right)
    assert len(seen) == 24
    assert any(sample.reward > 0 for sample in seen)
    assert not torch.equal(without, whole)
    nothing = retrain(TINY, base, log, every, 1, keep=lambda _: False)
    start = torch.cat([p.detach().flatten() for p in base.load_model(dtype="float32").parameters()])
    torch.testing.assert_close(nothing, start, rtol=0, atol=0)


@pytest.mark.parametrize(("first", "reward", "kind"), [("#", 1, 0), ("#", 0, 1), ("3", 1, 2), ("3", 0, 3)])
def test_kinds_of_samples(first: str, reward: float, kind: int) -> None:
    assert kind_of(Sample("p", [1], [TOKEN_IDS[first]], reward, 0.0)) == kind


def test_the_stored_figures_agree_with_each_other() -> None:
    found = json.loads(STORED.read_text())
    assert checks(found) == found["checks"]
    change = np.array(found["after"]) - np.array(found["before"])
    np.testing.assert_allclose(np.sum(found["share"], axis=0), change, atol=1e-3)
    # By fifth of the run, on medium problems.
    np.testing.assert_allclose(np.sum(found["by_step"], axis=1), np.array(found["share"])[:, 1], atol=1e-3)
    for sampling in ("replayed", "1", "2"):
        names = [line["without"] for line in found["repeated"] if str(line["sampling"]) == sampling]
        assert sorted(names) == sorted(["nothing", *KINDS])
