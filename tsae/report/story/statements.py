"""The statements of the story: what is said, of whom, how large, how sure, with which caveats, on which rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import pandas as pd

from tsae.diff.confounds import CONTROLS, FAILS, SURVIVES
from tsae.diff.dynamics import FLAT, KINDS
from tsae.diff.feature_diff import FeatureDiff
from tsae.report.story import facts
from tsae.report.text import count, listed, number, visible
from tsae.sae.quality.stability import FOUND_AGAIN

_AFTER_CONTROL = {"length": "at like length", "position": "at like position", "token": "given the token"}


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


@dataclass(frozen=True)
class Caveat:
    """What else might explain an effect."""

    word: str
    why: str
    """The number behind it."""


@dataclass(frozen=True)
class Effect:
    """How far one feature moved in one contrast. Sizes are Δ, standard deviations over base trajectories."""

    feature: int
    group: str
    responds_to: str
    share: float | None
    """Of its activation, on what it responds to; None where no annotator named classes."""
    stability: float | None
    """Matched cosine with other seeds; None where they were not matched."""
    delta: float
    low: float
    high: float
    q: float
    found: bool
    """Whether it moved by more than the minimum effect."""
    before: float
    after: float
    """Means of the two sides, in units of activation."""
    caveats: tuple[Caveat, ...]

    @classmethod
    def of(cls, row: Any, q: float) -> Self:
        """From a row of `FeatureDiff.table`."""
        return cls(
            feature=int(row.feature),
            group=str(row.group),
            responds_to=str(row.responds_to),
            share=row.get("share"),
            stability=row.get("stability"),
            delta=float(row.delta),
            low=float(row.delta_low),
            high=float(row.delta_high),
            q=float(row.q),
            found=bool(row.q <= q),
            before=float(row.reference),
            after=float(row["mean"]),
            caveats=caveats(row),
        )


@dataclass(frozen=True)
class Contrast:
    """What one contrast found, and the rows that it rests on."""

    kind: str
    checkpoint: str
    part: str
    band: str
    outcome: str
    n_problems: int
    n_left_out: int
    n_tested: int
    n_found: int
    """Features that moved by more than the minimum effect."""
    n_differs: int
    """Features that differ at all."""
    n_null: float
    """Features found where there is nothing to find, on the same rows."""
    detectable: float
    """Δ that is found 8 times in 10."""
    refused: str
    """Why it was not drawn; empty where it was."""
    diff: FeatureDiff = field(repr=False, compare=False)

    @cached_property
    def found(self) -> pd.DataFrame:
        """Rows of the features that moved, the largest |Δ| first."""
        keys = {name: getattr(self, name) for name in ("kind", "checkpoint", "part", "band", "outcome")}
        rows = facts.rows(self.diff, **keys)
        return facts.strongest(rows, self.diff.q, len(rows))

    def strongest(self, n: int) -> list[Effect]:
        """The n largest effects that were found."""
        return effects(self.found.head(n), self.diff)

    @property
    def controls(self) -> str:
        """What the controls leave of what was found; empty where they were not measured."""
        return survivors(self.found)


def contrasts(diff: FeatureDiff, **keys: str) -> list[Contrast]:
    """The contrasts with these keys, in the diff's order."""
    table = diff.contrasts
    for name, value in keys.items() if len(table) else ():
        table = table[table[name] == value]
    return [_contrast(diff, row) for row in facts.records(table)]


def _contrast(diff: FeatureDiff, row: Any) -> Contrast:
    keys: dict[str, Any] = {name: str(getattr(row, name)) for name in ("kind", "checkpoint", "part", "band", "outcome")}
    sizes = {name: int(getattr(row, name)) for name in ("n_problems", "n_left_out", "n_tested", "n_differs")}
    return Contrast(
        **keys | sizes,
        n_found=int(row.n_discoveries),
        n_null=float(row.n_null),
        detectable=float(getattr(row, "detectable_delta", float("nan"))),
        refused=str(row.note),
        diff=diff,
    )


def main_contrast(diff: FeatureDiff, checkpoint: str, band: str = "all") -> Contrast | None:
    """The contrast that speaks for a checkpoint."""
    keys = {"kind": "shift", "checkpoint": checkpoint, "part": str(diff.main_part(checkpoint))}
    return next(iter(contrasts(diff, **keys, band=band, outcome="all")), None)


def effects(rows: pd.DataFrame, diff: FeatureDiff) -> list[Effect]:
    """One of every row."""
    return [Effect.of(row, diff.q) for _, row in rows.iterrows()]


def caveats(row: pd.Series) -> tuple[Caveat, ...]:
    """What else might explain a feature, and whether other seeds have it."""
    found = []
    if row.top_token_share >= 0.5:
        found.append(Caveat("one token", f"{row.top_token_share:.0%} on its top token"))
    if abs(row.length_correlation) >= 0.7:
        found.append(Caveat("tracks length", f"ρ {number(row.length_correlation, sign=True)} with response length"))
    if "stability" in row and row.stability < FOUND_AGAIN:
        found.append(Caveat("not found again", f"matched cosine {number(row.stability)} with other seeds"))
    return tuple(found)


def survivors(found: pd.DataFrame) -> str:
    """“Of these 88 the controls leave 61 at like length, 58 at like position, 40 given the token.”

    Empty where nothing was measured.
    """
    verdicts = {control: found[f"survives_{control}"] for control in CONTROLS}
    compared = {control: int(verdict.isin([SURVIVES, FAILS]).sum()) for control, verdict in verdicts.items()}
    if not any(compared.values()):
        return ""
    cells = []
    for control, verdict in verdicts.items():
        part = "" if compared[control] == len(found) else f" of {compared[control]} comparable"
        cells.append(f"{(verdict == SURVIVES).sum()}{part} {_AFTER_CONTROL[control]}")
    return f"Of these {len(found)} the controls leave {', '.join(cells)}."


@dataclass(frozen=True)
class Steps:
    """What happened along the steps of one run."""

    run: str
    steps: tuple[int, ...]
    last: pd.DataFrame
    """Rows of `FeatureDiff.dynamics` at the last step."""
    kinds: dict[str, int]
    """Features of every kind."""


def along_steps(diff: FeatureDiff) -> list[Steps]:
    """Of every run that was followed."""
    if diff.dynamics is None or diff.dynamics.empty:
        return []
    found = []
    for run, rows in diff.dynamics.groupby("run", sort=False):
        last = rows[rows.step == rows.step.max()]
        kinds = last.kind.value_counts().reindex(KINDS, fill_value=0)
        found.append(Steps(str(run), tuple(sorted(rows.step.unique())), last, kinds.to_dict()))
    return found


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
    return table[table.checkpoint.isin(facts.final_checkpoints(diff))]


def tests(diff: FeatureDiff) -> list[dict[str, Any]]:
    """Records of the interventions that tested features causally."""
    return diff.info.get("causally_tested") or []


NOT_RUN = "null for changed weights: not run, since it reads the models (give --series and --sae)"


def noise_lines(info: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One line a checkpoint, from ``FeatureDiff.info["noise"]``."""
    return [f"{visible(id)}: {_line(record)}" for id, record in info.items()]


def noise_sentence(diff: FeatureDiff, checkpoint: str) -> str:
    """What noise of the size of a checkpoint's update moves; empty where that was not measured."""
    record = (diff.info.get("noise") or {}).get(checkpoint)
    if record is None:
        return ""
    if record["note"]:
        return f"No null for changed weights: {record['note']}."
    worst = max(zip(record["noise_moved"], record["noise_tested"], strict=True), key=lambda pair: pair[0] / pair[1])
    return (
        f"Noise of its update's size moves at most {worst[0]} of {worst[1]}, where it moves {record['n_moved']} of "
        f"{record['n_tested']} (same text, {count(record['n_problems'], 'problem')})."
    )


def noise_text(diff: FeatureDiff) -> tuple[str, ...]:
    """A paragraph a checkpoint; where the null was not run, one that says why."""
    if diff.info["config"].get("noise_draws") == 0:
        return ("The null for changed weights was left out (noise_draws=0).",)
    info = diff.info.get("noise")
    return tuple(f"{line}." for line in noise_lines(info)) if info else (f"{NOT_RUN[0].upper()}{NOT_RUN[1:]}.",)


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
