"""What a reader of the report checks before believing it: reconstruction, nulls, controls, bands, stability, causes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from tsae.diff.feature_diff import FeatureDiff
from tsae.report.story import facts
from tsae.report.story.statements import contrasts
from tsae.report.text import capitalised, count, listed, percent
from tsae.rollouts.bands import bands_label, found_how
from tsae.sae.quality.stability import FOUND_AGAIN

_NULLS = {
    "shift": "where the trajectories of a problem are split at random",
    "outcome": "where the outcomes of a problem are shuffled",
    "interaction": "in contrasts between bands, after the same",
}
_SAE = {
    "site": "site {}",
    "d_model": "width of the model {}",
    "d_sae": "{} latents",
    "d_high": "of them {} high-level",
    "k": "k = {}",
    "temporal_weight": "temporal weight {}",
    "temperature": "temperature {}",
    "aux_weight": "AuxK weight {:g}",
}


@dataclass(frozen=True)
class Gates:
    """Everything to check; an empty text or tuple where there is nothing to say."""

    readers: tuple[dict[str, Any], ...]
    """Of every reader its record, and in `why` the reason where it is flagged."""
    outliers: str
    """Tokens beyond the SAE's norm limit, by reader."""
    without_span: str
    """Trajectories without a token of the span, by reader."""
    nulls: tuple[str, ...]
    stability: str
    n_tested: int
    """Features that were tested causally."""
    disagrees: tuple[str, ...]
    """Checks of the rollout log that found it to contradict itself."""


def gates(diff: FeatureDiff) -> Gates:
    """Derive all of them."""
    info = diff.info
    shares = {reader["id"]: reader.get("outlier_share", 0.0) for reader in info["readers"]}
    return Gates(
        readers=tuple({**reader, "why": flag_reason(diff, reader)} for reader in info["readers"]),
        outliers=", ".join(f"{id} {percent(share)} %" for id, share in shares.items()) if any(shares.values()) else "",
        without_span=", ".join(f"{id} {n:,}" for id, n in (info.get("without_span") or {}).items()),
        nulls=_nulls(diff),
        stability=_stability(diff),
        n_tested=len({feature for test in info.get("causally_tested") or [] for feature in test["features"]}),
        disagrees=tuple(name for name, check in (info.get("second_look") or {}).items() if check["disagrees"]),
    )


def flag_reason(diff: FeatureDiff, reader: dict[str, Any]) -> str:
    """Why a reader is flagged; empty where it is not."""
    if not reader["flagged"]:
        return ""
    config = diff.info["config"]
    if reader["fve"] is None or reader["fve"] < config["min_fve"]:
        return f"below {config['min_fve']:g}"
    return f"more than {percent(config['max_outliers'])} % of tokens left out"


def _nulls(diff: FeatureDiff) -> tuple[str, ...]:
    """What the same tests find where there is nothing to find, on the same rows."""
    clauses = []
    for kind, what in _NULLS.items():
        mine = [c for c in contrasts(diff, kind=kind) if kind == "interaction" or c.band == "all"]
        if mine := [c for c in mine if not pd.isna(c.n_null)]:  # NaN where none was drawn
            worst = max(mine, key=lambda c: c.n_null)
            most = f"{worst.n_null:.0f}" if worst.n_null.is_integer() else f"{worst.n_null:.1f}"
            clauses.append(f"{most} of {worst.n_tested} features {what}")
    told = f"By chance alone the same tests find at most (mean of {diff.info.get('null_repeats', 0):g}):"
    return (f"{told} {'; '.join(clauses)}.",) if clauses else ()


def _stability(diff: FeatureDiff) -> str:
    """How many active features the other seeds find again."""
    known = diff.info.get("stability")
    if not known:
        return ""
    n = known["n_others"]
    finds = "1 other seed finds" if n == 1 else f"{n} other seeds on average find"
    return (
        f"{finds} {percent(known['found_again'])} % of {count(known['n_latents'], 'active feature')} again (cosine of "
        f"matched decoder directions ≥ {FOUND_AGAIN:g}); mean cosine {known['cosine']:.2f}"
    )


def belief(diff: FeatureDiff) -> tuple[str, ...]:
    """The gates in a few sentences."""
    found = gates(diff)
    known = [f"{fve:.2f}" for fve in sorted(r["fve"] for r in found.readers if r["fve"] is not None)]
    sentences = []
    if found.disagrees:
        sentences.append(f"The rollout log does not agree with itself: {listed(found.disagrees)}.")
    if known:
        spread = known[0] if known[0] == known[-1] else f"{known[0]}–{known[-1]}"
        sentences.append(f"The SAE explains {spread} of the variance of {count(len(found.readers), 'reader')}.")
    if kept := diff.info.get("sae_kept"):
        least = min((fve for fve in kept.values() if fve is not None), default=0.0)
        sentences.append(f"It was trained earlier in this training, on {listed(list(kept))}: then {least:.2f} or more.")
    if flagged := [reader["id"] for reader in found.readers if reader["flagged"]]:
        sentences.append(f"Flagged for bad reconstruction or many tokens left out: {listed(flagged)}.")
    tested = f"{count(found.n_tested, 'feature')} causally tested, the others not: correlation."
    return (*sentences, *found.nulls, tested if found.n_tested else "Correlation throughout: not causally tested.")


def bands_text(diff: FeatureDiff) -> str:
    """What the bands mean, and where they come from."""
    bands = diff.info.get("bands")
    if not bands:
        return "The problems have no bands."
    if bands.get("source") and "easy" not in bands:
        return f"{found_how(bands).capitalize()}."
    who, shares = bands_label(bands) or bands.get("reference") or "all policies together", bands.get("quantiles")
    how = f" (its easiest {shares['easy']:.0%} and hardest {shares['hard']:.0%} of the problems)" if shares else ""
    return (
        f"Pass rate of {who}, easy ≥ {bands['easy']:.3g}, hard ≤ {bands['hard']:.3g}{how}, medium between; "
        f"{found_how(bands)}."
    )


def bands_note(diff: FeatureDiff) -> str:
    """What easy, medium and hard are, where bands come from elsewhere; empty otherwise."""
    label = bands_label(diff.info.get("bands"))
    return f"Easy, medium and hard are the {label}, not what the base finds so." if label else ""


def bands_warning(diff: FeatureDiff) -> str:
    """That bands are training steps, where they are; empty otherwise."""
    refused = (diff.info.get("bands") or {}).get("refused") or ""
    return f"{capitalised(refused)}. Bands are shown, and not compared." if refused else ""


def stand_in_warning(diff: FeatureDiff) -> str:
    """That an early checkpoint takes the place of the base, and what to give; empty where the base is there."""
    if not facts.stand_in(diff):
        return ""
    return (
        f"The base is missing, and {diff.base} takes its place: what training did up to that step is not seen here. "
        "To compare with the model that training started from, give it: --base MODEL."
    )


def statistics_text(diff: FeatureDiff) -> str:
    """How sizes and certainties were computed."""
    config, left_out = diff.info["config"], gates(diff).without_span
    method = "Yekutieli" if config.get("fdr") == "by" else "Hochberg"
    without = f" Trajectories without such a token are left out (of those read by {left_out})." if left_out else ""
    table = diff.shifts
    n = int(table.feature[(table.scale == "pooled") & (table.kind == "shift")].nunique())
    pooled = f" (of {count(n, 'feature')} that the base hardly has, over those of base and run together)" if n else ""
    pooled += ". This unit has a floor: half of the deviation over the trajectories of both. So |Δ| is at most 4"
    return (
        f"A feature counts by its mean activation over the {config['span'].replace('_', ' ')} tokens of a trajectory. "
        f"The unit is the problem.{without} Δ is a difference in standard deviations of the feature over base "
        f"trajectories{pooled}. A feature moved if |Δ| is larger than {config['minimum_effect']:g}. "
        f"{config['confidence']:.0%} bootstrap intervals ({config['n_bootstrap']:,} draws), permutation tests "
        f"({config['n_permutations']:,}), Benjamini–{method} at q = {config['q']:g} over the features of a contrast. "
        f"Features active in fewer than {config['min_problems']} problems of a contrast are not tested."
    )


def sae_text(diff: FeatureDiff) -> str:
    """The dictionary in one line."""
    sae = dict(diff.info["sae"])
    if "architecture" in sae:
        # Published: all latents are of one group, and how it was trained is not known.
        sae = {name: sae[name] for name in ("site", "d_model", "d_sae", *(["k"] if sae["k"] else []))}
    return ", ".join(text.format(sae[name]) for name, text in _SAE.items() if name in sae)
