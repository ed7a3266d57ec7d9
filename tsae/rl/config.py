"""Configs of credit, shaping and curriculum. Light: the command line reads its options from them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tsae.base.validation import Count, Fraction, Seed, config
from tsae.errors import TsaeError

Above0 = Annotated[float, Field(gt=0, le=10**6)]
Estimator = Literal["action", "value", "effects"]
Bounded = Annotated[float, Field(ge=0, le=10**6)]
"""With larger settings, products would be infinite."""


@config
class CreditConfig:
    """How features score tokens, and which rollouts teach the scores."""

    estimator: Estimator = "action"
    """What a token's score is. "action": how much better the token is than its state. "value": by how much the token
    changes the success that features promise. "effects": the outcome effects of the features active at the token."""
    reader: str | None = None
    """The reference: reader and policy whose rollouts count; by default the base."""
    pass_rates: tuple[Fraction, Fraction] = (0.25, 0.99)
    """Lowest and highest pass rate of the reference on the problems that count. Lucky guesses on harder problems then
    do not define what is good."""
    min_problems: Count = 5
    """A feature, or a pair of feature and token, counts if it occurs in at least this many problems."""
    ridge: Annotated[float, Field(gt=0)] = 30.0
    """Penalty of the regression of "action" and "value", in units of tokens."""
    q: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Largest p-value on held-out problems; for "effects" also the false-discovery rate of its features."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of the problems that only test whether scores tell success from failure."""
    seed: Seed = 0
    """Seed of the held-out problems and of permutations."""

    def __post_init__(self) -> None:
        low, high = self.pass_rates
        if low >= high:
            raise TsaeError(f"pass_rates={self.pass_rates} is not a range", where="CreditConfig")


@config
class ShapingConfig:
    """How scores change advantages; see `tsae.rl.credit`."""

    threshold: Bounded = 0.5
    """θ: scores first move this many standard deviations towards 0, so that only clear ones count."""
    strength: Bounded = 2.0
    """κ of the token weights, per standard deviation of the scores; 0 gives every token weight 1."""
    bound: Annotated[float, Field(ge=1, le=10**6)] = 8.0
    """Weights lie between 1 / bound and bound before they are scaled to mean 1."""
    plausibility: bool = False
    """Whether successes that look like failures earn less."""
    tolerance: Annotated[float, Field(ge=1e-6)] = 2.0
    """A score this many standard deviations below 0 counts as a failed step; a smaller one counts in proportion."""
    dense: Bounded = 0.0
    """λ: reward per token and standard deviation of its score, added to the advantages."""


@config
class CurriculumConfig:
    """How problems are drawn by the current model's pass rate; see `tsae.rl.curriculum`."""

    outcome: str | None = None
    """Reward function that says what is right; pass rates count it alone. By default the run's single reward function,
    or the single one whose name says accuracy or correctness."""
    success_above: float = 0.0
    """A reward of that function above this is a success."""

    forgetting: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of the evidence on a problem that is kept when new evidence comes; 1 forgets nothing."""
    prior: tuple[Above0, Above0] = (1.0, 1.0)
    """Successes and failures that every problem starts with. Equal numbers are optimistic about hard problems: each is
    tried before it is put aside."""
    level_responses: Bounded = 16.0
    """Number of responses that the recent pass rate of a problem's level counts for in its estimate; it stands in for
    problems not yet tried. Without levels it is not used."""
    guess: Fraction = 0.0
    """Share of responses that are right by guessing, such as .25 for four choices. Problems solved no more often are
    beyond the model."""
    explore: Fraction = 0.05
    """Share of the draws that are uniform over the admitted problems, which keeps all estimates fresh."""
    admit_above: Fraction = 0.5
    """A problem with reformulations is admitted when their mean estimated pass rate is at least this."""
    seed: Seed = 0
    """Seed of the draws."""
