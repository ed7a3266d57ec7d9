"""Token parts: which tokens of a response are its answer, which are thinking, and which the policy did not sample.

The column ``parts`` of a Rollouts table has a list with one small integer a response token; null means that the whole
response is a plain answer. A table without such responses has no such column. Parts are labels, as outcomes are:
activations do not depend on them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tsae.errors import TsaeError
from tsae.rollouts.parquet import list_lengths

ANSWER, THINKING, OTHER = 0, 1, 2
"""Sampled, but not while thinking; sampled while thinking, with the markers around it; not sampled: a tool's result, a
user's turn, what a template writes between turns."""

COLUMN = "parts"
FIELD = pa.field(COLUMN, pa.list_(pa.int8()))
_ROWS = 1024


class TokenParts:
    """What a table of rollouts says about the tokens of its responses."""

    table: pa.Table

    @cached_property
    def n_sampled(self) -> np.ndarray:
        """(n,) response tokens that the policy sampled, without those of tools, users and templates."""
        return count_sampled(self.table)

    @cached_property
    def has_thinking(self) -> bool:
        """Whether any response has thinking."""
        if COLUMN not in self.table.column_names:
            return False
        return any(pc.any(pc.equal(chunk.flatten(), THINKING)).as_py() for chunk in self.table[COLUMN].chunks)

    @property
    def _is_plain(self) -> bool:
        """Whether all responses are plain answers, whether or not the table has the column."""
        return COLUMN not in self.table.column_names or self.table[COLUMN].null_count == len(self.table)

    def token_parts(self, rows: np.ndarray | Sequence[int]) -> np.ndarray | None:
        """(n_tokens,) int8 part of every token of some rows, prompts (ANSWER) and responses; None where all responses
        of the table are plain."""
        if self._is_plain:
            return None
        rows = np.asarray(rows, dtype=np.int64)
        prompt, response = (list_lengths(self.table[name])[rows] for name in ("prompt_ids", "response_ids"))
        found = np.zeros(int((prompt + response).sum()), dtype=np.int8)
        begin = (prompt + response).cumsum() - response  # where every response begins
        order = np.argsort(rows, kind="stable")
        edges = np.cumsum([0, *(len(chunk) for chunk in self.table[COLUMN].chunks)])
        bounds = np.searchsorted(rows[order], edges)
        # Chunk by chunk: the column stays where it is, in a mapped file.
        for number, chunk in enumerate(self.table[COLUMN].chunks):
            mine = order[bounds[number] : bounds[number + 1]]
            place = rows[mine] - edges[number]
            known = ~np.asarray(chunk.is_null())[place]
            mine, place = mine[known], place[known]
            offsets = chunk.offsets.to_numpy()
            low, length = offsets[place].astype(np.int64), (offsets[place + 1] - offsets[place]).astype(np.int64)
            found[_ranges(begin[mine], length)] = chunk.values.to_numpy()[_ranges(low, length)]
        return found

    def response_parts(self, row: int) -> np.ndarray:
        """(n,) int8 part of every response token of one trajectory."""
        found = self.table[COLUMN][row].values if COLUMN in self.table.column_names else None
        if found is None:
            return np.full(len(self.table["response_ids"][row].values), ANSWER, dtype=np.int8)
        return np.array(found.to_numpy())

    def sampled(self, row: int) -> np.ndarray:
        """(n,) bool: which response tokens of one trajectory the policy sampled."""
        return np.asarray(self.response_parts(row) != OTHER)

    @cached_property
    def parts_fingerprint(self) -> str:
        """Hash of the parts of all responses; empty where all are plain."""
        if self._is_plain:
            return ""
        digest = hashlib.sha256()
        # The fingerprint of the trajectories covers the lengths. A null differs from a list of ANSWER.
        digest.update(np.packbits(np.asarray(self.table[COLUMN].is_null())).tobytes())
        for chunk in self.table[COLUMN].chunks:
            digest.update(np.ascontiguousarray(chunk.flatten().to_numpy()).data)
        return digest.hexdigest()[:16]


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
        what = f"row {wrong[0]} has {found[wrong[0]]} parts for {lengths[wrong[0]]} response tokens"
        raise TsaeError(what, where=where, fix="Give one part a response token, or null.")
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


def count_sampled(table: pa.Table) -> np.ndarray:
    """(n,) response tokens that the policy sampled."""
    lengths = list_lengths(table["response_ids"])
    if COLUMN not in table.column_names:
        return lengths
    others, row = np.zeros(len(lengths), dtype=np.int64), 0
    for chunk in table[COLUMN].chunks:
        offsets, values, known = chunk.offsets.to_numpy(), chunk.values.to_numpy(), ~np.asarray(chunk.is_null())
        for low in range(0, len(chunk), _ROWS):  # Counts take eight times the memory of the parts.
            ends = offsets[low : low + _ROWS + 1]
            before = np.concatenate([[0], (values[ends[0] : ends[-1]] == OTHER).cumsum()])
            counts = np.diff(before[ends - ends[0]])
            # Values under a null mean nothing.
            others[row : row + len(counts)] = np.where(known[low : low + _ROWS], counts, 0)
            row += len(counts)
    return np.asarray(lengths - others)


def _ranges(begin: np.ndarray, length: np.ndarray) -> np.ndarray:
    """begin[0], begin[0] + 1, … for every length, one after another."""
    return np.arange(int(length.sum())) + np.repeat(begin - length.cumsum() + length, length)
