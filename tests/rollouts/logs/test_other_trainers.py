"""Logs of trainers that write columns, tensors, episodes or messages; and logs that nobody is known to write.

The logs are written here in the shape that the trainers' own functions write, which the readers' docstrings name.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from support.builders import BOS, EOS
from support.logs import LOGS, column, holds, notes, read, refused, write
from tsae import Rollouts
from tsae.checkpoints.loading import Checkpoint
from tsae.cli import main
from tsae.errors import TsaeError
from tsae.rollouts.config import ColumnNames, ImportConfig, name_columns
from tsae.rollouts.log_detection import find_log
from tsae.rollouts.logs.entry import Entry

ASKED = [BOS, 16, 1, 10, 1, 13, EOS, BOS, 15]  # 1+1? in that template
RENDERED = "<bos>#1+1?<eos><bos>;"
USER = [{"role": "user", "content": "1+1?"}]
RIGHT, WRONG = [16, 2], [1, 10, 1, 14, 3, 15, 16, 3]  # #2 and 1+1=3;#3


def reads_as(found: Rollouts, responses: list[list[int]]) -> None:
    holds(found, prompt_ids=[ASKED] * len(responses), response_ids=responses)


# --- ms-swift


def swift(step: int | str, responses: tuple[str, ...] = ("#2", "1+1=3;#3"), **columns: Any) -> dict[str, Any]:
    n = len(responses)
    return {
        "step": [str(step)] * n,
        "prompt": [RENDERED] * n,
        "completion": list(responses),
        "Accuracy": [1.0, 0.0][:n],
        "advantages": [0.7, -0.7][:n],
    } | columns


def test_ms_swift_logs_batches_again(chat: Checkpoint, tmp_path: Path) -> None:
    """Where several steps train on one batch, an evaluation logs, or a run went on from an older checkpoint."""
    log = tmp_path / "completions.jsonl"
    evaluated = swift(1, ("#4", "#5"), prompt=["<bos>#2+2?<eos><bos>;"] * 2)
    for again, message in ((swift(2), "what the line before has"), (evaluated, "second line of step 1, with other")):
        with pytest.raises(TsaeError, match=f"completions.jsonl:2, trajectory 1: .*{message}.*--skip repeated"):
            read(write(log, swift(1), again), chat)
        found = read(log, chat, skip=("repeated",))
        reads_as(found, [RIGHT, WRONG])
        assert found.info["log"]["skipped"] == {"repeated": 2}
    found = read(write(log, evaluated | {"step": ["0", "0"]}, swift(1)), chat)
    reads_as(found, [RIGHT, WRONG])
    assert "2 trajectories of step 0, an evaluation before the training, are left out" in notes(found)
    write(log, swift(1), swift(2, ("#4", "#5")), swift(1, ("#6", "#7")))
    refused("comes here again, and is another", read, log, chat)
    assert column(read(log, chat, skip=("repeated",)), "response") == ["#4", "#5", "#6", "#7"]
    # Resumed right after the step that it takes again: the training goes on from the second attempt.
    write(log, swift(1), swift(2, ("#4", "#5")), swift(2, ("#6", "#7")), swift(3, ("#8", "#9")))
    refused(r"completions\.jsonl:3: .*comes here again, and is another", read, log, chat)
    assert column(read(log, chat, skip=("repeated",)), "response") == ["#2", "1+1=3;#3", "#6", "#7", "#8", "#9"]


def test_ms_swift_rewards(chat: Checkpoint, tmp_path: Path) -> None:
    log = tmp_path / "completions.jsonl"
    # Where another program has sorted the columns, none of them can be told for a reward.
    with pytest.raises(TsaeError, match=r"completions\.jsonl:1.*no column lies between completion and advantages"):
        read(write(log, dict(sorted(swift(1).items(), reverse=True))), chat)
    two = swift(1)
    advantages = two.pop("advantages")
    two |= {"Format": [0.0, 0.5], "advantages": advantages}
    found = read(write(log, two), chat)
    holds(found, reward=[1.0, 0.5], outcome=["success", "failure"])
    with pytest.raises(TsaeError, match=r"do not follow from the sum of Accuracy, Format.*--rewards"):
        read(write(log, two | {"Format": [0.0, 3.0]}), chat)
    assert column(read(log, chat, rewards=("Accuracy",)), "reward") == [1.0, 0.0]
    # A line with a reward more: its sums are another quantity, unless the rewards are named.
    write(log, swift(1), two | {"step": ["2", "2"], "completion": ["#4", "#5"]})
    refused(r"completions\.jsonl:2.*are not the same quantity", read, log, chat)
    assert column(read(log, chat, rewards=("Accuracy",)), "reward") == [1.0, 0.0] * 2


# --- slime


def sample(sampled: list[int], **fields: Any) -> dict[str, Any]:
    return {
        "group_index": 0, "index": 0, "rollout_id": None, "prompt": RENDERED, "tokens": ASKED + sampled,
        "response": "", "response_length": len(sampled), "label": "2", "reward": 1.0, "loss_mask": None,
        "weight_versions": [], "status": "completed", "multimodal_inputs": None, "metadata": {},
    } | fields  # fmt: skip


def save(path: Path, *samples: dict[str, Any], rollout_id: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"rollout_id": rollout_id, "samples": list(samples)}, path)
    return path


def test_slime(chat: Checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "rollout_data"
    save(folder / "0.pt", sample([*RIGHT, EOS], response="#2"), sample(WRONG, status="truncated", reward=0.0))
    wrong = sample([16, 3, EOS], reward={"score": 1.0, "acc": False, "pred": "3"})
    right = sample([*RIGHT, EOS], reward={"score": -1.0, "acc": True, "pred": "2"})
    save(folder / "1.pt", wrong, right, rollout_id=1)
    save(folder / "10.pt", sample(RIGHT), rollout_id=10)
    save(folder / "eval_1.pt", sample([16, 9, EOS]), rollout_id=1)
    save(tmp_path / "run" / "optimizer.pt", sample([16, 8]))
    torch.save({"rollout_data": {}}, tmp_path / "run" / "train_0.pt")
    found = read(tmp_path / "run", chat)
    reads_as(found, [[*RIGHT, EOS], WRONG, [16, 3, EOS], [*RIGHT, EOS], RIGHT])
    holds(found, step=[0, 0, 1, 1, 10], policy=["run-00000"] * 2 + ["run-00001"] * 2 + ["run-00010"])
    holds(found, finish_reason=["stop", "length", "stop", "stop", "stop"])
    holds(found, outcome=["success", "failure", "failure", "success", "success"], reward=[1.0, 0.0, 1.0, -1.0, 1.0])
    holds(found, answer=["2"] * 5, round_trip=[True, None, None, None, None])
    assert column(read(folder / "eval_1.pt", chat), "response_ids") == [[16, 9, EOS]]
    parts = [{"reward": 2 * right - 1.0, "correct": right, "format": 0.5} for right in (0, 1)]
    found = read(save(tmp_path / "0.pt", sample(WRONG, reward=parts[0]), sample(RIGHT, reward=parts[1])), chat)
    holds(found, outcome=["failure", "success"], reward=[-1.0, 1.0])


def test_slimes_whole_dump_is_read(chat: Checkpoint, tmp_path: Path) -> None:
    """--dump-details writes train_data and the tokenizer too; rewards and metadata may be numpy's."""
    dump = tmp_path / "run" / "dump"
    numbers = {"reward": np.float32(1.0), "metadata": {"experts": np.zeros((2, 2), np.int32)}, "loss_mask": np.ones(2)}
    save(
        dump / "rollout_data" / "0.pt",
        sample(RIGHT, **numbers),
        sample(WRONG, reward={"score": np.float64(0), "acc": "False"}),
    )
    save(dump / "rollout_data" / "1.pt", sample(RIGHT, reward=torch.tensor(1.0)), rollout_id=1)
    save(dump / "rollout_data" / "eval_0.pt", sample([16, 9, EOS]))
    # Before and since version 2 of what each rank trained on.
    trained = {"tokens": torch.tensor(ASKED + RIGHT), "response_lengths": 2, "advantages": torch.ones(2)}
    for name, content in (
        ("0_0.pt", {"rollout_data": {name: [value] for name, value in trained.items()}}),
        ("rollout_1.pt", {"format_version": 2, "samples": [trained], "dp_shards": [{"rank": 0}]}),
    ):
        (dump / "train_data").mkdir(exist_ok=True)
        torch.save({"rollout_id": 0, "rank": 0, **content}, dump / "train_data" / name)
    chat.load_tokenizer().save_pretrained(dump / "tokenizer")
    for found in (read(dump, chat), read(dump, None), read(dump / "rollout_data", None)):
        reads_as(found, [RIGHT, WRONG, RIGHT])
        holds(found, step=[0, 0, 1], outcome=["success", "failure", "success"], reward=[1.0, 0.0, 1.0])


def test_slimes_masks_and_versions(chat: Checkpoint, tmp_path: Path) -> None:
    """What a tool said after the last sampled token is not the policy's."""
    tool = sample([*RIGHT, 5, 5], loss_mask=[1, 1, 0, 0], weight_versions=["3"])
    mixed = sample([*RIGHT, EOS], weight_versions=["2", "3"])
    found = read(save(tmp_path / "rollout_4.pt", tool, mixed, rollout_id=4), chat, run="r")
    reads_as(found, [RIGHT, [*RIGHT, EOS]])
    assert column(found, "policy") == ["r-00002"] * 2
    assert "1 responses were sampled while weights were updated: named after the newest" in notes(found)
    inside = read(save(tmp_path / "0.pt", sample([16, 5, 5, 2, 1], loss_mask=[1, 0, 0, 1, 0])), chat)
    holds(inside, response_ids=[[16, 5, 5, 2]], parts=[[0, 2, 2, 0]], response=["#\n2"])
    assert "1 responses have several turns" in notes(inside)
    told = {"group_index": 3, "rollout_log_probs": [-0.25, -0.5], "apply_chat_template_kwargs": {"a": False}}
    form, files, _ = find_log(save(tmp_path / "0.pt", sample(RIGHT, **told)), ImportConfig())
    (entry,) = form.read(files[0], ImportConfig())
    assert isinstance(entry, Entry)
    assert entry.logprobs is not None
    assert (entry.logprobs.tolist(), entry.template, entry.group) == ([-0.25, -0.5], {"a": False}, "3")
    odd = [{"role": "user", "content": torch.ones(2), 1: "x"}]
    kwargs = {"enable_thinking": torch.ones(1), 1: 2}
    odd_one = save(tmp_path / "0.pt", sample(RIGHT, prompt=odd, apply_chat_template_kwargs=kwargs))
    assert column(read(odd_one, chat), "response_ids") == [RIGHT]
    for bad, message in (
        (sample(RIGHT, status="aborted"), "its status is aborted"),
        (sample([]), "the response is empty"),
        (sample(RIGHT, response_length=99), "99 response tokens of 11"),
        (sample(RIGHT, response_length=11), "11 response tokens of 11"),
        (sample(RIGHT, loss_mask=[1]), "11 token ids but 10 mask values"),
        (sample(RIGHT, multimodal_inputs={"images": [1]}), "images or sound"),
        (sample(RIGHT, label=torch.ones(2)), "is not built as its trainer writes it"),
        (sample(RIGHT, weight_versions=torch.ones(2)), "is not built as its trainer writes it"),
        (sample(RIGHT, prompt=[{"role": "user", (1, 2): 3}]), "is not built as its trainer writes it"),
        (sample(RIGHT, reward={"score": "one", "acc": False}), "score is 'one', expected a finite number"),
    ):
        refused(rf"0\.pt: row 1: .*{message}", read, save(tmp_path / "0.pt", sample(RIGHT), bad), chat)


def test_what_may_run_code_is_not_loaded(chat: Checkpoint, tmp_path: Path) -> None:
    torch.save({"rollout_id": 0, "samples": [sample(RIGHT, metadata=Path("x"))]}, tmp_path / "0.pt")
    refused(r"0\.pt: holds more than tensors and plain containers \(.*Path", read, tmp_path / "0.pt", chat)
    torch.save({"model": 1}, tmp_path / "1.pt")
    refused(r"1\.pt: has no list of samples; its keys are model", read, tmp_path / "1.pt", chat)
    (tmp_path / "1.pt").write_bytes((tmp_path / "1.pt").read_bytes()[:-100])
    refused(r"1\.pt: is not a file of torch\.save", read, tmp_path / "1.pt", chat)
    for name, message in (("2.pt", "is not a file of torch.save"), ("batch.pkl", "is a pickle.*never read")):
        (tmp_path / name).write_bytes(b"\x80\x04K\x01.")
        refused(message, read, tmp_path / name, chat)


# --- rLLM


def episode(step: int, id: str, *trajectories: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "training_step": step, "epoch": 0, "episode_id": id, "session_id": None, "task": {"ground_truth": "2"},
        "task_hash": "ab", "is_correct": True, "termination_reason": "env_done", "metrics": {}, "metadata": {},
        "timing": {}, "trajectories": list(trajectories),
    } | fields  # fmt: skip


def solved(*answers: str, reward: float = 1.0) -> dict[str, Any]:
    steps = [
        {"chat_completions": [*USER, {"role": "assistant", "content": answer}], "model_response": answer, "reward": 0.0}
        for answer in answers
    ]
    return {"name": "solver", "uid": "u", "reward": reward, "num_steps": len(steps), "steps": steps}


def test_rllms_episodes_that_are_left_out(chat: Checkpoint, tmp_path: Path) -> None:
    shutil.copytree(LOGS / "rllm", tmp_path, dirs_exist_ok=True)
    path = tmp_path / "run" / "episodes" / "train_step_3_epoch_0" / "episode_hashab_idd_0.json"
    path.parent.mkdir()
    path.write_text(json.dumps(episode(3, "d_0", solved("#2", "#3"), solved("#4", reward=0.0))))
    refused(r"episode_hashab_idd_0\.json: row 0: a trajectory of 2 steps", read, tmp_path / "run", chat)
    # Of several trajectories the episode's word is nobody's.
    assert column(read(tmp_path / "run", chat, skip=("multi-turn",)), "outcome")[3:] == ["failure"]
    path.write_text(json.dumps(episode(3, "d_0", solved("#2"), termination_reason="error")))
    refused("the episode ended with error", read, tmp_path / "run", chat)


# --- Inspect


def inspect_samples() -> list[dict[str, Any]]:
    def one(id: int, epoch: int, answer: str, grade: Any, reason: str = "stop") -> dict[str, Any]:
        message = {"id": "x", "role": "assistant", "content": answer, "source": "generate", "model": "m"}
        return {
            "id": id, "epoch": epoch, "input": "1+1?", "target": "2", "error": None,
            "messages": [{**USER[0], "id": "y", "source": "input", "tool_call_id": None}, message],
            "output": {"model": "m", "choices": [{"message": message, "stop_reason": reason}]},
            "scores": {"match": {"value": grade, "answer": "2"}},
        }  # fmt: skip

    return [one(1, 1, "#2", "C"), one(1, 2, "1+1=3;#3", "I"), one(2, 1, "#2", "C", "max_tokens")]


@pytest.mark.parametrize("real", [True, False])
def test_inspect(chat: Checkpoint, monkeypatch: pytest.MonkeyPatch, real: bool) -> None:
    """The log is one that inspect_ai 0.3.285 wrote; where it is not installed, what it reads stands for it."""
    if real:
        pytest.importorskip("inspect_ai")
    else:
        samples = {(sample["id"], sample["epoch"]): sample for sample in inspect_samples()}
        spec = types.SimpleNamespace(eval=types.SimpleNamespace(model="hf/tiny", task="sums"))
        module = types.ModuleType("inspect_ai.log")
        monkeypatch.setattr(module, "read_eval_log", lambda path, header_only: spec, raising=False)
        summaries = [types.SimpleNamespace(id=id, epoch=epoch) for id, epoch in samples]
        monkeypatch.setattr(module, "read_eval_log_sample_summaries", lambda path: summaries, raising=False)
        dumped = lambda path, id, epoch, resolve_attachments: types.SimpleNamespace(  # noqa: E731
            model_dump=lambda mode, include: samples[id, epoch]
        )
        monkeypatch.setattr(module, "read_eval_log_sample", dumped, raising=False)
        monkeypatch.setitem(sys.modules, "inspect_ai", types.ModuleType("inspect_ai"))
        monkeypatch.setitem(sys.modules, "inspect_ai.log", module)
    with pytest.warns(UserWarning, match="1 prompts have several problem ids each, 2 in all"):
        found = read(LOGS / "inspect", chat)
    reads_as(found, [[*RIGHT, EOS], [*WRONG, EOS], RIGHT])
    holds(found, policy=["hf/tiny"] * 3, problem_id=["sums/1", "sums/1", "sums/2"])
    holds(found, finish_reason=["stop", "stop", "length"], outcome=["success", "failure", "success"], answer=["2"] * 3)
    holds(found, **{"reward/match": [1.0, 0.0, 1.0]})


def test_without_inspect_the_error_says_what_to_install(chat: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "inspect_ai.log", None)
    refused(r"sums\.eval: .*not installed.* pip install 'inspect_ai", read, LOGS / "inspect" / "sums.eval", chat)


# --- telling them apart, and logs that nobody is known to write


def test_a_row_of_tsaes_plain_columns_is_plain_whatever_else_it_has(tmp_path: Path) -> None:
    log = write(tmp_path / "mine.jsonl", {"prompt": "1", "response": "2", "completion": "2"})
    assert find_log(log, ImportConfig())[0].name == "plain"
    assert find_log(save(tmp_path / "mine.pt", sample(RIGHT)), ImportConfig())[0].name == "slime"
    (tmp_path / "rows.json").write_text("[1]")
    refused(r"row 0 is a JSON int, expected an object.*as JSON lines", find_log, tmp_path / "rows.json", ImportConfig())


def test_an_unknown_log_says_how_to_name_its_columns(
    chat: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mini = {"step": 1, "prompt": "1+1?", "completion": "#2", "reward": 1.0}
    log = write(tmp_path / "mini.jsonl", mini)
    with pytest.raises(TsaeError) as error:
        read(log, chat)
    said = str(error.value)
    assert re.search(r"no known log has the columns step, prompt, completion, reward; known are .*trl, verl", said)
    assert f"tsae rollouts import {log} --column response=completion. In Python" in said
    # The command that it shows is one that works.
    options = ["--column", "response=completion", "--checkpoint", chat.path, "--to", str(tmp_path / "r.parquet")]
    assert main(["rollouts", "import", str(log), *options]) in (None, 0)
    capsys.readouterr()
    assert column(Rollouts.read(tmp_path / "r.parquet"), "response_ids") == [RIGHT]
    refused(r"slime rollout data are \.pt files, and this file is not", read, log, chat, format="slime")
    for row, options_shown in (
        ({"question": "1?", "model output": "2", "score": 1},
         "--column prompt=question --column 'response=model output' --column reward=score"),
        ({"q": "1?", "a": "2"}, "--column prompt=NAME --column response=NAME"),
        ({"loss": 0.1}, "--column prompt=NAME --column response=NAME"),
    ):  # fmt: skip
        with pytest.raises(TsaeError) as error:
            read(write(tmp_path / "other.jsonl", row), chat)
        assert options_shown in str(error.value)


FLAT = [
    {"prompt_hash": "ab", "question": "1+1?", "ground_truth": "2", "model_output": text, "is_correct": right, "id": i}
    for i, (text, right) in enumerate((("#2", True), ("#3", False)))
]
BY_HAND: dict[str, tuple[list[dict[str, Any]], list[str], tuple[str, ...]]] = {
    "flat": ([{**row, "checkpoint": "step_100", "finish_reason": "stop"} for row in FLAT], ["step_100"] * 2,
             ("prompt=question", "response=model_output", "correct=is_correct", "answer=ground_truth",
              "problem_id=prompt_hash", "policy=checkpoint")),
    "text": ([{"hash": "x", "input_prompt": "1+1?", "predict": row["model_output"], "label": "2", "model": "m",
               "global_step": "global_step_3", "score": str(float(row["is_correct"]))} for row in FLAT],
             ["mine-00003"] * 2, ("prompt=input_prompt", "response=predict", "reward=score", "answer=label",
                                 "step=global_step")),
    "answers": ([{"problem": "1+1?", "answer": row["model_output"], "gold": "2", "passed": str(row["is_correct"]),
                  "example_id": 7, "completion_tokens": 2} for row in FLAT], ["unknown"] * 2,
                ("prompt=problem", "response=answer", "correct=passed", "answer=gold", "problem_id=example_id")),
    "total": ([{"query": "1+1?", "generated": row["model_output"], "accuracy_reward": int(row["is_correct"]),
                "format_reward": 0.5, "total_reward": 0.5 + row["is_correct"], "answer": "2"} for row in FLAT],
              ["unknown"] * 2, ("prompt=query", "response=generated", "reward=total_reward",
                                "correct=accuracy_reward")),
    "not the reference": ([{"problem": "1+1?", "answer": "2", "generations": row["model_output"],
                            "correct": "yes" if row["is_correct"] else "no"} for row in FLAT], ["unknown"] * 2,
                          ("prompt=problem", "response=generations")),
    "not the whole text": ([{"instruction": "1+1?", "input": "", "text": "1+1?" + row["model_output"], "target": "2",
                             "completion_text": row["model_output"], "reward_score": int(row["is_correct"])}
                            for row in FLAT], ["unknown"] * 2,
                           ("prompt=instruction", "response=completion_text", "reward=reward_score", "answer=target")),
    "several": ([{"query": "1+1?", "generated": row["model_output"], "accuracy_reward": float(row["is_correct"]),
                  "format_reward": 0.5} for row in FLAT], ["unknown"] * 2, ("prompt=query", "response=generated")),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_the_suggested_command_works_and_keeps_what_the_log_knows(name: str, chat: Checkpoint, tmp_path: Path) -> None:
    rows, policies, columns = BY_HAND[name]
    log = write(tmp_path / "mine" / "samples.jsonl", *rows)
    with pytest.raises(TsaeError, match=r"for example \(tried on 2 of its rows\): tsae rollouts import") as error:
        read(log, chat)
    _, _, *options = shlex.split(str(error.value).partition("rows): tsae ")[2].partition(". In Python")[0])
    assert tuple(option for option in options[1:] if "=" in option) == columns
    assert ("--rewards" in options) == (name == "several")
    said = ["rollouts", "import", *options, "--checkpoint", chat.path, "--to", str(tmp_path / "r.parquet")]
    assert main(said) in (None, 0)
    found = Rollouts.read(tmp_path / "r.parquet")
    assert [ids[:2] for ids in column(found, "response_ids")] == [RIGHT, [16, 3]]
    holds(found, outcome=["success", "failure"], policy=policies, answer=["" if name == "several" else "2"] * 2)
    assert len(set(column(found, "problem_id"))) == 1


def test_columns_are_named_one_by_one() -> None:
    assert name_columns(("response=a=b", "prompt=q")) == ColumnNames(prompt="q", response="a=b")
    for wrong, message in (
        (("answers=x",), "'answers' is none of prompt, response"),
        (("response",), "'response' is not of the form FIELD=NAME"),
        (("prompt=a", "prompt=b"), "'prompt' is named a second time"),
    ):
        refused(message, name_columns, wrong)


def test_a_table_with_columns_of_the_users_names_is_read(chat: Checkpoint) -> None:
    names = ColumnNames(prompt="q", response="text", reward="score")
    frame = pd.DataFrame({"q": [USER, USER], "text": ["#2", "1+1=3;#3"], "score": [1.0, 0.0], "step": [3, 4]})
    for run in ("mine", "../a/b"):  # a name is not a path
        found = Rollouts.read(frame, chat, ImportConfig(columns=names, run=run))
        reads_as(found, [RIGHT, WRONG])
        holds(found, policy=[f"{run}-00003", f"{run}-00004"], outcome=["success", "failure"])
    for bad in (frame.assign(q=[USER, "1+1?"]), {"q": ["\ud800", "1"], "text": ["#2", "#3"]}):
        refused(r"^the table: row \d: column 'q' cannot be read", Rollouts.read, bad, chat, ImportConfig(columns=names))


# --- beside a log


def test_a_trainers_log_counts_before_what_lies_beside_it(chat: Checkpoint, tmp_path: Path) -> None:
    """Evaluations and tensors are not even opened where there is a log of lines or tables."""
    shutil.copy(LOGS / "inspect" / "sums.eval", tmp_path / "sums.eval")
    (tmp_path / "0.pt").write_bytes(b"x")
    write(tmp_path / "completions.jsonl", swift(1))
    reads_as(read(tmp_path, chat), [RIGHT, WRONG])
    (tmp_path / "completions.jsonl").rename(tmp_path / "other.jsonl")
    reads_as(read(tmp_path, chat), [RIGHT, WRONG])
    (tmp_path / "other.jsonl").rename(tmp_path / "other.txt")
    reads_as(read(tmp_path / "other.txt", chat), [RIGHT, WRONG])
    refused(r"0\.pt: holds more than tensors", read, tmp_path, chat)
