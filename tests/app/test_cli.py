"""The command line: every stage from the files of the one before, and errors of one paragraph."""

from __future__ import annotations

import io
import itertools
import json
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import tsae
from support.builders import BOS, EOS, SHARED
from support.cli import COMMANDS, SITE, run
from tsae.cli import main
from tsae.rollouts.problems import Problem, write_problems


def fails(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """The message of a command that a user can put right: status 2 and one paragraph."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        run(*args)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    paragraphs = [line for line in said.splitlines() if line.startswith("tsae: ")]
    assert len(paragraphs) == 1
    return paragraphs[0]


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """What --help prints of every command, in a terminal of 90 columns: wide enough for one column of boxes alone."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "90")
        for command in COMMANDS:
            said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)  # boxes are drawn in UTF-8 only
            with redirect_stdout(said), pytest.raises(SystemExit) as stopped:
                main([*command, "--help"])
            assert stopped.value.code == 0, command
            found[" ".join(command)] = said.buffer.getvalue().decode()
    return found


def test_help_is_there(helps: dict[str, str]) -> None:
    for command, said in helps.items():
        assert f"usage: {' '.join(['tsae', *command.split()])}" in said


def test_help_is_wrapped_for_the_terminal_alone(helps: dict[str, str]) -> None:
    """Lines end where the terminal does, not where the source does: the next word would not have fitted."""
    n_wrapped = 0
    for command, said in helps.items():
        inside = [line[2:-2] for line in said.splitlines() if line.startswith("│") and line.endswith("│")]
        for line, following in itertools.pairwise(inside):
            # A text stands beside its option, two spaces on, or below it and deeper.
            text = line.startswith("     ") or "  " in line.strip()
            if text and line.strip() and following.strip() and following.startswith("     "):
                n_wrapped += 1
                assert len(f"{line.rstrip()} {following.split()[0]}") > len(line), (command, line, following)
    assert n_wrapped > 100


def test_options_that_errors_name_exist(helps: dict[str, str]) -> None:
    named = {
        option
        for file in Path(tsae.__file__).parent.rglob("*.py")
        for option in re.findall(r"\((--[a-z][a-z.-]*)|, (--[a-z][a-z.-]*)\)", file.read_text(encoding="utf-8"))
        for option in option
        if option
    }
    assert "--dtype" in named
    offered = set(re.findall(r"--[a-z][a-z.-]*", "".join(helps.values())))
    assert named <= offered


@pytest.mark.slow
def test_a_diff_says_more_where_it_is_asked(pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("diff", "--features", pipeline / "features", "--to", tmp_path / "diff", "--tokenizer", pipeline / "series",
        "--annotator", "support.cli:classes", "--families", "--store", pipeline / "acts",
        "--compare", pipeline / "diff", "--markdown", tmp_path / "diff.md",
        "--fdr", "by", "--n-permutations", 500, "--n-bootstrap", 200)  # fmt: skip
    said = capsys.readouterr().out
    assert "Families of features" in said
    assert "linear probe" in said
    assert "Against" in said
    assert (tmp_path / "diff" / "baselines.parquet").is_file()
    assert (tmp_path / "diff.md").read_text(encoding="utf-8").startswith("| kind | checkpoint |")
    diff = tsae.FeatureDiff.load(tmp_path / "diff")
    assert set(diff.features.family) <= {"numbers", "none"}
    assert set(diff.confounds.control) == {"length", "position", "token"}
    # Of its own p-values: --fdr by may draw more permutations than the other, which moves them.
    for method, found in (("by", diff), ("bh", tsae.FeatureDiff.load(pipeline / "diff"))):
        for _, rows in found.shifts.groupby(["kind", "checkpoint", "part", "band", "outcome"]):
            expected = stats.false_discovery_control(rows.p, method=method)
            np.testing.assert_allclose(rows.q, expected)


def test_every_stage_wrote_what_the_next_reads(pipeline: Path) -> None:
    rollouts = tsae.Rollouts.read(pipeline / "rollouts.parquet")
    assert rollouts.policies == ["base", "run-5"]
    assert len(rollouts) == 2 * 24 * 6
    assert set(rollouts.frame.band.dropna()) == {"easy", "medium", "hard"}
    assert rollouts.frame.advantage.notna().all()
    store = tsae.ActivationStore(pipeline / "acts")
    assert store.sites == [SITE]
    assert store.readers == ["base", "run-5"]
    features = tsae.FeatureTable.load(pipeline / "features")
    assert features.n_rows == 288 + 288
    diff = tsae.FeatureDiff.load(pipeline / "diff", features=features)
    assert diff.checkpoints == ["run-5"]
    assert set(diff.shifts.kind) == {"shift", "outcome", "interaction"}
    assert set(diff.features.responds_to) <= {"digit", "other", "prompt", "never active", "rare tokens"}
    assert (diff.table(kind="shift", part="total", band="all", outcome="all").q <= 0.05).any()
    for folder in ("acts", "sae", "features"):
        record = json.loads((pipeline / folder / "run.json").read_text())
        assert record["versions"]["torch"] == torch.__version__
    assert not list(pipeline.rglob("*.tmp"))


def test_the_report_opens_without_a_network(pipeline: Path) -> None:
    page = (pipeline / "report.html").read_text(encoding="utf-8")
    assert "<title>Tiny" in page
    assert "run-5" in page
    markup = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert len(markup) < len(page)
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", markup)
    assert not re.search(r"<script[^>]*\ssrc", page)


def test_evaluation_prints_and_writes_what_was_measured(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    run("evaluate", "--sae", pipeline / "sae", "--store", pipeline / "acts", "--readers", "run-5",
        "--json", tmp_path / "numbers.json")  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    expected = tsae.evaluate(pipeline / "sae", tsae.ActivationStore(pipeline / "acts").subset(readers="run-5"))
    assert f"{expected.n_tokens:,} tokens" in lines[0]
    fve = next(line for line in lines if line.startswith("FVE ")).split()
    assert [float(value) for value in fve[1:]] == pytest.approx([expected.fve, expected.fve_high], abs=1e-4)
    written = json.loads((tmp_path / "numbers.json").read_text())
    assert written["evaluation"]["fve"] == pytest.approx(expected.fve)


def test_training_says_what_it_mixed_and_what_ends_a_step(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("train", "--store", pipeline / "acts", "--d-sae", 16, "--k", 2, "--tokens", 4000, "--batch-tokens", 500)
    steps = (*command, "--partner", "step")
    capsys.readouterr()
    run(*steps, "--to", tmp_path / "a", "--tokenizer", pipeline / "series", "--step-text", ";", "--balance", "band")
    said = capsys.readouterr().out
    info = json.loads((tmp_path / "a" / "training.json").read_text())
    semicolon = tsae.CheckpointSeries.load(pipeline / "series").base.load_tokenizer().convert_tokens_to_ids(";")
    assert (info["training"]["partner"], info["training"]["step_ends"]) == ("step", [semicolon])
    assert [cell["band"] for cell in info["mixture"]] == ["easy", "medium", "hard"]
    for cell in info["mixture"]:
        line = f"band {cell['band']}: {cell['tokens']:,} tokens, each read {cell['weight']:.2f} times an epoch"
        assert line in said.splitlines()
    run(*steps, "--to", tmp_path / "b", "--step-ends", semicolon, "--balance", "band")
    assert (tmp_path / "b" / "sae.safetensors").read_bytes() == (tmp_path / "a" / "sae.safetensors").read_bytes()
    run(*command, "--to", tmp_path / "c", "--balance")
    assert json.loads((tmp_path / "c" / "training.json").read_text())["mixture"] == [
        {"tokens": info["tokens_in_store"], "weight": 1.0}
    ]


def test_samples_that_push_features_are_named(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    run("reinforcement", "--features", pipeline / "features", "--diff", pipeline / "diff", "--to", tmp_path / "found",
        "--n-permutations", 100, "--n-bootstrap", 100)  # fmt: skip
    said = capsys.readouterr().out
    expected = tsae.reinforcement(pipeline / "features", tsae.DiffConfig(n_permutations=100, n_bootstrap=100))
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "found" / "reinforcement.parquet"), expected.table)
    compared = expected.compare(tsae.FeatureDiff.load(pipeline / "diff"))
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "found" / "predicted.parquet"), compared)
    whole = compared[(compared.predicted_on == "all") & (compared.part == "policy")].iloc[0]
    assert f"{whole.rho:+.2f} [{whole.low:+.2f}, {whole.high:+.2f}]" in said
    assert "group mixed" in said
    run("reinforcement", "--features", pipeline / "features", "--to", tmp_path / "found", "--n-permutations", 100,
        "--n-bootstrap", 100)  # fmt: skip
    assert not (tmp_path / "found" / "predicted.parquet").exists()
    capsys.readouterr()

    feature = str(expected.table.feature.iloc[0])
    given = ("--series", pipeline / "series", "--sae", pipeline / "sae", "--features", feature)
    run("influence", *given, "--rollouts", pipeline / "rollouts.parquet", "--to", tmp_path / "pushed")
    said = capsys.readouterr().out
    found = tsae.Influence.load(tmp_path / "pushed")
    assert len(found.table) == 24 * 6
    assert set(found.table.policy) == {"base"}
    assert f"feature {feature}, mean" in said
    assert f"total {found.table.total.sum():+.4g}" in said
    assert f"row {found.top(int(feature), 1).trajectory.item()}, chain:" in said
    message = fails(capsys, "influence", *given, "--rollouts", pipeline / "rollouts.parquet", "--checkpoint", "other")
    assert "no checkpoint 'other'" in message
    tsae.Rollouts.read(pipeline / "rollouts.parquet").where(policy="run-5").write(tmp_path / "run.parquet")
    assert "holds nothing that base sampled; policies are run-5" in fails(
        capsys, "influence", *given, "--rollouts", tmp_path / "run.parquet"
    )


def test_the_same_commands_write_the_same_bytes(pipeline: Path, tmp_path: Path) -> None:
    run("capture", "--series", pipeline / "series", "--rollouts", pipeline / "rollouts.parquet", "--to", tmp_path / "a")
    for file in (pipeline / "acts").rglob("*.h5"):
        assert (tmp_path / "a" / file.relative_to(pipeline / "acts")).read_bytes() == file.read_bytes()
    run("encode", "--sae", pipeline / "sae", "--store", tmp_path / "a", "--to", tmp_path / "features")
    run("diff", "--features", tmp_path / "features", "--to", tmp_path / "diff", "--tokenizer", pipeline / "series",
        "--annotator", "support.cli:classes", "--min-problems", 5,
        "--n-permutations", 500, "--n-bootstrap", 200)  # fmt: skip
    for name in ("shifts.parquet", "contrasts.parquet", "diff.json"):
        assert (tmp_path / "diff" / name).read_bytes() == (pipeline / "diff" / name).read_bytes()


def test_a_log_is_imported_and_its_tokenizer_remembered(pipeline: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"q": "1+1?", "a": "#2", "ok": True}) + "\n")
    run("rollouts", "import", log, "--checkpoint", pipeline / "series", "--to", tmp_path / "in.parquet",
        "--column", "prompt=q", "--column", "response=a", "--column", "correct=ok", "--run", "gpt")  # fmt: skip
    found = tsae.Rollouts.read(tmp_path / "in.parquet")
    assert found.policies == ["gpt"]
    assert found.info["tokenizer"] == tsae.Rollouts.read(pipeline / "raw.parquet").info["tokenizer"]


def test_drift_says_where_training_wrote(pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    run("drift", "--series", pipeline / "series", "--to", tmp_path / "drift")
    said = capsys.readouterr().out
    table = pd.read_parquet(tmp_path / "drift" / "drift.parquet")
    expected = tsae.weight_drift(tsae.CheckpointSeries.load(pipeline / "series"), progress=False)
    pd.testing.assert_frame_equal(table, expected, check_dtype=False)
    whole = np.sqrt((table.update_norm**2).sum() / (table.base_norm**2).sum())
    assert f"{100 * whole:.3g} %" in next(line for line in said.splitlines() if line.startswith("  run-5"))
    assert re.search(r"\n  mlp\.up_proj +\d", said)
    assert re.search(r"\n  2 +\d", said)
    page = (tmp_path / "drift" / "drift.html").read_text(encoding="utf-8")
    assert "Where training wrote" in page
    assert '"heatmap"' in page
    said = fails(capsys, "drift", "--series", pipeline / "series" / "base")
    assert "there is nothing but the base" in said


def test_difficulty_is_measured_along_the_run(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    run("rollouts", "difficulty", "--rollouts", pipeline / "rollouts.parquet", "--series", pipeline / "series",
        "--shares", 0.1, 0.1, "--k", 1, 3, "--n-draws", 200, "--to", tmp_path / "out")  # fmt: skip
    said = capsys.readouterr().out
    assert "(the easiest 10% and the hardest 10% for base)" in said
    assert "base → run-5:" in said
    assert set(pd.read_parquet(tmp_path / "out" / "pass_at_k.parquet").k) == {1, 3}
    assert (tmp_path / "out" / "difficulty.html").is_file()
    run("rollouts", "bands", "--rollouts", pipeline / "raw.parquet", "--to", tmp_path / "b.parquet",
        "--reference", "base", "--shares", 0.1, 0.1)  # fmt: skip
    assert tsae.Rollouts.read(tmp_path / "b.parquet").info["bands"]["quantiles"] == {"easy": 0.1, "hard": 0.1}


def test_features_are_tested_causally(pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    features = tsae.FeatureTable.load(pipeline / "features")
    fired = np.asarray(features.codes[np.flatnonzero(features.span_mask("response"))].sum(axis=0)).ravel()
    feature = int(fired.argmax())
    causal = ("causal", "--series", pipeline / "series", "--sae", pipeline / "sae", "--features", pipeline / "features",
              "--verifier", "support.cli:lucky", "--n-samples", 2, "--max-new-tokens", 6, "--n-random", 2)  # fmt: skip
    capsys.readouterr()
    options = ("--checkpoint", "run-5", "--choose", feature, "--problems", pipeline / "problems.jsonl")
    run(*causal, *options, "--store", pipeline / "acts", "--raised", "run-5", "--lowered", "base",
        "--mode", "steer", "--amount", 3, "--to", tmp_path / "out")  # fmt: skip
    said = capsys.readouterr().out
    found = tsae.Intervention.load(tmp_path / "out")
    assert found.info["features"] == [feature]
    assert {"features", "random", "same_norm", "wrong_sign", "mean_difference"} < set(found.outcomes.condition)
    assert f"Steering (+3 × typical) feature {feature} in run-5" in said
    assert found.summary("accuracy") in said
    assert json.loads((tmp_path / "out" / "causal.json").read_text())["record"]["features"] == [feature]

    run("report", "--diff", pipeline / "diff", "--to", tmp_path / "r.html", "--causal", tmp_path / "out")
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert f"Steering (+3 × typical) feature {feature} in run-5" in page
    assert "1 feature causally tested, the others not" in page

    raised = ("--checkpoint", "base", "--diff", pipeline / "diff", "--raised", "base", "--lowered", "run-5")
    assert "no feature was raised by base" in fails(capsys, *causal, *raised, "--to", tmp_path / "no")
    assert "no features chosen" in fails(capsys, *causal, "--checkpoint", "base", "--to", tmp_path / "no")
    lacking = (*causal, "--checkpoint", "base", "--choose", feature, "--store", pipeline / "acts")
    assert "only with --raised and --lowered" in fails(capsys, *lacking, "--to", tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_behaviours_are_read_off_the_texts(pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    run("rollouts", "behaviours", "--rollouts", pipeline / "rollouts.parquet", "--to", tmp_path / "b.parquet",
        "--required-steps", "support.cli:two_steps")  # fmt: skip
    said = capsys.readouterr().out
    found = tsae.Rollouts.read(tmp_path / "b.parquet")
    assert {"looping", "unanswered", "skipped_steps", "relative_length"} <= set(found.info["behaviours"])
    assert found.fingerprint == tsae.Rollouts.read(pipeline / "rollouts.parquet").fingerprint
    assert "skipped steps" in said
    assert "Formats (entropy in bits" in said
    assert re.search(r"run-5 +all +\d\.\d\d", said)
    said = fails(capsys, "rollouts", "behaviours", "--rollouts", tmp_path / "b.parquet", "--required-steps", "no:f")
    assert "required_steps" in said


# --- errors


def copied(pipeline: Path, tmp_path: Path, name: str) -> Path:
    return Path(shutil.copytree(pipeline / name, tmp_path / name))


def test_a_checkpoint_without_tokenizer_or_weights(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file, message in (("tokenizer.json", "holds no tokenizer"), ("model.safetensors", "holds no weights")):
        series = tmp_path / file / "series"
        shutil.copytree(pipeline / "series", series)
        (series / "run-5" / file).unlink()
        said = fails(capsys, "capture", "--series", series, "--rollouts", pipeline / "rollouts.parquet",
                     "--to", tmp_path / "acts")  # fmt: skip
        assert message in said
        assert str(series / "run-5") in said
        assert not (tmp_path / "acts").exists()
        said = fails(capsys, "rollouts", "sample", "--series", series, "--problems", pipeline / "problems.jsonl",
                     "--to", tmp_path / "r.parquet", "--n-samples", 1, "--max-new-tokens", 2)  # fmt: skip
        assert message in said
        assert not (tmp_path / "r.parquet").exists()


def test_a_rollouts_file_with_missing_columns(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import pyarrow.parquet as pq

    table = pq.read_table(pipeline / "rollouts.parquet").drop_columns(["response_ids", "outcome"])
    pq.write_table(table, tmp_path / "bad.parquet")
    for command in (("capture", "--series", pipeline / "series"), ("rollouts", "bands")):
        said = fails(capsys, *command, "--rollouts", tmp_path / "bad.parquet", "--to", tmp_path / "out")
        assert f"{tmp_path / 'bad.parquet'}: lacks the columns response_ids, outcome" in said
        assert not (tmp_path / "out").exists()


def test_a_store_whose_width_does_not_fit(pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tsae.sae.model import TemporalSAE

    TemporalSAE(24, tsae.SAEConfig(d_sae=32, k=2), site=SITE).save(tmp_path / "wide")
    for command in ("encode", "evaluate"):
        to = ("--to", tmp_path / "features") if command == "encode" else ()
        said = fails(capsys, command, "--sae", tmp_path / "wide", "--store", pipeline / "acts", *to)
        assert f"{pipeline / 'acts'}: {SITE} has d_model 16, the SAE expects 24" in said
    assert not (tmp_path / "features").exists()


def test_what_ends_a_step_must_be_known(pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("train", "--store", pipeline / "acts", "--to", tmp_path / "sae")
    tokenizer = ("--tokenizer", pipeline / "series")
    assert "needs the ids of the tokens that end a step" in fails(capsys, *command, "--partner", "step")
    for wrong in (tokenizer, ("--step-text", ";"), ("--partner", "step", "--step-ends", 15, *tokenizer)):
        assert "--tokenizer and --step-text say together" in fails(capsys, *command, *wrong)
    said = fails(capsys, *command, "--partner", "step", *tokenizer)
    assert r"its tokenizer has no token whose text contains '\n'" in said
    store = copied(pipeline, tmp_path, "acts")
    rollouts = tsae.Rollouts.read(store / "rollouts.parquet")
    tsae.Rollouts(rollouts.table, {**rollouts.info, "tokenizer": "beef"}).write(store / "rollouts.parquet")
    said = fails(capsys, "train", "--store", store, "--to", tmp_path / "sae", "--partner", "step", *tokenizer)
    assert "is not the one that the trajectories were tokenised with (beef)" in said
    assert not (tmp_path / "sae").exists()


def test_an_empty_band(pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = fails(capsys, "rollouts", "bands", "--rollouts", pipeline / "raw.parquet", "--to", tmp_path / "r.parquet",
                 "--easy", 1.0, "--hard", 0.0)  # fmt: skip
    assert "no problem falls into the band" in said
    assert not (tmp_path / "r.parquet").exists()
    said = fails(capsys, "diff", "--features", pipeline / "features", "--to", tmp_path / "diff", "--bands", "trivial")
    assert "no problem is in the band 'trivial'" in said
    assert not (tmp_path / "diff").exists()


def test_configs_are_checked_before_anything_runs(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for args, message in (
        (("train", "--store", pipeline / "acts", "--to", tmp_path / "x", "--k", 9000), "k=9000 exceeds d_sae=4096"),
        (("train", "--store", tmp_path, "--to", tmp_path / "x"), "no activation store"),
        (("train", "--store", pipeline / "acts", "--to", tmp_path / "x", "--site", "nope"), "no site 'nope'"),
        (("encode", "--sae", tmp_path, "--store", pipeline / "acts", "--to", tmp_path / "x"), "holds no config.json"),
        (("diff", "--features", tmp_path, "--to", tmp_path / "x"), "holds no features.json"),
        (("diff", "--features", pipeline / "features", "--to", tmp_path / "x", "--annotator", "no:f"), "annotator"),
        (("diff", "--features", pipeline / "features", "--to", tmp_path / "x", "--q", 2.0), "q=2.0"),
        (("report", "--diff", tmp_path, "--to", tmp_path / "x"), "holds no diff.json"),
        (("capture", "--series", tmp_path / "none", "--rollouts", "r", "--to", tmp_path / "x"), "no such folder"),
    ):
        assert message in fails(capsys, *args)
        assert not (tmp_path / "x").exists()


def test_the_console_script_says_one_paragraph(tmp_path: Path) -> None:
    script = Path(sys.executable).parent / "tsae"
    done = subprocess.run([script, "store", "show", tmp_path / "no"], capture_output=True, text=True, timeout=900)
    assert done.returncode == 2
    assert done.stdout == ""
    assert (
        done.stderr
        == f"tsae: {tmp_path / 'no'}: no activation store (no manifest.json). Make one with `tsae capture`.\n"
    )


def test_a_series_without_a_base_says_what_it_assumed(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trainer's output folder, read as it is."""
    for step, source in ((10, "base"), (20, "run-5")):
        shutil.copytree(pipeline / "series" / source, tmp_path / "out" / f"checkpoint-{step}")
    rollouts = tsae.Rollouts.read(pipeline / "rollouts.parquet").where(policy="base")
    rollouts.write(tmp_path / "r.parquet")
    run("capture", "--series", tmp_path / "out", "--rollouts", tmp_path / "r.parquet", "--to", tmp_path / "acts")
    assert "out-00010 (step 10) stands in for the base" in capsys.readouterr().err
    assert tsae.ActivationStore(tmp_path / "acts").readers == ["out-00010", "out-00020"]


def test_a_real_tokenizer_goes_through_the_same_commands(tmp_path: Path) -> None:
    model = SHARED / "models" / "stories260K"
    if not model.is_dir():
        pytest.skip("shared/models/stories260K is not here")
    write_problems([Problem("a", "Once upon a time", "x"), Problem("b", "The", "x")], tmp_path / "p.jsonl")
    run("rollouts", "sample", "--series", model, "--problems", tmp_path / "p.jsonl", "--verifier", "support.cli:lucky",
        "--to", tmp_path / "r.parquet", "--n-samples", 4, "--max-new-tokens", 12)  # fmt: skip
    run("capture", "--series", model, "--rollouts", tmp_path / "r.parquet", "--to", tmp_path / "acts",
        "--dtype", "bfloat16")  # fmt: skip
    store = tsae.ActivationStore(tmp_path / "acts")
    (shard,) = store.shards()
    assert len(shard.trajectory) == 8
    assert np.isfinite(shard.read(store.sites[0], slice(None))).all()
    assert {BOS, EOS}.isdisjoint(store.special_ids)
