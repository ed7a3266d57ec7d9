"""The report: findings in words, figures, and one self-contained HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tsae.diff.result import FeatureDiff


def write_report(diff: FeatureDiff, path: str | Path, *, title: str | None = None) -> Path:
    """Write one HTML file that opens with no network."""
    from tsae.report.page import render

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(diff, title=title), encoding="utf-8")
    return path
