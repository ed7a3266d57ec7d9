"""Tables of a page: captions, heads and cells as plain data, which macros.html writes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tsae.diff.feature_diff import FeatureDiff
from tsae.report.story.statements import Caveat, Contrast, Effect
from tsae.report.text import interval, number, q_value

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


@dataclass(frozen=True)
class Table:
    """The first column heads its row; columns from `numeric_from` align right."""

    caption: str
    head: Sequence[str | Cell]
    rows: Sequence[Sequence[str | Cell]]
    numeric_from: int = 1


def effect_cells(effect: Effect) -> list[str | Cell]:
    """Its feature, and what that responds to."""
    return _described(effect.feature, effect)


def described_cells(diff: FeatureDiff, feature: int) -> list[str | Cell]:
    """A feature of a diff, and what it responds to."""
    row = diff.features.loc[feature]
    return _described(feature, SimpleNamespace(**{"share": None, "stability": None, **row}))


def _described(feature: int, of: Any) -> list[str | Cell]:
    share = "" if of.share is None else f"{100 * of.share:.0f} %, "
    stable = "" if of.stability is None else f", stability {number(of.stability)}"
    return [Cell(feature=int(feature)), Cell(of.responds_to, f"{share}{of.group}-level{stable}", tone="isolated")]


def delta_cell(effect: Effect | None) -> Cell:
    """Δ with direction, interval and q."""
    if effect is None:
        return Cell(small="not tested", quiet=True)
    return sized(effect.delta, effect.low, effect.high, effect.q, effect.found)


def sized(delta: float, low: float, high: float, q: float, found: bool) -> Cell:
    """Δ with an arrow where it is found, its interval and q."""
    tone = ("up" if delta > 0 else "down") if found else "still"
    arrow = {"up": "▲", "down": "▼", "still": "·"}[tone]
    small = f"{interval(low, high, sign=True, like=delta)} q {q_value(q)}"
    return Cell(f"{arrow} {number(delta, sign=True)}", small, tone=tone)


def ranged(value: float, low: float, high: float, *, sign: bool = True, like: bool = True) -> Cell:
    """A number with its interval."""
    small = interval(low, high, sign=sign, like=value if like else None)
    return Cell(number(value, sign=sign), small)


def count_cell(contrast: Contrast | None) -> str | Cell:
    """How many features moved, of how many, and how many differ at all."""
    if contrast is None:
        return DASH
    if contrast.refused:
        return "refused"
    null = "" if math.isnan(contrast.n_null) else f", null {number(contrast.n_null)}"
    return Cell(f"{contrast.n_found:,}", f"of {contrast.n_tested:,}{null}", f"{contrast.n_differs:,} differ")
