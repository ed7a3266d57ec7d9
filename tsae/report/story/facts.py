"""Looks up in a FeatureDiff what every view shows: checkpoints, bands, behaviours and rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, zip_longest
from typing import Any

import numpy as np
import pandas as pd

from tsae.diff.confounds import CONTROLS, FAILS, SURVIVES
from tsae.diff.feature_diff import FeatureDiff
from tsae.report.text import interval, number, percent
from tsae.rollouts.schema import BANDS as BANDS

PART_NAMES = {
    "total": "each on its own trajectories",
    "policy": "policy part",
    "representation": "representation part",
    "same_trajectories": "on the same trajectories",
}
_BEHAVIOUR_NAMES = {
    "accuracy": "accuracy",
    "response_length": "response length",
    "direct_answer": "direct answers",
    "skipped_steps": "skipped steps",
    "truncated": "truncated responses",
    "looping": "loops",
    "repeated_4grams": "repeated 4-grams",
    "repeated_answer": "repeated answers",
    "unanswered": "no answer",
    "relative_length": "relative length",
}


def trained_on(diff: FeatureDiff, checkpoint: str) -> str | None:
    return next((reader.get("trained_on") for reader in diff.info["readers"] if reader["id"] == checkpoint), None)


def stand_in(diff: FeatureDiff) -> str:
    """“against step 25, since the base is missing”, where an early step takes the base's place; else empty."""
    step = diff.info["readers"][0].get("step")
    return f"against step {step}, since the base is missing" if step else ""


def compared_with(diff: FeatureDiff) -> str:
    """The base, by its id; and where it only takes the base's place, that it does."""
    return f"{diff.base} ({told.removeprefix('against ')})" if (told := stand_in(diff)) else diff.base


def bands_of(diff: FeatureDiff) -> list[str]:
    """Bands that the diff was split by; none where the problems have none."""
    present = set(diff.contrasts.band) if not diff.contrasts.empty else set()
    return [band for band in BANDS if band in present]


def rows(diff: FeatureDiff, **keys: str) -> pd.DataFrame:
    """Rows of one contrast, indexed by feature, with the features' descriptions."""
    table: pd.DataFrame = diff.table(discoveries=False, **keys)
    return table.set_index("feature", drop=False)


def main_shift(diff: FeatureDiff, checkpoint: str) -> pd.DataFrame:
    """The shift of a checkpoint over all problems and outcomes, indexed by feature."""
    return diff.main_shift(checkpoint).set_index("feature", drop=False)


def record(table: pd.DataFrame, feature: int) -> Any:
    """The row of one feature; Any, because pandas does not know what its cells are."""
    return table.loc[feature]


def records(table: pd.DataFrame) -> list[Any]:
    """The rows as named tuples; Any for the same reason."""
    return list(table.itertuples())


def strongest(table: pd.DataFrame, q: float, n: int) -> pd.DataFrame:
    """The n discoveries that separate the two sides best: AUROC furthest from ½, then the largest |Δ|.

    A rare feature has no such AUROC by its rarity, and ties go to the lower feature.
    """
    found = table[table.q <= q]
    apart = (found.auroc - 0.5).abs() if "auroc" in found.columns else found.delta.abs()
    order = np.lexsort((-found.delta.abs(), -apart))
    return found.iloc[order].head(n)


def moved_features(diff: FeatureDiff, n: int) -> list[int]:
    """The features that checkpoints moved furthest, of every checkpoint in turn.

    First come those that survive all controls, and last those that a control explains.
    """
    queues = []
    for checkpoint in diff.checkpoints:
        table = main_shift(diff, checkpoint)
        found = strongest(table, diff.q, len(table))
        verdicts = found[[f"survives_{control}" for control in CONTROLS]]
        rank = verdicts.eq(FAILS).any(axis=1).astype(int) - verdicts.eq(SURVIVES).all(axis=1).astype(int)
        queues.append([int(feature) for feature in rank.sort_values(kind="stable").index])
    return in_turn(queues, n)


def standardised(row: pd.Series) -> tuple[float, float, float]:
    """(Δ, low, high): the effect and its interval, in standard deviations with a floor."""
    return float(row.delta), float(row.delta_low), float(row.delta_high)


def effect_text(row: Any) -> str:
    """“+0.42 sd [0.31, 0.53]”: Δ in standard deviations, and its interval."""
    return f"{number(row.delta, sign=True)} sd {interval(row.delta_low, row.delta_high, sign=True, like=row.delta)}"


def often_text(row: Any, of_reference: str = "", of: str = " of responses") -> str:
    """“, active in 12 % → 79 % of responses”; where that hardly differs, in how many pairs one side is higher."""
    before, after = getattr(row, "active_reference", np.nan), getattr(row, "active", np.nan)
    if pd.isna(before) or pd.isna(after):
        return ""
    if abs(after - before) >= 0.05:
        return f", active in {percent(before)} %{of_reference} → {percent(after)} %{of}"
    higher, share = ("higher", row.auroc) if row.auroc >= 0.5 else ("lower", 1 - row.auroc)
    return f", active in {percent(after)} %{of}, {higher} in {percent(share)} % of pairs"


def least_text(diff: FeatureDiff) -> str:
    """What “moved” asks for: “|Δ| > 0.1, q ≤ 0.05”."""
    return f"|Δ| > {diff.minimum_effect:g}, q ≤ {diff.q:g}"


def in_turn(queues: Iterable[Sequence[int]], n: int, first: Iterable[int] = ()) -> list[int]:
    """At most n different features: `first`, then the first of every queue, then the second of every queue, …"""
    chosen = dict.fromkeys(first)
    for rank in zip_longest(*queues):
        for feature in rank:
            if feature is not None and len(chosen) < n:
                chosen.setdefault(feature)
    return list(chosen)


def opposed_pairs(diff: FeatureDiff) -> list[tuple[str, str, pd.DataFrame]]:
    """(raised by, lowered by, features) for pairs of runs that moved features in opposite directions.

    Runs trained on hard and on medium problems come first, since what separates them is the question that bands are
    for; then the two runs with most such features. Each pair both ways round.
    """
    found = []
    for one, other in combinations(diff.final_checkpoints, 2):
        if diff.main_part(one) and diff.main_part(other):
            both = [(up, down, diff.opposed(up, down)) for up, down in ((one, other), (other, one))]
            found.append(sorted((item for item in both if len(item[2])), key=lambda item: -len(item[2])))
    found = [both for both in found if both]
    found.sort(
        key=lambda both: (
            {trained_on(diff, run) for run in both[0][:2]} != {"hard", "medium"},
            -sum(len(features) for _, _, features in both),
        )
    )
    return [item for both in found for item in both]


def behaviour_name(behaviour: str) -> str:
    return _BEHAVIOUR_NAMES.get(behaviour, behaviour.replace("_", " "))


def behaviour_order(names: Iterable[str]) -> list[str]:
    """Each once: accuracy and direct answers first, as findings name them."""
    found = dict.fromkeys(names)
    first = [name for name in ("accuracy", "direct_answer") if name in found]
    return [*first, *(name for name in found if name not in first)]


def test_name(test: dict[str, Any]) -> str:
    """What an intervention did, in words: the record of `tsae.causal.Intervention.record`."""
    ids = [int(feature) for feature in test["features"]]
    named = f"feature {ids[0]}" if len(ids) == 1 else f"{len(ids)} features"
    done = {"ablate": "ablated", "mean": "set to their mean", "clamp": "clamped", "steer": "steered"}
    amount = "" if test["mode"] in ("ablate", "mean") else f" ({test['amount']:+g} × typical)"
    where = " at the prompt's last token" if test.get("tokens") == "first" else ""
    if "donor" in test:
        return f"{named} of {test['donor']} transplanted into {test['checkpoint']}{where}"
    return f"{named} {done.get(test['mode'], test['mode'])}{amount} in {test['checkpoint']}{where}"


def is_share(diff: FeatureDiff, behaviour: str) -> bool:
    """Whether a behaviour is shown in per cent.

    The known behaviours are, except for the two lengths. Other columns are if they hold only 0 and 1: numbers such as
    nats may lie between 0 and 1 by chance.
    """
    if behaviour in _BEHAVIOUR_NAMES:
        return behaviour not in ("response_length", "relative_length")
    return behaviour in diff.info.get("shares", ())


def behaviours_of(diff: FeatureDiff) -> list[str]:
    return list(diff.behaviours.behaviour.unique()) if not diff.behaviours.empty else []


def behaviour(diff: FeatureDiff, policy: str, band: str, name: str) -> pd.Series | None:
    table = diff.behaviours
    if table.empty:
        return None
    found = table[(table.policy == policy) & (table.band == band) & (table.behaviour == name)]
    return None if found.empty else found.iloc[0]


def change_of(diff: FeatureDiff, policy: str, band: str, name: str) -> tuple[pd.Series, pd.Series] | None:
    """A behaviour of the base and of a policy. None, if there is no problem that both answered.

    Each "mean" is over the problems that both answered, as the change is. With the problems that only one of them
    answered, the means could differ in the other direction than the change.
    """
    before, after = (behaviour(diff, who, band, name) for who in (diff.base, policy))
    if before is None or after is None or pd.isna(after["change"]):
        return None
    before["mean"], after["mean"] = after["paired_reference"], after["paired_mean"]
    return before, after


def direction(after: pd.Series) -> int:
    """1 where a behaviour rose against the base, −1 where it fell, 0 where the interval of its change holds 0.

    The change is paired: that of the mean difference within the problems that both answered. Of too few of them it has
    no interval (`tsae.base.statistics`), and is 0.
    """
    return 1 if after["change_low"] > 0 else -1 if after["change_high"] < 0 else 0


def has_classes(diff: FeatureDiff) -> bool:
    """Whether an annotator named what features respond to; otherwise they are described by their top tokens."""
    return "share" in diff.features.columns


def named(diff: FeatureDiff, feature: int) -> str:
    """A feature's number with what it responds to, for sentences; top tokens carry their own quotation marks."""
    described = diff.names[feature]
    plain = not has_classes(diff) and described == diff.features.responds_to[feature]
    return f"{feature} ({described})" if plain else f"{feature} “{described}”"


def responds(effect: Any) -> str:
    """What the feature of a row of `FeatureDiff.table` responds to: its label, where one passed its test."""
    return str(getattr(effect, "label", "") or effect.responds_to)


def has_stability(diff: FeatureDiff) -> bool:
    """Whether the SAE's latents were matched with those of other seeds."""
    return "stability" in diff.features.columns
