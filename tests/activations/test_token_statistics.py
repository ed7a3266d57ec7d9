"""Entropy and log-probability of every token: against transformers' full logits; and their table by trajectory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.special
import torch

import tsae
from support.builders import make_rollouts, model_config, save_model, save_perturbed, save_series
from support.checkpoints import reweigh
from support.refusals import fails, refuses
from tsae.activations.store import ActivationStore
from tsae.checkpoints.bridge import TransformerLensReader
from tsae.checkpoints.hooks import HuggingFaceReader, body_output, positions, predictions
from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.series import CheckpointSeries
from tsae.cli import main
from tsae.errors import TsaeError

SITE = "blocks.1.hook_resid_post"
CONFIG = tsae.CaptureConfig(shard_tokens=200, batch_tokens=128, token_statistics=True)


def oracle(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Entropy and log-probability by loops over transformers' full logits in float64."""
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions(mask), use_cache=False).logits
    log_p = logits.double().log_softmax(-1)
    entropy, logprob = torch.full(ids.shape, torch.nan), torch.full(ids.shape, torch.nan)
    for b in range(len(ids)):
        real = mask[b].nonzero()[:, 0].tolist()
        for t in real[1:]:
            entropy[b, t] = torch.distributions.Categorical(logits=logits[b, t - 1].double()).entropy()
            logprob[b, t] = log_p[b, t - 1, ids[b, t]]
    return entropy, logprob


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Four texts: padded right, padded left, whole, and a single token."""
    ids = torch.randint(0, 17, (4, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 6:], mask[1, :3], mask[3, 1:] = 0, 0, 0
    return ids, mask


@pytest.mark.parametrize("backend", ["huggingface", "transformer_lens"])
def test_predictions_are_those_of_the_full_logits(any_model: Path, backend: str) -> None:
    checkpoint, (ids, mask) = Checkpoint("base", str(any_model)), padded()
    expected = oracle(checkpoint.load_model(attention="eager"), ids, mask)
    reader: Any = (
        HuggingFaceReader(checkpoint.load_model(), [SITE])
        if backend == "huggingface"
        else TransformerLensReader(checkpoint, [SITE])
    )
    values, found = reader.read_and_predict(ids, mask)
    torch.testing.assert_close(found.entropy, expected[0], atol=2e-5, rtol=0, equal_nan=True)
    torch.testing.assert_close(found.logprob, expected[1], atol=2e-5, rtol=0, equal_nan=True)
    assert int(found.logprob.isfinite().sum()) == 5 + 5 + 8
    torch.testing.assert_close(values[SITE], reader.read(ids, mask)[SITE], atol=1e-5, rtol=0)


def test_the_models_own_head_runs_a_few_positions_at_a_time() -> None:
    """Gemma's soft cap changes the logits after the head's matrix; the vocabulary times the batch is never held."""
    import transformers as hf

    config = model_config("gemma3")
    config.final_logit_softcapping = 1.5
    torch.manual_seed(0)
    model = hf.Gemma3ForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(50)
    (ids, mask), widths = padded(), []
    expected = oracle(model, ids, mask)
    assert float(expected[1].nan_to_num().min()) > -np.log(20) - 3  # no logit beyond ±1.5
    model.lm_head.register_forward_hook(lambda _m, _i, out: widths.append(out.shape[:-1].numel()))
    with torch.no_grad(), body_output(model) as outputs:
        model(input_ids=ids, attention_mask=mask, position_ids=positions(mask), logits_to_keep=1)
    widths.clear()
    found = predictions(model, outputs[-1], ids, mask, chunk_logits=5 * 20 + 19)
    assert widths == [5, 5, 5, 3]
    torch.testing.assert_close(found.entropy, expected[0], atol=2e-5, rtol=0, equal_nan=True)
    torch.testing.assert_close(found.logprob, expected[1], atol=2e-5, rtol=0, equal_nan=True)
    assert "forward" not in vars(model.base_model)  # the model is as it was
    torch.testing.assert_close(oracle(model, ids, mask), expected, equal_nan=True)


def test_a_token_without_any_chance_leaves_the_entropy_finite(llama: Path) -> None:
    model, (ids, mask) = Checkpoint("base", str(llama)).load_model(), padded()
    head = model.lm_head.register_forward_hook(lambda _m, _i, out: out.index_fill(-1, torch.tensor([3]), -torch.inf))
    found = HuggingFaceReader(model, [SITE]).read_and_predict(ids, mask)[1]
    expected = oracle(model, ids, mask)
    head.remove()
    assert bool((expected[1] == -torch.inf).any())
    torch.testing.assert_close(found.logprob, expected[1], atol=2e-5, rtol=0, equal_nan=True)
    assert bool(found.entropy[mask.bool()].isfinite().sum() == 18)


# --- in the store


@pytest.fixture(scope="module")
def captured(series: CheckpointSeries, rollouts: Any, tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    folder = tmp_path_factory.mktemp("statistics") / "acts"
    return tsae.capture(series, rollouts, [SITE], to=folder, config=CONFIG, progress=False)


def test_the_store_holds_every_readers_predictions(
    captured: ActivationStore, store: ActivationStore, series: CheckpointSeries
) -> None:
    models = {checkpoint.id: checkpoint.load_model() for checkpoint in series}
    for shard, without in zip(captured.shards(), store.shards(), strict=True):
        np.testing.assert_allclose(shard.read(SITE, slice(None)), without.read(SITE, slice(None)), atol=1e-5, rtol=0)
        assert shard.entropy.dtype == shard.logprob.dtype == np.float32
        for i in range(0, len(shard.trajectory), 5):
            where = slice(int(shard.offsets[i]), int(shard.offsets[i + 1]))
            ids = torch.from_numpy(shard.token_ids[where].astype(np.int64))[None]
            entropy, logprob = oracle(models[shard.reader], ids, torch.ones_like(ids))
            np.testing.assert_allclose(shard.entropy[where], entropy[0], atol=2e-5, rtol=0)
            np.testing.assert_allclose(shard.logprob[where], logprob[0], atol=2e-5, rtol=0)


def test_a_store_without_statistics_says_so(store: ActivationStore) -> None:
    assert not store.has_token_statistics
    refuses(r"holds no entropies .* \(--token-statistics\)", tsae.trajectory_statistics, store)


def test_a_model_that_predicts_nan_is_named(tmp_path: Path, rollouts: Any) -> None:
    reweigh(save_model(tmp_path / "base"), lambda w: w["lm_head.weight"][4, 2:3].fill_(torch.nan))
    save_series(tmp_path, [{"id": "base", "path": "base", "run": None, "step": 0, "trained_on": None}])
    series = CheckpointSeries.load(tmp_path)
    with pytest.raises(TsaeError, match="at entropy are not finite while reader base reads trajectory"):
        tsae.capture(series, rollouts, [SITE], to=tmp_path / "acts", config=CONFIG, progress=False)
    tsae.capture(
        series, rollouts, [SITE], to=tmp_path / "acts", config=replace(CONFIG, token_statistics=False), progress=False
    )


# --- by trajectory


def test_the_table_against_loops(captured: ActivationStore) -> None:
    table = tsae.trajectory_statistics(captured, quantile=0.7).set_index(["reader", "trajectory"])
    assert len(table) == 144
    rollouts = captured.rollouts
    entropy: dict[tuple[str, int], np.ndarray] = {}
    logprob: dict[tuple[str, int], np.ndarray] = {}
    for shard in captured.shards():
        for i, row in enumerate(shard.trajectory.tolist()):
            n = len(rollouts.tokens(row)[1])
            entropy[shard.reader, row] = np.array(shard.entropy[shard.offsets[i + 1] - n : shard.offsets[i + 1]])
            logprob[shard.reader, row] = np.array(shard.logprob[shard.offsets[i + 1] - n : shard.offsets[i + 1]])
    for (reader, row), found in table.iterrows():
        policy = rollouts.table["policy"][row].as_py()
        everything = np.concatenate([e for (r, _), e in entropy.items() if r == reader])
        assert found.choice_points == np.mean(entropy[reader, row] > np.quantile(everything, 0.7))
        log_ratio = logprob["base", row].astype(float) - logprob[policy, row].astype(float)
        assert found.kl_k1 == pytest.approx(-log_ratio.mean(), abs=1e-9)
        assert found.kl_k3 == pytest.approx((np.exp(log_ratio) - 1 - log_ratio).mean(), abs=1e-9)
        assert found.kl_k3 >= 0
        assert found.logprob_policy == pytest.approx(logprob[policy, row].mean(), rel=1e-5)
        assert found.logprob_base == pytest.approx(logprob["base", row].mean(), rel=1e-5)
        assert found.logprob_reader == pytest.approx(logprob[reader, row].mean(), rel=1e-5)
        assert found.entropy == pytest.approx(entropy[reader, row].mean(), rel=1e-5)
        assert found.n_tokens == len(entropy[reader, row])
        if policy == "base":
            assert found.kl_k1 == found.kl_k3 == 0
    shares = table.groupby("reader").apply(lambda t: np.average(t.choice_points, weights=t.n_tokens))
    assert shares.between(0.28, 0.32).all()


def test_a_subset_has_the_same_rows(captured: ActivationStore) -> None:
    whole = tsae.trajectory_statistics(captured)
    part = tsae.trajectory_statistics(captured.subset(readers="easy-10", outcomes="failure"))
    expected = whole[(whole.reader == "easy-10") & (whole.outcome == "failure")]
    assert 0 < len(part) < 72
    # The base's log-probabilities and the run's threshold are there nevertheless.
    assert part.equals(expected.reset_index(drop=True))


def test_the_command_line_tabulates(
    captured: ActivationStore, store: ActivationStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "below" / "statistics.parquet"
    options = ["--quantile", "0.7", "--readers", "base", "--outcomes", "failure"]
    main(["store", "statistics", str(captured.path), "--to", str(to), *options])
    subset = captured.subset(readers="base", outcomes="failure")
    expected = tsae.trajectory_statistics(subset, quantile=0.7)
    pd.testing.assert_frame_equal(pd.read_parquet(to), expected, check_dtype=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[2:4]] == [["base", "base"], ["base", "easy-10"]]
    own = expected[expected.policy == "easy-10"]
    means = [np.average(own[name], weights=own.n_tokens) for name in ("entropy", "choice_points", "kl_k3")]
    assert lines[3].split()[2] == str(len(own))
    assert lines[3].split()[3:5] == [f"{means[0]:.3f}", f"{means[1]:.1%}"]
    assert lines[3].split()[6] == f"{means[2]:.4f}"
    assert "(--token-statistics)" in fails(capsys, "store", "statistics", store.path, "--to", to).err


def test_a_policy_that_is_no_reader_leaves_nan(series: CheckpointSeries, tmp_path: Path) -> None:
    rollouts = make_rollouts(("base", "elsewhere"), n_problems=2)
    store = tsae.capture(series, rollouts, [SITE], to=tmp_path / "acts", config=CONFIG, progress=False)
    table = tsae.trajectory_statistics(store)
    foreign = table.policy == "elsewhere"
    assert table[foreign][["logprob_policy", "kl_k1", "kl_k3"]].isna().all(axis=None)
    assert table[foreign][["logprob_base", "logprob_reader", "choice_points"]].notna().all(axis=None)
    assert table[~foreign].notna().drop(columns="band").all(axis=None)


def test_encoding_makes_entropy_a_behaviour(captured: ActivationStore, store: ActivationStore, tmp_path: Path) -> None:
    from tsae.rollouts.behaviours import behaviour_table

    sae = tsae.TemporalSAE(16, tsae.SAEConfig(d_sae=8, k=2, groups=(0.5, 0.5)), site=SITE).requires_grad_(False)
    features = tsae.encode(sae, captured, to=tmp_path / "features", progress=False)
    statistics = tsae.trajectory_statistics(captured)
    own = statistics[statistics.reader == statistics.policy].set_index("trajectory").entropy.sort_index()
    for table in (features, tsae.FeatureTable.load(tmp_path / "features")):
        np.testing.assert_array_equal(table.rollouts.frame.entropy, own)
        found = behaviour_table(table.rollouts)
        assert set(found[found.behaviour == "entropy"].policy) == {"base", "easy-10"}
    # Of one reader alone only what that one sampled has an entropy; without statistics nothing has.
    part = tsae.encode(sae, captured.subset(readers="easy-10"), progress=False).rollouts
    assert set(part.frame.policy[part.frame.entropy.notna()]) == {"easy-10"}
    assert "entropy" not in tsae.encode(sae, store, progress=False).rollouts.table.column_names


@pytest.mark.slow(ci=True)  # samples much
def test_the_estimators_estimate_the_divergence(llama: Path, tmp_path: Path) -> None:
    """On responses that a policy really sampled, both estimates agree with the KL of the full distributions."""
    save_perturbed(llama, tmp_path / "base", amount=0.0)
    save_perturbed(llama, tmp_path / "run", amount=0.03)
    save_series(
        tmp_path,
        [
            {"id": "base", "path": "base", "run": None, "step": 0, "trained_on": None},
            {"id": "run", "path": "run", "run": "run", "step": 10, "trained_on": None},
        ],
    )
    series = CheckpointSeries.load(tmp_path)
    problems = [tsae.Problem(f"p{i}", f"{i}+1?", str(i)) for i in range(9)]
    sampling = tsae.SamplingConfig(n_samples=30, max_new_tokens=8, seed=0)
    rollouts = tsae.sample(series["run"], problems, sampling, verify=lambda response, answer: False)
    store = tsae.capture(series, rollouts, [SITE], to=tmp_path / "acts", config=CONFIG, progress=False)
    table = tsae.trajectory_statistics(store)
    table = table[table.reader == "run"]
    exact = []
    models = [series[id].load_model() for id in ("run", "base")]
    for row in range(len(rollouts)):
        prompt, response = rollouts.tokens(row)
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
        with torch.no_grad():
            p, q = (m(ids).logits[0, len(prompt) - 1 : -1].double().softmax(-1).numpy() for m in models)
        exact.append(scipy.special.rel_entr(p, q).sum(-1).mean())
    for kind in ("kl_k1", "kl_k3"):
        # Sums over a response: what comes later decides its length, and a mean would depend on that.
        error = (table[kind] - np.array(exact)) * table.n_tokens
        assert abs(error.mean()) < 4 * error.std() / len(error) ** 0.5
    assert table.kl_k3.std() < table.kl_k1.std()
    assert np.mean(exact) > 0.01
