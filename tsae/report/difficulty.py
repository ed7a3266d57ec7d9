"""How difficulty moved: the words, the figures, the page, and what the terminal shows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tsae.base.statistics import too_few
from tsae.report.document import render_page, write_page
from tsae.report.figures.layout import BAND_STYLE, LEGEND, SERIES, SYMBOLS, area, aside, finish, panels, path, x_title
from tsae.report.tables import DASH, Cell, Table, table_text
from tsae.report.text import capitalised, count, figure_text, number, percent, q_value
from tsae.rollouts.bands import found_how
from tsae.rollouts.difficulty import Difficulty
from tsae.rollouts.rewards import KINDS, group_summary
from tsae.rollouts.schema import BANDS


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
    for run, steps in difficulty.paths.items():
        table = difficulty.migration
        table = table[(table.run == run) & (table.start == steps[0]) & (table.end == steps[-1])]
        if table.empty:
            if len(steps) > 1:
                why = "no problem was answered at every step, so no moves are counted"
                lines.append(f"{steps[0]} → {steps[-1]}: {why}.")
            continue
        moves = table[(table.from_band != table.to_band) & (table.n > table.null_high)]
        said = "; ".join(moved_text(row) for _, row in moves.sort_values("n", ascending=False).iterrows())
        away = table[table.from_band != table.to_band]
        n = f"{int(away.n.sum())} of {int(table.n_problems.iloc[0])} problems changed bands"
        chance = f"{away.expected.sum():.1f} would by chance"
        lines.append(f"{steps[0]} → {steps[-1]}: {n}; {chance}." + (f" Beyond chance: {said}." if said else ""))
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


_BAR = 0.28  # half the width of a checkpoint's bar, where neighbours are 1 apart
_ON_COLOUR = "#101317"  # readable on all band colours


def migration_figure(difficulty: Difficulty) -> go.Figure | None:
    """Bands of all problems at every step of every run, and the problems that move from one step to the next.

    A bar a checkpoint, easy on top; a ribbon a group of problems. Ribbons that are broader than 97.5 % of what chance
    makes are drawn full, the others pale.
    """
    table = difficulty.migration
    runs = [run for run in difficulty.paths if (table.run == run).any()]
    if not runs:
        return None
    titles = [f"<b>{figure_text(run, 30)}</b>" if run else "" for run in runs]
    figure, cells, height = panels(titles, 3, panel=260, gap=94, horizontal=0.04, least=220, shared_yaxes=True)
    for run, cell in zip(runs, cells, strict=True):
        path = difficulty.paths[run]
        mine = table[table.run == run]
        for place, (start, end) in enumerate(pairwise(path)):
            step = mine[(mine.start == start) & (mine.end == end)]
            figure.add_traces(_ribbons(step, place), rows=[cell["row"]] * 9, cols=[cell["col"]] * 9)
        for place, policy in enumerate(path):
            _bar(figure, _sizes(mine, policy), place, policy, cell)
        ticks = {"tickvals": list(range(len(path))), "ticktext": [figure_text(policy, 14) for policy in path]}
        angle = 0 if len(path) <= 4 else -35
        figure.update_xaxes(range=[-0.5, len(path) - 0.5], **ticks, tickangle=angle, ticks="", showgrid=False, **cell)
    figure.update_yaxes(range=[1, 0], tickvals=[0, 0.5, 1], ticktext=["100 %", "50 %", "0 %"])
    for band in BANDS:
        marker = {"color": BAND_STYLE[band][0], "symbol": "square"}
        figure.add_trace(go.Scatter(x=[None], y=[None], mode="markers", name=band, marker=marker))
    return finish(figure, height=height + 130, left=56, top=66, bottom=64, legend=LEGEND, hovermode="closest")


def pass_at_k_figure(difficulty: Difficulty) -> go.Figure | None:
    """pass@k of where every run started and ended, by band."""
    table = difficulty.pass_at_k
    shown = ends_of(difficulty)
    table = table[table.policy.isin(shown)]
    if table.k.nunique() < 2:
        return None
    bands = [band for band in ("all", *BANDS) if (table.band == band).any()]
    titles = [f"<b>{band} problems</b>" for band in bands]
    figure, cells, height = panels(titles, len(bands), panel=226, gap=0, horizontal=0.025, shared_yaxes=True)
    sizes = sorted(table.k.unique())
    for band, cell in zip(bands, cells, strict=True):
        for order, policy in enumerate(shown):
            mine = table[(table.policy == policy) & (table.band == band)]
            # Of fewer problems there is no interval (NaN): none is drawn.
            ends = zip(mine.pass_at_k, mine.low.fillna(mine.pass_at_k), mine.high.fillna(mine.pass_at_k), strict=True)
            line = path(
                # Marks of one k side by side, so that their intervals can be told apart.
                [sizes.index(k) + aside(order, len(shown), 0.07) for k in mine.k],
                [tuple(100 * value for value in point) for point in ends],
                (SERIES[order % len(SERIES)], SYMBOLS[order % len(SYMBOLS)]),
                [_pass_hover(row) for _, row in mine.iterrows()],
                name=figure_text(policy),
                legendgroup=policy,
                showlegend=band == bands[0],
                widths=(1.6, 8, 1.2),
            )
            figure.add_trace(line, **cell)
    ticks = {"tickvals": list(range(len(sizes))), "ticktext": [str(k) for k in sizes]}
    figure.update_xaxes(range=[-0.4, len(sizes) - 0.6], **ticks)
    x_title(figure, "k")
    figure.update_yaxes(range=[-3, 103], ticksuffix=" %")
    figure = finish(figure, height=height + 114, left=56, top=66, bottom=48, legend=LEGEND)
    return figure.update_yaxes(showgrid=True)


def _sizes(mine: pd.DataFrame, policy: str) -> pd.Series:
    """Number of problems in every band at a policy of the path."""
    starts, ends = mine[mine.start == policy], mine[mine.end == policy]
    if not starts.empty:
        return starts[starts.end == starts.end.iloc[0]].groupby("from_band").n.sum().reindex(BANDS, fill_value=0)
    return ends[ends.start == ends.start.iloc[0]].groupby("to_band").n.sum().reindex(BANDS, fill_value=0)


def _bar(figure: go.Figure, sizes: pd.Series, place: int, policy: str, cell: dict[str, int]) -> None:
    total, top = int(sizes.sum()), 0.0
    for band in BANDS:
        share = sizes[band] / total
        x = [place - _BAR, place + _BAR, place + _BAR, place - _BAR]
        hover = f"{figure_text(policy)}: {int(sizes[band])} of {total} problems {band} ({percent(share)} %)"
        figure.add_trace(area(x, [top, top, top + share, top + share], BAND_STYLE[band][0], hover), **cell)
        if share >= 0.045:
            font = {"size": 11, "color": _ON_COLOUR}
            place_in = {"x": place, "y": top + share / 2}
            figure.add_annotation(text=f"{int(sizes[band])}", **place_in, showarrow=False, font=font, **cell)
        top += share


def _ribbons(step: pd.DataFrame, place: int) -> list[go.Scatter]:
    counts = step.pivot(index="from_band", columns="to_band", values="n").loc[list(BANDS), list(BANDS)]
    total = max(int(counts.to_numpy().sum()), 1)
    left = dict(zip(BANDS, _tops(counts.sum(axis=1).tolist(), total), strict=True))
    right = dict(zip(BANDS, _tops(counts.sum(axis=0).tolist(), total), strict=True))
    traces = []
    for before, after in product(BANDS, BANDS):
        row = step[(step.from_band == before) & (step.to_band == after)].iloc[0]
        share = row.n / total
        beyond = before != after and row.n > row.null_high
        x, upper, lower = _curve(place, left[before], right[after], share)
        left[before] += share
        right[after] += share
        across: list[Any] = [*x, *x[::-1]] if row.n else [None]
        down: list[Any] = [*upper, *lower[::-1]] if row.n else [None]
        colour = _translucent(BAND_STYLE[after][0], 0.72 if beyond else 0.24)
        hover = f"{figure_text(row.start)} → {figure_text(row.end)}: {moved_text(row)}"
        traces.append(area(across, down, colour, hover))
    return traces


def _tops(sizes: Sequence[int], total: int) -> list[float]:
    return [0.0, *(np.cumsum(sizes)[:-1] / total).tolist()]


def _curve(place: int, start: float, end: float, height: float) -> tuple[list[float], list[float], list[float]]:
    """x, upper and lower edge of a ribbon between two bars; level where it leaves and arrives."""
    t = np.linspace(0, 1, 21)
    x = place + _BAR + t * (1 - 2 * _BAR)
    upper = start + (end - start) * (1 - np.cos(np.pi * t)) / 2
    return x.tolist(), upper.tolist(), (upper + height).tolist()


def _translucent(colour: str, opacity: float) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def _pass_hover(row: pd.Series) -> str:
    text = (
        f"{figure_text(row.policy)}: pass@{row.k} {percent(row.pass_at_k)} % [{percent(row.low)}, {percent(row.high)}]"
        f"<br>{count(row.n_problems, 'problem')}"
    )
    if row.n_paired:
        ends = f"[{percent_change(row.difference_low)}, {percent_change(row.difference_high)}] points, paired"
        if pd.isna(row.difference_low):
            ends = f"points, {too_few(int(row.n_paired))}"
        text += f"<br>against the start {percent_change(row.difference)} {ends}"
    return text


def write_difficulty(difficulty: Difficulty, path: str | Path, *, title: str | None) -> Path:
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
        passed=_passed(difficulty.pass_at_k),
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


def _passed(table: pd.DataFrame) -> Table:
    rows: list[list[str | Cell]] = []
    for r in table.itertuples():
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


def _groups(difficulty: Difficulty, policies: Sequence[str] = ()) -> Table:
    counted = ("n_groups", *KINDS[:4], "no_variance")
    rows = []
    for r in group_summary(difficulty.groups).to_dict("records"):
        if policies and r["policy"] not in policies:
            continue
        share = r["single_success_share"]
        single = DASH if pd.isna(share) else f"{percent(share)} %"
        rows.append([str(r["policy"]), str(r["band"]), *(f"{r[name]:,}" for name in counted), single])
    head = ["checkpoint", "band", "groups", *KINDS[:4], "no variance", "share of single successes"]
    return Table("Groups", head, rows, 2)


def difficulty_text(difficulty: Difficulty) -> str:
    """For the terminal: pass@k and groups of where runs start and end."""
    table, shown = difficulty.pass_at_k, ends_of(difficulty)
    table = table[table.policy.isin(shown) & table.k.isin([table.k.min(), table.k.max()])]
    sure = difficulty.bands().sure.sum() / len(difficulty.rates)
    parts = (
        f"{lead(difficulty)}\nFor {sure:.0%} of problems and checkpoints the whole interval lies in the band.",
        table_text(_bands(difficulty)),
        "\n".join(moved_lines(difficulty)),
        f"{table_text(_passed(table))}\n  {measured_text(difficulty)}",
        table_text(_groups(difficulty, shown)),
    )
    return "\n\n".join(part for part in parts if part)
