"""How difficulty moved, as plain text for the terminal."""

from __future__ import annotations

import pandas as pd

from tsae.base.statistics.intervals import FEWEST
from tsae.report.story.difficulty import ends_of, lead, measured_text, moved_lines
from tsae.rollouts.difficulty import Difficulty
from tsae.rollouts.rewards import KINDS, group_summary
from tsae.rollouts.schema import BANDS


def difficulty_text(difficulty: Difficulty) -> str:
    """For the terminal."""
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
