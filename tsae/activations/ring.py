"""The activations that a live training holds: portions of bounded size in all, of which the newest stay.

A portion is what one forward pass computes. Wherever it lies, and whenever it is computed, it has the same bits. So
a training does not depend on what is held.

`Ring` holds portions in memory, `RingOnDisk` in a folder of two files::

    index.jsonl       first line: what is held, of what; then a line for every portion put down or given up
    activations.bin   rows of d_model values in the stored precision

The size of activations.bin is reserved at the start, so that a full disk shows before anything is computed. A portion's
line follows its rows, and the line that gives it up comes before others take its rows. So after a kill at any moment,
every portion of the index is there; its checksum is compared when it is used again.

Processes of one machine under torchrun share the folder: each computes a share of the portions that are missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np

from tsae.activations.shards.shard import DTYPES, as_float32
from tsae.base.disk.sole_writer import sole_writer
from tsae.base.distributed import joined
from tsae.base.files import partial_name, replacing, writing
from tsae.base.torchrun import local_rank, local_world_size
from tsae.base.untrusted import parse_json
from tsae.errors import TsaeError

_AT_ONCE = 8192  # rows that are widened to float32 at once


class Ring:
    """Portions in memory.

    Args:
        n_rows: tokens that it holds at most.
        d_model: width.
        dtype: stored precision.

    Attributes:
        values: (n_rows, d_model) in the stored precision.
        norms: (n_rows,) float32 L2 norms.
    """

    values: np.ndarray

    def __init__(self, n_rows: int, d_model: int, dtype: str) -> None:
        self.n_rows, self.d_model, self.dtype = n_rows, d_model, dtype
        self.norms = np.zeros(n_rows, np.float32)
        # By portion; the one used longest ago comes first.
        self._rows: dict[int, np.ndarray] = {}
        self._open()

    def _open(self) -> None:
        self.values = np.empty((self.n_rows, self.d_model), DTYPES[self.dtype])

    def rows(self, portions: Iterable[int]) -> list[np.ndarray]:
        """The rows of each portion, all of which are held."""
        return [self._rows[portion] for portion in portions]

    def missing(self, sizes: Mapping[int, int]) -> dict[int, np.ndarray]:
        """Make room for portions; those that have to be put, each with its rows.

        Args:
            sizes: tokens of every portion that is needed; together at most n_rows.
        """
        found = {portion: self._rows.pop(portion) for portion in sizes if self._holds(portion)}
        wanted = [portion for portion in sizes if portion not in found]
        free = self.n_rows - sum(map(len, (*self._rows.values(), *found.values())))
        given_up = []
        while free < sum(sizes[portion] for portion in wanted):
            oldest = next(iter(self._rows))
            free += len(self._rows.pop(oldest))
            given_up.append(oldest)
        self._rows |= found
        self._give_up(given_up)
        taken = np.zeros(self.n_rows, dtype=bool)
        for rows in self._rows.values():
            taken[rows] = True
        ends = np.cumsum([sizes[portion] for portion in wanted])
        return dict(zip(wanted, np.split(np.flatnonzero(~taken), ends)[:-1] if wanted else (), strict=True))

    def mine(self, missing: Sequence[int]) -> list[int]:
        """Those that this process has to put."""
        return list(missing)

    def put(self, portion: int, rows: np.ndarray, values: np.ndarray) -> None:
        """Write (n, d_model) values in the stored precision to the rows that `missing` gave."""
        self.values[rows] = values
        self._is_there(portion, rows, values)

    def all_put(self, missing: Mapping[int, np.ndarray], portions: Iterable[int]) -> None:
        """End what `missing` began; `portions` are all that are needed, in the order in which they are used."""
        for portion in portions:
            self._rows[portion] = self._rows.pop(portion)

    def discard(self) -> None:
        """Forget everything, and remove what is on disk."""
        self._rows = {}

    def _holds(self, portion: int) -> bool:
        return portion in self._rows

    def _give_up(self, portions: Sequence[int]) -> None:
        """Called before the rows of these portions are given to others."""

    def _is_there(self, portion: int, rows: np.ndarray, values: np.ndarray) -> None:
        for low in range(0, len(rows), _AT_ONCE):
            wide = as_float32(values[low : low + _AT_ONCE], self.dtype)
            self.norms[rows[low : low + _AT_ONCE]] = np.sqrt(np.einsum("nd,nd->n", wide, wide))
        self._rows[portion] = rows


class RingOnDisk(Ring):
    """Portions in a folder; another training's are removed.

    Args:
        folder: for these files alone.
        identity: JSON of all that the portions' values depend on.
        n_rows, d_model, dtype: as of `Ring`.

    Raises:
        TsaeError: where the folder holds other files, another process uses it, or there is not enough room.
    """

    def __init__(self, folder: Path, identity: Any, n_rows: int, d_model: int, dtype: str) -> None:
        self.folder, self.index, self.file = folder, folder / "index.jsonl", folder / "activations.bin"
        text = json.dumps([identity, n_rows, d_model, dtype], sort_keys=True)
        self._first_line = {"cache of": hashlib.sha256(text.encode()).hexdigest()[:16]}
        self._held, self._processes = ExitStack(), joined()
        # Checksum of every portion that an earlier process has written.
        self._to_be_checked: dict[int, int] = {}
        super().__init__(n_rows, d_model, dtype)

    def _open(self) -> None:
        n_bytes = self.n_rows * self.d_model * np.dtype(DTYPES[self.dtype]).itemsize
        if local_rank() == 0:
            self._held.enter_context(sole_writer(self.folder))
            self._claim(n_bytes)
        self._processes.wait()
        self.values = np.memmap(self.file, DTYPES[self.dtype], mode="r", shape=(self.n_rows, self.d_model))
        for portion, (rows, checksum) in (_portions(self._lines(), self.n_rows) or {}).items():
            self._rows[portion], self._to_be_checked[portion] = rows, checksum

    def _claim(self, n_bytes: int) -> None:
        # The lock lies inside where nothing can be written beside the folder.
        making = (partial_name(self.index).name, f"{self.index.name}.tmp")  # the second: of an earlier version
        own = (self.index.name, self.file.name, *making, f".{self.folder.name}.lock")
        others = sorted(p.name for p in self.folder.glob("*") if p.name not in own)
        if others:
            raise TsaeError(
                f"holds other files ({', '.join(others[:3])})", where=self.folder, fix="Give the cache its own folder."
            )
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            lines = self._lines()
            known = lines[:1] == [self._first_line] and _portions(lines, self.n_rows) is not None
            known = known and self.file.is_file() and self.file.stat().st_size == n_bytes
            with replacing(self.index) as partial:  # without what a kill cut off
                kept = lines if known else [self._first_line]
                partial.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            if not known:
                self.file.unlink(missing_ok=True)
                with self.file.open("wb") as stream:
                    try:
                        _reserve(stream.fileno(), n_bytes)
                    except OSError:
                        self.file.unlink()
                        raise

    def _lines(self) -> list[dict[str, Any]]:
        """The whole lines of the index; none where it is another file."""
        text = self.index.read_text(encoding="utf-8", errors="replace") if self.index.is_file() else ""
        found = []
        for line in text.splitlines(keepends=True):
            try:
                content = parse_json(line if line.endswith("\n") else "")
            except ValueError:
                break
            found.append(content if isinstance(content, dict) else {})
        return found

    def _holds(self, portion: int) -> bool:
        if portion in self._to_be_checked:
            rows, expected = self._rows[portion], self._to_be_checked.pop(portion)
            values = np.asarray(self.values[rows])
            if _checksum(values) != expected:
                del self._rows[portion]
                return False
            super()._is_there(portion, rows, values)
        return super()._holds(portion)

    def _give_up(self, portions: Sequence[int]) -> None:
        for portion in portions:
            self._to_be_checked.pop(portion, None)
        # All have left the block before, and none writes before this is in the index.
        self._processes.wait()
        if portions and local_rank() == 0:
            self._note({"given up": list(portions)})
        self._processes.wait()

    def mine(self, missing: Sequence[int]) -> list[int]:
        return list(missing[local_rank() :: local_world_size()])

    def put(self, portion: int, rows: np.ndarray, values: np.ndarray) -> None:
        runs, low = [], 0
        with self._writing(), self.file.open("r+b", buffering=0) as stream:
            for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
                part = np.ascontiguousarray(values[low : low + len(run)]).data.cast("B")
                at, low = int(run[0]) * len(part) // len(run), low + len(run)
                while len(part):
                    n = os.pwrite(stream.fileno(), part, at)
                    part, at = part[n:], at + n
                runs.append([int(run[0]), len(run)])
        self._note({"portion": portion, "rows": runs, "crc32": _checksum(values)})
        self._is_there(portion, rows, values)

    def all_put(self, missing: Mapping[int, np.ndarray], portions: Iterable[int]) -> None:
        self._processes.wait()
        for portion, rows in missing.items():
            if not super()._holds(portion):  # another process has put it
                self._is_there(portion, rows, np.asarray(self.values[rows]))
        super().all_put(missing, portions)

    def discard(self) -> None:
        super().discard()
        self._processes.wait()
        self.values = np.empty((0, self.d_model), DTYPES[self.dtype])
        if local_rank() == 0:
            for path in (self.index, self.file):
                path.unlink(missing_ok=True)
            with suppress(OSError):  # somebody has put something there
                self.folder.rmdir()
        self._held.close()

    def _note(self, line: Mapping[str, Any]) -> None:
        with self._writing(), self.index.open("ab", buffering=0) as stream:
            stream.write((json.dumps(line) + "\n").encode())

    def _writing(self) -> Any:
        fix = "Make room there, lower cache_gb (--live.cache-gb), or name another folder (--live.cache)."
        return writing(self.folder, fix)


def _checksum(values: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(values).data)


def _portions(lines: Sequence[Mapping[str, Any]], n_rows: int) -> dict[int, tuple[np.ndarray, int]] | None:
    """By portion its rows and checksum, as the lines of an index say; None where they contradict each other."""
    found: dict[int, tuple[np.ndarray, int]] = {}
    try:
        for line in lines[1:]:
            for portion in line.get("given up", ()):
                found.pop(portion, None)
            if "portion" in line:
                whole = all(isinstance(number, int) for run in line["rows"] for number in run)
                if not whole or not all(0 <= low < low + n <= n_rows for low, n in line["rows"]):
                    return None
                runs = [np.arange(low, low + n, dtype=np.int64) for low, n in line["rows"]]
                found[line["portion"]] = np.concatenate(runs), line["crc32"]
    except (TypeError, ValueError, LookupError, AttributeError):
        return None
    every = np.concatenate([np.empty(0, np.int64), *(rows for rows, _ in found.values())])
    good = len(np.unique(every)) == len(every) and ((every >= 0) & (every < n_rows)).all()
    return found if good else None


def _reserve(descriptor: int, n_bytes: int) -> None:
    """Make a file of this size, whose bytes the disk has."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, n_bytes)
    else:
        os.truncate(descriptor, n_bytes)
