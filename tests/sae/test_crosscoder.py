"""Crosscoders: pairs of readers, planted changes, latent scaling against least squares, published files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.pairs import SITE, PlantedPair, paired_store, planted_pair
from support.refusals import fails, refuses
from tsae.activations.store import Pair
from tsae.cli import main
from tsae.sae.config import SAEConfig, TrainingConfig
from tsae.sae.crosscoder import Crosscoder, CrosscoderChanges, crosscoder_changes, read_published
from tsae.sae.model import TemporalSAE
from tsae.sae.quality.evaluation import evaluate
from tsae.sae.training.train import train
from tsae.verify import verify

pytestmark = pytest.mark.slow(ci=True)

CONFIG = SAEConfig(d_sae=96, k=5, temporal_weight=0.0, groups=(1.0,))
TRAINING = TrainingConfig(tokens=256 * 500, batch_tokens=256, learning_rate=3e-3)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> PlantedPair:
    return planted_pair(tmp_path_factory.mktemp("planted"))


@pytest.fixture(scope="module")
def crosscoder(world: PlantedPair, tmp_path_factory: pytest.TempPathFactory) -> Crosscoder:
    found = train(
        Pair(world.store, "run"), CONFIG, to=tmp_path_factory.mktemp("trained"), training=TRAINING, progress=False
    )
    assert isinstance(found, Crosscoder)
    return found


@pytest.fixture(scope="module")
def changes(world: PlantedPair, crosscoder: Crosscoder) -> CrosscoderChanges:
    return crosscoder_changes(crosscoder, Pair(world.store, "run"), held_out=None)


def test_a_pair_holds_both_readers_side_by_side(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    texts = {
        reader: [rng.normal(size=(int(n), 5)).astype(np.float32) for n in 3 + np.arange(23) % 4]
        for reader in ("base", "other")
    }
    pair = Pair(paired_store(tmp_path, texts, shard_size=4), "other")
    assert pair.d_model(SITE) == 10
    seen = 0
    for shard in pair.shards():
        rows, norms = shard.read(SITE, slice(None)), shard.norms(SITE)
        np.testing.assert_allclose(norms, np.linalg.norm(rows, axis=1), rtol=1e-6)
        for i, row in enumerate(shard.trajectory):
            expected = np.concatenate([texts["base"][row], texts["other"][row]], axis=1)
            np.testing.assert_array_equal(rows[shard.offsets[i] : shard.offsets[i + 1]], expected)
            seen += 1
    assert seen == 23
    batch = next(iter(pair.windows(SITE, window=2, partner=None).epoch(0, 40)))
    known = {row.tobytes() for i in range(23) for row in np.concatenate([texts["base"][i], texts["other"][i]], axis=1)}
    assert {row.numpy().tobytes() for row in batch.x} <= known


def test_a_pair_needs_a_second_reader_and_the_same_trajectories(world: PlantedPair, tmp_path: Path) -> None:
    refuses("'base' is the base itself", Pair, world.store, "base")
    refuses("no reader 'nobody'", Pair, world.store, "nobody")
    x = [np.ones((3, 2), np.float32)] * 4
    store = paired_store(tmp_path, {"base": x, "other": x})
    store.manifest["readers"][0]["shards"].clear()
    refuses("the base has not read 4 of the trajectories", Pair, store, "other")


def test_planted_changes_are_found_and_nothing_else(
    world: PlantedPair, crosscoder: Crosscoder, changes: CrosscoderChanges
) -> None:
    base, other = (rows.numpy() for rows in crosscoder.decoders)
    verdicts = changes.latents.set_index("latent").verdict

    def verdict(direction: np.ndarray, rows: np.ndarray) -> str:
        cosine = rows @ direction / np.linalg.norm(rows, axis=1)
        assert cosine.max() > 0.9
        return str(verdicts[int(cosine.argmax())])

    assert {verdict(d, other) for d in world.directions["new"]} == {"new"}
    assert {verdict(d, base) for d in world.directions["lost"]} == {"lost"}
    assert {verdict(d, other) for kind in ("weaker", "turned") for d in world.directions[kind]} == {"shared"}
    # Two latents may share a direction; each one-sided latent is one of those planted.
    for kind, rows in (("new", other), ("lost", base)):
        found = rows[changes.table(kind).latent]
        assert ((found @ world.directions[kind].T).max(1) / np.linalg.norm(found, axis=1) > 0.9).all()
    assert changes.count("artefact") == changes.count("unclear") == 0
    assert "4 new, 4 lost" in str(changes)
    assert min(changes.fve) > 0.9


@pytest.mark.slow
def test_nothing_is_new_where_checkpoints_differ_by_noise(tmp_path: Path) -> None:
    pair = Pair(planted_pair(tmp_path, same=True).store, "run")
    found = crosscoder_changes(train(pair, CONFIG, training=TRAINING, progress=False), pair, held_out=None)
    assert not found.latents.verdict.isin(["new", "lost", "artefact", "unclear"]).any()
    assert found.count("shared") > 30


def test_scaling_is_the_least_squares_scale(
    world: PlantedPair, crosscoder: Crosscoder, changes: CrosscoderChanges
) -> None:
    pair = Pair(world.store, "run")
    x = torch.from_numpy(np.concatenate([shard.read(SITE, slice(None)) for shard in pair.shards()]))
    codes = crosscoder.encode(x)
    made = crosscoder.decode(codes)
    for latent in (changes.table("new").latent[0], changes.table("lost").latent[0], changes.table("shared").latent[0]):
        own = int(crosscoder.relative_norm[latent] >= 0.5)
        halves = slice(own * 32, own * 32 + 32), slice(32 - own * 32, 64 - own * 32)
        d = crosscoder.W_dec[latent, halves[0]]
        effect = torch.outer(codes[:, latent], d).flatten()[:, None].double()

        def beta(y: torch.Tensor, effect: torch.Tensor = effect) -> float:
            return float(torch.linalg.lstsq(effect, y.flatten()[:, None].double()).solution)

        error, without_bias = x - made, made - crosscoder.b_dec
        expected = (
            beta(error[:, halves[1]]) / beta(error[:, halves[0]] + effect.reshape(-1, 32)),
            beta(without_bias[:, halves[1]]) / beta(without_bias[:, halves[0]]),
        )
        row = changes.latents.set_index("latent").loc[latent]
        assert (row.nu_error, row.nu_reconstruction) == pytest.approx(expected, abs=1e-4)
        assert row.nu_error_low <= row.nu_error <= row.nu_error_high


def test_an_artefact_is_told_from_what_is_new(world: PlantedPair, crosscoder: Crosscoder) -> None:
    """What an L1 penalty does: the base's half of a shared latent is gone, its activations are as they were."""
    pair = Pair(world.store, "run")
    shared = crosscoder_changes(crosscoder, pair, held_out=None).table("shared").latent[0]
    shrunk = Crosscoder.from_sae(
        crosscoder.__class__(crosscoder.d_model, CONFIG, site=SITE, training=crosscoder.training_info)
    )
    shrunk.load_state_dict(crosscoder.state_dict())
    with torch.no_grad():
        shrunk.W_dec[shared, :32] = 0
    found = crosscoder_changes(shrunk, pair, held_out=None).latents.set_index("latent").loc[shared]
    assert found.relative_norm == 1
    assert found.nu_error > 0.5
    assert found.verdict == "artefact"


def test_a_crosscoder_is_saved_evaluated_and_refused_where_it_does_not_belong(
    world: PlantedPair, crosscoder: Crosscoder, tmp_path: Path
) -> None:
    pair = Pair(world.store, "run")
    again = Crosscoder.load(crosscoder.save(tmp_path / "saved"))
    assert again.fingerprint == crosscoder.fingerprint
    assert again.compared == ("base", "run")
    assert repr(again) == "Crosscoder(base and run, d_model=2·32, d_sae=96, k=5)"
    assert evaluate(crosscoder, pair).fve > 0.9
    refuses(r"d_model 32.*crosscoder of base and run", evaluate, crosscoder, world.store)
    refuses("is an SAE of single activations", lambda: Crosscoder.from_sae(TemporalSAE(32, CONFIG, site=SITE)))


def _published(folder: Path, kind: int = 1, **changed: Any) -> tuple[dict[str, torch.Tensor], Path]:
    """A state_dict as dictionary_learning's BatchTopKCrossCoder has it."""
    generator = torch.Generator().manual_seed(kind)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weights = {
        "encoder.weight": normal(2, 6, 20), "encoder.bias": 0.3 * normal(20),
        "decoder.weight": normal(2, 20, 6) * (0.2 + normal(20, 1).abs()), "decoder.bias": normal(2, 6),
        "k": torch.tensor(4), "threshold": torch.tensor(2.5), "code_normalization_id": torch.tensor(kind), **changed,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    torch.save({name: value for name, value in weights.items() if value is not None}, folder / "model_final.pt")
    return weights, folder


def _theirs(weights: dict[str, torch.Tensor], x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """(n, 2, d_model) reconstructions, by the formulas of dictionary_learning: token by token, latent by latent."""
    made = []
    for token in x:
        total = weights["decoder.bias"].clone()
        for f in range(20):
            pre = sum(token[m] @ weights["encoder.weight"][m, :, f] for m in (0, 1)) + weights["encoder.bias"][f]
            if pre > 0 and pre * norm[f] > weights["threshold"]:
                total += pre * weights["decoder.weight"][:, f]
        made.append(total)
    return torch.stack(made)


@pytest.mark.parametrize("kind", [1, 2, 3, 4])
def test_published_crosscoders_reconstruct_the_same(tmp_path: Path, kind: int) -> None:
    weights, folder = _published(tmp_path, kind)
    x = torch.randn(40, 2, 6, generator=torch.Generator().manual_seed(9))
    apart, together = weights["decoder.weight"].norm(dim=2).sum(0), weights["decoder.weight"].norm(dim=(0, 2))
    norm = {1: apart, 2: together, 3: together + 0.1 * apart, 4: torch.ones(20)}[kind]
    found = read_published(folder, site=SITE, compared=("base", "run"))
    made = found.decode(found.encode(x.flatten(1))).reshape(40, 2, 6)
    torch.testing.assert_close(made, _theirs(weights, x, norm), rtol=1e-4, atol=1e-4)
    again = Crosscoder.load(found.save(tmp_path / "again"))
    torch.testing.assert_close(again.encode(x.flatten(1)), found.encode(x.flatten(1)))


@pytest.mark.parametrize("whole", [True, False])
def test_published_normalisation_is_folded_in(tmp_path: Path, whole: bool) -> None:
    deviation = torch.tensor([[1.0, 2, 3, 1, 1, 2], [2.0, 2, 1, 1, 4, 2]])
    scale = 3 / deviation.pow(2).sum(1).sqrt() if whole else torch.ones(2)
    mean = torch.arange(12.0).reshape(2, 6) / 4
    more = {"activation_mean": mean, "activation_std": deviation, "activation_global_scale": scale}
    weights, folder = _published(tmp_path, **more, target_rms=torch.tensor(3.0))
    x = 5 * torch.randn(30, 2, 6, generator=torch.Generator().manual_seed(9))
    factor = scale[:, None] if whole else 1 / deviation
    made = _theirs(weights, (x - mean) * factor, weights["decoder.weight"].norm(dim=2).sum(0)) / factor + mean
    found = read_published(folder, site=SITE, compared=("base", "run"))
    torch.testing.assert_close(found.decode(found.encode(x.flatten(1))).reshape(30, 2, 6), made, rtol=1e-4, atol=1e-3)


def test_a_file_that_needs_pickle_or_is_not_there_is_refused(tmp_path: Path) -> None:
    torch.save({"encoder.weight": re.compile("x")}, tmp_path / "ae.pt")
    for folder, message in ((tmp_path, "it needs pickle, which may run code"), ("a" * 5000, "File name too long")):
        refuses(message, read_published, folder, site=SITE, compared=("base", "run"))


def _but(value: float, *shape: int) -> torch.Tensor:
    """Ones, but for one."""
    tensor = torch.ones(shape)
    tensor.view(-1)[0] = value
    return tensor


NAN, INF = float("nan"), float("inf")
NORMED = {
    "activation_mean": torch.ones(2, 6), "activation_std": 2 * torch.ones(2, 6),
    "activation_global_scale": torch.ones(2), "target_rms": torch.tensor(3.0),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"encoder.weight": _but(NAN, 2, 6, 20)}, "encoder.weight .*finite"),
        ({"decoder.weight": 3e38 * torch.ones(2, 20, 6)}, "finite"),  # its norms are not
        ({"threshold": torch.tensor(INF)}, "threshold .*finite"),
        ({"encoder.bias": torch.ones(20, dtype=torch.int64)}, r"encoder.bias .*torch\.int64"),
        ({"decoder.bias": None}, r"decoder\.bias"),
        ({"gate": torch.ones(2)}, "unknown tensor 'gate'"),
        ({"encoder.weight": torch.ones(3, 6, 20)}, r"encoder\.weight has shape"),
        ({"encoder.bias": torch.ones(1)}, r"encoder\.bias has shape \(1,\)"),
        ({"encoder.bias": torch.ones(())}, r"encoder\.bias has shape \(\)"),
        ({"threshold": torch.ones(20)}, r"threshold has shape \(20,\)"),
        ({"decoder.bias": torch.ones(2, 1)}, r"decoder\.bias has shape \(2, 1\)"),
        ({"encoder.weight": torch.ones(2, 0, 20), "decoder.weight": torch.ones(2, 20, 0)}, "has shape"),
        ({"k": torch.tensor(-5)}, "k is -5"),
        ({"k": torch.tensor(99)}, "k=99"),
        ({"k": torch.ones(3)}, r"k is \[1\.0, 1\.0, 1\.0\]"),
        ({"code_normalization_id": torch.tensor(1.9)}, "code_normalization_id is 1.89"),
        ({"code_normalization_id": torch.tensor(5)}, "DECOUPLED"),
        ({"code_normalization_id": torch.tensor(7)}, "code_normalization_id is 7"),
        ({**NORMED, "activation_mean": torch.ones(6)}, r"activation_mean has shape \(6,\)"),
        ({**NORMED, "activation_std": None}, "activation_std"),
        ({**NORMED, "activation_std": _but(-3, 2, 6)}, "activation_std holds values of 0 or less"),
        ({**NORMED, "target_rms": torch.ones(3)}, r"target_rms has shape \(3,\)"),
        ({"x" * 5000: torch.ones(1)}, "unknown tensor 'x{58}….*Give"),
        ({3: torch.ones(1)}, "cannot be read"),
    ],
)  # fmt: skip
def test_a_published_crosscoder_with_values_of_no_use_is_refused(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _, folder = _published(tmp_path)
    weights = torch.load(folder / "model_final.pt", weights_only=True)
    torch.save({n: v for n, v in {**weights, **changed}.items() if v is not None}, folder / "model_final.pt")
    refuses(message, read_published, folder, site=SITE, compared=("base", "run"))


def test_a_normaliser_of_nan_alone_is_none(tmp_path: Path) -> None:
    _, plain = _published(tmp_path / "plain")
    nothing = {name: torch.tensor(NAN) for name in NORMED if name != "target_rms"}
    _, folder = _published(tmp_path / "nan", **nothing)
    found, again = (read_published(f, site=SITE, compared=("base", "run")) for f in (plain, folder))
    assert found.fingerprint == again.fingerprint


@pytest.mark.parametrize("alpha", ['"2.0"', "NaN", "-5", "true", "[]", "9" * 400])
def test_a_mixture_of_norms_needs_numbers(alpha: str, tmp_path: Path) -> None:
    _, folder = _published(tmp_path, 3)
    (folder / "config.json").write_text(f'{{"trainer": {{"code_normalization_alpha_sae": {alpha}}}}}')
    refuses("code_normalization_alpha", read_published, folder, site=SITE, compared=("base", "run"))


def test_the_command_judges_a_published_crosscoder(
    world: PlantedPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 20, 32, generator=generator)
    rows[0, 3] = 0  # a latent of the second model alone
    weights = {
        "encoder.weight": rows.mT.contiguous() / 8, "encoder.bias": torch.zeros(20),
        "decoder.weight": rows, "decoder.bias": torch.zeros(2, 32), "code_normalization_id": torch.tensor(4),
    }  # fmt: skip
    torch.save(weights, tmp_path / "ae.pt")
    to = tmp_path / "crosscoder"
    words = ["crosscoder", "--store", str(world.store.path), "--reader", "run", "--to", str(to), "--all-problems"]
    main([*words, "--published", str(tmp_path), "--json", str(tmp_path / "found.json")])
    assert Crosscoder.load(to).compared == ("base", "run")
    assert [(one.kind, one.state) for one in verify([to], progress=False)] == [("SAE", "intact")]
    (trained := tmp_path / "trained").mkdir()
    (trained / "metrics.jsonl").write_text("{}")
    published = ["--to", trained, "--published", tmp_path]
    assert "holds a training" in fails(capsys, "crosscoder", *words[1:5], *published).err
    assert [file.name for file in trained.iterdir()] == ["metrics.jsonl"]
    found = {row["latent"]: row for row in json.loads((tmp_path / "found.json").read_text())["latents"]}
    assert len(found) == 20
    assert found[3]["relative_norm"] == 1
    assert found[3]["verdict"] != "shared"
