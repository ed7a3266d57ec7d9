"""Verification: is what lies on disk as it was written, is it complete, and does it rest on what is there now?

1. Find the artefacts (`tsae.upkeep.find`).
2. Read every byte of them once, several files at a time, and keep the checksums.
3. Check each as the stage does that reads it: checksums, versions, structure.
4. Compare the fingerprints of inputs that an artefact names with those of the inputs that lie there now.
5. Find the command that makes it again (`tsae.base.disk.made_by`); that of a stage of a run is the run's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tsae.activations.shards.manifest import read_manifest
from tsae.base.disk.made_by import MadeBy, made_by
from tsae.base.disk.sealed_parquet import check_parquet
from tsae.base.files import as_path, read_object
from tsae.base.progress import progress_bar
from tsae.base.seal import digest
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts
from tsae.sae.model import TemporalSAE
from tsae.stamps import read_stamp
from tsae.upkeep.find import Artefact, find_artefacts, shown_path
from tsae.upkeep.kinds import AGAIN, STAMP, OtherVersion
from tsae.upkeep.stamped import stamped_command

State = Literal["intact", "no checksum", "damaged", "missing", "incomplete", "outdated", "other version", "not ours"]
"""no checksum: another program wrote it; it can be read, and nothing tells whether it is whole.
outdated: it rests on other inputs than those that are there now."""
_THREADS = 4
_SAE = "weights of the SAE"
_OPTIONS = ("--rollouts", "--store", "--sae", "--features", "--diff", "--log")
"""Options that name inputs whose fingerprints artefacts keep."""
_STAGES = {
    "store": ("rollouts.parquet", "rollouts/rollouts.parquet"),
    "SAE": ("activations",),
    "features": ("activations", "sae", "../sae"),
    "diff": ("features",),
    "claims": ("rollouts.parquet", "rollouts/rollouts.parquet", "sae"),
    "causal test": ("../features", "../sae"),
}
"""Inputs of a stage, beside it in the folder of a run."""


@dataclass(frozen=True)
class Finding:
    """What was found of an artefact."""

    artefact: Artefact
    state: State
    what: str = ""
    """What is wrong, with the file that it was found in."""
    where: Path | None = None
    """That file, or the artefact."""
    command: MadeBy | None = None
    """Makes it again, as far as known; for a store the capture, which `tsae.upkeep.mend` repeats in part."""

    @property
    def ok(self) -> bool:
        return self.state in ("intact", "no checksum")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "path": self.artefact.shown,
            "kind": self.artefact.kind.name,
            "state": self.state,
            "what": self.what,
            "command": None if self.command is None else str(self.command),
            "run": None if self.artefact.run is None else shown_path(self.artefact.run),
        }


def verify(paths: Sequence[str | Path], *, progress: bool = True) -> list[Finding]:
    """Check everything that tsae wrote at some paths and below.

    Args:
        paths: files or folders.
        progress: show a bar.

    Returns:
        one finding an artefact, in the order in which they rest on each other.

    Raises:
        TsaeError: where there is no such path.
    """
    artefacts: dict[Path, Artefact] = {}
    strange = []
    for path in (Path(os.path.abspath(as_path(path))) for path in paths):
        if not path.exists():
            raise TsaeError("is not there", where=path, fix="Give a folder or file that tsae wrote.")
        found = find_artefacts(path)
        artefacts |= {artefact.path: artefact for artefact in found}
        if not found:
            strange.append(Finding(Artefact(path, STAMP), "not ours", "holds nothing that tsae wrote"))
    ordered = sorted(artefacts.values(), key=lambda a: (a.kind.rank, a.path.as_posix()))
    _read_once([a.path for a in ordered], progress)
    findings = [_checked(artefact) for artefact in ordered]
    sound = {finding.artefact.path.resolve(): finding.artefact for finding in findings if finding.ok}
    return [*(_compared(finding, sound) if finding.ok else finding for finding in findings), *strange]


def _read_once(paths: Sequence[Path], progress: bool) -> None:
    """Keep the checksums of all files, so that the checks that follow read none of them again."""
    files = {file for path in paths for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()}
    sizes = {}
    for file in files:
        with suppress(OSError):  # one that is being written may be gone by now
            sizes[file] = file.stat().st_size

    def read(file: Path) -> None:
        with suppress(OSError, TsaeError):  # said by the check
            if file.suffix == ".parquet":
                check_parquet(file, AGAIN)
            digest(file)
        bar.update(sizes[file])

    bar = progress_bar("verify", "B", sum(sizes.values()), shown=progress)
    with bar, ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(read, sorted(sizes, key=sizes.__getitem__, reverse=True)):
            pass


def _checked(artefact: Artefact) -> Finding:
    path, kind = artefact.path, artefact.kind
    command, unknown = _command(artefact)
    state: State
    where = path
    if not path.exists():
        return Finding(artefact, "missing", f"is not there{unknown}", path, command)
    try:
        if kind.marks and not (path / kind.marks[0]).is_file() and any((path / name).exists() for name in kind.working):
            return Finding(artefact, "incomplete", f"was not finished{unknown}", path, command)
        found = kind.check(path)
        if kind.name == "store" and not read_manifest(path)["complete"]:
            return Finding(artefact, "incomplete", f"its capture did not finish{unknown}", path, command)
        return Finding(artefact, "no checksum" if found is False else "intact", "", path, command)
    except OtherVersion as error:
        state, what = "other version", error.what
    except TsaeError as error:
        where = Path(error.where or path)
        state, what = "damaged", _said(error.what, where, path)
    except OSError as error:
        state, what = "damaged", f"cannot be read ({error.strerror})"
    return Finding(artefact, state, f"{what}{unknown}", where, command)


def _said(what: str, where: Path, path: Path) -> str:
    """What is wrong, with the name of the file inside of the artefact."""
    return f"{where.relative_to(path)}: {what}" if where != path and where.is_relative_to(path) else what


def _command(artefact: Artefact) -> tuple[MadeBy | None, str]:
    """The command that makes an artefact again; or None, and why it is not known."""
    holders = [path for path in (artefact.path, artefact.path.parent, artefact.run) if path is not None]
    try:
        found = next((command for command in map(made_by, holders) if command is not None), None)
    except TsaeError as error:
        return None, f"; the record of its command is damaged ({error.where})"
    if found is None and artefact.run is not None:
        found = stamped_command(artefact.run)
    return found, "" if found is not None else "; which command made it is not known"


def _compared(finding: Finding, sound: dict[Path, Artefact]) -> Finding:
    """The finding, or one that says on which other input the artefact rests."""
    artefact = finding.artefact
    rests = _rests_on(artefact)
    for path in _inputs(finding) if rests else ():
        held = sound.get(path.resolve())
        if held is None:
            continue
        holds = _is(held)
        other = sorted(name for name in rests.keys() & holds.keys() if rests[name] != holds[name])
        if other:
            name = other[0]
            what = f"was made from other {name} ({rests[name]}) than {path.name} holds now ({holds[name]})"
            return Finding(artefact, "outdated", what, artefact.path, finding.command)
    return finding


def _inputs(finding: Finding) -> Iterator[Path]:
    """The inputs of an artefact: those that its command names, and the stages before it in its run."""
    artefact, command = finding.artefact, finding.command
    for option in _OPTIONS if command is not None and artefact.run is None else ():
        assert command is not None
        yield from command.values(option)
    if artefact.run is None or (artefact.kind.name == "SAE" and _kept(artefact.run)):
        return
    for name in _STAGES.get(artefact.kind.name, ()):
        yield artefact.path.parent / name


def _kept(run: Path) -> bool:
    """Whether `tsae watch` kept the SAE of a run, which it had trained on an earlier, shorter state."""
    with suppress(TsaeError):
        return "sae" in (read_stamp(run, "run.json") or {})
    return False


def _is(artefact: Artefact) -> dict[str, str]:
    """Fingerprints of what an artefact holds."""
    path, kind = artefact.path, artefact.kind.name
    found: dict[str, str] = {}
    if kind in ("rollouts", "store", "features"):
        rollouts = Rollouts.read(path if kind == "rollouts" else path / "rollouts.parquet")
        found = {"rollouts": rollouts.fingerprint, "labels": rollouts.labels_fingerprint}
    if kind == "SAE":
        found[_SAE] = TemporalSAE.load(path).fingerprint
    if kind == "features" and (sae := read_object(path / "features.json", AGAIN).get("sae")):
        found[_SAE] = str(sae.get("weights"))
    return found


def _rests_on(artefact: Artefact) -> dict[str, str]:
    """Fingerprints of the inputs that an artefact names."""
    path, kind = artefact.path, artefact.kind.name
    with suppress(TsaeError, KeyError, TypeError, AttributeError):
        if kind in ("store", "SAE", "features") and (path / "run.json").is_file():
            inputs = read_object(path / "run.json", AGAIN)["inputs"]
            named = {"rollouts": "rollouts", "labels": "labels", "sae": _SAE}
            return {name: str(inputs[key]) for key, name in named.items() if key in inputs}
        if kind == "claims":
            info = read_object(path, AGAIN)
            named = {"rollouts": "rollouts", "labels": "labels", "sae": _SAE}
            return {name: info[key] for key, name in named.items() if key in info}
        if kind == "causal test":
            info = read_object(path / "causal.json", AGAIN)
            return {"rollouts": info["features_encoded_with"], _SAE: info["sae"]["weights"]}
        if kind == "diff":
            info = read_object(path / "diff.json", AGAIN)
            found = {name: info[name] for name in ("rollouts", "labels") if name in info}
            return found | ({_SAE: info["sae"]["weights"]} if (info.get("sae") or {}).get("weights") else {})
    return {}
