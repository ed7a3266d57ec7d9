"""How difficulty moved, in words: what was measured, which problems changed bands, and what chance would do."""

from __future__ import annotations

import pandas as pd

from tsae.report.text import capitalised, count, number
from tsae.rollouts.bands import found_how
from tsae.rollouts.difficulty import Difficulty


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
    text = f"{capitalised(found_how(bands))}."
    if bands and not bands["separate"]:
        # A group is whole, so that its own outcomes take part in its band.
        text += (
            " Groups are shown whole, with the responses that their band was measured on: hard ones look a little "
            "harder, easy ones easier than they are."
        )
    return text


def moved_lines(difficulty: Difficulty) -> list[str]:
    """A line a run: from where it started to where it ended, what moved further than chance."""
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


def ends_of(difficulty: Difficulty) -> list[str]:
    """The policy that runs start from and the last of every run."""
    paths = difficulty.paths.values()
    return list(dict.fromkeys([*(p[0] for p in paths), *(p[-1] for p in paths)]))


def moved_text(row: pd.Series) -> str:
    """“38 of 53 medium problems became hard (19.1 by chance, 12 to 26)”."""
    started = round(row.n / row.share) if row.n else 0
    verb = "stayed" if row.from_band == row.to_band else f"became {row.to_band}"
    of = f" of {started}" if started else ""
    chance = f"{row.expected:.1f} by chance, {row.null_low:.0f} to {row.null_high:.0f}"
    return f"{row.n}{of} {count(row.n, f'{row.from_band} problem').partition(' ')[2]} {verb} ({chance})"


def percent_change(value: float) -> str:
    """A difference of shares in percentage points, with its sign."""
    return number(100 * value, sign=True)
