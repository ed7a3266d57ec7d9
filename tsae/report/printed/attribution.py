"""What `tsae attribute` prints: what was asked, both answers for every target, and how far to believe them."""

from __future__ import annotations

import pandas as pd

from tsae.attribution.attribution import Attribution
from tsae.report.text import count, percent, shortened, visible

_TEXT = 60
"""Characters of a response."""
_GROUPS = 10
"""Groups of samples of a target: those with the largest effects."""


def attribution_text(found: Attribution, n: int = 3) -> str:
    """Per target: what moved, kinds of samples, problems, and n single samples for and n against it."""
    first, last = found.info["checkpoints"][0] + 1, found.info["checkpoints"][-1]
    lines = [
        f"Which of {count(len(found.facts), 'sample')} of steps {first} to {last} moved "
        f"{count(len(found.targets), 'target')}?",
        f"  settings: {found.info['recipe']}",
        "  share: a sample's part of what happened; shares add up. without, alone: the change that a run without these",
        "  samples, or with them only, would have made, by simulation. effect: what they added: the simulated change",
        "  with all samples − without. Effects do not add up.",
    ]
    for target in found.targets.to_dict("records"):
        lines += ["", *_target(found, target, n)]
    return "\n".join([*lines, "", "How far to believe it", *_belief(found)])


def _target(found: Attribution, target: dict[str, float | str], n: int) -> list[str]:
    name = str(target["target"])
    lines = [f"{name}: {target['before']:.4g} → {target['after']:.4g} ({target['realised']:+.4g})"]
    flag = "  (beware: much)" if target["flagged"] else ""
    lines.append(f"  unexplained by shares: {abs(float(target['remainder'])):.1%} of the change{flag}")
    groups = found.table(name).head(_GROUPS)
    if not groups.empty:
        lines.append(f"  {'groups by effect':<40}{'n':>7}{'share':>11}{'effect':>11}{'without':>11}{'alone':>11}")
    for row in groups.itertuples():
        numbers = f"{row.share:>+11.3g}{row.effect:>+11.3g}{row.without:>+11.3g}{row.alone:>+11.3g}"
        lines.append(f"  {shortened(visible(str(row.group)), 39):<40}{row.n:>7,}{numbers}")
    lines += _problems(found.problems[found.problems.target == name], float(target["r2"]), n)
    return lines + _samples(found.of_target(name, n))


def _problems(table: pd.DataFrame, r2: float, n: int) -> list[str]:
    """The problems with the largest effects."""
    if table.empty:
        return []
    if not r2 > 0:
        return [f"  effects of single problems cannot be told apart (R² {r2:.2f} on subsets left out)"]
    ordered = table.sort_values("effect", ascending=False)
    lines = [f"  problems by effect, with 95 % interval (R² {r2:.2f} on subsets left out)"]
    for row in pd.concat([ordered.head(n), ordered.tail(n)]).drop_duplicates("problem_id").itertuples():
        interval = f"[{row.low:+.3g}, {row.high:+.3g}]"
        name = shortened(visible(str(row.problem_id)), 30)
        lines.append(f"    {name:<31}{row.effect:>+10.3g} {interval:<20} share {row.share:+.3g}")
    return lines


def _samples(table: pd.DataFrame) -> list[str]:
    if table.empty:
        return []
    lines = ["  samples with the largest shares, for and against"]
    for row in table.itertuples():
        effect = "" if pd.isna(row.effect) else f", effect {row.effect:+.3g}"
        text = shortened(visible(str(row.response)), _TEXT) if "response" in table else ""
        lines.append(
            f"    row {row.trajectory}, step {row.step}: {row.share:+.3g}{effect} "
            f"({row.outcome}, advantage {row.advantage:+.2f}) {text}"
        )
    return lines


def _belief(found: Attribution) -> list[str]:
    targets = found.targets
    worst = targets.loc[targets.remainder.abs().idxmax()] if targets.remainder.notna().any() else None
    lines = [
        f"  The simulated optimiser meets the checkpoints to {percent(found.info['path_error'])} % of the distance "
        "between them."
    ]
    if worst is not None:
        lines.append(
            f"  Shares leave {percent(targets.remainder.abs().median())} % of a change unexplained (median), "
            f"{percent(abs(worst.remainder))} % at most ({worst.target})."
        )
    flagged = found.segments[found.segments.flagged]
    if len(flagged):
        lines.append(
            f"  Flagged for a larger remainder: {count(len(flagged), 'segment')} between checkpoints of "
            f"{count(flagged.target.nunique(), 'target')}, most often after step {flagged['first'].mode().iloc[0]}."
        )
    off = (targets.simulated - targets.realised).abs() / targets.realised.abs()
    lines.append(f"  With all samples the simulation ends {percent(off.median())} % from the realised change (median).")
    lines.append(
        "  The share of one sample is a large force against others as large. That simulation predicts retraining is "
        "measured on the testbed (docs/attribution.md), not on this run."
    )
    return lines + [f"  note: {note}" for note in found.info["notes"]]
