"""What would have been without some samples: many trainings simulated in one pass over the run.

Each imagined training takes the optimiser's steps exactly, on the samples' gradients along the run's own path. On its
own path the samples are not its policy's: importance weights ρ make the logged samples stand for those that it would
have sampled (`again="on-policy"`), or the loss weighs and clips them (`"replayed"`). A sample's log-ratio is taken to
be linear in the weights, ⟨∇log π_i(θ_t), θ' − θ_t⟩, and is divided among its tokens in proportion to their squared
gradients in the logits. What is left out: that ∇log π itself, and the advantages, would have been others.

Nothing is stored: a step's gradients are computed once for all trainings, chunk by chunk. The state of every training
takes 12 bytes a weight.
"""

from __future__ import annotations

import numpy as np
import torch

from tsae.attribution.forward_passes import Chunk, Known, Rows, Run, every_log, rows_of, summands
from tsae.attribution.loss import Again
from tsae.attribution.path import Replayed, known_of
from tsae.attribution.shares import backward
from tsae.base.progress import progress_bar

_BYTES = 12


def fits(run: Run, n: int, memory: int) -> bool:
    """Whether n trainings can be simulated at once in so many bytes, with their gradients."""
    return n * len(run.trained) * (_BYTES + 8) <= memory


def simulate(path: Replayed, kept: np.ndarray, *, again: Again = "on-policy", progress: bool = True) -> torch.Tensor:
    """Simulate trainings on subsets of the samples.

    Args:
        path: of the run.
        kept: (K, n_trajectories) bool.
        again: whether the imagined trainings sample anew, or replay the log.
        progress: show a bar.

    Returns:
        (K, P) final weights.
    """
    run, device = path.run, path.run.trained.device
    states = [run.begin.copy() for _ in kept]
    mask = torch.as_tensor(kept, dtype=torch.float32, device=device)
    now = run.begin.copy()  # The run itself, taken along.
    for update in progress_bar("simulated trainings", "step", over=run.plan.updates, shown=progress):
        rows = np.concatenate(update.parts)
        weights = now.weights
        run.trained.put(weights)
        step, known = rows_of(run, update), known_of(path, rows)
        away = torch.stack([state.weights - weights for state in states])
        total = torch.zeros(len(kept) + 1, len(weights), device=device)
        for chunk, parts in backward(run, step, known, len(kept), both=run.settings.loss.needs_ref):
            n = len(chunk.rows)
            pulls, spread = _pulls(run, step, known, chunk)
            slopes = parts.products(away)  # (n, K), or (2 n, K): of the KL term too
            act = pulls != 0
            log_ratio = slopes[:n] / torch.where(act, pulls, 1.0)[:, None]
            factor = torch.ones(n, len(kept), device=device)
            for k in range(len(kept)):
                of_tokens = run.settings.loss.pull(log_ratio[:, k, None] * spread, (pulls < 0)[:, None], again)
                factor[act, k] = (of_tokens * spread).sum(1)[act]
            by = mask[:, chunk.rows].T * factor  # (n, K)
            both = torch.cat([by, mask[:, chunk.rows].T]) if len(slopes) > n else by
            both = torch.cat([both, torch.ones(len(both), 1, device=device)], dim=1)
            for k in range(both.shape[1]):
                total[k] += run.trained.join(parts.weighted_sum(both[:, k]))
        for state, gradient in zip([*states, now], total, strict=True):
            path.stepper.take(state, gradient)
    return torch.stack([state.weights for state in states])


def _pulls(run: Run, step: Rows, known: Known, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
    """(B,) what multiplies the gradient of a sample's log π in its gradient of the loss, and (B, S) how its
    log-ratio is spread over its tokens, which sums to 1."""
    with torch.no_grad():
        every = every_log(run, chunk)
        log = every.gather(-1, chunk.scored_ids[..., None])[..., 0]
        spread = (1 - 2 * log.exp() + (2 * every).exp().sum(-1)) * chunk.counted
        spread = spread / spread.sum(1, keepdim=True).clamp_min(1e-30)
    with torch.enable_grad():
        log = log.detach().requires_grad_()
        policy, _ = summands(run, step, known, chunk, log)
        pull = torch.autograd.grad(policy.sum(), log)[0]
    return (pull * spread).sum(1), spread
