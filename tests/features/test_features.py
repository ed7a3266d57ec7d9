"""Features: sparse codes equal dense ones, and what features respond to is what a loop over tokens finds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from support.builders import BOS, EOS, feature_table, make_rollouts, overwrite, random_sae
from support.damage import resealed
from support.refusals import refuses
from support.results import answer
from tsae.activations.store import ActivationStore
from tsae.diff.config import DiffConfig
from tsae.diff.feature_diff import feature_diff
from tsae.errors import TsaeError
from tsae.features.contexts import TokenClasses, annotate_tokens, find_annotator, responds_to, top_contexts, top_tokens
from tsae.features.encode import encode
from tsae.features.encoded_shards import Codes, reconstructed, reconstruction
from tsae.features.feature_table import FeatureTable
from tsae.sae.model import TemporalSAE

SITE = "blocks.1.hook_resid_post"
STRINGS = [*"0123456789", "+", "-", "*", "?", "=", ";", "#", "<bos>", "<pad>", "<eos>"]


@pytest.fixture(scope="module")
def sae() -> TemporalSAE:
    return random_sae(site=SITE, threshold=1.0, groups=(0.25, 0.75))


@pytest.fixture(scope="module")
def table(sae: TemporalSAE, store: ActivationStore) -> FeatureTable:
    return encode(sae, store, batch_tokens=37, progress=False)


def test_sparse_codes_equal_dense_ones(sae: TemporalSAE, store: ActivationStore, table: FeatureTable) -> None:
    dense = np.concatenate([sae.encode(torch.from_numpy(s.read(SITE, slice(None)))).numpy() for s in store.shards()])
    np.testing.assert_allclose(table.codes.toarray(), dense, atol=1e-6, rtol=1e-5)
    assert 0 < table.codes.nnz < dense.size / 2
    assert table.token_ids.tolist() == np.concatenate([s.token_ids for s in store.shards()]).tolist()
    start = 0
    for shard in store.shards():
        for row, length in zip(shard.trajectory, np.diff(shard.offsets), strict=True):
            i = int(np.searchsorted(table.row_offsets, start))
            assert table.row_offsets[i : i + 2].tolist() == [start, start + length]
            assert table.trajectory[i] == row
            assert table.readers[table.reader[i]] == shard.reader
            start += int(length)
    assert start == table.row_offsets[-1]


def test_reconstruction_is_measured_per_reader(sae: TemporalSAE, store: ActivationStore, table: FeatureTable) -> None:
    for record in table.info["readers"]:
        shards = list(store.shards(record["id"]))
        x = np.concatenate([s.read(SITE, slice(None)) for s in shards]).astype(np.float64)
        ids = np.concatenate([s.token_ids for s in shards])
        x = x[~np.isin(ids, [BOS, 18, EOS])]
        codes = sae.encode(torch.from_numpy(x.astype(np.float32)))
        error = ((x - sae.decode(codes).double().numpy()) ** 2).sum()
        assert record["n_tokens"] == len(x)
        assert record["fve"] == pytest.approx(1 - error / ((x - x.mean(0)) ** 2).sum(), rel=1e-4)
        assert record["l0"] == pytest.approx(float((codes > 0).sum()) / len(x))
    assert [r["run"] for r in table.info["readers"]] == [None, "easy"]


def test_reconstruction_by_hand() -> None:
    """Three tokens around the mean (2, 1): squares of 2, 2 and 4; errors of 1, 0 and 4."""

    def sums(x: Any, x_hat: Any, codes: Any, beyond: Any, counted: Any) -> np.ndarray:
        found = Codes(sp.csr_array(np.array(codes)), np.array(beyond), torch.tensor(x_hat))
        return reconstruction(torch.tensor(x), found, np.array(counted))

    # The third is an outlier, the fourth is not counted.
    x, x_hat = [[1.0, 0.0], [3.0, 0.0], [90.0, 9.0], [7.0, 7.0]], [[1.0, 1.0], [3.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    codes = [[1, 0, 2], [0, 1, 0], [0, 0, 0], [1, 1, 1]]
    quality = sums(x, x_hat, codes, [False, False, True, False], [True, True, True, False])
    quality += sums([[2.0, 3.0]], [[2.0, 1.0]], [[0, 0, 3]], [False], [True])
    expected = {"n_tokens": 3, "fve": 3 / 8, "l0": 4 / 3, "outlier_share": 1 / 4}
    assert reconstructed(quality) == pytest.approx(expected)
    # The same, a trillion times smaller.
    assert reconstructed(quality * [1, 1, 1, 1e-24, 1e-24, 1e-12, 1e-12])["fve"] == pytest.approx(3 / 8)
    # One token, and tokens that are all alike, have no variance to explain; no token, and outliers alone, no FVE.
    nothing = {"n_tokens": 0, "fve": None, "l0": None}
    assert reconstructed(np.zeros(7)) == {**nothing, "outlier_share": 0.0}
    for n, beyond, share in ((1, False, 0.0), (3, False, 0.0), (2, True, 1.0)):
        alike = reconstructed(sums([[0.1, 0.1]] * n, [[0.0, 0.0]] * n, [[0, 0, 0]] * n, [beyond] * n, [True] * n))
        known = nothing if beyond else {"n_tokens": n, "fve": None, "l0": 0.0}
        assert alike == {**known, "outlier_share": share}


@pytest.mark.parametrize("span", ["response", "prompt", "last_prompt", "all"])
def test_row_means_against_a_loop(table: FeatureTable, span: Any) -> None:
    codes, found = table.codes.toarray(), table.row_means(span).toarray()
    for row in range(0, table.n_rows, 5):
        prompt, response = table.rollouts.tokens(int(table.trajectory[row]))
        picked = []
        for t, token in enumerate([*prompt, *response]):
            inside = span == "all" or (span != "response") == (t < len(prompt))
            if inside and (token not in (BOS, 18, EOS) or (span == "last_prompt" and t == len(prompt) - 1)):
                picked.append(codes[table.row_offsets[row] + t])
        picked = picked[-1:] if span == "last_prompt" else picked
        np.testing.assert_allclose(found[row], np.mean(picked, axis=0), rtol=1e-5, atol=1e-7)


def test_a_row_without_tokens_of_the_span_has_mean_zero() -> None:
    from tsae import Rollouts

    records = [answer("a", "base", None, prompt_ids=ids, response_ids=[EOS]) for ids in ([1], [BOS], [2, BOS])]
    lone = feature_table(Rollouts.from_records(records[:1]), np.ones((2, 3)), [("base", np.array([0]))])
    assert lone.row_means("response").toarray().tolist() == [[0, 0, 0]]
    assert lone.row_means("prompt").toarray().tolist() == [[1, 1, 1]]
    codes, rollouts = np.arange(15).reshape(5, 3), Rollouts.from_records(records[1:])
    special = feature_table(rollouts, codes, [("base", np.array([0, 1]))])
    assert special.row_means("last_prompt").toarray().tolist() == [[0, 1, 2], [9, 10, 11]]


def test_rows_are_of_a_reader_and_a_policy(table: FeatureTable) -> None:
    policy = np.array(table.rollouts.table["policy"].to_pylist())
    rows = table.rows(reader="easy-10", policy="base")
    assert len(rows) == 36
    assert {table.readers[table.reader[row]] for row in rows} == {"easy-10"}
    assert set(policy[table.trajectory[rows]]) == {"base"}
    assert len(table.rows(reader="base")) == 72
    refuses("no reader 'hard'; there are base, easy-10", table.rows, reader="hard")


def test_a_table_is_saved_and_loaded(table: FeatureTable, tmp_path: Path) -> None:
    loaded = FeatureTable.load(table.save(tmp_path / "features"))
    assert (loaded.codes[:] != table.codes[:]).nnz == 0
    for name in ("token_ids", "row_offsets", "reader", "trajectory"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(table, name))
    assert loaded.info == json.loads(json.dumps(table.info))
    assert loaded.rollouts.table.equals(table.rollouts.table)
    assert loaded.d_high == 6
    assert (loaded.row_means()[:] != table.row_means()[:]).nnz == 0


def test_damaged_tables_are_refused(table: FeatureTable, tmp_path: Path) -> None:
    folder = table.save(tmp_path / "features")
    for content in ("{", "{}", "[]"):
        (folder / "features.json").write_text(content)
        resealed(folder)
        refuses(r"features\.json", FeatureTable.load, folder)


def test_encoding_refuses_a_store_that_does_not_fit(sae: TemporalSAE, store: ActivationStore, tmp_path: Path) -> None:
    wide = TemporalSAE(32, sae.config, site=SITE)
    refuses("has d_model 16, the SAE expects 32", encode, wide, store, to=tmp_path / "features", progress=False)
    assert not (tmp_path / "features").exists()


# --- what features respond to


@pytest.fixture(scope="module")
def annotated() -> FeatureTable:
    """Six features over random digits: 0 never active, 1 on <eos> only, 2 on even digits, others at random."""
    rollouts = make_rollouts(n_problems=15, n_samples=4, vocabulary=10)
    ids = np.concatenate([np.concatenate(rollouts.tokens(row)) for row in range(len(rollouts))])
    rng = np.random.default_rng(0)
    codes = rng.random((len(ids), 6)) * (rng.random((len(ids), 6)) < 0.3)
    codes[:, 0] = 0
    codes[:, 1] = 2.0 * (ids == EOS)
    codes[:, 2] = (ids < 10) * (ids % 2 == 0) * rng.uniform(1, 2, len(ids))
    return feature_table(rollouts, codes, [("base", np.arange(len(rollouts)))])


def parity(prompt: str, tokens: Any) -> list[str]:
    return ["end" if t == "<eos>" else "even" if int(t) % 2 == 0 else "odd" for t in tokens]


def test_every_response_token_gets_its_class(annotated: FeatureTable) -> None:
    seen: list[str] = []

    def annotator(prompt: str, tokens: Any) -> list[str]:
        seen.append(prompt)
        return parity(prompt, tokens)

    classes = annotate_tokens(annotated, annotator, STRINGS)
    assert seen == annotated.rollouts.table["prompt"].to_pylist()
    for row in range(annotated.n_rows):
        prompt, response = annotated.rollouts.tokens(row)
        start = annotated.row_offsets[row]
        names = [classes.names[c] for c in classes.code[start : annotated.row_offsets[row + 1]]]
        expected = ["special" if t == BOS else "prompt" for t in prompt.tolist()]
        expected += ["special" if t == EOS else ("even" if t % 2 == 0 else "odd") for t in response.tolist()]
        assert names == expected


def test_annotators_that_give_too_few_classes_are_refused(annotated: FeatureTable) -> None:
    with pytest.raises(TsaeError, match=r"annotator: gave 1 classes for the \d+ response tokens of trajectory 0"):
        annotate_tokens(annotated, lambda prompt, tokens: ["same"], STRINGS)
    assert find_annotator("tsae.testbed.classes:token_classes").__name__ == "token_classes"
    refuses("annotator: cannot find", find_annotator, "tsae.testbed.annotate:nope")


def test_responds_to_against_a_loop(annotated: FeatureTable) -> None:
    classes = annotate_tokens(annotated, parity, STRINGS)
    found = responds_to(annotated, classes)
    codes = annotated.codes.toarray().astype(float)
    counted = [i for i in range(len(codes)) if classes.names[classes.code[i]] != "special"]
    for feature in range(2, 6):
        total = sum(codes[i, feature] for i in counted)
        best = ("", -np.inf, 0.0, 0.0)
        for c, name in enumerate(classes.names):
            members = [i for i in counted if classes.code[i] == c]
            if len(members) < 20:
                continue
            share = sum(codes[i, feature] for i in members) / total
            lift = share / (len(members) / len(counted))
            if share > 0 and share * np.log(lift) > best[1]:
                best = (name, share * np.log(lift), lift, share)
        row = found.loc[feature]
        assert row.responds_to == best[0]
        assert (row["lift"], row.share) == pytest.approx(best[2:], rel=1e-5)
        assert row.n_tokens == sum(codes[i, feature] > 0 for i in counted)
    assert found.responds_to[2] == "even"
    # Special tokens do not count: a feature of <eos> is active nowhere else.
    assert found.responds_to[[0, 1]].tolist() == ["never active"] * 2
    assert found.loc[[0, 1], ["lift", "share", "n_tokens"]].to_numpy().tolist() == [[0, 0, 0]] * 2


def test_a_feature_of_few_tokens_is_not_said_to_respond_to_a_large_class(annotated: FeatureTable) -> None:
    """Active on 5 tokens of a class of 5 only: every class of twenty tokens has none of its activation."""
    n = len(annotated.token_ids)
    response = np.flatnonzero(annotated.span_mask("response"))
    code = np.full(n, 2, dtype=np.int32)
    code[response[:5]] = 3
    codes = np.zeros((n, 2))
    codes[response[:5], 0] = 1.0
    codes[response, 1] = 1.0
    table = feature_table(annotated.rollouts, codes, [("base", np.arange(annotated.n_rows))])
    found = responds_to(table, TokenClasses(["prompt", "special", "large", "small"], code))
    assert found.responds_to.tolist() == ["rare tokens", "large"]
    assert found.loc[0, ["lift", "share", "n_tokens"]].tolist() == [0, 0, 5]
    none_large = TokenClasses(["prompt", "special", *map(str, range(n))], np.arange(n, dtype=np.int32) + 2)
    assert responds_to(table, none_large).responds_to.tolist() == ["rare tokens"] * 2


def test_top_tokens_against_a_loop(annotated: FeatureTable) -> None:
    found = top_tokens(annotated, STRINGS, n=3)
    codes = annotated.codes.toarray().astype(float)
    for feature in range(6):
        carried: dict[int, float] = {}
        for token, code in zip(annotated.token_ids.tolist(), codes[:, feature].tolist(), strict=True):
            if token not in (BOS, EOS) and code:
                carried[token] = carried.get(token, 0) + code
        order = sorted(carried, key=lambda token: -carried[token])
        assert found.top_tokens[feature] == [STRINGS[token] for token in order[:3]]
        share = carried[order[0]] / sum(carried.values()) if order else 0.0
        assert found.top_token_share[feature] == pytest.approx(share, rel=1e-5)
    # A model may have ids beyond its tokenizer's.
    short = top_tokens(annotated, STRINGS[:3], n=3)
    assert [STRINGS[int(t[1:])] if t[0] == "#" else t for t in short.top_tokens[2]] == found.top_tokens[2]
    seen: set[str] = set()
    annotate_tokens(annotated, lambda _, tokens: [seen.add(t) or "any" for t in tokens], STRINGS[:3])
    assert {"0", "2", "#3", "#9"} <= seen


def test_top_contexts_are_the_strongest_of_different_problems(annotated: FeatureTable) -> None:
    found = top_contexts(annotated, 3, n=5)
    codes = annotated.codes[:, [3]].toarray()[:, 0] * annotated.span_mask("all")
    strongest: dict[str, float] = {}
    for row in range(annotated.n_rows):
        problem = annotated.rollouts.frame.problem_id[row]
        peak = float(codes[annotated.row_offsets[row] : annotated.row_offsets[row + 1]].max())
        strongest[problem] = max(strongest.get(problem, 0.0), peak)
    assert [c.problem_id for c in found] == sorted(strongest, key=lambda p: -strongest[p])[:5]
    for context in found:
        prompt, response = annotated.rollouts.tokens(context.trajectory)
        assert context.token_ids.tolist() == [*prompt.tolist(), *response.tolist()]
        assert context.n_prompt == len(prompt)
        assert context.activations[:].max() == pytest.approx(strongest[context.problem_id])
    assert top_contexts(annotated, 0) == []
    assert top_contexts(annotated, 1) == []


def test_contexts_of_one_reader(table: FeatureTable) -> None:
    feature = int(np.asarray(table.codes.sum(0)).argmax())
    assert {c.reader for c in top_contexts(table, feature, n=10, reader="easy-10")} == {"easy-10"}


def test_outliers_are_marked_without_codes_and_their_share_is_known(
    sae: TemporalSAE, store: ActivationStore, tmp_path: Path
) -> None:
    largest = max(float(shard.norms(SITE).max()) for shard in store.shards())
    limited = TemporalSAE(16, sae.config, site=SITE, training={"norms": {"limit": 3 * largest}})
    limited.load_state_dict(sae.state_dict())
    store = ActivationStore(shutil.copytree(store.path, tmp_path / "acts"))
    for number, shard in enumerate(store.shards()):
        values = np.array(shard.read(SITE, slice(None)))
        values[np.random.default_rng(number).permutation(len(values))[: round(0.06 * len(values))]] *= 100
        overwrite(store, shard, SITE, values)
    table = encode(limited, store, to=tmp_path / "features", progress=False)
    ids = np.concatenate([shard.token_ids for shard in store.shards()])
    special = np.isin(ids, sorted(store.special_ids))
    assert table.outlier.mean() == pytest.approx(0.06, abs=2e-3)
    assert table.codes[np.flatnonzero(table.outlier)].nnz == 0
    for span in ("all", "response", "prompt", "last_prompt"):
        assert not (table.span_mask(span) & table.outlier).any()
    for number, record in enumerate(table.info["readers"]):
        mine = (table.reader[table.row_of_token] == number) & ~special
        assert record["outlier_share"] == pytest.approx(table.outlier[mine].mean())
        assert record["n_tokens"] == (~table.outlier[mine]).sum()
    loaded = FeatureTable.load(tmp_path / "features")
    np.testing.assert_array_equal(loaded.outlier, table.outlier)
    for allowed, flagged in ((0.05, True), (0.2, False)):
        config = DiffConfig(max_outliers=allowed, min_fve=1e-9, n_bootstrap=100, n_permutations=100)
        readers = feature_diff(table, config, progress=False).info["readers"]
        assert all(reader["flagged"] == (flagged or reader["fve"] < 1e-9) for reader in readers)
