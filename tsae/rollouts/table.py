"""The Rollouts table: one row a trajectory. Parquet on disk, Arrow in memory, token ids authoritative.

A row's position is its id: activation stores and feature tables refer to trajectories by it, and carry a copy of the
table that they were made from. A table that was read takes no memory for its tokens and texts, which stay in a mapped
file (`tsae.rollouts.parquet`).
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tsae.base.filters import several
from tsae.base.views import views
from tsae.errors import TsaeError
from tsae.rollouts import parts
from tsae.rollouts.parquet import list_lengths, mapped, read_info, read_pieces, row_groups, write_table

if TYPE_CHECKING:
    from tsae.checkpoints.series import Checkpoint, CheckpointSeries
    from tsae.rollouts.config import BandCutoffs, BandQuantiles, ImportConfig

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
"""The columns every table has; further columns are kept as they are. One of them, ``parts``, says what each response
token is (`tsae.rollouts.parts`)."""

_REQUIRED = ("problem_id", "policy", "prompt_ids", "response_ids", "outcome")


class Rollouts(parts.Parts):
    """A table of trajectories.

    Args:
        table: has at least the columns of `SCHEMA`; others are kept.
        info: what the token ids and bands mean: ``tokenizer`` (fingerprint), ``bands`` (reference and cut-offs), ….
        where: named in error messages.

    Raises:
        TsaeError: for missing columns, unknown outcomes or bands, empty or null token ids, or NaN rewards.
    """

    def __init__(self, table: pa.Table, info: Mapping[str, Any] | None = None, where: str = "rollouts") -> None:
        self.origin = where
        """The file it was read from; named in error messages."""
        self.table = _checked(_typed(table.replace_schema_metadata(None), where), where)
        self.info: dict[str, Any] = dict(info or {})

    @classmethod
    def from_records(cls, records: Sequence[Mapping[str, Any]], info: Mapping[str, Any] | None = None) -> Rollouts:
        """Make a table from one mapping a trajectory; columns of `SCHEMA` that are missing become null."""
        names = list(dict.fromkeys(name for record in records for name in record))
        arrays = {}
        for name in names:
            arrays[name] = pa.array([record.get(name) for record in records], type=_type_of(name))
        return cls(pa.table(arrays), info)

    @classmethod
    def read(
        cls,
        path: str | Path,
        checkpoint: Checkpoint | CheckpointSeries | str | Path | None = None,
        config: ImportConfig | None = None,
        *,
        origin: str | None = None,
    ) -> Rollouts:
        """Read a Parquet file that `write` wrote, or a trainer's log.

        Args:
            path: the file; or the log of TRL, verl, open-instruct, NeMo-RL, prime-rl or open-r1, or a plain one: a
                folder, a .jsonl file, or a .parquet file.
            checkpoint: for logs; see `tsae.rollouts.importing.import_log`.
            config: how a log is read; with it, a Parquet file is a log.
            origin: what error messages call it; by default its path.

        Raises:
            TsaeError: for files that are neither, and for what is wrong in them.
        """
        path = Path(path)
        if config is not None or path.is_dir() or (path.is_file() and _is_log(path)):
            from tsae.rollouts.importing import import_log

            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "rollouts.parquet"
                import_log(path, file, checkpoint, config, progress=False)
                return cls.read(file, origin=str(path))
        if not path.is_file():
            raise TsaeError("no such rollouts file", where=path, fix="Make one with `tsae rollouts sample`.")
        where = origin or str(path)
        table = mapped(_typed(piece, where) for piece in read_pieces(path))
        return cls(table, read_info(table), where)

    @classmethod
    def read_rows(cls, path: str | Path, rows: np.ndarray) -> Rollouts:
        """Some of the rows of a file that `write` wrote.

        Args:
            path: the file.
            rows: (n,) bool, which rows.
        """

        def wanted() -> Iterator[pa.Table]:
            start = 0
            for piece in read_pieces(path):
                end = start + piece.num_rows
                yield _typed(piece.take(pa.array(np.flatnonzero(rows[start:end]))), str(path))
                start = end

        table = mapped(wanted())
        return cls(table, read_info(table), str(path))

    def write(self, path: str | Path) -> Path:
        """Write one Parquet file, whole or not at all; the same table gives the same bytes."""
        lengths = self.lengths("prompt_ids") + self.lengths("response_ids")
        return write_table(Path(path), self.table.schema, row_groups(self.table, lengths), self.info)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __repr__(self) -> str:
        policies = ", ".join(self.policies[:4]) + (", …" if len(self.policies) > 4 else "")
        return f"Rollouts({len(self):,} trajectories of {self.n_problems:,} problems; policies: {policies})"

    def _repr_html_(self) -> str:
        frame = self.frame.assign(
            band=self.frame.band.fillna("none"),
            right=(self.frame.outcome == "success").where(self.frame.outcome != "unknown").astype(float),
        )
        groups = frame.groupby(["policy", "band"], sort=False)
        table = groups.agg(
            problems=("problem_id", "nunique"),
            trajectories=("problem_id", "size"),
            pass_rate=("right", "mean"),
            response_tokens=("response_length", "mean"),
        )
        order = {name: i for i, name in enumerate((*self.policies, *BANDS, "none"))}
        table = table.reset_index().sort_values(["policy", "band"], key=lambda names: names.map(order))
        facts = {"trajectories": len(self), "problems": self.n_problems, "outcomes": self._outcomes()}
        note = "rollouts.show(problem) shows the responses to one; rollouts.frame is the table."
        return views().card("Rollouts", facts, ("pass rate over trajectories, mean length", table), note=note)

    def _outcomes(self) -> str:
        counts = self.frame.outcome.value_counts()
        return ", ".join(f"{name} {counts[name]:,}" for name in OUTCOMES if name in counts)

    def show(
        self, problem: str, *, policy: str | None = None, n: int = 8, checkpoint: Checkpoint | None = None
    ) -> None:
        """Display a problem and responses to it, successes above failures, in a notebook; print them in a terminal.

        Args:
            problem: its id.
            policy: only what this policy sampled.
            n: how many responses, as many successes as failures where there are.
            checkpoint: has its tokenizer split the text into tokens, special ones too.

        Raises:
            TsaeError: where nothing was sampled for it.
        """
        views().show_problem(self, problem, policy=policy, n=n, checkpoint=checkpoint)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The columns without a value a token, plus ``prompt_length`` and ``response_length`` in tokens, of responses
        those that the policy sampled."""
        kept = [name for name in self.table.column_names if name not in ("prompt_ids", "response_ids", parts.COLUMN)]
        frame = self.table.select(kept).to_pandas()
        return frame.assign(prompt_length=self.lengths("prompt_ids"), response_length=self.n_sampled)

    @property
    def policies(self) -> list[str]:
        """Policy ids in order of appearance."""
        return list(self.table["policy"].unique().to_pylist())

    @property
    def n_problems(self) -> int:
        return len(self.table["problem_id"].unique())

    def lengths(self, column: str) -> np.ndarray:
        """(n,) number of token ids of ``prompt_ids`` or ``response_ids``."""
        return list_lengths(self.table[column])

    def tokens(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """(prompt ids, response ids) of one trajectory, int32."""
        prompt, response = (self.table[name][row].values.to_numpy() for name in ("prompt_ids", "response_ids"))
        return prompt.copy(), response.copy()

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the trajectories: problem, policy and token ids, in order."""
        digest = hashlib.sha256()
        for name in ("problem_id", "policy"):
            for text in _joined(self.table[name], "\0", "\0".join):
                digest.update(text.encode("utf-8", "surrogatepass"))
        for name in ("prompt_ids", "response_ids"):
            column = self.table[name]
            digest.update(np.concatenate([[0], list_lengths(column).cumsum()]).astype(np.int32).tobytes())
            # Chunk by chunk: joined, they would be there twice.
            for chunk in column.chunks:
                values = chunk.flatten().to_numpy(zero_copy_only=False)
                digest.update(np.ascontiguousarray(values, np.int32).data)
        return digest.hexdigest()[:16]

    @cached_property
    def labels_fingerprint(self) -> str:
        """Hash of what the trajectories were labelled with, in order: outcome, reward, advantage and band; and the
        parts of responses, where any has them."""
        digest = hashlib.sha256()
        for name in ("outcome", "reward", "advantage", "band"):
            digest.update(b"[")
            for text in _joined(self.table[name], ", ", lambda values: json.dumps(values)[1:-1]):
                digest.update(text.encode())
            digest.update(b"]")
        digest.update(self.parts_fingerprint.encode())
        return digest.hexdigest()[:16]

    def select(self, rows: np.ndarray | Sequence[int] | Sequence[bool]) -> Rollouts:
        """The given rows (a boolean mask or positions), in order."""
        rows = np.asarray(rows)
        picked = np.flatnonzero(rows) if rows.dtype == bool else rows
        return Rollouts(self.table.take(pa.array(picked, pa.int64())), self.info, self.origin)

    def where(self, **columns: Any) -> Rollouts:
        """The rows whose columns have the given value, or one of the given values.

        Args:
            columns: a text, number, truth value or None for null; or several of them.

        Raises:
            TsaeError: where there is no such column, or no such row.
        """
        mask = np.ones(len(self), dtype=bool)
        for name, value in columns.items():
            if name not in self.table.column_names:
                raise TsaeError(
                    f"no column {name!r}; there are {', '.join(self.table.column_names)}", where=self.origin
                )
            wanted = set(several(value))
            mask &= np.array([v in wanted for v in self.table[name].to_pylist()])
        return self.select(mask)

    def with_column(self, name: str, values: Any) -> Rollouts:
        """A copy with one column set."""
        array, table = pa.array(values, type=_type_of(name), from_pandas=True), self.table
        if name in table.column_names:
            table = table.set_column(table.column_names.index(name), name, array)
        else:
            table = table.append_column(name, array)
        return Rollouts(table, self.info, self.origin)

    @staticmethod
    def concat(parts: Sequence[Rollouts]) -> Rollouts:
        """All parts after one another.

        Raises:
            TsaeError: where they were tokenised with different tokenizers.
        """
        prints = {part.info.get("tokenizer") for part in parts}
        if len(prints) > 1:
            raise TsaeError(
                f"rollouts tokenised with different tokenizers ({', '.join(map(str, sorted(prints, key=str)))})",
                where="Rollouts.concat",
                fix="Put together rollouts of models that share a tokenizer.",
            )
        tables = pa.concat_tables([part.table for part in parts], promote_options="default")
        return Rollouts(tables, parts[0].info, parts[0].origin)

    def with_bands(
        self,
        reference: Checkpoint | str | None,
        *,
        cutoffs: BandCutoffs | BandQuantiles | None = None,
        measured_on: Rollouts | None = None,
    ) -> Rollouts:
        """Put every problem into a band by a reference policy's pass rate; see `difficulty.with_bands`."""
        from tsae.rollouts.difficulty import with_bands

        id = reference if reference is None or isinstance(reference, str) else reference.id
        return with_bands(self, id, cutoffs=cutoffs, measured_on=measured_on)

    def with_advantages(self, kind: Literal["grpo", "dr_grpo", "rloo"] = "grpo") -> Rollouts:
        """Set group-relative advantages; see `advantages.group_advantages`."""
        from tsae.rollouts.advantages import with_advantages

        return with_advantages(self, kind)


def _is_log(path: Path) -> bool:
    """JSON lines are a log; so is Parquet that a trainer wrote."""
    if path.suffix != ".parquet":
        return True
    try:
        names = set(pq.read_schema(path).names)
    except (pa.ArrowException, OSError):
        return False
    return {"prompt", "completion"} <= names or bool({"generations", "pass_rate_generations"} & names)


def problem_bands(frame: pd.DataFrame) -> pd.Series:
    """The band of every problem, by problem_id; null where it has none.

    Trajectories of a problem that have a band have the same one; where bands were cross-fitted, half of them may have
    none (`tsae.rollouts.difficulty.find_bands`).
    """
    return frame.groupby("problem_id", sort=False).band.first()


def outcome_name(right: bool | None) -> str:
    """success, failure, or unknown for None."""
    return "unknown" if right is None else "success" if right else "failure"


def _type_of(name: str) -> pa.DataType | None:
    """Of a column that is known."""
    return parts.FIELD.type if name == parts.COLUMN else SCHEMA.field(name).type if name in SCHEMA.names else None


def _joined(column: pa.ChunkedArray, separator: str, join: Callable[[list[Any]], str]) -> Iterator[str]:
    """All values as one text, in parts: of Python's objects there are those of one chunk at a time."""
    before = ""
    for chunk in column.chunks:
        if len(chunk):
            yield before + join(chunk.to_pylist())
            before = separator


def _typed(table: pa.Table, where: str) -> pa.Table:
    """With the columns of `SCHEMA`, in their types, first."""
    missing = [name for name in _REQUIRED if name not in table.column_names]
    if missing:
        raise TsaeError(
            f"lacks the columns {', '.join(missing)}; it has {', '.join(table.column_names) or 'none'}",
            where=where,
            fix="Make the file with `tsae rollouts`, or import a log with `tsae rollouts import`.",
        )
    columns = {}
    for field in (*SCHEMA, parts.FIELD):
        if field.name in table.column_names:
            try:
                columns[field.name] = table[field.name].cast(field.type)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise TsaeError(
                    f"column {field.name} is {table[field.name].type}, expected {field.type} ({error})",
                    where=where,
                ) from error
        elif field.name in SCHEMA.names:
            columns[field.name] = pa.nulls(table.num_rows, field.type)
    columns |= {name: table[name] for name in table.column_names if name not in columns}
    return pa.table(columns, metadata=table.schema.metadata)


def _checked(table: pa.Table, where: str) -> pa.Table:
    if table.num_rows == 0:
        raise TsaeError("holds no trajectories", where=where, fix="Give at least one trajectory.")
    for name in _REQUIRED:
        if table[name].null_count:
            raise TsaeError(f"{table[name].null_count} rows have no {name}", where=where, fix="Fill or drop them.")
    for name, allowed in (("outcome", OUTCOMES), ("band", BANDS)):
        unknown = set(table[name].unique().to_pylist()) - {*allowed, None}
        if unknown:
            raise TsaeError(
                f"{name} {sorted(unknown)[0]!r} is none of {', '.join(allowed)}",
                where=where,
                fix=f"Correct {name}.",
            )
    for name in ("prompt_ids", "response_ids"):
        unknown_ids = sum(chunk.flatten().null_count for chunk in table[name].chunks)
        if unknown_ids:
            raise TsaeError(f"{name} holds {unknown_ids} null token ids", where=where, fix="Drop those trajectories.")
        empty = np.flatnonzero(list_lengths(table[name]) == 0)
        if len(empty):
            raise TsaeError(
                f"{len(empty)} trajectories have empty {name} (first: row {empty[0]})",
                where=where,
                fix="Drop them, or check the tokenizer that they were tokenised with.",
            )
    reward = table["reward"].to_numpy()
    bad = np.flatnonzero(~np.isfinite(reward) & ~np.asarray(table["reward"].is_null()))
    if len(bad):
        raise TsaeError(f"{len(bad)} rewards are not finite (first: row {bad[0]})", where=where, fix="Drop those rows.")
    parts.check_parts(table, where)
    return table
