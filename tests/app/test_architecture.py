"""The house: layers and circles as `lint-imports` sees them, the picture of them, and what keeps modules readable."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "tsae").rglob("*.py"))
CONTRACT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
LAYERS = next(c["layers"] for c in CONTRACT["contracts"] if c["type"] == "layers")

APP = LAYERS[: LAYERS.index("testbed")]
ROOMS_BELOW_THE_APP = {room for layer in LAYERS if layer not in APP for room in layer.split(" | ")} - {"testbed"}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    linter = Path(sys.executable).with_name("lint-imports")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [linter, "--no-cache"], cwd=folder, env=environment, capture_output=True, text=True, timeout=900
    )


def test_imports_go_down_the_layers_and_never_in_a_circle() -> None:
    found = lint_imports(ROOT)
    assert found.returncode == 0, found.stdout
    assert "0 broken" in found.stdout


def test_an_import_upwards_would_be_seen(tmp_path: Path) -> None:
    """The same contract, on a package of two rooms with an upward import inside a function."""
    package = tmp_path / "tsae"
    for room in ("base", "report"):
        (package / room).mkdir(parents=True)
        (package / room / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "report" / "leaf.py").write_text("")
    (package / "base" / "root.py").write_text("def f():\n    from tsae.report import leaf\n    return leaf\n")
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    contract = settings[settings.index("[tool.importlinter]") :]
    # Rooms that are not there are optional: in brackets.
    rooms = {room for layer in LAYERS for room in layer.split(" | ")} - {"base", "report"}
    contract = re.sub(r"\b\w+\b", lambda word: f"({word[0]})" if word[0] in rooms else word[0], contract)
    (tmp_path / "pyproject.toml").write_text(contract)
    found = lint_imports(tmp_path)
    assert found.returncode == 1, found.stdout
    assert "tsae.base.root -> tsae.report.leaf" in found.stdout


def test_the_architecture_page_shows_the_contract() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    picture = re.search(r"```text\n(.*?)```", page, re.DOTALL)
    assert picture is not None
    rows = [line.partition("  ")[0].strip() for line in picture[1].splitlines() if line and line[0] != " "]
    drawn = [re.split(r", ", row) for row in rows]
    assert drawn == [layer.split(" | ") for layer in LAYERS]


def test_own_modules_are_imported_at_the_top() -> None:
    """Not in functions, and not under TYPE_CHECKING. `import tsae` reaches everything: only the app may. Commands
    import what is heavy when they are executed."""
    found = []
    for path in MODULES:
        if path.parent.name == "commands" or name(path) == "tsae/base/display.py":
            continue
        tree = parsed(path)
        top = set(map(id, tree.body))
        below_the_app = path.relative_to(ROOT).parts[1] in ROOMS_BELOW_THE_APP
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                own = node.level > 0 or (node.module or "").split(".")[0] == "tsae"
                everything = node.module == "tsae"
            elif isinstance(node, ast.Import):
                own = any(alias.name.split(".")[0] == "tsae" for alias in node.names)
                everything = any(alias.name == "tsae" for alias in node.names)
            else:
                continue
            if own and (id(node) not in top or (everything and below_the_app)):
                found.append(f"{name(path)}:{node.lineno}")
    assert found == []


def test_a_module_says_its_purpose() -> None:
    assert [name(path) for path in MODULES if not ast.get_docstring(parsed(path))] == []


def test_values_do_not_change() -> None:
    """Configs and results are frozen; these few are filled while something is read."""
    changing = {"BatchTokens", "Entry", "Inert", "Known", "LensTemporalSAEConfig", "LoraUpdate"}
    changing |= {"Replayed", "State", "TokenShares", "_Part"}
    found = set()
    for path in MODULES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                made = [ast.unparse(d) for d in node.decorator_list if ast.unparse(d).startswith("dataclass")]
                if made and "frozen=True" not in made[0]:
                    found.add(node.name)
    assert found == changing


def test_every_test_stands_in_the_room_that_it_tests() -> None:
    rooms = {path.name for path in (ROOT / "tsae").iterdir() if path.is_dir()} | {"app"}
    for path in (ROOT / "tests").rglob("test_*.py"):
        assert path.relative_to(ROOT / "tests").parts[0] in rooms
        assert not re.search(r"^\s*(from|import) (\w+\.)*test_", path.read_text(encoding="utf-8"), re.MULTILINE), path


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_modules_on_the_architecture_page_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (`(\w+)`|[a-z ]*) +\| [^|]+\| ([^|]+) \|$", page[page.index("## Where to look") :], re.MULTILINE
    )
    room, missing, named = "", [], 0
    for first, name, places in rows:
        room = name or (room if not first.strip() else "")
        for module in re.findall(r"`([a-z_/]+(?:\.py)?)`", places):
            folders = (ROOT / "tsae" / room, ROOT / "tsae", ROOT)
            commands = room == "commands" and f'"{module}"' in (ROOT / "tsae" / "cli.py").read_text(encoding="utf-8")
            named += 1
            if not commands and not any((folder / module).exists() for folder in folders):
                missing.append((room, module))
    assert named > 40
    assert missing == []
