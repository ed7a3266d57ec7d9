"""Claims on families of features: what easy (e), hard (f) and medium problems (g) strengthen.

A family's shift is a correlation. So a claim on families is tested only where the run also has an ablation of features
of the family in that checkpoint: the part on what the features do is the mean over matched random sets − the ablation,
within problems (`tsae.causal`). Shifts are in standard deviations of the family's score over base trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd

from tsae.causal.intervention import Intervention
from tsae.claims.evidence import SAMPLE, Evidence, Missing
from tsae.claims.judging import Judgement, Part
from tsae.claims.literature import CLAIMS
from tsae.claims.problem_effects import part, within
from tsae.diff.comparisons import Rows
from tsae.diff.config import DiffConfig
from tsae.diff.descriptions import NO_FAMILY, family_scores
from tsae.rollouts.behaviours import measures

DIRECT, COMPUTATION, DELIBERATION = "direct-answer", "basic-computation", "deliberation"
"""Families of `tsae.features.mathematics` and of the testbed."""
_ABLATIONS = ("ablate", "mean")
_BOTH = f"`{SAMPLE}`"


def easy_direct(run: Evidence) -> Judgement:
    """e: of runs that were trained on easy problems."""
    parts: list[Part] = []
    for c in run.trained_mostly_on("easy"):
        test = _ablation(run, c, (DIRECT, COMPUTATION))
        scores = _scores(run, c)
        parts += [
            _shift(scores, c, DIRECT, f"{c} strengthened features of direct answers."),
            _shift(scores, c, COMPUTATION, f"{c} strengthened features of basic computation."),
            _shift(scores, c, DELIBERATION, f"{c} weakened features of deliberation.", sign=-1),
            _effect(test, "direct_answer", f"Without such features {c} answers directly less often."),
        ]
    return Judgement(CLAIMS["e"], tuple(parts))


def hard_rare(run: Evidence) -> Judgement:
    """f: of runs that were trained on hard problems."""
    parts: list[Part] = []
    for c in run.trained_mostly_on("hard"):
        test = _ablation(run, c, (DELIBERATION,))
        scores = _scores(run, c)
        hard = scores[(scores.reader == c) & (scores.policy == c) & (scores.band == "hard")]
        success, failure = (
            hard[hard.outcome == outcome].groupby("problem_id")[DELIBERATION].mean()
            for outcome in ("success", "failure")
        )
        parts += [
            _shift(scores, c, DELIBERATION, f"{c} activates features of deliberation more than the base."),
            within(f"On hard problems {c} has them more in successes than in failures.", success, failure, _BOTH),
            _effect(test, "accuracy", f"Without such features {c} succeeds less often."),
        ]
    return Judgement(CLAIMS["f"], tuple(parts))


def medium_both(run: Evidence) -> Judgement:
    """g: of runs that were trained on medium problems."""
    parts: list[Part] = []
    for c in run.trained_mostly_on("medium"):
        test = _ablation(run, c, (COMPUTATION, DELIBERATION))
        scores = _scores(run, c)
        parts += [
            _shift(scores, c, COMPUTATION, f"{c} strengthened features of computation."),
            _shift(scores, c, DELIBERATION, f"{c} strengthened features of multi-step reasoning."),
            _effect(test, "accuracy", f"Without such features {c} succeeds less often."),
        ]
    return Judgement(CLAIMS["g"], tuple(parts))


def _ablation(run: Evidence, checkpoint: str, families: Sequence[str]) -> Intervention:
    """The test that ablated features of these families in a checkpoint.

    Raises:
        Missing: where features have no families, or no such test is there.
    """
    described = run.diff.features
    if "family" not in described:
        raise Missing(
            "families of features",
            "`tsae diff --annotator tsae.features.mathematics:math_classes --families --to ANALYSIS/diff`",
        )
    for test in run.tests:
        info = test.info
        if info["checkpoint"] != checkpoint or info["config"]["mode"] not in _ABLATIONS:
            continue
        if (info.get("sae") or {}).get("weights") != (run.diff.info.get("sae") or {}).get("weights"):
            continue  # Its numbers are those of another SAE's features.
        if info.get("features_encoded_with") not in (None, run.of_answers["rollouts"]):
            continue  # Its features were chosen, and their random controls matched, in other rollouts.
        if described.family.reindex(info["features"]).isin(families).mean() > 0.5:
            return test
    ids = described.index[described.family.isin(families)][:8]
    chosen = f" --choose {' '.join(map(str, ids))}" if len(ids) else ""
    raise Missing(
        f"a causal test that ablates features of {' or '.join(families)} in {checkpoint}, since a correlation is no "
        "verdict",
        f"`tsae causal --checkpoint {checkpoint}{chosen} --to ANALYSIS/causal/NAME`",
    )


def _scores(run: Evidence, checkpoint: str) -> pd.DataFrame:
    """One row a row of the features: problem_id, reader, policy, band, outcome, and the score of every family in
    standard deviations over base trajectories."""
    features, family = run.features, run.diff.features.family
    config = run.diff.info["config"]
    rows = Rows.of(features, DiffConfig(span=config["span"], min_problems=config["min_problems"]))
    base, names = features.readers[0], sorted(set(family) - {NO_FAMILY})
    if lacking := [name for name in (DIRECT, COMPUTATION, DELIBERATION) if name not in names]:
        raise Missing(f"features of {' and '.join(lacking)} (this SAE has none)", "another annotator or a wider SAE")
    table = pd.DataFrame(family_scores(rows, checkpoint, family).toarray(), columns=names)
    unit = table.iloc[rows.by_reader[base, rows.own(base)]].std(ddof=1)
    frame = features.rollouts.frame.iloc[features.trajectory].reset_index(drop=True)
    reader = pd.Series("", index=frame.index)
    for name in features.readers:
        reader.iloc[features.rows(reader=name)] = name
    facts = frame[["problem_id", "policy", "band", "outcome"]].assign(reader=reader)
    return pd.concat([facts, table / unit.where(unit > 0)], axis=1).iloc[rows.n_tokens > 0]


def _shift(scores: pd.DataFrame, checkpoint: str, family: str, statement: str, *, sign: int = 1) -> Part:
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
    if behaviour not in found:
        raise Missing(f"the behaviour {behaviour.replace('_', ' ')} in the causal test", "`tsae causal --describe`")
    frame = test.rollouts.frame
    means = found[behaviour].groupby([frame.problem_id, frame.policy]).mean().unstack()
    random = means[[name for name in means if str(name).startswith("random_")]].mean(axis=1)
    more = "`tsae causal` on more problems (--problems)"
    edited = means.reindex(columns=["features"])["features"]
    return part(statement, (random - edited).dropna().to_numpy(dtype=float), more)


FEATURES: dict[str, Callable[[Evidence], Judgement]] = {"e": easy_direct, "f": hard_rare, "g": medium_both}
