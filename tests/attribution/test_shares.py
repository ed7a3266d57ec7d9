"""Shares: against gradients of single samples and an optimiser that is unrolled by hand, along real trainings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.grpo_loop import CASES, GrpoLoop, replay_of, run_of
from support.refusals import refuses
from tsae.attribution.path import Replayed
from tsae.attribution.shares import Shares, shares, token_shares
from tsae.attribution.targets import NextToken, Together
from tsae.rollouts.table import Rollouts

EVERY = 100
"""Points: all steps."""
Trainer = Callable[..., GrpoLoop]


def targets(log: Rollouts) -> NextToken:
    prompts = [log.tokens(row)[0] for row in range(0, len(log), 4)]
    return NextToken(prompts, ["one", "two"] * (len(prompts) // 2), token=int(log.tokens(0)[1][0]), what="begins")


def by_hand(loop: GrpoLoop, path: Replayed) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(n, 2, 2) shares of policy and KL terms by target, in the order of the updates; (2,) of weight decay; and (2,)
    slopes times steps."""
    o, of, trained = loop.settings.optimiser, targets(loop.log), path.run.trained
    decays = torch.cat([torch.full((size,), d) for size, d in zip(trained.sizes, path.stepper.decays, strict=True)])
    slopes, single, clipped, extra = [], [], [], []
    for weights in loop.weights:
        trained.put(weights)
        slopes.append(of.gradients(trained).double())
    for step, generation, parts, _ in loop.updates():
        loop.put(loop.weights[step - 1])
        found = loop.summands(generation, parts, loop.old, loop.ref)
        terms = [[one.sum() for one in found.get(row, (0 * loop.leaves[0],) * 2)] for part in parts for row in part]
        grads = [
            [loop.vector(torch.autograd.grad(t, loop.leaves, retain_graph=True, allow_unused=True)) for t in both]
            for both in terms
        ]
        single.append(torch.stack([torch.stack(both) for both in grads]).double())  # (n, 2, P)
        norm = float(single[-1].sum((0, 1)).norm())
        clipped.append(min(1.0, (o.max_grad_norm or np.inf) / (norm + 1e-6)))
        pulled = o.weight_decay * loop.weights[step - 1].double() * decays
        extra.append(pulled if o.name != "adamw" else 0 * pulled)
    whole = [c * g.sum((0, 1)) + pulled for c, g, pulled in zip(clipped, single, extra, strict=True)]
    n = len(whole)
    middle = [(slopes[t] + slopes[t + 1]) / 2 for t in range(n)]  # (2, P)
    decay = torch.zeros(2).double()
    of_steps = [torch.zeros(len(g), 2, 2).double() for g in single]
    for t in range(n):
        rate = o.rate(t + 1)
        if o.name == "adamw":
            decay -= rate * o.weight_decay * middle[t] @ (loop.weights[t].double() * decays)
        second = sum((1 - o.betas[1]) * o.betas[1] ** (t - s) * whole[s] ** 2 for s in range(t + 1))
        for s in range(t + 1):
            if o.name == "sgd":
                by = torch.full_like(whole[s], rate * o.momentum ** (t - s))
            else:
                root = (second / (1 - o.betas[1] ** (t + 1))).sqrt() + o.eps
                by = rate * (1 - o.betas[0]) * o.betas[0] ** (t - s) / (1 - o.betas[0] ** (t + 1)) / root
            of_steps[s] -= torch.einsum("jp,nkp->nkj", middle[t] * by, clipped[s] * single[s])
            decay -= middle[t] @ (by * extra[s])
    moved = [(b.double() - a.double()) for a, b in zip(loop.weights, loop.weights[1:], strict=False)]
    predicted = sum(m @ step for m, step in zip(middle, moved, strict=True))
    return torch.cat(of_steps).numpy(), decay.numpy(), predicted.numpy()


def near(found: np.ndarray, expected: np.ndarray, of: np.ndarray | None = None) -> None:
    """To 1e-5 of the largest."""
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected if of is None else of).max()


@pytest.mark.parametrize("case", CASES)
def test_shares_are_those_by_hand(case: str, trained: Trainer, tmp_path: Path) -> None:
    """With momentum, clipping, weight decay, schedules; policy and KL parts apart; tied embeddings; ratios of whole
    responses; and they add up."""
    loop = trained(case)
    path = replay_of(run_of(loop), tmp_path)
    found = shares(path, targets(loop.log), points=EVERY, progress=False)
    expected, decay, predicted = by_hand(loop, path)
    near(found.policy, expected[:, 0])
    if loop.settings.loss.beta:
        near(found.kl, expected[:, 1])
    assert loop.settings.loss.beta or not found.kl.any()
    rows = [row for _, _, parts, _ in loop.updates() for part in parts for row in part]
    assert found.rows.tolist() == rows
    assert found.steps.tolist() == [step for step, _, parts, _ in loop.updates() for part in parts for _ in part]
    np.testing.assert_allclose(found.decay, decay, rtol=1e-4, atol=1e-9)
    assert found.decay.any() == (loop.settings.optimiser.weight_decay > 0)
    assert np.abs(predicted).min() > 1e-5
    near(found.predicted, predicted)
    near(found.shares.sum(0) + found.decay, predicted, of=found.shares)
    assert (np.abs(found.remainder) < 0.05 * np.abs(found.realised)).all()


@pytest.mark.slow(ci=True)
def test_memory_changes_no_share(trained: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of few tokens; steps that are taken again. Targets that are differentiated at few points add up, too."""
    loop = trained("KL")
    some = 8 * len(loop.weights[0]) * 8 - 1

    def found(*, batch_tokens: int = 4096, budget: int = 10**9) -> Shares:
        path = replay_of(run_of(loop, batch_tokens=batch_tokens), tmp_path, budget=budget)
        return shares(path, targets(loop.log), points=EVERY, progress=False)

    few = found(budget=some)
    near(few.shares.sum(0) + few.decay, few.predicted, of=few.shares)
    monkeypatch.setattr("tsae.attribution.shares._points", lambda *_: [0, 4, 8])
    same = found()
    np.testing.assert_allclose(few.shares, same.shares, rtol=0, atol=1e-6 * np.abs(same.shares).max())
    near(found(batch_tokens=30).shares, same.shares)


@pytest.mark.parametrize("case", ["KL", "sequence", "Adam"])
def test_tokens_have_the_share_of_their_gradients(case: str, trained: Trainer, tmp_path: Path) -> None:
    """They add up to their sample's; and each is that of its own summand, where a summand is its token's alone."""
    loop = trained(case)
    path, seen = replay_of(run_of(loop), tmp_path), []

    class Look:
        def begin(self, *_: object) -> None: ...

        def __call__(self, step: int, directions: torch.Tensor, those: Any, known: Any, found: np.ndarray) -> None:
            of = token_shares(path.run, those, known, those.rows, directions[1])
            seen.append((step, directions[1], those.rows, of, found[:, 1]))

    shares(path, targets(loop.log), seen=Look(), progress=False)
    largest = max(np.abs(found).max() for *_, found in seen)
    for _, _, rows, of, found in seen:
        sums = np.array([of[row].sum() for row in rows])
        assert np.abs(sums - found).max() < 1e-5 * largest
    step, direction, rows, of, _ = seen[0]
    generation, parts = next((g, p) for s, g, p, _ in loop.updates() if s == step)
    loop.put(loop.weights[step - 1])
    terms = loop.summands(generation, parts, loop.old, loop.ref)
    for row in [row for row in rows.tolist() if row in terms][:3]:
        leaves = loop.leaves
        single = [torch.autograd.grad(t, leaves, retain_graph=True, allow_unused=True) for t in sum(terms[row])]
        expected = np.array([float(loop.vector(one) @ direction) for one in single])
        if loop.settings.loss.level == "token":
            np.testing.assert_allclose(of[row], expected, atol=1e-5 * largest)
        else:  # the ratio has a part of every token
            assert of[row].sum() == pytest.approx(expected.sum(), abs=1e-5 * largest)


def test_shares_that_are_not_finite_are_no_shares(trained: Trainer, tmp_path: Path) -> None:
    loop = trained("SGD")
    path = replay_of(run_of(loop), tmp_path)
    prompts = [loop.log.tokens(0)[0]]
    twice = Together(*(NextToken(prompts, ["all"], token, what="P") for token in (5, 6)))
    refuses("two targets are named 'P", shares, path, twice, progress=False)
    path.clips[2] = float("nan")
    refuses("shares of samples are not finite", lambda: shares(path, targets(loop.log), progress=False))
