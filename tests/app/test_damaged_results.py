"""Results on disk, damaged in every way that is known: each is refused by name, none is read as if it were whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from support.builders import make_rollouts
from support.planted import planted, small_credit
from support.refusals import refuses
from support.results import make_attribution
from tsae.attribution.attribution import Attribution
from tsae.base.artefact import MANIFEST, write_artefact
from tsae.base.files import read_object, reading
from tsae.causal.intervention import CAUSAL, Intervention
from tsae.commands.diff import REINFORCEMENT
from tsae.commands.report import Report
from tsae.diff.config import DiffConfig
from tsae.diff.feature_diff import FeatureDiff, feature_diff
from tsae.diff.influence import Influence
from tsae.errors import TsaeError
from tsae.features.feature_table import FeatureTable
from tsae.rl.credit import Credit
from tsae.rollouts.parquet import read_outline
from tsae.rollouts.table import Rollouts

QUICK = DiffConfig(n_bootstrap=100, n_permutations=100, threads=1)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of every kind."""
    folder = tmp_path_factory.mktemp("results")
    world = planted(n_problems=12, n_samples=4).table
    world.save(folder / "features")
    feature_diff(world, QUICK, progress=False).save(folder / "diff")
    sample = {"trajectory": 0, "problem_id": "p", "feature": 3, "representation": 1.0, "policy_part": 0.5, "total": 1.5}
    Influence(pd.DataFrame([sample]), {"checkpoint": "run"}).save(folder / "influence")
    small_credit().save(folder / "credit")
    make_attribution().save(folder / "attribution")
    return folder


LOADERS: dict[str, Callable[[Path], Any]] = {
    "features": FeatureTable.load,
    "diff": FeatureDiff.load,
    "influence": Influence.load,
    "credit": Credit.load,
    "attribution": Attribution.load,
}
FILES = [
    ("features", "features.json"), ("features", "rollouts.parquet"), ("features", "means.h5"),
    ("diff", "diff.json"), ("diff", "shifts.parquet"), ("diff", "confounds.parquet"),
    ("influence", "influence.json"), ("influence", "influence.parquet"),
    ("credit", "credit.json"), ("credit", "credit.safetensors"),
    ("attribution", "attribution.json"), ("attribution", "steps.parquet"),
]  # fmt: skip


def damages(file: Path) -> dict[str, Callable[[], Any]]:
    whole = file.read_bytes()
    middle = len(whole) // 2

    def folder() -> None:
        file.unlink()
        file.mkdir()

    return {
        "empty": lambda: file.write_bytes(b""),
        "cut": lambda: file.write_bytes(whole[:middle]),
        "zeros": lambda: file.write_bytes(whole[:middle] + bytes(min(64, middle)) + whole[middle + min(64, middle) :]),
        "no text": lambda: file.write_bytes(b"\xff\xfe\x00" + whole),
        "a list": lambda: file.write_bytes(b"[1]"),
        "other object": lambda: file.write_bytes(b'{"a": 1}'),
        "a folder": folder,
        "gone": file.unlink,
    }


DAMAGES = ("empty", "cut", "zeros", "no text", "a list", "other object", "a folder", "gone")
CASES = [(*file, damage) for file in FILES for damage in DAMAGES]
CASES += [(kind, MANIFEST, "gone") for kind in LOADERS]


@pytest.mark.parametrize(("kind", "name", "damage"), CASES)
def test_what_is_damaged_is_refused(kind: str, name: str, damage: str, results: Path, tmp_path: Path) -> None:
    shutil.copytree(results / kind, folder := tmp_path / kind)
    LOADERS[kind](folder)
    damages(folder / name)[damage]()
    with pytest.raises(TsaeError) as refused:
        LOADERS[kind](folder)
    assert name in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_table_that_came_later_is_no_part_of_a_diff(results: Path, tmp_path: Path) -> None:
    """Another diff's table in the folder would become a section of the page."""
    shutil.copytree(results / "diff", folder := tmp_path / "diff")
    pd.DataFrame({"checkpoint": ["x"]}).to_parquet(folder / "dynamics.parquet")
    refuses(r"holds dynamics\.parquet, which is not of this artefact", FeatureDiff.load, folder)


def test_rollouts_with_damaged_metadata(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    rollouts = make_rollouts(n_problems=2)
    table = rollouts.table.replace_schema_metadata({b"tsae": b"{not JSON"})
    pq.write_table(table, tmp_path / "rollouts.parquet")
    refuses(r"rollouts\.parquet: cannot be read", Rollouts.read, tmp_path / "rollouts.parquet")
    (tmp_path / "rollouts.parquet").write_bytes(b"PAR1")
    refuses(r"rollouts\.parquet: cannot be read", read_outline, tmp_path / "rollouts.parquet")


def pushed_folder(folder: Path, content: dict[str, str]) -> None:
    write_artefact(folder, REINFORCEMENT, content, there=["reinforcement.parquet", "predicted.parquet"])


def test_tables_of_reinforcement_for_a_report(results: Path, tmp_path: Path) -> None:
    for name in ("reinforcement", "predicted"):
        (tmp_path / f"{name}.parquet").write_bytes(b"PAR1")
    pushed_folder(tmp_path, {})
    options = Report(diff=results / "diff", to=tmp_path / "page.html", reinforcement=tmp_path)
    refuses("cannot be read", options.execute)


def test_results_of_another_run_are_no_part_of_a_report(results: Path, tmp_path: Path) -> None:
    """The page showed the other run's examples and predictions beside this run's differences."""
    planted(n_problems=12, n_samples=4, seed=1).table.save(tmp_path / "features")
    FeatureDiff.load(results / "diff", features=FeatureTable.load(results / "features"))
    options = Report(diff=results / "diff", to=tmp_path / "page.html", features=tmp_path / "features")
    refuses("drawn from other features", options.execute)
    table = FeatureTable.load(results / "features")
    judged = table.rollouts.with_column("outcome", ["success"] * len(table.rollouts))
    with pytest.raises(TsaeError, match=r"drawn from other features \(of other labels\)"):
        FeatureDiff.load(results / "diff", features=replace(table, rollouts=judged))
    pushed = tmp_path / "pushed"
    for name in ("reinforcement", "predicted"):
        (pushed / f"{name}.parquet").parent.mkdir(exist_ok=True)
        pd.DataFrame({"a": [1]}).to_parquet(pushed / f"{name}.parquet")
    pushed_folder(pushed, {"labels": "others"})
    refuses("is of other labels than the diff", replace(options, features=None, reinforcement=pushed).execute)
    pushed_folder(pushed, {})
    (pushed / MANIFEST).unlink()
    refuses(r"manifest\.json is missing", replace(options, features=None, reinforcement=pushed).execute)
    pushed_folder(pushed, {"rollouts": "others"})
    refuses("is of other rollouts than the diff", replace(options, features=None, reinforcement=pushed).execute)


def closed(folder: Path) -> None:
    write_artefact(folder, CAUSAL, None, there=["causal.json", "outcomes.parquet", "rollouts.parquet"])


def test_a_causal_test_of_nothing(tmp_path: Path) -> None:
    make_rollouts(n_problems=2).write(tmp_path / "rollouts.parquet")
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "outcomes.parquet")
    for content, said in (("[]", "expected an object"), ("{", "cannot be read")):
        (tmp_path / "causal.json").write_text(content)
        closed(tmp_path)
        refuses(said, Intervention.load, tmp_path)
    (tmp_path / "causal.json").write_text('{"record": {"a": 1}}')
    (tmp_path / "outcomes.parquet").write_bytes(b"")
    closed(tmp_path)
    refuses(r"outcomes\.parquet: cannot be read", Intervention.load, tmp_path)


@pytest.mark.parametrize("error", [ValueError("a\nb"), KeyError("x"), IndexError(), EOFError(), OSError(5, "I/O")])
def test_one_line_says_which_file(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(TsaeError) as refused, reading(tmp_path / "file", "Mend it."):
        raise error
    assert str(refused.value).startswith(f"{tmp_path / 'file'}: cannot be read (")
    assert "\n" not in str(refused.value)


def test_errors_that_are_no_damage_pass(tmp_path: Path) -> None:
    with pytest.raises(TsaeError, match="my own"), reading(tmp_path, "Mend it."):
        raise TsaeError("my own", where="here")
    with pytest.raises(KeyboardInterrupt), reading(tmp_path, "Mend it."):
        raise KeyboardInterrupt
    (tmp_path / "a.json").write_text('{"b": 1}')
    assert read_object(tmp_path / "a.json", "Mend it.") == {"b": 1}
