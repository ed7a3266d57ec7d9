"""The claims, and where each was made: the table literature.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Claim:
    """One thing that the literature says."""

    key: str
    """A letter."""
    title: str
    """A few words."""
    sentence: str
    """The claim."""
    source: str
    """An arXiv id, or how it is known."""
    needs: str = ""
    """What a single run lacks for a test; empty where it can test the claim."""
    add: str = ""
    """How to add that."""


STUDIED = "abcdefghijklmnopqrstuv"
"""Letters of the claims that docs/claims.md tests on the testbed."""

CLAIMS: dict[str, Claim] = {
    key: Claim(key, **claim)
    for key, claim in tomllib.loads(files("tsae.claims").joinpath("literature.toml").read_text("utf-8")).items()
}
