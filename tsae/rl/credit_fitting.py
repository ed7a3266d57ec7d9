"""Learning the tables of `tsae.rl.credit` from a FeatureTable of the reference's own rollouts.

1. Problems that the reference solves now and then are split once. One part teaches the tables; the other, the held-out
   problems, only judges them.
2. "action" and "value": ridge regression by LSMR on sparse codes, one row per response token, with y_i − ȳ_problem as
   target. Each column is divided by its root mean square, so that the penalty treats features alike. "effects":
   features whose outcome effect is found at `CreditConfig.q`, tested as in a FeatureDiff.
3. On the held-out problems, do a problem's successes have the larger mean score? Permuted labels, sign flips and a
   bootstrap interval over problems decide, as for every outcome effect. If not, the credit is not significant, and its
   scores are 0.

A success is a rollout whose `outcome` is "success": what the log's named reward or a verifier says. It is never a sum
of rewards, in which a reward for the format would make every well-formed answer a success.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
import torch
from scipy.sparse.linalg import lsmr

from tsae.base.statistics import bootstrap_interval
from tsae.base.usual_state import usual_state
from tsae.diff.comparisons import Rows, outcome_comparison
from tsae.diff.config import DiffConfig
from tsae.diff.effects import draw
from tsae.diff.inference import outcomes, sequential_p
from tsae.errors import TsaeError
from tsae.features.feature_table import FeatureTable
from tsae.features.sparse_matrices import PickedColumns
from tsae.rl.config import CreditConfig
from tsae.rl.credit import Credit, sae_of
from tsae.rollouts.token_parts import OTHER

_DENSE = 2**25
"""Codes of tokens that are dense at once, whatever the width of the SAE."""

_CONFIDENCE = 0.95  # of the intervals


@usual_state()
def fit_credit(features: FeatureTable | str | Path, config: CreditConfig | None = None) -> Credit:
    """Learn what features say about success from a reference's rollouts.

    Args:
        features: codes of the reference's own rollouts, with outcomes, or the folder.
        config: defaults of `CreditConfig`.

    Raises:
        TsaeError: where an outcome is unknown, too few problems have both successes and failures, or the features are
            of no SAE.
    """
    features = FeatureTable.of(features)
    config = config or CreditConfig()
    reader = config.reader or features.readers[0]
    rows = features.rows(reader=reader, policy=reader)
    if not len(rows):
        fix = "Encode rollouts that the reference sampled, read by the reference."
        raise TsaeError(f"{reader} read none of its own rollouts", where=features.origin, fix=fix)
    sae = sae_of(features, "weights", "site", "d_model", "d_sae")
    tokens = ResponseTokens.of(features, rows)
    learning, testing = _split(tokens.frame, config, reader)
    problems = {
        name: int(tokens.frame.code[part].nunique())
        for name, part in (("n_learned", learning), ("n_held_out", testing))
    }
    info = {"sae": sae, "reader": reader, **problems, "significant": True, "note": ""}
    if config.estimator == "effects":
        credit = _effects(features, rows, tokens, learning, config, info)
    else:
        credit = _regressed(tokens, learning, config, info)
    return _judged(credit, tokens, learning, testing) if credit.significant else credit


@dataclass(frozen=True)
class ResponseTokens:
    """Response tokens of some rows of a FeatureTable, without those that the policy did not sample."""

    codes: sp.csr_array
    """(n_tokens, d_sae) codes of the tokens."""
    states: sp.csr_array
    """(n_tokens, d_sae) codes of the tokens before them."""
    ids: np.ndarray
    """(n_tokens,) token ids."""
    row: np.ndarray
    """(n_tokens,) row of each token."""
    frame: pd.DataFrame
    """(n_rows,) the rollouts, with code and pass_rate of the problem, success (bool) and centred (1 or 0 minus the pass
    rate)."""

    @classmethod
    def of(cls, features: FeatureTable, rows: np.ndarray) -> ResponseTokens:
        """The tokens of the given rows.

        Raises:
            TsaeError: where an outcome is unknown.
        """
        frame = features.rollouts.frame.iloc[features.trajectory[rows]].reset_index(drop=True)
        unknown = int((frame.outcome == "unknown").sum())
        if unknown:
            raise TsaeError(
                f"{unknown} of {len(frame)} rollouts of the reference have no known outcome",
                where=features.origin,
                fix="Verify the answers (--verifier), or name the reward that means success when the log is read "
                "(--outcome).",
            )
        starts, stops = features.row_offsets[rows], features.row_offsets[rows + 1]
        prompt = features.rollouts.lengths("prompt_ids")[features.trajectory[rows]]
        index = np.concatenate([np.arange(a + p, b) for a, b, p in zip(starts, stops, prompt, strict=True)])
        row = np.repeat(np.arange(len(rows)), stops - starts - prompt)
        parts = features.rollouts.token_parts(features.trajectory)
        if parts is not None:
            sampled = parts[index] != OTHER
            index, row = index[sampled], row[sampled]
        frame = frame.assign(success=frame.outcome == "success", code=pd.factorize(frame.problem_id)[0])
        frame["pass_rate"] = frame.groupby("code").success.transform("mean")
        frame["centred"] = frame.success - frame.pass_rate
        codes = sp.csr_array(features.codes[index])
        return cls(codes, sp.csr_array(features.codes[index - 1]), features.token_ids[index], row, frame)

    def of_rows(self, keep: np.ndarray) -> np.ndarray:
        """(n_tokens,) bool of the tokens of the rows kept."""
        return np.asarray(keep[self.row])

    def raw_scores(self, credit: Credit) -> np.ndarray:
        """(n_tokens,) scores before division by their scale: `Credit.scores` on sparse codes, in blocks."""
        found, step = [], min(8192, max(1, _DENSE // self.codes.shape[1]))
        for start in range(0, len(self.ids), step):
            part = slice(start, start + step)
            pair = np.stack([self.states[part].toarray(), self.codes[part].toarray()], axis=1)  # (n, 2, d_sae)
            ids = torch.from_numpy(self.ids[part, None].astype(np.int64))
            found.append(credit.scores(torch.from_numpy(pair).float(), ids).squeeze(1).numpy() * credit.scale)
        return np.concatenate(found)


def _split(frame: pd.DataFrame, config: CreditConfig, reader: str) -> tuple[np.ndarray, np.ndarray]:
    """(n_rows,) bool each: rollouts of the problems to learn from, and of those held out.

    Raises:
        TsaeError: where too few problems have both outcomes and a pass rate in the range.
    """
    rate = frame.pass_rate
    solved = rate.between(*config.pass_rates) & rate.between(0, 1, inclusive="neither")
    problems = np.unique(frame.code[solved])
    # With n problems no sign flip has a smaller p than 2 / 2ⁿ: fewer could never reach q.
    fewest = max(config.min_problems, math.ceil(math.log2(2 / config.q)))
    if len(problems) < config.min_problems + fewest:
        low, high = config.pass_rates
        raise TsaeError(
            f"{len(problems)} problems have successes and failures and a pass rate of {low:g} to {high:g}; "
            f"{config.min_problems + fewest} are needed, {fewest} of them held out",
            where=f"rollouts of {reader}",
            fix="Sample problems that the reference solves now and then, or widen pass_rates.",
        )
    order = np.random.default_rng(config.seed).permutation(problems)
    n_held_out = min(max(fewest, round(config.held_out * len(order))), len(order) - config.min_problems)
    testing = frame.code.isin(order[:n_held_out]).to_numpy()
    return solved.to_numpy() & ~testing, testing


def _regressed(tokens: ResponseTokens, learning: np.ndarray, config: CreditConfig, info: dict[str, Any]) -> Credit:
    """The tables of "action" and "value"."""
    frame, used = tokens.frame, tokens.of_rows(learning)
    target = frame.centred.to_numpy()[tokens.row]
    problem = frame.code.to_numpy()[tokens.row]

    states = sp.csr_array(sp.vstack([tokens.states[used], tokens.codes[used]]))
    twice = np.concatenate([target[used], target[used]])
    # "action" compares tokens with the states they were chosen in, "value" states with states.
    if config.estimator == "action":
        states, twice = sp.csr_array(tokens.states[used]), target[used]
    value, constant = _ridge(states, twice, config.ridge)
    keys, entries, bias = np.empty(0, np.int64), np.empty(0), np.empty(0)
    if config.estimator == "action":
        keys, entries, bias = _pairs(tokens, used, target, problem, config)
    return Credit(
        config=config,
        feature=torch.from_numpy(value).float(),
        pair_keys=torch.from_numpy(keys),
        pair_values=torch.from_numpy(entries).float(),
        token=torch.from_numpy(bias).float(),
        constant=float(constant),
        scale=1.0,
        info=info,
    )


def _pairs(
    tokens: ResponseTokens, used: np.ndarray, target: np.ndarray, problem: np.ndarray, config: CreditConfig
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys and entries of A, and b: the regression on pairs of an active feature and the token chosen."""
    d_sae = tokens.codes.shape[1]
    states, ids = sp.csr_array(tokens.states[used]), tokens.ids[used].astype(np.int64)
    per_token = np.diff(states.indptr)
    keys = np.repeat(ids, per_token) * d_sae + states.indices
    found, column = np.unique(keys, return_inverse=True)
    # Count the problems of each pair by its distinct (pair, problem).
    both = np.unique(column.astype(np.int64) * (int(problem.max()) + 1) + np.repeat(problem[used], per_token))
    common = np.bincount(both // (int(problem.max()) + 1), minlength=len(found)) >= config.min_problems
    renumbered = np.cumsum(common) - 1
    kept = common[column]
    lengths = np.bincount(np.repeat(np.arange(len(ids)), per_token)[kept], minlength=len(ids))
    offsets = np.concatenate([[0], lengths.cumsum()])
    n_pairs, n_ids = int(common.sum()), int(ids.max()) + 1
    design = sp.csr_array((states.data[kept], renumbered[column[kept]], offsets), shape=(len(ids), n_pairs))
    chosen = sp.csr_array((np.ones(len(ids)), (np.arange(len(ids)), ids)), shape=(len(ids), n_ids))
    entries, _ = _ridge(sp.csr_array(sp.hstack([design, chosen])), target[used], config.ridge, constant=False)
    return found[common], entries[:n_pairs], entries[n_pairs:]


def _ridge(
    design: sp.csr_array, target: np.ndarray, penalty: float, *, constant: bool = True
) -> tuple[np.ndarray, float]:
    """Coefficients of the columns, in their own units, and the constant."""
    size = np.sqrt(np.asarray(design.multiply(design).mean(0)).ravel())
    size[size == 0] = 1.0
    scaled = sp.csr_array(design @ sp.diags_array(1 / size))
    if constant:
        scaled = sp.csr_array(sp.hstack([scaled, sp.csr_array(np.ones((len(target), 1)))]))
    solution = lsmr(scaled, target, damp=float(np.sqrt(penalty)), atol=1e-5, btol=1e-5, maxiter=200)[0]
    coefficients = solution[: design.shape[1]] / size
    return coefficients, float(solution[-1]) if constant else 0.0


def _effects(
    features: FeatureTable,
    rows: np.ndarray,
    tokens: ResponseTokens,
    learning: np.ndarray,
    config: CreditConfig,
    info: dict[str, Any],
) -> Credit:
    """The weights of "effects": outcome effects found on the problems to learn from, shrunk towards 0."""
    drawing = DiffConfig(q=config.q, min_problems=max(2, config.min_problems), seed=config.seed)
    of_rows = Rows.of(features, drawing)
    measured = learning & (of_rows.n_tokens[rows] > 0)  # A response of an end token alone has no mean.
    learned, outcome = rows[measured], tokens.frame.outcome.to_numpy(dtype=object)[measured]
    success, failure = (learned[outcome == name] for name in ("success", "failure"))
    of = outcome_comparison(of_rows, success, failure, info["reader"], "all", drawing)
    contrast = draw(of_rows, of, drawing)
    weight, mean = np.zeros(features.n_features), np.zeros(features.n_features)
    if contrast.inference is not None:
        codes = tokens.codes[tokens.of_rows(learning)]
        mean, deviation = _moments(codes)
        size, error = contrast.inference.delta, contrast.inference.error
        # Empirical Bayes: effects of tested features vary by their true spread τ² and by their errors.
        spread = max(float((size**2 - error**2).mean()), 0.0)
        shrunk = np.where(contrast.inference.q <= config.q, size * spread / (spread + error**2), 0.0)
        weight[contrast.feature] = shrunk / deviation[contrast.feature]
    found = int(np.count_nonzero(weight))
    reason = contrast.note or f"no outcome effect at q <= {config.q:g} in {of.n_problems} problems"
    return Credit(
        config=config,
        feature=torch.from_numpy(weight).float(),
        pair_keys=torch.empty(0, dtype=torch.int64),
        pair_values=torch.empty(0),
        token=torch.empty(0),
        constant=-float(weight @ mean),
        scale=1.0,
        info={**info, "n_features": found, **({} if found else _silent(reason))},
    )


def _moments(values: sp.csr_array) -> tuple[np.ndarray, np.ndarray]:
    """(n_columns,) means and standard deviations."""
    mean = np.asarray(values.mean(0)).ravel()
    square = np.asarray(values.multiply(values).mean(0)).ravel()
    return mean, np.sqrt(np.maximum(square - mean**2, 1e-12))


def _judged(credit: Credit, tokens: ResponseTokens, learning: np.ndarray, testing: np.ndarray) -> Credit:
    """Scale the scores where they were learned, and judge them on the held-out problems."""
    raw, config = tokens.raw_scores(credit), credit.config
    scale = max(float(raw[tokens.of_rows(learning)].std()), 1e-12)
    # Differences of values add up to the last value minus the first, so the values themselves are judged.
    judged = np.asarray(tokens.codes @ credit.feature.numpy()) if config.estimator == "value" else raw
    n_rows = len(tokens.frame)
    total = np.bincount(tokens.row, judged - judged.mean(), n_rows) / scale
    scored = tokens.frame.assign(score=total / np.maximum(np.bincount(tokens.row, minlength=n_rows), 1))[testing]
    sides = scored.pivot_table(index="code", columns="success", values="score", aggfunc="mean")
    differences = (sides[True] - sides[False]).to_numpy()[:, None]
    asked = outcomes(
        differences,
        np.ones(1),
        PickedColumns.of(sp.csc_array(scored.score.to_numpy()[:, None])),
        scored.success.to_numpy(),
        np.searchsorted(sides.index, scored.code),
        config.seed,
    )
    p = float(sequential_p(asked.tests(None), asked.n_tests, 1, 9999, config.q, "bh")[0])
    difference = float(differences.mean())
    low, high = (float(end[0]) for end in bootstrap_interval(differences, 2000, _CONFIDENCE, config.seed))
    found = {"difference": difference, "low": low, "high": high, "p": p}
    if low <= 0 or p > config.q:
        found |= _silent(
            f"scores do not tell success from failure on {len(differences)} held-out problems "
            f"(difference {difference:.3f} [{low:.3f}, {high:.3f}], p = {p:.2g})"
        )
    return replace(credit, scale=scale, info={**credit.info, **found})


def _silent(reason: str) -> dict[str, Any]:
    return {"significant": False, "note": f"{reason}: all weights are 1"}
