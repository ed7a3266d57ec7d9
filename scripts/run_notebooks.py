"""Execute notebooks from a clean kernel and store them with light outputs: text, tables, and figures as images.

    python scripts/run_notebooks.py notebooks/1_quickstart.ipynb

A live notebook holds Plotly's script (2 MB) and every figure's data. What is stored is a picture of each figure, drawn
by the Chromium at CHROMIUM, or the first on PATH, so that it is seen wherever notebooks are shown.
Bars and what depends on the hour are left out: the same results give the same file.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import tyro
from nbclient import NotebookClient
from plotly.offline import get_plotlyjs
from tyro.conf import Positional

import tsae

FIGURE = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"
WIDTH = 1040
"""Pixels."""
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)


@dataclass(frozen=True)
class Options:
    """Execute notebooks and store them with light outputs."""

    notebooks: Positional[tuple[Path, ...]]
    """The .ipynb files, which are overwritten."""
    parameters: dict[str, int] = field(default_factory=dict)
    """Other values for names that the cell tagged parameters sets."""
    to: Path | None = None
    """Folder to write to instead, which is then also the working directory."""
    timeout: int = 3600
    """Seconds for one cell."""


def main() -> None:
    options = tyro.cli(Options)
    for path in options.notebooks:
        notebook = nbformat.read(path, as_version=4)
        set_parameters(notebook, options.parameters)
        folder = options.to or path.parent
        folder.mkdir(parents=True, exist_ok=True)
        execute(notebook, folder, options.timeout)
        lighten(notebook)
        nbformat.write(notebook, folder / path.name)
        print(f"wrote {folder / path.name}: {(folder / path.name).stat().st_size / 1000:,.0f} kB")


def set_parameters(notebook: Any, values: dict[str, Any]) -> None:
    """Put other values into the cell tagged parameters; names that it does not set are left alone."""
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", ()):
            lines = cell.source.splitlines()
            for number, line in enumerate(lines):
                name = line.partition("=")[0].strip()
                if name in values:
                    lines[number] = f"{name} = {values[name]!r}"
            cell.source = "\n".join(lines)


def execute(notebook: Any, folder: Path, timeout: int) -> None:
    """Run all cells in a new kernel.

    Raises:
        nbclient.exceptions.CellExecutionError: where one fails.
    """
    NotebookClient(notebook, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()


def lighten(notebook: Any) -> None:
    """Figures become images; bars, widgets and times go."""
    figures = []
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        kept = []
        for output in cell.outputs:
            data = output.get("data", {})
            if WIDGET in data or (output.output_type == "stream" and output.name == "stderr"):
                continue
            if FIGURE in data:
                figures.append((output, data[FIGURE]))
            kept.append(output)
        cell.outputs = kept
    for output in (output for cell in notebook.cells for output in cell.get("outputs", ())):
        data, here = output.get("data", {}), str(Path(tsae.__file__).parents[1])
        # Where this machine has the package is nobody's concern.
        if "text" in output:
            output.text = output.text.replace(here, "…")
        if "text/html" in data:
            data.pop("text/plain", None)  # the same once more
            # Where notebooks are shown no script runs.
            data["text/html"] = re.sub(
                r"<script>.*?</script>", "", data["text/html"].replace(here, "…"), flags=re.DOTALL
            )
    notebook.metadata.pop("widgets", None)
    notebook.metadata["language_info"] = {"name": "python"}
    for (output, figure), image in zip(figures, pictures([figure for _, figure in figures]), strict=True):
        output.data = {"image/png": base64.b64encode(image).decode()}
        title = figure["layout"].get("title", {}).get("text", "Figure")
        output.data["text/plain"] = title.partition("</b>")[0].removeprefix("<b>")


def pictures(figures: list[Any]) -> list[bytes]:
    """PNG images of Plotly figures, drawn without a network."""
    if not figures:
        return []
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_context(offline=True, device_scale_factor=1).new_page()
        page.set_content("<div id='figure'></div>")
        page.add_script_tag(content=get_plotlyjs())
        found = []
        for figure in figures:
            height = int(figure["layout"].get("height", 450))
            url = page.evaluate(
                "async ([figure, width, height]) => Plotly.toImage(figure, {format: 'png', width, height, scale: 1.2})",
                [json.loads(json.dumps(figure)), WIDTH, height],
            )
            found.append(base64.b64decode(url.partition(",")[2]))
        browser.close()
    return found


if __name__ == "__main__":
    main()
