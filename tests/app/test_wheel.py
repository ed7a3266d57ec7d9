"""The wheel: it holds what the package reads, and the demo runs from it in an empty folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from email import message_from_string
from pathlib import Path
from zipfile import ZipFile

import nbformat
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, by the build backend and without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "tsae", folder / "tsae", ignore=shutil.ignore_patterns("__pycache__"))
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-W", "ignore", "-c", build, "dist"], cwd=folder, check=True, capture_output=True)
    (found,) = (folder / "dist").glob("*.whl")
    return found


@pytest.mark.slow(ci=True)
def test_the_wheel_holds_all_files_and_metadata(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        told = message_from_string(archive.read(metadata).decode())
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tsae").rglob("*") if path.is_file()}
    missing = {name for name in there - names if "__pycache__" not in name and not name.endswith(".pyc")}
    assert not missing
    assert {"LICENSE", "tsae/testbed/LICENSE"} <= set(told.get_all("License-File") or [])
    assert told["License-Expression"] == "Apache-2.0"
    assert {"Summary", "Author", "Keywords", "Requires-Python", "Description-Content-Type"} <= set(told.keys())
    assert wheel.stat().st_size < 21e6
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    megabytes = re.search(r"wheel has (\d+) MB", readme)
    assert megabytes is not None
    assert abs(wheel.stat().st_size / 1e6 - int(megabytes[1])) < 1


@pytest.mark.slow(ci=True)
def test_the_demo_runs_from_the_wheel_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    with ZipFile(wheel) as archive:  # a wheel that is pure Python is installed by unpacking it
        archive.extractall(tmp_path / "site")
    (tmp_path / "empty").mkdir()
    given = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path / "empty", env=given, capture_output=True, text=True, check=True
        )
        assert "Warning" not in done.stderr
        return done.stdout

    assert run("-c", "import tsae; print(tsae.__file__)").startswith(str(tmp_path / "site"))
    small = "--problems 12 --samples 4 --band-samples 8 --no-attribute --training.tokens 20000"
    assert "report.html" in run("-m", "tsae", "demo", *small.split())
    assert (tmp_path / "empty" / "demo" / "report.html").is_file()


def test_the_quickstart_installs_itself_on_a_hosted_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first cell installs the wheel beside it, or a checkout below, and only where tsae is missing."""
    notebook = nbformat.read(ROOT / "notebooks" / "1_quickstart.ipynb", as_version=4)
    source = next(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert source.count("%pip install --quiet {source}") == 1
    code = source.replace("%pip install --quiet {source}", "installed.append(source)")
    monkeypatch.chdir(tmp_path)
    for there, expected in (
        ((), None),
        (("repository/pyproject.toml",), tmp_path / "repository"),
        (("tsae-0.1.0-py3-none-any.whl",), tmp_path / "tsae-0.1.0-py3-none-any.whl"),
    ):
        for name in there:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        installed: list[Path] = []
        scope = {"installed": installed}
        exec(code.replace('find_spec("tsae")', 'find_spec("tsae_missing")') if there else code, scope)
        assert installed == ([expected] if expected else [])
    shutil.rmtree(tmp_path / "repository")
    (tmp_path / "tsae-0.1.0-py3-none-any.whl").unlink()
    with pytest.raises(SystemExit, match=r"Put tsae-\*\.whl beside this notebook"):
        exec(code.replace('find_spec("tsae")', 'find_spec("tsae_missing")'), {"installed": []})
