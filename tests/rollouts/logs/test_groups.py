"""Groups of a log: ids with several prompts, prompts with several ids, rows that come twice, unequal sizes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tsae.checkpoints.loading import Checkpoint
from tsae.cli import main
from tsae.rollouts.config import ColumnNames, ImportConfig
from tsae.rollouts.table import Rollouts


def restarted(n_groups: int = 3, size: int = 4, **others: Any) -> list[dict[str, Any]]:
    """Two steps, in which groups are numbered from 0; every step asks others."""
    return [
        {"problem_id": str(group), "step": step, "prompt": f"{group}+{step}?", "response": f"#{i}", "reward": step - 1}
        | others
        for step in (1, 2)
        for group in range(n_groups)
        for i in range(size)
    ]


def sampled(n_groups: int, size: int, words: int, seed: int = 0) -> list[dict[str, Any]]:
    """Groups of one step with `words` equally probable responses."""
    rng = random.Random(seed)
    return [
        {"problem_id": f"p{group}", "step": 1, "prompt": f"{group}?", "response": f"#{rng.randrange(words)}"}
        for group in range(n_groups)
        for _ in range(size)
    ]


def notes(found: Rollouts, about: str) -> list[str]:
    return [note for note in found.info["log"]["notes"] if about in note]


def test_an_id_with_several_prompts_is_several_problems(policy: Checkpoint, tmp_path: Path, capsys: Any) -> None:
    rows = restarted()
    with pytest.warns(UserWarning, match="3 problem ids have several prompts each, 6 in all: every prompt counts as"):
        found = Rollouts.read(rows, policy)
    problems = found.frame.groupby("problem_id").prompt.unique()
    assert sorted(problems.str.len()) == [1] * 6
    assert sorted(problems.str[0]) == sorted({row["prompt"] for row in rows})
    assert all(id.startswith(f"{prompt[0]}/") for id, (prompt,) in problems.items())
    assert found.frame.groupby("problem_id").reward.nunique().eq(1).all()
    with pytest.warns(UserWarning, match="each id counts as one problem, as asked"):
        assert Rollouts.read(rows, policy, ImportConfig(merge_prompts=True)).n_problems == 3
    by_prompt = ImportConfig(columns=ColumnNames(problem_id="prompt"))
    assert Rollouts.read(rows, policy, by_prompt).n_problems == 6
    # Whoever imports the second step alone gets the same ids, and what does not collide keeps its own.
    mixed = [*rows, {**rows[0], "problem_id": "alone", "prompt": "9?"}]
    with pytest.warns(UserWarning, match="3 problem ids"):
        again = Rollouts.read(mixed[::-1], policy)
    assert {*again.frame.problem_id} == {*found.frame.problem_id, "alone"}
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    main(["rollouts", "import", str(log), "--checkpoint", policy.path, "--to", str(tmp_path / "r.parquet")])
    printed = capsys.readouterr().out
    assert "note: 3 problem ids have several prompts each, 6 in all" in printed
    assert printed.split("  all ")[1].split()[:2] == ["24", "6"]


def test_advantages_of_split_groups_are_compared_within_a_prompt(policy: Checkpoint) -> None:
    """Two prompts under one id in one step: each is a group of its own, whose rewards give the advantages."""
    rows = [
        {"problem_id": 0, "step": 1, "prompt": f"{a}+1?", "response": f"#{i}", "reward": i, "advantage": i - 1.5}
        for a in (1, 2)
        for i in range(4)
    ]
    with pytest.warns(UserWarning, match="1 problem ids have several prompts"):
        found = Rollouts.read(rows, policy)
    assert found.info["log"]["second_look"]["advantages"]["compared"] == 2
    assert not found.info["log"]["second_look"]["advantages"]["disagrees"]


def test_a_prompt_with_several_ids_stays_several_problems(policy: Checkpoint) -> None:
    rows = [{"problem_id": f"{i}", "prompt": "1+1?", "response": f"#{i}", "reward": 1.0} for i in range(4)]
    rows.append({**rows[0], "problem_id": "z", "prompt": "2?"})
    with pytest.warns(UserWarning, match=r"1 prompts have several problem ids each, 4 in all.*--column problem_id=pr"):
        assert Rollouts.read(rows, policy).n_problems == 5
    assert Rollouts.read(rows, policy, ImportConfig(columns=ColumnNames(problem_id="prompt"))).n_problems == 2


@pytest.mark.parametrize("order", ["twice", "each twice", "mixed"])
def test_rows_that_a_log_holds_twice_count_once(policy: Checkpoint, order: str) -> None:
    rows = [
        {
            "problem_id": f"p{group}",
            "step": step,
            "prompt": f"{group}?",
            "response": f"#{step}{i}",
            "reward": float(i > 3),
        }
        for step in (1, 2)
        for group in range(2)
        for i in range(8)
    ]
    twice = {"twice": [*rows, *rows], "each twice": [row for row in rows for _ in range(2)], "mixed": [*rows, *rows]}[
        order
    ]
    if order == "mixed":
        random.Random(0).shuffle(twice)
    with pytest.warns(UserWarning, match=r"32 trajectories repeat others of their groups word for word, which chance "):
        found = Rollouts.read(twice, policy)
    key = ["problem_id", "step", "response"]
    assert sorted(map(tuple, found.frame[key].to_numpy().tolist())) == sorted(
        (row["problem_id"], row["step"], row["response"]) for row in rows
    )
    assert found.info["log"]["skipped"] == {"repeated": 32}
    with pytest.warns(UserWarning, match="all of them count"):
        assert len(Rollouts.read(twice, policy, ImportConfig(copies="keep"))) == 64


def test_copies_are_found_where_one_line_is_lost(policy: Checkpoint) -> None:
    rows = [
        {"problem_id": f"p{group}", "step": 1, "prompt": f"{group}?", "response": f"#{i}", "reward": 1.0}
        for group in range(10)
        for i in range(6)
    ]
    with pytest.warns(UserWarning, match="59 trajectories repeat others of their groups"):
        assert len(Rollouts.read([*rows, *rows[:-1]], policy)) == 60


def test_one_step_that_a_log_holds_twice_counts_once(policy: Checkpoint) -> None:
    rows = [
        {"problem_id": f"p{step}", "step": step, "prompt": f"{step}?", "response": f"#{i}", "reward": 1.0}
        for step in (1, 2, 3)
        for i in range(8)
    ]
    with pytest.warns(UserWarning, match="8 trajectories repeat others of their groups"):
        assert len(Rollouts.read([*rows, *rows[8:16]], policy)) == 24


def test_a_batch_that_was_logged_at_two_steps_is_counted(policy: Checkpoint) -> None:
    rows = [{"problem_id": "p", "prompt": "1?", "response": f"#{i}", "reward": 1.0} for i in range(4)]
    twice = [{**row, "step": step} for step in (1, 2) for row in rows] + [{**rows[0], "step": 3}]
    found = Rollouts.read(twice, policy)
    assert len(found) == 9
    assert notes(found, "4 trajectories come again under another step or policy, word for word: all of them count")
    found = Rollouts.read(twice, policy, ImportConfig(copies="drop"))
    assert found.frame.step.tolist() == [1] * 4 + [3]


@pytest.mark.parametrize("words", [1, 2, 3])
def test_a_policy_that_repeats_itself_keeps_its_rows(policy: Checkpoint, words: int) -> None:
    for seed in range(4):
        rows = sampled(20, 8, words, seed) + [{**row, "step": 2} for row in sampled(40, 8, 1)]
        assert len(Rollouts.read(rows, policy)) == len(rows)
    sure = Rollouts.read(sampled(2, 2, 1), policy)
    assert len(sure) == 4
    assert notes(sure, "which chance may give: all of them count (--copies drop)")
    assert len(Rollouts.read(sampled(2, 2, 1), policy, ImportConfig(copies="drop"))) == 2


def test_groups_of_unequal_sizes_are_counted_and_cut_ones_named(policy: Checkpoint) -> None:
    """Of the third group three trajectories lie in the step before; the last one is short."""
    rows = [
        {"problem_id": f"p{n // 8}", "step": 1 + (n >= 19), "prompt": f"{n // 8}?", "response": f"#{n % 8}"}
        for n in range(37)
    ]
    found = Rollouts.read(rows, policy)
    (note,) = notes(found, "unequal numbers")
    assert note.startswith("groups have unequal numbers of trajectories: 3 of 8, 2 of 5, 1 of 3; 1 are cut")
    assert not notes(Rollouts.read(rows[:16], policy), "unequal numbers")
