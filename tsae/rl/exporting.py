"""Credit for any trainer: one Parquet row a trajectory, with an entry per response token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from tsae.errors import TsaeError
from tsae.features.table import FeatureTable
from tsae.rl.config import ShapingConfig
from tsae.rl.credit import Credit
from tsae.rl.shaping import plausibility, shape_advantages, thresholded, token_weights
from tsae.rollouts.parquet import write_table

SCHEMA = pa.schema(
    [
        pa.field("trajectory", pa.int64()),  # row of the rollouts
        pa.field("problem_id", pa.string()),
        pa.field("policy", pa.string()),
        pa.field("advantage", pa.float64()),  # of the trajectory, as the rollouts have it
        pa.field("plausibility", pa.float32()),
        pa.field("token_scores", pa.list_(pa.float32())),  # c, before the threshold
        pa.field("token_weights", pa.list_(pa.float32())),  # w, mean 1
        pa.field("token_advantages", pa.list_(pa.float32())),  # A', what a trainer uses in place of the advantage
    ]
)
"""Lists have one entry a response token, in the order of response_ids."""


def write_credit(
    credit: Credit, features: FeatureTable | str | Path, path: str | Path, shaping: ShapingConfig | None = None
) -> Path:
    """Scores, weights and advantages of every trajectory that the reference read.

    Codes are all that a FeatureTable has: scores are not multiplied by 1 − the reference's probability of the token, as
    `tsae.rl.trl.FeatureCredit` does.

    Args:
        credit: learned on features of the same SAE.
        features: what the reference read, whoever sampled it, with advantages; or the folder.
        path: the Parquet file.
        shaping: defaults of `ShapingConfig`.

    Raises:
        TsaeError: where the features are of another SAE, the reference read nothing, or advantages are missing.
    """
    features = features if isinstance(features, FeatureTable) else FeatureTable.load(features)
    shaping = shaping or ShapingConfig()
    ours, theirs = credit.info["sae"]["weights"], features.info["sae"]["weights"]
    if ours != theirs:
        raise TsaeError(
            f"the credit was learned on features of the SAE {ours}, these are of {theirs}",
            where=features.origin,
            fix="Encode with the SAE that credit was learned with.",
        )
    rows = features.rows(reader=credit.info["reader"])
    frame = features.rollouts.frame.iloc[features.trajectory[rows]]
    if frame.advantage.isna().any():
        raise TsaeError(
            f"{int(frame.advantage.isna().sum())} trajectories have no advantage",
            where=features.origin,
            fix="Set them (`Rollouts.with_advantages`) before encoding.",
        )
    # Groups of one policy and problem share a table, so that their advantages still add up to 0.
    order = np.argsort(frame.groupby(["policy", "problem_id"]).ngroup().to_numpy(), kind="stable")
    return write_table(Path(path), SCHEMA, _tables(credit, features, rows[order], shaping), {"credit": credit.info})


def _tables(credit: Credit, features: FeatureTable, rows: np.ndarray, shaping: ShapingConfig) -> Iterator[pa.Table]:
    frame = features.rollouts.frame.iloc[features.trajectory[rows]].reset_index(drop=True)
    group = frame.groupby(["policy", "problem_id"], sort=False).ngroup().to_numpy()
    prompt = features.rollouts.lengths("prompt_ids")[features.trajectory[rows]]
    ends = np.flatnonzero(np.diff(group)) + 1
    blocks = np.split(np.arange(len(rows)), ends[15::16])  # sixteen groups at once
    for block in blocks:
        starts, stops = features.row_offsets[rows[block]] + prompt[block], features.row_offsets[rows[block] + 1]
        lengths = stops - starts
        width = int(lengths.max())
        codes = torch.zeros(len(block), width + 1, features.n_features)
        ids = torch.zeros(len(block), width, dtype=torch.int64)
        mask = torch.zeros(len(block), width)
        for place, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            n = stop - start
            codes[place, : n + 1] = torch.from_numpy(features.codes[start - 1 : stop].toarray())
            ids[place, :n] = torch.from_numpy(features.token_ids[start:stop].astype(np.int64))
            mask[place, :n] = 1
        scores = credit.scores(codes, ids) * mask
        advantages = torch.from_numpy(frame.advantage.to_numpy(dtype=np.float64)[block]).float()
        kept = thresholded(scores, shaping)
        numbers = torch.from_numpy(group[block] - group[block[0]])
        lists = {
            "token_scores": scores,
            "token_weights": token_weights(kept, advantages, mask, shaping),
            "token_advantages": shape_advantages(scores, advantages, mask, numbers, shaping),
        }
        yield pa.table(
            {
                "trajectory": features.trajectory[rows[block]].astype(np.int64),
                "problem_id": frame.problem_id.to_numpy()[block],
                "policy": frame.policy.to_numpy()[block],
                "advantage": frame.advantage.to_numpy(dtype=np.float64)[block],
                "plausibility": plausibility(kept, mask, shaping).numpy(),
                **{
                    name: [row[:n].tolist() for row, n in zip(values, lengths, strict=True)]
                    for name, values in lists.items()
                },
            },
            schema=SCHEMA,
        )
