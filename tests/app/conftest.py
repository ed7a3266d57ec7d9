"""What commands and functions wrote, shared by the tests of the command line and of what lies on disk."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

import tsae
from support.builders import save_model, save_perturbed, save_series
from support.cli import run
from support.planted import planted, small_credit
from support.results import make_attribution
from tsae.attribution.influence import Influence
from tsae.rollouts.problems import write_problems


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that the stages wrote, from two tiny random checkpoints."""
    to = tmp_path_factory.mktemp("pipeline")
    save_model(to / "series" / "base")
    save_perturbed(to / "series" / "base", to / "series" / "run-5", amount=0.15)
    records = [{"id": "base", "path": "base"}, {"id": "run-5", "path": "run-5", "run": "medium", "step": 5}]
    save_series(to / "series", records)
    write_problems(tsae.testbed.generate_problems("medium", 24, 0), to / "problems.jsonl")
    sample = ("rollouts", "sample", "--series", to / "series", "--problems", to / "problems.jsonl")
    sample = (*sample, "--verifier", "support.cli:lucky", "--n-samples", 6, "--max-new-tokens", 16, "--batch-size", 72)
    run(*sample, "--to", to / "raw.parquet")
    run("rollouts", "bands", "--rollouts", to / "raw.parquet", "--to", to / "rollouts.parquet", "--reference", "base",
        "--easy", 0.7, "--hard", 0.3)  # fmt: skip
    run("capture", "--series", to / "series", "--rollouts", to / "rollouts.parquet", "--to", to / "acts")
    run("train", "--store", to / "acts", "--to", to / "sae", "--d-sae", 32, "--k", 4, "--tokens", 20_000,
        "--batch-tokens", 512)  # fmt: skip
    run("encode", "--sae", to / "sae", "--store", to / "acts", "--to", to / "features")
    run("diff", "--features", to / "features", "--to", to / "diff", "--tokenizer", to / "series",
        "--annotator", "support.cli:classes", "--min-problems", 5,
        "--n-permutations", 500, "--n-bootstrap", 200)  # fmt: skip
    run("report", "--diff", to / "diff", "--features", to / "features", "--to", to / "report.html", "--title", "Tiny")
    return to


QUICK = tsae.DiffConfig(n_bootstrap=100, n_permutations=100, threads=1)


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Python code wrote: rollouts, and a folder of every kind."""
    folder = tmp_path_factory.mktemp("results")
    world = planted(n_problems=12, n_samples=4).table
    world.rollouts.write(folder / "rollouts.parquet")
    world.save(folder / "features")
    tsae.feature_diff(world, QUICK, progress=False).save(folder / "diff")
    sample = {"trajectory": 0, "problem_id": "p", "feature": 3, "representation": 1.0, "policy_part": 0.5, "total": 1.5}
    Influence(pd.DataFrame([sample]), {"checkpoint": "run"}).save(folder / "influence")
    small_credit().save(folder / "credit")
    make_attribution().save(folder / "attribution")
    return folder
