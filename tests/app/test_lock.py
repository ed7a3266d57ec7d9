"""The locks: every package that `make` installs is in one, at the version of constraints.txt and with its hashes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
NOT_LOCKED = {"torch", "triton", "tsae"}  # torch and Triton are taken from where the user takes them: see the Makefile


def pinned(file: Path) -> dict[str, str]:
    """Version by name."""
    found = re.findall(r"^([\w.-]+)(?:\[[^]]*\])?==([^ ;\n]+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


LOCKS = {"requirements.lock": (), "requirements-dev.lock": ("dev", "rl")}
"""With the extras that each is for."""
CONSTRAINTS = pinned(ROOT / "constraints.txt")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize("name", LOCKS)
def test_all_that_is_asked_for_is_locked(name: str) -> None:
    lock, extras = pinned(ROOT / name), list(LOCKS[name])
    asked = [Requirement(text) for text in PROJECT["dependencies"]]
    for extra in extras:
        for text in PROJECT["optional-dependencies"][extra]:
            if (found := Requirement(text)).name == "tsae":
                extras += sorted(found.extras)
            else:
                asked.append(found)
    missing = sorted({canonicalize_name(r.name) for r in asked} - lock.keys() - NOT_LOCKED)
    assert not missing, f"run `make lock`: {', '.join(missing)}"
    wrong = [str(r) for r in asked if r.name not in NOT_LOCKED and lock[canonicalize_name(r.name)] not in r.specifier]
    assert not wrong


@pytest.mark.parametrize(("name", "least"), [("requirements.lock", 80), ("requirements-dev.lock", 200)])
def test_versions_are_those_of_the_constraints(name: str, least: int) -> None:
    lock = pinned(ROOT / name)
    both = lock.keys() & CONSTRAINTS.keys()
    assert len(both) > least
    assert {name: lock[name] for name in both} == {name: CONSTRAINTS[name] for name in both}


@pytest.mark.parametrize("name", LOCKS)
def test_every_entry_has_hashes_and_no_address(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    entries = re.split(r"^(?=[\w])", text, flags=re.MULTILINE)[1:]
    assert len(entries) == len(re.findall("^[^ ]*==", text, re.MULTILINE))
    assert not [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry]
    assert not re.search(r"https?://|file:|--index|--find-links| @ ", text)
