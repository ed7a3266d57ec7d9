"""Results on disk, damaged in every way that is known: each is refused by name, none is read as if it were whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from support.builders import make_rollouts, synthetic_store
from support.damage import flip
from support.planted import planted
from support.refusals import refuses
from tsae.activations.store import ActivationStore
from tsae.attribution.attribution import Attribution
from tsae.attribution.influence import Influence
from tsae.base.artefact import MANIFEST, write_artefact, write_record
from tsae.base.files import read_object, reading
from tsae.causal.intervention import CAUSAL, Intervention
from tsae.commands.diff import REINFORCEMENT
from tsae.commands.report import Report
from tsae.diff.feature_diff import FeatureDiff
from tsae.errors import TsaeError
from tsae.features.feature_table import FeatureTable
from tsae.rl.credit import Credit
from tsae.rollouts.parquet import read_outline
from tsae.rollouts.sampling import Batches, Response
from tsae.rollouts.table import Rollouts
from tsae.stages import RunRecord, read_run

LOADERS: dict[str, Callable[[Path], Any]] = {
    "features": FeatureTable.load,
    "diff": FeatureDiff.load,
    "influence": Influence.load,
    "credit": Credit.load,
    "attribution": Attribution.load,
}
DAMAGES: tuple[Callable[[Path], object], ...] = (
    lambda file: file.write_bytes(b""),
    lambda file: file.write_bytes(file.read_bytes()[:-9]),
    lambda file: flip(file, file.stat().st_size // 2),
    lambda file: file.write_bytes(b"\xff\xfe\x00"),
    lambda file: file.write_bytes(b"[1]"),
    lambda file: file.write_bytes(b'{"a": 1}'),
    lambda file: (file.unlink(), file.mkdir()),
    Path.unlink,
)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", LOADERS)
def test_what_is_damaged_is_refused(kind: str, damage: Callable[[Path], Any], results: Path, tmp_path: Path) -> None:
    names = [file.name for file in (results / kind).iterdir()]
    assert MANIFEST in names
    for name in names:
        folder = shutil.copytree(results / kind, tmp_path / name)
        LOADERS[kind](folder)
        damage(folder / name)
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
    options = replace(options, features=None, reinforcement=pushed)
    refuses("is of other labels than the diff", options.execute)
    pushed_folder(pushed, {})
    (pushed / MANIFEST).unlink()
    refuses(r"manifest\.json is missing", options.execute)
    pushed_folder(pushed, {"rollouts": "others"})
    refuses("is of other rollouts than the diff", options.execute)
    (pushed / "reinforcement.parquet").write_bytes(b"PAR1")
    pushed_folder(pushed, {})
    refuses("cannot be read", options.execute)


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


# --- a byte that flips in files that no folder's seal names


def test_a_changed_manifest_is_refused(tmp_path: Path) -> None:
    store = synthetic_store(tmp_path / "acts", [np.ones((4, 3), np.float32) for _ in range(3)])
    file = store.path / "manifest.json"
    write_record(file, store.manifest)
    assert ActivationStore(store.path).manifest == store.manifest
    file.write_text(file.read_text().replace('"step": 0', '"step": 7'))
    refuses(r"manifest\.json: is damaged: its content has changed", ActivationStore, store.path)


def test_a_changed_copy_of_the_rollouts_is_refused(tmp_path: Path) -> None:
    store = synthetic_store(tmp_path / "acts", [np.ones((4, 3), np.float32) for _ in range(3)])
    flip(store.path / "rollouts.parquet", 200)
    with pytest.raises(TsaeError, match=r"rollouts\.parquet: is damaged: its bytes have changed"):
        _ = ActivationStore(store.path).rollouts


def test_a_changed_batch_of_a_sampling_is_refused(tmp_path: Path) -> None:
    batches = Batches(tmp_path, "base", {"seed": 0})
    batches[0] = [Response((1, 2), "stop", (-0.5, -0.25))]
    assert batches[0] == [Response((1, 2), "stop", (-0.5, -0.25))]
    file = tmp_path / "base" / "000000.json"
    file.write_text(file.read_text().replace("-0.25", "-0.75"))
    with pytest.raises(TsaeError, match=r"000000\.json: is damaged"):
        batches[0]


def test_a_changed_record_of_a_run_is_refused(tmp_path: Path) -> None:
    asked = {"demo": {"seed": 0}, "versions": {}}
    for _ in range(2):
        RunRecord(tmp_path, "demo.json", asked, "a demo")
    assert (read_run(tmp_path, "demo.json") or {})["demo"] == {"seed": 0}
    with pytest.raises(TsaeError, match=r"holds something else than a demo .*differing: versions"):
        RunRecord(tmp_path, "demo.json", {**asked, "versions": {"torch": "9"}}, "a demo")
    file = tmp_path / "demo.json"
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 1'))
    refuses(r"demo\.json: is damaged", RunRecord, tmp_path, "demo.json", asked, "a demo")
