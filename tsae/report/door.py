"""What results ask of the report (`tsae.base.views.Views`), gathered in one place."""

from __future__ import annotations

from tsae.report.claims import claims_card, claims_text
from tsae.report.difficulty import difficulty_text, write_difficulty
from tsae.report.figures.plots import Plots as plots
from tsae.report.notebook import (
    card,
    diff_card,
    feature_card,
    feature_line,
    show_feature,
    show_problem,
    show_trajectory,
)
from tsae.report.page import write_report
from tsae.report.text import markdown_table

__all__ = [
    "card",
    "claims_card",
    "claims_text",
    "diff_card",
    "difficulty_text",
    "feature_card",
    "feature_line",
    "markdown_table",
    "plots",
    "show_feature",
    "show_problem",
    "show_trajectory",
    "write_difficulty",
    "write_report",
]
