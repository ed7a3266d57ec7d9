"""What trainers write beside their documented schemas: prompts without special tokens, other steps, other totals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.checkpoints import make_tokenizer
from support.logs import notes, read, refused, write
from tsae import Rollouts, testbed
from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.series import CheckpointSeries
from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.importing import import_log

SYSTEM, USER = {"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 3 + 4?"}
OWN = "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\n"


def completions(path: Path, prompts: list[Any], **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    n = len(prompts)
    columns = {
        "completion": [f"{i}" for i in range(n)],
        "accuracy_reward": [1.0] + [0.0] * (n - 1),
        **columns,
        "advantage": [0.0] * n,
    }
    pd.DataFrame({"step": [1] * n, "prompt": prompts, **columns}).to_parquet(path)
    return path


def prompts_of(found: Rollouts, name: str) -> list[str]:
    return [make_tokenizer(name).decode(ids) for ids in found.table["prompt_ids"].to_pylist()]


def rendered(name: str, *messages: dict[str, str], **arguments: Any) -> str:
    text = make_tokenizer(name).apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=True, **arguments
    )
    return str(text)


def note(found: Rollouts, part: str) -> str:
    (line,) = [line for line in notes(found).splitlines() if part in line]
    return line


# --- TRL


def test_prompts_that_trl_decoded_get_their_special_tokens_back(tokenizers: Any, tmp_path: Path) -> None:
    log = completions(
        tmp_path / "completions_00001.parquet",
        [OWN + "user\nWhat is 3 + 4?\nassistant\n", "system\nBe short.\nuser\nWhat is 3 + 4?\nassistant\n"],
    )
    found = read(log, tokenizers("smollm2"))
    assert prompts_of(found, "smollm2") == [rendered("smollm2", USER), rendered("smollm2", SYSTEM, USER)]
    assert note(found, "special tokens").startswith("2 prompts were logged without special tokens")


def test_a_thinking_switch_is_read_off_a_decoded_prompt(tokenizers: Any, tmp_path: Path) -> None:
    stripped = "user\nWhat is 3 + 4?\nassistant\n<think>\n\n</think>\n\n"
    log = completions(tmp_path / "completions_00001.parquet", [stripped, stripped])
    found = read(log, tokenizers("qwen3"))
    assert prompts_of(found, "qwen3") == [rendered("qwen3", USER, enable_thinking=False)] * 2
    assert note(found, "enable_thinking") == (
        '2 prompts were rendered with {"enable_thinking": false}, as their text shows'
    )


def test_a_thinking_switch_that_the_log_does_not_show_is_asked_for(tokenizers: Any, tmp_path: Path) -> None:
    log = completions(tmp_path / "completions_00001.parquet", [[USER], [USER]])
    found = read(log, tokenizers("qwen3"))
    assert prompts_of(found, "qwen3") == [rendered("qwen3", USER)] * 2
    assert note(found, "enable_thinking").startswith("2 prompts were rendered without enable_thinking")
    arguments = '{"enable_thinking": false}'
    found = read(log, tokenizers("qwen3"), template_arguments=arguments)
    assert prompts_of(found, "qwen3") == [rendered("qwen3", USER, enable_thinking=False)] * 2
    assert "enable_thinking" not in notes(found)
    for wrong in ("enable_thinking", "[1]", "[" * 100_000):
        refused("is not a JSON object", ImportConfig, template_arguments=wrong)


def test_texts_that_are_no_conversation_stay_as_they_are(tokenizers: Any, tmp_path: Path) -> None:
    written_out = "<|im_start|>user\n5+5?<|im_end|>\n"
    log = completions(tmp_path / "completions_00001.parquet", ["What is 3 + 4?", written_out])
    found = read(log, tokenizers("chatml"))
    assert prompts_of(found, "chatml") == ["What is 3 + 4?", written_out]
    assert note(found, "as they stand").startswith("1 prompts are not a text that the chat template gives")
    # What has the template's end cannot be a plain text, and is not taken for one.
    odd = completions(tmp_path / "odd" / "completions_00001.parquet", ["cut off\nassistant\n"])
    with pytest.raises(TsaeError, match=r"without special tokens.*--template-arguments.*--prompt-format plain"):
        read(odd, tokenizers("chatml"))


def test_a_reward_that_is_named_for_it_says_what_is_right(tokenizers: Any, tmp_path: Path) -> None:
    log = completions(
        tmp_path / "completions_00001.parquet",
        [[USER]] * 3,
        accuracy_reward=[1.0, 0.0, None],
        format_reward=[1.0, 1.0, 1.0],
        completion=["7", "8", "9"],
    )
    found = read(log, tokenizers("chatml"), rewards=("accuracy_reward", "format_reward"))
    assert found.table["outcome"].to_pylist() == ["success", "failure", "unknown"]
    assert note(found, "outcome is unknown").startswith("1 trajectories")
    named = "success: accuracy_reward, of accuracy_reward, format_reward the one named for it, is above"
    assert note(found, "success: ").startswith(named)
    assert "3 responses have the sum of accuracy_reward, format_reward as their reward" in notes(found)
    assert found.table["round_trip"].to_pylist() == [False] * 3


def test_a_log_of_every_tenth_step_says_what_that_means(tokenizers: Any, tmp_path: Path) -> None:
    """TRL's default, logging_steps=10."""
    folder = str(tokenizers("chatml"))
    later = (Checkpoint(f"run-{step:05d}", folder, run="run", step=step) for step in (10, 20))
    series = CheckpointSeries((Checkpoint("base", folder), *later), name="run")
    for step in (10, 20, 30):
        log = completions(tmp_path / "run" / "completions" / f"completions_{step:05d}.parquet", ["1?", "2?"])
        pd.read_parquet(log).assign(step=step, completion=[f"{step}", "x"]).to_parquet(log)
    found = read(tmp_path / "run" / "completions", series)
    assert found.table["step"].to_pylist() == [10, 10, 20, 20, 30, 30]
    told = note(found, "every 10th")
    assert told.startswith(
        "the log has 3 of the steps 10 to 30, about every 10th: pass rates, bands, behaviours by step"
    )
    assert "the base sampled none of them" in told
    assert "`tsae attribute` refuses it" in told
    assert told.endswith("TRL and ms-swift log every step with logging_steps=1")
    completions(tmp_path / "run" / "completions" / "completions_00001.parquet", ["1?", "2?"])
    found = read(tmp_path / "run" / "completions", series)
    assert "the base" not in note(found, "4 of the steps 1 to 30, about every 10th")
    completions(
        tmp_path / "run" / "completions" / "completions_00002.parquet", ["1?", "2?"], step=2, completion=["3", "4"]
    )
    found = read(tmp_path / "run" / "completions", series)
    assert "of the steps" not in notes(found)


# --- numbers as text


@pytest.mark.parametrize(
    "right", ["1", "1.0", " 1.0 ", "True", "1e0", "np.float64(1.0)", "tensor(1., device='cuda:0')", [1.0]]
)
def test_numbers_may_be_text(right: Any, tokenizers: Any, tmp_path: Path) -> None:
    wrong = [0.0] if isinstance(right, list) else right.replace("1", "0").replace("True", "False")
    logs: dict[str, list[dict[str, Any]]] = {name: [] for name in ("trl", "verl", "open-instruct", "plain", "flag")}
    for i, value in enumerate((right, wrong)):
        asked = {"prompt": "1?", "response": f"{i}", "step": "global_step_7", "advantage": "0.5"}
        logs["trl"].append({**asked, "completion": f"{i}", "accuracy_reward": value, "answer": "7"})
        logs["verl"].append({"input": INPUT, "output": f"{i}", "step": "7", "score": value, "acc": value, "pred": "7"})
        ids = {"prompt_tokens": [1], "response_tokens": [2 + i], "sample_idx": i}
        logs["open-instruct"].append({**ids, "step": "7.0", "reward": value})
        logs["plain"].append(asked | {"reward": value})
        logs["flag"].append(asked | {"correct": value})
    for name, rows in logs.items():
        config = {"format": "plain" if name == "flag" else name}
        log = write(tmp_path / name / "a.jsonl", *rows)
        found = read(log, tokenizers("chatml"), **config)
        assert found.table["step"].to_pylist() == [7, 7], name
        assert found.table["outcome"].to_pylist() == ["success", "failure"], name
        assert found.table["reward"].to_pylist() == [1.0, 0.0], name
        assert "reward/pred" not in found.table.column_names


# --- verl

INPUT = "user\nWhat is 3 + 4?\nassistant\n"


def verl(path: Path, *rows: dict[str, Any]) -> Path:
    return write(path, *({"input": INPUT, "output": f"{i}", "gts": "7", "score": 1.0, **r} for i, r in enumerate(rows)))


@pytest.mark.parametrize(
    ("folder", "row", "policies"),
    [
        *((folder, {}, ["run-00000", "run-00001"]) for folder in ("rollout_data", "dumps", "values")),
        ("rollout_data", {"reward": 1.0}, ["run-00000", "run-00001"]),
        *((folder, {}, ["run-00001", "run-00002"]) for folder in ("val_rollouts", "validation_data", "val")),
        ("dumps", {"reward": 1.0}, ["run-00001", "run-00002"]),
    ],
)
def test_a_validation_is_sampled_after_the_update(
    tokenizers: Any, tmp_path: Path, folder: str, row: dict[str, Any], policies: list[str]
) -> None:
    for step in (1, 2):
        verl(tmp_path / folder / f"{step}.jsonl", {**row, "step": step})
    found = read(tmp_path / folder, tokenizers("chatml"), run="run")
    assert found.policies == policies
    after = policies[0] == "run-00001"
    assert ("2 responses are a validation's, sampled after the step's update" in notes(found)) == after
    before = verl(tmp_path / "before" / "0.jsonl", {"step": 0})
    assert read(before, tokenizers("chatml"), run="run").policies == ["run-00000"]


@pytest.mark.parametrize(
    "row",
    [
        {"output": "<tool_call>\n{}\n</tool_call>\nuser\n<tool_response>\n42\n</tool_response>\nassistant\nSo 42."},
        {"output": "<tool_call>\n{}\n</tool_call>user\n<tool_response>\n42\n</tool_response>\nassistant\nSo 42."},
        {"output": "So 42.", "num_turns": 4},
    ],
)
def test_a_tools_turn_is_not_the_policys(tokenizers: Any, tmp_path: Path, row: dict[str, Any]) -> None:
    log = verl(tmp_path / "1.jsonl", row, {"num_turns": 2})
    refused(r"1\.jsonl:1: .*--skip multi-turn", read, log, tokenizers("chatml"))
    found = read(log, tokenizers("chatml"), skip=("multi-turn",))
    assert found.table["response"].to_pylist() == ["1"]
    assert found.info["log"]["skipped"] == {"multi-turn": 1}


# --- open-r1, prime-rl, and tokenizers alone


def test_open_r1_does_not_say_its_system_prompt(tokenizers: Any, tmp_path: Path) -> None:
    rates = {"pass_rate_generations": ["7", "8", "9"], "pass_rate_rewards": [1.0, float("nan"), 0.0]}
    log = write(tmp_path / "pass.jsonl", {"prompt": "What is 3 + 4?", **rates})
    found = read(log, tokenizers("smollm2"), skip=("unscored",))
    assert found.table["response"].to_pylist() == ["7", "9"]
    assert found.info["log"]["skipped"] == {"unscored": 1}
    assert prompts_of(found, "smollm2") == [rendered("smollm2", USER)] * 2
    assert note(found, "--system-prompt").startswith("2 prompts are questions alone")
    assert note(found, "--run").startswith("2 trajectories have no policy in the log")
    assert "the template's own system message" in note(found, "--system-prompt")
    asked = {"skip": ("unscored",), "system_prompt": "Be short."}
    found = read(log, tokenizers("smollm2"), **asked)
    assert prompts_of(found, "smollm2") == [rendered("smollm2", SYSTEM, USER)] * 2
    assert note(found, "system message").startswith("2 prompts")


def test_a_tokenizer_is_all_that_an_import_needs(tokenizers: Any, tmp_path: Path) -> None:
    folder = tokenizers("chatml")
    assert not (folder / "config.json").exists()
    log = write(tmp_path / "log.jsonl", {"prompt": "What is 3 + 4?", "response": "7"})
    found = read(log, folder)
    assert prompts_of(found, "chatml") == [rendered("chatml", USER)]
    assert note(found, "a tokenizer alone")
    (tmp_path / "empty").mkdir()
    refused(r"no series\.json and no checkpoints", read, log, tmp_path / "empty")


@pytest.mark.parametrize("place", [b"MARKED", b"answer"])
def test_a_text_in_parquet_that_is_not_utf_8_is_refused(place: bytes, tmp_path: Path, tokenizers: Any) -> None:
    """Such bytes are met where they become texts of Python, after pyarrow has read them."""
    file = tmp_path / "completions_00001.parquet"
    prompt = [[{"role": "user", "content": "MARKED"}]]
    numbers = {"step": [1], "accuracy_reward": [1.0], "advantage": [0.0]}
    rows = {"prompt": prompt, "completion": ["answer"], **numbers}
    pq.write_table(pa.table(rows), file, compression="none", use_dictionary=False, write_statistics=False)
    whole = file.read_bytes()
    assert place in whole
    file.write_bytes(whole.replace(place, b"\xd4" + place[1:]))
    with pytest.raises(TsaeError, match=r"completions_00001\.parquet: .*can't decode byte 0xd4"):
        import_log(file, tmp_path / "r.parquet", tokenizers("smollm2"), progress=False)


def test_prompts_that_the_tokenizer_does_not_know_are_said(tmp_path: Path) -> None:
    """Its ids would be of another text: all of them are the checkpoint's fault, some are noted and warned of."""
    base = testbed.series().base
    known, unknown = {"prompt": "3+5?", "response": "#8"}, {"prompt": "What is 2+2?", "response": "#4"}
    refused("all its 1 prompts the tokenizer of .* does not know most characters", Rollouts.read, [unknown], base)
    with pytest.warns(
        UserWarning, match="^1 trajectories have prompts with characters that the checkpoint's tokenizer does not know"
    ):
        found = Rollouts.read([known, unknown], base)
    assert "their ids are of another text" in notes(found)
    # One strange character, which all prompts have, is no reason to refuse them.
    with pytest.warns(UserWarning, match="^2 trajectories have prompts with characters"):
        Rollouts.read([{**known, "prompt": "3+5?🙂"}, {**known, "prompt": "3+6?🙂"}], base)
    assert "does not know" not in notes(Rollouts.read([known], base))
