"""The report's figures. A function draws one from a diff, or gives None where the diff holds nothing to draw.

Effects are drawn in Δ, standard deviations of the feature over base trajectories, since units of activation differ from
feature to feature; hover text gives the units of activation.
"""

from tsae.report.figures.behaviours import behaviour_figure, family_figure
from tsae.report.figures.checks import CONDITIONS, causal_figure, noise_figure, prediction_figure
from tsae.report.figures.shifts import band_figure, decomposition_figure, opposed_figure, outcome_figure
from tsae.report.figures.spread import spread_figure, thinned_text

__all__ = [
    "CONDITIONS",
    "band_figure",
    "behaviour_figure",
    "causal_figure",
    "decomposition_figure",
    "family_figure",
    "noise_figure",
    "opposed_figure",
    "outcome_figure",
    "prediction_figure",
    "spread_figure",
    "thinned_text",
]
