"""Configs of credit, shaping and curriculum. Light: the command line reads its options from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tsae.base.ranges import need_at_most, need_numbers
from tsae.errors import TsaeError

Estimator = Literal["action", "value", "effects"]
_MOST = 10**6
"""Largest setting: with larger ones, products would be infinite."""


@dataclass(frozen=True)
class CreditConfig:
    """How features score tokens, and which rollouts teach the scores."""

    estimator: Estimator = "action"
    """What a token's score is. "action": how much better the token is than its state. "value": how much the success
    that features promise changes at the token. "effects": the outcome effects of the features active at the token."""
    reader: str | None = None
    """The reference: reader and policy whose rollouts count; by default the base."""
    pass_rates: tuple[float, float] = (0.25, 0.99)
    """Lowest and highest pass rate of the reference on the problems that count. Lucky guesses on harder problems then
    do not define what is good."""
    min_problems: int = 5
    """A feature, or a pair of feature and token, counts if it occurs in at least this many problems."""
    ridge: float = 30.0
    """Penalty of the regression of "action" and "value", in units of tokens."""
    q: float = 0.05
    """Largest p-value on held-out problems; for "effects" also the false-discovery rate of its features."""
    held_out: float = 0.2
    """Share of the problems that only test whether scores tell success from failure."""
    seed: int = 0
    """Seed of the held-out problems and of permutations."""

    def __post_init__(self) -> None:
        need_numbers(self)
        if self.estimator not in (known := get_args(Estimator)):
            raise TsaeError(f"estimator={self.estimator!r} is none of {', '.join(known)}", where="CreditConfig")
        low, high = self.pass_rates
        if not 0 <= low < high <= 1:
            raise TsaeError(f"pass_rates={self.pass_rates} is not a range of shares", where="CreditConfig")
        if self.ridge <= 0 or self.min_problems < 1 or not 0 < self.held_out < 1 or not 0 < self.q <= 1:
            raise TsaeError(
                f"ridge={self.ridge} must be above 0, min_problems={self.min_problems} at least 1, "
                f"held_out={self.held_out} and q={self.q} shares",
                where="CreditConfig",
            )


@dataclass(frozen=True)
class ShapingConfig:
    """How scores change advantages; see `tsae.rl.shaping`."""

    threshold: float = 0.5
    """θ: scores first move this many standard deviations towards 0, so that only clear ones count."""
    strength: float = 2.0
    """κ of the token weights, per standard deviation of the scores; 0 gives every token weight 1."""
    bound: float = 8.0
    """Weights lie between 1 / bound and bound before they are scaled to mean 1."""
    plausibility: bool = False
    """Whether successes that look like failures earn less."""
    tolerance: float = 2.0
    """A score this many standard deviations below 0 counts as a failed step; a smaller one counts in proportion."""
    dense: float = 0.0
    """λ: reward per token and standard deviation of its score, added to the advantages."""

    def __post_init__(self) -> None:
        need_numbers(self)
        if self.threshold < 0 or self.strength < 0 or self.bound < 1 or self.tolerance < 1e-6 or self.dense < 0:
            raise TsaeError(
                f"threshold={self.threshold}, strength={self.strength} and dense={self.dense} must be at least 0, "
                f"bound={self.bound} at least 1, tolerance={self.tolerance} at least 1e-6",
                where="ShapingConfig",
            )
        need_at_most(self, threshold=_MOST, strength=_MOST, bound=_MOST, dense=_MOST)


@dataclass(frozen=True)
class CurriculumConfig:
    """How problems are drawn by the current model's pass rate; see `tsae.rl.curriculum`."""

    outcome: str | None = None
    """Reward function that says what is right, the only one that pass rates count; by default the only one there is, or
    the only one whose name says accuracy or correctness."""
    success_above: float = 0.0
    """A reward of that function above this is a success."""

    forgetting: float = 0.8
    """Share of the evidence on a problem that is kept when new evidence comes; 1 forgets nothing."""
    prior: tuple[float, float] = (1.0, 1.0)
    """Successes and failures that every problem starts with. Equal numbers are optimistic about hard problems: each is
    tried before it is put aside."""
    level_responses: float = 16.0
    """Number of responses that the recent pass rate of a problem's level counts for in its estimate; it stands in for
    problems not yet tried. Without levels it is not used."""
    guess: float = 0.0
    """Share of responses that are right by guessing, such as .25 for four choices. Problems solved no more often are
    beyond the model."""
    explore: float = 0.05
    """Share of the draws that are uniform over the admitted problems, which keeps all estimates fresh."""
    admit_above: float = 0.5
    """A problem with reformulations is admitted when their mean estimated pass rate is at least this."""
    seed: int = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        need_numbers(self)
        if not 0 < self.forgetting <= 1 or min(self.prior) <= 0:
            raise TsaeError(
                f"forgetting={self.forgetting} must be above 0 and at most 1, prior={self.prior} positive",
                where="CurriculumConfig",
            )
        for name in ("guess", "explore", "admit_above"):
            if not 0 <= getattr(self, name) <= 1:
                raise TsaeError(f"{name}={getattr(self, name)} is not a share", where="CurriculumConfig")
        if self.level_responses < 0:
            raise TsaeError(f"level_responses={self.level_responses} is negative", where="CurriculumConfig")
        need_at_most(self, prior=_MOST, level_responses=_MOST)
