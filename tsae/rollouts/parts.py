"""What each token of a response is: part of the answer, of thinking, or not sampled by the policy at all.

The column ``parts`` of a Rollouts table has a list of one small integer a response token; null where the response is
one plain answer. A table without such responses has no such column. Parts are labels, as outcomes are: activations do
not depend on them.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tsae.errors import TsaeError
from tsae.rollouts.parquet import list_lengths

ANSWER, THINKING, OTHER = 0, 1, 2
"""Sampled, and none of its thinking; sampled while it thinks, the markers around it among them; not sampled: a tool's
result, a user's turn, what a template writes between turns."""

COLUMN = "parts"
FIELD = pa.field(COLUMN, pa.list_(pa.int8()))


def check_parts(table: pa.Table, where: str) -> None:
    """Refuse parts that do not go with the responses.

    Raises:
        TsaeError: for lists of another length than the response, unknown parts, and responses without a sampled token.
    """
    if COLUMN not in table.column_names:
        return
    lengths, known = list_lengths(table["response_ids"]), ~np.asarray(table[COLUMN].is_null())
    found = list_lengths(table[COLUMN])
    wrong = np.flatnonzero(known & (found != lengths))
    if len(wrong):
        raise TsaeError(
            f"row {wrong[0]} has {found[wrong[0]]} parts for {lengths[wrong[0]]} response tokens",
            where=where,
            fix="Give one part a response token, or null.",
        )
    for chunk in table[COLUMN].chunks:
        values = chunk.flatten()
        if len(values) and (values.null_count or pc.min(values).as_py() < ANSWER or pc.max(values).as_py() > OTHER):
            raise TsaeError(
                f"{COLUMN} holds values other than {ANSWER} (answer), {THINKING} (thinking) and {OTHER} (not sampled)",
                where=where,
                fix="Correct that column.",
            )
    empty = np.flatnonzero(count_sampled(table) == 0)
    if len(empty):
        raise TsaeError(f"row {empty[0]} has no sampled token", where=where, fix="Drop that trajectory.")


def has_part(table: pa.Table, part: int) -> bool:
    """Whether any token is of a part other than ANSWER."""
    if COLUMN not in table.column_names:
        return False
    return any(pc.any(pc.equal(chunk.flatten(), part)).as_py() for chunk in table[COLUMN].chunks)


def count_sampled(table: pa.Table) -> np.ndarray:
    """(n,) response tokens that the policy sampled."""
    lengths = list_lengths(table["response_ids"])
    if COLUMN not in table.column_names:
        return lengths
    counts = []
    for chunk in table[COLUMN].chunks:
        offsets = chunk.offsets.to_numpy()
        before = np.concatenate([[0], (chunk.values.to_numpy() == OTHER).cumsum()])
        counts.append(before[offsets[1:]] - before[offsets[:-1]])
    others = np.concatenate(counts) if counts else np.zeros(0, dtype=int)
    # What lies under a null means nothing.
    return np.asarray(lengths - np.where(np.asarray(table[COLUMN].is_null()), 0, others))


def token_parts(table: pa.Table, rows: np.ndarray) -> np.ndarray | None:
    """(n_tokens,) int8 part of every token of some rows, prompts (ANSWER) and responses; None where all are plain.

    Args:
        table: of rollouts.
        rows: (n,) positions.
    """
    if COLUMN not in table.column_names or table[COLUMN].null_count == len(table):
        return None
    rows = np.asarray(rows, dtype=np.int64)
    prompt, response = (list_lengths(table[name])[rows] for name in ("prompt_ids", "response_ids"))
    found = np.zeros(int((prompt + response).sum()), dtype=np.int8)
    begin = (prompt + response).cumsum() - response  # where every response begins
    order = np.argsort(rows, kind="stable")
    edges = np.cumsum([0, *(len(chunk) for chunk in table[COLUMN].chunks)])
    bounds = np.searchsorted(rows[order], edges)
    # Chunk by chunk: the column stays where it is, in a mapped file.
    for number, chunk in enumerate(table[COLUMN].chunks):
        mine = order[bounds[number] : bounds[number + 1]]
        place = rows[mine] - edges[number]
        known = ~np.asarray(chunk.is_null())[place]
        mine, place = mine[known], place[known]
        offsets = chunk.offsets.to_numpy()
        low, length = offsets[place].astype(np.int64), (offsets[place + 1] - offsets[place]).astype(np.int64)
        found[_ranges(begin[mine], length)] = chunk.values.to_numpy()[_ranges(low, length)]
    return found


def fingerprint(table: pa.Table) -> str:
    """Hash of the parts of all responses; empty where all are plain, whether or not the table has the column."""
    if COLUMN not in table.column_names or table[COLUMN].null_count == len(table):
        return ""
    digest = hashlib.sha256()
    # Lengths are those of the responses; a null is another thing than a list of ANSWER.
    digest.update(np.packbits(np.asarray(table[COLUMN].is_null())).tobytes())
    for chunk in table[COLUMN].chunks:
        digest.update(np.ascontiguousarray(chunk.flatten().to_numpy()).data)
    return digest.hexdigest()[:16]


def _ranges(begin: np.ndarray, length: np.ndarray) -> np.ndarray:
    """begin[0], begin[0] + 1, … for every length, one after another."""
    return np.arange(int(length.sum())) + np.repeat(begin - length.cumsum() + length, length)
