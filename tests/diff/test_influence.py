"""Influence: against finite differences in float64, and against steps of SGD that are really taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tsae
from support.builders import make_rollouts, save_model
from tsae import Checkpoint, InfluenceConfig, TsaeError
from tsae.checkpoints.hooks import HuggingFaceReader
from tsae.diff import influence as measure_influence

SITE = "blocks.1.hook_resid_post"
SPECIAL = [17, 18, 19]


def some_sae(d_model: int, seed: int = 0, d_sae: int = 24) -> tsae.TemporalSAE:
    """Random directions, a threshold that about half of their positive pre-activations pass."""
    sae = tsae.TemporalSAE(d_model, tsae.SAEConfig(d_sae=d_sae, k=4), site=SITE)
    generator = torch.Generator().manual_seed(seed)
    sae.initialize(0.1 * torch.randn(d_model, generator=generator), generator)
    sae.threshold.fill_(0.3)
    return sae


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


def feature_means(model: Any, sae: Any, rollouts: Any) -> np.ndarray:
    """(n_trajectories, d_sae) through the reader that capture uses."""
    found = []
    for row in range(len(rollouts)):
        prompt, response = rollouts.tokens(row)
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
        x = HuggingFaceReader(model, [SITE]).read(ids, torch.ones_like(ids))[SITE][0, len(prompt) :]
        counted = sae.encode(x)[torch.from_numpy(~np.isin(response, SPECIAL))]
        found.append(counted.sum(0).numpy() / max(1, len(counted)))
    return np.array(found)


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
    sae, config = some_sae(16).double(), InfluenceConfig(model_dtype="float64", loss_type=loss_type, **more)
    features = [3, 0, 11]
    found = tsae.influence(gpt2, samples, sae, features, on=fixed, config=config, progress=False)
    model = gpt2.load_model(dtype="float64", attention="eager").requires_grad_(True)
    before = feature_means(model, sae, fixed)[:, features]
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
            sides.append((feature_means(model, sae, fixed)[:, features], log))
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


@pytest.mark.slow
def test_steps_of_sgd_on_the_testbed_do_what_influence_predicts() -> None:
    """Summed over a batch of the testbed's base; the error vanishes with the learning rate, as of first order."""
    base = tsae.testbed.series().base
    sampling = tsae.SamplingConfig(n_samples=6, max_new_tokens=48, seed=3)
    problems = [p for p in tsae.testbed.eval_problems(64) if p.level == "medium"][:8]
    rollouts = tsae.sample(base, problems, sampling, verify=tsae.testbed.verify, progress=False).with_advantages()
    ids = list(dict.fromkeys(rollouts.frame.problem_id))
    batch, fixed = rollouts.where(problem_id=ids[:4]), rollouts.where(problem_id=ids[4:])
    sae = some_sae(96, d_sae=12)
    sae.threshold.zero_()  # Codes that reach 0 do not jump: of first order in what is read, too.
    features = list(range(12))
    sums = tsae.influence(base, batch, sae, features, on=fixed, progress=False).by().set_index("feature")
    assert sums.n_samples.eq(len(batch)).all()
    model = base.load_model(dtype="float32")
    before = feature_means(model, sae, fixed)
    log_before = np.array([log_probability(model, fixed, r).item() for r in range(len(fixed))])
    n_tokens, errors = batch.lengths("response_ids").sum(), []
    centred = (before.reshape(4, 6, -1) - before.reshape(4, 6, -1).mean(1, keepdims=True)).reshape(24, -1) * 6 / 5
    for lr in (1e-3, 1e-2, 1e-1):
        model = base.load_model(dtype="float32").requires_grad_(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        for row, advantage in enumerate(batch.frame.advantage):
            (-advantage / n_tokens * log_probability(model, batch, row)).backward()
        optimizer.step()
        model.requires_grad_(False)
        after = feature_means(model, sae, fixed)
        ratio = np.exp([log_probability(model, fixed, r).item() for r in range(len(fixed))] - log_before)[:, None]
        representation, policy = (after - before).mean(0), ((ratio - 1) * centred).mean(0)
        total = (ratio * (after - before)).mean(0) + policy
        measured = {"representation": representation, "policy_part": policy, "total": total}
        if lr < 0.1:
            for part, change in measured.items():
                assert np.corrcoef(lr * sums[part], change)[0, 1] >= 0.95, (lr, part)
        errors.append(np.linalg.norm(total / lr - sums.total) / np.linalg.norm(sums.total))
    assert errors[0] < 0.05
    assert errors[0] < errors[1] < errors[2]


def test_sums_parts_and_files(gpt2: Checkpoint, samples: Any, tmp_path: Path) -> None:
    only = InfluenceConfig(parts=("representation",))
    some_sae(16).save(tmp_path / "sae")
    both = tsae.influence(gpt2, samples, tmp_path / "sae", [1, 2], progress=False)
    reading = tsae.influence(gpt2, samples, tmp_path / "sae", [1, 2], config=only, progress=False)
    np.testing.assert_allclose(reading.table.total, both.table.representation, atol=1e-8)
    assert (reading.table.policy_part == 0).all()
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
    for asked, said in ((lambda: both.top(7), "feature 7 was not asked for"), (lambda: both.by("x"), "no column 'x'")):
        with pytest.raises(TsaeError, match=said):
            asked()


def test_influence_that_is_no_number_is_refused(
    gpt2: Checkpoint, samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pandas counts NaN as 0 in sums, so that a part of the samples would have no influence."""
    real = measure_influence.Forward.score_along

    def overflowing(*given: Any) -> torch.Tensor:
        return real(*given) * torch.inf

    monkeypatch.setattr(measure_influence.Forward, "score_along", overflowing)
    with pytest.raises(TsaeError, match=r"influence of trajectory \d+ on feature 3 is not finite"):
        tsae.influence(gpt2, samples, some_sae(16), [3], progress=False)
    with pytest.raises(TsaeError, match="temperature=1e-40 must be at least"):
        InfluenceConfig(temperature=1e-40)


def test_what_has_no_influence_is_refused(gpt2: Checkpoint, samples: Any, fingerprint: str) -> None:
    sae = some_sae(16)

    def refused(match: str, rollouts: Any = samples, features: Any = (1,), given: Any = sae, **more: Any) -> None:
        with pytest.raises(TsaeError, match=match):
            tsae.influence(gpt2, rollouts, given, features, progress=False, **more)

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
    for setting, said in (({"loss_type": "dr_grpo"}, "max_completion_length"), ({"parts": ()}, "parts")):
        with pytest.raises(TsaeError, match=said):
            InfluenceConfig(**setting)
