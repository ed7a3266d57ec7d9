"""The workflow of continuous integration: it parses, is pinned, and names what is there."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
JOBS: dict[str, dict[str, Any]] = WORKFLOW["jobs"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINES = [step["run"] for job in JOBS.values() for step in job["steps"] if "run" in step]


def test_every_action_is_pinned_to_a_commit_and_every_job_ends() -> None:
    used = [step["uses"] for job in JOBS.values() for step in job["steps"] if "uses" in step]
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", name) for name in used)
    assert all("timeout-minutes" in job for job in JOBS.values())
    assert WORKFLOW["permissions"] == {"contents": "read"}


def test_every_python_and_system_that_is_promised_has_a_job() -> None:
    matrix = JOBS["systems"]["strategy"]["matrix"]
    classified = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if ":: 3." in name]
    assert matrix["python"] == classified
    systems = {*matrix["system"], *(one["system"] for one in matrix["include"])}
    assert systems == {"ubuntu-latest", "macos-latest", "windows-latest"}
    versions = [one["resolution"] for one in JOBS["versions"]["strategy"]["matrix"]["include"]]
    assert versions == ["lowest-direct", "highest"]


@pytest.mark.parametrize("line", LINES)
def test_every_line_is_a_command_of_bash(line: str) -> None:
    plain = re.sub(r"\$\{\{.*?\}\}", "x", line)
    assert subprocess.run(["bash", "-n", "-c", plain], capture_output=True, text=True).stderr == ""


def test_files_targets_and_extras_that_are_named_exist() -> None:
    words = " ".join([*LINES, WORKFLOW["env"]["ROOMS"]])
    for path in re.findall(r"(?<![\w/.])(?:tests|scripts|\.ci)/[\w./-]+", words):
        assert (ROOT / path).exists(), path
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(" ".join(re.findall(r"make ([\w -]+)", words)).split()) <= set(targets)
    extras = {extra for found in re.findall(r"\.\[([\w,]+)\]", words) for extra in found.split(",")}
    assert extras
    assert extras <= set(PROJECT["optional-dependencies"])
