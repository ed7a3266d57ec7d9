"""What `tsae attribute` prints: what was asked, both answers for every target, and how far to believe them."""

from __future__ import annotations

import pandas as pd

from tsae.attribution.attribution import Attribution
from tsae.report.story.attribution import MEANING, Moved, amount, belief, lead, moved
from tsae.report.text import shortened, visible

_TEXT = 60
"""Characters of a response."""
_GROUPS = 10
"""Groups of samples of a target: those with the largest effects."""


def attribution_text(found: Attribution, n: int = 3) -> str:
    """Per target: what moved, kinds of samples, problems, and n single samples for and n against it."""
    lines = [lead(found), f"  settings: {found.info['recipe']}", *(f"  {sentence}" for sentence in MEANING)]
    for name in found.targets.target:
        lines += ["", *_target(moved(found, name, n))]
    lines += ["", "How far to believe it"]
    lines += [f"  {'beware: ' if said.warns else ''}{said.text}" for said in belief(found)]
    return "\n".join([*lines, *(f"  note: {note}" for note in found.info["notes"])])


def _target(one: Moved) -> list[str]:
    flag = "  (beware: much)" if one.flagged else ""
    lines = [f"{one.name}: {one.change}", f"  unexplained by shares: {one.unexplained} of the change{flag}"]
    if one.validated:
        lines.append(f"  simulation against replayed trainings: {one.validated}")
    groups = one.groups.head(_GROUPS)
    if not groups.empty:
        lines.append(f"  {'groups by effect':<40}{'n':>7}{'share':>11}{'effect':>11}{'without':>11}{'alone':>11}")
    for row in groups.itertuples():
        numbers = "".join(f"{amount(value):>11}" for value in (row.share, row.effect, row.without, row.alone))
        lines.append(f"  {shortened(visible(str(row.group)), 39):<40}{row.n:>7,}{numbers}")
    if one.about_problems:
        lines.append(f"  {one.about_problems}")
    for row in one.problems.itertuples():
        interval = f"[{amount(row.low)}, {amount(row.high)}]"
        name = shortened(visible(str(row.problem_id)), 30)
        lines.append(f"    {name:<31}{amount(row.effect):>10} {interval:<20} share {amount(row.share)}")
    return lines + _samples(one.samples)


def _samples(table: pd.DataFrame) -> list[str]:
    if table.empty:
        return []
    lines = ["  samples with the largest shares, for and against"]
    for row in table.itertuples():
        effect = "" if pd.isna(row.effect) else f", effect {amount(row.effect)}"
        text = "" if pd.isna(row.response) else shortened(visible(str(row.response)), _TEXT)
        lines.append(
            f"    row {row.trajectory}, step {row.step}: {amount(row.share)}{effect} "
            f"({row.outcome}, advantage {amount(row.advantage)}) {text}"
        )
    return lines
