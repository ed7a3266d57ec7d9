"""Feature tables from dense codes, for scripts and tests. Loads nothing heavy before a table is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import scipy.sparse as sp

if TYPE_CHECKING:
    from tsae import FeatureTable, Rollouts

BOS, EOS = 17, 19  # of the testbed's tokenizer


def feature_table(
    rollouts: Rollouts,
    codes: np.ndarray,
    readers: list[tuple[str, np.ndarray]],
    *,
    d_high: int = 1,
    special: tuple[int, ...] = (BOS, EOS),
) -> FeatureTable:
    """A FeatureTable from dense codes.

    Args:
        rollouts: the trajectories.
        codes: (n_tokens, n_features) of all rows after one another.
        readers: (id, row ids of the trajectories that it read), the base first.
    """
    from tsae import FeatureTable

    trajectory = np.concatenate([rows for _, rows in readers])
    texts = [np.concatenate(rollouts.tokens(int(row))) for row in trajectory]
    records = [
        {"id": id, "run": None if i == 0 else id, "step": i, "trained_on": None, "n_tokens": 1, "fve": 0.9, "l0": 1.0}
        for i, (id, _) in enumerate(readers)
    ]
    return FeatureTable(
        codes=sp.csr_array(codes.astype(np.float32)),
        token_ids=np.concatenate(texts).astype(np.int32),
        row_offsets=np.concatenate([[0], np.cumsum([len(text) for text in texts])]),
        reader=np.repeat(np.arange(len(readers), dtype=np.int32), [len(rows) for _, rows in readers]),
        trajectory=trajectory,
        rollouts=rollouts,
        info={"sae": {"d_high": d_high, "site": "x"}, "readers": records, "special_ids": list(special)},
    )
