"""What is said of trainers' logs: in the command, in the documentation and in the readers alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from tsae.cli import main
from tsae.rollouts.logs.detect import FORMATS
from tsae.rollouts.logs.known import KNOWN, formats_table

LOGS = Path(__file__).parents[1] / "docs" / "logs.md"


def test_every_format_is_described() -> None:
    assert [name for known in KNOWN for name in known.formats] == [form.name for form in FORMATS]


def test_the_documentation_has_the_commands_table() -> None:
    assert f"\n{formats_table()}\n" in LOGS.read_text(encoding="utf-8")


def test_the_command_names_every_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    main(["rollouts", "formats"])
    said = " ".join(capsys.readouterr().out.split())
    for known in KNOWN:
        assert f"{known.trainer} ({known.versions}): --format {', '.join(known.formats)}" in said
        assert f"switch on: {known.setting}" in said or not known.setting
        assert f"lacks: {known.lacks}" in said or not known.lacks
