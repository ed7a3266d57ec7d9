"""The explorer: a table of all features to filter and sort, and a card for the one that is looked at.

Here its data is collected. The template explorer-section.html is its empty frame, which explorer.js and card.js fill.
Data reaches the page as JSON and is shown as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from tsae.diff.comparisons import CONTRAST
from tsae.diff.confounds import CANNOT_TELL, CONTROLS, FAILS, SURVIVES
from tsae.diff.feature_diff import FeatureDiff
from tsae.report.document import number_array, packed
from tsae.report.examples import Contexts, contexts, histograms
from tsae.report.story import facts
from tsae.report.story.statements import caveats
from tsae.report.text import script_json, shortened, visible

NO_SOURCE = "The diff was loaded without its feature table: give it with tsae report --features FOLDER."
NO_LOGITS = "The model was not at hand when the diff was made: give tsae diff --sae and --tokenizer."
FLAG_WORDS = {
    "one token": "At least half of its activation is on a single token, so it may be lexical.",
    "tracks length": "It correlates with the length of the base's responses (|ρ| ≥ 0.7): a change of length alone "
    "would move it.",
    "not found again": "Other seeds' SAEs do not have it: it may be of this one dictionary.",
}
_NUMBERS = [
    "reference",
    "mean",
    "difference",
    "delta",
    "delta_low",
    "delta_high",
    "q",
    "auroc",
    "active_reference",
    "active",
]
_KEYS = list(CONTRAST)


@dataclass(frozen=True)
class Explorer:
    """What the page takes in."""

    parts: dict[str, str]
    """Packed JSON by name: features, trajectories, examples-0 …"""
    choices: dict[str, list[tuple[int, str]]]
    """Contrasts to choose from, by what they have in common: place in the features' effects, and name."""
    families: list[tuple[str, str]]
    """Value and name."""


def explorer(diff: FeatureDiff, first: Sequence[int], *, served: bool = False) -> Explorer:
    """Collect everything.

    Args:
        diff: with its `source` there are examples.
        first: features to come first: the first of them is open when the page is, and examples go to them first.
        served: leave the examples out: a server gives them.
    """
    shown = contrasts_shown(diff)
    order = [*first, *_by_strength(diff, shown, set(first))]
    found = activity = None
    if diff.source is not None:
        # First, since it needs the most memory, and the examples stay in it.
        activity = histograms(diff.source, diff.info["config"]["span"])
        if not served:
            found = contexts(diff.source, order, diff.info.get("token_strings", {}))
    parts = {"features": packed(_features(diff, shown, order, found, activity, served and activity is not None))}
    if diff.dynamics is not None and len(diff.dynamics):
        parts["steps"] = packed(_steps(diff.dynamics))
    if found is not None:
        parts["trajectories"] = packed(found.trajectories)
        parts |= {f"examples-{i}": packed(chunk) for i, chunk in enumerate(found.chunks)}
    families = [(family, family) for family in sorted(set(diff.features.family))] if "family" in diff.features else []
    return Explorer(parts, _choices(diff, shown), families)


def contrasts_shown(diff: FeatureDiff) -> pd.DataFrame:
    """Contrasts of the cards, in their order: every run's shift by band and outcome with its two parts, then successes
    against failures by reader and band, then interactions as the base reads them."""
    table = diff.contrasts
    if table.empty:
        return table
    runs = diff.final_checkpoints
    main = {run: diff.main_part(run) for run in runs}
    of_run = (table.kind == "shift") & table.checkpoint.isin(runs)
    whole = (table.band == "all") & (table.outcome == "all")
    kept = of_run & (
        (table.part == table.checkpoint.map(main)) | (whole & table.part.isin(["policy", "representation"]))
    )
    kept |= (table.kind == "outcome") & table.checkpoint.isin([diff.base, *runs])
    kept |= (table.kind == "interaction") & (table.checkpoint == diff.base)
    shown = table[kept]
    # Whole bands before outcomes alone; within a run in the order of the diff.
    order = (shown.kind == "shift") & (shown.outcome != "all")
    return shown.loc[order.sort_values(kind="stable").index].reset_index(drop=True)


def _by_strength(diff: FeatureDiff, shown: pd.DataFrame, taken: set[int]) -> list[int]:
    """Active features, discoveries with the largest |Δ| over the shown contrasts first."""
    table = diff.shifts.merge(shown[_KEYS], on=_KEYS) if len(shown) and len(diff.shifts) else diff.shifts
    strength = np.zeros(len(diff.features))
    if len(table):
        weight = table.delta.abs().to_numpy() + 1e3 * (table.q.to_numpy() <= diff.q)
        np.maximum.at(strength, table.feature.to_numpy(), np.nan_to_num(weight))
    order = np.argsort(-strength, kind="stable")
    active = diff.features.firing_rate.to_numpy() > 0
    return [int(f) for f in order if active[f] and int(f) not in taken]


def _features(
    diff: FeatureDiff,
    shown: pd.DataFrame,
    order: list[int],
    found: Contexts | None,
    activity: tuple[np.ndarray, np.ndarray] | None,
    asks: bool,
) -> str:
    """JSON of all features and their effects, column by column; `activity` is what `histograms` gives.

    A page that `asks` has its examples from a server.
    """
    table = diff.features
    columns: dict[str, Any] = {
        "group": [visible(str(g)) for g in table.group],
        "responds": [visible(str(r)) for r in table.responds_to],
        "tokens": [[visible(str(t)) for t in tokens] for tokens in table.top_tokens],
    }
    arrays = {name: table[name] for name in ("firing_rate", "top_token_share", "length_correlation")}
    arrays |= {name: table[name] for name in ("share", "stability", "thinking_share") if name in table}
    if "label" in table:
        columns["label"] = [visible(str(label)) for label in table.label]
        arrays["label_score"] = table.label_score
    if "family" in table:
        columns["family"] = [visible(str(f)) for f in table.family]
        arrays["family_share"] = table.family_share
    if "promotes" in table:
        for side in ("promotes", "suppresses"):
            columns[side] = [[shortened(visible(str(t)), 40) for t in tokens] for tokens in table[side]]
            columns[f"{side}_by"] = [[float(f"{v:.3g}") for v in values] for values in table[f"{side}_by"]]
    if found is not None:
        columns["chunk"] = [found.where.get(f, -1) for f in range(len(table))]
    columns["flags"] = [[caveat.word for caveat in caveats(row)] for _, row in table.iterrows()]
    effects = _effects(diff, shown)
    info = {
        "q": diff.q,
        "span": diff.info["config"]["span"].replace("_", " "),
        "base": visible(diff.base),
        "order": order,
        "left_out": 0 if found is None else found.left_out,
        "asks": asks,
        "no_examples": "" if found is not None or asks else NO_SOURCE,
        "steps": diff.dynamics is not None and len(diff.dynamics) > 0,
        "inserted": {} if diff.insertion is None else _verdicts(diff.insertion),
        "no_logits": "" if "promotes" in table else NO_LOGITS,
        "labeller": visible(str((diff.info.get("explanations") or {}).get("labeller", ""))),
        "flag_words": FLAG_WORDS,
        "contrasts": [_contrast(diff, row) for row in facts.records(shown)],
    }
    text = script_json({"info": info, "columns": columns})[:-1]
    text += ',"numbers":{' + ",".join(f'"{name}":{number_array(a.to_numpy())}' for name, a in arrays.items()) + "}"
    if activity is not None:
        counts, top = activity
        text += f',"histogram":{script_json(counts)},"maximum":{number_array(top)}'
    return f'{text},"effects":[{",".join(effects)}]}}'


def _effects(diff: FeatureDiff, shown: pd.DataFrame) -> list[str]:
    """JSON per contrast: features, their numbers column by column, and what became of them under the controls: a bit
    for each that they do not survive, one where it cannot tell, and one where they survive all."""
    if shown.empty or diff.shifts.empty:
        return ["{}"] * len(shown)
    written = []
    for contrast in facts.records(shown[_KEYS]):
        mine = diff.table(**dict(zip(_KEYS, tuple(contrast)[1:], strict=True)))
        verdicts = mine[[f"survives_{control}" for control in CONTROLS]].to_numpy()
        lost = (verdicts == FAILS) @ (1 << np.arange(len(CONTROLS)))
        lost = lost + 8 * (verdicts == CANNOT_TELL).any(axis=1) + 16 * (verdicts == SURVIVES).all(axis=1)
        cells = [f'"{name}":{number_array(mine[name].to_numpy())}' for name in _NUMBERS]
        lists = [f'"feature":{mine.feature.tolist()}', f'"lost":{lost.tolist()}']
        written.append("{" + ",".join([*lists, *cells]).replace(", ", ",") + "}")
    return written


def _steps(table: pd.DataFrame) -> str:
    """JSON per feature: a list a run, of run, kind, onset, steps, shift, low, high."""
    lines: dict[int, list[str]] = {}
    for (run, feature), rows in table.sort_values("step").groupby(["run", "feature"], sort=False):
        numbers = [number_array(rows[name].to_numpy()) for name in ("step", "shift", "low", "high")]
        onset = number_array(rows.onset.to_numpy()[:1], 6)[1:-1]
        named = [script_json(visible(str(run))), script_json(visible(str(rows.kind.iloc[0]))), onset]
        lines.setdefault(int(feature), []).append(f"[{','.join([*named, *numbers])}]")
    return "{" + ",".join(f'"{feature}":[{",".join(runs)}]' for feature, runs in lines.items()) + "}"


def _contrast(diff: FeatureDiff, row: Any) -> dict[str, Any]:
    where = "all problems" if row.band == "all" else f"{row.band.replace('-', ' − ')} problems"
    if row.kind == "shift":
        block = str(row.checkpoint)
        if row.outcome != "all":
            block += f", {'successes' if row.outcome == 'success' else 'failures'} alone"
        part = "" if row.part == diff.main_part(row.checkpoint) else facts.PART_NAMES.get(row.part, row.part)
    elif row.kind == "outcome":
        block, part = f"read by {row.checkpoint}", ""
    else:
        block, part = "success − failure in one band − in another", ""
    return {
        "block": visible(block),
        "where": visible(part or where),
        "kind": row.kind,
        "whole": row.band == "all" and not part and row.outcome == "all" and row.checkpoint in (diff.base, block),
        "first": row.kind != "interaction"
        and row.outcome == "all"
        and (row.kind == "shift" or row.checkpoint == diff.base),
        "refused": visible(str(row.note)),
        "problems": int(row.n_problems),
    }


def _verdicts(insertion: pd.DataFrame) -> dict[str, str]:
    """What became of a feature's top tokens in other contexts, by feature."""
    found: dict[str, list[str]] = {}
    for row in facts.records(insertion):
        found.setdefault(str(row.feature), []).append(f"{row.verdict} as {row.reader} reads it")
    return {feature: visible("; ".join(said)) for feature, said in found.items()}


def _choices(diff: FeatureDiff, shown: pd.DataFrame) -> dict[str, list[tuple[int, str]]]:
    choices: dict[str, list[tuple[int, str]]] = {}
    for place, row in enumerate(facts.records(shown)):
        named = _contrast(diff, row)
        kind = {"shift": "Shift of ", "outcome": "Success − failure, "}.get(named["kind"], "Difference of bands: ")
        choices.setdefault(kind + named["block"], []).append((place, f"{named['block']}: {named['where']}"))
    return choices
