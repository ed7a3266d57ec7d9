"""Evaluation by slices against loops, smoothness by hand, spliced losses against sae_lens and the bridge."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import scipy.stats
import torch

import tsae
from support.builders import make_rollouts, synthetic_store
from support.checkpoints import loads_of, save_adapter
from support.refusals import refuses
from support.stores import numbers_by_hand
from tsae.activations.store import ActivationStore
from tsae.checkpoints.hooks import rewritten
from tsae.checkpoints.series import CheckpointSeries
from tsae.errors import TsaeError
from tsae.sae.config import SAEConfig
from tsae.sae.model import TemporalSAE
from tsae.sae.quality.evaluation import _begins_with_special, evaluate, smoothness
from tsae.sae.quality.splice import loss_recovered

SITE = "blocks.1.hook_resid_post"

# sae_lens imports a deprecated module of transformer_lens.
lens_warning = pytest.mark.filterwarnings("ignore:The 'utils' module has been deprecated:DeprecationWarning")


@pytest.fixture(scope="module")
def banded(store: ActivationStore, tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    """The small store, with bands known for two thirds of its problems."""
    folder = Path(shutil.copytree(store.path, tmp_path_factory.mktemp("banded") / "acts"))
    problems = [int(id[1:]) for id in store.rollouts.table["problem_id"].to_pylist()]
    bands = [("easy", "hard", None)[p % 3] for p in problems]
    store.rollouts.with_column("band", bands).write(folder / "rollouts.parquet")
    return ActivationStore(folder)


@pytest.fixture(scope="module")
def sae(store: ActivationStore) -> TemporalSAE:
    return fitting(store)


def fitting(store: ActivationStore) -> TemporalSAE:
    """A random dictionary that explains some of the variance."""
    x = torch.from_numpy(np.concatenate([shard.read(SITE, slice(None)) for shard in store.shards()]))
    sae = TemporalSAE(16, SAEConfig(d_sae=64, k=6, groups=(0.25, 0.75)), site=SITE)
    sae.initialize(x.mean(0), torch.Generator().manual_seed(0))
    with torch.no_grad():
        sae.threshold.fill_(float(sae.preactivations(x).flatten().sort(descending=True).values[6 * len(x)]))
        sae.W_enc.mul_(0.6)
        sae.threshold.mul_(0.6)
    return sae.requires_grad_(False).eval()


def test_slices_against_loops(banded: ActivationStore, sae: TemporalSAE) -> None:
    tokens: dict[tuple[str, str], list[np.ndarray]] = {}
    bands = banded.rollouts.table["band"].to_pylist()
    prompts = banded.rollouts.lengths("prompt_ids")
    for shard in banded.shards():
        x = shard.read(SITE, slice(None))
        for i, row in enumerate(shard.trajectory):
            for t in range(shard.offsets[i], shard.offsets[i + 1]):
                if int(shard.token_ids[t]) in banded.special_ids:
                    continue
                span = "prompt" if t - shard.offsets[i] < prompts[row] else "response"
                for key in (("all", "all"), ("reader", shard.reader), ("band", bands[row]), ("span", span)):
                    tokens.setdefault(key, []).append(x[t])
    found = evaluate(sae, banded, held_out=None)
    keys = [(s.by, s.value) for s in found.slices]
    assert keys == [
        ("all", "all"),
        ("reader", "base"),
        ("reader", "easy-10"),
        ("band", "easy"),
        ("band", "hard"),
        ("span", "prompt"),
        ("span", "response"),
    ]
    for s in found.slices:
        expected = np.array(tokens[s.by, s.value])
        assert s.n_tokens == len(expected)
        by_hand = numbers_by_hand(sae, [expected])
        for name in ("fve", "fve_high", "silent_high", "cosine", "cosine_high", "l0", "l0_high", "alive"):
            value = by_hand[name]
            assert getattr(s, name) == pytest.approx(value, rel=1e-4), (s.by, s.value, name)
            if s.by == "all":
                assert getattr(found, name) == pytest.approx(value, rel=1e-4)
    assert 0.1 < found.fve_high < found.fve < 1
    assert found.slices[1].fve != pytest.approx(found.slices[2].fve, abs=1e-3)
    table = found.table()
    assert list(table.value) == [value for _, value in keys]
    assert table.n_tokens[1:3].sum() == table.n_tokens[0]
    assert evaluate(sae, banded, held_out=None, span="prompt").slices[-1].value == "prompt"
    assert evaluate(sae, banded.subset(readers="easy-10"), held_out=None).fve == pytest.approx(found.slices[2].fve)


def test_a_trajectory_cut_by_special_tokens_is_one_trajectory(tmp_path: Path, sae: TemporalSAE) -> None:
    """Token ids of the synthetic store run from 1 to 9; making 4 special cuts every trajectory in two or three."""
    rng = np.random.default_rng(0)
    texts = [rng.normal(size=(n, 16)) for n in (6, 14, 14)]
    store = synthetic_store(tmp_path / "acts", texts, site=SITE, special=(4,))
    found = evaluate(sae, store, held_out=None)
    assert found.n_trajectories == 3
    kept = [np.delete(text, [4, 13][: 1 + (len(text) > 13)], axis=0) for text in texts]
    assert found.n_tokens == sum(map(len, kept)) == 29
    assert found.fve == pytest.approx(numbers_by_hand(sae, kept)["fve"], rel=1e-4)
    # No step leads over the special token.
    steps, codes = [], [sae.encode(torch.from_numpy(text).float()).numpy() for text in texts]
    for text, code in zip(texts, codes, strict=True):
        pairs = [t for t in range(1, len(text)) if 4 not in (t, t - 1) and 13 not in (t, t - 1)]
        ratio = [np.abs(code[t] - code[t - 1]) / np.linalg.norm(text[t] - text[t - 1]) for t in pairs]
        active = (np.delete(code, [4, 13][: 1 + (len(text) > 13)], axis=0) > 0).any(0)
        steps.append(np.max(ratio, axis=0)[active].mean())
    assert found.smoothness_all == pytest.approx(np.mean(steps), rel=1e-4)


# --- smoothness


def test_smoothness_by_hand() -> None:
    """Four tokens on a line, moving 1, 2 and 1; three features."""
    x = torch.tensor([[0.0], [1.0], [3.0], [4.0]])
    codes = torch.tensor([[0.0, 2.0, 0.0], [0.0, 3.0, 0.0], [4.0, 3.0, 0.0], [4.0, 2.0, 0.0]])
    everything = torch.ones(4, dtype=torch.bool)
    found = smoothness(x, codes, everything, everything[1:])
    # Feature 0 changes by 0, 4, 0: ratios 0, 2, 0; it is active at the last two steps, over which the stream moves 3.
    # Feature 1 changes by 1, 0, 1: ratios 1, 0, 1; active throughout, over 4.
    assert found.largest[:2].tolist() == [2.0, 1.0]
    assert found.mean[:2].tolist() == pytest.approx([2 / 3, 2 / 3])
    assert found.robust[:2].tolist() == pytest.approx([4 / 3, 2 / 4])
    assert all(math.isnan(values[2]) for values in found)
    # Without the second step, over which feature 0 comes on.
    found = smoothness(x, codes, everything, torch.tensor([True, False, True]))
    assert found.robust[:2].tolist() == pytest.approx([0.0, 1.0])
    # Without any step that concerns it, nothing can be said.
    assert math.isnan(smoothness(x, codes, everything, torch.tensor([True, False, False])).robust[0])


def features_of_all_kinds(rng: np.random.Generator, n: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps of equal length, and forty features that forget at rates from slowly to at once."""
    steps = rng.normal(size=(n, 24))
    x = np.cumsum(steps / np.linalg.norm(steps, axis=1, keepdims=True), axis=0)
    keep = np.sqrt(1 - np.linspace(0.05, 1, 40) ** 2)
    state = rng.normal(size=40)
    codes = np.empty((n, 40))
    for t in range(n):
        state = keep * state + np.sqrt(1 - keep**2) * rng.normal(size=40)
        codes[t] = np.maximum(state + 1, 0)
    return torch.from_numpy(x), torch.from_numpy(codes)


def test_the_robust_smoothness_ranks_like_the_largest_where_that_is_well_behaved_and_stays_where_it_is_not() -> None:
    x, codes = features_of_all_kinds(np.random.default_rng(0))
    everything = torch.ones(len(x), dtype=torch.bool)
    plain = smoothness(x, codes, everything, everything[1:])
    assert scipy.stats.spearmanr(plain.largest, plain.robust).statistic > 0.95
    assert bool((plain.robust <= plain.largest).all())
    # One pair of nearly equal tokens.
    x[200:] -= 0.999 * (x[200] - x[199])
    broken = smoothness(x, codes, everything, everything[1:])
    assert (broken.largest / plain.largest).max() > 50
    assert scipy.stats.spearmanr(plain.largest, broken.largest).statistic < 0.9
    torch.testing.assert_close(broken.robust, plain.robust, rtol=0.01, atol=0)
    # Longer trajectories of the same kind look rougher by their largest ratio, not by the robust one.
    short = smoothness(x[:40], codes[:40], everything[:40], everything[1:40])
    assert (plain.largest / short.largest).median() > 1.2
    assert (plain.robust / short.robust).median() == pytest.approx(1, abs=0.1)


def test_silence_does_not_count_as_smooth() -> None:
    """Two features that switch on and off as abruptly, one of them ten times as often."""
    x = torch.arange(200.0)[:, None]
    codes = torch.zeros(200, 2)
    codes[torch.arange(5, 200, 10), 0] = 1
    codes[105, 1] = 1
    everything = torch.ones(200, dtype=torch.bool)
    found = smoothness(x, codes, everything, everything[1:])
    assert found.robust.tolist() == found.largest.tolist() == [1.0, 1.0]
    assert found.mean[0] > 5 * found.mean[1]


# --- the reconstruction spliced into the model


@pytest.fixture(scope="module")
def texts_of_one_length(series: Any, fingerprint: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A store of 24 trajectories of 16 tokens, none of them special."""
    import tsae

    rng = np.random.default_rng(3)
    records = [
        {
            "problem_id": f"p{i // 2}",
            "policy": "base",
            "prompt_ids": rng.integers(0, 17, 4).tolist(),
            "response_ids": rng.integers(0, 17, 12).tolist(),
            "outcome": "unknown",
        }
        for i in range(24)
    ]
    rollouts = tsae.Rollouts.from_records(records, {"tokenizer": fingerprint})
    return tsae.capture(series.final(), rollouts, [SITE], to=tmp_path_factory.mktemp("equal") / "acts", progress=False)


@pytest.mark.slow(ci=True)
@lens_warning
def test_sae_lens_evals_gives_the_same_numbers(
    texts_of_one_length: ActivationStore, series: Any, tmp_path: Path
) -> None:
    from sae_lens import SAE
    from sae_lens.evals import get_eval_everything_config, run_evals
    from sae_lens.training.activation_scaler import ActivationScaler

    from tsae.checkpoints.bridge import TransformerLensReader

    store = texts_of_one_length
    sae = fitting(store)
    ids = np.stack([np.concatenate(store.rollouts.tokens(row)) for row in range(24)]).astype(np.int64)
    tokens = SimpleNamespace(
        store_batch_size_prompts=24,
        context_size=16,
        get_batch_tokens=lambda _n: torch.from_numpy(ids),
        reset_input_dataset=lambda: None,
    )
    metrics, features = run_evals(
        SAE.load_from_disk(sae.to_saelens(tmp_path / "exported")),
        tokens,
        TransformerLensReader(series.base, [SITE]).bridge,
        ActivationScaler(),
        get_eval_everything_config(n_eval_reconstruction_batches=1),
        exclude_special_tokens=False,
    )
    found = evaluate(sae, store.subset(readers="base"), held_out=None, max_norm=math.inf)
    assert found.n_tokens == metrics["token_stats"]["total_tokens_eval_sparsity_variance"] == 24 * 16
    assert found.fve > 0.2
    assert found.fve == pytest.approx(metrics["reconstruction_quality"]["explained_variance"], rel=1e-5)
    assert found.cosine == pytest.approx(metrics["reconstruction_quality"]["cossim"], rel=1e-5)
    assert found.l0 == pytest.approx(metrics["sparsity"]["l0"], rel=1e-6)
    assert found.alive == np.mean(np.array(features["feature_density"]) > 0)
    loss = loss_recovered(sae, store, series.base, list(range(24)), targets="all")
    performance, behaviour = metrics["model_performance_preservation"], metrics["model_behavior_preservation"]
    assert loss.loss == pytest.approx(performance["ce_loss_without_sae"], rel=1e-4)
    assert loss.loss_spliced == pytest.approx(performance["ce_loss_with_sae"], rel=1e-4)
    assert loss.loss_ablated == pytest.approx(performance["ce_loss_with_ablation"], rel=1e-4)
    assert loss.recovered == pytest.approx(performance["ce_loss_score"], rel=1e-3)
    assert loss.kl == pytest.approx(behaviour["kl_div_with_sae"], rel=1e-3)
    assert (loss.n_tokens, loss.n_trajectories, loss.n_problems) == (24 * 16, 24, 12)
    assert loss.recovered_low < loss.recovered < loss.recovered_high
    assert loss.kl_low < loss.kl < loss.kl_high


def test_a_perfect_sae_recovers_everything(store: ActivationStore, series: Any) -> None:
    """Codes ±x of every coordinate: the reconstruction is exact."""
    perfect = TemporalSAE(16, SAEConfig(d_sae=32, k=16, groups=(0.5, 0.5)), site=SITE)
    with torch.no_grad():
        perfect.W_enc.copy_(torch.cat([torch.eye(16), -torch.eye(16)], dim=1))
        perfect.W_dec.copy_(perfect.W_enc.T)
    found = evaluate(perfect, store, held_out=None, series=series)
    assert [loss.reader for loss in found.losses] == store.readers
    for loss in found.losses:
        assert loss.kl == pytest.approx(0, abs=1e-6)
        assert loss.recovered == pytest.approx(1, abs=1e-5)
        assert loss.loss != pytest.approx(loss.loss_ablated, abs=0.01)
    assert found.losses[0].loss != found.losses[1].loss
    assert "reader easy-10" in str(found)
    assert list(found.loss_table().reader) == store.readers


@pytest.mark.slow(ci=True)
def test_adapters_are_spliced_over_a_base_that_is_loaded_once(
    llama: Path, sae: TemporalSAE, fingerprint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (5, 10):
        save_adapter(llama, tmp_path / "run" / f"checkpoint-{step}", seed=step)
    adapters = CheckpointSeries.load(llama, tmp_path / "run")
    rollouts = make_rollouts(("base",), tokenizer=fingerprint)
    acts = tsae.capture(adapters, rollouts, [SITE], to=tmp_path / "acts", progress=False)
    rows = list(range(len(rollouts)))
    alone = [loss_recovered(sae, acts, checkpoint, rows) for checkpoint in adapters]
    loads = loads_of(monkeypatch)
    found = evaluate(sae, acts, held_out=None, max_norm=1e9, series=adapters)
    assert len(loads) == 1
    assert [loss.reader for loss in found.losses] == ["base", "run-00005", "run-00010"]
    assert [loss.kl for loss in found.losses] == pytest.approx([loss.kl for loss in alone], rel=1e-6)
    assert len({round(loss.loss, 6) for loss in found.losses}) == 3


def test_padding_batches_and_special_tokens_do_not_matter(
    store: ActivationStore, series: Any, sae: TemporalSAE
) -> None:
    rows = [0, 5, 17, 40]
    together = loss_recovered(sae, store, series.base, rows, targets="all", batch_tokens=4096)
    one_by_one = [loss_recovered(sae, store, series.base, [row], targets="all", batch_tokens=1) for row in rows]
    n = np.array([loss.n_tokens for loss in one_by_one])
    assert together.n_tokens == n.sum()
    assert together.kl == pytest.approx(np.average([loss.kl for loss in one_by_one], weights=n), rel=1e-4)
    counted = sum(
        int((~np.isin(np.concatenate(store.rollouts.tokens(row)), list(store.special_ids))).sum()) for row in rows
    )
    assert together.n_tokens == counted
    response = loss_recovered(sae, store, series.base, rows, span="response", targets="all")
    assert 0 < response.n_tokens < counted
    # Every response token is predicted at the token before it; the last one is <eos>, at which nothing is replaced.
    predicted = loss_recovered(sae, store, series.base, rows)
    assert predicted.n_tokens == sum(len(store.rollouts.tokens(row)[1]) for row in rows)
    prompts = loss_recovered(sae, store, series.base, rows, targets="prompt")
    assert prompts.n_tokens == sum(len(store.rollouts.tokens(row)[0]) - 2 for row in rows)
    weights = np.array([predicted.n_tokens, prompts.n_tokens])
    losses = [predicted.loss_spliced, prompts.loss_spliced]
    assert together.loss_spliced == pytest.approx(np.average(losses, weights=weights), rel=1e-5)
    # Beyond the limit nothing is replaced, and nothing counts.
    with pytest.raises(TsaeError, match="none of the 4 trajectories has a token to replace"):
        loss_recovered(sae, store, series.base, rows, beyond=lambda x: x.norm(dim=-1) >= 0)


@pytest.mark.parametrize("site", [SITE, "blocks.2.hook_resid_pre"])
def test_rewriting_is_what_the_bridge_does(series: Any, site: str) -> None:
    from tsae.checkpoints.bridge import TransformerLensReader

    ids = torch.tensor([[17, 3, 4, 5, 6], [17, 8, 9, 18, 18]])
    mask = torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])
    model = series.base.load_model()
    with torch.no_grad():
        before = model(input_ids=ids, attention_mask=mask).logits
        with rewritten(model, site, lambda x: x * 1.5 - 0.2):
            found = model(input_ids=ids, attention_mask=mask).logits
        after = model(input_ids=ids, attention_mask=mask).logits
    expected = TransformerLensReader(series.base, [site]).logits(ids, mask, {site: lambda x: x * 1.5 - 0.2})
    real = mask.bool()
    torch.testing.assert_close(found[real], expected[real], atol=1e-4, rtol=1e-4)
    assert float((found - before)[real].abs().max()) > 0.01
    assert torch.equal(before, after)
    with (
        pytest.raises(TsaeError, match=r"blocks\.9\.hook_resid_post does not exist"),
        rewritten(model, "blocks.9.hook_resid_post", lambda x: x),
    ):
        pass


def test_other_weights_than_those_captured_are_refused(store: ActivationStore, series: Any, sae: TemporalSAE) -> None:
    swapped = replace(series["easy-10"], id="base")
    refuses("its weights or its config are not those that reader base had", loss_recovered, sae, store, swapped, [0])


# --- the command line


@pytest.mark.slow(ci=True)
def test_everything_from_the_command_line(
    banded: ActivationStore, series_folder: Path, sae: TemporalSAE, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tsae.cli import main
    from tsae.sae.quality.stability import Stability

    other = TemporalSAE(16, sae.config, site=SITE)
    other.load_state_dict({**sae.state_dict(), "W_dec": sae.W_dec.flip(0)})
    mine, theirs = sae.save(tmp_path / "sae"), other.save(tmp_path / "other")
    arguments = ["--sae", mine, "--store", banded.path, "--all-problems", "--series", series_folder]
    arguments += ["--baseline", theirs, "--seeds", theirs, "--json", tmp_path / "all.json"]
    main(["evaluate", *map(str, arguments)])
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "all.json").read_text())
    expected = evaluate(sae, banded, held_out=None)
    assert found["evaluation"]["fve"] == pytest.approx(expected.fve)
    assert [s["value"] for s in found["evaluation"]["slices"]] == [s.value for s in expected.slices]
    assert [loss["reader"] for loss in found["evaluation"]["losses"]] == banded.readers
    assert {score["sae"] for score in found["separation"]["scores"]} == {"SAE", "baseline", "activations"}
    assert found["stability"]["found_again"] == 1
    assert Stability.load(mine).per_latent.min() == pytest.approx(1, abs=1e-3)
    assert "NaN" not in (tmp_path / "all.json").read_text()
    lines = ("FVE ", "reader easy-10", "band hard", "span response", "recovered", "trajectory problem", "found again")
    for text in lines:
        assert text in printed
    main(["evaluate", "--sae", str(mine), "--store", str(banded.path), "--span", "response", "--readers", "base"])
    assert "reader easy-10" not in capsys.readouterr().out


def test_nothing_active_is_null_in_json(store: ActivationStore) -> None:
    found = evaluate(TemporalSAE(16, SAEConfig(d_sae=8, k=1), site=SITE), store, held_out=None)
    assert (found.l0, found.alive) == (0, 0)
    assert math.isnan(found.smoothness_high)
    assert math.isnan(found.smoothness_high_robust)
    content = found.as_dict()
    assert content["smoothness_high_robust"] is None
    json.dumps(content, allow_nan=False)
    assert "–" in str(found)


@pytest.mark.parametrize(("prompts", "most"), [([[9, 1], [9], [1]], True), ([[9], [1]], False), ([[], [9], []], False)])
def test_texts_begin_with_a_special_token_where_most_do(prompts: list[list[int]], most: bool) -> None:
    source: Any = SimpleNamespace(rollouts=SimpleNamespace(table=pa.table({"prompt_ids": prompts})), special_ids=[9])
    assert _begins_with_special(source) == most
