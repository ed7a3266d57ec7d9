"""Matching of dictionaries, where the answer is known."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from tsae.errors import TsaeError
from tsae.sae.config import SAEConfig
from tsae.sae.model import TemporalSAE
from tsae.sae.stability import Stability, matched_cosines, stability


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
    with pytest.raises(TsaeError, match="no other SAE"):
        stability(sae, [])
    with pytest.raises(TsaeError, match="SAE 1: reads s of d_model 5, not s of d_model 4"):
        stability(sae, [dictionary(random_rows(8, 5, 0))])
    with pytest.raises(TsaeError, match="reads t of d_model 4"):
        stability(sae, [dictionary(random_rows(8, 4, 0), site="t")])
    with pytest.raises(TsaeError, match=r"holds no stability\.json"):
        Stability.load(tmp_path)
    (tmp_path / "stability.json").write_text("{}")
    with pytest.raises(TsaeError, match="is damaged"):
        Stability.load(tmp_path)
