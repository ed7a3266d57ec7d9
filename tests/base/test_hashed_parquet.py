"""The checksum inside of a Parquet file: no byte of it changes unseen, and every reader of Parquet reads it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.builders import make_rollouts
from support.refusals import refuses
from tsae.base.hashed_parquet import add_hash, check_parquet
from tsae.rollouts.parquet import read_outline
from tsae.rollouts.table import Rollouts


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    return make_rollouts().write(tmp_path / "rollouts.parquet")


def test_every_bit_that_flips_is_found_or_says_that_nothing_can_be_read(rollouts: Path, tmp_path: Path) -> None:
    whole = Rollouts.read(rollouts)
    content = rollouts.read_bytes()
    rng = np.random.default_rng(0)
    places = {*range(len(content) - 60, len(content)), *rng.integers(0, len(content), 150).tolist()}
    for place in sorted(places):
        changed = bytearray(content)
        changed[place] ^= 1 << int(rng.integers(8))
        # Another name each time: a file that is written again within a tick of the clock looks unchanged.
        (other := tmp_path / f"{place}.parquet").write_bytes(changed)
        refuses(rf"{place}\.parquet", Rollouts.read, other)
        refuses(rf"{place}\.parquet", read_outline, other)
    assert Rollouts.read(rollouts).table.equals(whole.table)


def test_other_readers_read_it_and_what_they_write_is_read(rollouts: Path, tmp_path: Path) -> None:
    assert check_parquet(rollouts, "")
    assert len(pd.read_parquet(rollouts)) == len(Rollouts.read(rollouts))
    copy = tmp_path / "copy.parquet"
    pq.write_table(pq.read_table(rollouts), copy)
    assert not check_parquet(copy, "")
    assert Rollouts.read(copy).table.equals(Rollouts.read(rollouts).table)


def test_files_without_rows_or_dictionaries_carry_one_too(tmp_path: Path) -> None:
    for number, table in enumerate((pa.table({"a": pa.array([], pa.int32())}), pa.table({"a": [1.5, 2.5]}))):
        file = tmp_path / f"{number}.parquet"
        pq.write_table(table, file, use_dictionary=False)
        plain = file.read_bytes()
        assert not check_parquet(file, "")
        add_hash(file)
        assert check_parquet(file, "")
        assert pq.read_table(file).equals(table)
        changed = tmp_path / f"changed-{number}.parquet"
        changed.write_bytes(file.read_bytes().replace(b"tsae:xxh3", b"tsae:xxh4"))
        refuses("bytes have changed", check_parquet, changed, "")
        (again := tmp_path / f"again-{number}.parquet").write_bytes(plain)
        assert not check_parquet(again, "")
