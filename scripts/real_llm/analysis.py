"""Features of the base and of the runs' ends: a T-SAE on what they answered, families of features, and ablations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

import tsae
from tsae.attribution.attribution import Attribution
from tsae.causal.findings import Tested
from tsae.causal.intervene import intervene
from tsae.causal.intervention import Intervention
from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.series import CheckpointSeries
from tsae.claims.judging import Judgement, Part
from tsae.claims.literature import CLAIMS
from tsae.diff.feature_diff import FeatureDiff
from tsae.errors import TsaeError
from tsae.features.feature_table import FeatureTable
from tsae.features.sparse_matrices import row_blocks
from tsae.pipeline import Choice, analyse
from tsae.rollouts.behaviours import measures
from tsae.rollouts.rewards import last_number
from tsae.rollouts.table import Rollouts
from tsae.sae.model import TemporalSAE

CLASSES = ("other", "answer at once", "answer after steps", "step", "result")
FAMILIES = {
    "direct-answer": ("answer at once",),
    "basic-computation": ("result",),
    "deliberation": ("step",),
}
"""Answering without a step, computing a step's result, and writing the next step."""
DIRECT, COMPUTATION, DELIBERATION = FAMILIES
UNTESTED = "Not tested: "
"""Begins the caveat of a judgement that lacks parts of its claim; in early records it alone says so."""
ABLATED = {"easy": (DIRECT, "direct_answer"), "medium": (DELIBERATION, "accuracy"), "hard": (DELIBERATION, "accuracy")}
"""By band of the training: the family that is ablated in its end, and what that should lower."""
_PART = re.compile(r"(?P<step>\d+[+-]\d+)(?P<result>=\d+)|(?P<answer>Answer.*)", re.DOTALL)


def word_classes(prompt: str, response: Sequence[str]) -> list[str]:
    """An annotator: the class of every response token, by its first character that is no space."""
    text = "".join(response)
    of = ["other"] * (len(text) + 1)
    steps = False
    for match in _PART.finditer(text):
        if match["answer"] is None:
            steps = True
            of[match.start("step") : match.end("step")] = ["step"] * len(match["step"])
            of[match.start("result") : match.end("result")] = ["result"] * len(match["result"])
        else:
            name = "answer after steps" if steps else "answer at once"
            of[match.start() : match.end()] = [name] * (match.end() - match.start())
    found, start = [], 0
    for token in response:
        found.append(of[start + len(token) - len(token.lstrip())])
        start += len(token)
    return found


def analyse_ends(
    ends: Mapping[str, Checkpoint],
    rollouts: Rollouts,
    to: Path,
    *,
    d_sae: int,
    tokens: int,
    n_random: int,
    samples: int,
    attribute: Any = None,
) -> tuple[FeatureDiff, list[Intervention]]:
    """The pipeline on the base and the ends of the runs, with an ablation in the first run of every band.

    Args:
        ends: the base and the runs' ends, by name ("hard-0").
        rollouts: their responses to held-out problems, with bands.
        to: folder.
        d_sae: width of the SAE.
        tokens: that it is trained on.
        n_random: sets of matched random features in an ablation.
        samples: responses to a problem of the run's own band in an ablation.
        attribute: see `tsae.pipeline.analyse`.
    """
    series = CheckpointSeries(tuple(ends.values()), name="llm-bands")

    def ablations(sae: TemporalSAE, _store: Any, features: FeatureTable, diff: FeatureDiff) -> Tested:
        tests, why = [], ""
        for name in ends:
            band, _, seed = name.partition("-")
            if band not in ABLATED or seed != min(n.partition("-")[2] for n in ends if n.startswith(f"{band}-")):
                continue
            folder = to / "causal" / f"ablate-{name}"
            if not (folder / "causal.json").is_file():
                (to / "report.html").unlink(missing_ok=True)
                try:
                    ablate(series[name], band, sae, features, diff, n_random, samples).save(folder)
                except TsaeError as error:
                    why = f"{name}: {error.what}"
                    continue
            tests.append(Intervention.load(folder))
        return Tested(tuple(tests), len(ABLATED), why)

    training = tsae.TrainingConfig(tokens=tokens, batch_tokens=1024)
    to.mkdir(parents=True, exist_ok=True)
    rollouts.write(to / "rollouts.parquet")  # for the claims of the run
    diff, _ = analyse(
        series,
        rollouts,
        to,
        choose=lambda store: Choice(tsae.SAEConfig(d_sae=d_sae, k=16), training),
        annotator=word_classes,
        families=FAMILIES,
        attribute=attribute,
        test=ablations,
        title="What easy, medium and hard word problems did to SmolLM2-135M",
        say=lambda stage, line, **_: print(f"{stage}: {line}", flush=True),
        progress=False,
    )
    tests = [Intervention.load(file.parent) for file in sorted((to / "causal").glob("*/causal.json"))]
    return diff, tests


def ablate(
    checkpoint: Checkpoint,
    band: str,
    sae: TemporalSAE,
    features: FeatureTable,
    diff: FeatureDiff,
    n_random: int,
    samples: int,
) -> Intervention:
    """Ablate the eight features with the largest shares in a family, on the problems of the band.

    Raises:
        TsaeError: where the family has no feature.
    """
    family = ABLATED[band][0]
    own = diff.features[diff.features.family == family].sort_values("family_share", ascending=False)
    if own.empty:
        raise TsaeError(f"no feature of {family}", where="ablate", fix="Train a wider SAE, or on more tokens.")
    longest = int(features.rollouts.lengths("response_ids").max())
    config = tsae.InterventionConfig(
        mode="ablate",
        tokens="predicting",
        n_random=n_random,
        sampling=tsae.SamplingConfig(n_samples=samples, max_new_tokens=longest, batch_size=64, seed=5),
    )
    return intervene(
        checkpoint,
        sae,
        features,
        tuple(int(f) for f in own.index[:8]),
        config,
        problems=features.rollouts.where(band=band),
        verify=last_number,
        progress=False,
    )


def judge_features(features: FeatureTable, diff: FeatureDiff, tests: Sequence[Intervention]) -> dict[str, Judgement]:
    """Claims e, f and g: shifts of families on own responses, by problem, and what ablations do."""
    family, scores = diff.features.family, None
    present = set(family)
    if missing := [name for name in FAMILIES if name not in present]:
        needs = f"features of {' and '.join(missing)}, of which this SAE has none"
        return {key: Judgement(CLAIMS[key], needs=needs, add="A wider SAE, or one of more tokens.") for key in "efg"}
    scores = family_scores(features, family)
    parts: dict[str, list[Part]] = {"e": [], "f": [], "g": []}
    for reader in features.readers[1:]:
        band = reader.partition("-")[0]
        if band == "easy":
            parts["e"] += [
                _shift(scores, reader, DIRECT, f"{reader} strengthened features of direct answers."),
                _shift(scores, reader, COMPUTATION, f"{reader} strengthened features of computation."),
                _shift(scores, reader, DELIBERATION, f"{reader} weakened features of writing steps.", sign=-1),
            ]
        elif band == "hard":
            parts["f"].append(
                _shift(scores, reader, DELIBERATION, f"{reader} activates features of writing steps more.")
            )
            parts["f"] += _within(scores, reader)
        elif band == "medium":
            parts["g"] += [
                _shift(scores, reader, COMPUTATION, f"{reader} strengthened features of computation."),
                _shift(scores, reader, DELIBERATION, f"{reader} strengthened features of writing steps."),
            ]
    for test in tests:
        name = test.info["checkpoint"]
        band = name.partition("-")[0]
        key, (ablated, behaviour) = {"easy": "e", "medium": "g", "hard": "f"}[band], ABLATED[band]
        what = "answers directly less often" if behaviour == "direct_answer" else "succeeds less often"
        parts[key] += _effect(test, behaviour, f"Without features of {ablated} {name} {what} than without random ones.")
    untested: dict[str, list[str]] = {key: [] for key in parts}
    for key, own in parts.items():
        if not any("Without" in part.statement for part in own):
            untested[key].append("ablations")
    if not any("successes" in part.statement for part in parts["f"]):
        untested["f"].append("successes against failures, since too few hard problems have both")
    return {
        key: Judgement(
            CLAIMS[key],
            tuple(own),
            caveat=f"{UNTESTED}{'; '.join(untested[key])}." if untested[key] else "",
            whole=not untested[key],
        )
        for key, own in parts.items()
    }


def family_scores(features: FeatureTable, family: pd.Series) -> pd.DataFrame:
    """One row a row of the features: reader, policy, problem_id, band, outcome, and a score a family: the mean of its
    features, each in its standard deviation over the base's own responses, the whole in its own deviation there."""
    frame = features.rollouts.frame.iloc[features.trajectory].reset_index(drop=True)
    facts = frame[["problem_id", "policy", "band", "outcome"]].assign(reader="")
    for name in features.readers:
        facts.loc[features.rows(reader=name), "reader"] = name
    base = ((facts.reader == features.readers[0]) & (facts.policy == features.readers[0])).to_numpy()
    values = sp.vstack([block for _, block in row_blocks(features.row_means())], format="csc")
    for name in FAMILIES:
        own = values[:, np.flatnonzero(family.to_numpy() == name)].toarray()
        deviation = own[base].std(0, ddof=1)
        score = (own[:, deviation > 0] / deviation[deviation > 0]).mean(1)
        facts[name] = score / score[base].std(ddof=1)
    return facts


def _own(scores: pd.DataFrame, who: str) -> pd.DataFrame:
    return scores[(scores.reader == who) & (scores.policy == who)]


def _shift(scores: pd.DataFrame, reader: str, family: str, statement: str, *, sign: int = 1) -> Part:
    after, before = (_own(scores, who).groupby("problem_id")[family].mean() for who in (reader, "base"))
    return Part(statement, (sign * (after - before)).dropna().tolist(), "problems")


def _within(scores: pd.DataFrame, reader: str) -> list[Part]:
    """Successes against failures on hard problems that have both; nothing where these are fewer than five."""
    hard = _own(scores, reader)
    means = hard[hard.band == "hard"].pivot_table(index="problem_id", columns="outcome", values=DELIBERATION)
    if not {"success", "failure"} <= set(means) or len(differences := (means.success - means.failure).dropna()) < 5:
        return []
    return [
        Part(
            f"On hard problems {reader} has them more in successes than in failures.", differences.tolist(), "problems"
        )
    ]


def _effect(test: Intervention, behaviour: str, statement: str) -> list[Part]:
    frame = test.rollouts.frame
    if behaviour == "direct_answer":
        values = pd.Series([float("=" not in (text or "")) for text in frame.response], index=frame.index)
    else:
        values = measures(test.rollouts)[behaviour]
    means = values.groupby([frame.problem_id, frame.policy]).mean().unstack()
    random = means[[name for name in means if str(name).startswith("random_")]].mean(axis=1)
    differences = (random - means["features"]).dropna()
    return [Part(statement, differences.tolist(), "problems")] if len(differences) >= 5 else []


def attribute_run(
    base: Path, run: Path, bands: Mapping[str, str], to: Path, sae: TemporalSAE, diff: FeatureDiff
) -> Attribution:
    """Which samples did that, of one run: shares of kinds of samples in right against wrong and in two features."""
    series = CheckpointSeries.load(base, run)
    log = Rollouts.read(run, checkpoint=series)
    log = log.with_column("band", [bands[id] for id in log.frame.problem_id])
    moved = [int(f) for f in diff.top(2).feature]
    config = tsae.AttributionConfig(targets=("features", "outcome"), features=tuple(moved), n_fixed=24)
    return tsae.attribute(series, log, to, sae=sae, config=config, progress=False)
