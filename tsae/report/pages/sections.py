"""The tables of the report's sections on gates, behaviours, shifts, runs in opposition, families and outcomes."""

from __future__ import annotations

import math

import pandas as pd

from tsae.diff.feature_diff import FeatureDiff
from tsae.report.pages.tables import (
    DASH,
    Cell,
    Table,
    count_cell,
    delta_cell,
    described_cells,
    effect_cells,
    ranged,
    sized,
)
from tsae.report.story import facts
from tsae.report.story.gates import bands_by_step, gates
from tsae.report.story.statements import Contrast, caveats, contrasts, effects
from tsae.report.text import count, number, percent

MAX_OPPOSED, MAX_PAIRS = 12, 6
_MAX_STRONGEST = 5


def readers(diff: FeatureDiff) -> Table:
    """Reconstruction per reader."""
    rows: list[list[str | Cell]] = [
        [
            r["id"],
            r.get("run") or DASH,
            DASH if r.get("step") is None else str(r["step"]),
            r.get("trained_on") or DASH,
            DASH if r.get("n_tokens") is None else f"{r['n_tokens']:,}",
            f"{percent(r.get('outlier_share', 0.0))} %",
            "none" if r["fve"] is None else f"{r['fve']:.3f}",
            DASH if r.get("l0") is None else f"{r['l0']:.1f}",
            Cell(f"flagged ({r['why']})", tone="warn") if r["why"] else "passed",
        ]
        for r in gates(diff).readers
    ]
    head = ["reader", "run", "step", "trained on", "tokens", "left out"]
    head += ["variance explained", "active per token", "gate"]
    return Table("Reconstruction per reader", head, rows, 4)


def problems_by_step(diff: FeatureDiff) -> Table | None:
    """Problems of every band by the step at which they were asked, where the two cannot be told apart."""
    steps, counts = bands_by_step(diff)
    rows = [[band, *(f"{n:,}" for n in row)] for band, row in counts.items()]
    head = ["band", *(f"step {step}" for step in steps)]
    return Table("Problems by band and training step", head, rows) if steps else None


def behaviours(diff: FeatureDiff) -> Table | None:
    """The behaviours' numbers, a row a checkpoint and band."""
    names, table = facts.behaviours_of(diff), diff.behaviours
    if not names:
        return None
    rows: list[list[str | Cell]] = []
    for policy in table.policy.unique():
        for band in ["all", *[b for b in facts.BANDS if (table.band == b).any()]]:
            cells = {name: facts.behaviour(diff, policy, band, name) for name in names}
            if known := [cell for cell in cells.values() if cell is not None]:
                sizes = [f"{known[0].n_problems:,}", f"{known[0].n_trajectories:,}"]
                rows.append([policy, band, *sizes, *(_behaviour(diff, *item) for item in cells.items())])
    head = ["policy", "band", "problems", "responses", *map(facts.behaviour_name, names)]
    return Table("Behaviours: mean over problems, with intervals", head, rows, 2)


def _behaviour(diff: FeatureDiff, name: str, row: pd.Series | None) -> str | Cell:
    if row is None:
        return DASH
    if facts.is_share(diff, name):
        return Cell(f"{percent(row['mean'])} %", f"[{percent(row.low)}, {percent(row.high)}]")
    return ranged(row["mean"], row.low, row.high, sign=False)


def shift_counts(diff: FeatureDiff) -> Table | None:
    """How many features moved, by part, band and outcome, for every checkpoint."""
    shifts = contrasts(diff, kind="shift")
    columns = list(dict.fromkeys((c.band, c.outcome) for c in shifts))
    # "all" alone reads as everything; a single key is enough elsewhere.
    names = [
        band if outcome == "all" else outcome if band == "all" else f"{band}, {outcome}" for band, outcome in columns
    ]
    of = {(c.checkpoint, c.part, c.band, c.outcome): c for c in shifts}
    rows = [
        [
            checkpoint,
            facts.PART_NAMES.get(part, part),
            *(count_cell(of.get((checkpoint, part, *key))) for key in columns),
        ]
        for checkpoint, part in dict.fromkeys((c.checkpoint, c.part) for c in shifts)
    ]
    caption = f"Features moved ({facts.least_text(diff)}), of features tested; below, how many differ at all"
    return Table(caption, ["checkpoint", "shift", *names], rows, 2) if shifts else None


def refused(found: list[Contrast]) -> Table | None:
    """Contrasts that were not drawn, and why."""
    rows = [
        [c.checkpoint, facts.PART_NAMES.get(c.part, "success − failure"), c.band, c.outcome, c.refused]
        for c in found
        if c.refused
    ]
    head = ["checkpoint", "contrast", "band", "outcome", "why"]
    return Table(f"{count(len(rows), 'contrast')} refused, with the reason", head, rows, 9) if rows else None


def opposed(diff: FeatureDiff) -> list[Table]:
    """Tables of the pairs of runs with most opposed features."""
    runs = facts.final_checkpoints(diff)
    shifts = {run: facts.main_shift(diff, run) for run in runs}
    tables = []
    for up, down, found in facts.opposed_pairs(diff)[:MAX_PAIRS]:
        shown = found.head(MAX_OPPOSED)
        moved = {
            run: {e.feature: e for e in effects(table.loc[table.index.intersection(shown.index)], diff)}
            for run, table in shifts.items()
        }
        rows = [
            [*described_cells(diff, f), *(delta_cell(moved[run].get(f)) for run in runs), Cell(flags=caveats(row))]
            for f, row in shown.iterrows()
        ]
        more = f", the {len(shown)} clearest" if len(shown) < len(found) else ""
        caption = f"Raised by {up}, lowered by {down}: {count(len(found), 'feature')}{more}"
        tables.append(Table(caption, ["feature", "responds to", *runs, "confounds"], rows, 2))
    return tables


def opposed_features(diff: FeatureDiff) -> list[int]:
    """The clearest features of the first two runs in opposition, either way round, to draw."""
    pairs = facts.opposed_pairs(diff)
    first = [found for up, down, found in pairs if {up, down} == set(pairs[0][:2])]
    return [int(str(feature)) for found in first for feature in found.head(MAX_OPPOSED // 2).index]


def families(diff: FeatureDiff) -> Table | None:
    """Shift of every family by run and band."""
    table = diff.families
    if table.empty:
        return None
    sizes = {r.family: r.n_features for r in facts.records(table)}
    rows: list[list[str | Cell]] = []
    for (checkpoint, band), mine in table.groupby(["checkpoint", "band"], sort=False):
        cells = {
            r.family: Cell(small=r.note, quiet=True)
            if r.note
            else sized(r.delta, r.delta_low, r.delta_high, r.q, r.q <= diff.q)
            for r in facts.records(mine)
        }
        rows.append([str(checkpoint), str(band), *(cells.get(family, DASH) for family in sizes)])
    head: list[str | Cell] = ["run", "band", *(Cell(family, f"({n} features)") for family, n in sizes.items())]
    caption = "Δ of families: of the mean of their features, each in its standard deviation over base trajectories"
    return Table(caption, head, rows, 2)


def outcome_counts(diff: FeatureDiff) -> Table | None:
    """Success − failure: how many features differ, for every reader and band."""
    rows = [
        [
            c.checkpoint,
            c.band,
            f"{c.n_problems:,}",
            f"{c.n_left_out:,}",
            DASH if c.refused else f"{c.n_tested:,}",
            "refused" if c.refused else f"{c.n_found:,}",
            DASH if math.isnan(c.n_null) else number(c.n_null),
            DASH if c.refused else f"{c.n_differs:,}",
        ]
        for c in contrasts(diff, kind="outcome")
    ]
    head = [
        "reader",
        "band",
        "problems with both outcomes",
        "left out",
        "features tested",
        "differ so",
        "null",
        "at all",
    ]
    caption = f"Success − failure within problem: features that differ by {facts.least_text(diff)}"
    return Table(caption, head, rows, 2) if rows else None


def outcomes(diff: FeatureDiff) -> list[Table]:
    """Success − failure: the clearest features of every reader."""
    tables = []
    found = {(c.checkpoint, c.band): c for c in contrasts(diff, kind="outcome")}
    for checkpoint in dict.fromkeys(checkpoint for checkpoint, _ in found):
        drawn = [found[checkpoint, b] for b in ["all", *facts.bands_of(diff)] if (checkpoint, b) in found]
        rows = [
            [c.band, *effect_cells(e), number(e.after), number(e.before), delta_cell(e), Cell(flags=e.caveats)]
            for c in drawn
            for e in c.strongest(_MAX_STRONGEST)
        ]
        head = ["band", "feature", "responds to", "successes", "failures", "Δ", "confounds"]
        if rows:
            tables.append(Table(f"{checkpoint}: clearest features by band", head, rows, 3))
    return tables


def interactions(diff: FeatureDiff) -> list[Table]:
    """Whether success − failure is another in one band than in another: how many features, and the clearest."""
    found = contrasts(diff, kind="interaction", checkpoint=diff.base)
    if not found:
        return []
    bands = {c: c.band.replace("-", " − ") for c in found}
    counts = [
        [bands[c], f"{c.n_problems:,}", *([DASH, "refused"] if c.refused else [f"{c.n_tested:,}", f"{c.n_found:,}"])]
        for c in found
    ]
    clearest = [
        [bands[c], *effect_cells(e), number(e.after, sign=True), number(e.before, sign=True), delta_cell(e)]
        for c in found
        for e in c.strongest(_MAX_STRONGEST)
    ]
    caption = f"Bands whose outcome effects differ by {facts.least_text(diff)}"
    tables = [Table(caption, ["bands", "problems", "features tested", "differ"], counts)]
    head = ["bands", "feature", "responds to", "effect in the first", "in the second", "Δ"]
    return [*tables, Table("Clearest features", head, clearest, 3)] if clearest else tables
