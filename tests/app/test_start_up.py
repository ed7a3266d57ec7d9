"""What importing costs: nothing heavy before it is used."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import tsae

HEAVY = ("torch", "transformers", "transformer_lens", "sae_lens", "pandas", "pyarrow", "scipy", "h5py", "plotly")


SCRIPT = """
import contextlib, io, json, sys
found = {}
for code in json.loads(sys.argv[1]):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        exec(code)
    found[code] = sorted({name.split(".")[0] for name in sys.modules})
print(json.dumps(found))
"""
LIGHT = [
    "import tsae",
    "import tsae.testbed",
    "from tsae import SAEConfig, TrainingConfig, CaptureConfig, DiffConfig, SamplingConfig, TsaeError",
    "from tsae import Checkpoint, CheckpointSeries; tsae_series = __import__('tsae').testbed.series()",
    "from tsae.cli import main; main(['--help'])",
    "from tsae.cli import main; main(['capture', '--help'])",
    "from tsae.cli import main; main(['rollouts', 'formats'])",
]


@pytest.fixture(scope="module")
def modules() -> dict[str, set[str]]:
    """Top-level modules after each of the lines, one after another in one process; the last one is heavy."""
    lines = json.dumps([*LIGHT, "from tsae import Rollouts"])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, lines], capture_output=True, text=True, timeout=900, check=True
    )
    return {code: set(names) for code, names in json.loads(done.stdout).items()}


@pytest.mark.parametrize("code", LIGHT)
def test_nothing_heavy_is_imported(code: str, modules: dict[str, set[str]]) -> None:
    assert "tsae" in modules[code]
    assert not modules[code] & set(HEAVY)


def test_the_check_can_fail(modules: dict[str, set[str]]) -> None:
    assert "pandas" in modules["from tsae import Rollouts"]


def test_every_public_name_is_there() -> None:
    for name in tsae.__all__:
        assert getattr(tsae, name) is not None
    assert dir(tsae) == sorted(tsae.__all__)
    with pytest.raises(AttributeError, match="attribute nope"):
        _ = tsae.nope
