"""Tables of Python as logs: what they may be, their index, and errors in the user's own words."""

from __future__ import annotations

import decimal
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from support.builders import BOS, EOS, make_rollouts
from support.logs import refused
from tsae.checkpoints.loading import Checkpoint
from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.table import Rollouts

N = 12


def plain() -> pd.DataFrame:
    """Four problems with one prompt, which only their ids tell apart."""
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "problem_id": [f"p{i // 3}" for i in range(N)],
            "step": [7] * N,
            "prompt_ids": [[BOS, 5, 6]] * N,
            "response_ids": [[*rng.integers(3, 10, 3 + i % 3).tolist(), EOS] for i in range(N)],
            "reward": [float(i % 3 == 0) for i in range(N)],
            "level": ["easy", "hard"] * (N // 2),
        }
    )


class Stream:
    """A table of another library: all that it shows is Arrow's stream."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.table.__arrow_c_stream__(requested_schema)


class Convertible:
    """A table of another library that gives one of Arrow."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def to_arrow(self) -> pa.Table:
        return self.table


def of_datasets(frame: pd.DataFrame) -> Any:
    datasets = pytest.importorskip("datasets")
    turned = datasets.Dataset.from_pandas(frame[::-1].reset_index(drop=True))
    return datasets.DatasetDict(train=turned.select(range(N - 1, -1, -1)))


TABLES: dict[str, Callable[[pd.DataFrame], Any]] = {
    "index levels": lambda f: f.set_index(["problem_id", "step"]),
    "a named index": lambda f: f.set_index("problem_id"),
    "groups": lambda f: f.groupby("problem_id")[[n for n in f if n != "problem_id"]].apply(lambda g: g.reset_index()),
    "rows of another frame": lambda f: pd.concat([f[:5], f, f[5:]])[5 : 5 + N],
    "polars": lambda f: Stream(pa.Table.from_pandas(f)),
    "an object with to_arrow": lambda f: Convertible(pa.Table.from_pandas(f)),
    "pyarrow": lambda f: pa.Table.from_pandas(f),
    "a batch": lambda f: pa.Table.from_pandas(f).to_batches()[0],
    "a reader": lambda f: pa.Table.from_pandas(f).to_reader(),
    "datasets": of_datasets,
    "rows": lambda f: f.to_dict("records"),
    "a generator": lambda f: (row for row in f.to_dict("records")),
    "columns": lambda f: f.to_dict("list"),
    "arrays": lambda f: (
        {name: np.array(f[name]) for name in f if "ids" not in name} | {n: f[n] for n in f if "ids" in n}
    ),
    "tensors": lambda f: f.assign(response_ids=[torch.tensor(ids) for ids in f.response_ids]),
    "floats": lambda f: f.assign(response_ids=[[float(id) for id in ids] for ids in f.response_ids]),
    "categories": lambda f: f.astype({"problem_id": "category", "level": "category"}),
    "sparse": lambda f: f.assign(reward=f.reward.astype(pd.SparseDtype("float", 0))),
    "decimals": lambda f: f.assign(reward=[decimal.Decimal(str(x)) for x in f.reward]),
    "columns that no file holds": lambda f: f.assign(c=1j, meta=[{}] * N, mixed=["a", *range(N - 1)]),
}


@pytest.mark.slow(ci=True)
@pytest.mark.filterwarnings("ignore:1 prompts have several problem ids")
def test_any_table_gives_what_a_plain_frame_gives(policy: Checkpoint) -> None:
    expected = Rollouts.read(plain(), policy).table
    assert expected["problem_id"].unique().to_pylist() == ["p0", "p1", "p2", "p3"]
    assert expected["step"].to_pylist() == [7] * N
    for name, make in TABLES.items():
        assert Rollouts.read(make(plain()), policy).table.equals(expected), name
    ids = plain().assign(problem_id=[uuid.UUID(int=i // 3) for i in range(N)])
    assert Rollouts.read(ids, policy).n_problems == 4
    assert Rollouts.read(plain(), policy, ImportConfig(run="mine")).policies == ["mine-00007"]


def test_errors_name_rows_and_columns_of_the_table_given(policy: Checkpoint) -> None:
    frame = plain().assign(answer="1").set_index(["problem_id", "step"])
    wrong = frame.assign(reward=[float("inf") if i == 5 else 1.0 for i in range(N)])
    with pytest.raises(TsaeError, match=r"^the table: row 5 \(index \('p1', .*7.*\)\): reward is inf") as caught:
        Rollouts.read(wrong, policy)
    assert caught.value.__cause__ is None
    mixed = frame.assign(answer=[3 if i == 4 else "a" for i in range(N)])
    refused(r"^the table: row 4 \(index .*\): column 'answer' cannot be read", Rollouts.read, mixed, policy)
    other = plain().set_index("problem_id", drop=False)
    other["problem_id"] = other.problem_id.to_numpy()[::-1]
    two = {"a": pa.table({"prompt": ["1"]}), "b": pa.table({"prompt": ["1"]})}
    for given, message in (
        (other, "has a column and an index level 'problem_id' that differ"),
        (two, r"has the splits a, b\. Give one of them, such as data\['a'\]"),
        (
            {"prompt": ["1", "2"], "response": ["1"]},
            r"has columns that do not fit together \(.*response expected length 2",
        ),
        ({"prompt": "1", "response": "2"}, "row 0: is of type dict, expected a row as a dict, or a table"),
        ([{"prompt": "1"}, 3], "row 1: is of type int, expected a row"),
        (3, "row 0: is of type int, expected"),
        (plain().level.astype("string[pyarrow]"), "is of type Series, not a table|row 0: is of type str"),
        ([{"prompt": "1", "response": []}], "row 0: the response is empty"),
        (plain()[:0], "holds no trajectories"),
        (pd.concat([plain(), plain()[["reward"]]], axis=1), "has several columns 'reward'"),
    ):
        refused(f"^the table: {message}", Rollouts.read, given, policy)


def test_a_series_is_aligned_by_its_index() -> None:
    rollouts = make_rollouts()
    frame = rollouts.frame.assign(value=range(len(rollouts)))
    turned = frame.value[::-1]
    assert rollouts.with_column("value", turned).table["value"].to_pylist() == list(range(len(rollouts)))
    assert rollouts.select(turned < 2).fingerprint == rollouts.select([0, 1]).fingerprint
    with pytest.raises(TsaeError, match=r"the index of the Series 'value' is not the rows 0 to"):
        rollouts.with_column("value", frame.value.set_axis(frame.value + 1))


def test_ids_that_are_other_problems_elsewhere_are_refused() -> None:
    rollouts = make_rollouts()
    other = rollouts.with_column("prompt", [f"another {text}!" for text in rollouts.table["prompt"].to_pylist()])
    assert len(Rollouts.concat([rollouts, other])) == 2 * len(rollouts)  # a template around it
    foreign = rollouts.with_column("prompt", ["what?"] * len(rollouts))
    for use in (
        lambda: Rollouts.concat([rollouts, foreign]),
        lambda: rollouts.with_bands(None, measured_on=foreign.select(range(len(foreign) - 1))),
    ):
        refused(r"problem id '.*' has the prompt", use)


def test_a_table_of_mask_values_is_refused() -> None:
    rollouts = make_rollouts()
    ids = rollouts.table["response_ids"].to_pylist()
    refused("response_ids holds mask values below 0", rollouts.with_column, "response_ids", [[*ids[0], -100], *ids[1:]])
