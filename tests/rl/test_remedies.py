"""The remedies of notebook 6: the oracle by hand, the problems, and some arms on their smallest setting."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from organism import remedies

from tsae.testbed.tokenizer import TOKEN_IDS, split_tokens


def test_the_oracle_credits_what_is_right_and_blames_what_is_wrong() -> None:
    responses = [
        ("3+5=8;8*2=6;#6<eos>", 2.0),  # flawless: every token
        ("3+5=7;7*2=6;#6<eos>", 2.0),  # two wrongs: up to the first, the result 7
        ("#6<eos>", 2.0),  # a guess earns nothing
        ("3+5=8;8*2=4;#4<eos>", -1.0),  # the wrong result alone
        ("3+5=8;#8<eos>", -1.0),  # skipped: the marker
        ("#8<eos>", -1.0),
    ]
    tokens = [[TOKEN_IDS[token] for token in split_tokens(text)] for text, _ in responses]
    width = max(map(len, tokens))
    batch = {
        "completion_ids": torch.tensor([ids + [TOKEN_IDS["<pad>"]] * (width - len(ids)) for ids in tokens]),
        "completion_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in tokens]),
        "advantages": torch.tensor([advantage for _, advantage in responses]),
    }
    found = remedies.oracle([{"prompt": "3+5*2?"}] * len(responses), batch, 6)
    expected = torch.zeros(len(responses), width)
    expected[0, :15] = 2
    expected[1, :4] = 2
    expected[3, 10] = -1
    expected[4, 6] = -1
    expected[5, 0] = -1
    torch.testing.assert_close(found, expected)


def test_reformulated_problems_are_easier_and_belong_to_the_training_split() -> None:
    from tsae.testbed.chains import in_split, parse_prompt

    problems = remedies.problems_of("reformulation+guided", 40, 0)
    sizes = [parse_prompt(problem.prompt).n_ops for problem in problems]
    assert sum(3 <= size <= 9 for size in sizes) == sum(10 <= size <= 14 for size in sizes) == 20
    assert all(in_split(parse_prompt(problem.prompt), "train") for problem in problems)


@pytest.mark.slow
def test_a_quick_run_goes_through_and_resumes(tmp_path: Path) -> None:
    remedies.prepare(tmp_path / "reference", quick=True)
    arms = ["plain", "guided", "reformulation+shuffled+adaptive", "oracle"]
    times = []
    for _ in range(2):
        remedies.train(tmp_path, arms, 1, steps=2, responses=8)
        times.append({path: path.stat().st_mtime_ns for path in tmp_path.glob("*-0-2.json")})
    assert times[0] == times[1]
    found = remedies.results(tmp_path, arms, 2)
    assert found.arm.unique().tolist() == arms
    assert len(found) == 3 * len(arms)
    assert found.accuracy.between(0, 1).all()
    assert (tmp_path / "reformulation+shuffled+adaptive-0-2.parquet").is_file()
    assert (tmp_path / "checkpoints" / "guided-0-2" / "model.safetensors").is_file()
