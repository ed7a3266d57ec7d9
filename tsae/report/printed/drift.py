"""Where training wrote, as plain text for the terminal."""

from __future__ import annotations

import pandas as pd

from tsae.checkpoints.drift import drift_by
from tsae.report.story.drift import last_of_runs, relative_text, written
from tsae.report.text import percent


def drift_text(drift: pd.DataFrame) -> str:
    """Every checkpoint, then modules and layers of the last step of every run."""
    lines = ["How far from the base: norm of W − W0 over norm of W0 (all weights as one)"]
    lines.append(f"  {'checkpoint':<24}{'drift':>10}{'changed':>10}{'stable rank':>13}   most written")
    for one in written(drift):
        lines.append(f"  {one.checkpoint:<24}{one.relative:>10}{one.changed:>10}{one.rank:>13}   {one.most}")
    last = last_of_runs(drift)
    for by in ("module", "layer"):
        table = drift_by(drift[drift.checkpoint.isin(last)], [by])
        lines += ["", f"By {by}: drift (share of the squared update)"]
        lines.append(f"  {by:<28}" + "".join(f"{c:>24.23}" for c in last))
        keys = list(dict.fromkeys(None if pd.isna(key) else key for key in table[by]))
        for key in sorted(keys, key=lambda k: (k is None, k)) if by == "layer" else keys:
            mine = table[table[by].isna() if key is None else table[by] == key].set_index("checkpoint")
            cells = [f"{relative_text(mine.relative[c])} ({percent(mine.share[c])} %)" for c in last]
            lines.append(f"  {'outside of layers' if key is None else key!s:<28}" + "".join(f"{c:>24}" for c in cells))
    rounded = drift[(drift.rounding > 0) & (drift.update_norm > 0)]
    if len(rounded):
        part = (rounded.rounding / rounded.relative).clip(upper=1).median()
        lines += [
            "",
            f"Checkpoints are stored more coarsely than the base: rounding alone makes {percent(part)} % of the drift "
            "(median over tensors; see the column rounding).",
        ]
    return "\n".join(lines)
