"""Reformulations: a hard problem with a known answer becomes easier ones whose answers are known too.

The answer is given, one quantity is hidden, and the quantity is asked for. A `Reformulation` names its parent: when it
is solved, the parent may be tried (`tsae.rl.curriculum`). `tsae.rl.word_problems` makes them from questions in English,
`tsae.testbed.backward` from the testbed's chains.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tsae.base.files import as_path, write_text
from tsae.errors import TsaeError
from tsae.rollouts.problems import Problem, json_lines, parse_line, read_problems


@dataclass(frozen=True)
class Reformulation:
    """A problem made of another one."""

    problem: Problem
    """The question. Its answer is the hidden quantity as the parent has it; its id is the parent's id, ``~``, and the
    place of the quantity."""
    parent: str
    """Id of the original problem."""
    kind: str
    """Such as "operand", "backward" (chains) or "number" (word problems)."""
    hidden: tuple[int, int]
    """(start, stop) of what is hidden, in characters of the parent's prompt."""
    accepted: tuple[str, ...]
    """All right answers; more than one where the known answer leaves several."""

    def as_record(self) -> dict[str, Any]:
        """One JSON object; `tsae.rollouts.problems.read_problems` reads it as a problem."""
        origin = {"parent": self.parent, "kind": self.kind, "hidden": list(self.hidden)}
        return {**asdict(self.problem), **origin, "accepted": list(self.accepted)}


def write_reformulations(reformulations: Iterable[Reformulation], path: str | Path) -> None:
    """Write JSON lines: a problem's fields and parent, kind, hidden, accepted."""
    lines = [json.dumps(item.as_record(), ensure_ascii=False) + "\n" for item in reformulations]
    write_text(path, "".join(lines))


def read_reformulations(path: str | Path) -> list[Reformulation]:
    """Read what `write_reformulations` wrote.

    Raises:
        TsaeError: where the file is no problem file, or a line does not name its parent.
    """
    problems = read_problems(path)
    found = []
    for problem, (number, line) in zip(problems, json_lines(as_path(path)), strict=True):
        try:
            record = parse_line(line)
            parent, kind, accepted = record["parent"], record["kind"], record["accepted"]
            if not isinstance(accepted, list) or not all(isinstance(text, str) for text in (parent, kind, *accepted)):
                raise TypeError("parent, kind and each of the list accepted must be texts")
            start, stop = record["hidden"]
            if type(start) is not int or type(stop) is not int or not 0 <= start < stop:
                raise ValueError(f"hidden is {record['hidden']!r}, expected [start, stop]")
            found.append(Reformulation(problem, parent, kind, (start, stop), tuple(accepted)))
        except (KeyError, TypeError, ValueError) as error:
            what = f"a problem, but no reformulation ({type(error).__name__}: {error})"
            raise TsaeError(what, where=f"{path}:{number}", fix="Make the file with `tsae reformulate`.") from error
    return found
