"""Logs of every trainer: what is read off them, and what it is read as. tests/logs/README.md says what they are."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tsae
from support.builders import BOS, EOS
from support.logs import LOGS, column, holds, notes, read, refused, write
from tsae import Rollouts
from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.series import CheckpointSeries
from tsae.cli import main
from tsae.errors import TsaeError
from tsae.rollouts.config import ColumnNames, ImportConfig, LogFormat, name_columns
from tsae.rollouts.importing import Summary, import_log
from tsae.rollouts.known_logs import KNOWN, TELLS
from tsae.rollouts.log_detection import FORMATS, find_log
from tsae.rollouts.logs.entry import Entry
from tsae.rollouts.rewards import group_advantages

TRL = tsae.testbed.series_path() / "logs"
ASKED = [BOS, 16, 1, 10, 1, 13, EOS, BOS, 15]  # 1+1? in that template
PLAIN = [BOS, 1, 10, 1, 13]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def columns(rollouts: Rollouts, *names: str) -> list[tuple[Any, ...]]:
    return list(zip(*(rollouts.table[name].to_pylist() for name in names), strict=True))


# --- TRL, on the logs that GRPOTrainer wrote for the testbed


@pytest.mark.slow(ci=True)  # imports a whole log
def test_the_testbeds_own_log_comes_in_by_default(tmp_path: Path) -> None:
    """Everything is checked against TRL's Parquet itself."""
    folder = TRL / "medium" / "completions"
    summary = import_log(folder, tmp_path / "r.parquet", progress=False)
    found = Rollouts.read(tmp_path / "r.parquet")
    logged = pd.concat([pd.read_parquet(file) for file in sorted(folder.glob("*.parquet"))], ignore_index=True)
    right, ids = logged.correct.tolist(), [list(ids) for ids in logged.completion_ids]
    for name in ("problem_id", "advantage", "answer", "step"):
        assert column(found, name) == logged[name].tolist()
    prompts = [[BOS, *("0123456789+-*?".index(character) for character in prompt)] for prompt in logged.prompt]
    holds(found, prompt_ids=prompts, response_ids=ids, response=logged.completion.tolist(), reward=right)
    holds(found, outcome=np.where(logged.correct > 0, "success", "failure").tolist(), **{"reward/correct": right})
    holds(found, round_trip=[True] * len(logged))
    assert [r == "stop" for r in column(found, "finish_reason")] == [response[-1] == EOS for response in ids]
    assert summary.n_files == 7
    groups = logged.groupby(["step", "problem_id"]).correct
    assert summary.total["trajectories"] == len(logged)
    assert summary.total["problems"] == logged.problem_id.nunique()
    assert summary.total["groups"] == groups.ngroups
    assert summary.total["no_variance"] == (groups.nunique() == 1).sum()
    assert summary.total["success_rate"] == pytest.approx(logged.correct.mean())
    assert summary.total["not_round_tripping"] == 0
    by_step = logged.groupby("step").correct.mean()
    assert summary.table.success_rate.tolist() == pytest.approx(by_step.tolist())
    assert found.info["log"]["format"] == "TRL completions"


@pytest.mark.slow(ci=True)
def test_policies_are_the_checkpoints_that_sampled(tmp_path: Path) -> None:
    """Step 1 was sampled by the base itself, step 50 by 49 updates: checkpoint 50 is the nearest that was kept."""
    found = read(TRL)
    named = dict(columns(found, "step", "policy"))
    assert named[1] == "base"
    assert set(found.where(policy="base").table["step"].to_pylist()) == {1}
    assert len(found.where(policy="base")) == 3 * 256
    kept = {c.id for c in tsae.testbed.series()} - {"base"}
    assert set(found.policies) == kept | {"base"} | {
        f"{r}-{s:05d}" for r in ("easy", "medium", "hard") for s in (74, 124)
    }
    assert {step for policy, step in columns(found, "policy", "step") if policy == "hard-150"} == {150}
    assert re.search("^easy-025 and 11 more.*one update older", notes(found), re.MULTILINE)


def grpo(folder: Path, saved: Sequence[int], logged: Sequence[int]) -> Path:
    """A run that kept checkpoints of these steps, and logged 16 trajectories at those."""
    (folder / "completions").mkdir(parents=True, exist_ok=True)
    source = pq.read_table(TRL / "easy" / "completions" / "completions_00025.parquet")
    for step in logged:
        table = source.slice(16 * (step % 16), 16).set_column(0, "step", pa.array([step] * 16))
        pq.write_table(table, folder / "completions" / f"completions_{step:05d}.parquet")
    for step in saved:
        shutil.copytree(tsae.testbed.series_path() / "base", folder / f"checkpoint-{step}")
    return folder / "completions"


def test_weights_that_were_kept_exactly_are_preferred(tmp_path: Path) -> None:
    folder = grpo(tmp_path / "grpo", (10, 50, 52), (51, 52))
    found = Rollouts.read(tmp_path / "grpo")  # the checkpoints lie beside the log
    assert sorted(set(columns(found, "step", "policy"))) == [(51, "grpo-00050"), (52, "grpo-00052")]
    assert "stands in for the base" in notes(found)
    assert "\ngrpo-00052: " in notes(found)
    assert read(folder, tmp_path / "grpo" / "checkpoint-50").policies == ["grpo-00050", "grpo-00051"]
    assert read(folder, run="x").policies == ["x-00050", "x-00051"]
    grpo(tmp_path / "grpo", (), (11,))
    assert read(folder).policies == ["grpo-00010", "grpo-00050", "grpo-00052"]
    for name in ("completions_00001.parquet", "completions_00060.parquet"):
        (folder / name).touch()  # A run that was stopped may leave empty files.
    assert "2 files hold no trajectories: completions_00001.parquet" in str(read(folder).info["log"]["notes"])


@pytest.mark.parametrize(
    ("saved", "logged", "expected"),
    [
        # Every step kept, without the model that training started from: nothing else passes for it.
        ([1, 2, 3], [1, 2, 3], {1: "grpo-00000", 2: "grpo-00001", 3: "grpo-00002"}),
        # What step 2 logged was sampled by one update, what step 3 logged by checkpoint-2 itself.
        ([2, 4], [1, 2, 3, 4], {1: "grpo-00000", 2: "grpo-00001", 3: "grpo-00002", 4: "grpo-00004"}),
        ([2, 4], [2, 4], {2: "grpo-00002", 4: "grpo-00004"}),
        ([2, 4], [3], {3: "grpo-00002"}),
    ],
)
def test_an_id_is_one_policys(tmp_path: Path, saved: list[int], logged: list[int], expected: dict[int, str]) -> None:
    folder = grpo(tmp_path / "grpo", saved, logged)
    summary = import_log(tmp_path / "grpo", tmp_path / "r.parquet", progress=False)
    assert dict(columns(Rollouts.read(tmp_path / "r.parquet"), "step", "policy")) == expected
    assert dict(zip(summary.table.step, summary.table.policy, strict=True)) == expected
    late = [policy for step, policy in expected.items() if policy == f"grpo-{step:05d}"]
    notes = [note for note in summary.notes if "one update older" in note]
    assert [note.partition(":")[0].split(" and ")[0] for note in notes] == late[:1]
    # With the base before it, step 1 is the base's.
    base = CheckpointSeries.load(tsae.testbed.series_path() / "base", tmp_path / "grpo")
    with_base = dict(columns(read(folder, base), "step", "policy"))
    assert with_base == {step: "base" if step == 1 else name for step, name in expected.items()}


def without_ids(source: Path, to: Path) -> Path:
    to.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pq.read_table(source).drop_columns(["completion_ids"]), to)
    return to


def test_texts_alone_give_the_sampled_tokens_back_but_for_the_end(tmp_path: Path) -> None:
    """The oracle is the token ids that the same log has beside its texts."""
    log = without_ids(TRL / "hard/completions/completions_00001.parquet", tmp_path / "completions_00001.parquet")
    logged = read(TRL / "hard" / "completions" / log.name)
    base = tsae.testbed.series().base
    found = read(log, base)
    expected = [ids[:-1] if ids[-1] == EOS else ids for ids in logged.table["response_ids"].to_pylist()]
    assert found.table["response_ids"].to_pylist() == expected
    assert set(found.table["finish_reason"].to_pylist()) == {"unknown"}
    assert "no end token" in notes(found)
    limited = read(log, base, max_response_tokens=max(map(len, expected)))
    ended = [reason == "stop" for reason in limited.table["finish_reason"].to_pylist()]
    assert limited.table["response_ids"].to_pylist() == [
        [*ids, EOS] if end else ids for ids, end in zip(expected, ended, strict=True)
    ]
    assert sum(ended) == sum(len(ids) < max(map(len, expected)) for ids in expected)
    generous = read(log, base, max_response_tokens=1000)
    assert generous.table["response_ids"].to_pylist() == logged.table["response_ids"].to_pylist()


def test_what_is_right_has_to_be_said_where_there_are_several_rewards(chat: Checkpoint) -> None:
    refused(r"row 0: has the rewards digits, short.*--outcome", read, LOGS / "trl", chat)
    refused("no row has a reward 'format'; there are digits, short", read, LOGS / "trl", chat, outcome="format")
    refused("has no reward column format", read, LOGS / "trl", chat, rewards=("format",))


def test_columns_that_are_not_rewards_are_found_out_by_the_advantages(chat: Checkpoint, tmp_path: Path) -> None:
    """A number that a reward function logged stands where rewards stand."""
    source = LOGS / "trl" / "completions" / "completions_00001.parquet"
    table = pq.read_table(source)
    lengths = pa.array([float(len(ids)) for ids in table["completion_ids"].to_pylist()])
    log = tmp_path / source.name
    pq.write_table(table.add_column(table.column_names.index("short") + 1, "length", lengths), log)
    refused("advantages do not follow from the sum of digits, short, length", read, log, chat, outcome="digits")
    named = read(log, chat, rewards=("digits", "short"), outcome="digits")
    assert named.table["reward"].to_pylist() == read(source, chat, outcome="digits").table["reward"].to_pylist()


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_weights_of_rewards_are_found_out_by_the_advantages(chat: Checkpoint, tmp_path: Path, kind: Any) -> None:
    right, short = np.array([1.0, 0, 1, 0] * 2), np.array([0.5, 0.5, 0, 0] * 2)
    group = np.repeat([0, 1], 4)
    log = tmp_path / "completions_00001.parquet"
    for weight in (1.0, 3.0):
        frame = {"step": 1, "prompt": [f"{g}?" for g in group], "completion": [f"#{i}" for i in range(8)]}
        frame |= {"right": right, "short": short, "advantage": group_advantages(right + weight * short, group, kind)}
        pd.DataFrame(frame).to_parquet(log)
        if weight == 1.0:
            assert read(log, chat, outcome="right").table["reward"].to_pylist() == (right + short).tolist()
            continue
        refused("weights, which the log does not hold", read, log, chat, outcome="right")


# --- verl


def test_a_prompt_of_another_template_is_read_as_it_stands(chat: Checkpoint, llama: Path, tmp_path: Path) -> None:
    row = rows_of(LOGS / "verl" / "1.jsonl")[0]
    log = write(tmp_path / "1.jsonl", {**row, "input": "1+1?"})
    assert read(log, chat, prompt_format="plain").tokens(0)[0].tolist() == PLAIN
    # Without a template the tokenizer's own special tokens are all that was lost.
    assert read(log, Checkpoint("base", str(llama))).tokens(0)[0].tolist() == PLAIN


# --- every format's small log

EXPECTED, VARIANTS = (
    json.loads((LOGS / f"{name}.json").read_text(encoding="utf-8")) for name in ("expected", "variants")
)


def read_case(case: dict[str, Any], log: Path, checkpoint: Checkpoint) -> Rollouts:
    """Read a log with the options of a case; what it says was left out and noted was."""
    options = {
        name: tuple(given) if isinstance(given, list) else ColumnNames(**given) if isinstance(given, dict) else given
        for name, given in case["options"].items()
    }
    found = read(log, checkpoint, **options)
    assert found.info["log"]["skipped"] == case["skipped"]
    assert set(case["notes"]) <= set(found.info["log"]["notes"])
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_a_log_comes_in_as_it_was_sampled(name: str, chat: Checkpoint) -> None:
    """Column by column; other columns have no values."""
    case = EXPECTED[name]
    found = read_case(case, LOGS / case["log"], chat)
    held = {column: found.table[column].to_pylist() for column in found.table.column_names if column != "prompt"}
    assert {column: values for column, values in held.items() if any(v is not None for v in values)} == case["columns"]


@pytest.mark.parametrize("name", VARIANTS)
def test_what_trainers_write_too_is_read(name: str, chat: Checkpoint, tmp_path: Path) -> None:
    """Other versions, several turns, odd rewards: some columns of each."""
    case = VARIANTS[name]
    holds(read_case(case, write(tmp_path / "run" / case["file"], *case["rows"]), chat), **case["columns"])


# --- rows that are refused, of every trainer

NEMO, TRACE, SWIFT = (
    "nemo-rl/train_data_step1.jsonl",
    "prime-rl/rollouts/step_1/train/effective/traces.jsonl",
    ("ms-swift/v0-run/completions.jsonl"),
)
RESULT, RATES = "prime-rl-0.6/run/rollouts/step_1/train_rollouts.jsonl", "open-r1/pass_rates.jsonl"
SAYS, IMAGE = {"role": "assistant", "content": "#2"}, [{"type": "image_url"}]
LM_EVAL = {"doc_id": 0, "doc": {}, "target": "2", "arguments": {"gen_args_0": {"arg_0": "1+1?"}},
           "resps": [["#2", "#3"]], "filtered_resps": ["2"], "metrics": ["exact_match"], "exact_match": 1}  # fmt: skip
ANSWERS = {"prompt": "1+1?", "response": ["#2", "#3"], "reward": [1.0, 0.0]}
MANY = {"question": "1+1?", "answer": "2", "responses": ["#2", "#3"], "rewards": [1.0, 0.0], "scores": 0.5}
ASKS = [{"role": "user", "content": "1+1?"}]
TRL_ROW = {"step": 1, "prompt": ASKS, "completion": [SAYS], "right": 1.0, "advantage": 0.0}
OWN = {
    "samples_x.jsonl": [LM_EVAL], "answers.jsonl": [ANSWERS], "many.jsonl": [MANY], "trl.jsonl": [TRL_ROW, {**TRL_ROW}],
    "dialogue.jsonl": [{"messages": [*ASKS, SAYS], "reward": 1.0}], "asked.jsonl": [{"prompt": ASKS, "response": "#2"}],
}  # fmt: skip
BAD: list[tuple[str, Any, str]] = [
    (NEMO, {"token_loss_mask": [[0] * 16]}, "no token is marked as sampled"),
    (NEMO, {"token_loss_mask": [[1, 0, 1]]}, "9 token ids but 3 mask values"),
    (NEMO, {"token_ids": [["a"] * 16]}, "token_ids is .*expected a list of token ids"),
    (NEMO, {"token_ids": [[1, 2, 99] + [0] * 13]}, "token id 99; the tokenizer of .* has 0 to 19"),
    (NEMO, {"rewards": [float("nan")]}, "has no reward"),
    (NEMO, {"rewards": [float("inf")]}, "rewards is inf"),
    (NEMO, {"rewards": None}, "has no rewards"),
    (NEMO, {"advantages": [[float("inf")] + [0.5] * 15]}, "advantages is inf, expected a finite number"),
    (NEMO, {"advantages": [[0.5] * 3]}, "advantages is neither a number nor one a token"),
    (NEMO, lambda row: row.pop("token_ids"), "an early NeMo-RL"),
    (TRACE, lambda t: t["nodes"][1].update(parent=5), "parent does not come before"),
    (TRACE, lambda t: t["nodes"].append({**t["nodes"][1], "parent": 0}), "branch into several"),
    (TRACE, lambda t: [n.update(token_ids=[], mask=[]) for n in t["nodes"]], "no token ids"),
    (TRACE, {"rewards": {"correct": None}}, "has no reward"),
    (TRACE, {"rewards": {"correct": {"score": "x"}}}, "correct is 'x'"),
    (TRACE, {"nodes": "x"}, "not built as its trainer writes it"),
    (TRACE, {"id": "trace-2"}, "comes here again"),
    ("prime-rl-tokens/token_exports/step_1/rank_0.jsonl", {"schema_version": 2}, "schema 2 is unknown"),
    (RATES, {"pass_rate_rewards": [1.0, 0.0]}, "3 values in pass_rate_generations but 2 in pass_rate_rewards"),
    (RATES, {"pass_rate_rewards": [1.0, 0.0, None]}, "has no reward"),
    ("open-instruct/tiny_rollouts_000000.jsonl", {"request_info": {"tool_calleds": True}}, "a tool's output"),
    ("verl/1.jsonl", {"input": "1+1?"}, "the prompt was logged without special tokens"),
    ("verl/1.jsonl", {"num_turns": 4}, "ids and masks, which no setting of verl writes, or leave .*--skip multi"),
    ("verl/1.jsonl", {"score": float("nan")}, "has no reward"),
    (SWIFT, {"completion": ["#2"]}, "2 values in step but 1 in completion"),
    (SWIFT, {"step": "1"}, "2 values in .* but a str in step"),
    (SWIFT, {"prompt": ["[151655 * 64]?"] * 2}, "has an image in it"),
    (SWIFT, {"step": ["x", "x"]}, "step is 'x', expected a whole number"),
    (SWIFT, {"Accuracy": [1.0, float("nan")]}, "trajectory 2: has no reward"),
    ("areal/trial/rollout/0/2.jsonl", {"tail_version": None}, "has no tail_version"),
    ("roll/rollout_dump_data.step_0.jsonl", {}, "trajectory 2: the response is empty"),
    ("skyrl/run/dumped_evals/global_step_5_evals/gsm8k.jsonl", {"score": [float("nan"), None]}, "has no reward"),
    (RESULT, {"completion": [SAYS, {"role": "user", "content": "?"}, SAYS]}, "its answer is 3 messages, which"),
    (RESULT, {"completion": [{**SAYS, "reasoning_content": "1+1"}]}, "its answer is 1 message with reasoning_content"),
    (RESULT, {"completion": [{**SAYS, "content": IMAGE}]}, "its answer is 1 message"),
    (RESULT, {"completion": None}, "has no answer"),
    (RESULT, {"error": {"error": "E"}}, "the rollout ended with an error"),
    (RESULT, {"tool_defs": [{"name": "t"}]}, "its prompt had tools"),
    (RESULT, {"prompt": [{"role": "user", "content": IMAGE}]}, "a message of its prompt has more than"),
    ("atropos/groups.jsonl", {"scores": [1.0]}, "2 values in tokens but 1 in scores"),
    ("atropos/groups.jsonl", {"tokens": [], "masks": [], "scores": []}, "tokens holds no response"),
    ("samples_x.jsonl", {}, "trajectory 2: has no reward"),
    ("samples_x.jsonl", {"resps": [[[-1.5, False]]]}, "log-probabilities of choices.*--skip empty"),
    ("answers.jsonl", {"reward": [1.0]}, "2 values in response but 1 in reward"),
    ("answers.jsonl", {"reward": 0.5}, "2 values in response but a float in reward"),
    ("many.jsonl", {"rewards": [1.0]}, "2 values in responses but 1 in rewards"),
    ("many.jsonl", {"scores": [1.0] * 3}, "2 values in responses but 3 in scores"),
    ("trl.jsonl", {"completion": [SAYS, {"role": "tool", "content": "5"}]}, "is 2 messages"),
    ("trl.jsonl", {"right": None}, "has no reward.*--skip unscored"),
    ("dialogue.jsonl", {"messages": [*ASKS, {**SAYS, "content": "", "tool_calls": [{}]}, SAYS]}, "--skip multi-turn"),
    ("dialogue.jsonl", {"messages": [*ASKS, SAYS, *ASKS, SAYS]}, "several turns of the assistant.*column response, if"),
    ("dialogue.jsonl", {"tools": [{}]}, "its prompt had tools.*--skip multi-turn"),
    *(
        ("asked.jsonl", {"prompt": [{"role": "user", "content": held}]}, f"from 'user' holds {told}")
        for held, told in (
            (IMAGE, "a part of type image_url"),
            (None, "NoneType"),
            (7, "int"),
            ([{"type": "text"}], "list"),
        )
    ),
    # An object of two keys is not taken for two responses.
    ("atropos/groups.jsonl", {"tokens": {"a": [1], "b": [2]}}, "tokens is not a list of responses"),
]
"""The first row of a shipped log or an own one, what is changed in it, and the message. It then comes last."""


@pytest.mark.parametrize(("name", "change", "message"), BAD)
def test_a_bad_row_is_named_and_left_out_where_it_may_be(
    name: str, change: Any, message: str, chat: Checkpoint, tmp_path: Path
) -> None:
    bad, *good = copy.deepcopy(OWN[name]) if name in OWN else rows_of(LOGS / name)
    change(bad) if callable(change) else bad.update(change)
    log, config = write(tmp_path / name, *good, bad), {"outcome": "correct"} if name == TRACE else {}
    with pytest.raises(TsaeError, match=message) as error:
        read(log, chat, **config)
    assert f"{log}:{len(good) + 1}" in str(error.value)
    if good and (kind := re.search(r"--skip ([\w-]+)", str(error.value))):
        assert read(log, chat, skip=(kind[1],), **config).info["log"]["skipped"] == {kind[1]: 1}


# --- the others


def test_a_resumed_open_instruct_run_logs_steps_twice(chat: Checkpoint, tmp_path: Path) -> None:
    rows = [
        row for shard in ("00", "01") for row in rows_of(LOGS / "open-instruct" / f"tiny_rollouts_0000{shard}.jsonl")
    ]
    again = [{**row, "reward": 0.0, "advantage": 0.0} for row in rows if row["step"] == 2]
    log = write(tmp_path / "tiny_rollouts_000000.jsonl", *(rows + again))
    refused(r"000000\.jsonl:9: the trajectory of .*000000\.jsonl:5 comes here again", read, log, chat)
    found = read(log, chat, skip=("repeated",))
    assert found.table["reward"].to_pylist() == [10.0, 0.0, 10.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert found.info["log"]["skipped"] == {"repeated": 4}


def test_of_several_policies_of_a_step_the_newest_passes_for_its_checkpoint(chat: Checkpoint, tmp_path: Path) -> None:
    """Asynchronous sampling: step 4 trains on responses of 1, 3, 2 and of nobody knows how many updates."""
    (row,) = rows_of(LOGS / "prime-rl/rollouts/step_1/train/effective/traces.jsonl")[:1]
    rows = [{**row, "id": f"t{i}", "policy_version": version} for i, version in enumerate((1, 3, 2, None))]
    log = write(tmp_path / "mine" / "rollouts" / "step_4" / "train" / "effective" / "traces.jsonl", *rows)
    for step in (2, 4):
        shutil.copytree(chat.path, tmp_path / "mine" / f"checkpoint-{step}")
    found = read(log, CheckpointSeries.load(chat.path, tmp_path / "mine"), outcome="correct")
    assert found.table["policy"].to_pylist() == ["mine-00001", "mine-00004", "mine-00002", "mine-step00004"]
    assert re.search("^mine-00004: .*at least one update", notes(found), re.MULTILINE)
    alone = read(log, chat, outcome="correct")
    assert alone.table["policy"].to_pylist() == ["mine-00001", "mine-00003", "mine-00002", "mine-step00004"]


def test_prime_rls_subsets_are_not_mixed(chat: Checkpoint) -> None:
    with pytest.raises(TsaeError, match=r"all/traces\.jsonl:2: the rollout ended with an error.*--skip errored"):
        read(LOGS / "prime-rl", chat, outcome="correct", subset="train/all")
    every = read(LOGS / "prime-rl", chat, outcome="correct", subset="train/all", skip=("errored",))
    assert len(every) == 2
    refused("holds no eval/all, but train/all, train/effective", read, LOGS / "prime-rl", chat, subset="eval/all")


# --- telling them apart


FOLDERS = sorted(path.name for path in LOGS.iterdir() if path.is_dir())
FORMAT_OF = {name: name for name in FOLDERS} | {
    "prime-rl-stream": "prime-rl", "prime-rl-0.6": "verifiers", "openr1-math": "open-r1",
    "ms-swift-megatron": "ms-swift", "ms-swift-ray": "ms-swift",
}  # fmt: skip


@pytest.mark.parametrize("folder", FOLDERS)
def test_formats_are_told_by_name_and_by_columns_alone(folder: str, tmp_path: Path) -> None:
    if folder == "inspect":
        pytest.importorskip("inspect_ai")
    form, files, _ = find_log(LOGS / folder, ImportConfig())
    assert form.name == FORMAT_OF[folder]
    renamed = tmp_path / f"somebody's{files[0].path.suffix}"
    shutil.copy(files[0].path, renamed)
    assert find_log(renamed, ImportConfig())[0].name == FORMAT_OF[folder]
    assert find_log(LOGS / folder, ImportConfig(format=form.name))[1] == files


def test_what_is_ambiguous_lists_its_candidates(chat: Checkpoint, tmp_path: Path) -> None:
    for folder in ("verl", "nemo-rl"):
        shutil.copytree(LOGS / folder, tmp_path / "mixed" / folder)
    with pytest.raises(TsaeError, match=r"several formats: verl \(1\.jsonl, …\); nemo-rl \(train_data_step1") as error:
        read(tmp_path / "mixed", chat)
    assert "--format verl or nemo-rl" in str(error.value)
    assert len(read(tmp_path / "mixed", chat, format="verl")) == 6
    both = write(tmp_path / "both.jsonl", {"prompt": "1+1?", "response": "#2", "generations": ["#2"]})
    refused(r"several formats: open-r1 .*; plain", read, both, chat)
    assert read(both, chat, format="plain").table["response"].to_pylist() == ["#2"]
    odd = write(tmp_path / "odd" / "a.jsonl", {"prompt": "1+1?", "response": "#2"})
    write(odd.with_name("b.jsonl"), {"loss": 0.1})
    refused(r"b\.jsonl: has not the columns of a plain log.*its columns are loss", read, tmp_path / "odd", chat)
    refused("no known log has the columns loss; known are tsae, trl, verl", read, odd.with_name("b.jsonl"), chat)
    refused(r"b\.jsonl:1: has no score; its columns are loss", read, odd.with_name("b.jsonl"), chat, format="verl")


def test_other_files_beside_a_log_are_passed_over(chat: Checkpoint, tmp_path: Path) -> None:
    shutil.copytree(LOGS / "verl", tmp_path / "dump")
    write(tmp_path / "dump" / "metrics.jsonl", {"loss": 0.1})
    write(tmp_path / "dump" / "checkpoint-5" / "9.jsonl", {"loss": 0.1})
    write(tmp_path / "dump" / ".cache" / "9.jsonl", {"loss": 0.1})
    (tmp_path / "dump" / "notes.txt").write_text("x")
    (tmp_path / "dump" / "3.jsonl").write_text("")  # a step being written
    assert len(read(tmp_path / "dump", chat)) == 6


def test_steps_that_do_not_fit_their_files(chat: Checkpoint, tmp_path: Path) -> None:
    rows = rows_of(LOGS / "verl" / "1.jsonl")
    refused(r"7\.jsonl:1: is of step 1 in a file of step 7", read, write(tmp_path / "a" / "7.jsonl", *rows), chat)
    for i, name in enumerate(("a", "b")):
        write(tmp_path / "runs" / name / "1.jsonl", *rows[i:])
    message = "step 1 of run ours is here and in .* if the later one resumed the other, --skip repeated"
    refused(message, read, tmp_path / "runs", chat, run="ours")


@pytest.mark.parametrize(("form", "name"), [("nemo-rl", "train_data_step{}.jsonl"), ("verl", "{}.jsonl")])
def test_of_two_folders_of_a_resumed_run_the_later_counts(
    chat: Checkpoint, tmp_path: Path, form: str, name: str
) -> None:
    """NeMo-RL begins a folder at every start: the tenth went on from step 1, so step 3 of the ninth is lost as well."""
    for folder, steps in (("exp_009", (1, 2, 3)), ("exp_010", (2, 4))):
        for step in steps:
            (tmp_path / "logs" / folder).mkdir(parents=True, exist_ok=True)
            text = (LOGS / form / name.format(1)).read_text().replace('"step": 1', f'"step": {step}')
            (tmp_path / "logs" / folder / name.format(step)).write_text(text)
    found = read(tmp_path / "logs", chat, skip=("repeated",), run="ours")
    assert found.frame.step.value_counts().to_dict() == dict.fromkeys(
        (1, 2, 4), len(rows_of(LOGS / form / name.format(1)))
    )
    # Folders that share no step are read whole, whatever their names.
    (tmp_path / "logs" / "exp_009").rename(tmp_path / "logs" / "exp_011")
    (tmp_path / "logs" / "exp_011" / name.format(2)).unlink()
    assert set(read(tmp_path / "logs", chat, skip=("repeated",), run="ours").frame.step) == {1, 2, 3, 4}
    assert any(note.endswith("replaces their steps: 2") for note in found.info["log"]["notes"])


@pytest.mark.parametrize(
    ("files", "policies", "note"),
    [
        ("A/seed0/a.jsonl B/seed0/a.jsonl", ["A/seed0-00001", "B/seed0-00001"], "several runs are called seed0, and"),
        ("exp_001/a.jsonl exp_2/a.jsonl", ["exp_001-00001", "exp_2-00001"], ""),
        ("model1/1.json model2/1.json", ["model1", "model2"], "no policy in the log: it is named after its run"),
        ("a/train.jsonl a/eval.jsonl", ["a-00001"], "1 files are by their names of an evaluation, beside others"),
        ("a/data/train-00000.jsonl a/data/test-00000.jsonl", ["data-00001"], r"stay apart: .* as a/data/test-00000\)"),
        ("a/train/0.jsonl a/dev/0.jsonl", ["a-00001"], "1 files are by their names of an evaluation"),
        ("a/train_test.jsonl a/test.jsonl", ["a-00001"], ""),
    ],
)
def test_runs_and_splits_stay_apart(
    files: str, policies: list[str], note: str, chat: Checkpoint, tmp_path: Path
) -> None:
    for i, name in enumerate(files.split()):
        row = {"prompt": "1+1?", "response": f"#{i}", "reward": 1.0} | ({} if name.endswith(".json") else {"step": 1})
        write(tmp_path / "all" / name, row if "step" in row else json.dumps([row]))
    found = read(tmp_path / "all", chat)
    assert found.policies == policies
    assert re.search(note, notes(found))


def test_verls_validations_are_told_by_their_folders(chat: Checkpoint, tmp_path: Path) -> None:
    row, told = rows_of(LOGS / "verl" / "1.jsonl")[0], "evals valid validations tests dev aime_val"
    for name in ("rollout_data", *told.split()):
        write(tmp_path / "run" / name / "1.jsonl", row)
    found = read(tmp_path / "run", chat)
    assert len(found) == 1
    folders = ", ".join(sorted(told.split()))
    assert f"6 files of {folders} are a validation's and stay apart: give that folder to read them" in notes(found)
    # A run may be called a test, too: validations have a column reward.
    assert read(write(tmp_path / "qwen_test" / "1.jsonl", row), chat).policies == ["qwen_test-00000"]
    assert read(write(tmp_path / "aime_test" / "1.jsonl", row | {"reward": 1.0}), chat).policies == ["aime_test-00001"]
    assert read(tmp_path / "run" / "evals", chat).policies == ["evals-00001"]


def test_a_step_that_a_file_goes_back_to_is_named(chat: Checkpoint, tmp_path: Path) -> None:
    def said(*held: tuple[int, int]) -> bool:
        rows = [
            {"prompt": f"{q}?", "response": f"#{i}", "reward": 1.0, "step": step} for i, (step, q) in enumerate(held)
        ]
        return "log.jsonl goes back to step 2 and has groups" in notes(read(write(tmp_path / "log.jsonl", *rows), chat))

    assert said((1, 1), (2, 1), (3, 1), (2, 1), (3, 1), (4, 1))
    assert not said((1, 1), (2, 1), (3, 1), (2, 2), (3, 2), (4, 2))  # by problem
    assert not said((3, 1), (2, 1), (3, 1), (2, 1), (3, 1), (2, 1))  # shuffled


def test_the_only_run_of_a_series_is_taken_for_the_log(tmp_path: Path) -> None:
    series = CheckpointSeries.load(tsae.testbed.series_path()).select(["hard-025", "hard-150"])
    log = tmp_path / "dump" / "completions_00025.parquet"
    log.parent.mkdir()
    shutil.copy(TRL / "hard" / "completions" / log.name, log)
    found = read(log, series)
    assert found.policies == ["hard-025"]
    assert "taken for the log of run hard" in notes(found)


# --- columns by name, in trainers' logs too


def test_extras_of_a_trl_log_may_have_other_names(tmp_path: Path) -> None:
    table = pq.read_table(TRL / "easy" / "completions" / "completions_00025.parquet")
    names = {"problem_id": "uid", "answer": "truth", "completion_ids": "tokens"}
    log = tmp_path / "completions_00025.parquet"
    pq.write_table(table.rename_columns([names.get(name, name) for name in table.column_names]), log)
    columns_ = ColumnNames(problem_id="uid", answer="truth", response_ids="tokens")
    found = read(log, tsae.testbed.series(), columns=columns_)
    expected = read(TRL / "easy" / "completions" / log.name, tsae.testbed.series(), run=tmp_path.name)
    for name in ("problem_id", "answer", "response_ids"):
        assert found.table[name].equals(expected.table[name])


def test_a_summary_is_readable(tmp_path: Path) -> None:
    summary = import_log(TRL / "hard", tmp_path / "r.parquet", progress=False)
    assert isinstance(summary, Summary)
    lines = str(summary).splitlines()
    assert lines[0] == "TRL completions: 7 files, 7 steps from 1 to 150"
    names = "policy step trajectories problems success groups no variance retokenised not round-tripping"
    assert " ".join(lines[1].split()) == names
    assert len(lines[2:10]) == 8
    assert lines[9].split()[:3] == ["all", "1,792", str(summary.total["problems"])]
    assert {len(line) for line in lines[1:10]} == {len(lines[1])}
    many = Summary("x", 1, pd.concat([summary.table] * 10, ignore_index=True), summary.total, {"empty": 3}, ("so",))
    assert len(str(many).splitlines()) == 2 + 25 + 1 + 2


def test_a_batch_that_several_steps_trained_on_counts_once(tmp_path: Path) -> None:
    source = TRL / "hard" / "completions" / "completions_00025.parquet"
    table = pq.read_table(source)
    for step in (25, 26, 27):
        again = table.set_column(0, "step", pa.array([step] * len(table)))
        other = again.take(pa.array(np.arange(len(table))[::-1])) if step == 27 else again
        pq.write_table(other, tmp_path / f"completions_{step:05d}.parquet")
    found = read(tmp_path, tsae.testbed.series())
    assert sorted(set(found.table["step"].to_pylist())) == [25, 27]
    assert found.info["log"]["skipped"] == {"repeated": 256}


# --- logs that trainers' own code wrote, each beside what was really sampled. Skipped where that folder is missing

WRITTEN = Path(__file__).resolve().parents[4] / "shared" / "data" / "trainer-logs"
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
    "areal": ("areal/run", {}, set()),
    # Rewards and advantages are their own.
    **{name: (f"{name}/run", {}, {"reward", "advantage"}) for name in ("swift", "slime", "prime06", "roll")},
}
# Logs of samples of AReaL's: (step of the log, updates, step in the truth of AReaL's), first responses to a problem.
OF_AREAL = {
    "swift": ([(1, 0, 1), (2, 1, 2)], 4), "slime": ([(0, 0, 1)], 4), "prime06": ([(1, 0, 1), (2, 1, 2)], 4),
    "roll": ([(0, 0, 0), (1, 1, 1)], 8),
}  # fmt: skip
LATEST = ("trl_1.16.0_conv", "verl090_dapo", "oi_HEAD", "nemo_grpo", "prime_v0.8.0", "prime_tok_HEAD", "openr1nan")
"""One of every trainer is in the fast tests."""


def sampled(log: Path) -> list[dict[str, Any]]:
    """What was sampled, in the order of the log."""
    truth = log.with_name(f"{log.name}.truth.jsonl")
    if log.parent.name in OF_AREAL:
        steps, n = OF_AREAL[log.parent.name]
        every = rows_of(WRITTEN / "areal" / "run.truth.jsonl")
        held = [(s, u, x) for s, u, where in steps for x in every if x["step"] == where and x["k"] < n]
        return [{**x, "step": s, "policy": f"run-{u:05d}" if u else "base"} for s, u, x in held]
    if truth.is_file():
        return rows_of(truth)
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
    log = WRITTEN / folder
    if not log.is_dir():
        pytest.skip("shared/data/trainer-logs is not here")
    # A log without rewards leaves none out for lack of them.
    skip = SKIP[:1] if "outcome" in untold else SKIP
    checkpoints = WRITTEN / ("run_q3/base" if name == "trl_q3" else "run")
    config = ImportConfig(skip=skip, run="run" if name.startswith("trl") else None, **options)
    summary = import_log(log, tmp_path / "r.parquet", checkpoints, config, progress=False)
    found, wrong = Rollouts.read(tmp_path / "r.parquet").table.to_pylist(), Counter[str]()
    told = sampled(log)
    # AReaL's log has lines twice, its truth has not.
    assert len(found) + sum(n for kind, n in summary.skipped.items() if kind != "repeated") == len(told)
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
    log = WRITTEN.parent / "logs-of-users" / name / "run"
    if not log.is_dir():
        pytest.skip("shared/data/logs-of-users is not here")
    options, n = USERS[name]
    import_log(log, tmp_path / "r.parquet", WRITTEN / "run", ImportConfig(run="run", **options), progress=False)
    found = Rollouts.read(tmp_path / "r.parquet").table.to_pylist()
    assert len(found) == n
    told = sampled(log) if n > 1 else []
    for row, x in zip(found, told, strict=n > 1):
        assert row["prompt_ids"] == x["prompt_ids"]
        assert core(row["response_ids"]) == core(x["response_ids"]) or row["response"] == x["text"]
        assert (row["reward"], row["outcome"]) == (x["score"], "success" if x["right"] else "failure")
    if not told:
        expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        tokenizer = Checkpoint("base", str(WRITTEN / "run" / "base")).load_tokenizer()
        assert found[0]["prompt_ids"] == tokenizer(expected, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", ["verl_mt", "verl_nan"])
def test_tools_turns_are_counted_and_left_out(name: str, tmp_path: Path) -> None:
    log = WRITTEN / name / "run" / "rollout_data"
    if not log.is_dir():
        pytest.skip("shared/data/trainer-logs is not here")
    config = ImportConfig(skip=("multi-turn",))
    with pytest.raises(Exception, match="holds no trajectories but those left out: 3 multi-turn"):
        import_log(log, tmp_path / "r.parquet", WRITTEN / "run", config, progress=False)


# --- what is said of trainers' logs: in the command, in the documentation and in the readers alike

PAGE = Path(__file__).parents[3] / "docs" / "logs.md"


def test_every_format_is_described() -> None:
    names = [form.name for form in FORMATS]
    assert [name for known in KNOWN for name in known.formats] == names
    assert sorted(get_args(LogFormat)) == sorted(["auto", *names])  # what --format takes


def test_the_documentations_tables_say_what_the_command_says() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows, tells = {}, {}
    for known in KNOWN:
        names = ", ".join(known.formats)
        rows[known.trainer] = (known.trainer, names, known.versions, known.setting, known.lacks)
        tells[names] = (names, *(known.tells.get(name, "–") for name in TELLS))
    for cells, head in ((rows, "--- | " * 5), (tells, "--- | " * (1 + len(TELLS)))):
        lines = [f"| {' | '.join(row)} |".replace("|  |", "| |").replace("|  |", "| |") for row in cells.values()]
        found = page.partition(f"\n| {head.strip()}\n")[2].partition("\n\n")[0].splitlines()
        assert len(found) > 10
        assert lines == found
    assert f"\n| `--format` | {' | '.join(TELLS)} |\n" in page


def test_the_command_names_every_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    main(["rollouts", "formats"])
    said = " ".join(capsys.readouterr().out.split())
    for known in KNOWN:
        assert f"{known.trainer} ({known.versions}): --format {', '.join(known.formats)}" in said
        assert f"switch on: {known.setting}" in said or not known.setting
        assert f"lacks: {known.lacks}" in said or not known.lacks


@pytest.mark.parametrize("folder", FOLDERS)
def test_logs_tell_what_is_said_of_them(folder: str) -> None:
    if folder == "inspect":
        pytest.importorskip("inspect_ai")
    form, files, _ = find_log(LOGS / folder, ImportConfig())
    found: dict[str, set[bool]] = {name: set() for name in TELLS}
    for file in files:
        for entry in form.read(file, ImportConfig()):
            if isinstance(entry, Entry):
                ends = entry.response_ids is not None or entry.finish_reason is not None or entry.response_rendered
                told = (
                    *(entry.prompt_ids is not None, entry.response_ids is not None, entry.logprobs is not None),
                    *(entry.advantage is not None, ends, entry.answer != ""),
                    *(entry.step is not None or file.step is not None, entry.updates is not None),
                )
                for name, there in zip(TELLS, told, strict=True):
                    found[name].add(there)
    (known,) = [known for known in KNOWN if form.name in known.formats]
    for name, there in found.items():
        when = known.tells.get(name)
        assert there == {True} if when == "yes" else there == {False} or when is not None, (name, when, there)
