"""Claims on states, steps and samples: sparser when hard (o), coherent (p), errors breed errors (q), pruning (v)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise

import numpy as np
import pandas as pd

from tsae.claims.evidence import SAMPLE, Evidence, Missing
from tsae.claims.judging import Judgement, Part
from tsae.claims.literature import CLAIMS
from tsae.claims.problem_effects import between, part, those_that_can, within
from tsae.errors import TsaeError
from tsae.rollouts.schema import BANDS, problem_bands

_BOTH = f"`{SAMPLE}`"
_CHECK = "`tsae claims … --check module:function` with your own (prompt, response) -> whether each step is right"
_RISES = 0.05
"""Rise in the share of valid solutions that counts as one."""


def sparser_when_hard(run: Evidence) -> Judgement:
    """o: Hoyer's sparsity of the base's state at the last token of the prompt, before anything is answered.

    (√d − ‖x‖₁ / ‖x‖₂) / (√d − 1), 0 if all d entries are as large, 1 if one alone is not 0 (Hoyer 2004).
    """
    run.need_bands()
    sparsity, site = _sparsity(run)
    bands = problem_bands(run.answers.frame)
    of = {band: sparsity[sparsity.index.map(bands) == band] for band in BANDS}
    parts, left = those_that_can(
        [
            partial(between, f"States are sparser on {harder} problems than on {easier} ones.", of[harder], of[easier],
                    "problems of these bands")
            for easier, harder in pairwise(BANDS)
        ]
    )  # fmt: skip
    caveat = (
        f"Measured at {site}, at the last token of the prompt; the claim is on the last layer. Lengths may differ too."
    )
    return Judgement(CLAIMS["o"], parts, caveat=f"{left}{caveat}", whole=not left)


def coherent_not_valid(run: Evidence) -> Judgement:
    """p: share of right steps, and of solutions with right steps alone and a right answer, base and checkpoint."""
    parts: list[Part] = []
    reasons: list[Missing] = []
    for c in run.diff.final_checkpoints:
        before, after = (_steps(run, policy) for policy in (run.diff.base, c))
        if not (before.valid.any() or after.valid.any()):
            needs = f"a valid solution, with right steps alone (neither {run.diff.base} nor {c} has one)"
            reasons.append(Missing(needs, f"problems that they solve now and then, or more responses: {_BOTH}"))
            continue
        parts += [
            within(f"Of {c}’s steps a larger share follows from what precedes them than of the base’s.",
                   _mean(after, "right"), _mean(before, "right"), _BOTH),
            within(f"{c}’s share of valid solutions is not over {100 * _RISES:.0f} points larger than the base’s.",
                   _mean(before, "valid"), _mean(after, "valid"), _BOTH, margin=-_RISES),
        ]  # fmt: skip
    if not parts:
        raise reasons[0]
    left = "".join(f"Left out for lack of {reason.needs}. " for reason in reasons).strip()
    return Judgement(CLAIMS["p"], tuple(parts), caveat=left, whole=not left)


def errors_breed_errors(run: Evidence) -> Judgement:
    """q: chance of a wrong step after an earlier one − without one, at the same place of responses to one problem."""
    table = _steps(run, run.diff.base)
    rows = [
        (problem, place, any(not one for one in steps[:place]), not right)
        for problem, steps in zip(table.problem_id, table.steps, strict=True)
        for place, right in enumerate(steps)
        if place
    ]
    found = pd.DataFrame(rows, columns=["problem_id", "place", "after", "wrong"])
    rates = (
        found.groupby(["problem_id", "place", "after"]).wrong.mean().unstack().reindex(columns=[False, True]).dropna()
    )
    values = (rates[True] - rates[False]).groupby("problem_id").mean().to_numpy()
    statement = "After an error of its own the base errs more, at the same step of the same problem."
    caveat = "Responses may differ in more than the error: only putting errors into the context tells."
    return Judgement(
        CLAIMS["q"], (part(statement, values, f"`{SAMPLE}` with more responses"),), caveat=caveat, whole=False
    )


def pruning_easy(run: Evidence) -> Judgement:
    """v: shares of easy problems, each the sum over its samples, in right against wrong responses."""
    found = run.attribution
    run.need_bands()
    again = "`tsae attribute … --to ANALYSIS/attribution`"
    table = found.samples[found.samples.target.str.contains("right − wrong")]
    if table.empty or found.info["gate"]:
        raise Missing("shares in right against wrong responses in an attribution that can be believed", again)
    share = table.groupby("trajectory").share.sum() / table.target.nunique()
    of = share.groupby(found.facts.drop_duplicates("trajectory").set_index("trajectory").problem_id).sum()
    easy = of[of.index.map(problem_bands(found.facts)) == "easy"]
    statement = "Samples of an easy problem made right responses less likely against wrong ones (share)."
    return Judgement(
        CLAIMS["v"],
        (part(statement, -easy.to_numpy(dtype=float), f"a log with more easy problems, and {again}"),),
        caveat="A share is what the samples did in this run, not what a run without them would have done. The claim is "
        "on two amounts of data, and a run has one.",
        whole=False,
    )


def _sparsity(run: Evidence) -> tuple[pd.Series, str]:
    """Hoyer's sparsity by problem_id, and the site."""
    store, base = run.store, run.diff.base
    site = next(iter(store.manifest["sites"]))
    ids = store.rollouts.table["problem_id"].to_numpy()
    special = frozenset(store.manifest["special_ids"])
    found: dict[str, float] = {}
    for outline in store.outlines():
        wanted = [i for i, row in enumerate(outline.trajectory) if ids[row] not in found]
        if outline.reader != base or not wanted:
            continue
        shard = outline.checked()
        last = np.flatnonzero(shard.token_span(store.rollouts, "last_prompt", special))
        place = np.searchsorted(shard.offsets, last, side="right") - 1
        chosen = last[np.isin(place, wanted)]
        states = shard.read(site, chosen).astype(np.float64)
        root = states.shape[1] ** 0.5
        sizes = np.abs(states).sum(1) / np.linalg.norm(states, axis=1)
        rows = shard.trajectory[np.searchsorted(shard.offsets, chosen, side="right") - 1]
        for row, value in zip(rows, (root - sizes) / (root - 1), strict=True):
            found.setdefault(ids[row], float(value))
    return pd.Series(found, dtype=float), site


def _steps(run: Evidence, policy: str) -> pd.DataFrame:
    """A policy's responses with steps: problem_id, steps (right or wrong each), right (their share) and valid."""
    if run.check is None:
        raise Missing("to know which steps of a response are right", _CHECK)
    frame = run.answers.frame
    mine = frame[(frame.policy == policy) & (frame.outcome != "unknown")]
    if mine.empty or mine.response.isna().any():
        raise Missing(f"responses of {policy} with texts", _BOTH)
    steps = [
        _checked(run.check(prompt or "", response)) for prompt, response in zip(mine.prompt, mine.response, strict=True)
    ]
    right = np.array([np.mean(some) if some else np.nan for some in steps], dtype=float)
    valid = (right == 1) & (mine.outcome == "success").to_numpy()
    return pd.DataFrame({"problem_id": mine.problem_id, "steps": steps, "right": right, "valid": valid.astype(float)})


def _checked(found: object) -> list[bool]:
    """What a check of steps returned."""
    steps = list(found) if isinstance(found, Iterable) else [found]
    if not all(isinstance(one, int | np.bool_ | np.integer) and one in (0, 1) for one in steps):
        raise TsaeError(
            f"the check of steps returned {str(found)[:80]}, expected a list of true and false, one a step",
            where="check",
            fix="Let the function (prompt, response) say of each step whether it is right.",
        )
    return [bool(one) for one in steps]


def _mean(table: pd.DataFrame, name: str) -> pd.Series:
    return table[name].groupby(table.problem_id).mean()


CHECKED = ("p", "q")
"""Claims that need to know which steps are right."""
INSIDE: dict[str, Callable[[Evidence], Judgement]] = {
    "o": sparser_when_hard,
    "p": coherent_not_valid,
    "q": errors_breed_errors,
    "v": pruning_easy,
}
