"""The tables of the report's sections: captions, heads and cells as plain data, which macros.html writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tsae.base.filters import strongest
from tsae.base.statistics import too_few
from tsae.diff.baselines import WAYS
from tsae.diff.dynamics import FLAT, KINDS
from tsae.diff.feature_diff import FeatureDiff
from tsae.report.figures.checks import CONDITIONS
from tsae.report.story import facts
from tsae.report.story.gates import gates
from tsae.report.story.statements import Caveat, along_steps, at_last_step, caveats, contrasts, found_in
from tsae.report.text import count, interval, number, percent, q_value, shortened, visible
from tsae.rollouts.bands import bands_label

DASH = "–"


@dataclass(frozen=True)
class Cell:
    """What a cell says beyond plain text. Nothing of it is HTML."""

    text: str = ""
    small: str = ""
    """In small letters behind it."""
    below: str = ""
    """In small letters on a line of its own."""
    tone: str = ""
    """up, down, still or warn; isolated: text of a file, whose direction of writing stays its own."""
    quiet: bool = False
    """Whether the small letters are grey."""
    feature: int | None = None
    """Links to this feature's card."""
    opens: tuple[str, ...] = ()
    """Passages that a click on the text opens."""
    codes: tuple[str, ...] = ()
    flags: tuple[Caveat, ...] = ()
    shade: int = 0
    """1 to 9 by the size of a share, of which `against` says whether it lowered a target; 0 where that is small."""
    against: bool = False


@dataclass(frozen=True)
class Table:
    """The first column heads its row; columns from `numeric_from` align right."""

    caption: str
    head: Sequence[str | Cell]
    rows: Sequence[Sequence[str | Cell]]
    numeric_from: int = 1


_WIDEST = 80
"""Characters of a cell of text in a terminal."""


def table_text(table: Table | None, n: int | None = None) -> str:
    """The first n rows as aligned plain text; empty where there is no table. A row of one cell is a heading."""
    if table is None:
        return ""
    rows = [[_cell_text(cell) for cell in row] for row in (table.head, *table.rows[:n])]
    columns = zip(*(row for row in rows if len(row) > 1), strict=True)
    wide = [min(max(map(len, column)), _WIDEST) for column in columns]
    lines = [visible(table.caption)]
    for row in rows:
        cells = [
            f"{shortened(cell, width):<{width}}" if place < table.numeric_from else f"{cell:>{width}}"
            for place, (cell, width) in enumerate(zip(row, wide, strict=False))
        ]
        lines.append("  " + ("  ".join(cells).rstrip() if len(row) > 1 else row[0]))
    more = len(table.rows) - len(rows) + 1
    return "\n".join([*lines, f"  … {count(more, 'more row')}"] if more else lines)


def _cell_text(cell: str | Cell) -> str:
    if isinstance(cell, str):
        return visible(cell)
    feature = "" if cell.feature is None else str(cell.feature)
    parts = (feature, cell.text, *cell.codes, cell.small, cell.below, ", ".join(flag.word for flag in cell.flags))
    return " ".join(visible(part) for part in parts if part)


def described_cells(diff: FeatureDiff, feature: int) -> list[str | Cell]:
    """A feature of a diff, and what it responds to."""
    row = diff.features.loc[feature]
    share = f"{100 * row.share:.0f} %, " if facts.has_classes(diff) else ""
    stable = f", stability {number(row.stability)}" if facts.has_stability(diff) else ""
    small = f"{share}{row.group}-level{stable}"
    return [Cell(feature=int(feature)), Cell(str(diff.names[feature]), small, tone="isolated")]


def delta_cell(row: Any, q: float) -> Cell:
    """Δ of a row with an arrow where it is found at this q, its interval and its own q."""
    tone = ("up" if row.delta > 0 else "down") if row.q <= q else "still"
    arrow = {"up": "▲", "down": "▼", "still": "·"}[tone]
    small = f"{interval(row.delta_low, row.delta_high, sign=True, like=row.delta)} q {q_value(row.q)}"
    return Cell(f"{arrow} {number(row.delta, sign=True)}", small, tone=tone)


def ranged(value: float, low: float, high: float, *, sign: bool = True, like: bool = True) -> Cell:
    """A number with its interval."""
    small = interval(low, high, sign=sign, like=value if like else None)
    return Cell(number(value, sign=sign), small)


def count_cell(contrast: Any | None) -> str | Cell:
    """How many features moved, of how many, and how many differ at all."""
    if contrast is None:
        return DASH
    if contrast.note:
        return "refused"
    null = "" if math.isnan(contrast.n_null) else f", null {number(contrast.n_null)}"
    return Cell(f"{contrast.n_discoveries:,}", f"of {contrast.n_tested:,}{null}", f"{contrast.n_differs:,} differ")


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
    """Problems of every band by the step, or range of steps ("3-7"), at which they were asked, where the two cannot be
    separated."""
    found = (diff.info.get("bands") or {}).get("confounded_with_step") or {"table": {}}
    counts: dict[str, dict[str, int]] = found["table"]
    steps = sorted({step for row in counts.values() for step in row}, key=lambda step: float(step.partition("-")[0]))
    bands = [band for band in facts.BANDS if band in counts]
    rows = [[band, *(f"{int(counts[band].get(step, 0)):,}" for step in steps)] for band in bands]
    head = [band_head(diff), *(f"step {step}" for step in steps)]
    return Table("Problems by band and training step", head, rows) if steps else None


def band_head(diff: FeatureDiff) -> str:
    """The head of a column of bands: what they are, where they come from elsewhere."""
    return bands_label(diff.info.get("bands")) or "band"


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
    head = ["policy", band_head(diff), "problems", "responses", *map(facts.behaviour_name, names)]
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


def refused(diff: FeatureDiff, kind: str) -> Table | None:
    """Contrasts of a kind that were not drawn, and why."""
    rows = [
        [c.checkpoint, facts.PART_NAMES.get(c.part, "success − failure"), c.band, c.outcome, c.note]
        for c in contrasts(diff, kind=kind)
        if c.note
    ]
    head = ["checkpoint", "contrast", band_head(diff), "outcome", "why"]
    return Table(f"{count(len(rows), 'contrast')} refused, with the reason", head, rows, 9) if rows else None


def opposed(diff: FeatureDiff) -> list[Table]:
    """Tables of the pairs of runs with most opposed features."""
    runs = diff.final_checkpoints
    shifts = {run: facts.main_shift(diff, run) for run in runs}
    tables = []
    for up, down, found in facts.opposed_pairs(diff)[:MAX_PAIRS]:
        shown = found.head(MAX_OPPOSED)
        rows = [
            [
                *described_cells(diff, f),
                *(
                    delta_cell(table.loc[f], diff.q) if f in table.index else Cell(small="not tested", quiet=True)
                    for table in shifts.values()
                ),
                Cell(flags=caveats(row)),
            ]
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
            r.family: Cell(small=r.note, quiet=True) if r.note else delta_cell(r, diff.q) for r in facts.records(mine)
        }
        rows.append([str(checkpoint), str(band), *(cells.get(family, DASH) for family in sizes)])
    head: list[str | Cell] = ["run", band_head(diff), *(Cell(family, f"({n} features)") for family, n in sizes.items())]
    caption = "Δ of families: of the mean of their features, each in its own standard deviation"
    return Table(caption, head, rows, 2)


def outcome_counts(diff: FeatureDiff) -> Table | None:
    """Success − failure: how many features differ, for every reader and band."""
    rows = [
        [
            c.checkpoint,
            c.band,
            f"{c.n_problems:,}",
            f"{c.n_left_out:,}",
            DASH if c.note else f"{c.n_tested:,}",
            "refused" if c.note else f"{c.n_discoveries:,}",
            DASH if math.isnan(c.n_null) else number(c.n_null),
            DASH if c.note else f"{c.n_differs:,}",
        ]
        for c in contrasts(diff, kind="outcome")
    ]
    head = ["reader", band_head(diff), "problems with both outcomes", "left out"]
    head += ["features tested", "differ so", "null", "at all"]
    caption = f"Success − failure within problem: features that differ by {facts.least_text(diff)}"
    return Table(caption, head, rows, 2) if rows else None


def outcomes(diff: FeatureDiff) -> list[Table]:
    """Success − failure: the clearest features of every reader."""
    tables = []
    found = {(c.checkpoint, c.band): c for c in contrasts(diff, kind="outcome")}
    for checkpoint in dict.fromkeys(checkpoint for checkpoint, _ in found):
        drawn = [found[checkpoint, b] for b in ["all", *facts.bands_of(diff)] if (checkpoint, b) in found]
        rows = [
            [c.band, *described_cells(diff, e.feature), number(e["mean"]), number(e.reference), delta_cell(e, diff.q),
             Cell(flags=caveats(e))]
            for c in drawn
            for _, e in found_in(diff, c, _MAX_STRONGEST).iterrows()
        ]  # fmt: skip
        head = [band_head(diff), "feature", "responds to", "successes", "failures", "Δ", "confounds"]
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
        [bands[c], f"{c.n_problems:,}", *([DASH, "refused"] if c.note else [f"{c.n_tested:,}", f"{c.n_discoveries:,}"])]
        for c in found
    ]
    clearest = [
        [bands[c], *described_cells(diff, e.feature), number(e["mean"], sign=True), number(e.reference, sign=True),
         delta_cell(e, diff.q)]
        for c in found
        for _, e in found_in(diff, c, _MAX_STRONGEST).iterrows()
    ]  # fmt: skip
    caption = f"Bands whose outcome effects differ by {facts.least_text(diff)}"
    tables = [Table(caption, ["bands", "problems", "features tested", "differ"], counts)]
    head = ["bands", "feature", "responds to", "effect in the first", "in the second", "Δ"]
    return [*tables, Table("Clearest features", head, clearest, 3)] if clearest else tables


_MAX_TOP, _MAX_MEASURED = 5, 4


def insertion(table: pd.DataFrame | None, strings: Mapping[str, str]) -> Table | None:
    """Whether a feature's top tokens fire it where they are put into other contexts; `strings` are tokens by id."""
    if table is None or table.empty:
        return None
    rows = [
        [
            r.reader,
            Cell(feature=int(r.feature)),
            Cell(codes=tuple(strings.get(str(i), f"#{i}") for i in r.top_ids)),
            DASH if pd.isna(r.kept) else ranged(r.kept, r.kept_low, r.kept_high, sign=False),
            DASH if pd.isna(r.kept) else number(r.control / r.typical),
            r.verdict,
        ]
        for r in facts.records(table)
    ]
    head = ["reader", "feature", "tokens", "kept", "control", "verdict"]
    return Table("Top tokens inserted elsewhere", head, rows, 3)


def baselines(table: pd.DataFrame | None) -> Table | None:
    """AUROC of plain directions beside that of features."""
    if table is None or table.empty:
        return None
    rows = []
    for (kind, checkpoint), mine in table.groupby(["kind", "checkpoint"], sort=False):
        cells = {
            r.way: Cell(f"{r.auroc:.2f}", f"[{r.low:.2f}, {r.high:.2f}]") for r in facts.records(mine) if not r.note
        }
        what = f"success − failure, read by {checkpoint}" if kind == "outcome" else f"shift of {checkpoint}"
        rows.append([what, *(cells.get(way, DASH) for way in WAYS)])
    return Table("Held-out AUROC within problem, with interval", ["contrast", *WAYS], rows)


def predicted(compared: pd.DataFrame) -> Table:
    """What the base's rollouts reinforce, and how far that came true: rows of `Reinforcement.compare`."""
    rows: list[list[str | Cell]] = []
    for r in facts.records(compared):
        cells: list[str | Cell] = [Cell(small=r.note, quiet=True), DASH, DASH, DASH]
        if not r.note:
            rho = ranged(r.rho, r.low, r.high, like=False)
            cells = [rho, q_value(r.p), number(r.ceiling), number(r.rho_halves, sign=True)]
        rows.append([r.checkpoint, r.part, r.gradient, r.predicted_on + " *" * r.matched, r.realised_on, *cells])
    head = ["run", "part", "gradient", "predicted on", "realised on", "rank correlation", "p", "ceiling"]
    caption = "Predicted against realised shifts; * what the run was trained on"
    return Table(caption, [*head, "separate halves"], rows, 5)


def reinforced(diff: FeatureDiff) -> dict[str, Table | None]:
    """Of every gradient the features that the base's rollouts reinforce; None where there is no clear one."""
    table, tables = diff.reinforcement, {}
    if table is None:
        return {}
    head = ["feature", "responds to", "covariance with advantage, in the feature's standard deviations", "q"]
    for gradient, mine in table[table["by"] == "all"].groupby("gradient", sort=False):
        found = mine[mine.q <= diff.q]
        rows = [
            [*described_cells(diff, r.feature), ranged(r.delta, r.delta_low, r.delta_high), q_value(r.q)]
            for r in facts.records(facts.strongest(found, diff.q, 2 * _MAX_TOP))
        ]
        n = count(len(found), "feature")
        caption = f"Features that the {gradient} gradient on the base's rollouts reinforces: {n}, the largest"
        tables[str(gradient)] = Table(caption, head, rows, 2) if rows else None
    return tables


def pass_at_k(diff: FeatureDiff) -> Table | None:
    """pass@k of every reader, by band; None where rollouts were not sampled afresh."""
    known = diff.info.get("pass_at_k")
    if not known:
        return None
    table = pd.DataFrame(known)
    ks = sorted(table.k.unique())
    rows: list[list[str | Cell]] = []
    for (band, policy), mine in table.groupby(["band", "policy"], sort=False):
        cells = {r.k: ranged(r.pass_at_k, r.low, r.high, sign=False) for r in facts.records(mine)}
        rows.append([str(band), str(policy), f"{mine.n_problems.max():,}", *(cells.get(k, DASH) for k in ks)])
    return Table("pass@k", ["problems", "policy", "number", *(f"k = {k}" for k in ks)], rows, 2)


def steps(diff: FeatureDiff) -> list[Table]:
    """How many features of each kind every run has, and when the clearest set in."""
    counts: list[list[str | Cell]] = []
    clearest: list[list[str | Cell]] = []
    for run, of_run in along_steps(diff).items():
        last = at_last_step(of_run)
        saved = ", ".join(f"{step:g}" for step in sorted(of_run.step.unique()))
        counts.append([run, saved, *(f"{n:,}" for n in last.kind.value_counts().reindex(KINDS, fill_value=0))])
        strong = strongest(last[last.kind != FLAT], "delta", _MAX_TOP)
        clearest += [
            [
                run,
                *described_cells(diff, r.feature),
                r.kind,
                Cell(f"{r.onset:g}", f"[{r.onset_low:g}, {r.onset_high:g}]"),
                ranged(r.shift, r.low, r.high),
            ]
            for r in facts.records(strong)
        ]
    tables = [Table("Features by kind", ["run", "steps", *KINDS], counts, 2)] if counts else []
    head = ["run", "feature", "responds to", "kind", "onset", "shift at the last step"]
    return [*tables, Table("Clearest features", head, clearest, 4)] if clearest else tables


def necessary_and_sufficient(tests: Sequence[dict[str, Any]]) -> Table | None:
    """Of every run's features: what ablating them in the run undoes, and what transplanting them moves.

    A row a donor, set of features and behaviour; None where nothing was transplanted.
    """
    rows: list[list[str | Cell]] = []
    for test in tests:
        if "donor" not in test:
            continue
        same = ("ablate", test["donor"], test["features"])
        ablated = [other for other in tests if (other["mode"], other["checkpoint"], other["features"]) == same]
        into = {(row["condition"], row["behaviour"]): row for row in test["changes"]}
        undone = {(row["condition"], row["behaviour"]): row for other in ablated for row in other["changes"]}
        # A behaviour that few responses allow to be measured may be unknown of some conditions.
        both = [name for condition, name in into if condition == "donor" and ("whole", name) in into]
        names = facts.behaviour_order(both)
        differs = [name for name in names[2:] if not pd.isna(into["donor", name].get("share"))]
        for name in [*names[:2], *differs][:_MAX_MEASURED]:
            rows.append(
                [
                    f"{count(len(test['features']), 'feature')} of {test['donor']}",
                    test["checkpoint"],
                    facts.behaviour_name(name),
                    _change(into["donor", name]),
                    _beside(_change, undone, name),
                    _beside(_share, into, name),
                    _share(into["whole", name]),
                ]
            )
    head = ["features", "into", "behaviour", "the donor itself", "necessary: ablated in the donor"]
    head += ["sufficient: share that they move", "share that the whole stream moves"]
    return Table("What the features are needed for, and what they bring about alone", head, rows, 3) if rows else None


def _beside(cell: Callable[[dict[str, Any]], Cell], rows: dict[tuple[str, str], dict[str, Any]], name: str) -> Cell:
    """The change or the share of the features, and under it that of matched random ones."""
    if ("features", name) not in rows:
        return Cell(DASH)
    random, mine = cell(rows["random", name]), cell(rows["features", name])
    return Cell(mine.text, mine.small, f"random {random.text} {random.small}")


def _share(row: dict[str, Any]) -> Cell:
    if row.get("share") is None or pd.isna(row["share"]):
        return Cell(DASH)
    return Cell(f"{percent(row['share'])} %", f"[{percent(row['share_low'])}, {percent(row['share_high'])}]")


def changes(test: dict[str, Any]) -> Table | None:
    """What an intervention changed, beside its controls."""
    if not test.get("changes"):
        return None
    names = facts.behaviour_order(row["behaviour"] for row in test["changes"])
    cells = {(row["condition"], row["behaviour"]): _change(row) for row in test["changes"]}
    rows = [
        [word, *(cells.get((condition, name), DASH) for name in names)]
        for condition, word in CONDITIONS.items()
        if any((condition, name) in cells for name in names)
    ]
    head = ["edited", *map(facts.behaviour_name, names)]
    return Table("Change against no edit, paired over problems", head, rows)


def _change(row: dict[str, Any]) -> Cell:
    change, low, high = (row[name] for name in ("change", "change_low", "change_high"))
    ends = too_few(int(row["n_paired"])) if pd.isna(low) else interval(low, high, sign=True, like=change)
    return Cell(number(change, sign=True), ends)
