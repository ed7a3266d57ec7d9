"""Plain directions beside the best features, on stores whose activations are planted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from support.builders import feature_table, synthetic_store
from support.refusals import refuses
from tsae.diff.baselines import baselines, mean_activations
from tsae.diff.config import DiffConfig
from tsae.rollouts.table import Rollouts

QUICK = DiffConfig(n_bootstrap=200, n_permutations=1000)
D_MODEL = 6


def planted(folder: Path, *, effect: float, n_problems: int = 30, seed: int = 0) -> tuple[Any, Any]:
    """Successes move along one direction; along another trajectories vary ten times as much. One feature of five knows
    of success, with noise."""
    rng = np.random.default_rng(seed)
    texts, outcomes, codes = [], [], []
    for problem in range(n_problems):
        level = rng.normal(size=D_MODEL)
        for sample in range(4):
            right = sample % 2 == 0
            own = rng.normal(size=D_MODEL) * np.array([1, 1, 1, 1, 1, 10])
            own += right * effect * np.array([2, 0, 0, 0, 0, 2])
            texts.append(level + own + 0.1 * rng.normal(size=(4, D_MODEL)))
            outcomes.append((problem, right))
            code = np.maximum(rng.normal(1, 1, size=5) + right * effect * np.eye(5)[2], 0)
            codes.append(np.concatenate([np.zeros((1, 5)), np.tile(code, (3, 1))]))
    store = synthetic_store(folder, texts, special=())
    records = store.rollouts.table.to_pylist()
    for record, (problem, right) in zip(records, outcomes, strict=True):
        record |= {"problem_id": f"p{problem}", "outcome": "success" if right else "failure"}
    rollouts = Rollouts.from_records(records)
    table = feature_table(rollouts, np.concatenate(codes), [("base", np.arange(len(texts)))], special=())
    table.info["sae"]["site"] = "x.site"
    return table, store


def test_a_probe_sees_what_a_plain_direction_drowns(tmp_path: Path) -> None:
    table, store = planted(tmp_path, effect=1.0)
    found = baselines(table, store, QUICK).set_index("way")
    assert set(found.kind) == {"outcome"}
    assert (found.n_problems == 30).all()
    assert found.auroc["linear probe"] > 0.8 > 0.7 > found.auroc["mean difference"]
    assert 0.6 < found.auroc["best feature"] < 0.9
    assert ((found.low <= found.auroc) & (found.auroc <= found.high)).all()


def test_nothing_is_told_apart_where_nothing_differs(tmp_path: Path) -> None:
    """Choosing the best of many on the problems that it is judged on would give more than a half."""
    auroc = []
    for seed in range(5):
        table, store = planted(tmp_path / str(seed), effect=0.0, seed=seed)
        auroc.append(baselines(table, store, QUICK).auroc.to_numpy())
    assert np.abs(np.mean(auroc, axis=0) - 0.5).max() < 0.1


def test_mean_activations_are_those_of_the_rows(tmp_path: Path) -> None:
    table, store = planted(tmp_path, effect=1.0, n_problems=3)
    found = mean_activations(table, store, QUICK)
    raw = np.concatenate([shard.read("x.site", slice(0, shard.n_tokens)) for shard in store.shards()])
    np.testing.assert_allclose(found[5], raw[21:24].mean(0), rtol=1e-5)
    assert found.shape == (12, D_MODEL)


def test_too_few_problems_and_foreign_stores_are_refused(tmp_path: Path) -> None:
    table, store = planted(tmp_path / "few", effect=1.0, n_problems=4)
    found = baselines(table, store, QUICK)
    assert found.auroc.isna().all()
    assert set(found.note) == {"4 problems have both sides; 10 are needed"}
    _, other = planted(tmp_path / "other", effect=1.0, n_problems=5)
    refuses("not encoded from this store", baselines, table, other, QUICK)
