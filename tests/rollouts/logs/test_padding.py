"""Padding of token-id logs: what stands around prompts and responses, and was neither read nor sampled."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from support.builders import BOS, EOS, PAD, save_model
from support.logs import notes, refused
from tsae.checkpoints.loading import Checkpoint
from tsae.cli import main
from tsae.rollouts.config import ColumnNames, ImportConfig
from tsae.rollouts.table import Rollouts

PROMPTS = [[BOS, 4, 5], [BOS, 6, 7, 8, 9], [BOS, 4, 10], [BOS, 5]]
RESPONSES = [[5, EOS], [6, 7, 8, EOS], [EOS], [9, 4, 5, 6]]
"""The last one was cut: it is the longest, so that nothing stands behind it."""
NOTE = "prompts and .* responses have padding"


@pytest.fixture(scope="module")
def padded_with_its_end(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A checkpoint whose tokenizer pads with the end token."""
    path = save_model(tmp_path_factory.mktemp("eos") / "model")
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pad_token": "<eos>"}))
    found = Checkpoint(id="base", path=str(path))
    assert found.load_tokenizer().pad_token_id == EOS
    return found


def rows(pad: int, sides: str, **others: Any) -> list[dict[str, Any]]:
    """A batch as its tensors have it: `sides` says where prompts and responses are padded, such as "lr"."""
    found = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        row: dict[str, Any] = {"reward": 1.0, **others}
        for name, ids, side in zip(("prompt", "response"), (prompt, response), sides, strict=True):
            fill = [pad] * (6 - len(ids) if name == "prompt" else 4 - len(ids))
            row[f"{name}_ids"] = [*fill, *ids] if side == "l" else [*ids, *fill]
        found.append(row)
    return found


def sequences(found: Rollouts) -> tuple[list[list[int]], list[list[int]]]:
    return found.table["prompt_ids"].to_pylist(), found.table["response_ids"].to_pylist()


@pytest.mark.slow(ci=True)
@pytest.mark.parametrize("pad", [PAD, EOS, 11, -100, -1])
@pytest.mark.parametrize("sides", ["lr", "rr", "ll"])
def test_what_pads_a_batch_is_left_out(policy: Checkpoint, tmp_path: Path, sides: str, pad: int) -> None:
    given = rows(pad, sides)
    file = tmp_path / "log.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in given))
    for source in (file, given, pd.DataFrame(given)):
        with pytest.warns(UserWarning, match=NOTE):
            found = Rollouts.read(source, policy, ImportConfig())
        assert sequences(found) == (PROMPTS, RESPONSES)
        assert found.frame.finish_reason.tolist() == ["stop", "stop", "stop", "unknown"]
        assert "4 prompts and 2 responses have padding: 16 ids at their edges (" in notes(found)


def test_tensors_of_a_batch_are_columns(padded_with_its_end: Checkpoint) -> None:
    given = rows(EOS, "lr")
    batch = {name: torch.tensor([row[name] for row in given]) for name in given[0]}
    with pytest.warns(UserWarning, match=r"\(19 .<eos>., mask values"):
        found = Rollouts.read(batch, padded_with_its_end)
    assert sequences(found) == (PROMPTS, RESPONSES)


def test_a_cut_response_ends_before_the_pads(padded_with_its_end: Checkpoint) -> None:
    cut = [{**row, "response_ids": [5, 6, EOS, EOS], "finish_reason": "length"} for row in rows(EOS, "lr")]
    with pytest.warns(UserWarning, match=NOTE):
        assert sequences(Rollouts.read(cut, padded_with_its_end))[1] == [[5, 6]] * 4
    with pytest.warns(UserWarning, match=NOTE):
        one = Rollouts.read([{**row, "finish_reason": None} for row in cut], padded_with_its_end)
    assert sequences(one)[1] == [[5, 6, EOS]] * 4


def test_tokens_that_pad_nothing_stay(policy: Checkpoint, padded_with_its_end: Checkpoint) -> None:
    row = {"prompt_ids": [PAD, BOS, 4, PAD, 5], "response_ids": [4, PAD, 5], "reward": 1.0}
    assert sequences(Rollouts.read([row, row], policy)) == ([row["prompt_ids"]] * 2, [row["response_ids"]] * 2)
    own = {"prompt_ids": [EOS, 4, 5], "response_ids": [4, EOS], "reward": 1.0}
    assert sequences(Rollouts.read([own], padded_with_its_end)) == ([own["prompt_ids"]], [own["response_ids"]])
    given = rows(PAD, "lr")
    assert sequences(Rollouts.read(given, policy, ImportConfig(pad_ids=(-1,))))[0] == [r["prompt_ids"] for r in given]


def test_masks_of_the_log_decide(policy: Checkpoint) -> None:
    """The first prompt begins with a pad that was read, and the first response has two end tokens that were sampled."""
    given = rows(PAD, "lr")
    given[0]["prompt_ids"], given[0]["response_ids"] = [PAD, PAD, PAD, BOS, 4, 5], [5, EOS, EOS, PAD]
    read, sampled = [PAD, BOS, 4, 5], [5, EOS, EOS]
    expected = [read, *PROMPTS[1:]], [sampled, *RESPONSES[1:]]
    ones = [([1] * len(p), [1] * len(r)) for p, r in zip(*expected, strict=True)]
    masks = [([0] * (6 - len(p)) + p, r + [0] * (4 - len(r))) for p, r in ones]
    of_both = [{**row, "attention_mask": [*p, *r]} for row, (p, r) in zip(given, masks, strict=True)]
    assert sequences(Rollouts.read(of_both, policy)) == expected
    trl = [{**row, "prompt_mask": p, "completion_mask": r} for row, (p, r) in zip(given, masks, strict=True)]
    assert sequences(Rollouts.read(trl, policy)) == expected
    verl = [{**row, "response_mask": row["attention_mask"][6:]} for row in of_both]
    assert sequences(Rollouts.read(verl, policy)) == expected
    loss = [{**row, "prompt_mask": p, "loss_mask": r} for row, (p, r) in zip(given, masks, strict=True)]
    assert (
        sequences(Rollouts.read(loss, policy, ImportConfig(columns=ColumnNames(response_mask="loss_mask")))) == expected
    )
    of_both[1]["attention_mask"] = [1, 1]
    refused(
        r"row 1: attention_mask has 2 marks for 6 ids of the prompt and 4 of the resp", Rollouts.read, of_both, policy
    )


@pytest.mark.parametrize("sides", ["lr", "rr", "ll"])
def test_a_pad_that_is_an_ordinary_token_stays_where_nothing_is_padded(policy: Checkpoint, sides: str) -> None:
    """Some trainers pad with 0, which may be an exclamation mark: texts that begin or end so keep it."""
    given = rows(11, sides)
    bare = {"l": slice(None), "r": slice(None, None, -1)}  # the edge that is not padded comes last
    for row in given:
        for name, side in zip(("prompt_ids", "response_ids"), sides, strict=True):
            row[name] = [*row[name][bare[side]], 11][bare[side]]
    with pytest.warns(UserWarning, match=NOTE) as told:
        found = Rollouts.read(given, policy)
    assert {warning.filename for warning in told} == {__file__}
    prompt, response = ((11 if side == "r" else None, None if side == "r" else 11) for side in sides)

    def kept(ids: list[int], edges: tuple[int | None, int | None]) -> list[int]:
        return [id for id in (edges[0], *ids, edges[1]) if id is not None]

    assert sequences(found) == ([kept(ids, prompt) for ids in PROMPTS], [kept(ids, response) for ids in RESPONSES])


@pytest.mark.parametrize("write", [json.dumps, lambda values: [*map(str, values)]])
def test_ids_and_masks_may_be_texts(policy: Checkpoint, write: Any) -> None:
    """As tables of texts have them."""
    given = rows(EOS, "lr")
    for row, prompt, response in zip(given, PROMPTS, RESPONSES, strict=True):
        row["attention_mask"] = [0] * (6 - len(prompt)) + [1] * (len(prompt) + len(response))
        row["attention_mask"] += [0] * (10 - len(row["attention_mask"]))
    texts = [{name: write(value) if name != "reward" else value for name, value in row.items()} for row in given]
    assert sequences(Rollouts.read(texts, policy)) == (PROMPTS, RESPONSES)


def test_pads_that_are_written_out_in_texts_are_left_out(policy: Checkpoint) -> None:
    given = [
        {"prompt": "<pad><pad><bos>1+1?", "response": "#2<eos><pad><pad>", "reward": 1.0},
        {"prompt": "<bos>1+1=2?", "response": "1+1=<pad>2;#2", "reward": 1.0},
    ]
    with pytest.warns(UserWarning, match="1 prompts and 1 responses have padding: 4 ids"):
        found = Rollouts.read(given, policy)
    assert sequences(found)[0] == [[BOS, 1, 10, 1, 13], [BOS, 1, 10, 1, 14, 2, 13]]
    assert sequences(found)[1] == [[16, 2, EOS], [1, 10, 1, 14, PAD, 2, 15, 16, 2]]


def test_what_texts_and_ids_of_any_width_repeat_at_their_edges_is_not_padding(policy: Checkpoint) -> None:
    texts = [{"prompt": f"11+{n}?;;", "response": f"11+{n};;", "reward": 1.0} for n in range(1, 6)]
    found = Rollouts.read(texts, policy)
    assert found.frame.response.tolist() == [row["response"] for row in texts]
    assert [ids[1:3] for ids in sequences(found)[0]] == [[1, 1]] * 5
    ids = [{"prompt_ids": [BOS, *[4] * n, 15, 15], "response_ids": [15, 15, *[5] * n], "reward": 1.0} for n in range(5)]
    assert sequences(Rollouts.read(ids, policy)) == ([r["prompt_ids"] for r in ids], [r["response_ids"] for r in ids])


# --- groups of a log: ids with several prompts, prompts with several ids, rows that come twice, unequal sizes


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


def grouped(n_groups: int, size: int, n_steps: int = 1) -> list[dict[str, Any]]:
    """Groups of every step with different responses."""
    return [
        {
            "problem_id": f"p{group}",
            "step": step,
            "prompt": f"{group}?",
            "response": f"#{step}{i}",
            "reward": float(i > 3),
        }
        for step in range(1, n_steps + 1)
        for group in range(n_groups)
        for i in range(size)
    ]


@pytest.mark.parametrize("order", ["twice", "each twice", "mixed"])
def test_rows_that_a_log_holds_twice_count_once(policy: Checkpoint, order: str) -> None:
    rows = grouped(2, 8, 2)
    twice = [row for row in rows for _ in range(2)] if order == "each twice" else [*rows, *rows]
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


@pytest.mark.parametrize(
    ("rows", "again", "repeated"), [(grouped(10, 6), slice(None, -1), 59), (grouped(1, 8, 3), slice(8, 16), 8)]
)
def test_copies_are_found_where_one_line_or_a_step_is_lost(
    policy: Checkpoint, rows: Any, again: slice, repeated: int
) -> None:
    with pytest.warns(UserWarning, match=f"{repeated} trajectories repeat others of their groups"):
        assert len(Rollouts.read([*rows, *rows[again]], policy)) == len(rows)


def test_a_batch_that_was_logged_at_two_steps_is_counted(policy: Checkpoint) -> None:
    rows = [{"problem_id": "p", "prompt": "1?", "response": f"#{i}", "reward": 1.0} for i in range(4)]
    twice = [{**row, "step": step} for step in (1, 2) for row in rows] + [{**rows[0], "step": 3}]
    found = Rollouts.read(twice, policy)
    assert len(found) == 9
    assert "4 trajectories come again under another step or policy, word for word: all of them count" in notes(found)
    found = Rollouts.read(twice, policy, ImportConfig(copies="drop"))
    assert found.frame.step.tolist() == [1] * 4 + [3]


@pytest.mark.slow(ci=True)
@pytest.mark.parametrize("words", [1, 2, 3])
def test_a_policy_that_repeats_itself_keeps_its_rows(policy: Checkpoint, words: int) -> None:
    for seed in range(4):
        rows = sampled(20, 8, words, seed) + [{**row, "step": 2} for row in sampled(40, 8, 1)]
        assert len(Rollouts.read(rows, policy)) == len(rows)
    sure = Rollouts.read(sampled(2, 2, 1), policy)
    assert len(sure) == 4
    assert "which chance may give: all of them count (--copies drop)" in notes(sure)
    assert len(Rollouts.read(sampled(2, 2, 1), policy, ImportConfig(copies="drop"))) == 2


def test_groups_of_unequal_sizes_are_counted_and_cut_ones_named(policy: Checkpoint) -> None:
    """Of the third group three trajectories lie in the step before; the last one is short."""
    rows = [
        {"problem_id": f"p{n // 8}", "step": 1 + (n >= 19), "prompt": f"{n // 8}?", "response": f"#{n % 8}"}
        for n in range(37)
    ]
    found = Rollouts.read(rows, policy)
    assert "groups have unequal numbers of trajectories: 3 of 8, 2 of 5, 1 of 3; 1 are cut" in notes(found)
    assert "unequal numbers" not in notes(Rollouts.read(rows[:16], policy))
