"""Verification: is what lies on disk as it was written, is it complete, and does it rest on what is there now?

1. Find what tsae wrote: folders with a manifest, lone JSON records, Parquet files, and the stages that a run must have.
2. Compare the hashes, and read each as the stage does that takes it.
3. Compare the fingerprints of inputs in its manifest with those of the inputs that lie there now.
4. Name the command in its manifest, which makes it again; for a stage of a run that of the run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from tsae.activations.manifest import STORE
from tsae.attribution.attribution import ATTRIBUTION
from tsae.attribution.influence import INFLUENCE
from tsae.base.artefact import (
    MANIFEST,
    OtherVersion,
    check_files,
    command_text,
    is_whole,
    manifest_of,
    read_manifest,
    read_record,
)
from tsae.base.files import as_path, read_object, reading
from tsae.base.hashed_parquet import check_parquet
from tsae.base.mirror import shown
from tsae.base.progress import progress_bar
from tsae.base.untrusted import parse_json
from tsae.causal.intervention import CAUSAL, folders_of_tests
from tsae.claims.run_claims import Claims, said_claims
from tsae.diff.explain import EXPLANATIONS
from tsae.diff.feature_diff import DIFF
from tsae.errors import TsaeError
from tsae.features.feature_table import FEATURES
from tsae.rl.credit import CREDIT
from tsae.rollouts.difficulty import DIFFICULTY
from tsae.rollouts.table import Rollouts
from tsae.sae.crosscoder import OF_PAIR, Crosscoder
from tsae.sae.model import SAE, TemporalSAE
from tsae.sae.quality.evaluation import Evaluation
from tsae.stages import RECORDS, read_run

State = Literal["intact", "no hash", "damaged", "missing", "incomplete", "outdated", "other version", "not ours"]
"""no hash: another program wrote it; it can be read, and nothing tells whether it is whole.
outdated: it rests on other inputs than those that are there now."""


def _load_sae(folder: Path) -> None:
    info = read_object(folder / "training.json", SAE.fix) if (folder / "training.json").is_file() else {}
    (Crosscoder if OF_PAIR in info else TemporalSAE).load(folder)


_READ = (FEATURES, DIFF, ATTRIBUTION, CAUSAL, EXPLANATIONS, INFLUENCE, CREDIT, DIFFICULTY)
KINDS = {kind.name: kind for kind in (STORE, replace(SAE, load=_load_sae), *_READ)}
"""Kinds that a stage reads. The files of others are only compared with their hashes."""
_ORDER = ("run", "rollouts", STORE.name, SAE.name, "evaluation", FEATURES.name, DIFF.name, CAUSAL.name, "claims")
"""Later kinds rest on earlier ones."""
_AGAIN = "Make it again."
_RECORDS: dict[str, tuple[str, Callable[[Path], object]]] = {
    **{name: ("run", lambda file: read_record(file, _AGAIN)) for name in RECORDS},
    "claims.json": ("claims", lambda file: Claims.load(file.parent)),
    "evaluation.json": ("evaluation", Evaluation.load),
}
"""Lone JSON files: their kind, and what reads them."""
_UNFINISHED = {"pieces/encoding.json": "features", "metrics.jsonl": "SAE", "answers.jsonl": "explanations"}
"""Files of folders that have no manifest yet, and the kind that they will be."""
_ROLLOUTS = {"demo.json": ("rollouts.parquet",), "run.json": ("rollouts/log.parquet", "rollouts/rollouts.parquet")}
_STAGES = {
    "activations": "store", "sae": "SAE", "evaluation/evaluation.json": "evaluation", "features": "features",
    "diff": "diff", "report.html": "page",
}  # fmt: skip
"""What a run must have beside its rollouts."""
_RESTS_ON = {
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

    path: Path
    kind: str
    state: State
    what: str = ""
    """What is wrong, with the file that it was found in."""
    command: str = ""
    """Makes it again, as far as known."""
    run: Path | None = None
    """The folder of the run that it is a stage of."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Its manifest, or what takes its place."""

    @property
    def ok(self) -> bool:
        return self.state in ("intact", "no hash")

    @property
    def shown(self) -> str:
        """Its path, relative to the working folder if it lies below; or its URL."""
        here, told = Path.cwd(), shown(self.path)
        below = self.path.is_relative_to(here) and told == str(self.path)
        return str(self.path.relative_to(here)) if below else told

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        known = {name: getattr(self, name) for name in ("kind", "state", "what", "command")}
        return {"path": self.shown, **known, "run": None if self.run is None else str(self.run)}


def verify(paths: Sequence[str | Path], *, progress: bool = True) -> list[Finding]:
    """Check everything that tsae wrote at some paths and below.

    Hidden files and folders are left out, and links to folders are not followed.

    Args:
        paths: files or folders.
        progress: show a bar.

    Raises:
        TsaeError: where there is no such path, or folders are nested too deeply.
    """
    found: dict[Path, Finding] = {}
    with progress_bar("verify", "artefact", None, shown=progress) as bar:
        for path in (Path(os.path.abspath(as_path(path))) for path in paths):
            if not path.exists():
                raise TsaeError("is not there", where=path, fix="Give a folder or file that tsae wrote.")
            run = next((folder for folder in (path, *path.parents) if _stamp(folder) is not None), None)
            before = len(found)
            try:
                for finding in _walk(path, run):
                    found.setdefault(finding.path, finding)
                    bar.update()
            except RecursionError as error:
                what = "folders are nested too deeply"
                raise TsaeError(what, where=path, fix="Give the folder of a run.") from error
            if len(found) == before and path not in found:
                found[path] = Finding(path, "", "not ours", "holds nothing that tsae wrote")
    sound = {finding.path.resolve(): finding for finding in found.values() if finding.ok}
    ordered = sorted(found.values(), key=lambda one: _ORDER.index(one.kind) if one.kind in _ORDER else len(_ORDER))
    return [_with_command(_compared(finding, sound)) for finding in ordered]


def _walk(path: Path, run: Path | None) -> Iterator[Finding]:
    if path.is_file() and (finding := _file(path)) is not None:
        yield replace(finding, run=run)
    if not path.is_dir():
        return
    run = path if _stamp(path) is not None else run
    kind = None if run == path else _kind_of(path)
    if kind is not None:
        yield _artefact(path, kind, run)
        return
    for below in sorted(path.iterdir()):
        if not below.name.startswith((".", "checkpoint")) and not (below.is_symlink() and below.is_dir()):
            yield from _walk(below, run)
    if run == path:
        yield from _missing(path)


def _stamp(folder: Path) -> str | None:
    """The name of a run's record in a folder."""
    return next((name for name in RECORDS if _is_record(folder / name)), None)


def _kind_of(folder: Path) -> str | None:
    found = manifest_of(folder) or {}
    if found or not is_whole(folder):
        unfinished = (kind for name, kind in _UNFINISHED.items() if (folder / name).is_file())
        return str(found["kind"]) if found else next(unfinished, None)
    return "artefact"  # its manifest is damaged


def _artefact(path: Path, kind: str, run: Path | None) -> Finding:
    facts: dict[str, Any] = manifest_of(path) or {}

    def check() -> State:
        if not is_whole(path):
            return "incomplete"
        known = KINDS.get(kind)
        record: dict[str, Any] = {"complete": kind != STORE.name}
        if kind == STORE.name or known is None:
            record |= read_record(path / MANIFEST, _AGAIN)
            if known is None:
                check_files(path, record, (), _AGAIN)
        else:
            read_manifest(path, known)
        if known is not None and known.load is not None:
            known.load(path)
        return "intact" if record["complete"] else "incomplete"

    return replace(_checked(path, kind, check), run=run, facts=facts)


def _file(path: Path) -> Finding | None:
    """A lone file; None where tsae did not write it, as far as can be seen."""
    if path.name in _RECORDS and _is_record(path):
        kind, read = _RECORDS[path.name]

        def check() -> State:
            read(path)
            return "intact"

        found = _checked(path, kind, check)
        with suppress(TsaeError):
            facts = read_record(path, _AGAIN)
            rests = {name: facts[name] for name in ("rollouts", "labels", "sae") if kind == "claims" and name in facts}
            found = replace(found, facts={**facts, "inputs": rests})
        return found
    return _parquet(path) if path.suffix == ".parquet" else None


def _is_record(file: Path) -> bool:
    """Whether a JSON file is one of tsae's; one that cannot be read may be."""
    if not file.is_file():
        return False
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return isinstance(found, dict) and not {"kind", "checksum", "versions"}.isdisjoint(found)


def _parquet(path: Path) -> Finding | None:
    facts: dict[str, Any] = {}
    try:
        told = pq.read_schema(path).metadata or {}
        if b"tsae" not in told:
            return None
        info, made = parse_json(told[b"tsae"]), parse_json(told.get(b"tsae.command", b"{}"))
        info, facts = (found if isinstance(found, dict) else {} for found in (info, made))
    except (OSError, ValueError, pa.ArrowException):
        info = {"kind": "table"} if path.name not in ("rollouts.parquet", "log.parquet") else {}
    kind = "table" if "kind" in info else "rollouts"

    def check() -> State:
        hashed = check_parquet(path, _AGAIN)
        if kind == "rollouts":
            rollouts = Rollouts.read(path)
            facts["gives"] = {"rollouts": rollouts.fingerprint, "labels": rollouts.labels_fingerprint}
        else:
            with reading(path, _AGAIN):
                pq.ParquetFile(path).close()
        return "intact" if hashed else "no hash"

    found = _checked(path, kind, check)
    return replace(found, facts=facts)


def _checked(path: Path, kind: str, check: Callable[[], State]) -> Finding:
    try:
        state = check()
        return Finding(path, kind, state, "was not finished" if state == "incomplete" else "")
    except TsaeError as error:
        where = Path(error.where or path)
        inside = where != path and where.is_relative_to(path)
        what = f"{where.relative_to(path)}: {error.what}" if inside else error.what
        return Finding(path, kind, "other version" if isinstance(error, OtherVersion) else "damaged", what)
    except OSError as error:
        return Finding(path, kind, "damaged", f"cannot be read ({error.strerror})")


def _missing(run: Path) -> Iterator[Finding]:
    """Stages of a run that are not there."""
    stamp = _stamp(run) or ""
    expected = dict.fromkeys(_ROLLOUTS[stamp], "rollouts") | _STAGES
    if said_claims(run) or os.path.lexists(run / "claims.json"):
        expected["claims.json"] = "claims"
    with suppress(TsaeError, KeyError, TypeError):
        tests = {str(name) for name in (read_run(run, stamp) or {})["found"]["causal"]}
        lost = tests - {test.name for test in folders_of_tests(run)}
        names = [name for name in sorted(lost) if Path(name).name == name and len(name) < 200 and "\0" not in name]
        expected |= {f"causal/{name}": "causal test" for name in names}
    for name, kind in expected.items():
        there = (run / name).is_file()
        if kind in KINDS:
            there = (run / name).is_dir() and (_kind_of(run / name) is not None or (run / name / "cfg.json").is_file())
        if not there:
            yield Finding(run / name, kind, "missing", "is not there", run=run)


def _compared(finding: Finding, sound: Mapping[Path, Finding]) -> Finding:
    """The finding, or one that says on which other input the artefact rests."""
    rests = finding.facts.get("inputs") if finding.ok else None
    for path in _inputs(finding) if isinstance(rests, dict) else ():
        gives = sound[path].facts.get("gives") if path in sound else None
        if not isinstance(gives, dict) or not isinstance(rests, dict):
            continue
        for name in sorted(rests.keys() & gives.keys()):
            if None not in (rests[name], gives[name]) and rests[name] != gives[name]:
                what = f"was made from other {name} ({rests[name]}) than {path.name} holds now ({gives[name]})"
                return replace(finding, state="outdated", what=what)
    return finding


def _inputs(finding: Finding) -> Iterator[Path]:
    """The inputs of an artefact: those that its command names, and the stages before it in its run."""
    words, here = finding.facts.get("command"), finding.path.parent / str(finding.facts.get("from", "."))
    if finding.run is None:
        for word in map(str, words) if isinstance(words, list) else ():
            with suppress(OSError, ValueError):
                path = (here / word.rpartition("=")[2]).resolve()
                if path != finding.path.resolve():
                    yield path
        return
    kept = False  # an SAE that `tsae watch` trained on an earlier, shorter state
    with suppress(TsaeError):
        kept = finding.kind == SAE.name and "sae" in (read_run(finding.run, "run.json") or {})
    for name in () if kept else _RESTS_ON.get(finding.kind, ()):
        yield (finding.path.parent / name).resolve()


def _with_command(finding: Finding) -> Finding:
    if finding.ok or finding.state == "not ours":
        return finding
    command = command_text(finding.facts, finding.path)
    if not command and finding.run is not None:
        with suppress(TsaeError):
            stamp = finding.run / str(_stamp(finding.run))
            command = command_text(read_record(stamp, _AGAIN), stamp)
    what = f"{finding.what}; which command made it is not known"
    return replace(finding, command=command) if command else replace(finding, what=what)
