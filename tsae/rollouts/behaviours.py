"""Behaviours: what single responses do, and how that differs between policies and bands.

`with_behaviours` reads every response's text (`tsae.rollouts.texts`); `behaviour_table` averages these and any other
columns that the table names as behaviours; `format_table` tells how concentrated formats are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from tsae.base.intervals import FEWEST, change_interval, jackknife_interval, mean_interval
from tsae.errors import TsaeError
from tsae.rollouts.table import BANDS, Rollouts
from tsae.rollouts.texts import final_answers, loop_share, operations, repeated_ngrams, response_format

RequiredSteps = Callable[[str, str], "int | None"]
"""(prompt, reference answer) -> operations that a solution needs, None where that is not known."""


def with_behaviours(
    rollouts: Rollouts, *, required_steps: RequiredSteps | None = None, reference: str | None = None
) -> Rollouts:
    """Add what the texts of the responses show, and name the columns as behaviours.

    - looping: a stretch of text comes three times or more in a row, over 40 characters or more;
    - repeated_4grams: 1 − distinct / all 4-grams of words, which also tells repetition with small changes;
    - repeated_answer: the same final answer is stated twice in the same way;
    - unanswered: no final answer is stated in any known way;
    - direct_answer: an answer with neither an operation nor a sentence that leads to it;
    - skipped_steps: share of the required operations that are not written out, where `required_steps`, or a column of
      that name (extra/required_steps of an import), says how many there are. A shorter solution than the one that was
      counted skips some, too;
    - relative_length: tokens of the response / median tokens of the other successful responses to the same problem;
    - format (text; see `format_table`).

    Columns that are there already are kept: what a table knows is better than what can be read off its texts.

    Args:
        rollouts: with texts of responses.
        required_steps: how many operations a problem needs.
        reference: the policy whose successful responses set a problem's usual length; None takes all policies'.

    Raises:
        TsaeError: where a response has no text, or the reference sampled nothing.
    """
    frame = rollouts.frame
    missing = int(frame.response.isna().sum())
    if missing:
        raise TsaeError(
            f"{missing} responses have no text", where=rollouts.origin, fix="Import the log with its texts, or decode."
        )
    if reference is not None and reference not in rollouts.policies:
        raise TsaeError(f"no policy {reference!r}; there are {', '.join(rollouts.policies)}", where=rollouts.origin)
    texts = frame.response.tolist()
    answers = [final_answers(text) for text in texts]
    formats = [response_format(text) for text in texts]
    measured: dict[str, Any] = {
        "looping": [float(loop_share(text) > 0) for text in texts],
        "repeated_4grams": [repeated_ngrams(text) for text in texts],
        "repeated_answer": [float(len(set(stated)) < len(stated)) for stated in answers],
        "unanswered": [float(not stated) for stated in answers],
        "direct_answer": [
            float(bool(stated) and name.startswith("none,")) for stated, name in zip(answers, formats, strict=True)
        ],
        "skipped_steps": _skipped(frame, required_steps),
        "relative_length": _relative_length(frame, reference),
        "format": formats,
    }
    named = list(rollouts.info.get("behaviours", []))
    for name, values in measured.items():
        if name in frame.columns or (name != "format" and np.isnan(np.asarray(values, dtype=float)).all()):
            continue
        rollouts = rollouts.with_column(name, values if name == "format" else np.asarray(values, dtype=float))
        named += [name] if name not in ("format", *named) else []
    return Rollouts(rollouts.table, {**rollouts.info, "behaviours": named}, rollouts.origin)


def behaviour_table(rollouts: Rollouts, *, reference: str | None = None, confidence: float = 0.95) -> pd.DataFrame:
    """Means with intervals over problems (`tsae.base.intervals`), and their changes against a reference.

    Args:
        rollouts: ``info["behaviours"]`` names further numeric or boolean columns to average.
        reference: the policy that others are compared with; None compares none.
        confidence: of the intervals.

    Returns:
        tidy: policy, band ("all" and every band present), behaviour, mean, low, high, n_problems, n_trajectories, and
        change, change_low, change_high: the mean over the n_paired problems that both policies answered of the
        difference within the problem, with its interval, NaN for fewer than 8 problems. NaN for the reference itself.
        Means are over problems of the mean over a problem's trajectories; missing values are left out. A single
        problem has no interval (NaN).
    """
    frame = rollouts.frame
    measured = measures(rollouts)
    rows: list[dict[str, Any]] = []
    bands = [band for band in BANDS if (frame.band == band).any()]
    for band in ("all", *bands):
        inside = (frame.band == band) | (band == "all")
        by_policy = {
            policy: measured[inside & (frame.policy == policy)].groupby(frame.problem_id).mean()
            for policy in rollouts.policies
        }
        for policy, by_problem in by_policy.items():
            for name in measured:
                values = by_problem[name].dropna()
                if values.empty:
                    continue
                low, high = mean_interval(values.to_numpy(), confidence)
                row = {"policy": policy, "band": band, "behaviour": name, "mean": values.mean(), "low": low}
                row |= {"high": high, "n_problems": len(values)}
                row["n_trajectories"] = int((inside & (frame.policy == policy)).sum())
                if reference in by_policy and policy != reference:
                    row |= _change(values - by_policy[reference][name], confidence)
                rows.append(row)
    table = pd.DataFrame(rows, columns=_COLUMNS)
    order = {policy: position for position, policy in enumerate(rollouts.policies)}
    return table.sort_values("policy", key=lambda p: p.map(order), kind="stable", ignore_index=True)


_COLUMNS = [
    "policy", "band", "behaviour", "mean", "low", "high", "n_problems", "n_trajectories", "change", "change_low",
    "change_high", "n_paired",
]  # fmt: skip


def _change(difference: pd.Series, confidence: float) -> dict[str, Any]:
    paired = difference.dropna().to_numpy()
    if not len(paired):
        return {"n_paired": 0}
    low, high = change_interval(paired, confidence)
    return {"change": paired.mean(), "change_low": low, "change_high": high, "n_paired": len(paired)}


def measures(rollouts: Rollouts) -> pd.DataFrame:
    """One row a trajectory: accuracy, response_length in tokens, truncated where any is, and the table's behaviours.

    Raises:
        TsaeError: where the table names a behaviour that it has no column of.
    """
    frame = rollouts.frame
    measures = pd.DataFrame(
        {
            "accuracy": (frame.outcome == "success").where(frame.outcome != "unknown").astype(float),
            "response_length": frame.response_length.astype(float),
        }
    )
    if (frame.finish_reason == "length").any():
        known = frame.finish_reason.isin(["stop", "length"])
        measures["truncated"] = (frame.finish_reason == "length").astype(float).where(known)
    for name in rollouts.info.get("behaviours", []):
        if name not in frame.columns:
            raise TsaeError(
                f"names the behaviour {name!r} but has no such column", where=rollouts.origin, fix="Add that column."
            )
        measures[name] = frame[name].astype(float)
    return measures


def format_table(rollouts: Rollouts, *, reference: str | None = None, confidence: float = 0.95) -> pd.DataFrame:
    """How concentrated the formats of responses are, by policy and band.

    Every problem counts the same: formats are shared out within a problem first, then over problems.

    Args:
        rollouts: with a column format; otherwise it is read off the texts (`tsae.rollouts.texts.response_format`).
        reference: the policy that others are compared with, on the problems that both answered.
        confidence: of the intervals over problems.

    Returns:
        policy, band, n_problems, n_trajectories, n_formats, top_format and top_share, entropy of the formats in bits
        with low and high, and change, change_low, change_high of the entropy over the n_paired problems of both, the
        interval NaN for fewer than 8. The entropy of few responses is too low
        by about (formats − 1) / (2 ln 2 · responses) bits (Miller 1955); compare like numbers of responses.
    """
    frame = rollouts.frame
    format = frame["format"] if "format" in frame.columns else frame.response.fillna("").map(response_format)
    rows: list[dict[str, Any]] = []
    for band in ("all", *(b for b in BANDS if (frame.band == b).any())):
        inside = (frame.band == band) | (band == "all")
        if not inside.any():
            continue
        shares = {
            policy: pd.crosstab(frame.problem_id[picked], format[picked], normalize="index")
            for policy in rollouts.policies
            if (picked := inside & (frame.policy == policy)).any()
        }
        for policy, table in shares.items():
            pooled = table.mean()
            entropy, low, high = _entropy_interval(table, confidence)
            row = {"policy": policy, "band": band, "n_problems": len(table)}
            row["n_trajectories"] = int((inside & (frame.policy == policy)).sum())
            row |= {"n_formats": int((pooled > 0).sum()), "top_format": pooled.idxmax(), "top_share": pooled.max()}
            row |= {"entropy": entropy, "low": low, "high": high}
            if reference in shares and policy != reference:
                row |= _entropy_change(shares[reference], table, confidence)
            rows.append(row)
    order = {policy: position for position, policy in enumerate(rollouts.policies)}
    found = pd.DataFrame(rows, columns=_FORMAT_COLUMNS)
    return found.sort_values("policy", key=lambda p: p.map(order), kind="stable", ignore_index=True)


_FORMAT_COLUMNS = [
    "policy", "band", "n_problems", "n_trajectories", "n_formats", "top_format", "top_share", "entropy", "low", "high",
    "change", "change_low", "change_high", "n_paired",
]  # fmt: skip


def _entropies(shares: np.ndarray) -> np.ndarray:
    """(…,) entropy in bits of (…, n_formats) shares."""
    return np.maximum(-(shares * np.log2(np.where(shares > 0, shares, 1.0))).sum(-1), 0.0)


def _without_each(shares: np.ndarray) -> np.ndarray:
    """(n_problems,) entropy of the mean of (n_problems, n_formats) shares without each of the problems."""
    return _entropies((shares.sum(0) - shares) / (len(shares) - 1))


def _entropy_interval(table: pd.DataFrame, confidence: float) -> tuple[float, float, float]:
    shares = table.to_numpy()
    entropy = float(_entropies(shares.mean(0)))
    if len(shares) < 2:
        return entropy, np.nan, np.nan
    low, high = jackknife_interval(entropy, _without_each(shares), confidence)
    return entropy, max(low, 0.0), high


def _entropy_change(before: pd.DataFrame, after: pd.DataFrame, confidence: float) -> dict[str, float]:
    both = before.index.intersection(after.index)
    if len(both) < 2:
        return {"n_paired": len(both)}
    a, b = before.loc[both].to_numpy(), after.loc[both].to_numpy()
    found = {"change": float(_entropies(b.mean(0)) - _entropies(a.mean(0))), "n_paired": len(both)}
    if len(both) < FEWEST:
        return found
    low, high = jackknife_interval(found["change"], _without_each(b) - _without_each(a), confidence)
    return found | {"change_low": low, "change_high": high}


def _skipped(frame: pd.DataFrame, required_steps: RequiredSteps | None) -> np.ndarray:
    if required_steps is not None:
        pairs = frame[["prompt", "answer"]].fillna("").itertuples(index=False)
        cache: dict[tuple[str, str], int | None] = {}
        required = np.array([_cached(cache, required_steps, *pair) for pair in pairs], dtype=float)
    elif named := [name for name in ("required_steps", "extra/required_steps") if name in frame.columns]:
        required = pd.to_numeric(frame[named[0]], errors="coerce").to_numpy(dtype=float)
    else:
        return np.full(len(frame), np.nan)
    written = np.array([operations(text) for text in frame.response])
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(required > 0, np.clip(1 - written / required, 0, 1), np.nan)


def _cached(
    cache: dict[tuple[str, str], int | None], required_steps: RequiredSteps, prompt: str, answer: str
) -> int | None:
    if (prompt, answer) not in cache:
        cache[prompt, answer] = required_steps(prompt, answer)
    return cache[prompt, answer]


def _relative_length(frame: pd.DataFrame, reference: str | None) -> np.ndarray:
    counts = (frame.outcome == "success") & ((frame.policy == reference) if reference else True)
    found = np.full(len(frame), np.nan)
    length = frame.response_length.to_numpy(dtype=float)
    positions: Mapping[Any, np.ndarray] = frame.groupby("problem_id").indices
    for rows in positions.values():
        successes = rows[counts.to_numpy()[rows]]
        for row in rows:
            others = length[successes[successes != row]]
            if len(others):
                found[row] = length[row] / np.median(others)
    return found
