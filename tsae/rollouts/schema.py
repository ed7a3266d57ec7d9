"""The columns of a rollouts table: their types, their values, and checks of both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from tsae.errors import TsaeError
from tsae.rollouts.parquet import list_lengths, refuse_twice
from tsae.rollouts.problems import undated
from tsae.rollouts.token_parts import FIELD as PARTS_FIELD
from tsae.rollouts.token_parts import check_parts

BANDS = ("easy", "medium", "hard")
OUTCOMES = ("success", "failure", "unknown")

SCHEMA = pa.schema(
    [
        pa.field("problem_id", pa.string()),
        pa.field("policy", pa.string()),  # id of the checkpoint that sampled the response
        pa.field("prompt", pa.string()),
        pa.field("response", pa.string()),  # derived from response_ids; special tokens left out
        pa.field("answer", pa.string()),
        pa.field("level", pa.string()),  # the author's label, if any
        pa.field("prompt_ids", pa.list_(pa.int32())),
        pa.field("response_ids", pa.list_(pa.int32())),
        pa.field("reward", pa.float64()),  # null where unknown
        pa.field("outcome", pa.string()),
        pa.field("advantage", pa.float64()),  # null until computed or imported
        pa.field("finish_reason", pa.string()),  # stop, length or unknown
        pa.field("band", pa.string()),  # null until computed
    ]
)
"""Every table has these columns; it keeps further columns as they are. One of them, ``parts``, says what each response
token is (`tsae.rollouts.token_parts`)."""

TRAINING = (
    pa.field("generation", pa.int64()),  # number of the batch of responses that were sampled together
    pa.field("micro_batch", pa.list_(pa.int32())),  # its number in the generation, for each iteration that used it
    pa.field("old_logprobs", pa.list_(pa.float32())),  # one a response token, in nats: when it was sampled,
    pa.field("ref_logprobs", pa.list_(pa.float32())),  # of the reference model,
    pa.field("sampler_logprobs", pa.list_(pa.float32())),  # and of the engine that sampled
)
"""Further columns, of logs that say how the training used a trajectory (`tsae.rl.run_log`)."""

LARGEST_REWARD = 1e100
_REQUIRED = ("problem_id", "policy", "prompt_ids", "response_ids", "outcome")


def type_of(name: str) -> pa.DataType | None:
    """The type of a column; None for one that is not in the schema."""
    return PARTS_FIELD.type if name == PARTS_FIELD.name else SCHEMA.field(name).type if name in SCHEMA.names else None


def outcome_name(right: bool | None) -> str:
    """success, failure, or unknown for None."""
    return "unknown" if right is None else "success" if right else "failure"


def problem_bands(frame: pd.DataFrame) -> pd.Series:
    """The band of every problem, by problem_id; null where it has none.

    All banded trajectories of a problem have the same band. With cross-fitted bands, half of them may have none
    (`tsae.rollouts.bands.find_bands`).
    """
    return frame.groupby("problem_id", sort=False).band.first()


def typed(table: pa.Table, where: str) -> pa.Table:
    """A table with the columns of `SCHEMA` first, in their types.

    Raises:
        TsaeError: for missing columns, several of one name, and values that do not fit the type.
    """
    missing = [name for name in _REQUIRED if name not in table.column_names]
    if missing:
        what = f"lacks the columns {', '.join(missing)}; it has {', '.join(table.column_names) or 'none'}"
        fix = "Make the file with `tsae rollouts`, or import a log with `tsae rollouts import`."
        raise TsaeError(what, where=where, fix=fix)
    refuse_twice(table.column_names, where)
    columns = {}
    for field in (*SCHEMA, PARTS_FIELD):
        if field.name in table.column_names:
            try:
                columns[field.name] = table[field.name].cast(field.type)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                what = f"column {field.name} is {table[field.name].type}, expected {field.type} ({error})"
                raise TsaeError(what, where=where) from error
        elif field.name in SCHEMA.names:
            columns[field.name] = pa.nulls(table.num_rows, field.type)
    for name in table.column_names:
        if name not in columns:
            column = table[name]
            columns[name] = column.cast(_lists_of_items(column.type)) if pa.types.is_list(column.type) else column
    return pa.table(columns, metadata=table.schema.metadata)


def by_row(values: Any, n: int, where: str) -> Any:
    """Values in the order of the n rows; a Series is aligned by its index, as pandas does.

    Raises:
        TsaeError: for more or fewer values, or a Series whose index is not the numbers of the rows.
    """
    if hasattr(values, "__len__") and len(values) != n:
        raise TsaeError(f"gets {len(values)} values for its {n} rows", where=where, fix="Give one a row.")
    if not isinstance(values, pd.Series) or values.index.equals(pd.RangeIndex(n)):
        return values
    if values.index.sort_values().equals(pd.RangeIndex(n)):
        return values.sort_index()
    what = f"the index of the Series {values.name!r} is not the rows 0 to {n - 1}"
    raise TsaeError(what, where=where, fix="Give its values in the order of the rows (.to_numpy()).")


def check_same_problems(tables: Sequence[tuple[pa.Table, str]]) -> None:
    """Check that a problem id is one problem in all (table, its name).

    Raises:
        TsaeError: for an id with another prompt, none of which contains the other, and no equal answers.
    """
    known: dict[str, tuple[str, str, str]] = {}
    for table, where in tables:
        first = np.flatnonzero(~table["problem_id"].to_pandas().duplicated())
        for row in table.select(["problem_id", "prompt", "answer"]).take(pa.array(first)).to_pylist():
            id, prompt, answer = row["problem_id"], undated(row["prompt"] or ""), row["answer"] or ""
            other, told, place = known.setdefault(id, (prompt, answer, where))
            if prompt not in other and other not in prompt and (answer != told or not answer):
                raise TsaeError(
                    f"problem id {id!r} has the prompt {prompt[:60]!r}, and {other[:60]!r} in {place}",
                    where=where,
                    fix="Give different problems different ids: with_column('problem_id', ...), or import the log with "
                    "--column problem_id=prompt.",
                )


def _lists_of_items(kind: pa.DataType) -> pa.DataType:
    """The same type with pyarrow's own name for what is in a list. Parquet has another name, so that a table that was
    read would be written with other bytes."""
    return pa.list_(_lists_of_items(kind.value_type)) if pa.types.is_list(kind) else kind


def checked(table: pa.Table, where: str) -> pa.Table:
    """A table without metadata, with the columns of `SCHEMA` first, if its values are in order.

    Raises:
        TsaeError: for missing columns, unknown outcomes or bands, empty or null token ids, or rewards that are not
            finite or larger than 1e100.
    """
    table = typed(table.replace_schema_metadata(None), where)
    for what, fix in _faults(table):
        raise TsaeError(what, where=where, fix=fix)
    check_parts(table, where)
    return table


def _faults(table: pa.Table) -> Iterator[tuple[str, str]]:
    """(what is wrong with the values of a table, what to do)."""
    if table.num_rows == 0:
        yield "holds no trajectories", "Give at least one trajectory."
    for name in _REQUIRED:
        if table[name].null_count:
            yield f"{table[name].null_count} rows have no {name}", "Fill or drop them."
    for name, allowed in (("outcome", OUTCOMES), ("band", BANDS)):
        for unknown in sorted(set(table[name].unique().to_pylist()) - {*allowed, None}):
            yield f"{name} {unknown!r} is none of {', '.join(allowed)}", f"Correct {name}."
    for name in ("prompt_ids", "response_ids"):
        if nulls := sum(chunk.flatten().null_count for chunk in table[name].chunks):
            yield f"{name} holds {nulls} null token ids", "Drop those trajectories."
        if any((ids := chunk.flatten().to_numpy()).size and ids.min() < 0 for chunk in table[name].chunks):
            fix = "Read the table with a checkpoint and an ImportConfig, which leaves padding out."
            yield f"{name} holds mask values below 0, not token ids alone", fix
        if len(empty := np.flatnonzero(list_lengths(table[name]) == 0)):
            what = f"{len(empty)} trajectories have empty {name} (first: row {empty[0]})"
            yield what, "Drop them, or check the tokenizer that they were tokenised with."
    reward = table["reward"].to_numpy()
    if len(bad := np.flatnonzero(~np.isfinite(reward) & ~np.asarray(table["reward"].is_null()))):
        yield f"{len(bad)} rewards are not finite (first: row {bad[0]})", "Drop those rows."
    if len(huge := np.flatnonzero(np.abs(reward) > LARGEST_REWARD)):
        what = f"{len(huge)} rewards are larger than {LARGEST_REWARD:g}, such as {reward[huge[0]]:g} in row {huge[0]}"
        yield what, "Scale rewards down: the squares of such numbers are not finite."
