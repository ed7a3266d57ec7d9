"""Settings of a feature diff and of its labels. Imports nothing heavy: the CLI builds its options from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from tsae.base.validation import Confidence, Count, Daily, Draws, Fraction, NotNegative, Seed, Size, config
from tsae.errors import TsaeError

FalseDiscoveries = Literal["bh", "by"]


@config
class DiffConfig:
    """Which contrasts are drawn and how their uncertainty is estimated."""

    span: Daily[Literal["response", "thinking", "answer", "prompt", "last_prompt", "all"]] = "response"
    """Tokens over which a trajectory's mean activation is taken. Special tokens never count, nor tokens of a response
    that the policy did not sample. thinking and answer are the two parts of a response; trajectories without a token of
    the span are left out. last_prompt is the last token of the prompt, from which the response's first token is drawn.
    Prompts differ only in how training changed their reading: policy parts, outcomes and interactions are refused
    there."""
    bands: Daily[tuple[str, ...] | None] = None
    """Bands to split by; by default those of the rollouts, if they have any."""
    n_bootstrap: Draws = 1000
    """Bootstrap draws of problems, for intervals."""
    n_permutations: Draws = 10_000
    """Sign flips or label permutations, for p-values. Features with a large p need fewer. A contrast with more than q ·
    n_permutations features draws more for features that only the number of draws keeps from discovery."""
    confidence: Confidence = 0.95
    """Confidence level of the intervals."""
    minimum_effect: Daily[NotNegative] = 0.1
    """|Δ| up to which a feature did not move, in standard deviations of the feature over base trajectories. The test
    asks whether it moved further. With 0 it asks whether the feature differs at all, which enough problems show of any
    change."""
    q: Daily[Annotated[float, Field(ge=1e-6, lt=1)]] = 0.05
    """False-discovery rate at which a feature counts as a discovery."""
    fdr: FalseDiscoveries = "bh"
    """q-values over the features of a contrast: Benjamini–Hochberg, or Benjamini–Yekutieli (any dependence)."""
    min_problems: Daily[Annotated[int, Field(ge=2)]] = 8
    """A contrast with fewer problems is refused; a feature active in fewer problems of a contrast is not tested. With 8
    no p-value is below 2 / 2^8 = .008."""
    min_fve: float = 0.5
    """A reader that the SAE reconstructs worse than this is flagged, and so is every shift of it."""
    max_outliers: Fraction = 0.05
    """A reader is also flagged if more than this share of its tokens lies beyond the SAE's norm limit. Such tokens
    count nowhere. Attention sinks of language models are about one token a trajectory."""
    noise_draws: Annotated[int, Field(ge=0, le=10_000)] = 3
    """Number of noisy checkpoints for each checkpoint: the base's weights plus Gaussian noise, with the norm of its
    update in every tensor (`tsae.noise_null`). 0 leaves this null out."""
    noise_problems: Size = 60
    """Problems whose trajectories noisy checkpoints read, at most, as many from every band."""
    seed: Seed = 0
    """Seed of the bootstrap and the permutations."""
    threads: Annotated[int, Field(ge=1, le=256)] = 2
    """Contrasts, controls and nulls that are computed at once; each takes memory. Numbers do not depend on it."""

    def __post_init__(self) -> None:
        if self.bands is not None and len(set(self.bands)) < len(self.bands):
            raise TsaeError(f"bands={self.bands} name a band twice", where="DiffConfig")

    def settings(self) -> dict[str, Any]:
        """What the numbers depend on, as a dict: all but threads."""
        return {name: value for name, value in asdict(self).items() if name != "threads"}

    def need_same(self, drawn: Mapping[str, Any], where: Path) -> None:
        """Refuse a diff at `where` that was drawn with other settings, and name those that differ."""
        wanted = json.loads(json.dumps(self.settings()))
        differing = [name for name in wanted if drawn.get(name) != wanted[name]]
        if differing:
            what = f"was drawn with other settings than this run's (differing: {', '.join(differing)})"
            fix = "Move that folder elsewhere; the same command then draws the run's own."
            raise TsaeError(what, where=where, fix=fix)

    @property
    def within_prompt(self) -> bool:
        """Whether all trajectories of a problem are the same over the span."""
        return self.span in ("prompt", "last_prompt")


@config
class ExplainConfig:
    """Which features get a label, what they are labelled from, how labels are tested, and what that may cost."""

    n: Daily[Count] = 20
    """Number of features: those that moved most."""
    choose: Daily[tuple[int, ...]] = ()
    """Features by number instead."""
    strongest: Count = 8
    """Contexts with the largest activations, at most one a trajectory; half as the base reads, half as the trained
    checkpoint that moved the feature most."""
    random: Size = 6
    """Further contexts in which the feature is active."""
    contrasting: Size = 6
    """Contexts with the same tokens in which it is not active."""
    compared: Size = 3
    """Texts that the base and that checkpoint read most differently."""
    held_out: Annotated[int, Field(ge=4)] = 10
    """Contexts of either kind in each test, from problems that the label was not made from."""
    before: Size = 20
    """Tokens of a context before its strongest one."""
    after: Size = 8
    """Tokens after it."""
    min_score: Daily[Fraction] = 0.7
    """A label that scores less (mean of detection and fuzzing) is not shown. With 10 contexts of either kind in both
    tests, a label that says nothing reaches .7 once in about 100 features."""
    per_request: Count = 5
    """Contexts that the server judges in one request."""
    label_tokens: Count = 300
    """Tokens of an answer with a label, at most. Models that think first need more."""
    verdict_tokens: Count = 100
    """Tokens of an answer to a test, at most."""
    budget: Count = 1_000_000
    """Tokens, in and out, that the server may be asked for. Answers that are known already cost nothing."""
    prices: tuple[NotNegative, NotNegative] = (0.0, 0.0)
    """What the server's owner takes for a million tokens in and out; the estimate then names the cost."""
    seed: Seed = 0
    """Seed of the choice of contexts and of the shuffled labels."""
