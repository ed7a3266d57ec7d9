"""The page of a diff, as one text."""

from __future__ import annotations

from typing import Any

from tsae.diff.feature_diff import FeatureDiff
from tsae.report.page import render


def rendered(diff: FeatureDiff, *of: Any, **also: Any) -> str:
    """All pieces of the page that `render` gives, with its arguments."""
    return "".join(render(diff, *of, **also))
