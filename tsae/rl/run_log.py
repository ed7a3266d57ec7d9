"""Run log: all that attribution needs of a training, written while it runs, by any loop.

    log = RunLog("runs/mine/tsae", settings)
    for step in …:
        generation = log.add(step, rows)                        # what was sampled, before it is trained on
        …
        log.update(step, [(generation, 0)], grad_norm=norm)     # after the optimiser's step

A folder holds

    settings.json                                     what was asked for
    generations/generation-000001-rank-0.parquet      a row a response, of one generation and one process
    updates.jsonl                                     a line an optimiser step: the micro-batches that it used

Files are whole or not there. A training that resumes after step N opens the log with `step=N`: what was written beyond
N is taken away, so that nothing counts twice. `tsae.rollouts.trainers.token_logs` reads it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tsae.base.files import append_line, as_path, need_no_link, reading, write_json, write_text
from tsae.errors import TsaeError, refuse
from tsae.rollouts.logs.entry import writable
from tsae.rollouts.parquet import write_table
from tsae.rollouts.schema import TRAINING
from tsae.rollouts.trainers.token_logs import TSAE

_FILE = re.compile(r"generation-(\d{6,})-rank-(\d+)\.parquet")
_IDS = pa.list_(pa.int32())
_COLUMNS = {
    **dict.fromkeys(("step", "generation", "rank"), pa.int64()),
    **{field.name: field.type for field in TRAINING},
    **dict.fromkeys(("prompt", "messages"), pa.string()),
    **dict.fromkeys(("prompt_ids", "response_ids"), _IDS),
    "response_mask": pa.list_(pa.float32()),
    **dict.fromkeys(("advantage", "reward"), pa.float64()),
    "token_advantages": pa.list_(pa.float32()),
    "truncated": pa.bool_(),
}
_OWN = ("step", "generation", "rank")
_NEEDED = ("prompt_ids", "response_ids", "advantage")
_A_TOKEN = ("response_mask", "token_advantages", "old_logprobs", "ref_logprobs", "sampler_logprobs")


class RunLog:
    """The log of one process of a training.

    Args:
        folder: of the log; a missing one is made.
        settings: of the training, for JSON.
        rank: number of the process. That of rank 0 opens the log first: it writes settings and updates.
        step: optimiser steps that are done, where a training resumes; what was logged beyond is removed.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any], *, rank: int = 0, step: int = 0) -> None:
        self.folder, self.rank = as_path(folder), rank
        if rank == 0:
            self._cut(step)
            write_json(self.folder / "settings.json", {**settings, "format": TSAE.files.title, "version": 1})
        self.generation = max((number for number, _ in self._files()), default=0)
        """Number of the last generation, from 1."""

    def add(self, step: int, rows: Sequence[Mapping[str, Any]]) -> int:
        """Write the responses of a generation; returns its number.

        Args:
            step: number of the first optimiser step that uses it, from 1.
            rows: of each response prompt_ids and response_ids (token ids as they were sampled), its advantage, and if
                known: prompt (a text) or messages, rewards (by the function's name), reward (their total), data (of
                the problem, by name: problem_id, answer, level, …), truncated, micro_batch (for each iteration over the
                generation, the number of the micro-batch that has the response; by default [0]); and with one value a
                response token old_logprobs, ref_logprobs, sampler_logprobs (nats), token_advantages, and response_mask
                (0 for tokens that the policy did not sample).

        Raises:
            TsaeError: for a row that lacks what is needed, and values that do not fit their column.
        """
        columns: dict[str, list[Any]] = {}
        for place, row in enumerate(rows):
            own = dict(zip(_OWN, (step, self.generation + 1, self.rank), strict=True))
            for name, value in (own | _checked(row, place)).items():
                columns.setdefault(name, [None] * len(rows))[place] = value
        try:
            types = {n: pa.float64() if n.startswith("reward/") else pa.string() for n in columns} | _COLUMNS
            table = pa.table({name: pa.array(v, types[name], from_pandas=True) for name, v in columns.items()})
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise TsaeError(f"a value does not fit its column ({error})", where="RunLog.add") from error
        self.generation += 1
        name = f"generation-{self.generation:06d}-rank-{self.rank}.parquet"
        write_table(self._generations / name, table.schema, [table], {"kind": TSAE.files.title})
        return self.generation

    def update(self, step: int, used: Sequence[tuple[int, int]], **facts: Any) -> None:
        """Note an optimiser step.

        Args:
            step: its number, from 1.
            used: the micro-batches that it used, in order: (generation, number of the micro-batch).
            facts: for JSON, such as grad_norm (before clipping) and learning_rate.
        """
        if self.rank == 0:
            line = json.dumps({"step": step, "used": used, **facts})
            append_line(self._updates, line, "Make room on the disk, and resume the training.")

    @property
    def _generations(self) -> Path:
        return self.folder / "generations"

    @property
    def _updates(self) -> Path:
        return self.folder / "updates.jsonl"

    def _files(self) -> Iterator[tuple[int, Path]]:
        """(generation, file), the last first."""
        found = [(m, file) for file in self._generations.glob("*") if (m := _FILE.fullmatch(file.name))]
        yield from sorted(((int(m[1]), file) for m, file in found), reverse=True)

    def _cut(self, step: int) -> None:
        """Remove what was written beyond a step; of a generation that was used in part, note what was used."""
        need_no_link(self._updates)
        lines = []
        if self._updates.is_file():
            for line in self._updates.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError):  # Half a line, of a training that was killed.
                    lines += [update] if (update := json.loads(line))["step"] <= step else []
            write_text(self._updates, "".join(f"{json.dumps(update)}\n" for update in lines))
        uses = Counter(generation for update in lines for generation, _ in update["used"])
        whole = 0
        for generation, file in self._files():
            if generation < whole:
                return
            with reading(file, "Remove it, or log into another folder."):
                table = pq.read_table(file)
                if beyond := table["step"][0].as_py() > step:
                    file.unlink()
            if beyond:
                continue
            planned = table["micro_batch"].to_pylist()
            n = 1 + max((part for parts in planned for part in parts), default=0)
            used = [[part for i, part in enumerate(parts) if i * n + part < uses[generation]] for parts in planned]
            if used == planned:
                whole = generation
                continue
            place = table.column_names.index("micro_batch")
            table = table.set_column(place, "micro_batch", pa.array(used, _COLUMNS["micro_batch"]))
            write_table(file, table.schema, [table], {"kind": TSAE.files.title})


def _checked(row: Mapping[str, Any], place: int) -> dict[str, Any]:
    """The columns of a row."""
    where = f"RunLog.add, row {place}"
    odd = min(row.keys() - _COLUMNS.keys() - {"rewards", "data"} | row.keys() & set(_OWN), default=None)
    lacks = next((name for name in _NEEDED if row.get(name) is None), None)
    fix = "Facts of the problem go into data."
    refuse(
        where,
        (odd is not None, f"has {odd!r}, which is not a column of the log", fix),
        (lacks, f"has no {lacks}", "Add it."),
    )
    row = {name: value for name, value in row.items() if value is not None}  # None is not known
    finite, n = np.isfinite(row["advantage"]), len(row["response_ids"])
    sizes = [(len(row[name]), name) for name in _A_TOKEN if name in row]
    refuse(
        where,
        (not finite, f"has the advantage {row['advantage']}, expected a finite number", None),
        *((size != n, f"has {size} {name} for {n} response_ids", "Give one a token.") for size, name in sizes),
    )
    found = {"micro_batch": [0]} | {name: value for name, value in row.items() if name in _COLUMNS}
    if "messages" in found:
        found["messages"] = _text(found["messages"])
    if isinstance(found.get("prompt"), str):
        found["prompt"] = writable(found["prompt"])
    found |= {writable(f"reward/{name}"): value for name, value in row.get("rewards", {}).items()}
    return found | {writable(f"data/{name}"): _text(value) for name, value in row.get("data", {}).items()}


def _text(value: Any) -> str | None:
    """A text as it is, and anything else as JSON; of what JSON cannot hold, such as an image, its type."""
    if value is None or isinstance(value, str):
        return None if value is None else str(writable(value))
    return str(writable(json.dumps(value, ensure_ascii=False, default=lambda other: type(other).__name__)))
