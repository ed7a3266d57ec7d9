"""Templates of the report: every text is escaped on its way in, and what is missing is an error."""

from __future__ import annotations

import re
from pathlib import Path

import jinja2
import pytest

import tsae
from tsae.report.document import environment, macro
from tsae.report.story.statements import Caveat
from tsae.report.tables import Cell, Table

HOSTILE = "<b>\"'&\u202e\x1b\ud800"
SHOWN = "&lt;b&gt;&quot;&#x27;&amp;‹U+202E›‹U+001B›‹U+D800›"
FOLDER = Path(tsae.__file__).parent / "report" / "templates"


def names() -> list[str]:
    return [path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.html")]


@pytest.mark.parametrize("name", names())
def test_templates_compile_and_none_leaves_text_unescaped(name: str) -> None:
    environment().get_template(name)
    assert not re.search(r"\|\s*safe|autoescape", (FOLDER / name).read_text(encoding="utf-8"))


def test_text_is_escaped_and_hidden_characters_are_shown() -> None:
    made = environment().from_string('<i title="{{ text }}">{{ text }}{{ nothing }}</i>')
    assert made.render(text=HOSTILE, nothing=None) == f'<i title="{SHOWN}">{SHOWN}</i>'


def test_what_is_missing_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError):
        environment().from_string("{{ absent }}").render()


def test_every_part_of_a_table_is_escaped() -> None:
    cell = Cell(HOSTILE, HOSTILE, HOSTILE, codes=(HOSTILE,), flags=(Caveat(HOSTILE, HOSTILE),))
    isolated = Cell(HOSTILE, tone="isolated")
    written = macro("macros.html", "table", Table(HOSTILE, [HOSTILE, cell], [[HOSTILE, isolated], [cell, "–"]]))
    # The caption twice, two heads of one and six, and cells of as many.
    assert written.count(SHOWN) == 2 + 1 + 6 + 1 + 1 + 6
    assert written.count("<") == written.count(">")
    assert "<b>" not in written


def test_a_sentence_links_features_and_escapes_the_rest() -> None:
    written = macro("macros.html", "sentence", [HOSTILE, 7, "."])
    assert written == f'{SHOWN}<span class="feature" data-feature="7">7</span>.'


@pytest.mark.parametrize("name", ["text", "heading"])
def test_passages_of_a_notebook_are_escaped(name: str) -> None:
    assert f">{SHOWN}</div>" in macro("cards.html", name, HOSTILE)
