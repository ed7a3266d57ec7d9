"""Matching of dictionaries, where the answer is known."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tsae
from support.builders import feature_table, make_rollouts
from support.damage import resealed
from support.refusals import refuses
from tsae.base.artefact import add_to_artefact, write_record
from tsae.diff.config import DiffConfig
from tsae.features.feature_table import FeatureTable
from tsae.sae.config import SAEConfig, TrainingConfig
from tsae.sae.model import TemporalSAE
from tsae.sae.quality.stability import Stability, matched_cosines, stability
from tsae.sae.training.train import run_name

QUICK = DiffConfig(n_bootstrap=100, n_permutations=200)


def dictionary(rows: torch.Tensor, *, groups: tuple[float, ...] = (0.5, 0.5), site: str = "s") -> TemporalSAE:
    sae = TemporalSAE(rows.shape[1], SAEConfig(d_sae=len(rows), k=1, groups=groups), site=site)
    with torch.no_grad():
        sae.W_dec.copy_(rows)
    return sae


def random_rows(n: int, d: int, seed: int) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(n, d, generator=torch.Generator().manual_seed(seed)), dim=1)


def test_the_matching_is_the_best_of_all_permutations() -> None:
    a, b = random_rows(5, 3, 0), random_rows(5, 3, 1)
    table = (a @ b.T).numpy()
    best = max(itertools.permutations(range(5)), key=lambda p: sum(table[i, j] for i, j in enumerate(p)))
    cosine, match = matched_cosines(a, 7 * b)
    assert match.tolist() == list(best)
    np.testing.assert_allclose(cosine, table[np.arange(5), best], atol=1e-6)


def test_a_shuffled_dictionary_is_found_again_and_a_new_one_is_not(tmp_path: Path) -> None:
    rows = random_rows(40, 64, 0)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    found = stability(dictionary(rows), [dictionary(rows[order]), dictionary(random_rows(40, 64, 2))])
    np.testing.assert_allclose(found.cosine[0], 1, atol=1e-6)
    assert found.cosine[1].max() < 0.7
    inverse = np.argsort(order.numpy())
    np.testing.assert_array_equal(found.same_group[0], (inverse < 20) == (np.arange(40) < 20))
    assert found.summary()["found_again"] == 0.5
    assert found.summary(np.arange(40) < 10)["n_latents"] == 10
    table = found.table()
    assert list(table.group) == ["high"] * 20 + ["low"] * 20
    np.testing.assert_allclose(table.stability, found.per_latent)
    loaded = Stability.load(found.save(tmp_path).parent)
    np.testing.assert_allclose(loaded.cosine, found.cosine, atol=1e-4)
    np.testing.assert_array_equal(loaded.same_group, found.same_group)
    assert (loaded.others, loaded.d_high) == (found.others, 20)
    assert loaded.sae == found.sae == dictionary(rows).fingerprint != dictionary(rows[order]).fingerprint
    assert "50.0% of latents found again" in str(found)


def test_latents_that_a_narrower_dictionary_has_no_room_for_match_nothing(tmp_path: Path) -> None:
    rows = random_rows(12, 64, 0)
    found = stability(dictionary(rows), [dictionary(rows[:8], groups=(0.25, 0.75)).save(tmp_path / "narrow")])
    np.testing.assert_allclose(found.cosine[0, :8], 1, atol=1e-6)
    assert np.isnan(found.cosine[0, 8:]).all()
    assert not found.same_group[0, 8:].any()
    assert found.per_latent[8:].tolist() == [0, 0, 0, 0]
    assert found.others == (str(tmp_path / "narrow"),)
    found.save(tmp_path / "narrow")
    assert np.isnan(Stability.load(tmp_path / "narrow").cosine[0, 8:]).all()


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    sae = dictionary(random_rows(8, 4, 0))
    refuses("no other SAE", stability, sae, [])
    refuses("SAE 1: reads s of d_model 5, not s of d_model 4", stability, sae, [dictionary(random_rows(8, 5, 0))])
    refuses("reads t of d_model 4", lambda: stability(sae, [dictionary(random_rows(8, 4, 0), site="t")]))
    other = dictionary(random_rows(8, 4, 1))
    for compared in ([sae], [other, other]):  # one that is compared with itself is stable
        refuses("is this SAE, or another that is compared already", stability, sae, compared)
    refuses(r"holds no stability\.json", Stability.load, tmp_path)
    file = tmp_path / "stability.json"
    write_record(file, {"sae": "a", "others": ["b"], "cosine": [[0.5, None]], "same_group": [[1, 1]], "d_high": 1})
    assert Stability.load(tmp_path).summary()["cosine"] == 0.25
    file.write_text(file.read_text().replace("0.5", "0.6"))
    refuses("is damaged", Stability.load, tmp_path)


def test_nothing_is_added_to_an_sae_that_is_not_whole(tmp_path: Path) -> None:
    rows = random_rows(8, 4, 0)
    folder = dictionary(rows).save(tmp_path / "sae")
    add_to_artefact(folder, "metrics.jsonl", lambda file: file.write_text("{}\n"))
    found = stability(dictionary(rows), [dictionary(random_rows(8, 4, 1))])
    (folder / "metrics.jsonl").write_text("{ }\n")
    refuses(r"metrics\.jsonl is damaged", found.save, folder)
    (folder / "metrics.jsonl").unlink()
    refuses(r"metrics\.jsonl is missing", found.save, folder)
    assert not (folder / "stability.json").exists()
    dictionary(rows).save(folder)
    assert Stability.load(found.save(folder).parent).others == found.others


# --- from the SAE's folder to the diff


SITE = "blocks.1.hook_resid_post"


@pytest.fixture(scope="module")
def trained(store: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three seeds; the first one's folder knows how it compares with the others."""
    to = tmp_path_factory.mktemp("seeds")
    training = TrainingConfig(tokens=20_000, batch_tokens=200, learning_rate=3e-3)
    keys = tsae.train_many(
        store, SAEConfig(d_sae=80, k=2), sites=[SITE], seeds=[0, 1, 2], to=to, training=training, progress=False
    )
    folders = [to / run_name(*key) for key in keys]
    stability(folders[0], folders[1:]).save(folders[0])
    return folders


def test_the_diff_shows_what_stands_beside_the_sae(trained: list[Path], store: Any, tmp_path: Path) -> None:
    first, second = trained[:2]
    expected = stability(first, trained[1:])
    features = tsae.encode(first, store, to=tmp_path / "features", progress=False)
    for table in (features, tsae.FeatureTable.load(tmp_path / "features")):
        diff = tsae.feature_diff(table, QUICK, progress=False)
        np.testing.assert_allclose(diff.features.stability, expected.per_latent, atol=1e-4)
        shown = diff.table(kind="shift")
        assert len(shown) > 0
        np.testing.assert_array_equal(shown.stability, diff.features.stability[shown.feature])
    alive = diff.features.firing_rate.to_numpy() > 0
    known = diff.info["stability"]
    assert (known["n_others"], known["n_latents"]) == (2, alive.sum())
    assert 0 < alive.sum() < 80
    assert known["found_again"] == pytest.approx((expected.cosine[:, alive] >= 0.7).mean())
    loaded = tsae.FeatureDiff.load(diff.save(tmp_path / "diff"))
    assert loaded.info["stability"] == known
    np.testing.assert_array_equal(loaded.features.stability, diff.features.stability)
    # Not known: no column.
    without = tsae.encode(second, store, to=tmp_path / "features", progress=False)
    assert without.stability is None
    assert not (tmp_path / "features" / "stability.json").exists()
    assert tsae.encode(TemporalSAE.load(first), store, progress=False).stability is None
    diff = tsae.feature_diff(without, QUICK, progress=False)
    assert "stability" not in diff.features
    assert "stability" not in diff.table()
    assert diff.info["stability"] is None


def test_features_with_a_stability_are_encoded_again(tmp_path: Path) -> None:
    rollouts = make_rollouts(n_problems=2)
    n = int((rollouts.lengths("prompt_ids") + rollouts.lengths("response_ids")).sum())
    table = feature_table(rollouts, np.ones((n, 3)), [("base", np.arange(len(rollouts)))])
    cosine, same_group = np.ones((1, 3)), np.ones((1, 3), dtype=bool)
    told = Stability(sae="a", others=("b",), d_high=1, cosine=cosine, same_group=same_group)
    info = {**table.info, "sae": {**table.info["sae"], "weights": "a"}}
    for _ in range(2):
        replace(table, stability=told, info=info).save(tmp_path)
    found = FeatureTable.load(tmp_path).stability
    assert found is not None
    assert found.others == ("b",)


@pytest.mark.slow(ci=True)
def test_stability_that_was_measured_after_encoding_is_given(
    trained: list[Path], store: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tsae.cli import main

    first, second, third = trained
    features = tsae.encode(TemporalSAE.load(first), store, to=tmp_path / "features", progress=False)
    found = stability(first, [third])
    one = tsae.feature_diff(features, QUICK, stability=found, progress=False)
    np.testing.assert_allclose(one.features.stability, found.cosine[0])
    assert one.info["stability"]["n_others"] == 1
    command = ["diff", "--features", tmp_path / "features", "--n-permutations", 200, "--n-bootstrap", 100]
    main(list(map(str, [*command, "--to", tmp_path / "diff", "--stability", first, "--all"])))
    said = capsys.readouterr().out
    assert "stability: 2 other seeds on average find" in said
    both = tsae.FeatureDiff.load(tmp_path / "diff")
    np.testing.assert_allclose(both.features.stability, stability(first, [second, third]).per_latent, atol=1e-4)
    main(list(map(str, [*command, "--to", tmp_path / "without"])))
    assert "stability: " not in capsys.readouterr().out


def test_the_stability_of_other_weights_is_refused(trained: list[Path], store: Any, tmp_path: Path) -> None:
    """As a training anew in the same folder leaves it."""
    first, second, _ = trained
    names = f"is that of the SAE {TemporalSAE.load(first).fingerprint}, not of {TemporalSAE.load(second).fingerprint}"
    stale = Path(shutil.copytree(second, tmp_path / "stale"))
    shutil.copy(first / "stability.json", stale)
    resealed(stale)
    refuses(names, tsae.encode, stale, store, to=tmp_path / "features", progress=False)
    assert not (tmp_path / "features").exists()
    features = tsae.encode(second, store, to=tmp_path / "features", progress=False)
    refuses(names, tsae.feature_diff, features, QUICK, stability=first, progress=False)
    refuses(names, lambda: tsae.feature_diff(features, QUICK, stability=Stability.load(first), progress=False))
    refuses(r"holds no stability\.json", tsae.feature_diff, features, QUICK, stability=second, progress=False)
    shutil.copy(first / "stability.json", tmp_path / "features")
    refuses(names, tsae.FeatureTable.load, tmp_path / "features")
    (tmp_path / "features" / "stability.json").unlink()
    add_to_artefact(tmp_path / "features", "stability.json", lambda file: shutil.copy(first / "stability.json", file))
    refuses(names, tsae.FeatureTable.load, tmp_path / "features")
