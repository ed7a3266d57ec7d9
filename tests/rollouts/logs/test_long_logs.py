"""Long logs: read in parts, by several processes, and gone on with where an import was stopped."""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.children import killed_until_done, past, start
from support.logs import LOGS, write
from tsae.checkpoints.loading import Checkpoint
from tsae.errors import TsaeError
from tsae.rollouts import import_worker, importing
from tsae.rollouts.config import ColumnNames, ImportConfig
from tsae.rollouts.importing import import_log
from tsae.rollouts.log_detection import find_log
from tsae.rollouts.logs import dedup_index as ledgers
from tsae.rollouts.logs.dedup_index import Ledger
from tsae.rollouts.logs.entry import Entry
from tsae.rollouts.logs.on_disk import parts
from tsae.rollouts.logs.on_disk.log_files import LogFile
from tsae.rollouts.logs.running import spool as spools
from tsae.rollouts.logs.running import workers
from tsae.rollouts.logs.running.bar import Bar
from tsae.rollouts.logs.running.journal import Job
from tsae.rollouts.logs.running.workers import default_workers, read_in_workers


def rows(n: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    digits = ["".join(rng.choices("0123456789+=#", k=rng.randrange(20, 60))) for _ in range(n)]
    return [
        {
            "prompt": f"{i // 4}+1=?", "response": text, "reward": float(rng.random() < 0.5), "step": 1 + i // 16,
            "policy": f"p{i // 16}",
        }
        for i, text in enumerate(digits)
    ]  # fmt: skip


def imported(path: Path, policy: Any, to: Path, n: int = 1, **config: Any) -> tuple[bytes, str]:
    summary = import_log(path, to, policy, ImportConfig(**config), workers=n, progress=False)
    return to.read_bytes(), str(summary)


# --- parts


@pytest.mark.parametrize("size", [1, 30, 64, 1000, 10_000])
@pytest.mark.parametrize("ends", [b"\n", b"\r\n"])
def test_parts_begin_at_line_ends_and_count_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, ends: bytes
) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", size)
    path, rng = tmp_path / "log.jsonl", random.Random(size)
    lines = [json.dumps({"i": i, "x": "y" * rng.randrange(80)}).encode() for i in range(60)]
    lines[7:7] = [b""]
    path.write_bytes(ends.join(lines))  # the last has no end
    found = list(parts.parts_of([LogFile(path, "run")], cut=True))
    again = [parts.Part.from_dict(json.loads(json.dumps(part.as_dict()))) for part in found]
    assert again == found
    read = [row for part in found for file in part.files for row in file.rows()]
    assert read == list(LogFile(path, "run").rows())
    assert [number for number, _ in read] == [*range(1, 8), *range(9, 62)]
    assert sum(part.bytes for part in found) == path.stat().st_size
    assert len(found) == 1 or all(part.bytes < size + 200 for part in found)


def test_small_files_are_read_together_and_files_that_may_not_be_cut_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 250)
    files = [
        LogFile(write(tmp_path / f"{i}.jsonl", *(["x" * 99] * n)), "run") for i, n in enumerate((1, 1, 1, 9, 0, 1))
    ]
    whole = list(parts.parts_of(files, cut=False))
    assert [(part.first, len(part.files), part.bytes) for part in whole] == [
        (0, 2, 200),
        (2, 1, 100),
        (3, 1, 900),
        (4, 2, 100),
    ]
    assert [part.first for part in parts.parts_of(files, cut=True)] == [0, 2, 3, 3, 3, 4]


def test_parquet_is_cut_at_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.parquet"
    pd.DataFrame({"i": range(1000), "x": [f"{i * 7919:09d}" for i in range(1000)]}).to_parquet(path, row_group_size=90)
    monkeypatch.setattr(parts, "PART_BYTES", 3000)
    found = list(parts.parts_of([LogFile(path, "run")], cut=True))
    assert len(found) > 2
    assert sum(part.bytes for part in found) == path.stat().st_size
    read = [(number, row["i"]) for part in found for number, row in part.files[0].rows()]
    assert read == [(i, i) for i in range(1000)]


SKIP = ("unscored", "empty", "multi-turn", "repeated", "errored")
TEMPLATE = (
    "{% for m in messages %}{{ {'user': '#', 'system': '+', 'assistant': ';'}[m['role']] + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %};{% endif %}"
)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("trl", {"outcome": "digits"}),
        *((name, {}) for name in ("verl", "open-instruct", "nemo-rl", "open-r1", "prime-rl", "prime-rl-tokens")),
    ],
)
def test_a_log_in_parts_is_the_log(
    name: str, config: dict[str, Any], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(llama, tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(TEMPLATE)
    to = tmp_path / "to" / "r.parquet"
    _, said = imported(LOGS / name, tmp_path / "chat", to, skip=SKIP, **config)
    table = pq.read_table(to)
    monkeypatch.setattr(parts, "PART_BYTES", 1)
    assert imported(LOGS / name, tmp_path / "chat", to, skip=SKIP, **config)[1] == said
    assert pq.read_table(to).equals(table, check_metadata=True)
    assert [path.name for path in to.parent.iterdir()] == ["r.parquet"]


def test_a_bad_line_is_named_in_whatever_part_it_is(
    policy: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 500)
    path = write(tmp_path / "log.jsonl", *rows(40), "{", *rows(40, 1), "[")
    with pytest.raises(TsaeError, match=r"log\.jsonl:41: not a line of JSON"):
        imported(path, policy, tmp_path / "r.parquet")


def test_rewards_that_change_their_meaning_from_part_to_part_are_refused(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 1)
    row = {"input": "1+1=?", "output": "2", "gts": "2", "score": 1.0}
    write(tmp_path / "log" / "1.jsonl", {**row, "acc": True, "step": 1})
    write(tmp_path / "log" / "2.jsonl", {**row, "step": 2})
    with pytest.raises(TsaeError, match=r"2\.jsonl:1: score says here what is right, acc in the rows before"):
        imported(tmp_path / "log", llama, tmp_path / "r.parquet", prompt_format="plain")


# --- the ledger


def test_repeats_are_found_however_many_buckets_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "_AT_A_TIME", 7)
    rng = random.Random(1)
    entries = [
        (rng.choice("ab"), f"p{rng.randrange(5)}", rng.choice([None, *"xyz"]), rng.randrange(3), rng.random() < 0.5)
        for _ in range(200)
    ]
    summaries = []
    for bucket in (1 << 17, 20):
        monkeypatch.setattr(ledgers, "_BUCKET", bucket)
        whole = Ledger()
        for number, part in enumerate((entries[:50], entries[50:51], entries[51:])):
            ledger = Ledger(tmp_path / f"{bucket}-{number}")
            for i, (name, problem, key, reward, right) in enumerate(part):
                ledger.enter(
                    Entry("", number=i, step=1, key=key), number, problem, name, prompt=0,
                    tokens=(b"", str(rng.random()).encode(), ""), finish_reason="stop",
                    reward=None if reward == 2 else float(reward), outcome="success" if right else "failure",
                    same_text=None, retokenised=right,
                )  # fmt: skip
            whole.add(tmp_path / f"{bucket}-{number}", json.loads(json.dumps(ledger.close())))
        files = [LogFile(Path(str(n)), "run") for n in range(3)]
        kept = whole.kept(files, ImportConfig(skip=("repeated",)))
        last = {(name, key): i for i, (name, _, key, _, _) in enumerate(entries)}
        assert kept.tolist() == [key is None or last[name, key] == i for i, (name, _, key, _, _) in enumerate(entries)]
        with pytest.raises(TsaeError, match="comes here again"):
            whole.kept(files, ImportConfig())
        summary = whole.summary("x", 1, kept, [])
        frame = pd.DataFrame(entries, columns=["policy", "problem", "key", "reward", "right"])[kept]
        frame["reward"] = frame.reward.where(frame.reward < 2)
        groups = frame.groupby(["policy", "problem"]).reward.agg(["size", "count", "nunique"])
        alike = (groups["size"] > 1) & (groups["count"] == groups["size"]) & (groups["nunique"] == 1)
        assert summary.total["groups"] == len(groups)
        assert summary.total["no_variance"] == alike.sum()
        assert summary.total["problems"] == frame.problem.nunique()
        assert summary.total["success_rate"] == pytest.approx(frame.right.mean())
        assert summary.table.set_index("policy").trajectories.to_dict() == frame.policy.value_counts().to_dict()
        summaries.append(str(summary))
    assert summaries[0] == summaries[1]


# --- the spool


def test_rows_are_spooled_batch_by_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch ends at so many rows or tokens, and before a new column; a row group is a batch."""
    monkeypatch.setattr(spools, "_BATCH_ROWS", 3)
    monkeypatch.setattr(spools, "_BATCH_TOKENS", 20)
    plain = {"problem_id": "p", "policy": "a", "prompt_ids": [1, 2], "response_ids": [3], "outcome": "unknown"}
    plain |= {"parts": None, "step": None, "round_trip": None}
    many = plain | {"prompt_ids": [1] * 9, "response_ids": [2] * 8}
    written = [
        plain, plain, plain,  # 3 rows
        plain, many,  # 3 + 17 tokens
        plain, plain,
        plain | {"reward/x": 1.0}, plain, plain | {"reward/x": None, "parts": None},
        plain | {"extra/y": 1},
        plain | {"extra/y": 2.5, "parts": [1]}, plain | {"parts": [0]},
    ]  # fmt: skip
    spool = spools.Spool(tmp_path / "spool")
    for row in written:
        spool.add(row)
    state = json.loads(json.dumps(spool.close()))
    assert state == {"rewards": ["reward/x"], "known": ["parts"], "extras": {"extra/y": ["number", "whole"]}}
    file = pq.ParquetFile(tmp_path / "spool")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [3, 2, 2, 3, 1, 2]
    whole = spools.Spools()
    whole.add(tmp_path / "spool", state)
    kept = np.arange(len(written)) % 4 != 1
    rename = lambda table, rows: {"policy": ["b" if name == "a" else name for name in table["policy"].to_pylist()]}  # noqa: E731
    whole.write(tmp_path / "r.parquet", kept, {}, rename)
    table = pq.read_table(tmp_path / "r.parquet")
    rows = [row for row, stays in zip(written, kept, strict=True) if stays]
    for name in ("prompt_ids", "response_ids", "parts", "reward/x"):
        assert table[name].to_pylist() == [row.get(name) for row in rows]
    assert table["extra/y"].to_pylist() == [row.get("extra/y") for row in rows]
    assert set(table["policy"].to_pylist()) == {"b"}


@pytest.mark.parametrize(
    ("values", "kind", "read"),
    [
        ([True, None, False], pa.bool_(), None),
        ([1, 2**63 - 1, None], pa.int64(), None),
        ([1, 2.5], pa.float64(), [1.0, 2.5]),
        ([1, True], pa.string(), ["1", "true"]),
        ([1, 2**63], pa.string(), ["1", str(2**63)]),
        ([1.5, "x", {"a": "é"}], pa.string(), ["1.5", "x", '{"a": "é"}']),
    ],
)
def test_the_type_of_an_extra_column_holds_all_of_its_values(
    tmp_path: Path, values: list[Any], kind: pa.DataType, read: list[Any] | None
) -> None:
    whole = spools.Spools()
    for number, value in enumerate(values):  # each in a part of its own
        spool = spools.Spool(tmp_path / str(number))
        row = {"problem_id": "p", "policy": "a", "prompt_ids": [1], "response_ids": [2], "outcome": "unknown"}
        spool.add(row | {"parts": None} | ({} if value is None else {"extra/x": value}))
        whole.add(tmp_path / str(number), json.loads(json.dumps(spool.close())))
    whole.write(tmp_path / "r.parquet", np.ones(len(values), dtype=bool), {}, lambda table, rows: {})
    column = pq.read_table(tmp_path / "r.parquet")["extra/x"]
    assert column.type == kind
    assert column.to_pylist() == (values if read is None else read)
    assert "parts" not in pq.read_schema(tmp_path / "r.parquet").names


# --- going on


class _Stopped(BaseException):
    """Stands for Ctrl-C."""


def stopping(monkeypatch: pytest.MonkeyPatch, after: int) -> list[int]:
    """Let parts be read, and stop before one; returns a list that gets the first file's number of every part read."""
    read: list[int] = []
    plain = importing.read_part

    def reading(part: Any, *others: Any) -> None:
        if len(read) == after:
            raise _Stopped
        plain(part, *others)
        read.append(part.first)

    monkeypatch.setattr(importing, "read_part", reading)
    return read


@pytest.fixture
def stopped(policy: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a log of six files, and what is left of an import of it that was stopped after four."""
    for number in range(6):
        write(tmp_path / "log" / f"{number}.jsonl", *rows(20, number))
    monkeypatch.setattr(parts, "PART_BYTES", 3000)
    with monkeypatch.context() as patch:
        stopping(patch, 4)
        with pytest.raises(_Stopped):
            imported(tmp_path / "log", policy, tmp_path / "r.parquet", format="plain")
    return tmp_path


def test_an_import_that_was_stopped_goes_on(
    stopped: Path, policy: Checkpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sorted(path.name for path in stopped.iterdir()) == [".r.parquet.parts", "log"]
    read = stopping(monkeypatch, -1)
    import_log(stopped / "log", stopped / "r.parquet", policy, ImportConfig(format="plain"), workers=1)
    n = len(read)
    said = capsys.readouterr().err
    assert f"4 of {4 + n} parts had been read before" in said
    assert "not used" not in said
    assert f"{120:,} trajectories" in said
    read.clear()
    assert (
        imported(stopped / "log", policy, stopped / "again.parquet", format="plain")[0]
        == (stopped / "r.parquet").read_bytes()
    )
    assert len(read) == 4 + n
    assert sorted(path.name for path in stopped.iterdir()) == ["again.parquet", "log", "r.parquet"]


@pytest.mark.parametrize("change", ["file", "option", "tokenizer"])
def test_what_depends_on_something_that_changed_is_read_again(
    stopped: Path, policy: Checkpoint, change: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ImportConfig(format="plain")
    if change == "file":
        write(stopped / "log" / "0.jsonl", *rows(20, 7))
    elif change == "option":
        config = replace(config, success_above=0.5)
    else:
        tokenizer = policy.load_tokenizer()
        tokenizer.chat_template = "{{ messages[0]['content'] }}"
        monkeypatch.setattr(Checkpoint, "load_tokenizer", lambda self: tokenizer)
    read = stopping(monkeypatch, -1)
    import_log(stopped / "log", stopped / "r.parquet", policy, config, workers=1)
    assert "others were of another log or other settings, and were not used" in capsys.readouterr().err
    read_now = list(read)
    whole = imported(stopped / "log", policy, stopped / "again.parquet", **vars(config))[0]
    assert whole == (stopped / "r.parquet").read_bytes()
    assert read_now == ([0, 4, 5] if change == "file" else [*range(6)])


def test_what_is_left_out_can_be_decided_later(
    policy: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 1000)
    lines = rows(60)
    lines[20]["response"] = lines[50]["response"] = ""
    path = write(tmp_path / "log.jsonl", *lines)
    read = stopping(monkeypatch, -1)
    with pytest.raises(TsaeError, match=r"log\.jsonl:21: the response is empty"):
        imported(path, policy, tmp_path / "r.parquet")
    before = len(read)
    with monkeypatch.context() as patch:
        patch.setattr(importing.Spools, "write", _stop)
        with pytest.raises(_Stopped):
            imported(path, policy, tmp_path / "r.parquet", skip=("empty",))
    assert 0 < before < len(read)
    whole = len(read)
    # A part without what now is an error is no part of this import.
    with pytest.raises(TsaeError, match=r"log\.jsonl:21: the response is empty"):
        imported(path, policy, tmp_path / "r.parquet")
    assert len(read) == whole
    _, said = imported(path, policy, tmp_path / "r.parquet", skip=("empty", "too-long"))
    assert len(read) == whole + 1
    assert "left out: 2 empty" in said


def _stop(*arguments: Any) -> None:
    raise _Stopped


def test_a_users_verifier_judges_anew(policy: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 1000)
    (tmp_path / "my_verifier.py").write_text("def right(response, answer):\n    return '1' in response\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = write(tmp_path / "log.jsonl", *rows(40), "{")
    read = stopping(monkeypatch, -1)
    for _ in range(2):
        with pytest.raises(TsaeError, match="not a line of JSON"):
            imported(path, policy, tmp_path / "r.parquet", verifier="my_verifier:right")
    assert len(read) > 2
    assert len(read) % 2 == 0


def test_two_imports_do_not_write_one_file(policy: Checkpoint, tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    path = write(tmp_path / "log.jsonl", *rows(4))
    with importing.Journal(tmp_path / "r.parquet", {}, ()), pytest.raises(TsaeError, match="another import writes"):
        imported(path, policy, tmp_path / "r.parquet")


# --- several processes


def test_small_logs_pay_for_no_processes() -> None:
    assert default_workers(1 << 20) == 1
    assert 1 <= default_workers(1 << 30) <= 4


def test_no_workers_read_nothing(policy: Checkpoint, tmp_path: Path) -> None:
    for n in (0, 257):  # a trillion were started
        with pytest.raises(TsaeError, match=f"workers={n} is not 1 to 256"):
            imported(write(tmp_path / "log.jsonl", *rows(4)), policy, tmp_path / "r.parquet", n)


_WORKER = """
import json, sys
sys.stdin.readline()
for line in sys.stdin:
    job = json.loads(line)
    number = job["part"]["first"]
    said = [{"read": 5, "trajectories": 1}] * 3 + [{"error": ["bad", "here", None]} if number == 7 else {"done": True}]
    text = "".join(json.dumps(answer) + "\\n" for answer in said)
    for cut in (text[:50], text[50:]):
        sys.stdout.write(cut)
        sys.stdout.flush()
"""


@pytest.mark.parametrize("n", [1, 2, 3])
def test_what_workers_say_is_heard_however_it_comes(n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_PROGRAM", ("-c", _WORKER))
    heard: list[tuple[int, int, int]] = []
    jobs = [Job(parts.Part((), number, 10), tmp_path, done=number == 3) for number in range(10)]
    done = read_in_workers(jobs, n, {}, lambda *said: heard.append(said))
    assert [next(done).part.first for _ in range(7)] == list(range(7))
    with pytest.raises(TsaeError, match="here: bad"):
        next(done)
    assert heard.count((0, 5, 1)) == 3
    assert not any(number == 3 for number, *_ in heard)


def test_a_worker_reads_what_this_process_reads(
    policy: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its process: what it is told and what it answers goes through JSON."""
    monkeypatch.setattr(parts, "PART_BYTES", 2000)
    monkeypatch.setattr(import_worker, "_EVERY", 0)
    path = write(tmp_path / "log.jsonl", *rows(60))
    options = {"format": "plain", "columns": ColumnNames(reward="reward"), "rewards": ("reward",)}
    whole = imported(path, policy, tmp_path / "r.parquet", **options)

    def serving(jobs: Any, n: int, common: Any, say: Any) -> Iterator[Job]:
        for number, job in enumerate(jobs):
            told = [json.dumps(common), json.dumps({"part": job.part.as_dict(), "folder": str(job.folder)})]
            heard: list[dict[str, Any]] = []
            import_worker.serve(iter(told), lambda heard=heard, **message: heard.append(message))
            *progress, end = json.loads(json.dumps(heard))
            if "error" in end:
                what, where, fix = end["error"]
                raise TsaeError(what, where=where, fix=fix)
            assert end == {"done": True}
            assert [found["trajectories"] for found in progress] == [*range(1, len(progress) + 1)]
            say(number, progress[-1]["read"], len(progress))
            yield job

    monkeypatch.setattr(importing, "read_in_workers", serving)
    assert imported(path, policy, tmp_path / "r.parquet", 2, **options) == whole
    write(path, *rows(60), {"prompt": "1+1=?", "response": ""})
    with pytest.raises(TsaeError, match=r"log\.jsonl:61: the response is empty.*--skip empty"):
        imported(path, policy, tmp_path / "r.parquet", 2)


@pytest.mark.parametrize(
    ("program", "error", "message"),
    [
        ("import sys; sys.exit('it broke')", RuntimeError, "a worker of the import failed:\nit broke"),
        ("import sys; sys.exit(3)", TsaeError, r"was ended from outside \(exit status 3\)"),
        ("import os; os.write(2, b'x'); os.kill(os.getpid(), 9)", TsaeError, r"from outside \(exit status -9\)"),
    ],
)
def test_a_worker_that_ends_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, error: type[Exception], message: str
) -> None:
    monkeypatch.setattr(workers, "_PROGRAM", ("-c", program))
    with pytest.raises(error, match=message):
        list(read_in_workers([Job(parts.Part((), 0, 10), tmp_path, done=False)], 1, {}, lambda *said: None))


def test_the_bar_counts_bytes_and_trajectories(capsys: pytest.CaptureFixture[str]) -> None:
    """Of parts in any order; what an earlier import read does not count for the speed."""
    with Bar(1000, shown=True) as bar:
        bar.end(0, 400, 40, found=True)
        bar.say(2, 100, 10)
        bar.say(1, 50, 5)
        bar.say(2, 200, 20)
        bar.end(2, 300, 31, found=False)
        assert bar.trajectories == 76
        assert (bar._bar.n, bar._bar.initial) == (750, 400)
        bar.end(1, 300, 32, found=False)
        bar._bar.start_t -= 9 - bar._bar.format_dict["elapsed"]
        bar.write("said above")
    told = capsys.readouterr().err
    assert "said above\n" in told
    assert re.search(r"1\.00k/1\.00k .*103 trajectories, 7/s", told.rpartition("\r")[2])
    with Bar(1000, shown=False) as bar:
        bar.end(0, 400, 40, found=True)
        bar.write("not said")
    assert bar.trajectories == 40
    assert capsys.readouterr() == ("", "")


@pytest.fixture
def several(tmp_path: Path) -> Path:
    folder = tmp_path / "log"
    for number in range(3):
        write(folder / f"{number}.jsonl", *rows(150, number))
    return folder


@pytest.mark.slow
def test_the_file_does_not_depend_on_who_reads(
    several: Path, policy: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 2000)
    (tmp_path / "my_checks.py").write_text(
        "def right(response, answer):\n    print('said')\n    return '1' in response\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for config in ({}, {"verifier": "my_checks:right", "rewards": ("reward",)}):
        found = {n: imported(several, policy, tmp_path / "r.parquet", n, **config) for n in (1, 2, 3)}
        assert found[1] == found[2] == found[3]


@pytest.mark.slow
def test_errors_of_workers_are_the_users(
    several: Path, policy: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 2000)
    with (several / "1.jsonl").open("a") as file:
        file.write(json.dumps({**rows(1)[0], "response": ""}) + "\n{\n")
    messages = []
    for n in (1, 3):
        with pytest.raises(TsaeError) as error:
            imported(several, policy, tmp_path / f"{n}.parquet", n)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert "1.jsonl:151: the response is empty" in messages[0]
    (tmp_path / "my_failure.py").write_text("import os\n\ndef right(response, answer):\n    os._exit(3)\n")
    (tmp_path / "my_death.py").write_text("import os\n\ndef right(response, answer):\n    os.kill(os.getpid(), 9)\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_failure", "my_death"):
        with pytest.raises(TsaeError, match=r"a process that read the log was ended.*--workers 1"):
            imported(several, policy, tmp_path / "r.parquet", 2, verifier=f"{name}:right")


def _import(path: Path, llama: Path, to: Path, n: int) -> None:
    parts.PART_BYTES = 50_000
    import_log(path, to, llama, workers=n, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
def test_an_import_that_is_killed_ends_with_the_same_bytes(llama: Path, tmp_path: Path, n: int) -> None:
    path = write(tmp_path / "log.jsonl", *rows(8000))
    child = start(_import, path, llama, tmp_path / "whole.parquet", 1)
    child.join()
    to = tmp_path / "r.parquet"
    folder = to.with_name(f".{to.name}.parts")

    def finished() -> int:
        return len(list(folder.glob("*/part.json")))

    past_next = past(finished, 0.3)
    kills = killed_until_done(
        lambda: start(_import, path, llama, to, n),
        lambda child, kills: past_next(child, kills) if kills < 3 else child.join(),
    )
    assert kills == 3
    assert to.read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    time.sleep(1)  # workers whose import was killed end by themselves
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.jsonl", "r.parquet", "whole.parquet"]


# --- many files


@pytest.mark.slow
def test_a_folder_of_very_many_files(policy: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n = 20_000
    folder = tmp_path / "log"
    folder.mkdir()
    line = json.dumps({"prompt": "1+1=?", "response": "2", "reward": 1.0})
    for i in range(n):
        (folder / f"{i}.jsonl").write_text(f'{line[:-1]}, "step": {i}}}\n')
    opened: dict[Path, int] = defaultdict(int)
    plain = LogFile.rows

    def counting(self: LogFile) -> Iterator[Any]:
        opened[self.path] += 1
        return plain(self)

    monkeypatch.setattr(LogFile, "rows", counting)
    begun = time.monotonic()
    form, files, _ = find_log(folder, ImportConfig())
    found = time.monotonic() - begun
    assert (form.name, len(files)) == ("plain", n)
    # Once, but for the first, which every format looks at whose names fit.
    assert np.mean(list(opened.values())) < 1.01
    assert found < 60
    imported(folder, policy, tmp_path / "r.parquet")
    assert pq.read_metadata(tmp_path / "r.parquet").num_rows == n
    assert time.monotonic() - begun < 240
