"""Reading logs: columns by name, what is right, bad input, memory, and the command line."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tsae
from support.builders import BOS, SHARED, make_rollouts, save_model
from support.checkpoints import TEMPLATES, make_tokenizer
from support.logs import column, holds, read, refused, write
from tsae.checkpoints.loading import Checkpoint
from tsae.cli import main
from tsae.errors import TsaeError
from tsae.rollouts.behaviours import with_behaviours
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.importing import import_log
from tsae.rollouts.logs import import_parts
from tsae.rollouts.logs.tokens import Encoder
from tsae.rollouts.problems import tokenize
from tsae.rollouts.rewards import find_verifier, outcome_reward
from tsae.rollouts.table import Rollouts

TEMPLATE = "{% for m in messages %}#{{ m['content'] }}={% endfor %}{% if add_generation_prompt %};{% endif %}"
ROW = {"prompt": "1+1?", "response": "#2", "correct": True, "policy": "m1", "problem_id": "a", "answer": "2"}
BARE = {"prompt": "1+1?", "response": "#2", "answer": "2"}
IDS = {"prompt_ids": [BOS, 1, 10, 1, 13], "response_ids": [16, 2]}


# --- columns by name


def test_a_log_is_tokenised(policy: Checkpoint, tmp_path: Path) -> None:
    rows = [ROW, {**ROW, "correct": False, "response": "1+1=3;#3", "policy": None, "level": 4}]
    found = read(write(tmp_path / "log.jsonl", *rows), policy)
    records = found.table.to_pylist()
    assert records[0]["prompt_ids"] == [BOS, 1, 10, 1, 13]
    assert records[0]["response_ids"] == [16, 2]
    holds(found, outcome=["success", "failure"], reward=[1.0, 0.0], policy=["m1", "unknown"], level=[None, "4"])
    holds(found, finish_reason=["unknown", "unknown"], round_trip=[False, False])
    assert found.info["tokenizer"]
    frame = pd.DataFrame([{**row, "level": level} for row, level in zip(rows, (None, "4"), strict=True)])
    frame.to_parquet(tmp_path / "log.parquet")
    again = read(tmp_path / "log.parquet", policy)
    assert again.table.equals(found.table)
    assert again.fingerprint == found.fingerprint


def test_further_columns_are_kept_where_they_are_named(
    policy: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[dict[str, Any]] = [
        {**BARE, "required_steps": 2, "share": 1, "easy": True, "topic": "sum", "mixed": 1, "tags": ["a", "b"]},
        {**BARE, "share": 0.5, "easy": False, "topic": None, "mixed": "two", "tags": {"x": 1}, "huge": 1 << 70},
        {**BARE, "response": "1+1=2;#2", "required_steps": 1, "topic": "“é”", "more": 3},
    ]
    names = ("required_steps", "share", "easy", "topic", "mixed", "tags", "huge", "more")
    found = read(write(tmp_path / "log.jsonl", *rows), policy, keep_columns=names)
    expected = {
        "required_steps": ("int64", [2, None, 1]),
        "share": ("double", [1.0, 0.5, None]),
        "easy": ("bool", [True, False, None]),
        "topic": ("string", ["sum", None, "“é”"]),
        "mixed": ("string", ["1", "two", None]),
        "tags": ("string", ['["a", "b"]', '{"x": 1}', None]),
        "huge": ("string", [None, str(1 << 70), None]),
        "more": ("int64", [None, None, 3]),
    }
    for name, (kind, values) in expected.items():
        assert str(found.table[f"extra/{name}"].type) == kind, name
        assert column(found, f"extra/{name}") == values
    # Of parts, each of which has some of the values, the whole has the types.
    with monkeypatch.context() as patch:
        patch.setattr(import_parts, "PART_BYTES", 1)
        assert read(tmp_path / "log.jsonl", policy, keep_columns=names).table.equals(found.table)
    plain = read(tmp_path / "log.jsonl", policy)
    assert plain.fingerprint == found.fingerprint
    assert not [name for name in plain.table.column_names if name.startswith("extra/")]
    # pandas writes NaN where a number is missing.
    pd.DataFrame(rows)[["prompt", "response", "answer", "required_steps"]].to_parquet(tmp_path / "log.parquet")
    again = read(tmp_path / "log.parquet", policy, keep_columns=("required_steps",))
    assert column(again, "extra/required_steps") == [2.0, None, 1.0]
    # Two operations were needed for the first, one for the third; neither and one are written out.
    assert column(with_behaviours(found), "skipped_steps") == [1.0, None, 0.0]
    with pytest.raises(TsaeError, match=r"no row has a column 'topics' to keep.*--keep-columns"):
        read(tmp_path / "log.jsonl", policy, keep_columns=("topic", "topics"))
    main(["rollouts", "import", str(tmp_path / "log.jsonl"), "--checkpoint", policy.path, "--to",
          str(tmp_path / "r.parquet"), "--keep-columns", "required_steps", "topic"])  # fmt: skip
    assert column(Rollouts.read(tmp_path / "r.parquet"), "extra/topic") == ["sum", None, "“é”"]


def test_problems_without_ids_are_their_prompts_and_answers(policy: Checkpoint, tmp_path: Path) -> None:
    rows = [BARE, {**BARE, "problem_id": None}, {**BARE, "prompt": "2?"}, {**BARE, "problem_id": 0}]
    rows.append({**BARE, "answer": "3"})
    with pytest.warns(UserWarning, match="1 prompts have several problem ids each, 3 in all"):
        ids = column(read(write(tmp_path / "log.jsonl", *rows), policy), "problem_id")
    assert ids[0] == ids[1]
    assert ids[3] == "0"
    assert len({ids[0], *ids[2:]}) == 4
    assert column(read(write(tmp_path / "other" / "log.jsonl", *rows[:1]), policy), "problem_id") == ids[:1]


def test_files_of_the_user_are_not_replaced(policy: Checkpoint, tmp_path: Path) -> None:
    log = write(tmp_path / "log" / "log.jsonl", ROW)
    for path in (log, log.parent):
        refused(r"log\.jsonl: is a file of the log, which would be replaced", import_log, path, log, policy)
        refused("log: is a folder, and a file is to be written", import_log, path, log.parent, policy)
    kept = write(tmp_path / "kept" / "thesis.txt", ROW).parent
    (kept / "folder").mkdir()
    for reward in (0, 1):
        import_log(write(log, ROW | {"reward": reward}), tmp_path / "r.parquet", policy, kept=kept, progress=False)
        assert {path.suffix for path in kept.iterdir()} == {"", ".txt", ".parquet"}
        assert len(list(kept.iterdir())) == 3


def test_answers_and_ids_that_pandas_made_floats_are_whole_numbers(policy: Checkpoint, tmp_path: Path) -> None:
    rows = [{**BARE, "answer": 2.0}, {**BARE, "answer": 2}, {**BARE, "answer": 0.5}, {**BARE, "answer": [2.0]}]
    found = read(write(tmp_path / "log.jsonl", *rows), policy, verifier="exact")
    assert column(found, "answer") == ["2", "2", "0.5", "2"]
    assert found.n_problems == 2
    numbered = pd.DataFrame([{**BARE, "problem_id": 1}, {**BARE, "prompt": "2?", "problem_id": None}])
    ids = Rollouts.read(numbered, policy).frame.problem_id
    assert ids[0] == "1"
    assert len(ids[1]) == 16  # a hash of the prompt


def test_a_log_uses_the_chat_template(tmp_path: Path) -> None:
    path = save_model(tmp_path / "chat")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    chat = Checkpoint(id="base", path=str(path))
    file = write(tmp_path / "log.jsonl", ROW)
    assert read(file, chat).tokens(0)[0].tolist() == [16, 1, 10, 1, 13, 14, 15]
    assert read(file, chat, prompt_format="plain").tokens(0)[0].tolist() == [BOS, 1, 10, 1, 13]
    turns = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
    several = write(tmp_path / "turns.jsonl", {**ROW, "prompt": turns})
    assert read(several, chat).tokens(0)[0].tolist() == [16, 1, 13, 14, 16, 2, 14, 16, 3, 14, 15]
    assert column(read(several, chat), "prompt") == ["1?\n\n2\n\n3"]
    begun = write(tmp_path / "begun.jsonl", {**ROW, "prompt": turns[:2]})
    # What the assistant began is gone on with: no new turn is opened.
    assert read(begun, chat).tokens(0)[0].tolist() == [16, 1, 13, 14, 16, 2]
    with pytest.raises(TsaeError, match=r"turns\.jsonl:1: the prompt is a conversation.*checkpoint has none"):
        read(several, Checkpoint("base", str(save_model(tmp_path / "plain"))))
    refused("no --prompt-format plain", read, several, chat, prompt_format="plain")


def test_responses_that_do_not_decode_to_the_logs_text_are_marked(tmp_path: Path) -> None:
    """A tokenizer whose normaliser makes an 8 of every 9."""
    path = save_model(tmp_path / "lossy")
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Replace", "pattern": {"String": "9"}, "content": "8"}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    lossy = Checkpoint("base", str(path))
    file = write(tmp_path / "log.jsonl", *[{**BARE, "response": f"#{i}"} for i in range(10)])
    summary = import_log(file, tmp_path / "r.parquet", lossy, progress=False)
    found = Rollouts.read(tmp_path / "r.parquet")
    # Of equal text the tokens may be others than those that were sampled; the last is surely not.
    assert column(found, "round_trip") == [False] * 10
    assert summary.total["retokenised"] == 10
    assert column(found, "response")[9] == "#9"
    assert column(found, "response_ids")[9] == [16, 8]
    assert summary.total["not_round_tripping"] == 1
    assert any(note.startswith("10 responses were tokenised from text") for note in summary.notes)
    with pytest.raises(TsaeError, match="not one of its 2 responses decodes to the logged text"):
        read(write(tmp_path / "nines.jsonl", {**BARE, "response": "#9"}, {**BARE, "response": "99"}), lossy)


# --- what is right


def outcomes(file: Path, policy: Checkpoint, rows: list[Any], **config: Any) -> list[Any]:
    return column(read(write(file, *rows), policy, **config), "outcome")


def test_what_is_right_is_read_from_the_first_source_there_is(policy: Checkpoint, tmp_path: Path) -> None:
    def found(rows: list[Any], **config: Any) -> list[Any]:
        return outcomes(tmp_path / "log.jsonl", policy, rows, noisy_rewards=True, **config)

    assert found([BARE]) == ["unknown"]
    assert found([{**BARE, "reward": r} for r in (0.5, 0, -1)]) == ["success", "failure", "failure"]
    assert found([{**BARE, "reward": r} for r in (0.5, 0, -1)], success_above=-0.5) == ["success", "success", "failure"]
    assert found([BARE, {**BARE, "answer": "3"}], verifier="last_number") == ["success", "failure"]
    assert found([{**BARE, "correct": c} for c in (1, 0, True, False)]) == ["success", "failure"] * 2
    # "false" is true in Python.
    assert found([{**BARE, "correct": c} for c in ("true", "false", "True", "FALSE")]) == ["success", "failure"] * 2
    assert found([{**BARE, "correct": False, "reward": 1.0}]) == ["failure"]
    assert found([{**BARE, "correct": False}], verifier="last_number") == ["success"]
    assert found([{**BARE, "correct": False, "reward": 1.0}], outcome="reward") == ["success"]
    several = [{**BARE, "format": f, "right": r} for f, r in ((1.0, 0.0), (0.0, 1.0))]
    config = {"rewards": ("format", "right"), "outcome": "right"}
    assert found(several, **config) == ["failure", "success"]
    assert column(read(write(tmp_path / "l.jsonl", *several), policy, noisy_rewards=True, **config), "reward") == [
        1.0,
        1.0,
    ]
    assert found(several, rewards=("format",)) == ["success", "failure"]
    refused(r"log\.jsonl:1: correct is 'perhaps'", found, [{**BARE, "correct": "perhaps"}])
    refused(r"log\.jsonl:1: reward is 'high'", found, [{**BARE, "reward": "high"}])


def test_a_verifier_needs_answers_unless_it_is_the_users_own(policy: Checkpoint, tmp_path: Path) -> None:
    rows = [BARE, {"prompt": "1+1?", "response": "#2"}]
    with pytest.raises(TsaeError, match=r"log\.jsonl:2: has no reference answer to check with exact"):
        outcomes(tmp_path / "log.jsonl", policy, rows, verifier="exact")
    assert outcomes(tmp_path / "log.jsonl", policy, rows, verifier="support.logs:short") == ["success"] * 2


def test_added_up_rewards_do_not_say_what_is_right(policy: Checkpoint, tmp_path: Path) -> None:
    row = {**BARE, "format": 1.0, "right": 0.0}
    with pytest.raises(TsaeError, match="has the rewards format, right, and does not say which"):
        outcomes(tmp_path / "log.jsonl", policy, [row], rewards=("format", "right"))
    found = outcomes(tmp_path / "log.jsonl", policy, [row], rewards=("format", "right"), verifier="last_number")
    assert found == ["success"]


def test_a_folder_with_a_tokenizer_alone_has_no_context(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "grpo" / "checkpoint-5")
    (tmp_path / "grpo" / "checkpoint-5" / "config.json").unlink()
    checkpoint = Checkpoint("base", str(tmp_path / "grpo" / "checkpoint-5"))
    found = read(write(tmp_path / "log.jsonl", {**BARE, "response": "1" * 200}), checkpoint)
    assert found.lengths("response_ids").tolist() == [200]


def test_names_in_a_log_do_not_reach_the_terminals_controls(policy: Checkpoint, tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", {**BARE, "policy": "m\x1b[31m1"})
    assert "\x1b" not in str(import_log(path, tmp_path / "r.parquet", policy, progress=False))


def test_a_verifier_that_fails_names_the_row(policy: Checkpoint, tmp_path: Path) -> None:
    refused(
        r"log\.jsonl:2: the verifier support.logs:broken fails on it \(ZeroDivisionError",
        outcomes,
        tmp_path / "log.jsonl",
        policy,
        [BARE, {**BARE, "answer": "0"}],
        verifier="support.logs:broken",
    )


def test_answers_are_compared_as_expressions() -> None:
    pytest.importorskip("math_verify")
    same = find_verifier("math")
    for response, answer in (
        (r"so it is $\boxed{\frac{1}{2}}$", "0.5"),
        ("the answer is 1,234", "1234"),
        ("$x = 3$", "3"),
        (r"$(1+x)^2$", "x^2+2x+1"),
        ("7", r"\boxed{7}"),
    ):
        assert same(response, answer)
    for response, answer in (("1/3", "0.5"), ("no answer", "0.5"), ("", "2"), (r"$\{1,2\}$", "2")):
        assert not same(response, answer)
    refused("the reference answer '' is not a mathematical expression", same, "1", "")


def test_without_its_package_the_math_verifier_says_what_to_install(
    policy: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(TsaeError, match=r"needs math-verify.*pip install 'math-verify\[antlr4_13_2\]>=0.8'"):
        outcomes(tmp_path / "log.jsonl", policy, [BARE], verifier="math")


# --- bad input


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": "1?", "respon', "not a line of JSON"),
        ("[" * 100_000, "not a line of JSON"),
        ("[1, 2]", "a JSON list, expected an object"),
        ({"prompt": "1?"}, "has no text in response; its columns are prompt"),
        ({"response": 3, "prompt": None}, "has no text in prompt and response"),
        ({**IDS, "prompt": 3}, "has no text in prompt"),
        ({**IDS, "response": [3]}, "has no text in response"),
        ({**ROW, "response": ""}, "the response is empty.*--skip empty"),
        ({**ROW, "response": "hello"}, "cannot be tokenised"),
        ({**ROW, "prompt": "hello"}, "cannot be tokenised"),
        ({**ROW, "reward": math.nan}, "has no reward.*--skip unscored"),
        *(
            ({**ROW, "reward": text}, f"reward is '{text}', expected a finite number")
            for text in ("high", "0,5", "1_0")
        ),
        ({**ROW, "step": "first"}, "step is 'first', expected a whole number"),
        ({**ROW, "advantage": "[1, 2]"}, r"advantage is '\[1, 2\]', expected a finite number"),
        ({**ROW, "reward": math.inf}, "reward is inf"),
        ({**ROW, "advantage": math.nan}, "advantage is nan"),
        ({**ROW, "step": 1.5}, "step is 1.5, expected a whole number"),
        ({**ROW, "step": 1e20}, r"step is 1e\+20, expected a whole number of at most 63 bits"),
        ({**ROW, "reward": 1e101}, r"its rewards add up to 1e\+101, expected 1e\+100 at most"),
        ('{"prompt": "1?", "response": "2", "reward": 1, "reward": 0}', "'reward' comes twice, with different values"),
        ('{"prompt": "1?", "response": "2", "info": {"a": NaN, "a": 0}}', "'a' comes twice, with different values"),
        ({**ROW, "response_ids": [16, 20]}, "the response has the token id 20; the tokenizer of .* has 0 to 19"),
        ({**ROW, "response_ids": [16, -1, 2]}, "-1 between its tokens, which is a mask value.*--column response_mask"),
        ({**ROW, "response_ids": [[16]]}, "response_ids is .*expected a list of token ids"),
        ({**ROW, "response_ids": [1.5]}, "response_ids is .*expected a list of token ids"),
        ({**ROW, "response_ids": [1, [2]]}, "response_ids is .*expected a list of token ids"),
        ({**ROW, "response_ids": []}, "the response is empty"),
        ({**ROW, "response": [], "reward": []}, "the response is empty"),
        ({**ROW, "prompt_ids": []}, "the prompt has no tokens"),
        (
            {**ROW, "response": "1" * 124},
            "5 prompt and 124 response tokens exceed the model's context of 128.*too-long",
        ),
    ],
)
def test_bad_lines_of_a_log_are_named(policy: Checkpoint, tmp_path: Path, row: Any, message: str) -> None:
    path = write(tmp_path / "log.jsonl", ROW, row)
    with pytest.raises(TsaeError, match=message) as error:
        read(path, policy)
    assert f"{path}:2" in str(error.value)


def test_a_parquet_file_with_two_columns_of_one_name_is_refused(policy: Checkpoint, tmp_path: Path) -> None:
    names = ["prompt", "response", "reward", "reward"]
    table = pa.table([pa.array([value]) for value in ("1+1?", "#2", 1.0, 0.0)], names=names)
    pq.write_table(table, tmp_path / "log.parquet")
    refused(r"log\.parquet: has several columns 'reward'", read, tmp_path / "log.parquet", policy)


def test_whole_numbers_stay_what_they_are(policy: Checkpoint, tmp_path: Path) -> None:
    steps = [2**53 + 1, 2**63 - 1, 7.0]
    found = read(write(tmp_path / "log.jsonl", *[{**BARE, "step": step} for step in steps]), policy, run="r")
    assert column(found, "step") == steps
    assert found.policies == [f"r-{2**53 + 1}", f"r-{2**63 - 1}", "r-00007"]
    # The step may be in the file's name.
    row = {"input": "1+1?", "output": "#2", "score": 1.0}
    with pytest.raises(TsaeError, match=r"9\.jsonl:1: step is 9{24}, expected 0 to 2⁶³ − 1"):
        read(write(tmp_path / "run" / f"{'9' * 30}.jsonl", row), policy)


def test_lone_surrogates_become_their_code_points_wherever_they_are(policy: Checkpoint, tmp_path: Path) -> None:
    row = {**ROW, "policy": "m\ud800", "problem_id": "\udfff", "info": {"\ud801": ["\ud802", {"a": "é"}]}}
    found = read(write(tmp_path / "log.jsonl", row), policy, keep_columns=("info",))
    assert found.policies == ["m\\ud800"]
    assert column(found, "problem_id") == ["\\udfff"]
    assert json.loads(column(found, "extra/info")[0]) == {"\\ud801": ["\\ud802", {"a": "é"}]}
    named = write(tmp_path / "run\udcff" / "log.jsonl", {**BARE, "step": 3})
    assert read(named.parent, policy).policies == ["run\\udcff-00003"]
    row = {"input": "1+1?", "output": "#2", "score": 1.0, "acc": 1.0, "\ud800": 0.5}
    found = read(write(tmp_path / "run" / "1.jsonl", row), policy, prompt_format="plain")
    assert column(found, "reward/\\ud800") == [0.5]


def test_what_may_be_left_out_is_counted(policy: Checkpoint, tmp_path: Path) -> None:
    rows = [ROW, {**ROW, "response": ""}, {**ROW, "response": "1" * 124}, {**ROW, "response": "1" * 123}]
    found = read(write(tmp_path / "log.jsonl", *rows), policy, skip=("empty", "too-long"))
    assert [len(ids) for ids in column(found, "response_ids")] == [2, 123]
    assert found.info["log"]["skipped"] == {"empty": 1, "too-long": 1}


def test_different_rewards_of_equal_responses_are_refused_unless_noisy(policy: Checkpoint, tmp_path: Path) -> None:
    rows = [{**BARE, "step": step, "reward": reward} for step, reward in ((1, 1.0), (1, 1.0), (2, 0.0), (2, 0.0))]
    path = write(tmp_path / "log.jsonl", *rows)
    assert column(read(path, policy), "reward") == [1.0, 1.0, 0.0, 0.0]  # the reward may change from step to step
    write(path, *rows, {**BARE, "step": 1, "reward": 0.5})
    told = r"log\.jsonl:5: reward 0\.5 for the trajectory that has 1 at .*:2: same step, problem and response"
    refused(told, read, path, policy)
    assert column(read(path, policy, noisy_rewards=True), "reward")[4] == 0.5


def test_logs_that_are_none_are_refused(policy: Checkpoint, tmp_path: Path) -> None:
    refused("no such log", read, tmp_path / "none.jsonl", policy)
    for name in ("empty.jsonl", "empty/1.jsonl"):
        refused("holds no trajectories", read, write(tmp_path / name), policy)
    refused("holds no trajectories", read, tmp_path / "empty", policy)
    (tmp_path / "nothing").mkdir()
    refused(r"holds no \.jsonl or \.parquet file, nor", read, tmp_path / "nothing", policy)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    refused(r"latin\.jsonl:1: not a line of JSON in UTF-8", read, tmp_path / "latin.jsonl", policy)
    (tmp_path / "bad.parquet").write_text("x")
    refused("not a Parquet file", read, tmp_path / "bad.parquet", policy)
    make_rollouts().write(tmp_path / "cut.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "cut.parquet").read_bytes()[:-30])
    refused("not a Parquet file", read, tmp_path / "cut.parquet", policy)
    refused("verifier", read, write(tmp_path / "log.jsonl", ROW), policy, verifier="nope")
    refused("max_response_tokens=0", ImportConfig, max_response_tokens=0)
    refused("success_above=nan", ImportConfig, success_above=math.nan)


def test_nothing_is_left_of_an_import_that_failed(policy: Checkpoint, tmp_path: Path) -> None:
    path = write(tmp_path / "log" / "log.jsonl", ROW, {**ROW, "reward": math.nan})
    with pytest.raises(TsaeError):
        import_log(path, tmp_path / "out" / "r.parquet", policy, progress=False)
    assert list((tmp_path / "out").iterdir()) == []


def test_links_do_not_lead_out_of_the_folder(policy: Checkpoint, tmp_path: Path) -> None:
    folder, outside = tmp_path / "log", write(tmp_path / "outside" / "secret.jsonl", ROW)
    write(folder / "1.jsonl", ROW)
    (folder / "again.jsonl").symlink_to(folder / "1.jsonl")
    assert len(read(folder, policy)) == 1  # a link inside is not read a second time
    (folder / "out.jsonl").symlink_to("../outside/secret.jsonl")
    refused(r"out\.jsonl: this link leaves the folder", read, folder, policy)
    (folder / "out.jsonl").unlink()
    (folder / "below").symlink_to(outside.parent)
    refused("below: this link leaves the folder", read, folder, policy)
    (folder / "below").unlink()
    (tmp_path / "mine.jsonl").symlink_to(outside)
    assert len(read(tmp_path / "mine.jsonl", policy)) == 1  # what the user names is the user's choice


MEMORY = """
import json, resource, sys
from pathlib import Path
from tsae.checkpoints.series import Checkpoint
from tsae.rollouts.importing import import_log

folder, policy = Path(sys.argv[1]), Checkpoint("base", sys.argv[2])
for rows in (1_000, 8_000):
    with (folder / f"{rows}.jsonl").open("w") as out:
        for i in range(rows):
            text = f"{i}+1?" + "1+2=3;" * 15
            row = {"prompt": f"{i % 50}?", "response": text, "reward": 1.0, "junk": str(i % 10) * 8_000}
            out.write(json.dumps(row) + "\\n")
    summary = import_log(folder / f"{rows}.jsonl", folder / f"{rows}.parquet", policy, progress=False)
    assert summary.total["trajectories"] == rows and summary.total["problems"] == 50
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, (folder / f"{rows}.jsonl").stat().st_size)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_lines(llama: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path), str(llama)],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    (small, small_bytes), (large, large_bytes) = (map(int, line.split()) for line in done.stdout.splitlines())
    assert large_bytes - small_bytes > 50 << 20
    assert (large - small) << 10 < 12 << 20  # kilobytes, and a fifth of what was read


# --- Rollouts.read, and the command line


def test_rollouts_are_told_from_logs(policy: Checkpoint, tmp_path: Path) -> None:
    ours = make_rollouts(tokenizer="abc")
    assert Rollouts.read(ours.write(tmp_path / "r.parquet")).info == {"tokenizer": "abc"}
    (tmp_path / "folder").mkdir()
    ours.write(tmp_path / "folder" / "r.parquet")
    for path in (tmp_path / "folder", tmp_path / "folder" / "r.parquet"):
        refused("is a table of rollouts already", read, path, policy)
    found = Rollouts.read(write(tmp_path / "log.jsonl", ROW), policy)
    assert found.origin == str(tmp_path / "log.jsonl")
    refused(r"no checkpoint lies beside the log.*--checkpoint", Rollouts.read, tmp_path / "log.jsonl")


def test_the_command_line_imports_a_trainers_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    series = tsae.testbed.series_path()
    source = series / "logs" / "easy" / "completions" / "completions_00050.parquet"
    main(["rollouts", "import", str(source), "--checkpoint", str(series), "--to", str(tmp_path / "r.parquet")])
    said = capsys.readouterr().out
    assert "TRL completions: 1 file" in said
    assert "easy-050" in said
    assert "success: correct is above 0" in said
    assert f"wrote {tmp_path / 'r.parquet'}" in said
    assert Rollouts.read(tmp_path / "r.parquet").policies == ["easy-050"]
    main(["rollouts", "import", str(source), "--to", str(tmp_path / "s.parquet"), "--verifier", "last_number",
          "--rewards", "correct"])  # fmt: skip
    assert (tmp_path / "r.parquet").exists()
    assert "last_number finds the answer in the response, and the log agrees in 256 of 256" in capsys.readouterr().out


def test_a_real_tokenizer_and_its_losses(tmp_path: Path) -> None:
    model = SHARED / "models" / "stories260K"
    if not model.is_dir():
        pytest.skip("shared/models/stories260K is not here")
    rows = [{"prompt": "Once upon a time", "response": text} for text in (" there was a cat.", "  two  spaces ", "é☃")]
    summary = import_log(write(tmp_path / "log.jsonl", *rows), tmp_path / "r.parquet", model, progress=False)
    found = Rollouts.read(tmp_path / "r.parquet")
    found_ids = column(found, "response_ids")
    tokenizer = Checkpoint("base", str(model)).load_tokenizer()
    same = [tokenizer.decode(ids) == row["response"] for ids, row in zip(found_ids, rows, strict=True)]
    assert any(same)
    assert summary.total["not_round_tripping"] == same.count(False)
    assert column(found, "round_trip") == [False] * 3


def test_a_finished_store_keeps_a_record_of_new_labels(series: Any, rollouts: Rollouts, tmp_path: Path) -> None:
    config = tsae.CaptureConfig(shard_tokens=400, batch_tokens=256)
    to = tmp_path / "acts"
    tsae.capture(series, rollouts, ["blocks.1.hook_resid_post"], to=to, config=config, progress=False)
    before = json.loads((to / "manifest.json").read_text())
    assert before["inputs"]["labels"] == rollouts.labels_fingerprint
    banded = rollouts.with_column("band", ["easy"] * len(rollouts))
    tsae.capture(series, banded, ["blocks.1.hook_resid_post"], to=to, config=config, progress=False)
    after = json.loads((to / "manifest.json").read_text())
    assert after["inputs"] == {**before["inputs"], "labels": banded.labels_fingerprint}
    changing = {"inputs": None, "gives": None, "checksum": None}
    assert {**after, **changing} == {**before, **changing}
    shutil.rmtree(to)


# --- which reward means success


def test_the_reward_that_is_named_for_it_means_success_and_several_are_never_added_up() -> None:
    for name in ("accuracy_reward", "Correctness", "answer_correct", "acc", "math/acc"):
        assert outcome_reward(("format_reward", name, "length")) == name
    assert outcome_reward(("accuracy", "format"), "format") == "format"
    assert outcome_reward(("quality",)) == "quality"
    pairs = (("quality", "format"), ("accuracy", "correct"), ("incorrect_penalty", "format"), ("account", "format"))
    for names in pairs:
        refused(
            rf"log: has the rewards {', '.join(names)}, and does not say.*--outcome", outcome_reward, names, None, "log"
        )
    refused("has no reward 'accuracy'; there are format, length", outcome_reward, ("format", "length"), "accuracy")
    refused("has no reward", outcome_reward, ())


# --- encoding texts in less time gives the ids that the tokenizer gives

TEXTS = [
    "",
    " ",
    "What is 3 + 4?\n\nIt is 7.",
    "<|im_start|>user\nHi<|im_end|>",
    "a" * 3000,
    "<s> </s> <think>x</think>",
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_those_of_the_tokenizer(name: str) -> None:
    tokenizer = make_tokenizer(name)
    encode = Encoder(tokenizer)
    for text in TEXTS:
        assert encode(text, "here") == tokenize(tokenizer, text, add_special_tokens=False)


def test_a_length_limit_of_the_tokenizer_cuts_nothing() -> None:
    tokenizer = make_tokenizer("chatml")
    encode = Encoder(tokenizer)
    tokenizer("3 + 4", truncation=True, max_length=2)
    assert len(encode("What is 3 + 4?", "here")) > 2


def test_a_tokenizer_that_does_more_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer("chatml")
    plain = type(tokenizer).__call__

    def upper(self: object, text: str, **options: object) -> object:
        return plain(tokenizer, text.upper(), **options)

    monkeypatch.setattr(type(tokenizer), "__call__", upper)
    assert Encoder(tokenizer)("a 1", "here") == tokenize(tokenizer, "a 1", add_special_tokens=False)
