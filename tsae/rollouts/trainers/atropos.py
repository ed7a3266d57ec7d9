"""Atropos: the groups of an environment, ``--env.data_path_to_save_groups``. A line is a group of scored sequences.

After the source of NousResearch/atropos (``envs/base.py``, 2026). A line has lists with one value a sequence: tokens,
masks (a token's id, or -100 where the policy did not sample it), scores and, if they are known, advantages,
inference_logprobs and messages.
"""

from __future__ import annotations

from collections.abc import Iterable

from tsae.rollouts.logs.adapters import Format, by_row, each_response, has, masked_entry
from tsae.rollouts.logs.entry import Entry, Fields

_IGNORED = -100


def _split(row: Fields) -> Iterable[Fields]:
    return each_response(row, "tokens", ("masks", "scores", "advantages", "inference_logprobs"))


def _entry(row: Fields) -> Entry:
    found = row.inside({"token_ids": row.row["tokens"], "advantages": row.get("advantages")})
    mask, scores = row.ids("masks") != _IGNORED, {"scores": row.score("scores")}
    entry = masked_entry(found, mask, scores, step=None, key=None, logprobs=row.get("inference_logprobs"))
    entry.group = str(row.line)
    return entry


FORMAT = Format("atropos", "Atropos groups", by_row(_entry, _split), has("tokens", "masks", "scores"))
