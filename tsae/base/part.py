"""Part: which share of a stage's work a process does, where the processes know nothing of each other."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tsae.errors import TsaeError


@dataclass(frozen=True)
class Part:
    """One of n equal parts.

    Args:
        index: from 0.
        n: parts in all.
    """

    index: int = 0
    n: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.n:
            raise TsaeError(
                f"there is no part {self.index + 1} of {self.n}", where="--part", fix="Give 1/n to n/n, such as 2/7."
            )

    @classmethod
    def of(cls, text: str) -> Part:
        """The part that "i/n" names; i counts from 1.

        Raises:
            TsaeError: for another text, or i that is not between 1 and n.
        """
        found = re.fullmatch(r"(\d+)/(\d+)", text.strip())
        if found is None:
            raise TsaeError(f"{text!r} is no part", where="--part", fix="Give 1/n to n/n, such as 2/7.")
        return cls(int(found[1]) - 1, int(found[2]))

    def __str__(self) -> str:
        return f"{self.index + 1}/{self.n}"

    def own(self, path: Path) -> Path:
        """A name beside a file that no other part writes to."""
        return path.with_name(f"{path.name}.part-{self.index}")
