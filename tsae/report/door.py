"""What results ask of the report (`tsae.base.views.Views`), gathered in one place."""

from __future__ import annotations

from tsae.report.figures.notebook import Plots as plots
from tsae.report.markdown import markdown_table
from tsae.report.notebook.cards import card
from tsae.report.notebook.claims_card import claims_card
from tsae.report.notebook.diff_card import diff_card
from tsae.report.notebook.passages import feature_card, feature_line, show_feature, show_problem, show_trajectory
from tsae.report.pages.difficulty import write_difficulty
from tsae.report.pages.report import write_report
from tsae.report.printed.claims import claims_text
from tsae.report.printed.difficulty import difficulty_text

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
