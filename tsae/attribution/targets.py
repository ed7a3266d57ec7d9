"""What samples may have moved: numbers that are functions of the weights, with their gradients; and which are chosen.

Where the caller names none, `find_targets` takes outcomes by band, behaviours, a first token, and features that moved.
All are measured on fixed responses: to problems of the user's (`problems`), else to those of the log's first steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

import numpy as np
import torch
from einops import einsum, rearrange, reduce

from tsae.activations.forward_batches import pad
from tsae.attribution.config import AttributionConfig
from tsae.attribution.sample_gradients import Batch, TrainedWeights, log_probabilities, padded
from tsae.attribution.sample_kinds import UNBANDED, band_of
from tsae.base.filters import need_features
from tsae.checkpoints.hooks import PastLastSite, positions, rewritten
from tsae.errors import TsaeError, refuse
from tsae.rollouts.behaviours import behaviours_named
from tsae.rollouts.table import Rollouts
from tsae.sae.model import ForeignSAE, TemporalSAE


class Targets(Protocol):
    """Several numbers of a model."""

    @property
    def names(self) -> list[str]:
        """One a target."""

    def values(self, trained: TrainedWeights) -> np.ndarray:
        """(n,) of the model with its present weights."""

    def gradients(self, trained: TrainedWeights) -> torch.Tensor:
        """(n, P) with respect to the trained weights."""


class NextToken:
    """The probability that a response begins with a token, averaged over prompts of a group.

    A behaviour that shows in the first token is measured exactly so: a direct answer, a thinking tag.

    Args:
        prompts: token ids of each.
        groups: (n,) names; every group is a target.
        token: id.
        what: stands before the group's name.
    """

    def __init__(self, prompts: Sequence[np.ndarray], groups: Sequence[str], token: int, *, what: str) -> None:
        self.token, self.kinds = token, list(dict.fromkeys(groups))
        self.names = [f"{what} ({kind})" for kind in self.kinds]
        self.ids, self.mask = pad(prompts)
        one = torch.tensor([[group == kind for group in groups] for kind in self.kinds], dtype=torch.float32)
        self.mean = one / one.sum(1, keepdim=True)  # (n, prompts)

    def _values(self, trained: TrainedWeights, rows: slice | torch.Tensor = slice(None)) -> torch.Tensor:
        """(n,) of the prompts in these rows alone."""
        ids, mask = self.ids[rows].to(trained.device), self.mask[rows].to(trained.device)
        logits = trained.model(
            input_ids=ids, attention_mask=mask, position_ids=positions(mask), use_cache=False
        ).logits  # (prompts, T, vocabulary)
        last = logits[torch.arange(len(ids)), mask.sum(1) - 1]
        chance = torch.softmax(last.float(), dim=-1)[:, self.token]
        return self.mean[:, rows].to(chance.device) @ chance

    @torch.no_grad()
    def values(self, trained: TrainedWeights) -> np.ndarray:
        return np.asarray(self._values(trained).double().cpu().numpy())

    def gradients(self, trained: TrainedWeights) -> torch.Tensor:
        # A pass over the prompts of each group: together they cost no more than one over all.
        return torch.cat([_jacobian(trained, partial(self._value, trained, j)) for j in range(len(self.names))])

    def _value(self, trained: TrainedWeights, j: int) -> torch.Tensor:
        """(1,) of a target, from its own prompts."""
        return self._values(trained, self.mean[j].nonzero()[:, 0])[j, None]


class LogLikelihood:
    """Log-probability of a sampled token on fixed responses, of one kind against another of the same problems.

    The mean over problems of: mean over responses of the first kind − mean over those of the second, each the mean
    log-probability of its sampled tokens, in nats. It rises where the model comes to prefer the first kind. Problems
    without both kinds do not count.

    Args:
        fixed: the responses that every model reads.
        first: (n,) which are of the first kind, by the target's name.
        second: (n,) which are of the second.
        batch_tokens: tokens in a forward pass, with padding.
        temperature: of the sampling, by which logits are divided.

    Raises:
        TsaeError: where no problem has both kinds.
    """

    def __init__(
        self,
        fixed: Rollouts,
        first: Mapping[str, np.ndarray],
        second: Mapping[str, np.ndarray],
        *,
        batch_tokens: int = 4096,
        temperature: float = 1.0,
    ) -> None:
        self.fixed, self.batch_tokens, self.temperature = fixed, batch_tokens, temperature
        self.names = list(first)
        problem = np.unique(fixed.frame.problem_id, return_inverse=True)[1]
        self.weight = np.zeros((len(self.names), len(fixed)))
        for j, name in enumerate(self.names):
            sizes = [np.bincount(problem, weights=side[name], minlength=problem.max() + 1) for side in (first, second)]
            both = (sizes[0] > 0) & (sizes[1] > 0)
            if not both.any():
                raise TsaeError("no problem has responses of both kinds", where=name)
            for side, size, sign in ((first, sizes[0], 1), (second, sizes[1], -1)):
                rows = side[name] & both[problem]
                self.weight[j, rows] += sign / (size[problem[rows]] * both.sum())
        self.weight /= np.maximum(fixed.n_sampled, 1)

    def _batches(self, trained: TrainedWeights) -> Iterator[Batch]:
        rows = np.flatnonzero(np.abs(self.weight).sum(0))
        return padded(self.fixed, rows, self.batch_tokens, str(trained.device))

    def _sum(self, trained: TrainedWeights, batch: Batch) -> torch.Tensor:
        rows, ids, mask, response = batch
        n = ids.shape[1] - max(1, int(response.any(0).int().argmax()))  # Tokens from the first response's on.
        log = log_probabilities(trained.model, ids, mask, self.temperature, n)
        of_rows = (log * response[:, -n:]).sum(1)
        return torch.as_tensor(self.weight[:, rows], dtype=log.dtype, device=log.device) @ of_rows

    @torch.no_grad()
    def values(self, trained: TrainedWeights) -> np.ndarray:
        found = np.zeros(len(self.names))
        for batch in self._batches(trained):
            found += self._sum(trained, batch).double().cpu().numpy()
        return found

    def gradients(self, trained: TrainedWeights) -> torch.Tensor:
        return summed_gradients(trained, self._sum, self._batches(trained))


class FeatureMeans:
    """Mean activations of features on the response tokens of fixed trajectories, in which problems count alike.

    A code jumps at the SAE's threshold, and no derivative sees that: what a sample moves past the threshold would be
    nobody's share. So the jump is a sigmoid whose width is a share of the threshold; `each` can keep the jump.

    Args:
        sae: its site is where the features live.
        features: indices.
        fixed: the trajectories that every model reads.
        special: token ids that count nowhere.
        batch_tokens: tokens in a forward pass, with padding.
        width: of the sigmoid, as a share of the threshold.
    """

    def __init__(
        self,
        sae: TemporalSAE,
        features: Sequence[int],
        fixed: Rollouts,
        special: Sequence[int],
        *,
        batch_tokens: int = 8192,
        width: float = 0.05,
    ) -> None:
        need_features(features, sae.config.d_sae, "FeatureMeans")
        refuse(
            "FeatureMeans",
            (not len(features), "no feature is asked for", None),
            (
                isinstance(sae, ForeignSAE) and sae.config.architecture == "topk",
                "chooses the k largest latents of a token, and no derivative sees that choice",
                "Attribute with an SAE that has thresholds: a T-SAE, JumpReLU or BatchTopK.",
            ),
        )
        self.sae, self.features, self.fixed, self.special = sae, list(features), fixed, list(special)
        self.batch_tokens, self.width, self.names = batch_tokens, width, [f"feature {feature}" for feature in features]
        problem, size = np.unique(fixed.frame.problem_id, return_inverse=True, return_counts=True)[1:]
        self.weight = 1 / (size[problem] * len(size))

    def _padded(self, trained: TrainedWeights, rollouts: Rollouts) -> Iterator[Batch]:
        return padded(rollouts, np.arange(len(rollouts)), self.batch_tokens, str(trained.device))

    def _means(self, trained: TrainedWeights, batch: Batch, *, soft: bool) -> torch.Tensor:
        """(B, n_features) mean activation of every trajectory, differentiable if soft."""
        _, ids, mask, response = batch
        x = self._activations(trained, ids, mask).to(self.sae.W_enc.dtype)
        columns = torch.as_tensor(self.features, device=x.device)
        shifted, scale = self.sae.encoder_input(x)
        pre = shifted @ self.sae.W_enc[:, columns] + self.sae.b_enc[columns]
        threshold = self.sae.threshold.expand(self.sae.config.d_sae)[columns]
        # A latent without a threshold does not jump.
        gate = torch.sigmoid((pre - threshold) / (self.width * threshold.clamp_min(1e-12))) if soft else pre > threshold
        codes = torch.relu(pre) * torch.where(threshold > 0, gate, pre > threshold) * scale
        counted = response & ~torch.isin(ids, torch.as_tensor(self.special, device=ids.device))
        counted = counted & ~self.sae.outliers(x.detach())
        mean = einsum(codes, counted.to(codes.dtype), "b t f, b t -> b f")
        return mean / rearrange(reduce(counted, "b t -> b", "sum").clamp_min(1), "b -> b 1")

    def _sum(self, trained: TrainedWeights, batch: Batch) -> torch.Tensor:
        """(n_features,) summands of the means."""
        mean = self._means(trained, batch, soft=True)
        return torch.as_tensor(self.weight[batch[0]], dtype=mean.dtype, device=mean.device) @ mean

    def _activations(self, trained: TrainedWeights, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """(B, T, d_model) at the site; the blocks after it are not run."""
        found: list[torch.Tensor] = []

        def keep(value: torch.Tensor) -> torch.Tensor:
            found.append(value)
            raise PastLastSite

        with suppress(PastLastSite), rewritten(trained.model, self.sae.site, keep):
            trained.model(input_ids=ids, attention_mask=mask, position_ids=positions(mask), use_cache=False)
        return found[0]

    @torch.no_grad()
    def each(self, trained: TrainedWeights, rollouts: Rollouts, *, soft: bool = True) -> np.ndarray:
        """(n, n_features) mean on every trajectory, of any rollouts; not soft: of the SAE's own codes."""
        found = np.zeros((len(rollouts), len(self.names)))
        for batch in self._padded(trained, rollouts):
            found[batch[0]] = self._means(trained, batch, soft=soft).double().cpu().numpy()
        return found

    def values(self, trained: TrainedWeights) -> np.ndarray:
        return np.asarray(self.weight @ self.each(trained, self.fixed))

    def gradients(self, trained: TrainedWeights) -> torch.Tensor:
        return summed_gradients(trained, self._sum, self._padded(trained, self.fixed))


class Together:
    """The targets of several objects, one after another."""

    def __init__(self, *parts: Targets) -> None:
        self.parts = parts
        self.names = [name for part in parts for name in part.names]

    def values(self, trained: TrainedWeights) -> np.ndarray:
        return np.concatenate([part.values(trained) for part in self.parts])

    def gradients(self, trained: TrainedWeights) -> torch.Tensor:
        return torch.cat([part.gradients(trained) for part in self.parts])


def summed_gradients(
    trained: TrainedWeights,
    values: Callable[[TrainedWeights, Batch], torch.Tensor | Sequence[torch.Tensor]],
    batches: Iterator[Batch],
) -> torch.Tensor:
    """(n, P) of the sum of `values(trained, batch)` over batches."""
    each = (_jacobian(trained, partial(values, trained, batch)) for batch in batches)
    return sum(each, start=next(each))


def _jacobian(trained: TrainedWeights, values: Callable[[], torch.Tensor | Sequence[torch.Tensor]]) -> torch.Tensor:
    """(n, P) of `values()`, (n,), by a backward pass for each."""
    rows = []
    with trained.differentiable() as leaves:
        found = values()
        for i, value in enumerate(found):
            more = i + 1 < len(found)
            grads = torch.autograd.grad(value, list(leaves.values()), retain_graph=more, allow_unused=True)
            rows.append(trained.join({n: g for n, g in zip(leaves, grads, strict=True) if g is not None}))
    return torch.stack(rows)


_PER_PROBLEM = 8
"""Responses to a problem that are fixed, at most, half of them right where there are as many."""
_VECTORS = 6
"""Vectors of all trained weights that the sweep holds for a target."""
_FEWEST = 3
"""Responses of each kind that a comparison needs."""


def find_targets(
    trained: TrainedWeights,
    ends: tuple[torch.Tensor, torch.Tensor],
    rollouts: Rollouts,
    rows: np.ndarray,
    *,
    problems: Rollouts | None,
    sae: TemporalSAE | None,
    first_token: int | None,
    special: list[int],
    temperature: float,
    config: AttributionConfig,
    notes: list[str],
) -> Targets:
    """Find what to attribute.

    Args:
        trained: the model.
        ends: (P,) its first weights, and its last.
        rollouts: with behaviours, where the log has texts (`tsae.rollouts.behaviours.with_behaviours`).
        rows: of the rollouts, in the order of the training.
        problems: responses to other problems, over which targets are measured.
        sae: gives features.
        first_token: token id.
        special: token ids that count in no feature.
        temperature: of the sampling.
        config: which targets, and over how many trajectories.
        notes: says what was chosen, and what is missing.

    Raises:
        TsaeError: where there is nothing to attribute.
    """
    whose = rollouts if problems is None else problems
    fixed = _fixed(whose, rows if problems is None else np.arange(len(problems)), config)
    source = "that the run trained on" if problems is None else "that were given"
    notes.append(f"Targets are measured on {len(fixed)} responses to {fixed.n_problems} problems {source}.")
    parts: list[Targets] = []
    if first_token is not None:
        prompts = {fixed.frame.problem_id[row]: fixed.tokens(row)[0] for row in range(len(fixed))}
        parts.append(NextToken(list(prompts.values()), ["first token"] * len(prompts), first_token, what="P"))
    shows, lacks = _kinds(fixed, config, notes)
    most = max(1, int(config.memory_gb * 1e9 / (_VECTORS * 4 * len(trained))))
    if len(shows) > most:
        notes.append(f"{most} of {len(shows)} outcomes and behaviours are attributed: more do not fit --memory-gb.")
        shows, lacks = ({name: side[name] for name in list(shows)[:most]} for side in (shows, lacks))
    if shows:
        parts.append(LogLikelihood(fixed, shows, lacks, batch_tokens=config.batch_tokens, temperature=temperature))
    if sae is not None and "features" in config.targets:
        chosen = list(config.features) or _moved_most(trained, ends, sae, fixed, special, config)
        if len(chosen) > (left := max(most - len(shows), 0 if shows else 1)):
            notes.append(f"{left} of {len(chosen)} features are attributed: more do not fit --memory-gb.")
        if chosen := chosen[:left]:
            parts.append(FeatureMeans(sae, chosen, fixed, special, batch_tokens=config.batch_tokens))
    elif config.features:
        what = "features are asked for, and there is no SAE"
        raise TsaeError(what, where="attribute", fix="Give the SAE (sae=…, --sae).")
    if not parts:
        what = "nothing is there to attribute: " + (notes[-1] if len(notes) > 1 else "no target is asked for")
        fix = "Give an SAE (--sae), or the token that a behaviour begins with (--first-token)."
        raise TsaeError(what, where=rollouts.origin, fix=fix)
    return Together(*parts)


def _fixed(rollouts: Rollouts, rows: np.ndarray, config: AttributionConfig) -> Rollouts:
    """Some responses to each of some problems: of every band as many, first problems with right and wrong ones."""
    rng, frame = np.random.default_rng(config.seed), rollouts.frame
    bands, problem = band_of(rollouts)[rows], frame.problem_id.to_numpy()[rows]
    right, wrong = ((frame.outcome == what).to_numpy()[rows] for what in ("success", "failure"))
    names = list(dict.fromkeys(bands.tolist()))
    quota, chosen = -(-config.n_fixed // len(names)), []
    for band in names:
        mine = list(dict.fromkeys(problem[bands == band].tolist()))
        groups = [np.flatnonzero((problem == name) & (bands == band)) for name in mine]
        groups.sort(key=lambda some: not (right[some].any() and wrong[some].any()))
        n = 0
        for some in groups:
            if n >= quota:
                break
            kinds = [some[right[some]], some[~right[some]]]
            taken = np.concatenate([rng.permutation(kind)[: _PER_PROBLEM // 2] for kind in kinds])[: quota - n]
            chosen.append(rows[taken])
            n += len(taken)
    return rollouts.select(np.sort(np.concatenate(chosen)))


def _column(rollouts: Rollouts, name: str) -> np.ndarray:
    """(n,) 1 for a sample that shows it, 0 for one that does not, else NaN."""
    if name != "outcome":
        return np.asarray(rollouts.frame[name].to_numpy(dtype=float))
    outcome = rollouts.frame.outcome
    return np.where(outcome == "unknown", np.nan, (outcome == "success").astype(float))


def _kinds(
    fixed: Rollouts, config: AttributionConfig, notes: list[str]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Comparisons of responses by the target's name: (n,) those that show it, and those that do not."""
    wanted = ["outcome"] if "outcome" in config.targets else []
    if "behaviours" in config.targets:
        wanted += [name for name in behaviours_named(fixed) if name in fixed.frame.columns]
    shows: dict[str, np.ndarray] = {}
    lacks: dict[str, np.ndarray] = {}
    problem, bands = fixed.frame.problem_id.to_numpy(), band_of(fixed)
    every = np.ones(len(fixed), dtype=bool)
    for name in wanted:
        values = _column(fixed, name)
        known = np.isfinite(values)
        if not np.isin(values[known], (0, 1)).all():
            continue  # A degree, such as a length, does not divide responses into two kinds.
        label = "right − wrong" if name == "outcome" else f"log-likelihood, {name.replace('_', ' ')}"
        of_bands = {f"{label}, {band}": bands == band for band in dict.fromkeys(bands) if band not in (None, UNBANDED)}
        for title, mask in ({label: every} | (of_bands if name == "outcome" else {})).items():
            one, other = mask & (values == 1), mask & (values == 0)
            both = np.intersect1d(problem[one], problem[other])
            one, other = (side & np.isin(problem, both) for side in (one, other))
            if min(one.sum(), other.sum()) >= _FEWEST:
                shows[title], lacks[title] = one, other
            elif name == "outcome":
                band = title.removeprefix(label).removeprefix(", ")
                notes.append(
                    f"Too few {band + ' ' * bool(band)}problems have both right and wrong responses: no target of "
                    f"{'accuracy on them' if band else 'outcomes'}."
                )
    return shows, lacks


def _moved_most(
    trained: TrainedWeights,
    ends: tuple[torch.Tensor, torch.Tensor],
    sae: TemporalSAE,
    fixed: Rollouts,
    special: list[int],
    config: AttributionConfig,
) -> list[int]:
    """Features by the change of their means, in standard deviations over trajectories of the base."""
    every = FeatureMeans(sae, range(sae.config.d_sae), fixed, special, batch_tokens=config.batch_tokens)
    trained.put(ends[0])
    before = every.each(trained, fixed, soft=False)
    trained.put(ends[1])
    moved, deviation = every.each(trained, fixed, soft=False).mean(0) - before.mean(0), before.std(0)
    size = np.where((before > 0).mean(0) >= 0.05, np.abs(moved) / np.where(deviation > 0, deviation, 1.0), 0.0)
    chosen = [int(feature) for feature in np.argsort(-size, kind="stable")[: config.n_features] if size[feature] > 0]
    if not chosen:
        what = f"no feature of the SAE at {sae.site} fires on the fixed trajectories, or none moved"
        raise TsaeError(what, where="attribute", fix="Give the SAE of this model, or features by number.")
    return chosen
