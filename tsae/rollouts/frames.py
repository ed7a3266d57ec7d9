"""Rollouts from a table of Python: for logs that no importer knows, brought into rows there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.series import CheckpointSeries
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.table import Rollouts


def read_frame(
    frame: Any,
    checkpoint: Checkpoint | CheckpointSeries | str | Path,
    config: ImportConfig | None = None,
) -> Rollouts:
    """The rollouts of a table with a trajectory a row.

    Args:
        frame: a DataFrame of pandas or polars, a pyarrow.Table, a datasets.Dataset, a dict of columns, or dicts of rows
            (a list, a generator), with columns prompt and response (texts, or messages as the prompt), or prompt_ids
            and response_ids (lists or tensors of token ids; with a response_mask for several turns), and if known
            reward, correct, step, policy, problem_id, answer, advantage, finish_reason and level;
            `ImportConfig.columns` gives them other names. Named levels of an index are columns too. Padding is left out
            where attention_mask, prompt_mask or completion_mask have 0, or else as in any log.
        checkpoint: whose tokenizer and chat template count, or a series of them, whose ids policies get.
        config: of the import; its format is not used.

    Returns:
        what `tsae.rollouts.importing.import_log` makes of the same rows in a file; ``info["log"]`` says what was
        assumed.

    Raises:
        TsaeError: naming the row, counted from 0, and its index label, for rows that cannot be read.
    """
    return Rollouts.read(frame, checkpoint, config or ImportConfig())
