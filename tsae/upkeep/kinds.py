"""The kinds of artefacts that tsae writes: what they are recognised by, and what reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tsae.activations.shards.checksums import check_store
from tsae.activations.shards.manifest import FORMAT as STORE_FORMAT
from tsae.activations.shards.manifest import VERSION as STORE_VERSION
from tsae.activations.shards.manifest import read_manifest
from tsae.attribution.attribution import Attribution
from tsae.base.disk.sealed_parquet import check_parquet
from tsae.base.files import read_object, reading
from tsae.base.seal import SEAL, check_seal, read_sealed, sealed_names
from tsae.base.untrusted import parse_json
from tsae.causal.intervention import Intervention
from tsae.claims.run_claims import FILE as CLAIMS_FILE
from tsae.claims.run_claims import Claims
from tsae.diff.explain import FILE as EXPLANATIONS
from tsae.diff.explain import Explanations
from tsae.diff.feature_diff import FeatureDiff
from tsae.diff.influence import Influence
from tsae.errors import TsaeError
from tsae.features.feature_table import FeatureTable
from tsae.report.document import check_page, is_page
from tsae.rl.credit import Credit
from tsae.rollouts.table import Rollouts
from tsae.sae.crosscoder import OF_PAIR, Crosscoder
from tsae.sae.exchange.saelens_files import CONFIG_FILE
from tsae.sae.exchange.saelens_files import FORMAT as SAE_FORMAT
from tsae.sae.model import TemporalSAE
from tsae.sae.quality.evaluation import Evaluation
from tsae.stamps import STAMPS

AGAIN = "Make it again."


@dataclass(frozen=True)
class Kind:
    """A kind of artefact."""

    name: str
    rank: int
    """Kinds of a higher rank rest on those of a lower one."""
    marks: tuple[str, ...]
    """Files, any of which shows that a folder is of this kind; the first is written last. Empty for lone files."""
    check: Callable[[Path], object]
    """Compares an artefact with its checksums and reads it. Gives False if it has no checksums. Raises TsaeError."""
    working: tuple[str, ...] = ()
    """Files or folders that are there until the artefact is complete."""


class OtherVersion(TsaeError):
    """An artefact that another version of tsae wrote, which this one does not read."""


def _check_store(path: Path) -> bool:
    manifest = read_object(path / "manifest.json", AGAIN)
    version = manifest.get("version")
    if manifest.get("format") == STORE_FORMAT and isinstance(version, int) and version != STORE_VERSION:
        raise OtherVersion(f"is a store of version {version}, this tsae reads {STORE_VERSION}", where=path, fix=AGAIN)
    damages = check_store(path)
    if damages:
        more = f" (and {len(damages) - 1} more)" if len(damages) > 1 else ""
        raise TsaeError(f"{damages[0].what}{more}", where=path / damages[0].file, fix=AGAIN)
    run = path / "run.json"
    if read_manifest(path)["complete"]:
        read_sealed(run, AGAIN)
    return check_parquet(path / "rollouts.parquet", AGAIN)


def _check_sae(path: Path) -> bool:
    if (path / "config.json").is_file():
        check_seal(path, AGAIN)
        found = read_object(path / "config.json", AGAIN).get("format")
        if found != SAE_FORMAT:
            raise OtherVersion(f"has the format {found}, this tsae reads {SAE_FORMAT}", where=path, fix=AGAIN)
    info = read_object(path / "training.json", AGAIN) if (path / "training.json").is_file() else {}
    (Crosscoder if OF_PAIR in info else TemporalSAE).load(path)
    return (path / SEAL).is_file()


def _check_tables(path: Path) -> None:
    check_seal(path, AGAIN)
    for file in path.glob("*.parquet"):
        with reading(file, AGAIN):
            pd.read_parquet(file)


def _check_evaluation(path: Path) -> None:
    found = read_sealed(path / "evaluation.json", AGAIN)
    with reading(path / "evaluation.json", AGAIN):
        Evaluation.from_dict(found)


def _check_rollouts(path: Path) -> bool:
    sealed = check_parquet(path, AGAIN)
    Rollouts.read(path)
    return sealed


def _check_parquet(path: Path) -> bool:
    sealed = check_parquet(path, AGAIN)
    with reading(path, AGAIN):
        pq.ParquetFile(path).close()
    return sealed


FOLDERS = (
    Kind("store", 2, ("manifest.json", "rollouts.parquet"), _check_store),
    Kind("features", 4, ("features.json", "features.h5", "columns.h5", "means.h5"), FeatureTable.load,
         ("pieces",)),
    Kind("SAE", 3, ("config.json", "sae.safetensors", "training.json", CONFIG_FILE), _check_sae, ("checkpoint",)),
    Kind("diff", 5, ("diff.json", "shifts.parquet", "contrasts.parquet"), FeatureDiff.load),
    Kind("attribution", 7, ("attribution.json", "facts.parquet"), Attribution.load),
    Kind("causal test", 6, ("causal.json", "outcomes.parquet"), Intervention.load),
    Kind("explanations", 6, (EXPLANATIONS, "explanations.parquet"), Explanations.load, ("answers.jsonl",)),
    Kind("influence", 6, ("influence.json", "influence.parquet"), Influence.load),
    Kind("credit", 6, ("credit.json", "credit.safetensors"), Credit.load),
    Kind("reinforcement", 6, ("reinforcement.parquet", "groups.parquet"), _check_tables),
    Kind("evaluation", 4, ("evaluation.json",), _check_evaluation),
)  # fmt: skip
"""Kinds of folders. The first that fits is taken."""
TABLES = Kind("tables", 6, (SEAL,), _check_tables)
"""Any other folder with a seal."""
STAMP = Kind("run", 0, (), lambda path: read_sealed(path, AGAIN))
ROLLOUTS = Kind("rollouts", 1, (), _check_rollouts)
PARQUET = Kind("table", 6, (), _check_parquet)
CLAIMS = Kind("claims", 8, (), lambda path: Claims.load(path.parent))
PAGE = Kind("page", 9, (), check_page)


def kind_of_folder(path: Path) -> Kind | None:
    """The kind of artefact in a folder; None where there is none."""
    known = _names(path)
    for kind in FOLDERS:
        if any(mark in known for mark in kind.marks) and _fits(kind, path, known):
            return kind
    return TABLES if SEAL in known else None


def _names(path: Path) -> set[str]:
    """The files in a folder, and those that its seal says were there."""
    found = {file.name for file in path.iterdir() if file.is_file()}
    try:
        return found | set(sealed_names(path))
    except TsaeError:
        return found


def _fits(kind: Kind, path: Path, known: set[str]) -> bool:
    """Whether a folder with a mark of a kind is of that kind, where other folders may have files of that name."""
    if kind.name == "store":
        mine = _says(path / "manifest.json", "sites") or _says(path / "run.json", "stage", "capture")
        return mine or ("manifest.json" in known and any(path.glob("*/*.h5")))
    if kind.name == "SAE":
        # A checkpoint of a model has a config.json too.
        return "sae.safetensors" in known or CONFIG_FILE in known or _says(path / "config.json", "format", SAE_FORMAT)
    if kind.name == "attribution":
        return "attribution.json" in known or {"groups.parquet", "facts.parquet"} <= known
    return True


def _says(file: Path, key: str, value: Any = None) -> bool:
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and key in found and value in (None, found[key])


def kind_of_file(path: Path) -> Kind | None:
    """The kind of a lone file; None where tsae did not write it, as far as can be seen."""
    if path.name in STAMPS and (_says(path, STAMPS[path.name]) or path.with_name(f".{path.name}.copy").is_file()):
        return STAMP
    if path.name == CLAIMS_FILE and any((path.parent / name).is_file() for name in STAMPS):
        return CLAIMS
    if path.suffix == ".parquet":
        try:
            told = (pq.read_schema(path).metadata or {}).get(b"tsae")
            known = {} if told is None else parse_json(told)
        except (OSError, ValueError, pa.ArrowException):
            return ROLLOUTS if path.name in ("rollouts.parquet", "log.parquet") else PARQUET
        if told is None:
            return None
        return PARQUET if isinstance(known, dict) and "kind" in known else ROLLOUTS
    return PAGE if path.suffix == ".html" and is_page(path) else None
