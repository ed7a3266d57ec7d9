"""Scale and outliers are about the centre: a constant in a dimension changes nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from support.builders import synthetic_store
from support.refusals import refuses
from tsae import SAEConfig, TemporalSAE, TrainingConfig, evaluate, train
from tsae.activations.batches import NormStats, Windows, norm_stats
from tsae.errors import TsaeError

pytestmark = pytest.mark.filterwarnings("ignore:The 'utils' module has been deprecated:DeprecationWarning")

SITE, D, CONSTANT, SINK = "x.site", 24, 3, 5


def texts(constant: float, n: int = 60) -> list[np.ndarray]:
    """Sums of a few of 48 directions, 30 tokens a text, and a constant in one dimension; the first token is a sink.

    Args:
        constant: in standard deviations of that dimension.
    """
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(48, D)) / D**0.5
    codes = (rng.random((n, 30, 48)) < 0.08) * rng.gamma(4, 1, (n, 30, 48))
    x = codes @ directions
    x[:, :, CONSTANT] += constant * x[:, :, CONSTANT].std()
    x[:, 0, SINK] += 100 * np.linalg.norm(x[:, 1:] - x[:, 1:].mean((0, 1)), axis=2).mean()
    return list(x.astype(np.float32))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, TemporalSAE]:
    """By the constant."""
    folder = tmp_path_factory.mktemp("scale")
    config = SAEConfig(d_sae=64, k=4, temporal_weight=0.1)
    training = TrainingConfig(tokens=60_000, batch_tokens=512)
    return {
        size: train(synthetic_store(folder / str(size), texts(size)), config, training=training, progress=False)
        for size in (0, 50, 500)
    }


def test_a_constant_dimension_changes_nothing(trained: dict[int, TemporalSAE], tmp_path: Path) -> None:
    found = {size: evaluate(sae, synthetic_store(tmp_path / str(size), texts(size))) for size, sae in trained.items()}
    without = found[0]
    assert without.fve > 0.75
    for size, sae in trained.items():
        assert found[size].fve == pytest.approx(without.fve, abs=0.02)
        assert found[size].alive == pytest.approx(without.alive, abs=0.08)
        assert found[size].n_tokens == without.n_tokens
        norms, same = (s.training_info["norms"] for s in (sae, trained[0]))
        assert norms["mean"] == pytest.approx(same["mean"], rel=1e-3)
        assert norms["outlier_share"] == same["outlier_share"] == pytest.approx(1 / 30, rel=0.1)
        # The sinks are left out, whatever the constant.
        beyond = sae.outliers(torch.from_numpy(np.stack(texts(size))))
        assert bool(beyond[:, 0].all())
        assert not bool(beyond[:, 1:].any())


def test_an_export_gives_the_same_bits_and_the_same_outliers(trained: dict[int, TemporalSAE], tmp_path: Path) -> None:
    from sae_lens import SAE

    sae, x = trained[500], torch.from_numpy(np.concatenate(texts(500, n=4)))
    folder = sae.to_saelens(tmp_path / "exported")
    with torch.no_grad():
        assert torch.equal(SAE.load_from_disk(folder).encode(x), sae.encode(x))
    for again in (TemporalSAE.load(folder), TemporalSAE.load(sae.save(tmp_path / "saved"))):
        assert torch.equal(again.outliers(x), sae.outliers(x))
        assert again.norm_centre == sae.norm_centre


def test_an_sae_without_a_centre_keeps_its_limit_about_zero(trained: dict[int, TemporalSAE], tmp_path: Path) -> None:
    folder = trained[0].save(tmp_path / "sae")
    old = TemporalSAE(D, trained[0].config, site=SITE, training={"norms": {"limit": 2.0}})
    x = torch.zeros(2, D)
    x[:, 0] = torch.tensor([1.9, 2.1])
    assert TemporalSAE.load(old.save(folder)).outliers(x).tolist() == [False, True]
    odd = TemporalSAE(D, old.config, site=SITE, training={"norms": {"limit": 2.0, "centre": [0.0] * (D - 1)}})
    refuses("does not fit", lambda: TemporalSAE.load(odd.save(folder)))


def test_most_tokens_are_judged_by_their_stored_norms(tmp_path: Path) -> None:
    """As if all activations were read; those whose norm leaves it open are."""
    store = synthetic_store(tmp_path / "acts", texts(2))
    windows = Windows(store, SITE)
    shard = windows.shards[0]
    x = shard.read(SITE, slice(None))
    read: list[np.ndarray] = []

    def rows(wanted: np.ndarray) -> np.ndarray:
        read.append(wanted)
        return x[wanted]

    def wrong(norms: NormStats) -> int:
        expected = np.linalg.norm(x.astype(np.float64) - norms.centre, axis=1) > norms.limit
        return int((norms.outliers(shard.norms(SITE), rows) != expected).sum())

    assert not wrong(windows.norms)
    assert sum(map(len, read)) < 0.01 * len(x)
    for limit in (0.3, 1.0, 1.7):
        assert not wrong(NormStats(1, 1, limit * windows.norms.median, 0, windows.norms.centre))
    assert windows._inside(np.arange(60)).tolist() == [t % 30 > 0 for t in range(60)]


def test_a_centre_is_not_moved_by_many_sinks(tmp_path: Path) -> None:
    x = np.concatenate(texts(50))
    store = synthetic_store(tmp_path / "acts", texts(50))
    stats = partial(norm_stats, max_norm=10.0, store=store, site=SITE)
    few = stats(x)
    assert few.outlier_share == pytest.approx(1 / 30)
    x[::5] += 1000 * np.linalg.norm(x.std(0))
    many = stats(x)
    assert many.outlier_share == pytest.approx(0.2)
    assert many.mean == pytest.approx(few.mean, rel=0.1)
    # Shards, and so their order and number, change no statistic but by rounding.
    assert stats(x[::-1].copy()).mean == pytest.approx(many.mean, rel=1e-6)


def test_many_tokens_are_not_left_out_in_silence(trained: dict[int, TemporalSAE], tmp_path: Path) -> None:
    x = texts(0)
    for text in x[:24]:
        text[:, CONSTANT] += 500
    store, training = synthetic_store(tmp_path / "acts", x), TrainingConfig(tokens=2_000, batch_tokens=512)
    with pytest.warns(UserWarning, match=r"of tokens at x\.site are left out: they lie far from the others"):
        evaluate(trained[0], store)
    with pytest.warns(UserWarning, match=r"4\d% of tokens at x.site are left out: they lie far from the others"):
        train(store, SAEConfig(d_sae=64, k=4), training=training, progress=False)


def test_a_start_that_was_trained_about_another_centre_is_refused(
    trained: dict[int, TemporalSAE], tmp_path: Path
) -> None:
    store, training = synthetic_store(tmp_path / "acts", texts(500)), TrainingConfig(tokens=2_000, batch_tokens=512)
    for start in ({"start": trained[0]}, {"init_from": trained[0]}):
        with pytest.raises(TsaeError, match=r"training would have left out 100% of the tokens at x\.site"):
            train(store, **start, training=training, progress=False)
