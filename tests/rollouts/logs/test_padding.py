"""Padding of token-id logs: what stands around prompts and responses, and was neither read nor sampled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from support.builders import BOS, EOS, PAD, save_model
from support.logs import refused
from tsae.checkpoints.loading import Checkpoint
from tsae.errors import TsaeError
from tsae.rollouts.config import ColumnNames, ImportConfig
from tsae.rollouts.table import Rollouts, read_frame

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
        (note,) = [note for note in found.info["log"]["notes"] if "padding" in note]
        assert note.startswith("4 prompts and 2 responses have padding: 16 ids at their edges (")


def test_tensors_of_a_batch_are_columns(padded_with_its_end: Checkpoint) -> None:
    given = rows(EOS, "lr")
    batch = {name: torch.tensor([row[name] for row in given]) for name in given[0]}
    with pytest.warns(UserWarning, match=r"\(19 .<eos>., mask values"):
        found = read_frame(batch, padded_with_its_end)
    assert sequences(found) == (PROMPTS, RESPONSES)


def test_a_cut_response_ends_before_the_pads(padded_with_its_end: Checkpoint) -> None:
    cut = [{**row, "response_ids": [5, 6, EOS, EOS], "finish_reason": "length"} for row in rows(EOS, "lr")]
    with pytest.warns(UserWarning, match=NOTE):
        assert sequences(read_frame(cut, padded_with_its_end))[1] == [[5, 6]] * 4
    with pytest.warns(UserWarning, match=NOTE):
        one = read_frame([{**row, "finish_reason": None} for row in cut], padded_with_its_end)
    assert sequences(one)[1] == [[5, 6, EOS]] * 4


def test_tokens_that_pad_nothing_stay(policy: Checkpoint, padded_with_its_end: Checkpoint) -> None:
    row = {"prompt_ids": [PAD, BOS, 4, PAD, 5], "response_ids": [4, PAD, 5], "reward": 1.0}
    assert sequences(read_frame([row, row], policy)) == ([row["prompt_ids"]] * 2, [row["response_ids"]] * 2)
    own = {"prompt_ids": [EOS, 4, 5], "response_ids": [4, EOS], "reward": 1.0}
    assert sequences(read_frame([own], padded_with_its_end)) == ([own["prompt_ids"]], [own["response_ids"]])
    given = rows(PAD, "lr")
    assert sequences(read_frame(given, policy, ImportConfig(pad_ids=(-1,))))[0] == [r["prompt_ids"] for r in given]


def test_masks_of_the_log_decide(policy: Checkpoint) -> None:
    """The first prompt begins with a pad that was read, and the first response has two end tokens that were sampled."""
    given = rows(PAD, "lr")
    given[0]["prompt_ids"], given[0]["response_ids"] = [PAD, PAD, PAD, BOS, 4, 5], [5, EOS, EOS, PAD]
    read, sampled = [PAD, BOS, 4, 5], [5, EOS, EOS]
    expected = [read, *PROMPTS[1:]], [sampled, *RESPONSES[1:]]
    ones = [([1] * len(p), [1] * len(r)) for p, r in zip(*expected, strict=True)]
    masks = [([0] * (6 - len(p)) + p, r + [0] * (4 - len(r))) for p, r in ones]
    of_both = [{**row, "attention_mask": [*p, *r]} for row, (p, r) in zip(given, masks, strict=True)]
    assert sequences(read_frame(of_both, policy)) == expected
    trl = [{**row, "prompt_mask": p, "completion_mask": r} for row, (p, r) in zip(given, masks, strict=True)]
    assert sequences(read_frame(trl, policy)) == expected
    verl = [{**row, "response_mask": row["attention_mask"][6:]} for row in of_both]
    assert sequences(read_frame(verl, policy)) == expected
    loss = [{**row, "prompt_mask": p, "loss_mask": r} for row, (p, r) in zip(given, masks, strict=True)]
    assert sequences(read_frame(loss, policy, ImportConfig(columns=ColumnNames(response_mask="loss_mask")))) == expected
    of_both[1]["attention_mask"] = [1, 1]
    refused(r"row 1: attention_mask has 2 marks for 6 ids of the prompt and 4 of the resp", read_frame, of_both, policy)


@pytest.mark.parametrize("sides", ["lr", "rr", "ll"])
def test_a_pad_that_is_an_ordinary_token_stays_where_nothing_is_padded(policy: Checkpoint, sides: str) -> None:
    """Some trainers pad with 0, which may be an exclamation mark: texts that begin or end so keep it."""
    given = rows(11, sides)
    bare = {"l": slice(None), "r": slice(None, None, -1)}  # the edge that is not padded comes last
    for row in given:
        for name, side in zip(("prompt_ids", "response_ids"), sides, strict=True):
            row[name] = [*row[name][bare[side]], 11][bare[side]]
    with pytest.warns(UserWarning, match=NOTE) as told:
        found = read_frame(given, policy)
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
    assert sequences(read_frame(texts, policy)) == (PROMPTS, RESPONSES)


def test_a_mask_value_between_tokens_is_refused(policy: Checkpoint) -> None:
    with pytest.raises(TsaeError, match=r"has -100 between its tokens, which is a mask value.*--column response_mask"):
        read_frame([{"prompt_ids": [BOS, 4], "response_ids": [4, -100, EOS], "reward": 1.0}], policy)


def test_pads_that_are_written_out_in_texts_are_left_out(policy: Checkpoint) -> None:
    given = [
        {"prompt": "<pad><pad><bos>1+1?", "response": "#2<eos><pad><pad>", "reward": 1.0},
        {"prompt": "<bos>1+1=2?", "response": "1+1=<pad>2;#2", "reward": 1.0},
    ]
    with pytest.warns(UserWarning, match="1 prompts and 1 responses have padding: 4 ids"):
        found = read_frame(given, policy)
    assert sequences(found)[0] == [[BOS, 1, 10, 1, 13], [BOS, 1, 10, 1, 14, 2, 13]]
    assert sequences(found)[1] == [[16, 2, EOS], [1, 10, 1, 14, PAD, 2, 15, 16, 2]]


def test_what_texts_and_ids_of_any_width_repeat_at_their_edges_is_not_padding(policy: Checkpoint) -> None:
    texts = [{"prompt": f"11+{n}?;;", "response": f"11+{n};;", "reward": 1.0} for n in range(1, 6)]
    found = read_frame(texts, policy)
    assert found.frame.response.tolist() == [row["response"] for row in texts]
    assert [ids[1:3] for ids in sequences(found)[0]] == [[1, 1]] * 5
    ids = [{"prompt_ids": [BOS, *[4] * n, 15, 15], "response_ids": [15, 15, *[5] * n], "reward": 1.0} for n in range(5)]
    assert sequences(read_frame(ids, policy)) == ([r["prompt_ids"] for r in ids], [r["response_ids"] for r in ids])
