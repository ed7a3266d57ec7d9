"""Torment tsae at random, and see whether it says so: no damage, fault or nonsense may become a plausible number.

Small real artefacts are made twice, for two runs: checkpoints, an adapter, a trainer's folder, rollouts, store, SAE,
features, diff, causal test, attribution, credit, the folder of `tsae run`. Then every case is drawn from its number and
the seed alone, and runs the real command in a process of its own:

- damaged: one file of one artefact is changed (flipped bit, zeroed page, cut, emptied, removed, renamed, doubled,
  exchanged with another, taken from the other run, replaced by a folder, by a link to nowhere or to a place outside,
  another version or value in its JSON), or an artefact is exchanged with that of the other run, or all inputs are
  read-only. A command that reads the artefact follows, or the one that wrote it;
- log: one to three places of a trainer's log are changed (a value, a key, a line, a column, the encoding), and it is
  imported;
- command: one or two options of a valid command line get a value that nobody means (negative, huge, no number, a path
  that is missing, an input, somebody else's file), or options from the command's own parser are added, or a command
  is put together from its parser alone;
- options: one numeric option of any command is -1, 0, nan or huge (only with `--only options`);
- fault: a command that writes is killed or interrupted at one of its writes or at any time, finds the disk full, no
  more files, or no memory, runs twice at once, or is read before it has ended. Then the same command is given again;
- kill: only the faults that kill, the command or one of its workers (only with `--only kill`);
- numbers: models with NaN, infinite, huge, tiny, constant or dead activations, equal checkpoints, one problem, one
  token; every stage follows;
- text: rollouts with hostile text, whose page is opened in a browser, and whose terminal output is looked at.

A case is good if the command ends well with the results of the undamaged artefacts, or if it ends with exit code 2 and
one paragraph, and no file that it did not write is changed. Of a changed checkpoint, problem file or trainer's folder
nobody knows what it held: results may differ where no other artefact remembers it. A finished result that is damaged
may stay as it is if the commands that read it refuse it. It is bad if results differ in silence, if there is a
traceback or another exit code, if it takes longer than two minutes (six where it runs every stage, or starts
processes), or if somebody else's file is touched. Of a changed log it is good, too, if what it gives can be read and
holds only ids of the vocabulary. After a fault the same command must end with the same bytes as if there had been none,
and leave nothing behind. Where memory runs out, native code such as OpenBLAS may end the process itself.

    python scripts/torture.py --cases 200 --seed 1
    python scripts/torture.py --seed 1 --case 37          # one of them again

What is drawn misses rare pairs of a file and a command. `--each remove` leaves nothing to chance: every file of every
artefact is damaged in this one way, once for each command that reads it and once for the one that wrote it.

    python scripts/torture.py --each remove
    python scripts/torture.py --each remove --case 37

Ends with one line of JSON.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from torments import artefacts, damage, faults, figures, logs, process, text, words

Kind = Literal["damaged", "log", "command", "options", "fault", "kill", "numbers", "text"]
KINDS: dict[str, tuple[Callable[[np.random.Generator, Path, Path], tuple[str, str]], float]] = {
    "damaged": (damage.attempt, 0.3),
    "log": (logs.attempt, 0.24),
    "command": (words.attempt, 0.24),
    "options": (words.odd_number, 0.0),
    "fault": (faults.attempt, 0.14),
    "kill": (faults.kill, 0.0),
    "numbers": (figures.attempt, 0.04),
    "text": (text.attempt, 0.04),
}
"""Of each kind what attempts it, and its share of the cases."""
Damage = Literal["flip", "zeros", "cut", "empty", "remove", "exchange", "folder", "link", "outside", "rename", "double",
                 "of another run", "version", "value"]  # fmt: skip
_AFRESH = 0.1
"""Share of the cases whose commands start in fresh processes."""


@dataclass(frozen=True)
class Torture:
    """How many cases, and which."""

    cases: int = 200
    """How many are drawn."""
    seed: int = 1
    only: Kind | None = None
    """Cases of one kind."""
    each: Damage | None = None
    """Instead of cases that are drawn: this damage, to each file of each artefact."""
    case: int | None = None
    """Only the case of this number."""
    all: bool = False
    """Print good cases, too."""
    workers: int = 2
    """Cases at once."""
    afresh: bool = False
    """Start every command as a fresh process. By default nine in ten are forked off a process that has imported
    everything, which is several times as quick."""
    to: Path | None = None
    """Folder of the artefacts, which is kept and used again; by default a temporary one."""
    keep: Path | None = None
    """Folder in which every case leaves its files, in a folder named after its number."""


def attempt(number: int, torture: Torture, made: Path, room: Path) -> tuple[str, str, str]:
    """(kind, what was done, what is bad: empty where the case is good)."""
    rng = np.random.default_rng([torture.seed, number])
    drawn = str(rng.choice(list(KINDS), p=[share for _, share in KINDS.values()]))
    kind = torture.each or torture.only or drawn
    here = room / str(number)
    here.mkdir()
    process.afresh(torture.afresh or rng.random() < _AFRESH)
    try:
        if torture.each:
            return kind, *damage.attempt_at(damage.places(made)[number], torture.each, rng, made, here)
        return kind, *KINDS[kind][0](rng, made, here)
    finally:
        if torture.keep is None:
            artefacts.clear(here)


def main() -> None:
    torture = tyro.cli(Torture, description=__doc__)
    with tempfile.TemporaryDirectory() as temporary:
        made = (torture.to or Path(temporary) / "made").absolute()
        room = (torture.keep or Path(temporary) / "cases").absolute()
        process.warm(artefacts.modules())
        artefacts.make(made)
        room.mkdir(exist_ok=True)
        cases = len(damage.places(made)) if torture.each else torture.cases
        numbers = range(cases) if torture.case is None else [torture.case]
        kinds: Counter[str] = Counter()
        bad = []
        with ThreadPoolExecutor(torture.workers) as pool:
            found = pool.map(lambda number: attempt(number, torture, made, room), numbers)
            for number, (kind, what, wrong) in zip(numbers, found, strict=True):
                kinds[f"{kind}, {'bad' if wrong else 'good'}"] += 1
                if wrong or torture.all or torture.case is not None:
                    print(f"{number}: {what}\n    {wrong or 'good'}", flush=True)
                if wrong:
                    bad.append({"case": number, "kind": kind, "what": what, "wrong": wrong})
    figures = {"cases": len(numbers), "seed": torture.seed, "kinds": dict(sorted(kinds.items())), "bad": bad}
    print(json.dumps({"name": "torture", "ratio": len(bad) / max(len(numbers), 1), **figures}))


if __name__ == "__main__":
    main()
