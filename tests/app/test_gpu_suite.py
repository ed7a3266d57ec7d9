"""The suite for GPUs on a machine without one: its bench (bench_gpu.py) runs at a tiny size; it says
what it needs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import gpu_suite
import pytest
import torch

ROOT = Path(__file__).parents[2]
_BARE = '''"""What a bare machine lacks; and a bench that fails."""
import sys

MISSING = "sae_lens transformer_lens datasets trl ray s3fs math_verify".split()


class Lacks:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Lacks())
if "capture" in sys.orig_argv:
    sys.exit("no room")
'''


@pytest.mark.slow
def test_it_runs_on_a_bare_machine_and_a_bench_that_fails_costs_no_other(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "sitecustomize.py").write_text(_BARE)
    command = [ROOT / "scripts" / "gpu_suite.sh", "--minutes", "20", "--tiny", "--device", "cpu", "--out", tmp_path]
    env = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path / "bare")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "measured-gpu.md").read_text("utf-8")
    sections = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    assert re.match(r"\n\d+ passed in ", sections["Tests"]), done.stdout
    assert "Ended with exit code 1: `SystemExit: no room`" in sections["Capture"]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text("utf-8").splitlines()]
    for title, part, figure in (
        ("Training step in bfloat16", "train", "tokens_per_s"),
        ("Training step in float32", "train", "tokens_per_s"),
        ("Encoding", "encode", "tokens_per_s"),
    ):
        shown = [row for row in rows if row["part"] == part and f"| {row[figure]:,.1f} |" in sections[title]]
        assert shown, title
        assert "exit code" not in sections[title]


@pytest.mark.slow(ci=True)
def test_a_part_that_takes_too_long_keeps_its_rows(tmp_path: Path) -> None:
    tables, log = tmp_path / "tables.md", tmp_path / "log.txt"
    writes = f"import time; open({str(tables)!r}, 'w').write('\\n## Train\\n\\n| 1 |\\n'); print('row', flush=True)"
    code = gpu_suite.run([sys.executable, "-c", f"{writes}; time.sleep(600)"], 3, log)
    assert code is None
    part = gpu_suite.Part("Training step", 90, ())
    text = gpu_suite.section(part, code, 3, log.read_text(), tables)
    assert text == "\n## Training step\n\n| 1 |\n\nCut off after 3 s.\n"
    printed = "FAILED a.py::b - c\n== 1 failed, 4 passed ==\n"
    failed = gpu_suite.section(gpu_suite.Part("Tests", 90, ()), 1, 3, printed, tmp_path / "none")
    assert "1 failed, 4 passed\n\n- `FAILED a.py::b - c`\n" in failed


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    env = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run([ROOT / "scripts" / "gpu_suite.sh"], capture_output=True, text=True, env=env)
    assert done.returncode == 1
    assert done.stderr.strip() == "gpu_suite: torch sees no GPU on this machine"
