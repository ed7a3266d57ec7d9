"""Credit for any trainer: one Parquet row a trajectory, with an entry per response token.

The numbers are those that `tsae.rl.trl.FeatureCredit` computes in training from the same responses and advantages, up
to the precision of the stored activations. The factor 1 − p of `Credit.token_credit` needs the reference's
log-probabilities, which a FeatureTable does not have. `stored_logprob` takes them from a store with token statistics;
with `read_logprob` the reference reads the trajectories again.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch

from tsae.activations.forward_batches import fitting, read_batches
from tsae.activations.store import ActivationStore
from tsae.base.files import as_path
from tsae.checkpoints.hooks import PredictingReader
from tsae.checkpoints.loading import Checkpoint
from tsae.errors import refuse
from tsae.features.feature_table import FeatureTable
from tsae.rl.config import ShapingConfig
from tsae.rl.credit import Credit, open_reference, plausibility, sae_of, shape_advantages, thresholded, token_weights
from tsae.rollouts.parquet import write_table
from tsae.rollouts.rewards import group_names

SCHEMA = pa.schema(
    [
        pa.field("trajectory", pa.int64()),  # row of the rollouts
        pa.field("problem_id", pa.string()),
        pa.field("policy", pa.string()),
        pa.field("advantage", pa.float64()),  # of the trajectory, as the rollouts have it
        pa.field("plausibility", pa.float32()),
        pa.field("token_scores", pa.list_(pa.float32())),  # z, before the threshold
        pa.field("token_weights", pa.list_(pa.float32())),  # w, mean 1
        pa.field("token_advantages", pa.list_(pa.float32())),  # A', what a trainer uses in place of the advantage
    ]
)
"""Lists have one entry a response token, in the order of response_ids; 0 where the policy did not sample it."""
_DENSE = 2**26  # numbers of codes that are dense at once
_GIVE = "Give the store that the features were encoded from."
_ROUNDING = 1e-3  # A log-probability may be above 0 by no more.


def write_credit(
    credit: Credit,
    features: FeatureTable | str | Path,
    path: str | Path,
    shaping: ShapingConfig | None = None,
    *,
    logprob: np.ndarray,
) -> Path:
    """Write scores, weights and advantages of every trajectory that the reference read.

    Args:
        credit: learned on features of the same SAE.
        features: what the reference read, of any policy, with advantages; or the folder.
        path: the Parquet file.
        shaping: defaults of `ShapingConfig`.
        logprob: (n_tokens,) log-probabilities of the features' tokens, from `stored_logprob` or `read_logprob`.

    Raises:
        TsaeError: where the features are of another SAE, the reference read nothing, or advantages are missing.
    """
    features = FeatureTable.of(features)
    shaping = shaping or ShapingConfig()
    ours, theirs = credit.info["sae"].get("weights"), features.info["sae"].get("weights")
    rows = features.rows(reader=credit.info["reader"])
    frame = features.rollouts.frame.iloc[features.trajectory[rows]]
    foreign = f"the credit was learned on features of the SAE {ours}, these are of {theirs}"
    n_without = int(frame.advantage.isna().sum())
    refuse(
        features.origin,
        (ours != theirs, foreign, "Encode with the SAE that credit was learned with."),
        (n_without, f"{n_without} trajectories have no advantage", "Encode `Rollouts.with_advantages`."),
    )
    logprob = _need_logprob(logprob, features, rows)
    # A group stays in one table: its advantages must add up to 0.
    order = np.argsort(_groups(frame), kind="stable")
    tables = _tables(credit, features, rows[order], shaping, logprob)
    return write_table(as_path(path), SCHEMA, tables, {"kind": "token weights", "credit": credit.info})


def _need_logprob(logprob: np.ndarray, features: FeatureTable, rows: np.ndarray) -> np.ndarray:
    """Log-probabilities, one a token; those of the rows' responses must be known."""
    found, given = np.asarray(logprob, dtype=np.float32), np.shape(logprob)
    n = len(features.token_ids)
    refuse(
        features.origin,
        (given != (n,), f"logprob has the shape {given}, expected one number for each of {n:,} tokens", None),
    )
    wanted = np.zeros(n, dtype=bool)
    for row in rows:
        wanted[features.row_offsets[row] : features.row_offsets[row + 1]] = True
    unknown = int((wanted & features.span_mask("response") & ~(found <= _ROUNDING)).sum())
    refuse(
        features.origin,
        (
            unknown,
            f"{unknown:,} tokens of responses have no log-probability, or one above 0",
            "Give those of the reader that the credit was learned on (`stored_logprob`, `read_logprob`).",
        ),
    )
    return found


def stored_logprob(features: FeatureTable, reader: str, store: ActivationStore | str | Path) -> np.ndarray:
    """(n_tokens,) log-probability in nats that a reader gave the features' tokens; NaN at other readers' tokens.

    Args:
        features: encoded from the store or a part of it.
        reader: id of the reader.
        store: captured with token statistics.

    Raises:
        TsaeError: where the store has no token statistics, or the features are of another store.
    """
    store, of = store if isinstance(store, ActivationStore) else ActivationStore(store), features.origin
    weights = {record["id"]: record.get("weights") for record in store.manifest["readers"]}.get(reader)
    known = features.reader_info(reader).get("weights")
    refuse(
        store.path,
        (
            not store.has_token_statistics,
            "holds no log-probabilities",
            "Have the reference read again (--series), or capture with --token-statistics.",
        ),
        (store.rollouts.fingerprint != features.rollouts.fingerprint, f"holds other trajectories than {of}", _GIVE),
        (
            weights != known and None not in (weights, known),
            f"its {reader} has other weights than the checkpoint that read {of}",
            _GIVE,
        ),
    )
    mine = features.rows(reader=reader)
    rows = dict(zip(features.trajectory[mine].tolist(), mine.tolist(), strict=True))
    found = np.full(len(features.token_ids), np.nan, dtype=np.float32)
    for shard in store.whole.shards():
        if shard.reader != reader:
            continue
        logprob = shard.logprob
        for trajectory, (start, stop) in zip(shard.trajectory.tolist(), pairwise(shard.offsets), strict=True):
            row = rows.pop(trajectory, None)
            if row is not None:
                found[features.row_offsets[row] : features.row_offsets[row + 1]] = logprob[start:stop]
    refuse(store.path, (rows, f"lacks {len(rows)} trajectories that {reader} read", _GIVE))
    return found


def read_logprob(
    features: FeatureTable, reference: Checkpoint, *, device: str = "cpu", batch_tokens: int = 16384
) -> np.ndarray:
    """As `stored_logprob`, but the reference reads the trajectories again.

    Args:
        features: what it read.
        reference: the checkpoint whose id is the reader's.
        device: torch device.
        batch_tokens: tokens in a forward pass, with padding.

    Raises:
        TsaeError: where the reference has another width than the SAE, or a batch does not fit into memory.
    """
    sae = sae_of(features, "site", "d_model")
    rows = features.rows(reader=reference.id)
    spans = [slice(*features.row_offsets[row : row + 2]) for row in rows]
    reading = open_reference(reference, sae["site"], sae["d_model"], device=device)
    features.need_weights(reference)
    found = np.full(len(features.token_ids), np.nan, dtype=np.float32)
    texts = [features.token_ids[span] for span in spans]
    with fitting(batch_tokens, "read_logprob"):
        for batch in read_batches(PredictingReader(reading), texts, batch_tokens):
            for i, logprob in batch.each("logprob"):
                found[spans[i]] = logprob.cpu().numpy()
    return found


def _groups(frame: pd.DataFrame) -> np.ndarray:
    """(n,) number of each trajectory's group, as its advantage was made in."""
    return np.unique(group_names(frame), return_inverse=True)[1]


def _tables(
    credit: Credit, features: FeatureTable, rows: np.ndarray, shaping: ShapingConfig, logprob: np.ndarray
) -> Iterator[pa.Table]:
    frame = features.rollouts.frame.iloc[features.trajectory[rows]].reset_index(drop=True)
    group = _groups(frame)
    trajectories = features.trajectory[rows]
    prompt = features.rollouts.lengths("prompt_ids")[trajectories]
    ends = np.flatnonzero(np.diff(group)) + 1
    advantage = frame.advantage.to_numpy(dtype=np.float64)
    for block in np.split(np.arange(len(rows)), ends[15::16]):  # sixteen groups at once
        starts, stops = features.row_offsets[rows[block]] + prompt[block], features.row_offsets[rows[block] + 1]
        lengths = stops - starts
        width = int(lengths.max())
        scores, mask = torch.zeros(len(block), width), torch.zeros(len(block), width)
        for place, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            n = stop - start
            mask[place, :n] = torch.from_numpy(features.rollouts.sampled(int(trajectories[block][place])))
            scores[place, :n] = _token_credit(credit, features, int(start), int(stop), logprob)
        scores *= mask
        advantages = torch.from_numpy(advantage[block]).float()
        kept = thresholded(scores, shaping)
        numbers = torch.from_numpy(group[block] - group[block[0]])
        lists = {
            "token_scores": scores,
            "token_weights": token_weights(kept, advantages, mask, shaping),
            "token_advantages": shape_advantages(scores, advantages, mask, numbers, shaping),
        }
        columns: dict[str, Any] = {name: frame[name].to_numpy()[block] for name in ("problem_id", "policy")}
        columns |= {"trajectory": trajectories[block].astype(np.int64), "advantage": advantage[block]}
        columns["plausibility"] = plausibility(kept, mask, shaping).numpy()
        for name, values in lists.items():
            columns[name] = [row[:n].tolist() for row, n in zip(values, lengths, strict=True)]
        yield pa.table(columns, schema=SCHEMA)


def _token_credit(credit: Credit, features: FeatureTable, start: int, stop: int, logprob: np.ndarray) -> torch.Tensor:
    """(n,) scores of some tokens of one trajectory; codes are dense for a part of them at once."""
    at_once = max(1, _DENSE // features.n_features)
    found = []
    for first in range(start, stop, at_once):
        last = min(first + at_once, stop)
        codes = torch.from_numpy(features.codes[first - 1 : last].toarray())  # and of the token before
        ids = torch.from_numpy(features.token_ids[first:last].astype(np.int64))
        predicted = torch.from_numpy(logprob[first:last])
        found.append(credit.token_credit(codes[None], ids[None], predicted[None])[0])
    return torch.cat(found) if found else torch.zeros(0)
