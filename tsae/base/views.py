"""Views: how a result shows itself although its module knows no page and no figure.

The package's face registers a function that loads the views. It is called when a result is first shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:  # Importing tsae must stay light.
    import pandas as pd
    import plotly.graph_objects as go


class Plots(Protocol):
    """Figures of a feature diff. Effects are Δ, standard deviations over base trajectories."""

    def overview(self) -> go.Figure:
        """The report's first picture: the clearest features in every run."""

    def behaviours(self) -> go.Figure:
        """Accuracy, length and every other behaviour by checkpoint and band, with intervals."""

    def bands(self, n: int = 8) -> go.Figure:
        """Shifts of each run's n most moved features by band and by outcome, as heat maps."""

    def volcano(self) -> go.Figure:
        """Every tested feature of every run: size of the shift against its q-value."""

    def spread(self) -> go.Figure:
        """Every tested feature of every run: size of the shift against how active the feature is."""

    def families(self) -> go.Figure:
        """Mean shift of every family of features in every run."""

    def predictions(self) -> go.Figure:
        """Shifts that rollouts predict beside those that came."""

    def steps(self, n: int = 6) -> go.Figure:
        """Features and behaviours along the steps of runs."""

    def causal(self) -> go.Figure:
        """What interventions changed, beside their controls."""

    def decomposition(self, n: int = 8) -> go.Figure:
        """Total shift of each run's n most moved features as policy part and representation part."""

    def opposed(self, up: str, down: str, n: int = 12) -> go.Figure:
        """Features that one checkpoint raised and another lowered, in every run."""

    def outcomes(self, n: int = 6) -> go.Figure:
        """Success − failure within problem: the n clearest features of every band."""

    def feature(self, feature: int) -> go.Figure:
        """Shift of one feature in every run, over all problems and by band, with intervals."""


class Views(Protocol):
    """What results ask of the report."""

    def card(self, title: str, facts: Mapping[str, object], *tables: tuple[str, pd.DataFrame], note: str = "") -> str:
        """A result at a glance, as HTML for a notebook: its facts by name, and tables with their captions."""

    def plots(self, diff: Any) -> Plots:
        """Figures of a diff."""

    def markdown_table(self, table: pd.DataFrame) -> str:
        """A table in Markdown; text of rollouts is escaped."""

    def diff_card(self, diff: Any) -> str:
        """A feature diff at a glance, as HTML: its largest shifts in a table that a click on a head sorts."""

    def feature_card(self, feature: Any) -> str:
        """A feature of a diff at a glance, as HTML."""

    def feature_line(self, feature: Any) -> str:
        """A feature of a diff in one line of text."""

    def show_feature(self, feature: Any, n: int, reader: str | None) -> None:
        """Display a feature of a diff with its strongest examples."""

    def show_problem(self, rollouts: Any, problem: str, **options: Any) -> None:
        """Display a problem and responses to it."""

    def show_trajectory(self, features: Any, trajectory: int, chosen: Any = None, **options: Any) -> None:
        """Display a trajectory with the activation of features on its tokens."""

    def write_report(
        self, diff: Any, path: str | Path, *, title: str | None = None, attribution: Any = None, claims: Any = None
    ) -> Path:
        """Write a diff, which samples did that, and what the literature would expect, as one HTML file."""

    def write_difficulty(self, found: Any, path: str | Path, *, title: str | None = None) -> Path:
        """Write how difficulty moved as one HTML file."""

    def claims_text(self, found: Any) -> str:
        """What a run shows of the literature's claims, for a terminal."""

    def claims_card(self, found: Any) -> str:
        """The same at a glance, as HTML for a notebook."""

    def difficulty_text(self, found: Any) -> str:
        """How difficulty moved, for a terminal."""


_load: Callable[[], object] | None = None


def register(load: Callable[[], object]) -> None:
    """Set the function that loads the views."""
    global _load
    _load = load


def views() -> Views:
    """Load the registered views."""
    if _load is None:
        raise RuntimeError("no views are registered: import tsae")
    return cast(Views, _load())
