"""Rollouts: the table and its files, pass rates and bands, advantages, sampling, and the import of logs."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from scipy.stats import binomtest

from support.builders import BOS, EOS, graded, make_rollouts
from support.checkpoints import rewrite
from support.logs import holds, refused
from tsae.base.statistics import wilson_interval
from tsae.checkpoints.loading import Checkpoint
from tsae.errors import TsaeError
from tsae.rollouts.bands import pass_rates
from tsae.rollouts.behaviours import behaviour_table
from tsae.rollouts.config import BandCutoffs, SamplingConfig
from tsae.rollouts.generation import Generator
from tsae.rollouts.parquet import read_outline, write_table
from tsae.rollouts.problems import Problem, encode_prompt, read_problems, write_problems
from tsae.rollouts.rewards import exact, find_verifier, group_advantages, last_number
from tsae.rollouts.sampling import sample
from tsae.rollouts.schema import SCHEMA
from tsae.rollouts.table import Rollouts


def table_of(**changes: Any) -> pa.Table:
    columns: dict[str, Any] = {
        "problem_id": ["a", "a", "b"],
        "policy": ["base"] * 3,
        "prompt_ids": [[1, 2], [1, 2], [3]],
        "response_ids": [[4], [5, 6], [7, 8, 9]],
        "outcome": ["success", "failure", "unknown"],
    }
    return pa.table({**columns, **changes})


# --- the table and its file


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    written = make_rollouts(("base", "easy"), tokenizer="abc", extra="kept")
    path = written.write(tmp_path / "new" / "rollouts.parquet")
    read = Rollouts.read(path)
    assert read.table.equals(written.table)
    assert read.info == {"tokenizer": "abc"}
    assert read.table["extra"].to_pylist() == ["kept"] * len(read)
    assert read.table.schema.names[: len(SCHEMA)] == SCHEMA.names
    assert read.fingerprint == written.fingerprint
    assert [p.name for p in path.parent.iterdir()] == ["rollouts.parquet"]


def test_equal_tables_give_equal_bytes(tmp_path: Path) -> None:
    first = make_rollouts(seed=3).write(tmp_path / "a.parquet").read_bytes()
    again = Rollouts.read(tmp_path / "a.parquet").write(tmp_path / "b.parquet").read_bytes()
    assert first == again
    assert first != make_rollouts(seed=4).write(tmp_path / "c.parquet").read_bytes()


def test_the_names_of_folders_do_not_become_columns(tmp_path: Path) -> None:
    path = make_rollouts().write(tmp_path / "run=1" / "lr=0.1" / "rollouts.parquet")
    assert Rollouts.read(path).table.equals(make_rollouts().table)


def many_tokens(n: int, length: int = 500) -> Rollouts:
    """Rollouts of n tokens."""
    ids = np.random.default_rng(n).integers(0, 50_000, n).astype(np.int32)
    rows, half = n // length, length // 2
    starts = pa.array(np.arange(rows + 1) * half, pa.int32())
    columns = {
        name: pa.ListArray.from_arrays(starts, pa.array(np.ascontiguousarray(part.ravel())))
        for name, part in zip(
            ("prompt_ids", "response_ids"), np.split(ids.reshape(rows, length), 2, axis=1), strict=True
        )
    }
    texts = {name: [f"{name} of {row // 8}" for row in range(rows)] for name in ("problem_id", "prompt", "response")}
    return Rollouts(pa.table({**columns, **texts, "policy": ["base"] * rows, "outcome": ["unknown"] * rows}))


def test_the_file_and_its_hash_do_not_depend_on_how_the_table_lies_in_memory(tmp_path: Path) -> None:
    whole = many_tokens(600_000)
    parts = pa.concat_tables([whole.table.slice(low, 217) for low in range(0, len(whole), 217)])
    scattered = Rollouts(pa.concat_tables([whole.table.slice(0, 0), parts]))
    assert scattered.table["response_ids"].num_chunks > 4
    assert scattered.fingerprint == whole.fingerprint
    assert scattered.labels_fingerprint == whole.labels_fingerprint
    first, second = whole.write(tmp_path / "a.parquet"), scattered.write(tmp_path / "b.parquet")
    assert first.read_bytes() == second.read_bytes()
    assert [pq.ParquetFile(first).metadata.row_group(i).num_rows for i in range(3)] == [524, 524, 152]
    assert Rollouts.read(first).table.equals(whole.table)
    assert Rollouts.read_rows(first, np.arange(len(whole)) % 7 == 3).table.equals(whole.table[3::7])


def test_the_fingerprints_are_of_the_joined_columns() -> None:
    rollouts = make_rollouts(("base", "easy"))
    digest = hashlib.sha256()
    for name in ("problem_id", "policy"):
        digest.update("\0".join(rollouts.table[name].to_pylist()).encode())
    for name in ("prompt_ids", "response_ids"):
        lists = rollouts.table[name].to_pylist()
        digest.update(np.cumsum([0, *map(len, lists)]).astype(np.int32).tobytes())
        digest.update(np.concatenate(lists).astype(np.int32).tobytes())
    assert rollouts.fingerprint == digest.hexdigest()[:16]
    labels = hashlib.sha256()
    for name in ("outcome", "reward", "advantage", "band"):
        labels.update(json.dumps(rollouts.table[name].to_pylist()).encode())
    assert rollouts.labels_fingerprint == labels.hexdigest()[:16]
    sliced = Rollouts(pa.concat_tables([table_of(), table_of()]).slice(3, 3))
    assert sliced.fingerprint == Rollouts(table_of()).fingerprint
    assert sliced.lengths("response_ids").tolist() == [1, 2, 3]


def test_columns_that_others_wrote_are_read_piece_by_piece(tmp_path: Path) -> None:
    """Categories may differ from row group to row group, and a table may have no rows."""
    one, other = (
        table_of(run=pa.array(names).dictionary_encode(), problem_id=pa.array(ids).dictionary_encode())
        for names, ids in ((["a", "b", "a"], ["p", "q", "q"]), (["c", "c", "a"], ["r", "p", "s"]))
    )
    with pq.ParquetWriter(tmp_path / "two.parquet", one.schema) as writer:
        writer.write_table(one)
        writer.write_table(other)
    found = Rollouts.read(tmp_path / "two.parquet")
    holds(found, run=["a", "b", "a", "c", "c", "a"], problem_id=["p", "q", "q", "r", "p", "s"])
    assert found.tokens(3)[1].tolist() == found.tokens(0)[1].tolist()
    pq.write_table(one.slice(0, 0), tmp_path / "none.parquet")
    refused("holds no trajectories", Rollouts.read, tmp_path / "none.parquet")


def in_a_process(code: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.slow(ci=True)
def test_no_room_for_the_temporary_file_is_said(tmp_path: Path) -> None:
    file = many_tokens(600_000).write(tmp_path / "r.parquet")
    code = (
        "import resource, sys, tsae\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try:\n"
        "    tsae.Rollouts.read(sys.argv[1])\n"
        "except tsae.TsaeError as error:\n"
        "    print(error)\n"
    )
    done = in_a_process(code, file)
    assert "cannot unpack rollouts into a temporary file (File too large)" in done.stdout, done.stderr
    assert "let TMPDIR name another folder" in done.stdout


@pytest.mark.slow
def test_reading_and_writing_take_no_more_memory_for_more_tokens(tmp_path: Path) -> None:
    # Arrow's memory, and numpy's and Python's, at their highest.
    code = (
        "import sys, tracemalloc, pyarrow as pa\n"
        "from tsae.activations.config import CaptureConfig\n"
        "from tsae.activations.reading_plan import check_context, plan_readers\n"
        "from tsae.rollouts.table import Rollouts\n"
        "tracemalloc.start()\n"
        "rollouts = Rollouts.read(sys.argv[1])\n"
        "rollouts.fingerprint, rollouts.labels_fingerprint, rollouts.policies, rollouts.n_problems\n"
        "check_context(rollouts, 500, 50_000)\n"
        "plan_readers(['base'], rollouts, CaptureConfig())\n"
        "rollouts.write(sys.argv[1] + '.copy')\n"
        "print(pa.default_memory_pool().max_memory(), tracemalloc.get_traced_memory()[1])\n"
    )
    peaks = []
    for n in (500_000, 2_500_000):
        done = in_a_process(code, many_tokens(n).write(tmp_path / f"{n}.parquet"))
        assert done.returncode == 0, done.stderr
        peaks.append(sum(map(int, done.stdout.split())))
    # The additional ids alone have 8 MB.
    assert peaks[1] < peaks[0] + 2e6, peaks


@pytest.mark.parametrize("column", ["problem_id", "policy", "prompt_ids", "response_ids", "outcome"])
def test_missing_columns_are_named(tmp_path: Path, column: str) -> None:
    pq.write_table(table_of().drop_columns([column]), tmp_path / "bad.parquet")
    with pytest.raises(TsaeError, match=f"lacks the columns {column}") as error:
        Rollouts.read(tmp_path / "bad.parquet")
    assert str(tmp_path / "bad.parquet") in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outcome": ["success", "right", "failure"]}, "outcome 'right' is none of success, failure, unknown"),
        ({"band": ["easy", "trivial", None]}, "band 'trivial' is none of"),
        ({"policy": ["base", None, "base"]}, "1 rows have no policy"),
        ({"response_ids": [[4], None, [7]]}, "1 rows have no response_ids"),
        ({"response_ids": [[4], [], []]}, r"2 trajectories have empty response_ids \(first: row 1\)"),
        ({"prompt_ids": [[], [1], [2]]}, r"1 trajectories have empty prompt_ids \(first: row 0\)"),
        ({"response_ids": [[4], [5, None], [7]]}, "response_ids .*null"),
        ({"reward": [0.0, math.nan, math.inf]}, r"2 rewards are not finite \(first: row 1\)"),
        ({"reward": [0.0, -1e200, 1.7e308]}, r"2 rewards are larger than 1e\+100, such as -1e\+200 in row 1"),
        ({"response_ids": ["4", "5", "6"]}, "column response_ids is string, expected list"),
        ({"prompt_ids": [[2**31], [1], [2]]}, "column prompt_ids is list"),
    ],
)
def test_bad_values_are_refused(changes: dict[str, Any], message: str) -> None:
    refused(message, Rollouts, table_of(**changes))


@pytest.mark.parametrize("column", ["outcome", "step"])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, column: str) -> None:
    table = table_of().append_column("step", [[1, 2, 3]])
    pq.write_table(table.append_column(column, table[column]), tmp_path / "twice.parquet")
    refused(rf"twice\.parquet: has several columns '{column}'", Rollouts.read, tmp_path / "twice.parquet")


def test_files_that_are_no_rollouts_are_refused(tmp_path: Path) -> None:
    refused("no such rollouts file", Rollouts.read, tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("problem_id,policy\n")
    refused("not a Parquet file", Rollouts.read, tmp_path / "text.parquet")
    content = make_rollouts().write(tmp_path / "good.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(content[:-20])
    refused("not a Parquet file", Rollouts.read, tmp_path / "cut.parquet")


def test_wider_integer_lists_are_taken(tmp_path: Path) -> None:
    """As pandas and other trainers write them."""
    pd.DataFrame(table_of().to_pydict()).to_parquet(tmp_path / "pandas.parquet")
    read = Rollouts.read(tmp_path / "pandas.parquet")
    assert read.table.schema.field("response_ids").type == pa.list_(pa.int32())
    assert [t.tolist() for t in read.tokens(1)] == [[1, 2], [5, 6]]
    large = table_of(response_ids=pa.array([[4], [5, 6], [7]], pa.large_list(pa.int64())))
    assert Rollouts(large).lengths("response_ids").tolist() == [1, 2, 1]


def test_rows_are_selected_and_put_together() -> None:
    whole = make_rollouts(("base", "easy"), n_problems=3, n_samples=2)
    easy = whole.where(policy="easy")
    assert easy.policies == ["easy"]
    assert easy.n_problems == 3
    assert Rollouts.concat([whole.where(policy="base"), easy]).table.equals(whole.table)
    assert whole.where(policy=["easy", "base"], problem_id="p001").frame.problem_id.tolist() == ["p001"] * 4
    assert whole.select([5, 0]).frame.problem_id.tolist() == ["p002", "p000"]
    assert whole.select(np.arange(12) == 7).fingerprint == whole.select([7]).fingerprint
    refused("holds no trajectories", whole.select, [])
    for rows, what in (([0, 12], "no row 12"), ([-1], "no row -1"), ([True] * 11, "11 values for its 12 rows")):
        refused(what, whole.select, rows)
    for values in ([1], pd.Series([1] * 13), np.zeros(11)):
        refused(f"gets {len(values)} values for its 12 rows", whole.with_column, "extra/m", values)
    refused("different tokenizers", Rollouts.concat, [make_rollouts(tokenizer="a"), make_rollouts(tokenizer="b")])
    refused("gets no rollouts", Rollouts.concat, [])
    n = len(whole)
    with pytest.raises(TsaeError, match="extra/m has incompatible types"):
        Rollouts.concat([whole.with_column("extra/m", [1] * n), whole.with_column("extra/m", ["1"] * n)])
    on_base, on_easy = (Rollouts(whole.table, {"bands": {"reference": name}}) for name in ("base", "easy"))
    assert Rollouts.concat([on_base, on_base]).info == on_base.info
    for others in ([on_easy], [on_base, Rollouts(whole.table)]):
        assert "bands" not in Rollouts.concat([on_base, *others]).info


def test_lengths_count_tokens() -> None:
    rollouts = Rollouts(table_of())
    assert rollouts.frame.response_length.tolist() == [1, 2, 3]
    assert rollouts.frame.prompt_length.tolist() == [2, 2, 1]
    assert "response_ids" not in rollouts.frame


# --- difficulty


def test_wilson_agrees_with_scipy() -> None:
    for confidence in (0.8, 0.95, 0.99):
        for trials in (1, 2, 8, 24, 1000):
            for successes in sorted({0, 1, trials // 3, trials}):
                low, high = wilson_interval(successes, trials, confidence)
                expected = binomtest(successes, trials).proportion_ci(confidence, method="wilson")
                assert (float(low), float(high)) == pytest.approx((expected.low, expected.high), abs=1e-12)
    low, high = wilson_interval(np.array([0, 1]), np.array([0, 2]))
    assert (low[0], high[0]) == (0.0, 1.0)
    assert 0 < low[1] < high[1] < 1


def test_pass_rates_count_known_outcomes_of_the_policy() -> None:
    both = graded({"base": {"a": (3, 1, 2), "b": (0, 2, 2)}, "easy": {"a": (0, 4)}})
    base = pass_rates(both.frame, both.origin, "base")
    assert base.n.to_dict() == {"a": 4, "b": 2}
    assert base.pass_rate.to_dict() == {"a": 0.75, "b": 0.0}
    assert pass_rates(both.frame, both.origin).pass_rate.to_dict() == {"a": 3 / 8, "b": 0.0}
    assert base.low["a"] == pytest.approx(binomtest(3, 4).proportion_ci(method="wilson").low)
    refused(
        "no trajectory of known outcome was sampled by hard; there are the policies base",
        pass_rates,
        both.frame,
        both.origin,
        "hard",
    )


def test_bands_follow_the_cutoffs() -> None:
    rates = {"a": (4, 0), "b": (3, 1), "c": (2, 2), "d": (1, 3), "e": (0, 4)}
    rollouts, more = graded({"base": rates}), graded({"base": {id: (*n, 1) for id, n in rates.items()}})
    banded = rollouts.with_bands("base", measured_on=more)
    bands = ["easy", "easy", "medium", "hard", "hard"]
    assert banded.frame.groupby("problem_id").band.first().to_dict() == dict(zip(rates, bands, strict=True))
    strict = rollouts.with_bands("base", cutoffs=BandCutoffs(easy=1.0, hard=0.0), measured_on=more)
    assert strict.frame.groupby("problem_id").band.first().tolist() == ["easy", "medium", "medium", "medium", "hard"]
    assert strict.frame.pass_rate.tolist() == [1.0] * 4 + [0.75] * 4 + [0.5] * 4 + [0.25] * 4 + [0.0] * 4
    assert strict.info["bands"] == {
        "reference": "base", "easy": 1.0, "hard": 0.0, "separate": True, "cross_fitted": False, "halved": 0,
        "unbanded": 0,
    }  # fmt: skip


def test_bands_measured_on_other_rollouts() -> None:
    mine = graded({"run": {"a": (0, 1), "b": (0, 1), "c": (0, 1)}})
    elsewhere = graded({"base": {"a": (4, 0), "b": (2, 2), "c": (0, 4), "d": (0, 4)}})
    banded = mine.with_bands("base", measured_on=elsewhere)
    assert banded.frame.band.tolist() == ["easy", "medium", "hard"]
    assert banded.info["bands"]["separate"] is True


def test_an_empty_band_is_refused() -> None:
    refused(
        r"no problem falls into the band medium: pass rates of base run from 0\.00 to 1\.00",
        graded({"base": {"a": (4, 0), "c": (0, 4)}}).with_bands,
        "base",
    )
    refused("band easy or hard", graded({"base": {"a": (2, 2)}}).with_bands, "base")


@pytest.mark.parametrize(("easy", "hard"), [(0.2, 0.8), (0.5, 0.5), (1.1, 0.2), (0.5, -0.1)])
def test_cutoffs_out_of_order_are_refused(easy: float, hard: float) -> None:
    refused("not in order", BandCutoffs, easy=easy, hard=hard)


# --- advantages


def test_advantages_by_hand() -> None:
    rewards, groups = np.array([1.0, 0.0, 0.0, 0.0, 5.0, 2.0, 2.0]), np.array(["x"] * 4 + ["lone"] + ["same"] * 2)
    centred = [0.75, -0.25, -0.25, -0.25, 0.0, 0.0, 0.0]
    # The unbiased deviation of 1, 0, 0, 0 is sqrt((.75² + 3 · .25²) / 3) = .5.
    assert group_advantages(rewards, groups).tolist() == pytest.approx([c / (0.5 + 1e-4) for c in centred], abs=1e-12)
    assert group_advantages(rewards, groups, "dr_grpo").tolist() == pytest.approx(centred)
    # 1 − mean(0, 0, 0) = 1; 0 − mean(1, 0, 0) = −1/3.
    assert group_advantages(rewards, groups, "rloo").tolist() == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3, 0, 0, 0])


def test_groups_are_of_one_policy_and_problem() -> None:
    whole = make_rollouts(("base", "easy"), n_problems=4, n_samples=5).with_advantages("dr_grpo")
    frame = whole.frame
    expected = frame.reward - frame.groupby(["policy", "problem_id"]).reward.transform("mean")
    assert frame.advantage.tolist() == pytest.approx(expected.tolist())
    refused("3 trajectories have no reward", Rollouts(table_of()).with_advantages)


def test_behaviours_are_means_over_problems() -> None:
    rollouts = graded({"base": {"a": (3, 1, 1), "b": (1, 0, 1), "c": (0, 0, 1)}})
    rollouts = rollouts.with_column("direct", [1.0, 0, 0, 0, 1, 1, 1, 0])
    rollouts = Rollouts(rollouts.table, {"behaviours": ["direct"]})
    found = behaviour_table(rollouts).set_index("behaviour")
    assert found.loc["accuracy", "mean"] == pytest.approx((0.75 + 1.0) / 2)  # c is unknown, and b is not outweighed
    assert found.loc["accuracy", "n_problems"] == 2
    assert found.loc["direct", "mean"] == pytest.approx((2 / 5 + 1 + 0) / 3)
    assert found.low.isna().tolist() == found.high.isna().tolist() == [False, True, False]  # all lengths are alike
    known = found.dropna(subset="low")
    assert ((known.low <= known["mean"]) & (known["mean"] <= known.high)).all()


# --- verifiers and problems


def test_verifiers() -> None:
    assert exact(" 12 \n", "12")
    assert not exact("12.", "12")
    wrong = (("no number", "1"), ("1 then 2", "1"), ("The answer is 9007199254740993", "9007199254740992"),
             ("1" + "0" * 400, "9" * 500), ("0.1", "0.10000000000000000001"))  # fmt: skip
    right = (("so 3 apples cost $1,234.50.", "#### 1234.5"), ("it is -3", "-3"), ("007 is 12.50", "12.5"),
             ("it is " + "9" * 5000, "9" * 5000), ("−5", "-5"), ("x = −.5.", "-0.5"), (r"1{,}000{,}000", "1000000"),
             (r"10,\!236", "10236"), ("it is .5", "1/.5"), ("$.50", "0.5"), ("1e5", "100,000"), ("2.5E-3.", ".0025"),
             # As ever:
             (r"\{1{,}2\}", "2"), ("10−5", "5"), ("No.5", "5"), ("v1.2.5", "5"), ("so...5", "5"), ("1e5f", "5"),
             ("12e4567", "4567"), ("f22e89", "89"), ("3/4", "4"))  # fmt: skip
    for pairs in (wrong, right):
        assert {last_number(*pair) for pair in pairs} == {pairs is right}
    assert find_verifier("exact") is exact
    assert find_verifier("tsae.rollouts.rewards:last_number") is last_number
    for name in ("nope", "tsae.rollouts.rewards:nope", "no_such_module:f"):
        refused("verifier", find_verifier, name)


def test_problems_are_written_and_read_back(tmp_path: Path) -> None:
    problems = [Problem("a", "1+1?", "2", "easy"), Problem("b", "é?", "x")]
    write_problems(problems, tmp_path / "p.jsonl")
    assert read_problems(tmp_path / "p.jsonl") == problems
    (tmp_path / "q.jsonl").write_text('{"id": 1, "prompt": "1+1?", "answer": 2.0, "level": 3.0}\n\n')
    assert read_problems(tmp_path / "q.jsonl") == [Problem("1", "1+1?", "2", "3")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not a problem"),
        ("[1]", "not a problem"),
        ('{"id": 1, "prompt": "x"}', "not a problem .KeyError: 'answer'"),
        ('{"id": 1, "prompt": 5, "answer": 2}', "not a problem"),
        ('{"id": null, "prompt": "x", "answer": 2}', "not a problem .TypeError: the id is None"),
        ('{"id": 1, "prompt": "x", "answer": null}', "not a problem .TypeError: the answer is None"),
        ('{"id": 1, "prompt": "x", "answer": true}', "not a problem .TypeError: the answer is True"),
        ('{"id": 1, "prompt": "x", "answer": [1, 2]}', "not a problem .TypeError: the answer is .1, 2"),
        ('{"id": 1, "prompt": "x", "answer": NaN}', "not a problem .TypeError: the answer is nan"),
        ('{"id": 1, "prompt": "x", "answer": 1e400}', "not a problem .TypeError: the answer is inf"),
        ('{"id": 0, "prompt": "x", "answer": 2}', "'0' comes twice"),
        ('{"id": 1, "prompt": "\udcfb", "answer": 2}', "not a problem .UnicodeDecodeError"),
        (r'{"id": 1, "prompt": "x", "answer": "\ud800"}', "not a problem .UnicodeEncodeError"),
        (r'{"id": 1, "prompt": "\ud800", "answer": 1}', "not a problem .UnicodeEncodeError"),
        ('{"id": 1, "prompt": "x", "answer": 2, "answer": 3}', "'answer' comes twice, with different values"),
        ("[" * 100_000, "not a problem .JSONDecodeError: nested too deeply"),
    ],
)
def test_bad_problem_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    text = '\ufeff{"id": 0, "prompt": "1+1?", "answer": 2}\n' + line + "\n"
    (tmp_path / "p.jsonl").write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(TsaeError, match=message) as error:
        read_problems(tmp_path / "p.jsonl")
    assert f"{tmp_path / 'p.jsonl'}:2" in str(error.value)


# --- sampling


PROBLEMS = [Problem("a", "1+1?", "2"), Problem("b", "3*4+5-6*7?", "9"), Problem("c", "8?", "8")]


def test_sampling_is_seeded(policy: Checkpoint) -> None:
    config = SamplingConfig(n_samples=4, max_new_tokens=10, batch_size=5, seed=1)
    state = torch.get_rng_state()
    first = sample(policy, PROBLEMS, config, progress=False)
    assert torch.equal(torch.get_rng_state(), state)  # the caller's random numbers are left alone
    torch.manual_seed(99)
    again = sample(policy, PROBLEMS, config, progress=False)
    other = sample(policy, PROBLEMS, SamplingConfig(**{**config.__dict__, "seed": 2}), progress=False)
    assert first.table.equals(again.table)
    assert first.fingerprint != other.fingerprint
    assert first.frame.problem_id.tolist() == ["a"] * 4 + ["b"] * 4 + ["c"] * 4
    assert len({tuple(ids) for ids in first.table["response_ids"].to_pylist()}) > 6


def test_a_checkpoint_rewritten_while_it_samples_is_refused(
    llama: Path, policy: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, pieces = SamplingConfig(n_samples=4, max_new_tokens=10, batch_size=5, seed=1), tmp_path / "pieces"
    folder, generate = Path(shutil.copytree(llama, tmp_path / "model")), Generator.generate
    checkpoint, calls = Checkpoint(id="base", path=str(folder)), list[int]()

    def rewritten_before_the_second(self: Generator, prompts: Any, seed: int) -> Any:
        calls.append(seed)
        if len(calls) == 2:
            rewrite(folder)
        return generate(self, prompts, seed)

    with monkeypatch.context() as patch:
        patch.setattr(Generator, "generate", rewritten_before_the_second)
        with pytest.raises(TsaeError, match="model: its weights or its config changed while they were in use"):
            sample(checkpoint, PROBLEMS, config, pieces=pieces, progress=False)
    refused("weights", sample, checkpoint, PROBLEMS, config, pieces=pieces, progress=False)
    shutil.copytree(llama, folder, dirs_exist_ok=True)
    found = sample(checkpoint, PROBLEMS, config, pieces=pieces, progress=False)
    assert found.table.equals(sample(policy, PROBLEMS, config, progress=False).table)


def test_cold_samples_are_the_argmax_of_every_prompt_alone(policy: Checkpoint) -> None:
    """Prompts of different lengths share a batch: padding that were attended to would change the argmax."""
    found = sample(policy, PROBLEMS, SamplingConfig(n_samples=1, temperature=1e-4, max_new_tokens=12), progress=False)
    model, tokenizer = policy.load_model(), policy.load_tokenizer()
    for row, problem in enumerate(PROBLEMS):
        ids = list(tokenizer(problem.prompt)["input_ids"])
        prompt, response = found.tokens(row)
        assert prompt.tolist() == ids
        assert ids[0] == BOS
        for token in response.tolist():
            with torch.no_grad():
                assert int(model(torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids.append(token)
        assert len(response) == 12 or response[-1] == EOS


def test_sampled_shares_are_the_models_probabilities(policy: Checkpoint) -> None:
    found = sample(
        policy, PROBLEMS[:1], SamplingConfig(n_samples=2000, max_new_tokens=1, batch_size=500), progress=False
    )
    with torch.no_grad():
        logits = policy.load_model()(torch.tensor([policy.load_tokenizer()(PROBLEMS[0].prompt)["input_ids"]])).logits
    expected = logits[0, -1].softmax(0).numpy()
    counts = np.bincount([int(found.tokens(row)[1][0]) for row in range(2000)], minlength=20)
    assert np.abs(counts / 2000 - expected).max() < 4 * np.sqrt(0.25 / 2000)


def test_nothing_of_the_models_generation_config_changes_what_is_sampled(llama: Path, tmp_path: Path) -> None:
    """Chat models ship top_p, top_k and a repetition penalty: rollouts of the policy itself have none of them."""
    shutil.copytree(llama, tmp_path / "model")
    file = tmp_path / "model" / "generation_config.json"
    shipped = {"repetition_penalty": 5.0, "top_p": 0.1, "min_p": 0.5, "suppress_tokens": [1], "do_sample": True}
    file.write_text(json.dumps({**json.loads(file.read_text()), **shipped}))
    config = SamplingConfig(n_samples=6, max_new_tokens=10)
    plain = sample(Checkpoint("base", str(llama)), PROBLEMS, config, progress=False)
    biased = sample(Checkpoint("base", str(tmp_path / "model")), PROBLEMS, config, progress=False)
    assert biased.fingerprint == plain.fingerprint


def test_responses_end_with_their_end_token_and_are_checked(policy: Checkpoint) -> None:
    seen: list[tuple[str, str]] = []

    def verify(response: str, answer: str) -> bool:
        seen.append((response, answer))
        return len(response) % 2 == 0

    config = SamplingConfig(n_samples=20, max_new_tokens=8, temperature=2.0)
    found = sample(policy, PROBLEMS, config, verify=verify, progress=False)
    tokenizer = policy.load_tokenizer()
    finished = 0
    for row, record in enumerate(found.table.to_pylist()):
        ids = record["response_ids"]
        assert EOS not in ids[:-1]
        assert record["finish_reason"] == ("stop" if ids[-1] == EOS else "length")
        assert record["finish_reason"] == "stop" or len(ids) == 8
        assert record["response"] == tokenizer.decode(ids, skip_special_tokens=True)
        assert seen[row] == (record["response"], record["answer"])
        assert record["reward"] == float(len(record["response"]) % 2 == 0)
        assert record["outcome"] == ("success" if record["reward"] else "failure")
        finished += ids[-1] == EOS
    assert 0 < finished < len(found)


def test_sampling_refuses_what_cannot_work(policy: Checkpoint) -> None:
    refused("no problems given", sample, policy, [], progress=False)
    with pytest.raises(TsaeError, match="problem b has 11 prompt tokens, which with max_new_tokens=120 exceeds"):
        sample(policy, PROBLEMS, SamplingConfig(max_new_tokens=120), progress=False)
    with pytest.raises(TsaeError, match=r"problem x.*cannot be tokenised"):
        sample(policy, [Problem("x", "What is 1+1?", "2")], SamplingConfig(max_new_tokens=4), progress=False)
    bad = {"n_samples": (0, 10**12), "max_new_tokens": (0, 10**12), "batch_size": (0,), "temperature": (0.0, math.nan)}
    for name, value in ((name, value) for name, values in bad.items() for value in values):
        refused(name, SamplingConfig, **{name: value})


def test_a_policy_with_nan_weights_is_refused(llama: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(llama, tmp_path / "model")
    weights = load_file(llama / "model.safetensors")
    weights["lm_head.weight"][3] = torch.nan
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TsaeError, match="next-token probabilities are not finite") as error:
        sample(Checkpoint("base", str(tmp_path / "model")), PROBLEMS, SamplingConfig(max_new_tokens=2), progress=False)
    assert str(tmp_path / "model") in str(error.value)


TEMPLATE = "{% for m in messages %}#{{ m['content'] }}={% endfor %}{% if add_generation_prompt %};{% endif %}"


def test_chat_templates_are_applied_on_request(policy: Checkpoint) -> None:
    tokenizer = policy.load_tokenizer()
    plain = encode_prompt(tokenizer, "1+1?")
    assert plain == [BOS, 1, 10, 1, 13]
    refused("no chat template", encode_prompt, tokenizer, "1+1?", "chat")
    tokenizer.chat_template = TEMPLATE
    for broken in ("{% broken", "{{ messages[7].content }}", "{{ 1 // 0 }}"):
        tokenizer.chat_template = broken
        refused("chat template cannot be applied", encode_prompt, tokenizer, "1+1?")
    tokenizer.chat_template = TEMPLATE
    assert encode_prompt(tokenizer, "1+1?") == [16, 1, 10, 1, 13, 14, 15]  # no second <bos>
    assert encode_prompt(tokenizer, "1+1?", "chat") == [16, 1, 10, 1, 13, 14, 15]
    assert encode_prompt(tokenizer, "1+1?", "plain") == plain


@pytest.mark.slow
def test_a_file_is_read_without_all_of_it_in_memory(tmp_path: Path) -> None:
    few = make_rollouts(n_problems=16, n_samples=4)
    few = few.with_column("prompt", [f"{i} {'long ' * 4000}" for i in range(len(few))])
    whole = Rollouts(pa.concat_tables([few.table] * 20), {"tokenizer": "t"})
    file = write_table(tmp_path / "r.parquet", few.table.schema, [few.table] * 20, whole.info)
    outline = read_outline(file)
    pd.testing.assert_frame_equal(outline, whole.frame[list(outline)])
    rows = np.arange(len(whole)) % 97 == 5
    # Peaks so far, in a process of its own: a memory pool's highest mark does not go down.
    code = (
        "import sys, numpy as np, pyarrow as pa\n"
        "from tsae.rollouts.parquet import read_outline\n"
        "from tsae.rollouts.table import Rollouts\n"
        "for read in (read_outline, lambda f: Rollouts.read_rows(f, np.arange(1280) % 97 == 5), Rollouts.read):\n"
        "    found = read(sys.argv[1])\n"
        "    print(pa.default_memory_pool().max_memory())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True)
    outlined, some, everything = map(int, done.stdout.split())
    # The 1,280 prompts have 20 kB each. Read, they lie in a mapped file.
    assert outlined < 1e6
    assert some < 8e6
    assert everything < 8e6
    found = Rollouts.read_rows(file, rows)
    assert found.table.equals(whole.select(rows).table)
    assert found.info == whole.info
