"""What makes a command line pleasant: JSON for programs, completion, colours, exit statuses, help that reads well."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import tsae
from support.cli import COMMANDS, SITE, run
from tsae.cli import main, parse
from tsae.commands.common import as_json


def printed(capsys: pytest.CaptureFixture[str], *args: object) -> Any:
    """What a command prints with --json -, which is JSON alone; its text goes to standard error."""
    capsys.readouterr()
    run(*args, "--json", "-")
    said = capsys.readouterr()
    assert said.err.strip()
    return json.loads(said.out)


@pytest.mark.slow
def test_programs_read_what_was_found(pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, "store", "show", pipeline / "acts")
    store = tsae.ActivationStore(pipeline / "acts")
    assert [reader["id"] for reader in shown["readers"]] == store.readers

    checked = printed(capsys, "store", "check", pipeline / "acts")
    assert checked == {"shards": 2, "complete": True, "damaged": [], "repaired": []}

    evaluated = printed(capsys, "evaluate", "--sae", pipeline / "sae", "--store", pipeline / "acts")
    found = tsae.evaluate(tsae.TemporalSAE.load(pipeline / "sae"), store)
    assert evaluated["evaluation"]["fve"] == pytest.approx(found.fve)

    diffed = printed(
        capsys, "diff", "--features", pipeline / "features", "--to", tmp_path / "diff", "--n-permutations", 500,
        "--n-bootstrap", 200,
    )  # fmt: skip
    diff = tsae.FeatureDiff.load(tmp_path / "diff")
    assert len(diffed["contrasts"]) == len(diff.contrasts)
    assert diffed["findings"][0]["sentences"]
    wanted = diff.table(discoveries=True, band="all", outcome="all")
    assert [row["feature"] for row in diffed["discoveries"]] == wanted.feature.tolist()

    hard = printed(capsys, "rollouts", "difficulty", "--rollouts", pipeline / "raw.parquet", "--n-draws", 100)
    assert {row["policy"] for row in hard["rates"]} == {"base", "run-5"}
    said = printed(capsys, "rollouts", "behaviours", "--rollouts", pipeline / "raw.parquet")
    assert {"accuracy", "response_length"} <= {row["behaviour"] for row in said["behaviours"]}
    drift = printed(capsys, "drift", "--series", pipeline / "series", "--no-spectral")["drift"]
    assert {row["checkpoint"] for row in drift} == {"run-5"}
    assert drift[0]["spectral"] is None  # NaN
    pushed = printed(capsys, "reinforcement", "--features", pipeline / "features", "--n-permutations", 100)
    assert pushed["groups"]


def test_a_file_instead(pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("store", "check", pipeline / "acts", "--json", tmp_path / "check.json")
    assert f"wrote {tmp_path / 'check.json'}" in capsys.readouterr().out
    assert json.loads((tmp_path / "check.json").read_text())["damaged"] == []


def test_damage_is_told_to_programs_too(pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(pipeline / "acts", tmp_path / "acts")
    shard = next((tmp_path / "acts" / "base").glob("*.h5"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        run("store", "check", tmp_path / "acts", "--json", "-")
    assert stopped.value.code == 2
    (damage,) = json.loads(capsys.readouterr().out)["damaged"]
    assert damage["file"] == shard.relative_to(tmp_path / "acts").as_posix()


def test_json_knows_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    table = pd.DataFrame({"x": [1.0, np.nan, np.inf], "n": [1, 2, 3]})
    with as_json(Path("-")) as write:
        write({"table": table, "path": Path("a"), "flag": np.bool_(True), "array": np.arange(2)})
    assert json.loads(capsys.readouterr().out) == {
        "table": [{"x": 1.0, "n": 1}, {"x": None, "n": 2}, {"x": None, "n": 3}],
        "path": "a",
        "flag": True,
        "array": [0, 1],
    }


# --- help


def helps(capsys: pytest.CaptureFixture[str], command: list[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", [*COMMANDS, ["export"], ["completion"]], ids=" ".join)
def test_help_reads_well(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = helps(capsys, command)
    assert "None" not in text.replace("or None.", "")
    assert "(default: )" not in text
    # One word may be longer than the terminal: the list of commands.
    assert all(len(line) <= 100 or " " not in line.strip() for line in text.splitlines())
    if command == []:
        for name in ("0 done", "2 something", "130 interrupted", "--json -"):
            assert name in " ".join(text.split())


def test_none_can_still_be_said() -> None:
    command = parse(["rollouts", "behaviours", "--rollouts", "a", "--to", "None"])
    assert command.command.to is None
    assert parse(["evaluate", "--sae", "a", "--store", "b", "--max-norm", "3"]).max_norm == 3.0


# --- colours, completion, exit statuses: in processes of their own


def tsae_process(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tsae", *args], capture_output=True, text=True, timeout=900, **options)


def on_a_terminal(*args: str) -> str:
    """What a command prints on a pseudo-terminal."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen([sys.executable, "-m", "tsae", *args], stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    text = b""
    while True:
        try:
            part = os.read(master, 4096)
        except OSError:  # The other end is closed.
            break
        if not part:
            break
        text += part
    process.wait(timeout=900)
    os.close(master)
    return text.decode()


def test_colours_are_for_terminals() -> None:
    assert "\x1b[" in on_a_terminal("store", "--help")
    assert "\x1b[" not in tsae_process("store", "--help").stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["completion", shell])
    assert not stopped.value.code
    script = capsys.readouterr().out
    assert {"bash": "complete -F", "zsh": "#compdef tsae", "fish": "complete --no-files --command 'tsae'"}[
        shell
    ] in script
    assert "token-statistics" in script
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=900)


@pytest.fixture(scope="module")
def bash_completion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `tsae completion bash` writes."""
    to = tmp_path_factory.mktemp("completion") / "tsae.bash"
    with to.open("w") as file:
        subprocess.run([sys.executable, "-m", "tsae", "completion", "bash"], stdout=file, check=True, timeout=900)
    return to


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
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
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    said = subprocess.run(
        ["bash", "-c", asked], capture_output=True, text=True, timeout=900, env={**os.environ, "PATH": path}
    )
    assert offered <= {word.strip() for word in said.stdout.split()}, said.stderr


@pytest.mark.slow  # starts many processes
def test_exit_statuses(tmp_path: Path) -> None:
    assert tsae_process("completion", "zsh").returncode == 0
    wrong = tsae_process("store", "show", str(tmp_path / "nothing"))
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("tsae: ")
    assert tsae_process("store", "show").returncode == 2


_SLOW = pytest.mark.slow
"""Of the eight combinations, each command and each way of buffering is tried once in the fast tests."""


@pytest.mark.parametrize(
    ("command", "status", "unbuffered"),
    [
        # More than a buffer holds: fails while it is printed.
        (["completion", "zsh"], 141, False),
        pytest.param(["completion", "zsh"], 141, True, marks=_SLOW),
        # A few lines, flushed last.
        pytest.param(["reformulate", "problems.jsonl", "--to", "easier.jsonl"], 141, False, marks=_SLOW),
        pytest.param(["reformulate", "problems.jsonl", "--to", "easier.jsonl"], 141, True, marks=_SLOW),
        pytest.param(["rollouts", "--help"], 141, False, marks=_SLOW),
        pytest.param(["rollouts", "--help"], 141, True, marks=_SLOW),
        # What went wrong is said all the same.
        (["store", "show", "nothing"], 2, False),
        pytest.param(["store", "show", "nothing"], 2, True, marks=_SLOW),
    ],
)
def test_a_reader_that_goes_away_ends_it_quietly(
    command: list[str], status: int, unbuffered: bool, tmp_path: Path
) -> None:
    (tmp_path / "problems.jsonl").write_text('{"id": "a", "prompt": "A pen costs $3. 4 pens?", "answer": "12"}\n')
    environment = {**os.environ, "PYTHONUNBUFFERED": "1" if unbuffered else ""}
    reads, writes = os.pipe()
    os.close(reads)  # as head does
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "tsae", *command], stdout=writes, stderr=subprocess.PIPE, text=True, timeout=900,
            cwd=tmp_path, env=environment,
        )  # fmt: skip
    finally:
        os.close(writes)
    assert ended.returncode == status
    if status == 2:
        assert ended.stderr.startswith("tsae: nothing: ")
    assert ended.stderr.count("\n") == (status == 2)
    assert "Broken" not in ended.stderr


@pytest.mark.slow
def test_the_demo_opens_its_report(tmp_path: Path) -> None:
    """The browser that BROWSER names is handed the page."""
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
    browser.chmod(0o755)
    sizes = {"problems": 4, "samples": 4, "band-samples": 8, "sae.d-sae": 32, "sae.k": 4, "training.tokens": 6_000}
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    subprocess.run(
        [sys.executable, "-m", "tsae", "demo", "--open", "--to", tmp_path / "demo", *options], check=True, timeout=900,
        capture_output=True, env={**os.environ, "BROWSER": f"{browser} %s"},
    )  # fmt: skip
    assert (tmp_path / "opened").read_text().strip() == (tmp_path / "demo" / "report.html").resolve().as_uri()


@pytest.mark.slow
def test_bars_keep_logs_short(pipeline: Path, tmp_path: Path) -> None:
    """Where standard error is no terminal, a bar is drawn at its beginning and its end, and every half minute."""
    trained = tsae_process(
        "train", "--store", str(pipeline / "acts"), "--to", str(tmp_path / "sae"), "--d-sae", "32", "--k", "4",
        "--tokens", "60000", "--batch-tokens", "512", "--site", SITE,
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    assert 1 <= trained.stderr.count("train:") <= 4
