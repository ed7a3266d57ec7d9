"""How difficulty moved, for the terminal and as one HTML file that opens with no network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from tsae.base.intervals import FEWEST, too_few
from tsae.report.text import count, html_text, percent, q_value
from tsae.rollouts.advantages import KINDS, group_summary
from tsae.rollouts.difficulty import found_how
from tsae.rollouts.table import BANDS

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from tsae.rollouts.moving import Difficulty

_TITLE = "How difficulty moved"


def write_difficulty(difficulty: Difficulty, path: str | Path, *, title: str | None = None) -> Path:
    """Write the page.

    Raises:
        TsaeError: where the path is a folder.
    """
    from tsae.report import write_page
    from tsae.report.figures.difficulty import migration_figure, pass_at_k_figure
    from tsae.report.page import document, figure_block

    drawn: dict[str, go.Figure | None] = {}
    moved = "".join(f"<p>{html_text(line)}</p>" for line in moved_lines(difficulty))
    parts = [
        (
            "bands",
            "Bands along the run",
            figure_block(
                drawn,
                "migration",
                migration_figure(difficulty),
                "Every bar is a checkpoint, easy problems on top; ribbons are the problems that go from one band to "
                "another, in the colour of where they arrive. Full ribbons are broader than 97.5 % of what chance "
                "alone makes with this number of responses (fewer, where checkpoints were sampled with the same seed); "
                "pale ones are not.",
            )
            + moved
            + _bands_table(difficulty),
        ),
        (
            "passatk",
            "pass@k",
            figure_block(
                drawn,
                "passatk",
                pass_at_k_figure(difficulty),
                "Unbiased pass@k, mean over problems, with intervals over problems. The columns are the "
                "problems' bands before training.",
            )
            + f'<p class="quiet">{html_text(measured_text(difficulty))}</p>'
            + _pass_table(difficulty),
        ),
        ("groups", "What groups have to teach", _groups_text() + _groups_table(difficulty)),
    ]
    body = (
        f'<header><h1>{html_text(title or _TITLE)}</h1><p class="lead">{html_text(lead(difficulty))}</p></header><main>'
        + "".join(
            f'<section id="{id}" aria-labelledby="{id}-h"><h2 id="{id}-h">{heading}</h2>{content}</section>'
            for id, heading, content in parts
        )
        + "</main><noscript><p class='warn'>Figures need JavaScript; the tables hold the same numbers.</p></noscript>"
    )
    return write_page(path, document(title or _TITLE, body, drawn))


def lead(difficulty: Difficulty) -> str:
    """What was measured, on how much."""
    rates, cut = difficulty.rates, difficulty.info["cutoffs"]
    shares = difficulty.info["quantiles"]
    how = (
        f" (the easiest {shares['easy']:.0%} and the hardest {shares['hard']:.0%} for {difficulty.info['reference']})"
        if shares
        else ""
    )
    return (
        f"{count(rates.problem_id.nunique(), 'problem')}, {count(rates.policy.nunique(), 'checkpoint')}, "
        f"{int(rates.n.median())} responses to a problem. "
        f"Easy: a pass rate of at least {cut['easy']:.3g}; hard: at most {cut['hard']:.3g}{how}."
    )


def measured_text(difficulty: Difficulty) -> str:
    """Where the bands of pass@k and of groups come from."""
    bands = difficulty.info["bands"]
    how = found_how(bands)
    text = f"{how[0].upper()}{how[1:]}."
    if bands and not bands["separate"]:
        # A group is whole, so that its own outcomes take part in its band.
        text += (
            " Groups are shown whole, with the responses that their band was measured on: hard ones look a little "
            "harder, easy ones easier than they are."
        )
    return text


def moved_lines(difficulty: Difficulty) -> list[str]:
    """A line a run: from where it started to where it ended, what moved further than chance."""
    from tsae.report.figures.difficulty import moved_text

    lines = []
    for run, path in difficulty.paths.items():
        table = difficulty.migration
        table = table[(table.run == run) & (table.start == path[0]) & (table.end == path[-1])]
        if table.empty:
            if len(path) > 1:
                lines.append(f"{path[0]} → {path[-1]}: no problem was answered at every step, so no moves are counted.")
            continue
        moves = table[(table.from_band != table.to_band) & (table.n > table.null_high)]
        said = "; ".join(moved_text(row) for _, row in moves.sort_values("n", ascending=False).iterrows())
        away = table[table.from_band != table.to_band]
        n = f"{int(away.n.sum())} of {int(table.n_problems.iloc[0])} problems changed bands"
        chance = f"{away.expected.sum():.1f} would by chance"
        lines.append(f"{path[0]} → {path[-1]}: {n}; {chance}." + (f" Beyond chance: {said}." if said else ""))
    return lines


def difficulty_text(difficulty: Difficulty) -> str:
    """For the terminal."""
    from tsae.report.figures.difficulty import ends_of

    lines = [lead(difficulty), ""]
    lines.append(f"  {'problems':<18}{'easy':>7}{'medium':>8}{'hard':>7}{'mean pass rate':>17}")
    for policy, row in difficulty.bands().iterrows():
        counts = f"{int(row.easy):>7}{int(row.medium):>8}{int(row.hard):>7}"
        lines.append(f"  {policy!s:<18}{counts}{row.mean_pass_rate:>17.3f}")
    sure = difficulty.bands().sure.sum() / len(difficulty.rates)
    lines.append(f"  For {sure:.0%} of problems and checkpoints the whole interval lies in the band.")
    lines += ["", *moved_lines(difficulty), "", _pass_head(difficulty)]
    shown = ends_of(difficulty)
    table = difficulty.pass_at_k[difficulty.pass_at_k.policy.isin(shown)]
    sizes = [table.k.min(), table.k.max()] if table.k.min() < table.k.max() else [table.k.min()]
    lines.append(f"  {'':<26}" + "".join(f"{f'pass@{k}':>48}" for k in sizes))
    for band in [b for b in ("all", *BANDS) if (table.band == b).any()]:
        for policy in shown:
            cells = [_pass_cell(table, policy, band, k) for k in sizes]
            lines.append(f"  {band:<8}{policy:<18}" + "".join(f"{cell:>48}" for cell in cells))
    lines += [f"  {measured_text(difficulty)}", "", "Groups (no variance: all rewards equal, nothing to learn from)"]
    head = "".join(f"{name:>16}" for name in (*KINDS[:4], "no variance", "single's share"))
    lines.append(f"  {'':<26}{'groups':>7}{head}")
    summary = group_summary(difficulty.groups)
    for row in summary[summary.policy.isin(shown)].to_dict("records"):
        numbers = "".join(f"{row[name]:>16}" for name in (*KINDS[:4], "no_variance"))
        share = "–" if pd.isna(row["single_success_share"]) else f"{row['single_success_share']:.0%}"
        lines.append(f"  {row['band']:<8}{row['policy']:<18}{row['n_groups']:>7}{numbers}{share:>16}")
    lines.append("  single's share: of all positive advantage, what single successes carry")
    return "\n".join(lines)


def _pass_head(difficulty: Difficulty) -> str:
    few = f"; ?: of fewer than {FEWEST} problems, too few to say" if _any_few(difficulty.pass_at_k) else ""
    return f"pass@k (interval; difference from the start, paired over problems{few})"


def _any_few(table: pd.DataFrame) -> bool:
    return bool(((table.n_paired > 0) & table.difference_low.isna()).any())


def _pass_cell(table: pd.DataFrame, policy: str, band: str, k: int) -> str:
    found = table[(table.policy == policy) & (table.band == band) & (table.k == k)]
    if found.empty:
        return "–"
    row = found.iloc[0]
    text = f"{row.pass_at_k:.3f} [{row.low:.3f}, {row.high:.3f}]"
    if row.n_paired:
        few = pd.isna(row.difference_low)
        ends = f"? {int(row.n_paired)}" if few else f"[{row.difference_low:+.3f}, {row.difference_high:+.3f}]"
        text += f" {row.difference:+.3f} {ends}"
    return text


def _bands_table(difficulty: Difficulty) -> str:
    from tsae.report.sections import table

    body = [
        [
            html_text(policy),
            *(f"{int(row[b]):,}" for b in BANDS),
            f"{int(row.sure):,}",
            f"{percent(row.mean_pass_rate)} %",
        ]
        for policy, row in difficulty.bands().iterrows()
    ]
    head = ["checkpoint", *BANDS, "sure", "mean pass rate"]
    moves = difficulty.migration
    moves = moves[(moves.from_band != moves.to_band) & (moves.n > 0)]
    rows = [
        [
            html_text(f"{r.start} → {r.end}"),
            f"{r.from_band} → {r.to_band}",
            f"{r.n:,}",
            f"{r.expected:.1f} <small>[{r.null_low:.0f}, {r.null_high:.0f}]</small>",
            q_value(r.p),
        ]
        for r in moves.itertuples()
    ]
    return _folded(
        "Numbers",
        table("Problems by band; sure: the whole interval lies in the band", head, body)
        + table("Moves", ["from → to", "bands", "problems", "by chance", "p"], rows, numeric_from=2),
    )


def _pass_table(difficulty: Difficulty) -> str:
    from tsae.report.figures.difficulty import percent_change
    from tsae.report.sections import table

    rows = []
    for r in difficulty.pass_at_k.itertuples():
        ends = f"[{percent_change(r.difference_low)}, {percent_change(r.difference_high)}]"
        ends = f"<small>{too_few(int(r.n_paired)) if pd.isna(r.difference_low) else ends}</small>"
        rows.append(
            [
                html_text(r.policy),
                r.band,
                str(r.k),
                f"{percent(r.pass_at_k)} % <small>[{percent(r.low)}, {percent(r.high)}]</small>",
                f"{percent_change(r.difference)} {ends}" if r.n_paired else "–",
                f"{r.n_problems:,}",
                f"{r.n_left_out:,}",
            ]
        )
    head = ["checkpoint", "band", "k", "pass@k", "difference, points", "problems", "with fewer than k responses"]
    return _folded("Numbers", table("pass@k", head, rows, numeric_from=2))


def _groups_text() -> str:
    return (
        '<p class="quiet">A group is the responses of one checkpoint to one problem. Where all rewards are equal it '
        "has no variance and teaches nothing. A single success among failures carries the largest advantage there is, "
        "earned or lucky; its share is that of all positive advantage in the row.</p>"
    )


def _groups_table(difficulty: Difficulty) -> str:
    from tsae.report.sections import table

    rows = []
    for r in group_summary(difficulty.groups).to_dict("records"):
        share = r["single_success_share"]
        rows.append(
            [
                html_text(r["policy"]),
                str(r["band"]),
                f"{r['n_groups']:,}",
                *(f"{r[name]:,}" for name in KINDS[:4]),
                f"{r['no_variance']:,}",
                "–" if pd.isna(share) else f"{percent(share)} %",
            ]
        )
    head = ["checkpoint", "band", "groups", *KINDS[:4], "no variance", "share of single successes"]
    return table("Groups", head, rows, numeric_from=2)


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{html_text(summary)}</summary>{content}</details>"
