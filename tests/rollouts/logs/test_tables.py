"""Tables that are not a trainer's own files: of wandb, mlflow and trackio, CSV, JSON arrays, Arrow, lists in a row."""

from __future__ import annotations

import csv
import gzip
import io
import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from support.builders import BOS, EOS
from support.logs import column, holds, notes, read, refused
from tsae.checkpoints.loading import Checkpoint
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.log_detection import find_log
from tsae.rollouts.logs import readers
from tsae.rollouts.logs.log_files import NoLog
from tsae.rollouts.table import Rollouts

WANDB = "wandb/offline-run-20260101_000000-abc"
MEDIA = WANDB + "/files/media/table"
COLUMNS = ["step", "prompt", "completion", "acc", "advantage"]
TWO = [["1", "1+1?", "#2", 1.0, 0.5], ["1", "1+1?", "#3", 0.0, -0.5]]
MORE = [["2", "1+1?", "#2", 1.0, 0.5], ["2", "1+1?", "#2", 1.0, -0.5]]


def save(file: Path, content: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return file


def table(folder: Path, number: int, rows: list[list[Any]], columns: list[str] = COLUMNS) -> Path:
    name = f"completions_{number}_{len(str(rows)):020}.table.json"
    return save(folder / name, {"columns": columns, "data": rows})


# --- Weights & Biases


@pytest.mark.parametrize("given", [".", "wandb", WANDB, "wandb/latest-run", "wandb/run-20260101_000000-abc", "media"])
def test_tables_of_wandb_are_read_wherever_they_are_found(given: str, policy: Checkpoint, tmp_path: Path) -> None:
    run = tmp_path / "grpo"
    for number, rows in enumerate((TWO, MORE)):
        table(run / MEDIA, number, rows)
    save(run / WANDB / "files" / "wandb-summary.json", {"_step": 2})
    save(run / "other" / "data.json", [{"question": "1+1?"}])
    (run / "wandb" / "latest-run").symlink_to(Path(WANDB).name)
    if "/run-" in given:  # A run that was online.
        (run / WANDB).rename(run / given)
    elif given == "media":  # What wandb.Api downloads.
        (run / MEDIA).parent.rename(run / given)
    found = read(run / given, policy)
    holds(found, step=[1, 1, 2, 2], response=["#2", "#3", "#2", "#2"], advantage=[0.5, -0.5, 0.5, -0.5])
    holds(found, prompt_ids=[[BOS, 1, 10, 1, 13]] * 4, **{"reward/acc": [1.0, 0.0, 1.0, 1.0]})
    assert [policy[-6:] for policy in found.policies] == ["-00000", "-00001"]


def test_what_several_tables_hold_counts_once(policy: Checkpoint, tmp_path: Path) -> None:
    # A growing table, and the increments of one that were downloaded as artifacts.
    table(tmp_path / "grows" / MEDIA, 0, TWO)
    table(tmp_path / "grows" / MEDIA, 1, TWO + MORE)
    found = read(tmp_path / "grows", policy)
    assert column(found, "response") == ["#2", "#3", "#2", "#2"]
    assert found.info["log"]["skipped"] == {"repeated": 2}
    for number, rows in enumerate((TWO, MORE)):
        folder = tmp_path / "dl" / "artifacts" / f"run-abc-incr-completions:v{number}"
        save(folder / f"{number}-170000{number}.completions.table.json", {"columns": COLUMNS, "data": rows})
        table(tmp_path / "dl" / "media" / "table", number, rows)
    found = read(tmp_path / "dl", policy)
    assert column(found, "response") == ["#2", "#3", "#2", "#2"]
    assert "2 files are copies of others and count once" in notes(found)
    # The link to the latest run, copied as a folder when the run was younger.
    table(tmp_path / "copied" / MEDIA, 0, TWO)
    shutil.copytree(tmp_path / "copied" / WANDB, tmp_path / "copied" / "wandb" / "latest-run")
    table(tmp_path / "copied" / MEDIA, 1, MORE)
    assert column(read(tmp_path / "copied", policy), "step") == [1, 1, 2, 2]


def test_two_runs_of_wandb_are_apart_unless_they_are_named(policy: Checkpoint, tmp_path: Path) -> None:
    table(tmp_path / MEDIA, 0, TWO)
    others = [[*row[:2], f"#{i}", *row[3:]] for i, row in enumerate(TWO, 4)]
    table(tmp_path / MEDIA.replace("abc", "xyz"), 0, others + MORE)
    found = read(tmp_path, policy)
    assert len(found.policies) == 3
    assert "2 runs of wandb: if they are one training that was resumed, say --run NAME" in notes(found)
    refused(r"comes here again, and is another.*--skip repeated", read, tmp_path, policy, run="grpo")
    found = read(tmp_path, policy, run="grpo", skip=("repeated",))
    assert column(found, "response") == ["#4", "#5", "#2", "#2"]
    assert found.policies == ["grpo-00000", "grpo-00001"]


def test_evaluations_are_told_from_the_training_as_far_as_the_log_says(policy: Checkpoint, tmp_path: Path) -> None:
    other = [["1", "2+2?", f"#{i}", 0.0, 0.0] for i in range(3)]
    for number, rows in enumerate((TWO, other, MORE)):
        table(tmp_path / MEDIA, number, rows)
    trackio(tmp_path / "db" / "p.db", ("a", 1, TWO), ("a", 1, other), ("a", 2, MORE)).close()
    for log in (tmp_path / "wandb", tmp_path / "db"):
        refused("row .*is of a second table of step 1, with other prompts.*--skip repeated", read, log, policy)
        found = read(log, policy, skip=("repeated",))
        assert column(found, "response") == ["#2", "#3", "#2", "#2"]
        assert found.info["log"]["skipped"] == {"repeated": 3}
    table(tmp_path / "zero" / MEDIA, 0, [["0", *row[1:]] for row in TWO])
    table(tmp_path / "zero" / MEDIA, 1, TWO)
    found = read(tmp_path / "zero", policy)
    assert column(found, "step") == [1, 1]
    assert "2 trajectories of step 0, an evaluation before the training, are left out" in notes(found)
    frame = pa.Table.from_pylist([dict(zip(COLUMNS, [2, *row[1:]], strict=True)) for row in TWO])
    (tmp_path / "out" / "completions").mkdir(parents=True)
    pq.write_table(frame, tmp_path / "out" / "completions" / "completions_00002.parquet")
    history = [{"step": 1, "eval_loss": 1.0}, {"step": 2, "loss": 1.0}, {"step": 2, "eval_reward": 1.0}]
    for text, said in (("{", False), (json.dumps({"log_history": history}), True)):
        save(tmp_path / "out" / "checkpoint-2" / "trainer_state.json", text)
        assert ("the run evaluated at 1 logged steps (2): TRL" in notes(read(tmp_path / "out", policy))) == said


def test_the_first_versions_of_trl_log_before_the_step(chat: Checkpoint, tmp_path: Path) -> None:
    # 0.15 and 0.16: every batch of a step is a table; prompts are rendered, and get no other special tokens.
    columns, prompt = ["step", "prompt", "completion", "reward"], "<bos>#1+1?<eos><bos>;"
    rows = [["0", prompt, "#2", 1.0], ["0", prompt, "#3", 0.0]]
    table(tmp_path / MEDIA, 0, rows, columns)
    table(tmp_path / MEDIA, 1, [["0", prompt, "#2", 1.0]] * 2, columns)
    found = read(tmp_path / WANDB, chat, run="grpo")
    # A row of the second table is taken for that of the first, which it may be.
    assert sorted(column(found, "response")) == ["#2", "#2", "#3"]
    assert found.policies == ["grpo-00000"]
    assert all(ids[0] == BOS and ids[1] != BOS for ids in column(found, "prompt_ids"))
    # 0.17 has the names of reward functions, and logs after the step. 0.19 has advantages.
    for number, more in enumerate((["acc"], ["acc", "advantage"])):
        later = [["1", *row[1:], 0.5][: 3 + len(more)] for row in rows]
        found = read(table(tmp_path / str(number) / MEDIA, 0, later, [*columns[:3], *more]), chat, run="grpo")
        assert found.policies == ["grpo-00000"]
        assert all(ids[0] == BOS and ids[1] != BOS for ids in column(found, "prompt_ids"))


# --- mlflow, trackio


def test_validations_and_tables_of_mlflow(policy: Checkpoint, tmp_path: Path) -> None:
    artifacts = tmp_path / "mlruns" / "1" / "0a1b" / "artifacts"
    for step in (2, 10):
        save(artifacts / f"val_step{step}.json", [{"input": "1+1?", "output": f"#{step % 9}", "score": 1.0}])
    found = read(tmp_path, policy)
    assert column(found, "step") == [2, 10]  # After so many updates.
    assert found.policies == ["0a1b-00002", "0a1b-00010"]
    save(tmp_path / "log_table.json", {"columns": ["prompt", "response", "reward"], "data": [["1+1?", "#2", 1.0]]})
    assert column(read(tmp_path / "log_table.json", policy), "response") == ["#2"]


def trackio(file: Path, *logged: tuple[str, int, list[list[Any]]], wal: bool = False) -> sqlite3.Connection:
    file.parent.mkdir(parents=True, exist_ok=True)
    base = sqlite3.connect(file)
    base.execute(f"PRAGMA journal_mode = {'WAL' if wal else 'DELETE'}")
    base.execute("CREATE TABLE metrics (id INTEGER PRIMARY KEY, run_name TEXT, step INTEGER, metrics TEXT)")
    for run, step, rows in logged:
        found = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
        metrics = {"completions": {"_type": "trackio.table", "_value": found}} if rows else {"loss": 0.5}
        # orjson gives bytes.
        values = (run, step, json.dumps(metrics).encode())
        base.execute("INSERT INTO metrics (run_name, step, metrics) VALUES (?, ?, ?)", values)
    base.commit()
    return base


def test_tables_of_trackio(policy: Checkpoint, tmp_path: Path) -> None:
    nan = [["2", "1+1?", "NaN" if i else "#2", "NaN" if i else 1.0, 0.5] for i in range(2)]
    base = trackio(tmp_path / "wal" / "p.db", ("a", 0, []), ("a", 1, TWO), ("a", 2, nan), wal=True)
    found = read(tmp_path / "wal" / "p.db", policy, skip=("unscored",))
    assert column(found, "response") == ["#2", "#3", "#2"]
    base.close()
    trackio(tmp_path / "two" / "p.db", ("a", 1, TWO), ("b", 1, MORE), ("b", 2, MORE), ("b", 3, TWO)).close()
    refused(r"holds several runs: a, b\. Say which with --run", read, tmp_path / "two", policy)
    assert column(read(tmp_path / "two", policy, run="a"), "response") == ["#2", "#3"]
    found = read(tmp_path / "two", policy, run="b")
    assert column(found, "response") == ["#2", "#2", "#2", "#3"]
    assert found.info["log"]["skipped"] == {"repeated": len(MORE)}
    # An export to Parquet counts where its database is not there.
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in TWO]
    tables = [None, {"_type": "trackio.table", "_value": rows}]
    export = [{"run_name": "a", "step": step, "completions": found} for step, found in enumerate(tables)]
    pq.write_table(pa.Table.from_pylist(export), tmp_path / "p.parquet")
    pq.write_table(pa.table({"run_name": ["a"], "cpu": [1]}), tmp_path / "p_system.parquet")
    assert column(read(tmp_path, policy, run="a"), "response") == ["#2", "#3"]
    for damaged in ({"run_name": ["a"]}, {"completions": {"_type": "trackio.table", "_value": 7}}):
        log = save(tmp_path / "damaged" / "p.jsonl", export[1] | damaged)
        refused(r"p\.jsonl: holds a table that trackio does not write", read, log, policy)
    with sqlite3.connect(tmp_path / "view.db") as other:
        endless = "WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id FROM n) SELECT * FROM n"
        other.execute(f"CREATE VIEW metrics AS {endless}")
    refused("holds no trajectories", read, tmp_path / "view.db", policy)
    save(tmp_path / "text.db", "text")
    refused("cannot be read as a database of trackio", read, tmp_path / "text.db", policy)


# --- CSV, JSON, Arrow


def spreadsheet(file: Path, rows: list[dict[str, Any]]) -> Path:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), delimiter={".tsv": "\t", ".gz": ";"}.get(file.suffix, ","))
    writer.writeheader()
    writer.writerows(rows)
    data = b"\xef\xbb\xbf" + text.getvalue().encode()
    file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)
    return file


@pytest.mark.parametrize("name", ["r.csv", "r.tsv", "r.csv.gz"])
def test_fields_of_a_spreadsheet(name: str, policy: Checkpoint, tmp_path: Path) -> None:
    limit, long = csv.field_size_limit(), "1+" * 100_000
    rows = [
        {"prompt": "1+1?", "response": "#2", "reward": "1.0", "correct": "True", "step": "3", "level": "007"},
        {"prompt": "1+1?", "response": "#3", "reward": "", "correct": "false", "step": "4", "level": ""},
        {"prompt": "1+1?", "response": "", "reward": "1", "correct": "", "step": "", "level": ""},
    ]
    found = read(spreadsheet(tmp_path / name, rows), policy, skip=("empty",))
    holds(found, outcome=["success", "failure"], step=[3, 4], level=["007", None])
    texts = [rows[0] | {"prompt": '1,+"\t1="', "response": "1,\r\n\n2 "}, rows[0] | {"prompt": long, "response": "[1]"}]
    (file,) = find_log(spreadsheet(tmp_path / name, texts), ImportConfig())[1]
    assert [row for _, row in file.rows()] == texts
    assert csv.field_size_limit() == limit
    ids = {"prompt_ids": f"[{BOS}, 1]", "response_ids": f"[2, {EOS}]", "reward": 1}
    assert column(read(spreadsheet(tmp_path / name, [ids]), policy), "response_ids") == [[2, EOS]]
    for shown in (json.dumps, str):  # pandas writes lists as Python shows them
        many = {"question": "1+1?", "responses": shown(["#2", "#3"]), "rewards": shown([1.0, 0.0])}
        found = read(spreadsheet(tmp_path / name, [many]), policy)
        holds(found, reward=[1.0, 0.0], response=["#2", "#3"])


@pytest.mark.parametrize("shown", [json.dumps, str, lambda messages: str(np.array(messages))])
def test_messages_of_a_spreadsheet_are_no_text(shown: Callable[..., str], chat: Checkpoint, tmp_path: Path) -> None:
    messages = [{"role": role, "content": f"1+{len(role)}"} for role in ("user", "assistant", "user")]
    expected = Rollouts.read([{"prompt": messages, "response": "1", "reward": 1}], chat)
    file = spreadsheet(tmp_path / "r.csv", [{"prompt": shown(messages), "response": "1", "reward": 1}])
    assert column(read(file, chat), "prompt_ids") == column(expected, "prompt_ids")


def test_broken_tables_say_where(policy: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LONGEST_LINE", 1 << 20)
    for name, text, message in (
        ("long.csv", "prompt,response\n1," + "2" * (1 << 20), "row 0 .*a line of more than 1 MiB"),
        ("long.json", "[" + " " * (1 << 20), "has more than 1 MiB"),
        ("a.csv", "prompt,response\n1,2\n1,2,3\n", "row 1 cannot be read as CSV in UTF-8 .3 fields, expected 2"),
        ("b.csv", 'prompt,response\n1,"2\n', "unexpected end of data"),
        ("c.csv", "prompt,prompt\n1,2\n", "several columns 'prompt'"),
        ("d.json", '{"columns": ["prompt", "prompt"], "data": []}', "several columns 'prompt'"),
        ("e.json", '{"columns": ["prompt", "response"], "data": [[1]]}', "row 0 is a JSON list, expected 2 values"),
        ("f.json", "[" * 100_000, "nested too deeply"),
        (
            "lists.json",
            '{"columns": ["prompt", ["a"]], "data": [["1", "2"]]}',
            r"no known log has the columns prompt, \['a'",
        ),
        (
            "numbers.json",
            '{"columns": ["prompt", 1.5], "data": [["1", "2"]]}',
            "no known log has the columns prompt, 1.5;",
        ),
        ("g.arrow", "text", "cannot be read as Arrow"),
    ):
        refused(message, read, save(tmp_path / name, text), policy)
    whole = pa.BufferOutputStream()
    with pa.ipc.new_stream(whole, pa.schema({"prompt": pa.string()})) as stream:
        stream.write_batch(pa.record_batch({"prompt": ["1" * 12345]}))
    data = bytearray(whole.getvalue().to_pybytes())
    data[data.rfind(b"\0\0\0\0\x39\x30\0\0") + 7] = 0x40  # A text that ends far outside of the file.
    (tmp_path / "h.arrow").write_bytes(data)
    refused(r"cannot be read as Arrow beyond row 0 .*offset", read, tmp_path / "h.arrow", policy)


def test_a_json_file_of_rows(policy: Checkpoint, tmp_path: Path) -> None:
    rows = [{"prompt": "1+1?", "response": "#2", "reward": 1}, {"prompt": "1+1?", "response": "#3", "reward": 0}]
    for content in (rows, {"data": rows}, {"n": 2, "results": rows}):
        save(tmp_path / "r.json", content)
        for path in (tmp_path, tmp_path / "r.json"):
            assert column(read(path, policy), "reward") == [1.0, 0.0]
    lines = save(tmp_path / "r.json", "".join(json.dumps(row) + "\n" for row in rows))  # as `datasets` writes it
    assert column(read(lines, policy), "reward") == [1.0, 0.0]


def test_a_folder_that_datasets_saved(policy: Checkpoint, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": "1+1?", "response": f"#{i}", "reward": 1.0, "step": 1} for i in range(4)]
    saved = datasets.Dataset.from_list(rows)
    saved.save_to_disk(tmp_path / "one", num_shards=2)
    shutil.copy(tmp_path / "one" / "data-00000-of-00002.arrow", tmp_path / "one" / "cache-1.arrow")
    assert column(read(tmp_path / "one", policy), "response") == ["#0", "#1", "#2", "#3"]
    datasets.DatasetDict(train=saved.select([0, 1]), test=saved.select([3])).save_to_disk(tmp_path / "two")
    # Splits are not mixed.
    assert column(read(tmp_path / "two", policy), "response") == ["#0", "#1"]
    assert column(read(tmp_path / "two" / "test", policy), "response") == ["#3"]
    pyarrow.feather.write_feather(pa.Table.from_pylist(rows), tmp_path / "r.feather")
    assert column(read(tmp_path / "r.feather", policy), "response") == ["#0", "#1", "#2", "#3"]


def test_what_lies_beside_a_log_is_not_read(policy: Checkpoint, tmp_path: Path) -> None:
    rows = [{"prompt": "1+1?", "response": "#2", "reward": 1}]
    save(tmp_path / "metrics.csv", "loss\n1\n")
    save(tmp_path / "data.json", [{"question": "1+1?"}])
    with pytest.raises(NoLog, match="no known log has the columns question"):
        read(tmp_path, policy)
    save(tmp_path / "r.json", rows)
    found = read(tmp_path, policy)
    assert column(found, "response") == ["#2"]
    assert "2 files have other columns than a plain log, and are left out: data.json, metrics.csv" in notes(found)
    save(tmp_path / "log.jsonl", json.dumps({**rows[0], "response": "#3"}))
    (tmp_path / "config.json").symlink_to(save(tmp_path.parent / f"{tmp_path.name}.json", {"hidden_size": 1}))
    for config in ({}, {"format": "plain"}):
        assert column(read(tmp_path, policy, **config), "response") == ["#3"]
