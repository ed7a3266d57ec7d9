"""No code in a file is run, and nothing asks the network: what the source says, and that the guard of the tests bites.

`tests/conftest.py` watches every test and the processes that it starts; see `tests/support/guard`.
"""

from __future__ import annotations

import ast
import os
import pickle
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
# What runs code that stands in a file, and what unpacks archives blindly.
_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "tarfile"}
_CALLS = {"eval", "exec", "__import__", "pd.read_pickle", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
_CALLS |= {"zipfile.ZipFile", "shutil.unpack_archive"}
# Calls that are harmless with one argument alone.
_NEEDED = {"torch.load": "weights_only=True", "np.load": "allow_pickle=False", "np.save": "allow_pickle=False"}
_ALLOWED = {
    "tsae/base/inert_pickle.py": ["zipfile.ZipFile(file)", "zipfile.ZipFile(as_path(file))"],  # reads one small member
    "tsae/base/untrusted.py": ["zipfile.ZipFile(file)"],  # reads sizes and unpacks nothing
    "tsae/base/array_files.py": ["from pickle import UnpicklingError"],  # an error of torch.load
}

AN_ORDERED_DICT = pickle.dumps(OrderedDict())
LOAD = "import pickle, sys; pickle.loads(bytes.fromhex(sys.argv[1]))"


def faults(source: str) -> list[str]:
    """Statements of a module that may run what a file says."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            wrong = any(name.partition(".")[0] in _MODULES for name in names)
        elif isinstance(node, ast.Call):
            name, given = ast.unparse(node.func), [ast.unparse(keyword) for keyword in node.keywords]
            wrong = name in _CALLS or (name in _NEEDED and _NEEDED[name] not in given)
        else:
            continue
        found += [ast.unparse(node)] if wrong else []
    return found


def test_nothing_in_the_source_runs_what_a_file_says() -> None:
    found = {}
    for file in (file for folder in ("tsae", "scripts") for file in sorted((ROOT / folder).rglob("*.py"))):
        found[file.relative_to(ROOT).as_posix()] = faults(file.read_text(encoding="utf-8"))
    assert {file: wrong for file, wrong in found.items() if wrong} == _ALLOWED


def test_a_fault_in_the_source_would_be_seen() -> None:
    bad = ["import pickle", "from joblib.x import load", "torch.load(file)", "np.load(file, allow_pickle=True)"]
    assert faults("\n".join([*bad, "torch.load(file, weights_only=True)", "yaml.safe_load(text)"])) == bad


def forbidden() -> str:
    return Path(os.environ["TSAE_GUARD_LOG"]).read_text()


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What this test does on purpose is not held against it."""
    file = Path(os.environ["TSAE_GUARD_LOG"])
    before = file.stat().st_size
    yield
    os.truncate(file, before)


@pytest.mark.usefixtures("forgotten")
def test_pickles_and_other_machines_are_forbidden_here() -> None:
    with pytest.raises(OSError, match=r"loads a pickle, of collections\.OrderedDict"):
        pickle.loads(AN_ORDERED_DICT)
    for ask in (
        lambda: socket.create_connection(("192.0.2.1", 80), timeout=1),
        lambda: socket.getaddrinfo("example.org", 80),
        lambda: socket.gethostbyname("example.org"),
    ):
        with pytest.raises(OSError, match="forbidden in tests"):
            ask()
    assert sum(Path(__file__).name in line for line in forbidden().splitlines()) == 4


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("given", [{}, {"PYTHONPATH": os.pathsep.join(sys.path)}])
def test_they_are_forbidden_in_processes_of_a_test(given: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOAD, AN_ORDERED_DICT.hex()], env={**os.environ, **given}, capture_output=True, text=True
    )
    assert "forbidden in tests: <string>:1 loads a pickle" in done.stderr
    assert "OrderedDict" in forbidden()


@pytest.mark.usefixtures("forgotten")
def test_a_forbidden_load_is_noted_even_if_the_error_is_caught(tmp_path: Path) -> None:
    torch.save({"a": Path("b")}, tmp_path / "file.pt")
    before = forbidden()
    with pytest.raises(OSError, match="forbidden"):
        torch.load(tmp_path / "file.pt", weights_only=False)
    assert "serialization.py" in forbidden().removeprefix(before)


def test_tensors_and_plain_containers_load_without_a_pickle(tmp_path: Path) -> None:
    """torch has a reader of its own for these, which the guard has no need to allow."""
    torch.save({"samples": [{"tokens": torch.arange(3)}]}, tmp_path / "file.pt")
    assert torch.load(tmp_path / "file.pt", weights_only=True)["samples"][0]["tokens"].tolist() == [0, 1, 2]
