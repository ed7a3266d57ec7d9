"""Stages: what `tsae run`, `tsae demo` and `tsae watch` make, one after the other, in the folder of a run.

1. A stage has a key: its settings, and fingerprints of the results that it reads. The folder's record (run.json or
   demo.json) holds the key of every stage.
2. A stage whose key is there is loaded. A stage that is not finished is completed.
3. Where the key is another, because an option was corrected or an input grew, the old output goes into the hidden
   folder .before until the new one is made. If the first options are given again before that, it comes back.
4. A damaged output is removed and made again.

The page is the last stage. It is removed before any other is made: no page stays beside results that it does not show.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tsae.activations.catalogue import READER_INFO
from tsae.base.artefact import MANIFEST, command_facts, file_hash, is_whole, read_record, write_record
from tsae.base.files import is_lock, partial_name, read_object, reading, write_json
from tsae.base.mirror import removed
from tsae.base.output_lock import drop_dead_lock
from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.series import CheckpointSeries
from tsae.checkpoints.weight_files import is_hub_id
from tsae.errors import TsaeError, public, refuse
from tsae.report.text import visible
from tsae.testbed import series as shipped_series

RECORDS = {"demo.json": "demo", "run.json": "run"}
"""Records of whole runs, and the key of the settings in each."""
_BEFORE = ".before"
_CONTENT = ("kind", "version", "files", "readers", "sites")
"""What a manifest says of the content of an artefact."""
_FIX = "Delete that folder, or give another one with --to."


@dataclass(frozen=True)
class Stage:
    """One step of a run."""

    name: str
    output: str
    """File or folder below the folder of the run."""
    settings: Any
    """The options that decide what is made."""
    make: Callable[..., Any]
    """Makes the result from those of the inputs and writes the output, or completes it."""
    load: Callable[..., Any]
    """Reads the result, given those of the inputs; None where it is not finished.

    Raises:
        TsaeError: where it is damaged, which names a file of the output.
    """
    inputs: tuple[str, ...] = ()
    """Names of the earlier stages whose results it takes."""
    rests_on: Callable[..., Any] | None = None
    """What of the inputs decides the result; by default all of their content."""
    fingerprint: Callable[[Any], Any] | None = None
    """Says whether two results are the same; by default the hashes in the output's manifest."""
    lines: Callable[..., Mapping[str, str]] = lambda *_: {}
    """What is printed of the result and its inputs: one line or more, each with its name."""
    kept: bool = False
    """Loaded if it is there, whatever it was made from."""


class StageLines:
    """Prints one line for each stage, marks stages that an earlier call made, and keeps the lines in stages.json."""

    def __init__(self, file: Path, say: Callable[[str], None]) -> None:
        self.file, self.print = file, say
        self.before = read_object(file, "Remove it: it only holds what was printed.") if file.is_file() else {}
        self.lines: dict[str, str] = dict(self.before)

    def say(self, name: str, line: str, *, made: bool = False) -> None:
        """Print a line. With `made`, this call did the work: the line does not say "from disk"."""
        done = " [from disk]" if name in self.before and not made else ""
        # Names come from the log and from folders: they must not control the terminal.
        self.print(f"{name + ':':<13}{visible(line)}{done}")
        self.lines[name] = line
        write_json(self.file, self.lines)


def read_run(folder: Path, name: str) -> dict[str, Any] | None:
    """The record of a run; None where there is none.

    Raises:
        TsaeError: where it is damaged.
    """
    file = folder / name
    if not file.is_file():
        return None
    return {key: value for key, value in read_record(file, _FIX).items() if key not in ("kind", "command", "from")}


def checkpoints_of(folder: Path, readers: Sequence[Mapping[str, Any]]) -> CheckpointSeries:
    """The checkpoints of some readers where the record of their run says that they lie; nothing is downloaded.

    Raises:
        TsaeError: where the folder has no record, or the base is not there.
    """
    from huggingface_hub import try_to_load_from_cache

    if (folder / "demo.json").is_file():
        return shipped_series()
    record, fix = read_run(folder, "run.json"), "Name the checkpoints, the base first (--series)."
    refuse(folder, (record is None, "holds no run.json, which says where the checkpoints are", fix))
    with reading(folder / "run.json", fix):
        paths = {str(id): str(path) for id, path in (record or {})["series"]}
        every = [Checkpoint(path=paths[of["id"]], **{name: of[name] for name in READER_INFO}) for of in readers]

    def is_there(one: Checkpoint) -> bool:
        if is_hub_id(one.path):
            return isinstance(try_to_load_from_cache(one.path, "config.json"), str)
        return Path(one.path).exists()

    refuse(every[0].path, (not is_there(every[0]), f"does not hold the base {every[0].id} any more", fix))
    return CheckpointSeries(tuple(filter(is_there, every)))


class RunRecord:
    """The record in the folder of a run: what it was asked for, the keys of its stages, and what they found.

    Args:
        folder: of the run.
        name: of the record's file.
        facts: what was asked for, and from which inputs.
        what: names such a run in messages.

    Raises:
        TsaeError: where the folder holds something else: files of another program, another training, or results that
            other versions made.
    """

    def __init__(self, folder: Path, name: str, facts: Mapping[str, Any], what: str) -> None:
        self.folder, self.file = folder, folder / name
        wanted = recorded(facts)
        held = read_run(folder, name) or {}
        first = partial_name(self.file).name  # all that is there if the first write was killed
        others = folder.is_dir() and any(not is_lock(folder, x.name) and x.name != first for x in folder.iterdir())
        if held or others:
            differing = self.refusal(held, wanted, RECORDS[name])
            told = f" (differing: {', '.join(differing)})" if "stages" in held else ""
            what = f"holds something else than {what} of this training and these versions{told}"
            refuse(folder, ("stages" not in held or differing, what, _FIX))
        kept = {key: held.get(key, {}) for key in ("stages", "before", "found")}
        self.content: dict[str, Any] = {**wanted, **kept}
        self.stages, self.before = self.content["stages"], self.content["before"]
        self.write()

    @staticmethod
    def refusal(held: Mapping[str, Any], wanted: Mapping[str, Any], key: str) -> list[str]:
        """What keeps a run from going on with what another left: the folder of another training, other versions."""
        paths = [(found.get(key) or {}).get("path") for found in (held, wanted)]
        return ["path"] * (paths[0] != paths[1]) + ["versions"] * (held.get("versions") != wanted.get("versions"))

    def write(self) -> None:
        """Write the record."""
        stages = dict(sorted(self.stages.items()))  # however often one was made anew
        write_record(self.file, {"kind": "run", **self.content, "stages": stages, **command_facts(self.file)})

    def add_found(self, **found: Any) -> None:
        """Add what a stage found."""
        self.content["found"].update(recorded(found))
        self.write()


def carry_out(
    stages: Sequence[Stage], record: RunRecord, say: Callable[..., None], tell: Callable[[str], None]
) -> dict[str, Any]:
    """Load or make every stage, in order.

    Args:
        stages: each after its inputs; the last writes the page.
        record: of the run's folder.
        say: called with name, line and `made` of every finished stage (`StageLines.say`).
        tell: called with one line where stages are made anew.

    Returns:
        the result of every stage, by its name.
    """
    _tell_changes(stages, record, tell)
    page = record.folder / stages[-1].output
    results: dict[str, Any] = {}
    prints: dict[str, Any] = {}
    for stage in stages:
        inputs = [results[name] for name in stage.inputs]
        rests = stage.rests_on(*inputs) if stage.rests_on else {name: prints[name] for name in stage.inputs}
        output = record.folder / stage.output
        anew = _keyed(stage, {"settings": recorded(stage.settings), "inputs": recorded(rests)}, record)
        anew |= output.exists()
        result = _loaded(stage, inputs, output, tell)
        made = result is None
        if made:
            if anew:
                removed(page)
            try:
                result = stage.make(*inputs)
            except TsaeError as error:
                if error.where is None or not Path(error.where).is_relative_to(output):
                    raise
                fix = f"Remove {output}, and give the same command again: it makes what is missing."
                raise TsaeError(error.what, where=error.where, fix=error.fix or fix) from error
        if record.before.pop(stage.name, None) is not None:
            removed(record.folder / _BEFORE / stage.output)
            record.write()
        results[stage.name] = result
        prints[stage.name] = stage.fingerprint(result) if stage.fingerprint else _content(output)
        for name, line in stage.lines(result, *inputs).items():
            say(name, line, made=made and output.exists())
    removed(record.folder / _BEFORE)
    return results


def before(folder: Path, output: str) -> Path:
    """Where the earlier output of a stage lies while the stage is made anew; it may be missing."""
    return folder / _BEFORE / output


def _keyed(stage: Stage, key: dict[str, Any], record: RunRecord) -> bool:
    """Make room for the output of a key and enter the key in the record, unless it stands there; whether it did so."""
    held, earlier = record.stages.get(stage.name), record.before.get(stage.name)
    output, away = record.folder / stage.output, before(record.folder, stage.output)
    if held == key or (stage.kept and held is not None and output.exists()):
        return False
    if earlier == key and away.exists():
        removed(output)
        os.replace(away, output)
        del record.before[stage.name]
    elif output.exists():
        if away.exists():  # the output is only the beginning of one
            removed(output)
        else:
            if held is not None:
                record.before[stage.name] = record.stages.pop(stage.name)
                record.write()
            away.parent.mkdir(parents=True, exist_ok=True)
            os.replace(output, away)
            removed(output)  # at the URL, too
    record.stages[stage.name] = key
    record.write()
    return True


def _loaded(stage: Stage, inputs: Sequence[Any], output: Path, tell: Callable[[str], None]) -> Any:
    """The result that lies there; None where it is to be made. What is damaged is removed."""
    if not output.exists():
        return None
    drop_dead_lock(output)
    try:
        return stage.load(*inputs)
    except TsaeError as error:
        inside = error.where is not None and Path(error.where).is_relative_to(output)
        unread = isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError)
        if not inside or unread:  # a disk that fails for now damages nothing
            raise
        tell(visible(f"{error.where}: {error.what.rstrip('.')}; {stage.name} made again"))
        removed(output)
        return None


def _tell_changes(stages: Sequence[Stage], record: RunRecord, tell: Callable[[str], None]) -> None:
    """Say in one line which options have changed, and which stages are made anew."""
    changed: list[str] = []
    anew: list[str] = []
    for stage in stages:
        held, now = (record.stages.get(stage.name) or {}).get("settings"), recorded(stage.settings)
        if held is None or not (record.folder / stage.output).exists():
            continue
        if held != now:
            changed += [name for name in now if name not in changed and held.get(name) != now[name]]
        if held != now or set(stage.inputs) & set(anew):
            anew.append(stage.name)
    if anew:
        tell(f"made anew:   {', '.join(anew)} (changed: {', '.join(changed)})")


def _content(output: Path) -> Any:
    """What tells the content of an output from another: hashes of its files."""
    if output.is_dir():
        if not is_whole(output):
            return None
        return {name: value for name, value in read_record(output / MANIFEST, _FIX).items() if name in _CONTENT}
    return file_hash(output) if output.is_file() else None


def recorded(value: Any) -> Any:
    """A value as a record holds it."""
    return public(json.loads(json.dumps(value, default=str)))
