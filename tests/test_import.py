"""What importing costs: nothing heavy before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tsae

HEAVY = ("torch", "transformers", "transformer_lens", "sae_lens", "pandas", "pyarrow", "scipy", "h5py", "plotly")


def modules_after(code: str) -> set[str]:
    script = f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\nsys.stderr.write(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return {name.split(".")[0] for name in done.stderr.split()}


@pytest.mark.parametrize(
    "code",
    [
        "import tsae",
        "import tsae.testbed",
        "from tsae import SAEConfig, TrainingConfig, CaptureConfig, DiffConfig, SamplingConfig, TsaeError",
        "from tsae import Checkpoint, CheckpointSeries; tsae_series = __import__('tsae').testbed.series()",
        "from tsae.cli import main; main(['--help'])",
        "from tsae.cli import main; main(['capture', '--help'])",
    ],
)
def test_nothing_heavy_is_imported(code: str) -> None:
    found = modules_after(code)
    assert "tsae" in found
    assert not found & set(HEAVY)


def test_the_check_can_fail() -> None:
    assert "pandas" in modules_after("from tsae import Rollouts")


def test_every_public_name_is_there() -> None:
    for name in tsae.__all__:
        assert getattr(tsae, name) is not None
    assert dir(tsae) == sorted(tsae.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = tsae.nope
