"""Where training wrote, as one HTML file that opens with no network."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from tsae.report.figures.drift import drift_figure
from tsae.report.pages.document import render_page, write_page
from tsae.report.pages.tables import Table
from tsae.report.story.drift import last_of_runs, written


def write_drift(drift: pd.DataFrame, path: str | Path) -> Path:
    """Write the page.

    Raises:
        TsaeError: where the path is a folder.
    """
    head = ["checkpoint", "most written", "drift", "weights changed", "stable rank, median"]
    rows = [[one.checkpoint, one.most, one.relative, one.changed, one.rank] for one in written(drift)]
    content = render_page(
        "drift.html",
        "Where training wrote",
        {"drift": drift_figure(drift, last_of_runs(drift))},
        n_checkpoints=drift.checkpoint.nunique(),
        n_weights=int(drift[drift.checkpoint == drift.checkpoint.iloc[0]].n_weights.sum()),
        whole=Table("All weights as one", head, rows, 2),
    )
    return write_page(path, content)
