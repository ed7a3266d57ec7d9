"""Training that starts from an SAE: the same function before the first step, the same latents after the last."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.builders import synthetic_store
from support.refusals import fails, refuses
from support.stores import (
    CONFIG,
    SHORT,
    WIDTH,
    checkpoint,
    interrupted,
    lens_config,
    make_store,
    randomized,
    same_files,
)
from tsae.activations.batches import Windows
from tsae.activations.store import ActivationStore
from tsae.base.distributed import Processes
from tsae.errors import TsaeError
from tsae.sae.config import SAEConfig, TrainingConfig
from tsae.sae.model import TemporalSAE
from tsae.sae.quality.evaluation import evaluate
from tsae.sae.quality.stability import stability
from tsae.sae.training.finetuning import starting_config, warm_start
from tsae.sae.training.train import Plan, train
from tsae.sae.training.trainer import Trainer

SITE = "x.site"
STILL = replace(SHORT, learning_rate=1e-12)
"""Steps that move nothing."""

# sae_lens imports a deprecated module of transformer_lens.
pytestmark = [
    pytest.mark.slow(ci=True),
    pytest.mark.filterwarnings("ignore:The 'utils' module has been deprecated:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    return make_store(tmp_path_factory.mktemp("first") / "acts")


@pytest.fixture(scope="module")
def second(first: ActivationStore, tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    """The same directions, seven times as large, in another order and with new noise."""
    rng = np.random.default_rng(5)
    (shard,) = first.shards()
    texts = shard.read(SITE, slice(None)).reshape(60, 25, WIDTH)[rng.permutation(60)]
    return synthetic_store(
        tmp_path_factory.mktemp("second") / "acts", list(7 * texts + 0.1 * rng.normal(size=texts.shape))
    )


@pytest.fixture(scope="module")
def base(first: ActivationStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "sae"
    train(first, CONFIG, to=folder, training=SHORT, progress=False)
    return folder


def tokens(store: ActivationStore) -> torch.Tensor:
    return torch.from_numpy(next(store.shards()).read(SITE, slice(None)))


def trainer_of(store: ActivationStore, start: TemporalSAE) -> Trainer:
    plan = Plan.of(store, None, SHORT, start=start)
    return Trainer(Windows(store, SITE, held_out=False), plan.config, plan.training, Processes(), start)


def unscaled(trainer: Trainer) -> TemporalSAE:
    """What the trainer holds before its next step, for raw activations."""
    sae = copy.deepcopy(trainer.sae)
    sae.fold_scale(trainer.scale, trainer.centre)
    return sae


def test_before_the_first_step_a_tsae_is_what_it_was(second: ActivationStore, base: Path) -> None:
    start, x = TemporalSAE.load(base), tokens(second)
    trainer = trainer_of(second, start)
    assert trainer.scale != pytest.approx(float(np.sqrt(WIDTH)) / start.training_info["norms"]["mean"], rel=0.5)
    assert torch.equal(trainer.sae.W_dec, start.W_dec)
    assert torch.equal(trainer.sae.W_enc, start.W_enc)
    assert not trainer.idle_tokens.any()
    fve = [evaluate(sae, second, max_norm=10).fve for sae in (unscaled(trainer), start)]
    assert fve[0] == pytest.approx(fve[1], abs=1e-6)
    # As it would be saved after no step at all, but for the threshold, which is the new store's.
    sae = trainer.finish(tokens(second).numpy())
    sae.threshold = start.threshold
    codes = start.encode(x)
    assert 0 < float((codes > 0).float().mean()) < 1
    torch.testing.assert_close(sae.encode(x), codes, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(sae.decode(sae.encode(x)), start.decode(codes), atol=1e-4, rtol=1e-4)


def test_steps_that_move_nothing_leave_the_weights(second: ActivationStore, base: Path) -> None:
    start = TemporalSAE.load(base)
    sae = train(second, start=base, training=STILL, progress=False)
    for name, weight in start.state_dict().items():
        if name != "threshold":
            torch.testing.assert_close(sae.state_dict()[name], weight, atol=1e-5, rtol=1e-5, msg=name)
    assert sae.config == replace(start.config, dead_after_tokens=200)
    assert sae.training_info["start"] == start.fingerprint


def test_the_threshold_is_the_new_stores(second: ActivationStore, base: Path) -> None:
    trainer = trainer_of(second, TemporalSAE.load(base))
    x = torch.from_numpy(trainer.windows.first_tokens)
    sae = trainer.finish(x.numpy())
    assert int((sae.encode(x) > 0).sum()) == CONFIG.k * len(x)


# --- SAEs of sae_lens


def lens_of(architecture: str, more: dict[str, Any]) -> Any:
    from sae_lens import SAE, TrainingSAE

    config = lens_config(architecture, **more) | {"d_in": WIDTH, "d_sae": 128}
    config["metadata"]["hook_name"] = SITE
    kind = SAE if architecture in ("jumprelu", "standard") else TrainingSAE
    lens = randomized(kind.from_dict(config))
    with torch.no_grad():
        for name, value in lens.state_dict().items():
            if name == "threshold":
                value.mul_(4)
    return lens


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("jumprelu", {}),
        ("jumprelu", {"apply_b_dec_to_input": False}),
        ("standard", {}),
        ("batchtopk", {"k": 6, "rescale_acts_by_decoder_norm": True}),
        ("batchtopk", {"k": 6, "rescale_acts_by_decoder_norm": False}),
        ("topk", {"k": 6, "rescale_acts_by_decoder_norm": False}),
    ],
)
def test_before_the_first_step_an_sae_of_sae_lens_is_what_it_was(
    architecture: str, more: dict[str, Any], first: ActivationStore, tmp_path: Path
) -> None:
    """Its codes, by sae_lens, times the norms of its decoder's rows, which are 1 in ours; and its reconstructions."""
    from sae_lens import SAE

    lens = lens_of(architecture, more)
    if architecture in ("batchtopk", "topk"):
        lens.save_inference_model(tmp_path / "inference")
        lens.save_model(tmp_path / "lens")
        lens = SAE.load_from_disk(tmp_path / "inference")
    else:
        lens.save_model(tmp_path / "lens")
    x = tokens(first)
    with torch.no_grad():
        codes, expected, norm = lens.encode(x), lens(x), lens.W_dec.norm(dim=1)
    start = TemporalSAE.load(tmp_path / "lens")
    sae = unscaled(trainer_of(first, start))
    torch.testing.assert_close(sae.W_dec.norm(dim=1), torch.ones(128), atol=1e-5, rtol=0)
    found = sae.encode(x)
    if architecture == "topk":
        assert bool((found > 0).sum(1).float().mean() > 12)
        found = found * (codes > 0)  # its choice among codes is not taken over, what a code is worth is
    torch.testing.assert_close(found, codes * norm, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(sae.decode(found), expected, atol=2e-5, rtol=1e-4)
    one_for_all = architecture in ("standard", "topk") or bool(more.get("rescale_acts_by_decoder_norm"))
    assert sae.threshold.shape == (() if one_for_all else (128,))

    trained = train(first, start=tmp_path / "lens", training=STILL, progress=False)
    assert type(trained) is TemporalSAE
    l0 = float((codes > 0).sum(1).float().mean())
    assert trained.config == SAEConfig(
        d_sae=128,
        k=6 if architecture == "topk" else trained.config.k,
        groups=(1.0,),
        temporal_weight=0.0,
        dead_after_tokens=200,
    )
    assert trained.config.k == pytest.approx(l0, abs=0.6)
    torch.testing.assert_close(trained.preactivations(x), sae.preactivations(x), atol=1e-4, rtol=1e-4)
    # One threshold for all latents, at which as many are active.
    assert trained.threshold.shape == ()
    assert float((trained.encode(x) > 0).sum(1).float().mean()) == pytest.approx(trained.config.k, rel=0.1)
    assert TemporalSAE.load(trained.save(tmp_path / "trained")).threshold.item() == trained.threshold.item()


def test_a_latent_that_writes_nothing_stays_silent(first: ActivationStore, tmp_path: Path) -> None:
    lens = lens_of("jumprelu", {})
    with torch.no_grad():
        lens.W_dec[3] = 0
    lens.save_model(tmp_path / "lens")
    sae = train(first, start=tmp_path / "lens", training=SHORT, progress=False)
    assert all(bool(weight.isfinite().all()) for weight in sae.state_dict().values())
    assert not sae.encode(tokens(first))[:, 3].any()


def test_a_tsae_from_sae_lens_goes_on_as_a_tsae(first: ActivationStore, base: Path, tmp_path: Path) -> None:
    from sae_lens import SAE

    start = TemporalSAE.load(base)
    exported = start.to_saelens(tmp_path / "exported")
    assert TemporalSAE.load(exported).fingerprint == start.fingerprint
    trained = train(first, start=exported, training=SHORT, progress=False)
    same = train(first, start=base, training=SHORT, progress=False)
    assert all(torch.equal(value, same.state_dict()[name]) for name, value in trained.state_dict().items())
    lens = SAE.load_from_disk(exported)
    with torch.no_grad():
        lens.W_dec[:] *= torch.linspace(0.5, 2, len(lens.W_dec))[:, None]
        lens.fold_W_dec_norm()
    lens.save_model(tmp_path / "folded")
    assert starting_config(TemporalSAE.load(tmp_path / "folded"), first) == replace(CONFIG, dead_after_tokens=None)


# --- what does not fit


def test_what_does_not_fit_is_refused_by_name(
    first: ActivationStore, store: ActivationStore, base: Path, tmp_path: Path
) -> None:
    def refused(message: str, store: ActivationStore = first, config: SAEConfig | None = None, **training: Any) -> None:
        with pytest.raises(TsaeError, match=message):
            train(store, config, start=base, to=tmp_path / "sae", training=replace(SHORT, **training), progress=False)
        assert not (tmp_path / "sae").exists()

    refused(r"site=y\.site is asked for, the start was trained at x\.site", site="y.site")
    refused(r"trained at x\.site, the store has blocks\.1", store)
    refused(r"d_sae=32, groups=\(0\.1, 0\.9\) are asked for, the start has d_sae=128", config=SAEConfig(d_sae=32, k=3))
    refused(
        r"groups=\(0\.5, 0\.5\) are asked for, the start has d_sae=128, groups=\(0\.1, 0\.9\)",
        config=SAEConfig(d_sae=128, k=3, groups=(0.5, 0.5)),
    )
    narrow = TemporalSAE(WIDTH // 2, SAEConfig(d_sae=8, k=1), site=SITE)
    refuses(r"x\.site has d_model 16, the SAE expects 8", train, first, start=narrow, training=SHORT, progress=False)
    refuses("holds no complete SAE", train, first, start=tmp_path / "none", training=SHORT, progress=False)


def test_a_config_may_ask_for_another_training_of_the_same_latents(first: ActivationStore, base: Path) -> None:
    config = SAEConfig(d_sae=128, k=5, temporal_weight=0.0)
    sae = train(first, config, start=base, training=SHORT, progress=False)
    assert sae.config == replace(config, dead_after_tokens=200)


# --- folders


def test_a_run_is_of_its_start(first: ActivationStore, second: ActivationStore, base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    tuned = train(second, start=base, to=folder, training=SHORT, progress=False)
    other = train(first, CONFIG, training=replace(SHORT, seed=1), progress=False)
    start = TemporalSAE.load(base).fingerprint
    assert json.loads((folder / "manifest.json").read_text())["inputs"]["start"] == start
    for wrong, found in ((other, other.fingerprint), (None, "absent")):
        config = None if wrong is not None else tuned.config
        with pytest.raises(TsaeError, match=rf"inputs\.start was {start}, is {found}"):
            train(second, config, start=wrong, to=folder, training=SHORT, progress=False)
    with pytest.raises(TsaeError, match=rf"inputs\.start was absent, is {start}"):
        train(first, replace(CONFIG), start=base, to=base, training=SHORT, progress=False)
    # The same weights from elsewhere are the same start, and what is finished is loaded.
    moved = TemporalSAE.load(base).save(tmp_path / "moved")
    stamp = (folder / "sae.safetensors").stat().st_mtime_ns
    again = train(second, start=moved, to=folder, training=SHORT, progress=False)
    assert (folder / "sae.safetensors").stat().st_mtime_ns == stamp
    assert again.fingerprint == tuned.fingerprint != start
    # A fine-tuned SAE is a start like any other.
    further = train(second, start=folder, training=SHORT, progress=False)
    assert further.training_info["start"] == tuned.fingerprint


@pytest.mark.parametrize("architecture", ["ours", "jumprelu"])
def test_a_fine_tuning_that_was_killed_ends_with_the_same_bits(
    architecture: str, second: ActivationStore, base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start = base
    if architecture != "ours":
        lens_of(architecture, {}).save_model(tmp_path / "lens")
        start = tmp_path / "lens"

    def run(folder: Path) -> None:
        train(second, start=start, to=folder, training=SHORT, progress=False)

    run(tmp_path / "whole")
    folder = interrupted(monkeypatch, second, tmp_path / "sae", training_of=run)
    other = train(second, CONFIG, training=SHORT, progress=False)
    with pytest.raises(TsaeError, match=r"holds another training \(.*inputs\.start was \w{16}, is \w{16}"):
        train(second, start=other, to=folder, training=SHORT, progress=False)
    assert checkpoint(folder) == 10
    run(folder)
    same_files(folder, tmp_path / "whole")


# --- on the testbed


@pytest.mark.slow
def test_a_series_of_saes_on_the_testbed(tmp_path: Path) -> None:
    """From the base's SAE to that of a GRPO run: better from the beginning, and latents stay what they were."""
    import tsae

    series = tsae.testbed.series()
    sampling = tsae.SamplingConfig(n_samples=4, max_new_tokens=40, batch_size=120)
    stores = {}
    for id in ("base", "hard-150"):
        problems = tsae.testbed.eval_problems(10)
        rollouts = tsae.sample(series[id], problems, sampling, verify=tsae.testbed.verify, progress=False)
        reader = series.select([id])
        stores[id] = tsae.capture(reader, rollouts, to=tmp_path / id, progress=False)
    config = SAEConfig(d_sae=128, k=8)
    long = TrainingConfig(tokens=100_000, batch_tokens=512)
    start = train(stores["base"], config, training=long, progress=False)
    few = replace(long, tokens=10_000, learning_rate=2e-3)
    tuned = train(stores["hard-150"], start=start, training=few, progress=False)
    scratch = train(stores["hard-150"], config, training=few, progress=False)
    fve = {
        name: evaluate(sae, stores["hard-150"].subset(readers="hard-150"), max_norm=10).fve
        for name, sae in (("start", start), ("tuned", tuned), ("scratch", scratch))
    }
    assert fve["scratch"] + 0.1 < fve["start"] < fve["tuned"], fve
    # Latent i stays latent i, for each and in the best matching of all.
    cosine = torch.cosine_similarity(start.W_dec, tuned.W_dec, dim=1)
    assert cosine.min() > 0.9
    found = stability(start, [tuned, scratch])
    np.testing.assert_allclose(found.cosine[0], cosine.numpy(), atol=1e-5)
    assert found.cosine[1].mean() < 0.8


# --- the command line


@pytest.mark.slow
def test_the_command_takes_the_starts_own_config(
    first: ActivationStore, second: ActivationStore, base: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from tsae.cli import main

    def command(to: str, *more: object, store: ActivationStore = second) -> list[str]:
        options = ["--tokens", 5000, "--batch-tokens", 200, "--learning-rate", 3e-3, "--save-every-steps", 10]
        return list(map(str, ["train", "--store", store.path, "--to", tmp_path / to, *options, *more]))

    main(command("tuned", "--start", base))
    train(second, start=base, to=tmp_path / "same", training=SHORT, progress=False)
    same_files(tmp_path / "tuned", tmp_path / "same")
    assert f"wrote {tmp_path / 'tuned'}: TemporalSAE(d_model=16, d_sae=128, k=3" in capsys.readouterr().out
    main(command("other", f"--start={base}", "--k", 5, "--temporal-weight", 0.5))
    assert TemporalSAE.load(tmp_path / "other").config == replace(
        CONFIG, k=5, temporal_weight=0.5, dead_after_tokens=200
    )
    lens_of("jumprelu", {}).save_model(tmp_path / "lens")
    main(command("from-lens", "--start", tmp_path / "lens", store=first))
    train(first, start=tmp_path / "lens", to=tmp_path / "same-lens", training=SHORT, progress=False)
    same_files(tmp_path / "from-lens", tmp_path / "same-lens")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([*command("x", "--start", base), "--help"])
    assert "Width of the dictionary: number of latents. (default: 128)" in re.sub(
        r"[│\s]+", " ", capsys.readouterr().out
    )
    for more, message in (
        (["--d-sae", 32], "d_sae=32, groups=(0.1, 0.9) are asked for, the start has d_sae=128"),
        (["--seeds", 0, 1], "a start has one site, and no seed of initial weights"),
    ):
        assert message in fails(capsys, *command("x", "--start", base, *more)).err
        assert not (tmp_path / "x").exists()


# --- warm starts from published SAEs


def test_a_warm_start_sorts_a_published_saes_latents(first: ActivationStore, tmp_path: Path) -> None:
    """Of 128 latents the 64 with the most energy; those that last come first. By a loop over the whole store."""
    lens_of("jumprelu", {}).save_model(tmp_path / "lens")
    published = TemporalSAE.load(tmp_path / "lens")
    config = SAEConfig(d_sae=64, k=3, groups=(0.25, 0.75))
    found = warm_start(published, first, config)
    windows = first.windows(SITE, held_out=False)
    norm = published.W_dec.norm(dim=1)
    energy, lasting = torch.zeros(2, published.config.d_sae, dtype=torch.float64)
    for batch in windows.epoch(0, 1024):
        codes = (published.encode(batch.x.float()) * norm).double()
        energy += codes.square().sum(0)
        for earlier, later in batch.pairs.tolist():
            lasting += codes[earlier] * codes[later]
    kept = energy.argsort(descending=True)[:64].tolist()
    high = sorted(kept, key=lambda latent: -float(lasting[latent] / energy[latent]))[:16]
    order = [*high, *(latent for latent in kept if latent not in high)]
    torch.testing.assert_close(found.W_dec, (published.W_dec / norm[:, None])[order])
    torch.testing.assert_close(found.threshold, (published.threshold * norm)[order])
    # Each latent computes what it computed.
    x = tokens(first)[:50]
    torch.testing.assert_close(found.encode(x), (published.encode(x) * norm)[:, order], atol=1e-4, rtol=1e-4)
    assert (found.config.d_high, found.site) == (16, SITE)


def test_a_warm_start_is_trained_as_a_tsae(first: ActivationStore, tmp_path: Path) -> None:
    lens_of("standard", {}).save_model(tmp_path / "lens")
    config = SAEConfig(d_sae=64, k=3)
    sae = train(first, config, init_from=tmp_path / "lens", to=tmp_path / "sae", training=SHORT, progress=False)
    assert type(sae) is TemporalSAE
    assert sae.config == replace(config, dead_after_tokens=200)
    before = warm_start(tmp_path / "lens", first, config)
    assert sae.training_info["start"] == before.fingerprint
    assert torch.cosine_similarity(before.W_dec, sae.W_dec, dim=1).median() > 0.9
    same = train(first, config, init_from=tmp_path / "lens", to=tmp_path / "sae", training=SHORT, progress=False)
    assert same.fingerprint == sae.fingerprint
    with pytest.raises(TsaeError, match=r"has 128 latents, and d_sae=256 are asked for.*--d-sae 128"):
        train(first, SAEConfig(d_sae=256), init_from=tmp_path / "lens", training=SHORT, progress=False)
    with pytest.raises(TsaeError, match="start and init_from are two beginnings"):
        train(first, config, init_from=tmp_path / "lens", start=sae, training=SHORT, progress=False)


@pytest.mark.slow
def test_the_command_starts_from_a_published_sae(
    first: ActivationStore, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from tsae.cli import main

    lens_of("standard", {}).save_model(tmp_path / "lens")
    words = ["train", "--store", first.path, "--init-from", tmp_path / "lens", "--to", tmp_path / "sae"]
    words += ["--tokens", 1000, "--batch-tokens", 200]
    assert "has 128 latents, and d_sae=4096 are asked for. Ask for as many or" in fails(capsys, *words).err
    words += ["--d-sae", 128]
    main(list(map(str, words)))
    found = TemporalSAE.load(tmp_path / "sae").config
    assert (found.d_sae, found.k, found.groups, found.temporal_weight) == (128, 20, (0.1, 0.9), 1.0)
    with pytest.raises(SystemExit):
        main([*map(str, words), "--seeds", "1", "2"])
