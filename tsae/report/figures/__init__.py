"""The report's figures. A function draws one from a diff, or gives None where the diff holds nothing to draw.

Effects are drawn in Δ, standard deviations with a floor (`tsae.diff.comparisons.Scale`), since units of activation
differ from feature to feature; hover text gives the units of activation.
"""
