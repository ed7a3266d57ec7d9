"""Rollouts from a DataFrame: for logs that no importer knows, brought into rows in Python."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tsae.checkpoints.checkpoint import Checkpoint
from tsae.checkpoints.series import CheckpointSeries
from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.table import Rollouts


def read_frame(
    frame: pd.DataFrame,
    checkpoint: Checkpoint | CheckpointSeries | str | Path,
    config: ImportConfig | None = None,
) -> Rollouts:
    """The rollouts of a table with a trajectory a row.

    Args:
        frame: with columns prompt and response (texts, or messages as the prompt), or prompt_ids and response_ids
            (lists of token ids; with a response_mask for several turns), and if known reward, correct, step, policy,
            problem_id, answer, advantage, finish_reason and level; `ImportConfig.columns` gives them other names.
        checkpoint: whose tokenizer and chat template count, or a series of them, whose ids policies get.
        config: of the import; its format is not used.

    Returns:
        what `tsae.rollouts.importing.import_log` makes of the same rows in a file; ``info["log"]`` says what was
        assumed.

    Raises:
        TsaeError: naming the row, counted from 0, for rows that cannot be read.
    """
    config = replace(config or ImportConfig(), format="plain")
    with tempfile.TemporaryDirectory() as folder:
        # The run is named after the folder of a log, where it has no other name.
        file = Path(folder) / "frame" / "frame.parquet"
        file.parent.mkdir()
        try:
            pq.write_table(pa.Table.from_pandas(frame, preserve_index=False), file)
        except (pa.ArrowException, TypeError) as error:
            raise TsaeError(
                f"a column of the table has values of several types ({error})",
                where="read_frame",
                fix="Make texts, numbers, flags or lists of them of every column, or leave that column out.",
            ) from error
        except (ValueError, OverflowError) as error:  # columns of one name, lone surrogates, integers beyond 64 bits
            raise TsaeError(
                f"cannot become a table of Arrow ({error})", where="read_frame", fix="Correct or drop that column."
            ) from error
        try:
            return Rollouts.read(file, checkpoint, config)
        except TsaeError as error:
            where = str(error.where).replace(str(file), "read_frame")
            raise TsaeError(error.what.replace(str(file), "read_frame"), where=where, fix=error.fix) from error
