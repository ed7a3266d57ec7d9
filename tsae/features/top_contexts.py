"""Top contexts: the trajectories on which a feature is most active."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tsae.activations.spans import rows_mask
from tsae.errors import TsaeError
from tsae.features.feature_table import FeatureTable


@dataclass(frozen=True)
class Context:
    """One trajectory, as one reader read it, with a feature's activation on every token."""

    reader: str
    trajectory: int
    """Row id into the rollouts."""
    token_ids: np.ndarray
    """(n,) of prompt and response."""
    activations: np.ndarray
    """(n,) of the feature; 0 on tokens that do not count: special tokens, outliers, and those of the response that the
    policy did not sample."""
    n_prompt: int
    """Tokens of the prompt, which come first."""
    outcome: str
    policy: str
    problem_id: str


class Peaks(NamedTuple):
    """The strongest token of a feature in every row where it is active, in the order of the rows."""

    row: np.ndarray
    token: np.ndarray
    value: np.ndarray


def top_contexts(features: FeatureTable, feature: int, n: int = 8, *, reader: str | None = None) -> list[Context]:
    """The trajectories with the feature's largest activations, at most one a problem.

    Args:
        features: the table.
        feature: its index.
        n: how many.
        reader: only what this reader read.

    Raises:
        TsaeError: where there is no such feature or reader, or none are asked for.
    """
    features.need([feature])
    if n < 1:
        raise TsaeError(f"n={n} contexts are none", where=features.origin, fix="Ask for at least one.")
    counted = features.span_mask("all")
    tokens, values = features.column(feature)
    keep = counted[tokens]
    if reader is not None:
        keep &= features.reader[features.rows_of(tokens)] == features.readers.index(features.reader_info(reader)["id"])
    tokens, values = tokens[keep], values[keep]
    problems = features.rollouts.table["problem_id"].to_pylist()
    found: list[Context] = []
    seen: set[str] = set()
    for token in tokens[np.lexsort((tokens, -values))]:
        row = int(features.rows_of(token))
        problem = problems[features.trajectory[row]]
        if problem not in seen:
            seen.add(problem)
            found.append(context(features, feature, row))
            if len(found) == n:
                break
    return found


def context(features: FeatureTable, feature: int, row: int) -> Context:
    """A row of the table with one feature's activations."""
    span = slice(int(features.row_offsets[row]), int(features.row_offsets[row + 1]))
    trajectory = int(features.trajectory[row])
    record = features.rollouts.table.select(["outcome", "policy", "problem_id"]).slice(trajectory, 1).to_pylist()[0]
    ids = features.token_ids[span]
    # Outliers have no codes.
    counted = rows_mask(
        ids, np.array([0, len(ids)]), features.rollouts, np.array([trajectory]), "all", features.info["special_ids"]
    )
    return Context(
        reader=features.readers[features.reader[row]],
        trajectory=trajectory,
        token_ids=ids,
        activations=features.codes[span][:, [feature]].toarray()[:, 0] * counted,
        n_prompt=int(features.rollouts.lengths("prompt_ids")[trajectory]),
        **record,
    )


def peaks_of(source: FeatureTable, counted: np.ndarray, feature: int) -> Peaks:
    """Where a feature is strongest, over the (n_tokens,) counted tokens."""
    token, value = source.column(feature)
    keep = counted[token] & (value > 0)
    token, value = token[keep].astype(np.int64), value[keep]
    row = source.rows_of(token)
    starts = np.flatnonzero(np.r_[True, np.diff(row) != 0][: len(row)])
    if not len(starts):
        return Peaks(row, token, value)
    best = np.maximum.reduceat(value, starts)
    run = np.repeat(np.arange(len(starts)), np.diff(np.r_[starts, len(row)]))
    # The first token that reaches the maximum.
    at = np.flatnonzero(value == best[run])
    at = at[np.unique(run[at], return_index=True)[1]]
    return Peaks(row[starts], token[at], best)
