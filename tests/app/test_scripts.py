"""Every script at a tiny size: it ends well, and a bench with its line of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from support.cli import TINY as TINY_DEMO
from tsae.demo import demo

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
SOLUTIONS = os.environ.get("TSAE_GSM8K", ROOT.parent / "shared" / "data" / "gsm8k" / "example_model_solutions.jsonl")

TINY = {
    "bench_capture.py": f"--solutions {SOLUTIONS} --tokens 512 --batch-tokens 512 --rounds 1 --window-rounds 1 "
    "--window-tokens 5000 --memory-tokens 2000 4000",
    "bench_diff.py": "--trajectories 192 --tokens 30 --k 4 --d-sae 64 --n-bootstrap 100 --n-permutations 1000",
    "bench_import.py": "--trajectories 16 --workers 1",
    "bench_report.py": "--features 48 --problems 12 --tokens 12 --k 4 --rounds 1",
    "bench_scale.py": "--problems 12 --samples 2 --tokens 20 --times 2 --d-model 8 --d-sae 64 --k 4",
    "bench_train.py": "--d-model 16 --d-sae 64 --k 4 --pairs 64 --steps 1",
    "check_attribution.py": "",
    "check_claims.py": "",
    "check_english.py": "docs/index.md --since HEAD",
    "check_null.py": "--weights --to null --problems 12 --seeds 1 --samples 2",
    "check_statements.py": "--draws 2",
    "torture.py": "--cases 4",
}
ELSEWHERE = {
    "bench_gpu.py": "app/test_gpu_suite.py",
    "build_testbed.py": "testbed/test_build.py",
    "gpu_suite.py": "app/test_gpu_suite.py",
    "gpu_suite.sh": "app/test_gpu_suite.py",
    "run_notebooks.py": "app/test_notebooks.py",
    "smollm2_gsm8k.sh": "app/test_demo.py",
}
"""Run by another test."""
NOT_RUN = {
    "check_mutants.py": "needs the extra mutants, and the fast tests several times",
    "docstring_tables.py": "a hook of mkdocs, which runs it when the site is built",
    "gsm8k_log.py": "run by smollm2_gsm8k.sh",
    "take_picture.py": "needs a whole demo; test_demo.py looks at what it took",
}


def test_no_script_is_forgotten() -> None:
    named = [*TINY, *ELSEWHERE, *NOT_RUN]
    assert sorted(named) == sorted(path.name for path in SCRIPTS.iterdir() if path.suffix in (".py", ".sh"))
    for name, file in ELSEWHERE.items():
        assert name.partition(".")[0] in (ROOT / "tests" / file).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Run a script once in a folder with a demo: its output."""
    folder = tmp_path_factory.mktemp("scripts")
    demo(replace(TINY_DEMO, to=folder / "demo"), progress=False)
    environment = {**os.environ, "TSAE_BIN": str(Path(sys.executable).parent), "N": "1"}

    @cache
    def once(name: str) -> str:
        words = [*([sys.executable] if name.endswith(".py") else []), SCRIPTS / name, *TINY[name].split()]
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return once


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_it_ends_well(run: Callable[[str], str], name: str) -> None:
    output = run(name)
    if name.startswith("bench_"):
        assert isinstance(json.loads(output.splitlines()[-1]), dict | list)
