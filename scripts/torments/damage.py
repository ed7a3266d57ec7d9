"""Damaged artefacts: one file is changed, and a command that reads it follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from torments import artefacts
from torments.artefacts import READERS


def damages(file: Path, other: Path, rng: np.random.Generator) -> Mapping[str, Callable[[], object]]:
    whole = bytearray(file.read_bytes())
    place = int(rng.integers(0, max(len(whole), 1)))

    def flip() -> None:
        whole[place] ^= 1 << int(rng.integers(0, 8))
        file.write_bytes(whole)

    def zeros() -> None:
        page = place // 4096 * 4096
        whole[page : page + 4096] = bytes(len(whole[page : page + 4096]))
        file.write_bytes(whole)

    def exchange() -> None:
        content = other.read_bytes()
        other.write_bytes(file.read_bytes())
        file.write_bytes(content)

    def folder() -> None:
        file.unlink()
        file.mkdir()

    def link() -> None:
        file.unlink()
        file.symlink_to(file.parent / "nowhere")

    return {
        "flip": flip, "zeros": zeros, "cut": lambda: file.write_bytes(whole[:place]),
        "empty": lambda: file.write_bytes(b""), "remove": file.unlink, "exchange": exchange, "folder": folder,
        "link": link,
    }  # fmt: skip


def attempt(rng: np.random.Generator, made: Path, here: Path) -> tuple[str, str]:
    """(what was done, what is bad of what follows: nothing where the case is good)."""
    stage = READERS[int(rng.integers(len(READERS)))]
    artefacts.lay_out(stage, made, here)
    whole = here / str(rng.choice(stage.reads))
    files = sorted(p for p in whole.rglob("*") if p.is_file()) if whole.is_dir() else [whole]
    file = files[int(rng.integers(len(files)))]
    alike = [p for p in files if p != file and p.suffix == file.suffix] or files
    possible = damages(file, alike[int(rng.integers(len(alike)))], rng)
    how = str(rng.choice(list(possible)))
    possible[how]()
    ended, wrong = artefacts.watched(stage.command, here)
    if not wrong and ended is not None and ended.returncode == 0:
        wrong = artefacts.difference(here / "out", made / f"expected-{stage.name}")
    return f"{stage.name}: {how} {file.relative_to(here)}", wrong
