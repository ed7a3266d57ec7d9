"""Influence: against finite differences in float64."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tsae
from support.builders import make_rollouts, random_sae, response_means, save_model
from support.refusals import refuses
from tsae import Checkpoint, InfluenceConfig, TsaeError
from tsae.attribution import influence as measure_influence

SITE = "blocks.1.hook_resid_post"
SPECIAL = [17, 18, 19]
some_sae = partial(random_sae, site=SITE, around=0.1, threshold=0.3)
"""About half of positive pre-activations pass."""


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Computes in the precision of its weights throughout; Llama's norms go through float32."""
    return Checkpoint("base", str(save_model(tmp_path_factory.mktemp("gpt2") / "model", "gpt2")))


@pytest.fixture(scope="module")
def samples(fingerprint: str) -> Any:
    """Twelve, those of the second problem all right: without advantage."""
    rollouts = make_rollouts(n_problems=4, tokenizer=fingerprint)
    reward = rollouts.frame.reward.to_numpy(copy=True)
    reward[3:6] = 1.0
    return rollouts.with_column("reward", reward).with_advantages()


@pytest.fixture(scope="module")
def fixed(fingerprint: str) -> Any:
    return make_rollouts(n_problems=3, n_samples=4, seed=5, tokenizer=fingerprint)


def log_probability(model: Any, rollouts: Any, row: int, temperature: float = 1.0) -> torch.Tensor:
    """Σ_t log π of one response, unpadded."""
    prompt, response = rollouts.tokens(row)
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
    log = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1] / temperature, -1)
    return log[torch.arange(len(prompt) - 1, ids.shape[1] - 1), ids[0, len(prompt) :]].sum()


def moved(model: Any, direction: list[torch.Tensor], by: float) -> None:
    with torch.no_grad():
        for p, d in zip(model.parameters(), direction, strict=True):
            p.add_(by * d)


@pytest.mark.parametrize(
    ("loss_type", "more"),
    [
        ("dapo", {"batch_tokens": 40}),
        pytest.param("grpo", {"temperature": 0.7}, marks=pytest.mark.slow),
        pytest.param("dr_grpo", {"max_completion_length": 20}, marks=pytest.mark.slow),
    ],
)
def test_every_entry_is_a_finite_difference(
    gpt2: Checkpoint, samples: Any, fixed: Any, loss_type: Any, more: dict[str, Any]
) -> None:
    sae, config = some_sae().double(), InfluenceConfig(model_dtype="float64", loss_type=loss_type, **more)
    features = [3, 0, 11]
    found = tsae.influence(gpt2, samples, sae, features, on=fixed, config=config, progress=False)
    model = gpt2.load_model(dtype="float64", attention="eager").requires_grad_(True)
    before = response_means(model, sae, fixed, SPECIAL)[:, features]
    logs = np.array([log_probability(model, fixed, r).item() for r in range(len(fixed))])
    lengths, n = samples.lengths("response_ids"), len(samples)
    scale = {"dapo": np.full(n, lengths.sum()), "grpo": n * lengths, "dr_grpo": np.full(n, n * 20)}[config.loss_type]
    advantages = samples.frame.advantage.to_numpy()
    assert (advantages == 0).any()
    step = 1e-5
    for row in range(n):
        loss = log_probability(model, samples, row, config.temperature) * (advantages[row] / scale[row])
        gradient = list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True))
        sides = []
        for sign in (step, -step):
            moved(model, gradient, sign)
            log = np.array([log_probability(model, fixed, r, config.temperature).item() for r in range(len(fixed))])
            sides.append((response_means(model, sae, fixed, SPECIAL)[:, features], log))
            moved(model, gradient, -sign)
        by_reading = (sides[0][0] - sides[1][0]).mean(0) / (2 * step)  # all problems have four responses
        d_log = (sides[0][1] - sides[1][1]) / (2 * step)
        # Leave-one-out: each response's value against the mean of the other three of its problem.
        values = before.reshape(3, 4, -1)
        others = (values.sum(1, keepdims=True) - values) / 3
        by_policy = ((values - others) * d_log.reshape(3, 4, 1)).mean((0, 1))
        mine = found.table[found.table.trajectory == row].set_index("feature").loc[features]
        np.testing.assert_allclose(mine.representation, by_reading, rtol=1e-5, atol=1e-9)
        np.testing.assert_allclose(mine.policy_part, by_policy, rtol=1e-5, atol=1e-9)
        np.testing.assert_allclose(mine.total, by_reading + by_policy, rtol=1e-5, atol=1e-9)
    assert found.table.representation.abs().max() > 1e-4
    assert found.table.policy_part.abs().max() > 1e-4
    assert np.isfinite(logs).all()
    for feature, mean in zip(features, before.mean(0), strict=True):
        assert found.info["means"][str(feature)] == pytest.approx(mean)


def test_sums_parts_and_files(gpt2: Checkpoint, samples: Any, tmp_path: Path) -> None:
    some_sae().save(tmp_path / "sae")
    both = tsae.influence(gpt2, samples, tmp_path / "sae", [1, 2], progress=False)
    np.testing.assert_allclose(
        both.by("outcome").groupby("feature").total.sum(), both.by().set_index("feature").total, rtol=1e-9
    )
    by_band = both.by("band")  # The samples have none, and are not dropped for that.
    assert by_band.n_samples.tolist() == [len(samples)] * 2
    top = both.top([1, 2], 3)
    largest = sorted(both.table.total.abs(), reverse=True)
    assert top.total.abs().tolist() == largest[:3]
    assert largest[0] > largest[3] > 0
    assert len(both.top(2)) == 10
    assert repr(both) == f"Influence({len(samples)} samples on 2 features of base)"
    again = tsae.Influence.load(both.save(tmp_path / "found"))
    np.testing.assert_array_equal(again.table.total, both.table.total)
    assert again.info == json.loads(json.dumps(both.info))
    for asked, said in ((lambda: both.top(7), "no feature 7; there are 1, 2"), (lambda: both.by("x"), "no column 'x'")):
        refuses(said, asked)


def test_influence_that_is_no_number_is_refused(
    gpt2: Checkpoint, samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pandas counts NaN as 0 in sums, so that a part of the samples would have no influence."""
    real = measure_influence._Reader.log_likelihoods

    def overflowing(*given: Any) -> torch.Tensor:
        return real(*given) * torch.inf

    monkeypatch.setattr(measure_influence._Reader, "log_likelihoods", overflowing)
    with pytest.raises(TsaeError, match=r"influence of trajectory \d+ on feature 3 is not finite"):
        tsae.influence(gpt2, samples, some_sae(), [3], progress=False)
    refuses("temperature=1e-40 must be at least", InfluenceConfig, temperature=1e-40)


def test_what_has_no_influence_is_refused(gpt2: Checkpoint, samples: Any, fingerprint: str) -> None:
    sae = some_sae()

    def refused(match: str, rollouts: Any = samples, features: Any = (1,), given: Any = sae, **more: Any) -> None:
        refuses(match, tsae.influence, gpt2, rollouts, given, features, progress=False, **more)

    some = make_rollouts(n_problems=4, tokenizer=fingerprint)
    refused("12 of 12 trajectories have no advantage", some)
    refused("all advantages are 0", some.with_column("advantage", [0.0] * 12))
    refused("no feature 24; there are 0 to 23", features=[1, 24])
    refused("one twice", features=[1, 1])
    refused("none, or one twice", features=[])
    refused("the SAE has d_model 8, the model 16", given=some_sae(8))
    refused("is not the one that the trajectories were tokenised with", make_rollouts(tokenizer="another"))
    refused("run sampled some of the fixed trajectories", on=make_rollouts(("base", "run"), tokenizer=fingerprint))
    refused("problems have one response", on=make_rollouts(n_samples=1, tokenizer=fingerprint))
    refuses("max_completion_length", InfluenceConfig, loss_type="dr_grpo")
