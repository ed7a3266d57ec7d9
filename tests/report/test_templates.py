"""Templates of the report: every text is escaped on its way in, and what is missing is an error."""

from __future__ import annotations

import re
from pathlib import Path

import jinja2
import pytest
from markupsafe import Markup

import tsae
from tsae.report.document import GLOSSARY, environment, explained, macro
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


def test_words_are_links_to_the_glossary_once_a_table_and_never_in_texts_of_files() -> None:
    q = '<a class="term" href="#term-q">q</a>'
    assert explained(f"q {HOSTILE} q") == f"{q} {SHOWN} q"
    assert explained(Markup("<p>q</p><table><th>q</th></table>")) == f"<p>{q}</p><table><th>{q}</th></table>"
    for kept in (
        '<a href="#q">q</a>', "<bdi>q <i>q</i></bdi>", '<div class="tokens" dir="auto">q <div>q</div> q</div>',
        '<p title="q &gt; 1">queue</p>', "<code>q</code>",
    ):  # fmt: skip
        assert explained(Markup(kept)) == kept
    paper = '<a href="https://arxiv.org/abs/2605.28388">arXiv 2605.28388</a>'
    assert explained("see arXiv 2605.28388, 2605.28388; 1234.5 2699.12345 12605.28388") == (
        f"see {paper}, {paper}; 1234.5 2699.12345 12605.28388"
    )


def test_every_word_of_the_glossary_is_found_as_itself() -> None:
    for term in GLOSSARY:
        assert explained(term.name) == term.name or f"#term-{term.key}" in explained(term.name)
        assert term.meaning.endswith(".")
    named = re.findall(r'term\("(\S+?)"', (FOLDER / "card.js").read_text(encoding="utf-8"))
    assert {"delta", "survivors", "auroc", "q"} == set(named) <= {term.key for term in GLOSSARY}
