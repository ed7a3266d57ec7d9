"""Tables of Markdown pages, which stand between two marker lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tsae.base.files import write_text
from tsae.errors import TsaeError


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rows))


def fill(page: Path, name: str, table: str) -> None:
    """Put a table between the lines `marks(name)` of a page, in place of what stands there.

    Raises:
        TsaeError: where the page has no such lines.
    """
    begins, ends = marks(name)
    before, opening, rest = (page.read_text(encoding="utf-8") if page.is_file() else "").partition(begins)
    _, closing, after = rest.partition(ends)
    if not opening or not closing:
        raise TsaeError(f"has no place for the table {name!r}", where=page, fix=f"Write the lines {begins} and {ends}.")
    write_text(page, f"{before}{opening}\n\n{table}\n{closing}{after}")


def marks(name: str) -> tuple[str, str]:
    """The lines around a table."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
