"""The statements of the story: what is said, of whom, how large, how sure, with which caveats, on which rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pandas as pd

from tsae.diff.confounds import CANNOT_TELL, CONTROLS, FAILS, SURVIVES
from tsae.diff.dynamics import FLAT
from tsae.diff.feature_diff import FeatureDiff
from tsae.report.story import facts
from tsae.report.text import capitalised, count, listed, number, percent, visible
from tsae.sae.quality.stability import FOUND_AGAIN

_AFTER_CONTROL = {"length": "at like length", "position": "at like position", "token": "given the token"}


class Light(NamedTuple):
    """One of the three answers of a verdict (`tsae.report.story.verdict`)."""

    question: str
    word: str
    """The question, where there is no room for it."""
    answer: str
    """yes, no, not decided or not measured."""
    sentences: tuple[str, ...]
    """What it rests on, or what is missing and the command that adds it."""
    evidence: str
    """Id of the page's section that shows it."""


@dataclass(frozen=True)
class Statement:
    """A finding in words: a heading, sentences of plain text (unescaped), and where their evidence is."""

    heading: str
    sentences: tuple[str, ...]
    evidence: str
    """Id of the page's section with the rows that it rests on."""
    note: str = ""
    """A few words beside the heading."""
    checkpoint: str | None = None
    """The run that it is about."""
    warns: bool = False
    """Whether it has to be read before all others."""
    lights: tuple[Light, ...] = ()
    """Of the verdict on a run, whose first sentence is the verdict and whose second its limit."""


def with_stand_in(diff: FeatureDiff, statement: Statement) -> Statement:
    """The statement; where an early step takes the base's place, it begins with that."""
    if not (what := facts.stand_in(diff)):
        return statement
    first, *others = statement.sentences
    return replace(statement, sentences=(f"{capitalised(what)}: {first}", *others))


@dataclass(frozen=True)
class Caveat:
    """What else might explain an effect."""

    word: str
    why: str
    """The number behind it."""


_KEYS = ("kind", "checkpoint", "part", "band", "outcome")


def contrasts(diff: FeatureDiff, **keys: str) -> list[Any]:
    """Rows of `FeatureDiff.contrasts` with these keys, in the diff's order; `note` says why one was not drawn."""
    table = diff.contrasts
    for name, value in keys.items() if len(table) else ():
        table = table[table[name] == value]
    return facts.records(table)


def main_contrast(diff: FeatureDiff, checkpoint: str) -> Any | None:
    """The contrast that speaks for a checkpoint."""
    keys = {"kind": "shift", "checkpoint": checkpoint, "part": str(diff.main_part(checkpoint))}
    return next(iter(contrasts(diff, **keys, band="all", outcome="all")), None)


def found_in(diff: FeatureDiff, contrast: Any, n: int | None = None) -> pd.DataFrame:
    """Rows of the n features that moved furthest in a contrast, the largest |Δ| first; by default all that moved."""
    rows = facts.rows(diff, **{name: str(getattr(contrast, name)) for name in _KEYS})
    return facts.strongest(rows, diff.q, len(rows) if n is None else n)


def caveats(row: Any) -> tuple[Caveat, ...]:
    """What else might explain a feature, and whether other seeds have it."""
    found = []
    if row.top_token_share >= 0.5:
        found.append(Caveat("one token", f"{row.top_token_share:.0%} on its top token"))
    if abs(row.length_correlation) >= 0.7:
        found.append(Caveat("tracks length", f"ρ {number(row.length_correlation, sign=True)} with response length"))
    if getattr(row, "stability", FOUND_AGAIN) < FOUND_AGAIN:
        found.append(Caveat("not found again", f"matched cosine {number(row.stability)} with other seeds"))
    return tuple(found)


def survivors(found: pd.DataFrame) -> str:
    """“Of these 88, 61 survive at like length, 58 at like position, 40 given the token; 8 survive all three controls.”

    Empty where nothing was measured.
    """
    verdicts = {control: found[f"survives_{control}"] for control in CONTROLS}
    compared = {control: int(of.isin([SURVIVES, FAILS, CANNOT_TELL]).sum()) for control, of in verdicts.items()}
    if not any(compared.values()):
        return ""
    cells: list[str] = []
    for control, verdict in verdicts.items():
        part = "" if compared[control] == len(found) else f" of {compared[control]} comparable"
        open_ = f" (this control cannot judge {n})" if (n := int((verdict == CANNOT_TELL).sum())) else ""
        survive = "" if cells else " survive"
        cells.append(f"{(verdict == SURVIVES).sum()}{part}{survive} {_AFTER_CONTROL[control]}{open_}")
    left, others = len(surviving(found)) or "none", ""
    if (verdicts["length"] == CANNOT_TELL).any():
        n = int((verdicts["position"].eq(SURVIVES) & verdicts["token"].eq(SURVIVES)).sum())
        others = f", and {n} the two without length"
    survive = "survives" if left == 1 else "survive"
    return f"Of these {len(found)}, {', '.join(cells)}; {left} {survive} all three controls{others}."


def overlap_sentence(diff: FeatureDiff, **keys: str) -> str:
    """That length and style are one variable in a contrast, and how many lengths overlap; else empty."""
    table = diff.confounds
    if "overlap" not in table.columns:
        return ""
    mine = table[(table.control == "length") & (table.verdict == CANNOT_TELL)]
    for name, value in keys.items():
        mine = mine[mine[name] == value]
    if mine.empty:
        return ""
    one = mine.iloc[0]
    style, overlap = facts.behaviour_name(one["style"]), percent(one.overlap)
    return (
        f"Length and style are one variable here: length alone predicts {style} (AUROC {one.style_auroc:.2f}). Only "
        f"{overlap} % of responses meet a response of like length on the other side. A feature of the style cannot "
        "survive that control, and is not refuted by it."
    )


def surviving(found: pd.DataFrame) -> pd.DataFrame:
    """The features that survive every control."""
    return found[found[[f"survives_{control}" for control in CONTROLS]].eq(SURVIVES).all(axis=1)]


def survive_in_both(diff: FeatureDiff, up: str, down: str, features: pd.DataFrame) -> list[int]:
    """Those of some features that survive every control in the main shifts of two runs; all where none was measured."""
    left = []
    for run in (up, down):
        table = facts.main_shift(diff, run)
        left.append(set(surviving(table).feature) if survivors(table) else set(table.feature))
    return [int(feature) for feature in features.index if all(feature in of for of in left)]


def along_steps(diff: FeatureDiff) -> dict[str, pd.DataFrame]:
    """Rows of `FeatureDiff.dynamics` of every run that was followed."""
    return {} if diff.dynamics is None else {str(run): of for run, of in diff.dynamics.groupby("run", sort=False)}


def at_last_step(rows: pd.DataFrame) -> pd.DataFrame:
    """Those of some rows of a run that are of its last step."""
    return rows[rows.step == rows.step.max()]


def step_features(diff: FeatureDiff, n: int = 6) -> list[int]:
    """Features to draw along steps: the largest shifts in standard deviations, of every run in turn."""
    if diff.dynamics is None or diff.dynamics.empty:
        return []
    queues = []
    for _, rows in diff.dynamics[diff.dynamics.kind != FLAT].groupby("run", sort=False):
        size = rows.groupby("feature").delta.agg(lambda d: d.abs().max()).sort_values(ascending=False, kind="stable")
        queues.append([int(feature) for feature in size.index[:n]])
    return facts.in_turn(queues, n)


def predictions(diff: FeatureDiff) -> pd.DataFrame:
    """Predicted beside realised shifts, of the last step of every run."""
    table = diff.predicted
    if table is None or table.empty:
        return pd.DataFrame(columns=["checkpoint", "part", "gradient", "predicted_on", "realised_on", "note"])
    return table[table.checkpoint.isin(diff.final_checkpoints)]


def main_predictions(diff: FeatureDiff) -> pd.DataFrame:
    """Comparisons of the natural gradient with the shift over all problems, for the last step of every run."""
    table = predictions(diff)
    return table[(table.note == "") & (table.realised_on == "all") & (table.gradient == "natural")]


def tests(diff: FeatureDiff) -> list[dict[str, Any]]:
    """Records of the interventions that tested features causally."""
    return diff.info.get("causally_tested") or []


NOT_RUN = "null for changed weights: not run, since it reads the models (give --series and --sae)"


def noise_lines(info: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One line a checkpoint, from ``FeatureDiff.info["noise"]``."""
    return [f"{visible(id)}: {_line(record)}" for id, record in info.items()]


def noise_text(diff: FeatureDiff) -> tuple[str, ...]:
    """A paragraph a checkpoint; where the null was not run, one that says why."""
    if diff.info["config"].get("noise_draws") == 0:
        return ("The null for changed weights was left out (noise_draws=0).",)
    info = diff.info.get("noise")
    return tuple(f"{line}." for line in noise_lines(info)) if info else (f"{capitalised(NOT_RUN)}.",)


def _line(record: Mapping[str, Any]) -> str:
    if record["note"]:
        return visible(record["note"])
    noise = listed([f"{m} of {n}" for m, n in zip(record["noise_moved"], record["noise_tested"], strict=True)])
    size = "of the norm of its update" if record["share"] == 1 else f"of {record['share']:.3g} of its update's norm"
    return (
        f"on the same trajectories of {count(record['n_problems'], 'problem')} it moved {record['n_moved']} of "
        f"{record['n_tested']} features; noise {size} ({record['update_norm']:.2g} of the weights') moved {noise}; "
        f"median |Δ| {number(record['run']['median'])} against {number(record['noise']['median'])}"
    )
