"""Tables of results for pandas, polars and Parquet."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pandas as pd
import pytest

from support.builders import make_rollouts
from support.refusals import refuses
from support.results import make, make_attribution
from tsae.attribution.influence import Influence
from tsae.base.files import append_line


def test_every_table_goes_to_pandas_and_parquet(tmp_path: Path) -> None:
    diff, attribution, rollouts = make(), make_attribution(), make_rollouts(n_problems=3)
    pd.testing.assert_frame_equal(diff.to_pandas(), diff.shifts)
    named = diff.to_pandas("features")
    assert named.feature.tolist() == list(range(6))
    named["group"] = "changed"
    assert "changed" not in set(diff.features.group)
    for result, tables in ((diff, ("shifts", "features", "contrasts")), (attribution, ("targets", "groups"))):
        for table in tables:
            read = pd.read_parquet(result.to_parquet(tmp_path / "t.parquet", table))
            pd.testing.assert_frame_equal(read, result.to_pandas(table), check_dtype=False)
    assert rollouts.to_pandas().policy.tolist() == rollouts.table["policy"].to_pylist()
    assert len(pd.read_parquet(rollouts.to_parquet(tmp_path / "r.parquet"))) == len(rollouts)
    refuses(r"FeatureDiff has no table 'dynamics'; there are shifts, contrasts, features", diff.to_pandas, "dynamics")


def test_a_table_takes_a_links_place_and_does_not_follow_it(tmp_path: Path) -> None:
    attribution, diff = make_attribution(), make()
    influence = Influence(pd.DataFrame({"trajectory": [0]}), {"checkpoint": "run"})
    for number, (result, file) in enumerate(
        ((attribution, "targets"), (diff, "shifts"), (diff, "features"), (influence, "influence"))
    ):
        victim, folder = tmp_path / "victim", tmp_path / str(number)
        victim.write_text("precious")
        folder.mkdir()
        (folder / f"{file}.parquet").symlink_to(victim)
        result.save(folder)
        assert victim.read_text() == "precious"
        assert len(pd.read_parquet(folder / f"{file}.parquet"))


def test_a_line_is_a_line_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "new" / "lines.jsonl"
    for line in ("a", "b"):
        append_line(file, line, "Make room.")
    file.write_bytes(file.read_bytes() + b'{"torn')
    append_line(file, "c", "Make room.")
    assert file.read_text() == 'a\nb\n{"torn\nc\n'
    (tmp_path / "link").symlink_to(file)
    refuses("link: is a link, expected a file", append_line, tmp_path / "link", "d", "Make room.")
    refuses(r"cannot be written to .*Make room", append_line, tmp_path, "d", "Make room.")


def test_polars_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    refuses(r"a table for polars needs polars.*pip install 'polars", lambda: make().to_polars())


@pytest.mark.skipif(importlib.util.find_spec("polars") is None, reason="polars is not installed")
def test_tables_go_to_polars() -> None:
    diff = make()
    found = diff.to_polars("features")
    assert found.columns == list(diff.to_pandas("features").columns)
    assert found["top_tokens"].to_list() == [list(tokens) for tokens in diff.features.top_tokens]
