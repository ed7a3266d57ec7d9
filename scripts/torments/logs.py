"""Changed logs of trainers: one to three places, and the log is imported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import tsae
from torments import artefacts
from torments.stages import IMPORTS, LOGS, importing

_VALUES: tuple[Any, ...] = (
    None, "x", "", 1, -7, 0.5, True, [], {}, [[]], {"a": {"b": []}}, float("nan"), float("-inf"), 10**400, "\u0000",
    "\ud800", "<script>alert(1)</script>", "=1+1", "../../x", "\u202e\u001b[31m", [10**6], [-1], "9" * 100_000,
)  # fmt: skip


def change_log(folder: Path, rng: np.random.Generator) -> str:
    """Change a file of a log; gives what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    file = files[int(rng.integers(len(files)))]
    if file.suffix == ".parquet":
        return f"{_change_table(file, rng)} {file.name}"
    lines = file.read_bytes().split(b"\n")
    place = int(rng.integers(max(1, len(lines) - 1)))
    how = str(rng.choice(["value", "key", "cut", "twice", "order", "mark", "bytes", "null", "nested", "long", "deep"]))
    if how in ("value", "key", "long", "nested"):
        lines[place] = _change_line(lines[place], how, rng)
    elif how == "cut":
        lines[place] = lines[place][: int(rng.integers(len(lines[place]) + 1))]
    elif how == "twice":
        lines.insert(place, lines[place])
    elif how == "order":
        lines = [lines[i] for i in rng.permutation(len(lines))]
    elif how == "mark":
        lines[0] = b"\xef\xbb\xbf" + lines[0]
    elif how == "deep":
        lines[place] = b"[" * 100_000 + b"]" * 100_000
    else:
        at = int(rng.integers(len(lines[place]) + 1))
        lines[place] = lines[place][:at] + (b"\xff\xfe" if how == "bytes" else b"\x00") + lines[place][at:]
    file.write_bytes(b"\n".join(lines))
    return f"{how} in line {place + 1} of {file.name}"


def _change_line(line: bytes, how: str, rng: np.random.Generator) -> bytes:
    """Exchange, remove or stretch something in an object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # changed before
        return line
    inside: Any = row
    found: list[tuple[Any, Any]] = []
    while isinstance(inside, (dict, list)) and inside and (not found or rng.random() < 0.6):
        keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        found.append((inside, keys[int(rng.integers(len(keys)))]))
        inside = inside[found[-1][1]]
    if not found:
        return line
    holder, key = found[-1]
    if how == "key":
        del holder[key]
    elif how == "long":
        holder[key] = "7" * 10_000_000
    elif how == "nested":
        holder[key] = {"messages": [{"role": "user", "content": [{"type": "text", "text": json.loads(line)}]}]}
    else:
        holder[key] = _VALUES[int(rng.integers(len(_VALUES)))]
    return json.dumps(row).encode()


def _change_table(file: Path, rng: np.random.Generator) -> str:
    """Change a column of a Parquet file."""
    try:
        table = pq.read_table(file)
    except (OSError, pa.ArrowException):  # changed before
        return "nothing else in"
    name = str(rng.choice(table.column_names))
    index, n = table.column_names.index(name), table.num_rows
    how = str(rng.choice(["drop", "nulls", "text", "numbers", "lists", "objects", "flip"]))
    columns = {
        "nulls": pa.nulls(n), "text": pa.array(["\u202e<b>"] * n), "numbers": pa.array([float("nan")] * n),
        "lists": pa.array([[10**6]] * n), "objects": pa.array([{"a": [None]}] * n),
    }  # fmt: skip
    if how == "flip":
        whole = bytearray(file.read_bytes())
        whole[int(rng.integers(len(whole)))] ^= 255
        file.write_bytes(whole)
    else:
        table = table.remove_column(index)
        pq.write_table(table if how == "drop" else table.add_column(index, name, columns[how]), file)
    return f"{how} {name} of"


def attempt(rng: np.random.Generator, made: Path, here: Path) -> tuple[str, str]:
    """(what was done, what is bad of what follows: nothing where the case is good)."""
    name = str(rng.choice(list(IMPORTS)))
    log = shutil.copytree(LOGS / name, here / name)
    what = f"{name}: " + ", ".join(change_log(log, rng) for _ in range(rng.integers(1, 4)))
    (here / "out").mkdir()
    to = here / "out" / "rollouts.parquet"
    ended, wrong = artefacts.watched(importing(name, to, IMPORTS[name], log, made / "chat"), here)
    if wrong or ended is None or ended.returncode:
        return what, wrong
    try:
        rollouts = tsae.Rollouts.read(to)
    except tsae.TsaeError as error:
        return what, f"gives what cannot be read: {error}"
    for column in ("prompt_ids", "response_ids"):
        ids = rollouts.table[column].combine_chunks().flatten().to_numpy()
        if len(ids) and not 0 <= ids.min() <= ids.max() < 20:
            return what, f"gives {column} outside of the vocabulary"
    return what, ""
