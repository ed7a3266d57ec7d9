"""What editors and type checkers see of the public names: real types, and examples of the docs that check."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import tsae

pytestmark = pytest.mark.slow  # mypy reads the package anew
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TORCH = """
from typing import Any, TypeVar
F = TypeVar("F")
class no_grad:
    def __call__(self, function: F) -> F: ...
class inference_mode:
    def __call__(self, function: F) -> F: ...
def __getattr__(name: str) -> Any: ...
"""
"""The decorators of torch, which must not hide the types of ours."""
CONFIG = """
[mypy]
python_version = 3.11
check_untyped_defs = true
allow_redefinition = true
# A section uses names of the sections before it, and knows that its run has what it asks for.
disable_error_code = name-defined, union-attr
mypy_path = stubs:{root}
# Only our own types matter here; those of other packages would take a minute.
[mypy-numpy.*,pandas.*,scipy.*,pyarrow.*,plotly.*,transformers.*,h5py.*,tqdm.*,safetensors.*,einops.*,trl.*,\
datasets.*,sae_lens.*,transformer_lens.*,accelerate.*,yaml.*,peft.*,gguf.*,torch.*]
ignore_missing_imports = true
follow_imports = skip
[mypy-torch]
follow_imports = normal
"""


def sections(page: Path) -> list[list[str]]:
    """The Python blocks of every section of a page; blocks of a section share their names."""
    parts = re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = [re.findall(r"^```python[^\n]*\n(.*?)^```$", part, re.MULTILINE | re.DOTALL) for part in parts]
    return [blocks for blocks in found if blocks]


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What mypy says of the names and of the examples, by file name."""
    folder = tmp_path_factory.mktemp("typed")
    (folder / "mypy.ini").write_text(CONFIG.format(root=ROOT))
    (folder / "stubs" / "torch").mkdir(parents=True)
    (folder / "stubs" / "torch" / "__init__.pyi").write_text(TORCH)
    names = "\n".join(f"reveal_type(tsae.{name})" for name in tsae.__all__)
    (folder / "names.py").write_text(f"import tsae\n{names}\ntsae.nope\n")
    (folder / "wrong.py").write_text("import tsae\ntsae.SAEConfig(d_sae='many')\ntsae.Rollouts.read()\n")
    for page in PAGES:
        for number, blocks in enumerate(sections(page)):
            code = textwrap.indent("\n".join(blocks), "    ")
            (folder / f"{page.stem.replace('-', '_')}_{number}.py").write_text(f"import tsae\n\ndef example():\n{code}")
    files = sorted(str(file) for file in folder.glob("*.py"))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", *files],
        capture_output=True, text=True, timeout=900, cwd=folder,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    found = {Path(file).name: "" for file in files}
    for line in done.stdout.splitlines():
        name = Path(line.partition(":")[0]).name
        if name in found:
            found[name] += line + "\n"
    return found


def test_public_names_have_their_types(checked: dict[str, str]) -> None:
    revealed = re.findall(r'Revealed type is "(.*)"$', checked["names.py"], re.MULTILINE)
    assert len(revealed) == len(tsae.__all__)
    for name, kind in zip(tsae.__all__, revealed, strict=True):
        assert kind not in ("Any", "builtins.object"), name
    capture = revealed[tsae.__all__.index("capture")]
    assert "series: tsae.checkpoints.series.CheckpointSeries" in capture
    assert capture.endswith("-> tsae.activations.store.ActivationStore")


def test_mistakes_are_found(checked: dict[str, str]) -> None:
    assert 'Module has no attribute "nope"' in checked["names.py"]
    assert 'expected "int"' in checked["wrong.py"]
    assert "Missing positional argument" in checked["wrong.py"]


def test_examples_check(checked: dict[str, str]) -> None:
    examples = {name: said for name, said in checked.items() if name not in ("names.py", "wrong.py")}
    assert len(examples) > 5
    assert "".join(examples.values()) == ""
