"""Which samples did that, in words: what moved, by which kinds, problems and samples, and how far to believe it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from tsae.attribution.attribution import Attribution
from tsae.report.story.statements import Statement
from tsae.report.text import count, number, percent

MEANING = (
    "Share: a sample's part of what happened; shares add up.",
    "Without, alone: the change that a run without these samples, or with them only, would have made, by simulation.",
    "Effect: what they added, which is the simulated change with all samples − without; effects do not add up.",
)
_FINEST = ("band and outcome and third", "band and outcome", "third of the run")
"""Kinds that divide all samples, the finest first."""
_FAR = 0.05
"""Distance of the simulated optimiser from the checkpoints that is warned of."""
_LOW = 0.5
"""Rank correlation with replayed trainings that is warned of."""
_TESTBED = (
    "On the testbed, simulated effects ranked real retrainings on halves of the problems with a correlation of 0.94 "
    "(behaviours) and 0.72 (features) where the log was replayed, and of 0.89 to 0.94 and 0.26 to 0.28 where responses "
    "were sampled anew.",
    "There a second seed of the same retrainings agrees with the first by no more than 0.89 and 0.41: effects on "
    "single features are partly chance.",
)


@dataclass(frozen=True)
class Moved:
    """What samples did to one target."""

    name: str
    change: str
    """From what to what, and by how much."""
    unexplained: str
    """What shares leave of the change, in per cent."""
    flagged: bool
    """Whether that is much."""
    simulated: float
    """The change with all samples, by simulation."""
    validated: str
    """How well the simulation predicted the replayed trainings. Empty if none was replayed."""
    groups: pd.DataFrame
    """Rows of `Attribution.groups`, the largest effects first."""
    problems: pd.DataFrame
    """Rows of `Attribution.problems`: some with the largest effects for, and some against."""
    about_problems: str
    """How well the effects of problems describe the run, or why there are none. Empty if nobody asked for them."""
    samples: pd.DataFrame
    """Rows of `Attribution.of_target`."""


@dataclass(frozen=True)
class Grid:
    """Shares and effects on one target by two kinds of samples."""

    rows: list[str]
    columns: list[str]
    n: np.ndarray
    """(rows, columns) samples; NaN where there are none."""
    share: np.ndarray
    effect: np.ndarray


@dataclass(frozen=True)
class Said:
    """A sentence on how far to believe it."""

    text: str
    warns: bool = False


def lead(found: Attribution) -> str:
    """The question, with its numbers."""
    first, last = found.info["checkpoints"][0] + 1, found.info["checkpoints"][-1]
    return (
        f"Which of {count(len(found.facts), 'sample')} of steps {first} to {last} moved "
        f"{count(len(found.targets), 'target')}?"
    )


def amount(value: float, *, sign: bool = True) -> str:
    """Three significant digits, with a true minus. Shares of single samples may be of any size."""
    return f"{value:{'+' if sign else ''}.3g}".replace("-", "−") if np.isfinite(value) else "–"


def moved(found: Attribution, name: str, n: int) -> Moved:
    """What is told of a target: n problems and n samples for it, and as many against."""
    row = found.targets.set_index("target").loc[name]
    problems, about = _problems(found, name, float(row.r2), n)
    return Moved(
        name,
        f"{amount(row.before, sign=False)} → {amount(row.after, sign=False)} ({amount(row.realised)})",
        f"{percent(abs(row.remainder))} %",
        bool(row.flagged),
        float(row.simulated),
        ""
        if np.isnan(row.validated_error)
        else f"rank correlation {number(row.validated)}, median error {amount(row.validated_error, sign=False)}",
        found.table(name),
        problems,
        about,
        found.of_target(name, n),
    )


def most_moved(found: Attribution, n: int) -> list[str]:
    """Behaviours and outcomes that changed most for their size, the larger of their two values; then features.

    Features stand in the order in which they were found: those that moved furthest in standard deviations come first.
    A relative change would prefer features that hardly fire. About as many of either are given.
    """
    features = [str(name) for name in found.targets.target if name.startswith("feature ")]
    table = found.targets[~found.targets.target.isin(features)]
    size = np.maximum(table.before.abs(), table.after.abs()).clip(lower=1e-30)
    order = (table.realised.abs() / size).sort_values(ascending=False, kind="stable").index
    others = [str(name) for name in table.target[order]][: max(n - len(features), n - n // 2)]
    return [*others, *features[: n - len(others)]]


def grid(found: Attribution, name: str) -> Grid | None:
    """Shares and effects by band × outcome and third of the run; by what there is of these, where some are missing."""
    table = found.groups[found.groups.target == name]
    kind = next((kind for kind in _FINEST if (table.kind == kind).any()), None)
    if kind is None:
        return None
    table = table[table.kind == kind]
    # The last part of a group's name is the third of the run, or the outcome.
    parts = [("all samples", *str(group).rsplit(", ", 1))[-2:] for group in table.group]
    rows, columns = (list(dict.fromkeys(part[i] for part in parts)) for i in (0, 1))
    n, share, effect = (np.full((len(rows), len(columns)), np.nan) for _ in range(3))
    for (row, column), line in zip(parts, table.itertuples(), strict=True):
        cell = rows.index(row), columns.index(column)
        n[cell], share[cell], effect[cell] = line.n, line.share, line.effect
    return Grid(rows, columns, n, share, effect)


def statement(found: Attribution) -> Statement:
    """The finding: what would have been without the kind of samples that mattered most."""
    told = []
    for name in most_moved(found, 2):
        one = moved(found, name, 1)
        text = f"{name}: {one.change}"
        if len(one.groups):
            most = one.groups.iloc[0]
            text += (
                f"; without the {count(int(most.n), 'sample')} of “{most.group}” it would have changed by "
                f"{amount(most.without)}, with all by {amount(one.simulated)} (both simulated)"
            )
        told.append(f"{text}.")
    return Statement("Which samples did that", tuple(told), "samples")


def belief(found: Attribution) -> list[Said]:
    """How far to believe shares and effects: what this run shows, and what retraining has shown."""
    targets, error = found.targets, float(found.info["path_error"])
    said = [
        Said(
            f"The simulated optimiser meets the checkpoints to {percent(error)} % of the distance between them.",
            error > _FAR,
        )
    ]
    if targets.remainder.notna().any():
        worst = targets.loc[targets.remainder.abs().idxmax()]
        said.append(
            Said(
                f"Shares leave {percent(targets.remainder.abs().median())} % of a change unexplained (median), "
                f"{percent(abs(worst.remainder))} % at most ({worst.target}).",
                bool(targets.flagged.any()),
            )
        )
    flagged = found.segments[found.segments.flagged]
    if len(flagged):
        said.append(
            Said(
                f"Flagged for a larger remainder: {count(len(flagged), 'segment')} between checkpoints of "
                f"{count(flagged.target.nunique(), 'target')}, most often after step "
                f"{flagged['first'].mode().iloc[0]}.",
                True,
            )
        )
    off = (targets.simulated - targets.realised).abs() / targets.realised.abs()
    said.append(
        Said(f"With all samples the simulation ends {percent(off.median())} % from the realised change (median).")
    )
    said.append(Said("The share of one sample is a large force against others as large."))
    return said + [Said(text) for text in _TESTBED] + _validated(found)


def _validated(found: Attribution) -> list[Said]:
    """What replayed trainings of this run said, if there are any."""
    targets = found.targets[found.targets.validated_error.notna()]
    if targets.empty:
        return [Said("On this run nothing was retrained; tsae attribute --validate 8 does it.")]
    part = targets.validated_error / targets.realised.abs()
    text = (
        f"On this run, {found.info['config']['validate']} trainings were really replayed on random halves of its "
        f"problems: rank correlation with the simulation {number(targets.validated.median())}, error "
        f"{percent(part.median())} % of a change (medians over targets)."
    )
    return [Said(text, bool(targets.validated.median() < _LOW))]


def _problems(found: Attribution, name: str, r2: float, n: int) -> tuple[pd.DataFrame, str]:
    table = found.problems[found.problems.target == name]
    if table.empty:
        return table, ""
    if not r2 > 0:
        return table.head(0), f"effects of single problems cannot be told apart (R² {r2:.2f} on subsets left out)"
    ordered = table.sort_values("effect", ascending=False, kind="stable")
    ends = pd.concat([ordered.head(n), ordered.tail(n)]).drop_duplicates("problem_id")
    return ends, f"problems by effect, with 95 % interval (R² {r2:.2f} on subsets left out)"
