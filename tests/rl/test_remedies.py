"""The comparison of remedies: its oracle and its table by hand, and the script on its smallest setting."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from organism.pages import fill, marks

from tsae.testbed.tokenizer import TOKEN_IDS, split_tokens


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return importlib.import_module("run_remedies")


def test_the_oracle_credits_what_is_right_and_blames_what_is_wrong(script: ModuleType) -> None:
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
    found = script.oracle([{"prompt": "3+5*2?"}] * len(responses), batch, 6)
    expected = torch.zeros(len(responses), width)
    expected[0, :15] = 2
    expected[1, :4] = 2
    expected[3, 10] = -1
    expected[4, 6] = -1
    expected[5, 0] = -1
    torch.testing.assert_close(found, expected)


def test_the_table_has_means_and_spreads(script: ModuleType, tmp_path: Path) -> None:
    for seed, accuracy in enumerate((0.2, 0.4)):
        cell = {"accuracy": accuracy, "direct": 0.5, "skipped": 0.25, "flawless": 0.0, "length": 9.0}
        result = {"arm": "reformulation", "seed": seed}
        result["measured"] = {"80": dict.fromkeys(("easy", "medium", "hard"), cell)}
        (tmp_path / f"reformulation-{seed}-80.json").write_text(json.dumps(result))
    table = script.tabulate(tmp_path, 80)
    assert table.count("\n") == 3  # no other arm, and not the arms whose names begin alike
    assert "| reformulation | 2 | .30 ± .14 | .30 ± .14 | .30 ± .14 | .50 ± .00 |" in table
    doc = tmp_path / "doc.md"
    begins, ends = marks("remedies")
    doc.write_text(f"before\n{begins}\nold\n{ends}\nafter\n")
    fill(doc, "remedies", table)
    text = doc.read_text()
    assert table in text
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")


def test_reformulated_problems_are_easier_and_belong_to_the_training_split(script: ModuleType) -> None:
    from tsae.testbed.chains import in_split, parse_prompt

    problems = script.problems_of("reformulation+guided", 40, 0)
    sizes = [parse_prompt(problem.prompt).n_ops for problem in problems]
    assert sum(3 <= size <= 9 for size in sizes) == sum(10 <= size <= 14 for size in sizes) == 20
    assert all(in_split(parse_prompt(problem.prompt), "train") for problem in problems)


@pytest.mark.slow
def test_a_quick_run_goes_through_and_resumes(script: ModuleType, tmp_path: Path) -> None:
    arms = ["plain", "both", "reformulation+shuffled+adaptive", "oracle", "adaptive"]
    options = ["--out", str(tmp_path), "--quick", "--seeds", "1", "--arms", *arms]
    assert script.main(options) == 0
    results = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*-0-2.json")}
    assert len(results) == 5
    assert (tmp_path / "adaptive-0-2.parquet").is_file()
    assert (tmp_path / "checkpoints" / "both-0-2" / "model.safetensors").is_file()
    assert script.main(options) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*-0-2.json")} == results
