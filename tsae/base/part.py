"""Which share of a stage's work a process does.

Processes that know nothing of each other are given a Part each. Those of one torchrun learn their number from the
environment.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tsae.base.files import is_beginning, is_lock, read_object, write_first, write_json
from tsae.base.mirror import removed
from tsae.errors import TsaeError, refuse

_PARTS = "Give 1/n to n/n, such as 2/7."


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
        there = 0 <= self.index < self.n
        refuse("--part", (not there, f"there is no part {self.index + 1} of {self.n}", _PARTS))

    @classmethod
    def of(cls, text: str) -> Part:
        """The part that "i/n" names; i counts from 1.

        Raises:
            TsaeError: for another text, or i that is not between 1 and n.
        """
        found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text.strip())
        if found is None:
            raise TsaeError(f"{text!r} is not a part", where="--part", fix=_PARTS)
        return cls(int(found[1]) - 1, int(found[2]))

    def __str__(self) -> str:
        return f"{self.index + 1}/{self.n}"

    def own(self, path: Path) -> Path:
        """A name beside a file that no other part writes to."""
        return path.with_name(f"{path.name}.part-{self.index}")


def digest_of(identity: Mapping[str, Any]) -> str:
    """Hash of what a piece depends on. The piece keeps it, for pieces of several machines may be copied together."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def begin(
    file: Path, content: Mapping[str, Any], refused: str, fix: str, write: Callable[[Path, Any], Path] = write_json
) -> None:
    """Write a file that says of what its folder is, unless it is there: of several processes, one writes.

    Raises:
        TsaeError: with the given words, where the folder holds anything else.
    """
    folder = file.parent
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    others = not all(is_beginning(file, name) or is_lock(folder, name) for name in names)
    if not file.is_file():  # looked at after the others: another part may begin in this moment
        refuse(folder, (others, refused, fix))
        write_first(file, content, write)


def check_same_work(file: Path, identity: Mapping[str, Any], what: str) -> None:
    """Write down what the pieces beside a file are of, or compare it with what another process wrote.

    Args:
        file: a JSON file in the folder of the pieces.
        identity: what the pieces depend on.
        what: what is refused, such as "pieces of another encoding".

    Raises:
        TsaeError: where the folder holds pieces of other work, or of work that is not known.
    """
    folder = file.parent
    begin(file, identity, f"holds pieces, but no {file.name} that says of what", "Remove them.")
    found, wanted = read_object(file, f"Remove {folder}."), json.loads(json.dumps(identity))
    different = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
    what = f"holds {what}: {', '.join(different)} differ"
    refuse(folder, (found != wanted, what, "Give another folder, or remove these."))


def remove_work(file: Path) -> None:
    """Remove a folder of pieces, whose file says of what they are (`check_same_work`).

    The file goes last: pieces without it would be refused for ever, if the process is killed meanwhile.
    """
    for path in sorted(file.parent.iterdir()) if file.parent.is_dir() else ():
        if path != file:
            removed(path)
    removed(file.parent)


def world_size() -> int:
    """Number of processes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Place of this process among those of its machine, from 0."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))


def first_process() -> bool:
    """Whether this process is the first, which prints and writes for all."""
    return os.environ.get("RANK", "0") == "0"
