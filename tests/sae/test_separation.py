"""Linear probes against other implementations, and separation where the answer is planted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from support.builders import random_sae, synthetic_store
from support.refusals import refuses
from tsae.activations.store import ActivationStore
from tsae.base.artefact import write_record
from tsae.base.statistics import percentile_interval
from tsae.rollouts.table import Rollouts
from tsae.sae.config import SAEConfig
from tsae.sae.model import TemporalSAE
from tsae.sae.quality.probing import (
    PENALTIES,
    Places,
    Separation,
    Task,
    _classes,
    fit_logistic,
    folds,
    probe,
    separation,
)

N_PROBLEMS, N_SAMPLES, LENGTH = 36, 6, 13
BAND, OUTCOME, TOKEN, NOISE = slice(0, 3), slice(3, 5), slice(5, 15), slice(15, 20)


def test_the_probe_is_the_minimum_of_its_loss() -> None:
    """Against torch's autograd: no slope is left, and no direction leads further down."""
    rng = np.random.default_rng(0)
    x, y, weight = rng.normal(size=(80, 6)), rng.integers(0, 3, 80), rng.uniform(0.5, 2, 80)
    found = fit_logistic(sp.csr_array(x), y, 3, weight, 1e-2)
    parameters = torch.from_numpy(found).requires_grad_()

    def loss(p: torch.Tensor) -> torch.Tensor:
        logits = torch.from_numpy(x) @ p[:6] + p[6]
        each = torch.nn.functional.cross_entropy(logits, torch.from_numpy(y), reduction="none")
        return (torch.from_numpy(weight / weight.sum()) * each).sum() + 0.5e-2 * p[:6].pow(2).sum()

    value = loss(parameters)
    value.backward()
    assert parameters.grad is not None
    assert float(parameters.grad.abs().max()) < 1e-4
    for _ in range(20):
        moved = loss(torch.from_numpy(found + 0.05 * rng.normal(size=found.shape))).item()
        assert moved > value.item()
    # The same from elsewhere; adding a number to all biases changes nothing.
    again = fit_logistic(x, y, 3, weight, 1e-2, start=found + rng.normal(size=found.shape))
    np.testing.assert_allclose(again[:6], found[:6], atol=2e-3)
    np.testing.assert_allclose(again[6] - again[6].mean(), found[6] - found[6].mean(), atol=2e-3)


def test_a_weight_of_two_is_a_token_twice() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(30, 4)), rng.integers(0, 2, 30)
    weight = np.where(np.arange(30) < 10, 2.0, 1.0)
    twice = np.concatenate([np.arange(30), np.arange(10)])
    np.testing.assert_allclose(
        fit_logistic(x, y, 2, weight, 1e-2), fit_logistic(x[twice], y[twice], 2, np.ones(40), 1e-2), atol=2e-3
    )


def test_folds_are_even_and_keep_classes_apart() -> None:
    assert sorted(np.bincount(folds(23, 5, 0)).tolist()) == [4, 4, 5, 5, 5]
    classes = np.repeat([0, 1], [15, 10])
    fold = folds(25, 5, 3, within=classes)
    assert all(np.bincount(fold[classes == c]).tolist() == [n] * 5 for c, n in ((0, 3), (1, 2)))
    assert not np.array_equal(folds(23, 5, 0), folds(23, 5, 1))


def task_of(y: np.ndarray, unit: np.ndarray, seed: int = 0) -> Task:
    weight = 1 / np.bincount(y)[y]
    return Task("label", np.arange(len(y)), y, weight, unit, folds(unit.max() + 1, 5, seed))


def test_the_penalty_is_the_one_that_predicts_the_next_fold_best() -> None:
    """Against loops over folds and penalties, on data where each penalty is the best one somewhere."""
    chosen, rng = set(), np.random.default_rng(0)
    for n_features, noise in ((3, 0.0), (60, 1.0), (60, 0.3)):
        unit, x = np.repeat(np.arange(20), 4), rng.normal(size=(80, n_features))
        y = (x[:, 0] + noise * rng.normal(size=80) > 0.8).astype(int)
        task = task_of(y, unit)
        fold = task.fold[unit]

        def right(train: np.ndarray, rows: np.ndarray, penalty: float) -> np.ndarray:
            """Weight of what is predicted right, token by token; 0 outside of the rows."""
            mean = x[train].mean(0)  # noqa: B023
            scaled = (x - mean) / np.sqrt(((x[train] - mean) ** 2).sum(1).mean())  # noqa: B023
            weights = fit_logistic(scaled[train], y[train], 2, task.weight[train], penalty)  # noqa: B023
            return task.weight * ((scaled @ weights[:-1] + weights[-1]).argmax(1) == y) * rows  # noqa: B023

        hit = np.zeros(80)
        for k in range(5):
            inner, test = fold == (k + 1) % 5, fold == k
            scores = [right(~test & ~inner, inner, penalty).sum().round(9) for penalty in PENALTIES]
            best = PENALTIES[int(np.argmax(scores))]
            chosen.add(best)
            hit += right(~test, test, best)
        np.testing.assert_allclose(probe(x, task).hit, np.bincount(unit, hit))
    assert chosen == set(PENALTIES)


def test_a_label_that_depends_on_the_unit_alone_cannot_be_learned() -> None:
    """Codes name the unit, labels are a coin of the unit: within units all is known, across units nothing."""
    rng = np.random.default_rng(0)
    unit = np.repeat(np.arange(60), 5)
    codes = sp.csr_array(np.eye(60)[unit])
    accuracies = []
    for _ in range(6):
        coin = rng.permutation(np.arange(60) % 2)
        accuracies.append(probe(codes, task_of(coin[unit], unit)).accuracy)
    assert np.mean(accuracies) < 0.55
    # Where a feature of the token tells the label, it is learned across units.
    y = rng.integers(0, 2, 300)
    found = probe(sp.csr_array(np.column_stack([y * 2.0, rng.random(300)])), task_of(y, unit))
    assert found.accuracy == 1
    assert percentile_interval(found.draws()) == (1, 1)


def test_intervals_cover_the_accuracy_of_a_noisy_feature() -> None:
    """A feature that is right 80 % of the time, problem by problem."""
    covered = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        unit = np.repeat(np.arange(50), 4)
        y = rng.integers(0, 2, 200)
        told = np.where(np.repeat(rng.random(50) < 0.8, 4), y, 1 - y)
        found = probe(sp.csr_array(np.column_stack([told, 1 - told]).astype(float)), task_of(y, unit, seed))
        low, high = percentile_interval(found.draws())
        covered += low <= 0.8 <= high
    assert covered >= 16


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    """Band and outcome are said by every token of a trajectory, the token's identity by the token alone."""
    rng = np.random.default_rng(0)
    texts, columns = [], {"problem_id": [], "band": [], "outcome": [], "direct_answer": []}
    for problem in range(N_PROBLEMS):
        for sample in range(N_SAMPLES):
            right = sample < 1 + problem % 4
            x = 0.1 * rng.normal(size=(LENGTH, 20))
            x[:, problem % 3] += 3
            x[:, 3 + right] += 3
            # Token ids of the synthetic store: 0 for the prompt, then 1 to 9 in turn.
            x[np.arange(LENGTH), 5 + np.array([0, *(1 + np.arange(LENGTH - 1) % 9)])] += 3
            texts.append(x)
            columns["problem_id"].append(f"p{problem:02d}")
            columns["band"].append(("easy", "medium", "hard")[problem % 3])
            columns["outcome"].append("success" if right else "failure")
            columns["direct_answer"].append(float(rng.random() < 0.5))
    folder = tmp_path_factory.mktemp("planted") / "acts"
    store = synthetic_store(folder, texts)
    table = store.rollouts
    for name, values in columns.items():
        table = table.with_column(name, values)
    table = Rollouts(table.table, {**table.info, "behaviours": ["direct_answer"]}, table.origin)
    table.write(folder / "rollouts.parquet")
    manifest = json.loads((folder / "manifest.json").read_text())
    write_record(folder / "manifest.json", {**manifest, "rollouts": table.fingerprint})
    return ActivationStore(folder)


def reading(*parts: slice) -> TemporalSAE:
    """An SAE whose latents are coordinates, in the given order; the first five are high-level."""
    order = np.concatenate([np.arange(20)[part] for part in parts])
    assert sorted(order) == list(range(20))
    sae = TemporalSAE(20, SAEConfig(d_sae=20, k=3, groups=(0.25, 0.75)), site="x.site")
    with torch.no_grad():
        sae.W_dec.copy_(torch.eye(20)[order])
        sae.W_enc.copy_(sae.W_dec.T)
        sae.threshold.fill_(1.5)
    return sae


def parity(prompt: str, tokens: Sequence[str]) -> list[str]:
    """Classes by the place in the response: odd and even tokens."""
    return ["odd" if int(token) % 2 else "even" for token in tokens]


@pytest.fixture(scope="module")
def found(planted: ActivationStore) -> Separation:
    temporal = reading(BAND, OUTCOME, TOKEN, NOISE)
    plain = reading(NOISE, TOKEN, BAND, OUTCOME)
    saes = {"temporal": temporal, "plain": plain}
    return separation(saes, planted, annotator=parity, token_strings=[str(id) for id in range(10)])


@pytest.mark.slow(ci=True)
def test_planted_separation_is_found(found: Separation) -> None:
    table = found.table().set_index(["sae", "group", "label"])
    accuracy, chance = table.accuracy, table.chance
    labels = {"band", "outcome", "direct_answer", "problem", "identity", "class"}
    assert set(table.index.get_level_values("label")) == labels
    assert chance["temporal", "high", "band"] == pytest.approx(1 / 3)
    assert chance["temporal", "high", "outcome"] == 0.5
    assert chance["temporal", "high", "problem"] == 1 / 20
    assert chance["temporal", "high", "identity"] == pytest.approx(1 / 9)
    for label in ("band", "outcome"):
        assert accuracy["temporal", "high", label] == 1
        assert accuracy["plain", "low", label] == 1
        assert accuracy["activations", "all", label] == 1
        assert table.low["temporal", "low", label] < chance["temporal", "low", label] + 0.05
        assert accuracy["plain", "high", label] < chance["plain", "high", label] + 0.1
    assert accuracy["temporal", "low", "identity"] == 1
    assert accuracy["temporal", "high", "identity"] < 0.25
    # Which problem is known only up to its band.
    assert 1 / 20 < accuracy["temporal", "high", "problem"] < 0.4
    # A coin is not predicted by anything.
    coin = table.xs("direct_answer", level="label")
    assert ((coin.low <= 0.55) & (coin.accuracy < 0.65)).all()
    assert table.l0["temporal", "high", "band"] == pytest.approx(2)
    assert table.l0["temporal", "low", "band"] == pytest.approx(1)
    assert (table.level.xs("identity", level="label") == "token").all()
    assert (table.level.xs("problem", level="label") == "trajectory").all()
    # Every problem has one to four successes of six, so that all count.
    assert set(table.n_units.xs("outcome", level="label")) == {N_PROBLEMS}
    assert set(table.n_units.xs("problem", level="label")) == {20 * N_SAMPLES}
    assert accuracy["temporal", "low", "class"] == 1
    assert accuracy["temporal", "high", "class"] < 0.65


@pytest.mark.slow(ci=True)
def test_gains_are_differences_of_the_scores(found: Separation) -> None:
    table = found.table().set_index(["sae", "group", "label"]).accuracy
    gains = found.gain_table().set_index(["group", "label"])
    for (group, label), row in gains.iterrows():
        assert row.gain == pytest.approx(table["temporal", group, label] - table["plain", group, label])
        assert row.low <= row.gain <= row.high
    assert gains.low["high", "band"] > 0.4
    assert gains.low["high", "outcome"] > 0.3
    assert gains.high["low", "band"] < -0.4
    assert gains.gain["all", "band"] == pytest.approx(0, abs=0.01)
    assert "trajectory band" in str(found)
    json.dumps(found.as_dict(), allow_nan=True)


@pytest.mark.slow(ci=True)
def test_what_cannot_be_probed_is_said(store: ActivationStore, tmp_path: Path) -> None:
    sae = random_sae(site="blocks.1.hook_resid_post", d_sae=32)
    found = separation({"sae": sae}, store, tokens_per_trajectory=2)
    assert "fewer than two classes" in found.skipped["band"]
    assert "problem" in set(found.table().label)
    assert "not probed: band" in str(found)
    assert found.gains == ()
    refuses("needs the text of tokens", separation, {"sae": sae}, store, annotator=lambda prompt, tokens: list(tokens))
    lonely = synthetic_store(tmp_path / "acts", [np.random.default_rng(0).normal(size=(5, 16))], site=sae.site)
    refuses("no label can be probed", separation, {"sae": sae}, lonely)


@pytest.mark.slow(ci=True)
def test_an_annotator_reads_every_trajectory_once(planted: ActivationStore) -> None:
    """With its own prompt and all of its tokens, whichever of them are probed."""
    strings, read = [str(id) for id in range(10)], []
    rollouts = planted.rollouts
    rollouts = rollouts.with_column("prompt", [f"prompt {row}" for row in range(len(rollouts.table))])

    def annotator(prompt: str, tokens: Sequence[str]) -> list[str]:
        read.append((prompt, list(tokens)))
        return [f"{prompt.split()[1]}:{place}" for place in range(len(tokens))]

    rows, spots = np.array([4, 4, 7, 9, 9]), np.array([0, 3, 1, 0, 2])
    places = Places(rows, np.zeros(5, dtype=int), spots)
    classes = _classes(rollouts, places, annotator, strings)
    assert classes.tolist() == [f"{row}:{spot}" for row, spot in zip(rows, spots, strict=True)]
    assert read == [(f"prompt {row}", [strings[id] for id in rollouts.tokens(row)[1]]) for row in (4, 7, 9)]


@pytest.mark.slow(ci=True)
def test_an_sae_of_one_group_is_probed_whole(planted: ActivationStore) -> None:
    sae = TemporalSAE(20, SAEConfig(d_sae=20, k=3, groups=(1.0,)), site="x.site")
    sae.load_state_dict(reading(BAND, OUTCOME, TOKEN, NOISE).state_dict())
    table = separation({"whole": sae}, planted, max_trajectories=80).table()
    assert set(table.group) == {"all"}
