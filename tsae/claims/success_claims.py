"""Claims on success: inverted U (a), hard harms (b), drifting difficulty (k), base overtakes (n)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
from scipy.stats import hypergeom

from tsae.base.statistics.intervals import FEWEST
from tsae.claims.evidence import SAMPLE, Evidence, Missing
from tsae.claims.judging import Judgement, Part
from tsae.claims.literature import CLAIMS
from tsae.claims.problem_effects import between, part, those_that_can, within
from tsae.rollouts.config import BandCutoffs
from tsae.rollouts.difficulty import estimate
from tsae.rollouts.schema import BANDS

_SMALL = 0.1
"""Share of a log below which a band counts as hardly trained on."""
_LARGE_K = 8
"""Smallest k that counts as large."""
_BOTH = f"`{SAMPLE}`, which lets the base and every checkpoint answer the same problems"


def inverted_u(run: Evidence) -> Judgement:
    """a: paired by problem between runs that were trained on bands; in one run, gain by the band of the problem."""
    claim = CLAIMS["a"]
    on = {c: band for c in run.diff.final_checkpoints if (band := run.trained_on(c)) is not None}
    trained = set(on.values())
    if "medium" in trained and len(trained) > 1:
        gain = {c: run.success(c) for c in on}
        parts = [
            within(f"{c} (medium) gained more than {other} ({band}).", gain[c], gain[other], _BOTH)
            for c in on
            for other, band in on.items()
            if on[c] == "medium" and band != "medium"
        ]
        lacking = next((band for band in BANDS if band not in trained), None)
        told = f"No run was trained on {lacking} problems alone." if lacking else ""
        return Judgement(claim, tuple(parts), caveat=told, whole=not lacking)
    run.need_bands(*BANDS)
    try:
        shares = run.training_bands
    except Missing:
        shares = None
    if shares is not None and shares.min() < _SMALL:
        told = ", ".join(f"{band} {100 * share:.0f} %" for band, share in shares.items())
        raise Missing(
            f"a training on problems of all bands, or one on each (of this one's responses: {told})",
            "a training on such a mixture, or one a band, all in one series.json (trained_on)",
        )
    parts = []
    for c in run.diff.final_checkpoints:
        gains = {band: (run.success(c, band) - run.success(run.diff.base, band)).dropna() for band in BANDS}
        for band in ("easy", "hard"):
            parts.append(
                between(f"{c} gained more on medium problems than on {band} ones.", gains["medium"], gains[band], _BOTH)
            )
    caveat = (
        "Gains on problems of a band stand in for gains by training on it: easy problems, which the base solves, "
        "cannot gain much."
    )
    return Judgement(claim, tuple(parts), caveat=caveat)


def hard_harms(run: Evidence) -> Judgement:
    """b: success on easy and medium problems, base − checkpoint, of runs that were trained on hard ones."""
    found = run.trained_mostly_on("hard")
    run.need_bands()
    makers = [
        partial(within, f"{c} solves fewer {band} problems than the base.", run.success(run.diff.base, band),
                run.success(c, band), f"problems of that band, and {_BOTH}")
        for c in found
        for band in ("easy", "medium")
    ]  # fmt: skip
    parts, left = those_that_can(makers)
    return Judgement(CLAIMS["b"], parts, caveat=left.strip(), whole=not left)


def difficulty_drifts(run: Evidence) -> Judgement:
    """k: problems that change band beyond chance, between the halves of a log or from the base to a checkpoint.

    A problem's value is 1 if its band changed, 0 if not, − the chance of a change if both sides solve it equally
    often: then its successes fall on the sides as the hypergeometric distribution has it.
    """
    caveat = "Whether an adaptive curriculum beats a static one cannot be tested on one run: it needs both."
    try:
        outline = run.outline
        middle = (outline.step.min() + outline.step.max()) / 2
        sides = [outline[outline.step <= middle], outline[outline.step > middle]]
        parts = [_drift("Between the halves of the log", *map(_counts, sides))]
    except Missing:
        if not run.fresh:
            raise
        frame, base = run.answers.frame, run.diff.base
        parts = [
            _drift(f"Between the base and {c}", *(_counts(frame[frame.policy == who]) for who in (base, c)))
            for c in run.diff.final_checkpoints
        ]
    return Judgement(CLAIMS["k"], tuple(parts), caveat=caveat, whole=False)


def base_overtakes(run: Evidence) -> Judgement:
    """n: pass@k for the largest k that base and checkpoint have responses for, of checkpoints that lead at pass@1."""
    parts: list[Part] = []
    reasons: list[Missing] = []
    sizes, behind = [], []
    frame, base = run.answers.frame, run.diff.base
    for c in run.diff.final_checkpoints:
        of_base, of_c = (_counts(frame[frame.policy == who]) for who in (base, c))
        n = pd.concat([of_base.n, of_c.n], axis=1, join="inner").min(axis=1).sort_values(ascending=False)
        k = int(n.iloc[FEWEST - 1]) if len(n) >= FEWEST else 0
        if k < _LARGE_K:
            reasons.append(
                Missing(
                    f"{_LARGE_K} responses or more of the base and of {c} to {FEWEST} problems or more (there are {k})",
                    "`tsae run … --sample 64 --to OTHER`",
                )
            )
            continue
        if not within("ahead", _pass_at(of_c, 1), _pass_at(of_base, 1), _BOTH).holds:
            behind.append(c)
            continue
        sizes.append(k)
        parts.append(within(f"At pass@{k} the base is ahead of {c}.", _pass_at(of_base, k), _pass_at(of_c, k), _BOTH))
    if not parts and reasons:
        raise reasons[0]
    if not parts:
        raise Missing(
            f"a checkpoint that is clearly ahead at pass@1 ({', '.join(behind)}: none)", "a training that gains"
        )
    told = f"Ahead at pass@1 is not {' nor '.join(behind)}: there is nothing to overtake. " if behind else ""
    small = f"k is {min(sizes)} here; the claim is on k in the hundreds." if min(sizes) < 100 else ""
    left = "".join(f"Left out for lack of {reason.needs}. " for reason in reasons)
    return Judgement(CLAIMS["n"], tuple(parts), caveat=(left + told + small).strip(), whole=not left)


def _drift(between_what: str, before: pd.DataFrame, after: pd.DataFrame) -> Part:
    """More problems change band than by chance."""
    both = before.add_suffix("_a").join(after.add_suffix("_b"), how="inner")
    both = both[(both.n_a > 1) & (both.n_b > 1)]
    values = np.array([_excess(int(r.n_a), int(r.right_a), int(r.n_b), int(r.right_b)) for r in both.itertuples()])
    statement = f"{between_what} more problems change band than by chance."
    return part(
        statement, values, "a log that asks its problems again (two epochs or more), with several responses each"
    )


def _excess(n_a: int, right_a: int, n_b: int, right_b: int) -> float:
    """1 if the band changed, else 0; − the probability of that if both sides had one pass rate."""
    band, solved = BandCutoffs().band, right_a + right_b
    dealt = np.arange(max(0, solved - n_b), min(n_a, solved) + 1)
    chance = hypergeom.pmf(dealt, n_a + n_b, solved, n_a)
    moved = band(dealt / n_a) != band((solved - dealt) / n_b)
    return float(moved[right_a - dealt[0]]) - float(chance[moved].sum())


def _counts(frame: pd.DataFrame) -> pd.DataFrame:
    """Responses of known outcome and successes of every problem: n, right."""
    known = frame[frame.outcome != "unknown"]
    grouped = (known.outcome == "success").groupby(known.problem_id)
    return pd.DataFrame({"n": grouped.size(), "right": grouped.sum()})


def _pass_at(counts: pd.DataFrame, k: int) -> pd.Series:
    return pd.Series(estimate(counts.n.to_numpy(), counts.right.to_numpy(), k), index=counts.index)


SUCCESS: dict[str, Callable[[Evidence], Judgement]] = {
    "a": inverted_u,
    "b": hard_harms,
    "k": difficulty_drifts,
    "n": base_overtakes,
}
