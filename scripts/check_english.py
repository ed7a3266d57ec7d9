"""List sentences that a user reads and may have to read twice: long ones, and ones with words that made readers stop.

    python scripts/check_english.py                # the documentation, help, messages and the page's texts
    python scripts/check_english.py --since main   # only sentences that this revision does not have
    python scripts/check_english.py docs --words 30

It is for the eye and not a gate: a long sentence can be clear, and the word may be the right one.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
READ = ("README.md", "docs/*.md", "tsae/**/*.html", "tsae/**/config.py", "tsae/commands/*.py", "tsae/**/*.py")
STOP = re.compile(
    r"\b(told|said|mended|begun|go(es)? on|one that|what is of|(?<!there )(is|are|was|were) no)\b", re.IGNORECASE
)
_FENCE = re.compile(r"^```.*?^```|^\|.*?$|^\[.*?$|^#.*?$|<!--.*?-->", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"\{[%#{].*?[%#}]\}|<(script|style).*?</\1>|<[^>]*>", re.DOTALL)
_CALLS = ("TsaeError", "warn", "print", "note")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("under", nargs="*", default=[""], help="files or folders, from the root; all by default")
    parser.add_argument("--words", type=int, default=25, help="longest sentence that is not listed")
    parser.add_argument("--since", help="a git revision; lists only sentences that it does not have")
    options = parser.parse_args(arguments)
    n = 0
    for path in sorted({path for pattern in READ for path in ROOT.glob(pattern)}):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(tuple(options.under)):
            continue
        known = set()
        if options.since:
            old = subprocess.run(["git", "show", f"{options.since}:{name}"], cwd=ROOT, capture_output=True, text=True)
            known = {sentence for _, sentence in sentences(name, old.stdout)}
        for line, sentence in sentences(name, path.read_text(encoding="utf-8")):
            long, found = len(sentence.split()), STOP.search(sentence)
            if (long > options.words or found) and sentence not in known:
                n += 1
                print(f"{name}:{line}: {f'“{found[0]}”' if found else f'{long} words'}: {sentence}")
    print(f"{n} sentences")
    return 0


def sentences(name: str, text: str) -> Iterator[tuple[int, str]]:
    """Line and sentence, in order; code, tables and headings are left out."""
    for line, paragraph in _python(name, text) if name.endswith(".py") else _paragraphs(name, text):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "CODE", paragraph))
        for sentence in re.split(r"(?<=[.!?])\s+(?=[^\W\d])|(?<=[.:;])\s+(?=[A-Z“*(])", " ".join(plain.split())):
            yield line, sentence


def _paragraphs(name: str, text: str) -> Iterator[tuple[int, str]]:
    hidden = _FENCE if name.endswith(".md") else _BLOCK
    text = hidden.sub(lambda found: "\n" * found[0].count("\n") + " ", text)
    for found in re.finditer(r"(?:^(?!\s*$).+\n?)(?:^(?!\s*$)(?! *- ).+\n?)*", text, re.MULTILINE):
        yield text.count("\n", 0, found.start()) + 1, found[0].removeprefix("- ")


def _python(name: str, text: str) -> Iterator[tuple[int, str]]:
    """Strings of errors and warnings; help, which is the docstrings of configs and commands; the page's own strings."""
    page = name.startswith("tsae/report/")
    passed: set[int] = set()
    for node in ast.walk(ast.parse(text)):  # parents first
        inside = [getattr(node, "value", None)] if isinstance(node, ast.Expr) else getattr(node, "values", [])
        passed.update(map(id, inside))  # docstrings, and parts of a string
        values: list[ast.expr] = [node] if page and isinstance(node, ast.expr) else []
        if isinstance(node, ast.ClassDef) and (name.endswith("config.py") or "/commands/" in name):
            for item in node.body:
                if isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant):
                    yield from ((item.lineno, part) for part in str(item.value.value).split("\n\n"))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _CALLS:
            values = [*node.args, *(keyword.value for keyword in node.keywords)]
        for value in values:
            if isinstance(value, ast.JoinedStr | ast.Constant) and id(value) not in passed:
                passed.add(id(value))
                string = ast.unparse(value) if isinstance(value, ast.JoinedStr) else str(value.value)
                string = re.sub(r"\{[^{}]*\}", "X", string.removeprefix("f")).strip("'\"")
                if string.count(" ") > 2:
                    yield value.lineno, string


if __name__ == "__main__":
    raise SystemExit(main())
