"""A byte that flips in what a stage reads is found by name, in files that no folder's seal names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.builders import synthetic_store
from support.damage import flip
from tsae.activations.store import ActivationStore
from tsae.base.artefact import write_record
from tsae.errors import TsaeError
from tsae.rollouts.sampling import Batches, Response
from tsae.stamps import add_found, claim, read_stamp


def test_a_changed_manifest_is_refused(tmp_path: Path) -> None:
    store = synthetic_store(tmp_path / "acts", [np.ones((4, 3), np.float32) for _ in range(3)])
    file = store.path / "manifest.json"
    write_record(file, store.manifest)
    assert ActivationStore(store.path).manifest == store.manifest
    file.write_text(file.read_text().replace('"step": 0', '"step": 7'))
    with pytest.raises(TsaeError, match=r"manifest\.json: is damaged: its content has changed"):
        ActivationStore(store.path)


def test_a_changed_copy_of_the_rollouts_is_refused(tmp_path: Path) -> None:
    store = synthetic_store(tmp_path / "acts", [np.ones((4, 3), np.float32) for _ in range(3)])
    flip(store.path / "rollouts.parquet", 200)
    with pytest.raises(TsaeError, match=r"rollouts\.parquet: is damaged: its bytes have changed"):
        _ = ActivationStore(store.path).rollouts


def test_a_changed_batch_of_a_sampling_is_refused(tmp_path: Path) -> None:
    batches = Batches(tmp_path, "base", {"seed": 0})
    batches.add(0, [Response((1, 2), "stop", (-0.5, -0.25))])
    assert batches.read(0) == [Response((1, 2), "stop", (-0.5, -0.25))]
    file = tmp_path / "base" / "000000.json"
    file.write_text(file.read_text().replace("-0.25", "-0.75"))
    with pytest.raises(TsaeError, match=r"000000\.json: is damaged"):
        batches.read(0)


def test_a_stage_is_added_to_a_run_that_left_it_out(tmp_path: Path) -> None:
    def asked(causal: bool, **more: Any) -> dict[str, Any]:
        return {"run": {"seed": 0, "causal": causal, "tests": {"problems": 8}, **more}}

    adds = ("causal", "tests")
    claim(tmp_path, "run.json", asked(False), "an analysis", adds)
    page = tmp_path / "report.html"
    page.write_text("page")
    claim(tmp_path, "run.json", asked(False), "an analysis", adds)
    assert page.is_file()
    with pytest.raises(TsaeError, match="holds something else"):
        claim(tmp_path, "run.json", asked(True, seed=1), "an analysis", adds)
    add_found(tmp_path, "run.json", {"second_look": 3})
    claim(tmp_path, "run.json", asked(True, tests={"problems": 9}), "an analysis", adds)
    assert page.is_file()  # until there is a test that it does not show
    add_found(tmp_path, "run.json", {"causal": ["one"]})
    claim(tmp_path, "run.json", asked(True, tests={"problems": 9}), "an analysis", adds)
    told = {"found": {"second_look": 3, "causal": ["one"]}}
    assert read_stamp(tmp_path, "run.json") == {**asked(True, tests={"problems": 9}), **told}
    for other, fix in (
        (asked(False), "asked for --causal"),
        (asked(True, tests={"problems": 7}), "Delete that folder"),
    ):
        with pytest.raises(TsaeError, match=f"holds something else.*{fix}"):
            claim(tmp_path, "run.json", other, "an analysis", adds)


def test_a_corrected_setting_of_a_stage_that_made_nothing_is_taken(tmp_path: Path) -> None:
    claim(tmp_path, "run.json", {"run": {"site": "wrong", "tokens": 9}}, "an analysis")
    (tmp_path / "rollouts").mkdir()
    wanted = {"run": {"site": "blocks.1.hook_resid_post", "tokens": 9}}
    with pytest.raises(TsaeError, match="holds something else"):
        claim(tmp_path, "run.json", wanted, "an analysis")
    with pytest.raises(TsaeError, match="holds something else"):
        claim(tmp_path, "run.json", {"run": {**wanted["run"], "tokens": 8}}, "an analysis", later=("site",))
    claim(tmp_path, "run.json", wanted, "an analysis", later=("site",))
    assert read_stamp(tmp_path, "run.json") == wanted


def test_a_changed_stamp_is_refused(tmp_path: Path) -> None:
    claim(tmp_path, "demo.json", {"demo": {"seed": 0}}, "a demo")
    claim(tmp_path, "demo.json", {"demo": {"seed": 0}}, "a demo")
    assert read_stamp(tmp_path, "demo.json") == {"demo": {"seed": 0}}
    file = tmp_path / "demo.json"
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 1'))
    for seed in (0, 1):
        with pytest.raises(TsaeError, match=r"demo\.json: is damaged"):
            claim(tmp_path, "demo.json", {"demo": {"seed": seed}}, "a demo")
