"""Repair: what `tsae.upkeep.verify` found damaged, missing or unfinished is made again, in the order of dependence.

One step after another, with a verification in between, until all is intact:

- The stamp of a run comes from its second copy.
- Damaged shards of a store are captured again, and only these.
- Everything else is made by the command that made it. What is damaged is moved aside first, to a hidden name beside its
  place. It is removed when its replacement is complete, and comes back when there is none. An artefact that rests
  on other inputs than those that are there now is kept, under another name.

If what was made again has the bytes that it had, all that rests on it is intact, and stays. Otherwise its fingerprint
differs, and the next verification finds what rests on it outdated.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import constants

from tsae.activations.recording.repair import repair_store
from tsae.activations.shards.checksums import check_store
from tsae.base.disk.made_by import MadeBy
from tsae.base.disk.sole_writer import sole_writer
from tsae.base.files import is_partial, replacing, writing
from tsae.base.seal import SEAL, changed_names, read_sealed, seal, sealed_digests
from tsae.checkpoints.series import CheckpointSeries
from tsae.config import RunConfig
from tsae.errors import TsaeError
from tsae.run import find_series
from tsae.stamps import stamp_copy
from tsae.testbed import series as shipped_series
from tsae.upkeep.find import aside_name, shown_path
from tsae.upkeep.kinds import AGAIN, STAMP
from tsae.upkeep.verify import Finding, verify

_MENDED = ("damaged", "missing", "incomplete", "outdated")


@dataclass(frozen=True)
class Step:
    """One thing to do."""

    does: Literal["copy", "shards", "command"]
    findings: tuple[Finding, ...]
    """What it mends."""
    command: MadeBy | None = None

    def __str__(self) -> str:
        path = self.findings[0].artefact.shown
        if self.does == "copy":
            return f"{path}: from its second copy"
        if self.does == "shards":
            return f"{path}: its damaged shards are captured again"
        names = ", ".join(finding.artefact.shown for finding in self.findings)
        return f"{names}: {self.command}"


def remedy(finding: Finding) -> str:
    """What makes an artefact again, in words or as a command; empty where nothing is known to."""
    if finding.ok or finding.state not in (*_MENDED, "other version"):
        return ""
    if _copied(finding) or _of_shards(finding):
        path = finding.artefact.path
        return f"tsae repair {shown_path(path.parent if finding.artefact.kind is STAMP else path)}"
    return "" if finding.command is None else str(finding.command)


def next_step(findings: Sequence[Finding]) -> Step | None:
    """The first thing to do; None where nothing is left that can be mended."""
    bad = [finding for finding in findings if finding.state in _MENDED]
    # Stamps and shards first: the command of a run stops at what is damaged.
    for finding in bad:
        if _copied(finding):
            return Step("copy", (finding,))
    for finding in bad:
        if _of_shards(finding):
            return Step("shards", (finding,))
    for finding in bad:
        if finding.command is not None:
            together = finding.artefact.run is not None
            same = [f for f in bad if f.command == finding.command] if together else [finding]
            return Step("command", tuple(same), finding.command)
    return None


def repair(
    paths: Sequence[str | Path],
    *,
    dry_run: bool = False,
    trust: bool = False,
    say: Callable[[str], None] = print,
    progress: bool = True,
) -> list[Finding]:
    """Make again what is damaged, missing, unfinished or outdated at some paths and below.

    Args:
        paths: files or folders.
        dry_run: say what would be done, and do nothing.
        trust: run recorded commands that name code or addresses, and download models that they name, too. They come
            from files beside the artefacts, which whoever made the folder wrote.
        say: called with a line for every step.
        progress: show bars.

    Returns:
        what the last verification found.

    Raises:
        TsaeError: where a command fails or needs trust, or what it made is not intact.
    """
    seen: set[frozenset[tuple[Path, str]]] = set()
    refused: TsaeError | None = None
    while True:
        findings = verify(paths, progress=progress)
        if dry_run:
            for planned in _all_steps(findings):
                say(f"would repair {planned}")
            return findings
        step = next_step(findings)
        if step is None:
            for line in _surfaced(findings):
                say(line)
            return findings
        state = frozenset((finding.artefact.path, finding.what) for finding in findings if not finding.ok)
        if state in seen:
            first = step.findings[0]
            raise refused or TsaeError(
                f"is still {first.state} after it was made again: {first.what}",
                where=first.artefact.path,
                fix="See what its command says.",
            )
        seen.add(state)
        say(f"repairing {step}")
        refused = None
        try:
            for line in _do(step, trust, progress):
                say(f"  {line}")
        except TsaeError as error:
            # It may have mended something that was in its way: what is left is looked at again.
            refused = error


def _all_steps(findings: Sequence[Finding]) -> Iterator[Step]:
    left = list(findings)
    while (step := next_step(left)) is not None:
        yield step
        left = [finding for finding in left if finding not in step.findings]


def _do(step: Step, trust: bool, progress: bool) -> Iterator[str]:
    path = step.findings[0].artefact.path
    if step.does != "copy" and step.findings[0].command is not None:
        _look(step.findings[0].command, trust)
    if step.does == "copy":
        # Under a name that is free: a link that lies in a stranger's folder is not written through.
        with sole_writer(path.parent), replacing(path) as partial:
            shutil.copyfile(stamp_copy(path.parent, path.name), partial)
        yield "done"
    elif step.does == "shards":
        with sole_writer(path), _offline(trust):
            for mended in repair_store(path, _series(step.findings[0]), check_store(path), progress=progress):
                yield f"{mended.file}: {'the same bytes' if mended.same else 'other last bits'}"
    else:
        assert step.command is not None
        with _aside(step.findings) as moved:
            _run(step.command, trust)
        yield from moved


def _copied(finding: Finding) -> bool:
    """Whether an artefact is a stamp whose second copy is whole."""
    path = finding.artefact.path
    copy = stamp_copy(path.parent, path.name)
    if finding.artefact.kind is not STAMP or copy.is_symlink() or not copy.is_file():
        return False
    try:
        read_sealed(copy, AGAIN)
    except TsaeError:
        return False
    return True


def _of_shards(finding: Finding) -> bool:
    """Whether shards of a store are damaged, and nothing else of it."""
    path, where = finding.artefact.path, finding.where
    if finding.artefact.kind.name != "store" or finding.state != "damaged" or where is None:
        return False
    return where.parent != path and where != path and _sources(finding) is not None


def _sources(finding: Finding) -> list[str] | None:
    """What names the checkpoints of a captured store; empty for a stage of a run, None where they are not known."""
    command = finding.command
    if finding.artefact.run is not None:
        return []
    if command is None or command.words[:1] != ("capture",):
        return None
    # What is no path here may be the name of a repository.
    here = command.where
    return [
        str(path.relative_to(here)) if not path.exists() and path.is_relative_to(here) else str(path)
        for path in command.values("--series")
    ]


def _series(finding: Finding) -> CheckpointSeries:
    run = finding.artefact.run
    if run is None:
        return CheckpointSeries.load(*(_sources(finding) or ()))
    if (run / "demo.json").is_file():
        return shipped_series()
    settings = read_sealed(run / "run.json", AGAIN)["run"]
    return find_series(RunConfig(path=settings["path"], base=settings["base"]))[0]


def _look(command: MadeBy, trust: bool) -> None:
    """Refuse a command that a stranger might have written down.

    Raises:
        TsaeError: where it names code or an address and is not trusted, or has lost a secret.
    """
    if "***" in command.doubt:
        raise TsaeError(f"is not run: it {command.doubt}", where=str(command), fix="Give it yourself.")
    if command.doubt and not trust:
        fix = "Look at it. If you trust whoever wrote this folder: tsae repair --trust"
        raise TsaeError(f"is not run: it {command.doubt}", where=str(command), fix=fix)


@contextmanager
def _offline(trust: bool) -> Iterator[None]:
    """Let nothing be downloaded in the block: a stranger's folder may name any model of the Hub."""
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not trust
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _run(command: MadeBy, trust: bool) -> None:
    """Run a command; what it prints goes to standard error.

    Raises:
        TsaeError: where it fails.
    """
    # With -P: the folder may be a stranger's, and its json.py or tsae.py is not imported.
    words = [sys.executable, "-P", "-m", "tsae", *command.runnable]
    around = {**os.environ, "PYTHONSAFEPATH": "1", **({} if trust else {"HF_HUB_OFFLINE": "1"})}
    try:
        # The descriptor: sys.stderr may be wrapped, and then has none.
        ended = subprocess.run(words, cwd=command.where, stdout=2, check=False, env=around)
    except OSError as error:
        what = f"cannot be entered ({error.strerror or error})"
        raise TsaeError(what, where=command.where, fix=f"Give the command yourself: {command}.") from error
    if ended.returncode:
        raise TsaeError(
            f"ended with status {ended.returncode}; what was moved aside is back in its place",
            where=str(command),
            fix="See what it said above; put that right, and repair again."
            + ("" if trust else " Models are downloaded with --trust alone."),
        )


@contextmanager
def _aside(findings: Sequence[Finding]) -> Iterator[list[str]]:
    """Move what is damaged aside while the block makes it again; fills the list with what came of it."""
    told: list[str] = []
    moved: dict[Path, Finding] = {}
    try:
        for finding in findings:
            for path in _in_the_way(finding):
                if aside_name(path).exists() and not path.exists():
                    moved[path] = finding  # by a repair that was interrupted
                elif path not in moved and path.exists():
                    with (
                        sole_writer(finding.artefact.run or finding.artefact.path),
                        writing(path, "Make its folder one that you may write to, and repair again."),
                    ):
                        if os.path.lexists(aside_name(path)):  # of a repair that was killed when it was nearly done
                            _keep(aside_name(path), path.with_name(f"{path.name}.damaged"))
                        path.rename(aside_name(path))
                    moved[path] = finding
        yield told
        for path, finding in moved.items():
            if path.exists():
                with writing(aside_name(path), "Its replacement is there: remove it yourself."):
                    told.append(_replaced(path, aside_name(path), finding))
    finally:
        for path in moved:
            if aside_name(path).exists() and not path.exists():
                aside_name(path).rename(path)


def _in_the_way(finding: Finding) -> list[Path]:
    """What must not be there for an artefact to be made again by its command."""
    path, kind, run = finding.artefact.path, finding.artefact.kind.name, finding.artefact.run
    if finding.state == "incomplete":
        return []
    found = [path]
    if kind == "store" and finding.where in (path / "run.json", path / "rollouts.parquet"):
        found = [finding.where]
    if run is not None and path.name == "log.parquet":
        found.append(path.with_name("rollouts.parquet"))  # drawn from it, and not read again while it is there
    if run is not None and path.parent == run / "steps":
        found.append(run / "diff")  # which reads them
    return found


def _replaced(path: Path, aside: Path, finding: Finding) -> str:
    """Remove what was moved aside, now that there is another; gives a line on it."""
    if finding.state == "outdated":
        kept = _keep(aside, path.with_name(f"{path.name}.before-repair"))
        return f"{shown_path(path)} is made again; the one before is kept as {kept.name}"
    old, new = sealed_digests(aside), sealed_digests(path)
    same = bool(old) and all(new.get(name) == told for name, told in old.items() if name in new)
    if path.is_dir() and same:
        # What was added later, such as stability.json of an SAE.
        added = [name for name in old if name not in new and name not in changed_names(aside)]
        for name in added:
            shutil.copyfile(aside / name, path / name)
        if added:
            seal(path, added)
    inside = [file for file in aside.iterdir() if not (path / file.name).exists()] if aside.is_dir() else []
    left = [file.name for file in inside if file.name != SEAL and not is_partial(file)]
    if left:
        kept = _keep(aside, path.with_name(f"{path.name}.damaged"))
        return f"{shown_path(path)} is made again; {', '.join(left)} of the damaged one is kept in {kept.name}"
    _remove(aside)
    return f"{shown_path(path)} is made again{', with the same bytes' if same else ''}"


def _surfaced(findings: Sequence[Finding]) -> Iterator[str]:
    """Give back what lies aside although its place is taken: its repair was killed when it was nearly done."""
    for finding in (finding for finding in findings if finding.ok):
        path = finding.artefact.path
        if os.path.lexists(aside := aside_name(path)):
            with sole_writer(finding.artefact.run or path), writing(path.parent, "Rename it yourself."):
                kept = _keep(aside, path.with_name(f"{path.name}.damaged"))
            yield f"{shown_path(path)}: what an earlier repair had moved aside is kept as {kept.name}"


def _keep(aside: Path, name: Path) -> Path:
    """Give what lies aside a name that is free: what an earlier repair kept under it, or the user has, stays."""
    free, number = name, 1
    while os.path.lexists(free):
        number += 1
        free = name.with_name(f"{name.name}-{number}")
    aside.rename(free)
    return free


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
