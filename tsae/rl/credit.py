"""Credit: a score for every response token, read from the features of a reference checkpoint.

f_t are the SAE's codes where the reference has read token t. Token x_t was chosen in the state f_{t−1}.

    action    c_t = Q(f_{t−1}, x_t) − V(f_{t−1})
    value     c_t = V(f_t) − V(f_{t−1})
    effects   c_t = Σ_j β_j (f_tj − m_j) / σ_j

    Q(f, x) = Σ_j f_j A_jx + b_x,     V(f) = Σ_j f_j v_j + v_0

A, b, v and v_0 come from ridge regressions of y_i − ȳ_problem on all tokens of trajectory i: its success (1 or 0) minus
the mean over its problem. They say what a state, or a token in a state, promises beyond what the problem does. β_j is
the within-problem outcome effect of a feature, in standard deviations of its trajectory means. It is shrunk towards 0
(empirical Bayes with a normal prior), and 0 where its q-value is not small. Scores are divided by their standard
deviation over the tokens learned from.

Advantages are moved, in `tsae.rl.trl` and in the export (`tsae.rl.exporting`) alike, by

    (1 − p_t) c_t,     p_t the reference's probability of the token x_t, at temperature 1

A token's advantage over its state is Q(x) − Σ p Q. Where the reference sees no alternative, there is nothing to credit
or blame. Without this factor, marks that end long responses are blamed for what came before, and responses stop ending
(docs/remedies.md). The tables are learned and judged on c.

The tables are learned on rollouts of the *reference*, on problems that it can solve (`CreditConfig.pass_rates`), and
judged on other such problems. The reference then reads what the trained policy writes. So neither a lucky guess on a
hard problem nor a moving policy can redefine what is good. The same tables give two controls: `shuffled`, in which
features exchange their entries, and a strength of 0, which is uniform. `tsae.rl.credit_fitting` learns the tables.

A score says what goes with success, not what causes it: nothing here is causally tested.

**From token scores to the advantages of a policy-gradient step.** A_i is the group's advantage of trajectory i. z_it
are the scores of its n_i tokens times 1 − the reference's probability of the token (`Credit.token_credit`). c_it is
what the threshold θ leaves of them: c = sign(z) max(|z| − θ, 0). Most tokens have small scores. Their differences mean
little, but there are many of them, and on problems beyond the reference's reach they are biased.

1. *Token weights*, of mean 1 over a trajectory: credit moves within it and neither grows nor shrinks.

       u_it = exp(clip(s_i κ c_it, −ln B, ln B)),   w_it = n_i u_it / Σ_t u_it,   s_i = sign A_i

   Better tokens of a success get the credit, worse tokens of a failure the blame; 1/B² <= w <= B².

2. *Plausibility* of a success: p_i = Π_t (1 − clip(−c_it / τ, 0, 1)). It is 1 without doubtful tokens and 0 if one
   token scores −τ. Successes earn A_i p_i. Failures of the group are scaled by Σ A p / Σ A over its successes, so that
   its advantages still add up to 0. Scaling successes alone would push every trajectory down.

3. *Dense* reward: λ c_it is added. It needs no success in the group. Unlike the weights, it can change what is optimal.

    A'_it = w_it · A'_i + λ c_it,     A'_i = A_i, or with plausibility as under 2

Groups that agree have A_i = 0, which leaves the dense term alone.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tsae.base.artefact import Kind, read_artefact, write_artefact
from tsae.base.files import as_path, reading
from tsae.base.tensors import write_tensors
from tsae.checkpoints.hooks import HuggingFaceReader
from tsae.checkpoints.loading import Checkpoint
from tsae.errors import TsaeError
from tsae.features.feature_table import FeatureTable
from tsae.rl.config import CreditConfig, ShapingConfig


@dataclass(frozen=True)
class Credit:
    """The tables of one estimator."""

    config: CreditConfig
    feature: torch.Tensor
    """(d_sae,) weight of every feature in the state: v of "action" and "value", β_j / σ_j of "effects"."""
    pair_keys: torch.Tensor
    """(n_pairs,) int64, ascending: token id · d_sae + feature, of the pairs in A; empty but for "action"."""
    pair_values: torch.Tensor
    """(n_pairs,) entries of A."""
    token: torch.Tensor
    """(n_token_ids,) b; empty but for "action". Later token ids have 0."""
    constant: float
    """v_0, or −Σ_j β_j m_j / σ_j."""
    scale: float
    """Standard deviation of the raw scores over the tokens learned from."""
    info: dict[str, Any] = field(default_factory=dict)
    """sae (fingerprint, site, d_model), reader, n_learned and n_held_out (problems), n_features (of "effects"),
    significant, note; difference, low, high and p on the held-out problems."""

    @property
    def d_sae(self) -> int:
        return len(self.feature)

    @property
    def significant(self) -> bool:
        """Whether scores tell success from failure on held-out problems; if not, all scores are 0."""
        return bool(self.info["significant"])

    def __repr__(self) -> str:
        state = self.info["note"] or (
            f"held-out difference {self.info['difference']:.3f} [{self.info['low']:.3f}, {self.info['high']:.3f}] "
            f"on {self.info['n_held_out']} others, p = {self.info['p']:.4f}"
        )
        place = f"{self.config.estimator} at {self.info['sae']['site']}"
        return f"Credit({place}, learned on {self.info['n_learned']} problems; {state})"

    def scores(self, codes: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Score every response token, in standard deviations; larger is better.

        Args:
            codes: (B, T + 1, d_sae) codes of the last prompt token and the T response tokens.
            token_ids: (B, T) response tokens.

        Returns:
            (B, T), meaningless at padding. All 0 where the tables are not significant.
        """
        if codes.shape[-1] != self.d_sae or codes.shape[1] != token_ids.shape[1] + 1:
            raise ValueError(f"codes {tuple(codes.shape)} do not go with tokens {tuple(token_ids.shape)}")
        if not self.significant:
            return torch.zeros(token_ids.shape, dtype=codes.dtype, device=codes.device)
        state = codes @ self.feature.to(codes) + self.constant  # (B, T + 1)
        if self.config.estimator == "effects":
            raw = state[:, 1:]
        elif self.config.estimator == "value":
            raw = state[:, 1:] - state[:, :-1]
        else:
            raw = self._action_values(codes[:, :-1], token_ids) - state[:, :-1]
        return raw / self.scale

    def token_credit(self, codes: torch.Tensor, token_ids: torch.Tensor, logprob: torch.Tensor) -> torch.Tensor:
        """(B, T) scores times 1 − p, which move advantages (`tsae.rl.credit`).

        Args:
            codes: (B, T + 1, d_sae), as for `scores`.
            token_ids: (B, T) response tokens.
            logprob: (B, T) the reference's log-probability of each, in nats; NaN, as at padding, counts as certain.
        """
        scores = self.scores(codes, token_ids)
        return scores * -logprob.nan_to_num().expm1().to(scores)

    def _action_values(self, codes: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """(B, T) Q(f, x); pairs that were never seen add 0."""
        device = codes.device
        row, place, feature = codes.nonzero(as_tuple=True)
        keys = token_ids.to(device)[row, place].long() * self.d_sae + feature
        table, values = self.pair_keys.to(device), self.pair_values.to(codes)
        found = torch.zeros(token_ids.shape, dtype=codes.dtype, device=device)
        if len(table):
            index = torch.searchsorted(table, keys).clamp_max(len(table) - 1)
            entries = torch.where(table[index] == keys, values[index], 0.0) * codes[row, place, feature]
            found.index_put_((row, place), entries, accumulate=True)
        known = token_ids.to(device).clamp_max(len(self.token) - 1)
        return found + torch.where(token_ids.to(device) < len(self.token), self.token.to(codes)[known], 0.0)

    def shuffled(self, seed: int = 0) -> Credit:
        """The control: each feature gets the entries of another, the same one in all tables.

        Only features with entries exchange them, so that the control touches as many tokens.
        """
        generator = torch.Generator().manual_seed(seed)
        used = self.feature != 0
        if len(self.pair_keys):
            used[self.pair_keys % self.d_sae] = True
        used = used.nonzero().squeeze(1)
        to = torch.arange(self.d_sae)
        to[used] = used[torch.randperm(len(used), generator=generator)]
        feature = torch.empty_like(self.feature)
        feature[to] = self.feature
        keys, order = ((self.pair_keys // self.d_sae) * self.d_sae + to[self.pair_keys % self.d_sae]).sort()
        info = {**self.info, "shuffled": seed}
        return replace(self, feature=feature, pair_keys=keys, pair_values=self.pair_values[order], info=info)

    def save(self, folder: str | Path) -> Path:
        """Write credit.safetensors and credit.json."""
        content = {"config": asdict(self.config), "constant": self.constant, "scale": self.scale}
        tensors = {name: getattr(self, name) for name in ("feature", "pair_keys", "pair_values", "token")}
        write = partial(write_tensors, tensors=tensors)
        content |= {"info": self.info}
        return write_artefact(folder, CREDIT, content, {"credit.safetensors": write}, config=self.config)

    @classmethod
    def load(cls, folder: str | Path) -> Credit:
        """Read a folder that `save` wrote.

        Raises:
            TsaeError: where a file is missing or damaged.
        """
        folder = as_path(folder)
        content = read_artefact(folder, CREDIT, ["credit.safetensors"])
        with reading(folder, CREDIT.fix):
            given = content["config"]
            config = CreditConfig(**{**given, "pass_rates": tuple(given["pass_rates"])})
            known = {name: content[name] for name in ("constant", "scale", "info")}
            return cls(config, **load_file(folder / "credit.safetensors"), **known)


CREDIT = Kind("credit", 1, "credit.json", "Make it with `tsae credit fit`.", Credit.load)


def sae_of(features: FeatureTable, *names: str) -> dict[str, Any]:
    """Facts of the SAE that features were encoded with.

    Raises:
        TsaeError: where a name is missing.
    """
    found = features.info["sae"]
    if not set(names) <= set(found):
        raise TsaeError("its features are of no SAE", where=features.origin, fix="Encode with an SAE.")
    return {name: found[name] for name in names}


def open_reference(reference: Checkpoint, site: str, d_model: int, *, device: str) -> HuggingFaceReader:
    """Load the reference to read at the SAE's site.

    Raises:
        TsaeError: where its residual stream has another width than the SAE.
    """
    reader = HuggingFaceReader(reference.load_model(device=device), [site])
    width = reader.model.config.get_text_config().hidden_size
    if width != d_model:
        what = f"the reference has d_model {width}, the SAE expects {d_model}"
        raise TsaeError(what, where=reference.path, fix="Give the checkpoint whose activations the SAE was trained on.")
    return reader


def thresholded(scores: torch.Tensor, config: ShapingConfig) -> torch.Tensor:
    """Bring scores closer to 0 by the threshold."""
    return scores.sign() * (scores.abs() - config.threshold).clamp_min(0)


def token_weights(
    scores: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, config: ShapingConfig
) -> torch.Tensor:
    """(B, T) weights of mean 1 over every row's tokens; 0 outside the mask, and 1 where the advantage is 0.

    Args:
        scores: (B, T).
        advantages: (B,).
        mask: (B, T), 1 for response tokens.
        config: strength and bound.
    """
    limit = math.log(config.bound)
    exponent = (config.strength * scores * advantages.sign().unsqueeze(1)).clamp(-limit, limit)
    # The row's largest weight is 1 at first: a sum of large ones would not be finite.
    largest = exponent.masked_fill(mask == 0, -limit).amax(1, keepdim=True)
    raw = (exponent - largest).exp().masked_fill(mask == 0, 0) * mask
    return raw * (mask.sum(1) / raw.sum(1).clamp_min(1)).unsqueeze(1)


def plausibility(scores: torch.Tensor, mask: torch.Tensor, config: ShapingConfig) -> torch.Tensor:
    """(B,) between 0 and 1: whether every token looks like a token of a success.

    Args:
        scores: (B, T).
        mask: (B, T), 1 for response tokens.
        config: tolerance.
    """
    doubt = (-scores / config.tolerance).clamp(0, 1) * mask
    return (1 - doubt).prod(1)


def rebalanced(advantages: torch.Tensor, factor: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Multiply advantages of successes by a factor; scale those of failures so that every group still adds up to 0.

    Args:
        advantages: (B,), adding up to 0 in each group.
        factor: (B,) between 0 and 1; only read where the advantage is positive.
        group: (B,) number of each row's group.

    Returns:
        (B,)
    """
    gained = advantages.clamp_min(0)
    total = torch.zeros(int(group.max()) + 1, dtype=gained.dtype, device=gained.device)
    share = total.index_add(0, group, gained * factor) / total.index_add(0, group, gained).clamp_min(1e-12)
    return torch.where(advantages > 0, gained * factor, advantages * share[group])


def shape_advantages(
    scores: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, group: torch.Tensor, config: ShapingConfig
) -> torch.Tensor:
    """(B, T) advantages A' of the equation at the top; the arguments are as above.

    Raises:
        TsaeError: where one is not finite, as a score or an advantage was not.
    """
    mask = mask.to(scores)
    scores = thresholded(scores, config)
    if config.plausibility:
        advantages = rebalanced(advantages, plausibility(scores, mask, config), group)
    weights = token_weights(scores, advantages, mask, config)
    shaped = weights * advantages.unsqueeze(1) + config.dense * scores * mask
    if not shaped.isfinite().all():
        what = f"{int((~shaped.isfinite()).sum())} advantages are not finite once they are shaped by scores"
        fix = "Give finite scores and advantages, or smaller numbers in ShapingConfig."
        raise TsaeError(what, where="shape_advantages", fix=fix)
    return shaped
