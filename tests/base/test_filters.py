"""Every public filter takes a value or several."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

import tsae
from support.builders import feature_table, make_rollouts
from support.refusals import refuses
from tsae.activations.store import ActivationStore
from tsae.base.filters import several
from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.series import CheckpointSeries


@pytest.mark.parametrize("one", [1, 1.5, "ab", b"ab", True, None, np.int64(3), np.array(2)])
def test_one_value_stands_for_itself(one: Any) -> None:
    assert several(one) == (one,)


@pytest.mark.parametrize("given", [[1, 2], (1, 2), np.array([1, 2]), pd.Series([1, 2]), range(1, 3), {1: 0, 2: 0}])
def test_several_values_are_several(given: Any) -> None:
    assert several(given) == (1, 2)


def test_rollouts() -> None:
    rollouts = make_rollouts(("base", "run"), n_problems=4).with_column("step", [0] * 12 + [1] * 12)
    for given in (1, np.int64(1), [1], (1,), np.array([1]), 1.0):
        assert rollouts.where(step=given).policies == ["run"]
    assert len(rollouts.where(step=[0, 1], problem_id="p000")) == 6
    assert len(rollouts.where(reward=[0.0, 1.0])) == 24
    assert len(rollouts.where(band=None)) == 24
    assert len(rollouts.where(policy={"base", "run"}, step=0)) == 12
    refuses("no column 'steps'; there are problem_id", rollouts.where, steps=1)


def test_a_series_and_a_store(store: ActivationStore) -> None:
    series = CheckpointSeries((Checkpoint("base", "x"), Checkpoint("a-1", "x", run="a", step=1)))
    assert [c.id for c in series.select("a-1")] == [c.id for c in series.select(["a-1"])] == ["base", "a-1"]
    assert store.subset(readers="base").readers == store.subset(readers=np.array(["base"])).readers == ["base"]


def test_a_feature_table_and_a_diff() -> None:
    rollouts = make_rollouts(("base", "run"), n_problems=12, n_samples=4)
    rows = np.arange(len(rollouts))
    own = rows[48:]
    lengths = rollouts.lengths("prompt_ids") + rollouts.lengths("response_ids")
    n = int(lengths.sum() + lengths[own].sum())
    codes = np.random.default_rng(0).random((n, 3))
    table = feature_table(rollouts, codes, [("base", rows), ("run", own)])
    assert table.rows(reader=["base", "run"]).tolist() == list(range(table.n_rows))
    assert table.rows(reader="base", policy=["run"]).tolist() == table.rows(reader="base", policy="run").tolist()
    found = tsae.feature_diff(table, tsae.DiffConfig(n_bootstrap=100, n_permutations=100))
    shift = found.table(kind="shift", part=["total", "policy"])
    assert set(shift.part) == {"total", "policy"}
    assert len(shift) == len(found.table(kind="shift", part="total")) + len(found.table(kind="shift", part="policy"))
    assert set(found.table(feature=[0, 2]).feature) == {0, 2}
    assert set(found.table(feature=np.int64(1)).feature) == {1}
