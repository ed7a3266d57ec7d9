"""scripts/llm_bands.py: the page of the shipped records."""

from __future__ import annotations

import json
import re
from pathlib import Path

import llm_bands
import pytest


def test_the_shipped_page_is_made_in_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llm_bands.main(["--out", str(tmp_path)])
    assert "Computed on" in capsys.readouterr().out
    page = (tmp_path / "page.html").read_text()
    results = json.loads((llm_bands.STORED / "results.json").read_text())
    assert all(one["title"] in page and one["verdict"] in page for one in results["claims"].values())
    assert "http" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert "<script src" not in page


def test_the_table_of_accuracies_is_that_of_the_records() -> None:
    found, results = (json.loads((llm_bands.STORED / f"{name}.json").read_text()) for name in ("records", "results"))
    assert len(results["table"]) == 3 * len(found["measured"])
    for row in results["table"]:
        band = row["problems"].partition(" ")[0]
        values = llm_bands.right(found, row["policy"], band).values()
        assert row["problems"] == f"{band} ({len(values)})"
        assert float(row["accuracy"].partition(" ")[0]) == pytest.approx(sum(values) / len(values), abs=0.00501)
