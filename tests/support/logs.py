"""The logs that are shipped with the tests, and how tests write and read their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from support.refusals import refuses
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.table import Rollouts

LOGS = Path(__file__).parents[1] / "logs"


TEMPLATE = (
    "{% for m in messages %}<bos>{{ '#' if m['role'] == 'user' else '*' }}{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>;{% endif %}"
)


def write(path: Path, *rows: Any) -> Path:
    """JSON lines; a text is a line as it stands."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def one_row_below(file: Path, folder: Path) -> None:
    """Write a Parquet file of TRL with every completion one row below its own."""
    table = pq.read_table(file)
    for name in ("completion", "completion_ids"):
        values = table[name].to_pylist()
        column = pa.array([values[-1], *values[:-1]], table.schema.field(name).type)
        table = table.set_column(table.column_names.index(name), name, column)
    pq.write_table(table, folder / file.name)


def read(path: Path, checkpoint: Any = None, **config: Any) -> Rollouts:
    return Rollouts.read(path, checkpoint, ImportConfig(**config))


def column(found: Rollouts, name: str) -> list[Any]:
    return list(found.table[name].to_pylist())


def holds(found: Rollouts, **columns: Any) -> None:
    """Assert what columns of a table hold; another column than a name can be is asserted by `column`."""
    assert {name: column(found, name) for name in columns} == columns


def notes(found: Rollouts) -> str:
    return "\n".join(found.info["log"]["notes"])


def broken(response: str, answer: str) -> bool:
    return 1 / int(answer) > 0


def short(response: str, answer: str) -> bool:
    return len(response) < 3


refused = refuses
