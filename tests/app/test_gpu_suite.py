"""The suite for GPUs on a machine without one: its benches run at a tiny size, and it says what it needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_benches_run_and_write_their_page(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts" / "bench_gpu.py", "--device", "cpu", "--scale", "tiny", "--rounds", "1"]
    done = subprocess.run([*command, "--to", tmp_path / "page.md"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for part in ("train", "capture", "encode", "diff"):
        assert found[part]
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert page.count("\n## ") == 4
    shown = f"| {found['encode'][0]['tokens_per_s']:,.1f} |"
    assert shown in page


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([ROOT / "scripts" / "gpu_suite.sh"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip() == "gpu_suite: torch sees no GPU on this machine"
