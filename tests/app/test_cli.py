"""The command line: stages from the files of those before, JSON for programs, help, and errors of one paragraph."""

from __future__ import annotations

import io
import itertools
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from scipy import stats

import tsae
from support.builders import BOS, EOS, SHARED
from support.cli import SITE, commands, run
from support.refusals import fails
from tsae.cli import main, parse
from tsae.commands.common import as_json
from tsae.errors import needing
from tsae.rollouts.problems import Problem, write_problems
from tsae.sae.model import TemporalSAE


class Shell:
    """Runs commands in which {p} is the folder of the stages, and {t} the test's own."""

    def __init__(self, stages: Path, own: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.places, self.capsys = {"p": stages, "t": own}, capsys

    def __call__(self, command: str) -> str:
        """What a command prints."""
        self.capsys.readouterr()
        run(*command.format(**self.places).split())
        return self.capsys.readouterr().out

    def json(self, command: str) -> Any:
        """What a command prints with --json -, which is JSON alone; its text goes to standard error."""
        self.capsys.readouterr()
        run(*command.format(**self.places).split(), "--json", "-")
        printed = self.capsys.readouterr()
        assert printed.err.strip()
        return json.loads(printed.out)

    def fails(self, command: str) -> str:
        """The message of a command that a user can put right: status 2 and one paragraph."""
        self.capsys.readouterr()
        printed = fails(self.capsys, *command.format(**self.places).split()).err
        assert "Traceback" not in printed
        (paragraph,) = [line for line in printed.splitlines() if line.startswith("tsae: ")]
        return paragraph


@pytest.fixture
def shell(pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(pipeline, tmp_path, capsys)


# --- help


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """What --help-all prints of every command, in 90 columns: wide enough for one column of boxes alone."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "90")
        for command in [(), *commands()]:
            out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)  # boxes are drawn in UTF-8 only
            with redirect_stdout(out), pytest.raises(SystemExit) as stopped:
                main([*command, "--help-all"])
            assert stopped.value.code == 0, command
            found[" ".join(command)] = out.buffer.getvalue().decode()
    return found


def test_help_reads_well(helps: dict[str, str]) -> None:
    for command, text in helps.items():
        assert f"usage: {' '.join(['tsae', *command.split()])}" in text
        assert "None" not in text.replace("or None.", ""), command
        assert "(default: )" not in text, command
        # One word may be longer than the terminal: the list of commands.
        assert all(len(line) <= 90 or " " not in line.strip() for line in text.splitlines()), command
    for name in ("0 done", "2 something", "130 interrupted", "--json -"):
        assert name in " ".join(helps[""].split())


def test_help_is_wrapped_for_the_terminal_alone(helps: dict[str, str]) -> None:
    """Lines end where the terminal does, not where the source does: the next word would not have fitted."""
    n_wrapped = 0
    for command, text in helps.items():
        inside = [line[2:-2] for line in text.splitlines() if line.startswith("│") and line.endswith("│")]
        for line, following in itertools.pairwise(inside):
            # A text stands beside its option, two spaces on, or below it and deeper.
            beside = line.startswith("     ") or "  " in line.strip()
            if beside and line.strip() and following.strip() and following.startswith("     "):
                n_wrapped += 1
                assert len(f"{line.rstrip()} {following.split()[0]}") > len(line), (command, line, following)
    assert n_wrapped > 100


def test_help_shows_what_matters_first(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    def printed(*words: str) -> list[str]:
        with pytest.raises(SystemExit):
            main(list(words))
        return capsys.readouterr().out.splitlines()

    assert all(len(printed(*command, "--help")) < 90 for command in (["capture"], ["train"], ["diff"], ["watch"]))
    short, whole = printed("run", "--help"), printed("run", "--help-all")
    assert len(short) <= 60 < len(whole)
    assert [any("--tokens" in line for line in lines) for lines in (short, whole)] == [True, True]
    assert [any("--rewards" in line for line in lines) for lines in (short, whole)] == [False, True]
    assert re.fullmatch(r"\d+ more options: tsae run --help-all", short[-1])
    assert printed("--help").index("A run") < printed("--help").index("Further questions")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("runn", "there is no command `tsae runn`. Did you mean `run`?"),
        ("rollouts sampel", "Did you mean `sample`?"),
        ("rollouts", "tsae rollouts: a command is missing."),
        ("run x --tokenss 3", "tsae run: there is no option --tokenss. Did you mean `--tokens`?"),
        ("demo --d-sae 3", "Did you mean `--sae.d-sae`?"),
        ("encode", "tsae encode: missing: --sae PATH --to PATH."),
        ("run x --by foo", "Expected one of ('auto', 'own', 'difficulty', 'level')."),
        ("run x --tokens many", "error parsing --tokens: invalid literal for int() with base 10: 'many'."),
        ("run x y", "tsae run: unrecognized options: y."),
    ],
)
def test_a_mistyped_command_is_answered_in_one_paragraph(command: str, message: str, shell: Shell) -> None:
    assert message in shell.fails(command)


def test_options_that_errors_name_exist(helps: dict[str, str]) -> None:
    named = {
        option
        for file in Path(tsae.__file__).parent.rglob("*.py")
        for found in re.findall(r"\((--[a-z][a-z.-]*)|, (--[a-z][a-z.-]*)\)", file.read_text(encoding="utf-8"))
        for option in found
        if option
    }
    assert "--dtype" in named
    assert named <= set(re.findall(r"--[a-z][a-z.-]*", "".join(helps.values())))


def test_none_can_still_be_given() -> None:
    assert parse(["rollouts", "behaviours", "--rollouts", "a", "--to", "None"]).command.to is None
    assert parse(["evaluate", "--sae", "a", "--store", "b", "--max-norm", "3"]).max_norm == 3.0


# --- stages


def test_every_stage_wrote_what_the_next_reads(pipeline: Path) -> None:
    rollouts = tsae.Rollouts.read(pipeline / "rollouts.parquet")
    assert rollouts.policies == ["base", "run-5"]
    assert len(rollouts) == 2 * 24 * 6
    assert set(rollouts.frame.band.dropna()) == {"easy", "medium", "hard"}
    assert rollouts.frame.advantage.notna().all()
    store = tsae.ActivationStore(pipeline / "acts")
    assert (store.sites, store.readers) == ([SITE], ["base", "run-5"])
    features = tsae.FeatureTable.load(pipeline / "features")
    assert features.n_rows == 288 + 288
    diff = tsae.FeatureDiff.load(pipeline / "diff", features=features)
    assert diff.checkpoints == ["run-5"]
    assert set(diff.shifts.kind) == {"shift", "outcome", "interaction"}
    assert set(diff.features.responds_to) <= {"digit", "other", "prompt", "never active", "rare tokens"}
    assert (diff.table(kind="shift", part="total", band="all", outcome="all").q <= 0.05).any()
    for folder in ("acts", "sae", "features"):
        record = json.loads((pipeline / folder / "manifest.json").read_text())
        assert record["versions"]["torch"] == torch.__version__
    assert not list(pipeline.rglob("*.tmp"))
    page = (pipeline / "report.html").read_text(encoding="utf-8")
    assert "<title>Tiny" in page
    assert "run-5" in page
    markup = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert len(markup) < len(page)
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", markup)
    assert not re.search(r"<script[^>]*\ssrc", page)


@pytest.mark.slow
def test_a_diff_shows_more_where_it_is_asked(shell: Shell, pipeline: Path, tmp_path: Path) -> None:
    printed = shell(
        "diff --features {p}/features --to {t}/diff --tokenizer {p}/series --annotator support.cli:classes --families "
        "--store {p}/acts --compare {p}/diff --markdown {t}/diff.md --fdr by --n-permutations 500 --n-bootstrap 200 "
        "--all"
    )
    for text in ("Δ of families", "linear probe", "Against"):
        assert text in printed
    assert (tmp_path / "diff" / "baselines.parquet").is_file()
    assert (tmp_path / "diff.md").read_text(encoding="utf-8").startswith("| kind | checkpoint |")
    diff = tsae.FeatureDiff.load(tmp_path / "diff")
    assert set(diff.features.family) <= {"numbers", "none"}
    assert set(diff.confounds.control) == {"length", "position", "token"}
    # Of its own p-values: --fdr by may draw more permutations than the other, which moves them.
    for method, found in (("by", diff), ("bh", tsae.FeatureDiff.load(pipeline / "diff"))):
        for _, rows in found.shifts.groupby(["kind", "checkpoint", "part", "band", "outcome"]):
            np.testing.assert_allclose(rows.q, stats.false_discovery_control(rows.p, method=method))


@pytest.mark.slow(ci=True)
def test_the_folder_of_a_run_takes_the_place_of_options(shell: Shell, pipeline: Path, tmp_path: Path) -> None:
    before = sorted(pipeline.rglob("*"))
    shown = shell("diff {p} --n-permutations 500 --n-bootstrap 200 --min-problems 5")
    assert "\nrun-5: After" in shown
    assert "wrote" not in shown
    assert sorted(pipeline.rglob("*")) == before
    shell("report {p} --to {t}/page.html")
    assert "run-5" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "--diff: is missing. Give it, or the folder of a run." in shell.fails("report --to {t}/page.html")
    assert "--to: is missing" in shell.fails("attribute {p}")
    (tmp_path / "run").mkdir()
    for name in ("run.json", "stages.json"):
        (tmp_path / "run" / name).write_text("{}")
    assert "is what `tsae run` wrote. Give the trainer's folder" in shell.fails("run {t}/run")


def test_features_name_their_tokens(pipeline: Path) -> None:
    diff = tsae.feature_diff(pipeline / "features", tsae.DiffConfig(n_permutations=500, min_problems=5), progress=False)
    known = tsae.FeatureDiff.load(pipeline / "diff").info["token_strings"]
    assert diff.info["token_strings"] == known
    words = {repr(word) for word in known.values()}
    assert any(word in words for text in diff.features.responds_to for word in text.split())


def test_evaluation_prints_and_writes_what_was_measured(shell: Shell, pipeline: Path, tmp_path: Path) -> None:
    lines = shell("evaluate --sae {p}/sae --store {p}/acts --readers run-5 --json {t}/numbers.json").splitlines()
    expected = tsae.evaluate(pipeline / "sae", tsae.ActivationStore(pipeline / "acts").subset(readers="run-5"))
    assert f"{expected.n_tokens:,} tokens" in lines[0]
    fve = next(line for line in lines if line.startswith("FVE ")).split()
    assert [float(value) for value in fve[1:]] == pytest.approx([expected.fve, expected.fve_high], abs=1e-4)
    written = json.loads((tmp_path / "numbers.json").read_text())
    assert written["evaluation"]["fve"] == pytest.approx(expected.fve)


def test_training_prints_what_it_mixed_and_what_ends_a_step(shell: Shell, pipeline: Path, tmp_path: Path) -> None:
    command = "train --store {p}/acts --d-sae 16 --k 2 --tokens 4000 --batch-tokens 500"
    steps = f"{command} --partner step --balance band"
    printed = shell(f"{steps} --to {{t}}/a --tokenizer {{p}}/series --step-text ;").splitlines()
    info = json.loads((tmp_path / "a" / "training.json").read_text())
    semicolon = tsae.CheckpointSeries.load(pipeline / "series").base.load_tokenizer().convert_tokens_to_ids(";")
    assert (info["training"]["partner"], info["training"]["step_ends"]) == ("step", [semicolon])
    assert [cell["band"] for cell in info["mixture"]] == ["easy", "medium", "hard"]
    for cell in info["mixture"]:
        line = f"band {cell['band']}: {cell['tokens']:,} tokens, each read {cell['weight']:.2f} times an epoch"
        assert line in printed
    shell(f"{steps} --to {{t}}/b --step-ends {semicolon}")
    assert (tmp_path / "b" / "sae.safetensors").read_bytes() == (tmp_path / "a" / "sae.safetensors").read_bytes()
    shell(f"{command} --to {{t}}/c --balance")
    mixture = json.loads((tmp_path / "c" / "training.json").read_text())["mixture"]
    assert mixture == [{"tokens": info["tokens_in_store"], "weight": 1.0}]


@pytest.mark.slow(ci=True)
def test_samples_that_push_features_are_named(shell: Shell, pipeline: Path, tmp_path: Path) -> None:
    command = "reinforcement --features {p}/features --to {t}/found --n-permutations 100 --n-bootstrap 100"
    printed = shell(f"{command} --diff {{p}}/diff")
    expected = tsae.reinforcement(pipeline / "features", tsae.DiffConfig(n_permutations=100, n_bootstrap=100))
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "found" / "reinforcement.parquet"), expected.table)
    compared = expected.compare(tsae.FeatureDiff.load(pipeline / "diff"))
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "found" / "predicted.parquet"), compared)
    whole = compared[(compared.predicted_on == "all") & (compared.part == "policy")].iloc[0]
    assert f"[{whole.low:+.2f}, {whole.high:+.2f}]".replace("-", "−") in printed
    assert "group mixed" in printed
    shell(command)
    assert not (tmp_path / "found" / "predicted.parquet").exists()  # of another diff

    feature = int(expected.table.feature.iloc[0])
    given = f"influence --series {{p}}/series --sae {{p}}/sae --features {feature} --rollouts"
    printed = shell(f"{given} {{p}}/rollouts.parquet --to {{t}}/pushed")
    found = tsae.Influence.load(tmp_path / "pushed")
    assert len(found.table) == 24 * 6
    assert set(found.table.policy) == {"base"}
    assert f"feature {feature}, mean" in printed
    assert f"total {found.table.total.sum():+.4g}" in printed
    assert f"row {found.top(feature, 1).trajectory.item()}, chain:" in printed
    assert "no checkpoint 'other'" in shell.fails(f"{given} {{p}}/rollouts.parquet --checkpoint other")
    tsae.Rollouts.read(pipeline / "rollouts.parquet").where(policy="run-5").write(tmp_path / "run.parquet")
    assert "holds nothing that base sampled; policies are run-5" in shell.fails(f"{given} {{t}}/run.parquet")


def test_a_log_is_imported_and_its_tokenizer_remembered(shell: Shell, pipeline: Path, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(json.dumps({"q": "1+1?", "a": "#2", "ok": True}) + "\n")
    columns = "--column prompt=q --column response=a --column correct=ok"
    shell(f"rollouts import {{t}}/log.jsonl --checkpoint {{p}}/series --to {{t}}/in.parquet {columns} --run gpt")
    found = tsae.Rollouts.read(tmp_path / "in.parquet")
    assert found.policies == ["gpt"]
    assert found.info["tokenizer"] == tsae.Rollouts.read(pipeline / "raw.parquet").info["tokenizer"]


def test_drift_shows_where_training_wrote(shell: Shell, pipeline: Path, tmp_path: Path) -> None:
    printed = shell("drift --series {p}/series --to {t}/drift")
    table = pd.read_parquet(tmp_path / "drift" / "drift.parquet")
    expected = tsae.weight_drift(tsae.CheckpointSeries.load(pipeline / "series"), progress=False)
    pd.testing.assert_frame_equal(table, expected, check_dtype=False)
    whole = np.sqrt((table.update_norm**2).sum() / (table.base_norm**2).sum())
    assert f"{100 * whole:.3g} %" in next(line for line in printed.splitlines() if line.startswith("  run-5"))
    assert re.search(r"\n  mlp\.up_proj +\d", printed)
    assert re.search(r"\n  2 +\d", printed)
    page = (tmp_path / "drift" / "drift.html").read_text(encoding="utf-8")
    assert "Where training wrote" in page
    assert '"heatmap"' in page
    assert "there is nothing but the base" in shell.fails("drift --series {p}/series/base")


def test_difficulty_is_measured_along_the_run(shell: Shell, tmp_path: Path) -> None:
    printed = shell(
        "rollouts difficulty --rollouts {p}/rollouts.parquet --series {p}/series --shares 0.1 0.1 --k 1 3 "
        "--n-draws 200 --to {t}/out"
    )
    assert "(the easiest 10% and the hardest 10% for base)" in printed
    assert "base → run-5:" in printed
    assert set(pd.read_parquet(tmp_path / "out" / "pass_at_k.parquet").k) == {1, 3}
    assert (tmp_path / "out" / "difficulty.html").is_file()
    shell("rollouts bands --rollouts {p}/raw.parquet --to {t}/b.parquet --reference base --shares 0.1 0.1")
    assert tsae.Rollouts.read(tmp_path / "b.parquet").info["bands"]["quantiles"] == {"easy": 0.1, "hard": 0.1}


@pytest.mark.slow(ci=True)
def test_features_are_tested_causally(shell: Shell, pipeline: Path, tmp_path: Path) -> None:
    features = tsae.FeatureTable.load(pipeline / "features")
    fired = np.asarray(features.codes[np.flatnonzero(features.span_mask("response"))].sum(axis=0)).ravel()
    feature = int(fired.argmax())
    causal = (
        "causal --series {p}/series --sae {p}/sae --features {p}/features --verifier support.cli:lucky "
        "--n-samples 2 --max-new-tokens 6 --n-random 2"
    )
    printed = shell(
        f"{causal} --checkpoint run-5 --choose {feature} --problems {{p}}/problems.jsonl --store {{p}}/acts "
        "--raised run-5 --lowered base --mode steer --amount 3 --to {t}/out"
    )
    found = tsae.Intervention.load(tmp_path / "out")
    assert found.info["features"] == [feature]
    assert {"features", "random", "same_norm", "wrong_sign", "mean_difference"} < set(found.outcomes.condition)
    assert f"Steering (+3 × typical) feature {feature} in run-5" in printed
    assert found.summary("accuracy") in printed
    assert json.loads((tmp_path / "out" / "causal.json").read_text())["record"]["features"] == [feature]

    shell("report --diff {p}/diff --to {t}/r.html --causal {t}/out")
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert f"Steering (+3 × typical) feature {feature} in run-5" in page
    assert "1 feature causally tested, the others not" in page
    for options, message in (
        ("--diff {p}/diff --raised base --lowered run-5", "no feature was raised by base"),
        ("", "no features chosen"),
        (f"--choose {feature} --store {{p}}/acts", "only with --raised and --lowered"),
    ):
        assert message in shell.fails(f"{causal} --checkpoint base --to {{t}}/no {options}")
    assert not (tmp_path / "no").exists()


def test_behaviours_are_read_off_the_texts(shell: Shell, pipeline: Path, tmp_path: Path) -> None:
    command = "rollouts behaviours --rollouts {p}/rollouts.parquet --to {t}/b.parquet --required-steps"
    printed = shell(f"{command} support.cli:two_steps")
    found = tsae.Rollouts.read(tmp_path / "b.parquet")
    assert {"looping", "unanswered", "skipped_steps", "relative_length"} <= set(found.info["behaviours"])
    assert found.fingerprint == tsae.Rollouts.read(pipeline / "rollouts.parquet").fingerprint
    assert "skipped steps" in printed
    assert "Formats (entropy in bits" in printed
    assert re.search(r"run-5 +all +\d\.\d\d", printed)
    assert "required_steps" in shell.fails(f"{command} no:f")


def test_a_series_without_a_base_names_what_stands_in(
    shell: Shell, pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trainer's output folder, read as it is."""
    for step, source in ((10, "base"), (20, "run-5")):
        shutil.copytree(pipeline / "series" / source, tmp_path / "out" / f"checkpoint-{step}")
    tsae.Rollouts.read(pipeline / "rollouts.parquet").where(policy="base").write(tmp_path / "r.parquet")
    capsys.readouterr()
    run("capture", "--series", tmp_path / "out", "--rollouts", tmp_path / "r.parquet", "--to", tmp_path / "acts")
    assert "out-00010 (step 10) stands in for the base" in capsys.readouterr().err
    assert tsae.ActivationStore(tmp_path / "acts").readers == ["out-00010", "out-00020"]


def test_a_real_tokenizer_goes_through_the_same_commands(shell: Shell, tmp_path: Path) -> None:
    model = SHARED / "models" / "stories260K"
    if not model.is_dir():
        pytest.skip("shared/models/stories260K is not here")
    write_problems([Problem("a", "Once upon a time", "x"), Problem("b", "The", "x")], tmp_path / "p.jsonl")
    shell(
        f"rollouts sample --series {model} --problems {{t}}/p.jsonl --verifier support.cli:lucky --to {{t}}/r.parquet "
        "--n-samples 4 --max-new-tokens 12"
    )
    shell(f"capture --series {model} --rollouts {{t}}/r.parquet --to {{t}}/acts --dtype bfloat16")
    store = tsae.ActivationStore(tmp_path / "acts")
    (shard,) = store.shards()
    assert len(shard.trajectory) == 8
    assert np.isfinite(shard.read(store.sites[0], slice(None))).all()
    assert {BOS, EOS}.isdisjoint(store.special_ids)


# --- JSON


@pytest.mark.slow
def test_programs_read_what_was_found(shell: Shell, tmp_path: Path) -> None:
    assert [reader["id"] for reader in shell.json("store show {p}/acts")["readers"]] == ["base", "run-5"]
    diffed = shell.json("diff --features {p}/features --to {t}/diff --n-permutations 500 --n-bootstrap 200")
    diff = tsae.FeatureDiff.load(tmp_path / "diff")
    assert len(diffed["contrasts"]) == len(diff.contrasts)
    assert diffed["findings"][0]["sentences"]
    wanted = diff.table(discoveries=True, band="all", outcome="all")
    assert [row["feature"] for row in diffed["discoveries"]] == wanted.feature.tolist()
    hard = shell.json("rollouts difficulty --rollouts {p}/raw.parquet --n-draws 100")
    assert {row["policy"] for row in hard["rates"]} == {"base", "run-5"}
    measured = shell.json("rollouts behaviours --rollouts {p}/raw.parquet")["behaviours"]
    assert {"accuracy", "response_length"} <= {row["behaviour"] for row in measured}
    drift = shell.json("drift --series {p}/series --no-spectral")["drift"]
    assert {row["checkpoint"] for row in drift} == {"run-5"}
    assert drift[0]["spectral"] is None  # NaN
    assert shell.json("reinforcement --features {p}/features --n-permutations 100")["groups"]


def test_json_knows_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    table = pd.DataFrame({"x": [1.0, np.nan, np.inf], "n": [1, 2, 3]})
    with as_json(Path("-")) as write:
        write({"table": table, "path": Path("a"), "flag": np.bool_(True), "array": np.arange(2)})
    rows = [{"x": 1.0, "n": 1}, {"x": None, "n": 2}, {"x": None, "n": 3}]
    assert json.loads(capsys.readouterr().out) == {"table": rows, "path": "a", "flag": True, "array": [0, 1]}


# --- errors


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train --store {p}/acts --k 9000", "k=9000 exceeds d_sae=4096"),
        ("train --store {t}", "no activation store"),
        ("train --store {p}/acts --site nope", "no site 'nope'"),
        ("train --store {p}/acts --partner step", "steps need step_ends"),
        ("train --store {p}/acts --tokenizer {p}/series", "--tokenizer and --step-text"),
        ("train --store {p}/acts --step-text ;", "--tokenizer and --step-text"),
        ("train --store {p}/acts --partner step --step-ends 15 --tokenizer {p}/series", "--tokenizer and --step-text"),
        ("train --store {p}/acts --partner step --tokenizer {p}/series", r"no token whose text contains '\n'"),
        ("encode --sae {t} --store {p}/acts", "holds no complete SAE"),
        ("diff --features {t}", "holds no complete features"),
        ("diff --features {p}/features --annotator no:f", "annotator"),
        ("diff --features {p}/features --q 2.0", "q=2.0"),
        ("diff --features {p}/features --bands trivial", "no problem is in the band 'trivial'"),
        ("report --diff {t}", "holds no complete diff"),
        ("capture --series {t}/none --rollouts r", "no such folder"),
        ("rollouts bands --rollouts {p}/raw.parquet --easy 1.0 --hard 0.0", "no problem falls into the band"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_written(
    command: str, message: str, shell: Shell, tmp_path: Path
) -> None:
    assert message in shell.fails(f"{command} --to {{t}}/x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("file", "message"), [("tokenizer.json", "holds no tokenizer"), ("model.safetensors", "holds no weights")]
)
def test_a_checkpoint_without_tokenizer_or_weights(
    file: str, message: str, shell: Shell, pipeline: Path, tmp_path: Path
) -> None:
    shutil.copytree(pipeline / "series", tmp_path / "series")
    (tmp_path / "series" / "run-5" / file).unlink()
    for command in (
        "capture --series {t}/series --rollouts {p}/rollouts.parquet --to {t}/x",
        "rollouts sample --series {t}/series --problems {p}/problems.jsonl --to {t}/x --n-samples 1 --max-new-tokens 2",
    ):
        said = shell.fails(command)
        assert message in said
        assert str(tmp_path / "series" / "run-5") in said
        assert not (tmp_path / "x").exists()


def test_files_that_do_not_fit_each_other(shell: Shell, pipeline: Path, tmp_path: Path) -> None:
    table = pq.read_table(pipeline / "rollouts.parquet").drop_columns(["response_ids", "outcome"])
    pq.write_table(table, tmp_path / "bad.parquet")
    TemporalSAE(24, tsae.SAEConfig(d_sae=32, k=2), site=SITE).save(tmp_path / "wide")
    rollouts = tsae.Rollouts.read(pipeline / "rollouts.parquet")
    shutil.copytree(pipeline / "acts", tmp_path / "acts")
    tsae.Rollouts(rollouts.table, {**rollouts.info, "tokenizer": "beef"}).write(tmp_path / "acts" / "rollouts.parquet")
    lacking = f"{tmp_path / 'bad.parquet'}: lacks the columns response_ids, outcome"
    width = f"{pipeline / 'acts'}: {SITE} has d_model 16, the SAE expects 24"
    for command, message in (
        ("capture --series {p}/series --rollouts {t}/bad.parquet --to {t}/x", lacking),
        ("rollouts bands --rollouts {t}/bad.parquet --to {t}/x", lacking),
        ("encode --sae {t}/wide --store {p}/acts --to {t}/x", width),
        ("evaluate --sae {t}/wide --store {p}/acts", width),
        ("train --store {t}/acts --to {t}/x --partner step --tokenizer {p}/series", "were tokenised with (beef)"),
    ):
        assert message in shell.fails(command)
        assert not (tmp_path / "x").exists()


# --- colours, completion, exit statuses: in processes of their own


def tsae_process(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 900} | options
    return subprocess.run([sys.executable, "-m", "tsae", *args], **options)


@pytest.mark.slow(ci=True)
def test_the_console_script_prints_one_paragraph(tmp_path: Path) -> None:
    script = Path(sys.executable).parent / "tsae"
    done = subprocess.run([script, "store", "show", tmp_path / "no"], capture_output=True, text=True, timeout=900)
    what = f"tsae: {tmp_path / 'no'}: no activation store (no manifest.json). Make one with `tsae capture`.\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", what)


def test_colours_are_for_terminals() -> None:
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "tsae", "store", "--help"], stdout=slave, stderr=slave, env=environment
    )
    os.close(slave)
    printed = b""
    while True:
        try:
            printed += (part := os.read(master, 4096))
        except OSError:  # The other end is closed.
            break
        if not part:
            break
    process.wait(timeout=900)
    os.close(master)
    assert b"\x1b[" in printed
    assert "\x1b[" not in tsae_process("store", "--help").stdout


BASH = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


@pytest.mark.slow(ci=True)
@pytest.mark.parametrize(
    ("shell_name", "begin"),
    [("bash", "complete -F"), ("zsh", "#compdef tsae"), ("fish", "complete --no-files --command 'tsae'")],
)
def test_completion_scripts(shell_name: str, begin: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["completion", shell_name])
    assert not stopped.value.code
    script = capsys.readouterr().out
    assert begin in script
    assert "token-statistics" in script
    if shutil.which(shell_name) is not None:
        subprocess.run([shell_name, "-n"], input=script, text=True, check=True, timeout=900)


@pytest.fixture(scope="module")
def bash_completion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `tsae completion bash` writes."""
    to = tmp_path_factory.mktemp("completion") / "tsae.bash"
    with to.open("w") as file:
        tsae_process("completion", "bash", stdout=file)
    return to


@BASH
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["ro"], {"rollouts"}),
        (["rollouts", "b"], {"bands", "behaviours"}),
        (["capture", "--tok"], {"--token-statistics"}),
        (["train", "--partner", ""], {"previous", "earlier", "step"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bash_completes(typed: list[str], offered: set[str], bash_completion: Path) -> None:
    words = " ".join(f"'{word}'" for word in ["tsae", *typed])
    asked = f"""
        source {bash_completion}
        function_name=$(complete -p tsae | sed -E 's/.*-F ([^ ]+).*/\\1/')
        COMP_WORDS=({words}); COMP_CWORD={len(typed)}; COMP_LINE="tsae {" ".join(typed)}"; COMP_POINT=${{#COMP_LINE}}
        $function_name
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, timeout=900, env=environment)
    assert offered <= {word.strip() for word in done.stdout.split()}, done.stderr


# Of the eight combinations, each command and each way of buffering is tried once in the fast tests.
READERS = [
    (["completion", "zsh"], 141, False),  # More than a buffer holds: fails while it is printed.
    (["completion", "zsh"], 141, True),
    (["reformulate", "problems.jsonl", "--to", "easier.jsonl"], 141, False),  # A few lines, flushed last.
    (["reformulate", "problems.jsonl", "--to", "easier.jsonl"], 141, True),
    (["rollouts", "--help"], 141, False),
    (["rollouts", "--help"], 141, True),
    (["store", "show", "nothing"], 2, False),  # What went wrong is printed all the same.
    (["store", "show", "nothing"], 2, True),
]


@pytest.mark.slow(ci=True)
@pytest.mark.parametrize(
    ("command", "status", "unbuffered"),
    [pytest.param(*each, marks=[] if i in (0, 6) else pytest.mark.slow) for i, each in enumerate(READERS)],
)
def test_a_reader_that_goes_away_ends_it_quietly(
    command: list[str], status: int, unbuffered: bool, tmp_path: Path
) -> None:
    (tmp_path / "problems.jsonl").write_text('{"id": "a", "prompt": "A pen costs $3. 4 pens?", "answer": "12"}\n')
    environment = {**os.environ, "PYTHONUNBUFFERED": "1" if unbuffered else ""}
    reads, writes = os.pipe()
    os.close(reads)  # as head does
    try:
        ended = tsae_process(*command, stdout=writes, cwd=tmp_path, env=environment)
    finally:
        os.close(writes)
    assert ended.returncode == status
    assert ended.stderr.startswith("tsae: nothing: " if status == 2 else "")
    assert ended.stderr.count("\n") == (status == 2)
    assert "Broken" not in ended.stderr


@pytest.mark.slow
def test_the_demo_opens_its_report(tmp_path: Path) -> None:
    """The browser that BROWSER names is handed the page."""
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
    browser.chmod(0o755)
    sizes = "--problems 4 --samples 4 --band-samples 8 --sae.d-sae 32 --sae.k 4 --training.tokens 6000"
    environment = {**os.environ, "BROWSER": f"{browser} %s"}
    done = tsae_process("demo", "--open", "--to", str(tmp_path / "demo"), *sizes.split(), env=environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "opened").read_text().strip() == (tmp_path / "demo" / "report.html").resolve().as_uri()


@pytest.mark.slow
def test_bars_keep_logs_short(pipeline: Path, tmp_path: Path) -> None:
    """Where standard error is not a terminal, a bar is drawn at its beginning and its end, and every half minute."""
    sizes = f"--d-sae 32 --k 4 --tokens 60000 --batch-tokens 512 --site {SITE}"
    trained = tsae_process("train", "--store", str(pipeline / "acts"), "--to", str(tmp_path / "sae"), *sizes.split())
    assert trained.returncode == 0, trained.stderr
    assert 1 <= trained.stderr.count("train:") <= 4


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out == f"tsae {tsae.__version__}\n"


def test_a_missing_package_is_named_with_the_versions_that_are_asked_for() -> None:
    found = r"^there: reading needs peft, .*\(none\)\. pip install 'peft>="
    with pytest.raises(tsae.TsaeError, match=found), needing("peft", "reading", "there"):
        raise ImportError("none")
    with pytest.raises(tsae.TsaeError, match=r"pip install 'of-others'"), needing("of-others", "reading"):
        raise ImportError("none")
