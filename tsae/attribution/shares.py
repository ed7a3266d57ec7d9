"""Shares: what happened to a target, split over the samples that made it happen.

Along the path the target changes by Σ_t ∇F · u_t, with u_t the optimiser's steps, and each step is a sum over the
gradients of this batch and of those before it (`tsae.attribution.settings`). In one sweep backwards,

    a_t = β₁ a_{t+1} + D_t ∘ ½(∇F(θ_{t−1}) + ∇F(θ_t))        D_t = lr_t (1 − β₁) / ((1 − β₁ᵗ)(√v̂_t + ε))
    share(i, t) = −c_t ⟨a_t, g_ti⟩

c_t is the factor of clipping, g_ti the sample's part of the gradient of the loss. Gradients are computed again, chunk
by chunk; their products with all targets are taken, and they are let go. Shares of all samples, and what weight decay
did, sum up to the change. What is left is `remainder`: the line between two points at which targets are differentiated,
and restarts at checkpoints.

A GRPO loss has a summand for every token, so a sample's share is a sum over tokens: −c_t · ∂loss/∂log π_t · D_{a_t} log
π_t, with ∂loss/∂log π_t holding ratio, clipping and KL (of a ratio of whole responses every token's part of it). One
forward differentiation along a_t gives all tokens of a sample.

What would have been without some samples: many trainings are simulated in one pass over the run (`simulate`).

Each imagined training takes the optimiser's steps exactly, on the samples' gradients along the run's own path. On its
own path the samples are not its policy's: importance weights ρ make the logged samples stand for those that it would
have sampled (`again="on-policy"`), or the loss weighs and clips them (`"replayed"`). A sample's log-ratio is taken to
be linear in the weights, ⟨∇log π_i(θ_t), θ' − θ_t⟩, and is divided among its tokens in proportion to their squared
gradients in the logits. What is left out: that ∇log π itself, and the advantages, would have been others.

Nothing is stored: a step's gradients are computed once for all trainings, chunk by chunk. The state of every training
takes 12 bytes a weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pandas as pd
import torch

from tsae.attribution.config import AttributionConfig
from tsae.attribution.forward_passes import (
    Chunk,
    Known,
    Rows,
    Run,
    chunks,
    chunks_of,
    entropies_of,
    every_log,
    forward,
    inputs_of,
    log_softmax,
    rows_of,
    summands,
)
from tsae.attribution.loss import Again
from tsae.attribution.path import Replayed, known_of, steps_back
from tsae.attribution.sample_gradients import BatchGradients, slopes_along
from tsae.attribution.sample_kinds import band_of
from tsae.attribution.targets import Targets
from tsae.base.progress import progress_bar
from tsae.checkpoints.tokenizers import text_of
from tsae.errors import TsaeError
from tsae.rollouts.rewards import group_names

_FIFTHS = 5
_BYTES = 12
"""Of the state of a simulated training, per weight."""
POINTS = 20
"""Weights along the path at which targets are differentiated, about. More gain little: r .999 against every step."""


@dataclass(frozen=True)
class Shares:
    """What samples did; rows in the order of the training. A row that several steps used comes several times."""

    targets: list[str]
    rows: np.ndarray
    """(n,) of the rollouts."""
    steps: np.ndarray
    """(n,)."""
    policy: np.ndarray
    """(n, n_targets) by the loss's policy term."""
    kl: np.ndarray
    """(n, n_targets) by its KL term."""
    decay: np.ndarray
    """(n_targets,) by weight decay."""
    before: np.ndarray
    """(n_targets,) values at the first weights, and `after` at the last."""
    after: np.ndarray
    predicted: np.ndarray
    """(n_targets,) Σ_t of middle slopes times steps."""

    @property
    def shares(self) -> np.ndarray:
        """(n, n_targets)."""
        return np.asarray(self.policy + self.kl)

    @property
    def realised(self) -> np.ndarray:
        """(n_targets,)."""
        return np.asarray(self.after - self.before)

    @property
    def remainder(self) -> np.ndarray:
        """(n_targets,) what samples and weight decay leave of the change."""
        return np.asarray(self.realised - self.shares.sum(0) - self.decay)


def shares(
    path: Replayed, targets: Targets, *, points: int = POINTS, seen: TokenShares | None = None, progress: bool = True
) -> Shares:
    """Split the changes of targets over samples.

    Args:
        path: of the run.
        targets: whose changes are split.
        points: how often they are differentiated; as many as steps and more: at every step.
        seen: is given the directions of every step.
        progress: show a bar.

    Raises:
        TsaeError: where two targets have one name, or shares are not finite.
    """
    if len(set(targets.names)) < len(targets.names):
        twice = next(name for name in targets.names if targets.names.count(name) > 1)
        raise TsaeError(f"two targets are named {twice!r}", where="shares", fix="Give each a name of its own.")
    run, n, last = path.run, len(targets.names), path.run.last
    trained, stepper = run.trained, path.stepper
    at = _points(path, points)
    get, ahead = steps_back(path), torch.zeros(n, len(trained), device=trained.device)
    decay, predicted, later = np.zeros(n), np.zeros(n), path.end
    rows: list[np.ndarray] = []
    steps: list[np.ndarray] = []
    found: list[tuple[np.ndarray, np.ndarray]] = []
    trained.put(run.begin.weights)
    before = targets.values(trained)
    trained.put(path.end)
    after, upper = targets.values(trained), targets.gradients(trained).float()
    lower, low, high = upper, last, last
    if seen is not None:
        seen.begin(before, after)
    with progress_bar("shares", "step", len(run.plan.updates), shown=progress) as bar:
        for step in range(last, run.begin.step, -1):
            stepped, those, known = get(step)
            if step - 1 < low:  # The next point at which targets are differentiated lies before.
                high, upper, low = low, lower, max(point for point in at if point < step)
                trained.put(_weights(path, low))
                lower = targets.gradients(trained).float()
                trained.put(stepped.before)
            middle = torch.lerp(lower, upper, (step - 0.5 - low) / (high - low))
            predicted += (middle @ (later - stepped.before)).double().cpu().numpy()
            later = stepped.before
            shrunk = stepper.decay_of(stepped.before, step)
            decay += (middle @ shrunk).double().cpu().numpy()
            ahead = ahead * stepper.carried + middle * stepped.scale
            if (pulled := stepper.optimiser.weight_decay) and stepper.optimiser.name != "adamw":
                decay -= pulled * (ahead @ stepper.decaying(stepped.before)).double().cpu().numpy()
            directions = -path.clips[step] * ahead
            found.append(products(run, those, known, directions))
            if seen is not None:
                seen(step, directions, those, known, found[-1][0] + found[-1][1])
            rows.append(those.rows)
            steps.append(np.full(len(those.rows), step))
            bar.update()
    policy, kl = (np.concatenate(part[::-1]) for part in zip(*found, strict=True))
    if not (np.isfinite(policy).all() and np.isfinite(kl).all() and np.isfinite(decay).all()):
        fix = "Look at the settings of the training, and at its log for advantages that are not finite."
        raise TsaeError("shares of samples are not finite", where="shares", fix=fix)
    return Shares(
        targets.names,
        np.concatenate(rows[::-1]),
        np.concatenate(steps[::-1]),
        policy,
        kl,
        decay,
        before,
        after,
        predicted,
    )


def _points(path: Replayed, wanted: int) -> list[int]:
    """Steps after which weights are at hand, about as many as wanted, the first and the last among them."""
    first, last = path.run.begin.step, path.run.last
    there = sorted(path.starts) or list(range(first, last))
    every = [there[i] for i in sorted({round(x) for x in np.linspace(0, len(there) - 1, min(wanted, len(there)))})]
    return sorted({first, *every, last})


def _weights(path: Replayed, after: int) -> torch.Tensor:
    """(P,) weights after a step, which is one of `_points`."""
    device = path.run.trained.device
    if path.starts:
        return path.states.kept(after, 0, device).weights
    return path.states.get(after + 1, device).before


def products(run: Run, step: Rows, known: Known, directions: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Inner products of the samples' gradients of the loss with directions, at the weights that the model has.

    Args:
        run: has the rows.
        step: of them.
        known: their log-probabilities.
        directions: (k, P).

    Returns:
        (n, k) of the policy term and of the KL term, in the order of the step's rows.
    """
    place = {row: i for i, row in enumerate(step.rows.tolist())}
    both = run.settings.loss.needs_ref
    found = np.zeros((2, len(step.rows), len(directions)))
    for chunk, parts in backward(run, step, known, len(directions), both=both):
        of = parts.products(directions).double().cpu().numpy()
        at = [place[row] for row in chunk.rows.tolist()]
        found[0, at] = of[: len(at)]
        if both:
            found[1, at] = of[len(at) :]
    return found[0], found[1]


def backward(
    run: Run, step: Rows, known: Known, n_directions: int, *, both: bool
) -> Iterator[tuple[Chunk, BatchGradients]]:
    """Chunks of a step's rows with the gradients of their samples: of the policy term, then of the KL term."""
    for chunk in chunks_of(run, step):
        parts = BatchGradients(run.trained, n_directions=n_directions, alone=True)
        with torch.enable_grad(), parts.micro_batch(len(chunk.rows)):
            policy, kl = summands(run, step, known, chunk, forward(run, chunk))
            policy.sum().backward(retain_graph=both)
            if both:
                parts.next_term()
                kl.sum().backward()
        yield chunk, parts


def token_shares(
    run: Run, step: Rows, known: Known, rows: np.ndarray, direction: torch.Tensor
) -> dict[int, np.ndarray]:
    """(T,) share of every token of some responses; 0 for tokens that the policy did not sample.

    Args:
        run: has the rows; its model has the weights before the step.
        step: that used them.
        known: their log-probabilities.
        rows: of the rollouts.
        direction: (P,) of the target in this step, −c_t a_t.
    """
    trained, generation = run.trained, run.plan.generations[step.update.generation]
    found = {}
    for chunk in chunks(run, rows, generation):
        log, slope = slopes_along(trained, direction, partial(_log, run, chunk))
        leaf = log.detach().requires_grad_()
        with torch.enable_grad():
            policy, kl = summands(run, step, known, chunk, leaf)
            pull = torch.autograd.grad((policy + kl).sum(), leaf)[0]
        of_tokens = (pull * slope).double()
        for row, of_sampled in chunk.by_row(of_tokens).items():
            sampled = run.rollouts.sampled(row)
            found[row] = np.zeros(len(sampled))
            found[row][sampled] = of_sampled.numpy()
    return found


def _log(run: Run, chunk: Chunk, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = torch.func.functional_call(run.trained.model, weights, kwargs=inputs_of(run, chunk)).logits
    return log_softmax(run, chunk, logits).gather(-1, chunk.scored_ids[..., None])[..., 0]


@dataclass
class TokenShares:
    """Computes the shares of tokens in one target, while shares of samples are computed.

    It does so for the samples with the largest shares, and for prompt groups at random, with the policy's entropy.
    """

    run: Run
    targets: Targets
    config: AttributionConfig
    strings: list[str]
    best: dict[int, tuple[float, int, np.ndarray]] = field(default_factory=dict)
    """(share, step, (T,) shares of its tokens) by row."""
    drawn: list[pd.DataFrame] = field(default_factory=list)
    main: int = 0
    """Which target: the behaviour or outcome that moved most for its size."""
    chosen: set[int] = field(default_factory=set)
    """Rows whose tokens are looked at."""

    def begin(self, before: np.ndarray, after: np.ndarray) -> None:
        """Choose the target, from all values at the ends."""
        size = np.abs(after - before) / np.maximum(np.maximum(np.abs(before), np.abs(after)), 1e-30)
        # Accuracy on one band only where there is none on all.
        bands = ", " if "right − wrong" in self.targets.names else "no band"
        likely = [not name.startswith(("feature ", f"right − wrong{bands}")) for name in self.targets.names]
        self.main = int(np.argmax(np.where(likely, size, size * 1e-6)))
        # Whole prompt groups: within a group large shares cancel.
        names = group_names(self.run.rollouts.frame)
        groups = [
            generation[names[generation] == name]
            for generation in self.run.plan.generations
            for name in np.unique(names[generation])
        ]
        for i in np.random.default_rng(self.config.seed).permutation(len(groups)):
            if len(self.chosen) + len(groups[i]) <= self.config.tokens_of:
                self.chosen |= set(groups[i].tolist())

    def __call__(self, step: int, directions: torch.Tensor, those: Rows, known: Known, found: np.ndarray) -> None:
        values = found[:, self.main]
        least = min((abs(share) for share, _, _ in self.best.values()), default=0.0)
        order = np.argsort(-np.abs(values))[: self.config.shown]
        large = [int(those.rows[i]) for i in order if len(self.best) < self.config.shown or abs(values[i]) > least]
        random = [row for row in those.rows.tolist() if row in self.chosen]
        share = dict(zip(those.rows.tolist(), values.tolist(), strict=True))
        rows = np.array(sorted(row for row in {*large, *random} if share[row] != 0), dtype=int)
        if not len(rows):
            return
        of_tokens = token_shares(self.run, those, known, rows, directions[self.main])
        for row in large:
            if row in of_tokens and abs(share[row]) > abs(self.best.get(row, (0.0,))[0]):
                self.best[row] = (share[row], step, of_tokens[row])
        keep = sorted(self.best, key=lambda row: -abs(self.best[row][0]))[: self.config.shown]
        self.best = {row: self.best[row] for row in keep}
        some = np.array([row for row in random if row in of_tokens], dtype=int)
        bands = band_of(self.run.rollouts)
        generation = self.run.plan.generations[those.update.generation]
        for row, entropy in entropies_of(self.run, some, generation).items() if len(some) else ():
            shares = of_tokens[row][self.run.rollouts.sampled(row)]
            self.drawn.append(pd.DataFrame({"band": bands[row], "entropy": entropy.double(), "share": shares}))

    def entropy_table(self, split: Shares) -> pd.DataFrame:
        """Shares by band and fifth of the entropy, of the samples that were drawn, brought to all samples."""
        columns = ["band", "fifth", "target", "share"]
        if not self.drawn:
            return pd.DataFrame(columns=columns)
        every = pd.concat(self.drawn, ignore_index=True)
        rank = every.entropy.rank(method="first") - 1
        every["fifth"] = (rank * _FIFTHS // len(every)).astype(int) + 1
        every["band"] = every.band.fillna("all")
        table = every.groupby(["band", "fifth"], as_index=False).share.sum()
        bands = pd.Series(band_of(self.run.rollouts), dtype=object).fillna("all")
        there, drawn = (bands[list(rows)].value_counts() for rows in (np.unique(split.rows), self.chosen))
        scale = table.band.map(there / drawn)
        return table.assign(target=split.targets[self.main], share=table.share * scale)[columns]

    def token_table(self) -> pd.DataFrame:
        names = ["trajectory", "step", "target", "position", "token_id", "token", "share"]
        target = self.targets.names[self.main]
        lines = [
            (row, step, target, place, int(token), text_of(self.strings, int(token)), share)
            for row, (_, step, of_tokens) in self.best.items()
            for place, (token, share) in enumerate(zip(self.run.rollouts.tokens(row)[1], of_tokens, strict=True))
        ]
        return pd.DataFrame(lines, columns=names)


def fits(run: Run, n: int, memory: int) -> bool:
    """Whether n trainings can be simulated at once in so many bytes, with their gradients."""
    return n * len(run.trained) * (_BYTES + 8) <= memory


def simulate(path: Replayed, kept: np.ndarray, *, again: Again = "on-policy", progress: bool) -> torch.Tensor:
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
