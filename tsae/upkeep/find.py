"""Find what tsae wrote below a path: artefacts, and the runs that they are stages of."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tsae.base.files import is_kept
from tsae.claims.run_claims import said_claims
from tsae.errors import TsaeError
from tsae.stamps import STAMPS, read_stamp
from tsae.upkeep.kinds import CLAIMS, FOLDERS, PAGE, ROLLOUTS, STAMP, TABLES, Kind, kind_of_file, kind_of_folder

_STAGES: dict[str, Kind] = {
    "activations": next(kind for kind in FOLDERS if kind.name == "store"),
    "sae": next(kind for kind in FOLDERS if kind.name == "SAE"),
    "evaluation": next(kind for kind in FOLDERS if kind.name == "evaluation"),
    "features": next(kind for kind in FOLDERS if kind.name == "features"),
    "diff": next(kind for kind in FOLDERS if kind.name == "diff"),
    "report.html": PAGE,
}
"""Of a whole run."""
_ROLLOUTS = {"demo.json": ("rollouts.parquet",), "run.json": ("rollouts/log.parquet", "rollouts/rollouts.parquet")}


@dataclass(frozen=True)
class Artefact:
    """A folder or file of a kind."""

    path: Path
    kind: Kind
    run: Path | None = None
    """The folder of the run that it is a stage of."""

    @property
    def shown(self) -> str:
        """Its path for messages: relative to the working folder if it lies in it."""
        return shown_path(self.path)


def shown_path(path: Path) -> str:
    """A path, relative to the working folder if it lies below."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def find_artefacts(path: Path) -> list[Artefact]:
    """What tsae wrote at an absolute path and below, and stages of a run that are not there; in the order in which they
    rest on each other. Hidden files and folders, and what a repair kept, are left out; links to folders are not
    followed.

    Raises:
        TsaeError: where folders lie in each other without end.
    """
    run = next((folder for folder in (path, *path.parents) if _stamp(folder) is not None), None)
    try:
        found = {artefact.path: artefact for artefact in _walk(path, run)}
        for missing in _missing(path) if path.is_dir() else ():
            found.setdefault(missing.path, missing)
    except RecursionError as error:
        raise TsaeError("folders are nested too deeply", where=path, fix="Give the folder of a run.") from error
    return sorted(found.values(), key=lambda artefact: (artefact.kind.rank, artefact.path.as_posix()))


def aside_name(path: Path) -> Path:
    """Where a damaged artefact lies while it is made again."""
    return path.with_name(f".{path.name}.damaged")


def _walk(path: Path, run: Path | None) -> Iterator[Artefact]:
    if path.is_file():
        kind = kind_of_file(path)
        if kind is not None:
            yield Artefact(path, kind, run)
        return
    if not path.is_dir():
        return
    stamp = _stamp(path)
    run = path if stamp is not None else run
    kind = None if stamp is not None else kind_of_folder(path)
    if kind is not None:
        yield Artefact(path, kind, run)
    for below in sorted(path.iterdir()):
        if below.name.startswith((".", "checkpoint")) or (below.is_symlink() and below.is_dir()):
            continue
        if is_kept(below):
            continue
        # Files of an artefact are its own. A store's folders hold its shards.
        if (below.is_dir() and (kind is None or kind.name != "store")) or (below.is_file() and kind is None):
            yield from _walk(below, run)


def _stamp(folder: Path) -> Path | None:
    """The stamp of a run in a folder, or where it was."""
    for name in STAMPS:
        file = folder / name
        if (file.is_file() and kind_of_file(file) is STAMP) or (folder / f".{name}.copy").is_file():
            return file
    return None


def _missing(path: Path) -> Iterator[Artefact]:
    """Stages of the runs at a path and below that are not there, and what an interrupted repair had moved aside."""
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            place = Path(folder) / name.removeprefix(".").removesuffix(".damaged")
            if name == aside_name(place).name and not place.exists():
                aside = Path(folder) / name
                kind = kind_of_folder(aside) if aside.is_dir() else kind_of_file(aside)
                yield Artefact(place, kind or TABLES, None)
        folders[:] = [name for name in folders if not name.startswith(".")]
        run = Path(folder)
        stamp = _stamp(run)
        if stamp is None:
            continue
        expected = {stamp.name: STAMP, **dict.fromkeys(_ROLLOUTS[stamp.name], ROLLOUTS), **_STAGES}
        expected |= dict.fromkeys(_tests(stamp), next(kind for kind in FOLDERS if kind.name == "causal test"))
        if said_claims(run) or os.path.lexists(run / "claims.json"):
            expected["claims.json"] = CLAIMS
        for name, kind in expected.items():
            # A file in the place of a folder, or a folder in that of a file, is not the stage.
            if not ((run / name).is_dir() if kind.marks else (run / name).is_file()):
                yield Artefact(run / name, kind, run)


def _tests(stamp: Path) -> list[str]:
    """Folders of the causal tests that a run has made; none where its stamp is damaged, or names no such folders."""
    try:
        names = (read_stamp(stamp.parent, stamp.name) or {})["found"]["causal"]
        return [f"causal/{name}" for name in names if _is_name(name)]
    except (TsaeError, KeyError, TypeError):
        return []


def _is_name(name: object) -> bool:
    """Whether it may be that of a folder, and leads nowhere else."""
    known = isinstance(name, str) and len(name.encode("utf-8", "replace")) < 256
    return known and name not in ("", "..") and Path(str(name)).name == name
