"""Damaged logs of every trainer: refused in words, or read with nothing wrong in what is not damaged."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.checkpoints import make_tokenizer
from support.logs import LOGS
from tsae import Rollouts
from tsae.checkpoints.loading import Checkpoint
from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.importing import import_log

PLAIN = ("verl", "open-instruct", "nemo-rl", "prime-rl", "prime-rl-tokens", "open-r1")
OPTIONS: dict[str, dict[str, Any]] = {name: {} for name in PLAIN} | {
    "prime-rl-stream": {"skip": ("errored", "empty")},
    "trl": {"outcome": "digits", "skip": ("unscored",)},
}
COMPARED = ("step", "policy", "prompt_ids", "response_ids", "reward", "outcome", "advantage", "finish_reason")
VALUES: dict[str, Any] = {"null": None, "text": "x", "surrogate": "\ud800", "empty list": [], "empty object": {}}
VALUES |= {"number": 1, "negative": -7, "NaN": float("nan"), "infinity": float("inf"), "huge": 10**400}


def read(log: Path, chat: Checkpoint, to: Path, **config: Any) -> tuple[Counter[str], Any]:
    """The trajectories as texts, and the summary."""
    summary = import_log(log, to, chat, ImportConfig(**config), progress=False)
    table = Rollouts.read(to).table.select(COMPARED)
    return Counter(json.dumps(row) for row in table.to_pylist()), summary


def paths(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Ways to everything inside an object; of lists to the first that they hold."""
    inside = value.items() if isinstance(value, dict) else enumerate(value[:1])
    for key, found in inside:
        yield (*before, key)
        if isinstance(found, dict) or (isinstance(found, list) and found and isinstance(found[0], (dict, list))):
            yield from paths(found, (*before, key))


def put(row: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of a row with another value."""
    row = copy.deepcopy(row)
    inside = row
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return row


def at(row: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        row = row[key]
    return row


def damages(row: Any) -> Iterator[tuple[str, Any]]:
    """Every way to damage one row of JSON."""
    for path in paths(row):
        value, name = at(row, path), ".".join(map(str, path))
        for what, other in VALUES.items():
            yield f"{name} = {what}", put(row, path, other)
        kind = "token ids" if re.search("tok|ids", name) and "mask" not in name else "numbers"
        if isinstance(value, list) and value and isinstance(value[0], int):
            for what, other in {
                "beyond the vocabulary": [id + 10**6 for id in value],
                "negative ids": [-id - 1 for id in value],
                "ids as floats": [float(id) for id in value],
                "ids as text": str(np.asarray(value)),
                "flags": [True] * len(value),
            }.items():
                yield f"{name}, {kind}: {what}", put(row, path, other)
        if isinstance(path[-1], str):
            less = copy.deepcopy(row)
            del at(less, path[:-1])[path[-1]]
            yield f"without {name}", less


def last_line(log: Path) -> tuple[Path, list[str]]:
    file = max(log.rglob("*.jsonl"))
    return file, file.read_text(encoding="utf-8").splitlines()


@pytest.mark.slow(ci=True)
@pytest.mark.parametrize(
    ("name", "share"),
    [(name, 0.05) for name in OPTIONS if name != "trl"]
    + [pytest.param(name, 1.0, marks=pytest.mark.slow) for name in OPTIONS if name != "trl"],
)
def test_a_damaged_row_harms_no_other(name: str, share: float, chat: Checkpoint, tmp_path: Path) -> None:
    log = tmp_path / "run"
    shutil.copytree(LOGS / name, log)
    file, lines = last_line(log)
    whole, _ = read(log, chat, tmp_path / "whole.parquet", **OPTIONS[name])
    file.write_text("".join(f"{line}\n" for line in lines[:-1]), encoding="utf-8")
    try:
        others, _ = read(log, chat, tmp_path / "others.parquet", **OPTIONS[name])
    except TsaeError:  # It has one row.
        others = Counter[str]()
    of_the_row = (whole - others).total()
    n_refused = 0
    drawn = np.random.default_rng(0)
    for what, row in damages(json.loads(lines[-1])):
        of_ids = "token ids: " in what and "negative" not in what
        if drawn.random() > share and not of_ids:
            continue
        file.write_text("".join(f"{line}\n" for line in (*lines[:-1], json.dumps(row))), encoding="utf-8")
        try:
            found, summary = read(log, chat, tmp_path / "found.parquet", **OPTIONS[name])
        except TsaeError:
            n_refused += 1
            continue
        assert others - found == Counter(), what
        assert not of_ids or found == whole, what  # They are refused, or as text the same ids.
        n_left_out = sum(summary.skipped.values())
        assert (found - others).total() <= of_the_row, what
        assert (found - others).total() + n_left_out >= of_the_row or "trainable" in what or "kind" in what, what
    assert n_refused


@pytest.mark.parametrize("name", ["trl", "verl"])  # Token ids alone could be any tokenizer's of that size.
def test_a_tokenizer_that_is_not_the_logs_is_refused(name: str, tmp_path: Path) -> None:
    make_tokenizer("chatml").save_pretrained(tmp_path / "other")
    with pytest.raises(TsaeError, match="the checkpoint that was trained"):
        import_log(LOGS / name, tmp_path / "to", tmp_path / "other", ImportConfig(**OPTIONS[name]), progress=False)


@pytest.mark.parametrize("name", ["open-r1", "open-instruct", "prime-rl-tokens"])
def test_a_copy_of_a_file_does_not_count_twice(name: str, chat: Checkpoint, tmp_path: Path) -> None:
    shutil.copytree(LOGS / name, tmp_path / "runs" / "a")
    shutil.copytree(LOGS / name, tmp_path / "runs" / "b")
    with pytest.raises(TsaeError, match=r"is the same file as .*, byte for byte\. Leave one of them out"):
        read(tmp_path / "runs", chat, tmp_path / "found.parquet", **OPTIONS[name])


def test_files_of_before_a_resume_are_pointed_out(chat: Checkpoint, tmp_path: Path) -> None:
    row = json.loads((LOGS / "verl" / "1.jsonl").read_text().splitlines()[0])
    for step, minutes in ((1, 0), (2, 60), (3, 10)):
        file = tmp_path / "run" / f"{step}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({**row, "step": step}) + "\n")
        os.utime(file, (1_700_000_000 + 60 * minutes,) * 2)
    _, summary = read(tmp_path / "run", chat, tmp_path / "found.parquet")
    (note,) = [note for note in summary.notes if "before a resume" in note]
    assert note.startswith("3.jsonl of step 3 is older than the file of step 2")


@pytest.mark.parametrize("change", ["missing", "text"])
def test_a_sum_of_rewards_needs_all_of_them(change: str, chat: Checkpoint, tmp_path: Path) -> None:
    shutil.copytree(LOGS / "trl", tmp_path / "run")
    file = max((tmp_path / "run").rglob("*.parquet"))
    table = pq.read_table(file)
    at_column = table.column_names.index("short")
    texts = pa.array([str(value) for value in table["short"].to_pylist()])
    table = table.drop_columns(["short"]) if change == "missing" else table.set_column(at_column, "short", texts)
    pq.write_table(table, file)
    with pytest.raises(TsaeError, match=r"its rewards are digits; those of the rows before are digits, short"):
        read(tmp_path / "run", chat, tmp_path / "found.parquet", **OPTIONS["trl"])
    config = OPTIONS["trl"] | {"rewards": ("digits",)}
    assert read(tmp_path / "run", chat, tmp_path / "found.parquet", **config)[1].total["trajectories"] > 8


@pytest.mark.slow(ci=True)
@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "trl"])
def test_a_renamed_column_is_missed(name: str, chat: Checkpoint, tmp_path: Path) -> None:
    """As a newer version may rename one: the log is refused, or what it now lacks is said."""
    log = tmp_path / "run"
    shutil.copytree(LOGS / name, log)
    whole, before = read(log, chat, tmp_path / "whole.parquet", **OPTIONS[name])
    files = {file: file.read_text(encoding="utf-8").splitlines() for file in log.rglob("*.jsonl")}
    columns = {key for lines in files.values() for line in lines for key in json.loads(line)}
    for column in sorted(columns):
        for file, lines in files.items():
            rows = ({f"new_{k}" if k == column else k: v for k, v in json.loads(line).items()} for line in lines)
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        try:
            found, summary = read(log, chat, tmp_path / "found.parquet", **OPTIONS[name])
        except TsaeError:
            continue
        said = (set(summary.notes) - set(before.notes)) or summary.skipped != before.skipped
        assert found == whole or said, column
