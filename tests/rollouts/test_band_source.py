"""Bands from elsewhere: another model's pass rates and the data set's levels, beside the policies' own bands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pandas as pd
import pytest

from support.cli import run
from support.logs import refused
from support.servers import hub_here
from tsae.errors import TsaeError
from tsae.rollouts.band_source import asked_problems, bands_from, read_source
from tsae.rollouts.bands import bands_label, found_how, of_steps
from tsae.rollouts.config import BandSource
from tsae.rollouts.schema import problem_bands
from tsae.rollouts.table import Rollouts

N = 30
ABOUT = "You are a mathematician.\n{}\nThink, and put the answer into a box."


def prompts() -> list[str]:
    return [f"How many apples are {i} and {i + 1} apples together?" for i in range(N)]


@pytest.fixture
def rollouts() -> Rollouts:
    """Of 30 problems, which the run asked within a text of its own: 8 responses each, the first 10 problems easy."""
    records = []
    for i, prompt in enumerate(prompts()):
        rate = (8, 4, 0)[i // 10]
        records += [
            {"problem_id": f"p{i}", "policy": "base", "prompt": ABOUT.format(prompt), "prompt_ids": [1],
             "response_ids": [2], "outcome": "success" if n < rate else "failure", "level": f"Level {1 + i % 5}"}
            for n in range(8)
        ]  # fmt: skip
    return Rollouts.from_records(records).with_bands("base")


def written(folder: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"data.{kind}"
    if kind == "parquet":
        pd.DataFrame(rows).to_parquet(path)
    elif kind == "csv":
        pd.DataFrame(rows).to_csv(path, index=False)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rates() -> list[float]:
    """Hard where the run's own problems are easy, and easy where they are hard."""
    return [(0.1, 0.5, 0.9)[i // 10] for i in range(N)]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
@pytest.mark.parametrize("by", ["id", "problem"])
def test_pass_rates_of_another_model_beside_the_own_bands(
    kind: str, by: str, rollouts: Rollouts, tmp_path: Path
) -> None:
    rows = [
        {"problem": prompt, "llama_solve_rate": rate, **({"id": f"p{i}"} if by == "id" else {"source": "x"})}
        for i, (prompt, rate) in enumerate(zip(prompts(), rates(), strict=True))
    ]
    file = written(tmp_path, kind, [*rows[2:], {**rows[0], "problem": "another", "id": "q"}])
    source = BandSource(difficulty=file, difficulty_column="llama_solve_rate", difficulty_model="Llama 3.1 8B")
    found = rollouts.with_source(source)
    band = problem_bands(found.frame)
    assert [band[f"p{i}"] for i in range(2, N)] == ["hard"] * 8 + ["medium"] * 10 + ["easy"] * 10
    assert band[["p0", "p1"]].isna().all()
    info = found.info["bands"]
    assert bands_label(info) == "difficulty for model Llama 3.1 8B"
    assert info["unbanded"] == 2
    matched = 28 if by == "id" else 0
    assert f"28 problems are matched, {matched} of them by id; 2 problems have no band" in found_how(info)
    # Both can be contrasted, and nothing is lost on the way to disk and back.
    own = Rollouts.read(found.write(tmp_path / "banded.parquet")).by("own")
    assert own.frame.band.equals(rollouts.frame.band)
    assert own.frame.pass_rate.equals(rollouts.frame.pass_rate)
    assert own.info["bands"] == rollouts.info["bands"]
    assert own.by("difficulty").table.equals(
        found.select(np.arange(len(found))).table.select(own.by("difficulty").table.column_names)
    )
    refused("no bands by level; there are those by difficulty, own", found.by, "level")


def test_the_logs_own_levels_and_named_ones(rollouts: Rollouts) -> None:
    found = rollouts.with_source(BandSource(bands_column="level"))
    counts = problem_bands(found.frame).value_counts().to_dict()
    assert counts == {"easy": 12, "medium": 6, "hard": 12}
    assert found.info["bands"]["source"]["levels"] == {
        "easy": ["Level 1", "Level 2"], "medium": ["Level 3"], "hard": ["Level 4", "Level 5"],
    }  # fmt: skip
    assert "bands are the level of the data set (level)" in found_how(found.info["bands"])
    named = rollouts.with_source(
        BandSource(bands_column="level", bands_levels=("easy=Level 1", "hard=Level 4,Level 5"))
    )
    assert problem_bands(named.frame).value_counts().to_dict() == {"hard": 12, "easy": 6}
    kept = rollouts.with_column("extra/grade", rollouts.frame.level.str.replace(" ", "-")).with_source(
        BandSource(bands_column="grade")
    )
    assert kept.frame.band.equals(found.frame.band)
    assert kept.info["bands"]["source"]["levels"]["hard"] == ["Level-4", "Level-5"]
    refused("no column 'levle'; there are .*level", rollouts.with_source, BandSource(bands_column="levle"))
    words = rollouts.with_column("level", ["AMC", "AIME"] * (len(rollouts) // 2))
    refused("gives problem 'p0' several values: AMC, AIME", words.with_source, BandSource(bands_column="level"))
    words = rollouts.with_column("level", np.where(rollouts.frame.level == "Level 1", "AMC", "AIME"))
    with pytest.raises(TsaeError, match="levels in level have no order that is known: AIME, AMC") as error:
        words.with_source(BandSource(bands_column="level"))
    assert "--bands-levels easy=A,B" in str(error.value)


def test_forms_in_which_data_sets_give_difficulty(rollouts: Rollouts, tmp_path: Path) -> None:
    """Polaris has "3/8", Skywork-OR1 numbers of failures for each model in a field of its own, and messages."""
    name = "extra_info.model_difficulty.DeepSeek-R1-Distill-Qwen-1.5B"
    rows = [
        {"prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": prompt}],
         "share": f"{round(rate * 10)}/10",
         "extra_info": {"model_difficulty": {"DeepSeek-R1-Distill-Qwen-1.5B": round((1 - rate) * 10)}}, "hard": 8.0}
        for prompt, rate in zip(prompts(), rates(), strict=True)
    ]  # fmt: skip
    file = written(tmp_path, "jsonl", rows)
    share = rollouts.with_source(BandSource(difficulty=file, difficulty_column="share"))
    failures = rollouts.with_source(BandSource(difficulty=file, difficulty_column=name, difficulty_failures_of=10))
    assert share.frame.band.tolist() == failures.frame.band.tolist()
    assert set(share.frame.band) == {"easy", "medium", "hard"}
    for column, told in (
        (name, r"is '9', expected a pass rate"),
        ("no", r"has no column no with a value; it has prompt"),
    ):
        refused(told, rollouts.with_source, BandSource(difficulty=file, difficulty_column=column))


def test_what_a_file_says_twice_and_what_it_does_not_know(rollouts: Rollouts, tmp_path: Path) -> None:
    rows = [{"id": f"p{i}", "rate": rate} for i, rate in enumerate(rates())]
    source = BandSource(difficulty=tmp_path / "data.jsonl", difficulty_column="rate")
    written(tmp_path, "jsonl", [*rows, rows[0]])  # twice the same
    rollouts.with_source(source)
    written(tmp_path, "jsonl", [*rows, {**rows[0], "rate": 0.7}])
    refused(r"data\.jsonl: gives problem 'p0' several values: 0\.1, 0\.7", rollouts.with_source, source)
    # An id of another problem is none: the text decides.
    others = [{"id": f"p{(i + 11) % N}", "problem": prompts()[i], "rate": rate} for i, rate in enumerate(rates())]
    written(tmp_path, "jsonl", others)
    assert problem_bands(rollouts.with_source(source).frame).tolist() == ["hard"] * 10 + ["medium"] * 10 + ["easy"] * 10
    written(tmp_path, "jsonl", [{"id": "x", "problem": "y", "rate": 0.5}])
    refused("knows none of the 30 problems: no id and no prompt is the same", rollouts.with_source, source)
    with pytest.raises(TsaeError, match="no such file"):
        rollouts.with_source(BandSource(difficulty=tmp_path / "no.parquet", difficulty_column="rate"))
    for wrong in ({"difficulty": tmp_path}, {"difficulty_column": "rate"}, {"bands_levels": ("easy=1",)}):
        refused("BandSource", BandSource, **wrong)


def test_the_commands(rollouts: Rollouts, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, "jsonl", [{"id": f"p{i}", "rate": rate} for i, rate in enumerate(rates())])
    rollouts.write(tmp_path / "own.parquet")
    to = tmp_path / "both.parquet"
    words = ["--difficulty", file, "--difficulty-column", "rate", "--bands-column", "level"]
    run("rollouts", "bands", "--rollouts", tmp_path / "own.parquet", "--to", to, *words)
    told = capsys.readouterr().out
    assert "problems: easy 10, medium 10, hard 10" in told
    assert "bands are the difficulty for model rate (rate of data.jsonl)" in told
    assert "kept beside: own, level" in told
    both = Rollouts.read(to)
    assert problem_bands(both.by("level").frame).value_counts()["medium"] == 6
    assert both.by("own").frame.band.equals(rollouts.frame.band)
    run("rollouts", "difficulty", "--rollouts", to, "--by", "level")
    assert "Bands are the level of the data set (level)" in capsys.readouterr().out
    run("rollouts", "difficulty", "--rollouts", to)
    assert "Bands are the difficulty for model rate" in capsys.readouterr().out


def test_the_parts_of_a_table_keep_every_kind_of_band(rollouts: Rollouts) -> None:
    both = rollouts.with_source(BandSource(bands_column="level"))
    some = both.select(both.frame.problem_id.isin(["p0", "p7", "p29"]).to_numpy())
    assert Rollouts.concat([some, some]).by("own").info["bands"] == rollouts.info["bands"]


def test_a_curriculum_by_the_data_sets_levels_is_its_steps(rollouts: Rollouts) -> None:
    """A run that asks easy problems first: then a difference between bands is one between steps."""
    both = rollouts.with_source(BandSource(bands_column="level"))
    (bands, _), rank = bands_of(both), both.frame.problem_id.str[1:].astype(int)
    in_turn = both.frame.assign(step=rank % 5)  # the level is i % 5 + 1
    assert of_steps(bands, in_turn, 0).startswith("bands and training steps cannot be separated: the training step")
    assert "of the differences of difficulty" in bands.info["refused"]
    (bands, _), mixed = bands_of(both), both.frame.assign(step=rank // 5)
    assert of_steps(bands, mixed, 0).startswith("the training step explains 0% of the differences of difficulty")
    assert "refused" not in bands.info


def bands_of(rollouts: Rollouts) -> Any:
    source = BandSource(bands_column="level")
    known = read_source(source)
    problems = asked_problems([rollouts.table], source, known)
    return bands_from(source, known, rollouts.frame.problem_id, problems, "log")[0]


def test_a_file_at_a_url(rollouts: Rollouts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSAE_CACHE", str(tmp_path / "cache"))
    lines = "".join(json.dumps({"id": f"p{i}", "rate": rate}) + "\n" for i, rate in enumerate(rates()))
    fsspec.filesystem("memory").pipe_file("/data/set.jsonl", lines.encode())
    with hub_here(monkeypatch, tmp_path / "hub") as hub:
        hub.repositories["datasets/org/rates"] = {"data/set.jsonl": lines.encode()}
        for url in ("memory://data/set.jsonl", "hf://datasets/org/rates/data/set.jsonl"):
            found = rollouts.with_source(BandSource(difficulty=url, difficulty_column="rate"))
            assert found.info["bands"]["source"]["file"] == "set.jsonl"
            assert problem_bands(found.frame).value_counts().to_dict() == {"easy": 10, "medium": 10, "hard": 10}
