"""Which problems of a log are read: banded by the pass rates that it shows itself, and drawn whole up to a budget.

Both work on the outline of a log (`tsae.rollouts.parquet.read_outline`), which may be much longer than what is drawn.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from tsae.errors import TsaeError
from tsae.rollouts.config import BandCutoffs, BandQuantiles
from tsae.rollouts.difficulty import Bands, find_bands, rates_of
from tsae.rollouts.table import BANDS


def band_problems(outline: pd.DataFrame, where: str | Path, fewest: int) -> tuple[Bands | None, str]:
    """Bands by the pass rates that the log itself shows, and a line on them.

    By the usual cut-offs, or by thirds where these leave a band with fewer than `fewest` problems, too few for a
    contrast, and thirds do not; none where neither tells easy from hard.
    """
    found, refused = [], ""
    for cutoffs in (BandCutoffs(), BandQuantiles()):
        try:
            bands = find_bands(rates_of(outline, where), outline.problem_id, where, cutoffs=cutoffs)
        except TsaeError as error:
            refused = error.what
            continue
        found.append((bool(bands.problems.band.value_counts().min() >= fewest), cutoffs, bands))
    if not found:
        return None, f"none: {refused}"
    _, cutoffs, bands = max(found, key=lambda item: item[0])  # The first, where both are as good.
    used = bands.info
    by_problem = outline[outline.outcome != "unknown"].groupby("problem_id").policy
    who = "the policy of its step" if (by_problem.nunique() == 1).all() else "all policies"
    thirds = f"; thirds, since the usual cut-offs leave a band with fewer than {fewest} problems"
    return bands, (
        f"problems: {band_counts(bands.problems.band)}; by each one's pass rate in the log, "
        f"that of {who} ({by_problem.size().median():.0f} responses; easy >= {used['easy']:g}, hard <= "
        f"{used['hard']:g}{thirds if isinstance(cutoffs, BandQuantiles) else ''}), not from separate rollouts"
    )


def band_counts(band: pd.Series) -> str:
    """Problems of every band, given one's each."""
    return ", ".join(f"{name} {(band == name).sum():,}" for name in BANDS)


def draw_problems(outline: pd.DataFrame, tokens: int, seed: int, where: str | Path) -> np.ndarray:
    """Whole problems at random up to a number of tokens, in turn from every band; all where there are no more.

    Args:
        outline: of `tsae.rollouts.parquet.read_outline`, with the band of every problem, or null.
        tokens: of prompts and responses.
        seed: of the drawing.
        where: named in error messages.

    Returns:
        (n,) bool, which trajectories are drawn.
    """
    cost = (outline.prompt_length + outline.response_length).groupby(outline.problem_id).sum()
    if cost.sum() <= tokens:
        return np.ones(len(outline), dtype=bool)
    rng = np.random.default_rng(seed)
    order = pd.Series(rng.permutation(len(cost)), index=cost.index)
    band = outline.groupby("problem_id").band.first().fillna("none")
    turn = order.groupby(band).rank()
    ranked = cost.loc[pd.DataFrame({"turn": turn, "order": order}).sort_values(["turn", "order"]).index]
    kept = ranked.index[(ranked.cumsum() <= tokens).to_numpy()]
    if not len(kept):
        raise TsaeError(
            f"one problem alone has {ranked.iloc[0]:,} tokens, more than the {tokens:,} that are to be read",
            where=where,
            fix="Allow more (--tokens).",
        )
    return outline.problem_id.isin(kept).to_numpy()
