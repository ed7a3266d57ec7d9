"""The report: findings in words, figures, and one self-contained HTML file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tsae.errors import TsaeError

if TYPE_CHECKING:
    from tsae.diff.result import FeatureDiff


def write_report(diff: FeatureDiff, path: str | Path, *, title: str | None = None) -> Path:
    """Write one HTML file that opens with no network.

    Args:
        diff: with its `source` the report shows examples.
        path: the .html file; its folder is made.
        title: of the page.

    Raises:
        TsaeError: where the file cannot be written.
    """
    from tsae.report.pages.report import render

    return write_page(path, render(diff, title=title))


def write_page(path: str | Path, content: str) -> Path:
    """Write a page whole or not at all; its folder is made.

    Raises:
        TsaeError: where the path is a folder.
    """
    path = Path(path)
    if path.is_dir():
        raise TsaeError("is a folder", where=path, fix="Name the .html file to write.")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Lone surrogates are shown by code point long before this; whatever escaped that must not stop the report.
    partial = path.with_name(path.name + ".tmp")
    partial.write_bytes(content.encode("utf-8", "replace"))
    os.replace(partial, path)
    return path
