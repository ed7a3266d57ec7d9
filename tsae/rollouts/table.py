"""The Rollouts table: one row a trajectory. Parquet on disk, Arrow in memory, token ids authoritative.

A row's position is its id: activation stores and feature tables refer to trajectories by it, and carry a copy of their
table. The tokens and texts of a table that was read take no memory: they stay in a mapped file
(`tsae.rollouts.parquet`).

A table of Python (a DataFrame, a table of Arrow or polars, a data set of Hugging Face, columns, rows) becomes one
Parquet file, which is read as any other log. Errors name the user's own columns, rows and labels.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NoReturn
from uuid import UUID

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tsae.base import display
from tsae.base.filters import need_names, several
from tsae.base.mirror import is_url, local, published, url_of
from tsae.base.table_export import Tables
from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.series import CheckpointSeries
from tsae.checkpoints.tokenizers import joined_facts
from tsae.errors import TsaeError
from tsae.rollouts.band_source import asked_problems, bands_from, read_source
from tsae.rollouts.bands import BAND_COLUMNS, Bands, bands_info, bands_label, find_bands, kind_of_bands
from tsae.rollouts.config import BandCutoffs, BandQuantiles, BandsBy, BandSource, ImportConfig
from tsae.rollouts.importing import import_log
from tsae.rollouts.parquet import list_lengths, mapped, read_info, read_pieces, row_groups, write_table
from tsae.rollouts.problems import Problem
from tsae.rollouts.rewards import group_advantages, group_names
from tsae.rollouts.schema import BANDS, OUTCOMES, by_row, check_same_problems, checked, type_of, typed
from tsae.rollouts.token_parts import COLUMN, TokenParts


class Rollouts(TokenParts, Tables):
    """A table of trajectories.

    Args:
        table: has at least the required columns of `tsae.rollouts.schema.SCHEMA`; others are kept.
        info: what the token ids and bands mean: ``tokenizer`` and ``vocabulary``
                (`tsae.checkpoints.tokenizers`), ``bands`` (reference and cut-offs), ….
        where: named in error messages.

    Raises:
        TsaeError: for missing columns, unknown outcomes or bands, empty or null token ids, or NaN rewards.
    """

    def __init__(self, table: pa.Table, info: Mapping[str, Any] | None = None, where: str = "rollouts") -> None:
        self.origin = where
        """The file that the table comes from; named in error messages."""
        self.table = checked(table, where)
        self.info: dict[str, Any] = dict(info or {})

    @classmethod
    def from_records(cls, records: Sequence[Mapping[str, Any]], info: Mapping[str, Any] | None = None) -> Rollouts:
        """Make a table from one mapping a trajectory; missing columns of the schema become null."""
        names = dict.fromkeys(name for record in records for name in record)
        arrays = {name: pa.array([record.get(name) for record in records], type=type_of(name)) for name in names}
        return cls(pa.table(arrays), info)

    @classmethod
    def read(
        cls,
        path: str | Path | Any,
        checkpoint: Checkpoint | CheckpointSeries | str | Path | None = None,
        config: ImportConfig | None = None,
        *,
        origin: str | None = None,
    ) -> Rollouts:
        """Read a Parquet file that `write` wrote, or a trainer's log.

        Args:
            path: the file; or a log, which is a folder or a file (``tsae rollouts formats`` lists what is read); or
                a table of Python, which is read as a plain log: a DataFrame of pandas or polars, a pyarrow.Table, a
                datasets.Dataset, a dict of columns, or dicts of rows (a list, a generator), with columns prompt and
                response (texts, or messages as the prompt), or prompt_ids and response_ids (lists or tensors of token
                ids; with a response_mask for several turns), and if known reward, correct, step, policy, problem_id,
                answer, advantage, finish_reason and level; `ImportConfig.columns` gives them other names. Named levels
                of an index are columns too. Padding is left out where attention_mask, prompt_mask or completion_mask
                have 0, or else as in any log. Errors name the row, counted from 0, and its index label.
            checkpoint: for logs; see `tsae.rollouts.importing.import_log`.
            config: how a log is read; with it, a Parquet file is a log. ``info["log"]`` then says what was assumed and
                left out.
            origin: what error messages call it; by default its path.

        Raises:
            TsaeError: for files that are neither, and for what is wrong in them.
        """
        if not isinstance(path, str | os.PathLike):
            return cls._of_table(path, checkpoint, replace(config or ImportConfig(), format="plain"))
        given = os.fspath(path)
        path = local(given)
        where = origin or (url_of(given) if is_url(given) else str(path))
        if config is not None or path.is_dir() or (path.is_file() and _is_log(path)):
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "rollouts.parquet"
                for note in import_log(path, file, checkpoint, config, progress=False).odd:
                    warnings.warn(note, stacklevel=_users_level())
                return cls.read(file, origin=str(path))
        if not path.is_file():
            raise TsaeError("no such rollouts file", where=path, fix="Make one with `tsae rollouts sample`.")
        table = mapped(typed(piece, where) for piece in read_pieces(path))
        return cls(table, read_info(table, where), where)

    @classmethod
    def _of_table(
        cls, given: Any, checkpoint: Checkpoint | CheckpointSeries | str | Path | None, config: ImportConfig
    ) -> Rollouts:
        names = {*asdict(config.columns).values(), *config.rewards, *config.keep_columns}
        with tempfile.TemporaryDirectory() as folder:
            # The run is named after the folder of a log, where it has no other name.
            file = Path(folder) / "frame" / "frame.parquet"
            file.parent.mkdir()
            table = PythonTable(given, names, file)
            try:
                found = cls.read(file, checkpoint, config)
            except TsaeError as error:
                raise TsaeError(table.named(error.what), where=table.named(str(error.where)), fix=error.fix) from None
        found.info, found.origin = json.loads(table.named(json.dumps(found.info))), NAME
        return found

    @classmethod
    def read_rows(cls, path: str | Path, rows: np.ndarray) -> Rollouts:
        """Read some rows, (n,) bool, of a file that `write` wrote."""
        file = local(path)

        def wanted() -> Iterator[pa.Table]:
            start = 0
            for piece in read_pieces(file):
                end = start + piece.num_rows
                yield typed(piece.take(pa.array(np.flatnonzero(rows[start:end]))), str(file))
                start = end

        table = mapped(wanted())
        return cls(table, read_info(table, file), str(file))

    def write(self, path: str | Path) -> Path:
        """Write one Parquet file, whole or not at all; the same table gives the same bytes."""
        lengths = self.lengths("prompt_ids") + self.lengths("response_ids")
        file = local(path, fetch=False)
        write_table(file, self.table.schema, row_groups(self.table, lengths), self.info)
        if is_url(path):
            published(file)
        return file

    def _tables(self) -> dict[str, pd.DataFrame | pa.Table]:
        return {"rollouts": self.table}

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __repr__(self) -> str:
        policies = ", ".join(self.policies[:4]) + (", …" if len(self.policies) > 4 else "")
        return f"Rollouts({len(self):,} trajectories of {self.n_problems:,} problems; policies: {policies})"

    def __str__(self) -> str:
        return f"{self!r}\n{self._summary().round(2).to_string(index=False)}"

    def _summary(self) -> pd.DataFrame:
        """Problems, trajectories, pass rates and lengths by policy and band."""
        frame = self.frame.assign(
            band=self.frame.band.fillna("none"),
            right=(self.frame.outcome == "success").where(self.frame.outcome != "unknown").astype(float),
        )
        table = frame.groupby(["policy", "band"], sort=False).agg(
            problems=("problem_id", "nunique"),
            trajectories=("problem_id", "size"),
            pass_rate=("right", "mean"),
            response_tokens=("response_length", "mean"),
        )
        order = {name: i for i, name in enumerate((*self.policies, *BANDS, "none"))}
        return table.reset_index().sort_values(["policy", "band"], key=lambda names: names.map(order))

    def _repr_html_(self) -> str:
        frame, table = self.frame, self._summary()
        counts = frame.outcome.value_counts()
        outcomes = ", ".join(f"{name} {counts[name]:,}" for name in OUTCOMES if name in counts)
        facts = {"trajectories": len(self), "problems": self.n_problems, "outcomes": outcomes}
        facts |= {"bands": label} if (label := bands_label(self.info.get("bands"))) else {}
        note = "rollouts.show(problem) shows the responses to one; rollouts.frame is the table."
        return display.card("Rollouts", facts, ("pass rate over trajectories, mean length", table), note=note)

    def show(
        self, problem: str, *, policy: str | None = None, n: int = 8, checkpoint: Checkpoint | None = None
    ) -> None:
        """Display a problem and responses to it, successes above failures, in a notebook; print them in a terminal.

        Args:
            problem: its id.
            policy: only what this policy sampled.
            n: how many responses, as many successes as failures if possible.
            checkpoint: its tokenizer splits the text into tokens, special ones too.

        Raises:
            TsaeError: where nothing was sampled for it.
        """
        display.show_problem(self, problem, policy=policy, n=n, checkpoint=checkpoint)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The columns without a value a token, plus ``prompt_length`` and ``response_length`` in tokens; of responses,
        only sampled tokens count."""
        left = {"prompt_ids", "response_ids", COLUMN, "old_logprobs", "ref_logprobs", "sampler_logprobs"}
        kept = [name for name in self.table.column_names if name not in left]
        frame = self.table.select(kept).to_pandas()
        return frame.assign(prompt_length=self.lengths("prompt_ids"), response_length=self.n_sampled)

    @property
    def policies(self) -> list[str]:
        """Policy ids in order of appearance."""
        return list(self.table["policy"].unique().to_pylist())

    @property
    def n_problems(self) -> int:
        return len(self.table["problem_id"].unique())

    def problems(self) -> list[Problem]:
        """The problems, each once, with the ids of the prompt that its first trajectory has."""
        first = np.flatnonzero(~self.frame.problem_id.duplicated())
        names = ["problem_id", "prompt", "answer", "level", "prompt_ids"]
        return [
            Problem(row["problem_id"], row["prompt"] or "", row["answer"] or "", row["level"], tuple(row["prompt_ids"]))
            for row in self.table.select(names).take(first).to_pylist()
        ]

    def token_ids(self) -> list[int]:
        """Every token id that occurs, in order."""
        chunks = [chunk for name in ("prompt_ids", "response_ids") for chunk in self.table[name].chunks]
        held = [np.unique(chunk.flatten().to_numpy(zero_copy_only=False)) for chunk in chunks]
        return [int(id) for id in np.unique(np.concatenate(held))] if held else []

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
            # Chunk by chunk: joined, they would be in memory twice.
            for chunk in column.chunks:
                values = chunk.flatten().to_numpy(zero_copy_only=False)
                digest.update(np.ascontiguousarray(values, np.int32).data)
        return digest.hexdigest()[:16]

    @cached_property
    def labels_fingerprint(self) -> str:
        """Hash of the labels of the trajectories, in order: outcome, reward, advantage, band, and token parts."""
        digest = hashlib.sha256()
        beside = [name for name in self.table.column_names if name.startswith("band/")]
        for name in ("outcome", "reward", "advantage", "band", *sorted(beside)):
            digest.update(b"[")
            for text in _joined(self.table[name], ", ", lambda values: json.dumps(values)[1:-1]):
                digest.update(text.encode())
            digest.update(b"]")
        digest.update(self.parts_fingerprint.encode())
        return digest.hexdigest()[:16]

    def select(self, rows: np.ndarray | Sequence[int] | Sequence[bool]) -> Rollouts:
        """The given rows (a boolean mask or positions), in order.

        Raises:
            TsaeError: where there is no such row, or the mask has another length.
        """
        mask, n = np.asarray(rows).dtype == bool, len(self)
        picked = np.flatnonzero(by_row(rows, n, self.origin)) if mask else np.asarray(rows)
        if len(wrong := picked[(picked < 0) | (picked >= n)]):
            raise TsaeError(f"has no row {wrong[0]}", where=self.origin, fix=f"Give rows from 0 to {n - 1}.")
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
                what = f"no column {name!r}; there are {', '.join(self.table.column_names)}"
                raise TsaeError(what, where=self.origin)
            wanted, held = set(several(value)), self.table[name].to_pylist()
            if wanted.isdisjoint(held):
                need_names(name, wanted, list(dict.fromkeys(held))[:12], self.origin)
            mask &= np.array([v in wanted for v in held])
        return self.select(mask)

    def with_column(self, name: str, values: Any) -> Rollouts:
        """A copy with one column set; a Series is aligned by its index, the numbers of the rows."""
        values = by_row(values, len(self), self.origin)
        array, table = pa.array(values, type=type_of(name), from_pandas=True), self.table
        if name in table.column_names:
            table = table.set_column(table.column_names.index(name), name, array)
        else:
            table = table.append_column(name, array)
        return Rollouts(table, self.info, self.origin)

    @staticmethod
    def concat(tables: Sequence[Rollouts]) -> Rollouts:
        """All tables after one another.

        The info is the first one's, with the tokens that another one's tokenizer adds. What bands were measured on is
        not known where the tables do not agree on it.

        Raises:
            TsaeError: for no tables, tables tokenised with different tokenizers, columns of different types, and ids
                that are of different problems.
        """
        if not tables:
            raise TsaeError("gets no rollouts", where="Rollouts.concat", fix="Give at least one table.")
        facts = joined_facts([rollouts.info for rollouts in tables])
        if facts is None:
            prints = sorted({str(rollouts.info.get("tokenizer")) for rollouts in tables})
            what = f"rollouts tokenised with different tokenizers ({', '.join(prints)})"
            fix = "Put together rollouts of models that share a tokenizer."
            raise TsaeError(what, where="Rollouts.concat", fix=fix)
        check_same_problems([(rollouts.table, rollouts.origin) for rollouts in tables])
        try:
            together = pa.concat_tables([rollouts.table for rollouts in tables], promote_options="default")
        except pa.ArrowTypeError as error:
            what = f"a column has several types ({error})"
            raise TsaeError(what, where="Rollouts.concat", fix="Make it of one type (with_column).") from error
        info, bands = {**tables[0].info, **facts}, [rollouts.info.get("bands") for rollouts in tables]
        if any(found != bands[0] for found in bands):
            info.pop("bands", None)
            info.pop("bands_beside", None)
        return Rollouts(together, info, tables[0].origin)

    def with_bands(
        self,
        reference: Checkpoint | str | None,
        *,
        cutoffs: BandCutoffs | BandQuantiles | None = None,
        measured_on: Rollouts | None = None,
    ) -> Rollouts:
        """Put every problem into a band by a reference policy's pass rate.

        A problem that is called hard for its few successes does better in the next sample by chance alone. So a
        trajectory's band comes from the pass rate of separate rollouts (`measured_on`), or of the other half of these
        (`tsae.rollouts.bands.find_bands`).

        Args:
            reference: the policy whose pass rate counts; None pools all policies.
            cutoffs: pass rates, by default easy >= .75, hard <= .25; or shares of the problems that are measured.
            measured_on: separate rollouts of the same problems.

        Returns:
            a copy with the columns band, pass_rate, pass_rate_low and pass_rate_high.

        Raises:
            TsaeError: where a problem was not measured, a band is empty, both are the same rollouts, or their ids are
                of different problems.
        """
        id = reference.id if isinstance(reference, Checkpoint) else reference
        other = None if measured_on is None else measured_on.frame
        if measured_on is not None and measured_on.fingerprint == self.fingerprint:
            raise TsaeError(
                "holds the very rollouts that are put into bands, so that chance would make hard problems look easier",
                where=measured_on.origin,
                fix="Leave it out (--measured-on): each half is then measured on the other.",
            )
        if measured_on is not None:
            check_same_problems([(self.table, self.origin), (measured_on.table, measured_on.origin)])
        found = find_bands(self.frame, self.origin, id, cutoffs, other)
        found.check()
        return self.in_bands(found)

    def with_source(self, source: BandSource, cutoffs: BandCutoffs | BandQuantiles | None = None) -> Rollouts:
        """Put every problem into a band by what another model or the data set says of it.

        Bands of another kind that are there already are kept beside; `by` gives them back.

        Args:
            source: the file and its columns.
            cutoffs: of pass rates; by default the usual ones, or thirds where these leave a band almost empty.

        Raises:
            TsaeError: where the source knows none of the problems, says two things of one, or has levels without order.
        """
        found, known = self, read_source(source)
        problems = asked_problems([self.table], source, known)
        for bands, _ in reversed(bands_from(source, known, self.frame.problem_id, problems, self.origin, cutoffs)):
            found = found.in_bands(bands)
        return found

    def by(self, kind: BandsBy) -> Rollouts:
        """A copy whose bands are those of a kind that is kept beside; itself for "auto".

        Args:
            kind: own (the policies' own pass rates), difficulty (another model's) or level (the data set's).

        Raises:
            TsaeError: where there are none of this kind.
        """
        beside = self.info.get("bands_beside") or {}
        if kind == "auto" or (kind == kind_of_bands(self.info.get("bands")) and self.frame.band.notna().any()):
            return self
        names = [f"{column}/{kind}" for column in BAND_COLUMNS]
        if kind not in beside or not set(names) <= set(self.table.column_names):
            what = (
                f"no bands by {kind}; there are those by {', '.join([kind_of_bands(self.info.get('bands')), *beside])}"
            )
            raise TsaeError(what, where=self.origin, fix="Add them (tsae rollouts bands --difficulty, --bands-column).")
        rows = self.frame[["problem_id", *names]].set_axis(["problem_id", *BAND_COLUMNS], axis=1)
        return self.in_bands(Bands(rows, bands_info({"bands": beside[kind]}, self.origin) or {}, self.origin))

    def in_bands(self, bands: Bands) -> Rollouts:
        """A copy with the bands that were found for these very trajectories, and their pass rates.

        Bands of another kind are kept beside, in columns such as ``band/own``.
        """
        found, kind, held = self, kind_of_bands(bands.info), kind_of_bands(self.info.get("bands"))
        beside = {name: info for name, info in (self.info.get("bands_beside") or {}).items() if name != kind}
        if held != kind and self.frame.band.notna().any():
            beside[held] = self.info.get("bands")
            for column in BAND_COLUMNS:
                there = self.frame[column] if column in self.frame else pd.Series(np.nan, index=self.frame.index)
                found = found.with_column(f"{column}/{held}", there.to_numpy())
        for column in BAND_COLUMNS:
            found = found.with_column(column, bands.rows[column].to_numpy())
        gone = [name for name in found.table.column_names if name in {f"{column}/{kind}" for column in BAND_COLUMNS}]
        info = {name: value for name, value in self.info.items() if name != "bands_beside"}
        info |= {"bands": bands.info, **({"bands_beside": beside} if beside else {})}
        return Rollouts(found.table.drop_columns(gone), info, self.origin)

    def with_advantages(self, kind: Literal["grpo", "dr_grpo", "rloo"] = "grpo") -> Rollouts:
        """Set group-relative advantages; see `tsae.rollouts.rewards.group_advantages`.

        Raises:
            TsaeError: where a reward is missing.
        """
        rewards = self.table["reward"]
        if rewards.null_count:
            what = f"{rewards.null_count} trajectories have no reward"
            raise TsaeError(what, where=self.origin, fix="Fill rewards, or drop the rows.")
        return self.with_column("advantage", group_advantages(rewards.to_numpy(), group_names(self.frame), kind))


def _users_level() -> int:
    """How many calls above its caller the user's own line is."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__package__", "").partition(".")[0] == "tsae":
        level, frame = level + 1, frame.f_back
    return level


def _is_log(path: Path) -> bool:
    """JSON lines are a log; so is Parquet that a trainer wrote."""
    if path.suffix != ".parquet":
        return True
    try:
        names = set(pq.read_schema(path).names)
    except (pa.ArrowException, OSError, ValueError):
        return False
    known = {"prompt", "completion"} <= names or {"generation", "rank"} <= names
    return known or bool({"generations", "pass_rate_generations"} & names)


def _joined(column: pa.ChunkedArray, separator: str, join: Callable[[list[Any]], str]) -> Iterator[str]:
    """All values as one text, in pieces, so that Python's objects exist for one chunk at a time."""
    before = ""
    for chunk in column.chunks:
        if len(chunk):
            yield before + join(chunk.to_pylist())
            before = separator


NAME = "the table"
_GIVE = (
    "Give a DataFrame (pandas, polars), a pyarrow.Table, a datasets.Dataset, a dict of columns, or dicts of rows; "
    "Rollouts.read takes the path of a file."
)
_FAILS = (pa.ArrowException, TypeError, ValueError, OverflowError)


def _refuse(what: str, fix: str = _GIVE, where: str = NAME, cause: Exception | None = None) -> NoReturn:
    raise TsaeError(what, where=where, fix=fix) from cause


class PythonTable:
    """A table, as a file of a log.

    Args:
        given: the table, a trajectory a row.
        needed: names of the columns that are read; others are dropped where Arrow cannot hold them.
        file: to write.

    Raises:
        TsaeError: for what is not a table, and for columns of several types or lengths.
    """

    def __init__(self, given: Any, needed: Iterable[str], file: Path) -> None:
        self.file = file
        self._labels: Sequence[Any] | None = None
        """Index labels of the rows, if they have any but their numbers."""
        arrays, needed = [], set(needed)
        for name, values in self._columns(given):
            try:
                arrays.append((name, _array(values)))
            except _FAILS as error:
                if name in needed:
                    kinds = [None if value is None else type(value) for value in values]
                    first = next(filter(None, kinds), None)
                    row = next((i for i, kind in enumerate(kinds) if kind not in (first, None)), 0)
                    what = f"column {name!r} cannot be read ({error})"
                    fix = "Give texts, numbers, flags or lists of them."
                    _refuse(what, fix, self.named(f"{file}: row {row}"), error)
        try:
            pq.write_table(pa.Table.from_arrays([array for _, array in arrays], [name for name, _ in arrays]), file)
        except _FAILS as error:
            _refuse(f"has columns that do not fit together ({error})", cause=error)

    def named(self, text: str) -> str:
        """A text with the rows of the table in place of those of the file."""

        def row(found: re.Match[str]) -> str:
            label = "" if self._labels is None else f" (index {self._labels[int(found[1])]!r})"
            return f"{NAME}: row {found[1]}{label}"

        return re.sub(rf"{re.escape(str(self.file))}: row (\d+)", row, text).replace(str(self.file), NAME)

    def _columns(self, given: Any) -> list[tuple[str, Any]]:
        """(name, values) of every column, index levels with a name among them."""
        if isinstance(given, Mapping) and given and all(hasattr(part, "column_names") for part in given.values()):
            if len(given) > 1:  # a DatasetDict
                what, first = f"has the splits {', '.join(map(str, given))}", next(iter(given))
                _refuse(what, f"Give one of them, such as data[{first!r}].")
            (given,) = given.values()
        if isinstance(given, pd.DataFrame):
            if not given.index.equals(pd.RangeIndex(len(given))):
                self._labels = given.index
            levels = [name for name in given.index.names if name is not None]
            for name in levels:
                if name in given and not given.index.get_level_values(name).equals(pd.Index(given[name])):
                    what = f"has a column and an index level {name!r} that differ"
                    _refuse(what, "Rename or drop one of them.")
            own = [(str(name), given.iloc[:, i]) for i, name in enumerate(given)]
            return own + [(str(n), pd.Series(given.index.get_level_values(n))) for n in levels if n not in given]
        if hasattr(given, "with_format") and hasattr(given, "__len__"):  # datasets
            given = given.with_format("arrow")[:]
        elif not hasattr(given, "__arrow_c_stream__") and hasattr(given, "to_arrow"):
            given = given.to_arrow()
        if hasattr(given, "__arrow_c_stream__") or hasattr(given, "__arrow_c_array__"):
            try:
                table = pa.table(given)
            except pa.ArrowInvalid as error:  # a Series
                _refuse(f"is of type {type(given).__name__}, not a table", cause=error)
            return list(zip(table.column_names, table.columns, strict=True))
        if isinstance(given, Mapping) and all(hasattr(v, "__len__") and not isinstance(v, str) for v in given.values()):
            return [(str(name), values) for name, values in given.items()]
        rows = list(given) if isinstance(given, Iterable) and not isinstance(given, (str, bytes, Mapping)) else [given]
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping) or row is given:
                what = f"is of type {type(row).__name__}, expected a row as a dict, or a table"
                _refuse(what, where=self.named(f"{self.file}: row {number}"))
        return [(str(name), [row.get(name) for row in rows]) for name in dict.fromkeys(n for row in rows for n in row)]


def _array(values: Any) -> pa.Array | pa.ChunkedArray:
    """A column as Arrow has it: tensors as lists, ids of any kind as texts."""
    if isinstance(values, pd.Series) and isinstance(values.dtype, pd.SparseDtype):
        values = values.sparse.to_dense()
    if getattr(values, "ndim", 1) > 1:
        values = values.tolist()
    try:
        found = values if isinstance(values, pa.ChunkedArray) else pa.array(values, from_pandas=True)
    except _FAILS:
        found = pa.array([_plain(value) for value in values], from_pandas=True)
    if pa.types.is_decimal(found.type) or isinstance(found.type, pa.BaseExtensionType):
        found = pa.array([_plain(value) for value in found.to_pylist()])
    if pa.types.is_list(found.type) and pa.types.is_floating(found.type.value_type):
        with suppress(pa.ArrowInvalid):  # whole numbers alone are token ids
            found = found.cast(pa.list_(pa.int64()))
    schema = pa.schema([("column", found.type)])
    pq.ParquetWriter(pa.BufferOutputStream(), schema).close()  # refuses a struct of nothing
    return found


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, (UUID, Decimal)):
        return str(value) if isinstance(value, UUID) else float(value)
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, np.generic) else value
