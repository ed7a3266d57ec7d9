"""Claims on features (e to g), states, steps and samples (o, p, q, v), and those that compare trainings (h, i, …).

A family's shift is a correlation. So a claim on families is tested only where the run also has an ablation of features
of the family in that checkpoint: the part on what the features do is the mean over matched random sets − the ablation,
within problems (`tsae.causal`). Shifts are in standard deviations of the family's score over base trajectories."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import pandas as pd

from tsae.causal.intervention import Intervention
from tsae.claims.evidence import SAMPLE, Evidence, Missing, by_problem, need
from tsae.claims.judging import CLAIMS, Judgement, Part, between, left_out, part, those_that_can, within
from tsae.diff.comparisons import Rows
from tsae.diff.config import DiffConfig
from tsae.diff.descriptions import NO_FAMILY, family_scores
from tsae.errors import refuse
from tsae.rollouts.behaviours import measures
from tsae.rollouts.schema import BANDS, problem_bands

DIRECT, COMPUTATION, DELIBERATION = "direct-answer", "basic-computation", "deliberation"
"""Families of `tsae.features.mathematics` and of the testbed."""
_ABLATIONS = ("ablate", "mean")
_BOTH = f"`{SAMPLE}`"


_OF_BANDS: dict[str, tuple[str, tuple[str, ...], Sequence[tuple[str, int, str]], str, str]] = {
    "e": (
        "easy",
        (DIRECT, COMPUTATION),
        [
            (DIRECT, 1, "{} strengthened features of direct answers."),
            (COMPUTATION, 1, "{} strengthened features of basic computation."),
            (DELIBERATION, -1, "{} weakened features of deliberation."),
        ],
        "direct_answer",
        "Without such features {} answers directly less often.",
    ),
    "f": (
        "hard",
        (DELIBERATION,),
        [(DELIBERATION, 1, "{} activates features of deliberation more than the base.")],
        "accuracy",
        "Without such features {} succeeds less often.",
    ),
    "g": (
        "medium",
        (COMPUTATION, DELIBERATION),
        [
            (COMPUTATION, 1, "{} strengthened features of computation."),
            (DELIBERATION, 1, "{} strengthened features of multi-step reasoning."),
        ],
        "accuracy",
        "Without such features {} succeeds less often.",
    ),
}
"""By claim: the band that runs were trained on, the families to ablate, shifts of families with their direction, the
behaviour that the ablation lowers, and that in a sentence."""


def families_of_band(key: str, run: Evidence) -> Judgement:
    """e, f and g: of runs that were trained on easy, hard and medium problems."""
    band, families, shifts, behaviour, without = _OF_BANDS[key]
    parts: list[Part] = []
    for c in run.trained_mostly_on(band):
        test = _ablation(run, c, families)
        scores = _scores(run, c)
        parts += [_shift(scores, c, family, told.format(c), sign=sign) for family, sign, told in shifts]
        if key == "f":
            hard = scores[(scores.reader == c) & (scores.policy == c) & (scores.band == "hard")]
            success, failure = (
                hard[hard.outcome == outcome].groupby("problem_id")[DELIBERATION].mean()
                for outcome in ("success", "failure")
            )
            told = f"On hard problems {c} has them more in successes than in failures."
            parts.append(within(told, success, failure, _BOTH))
        parts.append(_effect(test, behaviour, without.format(c)))
    return Judgement(CLAIMS[key], tuple(parts))


def _ablation(run: Evidence, checkpoint: str, families: Sequence[str]) -> Intervention:
    """The test that ablated features of these families in a checkpoint.

    Raises:
        Missing: where features have no families, or no such test is there.
    """
    described = run.diff.features
    again = "`tsae diff --annotator tsae.features.mathematics:math_classes --families --to ANALYSIS/diff`"
    need("family" in described, "families of features", again)
    for test in run.tests:
        info = test.info
        if info["checkpoint"] != checkpoint or info["config"]["mode"] not in _ABLATIONS:
            continue
        if (info.get("sae") or {}).get("weights") != run.diff.made_from["sae"]:
            continue  # Its numbers are those of another SAE's features.
        if info.get("features_encoded_with") not in (None, run.of_answers["rollouts"]):
            continue  # Its features were chosen, and their random controls matched, in other rollouts.
        if described.family.reindex(info["features"]).isin(families).mean() > 0.5:
            return test
    ids = described.index[described.family.isin(families)][:8]
    chosen = f" --choose {' '.join(map(str, ids))}" if len(ids) else ""
    needs = f"a causal test that ablates features of {' or '.join(families)} in {checkpoint}, since a correlation is "
    add = f"`tsae causal --checkpoint {checkpoint}{chosen} --to ANALYSIS/causal/NAME`"
    raise Missing(f"{needs}not a verdict", add)


def _scores(run: Evidence, checkpoint: str) -> pd.DataFrame:
    """One row a row of the features: problem_id, reader, policy, band, outcome, and the score of every family in
    standard deviations over base trajectories."""
    features, family = run.features, run.diff.features.family
    config = run.diff.info["config"]
    rows = Rows.of(features, DiffConfig(span=config["span"], min_problems=config["min_problems"]))
    base, names = features.readers[0], sorted(set(family) - {NO_FAMILY})
    lacking = " and ".join(name for name in (DIRECT, COMPUTATION, DELIBERATION) if name not in names)
    need(not lacking, f"features of {lacking} (this SAE has none)", "another annotator or a wider SAE")
    table = pd.DataFrame(family_scores(rows, checkpoint, family).toarray(), columns=names)
    unit = table.iloc[rows.by_reader[base, rows.own(base)]].std(ddof=1)
    frame = features.rollouts.frame.iloc[features.trajectory].reset_index(drop=True)
    reader = pd.Series("", index=frame.index)
    for name in features.readers:
        reader.iloc[features.rows(reader=name)] = name
    facts = frame[["problem_id", "policy", "band", "outcome"]].assign(reader=reader)
    return pd.concat([facts, table / unit.where(unit > 0)], axis=1).iloc[rows.n_tokens > 0]


def _shift(scores: pd.DataFrame, checkpoint: str, family: str, statement: str, *, sign: int) -> Part:
    """The family's total shift: the checkpoint on its own responses − the base on its own."""
    base = str(scores.reader.iloc[0])
    after, before = (
        scores[(scores.reader == who) & (scores.policy == who)].groupby("problem_id")[family].mean()
        for who in (checkpoint, base)
    )
    return within(statement, sign * after, sign * before, _BOTH)


def _effect(test: Intervention, behaviour: str, statement: str) -> Part:
    """How far an ablation lowers a behaviour below what ablating matched random features leaves."""
    found = measures(test.rollouts)
    called = f"the behaviour {behaviour.replace('_', ' ')} in the causal test"
    need(behaviour in found, called, "`tsae causal --describe`")
    frame = test.rollouts.frame
    means = found[behaviour].groupby([frame.problem_id, frame.policy]).mean().unstack()
    random = means[[name for name in means if str(name).startswith("random_")]].mean(axis=1)
    more = "`tsae causal` on more problems (--problems)"
    edited = means.reindex(columns=["features"])["features"]
    return part(statement, (random - edited).dropna().to_numpy(dtype=float), more)


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
                   by_problem(after, "right"), by_problem(before, "right"), _BOTH),
            within(f"{c}’s share of valid solutions is not over {100 * _RISES:.0f} points larger than the base’s.",
                   by_problem(before, "valid"), by_problem(after, "valid"), _BOTH, margin=-_RISES),
        ]  # fmt: skip
    if not parts:
        raise reasons[0]
    left = left_out(reasons).strip()
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
    caveat = "Responses may differ in more than the error: only errors that are put into the context can show it."
    return Judgement(
        CLAIMS["q"], (part(statement, values, f"`{SAMPLE}` with more responses"),), caveat=caveat, whole=False
    )


def pruning_easy(run: Evidence) -> Judgement:
    """v: shares of easy problems, each the sum over its samples, in right against wrong responses."""
    found = run.attribution
    run.need_bands()
    again = "`tsae attribute … --to ANALYSIS/attribution`"
    table = found.samples[found.samples.target.str.contains("right − wrong")]
    believed = len(table) and not found.info["gate"]
    need(believed, "shares in right against wrong responses in an attribution that can be believed", again)
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
    if (check := run.check) is None:
        raise Missing("to know which steps of a response are right", _CHECK)
    frame = run.answers.frame
    mine = frame[(frame.policy == policy) & (frame.outcome != "unknown")]
    need(len(mine) and mine.response.notna().all(), f"responses of {policy} with texts", _BOTH)
    steps = [_checked(check(prompt or "", text)) for prompt, text in zip(mine.prompt, mine.response, strict=True)]
    right = np.array([np.mean(some) if some else np.nan for some in steps], dtype=float)
    valid = (right == 1) & (mine.outcome == "success").to_numpy()
    return pd.DataFrame({"problem_id": mine.problem_id, "steps": steps, "right": right, "valid": valid.astype(float)})


def _checked(found: object) -> list[bool]:
    """What a check of steps returned."""
    steps = list(found) if isinstance(found, Iterable) else [found]
    odd = not all(isinstance(one, int | np.bool_ | np.integer) and one in (0, 1) for one in steps)
    what = f"the check of steps returned {str(found)[:80]}, expected a list of true and false, one a step"
    refuse("check", (odd, what, "Let the function (prompt, response) say of each step whether it is right."))
    return [bool(one) for one in steps]
