"""Credit has an effect: rollouts whose features and tokens tell of success, or do not.

Problems differ in how often they are solved (a pass rate of .3 to .9), and features differ between problems in step
with that, as lengths and topics do: none of it tells success from failure within a problem. On top of it goes one
effect, in the way that each estimator can see:

- "value", "effects": in successes ten of the 40 features are `effect` standard deviations of their trajectory means
  higher;
- "action": every state has one of four features that says which token is due. One token in ten is another one; in
  failures `effect` of the tokens more.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from statements import Line
from statements.tables import EOS, feature_table
from tsae.diff.config import DiffConfig
from tsae.features.feature_table import FeatureTable
from tsae.rl.config import CreditConfig, Estimator
from tsae.rl.credit_fitting import fit_credit
from tsae.rollouts.table import Rollouts

N_FEATURES, LENGTH = 40, 6


def planted_credit(
    seed: int, effect: float, estimator: Estimator, *, n_problems: int = 60, n_samples: int = 8
) -> FeatureTable:
    """Features of the reference's own rollouts."""
    rng = np.random.default_rng([seed, 99])
    n, rate = n_problems * n_samples, np.repeat(rng.uniform(0.3, 0.9, n_problems), n_samples)
    right = rng.random(n) < rate
    due = rng.integers(0, 4, (n, LENGTH))
    slips = rng.random((n, LENGTH)) < (0.1 + (effect * ~right if estimator == "action" else np.zeros(n)))[:, None]
    written = np.where(slips, (due + rng.integers(1, 4, due.shape)) % 4, due)

    # Prompt, tokens, end. A trajectory's mean varies by its problem, itself and its tokens.
    of_problem = 0.6 * rng.normal(size=(n_problems, N_FEATURES)).repeat(n_samples, axis=0) + (rate[:, None] - 0.6)
    of_trajectory = 0.5 * rng.normal(size=(n, N_FEATURES))
    states = 1.0 + (of_problem + of_trajectory)[:, None] + 0.8 * rng.normal(size=(n, LENGTH + 2, N_FEATURES))
    states[:, :, 10:] -= 1.0  # three quarters of the features are silent half of the time
    if estimator == "action":
        states[:, :, :4] = -1.0
        np.put_along_axis(states[:, :LENGTH], due[:, :, None], 1.0 + rng.random((n, LENGTH, 1)), axis=2)
    states = np.maximum(states, 0)
    if estimator != "action":
        deviation = states[:, 1:-1, :10].mean(1).std(0)
        states[right, :, :10] += effect * deviation

    records = [
        {
            "problem_id": f"p{i // n_samples:03d}", "policy": "base", "prompt_ids": [9],
            "response_ids": [*written[i].tolist(), EOS], "outcome": "success" if right[i] else "failure",
        }
        for i in range(n)
    ]  # fmt: skip
    table = feature_table(
        Rollouts.from_records(records), states.reshape(-1, N_FEATURES), [("base", np.arange(n))], special=(EOS,)
    )
    table.info["sae"].update({"weights": "abc", "d_model": 4, "d_sae": N_FEATURES})
    return table


def says(seed: int, effect: float, estimator: Estimator = "effects", **size: int) -> bool:
    """Whether credit says that its scores tell success from failure."""
    table = planted_credit(seed, effect, estimator, **size)
    return fit_credit(table, CreditConfig(estimator=estimator, seed=seed)).significant


def none(estimator: Estimator, n_problems: int, seed: int, config: DiffConfig) -> tuple[float, float]:
    """Nothing tells of success within a problem."""
    return float(says(seed, 0.0, estimator, n_problems=n_problems)), math.nan


def some(estimator: Estimator, effect: float, seed: int, config: DiffConfig) -> tuple[float, float]:
    """There is nothing false to say."""
    return math.nan, float(says(seed, effect, estimator))


ESTIMATORS: tuple[Estimator, ...] = ("action", "value", "effects")

LINES = [
    *(
        Line("credit has an effect", f"nothing, {n} problems, {estimator}", partial(none, estimator, n))
        for estimator in ESTIMATORS
        for n in (24, 60)
    ),
    *(
        Line("credit has an effect", f"failures have {size} more wrong tokens, action", partial(some, "action", size))
        for size in (0.2, 0.3)
    ),
    *(
        Line("credit has an effect", f"{size} SD in 10 features, {estimator}", partial(some, estimator, size))
        for estimator in ESTIMATORS[1:]
        for size in (0.3, 0.5)
    ),
]
