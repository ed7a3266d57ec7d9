"""A cache of activations as delphi reads it (EleutherAI/delphi, `LatentDataset`).

::

    latents/
      layers.14/                  the hook point
        0_2047.safetensors        features 0 to 2047
          locations (n, 3)        sequence, place in it, feature − 0; uint16, or uint32 where that is too small
          activations (n,)        float32 (delphi itself writes half; its loader takes both)
          tokens (n_sequences, context)  uint32, the same in every file
        2048_4095.safetensors
        config.json

Trajectories stand one after another, cut into sequences of equal length, as delphi cuts documents; the last incomplete
sequence is left out. Only tokens that count have activations: no special tokens, no outliers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tsae.base.files import write_json
from tsae.errors import TsaeError
from tsae.features.feature_table import FeatureTable

_SMALLEST = 1e-5  # delphi leaves out what is not larger


def write_delphi(
    features: FeatureTable,
    to: Path,
    *,
    hookpoint: str,
    model_name: str,
    reader: str | None = None,
    context: int = 256,
    n_splits: int = 5,
) -> Path:
    """Write a cache.

    Args:
        features: the table.
        to: an empty folder.
        hookpoint: delphi's name of the site (`tsae.checkpoints.hooks`).
        model_name: from which delphi loads the tokenizer.
        reader: whose activations; by default the base's.
        context: tokens of a sequence.
        n_splits: files.

    Raises:
        TsaeError: where that reader read less than one sequence.
    """
    if context < 1:
        raise TsaeError(f"context={context} is less than 1", where="delphi", fix="Give the tokens of a sequence.")
    rows = features.rows(reader=reader or features.readers[0])
    read = [np.arange(*features.row_offsets[row : row + 2]) for row in rows]
    tokens = np.concatenate([np.zeros(0, dtype=np.int64), *read])
    n = len(tokens) // context
    if not n:
        raise TsaeError(
            f"has {len(tokens)} tokens of that reader, fewer than one sequence of {context}",
            where=features.origin,
            fix="Give a smaller context.",
        )
    tokens = tokens[: n * context]
    place = np.full(len(features.token_ids), -1, dtype=np.int64)
    place[tokens] = np.arange(len(tokens))
    place[~features.span_mask("all")] = -1
    ids = features.token_ids[tokens].reshape(n, context).astype(np.uint32)
    folder = to / hookpoint
    folder.mkdir(parents=True)
    bounds = np.linspace(0, features.n_features, min(n_splits, features.n_features) + 1).astype(int)
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        block = features.columns[:, np.arange(start, stop)]
        feature = np.repeat(np.arange(stop - start), np.diff(block.indptr))
        at = place[block.indices]
        keep = (at >= 0) & (block.data > _SMALLEST)
        at, feature, values = at[keep], feature[keep], block.data[keep]
        order = np.lexsort((feature, at))
        locations = np.stack([at[order] // context, at[order] % context, feature[order]], axis=1)
        small = locations.max(initial=0) < 2**16
        arrays = {
            "locations": locations.astype(np.uint16 if small else np.uint32),
            "activations": values[order].astype(np.float32),
            "tokens": ids,
        }
        save_file(arrays, folder / f"{start}_{stop - 1}.safetensors")
    settings = {"dataset_repo": "", "dataset_split": "", "dataset_name": "", "dataset_column": "", "batch_size": 1}
    known = {"ctx_len": context, "cache_ctx_len": context, "n_tokens": n * context, "n_splits": len(bounds) - 1}
    write_json(folder / "config.json", {**settings, **known, "model_name": model_name})
    return to
