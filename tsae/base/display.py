"""How results show themselves: the one module below the report that names its functions.

A result's `_repr_html_`, `.plot`, `.show()` and `.to_html()` call ``display.NAME``, which imports the report when it is
first used. The layer contract in pyproject.toml lists these imports.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tsae.report.claims import claims_card as claims_card
    from tsae.report.claims import claims_text as claims_text
    from tsae.report.difficulty import difficulty_text as difficulty_text
    from tsae.report.difficulty import write_difficulty as write_difficulty
    from tsae.report.figures.plots import Plots as Plots
    from tsae.report.notebook import card as card
    from tsae.report.notebook import diff_card as diff_card
    from tsae.report.notebook import diff_text as diff_text
    from tsae.report.notebook import feature_card as feature_card
    from tsae.report.notebook import feature_line as feature_line
    from tsae.report.notebook import show_feature as show_feature
    from tsae.report.notebook import show_problem as show_problem
    from tsae.report.notebook import show_trajectory as show_trajectory
    from tsae.report.notebook import shown_effects as shown_effects
    from tsae.report.page import write_report as write_report
    from tsae.report.terminal import gates_text as gates_text
    from tsae.report.text import markdown_table as markdown_table

_ELSEWHERE = {
    "Plots": "figures.plots",
    "claims_card": "claims",
    "claims_text": "claims",
    "difficulty_text": "difficulty",
    "gates_text": "terminal",
    "markdown_table": "text",
    "write_difficulty": "difficulty",
    "write_report": "page",
}
"""Modules of the functions that are not in `tsae.report.notebook`."""


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return getattr(import_module(f"tsae.report.{_ELSEWHERE.get(name, 'notebook')}"), name)
