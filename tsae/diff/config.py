"""Settings of a feature diff and of influence. Imports nothing heavy: the CLI builds its options from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any, Literal

from tsae.base.ranges import need_at_most, need_numbers
from tsae.errors import TsaeError

FalseDiscoveries = Literal["bh", "by"]


@dataclass(frozen=True)
class DiffConfig:
    """Which contrasts are drawn and how their uncertainty is estimated."""

    span: Literal["response", "thinking", "answer", "prompt", "last_prompt", "all"] = "response"
    """Tokens over which a trajectory's mean activation is taken; special tokens never count, nor tokens of a response
    that the policy did not sample. thinking and answer are the two parts of a response; trajectories without a token of
    the span are left out. last_prompt is the last token of the prompt, from which the first of the response is drawn.
    Within prompts only what training changed in reading them can differ: policy parts, outcomes and interactions are
    refused there."""
    bands: tuple[str, ...] | None = None
    """Bands to split by; by default those of the rollouts, and none where the rollouts have none."""
    n_bootstrap: int = 1000
    """Bootstrap draws of problems, for intervals."""
    n_permutations: int = 10_000
    """Sign flips or label permutations, for p-values. Features with a large p need fewer. Where a contrast has more
    than q · n_permutations features, more are drawn for those that only the number of draws keeps from discovery."""
    confidence: float = 0.95
    """Confidence level of the intervals."""
    minimum_effect: float = 0.1
    """|Δ| up to which a feature did not move, in standard deviations of the feature over base trajectories: what is
    tested is whether it moved further. 0 tests whether it differs at all, which enough problems show of any change."""
    q: float = 0.05
    """False-discovery rate at which a feature counts as a discovery."""
    fdr: FalseDiscoveries = "bh"
    """q-values over the features of a contrast: Benjamini–Hochberg, or Benjamini–Yekutieli (any dependence)."""
    min_problems: int = 8
    """A contrast with fewer problems is refused; a feature active in fewer problems of a contrast is not tested. With 8
    no p-value is below 2 / 2^8 = .008."""
    min_fve: float = 0.5
    """A reader that the SAE reconstructs worse than this is flagged, and so is every shift of it."""
    max_outliers: float = 0.05
    """So is one of whose tokens more than this share lies beyond the SAE's norm limit: these count nowhere. Attention
    sinks of language models are about one token a trajectory."""
    noise_draws: int = 3
    """Noisy checkpoints for each checkpoint: the base's weights and Gaussian noise of the norm of its update, tensor by
    tensor (`tsae.noise_null`). 0 leaves this null out."""
    noise_problems: int = 60
    """Problems whose trajectories noisy checkpoints read, at most, as many from every band."""
    seed: int = 0
    """Seed of the bootstrap and the permutations."""
    threads: int = 2
    """Contrasts, controls and nulls that are computed at once; each takes memory. Numbers do not depend on it."""

    def __post_init__(self) -> None:
        need_numbers(self)
        need_at_most(self, noise_draws=10_000, threads=256)
        checks = {
            f"n_bootstrap={self.n_bootstrap} and n_permutations={self.n_permutations} must be 100 to 10,000,000": (
                min(self.n_bootstrap, self.n_permutations) >= 100
                and max(self.n_bootstrap, self.n_permutations) <= 10_000_000
            ),
            f"q={self.q} must lie between 0.000001 and 1": 1e-6 <= self.q < 1,
            f"bands={self.bands} name a band twice": len(set(self.bands or ())) == len(self.bands or ()),
            f"minimum_effect={self.minimum_effect} must be at least 0": 0 <= self.minimum_effect < float("inf"),
            f"min_problems={self.min_problems} must be at least 2": self.min_problems >= 2,
            f"max_outliers={self.max_outliers} must be a share, 0 to 1": 0 <= self.max_outliers <= 1,
            f"noise_draws={self.noise_draws} must not be negative": self.noise_draws >= 0,
            f"threads={self.threads} must be at least 1": self.threads >= 1,
        }
        for message, holds in checks.items():
            if not holds:
                raise TsaeError(message, where="DiffConfig")

    def settings(self) -> dict[str, Any]:
        """What the numbers depend on, as a dict: all but threads."""
        return {name: value for name, value in asdict(self).items() if name != "threads"}

    @property
    def within_prompt(self) -> bool:
        """Whether all trajectories of a problem are the same over the span."""
        return self.span in ("prompt", "last_prompt")


def need_settings(drawn: Mapping[str, Any], config: DiffConfig, where: Path) -> None:
    """Refuse a diff that was drawn with other settings.

    Args:
        drawn: the settings of the diff, as its file has them.
        config: that are wanted.
        where: folder of the diff.

    Raises:
        TsaeError: naming the settings that differ.
    """
    wanted = json.loads(json.dumps(config.settings()))
    differing = [name for name in wanted if drawn.get(name) != wanted[name]]
    if differing:
        what = f"was drawn with other settings than this run's (differing: {', '.join(differing)})"
        raise TsaeError(what, where=where, fix="Move that folder elsewhere; the same command then draws the run's own.")


@dataclass(frozen=True)
class InfluenceConfig:
    """The policy-gradient step whose first order is taken, and over what."""

    loss_type: Literal["dapo", "grpo", "dr_grpo"] = "dapo"
    """How the trainer normalises: over all response tokens of the batch (dapo, TRL's default), over every response's
    own tokens (grpo), or by max_completion_length (dr_grpo)."""
    max_completion_length: int | None = None
    """The trainer's limit in tokens, by which dr_grpo divides; for dr_grpo alone."""
    temperature: float = 1.0
    """Temperature of the trainer's sampling, by which it divides logits."""
    parts: tuple[Literal["representation", "policy"], ...] = ("representation", "policy")
    """How a feature's mean depends on the weights; a part left out counts 0."""
    batch_tokens: int = 4096
    """Tokens per forward pass, padding included."""
    device: str = "cpu"
    """Torch device: cpu, cuda, cuda:1, …"""
    model_dtype: Literal["auto", "float32", "float64"] = "float32"
    """Precision of the weights and of the differentiation; auto keeps that of the file."""

    def __post_init__(self) -> None:
        need_numbers(self)
        if (self.loss_type == "dr_grpo") != (self.max_completion_length is not None):
            raise TsaeError(
                f"loss_type={self.loss_type} and max_completion_length={self.max_completion_length} do not go together",
                where="InfluenceConfig",
                fix="Give max_completion_length for dr_grpo, and only there.",
            )
        if self.batch_tokens < 1 or (self.max_completion_length or 1) < 1:
            raise TsaeError("batch_tokens and max_completion_length must be positive", where="InfluenceConfig")
        if self.temperature < 1e-3:  # logits that are divided by less overflow
            raise TsaeError(f"temperature={self.temperature} is less than 0.001", where="InfluenceConfig")
        if not self.parts or set(self.parts) - {"representation", "policy"} or len(set(self.parts)) < len(self.parts):
            raise TsaeError(f"parts={self.parts} are not representation, policy or both", where="InfluenceConfig")


@dataclass(frozen=True)
class ExplainConfig:
    """Which features get a label, what they are labelled from, how labels are tested, and what that may cost."""

    n: int = 20
    """Features: those that moved most."""
    choose: tuple[int, ...] = ()
    """Features by number instead."""
    strongest: int = 8
    """Contexts with the largest activations, at most one a trajectory; half as the base reads, half as the trained
    checkpoint that moved the feature most."""
    random: int = 6
    """Further contexts in which the feature is active."""
    contrasting: int = 6
    """Contexts with the same tokens in which it is not active."""
    compared: int = 3
    """Texts that the base and that checkpoint read most differently."""
    held_out: int = 10
    """Contexts of either kind in each test, from problems that the label was not made from."""
    before: int = 20
    """Tokens of a context before its strongest one."""
    after: int = 8
    """Tokens after it."""
    min_score: float = 0.7
    """A label that scores less (mean of detection and fuzzing) is not shown. With 10 contexts of either kind in both
    tests, a label that says nothing reaches .7 once in about 100 features."""
    per_request: int = 5
    """Contexts that the server judges in one request."""
    label_tokens: int = 300
    """Tokens of an answer with a label, at most. Models that think first need more."""
    verdict_tokens: int = 100
    """Tokens of an answer to a test, at most."""
    budget: int = 1_000_000
    """Tokens, in and out, that the server may be asked for. Answers that are known already cost nothing."""
    prices: tuple[float, float] = (0.0, 0.0)
    """What the server's owner takes for a million tokens in and out; the estimate then names the cost."""
    seed: int = 0
    """Seed of the choice of contexts and of the shuffled labels."""

    def __post_init__(self) -> None:
        need_numbers(self)
        for name in ("n", "strongest", "held_out", "per_request", "label_tokens", "verdict_tokens", "budget"):
            if getattr(self, name) < 1:
                raise TsaeError(f"{name}={getattr(self, name)} is less than 1", where="ExplainConfig")
        for name in ("random", "contrasting", "compared", "before", "after"):
            if getattr(self, name) < 0:
                raise TsaeError(f"{name}={getattr(self, name)} is negative", where="ExplainConfig")
        if self.held_out < 4 or not 0 <= self.min_score <= 1 or not all(0 <= p < inf for p in self.prices):
            raise TsaeError(
                f"held_out={self.held_out} must be at least 4, min_score={self.min_score} a share, and prices "
                f"{self.prices} finite and not negative",
                where="ExplainConfig",
            )
