"""`tsae run`: what TRL left of a training run, from the folder to the report."""

from __future__ import annotations

import html
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from organism.mixed import MixedConfig, train
from safetensors.torch import load_file, save_file

import tsae
from support.builders import digests, make_rollouts
from support.checkpoints import cached, edit, save_adapter
from support.damage import flip
from support.logs import one_row_below
from support.refusals import fails, refuses
from support.results import rendered
from tsae.activations.manifest import record_file
from tsae.activations.store import ActivationStore
from tsae.attribution.attribution import Attribution
from tsae.attribution.config import AttributionConfig
from tsae.causal.config import CausalConfig
from tsae.causal.findings import planned_tests
from tsae.claims.run_claims import claims_of
from tsae.cli import main
from tsae.config import RunConfig
from tsae.diff.baselines import baselines
from tsae.doctor import find_series
from tsae.errors import TsaeError
from tsae.features.encode import encode
from tsae.features.encoded_shards import EncodedShards
from tsae.report.attribution import statement
from tsae.report.story.findings import findings
from tsae.rollouts.bands import band_problems
from tsae.rollouts.config import BandSource, ImportConfig
from tsae.rollouts.fresh_rollouts import draw_problems, separate_rollouts
from tsae.rollouts.logs.tokens import Tokens
from tsae.rollouts.parquet import read_outline
from tsae.rollouts.schema import problem_bands
from tsae.run import analyze_checked, analyze_run, choose_sae
from tsae.sae.model import TemporalSAE
from tsae.verify import verify

SHIPPED = tsae.testbed.series_path()
TINY = RunConfig(
    Path("set by the test"),
    tokens=12_000,
    d_sae=32,
    k=4,
    training_tokens=20_000,
    diff=tsae.DiffConfig(n_bootstrap=100, n_permutations=100),
)
Finished = tuple[Path, list[str], Any]
"""(folder, lines, diff) of a whole analysis."""
CHECKED = re.compile(r"[a-z ]{12} (ok|note|missing|) {0,8} ")
"""Lines of the check before."""
STAGES = ["series", "rollouts", "second look", "bands", "activations", "sae", "evaluation", "features", "diff"]
STAGES += ["noise", "attribution", "claims", "report"]


@pytest.fixture(scope="module")
def trl_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The testbed's hard run as TRL leaves one: checkpoint-N folders and completions. Beside it, the base."""
    folder = tmp_path_factory.mktemp("trl")
    shutil.copytree(SHIPPED / "base", folder / "base")
    for step in (25, 50, 100, 150):
        shutil.copytree(SHIPPED / f"hard-{step:03d}", folder / "hard" / f"checkpoint-{step}")
    shutil.copytree(SHIPPED / "logs" / "hard" / "completions", folder / "hard" / "completions")
    return folder / "hard"


@pytest.fixture(scope="module")
def tiny(trl_run: Path) -> RunConfig:
    return replace(TINY, path=trl_run, base=str(trl_run.parent / "base"))


@pytest.fixture(scope="module")
def finished(tiny: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    out = tmp_path_factory.mktemp("run") / "out"
    lines, diff = analysed(replace(tiny, to=out))
    return out, lines, diff


def analysed(config: RunConfig, **changes: Any) -> tuple[list[str], Any]:
    """What an analysis printed, and its diff."""
    lines: list[str] = []
    diff = analyze_run(replace(config, **changes), progress=False, say=lines.append)
    return [line for line in lines if not CHECKED.match(line)], diff


def words(config: RunConfig, to: Path) -> list[str]:
    """The command of an analysis like `TINY`."""
    options = f"--tokens {config.tokens} --d-sae {config.d_sae} --k {config.k} --training-tokens "
    options += f"{config.training_tokens} --diff.n-bootstrap 100 --diff.n-permutations 100"
    return ["run", str(config.path), "--base", str(config.base), "--to", str(to), *options.split()]


def contents(folder: Path) -> dict[str, str]:
    """Digests of all files but those that name the folder itself."""
    return {name: digest for name, digest in digests(folder).items() if not name.endswith("stages.json")}


def test_everything_from_the_folder_alone(finished: Finished) -> None:
    out, lines, diff = finished
    assert [line.partition(":")[0] for line in lines] == STAGES
    said = json.loads((out / "stages.json").read_text())
    assert list(said) == STAGES
    assert "5 checkpoints" in said["series"]
    assert "compared with it: hard-00150 (the last step of every run)" in said["series"]
    assert "TRL completions, 1,792 trajectories of 112 problems" in said["rollouts"]
    assert "correct is above 0 (the log's only reward)" in said["rollouts"]
    assert said["bands"].startswith("problems: easy 10, medium 10, hard 92; a response's band is measured on the other")
    assert "(easy >= 0.75, hard <= 0.25); the training step explains" in said["bands"]
    # What the log says twice agrees, and is kept beside the settings and on the page.
    looked = json.loads((out / "run.json").read_text())["found"]["second_look"]
    assert [name for name, check in looked.items() if check["compared"]] == ["advantages", "answers", "responses"]
    assert not any(check["disagrees"] for check in looked.values())
    assert looked["responses"]["compared"] == 1792
    assert all(check["line"] in said["second look"] for check in looked.values())
    page = (out / "report.html").read_text()
    assert "The log that was imported agrees with itself where that can be compared." in page
    assert html.escape(looked["advantages"]["line"]) in page
    # Without the trainer's settings no sample is blamed, and what is missing is said.
    assert said["attribution"] == (
        "Not known. hard: the trainer's settings do not lie beside the checkpoints (training_args.bin or .json, "
        "wandb/, .hydra/). Give the file (settings=…, --settings), or a tsae.RunSettings; `tsae attribute` then adds "
        "it."
    )
    assert html.escape(said["attribution"]) in page
    assert '<section id="samples"' not in page
    assert said["claims"].startswith("Of 26 claims about sample difficulty, ")
    assert '<section id="claims"' in page
    assert "blocks.1.hook_resid_post (the middle block)" in said["activations"]
    assert "32 latents, k 4, trained on 20,000 tokens" in said["sae"]
    assert "contrasts drawn" in said["diff"]
    for name in ("rollouts", "activations", "sae", "evaluation", "features", "diff"):
        assert any((out / name).iterdir())
    rollouts = tsae.Rollouts.read(out / "rollouts" / "rollouts.parquet")
    assert "What training changed: hard" in page
    assert f"compared with base on {rollouts.n_problems} problems" in page
    assert "answered no problem that base answered" in page
    assert "Sample both on the same problems: <code>tsae run … --sample 4 --to OTHER</code>" in html.unescape(page)
    assert "with --causal" in page

    # Every response is one of the log, under its own problem and with its own reward.
    logged = pd.concat(pd.read_parquet(f) for f in sorted((SHIPPED / "logs/hard/completions").glob("*.parquet")))
    kept = logged[logged.problem_id.isin(rollouts.frame.problem_id)]
    key = ["problem_id", "completion", "correct"]
    found = rollouts.frame.rename(columns={"response": "completion", "reward": "correct"})[key]
    pd.testing.assert_frame_equal(
        found.sort_values(key, ignore_index=True), kept[key].sort_values(key, ignore_index=True), check_dtype=False
    )
    # Readers read all of it, and contrasts are over all of it, whoever sampled it.
    assert [r["id"] for r in diff.info["readers"]] == ["base", "hard-00150"]
    assert len({r["n_tokens"] for r in diff.info["readers"]}) == 1
    shift = diff.contrasts[(diff.contrasts.kind == "shift") & (diff.contrasts.outcome == "all")].set_index("band")
    assert set(diff.contrasts[diff.contrasts.kind == "shift"].part) == {"same_trajectories"}
    assert shift.n_problems["all"] == rollouts.n_problems
    assert shift.n_discoveries["all"] > 0


def test_controls_interactions_and_baselines_rest_on_the_rows_of_their_contrast(
    finished: Finished,
) -> None:
    out, _, diff = finished
    keys = ["kind", "checkpoint", "part", "band", "outcome"]
    named = diff.contrasts.set_index(keys)["rows"]
    drawn = diff.contrasts[(diff.contrasts.note == "") & (diff.contrasts.outcome == "all")].set_index(keys)
    controls = diff.confounds.drop_duplicates([*keys, "control"]).set_index(keys)
    assert set(controls.index) == {key for key in drawn.index if key[2] in ("total", "success_minus_failure")}
    assert len(controls) == 3 * controls.index.nunique() > 0
    assert (controls["rows"] == named.reindex(controls.index)).all()
    # Every problem of an outcome contrast has a token on both sides.
    of_tokens = controls[controls.control == "token"]
    assert (of_tokens.n_problems == drawn.n_problems.reindex(of_tokens.index)).all()
    for key, rows in named.items():
        if key[0] == "interaction":
            assert rows == "+".join(named["outcome", key[1], key[2], band, "all"] for band in key[3].split("-"))
    store, features = tsae.ActivationStore(out / "activations"), tsae.FeatureTable.load(out / "features")
    plain = baselines(features, store, diff_config(diff)).drop_duplicates(["kind", "checkpoint"])
    assert set(plain.kind) == {"shift", "outcome"}
    for row in plain.itertuples():
        key = (row.kind, row.checkpoint, row.part, "all", "all")
        assert (row.rows, row.n_problems) == (named[key], drawn.n_problems[key])


def diff_config(diff: Any) -> tsae.DiffConfig:
    config = dict(diff.info["config"])
    return tsae.DiffConfig(**{**config, "bands": None if config["bands"] is None else tuple(config["bands"])})


def test_again_reads_everything_from_disk(finished: Finished, tiny: RunConfig, tmp_path: Path) -> None:
    out, lines, diff = finished
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.h5")}
    report = (out / "report.html").stat().st_mtime_ns
    again, found = analysed(tiny, to=out)
    assert again == [f"{line} [from disk]" for line in lines]
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.h5")} == before
    assert (out / "report.html").stat().st_mtime_ns == report
    # The base has no run, which is missing in another way once it was read from a file.
    for shifts in (found.shifts, diff.shifts):
        assert shifts.run.isna().sum() == (shifts.checkpoint == "base").sum()
    columns = diff.shifts.columns.drop("run")
    pd.testing.assert_frame_equal(found.shifts[columns], diff.shifts[columns], check_dtype=False)
    with pytest.raises(TsaeError, match=r"something else than an analysis.*differing: path"):
        analysed(tiny, path=shutil.copytree(tiny.path, tmp_path / "other"), to=out)


def flip_digit(file: Path) -> None:
    text = file.read_text()
    file.write_text(text.replace('"fve": 0.', '"fve": 1.', 1))
    assert file.read_text() != text


DAMAGES: dict[str, tuple[str, Callable[[Path], object], list[str]]] = {
    "evaluation": ("evaluation/evaluation.json", flip_digit, ["evaluation"]),
    "sae": ("sae/sae.safetensors", lambda file: flip(file, -2), ["sae"]),
    "features": ("features/columns.h5", lambda file: flip(file, -2), ["features"]),
    "diff": ("diff/shifts.parquet", Path.unlink, ["diff", "noise"]),
    "rollouts": ("rollouts/rollouts.parquet", lambda file: flip(file, 99), ["rollouts", "second look", "bands"]),
    "claims": ("claims.json", lambda file: file.write_text("{"), ["claims"]),
}


@pytest.mark.parametrize("damage", [pytest.param(name, marks=pytest.mark.slow) for name in DAMAGES])
def test_what_is_damaged_is_made_again(damage: str, finished: Finished, tiny: RunConfig, tmp_path: Path) -> None:
    name, do, stages = DAMAGES[damage]
    out = shutil.copytree(finished[0], tmp_path / "out")
    left = out / ".features.lock"  # of a process that was killed at the end of encoding
    left.write_text("{}")
    batches = out / "rollouts" / "sampling"  # of one that was killed when its samples had been written
    batches.mkdir()
    do(out / name)
    lines, _ = analysed(tiny, to=out)
    assert not left.exists()
    assert not batches.exists()
    told = [line for line in lines if line.endswith("made again")]
    assert len(told) == 1
    assert str(out / name.partition("/")[0]) in told[0]
    made = [line.partition(":")[0] for line in lines if not line.endswith((" [from disk]", "made again"))]
    assert made == [*stages, *(["report"] if "report" not in stages else [])]
    assert contents(out) == contents(finished[0])


@pytest.mark.parametrize("there", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_wrong_site_is_corrected(there: bool, finished: Finished, tiny: RunConfig, tmp_path: Path) -> None:
    """Whether nothing is there yet or all of it, the command that is right at last gives what it gives alone."""
    out = shutil.copytree(finished[0], tmp_path / "out") if there else tmp_path / "out"
    refuses("9", analysed, tiny, to=out, site="blocks.9.hook_resid_post")
    lines, _ = analysed(tiny, to=out, site="blocks.1.hook_resid_post")
    assert any("(as asked)" in line for line in lines)
    assert {**contents(out), "run.json": ""} == {**contents(finished[0]), "run.json": ""}  # it names the site
    assert not (out / ".before").exists()


CORRECTIONS: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "width": ({"d_sae": 40}, "d_sae", ["sae", "evaluation", "features", "diff", "attribution", "claims", "report"]),
    "contrasts": (
        {"diff": replace(TINY.diff, minimum_effect=0.2)},
        "diff",
        ["diff", "attribution", "claims", "report"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("option", list(CORRECTIONS))
def test_an_option_is_corrected(option: str, finished: Finished, tiny: RunConfig, tmp_path: Path) -> None:
    """Only what rests on the option is made anew, and said in one line; the first option gives the first bytes."""
    changes, name, anew = CORRECTIONS[option]
    out = shutil.copytree(finished[0], tmp_path / "out")
    lines, _ = analysed(tiny, to=out, **changes)
    shown = ", ".join(stage for stage in anew if (finished[0] / stage).exists() or stage in ("claims", "report"))
    first = next(line for line in lines if line.startswith("made anew:"))
    assert first == f"made anew:   {shown} (changed: {name})"
    kept = [line.partition(":")[0] for line in lines if line.endswith("[from disk]")]
    assert not set(kept) & (set(anew) - {"attribution"})
    alone = tmp_path / "alone"
    analysed(tiny, to=alone, **changes)
    assert contents(out) == contents(alone)
    analysed(tiny, to=out)
    assert contents(out) == contents(finished[0])


@pytest.mark.slow
def test_labels_that_changed_since_are_read_again(tiny: RunConfig, trl_run: Path, tmp_path: Path) -> None:
    """The file has the size that it had."""
    log = tmp_path / "log" / "completions_00150.parquet"
    log.parent.mkdir()
    table = pq.read_table(trl_run / "completions" / log.name)
    place = table.column_names.index("correct")
    pq.write_table(table, log, compression="none", use_dictionary=False)
    size, config = log.stat().st_size, replace(tiny, log=log.parent, to=tmp_path / "out")
    analysed(config)
    before = tsae.Rollouts.read(config.to / "rollouts" / "log.parquet")
    turned = pa.array([1.0 - value for value in table["correct"].to_pylist()])
    pq.write_table(table.set_column(place, "correct", turned), log, compression="none", use_dictionary=False)
    assert log.stat().st_size == size
    lines, _ = analysed(config)
    assert any(line.startswith("made anew:   log, rollouts") and "(changed: log)" in line for line in lines)
    after = tsae.Rollouts.read(config.to / "rollouts" / "log.parquet")
    assert (before.frame.outcome == "success").sum() == (after.frame.outcome == "failure").sum()


@pytest.mark.slow  # runs the whole pipeline
def test_a_checkpoint_that_is_rotated_away_is_named_and_the_others_are_used(
    tiny: RunConfig, trl_run: Path, tmp_path: Path
) -> None:
    """The one that is read goes after the import, and the one that is then read is half removed."""
    run, lines = shutil.copytree(trl_run, tmp_path / "run"), list[str]()

    def say(line: str) -> None:
        lines.append(line)
        if line.startswith("bands:") and (run / "checkpoint-150").is_dir():
            shutil.rmtree(run / "checkpoint-150")
        elif line.startswith("bands:") and (run / "checkpoint-100/model.safetensors").is_file():
            (run / "checkpoint-100/model.safetensors").unlink()

    diff = analyze_run(replace(tiny, path=run, to=tmp_path / "out"), progress=False, say=say)
    assert [reader["id"] for reader in diff.info["readers"]] == ["base", "run-00050"]
    told = [line for line in lines if line.startswith("looking again: ")]
    assert [line.partition(" was removed")[0] for line in told] == [
        f"looking again: checkpoint-{step}" for step in (150, 100)
    ]
    said = json.loads((tmp_path / "out" / "stages.json").read_text())["series"]
    assert "left out, as not complete: checkpoint-100 (holds no weights; expected model.safetensors)" in said


def test_a_checkpoint_that_is_half_written_is_left_out_with_a_note(trl_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trl_run, tmp_path / "run")
    weights = run / "checkpoint-150" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    (run / "checkpoint-100" / "tokenizer.json").unlink()
    series, origin = find_series(RunConfig(run))
    assert [c.step for c in series] == [25, 50]
    assert "run-00025 stands in" in origin
    assert series.notes[0] == (
        "left out, as not complete: checkpoint-100 (holds no tokenizer), "
        "checkpoint-150 (model.safetensors is not all there)."
    )
    shutil.copytree(trl_run / "checkpoint-50", run / "epoch_1")
    notes = find_series(RunConfig(run))[0].notes
    assert "left out, as the steps of run are counted by other folders: epoch_1." in notes


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with every checkpoint, its log and its settings."""
    folder = tmp_path_factory.mktemp("mixed") / "run"
    config = MixedConfig(per_band=1, steps=3, groups=3, samples=6, learning_rate=1e-3)
    return train(config, tsae.testbed.series().base, folder, progress=False)


@pytest.mark.slow
def test_samples_are_attributed_where_the_run_allows_it(mixed: Path, tmp_path: Path) -> None:
    few = AttributionConfig(n_features=2, n_fixed=18, groups=("outcome",))
    config = replace(TINY, path=mixed, to=tmp_path / "out", attribution=few)
    lines, _ = analysed(config)
    assert [line.partition(":")[0] for line in lines] == STAGES
    found = Attribution.load(tmp_path / "out" / "attribution")
    assert len(found.facts) == 54
    assert found.info["path_error"] < 0.01
    assert sum(name.startswith("feature") for name in found.targets.target) == 2
    assert lines[STAGES.index("attribution")] == f"attribution: {' '.join(statement(found).sentences)}"
    page = (tmp_path / "out" / "report.html").read_text()
    assert '<section id="samples"' in page
    assert "Which of 54 samples of run, steps 1 to 3, moved" in page
    # Again, from disk; and a page written anew still has it.
    stamp = (tmp_path / "out" / "attribution" / "attribution.json").stat().st_mtime_ns
    (tmp_path / "out" / "report.html").unlink()
    again, _ = analysed(config)
    assert again == [*(f"{line} [from disk]" for line in lines[:-1]), lines[-1]]
    assert (tmp_path / "out" / "attribution" / "attribution.json").stat().st_mtime_ns == stamp
    assert (tmp_path / "out" / "report.html").read_text() == page
    # The command takes log, SAE, bands and features from the folder.
    options = ["--targets", "features", "--n-features", "2", "--no-effects", "--to", str(tmp_path / "alone")]
    main(["attribute", str(tmp_path / "out"), *options])
    alone = Attribution.load(tmp_path / "alone")
    assert list(alone.targets.target) == [name for name in found.targets.target if name.startswith("feature")]
    assert set(alone.bands.band) == {"easy", "medium", "hard"}


@pytest.mark.slow  # runs the whole pipeline
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"attribute": False}, None),
        ({"attribution": AttributionConfig(budget_gb=0.001)}, "the path of 3 steps of"),
        ({"tokens": 1_000}, "more than the 1,000 that are read"),
        ({}, "lacks 1 of the steps 1 to 3, the first of them step 2. Log every step"),
    ],
)
def test_what_keeps_samples_from_being_attributed_is_said(
    mixed: Path, tmp_path: Path, change: dict[str, Any], told: str | None
) -> None:
    run = shutil.copytree(mixed, tmp_path / "run")
    if not change:
        log = run / "completions.jsonl"
        log.write_text(
            "".join(line for line in log.read_text().splitlines(keepends=True) if json.loads(line)["step"] != 2)
        )
    lines, _ = analysed(TINY, path=run, to=tmp_path / "out", **change)
    said = [line for line in lines if line.startswith("attribution:")]
    page = (tmp_path / "out" / "report.html").read_text()
    assert '<section id="samples"' not in page
    if told is None:
        assert said == []
        assert "Not known." not in page
    else:
        assert told in said[0]
        assert "`tsae attribute` then adds it" in said[0]
        assert told in page


@pytest.mark.slow
def test_both_halves_and_the_causal_columns_on_one_page(
    tiny: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fresh rollouts, the same command again, causal tests added, and one of them made again."""
    out = tmp_path / "out"
    config = replace(tiny, to=out, sample=2, tokens=8000)
    lines, diff = analysed(config)
    said = json.loads((out / "stages.json").read_text())
    rollouts = tsae.Rollouts.read(out / "rollouts" / "rollouts.parquet")
    n = rollouts.n_problems
    assert said["sampled"] == (
        f"{4 * n} fresh responses, 2 to each of {n} problems by base, hard-00150; last_number checks answers, which "
        "confirms 100% of the log's outcomes"
    )
    assert rollouts.frame.groupby(["policy", "problem_id"]).size().eq(2).all()
    assert not (out / "rollouts" / "sampling").exists()
    # Both answered every problem: their behaviour is compared, and shifts are divided into their parts.
    assert {"total", "policy", "representation"} <= set(diff.contrasts.part)
    accuracy = diff.behaviours[(diff.behaviours.behaviour == "accuracy") & (diff.behaviours.band == "all")]
    assert accuracy.n_problems.tolist() == [n, n]
    page = (out / "report.html").read_text()
    assert "pass@k" in page
    assert "half that is missing" not in page
    assert "<code>--causal</code>" in page

    again = replace(config, causal=True, tests=CausalConfig(features=1, problems=4, samples=1, n_random=2))
    lines, with_tests = analysed(again)
    assert [line for line in lines if not line.endswith("[from disk]")] == lines[-3:]
    assert [line.partition(":")[0] for line in lines] == [*list(said)[:-2], "causal", "claims", "report"]
    assert lines[-3].startswith("causal:      3 of 3 tests")
    modes = {test["mode"]: test for test in with_tests.info["causally_tested"]}
    assert {mode: test["checkpoint"] for mode, test in modes.items()} == {
        "ablate": "hard-00150", "transplant": "base", "steer": "base"
    }  # fmt: skip
    assert modes["transplant"]["donor"] == "hard-00150"
    assert "mean_difference" in {row["condition"] for row in modes["transplant"]["changes"]}
    page = (out / "report.html").read_text()
    assert "sufficient: share that they move" in page
    assert "necessary: ablated in the donor" in page
    assert {test["n_of_features"] for test in modes.values()} == {4}
    assert "are the fairer" in page
    assert "<code>--causal</code>" not in page

    before, (test, *_) = contents(out), sorted((out / "causal").iterdir())
    shutil.rmtree(test)
    assert test.name in fails(capsys, "verify", out).out
    (out / "report.html").unlink()
    analysed(again)
    assert contents(out) == before
    main(["verify", str(out)])

    # Killed when a test was saved, and before the page was written anew: the page without it does not stay.
    shutil.rmtree(test)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tsae.Intervention, "load", classmethod(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)))
        with pytest.raises(KeyboardInterrupt):
            analysed(again)
    assert (test / "causal.json").is_file()
    assert not (out / "report.html").exists()
    analysed(again)
    assert contents(out) == before


@pytest.mark.slow  # starts sixteen processes
def test_eight_processes_on_one_folder(tiny: RunConfig, finished: Finished, tmp_path: Path) -> None:
    """One writes; the others are told who does. Then a run, its readers and those that write into it, all at once."""
    out = tmp_path / "out"
    run = words(tiny, out)

    def at_once(*commands: list[Any]) -> list[tuple[int, str]]:
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "tsae", *map(str, words)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                text=True, cwd=tmp_path,
            )
            for words in commands
        ]  # fmt: skip
        said = [process.communicate()[1] for process in started]
        return [(process.returncode, words) for process, words in zip(started, said, strict=True)]

    ended = at_once(*[run] * 8)
    codes = [code for code, _ in ended]
    assert codes.count(0) >= 1
    assert set(codes) <= {0, 2}
    told = [said for code, said in ended if code]
    assert all("is being written by process" in said and "Traceback" not in said for said in told)
    assert contents(out) == contents(finished[0])

    report = ["report", "--diff", out / "diff", "--features", out / "features", "--to"]
    ended = at_once(
        run, ["claims", out], ["claims", out], ["verify", out], ["verify", out / "activations"],
        [*report, tmp_path / "one.html"], [*report, tmp_path / "two.html"],
        ["diff", "--features", out / "features", "--to", tmp_path / "diff", "--n-bootstrap", 100,
         "--n-permutations", 100],
    )  # fmt: skip
    assert [(code, said) for code, said in ended if code and "is being written by process" not in said] == []
    assert contents(out) == contents(finished[0])
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()
    assert all(one.ok for one in verify([out], progress=False))


@pytest.mark.slow
def test_the_command_makes_the_claims_of_the_run_again(finished: Finished, tmp_path: Path) -> None:
    out = shutil.copytree(finished[0], tmp_path / "out")
    (out / "claims.json").unlink()
    main(["claims", str(out)])
    assert (out / "claims.json").read_bytes() == (finished[0] / "claims.json").read_bytes()


def test_tests_are_planned_for_what_a_run_moved(finished: Finished) -> None:
    diff = finished[2]
    moved = diff.main_shift("hard-00150", discoveries=True)
    raised = moved[moved.delta > 0].sort_values("delta_low", ascending=False).feature.head(2)
    assert len(raised) == 2
    plan = planned_tests(diff, 2)
    assert {test.features for test in plan} == {tuple(raised)}
    assert [(test.mode, test.has, test.lacks) for test in plan] == [
        (mode, "hard-00150", "base") for mode in ("ablate", "transplant", "steer")
    ]
    # A run that only lowered features: the base has them.
    shifts = diff.shifts.assign(delta=-diff.shifts.delta.abs())  # delta_low and delta_high only order them
    assert {(test.has, test.lacks) for test in planned_tests(replace(diff, shifts=shifts), 2)} == {
        ("base", "hard-00150")
    }
    assert planned_tests(replace(diff, shifts=diff.shifts.assign(q=1.0)), 2) == []


@pytest.mark.slow
def test_interrupted_after_every_stage(finished: Finished, tiny: RunConfig, tmp_path: Path) -> None:
    for number in range(len(STAGES)):
        lines: list[str] = []

        def stop(line: str, lines: list[str] = lines, number: int = number) -> None:
            lines.append(line)
            if len(lines) > number:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            analyze_checked(replace(tiny, to=tmp_path / "out"), progress=False, say=stop)
        assert all(line.endswith("[from disk]") for line in lines[: number - 1])
    assert contents(tmp_path / "out") == contents(finished[0])


@pytest.mark.slow(ci=True)
def test_what_a_kill_at_the_very_end_of_a_stage_left_is_cleared_away(
    finished: Finished, tiny: RunConfig, tmp_path: Path
) -> None:
    """The store and the features are complete; their records and pieces are not removed yet."""
    out = shutil.copytree(finished[0], tmp_path / "out")
    pieces, kept = tmp_path / "kept", ActivationStore(out / "activations")
    sae = TemporalSAE.load(out / "sae")

    def stopped(self: EncodedShards) -> None:
        shutil.copytree(self.path, pieces)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EncodedShards, "remove", stopped)
        encode(sae, kept, to=tmp_path / "features", progress=False)
    shutil.copytree(pieces, out / "features" / "pieces")
    shard = kept.manifest["readers"][0]["shards"][0]["file"]
    (out / "activations" / record_file(shard)).write_text("{}")
    analysed(tiny, to=out)
    assert contents(out) == contents(finished[0])


@pytest.mark.slow(ci=True)
def test_killed_while_it_trains(finished: Finished, tiny: RunConfig, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "tsae", *words(tiny, out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 900
    while not (out / "activations" / "base").is_dir() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (out / "report.html").exists()
    analysed(tiny, to=out)
    assert contents(out) == contents(finished[0])


@pytest.mark.slow(ci=True)
def test_the_command_says_what_it_decides(
    finished: Finished, tiny: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    out, lines, _ = finished
    main(words(tiny, out))
    printed = capsys.readouterr().out
    assert printed.startswith(f"base         ok       the base is {tiny.base} (as asked)\n")
    assert f"\n{lines[0]} [from disk]\n" in printed
    end = printed.partition(f"\n{lines[-1]} [from disk]\n")[2]
    assert end.startswith("\nhard-00150: After training on hard problems, ")
    assert f"Report: {(out / 'report.html').resolve()}" in end
    assert len(end.splitlines()) <= 40
    main([*words(tiny, out), "--all"])
    assert "Shifts of hard-00150 against base, on the same trajectories" in capsys.readouterr().out


# --- which checkpoints


def test_what_looks_like_a_base_and_is_not_one(trl_run: Path, tmp_path: Path) -> None:
    run, base = tmp_path / "hard", trl_run.parent / "base"
    shutil.copytree(trl_run, run)
    (run / "README.md").write_text("---\nlibrary_name: transformers\n---\nbase_model: elsewhere/model\n")
    series, origin = find_series(RunConfig(run))
    assert series.base.path == str((run / "checkpoint-25").resolve())
    assert "hard-00025 stands in for the base" in origin
    # Older transformers write where the weights came from; a resumed run names its own checkpoint.
    for step, name in ((25, base), (50, run / "checkpoint-25")):
        edit(run / f"checkpoint-{step}" / "config.json", _name_or_path=str(name))
    assert find_series(RunConfig(run))[0].base.path == str(base)
    shutil.rmtree(run / "checkpoint-25")
    assert "hard-00050 stands in" in find_series(RunConfig(run))[1]


def test_adapters_name_their_base(trl_run: Path, tmp_path: Path) -> None:
    base = trl_run.parent / "base"
    save_adapter(base, tmp_path / "lora" / "checkpoint-5")
    series, origin = find_series(RunConfig(tmp_path / "lora"))
    assert [(c.id, c.step) for c in series] == [("base", 0), ("lora-00005", 5)]
    assert origin == f"the base is {base}"
    adapter, whole = (Tokens(checkpoint, ImportConfig()) for checkpoint in (series["lora-00005"], series.base))
    assert (adapter.context, adapter.ends) == (whole.context, whole.ends) == (128, {19})


@pytest.fixture
def hub_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The testbed's base as a Hugging Face id that lies in the cache: a question to the network fails the test."""
    cached(tmp_path / "hub", "org/arithmetic", {"main": {"": SHIPPED / "base"}})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return "org/arithmetic"


@pytest.mark.slow  # runs the whole pipeline
@pytest.mark.filterwarnings("ignore::FutureWarning")  # what peft asks of transformers is deprecated there
def test_adapters_over_a_base_in_the_cache(
    trl_run: Path, hub_base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = tmp_path / "lora"
    shutil.copytree(trl_run / "completions", run / "completions")
    for step in (25, 50):
        adapter = save_adapter(SHIPPED / "base", run / f"checkpoint-{step}", seed=step, lora_alpha=1)
        edit(adapter / "adapter_config.json", base_model_name_or_path=hub_base)
    config = replace(TINY, path=run, tokens=9_000, to=tmp_path / "out")
    lines, diff = analysed(config)
    assert lines[0].startswith("series:      3 checkpoints; the base is org/arithmetic; compared with it: lora-00050")
    assert lines[-1].endswith("report.html")
    # Readers are the base, and the base with its adapter: by hand, merged.
    store = tsae.ActivationStore(tmp_path / "out" / "activations")
    site = next(iter(store.manifest["sites"]))
    base, under = (AutoModelForCausalLM.from_pretrained(SHIPPED / "base") for _ in range(2))
    merged = PeftModel.from_pretrained(under, run / "checkpoint-50").merge_and_unload().eval()
    for reader, whole in (("base", base), ("lora-00050", merged)):
        shard = next(iter(store.shards(reader)))
        ids = torch.from_numpy(shard.token_ids[: shard.offsets[1]].astype(np.int64))[None]
        expected = whole(ids, output_hidden_states=True).hidden_states[2][0].detach().numpy()
        np.testing.assert_allclose(shard.read(site, slice(0, shard.offsets[1])), expected, atol=1e-4)
    assert (diff.shifts.checkpoint == "lora-00050").any()
    shutil.rmtree(tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(TsaeError, match=r"lora: names org/arithmetic as its base, which cannot be used: .*--base"):
        analysed(config, to=tmp_path / "without")
    assert not (tmp_path / "without").exists()


@pytest.mark.parametrize("choice", [{"d_sae": 3}, {"d_sae": 32, "k": 64}, {"training_tokens": 10**12}])
def test_an_sae_that_cannot_be_trained_is_refused_before_the_capture(choice: dict[str, int]) -> None:
    refuses(r"SAEConfig|TrainingConfig", RunConfig, Path("run"), **choice)


def test_a_run_that_cannot_be_analysed_says_why(trl_run: Path, tiny: RunConfig, tmp_path: Path) -> None:
    def fails(config: RunConfig, match: str) -> None:
        refuses(match, analysed, config, to=tmp_path / "out")
        assert not (tmp_path / "out").exists()

    (tmp_path / "empty").mkdir()
    fails(replace(TINY, path=tmp_path / "empty"), r"no checkpoints.*output_dir")
    fails(replace(tiny, base=str(tmp_path / "gone")), r"gone: no such folder")
    fails(replace(tiny, path=trl_run, log=tmp_path / "gone"), r"gone: no such log")

    one = tmp_path / "one"
    shutil.copytree(trl_run / "checkpoint-50", one / "checkpoint-50")
    fails(replace(TINY, path=one), r"holds one checkpoint, .*\(--base\)")
    fails(replace(tiny, path=one), r"holds no rollout log.*log_completions=True")

    shutil.copytree(trl_run / "completions", one / "completions")
    (one / "checkpoint-50" / "tokenizer.json").unlink()
    refuses(r"checkpoint-50: holds no tokenizer", analysed, tiny, path=one, to=tmp_path / "out")
    refuses(r"inside the folder that is searched", analysed, tiny, to=tiny.path / "completions" / "out")


# --- a log that does not agree with itself


def test_strict_refuses_what_does_not_agree(
    trl_run: Path, tiny: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Completions that stand one row below their own, as an option of the command; nothing is imported."""
    (tmp_path / "completions").mkdir()
    for file in sorted((trl_run / "completions").glob("*.parquet"))[:3]:
        one_row_below(file, tmp_path / "completions")
    to = tmp_path / "out"
    asked = ["--log", str(tmp_path / "completions"), "--to", str(to), "--noisy-rewards", "--strict"]
    told = fails(capsys, "run", trl_run, "--base", tiny.base, *asked).err
    assert "does not agree with itself" in told
    assert "answers: " in told
    assert not list((to / "rollouts").glob("*.parquet"))


@pytest.mark.slow  # runs the whole pipeline
def test_the_page_says_that_a_log_does_not_agree(finished: Finished) -> None:
    _, _, diff = finished
    assert not any("rollout log" in sentence for finding in findings(diff) for sentence in finding.sentences)
    looked = {"answers": {"compared": 9, "disagrees": True, "line": "answers: <b>9</b>"}}
    told = replace(diff, info={**diff.info, "second_look": looked})
    page = rendered(told, {})
    assert "The log that was imported" in page
    assert "does not agree with itself (answers)" in page
    assert "<li>answers: &lt;b&gt;9&lt;/b&gt;</li>" in page
    sentences = [sentence for finding in findings(told) for sentence in finding.sentences]
    assert "The rollout log does not agree with itself: answers." in sentences
    nothing = {"answers": {"compared": 0, "disagrees": False, "line": "answers: not compared"}}
    assert "cannot be checked" in rendered(replace(diff, info={**diff.info, "second_look": nothing}), {})
    assert "Rollout log" not in rendered(replace(diff, info={**diff.info, "second_look": None}), {})


# --- which reward, which bands, which problems


@pytest.mark.slow  # runs the whole pipeline
def test_of_several_rewards_the_one_that_is_named_for_it(tiny: RunConfig, tmp_path: Path) -> None:
    source = pq.read_table(SHIPPED / "logs/hard/completions/completions_00025.parquet")
    place = source.column_names.index("correct")

    def with_rewards(folder: str, *names: str) -> Path:
        table = source.rename_columns([names[0] if n == "correct" else n for n in source.column_names])
        for name in names[1:]:
            table = table.add_column(place + 1, name, pa.array(np.zeros(len(table))))
        (tmp_path / folder).mkdir()
        pq.write_table(table, tmp_path / folder / "completions_00025.parquet")
        return tmp_path / folder

    log = with_rewards("two", "accuracy_reward", "think_format_reward")
    config = replace(tiny, log=log, tokens=4_000, to=tmp_path / "out")
    lines, _ = analysed(config)
    assert "accuracy_reward is above 0 (of accuracy_reward, think_format_reward, by its name)" in lines[1]
    found_part = tsae.Rollouts.read(tmp_path / "out" / "rollouts" / "rollouts.parquet")
    part = found_part.frame.drop_duplicates("problem_id")
    assert (
        f" trajectories of {len(part)} problems are read, drawn as many from every band up to 4,000 tokens" in lines[1]
    )
    bands = problem_bands(found_part.frame)
    counts = ", ".join(f"{band} {(bands == band).sum()}" for band in ("easy", "medium", "hard"))
    assert lines[3].endswith(f"; of those that are read: {counts}")
    assert "; think_format_reward is 0 for every response, and says nothing" in lines[1]
    found = tsae.Rollouts.read(tmp_path / "out" / "rollouts" / "log.parquet")
    np.testing.assert_array_equal(found.frame.outcome == "success", np.asarray(source["correct"]) > 0)

    vague = with_rewards("vague", "quality", "length")
    refuses(r"rewards quality, length.*--outcome", analysed, config, log=vague, to=tmp_path / "vague-out")
    named = replace(tiny.importing, outcome="quality")
    lines, _ = analysed(config, log=vague, importing=named, to=tmp_path / "named")
    assert "quality is above 0 (as asked)" in lines[1]


@pytest.mark.slow  # runs the whole pipeline
def test_bands_that_are_training_steps(tiny: RunConfig, tmp_path: Path) -> None:
    """The medium run solves from step 25 on what it did not at step 1; each problem is asked at one step."""
    run, logged = tmp_path / "medium", SHIPPED / "logs" / "medium" / "completions"
    for step in (25, 150):
        shutil.copytree(SHIPPED / f"medium-{step:03d}", run / f"checkpoint-{step}")
    shutil.copytree(logged, run / "completions")
    config = replace(tiny, path=run, to=tmp_path / "out")
    lines, diff = analysed(config)
    refused = diff.info["bands"]["refused"]
    assert lines[3].startswith(
        "bands:       bands and training steps cannot be separated: the training step explains 7"
    )
    assert "Give the base's own pass rates on these problems (--bands-from)" in lines[3]
    assert diff.info["bands"]["confounded_with_step"]["table"].keys() == {"easy", "medium", "hard"}
    of_bands = diff.contrasts[diff.contrasts.band != "all"]
    assert len(of_bands)
    assert set(of_bands.note) == {refused}
    assert "of bands not (bands are steps)" in lines[8]

    # With the base's own pass rates, measured elsewhere.
    whole = tmp_path / "out" / "rollouts" / "log.parquet"
    log = tsae.Rollouts.read(whole)
    first = log.frame.drop_duplicates("problem_id").index
    rng = np.random.default_rng(0)
    rate = rng.permutation(np.tile([0.05, 0.5, 0.95], len(first))[: len(first)])
    rows = np.repeat(first, 16)
    right = rng.random(len(rows)) < np.repeat(rate, 16)
    other = log.select(np.asarray(rows)).with_column("outcome", np.where(right, "success", "failure"))
    # Ids of their own: problems are known by their prompts.
    other = other.with_column("policy", ["base"] * len(rows)).with_column("problem_id", [f"q{row}" for row in rows])
    rows_of_base = separate_rollouts(other.write(tmp_path / "base.parquet"), whole, "base")
    assert rows_of_base.problem_id.tolist() == np.repeat(log.frame.problem_id[first], 16).tolist()
    bands, line = band_problems(read_outline(whole), whole, base="base", measured_on=rows_of_base)
    assert "bands were measured on separate rollouts of base" in line
    assert "refused" not in bands.info

    alien = other.with_column("policy", ["another"] * len(rows)).write(tmp_path / "another.parquet")
    with pytest.raises(TsaeError, match=r"another\.parquet: holds nothing that base sampled; policies are another"):
        separate_rollouts(alien, whole, "base")
    alien = other.with_column("prompt_ids", [[1, 2, 3]] * len(rows)).write(tmp_path / "elsewhere.parquet")
    refuses(r"elsewhere\.parquet: asks none of the problems of log\.parquet", separate_rollouts, alien, whole, "base")
    # The option says the same, before anything is read.
    refuses("asks none of the problems", analysed, config, to=tmp_path / "no", bands_from=alien)


@pytest.mark.slow  # runs the whole pipeline
def test_bands_from_elsewhere_are_contrasted_and_the_own_kept_beside(
    tiny: RunConfig, finished: Finished, tmp_path: Path
) -> None:
    own, frame = finished[2], tsae.Rollouts.read(finished[0] / "rollouts" / "log.parquet").frame
    first = frame.drop_duplicates("problem_id").prompt
    rates = {prompt: (0.1, 0.5, 0.9)[i % 3] for i, prompt in enumerate(first)}
    rows = [{"problem": prompt, "rate": rate, "stars": round(5 - 4 * rate)} for prompt, rate in rates.items()]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    source = BandSource(
        difficulty=tmp_path / "data.jsonl", difficulty_column="rate", difficulty_model="X", bands_column="stars"
    )
    out = tmp_path / "out"
    lines, _ = analysed(tiny, source=source, to=out, attribute=False)
    told = next(line for line in lines if line.startswith("bands:"))
    assert f"bands are the difficulty for model X (rate of data.jsonl); {len(rows) - 1} problems are matched, 0" in told
    assert "1 problems have no band" in told
    assert "kept beside, own: problems: easy 10" in told
    answers = tsae.Rollouts.read(out / "rollouts" / "rollouts.parquet")
    band = {prompt: {0.1: "hard", 0.5: "medium", 0.9: "easy"}[rate] for prompt, rate in list(rates.items())[1:]}
    assert answers.frame.band.equals(answers.frame.prompt.map(band))
    levels = answers.by("level").frame.band
    assert levels.equals(answers.frame.band)  # five stars are hard
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Easy, medium and hard are the difficulty for model X" in page
    assert "Easy, medium and hard are the difficulty for model X here." in str(claims_of(out))
    given = f"--features {out / 'features'} --to {tmp_path / 'own'} --by own --n-bootstrap 100 --n-permutations 100"
    main(["diff", *given.split()])
    again = tsae.FeatureDiff.load(tmp_path / "own", features=tsae.FeatureTable.load(out / "features"))
    assert again.info["bands"]["reference"] == own.info["bands"]["reference"]
    there = set(answers.by("own").frame.band.dropna())
    assert there == {band for band in again.contrasts.band if band in ("easy", "medium", "hard")} > {"easy"}
    back, _ = analysed(tiny, source=source, by="own", to=tmp_path / "back", attribute=False)
    assert "problems: easy 10, medium 10, hard 92" in next(line for line in back if line.startswith("bands:"))


@pytest.mark.slow  # runs the whole pipeline
def test_a_run_without_a_success(tiny: RunConfig, tmp_path: Path) -> None:
    source = pq.read_table(SHIPPED / "logs/hard/completions/completions_00001.parquet")
    place = source.column_names.index("correct")
    (tmp_path / "log").mkdir()
    failed = source.set_column(place, "correct", pa.array(np.zeros(len(source))))
    pq.write_table(failed, tmp_path / "log" / "completions_00001.parquet")
    lines, diff = analysed(tiny, log=tmp_path / "log", tokens=4_000, to=tmp_path / "out")
    assert "there is no success" in lines[1]
    assert lines[3].startswith("bands:       none: every response is wrong, so that no problem is harder than another")
    outcome = diff.contrasts[diff.contrasts.kind == "outcome"]
    assert set(outcome.note) == {"0 problems have both outcomes; 8 are needed"}
    assert "not (too few problems): all, all success" in lines[8]
    assert (tmp_path / "out" / "report.html").is_file()


def test_problems_are_drawn_whole_and_in_turn_from_every_band() -> None:
    outline = make_rollouts(n_problems=40, n_samples=4).frame
    bands = ["easy"] * 4 + ["medium"] * 8 + ["hard"] * 28
    outline["band"] = [bands[int(problem[1:])] for problem in outline.problem_id]
    length = outline.prompt_length + outline.response_length
    assert draw_problems(outline, int(length.sum()), 0, "log").all()
    budget = int(length.sum()) * 6 // 10
    rows = draw_problems(outline, budget, 0, "log")
    drawn = outline[rows]
    assert set(drawn.groupby("problem_id").size()) == {4}
    total = int((drawn.prompt_length + drawn.response_length).sum())
    assert budget - 4 * 18 < total <= budget  # No further problem of 4 × at most 18 tokens fits.
    counts = drawn.drop_duplicates("problem_id").band.value_counts()
    assert (counts["easy"], counts["medium"]) == (4, 8)  # The small bands are exhausted before the large one.
    assert 4 <= counts["hard"] < 28
    few = outline[draw_problems(outline, budget // 3, 0, "log")].drop_duplicates("problem_id").band.value_counts()
    assert max(few) - min(few) <= 1
    assert (draw_problems(outline, budget, 0, "log") == rows).all()
    assert (draw_problems(outline, budget, 1, "log") != rows).any()
    refuses("log: the shortest response has", draw_problems, outline, 1, 0, "log")


def test_a_problem_that_is_asked_again_and_again_does_not_take_the_whole_budget() -> None:
    outline = make_rollouts(n_problems=40, n_samples=100).frame.assign(band=None)
    length = (outline.prompt_length + outline.response_length).to_numpy()
    budget = int(length.sum()) // 20  # Two problems with all their responses.
    rows = draw_problems(outline, budget, 0, "log")
    counts = outline[rows].problem_id.value_counts()
    assert counts.min() == 16  # A 24th of the budget holds 8.
    assert len(counts) in (12, 13, 14)
    assert 0.9 * budget < length[rows].sum() <= budget
    places = np.flatnonzero(rows) % 100
    assert places.min() < 10  # from the beginning of training
    assert places.max() > 90  # and its end
    longer = pd.concat([outline, outline[outline.problem_id == "p003"]], ignore_index=True)
    assert (draw_problems(longer, budget, 0, "log")[: len(outline)] == rows).mean() > 0.95
    # One response longer than all that may be read is never drawn; the others of its problem are.
    outline.loc[0, "response_length"] = 10**9
    everything = draw_problems(outline, 10**8, 0, "log")
    assert np.flatnonzero(~everything).tolist() == [0]
    # Where even 16 responses of a problem are too many, some are read.
    assert 0 < draw_problems(outline, 100, 0, "log").sum() < 16


def test_bands_by_thirds_where_the_cutoffs_leave_too_few() -> None:
    outline = make_rollouts(n_problems=36, n_samples=40).frame
    problem = outline.problem_id.str[1:].astype(int).to_numpy()
    nth = np.arange(len(outline)) % 40 // 2 * 7 % 20  # Not sorted; both halves of a problem have the same pass rate.

    def even(successes: Any) -> tuple[Any, str]:
        outcome = np.where(nth < successes[problem], "success", "failure")
        return band_problems(outline.assign(outcome=outcome), "log")

    by_cutoffs = even(np.repeat(np.arange(18) + 1, 2))[1]  # pass rates .05, .10, … .90
    assert by_cutoffs.startswith("problems: easy 8, medium 18, hard 10")
    assert "easy >= 0.75, hard <= 0.25)" in by_cutoffs
    bands, line = even(np.arange(36) // 6 + 7)  # .35 to .60, six of each
    assert line.startswith("problems: easy 12, medium 12, hard 12")
    assert "easy >= 0.55, hard <= 0.4; thirds, since the usual cut-offs leave a band with fewer than 8" in line
    band = problem_bands(bands.rows)
    assert set(band.index[band == "easy"]) == {f"p{i:03d}" for i in range(24, 36)}


def test_bands_of_one_response_each_are_none() -> None:
    bands, line = band_problems(make_rollouts(n_problems=12, n_samples=1).frame, "log")
    assert bands is None
    assert line.startswith("none: no problem falls into the band easy or medium or hard: no problem has two responses")


def test_the_sae_by_what_there_is(store: Any) -> None:
    tokens = sum(shard.n_tokens for shard in store.shards())
    sae, training, why = choose_sae(store, TINY)
    assert (sae.d_sae, sae.k, training.tokens, why) == (32, 4, 20_000, "")
    sae, training, why = choose_sae(store, replace(TINY, d_sae=None, k=None, training_tokens=None))
    # d_model 16: k = 4, the least; tokens · 4 / 1000 latents are fewer than the least width.
    assert tokens * 4 // 1000 < 32
    assert (sae.d_sae, sae.k, training.tokens, training.batch_tokens, why) == (
        32,
        4,
        20 * tokens,
        1024,
        "width by data",
    )


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is missing: pip install 'tsae[rl]'")
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        pytest.param("anonymous", "as asked", marks=pytest.mark.slow(ci=True)),
        pytest.param("lora", "", marks=pytest.mark.slow),
        pytest.param("full", "by README.md", marks=pytest.mark.slow),
    ],
)
def test_what_trl_leaves_is_all_that_it_takes(kind: str, told: str, hub_base: str, tmp_path: Path) -> None:
    """Two steps of GRPOTrainer, saved and logged at each; a process of its own, as TRL warns and prints a lot. A model
    of a Hugging Face id, whole or as an adapter, needs nothing but the folder."""
    script, run = tmp_path / "train.py", tmp_path / "grpo"
    script.write_text(TRAIN)
    subprocess.run(
        [sys.executable, str(script), str(SHIPPED / "base") if kind == "anonymous" else hub_base, str(run), kind],
        env={**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
        check=True, capture_output=True, timeout=900,
    )  # fmt: skip
    assert {path.name for path in run.iterdir()} >= {"checkpoint-1", "checkpoint-2", "completions"}
    config = replace(TINY, path=run, to=tmp_path / "out")
    lines, diff = analysed(config)
    if kind == "anonymous":
        assert "grpo-00001 stands in for the base" in lines[0]
        # checkpoint-1 sampled what step 2 logged; what step 1 logged is the base's, which is not there.
        rollouts = tsae.Rollouts.read(config.to / "rollouts" / "rollouts.parquet")
        assert rollouts.policies == ["grpo-00000", "grpo-00001"]
        assert [r["id"] for r in diff.info["readers"]] == ["grpo-00001", "grpo-00002"]
        config = replace(config, base=hub_base, to=tmp_path / "with-base")
        lines, diff = analysed(config)
    origin = f"the base is org/arithmetic{told and f' ({told})'}"
    assert f"3 checkpoints; {origin}; compared with it: grpo-00002" in lines[0]
    assert "TRL completions, 128 trajectories of 16 problems" in lines[1]
    assert "correct is above 0 (the log's only reward)" in lines[1]
    rollouts = tsae.Rollouts.read(config.to / "rollouts" / "rollouts.parquet")
    assert rollouts.policies == ["base", "grpo-00001"]
    # Without token ids in the log, the texts are tokenised again, and may not be what was sampled.
    assert not rollouts.frame.round_trip.any()
    assert diff.contrasts[diff.contrasts.part == "same_trajectories"].n_problems.max() == 16
    assert (config.to / "report.html").is_file()


TRAIN = """
import sys
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer
from tsae.testbed import make_tokenizer, verify
from tsae.testbed.chains import generate_problems

base, out, kind = sys.argv[1:]
problems = generate_problems("medium", 16, 0, "train")
def correct(completions, answer, **_):
    return [float(verify(text, right)) for text, right in zip(completions, answer)]
trainer = GRPOTrainer(
    # A model that is given as such says nothing of where it came from.
    model=LlamaForCausalLM.from_pretrained(base, dtype="float32") if kind == "anonymous" else base,
    peft_config=LoraConfig(r=2, target_modules="all-linear") if kind == "lora" else None,
    processing_class=make_tokenizer(),
    reward_funcs=correct,
    train_dataset=Dataset.from_list([{"prompt": p.prompt, "answer": p.answer} for p in problems]),
    args=GRPOConfig(
        output_dir=out, max_steps=2, save_steps=1, save_strategy="steps", per_device_train_batch_size=64,
        num_generations=8, max_completion_length=64, bf16=False, use_cpu=True, gradient_checkpointing=False,
        dataloader_pin_memory=False, report_to="none", disable_tqdm=True, logging_steps=1, log_completions=True,
    ),
)
trainer.train()
"""


# --- a published SAE in place of training one


def plain(folder: Path, to: Path) -> Path:
    """The SAE of a folder as somebody else's: a JumpReLU SAE of sae_lens, of which nothing more is known."""
    tsae.load_sae(folder).to_saelens(to)
    config = json.loads((to / "cfg.json").read_text())
    promised = {"fve": 0.5, "l0": 99.0}
    metadata = {"sae_lens_version": "6.54.0", "hook_name": config["metadata"]["hook_name"], "promised": promised}
    (to / "cfg.json").write_text(json.dumps({**config, "metadata": metadata}))
    return to


@pytest.mark.slow
def test_a_published_sae_in_place_of_training(tiny: RunConfig, finished: Finished, tmp_path: Path) -> None:
    """The analysis with an SAE that was trained before is the one that trained it, number by number."""
    out, _, diff = finished
    sae = plain(out / "sae", tmp_path / "published")
    config = replace(tiny, sae=sae, d_sae=None, k=None, training_tokens=None, to=tmp_path / "out")
    with pytest.warns(UserWarning, match=r"explains 0\.\d\d of the variance .*its makers name FVE 0\.50 and L0 99"):
        lines, found = analysed(config)
    assert next(line for line in lines if line.startswith("sae:")) == (
        "sae:         32 latents, published, not trained here"
    )
    assert not (config.to / "sae" / "training.json").exists()
    assert tsae.load_sae(config.to / "sae").fingerprint == tsae.load_sae(sae).fingerprint
    # But for tokens beyond the norm limit, of which a published SAE says nothing.
    pd.testing.assert_series_equal(found.shifts.delta, diff.shifts.delta, atol=0.05, rtol=0.05)
    page = (config.to / "report.html").read_text()
    assert "temporal weight" not in page
    assert "32 latents" in page
    again, _ = analysed(config)
    assert [line.removesuffix(" [from disk]") for line in again] == lines
    assert all(finding.ok for finding in verify([config.to], progress=False))
    refuses("k=4 is for training an SAE, and sae=", replace, config, k=4)
    # Another one of that name: nothing that was encoded with the first is shown as of the second.
    weights = load_file(sae / "sae_weights.safetensors")
    save_file({name: value * 1.01 for name, value in weights.items()}, sae / "sae_weights.safetensors")
    with pytest.warns(UserWarning, match=r"explains 0\.\d\d of the variance"):
        lines, _ = analysed(config)
    assert any(line.startswith("made anew:   sae, ") for line in lines)
    assert tsae.FeatureTable.load(config.to / "features").info["sae"]["weights"] == tsae.load_sae(sae).fingerprint
