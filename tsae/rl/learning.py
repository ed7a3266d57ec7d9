"""Learning the tables of `tsae.rl.credit` from a FeatureTable of the reference's own rollouts.

"action" and "value": one row a response token, y_i − ȳ_problem as target, ridge regression by LSMR on sparse codes,
each divided by its root mean square so that the penalty treats features alike. Problems are split: those held out only
test whether the mean score of a problem's successes exceeds that of its failures (sign flips over problems). If it does
not, the credit is not significant, and its scores are 0. "effects" takes what a FeatureDiff found; its features were
tested there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
import torch
from scipy.sparse.linalg import lsmr

from tsae.diff.result import FeatureDiff
from tsae.diff.statistics import Draws, paired_inference
from tsae.errors import TsaeError
from tsae.features.table import FeatureTable
from tsae.rl.config import CreditConfig
from tsae.rl.credit import Credit


def fit_credit(
    features: FeatureTable | str | Path, config: CreditConfig | None = None, *, diff: FeatureDiff | None = None
) -> Credit:
    """Learn what features say about success from a reference's rollouts.

    Args:
        features: codes of the reference's own rollouts, with rewards or outcomes, or the folder.
        config: defaults of `CreditConfig`.
        diff: of the same SAE; needed for "effects", unused otherwise.

    Raises:
        TsaeError: where rewards are missing or not finite, too few problems have both successes and failures, or the
            diff is missing or of another SAE.
    """
    features = features if isinstance(features, FeatureTable) else FeatureTable.load(features)
    config = config or CreditConfig()
    reader = config.reader or features.readers[0]
    rows = features.rows(reader=reader, policy=reader)
    if not len(rows):
        raise TsaeError(
            f"{reader} read none of its own rollouts",
            where=features.origin,
            fix="Encode rollouts that the reference sampled, read by the reference.",
        )
    tokens = ResponseTokens.of(features, rows)
    info = {"sae": _sae_info(features), "reader": reader}
    if config.estimator == "effects":
        return _effects(features, tokens, config, diff, info)
    return _regressed(tokens, config, info)


@dataclass(frozen=True)
class ResponseTokens:
    """The response tokens of some rows of a FeatureTable."""

    codes: sp.csr_array
    """(n_tokens, d_sae) codes of the tokens."""
    states: sp.csr_array
    """(n_tokens, d_sae) codes of the tokens before them."""
    ids: np.ndarray
    """(n_tokens,) token ids."""
    row: np.ndarray
    """(n_tokens,) which of the rows each belongs to."""
    frame: pd.DataFrame
    """(n_rows,) the rollouts, with code (of the problem), centred (reward less its problem's mean) and pass_rate."""

    @classmethod
    def of(cls, features: FeatureTable, rows: np.ndarray) -> ResponseTokens:
        """The tokens of the given rows.

        Raises:
            TsaeError: where a reward is missing or not finite.
        """
        frame = features.rollouts.frame.iloc[features.trajectory[rows]].reset_index(drop=True)
        reward = pd.to_numeric(frame.reward, errors="coerce").to_numpy(dtype=np.float64)
        unknown = int((~np.isfinite(reward)).sum())
        if unknown:
            raise TsaeError(
                f"{unknown} of {len(reward)} rollouts of the reference have no finite reward",
                where=features.origin,
                fix="Verify them first (`tsae rollouts sample --verifier …`): credit needs checked rewards.",
            )
        starts, stops = features.row_offsets[rows], features.row_offsets[rows + 1]
        prompt = features.rollouts.lengths("prompt_ids")[features.trajectory[rows]]
        index = np.concatenate([np.arange(a + p, b) for a, b, p in zip(starts, stops, prompt, strict=True)])
        row = np.repeat(np.arange(len(rows)), stops - starts - prompt)
        frame = frame.assign(reward=reward, code=pd.factorize(frame.problem_id)[0])
        frame["centred"] = frame.reward - frame.groupby("code").reward.transform("mean")
        frame["pass_rate"] = frame.groupby("code").reward.transform(lambda values: (values > 0).mean())
        codes = sp.csr_array(features.codes[index])
        return cls(codes, sp.csr_array(features.codes[index - 1]), features.token_ids[index], row, frame)

    def of_rows(self, keep: np.ndarray) -> np.ndarray:
        """(n_tokens,) bool of the tokens of the rows kept."""
        return np.asarray(keep[self.row])

    def raw_scores(self, credit: Credit) -> np.ndarray:
        """(n_tokens,) scores before they are divided by their scale, in blocks: `Credit.scores` on sparse codes."""
        found = []
        for start in range(0, len(self.ids), 8192):
            part = slice(start, start + 8192)
            pair = np.stack([self.states[part].toarray(), self.codes[part].toarray()], axis=1)  # (n, 2, d_sae)
            ids = torch.from_numpy(self.ids[part, None].astype(np.int64))
            found.append(credit.scores(torch.from_numpy(pair).float(), ids).squeeze(1).numpy() * credit.scale)
        return np.concatenate(found)


def _regressed(tokens: ResponseTokens, config: CreditConfig, info: dict[str, Any]) -> Credit:
    frame = tokens.frame
    low, high = config.pass_rates
    solved = frame.pass_rate.between(low, high).to_numpy() & (frame.centred != 0).groupby(frame.code).transform("any")
    solved = np.asarray(solved)
    problems = np.unique(frame.code[solved])
    if len(problems) < 2 * config.min_problems:
        raise TsaeError(
            f"{len(problems)} problems have successes and failures and a pass rate of {low:g} to {high:g}; "
            f"{2 * config.min_problems} are needed",
            where=f"rollouts of {info['reader']}",
            fix="Sample problems that the reference solves now and then, or widen pass_rates.",
        )
    order = np.random.default_rng(config.seed).permutation(problems)
    testing = order[: max(config.min_problems, round(config.held_out * len(order)))]
    test = solved & frame.code.isin(testing).to_numpy()
    used = tokens.of_rows(solved & ~test)
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
    credit = Credit(
        config=config,
        feature=torch.from_numpy(value).float(),
        pair_keys=torch.from_numpy(keys),
        pair_values=torch.from_numpy(entries).float(),
        token=torch.from_numpy(bias).float(),
        constant=float(constant),
        scale=1.0,
        info={**info, "n_problems": len(problems), "significant": True, "note": ""},
    )
    raw = tokens.raw_scores(credit)
    # Differences of values add up to the last value less the first: what is judged is the values.
    judged = raw if config.estimator == "action" else np.asarray(tokens.codes @ value)
    return _gated(credit, raw, judged, tokens, used, test)


def _pairs(
    tokens: ResponseTokens, used: np.ndarray, target: np.ndarray, problem: np.ndarray, config: CreditConfig
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys and entries of A, and b: the regression on pairs of an active feature and the token chosen."""
    d_sae = tokens.codes.shape[1]
    states, ids = sp.csr_array(tokens.states[used]), tokens.ids[used].astype(np.int64)
    per_token = np.diff(states.indptr)
    keys = np.repeat(ids, per_token) * d_sae + states.indices
    found, column = np.unique(keys, return_inverse=True)
    # In how many problems a pair occurs, by its distinct (pair, problem).
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
    features: FeatureTable, tokens: ResponseTokens, config: CreditConfig, diff: FeatureDiff | None, info: dict[str, Any]
) -> Credit:
    if diff is None:
        raise TsaeError('estimator "effects" needs a diff', where="diff", fix="Give the folder that `tsae diff` wrote.")
    ours, theirs = info["sae"]["weights"], diff.info["sae"].get("weights")
    if ours != theirs:
        raise TsaeError(
            f"the diff is of the SAE {theirs}, the features of {ours}: their features are not the same",
            where="diff",
            fix="Draw the diff from these features.",
        )
    table = diff.shifts
    effects = table[(table.kind == "outcome") & (table.checkpoint == info["reader"]) & (table.band == "all")]
    found = effects[effects.q <= config.q]
    n = int(diff.contrasts.query("kind == 'outcome' and band == 'all'").n_problems.max() or 0)
    # Empirical Bayes: the Δ of all tested features vary by their true spread and by their standard errors.
    noise = float((((effects.delta_high - effects.delta_low) / 4) ** 2).mean()) if len(effects) else 0.0
    spread = max(float(effects.delta.var(ddof=0)) - noise, 0.0) if len(effects) else 0.0
    shrunk = found.delta.to_numpy() * (spread / (spread + noise) if spread else 0.0)
    mean = np.asarray(tokens.codes.mean(0)).ravel()
    square = np.asarray(tokens.codes.multiply(tokens.codes).mean(0)).ravel()
    deviation = np.sqrt(np.maximum(square - mean**2, 1e-12))
    weight = np.zeros(features.n_features)
    weight[found.feature.to_numpy()] = shrunk / deviation[found.feature.to_numpy()]
    note = "" if np.any(weight) else f"no outcome effect at q <= {config.q:g}: all weights are 1"
    credit = Credit(
        config=config,
        feature=torch.from_numpy(weight).float(),
        pair_keys=torch.empty(0, dtype=torch.int64),
        pair_values=torch.empty(0),
        token=torch.empty(0),
        constant=-float(weight @ mean),
        scale=1.0,
        info={**info, "n_problems": n, "n_features": len(found), "significant": not note, "note": note},
    )
    raw = tokens.raw_scores(credit)
    everything = np.ones(len(raw), dtype=bool)
    return _gated(credit, raw, raw, tokens, everything, np.ones(len(tokens.frame), dtype=bool))


def _gated(
    credit: Credit, raw: np.ndarray, judged: np.ndarray, tokens: ResponseTokens, used: np.ndarray, test: np.ndarray
) -> Credit:
    """The credit with the scale of its raw scores on the tokens used, and whether what is judged holds on test rows."""
    if not credit.significant:
        return credit
    frame = tokens.frame
    mean = np.bincount(tokens.row, judged, len(frame)) / np.maximum(np.bincount(tokens.row, minlength=len(frame)), 1)
    scored = frame.assign(score=mean, success=frame.centred > 0)[test & (frame.centred != 0).to_numpy()]
    sides = scored.pivot_table(index="code", columns="success", values="score", aggfunc="mean").dropna()
    scale = max(float(raw[used].std()), 1e-12)
    differences = (sides[True] - sides[False]).to_numpy()[:, None] / scale
    draws = Draws(n_bootstrap=200, n_permutations=9999, confidence=0.95, seed=credit.config.seed, minimum_effect=0.0)
    inference = paired_inference(differences, np.ones(1), draws)
    difference, p = float(differences.mean()), float(inference.p[0])
    passed = difference > 0 and p <= credit.config.q
    note = (
        ""
        if passed
        else (
            f"scores do not tell success from failure on {len(differences)} held-out problems "
            f"(difference {difference:.3f}, p = {p:.2g}): all weights are 1"
        )
    )
    found = {"difference": difference, "p": p, "n_held_out": len(differences), "significant": passed, "note": note}
    return replace(credit, scale=scale, info={**credit.info, **found})


def _sae_info(features: FeatureTable) -> dict[str, Any]:
    sae = features.info["sae"]
    return {name: sae[name] for name in ("weights", "site", "d_model", "d_sae")}
