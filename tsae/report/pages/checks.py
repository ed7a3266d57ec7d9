"""The tables of the report's sections on insertion, plain directions, predictions, steps and causal tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from tsae.base.statistics.intervals import too_few
from tsae.diff.baselines import WAYS
from tsae.diff.dynamics import FLAT, KINDS
from tsae.diff.feature_diff import FeatureDiff
from tsae.report.figures import CONDITIONS
from tsae.report.pages.tables import DASH, Cell, Table, described_cells, ranged
from tsae.report.story import facts
from tsae.report.story.evidence import along_steps, predictions
from tsae.report.text import count, interval, number, percent, q_value

_MAX_TOP, _MAX_MEASURED = 5, 4


def insertion(diff: FeatureDiff) -> Table | None:
    """Whether a feature's top tokens fire it where they are put into other contexts."""
    table = diff.insertion
    if table is None or table.empty:
        return None
    strings = diff.info.get("token_strings", {})
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
    return Table(
        "Top tokens inserted elsewhere", ["reader", "feature", "tokens", "kept", "control", "verdict"], rows, 3
    )


def baselines(diff: FeatureDiff) -> Table | None:
    """AUROC of plain directions beside that of features."""
    table = diff.baselines
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


def predicted(diff: FeatureDiff) -> Table | None:
    """What the base's rollouts reinforce, and how far that came true."""
    rows: list[list[str | Cell]] = []
    for r in facts.records(predictions(diff)):
        cells: list[str | Cell] = [Cell(small=r.note, quiet=True), DASH, DASH, DASH]
        if not r.note:
            rho = ranged(r.rho, r.low, r.high, like=False)
            cells = [rho, q_value(r.p), number(r.ceiling), number(r.rho_halves, sign=True)]
        rows.append([r.checkpoint, r.part, r.gradient, r.predicted_on + " *" * r.matched, r.realised_on, *cells])
    head = ["run", "part", "gradient", "predicted on", "realised on", "rank correlation", "p", "ceiling"]
    caption = "Predicted against realised shifts; * what the run was trained on"
    return (
        Table(caption, [*head, "separate halves"], rows, 5)
        if diff.predicted is not None and len(diff.predicted)
        else None
    )


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
    for run in along_steps(diff):
        saved = ", ".join(f"{step:g}" for step in run.steps)
        counts.append([run.run, saved, *(f"{n:,}" for n in run.kinds.values())])
        strong = run.last[run.last.kind != FLAT]
        strong = strong.loc[strong.delta.abs().sort_values(ascending=False, kind="stable").index].head(_MAX_TOP)
        clearest += [
            [
                run.run,
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
        ablated = [
            other
            for other in tests
            if other["mode"] == "ablate"
            and (other["checkpoint"], other["features"]) == (test["donor"], test["features"])
        ]
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
                    _beside("change", undone, name),
                    _beside("share", into, name),
                    _share(into["whole", name]),
                ]
            )
    head = ["features", "into", "behaviour", "the donor itself", "necessary: ablated in the donor"]
    head += ["sufficient: share that they move", "share that the whole stream moves"]
    return Table("What the features are needed for, and what they bring about alone", head, rows, 3) if rows else None


def _beside(what: str, rows: dict[tuple[str, str], dict[str, Any]], name: str) -> Cell:
    """The change or the share of the features, and under it that of matched random ones."""
    if ("features", name) not in rows:
        return Cell(DASH)
    cell = _change if what == "change" else _share
    random = cell(rows["random", name])
    mine = cell(rows["features", name])
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
