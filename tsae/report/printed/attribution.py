"""What `tsae attribute` prints."""

from __future__ import annotations

import pandas as pd

from tsae.attribution.attribution import Attribution
from tsae.report.text import visible
from tsae.rollouts.table import Rollouts

_TEXT = 60
"""Characters of a response."""


def attribution_text(found: Attribution, rollouts: Rollouts, n: int = 3) -> str:
    """Per target: what moved, kinds of samples, problems, and single samples for and against."""
    lines = [f"{found}: {found.info['recipe']}"]
    for target in found.targets.itertuples():
        mine = {name: table[table.target == target.target] for name, table in _tables(found).items()}
        lines += ["", f"{target.target}: {target.before:.4g} → {target.after:.4g} ({target.realised:+.4g})"]
        flag = "  (beware: much)" if target.flagged else ""
        lines.append(f"  unexplained by shares: {abs(target.remainder):.1%} of the change{flag}")
        if not mine["groups"].empty:
            lines.append(f"  {'samples':<26}{'n':>7}{'share':>11}{'without':>11}{'alone':>11}")
        for row in mine["groups"].itertuples():
            numbers = f"{row.n:>7,}{row.share:>+11.3g}{row.without:>+11.3g}{row.alone:>+11.3g}"
            lines.append(f"  {row.group:<26}{numbers}")
        lines += _problems(mine["problems"], found.info["fit"].get(target.target), n)
        lines += _samples(found.of_target(target.target, n), rollouts)
    lines += [
        "",
        "share: its part of what happened; shares add up. without, alone: the change that a run without these",
    ]
    lines += ["samples, or with them only, would have made by simulation; these do not add up.", ""]
    return "\n".join(lines + [f"note: {note}" for note in found.info["notes"]])


def _tables(found: Attribution) -> dict[str, pd.DataFrame]:
    return {"groups": found.groups, "problems": found.problems}


def _problems(table: pd.DataFrame, fit: float | None, n: int) -> list[str]:
    """The problems with the largest effects."""
    if table.empty or fit is None:
        return []
    if not fit > 0:
        return [f"  effects of single problems are not to be told apart (R² {fit:.2f} on halves left out)"]
    ordered = table.sort_values("effect", ascending=False)
    lines = [f"  problems by effect (R² {fit:.2f} on halves left out)"]
    for row in pd.concat([ordered.head(n), ordered.tail(n)]).drop_duplicates("problem_id").itertuples():
        interval = f"[{row.low:+.3g}, {row.high:+.3g}]"
        lines.append(
            f"    {visible(str(row.problem_id)):<30}{row.effect:>+10.3g} {interval:<20} share {row.share:+.3g}"
        )
    return lines


def _samples(table: pd.DataFrame, rollouts: Rollouts) -> list[str]:
    lines = ["  samples with the largest shares, for and against"]
    for row in table.itertuples():
        of = rollouts.frame.iloc[row.trajectory]
        text = visible(str(of.response))
        text = text if len(text) <= _TEXT else text[: _TEXT - 1] + "…"
        lines.append(
            f"    row {row.trajectory}, step {row.step}: {row.share:+.3g} "
            f"({of.outcome}, advantage {of.advantage:+.2f}) {text}"
        )
    return lines
