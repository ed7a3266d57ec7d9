"""Claims on training with one band (a, b, e), where a mixed run was replayed with the samples of each band alone.

A replay is one run without an interval. So no such part holds or is refuted, and a claim is undecided at most.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from tsae.claims.evidence import Evidence, Missing
from tsae.claims.judging import REPLAYED, Judgement, Part
from tsae.claims.literature import CLAIMS
from tsae.rollouts.schema import BANDS

_RIGHT, _DIRECT = "right − wrong", "log-likelihood, direct answer"
_CAVEAT = (
    "From a mixed run that was replayed with the samples of one band alone: one run, so nothing is decided. Changes of "
    "the mean log-probability of a token in {what}, in nats."
)
_AGAIN = "`tsae attribute … --to ANALYSIS/attribution` of a run on all three bands, with a log of every step"


def _inverted_u(run: Evidence) -> Judgement:
    """a: right − wrong over all bands, by medium samples alone − by easy or hard ones alone."""
    of = _alone(run, _RIGHT).mean()
    parts = [
        Part(f"Medium samples alone raise right responses more than {band} ones.", (of["medium"] - of[band],), REPLAYED)
        for band in ("easy", "hard")
    ]
    return _judged("a", parts, "right responses minus that in wrong ones")


def _hard_harms(run: Evidence) -> Judgement:
    """b: right − wrong on easy and on medium problems falls by hard samples alone."""
    table = _alone(run, _RIGHT)
    parts = [
        Part(f"Hard samples alone lower right responses to {band} problems.", (-table["hard"][name],), REPLAYED)
        for name in table.index
        for band in ("easy", "medium")
        if name == f"{_RIGHT}, {band}"
    ]
    return _judged("b", parts, "right responses minus that in wrong ones")


def _easy_direct(run: Evidence) -> Judgement:
    """e: direct answers become likelier by easy samples alone."""
    value = _alone(run, _DIRECT)["easy"].mean()
    part = Part("Easy samples alone make direct answers likelier.", (value,), REPLAYED)
    return _judged("e", [part], "direct answers minus that in other responses")


def _alone(run: Evidence, target: str) -> pd.DataFrame:
    """Change with a band's samples alone: a row a target whose name has this in it, a column a band."""
    found = run.attribution
    table = found.bands[found.bands.target.str.contains(target) & (found.bands.how == "replayed")]
    wide = table.pivot_table(index="target", columns="band", values="alone", sort=False).reindex(columns=BANDS)
    if found.info["gate"] or wide.empty or wide.isna().any(axis=None):
        raise Missing(f"replays with easy, medium and hard samples alone ({target})", _AGAIN)
    return wide


def _judged(key: str, parts: list[Part], what: str) -> Judgement:
    if not parts:
        raise Missing("replays with one band alone, with accuracy on each band", _AGAIN)
    return Judgement(CLAIMS[key], tuple(parts), caveat=_CAVEAT.format(what=what), whole=False)


BY_REPLAY: dict[str, Callable[[Evidence], Judgement]] = {"a": _inverted_u, "b": _hard_harms, "e": _easy_direct}
