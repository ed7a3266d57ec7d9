"""Targets: their values against other code, their gradients against differences of values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tsae
from support.builders import make_rollouts, random_sae, response_means, save_model
from support.refusals import refuses
from support.results import answers
from tsae.attribution.sample_gradients import TrainedWeights, log_probabilities
from tsae.attribution.sample_kinds import other_problems, sample_kinds
from tsae.attribution.targets import FeatureMeans, LogLikelihood, NextToken, Together
from tsae.checkpoints.loading import Checkpoint
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts
from tsae.sae.exchange.saelens_files import ForeignConfig
from tsae.sae.model import ForeignSAE

SPECIAL = [17, 18, 19]


def jumping(targets: FeatureMeans, trained: TrainedWeights) -> np.ndarray:
    """(n_features,) means of the SAE's own codes."""
    return np.asarray(targets.weight @ targets.each(trained, targets.fixed, soft=False))


@pytest.fixture
def trained(gpt2: Path) -> TrainedWeights:
    return TrainedWeights(Checkpoint(id="base", path=str(gpt2)).load_model(dtype="float64"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Computes in the precision of its weights throughout; Llama's norms go through float32."""
    return save_model(tmp_path_factory.mktemp("gpt2") / "model", "gpt2")


@pytest.fixture(scope="module")
def fixed(fingerprint: str) -> Rollouts:
    return make_rollouts(n_problems=30, n_samples=2, seed=5, tokenizer=fingerprint)


def some_sae(threshold: float = 0.3, point: str = "post") -> tsae.TemporalSAE:
    return random_sae(site=f"blocks.1.hook_resid_{point}", around=0.1, threshold=threshold).double()


def differences(targets: Any, trained: TrainedWeights, direction: torch.Tensor, by: float) -> np.ndarray:
    """(n,) central differences of the values along a direction."""
    start, found = trained.vector(), []
    for sign in (1, -1):
        trained.put(start + sign * by * direction)
        found.append(targets.values(trained))
    trained.put(start)
    change: np.ndarray = (found[0] - found[1]) / (2 * by)
    return change


def some_direction(trained: TrainedWeights, seed: int = 0) -> torch.Tensor:
    found = torch.randn(len(trained), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return found / found.norm()


def test_the_chance_of_a_first_token(trained: TrainedWeights) -> None:
    prompts = [np.array(ids) for ids in ([17, 1, 2], [17, 3], [17, 4, 5, 6, 7], [17, 9])]
    targets = NextToken(prompts, ["a", "b", "a", "b"], token=11, what="begins with 11")
    assert targets.names == ["begins with 11 (a)", "begins with 11 (b)"]
    chance = []
    for prompt in prompts:
        with torch.no_grad():
            logits = trained.model(torch.from_numpy(prompt)[None]).logits[0, -1]
        chance.append(float(torch.softmax(logits, 0)[11]))
    np.testing.assert_allclose(
        targets.values(trained), [(chance[0] + chance[2]) / 2, (chance[1] + chance[3]) / 2], rtol=1e-5
    )
    slopes = targets.gradients(trained)
    for seed in range(3):
        direction = some_direction(trained, seed)
        np.testing.assert_allclose(
            (slopes @ direction).numpy(), differences(targets, trained, direction, 1e-3), rtol=1e-2, atol=1e-6
        )


@pytest.mark.parametrize("point", ["pre", "post"])
def test_means_of_features(trained: TrainedWeights, fixed: Rollouts, point: str) -> None:
    """Against the reader that capture uses; the gradient where codes are continuous."""
    sae = some_sae(1e-9, point)
    targets = FeatureMeans(sae, [3, 0, 7], fixed, SPECIAL, batch_tokens=200)
    means = response_means(trained.model, sae, fixed, SPECIAL)[:, [3, 0, 7]].mean(0)
    np.testing.assert_allclose(jumping(targets, trained), means, rtol=1e-6)
    np.testing.assert_allclose(targets.values(trained), means, rtol=1e-6)  # hardly a threshold
    slopes = targets.gradients(trained).double()
    for seed in range(3):
        direction = some_direction(trained, seed)
        expected = differences(targets, trained, direction, 1e-6)
        np.testing.assert_allclose((slopes @ direction).numpy(), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("normalize", ["none", "layer_norm"])
def test_means_of_features_of_a_published_sae(trained: TrainedWeights, fixed: Rollouts, normalize: Any) -> None:
    """Its own input and units; half of its latents have no threshold, and no jump."""
    ours = some_sae()
    config = ForeignConfig(d_sae=24, apply_b_dec_to_input=False, normalize=normalize)
    sae = ForeignSAE(16, config, site=ours.site).double()
    sae.load_state_dict({**ours.state_dict(), "threshold": torch.tensor([0.0, 0.3] * 12).double()})
    targets = FeatureMeans(sae, [3, 0, 7], fixed, SPECIAL, batch_tokens=200)
    means = response_means(trained.model, sae, fixed, SPECIAL)[:, [3, 0, 7]].mean(0)
    np.testing.assert_allclose(jumping(targets, trained), means, rtol=1e-5)
    np.testing.assert_allclose(targets.values(trained)[1], means[1], rtol=1e-5)
    topk = ForeignSAE(16, ForeignConfig(d_sae=24, k=3, architecture="topk"), site=ours.site)
    refuses("chooses the k largest latents", FeatureMeans, topk, [1], fixed, SPECIAL)


def test_the_jump_at_the_threshold_is_in_the_gradient(trained: TrainedWeights, fixed: Rollouts) -> None:
    """Codes that switch on or off make a good part of a mean's change once the weights have moved some way."""
    sae, features = some_sae(), list(range(24))
    soft = FeatureMeans(sae, features, fixed, SPECIAL, width=0.05)
    hard = FeatureMeans(sae, features, fixed, SPECIAL, width=1e-9)
    np.testing.assert_allclose(hard.values(trained), jumping(soft, trained), rtol=1e-5)
    assert np.abs(soft.values(trained) - jumping(soft, trained)).max() < 0.05 * jumping(soft, trained).max()
    slope, without = soft.gradients(trained).double(), hard.gradients(trained).double()
    errors = np.zeros(2)
    for seed in range(4):
        direction = some_direction(trained, seed)
        really = differences(hard, trained, direction, 0.2)
        errors += [np.abs((part @ direction).numpy() - really).sum() for part in (slope, without)]
    assert errors[0] < 0.5 * errors[1]


def test_the_soft_gate_has_the_gradient_of_its_values(trained: TrainedWeights, fixed: Rollouts) -> None:
    targets = FeatureMeans(some_sae(), [0, 5, 9], fixed, SPECIAL, width=0.2)
    direction = some_direction(trained, 1)
    expected = differences(targets, trained, direction, 1e-5)
    np.testing.assert_allclose(
        (targets.gradients(trained).double() @ direction).numpy(), expected, rtol=1e-2, atol=1e-6
    )


def test_likelihood_of_one_kind_against_another(trained: TrainedWeights, fixed: Rollouts) -> None:
    """Against transformers' own loss, problem by problem."""
    first = np.arange(len(fixed)) % 2 == 0
    targets = LogLikelihood(fixed, {"even": first, "odd": ~first}, {"even": ~first, "odd": first}, batch_tokens=150)
    means = []
    for row in range(len(fixed)):
        prompt, response = fixed.tokens(row)
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
        labels = ids.clone()
        labels[0, : len(prompt)] = -100
        means.append(-float(trained.model(input_ids=ids, labels=labels).loss))
    problem, values = fixed.frame.problem_id.to_numpy(), np.array(means)
    both = [p for p in np.unique(problem) if len(set(first[problem == p])) == 2]
    expected = np.mean([values[(problem == p) & first].mean() - values[(problem == p) & ~first].mean() for p in both])
    np.testing.assert_allclose(targets.values(trained), [expected, -expected], rtol=1e-5)
    direction = some_direction(trained, 2)
    slopes = (targets.gradients(trained).double() @ direction).numpy()
    np.testing.assert_allclose(slopes, differences(targets, trained, direction, 1e-4), rtol=1e-2, atol=1e-6)
    with pytest.raises(TsaeError, match="no problem has responses of both kinds"):
        LogLikelihood(fixed, {"all": np.ones(len(fixed), bool)}, {"all": np.zeros(len(fixed), bool)})


def test_several_targets_one_after_another(trained: TrainedWeights, fixed: Rollouts) -> None:
    first = NextToken([fixed.tokens(0)[0]], ["all"], token=3, what="begins")
    both = Together(first, FeatureMeans(some_sae(), [1, 2], fixed, SPECIAL))
    assert both.names == ["begins (all)", "feature 1", "feature 2"]
    assert both.values(trained).shape == (3,)
    assert both.gradients(trained).shape == (3, len(trained))
    refuses("no feature 24; there are 0 to 23", lambda: FeatureMeans(some_sae(), [24], fixed, SPECIAL))


def test_logits_of_the_last_tokens_alone(trained: TrainedWeights) -> None:
    """The head does not see the others."""
    ids, seen = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]]), []
    whole = log_probabilities(trained.model, ids, torch.ones_like(ids))
    handle = trained.model.get_output_embeddings().register_forward_hook(
        lambda _m, read, _: seen.append(read[0].shape[1])
    )
    try:
        torch.testing.assert_close(log_probabilities(trained.model, ids, torch.ones_like(ids), last=3), whole[:, -3:])
    finally:
        handle.remove()
    assert seen == [4]


def test_problems_of_the_log_are_left_out(tmp_path: Path) -> None:
    every = make_rollouts(n_problems=6)
    every.write(tmp_path / "all.parquet")
    log = every.select((every.frame.problem_id.isin(every.frame.problem_id.unique()[:2])).to_numpy().nonzero()[0])
    base = every.policies[0]
    found = other_problems(tmp_path / "all.parquet", log, base)
    prompts = {log.tokens(row)[0].tobytes() for row in range(len(log))}
    kept = [row for row in range(len(every)) if every.tokens(row)[0].tobytes() not in prompts]
    assert len(found) == sum(every.frame.policy[row] == base for row in kept) > 0
    assert set(found.frame.policy) == {base}
    refuses("asks no other problems", other_problems, tmp_path / "all.parquet", every, base)


def test_a_success_is_lone_among_other_responses() -> None:
    """One success of four, two of four, and a response that is alone in its group."""
    records = [*answers("run", {"hard": [1, 2]}), *answers("run", {"easy": [1]}, n=1)]
    rollouts = Rollouts.from_records([{**record, "step": 1} for record in records])
    kind, mask = sample_kinds(rollouts, ("lone success",), np.ones(9, dtype=bool))["lone success"]
    assert (kind, np.flatnonzero(mask).tolist()) == ("lone success", [0])
