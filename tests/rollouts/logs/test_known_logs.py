"""What is said of trainers' logs: in the command, in the documentation and in the readers alike."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from tsae.cli import main
from tsae.rollouts.config import ImportConfig, LogFormat
from tsae.rollouts.known_logs import KNOWN, TELLS
from tsae.rollouts.log_detection import FORMATS, find_log
from tsae.rollouts.logs.entry import Entry

LOGS = Path(__file__).parents[3] / "docs" / "logs.md"
SHIPPED = Path(__file__).parents[2] / "logs"


def test_every_format_is_described() -> None:
    names = [form.name for form in FORMATS]
    assert [name for known in KNOWN for name in known.formats] == names
    assert sorted(get_args(LogFormat)) == sorted(["auto", *names])  # what --format takes


def test_the_documentation_has_the_commands_tables() -> None:
    rows, tells = [], []
    for known in KNOWN:
        names = ", ".join(known.formats)
        rows.append((known.trainer, names, known.versions, known.setting, known.lacks))
        tells.append((names, *(known.tells.get(name, "–") for name in TELLS)))
    for cells, head in ((rows, "--- | " * 5), (tells, "--- | " * (1 + len(TELLS)))):
        lines = [f"| {' | '.join(row)} |".replace("|  |", "| |").replace("|  |", "| |") for row in cells]
        assert "\n".join(["", f"| {head.strip()}", *lines, "", ""]) in LOGS.read_text(encoding="utf-8")
    assert f"\n| `--format` | {' | '.join(TELLS)} |\n" in LOGS.read_text(encoding="utf-8")


def test_the_command_names_every_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    main(["rollouts", "formats"])
    said = " ".join(capsys.readouterr().out.split())
    for known in KNOWN:
        assert f"{known.trainer} ({known.versions}): --format {', '.join(known.formats)}" in said
        assert f"switch on: {known.setting}" in said or not known.setting
        assert f"lacks: {known.lacks}" in said or not known.lacks


@pytest.mark.parametrize("folder", sorted(path.name for path in SHIPPED.iterdir() if path.is_dir()))
def test_logs_tell_what_is_said_of_them(folder: str) -> None:
    if folder == "inspect":
        pytest.importorskip("inspect_ai")
    form, files, _ = find_log(SHIPPED / folder, ImportConfig())
    found: dict[str, set[bool]] = {name: set() for name in TELLS}
    for file in files:
        for entry in form.read(file, ImportConfig()):
            if isinstance(entry, Entry):
                ends = entry.response_ids is not None or entry.finish_reason is not None or entry.response_rendered
                told = (
                    *(entry.prompt_ids is not None, entry.response_ids is not None, entry.logprobs is not None),
                    *(entry.advantage is not None, ends, entry.answer != ""),
                    *(entry.step is not None or file.step is not None, entry.updates is not None),
                )
                for name, there in zip(TELLS, told, strict=True):
                    found[name].add(there)
    (known,) = [known for known in KNOWN if form.name in known.formats]
    for name, there in found.items():
        when = known.tells.get(name)
        assert there == {True} if when == "yes" else there == {False} or when is not None, (name, when, there)
