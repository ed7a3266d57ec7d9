"""Fresh rollouts of a log's problems, by every checkpoint that is compared: what the policies do now.

A log holds what its trainer kept: often one policy a problem, and never the base. Fresh responses make the comparison
whole, and are sampled alike for all.

`draw_problems` chooses which problems of a log to read, up to a number of tokens, and `separate_rollouts` reads
rollouts that bands are measured on. The first works on the outline of a log (`tsae.rollouts.parquet.read_outline`); a
log may be much longer than what is drawn.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from tsae.base.progress import progress_bar
from tsae.checkpoints.loading import Checkpoint, ModelLoader
from tsae.checkpoints.tokenizers import text_limits
from tsae.errors import TsaeError
from tsae.rollouts.bands import (
    BAND_COLUMNS,
    FEWEST,
    Bands,
    band_counts,
    band_problems,
    bands_info,
    kind_of_bands,
)
from tsae.rollouts.behaviours import with_behaviours
from tsae.rollouts.config import SamplingConfig, ServerConfig
from tsae.rollouts.logs.entry import hash64
from tsae.rollouts.parquet import read_pieces
from tsae.rollouts.problems import Problem
from tsae.rollouts.rewards import BY_NAME, Verifier, find_verifier, number_in
from tsae.rollouts.sampling import sample
from tsae.rollouts.schema import BANDS, problem_bands
from tsae.rollouts.table import Rollouts

_CHECKED = 400
"""Responses of a log that verifiers are tried on."""
_AGREES = 0.9
"""Least share of the log's successes, and of its failures, that a verifier must confirm."""


def fresh_rollouts(
    readers: Sequence[Checkpoint],
    problems: Sequence[Problem],
    config: SamplingConfig,
    *,
    pieces: Path,
    verify: Verifier | None = None,
    server: ServerConfig | None = None,
    minutes: float | None = None,
    progress: bool,
) -> Rollouts:
    """Sample every problem from every checkpoint.

    Args:
        readers: the base first.
        problems: in the order in which they are asked.
        config: of the sampling.
        pieces: folder for finished batches, with which an interrupted sampling is resumed.
        verify: (response, answer) -> right or not.
        server: that samples. It serves every reader under its id, unless it names one model and there is one reader.
        minutes: most that this call may take, about; an equal part for every reader. Problems that a reader did not
            come to are left out for all.
        progress: show one bar, with the time that is left.

    Returns:
        responses with behaviours, and with advantages if they are verified; only whole problems.
    """
    at_once = max(1, config.batch_size // config.n_samples)
    chunks = [problems[start : start + at_once] for start in range(0, len(problems), at_once)]
    loader, found = ModelLoader(device=config.device), dict[str, list[Rollouts]]()
    began = time.monotonic()
    with progress_bar(
        "fresh rollouts", "response", len(readers) * len(problems) * config.n_samples, shown=progress
    ) as bar:
        for place, reader in enumerate(readers, 1):
            mine = found.setdefault(reader.id, [])
            for number, chunk in enumerate(chunks):
                if minutes is not None and number and time.monotonic() - began > 60 * minutes * place / len(readers):
                    chunks = chunks[:number]
                    break
                of_chunk = replace(config, seed=config.seed + number)
                asked = None if server is None else replace(server, model=server.model or reader.id)
                drawn = sample(
                    reader,
                    chunk,
                    of_chunk,
                    verify=verify,
                    server=asked,
                    pieces=pieces / str(number),
                    loader=loader,
                    progress=False,
                )
                mine.append(drawn)
                bar.update(len(drawn))
    together = Rollouts.concat([drawn for mine in found.values() for drawn in mine[: len(chunks)]])
    together = with_behaviours(together, reference=readers[0].id)
    return together if verify is None else together.with_advantages()


def answered_anew(
    readers: Sequence[Checkpoint],
    logged: Rollouts,
    config: SamplingConfig,
    *,
    pieces: Path,
    verifier: str | None = None,
    measured_on: pd.DataFrame | None = None,
    server: ServerConfig | None = None,
    minutes: float | None = None,
    progress: bool,
) -> Rollouts:
    """Fresh rollouts of the problems of a log, with its bands and what else is known of it.

    Where the log has no bands that can be compared, they are measured on the base's own responses.

    Args:
        readers, config, pieces, server, minutes, progress: see `fresh_rollouts`.
        logged: of the log, with ``info["log"]`` and ``info["stages"]``, lines on how it was read.
        verifier: name of the one that checks answers; see `choose_verifier`.
        measured_on: separate rollouts of the base to measure bands on.

    Returns:
        the rollouts; ``info["sampled"]`` has n_samples, verifier and max_new_tokens, ``info["stages"]`` one line more.
    """
    of_log, base = problem_bands(logged.frame).dropna(), readers[0].id
    info_of_log = bands_info(logged.info, logged.origin) or {}
    logged, read = with_answers(logged)
    name, checked = choose_verifier(logged, verifier)
    problems = [problem for problem in logged.problems() if problem.answer or not read]
    fresh = fresh_rollouts(
        readers,
        [problems[i] for i in np.random.default_rng(config.seed).permutation(len(problems))],
        config,
        pieces=pieces,
        verify=None if name is None else find_verifier(name),
        server=server,
        minutes=minutes,
        progress=progress,
    )
    told = f"{len(fresh):,} fresh responses, {config.n_samples} to each of {fresh.n_problems:,} problems"
    if fresh.n_problems < len(problems):
        told += f" of {len(problems):,}, which fitted into {minutes:g} minutes (--minutes),"
    told += f" by {', '.join(reader.id for reader in readers)}; {checked}{read}"
    of_bands = "none: accuracy is not measured"
    for kind in logged.info.get("bands_beside", {}):
        fresh = _as_logged(fresh, logged.by(kind), pieces)
    elsewhere = kind_of_bands(info_of_log) != "own"
    if (measured_on is None or elsewhere) and len(of_log) and not info_of_log.get("refused"):
        fresh = _as_logged(fresh, logged, pieces)
        of_bands = f"those of the log; of the problems that are answered: {band_counts(problem_bands(fresh.frame))}"
    elif name is not None:
        bands, of_bands = band_problems(fresh.frame, pieces, base=base, measured_on=measured_on, seed=config.seed)
        fresh = fresh if bands is None else fresh.in_bands(bands)
    about = {"n_samples": config.n_samples, "verifier": name, "max_new_tokens": config.max_new_tokens}
    stages = {**logged.info["stages"], "sampled": told, "bands": of_bands}
    info = {**fresh.info, "log": logged.info["log"], "sampled": about, "stages": stages}
    return Rollouts(fresh.table, info, fresh.origin)


def _as_logged(fresh: Rollouts, logged: Rollouts, where: Path) -> Rollouts:
    """Fresh rollouts in the bands that their problems have in a log."""
    first = logged.frame[logged.frame.band.notna()].drop_duplicates("problem_id").set_index("problem_id")
    rows = first[list(BAND_COLUMNS)].reindex(fresh.frame.problem_id).reset_index()
    unbanded = int(problem_bands(rows).isna().sum())
    told_by_log = {"separate": True, "cross_fitted": False, "halved": 0, "unbanded": unbanded}
    return fresh.in_bands(Bands(rows, {**(bands_info(logged.info, logged.origin) or {}), **told_by_log}, where))


def drawn_problems(outline: pd.DataFrame, n: int, tokens: int, seed: int, where: Path) -> np.ndarray:
    """(n_rows,) bool: the problems of a log of which n responses of the log's mean length fit into some tokens.

    Args:
        outline: of `tsae.rollouts.parquet.read_outline`, with bands.
        n: responses to a problem, of all readers together.
        tokens: at most.
        seed: of the drawing.
        where: named in error messages.
    """
    first = outline.drop_duplicates("problem_id")
    lengths = n * outline.groupby("problem_id").response_length.mean().reindex(first.problem_id).to_numpy()
    kept = draw_problems(
        first.assign(prompt_length=n * first.prompt_length, response_length=lengths), tokens, seed, where
    )
    return outline.problem_id.isin(first.problem_id[kept]).to_numpy()


def longest_response(readers: Sequence[Checkpoint], outline: pd.DataFrame) -> int:
    """Tokens after which fresh responses are cut: the longest of the log, or what the models' contexts leave."""
    limits = [context for context, _ in map(text_limits, readers) if context is not None]
    longest = int(outline.response_length.max())
    return max(1, min([longest, *(limit - int(outline.prompt_length.max()) for limit in limits)]))


def with_answers(logged: Rollouts) -> tuple[Rollouts, str]:
    """A log with the answers that its rewarded responses give, where it has none, and a few words on that.

    The answer of a problem is the last number of most of its successes; `choose_verifier` then compares all outcomes.
    """
    frame = logged.frame
    if (frame.answer.fillna("") != "").any() or frame.response.isna().any():
        return logged, ""
    right = frame[frame.outcome == "success"]
    given = right.response.groupby(right.problem_id).agg(lambda texts: [number_in(text) for text in texts])
    common = {id: Counter(str(n) for n in found if n is not None).most_common(1) for id, found in given.items()}
    answers = {id: found[0][0] for id, found in common.items() if found}
    if not answers:
        return logged, ""
    left = frame.problem_id.nunique() - len(answers)
    told = f"; the answer of a problem is the last number of its rewarded responses; {left} without are left out"
    return logged.with_column("answer", [answers.get(id, "") for id in frame.problem_id]), told


def choose_verifier(logged: Rollouts, asked: str | None) -> tuple[str | None, str]:
    """Name of the verifier that says of a log's responses what the log says, and a few words on that.

    Args:
        logged: of a log, with reference answers and outcomes.
        asked: the name that the user gave; it is taken.

    Returns:
        None where no verifier confirms nine in ten of the log's successes, and of its failures.
    """
    if asked is not None:
        return asked, f"{asked} checks answers (as asked)"
    frame = logged.frame[(logged.frame.outcome != "unknown") & (logged.frame.answer.fillna("") != "")]
    frame = frame[frame.response.notna()]
    frame = frame.iloc[np.unique(np.linspace(0, max(len(frame) - 1, 0), min(_CHECKED, len(frame))).astype(int))]
    shares = {} if frame.empty else {name: _confirmed(frame, verify) for name, verify in BY_NAME.items()}
    if tried := {name: share for name, share in shares.items() if share is not None}:
        best = max(tried, key=lambda name: tried[name])
        if tried[best] >= _AGREES:
            return best, f"{best} checks answers, which confirms {tried[best]:.0%} of the log's outcomes"
        told = f"{best}, the nearest, confirms {tried[best]:.0%}"
    else:
        told = "it has no reference answers with outcomes"
    return None, f"accuracy is not measured: no verifier agrees with the log ({told}); name one (--verifier)"


def _confirmed(frame: pd.DataFrame, verify: Callable[[str, str], bool]) -> float | None:
    """Share of the successes or of the failures that a verifier confirms, whichever is smaller; None where it fails."""
    try:
        found = np.array([verify(r, a) for r, a in zip(frame.response, frame.answer, strict=True)], dtype=bool)
    except TsaeError:  # math-verify is missing, or a reference answer is not an expression
        return None
    right = (frame.outcome == "success").to_numpy()
    return float(min((found == right)[side].mean() for side in (right, ~right) if side.any()))


MANY = 16
"""Responses of a problem that are enough to tell its successes from its failures; the size of a usual group."""


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
                f"{len(unclear)} of its problems cannot be identified: several problems of {log.name} share "
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
