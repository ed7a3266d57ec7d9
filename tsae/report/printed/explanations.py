"""Labels of features for the terminal."""

from __future__ import annotations

from tsae.diff.explain import Explanations
from tsae.report.text import number, visible


def explanation_text(found: Explanations) -> str:
    """One line a feature: its label, or why it has none, and the scores."""
    lines = []
    for row in found.table.itertuples():
        said = f"“{visible(str(row.label))}”" if row.shown else f"unlabelled: {visible(str(row.note))}"
        parts = (row.detection, row.fuzzing, row.control)
        tested = "detection {}, fuzzing {}; another feature's label {}".format(*map(number, parts))
        lines.append(f"{row.feature:>6}  {said}" + (f" ({tested})" if row.score == row.score else ""))
    by = f"Labels by {visible(str(found.info['labeller']))}"
    return "\n".join(
        [f"{by}, tested on other problems' contexts (balanced accuracy: 0.5 says nothing, 1 is right always):", *lines]
    )
