"""Test whether a feature fires because of a token or its context: insert its top tokens into other contexts.

1. Half of the problems says which tokens carry most of a feature's activation, and how strongly it fires on them.
2. In trajectories of the other half, places are drawn at which the feature has not fired so far and does not fire next:
   one a trajectory. There the text is cut and one of the top tokens is put at its end (drawn by the share of activation
   that it carries), as no later token can change what a causal model computes on it.
3. In the same place a control token is put: of like frequency, and one on which the feature hardly fires.

A feature is *token-driven* where the inserted tokens fire it more than the control tokens do (interval over problems)
and at least half as strongly as they do where it fires on its own; *context-dependent* where the interval of that part
lies below one half; else *undecided*. A token put anywhere makes odd text: this tells token detectors apart, and not
what else a feature needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from einops import reduce

from tsae.activations.forward_batches import fitting, read_batches
from tsae.base.filters import need_features
from tsae.base.progress import progress_bar
from tsae.base.statistics import bootstrap_interval
from tsae.causal.config import InsertionConfig
from tsae.causal.intervene import check_model
from tsae.checkpoints.hooks import HuggingFaceReader
from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.series import CheckpointSeries
from tsae.diff.feature_diff import FeatureDiff
from tsae.errors import TsaeError
from tsae.features.feature_table import FeatureTable
from tsae.sae.model import TemporalSAE

TOKEN_DRIVEN, CONTEXT_DEPENDENT, UNDECIDED = "token-driven", "context-dependent", "undecided"
COLUMNS = (
    "reader", "feature", "top_ids", "control_ids", "natural_rate", "typical", "n_contexts", "n_problems",
    "inserted", "inserted_rate", "control", "control_rate", "difference", "low", "high", "kept", "kept_low",
    "kept_high", "verdict",
)  # fmt: skip
_KEPT = 0.5
_HARDLY = 0.1  # Of the rate on the top token: how often a feature may fire on a control token.


def insertion(
    checkpoint: Checkpoint,
    sae: TemporalSAE | str | Path,
    features: FeatureTable | str | Path,
    chosen: Sequence[int],
    config: InsertionConfig | None = None,
    *,
    progress: bool = True,
) -> pd.DataFrame:
    """Insert the top tokens of chosen features into contexts in which these features are silent.

    Args:
        checkpoint: reads; one of the table's readers.
        sae: or its folder; the one that `features` was encoded with.
        features: or its folder.
        chosen: feature indices.
        config: defaults of `InsertionConfig`.
        progress: show a bar.

    Returns:
        one row a feature:

        - reader, feature; top_ids, control_ids: token ids, by their share of the feature's activation;
        - natural_rate: share of the top tokens' occurrences on which the feature fires; typical: its mean activation
          where it does (both on the first half of the problems);
        - n_contexts places in trajectories of n_problems problems (of the other half);
        - inserted, control: mean activation on the token that was put there, and inserted_rate, control_rate: how often
          the feature fires on it;
        - difference = inserted − control, low, high: over problems;
        - kept = inserted / typical of the tokens that were inserted, with its interval kept_low, kept_high;
        - verdict: token-driven, context-dependent or undecided, or why there is none, with NaN for what was not
          measured.

    Raises:
        TsaeError: where the checkpoint is not a reader, or the SAE, the checkpoint and the table do not fit together.
    """
    config = config or InsertionConfig()
    features = FeatureTable.of(features)
    sae = TemporalSAE.of(sae, device=config.device)
    chosen = [int(feature) for feature in chosen]
    features.need_sae(sae.fingerprint, sae.config.d_sae)
    need_features(chosen, features.n_features, "features")
    model = checkpoint.load_model(device=config.device)
    check_model(model, sae, checkpoint, features)
    reading = HuggingFaceReader(model, [sae.site])
    learnt, others = _halves(features, checkpoint.id, config.seed)
    records = []
    for feature in progress_bar(f"inserting, {checkpoint.id}", "feature", over=chosen, shown=progress):
        tokens = _top_tokens(features, learnt, feature, config)
        records.append(
            {
                "reader": checkpoint.id,
                "feature": feature,
                "top_ids": tokens.top.tolist(),
                "control_ids": tokens.control.tolist(),
                "natural_rate": tokens.rate,
                "typical": float(tokens.share @ tokens.typical) if len(tokens.top) else np.nan,
                "verdict": tokens.note,
            }
        )
        if not tokens.note:
            records[-1] |= _measure(features, reading, sae, others, feature, tokens, config)
    return pd.DataFrame(records).reindex(columns=list(COLUMNS))


def insert_discoveries(
    diff: FeatureDiff,
    series: CheckpointSeries,
    sae: TemporalSAE | str | Path,
    features: FeatureTable | str | Path,
    n: int,
) -> pd.DataFrame:
    """`insertion` for the clearest discoveries of a diff: n shifts of every checkpoint, and n outcome effects of the
    base, each read by the side on which the feature is stronger (for outcomes, by the base).

    Raises:
        TsaeError: where nothing was discovered.
    """
    wanted: dict[str, list[int]] = {}
    for checkpoint in diff.checkpoints:
        of = {"checkpoint": checkpoint, "part": diff.main_part(checkpoint), "band": "all", "outcome": "all"}
        for row in diff.top(n, kind="shift", **of).itertuples():
            wanted.setdefault(checkpoint if row.difference > 0 else diff.base, []).append(int(row.feature))
    for row in diff.top(n, kind="outcome", checkpoint=diff.base, band="all").itertuples():
        wanted.setdefault(diff.base, []).append(int(row.feature))
    if not wanted:
        raise TsaeError("nothing was discovered, so that there is no feature to test", where="insertion")
    features = FeatureTable.of(features)
    sae = TemporalSAE.of(sae)
    parts = [insertion(series[reader], sae, features, sorted(set(chosen))) for reader, chosen in wanted.items()]
    return pd.concat(parts, ignore_index=True)


def _halves(features: FeatureTable, reader: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Of a reader: tokens of half the problems, special ones left out, to learn from; rows of the others, to insert
    into."""
    rows = features.rows(reader=reader)
    problem = pd.factorize(features.rollouts.frame.problem_id.to_numpy()[features.trajectory[rows]])[0]
    half = np.random.default_rng([seed, 11]).permutation(int(problem.max()) + 1) % 2
    learnt = features.span_mask("all") & np.isin(features.row_of_token, rows[half[problem] == 0])
    return np.flatnonzero(learnt), rows[half[problem] == 1]


@dataclass(frozen=True)
class _Tokens:
    """What is inserted for one feature."""

    top: np.ndarray
    """(n,) token ids that carry most of the activation."""
    share: np.ndarray
    """(n,) of their activation together."""
    control: np.ndarray
    """(n,) ids of like frequency on which the feature hardly fires."""
    rate: float
    """Share of occurrences of the top tokens on which the feature fires."""
    typical: np.ndarray
    """(n,) mean activation where it fires."""
    note: str
    """Why nothing is inserted; else empty."""


def _top_tokens(features: FeatureTable, learnt: np.ndarray, feature: int, config: InsertionConfig) -> _Tokens:
    ids, code = np.unique(features.token_ids[learnt], return_inverse=True)
    activation = features.columns[:, [feature]].toarray().ravel()[learnt]
    count = np.bincount(code)
    total = np.bincount(code, weights=activation)
    fired = np.bincount(code, weights=activation > 0)
    rate = fired / count
    order = np.argsort(-total, kind="stable")[: config.n_tokens]
    top = order[total[order] > 0]
    controls: list[int] = []
    for token in top:
        # A token that the feature answers to would be no control, nor one of the tokens that are inserted.
        allowed = np.flatnonzero((rate <= _HARDLY * rate[token]) & ~np.isin(np.arange(len(ids)), top))
        if not len(allowed):
            break
        controls.append(int(allowed[np.abs(np.log(count[allowed] / count[token])).argmin()]))
    share, typical = total[top] / total[top].sum(), total[top] / fired[top]
    natural = float(fired[top].sum() / max(int(count[top].sum()), 1))
    note = "never active" if not len(top) else "fires on every token" if len(controls) < len(top) else ""
    return _Tokens(ids[top], share, ids[np.array([] if note else controls, dtype=int)], natural, typical, note)


def _measure(
    features: FeatureTable,
    reading: HuggingFaceReader,
    sae: TemporalSAE,
    others: np.ndarray,
    feature: int,
    tokens: _Tokens,
    config: InsertionConfig,
) -> dict[str, object]:
    rng = np.random.default_rng([config.seed, 12, feature])
    places = rng.permutation(_silent_places(features, others, feature, rng))[: config.n_contexts]
    rows = features.row_of_token[places]
    problems = pd.factorize(features.rollouts.frame.problem_id.to_numpy()[features.trajectory[rows]])[0]
    n_problems = len(np.unique(problems))
    counts = {"n_contexts": len(places), "n_problems": n_problems}
    if n_problems < config.min_problems:
        return {**counts, "verdict": f"silent in {n_problems} problems; {config.min_problems} are needed"}
    which = rng.choice(len(tokens.top), size=len(places), p=tokens.share)
    texts = [
        np.append(features.token_ids[features.row_offsets[row] : place], token)
        for inserted in (tokens.top[which], tokens.control[which])
        for row, place, token in zip(rows, places, inserted, strict=True)
    ]
    found = last_activations(reading, sae, texts, feature, config.batch_tokens)
    inserted, control = found[: len(places)], found[len(places) :]
    typical = tokens.typical[which].mean()
    # One number a problem: its places averaged.
    size = np.bincount(problems)
    measures = inserted - control, inserted / typical
    by_problem = np.stack([np.bincount(problems, weights=x) / size for x in measures], 1)
    low, high = bootstrap_interval(by_problem, config.n_bootstrap, config.confidence, config.seed)
    difference, kept = reduce(by_problem, "problem measure -> measure", "mean")
    driven = TOKEN_DRIVEN if low[0] > 0 and kept >= _KEPT else UNDECIDED
    verdict = CONTEXT_DEPENDENT if high[1] < _KEPT else driven
    return {
        **counts,
        "inserted": float(inserted.mean()),
        "inserted_rate": float((inserted > 0).mean()),
        "control": float(control.mean()),
        "control_rate": float((control > 0).mean()),
        "difference": float(difference),
        "low": float(low[0]),
        "high": float(high[0]),
        "kept": float(kept),
        "kept_low": float(low[1]),
        "kept_high": float(high[1]),
        "verdict": verdict,
    }


def _silent_places(features: FeatureTable, rows: np.ndarray, feature: int, rng: np.random.Generator) -> np.ndarray:
    """One token of every row that has one: not its first, no special one, and none up to it fires the feature.

    What fires on special tokens does not count: the first token of a text fires many features.
    """
    counted = features.span_mask("all")
    tokens, values = features.column(feature)
    firing = np.zeros(len(counted), dtype=bool)
    firing[tokens[values > 0]] = True
    firing &= counted
    places = []
    for row in rows:
        start, stop = int(features.row_offsets[row]) + 1, int(features.row_offsets[row + 1])
        ends = np.flatnonzero(firing[start - 1 : stop])
        silent = start + np.flatnonzero(counted[start : start - 1 + int(ends[0]) if len(ends) else stop])
        if len(silent):
            places.append(int(rng.choice(silent)))
    return np.array(places, dtype=int)


def last_activations(
    reading: HuggingFaceReader, sae: TemporalSAE, texts: Sequence[np.ndarray], feature: int, batch_tokens: int
) -> np.ndarray:
    """(n_texts,) activation of a feature on the last token of every text, given as token ids.

    Raises:
        TsaeError: where a batch does not fit into memory.
    """
    found = np.zeros(len(texts))
    with fitting(batch_tokens, "insertion"):
        for batch in read_batches(reading, texts, batch_tokens):
            ends = np.cumsum(batch.lengths) - 1
            codes = sae.encode(batch.values[sae.site][ends].float())
            found[batch.texts] = codes[:, feature].cpu().numpy()
    return found
