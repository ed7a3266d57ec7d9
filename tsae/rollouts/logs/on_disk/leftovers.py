"""Files that do not belong to a log: copies of others, and those of another run in the same folder."""

from __future__ import annotations

from collections.abc import Sequence

from tsae.base.files import sha256
from tsae.errors import TsaeError
from tsae.rollouts.logs.on_disk.log_files import OTHER_TABLES, LogFile, kind_of


def leave_copies(files: list[LogFile]) -> list[str]:
    """Find files that are copies of others of the same step, or of no known step: they would count twice.

    Copies of tables that services keep, and of other tables that lie beside logs, are taken out, with a note.

    Raises:
        TsaeError: naming both, for a copy of a trainer's own log.
    """
    left: list[LogFile] = []
    alike: dict[tuple[int | None, int], list[LogFile]] = {}
    for file in files:
        alike.setdefault((file.step, file.path.stat().st_size), []).append(file)
    for (_, size), group in alike.items():
        first = dict[str, LogFile]()
        for file in group if len(group) > 1 and size else ():
            if (same := first.setdefault(sha256(file.path), file)) is file:
                continue
            if kind_of(file.path) not in OTHER_TABLES:
                what = f"is the same file as {same.path}, byte for byte"
                raise TsaeError(what, where=file.path, fix="Leave one of them out: its trajectories would count twice.")
            left.append(file)
    gone = {file.path for file in left}
    files[:] = [file for file in files if file.path not in gone]
    return [f"{len(left):,} files are copies of others and count once, such as {left[0].path}"] if left else []


def leftovers(files: Sequence[LogFile]) -> list[str]:
    """A note for every step whose file is older than that of an earlier step: a resumed run has not come so far again.

    Files that were copied without their times differ by seconds, so a minute is allowed.
    """
    notes: list[str] = []
    times: dict[str, tuple[int, float]] = {}
    for file in files:
        if file.step is None:
            continue
        time = file.path.stat().st_mtime
        step, before = times.get(file.run, (file.step, time))
        if file.step > step and time < before - 60:
            notes.append(
                f"{file.path.name} of step {file.step} is older than the file of step {step}: from there on the files "
                "may be those of another run, or of before a resume"
            )
        times[file.run] = (file.step, time)
    return notes
