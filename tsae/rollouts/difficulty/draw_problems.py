"""Choose which problems of a log to read: band them, and draw problems up to a token budget.

Both work on the outline of a log (`tsae.rollouts.parquet.read_outline`); a log may be much longer than what is drawn.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from tsae.errors import TsaeError
from tsae.rollouts.bands import Bands, band_counts, find_bands, found_how
from tsae.rollouts.config import BandCutoffs, BandQuantiles
from tsae.rollouts.difficulty.step_confounding import confounding
from tsae.rollouts.logs.entries.hashes import hash64
from tsae.rollouts.parquet import read_pieces
from tsae.rollouts.schema import BANDS, problem_bands
from tsae.rollouts.table import Rollouts

FEWEST = 8
"""Fewest problems of a band to find anything in it: seven signs that all agree have p = .016 at best, and a band has
hundreds of features."""
MANY = 16
"""Responses of a problem that are enough to tell its successes from its failures; the size of a usual group."""


def band_problems(
    outline: pd.DataFrame,
    where: str | Path,
    *,
    base: str | None = None,
    measured_on: pd.DataFrame | None = None,
    seed: int = 0,
) -> tuple[Bands | None, str]:
    """Bands of a log's problems, and a line about them.

    Pass rates are the first of these that exist: those of separate rollouts of the base; the base's own in the log, if
    it answered every problem at least twice; those of all policies in the log. Where the run learns, the last are
    training steps (`tsae.rollouts.difficulty.step_confounding`). Then the bands cover only the problems that the base
    answered itself, if every band has at least 8 of them; otherwise ``info["refused"]`` of the bands says why bands are
    not compared. Cut-offs are the usual ones, or thirds if these leave a band with fewer than 8 problems and thirds do
    not.

    Args:
        outline: of `tsae.rollouts.parquet.read_outline`.
        where: named in messages.
        base: id of the model that training started from.
        measured_on: separate rollouts of the base: problem_id, as in the log, policy and outcome.
        seed: of the permutations.

    Returns:
        the bands of all trajectories of the outline, None if no cut-offs tell easy from hard; and a line.
    """
    if measured_on is not None:
        return _by_cutoffs(outline, where, base, measured_on)
    outcomes = set(outline.outcome) - {"unknown"}
    if len(outcomes) == 1:
        same = "right" if outcomes == {"success"} else "wrong"
        return None, (
            f"none: every response is {same}, so that no problem is harder than another here, and nothing can be said "
            "of successes against failures; how a checkpoint reads these responses can be compared"
        )
    enough = outline[(outline.policy == base) & (outline.outcome != "unknown")].problem_id.value_counts() >= 2
    answered = set(enough.index[enough])
    if base is not None and answered == set(outline.problem_id):
        return _by_cutoffs(outline, where, base)
    bands, told = _by_cutoffs(outline, where, None)
    if bands is None:
        return None, told
    measured = confounding(outline.assign(band=bands.rows.band.to_numpy()), seed)
    if measured.told_apart:
        bands.info["step"] = measured.as_dict()
        return bands, f"{told}; {measured}"
    own, of_base = _by_cutoffs(outline, where, base) if answered else (None, "")
    if own is not None and _smallest(own) >= FEWEST:
        return own, f"{of_base}; of the log's other responses {measured}"
    refused = (
        f"bands and training steps cannot be told apart: {measured}; {measured.late}. A difference between bands would "
        "be one between steps. Give the base's own pass rates on these problems (--bands-from)"
    )
    bands.info["refused"] = refused
    bands.info["confounded_with_step"] = measured.as_dict() | {"sentence": refused}
    return bands, f"{refused}. Bands are shown, and not compared: {told}"


def _smallest(bands: Bands) -> int:
    """The number of problems in the smallest band."""
    return int(problem_bands(bands.rows).value_counts().reindex(BANDS, fill_value=0).min())


def _by_cutoffs(
    outline: pd.DataFrame, where: str | Path, reference: str | None, measured_on: pd.DataFrame | None = None
) -> tuple[Bands | None, str]:
    """The bands by the usual cut-offs or by thirds, and how many problems they have; None and why not."""
    found, refused = [], ""
    for cutoffs in (BandCutoffs(), BandQuantiles()):
        try:
            bands = find_bands(outline, where, reference, cutoffs, measured_on, partly=True)
            bands.check()
        except TsaeError as error:
            refused = error.what
            continue
        found.append(bands)
    if not found:
        return None, f"none: {refused}"
    bands = max(found, key=lambda bands: _smallest(bands) >= FEWEST)  # The first, where both are as good.
    band, used = problem_bands(bands.rows), bands.info
    thirds = f"; thirds, since the usual cut-offs leave a band with fewer than {FEWEST} problems"
    few = [f"{name} {(band == name).sum()}" for name in BANDS if (band == name).sum() < FEWEST]
    parts = [f"problems: {band_counts(band)}"]
    if few:
        parts.append(f"too few to find anything in {', '.join(few)} ({FEWEST} are needed)")
    end = f"(easy >= {used['easy']:g}, hard <= {used['hard']:g}{thirds if 'quantiles' in used else ''})"
    return bands, "; ".join([*parts, found_how(used)]) + f" {end}"


def separate_rollouts(path: Path, log: Path, base: str) -> pd.DataFrame:
    """Read separate rollouts of the base on problems of a log: problem_id (the log's), policy and outcome.

    Two problems are the same if their prompts are equal. If several problems share one prompt, their ids must be equal
    too. Other problems are left out.

    Args:
        path: Parquet file of rollouts.
        log: Parquet file of the imported log.
        base: id of the model that training started from.

    Raises:
        TsaeError: where no policy of the file is the base, or none of its problems is one of the log.
    """
    rollouts = Rollouts.read(path)
    frame = rollouts.frame[["problem_id", "policy", "outcome"]].copy()
    if rollouts.policies != [base]:
        frame = frame[frame.policy == base]
        if frame.empty:
            what = f"holds nothing that {base} sampled; policies are {', '.join(rollouts.policies)}"
            raise TsaeError(what, where=path, fix="Sample rollouts of the base (tsae rollouts sample --checkpoints).")
    # Match by prompts: an import makes problem ids of its own if the log has none.
    asked: dict[bytes, set[str]] = {}
    for table in read_pieces(log, ["problem_id", "prompt_ids"]):
        for id, prompt in zip(table["problem_id"].to_pylist(), table["prompt_ids"].to_pylist(), strict=True):
            asked.setdefault(np.asarray(prompt, np.int32).tobytes(), set()).add(id)
    prompts = [rollouts.tokens(int(row))[0].tobytes() for row in frame.index]
    own: dict[bytes, set[str]] = {}
    for prompt, id in zip(prompts, frame.problem_id, strict=True):
        own.setdefault(prompt, set()).add(id)
    matched, unclear = [], set[str]()
    for prompt, id in zip(prompts, frame.problem_id, strict=True):
        ids = asked.get(prompt, set())
        alone = len(ids) == 1 and not ids & own[prompt]
        matched.append(id if id in ids else next(iter(ids)) if alone else None)
        if ids and matched[-1] is None:
            unclear.add(id)
    frame["problem_id"] = matched
    frame = frame[frame.problem_id.notna()].reset_index(drop=True)
    if frame.empty:
        what = f"asks none of the problems of {log.name}: no prompt has the same tokens"
        if unclear:
            what = (
                f"of {len(unclear)} of its problems nothing says which they are: several problems of {log.name} share "
                "their prompt, and have other ids"
            )
        raise TsaeError(what, where=path, fix="Sample the log's own problems, with the prompt format of the training.")
    return frame


def draw_problems(outline: pd.DataFrame, tokens: int, seed: int, where: str | Path) -> np.ndarray:
    """Draw problems at random up to a number of tokens, in turn from every band; all if the budget allows.

    A drawn problem keeps all of its trajectories, unless they alone take more than a 24th of the tokens: then 24
    problems, 8 a band, could not be read. Such a problem keeps those that fit into that share, drawn at random, or 16
    if 16 are more.

    The order of problems follows from the seed and their ids alone, and that of a problem's trajectories from the seed
    and their place among the problem's. So of a log that has grown by a tenth, about nine in ten of what was drawn
    before are drawn again.

    Args:
        outline: of `tsae.rollouts.parquet.read_outline`, with the band of every problem, or null.
        tokens: of prompts and responses.
        seed: of the drawing.
        where: named in error messages.

    Returns:
        (n,) bool, which trajectories are drawn.

    Raises:
        TsaeError: if no response fits into the tokens.
    """
    size = outline.prompt_length + outline.response_length
    if size.sum() <= tokens:
        return np.ones(len(outline), dtype=bool)
    allowed = _thinned(outline.problem_id, size, tokens, seed)
    if not allowed.any():
        what = f"the shortest response has {size.min():,} tokens with its prompt, more than the {tokens:,} to be read"
        raise TsaeError(what, where=where, fix="Allow more (--tokens).")
    cost = size[allowed].groupby(outline.problem_id[allowed]).sum()
    order = pd.Series([hash64(str(seed), id) for id in cost.index], index=cost.index).rank(method="first")
    band = problem_bands(outline).loc[cost.index].fillna("none")
    turn = order.groupby(band).rank()
    ranked = cost.loc[pd.DataFrame({"turn": turn, "order": order}).sort_values(["turn", "order"]).index]
    kept = ranked.index[(ranked.cumsum() <= tokens).to_numpy()]
    return outline.problem_id.isin(kept).to_numpy() & allowed


def _thinned(problem: pd.Series, size: pd.Series, tokens: int, seed: int) -> np.ndarray:
    """(n,) bool: all trajectories of a problem up to its share of the tokens, and some at random of one beyond."""
    share = tokens // (len(BANDS) * FEWEST)
    total = size.groupby(problem).transform("sum")
    allowed = (total <= share).to_numpy(copy=True)
    beyond = np.flatnonzero(~allowed)
    place = problem.groupby(problem).cumcount()
    drawn = pd.DataFrame({"problem": problem, "size": size}).iloc[beyond]
    drawn["order"] = [hash64(str(seed), problem.iloc[row], str(place.iloc[row])) for row in beyond]
    drawn["row"] = beyond
    drawn = drawn[drawn["size"] <= tokens].sort_values(["order"])
    used, rank = drawn.groupby("problem")["size"].cumsum(), drawn.groupby("problem").cumcount()
    fits = (used <= share) | ((rank < MANY) & (used <= tokens))
    allowed[drawn["row"][fits]] = True
    return allowed
