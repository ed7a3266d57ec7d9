"""The build script on its smallest setting, and the shipped series."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
from organism.pages import marks

from tsae.testbed import VOCABULARY, generate_problems, series_path, verify

SCRIPT = Path(__file__).parents[2] / "scripts" / "build_testbed.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return importlib.import_module("build_testbed")


@pytest.fixture(scope="module")
def built(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("trl")
    out = tmp_path_factory.mktemp("series")
    assert script.main(["--out", str(out), "--quick"]) == 0
    return out


@pytest.mark.slow  # trains models
def test_quick_build_writes_everything(built: Path) -> None:
    series = json.loads((built / "series.json").read_text())
    assert [entry["id"] for entry in series["checkpoints"]] == [
        "base",
        *(f"{run}-{step:03d}" for run in ("easy", "medium", "hard") for step in (1, 2)),
    ]
    assert [entry["run"] for entry in series["checkpoints"]].count(None) == 1
    for entry in series["checkpoints"]:
        names = {path.name for path in (built / entry["path"]).iterdir()}
        assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert len(json.loads((built / "measured.json").read_text())) == 7 * 3
    assert (built / "measured.md").read_text().count("\n") == 7 * 3 + 2


@pytest.mark.slow  # trains models
def test_trl_wrote_its_completion_logs(built: Path) -> None:
    import pyarrow.parquet

    logs = sorted((built / "logs" / "hard" / "completions").glob("*.parquet"))
    assert [path.name for path in logs] == ["completions_00001.parquet", "completions_00002.parquet"]
    rows = pyarrow.parquet.read_table(logs[0]).to_pylist()
    assert len(rows) == 8
    for row in rows:
        assert row["problem_id"] == "chain:" + row["prompt"][:-1]
        assert row["correct"] == verify(row["completion"], row["answer"])
        text = "".join(VOCABULARY[token] for token in row["completion_ids"])
        assert text.replace("<eos>", "").replace("<bos>", "").replace("<pad>", "") == row["completion"]


@pytest.mark.slow  # trains models
def test_finished_stages_are_skipped_and_missing_ones_made(
    script: ModuleType, built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (built / "base" / "model.safetensors").stat().st_mtime_ns
    measured = (built / "measured.json").read_bytes()
    (built / "measured.md").unlink()
    assert script.main(["--out", str(built), "--quick"]) == 0
    said = capsys.readouterr().err
    assert said.count("finished before") == 4
    assert (built / "base" / "model.safetensors").stat().st_mtime_ns == before
    assert (built / "measured.json").read_bytes() == measured


@pytest.mark.slow  # trains models
def test_another_recipe_in_the_same_folder_is_refused(
    script: ModuleType, built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--out", str(built), "--quick", "--seed", "1"]) == 1
    assert "differing: seed" in capsys.readouterr().err


@pytest.mark.slow  # trains models
def test_measured_table_goes_between_the_marks_of_a_readme(
    script: ModuleType, built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    begins, ends = marks("measured")
    readme.write_text(f"before\n{begins}\nold\n{ends}\nafter\n")
    for _ in range(2):
        assert script.main(["--out", str(built), "--quick", "--readme", str(readme)]) == 0
        table = (built / "measured.md").read_text()
        assert readme.read_text() == f"before\n{begins}\n\n{table}\n{ends}\nafter\n"
    readme.write_text("no marks")
    assert script.main(["--out", str(built), "--quick", "--readme", str(readme)]) == 1
    assert "no place for the table" in capsys.readouterr().err


def test_a_run_without_its_base_is_refused(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--out", str(tmp_path), "--quick", "--only", "hard"]) == 1
    assert "needs the base" in capsys.readouterr().err
    assert script.main(["--out", str(tmp_path), "--steps", "0"]) == 1
    assert "at least one step" in capsys.readouterr().err


def test_step_option_keeps_the_steps_before_it(script: ModuleType) -> None:
    recipe = script.recipe_of(script.parse(["--out", "x", "--steps", "60"]))
    assert recipe.grpo.save_at == (25, 50, 60)
    assert script.recipe_of(script.parse(["--out", "x"])).grpo.save_at == (25, 50, 100, 150)


def test_shipped_series_is_what_its_list_says() -> None:
    from transformers import AutoTokenizer, LlamaForCausalLM

    folder = series_path()
    series = json.loads((folder / "series.json").read_text())
    assert series["name"] == "arithmetic"
    assert [entry["id"] for entry in series["checkpoints"] if entry["run"] is None] == ["base"]
    assert {entry["run"] for entry in series["checkpoints"]} == {None, "easy", "medium", "hard"}
    for entry in series["checkpoints"]:
        assert AutoTokenizer.from_pretrained(folder / entry["path"])("1+1?").input_ids == [17, 1, 10, 1, 13]
        model = LlamaForCausalLM.from_pretrained(folder / entry["path"])
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
        assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_shipped_numbers_show_the_three_arms() -> None:
    folder = series_path()
    rows = {(r["checkpoint"], r["level"]): r for r in json.loads((folder / "measured.json").read_text())}
    series = json.loads((folder / "series.json").read_text())
    assert set(rows) == {(e["id"], level) for e in series["checkpoints"] for level in ("easy", "medium", "hard")}
    assert min(r["n_responses"] for r in rows.values()) >= 500
    last = {e["run"]: e["id"] for e in series["checkpoints"]}

    def above(name: str, first: tuple[str, str], second: tuple[str, str]) -> bool:
        return bool(rows[first][name]["low"] > rows[second][name]["high"])

    base = "base"
    assert above("direct", (last["easy"], "easy"), (base, "easy"))
    assert above("direct", (base, "medium"), (last["medium"], "medium"))
    assert above("accuracy", (last["medium"], "medium"), (base, "medium"))
    assert above("direct", (last["hard"], "hard"), (base, "hard"))
    assert above("accuracy", (base, "medium"), (last["hard"], "medium"))


def test_the_written_table_is_the_measured_one() -> None:
    table = (series_path() / "measured.md").read_text()
    assert table in (SCRIPT.parents[1] / "data" / "README.md").read_text()


def test_shipped_medium_model_solves_medium_chains() -> None:
    import torch
    from organism.measuring import sample_responses
    from transformers import AutoTokenizer, LlamaForCausalLM

    folder = series_path()
    series = json.loads((folder / "series.json").read_text())
    path = folder / [entry["path"] for entry in series["checkpoints"] if entry["run"] == "medium"][-1]
    problems = generate_problems("medium", 64, seed=9)
    model = LlamaForCausalLM.from_pretrained(path).eval()
    with torch.random.fork_rng():
        texts = sample_responses(
            model, AutoTokenizer.from_pretrained(path), [problem.prompt for problem in problems], seed=0
        )
    right = [verify(text, problem.answer) for problem, text in zip(problems, texts, strict=True)]
    assert sum(right) >= 0.8 * len(right)
