"""A byte that flips in what a stage reads is found by name, in files that no folder's seal names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.builders import synthetic_store
from support.damage import flip
from support.refusals import refuses
from tsae.activations.store import ActivationStore
from tsae.base.artefact import write_record
from tsae.errors import TsaeError
from tsae.rollouts.sampling import Batches, Response
from tsae.stages import RunRecord, read_run


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
