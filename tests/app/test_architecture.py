"""The house: layers and circles as `lint-imports` sees them, the picture that shows them, and what keeps modules readable."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "tsae").rglob("*.py"))
CONTRACT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
LAYERS = next(c["layers"] for c in CONTRACT["contracts"] if c["type"] == "layers")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_imports_go_down_the_layers_and_never_in_a_circle() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    found = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stdout
    assert "0 broken" in found.stdout


def test_a_circle_would_be_seen(tmp_path: Path) -> None:
    """The same contract, on a package with an upward import inside a function."""
    package = tmp_path / "tsae"
    for room in ("base", "report"):
        (package / room).mkdir(parents=True)
        (package / room / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "report" / "page.py").write_text("")
    (package / "base" / "files.py").write_text("def f():\n    from tsae.report import page\n    return page\n")
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    linted = settings[settings.index("[tool.importlinter]") :].replace("exhaustive = true", "exhaustive = false")
    absent = [layer for row in LAYERS for layer in row.split(" | ") if layer not in ("base", "report")]
    for layer in absent:
        linted = linted.replace(f'"{layer}"', f'"({layer})"')
    linted = re.sub(r'"(\w+) \| (\w+)"', r'"(\1) | (\2)"', linted)
    (tmp_path / "pyproject.toml").write_text(linted)
    linter = Path(sys.executable).with_name("lint-imports")
    found = subprocess.run([linter, "--no-cache"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert found.returncode == 1, found.stdout
    assert "tsae.base.files -> tsae.report.page" in found.stdout


def test_the_architecture_page_shows_the_contract() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    picture = re.search(r"```text\n(.*?)```", page, re.DOTALL)
    assert picture is not None
    rows = [line.partition("  ")[0].strip() for line in picture[1].splitlines() if line and line[0] != " "]
    drawn = [re.split(r", ", row) for row in rows]
    assert drawn == [layer.split(" | ") for layer in LAYERS]


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_own_modules_are_imported_at_the_top(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    below_the_app = path.parent != ROOT / "tsae" and path.parts[len(ROOT.parts) + 1] != "commands"
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            own = node.level > 0 or (node.module or "").split(".")[0] == "tsae"
        elif isinstance(node, ast.Import):
            own = any(alias.name.split(".")[0] == "tsae" for alias in node.names)
            # `import tsae` reaches everything: only what stands on top of the house may.
            assert not (below_the_app and any(alias.name == "tsae" for alias in node.names) and "testbed" not in path.parts)
        else:
            continue
        assert not own or id(node) in top, f"{name(path)}:{node.lineno}"


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_a_module_says_its_purpose_and_fits_into_a_head(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert source.count("\n") <= 400
    assert not source.strip() or ast.get_docstring(ast.parse(source))


def test_module_names_are_not_used_twice() -> None:
    """But for what every room has."""
    names = Counter(path.stem for path in MODULES)
    assert {n: k for n, k in names.items() if k > 1 and n not in ("__init__", "config")} == {}
    singular = {n.removesuffix("s") for n in names if n.endswith("s")}
    assert singular & set(names) == set()


def test_a_folder_has_about_a_dozen_modules() -> None:
    folders = Counter(path.parent for path in MODULES)
    assert {name(folder): n for folder, n in folders.items() if n > 14} == {}


def test_every_test_stands_in_the_room_that_it_tests() -> None:
    rooms = {path.name for path in (ROOT / "tsae").iterdir() if path.is_dir()} | {"app"}
    for path in (ROOT / "tests").rglob("test_*.py"):
        assert path.relative_to(ROOT / "tests").parts[0] in rooms
        assert not re.search(r"^\s*(from|import) (\w+\.)*test_", path.read_text(encoding="utf-8"), re.MULTILINE), path


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
