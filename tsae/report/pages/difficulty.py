"""How difficulty moved, as one HTML file that opens with no network."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from tsae.base.statistics.intervals import too_few
from tsae.report.figures.difficulty import migration_figure, pass_at_k_figure
from tsae.report.pages.document import render_page, write_page
from tsae.report.pages.tables import DASH, Cell, Table
from tsae.report.story.difficulty import lead, measured_text, moved_lines, percent_change
from tsae.report.text import percent, q_value
from tsae.rollouts.difficulty import Difficulty
from tsae.rollouts.rewards import KINDS, group_summary
from tsae.rollouts.schema import BANDS


def write_difficulty(difficulty: Difficulty, path: str | Path, *, title: str | None = None) -> Path:
    """Write the page.

    Raises:
        TsaeError: where the path is a folder.
    """
    content = render_page(
        "difficulty.html",
        title or "How difficulty moved",
        {"migration": migration_figure(difficulty), "passatk": pass_at_k_figure(difficulty)},
        lead=lead(difficulty),
        moved=moved_lines(difficulty),
        measured=measured_text(difficulty),
        bands=_bands(difficulty),
        moves=_moves(difficulty),
        passed=_passed(difficulty),
        groups=_groups(difficulty),
    )
    return write_page(path, content)


def _bands(difficulty: Difficulty) -> Table:
    rows = [
        [str(policy), *(f"{int(row[band]):,}" for band in (*BANDS, "sure")), f"{percent(row.mean_pass_rate)} %"]
        for policy, row in difficulty.bands().iterrows()
    ]
    caption = "Problems by band; sure: the whole interval lies in the band"
    return Table(caption, ["checkpoint", *BANDS, "sure", "mean pass rate"], rows)


def _moves(difficulty: Difficulty) -> Table:
    moves = difficulty.migration
    moves = moves[(moves.from_band != moves.to_band) & (moves.n > 0)]
    rows: list[list[str | Cell]] = [
        [
            f"{r.start} → {r.end}",
            f"{r.from_band} → {r.to_band}",
            f"{r.n:,}",
            Cell(f"{r.expected:.1f}", f"[{r.null_low:.0f}, {r.null_high:.0f}]"),
            q_value(r.p),
        ]
        for r in moves.itertuples()
    ]
    return Table("Moves", ["from → to", "bands", "problems", "by chance", "p"], rows, 2)


def _passed(difficulty: Difficulty) -> Table:
    rows: list[list[str | Cell]] = []
    for r in difficulty.pass_at_k.itertuples():
        ends = f"[{percent_change(r.difference_low)}, {percent_change(r.difference_high)}]"
        few = too_few(int(r.n_paired)) if pd.isna(r.difference_low) else ends
        rows.append(
            [
                str(r.policy),
                r.band,
                str(r.k),
                Cell(f"{percent(r.pass_at_k)} %", f"[{percent(r.low)}, {percent(r.high)}]"),
                Cell(percent_change(r.difference), few) if r.n_paired else DASH,
                f"{r.n_problems:,}",
                f"{r.n_left_out:,}",
            ]
        )
    head = ["checkpoint", "band", "k", "pass@k", "difference, points", "problems", "with fewer than k responses"]
    return Table("pass@k", head, rows, 2)


def _groups(difficulty: Difficulty) -> Table:
    counted = ("n_groups", *KINDS[:4], "no_variance")
    rows = []
    for r in group_summary(difficulty.groups).to_dict("records"):
        share = r["single_success_share"]
        single = DASH if pd.isna(share) else f"{percent(share)} %"
        rows.append([str(r["policy"]), str(r["band"]), *(f"{r[name]:,}" for name in counted), single])
    head = ["checkpoint", "band", "groups", *KINDS[:4], "no variance", "share of single successes"]
    return Table("Groups", head, rows, 2)
