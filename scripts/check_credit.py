"""What each way to read credit from features sees, against the testbed's ground truth.

Reads the folder `reference` that scripts/run_remedies.py prepared, samples the base on medium and hard problems that
credit was not learned on, and prints, for every estimator, how well a low score finds a wrong token: the AUROC of wrong
against right results, operands and operators, and the mean scores (in standard deviations) of the marker of a direct
answer and of one that ends a scratchpad. The annotation is only used here, to judge.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from scipy.stats import rankdata

from tsae.errors import TsaeError

if TYPE_CHECKING:
    from tsae.features.feature_table import FeatureTable
    from tsae.rl.credit import Credit

LEVELS = ("medium", "hard")
ROLES = ("result", "operand", "operator")


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 where the user has something to put right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, required=True, help="the folder reference of run_remedies.py")
    parser.add_argument("--problems", type=int, default=150, help="per level (default: 150), 16 responses each")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        check(options.reference, options.problems)
    except TsaeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def check(reference: Path, n_problems: int) -> None:
    """Fit every estimator and judge it."""
    import tsae
    from tsae.rl.config import CreditConfig
    from tsae.rl.credit_fitting import fit_credit

    learned = tsae.FeatureTable.load(reference / "features")
    judged = {level: judged_features(reference, level, n_problems) for level in LEVELS}
    action = fit_credit(learned)
    # Any pass rate: on hard problems nearly every success is a guess.
    guesses = CreditConfig(pass_rates=(0.0, 1.0), q=1.0)
    credits = {
        "action": action,
        "value": fit_credit(learned, CreditConfig(estimator="value")),
        "effects": fit_credit(learned, CreditConfig(estimator="effects")),
        "action, shuffled": action.shuffled(0),
        "action, learned on hard problems": fit_credit(judged["hard"], guesses),
    }
    head = ["estimator", *(f"{level} {role}" for level in LEVELS for role in ROLES)]
    head += [f"{level} {kind} marker" for level in LEVELS for kind in ("direct", "final")]
    print("| " + " | ".join(head) + " |\n" + "| --- " * len(head) + "|")
    for name, credit in credits.items():
        # Tables that held-out problems did not confirm are judged all the same.
        shown = replace(credit, info={**credit.info, "significant": True})
        found = [judge(shown, judged[level]) for level in LEVELS]
        cells = [f"{aurocs[role]:.2f}" for aurocs, _ in found for role in ROLES]
        cells += [f"{mean:.1f}" for _, means in found for mean in means]
        print("| " + " | ".join([name, *cells]) + " |", flush=True)


def judged_features(reference: Path, level: str, n_problems: int) -> FeatureTable:
    """Features of the base's rollouts on other problems of a level."""
    import tsae
    from tsae.testbed.tokenizer import MAX_RESPONSE_TOKENS

    to = reference / "judged" / level
    if (to / "features" / "run.json").is_file():
        return tsae.FeatureTable.load(to / "features")
    base = tsae.testbed.series().base
    problems = tsae.testbed.generate_problems(level, n_problems, seed=2)
    sampling = tsae.SamplingConfig(n_samples=16, max_new_tokens=MAX_RESPONSE_TOKENS, batch_size=512, seed=3)
    rollouts = tsae.sample(base, problems, sampling, verify=tsae.testbed.verify)
    sae = tsae.TemporalSAE.load(reference / "sae")
    store = tsae.capture(tsae.CheckpointSeries((base,)), rollouts, [sae.site], to=to / "activations")
    return tsae.encode(sae, store, to=to / "features")


def judge(credit: Credit, features: FeatureTable) -> tuple[dict[str, float], list[float]]:
    """AUROC of wrong against right tokens by role, and mean scores of direct and final markers."""
    from tsae.rl.credit_fitting import ResponseTokens
    from tsae.testbed.annotate import annotate
    from tsae.testbed.tokenizer import VOCABULARY

    tokens = ResponseTokens.of(features, features.rows(reader=features.readers[0]))
    scores = tokens.raw_scores(credit) / credit.scale
    prompts = features.rollouts.frame.prompt.iloc[features.trajectory]
    ends = np.flatnonzero(np.diff(tokens.row)) + 1
    responses = np.split(tokens.ids, ends)
    labels = [
        label
        for prompt, ids in zip(prompts, responses, strict=True)
        for label in annotate(prompt, [VOCABULARY[token] for token in ids])
    ]
    role = np.array([label.role for label in labels])
    style = np.array([label.style for label in labels])
    right = np.array([label.correct is not False for label in labels])
    scratchpad = style == "scratchpad"
    aurocs = {
        name: auroc(scores[(role == name) & scratchpad & right], scores[(role == name) & scratchpad & ~right])
        for name in ROLES
    }
    markers = [float(scores[(role == "answer_marker") & (style == kind)].mean()) for kind in ("direct", "scratchpad")]
    return aurocs, markers


def auroc(right: np.ndarray, wrong: np.ndarray) -> float:
    """Chance that a right token has the larger score; NaN without wrong ones."""
    if not len(wrong):
        return float("nan")
    ranks = rankdata(np.concatenate([right, wrong]))
    return float((ranks[: len(right)].sum() - len(right) * (len(right) + 1) / 2) / (len(right) * len(wrong)))


if __name__ == "__main__":
    raise SystemExit(main())
