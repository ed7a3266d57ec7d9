"""Long logs: read in parts, by several processes, and resumed where an import was stopped."""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

import tsae
from support.children import killed_until_done, past, start
from support.logs import LOGS, refused, write
from tsae.base.output_lock import output_lock
from tsae.checkpoints.loading import Checkpoint
from tsae.errors import TsaeError
from tsae.rollouts import importing
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.importing import import_log
from tsae.rollouts.log_detection import find_log
from tsae.rollouts.logs import import_parts as parts
from tsae.rollouts.logs.log_files import LogFile
from tsae.rollouts.logs.repeats import Groups, drop_repeats


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


SKIP = ("unscored", "empty", "multi-turn", "repeated", "errored")


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("trl", {"outcome": "digits"}),
        *(
            (name, {})
            for name in ("verl", "open-instruct", "nemo-rl", "open-r1", "prime-rl", "prime-rl-tokens", "areal")
        ),
    ],
)
def test_a_log_in_parts_is_the_log(
    name: str, config: dict[str, Any], chat: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = tmp_path / "to" / "r.parquet"
    _, said = imported(LOGS / name, chat, to, skip=SKIP, **config)
    table = pq.read_table(to)
    for limit, least in (("_BATCH_ROWS", 2), ("PART_BYTES", 1)):  # several row groups of one file, then several files
        monkeypatch.setattr(parts, limit, least)
        assert imported(LOGS / name, chat, to, skip=SKIP, **config)[1] == said
        assert pq.read_table(to).equals(table, check_metadata=True)
    assert [path.name for path in to.parent.iterdir()] == ["r.parquet"]


def test_a_bad_line_is_named_in_whatever_part_it_is(
    policy: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 500)
    path = write(tmp_path / "log.jsonl", *rows(40), "{", *rows(40, 1), "[")
    refused(r"log\.jsonl:41: not a line of JSON", imported, path, policy, tmp_path / "r.parquet")


def test_rewards_that_change_their_meaning_from_part_to_part_are_refused(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 1)
    row = {"input": "1+1=?", "output": "2", "gts": "2", "score": 1.0}
    write(tmp_path / "log" / "1.jsonl", {**row, "acc": True, "step": 1})
    write(tmp_path / "log" / "2.jsonl", {**row, "step": 2})
    with pytest.raises(TsaeError, match=r"2\.jsonl:1: score says here what is right, acc in the rows before"):
        imported(tmp_path / "log", llama, tmp_path / "r.parquet", prompt_format="plain")


# --- repeats


def test_repeats_and_counts_are_those_of_a_loop() -> None:
    rng = random.Random(1)
    entries = [
        (rng.choice("ab"), rng.randrange(5), rng.randrange(4), rng.choice([float("nan"), 0.0, 1.0]), rng.random() < 0.5)
        for _ in range(200)
    ]
    frame = pd.DataFrame(entries, columns=["policy", "problem", "key", "reward", "right"])
    index = frame.assign(
        source=(frame.policy == "b").astype(int), file=0, number=range(200), prompt=0, step=1,
        trajectory=[rng.getrandbits(63) for _ in entries], content=[rng.getrandbits(63) for _ in entries],
        outcome=np.where(frame.right, "success", "failure"), same_text=2, retokenised=frame.right,
    )  # fmt: skip
    index = index.astype(dict.fromkeys(("problem", "prompt", "key", "trajectory", "content"), np.uint64))
    index["key"] = index["key"].where(index["key"] == 0, index["key"] * 2 + index.source.astype(np.uint64))
    skipping = ImportConfig(skip=("repeated",))
    kept = drop_repeats(index, [], skipping, str, copies=False)
    last = {key: i for i, key in enumerate(index["key"])}
    assert kept.tolist() == [key == 0 or last[key] == i for i, key in enumerate(index["key"])]
    refused("comes here again", drop_repeats, index, [], ImportConfig(), str, copies=False)
    table, total = importing._by_source(index[kept], Groups(index[kept], skipping), {"a": "named"})
    frame = frame[kept]
    groups = frame.groupby(["policy", "problem"]).reward.agg(["size", "count", "nunique"])
    alike = (groups["size"] > 1) & (groups["count"] == groups["size"]) & (groups["nunique"] == 1)
    assert total["groups"] == len(groups)
    assert total["no_variance"] == alike.sum()
    assert total["problems"] == frame.problem.nunique()
    assert total["success_rate"] == pytest.approx(frame.right.mean())
    counts = frame.policy.replace("a", "named").value_counts()
    assert table.set_index("policy").trajectories.to_dict() == counts.to_dict()


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
    stopped: Path, policy: Checkpoint, change: str, monkeypatch: pytest.MonkeyPatch
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
    refused(r"log\.jsonl:21: the response is empty", imported, path, policy, tmp_path / "r.parquet")
    before = len(read)
    with monkeypatch.context() as patch:
        patch.setattr(importing, "write_table", _stop)
        with pytest.raises(_Stopped):
            imported(path, policy, tmp_path / "r.parquet", skip=("empty",))
    assert 0 < before < len(read)
    whole = len(read)
    # A part without what now is an error is not part of this import.
    refused(r"log\.jsonl:21: the response is empty", imported, path, policy, tmp_path / "r.parquet")
    assert len(read) == whole
    _, said = imported(path, policy, tmp_path / "r.parquet", skip=("empty", "too-long"))
    assert len(read) == whole
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
        refused("not a line of JSON", imported, path, policy, tmp_path / "r.parquet", verifier="my_verifier:right")
    assert len(read) > 2
    assert len(read) % 2 == 0


def test_a_damaged_part_is_read_again(stopped: Path, policy: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, *_ = sorted((stopped / ".r.parquet.parts").iterdir())
    content = bytearray(first.read_bytes())
    content[len(content) // 2] ^= 1
    first.write_bytes(content)
    second.write_bytes(second.read_bytes()[:-100])
    read = stopping(monkeypatch, -1)
    found = imported(stopped / "log", policy, stopped / "r.parquet", format="plain")[0]
    assert len(read) == 4
    assert imported(stopped / "log", policy, stopped / "again.parquet", format="plain")[0] == found


def test_two_imports_do_not_write_one_file(policy: Checkpoint, tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", *rows(4))
    to = tmp_path / "r.parquet"
    with output_lock(to), ThreadPoolExecutor() as pool, pytest.raises(TsaeError, match="written"):
        pool.submit(imported, path, policy, to).result()


# --- several processes


def test_no_workers_read_nothing(policy: Checkpoint, tmp_path: Path) -> None:
    for n in (0, 257):  # a trillion were started
        with pytest.raises(TsaeError, match=f"workers={n} is not 1 to 256"):
            imported(write(tmp_path / "log.jsonl", *rows(4)), policy, tmp_path / "r.parquet", n)


@pytest.mark.parametrize(
    ("program", "message"), [("import sys; sys.exit(3)", "status 3"), ("import os; os.abort()", "-6")]
)
def test_a_worker_that_is_ended_is_named(
    policy: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, message: str
) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 1000)
    monkeypatch.setattr(importing, "_WORKER", f"import sys; sys.stdin.readline(); {program}")
    path = write(tmp_path / "log.jsonl", *rows(60))
    with pytest.raises(TsaeError, match=f"a process that read the log was ended.*{message}.*--workers 1"):
        imported(path, policy, tmp_path / "r.parquet", 2)
    monkeypatch.setattr(importing, "_WORKER", "import sys; sys.stdin.readline()")  # parts that none has read
    found = imported(path, policy, tmp_path / "r.parquet", 2)
    assert found == imported(path, policy, tmp_path / "r.parquet", 1)


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
    (tmp_path / "one_check.py").write_text(
        "def right(response, answer):\n    print('said')\n    return '1' in response\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for config in ({}, {"verifier": "one_check:right", "rewards": ("reward",)}):
        found = {n: imported(several, policy, tmp_path / "r.parquet", n, **config) for n in (1, 2, 3)}
        assert found[1] == found[2] == found[3]


@pytest.mark.slow(ci=True)
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
        return len(list(folder.glob("*.parquet")))

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


# --- a log that grows: only its new parts are read, and only what is complete

SHIPPED = tsae.testbed.series_path()
_STEP = 1_200
"""Bytes of a part; a step below has more."""
PLAIN = ImportConfig(prompt_format="plain")


def lines_of(step: int) -> list[str]:
    frame = pd.read_parquet(SHIPPED / "logs" / "hard" / "completions" / "completions_00025.parquet").head(32)
    names = {"prompt": "input", "completion": "output", "answer": "gts", "correct": "score"}
    rows = frame.rename(columns=names)[list(names.values())].assign(step=step).to_dict("records")
    return [json.dumps(row) + "\n" for row in rows]


@pytest.mark.slow(ci=True)
def test_parts_that_were_read_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", _STEP)
    read: list[str] = []
    really = importing.read_part

    def counted(part: parts.Part, *others: Any) -> None:
        read.append(f"{part.files[0].start}")
        really(part, *others)

    monkeypatch.setattr(importing, "read_part", counted)
    log, series = tmp_path / "run" / "log.jsonl", tsae.testbed.series()
    log.parent.mkdir()
    log.write_text("")
    known = ["hard-025"]

    def grown(*steps: int, checkpoint: str | None = None, compared: bool = False) -> tuple[int, int]:
        """(parts that were read, all parts) of the log with further steps and one more checkpoint."""
        with log.open("a") as more:
            more.writelines(line for step in steps for line in lines_of(step))
        known.extend([checkpoint] if checkpoint else [])
        size = log.stat().st_size
        with log.open("a") as more:
            more.write('{"step": 99, "prom')  # the trainer is at it
        here = series.select(known)
        for name, kept in [("fresh", None)] * compared + [("kept", tmp_path / "parts")]:
            read.clear()
            import_log(log, tmp_path / f"{name}.parquet", here, PLAIN, only={log: size}, kept=kept, progress=False)
        with log.open("r+") as more:
            more.truncate(size)
        if compared:
            assert (tmp_path / "kept.parquet").read_bytes() == (tmp_path / "fresh.parquet").read_bytes()
        return len(read), len(list((tmp_path / "parts").iterdir()))

    first, whole = grown(1, 25, 26)
    assert first == whole > 5
    again, whole = grown()
    assert (again, whole) == (0, first)
    more, longer = grown(40)
    assert longer > whole
    # The last part, which had not been full, and the new ones.
    assert more in (longer - whole, longer - whole + 1)
    # A checkpoint of steps that the log has not seen changes nothing.
    assert grown(checkpoint="hard-100") == (0, longer)
    # Step 50 was logged, and 51 sampled, before its checkpoint was there: their trajectories get another policy.
    grown(50, 51)
    changed, longest = grown(checkpoint="hard-050", compared=True)
    assert 0 < changed < longest / 2
    assert "hard-050" in tsae.Rollouts.read(tmp_path / "kept.parquet").policies
    # An earlier line that has changed is read, whatever its length.
    text = log.read_text()
    log.write_text(text.replace('"score": 1.0', '"score": 0.0', 1))
    assert grown(compared=True)[0] == 1


def test_only_the_files_that_count_are_read(tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / f"{step}.jsonl").write_text("".join(lines_of(step)))
    (tmp_path / "3.jsonl").write_text('{"step')
    series = tsae.testbed.series().select("hard-025")
    first = tmp_path / "1.jsonl"
    only = {first: first.stat().st_size}
    import_log(tmp_path, tmp_path / "to" / "r.parquet", series, PLAIN, only=only, progress=False)
    assert set(tsae.Rollouts.read(tmp_path / "to" / "r.parquet").frame.step) == {1}
    with pytest.raises(TsaeError):
        import_log(tmp_path, tmp_path / "to" / "all.parquet", series, PLAIN, progress=False)
