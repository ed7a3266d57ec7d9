"""The figure of which samples moved what: shares and other runs by band, and where in the text shares sit."""

from __future__ import annotations

from math import floor, log10

import numpy as np
import plotly.graph_objects as go

from tsae.attribution.attribution import Attribution
from tsae.report.figures.layout import finish, label_rows, panels
from tsae.report.figures.style import DIVERGING
from tsae.report.story.attribution import amount, moved, shown_name, signal, told_targets
from tsae.report.text import figure_text

_MAX_TARGETS, _ROW, _SMALL = 6, 24, 1e-3
_COLUMNS = ("share", "without", "alone")


def attribution_figure(found: Attribution) -> go.Figure | None:
    """A column for each of the first targets: what bands did above, where in the text below, as heat maps."""
    names = [name for name in told_targets(found, 2) if len(moved(found, name).bands)]
    if not names or found.info["gate"]:
        return None
    # Where one target alone has tokens, a second row of panels would be half empty.
    names.sort(key=lambda name: signal(found, name) is None)
    mixed = signal(found, names[0]) is not None and signal(found, names[-1]) is None
    names = names[: _MAX_TARGETS // 2 if mixed else _MAX_TARGETS]
    every = [moved(found, name).bands for name in names]
    bands = list(every[0].band)
    tokens = [signal(found, name) for name in names]
    heads = ["<b>bands</b>", *(["<b>tokens</b>"] if any(tokens) else [])]
    figure, cells, height = panels(
        [f"<b>{figure_text(shown_name(found, name), 40)}</b>" for name in names],
        3,
        panel=[_ROW * len(bands)] * len(heads),
        gap=52,
        horizontal=0.02,
        heads=heads,
        beside=True,
        align="left",
        least=250,
        shared_yaxes=True,
    )
    for place, (name, table) in enumerate(zip(names, every, strict=True)):
        grids = [(table[list(_COLUMNS)].to_numpy(dtype=float), list(_COLUMNS), "{}")]
        if (grid := tokens[place]) is not None:
            rows = [grid.share[grid.bands.index(b)] if b in grid.bands else np.full(5, np.nan) for b in bands]
            grids.append((np.array(rows), [str(fifth) for fifth in range(1, 6)], "share of tokens in fifth {}"))
        for p, (values, columns, what) in enumerate(grids):
            cell = cells[len(heads) * place + p]
            limit = float(np.nanmax(np.abs(values), initial=0.0)) or 1.0
            tiles = go.Heatmap(
                z=values, x=list(range(len(columns))), y=list(range(len(bands))), xgap=1, ygap=1, hoverongaps=False,
                colorscale=DIVERGING, zmin=-limit, zmax=limit, showscale=False,
                text=[[_tile(v, limit) for v in line] for line in values],
                texttemplate="%{text}", textfont={"size": 10.5, "color": "#1d2228"},
                customdata=[
                    [
                        f"{figure_text(shown_name(found, name))}<br>{figure_text(band)} samples, "
                        f"{what.format(column)}: {amount(values[i, j])}"
                        for j, column in enumerate(columns)
                    ]
                    for i, band in enumerate(bands)
                ],
                hovertemplate="%{customdata}<extra></extra>",
            )  # fmt: skip
            figure.add_trace(tiles, **cell)
            figure.update_xaxes(tickvals=list(range(len(columns))), ticktext=columns, ticks="", showgrid=False, **cell)
            label_rows(figure, [figure_text(band, 18) for band in bands], edge=0.5, **cell)
    return finish(figure, height=height + 100, left=100, top=56)


def _tile(value: float, limit: float) -> str:
    """With the decimals that two digits of the largest of its panel need; hovering tells more."""
    if np.isnan(value):
        return ""
    decimals = max(0, 1 - floor(log10(limit)))
    text = f"{value:+.1e}" if limit < _SMALL else f"{value:+.{decimals}f}"
    return text.replace("-", "−") if abs(value) > limit / 100 else "0"
